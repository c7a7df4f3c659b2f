//! Seeded streams of events against the invariants of [`super::invariants`], and shards in states that are hard to
//! reach.

use super::{ShardLimits, ShardWriter, StoreBlocks, shard};
use crate::ids::{EngineHash, GroupId, LocalHash, Seed, ShardId, Tier, WorkerSlot};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

/// How many of everything a stream may use.
#[derive(Clone, Copy)]
struct Alphabet {
    hashes: u64,
    locals: u64,
    tiers: usize,
    groups: u32,
    blocks_max: u64,
}

struct Stream {
    rng: Xoshiro256PlusPlus,
    of: Alphabet,
    slots: Vec<WorkerSlot>,
    past: Vec<(Option<u64>, Vec<u64>, Vec<u64>)>,
}

impl Stream {
    fn step(&mut self, writer: &mut ShardWriter) {
        let at = self.rng.random_range(0..self.slots.len());
        let slot = self.slots[at];
        let tier = Tier::ALL[self.rng.random_range(0..self.of.tiers)];
        let group = GroupId(self.rng.random_range(0..self.of.groups));
        match self.rng.random_range(0..100) {
            0..45 => self.store(writer, slot, tier, group),
            45..85 => self.remove(writer, slot, tier, group),
            85..87 => writer.clear(slot, self.rng.random_bool(0.6).then_some(tier)),
            87 => {
                writer.remove_worker(slot);
                while writer.sweep(64) {}
                self.slots[at] = writer.add_worker().expect("room");
            }
            88..92 => writer.begin_batch(slot),
            92..97 => drop(writer.sweep(self.rng.random_range(1..40))),
            _ => writer.publish(),
        }
    }

    fn store(&mut self, writer: &mut ShardWriter, slot: WorkerSlot, tier: Tier, group: GroupId) {
        let fresh = self.past.is_empty() || self.rng.random_bool(0.5);
        let (parent, hashes, locals) = if fresh {
            let first = self.rng.random_range(0..self.of.hashes);
            let blocks = self.rng.random_range(1..=self.of.blocks_max);
            let hashes: Vec<u64> = (first..first + blocks).collect();
            // Most content follows from the name, so that prompts are shared; some does not.
            let salt = self.rng.random_range(0..4) / 3;
            let locals = hashes.iter().map(|hash| (hash + salt) % self.of.locals).collect();
            let parent = if first == 0 || self.rng.random_bool(0.2) { None } else { Some(first - 1) };
            (parent, hashes, locals)
        } else {
            let (parent, mut hashes, mut locals) = self.past[self.rng.random_range(0..self.past.len())].clone();
            let kept = self.rng.random_range(1..=hashes.len());
            hashes.truncate(kept);
            locals.truncate(kept);
            if self.rng.random_bool(0.4) {
                let more = self.rng.random_range(1..=self.of.blocks_max);
                let from = self.rng.random_range(0..self.of.hashes * 4);
                hashes.extend(from..from + more);
                locals.extend((from..from + more).map(|hash| hash % self.of.locals));
            }
            (parent, hashes, locals)
        };
        self.past.push((parent, hashes.clone(), locals.clone()));
        if self.past.len() > 40 {
            let at = self.rng.random_range(0..40);
            self.past.swap_remove(at);
        }
        let seed = Seed(u64::from(self.rng.random_bool(0.05)));
        store_as(writer, slot, parent, &hashes, &locals, tier, group, seed);
    }

    fn remove(&mut self, writer: &mut ShardWriter, slot: WorkerSlot, tier: Tier, group: GroupId) {
        let Some(at) = self.past.len().checked_sub(1) else { return };
        let (_, hashes, _) = &self.past[self.rng.random_range(0..=at)];
        let from = self.rng.random_range(0..hashes.len());
        let to = self.rng.random_range(from..hashes.len()) + 1;
        let mut hashes: Vec<EngineHash> = hashes[from..to].iter().copied().map(EngineHash).collect();
        match self.rng.random_range(0..3) {
            0 => hashes.reverse(),
            1 => hashes.retain(|_| self.rng.random_bool(0.6)),
            _ => {}
        }
        writer.remove(slot, tier, group, &hashes);
    }
}

