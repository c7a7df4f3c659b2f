//! The index against the oracle: random streams over small alphabets, so that hashes collide, middles are removed,
//! blocks are stored twice, parents are unknown, contents have several names and slots are reused.
//!
//! A failing case is written to `tests/index/properties.regressions` and tried first from then on:
//! `cargo test --test index properties` replays it.

use crate::oracle::Oracle;
use crate::oracle::checked_shard::CheckedShard;
use crate::oracle::event::{Event, Stored};
use crate::oracle::stream::{Alphabet, short_queries};
use kvrouted::ids::{EngineHash, GroupId, LocalHash, Seed, Tier};
use kvrouted::index::ShardLimits;
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

/// An action on a worker, before it is known what the worker holds.
#[derive(Clone, Debug)]
enum Action {
    Store(Stored),
    /// An earlier store of any worker, repeated as it was or in another tier or group.
    Again {
        pick: usize,
        place: Option<(Tier, u32)>,
    },
    /// Blocks below one that the worker has.
    Under {
        pick: usize,
        blocks: Vec<(u64, u64)>,
    },
    /// References that the worker has.
    Remove {
        picks: Vec<usize>,
    },
    RemoveAny {
        tier: Tier,
        group: u32,
        hashes: Vec<u64>,
    },
    Clear(Option<Tier>),
    /// A group of the device tier serves a sliding window.
    Window {
        group: u32,
        window_blocks: u32,
    },
    Batch,
    Replace,
    Sweep(usize),
    Publish,
    /// Compares everything.
    Check,
}

fn tier(of: Alphabet) -> impl Strategy<Value = Tier> {
    (0..of.tiers).prop_map(|tier| Tier::ALL[tier])
}

fn blocks(of: Alphabet) -> impl Strategy<Value = Vec<(u64, u64)>> {
    prop::collection::vec((0..of.hashes, 0..of.locals), 1..4)
}

fn action(of: Alphabet) -> impl Strategy<Value = Action> {
    let parent = prop_oneof![2 => Just(None), 3 => (0..of.hashes).prop_map(Some)];
    let stored = (parent, blocks(of), tier(of), 0..of.groups, 0..of.seeds)
        .prop_map(|(parent, blocks, tier, group, seed)| stored(parent.map(EngineHash), &blocks, tier, group, seed));
    prop_oneof![
        20 => stored.prop_map(Action::Store),
        12 => (any::<usize>(), prop::option::of((tier(of), 0..of.groups)))
            .prop_map(|(pick, place)| Action::Again { pick, place }),
        14 => (any::<usize>(), blocks(of)).prop_map(|(pick, blocks)| Action::Under { pick, blocks }),
        18 => prop::collection::vec(any::<usize>(), 1..3).prop_map(|picks| Action::Remove { picks }),
        3 => (tier(of), 0..of.groups, prop::collection::vec(0..of.hashes, 0..3))
            .prop_map(|(tier, group, hashes)| Action::RemoveAny { tier, group, hashes }),
        2 => prop::option::weighted(0.7, tier(of)).prop_map(Action::Clear),
        5 => Just(Action::Batch),
        1 => Just(Action::Replace),
        3 => (1_usize..6).prop_map(Action::Sweep),
        2 => Just(Action::Publish),
        12 => Just(Action::Check),
    ]
}

/// For groups that serve sliding windows: all stores are of device and host, and most blocks are stored in several
/// groups.
fn windowed_action(of: Alphabet) -> impl Strategy<Value = Action> {
    let window = (1..of.groups, 0_u32..4);
    let everywhere = (any::<usize>(), 0..of.groups).prop_map(|(pick, group)| (pick, Some((Tier::Device, group))));
    prop_oneof![
        2 => window.prop_map(|(group, window_blocks)| Action::Window { group, window_blocks }),
        8 => everywhere.prop_map(|(pick, place)| Action::Again { pick, place }),
        14 => action(of),
    ]
}

