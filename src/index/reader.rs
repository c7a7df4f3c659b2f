//! The read half: what a serving core asks.

#![expect(unsafe_code, reason = "the holders are replaced behind a pointer")]

use super::holders::HolderBit;
use super::reclaim::{Guard, Reader};
use super::shared::{ShardHead, SharedIndexCell};
use super::types;
use super::walk::{View, Walk};
use crate::ids::{LocalHash, ShardId, TierBlocks, WorkerSlot};
use crate::limits::LOOKUP_TRIES_MAX;
use crate::sync::{Ordering, fence, spin};
use std::sync::Arc;

/// A reader of one shard. Clone it for every thread.
#[derive(Clone, Debug)]
pub struct ShardReader {
    id: ShardId,
    shared: Arc<SharedIndexCell>,
    reader: Reader,
}

/// Turns that a lookup waits, before each try, for a change of many parts to be whole.
const MULTI_WRITE_SPINS_MAX: u32 = 256;

impl ShardReader {
    pub(super) const fn new(id: ShardId, shared: Arc<SharedIndexCell>, reader: Reader) -> Self {
        Self { id, shared, reader }
    }

    /// The shard that is read.
    #[must_use]
    pub const fn id(&self) -> ShardId {
        self.id
    }

    /// Fills `out` with what every worker of the shard holds of a prompt. The guard is another shard's and may be
    /// good for this one too.
    fn lookup(&self, guard: &Guard<'_>, locals: &[u64], walk: &mut Walk, out: &mut ShardDepths) -> Lookup {
        let own = (!self.reader.is_inside(guard)).then(|| self.reader.enter());
        let guard = own.as_ref().unwrap_or(guard);
        let mut shared = self.shared.load(guard);
        let epoch = shared.head.epoch();
        for attempt in 0..=LOOKUP_TRIES_MAX {
            let last = attempt == LOOKUP_TRIES_MAX;
            if attempt > 0 {
                // Another index may have taken the place of one that is never whole again.
                shared = self.shared.load(guard);
            }
            let structure = match settled(&shared.head) {
                Some(structure) => structure,
                None if last => 0,
                None => continue,
            };
            let generation = match shared.table.generation() {
                Some(generation) => generation,
                None if last => 0,
                None => continue,
            };
            let table = shared.table.load(guard);
            // SAFETY: a table that is replaced goes to the garbage, which waits for the guard.
            let holders = unsafe { shared.head.holders() };
            let view = View { table, arena: &shared.arena, holders };
            let whole = walk.run(&view, locals, out);
            // Orders every load of the walk before the loads below: what they would have seen of a change, the
            // version or the word that announces it would be seen here.
            fence(Ordering::Acquire);
            let unchanged = whole
                && walk.is_unchanged(table)
                && shared.head.is_still(structure)
                && shared.table.generation() == Some(generation);
            if unchanged || last {
                return Lookup { epoch, contended: !unchanged };
            }
        }
        Lookup { epoch, contended: true }
    }

    /// For tests that walk by hand.
    #[cfg(test)]
    pub(super) fn enter(&self) -> super::reclaim::Guard<'_> {
        self.reader.enter()
    }

    /// What a walk looks at, with lanes of the test's choice.
    #[cfg(test)]
    pub(super) fn view_with<'a>(
        &'a self,
        guard: &'a super::reclaim::Guard<'_>,
        holders: &'a super::holders::HolderTable,
    ) -> View<'a> {
        let shared = self.shared.load(guard);
        View { table: shared.table.load(guard), arena: &shared.arena, holders }
    }

    /// The lanes of the moment; nothing may change meanwhile.
    #[cfg(test)]
    pub(super) fn holders_now(&self) -> super::holders::HolderTable {
        let guard = self.reader.enter();
        // SAFETY: tests that ask for it change nothing while this call lasts.
        unsafe { self.shared.load(&guard).head.holders() }.clone()
    }
}

/// What to compare later, once no change of many parts is under way; `None` if that takes too long.
fn settled(head: &ShardHead) -> Option<u64> {
    for _ in 0..MULTI_WRITE_SPINS_MAX {
        if let Some(structure) = head.structure() {
            return Some(structure);
        }
        spin();
    }
    None
}

/// A reader of every shard of a space.
#[derive(Clone, Debug)]
pub struct IndexReader {
    shards: Vec<ShardReader>,
}

/// How a lookup went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lookup {
    /// Batches that had ended, over all shards, when the lookup began: the answer reflects them all.
    pub epoch: u64,
    /// A shard changed so often under the reader that the answer may mix several of its states.
    pub contended: bool,
}

