//! The index: the cost of a query, and of an event for its writer.

use std::hint::black_box;
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BatchSize, BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvrouted::ids::{EngineHash, GroupId, LocalHash, Seed, ShardId, Tier, WorkerSlot};
use kvrouted::index::{Depths, IndexReader, ShardLimits, ShardReader, ShardWriter, StoreBlocks, shard};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_xoshiro::Xoshiro256PlusPlus;

const GROUP: GroupId = GroupId(0);
const SEED: Seed = Seed(1337);
/// Blocks of a prompt.
const DEPTH: u64 = 720;

fn locals(from: u64, count: u64) -> Vec<LocalHash> {
    (from..from + count).map(|block| LocalHash(block.wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect()
}

fn engine_hashes(from: u64, count: u64) -> Vec<EngineHash> {
    (from..from + count).map(|block| EngineHash(block.wrapping_mul(0xd6e8_feb8_6659_fd93))).collect()
}

/// An index with empty workers.
struct World {
    writer: ShardWriter,
    reader: ShardReader,
    slots: Vec<WorkerSlot>,
}

impl World {
    fn new(workers: u64) -> Self {
        let (mut writer, reader) = shard(ShardId(0), ShardLimits::default());
        let slots = (0..workers).filter_map(|_| writer.add_worker()).collect();
        Self { writer, reader, slots }
    }

    /// Stores a chain under a block, or at the root.
    fn store(&mut self, slot: WorkerSlot, parent: Option<EngineHash>, hashes: &[EngineHash], locals: &[LocalHash]) {
        let blocks = StoreBlocks { parent, hashes, locals, tier: Tier::Device, group: GROUP, seed: SEED };
        self.writer.begin_batch(slot);
        let outcome = self.writer.store(slot, &blocks);
        assert_eq!(outcome.refused, None);
    }

    fn remove(&mut self, slot: WorkerSlot, hashes: &[EngineHash]) {
        let outcome = self.writer.remove(slot, Tier::Device, GROUP, hashes);
        assert_eq!(outcome.unknown, 0);
    }
}

/// A group whose functions take about two seconds each.
fn short<'a>(c: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = c.benchmark_group(name);
    group.sample_size(20).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_millis(1500));
    group
}

/// Every worker holds the first half of a prompt, and worker `w` of `n` a further `w / n` of the rest.
fn shared_prompt(workers: u64, blocks: u64) -> (World, Vec<LocalHash>) {
    let (mut world, prompt, hashes) = (World::new(workers), locals(0, blocks), engine_hashes(1, blocks));
    for (at, slot) in world.slots.clone().into_iter().enumerate() {
        let held = (blocks / 2 + blocks / 2 * at as u64 / workers) as usize;
        world.store(slot, None, &hashes[..held], &prompt[..held]);
    }
    world.writer.publish();
    (world, prompt)
}

/// The same prompt again and again, as a router queries it right after hashing it.
fn lookup_hot(c: &mut Criterion) {
    let mut group = short(c, "index/lookup_hot");
    let mut bench = |id: BenchmarkId, workers, blocks| {
        let (world, prompt) = shared_prompt(workers, blocks);
        let (reader, mut depths) = (IndexReader::new(vec![world.reader.clone()]), Depths::new());
        group.throughput(Throughput::Elements(blocks));
        group.bench_function(id, |bencher| bencher.iter(|| reader.lookup(black_box(&prompt), &mut depths)));
    };
    for workers in [8, 64, 512, 4096] {
        bench(BenchmarkId::new("workers", workers), workers, DEPTH);
    }
    for blocks in [16, 128, 1024, 8192] {
        bench(BenchmarkId::new("blocks", blocks), 64, blocks);
    }
    group.finish();
}

