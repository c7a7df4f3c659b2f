//! The spare runs of all stripes of sessions: where a booking writes its prompt before it takes the bookings' lock.

use parking_lot::{Mutex, MutexGuard};

use super::active::{ActiveTree, SpareRun};
use super::booking::{Demand, PromptBlocks, stripe_of};
use super::session::SessionId;
use crate::ids::WorkerIndex;
use crate::limits::BOOKING_STRIPES;

/// A spare run on a line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Spare(Mutex<SpareRun>);

/// By stripe of sessions, words for the blocks of its next prompt. Their locks are taken before the ledger's, and never
/// waited for.
#[derive(Debug, Default)]
pub(super) struct Spares([Spare; BOOKING_STRIPES]);

impl Spares {
    /// Writes the new blocks of a demand's prompt into the spare run of the session's stripe. `None` if another thread has
    /// it, which books for a session of that stripe.
    pub(super) fn prepare(
        &self,
        tree: &ActiveTree,
        (session, worker): (SessionId, WorkerIndex),
        demand: &Demand<'_>,
    ) -> Option<MutexGuard<'_, SpareRun>> {
        let mut spare = self.0[stripe_of(session)].0.try_lock()?;
        if let PromptBlocks::Shared(locals) = demand.blocks {
            tree.prepare(&mut spare, &demand.prompt(locals, worker));
        }
        Some(spare)
    }
}
