//! A whole run of one core from one seed: engines store and evict, gateways ask, book and free, workers drain.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use rand::{Rng, RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::fleet::{DeviceClass, FleetTable, PoolRole, SchemeCell, Space, TrustCell, WorkerRecord, WorkerState};
use crate::hash;
use crate::ids::{DpRank, EngineHash, EventSeq, GroupId, Scheme, ShardId, SpaceId, Tier, Window, Worker, WorkerIndex};
use crate::index::{IndexReader, ShardLimits, ShardWriter, StoreBlocks, shard};
use crate::journal::{DecisionRecord, Encoder, Origin, RequestIdentity};
use crate::load::{BookingHandle, BookingRef, Demand, EndedBooking, Loads, LoadsConfig, SessionId};
use crate::route::{
    AffinityMode, AffinityPolicy, AffinityTable, BookingRequest, BusyThresholds, Decision, Draws, Mode, Observation,
    Overrides, Policy, Prompt, RouteRequest, Scratch, View, decide, seconds,
};
use crate::trust::{Trust, TrustLevel, TrustReason};

const SCHEME: Scheme = Scheme { block_size: 4, window: Window::Plain };
const WORKERS: u32 = 7;
/// Conversations whose beginnings are the prompts.
const CONVERSATIONS: u32 = 5;
const PROMPT_TOKENS: std::ops::Range<u32> = 3..90;
const STEP_NS: u64 = 1_000_000;

pub(crate) struct Simulation {
    pub(crate) policy: Policy,
    rng: Xoshiro256PlusPlus,
    fleet: FleetTable,
    writer: ShardWriter,
    indexes: Vec<IndexReader>,
    loads: Loads,
    session: SessionId,
    round_robin_counters: [AtomicU64; 1],
    affinities: AffinityTable,
    live: Vec<BookingHandle>,
    scratch: Scratch,
    steps: u64,
}

/// The journal of a run of `decisions` decisions.
pub(crate) fn journal_of(seed: u64, decisions: usize) -> Vec<u8> {
    let mut simulation = Simulation::new(seed);
    let mut file = Vec::new();
    let origin =
        Origin { release: "0".into(), instance_id: seed, started_unix_ms: 1, sample: 1.0, ..Origin::default() };
    let mut encoder = Encoder::begin(&origin, &mut file);
    for at in 0..decisions {
        if at % 11 == 7 {
            encoder.gap(0, at as u64, &mut file);
        }
        let record = simulation.step();
        encoder.decision(0, &record, &mut file);
        simulation.ended().iter().for_each(|ended| encoder.ended(ended, &mut file));
    }
    encoder.end(&mut file);
    file
}

fn record(writer: &mut ShardWriter, index: u32) -> WorkerRecord {
    let reasons = [TrustReason::Gap].into_iter().collect();
    let trust = Trust {
        level: if index.is_multiple_of(3) { TrustLevel::LowerBound } else { TrustLevel::Exact },
        reasons: if index.is_multiple_of(3) { reasons } else { Default::default() },
        since_unix_ms: 5,
        as_of_seq: index.is_multiple_of(2).then_some(EventSeq(u64::from(index) * 1000)),
        as_of_unix_ms: 6,
    };
    WorkerRecord {
        index: WorkerIndex::at(index as u16, index),
        worker: Worker::new(u64::from(index) + 1, index % 2),
        space: SpaceId(0),
        name: format!("w{index}"),
        shard: ShardId(0),
        slot: writer.add_worker().expect("room"),
        capacity_blocks: 1000,
        batched_tokens_max: 8192,
        device_class: if index.is_multiple_of(4) { DeviceClass::Cpu } else { DeviceClass::Gpu },
        weight: 1.0 + f64::from(index) / 3.0,
        taints: Vec::new(),
        loras: Vec::new(),
        state: WorkerState::Ready,
        trust: Arc::new(TrustCell::new(trust)),
        events: None,
    }
}