#[expect(clippy::too_many_arguments, reason = "a store has this many parts")]
fn store_as(
    writer: &mut ShardWriter,
    slot: WorkerSlot,
    parent: Option<u64>,
    hashes: &[u64],
    locals: &[u64],
    tier: Tier,
    group: GroupId,
    seed: Seed,
) -> super::StoreOutcome {
    let hashes: Vec<EngineHash> = hashes.iter().copied().map(EngineHash).collect();
    let locals: Vec<LocalHash> = locals.iter().copied().map(LocalHash).collect();
    let parent = parent.map(EngineHash);
    writer.store(slot, &StoreBlocks { parent, hashes: &hashes, locals: &locals, tier, group, seed })
}

/// A store of the device's only group.
fn store(
    writer: &mut ShardWriter,
    slot: WorkerSlot,
    parent: Option<u64>,
    hashes: &[u64],
    locals: &[u64],
) -> super::StoreOutcome {
    store_as(writer, slot, parent, hashes, locals, Tier::Device, GroupId(0), Seed(0))
}

fn remove(writer: &mut ShardWriter, slot: WorkerSlot, hashes: &[u64]) {
    let hashes: Vec<EngineHash> = hashes.iter().copied().map(EngineHash).collect();
    writer.remove(slot, Tier::Device, GroupId(0), &hashes);
}

fn run(of: Alphabet, workers: usize, seeds: u64, events: usize) {
    let seeds = std::env::var("KVROUTED_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(seeds);
    for seed in 0..seeds {
        for node_blocks_max in [2, 8, 1024] {
            let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
            let retired_holders_max = if rng.random_bool(0.3) { 1 } else { 256 };
            let dormant_blocks_max = if rng.random_bool(0.3) { 6 } else { 1 << 20 };
            let event_moves_max = if rng.random_bool(0.3) { 5 } else { 1 << 20 };
            let limits = ShardLimits {
                node_blocks_max,
                retired_holders_max,
                dormant_blocks_max,
                event_moves_max,
                ..ShardLimits::default()
            };
            let (mut writer, reader) = shard(ShardId(0), limits);
            let slots = (0..workers).map(|_| writer.add_worker().expect("room")).collect();
            let quiet = rng.random_bool(0.7);
            let mut stream = Stream { rng, of, slots, past: Vec::new() };
            for event in 0..events {
                stream.step(&mut writer);
                let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| writer.check(quiet)));
                if checked.is_err() {
                    panic!("seed {seed}, event {event}, nodes of {node_blocks_max}");
                }
            }
            drop(reader);
        }
    }
}

#[test]
fn a_shard_is_sound_after_every_event_of_one_tier() {
    run(Alphabet { hashes: 60, locals: 7, tiers: 1, groups: 1, blocks_max: 24 }, 3, 12, 150);
}

/// Chains with whole sections of the arena.
#[test]
fn a_shard_is_sound_after_every_event_of_long_chains() {
    run(Alphabet { hashes: 300, locals: 61, tiers: 1, groups: 1, blocks_max: 150 }, 3, 4, 120);
}

#[test]
fn a_shard_is_sound_after_every_event_of_several_tiers_and_groups() {
    run(Alphabet { hashes: 30, locals: 5, tiers: 3, groups: 2, blocks_max: 12 }, 3, 12, 150);
}

#[test]
fn a_shard_is_sound_after_every_event_where_names_clash() {
    run(Alphabet { hashes: 8, locals: 2, tiers: 2, groups: 1, blocks_max: 6 }, 2, 12, 150);
}

/// Blocks of a prompt that one worker's device holds.
fn device(reader: &super::IndexReader, slot: WorkerSlot, locals: &[u64]) -> u32 {
    let locals: Vec<LocalHash> = locals.iter().copied().map(LocalHash).collect();
    let mut depths = super::Depths::new();
    assert!(!reader.lookup(&locals, &mut depths).contended);
    depths.device(ShardId(0), slot)
}

/// A split leaves two nodes' names in one granule. When another worker of the lower node has come to use the names that
/// lie behind the first worker's above, a join must copy the names of all columns before it frees any.
#[test]
fn nodes_are_joined_whose_columns_continue_crosswise() {
    let (mut writer, reader) = shard(ShardId(0), ShardLimits::default());
    let reader = super::IndexReader::new(vec![reader]);
    let [first, second, third] = [(); 3].map(|()| writer.add_worker().expect("room"));
    store(&mut writer, first, None, &[10, 11], &[1, 2]);
    // A branch splits the node.
    store(&mut writer, third, None, &[10, 40], &[1, 3]);
    store(&mut writer, second, None, &[20], &[1]);
    store(&mut writer, second, Some(20), &[11], &[2]);
    remove(&mut writer, first, &[11]);
    store(&mut writer, first, Some(10), &[31], &[2]);
    writer.remove_worker(third);
    writer.check(true);
    let nodes = |writer: &ShardWriter| {
        let nodes = &writer.tree.nodes;
        (1..nodes.end()).filter(|id| nodes.is_used(super::node::NodeId(*id))).count()
    };
    assert_eq!(nodes(&writer), 3, "one above, and two below it");
    while writer.sweep(64) {}
    writer.check(true);
    assert_eq!(nodes(&writer), 1);
    assert_eq!([first, second].map(|slot| device(&reader, slot, &[1, 2])), [2, 2]);
}

