//! What only the inside can see: that the trees stay trees, that nothing is left behind, and the bounds.

use super::entries::{Blocks, NONE, ROOT};
use super::*;
use crate::ids::{LocalHash, WorkerSlot};
use crate::limits::GROUPS_MAX;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use std::collections::BTreeSet;

fn store(writer: &mut ShardWriter, slot: WorkerSlot, parent: Option<u64>, blocks: &[(u64, u64)]) -> StoreOutcome {
    store_in(writer, slot, parent, blocks, Tier::Device, 0)
}

fn store_in(
    writer: &mut ShardWriter,
    slot: WorkerSlot,
    parent: Option<u64>,
    blocks: &[(u64, u64)],
    tier: Tier,
    group: u32,
) -> StoreOutcome {
    let hashes: Vec<EngineHash> = blocks.iter().map(|(hash, _)| EngineHash(*hash)).collect();
    let locals: Vec<LocalHash> = blocks.iter().map(|(_, local)| LocalHash(*local)).collect();
    let parent = parent.map(EngineHash);
    let (hashes, locals) = (&hashes[..], &locals[..]);
    writer.store(slot, &StoreBlocks { parent, hashes, locals, tier, group: GroupId(group), seed: Seed(1) })
}

fn remove(writer: &mut ShardWriter, slot: WorkerSlot, hashes: &[u64]) -> RemoveOutcome {
    let hashes: Vec<EngineHash> = hashes.iter().map(|hash| EngineHash(*hash)).collect();
    writer.remove(slot, Tier::Device, GroupId(0), &hashes)
}

fn device(reader: &IndexReader, slot: WorkerSlot, locals: impl IntoIterator<Item = u64>) -> u32 {
    let locals: Vec<LocalHash> = locals.into_iter().map(LocalHash).collect();
    let mut depths = Depths::new();
    reader.lookup(&locals, &mut depths);
    depths.of(ShardId(0), slot).device
}

fn one_worker(limits: ShardLimits) -> (ShardWriter, IndexReader, WorkerSlot) {
    let (mut writer, reader) = shard(ShardId(0), limits);
    let slot = writer.add_worker().expect("the first");
    (writer, IndexReader::new(vec![reader]), slot)
}

/// The invariants that [`Blocks`] states.
fn check(blocks: &Blocks) {
    let mut nodes = BTreeSet::new();
    for (hash, at) in &blocks.by_hash {
        let entry = blocks.entry(*at);
        assert!(entry.used && entry.hash == *hash);
        // What was cleared and not yet swept keeps its place in the trees.
        let bound = entry.tiers != 0;
        assert!(bound || entry.first_child != NONE, "nothing is kept for nothing");
        assert!(entry.parent != NONE || !blocks.is_bound(*at), "what is bound has a parent");
        let parent_placed = entry.parent != NONE && blocks.is_placed(entry.parent);
        assert_eq!(blocks.is_placed(*at), parent_placed);
        assert!(entry.parent == NONE || bound || parent_placed, "only a position is reserved");
        assert!(!blocks.is_placed(*at) || nodes.insert(entry.node), "one position, one hash");
        if entry.parent != NONE {
            let same: Vec<u32> = blocks.same_content(entry.parent, entry.local).collect();
            assert!(same.contains(at) && same.len() <= blocks.aliases_max);
        }
    }
    let (placed, all) = (nodes.len() as u64, blocks.by_hash.len() as u64);
    assert_eq!(blocks.population[1].iter().sum::<u64>(), placed);
    assert_eq!(blocks.population.iter().flatten().sum::<u64>(), all);
    let linked = blocks.by_hash.values().filter(|at| blocks.entry(**at).parent != NONE).count();
    let mut children = 0;
    for at in blocks.by_hash.values().copied().chain([ROOT]) {
        let first = Some(blocks.entry(at).first_child).filter(|child| *child != NONE);
        let next = |child: &u32| Some(blocks.entry(*child).next_sibling).filter(|next| *next != NONE);
        children +=
            std::iter::successors(first, next).inspect(|child| assert_eq!(blocks.entry(*child).parent, at)).count();
    }
    assert_eq!(children, linked);
}

fn random_step(rng: &mut Xoshiro256PlusPlus, writer: &mut ShardWriter, slots: &mut [WorkerSlot]) {
    let which = rng.random_range(0..slots.len());
    let slot = slots[which];
    let tier = Tier::ALL[rng.random_range(0..2)];
    match rng.random_range(0..20) {
        0 => writer.clear(slot, Some(tier)),
        1 if rng.random_range(0..4) == 0 => writer.clear(slot, None),
        2 if rng.random_range(0..4) == 0 => {
            writer.remove_worker(slot);
            slots[which] = writer.add_worker().expect("room");
        }
        3 => {
            writer.sweep(rng.random_range(1..5));
        }
        4 => writer.publish(),
        5..=12 => {
            let parent = rng.random_bool(0.7).then(|| rng.random_range(0..10));
            let blocks: Vec<(u64, u64)> =
                (0..rng.random_range(1..4)).map(|_| (rng.random_range(0..10), rng.random_range(0..2))).collect();
            store_in(writer, slot, parent, &blocks, tier, rng.random_range(0..2));
        }
        _ => {
            let hashes: [EngineHash; 3] = std::array::from_fn(|_| EngineHash(rng.random_range(0..10)));
            writer.remove(slot, tier, GroupId(rng.random_range(0..2)), &hashes);
        }
    }
}

