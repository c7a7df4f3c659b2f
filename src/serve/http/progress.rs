//! Readers of replies: how far one may be behind, and the connection that fails once it is further.

use std::future::Future as _;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

use super::places::Activity;
use crate::limits::HTTP_REPLY_BYTES_PER_S_MIN;
use crate::metrics::{CounterSet, HttpCounter};

/// How long a connection may yet wait for its reader. Waiting uses it up, and bytes that were taken give some of it back: a
/// reader that keeps up with the least rate never runs out of it, and one that takes a byte now and then soon does.
#[derive(Debug)]
struct Progress {
    max: Duration,
    left: Duration,
    waits_since: Option<Instant>,
}

impl Progress {
    const fn new(max: Duration) -> Self {
        Self { max, left: max, waits_since: None }
    }

    /// When the reader is given up, if it takes nothing until then.
    fn deadline(&mut self, now: Instant) -> Instant {
        *self.waits_since.get_or_insert(now) + self.left
    }

    /// Since when the reader is behind, all that it was behind before included. It waits.
    fn behind_since(&mut self, now: Instant) -> Option<Instant> {
        self.deadline(now).checked_sub(self.max)
    }

    fn took(&mut self, bytes: usize, now: Instant) {
        let waited = self.waits_since.take().map_or(Duration::ZERO, |since| now.duration_since(since));
        let earned = Duration::from_micros(bytes as u64 * 1_000_000 / HTTP_REPLY_BYTES_PER_S_MIN);
        self.left = (self.left.saturating_sub(waited) + earned).min(self.max);
    }
}

/// A connection that fails once its reader is too far behind.
pub(super) struct Watched {
    stream: TcpStream,
    progress: Progress,
    /// When it fails, while there is something that is not taken.
    late: Option<Pin<Box<Sleep>>>,
    activity: Arc<Activity>,
    counters: Arc<CounterSet<HttpCounter>>,
}

impl Watched {
    pub(super) fn new(
        stream: TcpStream,
        patience: Duration,
        activity: Arc<Activity>,
        counters: Arc<CounterSet<HttpCounter>>,
    ) -> Self {
        Self { stream, progress: Progress::new(patience), late: None, activity, counters }
    }

    /// What came of an attempt to write.
    fn written(&mut self, cx: &mut Context<'_>, attempt: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        let now = Instant::now();
        if let Poll::Ready(written) = attempt {
            self.progress.took(*written.as_ref().unwrap_or(&0), now);
            if self.late.take().is_some() {
                self.activity.reader_is_behind(None);
            }
            return Poll::Ready(written);
        }
        let deadline = self.progress.deadline(now);
        if self.late.is_none() {
            self.activity.reader_is_behind(self.progress.behind_since(now));
        }
        let deadline = self.activity.reply_deadline().map_or(deadline, |reply| reply.min(deadline));
        let late = self.late.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
        if late.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        self.counters.bump(HttpCounter::ConnectionsStalled);
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Watched {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, into)
    }
}

impl AsyncWrite for Watched {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let attempt = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.written(cx, attempt)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let attempt = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        self.written(cx, attempt)
    }

    // With it hyper keeps the bytes of a reply where they are; without it hyper copies them for each connection.
    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_reader_at_the_least_rate_keeps_its_time() {
        let (begin, s) = (Instant::now(), Duration::from_secs(1));
        let mut progress = Progress::new(10 * s);
        for second in 0..100 {
            let now = begin + second * s;
            assert_eq!(progress.deadline(now), now + 10 * s, "it keeps up");
            progress.took(HTTP_REPLY_BYTES_PER_S_MIN as usize, now + s);
        }
        let mut now = begin;
        let mut waits = 0;
        while progress.deadline(now) > now + s {
            now += s;
            progress.took(1, now);
            waits += 1;
        }
        assert_eq!(waits, 10, "a byte a second is as good as none");
        assert!(progress.behind_since(now).is_some_and(|since| since <= now - 8 * s));
    }
}
