//! Workers that `/workers` adds, changes and removes, and the callers that may do so.

use kvrouted::ids::Worker;
use serde_json::{Value, json};

use super::client::Served;
use crate::kit::engine::Publisher;
use crate::kit::{prompt, until};

fn request(id: u64, publisher: &Publisher) -> Value {
    json!({
        "worker_id": id, "model_name": "m", "endpoint": "http://w:8000", "block_size": 16, "total_kv_blocks": 256,
        "kv_events_endpoint": publisher.endpoint(), "max_num_batched_tokens": 512, "taints": ["red"],
        "topology_domains": {"zone": "a"}, "stable_routing_id": "x", "kv_transfer_enforcement": "preferred",
    })
}

#[test]
fn a_worker_comes_changes_and_goes() {
    let (served, mut publisher) = (Served::start(&[]), Publisher::new());
    let (status, not_ready) = served.get("/ready");
    assert_eq!((status, &not_ready["ready"], &not_ready["schedulable_workers"]), (503, &false.into(), &0.into()));
    let (status, record) = served.post("/workers", &request(7, &publisher));
    assert_eq!((status, &record["lifecycle"]), (201, &"schedulable".into()), "{record}");
    assert!(record.get("not_schedulable_reasons").is_none() && record["topology_domains"]["zone"] == "a", "{record}");
    publisher.await_subscription();
    let tokens = prompt(1, 32);
    publisher.store(&tokens);
    until("it holds the prompt", || served.daemon.device(&tokens, Worker::new(7, 0)) == Some(2));
    let (status, ready) = served.get("/ready");
    assert_eq!((status, &ready["ready"], &ready["workers"][0]["worker_id"]), (200, &true.into(), &7.into()));

    let (status, patched) = served.patch("/workers/7", &json!({"taints": ["blue"], "endpoint": "http://w:9000"}));
    assert_eq!((status, &patched["taints"], &patched["stable_routing_id"]), (200, &json!(["blue"]), &"x".into()));
    let select = json!({"model_name": "m", "token_ids": tokens, "routing_constraints": {"required_taints": ["blue"]}});
    let selected = until_selected(&served, &select);
    assert_eq!(
        (&selected["endpoint"], &selected["overlap"]["gpu"]),
        (&"http://w:9000".into(), &32.into()),
        "nothing is lost"
    );
    let (_, listed) = served.get("/workers");
    assert_eq!(
        (&listed[0]["status"], &listed[0]["kv_events_endpoint"]),
        (&"active".into(), &publisher.endpoint().into())
    );

    let (status, gone) = served.delete("/workers/7");
    assert_eq!((status, &gone["lifecycle"]), (200, &"unschedulable".into()));
    assert_eq!((served.get("/workers").1, served.delete("/workers/7").0), (json!([]), 404));
    assert_eq!((served.patch("/workers/7", &json!({})).0, served.patch("/workers/x", &json!({})).0), (404, 400));
}

#[test]
fn an_endpoint_that_no_socket_can_have_is_refused_and_the_daemon_serves_on() {
    let mut served = Served::start(&[]);
    let bad =
        ["ipc:///tmp/x\u{0}y", "tcp://127.0.0.1\u{0}:1", "tcp://127.0.0.1:1\u{0}", "ipc:///tmp/x\ny", "inproc://x"];
    for (at, endpoint) in bad.into_iter().enumerate() {
        let registration = json!({"instance_id": at, "endpoint": endpoint, "model_name": "m", "block_size": 16});
        let (status, said) = served.post("/register", &registration);
        assert!((400..500).contains(&status), "{endpoint:?}: {status} {said}");
        let replay = json!({
            "instance_id": at, "endpoint": "tcp://127.0.0.1:1", "replay_endpoint": endpoint, "model_name": "m",
            "block_size": 16,
        });
        let (status, said) = served.post("/register", &replay);
        assert!((400..500).contains(&status), "replay {endpoint:?}: {status} {said}");
        let worker = json!({
            "worker_id": at, "model_name": "m", "endpoint": "http://w:1", "block_size": 16,
            "kv_events_endpoint": endpoint,
        });
        let (status, said) = served.post("/workers", &worker);
        assert!(status != 201 || said["lifecycle"] != "schedulable", "{endpoint:?}: {status} {said}");
    }
    assert_eq!(served.get("/health").0, 200);
    assert!(served.daemon.status().workers.is_empty());
    assert_eq!(served.daemon.process.end("-TERM"), Some(0));
}

