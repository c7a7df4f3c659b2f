//! Readers beside a writer: every answer is that of one publish within the read, and boundaries never go
//! back.

mod oracle;

use kvrouted::ids::{EngineHash, GroupId, LocalHash, Seed, ShardId, Tier, TierBlocks, WorkerSlot};
use kvrouted::index::{Depths, IndexReader, ShardLimits, ShardWriter, StoreBlocks, shard};
use oracle::Oracle;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use std::sync::atomic::{AtomicU64, Ordering};

const SHARD: ShardId = ShardId(0);
const W1: WorkerSlot = WorkerSlot(0);
const W2: WorkerSlot = WorkerSlot(1);

/// What a stream of batches does to two workers, as steps and as the answers after each publish.
struct Script {
    batches: Vec<Vec<Step>>,
    queries: Vec<Vec<LocalHash>>,
    /// By publishes so far, query and worker.
    answers: Vec<Vec<[TierBlocks; 2]>>,
}

enum Step {
    Store(usize, Option<EngineHash>, Vec<EngineHash>, Vec<LocalHash>, Tier),
    Remove(usize, Tier, EngineHash),
    Clear(usize, Option<Tier>),
}

const fn store_of<'a>(
    parent: Option<EngineHash>,
    hashes: &'a [EngineHash],
    locals: &'a [LocalHash],
    tier: Tier,
) -> StoreBlocks<'a> {
    StoreBlocks { parent, hashes, locals, tier, group: GroupId(0), seed: Seed(0) }
}

fn random_step(rng: &mut Xoshiro256PlusPlus) -> Step {
    let worker = rng.random_range(0..2);
    let tier = Tier::ALL[rng.random_range(0..2)];
    match rng.random_range(0..40) {
        0 => Step::Clear(worker, None),
        1 => Step::Clear(worker, Some(tier)),
        2..=15 => Step::Remove(worker, tier, EngineHash(rng.random_range(0..12))),
        _ => {
            let parent = rng.random_bool(0.6).then(|| EngineHash(rng.random_range(0..12)));
            let hashes: Vec<EngineHash> = (0..3).map(|_| EngineHash(rng.random_range(0..12))).collect();
            let locals = hashes.iter().map(|_| LocalHash(rng.random_range(0..2))).collect();
            Step::Store(worker, parent, hashes, locals, tier)
        }
    }
}

fn script(seed: u64, batches: usize) -> Script {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let batches: Vec<Vec<Step>> =
        (0..batches).map(|_| (0..rng.random_range(1..8)).map(|_| random_step(&mut rng)).collect()).collect();
    let queries: Vec<Vec<LocalHash>> =
        (0..8_u64).map(|bits| (0..6).map(|at| LocalHash(bits >> (at % 3) & 1)).collect()).collect();
    let mut oracles = [Oracle::default(), Oracle::default()];
    let answer =
        |oracles: &[Oracle; 2]| queries.iter().map(|query| [0, 1].map(|at| oracles[at].depths(query))).collect();
    let mut answers = vec![answer(&oracles)];
    for batch in &batches {
        for step in batch {
            match step {
                Step::Store(worker, parent, hashes, locals, tier) => {
                    oracles[*worker].store(&ShardLimits::default(), &store_of(*parent, hashes, locals, *tier));
                }
                Step::Remove(worker, tier, hash) => {
                    oracles[*worker].remove(*tier, GroupId(0), &[*hash]);
                }
                Step::Clear(worker, tier) => oracles[*worker].clear(*tier),
            }
        }
        answers.push(answer(&oracles));
    }
    Script { batches, queries, answers }
}

fn play(script: &Script, writer: &mut ShardWriter, begun: &AtomicU64, done: &AtomicU64) {
    for batch in &script.batches {
        for step in batch {
            match step {
                Step::Store(worker, parent, hashes, locals, tier) => {
                    writer.store(WorkerSlot(*worker as u16), &store_of(*parent, hashes, locals, *tier));
                }
                Step::Remove(worker, tier, hash) => {
                    writer.remove(WorkerSlot(*worker as u16), *tier, GroupId(0), &[*hash]);
                }
                Step::Clear(worker, tier) => writer.clear(WorkerSlot(*worker as u16), *tier),
            }
        }
        writer.sweep(3);
        begun.fetch_add(1, Ordering::SeqCst);
        writer.publish();
        done.fetch_add(1, Ordering::SeqCst);
        std::thread::yield_now();
    }
}

/// Reads until the writer is through; every answer must be that of one publish within the read.
fn watch(script: &Script, reader: &IndexReader, begun: &AtomicU64, done: &AtomicU64) -> usize {
    let (mut depths, mut newest, mut seen) = (Depths::new(), 0, 0);
    loop {
        let last = done.load(Ordering::SeqCst) == script.batches.len() as u64;
        for (at, query) in script.queries.iter().enumerate() {
            let from = done.load(Ordering::SeqCst).max(newest);
            let epoch = reader.lookup(query, &mut depths).epoch;
            let to = begun.load(Ordering::SeqCst);
            assert!((from..=to).contains(&epoch), "boundary {epoch} is not within the read, {from} to {to}");
            let answer = [W1, W2].map(|slot| depths.of(SHARD, slot));
            assert_eq!(answer, script.answers[epoch as usize][at], "not the answer of boundary {epoch}");
            seen += usize::from(epoch != newest);
            newest = epoch;
        }
        if last {
            return seen;
        }
    }
}

#[test]
fn every_answer_beside_a_writer_is_that_of_one_boundary_within_the_read() {
    let script = script(20_261_121, 3000);
    let (mut writer, reader) = shard(SHARD, ShardLimits::default());
    assert_eq!([writer.add_worker(), writer.add_worker()], [Some(W1), Some(W2)]);
    let (begun, done) = (AtomicU64::new(0), AtomicU64::new(0));
    let readers = [0; 2].map(|_| IndexReader::new(vec![reader.clone()]));
    let seen: usize = std::thread::scope(|threads| {
        let watchers = readers.map(|reader| {
            let (script, begun, done) = (&script, &begun, &done);
            threads.spawn(move || watch(script, &reader, begun, done))
        });
        play(&script, &mut writer, &begun, &done);
        watchers.into_iter().map(|watcher| watcher.join().expect("every answer was right")).sum()
    });
    assert!(seen > 0, "no reader ever saw a change");
}
