//! Bookings and what decisions read of them: the cost of one, beside other prompts in flight.

use std::hint::black_box;

use criterion::{BatchSize, BenchmarkId, Criterion, criterion_group, criterion_main};
use kvrouted::ids::{LocalHash, SpaceId, Worker, WorkerIndex};
use kvrouted::limits::LAWS_PUBLISHED_PER_LOCK_MAX;
use kvrouted::limits::WORKERS_MAX;
use kvrouted::load::{ActiveDepths, BookingRef, Demand, Loads, LoadsConfig, PromptBlocks, SessionId};

const SPACE: SpaceId = SpaceId(0);
/// Blocks of a prompt: of one of the conversations of a public trace, on average.
const BLOCKS: u64 = 709;
/// Blocks of a short prompt.
const BLOCKS_SHORT: u64 = 14;
/// Blocks that every prompt begins with.
const SHARED: u64 = 64;
/// Prompts in flight that share nothing.
const APART_IN_FLIGHT: u64 = 32;
/// Prompts in flight on each worker.
const IN_FLIGHT: u32 = 4;
const WORKERS: [u32; 2] = [16, 64];

/// The blocks of a prompt.
fn prompt(number: u64) -> Vec<LocalHash> {
    let of = |at: u64| if at < SHARED { at } else { number << 32 | at };
    (0..BLOCKS).map(|at| LocalHash(of(at).wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect()
}

/// A prompt that shares nothing with any other.
fn elsewhere() -> Vec<LocalHash> {
    prompt(1).into_iter().map(|local| LocalHash(!local.0)).collect()
}

fn demand(locals: &[LocalHash]) -> Demand<'_> {
    Demand { space: SPACE, prefill_tokens: 1000, blocks: PromptBlocks::Shared(locals), ..Demand::default() }
}

/// Workers with some prompts each, all with the same beginning.
fn busy(workers: u32) -> Option<(Loads, SessionId)> {
    let loads = Loads::new(workers as usize, LoadsConfig::default());
    let session = loads.open_session(None, 0).ok()?;
    for at in 0..IN_FLIGHT * workers {
        let locals = prompt(u64::from(at) + 1);
        let worker = WorkerIndex(at % workers);
        loads.book(session, &format!("r{at}"), 0, worker, demand(&locals), 0).ok()?;
    }
    Some((loads, session))
}

/// A booking and its end by handle, at once.
fn book(c: &mut Criterion) {
    let mut group = c.benchmark_group("load/book_and_free");
    for workers in WORKERS {
        let Some((loads, session)) = busy(workers) else { return };
        for (name, locals) in [("new_tail", prompt(1_000_000)), ("same_prompt", prompt(1))] {
            group.bench_function(BenchmarkId::new(name, workers), |bencher| {
                bencher.iter(|| {
                    let booked = loads.book(session, "r", 0, WorkerIndex(3), demand(black_box(&locals)), 0);
                    booked.map(|booked| loads.free(session, BookingRef::Handle(booked.handle), 0)).is_ok()
                });
            });
        }
        group.bench_function(BenchmarkId::new("alone", workers), |bencher| {
            let demand = Demand { prefill_tokens: 1000, blocks: PromptBlocks::Alone(BLOCKS), ..Demand::default() };
            bencher.iter(|| {
                let booked = loads.book(session, "r", 0, WorkerIndex(3), black_box(demand), 0);
                booked.map(|booked| loads.free(session, BookingRef::Handle(booked.handle), 0)).is_ok()
            });
        });
    }
    group.finish();
}

/// A booking, and by its name the end of the one that is oldest, as gateways make them: every prompt is another, none
/// is still in the caches when it ends.
fn in_turn(c: &mut Criterion) {
    let mut group = c.benchmark_group("load/book_and_free_oldest");
    for workers in WORKERS {
        let Some((loads, session)) = busy(workers) else { return };
        let in_flight = u64::from(IN_FLIGHT * workers);
        let names: Vec<String> = (0..2 * in_flight).map(|at| format!("r{at}")).collect();
        let prompts: Vec<_> = (0..2 * in_flight).map(|at| prompt(at + 1)).collect();
        let mut next = in_flight;
        group.bench_function(BenchmarkId::new("new_tail", workers), |bencher| {
            bencher.iter(|| {
                let at = (next % (2 * in_flight)) as usize;
                let oldest = &names[((next - in_flight) % (2 * in_flight)) as usize];
                next += 1;
                let worker = WorkerIndex(at as u32 % workers);
                let booked = loads.book(session, &names[at], 0, worker, demand(&prompts[at]), 0);
                let freed = loads.free(session, BookingRef::Request { request_id: oldest, attempt: 0 }, 0);
                (booked.is_ok(), freed)
            });
        });
    }
    group.finish();
}

/// As [`in_turn`], but with a new prompt and a new name each time, as from unrelated clients. The time includes writing
/// the name.
fn apart(c: &mut Criterion) {
    let mut group = c.benchmark_group("load/book_and_free_apart");
    for blocks in [BLOCKS_SHORT, BLOCKS] {
        let loads = Loads::new(8, LoadsConfig::default());
        let Ok(session) = loads.open_session(None, 0) else { return };
        let mut locals: Vec<LocalHash> = prompt(1).into_iter().take(blocks as usize).collect();
        let (mut next, mut name, mut oldest) = (0_u64, String::new(), String::new());
        let mut book_and_free = || {
            locals[0] = LocalHash(next.wrapping_mul(0xd6e8_feb8_6659_fd93));
            name_of(next, &mut name);
            let booked = loads.book(session, &name, 0, WorkerIndex(next as u32 % 8), demand(black_box(&locals)), 0);
            let freed = next.checked_sub(APART_IN_FLIGHT).map(|ended| {
                name_of(ended, &mut oldest);
                loads.free_request(session, &oldest, 0, 0)
            });
            next += 1;
            (booked.is_ok(), freed)
        };
        group.bench_function(BenchmarkId::from_parameter(blocks), |bencher| bencher.iter(&mut book_and_free));
    }
    group.finish();
}

/// A class of workers whose law the first report has just changed.
fn taught(workers: u32) -> Option<Loads> {
    let loads = Loads::new(workers as usize, LoadsConfig::default());
    for at in 0..workers {
        loads.set_prefill_class(WorkerIndex(at), Worker::new(u64::from(at), 0), "c", None);
    }
    let session = loads.open_session(None, 0).ok()?;
    let demand = Demand { prefill_tokens: 1000, ..Demand::default() };
    let booked = loads.book(session, "r", 0, WorkerIndex(0), demand, 0).ok()?;
    loads.prefill_complete(session, BookingRef::Handle(booked.handle), 0, 1_000_000);
    Some(loads)
}

/// Gives a new law to the workers of a class: to all under one lock, and to as many as the daemon does.
fn publish(c: &mut Criterion) {
    let mut group = c.benchmark_group("load/publish_law");
    for places in [usize::MAX, LAWS_PUBLISHED_PER_LOCK_MAX] {
        let id = BenchmarkId::new("to_1024_workers", if places == usize::MAX { "at_once" } else { "one_lock" });
        group.bench_function(id, |bencher| {
            let publish = |loads: &mut Option<Loads>| loads.as_ref().and_then(|loads| loads.publish_laws(0, places));
            bencher.iter_batched_ref(|| taught(1024), publish, BatchSize::PerIteration);
        });
    }
    group.finish();
}

/// A first token, of a worker of a large class whose law changes.
fn first_token(c: &mut Criterion) {
    let Some(loads) = taught(1024) else { return };
    let Ok(session) = loads.open_session(None, 0) else { return };
    let demand = Demand { prefill_tokens: 1000, ..Demand::default() };
    let mut now_ns = 2_000_000;
    c.bench_function("load/book_first_token_and_free/1024", |bencher| {
        bencher.iter(|| {
            let booked = loads.book(session, "r", 0, WorkerIndex(3), black_box(demand), now_ns);
            now_ns += 10_000_000 + now_ns % 7 * 5_000_000;
            booked.map(|booked| {
                let booking = BookingRef::Handle(booked.handle);
                (loads.prefill_complete(session, booking, 0, now_ns), loads.free(session, booking, now_ns))
            })
        });
    });
}

/// What the request of this number is called, written over `name`.
fn name_of(number: u64, name: &mut String) {
    name.clear();
    name.push_str("request-");
    name.extend((0..8).rev().map(|digit| char::from(b'a' + (number >> (4 * digit) & 15) as u8)));
}

/// Active blocks by place, as a decision keeps them by row.
struct Depths(Vec<u32>);

impl ActiveDepths for Depths {
    fn clear(&mut self) {
        self.0.fill(0);
    }

    fn set(&mut self, worker: WorkerIndex, blocks: u32) {
        self.0[worker.place()] = blocks;
    }
}

fn active(c: &mut Criterion) {
    let mut group = c.benchmark_group("load/active");
    for workers in WORKERS {
        let Some((loads, _)) = busy(workers) else { return };
        let mut depths = Depths(vec![0; WORKERS_MAX]);
        for (name, locals) in [("nothing", elsewhere()), ("beginning", prompt(1_000_000)), ("whole_prompt", prompt(1))]
        {
            group.bench_function(BenchmarkId::new(name, workers), |bencher| {
                bencher.iter(|| {
                    loads.active(SPACE, black_box(&locals), &mut depths);
                    depths.0[3]
                });
            });
        }
    }
    group.finish();
}

fn read(c: &mut Criterion) {
    let Some((loads, _)) = busy(16) else { return };
    c.bench_function("load/read", |bencher| bencher.iter(|| loads.read_at(black_box(WorkerIndex(3)), 7)));
}

criterion_group!(benches, book, in_turn, apart, active, read, publish, first_token);
criterion_main!(benches);
