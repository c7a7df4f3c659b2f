//! One router of a simulated fleet: the product's own bookings and decision, under virtual time. It learns only what a
//! real router learns: the index, what it booked, first tokens and ends, and what other routers tell of theirs.

use std::rc::Rc;
use std::sync::atomic::AtomicU64;

use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use rustc_hash::FxHashMap;

use super::fleet_index::{FleetIndex, PREFILLS, SERVES};
use super::peer_rules::{Booked, Candidate, Question, Rule};
use super::run::Settings;
use crate::ids::{LocalHash, SpaceId, TierBlocks, Worker, WorkerIndex};
use crate::load::{BookingHandle, BookingRef, Demand, Loads, LoadsConfig, PromptBlocks, SessionId};
use crate::route::{
    AffinityTable, Bypass, Decision, Draws, Half, Policy, Prompt, RouteRequest, Scratch, View, WorkerFacts, decide,
    decode_overrides, prefill_pool, prefill_request,
};
use crate::simulated_engine::{Block, RequestId};

/// Who decides.
pub(super) enum Decider {
    /// The product's own decision, under a policy. Costs are near if they differ by less than the work that other routers
    /// may have booked unseen, in `unseen_weight` standard deviations, or by less than the policy says.
    Product { policy: Box<Policy>, unseen_weight: f64 },
    /// Another system's rule, with the same facts.
    Peer(Box<dyn Rule>),
}

/// A booking: a request on a worker, or the half of it that only prefills.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct BookingId(u64);

impl BookingId {
    pub(super) fn of(request: RequestId, is_prefill_half: bool) -> Self {
        Self(u64::from(request.0) << 1 | u64::from(is_prefill_half))
    }
}

/// How a booking's prompt counts as decode load.
#[derive(Clone, Copy, Debug)]
enum Charged {
    Shared,
    Alone(u64),
}

/// What is booked.
#[derive(Clone, Debug)]
pub(super) struct Booking {
    id: BookingId,
    pub(super) worker: usize,
    space: SpaceId,
    blocks: Rc<[Block]>,
    prompt_tokens: u32,
    charged: Charged,
    /// Tokens to compute on the worker, and those that it holds or gets, as the router's mode counts them.
    prefill_tokens: u64,
    cached_tokens: u64,
    /// Tokens of the prompt that the index says the worker holds; fewer than the prompt has.
    pub(super) held_tokens: u32,
    /// The predicted time to compute the prompt, seconds.
    work_s: f64,
    /// Predicted time to the first token; NaN = not predicted.
    pub(super) predicted_ttft_s: f64,
}

/// What a router did, as it tells the others.
#[derive(Clone, Debug)]
pub(super) enum Report {
    Booked(Booking),
    FirstToken(BookingId),
    Ended(BookingId),
}

/// The request to be sent.
pub(super) struct Asked<'a> {
    pub(super) id: RequestId,
    pub(super) blocks: &'a Rc<[Block]>,
    pub(super) prompt_tokens: u32,
    pub(super) now_ns: u64,
}

/// The workers of a request.
pub(super) struct Chosen {
    /// Runs the request, or decodes it.
    pub(super) serves: Booking,
    /// Computes the prompt, if that is another one.
    pub(super) prefills: Option<Booking>,
}

/// All chance of a run's decisions.
pub(super) struct Chance {
    seed: u64,
    rng: Xoshiro256PlusPlus,
}

impl Chance {
    pub(super) fn new(seed: u64) -> Self {
        Self { seed, rng: Xoshiro256PlusPlus::seed_from_u64(seed) }
    }

    fn draws(&mut self) -> Draws {
        self.seed = self.seed.wrapping_add(1);
        Draws::new(self.seed)
    }
}

/// Seconds over which the bookings of the other routers are averaged.
const OTHERS_WINDOW_S: f64 = 10.0;

/// What the other routers book: a mean that forgets.
#[derive(Clone, Copy, Debug, Default)]
struct OthersWork {
    /// The squares of their prefills' seconds, summed over the bookings of a second.
    squares_per_s: f64,
    at_ns: u64,
}

impl OthersWork {
    fn squares_at(&self, now_ns: u64) -> f64 {
        let elapsed_s = now_ns.saturating_sub(self.at_ns) as f64 * 1e-9;
        self.squares_per_s * libm::exp(-elapsed_s / OTHERS_WINDOW_S)
    }

    fn note(&mut self, work_s: f64, now_ns: u64) {
        let squares_per_s = self.squares_at(now_ns) + work_s * work_s / OTHERS_WINDOW_S;
        *self = Self { squares_per_s, at_ns: now_ns };
    }

