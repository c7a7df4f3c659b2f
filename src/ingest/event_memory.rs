//! The memory of an ingest thread for messages: what it may take, and what it takes.

use crate::budget::{Gauge, MemoryAccounts, MemoryPart};
use crate::limits::{
    RECOVERY_HELD_BYTES_MAX, REPLAY_READ_AHEAD_BYTES_MAX, REPLAYS_AT_ONCE_MAX, SHARD_MESSAGES_BYTES_MAX,
};
use crate::zmtp;

/// The bounds of one ingest thread.
#[derive(Clone, Debug)]
pub(crate) struct EventMemory {
    pub(super) accounts: MemoryAccounts,
    /// Messages that are being received, or wait to be applied.
    messages_bytes_max: u64,
    messages: Gauge,
    /// Messages that wait during dumps, loads and recoveries.
    pub(super) held_bytes_max: usize,
    /// What one replay receives ahead.
    pub(super) replay_bytes_max: usize,
    pub(super) replays: Gauge,
}

impl Default for EventMemory {
    /// The bounds of the implementation alone.
    fn default() -> Self {
        Self {
            accounts: MemoryAccounts::unlimited(),
            messages_bytes_max: SHARD_MESSAGES_BYTES_MAX,
            messages: Gauge::default(),
            held_bytes_max: RECOVERY_HELD_BYTES_MAX,
            replay_bytes_max: REPLAY_READ_AHEAD_BYTES_MAX,
            replays: Gauge::default(),
        }
    }
}

impl EventMemory {
    /// One of `shards` equal parts of what messages may take.
    pub(crate) fn of(accounts: &MemoryAccounts, shards: usize) -> Self {
        let of_each = |part| accounts.division().of_each(part, shards);
        Self {
            accounts: accounts.clone(),
            messages_bytes_max: SHARD_MESSAGES_BYTES_MAX.min(of_each(MemoryPart::EventMessages) as u64),
            messages: accounts.gauge(MemoryPart::EventMessages),
            // The one dump or load may take a quarter of this on top.
            held_bytes_max: of_each(MemoryPart::HeldEvents) / 5 * 4,
            replay_bytes_max: of_each(MemoryPart::Replays) / REPLAYS_AT_ONCE_MAX,
            replays: accounts.gauge(MemoryPart::Replays),
        }
    }

    /// Bounds the messages that the calling thread receives.
    pub(super) fn bound_messages(&self) {
        zmtp::bound_messages(self.messages_bytes_max, self.messages.clone());
    }
}
