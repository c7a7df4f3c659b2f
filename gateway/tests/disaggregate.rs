//! Requests on two engines: doubles of vLLM with the NIXL connector and of SGLang, behind the proxy. The router is a
//! double that chooses in a fixed order and logs what it hears.

mod disaggregate_support;
mod proxy_support;

use std::sync::Arc;
use std::time::Duration;

use disaggregate_support::{Double, Fault, sglang, vllm};
use kvrouted_gateway::config::Config;
use kvrouted_gateway::engines::EngineRole;
use proxy_support::caller::{CHAT, CHAT_PATH, Reply, STREAMED_CHAT, chat, exchange, get, post, streamed_chat};
use proxy_support::choice::FixedChoice;
use proxy_support::gateway::{Gateway, config};
use proxy_support::until;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

const COMPLETIONS: &str = "/v1/completions";
const PROMPT: &str = r#"{"model" : "m", "prompt":"hi","max_tokens": 5,"logit_bias":{"7":1.50} }"#;
const KINDS: [EngineRole; 3] = [EngineRole::Prefill, EngineRole::Decode, EngineRole::Any];

/// Engines by role, behind a gateway. Their ids count from 1 in this order: prefill, decode, any.
struct Fleet {
    engines: [Vec<Double>; 3],
    gateway: Gateway,
}

impl Fleet {
    async fn of(engines: [Vec<Double>; 3]) -> Self {
        Self::with(engines, |_| {}).await
    }

    async fn with(engines: [Vec<Double>; 3], change: impl FnOnce(&mut Config)) -> Self {
        let roles: Vec<EngineRole> =
            KINDS.iter().zip(&engines).flat_map(|(role, engines)| engines.iter().map(|_| *role)).collect();
        let urls: Vec<String> = engines.iter().flatten().map(Double::url).collect();
        let mut config = config(&urls);
        config.forward.tells_worker = true;
        change(&mut config);
        let ids = |wanted: EngineRole| -> Vec<u64> {
            (1..).zip(&roles).filter(|(_, role)| **role == wanted).map(|(id, _)| id).collect()
        };
        let choice = FixedChoice::of_pairs(&ids(EngineRole::Prefill), &ids(EngineRole::Decode), &ids(EngineRole::Any));
        let gateway = Gateway::of(&config, choice, |engine| {
            engine.role = roles[usize::try_from(engine.worker).expect("small") - 1];
        });
        Self { gateway: gateway.await, engines }
    }

    fn prefill(&self) -> &Double {
        &self.engines[0][0]
    }

    fn decode(&self) -> &Double {
        &self.engines[1][0]
    }

    async fn post(&self, path: &str, body: &str) -> Reply {
        exchange(self.gateway.address, &post(path, "x-request-id: r-1\r\naccept-encoding: gzip\r\n", body)).await
    }

    fn lines(&self) -> Vec<String> {
        self.gateway.choice.lines()
    }

    /// How many requests came to the engines of each role.
    fn counts(&self) -> [usize; 3] {
        [0, 1, 2].map(|role: usize| self.engines[role].iter().map(|engine| engine.seen().len()).sum())
    }

    async fn metric(&self, outcome: &str) -> bool {
        let text = exchange(self.gateway.admin, &get("/metrics")).await.text().to_owned();
        text.contains(&format!("kvrouted_gateway_disaggregated_total{{outcome=\"{outcome}\"}}"))
    }
}

async fn vllm_fleet(prefill: usize, decode: usize, any: usize) -> (Fleet, Arc<vllm::Kept>) {
    vllm_fleet_with(prefill, decode, any, |_| {}).await
}

async fn vllm_fleet_with(
    prefill: usize,
    decode: usize,
    any: usize,
    change: impl FnOnce(&mut Config),
) -> (Fleet, Arc<vllm::Kept>) {
    let kept = Arc::default();
    let mut engines = [Vec::new(), Vec::new(), Vec::new()];
    for (of_role, count) in engines.iter_mut().zip([prefill, decode, any]) {
        for _ in 0..count {
            of_role.push(vllm::engine(&kept, true).await);
        }
    }
    (Fleet::with(engines, change).await, kept)
}

