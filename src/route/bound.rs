//! What it means to a decision that the request's session is bound to a worker.

use super::cost::CostTerms;
use super::decision::Decision;
use super::mode::Mode;
use super::observation::{Observation, WorkerFacts};
use super::policy::Policy;
use super::rule::Rule;
use crate::ids::Worker;

/// How far a session is kept with its worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AffinityMode {
    /// Not at all.
    #[default]
    Off,
    /// Its worker's cost is lessened by a factor.
    Soft,
    /// Its worker is taken, as long as it may be chosen and is not overloaded.
    Hard,
}

impl AffinityMode {
    /// The names used in the configuration.
    pub const NAMES: [&'static str; 3] = ["off", "soft", "hard"];
    /// Every mode, in the order of [`AffinityMode::NAMES`].
    pub const ALL: [Self; 3] = [Self::Off, Self::Soft, Self::Hard];
}

/// How sessions are kept with their workers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AffinityPolicy {
    /// How far.
    pub mode: AffinityMode,
    /// How long a session is bound that nothing is booked for, seconds.
    pub ttl_s: u32,
    /// Factor of the bound worker's cost where that is only lessened, 0 to 1.
    pub factor: f64,
    /// A worker is overloaded beyond so many times the average of requests in flight, this one included; at least 1.
    pub load_max: f64,
}

impl Default for AffinityPolicy {
    fn default() -> Self {
        Self { mode: AffinityMode::Off, ttl_s: 3600, factor: 0.5, load_max: 1.25 }
    }
}

/// What is known of the session that a request names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AffinitySession {
    /// It names none, or sessions are not kept.
    #[default]
    None,
    /// It is bound to nobody yet, or no more.
    Unbound,
    /// It is bound to this worker.
    Bound(Worker),
}

/// What became of a session's binding in a decision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AffinityOutcome {
    /// There is no session to keep.
    #[default]
    None,
    /// It was bound to nobody.
    New,
    /// It stays with its worker.
    Kept,
    /// Its worker is not in the running.
    Ineligible,
    /// Its worker has more in flight than the average allows.
    Overloaded,
    /// Another was cheaper in spite of the factor.
    Outweighed,
    /// The request is pinned to another.
    Pinned,
}

/// Whether the worker that a session is bound to is preferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AffinityEffect {
    /// Nobody is.
    None,
    /// It may not be chosen, or is overloaded.
    Lost(AffinityOutcome),
    /// The one at this place of the observation is cheaper.
    Discounted(u32),
    /// Only it stays in the running.
    Only(u32),
}

impl AffinityEffect {
    /// Who is preferred among those in the running.
    pub(super) fn of(policy: &Policy, observation: &Observation, decision: &Decision) -> Self {
        let affinity = &policy.affinity;
        let AffinitySession::Bound(worker) = observation.request.session else { return Self::None };
        // A pin says more than a habit.
        if affinity.mode == AffinityMode::Off || observation.request.pin.is_some() {
            return Self::None;
        }
        let running = || decision.eligible_rows.iter().filter_map(|place| observation.workers.get(*place as usize));
        let Some(at) = running().position(|facts| facts.worker == worker) else {
            return Self::Lost(AffinityOutcome::Ineligible);
        };
        let place = decision.eligible_rows[at];
        if running().nth(at).is_some_and(|bound| is_overloaded(affinity.load_max, bound, running())) {
            return Self::Lost(AffinityOutcome::Overloaded);
        }
        match affinity.mode {
            AffinityMode::Soft if chooses_by_lowest_cost(policy.mode) => Self::Discounted(place),
            _ => Self::Only(place),
        }
    }

    /// The place of the worker that is cheaper, if one is.
    pub(super) const fn discounted_row(self) -> Option<u32> {
        if let Self::Discounted(place) = self { Some(place) } else { None }
    }

    /// What the worker at a place costs, if it is preferred.
    #[inline]
    pub(super) fn discount(self, policy: &Policy, place: u32, terms: CostTerms) -> CostTerms {
        if self != Self::Discounted(place) {
            return terms;
        }
        let affinity_factor = factor(&policy.affinity, terms.cost);
        CostTerms { affinity_factor, cost: terms.cost * affinity_factor, ..terms }
    }

    /// Takes the others out of the running, where only one may stay.
    pub(super) fn apply(self, observation: &Observation, decision: &mut Decision) {
        let Self::Only(only) = self else { return };
        let others = decision.eligible_rows.iter().filter(|place| **place != only);
        let others = others.filter_map(|place| observation.workers.get(*place as usize));
        decision.removed.extend(others.map(|facts| (Rule::BoundElsewhere, facts.worker)));
        decision.eligible_rows.clear();
        decision.eligible_rows.push(only);
    }

    /// What became of the binding, once somebody is chosen.
    pub(super) fn outcome(self, observation: &Observation, chosen: Option<Worker>) -> AffinityOutcome {
        match (observation.request.session, self) {
            (AffinitySession::None, _) => AffinityOutcome::None,
            (AffinitySession::Unbound, _) => AffinityOutcome::New,
            (AffinitySession::Bound(worker), _) if chosen == Some(worker) => AffinityOutcome::Kept,
            (AffinitySession::Bound(_), Self::Lost(why)) => why,
            (AffinitySession::Bound(_), _) if observation.request.pin.is_some() => AffinityOutcome::Pinned,
            (AffinitySession::Bound(_), _) => AffinityOutcome::Outweighed,
        }
    }
}

/// By what the cost of the bound worker is lessened. One below nothing cannot be lessened by a factor, nor can one without
/// end: nothing times it is no number.
pub(super) fn factor(affinity: &AffinityPolicy, cost: f64) -> f64 {
    let is_weighable = cost > 0.0 && cost.is_finite();
    if is_weighable { affinity.factor } else { 1.0 }
}

