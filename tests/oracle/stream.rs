//! Seeded streams of events. A stream knows from models of its own what its workers hold: most removals find their
//! blocks, and most stores have a parent.

use super::Oracle;
use super::event::{Event, Stored, window};
use super::prompts::{NAMES_PER_PREFIX, Prompts};
use kvrouted::ids::{EngineHash, GroupId, LocalHash, Seed, Tier};
use kvrouted::index::ShardLimits;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

/// The number of different workers, hashes and so on that a stream may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Alphabet {
    pub(crate) workers: usize,
    pub(crate) hashes: u64,
    pub(crate) locals: u64,
    pub(crate) groups: u32,
    pub(crate) seeds: u64,
    pub(crate) tiers: usize,
}

/// The stores of a stream.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Shape {
    /// Any block below any other.
    Unstructured,
    /// Parts of prompts that share prefixes, up to `step_blocks_max` blocks at a time.
    Prompts { prompts: usize, blocks_max: usize, step_blocks_max: usize, aliases: bool },
}

/// How often each event happens. Only the proportions count.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rates {
    pub(crate) store: u32,
    pub(crate) remove: u32,
    pub(crate) clear: u32,
    pub(crate) batch: u32,
    pub(crate) replace: u32,
    pub(crate) sweep: u32,
    pub(crate) publish: u32,
}

impl Rates {
    pub(crate) const USUAL: Self = Self { store: 46, remove: 21, clear: 2, batch: 5, replace: 1, sweep: 3, publish: 6 };
    pub(crate) const REMOVING: Self = Self { store: 30, remove: 40, ..Self::USUAL };
    pub(crate) const CLEARING: Self = Self { clear: 10, replace: 6, sweep: 8, ..Self::USUAL };
}

/// A kind of stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Style {
    pub(crate) of: Alphabet,
    pub(crate) shape: Shape,
    pub(crate) rates: Rates,
}

/// One stream, from its seed.
pub(crate) struct Stream {
    style: Style,
    limits: ShardLimits,
    rng: Xoshiro256PlusPlus,
    /// The model of each worker; `None` while the worker is removed. At most one worker is removed at a time.
    workers: Vec<Option<Oracle>>,
    past: Vec<Stored>,
    prompts: Prompts,
    queries: Vec<Vec<LocalHash>>,
}

impl Stream {
    pub(crate) fn new(style: Style, limits: ShardLimits, seed: u64) -> Self {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let (count, blocks_max) = match style.shape {
            Shape::Unstructured => (0, 0),
            Shape::Prompts { prompts, blocks_max, .. } => (prompts, blocks_max),
        };
        let prompts = Prompts::random(&mut rng, count, blocks_max, style.of.locals);
        let mut queries = prompts.queries(&mut rng);
        queries.extend(short_queries());
        let workers = vec![Some(Oracle::default()); style.of.workers];
        Self { style, limits, rng, workers, past: Vec::new(), prompts, queries }
    }

    /// Queries that test the index after this stream.
    pub(crate) fn queries(&self) -> &[Vec<LocalHash>] {
        &self.queries
    }

    /// The first `count` events.
    pub(crate) fn events(mut self, count: usize) -> Vec<Event> {
        (0..count).map(|_| self.next_event()).collect()
    }

    fn next_event(&mut self) -> Event {
        if let Some(worker) = self.workers.iter().position(Option::is_none)
            && self.rng.random_bool(0.3)
        {
            self.workers[worker] = Some(Oracle::default());
            return Event::AddWorker { worker };
        }
        let event = self.choose();
        self.follow(&event);
        event
    }

    fn choose(&mut self) -> Event {
        let worker = self.rng.random_range(0..self.workers.len());
        let Rates { store, remove, clear, batch, replace, sweep, publish } = self.style.rates;
        let kinds = [store, remove, clear, batch, replace, sweep, publish];
        let mut left = self.rng.random_range(0..kinds.iter().sum());
        let kind = kinds.iter().position(|weight| {
            let taken = left < *weight;
            left = left.saturating_sub(*weight);
            taken
        });
        match kind {
            Some(0) => Event::Store(self.store(worker)),
            Some(1) => self.remove(worker),
            Some(2) => Event::Clear { worker, tier: self.rng.random_bool(0.7).then(|| self.tier()) },
            Some(3) => Event::BeginBatch { worker },
            Some(4) if self.workers.iter().all(Option::is_some) => Event::RemoveWorker { worker },
            Some(5) => Event::Sweep { budget_blocks: self.rng.random_range(1..6) },
            _ => Event::Publish,
        }
    }

