//! Judging: from an observation to a decision. Nothing is read here but arguments: the same observation, policy and
//! draws give the same bits.

use super::bound::Favour;
use super::cost::{Among, cost};
use super::decision::{Decision, Scored};
use super::draws::Draws;
use super::observation::{Observation, Observed};
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
    let favour = Favour::of(policy, observation, decision);
    favour.apply(observation, decision);
    price(policy, observation, favour, decision);
    decision.eligible = decision.candidates.len() as u32;
    let listed = observation.asked.candidates_max as usize;
    let pick = policy.mode.pick(policy.temperature);
    decision.ties = choose(&mut decision.candidates, listed, pick, &mut draws.begin());
    let chosen = decision.candidates.first().map(|chosen| chosen.worker);
    decision.affinity = favour.outcome(observation, chosen);
}

/// Makes a candidate of everybody in the running, with what it would cost.
fn price(policy: &Policy, observation: &Observation, favour: Favour, decision: &mut Decision) {
    let running = || decision.running.iter().filter_map(|place| observation.workers.get(*place as usize));
    let among = Among::of(observation.asked.turn, running());
    let Decision { candidates, running: places, .. } = decision;
    let priced = |(at, observed): (usize, &Observed)| {
        let terms = cost(policy, &observation.asked, observed, &among, at as u32);
        Scored::of(observed, favour.lessened(policy, places[at], terms))
    };
    let observed = places.iter().filter_map(|place| observation.workers.get(*place as usize));
    candidates.extend(observed.enumerate().map(priced));
}
