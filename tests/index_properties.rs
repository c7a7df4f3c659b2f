//! The index against the oracle: random streams over small alphabets, so that hashes collide, middles are
//! removed, blocks are stored twice, parents are unknown, contents have several names and slots are reused.
//!
//! A failing case is written to `tests/index_properties.regressions` and tried first from then on:
//! `cargo test --test index_properties` replays it.

mod oracle;

use kvrouted::ids::{EngineHash, GroupId, LocalHash, Seed, ShardId, Tier, WorkerSlot};
use kvrouted::index::{Depths, IndexReader, Refusal, ShardLimits, ShardWriter, StoreBlocks, WorkerBlocks, shard};
use oracle::Oracle;
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

/// A store as values.
#[derive(Clone, Debug)]
struct Stored {
    parent: Option<u64>,
    blocks: Vec<(u64, u64)>,
    tier: Tier,
    group: u32,
    seed: u64,
}

impl Stored {
    fn with<R>(&self, use_it: impl FnOnce(&StoreBlocks<'_>) -> R) -> R {
        let hashes: Vec<EngineHash> = self.blocks.iter().map(|(hash, _)| EngineHash(*hash)).collect();
        let locals: Vec<LocalHash> = self.blocks.iter().map(|(_, local)| LocalHash(*local)).collect();
        use_it(&StoreBlocks {
            parent: self.parent.map(EngineHash),
            hashes: &hashes,
            locals: &locals,
            tier: self.tier,
            group: GroupId(self.group),
            seed: Seed(self.seed),
        })
    }
}

#[derive(Clone, Debug)]
enum Action {
    Store(Stored),
    /// A store that was made before, by any worker, as it was or in another tier or group.
    Again {
        pick: usize,
        place: Option<(Tier, u32)>,
    },
    /// Blocks under one that the worker has.
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
    Batch,
    Replace,
    Sweep(usize),
    Publish,
}

/// How many of everything a stream may use.
#[derive(Clone, Copy)]
struct Alphabet {
    workers: usize,
    hashes: u64,
    locals: u64,
    groups: u32,
    seeds: u64,
    tiers: usize,
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
        .prop_map(|(parent, blocks, tier, group, seed)| Stored { parent, blocks, tier, group, seed });
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
        12 => Just(Action::Publish),
    ]
}

/// One shard beside as many oracles as it has workers.
struct Twin {
    limits: ShardLimits,
    writer: ShardWriter,
    reader: IndexReader,
    depths: Depths,
    workers: Vec<(WorkerSlot, Oracle)>,
    past: Vec<Stored>,
    publishes: u64,
}

impl Twin {
    fn new(limits: ShardLimits, workers: usize) -> Self {
        let (mut writer, reader) = shard(ShardId(0), limits);
        let workers = (0..workers).map(|_| (writer.add_worker().expect("room"), Oracle::default())).collect();
        let (reader, depths) = (IndexReader::new(vec![reader]), Depths::new());
        Self { limits, writer, reader, depths, workers, past: Vec::new(), publishes: 0 }
    }

    fn store(&mut self, worker: usize, stored: &Stored) {
        let (slot, oracle) = &mut self.workers[worker];
        stored.with(|store| {
            let mut outcome = self.writer.store(*slot, store);
            assert!(outcome.dormant == 0 || outcome.dormant == outcome.stored);
            let first = store.hashes.first().filter(|_| outcome.stored > 0);
            outcome.dormant = 0;
            if outcome.refused == Some(Refusal::DormantBound) {
                assert_eq!(oracle.clone().store(&self.limits, store).refused, None, "it comes last");
                return;
            }
            assert_eq!(outcome, oracle.store(&self.limits, store), "{stored:?}");
            if let Some(first) = first {
                assert_eq!(self.writer.seed_of(*slot, *first), Some(store.seed));
                assert!(store.parent.is_none_or(|parent| self.writer.seed_of(*slot, parent).is_some()));
            }
        });
        self.past.push(stored.clone());
    }