impl IndexReader {
    /// A reader of these shards.
    #[must_use]
    pub const fn new(shards: Vec<ShardReader>) -> Self {
        Self { shards }
    }

    /// Fills `out` with what every worker holds of a prompt whose blocks have the hashes `locals`.
    ///
    /// Takes no lock and waits for nobody beyond a bounded number of tries; allocates nothing once `out` has
    /// seen as many workers and as long a way.
    pub fn lookup(&self, locals: &[LocalHash], out: &mut Depths) -> Lookup {
        self.look_up(locals, None, out)
    }

    /// As [`lookup`](Self::lookup), for a prompt of which an engine uses at most `usable_blocks_max` blocks again:
    /// engines compute the last token of a prompt in any case. A worker whose engine has sliding windows cannot just
    /// be held to fewer blocks afterwards, as it may have the blocks that the longer prefix needs and not those that
    /// the shorter one does. What is said of other workers is as by `lookup`.
    pub fn lookup_usable(&self, locals: &[LocalHash], usable_blocks_max: u32, out: &mut Depths) -> Lookup {
        self.look_up(locals, Some(usable_blocks_max), out)
    }

    fn look_up(&self, locals: &[LocalHash], windowed_blocks_max: Option<u32>, out: &mut Depths) -> Lookup {
        let mut lookup = Lookup::default();
        let Depths { shards, walk } = out;
        shards.resize_with(self.shards.len(), ShardDepths::default);
        let Some(guard) = self.shards.first().map(|shard| shard.reader.enter()) else { return lookup };
        let locals = types::of_locals(locals);
        walk.branching.windowed_blocks_max = windowed_blocks_max;
        for (reader, depths) in self.shards.iter().zip(shards) {
            depths.shard = reader.id;
            let of = reader.lookup(&guard, locals, walk, depths);
            lookup.epoch += of.epoch;
            lookup.contended |= of.contended;
        }
        lookup
    }
}

/// A caller's buffer for the answer to a lookup. Reuse it: a warm one is filled without allocating.
#[derive(Clone, Debug, Default)]
pub struct Depths {
    shards: Vec<ShardDepths>,
    walk: Walk,
}

/// What the workers of one shard hold.
#[derive(Clone, Debug, Default)]
pub(super) struct ShardDepths {
    shard: ShardId,
    /// The table of lanes that `holders` comes from.
    pub(super) edition: u64,
    /// The device lane of each worker, by slot.
    pub(super) holders: Vec<HolderBit>,
    /// By device lane, whole words of lanes.
    pub(super) device: Vec<u32>,
    /// Host, disk and external blocks, by slot; empty where no worker of the shard has any.
    pub(super) lower: Vec<[u32; 3]>,
}

impl ShardDepths {
    fn device(&self, slot: WorkerSlot) -> u32 {
        let holder = self.holders.get(usize::from(slot.0));
        holder.and_then(|holder| self.device.get(usize::from(holder.0))).copied().unwrap_or(0)
    }
}

impl Depths {
    /// An empty buffer.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// What one worker holds; nothing for a worker that the lookup did not meet.
    #[must_use]
    pub fn of(&self, shard: ShardId, slot: WorkerSlot) -> TierBlocks {
        let Some(depths) = self.shard(shard) else { return TierBlocks::default() };
        let [host, disk, external] = depths.lower.get(usize::from(slot.0)).copied().unwrap_or_default();
        TierBlocks { device: depths.device(slot), host, disk, external }
    }

    /// The blocks that one worker's device holds.
    #[must_use]
    pub fn device(&self, shard: ShardId, slot: WorkerSlot) -> u32 {
        self.shard(shard).map_or(0, |depths| depths.device(slot))
    }

    /// Overwrites `blocks` with what the devices of so many workers hold, in the order they are named.
    pub fn devices(&self, workers: impl Iterator<Item = (ShardId, WorkerSlot)>, blocks: &mut [u32]) {
        for (blocks, (shard, slot)) in blocks.iter_mut().zip(workers) {
            *blocks = self.device(shard, slot);
        }
    }

    /// Whether any worker may hold blocks elsewhere than in its device.
    #[must_use]
    pub fn has_lower_tiers(&self) -> bool {
        self.shards.iter().any(|depths| !depths.lower.is_empty())
    }

    #[inline]
    fn shard(&self, shard: ShardId) -> Option<&ShardDepths> {
        let likely = self.shards.get(usize::from(shard.0)).filter(|depths| depths.shard == shard);
        likely.or_else(|| self.shards.iter().find(|depths| depths.shard == shard))
    }
}
