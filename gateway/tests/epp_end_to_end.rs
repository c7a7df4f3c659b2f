//! The endpoint picker's program with its daemon and simulated engines: alone, with a client that plays Envoy, and
//! behind a real Envoy.
//!
//! They use the real `kvrouted` program, and are skipped with a message if it is not built.

mod kit;
#[path = "epp/kit.rs"]
mod player;
#[path = "envoy/process.rs"]
#[allow(dead_code, clippy::print_stderr, reason = "shared with another test")]
mod process;

use std::net::SocketAddr;

use kit::{Caller, Figures, Gateway, chat, kvrouted_or_skip, ports};
use kvrouted::ids::Worker;
use kvrouted_gateway::demo::SimulatedEngines;
use kvrouted_gateway::epp::messages::{ProcessingRequest, Value};
use player::*;
use process::{Envoy, Recipe, binary_or_skip};
use serde_json::json;
use tokio::net::TcpStream;

struct Fixture {
    engines: SimulatedEngines,
    addresses: Vec<SocketAddr>,
    picker: SocketAddr,
    figures: Figures,
    _gateway: Gateway,
}

/// This many engines and a picker; `None` = the daemon is not built.
async fn start(what: &str, engines: usize, flags: &'static [&'static str]) -> Option<Fixture> {
    let kvrouted = kvrouted_or_skip(what)?;
    let engines = SimulatedEngines::start(&kvrouted, engines).await.expect("engines");
    let urls = engines.urls();
    let starting = tokio::task::spawn_blocking(move || {
        let mut gateway = Gateway::start_picker(&kvrouted, &urls, flags);
        let (_, socket) = gateway.daemon();
        (gateway, socket)
    });
    let (gateway, socket) = starting.await.expect("a picker");
    let picker = gateway.url().parse().expect("an address");
    let figures = Figures::of(&socket, "demo");
    let addresses: Vec<_> = engines.urls().iter().map(|url| address(url.trim_start_matches("http://"))).collect();
    // Until an engine has published something, nothing is known of it.
    for face in &engines.faces {
        let answer = Caller::of(&face.url()).chat(&[user("A first prompt that fills more than a block.")]).await;
        assert_eq!(answer.status, 200, "{:?}", answer.body);
    }
    figures.until_exact(addresses.len()).await;
    Some(Fixture { engines, addresses, picker, figures, _gateway: gateway })
}

fn user(text: &str) -> serde_json::Value {
    json!({"role": "user", "content": text})
}

/// A prompt of several blocks, which differs by its first byte.
fn system(name: char) -> serde_json::Value {
    let text = format!("{name}: {}", "You answer briefly, in plain words, and you never guess. ".repeat(6));
    json!({"role": "system", "content": text})
}

const POST: [(&str, &str); 2] = [(":method", "POST"), (":path", "/v1/chat/completions")];

impl Fixture {
    async fn stream(&self) -> Stream {
        let stream = TcpStream::connect(self.picker).await.expect("the picker accepts");
        Connection::over(stream).await.stream().await
    }

    /// Sends a chat as Envoy does, and returns the list.
    async fn asks(&self, stream: &mut Stream, opening: ProcessingRequest, body: &serde_json::Value) -> Vec<SocketAddr> {
        stream.send(opening).await;
        stream.send(request_body(body.to_string(), true)).await;
        let list = stream.chosen().await;
        let (back, ..) = stream.request_body().await;
        assert_eq!(back, body.to_string().as_bytes(), "the body has changed");
        list.split(',').map(address).collect()
    }

    /// The number of requests under way at each engine, in the order of the engines.
    async fn running(&self) -> Vec<u64> {
        let by_worker = self.figures.in_flight().await.expect("the daemon answers");
        let of = |place: usize| by_worker.iter().find(|(worker, _)| *worker == Worker::new(place as u64 + 1, 0));
        (0..self.addresses.len()).map(|place| of(place).map_or(0, |(_, requests)| *requests)).collect()
    }