impl Simulation {
    pub(crate) fn new(seed: u64) -> Self {
        let (mut writer, reader) = shard(ShardId(0), ShardLimits::default());
        let workers: Vec<_> = (0..WORKERS).map(|index| record(&mut writer, index)).collect();
        let space = Space {
            id: SpaceId(0),
            model: "m".into(),
            namespace: String::new(),
            role: PoolRole::Both,
            scheme: Arc::new(SchemeCell::new(Some(SCHEME))),
        };
        let loads = Loads::new(0, LoadsConfig { ended_waiting_max: 1 << 10, ..LoadsConfig::default() });
        workers.iter().for_each(|record| loads.admit(record.index));
        let session = loads.open_session(None, 0).expect("room");
        Self {
            policy: Policy::default(),
            rng: Xoshiro256PlusPlus::seed_from_u64(seed),
            fleet: FleetTable { version: 1, spaces: vec![space], workers },
            writer,
            indexes: vec![IndexReader::new(vec![reader])],
            loads,
            session,
            round_robin_counters: Default::default(),
            affinities: AffinityTable::new(64, 0),
            live: Vec::new(),
            scratch: Scratch::default(),
            steps: 0,
        }
    }

    fn prompt(&mut self) -> Vec<u32> {
        let (conversation, tokens) = (self.rng.random_range(0..CONVERSATIONS), self.rng.random_range(PROMPT_TOKENS));
        (0..tokens).map(|at| conversation * 7919 + at * 31).collect()
    }

    /// A worker stores the beginning of a prompt.
    fn store(&mut self) {
        let (prompt, seed) = (self.prompt(), hash::seed(None, None));
        let mut locals = Vec::new();
        hash::local_hashes(SCHEME, seed, bytemuck::cast_slice(&prompt), &[], &mut locals);
        let hashes: Vec<_> = locals.iter().map(|local| EngineHash(local.0)).collect();
        let worker = self.rng.random_range(0..WORKERS) as usize;
        let tier = if self.rng.random_range(0..4) == 0 { Tier::Host } else { Tier::Device };
        let slot = self.fleet.workers[worker].slot;
        self.writer.begin_batch(slot);
        let blocks = StoreBlocks { parent: None, hashes: &hashes, locals: &locals, tier, group: GroupId(0), seed };
        self.writer.store(slot, &blocks);
        self.writer.publish();
    }

    /// The events between two requests.
    fn pass(&mut self) {
        for _ in 0..self.rng.random_range(0..3) {
            self.store();
        }
        while self.live.len() > 12 || (!self.live.is_empty() && self.rng.random_range(0..3) == 0) {
            let at = self.rng.random_range(0..self.live.len());
            let booking = BookingRef::Handle(self.live.swap_remove(at));
            let now_ns = self.steps * STEP_NS;
            self.loads.prefill_complete(self.session, booking, 0, now_ns);
            self.loads.free(self.session, booking, now_ns);
        }
        if self.rng.random_range(0..9) == 0 {
            let worker = self.rng.random_range(0..WORKERS) as usize;
            let drains = self.fleet.workers[worker].state == WorkerState::Ready;
            self.fleet.workers[worker].state = if drains { WorkerState::Draining } else { WorkerState::Ready };
            self.fleet.version += 1;
        }
        if self.rng.random_range(0..15) == 0 {
            let device_credit = f64::from(self.rng.random_range(0..20)) / 10.0;
            let mode = Mode::ALL[self.rng.random_range(0..Mode::ALL.len())];
            let mode = if matches!(mode, Mode::Direct | Mode::Approximate) { Mode::Kv } else { mode };
            let temperature = f64::from(self.rng.random_range(0..3)) / 4.0;
            self.policy = Policy {
                version: self.policy.version + 1,
                mode,
                device_credit,
                temperature,
                capability: self.rng.random(),
                trust_min: if self.rng.random() { TrustLevel::Exact } else { TrustLevel::None },
                busy: BusyThresholds { decode_blocks_share: Some(0.05), ..BusyThresholds::default() },
                affinity: AffinityPolicy {
                    mode: AffinityMode::ALL[self.rng.random_range(0..AffinityMode::ALL.len())],
                    load_max: f64::from(self.rng.random_range(4..12)) / 4.0,
                    ..self.policy.affinity
                },
                ..self.policy
            };
        }
    }