/// Whether one more request is more than `load_max` times the average of all in the running with it: consistent hashing
/// with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016) has the same bound.
fn is_overloaded<'a>(load_max: f64, bound: &WorkerFacts, running: impl Iterator<Item = &'a WorkerFacts>) -> bool {
    let (mut requests, mut workers) = (1_u64, 0_u64);
    for facts in running {
        requests += facts.load.requests;
        workers += 1;
    }
    let allowed = (load_max * requests as f64 / workers.max(1) as f64).ceil();
    (bound.load.requests + 1) as f64 > allowed
}

/// Whether a lower cost is what a mode chooses by, so that a factor of it says something. Elsewhere a preference is to
/// be chosen.
const fn chooses_by_lowest_cost(mode: Mode) -> bool {
    matches!(mode, Mode::Kv | Mode::LoadAware | Mode::Approximate | Mode::LeastLoaded | Mode::Lmetric)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::WorkerState;
    use crate::ids::WorkerIndex;
    use crate::load::Load;
    use crate::route::{Draws, Overrides, RequestFacts, judge};

    /// Workers 0, 1 and so on with so many requests in flight each, and a session that is bound to worker 0.
    fn facts(requests: &[u64]) -> Observation {
        let worker = |(place, requests): (usize, &u64)| WorkerFacts {
            index: WorkerIndex(place as u32),
            worker: Worker::new(place as u64, 0),
            load: Load { requests: *requests, decode_blocks: *requests * 10, ..Load::default() },
            ..WorkerFacts::default()
        };
        let request = RequestFacts {
            prompt_tokens: 160,
            block_size: 16,
            whole_blocks: 10,
            candidates_max: 8,
            session: AffinitySession::Bound(Worker::new(0, 0)),
            ..RequestFacts::default()
        };
        Observation { request, workers: requests.iter().enumerate().map(worker).collect(), ..Observation::default() }
    }

    fn policy(mode: AffinityMode, load_max: f64) -> Policy {
        Policy { affinity: AffinityPolicy { mode, load_max, ..AffinityPolicy::default() }, ..Policy::default() }
    }

    fn judged(policy: &Policy, observation: &Observation) -> (u64, AffinityOutcome, u32) {
        let mut decision = Decision::default();
        judge(policy, observation, Draws::new(1), &mut decision);
        (decision.candidates[0].worker.id.0, decision.affinity, decision.eligible)
    }

    #[test]
    fn a_hard_session_stays_until_its_worker_is_overloaded_or_out_of_the_running() {
        let hard = policy(AffinityMode::Hard, 2.0);
        // 4 requests, the next one included, on 2 workers: 4 are allowed on one.
        assert_eq!(judged(&hard, &facts(&[3, 0])), (0, AffinityOutcome::Kept, 1));
        // On 3 workers 3 are.
        let (chosen, affinity, eligible) = judged(&hard, &facts(&[3, 0, 0]));
        assert!(chosen != 0 && (affinity, eligible) == (AffinityOutcome::Overloaded, 3));
        let mut drains = facts(&[0, 9]);
        drains.workers[0].state = WorkerState::Draining;
        assert_eq!(judged(&hard, &drains), (1, AffinityOutcome::Ineligible, 1));
        let mut pinned = facts(&[0, 9]);
        (pinned.request.pin, pinned.workers[0].is_pinned) = (Some(Worker::new(1, 0)), false);
        assert_eq!(judged(&hard, &pinned), (1, AffinityOutcome::Pinned, 1));
        assert_eq!(judged(&policy(AffinityMode::Off, 1.0), &facts(&[3, 0])).0, 1, "nobody is preferred");
    }

    #[test]
    fn a_soft_session_stays_while_its_worker_is_cheap_enough() {
        let soft = policy(AffinityMode::Soft, f64::MAX);
        // 10 to prefill and 10 to decode, 20 in all; half of 20 + 10 is less, half of 20 + 30 is not.
        assert_eq!(judged(&soft, &facts(&[1, 0])), (0, AffinityOutcome::Kept, 2));
        assert_eq!(judged(&soft, &facts(&[3, 0])), (1, AffinityOutcome::Outweighed, 2));
        // Where a cost is nothing that can be weighed, it stays as a hard one does.
        for mode in [Mode::Random, Mode::RoundRobin, Mode::PowerOfTwo, Mode::DeviceAwareWeighted] {
            let mut observation = facts(&[3, 0]);
            observation.request.overrides = Overrides { mode: Some(mode), ..Overrides::default() };
            assert_eq!(judged(&soft, &observation), (0, AffinityOutcome::Kept, 1), "{mode:?}");
        }
    }

    #[test]
    fn a_cost_without_end_stays_so_whatever_the_factor() {
        let affinity = AffinityPolicy { factor: 0.0, ..AffinityPolicy::default() };
        let free = Policy { affinity, ..Policy::default() };
        let discount =
            |cost| AffinityEffect::Discounted(0).discount(&free, 0, CostTerms { cost, ..CostTerms::default() }).cost;
        assert_eq!([30.0, f64::INFINITY, -3.0].map(discount), [0.0, f64::INFINITY, -3.0]);
    }

    #[test]
    fn a_session_that_is_new_says_so() {
        let mut observation = facts(&[0, 0]);
        observation.request.session = AffinitySession::Unbound;
        assert_eq!(judged(&policy(AffinityMode::Hard, 1.0), &observation).1, AffinityOutcome::New);
        observation.request.session = AffinitySession::None;
        assert_eq!(judged(&policy(AffinityMode::Hard, 1.0), &observation).1, AffinityOutcome::None);
    }
}
