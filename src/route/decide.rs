//! One decision, run to completion: observe, judge, and the demand to book.

use super::affinity::{AffinityEffect, factor};
use super::cost::{CostTerms, PoolFacts, cost, is_plain, plain_costs};
use super::decision::{Decision, MatchStatus, Scored};
use super::observation::{Observation, PlainFacts, RequestFacts, WorkerFacts};
use super::observe::{self, ObservationBuffers, View, observe};
use super::policy::{Mode, Policy};
use super::request::RouteRequest;
use super::rules::{apply_rules, no_worker_kind};
use super::select::{Draws, choose};
use super::space_cache::SpaceCache;
use crate::error::Result;
use crate::fleet::WorkerRecord;
use crate::ids::{LocalHash, SpaceId, TierBlocks};
use crate::limits::WORKER_WORK;
use crate::load::{Demand, Loads, PromptBlocks};

/// Buffers reused from one decision to the next, and what they keep of workers: all decisions of a scratch are about one
/// fleet, whose tables have versions, and its loads.
pub struct Scratch {
    pub(super) buffers: ObservationBuffers,
    /// By space, and of at least one.
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
        // Of a space that there is not something is refused, and nothing kept.
        self.cache.resize_with(spaces.max(1), SpaceCache::default);
        self.space = if space < spaces { request.space } else { SpaceId(0) };
        let cache = &mut self.cache[self.space.0 as usize];
        observe(view, request, &mut self.buffers, cache)?;
        Ok(cache)
    }

    /// What is kept of the space of the last decision.
    fn cache(&self) -> &SpaceCache {
        &self.cache[self.space.0 as usize]
    }

    fn cache_mut(&mut self) -> &mut SpaceCache {
        &mut self.cache[self.space.0 as usize]
    }

    /// What the last decision was made from.
    #[must_use]
    pub fn observation(&self) -> &Observation {
        self.cache().observation()
    }

    /// The facts of the last request.
    #[must_use]
    pub fn request_facts(&self) -> RequestFacts {
        self.observation().request
    }

    /// The hashes of the prompt's blocks, if the last decision could look them up; else none.
    #[must_use]
    pub fn locals(&self, decision: &Decision) -> &[LocalHash] {
        let looked_up = decision.matched == MatchStatus::Matched;
        if looked_up { &self.buffers.locals } else { &[] }
    }

    /// Those of them that the prompt is taken to share with others in flight; none if it shares nothing.
    #[must_use]
    pub fn shared_locals(&self, decision: &Decision) -> &[LocalHash] {
        if decision.shares_blocks { self.locals(decision) } else { &[] }
    }

    /// What a worker of the decision's space holds of the prompt, listed or not, where it was looked up.
    #[must_use]
    pub fn overlap_of(&self, record: &WorkerRecord) -> TierBlocks {
        self.buffers.depths.of(record.shard, record.slot)
    }

    /// How much work the last observation was: blocks of the prompt that were hashed and looked up, and workers that were
    /// looked at, each for [`WORKER_WORK`] blocks.
    #[must_use]
    pub fn work(&self) -> u64 {
        let Observation { request_blocks, workers, .. } = self.observation();
        u64::from(*request_blocks) + workers.len() as u64 * WORKER_WORK
    }

    /// Whether the last decision had to wait for bookings to read what workers run of the prompt.
    #[must_use]
    pub const fn active_locked(&self) -> bool {
        self.buffers.active_locked
    }

    /// Whether the chosen worker's load has moved since the decision read it, if that matters to how it was chosen.
    #[must_use]
    pub fn chosen_moved(&self, decision: &Decision, loads: &Loads) -> bool {
        let chosen = decision.candidates.first().filter(|_| decision.mode.heeds_load());
        chosen.is_some_and(|chosen| loads.read(chosen.index).version != self.cache().load_version_of(chosen.index))
    }
}

