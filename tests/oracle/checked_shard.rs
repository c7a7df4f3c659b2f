//! A shard that is checked against one model for each of its workers. Any difference is a panic.

use super::Oracle;
use super::event::{Event, Outcome};
use kvrouted::ids::{EngineHash, LocalHash, ShardId, Tier, TierBlocks, WorkerSlot};
use kvrouted::index::{Depths, IndexReader, Refusal, ShardLimits, ShardWriter, WorkerBlocks, shard};

/// A query in a form that is short to read.
pub(crate) fn numbers(query: &[LocalHash]) -> String {
    let blocks: Vec<String> = query.iter().map(ToString::to_string).collect();
    format!("[{}]", blocks.join(", "))
}

const SHARD: ShardId = ShardId(0);
/// Engine hashes whose binding is checked, bound or not: streams use small numbers.
const NAMES_CHECKED: u64 = 16;
/// Tries before a removed worker's slot must be free again, each with a sweep and a publish.
const SLOT_WAITS_MAX: usize = 10_000;

/// Whether a refusal comes from a limit of the implementation, which the model does not know. The writer checks these
/// limits last.
pub(crate) fn is_implementation_limit(refusal: Refusal) -> bool {
    matches!(
        refusal,
        Refusal::DormantBound
            | Refusal::PositionBound
            | Refusal::BytesBound
            | Refusal::MemoryBound
            | Refusal::BudgetBound
            | Refusal::WorkBound
    )
}

/// A slot for a new worker, and the number of publishes until it was free. The slot of a removed worker is free again
/// once its blocks have been swept and no reader can see them.
pub(crate) fn slot_for_worker(writer: &mut ShardWriter) -> (WorkerSlot, u64) {
    for publishes in 0..SLOT_WAITS_MAX {
        if let Some(slot) = writer.add_worker() {
            return (slot, publishes as u64);
        }
        while writer.sweep(64) {}
        writer.publish();
        std::thread::yield_now();
    }
    panic!("the slot of a removed worker is never free again");
}

/// Publishes of a choked writer, which gives way to readers each time, before the test fails.
const CHOKED_PUBLISHES_MAX: u64 = 1_000_000;

/// Publishes until the writer may take more batches; returns the number of publishes.
pub(crate) fn publish_until_unchoked(writer: &mut ShardWriter) -> u64 {
    let mut publishes = 0;
    while writer.is_choked() {
        assert!(publishes < CHOKED_PUBLISHES_MAX, "the writer stays choked");
        std::thread::yield_now();
        writer.publish();
        publishes += 1;
    }
    publishes
}

pub(crate) struct CheckedShard {
    limits: ShardLimits,
    pub(crate) writer: ShardWriter,
    pub(crate) reader: IndexReader,
    depths: Depths,
    workers: Vec<CheckedWorker>,
    queries: Vec<Vec<LocalHash>>,
    publishes: u64,
}

struct CheckedWorker {
    /// The slot; after a removal, the worker's last one.
    slot: WorkerSlot,
    present: bool,
    oracle: Oracle,
    /// The model's answers to the queries; computed again after each event of the worker.
    answers: Option<Vec<TierBlocks>>,
}

impl CheckedShard {
    pub(crate) fn new(limits: ShardLimits, workers: usize, queries: &[Vec<LocalHash>]) -> Self {
        let (mut writer, reader) = shard(SHARD, limits);
        let mut worker = |_| {
            let slot = writer.add_worker().expect("room");
            CheckedWorker { slot, present: true, oracle: Oracle::default(), answers: None }
        };
        let workers = (0..workers).map(&mut worker).collect();
        let (reader, depths, queries) = (IndexReader::new(vec![reader]), Depths::new(), queries.to_vec());
        Self { limits, writer, reader, depths, workers, queries, publishes: 0 }
    }

    /// Applies `events` to the shard, and checks it after every `every`-th event and at the end. `reached` is the
    /// number of events that were begun.
    pub(crate) fn run(mut self, events: &[Event], every: usize, reached: &mut usize) -> Self {
        for (at, event) in events.iter().enumerate() {
            *reached = at + 1;
            self.apply(event);
            if (at + 1) % every == 0 {
                self.check();
            }
        }
        self.publish();
        self.check();
        while self.writer.sweep(7) {}
        self.publish();
        self.check();
        self
    }

    pub(crate) fn apply(&mut self, event: &Event) {
        if let Some(worker) = event.worker() {
            self.workers[worker].answers = None;
        }
        match event {
            Event::RemoveWorker { worker } => self.remove_worker(*worker),
            Event::AddWorker { worker } => self.add_worker(*worker),
            Event::Sweep { budget_blocks } => drop(self.writer.sweep(*budget_blocks)),
            Event::Publish => self.publish(),
            Event::Store(_)
            | Event::Remove { .. }
            | Event::Clear { .. }
            | Event::Window { .. }
            | Event::BeginBatch { .. } => {
                self.apply_to_worker(event);
            }
        }
    }

