//! What a serving core asks of a space's predictions.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::{ArcSwap, Guard};

use crate::ids::{LocalHash, ShardId, Worker, WorkerIndex, WorkerSlot};
use crate::index::{Depths, IndexReader};

/// The shard of a space's predictions: there is only one.
pub(super) const SHARD: ShardId = ShardId(0);

/// A worker for which there are predictions.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) index: WorkerIndex,
    pub(super) worker: Worker,
    pub(super) slot: WorkerSlot,
    /// Blocks predicted for it. Written by the predictor; Relaxed, as it is a figure and orders nothing.
    pub(super) blocks: Arc<AtomicU64>,
}

/// Who they are, by place.
#[derive(Debug, Default)]
pub(super) struct Roster(pub(super) Vec<Option<Member>>);

impl Roster {
    /// The worker's membership, if it is one of them.
    pub(super) fn member(&self, index: WorkerIndex, worker: Worker) -> Option<&Member> {
        let is_it = |member: &&Member| member.index == index && member.worker == worker;
        self.0.get(index.place())?.as_ref().filter(is_it)
    }
}

/// A reader of one space's predictions. Clone it for every thread.
#[derive(Clone, Debug)]
pub struct PredictionReader {
    pub(super) index: IndexReader,
    pub(super) roster: Arc<ArcSwap<Roster>>,
}

impl PredictionReader {
    /// What is predicted of a prompt whose blocks have the hashes `locals`. Takes no lock; allocates nothing once
    /// `depths` is warm.
    pub fn look_up<'a>(&self, locals: &[LocalHash], depths: &'a mut Depths) -> Predicted<'a> {
        let roster = self.roster.load();
        let contended = self.index.lookup(locals, depths).contended;
        // A slot may have become another worker's since: whoever left first is not in the roster any more.
        let moved = !Arc::ptr_eq(&roster, &self.roster.load());
        Predicted { roster, depths, contended: contended || moved }
    }

    /// Blocks predicted for a worker now; `None` if nothing is predicted for it.
    #[must_use]
    pub fn blocks_of(&self, index: WorkerIndex, worker: Worker) -> Option<u64> {
        let roster = self.roster.load();
        roster.member(index, worker).map(|member| member.blocks.load(Ordering::Relaxed))
    }
}

/// The answer to one look-up.
#[derive(Debug)]
pub struct Predicted<'a> {
    roster: Guard<Arc<Roster>>,
    depths: &'a Depths,
    contended: bool,
}

impl Predicted<'_> {
    /// Whether the predictions changed so often, or their workers did, that nothing is said.
    #[must_use]
    pub const fn is_contended(&self) -> bool {
        self.contended
    }

    /// Leading blocks predicted for a worker; `None` if nothing is predicted for it.
    #[must_use]
    pub fn blocks(&self, index: WorkerIndex, worker: Worker) -> Option<u32> {
        let member = self.roster.member(index, worker)?;
        Some(if self.contended { 0 } else { self.depths.device(SHARD, member.slot) })
    }
}
