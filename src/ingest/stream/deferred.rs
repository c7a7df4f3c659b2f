//! A stream of which the index gives blocks their places later, in slices of a sweep.
//!
//! Until the index is through, answers are too low; the trust says so from before readers can see it. The sweep of the
//! shard asks each stream afterwards what became of it ([`Stream::swept`]).

use super::{Home, Now, Stream, move_trust};
use crate::event::trust::{Finding, TrustInput};
use crate::index::{Refusal, Shortfall, StoreBlocks, StoreOutcome};

impl Stream {
    /// Counts references in the index. The trust falls before readers see that the index defers or forgets blocks.
    pub(in crate::ingest) fn store_in_index(
        &mut self,
        home: &mut Home,
        blocks: &StoreBlocks<'_>,
        now: Now,
    ) -> StoreOutcome {
        let Self { trust, shown, view, .. } = self;
        let outcome = home.writer.store_announced(self.slot, blocks, &mut |shortfall| {
            let input = match shortfall {
                Shortfall::Deferred => TrustInput::Deferred,
                Shortfall::Emptied => TrustInput::Found(Finding::CapacityBound),
            };
            move_trust((&mut *trust, &mut *shown), view, input, now);
        });
        if outcome.deferred {
            self.changed = true;
            home.deferring = true;
            tracing::debug!(worker = %self.worker, "blocks wait for their places in the index");
        }
        #[cfg(test)]
        if outcome.refused == Some(Refusal::WorkBound) {
            self.emptied_under.push(self.view.trust.load());
        }
        outcome
    }

    /// The index was swept: takes note of what became of blocks that waited. Answers whether blocks still wait.
    pub(in crate::ingest) fn swept(&mut self, home: &mut Home, now: Now) -> bool {
        if !self.trust.is_deferring() {
            return false;
        }
        if home.writer.take_emptied_by_sweep(self.slot) {
            self.bounded(Refusal::WorkBound, now);
            self.emptied(home);
        }
        if home.writer.is_deferring(self.slot) {
            return true;
        }
        self.changed = true;
        self.input(TrustInput::DeferralEnded, now);
        self.show(home);
        false
    }
}
