//! Dumps of one worker, slice by slice while other workers change, against the oracle; and the shards into which they
//! are loaded.
//!
//! `KVROUTED_SEEDS` is the number of seeds of each test; `KVROUTED_SEED` runs a single one.

use crate::oracle::Oracle;
use crate::oracle::checked_shard::{CheckedShard, is_implementation_limit, numbers};
use crate::oracle::event::{Event, Outcome, Stored, begin_batch, clear, remove, store};
use crate::oracle::seeds::{Watch, seeds};
use crate::oracle::stream::{Alphabet, Rates, Shape, Stream, Style};
use kvrouted::ids::{EngineHash, GroupId, LocalHash, Seed, ShardId, Tier, WorkerSlot};
use kvrouted::index::{Depths, DumpCursor, IndexReader, Refusal, ShardLimits, ShardWriter, StoreBlocks, shard};
use std::collections::{BTreeMap, BTreeSet};

/// Seeds of each test, unless it says otherwise.
const SEEDS: u64 = 40;
/// Events before the dump begins.
const BEFORE: usize = 200;
/// Events of a whole stream.
const EVENTS: usize = 500;
/// Events of others between two slices.
const BETWEEN: usize = 4;
const SHARD: ShardId = ShardId(0);
/// A worker of a shard beside those of the stream.
const FRESH: usize = 0;

type Counts = BTreeMap<(EngineHash, Tier, GroupId), u32>;

/// The stores of a dump.
#[derive(Debug, Default)]
struct Dump {
    stores: Vec<Stored>,
}

impl Dump {
    /// Takes one slice; `false` = it was the last.
    fn slice(&mut self, writer: &ShardWriter, slot: WorkerSlot, cursor: &mut DumpCursor, blocks_max: usize) -> bool {
        let before = self.blocks();
        let more = writer.dump(slot, cursor, blocks_max, &mut |store| {
            let StoreBlocks { parent, hashes, locals, tier, group, seed } = store;
            let (hashes, locals) = (hashes.to_vec(), locals.to_vec());
            self.stores.push(Stored { worker: FRESH, parent, hashes, locals, tier, group, seed });
        });
        assert!(!more || self.blocks() >= before + blocks_max, "there is more, and this slice has room for it");
        more
    }

    /// Dumps all of a worker at once.
    fn whole(writer: &ShardWriter, slot: WorkerSlot) -> Self {
        let (mut dump, mut cursor) = (Self::default(), DumpCursor::default());
        while dump.slice(writer, slot, &mut cursor, usize::MAX) {}
        assert!(!dump.slice(writer, slot, &mut cursor, usize::MAX), "it stays at its end");
        dump
    }

    fn blocks(&self) -> usize {
        self.stores.iter().map(|store| store.hashes.len()).sum()
    }

    /// Compares with every binding and every reference of the model. Where the chain to the root is complete, a parent
    /// comes before its children.
    fn check(&self, oracle: &Oracle) {
        let mut counts = Counts::new();
        let (rooted, mut seen) = (rooted(oracle), BTreeSet::<EngineHash>::new());
        for store in &self.stores {
            assert!(!store.hashes.is_empty());
            for (hash, binding) in Oracle::chain(&store.blocks()) {
                assert_eq!(oracle.bindings.get(&hash), Some(&binding), "{hash}");
                *counts.entry((hash, store.tier, store.group)).or_insert(0) += 1;
            }
            let parent = store.parent.filter(|parent| rooted.contains(parent));
            assert!(parent.is_none_or(|parent| seen.contains(&parent)), "{store:?} before its parent");
            seen.extend(&store.hashes);
        }
        let expected: Counts = oracle.counts.iter().map(|(reference, (count, _))| (*reference, *count)).collect();
        assert_eq!(counts, expected);
    }
}

/// The blocks whose chain to the root is complete.
fn rooted(oracle: &Oracle) -> BTreeSet<EngineHash> {
    let (mut rooted, mut open) = (BTreeSet::new(), vec![None]);
    while let Some(parent) = open.pop() {
        let first = (parent, LocalHash(0), EngineHash(0));
        let last = (parent, LocalHash(u64::MAX), EngineHash(u64::MAX));
        for (_, _, hash) in oracle.children.range(first..=last) {
            rooted.insert(*hash);
            open.push(Some(*hash));
        }
    }
    rooted
}

/// A shard into which a dump has been loaded.
struct Loaded {
    writer: ShardWriter,
    reader: IndexReader,
    slot: WorkerSlot,
    /// The model of the worker.
    oracle: Oracle,
    limits: ShardLimits,
}

