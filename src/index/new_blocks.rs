//! New blocks in the tree: their words, their names, their nodes, and room at the end of a leaf. Readers see nothing of
//! them until their nodes are published.

use super::holders::HolderBit;
use super::node::{Column, Entry, Extent, GRANULE_WORDS, Node, NodeId, Place};
use super::tree::Tree;
use crate::ids::{EngineHash, LocalHash, Seed};
use smallvec::{SmallVec, smallvec};

/// Why blocks could not be stored. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoreError {
    /// A case for the slow path.
    NeedsSlowPath,
    /// The arena has run out of words.
    ArenaFull,
}

/// Whether a name may be stored that another word already has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DuplicateNames {
    Refused,
    Allowed,
}

/// Consecutive blocks of a store.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockSlice<'a> {
    pub(super) locals: &'a [LocalHash],
    pub(super) names: &'a [EngineHash],
    pub(super) seed: Seed,
}

impl<'a> BlockSlice<'a> {
    pub(super) fn from(&self, at: usize) -> Self {
        Self { locals: &self.locals[at..], names: &self.names[at..], seed: self.seed }
    }

    pub(super) fn first(&self, blocks: usize) -> Self {
        Self { locals: &self.locals[..blocks], names: &self.names[..blocks], seed: self.seed }
    }

    pub(super) const fn len(&self) -> usize {
        self.names.len()
    }

    pub(super) fn local_words(&self) -> &'a [u64] {
        super::types::of_locals(self.locals)
    }

    pub(super) fn name_words(&self) -> &'a [u64] {
        super::types::of_names(self.names)
    }
}

impl Tree {
    pub(super) fn extent(&mut self, words: u16) -> Result<Extent, StoreError> {
        let granted = self.arena.allocate(u32::from(words)).ok_or(StoreError::ArenaFull)?;
        Ok(Extent::of(granted.base, granted.words))
    }

    /// Writes names and adds them to the map. If one of them is there already and may not be, removes them again.
    fn put_names(&mut self, base: u32, names: &[u64], duplicate_names: DuplicateNames) -> Result<(), StoreError> {
        self.arena.write(base, names);
        if duplicate_names == DuplicateNames::Allowed {
            for (at, name) in names.iter().enumerate() {
                self.put_name(*name, base + at as u32);
            }
            return Ok(());
        }
        let Self { name_map, arena, .. } = self;
        let put = name_map.put_new(names, base, |word| arena.word(word));
        put.map_err(|done| {
            name_map.take(&names[..done], base);
            StoreError::NeedsSlowPath
        })
    }

    /// Makes a chain of nodes below `parent` from blocks with new names; `holder` covers them all. Returns the nodes,
    /// nearest the root first. Readers see nothing of them until they are inserted.
    pub(super) fn chain(
        &mut self,
        parent: NodeId,
        holder: HolderBit,
        slice: BlockSlice<'_>,
    ) -> Result<SmallVec<[NodeId; 4]>, StoreError> {
        let mut made: SmallVec<[NodeId; 4]> = SmallVec::new();
        let (mut above, mut rest) = (parent, slice);
        while rest.len() > 0 {
            let len = rest.len().min(usize::from(self.node_blocks_max));
            match self.make(above, holder, rest.first(len), DuplicateNames::Refused) {
                Ok(id) => {
                    made.push(id);
                    above = id;
                }
                Err(error) => {
                    made.into_iter().rev().for_each(|id| self.unmake(id));
                    return Err(error);
                }
            }
            rest = rest.from(len);
        }
        Ok(made)
    }

    fn make(
        &mut self,
        parent: NodeId,
        holder: HolderBit,
        slice: BlockSlice<'_>,
        duplicate_names: DuplicateNames,
    ) -> Result<NodeId, StoreError> {
        let len = slice.len() as u16;
        let locals = self.extent(len)?;
        let names = match self.extent(len) {
            Ok(names) => names,
            Err(error) => {
                self.arena.free(locals.base, u32::from(locals.room));
                return Err(error);
            }
        };
        if let Err(error) = self.put_names(names.base, slice.name_words(), duplicate_names) {
            self.arena.free(locals.base, u32::from(locals.room));
            self.arena.free(names.base, u32::from(names.room));
            return Err(error);
        }
        self.arena.write(locals.base, slice.local_words());
        let id = self.node(parent, locals, len);
        self.seal(id, 0, len);
        let node = &mut self.nodes[id];
        node.columns.push(Column { names, len, users: 1, seed: slice.seed });
        node.entries = smallvec![Entry { cut: len, ..Entry::anchor(holder, 0) }];
        self.holders.add_nodes(holder, 1);
        self.own_all(&names, id);
        Ok(id)
    }

