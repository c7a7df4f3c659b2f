//! Batches that are lost for good, and what is done when they can be had after all.

use super::recover::REPLAY_REMEDY;
use super::{Home, Now, Stream};
use crate::event::gate::SequenceGate;
use crate::event::trust::TrustInput;
use crate::ids::EventSeq;
use crate::metrics::WorkerCounter;
use crate::trust::TrustReason;

/// What an operator can do where a publisher's buffer is too short.
pub(super) const FORGOTTEN_REMEDY: &str =
    "raise the engine's buffer_steps, or put a relay beside it; restart it to be exact again";

impl Stream {
    /// A stream begins here: what was lost of the one before is of no account, and of this one nothing is from 0 on.
    pub(super) fn note_beginning(&mut self, seq: EventSeq) {
        if let Some(recovery) = self.recovery.as_mut().filter(|_| seq == EventSeq(0)) {
            recovery.forget_losses();
        }
    }

    /// Begins the worker anew: its publisher has all of its life after all, and what it sent live is in it.
    pub(super) fn renew(&mut self, home: &mut Home, now: Now) {
        tracing::info!(worker = %self.worker, last = ?self.gate.last(), "a publisher that batches were lost of can replay all of them; the worker begins anew");
        self.changed = true;
        self.count(WorkerCounter::Renewed, 1);
        self.dropped = self.dropped.max(self.gate.last());
        let ahead = std::mem::take(&mut self.gate);
        self.forget_incarnation();
        self.empty(home, TrustInput::Recovering, now);
        self.hold_for_recovery(ahead, now);
    }

    /// What is missing before a batch of a replay cannot be had.
    pub(super) fn unfillable(&mut self, home: &mut Home, seq: EventSeq, now: Now) {
        self.lose(home, seq, now);
        self.gate.go_on_before(seq);
    }

    /// What is missing cannot be had at all: the worker goes on with what waits, or with what comes.
    pub(super) fn unrecovered(&mut self, home: &mut Home, now: Now) {
        let first = self.held.as_ref().and_then(|held| held.first_seq());
        let known = self.gate.last().is_some();
        if known {
            self.lose(home, first.unwrap_or_default(), now);
        } else {
            tracing::warn!(worker = %self.worker, remedy = REPLAY_REMEDY, "no replay from the beginning; the worker is joined as it is");
            self.input(TrustInput::Recovered { known }, now);
        }
        match first.filter(|_| known) {
            Some(first) => self.gate.go_on_before(first),
            None => self.gate = SequenceGate::default(),
        }
        self.dropped = None;
        self.changed = true;
        if self.is_recovering() {
            self.let_go(now);
        }
    }

    pub(super) fn lose(&mut self, home: &mut Home, next: EventSeq, now: Now) {
        let last = self.gate.last().unwrap_or_default();
        let missed = next.0.saturating_sub(last.0).saturating_sub(1);
        tracing::warn!(
            worker = %self.worker, %last, missed, remedy = TrustReason::Gap.remedy(),
            "lost batches cannot be fetched again; the worker is emptied"
        );
        self.count(WorkerCounter::ReplaysUnfillable, 1);
        self.count(WorkerCounter::BatchesMissed, missed);
        self.forget_incarnation();
        self.empty(home, TrustInput::Gap, now);
    }
}
