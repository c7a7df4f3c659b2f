//! Stores and removals of groups with sliding windows.
//!
//! Such a group's events need not say what its blocks are: every block has the hash that it has in the group of full
//! attention, whose events say it, and windows leave blocks out of the middle of what they announce. So only the hashes
//! are used. A block that is not known by its hash waits for the event that says it; engines announce the groups of a
//! request one after the other, in any order.

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::stream::{Home, Now, Stream};
use crate::event::trust::Finding;
use crate::event::{Removed, Stored};
use crate::ids::{EngineHash, GroupId, Scheme, Tier};
use crate::index::{Binding, RemoveOutcome, StoreBlocks};
use crate::limits::WINDOW_REFERENCES_UNPLACED_MAX;
use crate::metrics::WorkerCounter;

/// References of window groups to blocks of which it is not known what they are, counted.
#[derive(Debug, Default)]
pub(super) struct Unplaced {
    /// By hash, so that a store of known blocks looks each of them up once, however many groups there are.
    references: FxHashMap<EngineHash, SmallVec<[(GroupId, u32); 2]>>,
    /// All of them, each as often as it was announced.
    total: usize,
}

/// What waited of one group: each block once, and then the further references.
#[derive(Debug, PartialEq, Eq)]
struct OfGroup {
    group: GroupId,
    first: Vec<EngineHash>,
    again: Vec<EngineHash>,
}

impl Unplaced {
    /// Counts one more; `false` = there is no room.
    fn add(&mut self, group: GroupId, hash: EngineHash) -> bool {
        if self.total >= WINDOW_REFERENCES_UNPLACED_MAX {
            return false;
        }
        self.total += 1;
        // As long as there are window groups at most.
        let list = self.references.entry(hash).or_default();
        match list.iter_mut().find(|(known, _)| *known == group) {
            Some((_, count)) => *count += 1,
            None => list.push((group, 1)),
        }
        true
    }

    /// Takes one; `false` = there was none.
    fn take(&mut self, group: GroupId, hash: EngineHash) -> bool {
        let Some(list) = self.references.get_mut(&hash) else { return false };
        let Some(at) = list.iter().position(|(known, _)| *known == group) else { return false };
        list[at].1 -= 1;
        self.total -= 1;
        if list[at].1 == 0 {
            list.swap_remove(at);
        }
        if list.is_empty() {
            self.references.remove(&hash);
        }
        true
    }

    /// Takes those to some blocks, each as often as it was counted.
    fn take_all(&mut self, hashes: &[EngineHash]) -> Vec<OfGroup> {
        let mut taken: Vec<OfGroup> = Vec::new();
        for hash in hashes {
            for (group, count) in self.references.remove(hash).unwrap_or_default() {
                self.total -= count as usize;
                let at = taken.iter().position(|of| of.group == group).unwrap_or_else(|| {
                    taken.push(OfGroup { group, first: Vec::new(), again: Vec::new() });
                    taken.len() - 1
                });
                taken[at].first.push(*hash);
                taken[at].again.extend(std::iter::repeat_n(*hash, count as usize - 1));
            }
        }
        taken
    }

    fn contains(&self, group: GroupId, hash: EngineHash) -> bool {
        self.references.get(&hash).is_some_and(|list| list.iter().any(|(known, _)| *known == group))
    }
}

impl Stream {
    /// Takes a store of a group that needs only the last `blocks` blocks of a prompt.
    pub(super) fn window_stored(&mut self, home: &mut Home, stored: &Stored<'_>, blocks: u32, now: Now) {
        let known = home.scheme.get();
        if let Some(known) = known.filter(|known| ![known.block_size, 0].contains(&stored.block_size)) {
            // Which blocks of one size hold those of another is not worked out.
            self.found(Finding::Hybrid, now);
            let own = Scheme { block_size: stored.block_size, ..known };
            return self.mismatch(stored, Tier::Device, (own, known), now);
        }
        if known.is_some() && !home.writer.announce_window(self.slot, stored.group, blocks) {
            self.count(WorkerCounter::EventsOtherGroup, 1);
            return self.found(Finding::Hybrid, now);
        }
        if stored.parent.is_none() && !self.counts_copies(home) {
            return self.window_stored_once(home, stored, now);
        }
        let is_repeated = stored.parent.is_none() && self.has_all_in_window(home, stored);
        self.copies.has_counted |= is_repeated;
        self.count(WorkerCounter::StoresCopied, u64::from(is_repeated));
        self.place_in_window(home, stored.group, stored.hashes, now);
    }

    /// Takes a store at the root where second copies are not counted. A request that finds its last block in the window
    /// does not store its first block again, but an engine that reports the prefix of a request says the same, with
    /// blocks that the window has left behind. Where blocks of the engine may be missing here, a report may name blocks
    /// that were never counted: only those get a reference.
    fn window_stored_once(&mut self, home: &mut Home, stored: &Stored<'_>, now: Now) {
        let is_held = |hash: &EngineHash| self.is_in_window(home, stored.group, *hash);
        if stored.hashes.last().is_some_and(is_held) {
            return self.refuse(WorkerCounter::StoresAmbiguous, Finding::AmbiguousStore, now);
        }
        if !self.may_miss_blocks() || !stored.hashes.iter().any(is_held) {
            return self.place_in_window(home, stored.group, stored.hashes, now);
        }
        let missing: Vec<EngineHash> = stored.hashes.iter().filter(|hash| !is_held(hash)).copied().collect();
        self.refuse(WorkerCounter::StoresAmbiguous, Finding::AmbiguousStore, now);
        self.place_in_window(home, stored.group, &missing, now);
    }

