//! One decision with its booking: hash, look up, cost, select, book, free.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use kvrouted::budget::Gauge;
use kvrouted::fleet::{FleetTable, PoolRole, SchemeCell, Space, WorkerRecord};
use kvrouted::hash;
use kvrouted::ids::{EngineHash, GroupId, Scheme, ShardId, SpaceId, Tier, Window, Worker, WorkerIndex, WorkerSlot};
use kvrouted::index::{IndexReader, ShardLimits, ShardWriter, StoreBlocks, shard};
use kvrouted::load::{BookingRef, Loads, LoadsConfig};
use kvrouted::route::{AffinityTable, Decision, Draws, Policy, Prompt, RouteRequest, Scratch, View, decide};
use kvrouted::watchdog::{Activity, ThreadMark};

const SCHEME: Scheme = Scheme { block_size: 16, window: Window::Plain };
/// A prompt of 720 blocks and a part.
const PROMPT_TOKENS: u32 = 11_525;

fn record(index: u32, slot: WorkerSlot) -> WorkerRecord {
    WorkerRecord {
        name: format!("w{}", index + 1),
        batched_tokens_max: 8192,
        weight: 8.0,
        ..WorkerRecord::new(WorkerIndex(index), Worker::new(u64::from(index) + 1, 0), slot)
    }
}

fn space() -> Space {
    Space {
        id: SpaceId(0),
        model: "m".into(),
        namespace: String::new(),
        role: PoolRole::Both,
        scheme: Arc::new(SchemeCell::new(Some(SCHEME))),
    }
}

/// Fleets, by their number of workers. Without optimization, which is a test that the benchmark runs, to fill the
/// largest takes minutes.
const FLEETS: &[u32] = if cfg!(debug_assertions) { &[8, 64] } else { &[8, 64, 512, 1024, 4096] };

/// Worker `w` of `n` holds the leading `w / n` of the prompt.
fn hold(writer: &mut ShardWriter, workers: &[WorkerRecord], tokens: &[u32]) {
    let seed = hash::seed(None, None);
    let mut locals = Vec::new();
    hash::local_hashes(SCHEME, seed, hash::token_bytes(tokens), &[], &mut locals);
    let hashes: Vec<_> = (1..=locals.len() as u64).map(EngineHash).collect();
    for (at, record) in workers.iter().enumerate().skip(1) {
        let held = locals.len() * at / workers.len();
        let (hashes, locals) = (&hashes[..held], &locals[..held]);
        let blocks = StoreBlocks { parent: None, hashes, locals, tier: Tier::Device, group: GroupId(0), seed };
        writer.begin_batch(record.slot);
        writer.store(record.slot, &blocks);
    }
    writer.publish();
}

fn ask(tokens: &[u32]) -> RouteRequest<'_> {
    RouteRequest::new(SpaceId(0), Prompt::of_tokens(tokens))
}

/// A long prompt, of which each worker holds another part, in mode `kv`.
fn route(c: &mut Criterion) {
    run(c, "decide/route_and_free", PROMPT_TOKENS, &Policy::kv());
}

/// A prompt of 8 blocks: what there is to do for each candidate, with next to nothing to hash and to look up.
fn route_short(c: &mut Criterion) {
    run(c, "decide/route_short_and_free", 8 * SCHEME.block_size, &Policy::kv());
}

/// The long prompt in mode `latency`, whose costs are in seconds.
fn route_by_latency(c: &mut Criterion) {
    run(c, "decide/route_by_latency_and_free", PROMPT_TOKENS, &Policy::default());
}

fn run(c: &mut Criterion, name: &str, prompt_tokens: u32, policy: &Policy) {
    let tokens: Vec<u32> = (0..prompt_tokens).map(|token| token.wrapping_mul(2_654_435_761)).collect();
    let mut group = c.benchmark_group(name);
    for &count in FLEETS {
        let (mut writer, reader) = shard(ShardId(0), ShardLimits::default());
        let workers: Vec<_> =
            (0..count).filter_map(|index| writer.add_worker().map(|slot| record(index, slot))).collect();
        hold(&mut writer, &workers, &tokens);
        let fleet = FleetTable { version: 1, spaces: vec![space()], workers };
        let indexes = [IndexReader::new(vec![reader])];
        let loads = Loads::new(count as usize, LoadsConfig::default());
        let affinities = AffinityTable::new(8, 0);
        let Ok(session) = loads.open_session(None, 0) else { return };
        let view = View {
            fleet: &fleet,
            indexes: &indexes,
            predictions: &[],
            loads: &loads,
            policy,
            round_robin_counters: &[],
            affinities: &affinities,
            now_ns: 0,
        };
        let mut seed = 0;
        let (mut scratch, mut decision) = (Scratch::default(), Decision::default());
        group.bench_function(BenchmarkId::new("workers", count), |bencher| {
            bencher.iter(|| {
                let request = ask(black_box(&tokens));
                seed += 1;
                let decided = decide(&view, &request, &mut scratch, Draws::new(seed), &mut decision);
                assert!(decided.is_ok(), "{decided:?}");
                let chosen = decision.candidates[0];
                let demand = scratch.demand(&request, &decision, &chosen);
                let booked = loads.book(session, "r", 0, chosen.index, demand, 0);
                booked.map(|booked| loads.free(session, BookingRef::Handle(booked.handle), 0)).is_ok()
            });
        });
    }
    group.finish();
}

/// What a serving thread writes for the watchdog and the memory accounts, for one request: a round with its phase and
/// its end, and the two figures of a reply.
fn account(c: &mut Criterion) {
    let (mark, replies) = (ThreadMark::new("core-0", true), Gauge::default());
    let mut group = c.benchmark_group("decide/account");
    group.bench_function("marks", |bencher| {
        bencher.iter(|| {
            mark.begin_round(black_box(Activity::ReadingFrames));
            mark.enter(black_box(Activity::Deciding));
            mark.wait();
        });
    });
    group.bench_function("gauges", |bencher| {
        bencher.iter(|| {
            replies.set(black_box(300));
            replies.set(black_box(0));
        });
    });
    group.finish();
}

criterion_group!(benches, route, route_short, route_by_latency, account);
criterion_main!(benches);
