//! Requests on two real vLLM servers with the NIXL connector, through the real gateway and daemon: each answer is the one
//! that an engine gives alone, its blocks came over NIXL, and what the prefill engine had cached is what was predicted.
//!
//! Both servers need one model with the same weights, `--kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role":
//! "kv_both"}'` (on a processor also `"kv_buffer_device": "cpu"`), a `VLLM_NIXL_SIDE_CHANNEL_PORT` each, events, and
//! `--enable-prompt-tokens-details`.
//!
//! `KVROUTED_NIXL_URLS=http://127.0.0.1:8101,http://127.0.0.1:8102 cargo test --test real_nixl -- --ignored`

mod kit;

use std::io::Write as _;
use std::path::PathBuf;

use http_body_util::BodyExt as _;
use hyper::Request;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use kit::{Caller, Gateway, kvrouted, until};
use serde_json::{Value, json};

/// How many times every kind of request is sent, each time with other text.
const TURNS: usize = 2;

/// The sum of a metric of an engine over its labels.
async fn metric(url: &str, name: &str) -> f64 {
    let client = Client::builder(TokioExecutor::new()).build_http::<http_body_util::Empty<bytes::Bytes>>();
    let request = Request::get(format!("{url}/metrics")).body(http_body_util::Empty::new()).expect("a request");
    let body = client.request(request).await.expect("metrics").into_body().collect().await.expect("a body").to_bytes();
    let text = String::from_utf8_lossy(&body).into_owned();
    let lines = text.lines().filter(|line| line.starts_with(name) && !line.starts_with('#'));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

fn bodies(turn: usize) -> Vec<(&'static str, Value)> {
    let long = format!("Turn {turn}. {}", "A prefix that many requests share is computed only once. ".repeat(20));
    let chat = |fields: Value| {
        let messages = json!([{"role": "system", "content": long}, {"role": "user", "content": "Go on."}]);
        let mut body = json!({"model": "m", "messages": messages, "max_completion_tokens": 9, "temperature": 0});
        body.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
        ("/v1/chat/completions", body)
    };
    let completion = |fields: Value| {
        let mut body = json!({"model": "m", "prompt": long, "max_tokens": 9, "temperature": 0});
        body.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
        ("/v1/completions", body)
    };
    let streamed = json!({"stream": true, "stream_options": {"include_usage": true}});
    let text = json!([{"role": "user", "content": long}]);
    vec![
        chat(json!({})),
        chat(streamed.clone()),
        chat(json!({"min_tokens": 4, "logprobs": true, "top_logprobs": 2, "seed": 7, "stop": ["zzzz"]})),
        chat(json!({"response_format": {"type": "json_object"}})),
        completion(json!({})),
        completion(streamed),
        completion(json!({"prompt": format!("Short {turn}.")})),
        completion(json!({"prompt": [5, 6, 7, 8, 9, 10 + turn]})),
        completion(json!({"echo": true, "logprobs": 1})),
        ("/v1/messages", json!({"model": "m", "messages": text, "max_tokens": 9, "temperature": 0})),
    ]
}

/// What a reply says, without what differs from request to request.
fn said(body: &Value) -> Value {
    let choice = &body["choices"][0];
    json!([choice["message"]["content"], choice["text"], choice["logprobs"], body["content"][0]["text"]])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs two vLLM servers with the NIXL connector, named by KVROUTED_NIXL_URLS"]
async fn two_real_engines_answer_as_one_does() {
    let urls = std::env::var("KVROUTED_NIXL_URLS").expect("KVROUTED_NIXL_URLS names two vLLM servers");
    let (prefill, decode) = urls.split_once(',').expect("two URLs");
    let kvrouted: PathBuf = kvrouted().expect("the daemon's program");
    let tables = format!(
        "[[engine]]\nurl = \"{prefill}\"\nrole = \"prefill\"\n[[engine]]\nurl = \"{decode}\"\nrole = \"decode\"\n"
    );
    let starting = tokio::task::spawn_blocking(move || {
        let mut gateway = Gateway::start_with(&kvrouted, &tables, &[], &[]);
        let _ = gateway.daemon();
        gateway
    });
    let gateway = starting.await.expect("a gateway");
    let (caller, alone) = (Caller::of(gateway.url()), Caller::of(decode));
    let transfers = metric(decode, "vllm:nixl_xfer_time_seconds_count").await;
    let (mut split, mut as_predicted) = (0, 0);
    for turn in 0..TURNS {
        for (path, body) in bodies(turn) {
            let pair = caller.post(path, &body).await;
            assert_eq!((pair.status, pair.engine()), (200, Some(2)), "{path} {body}: {:?}", pair.body);
            let one = alone.post(path, &body).await;
            assert_eq!((said(&pair.body), &pair.text), (said(&one.body), &one.text), "{path} {body}");
            split += 1;
            // The engine computes the last token of each prompt. Events may come later than the next prompt.
            let whole = pair.prompt_tokens().map_or(0, |tokens| (tokens.max(1) - 1) / 32 * 32);
            let predicted = pair.number("x-kvrouted-overlap-tokens").map(|tokens| tokens.min(whole));
            as_predicted += usize::from(pair.cached_tokens().is_none() || pair.cached_tokens() == predicted);
        }
    }
    let moved = metric(decode, "vllm:nixl_xfer_time_seconds_count").await - transfers;
    assert!(moved > 0.0, "blocks came over NIXL");
    for name in ["failed_transfers", "failed_notifications"] {
        for url in [prefill, decode] {
            assert_eq!(metric(url, &format!("vllm:nixl_num_{name}_total")).await, 0.0, "{name} of {url}");
        }
    }
    let figures =
        format!("\n{split} requests, {moved} transfers over NIXL, {as_predicted} with the predicted cache hits\n");
    std::io::stderr().lock().write_all(figures.as_bytes()).expect("said");

    // A caller who leaves frees both engines.
    let (_, mut endless) = bodies(99).remove(1);
    endless["max_completion_tokens"] = json!(2000);
    endless["ignore_eos"] = json!(true);
    let response = caller.send("/v1/chat/completions", &endless, &[]).await.expect("a reply");
    drop(response);
    until("both engines are idle", async || {
        metric(prefill, "vllm:num_requests_running").await + metric(decode, "vllm:num_requests_running").await == 0.0
    })
    .await;
}
