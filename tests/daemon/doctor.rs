//! `kvrouted doctor` beside a daemon whose publishers misbehave.

use std::sync::Arc;

use kvrouted::client::Client;
use kvrouted::ids::EngineHash;
use kvrouted::limits::{EVENTS_OFF_DECISIONS_MIN, FOREIGN_BLOCKS_HELD_MIN, FOREIGN_REPEATS_MIN};
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use serde_json::Value;

use crate::kit::engine::Publisher;
use crate::kit::{Daemon, folder, run, text, until, until_ok};

/// Stores a chain of `blocks` blocks of `block_size` tokens, all of them `token`.
fn store(publisher: &mut Publisher, token: u32, blocks: u64, block_size: u32) {
    let hashes: Vec<EngineHash> = (0..blocks).map(|at| EngineHash(u64::from(token) << 32 | at)).collect();
    publisher.store_as(&hashes, &vec![token; hashes.len() * block_size as usize], block_size);
}

/// A daemon of these workers.
fn start(workers: &[String]) -> Daemon {
    let flags: Vec<&str> = workers.iter().flat_map(|worker| ["--worker", worker]).collect();
    Daemon::start(&flags)
}

/// What the doctor says as JSON, and its exit code.
fn doctor(arguments: &[&str]) -> (Value, i32) {
    let output = run(&[&["doctor", "--json"], arguments].concat());
    let said = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    (said, output.status.code().expect("a code"))
}

fn doctor_of(daemon: &Daemon) -> (Value, i32) {
    doctor(&["--socket", text(&daemon.socket())])
}

/// Asks the doctor until it names `finding`, and does `meanwhile` in between.
#[track_caller]
fn until_found(daemon: &Daemon, finding: &str, meanwhile: impl FnMut()) -> Value {
    until_found_of(daemon, (finding, None), meanwhile)
}

/// The same until it names a worker too.
#[track_caller]
fn until_found_of(daemon: &Daemon, (finding, worker): (&str, Option<u64>), mut meanwhile: impl FnMut()) -> Value {
    let names =
        |found: &Value, id| found["workers"].as_array().is_some_and(|of| of.iter().any(|w| w["worker_id"] == id));
    until_ok(&format!("{finding} is found"), || {
        let (said, code) = doctor_of(daemon);
        let mut found = said["findings"].as_array().expect("findings").iter();
        let found = found.find(|of| of["finding"] == finding && worker.is_none_or(|id| names(of, id)));
        match found {
            Some(found) => {
                assert_eq!(code, i32::from(found["harm"] != "note"), "{said}");
                Ok(found.clone())
            }
            None => {
                meanwhile();
                Err(said.to_string())
            }
        }
    })
}

/// Asks the doctor until it names `finding` no more, and does `meanwhile` in between.
#[track_caller]
fn until_gone(daemon: &Daemon, finding: &str, mut meanwhile: impl FnMut()) {
    until_ok(&format!("{finding} is found no more"), || {
        meanwhile();
        let said = doctor_of(daemon).0.to_string();
        if said.contains(finding) { Err(said) } else { Ok(()) }
    });
}

/// A gateway that books every prompt, and never frees.
struct Gateway {
    client: Client,
    requests: u32,
}

impl Gateway {
    fn new(daemon: &Daemon) -> Self {
        Self { client: daemon.client(), requests: 0 }
    }

    fn send(&mut self, tokens: &[u32]) {
        self.requests += 1;
        let name = self.requests.to_string();
        let space = self.client.space("m", None).expect("the space").id;
        let book = Some(BookingRequest { request_id: &name, attempt: 0 });
        let request = RouteRequest { book, ..RouteRequest::new(space, Prompt::of_tokens(tokens)) };
        self.client.route(&request).expect("a decision");
    }
}

#[test]
fn a_daemon_that_does_not_answer_is_a_finding() {
    let folder = folder();
    let socket = folder.path().join("s");
    let (said, code) = doctor(&["--socket", text(&socket)]);
    assert_eq!((said["findings"][0]["finding"].as_str(), code), (Some("socket_unreachable"), 1));
    let file = folder.path().join("bad.toml");
    std::fs::write(&file, "[serve]\nsokket = 1\n").expect("written");
    let (said, code) = doctor(&["--config", text(&file)]);
    assert_eq!((said["findings"][0]["finding"].as_str(), code), (Some("config_invalid"), 1));
}

#[test]
fn nothing_is_wrong_with_a_fleet_that_is_well() {
    let mut publisher = Publisher::new();
    let daemon = start(&[format!("id=1,endpoint={}", publisher.endpoint())]);
    publisher.await_subscription();
    store(&mut publisher, 7, 4, 16);
    let (code, harm) = until_ok("nothing is found", || {
        let (said, code) = doctor_of(&daemon);
        let is_empty = said["findings"].as_array().expect("findings").is_empty();
        if is_empty { Ok((code, said["harm"].clone())) } else { Err(said.to_string()) }
    });
    assert_eq!((code, harm), (0, Value::Null));
}

