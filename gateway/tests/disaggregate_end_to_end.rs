//! Requests on two engines with the real gateway and the real daemon, as processes: roles from a file, two bookings for
//! each request, and the way without the daemon. The engines are doubles, which publish no events.
//!
//! The tests use the real `kvrouted` program, and are skipped with a message if it is not built.

mod disaggregate_support;
mod kit;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use disaggregate_support::{Double, Fault, sglang, vllm};
use kit::{Caller, Gateway, kvrouted_or_skip, signal, until};
use kvrouted::client::{AsyncClient, PoolRole, Prompt, RouteRequest, SteadyOptions};
use rustix::process::Signal;
use serde_json::{Value, json};

struct Fixture {
    _gateway: Gateway,
    caller: Caller,
    daemon: u32,
    client: AsyncClient,
}

/// A gateway for these engines: the role and further fields of each.
async fn start(kvrouted: &Path, engines: &[(&Double, &str)]) -> Fixture {
    let table = |(engine, fields): &(&Double, &str)| format!("[[engine]]\nurl = \"{}\"\n{fields}\n", engine.url());
    let tables: String = engines.iter().map(table).collect();
    let kvrouted = kvrouted.to_owned();
    let starting = tokio::task::spawn_blocking(move || {
        let mut gateway = Gateway::start_with(&kvrouted, &tables, &[], &[]);
        let daemon = gateway.daemon();
        (gateway, daemon)
    });
    let (gateway, (daemon, socket)): (_, (u32, PathBuf)) = starting.await.expect("a gateway");
    let options = SteadyOptions { name: "test".into(), fallback: false, ..SteadyOptions::default() };
    let (caller, client) = (Caller::of(gateway.url()), AsyncClient::new(&socket, options));
    Fixture { _gateway: gateway, caller, daemon, client }
}

impl Fixture {
    /// Requests that are booked on the engines of a role.
    async fn booked(&self, role: PoolRole) -> Option<u64> {
        self.client.connected().await.ok()?;
        let space = self.client.space("m", None, Some(role)).ok()?;
        let loads = self.client.potential_loads(&RouteRequest::new(space.id, Prompt::of_tokens(&[]))).await.ok()?;
        Some(loads.workers.iter().map(|load| load.active_requests).sum())
    }

    async fn until_booked(&self, prefill: u64, decode: u64) {
        until(&format!("{prefill} and {decode} bookings"), async || {
            let booked = (self.booked(PoolRole::Prefill).await, self.booked(PoolRole::Decode).await);
            booked == (Some(prefill), Some(decode))
        })
        .await;
    }
}

/// A completion of 40 tokens, which need no tokeniser.
fn completion(stream: bool) -> Value {
    let tokens: Vec<u32> = (0..40).collect();
    json!({"model": "m", "prompt": tokens, "max_tokens": 4, "stream": stream})
}

fn header<'a>(answer: &'a kit::Answer, name: &str) -> Option<&'a str> {
    answer.headers.get(name)?.to_str().ok()
}

