//! `soak`: churn at a fixed live size, to see whether memory stays where it is and answers stay right.

use std::hint::black_box;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvrouted::ids::{LocalHash, Tier};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use serde::Serialize;

use crate::args::{EngineHashing, SoakArgs};
use crate::failure::Failure;
use crate::generator;
use crate::lru::Lru;
use crate::measure::{Lookups, Queries};
use crate::memory::rss_bytes;
use crate::nodes::{NodeId, Nodes};
use crate::oracle::Oracle;
use crate::ours::{Feed, OurReader, Ours};
use crate::script::{Action, Script};

const BLOCK_SIZE: u32 = 16;
/// Distinct prompts for each 1000 blocks of a worker's capacity.
const PROMPTS_PER_1000: usize = 120;
/// Requests between two looks at the clock, the answers' and the sweeper's turn.
const ROUND_REQUESTS: usize = 32;
/// Rounds between two checks of answers.
const CHECK_ROUNDS: usize = 16;
/// Prompts in a check.
const CHECK_QUERIES: usize = 20;
/// Share of evictions that take any block in place of the one that was used last.
const RANDOM_EVICTIONS: f64 = 0.25;
/// Requests, for each worker, between two losses of a whole worker.
const REQUESTS_PER_LOSS: usize = 20;
/// Share of the capacity that all workers together have to hold for the churn to begin.
const WARM: f64 = 0.9;
const SAMPLE: Duration = Duration::from_secs(1);
const LINE: Duration = Duration::from_secs(60);
/// What the reader beside the writer does at a stretch, and its pause.
const READER_QUERIES: usize = 64;
const READER_PAUSE: Duration = Duration::from_millis(1);

/// How a soak ended.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Soak {
    /// Resident bytes when the fleet was full for the first time.
    pub(crate) rss_first: u64,
    /// Resident bytes at the end.
    pub(crate) rss_last: u64,
    /// The mean of the last third of the run against that of the middle third.
    pub(crate) growth_percent: f64,
    /// Answers that differ from the plain model's.
    pub(crate) wrong: u64,
    /// Answers looked at.
    pub(crate) answers: u64,
    /// What the index says it uses at the end, if it does.
    pub(crate) accounted_last: Option<u64>,
    /// Blocks stored and removed.
    pub(crate) blocks: u64,
    /// Blocks held at the end.
    pub(crate) memberships: usize,
    /// Lookups that gave up on finding the index unchanged.
    pub(crate) contended: u64,
}

/// The index, the model beside it, and what is in each cache.
struct World<'a> {
    nodes: &'a Nodes,
    paths: Vec<&'a [NodeId]>,
    index: Ours,
    reader: OurReader,
    oracle: Oracle,
    caches: Vec<Lru>,
    capacity: usize,
    chance: Xoshiro256PlusPlus,
    blocks: u64,
    wrong: u64,
    answers: u64,
}

/// Runs the soak and prints a line each minute.
///
/// # Errors
/// The system does not say how much memory is used, or the index has no room.
pub(crate) fn run(args: &SoakArgs, out: &mut impl Write) -> Result<Soak, Failure> {
    let mut nodes = Nodes::new(EngineHashing::PerWorker);
    let (mut paths, mut queries) = (Queries::default(), Queries::default());
    let longest = args.capacity as usize / 2;
    for request in generator::generate(args.capacity as usize * PROMPTS_PER_1000 / 1000, args.seed) {
        let mut path = Vec::new();
        nodes.prompt(&request, BLOCK_SIZE, 0, &mut path);
        path.truncate(longest);
        let locals: Vec<LocalHash> = path.iter().map(|node| LocalHash(nodes.local(*node))).collect();
        paths.push(&path);
        queries.push(&locals);
    }
    let mut world = World::new(args, &nodes, &paths)?;
    let reader = world.index.reader();
    let stop = AtomicBool::new(false);
    std::thread::scope(|threads| {
        let beside = threads.spawn(|| read(reader, &queries, &stop));
        let churned = world.churn(args, out);
        // Relaxed: pairs with the load in `read`; nothing but the flag is passed on.
        stop.store(true, Ordering::Relaxed);
        let contended = beside.join().expect("the reader does not panic");
        churned.map(|soak| Soak { contended: soak.contended + contended, ..soak })
    })
}