    /// The standard deviation of the work that they book within `age_s`, seconds. Bookings come as a Poisson process, so
    /// the variance of their sum is the mean number of them times the mean square of one.
    fn deviation_s(&self, age_s: f64, now_ns: u64) -> f64 {
        (self.squares_at(now_ns) * age_s).sqrt()
    }
}

/// Sessions over which a router's bookings are spread, so that none reaches its limit.
const SESSIONS: usize = 16;

pub(super) struct Router {
    id: u64,
    loads: Loads,
    sessions: Vec<SessionId>,
    /// By space.
    deciders: Vec<Decider>,
    affinities: AffinityTable,
    counters: Vec<AtomicU64>,
    scratch: Scratch,
    decision: Decision,
    /// Live bookings, and their workers.
    live: FxHashMap<BookingId, (BookingHandle, usize)>,
    /// By worker: what peers' rules read beside the load.
    booked: Vec<Booked>,
    others: OthersWork,
    /// The age of what it knows of the other routers, seconds.
    age_s: f64,
    bytes: Vec<u8>,
    locals: Vec<LocalHash>,
}

impl Router {
    /// Router number `id` of these engines. `deciders` are by space.
    pub(super) fn new(id: u64, settings: &Settings, deciders: Vec<Decider>) -> Self {
        let specs = &settings.engines;
        let loads = Loads::new(specs.len(), LoadsConfig { age_ms_max: u64::MAX / 2, ..LoadsConfig::default() });
        for (at, spec) in specs.iter().enumerate() {
            let prior = settings.prior_factor.map(|factor| spec.law.prefill.slowed(factor));
            loads.set_prefill_class(WorkerIndex(at as u32), Worker::new(at as u64 + 1, 0), &spec.class, prior);
        }
        let session = |_| loads.open_session(None, 0).expect("a table has room for a few sessions");
        Self {
            id,
            sessions: (0..SESSIONS).map(session).collect(),
            loads,
            counters: deciders.iter().map(|_| AtomicU64::new(0)).collect(),
            deciders,
            affinities: AffinityTable::new(8, 0),
            scratch: Scratch::default(),
            decision: Decision::default(),
            live: FxHashMap::default(),
            booked: vec![Booked::default(); specs.len()],
            others: OthersWork::default(),
            age_s: settings.routers.age_s.unwrap_or(0.0),
            bytes: Vec::new(),
            locals: Vec::new(),
        }
    }

    /// Chooses the worker or the pair of a request. `None`: no worker may run it. Books nothing.
    pub(super) fn choose(&mut self, index: &FleetIndex, asked: &Asked<'_>, chance: &mut Chance) -> Option<Chosen> {
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.clear();
        let whole = whole_blocks(asked.blocks, asked.prompt_tokens, index);
        whole.iter().for_each(|block| bytes.extend_from_slice(&block.local.to_le_bytes()));
        let prompt = Prompt::LocalHashes { hashes: &bytes, scheme: index.scheme, token_count: asked.prompt_tokens };
        let request = RouteRequest { candidates_max: 1, ..RouteRequest::new(SERVES, prompt) };
        let chosen = match prefill_pool(&index.fleet, SERVES) {
            Ok(Some(pool)) => self.pair(index, asked, (&request, pool), chance),
            _ => self.half(index, asked, &request, chance).map(|serves| Chosen { serves, prefills: None }),
        };
        self.bytes = bytes;
        chosen
    }

    /// The pair of a request, as `requests::prefill_decode_pair` chooses it.
    fn pair(
        &mut self,
        index: &FleetIndex,
        asked: &Asked<'_>,
        (alone, pool): (&RouteRequest<'_>, SpaceId),
        chance: &mut Chance,
    ) -> Option<Chosen> {
        let prefills = prefill_request(alone, pool, None);
        let is_local = self.bypasses(index, asked, (alone, &prefills), chance);
        let prefills = if is_local { None } else { self.half(index, asked, &prefills, chance) };
        if prefills.is_none() {
            // One worker does both.
            return self.half(index, asked, alone, chance).map(|serves| Chosen { serves, prefills: None });
        }
        let decodes = RouteRequest { overrides: decode_overrides(&alone.overrides), ..*alone };
        let serves = self.half(index, asked, &decodes, chance)?;
        Some(Chosen { serves, prefills })
    }

    /// Whether the worker that would decode alone is to prefill too. Peers' rules always ask for a pair.
    fn bypasses(
        &mut self,
        index: &FleetIndex,
        asked: &Asked<'_>,
        (alone, prefills): (&RouteRequest<'_>, &RouteRequest<'_>),
        chance: &mut Chance,
    ) -> bool {
        let disaggregation = match &self.deciders[SERVES.0 as usize] {
            Decider::Product { policy, .. } if policy.disaggregation.bypass != Bypass::Off => policy.disaggregation,
            _ => return false,
        };
        let mut chosen = |request: &RouteRequest<'_>| {
            self.decide(index, &request.as_question(), asked.now_ns, chance)?;
            Half::chosen(self.scratch.observation(), &self.decision)
        };
        let (Some(prefill), Some(decode)) = (chosen(prefills), chosen(alone)) else { return false };
        disaggregation.bypasses(&decode, &prefill)
    }

