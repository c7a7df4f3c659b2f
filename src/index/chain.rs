//! How the blocks of a worker hang together: linking, placing, and what a removal leaves behind.
//!
//! Nothing here recurses: chains may be as long as a worker has blocks.

use super::entries::{Blocks, NONE, ROOT};
use super::positions::Positions;
use crate::ids::LocalHash;

impl Blocks {
    /// Entries with one parent and one local hash, bound or reserving a position.
    pub(super) fn same_content(&self, parent: u32, local: LocalHash) -> impl Iterator<Item = u32> + '_ {
        let first = self.first_of(parent, local);
        std::iter::successors(first, |at| Some(self.entry(*at).next_alias).filter(|next| *next != NONE))
    }

    fn is_named(&self, parent: u32, local: LocalHash) -> bool {
        let named = self.entry(parent).named_child;
        named != NONE && self.entry(named).local == local
    }

    fn first_of(&self, parent: u32, local: LocalHash) -> Option<u32> {
        let entry = self.entry(parent);
        if self.is_named(parent, local) {
            Some(entry.named_child)
        } else if entry.first_child == NONE || entry.first_child == entry.named_child && self.is_only(entry.first_child)
        {
            None
        } else {
            self.siblings.get(&(parent, local)).copied()
        }
    }

    /// Whether a first child has no siblings.
    fn is_only(&self, first: u32) -> bool {
        self.entry(first).next_sibling == NONE
    }

    /// Makes `first` the first entry of a content, in place of `before`.
    fn set_first(&mut self, parent: u32, local: LocalHash, before: Option<u32>, first: u32) {
        let named = self.entry(parent).named_child;
        if before.map_or(named == NONE, |before| before == named) {
            self.entry_mut(parent).named_child = first;
        } else if first == NONE {
            self.siblings.remove(&(parent, local));
        } else {
            self.siblings.insert((parent, local), first);
        }
    }

    /// Hangs an entry under a parent, wherever it was before. What hangs under the entry comes along.
    pub(super) fn link(&mut self, positions: &mut Positions, at: u32, parent: u32, local: LocalHash) {
        let before = self.entry(at).parent;
        if before == parent && self.entry(at).local == local {
            return;
        }
        if before != NONE {
            self.unlink(at);
        }
        if self.is_placed(at) {
            self.unplace(positions, at, parent);
        }
        if self.is_placed(parent) {
            self.make_room(positions, parent, local);
        }
        self.attach(at, parent, local);
        if self.is_placed(parent) {
            self.place(positions, at);
        }
        if before != NONE {
            self.prune(positions, before);
        }
    }

    fn attach(&mut self, at: u32, parent: u32, local: LocalHash) {
        let alias = self.first_of(parent, local);
        let next = std::mem::replace(&mut self.entry_mut(parent).first_child, at);
        if next != NONE {
            self.entry_mut(next).previous_sibling = at;
        }
        self.set_first(parent, local, alias, at);
        let entry = self.entry_mut(at);
        entry.local = local;
        entry.parent = parent;
        entry.previous_sibling = NONE;
        entry.next_sibling = next;
        entry.next_alias = alias.unwrap_or(NONE);
    }

    /// Takes an entry from under its parent. Its position, if any, is left to the caller.
    fn unlink(&mut self, at: u32) {
        let entry = self.entry(at);
        let (parent, local, alias) = (entry.parent, entry.local, entry.next_alias);
        let (previous, next) = (entry.previous_sibling, entry.next_sibling);
        // While it is still among the children, or it could not be told which content is named.
        let before = self.same_content(parent, local).find(|other| self.entry(*other).next_alias == at);
        match before {
            Some(before) => self.entry_mut(before).next_alias = alias,
            None => self.set_first(parent, local, Some(at), alias),
        }
        match previous {
            NONE => self.entry_mut(parent).first_child = next,
            previous => self.entry_mut(previous).next_sibling = next,
        }
        if next != NONE {
            self.entry_mut(next).previous_sibling = previous;
        }
        let entry = self.entry_mut(at);
        (entry.parent, entry.next_sibling, entry.previous_sibling) = (NONE, NONE, NONE);
        entry.next_alias = NONE;
    }

    /// Sees to it that fewer than `aliases_max` entries reserve the positions of one content, so that one
    /// is left. Of the bound ones there are fewer, or the store would have been refused.
    fn make_room(&mut self, positions: &mut Positions, parent: u32, local: LocalHash) {
        while self.same_content(parent, local).count() >= self.aliases_max {
            let Some(unbound) = self.same_content(parent, local).find(|at| !self.is_bound(*at)) else { return };
            self.dislodge(positions, unbound, parent);
        }
    }

    /// Gives up the position that an unbound entry reserves; what hangs under it waits for it.
    /// `keep` is not forgotten.
    fn dislodge(&mut self, positions: &mut Positions, at: u32, keep: u32) {
        self.unlink(at);
        self.unplace(positions, at, keep);
        if self.entry(at).first_child == NONE {
            self.forget(at);
        }
    }

    /// Gives positions to an entry whose parent has one, and to everything under it.
    fn place(&mut self, positions: &mut Positions, from: u32) {
        let mut stack = std::mem::take(&mut self.stack);
        stack.clear();
        stack.push(from);
        while let Some(at) = stack.pop() {
            let (parent, local) = (self.entry(at).parent, self.entry(at).local);
            let mut taken = 0_u64;
            for other in self.same_content(parent, local).filter(|other| self.is_placed(*other)) {
                taken |= 1 << self.entry(other).alias;
            }
            let parent_node = self.entry(parent).node;
            self.occupy(positions, at, parent_node, taken.trailing_ones() as u8);
            self.push_children(at, &mut stack);
        }
        self.stack = stack;
    }

    /// Takes an unlinked entry and everything under it from their positions. Unbound entries under it no
    /// longer reserve anything: they are unlinked, and forgotten (but for `keep`) if nothing waits for them.
    fn unplace(&mut self, positions: &mut Positions, from: u32, keep: u32) {
        let mut all = vec![from];
        let mut seen = 0;
        while seen < all.len() {
            let at = all[seen];
            seen += 1;
            self.vacate(positions, at);
            self.push_children(at, &mut all);
        }
        // Children come after their parent in `all`, so from the end they are seen to first.
        for at in all.into_iter().skip(1).rev() {
            if self.is_bound(at) {
                continue;
            }
            self.unlink(at);
            if at != keep && self.entry(at).first_child == NONE {
                self.forget(at);
            }
        }
    }

    fn push_children(&self, at: u32, onto: &mut Vec<u32>) {
        let mut child = self.entry(at).first_child;
        while child != NONE {
            onto.push(child);
            child = self.entry(child).next_sibling;
        }
    }

    /// Whether nothing speaks for keeping an entry (and it has not been forgotten already).
    fn is_idle(&self, at: u32) -> bool {
        let entry = self.entry(at);
        entry.used && entry.first_child == NONE && !self.is_bound(at)
    }

    /// What becomes of an entry that has just lost its last reference.
    pub(super) fn unbind(&mut self, positions: &mut Positions, at: u32, reserved_max: u64) {
        let parent = self.entry(at).parent;
        if self.entry(at).first_child == NONE {
            self.prune(positions, at);
        } else if parent != NONE && !self.is_placed(at) {
            self.unlink(at);
            self.prune(positions, parent);
        } else if parent != NONE && self.reserved() > reserved_max {
            self.dislodge(positions, at, NONE);
            self.prune(positions, parent);
        }
    }

    /// Forgets an entry if it is unbound and nothing hangs under it; then its parent, and so on.
    fn prune(&mut self, positions: &mut Positions, mut at: u32) {
        while at != ROOT && at != NONE && self.is_idle(at) {
            let parent = self.entry(at).parent;
            if parent != NONE {
                self.unlink(at);
            }
            if self.is_placed(at) {
                self.vacate(positions, at);
            }
            self.forget(at);
            at = parent;
        }
    }
}
