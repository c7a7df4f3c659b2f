//! The KV groups of a worker: which of their blocks count, and how groups with a sliding window are stored.
//!
//! A removal names its group, but not what kind of attention the group serves. So the kind is learnt from the group's
//! stores:
//!
//! | the store's kind | the group so far | its blocks |
//! |---|---|---|
//! | main attention | any | count |
//! | not stated | main attention | count |
//! | not stated | a kind with a window | count as the window's |
//! | not stated | a kind without a rule | do not count |
//! | not stated | not known | count; the worker is hybrid unless it is group 0 |
//! | a kind that is not known | any | count; the worker is hybrid |
//! | a kind with a window | has counted blocks | do not count; the worker is hybrid; removals go on to count |
//! | a kind with a window | any other | count as the window's; the worker is hybrid unless the rule is proved |
//! | a kind without a rule | has counted blocks | do not count; the worker is hybrid; removals go on to count |
//! | a kind without a rule | any other | do not count; the worker is hybrid |
//!
//! A block that counts in several groups of a tier is held there only if each of them has it. So a group that counts
//! without need can only make a worker seem to hold less. The rule for windows is proved if all windows of a worker
//! reach equally far and the worker has a group of main attention too.
//!
//! # Stores and removals of groups with sliding windows
//!
//! Events of such a group need not contain the tokens of its blocks: each block has the same hash as in the group of
//! full attention, whose events contain them. Windows also leave blocks out of the middle of a chain. So only the
//! hashes of these events are used. A block with an unknown hash waits for the event that defines it; engines announce
//! the groups of a request one after the other, in any order.

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::space_shard::SpaceShard;
use super::stream::{Now, Stream};
use crate::event::worker_trust::Flaw;
use crate::event::{GroupKind, Removed, Stored};
use crate::ids::{EngineHash, GroupId, Scheme, Tier};
use crate::index::{Binding, RemoveOutcome, StoreBlocks};
use crate::limits::{GROUP_KINDS_MAX, WINDOW_REFERENCES_UNPLACED_MAX};
use crate::metrics::WorkerCounter;

/// The groups of one worker, in one incarnation of its engine.
#[derive(Debug, Default)]
pub(super) struct Groups {
    known: FxHashMap<GroupId, Group>,
    /// How many of a prompt's last blocks the windows need; `None` = there is no window.
    window_blocks: Option<u32>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Group {
    kind: GroupKind,
    /// Tokens of one of its blocks, by its last store.
    block_size: u32,
    /// Whether its blocks have been counted.
    counted: bool,
}

/// How an event of a group counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// Its blocks count.
    Counts,
    /// Its blocks count, and the overlap may be too low.
    CountsInDoubt,
    /// Its blocks count as blocks of a window.
    Window {
        /// How many of the last blocks of a prompt the group must have.
        blocks: u32,
        /// Whether the rule was compared with an engine's own answers.
        proved: bool,
    },
    /// Its blocks do not count.
    LeftOut,
}

impl Groups {
    /// How a store of a group counts. The event states the kind `stated` and blocks of `block_size` tokens.
    pub(super) fn store(&mut self, group: GroupId, stated: GroupKind, block_size: u32) -> Rule {
        let known = self.known.get(&group).copied().unwrap_or_default();
        let is_counting = matches!(stated, GroupKind::Main | GroupKind::Unknown);
        let kind = if stated == GroupKind::Unstated { known.kind } else { stated };
        // Placeholders do not state the block size.
        let block_size = if block_size == 0 { known.block_size } else { block_size };
        let learns = stated != GroupKind::Unstated && (is_counting || !known.counted);
        if learns && (known.kind, known.block_size) != (kind, block_size) {
            self.note(group, Group { kind, block_size, ..known });
        }
        match kind {
            GroupKind::Main => Rule::Counts,
            GroupKind::Unstated if group == GroupId(0) => Rule::Counts,
            GroupKind::Unstated | GroupKind::Unknown => Rule::CountsInDoubt,
            GroupKind::Sliding { .. } | GroupKind::SlidingMla { .. } | GroupKind::Mamba => {
                self.window(group, kind, block_size)
            }
            GroupKind::Other => Rule::LeftOut,
        }
    }

    fn window(&mut self, group: GroupId, kind: GroupKind, block_size: u32) -> Rule {
        let is_remembered = self.known.get(&group).is_some_and(|known| known.kind == kind && !known.counted);
        let Some(blocks) = kind.window_blocks(block_size).filter(|_| is_remembered) else { return Rule::LeftOut };
        let all = self.window_blocks.map_or(blocks, |all| all.max(blocks));
        let alike = self.window_blocks.is_none_or(|all| all == blocks);
        self.window_blocks = Some(all);
        Rule::Window { blocks: all, proved: kind.is_proved() && alike }
    }

