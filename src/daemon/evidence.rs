//! What one core's decisions show of workers: whether prompts are found again where they were computed.

use std::sync::Arc;

use crate::fleet::FleetTable;
use crate::metrics::{CounterTable, RouteCounter};
use crate::route::{Decision, MatchStatus, Repeats, ReplyNotes, RouteRequest, Scratch};

/// One core's sample of prompts, and what it has shown.
pub(super) struct Evidence {
    repeats: Repeats,
    counters: Arc<CounterTable<RouteCounter>>,
}

impl Evidence {
    pub(super) fn new(counters: Arc<CounterTable<RouteCounter>>) -> Self {
        Self { repeats: Repeats::default(), counters }
    }

    /// Takes a decision that was made from `scratch` at a time (milliseconds since the daemon started).
    ///
    /// One that explains itself and books nothing is a question, not a prompt on its way to a worker.
    pub(super) fn note(
        &mut self,
        fleet: &FleetTable,
        request: &RouteRequest<'_>,
        decision: &Decision,
        scratch: &Scratch,
        now_ms: u64,
    ) {
        let Some(chosen) = decision.candidates.first() else { return };
        let is_asked_only = request.explain && request.book.is_none();
        let is_read = decision.matched == MatchStatus::Matched && !decision.notes.contains(ReplyNotes::READ_CONTENDED);
        if is_asked_only || !is_read || decision.request_blocks == 0 {
            return;
        }
        self.counters.bump(chosen.index, RouteCounter::Decisions);
        if chosen.overlap.total() > 0 {
            self.counters.bump(chosen.index, RouteCounter::OverlapsFound);
        }
        let before = self.repeats.sent(request.space, scratch.locals(decision), chosen.index, now_ms);
        let Some(record) = before.and_then(|worker| fleet.worker(worker)) else { return };
        if record.space != request.space {
            return;
        }
        let found = scratch.overlap_of(record).total() > 0;
        self.counters.bump(record.index, if found { RouteCounter::OverlapsFound } else { RouteCounter::RepeatsMissed });
    }
}
