//! Bounds: what no policy can beat, and what hindsight could. They are reported beside the policies and are none.
//!
//! * **Pooled**: the fleet as one engine with the speed and the memory of all. It never waits while another worker is
//!   idle, and finds in its cache what any worker would have cached. It computes one prompt at the speed of the whole
//!   fleet, which no worker can do: the bound is loose where a request's own prefill is most of its time. (To raise each
//!   request to what one worker takes alone makes it no bound: short prompts behind a long one wait there, but not in a
//!   fleet with an idle worker.)
//! * **Hindsight**: local search over the assignments of a finished run. One request at a time is moved to another
//!   worker, the whole run is replayed, and the move is kept if the sum of all end-to-end times falls. The result can be
//!   achieved by who knows the future, and lies between the policies and the optimum.

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::figures::Outcome;
use super::peer_rules::{Candidate, Question, Rule};
use super::policies::SimulatedPolicy;
use super::router::Decider;
use super::run::{FleetChange, FleetChangeKind, Run, Settings};
use super::workload::Workload;
use crate::simulated_engine::EngineSpec;

/// The name of the pooled bound in tables.
pub const POOLED: &str = "pooled (bound)";
/// The name of hindsight in tables.
pub const HINDSIGHT: &str = "hindsight (bound)";

/// Sends every request to the worker that is planned for it, by the order of arrivals.
struct Planned(Vec<u32>);

impl Rule for Planned {
    fn choose(&mut self, asked: &Question<'_>, candidates: &[Candidate<'_>], _: &mut Xoshiro256PlusPlus) -> usize {
        let planned = usize::try_from(asked.id).ok().and_then(|id| self.0.get(id)).map(|worker| *worker as usize);
        // A worker that is not there cannot be chosen: the first one stands in for it.
        candidates.iter().position(|candidate| Some(candidate.worker) == planned).unwrap_or(0)
    }
}

/// The fleet as one engine: the memory of all, and a step in the time that one engine takes, divided by their number.
/// Of a mixed fleet, every engine counts as one of the first kind.
#[must_use]
pub fn pooled_settings(settings: &Settings) -> Settings {
    let Some(first) = settings.engines.first() else { return settings.clone() };
    let engines = settings.engines.len();
    let share = u32::try_from(engines).unwrap_or(u32::MAX);
    let pooled = EngineSpec {
        class: "pooled".into(),
        kv_tokens: settings.engines.iter().map(|engine| engine.kv_tokens).sum(),
        sequences_max: first.sequences_max.saturating_mul(share),
        ..first.clone()
    };
    let speeds = FleetChange { at_s: 0.0, worker: 0, kind: FleetChangeKind::Slows(1.0 / f64::from(share)) };
    Settings { engines: vec![pooled], changes: vec![speeds], ..settings.clone() }
}

/// Runs a workload on the pooled server. Requests that one of the fleet's engines could not hold are refused there too,
/// and end their sessions. `None`: the fleet has no engine.
#[must_use]
pub fn pooled(workload: &Workload, settings: &Settings) -> Option<Vec<Outcome>> {
    let least = settings.engines.iter().map(|engine| engine.kv_tokens / u64::from(engine.block_size)).min()?;
    let block_size = u64::from(settings.engines.first()?.block_size);
    let mut held = workload.clone();
    for session in &mut held.sessions {
        let fits = |tokens: u64| tokens.div_ceil(block_size) <= least;
        let tokens = |prompt: u32, output: u32| u64::from(prompt) + u64::from(output.max(1));
        let whole = session.turns.iter().take_while(|turn| fits(tokens(turn.prompt_tokens(), turn.output.tokens)));
        let whole = whole.count();
        session.turns.truncate(whole);
    }
    held.sessions.retain(|session| !session.turns.is_empty());
    super::simulate(&held, &pooled_settings(settings), &SimulatedPolicy::named("round-robin"))
}

/// What a hindsight search found.
#[derive(Clone, Debug)]
pub struct Hindsight {
    /// The outcomes of the best assignment.
    pub outcomes: Vec<Outcome>,
    /// Moves that were tried.
    pub tries: usize,
    /// Moves that were kept.
    pub kept: usize,
}