    /// Keeps the stream's own models up to date.
    fn follow(&mut self, event: &Event) {
        let Some(worker) = event.worker() else { return };
        if let Event::RemoveWorker { .. } = event {
            self.workers[worker] = None;
        }
        let Some(oracle) = &mut self.workers[worker] else { return };
        event.apply_to_oracle(oracle, &self.limits);
        if let Event::Store(stored) = event {
            self.past.push(stored.clone());
        }
    }

    fn tier(&mut self) -> Tier {
        Tier::ALL[self.rng.random_range(0..self.style.of.tiers)]
    }

    fn group(&mut self) -> GroupId {
        GroupId(self.rng.random_range(0..self.style.of.groups))
    }

    fn seed(&mut self) -> Seed {
        Seed(self.rng.random_range(0..self.style.of.seeds))
    }

    fn hash(&mut self) -> EngineHash {
        EngineHash(self.rng.random_range(0..self.style.of.hashes))
    }

    /// Any reference of a worker.
    fn held(&mut self, worker: usize) -> Option<(EngineHash, Tier, GroupId)> {
        let counts = &self.workers[worker].as_ref()?.counts;
        let at = self.rng.random_range(0..counts.len().max(1));
        counts.keys().nth(at).copied()
    }

    fn store(&mut self, worker: usize) -> Stored {
        let again = self.rng.random_range(0..100);
        if again < 22
            && let Some(at) = self.past.len().checked_sub(1 + self.rng.random_range(0..self.past.len().max(1)))
        {
            let (tier, group) = (self.tier(), self.group());
            let mut stored = Stored { worker, ..self.past[at].clone() };
            if again < 11 {
                (stored.tier, stored.group) = (tier, group);
            }
            return stored;
        }
        match self.style.shape {
            Shape::Unstructured => self.store_anything(worker),
            Shape::Prompts { step_blocks_max, aliases, .. } => self.store_prompt(worker, step_blocks_max, aliases),
        }
    }

    fn store_anything(&mut self, worker: usize) -> Stored {
        let count = self.rng.random_range(1..4);
        let hashes: Vec<EngineHash> = (0..count).map(|_| self.hash()).collect();
        let locals = hashes.iter().map(|_| LocalHash(self.rng.random_range(0..self.style.of.locals))).collect();
        let under = self.held(worker).filter(|_| self.rng.random_bool(0.4));
        let (parent, tier, group) = match under {
            Some((hash, tier, group)) => (Some(hash), tier, group),
            None => (self.rng.random_bool(0.6).then(|| self.hash()), self.tier(), self.group()),
        };
        Stored { worker, parent, hashes, locals, tier, group, seed: self.seed() }
    }

    /// A part of a prompt: most often the blocks after those that the worker has.
    fn store_prompt(&mut self, worker: usize, step_blocks_max: usize, aliases: bool) -> Stored {
        let prompt = self.rng.random_range(0..self.prompts.len());
        let blocks = self.prompts.blocks(prompt);
        let (above, own) = match (aliases, self.rng.random_range(0..10)) {
            (false, _) | (true, 0..6) => (0, 0),
            (true, 6..8) => (1, 1),
            (true, _) => (self.rng.random_range(0..NAMES_PER_PREFIX), self.rng.random_range(0..NAMES_PER_PREFIX)),
        };
        let bound = |at: &usize| {
            let oracle = self.workers[worker].as_ref();
            oracle.is_some_and(|oracle| oracle.bindings.contains_key(&self.prompts.name(worker, prompt, *at, above)))
        };
        let from = match self.rng.random_range(0..20) {
            0..11 => (0..blocks).take_while(bound).count(),
            11..14 => self.rng.random_range(0..blocks),
            _ => 0,
        };
        let from = from.min(blocks - 1);
        let step = self.rng.random_range(1..=step_blocks_max);
        let part = from..blocks.min(from + step);
        Stored {
            worker,
            parent: from.checked_sub(1).map(|at| self.prompts.name(worker, prompt, at, above)),
            hashes: part.clone().map(|at| self.prompts.name(worker, prompt, at, own)).collect(),
            locals: part.map(|at| self.prompts.local(prompt, at)).collect(),
            tier: if self.rng.random_bool(0.7) { Tier::Device } else { self.tier() },
            group: self.group(),
            seed: self.seed(),
        }
    }

