//! One decision, run to completion: observe, judge, and the load to book.

use super::affinity::{AffinityEffect, factor};
use super::cost::{PoolFacts, cost, is_plain, plain_costs};
use super::decision::{Decision, Scored};
use super::observation::{Observation, PlainFacts, WorkerFacts};
use super::policy::Policy;
use super::read_observation::{self, ObservationBuffers, View, observe};
use super::request_facts::RequestFacts;
use super::rules::{apply_rules, no_worker_kind};
use super::select::{Draws, PlaceFacts, choose};
use super::space_cache::SpaceCache;
use crate::error::Result;
use crate::fleet::WorkerRecord;
use crate::ids::{LocalHash, SpaceId, TierBlocks};
use crate::limits::WORKER_WORK;
use crate::load::{Demand, Loads, PromptBlocks};
use crate::protocol::{CostTerms, MatchStatus, Mode, RouteRequest};

/// Buffers and caches that consecutive decisions share. All decisions of a scratch are about one fleet and its loads.
pub struct Scratch {
    pub(super) buffers: ObservationBuffers,
    /// By space; at least one.
    cache: Vec<SpaceCache>,
    /// The space of the last decision.
    space: SpaceId,
}

impl Default for Scratch {
    fn default() -> Self {
        Self { buffers: ObservationBuffers::default(), cache: vec![SpaceCache::default()], space: SpaceId(0) }
    }
}

impl Scratch {
    /// Reads everything that a decision about `request` depends on.
    pub(super) fn observe(&mut self, view: &View<'_>, request: &RouteRequest<'_>) -> Result<&mut SpaceCache> {
        let (spaces, space) = (view.fleet.spaces.len(), request.space.0 as usize);
        // An unknown space is refused below; its cache is never read.
        self.cache.resize_with(spaces.max(1), SpaceCache::default);
        self.space = if space < spaces { request.space } else { SpaceId(0) };
        let cache = &mut self.cache[self.space.0 as usize];
        observe(view, request, &mut self.buffers, cache)?;
        Ok(cache)
    }

    /// The cache of the space of the last decision.
    fn cache(&self) -> &SpaceCache {
        &self.cache[self.space.0 as usize]
    }

    fn cache_mut(&mut self) -> &mut SpaceCache {
        &mut self.cache[self.space.0 as usize]
    }

    /// The observation of the last decision.
    #[must_use]
    pub fn observation(&self) -> &Observation {
        self.cache().observation()
    }

    /// The facts of the last request.
    #[must_use]
    pub fn request_facts(&self) -> RequestFacts {
        self.observation().request
    }

    /// The hashes of the prompt's blocks, if the last decision could look them up; empty otherwise.
    #[must_use]
    pub fn locals(&self, decision: &Decision) -> &[LocalHash] {
        let looked_up = decision.matched == MatchStatus::Matched;
        if looked_up { &self.buffers.locals } else { &[] }
    }

    /// The same hashes, if the prompt may share its blocks with other requests in flight; empty otherwise.
    #[must_use]
    pub fn shared_locals(&self, decision: &Decision) -> &[LocalHash] {
        if decision.shares_blocks { self.locals(decision) } else { &[] }
    }

    /// Blocks of the prompt that a worker of the space holds, listed or not.
    #[must_use]
    pub fn overlap_of(&self, record: &WorkerRecord) -> TierBlocks {
        self.buffers.depths.of(record.shard, record.slot)
    }

    /// The work of the last observation: blocks that were hashed and looked up, plus [`WORKER_WORK`] for each worker.
    #[must_use]
    pub fn work(&self) -> u64 {
        let Observation { request_blocks, workers, .. } = self.observation();
        u64::from(*request_blocks) + workers.len() as u64 * WORKER_WORK
    }

    /// Whether the last decision waited for the bookings' lock to read active prompts.
    #[must_use]
    pub const fn active_locked(&self) -> bool {
        self.buffers.active_locked
    }

    /// Whether the chosen worker's load changed since the decision read it, and the mode depends on load.
    #[must_use]
    pub fn chosen_moved(&self, decision: &Decision, loads: &Loads) -> bool {
        let chosen = decision.candidates.first().filter(|_| decision.mode.depends_on_load());
        chosen.is_some_and(|chosen| loads.read(chosen.index).version != self.cache().load_version_of(chosen.index))
    }
}