impl Loaded {
    fn new(limits: ShardLimits, dump: &Dump, oracle: &Oracle) -> Self {
        let (mut writer, reader) = shard(SHARD, limits);
        let slot = writer.add_worker().expect("room");
        writer.begin_batch(slot);
        for (tier, group) in &oracle.announced {
            // A group without a block says that the tier holds nothing.
            let (hashes, locals) = (&[EngineHash(u64::MAX)][..], &[LocalHash(u64::MAX)][..]);
            let (tier, group, seed) = (*tier, *group, Seed(0));
            assert_eq!(writer.store(slot, &StoreBlocks { parent: None, hashes, locals, tier, group, seed }).stored, 1);
            assert_eq!(writer.remove(slot, tier, group, hashes).removed, 1);
        }
        let rooted = rooted(oracle);
        for store in &dump.stores {
            let outcome = writer.store(slot, &store.blocks());
            assert_eq!((outcome.refused, outcome.ambiguous), (None, false), "{store:?}");
            let waits = !rooted.contains(&store.hashes[0]);
            assert!(waits || outcome.dormant == 0, "{store:?} waits, though its chain is complete");
        }
        Self { writer, reader: IndexReader::new(vec![reader]), slot, oracle: oracle.clone(), limits }
    }

    /// Counts and answers equal the model's.
    fn check(&self, queries: &[Vec<LocalHash>]) {
        let (held, expected) = (self.writer.held(self.slot), self.oracle.held());
        assert_eq!(
            (held.bound, held.by_tier, held.references),
            (expected.bound, expected.by_tier, expected.references)
        );
        let mut depths = Depths::new();
        for query in queries {
            self.reader.lookup(query, &mut depths);
            assert_eq!(depths.of(SHARD, self.slot), self.oracle.depths(query), "{}", numbers(query));
        }
    }

    /// Counts, digests and answers equal those of the dumped worker.
    fn is_like(&self, checked: &CheckedShard, slot: WorkerSlot, queries: &[Vec<LocalHash>]) {
        let (here, there) = (self.writer.held(self.slot), checked.writer.held(slot));
        assert_eq!((here.bound, here.by_tier, here.references), (there.bound, there.by_tier, there.references));
        for tier in Tier::ALL {
            assert_eq!(self.writer.digest(self.slot, tier), checked.writer.digest(slot, tier), "{tier}");
        }
        let (mut of_here, mut of_there) = (Depths::new(), Depths::new());
        for query in queries {
            self.reader.lookup(query, &mut of_here);
            checked.reader.lookup(query, &mut of_there);
            assert_eq!(of_here.of(SHARD, self.slot), of_there.of(SHARD, slot), "{}", numbers(query));
        }
    }

    /// The worker takes the next events as the dumped one would.
    fn apply(&mut self, event: &Event) {
        let outcome = event.apply_to_writer(&mut self.writer, self.slot);
        if let Outcome::Stored(stored) = outcome
            && stored.refused.is_some_and(is_implementation_limit)
        {
            if stored.refused == Some(Refusal::WorkBound) {
                self.oracle.clear(None);
            }
            return;
        }
        let expected = event.apply_to_oracle(&mut self.oracle, &self.limits);
        assert_eq!(outcome.without_dormant(), expected, "{event}");
    }
}

/// The workers that exist after some events.
fn present(workers: usize, events: &[Event]) -> Vec<bool> {
    let mut present = vec![true; workers];
    for event in events {
        match event {
            Event::RemoveWorker { worker } => present[*worker] = false,
            Event::AddWorker { worker } => present[*worker] = true,
            _ => {}
        }
    }
    present
}

/// Dumps every worker of a stream in turn, in slices of several sizes, while the others change.
fn dumps(test: &str, count: u64, style: Style, node_blocks_max: usize) {
    let limits = ShardLimits { node_blocks_max, ..ShardLimits::default() };
    for seed in seeds(count) {
        let _watch = Watch::new(test, seed);
        let stream = Stream::new(style, limits, seed);
        let queries = stream.queries().to_vec();
        let events = stream.events(EVENTS);
        let present = present(style.of.workers, &events[..BEFORE]);
        for (worker, blocks_max) in (0..style.of.workers).filter(|worker| present[*worker]).zip([1, 7, 1000, 1]) {
            dump_beside_others(limits, &queries, &events, worker, blocks_max);
        }
    }
}

