//! Select, book and report: the half of the selection service.

use std::collections::BTreeSet;
use std::time::Duration;

use kvrouted::hash;
use kvrouted::ids::Worker;
use serde_json::{Value, json};

use super::client::Served;
use crate::kit::engine::{Publisher, SCHEME};
use crate::kit::{prompt, until};

const TWO_WORKERS: [&str; 4] =
    ["--worker", "id=1,batched_tokens_max=100,taints=red", "--worker", "id=2,capacity_blocks=50"];

fn load(served: &Served, worker: usize) -> (u64, u64, u64) {
    let (status, loads) = served.get("/loads");
    assert_eq!(status, 200);
    let of = |name: &str| loads[0]["loads"][worker][name].as_u64().expect("a number");
    (of("potential_prefill_tokens"), of("potential_decode_blocks"), of("active_requests"))
}

fn names(value: &Value) -> BTreeSet<&str> {
    value.as_object().expect("an object").keys().map(String::as_str).collect()
}

#[test]
fn a_booking_lives_from_its_selection_to_its_end() {
    let served = Served::start(&TWO_WORKERS);
    let tokens = prompt(1, 40);
    let body =
        json!({"model_name": "m", "selection_id": "r1", "token_ids": tokens, "allowed_worker_ids": [1], "unknown": {}});
    let (status, selected) = served.post("/select_and_reserve", &body);
    assert_eq!(status, 200, "{selected}");
    let known = [
        "selection_id",
        "sequence_hashes",
        "isl_tokens",
        "track_prefill_tokens",
        "model_name",
        "routing_group",
        "worker_id",
        "dp_rank",
        "endpoint",
        "block_size",
        "overlap",
        "effective_prefill_tokens",
        "potential_decode_blocks",
        "trust",
    ];
    assert_eq!(names(&selected), BTreeSet::from(known));
    let (mut locals, mut chain) = (Vec::new(), Vec::new());
    hash::local_hashes(SCHEME, hash::seed(None, None), hash::token_bytes(&tokens), &[], &mut locals);
    hash::sequence_hashes(&locals, &mut chain);
    let chain: Vec<i64> = chain.into_iter().map(|hash| hash.0 as i64).collect();
    assert_eq!(selected["sequence_hashes"], json!(chain));
    assert_eq!(
        (&selected["worker_id"], &selected["dp_rank"], &selected["block_size"]),
        (&1.into(), &0.into(), &16.into())
    );
    assert_eq!((&selected["isl_tokens"], &selected["effective_prefill_tokens"]), (&40.into(), &40.into()));
    // Two whole blocks and the beginning of a third.
    assert_eq!(selected["potential_decode_blocks"], 3);
    assert_eq!(selected["overlap"], json!({"longest_matched": 0, "gpu": 0, "dp": {"0": 0}, "cpu": 0, "disk": 0}));
    assert_eq!((load(&served, 0), load(&served, 1)), ((40, 2, 1), (0, 0, 0)));

    assert_eq!(served.post("/select_and_reserve", &body).0, 409, "the name is taken");
    let ok = (200, json!({"status": "ok"}));
    assert_eq!(served.post("/reservations/r1/prefill_complete", &json!({})), ok);
    assert_eq!(load(&served, 0), (0, 2, 1));
    assert_eq!(served.post("/reservations/r1/prefill_complete", &json!({})), ok, "it may be said twice");
    assert_eq!(served.post("/reservations/r1/output_block", &json!({"decay_fraction": 0.5})), ok);
    assert_eq!(served.post("/reservations/r1/output_block", &json!({"decay_fraction": 2})).0, 400);
    assert_eq!(served.delete("/reservations/r1"), ok);
    assert_eq!(load(&served, 0), (0, 0, 0));
    for (status, said) in [
        served.delete("/reservations/r1"),
        served.post("/reservations/r1/prefill_complete", &json!({})),
        served.post("/reservations/other/output_block", &json!({})),
    ] {
        assert_eq!((status, said["error"].is_string()), (404, true));
    }
    assert_eq!(served.delete("/reservations/r1").0, 404);
    assert_eq!(served.post("/select_and_reserve", &json!({"model_name": "m", "token_ids": tokens})).0, 200, "unnamed");
}

#[test]
fn output_becomes_blocks_where_it_is_counted() {
    let tables = "[booking]\ntrack_output_blocks = true\n[[worker]]\nid = 1\n";
    let served = Served::configured("", tables);
    let body = json!({"model_name": "m", "selection_id": "r", "token_ids": prompt(1, 32)});
    assert_eq!(served.post("/select_and_reserve", &body).0, 200);
    for blocks in 3..6 {
        assert_eq!(served.post("/reservations/r/output_block", &json!({})).0, 200);
        assert_eq!(load(&served, 0).1, blocks);
    }
}