#[test]
fn who_was_removed_elsewhere_is_nobody_to_send_to() {
    let (served, publisher) = (Served::start(&[]), Publisher::new());
    assert_eq!(served.post("/workers", &request(7, &publisher)).1["lifecycle"], "schedulable");
    assert_eq!(served.get("/ready").0, 200);
    served.daemon.worker_ok(&["remove", "7"]);
    until("it is gone", || served.get("/ready").0 == 503);
    let (_, ready) = served.get("/ready");
    let row = &ready["workers"][0];
    assert_eq!((&ready["schedulable_workers"], &row["lifecycle"]), (&0.into(), &"unschedulable".into()), "{ready}");
    assert!(row["not_schedulable_reasons"][0].as_str().is_some_and(|reason| reason.contains("register")), "{row}");
    assert_eq!(served.get("/workers").1[0]["lifecycle"], "unschedulable");
    assert_eq!(served.post("/workers", &request(7, &publisher)).1["lifecycle"], "schedulable");
}

#[test]
fn no_more_is_kept_of_a_worker_than_is_allowed() {
    let served = Served::start(&[]);
    let large = json!({"worker_id": 1, "model_name": "m", "stable_routing_id": "x".repeat(40 << 10)});
    assert_eq!(served.post("/workers", &large).0, 201);
    // Counted is what would be kept, not what one request says.
    let more = json!({"topology_domains": {"zone": "y".repeat(40 << 10)}});
    let (status, said) = served.patch("/workers/1", &more);
    assert_eq!((status, said["code"].as_str()), (413, Some("oversized")));
    assert_eq!(served.get("/workers").1[0]["topology_domains"], json!({}));
}

/// What is selected once the fleet shows what was patched.
fn until_selected(served: &Served, body: &Value) -> Value {
    let mut selected = Value::Null;
    until("it is selected", || {
        let (status, said) = served.post("/select", body);
        selected = said;
        status == 200
    });
    selected
}

#[test]
fn what_is_not_complete_waits_and_says_what_it_lacks() {
    let (served, publisher) = (Served::start(&[]), Publisher::new());
    let (status, record) = served.post("/workers", &json!({"worker_id": 1, "model_name": "m"}));
    let lacks = json!([
        "endpoint is required",
        "block_size must be greater than 0",
        "kv_events endpoint is required for dp_rank 0"
    ]);
    assert_eq!((status, &record["lifecycle"], &record["not_schedulable_reasons"]), (201, &"incomplete".into(), &lacks));
    assert_eq!(served.post("/select", &json!({"model_name": "m", "token_ids": [1]})).0, 503);
    let rest = json!({"endpoint": "http://w:1", "block_size": 16, "kv_events_endpoints": {"0": publisher.endpoint()}});
    assert_eq!(served.patch("/workers/1", &rest).1["lifecycle"], "schedulable");
    assert_eq!(served.post("/select", &json!({"model_name": "m", "token_ids": [1]})).0, 200);

    let mut other_size = request(2, &Publisher::new());
    other_size["block_size"] = 32.into();
    let (status, record) = served.post("/workers", &other_size);
    let reason = record["not_schedulable_reasons"][0].as_str().unwrap_or_default().to_owned();
    assert_eq!((status, reason.contains("block_size mismatch")), (201, true), "{record}");
    let mut other_model = request(3, &Publisher::new());
    other_model["model_name"] = "other".into();
    let (status, record) = served.post("/workers", &other_model);
    let reason = record["not_schedulable_reasons"][0].as_str().unwrap_or_default().to_owned();
    assert_eq!((status, reason.contains("[[space]]")), (201, true), "{record}");
    assert_eq!(served.get("/workers").1.as_array().map(Vec::len), Some(3));
    assert_eq!(served.post("/workers", &json!({"model_name": "m"})).0, 422);
    let too_many = json!({"worker_id": 4, "model_name": "m", "data_parallel_size": 100_000});
    assert_eq!(served.post("/workers", &too_many).0, 400);
}

