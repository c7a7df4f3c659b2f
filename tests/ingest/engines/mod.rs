//! The daemon against the engines' own publishers: after hundreds of batches with evictions, its answer for every
//! sampled prompt is what the engine's own cache holds.
//!
//! `scripts/engines` fetches vLLM and SGLang and drives their real prefix caches and ZeroMQ publishers. If they are
//! missing (no python3, no network), the tests report it and pass, unless KVROUTED_REQUIRE_ENGINES=1. With
//! KVROUTED_SKIP_ENGINES=1 they do not try.

// clippy.toml allows it in #[test] functions; all of this file is test.
#![allow(clippy::unwrap_used)]

mod load;
mod publisher;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use tempfile::TempDir;

use self::publisher::{Engine, environment, skip};
use crate::kit::ports::free_port;
use crate::kit::{self, Daemon, text, until_ok};

const BLOCK_SIZE: &str = "16";
/// The worker that publishes, and one without an engine.
const LIVE: u64 = 1;
const ABSENT: u64 = 2;

/// What the engine is made to do, besides evicting.
struct Scenario {
    engine: &'static str,
    options: &'static [&'static str],
    /// Whether the daemon connects before the engine listens.
    daemon_first: bool,
    /// Whether the engine publishes everything before the daemon is there, and is idle then.
    idle: bool,
    /// How many live messages in a row are lost on the way, every so often; 0 = none.
    loses: u64,
}