fn dump_beside_others(
    limits: ShardLimits,
    queries: &[Vec<LocalHash>],
    events: &[Event],
    worker: usize,
    blocks_max: usize,
) {
    let workers = events.iter().filter_map(Event::worker).max().unwrap_or(0) + 1;
    let mut checked = CheckedShard::new(limits, workers, queries);
    events[..BEFORE].iter().for_each(|event| checked.apply(event));
    let slot = checked.worker(worker).0;
    let mut others = events[BEFORE..].iter().filter(|event| event.worker() != Some(worker));
    let (mut dump, mut cursor) = (Dump::default(), DumpCursor::default());
    while dump.slice(&checked.writer, slot, &mut cursor, blocks_max) {
        others.by_ref().take(BETWEEN).for_each(|event| checked.apply(event));
    }
    let oracle = checked.worker(worker).1;
    dump.check(oracle);
    for node_blocks_max in [limits.node_blocks_max, 3] {
        let mut loaded = Loaded::new(ShardLimits { node_blocks_max, ..limits }, &dump, oracle);
        loaded.check(queries);
        loaded.is_like(&checked, slot, queries);
        Dump::whole(&loaded.writer, loaded.slot).check(oracle);
        let own = events[BEFORE..].iter().filter(|event| event.worker() == Some(worker));
        // A dump does not say which blocks belong to the current batch.
        [begin_batch(worker)].iter().chain(own).for_each(|event| loaded.apply(event));
        loaded.check(queries);
    }
}

/// Prompts of several workers that use mostly the same names, in several tiers and groups.
const FLEET: Alphabet = Alphabet { workers: 4, hashes: 2000, locals: 3, groups: 2, seeds: 1, tiers: 3 };
const PROMPTS: Shape = Shape::Prompts { prompts: 12, blocks_max: 40, step_blocks_max: 24, aliases: false };

#[test]
fn prompts_in_small_nodes() {
    let of = Alphabet { groups: 1, ..FLEET };
    dumps("index::dump::prompts_in_small_nodes", SEEDS, Style { of, shape: PROMPTS, rates: Rates::REMOVING }, 8);
}

#[test]
fn prompts_in_groups_and_tiers() {
    let style = Style { of: FLEET, shape: PROMPTS, rates: Rates::USUAL };
    dumps("index::dump::prompts_in_groups_and_tiers", SEEDS, style, 1024);
}

#[test]
fn prompts_beside_clears() {
    dumps("index::dump::prompts_beside_clears", SEEDS, Style { of: FLEET, shape: PROMPTS, rates: Rates::CLEARING }, 8);
}

#[test]
fn contents_of_several_names() {
    let shape = Shape::Prompts { prompts: 8, blocks_max: 20, step_blocks_max: 8, aliases: true };
    let of = Alphabet { seeds: 2, ..FLEET };
    dumps("index::dump::contents_of_several_names", SEEDS, Style { of, shape, rates: Rates::USUAL }, 8);
}

#[test]
fn anything() {
    let of = Alphabet { workers: 4, hashes: 24, locals: 2, groups: 2, seeds: 2, tiers: 4 };
    dumps("index::dump::anything", SEEDS, Style { of, shape: Shape::Unstructured, rates: Rates::USUAL }, 3);
}

/// Prompts of several of the largest nodes.
#[test]
fn prompts_beyond_one_node() {
    let of = Alphabet { workers: 3, hashes: 100_000, locals: 1 << 40, groups: 1, tiers: 2, ..FLEET };
    let shape = Shape::Prompts { prompts: 3, blocks_max: 2600, step_blocks_max: 2600, aliases: false };
    dumps("index::dump::prompts_beyond_one_node", 2, Style { of, shape, rates: Rates::USUAL }, 1024);
}

/// One tier's part of a chain is below blocks that only another tier has, in one node and in several.
#[test]
fn a_parent_comes_first_whichever_tier_has_it() {
    let blocks: Vec<(u64, u64)> = (1..=20).map(|at| (at, at + 100)).collect();
    let names: Vec<u64> = (1..=12).collect();
    for node_blocks_max in [8, 1024] {
        let limits = ShardLimits { node_blocks_max, ..ShardLimits::default() };
        let mut checked = CheckedShard::new(limits, 1, &[blocks.iter().map(|(_, local)| LocalHash(*local)).collect()]);
        checked.apply(&store(0, None, &blocks, Tier::Device, 0, 7));
        checked.apply(&store(0, None, &blocks[..14], Tier::Host, 0, 7));
        checked.apply(&store(0, Some(1), &blocks[1..3], Tier::Host, 0, 7));
        checked.apply(&remove(0, Tier::Device, 0, &names));
        checked.apply(&store(0, Some(99), &[(98, 98)], Tier::External, 3, 8));
        let (slot, oracle) = checked.worker(0);
        let dump = Dump::whole(&checked.writer, slot);
        dump.check(oracle);
        Loaded::new(limits, &dump, oracle).is_like(&checked, slot, &[]);
        checked.apply(&clear(0, None));
        assert_eq!(Dump::whole(&checked.writer, slot).blocks(), 0);
    }
    let (writer, _reader) = shard(SHARD, ShardLimits::default());
    assert_eq!(Dump::whole(&writer, WorkerSlot(3)).blocks(), 0, "a slot without a worker");
}
