//! A shard beside one model for each of its workers. Any difference is a panic.

use super::Oracle;
use super::event::{Event, Outcome};
use kvrouted::ids::{EngineHash, LocalHash, ShardId, Tier, TierBlocks, WorkerSlot};
use kvrouted::index::{Depths, IndexReader, Refusal, ShardLimits, ShardWriter, WorkerBlocks, shard};

/// A query as it is short to read.
pub(crate) fn numbers(query: &[LocalHash]) -> String {
    let blocks: Vec<String> = query.iter().map(ToString::to_string).collect();
    format!("[{}]", blocks.join(", "))
}

const SHARD: ShardId = ShardId(0);
/// Engine hashes that are asked for whether they are bound or not: streams use small numbers.
const NAMES_ASKED: u64 = 16;
/// Times that a removed worker's slot is waited for, with a sweep and a publish each.
const SLOT_WAITS_MAX: usize = 10_000;

/// Reasons that follow from how the index is built, which the model does not know. They come last.
pub(crate) fn is_the_writers_own(refusal: Refusal) -> bool {
    matches!(
        refusal,
        Refusal::DormantBound
            | Refusal::PositionBound
            | Refusal::BytesBound
            | Refusal::MemoryBound
            | Refusal::WorkBound
    )
}

/// A slot for a worker. That of a removed one is free again once its blocks have been swept and no reader
/// can be looking at them. Also says how many publishes that took.
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

/// Times that a choked writer publishes, giving way to readers each time, before that counts as a failure.
const CHOKED_PUBLISHES_MAX: u64 = 1_000_000;

/// Publishes until the writer may take more batches; how often that was.
pub(crate) fn relieve(writer: &mut ShardWriter) -> u64 {
    let mut publishes = 0;
    while writer.is_choked() {
        assert!(publishes < CHOKED_PUBLISHES_MAX, "the writer stays choked");
        std::thread::yield_now();
        writer.publish();
        publishes += 1;
    }
    publishes
}

pub(crate) struct Twin {
    limits: ShardLimits,
    pub(crate) writer: ShardWriter,
    pub(crate) reader: IndexReader,
    depths: Depths,
    members: Vec<Member>,
    queries: Vec<Vec<LocalHash>>,
    publishes: u64,
}

struct Member {
    /// Also after it was removed.
    slot: WorkerSlot,
    present: bool,
    oracle: Oracle,
    /// The model's answers to the queries; worked out again when something happened.
    answers: Option<Vec<TierBlocks>>,
}

impl Twin {
    pub(crate) fn new(limits: ShardLimits, workers: usize, queries: &[Vec<LocalHash>]) -> Self {
        let (mut writer, reader) = shard(SHARD, limits);
        let mut member = |_| {
            let slot = writer.add_worker().expect("room");
            Member { slot, present: true, oracle: Oracle::default(), answers: None }
        };
        let members = (0..workers).map(&mut member).collect();
        let (reader, depths, queries) = (IndexReader::new(vec![reader]), Depths::new(), queries.to_vec());
        Self { limits, writer, reader, depths, members, queries, publishes: 0 }
    }

