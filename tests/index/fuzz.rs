//! The index against the oracle over many seeded streams, each under other limits. A failing stream is reduced to the
//! shortest list of events that still fails, printed as calls that can be pasted into
//! [`past_failures_stay_fixed`].
//!
//! `KVROUTED_SEEDS` is the number of seeds of each test (60 or 300), `KVROUTED_SEED` runs a single one, and `KVROUTED_TRACE`
//! prints each before it runs, in case the process does not survive it.

use crate::oracle::checked_shard::CheckedShard;
use crate::oracle::event::{Event, add_worker, begin_batch, clear, publish, remove, remove_worker, store, sweep};
use crate::oracle::minimise::{failure, shortest};
use crate::oracle::seeds::{Watch, command, seeds};
use crate::oracle::stream::{Alphabet, Rates, Shape, Stream, Style, short_queries};
use kvrouted::ids::Tier;
use kvrouted::index::ShardLimits;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

/// Seeds of each test, and of those with long prompts.
const SEEDS: u64 = 300;
const SEEDS_LONG: u64 = 60;
/// Events of most streams, and of every tenth.
const EVENTS_MAX: usize = 240;
const MANY_EVENTS_MAX: usize = 2400;

/// One worker, one tier, very few hashes.
const CROWDED: Alphabet = Alphabet { workers: 1, hashes: 5, locals: 2, groups: 1, seeds: 1, tiers: 1 };
/// All events of the contract, in moderation.
const MIXED: Alphabet = Alphabet { workers: 3, hashes: 8, locals: 2, groups: 3, seeds: 2, tiers: 4 };
/// One content for every block.
const ALIASED: Alphabet = Alphabet { workers: 2, hashes: 12, locals: 1, groups: 1, seeds: 1, tiers: 2 };
/// Two tiers and two groups, few hashes.
const GROUPED: Alphabet = Alphabet { workers: 2, hashes: 6, locals: 2, groups: 2, seeds: 1, tiers: 2 };
/// Prompts of several workers, in the device tier alone.
const FLEET: Alphabet = Alphabet { workers: 4, hashes: 400, locals: 3, groups: 1, seeds: 1, tiers: 1 };

/// The limits of a seed: usual ones, and some under which rare cases happen all the time.
fn limits(rng: &mut Xoshiro256PlusPlus, workers: usize) -> ShardLimits {
    let mut limits = ShardLimits::default();
    if rng.random_bool(0.1) {
        limits.worker_blocks_max = rng.random_range(1..20);
    }
    if rng.random_bool(0.2) {
        limits.dormant_blocks_max = rng.random_range(0..4);
    }
    if rng.random_bool(0.2) {
        limits.aliases_max = rng.random_range(1..4);
    }
    if rng.random_bool(0.3) {
        limits.workers_max = workers;
    }
    if rng.random_bool(0.3) {
        limits.retired_holders_max = 1;
    }
    limits.node_blocks_max = [2, 3, 8, 1024][rng.random_range(0..4)];
    limits
}

fn fuzz(test: &str, style: Style) {
    fuzz_seeds(test, style, SEEDS);
}

fn fuzz_seeds(test: &str, style: Style, count: u64) {
    for seed in seeds(count) {
        let watch = Watch::new(test, seed);
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed ^ 0x5eed);
        let limits = limits(&mut rng, style.of.workers);
        let stream = Stream::new(style, limits, seed);
        let (most, seldom) = if seed % 10 == 0 { (MANY_EVENTS_MAX, 80) } else { (EVENTS_MAX, 8) };
        let (queries, every) = (stream.queries().to_vec(), rng.random_range(1..seldom));
        let events = stream.events(rng.random_range(8..most));
        let fails = |events: &[Event], every| {
            let checked = || CheckedShard::new(limits, style.of.workers, &queries);
            failure(|reached| drop(checked().run(events, every, reached)))
        };
        if let Some(first) = fails(&events, every) {
            drop(watch);
            let found = shortest(&events, |events| fails(events, 1)).unwrap_or((events, first));
            let lines: String = found.0.iter().map(|event| format!("    {event}\n")).collect();
            let command = command(test, seed);
            panic!("{}\n{limits:?}\nthe shortest list of events:\n{lines}seed {seed}; {command}", found.1.message);
        }
    }
}

const fn unstructured(of: Alphabet, rates: Rates) -> Style {
    Style { of, shape: Shape::Unstructured, rates }
}

