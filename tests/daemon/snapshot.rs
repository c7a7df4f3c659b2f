//! Snapshots: a daemon is killed, stopped and started again, on its own files and on others.

use std::path::PathBuf;
use std::process::Output;
use std::sync::Arc;

use kvrouted::fleet::WorkerState;
use kvrouted::ids::Worker;
use kvrouted::trust::{TrustLevel, TrustReason};
use tempfile::TempDir;

use crate::kit::engine::BLOCK_SIZE;
use crate::kit::http::server;
use crate::kit::replayer::Engine;
use crate::kit::{self, Daemon, folder, replace, run, text, until};

fn prompt(seed: u32, blocks: u32) -> Vec<u32> {
    kit::prompt(seed, blocks * BLOCK_SIZE)
}

/// A folder with a configuration of two workers, of which only the first has a replay endpoint.
struct Site {
    folder: Arc<TempDir>,
}

impl Site {
    fn new(engines: [&Engine; 2], every_s: u64) -> Self {
        let folder = folder();
        let path = |name: &str| folder.path().join(name).display().to_string();
        let [one, two] = engines.map(|engine| engine.publisher.endpoint());
        let text = format!(
            "[serve]\nsocket = \"{}\"\n[log]\nlevel = \"warn\"\n[ingest]\ndown_after_ms = 0\n\
             [snapshot]\ndir = \"{}\"\nevery_s = {every_s}\n[[space]]\nmodel = \"m\"\nblock_size = {BLOCK_SIZE}\n\
             [[worker]]\nid = 1\nendpoint = \"{one}\"\nreplay = \"{}\"\n[[worker]]\nid = 2\nendpoint = \"{two}\"\n",
            path("s"),
            path("snapshots"),
            engines[0].replayer.endpoint,
        );
        std::fs::write(path("config"), text).expect("written");
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn snapshot(&self, worker: u64) -> PathBuf {
        self.path(&format!("snapshots/{worker}-0.snapshot"))
    }

    fn start(&self, more: &[&str]) -> Daemon {
        Daemon::serve(Arc::clone(&self.folder), &[&["--config", text(&self.path("config"))], more].concat())
    }
}

fn trust(daemon: &Daemon, worker: usize) -> (TrustLevel, Vec<TrustReason>) {
    let trust = daemon.status().workers[worker].trust;
    (trust.level, trust.reasons.iter().collect())
}

fn wait_for_seq(daemon: &Daemon, worker: usize, seq: u64) {
    until("the batch is applied", || {
        daemon.status().workers[worker].trust.as_of_seq.is_some_and(|applied| applied.0 == seq)
    });
}

/// Leading blocks of a prompt that both workers hold in device memory.
fn device(daemon: &Daemon, tokens: &[u32]) -> [u32; 2] {
    [1, 2].map(|id| daemon.device(tokens, Worker::new(id, 0)).unwrap_or(0))
}

fn end(mut daemon: Daemon, signal: &str) -> Option<i32> {
    daemon.process.end(signal)
}

#[test]
fn a_killed_daemon_answers_as_before_once_the_stream_has_shown_that_it_went_on() {
    let (mut one, mut two) = (Engine::new(), Engine::new());
    let site = Site::new([&one, &two], 1);
    let daemon = site.start(&[]);
    one.await_subscription();
    two.await_subscription();
    let tokens = prompt(1, 6);
    one.store(&tokens);
    two.store(&tokens[..32]);
    wait_for_seq(&daemon, 0, 0);
    wait_for_seq(&daemon, 1, 0);
    assert_eq!((device(&daemon, &tokens), trust(&daemon, 0).0), ([6, 2], TrustLevel::Exact));
    until("both are written", || site.snapshot(1).exists() && site.snapshot(2).exists());
    until("nothing is written again", || daemon.counter("snapshots_unchanged") > 2);
    assert_eq!(daemon.counter("snapshots_written"), 2);
    assert_eq!(end(daemon, "-KILL"), None);

    // No subscriber gets this batch; the replay after the snapshot brings it.
    let more = prompt(2, 4);
    one.store(&more);
    let daemon = site.start(&[]);
    one.await_subscription();
    until("the snapshot is loaded", || daemon.counter("snapshots_loaded") == 1);
    until("it is proven", || trust(&daemon, 0) == (TrustLevel::Exact, Vec::new()));
    assert_eq!((device(&daemon, &tokens), device(&daemon, &more)), ([6, 0], [4, 0]));
    assert_eq!(daemon.counter("snapshot_unprovable"), 1, "the second has no replay endpoint");
    let count = |name: &str| daemon.worker_counter(0, name);
    assert_eq!(
        (count("batches"), count("emptied")),
        (1, 0),
        "what the snapshot holds was not sent again to be applied"
    );
}

#[test]
fn a_snapshot_of_another_incarnation_is_not_believed_and_leaves_nothing() {
    let (mut one, two) = (Engine::new(), Engine::new());
    let site = Site::new([&one, &two], 86_400);
    let daemon = site.start(&[]);
    one.await_subscription();
    let tokens = prompt(1, 3);
    one.store(&tokens);
    wait_for_seq(&daemon, 0, 0);
    assert_eq!(end(daemon, "-TERM"), Some(0));

    // The engine is not there: what was loaded is answered, and not believed.
    let text = std::fs::read_to_string(site.path("config")).expect("a file");
    let nowhere = text.replace(&one.publisher.endpoint(), "ipc:///nowhere/engine");
    std::fs::write(site.path("config"), nowhere).expect("written");
    let daemon = site.start(&[]);
    until("the snapshot is loaded", || daemon.counter("snapshots_loaded") == 1);
    assert_eq!(device(&daemon, &tokens), [3, 0]);
    assert_eq!(trust(&daemon, 0), (TrustLevel::Unproven, vec![TrustReason::Disconnected]));
    assert_eq!(end(daemon, "-KILL"), None);

    // It restarted meanwhile: the same sequence, other bytes.
    std::fs::write(site.path("config"), text).expect("written");
    one.restart();
    let other = prompt(7, 2);
    one.store(&other);
    let daemon = site.start(&[]);
    until("the other incarnation is heard", || device(&daemon, &other) == [2, 0]);
    assert_eq!(device(&daemon, &tokens), [0, 0]);
    until("it is proven", || trust(&daemon, 0) == (TrustLevel::Exact, Vec::new()));
}

#[test]
fn a_stop_writes_what_has_changed_and_a_fresh_start_forgets_it() {
    let (mut one, two) = (Engine::new(), Engine::new());
    let site = Site::new([&one, &two], 86_400);
    let daemon = site.start(&[]);
    one.await_subscription();
    let tokens = prompt(1, 3);
    one.store(&tokens);
    wait_for_seq(&daemon, 0, 0);
    assert!(!site.snapshot(1).exists());
    assert_eq!(end(daemon, "-TERM"), Some(0));
    assert!(site.snapshot(1).exists() && !site.snapshot(2).exists(), "the second has sent nothing");

    let second = site.start(&[]);
    until("the snapshot is loaded", || second.counter("snapshots_loaded") == 1);
    assert_eq!(device(&second, &tokens), [3, 0]);
    let text_of = |output: Output| String::from_utf8_lossy(&output.stderr).into_owned();
    let other_socket = text(&site.path("other")).to_owned();
    let config = site.path("config");
    let refused = run(&["serve", "--config", text(&config), "--socket", &other_socket]);
    assert_eq!(refused.status.code(), Some(64));
    assert!(text_of(refused).contains("another daemon keeps its snapshots in"), "one directory, one daemon");
    assert_eq!(end(second, "-KILL"), None);

    drop(one);
    let fresh = site.start(&["--fresh"]);
    assert!(!site.snapshot(1).exists());
    assert_eq!((fresh.counter("snapshots_loaded"), fresh.counter("snapshots_reset")), (0, 1));
    assert_eq!(fresh.status().workers[0].blocks_held, 0);
}

/// Two engines that hold a prompt, and their daemon, which knows it.
fn two_that_hold(tokens: &[u32]) -> ([Engine; 2], Site, Daemon) {
    let mut engines = [Engine::new(), Engine::new()];
    let site = Site::new(engines.each_ref(), 1);
    let daemon = site.start(&[]);
    for (worker, engine) in engines.iter_mut().enumerate() {
        engine.await_subscription();
        engine.store(tokens);
        wait_for_seq(&daemon, worker, 0);
    }
    (engines, site, daemon)
}

#[test]
fn a_reset_empties_workers_and_their_snapshots() {
    let tokens = prompt(1, 3);
    let ([mut one, _two], site, daemon) = two_that_hold(&tokens);
    until("both are written", || site.snapshot(1).exists() && site.snapshot(2).exists());
    let socket = site.path("s");
    let unknown = run(&["reset", "--socket", text(&socket), "--worker", "9/1"]);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("there is no worker 9/1"), "{unknown:?}");