    /// The nodes directly below one that begin with this content.
    pub(super) fn variants(&self, parent: NodeId, local: LocalHash) -> SmallVec<[NodeId; 2]> {
        let Some(main) = self.child(parent, local, 0) else { return SmallVec::new() };
        let mut all = smallvec![main];
        let mut variant = 1;
        while all.len() <= usize::from(self.nodes[main].forks) {
            all.extend(self.child(parent, local, variant));
            variant += 1;
        }
        all
    }

    /// Adds a node directly below one for a block that `others` may have there under other names. It is published at
    /// once: the holder bit has an entry there and covers nothing yet.
    pub(super) fn new_variant(
        &mut self,
        parent: NodeId,
        holder: HolderBit,
        slice: BlockSlice<'_>,
        others: &[NodeId],
    ) -> Result<NodeId, StoreError> {
        let was_leaf = !self.nodes[parent].has_children();
        let id = self.make(parent, holder, slice, DuplicateNames::Allowed)?;
        let taken = |variant: u8| others.iter().any(|other| self.nodes[*other].variant == variant);
        let variant = (0..=u8::MAX).find(|variant| !taken(*variant)).unwrap_or(u8::MAX);
        self.nodes[id].variant = variant;
        self.nodes[id].entries[0].cut = 0;
        self.insert(id);
        if let Some(main) = others.first() {
            self.nodes[*main].forks += 1;
            self.publish(*main);
        }
        if was_leaf {
            self.publish(parent);
        }
        Ok(id)
    }

    /// Enters a holder bit at a node's first block: into the column that has its name for that block, or into a new
    /// one.
    pub(super) fn newcomer(&mut self, id: NodeId, holder: HolderBit, slice: BlockSlice<'_>) -> Result<(), StoreError> {
        let same =
            |column: &Column| column.seed == slice.seed && self.names(column).first() == slice.name_words().first();
        let known = self.nodes[id].columns.iter().position(same).map(|at| at as u16);
        let column = match known {
            Some(column) => column,
            None => self.new_column(id, slice, DuplicateNames::Allowed)?,
        };
        self.enter(id, holder, column);
        Ok(())
    }

    /// A node below `parent` for blocks whose local hashes are written, without names.
    pub(super) fn node(&mut self, parent: NodeId, locals: Extent, len: u16) -> NodeId {
        let depth = self.nodes[parent].depth + u32::from(self.nodes[parent].len);
        let first = self.arena.word(locals.base);
        let node = Node { parent, depth, first, locals, len, written: len, initial: len, used: true, ..Node::EMPTY };
        let id = self.nodes.add(node);
        self.nodes.link(id);
        id
    }

    /// Undoes a node that no reader has seen.
    fn unmake(&mut self, id: NodeId) {
        let (locals, names) = (self.nodes[id].locals, self.nodes[id].columns[0]);
        self.take_names(&names.names, 0, names.len);
        self.arena.free(names.names.base, u32::from(names.names.room));
        self.arena.free(locals.base, u32::from(locals.room));
        for entry in &self.nodes[id].entries {
            self.holders.drop_node(entry.holder);
        }
        self.nodes.unlink(id);
        self.nodes.drop(id);
    }

    /// Whether blocks may be appended to a node: it is a leaf that only this holder bit covers, and wholly.
    pub(super) fn may_append(&self, id: NodeId, holder: HolderBit, seed: Seed) -> bool {
        let node = &self.nodes[id];
        let [entry] = &node.entries[..] else { return false };
        let [column] = &node.columns[..] else { return false };
        id != NodeId::ROOT
            && !node.has_children()
            && (node.forks, node.len < self.node_blocks_max) == (0, true)
            && (entry.holder, entry.cut, column.len, column.seed) == (holder, node.len, node.len, seed)
    }