    /// Decides one request, and usually books it.
    pub(crate) fn decide(&mut self) -> Decision {
        self.pass();
        self.steps += 1;
        let (prompt, draws) = (self.prompt(), Draws::new(self.rng.next_u64()));
        let name = format!("r{}", self.steps);
        let book = (self.rng.random_range(0..5) > 0).then_some(BookingRequest { request_id: &name, attempt: 0 });
        let allowed = [Worker::new(1, 0), Worker::new(2, 1), Worker::new(5, 0)];
        let allow = (self.rng.random_range(0..6) == 0).then_some(&allowed[..]);
        let pin = (self.rng.random_range(0..9) == 0).then(|| Worker { rank: DpRank(u32::MAX), ..allowed[1] });
        let device_credit = (self.rng.random_range(0..4) == 0).then_some(0.3);
        let overrides = Overrides { device_credit, ..Overrides::NONE };
        let session = format!("s{}", self.rng.random_range(0..4));
        let affinity_session = self.rng.random::<bool>().then_some(session.as_str());
        let plain = RouteRequest::new(SpaceId(0), Prompt::of_tokens(&prompt));
        let request = RouteRequest { book, allow, pin, overrides, affinity_session, ..plain };
        let view = View {
            fleet: &self.fleet,
            indexes: &self.indexes,
            predictions: &[],
            loads: &self.loads,
            policy: &self.policy,
            round_robin_counters: &self.round_robin_counters,
            affinities: &self.affinities,
            now_ns: self.steps * STEP_NS,
        };
        let mut decision = Decision::default();
        decide(&view, &request, &mut self.scratch, draws, &mut decision).expect("a decision");
        if let (Some(book), Some(chosen)) = (book, decision.candidates.first()) {
            let demand = Demand { is_recorded: true, ..self.scratch.demand(&request, &decision, chosen) };
            let now_ns = self.steps * STEP_NS;
            let booked = self.loads.book(self.session, book.request_id, 0, chosen.index, demand, now_ns);
            let handle = booked.expect("room").handle;
            self.live.push(handle);
            decision.booking = Some(handle);
            let ttl_s = self.policy.affinity.ttl_s;
            self.affinities.bind(SpaceId(0), &session, (chosen.worker, 0), seconds(now_ns), ttl_s);
        }
        decision
    }

    /// The observation of the last decision.
    pub(crate) fn observation(&self) -> &Observation {
        self.scratch.observation()
    }

    /// The next decision, as a record.
    pub(crate) fn step(&mut self) -> DecisionRecord {
        let decision = self.decide();
        let mut record = DecisionRecord::default();
        let at = (self.steps * STEP_NS, SpaceId(0));
        record.copy_from(at, &self.policy, self.scratch.observation(), &decision);
        let conversation = self.rng.random_range(0..CONVERSATIONS);
        let prefix = (0..self.rng.random_range(0..20)).map(|at| u64::from(conversation) << 32 | at).collect();
        record.identity = RequestIdentity {
            booking: decision.booking.map(|handle| handle.generation),
            session: self.rng.random::<bool>().then(|| self.rng.next_u64() >> 1),
            waited_ns: self.rng.random_range(0..3) * 1_000,
            expected_output_tokens: self.rng.random_range(0..100),
            prefix_tokens: 64,
            prefix,
        };
        record
    }

    /// The bookings that have ended since the last call.
    pub(crate) fn ended(&self) -> Vec<EndedBooking> {
        std::iter::from_fn(|| self.loads.take_ended()).collect()
    }
}
