//! Digests: equal for equal sets of blocks, whatever their history, and different for different sets.

use crate::oracle::Oracle;
use crate::oracle::event::Event;
use crate::oracle::seeds::for_seeds;
use crate::oracle::stream::{Alphabet, Rates, Shape, Stream, Style};
use kvrouted::ids::{EngineHash, GroupId, LocalHash, Seed, ShardId, Tier, WorkerSlot};
use kvrouted::index::{ShardLimits, ShardReader, ShardWriter, StoreBlocks, TierDigest, shard};
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const ONE: Alphabet = Alphabet { workers: 1, hashes: 600, locals: 3, groups: 2, seeds: 2, tiers: 3 };
const STYLE: Style = Style {
    of: ONE,
    shape: Shape::Prompts { prompts: 6, blocks_max: 30, step_blocks_max: 12, aliases: true },
    rates: Rates { replace: 0, ..Rates::USUAL },
};

fn worker(node_blocks_max: usize) -> (ShardWriter, ShardReader, WorkerSlot) {
    let limits = ShardLimits { node_blocks_max, ..ShardLimits::default() };
    let (mut writer, reader) = shard(ShardId(0), limits);
    let slot = writer.add_worker().expect("the first");
    (writer, reader, slot)
}

fn digests(writer: &ShardWriter, slot: WorkerSlot) -> [TierDigest; 4] {
    Tier::ALL.map(|tier| writer.digest(slot, tier))
}

/// Stores the blocks of a model into a fresh worker, block by block in a random order.
fn copy(oracle: &Oracle, writer: &mut ShardWriter, slot: WorkerSlot, rng: &mut Xoshiro256PlusPlus) {
    let mut references: Vec<(EngineHash, Tier, GroupId)> = Vec::new();
    for ((hash, tier, group), (count, _)) in &oracle.counts {
        references.extend((0..*count).map(|_| (*hash, *tier, *group)));
    }
    references.shuffle(rng);
    for (hash, tier, group) in references {
        let binding = oracle.bindings[&hash];
        let (hashes, locals) = ([hash], [binding.local]);
        let (parent, seed) = (binding.parent, binding.seed);
        let store = StoreBlocks { parent, hashes: &hashes, locals: &locals, tier, group, seed };
        assert_eq!(writer.store(slot, &store).stored, 1, "{hash}");
    }
    // A group counts from its first store on, even if it has no block any more.
    let other = [EngineHash(u64::MAX)];
    for (tier, group) in &oracle.announced {
        let (tier, group, locals, seed) = (*tier, *group, [LocalHash(u64::MAX)], Seed(0));
        let store = StoreBlocks { parent: None, hashes: &other, locals: &locals, tier, group, seed };
        assert_eq!(writer.store(slot, &store).stored, 1);
        assert_eq!(writer.remove(slot, tier, group, &other).removed, 1);
    }
}

#[test]
fn the_same_holdings_have_the_same_digest() {
    for_seeds(
        "index::stress::digests::the_same_holdings_have_the_same_digest",
        20,
        Duration::from_millis(500),
        |seed| {
            let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
            let events = Stream::new(STYLE, ShardLimits::default(), seed).events(200);
            let (mut first, _first_reader, first_slot) = worker(8);
            let mut oracle = Oracle::default();
            for event in &events {
                event.apply_to_oracle(&mut oracle, &ShardLimits::default());
                event.apply_to_writer(&mut first, first_slot);
            }
            let (mut second, _second_reader, second_slot) = worker(1024);
            copy(&oracle, &mut second, second_slot, &mut rng);
            assert_eq!(first.held(first_slot).by_tier, second.held(second_slot).by_tier);
            assert_eq!(digests(&first, first_slot), digests(&second, second_slot));
            while first.sweep(3) {}
            assert_eq!(digests(&first, first_slot), digests(&second, second_slot), "a sweep changes nothing");
            let taken = oracle.counts.keys().nth(rng.random_range(0..oracle.counts.len().max(1))).copied();
            let Some((hash, tier, group)) = taken.filter(|(hash, tier, _)| oracle.holds(*hash, *tier)) else { return };
            let times = oracle.counts[&(hash, tier, group)].0;
            let before = second.digest(second_slot, tier);
            for _ in 0..times {
                assert_eq!(second.digest(second_slot, tier), before, "a second copy changes nothing");
                second.remove(second_slot, tier, group, &[hash]);
            }
            assert_ne!(second.digest(second_slot, tier), before, "one less is another set");
        },
    );
}

/// The blocks that a tier of a model holds.
fn held(oracle: &Oracle, tier: Tier) -> BTreeSet<EngineHash> {
    oracle.bindings.keys().copied().filter(|hash| oracle.holds(*hash, tier)).collect()
}

#[test]
fn different_holdings_have_different_digests() {
    let (mut writer, _reader, slot) = worker(8);
    let (mut oracle, mut sets) = (Oracle::default(), BTreeMap::new());
    for event in Stream::new(STYLE, ShardLimits::default(), 7).events(600) {
        if let Event::Publish = event {
            writer.publish();
        }
        event.apply_to_oracle(&mut oracle, &ShardLimits::default());
        event.apply_to_writer(&mut writer, slot);
        for tier in Tier::ALL {
            let TierDigest { blocks, digest } = writer.digest(slot, tier);
            let set = held(&oracle, tier);
            assert_eq!(*sets.entry((blocks, digest)).or_insert_with(|| set.clone()), set, "two sets, one digest");
        }
    }
    assert!(sets.len() > 50, "the stream held {} different sets", sets.len());
}
