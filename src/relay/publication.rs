//! Where a relay's stream goes: to the thread that sends it, and into the buffer it is replayed from.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use super::buffer::ReplayBuffer;
use super::outbound::Outbound;
use crate::event::flat::UNNUMBERED;
use crate::ids::EventSeq;
use crate::ingest::{Outlet, Republished};
use crate::metrics::{CounterSet, RelayCounter};
use crate::zmtp;

/// What the ingest thread, which sends, and the thread that answers questions share.
#[derive(Debug)]
pub(super) struct Kept {
    pub(super) buffer: ReplayBuffer,
    /// The last batch before the dump that is being taken.
    pub(super) dumped_after: Option<Republished>,
    /// How often a generation ended: what was taken before the last time leads nowhere.
    pub(super) forgotten: u64,
}

/// The sending side, on the ingest thread.
pub(super) struct Publication {
    pub(super) outbound: Arc<Outbound>,
    pub(super) kept: Arc<Mutex<Kept>>,
    pub(super) counters: Arc<CounterSet<RelayCounter>>,
}

impl fmt::Debug for Publication {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Publication").field("kept", &self.kept).finish_non_exhaustive()
    }
}

impl Publication {
    fn send(&self, seq: EventSeq, payload: &[u8]) {
        // Nothing is waited for: who misses a message sees that, and asks for it.
        if !self.outbound.push(zmtp::message(&[b"", &seq.0.to_be_bytes()], payload)) {
            self.counters.bump(RelayCounter::SendsFailed);
            let times = self.counters.get(RelayCounter::SendsFailed);
            if times.is_power_of_two() {
                tracing::warn!(times, "too much waits to be sent; who listens has to ask for what is not");
            }
        }
    }
}

impl Outlet for Publication {
    fn batch(&mut self, seq: EventSeq, payload: &[u8]) {
        // Kept before it is sent: whoever has seen it can ask for it.
        let gone = self.kept.lock().buffer.push(seq, payload.into());
        self.counters.add(RelayCounter::BatchesForgotten, gone);
        self.counters.bump(RelayCounter::Batches);
        self.counters.add(RelayCounter::BatchBytes, payload.len() as u64);
        self.send(seq, payload);
    }

    fn heartbeat(&mut self, payload: &[u8]) {
        self.counters.bump(RelayCounter::Heartbeats);
        self.send(UNNUMBERED, payload);
    }

    fn forget(&mut self) {
        self.counters.bump(RelayCounter::Generations);
        let mut kept = self.kept.lock();
        kept.buffer.forget();
        kept.dumped_after = None;
        kept.forgotten += 1;
    }

    fn dump_begins(&mut self, last: Republished) {
        self.kept.lock().dumped_after = Some(last);
    }
}
