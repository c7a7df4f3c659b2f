//! Small fleets by hand.

use super::*;
use crate::engine_law::{EngineLaw, EnginePreset};
use crate::route::Bypass;
use crate::simulate::workload::{Session, Span, Turn};
use crate::simulate::{SimulatedPolicy, simulate};

const SPEC_TOKENS: u64 = 100_000;

fn settings(workers: usize) -> Settings {
    let law = EngineLaw::of([5e-3, 5e-5, 1e-9], [1e-2, 3e-5, 3e-8]);
    let preset = EnginePreset { name: "test", law, kv_tokens: SPEC_TOKENS, kv_token_bytes: 1000 };
    let engine = EngineSpec { step_tokens_max: 2048, sequences_max: 64, ..EngineSpec::of(&preset, 16) };
    Settings { event_lag_s: 0.0, prior_factor: None, ..Settings::of(vec![engine; workers], 1) }
}

/// A conversation: each prompt is all that was said before, and 200 tokens more.
fn conversation(at: u64, turns: u64) -> Session {
    let mut prompt = vec![Span { content: 1, from: 0, tokens: 1000 }];
    let turn = |number: u64| {
        prompt.push(Span { content: at * 100 + number * 2 + 2, from: 0, tokens: 200 });
        let output = Span { content: at * 100 + number * 2 + 3, from: 0, tokens: 50 };
        let turn = Turn { think_s: if number == 0 { 0.0 } else { 1.5 }, prompt: prompt.clone(), output };
        prompt.push(output);
        turn
    };
    Session { start_s: at as f64 * 0.05, turns: (0..turns).map(turn).collect() }
}

fn run(workload: &Workload, settings: &Settings, policy: &str) -> Vec<Outcome> {
    simulate(workload, settings, &SimulatedPolicy::parse(policy).unwrap()).unwrap()
}

#[test]
fn a_turn_comes_think_time_after_the_last_one_ended_and_finds_what_was_said() {
    let workload = Workload { sessions: vec![conversation(3, 4)], arrivals: Arrivals::Timed };
    let outcomes = run(&workload, &settings(1), "latency");
    assert_eq!(outcomes.len(), 4);
    assert_eq!(outcomes[0].arrived_ns, 150_000_000);
    for (before, turn) in outcomes.iter().zip(&outcomes[1..]) {
        assert_eq!(turn.arrived_ns, before.end_ns + 1_500_000_000);
        let said = before.prompt_tokens + before.output_tokens - 1;
        assert_eq!((turn.cached_tokens, turn.believed_tokens), (said / 16 * 16, said / 16 * 16));
    }
}

#[test]
fn the_router_believes_what_the_engine_finds_if_events_do_not_lag_and_nothing_overlaps() {
    let mut sessions: Vec<_> = (0..40).map(|at| conversation(at, 3)).collect();
    sessions.iter_mut().enumerate().for_each(|(at, session)| session.start_s = at as f64 * 30.0);
    let outcomes = run(&Workload { sessions, arrivals: Arrivals::Timed }, &settings(3), "lmetric");
    assert!(outcomes.iter().all(|outcome| outcome.believed_tokens == outcome.cached_tokens));
    assert!(outcomes.iter().filter(|outcome| outcome.cached_tokens > 0).count() > 80);
}

#[test]
fn sessions_are_live_one_after_the_other() {
    let sessions = (0..6).map(|at| conversation(at, 2)).collect();
    let outcomes = run(&Workload { sessions, arrivals: Arrivals::Live(1) }, &settings(2), "round-robin");
    assert_eq!(outcomes.len(), 12);
    let in_turn = outcomes.windows(2).all(|pair| pair[1].arrived_ns >= pair[0].end_ns);
    assert!(in_turn, "no two requests are in flight at once");
}

#[test]
fn requests_of_a_worker_that_dies_run_elsewhere() {
    let sessions: Vec<_> = (0..60).map(|at| conversation(at, 2)).collect();
    let workload = Workload { sessions, arrivals: Arrivals::Timed };
    let change = |at_s, kind| FleetChange { at_s, worker: 0, kind };
    let changes = vec![change(1.0, FleetChangeKind::Dies), change(4.0, FleetChangeKind::Joins)];
    let outcomes = run(&workload, &Settings { changes, ..settings(2) }, "latency");
    assert_eq!(outcomes.len(), 120);
    assert!(outcomes.iter().all(|outcome| !outcome.is_refused && outcome.end_ns > outcome.first_ns));
    let on_dead = |outcome: &&Outcome| outcome.worker == 0 && (1_000_000_000..4_000_000_000).contains(&outcome.end_ns);
    assert_eq!(outcomes.iter().filter(on_dead).count(), 0);
    assert!(outcomes.iter().any(|outcome| outcome.worker == 0 && outcome.arrived_ns > 4_000_000_000), "it is back");
}