#[test]
fn the_trees_stay_trees_and_nothing_is_left_behind() {
    for seed in 0..300 {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let limits = ShardLimits {
            aliases_max: rng.random_range(1..4),
            dormant_blocks_max: rng.random_range(1..30),
            ..ShardLimits::default()
        };
        let (mut writer, _reader) = shard(ShardId(0), limits);
        let mut slots = [writer.add_worker().expect("room"), writer.add_worker().expect("room")];
        for _ in 0..300 {
            random_step(&mut rng, &mut writer, &mut slots);
            slots.iter().filter_map(|slot| writer.blocks(*slot)).for_each(check);
        }
        // Removing every reference forgets everything, also rings and what hung under a removed block.
        for (slot, tier) in slots.iter().flat_map(|slot| Tier::ALL.map(|tier| (*slot, tier))) {
            for (hash, group) in (0..10).flat_map(|hash| [(hash, 0), (hash, 1)]) {
                while writer.remove(slot, tier, GroupId(group), &[EngineHash(hash)]).removed > 0 {}
            }
        }
        while writer.sweep(3) {}
        slots.iter().for_each(|slot| assert_eq!(writer.hashes_len(*slot), 0, "seed {seed}"));
        assert_eq!(writer.positions().len(), 0, "seed {seed}");
        slots.iter().for_each(|slot| writer.remove_worker(*slot));
        while writer.sweep(3) {}
        assert_eq!(writer.positions().lanes_in_use(), 0, "seed {seed}");
        writer.publish();
        writer.publish();
        assert!(writer.positions().published_is_empty(), "seed {seed}");
    }
}

#[test]
fn chains_of_any_length_are_placed_moved_and_cleared_without_recursion() {
    const LENGTH: u64 = 200_000;
    let (mut writer, reader, slot) = one_worker(ShardLimits::default());
    let chain: Vec<(u64, u64)> = (1..LENGTH).map(|at| (at, at)).collect();
    assert_eq!(store(&mut writer, slot, Some(0), &chain).dormant, LENGTH as u32 - 1);
    assert_eq!(writer.held(slot).dormant, LENGTH - 1);
    store(&mut writer, slot, None, &[(0, 0)]);
    writer.publish();
    assert_eq!((device(&reader, slot, 0..LENGTH), writer.held(slot).dormant), (LENGTH as u32, 0));
    // The first block comes back as the child of another: all of the chain follows.
    remove(&mut writer, slot, &[0]);
    store(&mut writer, slot, None, &[(LENGTH, 7), (0, 0)]);
    writer.publish();
    assert_eq!(device(&reader, slot, 0..LENGTH), 0);
    assert_eq!(device(&reader, slot, std::iter::once(7).chain(0..LENGTH)), LENGTH as u32 + 1);
    writer.clear(slot, None);
    writer.publish();
    assert_eq!(device(&reader, slot, std::iter::once(7).chain(0..LENGTH)), 0);
    let mut turns = 0;
    while writer.sweep(1000) {
        turns += 1;
    }
    assert!(turns >= LENGTH / 1000 - 1, "bounded work per turn");
    assert_eq!(writer.positions().len(), 0);
}

#[test]
fn a_ring_without_a_root_counts_for_nothing_and_falls_apart() {
    let (mut writer, reader, slot) = one_worker(ShardLimits::default());
    store(&mut writer, slot, Some(1), &[(2, 0)]);
    store(&mut writer, slot, Some(2), &[(3, 0)]);
    store(&mut writer, slot, Some(3), &[(1, 0)]);
    writer.publish();
    assert_eq!((device(&reader, slot, [0; 8]), writer.held(slot).dormant), (0, 3));
    assert_eq!(remove(&mut writer, slot, &[1, 2, 3]).removed, 3);
    assert_eq!(writer.hashes_len(slot), 0);
}

#[test]
fn a_block_that_comes_back_under_its_own_descendant_takes_the_ring_off_the_root() {
    let (mut writer, reader, slot) = one_worker(ShardLimits::default());
    store(&mut writer, slot, None, &[(1, 0), (2, 0), (3, 0)]);
    remove(&mut writer, slot, &[1]);
    assert_eq!(store(&mut writer, slot, Some(3), &[(1, 0)]).dormant, 1);
    writer.publish();
    assert_eq!((device(&reader, slot, [0; 8]), writer.held(slot).dormant), (0, 3));
    assert_eq!(writer.positions().len(), 0);
}