    let done = run(&["reset", "--socket", text(&socket), "--worker", "1"]);
    assert_eq!(String::from_utf8_lossy(&done.stdout), "1 worker emptied, 1 snapshot removed\n", "{done:?}");
    until("it is empty", || device(&daemon, &tokens) == [0, 3]);
    until("it is reported", || trust(&daemon, 0) == (TrustLevel::LowerBound, vec![TrustReason::JoinedLate]));
    assert_eq!(trust(&daemon, 1).0, TrustLevel::Exact);
    one.store(&prompt(2, 2));
    until("it learns again", || device(&daemon, &prompt(2, 2)) == [2, 0]);

    let done = run(&["reset", "--socket", text(&socket)]);
    assert!(String::from_utf8_lossy(&done.stdout).starts_with("2 workers emptied"), "{done:?}");
    until("both are empty", || daemon.status().workers.iter().all(|worker| worker.blocks_held == 0));
}

#[test]
fn a_clear_that_a_caller_tells_is_seen_at_once_and_proven_by_the_one_that_is_published() {
    let tokens = prompt(1, 3);
    let ([mut one, _two], site, daemon) = two_that_hold(&tokens);
    let socket = site.path("s");
    let done = run(&["reset", "--socket", text(&socket), "--worker", "1", "--engine-cleared"]);
    assert_eq!(done.status.code(), Some(0), "{done:?}");
    until("its device is empty", || device(&daemon, &tokens) == [0, 3]);
    assert_eq!(trust(&daemon, 0), (TrustLevel::Unproven, vec![TrustReason::ClearAwaited]));
    assert_eq!(trust(&daemon, 1).0, TrustLevel::Exact);
    one.clear();
    until("the clear is published", || trust(&daemon, 0) == (TrustLevel::Exact, vec![]));
    one.store(&prompt(2, 2));
    until("it goes on", || device(&daemon, &prompt(2, 2)) == [2, 0]);
    assert_eq!(trust(&daemon, 0), (TrustLevel::Exact, vec![]));
}

