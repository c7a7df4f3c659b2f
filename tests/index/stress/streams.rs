//! Long streams against the oracle.

use crate::oracle::checked_shard::CheckedShard;
use crate::oracle::seeds::for_seeds;
use crate::oracle::stream::{Alphabet, Rates, Shape, Stream, Style, with_windows};
use kvrouted::index::ShardLimits;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use std::time::Duration;

const TIME: Duration = Duration::from_secs(1);
const FLEET: Alphabet = Alphabet { workers: 4, hashes: 2000, locals: 3, groups: 1, seeds: 1, tiers: 1 };

/// Runs streams of `events` events and checks everything after each `every`.
fn stress(test: &'static str, style: Style, events: usize, every: usize, limits: impl Fn(u64) -> ShardLimits) {
    for_seeds(test, 2, TIME, |seed| {
        let node_blocks_max = [8, 1024, 2][seed as usize % 3];
        let limits = ShardLimits { node_blocks_max, ..limits(seed) };
        let stream = Stream::new(style, limits, seed);
        let queries = stream.queries().to_vec();
        let events = stream.events(events);
        CheckedShard::new(limits, style.of.workers, &queries).run(&events, every, &mut 0);
    });
}

/// Hardly any capacity for anything.
fn tiny(seed: u64) -> ShardLimits {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    ShardLimits {
        worker_blocks_max: rng.random_range(1..200),
        dormant_blocks_max: rng.random_range(0..10),
        aliases_max: rng.random_range(1..9),
        retired_holders_max: rng.random_range(1..4),
        ..ShardLimits::default()
    }
}

#[test]
fn tiny_capacities() {
    let of = Alphabet { groups: 2, seeds: 2, tiers: 3, ..FLEET };
    let shape = Shape::Prompts { prompts: 16, blocks_max: 64, step_blocks_max: 24, aliases: true };
    stress("index::stress::streams::tiny_capacities", Style { of, shape, rates: Rates::CLEARING }, 3000, 37, tiny);
}

#[test]
fn tiny_capacities_of_anything() {
    let of = Alphabet { workers: 4, hashes: 40, locals: 2, groups: 2, seeds: 2, tiers: 4 };
    let style = Style { of, shape: Shape::Unstructured, rates: Rates::USUAL };
    stress("index::stress::streams::tiny_capacities_of_anything", style, 4000, 23, tiny);
}

/// Workers whose engines have sliding windows: one of two groups needs this many of the last blocks.
#[test]
fn sliding_windows() {
    let of = Alphabet { groups: 2, tiers: 2, ..FLEET };
    let shape = Shape::Prompts { prompts: 12, blocks_max: 60, step_blocks_max: 24, aliases: false };
    let style = Style { of, shape, rates: Rates::REMOVING };
    for_seeds("index::stress::streams::sliding_windows", 4, TIME, |seed| {
        let node_blocks_max = [8, 1024, 2][seed as usize % 3];
        let limits = ShardLimits { node_blocks_max, ..ShardLimits::default() };
        let stream = Stream::new(style, limits, seed);
        let queries = stream.queries().to_vec();
        let window_blocks = [1, 2, 4, 9][seed as usize % 4];
        let events = with_windows(stream.events(3000), of.workers, &[1], window_blocks);
        CheckedShard::new(limits, of.workers, &queries).run(&events, 37, &mut 0);
    });
}

#[test]
fn long_streams_of_prompts() {
    let shape = Shape::Prompts { prompts: 24, blocks_max: 100, step_blocks_max: 40, aliases: false };
    let style = Style { of: FLEET, shape, rates: Rates::REMOVING };
    stress("index::stress::streams::long_streams_of_prompts", style, 4000, 61, |_| ShardLimits::default());
}

/// Prompts of several of the largest nodes.
#[test]
fn prompts_beyond_one_node() {
    let of = Alphabet { workers: 3, hashes: 100_000, locals: 1 << 40, tiers: 2, ..FLEET };
    let shape = Shape::Prompts { prompts: 4, blocks_max: 2600, step_blocks_max: 2600, aliases: false };
    let style = Style { of, shape, rates: Rates::REMOVING };
    stress("index::stress::streams::prompts_beyond_one_node", style, 150, 15, |_| ShardLimits::default());
}

/// Block by block up to more than the largest node, as decoding does.
#[test]
fn growth_beyond_one_node() {
    let of = Alphabet { workers: 2, hashes: 100_000, locals: 1 << 40, ..FLEET };
    let shape = Shape::Prompts { prompts: 1, blocks_max: 1400, step_blocks_max: 1, aliases: false };
    let rates = Rates { store: 97, remove: 1, clear: 0, batch: 0, replace: 0, sweep: 1, publish: 1 };
    stress("index::stress::streams::growth_beyond_one_node", Style { of, shape, rates }, 3000, 150, |_| {
        ShardLimits::default()
    });
}