#[test]
fn a_slow_worker_gets_less_once_that_is_learnt() {
    let sessions: Vec<_> = (0..400).map(|at| conversation(at, 1)).collect();
    let workload = Workload { sessions, arrivals: Arrivals::Timed };
    let changes = vec![FleetChange { at_s: 0.0, worker: 0, kind: FleetChangeKind::Slows(4.0) }];
    let outcomes = run(&workload, &Settings { changes, ..settings(4) }, "latency");
    let of_slow = outcomes[200..].iter().filter(|outcome| outcome.worker == 0).count();
    assert!(of_slow < 40, "{of_slow} of 200 on one of four workers");
}

#[test]
fn a_request_that_no_engine_can_hold_is_refused_and_ends_its_session() {
    let mut session = conversation(1, 3);
    session.turns[1].prompt = vec![Span { content: 9, from: 0, tokens: SPEC_TOKENS as u32 }];
    let outcomes = run(&Workload { sessions: vec![session], arrivals: Arrivals::Timed }, &settings(2), "kv");
    assert_eq!(outcomes.iter().map(|outcome| outcome.is_refused).collect::<Vec<_>>(), [false, true]);
}

#[test]
fn lagging_events_leave_the_router_behind() {
    let sessions: Vec<_> = (0..30).map(|at| conversation(at, 1)).collect();
    let workload = Workload { sessions, arrivals: Arrivals::Timed };
    let believed = |event_lag_s| {
        let outcomes = run(&workload, &Settings { event_lag_s, ..settings(1) }, "kv");
        outcomes.iter().map(|outcome| u64::from(outcome.believed_tokens)).sum::<u64>()
    };
    assert!(believed(0.0) > believed(0.5) && believed(1e6) == 0);
}

/// Two engines that prefill, 0 and 1, and two that decode, 2 and 3. A token takes 0.1 ms on the link.
fn pools() -> Settings {
    let mut settings = settings(4);
    for (at, engine) in settings.engines.iter_mut().enumerate() {
        engine.role = if at < 2 { PoolRole::Prefill } else { PoolRole::Decode };
        engine.receive_token_s = 1e-4;
    }
    settings
}

/// A number of conversations.
fn conversations(sessions: u64, turns: u64) -> Workload {
    let sessions = (0..sessions).map(|at| conversation(at, turns)).collect();
    Workload { sessions, arrivals: Arrivals::Timed }
}

fn placed(outcomes: &[Outcome]) -> Vec<(u32, u64, u64)> {
    outcomes.iter().map(|outcome| (outcome.worker, outcome.first_ns, outcome.end_ns)).collect()
}

#[test]
fn a_pair_takes_the_time_of_a_prefill_a_transfer_and_the_decode_steps() {
    let workload = Workload { sessions: vec![conversation(3, 2)], arrivals: Arrivals::Timed };
    let settings = pools();
    let law = settings.engines[0].law;
    let decode_s =
        |context: u32| -> f64 { (0..49).map(|step| law.step_s(0.0, 0.0, 1.0, f64::from(context + step))).sum() };
    for policy in ["latency", "kv", "lpwl"] {
        let outcomes = run(&workload, &settings, policy);
        let [first, second] = [outcomes[0], outcomes[1]];
        assert!(first.worker < 2 && (first.ttft_s() - law.step_s(1200.0, 720_000.0, 0.0, 0.0)).abs() < 1e-6);
        let expected_s = first.ttft_s() + 1200.0 * 1e-4 + decode_s(1200);
        assert!((first.e2e_s() - expected_s).abs() < 1e-6, "{policy}: {} for {expected_s}", first.e2e_s());
        // The worker that prefilled has the first prompt, and the one that decoded has the output too.
        assert_eq!((second.worker, second.cached_tokens), (first.worker, 1200), "{policy}");
        let expected_s = second.ttft_s() + f64::from(1450 - 1248) * 1e-4 + decode_s(1450);
        assert!((second.e2e_s() - expected_s).abs() < 1e-6, "{policy}: {} for {expected_s}", second.e2e_s());
    }
}