    async fn is_running(&self, wanted: &[u64]) {
        kit::until(&format!("{wanted:?} requests under way"), async || self.running().await == wanted).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_goes_where_its_prefix_is_and_its_booking_follows_what_envoy_says() {
    let Some(fixture) = start("the endpoint picker and its daemon", 2, &["--plaintext"]).await else { return };
    for (place, face) in fixture.engines.faces.iter().enumerate() {
        let name = ['a', 'b'][place];
        let answer = Caller::of(&face.url()).chat(&[system(name), user("Hello.")]).await;
        assert_eq!(answer.status, 200, "{:?}", answer.body);
        // The engine's events may come a little later than its answer.
        kit::until("the prefix is known", async || {
            let mut stream = fixture.stream().await;
            let body = chat(&[system(name), user("Who are you?")], false);
            let list = fixture.asks(&mut stream, opening(&POST, false), &body).await;
            list[0] == fixture.addresses[place] && list.len() == 2
        })
        .await;
    }
    fixture.is_running(&[0, 0]).await;
    // The booking of a request under way moves to the engine that served, and ends with the response.
    let mut stream = fixture.stream().await;
    let list = fixture.asks(&mut stream, opening(&POST, false), &chat(&[system('a'), user("Go.")], true)).await;
    assert_eq!(list, fixture.addresses);
    fixture.is_running(&[1, 0]).await;
    let served = fixture.addresses[1].to_string();
    let headers = response_headers(&[(":status", "200"), ("content-type", "text/event-stream")], false);
    let key = "x-gateway-destination-endpoint-served";
    stream.send(with_metadata(headers, "envoy.lb", key, Value::text(served))).await;
    stream.answer().await;
    fixture.is_running(&[0, 1]).await;
    stream.send(response_body("data: [DONE]\n\n", true)).await;
    stream.answer().await;
    fixture.is_running(&[0, 0]).await;
    // A caller who leaves.
    let mut stream = fixture.stream().await;
    fixture.asks(&mut stream, opening(&POST, false), &chat(&[system('b'), user("Go.")], true)).await;
    fixture.is_running(&[0, 1]).await;
    drop(stream);
    fixture.is_running(&[0, 0]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_picker_works_inside_its_sandbox() {
    let flags = &["--plaintext", "--sandbox", "on"];
    let Some(fixture) = start("the endpoint picker in its sandbox", 2, flags).await else { return };
    let mut stream = fixture.stream().await;
    let list = fixture.asks(&mut stream, opening(&POST, false), &chat(&[system('a'), user("Go.")], true)).await;
    assert_eq!(list.len(), 2);
    drop(stream);
    fixture.is_running(&[0, 0]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subsets_are_strict_and_what_cannot_be_routed_is_refused() {
    let Some(fixture) = start("subsets and refusals of the endpoint picker", 2, &["--plaintext"]).await else { return };
    let key = "x-gateway-destination-endpoint-subset";
    let hint = |message, value| with_metadata(message, "envoy.lb.subset_hint", key, value);
    for allowed in &fixture.addresses {
        for name in ['a', 'b', 'c', 'd'] {
            let mut stream = fixture.stream().await;
            let opening = hint(opening(&POST, false), Value::texts(&[&allowed.to_string(), "10.0.0.1:1"]));
            let list = fixture.asks(&mut stream, opening, &chat(&[system(name)], false)).await;
            assert_eq!(list, [*allowed]);
        }
        let mut stream = fixture.stream().await;
        let models = [(":method", "GET"), (":path", "/v1/models")];
        stream.send(hint(opening(&models, true), Value::text(allowed.to_string()))).await;
        assert_eq!(stream.chosen().await, allowed.to_string());
    }
    let mut nowhere = fixture.stream().await;
    nowhere.send(hint(opening(&POST, false), Value::texts(&[]))).await;
    nowhere.send(request_body(chat(&[system('a')], false).to_string(), true)).await;
    assert_eq!(nowhere.refusal().await.status, 503);
    for (body, status) in [(r#"{"model": "nobody", "messages": []}"#, 404), ("{", 400), ("[]", 400)] {
        let mut stream = fixture.stream().await;
        stream.send(opening(&POST, false)).await;
        stream.send(request_body(body, true)).await;
        assert_eq!(stream.refusal().await.status, status, "{body}");
    }
    fixture.is_running(&[0, 0]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_endpoint_is_one_endpoint() {
    let flags = &["--plaintext", "--one-endpoint"];
    let Some(fixture) = start("the endpoint picker's option for one endpoint", 2, flags).await else { return };
    let mut stream = fixture.stream().await;
    let list = fixture.asks(&mut stream, opening(&POST, false), &chat(&[system('a')], false)).await;
    assert_eq!(list.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conversations_through_a_real_envoy_keep_to_their_engines() {
    for version in ["1.36.4", "1.40.0"] {
        let Some(binary) = binary_or_skip(version, "the picker's program") else { continue };
        let Some(fixture) = start("the endpoint picker behind Envoy", 3, &[]).await else { return };
        let envoy = Envoy::start(&binary, version, Recipe::Pool, fixture.picker, &fixture.addresses).await;
        let caller = Caller::of(&format!("http://{}", envoy.callers));
        for name in ['a', 'b', 'c', 'd', 'e', 'f'] {
            let mut messages = vec![system(name), user("What is a prefix?")];
            for turn in 0..4 {
                let answer = match turn % 2 {
                    0 => caller.chat(&messages).await,
                    _ => caller.stream(&messages).await,
                };
                assert!(answer.status == 200 && answer.is_done, "turn {turn} of {name}: {:?}", answer.body);
                let (prompt, cached) = (answer.prompt_tokens().expect("usage"), answer.cached_tokens().expect("usage"));
                let is_warm = cached * 2 > prompt;
                assert!(turn == 0 || is_warm, "turn {turn} of {name}: {cached} of {prompt} tokens were cached");
                let told = |header: &str| answer.headers.get(header).and_then(|value| value.to_str().ok());
                assert!(told("x-kvrouted-worker").is_some_and(|worker| worker.ends_with("/0")), "{:?}", answer.headers);
                let foreseen: u64 = told("x-kvrouted-overlap-tokens").expect("a prediction").parse().expect("tokens");
                assert!(turn == 0 || foreseen > 0, "turn {turn} of {name}: nothing was foreseen");
                messages.push(json!({"role": "assistant", "content": answer.text}));
                messages.push(user("Go on."));
            }
        }
        let unknown = caller.post("/v1/chat/completions", &json!({"model": "nobody", "messages": []})).await;
        assert_eq!((unknown.status, unknown.body["error"]["code"].as_str()), (404, Some("model_not_found")));
        fixture.is_running(&[0, 0, 0]).await;
        // An engine dies under load: no request is lost, whether it runs there or comes later.
        let under_load: Vec<_> = ('a'..='l')
            .map(|name| {
                let caller = Caller::of(&format!("http://{}", envoy.callers));
                let prompt = [system(name), user(&"Go on and on. ".repeat(400))];
                tokio::spawn(async move { caller.chat(&prompt).await })
            })
            .collect();
        kit::until("a request runs at the engine that dies", async || fixture.running().await[0] > 0).await;
        fixture.engines.faces[0].kill();
        for running in under_load {
            let answer = running.await.expect("an answer");
            assert_eq!(answer.status, 200, "{:?}", answer.body);
        }
        for name in ['a', 'b', 'c', 'd', 'e', 'f'] {
            let answer = caller.chat(&[system(name), user("Are you there?")]).await;
            assert_eq!(answer.status, 200, "{name}: {:?}", answer.body);
        }
        fixture.is_running(&[0, 0, 0]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_may_not_steer_a_transfer_where_engines_have_roles() {
    let Some(kvrouted) = kvrouted_or_skip("roles and the endpoint picker") else { return };
    let engines = SimulatedEngines::start(&kvrouted, 1).await.expect("engines");
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("gateway.toml");
    std::fs::write(&file, format!("[[engine]]\nurl = {:?}\nrole = \"decode\"\n", engines.urls()[0])).expect("a file");
    let starting = tokio::task::spawn_blocking(move || {
        let file = file.display().to_string();
        let mut gateway = Gateway::start_picker(&kvrouted, &[], &["--plaintext", "--config", &file]);
        let _ = gateway.daemon();
        gateway
    });
    let gateway = starting.await.expect("a picker");
    let ask = async |body: serde_json::Value| {
        let stream = TcpStream::connect(gateway.url()).await.expect("the picker accepts");
        let stream = Connection::over(stream).await.stream().await;
        stream.send(opening(&POST, false)).await;
        stream.send(request_body(body.to_string(), true)).await;
        stream
    };
    let mut body = chat(&[user("Go.")], false);
    assert_eq!(ask(body.clone()).await.chosen().await, engines.urls()[0].trim_start_matches("http://"));
    body["kv_transfer_params"] = json!({"do_remote_prefill": true, "remote_host": "10.0.0.1"});
    let refusal = ask(body).await.refusal().await;
    assert_eq!((refusal.status, refusal.code.as_str()), (400, "transfer_field_refused"));
}
