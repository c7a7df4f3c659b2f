//! The router against the real daemon: decisions, bookings, refusals, and what happens without the daemon.

mod kit;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kit::{Daemon, Figures, PATIENCE, kvrouted_or_skip, until};
use kvrouted_gateway::demo::SimulatedEngines;
use kvrouted_gateway::engines::{ClientTls, EngineConfig, EngineSet, ServedModel, WantedEngine};
use kvrouted_gateway::router::{Ask, DecidedBy, ReportFigure, Router, RouterFigure, RouterOptions, Worker};
use kvrouted_gateway::tokens::{PromptTokens, TokenSource};
use rustix::process::Signal;

struct Fixture {
    _engines: SimulatedEngines,
    daemon: Daemon,
    router: Router,
    figures: Figures,
    model: ServedModel,
}

/// Two engines, 1 and 2, and a daemon whose space `demo` has the workers 1, 2 and 9, and these tables too.
async fn start(tables: &str) -> Option<Fixture> {
    start_with("demo", tables).await
}

async fn start_with(space: &str, tables: &str) -> Option<Fixture> {
    let kvrouted = kvrouted_or_skip("the router with a daemon")?;
    let engines = SimulatedEngines::start(&kvrouted, 2).await.expect("engines");
    let workers: String = [1, 2, 9].map(|id| format!("[[worker]]\nid = {id}\n")).concat();
    let tables = format!("{tables}\n[[space]]\nmodel = \"{space}\"\nblock_size = 16\n{workers}");
    let daemon = Daemon::start(&kvrouted, &tables);
    let configs = engines.urls().iter().zip(1..).map(|(url, id)| EngineConfig::new(id, url)).collect();
    let set = Arc::new(EngineSet::of(configs, &ClientTls::default()).expect("engines"));
    let unknown = set.learn_all(Instant::now() + PATIENCE).await;
    assert!(unknown.is_empty(), "{unknown:?}");
    let model = set.model(Some("demo")).expect("the model");
    let router = Router::new(RouterOptions::new(daemon.socket()), set);
    assert!(router.ready(Instant::now() + PATIENCE).await, "the daemon answers");
    let figures = Figures::of(&daemon.socket(), space);
    Some(Fixture { _engines: engines, daemon, router, figures, model })
}

fn prompt(tokens: &[u32]) -> PromptTokens {
    PromptTokens {
        tokens: Some(tokens.into()),
        source: TokenSource::Body,
        why_none: None,
        media: vec![],
        salt: None,
        is_comparable: true,
    }
}

fn no_tokens() -> PromptTokens {
    PromptTokens::none("a test", None)
}

fn ask<'a>(model: &'a ServedModel, prompt: &'a PromptTokens) -> Ask<'a> {
    Ask {
        model,
        prompt,
        request_id: "request",
        output_tokens: None,
        priority: 0,
        session: None,
        tenant: None,
        trace: None,
        allow: None,
        exclude: &[],
        deadline: Instant::now() + PATIENCE,
        disaggregate: false,
    }
}

#[tokio::test]
async fn a_pick_is_booked_until_its_guard_is_dropped() {
    let Some(Fixture { router, figures, model, .. }) = &start("").await else { return };
    let prompt = prompt(&[7; 40]);
    let mut picks = Vec::new();
    for _ in 0..3 {
        // One id for all: callers may send what they like.
        let pick = router.pick(&ask(model, &prompt)).await.expect("a worker");
        assert_eq!((pick.decided_by, pick.booking.is_some()), (DecidedBy::Daemon, true));
        picks.push(pick);
    }
    figures.until_bookings(3).await;
    let first = picks[0].candidates[0];
    let prediction = picks[0].prediction.as_ref().expect("a prediction");
    assert_eq!((prediction.worker, prediction.block_size, prediction.prompt_tokens), ((first.id.0, 0), 16, 40));
    assert!(!prediction.is_exact, "the worker publishes nothing");
    picks.truncate(1);
    figures.until_bookings(1).await;

    // The second candidate runs it.
    let mut booking = picks.remove(0).booking.expect("a booking");
    let other = Worker::new(3 - first.id.0, 0);
    booking.prefill_complete();
    booking.output_progress(1000);
    booking.served(other);
    until("the booking has moved", async || {
        let moved = |of: (Worker, u64)| of.1 == u64::from(of.0 == other);
        figures.in_flight().await.is_some_and(|workers| workers.into_iter().all(moved))
    })
    .await;
    // Too few to be told at once: the end tells them.
    booking.output_progress(1010);
    drop(booking);
    figures.until_bookings(0).await;
    assert!(router.close().await);
    let count = |figure| router.report_figures().get(figure);
    assert_eq!((count(ReportFigure::Applied), count(ReportFigure::Lost), count(ReportFigure::Refused)), (7, 0, 0));
}

#[tokio::test]
async fn a_question_that_nobody_waits_for_leaves_no_booking() {
    let Some(Fixture { router, figures, model, .. }) = &start("").await else { return };
    let prompt = prompt(&[7; 40]);
    for micros in 0..50 {
        drop(tokio::time::timeout(Duration::from_micros(micros * 10), router.pick(&ask(model, &prompt))).await);
    }
    figures.until_bookings(0).await;
}

