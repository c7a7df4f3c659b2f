//! The read half: the lookups of serving threads.

#![expect(unsafe_code, reason = "the table of holder bits is replaced behind a pointer")]

use super::holders::{HolderBit, HolderTable};
use super::lookup_walk::{View, Walk};
use super::reclaim::{Guard, Reader};
use super::shared_index::{ShardHead, SharedIndex, SharedIndexCell};
use super::simd::WORD_HOLDERS;
use super::types::{self, LINE_BLOCKS};
use crate::ids::{LocalHash, ShardId, TierBlocks, WorkerSlot};
use crate::limits::LOOKUP_TRIES_MAX;
use crate::prefetch::prefetch;
use crate::sync::{Ordering, fence, spin};
use std::sync::Arc;

/// A reader of one shard. Clone it for every thread.
#[derive(Clone, Debug)]
pub struct ShardReader {
    id: ShardId,
    shared: Arc<SharedIndexCell>,
    reader: Reader,
}

/// Lines of a query that are prefetched when a lookup begins: a caller may have put them aside since it hashed the prompt.
const QUERY_LINES_FIRST: usize = 8;

/// Spins of a lookup, before each try, while a multi-write is in progress.
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

    /// Fills `out` with the depths of all workers of the shard. The guard is another shard's and may protect this one
    /// too.
    #[inline]
    fn lookup(&self, guard: &Guard<'_>, locals: &[u64], walk: &mut Walk, out: &mut ShardDepths) -> Lookup {
        if self.reader.is_inside(guard) {
            let shared = self.shared.load(guard);
            let epoch = shared.head.epoch();
            if let (Some(structure), Some(generation)) = (shared.head.multi_writes(), shared.table.generation())
                && attempt(shared, guard, (structure, generation), (locals, walk, out))
            {
                return Lookup { epoch, contended: false };
            }
        }
        self.lookup_patiently(guard, locals, walk, out)
    }

    /// As [`lookup`](Self::lookup), with several tries and waits between them.
    #[cold]
    fn lookup_patiently(&self, guard: &Guard<'_>, locals: &[u64], walk: &mut Walk, out: &mut ShardDepths) -> Lookup {
        let own = (!self.reader.is_inside(guard)).then(|| self.reader.enter());
        let guard = own.as_ref().unwrap_or(guard);
        let epoch = self.shared.load(guard).head.epoch();
        for tries in 0..=LOOKUP_TRIES_MAX {
            let last = tries == LOOKUP_TRIES_MAX;
            // Each time: an empty index may have replaced one whose multi-write never ends.
            let shared = self.shared.load(guard);
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
            let unchanged = attempt(shared, guard, (structure, generation), (locals, walk, out));
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

    /// A view for walks, with holder bits of the test's choice.
    #[cfg(test)]
    pub(super) fn view_with<'a>(
        &'a self,
        guard: &'a super::reclaim::Guard<'_>,
        holders: &'a super::holders::HolderTable,
    ) -> View<'a> {
        let shared = self.shared.load(guard);
        View { table: shared.table.load(guard), arena: &shared.arena, holders }
    }

    /// The current holder bits; nothing may change meanwhile.
    #[cfg(test)]
    pub(super) fn holders_now(&self) -> super::holders::HolderTable {
        let guard = self.reader.enter();
        // SAFETY: the calling tests change nothing while this call lasts.
        unsafe { self.shared.load(&guard).head.holders() }.clone()
    }
}

/// One try of a lookup, which began with these numbers of the multi-writes and of the table; whether all of it was read
/// as of one moment.
#[inline(always)]
fn attempt(
    shared: &SharedIndex,
    guard: &Guard<'_>,
    (structure, generation): (u64, u64),
    (locals, walk, out): (&[u64], &mut Walk, &mut ShardDepths),
) -> bool {
    let table = shared.table.load(guard);
    // SAFETY: a replaced table goes to the garbage, which waits for the guard.
    let holders = unsafe { shared.head.holders() };
    let whole = walk.run(&View { table, arena: &shared.arena, holders }, locals, out);
    // Orders every load of the walk before the loads below. If the walk has read a part of a change, the version or the
    // sequence that announces the change is visible here.
    fence(Ordering::Acquire);
    whole
        && walk.is_unchanged(table)
        && shared.head.is_still(structure)
        && shared.table.generation() == Some(generation)
}