    fn has_all_in_window(&self, home: &Home, stored: &Stored<'_>) -> bool {
        !stored.hashes.is_empty() && stored.hashes.iter().all(|hash| self.is_in_window(home, stored.group, *hash))
    }

    fn is_in_window(&self, home: &Home, group: GroupId, hash: EngineHash) -> bool {
        self.unplaced.contains(group, hash) || home.writer.refers(self.slot, Tier::Device, group, hash)
    }

    /// Counts a reference of a window group to each block that is known by its hash; others wait.
    fn place_in_window(&mut self, home: &mut Home, group: GroupId, hashes: &[EngineHash], now: Now) {
        let (mut rest, mut locals) = (hashes, Vec::new());
        while let Some((first, behind)) = rest.split_first() {
            let Some(Binding { parent, local, seed }) = self.binding_of(home, *first) else {
                if !self.unplaced.add(group, *first) {
                    self.found(Finding::Hybrid, now);
                }
                rest = behind;
                continue;
            };
            let (hashes, behind) = rest.split_at(self.bound_run(home, rest, (local, seed), &mut locals));
            let blocks = StoreBlocks { parent, hashes, locals: &locals, tier: Tier::Device, group, seed };
            let outcome = self.store_in_index(home, &blocks, now);
            self.copies.placed(outcome.stored);
            self.count_stored(home, &outcome, now);
            rest = behind;
        }
    }

    /// Blocks have become known by their hashes: what window groups have said of them counts from now on.
    pub(super) fn place_unplaced(&mut self, home: &mut Home, hashes: &[EngineHash], now: Now) {
        if self.unplaced.references.is_empty() {
            return;
        }
        for OfGroup { group, first, again } in self.unplaced.take_all(hashes) {
            let blocks = self.kinds.windows().find_map(|(known, blocks)| (known == group).then_some(blocks));
            let fits = self.has_blocks_of_the_space(home, group);
            if fits && blocks.is_some_and(|blocks| home.writer.announce_window(self.slot, group, blocks)) {
                self.place_in_window(home, group, &first, now);
                self.place_in_window(home, group, &again, now);
            } else {
                self.found(Finding::Hybrid, now);
            }
        }
    }

    /// Whether the blocks of a group are cut as the space's are.
    fn has_blocks_of_the_space(&self, home: &Home, group: GroupId) -> bool {
        home.scheme.get().is_some_and(|scheme| self.kinds.block_size(group) == Some(scheme.block_size))
    }

    /// Takes one reference of a window group from each block.
    pub(super) fn window_removed(&mut self, home: &mut Home, removed: &Removed<'_>) {
        let Removed { hashes, group, .. } = *removed;
        let outcome = if self.unplaced.references.is_empty() {
            home.writer.remove(self.slot, Tier::Device, group, hashes)
        } else {
            let mut outcome = RemoveOutcome::default();
            for hash in hashes {
                if self.unplaced.take(group, *hash) {
                    outcome.removed += 1;
                    continue;
                }
                let one = home.writer.remove(self.slot, Tier::Device, group, &[*hash]);
                outcome.removed += one.removed;
                outcome.unknown += one.unknown;
            }
            outcome
        };
        if outcome.removed > 0 {
            // All groups have their blocks from one pool: a block of one is free for another.
            self.copies.removed(outcome.removed);
        }
        self.count(WorkerCounter::BlocksRemoved, u64::from(outcome.removed));
        self.count(WorkerCounter::RemovesUnknown, u64::from(outcome.unknown));
    }

    /// The worker's device memory was emptied: nothing waits any more, and what serves a window still does.
    pub(super) fn windows_emptied(&mut self, home: &mut Home) {
        self.unplaced = Unplaced::default();
        let windows: SmallVec<[(GroupId, u32); 8]> = self.kinds.windows().collect();
        for (group, blocks) in windows {
            if self.has_blocks_of_the_space(home, group) {
                home.writer.announce_window(self.slot, group, blocks);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_wait_by_group_and_leave_as_often_as_they_came() {
        let [one, other] = [GroupId(0), GroupId(7)];
        let hashes: Vec<EngineHash> = (1..=3).map(EngineHash).collect();
        let mut unplaced = Unplaced::default();
        for (group, hash) in [(one, 1), (one, 2), (one, 1), (other, 1), (one, 1), (other, 9)] {
            assert!(unplaced.add(group, EngineHash(hash)));
        }
        assert!(
            unplaced.take(one, hashes[0]) && !unplaced.take(other, hashes[1]) && unplaced.contains(other, hashes[0])
        );
        let expected = [
            OfGroup { group: one, first: hashes[..2].to_vec(), again: hashes[..1].to_vec() },
            OfGroup { group: other, first: hashes[..1].to_vec(), again: Vec::new() },
        ];
        assert_eq!(unplaced.take_all(&hashes), expected);
        assert_eq!((unplaced.total, unplaced.take_all(&hashes)), (1, Vec::new()));
        assert!(unplaced.take(other, EngineHash(9)) && unplaced.references.is_empty() && unplaced.total == 0);
    }
}