const PATH: &str = "/v1/completions";
const PREFILL: &str = "role = \"prefill\"\nblock_size = 16";
const DECODE: &str = "role = \"decode\"\nblock_size = 16";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_halves_of_vllm_are_booked_and_freed_however_they_end() {
    let Some(kvrouted) = kvrouted_or_skip("two engines of vLLM through the gateway") else { return };
    let kept: Arc<vllm::Kept> = Arc::default();
    let [prefill, spare, decode] =
        [vllm::engine(&kept, true).await, vllm::engine(&kept, true).await, vllm::engine(&kept, true).await];
    let fixture = start(&kvrouted, &[(&prefill, PREFILL), (&spare, PREFILL), (&decode, DECODE)]).await;
    for stream in [false, true] {
        let answer = fixture.caller.post(PATH, &completion(stream)).await;
        assert_eq!((answer.status, answer.engine()), (200, Some(3)), "{:?}", answer.body);
        assert_eq!(answer.text.replace(' ', ""), "aprefixiscomputed");
        assert!(header(&answer, "x-kvrouted-prefill-worker").is_some_and(|worker| ["1/0", "2/0"].contains(&worker)));
        assert_eq!(answer.number("x-kvrouted-overlap-tokens"), Some(0), "what the prefill engine should have");
    }
    fixture.until_booked(0, 0).await;

    // While the prompt is computed both halves are booked; a caller who leaves frees both.
    for (engines, left) in [([&prefill, &spare], 1), ([&decode, &decode], 0)] {
        engines.iter().for_each(|engine| engine.fault(Fault::Hang));
        let seen = decode.seen().len();
        let (caller, body) = (fixture.caller.clone(), completion(true));
        let asking = tokio::spawn(async move { caller.send(PATH, &body, &[]).await.map(drop) });
        if left == 0 {
            until("the decode engine has it", async || decode.seen().len() > seen).await;
        }
        fixture.until_booked(1, 1).await;
        asking.abort();
        fixture.until_booked(0, 0).await;
        engines.iter().for_each(|engine| engine.fault(Fault::None));
    }

    // A failure of the only decode engine frees both too, and the daemon hears of it.
    decode.fault(Fault::CloseAtTheEnd);
    let answer = fixture.caller.post(PATH, &completion(false)).await;
    assert_eq!((answer.status, &answer.body["error"]["code"]), (502, &json!("engine_failed")));
    fixture.until_booked(0, 0).await;
    assert_eq!(kept.wrong_reads(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_daemon_a_request_still_runs_on_two_engines() {
    let Some(kvrouted) = kvrouted_or_skip("two engines without a daemon") else { return };
    let kept: Arc<vllm::Kept> = Arc::default();
    let [prefill, decode] = [vllm::engine(&kept, true).await, vllm::engine(&kept, true).await];
    let fixture = start(&kvrouted, &[(&prefill, PREFILL), (&decode, DECODE)]).await;
    signal(fixture.daemon, Signal::STOP);
    let answer = fixture.caller.post(PATH, &completion(false)).await;
    signal(fixture.daemon, Signal::CONT);
    assert_eq!((answer.status, prefill.seen().len(), decode.seen().len()), (200, 1, 1), "{:?}", answer.body);
    assert_eq!((kept.reads(), kept.wrong_reads()), (1, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_for_whole_requests_take_over_and_give_back() {
    let Some(kvrouted) = kvrouted_or_skip("an engine for whole requests beside two") else { return };
    let kept: Arc<vllm::Kept> = Arc::default();
    let [prefill, decode, any] =
        [vllm::engine(&kept, true).await, vllm::engine(&kept, true).await, vllm::engine(&kept, true).await];
    let engines = [(&prefill, PREFILL), (&decode, DECODE), (&any, "block_size = 16")];
    let fixture = start(&kvrouted, &engines).await;
    let split = fixture.caller.post(PATH, &completion(false)).await;
    assert_eq!((split.status, split.engine()), (200, Some(2)));
    let two = json!({"model": "m", "prompt": [1, 2, 3], "n": 2});
    assert_eq!(fixture.caller.post(PATH, &two).await.engine(), Some(3), "two outputs");
    prefill.fault(Fault::Close);
    let whole = fixture.caller.post(PATH, &completion(false)).await;
    assert_eq!((whole.status, whole.engine()), (200, Some(3)), "{:?}", whole.body);
    prefill.fault(Fault::None);
    until("the prefill engine gets prompts again", async || {
        fixture.caller.post(PATH, &completion(false)).await.engine() == Some(2)
    })
    .await;
    fixture.until_booked(0, 0).await;
    assert_eq!(fixture.booked(PoolRole::Both).await, Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_halves_of_sglang_are_booked_and_freed_however_they_end() {
    let Some(kvrouted) = kvrouted_or_skip("two engines of SGLang through the gateway") else { return };
    let rooms = sglang::Rooms::new();
    let [prefill, decode] = [sglang::prefill(&rooms, 9000).await, sglang::decode(&rooms).await];
    let fixture = start(&kvrouted, &[(&prefill, "role = \"prefill\""), (&decode, "role = \"decode\"")]).await;
    for stream in [false, true] {
        let answer = fixture.caller.post(PATH, &completion(stream)).await;
        assert_eq!((answer.status, answer.engine()), (200, Some(2)), "{:?}", answer.body);
        assert_eq!(answer.text.replace(' ', ""), "aprefixiscomputed");
        assert_eq!(header(&answer, "x-kvrouted-prefill-worker"), Some("1/0"));
    }
    fixture.until_booked(0, 0).await;
    for hanging in [&prefill, &decode] {
        hanging.fault(Fault::Hang);
        let (left, caller, body) = ((prefill.left(), decode.left()), fixture.caller.clone(), completion(true));
        let asking = tokio::spawn(async move { caller.send(PATH, &body, &[]).await.map(drop) });
        fixture.until_booked(1, 1).await;
        until("both engines have it", async || rooms.entered() > 2).await;
        asking.abort();
        fixture.until_booked(0, 0).await;
        until("both engines are left", async || prefill.left() > left.0 && decode.left() > left.1).await;
        hanging.fault(Fault::None);
    }
    // The port of the file wins over what the engine says, and nobody is there.
    let wrong = "role = \"prefill\"\nbootstrap_port = 9";
    let fixture = start(&kvrouted, &[(&prefill, wrong), (&decode, "role = \"decode\"")]).await;
    let answer = fixture.caller.post(PATH, &completion(false)).await;
    assert!(answer.status == 400 || answer.status == 500, "the engines refuse it: {}", answer.status);
    // Whichever of the two refuses it first, the other one may never hear of it.
    let named = |engine: &Double| engine.seen().iter().any(|seen| seen.json()["bootstrap_port"] == 9);
    assert!(named(&prefill) || named(&decode));
    fixture.until_booked(0, 0).await;
}