#[tokio::test]
async fn only_engines_of_this_gateway_that_may_run_the_request_are_named() {
    let Some(Fixture { router, model, .. }) = &start("").await else { return };
    let prompt = prompt(&[7; 40]);
    for _ in 0..10 {
        let pick = router.pick(&ask(model, &prompt)).await.expect("a worker");
        assert!(pick.candidates.iter().all(|worker| [1, 2].contains(&worker.id.0)), "9 is another gateway's");
    }
    let left = router.pick(&Ask { exclude: &[1], ..ask(model, &prompt) }).await.expect("a worker");
    assert_eq!(left.candidates, [Worker::new(2, 0)]);
    let subset = [Worker::new(1, 0), Worker::new(9, 0)];
    let allowed = router.pick(&Ask { allow: Some(&subset), ..ask(model, &prompt) }).await.expect("a worker");
    assert_eq!(allowed.candidates, [Worker::new(1, 0)]);
    let none = router.pick(&Ask { exclude: &[1, 2], ..ask(model, &prompt) }).await.expect_err("nobody is left");
    assert_eq!(none.status.as_u16(), 503);
    let unknown = ServedModel { base: "nobody".to_owned(), lora: None };
    let unknown = router.pick(&ask(&unknown, &prompt)).await.expect_err("nobody serves it");
    assert_eq!((unknown.status.as_u16(), unknown.code), (404, "model_not_found"));
}

#[tokio::test]
async fn a_prompt_without_tokens_is_routed_by_load_and_says_so() {
    let Some(Fixture { router, model, .. }) = &start("").await else { return };
    let prompt = no_tokens();
    let mut picks = Vec::new();
    for _ in 0..4 {
        picks.push(router.pick(&ask(model, &prompt)).await.expect("a worker"));
    }
    assert!(picks.iter().all(|pick| pick.decided_by == DecidedBy::LoadOnly && pick.prediction.is_none()));
    assert_eq!(router.figures().get(RouterFigure::LoadOnly), 4);
}

#[tokio::test]
async fn a_failed_worker_gets_no_requests_for_a_while() {
    let Some(Fixture { router, model, .. }) =
        &start("booking.back_off_ms = 3600000\nbooking.back_off_ms_max = 3600000").await
    else {
        return;
    };
    let prompt = prompt(&[7; 40]);
    let pick = router.pick(&ask(model, &prompt)).await.expect("a worker");
    let failed = pick.candidates[0];
    router.report_failure(failed, "demo", "it was refused");
    until("the worker is avoided", async || {
        let pick = router.pick(&ask(model, &prompt)).await.expect("a worker");
        pick.candidates[0] != failed
    })
    .await;
    for _ in 0..10 {
        let pick = router.pick(&ask(model, &prompt)).await.expect("a worker");
        assert_ne!(pick.candidates[0], failed);
    }
}

#[tokio::test]
async fn busy_workers_are_429_with_a_time_to_come_back() {
    let Some(Fixture { router, figures, model, .. }) = &start("policy.busy_prefill_tokens = 50").await else { return };
    let prompt = prompt(&[7; 100]);
    let first = router.pick(&ask(model, &prompt)).await.expect("a worker");
    let second = router.pick(&ask(model, &prompt)).await.expect("the other worker");
    assert_ne!(first.candidates[0], second.candidates[0]);
    let refused = router.pick(&ask(model, &prompt)).await.expect_err("both are busy");
    assert_eq!((refused.status.as_u16(), refused.code), (429, "all_busy"));
    assert!(refused.retry_after_s.is_some() && refused.message.contains("busy"), "{refused:?}");
    assert_eq!(router.figures().get(RouterFigure::Busy), 1);
    drop((first, second));
    figures.until_bookings(0).await;
    assert!(router.pick(&ask(model, &prompt)).await.is_ok());
}

#[tokio::test]
async fn a_request_that_waits_in_the_queue_until_its_deadline_is_429() {
    let tables = "policy.queue_threshold = 0.0\npolicy.queue_wait_ms_max = 60000";
    let Some(Fixture { router, figures, model, .. }) = &start(tables).await else { return };
    let mut running = Vec::new();
    let refused = loop {
        // Another prompt each time: one whose blocks are being computed may go to the same worker.
        let prompt = prompt(&[running.len() as u32; 100]);
        let deadline = Instant::now() + Duration::from_millis(200);
        match router.pick(&Ask { deadline, ..ask(model, &prompt) }).await {
            Ok(pick) => running.push(pick),
            Err(error) => break error,
        }
        assert!(running.len() < 3, "each worker takes one");
    };
    assert_eq!((refused.status.as_u16(), refused.code), (429, "deadline_passed"));
    assert!(refused.retry_after_s.is_some());
    drop(running);
    figures.until_bookings(0).await;
}