/// Other prompts every time, more than caches hold: 8 workers with 500 prompts each.
fn lookup_cold(c: &mut Criterion) {
    const PROMPTS: u64 = 4000;
    let mut group = short(c, "index/lookup_cold");
    group.throughput(Throughput::Elements(DEPTH));
    let mut world = World::new(8);
    let mut prompts: Vec<Vec<LocalHash>> = (0..PROMPTS).map(|prompt| locals(prompt * DEPTH, DEPTH)).collect();
    for (at, prompt) in prompts.iter().enumerate() {
        let slot = world.slots[at % world.slots.len()];
        world.store(slot, None, &engine_hashes(1 + at as u64 * DEPTH, DEPTH), prompt);
    }
    world.writer.publish();
    prompts.shuffle(&mut Xoshiro256PlusPlus::seed_from_u64(1));
    let (reader, mut depths) = (IndexReader::new(vec![world.reader.clone()]), Depths::new());
    let mut next = prompts.iter().cycle();
    group.bench_function("prompts", |bencher| {
        bencher.iter(|| next.next().map(|prompt| reader.lookup(black_box(prompt), &mut depths)));
    });
    group.finish();
}

/// One worker stores a prompt and evicts it again, its last block first.
fn store_and_remove(c: &mut Criterion) {
    let mut group = short(c, "index/store_and_remove");
    for blocks in [1, 16, 256, 4096] {
        let (hashes, prompt) = (engine_hashes(1, blocks), locals(0, blocks));
        let evicted: Vec<_> = hashes.iter().rev().copied().collect();
        group.throughput(Throughput::Elements(blocks));
        group.bench_function(BenchmarkId::new("blocks", blocks), |bencher| {
            let mut world = World::new(1);
            let slot = world.slots[0];
            bencher.iter(|| {
                world.store(slot, None, black_box(&hashes), &prompt);
                world.writer.publish();
                world.remove(slot, black_box(&evicted));
                world.writer.publish();
            });
        });
    }
    group.finish();
}

/// A store of a prompt that others hold too: its blocks exist, and only its holder bit changes.
fn store_what_others_hold(c: &mut Criterion) {
    let mut group = short(c, "index/store_what_others_hold");
    let (mut world, prompt) = shared_prompt(64, DEPTH);
    let (slot, hashes) = (world.writer.add_worker().expect("room"), engine_hashes(1, DEPTH));
    group.throughput(Throughput::Elements(DEPTH));
    group.bench_function("of_64", |bencher| {
        bencher.iter(|| {
            world.store(slot, None, black_box(&hashes), &prompt);
            world.writer.publish();
            world.remove(slot, black_box(&hashes));
            world.writer.publish();
        });
    });
    group.finish();
}

/// Answers that grow block by block, 16 requests at a time, and are evicted whole.
fn decode(c: &mut Criterion) {
    const REQUESTS: u64 = 16;
    const BLOCKS: u64 = 64;
    let mut group = short(c, "index/decode");
    let hashes: Vec<_> = (0..REQUESTS).map(|request| engine_hashes(1 + request * BLOCKS, BLOCKS)).collect();
    let contents: Vec<_> = (0..REQUESTS).map(|request| locals(request * BLOCKS, BLOCKS)).collect();
    group.throughput(Throughput::Elements(REQUESTS * BLOCKS));
    group.bench_function("single_block_events", |bencher| {
        let mut world = World::new(1);
        let slot = world.slots[0];
        bencher.iter(|| {
            for at in 0..BLOCKS as usize {
                for (hashes, locals) in hashes.iter().zip(&contents) {
                    let parent = at.checked_sub(1).map(|before| hashes[before]);
                    world.store(slot, parent, &hashes[at..=at], &locals[at..=at]);
                }
                world.writer.publish();
            }
            hashes.iter().for_each(|hashes| world.remove(slot, hashes));
            world.writer.publish();
        });
    });
    group.finish();
}

/// Prompts that branch off a long one at every eighth block: their names, their contents, and their parents.
fn branches(blocks: u64) -> Vec<(EngineHash, Vec<EngineHash>, Vec<LocalHash>)> {
    const LENGTH: u64 = 4;
    let trunk = engine_hashes(1, blocks);
    let mut branches: Vec<_> = (0..blocks / 8)
        .map(|at| {
            let from = blocks + at * LENGTH;
            (trunk[at as usize * 8], engine_hashes(1 + from, LENGTH), locals(from, LENGTH))
        })
        .collect();
    branches.shuffle(&mut Xoshiro256PlusPlus::seed_from_u64(2));
    branches
}