#[test]
fn batches_that_ended_share_the_memory_of_one() {
    let (mut writer, _reader) = shard(ShardId(0), ShardLimits::default());
    let slots: Vec<WorkerSlot> = (0..20).map(|_| writer.add_worker().expect("room")).collect();
    let fill = |writer: &mut ShardWriter, blocks: std::ops::Range<u64>, ends| {
        for slot in &slots {
            writer.begin_batch(*slot);
            let chain: Vec<u64> = blocks.clone().map(|block| u64::from(slot.0) << 32 | block).collect();
            store(writer, *slot, None, &chain, &chain);
            if ends {
                writer.end_batch(*slot);
                writer.check(false);
                assert!(store(writer, *slot, None, &chain, &chain).ambiguous, "the batch is over");
            }
        }
        writer.memory().workers_bytes
    };
    let empty = writer.memory().workers_bytes;
    let kept = fill(&mut writer, 1..500, false) - empty;
    assert!(kept >= 20 * 499 * 8, "each keeps the names of its batch: {kept}");
    let shared = fill(&mut writer, 501..1000, true) - empty;
    assert!(shared < kept / 8, "{shared} bytes, where {kept} were kept");
    let spare = writer.tree.spare_lists.bytes();
    assert!((499 * 8..9 * 512 * 8).contains(&spare), "at most eight lists of names: {spare}");
    writer.check(true);
}

/// Each way by which blocks get to where readers compare them by fingerprints, in chains that are longer than sections.
#[test]
fn long_nodes_have_fingerprints_however_they_grew() {
    let (mut writer, reader) = shard(ShardId(0), ShardLimits::default());
    let reader = super::IndexReader::new(vec![reader]);
    let [first, second] = [(); 2].map(|()| writer.add_worker().expect("room"));
    let chain: Vec<u64> = (1..=120).collect();
    // Block by block, into the room of a leaf and beyond it.
    store(&mut writer, first, None, &chain[..2], &chain[..2]);
    for at in 2..120 {
        store(&mut writer, first, Some(chain[at - 1]), &chain[at..=at], &chain[at..=at]);
        writer.check(true);
    }
    // Below a node of two workers. When one of them leaves it, the two nodes are joined by copying.
    let other: Vec<u64> = (1001..=1100).collect();
    for slot in [first, second] {
        store(&mut writer, slot, None, &other[..60], &other[..60]);
    }
    store(&mut writer, first, Some(other[59]), &other[60..], &other[60..]);
    assert_eq!(writer.memory().nodes, 3);
    writer.check(true);
    remove(&mut writer, second, &other[..60].iter().rev().copied().collect::<Vec<_>>());
    while writer.sweep(64) {}
    assert_eq!(writer.memory().nodes, 2, "joined");
    writer.check(true);
    for (chain, first_wrong) in [(&chain, 119), (&chain, 63), (&other, 61), (&other, 3)] {
        let mut query = chain.clone();
        assert_eq!(device(&reader, first, &query) as usize, chain.len());
        query[first_wrong] ^= 1 << 63;
        assert_eq!(device(&reader, first, &query) as usize, first_wrong);
    }
}

#[test]
fn a_refused_append_changes_no_answer() {
    let (mut writer, reader) = shard(ShardId(0), ShardLimits::default());
    let reader = super::IndexReader::new(vec![reader]);
    let slot = writer.add_worker().expect("room");
    // A leaf that was appended to, and is full. The words behind it belong to another node.
    store(&mut writer, slot, None, &[1, 2], &[1, 2]);
    store(&mut writer, slot, Some(2), &[3, 4, 5, 6, 7, 8], &[3, 4, 5, 6, 7, 8]);
    store(&mut writer, slot, None, &[100], &[100]);
    writer.check(true);
    // The second block's name is taken: the store is refused after the leaf has been moved to where there is room.
    let refused = store(&mut writer, slot, Some(8), &[9, 100], &[9, 100]).refused;
    assert_eq!(refused, Some(super::Refusal::HashConflict));
    writer.check(true);
    for at in 1000..1064 {
        store(&mut writer, slot, None, &[at], &[at]);
    }
    assert_eq!(device(&reader, slot, &[1, 2, 3, 4, 5, 6, 7, 8, 9]), 8);
}

