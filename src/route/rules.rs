//! Eligibility: the rules that remove workers, in their order, and the error if no worker is left.

use super::decision::Decision;
use super::observation::{Observation, RuleFacts, WorkerFacts};
use super::policy::{BusyThresholds, Policy};
use crate::error::Kind;
use crate::ids::Worker;
use crate::protocol::{ReplyNotes, WorkerState};

/// A rule that removes workers from a decision. The order of the variants is the order of application.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Rule {
    /// The worker is not on the request's allow-list.
    NotAllowed,
    /// The worker does not advertise the request's adapter, and others do.
    NoAdapter,
    /// The worker takes no new requests.
    Draining,
    /// The worker's publisher has been gone too long, and other workers are there.
    Down,
    /// The worker failed a gateway recently, and other workers are there.
    BackingOff,
    /// The request is pinned to another worker.
    NotPinned,
    /// The worker lacks a label that the request requires.
    Taints,
    /// All ranks of the worker's engine are above a busy threshold.
    Busy,
    /// Trust in the worker is below the policy's minimum.
    Trust,
    /// The request's session is bound to another worker, which it must not leave.
    BoundElsewhere,
}

impl Rule {
    /// Every rule, in the order of application.
    pub const ALL: &'static [Self] = &[
        Self::NotAllowed,
        Self::NoAdapter,
        Self::Draining,
        Self::Down,
        Self::BackingOff,
        Self::NotPinned,
        Self::Taints,
        Self::Busy,
        Self::Trust,
        Self::BoundElsewhere,
    ];

    /// The name used in replies and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::NotAllowed => "not_allowed",
            Self::NoAdapter => "no_adapter",
            Self::Draining => "draining",
            Self::Down => "down",
            Self::BackingOff => "backing_off",
            Self::NotPinned => "not_pinned",
            Self::Taints => "taints",
            Self::Busy => "busy",
            Self::Trust => "trust",
            Self::BoundElsewhere => "bound_elsewhere",
        }
    }

    /// Whether the rule rests on a guess that a worker is dead. If it removes all workers, it is ignored.
    const fn is_liveness(self) -> bool {
        matches!(self, Self::Down | Self::BackingOff)
    }
}

/// Lists the eligible workers, and the removed ones with their rule.
pub(super) fn apply_rules(policy: &Policy, observation: &Observation, decision: &mut Decision) {
    if observation.workers.admits_all(policy) {
        decision.eligible_rows.extend(0..observation.workers.len() as u32);
        return;
    }
    list_idle_engines(&policy.busy, observation, decision);
    // The adapter rule does not apply if no worker advertises adapters, or if the request is pinned.
    let mut rules = Rules { policy, adapter: false, ignores_liveness: false };
    rules.adapter = rules.list(observation, decision) && observation.request.pin.is_none();
    if rules.adapter {
        rules.list(observation, decision);
    }
    let removed = |rule: fn(Rule) -> bool| decision.removed.iter().any(|(by, _)| rule(*by));
    let live_workers_were_removed = removed(|rule| matches!(rule, Rule::Busy | Rule::Trust));
    if decision.eligible_rows.is_empty() && removed(Rule::is_liveness) && !live_workers_were_removed {
        rules.ignores_liveness = true;
        rules.list(observation, decision);
        if !decision.eligible_rows.is_empty() {
            decision.notes.insert(ReplyNotes::ALL_DOWN);
        }
    }
}

/// Lists the engines with a rank that is not busy, if the policy has busy thresholds.
fn list_idle_engines(busy: &BusyThresholds, observation: &Observation, decision: &mut Decision) {
    decision.engines_idle.clear();
    if busy.any() {
        let idle = observation.workers.iter().filter(|facts| !is_busy(busy, facts));
        decision.engines_idle.extend(idle.map(|facts| facts.worker.id));
        decision.engines_idle.sort_unstable();
    }
}

/// Whether a rank is above a threshold, by its bookings or by its own load report.
fn is_busy(busy: &BusyThresholds, facts: &WorkerFacts) -> bool {
    let report = facts.load.engine.unwrap_or_default();
    let blocks = facts.load.decode_blocks.max(report.decode_blocks) as f64;
    let tokens = facts.load.prefill_tokens.max(report.prefill_tokens);
    let capacity = Some(facts.capacity_blocks as f64).filter(|capacity| *capacity > 0.0);
    let decode = busy.decode_blocks_share.zip(capacity).is_some_and(|(share, capacity)| blocks > share * capacity);
    let usage = f64::from(report.kv_usage_millionths) / 1e6;
    let decode = decode || busy.decode_blocks_share.is_some_and(|share| usage > share);
    let prefill = busy.prefill_tokens.is_some_and(|most| tokens > most);
    let steps = busy.prefill_steps.is_some_and(|steps| tokens as f64 > steps * facts.batched_tokens_max as f64);
    decode || prefill || steps
}