    fn apply(&mut self, worker: usize, action: &Action) {
        let (slot, oracle) = &mut self.workers[worker];
        match action {
            Action::Store(stored) => self.store(worker, stored),
            Action::Again { pick, place } => {
                if !self.past.is_empty() {
                    let mut stored = self.past[pick % self.past.len()].clone();
                    (stored.tier, stored.group) = place.unwrap_or((stored.tier, stored.group));
                    self.store(worker, &stored);
                }
            }
            Action::Under { pick, blocks } => {
                if let Some((hash, tier, group)) = nth(oracle, *pick) {
                    let seed = self.writer.seed_of(*slot, hash).expect("a bound hash has a seed").0;
                    assert_eq!(seed, oracle.bindings[&hash].seed.0);
                    let (parent, group) = (Some(hash.0), group.0);
                    self.store(worker, &Stored { parent, blocks: blocks.clone(), tier, group, seed });
                }
            }
            Action::Remove { picks } => {
                for pick in picks {
                    if let Some((hash, tier, group)) = nth(oracle, *pick) {
                        let removed = self.writer.remove(*slot, tier, group, &[hash]);
                        assert_eq!(removed, oracle.remove(tier, group, &[hash]));
                    }
                }
            }
            Action::RemoveAny { tier, group, hashes } => {
                let hashes: Vec<EngineHash> = hashes.iter().map(|hash| EngineHash(*hash)).collect();
                let removed = self.writer.remove(*slot, *tier, GroupId(*group), &hashes);
                assert_eq!(removed, oracle.remove(*tier, GroupId(*group), &hashes));
            }
            Action::Clear(tier) => {
                self.writer.clear(*slot, *tier);
                oracle.clear(*tier);
            }
            Action::Batch => {
                self.writer.begin_batch(*slot);
                oracle.begin_batch();
            }
            Action::Replace => self.replace(worker),
            Action::Sweep(budget) => {
                self.writer.sweep(*budget);
            }
            Action::Publish => self.publish(),
        }
        let (slot, oracle) = &self.workers[worker];
        check_figures(self.writer.held(*slot), oracle.held());
    }

    fn replace(&mut self, worker: usize) {
        let (slot, oracle) = &mut self.workers[worker];
        self.writer.remove_worker(*slot);
        assert_eq!(self.writer.held(*slot), WorkerBlocks::default());
        (*slot, *oracle) = (self.writer.add_worker().expect("room"), Oracle::default());
    }

    fn publish(&mut self) {
        self.writer.publish();
        self.publishes += 1;
        for query in queries() {
            let lookup = self.reader.lookup(&query, &mut self.depths);
            assert!(!lookup.contended && lookup.epoch == self.publishes);
            for (slot, oracle) in &self.workers {
                let depths = self.depths.of(ShardId(0), *slot);
                assert_eq!(depths, oracle.depths(&query), "slot {slot}, query {query:?}, {oracle:#?}");
            }
        }
    }
}

fn nth(oracle: &Oracle, pick: usize) -> Option<(EngineHash, Tier, GroupId)> {
    oracle.counts.keys().nth(pick.checked_rem(oracle.counts.len())?).copied()
}

fn check_figures(figures: WorkerBlocks, expected: WorkerBlocks) {
    assert!(figures.dormant <= expected.dormant, "{figures:?} against {expected:?}");
    assert_eq!(WorkerBlocks { dormant: 0, ..figures }, WorkerBlocks { dormant: 0, ..expected });
}

/// All sequences of two locals of length 5, and some that are shorter, longer, or of a third local.
fn queries() -> impl Iterator<Item = Vec<LocalHash>> {
    let of_bits = |bits: u64, length: u64| (0..length).map(move |at| LocalHash(bits >> at & 1)).collect();
    let five = (0..32).map(move |bits| of_bits(bits, 5));
    let others =
        [vec![], vec![0], vec![1], vec![0, 1], vec![2, 0, 1], vec![0, 2, 1], vec![0; 9], vec![0, 1, 0, 1, 1, 0, 0]];
    five.chain(others.into_iter().map(|query| query.into_iter().map(LocalHash).collect()))
}

