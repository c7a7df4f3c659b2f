//! Judging: from an observation to a decision. Nothing is read here but arguments: the same observation, policy and
//! draws give the same bits.

use super::bound::{AffinityEffect, factor};
use super::columns::WorkerColumns;
use super::cost::{CostTerms, PoolFacts, cost};
use super::decision::{Decision, Scored};
use super::draws::Draws;
use super::kept::SpaceCache;
use super::observation::{Observation, RequestFacts, WorkerFacts};
use super::policy::Policy;
use super::rule::{apply_rules, no_worker_kind};
use super::select::choose;

/// Filters, costs and selects; the record goes into `decision`, whose buffers are reused. `policy` is the space's: what
/// the request sets in place of it is in the observation.
pub fn judge(policy: &Policy, observation: &Observation, draws: Draws, decision: &mut Decision) {
    let policy = &policy.under(&observation.request.overrides);
    decision.begin(policy, observation);
    apply_rules(policy, observation, decision);
    let pricing = Pricing::of(policy, observation, decision);
    pricing.price_rows(observation, decision);
    pricing.select(observation, draws, decision);
    pricing.list(observation, decision);
}

/// As [`judge`], of what is kept, whose rows are made whole only where somebody looks at them: to the same bits.
pub(super) fn judge_cached(policy: &Policy, cache: &mut SpaceCache, draws: Draws, decision: &mut Decision) {
    let policy = &policy.under(&cache.observation.request.overrides);
    decision.begin(policy, &cache.observation);
    match cache.admits_all(policy) {
        true => decision.eligible_rows.extend(0..cache.observation.workers.len() as u32),
        false => apply_rules(policy, &cache.observation, decision),
    }
    let is_plain = cache.cover_credits(policy) && WorkerColumns::cover_costs(policy, &cache.observation.request);
    if !is_plain {
        cache.materialize();
    }
    let pricing = Pricing::of(policy, &cache.observation, decision);
    match is_plain {
        true => pricing.price_columns(&cache.columns, &cache.observation.request, decision),
        false => pricing.price_rows(&cache.observation, decision),
    }
    pricing.select(&cache.observation, draws, decision);
    let listed = decision.selected.iter().filter_map(|priced| decision.eligible_rows.get(priced.place as usize));
    cache.materialize_rows(listed.copied());
    pricing.list(&cache.observation, decision);
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
        let running = decision.eligible_rows.iter().map(|place| &observation.workers[*place as usize]);
        let pool = PoolFacts::of(policy, observation.request.round_robin_counter, running);
        Self { policy, affinity, pool }
    }

    /// What it costs to run what is asked on the worker at a place of those in the running.
    #[inline(always)]
    fn terms(&self, request: &RequestFacts, place: u32, row: u32, facts: &WorkerFacts) -> CostTerms {
        let terms = cost(self.policy, request, facts, &self.pool, place);
        self.affinity.discount(self.policy, row, terms)
    }

    /// Notes what each of those in the running costs.
    fn price_rows(&self, observation: &Observation, decision: &mut Decision) {
        let Observation { request, workers, .. } = observation;
        let price = |(row, place): (&u32, u32)| self.terms(request, place, *row, &workers[*row as usize]).cost;
        decision.costs.extend(decision.eligible_rows.iter().zip(0_u32..).map(price));
    }

    /// The same by columns.
    fn price_columns(&self, columns: &WorkerColumns, request: &RequestFacts, decision: &mut Decision) {
        columns.costs(self.policy, request, &mut decision.costs);
        if decision.eligible_rows.len() < decision.costs.len() {
            // In ascending order, so that none is overwritten before it is moved.
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
        let requests = |place: usize| observation.workers[decision.eligible_rows[place] as usize].load.requests as f64;
        let listed = observation.request.candidates_max as usize;
        let drawing = &mut draws.begin();
        decision.ties = choose(&decision.costs, requests, listed, pick, drawing, &mut decision.selected);
    }

    /// Lists those who were selected with all that there is to say of them.
    fn list(&self, observation: &Observation, decision: &mut Decision) {
        for priced in &decision.selected {
            let Some(row) = decision.eligible_rows.get(priced.place as usize) else { continue };
            let facts = &observation.workers[*row as usize];
            let terms = self.terms(&observation.request, priced.place, *row, facts);
            decision.candidates.push(Scored::of(facts, terms));
        }
        let chosen = decision.candidates.first().map(|chosen| chosen.worker);
        decision.affinity = self.affinity.outcome(observation, chosen);
    }
}