/// Limits under which nodes are split all the time, now and then, or never.
fn limits() -> impl Strategy<Value = ShardLimits> {
    (prop::sample::select(vec![2, 8, 1024]), any::<bool>()).prop_map(|(node_blocks_max, counts_copies)| ShardLimits {
        node_blocks_max,
        counts_copies,
        ..ShardLimits::default()
    })
}

/// A store that has no worker yet.
fn stored(parent: Option<EngineHash>, blocks: &[(u64, u64)], tier: Tier, group: u32, seed: u64) -> Stored {
    let hashes = blocks.iter().map(|(hash, _)| EngineHash(*hash)).collect();
    let locals = blocks.iter().map(|(_, local)| LocalHash(*local)).collect();
    Stored { worker: 0, parent, hashes, locals, tier, group: GroupId(group), seed: Seed(seed) }
}

fn nth(oracle: &Oracle, pick: usize) -> Option<(EngineHash, Tier, GroupId)> {
    oracle.counts.keys().nth(pick.checked_rem(oracle.counts.len())?).copied()
}

/// The event of an action, given what the worker holds and what was stored before.
fn event(action: &Action, worker: usize, oracle: &Oracle, past: &[Stored]) -> Option<Event> {
    Some(match action {
        Action::Store(stored) => Event::Store(Stored { worker, ..stored.clone() }),
        Action::Again { pick, place } => {
            let stored = &past[pick.checked_rem(past.len())?];
            let (tier, group) = place.map_or((stored.tier, stored.group), |(tier, group)| (tier, GroupId(group)));
            Event::Store(Stored { worker, tier, group, ..stored.clone() })
        }
        Action::Under { pick, blocks } => {
            let (hash, tier, group) = nth(oracle, *pick)?;
            let seed = oracle.bindings[&hash].seed.0;
            Event::Store(Stored { worker, ..stored(Some(hash), blocks, tier, group.0, seed) })
        }
        Action::Remove { picks } => {
            let (first, tier, group) = nth(oracle, *picks.first()?)?;
            let others = picks[1..].iter().filter_map(|pick| nth(oracle, *pick)).map(|(hash, _, _)| hash);
            Event::Remove { worker, tier, group, hashes: [first].into_iter().chain(others).collect() }
        }
        Action::RemoveAny { tier, group, hashes } => {
            let hashes = hashes.iter().copied().map(EngineHash).collect();
            Event::Remove { worker, tier: *tier, group: GroupId(*group), hashes }
        }
        Action::Clear(tier) => Event::Clear { worker, tier: *tier },
        Action::Window { group, window_blocks } => {
            Event::Window { worker, group: GroupId(*group), window_blocks: *window_blocks }
        }
        Action::Batch => Event::BeginBatch { worker },
        Action::Replace => Event::RemoveWorker { worker },
        Action::Sweep(budget_blocks) => Event::Sweep { budget_blocks: *budget_blocks },
        Action::Publish => Event::Publish,
        Action::Check => return None,
    })
}

fn run(limits: ShardLimits, workers: usize, actions: &[(usize, Action)]) {
    let queries: Vec<_> = short_queries().collect();
    let mut checked = CheckedShard::new(limits, workers, &queries);
    let mut past = Vec::new();
    for (worker, action) in actions {
        let worker = worker % workers;
        let event = event(action, worker, checked.worker(worker).1, &past);
        if let Some(event) = event {
            checked.apply(&event);
            if let Event::Store(stored) = event {
                past.push(stored);
            }
        }
        match action {
            Action::Replace => checked.apply(&Event::AddWorker { worker }),
            Action::Check => checked.check(),
            _ => {}
        }
    }
    checked.run(&[], 1, &mut 0);
}

/// 512 cases of each property, or as many as `PROPTEST_CASES` says.
fn config() -> ProptestConfig {
    let default = ProptestConfig::default();
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { default.cases } else { 512 };
    ProptestConfig {
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct("tests/index/properties.regressions"))),
        cases,
        ..default
    }
}