#[test]
fn a_long_chain_of_unheld_nodes_is_deleted_without_recursion() {
    let (mut writer, _reader) = shard(ShardId(0), ShardLimits::default());
    let slot = writer.add_worker().expect("room");
    let levels = 40_000_u64;
    // At each level a block has two names; the next level is below the second.
    let mut parent = None;
    for level in 0..levels {
        store(&mut writer, slot, parent, &[level * 2 + 1], &[level]);
        store(&mut writer, slot, parent, &[level * 2 + 2], &[level]);
        parent = Some(level * 2 + 2);
    }
    for level in 0..levels {
        remove(&mut writer, slot, &[level * 2 + 1]);
    }
    for level in 0..levels - 1 {
        remove(&mut writer, slot, &[level * 2 + 2]);
    }
    assert!(writer.memory().nodes > levels);
    std::thread::Builder::new()
        .stack_size(512 << 10)
        .spawn(move || {
            remove(&mut writer, slot, &[levels * 2]);
            assert_eq!(writer.memory().nodes, 0);
        })
        .expect("a thread")
        .join()
        .expect("no overflow");
}

#[test]
fn a_walk_with_an_old_table_meets_newer_holder_bits() {
    let (mut writer, reader) = shard(ShardId(0), ShardLimits::default());
    let slots: Vec<WorkerSlot> = (0..129).map(|_| writer.add_worker().expect("room")).collect();
    for slot in &slots[..128] {
        store(&mut writer, *slot, None, &[1, 2, 3], &[1, 2, 3]);
    }
    let before = writer.tree.holders.table(128);
    store(&mut writer, slots[128], None, &[1, 2], &[1, 2]);
    let guard = reader.enter();
    let view = reader.view_with(&guard, &before);
    let mut out = super::reader::ShardDepths::default();
    super::lookup_walk::Walk::default().run(&view, &[1, 2, 3], &mut out);
    assert_eq!(out.device, [3; 128]);
}

#[test]
fn a_shard_without_its_writer_is_empty_and_no_record_of_it_is_followed() {
    let (mut writer, reader) = shard(ShardId(0), ShardLimits::default());
    let slots: Vec<WorkerSlot> = (0..70).map(|_| writer.add_worker().expect("room")).collect();
    for slot in &slots {
        store(&mut writer, *slot, None, &[1, 2, 3], &[1, 2, 3]);
    }
    for slot in &slots[..20] {
        remove(&mut writer, *slot, &[3]);
    }
    drop(writer);
    let mut walk = super::lookup_walk::Walk::default();
    let mut out = super::reader::ShardDepths::default();
    let (guard, holders) = (reader.enter(), reader.holders_now());
    assert!(walk.run(&reader.view_with(&guard, &holders), &[1, 2, 3], &mut out));
    assert_eq!(walk.lines_met(), 0, "its records have been given back");
    assert!(out.device.iter().all(|depth| *depth == 0));
}

/// Steps of a lookup of `blocks` blocks, each with two names, and what the lookup found.
fn steps_where_blocks_have_second_names(blocks: u64, tier: Tier) -> (usize, super::reader::ShardDepths) {
    let (mut writer, reader) = shard(ShardId(0), ShardLimits::default());
    let slot = writer.add_worker().expect("room");
    let mut parent = None;
    for at in 0..blocks {
        store_as(&mut writer, slot, parent, &[2 * at + 1], &[at], Tier::Device, GroupId(0), Seed(0));
        store_as(&mut writer, slot, parent, &[2 * at + 2], &[at], tier, GroupId(0), Seed(0));
        parent = Some(2 * at + 1);
    }
    let locals: Vec<u64> = (0..blocks).collect();
    let (mut walk, mut out) = (super::lookup_walk::Walk::default(), super::reader::ShardDepths::default());
    let (guard, holders) = (reader.enter(), reader.holders_now());
    assert!(walk.run(&reader.view_with(&guard, &holders), &locals, &mut out));
    (walk.branching_steps(), out)
}