#[test]
fn a_selection_is_booked_later_once() {
    let served = Served::start(&TWO_WORKERS);
    let body = json!({"model_name": "m", "selection_id": "s", "token_ids": prompt(1, 32), "pinned_worker": {"worker_id": 2, "dp_rank": 0}, "advisory": true});
    let (status, selected) = served.post("/select", &body);
    assert_eq!(status, 200, "{selected}");
    assert_eq!(
        selected["worker_load"],
        json!({"active_prefill_tokens": 0, "prefill_token_capacity": 8192, "total_kv_blocks": 50})
    );
    assert!(selected.get("sequence_hashes").is_none() && selected.get("isl_tokens").is_none(), "{selected}");
    assert_eq!(load(&served, 1), (0, 0, 0));
    let booked = json!({
        "selection_id": "s", "model_name": "m", "routing_group": "default", "worker_id": 2, "dp_rank": 0, "endpoint": "",
    });
    let replay = json!({"model_name": "m", "selection_id": "s"});
    assert_eq!(served.post("/reservations", &replay), (201, booked));
    assert_eq!(load(&served, 1), (32, 2, 1));
    assert_eq!(served.post("/reservations", &replay).0, 404, "it is booked");
    let named = json!({"model_name": "m", "selection_id": "n", "worker_id": 1, "token_ids": prompt(2, 16), "effective_prefill_tokens": 16});
    assert_eq!(served.post("/reservations", &named).0, 201);
    assert_eq!(load(&served, 0), (16, 1, 1));
    let refused = [
        (json!({"model_name": "m", "selection_id": "x", "worker_id": 9, "token_ids": [1]}), 404),
        (
            json!({"model_name": "m", "selection_id": "x", "worker_id": 1, "token_ids": [1], "effective_prefill_tokens": 2}),
            400,
        ),
        (json!({"model_name": "m", "token_ids": [1]}), 422),
        (json!({"model_name": "m", "selection_id": "never"}), 404),
        (json!({"model_name": "other", "selection_id": "s"}), 503),
    ];
    for (body, expected) in refused {
        assert_eq!(served.post("/reservations", &body).0, expected, "{body}");
    }
}

#[test]
fn an_unknown_model_gets_dynamos_status_and_is_no_reason_to_retry() {
    let served = Served::start(&TWO_WORKERS);
    for (model, group) in [("other", "default"), ("m", "g")] {
        let hashes = json!({"model_name": model, "routing_group": group, "block_hashes": []});
        let tokens = json!({"model_name": model, "routing_group": group, "token_ids": [1], "selection_id": "s"});
        let rank = json!({
            "model_name": model, "routing_group": group, "instance_id": 9, "endpoint": "tcp://127.0.0.1:1", "block_size": 16,
        });
        for (path, body, expected) in [
            ("/query", &tokens, 404),
            ("/query_by_hash", &hashes, 404),
            ("/select", &tokens, 503),
            ("/select_and_reserve", &tokens, 503),
            ("/reservations", &tokens, 503),
            ("/potential_loads", &tokens, 503),
            ("/overlap_scores", &tokens, 503),
            ("/register", &rank, 409),
        ] {
            let (status, said) = served.post(path, body);
            let told = (&said["code"], &said["retryable"]);
            assert_eq!((status, told), (expected, (&"unknown_space".into(), &false.into())), "{path}: {said}");
        }
    }
}

#[test]
fn what_a_request_wants_is_heeded_or_refused() {
    let served = Served::start(&TWO_WORKERS);
    let select = |more: Value| {
        let mut body = json!({"model_name": "m", "token_ids": [1, 2, 3]});
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        let (status, said) = served.post("/select", &body);
        (status, said["worker_id"].as_u64().or_else(|| said["code"].as_str().map(|_| 0)))
    };
    assert_eq!(select(json!({"allowed_worker_ids": [2]})), (200, Some(2)));
    assert_eq!(select(json!({"affinity_target": {"worker_id": 2, "dp_rank": null}})), (200, Some(2)));
    assert_eq!(select(json!({"routing_constraints": {"required_taints": ["red"]}})), (200, Some(1)));
    assert_eq!(select(json!({"routing_constraints": {"preferred_taints": {"red": 1.0}}})), (200, Some(1)));
    assert_eq!(select(json!({"routing_constraints": {"required_taints": ["blue"]}})), (503, Some(0)));
    assert_eq!(
        select(json!({"pinned_worker": {"worker_id": 1, "dp_rank": 0}, "allowed_worker_ids": [2]})),
        (400, Some(0))
    );
    assert_eq!(
        select(json!({"router_config_override": {"router_temperature": 0.5, "overlap_score_credit": 0}})).0,
        200
    );
    assert_eq!(select(json!({"router_config_override": {"router_temperature": -1}})), (422, Some(0)));
    assert_eq!(select(json!({"is_eagle": true})), (400, Some(0)));
    assert_eq!(select(json!({"model_name": "other"})), (503, Some(0)));
    assert_eq!(select(json!({"selection_id": ""})), (400, Some(0)));
    let hashed = |body: Value| served.post("/select", &body).0;
    assert_eq!(
        hashed(json!({"model_name": "m", "block_hashes": [1, -2], "sequence_hashes": [1, 7], "isl_tokens": 33})),
        200
    );
    assert_eq!(
        hashed(json!({"model_name": "m", "block_hashes": [1], "sequence_hashes": [1, 7], "isl_tokens": 33})),
        400
    );
    assert_eq!(hashed(json!({"model_name": "m", "block_hashes": [1], "sequence_hashes": [1], "isl_tokens": 0})), 400);
    assert_eq!(hashed(json!({"model_name": "m", "block_hashes": [1], "sequence_hashes": [1], "isl_tokens": 64})), 400);
    assert_eq!(hashed(json!({"model_name": "m", "sequence_hashes": [1], "isl_tokens": 16})), 400);
    assert_eq!(hashed(json!({"model_name": "m"})), 400);
}