impl Scenario {
    const fn of(engine: &'static str, options: &'static [&'static str], daemon_first: bool) -> Self {
        Self { engine, options, daemon_first, idle: false, loses: 0 }
    }
}

#[test]
fn vllm_answers_equal_its_block_pool() {
    let options = &["--salt-ratio", "0.3", "--lora-ratio", "0.2", "--dup-ratio", "0.15"];
    run(&Scenario::of("vllm", options, false));
}

#[test]
fn vllm_answers_equal_its_block_pool_after_clears_and_under_a_topic() {
    let options = &["--clear-every", "40", "--topic", "kv-events", "--seed", "2"];
    run(&Scenario::of("vllm", options, true));
}

#[test]
fn sglang_answers_equal_its_radix_cache() {
    let options = &["--salt-ratio", "0.3", "--lora-ratio", "0.2", "--dup-ratio", "0.15"];
    run(&Scenario::of("sglang", options, true));
}

#[test]
fn sglang_answers_equal_its_radix_cache_after_clears() {
    run(&Scenario::of("sglang", &["--clear-every", "40", "--seed", "2"], false));
}

#[test]
fn lost_messages_are_replayed_by_vllm() {
    run(&Scenario { loses: 7, ..Scenario::of("vllm", &["--seed", "3"], false) });
}

#[test]
fn lost_messages_are_replayed_by_sglang() {
    run(&Scenario { loses: 7, ..Scenario::of("sglang", &["--seed", "3"], false) });
}

#[test]
fn an_idle_vllm_joined_late_is_exact() {
    run(&Scenario { idle: true, ..Scenario::of("vllm", &["--seed", "4"], false) });
}

#[test]
fn an_idle_sglang_joined_late_is_exact() {
    run(&Scenario { idle: true, ..Scenario::of("sglang", &["--seed", "4"], false) });
}

#[test]
fn a_restarted_vllm_is_followed() {
    restart("vllm");
}

#[test]
fn a_restarted_sglang_is_followed() {
    restart("sglang");
}

/// Another incarnation with other prompts behind the same endpoints.
fn restart(engine: &'static str) {
    let (before, after) =
        (Scenario::of(engine, &["--seed", "5"], false), Scenario::of(engine, &["--seed", "6"], false));
    let python = match environment(engine) {
        Ok(python) => python,
        Err(reason) => return skip(engine, &reason),
    };
    let folder = kit::folder();
    let ports = Ports::free();
    let first = start(folder.path(), &python, &before, &ports);
    let daemon = Router::start(&folder, &before, &ports);
    assert_eq!(first.next_stage()["stage"], "listening", "{}", first.log());
    daemon.wait_for_sequence(first.next_stage()["last_seq"].as_u64().unwrap());
    daemon.compare(&Truth::read(folder.path()));
    drop(first);
    let mut second = start(folder.path(), &python, &after, &ports);
    assert_eq!(second.next_stage()["stage"], "listening", "{}", second.log());
    second.next_stage();
    // Beyond where the first one ended, which its own sequence cannot be told by.
    second.publish_more();
    daemon.wait_for_sequence(second.next_stage()["last_seq"].as_u64().unwrap());
    daemon.compare(&Truth::read(folder.path()));
}

/// Forwards a publisher's messages to the daemon and loses some. It connects to the publisher only after the daemon has
/// subscribed. The publisher waits for its first subscriber, so the daemon misses only the messages that are lost here.
fn lose(from: &str, to: &str, in_a_row: u64) {
    let context = zmq::Context::new();
    let (sub, publisher) = (context.socket(zmq::SUB).unwrap(), context.socket(zmq::XPUB).unwrap());
    sub.set_subscribe(b"").unwrap();
    publisher.bind(to).unwrap();
    let from = from.to_owned();
    std::thread::spawn(move || {
        publisher.recv_bytes(0).unwrap();
        sub.connect(&from).unwrap();
        for number in 0_u64.. {
            let Ok(frames) = sub.recv_multipart(0) else { return };
            if number % 60 >= in_a_row {
                publisher.send_multipart(frames, 0).unwrap();
            }
        }
    });
}

fn run(scenario: &Scenario) {
    let python = match environment(scenario.engine) {
        Ok(python) => python,
        Err(reason) => return skip(scenario.engine, &reason),
    };
    let folder = kit::folder();
    let ports = Ports::free();
    let (mut engine, daemon);
    if scenario.loses > 0 {
        let endpoint = |port: u16| format!("tcp://127.0.0.1:{port}");
        lose(&endpoint(ports.events), &endpoint(ports.lossy), scenario.loses);
    }
    if scenario.idle {
        engine = start(folder.path(), &python, scenario, &ports);
        engine.published_before_anybody_asks();
        daemon = Router::start(&folder, scenario, &ports);
    } else if scenario.daemon_first {
        daemon = Router::start(&folder, scenario, &ports);
        engine = start(folder.path(), &python, scenario, &ports);
    } else {
        engine = start(folder.path(), &python, scenario, &ports);
        daemon = Router::start(&folder, scenario, &ports);
    }
    if !scenario.idle {
        assert_eq!(engine.next_stage()["stage"], "listening", "{}", engine.log());
    }

    let first = if scenario.idle { Truth::last(folder.path()) } else { engine.next_stage() };
    daemon.wait_for_sequence(first["last_seq"].as_u64().unwrap());
    let before = daemon.compare(&Truth::read(folder.path()));

    if scenario.loses > 0 || scenario.idle {
        assert!(daemon.count("batches_replayed") > 0, "nothing was replayed");
        // A loss at the beginning, or while a replay runs that brings it too, is no gap.
        assert!(scenario.loses > 0 || daemon.count("gaps") == 0);
        assert_eq!(daemon.count("emptied"), 0);
    }

    engine.publish_more();
    let second = engine.next_stage();
    assert!(second["last_seq"].as_u64() > first["last_seq"].as_u64());
    daemon.wait_for_sequence(second["last_seq"].as_u64().unwrap());
    let after = daemon.compare(&Truth::read(folder.path()));

    // The prompts of the first round keep their places; some of their blocks have been evicted since.
    assert!(after.len() > before.len());
    assert!(
        before.iter().zip(&after).any(|(before, after)| after < before),
        "no prompt shows fewer blocks after eviction"
    );
}

fn start(folder: &Path, python: &Path, scenario: &Scenario, ports: &Ports) -> Engine {
    let [events, replay] = [ports.events, ports.replay].map(|port| format!("tcp://*:{port}"));
    let (truth, prompts) = (Truth::path(folder), prompts_path(folder));
    let files = ["--truth", text(&truth), "--prompts", text(&prompts)];
    let subscribers = if scenario.idle { "0" } else { "1" };
    let sockets = ["--endpoint", &events, "--replay-endpoint", &replay, "--wait-conns", subscribers];
    let size =
        ["--block-size", BLOCK_SIZE, "--capacity", "256", "--batches", "400", "--phase2", "300", "--rate", "500"];
    Engine::start(folder, python, scenario.engine, &[&size[..], &sockets, &files, scenario.options].concat())
}

/// Five TCP ports that were free a moment ago.
struct Ports {
    events: u16,
    replay: u16,
    /// Where a publisher's messages come out that are lost in part.
    lossy: u16,
    absent_events: u16,
    absent_replay: u16,
}

impl Ports {
    fn free() -> Self {
        let [events, replay, lossy, absent_events, absent_replay] = std::array::from_fn(|_| free_port());
        Self { events, replay, lossy, absent_events, absent_replay }
    }
}

fn prompts_path(folder: &Path) -> PathBuf {
    folder.join("prompts.jsonl")
}

/// What the engine's own cache holds of each sampled prompt, in leading blocks.
struct Truth {
    queries: Vec<Value>,
}

impl Truth {
    fn path(folder: &Path) -> PathBuf {
        folder.join("truth.json")
    }

    fn last(folder: &Path) -> Value {
        serde_json::from_slice(&std::fs::read(Self::path(folder)).unwrap()).unwrap()
    }