/// Decides `request` and overwrites `decision`, whose buffers are reused. Books nothing.
///
/// # Errors
/// `UnknownSpace`, `SchemeMismatch`, `InvalidArgument` or `Oversized`, if the request cannot be judged.
pub fn decide(
    view: &View<'_>,
    request: &RouteRequest<'_>,
    scratch: &mut Scratch,
    draws: Draws,
    decision: &mut Decision,
) -> Result<()> {
    propose(view, request, scratch, draws, decision)?;
    advance_round_robin(view, request, scratch, decision);
    Ok(())
}

/// As [`decide`], without advancing the round-robin counter. In round-robin mode the decision takes effect after
/// [`advance_round_robin`]. A queued request is proposed several times and advances the counter once.
///
/// # Errors
/// As [`decide`].
pub fn propose(
    view: &View<'_>,
    request: &RouteRequest<'_>,
    scratch: &mut Scratch,
    draws: Draws,
    decision: &mut Decision,
) -> Result<()> {
    judge(view.policy, scratch.observe(view, request)?.observation(), draws, decision);
    Ok(())
}

/// Advances the round-robin counter for the request that was just proposed, if it counts. If another request advanced
/// the counter meanwhile, judges the same observation again with the new value.
pub fn advance_round_robin(
    view: &View<'_>,
    request: &RouteRequest<'_>,
    scratch: &mut Scratch,
    decision: &mut Decision,
) {
    if decision.mode != Mode::RoundRobin {
        return;
    }
    let cache = scratch.cache_mut();
    let read = cache.observation().request.round_robin_counter;
    let counter = read_observation::advance_round_robin(view, request).filter(|counter| *counter != read);
    // If the policy was replaced meanwhile, the decision stands and is recorded with the counter that it read.
    if let Some(counter) = counter.filter(|_| decision.policy_version == view.policy.version) {
        cache.set_round_robin_counter(counter);
        judge(view.policy, cache.observation(), Draws::new(decision.seed), decision);
    }
}

/// Fills `decision.candidates` with the overlap of every worker of the space, eligible or not, in table order and
/// without a cost. Decides nothing and does not advance the round-robin counter.
///
/// # Errors
/// As [`decide`].
pub fn overlaps(
    view: &View<'_>,
    request: &RouteRequest<'_>,
    scratch: &mut Scratch,
    decision: &mut Decision,
) -> Result<()> {
    let observation = scratch.observe(view, &request.of_every_worker(view.policy))?.observation();
    decision.begin(&view.policy.under(&observation.request.overrides), observation);
    let workers = &observation.workers;
    decision.candidates.resize(workers.len(), Scored::default());
    for (row, listed) in decision.candidates.iter_mut().enumerate() {
        listed.set(workers, row);
        listed.terms = CostTerms::default();
    }
    Ok(())
}

/// The load that a decision adds to the chosen worker. `locals` are the hashes of the prompt's blocks, from
/// [`Scratch::shared_locals`]; without them the prompt shares nothing. `block_size` is that of the observation, and
/// turns output tokens into blocks.
#[must_use]
pub fn demand<'a>(
    request: &RouteRequest<'_>,
    decision: &Decision,
    chosen: &Scored,
    block_size: u32,
    locals: &'a [LocalHash],
) -> Demand<'a> {
    let prompt_tokens = request.prompt.token_count() as u64;
    let blocks = match locals {
        [] => PromptBlocks::Alone(chosen.terms.additional_decode_blocks as u64),
        locals => PromptBlocks::Shared(locals),
    };
    let expected_blocks = match decision.mode {
        Mode::Latency => chosen.terms.in_flight_blocks,
        _ => 0.0,
    };
    let cached_tokens = match decision.tracks_prefill {
        true => prompt_tokens.min((chosen.terms.cached_tokens + expected_blocks * f64::from(block_size)) as u64),
        // As in Dynamo: a request that does not track prefill adds none to its worker.
        false => prompt_tokens,
    };
    Demand {
        space: request.space,
        prefill_tokens: prompt_tokens - cached_tokens,
        cached_tokens,
        blocks,
        block_size,
        expected_output_tokens: request.expected_output_tokens,
        is_recorded: false,
        is_traced: false,
    }
}

/// Applies the rules, computes costs and selects. Overwrites `decision`, whose buffers are reused. `policy` is the
/// policy of the space; the observation holds what the request overrides.
pub fn judge(policy: &Policy, observation: &Observation, draws: Draws, decision: &mut Decision) {
    let policy = &policy.under(&observation.request.overrides);
    decision.begin(policy, observation);
    apply_rules(policy, observation, decision);
    let pricing = Pricing::of(policy, observation, decision);
    pricing.price(observation, decision);
    pricing.select(observation, draws, decision);
    pricing.list(observation, decision);
}