fn stream(of: Alphabet, length: usize) -> impl Strategy<Value = Vec<(usize, Action)>> {
    prop::collection::vec((0..of.workers, action(of)), 1..length)
}

/// One worker, one tier, very few hashes, so that events often meet the same blocks.
const CROWDED: Alphabet = Alphabet { workers: 1, hashes: 5, locals: 2, groups: 1, seeds: 1, tiers: 1 };
/// All events of the contract, in moderation.
const MIXED: Alphabet = Alphabet { workers: 3, hashes: 8, locals: 2, groups: 3, seeds: 2, tiers: 4 };
/// One content for every block, and a group that may be a window.
const ALIASED_WINDOWS: Alphabet = Alphabet { groups: 2, hashes: 8, ..ALIASED };
/// One content for every block: only aliases.
const ALIASED: Alphabet = Alphabet { workers: 2, hashes: 12, locals: 1, groups: 1, seeds: 1, tiers: 2 };
/// Three groups, of which two may be windows; chains long enough for a window to end within them.
const WINDOWED: Alphabet = Alphabet { workers: 2, hashes: 8, locals: 2, groups: 3, seeds: 1, tiers: 2 };
/// Two tiers and two groups, few hashes.
const GROUPED: Alphabet = Alphabet { workers: 2, hashes: 6, locals: 2, groups: 2, seeds: 1, tiers: 2 };

proptest! {
    #![proptest_config(config())]

    #[test]
    fn crowded_streams_agree_with_the_oracle(limits in limits(), actions in stream(CROWDED, 120)) {
        run(limits, CROWDED.workers, &actions);
    }

    #[test]
    fn mixed_streams_agree_with_the_oracle(limits in limits(), actions in stream(MIXED, 160)) {
        run(limits, MIXED.workers, &actions);
    }

    #[test]
    fn aliased_streams_agree_with_the_oracle(limits in limits(), actions in stream(ALIASED, 160)) {
        run(limits, ALIASED.workers, &actions);
    }

    #[test]
    fn grouped_streams_agree_with_the_oracle(limits in limits(), actions in stream(GROUPED, 160)) {
        run(limits, GROUPED.workers, &actions);
    }

    #[test]
    fn windowed_streams_agree_with_the_oracle(
        limits in limits(), actions in prop::collection::vec((0..WINDOWED.workers, windowed_action(WINDOWED)), 1..200)
    ) {
        run(limits, WINDOWED.workers, &actions);
    }

    #[test]
    fn windowed_chains_of_one_content_agree_with_the_oracle(
        limits in limits(), actions in prop::collection::vec((0..2_usize, windowed_action(ALIASED_WINDOWS)), 1..200)
    ) {
        run(limits, ALIASED_WINDOWS.workers, &actions);
    }

    /// Hardly any block may be dormant or reserved, so removed middles lose their places all the time.
    #[test]
    fn streams_that_may_not_wait_agree_with_the_oracle(
        limits in limits(), actions in stream(CROWDED, 120), dormant_max in 0_usize..3
    ) {
        run(ShardLimits { dormant_blocks_max: dormant_max, ..limits }, CROWDED.workers, &actions);
    }

    /// Few names for one content, so that names take the places of removed blocks all the time.
    #[test]
    fn streams_of_few_names_agree_with_the_oracle(
        limits in limits(), actions in stream(ALIASED, 160), aliases_max in 1_usize..4
    ) {
        run(ShardLimits { aliases_max, ..limits }, ALIASED.workers, &actions);
    }

    /// A full worker refuses what the oracle refuses, and a clear that must sweep at once changes no answer.
    #[test]
    fn bounded_streams_agree_with_the_oracle(
        limits in limits(), actions in stream(MIXED, 120), blocks_max in 1_u64..8
    ) {
        let limits = ShardLimits { worker_blocks_max: blocks_max, retired_holders_max: 1, ..limits };
        run(limits, MIXED.workers, &actions);
    }
}
