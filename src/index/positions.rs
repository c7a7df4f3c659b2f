//! The writer's side of the trie: which positions exist, which lanes are in use, and the log of changes.

use super::lanes::{Lane, LaneOwner};
use super::trie::{ROOT_NODE, Step, Trie, TrieOp};
use crate::ids::{LocalHash, Tier, WorkerSlot};
use hashbrown::HashMap;
use left_right::WriteHandle;
use rustc_hash::FxBuildHasher;
use std::collections::BTreeSet;

/// No position: a block whose chain to the root is not known.
pub(super) const NO_NODE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Position {
    step: Step,
    alias: u8,
}

/// A position and the blocks, over all workers, that are there.
#[derive(Clone, Copy, Debug)]
struct Place {
    position: Position,
    users: u32,
    /// A child whose position is found here and not in `by_position`; `ROOT_NODE` for none.
    child: u32,
}

/// All positions of a shard, and the only hand on its [`Trie`].
///
/// A position stays while a block of any worker is there, also one that is only remembered because
/// others hang under it. Its number is used again afterwards.
#[derive(Debug)]
pub(super) struct Positions {
    places: Vec<Place>,
    free: Vec<u32>,
    by_position: HashMap<Position, u32, FxBuildHasher>,
    lanes_len: u32,
    lanes_free: BTreeSet<Lane>,
    trie: WriteHandle<Trie, TrieOp>,
}

impl Positions {
    pub(super) fn new(trie: WriteHandle<Trie, TrieOp>) -> Self {
        let root = Position { step: Step { parent: ROOT_NODE, local: LocalHash(0) }, alias: 0 };
        Self {
            places: vec![Place { position: root, users: 1, child: ROOT_NODE }],
            free: Vec::new(),
            by_position: HashMap::default(),
            lanes_len: 0,
            lanes_free: BTreeSet::new(),
            trie,
        }
    }

    /// Whether `more` positions can be numbered.
    pub(super) fn room_for(&self, more: u64) -> bool {
        (self.places.len() - self.free.len()) as u64 + more < u64::from(NO_NODE) - 1
    }

    /// One block more at a position, which comes into being if need be.
    pub(super) fn enter(&mut self, parent: u32, local: LocalHash, alias: u8) -> u32 {
        let position = Position { step: Step { parent, local }, alias };
        let node = self.find(position).unwrap_or_else(|| self.create(position));
        self.places[node as usize].users += 1;
        node
    }

    fn find(&self, position: Position) -> Option<u32> {
        let child = self.places[position.step.parent as usize].child;
        if child != ROOT_NODE && self.places[child as usize].position == position {
            return Some(child);
        }
        self.by_position.get(&position).copied()
    }

    fn create(&mut self, position: Position) -> u32 {
        let node = match self.free.pop() {
            Some(node) => {
                let place = &mut self.places[node as usize];
                // Debris may still be under a number that is used again, so its child is left as it is.
                (place.position, place.users) = (position, 0);
                node
            }
            None => {
                self.places.push(Place { position, users: 0, child: ROOT_NODE });
                self.places.len() as u32 - 1
            }
        };
        let parent = &mut self.places[position.step.parent as usize];
        if parent.child == ROOT_NODE {
            parent.child = node;
        } else {
            self.by_position.insert(position, node);
        }
        node
    }

    /// One block fewer at a position. Its lanes must have been dropped.
    pub(super) fn leave(&mut self, node: u32) {
        let place = &mut self.places[node as usize];
        place.users -= 1;
        if place.users > 0 {
            return;
        }
        let position = place.position;
        self.free.push(node);
        let parent = &mut self.places[position.step.parent as usize];
        if parent.child == node {
            parent.child = ROOT_NODE;
        } else {
            self.by_position.remove(&position);
        }
    }

    /// A lane holds a position from now on.
    pub(super) fn hold(&mut self, node: u32, lane: Lane) {
        let step = self.places[node as usize].position.step;
        self.trie.append(TrieOp::Hold { node, step, lane });
    }

    /// A lane no longer holds a position, if it did.
    pub(super) fn drop_hold(&mut self, node: u32, lane: Lane) {
        let step = self.places[node as usize].position.step;
        self.trie.append(TrieOp::Drop { node, step, lane });
    }

    /// A lane that no position knows.
    pub(super) fn give_lane(&mut self, slot: WorkerSlot, tier: Tier) -> Lane {
        let lane = self.lanes_free.pop_first().unwrap_or_else(|| {
            self.lanes_len += 1;
            Lane(self.lanes_len - 1)
        });
        self.trie.append(TrieOp::Give { lane, owner: LaneOwner { slot, tier } });
        lane
    }

    /// A lane that counts for nothing any more, though positions may still know it.
    pub(super) fn retire_lane(&mut self, lane: Lane) {
        self.trie.append(TrieOp::Retire { lane });
    }

    /// A retired lane that no position knows any more.
    pub(super) fn free_lane(&mut self, lane: Lane) {
        self.lanes_free.insert(lane);
    }

    /// Shows readers everything since the last time.
    pub(super) fn publish(&mut self) {
        self.trie.append(TrieOp::Publish);
        self.trie.publish();
    }

    /// Whether readers see no position at all.
    #[cfg(test)]
    pub(super) fn published_is_empty(&self) -> bool {
        self.trie.enter().is_some_and(|trie| trie.is_empty())
    }

    /// Positions that exist, without the root.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.places.len() - self.free.len() - 1
    }

    /// Lanes that are given out or not yet swept.
    #[cfg(test)]
    pub(super) fn lanes_in_use(&self) -> usize {
        self.lanes_len as usize - self.lanes_free.len()
    }
}