/// What pricing needs, once the eligible workers are known.
#[derive(Clone, Copy)]
struct Pricing<'a> {
    policy: &'a Policy,
    affinity: AffinityEffect,
    pool: PoolFacts,
}

impl<'a> Pricing<'a> {
    fn of(policy: &'a Policy, observation: &Observation, decision: &mut Decision) -> Self {
        decision.no_worker = no_worker_kind(observation, decision);
        let affinity = AffinityEffect::of(policy, observation, decision);
        affinity.apply(observation, decision);
        let eligible = decision.eligible_rows.iter().map(|row| observation.workers.row(*row as usize));
        let recent = decision.eligible_rows.iter().map(|row| observation.workers.recent(*row as usize));
        let pool = PoolFacts::of(policy, &observation.request, eligible, recent);
        Self { policy, affinity, pool }
    }

    /// The cost terms of one eligible worker.
    #[inline(always)]
    fn terms(&self, request: &RequestFacts, place: u32, row: u32, facts: &WorkerFacts) -> CostTerms {
        let terms = cost(self.policy, request, facts, &self.pool, place);
        self.affinity.discount(self.policy, row, terms)
    }

    /// Computes the cost of every eligible worker.
    fn price(&self, observation: &Observation, decision: &mut Decision) {
        let Observation { request, workers, .. } = observation;
        let plain = workers.plain(self.policy).filter(|_| is_plain(self.policy, request));
        if let Some(plain) = plain {
            self.price_columns(plain, request, decision);
        } else {
            let price = |(row, place): (&u32, u32)| self.terms(request, place, *row, &workers.row(*row as usize)).cost;
            decision.costs.extend(decision.eligible_rows.iter().zip(0_u32..).map(price));
        }
    }

    /// Computes the costs of all workers, several at once, and keeps those of the eligible ones.
    fn price_columns(&self, plain: PlainFacts<'_>, request: &RequestFacts, decision: &mut Decision) {
        plain_costs(self.policy, request, (plain, &self.pool), &mut decision.costs);
        if decision.eligible_rows.len() < decision.costs.len() {
            // Rows ascend, so that no cost is overwritten before it is moved.
            for (place, row) in decision.eligible_rows.iter().enumerate() {
                decision.costs[place] = decision.costs[*row as usize];
            }
            decision.costs.truncate(decision.eligible_rows.len());
        }
        if let Some(row) = self.affinity.discounted_row()
            && let Ok(place) = decision.eligible_rows.binary_search(&row)
        {
            decision.costs[place] *= factor(&self.policy.affinity, decision.costs[place]);
        }
    }

    /// Selects a worker, and the candidates to list behind it.
    fn select(&self, observation: &Observation, draws: Draws, decision: &mut Decision) {
        decision.seed = draws.seed();
        decision.eligible = decision.eligible_rows.len() as u32;
        let rows = &decision.eligible_rows;
        let places = PlaceFacts {
            requests: |place: usize| observation.workers.requests(rows[place] as usize) as f64,
            promise: |place: usize| {
                let facts = observation.workers.row(rows[place] as usize);
                let terms = self.terms(&observation.request, place as u32, rows[place], &facts);
                (facts.worker, terms.queue_s + terms.prefill_s + terms.fetch_s)
            },
        };
        let listed = observation.request.candidates_max as usize;
        let (pick, drawing) = (self.policy.pick(), &mut draws.begin());
        decision.ties = choose(&decision.costs, places, listed, pick, drawing, &mut decision.selected);
    }

    /// Lists the selected workers with what is known of them.
    fn list(&self, observation: &Observation, decision: &mut Decision) {
        let workers = &observation.workers;
        let Decision { candidates, selected, eligible_rows, only_costs, .. } = decision;
        candidates.resize(selected.len(), Scored::default());
        for (at, (priced, listed)) in selected.iter().zip(candidates).enumerate() {
            let row = eligible_rows[priced.place as usize];
            listed.set(workers, row as usize);
            listed.terms = match *only_costs && at > 0 {
                true => CostTerms { cost: priced.cost, ..CostTerms::default() },
                false => self.terms(&observation.request, priced.place, row, &workers.row(row as usize)),
            };
        }
        let chosen = decision.candidates.first().map(|chosen| chosen.worker);
        decision.affinity = self.affinity.outcome(observation, chosen);
    }
}