    fn remove(&mut self, worker: usize) -> Event {
        let (first, tier, group) = self.held(worker).unwrap_or_else(|| (self.hash(), self.tier(), self.group()));
        let mut hashes = vec![first];
        match (self.style.shape, self.rng.random_range(0..10)) {
            (_, 0) => hashes = (0..self.rng.random_range(0..3)).map(|_| self.hash()).collect(),
            (Shape::Prompts { .. }, 1..7) => {
                let run = self.run(worker, first);
                hashes = run.into_iter().filter(|hash| self.holds(worker, *hash, tier, group)).collect();
            }
            _ => {
                for _ in 0..self.rng.random_range(0..3) {
                    let more = self.held(worker).filter(|(_, t, g)| (*t, *g) == (tier, group));
                    hashes.extend(more.map(|(hash, _, _)| hash));
                }
            }
        }
        Event::Remove { worker, tier, group, hashes }
    }

    fn holds(&self, worker: usize, hash: EngineHash, tier: Tier, group: GroupId) -> bool {
        self.workers[worker].as_ref().is_some_and(|oracle| oracle.counts.contains_key(&(hash, tier, group)))
    }

    /// A run of one chain that begins with a block, in a chance order: from the root on or towards it.
    fn run(&mut self, worker: usize, first: EngineHash) -> Vec<EngineHash> {
        let Some(oracle) = &self.workers[worker] else { return vec![first] };
        let children =
            |of: EngineHash| oracle.bindings.iter().find(|(_, b)| b.parent == Some(of)).map(|(hash, _)| *hash);
        let length = if self.rng.random_bool(0.5) { self.rng.random_range(1..6) } else { oracle.bindings.len() };
        let mut run: Vec<EngineHash> =
            std::iter::successors(Some(first), |hash| children(*hash)).take(length).collect();
        if self.rng.random_bool(0.7) {
            run.reverse();
        }
        run
    }
}

/// The same events of workers whose engines have sliding windows: these groups of the device tier are announced as
/// windows at the beginning, and again wherever that is forgotten.
pub(crate) fn with_windows(events: Vec<Event>, workers: usize, groups: &[u32], window_blocks: u32) -> Vec<Event> {
    let announced = |worker: usize| groups.iter().map(move |group| window(worker, *group, window_blocks));
    let mut windowed: Vec<Event> = (0..workers).flat_map(announced).collect();
    for event in events {
        let forgets = match &event {
            Event::Clear { worker, tier: None | Some(Tier::Device) } | Event::AddWorker { worker } => Some(*worker),
            _ => None,
        };
        windowed.push(event);
        windowed.extend(forgets.into_iter().flat_map(announced));
    }
    windowed
}

/// All sequences of two locals of length 5, and some that are shorter, longer, or of a third local.
pub(crate) fn short_queries() -> impl Iterator<Item = Vec<LocalHash>> {
    let of_bits = |bits: u64, length: u64| (0..length).map(move |at| LocalHash(bits >> at & 1)).collect();
    let five = (0..32).map(move |bits| of_bits(bits, 5));
    let others =
        [vec![], vec![0], vec![1], vec![0, 1], vec![2, 0, 1], vec![0, 2, 1], vec![0; 9], vec![0, 1, 0, 1, 1, 0, 0]];
    five.chain(others.into_iter().map(|query| query.into_iter().map(LocalHash).collect()))
}