#[test]
fn a_lookup_takes_steps_in_proportion_to_its_blocks_where_they_have_second_names() {
    for tier in [Tier::Device, Tier::Host] {
        for blocks in [500, 1000, 2000_u64] {
            let (steps, out) = steps_where_blocks_have_second_names(blocks, tier);
            assert_eq!(out.device[0], blocks as u32);
            assert!(steps as u64 <= 8 * blocks, "{steps} steps for {blocks} blocks");
        }
    }
}

/// What panics on purpose leave behind: an unfinished multi-write, and a header at an odd version.
const FAILPOINTS: [(EngineHash, LocalHash); 2] =
    [(super::failpoints::IN_MULTI_WRITE, LocalHash(1)), (EngineHash(77), super::failpoints::OPEN_HEADER)];

#[test]
fn an_index_whose_writer_panicked_in_a_change_is_replaced_under_its_readers() {
    for (at, (name, content)) in FAILPOINTS.into_iter().enumerate() {
        let (mut writer, reader) = shard(ShardId(0), ShardLimits::default());
        let slots: Vec<WorkerSlot> = (0..3).map(|_| writer.add_worker().expect("room")).collect();
        writer.bound_worker(slots[1], 2);
        for slot in &slots {
            store(&mut writer, *slot, None, &[1, 2], &[1, 2]);
        }
        store(&mut writer, slots[0], None, &[5], &[content.0 ^ 1]);
        writer.publish();
        let readers = super::IndexReader::new(vec![reader.clone()]);
        let mut depths = super::Depths::new();
        let before = readers.lookup(&[LocalHash(1), LocalHash(2)], &mut depths);
        assert!(!before.contended && depths.device(ShardId(0), slots[2]) == 2);
        // The slow path stores a second name for a content; the node of a second worker is published again.
        let stored = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            store(&mut writer, slots[0], None, &[name.0], &[content.0]);
            store(&mut writer, slots[2], None, &[name.0], &[content.0]);
        }));
        assert!(stored.is_err(), "failure {at}");
        // No reader waits for ever, and an uncertain answer is marked as such.
        let during = readers.lookup(&[content, LocalHash(2)], &mut depths);
        assert!(during.contended, "failure {at}");

        // A reader is inside all the while, and reads the old index.
        let inside = reader.enter();
        let holders = reader.holders_now();
        let view = reader.view_with(&inside, &holders);
        assert!(writer.reset_after_panic(), "all of it is freed");
        let mut out = super::reader::ShardDepths::default();
        super::lookup_walk::Walk::default().run(&view, &[1, 2], &mut out);
        drop(inside);
        writer.reclaim();

        for locals in [[LocalHash(1), LocalHash(2)], [content, LocalHash(2)]] {
            let anew = readers.lookup(&locals, &mut depths);
            assert!(!anew.contended && anew.epoch > before.epoch, "failure {at}: the epoch goes on");
            assert!(slots.iter().all(|slot| depths.device(ShardId(0), *slot) == 0), "failure {at}");
        }
        writer.check(true);
        assert_eq!(
            store(&mut writer, slots[1], None, &[1, 2, 3], &[1, 2, 3]).refused,
            Some(super::Refusal::CapacityBound)
        );
        for slot in &slots {
            assert_eq!(store(&mut writer, *slot, None, &[1, 2], &[1, 2]).stored, 2);
        }
        writer.publish();
        let after = readers.lookup(&[LocalHash(1), LocalHash(2)], &mut depths);
        assert!(!after.contended && slots.iter().all(|slot| depths.device(ShardId(0), *slot) == 2));
        assert_eq!(writer.add_worker(), Some(WorkerSlot(3)), "slots are kept");
        writer.check(true);
    }
}

#[test]
fn readers_neither_hang_nor_overcount_while_an_index_is_reset_again_and_again() {
    let (mut writer, reader) = shard(ShardId(0), ShardLimits::default());
    let slots: Vec<WorkerSlot> = (0..3).map(|_| writer.add_worker().expect("room")).collect();
    let ends = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            let readers = super::IndexReader::new(vec![reader.clone()]);
            let (ends, slots) = (&ends, &slots);
            scope.spawn(move || {
                let (mut depths, mut epoch) = (super::Depths::new(), 0);
                // Relaxed: it publishes nothing else.
                while !ends.load(std::sync::atomic::Ordering::Relaxed) {
                    let lookup = readers.lookup(&[LocalHash(1), LocalHash(2), LocalHash(3)], &mut depths);
                    assert!(lookup.epoch >= epoch);
                    epoch = lookup.epoch;
                    if !lookup.contended {
                        assert!(depths.device(ShardId(0), slots[0]) <= 2, "what was never stored is not counted");
                    }
                }
            });
        }
        for _ in 0..50 {
            for slot in &slots {
                store(&mut writer, *slot, None, &[1, 2], &[1, 2]);
                writer.publish();
            }
            let failure = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                store(&mut writer, slots[0], Some(2), &[3, super::failpoints::IN_MULTI_WRITE.0, 3], &[3, 4, 5]);
                store(&mut writer, slots[0], None, &[super::failpoints::IN_MULTI_WRITE.0], &[1]);
            }));
            assert!(failure.is_err() && writer.reset_after_panic());
        }
        ends.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    writer.check(true);
}