fn run(limits: ShardLimits, workers: usize, actions: &[(usize, Action)]) {
    let mut twin = Twin::new(limits, workers);
    for (worker, action) in actions {
        twin.apply(worker % workers, action);
    }
    twin.publish();
    while twin.writer.sweep(7) {}
    twin.publish();
    for (slot, oracle) in &twin.workers {
        check_figures(twin.writer.held(*slot), oracle.held());
    }
}

/// 512 cases of each property, or as many as `PROPTEST_CASES` says.
fn config() -> ProptestConfig {
    let default = ProptestConfig::default();
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { default.cases } else { 512 };
    ProptestConfig {
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct("tests/index_properties.regressions"))),
        cases,
        ..default
    }
}

fn stream(of: Alphabet, length: usize) -> impl Strategy<Value = Vec<(usize, Action)>> {
    prop::collection::vec((0..of.workers, action(of)), 1..length)
}

/// One worker, one tier, very few hashes: everything happens to everything.
const CROWDED: Alphabet = Alphabet { workers: 1, hashes: 5, locals: 2, groups: 1, seeds: 1, tiers: 1 };
/// All that the contract knows, in moderation.
const MIXED: Alphabet = Alphabet { workers: 3, hashes: 8, locals: 2, groups: 3, seeds: 2, tiers: 4 };
/// One content for every block: only aliases.
const ALIASED: Alphabet = Alphabet { workers: 2, hashes: 12, locals: 1, groups: 1, seeds: 1, tiers: 2 };
/// Two tiers and two groups, few hashes.
const GROUPED: Alphabet = Alphabet { workers: 2, hashes: 6, locals: 2, groups: 2, seeds: 1, tiers: 2 };

proptest! {
    #![proptest_config(config())]

    #[test]
    fn crowded_streams_agree_with_the_oracle(actions in stream(CROWDED, 120)) {
        run(ShardLimits::default(), CROWDED.workers, &actions);
    }

    #[test]
    fn mixed_streams_agree_with_the_oracle(actions in stream(MIXED, 160)) {
        run(ShardLimits::default(), MIXED.workers, &actions);
    }

    #[test]
    fn aliased_streams_agree_with_the_oracle(actions in stream(ALIASED, 160)) {
        run(ShardLimits::default(), ALIASED.workers, &actions);
    }

    #[test]
    fn grouped_streams_agree_with_the_oracle(actions in stream(GROUPED, 160)) {
        run(ShardLimits::default(), GROUPED.workers, &actions);
    }

    /// Next to nothing may wait or be reserved, so removed middles lose their places all the time.
    #[test]
    fn streams_that_may_not_wait_agree_with_the_oracle(actions in stream(CROWDED, 120), dormant_max in 0_usize..3) {
        run(ShardLimits { dormant_blocks_max: dormant_max, ..ShardLimits::default() }, CROWDED.workers, &actions);
    }

    /// Few names for one content, so that places are taken from removed blocks all the time.
    #[test]
    fn streams_of_few_names_agree_with_the_oracle(actions in stream(ALIASED, 160), aliases_max in 1_usize..4) {
        run(ShardLimits { aliases_max, ..ShardLimits::default() }, ALIASED.workers, &actions);
    }

    /// A full worker refuses what the oracle refuses, and a clear that must sweep at once changes nothing.
    #[test]
    fn bounded_streams_agree_with_the_oracle(actions in stream(MIXED, 120), blocks_max in 1_u64..8) {
        let limits = ShardLimits { worker_blocks_max: blocks_max, retired_lanes_max: 1, ..ShardLimits::default() };
        run(limits, MIXED.workers, &actions);
    }
}