    /// Appends a whole store at `place`, if that is the end of a leaf that [allows it](Self::may_append), if there is room,
    /// and if no block of the leaf was cut off there. So it is with nearly every block that an engine generates. Returns
    /// whether it did. Readers see the blocks when the node is [published](Self::publish_longer).
    pub(super) fn append_in_room(
        &mut self,
        place: Place,
        holder: HolderBit,
        slice: BlockSlice<'_>,
    ) -> Result<bool, StoreError> {
        let node = &self.nodes[place.node];
        let len = node.len;
        if place.at != len || !self.may_append(place.node, holder, slice.seed) {
            return Ok(false);
        }
        let (locals, names) = (node.locals, node.columns[0].names);
        let room = self.node_blocks_max.min(locals.room).min(names.room) - len;
        // A reader may still compare blocks that were cut off.
        if slice.len() > usize::from(room) || node.written != len {
            return Ok(false);
        }
        self.put_names(names.base + u32::from(len), slice.name_words(), DuplicateNames::Refused)?;
        self.arena.write(locals.base + u32::from(len), slice.local_words());
        let end = len + slice.len() as u16;
        let node = &mut self.nodes[place.node];
        (node.len, node.written, node.columns[0].len, node.entries[0].cut) = (end, end, end, end);
        self.seal(place.node, len, end);
        Ok(true)
    }

    /// Appends to a node that [allows it](Self::may_append) as many blocks as have room, and returns their number.
    /// Readers see them when the node is published.
    pub(super) fn append(
        &mut self,
        id: NodeId,
        slice: BlockSlice<'_>,
        duplicate_names: DuplicateNames,
    ) -> Result<usize, StoreError> {
        let node = &self.nodes[id];
        let len = node.len;
        let blocks = slice.len().min(usize::from(self.node_blocks_max - len));
        let slice = slice.first(blocks);
        // A reader may still compare blocks that were cut off here. Equal ones may stay; others must go elsewhere.
        let stale = usize::from(node.written - len).min(blocks);
        let base = node.locals.base + u32::from(len);
        if stale > 0 && self.arena.words(base, stale as u32) != &slice.local_words()[..stale] {
            return Ok(0);
        }
        if !self.make_room(id, len + blocks as u16)? {
            return Ok(0);
        }
        let node = &self.nodes[id];
        let (locals, names) = (node.locals, node.columns[0].names);
        self.put_names(names.base + u32::from(len), slice.name_words(), duplicate_names)?;
        let written = usize::from(self.nodes[id].written - len).min(blocks);
        self.arena.write(locals.base + u32::from(len) + written as u32, &slice.local_words()[written..]);
        let end = len + blocks as u16;
        let node = &mut self.nodes[id];
        node.len = end;
        node.written = node.written.max(end);
        node.columns[0].len = end;
        node.entries[0].cut = end;
        self.seal(id, len, end);
        Ok(blocks)
    }

    /// Writes the fingerprints of a node's blocks from `from` to `to`, before readers are shown the node with them.
    #[inline]
    pub(super) fn seal(&mut self, id: NodeId, from: u16, to: u16) {
        let Node { locals, len, .. } = self.nodes[id];
        self.arena.seal(locals.base, u32::from(len), (u32::from(from), u32::from(to)));
    }

    /// Undoes an append beyond the first `len` blocks that was not published yet.
    pub(super) fn unappend(&mut self, id: NodeId, len: u16) {
        if self.nodes[id].len <= len {
            return;
        }
        let column = self.nodes[id].columns[0];
        self.take_names(&column.names, len, column.len);
        let node = &mut self.nodes[id];
        node.len = len;
        node.columns[0].len = len;
        node.entries[0].cut = len;
    }

    /// Names the blocks of a node that follow those of a column.
    pub(super) fn extend_column(
        &mut self,
        id: NodeId,
        column: u16,
        slice: BlockSlice<'_>,
        duplicate_names: DuplicateNames,
    ) -> Result<(), StoreError> {
        let Column { names, len, .. } = self.nodes[id].columns[usize::from(column)];
        let wanted = len + slice.len() as u16;
        if names.room < wanted {
            let wider = self.widen(names, wanted);
            self.nodes[id].columns[usize::from(column)].names = wider;
            self.own_all(&wider, id);
            if wider.room < wanted {
                let room = (wanted * 2).min(self.nodes[id].len).max(wanted);
                self.move_names(id, usize::from(column), room)?;
            }
        }
        let base = self.nodes[id].columns[usize::from(column)].names.base + u32::from(len);
        self.put_names(base, slice.name_words(), duplicate_names)?;
        self.nodes[id].columns[usize::from(column)].len = wanted;
        Ok(())
    }

