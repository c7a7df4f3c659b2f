//! The hit audit: whether the index finds a prompt again on the worker that computed it. A worker whose index misses
//! repeated prompts publishes hashes that do not match (see the finding `foreign_hashes`).

use std::sync::Arc;

use crate::fleet::FleetTable;
use crate::metrics::{CounterTable, RouteCounter};
use crate::route::{Decision, MatchStatus, Repeats, ReplyNotes, RouteRequest, Scratch};

/// One serving thread's sample of prompts, and the counters of what it has shown.
pub(super) struct HitAudit {
    repeats: Repeats,
    counters: Arc<CounterTable<RouteCounter>>,
}

impl HitAudit {
    pub(super) fn new(counters: Arc<CounterTable<RouteCounter>>) -> Self {
        Self { repeats: Repeats::default(), counters }
    }

    /// Counts a decision that was made from `scratch` at `now_ms` (milliseconds since the daemon started).
    ///
    /// A request that asks to explain and books nothing is only a question: its prompt goes to no worker.
    pub(super) fn note(
        &mut self,
        fleet: &FleetTable,
        request: &RouteRequest<'_>,
        decision: &Decision,
        scratch: &Scratch,
        now_ms: u64,
    ) {
        let Some(chosen) = decision.candidates.first() else { return };
        let is_question = request.explain && request.book.is_none();
        let is_read = decision.matched == MatchStatus::Matched && !decision.notes.contains(ReplyNotes::READ_CONTENDED);
        if is_question || !is_read || decision.request_blocks == 0 {
            return;
        }
        let held = chosen.overlap.total();
        let counted = [
            (RouteCounter::Decisions, 1),
            (RouteCounter::PromptBlocks, decision.request_blocks.into()),
            (RouteCounter::PromptBlocksHeld, held.into()),
            (RouteCounter::OverlapsFound, u64::from(held > 0)),
        ];
        self.counters.add_each(chosen.index, counted);
        let before = self.repeats.sent(request.space, scratch.locals(request, decision), chosen.index, now_ms);
        let Some(record) = before.and_then(|worker| fleet.worker(worker)) else { return };
        if record.space != request.space {
            return;
        }
        let found = scratch.overlap_of(record).total() > 0;
        self.counters.bump(record.index, if found { RouteCounter::OverlapsFound } else { RouteCounter::RepeatsMissed });
    }
}
