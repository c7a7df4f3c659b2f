//! Memory: the anonymous part of the resident set of a fresh process before and after one side has taken the tape. The
//! other part is program text, which the first event brings in and no block adds to.

use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};

use crate::args::{MemoryArgs, Side, TapeArgs};
use crate::failure::Failure;
use crate::ours::{Feed, Ours};
use crate::peer;
use crate::tape::Tape;

/// Batches that are in the side's types at a time, so that their memory is not mistaken for the index's.
const WINDOW_BATCHES: usize = 16;
/// Makes mimalloc give back at once what is freed, on both sides: what remains is what is used. It must not allocate from
/// arenas either, which have huge pages: a freed part of one leaves memory behind that was never allocated.
const ALLOCATOR_SETTINGS: [(&str, &str); 2] = [("MIMALLOC_PURGE_DELAY", "0"), ("MIMALLOC_DISALLOW_ARENA_ALLOC", "1")];

/// What a side needs for what it holds.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Memory {
    /// Growth of the anonymous part of the resident set.
    pub(crate) anonymous_bytes: u64,
    /// What the index says of itself, if it does.
    pub(crate) accounted_bytes: Option<u64>,
}

/// Bytes of this process that are in memory.
///
/// # Errors
/// The system does not say.
pub(crate) fn rss_bytes() -> Result<u64, Failure> {
    rss_bytes_of(std::process::id())
}

/// Bytes of a process that are in memory.
///
/// # Errors
/// It is gone.
pub(crate) fn rss_bytes_of(process: u32) -> Result<u64, Failure> {
    status_bytes(process, "VmRSS:")
}

/// Of the bytes of this process that are in memory, those that no file backs.
fn anonymous_bytes() -> Result<u64, Failure> {
    status_bytes(std::process::id(), "RssAnon:")
}

fn status_bytes(process: u32, key: &str) -> Result<u64, Failure> {
    let file = format!("/proc/{process}/status");
    let status = std::fs::read_to_string(&file).map_err(Failure::file(&file))?;
    bytes_of(&status, key).ok_or_else(|| Failure::Child(format!("no {key} in the status of a process")))
}

fn bytes_of(status: &str, key: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(key))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

/// Measures one side in a child process of this same binary.
///
/// # Errors
/// The child does not start, or fails.
pub(crate) fn measure(side: Side, tape: &TapeArgs, shards: u16) -> Result<Memory, Failure> {
    let own = std::env::current_exe().map_err(Failure::system("find this program"))?;
    let output = Command::new(own)
        .args(["memory", "--side", side.name(), "--shards", &shards.to_string()])
        .args(tape.command_line())
        .envs(ALLOCATOR_SETTINGS)
        .stderr(Stdio::inherit())
        .output()
        .map_err(Failure::system("start a child process"))?;
    if !output.status.success() {
        return Err(Failure::Child(format!("ended with {}", output.status)));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| Failure::Child(error.to_string()))
}

/// The child's part.
///
/// # Errors
/// The tape cannot be made, or a side fails.
pub(crate) fn run(args: &MemoryArgs) -> Result<Memory, Failure> {
    let tape = Tape::new(&args.tape)?;
    let windows = (0..tape.script.batches()).step_by(WINDOW_BATCHES);
    let windows = windows.map(|start| start..tape.script.batches().min(start + WINDOW_BATCHES));
    let before = anonymous_bytes()?;
    match args.side {
        Side::Kvrouted => {
            let mut index = Ours::new(args.tape.workers, args.shards)?;
            for window in windows {
                let feed = Feed::new(&tape.nodes, &tape.script.slice(window));
                index.apply(&feed, 0..feed.batches());
            }
            let anonymous_bytes = anonymous_bytes()?.saturating_sub(before);
            Ok(Memory { anonymous_bytes, accounted_bytes: index.accounted_bytes() })
        }
        Side::Peer => {
            let events = windows.flat_map(|window| peer::events(&tape.nodes, &tape.script, window));
            let after = peer::hold(events, anonymous_bytes)?;
            Ok(Memory { anonymous_bytes: after.saturating_sub(before), accounted_bytes: None })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_resident_set_is_read() {
        let status = "VmPeak:\t 9 kB\nVmRSS:\t    1234 kB\nRssAnon:\t  1000 kB\nThreads: 1\n";
        assert_eq!(bytes_of(status, "VmRSS:"), Some(1234 * 1024));
        assert_eq!(bytes_of(status, "RssAnon:"), Some(1000 * 1024));
        assert_eq!(bytes_of("Threads: 1\n", "VmRSS:"), None);
        let (all, anonymous) = (rss_bytes().expect("this is Linux"), anonymous_bytes().expect("this is Linux"));
        assert!(anonymous > 1 << 20 && all > anonymous, "{anonymous} of {all}");
    }
}
