//! Replays: the sockets over which publishers are asked for lost batches, and whose turn it is to ask.
//!
//! When to ask and what an answer means is decided in [`crate::event::recovery`]; here is only who waits for whom.
//! A replay holds one of a few places of its shard from the question to its end. An engine drops, in the middle and
//! without a word, what its ROUTER cannot hand over at once, so the receiving side keeps everything (RCVHWM 0), and
//! what libzmq holds of an answer cannot be seen. Memory is bounded by what may be under way instead: a replay is
//! reckoned at what the worker's last one brought, or at what this one has brought already, and none is begun
//! while those that run are reckoned at the budget; one that brings too much is broken off, with all that libzmq holds
//! of it, and asked for again from where it stands. Between two turns of the live streams only a slice of each is taken.

mod client;

pub(super) use client::{Answer, ReplayClient};

use crate::event::recovery::Aim;
use crate::limits::{REPLAY_BYTES_GUESSED, REPLAYS_AT_ONCE_MAX, REPLAYS_UNDER_WAY_BYTES_MAX};

/// One replay that was asked for.
pub(super) struct Replay {
    pub(super) client: ReplayClient,
    /// Payload bytes received.
    pub(super) bytes: usize,
    /// Payload bytes expected.
    pub(super) reckoned_bytes: usize,
}

impl Replay {
    /// What it counts for.
    pub(super) fn under_way_bytes(&self) -> usize {
        self.bytes.max(self.reckoned_bytes)
    }
}

/// Why a worker is served before another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Urgency {
    /// What is missing before what may be.
    pub(super) aim: Aim,
    /// Workers with requests in flight first.
    pub(super) is_idle: bool,
    /// Then those that are done soonest.
    pub(super) waiting: usize,
}

/// The places of a shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Places {
    taken: usize,
    bytes: usize,
}

impl Places {
    /// Takes a place for a replay of so many bytes.
    pub(super) const fn take(&mut self, bytes: usize) {
        self.taken += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }

    /// Whether there is a place for a replay reckoned at so many bytes. One alone always has a place.
    pub(super) const fn fits(&self, bytes: usize) -> bool {
        self.taken == 0
            || (self.taken < REPLAYS_AT_ONCE_MAX && self.bytes.saturating_add(bytes) <= REPLAYS_UNDER_WAY_BYTES_MAX)
    }
}

/// What a replay is reckoned at, by what the worker's last one brought.
pub(super) fn reckoned_bytes(last: Option<usize>) -> usize {
    last.unwrap_or(REPLAY_BYTES_GUESSED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_few_and_their_bytes_bounded() {
        let mut places = Places::default();
        assert!(places.fits(usize::MAX), "one alone");
        for _ in 0..REPLAYS_AT_ONCE_MAX {
            assert!(places.fits(1));
            places.take(1);
        }
        assert!(!places.fits(0));
        let mut large = Places::default();
        large.take(REPLAYS_UNDER_WAY_BYTES_MAX);
        assert!(large.fits(0) && !large.fits(1));
    }

    #[test]
    fn what_is_missing_comes_before_probes_busy_before_idle_and_quiet_before_loud() {
        let of = |aim, is_idle, waiting| Urgency { aim, is_idle, waiting };
        let mut all =
            [of(Aim::Probe, false, 0), of(Aim::Prove, true, 0), of(Aim::Prove, false, 9), of(Aim::Prove, false, 2)];
        all.sort();
        assert_eq!(
            all,
            [of(Aim::Prove, false, 2), of(Aim::Prove, false, 9), of(Aim::Prove, true, 0), of(Aim::Probe, false, 0)]
        );
    }
}
