//! The router of a simulated fleet: the product's own index, bookings and decision, under virtual time. It learns only
//! what a real router learns: what it booked, first tokens, ends, and the engines' KV events.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;

use super::engine::KvEvent;
use super::peer_rules::{Booked, Candidate, Question, Rule};
use super::prompt_blocks::Block;
use super::spec::EngineSpec;
use crate::fleet::{FleetTable, PoolRole, SchemeCell, Space, WorkerRecord, WorkerState};
use crate::hash;
use crate::ids::{
    EngineHash, GroupId, LocalHash, Scheme, ShardId, SpaceId, Tier, TierBlocks, Window, Worker, WorkerIndex,
};
use crate::index::{IndexReader, ShardLimits, ShardWriter, StoreBlocks, shard};
use crate::load::{BookingHandle, BookingRef, Demand, Loads, LoadsConfig, PromptBlocks, SessionId};
use crate::route::{
    AffinityTable, Decision, Draws, Policy, Prompt, RouteRequest, Scratch, View, WorkerFacts, decide, demand,
};

/// Who decides.
pub(super) enum Decider {
    /// The product's own decision, under a policy.
    Product(Box<Policy>),
    /// Another system's rule, with the same facts.
    Peer(Box<dyn Rule>),
}

/// A request that was sent to a worker.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    pub(super) worker: usize,
    pub(super) handle: BookingHandle,
    /// Tokens of the prompt that the index says the worker holds.
    pub(super) held_tokens: u32,
    /// Predicted time to the first token; NaN = not predicted.
    pub(super) predicted_ttft_s: f64,
}

/// A decision, and what it books.
struct Choice<'a> {
    worker: WorkerIndex,
    held_tokens: u32,
    demand: Demand<'a>,
    predicted_ttft_s: f64,
}

/// What a peer's rule chooses among `workers`; `None` if there are none.
fn chosen_by<'a>(
    rule: &mut dyn Rule,
    question: &Question<'_>,
    workers: impl Iterator<Item = WorkerFacts>,
    booked: &[Booked],
    (block_size, locals): (u32, &'a [LocalHash]),
    chance: &mut Xoshiro256PlusPlus,
) -> Option<Choice<'a>> {
    let prompt_tokens = question.prompt_tokens;
    let candidate = |facts: WorkerFacts| {
        let TierBlocks { device, host, disk, external } = facts.overlap;
        Candidate {
            worker: facts.index.0 as usize,
            held_tokens: ((device + host + disk + external) * block_size).min(prompt_tokens),
            running_tokens: (facts.active_depth_blocks * block_size).min(prompt_tokens),
            prefill_tokens: facts.load.prefill_tokens,
            requests: facts.load.requests,
            kv_tokens: facts.load.decode_blocks * u64::from(block_size),
            capacity_tokens: facts.capacity_blocks * u64::from(block_size),
            booked: &booked[facts.index.0 as usize],
        }
    };
    let candidates: Vec<Candidate<'_>> = workers.map(candidate).collect();
    if candidates.is_empty() {
        return None;
    }
    let chosen = candidates[rule.choose(question, &candidates, chance)];
    let cached_tokens = u64::from(chosen.held_tokens);
    let demand = Demand {
        space: SpaceId(0),
        prefill_tokens: u64::from(prompt_tokens) - cached_tokens,
        cached_tokens,
        blocks: PromptBlocks::Shared(locals),
        block_size,
        expected_output_tokens: 0,
        is_recorded: false,
    };
    let worker = WorkerIndex(chosen.worker as u32);
    Some(Choice { worker, held_tokens: chosen.held_tokens, demand, predicted_ttft_s: rule.predicted_ttft_s() })
}

pub(super) struct Router {
    fleet: FleetTable,
    indexes: [IndexReader; 1],
    writer: ShardWriter,
    loads: Loads,
    session: SessionId,
    decider: Decider,
    affinities: AffinityTable,
    counters: Vec<AtomicU64>,
    scratch: Scratch,
    decision: Decision,
    chance: Xoshiro256PlusPlus,
    seed: u64,
    scheme: Scheme,
    booked: Vec<Booked>,
    hashes: Vec<EngineHash>,
    locals: Vec<LocalHash>,
    bytes: Vec<u8>,
}