    /// How a removal of a group counts.
    pub(super) fn remove(&self, group: GroupId) -> Rule {
        match self.known.get(&group) {
            Some(Group { kind: GroupKind::Other, .. }) => Rule::LeftOut,
            Some(Group { kind, block_size, counted: false }) => match kind.window_blocks(*block_size) {
                Some(blocks) => Rule::Window { blocks, proved: true },
                None => Rule::Counts,
            },
            _ => Rule::Counts,
        }
    }

    /// The groups with a window, and how many of the last blocks of a prompt each must have.
    pub(super) fn windows(&self) -> impl Iterator<Item = (GroupId, u32)> + '_ {
        let window = |(group, known): (&GroupId, &Group)| {
            let blocks = known.kind.window_blocks(known.block_size).filter(|_| !known.counted)?;
            Some((*group, blocks))
        };
        self.known.iter().filter_map(window)
    }

    /// Tokens of one block of a group, if a store has stated it.
    pub(super) fn block_size(&self, group: GroupId) -> Option<u32> {
        self.known.get(&group).map(|group| group.block_size).filter(|tokens| *tokens > 0)
    }

    /// Whether a group with a window is known.
    pub(super) const fn has_windows(&self) -> bool {
        self.window_blocks.is_some()
    }

    /// Whether there is a group with a window, and no group of main attention. Then the rule for windows is not proved.
    pub(super) fn lacks_main(&self) -> bool {
        self.has_windows() && !self.known.values().any(|group| group.kind == GroupKind::Main || group.counted)
    }

    /// Notes that blocks of a group have been counted.
    pub(super) fn counted(&mut self, group: GroupId) {
        let known = self.known.get(&group).copied().unwrap_or_default();
        if !known.counted {
            self.note(group, Group { counted: true, ..known });
        }
    }

    /// Whether blocks of a group have ever been counted.
    pub(super) fn has_counted(&self, group: GroupId) -> bool {
        self.known.get(&group).is_some_and(|group| group.counted)
    }

    /// Forgets all groups.
    pub(super) fn forget(&mut self) {
        self.known.clear();
        self.window_blocks = None;
    }

    /// Bounded: a removal in a group that is not in the list names blocks that are not held.
    fn note(&mut self, group: GroupId, what: Group) {
        if self.known.len() < GROUP_KINDS_MAX || self.known.contains_key(&group) {
            self.known.insert(group, what);
        }
    }
}

/// References of window groups to blocks whose hashes are not known yet.
#[derive(Debug, Default)]
pub(super) struct Unplaced {
    /// By hash, so that a store of known blocks needs one look-up for each block, however many groups there are.
    references: FxHashMap<EngineHash, SmallVec<[(GroupId, u32); 2]>>,
    /// All references, each counted as often as it was announced.
    total: usize,
}

/// The references of one group that waited: each block once, and then the further references.
#[derive(Debug, PartialEq, Eq)]
struct OfGroup {
    group: GroupId,
    first: Vec<EngineHash>,
    again: Vec<EngineHash>,
}

