//! Register, query, dump: the half of the standalone indexer.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

use kvrouted::hash;
use kvrouted::ids::Worker;
use serde_json::{Value, json};

use super::client::Served;
use crate::kit::engine::{Publisher, SCHEME, engine_hashes};
use crate::kit::{prompt, skipped, until};

fn locals(tokens: &[u32], salt: Option<&str>) -> Vec<u64> {
    let mut locals = Vec::new();
    hash::local_hashes(SCHEME, hash::seed(None, salt), hash::token_bytes(tokens), &[], &mut locals);
    locals.into_iter().map(|local| local.0).collect()
}

fn registration(publisher: &Publisher) -> Value {
    json!({"instance_id": 1, "endpoint": publisher.endpoint(), "model_name": "m", "block_size": 16, "dp_rank": 0})
}

/// A daemon on which one worker, registered by HTTP, holds the prompt.
fn with_worker(tokens: &[u32]) -> (Served, Publisher) {
    let (served, mut publisher) = (Served::start(&[]), Publisher::new());
    assert_eq!(served.post("/register", &registration(&publisher)), (201, json!({"status": "ok"})));
    publisher.await_subscription();
    publisher.store(tokens);
    let blocks = tokens.len() as u32 / 16;
    until("it holds the prompt", || served.daemon.device(tokens, Worker::new(1, 0)) == Some(blocks));
    (served, publisher)
}

#[test]
fn what_is_registered_is_queried_by_tokens_and_by_hashes() {
    let tokens = prompt(1, 50);
    let (served, publisher) = with_worker(&tokens);
    let held = json!({
        "scores": {"1": {"0": 48}},
        "frequencies": [],
        "instances": {"1": {"longest_matched": 48, "gpu": 48, "dp": {"0": 48}, "cpu": 48, "disk": 48, "trust": {"0": "exact"}}},
    });
    let query = json!({"token_ids": tokens, "model_name": "m", "tenant_id": "t", "whatever": [1]});
    assert_eq!(served.post("/query", &query), (200, held.clone()));
    // The bits are meant, whatever their sign.
    let signed: Vec<i64> = locals(&tokens, None).into_iter().map(|local| local as i64).collect();
    assert_eq!(served.post("/query_by_hash", &json!({"block_hashes": signed, "model_name": "m"})), (200, held.clone()));
    let unsigned = json!({"block_hashes": locals(&tokens, None), "model_name": "m", "routing_group": "default"});
    assert_eq!(served.post("/query_by_hash", &unsigned), (200, held));
    let nothing = json!({"scores": {}, "frequencies": [], "instances": {}});
    let salted = json!({"token_ids": tokens, "model_name": "m", "cache_salt": "s"});
    assert_eq!(served.post("/query", &salted), (200, nothing.clone()));
    let salted = json!({"block_hashes": locals(&tokens, Some("s")), "model_name": "m"});
    assert_eq!(served.post("/query_by_hash", &salted), (200, nothing));

    let refused = |path: &str, body: Value| {
        let (status, said) = served.post(path, &body);
        assert!(said["error"].is_string() && said["remedy"].is_string() && said["code"].is_string(), "{said}");
        status
    };
    assert_eq!(refused("/query", json!({"token_ids": [1], "model_name": "other"})), 404);
    assert_eq!(refused("/query", json!({"token_ids": [1], "model_name": "m", "routing_group": "g"})), 404);
    assert_eq!(refused("/query", json!({"token_ids": ["a"], "model_name": "m"})), 422);
    assert_eq!(refused("/query_by_hash", json!({"block_hashes": [], "model_name": "m", "cache_salt": "s"})), 400);
    assert_eq!(refused("/register", registration(&publisher)), 409);
    let mut other_size = registration(&Publisher::new());
    (other_size["dp_rank"], other_size["block_size"]) = (1.into(), 32.into());
    assert_eq!(refused("/register", other_size), 409);
    let nowhere = json!({"instance_id": 9, "endpoint": "nowhere", "model_name": "m", "block_size": 16});
    assert_eq!(refused("/register", nowhere), 400);
}

#[test]
fn what_is_unregistered_is_gone_and_a_rank_goes_alone() {
    let (served, _publisher) = with_worker(&prompt(2, 64));
    let second = Publisher::new();
    let mut rank = registration(&second);
    rank["dp_rank"] = 1.into();
    assert_eq!(served.post("/register", &rank).0, 201);
    let (_, rows) = served.get("/workers?model_name=m&routing_group=default");
    let row = &rows[0];
    assert_eq!((&row["instance_id"], &row["source"], &row["block_size"]), (&1.into(), &"zmq".into(), &16.into()));
    let endpoints: BTreeSet<&String> = row["endpoints"].as_object().expect("endpoints").keys().collect();
    assert_eq!(endpoints.into_iter().collect::<Vec<_>>(), ["0", "1"]);
    assert_eq!(row["listeners"]["0"]["status"], "active");
    assert_eq!(served.get("/workers?model_name=other").1, json!([]));

    let gone = |body: Value| served.post("/unregister", &body).0;
    assert_eq!(gone(json!({"instance_id": 1, "model_name": "other"})), 404);
    assert_eq!(gone(json!({"instance_id": 1, "model_name": "m", "routing_group": "g"})), 404);
    assert_eq!(gone(json!({"instance_id": 1, "model_name": "m", "dp_rank": 1})), 200);
    assert_eq!(served.get("/workers").1[0]["endpoints"].as_object().map(serde_json::Map::len), Some(1));
    assert_eq!(gone(json!({"instance_id": 1, "model_name": "m"})), 200);
    assert_eq!(served.get("/workers").1, json!([]));
    assert_eq!(gone(json!({"instance_id": 1, "model_name": "m"})), 404);
    assert_eq!(served.post("/query", &json!({"token_ids": [1], "model_name": "m"})).0, 404);
}