impl Router {
    pub(super) fn new(specs: &[EngineSpec], decider: Decider, prior_factor: Option<f64>, seed: u64) -> Self {
        let block_size = specs.first().map_or(16, |spec| spec.block_size);
        let scheme = Scheme { block_size, window: Window::Plain };
        let limits =
            ShardLimits { worker_blocks_max: u64::MAX / 4, worker_bytes_max: u64::MAX / 4, ..Default::default() };
        let (mut writer, reader) = shard(ShardId(0), limits);
        let record = |(at, spec): (usize, &EngineSpec)| {
            let slot = writer.add_worker().expect("a shard has room for a simulated fleet");
            WorkerRecord {
                name: format!("w{at}"),
                batched_tokens_max: u64::from(spec.step_tokens_max),
                capacity_blocks: spec.kv_tokens / u64::from(block_size),
                ..WorkerRecord::new(WorkerIndex(at as u32), Worker::new(at as u64 + 1, 0), slot)
            }
        };
        let workers: Vec<_> = specs.iter().enumerate().map(record).collect();
        let space = Space {
            id: SpaceId(0),
            model: "m".into(),
            namespace: String::new(),
            role: PoolRole::Both,
            scheme: Arc::new(SchemeCell::new(Some(scheme))),
        };
        let loads = Loads::new(workers.len(), LoadsConfig { age_ms_max: u64::MAX / 2, ..LoadsConfig::default() });
        for (record, spec) in workers.iter().zip(specs) {
            let prior = prior_factor.map(|factor| spec.law.prefill.slowed(factor));
            loads.set_prefill_class(record.index, &spec.class, prior);
        }
        let session = loads.open_session(None, 0).expect("the first session of a table");
        Self {
            booked: vec![Booked::default(); workers.len()],
            fleet: FleetTable { version: 1, spaces: vec![space], workers },
            indexes: [IndexReader::new(vec![reader])],
            writer,
            loads,
            session,
            decider,
            affinities: AffinityTable::new(8, 0),
            counters: vec![AtomicU64::new(0)],
            scratch: Scratch::default(),
            decision: Decision::default(),
            chance: Xoshiro256PlusPlus::seed_from_u64(seed),
            seed,
            scheme,
            hashes: Vec::new(),
            locals: Vec::new(),
            bytes: Vec::new(),
        }
    }

    /// Chooses a worker for request `id` and books it. `None`: no worker may run it.
    pub(super) fn send(&mut self, id: u64, blocks: &[Block], prompt_tokens: u32, now_ns: u64) -> Option<Sent> {
        let whole = &blocks[..(prompt_tokens / self.scheme.block_size) as usize];
        self.bytes.clear();
        whole.iter().for_each(|block| self.bytes.extend_from_slice(&block.local.to_le_bytes()));
        let prompt = Prompt::LocalHashes { hashes: &self.bytes, scheme: self.scheme, token_count: prompt_tokens };
        let request = RouteRequest { candidates_max: 1, ..RouteRequest::new(SpaceId(0), prompt) };
        let fallback = Policy::default();
        let view = View {
            fleet: &self.fleet,
            indexes: &self.indexes,
            predictions: &[],
            loads: &self.loads,
            policy: match &self.decider {
                Decider::Product(policy) => policy,
                Decider::Peer(_) => &fallback,
            },
            round_robin_counters: &self.counters,
            affinities: &self.affinities,
            now_ns,
        };
        self.seed = self.seed.wrapping_add(1);
        decide(&view, &request, &mut self.scratch, Draws::new(self.seed), &mut self.decision).ok()?;
        let block_size = self.scheme.block_size;
        let locals = self.scratch.shared_locals(&self.decision);
        let choice = match &mut self.decider {
            Decider::Product(_) => {
                let chosen = self.decision.candidates.first()?;
                let terms = &chosen.terms;
                Choice {
                    worker: chosen.index,
                    held_tokens: chosen.overlap.device * block_size,
                    demand: demand(&request, &self.decision, chosen, block_size, locals),
                    predicted_ttft_s: terms.queue_s + terms.prefill_s + terms.fetch_s,
                }
            }
            Decider::Peer(rule) => {
                let rows = self.decision.eligible_rows.iter();
                let workers = rows.map(|row| self.scratch.observation().workers.row(*row as usize));
                let question = Question { id, prompt_tokens, blocks: whole, now_ns };
                chosen_by(rule.as_mut(), &question, workers, &self.booked, (block_size, locals), &mut self.chance)?
            }
        };
        let name = format!("{id:x}");
        let booked = self.loads.book(self.session, &name, 0, choice.worker, choice.demand, now_ns).ok()?;
        let worker = choice.worker.0 as usize;
        let of_worker = &mut self.booked[worker];
        if of_worker.prefills.is_empty() {
            of_worker.since_ns = now_ns;
        }
        let held_tokens = choice.held_tokens.min(prompt_tokens.saturating_sub(1));
        of_worker.prefills.push((id, prompt_tokens - held_tokens, held_tokens, now_ns));
        of_worker.requests += 1;
        Some(Sent { worker, handle: booked.handle, held_tokens, predicted_ttft_s: choice.predicted_ttft_s })
    }