/// Improves on the assignments of a run of the same workload under the same settings. Each of at most `tries` tries
/// replays the whole run, so this is for short workloads. It tries slow requests first: of two random ones, the one with
/// the longer end-to-end time moves to a random other worker. The same for the same `seed`.
#[must_use]
pub fn hindsight(
    workload: &Workload,
    settings: &Settings,
    outcomes: Vec<Outcome>,
    tries: usize,
    seed: u64,
) -> Hindsight {
    let mut best = Hindsight { outcomes, tries: 0, kept: 0 };
    let workers = settings.engines.len();
    if workers < 2 || best.outcomes.is_empty() {
        return best;
    }
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut plan: Vec<u32> = best.outcomes.iter().map(|outcome| outcome.worker).collect();
    let total_ns = |outcomes: &[Outcome]| -> u64 {
        outcomes.iter().map(|outcome| outcome.end_ns.saturating_sub(outcome.arrived_ns)).sum()
    };
    let mut least_ns = total_ns(&best.outcomes);
    while best.tries < tries {
        best.tries += 1;
        let (one, other) = (rng.random_range(0..plan.len()), rng.random_range(0..plan.len()));
        let slow =
            |at: usize| best.outcomes.get(at).map_or(0, |outcome| outcome.end_ns.saturating_sub(outcome.arrived_ns));
        let moved = if slow(one) >= slow(other) { one } else { other };
        let before = plan[moved];
        plan[moved] = (before + rng.random_range(1..workers as u32)) % workers as u32;
        let outcomes = Run::new(workload, settings, Decider::Peer(Box::new(Planned(plan.clone())))).finish();
        // In a closed loop the number of arrivals may differ; a plan that serves fewer is no improvement.
        if outcomes.len() == best.outcomes.len() && total_ns(&outcomes) < least_ns {
            (least_ns, best.kept) = (total_ns(&outcomes), best.kept + 1);
            best.outcomes = outcomes;
        } else {
            plan[moved] = before;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::super::figures::Slo;
    use super::super::measure::Measured;
    use super::super::workload::generators::Chat;
    use super::*;

    fn chat(requests: usize) -> Workload {
        Chat { requests, sessions_per_s: 4.0, ..Chat::default() }.generate(3)
    }

    fn run(workload: &Workload, settings: &Settings, policy: &str) -> Vec<Outcome> {
        super::super::experiment::outcomes(workload, settings, policy).expect("a policy of this name")
    }

    #[test]
    fn no_policy_beats_the_pooled_server() {
        let (workload, settings) = (chat(400), super::super::tests::fleet(4));
        let of = |policy| Measured::of(&run(&workload, &settings, policy), &Slo::default(), &settings.engines);
        let pooled = of(POOLED);
        for policy in ["lpwl", "latency", "round-robin"] {
            let figures = of(policy);
            assert!(pooled.ttft_s.mean < figures.ttft_s.mean && pooled.e2e_s.mean < figures.e2e_s.mean, "{policy}");
            assert!(pooled.hit_rate >= figures.hit_rate, "{policy}");
        }
    }

    #[test]
    fn a_replay_of_a_runs_own_assignments_is_that_run() {
        let (workload, settings) = (chat(150), super::super::tests::fleet(3));
        let outcomes = run(&workload, &settings, "lpwl");
        let plan = outcomes.iter().map(|outcome| outcome.worker).collect();
        let again = Run::new(&workload, &settings, Decider::Peer(Box::new(Planned(plan)))).finish();
        assert!(again.iter().zip(&outcomes).all(|(again, first)| again.end_ns == first.end_ns));
        assert_eq!(again.len(), outcomes.len());
    }

    #[test]
    fn hindsight_is_never_worse_and_the_same_for_a_seed() {
        let (workload, settings) = (chat(120), super::super::tests::fleet(3));
        let first = run(&workload, &settings, "round-robin");
        let total = |outcomes: &[Outcome]| outcomes.iter().map(Outcome::e2e_s).sum::<f64>();
        let found = hindsight(&workload, &settings, first.clone(), 40, 1);
        assert!(found.kept > 0 && total(&found.outcomes) < total(&first));
        let again = hindsight(&workload, &settings, first, 40, 1);
        assert_eq!((again.kept, total(&again.outcomes)), (found.kept, total(&found.outcomes)));
    }
}