    /// A shard that takes `events`, looked at after every `every`-th and at the end. `reached` is how far it got.
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
            self.members[worker].answers = None;
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
        let Some(member) = event.worker().map(|worker| &mut self.members[worker]) else { return };
        let slot = member.slot;
        if !member.present {
            if let Event::Store(stored) = event
                && self.is_nobodys(slot)
            {
                let refused = self.writer.store(slot, &stored.blocks()).refused;
                assert_eq!(refused, Some(Refusal::UnknownWorker));
            }
            return;
        }
        let outcome = event.apply_to_writer(&mut self.writer, slot);
        if let (Event::Store(stored), Outcome::Stored(outcome)) = (event, outcome) {
            assert!(outcome.dormant == 0 || outcome.dormant == outcome.stored, "a part is dormant: {outcome:?}");
            if outcome.refused.is_some_and(is_the_writers_own) {
                let without = member.oracle.clone().store(&self.limits, &stored.blocks());
                assert_eq!(without.refused, None, "{outcome:?} comes last");
                if outcome.refused == Some(Refusal::WorkBound) {
                    member.oracle.clear(None);
                }
                return;
            }
            if outcome.stored > 0 {
                assert_eq!(self.writer.seed_of(slot, stored.hashes[0]), Some(stored.seed));
                assert!(stored.parent.is_none_or(|parent| self.writer.seed_of(slot, parent).is_some()));
            }
        }
        let expected = event.apply_to_oracle(&mut member.oracle, &self.limits);
        assert_eq!(outcome.as_the_model_tells(), expected, "{event}");
    }

    /// The slot of a worker, and its model.
    pub(crate) fn worker(&self, worker: usize) -> (WorkerSlot, &Oracle) {
        (self.members[worker].slot, &self.members[worker].oracle)
    }

    fn is_nobodys(&self, slot: WorkerSlot) -> bool {
        !self.members.iter().any(|member| member.present && member.slot == slot)
    }

    fn remove_worker(&mut self, worker: usize) {
        let member = &mut self.members[worker];
        if std::mem::replace(&mut member.present, false) {
            member.oracle = Oracle::default();
            self.writer.remove_worker(member.slot);
        }
    }

    fn add_worker(&mut self, worker: usize) {
        if !self.members[worker].present {
            let (slot, publishes) = slot_for_worker(&mut self.writer);
            self.publishes += publishes;
            assert!(self.is_nobodys(slot), "slot {slot} is given out twice");
            let member = &mut self.members[worker];
            (member.slot, member.present) = (slot, true);
        }
    }

    pub(crate) fn publish(&mut self) {
        self.writer.publish();
        self.publishes += 1 + relieve(&mut self.writer);
    }

    /// What readers see of every worker, and the writer's figures, against the models.
    pub(crate) fn check(&mut self) {
        (0..self.members.len()).for_each(|worker| self.check_figures(worker));
        self.check_answers();
    }

    fn check_answers(&mut self) {
        for member in &mut self.members {
            let (oracle, queries) = (&member.oracle, &self.queries);
            member.answers.get_or_insert_with(|| queries.iter().map(|query| oracle.depths(query)).collect());
        }
        for (at, query) in self.queries.iter().enumerate() {
            let lookup = self.reader.lookup(query, &mut self.depths);
            assert!(!lookup.contended, "contended without a writer at work");
            assert_eq!(lookup.epoch, self.publishes, "the epoch is the number of publishes");
            for (worker, member) in self.members.iter().enumerate() {
                if !member.present && !self.is_nobodys(member.slot) {
                    continue;
                }
                let expected = member.answers.as_ref().expect("worked out above")[at];
                let depths = self.depths.of(SHARD, member.slot);
                assert_eq!(depths, expected, "worker {worker}, query {}", numbers(query));
                assert_eq!(self.depths.device(SHARD, member.slot), expected.device);
            }
        }
        self.check_usable();
    }

    /// Prompts of whole blocks, the last of which an engine computes anew.
    fn check_usable(&mut self) {
        if self.members.iter().all(|member| member.oracle.windows.is_empty()) {
            return;
        }
        for query in self.queries.iter().filter(|query| !query.is_empty()) {
            self.reader.lookup_usable(query, query.len() as u32 - 1, &mut self.depths);
            for (worker, member) in self.members.iter().enumerate().filter(|(_, member)| member.present) {
                let expected = member.oracle.depths_usable(query, query.len() - 1);
                let depths = self.depths.of(SHARD, member.slot);
                assert_eq!(depths, expected, "worker {worker}, query {} but its last block", numbers(query));
            }
        }
    }

    fn check_figures(&self, worker: usize) {
        let member = &self.members[worker];
        if !member.present && !self.is_nobodys(member.slot) {
            return;
        }
        let (figures, expected) = (self.writer.held(member.slot), member.oracle.held());
        assert!(figures.dormant <= expected.dormant, "worker {worker}: {figures:?} against {expected:?}");
        assert_eq!(WorkerBlocks { dormant: 0, ..figures }, WorkerBlocks { dormant: 0, ..expected }, "worker {worker}");
        for (hash, binding) in &member.oracle.bindings {
            assert_eq!(self.writer.binding_of(member.slot, *hash), Some(*binding), "worker {worker}, {hash}");
        }
        let unbound = (0..NAMES_ASKED).map(EngineHash).filter(|hash| !member.oracle.bindings.contains_key(hash));
        for hash in unbound {
            assert_eq!(self.writer.binding_of(member.slot, hash), None, "worker {worker}, {hash}");
        }
        for (tier, held) in Tier::ALL.into_iter().zip(expected.by_tier) {
            assert_eq!(self.writer.digest(member.slot, tier).blocks, held, "worker {worker}, {tier}");
        }
    }
}
