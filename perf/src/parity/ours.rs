//! kvrouted's side of a case: its own index, loads and decision, as the daemon uses them.

use kvrouted::error::Kind;
use kvrouted::fleet::{FleetTable, PoolRole};
use kvrouted::hash;
use kvrouted::ids::{EngineHash, GroupId, LocalHash, Scheme, ShardId, Tier, Window, Worker, WorkerSlot};
use kvrouted::index::{IndexReader, ShardLimits, ShardWriter, StoreBlocks, shard};
use kvrouted::limits::CANDIDATES_MAX;
use kvrouted::load::{BookingRef, Loads, LoadsConfig, PrefillModel, SessionId};
use kvrouted::route::{
    AffinityTable, BookingRequest, BusyThresholds, Decision, Draws, Names, Overrides, Policy, Preferences, Prompt,
    RouteRequest, Scratch, View, decide, judge,
};

use super::answer::{Answer, Refusal};
use super::case::{Ask, Case, Held, Rank, Step, Text};
use crate::failure::Failure;
use crate::mix::mix;
use crate::table::{SPACE, record, table};

const TIERS: [Tier; 4] = [Tier::Device, Tier::Host, Tier::Disk, Tier::External];

/// A case as kvrouted sees it when the question comes.
pub(crate) struct Ours<'a> {
    case: &'a Case,
    fleet: FleetTable,
    indexes: [IndexReader; 1],
    loads: Loads,
    affinities: AffinityTable,
    policy: Policy,
    session: SessionId,
    scratch: Scratch,
    decision: Decision,
    _writer: ShardWriter,
}

impl<'a> Ours<'a> {
    /// Fills the caches and plays what happened before.
    ///
    /// # Errors
    /// Something was refused that never should be.
    pub(crate) fn new(case: &'a Case) -> Result<Self, Failure> {
        let window = if case.bigram { Window::Bigram } else { Window::Plain };
        let scheme = Scheme { block_size: case.block_size, window };
        let (mut writer, reader) = shard(ShardId(0), ShardLimits::default());
        let mut workers = Vec::new();
        for (place, (rank, engine)) in case.ranks().enumerate() {
            let slot = writer.add_worker().ok_or_else(|| Failure::Contract("no room for a worker".to_owned()))?;
            let mut worker = record(place as u32, worker(rank), slot);
            worker.taints = engine.taints.iter().map(|taint| (*taint).to_owned()).collect();
            worker.loras = engine.adapters.iter().map(|adapter| (*adapter).to_owned()).collect();
            workers.push(worker);
        }
        for held in &case.held {
            let slot = workers.iter().find(|of| of.worker == worker(held.rank)).map(|of| of.slot);
            let slot = slot.ok_or_else(|| Failure::Contract("a rank is missing".to_owned()))?;
            hold(&mut writer, slot, scheme, held)?;
        }
        writer.publish();
        let role = if case.is_decode_pool { PoolRole::Decode } else { PoolRole::Prefill };
        let prefill = match case.knobs.prefill_ns {
            None => PrefillModel::Off,
            Some([base_ns, token_ns, cached_token_ns]) => PrefillModel::Fixed { base_ns, token_ns, cached_token_ns },
        };
        let loads = Loads::new(workers.len(), LoadsConfig { prefill, ..LoadsConfig::default() });
        let session = loads.open_session(None, 0).map_err(contract)?;
        let mut ours = Self {
            case,
            fleet: table(scheme, role, workers),
            indexes: [IndexReader::new(vec![reader])],
            loads,
            affinities: AffinityTable::new(0, 0),
            policy: policy(case),
            session,
            scratch: Scratch::default(),
            decision: Decision::default(),
            _writer: writer,
        };
        ours.play()?;
        Ok(ours)
    }

