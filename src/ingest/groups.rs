//! What each KV group of a worker serves: pure.
//!
//! A removal names its group and not what the group serves, so that is learnt from the group's stores.
//!
//! | what the store says | the group so far | its blocks |
//! |---|---|---|
//! | main attention | any | count |
//! | nothing | main attention | count |
//! | nothing | a kind with a window | count as the window's |
//! | nothing | a kind without a rule | do not count |
//! | nothing | not known | count; the worker is hybrid unless it is group 0 |
//! | a kind that is not known | any | count; the worker is hybrid |
//! | a kind with a window | has counted blocks | do not count; the worker is hybrid; removals go on to count |
//! | a kind with a window | any other | count as the window's; the worker is hybrid unless the rule is proved |
//! | a kind without a rule | has counted blocks | do not count; the worker is hybrid; removals go on to count |
//! | a kind without a rule | any other | do not count; the worker is hybrid |
//!
//! A block that counts in several groups of a tier is held there if each of them has it. So a group that counts
//! without need can only make a worker seem to hold less. Windows are proved where all of a worker's reach equally far
//! and a group of main attention is there too.

use rustc_hash::FxHashMap;

use crate::event::GroupKind;
use crate::ids::GroupId;
use crate::limits::GROUP_KINDS_MAX;

/// The groups of one worker, in one incarnation of its engine.
#[derive(Debug, Default)]
pub(super) struct Groups {
    known: FxHashMap<GroupId, Group>,
    /// How many of the last blocks the windows need, where there are some.
    window_blocks: Option<u32>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Group {
    kind: GroupKind,
    /// Tokens of one of its blocks, as its last store said.
    block_size: u32,
    /// Blocks of it have been counted.
    counted: bool,
}

/// Whether an event of a group counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// Its blocks count.
    Counts,
    /// Its blocks count, and that may be too few.
    CountsInDoubt,
    /// Its blocks count as those of a window.
    Window {
        /// How many of the last blocks of a prompt the group must have.
        blocks: u32,
        /// Whether that was held against an engine.
        proved: bool,
    },
    /// Its blocks do not count.
    LeftOut,
}

impl Groups {
    /// What becomes of a store of a group that is said to serve `said`, in blocks of `block_size` tokens.
    pub(super) fn store(&mut self, group: GroupId, said: GroupKind, block_size: u32) -> Rule {
        let known = self.known.get(&group).copied().unwrap_or_default();
        let is_counting = matches!(said, GroupKind::Main | GroupKind::Unknown);
        let kind = if said == GroupKind::Unstated { known.kind } else { said };
        // Placeholders do not say it.
        let block_size = if block_size == 0 { known.block_size } else { block_size };
        let learns = said != GroupKind::Unstated && (is_counting || !known.counted);
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

    /// What becomes of a removal.
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

    /// The groups that are windows, and how many of the last blocks of a prompt each must have.
    pub(super) fn windows(&self) -> impl Iterator<Item = (GroupId, u32)> + '_ {
        let window = |(group, known): (&GroupId, &Group)| {
            let blocks = known.kind.window_blocks(known.block_size).filter(|_| !known.counted)?;
            Some((*group, blocks))
        };
        self.known.iter().filter_map(window)
    }

    /// How many tokens the blocks of a group have, as far as it has said.
    pub(super) fn block_size(&self, group: GroupId) -> Option<u32> {
        self.known.get(&group).map(|group| group.block_size).filter(|tokens| *tokens > 0)
    }

    /// Whether windows are known.
    pub(super) const fn has_windows(&self) -> bool {
        self.window_blocks.is_some()
    }

    /// Whether windows are known and no group whose every block a prompt needs: what they say alone is not proved.
    pub(super) fn lacks_main(&self) -> bool {
        self.has_windows() && !self.known.values().any(|group| group.kind == GroupKind::Main || group.counted)
    }

    /// Blocks of a group have been counted.
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

    /// Nothing is known of any.
    pub(super) fn forget(&mut self) {
        self.known.clear();
        self.window_blocks = None;
    }

    /// Bounded: a removal in a group that is not remembered names blocks that are not held.
    fn note(&mut self, group: GroupId, what: Group) {
        if self.known.len() < GROUP_KINDS_MAX || self.known.contains_key(&group) {
            self.known.insert(group, what);
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
        let after = |said: &[GroupKind], counted: bool| {
            let mut groups = Groups::default();
            for kind in said {
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
}
