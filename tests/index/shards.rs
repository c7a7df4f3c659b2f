//! Lookups over several shards against the oracle. Shards hold parts of the same prompts, so that their walks take the
//! same paths. Some of them need the branching walk: they have tiers, contents with several names, or more than a word
//! of holder bits. Some have a reclaimer of their own.

use crate::oracle::Oracle;
use crate::oracle::checked_shard::numbers;
use crate::oracle::event::Event;
use crate::oracle::stream::{Alphabet, Rates, Shape, Stream, Style};
use kvrouted::ids::{LocalHash, ShardId, WorkerSlot};
use kvrouted::index::{Depths, IndexReader, Reclaimer, ShardLimits, ShardReader, ShardWriter, shard_in};

/// Seeds for each number of shards, one for each size of nodes.
const SEEDS: u64 = NODE_BLOCKS_MAX.len() as u64;
const NODE_BLOCKS_MAX: [usize; 3] = [2, 8, 1024];
/// Events of a shard. Each shard takes some more than the one before, so that no two are alike.
const EVENTS: usize = 150;
const EVENTS_MORE: usize = 20;
/// Events of a shard between two checks.
const EVENTS_PER_CHECK: usize = 60;
const SHARDS_MAX: u16 = 9;

const LOCALS: u64 = 3;
/// For the fast walk.
const PLAIN: Alphabet = Alphabet { workers: 3, hashes: 400, locals: LOCALS, groups: 1, seeds: 1, tiers: 1 };
const TIERED: Alphabet = Alphabet { tiers: 4, ..PLAIN };
/// More than a word of holder bits.
const WIDE: Alphabet = Alphabet { workers: 70, ..PLAIN };

/// The kind of a shard.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Plain,
    Tiered,
    Forked,
    Wide,
    /// With a reclaimer of its own.
    Apart,
    Empty,
}

impl Kind {
    const ALL: [Self; 6] = [Self::Plain, Self::Tiered, Self::Forked, Self::Wide, Self::Apart, Self::Empty];

    const fn style(self) -> Style {
        let of = match self {
            Self::Tiered => TIERED,
            Self::Wide => WIDE,
            Self::Plain | Self::Forked | Self::Apart | Self::Empty => PLAIN,
        };
        let aliases = matches!(self, Self::Forked);
        let shape = Shape::Prompts { prompts: 8, blocks_max: 90, step_blocks_max: 30, aliases };
        Style { of, shape, rates: Rates { replace: 0, ..Rates::USUAL } }
    }
}

/// One of the shards, with the models of its workers.
struct Part {
    id: ShardId,
    writer: ShardWriter,
    workers: Vec<(WorkerSlot, Oracle)>,
    events: std::vec::IntoIter<Event>,
    publishes: u64,
}

impl Part {
    fn new(id: ShardId, kind: Kind, limits: ShardLimits, shared: &Reclaimer, seed: u64) -> (Self, ShardReader) {
        let own = Reclaimer::new();
        let (mut writer, reader) = shard_in(id, limits, if let Kind::Apart = kind { &own } else { shared });
        let workers = (0..kind.style().of.workers).map(|_| (writer.add_worker().expect("room"), Oracle::default()));
        let workers = workers.collect();
        let events = if let Kind::Empty = kind { 0 } else { EVENTS + EVENTS_MORE * usize::from(id.0) };
        let events = Stream::new(kind.style(), limits, seed).events(events).into_iter();
        (Self { id, writer, workers, events, publishes: 0 }, reader)
    }

    fn play(&mut self, limits: &ShardLimits, events: usize) {
        for event in self.events.by_ref().take(events) {
            match event.worker() {
                Some(worker) => {
                    let (slot, oracle) = &mut self.workers[worker];
                    let outcome = event.apply_to_writer(&mut self.writer, *slot).without_dormant();
                    assert_eq!(outcome, event.apply_to_oracle(oracle, limits), "{event}");
                }
                None if event == Event::Publish => {
                    self.writer.publish();
                    self.publishes += 1;
                }
                None => drop(self.writer.sweep(2)),
            }
        }
    }

    fn check(&self, query: &[LocalHash], depths: &Depths) {
        for (slot, oracle) in &self.workers {
            let expected = oracle.depths(query);
            assert_eq!(depths.of(self.id, *slot), expected, "shard {:?}, query {}", self.id, numbers(query));
            assert_eq!(depths.device(self.id, *slot), expected.device);
        }
    }
}

/// Some shards, each of a kind, checked now and then while they change.
fn answers_hold(kinds: impl Fn(u16) -> Kind, shards: u16, seed: u64) {
    let limits = ShardLimits { node_blocks_max: NODE_BLOCKS_MAX[seed as usize], ..ShardLimits::default() };
    let shared = Reclaimer::new();
    let parts = (0..shards).map(|id| Part::new(ShardId(id), kinds(id), limits, &shared, seed));
    let (mut parts, readers): (Vec<Part>, Vec<ShardReader>) = parts.unzip();
    let (reader, mut depths) = (IndexReader::new(readers), Depths::new());
    let queries = Stream::new(Kind::Plain.style(), limits, seed).queries().to_vec();
    while parts.iter().any(|part| part.events.len() > 0) {
        parts.iter_mut().for_each(|part| part.play(&limits, EVENTS_PER_CHECK));
        for query in &queries {
            let lookup = reader.lookup(query, &mut depths);
            assert!(!lookup.contended, "contended without a writer at work");
            assert_eq!(lookup.epoch, parts.iter().map(|part| part.publishes).sum::<u64>());
            parts.iter().for_each(|part| part.check(query, &depths));
        }
    }
}

#[test]
fn shards_for_the_fast_walk_answer_as_single_ones() {
    for (shards, seed) in (1..=SHARDS_MAX).flat_map(|shards| (0..SEEDS).map(move |seed| (shards, seed))) {
        answers_hold(|_| Kind::Plain, shards, seed);
    }
}

#[test]
fn shards_of_every_kind_answer_beside_each_other() {
    for (shards, seed) in (1..=SHARDS_MAX).flat_map(|shards| (0..SEEDS).map(move |seed| (shards, seed))) {
        answers_hold(|id| Kind::ALL[(usize::from(id) + seed as usize) % Kind::ALL.len()], shards, seed);
    }
}
