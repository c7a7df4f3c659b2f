//! Blocks of one worker that have no place in the tree: their chain to the root is not known.

use super::lanes::Lane;
use crate::ids::{EngineHash, LocalHash, Seed};
use hashbrown::HashMap;
use smallvec::SmallVec;

/// A block that waits.
#[derive(Clone, Debug)]
pub(super) struct Waiter {
    /// `None` never waits by itself, but may below a block that has lost its place.
    pub(super) parent: Option<EngineHash>,
    pub(super) local: LocalHash,
    pub(super) seed: Seed,
    /// Lanes with a reference to it; never empty.
    pub(super) lanes: SmallVec<[Lane; 2]>,
    /// Its neighbours among what waits for the same parent.
    next: Option<EngineHash>,
    previous: Option<EngineHash>,
}

impl Waiter {
    pub(super) const fn new(
        parent: Option<EngineHash>,
        local: LocalHash,
        seed: Seed,
        lanes: SmallVec<[Lane; 2]>,
    ) -> Self {
        Self { parent, local, seed, lanes, next: None, previous: None }
    }
}

/// All of them, by their names and by what they wait for. Nothing here takes longer where many wait for one.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    blocks: HashMap<EngineHash, Waiter>,
    /// The first of those that wait for a parent; each knows the next.
    children: HashMap<EngineHash, EngineHash>,
    /// How many of one content wait for a parent.
    alike: HashMap<(EngineHash, LocalHash), u32>,
}

impl Waiting {
    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    pub(super) fn get(&self, name: EngineHash) -> Option<&Waiter> {
        self.blocks.get(&name)
    }

    /// The lanes that refer to a block that waits.
    pub(super) fn lanes_mut(&mut self, name: EngineHash) -> Option<&mut SmallVec<[Lane; 2]>> {
        self.blocks.get_mut(&name).map(|waiter| &mut waiter.lanes)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (EngineHash, &Waiter)> {
        self.blocks.iter().map(|(name, waiter)| (*name, waiter))
    }

    /// What waits for `parent`.
    pub(super) fn children(&self, parent: EngineHash) -> impl Iterator<Item = EngineHash> + '_ {
        let first = self.children.get(&parent).copied();
        std::iter::successors(first, |name| self.blocks.get(name)?.next)
    }

    /// How many blocks of one content wait for `parent`.
    pub(super) fn alike(&self, parent: EngineHash, local: LocalHash) -> usize {
        self.alike.get(&(parent, local)).map_or(0, |blocks| *blocks as usize)
    }

    pub(super) fn insert(&mut self, name: EngineHash, waiter: Waiter) {
        let mut waiter = Waiter { next: None, previous: None, ..waiter };
        if let Some(parent) = waiter.parent {
            *self.alike.entry((parent, waiter.local)).or_insert(0) += 1;
            waiter.next = self.children.insert(parent, name);
            if let Some(next) = waiter.next.and_then(|next| self.blocks.get_mut(&next)) {
                next.previous = Some(name);
            }
        }
        self.blocks.insert(name, waiter);
    }

    pub(super) fn remove(&mut self, name: EngineHash) -> Option<Waiter> {
        let waiter = self.blocks.remove(&name)?;
        let Some(parent) = waiter.parent else { return Some(waiter) };
        if let Some(next) = waiter.next.and_then(|next| self.blocks.get_mut(&next)) {
            next.previous = waiter.previous;
        }
        match (waiter.previous.and_then(|previous| self.blocks.get_mut(&previous)), waiter.next) {
            (Some(previous), next) => previous.next = next,
            (None, Some(next)) => drop(self.children.insert(parent, next)),
            (None, None) => drop(self.children.remove(&parent)),
        }
        let alike = (parent, waiter.local);
        match self.alike.get_mut(&alike) {
            Some(blocks) if *blocks > 1 => *blocks -= 1,
            _ => drop(self.alike.remove(&alike)),
        }
        Some(waiter)
    }

    /// Takes lanes off all blocks; those to which none is left go.
    pub(super) fn forget(&mut self, lanes: &[Lane]) {
        let mut gone = Vec::new();
        for (name, waiter) in &mut self.blocks {
            waiter.lanes.retain(|lane| !lanes.contains(lane));
            if waiter.lanes.is_empty() {
                gone.push(*name);
            }
        }
        for name in gone {
            self.remove(name);
        }
    }

    /// Panics unless blocks and children say the same.
    #[cfg(test)]
    pub(super) fn check(&self) {
        let below = self.blocks.values().filter(|waiter| waiter.parent.is_some()).count();
        let known: usize = self.children.keys().map(|parent| self.children(*parent).count()).sum();
        assert_eq!((known, self.alike.values().sum::<u32>() as usize), (below, below), "children");
        for (name, waiter) in &self.blocks {
            assert!(waiter.parent.is_none_or(|parent| self.children(parent).any(|child| child == *name)), "{name:?}");
        }
    }

    /// What it may take more when so many more wait.
    pub(super) fn growth_bytes(&self, more: usize) -> u64 {
        if self.blocks.len() + more <= self.blocks.capacity() {
            return 0;
        }
        let entry = size_of::<(EngineHash, Waiter)>() + size_of::<((EngineHash, LocalHash), u32)>();
        let entries = ((self.blocks.len() + more) * 8 / 7).next_power_of_two();
        (entries * (entry + size_of::<(EngineHash, EngineHash)>())) as u64
    }

    pub(super) fn bytes(&self) -> u64 {
        let blocks = self.blocks.capacity() * size_of::<(EngineHash, Waiter)>();
        let children = self.children.capacity() * size_of::<(EngineHash, EngineHash)>();
        let alike = self.alike.capacity() * size_of::<((EngineHash, LocalHash), u32)>();
        (blocks + children + alike) as u64
    }
}