#[test]
fn a_file_that_is_broken_or_of_somebody_else_costs_only_its_warmth() {
    let (mut one, two) = (Engine::new(), Engine::new());
    let site = Site::new([&one, &two], 86_400);
    let daemon = site.start(&[]);
    one.await_subscription();
    let tokens = prompt(1, 3);
    one.store(&tokens);
    wait_for_seq(&daemon, 0, 0);
    assert_eq!(end(daemon, "-TERM"), Some(0));
    drop(one);
    let whole = std::fs::read(site.snapshot(1)).expect("a snapshot");
    std::fs::write(site.snapshot(2), &whole).expect("written");
    let mut broken = whole.clone();
    let middle = broken.len() / 2;
    broken[middle] ^= 1;
    let cut = whole[..whole.len() - 1].to_vec();
    for (bytes, counter) in [(broken, "snapshot_checksum"), (cut, "snapshot_truncated")] {
        std::fs::write(site.snapshot(1), bytes).expect("written");
        let daemon = site.start(&[]);
        assert_eq!((daemon.counter(counter), daemon.counter("snapshot_other_worker")), (1, 1));
        assert_eq!((daemon.counter("snapshots_loaded"), daemon.status().workers[0].blocks_held), (0, 0));
        assert_eq!(end(daemon, "-KILL"), None);
    }
    std::fs::write(site.snapshot(1), whole).expect("written");
    let daemon = site.start(&[]);
    until("the snapshot is loaded", || daemon.counter("snapshots_loaded") == 1);
    assert_eq!(device(&daemon, &tokens), [3, 0]);
}