    fn play(&mut self) -> Result<(), Failure> {
        // Bookings of the past went wherever they went, busy or not.
        let busy = std::mem::take(&mut self.policy.busy);
        let mut made = 0_usize;
        for (now_ns, step) in &self.case.steps {
            let name = |number: usize| format!("r{number}");
            let reference = |request_id| BookingRef::Request { request_id, attempt: 0 };
            match step {
                Step::Booked(ask) => {
                    self.book(ask, &name(made), *now_ns)?;
                    made += 1;
                }
                Step::Prefilled(number) => {
                    self.loads.prefill_complete(self.session, reference(&name(*number)), 0, *now_ns);
                }
                Step::Freed(number) => {
                    self.loads.free(self.session, reference(&name(*number)), *now_ns);
                }
            }
        }
        self.policy.busy = busy;
        Ok(())
    }

    fn book(&mut self, ask: &Ask, request_id: &str, now_ns: u64) -> Result<(), Failure> {
        let wire = Wire::new(ask);
        let request = RouteRequest { book: Some(BookingRequest { request_id, attempt: 0 }), ..wire.request(ask) };
        self.decide(&request, now_ns)?;
        let chosen =
            *self.decision.candidates.first().ok_or_else(|| Failure::Contract("no pinned worker".to_owned()))?;
        let demand = self.scratch.demand(&request, &self.decision, &chosen);
        self.loads.book(self.session, request_id, 0, chosen.index, demand, now_ns).map_err(contract)?;
        Ok(())
    }

    fn decide(&mut self, request: &RouteRequest<'_>, now_ns: u64) -> Result<(), Failure> {
        let view = View {
            fleet: &self.fleet,
            indexes: &self.indexes,
            predictions: &[],
            loads: &self.loads,
            policy: &self.policy,
            round_robin_counters: &[],
            affinities: &self.affinities,
            now_ns,
        };
        decide(&view, request, &mut self.scratch, Draws::new(0), &mut self.decision).map_err(contract)
    }

    /// The answer to the question.
    ///
    /// # Errors
    /// It was not understood.
    pub(crate) fn answer(&mut self) -> Result<Answer, Failure> {
        let ask = &self.case.ask;
        let wire = Wire::new(ask);
        let request = wire.request(ask);
        self.decide(&request, self.case.now_ns)?;
        let mut costs: Vec<(Rank, f64)> =
            self.decision.candidates.iter().map(|scored| (rank(scored.worker), scored.terms.cost)).collect();
        costs.sort_by_key(|(rank, _)| *rank);
        let refusal = self.decision.no_worker.map(|kind| match kind {
            Kind::PinnedNotAllowed => Refusal::PinNotAllowed,
            Kind::PinnedBusy => Refusal::PinBusy,
            Kind::AllBusy => Refusal::Busy,
            _ => Refusal::Nobody,
        });
        let locals = self.scratch.locals(&request, &self.decision).iter().map(|local| local.0).collect();
        Ok(Answer { locals, costs, is_rounded: false, refusal })
    }

    /// Who is chosen by the draws of a seed; after [`Ours::answer`].
    pub(crate) fn pick(&mut self, seed: u64) -> Option<Rank> {
        judge(&self.policy, self.scratch.observation(), Draws::new(seed), &mut self.decision);
        self.decision.candidates.first().map(|scored| rank(scored.worker))
    }
}

/// A request's lists in the shapes that ours are borrowed from.
struct Wire {
    allow: Option<Vec<Worker>>,
    preferred: Vec<&'static str>,
    weights: Vec<f64>,
    shared: Vec<(u32, u32)>,
}

impl Wire {
    fn new(ask: &Ask) -> Self {
        let every_rank = |engines: &Vec<u64>| engines.iter().map(|engine| Worker::new(*engine, u32::MAX)).collect();
        Self {
            allow: ask.allow.as_ref().map(every_rank),
            preferred: ask.preferred.iter().map(|(taint, _)| *taint).collect(),
            weights: ask.preferred.iter().map(|(_, weight)| f64::from(*weight)).collect(),
            // Any order will do for us.
            shared: ask.shared.iter().rev().copied().collect(),
        }
    }