/// The rules of one decision.
struct Rules<'a> {
    policy: &'a Policy,
    /// Whether only workers with the request's adapter stay.
    adapter: bool,
    /// Whether down and backing-off workers stay.
    ignores_liveness: bool,
}

impl Rules<'_> {
    /// Sorts every worker into eligible or removed. Returns whether an allowed worker advertises the request's adapter.
    fn list(&self, observation: &Observation, decision: &mut Decision) -> bool {
        decision.eligible_rows.clear();
        decision.removed.clear();
        let busy = self.policy.busy.any();
        let mut advertised = false;
        for (row, facts) in observation.workers.rule_facts().enumerate() {
            advertised |= facts.constraints.allowed && facts.constraints.has_adapter;
            let idle = !busy || decision.engines_idle.binary_search(&facts.worker.id).is_ok();
            // Most workers stay; this check does not search for the first rule that applies.
            if self.admits(&facts, idle) {
                decision.eligible_rows.push(row as u32);
            } else if let Some(rule) = self.removed_by(&facts, idle) {
                decision.removed.push((rule, facts.worker));
            }
        }
        advertised
    }

    /// Whether no rule removes a worker.
    #[inline]
    const fn admits(&self, facts: &RuleFacts, idle: bool) -> bool {
        facts.constraints.allowed
            & (facts.constraints.has_adapter | !self.adapter)
            & (matches!(facts.state, WorkerState::Joining | WorkerState::Ready) | self.admits_down(facts))
            & (!facts.backing_off | self.ignores_liveness)
            & facts.constraints.is_pinned
            & facts.constraints.has_required_taints
            & idle
            & (facts.trust_level as u8 >= self.policy.trust_min as u8)
    }

    /// Whether a worker stays although it is down.
    const fn admits_down(&self, facts: &RuleFacts) -> bool {
        self.ignores_liveness & matches!(facts.state, WorkerState::Down)
    }

    /// The first rule that removes a worker.
    #[inline(never)]
    fn removed_by(&self, facts: &RuleFacts, idle: bool) -> Option<Rule> {
        let rules = [
            (!facts.constraints.allowed, Rule::NotAllowed),
            (self.adapter && !facts.constraints.has_adapter, Rule::NoAdapter),
            (facts.state == WorkerState::Draining, Rule::Draining),
            (facts.state == WorkerState::Down && !self.ignores_liveness, Rule::Down),
            (facts.backing_off && !self.ignores_liveness, Rule::BackingOff),
            (!facts.constraints.is_pinned, Rule::NotPinned),
            (!facts.constraints.has_required_taints, Rule::Taints),
            (!idle, Rule::Busy),
            (facts.trust_level < self.policy.trust_min, Rule::Trust),
        ];
        rules.iter().find(|(applies, _)| *applies).map(|(_, rule)| *rule)
    }
}

/// Why no worker is eligible; `None` if one is.
pub(super) fn no_worker_kind(observation: &Observation, decision: &Decision) -> Option<Kind> {
    if !decision.eligible_rows.is_empty() {
        return None;
    }
    let pin = observation.request.pin;
    let of_pinned = |worker: Worker| pin.is_none_or(|pin| pin.selects(worker));
    let removed = |rule: fn(Rule) -> bool| decision.removed.iter().any(|(by, of)| rule(*by) && of_pinned(*of));
    let temporary = |rule| matches!(rule, Rule::Draining | Rule::Down | Rule::BackingOff);
    Some(match pin {
        Some(_) if removed(|rule| rule == Rule::NotAllowed) => Kind::PinnedNotAllowed,
        Some(_) if removed(|rule| rule == Rule::Busy) => Kind::PinnedBusy,
        None if removed(|rule| rule == Rule::Busy) => Kind::AllBusy,
        _ if observation.workers.is_empty() || removed(temporary) => Kind::NobodyAvailable,
        _ => Kind::AllFiltered,
    })
}