    /// Adds a column for the first blocks of a node; returns it, without users yet.
    pub(super) fn new_column(
        &mut self,
        id: NodeId,
        slice: BlockSlice<'_>,
        duplicate_names: DuplicateNames,
    ) -> Result<u16, StoreError> {
        let names = self.extent(slice.len() as u16)?;
        if let Err(error) = self.put_names(names.base, slice.name_words(), duplicate_names) {
            self.arena.free(names.base, u32::from(names.room));
            return Err(error);
        }
        self.own_all(&names, id);
        let node = &mut self.nodes[id];
        node.columns.push(Column { names, len: slice.len() as u16, users: 0, seed: slice.seed });
        Ok(node.columns.len() as u16 - 1)
    }

    /// Forgets the names of a column from block `len` on.
    pub(super) fn truncate_column(&mut self, id: NodeId, column: u16, len: u16) {
        let column = &mut self.nodes[id].columns[usize::from(column)];
        let Column { names, len: had, .. } = *column;
        column.len = len;
        self.take_names(&names, len, had);
    }

    /// Makes room for `wanted` blocks in a node with one column: in place, or elsewhere if enough blocks were appended
    /// so far to pay for the move.
    fn make_room(&mut self, id: NodeId, wanted: u16) -> Result<bool, StoreError> {
        let node = &self.nodes[id];
        let (locals, names) = (node.locals, node.columns[0].names);
        let roomy = |extent: &Extent| extent.room >= wanted;
        let locals = if roomy(&locals) { locals } else { self.widen(locals, wanted) };
        self.nodes[id].locals = locals;
        let names = if roomy(&names) { names } else { self.widen(names, wanted) };
        if names.room != self.nodes[id].columns[0].names.room {
            self.nodes[id].columns[0].names = names;
            self.own_all(&names, id);
        }
        if roomy(&locals) && roomy(&names) {
            return Ok(true);
        }
        let node = &self.nodes[id];
        if u32::from(node.len - node.initial) * 2 < u32::from(node.len) && node.len > GRANULE_WORDS as u16 {
            return Ok(false);
        }
        let room = (wanted * 2).min(self.node_blocks_max.next_multiple_of(GRANULE_WORDS as u16)).max(wanted);
        if !roomy(&locals) {
            self.move_locals(id, room)?;
        }
        if !roomy(&names) {
            self.move_names(id, 0, room)?;
        }
        Ok(true)
    }

    /// Lengthens an extent in place, if the words behind it are free.
    fn widen(&mut self, extent: Extent, wanted: u16) -> Extent {
        let base = extent.base / GRANULE_WORDS * GRANULE_WORDS;
        let end = extent.base + u32::from(extent.room);
        let wanted_end = (extent.base + u32::from(wanted)).next_multiple_of(GRANULE_WORDS);
        if !end.is_multiple_of(GRANULE_WORDS) || !self.arena.extend(base, end - base, wanted_end - base) {
            return extent;
        }
        Extent { room: (wanted_end - extent.base) as u16, ..extent }
    }

    /// Moves a node's local hashes to where there is more room. Readers are shown the new words at once, whatever the
    /// outcome of the event. The old words are reused after the readers that may look at them have left.
    fn move_locals(&mut self, id: NodeId, room: u16) -> Result<(), StoreError> {
        let to = self.extent(room)?;
        let (from, len) = (self.nodes[id].locals, self.nodes[id].len);
        self.arena.copy(from.base, to.base, u32::from(len));
        self.waste_locals(&from, 0);
        let node = &mut self.nodes[id];
        (node.locals, node.written) = (to, len);
        self.seal(id, 0, len);
        self.publish(id);
        Ok(())
    }

    /// Moves one of a node's columns to where there is more room.
    fn move_names(&mut self, id: NodeId, column: usize, room: u16) -> Result<(), StoreError> {
        let to = self.extent(room)?;
        let Column { names: from, len, .. } = self.nodes[id].columns[column];
        self.arena.copy(from.base, to.base, u32::from(len));
        self.rename(from.base, to.base, len);
        self.nodes[id].columns[column].names = to;
        self.release_names(id, from);
        self.own_all(&to, id);
        Ok(())
    }

    /// Lets names that have been copied lead to their new words.
    pub(super) fn rename(&mut self, from: u32, to: u32, len: u16) {
        let Self { name_map, arena, .. } = self;
        let replaced = name_map.replace(arena.words(to, u32::from(len)), from, to);
        debug_assert_eq!(replaced, usize::from(len), "names that move were known");
    }
}