#[test]
fn references_are_refused_before_they_overflow() {
    let (mut writer, _reader) = shard(ShardId(0), ShardLimits::default());
    let slot = writer.add_worker().expect("room");
    store(&mut writer, slot, None, &[1, 2], &[1, 2]);
    store(&mut writer, slot, Some(1), &[2], &[2]);
    writer.set_extras(slot, EngineHash(2), u32::MAX - 1);
    assert_eq!(store(&mut writer, slot, Some(1), &[2], &[2]).already, 1);
    assert_eq!(store(&mut writer, slot, Some(1), &[2, 3], &[2, 3]).refused, Some(super::Refusal::ReferenceBound));
    assert_eq!(store(&mut writer, slot, Some(2), &[3], &[3]).refused, None);
    remove(&mut writer, slot, &[2]);
    assert_eq!(store(&mut writer, slot, Some(1), &[2], &[2]).already, 1);
}

#[test]
fn the_work_for_a_dormant_child_does_not_grow_with_its_siblings() {
    let (mut writer, reader) = shard(ShardId(0), ShardLimits::default());
    let reader = super::IndexReader::new(vec![reader]);
    let slot = writer.add_worker().expect("room");
    for at in 0..40_000 {
        store(&mut writer, slot, Some(1), &[10 + at], &[10 + at]);
    }
    assert_eq!(writer.held(slot).dormant, 40_000);
    store(&mut writer, slot, None, &[1], &[1]);
    while writer.sweep(8192) {}
    assert_eq!((writer.held(slot).dormant, device(&reader, slot, &[1, 12])), (0, 2));
    // Each slice of a sweep looks at one child more than it places. Invariants are not checked here: they walk all.
    let walked = writer.dormant_children_walked(slot);
    assert!(walked <= 2 * 40_000, "{walked} children were walked to place 40000");
}

#[test]
fn a_worker_of_which_one_event_would_displace_too_much_is_emptied() {
    for (event_moves_max, dormant_blocks_max) in [(500, 1 << 20), (1 << 20, 100)] {
        let limits = ShardLimits { event_moves_max, dormant_blocks_max, ..ShardLimits::default() };
        let (mut writer, reader) = shard(ShardId(0), limits);
        let reader = super::IndexReader::new(vec![reader]);
        let slots = [(); 2].map(|()| writer.add_worker().expect("room"));
        let chain: Vec<u64> = (1..=4000).collect();
        for slot in slots {
            assert_eq!(store(&mut writer, slot, None, &chain, &chain).refused, None);
        }
        // The first block goes. When another block takes its place, the blocks below would have to be displaced.
        remove(&mut writer, slots[0], &[1]);
        let outcome = store(&mut writer, slots[0], None, &[9001], &[1]);
        assert_eq!(outcome.refused, Some(super::Refusal::WorkBound));
        let held = writer.held(slots[0]);
        assert!(held.dormant <= dormant_blocks_max as u64, "{held:?}");
        assert_eq!((held.bound, device(&reader, slots[0], &chain)), (0, 0));
        writer.check(true);
        // The other worker is unaffected, and the next store succeeds.
        assert_eq!(device(&reader, slots[1], &chain), 4000);
        assert_eq!(store(&mut writer, slots[0], None, &[9001, 9002], &[1, 2]).stored, 2);
        while writer.sweep(64) {}
        writer.check(true);
        assert_eq!((device(&reader, slots[0], &chain), device(&reader, slots[1], &chain)), (2, 4000));
    }
}