impl Unplaced {
    /// Adds one; `false` = the limit is reached.
    fn add(&mut self, group: GroupId, hash: EngineHash) -> bool {
        if self.total >= WINDOW_REFERENCES_UNPLACED_MAX {
            return false;
        }
        self.total += 1;
        // At most as long as the number of window groups.
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

    /// Takes all references to some blocks, each as often as it was announced.
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
    /// Applies a store of a group that needs only the last `blocks` blocks of a prompt.
    pub(super) fn window_stored(&mut self, space: &mut SpaceShard, stored: &Stored<'_>, blocks: u32, now: Now) {
        let known = space.scheme.get();
        if let Some(known) = known.filter(|known| ![known.block_size, 0].contains(&stored.block_size)) {
            // Blocks of one size are not matched with blocks of another.
            self.lower_trust(Flaw::Hybrid, now);
            let own = Scheme { block_size: stored.block_size, ..known };
            return self.mismatch(stored, Tier::Device, (own, known), now);
        }
        if known.is_some() && !space.writer.announce_window(self.slot, stored.group, blocks) {
            self.count(WorkerCounter::EventsOtherGroup, 1);
            return self.lower_trust(Flaw::Hybrid, now);
        }
        if stored.parent.is_none() && !self.counts_copies(space) {
            return self.window_stored_once(space, stored, now);
        }
        let is_repeated = stored.parent.is_none() && self.has_all_in_window(space, stored);
        self.copies.has_counted |= is_repeated;
        self.count(WorkerCounter::StoresCopied, u64::from(is_repeated));
        self.place_in_window(space, stored.group, stored.hashes, now);
    }

    /// Applies a store at the root if second copies are not counted. A request that finds its last block in the window
    /// does not store its first block again. But an engine that reports the prefix of a request sends the same event,
    /// with blocks that the window has left behind. If blocks of the engine may be missing here, a report may name
    /// blocks that were never counted: only those get a reference.
    fn window_stored_once(&mut self, space: &mut SpaceShard, stored: &Stored<'_>, now: Now) {
        let is_held = |hash: &EngineHash| self.is_in_window(space, stored.group, *hash);
        if stored.hashes.last().is_some_and(is_held) {
            return self.refuse(WorkerCounter::StoresAmbiguous, Flaw::AmbiguousStore, now);
        }
        if !self.may_miss_blocks() || !stored.hashes.iter().any(is_held) {
            return self.place_in_window(space, stored.group, stored.hashes, now);
        }
        let missing: Vec<EngineHash> = stored.hashes.iter().filter(|hash| !is_held(hash)).copied().collect();
        self.refuse(WorkerCounter::StoresAmbiguous, Flaw::AmbiguousStore, now);
        self.place_in_window(space, stored.group, &missing, now);
    }

    fn has_all_in_window(&self, space: &SpaceShard, stored: &Stored<'_>) -> bool {
        !stored.hashes.is_empty() && stored.hashes.iter().all(|hash| self.is_in_window(space, stored.group, *hash))
    }

    fn is_in_window(&self, space: &SpaceShard, group: GroupId, hash: EngineHash) -> bool {
        self.unplaced.contains(group, hash) || space.writer.refers(self.slot, Tier::Device, group, hash)
    }

    /// Counts a reference of a window group to each block with a known hash. References to other blocks wait.
    fn place_in_window(&mut self, space: &mut SpaceShard, group: GroupId, hashes: &[EngineHash], now: Now) {
        let (mut rest, mut locals) = (hashes, Vec::new());
        while let Some((first, behind)) = rest.split_first() {
            let Some(Binding { parent, local, seed }) = self.binding_of(space, *first) else {
                if !self.unplaced.add(group, *first) {
                    self.lower_trust(Flaw::Hybrid, now);
                }
                rest = behind;
                continue;
            };
            let (hashes, behind) = rest.split_at(self.bound_run(space, rest, (local, seed), &mut locals));
            let blocks = StoreBlocks { parent, hashes, locals: &locals, tier: Tier::Device, group, seed };
            let outcome = self.store_in_index(space, &blocks, now);
            self.copies.placed(outcome.stored);
            self.count_stored(space, &outcome, now);
            rest = behind;
        }
    }

    /// Counts the references that waited for blocks whose hashes are now known.
    pub(super) fn place_unplaced(&mut self, space: &mut SpaceShard, hashes: &[EngineHash], now: Now) {
        if self.unplaced.references.is_empty() {
            return;
        }
        for OfGroup { group, first, again } in self.unplaced.take_all(hashes) {
            let blocks = self.kv_groups.windows().find_map(|(known, blocks)| (known == group).then_some(blocks));
            let fits = self.has_blocks_of_the_space(space, group);
            if fits && blocks.is_some_and(|blocks| space.writer.announce_window(self.slot, group, blocks)) {
                self.place_in_window(space, group, &first, now);
                self.place_in_window(space, group, &again, now);
            } else {
                self.lower_trust(Flaw::Hybrid, now);
            }
        }
    }

    /// Whether the blocks of a group have the block size of the space.
    fn has_blocks_of_the_space(&self, space: &SpaceShard, group: GroupId) -> bool {
        space.scheme.get().is_some_and(|scheme| self.kv_groups.block_size(group) == Some(scheme.block_size))
    }

    /// Takes one reference of a window group from each block.
    pub(super) fn window_removed(&mut self, space: &mut SpaceShard, removed: &Removed<'_>) {
        let Removed { hashes, group, .. } = *removed;
        let outcome = if self.unplaced.references.is_empty() {
            space.writer.remove(self.slot, Tier::Device, group, hashes)
        } else {
            let mut outcome = RemoveOutcome::default();
            for hash in hashes {
                if self.unplaced.take(group, *hash) {
                    outcome.removed += 1;
                    continue;
                }
                let one = space.writer.remove(self.slot, Tier::Device, group, &[*hash]);
                outcome.removed += one.removed;
                outcome.unknown += one.unknown;
            }
            outcome
        };
        if outcome.removed > 0 {
            // All groups take their blocks from one pool: a removed block of one group is free for another.
            self.copies.removed(outcome.removed);
        }
        self.count(WorkerCounter::BlocksRemoved, u64::from(outcome.removed));
        self.count(WorkerCounter::RemovesUnknown, u64::from(outcome.unknown));
    }

    /// Drops all references that wait, because the worker's device memory was emptied. Its window groups stay known.
    pub(super) fn windows_emptied(&mut self, space: &mut SpaceShard) {
        self.unplaced = Unplaced::default();
        let windows: SmallVec<[(GroupId, u32); 8]> = self.kv_groups.windows().collect();
        for (group, blocks) in windows {
            if self.has_blocks_of_the_space(space, group) {
                space.writer.announce_window(self.slot, group, blocks);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use GroupKind::{Main, Other, Unknown, Unstated};

    #[test]
    fn every_row_of_the_table() {
        let (zero, one) = (GroupId(0), GroupId(1));
        let after = |kinds: &[GroupKind], counted: bool| {
            let mut groups = Groups::default();
            for kind in kinds {
                groups.store(one, *kind, 16);
            }
            if counted {
                groups.counted(one);
            }
            groups
        };
        let mut fresh = Groups::default();
        assert_eq!(fresh.store(zero, Unstated, 16), Rule::Counts);
        assert_eq!(fresh.store(one, Unstated, 16), Rule::CountsInDoubt);
        assert_eq!(fresh.store(zero, Main, 16), Rule::Counts);
        assert_eq!(fresh.store(one, Unknown, 16), Rule::CountsInDoubt);
        assert_eq!(fresh.store(one, Other, 16), Rule::LeftOut);
        assert_eq!(after(&[Main], true).store(one, Unstated, 16), Rule::Counts);
        assert_eq!(after(&[Other], false).store(one, Unstated, 16), Rule::LeftOut);
        assert_eq!(after(&[Other], false).store(one, Main, 16), Rule::Counts);
        assert_eq!(after(&[Other], false).remove(one), Rule::LeftOut);
        assert_eq!(after(&[Other, Main], false).remove(one), Rule::Counts);
        assert_eq!(after(&[Main], true).store(one, Other, 16), Rule::LeftOut);
        assert_eq!(after(&[], true).store(one, Other, 16), Rule::LeftOut);
        let mut changed = after(&[Main], true);
        changed.store(one, Other, 16);
        assert_eq!(changed.remove(one), Rule::Counts, "what was counted must be able to go");
        assert!(changed.has_counted(one) && !changed.has_counted(zero));
        changed.forget();
        assert!(!changed.has_counted(one));
    }

    #[test]
    fn windows_are_proved_where_they_reach_equally_far() {
        let sliding = |window_tokens: u32| GroupKind::Sliding { window_tokens };
        let window = |blocks: u32, proved: bool| Rule::Window { blocks, proved };
        let mut groups = Groups::default();
        assert!(!groups.has_windows() && !groups.lacks_main());
        assert_eq!(groups.store(GroupId(1), sliding(33), 16), window(2, true));
        assert!(groups.has_windows() && groups.lacks_main());
        assert_eq!(groups.store(GroupId(1), Unstated, 16), window(2, true));
        assert_eq!(groups.remove(GroupId(1)), window(2, true));
        assert_eq!(groups.store(GroupId(0), Main, 16), Rule::Counts);
        assert!(!groups.lacks_main());
        assert_eq!(groups.store(GroupId(2), sliding(32), 16), window(2, true));
        assert_eq!(groups.store(GroupId(3), GroupKind::Mamba, 16), window(2, false));
        assert_eq!(groups.store(GroupId(4), sliding(64), 16), window(4, false), "all must have the most");
        assert_eq!(groups.store(GroupId(5), sliding(64), 0), Rule::LeftOut, "a placeholder");
        let mut windows: Vec<_> = groups.windows().collect();
        windows.sort_unstable();
        assert_eq!(windows, [(GroupId(1), 2), (GroupId(2), 2), (GroupId(3), 1), (GroupId(4), 4)]);
        groups.counted(GroupId(9));
        assert_eq!(groups.store(GroupId(9), sliding(33), 16), Rule::LeftOut, "it has counted");
        assert_eq!(groups.remove(GroupId(9)), Rule::Counts);
        groups.forget();
        assert!(!groups.has_windows() && groups.windows().next().is_none());
    }

    #[test]
    fn no_more_groups_are_remembered_than_the_bound() {
        let mut groups = Groups::default();
        for group in 0..2 * GROUP_KINDS_MAX as u32 {
            assert_eq!(groups.store(GroupId(group), Other, 16), Rule::LeftOut);
        }
        assert_eq!(groups.known.len(), GROUP_KINDS_MAX);
        assert_eq!(groups.remove(GroupId(0)), Rule::LeftOut);
    }

    #[test]
    fn references_wait_by_group_and_leave_as_often_as_announced() {
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