#[tokio::test]
async fn without_the_daemon_the_router_decides_and_says_so() {
    let Some(mut fixture) = start("").await else { return };
    let long = prompt(&[7; 100]);
    let held = fixture.router.pick(&ask(&fixture.model, &long)).await.expect("a worker");
    fixture.daemon.kill();
    let mut firsts = Vec::new();
    for _ in 0..4 {
        let pick = fixture.router.pick(&ask(&fixture.model, &long)).await.expect("a worker");
        assert_eq!(
            (pick.decided_by, pick.booking.is_some(), pick.prediction.is_some()),
            (DecidedBy::Fallback, false, false)
        );
        assert!(pick.candidates.iter().all(|worker| worker.id.0 != 9));
        firsts.push(pick.candidates[0]);
    }
    assert!(firsts.iter().all(|worker| *worker == firsts[0]), "a prompt keeps its worker: {firsts:?}");
    let empty = no_tokens();
    let mut spread = Vec::new();
    for _ in 0..4 {
        spread.push(fixture.router.pick(&ask(&fixture.model, &empty)).await.expect("a worker").candidates[0].id.0);
    }
    spread.sort_unstable();
    assert_eq!(spread, [1, 1, 2, 2], "prompts without tokens take turns");
    drop(held);
    fixture.daemon.start_again();
    until("the daemon decides again", async || {
        let pick = fixture.router.pick(&ask(&fixture.model, &long)).await.expect("a worker");
        pick.decided_by == DecidedBy::Daemon
    })
    .await;
    fixture.figures.until_bookings(0).await;
}

#[tokio::test]
async fn a_daemon_that_hangs_costs_one_timeout_and_gets_every_report_later() {
    let Some(fixture) = start("").await else { return };
    let Fixture { router, daemon, figures, model, .. } = &fixture;
    let prompt = prompt(&[7; 40]);
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(router.pick(&ask(model, &prompt)).await.expect("a worker"));
    }
    figures.until_bookings(3).await;
    daemon.signal(Signal::STOP);
    until("the daemon has stopped", async || {
        router.pick(&ask(model, &prompt)).await.expect("a worker").decided_by == DecidedBy::Fallback
    })
    .await;
    for _ in 0..50 {
        let pick = router.pick(&ask(model, &prompt)).await.expect("a worker");
        assert_eq!(pick.decided_by, DecidedBy::Fallback);
    }
    held.clear();
    daemon.signal(Signal::CONT);
    figures.until_bookings(0).await;
    assert_eq!(router.report_figures().get(ReportFigure::Lost), 0);
    until("the daemon decides again", async || {
        router.pick(&ask(model, &prompt)).await.is_ok_and(|pick| pick.decided_by == DecidedBy::Daemon)
    })
    .await;
}

#[tokio::test]
async fn a_model_that_the_daemon_does_not_know_yet_is_served_all_the_same() {
    let Some(Fixture { router, model, .. }) = &start_with("another-model", "").await else { return };
    let pick = router.pick(&ask(model, &prompt(&[7; 40]))).await.expect("a worker");
    assert_eq!((pick.decided_by, router.figures().get(RouterFigure::Alone)), (DecidedBy::Fallback, 1));
}

#[tokio::test]
async fn an_engine_that_left_is_no_longer_named_though_the_daemon_keeps_its_worker() {
    let Some(kvrouted) = kvrouted_or_skip("the router with engines that go") else { return };
    let engines = SimulatedEngines::start(&kvrouted, 2).await.expect("engines");
    let workers: String = [1, 2].map(|id| format!("[[worker]]\nid = {id}\n")).concat();
    let daemon = Daemon::start(&kvrouted, &format!("[[space]]\nmodel = \"demo\"\nblock_size = 16\n{workers}"));
    let configs: Vec<_> = engines.urls().iter().zip(1..).map(|(url, id)| EngineConfig::new(id, url)).collect();
    let set = Arc::new(EngineSet::of(configs.clone(), &ClientTls::default()).expect("engines"));
    assert!(set.learn_all(Instant::now() + PATIENCE).await.is_empty());
    let model = set.model(Some("demo")).expect("the model");
    let router = Router::new(RouterOptions::new(daemon.socket()), Arc::clone(&set));
    assert!(router.ready(Instant::now() + PATIENCE).await, "the daemon answers");
    let prompt = prompt(&[7; 40]);
    let named = async || {
        let pick = router.pick(&ask(&model, &prompt)).await.expect("a worker");
        assert_eq!(pick.decided_by, DecidedBy::Daemon);
        let mut ids: Vec<u64> = pick.candidates.iter().map(|worker| worker.id.0).collect();
        ids.sort_unstable();
        ids
    };
    assert_eq!(named().await, [1, 2]);
    let wanted = |config: &EngineConfig, takes_requests| WantedEngine { config: config.clone(), takes_requests };
    // It ends, and then it is gone.
    for list in [vec![wanted(&configs[0], true), wanted(&configs[1], false)], vec![wanted(&configs[0], true)]] {
        assert!(set.replace(list).is_empty());
        for _ in 0..8 {
            assert_eq!(named().await, [1]);
        }
    }
    set.replace(configs.iter().map(|config| wanted(config, true)).collect());
    assert!(set.learn_all(Instant::now() + PATIENCE).await.is_empty());
    assert_eq!(named().await, [1, 2], "it is back");
}
