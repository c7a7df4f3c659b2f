//! Judging: from an observation to a decision. Nothing is read here but arguments: the same observation, policy and
//! draws give the same bits.

use super::cost::cost;
use super::decision::{Decision, ReplyNotes, Rule, Scored};
use super::draws::Draws;
use super::observation::{Observation, Observed};
use super::policy::Policy;
use super::select::choose;
use crate::fleet::WorkerState;

/// Filters, costs and selects; the record goes into `decision`, whose buffers are reused.
pub fn judge(policy: &Policy, observation: &Observation, draws: Draws, decision: &mut Decision) {
    decision.begin(policy.version, observation);
    decision.seed = draws.seed();
    admit(observation, decision);
    price(policy, observation, decision);
    decision.eligible = decision.candidates.len() as u32;
    let listed = observation.asked.candidates_max as usize;
    decision.ties = choose(&mut decision.candidates, listed, &mut draws.begin());
}

/// Lists who is in the running, and the others with the rule that removed them.
fn admit(observation: &Observation, decision: &mut Decision) {
    list(observation, decision, removed_by);
    if decision.running.is_empty() && decision.removed.iter().any(|(rule, _)| *rule == Rule::Down) {
        // A publisher that is gone need not mean an engine that is: better a doubtful worker than none.
        decision.notes.insert(ReplyNotes::ALL_DOWN);
        list(observation, decision, |observed| removed_by(observed).filter(|rule| *rule != Rule::Down));
    }
}

/// Lists every worker as in the running or under the rule that removed it.
fn list(observation: &Observation, decision: &mut Decision, removed_by: impl Fn(&Observed) -> Option<Rule>) {
    decision.running.clear();
    decision.removed.clear();
    for (place, observed) in observation.workers.iter().enumerate() {
        match removed_by(observed) {
            Some(rule) => decision.removed.push((rule, observed.worker)),
            None => decision.running.push(place as u32),
        }
    }
}

/// The first rule that takes a worker out of the running.
fn removed_by(observed: &Observed) -> Option<Rule> {
    if !observed.allowed {
        return Some(Rule::NotAllowed);
    }
    match observed.state {
        WorkerState::Joining | WorkerState::Ready => None,
        WorkerState::Draining => Some(Rule::Draining),
        WorkerState::Down => Some(Rule::Down),
    }
}

/// Makes a candidate of everybody in the running, with what it would cost.
fn price(policy: &Policy, observation: &Observation, decision: &mut Decision) {
    let running = || decision.running.iter().filter_map(|place| observation.workers.get(*place as usize));
    let prefill_tokens_min = running().map(|observed| observed.load.prefill_tokens).min().unwrap_or(0);
    let priced = |observed| Scored::of(observed, cost(policy, &observation.asked, observed, prefill_tokens_min));
    decision.candidates.extend(running().map(priced));
}
