//! Standard error as the log's writer: it never fails, and never waits for its reader.
//!
//! A log whose disk is full, or whose reader has ended or stands still, must not stop a thread that serves. What cannot be
//! written at once is lost; the next line that can be written says how many were.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::limits::LOG_WRITE_BYTES;

/// Lines that no reader has got, since the last one that was written.
static LOST: AtomicU64 = AtomicU64::new(0);

/// See the head of the file. Each line comes in one call, as `tracing_subscriber` writes it.
#[derive(Clone, Copy, Debug, Default)]
pub struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut stderr = io::stderr().lock();
        // Relaxed: the lock orders those who count.
        let mut lost = LOST.load(Ordering::Relaxed);
        if lost > 0 {
            let gap = format!("{lost} lines of the log are lost: its reader or its disk did not take them\n");
            lost = if write_at_once(&mut stderr, gap.as_bytes()) { 0 } else { lost };
        }
        let is_written = lost == 0 && write_at_once(&mut stderr, line);
        LOST.store(if is_written { 0 } else { lost + 1 }, Ordering::Relaxed);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether all of it was written without a wait. A line that is cut has no end.
fn write_at_once(out: &mut (impl Write + AsFd), line: &[u8]) -> bool {
    let mut pieces = line.chunks(LOG_WRITE_BYTES);
    pieces.all(|piece| takes_more(out) && out.write_all(piece).is_ok())
}

/// Whether a write of [`LOG_WRITE_BYTES`] does not wait. Files never do, by this measure.
fn takes_more(out: &impl AsFd) -> bool {
    let mut ready = [PollFd::new(out, PollFlags::OUT)];
    poll(&mut ready, Some(&Timespec::default())).is_ok_and(|count| count > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_pipe_takes_nothing_and_never_waits() {
        let (reader, mut writer) = io::pipe().expect("a pipe");
        let line = [b'x'; 3 * LOG_WRITE_BYTES];
        let mut written = 0;
        while write_at_once(&mut writer, &line) {
            written += 1;
            assert!(written < 10_000, "a pipe without an end");
        }
        assert!(written > 0, "an empty pipe takes a line");
        drop(reader);
        assert!(!write_at_once(&mut writer, &line), "nor does a broken one");
    }
}