#[test]
fn dormant_children_of_one_block_are_placed_in_slices() {
    const MOVES_MAX: usize = 300;
    let limits = ShardLimits { event_moves_max: MOVES_MAX, ..ShardLimits::default() };
    let (mut writer, reader) = shard(ShardId(0), limits);
    let reader = super::IndexReader::new(vec![reader]);
    let slot = writer.add_worker().expect("room");
    let chain: Vec<u64> = (1..=2000).collect();
    assert_eq!(store(&mut writer, slot, Some(1), &chain[1..], &chain[1..]).dormant, 1999);
    let outcome = store(&mut writer, slot, None, &[1], &[1]);
    assert!(outcome.deferred && outcome.stored == 1, "{outcome:?}");
    let (mut waiting, mut slices) = (writer.held(slot).dormant, 0);
    assert!(1999 - waiting <= MOVES_MAX as u64, "one event gave {} blocks their places", 1999 - waiting);
    while waiting > 0 {
        // Answers count only placed blocks, so they are never too high.
        assert_eq!(u64::from(device(&reader, slot, &chain)), 2000 - waiting);
        writer.sweep(100);
        writer.check(true);
        let moved = waiting - writer.held(slot).dormant;
        assert!((1..=100).contains(&moved), "a slice of 100 gave {moved} blocks their places");
        (waiting, slices) = (waiting - moved, slices + 1);
    }
    assert!(slices >= 15 && device(&reader, slot, &chain) == 2000);
    assert!(!store(&mut writer, slot, Some(2000), &[2001], &[2001]).deferred);
}

#[test]
fn a_clear_sweeps_at_most_a_slice_however_many_holder_bits_wait() {
    let limits = ShardLimits { retired_holders_max: 1, node_blocks_max: 1, ..ShardLimits::default() };
    let (mut writer, _reader) = shard(ShardId(0), limits);
    let slot = writer.add_worker().expect("room");
    let nodes = 3 * crate::limits::INDEX_EVENT_SWEEP_MAX as u64;
    for round in 0..4 {
        let first = 1 + round * nodes;
        let chain: Vec<u64> = (first..first + nodes).collect();
        store(&mut writer, slot, None, &chain, &chain);
        let before = writer.memory().nodes;
        writer.clear(slot, None);
        let swept = before - writer.memory().nodes;
        assert!(swept <= crate::limits::INDEX_EVENT_SWEEP_MAX as u64, "a clear swept {swept} nodes");
    }
    while writer.sweep(64) {}
    assert_eq!(writer.memory().nodes, 0);
}

#[test]
fn chains_of_one_block_are_bounded_by_the_memory_that_they_take() {
    const BYTES_MAX: u64 = 4 << 20;
    let limits = ShardLimits { worker_bytes_max: BYTES_MAX, ..ShardLimits::default() };
    let (mut writer, _reader) = shard(ShardId(0), limits);
    let slots = [(); 2].map(|()| writer.add_worker().expect("room"));
    let at_first = writer.memory().bytes();
    let mut stored = 0;
    let refused = loop {
        let name = 1 + stored;
        match store(&mut writer, slots[0], None, &[name], &[name]).refused {
            None => stored += 1,
            refused => break refused,
        }
    };
    assert_eq!(refused, Some(super::Refusal::BytesBound));
    // The memory comes in pieces of 2 MiB.
    let taken = writer.memory().bytes() - at_first;
    assert!((BYTES_MAX / 2..BYTES_MAX + (4 << 20)).contains(&taken), "{taken} bytes for {stored} blocks");
    // The bound is the worker's own, and freed memory may be taken again.
    assert_eq!(store(&mut writer, slots[1], None, &[1, 2, 3], &[1, 2, 3]).stored, 3);
    (1..=stored / 2).for_each(|name| remove(&mut writer, slots[0], &[name]));
    assert_eq!(store(&mut writer, slots[0], None, &[1 << 40, 1 << 41], &[7, 8]).stored, 2);
    // In long chains, the same number of bytes holds many more blocks.
    let chain: Vec<u64> = (1 << 50..(1 << 50) + 20_000).collect();
    assert_eq!(store(&mut writer, slots[0], None, &chain, &chain).stored, 20_000);
    writer.check(true);
}

