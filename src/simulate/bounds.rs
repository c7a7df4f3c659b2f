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

use super::experiment::silent;
use super::figures::Outcome;
use super::peer_rules::{Candidate, Question, Rule};
use super::policies::SimulatedPolicy;
use super::router::Decider;
use super::routers::RouterSettings;
use super::run::{FleetChange, FleetChangeKind, Run, Settings};
use super::workload::Workload;
use crate::engine_law::EngineLaw;
use crate::fleet::PoolRole;
use crate::ids::Tier;
use crate::simulated_engine::{EngineSpec, TierSpec};

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

/// A run in which every request goes to the worker that is planned for it.
fn replayed(workload: &Workload, settings: &Settings, plan: &[u32]) -> Vec<Outcome> {
    let decider = || Some(vec![Decider::Peer(Box::new(Planned(plan.to_vec())) as Box<dyn Rule>)]);
    Run::new(workload, settings, decider, &silent).map_or_else(Vec::new, Run::finish)
}

/// The fleet as one engine: the memory of all, and a step in the time that one engine takes, divided by their number.
/// Each constant of a mixed fleet is that of its fastest engine. Pools are one, and nothing is handed over.
#[must_use]
pub fn pooled_settings(settings: &Settings) -> Settings {
    let Some(first) = settings.engines.first() else { return settings.clone() };
    let engines = &settings.engines;
    let share = u32::try_from(engines.len()).unwrap_or(u32::MAX);
    let pooled = EngineSpec {
        class: "pooled".into(),
        role: PoolRole::Both,
        law: engines.iter().fold(first.law, |law, engine| fastest(&law, &engine.law)),
        kv_tokens: engines.iter().map(|engine| engine.kv_tokens).sum(),
        step_tokens_max: engines.iter().map(|engine| engine.step_tokens_max).max().unwrap_or(0),
        sequences_max: engines.iter().map(|engine| engine.sequences_max).fold(0, u32::saturating_add),
        tiers: pooled_tiers(engines),
        ..first.clone()
    };
    let speeds = FleetChange { at_s: 0.0, worker: 0, kind: FleetChangeKind::Slows(1.0 / f64::from(share)) };
    let routers = RouterSettings::default();
    Settings { engines: vec![pooled], changes: vec![speeds], routers, ..settings.clone() }
}

/// The lesser of each constant.
fn fastest(a: &EngineLaw, b: &EngineLaw) -> EngineLaw {
    let (prefill, decode) = (&a.prefill, &a.decode);
    EngineLaw::of(
        [
            prefill.base_s.min(b.prefill.base_s),
            prefill.token_s.min(b.prefill.token_s),
            prefill.attention_s.min(b.prefill.attention_s),
        ],
        [
            decode.step_s.min(b.decode.step_s),
            decode.request_s.min(b.decode.request_s),
            decode.kv_token_s.min(b.decode.kv_token_s),
        ],
    )
}

/// The stores of all engines, from the fastest to the slowest: the room of all and the speed of the fastest.
fn pooled_tiers(engines: &[EngineSpec]) -> Vec<TierSpec> {
    let of_tier = |tier: Tier| {
        let stores = || engines.iter().flat_map(|engine| &engine.tiers).filter(move |store| store.tier == tier);
        let token_s = stores().map(|store| store.token_s).reduce(f64::min)?;
        Some(TierSpec { tier, tokens: stores().map(|store| store.tokens).sum(), token_s })
    };
    [Tier::Host, Tier::Disk, Tier::External].into_iter().filter_map(of_tier).collect()
}

/// Runs a workload on the pooled server. Requests that one of the fleet's engines could not hold are refused there too,
/// and end their sessions. `arrived` hears how many more requests have arrived. `None`: the fleet has no engine.
#[must_use]
pub fn pooled(workload: &Workload, settings: &Settings, arrived: &dyn Fn(u64)) -> Option<Vec<Outcome>> {
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
    super::simulate_with_progress(&held, &pooled_settings(settings), &SimulatedPolicy::named("round-robin"), arrived)
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
/// the longer end-to-end time moves to a random other worker. The same for the same `seed`. `tried` is called after each
/// try. For fleets without pools.
#[must_use]
pub fn hindsight(
    workload: &Workload,
    settings: &Settings,
    outcomes: Vec<Outcome>,
    (tries, seed): (usize, u64),
    tried: &dyn Fn(),
) -> Hindsight {
    let mut best = Hindsight { outcomes, tries: 0, kept: 0 };
    let workers = settings.engines.len();
    if workers < 2 || best.outcomes.is_empty() || settings.has_pools() {
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
        tried();
        let (one, other) = (rng.random_range(0..plan.len()), rng.random_range(0..plan.len()));
        let slow =
            |at: usize| best.outcomes.get(at).map_or(0, |outcome| outcome.end_ns.saturating_sub(outcome.arrived_ns));
        let moved = if slow(one) >= slow(other) { one } else { other };
        let before = plan[moved];
        plan[moved] = (before + rng.random_range(1..workers as u32)) % workers as u32;
        let outcomes = replayed(workload, settings, &plan);
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
        super::super::experiment::outcomes(workload, settings, policy, &silent).expect("a policy of this name")
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
        let plan: Vec<u32> = outcomes.iter().map(|outcome| outcome.worker).collect();
        let again = replayed(&workload, &settings, &plan);
        assert!(again.iter().zip(&outcomes).all(|(again, first)| again.end_ns == first.end_ns));
        assert_eq!(again.len(), outcomes.len());
    }

    #[test]
    fn hindsight_is_never_worse_and_the_same_for_a_seed() {
        let (workload, settings) = (chat(120), super::super::tests::fleet(3));
        let first = run(&workload, &settings, "round-robin");
        let total = |outcomes: &[Outcome]| outcomes.iter().map(Outcome::e2e_s).sum::<f64>();
        let found = hindsight(&workload, &settings, first.clone(), (40, 1), &|| ());
        assert!(found.kept > 0 && total(&found.outcomes) < total(&first));
        let again = hindsight(&workload, &settings, first, (40, 1), &|| ());
        assert_eq!((again.kept, total(&again.outcomes)), (found.kept, total(&found.outcomes)));
    }
}
