//! Judging: the rules, the cost of every eligible worker, and the selection. It reads an observation and nothing else.
//!
//! The same code is compiled for several kinds of processor, because a decision about many workers is arithmetic on long
//! columns. Each gives the same bits: no two operations are fused, and sums keep their order.

use fearless_simd::{Level, Simd, dispatch};

use super::affinity::{AffinityEffect, factor};
use super::cost::{PoolFacts, RecentSums, cost, is_plain, plain_costs};
use super::decision::{Decision, Scored};
use super::observation::{Observation, PlainFacts, WorkerFacts};
use super::policy::Policy;
use super::request_facts::RequestFacts;
use super::rules::{apply_rules, no_worker_kind};
use super::select::{Draws, PlaceFacts, choose};
use crate::protocol::CostTerms;

/// Applies the rules, computes costs and selects. Overwrites `decision`, whose buffers are reused. `policy` is the
/// policy of the space; the observation holds what the request overrides.
pub fn judge(policy: &Policy, observation: &Observation, draws: Draws, decision: &mut Decision) {
    judge_at(Level::new(), policy, observation, draws, decision);
}

/// As [`judge`], with the instructions of a level. (AVX-512 is used on processors whose clock does not fall for it.)
pub(super) fn judge_at(
    level: Level,
    policy: &Policy,
    observation: &Observation,
    draws: Draws,
    decision: &mut Decision,
) {
    dispatch!(level, simd => judge_inlined(simd, policy, observation, draws, decision));
}

/// Every level that this processor has, the lowest first.
#[cfg(test)]
pub(super) fn levels() -> Vec<Level> {
    let (lowest, best) = (Level::baseline(), Level::new());
    #[cfg(target_arch = "x86_64")]
    let between = [best.as_sse4_2().map(Level::Sse4_2), best.as_avx2().map(Level::Avx2)];
    #[cfg(not(target_arch = "x86_64"))]
    let between = [None; 0];
    [lowest].into_iter().chain(between.into_iter().flatten()).chain([best]).collect()
}

/// As [`judge`], compiled once for the instructions of each level.
#[inline(always)]
fn judge_inlined<S: Simd>(simd: S, policy: &Policy, observation: &Observation, draws: Draws, decision: &mut Decision) {
    let overrides = &observation.request.overrides;
    let replaced;
    let policy = if policy.is_unchanged_by(overrides) {
        policy
    } else {
        replaced = policy.under(overrides);
        &replaced
    };
    decision.begin(policy, observation);
    apply_rules(policy, observation, decision);
    let pricing = Pricing::of(policy, observation, decision);
    pricing.price(observation, decision);
    pricing.select(simd, observation, draws, decision);
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
    #[inline(always)]
    fn of(policy: &'a Policy, observation: &Observation, decision: &mut Decision) -> Self {
        decision.no_worker = no_worker_kind(observation, decision);
        let affinity = AffinityEffect::of(policy, observation, decision);
        affinity.apply(observation, decision);
        let eligible = decision.eligible_rows.iter().map(|row| observation.workers.row(*row as usize));
        let recent = |now_ms| RecentSums::of(observation.workers.recents(), &decision.eligible_rows, now_ms);
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
    #[inline(always)]
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
    #[inline(always)]
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
    #[inline(always)]
    fn select<S: Simd>(&self, simd: S, observation: &Observation, draws: Draws, decision: &mut Decision) {
        decision.seed = draws.seed();
        decision.eligible = decision.eligible_rows.len() as u32;
        let rows = &decision.eligible_rows;
        let places = PlaceFacts {
            requests: |place: usize| observation.workers.requests(rows[place] as usize) as f64,
            worker: |place: usize| observation.workers.worker(rows[place] as usize),
            first_token_s: |place: usize| {
                let facts = observation.workers.row(rows[place] as usize);
                let terms = self.terms(&observation.request, place as u32, rows[place], &facts);
                terms.queue_s + terms.prefill_s + terms.fetch_s
            },
        };
        let listed = observation.request.candidates_max as usize;
        let (pick, drawing) = (self.policy.pick(), &mut draws.begin());
        decision.ties = choose(simd, &decision.costs, places, listed, pick, drawing, &mut decision.selected);
    }

    /// Lists the selected workers with what is known of them.
    #[inline(always)]
    fn list(&self, observation: &Observation, decision: &mut Decision) {
        let workers = &observation.workers;
        let Decision { candidates, selected, eligible_rows, only_costs, .. } = decision;
        candidates.resize(selected.len(), Scored::default());
        for (at, (priced, listed)) in selected.iter().zip(candidates).enumerate() {
            let row = eligible_rows[priced.place as usize];
            listed.set(workers, row as usize);
            if *only_costs && at > 0 {
                // Written in place: a value that a branch yields is made elsewhere and copied.
                listed.terms = CostTerms::default();
                listed.terms.cost = priced.cost;
            } else {
                listed.terms = self.terms(&observation.request, priced.place, row, &workers.row(row as usize));
            }
        }
        let chosen = decision.candidates.first().map(|chosen| chosen.worker);
        decision.affinity = self.affinity.outcome(observation, chosen);
    }
}