    fn request<'a>(&'a self, ask: &'a Ask) -> RouteRequest<'a> {
        let set = &ask.overrides;
        RouteRequest {
            lora: ask.text.lora,
            salt: ask.text.salt,
            candidates_max: CANDIDATES_MAX,
            allow: self.allow.as_deref(),
            pin: ask.pin.map(worker),
            required_taints: Names::Listed(&ask.required),
            preferred_taints: Preferences { names: Names::Listed(&self.preferred), weights: &self.weights },
            shared_hits: &self.shared,
            overrides: Overrides {
                mode: None,
                device_credit: set.device_credit,
                prefill_load_scale: set.prefill_load_scale,
                temperature: set.temperature,
                shared_multiplier: set.shared_multiplier,
                assume_kv_reuse: set.assume_kv_reuse,
                track_prefill_tokens: set.track_prefill_tokens,
            },
            ..RouteRequest::new(SPACE, Prompt::of_tokens(&ask.text.tokens))
        }
    }
}

fn policy(case: &Case) -> Policy {
    let knobs = &case.knobs;
    Policy {
        device_credit: knobs.device_credit,
        credit_decay: knobs.credit_decay,
        prefill_load_scale: knobs.prefill_load_scale,
        active_request_weight: knobs.active_request_weight,
        host_hit_weight: knobs.host_hit_weight,
        disk_hit_weight: knobs.disk_hit_weight,
        shared_multiplier: knobs.shared_multiplier,
        temperature: knobs.temperature,
        track_prefill_tokens: knobs.track_prefill_tokens,
        track_active_blocks: knobs.track_active_blocks,
        assume_kv_reuse: knobs.assume_kv_reuse,
        busy: BusyThresholds { prefill_tokens: knobs.busy_prefill_tokens, ..BusyThresholds::default() },
        ..Policy::kv()
    }
}

/// Stores what a rank holds of a text, tier by tier, as its engine would say it.
fn hold(writer: &mut ShardWriter, slot: WorkerSlot, scheme: Scheme, held: &Held) -> Result<(), Failure> {
    let Text { tokens, lora, salt } = &held.text;
    let seed = hash::seed(*lora, *salt);
    let mut locals = Vec::new();
    hash::local_hashes(scheme, seed, hash::token_bytes(tokens), &[], &mut locals);
    let named = |before: &mut u64, local: &LocalHash| {
        *before = mix(*before, local.0);
        Some(EngineHash(*before))
    };
    let hashes: Vec<EngineHash> = locals.iter().scan(0, named).collect();
    let mut from = 0;
    writer.begin_batch(slot);
    for (tier, blocks) in TIERS.into_iter().zip(held.tiers) {
        let to = from + blocks;
        if blocks > 0 {
            let parent = from.checked_sub(1).map(|before| hashes[before]);
            let (hashes, locals) = (&hashes[from..to], &locals[from..to]);
            let outcome = writer.store(slot, &StoreBlocks { parent, hashes, locals, tier, group: GroupId(0), seed });
            // What another text of the same beginning has stored may all be there already.
            let taken = outcome.stored as usize == blocks || outcome.ambiguous && outcome.already as usize == blocks;
            if !taken || outcome.dormant != 0 {
                return Err(Failure::Contract(format!("a store was not taken: {outcome:?}")));
            }
        }
        from = to;
    }
    writer.publish();
    Ok(())
}

const fn worker(rank: Rank) -> Worker {
    Worker::new(rank.engine, rank.rank)
}

const fn rank(worker: Worker) -> Rank {
    Rank { engine: worker.id.0, rank: worker.rank.0 }
}

fn contract(error: impl std::fmt::Display) -> Failure {
    Failure::Contract(error.to_string())
}