    pub(super) fn first_token(&mut self, id: u64, sent: &Sent, now_ns: u64) {
        self.loads.prefill_complete(self.session, BookingRef::Handle(sent.handle), 0, now_ns);
        self.end_prefill(id, sent.worker, now_ns);
    }

    fn end_prefill(&mut self, id: u64, worker: usize, now_ns: u64) {
        let booked = &mut self.booked[worker];
        if let Some(at) = booked.prefills.iter().position(|prefill| prefill.0 == id) {
            booked.prefills.remove(at);
            if at == 0 {
                booked.since_ns = now_ns;
            }
        }
    }

    pub(super) fn end(&mut self, id: u64, sent: &Sent, now_ns: u64) {
        self.loads.free(self.session, BookingRef::Handle(sent.handle), now_ns);
        self.end_prefill(id, sent.worker, now_ns);
        self.booked[sent.worker].requests -= 1;
    }

    /// Applies a batch of a worker's events to the index.
    pub(super) fn apply(&mut self, worker: usize, events: &[KvEvent]) {
        let slot = self.fleet.workers[worker].slot;
        let seed = hash::seed(None, None);
        self.writer.begin_batch(slot);
        for event in events {
            match event {
                KvEvent::Stored { tier, blocks, from, to } => {
                    let parent = from.checked_sub(1).map(|at| EngineHash(blocks[at as usize].chain));
                    let stored = &blocks[*from as usize..*to as usize];
                    self.hashes.clear();
                    self.locals.clear();
                    self.hashes.extend(stored.iter().map(|block| EngineHash(block.chain)));
                    self.locals.extend(stored.iter().map(|block| LocalHash(block.local)));
                    let (hashes, locals) = (&self.hashes, &self.locals);
                    self.writer
                        .store(slot, &StoreBlocks { parent, hashes, locals, tier: *tier, group: GroupId(0), seed });
                }
                KvEvent::Removed { tier, chains } => {
                    self.hashes.clear();
                    self.hashes.extend(chains.iter().map(|chain| EngineHash(*chain)));
                    self.writer.remove(slot, *tier, GroupId(0), &self.hashes);
                }
                KvEvent::Copied { tier, chains } => {
                    for chain in chains {
                        let name = EngineHash(*chain);
                        let Some(binding) = self.writer.binding_of(slot, name) else { continue };
                        let (hashes, locals) = (&[name], &[binding.local]);
                        let (parent, tier) = (binding.parent, *tier);
                        self.writer.store(slot, &StoreBlocks { parent, hashes, locals, tier, group: GroupId(0), seed });
                    }
                }
            }
        }
        self.writer.publish();
        self.writer.sweep(1 << 16);
    }

    /// A worker leaves the fleet, and what it held is gone; or it is back, cold.
    pub(super) fn set_present(&mut self, worker: usize, is_present: bool) {
        let slot = self.fleet.workers[worker].slot;
        self.fleet.workers[worker].state = if is_present { WorkerState::Ready } else { WorkerState::Down };
        self.fleet.version += 1;
        if !is_present {
            for tier in [Tier::Device, Tier::Host, Tier::Disk, Tier::External] {
                self.writer.clear(slot, Some(tier));
            }
            self.writer.publish();
        }
    }
}
