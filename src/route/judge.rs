//! Judging: the rules, the cost of every eligible worker, and the selection. It reads an observation and nothing else.
//!
//! On x86-64 the same code is compiled for three kinds of processor, because a decision about many workers is arithmetic
//! on long columns. Each gives the same bits: no two operations are fused, and sums keep their order.

#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "code for wider vectors needs a processor with its instructions")
)]

use super::affinity::{AffinityEffect, factor};
use super::cost::{PoolFacts, cost, is_plain, plain_costs};
use super::decision::{Decision, Scored};
use super::observation::{Observation, PlainFacts, WorkerFacts};
use super::policy::Policy;
use super::request_facts::RequestFacts;
use super::rules::{apply_rules, no_worker_kind};
use super::select::{Draws, PlaceFacts, choose};
use crate::protocol::CostTerms;
#[cfg(target_arch = "x86_64")]
use crate::simd::SimdLevel;

/// Applies the rules, computes costs and selects. Overwrites `decision`, whose buffers are reused. `policy` is the
/// policy of the space; the observation holds what the request overrides.
pub fn judge(policy: &Policy, observation: &Observation, draws: Draws, decision: &mut Decision) {
    #[cfg(target_arch = "x86_64")]
    match SimdLevel::here() {
        // SAFETY: this level is only that of processors with these features.
        SimdLevel::Avx512Ifma => return unsafe { judge_avx512(policy, observation, draws, decision) },
        // The first processors with AVX-512 lower their clock for wide registers.
        // SAFETY: these levels are only those of processors with these features.
        SimdLevel::Avx512 | SimdLevel::Avx2 => return unsafe { judge_avx2(policy, observation, draws, decision) },
        SimdLevel::Scalar => {}
    }
    judge_inlined(policy, observation, draws, decision);
}

/// As [`judge`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
fn judge_avx512(policy: &Policy, observation: &Observation, draws: Draws, decision: &mut Decision) {
    judge_inlined(policy, observation, draws, decision);
}

/// As [`judge`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi2")]
fn judge_avx2(policy: &Policy, observation: &Observation, draws: Draws, decision: &mut Decision) {
    judge_inlined(policy, observation, draws, decision);
}

/// Every implementation of [`judge`] that this processor can run, the reference first.
#[cfg(test)]
pub(super) fn implementations() -> Vec<fn(&Policy, &Observation, Draws, &mut Decision)> {
    #[cfg_attr(not(target_arch = "x86_64"), expect(unused_mut, reason = "there is no other here"))]
    let mut all: Vec<fn(&Policy, &Observation, Draws, &mut Decision)> = vec![judge_inlined];
    #[cfg(target_arch = "x86_64")]
    {
        if SimdLevel::here() >= SimdLevel::Avx2 {
            // SAFETY: the level is one of a processor with these features.
            all.push(|policy, observation, draws, decision| unsafe {
                judge_avx2(policy, observation, draws, decision)
            });
        }
        if SimdLevel::here() >= SimdLevel::Avx512Ifma {
            // SAFETY: the level is that of a processor with these features.
            all.push(|policy, observation, draws, decision| unsafe {
                judge_avx512(policy, observation, draws, decision)
            });
        }
    }
    all
}

/// As [`judge`], compiled once for the instructions of each caller.
#[inline(always)]
fn judge_inlined(policy: &Policy, observation: &Observation, draws: Draws, decision: &mut Decision) {
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
    #[inline(always)]
    fn of(policy: &'a Policy, observation: &Observation, decision: &mut Decision) -> Self {
        decision.no_worker = no_worker_kind(observation, decision);
        let affinity = AffinityEffect::of(policy, observation, decision);
        affinity.apply(observation, decision);
        let eligible = decision.eligible_rows.iter().map(|row| observation.workers.row(*row as usize));
        let recent = |place: usize| observation.workers.recent(decision.eligible_rows[place] as usize);
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
