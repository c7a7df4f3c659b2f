//! What each KV group of a worker serves: pure.
//!
//! A removal names its group and not what the group serves, so that is learnt from the group's stores.
//!
//! | what the store says | the group so far | its blocks |
//! |---|---|---|
//! | main attention | any | count |
//! | nothing | main attention | count |
//! | nothing | not main attention | do not count |
//! | nothing | not known | count; the worker is hybrid unless it is group 0 |
//! | a kind that is not known | any | count; the worker is hybrid |
//! | not main attention | has counted blocks | do not count; the worker is hybrid; removals go on to count |
//! | not main attention | any other | do not count; the worker is hybrid |
//!
//! A block that counts in several groups of a tier is held there if each of them has it. So a group that counts
//! without need can only make a worker seem to hold less.

use rustc_hash::FxHashMap;

use crate::event::GroupKind;
use crate::ids::GroupId;
use crate::limits::GROUP_KINDS_MAX;

/// The groups of one worker, in one incarnation of its engine.
#[derive(Debug, Default)]
pub(super) struct Groups {
    known: FxHashMap<GroupId, Group>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Group {
    kind: GroupKind,
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
    /// Its blocks do not count.
    LeftOut,
}

impl Groups {
    /// What becomes of a store of a group that is said to serve `said`.
    pub(super) fn store(&mut self, group: GroupId, said: GroupKind) -> Rule {
        let known = self.known.get(&group).copied().unwrap_or_default();
        let kind = if said == GroupKind::Unstated { known.kind } else { said };
        if said != GroupKind::Unstated && !(known.counted && said == GroupKind::Other) {
            self.note(group, Group { kind, ..known });
        }
        match kind {
            GroupKind::Main => Rule::Counts,
            GroupKind::Unstated if group == GroupId(0) => Rule::Counts,
            GroupKind::Unstated | GroupKind::Unknown => Rule::CountsInDoubt,
            GroupKind::Other => Rule::LeftOut,
        }
    }

    /// What becomes of a removal.
    pub(super) fn remove(&self, group: GroupId) -> Rule {
        match self.known.get(&group) {
            Some(Group { kind: GroupKind::Other, .. }) => Rule::LeftOut,
            _ => Rule::Counts,
        }
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
                groups.store(one, *kind);
            }
            if counted {
                groups.counted(one);
            }
            groups
        };
        let mut fresh = Groups::default();
        assert_eq!(fresh.store(zero, Unstated), Rule::Counts);
        assert_eq!(fresh.store(one, Unstated), Rule::CountsInDoubt);
        assert_eq!(fresh.store(zero, Main), Rule::Counts);
        assert_eq!(fresh.store(one, Unknown), Rule::CountsInDoubt);
        assert_eq!(fresh.store(one, Other), Rule::LeftOut);
        assert_eq!(after(&[Main], true).store(one, Unstated), Rule::Counts);
        assert_eq!(after(&[Other], false).store(one, Unstated), Rule::LeftOut);
        assert_eq!(after(&[Other], false).store(one, Main), Rule::Counts);
        assert_eq!(after(&[Other], false).remove(one), Rule::LeftOut);
        assert_eq!(after(&[Other, Main], false).remove(one), Rule::Counts);
        assert_eq!(after(&[Main], true).store(one, Other), Rule::LeftOut);
        assert_eq!(after(&[], true).store(one, Other), Rule::LeftOut);
        let mut changed = after(&[Main], true);
        changed.store(one, Other);
        assert_eq!(changed.remove(one), Rule::Counts, "what was counted must be able to go");
        assert!(changed.has_counted(one) && !changed.has_counted(zero));
        changed.forget();
        assert!(!changed.has_counted(one));
    }

    #[test]
    fn no_more_groups_are_remembered_than_the_bound() {
        let mut groups = Groups::default();
        for group in 0..2 * GROUP_KINDS_MAX as u32 {
            assert_eq!(groups.store(GroupId(group), Other), Rule::LeftOut);
        }
        assert_eq!(groups.known.len(), GROUP_KINDS_MAX);
        assert_eq!(groups.remove(GroupId(0)), Rule::LeftOut);
    }
}