#[test]
fn what_is_waited_for_has_the_seed_of_what_waits() {
    let (mut writer, _reader, slot) = one_worker(ShardLimits::default());
    assert_eq!(writer.seed_of(slot, EngineHash(9)), None);
    store(&mut writer, slot, Some(9), &[(1, 0)]);
    assert_eq!(writer.seed_of(slot, EngineHash(9)), Some(Seed(1)));
    remove(&mut writer, slot, &[1]);
    assert_eq!((writer.seed_of(slot, EngineHash(9)), writer.seed_of(slot, EngineHash(1))), (None, None));
}

#[test]
fn each_bound_refuses_by_name_and_changes_nothing() {
    let limits = ShardLimits { worker_blocks_max: 4, dormant_blocks_max: 2, aliases_max: 2, ..ShardLimits::default() };
    let (mut writer, _reader, slot) = one_worker(limits);
    let refused = |outcome: StoreOutcome| outcome.refused;
    assert_eq!(refused(store(&mut writer, slot, Some(9), &[(1, 0), (2, 0), (3, 0)])), Some(Refusal::DormantBound));
    assert_eq!(refused(store(&mut writer, slot, Some(1), &[(1, 0)])), Some(Refusal::SelfParent));
    assert_eq!(refused(store(&mut writer, slot, None, &[(1, 0), (2, 0), (1, 0)])), Some(Refusal::HashConflict));
    assert_eq!((writer.held(slot), writer.hashes_len(slot)), (WorkerBlocks::default(), 0));
    assert_eq!(refused(store(&mut writer, slot, None, &[(1, 0), (2, 0)])), None);
    assert_eq!(refused(store(&mut writer, slot, None, &[(3, 0)])), None);
    let before = writer.held(slot);
    assert_eq!(refused(store(&mut writer, slot, None, &[(4, 0)])), Some(Refusal::AliasBound));
    assert_eq!(refused(store(&mut writer, slot, None, &[(4, 1), (5, 0)])), Some(Refusal::CapacityBound));
    assert_eq!(refused(store(&mut writer, slot, None, &[(1, 0), (2, 1)])), Some(Refusal::HashConflict));
    let other_seed = StoreBlocks {
        parent: None,
        hashes: &[EngineHash(1)],
        locals: &[LocalHash(0)],
        tier: Tier::Host,
        group: GroupId(0),
        seed: Seed(2),
    };
    assert_eq!(refused(writer.store(slot, &other_seed)), Some(Refusal::HashConflict));
    let short = StoreBlocks { locals: &[], ..other_seed };
    assert_eq!(refused(writer.store(slot, &short)), Some(Refusal::LengthMismatch));
    assert_eq!((writer.held(slot), writer.hashes_len(slot)), (before, 3));
    for group in 1..GROUPS_MAX as u32 {
        assert_eq!(refused(store_in(&mut writer, slot, None, &[(1, 0)], Tier::Device, group)), None);
    }
    let one_more = store_in(&mut writer, slot, None, &[(1, 0)], Tier::Device, 99);
    assert_eq!(refused(one_more), Some(Refusal::TooManyGroups));
    writer.remove_worker(slot);
    assert_eq!(refused(store(&mut writer, slot, None, &[(1, 0)])), Some(Refusal::UnknownWorker));
    assert_eq!(remove(&mut writer, slot, &[1, 2]), RemoveOutcome { removed: 0, unknown: 2 });
}

#[test]
fn names_of_refusals_are_distinct_and_in_order() {
    assert!(Refusal::ALL.windows(2).all(|pair| pair[0] < pair[1]));
    let names: BTreeSet<&str> = Refusal::ALL.iter().map(|refusal| refusal.name()).collect();
    assert_eq!(names.len(), Refusal::ALL.len());
}

#[test]
fn removed_middles_are_remembered_up_to_a_bound_and_come_back_beyond_it_too() {
    let (mut writer, reader, slot) = one_worker(ShardLimits { dormant_blocks_max: 10, ..ShardLimits::default() });
    let chain: Vec<(u64, u64)> = (0..100).map(|at| (at, at)).collect();
    store(&mut writer, slot, None, &chain);
    remove(&mut writer, slot, &(0..99).collect::<Vec<u64>>());
    assert!(writer.hashes_len(slot) <= 12, "{} hashes for one block", writer.hashes_len(slot));
    store(&mut writer, slot, None, &chain[..99]);
    writer.publish();
    assert_eq!(device(&reader, slot, 0..100), 100);
}

#[test]
fn a_slot_is_used_again_once_its_blocks_are_swept() {
    let (mut writer, reader, slot) = one_worker(ShardLimits { workers_max: 1, ..ShardLimits::default() });
    store(&mut writer, slot, None, &[(1, 0), (2, 0)]);
    writer.publish();
    assert_eq!((device(&reader, slot, [0, 0]), writer.add_worker()), (2, None));
    writer.remove_worker(slot);
    assert_eq!(writer.add_worker(), None, "not yet swept");
    writer.publish();
    assert_eq!(device(&reader, slot, [0, 0]), 0);
    while writer.sweep(1) {}
    assert_eq!(writer.add_worker(), Some(slot));
    store(&mut writer, slot, None, &[(5, 0)]);
    writer.publish();
    assert_eq!(device(&reader, slot, [0, 0]), 1);
}
