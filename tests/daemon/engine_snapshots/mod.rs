//! Snapshots that engines send themselves: a daemon that joins late or lost batches asks the engine, and an engine whose
//! answer cannot be used changes nothing.

mod engine;

use kvrouted::ids::Worker;
use kvrouted::trust::{TrustLevel, TrustReason};

use crate::kit::engine::BLOCK_SIZE;
use crate::kit::{self, Daemon, until};
use engine::{Engine, Fault, Proposal};

fn prompt(seed: u32, blocks: u32) -> Vec<u32> {
    kit::prompt(seed, blocks * BLOCK_SIZE)
}

fn trust(daemon: &Daemon, worker: usize) -> (TrustLevel, Vec<TrustReason>) {
    let trust = daemon.status().workers[worker].trust;
    (trust.level, trust.reasons.iter().collect())
}

/// Sends heartbeats, as an idle engine does, until a condition holds.
fn idle_until(engine: &Engine, what: &str, mut holds: impl FnMut() -> bool) {
    until(what, || {
        engine.heartbeat();
        holds()
    });
}

/// Compares what the daemon answers about prompts with the engine's own cache.
#[track_caller]
fn agree(daemon: &Daemon, id: u64, engine: &Engine, prompts: &[Vec<u32>]) {
    for (at, tokens) in prompts.iter().enumerate() {
        let found = daemon.device(tokens, Worker::new(id, 0)).unwrap_or(0);
        assert_eq!(found, engine.overlap(tokens), "worker {id}, prompt {at}");
    }
}

#[test]
fn a_daemon_that_joins_late_or_loses_batches_is_exact_after_the_engines_own_snapshot() {
    let engine = Engine::new(Proposal::Vllm);
    let prompts: Vec<Vec<u32>> = (1..6).map(|seed| prompt(seed, 6)).collect();
    prompts[..4].iter().for_each(|tokens| engine.store(tokens, false));
    engine.evict(&prompts[1], 2);
    let daemon = Daemon::configured(&engine.table(1));
    engine.await_subscription();
    idle_until(&engine, "it is exact", || trust(&daemon, 0) == (TrustLevel::Exact, Vec::new()));
    agree(&daemon, 1, &engine, &prompts);
    engine.store(&prompts[4], false);
    idle_until(&engine, "the live stream goes on", || daemon.device(&prompts[4], Worker::new(1, 0)) == Some(6));
    assert_eq!((engine.asked(), daemon.worker_counter(0, "engine_snapshots_loaded")), (1, 1));

    // A gap that no replay can fill. Only the heartbeat after it shows it.
    engine.evict(&prompts[4], 3);
    engine.store(&prompt(9, 4), true);
    idle_until(&engine, "the gap is repaired", || daemon.worker_counter(0, "engine_snapshots_loaded") == 2);
    idle_until(&engine, "it is exact", || trust(&daemon, 0) == (TrustLevel::Exact, Vec::new()));
    agree(&daemon, 1, &engine, &[&prompts[..], &[prompt(9, 4)]].concat());

    // Another lifetime whose numbers go on: nothing of the earlier one counts any more.
    engine.restart();
    engine.store(&prompts[2], false);
    idle_until(&engine, "the restart is seen", || daemon.worker_counter(0, "restarts") == 1);
    idle_until(&engine, "it is exact", || trust(&daemon, 0) == (TrustLevel::Exact, Vec::new()));
    agree(&daemon, 1, &engine, &prompts);
}

#[test]
fn an_engine_whose_snapshot_cannot_be_used_leaves_its_worker_as_it_was() {
    let faults = [
        (Fault::Silence, "unanswered"),
        (Fault::Unavailable, "unavailable"),
        (Fault::Torn, "corrupt"),
        (Fault::TornBatch, "corrupt"),
        (Fault::OtherLifetime, "other_incarnation"),
        (Fault::Ahead, "not_joined"),
        (Fault::Behind, "outdated"),
        (Fault::TooManyParts, "oversized"),
    ];
    let engines = faults.map(|(fault, _)| {
        let engine = Engine::new(Proposal::Vllm);
        engine.store(&prompt(1, 6), false);
        engine.misbehave(Some(fault));
        engine
    });
    let port = kit::ports::free_port();
    let tables: String = (1..).zip(&engines).map(|(id, engine)| engine.table(id)).collect();
    let daemon = Daemon::configured(&format!("[metrics]\nport = {port}\n{tables}"));
    engines.iter().for_each(Engine::await_subscription);
    let seen = prompt(2, 3);
    engines.iter().for_each(|engine| engine.store(&seen, false));
    until("every question has failed", || {
        engines.iter().for_each(Engine::heartbeat);
        (0..faults.len()).all(|worker| daemon.worker_counter(worker, "engine_snapshots_failed") > 0)
    });
    let (_, page) = kit::http::scrape(port);
    for (at, (fault, reason)) in faults.iter().enumerate() {
        let id = at as u64 + 1;
        let line =
            format!("kvrouted_worker_transfers_aborted_total{{worker_id=\"{id}\",dp_rank=\"0\",reason=\"{reason}\"}}");
        assert!(page.contains(&line), "{fault:?}: no {line}");
        assert_eq!(trust(&daemon, at), (TrustLevel::LowerBound, vec![TrustReason::JoinedLate]), "{fault:?}");
        assert_eq!(daemon.device(&seen, Worker::new(id, 0)), Some(3), "{fault:?}: it goes on with the live stream");
        assert_eq!(daemon.device(&prompt(1, 6), Worker::new(id, 0)).unwrap_or(0), 0, "{fault:?}");
    }
    until("it is a finding", || daemon.said(&["status"]).to_string().contains("engine_snapshots_fail"));

    // It asks again: once the engines are well, all are exact.
    engines.iter().for_each(|engine| engine.misbehave(None));
    until("all are exact", || {
        engines.iter().for_each(Engine::heartbeat);
        (0..faults.len()).all(|worker| trust(&daemon, worker).0 == TrustLevel::Exact)
    });
    for (id, engine) in (1..).zip(&engines) {
        agree(&daemon, id, engine, &[seen.clone(), prompt(1, 6)]);
    }
}

#[test]
fn a_snapshot_of_hashes_proves_a_worker_whose_blocks_are_all_known() {
    let engine = Engine::new(Proposal::Sglang);
    let (before, after) = (prompt(1, 4), prompt(2, 4));
    engine.store(&before, false);
    let daemon = Daemon::configured(&engine.table(1));
    engine.await_subscription();
    engine.store(&after, false);
    until("a block of unknown content is refused", || daemon.worker_counter(0, "engine_snapshots_failed") > 0);
    assert_eq!(trust(&daemon, 0), (TrustLevel::LowerBound, vec![TrustReason::JoinedLate]));
    assert_eq!(daemon.device(&after, Worker::new(1, 0)), Some(4));
    engine.evict(&before, 4);
    until("all that it holds is known", || trust(&daemon, 0) == (TrustLevel::Exact, Vec::new()));
    agree(&daemon, 1, &engine, &[before, after]);
}
