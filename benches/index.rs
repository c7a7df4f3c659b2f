//! The index: what a query costs, and what an event costs its writer.

use std::hint::black_box;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvrouted::ids::{EngineHash, GroupId, LocalHash, Seed, ShardId, Tier, WorkerSlot};
use kvrouted::index::{Depths, IndexReader, ShardLimits, ShardReader, ShardWriter, StoreBlocks, shard};

const GROUP: GroupId = GroupId(0);
const SEED: Seed = Seed(1337);
/// Blocks of a prompt.
const DEPTH: u64 = 720;

fn locals(from: u64, count: u64) -> Vec<LocalHash> {
    (from..from + count).map(|block| LocalHash(block.wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect()
}

fn engine_hashes(from: u64, count: u64) -> Vec<EngineHash> {
    (from..from + count).map(EngineHash).collect()
}

/// An index with `workers` empty workers.
fn world(workers: u64) -> (ShardWriter, ShardReader, Vec<WorkerSlot>) {
    let (mut writer, reader) = shard(ShardId(0), ShardLimits::default());
    let slots = (0..workers).filter_map(|_| writer.add_worker()).collect();
    (writer, reader, slots)
}

fn store(writer: &mut ShardWriter, slot: WorkerSlot, hashes: &[EngineHash], locals: &[LocalHash]) {
    let blocks = StoreBlocks { parent: None, hashes, locals, tier: Tier::Device, group: GROUP, seed: SEED };
    writer.begin_batch(slot);
    let outcome = writer.store(slot, &blocks);
    assert_eq!(outcome.refused, None);
}

/// Every worker holds the first half of the prompt, and worker `w` of `n` a further `w / n` of the rest.
fn lookup(c: &mut Criterion) {
    let mut group = c.benchmark_group("index/lookup");
    let prompt = locals(0, DEPTH);
    group.throughput(Throughput::Elements(DEPTH));
    for workers in [8, 64, 512] {
        let (mut writer, reader, slots) = world(workers);
        for (at, slot) in slots.iter().enumerate() {
            let held = DEPTH / 2 + DEPTH / 2 * at as u64 / workers;
            store(&mut writer, *slot, &engine_hashes(1, held), &prompt[..held as usize]);
        }
        writer.publish();
        let reader = IndexReader::new(vec![reader]);
        let mut depths = Depths::new();
        group.bench_function(BenchmarkId::new("workers", workers), |bencher| {
            bencher.iter(|| reader.lookup(black_box(&prompt), &mut depths));
        });
    }
    group.finish();
}

/// One worker takes a prompt in and evicts it again, its last block first.
fn store_and_remove(c: &mut Criterion) {
    let mut group = c.benchmark_group("index/store_and_remove");
    for blocks in [1, 16, 256] {
        let hashes = engine_hashes(1, blocks);
        let evicted: Vec<_> = hashes.iter().rev().copied().collect();
        let prompt = locals(0, blocks);
        group.throughput(Throughput::Elements(blocks));
        group.bench_function(BenchmarkId::new("blocks", blocks), |bencher| {
            let (mut writer, reader, slots) = world(1);
            bencher.iter(|| {
                store(&mut writer, slots[0], black_box(&hashes), &prompt);
                writer.publish();
                writer.remove(slots[0], Tier::Device, GROUP, black_box(&evicted));
                writer.publish();
            });
            drop(reader);
        });
    }
    group.finish();
}

/// A clear is at once for readers; what it leaves to the writer is swept in slices.
fn clear(c: &mut Criterion) {
    const HELD: u64 = 20_000;
    let (hashes, prompt) = (engine_hashes(1, HELD), locals(0, HELD));
    let mut group = c.benchmark_group("index/clear");
    group.throughput(Throughput::Elements(HELD));
    group.bench_function("and_sweep", |bencher| {
        bencher.iter_batched(
            || {
                let (mut writer, reader, slots) = world(1);
                store(&mut writer, slots[0], &hashes, &prompt);
                writer.publish();
                (writer, reader, slots[0])
            },
            |(mut writer, reader, slot)| {
                writer.clear(slot, None);
                writer.publish();
                while writer.sweep(8192) {}
                (writer, reader)
            },
            BatchSize::LargeInput,
        );
    });
    group.finish();
}

criterion_group!(benches, lookup, store_and_remove, clear);
criterion_main!(benches);