#[test]
fn few_new_tokens_bypass_the_pool_that_prefills() {
    let disaggregation = DisaggregationPolicy { bypass: Bypass::IslBounding, ..DisaggregationPolicy::default() };
    let workload = Workload { sessions: vec![conversation(3, 2)], arrivals: Arrivals::Timed };
    let outcomes = run(&workload, &Settings { disaggregation, ..pools() }, "latency");
    assert!(outcomes[0].worker < 2, "all of the first prompt is new");
    assert_eq!((outcomes[1].worker >= 2, outcomes[1].cached_tokens), (true, 1248));
}

#[test]
fn an_output_of_one_token_ends_where_it_was_prefilled() {
    let mut session = conversation(1, 2);
    session.turns.iter_mut().for_each(|turn| turn.output.tokens = 1);
    let outcomes = run(&Workload { sessions: vec![session], arrivals: Arrivals::Timed }, &pools(), "latency");
    assert!(outcomes.len() == 2 && outcomes.iter().all(|outcome| outcome.end_ns == outcome.first_ns));
}

#[test]
fn requests_of_a_pair_that_loses_a_worker_begin_again() {
    for policy in ["latency", "lpwl"] {
        for (dead, dies_s) in [(0, 1.0), (2, 1.0), (3, 1.37), (1, 2.011)] {
            let change = |at_s, kind| FleetChange { at_s, worker: dead, kind };
            let changes = vec![change(dies_s, FleetChangeKind::Dies), change(9.0, FleetChangeKind::Joins)];
            let outcomes = run(&conversations(80, 2), &Settings { changes, ..pools() }, policy);
            assert_eq!(outcomes.len(), 160, "{policy}, worker {dead}");
            assert!(outcomes.iter().all(|outcome| !outcome.is_refused && outcome.end_ns > outcome.first_ns));
            let is_dead = |at_ns: u64| at_ns > (dies_s * 1e9) as u64 && at_ns < 9_000_000_000;
            let on_dead = |outcome: &&Outcome| outcome.worker as usize == dead && is_dead(outcome.first_ns);
            assert_eq!(outcomes.iter().filter(on_dead).count(), 0);
        }
    }
}

#[test]
fn a_worker_whose_first_change_is_to_join_is_not_there_before() {
    let changes = vec![FleetChange { at_s: 2.0, worker: 1, kind: FleetChangeKind::Joins }];
    let outcomes = run(&conversations(80, 1), &Settings { changes, ..settings(2) }, "latency");
    let on_it = |outcome: &&Outcome| outcome.worker == 1;
    assert!(outcomes.iter().filter(on_it).all(|outcome| outcome.arrived_ns >= 2_000_000_000));
    assert!(outcomes.iter().filter(on_it).count() > 5);
}

#[test]
fn routers_that_know_all_of_each_other_decide_as_one() {
    for policy in ["latency", "kv", "lmetric", "mooncake", "llm-d"] {
        let fleets = [Settings { prior_factor: Some(2.0), ..settings(4) }, pools()];
        for settings in fleets {
            let one = run(&conversations(150, 3), &settings, policy);
            let routers = RouterSettings { count: 5, ..RouterSettings::default() };
            let five = run(&conversations(150, 3), &Settings { routers, ..settings }, policy);
            assert_eq!(placed(&one), placed(&five), "{policy}");
            let predicted = |outcomes: &[Outcome]| -> Vec<u64> {
                outcomes.iter().map(|outcome| outcome.predicted_ttft_s.to_bits()).collect()
            };
            assert_eq!(predicted(&one), predicted(&five), "{policy}: the constants learnt are the same too");
        }
    }
}

#[test]
fn old_knowledge_costs_time_and_the_same_run_is_the_same() {
    // 40 requests arrive at once in each burst: a router that knows nothing of the others sees idle workers.
    let mut workload = conversations(400, 1);
    for (at, session) in workload.sessions.iter_mut().enumerate() {
        session.start_s = (at / 40) as f64 * 8.0 + 1e-4 * (at % 40) as f64;
    }
    let with = |count, age_s| {
        let routers = RouterSettings { count, age_s, sessions_stick: false };
        run(&workload, &Settings { routers, ..settings(8) }, "lpwl")
    };
    let mean_s = |outcomes: &[Outcome]| outcomes.iter().map(Outcome::ttft_s).sum::<f64>() / 400.0;
    let (one, old, never) = (with(1, Some(0.0)), with(8, Some(0.05)), with(8, None));
    assert!(mean_s(&old) > 1.05 * mean_s(&one), "{} {}", mean_s(&old), mean_s(&one));
    assert!(mean_s(&never) > 1.05 * mean_s(&one), "{} {}", mean_s(&never), mean_s(&one));
    assert_eq!(placed(&old), placed(&with(8, Some(0.05))));
}