#[test]
fn a_dump_holds_every_block_as_the_event_that_stores_it() {
    let tokens = prompt(3, 16 * 40);
    let (served, mut publisher) = with_worker(&tokens);
    let other = prompt(4, 48);
    publisher.store(&other);
    until("it holds both", || served.daemon.device(&other, Worker::new(1, 0)) == Some(3));
    let (status, dump) = served.get("/dump");
    assert_eq!(status, 200);
    let partition = &dump["m:default"];
    assert_eq!((&partition["block_size"], &partition["left_out"]), (&16.into(), &json!([])));
    let mut chains = BTreeSet::new();
    for (at, event) in partition["events"].as_array().expect("events").iter().enumerate() {
        assert_eq!((&event["worker_id"], &event["storage_tier"]), (&1.into(), &"device".into()));
        assert_eq!((&event["event"]["event_id"], &event["event"]["dp_rank"]), (&at.into(), &0.into()));
        let stored = &event["event"]["data"]["stored"];
        let mut parent = stored["parent_hash"].as_u64();
        for block in stored["blocks"].as_array().expect("blocks") {
            let hashes = (block["block_hash"].as_u64(), block["tokens_hash"].as_u64());
            chains.insert((parent, hashes.0, hashes.1));
            parent = hashes.0;
        }
    }
    let mut expected = BTreeSet::new();
    for prompt in [&tokens, &other] {
        let mut parent = None;
        for (hash, local) in engine_hashes(prompt).into_iter().zip(locals(prompt, None)) {
            expected.insert((parent, Some(hash.0), Some(local)));
            parent = Some(hash.0);
        }
    }
    assert_eq!(chains, expected);
    assert_eq!((served.daemon.counter("http_dumps"), served.daemon.counter("http_dumps_incomplete")), (1, 0));
}

#[test]
fn what_means_nothing_here_says_so() {
    let served = Served::start(&[]);
    for path in ["/register_peer", "/deregister_peer", "/replica_sync/register_peer", "/replica_sync/deregister_peer"] {
        let (status, said) = served.post(path, &json!({"url": "http://127.0.0.1:1"}));
        assert_eq!((status, said["code"].as_str()), (501, Some("unsupported")), "{path}");
        assert!(said["remedy"].as_str().is_some_and(|remedy| remedy.contains("[snapshot]")));
    }
    assert_eq!(served.get("/peers"), (200, json!([])));
    assert_eq!(served.get("/replica_sync/peers"), (200, json!([])));
    assert_eq!(served.post("/reopen_logs", &json!({})), (200, json!({"status": "ok"})));
    assert_eq!(served.get("/nothing").0, 404);
    assert_eq!(served.get("/query").0, 405);
}

/// The curl lines with which the engines' README asks the peer, for another port and without what goes before them.
fn curl_lines(port: u16) -> Option<Vec<String>> {
    let readme = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared/engines/README.md");
    let text = std::fs::read_to_string(readme).ok()?;
    let mut lines: Vec<String> = Vec::new();
    let mut is_open = false;
    for line in text.lines() {
        if line.starts_with("curl ") {
            lines.push(String::new());
            is_open = true;
        }
        if let Some(last) = lines.last_mut().filter(|_| is_open) {
            last.push_str(line);
            last.push('\n');
            // A body that is not closed goes on in the next line.
            is_open = last.matches('\'').count() % 2 == 1
                || last.trim_end().ends_with("-d \\")
                || last.trim_end().ends_with("-d");
        }
    }
    Some(
        lines
            .iter()
            .map(|line| line.replace(":18090", &format!(":{port}")).replace(":18092", &format!(":{port}")))
            .collect(),
    )
}

#[test]
fn the_lines_that_ask_the_peer_ask_this_daemon() {
    let served = Served::start(&[]);
    let Some(lines) = curl_lines(served.port) else {
        return skipped("the peer's curl lines", "there is no ../shared/engines/README.md");
    };
    if Command::new("curl").arg("--version").output().is_err() {
        return skipped("the peer's curl lines", "there is no curl");
    }
    assert_eq!(lines.len(), 4, "{lines:?}");
    let answers: Vec<(String, Value)> = lines
        .iter()
        .map(|line| {
            let line = line.trim_end().replacen("curl ", "curl -w '\\n%{http_code}' ", 1);
            let output = Command::new("sh").args(["-c", &line]).output().expect("a shell");
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            let (body, status) = said.rsplit_once('\n').unwrap_or_else(|| panic!("{line}: {output:?}"));
            (status.to_owned(), serde_json::from_str(body).unwrap_or_else(|_| panic!("{line}: {said}")))
        })
        .collect();
    let statuses: Vec<&str> = answers.iter().map(|(status, _)| status.as_str()).collect();
    assert_eq!(statuses, ["201", "200", "201", "200"], "{answers:?}");
    assert_eq!(answers[0].1, json!({"status": "ok"}));
    assert_eq!(answers[1].1["scores"], json!({}));
    assert_eq!((&answers[2].1["lifecycle"], &answers[2].1["total_kv_blocks"]), (&"schedulable".into(), &256.into()));
    let reserved = &answers[3].1;
    assert_eq!((&reserved["selection_id"], &reserved["worker_id"]), (&"r1".into(), &1.into()));
    assert_eq!(reserved["endpoint"], "http://127.0.0.1:8000");
}
