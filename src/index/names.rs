//! Names and the words they lie in: how they become known, are forgotten, and whose the granules are.

use super::node::{Column, Extent, GRANULE_WORDS, NodeId};
use super::tree::{AHEAD, Tree};
use crate::ids::EngineHash;

impl Tree {
    /// Makes a word known by its name, also where other words have it.
    pub(super) fn put_name(&mut self, name: u64, word: u32) {
        let Self { slots, arena, .. } = self;
        let spot = slots.spot(name);
        let name_of = |word: u32| arena.word(word);
        if slots.put_unless(spot, word, |other| name_of(other) == name, name_of).is_err() {
            slots.put(spot, word, name_of);
            *self.homonyms.entry(EngineHash(name)).or_insert(0) += 1;
        }
    }

    fn take_name(&mut self, name: u64, word: u32) {
        let taken = self.slots.take(self.slots.spot(name), word);
        debug_assert!(taken, "a name that is forgotten was known");
        if !self.homonyms.is_empty()
            && let Some(others) = self.homonyms.get_mut(&EngineHash(name))
        {
            *others -= 1;
            if *others == 0 {
                self.homonyms.remove(&EngineHash(name));
            }
        }
    }

    /// Forgets the names of an extent from block `from` up to `to`.
    pub(super) fn take_names(&mut self, names: &Extent, from: u16, to: u16) {
        for at in from..to.min(from + AHEAD as u16) {
            let name = self.name(names.base + u32::from(at)).0;
            self.slots.prefetch(self.slots.spot(name));
        }
        for at in from..to {
            if let Some(ahead) = at.checked_add(AHEAD as u16).filter(|ahead| *ahead < to) {
                let name = self.name(names.base + u32::from(ahead)).0;
                self.slots.prefetch(self.slots.spot(name));
            }
            let word = names.base + u32::from(at);
            self.take_name(self.name(word).0, word);
        }
    }

    /// Gives back the granules of names from block `from` on; only the writer looks at names.
    pub(super) fn free_names(&mut self, names: &Extent, from: u16) {
        let (base, words) = names.granules_from(from);
        if words > 0 {
            self.arena.free(base, words);
        }
    }

    /// Marks whose the granules are in which an extent of names lies, up to word `end`; the granule in which
    /// that is, if it is not at a granule's end, is marked as the one's whose names come next.
    pub(super) fn own(&mut self, names: &Extent, end: u32, id: NodeId) {
        let base = names.base / GRANULE_WORDS * GRANULE_WORDS;
        let end = end / GRANULE_WORDS * GRANULE_WORDS;
        if base < end {
            self.arena.set_owner(base, end - base, id.0);
        }
    }

    /// As [`own`](Self::own), for an extent after which no other's names come.
    pub(super) fn own_all(&mut self, names: &Extent, id: NodeId) {
        let end = (names.base + u32::from(names.room)).next_multiple_of(GRANULE_WORDS);
        self.own(names, end, id);
    }

    /// Gives back an extent of names that a node no longer needs.
    ///
    /// The granule in which it begins is the node's above if that has names in it too; the one in which it
    /// ends becomes the node's below if that has.
    pub(super) fn release_names(&mut self, id: NodeId, names: Extent) {
        let end = names.base + u32::from(names.room);
        let below = self.names_behind(id, end);
        let is_guest = !names.base.is_multiple_of(GRANULE_WORDS) && !names.owns_head;
        if is_guest && end <= names.base.next_multiple_of(GRANULE_WORDS) {
            if below.is_none() {
                self.hand_head(id, &names);
            }
            return;
        }
        if is_guest {
            self.hand_head(id, &names);
        }
        if let Some((node, column)) = below {
            self.nodes[node].columns[column].names.owns_head = true;
        }
        self.free_names(&names.without_tail(below.is_some()), 0);
    }

    /// The names that follow in the granule in which an extent ends. It is marked as the last one's.
    fn names_behind(&self, id: NodeId, end: u32) -> Option<(NodeId, usize)> {
        let granule_end = end.next_multiple_of(GRANULE_WORDS);
        let mut below = NodeId(if end == granule_end { 0 } else { self.arena.owner(end) });
        let mut first = None;
        while below != id && below != NodeId::ROOT && self.nodes.is_used(below) {
            let mut columns = self.nodes[below].columns.iter();
            if let Some(at) = columns.position(|column| (end..granule_end).contains(&column.names.base)) {
                first = Some((below, at));
            }
            below = self.nodes[below].parent;
        }
        first
    }

    /// The granule in which an extent begins goes back to the nearest node above that has names there.
    fn hand_head(&mut self, id: NodeId, names: &Extent) {
        let granule = names.base / GRANULE_WORDS * GRANULE_WORDS;
        let mut above = self.nodes[id].parent;
        while above.is_some() && above != NodeId::ROOT {
            let is_there = |column: &Column| {
                let own = column.names.base;
                own < names.base && own + u32::from(column.len) > granule
            };
            if self.nodes[above].columns.iter().any(is_there) {
                self.arena.set_owner(granule, GRANULE_WORDS, above.0);
                return;
            }
            above = self.nodes[above].parent;
        }
    }
}