/// The sequence to compare later, once no multi-write is in progress; `None` if that takes too long.
fn settled(head: &ShardHead) -> Option<u64> {
    for _ in 0..MULTI_WRITE_SPINS_MAX {
        if let Some(structure) = head.multi_writes() {
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

/// The quality of a lookup's answer.
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

    /// Fills `out` with the blocks that every worker holds of a prompt whose blocks have the hashes `locals`.
    ///
    /// Takes no lock, and retries a bounded number of times. Allocates nothing once `out` was used for as many workers
    /// and as long a walk.
    pub fn lookup(&self, locals: &[LocalHash], out: &mut Depths) -> Lookup {
        self.look_up(locals, None, out)
    }

    /// As [`lookup`](Self::lookup), for a prompt of which an engine reuses at most `usable_blocks_max` blocks: engines
    /// compute the last token of a prompt in any case. The bound cannot be applied to the answer for a worker with
    /// sliding windows afterwards: the worker may have the blocks that the longer prefix needs and lack those that the
    /// shorter one needs. Workers without windows get the same answer as from `lookup`.
    pub fn lookup_usable(&self, locals: &[LocalHash], usable_blocks_max: u32, out: &mut Depths) -> Lookup {
        self.look_up(locals, Some(usable_blocks_max), out)
    }

    fn look_up(&self, locals: &[LocalHash], windowed_blocks_max: Option<u32>, out: &mut Depths) -> Lookup {
        let mut lookup = Lookup::default();
        let Depths { shards, walk } = out;
        shards.resize_with(self.shards.len(), ShardDepths::default);
        let Some(guard) = self.shards.first().map(|shard| shard.reader.enter()) else { return lookup };
        let locals = types::of_locals(locals);
        // The search for the second edge needs a block that is a few lines behind the first.
        locals.chunks(LINE_BLOCKS).take(QUERY_LINES_FIRST).for_each(|line| prefetch(line.as_ptr().cast()));
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

/// The depths of one shard's workers.
#[derive(Clone, Debug, Default)]
pub(super) struct ShardDepths {
    shard: ShardId,
    /// The table of holder bits from which `holders` was copied.
    pub(super) edition: u64,
    /// The device holder bit of each worker, by slot.
    pub(super) holders: Vec<HolderBit>,
    /// Device blocks by holder bit, in whole words of 64 bits.
    pub(super) device: Vec<u32>,
    /// Host, disk and external blocks, by slot; empty where no worker of the shard has any.
    pub(super) lower: Vec<[u32; 3]>,
}

impl ShardDepths {
    /// Makes room for the depths of these holder bits.
    #[inline]
    pub(super) fn fit(&mut self, holders: &HolderTable) {
        let device = holders.device.len() * WORD_HOLDERS;
        if self.edition != holders.edition || self.device.len() != device {
            self.edition = holders.edition;
            self.holders.clone_from(&holders.devices);
            // Those of holder bits that are not a device's stay 0.
            self.device.clear();
            self.device.resize(device, 0);
        }
        self.lower.clear();
    }

    /// Sets all depths to 0.
    pub(super) fn clear(&mut self, holders: &HolderTable) {
        self.device.fill(0);
        self.lower.clear();
        if !holders.tiered.is_empty() {
            self.lower.resize(holders.workers, [0; 3]);
        }
    }

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

    /// The blocks that one worker holds; none for a worker that the lookup did not meet.
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

    /// Overwrites `blocks` with the device blocks of these workers, in the same order.
    pub fn devices(&self, workers: impl Iterator<Item = (ShardId, WorkerSlot)>, blocks: &mut [u32]) {
        // Neighbours often share a shard: all of them do where there is one.
        let mut of_shard = None::<&ShardDepths>;
        for (blocks, (shard, slot)) in blocks.iter_mut().zip(workers) {
            if of_shard.is_none_or(|depths| depths.shard != shard) {
                of_shard = self.shard(shard);
            }
            *blocks = of_shard.map_or(0, |depths| depths.device(slot));
        }
    }

    /// Whether any worker may hold blocks in a lower tier.
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