/// Branches cut a long edge into many nodes, which become one again when the branches are removed.
fn split_and_join(c: &mut Criterion) {
    const BLOCKS: u64 = 1024;
    let mut group = short(c, "index/split_and_join");
    let branches = branches(BLOCKS);
    let trunk = || {
        let mut world = World::new(1);
        world.store(world.slots[0], None, &engine_hashes(1, BLOCKS), &locals(0, BLOCKS));
        world
    };
    let split = |mut world: World| {
        let slot = world.slots[0];
        branches.iter().for_each(|(parent, hashes, locals)| world.store(slot, Some(*parent), hashes, locals));
        world.writer.publish();
        world
    };
    let join = |mut world: World| {
        let slot = world.slots[0];
        branches.iter().for_each(|(_, hashes, _)| world.remove(slot, hashes));
        world.writer.publish();
        world
    };
    group.throughput(Throughput::Elements(branches.len() as u64));
    group.bench_function("split", |bencher| bencher.iter_batched(trunk, split, BatchSize::LargeInput));
    group.bench_function("join", |bencher| bencher.iter_batched(|| split(trunk()), join, BatchSize::LargeInput));
    group.finish();
}

/// Blocks of several prompts are removed in a random order, each by an event of its own.
fn random_removal(c: &mut Criterion) {
    const PROMPTS: u64 = 16;
    const BLOCKS: u64 = 512;
    let mut group = short(c, "index/random_removal");
    let mut order = engine_hashes(1, PROMPTS * BLOCKS);
    order.shuffle(&mut Xoshiro256PlusPlus::seed_from_u64(3));
    let full = || {
        let mut world = World::new(1);
        for prompt in 0..PROMPTS {
            let (hashes, locals) = (engine_hashes(1 + prompt * BLOCKS, BLOCKS), locals(prompt * BLOCKS, BLOCKS));
            world.store(world.slots[0], None, &hashes, &locals);
        }
        world
    };
    let remove = |mut world: World| {
        let slot = world.slots[0];
        for (at, hash) in order.iter().enumerate() {
            world.remove(slot, &[*hash]);
            if at % 64 == 63 {
                world.writer.publish();
            }
        }
        world
    };
    group.throughput(Throughput::Elements(PROMPTS * BLOCKS));
    group.bench_function("blocks", |bencher| bencher.iter_batched(full, remove, BatchSize::LargeInput));
    group.finish();
}

/// A clear is immediate for readers; the writer's part is swept in slices.
fn clear(c: &mut Criterion) {
    const HELD: u64 = 20_000;
    let (hashes, prompt) = (engine_hashes(1, HELD), locals(0, HELD));
    let mut group = short(c, "index/clear");
    group.throughput(Throughput::Elements(HELD));
    let full = || {
        let mut world = World::new(1);
        world.store(world.slots[0], None, &hashes, &prompt);
        world.writer.publish();
        world
    };
    let clear = |mut world: World| {
        world.writer.clear(world.slots[0], None);
        world.writer.publish();
        world
    };
    let and_sweep = |world: World| {
        let mut world = clear(world);
        while world.writer.sweep(8192) {}
        world
    };
    group.bench_function("alone", |bencher| bencher.iter_batched(full, clear, BatchSize::LargeInput));
    group.bench_function("and_sweep", |bencher| bencher.iter_batched(full, and_sweep, BatchSize::LargeInput));
    // A worker that is cleared again and again while it works.
    group.throughput(Throughput::Elements(256));
    group.bench_function("often", |bencher| {
        let mut world = World::new(1);
        let slot = world.slots[0];
        bencher.iter(|| {
            world.store(slot, None, black_box(&hashes[..256]), &prompt[..256]);
            world.writer.clear(slot, None);
            world.writer.sweep(512);
            world.writer.publish();
        });
    });
    group.finish();
}

criterion_group!(
    benches,
    lookup_hot,
    lookup_cold,
    store_and_remove,
    store_what_others_hold,
    decode,
    split_and_join,
    random_removal,
    clear
);
criterion_main!(benches);