#[test]
fn a_block_size_of_its_own_is_named_with_both_sizes() {
    let mut publisher = Publisher::new();
    let daemon = start(&[format!("id=1,endpoint={}", publisher.endpoint())]);
    publisher.await_subscription();
    store(&mut publisher, 7, 4, 32);
    let found = until_found(&daemon, "scheme_mismatch", || {});
    let (what, remedy) = (found["what"].as_str().expect("text"), found["remedy"].as_str().expect("text"));
    assert!(what.contains("have 32 tokens") && what.contains("have 16"), "{what}");
    assert!(remedy.contains("--block-size 16") && remedy.contains("block_size = 32"), "{remedy}");
    assert_eq!(found["workers"], serde_json::json!([{"worker_id": 1, "dp_rank": 0}]));
    let output = run(&["status", "--socket", text(&daemon.socket())]);
    let status = String::from_utf8_lossy(&output.stdout);
    assert!(status.contains("1/0: to do: start the engine with blocks of 16 tokens"), "{status}");
}

#[test]
fn an_engine_that_says_nothing_and_one_that_repeats_itself_are_named() {
    let (silent, mut storming, forgetful) = (Publisher::new(), Publisher::new(), Publisher::new());
    let routers = [(); 2].map(|()| {
        let router = zmq::Context::new().socket(zmq::ROUTER).expect("a socket");
        router.bind("tcp://127.0.0.1:*").expect("a free port");
        router
    });
    let [replay, unread] = routers.each_ref().map(|of| of.get_last_endpoint().expect("an endpoint").expect("of text"));
    let daemon = start(&[
        format!("id=1,endpoint={}", silent.endpoint()),
        format!("id=2,endpoint={}", storming.endpoint()),
        format!("id=3,endpoint={replay}"),
        format!("id=4,endpoint={},replay={unread}", forgetful.endpoint()),
    ]);
    silent.await_subscription();
    storming.await_subscription();
    let found = until_found(&daemon, "no_publisher", || {});
    assert_eq!(found["workers"][0]["worker_id"], 3);

    store(&mut storming, 7, 4, 16);
    let found = until_found(&daemon, "duplicate_storm", || {
        for _ in 0..32 {
            // The same bytes under the same sequence, as a relay beside the engine would repeat them.
            storming.seq = 0;
            store(&mut storming, 7, 4, 16);
        }
    });
    assert_eq!(found["workers"][0]["worker_id"], 2);

    let mut gateway = Gateway::new(&daemon);
    // The forgetful one says nothing either, and may be named beside it or before, once its replay has been given up.
    until_found_of(&daemon, ("events_off", Some(1)), || {
        for token in 0..2 * EVENTS_OFF_DECISIONS_MIN {
            gateway.send(&[token as u32; 64]);
        }
    });

    // No engine reads the requests there.
    let found = until_found(&daemon, "replay_silent", || {});
    assert_eq!((&found["workers"][0]["worker_id"], &found["workers_total"]), (&4.into(), &1.into()));
}

#[test]
fn a_hole_that_cannot_be_filled_is_named_with_its_remedy_until_the_cache_is_cleared() {
    let mut publisher = Publisher::new();
    let daemon = start(&[format!("id=1,endpoint={}", publisher.endpoint())]);
    publisher.await_subscription();
    store(&mut publisher, 7, 4, 16);
    publisher.seq += 1;
    store(&mut publisher, 8, 4, 16);
    let found = until_found(&daemon, "gap", || {});
    assert_eq!((&found["harm"], &found["workers"][0]["worker_id"]), (&"warning".into(), &1.into()));
    let remedy = found["remedy"].as_str().expect("text");
    assert!(remedy.contains("hwm") && remedy.contains("clear its prefix cache once"), "{remedy}");
    // All that it holds came after the hole, and that is not enough.
    store(&mut publisher, 9, 4, 16);
    until("it is applied", || daemon.status().workers[0].blocks_held == 8);
    assert_eq!(until_found(&daemon, "gap", || {}), found);
    publisher.clear();
    until_gone(&daemon, "\"gap\"", || {});
}

#[test]
fn a_file_of_workers_that_cannot_be_used_is_named_until_it_can() {
    let folder = folder();
    let files = folder.path().join("workers");
    std::fs::create_dir(&files).expect("a folder");
    std::fs::write(files.join("a.json"), r#"[{"id": 1"#).expect("written");
    let daemon = Daemon::start_in(Arc::clone(&folder), &["--discovery", text(&files)]);
    let found = until_found(&daemon, "source_unusable", || {});
    assert!(found["what"].as_str().expect("text").contains("a.json"), "{found}");
    assert_eq!((&found["harm"], &found["workers_total"]), (&"severe".into(), &0.into()));
    std::fs::write(files.join("b.unfinished"), r#"[{"id": 1}]"#).expect("written");
    std::fs::rename(files.join("b.unfinished"), files.join("a.json")).expect("renamed");
    until_gone(&daemon, "source_unusable", || {});
}

#[test]
fn prompts_that_never_match_are_named() {
    let mut publisher = Publisher::new();
    let daemon = start(&[format!("id=1,endpoint={}", publisher.endpoint())]);
    publisher.await_subscription();
    // What it says it holds is of another tokenizer.
    store(&mut publisher, 1_000_000, 2 * FOREIGN_BLOCKS_HELD_MIN, 16);
    let mut gateway = Gateway::new(&daemon);
    let found = until_found(&daemon, "foreign_hashes", || {
        for token in 0..FOREIGN_REPEATS_MIN {
            gateway.send(&[token as u32; 64]);
        }
    });
    assert_eq!((&found["harm"], &found["workers_total"]), (&"severe".into(), &1.into()));
    assert!(found["what"].as_str().expect("text").contains("repeats_missed"), "{found}");

    // One hit takes it back.
    store(&mut publisher, 3, 4, 16);
    until_gone(&daemon, "foreign_hashes", || gateway.send(&[3; 64]));
}
