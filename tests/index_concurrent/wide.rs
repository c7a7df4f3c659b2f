//! Removals from many chains at once: no reader sees some of the chains before the removal and others after it.

use super::oracle::event::{Event, Stored};
use super::script::Script;
use kvrouted::ids::{EngineHash, GroupId, LocalHash, Seed, Tier};
use kvrouted::index::ShardLimits;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

/// Chains that one removal touches.
const CHAINS: u64 = 12;
/// Common first blocks of all chains.
const SHARED_BLOCKS: u64 = 3;
/// Blocks of one chain, including the common ones.
const CHAIN_BLOCKS: u64 = 10;
/// How often all chains are stored and removed.
const ROUNDS: usize = 60;

/// Block `at` of a chain; half of the chains share their first blocks.
fn block(chain: u64, at: u64) -> u64 {
    let shared = chain.is_multiple_of(2) && at < SHARED_BLOCKS;
    if shared { at } else { 1000 * (chain + 1) + at }
}

fn store(chain: u64) -> Event {
    let blocks = || (0..CHAIN_BLOCKS).map(move |at| block(chain, at));
    Event::Store(Stored {
        worker: 0,
        parent: None,
        hashes: blocks().map(EngineHash).collect(),
        locals: blocks().map(LocalHash).collect(),
        tier: Tier::Device,
        group: GroupId(0),
        seed: Seed(0),
    })
}

/// The last blocks of all chains, each chain's nearest the root first or last, in one removal.
fn remove(rng: &mut Xoshiro256PlusPlus) -> Event {
    let kept = rng.random_range(SHARED_BLOCKS..CHAIN_BLOCKS);
    let mut chains: Vec<u64> = (0..CHAINS).collect();
    chains.shuffle(rng);
    let backwards = rng.random_bool(0.5);
    let of_chain = |chain: u64| (kept..CHAIN_BLOCKS).map(move |at| EngineHash(block(chain, at)));
    let mut hashes: Vec<EngineHash> = chains.into_iter().flat_map(of_chain).collect();
    if backwards {
        hashes.reverse();
    }
    Event::Remove { worker: 0, tier: Tier::Device, group: GroupId(0), hashes }
}

/// Stores all chains, one event each, and then shortens them by one event; again and again.
pub(crate) fn script(limits: ShardLimits, seed: u64) -> Script {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut events = Vec::new();
    for _ in 0..ROUNDS {
        events.push(Event::BeginBatch { worker: 0 });
        events.extend((0..CHAINS).map(store));
        events.push(remove(&mut rng));
        events.push(Event::Publish);
        events.push(Event::Sweep { budget_blocks: 64 });
    }
    let queries = (0..CHAINS).map(|chain| (0..CHAIN_BLOCKS).map(|at| LocalHash(block(chain, at))).collect()).collect();
    Script::of(limits, 1, events, queries)
}