#[test]
fn overlaps_count_where_the_prompt_is_held() {
    let mut publisher = Publisher::new();
    let worker = format!("id=1,endpoint={}", publisher.endpoint());
    let served = Served::start(&["--worker", &worker, "--worker", "id=2"]);
    publisher.await_subscription();
    let tokens = prompt(5, 100);
    publisher.store(&tokens[..64]);
    until("it holds the beginning", || served.daemon.device(&tokens, Worker::new(1, 0)) == Some(4));
    let body = json!({"model_name": "m", "token_ids": tokens});
    let (status, selected) = served.post("/select", &body);
    assert_eq!((status, &selected["worker_id"], &selected["trust"]), (200, &1.into(), &"exact".into()));
    assert_eq!(selected["overlap"], json!({"longest_matched": 64, "gpu": 64, "dp": {"0": 64}, "cpu": 64, "disk": 64}));
    assert_eq!((&selected["effective_prefill_tokens"], &selected["potential_decode_blocks"]), (&36.into(), &7.into()));
    let (status, scores) = served.post("/overlap_scores", &body);
    assert_eq!((status, &scores["block_size"], &scores["num_blocks"]), (200, &16.into(), &6.into()));
    assert_eq!(scores["shared_cache"], json!({"enabled": false, "total_hit_blocks": 0, "ranges": [], "error": null}));
    let first = json!({
        "worker_id": 1, "dp_rank": 0, "device_blocks": 4, "host_pinned_blocks": 4, "disk_blocks": 4,
        "host_pinned_extension_blocks": 0, "disk_extension_blocks": 0, "shared_beyond_device_blocks": null, "trust": "exact",
    });
    assert_eq!((&scores["workers"][0], &scores["workers"][1]["device_blocks"]), (&first, &0.into()));
    let (status, loads) = served.post("/potential_loads", &body);
    let rows = json!([
        {"worker_id": 1, "dp_rank": 0, "potential_prefill_tokens": 36, "potential_decode_blocks": 6, "active_requests": 0},
        {"worker_id": 2, "dp_rank": 0, "potential_prefill_tokens": 100, "potential_decode_blocks": 6, "active_requests": 0},
    ]);
    assert_eq!((status, loads), (200, rows));
}

#[test]
fn who_waits_is_answered_when_there_is_room_and_books_nothing_when_gone() {
    let tables = "[policy]\nqueue_threshold = 0.5\n[[worker]]\nid = 1\nbatched_tokens_max = 100\n";
    let served = Served::configured("", tables);
    let body = |id: &str| json!({"model_name": "m", "selection_id": id, "token_ids": prompt(1, 64)});
    assert_eq!(served.post("/select_and_reserve", &body("held")).0, 200);
    assert!(served.post_for("/select_and_reserve", &body("gone"), Duration::from_millis(100)).is_none());
    until("the request of a client that left is cancelled", || served.daemon.counter("queue_cancelled") == 1);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| served.post("/select_and_reserve", &body("waits")));
        until("it waits", || {
            let (_, loads) = served.get("/loads");
            (loads[0]["pending_count"].as_u64(), loads[0]["pending_isl_tokens"].as_u64()) == (Some(1), Some(64))
        });
        assert_eq!(served.delete("/reservations/held").0, 200);
        assert_eq!(waits.join().expect("answered").0, 200);
    });
    assert_eq!(load(&served, 0).2, 1, "only who waited is booked");
    // A gateway at the socket makes the room, too, and finds it taken.
    assert_eq!((served.daemon.counter("http_unwanted"), served.daemon.counter("queue_waiting")), (1, 0));
}

#[test]
fn who_selects_takes_a_turn_and_who_books_the_selection_none() {
    let served =
        Served::configured("", "[space.policy]\nmode = \"round-robin\"\n[[worker]]\nid = 1\n[[worker]]\nid = 2\n");
    let select = |id: &str| {
        let body = json!({"model_name": "m", "selection_id": id, "token_ids": [1]});
        served.post("/select", &body).1["worker_id"].as_u64().expect("a worker")
    };
    assert_eq!([select("a"), select("b"), select("c"), select("d")], [1, 2, 1, 2]);
    let reserved =
        |id: &str| served.post("/reservations", &json!({"model_name": "m", "selection_id": id})).1["worker_id"].clone();
    assert_eq!([reserved("b"), reserved("a")], [2, 1]);
    assert_eq!(select("e"), 1, "a booking of what was selected is no turn of its own");
}