    fn read(folder: &Path) -> Self {
        let truth: Value = serde_json::from_slice(&std::fs::read(Self::path(folder)).unwrap()).unwrap();
        let queries = truth["queries"].as_array().unwrap().clone();
        let depth = |query: &Value| query["device_blocks"].as_u64().unwrap();
        let whole =
            |query: &Value| query["tokens"].as_array().unwrap().len() as u64 / truth["block_size"].as_u64().unwrap();
        // A sample that could not tell a right answer from a wrong one would prove nothing.
        assert!(queries.iter().any(|query| depth(query) == 0), "nothing was evicted");
        assert!(
            queries.iter().any(|query| depth(query) > 0 && depth(query) < whole(query)),
            "no prompt is held in part"
        );
        assert!(
            queries.iter().any(|query| depth(query) > 4 && depth(query) == whole(query)),
            "no prompt is held whole"
        );
        Self { queries }
    }
}

/// A daemon beside an engine, asked through `kvrouted query` and `kvrouted status`.
struct Router {
    daemon: Daemon,
    prompts: PathBuf,
}

impl Router {
    fn start(folder: &Arc<TempDir>, scenario: &Scenario, ports: &Ports) -> Self {
        let topic = match scenario.options.iter().position(|option| *option == "--topic") {
            Some(at) => format!(",topic={}", scenario.options[at + 1]),
            None => String::new(),
        };
        let worker = |id: u64, events: u16, replay: u16| {
            format!("id={id},endpoint=tcp://127.0.0.1:{events},replay=tcp://127.0.0.1:{replay}{topic}")
        };
        let events = if scenario.loses > 0 { ports.lossy } else { ports.events };
        let live = worker(LIVE, events, ports.replay);
        let absent = worker(ABSENT, ports.absent_events, ports.absent_replay);
        let daemon = Daemon::start_in(Arc::clone(folder), &["--worker", &live, "--worker", &absent]);
        Self { daemon, prompts: prompts_path(folder.path()) }
    }

    /// Runs a command of the binary against this daemon and returns what it printed, one value a line.
    fn ask(&self, command: &[&str]) -> Vec<Value> {
        let socket = self.daemon.socket();
        let output = kit::run(&[command, &["--json", "--socket", text(&socket)]].concat());
        let (words, log) = (String::from_utf8_lossy(&output.stderr), self.daemon.process.log());
        assert!(output.status.success(), "kvrouted {command:?} ended with {}: {words}\n{log}", output.status);
        let lines = String::from_utf8(output.stdout).unwrap();
        lines.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"))).collect()
    }

    /// A counter of the live worker.
    fn count(&self, counter: &str) -> u64 {
        let status = self.ask(&["status"]);
        of_worker(&status[0]["workers"], LIVE)["counters"][counter].as_u64().unwrap()
    }

    fn wait_for_sequence(&self, sequence: u64) {
        until_ok(&format!("sequence {sequence} is applied"), || {
            let status = self.ask(&["status"]);
            let worker = of_worker(&status[0]["workers"], LIVE);
            let is_applied = worker["last_seq"].as_u64() == Some(sequence) && worker["trust"] == "exact";
            if is_applied { Ok(()) } else { Err(worker.to_string()) }
        });
    }

    /// Asks about every sampled prompt, compares with the engine, and returns the depths.
    fn compare(&self, truth: &Truth) -> Vec<u64> {
        let answers = self.ask(&["query", "--model", "m", "--batch", text(&self.prompts)]);
        assert_eq!(answers.len(), truth.queries.len(), "one answer a prompt");
        let mut wrong = Vec::new();
        for (at, (answer, query)) in answers.iter().zip(&truth.queries).enumerate() {
            let live = of_worker(&answer["candidates"], LIVE);
            let absent = of_worker(&answer["candidates"], ABSENT);
            assert_eq!(answer["match"], "matched", "{answer}");
            assert_eq!((&live["trust"], &live["reasons"]), (&"exact".into(), &Value::Array(Vec::new())), "{answer}");
            assert_eq!(
                (&absent["trust"], &absent["overlap_blocks"]["device"]),
                (&"unproven".into(), &0.into()),
                "{answer}"
            );
            if live["overlap_blocks"]["device"] != query["device_blocks"] {
                let (salt, lora) = (&query["salt"], &query["lora"]);
                let (got, held) = (&live["overlap_blocks"]["device"], &query["device_blocks"]);
                wrong.push(format!("prompt {at} (salt {salt}, lora {lora}): {got} blocks, the engine holds {held}"));
            }
        }
        let status = self.ask(&["status"]);
        assert!(wrong.is_empty(), "{} of {} wrong:\n{}\n{}", wrong.len(), answers.len(), wrong.join("\n"), status[0]);
        truth.queries.iter().map(|query| query["device_blocks"].as_u64().unwrap()).collect()
    }
}

/// The entry of rank 0 of a worker in a list of workers or candidates.
fn of_worker(list: &Value, id: u64) -> Value {
    let entries = list.as_array().unwrap_or_else(|| panic!("not a list of workers: {list}"));
    let found = entries.iter().find(|entry| entry["worker_id"] == id && entry["dp_rank"] == 0);
    found.unwrap_or_else(|| panic!("no worker {id} in {list}")).clone()
}