/// How a worker is named while the daemon runs.
#[derive(Clone, Copy, Debug)]
enum Named {
    Request,
    File,
    Url,
}

/// A daemon without workers that follows a folder of files and keeps snapshots.
fn start_empty(folder: &Arc<TempDir>) -> Daemon {
    let [workers, snapshots] = ["workers", "snapshots"].map(|name| folder.path().join(name));
    std::fs::create_dir_all(&workers).expect("a folder");
    let tables = format!(
        "[discovery]\npath = {workers:?}\nrescan_ms = 100\ngrace_ms = 1\n[snapshot]\ndir = {snapshots:?}\nevery_s = 86400\n"
    );
    let config = kit::configure(folder.path(), &tables);
    Daemon::serve(Arc::clone(folder), &["--config", text(&config)])
}

fn name(daemon: &Daemon, engine: &Engine, named: Named) {
    let (endpoint, replay) = (engine.publisher.endpoint(), &engine.replayer.endpoint);
    let port = |endpoint: &str| endpoint.rsplit_once(':').expect("a port").1.to_owned();
    match named {
        Named::Request => daemon.worker_ok(&["add", &format!("id=1,endpoint={endpoint},replay={replay}")]),
        Named::File => replace(
            &daemon.folder.path().join("workers/a.json"),
            &format!(r#"[{{"id": 1, "endpoint": "{endpoint}", "replay": "{replay}"}}]"#),
        ),
        Named::Url => {
            let info = format!(
                r#"{{"model_path": "m", "kv_events": {{"publisher": "zmq", "endpoint_host": "127.0.0.1", "topic": "",
                "endpoint_port_base": {}, "replay_endpoint_port_base": {}, "block_size": 16, "dp_size": 1}}}}"#,
                port(&endpoint),
                port(replay),
            );
            daemon.worker_ok(&["add", &format!("id=1,url=http://127.0.0.1:{}/", server(info))]);
        }
    }
}