/// Looks prompts up until told to stop; returns how many lookups gave up.
fn read(mut reader: OurReader, queries: &Queries<LocalHash>, stop: &AtomicBool) -> u64 {
    // Relaxed: pairs with the store in `run`.
    while !stop.load(Ordering::Relaxed) {
        for (at, query) in queries.iter().enumerate() {
            let answer = reader.look(query);
            black_box(reader.sum(answer));
            if at % READER_QUERIES == 0 {
                std::thread::sleep(READER_PAUSE);
                // Relaxed: pairs with the store in `run`.
                if stop.load(Ordering::Relaxed) {
                    break;
                }
            }
        }
    }
    reader.contended
}

impl<'a> World<'a> {
    fn new(args: &SoakArgs, nodes: &'a Nodes, paths: &'a Queries<NodeId>) -> Result<Self, Failure> {
        let index = Ours::new(args.workers, 1)?;
        let reader = index.reader();
        Ok(Self {
            nodes,
            paths: paths.iter().collect(),
            index,
            reader,
            oracle: Oracle::new(args.workers),
            caches: (0..args.workers).map(|_| Lru::default()).collect(),
            capacity: args.capacity as usize,
            chance: Xoshiro256PlusPlus::seed_from_u64(args.seed),
            blocks: 0,
            wrong: 0,
            answers: 0,
        })
    }

    fn churn(&mut self, args: &SoakArgs, out: &mut impl Write) -> Result<Soak, Failure> {
        let full = (WARM * (self.capacity * self.caches.len()) as f64) as usize;
        while self.held() < full {
            self.requests();
        }
        let (start, whole) = (Instant::now(), Duration::from_secs_f64(args.minutes * 60.0));
        let mut samples = vec![rss_bytes()?];
        let mut next_line = Duration::ZERO;
        let losses_after = REQUESTS_PER_LOSS * self.caches.len() / ROUND_REQUESTS;
        for round in 1.. {
            self.requests();
            self.index.sweep();
            if round % losses_after.max(1) == 0 {
                self.lose_a_worker()?;
            }
            if round % CHECK_ROUNDS == 0 {
                self.check();
            }
            let elapsed = start.elapsed();
            if elapsed >= SAMPLE * samples.len() as u32 {
                samples.push(rss_bytes()?);
            }
            if elapsed >= next_line {
                self.say(out, elapsed)?;
                next_line += LINE;
            }
            if elapsed >= whole {
                break;
            }
        }
        self.check();
        self.say(out, start.elapsed())?;
        Ok(self.conclude(&samples, rss_bytes()?))
    }

    fn conclude(&self, samples: &[u64], rss_last: u64) -> Soak {
        Soak {
            rss_first: samples[0],
            rss_last,
            growth_percent: growth_percent(samples),
            wrong: self.wrong,
            answers: self.answers,
            accounted_last: self.index.accounted_bytes(),
            blocks: self.blocks,
            memberships: self.oracle.memberships(),
            contended: self.reader.contended,
        }
    }

    fn held(&self) -> usize {
        self.caches.iter().map(Lru::len).sum()
    }

    /// A round of requests, each at a worker chosen by chance.
    fn requests(&mut self) {
        let mut script = Script::default();
        for _ in 0..ROUND_REQUESTS {
            let worker = self.chance.random_range(0..self.caches.len());
            let path = self.paths[self.chance.random_range(0..self.paths.len())];
            self.compute(worker, path, &mut script);
            self.evict(worker, &mut script);
            script.end_batch();
        }
        let feed = Feed::new(self.nodes, &script);
        self.index.apply(&feed, 0..feed.batches());
        self.oracle.apply(&script, 0..script.batches());
        self.blocks += script.blocks() as u64;
    }

    /// Stores the blocks of a prompt that are not held: after evictions in any order that may be several runs.
    fn compute(&mut self, worker: usize, path: &[NodeId], script: &mut Script) {
        let cache = &mut self.caches[worker];
        for run in path.chunk_by(|before, after| cache.contains(*before) == cache.contains(*after)) {
            if !cache.contains(run[0]) {
                script.push(worker as u16, Action::Store, Tier::Device, run);
            }
        }
        path.iter().rev().for_each(|node| cache.touch(*node));
    }