    /// Decides `request`, into the decision and the scratch.
    fn decide(
        &mut self,
        index: &FleetIndex,
        request: &RouteRequest<'_>,
        now_ns: u64,
        chance: &mut Chance,
    ) -> Option<()> {
        let policy = match &self.deciders[request.space.0 as usize] {
            Decider::Product { policy, unseen_weight } => {
                // No work waits where a prompt is not computed.
                let computes = request.overrides.track_prefill_tokens.unwrap_or(true);
                let weight = if computes { *unseen_weight } else { 0.0 };
                let unseen_s = weight * self.others.deviation_s(self.age_s, now_ns);
                Policy { near_cost_s: policy.near_cost_s.max(unseen_s), router_id: self.id, ..**policy }
            }
            Decider::Peer(_) => Policy::kv(),
        };
        let view = View {
            fleet: &index.fleet,
            indexes: &index.readers,
            predictions: &[],
            loads: &self.loads,
            policy: &policy,
            round_robin_counters: &self.counters,
            affinities: &self.affinities,
            now_ns,
        };
        decide(&view, request, &mut self.scratch, chance.draws(), &mut self.decision).ok()
    }

    /// The worker of a request, or of one half of it.
    fn half(
        &mut self,
        index: &FleetIndex,
        asked: &Asked<'_>,
        request: &RouteRequest<'_>,
        chance: &mut Chance,
    ) -> Option<Booking> {
        self.decide(index, request, asked.now_ns, chance)?;
        let (block_size, prompt_tokens) = (index.scheme.block_size, asked.prompt_tokens);
        let locals = self.scratch.shared_locals(request, &self.decision);
        let booking = |worker: usize, held_tokens: u32, demand: Demand<'_>| Booking {
            id: BookingId::of(asked.id, request.space == PREFILLS),
            worker,
            space: request.space,
            blocks: asked.blocks.clone(),
            prompt_tokens,
            charged: match demand.blocks {
                PromptBlocks::Alone(blocks) => Charged::Alone(blocks),
                PromptBlocks::Shared(_) => Charged::Shared,
            },
            prefill_tokens: demand.prefill_tokens,
            cached_tokens: demand.cached_tokens,
            held_tokens: held_tokens.min(prompt_tokens.saturating_sub(1)),
            work_s: 0.0,
            predicted_ttft_s: f64::NAN,
        };
        match &mut self.deciders[request.space.0 as usize] {
            Decider::Product { .. } => {
                let chosen = self.decision.candidates.first()?;
                let (terms, held_tokens) = (&chosen.terms, chosen.overlap.device * block_size);
                let demand = self.scratch.demand(request, &self.decision, chosen);
                Some(Booking {
                    work_s: if self.decision.tracks_prefill { terms.prefill_s } else { 0.0 },
                    predicted_ttft_s: terms.queue_s + terms.prefill_s + terms.fetch_s,
                    ..booking(chosen.index.0 as usize, held_tokens, demand)
                })
            }
            Decider::Peer(rule) => {
                let rows = self.decision.eligible_rows.iter();
                let workers = rows.map(|row| self.scratch.observation().workers.row(*row as usize));
                let blocks = whole_blocks(asked.blocks, prompt_tokens, index);
                let question = Question { id: u64::from(asked.id.0), prompt_tokens, blocks, now_ns: asked.now_ns };
                let chosen = chosen_by(rule.as_mut(), &question, workers, (&self.booked, block_size), chance)?;
                // The half that only decodes has nothing to compute.
                let decodes = !self.decision.tracks_prefill;
                let cached_tokens = u64::from(if decodes { prompt_tokens } else { chosen.held_tokens });
                let demand = Demand {
                    prefill_tokens: u64::from(prompt_tokens) - cached_tokens,
                    cached_tokens,
                    blocks: PromptBlocks::Shared(locals),
                    ..Demand::default()
                };
                let predicted_ttft_s = rule.predicted_ttft_s();
                Some(Booking { predicted_ttft_s, ..booking(chosen.worker, chosen.held_tokens, demand) })
            }
        }
    }

    /// Takes into account what it did itself, or what another router did. `false`: a booking found no room.
    pub(super) fn note(&mut self, index: &FleetIndex, report: &Report, now_ns: u64) -> bool {
        match report {
            Report::Booked(booking) => return self.book(index, booking, now_ns),
            Report::FirstToken(id) => {
                if let Some((handle, worker)) = self.live.get(id).copied() {
                    self.loads.prefill_complete(self.session(*id), BookingRef::Handle(handle), 0, now_ns);
                    self.loads.publish_laws(0, usize::MAX);
                    self.end_prefill(*id, worker, now_ns);
                }
            }
            Report::Ended(id) => {
                if let Some((handle, worker)) = self.live.remove(id) {
                    self.loads.free(self.session(*id), BookingRef::Handle(handle), now_ns);
                    self.end_prefill(*id, worker, now_ns);
                    self.booked[worker].requests -= 1;
                }
            }
        }
        true
    }

    /// Hears what another router did.
    pub(super) fn hear(&mut self, index: &FleetIndex, report: &Report, now_ns: u64) {
        if let Report::Booked(booking) = report {
            self.others.note(booking.work_s, now_ns);
        }
        // A booking without room is one that this router knows nothing of.
        self.note(index, report, now_ns);
    }

    #[cfg(test)]
    pub(super) fn live_bookings(&self) -> usize {
        self.live.len()
    }

    fn session(&self, id: BookingId) -> SessionId {
        self.sessions[id.0 as usize % SESSIONS]
    }

    fn book(&mut self, index: &FleetIndex, booking: &Booking, now_ns: u64) -> bool {
        let Booking { id, worker, prompt_tokens, .. } = *booking;
        self.locals.clear();
        if matches!(booking.charged, Charged::Shared) {
            let whole = whole_blocks(&booking.blocks, prompt_tokens, index);
            self.locals.extend(whole.iter().map(|block| LocalHash(block.local)));
        }
        let demand = Demand {
            space: booking.space,
            prefill_tokens: booking.prefill_tokens,
            cached_tokens: booking.cached_tokens,
            blocks: match booking.charged {
                Charged::Alone(blocks) => PromptBlocks::Alone(blocks),
                Charged::Shared => PromptBlocks::Shared(&self.locals),
            },
            divergence: None,
            block_size: index.scheme.block_size,
            expected_output_tokens: 0,
            is_recorded: false,
            is_traced: false,
        };
        let (name, place) = (format!("{:x}", id.0), index.fleet.workers[worker].index);
        let Ok(booked) = self.loads.book(self.session(id), &name, 0, place, demand, now_ns) else { return false };
        self.live.insert(id, (booked.handle, worker));
        let of_worker = &mut self.booked[worker];
        of_worker.requests += 1;
        if booking.prefill_tokens > 0 {
            if of_worker.prefills.is_empty() {
                of_worker.since_ns = now_ns;
            }
            let held_tokens = booking.held_tokens;
            of_worker.prefills.push((id.0, prompt_tokens - held_tokens, held_tokens, now_ns));
        }
        true
    }

    fn end_prefill(&mut self, id: BookingId, worker: usize, now_ns: u64) {
        let booked = &mut self.booked[worker];
        if let Some(at) = booked.prefills.iter().position(|prefill| prefill.0 == id.0) {
            booked.prefills.remove(at);
            if at == 0 {
                booked.since_ns = now_ns;
            }
        }
    }
}