async fn sglang_fleet(prefill: usize, decode: usize, any: usize) -> (Fleet, Arc<sglang::Rooms>) {
    sglang_fleet_with(prefill, decode, any, |_| {}).await
}

async fn sglang_fleet_with(
    prefill: usize,
    decode: usize,
    any: usize,
    change: impl FnOnce(&mut Config),
) -> (Fleet, Arc<sglang::Rooms>) {
    let rooms = sglang::Rooms::new();
    let mut engines = [Vec::new(), Vec::new(), Vec::new()];
    for number in 0..prefill as u64 {
        engines[0].push(sglang::prefill(&rooms, 9000 + number).await);
    }
    for _ in 0..decode {
        engines[1].push(sglang::decode(&rooms).await);
    }
    for _ in 0..any {
        engines[2].push(sglang::whole(&rooms).await);
    }
    (Fleet::with(engines, change).await, rooms)
}

fn short_deadlines(config: &mut Config) {
    config.deadlines.first_byte = Duration::from_millis(300);
    config.deadlines.total = Duration::from_millis(300);
}

/// The one member that `after` has before all bytes of `before`.
fn added(before: &str, after: &str) -> String {
    let (open, rest) = before.split_at(before.find('{').expect("an object") + 1);
    let member = after.strip_prefix(open).and_then(|after| after.strip_suffix(rest));
    member.unwrap_or_else(|| panic!("other bytes have changed: {after}")).to_owned()
}

// ---- vLLM ------------------------------------------------------------------------------------------------------------

