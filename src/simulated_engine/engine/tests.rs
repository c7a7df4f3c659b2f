//! One engine, step by step: batches, caches, preemption, fetches.

use std::collections::HashSet;

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::*;
use crate::engine_law::{EngineLaw, EnginePreset};
use crate::simulated_engine::TierSpec;

/// 1 s a step with new tokens, 10 ms a new token; 0.5 s a step without.
pub(super) fn spec(kv_tokens: u64, step_tokens_max: u32) -> EngineSpec {
    let law = EngineLaw::of([1.0, 0.01, 0.0], [0.5, 0.0, 0.0]);
    let preset = EnginePreset { name: "test", law, kv_tokens, kv_token_bytes: 1000 };
    EngineSpec { step_tokens_max, sequences_max: 8, ..EngineSpec::of(&preset, 4) }
}

/// A request whose first `shared` blocks are those of content 7, and the others its own.
pub(super) fn request(id: u32, shared: u64, prompt_tokens: u32, output_tokens: u32) -> EngineRequest {
    let count = u64::from((prompt_tokens + output_tokens - 1) / 4);
    let own = |at: u64| if at < shared { 7_000 + at } else { 1_000_000 * u64::from(id + 1) + at };
    let blocks = (0..count).map(|at| Block { local: own(at), chain: own(at) }).collect();
    EngineRequest { id: RequestId(id), blocks, prompt_tokens, output_tokens, part: Part::Whole }
}

/// An engine with its own clock, and what it said so far.
pub(super) struct Bench {
    pub(super) engine: Engine,
    pub(super) now_s: f64,
    pub(super) told: Vec<(f64, Progress)>,
}

impl Bench {
    pub(super) fn new(spec: EngineSpec) -> Self {
        Self { engine: Engine::new(spec), now_s: 0.0, told: Vec::new() }
    }

    /// Runs one step. `false`: there is nothing to do.
    pub(super) fn step(&mut self) -> bool {
        let mut progress = Vec::new();
        let now_ns = (self.now_s * 1e9).round() as u64;
        let step_s = self.engine.begin_step(now_ns, &mut progress);
        match (step_s, self.engine.next_fetched_ns()) {
            (Some(step_s), _) => {
                self.now_s += step_s;
                self.engine.end_step(&mut progress);
            }
            (None, Some(at_ns)) => self.now_s = at_ns as f64 * 1e-9,
            (None, None) => return false,
        }
        self.told.extend(progress.into_iter().map(|told| (self.now_s, told)));
        true
    }

    pub(super) fn run(&mut self) -> &[(f64, Progress)] {
        while self.step() {}
        &self.told
    }

    pub(super) fn at(&self, what: Progress) -> Option<f64> {
        self.told.iter().find(|(_, told)| *told == what).map(|(at_s, _)| *at_s)
    }
}

#[test]
fn a_prompt_is_computed_in_chunks_and_each_later_token_takes_a_step() {
    let mut bench = Bench::new(spec(1000, 100));
    bench.engine.push(request(0, 0, 250, 4));
    bench.run();
    // Steps of 100, 100 and 50 tokens, then three of one decoding request.
    assert_eq!(bench.at(Progress::FirstToken(RequestId(0))), Some(3.0 + 2.5));
    assert_eq!(bench.at(Progress::Finished(RequestId(0))), Some(5.5 + 3.0 * 0.5));
}

#[test]
fn a_prefix_that_was_computed_is_found_but_for_the_last_block() {
    let mut bench = Bench::new(spec(1000, 100));
    bench.engine.push(request(0, 20, 80, 1));
    bench.run();
    bench.engine.push(request(1, 20, 80, 1));
    bench.engine.push(request(2, 10, 80, 1));
    bench.run();
    let cached = |id| {
        bench.told.iter().find_map(|(_, told)| match told {
            Progress::Scheduled { id: of, cached_tokens } if of.0 == id => Some(*cached_tokens),
            _ => None,
        })
    };
    assert_eq!([0, 1, 2].map(cached), [Some(0), Some(76), Some(40)]);
}

#[test]
fn two_prompts_in_one_step_do_not_find_each_other() {
    let mut bench = Bench::new(spec(1000, 200));
    bench.engine.push(request(0, 20, 80, 1));
    bench.engine.push(request(1, 20, 80, 1));
    bench.run();
    assert!(bench.told.contains(&(2.6, Progress::FirstToken(RequestId(1)))), "{:?}", bench.told);
}

