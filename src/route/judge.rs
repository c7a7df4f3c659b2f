//! Judging: from an observation to a decision. Nothing is read here but arguments: the same observation, policy and
//! draws give the same bits.

use super::bound::Favour;
use super::cost::{Among, CostTerms, cost};
use super::decision::{Decision, Priced, Scored};
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
    let running = decision.running.iter().map(|place| &observation.workers[*place as usize]);
    let among = Among::of(policy, observation.asked.turn, running.clone());
    let terms = |at: u32, observed: &Observed| {
        let terms = cost(policy, &observation.asked, observed, &among, at);
        let place = decision.running.get(at as usize).copied().unwrap_or_default();
        favour.lessened(policy, place, terms)
    };
    // Most are not listed: of them nothing is kept but what choosing needs.
    decision.priced.extend(running.zip(0_u32..).map(|(observed, place)| {
        let CostTerms { cost, active_requests, .. } = terms(place, observed);
        Priced { place, cost, active_requests }
    }));
    decision.eligible = decision.priced.len() as u32;
    let listed = observation.asked.candidates_max as usize;
    let pick = policy.mode.pick(policy.temperature);
    decision.ties = choose(&mut decision.priced, listed, pick, &mut draws.begin());
    let of = |place: u32| observation.workers.get(*decision.running.get(place as usize)? as usize);
    let scored = |priced: &Priced| of(priced.place).map(|observed| Scored::of(observed, terms(priced.place, observed)));
    decision.candidates.extend(decision.priced.iter().filter_map(scored));
    let chosen = decision.candidates.first().map(|chosen| chosen.worker);
    decision.affinity = favour.outcome(observation, chosen);
}
