//! File descriptors: room for every publisher and client is made at boot.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::limits::{DESCRIPTORS_PER_CONNECTION, DESCRIPTORS_PER_PUBLISHER};

/// Descriptors kept for everything that is neither a publisher nor a gateway's connection: files, listeners, contexts, HTTP.
const DESCRIPTORS_RESERVED: u64 = 512;

/// What the limit allows after [`raise`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptors {
    /// The soft limit now.
    pub limit: u64,
    /// How many publishers fit under it. Those beyond must be refused by name before they are opened.
    pub publishers_max: usize,
}

/// Raises this process's soft limit to what `publishers` publishers and `connections` client connections need,
/// as far as the hard limit allows. Never lowers it.
#[must_use]
pub fn raise(publishers: usize, connections: usize) -> Descriptors {
    let held = getrlimit(Resource::Nofile);
    let reserved = DESCRIPTORS_RESERVED.saturating_add((connections as u64).saturating_mul(DESCRIPTORS_PER_CONNECTION));
    let wanted = reserved.saturating_add((publishers as u64).saturating_mul(DESCRIPTORS_PER_PUBLISHER));
    let limit = target(held.current, held.maximum, wanted);
    let raised = held.current.is_none_or(|current| current >= limit)
        || setrlimit(Resource::Nofile, Rlimit { current: Some(limit), maximum: held.maximum }).is_ok();
    let limit = if raised { limit } else { held.current.unwrap_or(limit) };
    Descriptors { limit, publishers_max: fitting(limit, reserved) }
}

/// Open files that a daemon with so many publishers needs beside its connections.
#[must_use]
pub fn needed(publishers: usize) -> u64 {
    DESCRIPTORS_RESERVED.saturating_add((publishers as u64).saturating_mul(DESCRIPTORS_PER_PUBLISHER))
}

/// The soft limit to ask for; `None` = unlimited.
fn target(current: Option<u64>, maximum: Option<u64>, wanted: u64) -> u64 {
    match current {
        None => u64::MAX,
        Some(current) => wanted.min(maximum.unwrap_or(u64::MAX)).max(current),
    }
}

fn fitting(limit: u64, reserved: u64) -> usize {
    usize::try_from(limit.saturating_sub(reserved) / DESCRIPTORS_PER_PUBLISHER).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_target_is_between_what_is_held_and_what_may_be() {
        assert_eq!(target(Some(1024), Some(4096), 2000), 2000);
        assert_eq!(target(Some(1024), Some(4096), 9000), 4096);
        assert_eq!(target(Some(1024), None, 9000), 9000);
        assert_eq!(target(Some(1024), Some(4096), 10), 1024);
        assert_eq!(target(None, None, 10), u64::MAX);
        assert_eq!(fitting(1024, 512), 256);
        assert_eq!(fitting(100, 512), 0);
    }

    #[test]
    fn raising_never_lowers() {
        let before = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let after = raise(1, 0);
        assert!(after.limit >= before);
        assert!(getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX) >= before);
    }
}
