//! Replays: the sockets over which publishers are asked for lost batches, and whose turn it is to ask.
//!
//! When to ask and what an answer means is decided in [`crate::event::recovery`]; here is only who waits for whom.
//! A replay holds one of a few places of its shard from the question to its end. An engine drops, in the middle and
//! without a word, what its ROUTER cannot hand over at once, so everything that is there is received between two turns
//! of the live streams, up to a bound for each replay, and only a slice of it is applied. A replay is reckoned at what
//! the worker's last one brought, or at what this one has brought already, and none is begun while those that run are
//! reckoned at the budget; one that brings too much is broken off and asked for again from where it stands.

mod client;

pub(super) use client::{Answer, Lost, ReplayClient};

use crate::event::recovery::Aim;
use crate::limits::{
    REPLAY_BYTES_GUESSED, REPLAY_SNAPSHOT_BYTES_MAX, REPLAY_WHOLE_MS_MAX, REPLAYS_AT_ONCE_MAX,
    REPLAYS_UNDER_WAY_BYTES_MAX,
};

/// One replay that was asked for.
pub(super) struct Replay {
    pub(super) client: ReplayClient,
    /// Payload bytes received.
    pub(super) bytes: usize,
    /// Payload bytes expected.
    pub(super) reckoned_bytes: usize,
    /// When it was asked for, milliseconds.
    pub(super) asked_ms: u64,
}

impl Replay {
    /// Whether it has gone on for longer than any honest one: it would keep its place for ever.
    pub(super) const fn is_endless(&self, now_ms: u64) -> bool {
        now_ms.saturating_sub(self.asked_ms) >= REPLAY_WHOLE_MS_MAX || self.bytes > REPLAY_SNAPSHOT_BYTES_MAX
    }

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

/// A worker that is to be asked for a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Wanting {
    pub(super) urgency: Urgency,
    /// Whose, by the shard's count.
    pub(super) at: usize,
    /// Payload bytes expected.
    pub(super) reckoned_bytes: usize,
}

/// Who is asked now, while `places` are taken: the most urgent first, up to one that does not fit. That one is the next,
/// however many smaller ones would fit: else there might never be room for it.
pub(super) fn asked_now(mut places: Places, mut wanting: Vec<Wanting>) -> Vec<Wanting> {
    wanting.sort_unstable();
    let mut takes = |wanting: &&Wanting| {
        let fits = places.fits(wanting.reckoned_bytes);
        places.take(wanting.reckoned_bytes);
        fits
    };
    let asked = wanting.iter().take_while(&mut takes).count();
    wanting.truncate(asked);
    wanting
}

/// What a replay is reckoned at, by what the worker's last one brought.
pub(super) fn reckoned_bytes(last: Option<usize>) -> usize {
    last.unwrap_or(REPLAY_BYTES_GUESSED)
}

#[cfg(test)]
mod tests;