#[test]
fn a_worker_that_is_named_after_the_start_has_its_snapshot_proven_or_dropped_as_at_the_start() {
    for named in [Named::Request, Named::File, Named::Url] {
        let mut engine = Engine::new();
        let folder = folder();
        let daemon = start_empty(&folder);
        name(&daemon, &engine, named);
        engine.await_subscription();
        let tokens = prompt(1, 6);
        engine.store(&tokens);
        engine.store(&prompt(9, 1));
        until("it is heard", || daemon.device(&prompt(9, 1), Worker::new(1, 0)) == Some(1));
        until("it is believed", || trust(&daemon, 0).0 == TrustLevel::Exact);
        assert_eq!(end(daemon, "-TERM"), Some(0));
        assert!(folder.path().join("snapshots/1-0.snapshot").exists());
        drop(std::fs::remove_file(folder.path().join("workers/a.json")));

        // The first batch is in the snapshot alone, the third in a replay, the fourth is heard.
        let (second, third) = (prompt(2, 4), prompt(3, 5));
        engine.store(&second);
        engine.replayer.forget_before(1);
        let daemon = start_empty(&folder);
        name(&daemon, &engine, named);
        engine.await_subscription();
        engine.store(&third);
        until("it is proven", || {
            device(&daemon, &third) == [5, 0] && trust(&daemon, 0) == (TrustLevel::Exact, Vec::new())
        });
        assert_eq!((device(&daemon, &tokens), device(&daemon, &second)), ([6, 0], [4, 0]), "{named:?}");
        assert_eq!((daemon.counter("snapshots_loaded"), daemon.worker_counter(0, "emptied")), (1, 0), "{named:?}");
        assert_eq!(daemon.worker_counter(0, "batches"), 2, "what the snapshot holds was not applied again");
        assert_eq!(end(daemon, "-TERM"), Some(0));
        drop(std::fs::remove_file(folder.path().join("workers/a.json")));

        // Another incarnation: the snapshot is loaded, and not believed.
        engine.restart();
        let other = prompt(7, 2);
        engine.store(&other);
        let daemon = start_empty(&folder);
        name(&daemon, &engine, named);
        until("the other incarnation is heard", || device(&daemon, &other) == [2, 0]);
        until("it is proven", || trust(&daemon, 0) == (TrustLevel::Exact, Vec::new()));
        assert_eq!((device(&daemon, &tokens), daemon.counter("snapshots_loaded")), ([0, 0], 1), "{named:?}");
    }
}

#[test]
fn a_pipe_in_place_of_a_snapshot_holds_up_no_change_of_the_fleet() {
    let (engine, folder) = (Engine::new(), folder());
    let daemon = start_empty(&folder);
    let pipe = folder.path().join("snapshots/1-0.snapshot");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo");
    assert!(made.success());
    name(&daemon, &engine, Named::Request);
    daemon.worker_ok(&["add", "id=2"]);
    until("both are there", || daemon.status().workers.len() == 2);
    assert_eq!(daemon.counter("snapshot_unreadable"), 1);
    daemon.worker_ok(&["set", "1", "draining=true"]);
    until("it drains", || daemon.status().workers[0].state == WorkerState::Draining);
    assert_eq!(end(daemon, "-TERM"), Some(0));
}

#[test]
fn a_worker_that_goes_and_comes_back_has_its_snapshot_and_a_broken_one_is_named() {
    let mut engine = Engine::new();
    let folder = folder();
    let daemon = start_empty(&folder);
    name(&daemon, &engine, Named::Request);
    engine.await_subscription();
    let tokens = prompt(1, 6);
    engine.store(&tokens);
    until("it is heard", || daemon.device(&tokens, Worker::new(1, 0)) == Some(6));
    assert_eq!(end(daemon, "-TERM"), Some(0));

    let daemon = start_empty(&folder);
    let loaded = |times: u64| until("it is loaded", || daemon.counter("snapshots_loaded") == times);
    for times in 1..=3 {
        name(&daemon, &engine, Named::Request);
        loaded(times);
        until("it is proven", || trust(&daemon, 0) == (TrustLevel::Exact, Vec::new()));
        assert_eq!(device(&daemon, &tokens), [6, 0]);
        daemon.worker_ok(&["remove", "1"]);
        until("it is gone", || daemon.status().workers.is_empty());
    }
    let file = folder.path().join("snapshots/1-0.snapshot");
    let mut broken = std::fs::read(&file).expect("a snapshot");
    let middle = broken.len() / 2;
    broken[middle] ^= 1;
    std::fs::write(&file, broken).expect("written");
    name(&daemon, &engine, Named::Request);
    until("it is refused", || daemon.counter("snapshot_checksum") == 1);
    until("a replay brings everything", || trust(&daemon, 0) == (TrustLevel::Exact, Vec::new()));
    assert_eq!((device(&daemon, &tokens), daemon.counter("snapshots_loaded")), ([6, 0], 3));
}