/// Decides `request`; the record goes into `decision`, whose buffers are reused. Books nothing.
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

/// As [`decide`], but for the turn: where workers take turns, what was decided is to be done only after [`advance_round_robin`].
/// A request that has to wait is proposed again and again, and takes its turn once.
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

/// Takes the turn of the request that was just proposed, if it takes one. Where another took it meanwhile it is judged
/// once more, from what was observed.
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
    let counter = observe::advance_round_robin(view, request).filter(|counter| *counter != read);
    // Under a policy that has just been replaced the decision stands, and is recorded with the counter that it read.
    if let Some(counter) = counter.filter(|_| decision.policy_version == view.policy.version) {
        cache.set_round_robin_counter(counter);
        judge(view.policy, cache.observation(), Draws::new(decision.seed), decision);
    }
}

/// Fills `decision.candidates` with what every worker of the space holds of the prompt, eligible or not, in
/// table order and without a cost. Decides nothing, and takes nobody's turn.
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
    decision.candidates.extend(observation.workers.iter().map(|facts| Scored::of(&facts, CostTerms::default())));
    Ok(())
}

/// What a decision's choice adds to the chosen worker's load. `locals` are the prompt's blocks where they are known
/// ([`Scratch::shared_locals`]); without them it shares nothing. `block_size` is the
/// observation's, by which output becomes blocks.
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
    let cached_tokens = match decision.tracks_prefill {
        true => prompt_tokens.min(chosen.terms.cached_tokens as u64),
        // As there: a request whose prefill does not count is none to those that count theirs.
        false => prompt_tokens,
    };
    Demand {
        space: request.space,
        prefill_tokens: prompt_tokens - cached_tokens,
        cached_tokens,
        blocks,
        block_size,
        expected_output_tokens: request.expected_output_tokens,
    }
}

/// Applies the rules, computes costs and selects. Overwrites `decision`, whose buffers are reused. `policy` is the policy of
/// the space; the observation holds what the request overrides.
pub fn judge(policy: &Policy, observation: &Observation, draws: Draws, decision: &mut Decision) {
    let policy = &policy.under(&observation.request.overrides);
    decision.begin(policy, observation);
    apply_rules(policy, observation, decision);
    let pricing = Pricing::of(policy, observation, decision);
    pricing.price(observation, decision);
    pricing.select(observation, draws, decision);
    pricing.list(observation, decision);
}

/// Whom to choose from, once it is known who is in the running.
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
        let pool = PoolFacts::of(policy, observation.request.round_robin_counter, eligible);
        Self { policy, affinity, pool }
    }

    /// What it costs to run what is asked on the worker at a place of those in the running.
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
        plain_costs(self.policy, request, plain, &mut decision.costs);
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

    /// Chooses, and who is listed behind the chosen one.
    fn select(&self, observation: &Observation, draws: Draws, decision: &mut Decision) {
        decision.seed = draws.seed();
        decision.eligible = decision.eligible_rows.len() as u32;
        let pick = self.policy.mode.pick(self.policy.temperature);
        let requests = |place: usize| observation.workers.requests(decision.eligible_rows[place] as usize) as f64;
        let listed = observation.request.candidates_max as usize;
        let drawing = &mut draws.begin();
        decision.ties = choose(&decision.costs, requests, listed, pick, drawing, &mut decision.selected);
    }

    /// Lists those who were selected with all that there is to say of them.
    fn list(&self, observation: &Observation, decision: &mut Decision) {
        for priced in &decision.selected {
            let Some(row) = decision.eligible_rows.get(priced.place as usize) else { continue };
            let facts = observation.workers.row(*row as usize);
            let terms = self.terms(&observation.request, priced.place, *row, &facts);
            decision.candidates.push(Scored::of(&facts, terms));
        }
        let chosen = decision.candidates.first().map(|chosen| chosen.worker);
        decision.affinity = self.affinity.outcome(observation, chosen);
    }
}