/// The whole blocks of a prompt, of those of its request.
fn whole_blocks<'a>(blocks: &'a [Block], prompt_tokens: u32, index: &FleetIndex) -> &'a [Block] {
    &blocks[..(prompt_tokens / index.scheme.block_size) as usize]
}

/// What a peer's rule chooses among `workers`; `None` if there are none.
fn chosen_by<'a>(
    rule: &mut dyn Rule,
    question: &Question<'_>,
    workers: impl Iterator<Item = WorkerFacts>,
    (booked, block_size): (&'a [Booked], u32),
    chance: &mut Chance,
) -> Option<Candidate<'a>> {
    let candidate = |facts: WorkerFacts| {
        let TierBlocks { device, host, disk, external } = facts.overlap;
        Candidate {
            worker: facts.index.0 as usize,
            held_tokens: ((device + host + disk + external) * block_size).min(question.prompt_tokens),
            running_tokens: (facts.active_depth_blocks * block_size).min(question.prompt_tokens),
            prefill_tokens: facts.load.prefill_tokens,
            requests: facts.load.requests,
            kv_tokens: facts.load.decode_blocks * u64::from(block_size),
            capacity_tokens: facts.capacity_blocks * u64::from(block_size),
            recent: facts.load.recent,
            booked: &booked[facts.index.0 as usize],
        }
    };
    let candidates: Vec<Candidate<'_>> = workers.map(candidate).collect();
    (!candidates.is_empty()).then(|| candidates[rule.choose(question, &candidates, &mut chance.rng)])
}