    /// Removes blocks beyond the capacity: the oldest, or now and then whichever.
    fn evict(&mut self, worker: usize, script: &mut Script) {
        let cache = &mut self.caches[worker];
        let by_chance = self.chance.random_bool(RANDOM_EVICTIONS);
        let mut removed = Vec::new();
        while cache.len() > self.capacity {
            if by_chance {
                let node = cache.at(self.chance.random_range(0..cache.len()));
                cache.remove(node);
                removed.push(node);
            } else {
                removed.extend(cache.pop_oldest());
            }
        }
        script.push(worker as u16, Action::Remove, Tier::Device, &removed);
    }

    /// Clears a worker, or removes it and adds it again.
    fn lose_a_worker(&mut self) -> Result<(), Failure> {
        let worker = self.chance.random_range(0..self.caches.len());
        if self.chance.random_bool(0.5) {
            self.index.clear(worker as u16);
        } else {
            self.index.replace_worker(worker as u16)?;
            self.reader.follow(&self.index);
        }
        self.caches[worker] = Lru::default();
        self.oracle.clear(worker as u16);
        Ok(())
    }

    /// Compares some answers with the model's.
    fn check(&mut self) {
        for _ in 0..CHECK_QUERIES {
            let path = self.paths[self.chance.random_range(0..self.paths.len())];
            let locals: Vec<LocalHash> = path.iter().map(|node| LocalHash(self.nodes.local(*node))).collect();
            self.reader.look(&locals);
            for worker in 0..self.oracle.workers() {
                self.answers += 1;
                self.wrong += u64::from(self.reader.of(worker) != self.oracle.depth(worker, path));
            }
        }
    }

    fn say(&self, out: &mut impl Write, elapsed: Duration) -> Result<(), Failure> {
        let accounted = self.index.accounted_bytes().map_or("-".to_owned(), |bytes| mebibytes(bytes).to_string());
        writeln!(
            out,
            "{:5.1} min  rss {:7.1} MiB  accounted {accounted:>7} MiB  held {:9}  blocks {:12}  wrong {} of {}",
            elapsed.as_secs_f64() / 60.0,
            mebibytes(rss_bytes()?),
            self.held(),
            self.blocks,
            self.wrong,
            self.answers,
        )
        .and_then(|()| out.flush())
        .map_err(Failure::system("print"))
    }
}

fn mebibytes(bytes: u64) -> f64 {
    (bytes as f64 / f64::from(1 << 20) * 10.0).round() / 10.0
}

/// The mean of the last third of the samples against that of the middle third.
fn growth_percent(samples: &[u64]) -> f64 {
    let third = samples.len() / 3;
    if third == 0 {
        return 0.0;
    }
    let mean = |part: &[u64]| part.iter().map(|bytes| *bytes as f64).sum::<f64>() / part.len() as f64;
    let last = mean(&samples[samples.len() - third..]);
    let middle = mean(&samples[samples.len() - 2 * third..samples.len() - third]);
    (last / middle - 1.0) * 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flat_is_the_last_third_against_the_middle() {
        assert_eq!(growth_percent(&[1, 2]), 0.0);
        assert_eq!(growth_percent(&[1, 1, 100, 100, 100, 100]), 0.0);
        assert!((growth_percent(&[0, 0, 0, 10, 10, 10, 11, 11, 11]) - 10.0).abs() < 1e-9);
    }

    #[test]
    fn a_short_soak_is_right() {
        let args = SoakArgs { minutes: 0.01, workers: 3, capacity: 2048, seed: 5 };
        let mut lines = Vec::new();
        let soak = run(&args, &mut lines).expect("it runs");
        assert!(soak.wrong == 0 && soak.answers > 0, "{soak:?}");
        assert!(soak.memberships <= 3 * 2048 && soak.blocks > 0, "{soak:?}");
        assert!(String::from_utf8_lossy(&lines).contains("wrong 0"));
    }
}