#[test]
fn ranks_come_and_go_with_their_worker() {
    let (served, publishers) = (Served::start(&[]), [(); 3].map(|()| Publisher::new()));
    let endpoints = |ranks: &[usize]| -> Value {
        ranks
            .iter()
            .map(|rank| (rank.to_string(), Value::from(publishers[*rank].endpoint())))
            .collect::<serde_json::Map<_, _>>()
            .into()
    };
    let body = json!({
        "worker_id": 5, "model_name": "m", "endpoint": "http://w:1", "block_size": 16, "data_parallel_size": 3,
        "kv_events_endpoints": endpoints(&[0, 1, 2]),
    });
    assert_eq!(served.post("/workers", &body).1["lifecycle"], "schedulable");
    let ranks = || served.get("/workers").1[0]["listeners"].as_object().map(serde_json::Map::len);
    assert_eq!(ranks(), Some(3));
    let fewer = json!({"data_parallel_size": 2, "kv_events_endpoints": endpoints(&[0, 1])});
    assert_eq!(served.patch("/workers/5", &fewer).1["lifecycle"], "schedulable");
    assert_eq!(ranks(), Some(2));
    let body = json!({"model_name": "m", "token_ids": [1], "pinned_worker": {"worker_id": 5, "dp_rank": 1}});
    assert_eq!(served.post("/select", &body).1["overlap"]["dp"], json!({"0": 0, "1": 0}));
    assert_eq!(served.delete("/workers/5").0, 200);
}

#[test]
fn who_is_named_elsewhere_is_not_changed_here() {
    let served = Served::start(&["--worker", "id=1"]);
    let (status, said) = served.delete("/workers/1");
    assert_eq!((status, said["error"].as_str().is_some_and(|error| error.contains("config"))), (409, true), "{said}");
    assert_eq!(served.post("/workers", &request(1, &Publisher::new())).0, 409);
    assert_eq!(served.post("/unregister", &json!({"instance_id": 1, "model_name": "m"})).0, 409);
    let listed = served.get("/workers").1;
    assert_eq!(
        (&listed[0]["lifecycle"], &listed[0]["endpoint"], &listed[0]["status"]),
        (&"schedulable".into(), &Value::Null, &"paused".into())
    );
}

#[test]
fn who_may_not_administer_may_route() {
    let served = Served::configured("administer = false", "[[worker]]\nid = 1\n");
    for (status, said) in [
        served.post("/workers", &request(2, &Publisher::new())),
        served.patch("/workers/1", &json!({})),
        served.delete("/workers/1"),
        served.post("/register", &json!({})),
        served.post("/unregister", &json!({})),
        served.get("/dump"),
    ] {
        assert_eq!((status, said["code"].as_str()), (403, Some("not_permitted")));
        assert!(said["remedy"].as_str().is_some_and(|remedy| remedy.contains("administer = true")), "{said}");
    }
    assert_eq!(served.post("/select_and_reserve", &json!({"model_name": "m", "token_ids": [1]})).0, 200);
    assert_eq!((served.get("/workers").0, served.daemon.counter("http_administration_refused")), (200, 6));
}

#[test]
fn a_worker_is_registered_only_where_the_configuration_allows() {
    let publisher = Publisher::new();
    let served = Served::configured("worker_hosts = [\"127.9.0.0/16\", \"engine.example\"]", "");
    let refused = |(status, said): (u16, Value)| {
        assert_eq!((status, said["code"].as_str()), (403, Some("not_permitted")), "{said}");
        assert!(said["remedy"].as_str().is_some_and(|remedy| remedy.contains("worker_hosts")), "{said}");
    };
    let registration =
        |endpoint: &str| json!({"instance_id": 1, "endpoint": endpoint, "model_name": "m", "block_size": 16});
    refused(served.post("/register", &registration(&publisher.endpoint())));
    refused(served.post("/register", &registration("ipc:///run/other")));
    let mut replaying = registration("tcp://127.9.0.1:9");
    replaying["replay_endpoint"] = "tcp://127.8.0.1:9".into();
    refused(served.post("/register", &replaying));
    refused(served.post("/workers", &request(1, &publisher)));
    assert_eq!(served.get("/workers").1, json!([]), "no worker was added");
    assert_eq!(served.daemon.counter("http_endpoints_refused"), 4);
    assert_eq!(served.post("/register", &registration("tcp://127.9.0.2:9")).0, 201);
    let bad = crate::kit::folder();
    let file = crate::kit::configure(bad.path(), "[http]\nport = 1\nworker_hosts = [\"tcp://10.0.0.1:1\"]\n");
    let output = crate::kit::run(&["serve", "--config", crate::kit::text(&file), "--check"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("worker_hosts"), "{output:?}");
}