    fn apply_to_worker(&mut self, event: &Event) {
        let Some(checked) = event.worker().map(|worker| &mut self.workers[worker]) else { return };
        let slot = checked.slot;
        if !checked.present {
            if let Event::Store(stored) = event
                && self.is_unused(slot)
            {
                let refused = self.writer.store(slot, &stored.blocks()).refused;
                assert_eq!(refused, Some(Refusal::UnknownWorker));
            }
            return;
        }
        let outcome = event.apply_to_writer(&mut self.writer, slot);
        if let (Event::Store(stored), Outcome::Stored(outcome)) = (event, outcome) {
            assert!(outcome.dormant == 0 || outcome.dormant == outcome.stored, "a part is dormant: {outcome:?}");
            if outcome.refused.is_some_and(is_implementation_limit) {
                let without = checked.oracle.clone().store(&self.limits, &stored.blocks());
                assert_eq!(without.refused, None, "the writer checks the limit of {outcome:?} last");
                if outcome.refused == Some(Refusal::WorkBound) {
                    checked.oracle.clear(None);
                }
                return;
            }
            if outcome.stored > 0 {
                assert_eq!(self.writer.seed_of(slot, stored.hashes[0]), Some(stored.seed));
                assert!(stored.parent.is_none_or(|parent| self.writer.seed_of(slot, parent).is_some()));
            }
        }
        let expected = event.apply_to_oracle(&mut checked.oracle, &self.limits);
        assert_eq!(outcome.without_dormant(), expected, "{event}");
    }

    /// The slot of a worker, and its model.
    pub(crate) fn worker(&self, worker: usize) -> (WorkerSlot, &Oracle) {
        (self.workers[worker].slot, &self.workers[worker].oracle)
    }

    fn is_unused(&self, slot: WorkerSlot) -> bool {
        !self.workers.iter().any(|checked| checked.present && checked.slot == slot)
    }

    fn remove_worker(&mut self, worker: usize) {
        let checked = &mut self.workers[worker];
        if std::mem::replace(&mut checked.present, false) {
            checked.oracle = Oracle::default();
            self.writer.remove_worker(checked.slot);
        }
    }

    fn add_worker(&mut self, worker: usize) {
        if !self.workers[worker].present {
            let (slot, publishes) = slot_for_worker(&mut self.writer);
            self.publishes += publishes;
            assert!(self.is_unused(slot), "slot {slot} is given out twice");
            let checked = &mut self.workers[worker];
            (checked.slot, checked.present) = (slot, true);
        }
    }

    pub(crate) fn publish(&mut self) {
        self.writer.publish();
        self.publishes += 1 + publish_until_unchoked(&mut self.writer);
    }

    /// Compares what readers see of every worker, and the writer's figures, with the models.
    pub(crate) fn check(&mut self) {
        (0..self.workers.len()).for_each(|worker| self.check_figures(worker));
        self.check_answers();
    }

    fn check_answers(&mut self) {
        for checked in &mut self.workers {
            let (oracle, queries) = (&checked.oracle, &self.queries);
            checked.answers.get_or_insert_with(|| queries.iter().map(|query| oracle.depths(query)).collect());
        }
        for (at, query) in self.queries.iter().enumerate() {
            let lookup = self.reader.lookup(query, &mut self.depths);
            assert!(!lookup.contended, "contended without a writer at work");
            assert_eq!(lookup.epoch, self.publishes, "the epoch is the number of publishes");
            for (worker, checked) in self.workers.iter().enumerate() {
                if !checked.present && !self.is_unused(checked.slot) {
                    continue;
                }
                let expected = checked.answers.as_ref().expect("computed above")[at];
                let depths = self.depths.of(SHARD, checked.slot);
                assert_eq!(depths, expected, "worker {worker}, query {}", numbers(query));
                assert_eq!(self.depths.device(SHARD, checked.slot), expected.device);
            }
        }
        self.check_usable();
    }

    /// Compares the answers for prompts of whole blocks, the last of which an engine computes anew.
    fn check_usable(&mut self) {
        if self.workers.iter().all(|checked| checked.oracle.windows.is_empty()) {
            return;
        }
        for query in self.queries.iter().filter(|query| !query.is_empty()) {
            self.reader.lookup_usable(query, query.len() as u32 - 1, &mut self.depths);
            for (worker, checked) in self.workers.iter().enumerate().filter(|(_, checked)| checked.present) {
                let expected = checked.oracle.depths_usable(query, query.len() - 1);
                let depths = self.depths.of(SHARD, checked.slot);
                assert_eq!(depths, expected, "worker {worker}, query {} but its last block", numbers(query));
            }
        }
    }

    fn check_figures(&self, worker: usize) {
        let checked = &self.workers[worker];
        if !checked.present && !self.is_unused(checked.slot) {
            return;
        }
        let (figures, expected) = (self.writer.held(checked.slot), checked.oracle.held());
        assert!(figures.dormant <= expected.dormant, "worker {worker}: {figures:?} against {expected:?}");
        assert_eq!(WorkerBlocks { dormant: 0, ..figures }, WorkerBlocks { dormant: 0, ..expected }, "worker {worker}");
        for (hash, binding) in &checked.oracle.bindings {
            assert_eq!(self.writer.binding_of(checked.slot, *hash), Some(*binding), "worker {worker}, {hash}");
        }
        let unbound = (0..NAMES_CHECKED).map(EngineHash).filter(|hash| !checked.oracle.bindings.contains_key(hash));
        for hash in unbound {
            assert_eq!(self.writer.binding_of(checked.slot, hash), None, "worker {worker}, {hash}");
        }
        for (tier, held) in Tier::ALL.into_iter().zip(expected.by_tier) {
            assert_eq!(self.writer.digest(checked.slot, tier).blocks, held, "worker {worker}, {tier}");
        }
    }
}