#[test]
fn crowded_streams() {
    fuzz("index::fuzz::crowded_streams", unstructured(CROWDED, Rates::USUAL));
}

#[test]
fn mixed_streams() {
    fuzz("index::fuzz::mixed_streams", unstructured(MIXED, Rates::USUAL));
}

#[test]
fn aliased_streams() {
    fuzz("index::fuzz::aliased_streams", unstructured(ALIASED, Rates::REMOVING));
}

#[test]
fn grouped_streams() {
    fuzz("index::fuzz::grouped_streams", unstructured(GROUPED, Rates::CLEARING));
}

#[test]
fn prompts_that_split_and_join() {
    let shape = Shape::Prompts { prompts: 8, blocks_max: 40, step_blocks_max: 16, aliases: false };
    fuzz("index::fuzz::prompts_that_split_and_join", Style { of: FLEET, shape, rates: Rates::REMOVING });
}

#[test]
fn prompts_that_grow_block_by_block() {
    let shape = Shape::Prompts { prompts: 4, blocks_max: 40, step_blocks_max: 1, aliases: false };
    fuzz("index::fuzz::prompts_that_grow_block_by_block", Style { of: FLEET, shape, rates: Rates::USUAL });
}

/// Nodes that are long enough to be compared by fingerprints.
#[test]
fn long_prompts_that_split_and_join() {
    let shape = Shape::Prompts { prompts: 5, blocks_max: 300, step_blocks_max: 120, aliases: false };
    let style = Style { of: FLEET, shape, rates: Rates::REMOVING };
    fuzz_seeds("index::fuzz::long_prompts_that_split_and_join", style, SEEDS_LONG);
}

#[test]
fn long_prompts_that_grow() {
    let shape = Shape::Prompts { prompts: 3, blocks_max: 200, step_blocks_max: 12, aliases: false };
    let style = Style { of: FLEET, shape, rates: Rates::USUAL };
    fuzz_seeds("index::fuzz::long_prompts_that_grow", style, SEEDS_LONG);
}

#[test]
fn prompts_of_several_names_and_tiers() {
    let of = Alphabet { workers: 3, groups: 2, seeds: 2, tiers: 3, ..FLEET };
    let shape = Shape::Prompts { prompts: 6, blocks_max: 24, step_blocks_max: 12, aliases: true };
    fuzz("index::fuzz::prompts_of_several_names_and_tiers", Style { of, shape, rates: Rates::CLEARING });
}

/// Short lists of events at which an index can go wrong.
#[test]
fn past_failures_stay_fixed() {
    let cases = [
        // Another name takes a place, and the first takes it back.
        vec![
            store(0, None, &[(1, 0), (2, 1), (3, 0)], Tier::Device, 0, 0),
            remove(0, Tier::Device, 0, &[2]),
            store(0, Some(1), &[(4, 1), (5, 0)], Tier::Device, 0, 0),
            store(0, Some(1), &[(2, 1)], Tier::Device, 0, 0),
            remove(0, Tier::Device, 0, &[4]),
        ],
        // A clear of one tier under blocks that another holds, then a new worker in the slot of the one before.
        vec![
            store(0, None, &[(1, 0), (2, 0)], Tier::Device, 0, 0),
            store(0, Some(1), &[(2, 0), (3, 0)], Tier::Host, 0, 0),
            clear(0, Some(Tier::Device)),
            begin_batch(0),
            store(0, None, &[(1, 0)], Tier::Device, 0, 0),
            sweep(1),
            remove_worker(0),
            add_worker(0),
            store(0, None, &[(1, 0)], Tier::Host, 0, 0),
            publish(),
        ],
        // Blocks that are each other's parents, and stay dormant for ever.
        vec![
            store(0, Some(2), &[(1, 0)], Tier::Device, 0, 0),
            store(0, Some(1), &[(2, 0)], Tier::Device, 0, 0),
            remove(0, Tier::Device, 0, &[1]),
            store(0, None, &[(1, 0)], Tier::Device, 0, 0),
        ],
    ];
    for node_blocks_max in [2, 1024] {
        let limits = ShardLimits { node_blocks_max, ..ShardLimits::default() };
        let queries: Vec<_> = short_queries().collect();
        for case in &cases {
            CheckedShard::new(limits, 1, &queries).run(case, 1, &mut 0);
        }
    }
}
