//! Blocks of a dump, and what they add up to.

use xxhash_rust::xxh3::xxh3_64;

use crate::ids::{EngineHash, GroupId, LocalHash, Seed, Tier};
use crate::index::StoreBlocks;

/// Some stores of a dump, in arenas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DumpChunk {
    runs: Vec<Run>,
    hashes: Vec<EngineHash>,
    locals: Vec<LocalHash>,
}

/// One store, beside its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    parent: Option<EngineHash>,
    tier: Tier,
    group: GroupId,
    seed: Seed,
    /// Where its blocks begin and end.
    from: usize,
    to: usize,
}

impl DumpChunk {
    /// Takes one more store. Blocks without a local hash, or the other way round, are left out.
    pub fn push(&mut self, store: &StoreBlocks<'_>) {
        let from = self.hashes.len();
        let blocks = store.hashes.len().min(store.locals.len());
        self.hashes.extend(&store.hashes[..blocks]);
        self.locals.extend(&store.locals[..blocks]);
        let StoreBlocks { parent, tier, group, seed, .. } = *store;
        self.runs.push(Run { parent, tier, group, seed, from, to: self.hashes.len() });
    }

    /// Drops every store and keeps the memory.
    pub fn clear(&mut self) {
        self.runs.clear();
        self.hashes.clear();
        self.locals.clear();
    }

    /// How many stores there are.
    #[must_use]
    pub const fn stores(&self) -> usize {
        self.runs.len()
    }

    /// How many blocks they hold together.
    #[must_use]
    pub const fn blocks(&self) -> usize {
        self.hashes.len()
    }

    /// A store by its number.
    #[must_use]
    pub fn store(&self, number: usize) -> Option<StoreBlocks<'_>> {
        let Run { parent, tier, group, seed, from, to } = *self.runs.get(number)?;
        Some(StoreBlocks { parent, hashes: &self.hashes[from..to], locals: &self.locals[from..to], tier, group, seed })
    }
}

/// A number of references and a digest of them that does not depend on their order: two dumps with the same
/// hold the same. It guards against loss and mixing up, not against an adversary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct References {
    /// References: a block counts once for each (tier, group) and time it is held.
    pub blocks: u64,
    /// The sum of their hashes.
    pub digest: u64,
}

impl References {
    /// Adds those of one store.
    pub fn add(&mut self, store: &StoreBlocks<'_>) {
        let mut parent = store.parent;
        for (hash, local) in store.hashes.iter().zip(store.locals) {
            let mut bytes = [0; 38];
            // A block at the root is told from one whose parent is called 0.
            bytes[0] = u8::from(parent.is_some());
            bytes[1..9].copy_from_slice(&parent.unwrap_or_default().0.to_le_bytes());
            bytes[9..17].copy_from_slice(&hash.0.to_le_bytes());
            bytes[17..25].copy_from_slice(&local.0.to_le_bytes());
            bytes[25..33].copy_from_slice(&store.seed.0.to_le_bytes());
            bytes[33..37].copy_from_slice(&store.group.0.to_le_bytes());
            bytes[37] = store.tier as u8;
            self.blocks += 1;
            self.digest = self.digest.wrapping_add(xxh3_64(&bytes));
            parent = Some(*hash);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASHES: [EngineHash; 3] = [EngineHash(1), EngineHash(2), EngineHash(3)];
    const LOCALS: [LocalHash; 3] = [LocalHash(11), LocalHash(12), LocalHash(13)];

    fn store(parent: Option<u64>, blocks: std::ops::Range<usize>) -> StoreBlocks<'static> {
        StoreBlocks {
            parent: parent.map(EngineHash),
            hashes: &HASHES[blocks.clone()],
            locals: &LOCALS[blocks],
            tier: Tier::Device,
            group: GroupId(0),
            seed: Seed(7),
        }
    }

    fn sum(stores: &[StoreBlocks<'_>]) -> References {
        let mut sum = References::default();
        stores.iter().for_each(|store| sum.add(store));
        sum
    }

    #[test]
    fn a_chunk_gives_back_what_it_took() {
        let mut chunk = DumpChunk::default();
        let stores = [store(None, 0..2), store(Some(2), 2..3), store(None, 0..0)];
        stores.iter().for_each(|store| chunk.push(store));
        assert_eq!((chunk.stores(), chunk.blocks()), (3, 3));
        for (number, store) in stores.iter().enumerate() {
            let back = chunk.store(number).expect("a store");
            assert_eq!((back.parent, back.hashes, back.locals), (store.parent, store.hashes, store.locals));
            assert_eq!((back.tier, back.group, back.seed), (store.tier, store.group, store.seed));
        }
        assert!(chunk.store(3).is_none());
        chunk.push(&StoreBlocks { locals: &LOCALS[..1], ..store(None, 0..3) });
        assert_eq!(chunk.store(3).map(|store| (store.hashes.len(), store.locals.len())), Some((1, 1)));
    }

    #[test]
    fn references_know_no_order_and_no_runs_but_everything_else() {
        let whole = sum(&[store(None, 0..3)]);
        assert_eq!(whole.blocks, 3);
        assert_eq!(sum(&[store(Some(2), 2..3), store(None, 0..2)]), whole);
        let twice = sum(&[store(None, 0..3), store(None, 0..3)]);
        assert_eq!((twice.blocks, twice == whole), (6, false));
        let root = store(None, 0..3);
        for other in [
            store(Some(0), 0..3),
            StoreBlocks { tier: Tier::Host, ..root },
            StoreBlocks { group: GroupId(1), ..root },
            StoreBlocks { seed: Seed(8), ..root },
            StoreBlocks { hashes: &[HASHES[0], HASHES[2], HASHES[1]], ..root },
            StoreBlocks { locals: &[LOCALS[0], LOCALS[2], LOCALS[1]], ..root },
        ] {
            let other = sum(&[other]);
            assert!(other.blocks == 3 && other.digest != whole.digest);
        }
    }
}