#[test]
fn removed_inner_blocks_are_bounded() {
    let limits = ShardLimits { dormant_blocks_max: 100, node_blocks_max: 8, ..ShardLimits::default() };
    let (mut writer, reader) = shard(ShardId(0), limits);
    let reader = super::IndexReader::new(vec![reader]);
    let slot = writer.add_worker().expect("room");
    let chain = |from: u64| (from..from + 50).collect::<Vec<u64>>();
    let mut stored = 0;
    for round in 0..100 {
        let blocks = chain(1 + round * 50);
        stored += u64::from(store(&mut writer, slot, None, &blocks, &blocks).stored);
        remove(&mut writer, slot, &blocks[..49]);
        writer.check(true);
    }
    assert_eq!(stored, 150, "the third goes beyond");
    assert_eq!(writer.memory().names, 150);
    // Bound blocks may still be stored. Removing one of them frees the removed inner blocks above it.
    assert_eq!(store(&mut writer, slot, None, &chain(1), &chain(1)).stored, 0);
    remove(&mut writer, slot, &[50]);
    assert_eq!(store(&mut writer, slot, None, &chain(1), &chain(1)).stored, 50);
    assert_eq!(device(&reader, slot, &chain(1)), 50);
}

#[test]
fn memory_stays_below_its_ceiling_whatever_is_stored() {
    let ceiling = 12 << 20;
    for node_blocks_max in [1, 8, 1024] {
        let limits = ShardLimits { memory_bytes_max: ceiling, node_blocks_max, ..ShardLimits::default() };
        let (mut writer, _reader) = shard(ShardId(0), limits);
        let slots: Vec<WorkerSlot> = (0..100).map(|_| writer.add_worker().expect("room")).collect();
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(node_blocks_max as u64);
        let mut refused = 0;
        for round in 0..12_000_u64 {
            let slot = slots[rng.random_range(0..slots.len())];
            // Some are shared by all workers, some wait for a parent that never comes.
            let first = if round % 3 == 0 { 1 } else { 1000 + round * 100 };
            let blocks: Vec<u64> = (first..first + rng.random_range(1..40)).collect();
            let parent = (round % 5 == 1).then_some(first - 1);
            let tier = Tier::ALL[rng.random_range(0..4)];
            let outcome = store_as(&mut writer, slot, parent, &blocks, &blocks, tier, GroupId(0), Seed(0));
            refused += u32::from(outcome.refused == Some(super::Refusal::MemoryBound));
            let memory = writer.memory();
            assert!(memory.bytes() <= ceiling + (2 << 20), "round {round}: {memory:?}");
        }
        assert!(refused > 1000, "nodes of {node_blocks_max}: {refused} refused, {:?}", writer.memory());
    }
}

#[test]
fn a_store_on_the_slow_path_is_bounded_and_one_on_the_fast_path_is_not() {
    let limits = ShardLimits { slow_path_blocks_max: 100, ..ShardLimits::default() };
    let (mut writer, reader) = shard(ShardId(0), limits);
    let reader = super::IndexReader::new(vec![reader]);
    let slot = writer.add_worker().expect("room");
    let chain: Vec<u64> = (1..=1000).collect();
    assert_eq!(store(&mut writer, slot, None, &chain, &chain).stored, 1000, "in runs");
    // A chain without its parent takes the slow path.
    let orphans: Vec<u64> = (2001..=2101).collect();
    let outcome = store(&mut writer, slot, Some(2000), &orphans, &orphans);
    assert_eq!((outcome.refused, writer.held(slot).dormant), (Some(super::Refusal::StoreBound), 0));
    assert_eq!(store(&mut writer, slot, Some(2000), &orphans[..100], &orphans[..100]).dormant, 100);
    assert_eq!(device(&reader, slot, &chain), 1000, "what is held stays");
    writer.check(true);
}

#[test]
fn a_clear_of_one_tier_visits_no_more_dormant_blocks_than_one_event_may_move() {
    const MOVES_MAX: u64 = 100;
    for (waiting, host) in [(MOVES_MAX, 3), (MOVES_MAX + 1, 0)] {
        let limits = ShardLimits { event_moves_max: MOVES_MAX as usize, ..ShardLimits::default() };
        let (mut writer, _) = shard(ShardId(0), limits);
        let slot = writer.add_worker().expect("room");
        store_as(&mut writer, slot, None, &[1, 2, 3], &[1, 2, 3], Tier::Host, GroupId(0), Seed(0));
        let orphans: Vec<u64> = (1001..1001 + waiting).collect();
        assert_eq!(u64::from(store(&mut writer, slot, Some(1000), &orphans, &orphans).dormant), waiting);
        assert_eq!(writer.is_cleared_whole(slot), host == 0);
        writer.clear(slot, Some(Tier::Device));
        let held = writer.held(slot);
        assert_eq!((held.dormant, held.by_tier[Tier::Host as usize]), (0, host));
        writer.check(true);
    }
}
