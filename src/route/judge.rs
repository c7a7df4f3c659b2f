//! Judging: from an observation to a decision. Nothing is read here but arguments: the same observation, policy and
//! draws give the same bits.

use super::cost::{Among, cost};
use super::decision::{Decision, Scored};
use super::draws::Draws;
use super::observation::Observation;
use super::policy::Policy;
use super::rule::{admit, nobody};
use super::select::choose;

/// Filters, costs and selects; the record goes into `decision`, whose buffers are reused. `policy` is the space's: what
/// the request sets in place of it is in the observation.
pub fn judge(policy: &Policy, observation: &Observation, draws: Draws, decision: &mut Decision) {
    let policy = &policy.under(&observation.asked.overrides);
    decision.begin(policy, observation);
    decision.seed = draws.seed();
    admit(policy, observation, decision);
    decision.nobody = nobody(observation, decision);
    price(policy, observation, decision);
    decision.eligible = decision.candidates.len() as u32;
    let listed = observation.asked.candidates_max as usize;
    let pick = policy.mode.pick(policy.temperature);
    decision.ties = choose(&mut decision.candidates, listed, pick, &mut draws.begin());
}

/// Makes a candidate of everybody in the running, with what it would cost.
fn price(policy: &Policy, observation: &Observation, decision: &mut Decision) {
    let running = || decision.running.iter().filter_map(|place| observation.workers.get(*place as usize));
    let among = Among::of(observation.asked.turn, running());
    let priced =
        |(place, observed)| Scored::of(observed, cost(policy, &observation.asked, observed, &among, place as u32));
    decision.candidates.extend(running().enumerate().map(priced));
}