#[test]
fn decoding_requests_are_in_every_step_of_a_long_prompt() {
    let mut bench = Bench::new(spec(1000, 101));
    bench.engine.push(request(0, 0, 40, 3));
    assert!(bench.step());
    bench.engine.push(request(1, 0, 200, 1));
    bench.run();
    // The first request needs two steps more, which also compute 100 tokens each.
    assert_eq!(bench.at(Progress::Finished(RequestId(0))), Some(1.4 + 2.0 + 2.0));
    assert_eq!(bench.at(Progress::FirstToken(RequestId(1))), Some(5.4));
}

#[test]
fn without_room_the_youngest_is_preempted_and_computed_again() {
    let mut bench = Bench::new(spec(64, 100));
    bench.engine.push(request(0, 0, 24, 30));
    bench.engine.push(request(1, 0, 24, 30));
    bench.run();
    let preempted: Vec<_> = bench.told.iter().filter(|(_, told)| matches!(told, Progress::Preempted(_))).collect();
    assert!(!preempted.is_empty() && preempted.iter().all(|(_, told)| *told == Progress::Preempted(RequestId(1))));
    let first_tokens = bench.told.iter().filter(|(_, told)| matches!(told, Progress::FirstToken(_))).count();
    assert_eq!(first_tokens, 2, "the engine reports a first token once");
    assert!(bench.at(Progress::Finished(RequestId(0))) < bench.at(Progress::Finished(RequestId(1))));
    assert_eq!(bench.engine.counts(), (0, 0));
    assert_eq!(bench.engine.pool.used_blocks(), 0);
}

#[test]
fn an_evicted_prefix_is_fetched_from_the_host() {
    let tier = TierSpec { tier: Tier::Host, tokens: 400, token_s: 0.001 };
    let mut bench = Bench::new(EngineSpec { tiers: vec![tier], ..spec(100, 100) });
    bench.engine.push(request(0, 20, 80, 1));
    bench.engine.push(request(1, 0, 80, 1));
    bench.run();
    let before_s = bench.now_s;
    bench.engine.push(request(2, 20, 80, 1));
    bench.run();
    assert_eq!(bench.told.last().map(|(_, told)| *told), Some(Progress::Finished(RequestId(2))));
    let took_s = bench.now_s - before_s;
    assert!((1.04..1.2).contains(&took_s), "four tokens and a fetch of at most 76: {took_s}");
}

#[test]
fn a_request_beyond_the_memory_does_not_fit() {
    let engine = Engine::new(spec(64, 100));
    assert!(engine.can_hold(60, 4) && !engine.can_hold(60, 5) && !engine.can_hold(u32::MAX, u32::MAX));
}

/// Random requests on a small memory: all end, no block is lost, and the events tell what is cached.
#[test]
fn no_block_is_lost_and_events_tell_what_is_cached() {
    for seed in 0..40 {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut bench = Bench::new(spec(rng.random_range(120..400), rng.random_range(9..90)));
        let mut cached: HashSet<u64> = HashSet::new();
        let mut events = Vec::new();
        let count = 60;
        for id in 0..count {
            let asked = request(id, rng.random_range(0..12), rng.random_range(1..70), rng.random_range(1..30));
            bench.engine.push(asked);
            for _ in 0..rng.random_range(0..12) {
                bench.step();
            }
        }
        bench.run();
        bench.engine.take_events(&mut events);
        for event in events {
            match event {
                KvEvent::Stored { blocks, from, to, .. } => {
                    let stored = &blocks[from as usize..to as usize];
                    assert!(stored.iter().all(|block| cached.insert(block.chain)), "seed {seed}: stored twice");
                }
                KvEvent::Removed { chains, .. } => {
                    assert!(chains.iter().all(|chain| cached.remove(chain)), "seed {seed}: removed twice");
                }
                KvEvent::Copied { .. } => panic!("there is no lower tier"),
            }
        }
        let ended = bench.told.iter().filter(|(_, told)| matches!(told, Progress::Finished(_))).count();
        assert_eq!(ended, count as usize, "seed {seed}");
        assert_eq!(bench.engine.pool.used_blocks(), 0, "seed {seed}");
        assert_eq!(cached, bench.engine.pool.cached().collect(), "seed {seed}");
        assert_eq!((bench.engine.decoding_tokens, bench.engine.growth.iter().sum::<u32>()), (0, 0), "seed {seed}");
    }
}