#[tokio::test]
async fn vllm_prefills_and_then_decodes_with_the_same_id_and_unchanged_parameters() {
    let (fleet, kept) = vllm_fleet(1, 1, 0).await;
    let reply = fleet.post(COMPLETIONS, PROMPT).await;
    assert_eq!((reply.status, reply.is_whole), (200, true), "{}", reply.text());
    let body: Value = serde_json::from_str(reply.text()).expect("JSON");
    assert_eq!(body["choices"][0]["text"], "a prefix is computed once", "the decode engine's own answer");
    assert_eq!((reply.headers["x-kvrouted-worker"].as_str(), reply.headers["x-request-id"].as_str()), ("2/0", "r-1"));
    assert_eq!(reply.headers["x-kvrouted-prefill-worker"], "1/0");
    let (prefill, decode) = (&fleet.prefill().seen()[0], &fleet.decode().seen()[0]);
    assert_eq!((prefill.header("x-request-id"), decode.header("x-request-id")), (Some("r-1"), Some("r-1")));
    assert_eq!((prefill.header("accept-encoding"), decode.header("accept-encoding")), (None, Some("gzip")));
    let mut expected = serde_json::from_str::<Value>(PROMPT).expect("JSON");
    expected["kv_transfer_params"] = json!({
        "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null, "remote_block_ids": null,
        "remote_host": null, "remote_port": null,
    });
    expected["max_tokens"] = json!(1);
    expected["stream"] = json!(false);
    assert_eq!(prefill.json(), expected);
    assert!(added(PROMPT, decode.text()).starts_with(r#""kv_transfer_params":{"do_remote_prefill": true,"#));
    assert_eq!((kept.reads(), kept.wrong_reads(), kept.computed_by_decode()), (1, 0, 0));
    fleet.gateway.settles().await;
    // The engine that prefills knows what was cached: 32 of 40 tokens. Its half ends when the other one begins.
    let lines = ["prefill prefilled", "usage 1/0 40 Some(32) 1", "prefill freed", "prefilled", "progress 5", "freed"];
    assert_eq!(fleet.lines(), lines);
    let metrics = exchange(fleet.gateway.admin, &get("/metrics")).await;
    assert!(metrics.text().contains("kvrouted_gateway_cached_tokens_total 32\n"), "not the decode engine's 40");
    assert!(fleet.metric("split").await);
}

#[tokio::test]
async fn vllm_streams_chats_completions_and_messages() {
    let (fleet, kept) = vllm_fleet(1, 1, 0).await;
    let with_usage = STREAMED_CHAT.replace("true}", r#"true,"stream_options":{"include_usage":true},"min_tokens":3}"#);
    let limited = CHAT.replace("\"messages\"", "\"max_completion_tokens\":3,\"messages\"");
    let messages = r#"{"model":"m","max_tokens":4,"messages":[],"stream":true}"#;
    for (path, body) in [(CHAT_PATH, with_usage.as_str()), (CHAT_PATH, &limited), ("/v1/messages", messages)] {
        let reply = fleet.post(path, body).await;
        assert_eq!((reply.status, reply.is_whole), (200, true), "{}", reply.text());
        let is_stream = body.contains("\"stream\"");
        assert_eq!(reply.text().ends_with("data: [DONE]\n\n"), is_stream, "{}", reply.text());
        let (prefill, decode) = (fleet.prefill().seen(), fleet.decode().seen());
        let (prefill, decode) = (prefill.last().expect("one"), decode.last().expect("one"));
        assert_eq!((prefill.path.as_str(), decode.path.as_str()), (path, path));
        let sent = prefill.json();
        assert_eq!((&sent["stream"], &sent["max_tokens"]), (&json!(false), &json!(1)));
        assert!(sent["stream_options"].is_null());
        for limit in ["max_completion_tokens", "min_tokens"] {
            let is_there = decode.json().get(limit).is_some();
            assert_eq!(sent.get(limit).cloned(), is_there.then(|| json!(1)), "{limit} where it was");
        }
        assert!(added(body, decode.text()).starts_with("\"kv_transfer_params\""));
    }
    assert_eq!((kept.reads(), kept.wrong_reads()), (3, 0));
    fleet.gateway.settles().await;
}

#[tokio::test]
async fn the_operators_edits_hold_for_both_engines_and_the_extra_usage_is_taken_out() {
    let (fleet, kept) = vllm_fleet_with(1, 1, 0, |config| config.forward.asks_usage = true).await;
    let reply = fleet.post(CHAT_PATH, STREAMED_CHAT).await;
    assert!(!reply.text().contains("usage") && reply.text().ends_with("data: [DONE]\n\n"), "{}", reply.text());
    assert_eq!(fleet.decode().seen()[0].json()["stream_options"]["include_usage"], true);
    assert!(fleet.prefill().seen()[0].json()["stream_options"].is_null());
    assert_eq!(kept.wrong_reads(), 0);
}

#[tokio::test]
async fn a_failed_prefill_goes_to_another_prefill_engine() {
    for fault in [Fault::Close, Fault::CloseAtTheEnd, Fault::Status(500), Fault::Status(503)] {
        let (fleet, kept) = vllm_fleet(2, 1, 0).await;
        fleet.prefill().fault(fault);
        let reply = fleet.post(COMPLETIONS, PROMPT).await;
        assert_eq!((reply.status, reply.headers["x-kvrouted-prefill-worker"].as_str()), (200, "2/0"), "{fault:?}");
        assert_eq!((fleet.counts(), kept.wrong_reads()), ([2, 1, 0], 0), "{fault:?}");
        fleet.gateway.settles().await;
        let lines = fleet.lines();
        assert!(lines[0].starts_with("failure 1/0 m") && lines[1] == "prefill served 2/0", "{lines:?}");
    }
    let (mut fleet, _) = vllm_fleet(2, 1, 0).await;
    fleet.engines[0][0].stop().await;
    assert_eq!(fleet.post(COMPLETIONS, PROMPT).await.status, 200, "a refused connection");
    assert_eq!(fleet.counts(), [1, 1, 0]);
}

#[tokio::test]
async fn a_decode_engine_that_refused_the_connection_leaves_the_blocks_for_another_one() {
    let (mut fleet, kept) = vllm_fleet(1, 2, 0).await;
    fleet.engines[1][0].stop().await;
    let reply = fleet.post(CHAT_PATH, STREAMED_CHAT).await;
    assert_eq!((reply.status, reply.headers["x-kvrouted-worker"].as_str()), (200, "3/0"));
    assert_eq!((fleet.counts(), kept.reads(), kept.wrong_reads()), ([1, 1, 0], 1, 0), "computed once");
    fleet.gateway.settles().await;
    assert!(fleet.gateway.choice.has("served 3/0") && fleet.gateway.choice.has("failure 2/0 m refused"));
}

#[tokio::test]
async fn a_decode_engine_that_failed_later_may_have_read_the_blocks_so_that_the_prompt_is_computed_again() {
    for fault in [Fault::Close, Fault::CloseAtTheEnd, Fault::Status(503)] {
        let (fleet, kept) = vllm_fleet(1, 2, 0).await;
        fleet.decode().fault(fault);
        let reply = fleet.post(CHAT_PATH, STREAMED_CHAT).await;
        assert_eq!((reply.status, reply.headers["x-kvrouted-worker"].as_str()), (200, "3/0"), "{fault:?}");
        assert_eq!((fleet.counts(), kept.wrong_reads()), ([2, 2, 0], 0), "{fault:?}");
        fleet.gateway.settles().await;
    }
    // Without another one, the caller is told what happened.
    let (fleet, _) = vllm_fleet(1, 1, 0).await;
    fleet.decode().fault(Fault::CloseAtTheEnd);
    let reply = fleet.post(CHAT_PATH, CHAT).await;
    assert_eq!((reply.status, reply.code().as_str()), (502, "engine_failed"));
    fleet.gateway.settles().await;
}

#[tokio::test]
async fn a_decode_engine_that_found_no_blocks_gets_them_once_more() {
    // The prefill engine died after its answer: the decode engine says so by its status, or by an event.
    for body in [CHAT, STREAMED_CHAT] {
        let (fleet, kept) = vllm_fleet(2, 1, 0).await;
        kept.lose_blocks(1);
        let reply = fleet.post(CHAT_PATH, body).await;
        assert_eq!((reply.status, reply.text().contains("no blocks")), (200, false), "{}", reply.text());
        assert_eq!((fleet.counts()[0], fleet.counts()[1], kept.wrong_reads()), (2, 2, 0));
        fleet.gateway.settles().await;
        // It is no better the second time: the caller is told what the engine says.
        kept.lose_blocks(2);
        let reply = fleet.post(CHAT_PATH, body).await;
        assert!(reply.text().contains("no blocks"), "{}", reply.text());
        assert_eq!((fleet.counts()[0], fleet.counts()[1]), (4, 4));
        fleet.gateway.settles().await;
    }
}

#[tokio::test]
async fn attempts_end_and_large_bodies_are_sent_once() {
    let (fleet, _) = vllm_fleet_with(5, 1, 0, |config| config.retry.attempts_max = 2).await;
    for engine in &fleet.engines[0] {
        engine.fault(Fault::Status(500));
    }
    let reply = fleet.post(COMPLETIONS, PROMPT).await;
    assert_eq!((reply.status, reply.code().as_str(), fleet.counts()), (502, "prefill_failed", [2, 0, 0]));
    fleet.gateway.settles().await;
    let (fleet, _) = vllm_fleet_with(2, 2, 1, |config| config.retry.body_bytes_max = 10).await;
    fleet.prefill().fault(Fault::Close);
    assert_eq!(fleet.post(COMPLETIONS, PROMPT).await.status, 502);
    assert_eq!(fleet.counts(), [1, 0, 0]);
    fleet.gateway.settles().await;
}

#[tokio::test]
async fn what_a_prefill_engine_says_of_the_request_itself_goes_to_the_caller() {
    let (fleet, _) = vllm_fleet(2, 1, 1).await;
    let reply = fleet.post(COMPLETIONS, &PROMPT.replace("hi", "refuse me")).await;
    assert_eq!(reply.status, 400);
    assert!(reply.text().contains("the prompt is too long"), "{}", reply.text());
    assert_eq!(fleet.counts(), [1, 0, 0]);
    fleet.gateway.settles().await;
}

#[tokio::test]
async fn a_prefill_engine_without_a_connector_is_seen() {
    let kept = Arc::default();
    let engines = [vec![vllm::engine(&kept, false).await], vec![vllm::engine(&kept, false).await], Vec::new()];
    let fleet = Fleet::of(engines).await;
    assert_eq!(fleet.post(COMPLETIONS, PROMPT).await.status, 200);
    assert_eq!(fleet.decode().seen()[0].text(), PROMPT, "as the caller sent it");
    assert!(fleet.metric("without_transfer").await);
}

#[tokio::test]
async fn a_hang_up_cancels_whichever_engine_of_vllm_runs() {
    let (fleet, _) = vllm_fleet(1, 1, 0).await;
    fleet.prefill().fault(Fault::Hang);
    hang_up(&fleet, 1, 0).await;
    fleet.prefill().fault(Fault::None);
    fleet.decode().fault(Fault::Hang);
    hang_up(&fleet, 1, 1).await;
}

/// A caller who leaves when the engines have the request. How many callers have then left the engines.
async fn hang_up(fleet: &Fleet, prefill_left: usize, decode_left: usize) {
    let before = fleet.counts();
    let mut caller = TcpStream::connect(fleet.gateway.address).await.expect("a connection");
    caller.write_all(&streamed_chat()).await.expect("sent");
    let (wants_prefill, wants_decode) = (before[0] + 1, before[1] + decode_left);
    until("the engines have it", || fleet.counts()[0] >= wants_prefill && fleet.counts()[1] >= wants_decode).await;
    drop(caller);
    until("the engines are left", || fleet.prefill().left() == prefill_left && fleet.decode().left() == decode_left)
        .await;
    fleet.gateway.settles().await;
}

#[tokio::test]
async fn deadlines_hold_for_both_halves() {
    for (prefill, decode) in [(Fault::Hang, Fault::None), (Fault::None, Fault::Hang)] {
        for body in [CHAT, STREAMED_CHAT] {
            let (fleet, _) = vllm_fleet_with(1, 1, 0, short_deadlines).await;
            fleet.prefill().fault(prefill);
            fleet.decode().fault(decode);
            let reply = fleet.post(CHAT_PATH, body).await;
            assert_eq!((reply.status, reply.code().as_str()), (504, "engine_timeout"), "{prefill:?} {decode:?}");
            fleet.gateway.settles().await;
            let (fleet, _) = sglang_fleet_with(1, 1, 0, short_deadlines).await;
            fleet.prefill().fault(prefill);
            fleet.decode().fault(decode);
            let reply = fleet.post(CHAT_PATH, body).await;
            assert_eq!((reply.status, reply.code().as_str()), (504, "engine_timeout"), "{prefill:?} {decode:?}");
            fleet.gateway.settles().await;
        }
    }
}

// ---- which engines ---------------------------------------------------------------------------------------------------

#[tokio::test]
async fn callers_may_not_steer_a_transfer_where_engines_have_roles() {
    let bodies = [
        r#"{"model":"m","prompt":"hi","kv_transfer_params":{"do_remote_prefill":true,"remote_host":"10.0.0.1"}}"#,
        r#"{"model":"m","prompt":"hi","bootstrap_host":"10.0.0.1","bootstrap_port":1,"bootstrap_room":1}"#,
    ];
    let (fleet, _) = vllm_fleet(1, 1, 1).await;
    for body in bodies {
        for path in [COMPLETIONS, "/v1/responses"] {
            let reply = fleet.post(path, &body.replace("\"prompt\"", "\"input\":\"hi\",\"prompt\"")).await;
            assert_eq!((reply.status, reply.code().as_str()), (400, "transfer_field_refused"));
        }
    }
    assert_eq!(fleet.counts(), [0, 0, 0]);
    // Without roles they go through, for example from another proxy.
    let (fleet, _) = vllm_fleet(0, 0, 1).await;
    for body in bodies {
        fleet.post(COMPLETIONS, body).await;
        assert_eq!(fleet.engines[2][0].seen().last().expect("one").text(), body);
    }
}

#[tokio::test]
async fn without_a_prefill_or_a_decode_engine_one_for_whole_requests_takes_them() {
    for role in [0, 1] {
        let (mut fleet, _) = vllm_fleet(1, 1, 1).await;
        fleet.engines[role][0].stop().await;
        for _ in 0..2 {
            let reply = fleet.post(COMPLETIONS, PROMPT).await;
            assert_eq!((reply.status, reply.headers["x-kvrouted-worker"].as_str()), (200, "3/0"), "{role}");
        }
        assert_eq!(fleet.engines[2][0].seen()[0].text(), PROMPT);
        assert!(fleet.metric("any").await);
        fleet.gateway.settles().await;
    }
    for (prefill, decode, word) in [(1, 0, "decode"), (0, 1, "prefill")] {
        let (fleet, _) = vllm_fleet(prefill, decode, 0).await;
        let reply = fleet.post(COMPLETIONS, PROMPT).await;
        assert_eq!((reply.status, reply.code().as_str()), (503, "no_engine_pair"));
        assert!(reply.text().contains(&format!("no engine with the role {word}")), "{}", reply.text());
        assert_eq!((reply.headers["retry-after"].as_str(), fleet.counts()), ("1", [0, 0, 0]));
        let (fleet, _) = vllm_fleet(prefill, decode, 1).await;
        assert_eq!(fleet.post(COMPLETIONS, PROMPT).await.status, 200);
        assert_eq!(fleet.counts(), [0, 0, 1]);
    }
}

#[tokio::test]
async fn what_cannot_be_split_goes_to_one_engine_whole() {
    let bodies = [
        (COMPLETIONS, r#"{"model":"m","prompt":["hi","ho"]}"#),
        (COMPLETIONS, r#"{"model":"m","prompt":"hi","n":2}"#),
        (COMPLETIONS, r#"{"model":"m","prompt":"hi","use_beam_search":true}"#),
        ("/v1/responses", r#"{"model":"m","input":"hi"}"#),
        ("/inference/v1/generate", r#"{"model":"m","token_ids":[1]}"#),
    ];
    let (fleet, _) = vllm_fleet(1, 1, 1).await;
    for (path, body) in bodies {
        let reply = fleet.post(path, body).await;
        assert_eq!((reply.status, reply.headers["x-kvrouted-worker"].as_str()), (200, "3/0"), "{body}");
    }
    assert_eq!(fleet.counts(), [0, 0, 5]);
    assert!(fleet.metric("not_split").await);
    let (fleet, _) = sglang_fleet(1, 1, 0).await;
    for (path, body) in &bodies[1..] {
        let reply = fleet.post(path, body).await;
        assert_eq!((reply.status, reply.code().as_str()), (400, "cannot_be_split"), "{body}");
    }
    assert_eq!(fleet.counts(), [0, 0, 0]);
    let (fleet, _) = sglang_fleet(1, 1, 1).await;
    assert_eq!(fleet.post(bodies[1].0, bodies[1].1).await.status, 200);
    assert_eq!(fleet.counts(), [0, 0, 1]);
}

// ---- SGLang ----------------------------------------------------------------------------------------------------------

#[tokio::test]
async fn sglang_gets_one_body_on_both_engines_at_once() {
    let (fleet, rooms) = sglang_fleet(1, 1, 0).await;
    let generate = r#"{"text":"hi","sampling_params":{"max_new_tokens":3}}"#;
    for (path, body) in [(CHAT_PATH, CHAT), (CHAT_PATH, STREAMED_CHAT), (COMPLETIONS, PROMPT), ("/generate", generate)]
    {
        let reply = fleet.post(path, body).await;
        assert_eq!((reply.status, reply.is_whole), (200, true), "{}", reply.text());
        assert!(reply.text().contains("prefix"), "the decode engine's words: {}", reply.text());
        let (prefill, decode) = (fleet.prefill().seen(), fleet.decode().seen());
        let (prefill, decode) = (prefill.last().expect("one"), decode.last().expect("one"));
        assert_eq!((prefill.body.as_ref(), prefill.path.as_str()), (decode.body.as_ref(), path));
        assert_eq!((prefill.header("x-request-id"), decode.header("x-request-id")), (Some("r-1"), Some("r-1")));
        let sent = decode.json();
        assert_eq!((&sent["bootstrap_host"], &sent["bootstrap_port"]), (&json!("127.0.0.1"), &json!(9000)));
        let expected = r#""bootstrap_host":"127.0.0.1","bootstrap_port":9000,"bootstrap_room":"#;
        assert!(added(body, decode.text()).starts_with(expected), "{}", decode.text());
    }
    assert_eq!(rooms.entered(), 4, "a room for each");
    let reply = fleet.post(COMPLETIONS, r#"{"model":"m","prompt":["hi","ho"]}"#).await;
    assert_eq!((reply.status, rooms.entered()), (200, 6), "and for each prompt of a list: {}", reply.text());
    fleet.gateway.settles().await;
    assert!(fleet.gateway.choice.has("usage 1/0 40 Some(32) 1"), "{:?}", fleet.lines());
    assert!(fleet.gateway.choice.has("prefill prefilled") && fleet.metric("split").await);
}

#[tokio::test]
async fn a_failed_half_of_sglang_ends_both_and_they_begin_again_in_a_new_room() {
    for fault in [Fault::Close, Fault::CloseAtTheEnd, Fault::Status(500), Fault::Status(503)] {
        let (fleet, _) = sglang_fleet(2, 1, 0).await;
        fleet.prefill().fault(fault);
        let reply = fleet.post(CHAT_PATH, STREAMED_CHAT).await;
        // If its answer broke off after the blocks had arrived, the decode engine may have begun already.
        let by = reply.headers["x-kvrouted-prefill-worker"].as_str();
        assert!(reply.status == 200 && (by == "2/0" || fault == Fault::CloseAtTheEnd), "{fault:?}: {by}");
        let room = |at: usize| fleet.decode().seen()[at].json()["bootstrap_room"].clone();
        assert!(fleet.decode().seen().len() == 1 || room(0) != room(1), "{fault:?}");
        fleet.gateway.settles().await;
    }
    for fault in [Fault::Close, Fault::CloseAtTheEnd, Fault::Status(503)] {
        let (fleet, _) = sglang_fleet(1, 2, 0).await;
        fleet.decode().fault(fault);
        let reply = fleet.post(CHAT_PATH, STREAMED_CHAT).await;
        assert_eq!((reply.status, reply.headers["x-kvrouted-worker"].as_str()), (200, "3/0"), "{fault:?}");
        fleet.gateway.settles().await;
    }
    let (mut fleet, _) = sglang_fleet(2, 2, 0).await;
    fleet.engines[0][0].stop().await;
    fleet.engines[1][0].stop().await;
    let reply = exchange(fleet.gateway.address, &chat()).await;
    assert_eq!((reply.status, reply.headers["x-kvrouted-worker"].as_str()), (200, "4/0"));
    assert_eq!(reply.headers["x-kvrouted-prefill-worker"], "2/0");
    fleet.gateway.settles().await;
}

#[tokio::test]
async fn a_prefill_engine_of_sglang_that_fails_ends_the_request() {
    let (fleet, _) = sglang_fleet(1, 1, 0).await;
    fleet.prefill().fault(Fault::Close);
    let reply = fleet.post(CHAT_PATH, CHAT).await;
    assert_eq!((reply.status, reply.code().as_str()), (502, "engine_failed"));
    until("the decode engine is told", || fleet.decode().left() == fleet.decode().seen().len()).await;
    fleet.gateway.settles().await;
    let (fleet, _) = sglang_fleet(1, 1, 0).await;
    let reply = fleet.post(COMPLETIONS, &PROMPT.replace("hi", "refuse me")).await;
    assert_eq!(reply.status, 400, "{}", reply.text());
    assert!(reply.text().contains("the prompt is too long"), "{}", reply.text());
    fleet.gateway.settles().await;
}

#[tokio::test]
async fn a_hang_up_cancels_both_engines_of_sglang() {
    let (fleet, _) = sglang_fleet(1, 1, 0).await;
    fleet.decode().fault(Fault::Hang);
    hang_up(&fleet, 1, 1).await;
}
