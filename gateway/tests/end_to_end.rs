//! Callers, the gateway, its daemon and simulated engines, each as a process of its own.
//!
//! They use the real `kvrouted` program, and are skipped with a message if it is not built.

mod kit;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use kit::{Caller, Figures, Gateway, chat, compare_metrics, frozen_metrics, is_alive, kvrouted_or_skip, signal, until};
use kvrouted_gateway::demo::SimulatedEngines;
use rustix::process::Signal;
use serde_json::{Value, json};

/// A system prompt of several blocks, which differs by its first byte.
fn system(name: char) -> Value {
    let text = format!("{name}: {}", "You answer briefly, in plain words, and you never guess. ".repeat(6));
    json!({"role": "system", "content": text})
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

struct Fixture {
    engines: SimulatedEngines,
    gateway: Gateway,
    caller: Caller,
    figures: Figures,
    daemon: u32,
}

impl Fixture {
    /// The tokens of a chat, without the beginning of a reply.
    async fn tokens(&self, messages: &[Value]) -> Vec<u32> {
        let body = json!({"messages": messages, "add_generation_prompt": false});
        let answer = Caller::of(&self.engines.faces[0].url()).post("/tokenize", &body).await;
        serde_json::from_value(answer.body["tokens"].clone()).expect("tokens")
    }
}

/// This many engines behind a gateway; `None` = the daemon is not built.
async fn start(what: &str, engines: usize) -> Option<Fixture> {
    start_with(what, engines, &[]).await
}

/// The same with more flags of the gateway.
async fn start_with(what: &str, engines: usize, flags: &'static [&'static str]) -> Option<Fixture> {
    let kvrouted: PathBuf = kvrouted_or_skip(what)?;
    let engines = SimulatedEngines::start(&kvrouted, engines).await.expect("engines");
    let urls = engines.urls();
    let starting = tokio::task::spawn_blocking(move || {
        // Costs of this mode do not depend on the time that simulated engines and a busy machine take.
        let mut gateway = Gateway::start_with(&kvrouted, "daemon.mode = \"kv\"\n", &urls, flags);
        let daemon = gateway.daemon();
        (gateway, daemon)
    });
    let (gateway, (daemon, socket)) = starting.await.expect("a gateway");
    let (caller, figures) = (Caller::of(gateway.url()), Figures::of(&socket, "demo"));
    Some(Fixture { engines, gateway, caller, figures, daemon })
}

/// As [`start`], after one request to each engine: until an engine has published something, nothing is known of it.
async fn start_exact(what: &str, engines: usize) -> Option<Fixture> {
    let fixture = start(what, engines).await?;
    for face in &fixture.engines.faces {
        let answer = Caller::of(&face.url()).chat(&[user("A first prompt that fills more than a block.")]).await;
        assert_eq!(answer.status, 200, "{:?}", answer.body);
    }
    fixture.figures.until_exact(engines).await;
    Some(fixture)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conversations_follow_their_prefix_and_cached_tokens_come_out_as_predicted() {
    let Some(fixture) = start_exact("conversations through the gateway", 2).await else { return };
    let mut engines = Vec::new();
    for name in ['a', 'b', 'c', 'd'] {
        let mut messages = vec![system(name), user("What is a prefix?")];
        let mut served = BTreeSet::new();
        for turn in 0..4 {
            let answer = match turn % 2 {
                0 => fixture.caller.chat(&messages).await,
                _ => fixture.caller.stream(&messages).await,
            };
            assert!(answer.status == 200 && answer.is_done, "{:?}", answer.body);
            served.extend(answer.engine());
            let (prompt, cached) = (answer.prompt_tokens().expect("usage"), answer.cached_tokens().expect("usage"));
            let predicted = answer.number("x-kvrouted-overlap-tokens").expect("a prediction");
            // An engine computes the last token of each prompt.
            assert_eq!(predicted.min((prompt - 1) / 16 * 16), cached, "turn {turn} of {name}");
            if turn > 0 {
                assert!(cached * 2 > prompt, "turn {turn} of {name}: {cached} of {prompt} tokens were cached");
            }
            messages.push(json!({"role": "assistant", "content": answer.text}));
            // One at a time: the next request waits until the daemon knows what this one stored. An engine does not
            // compute the last token of its output.
            let completion = answer.completion_tokens().expect("usage");
            let held = u32::try_from((prompt + completion - 1) / 16).expect("a short chat");
            fixture.figures.until_held(&fixture.tokens(&messages).await, held).await;
            messages.push(user("Go on."));
        }
        assert_eq!(served.len(), 1, "a conversation stays on its engine");
        engines.extend(served);
    }
    // A new user of a known system prompt goes where that prompt is.
    for (name, engine) in ['a', 'b', 'c', 'd'].into_iter().zip(&engines) {
        let answer = fixture.caller.chat(&[system(name), user("Who are you?")]).await;
        assert_eq!(answer.engine(), Some(*engine), "the engine of the system prompt {name}");
        assert!(answer.cached_tokens() > Some(256), "{:?}", answer.body);
    }
    fixture.figures.until_bookings(0).await;
    let admin = Caller::of(fixture.gateway.admin());
    let told: Value = serde_json::from_str(&admin.text("/findings").await).expect("JSON");
    for finding in told["findings"].as_array().expect("a list") {
        assert!(finding.to_string().contains("replay_endpoint"), "all that the engines lack: {finding}");
    }
    let unknown = fixture.caller.post("/v1/completions", &json!({"model": "unknown", "prompt": "a"})).await;
    assert_eq!(unknown.status, 404, "so that a refusal is counted");
    let metrics = compare_metrics(&admin.text("/metrics").await);
    // Those of pods, of local tokenizers and of the picker are there where they are; other tests look for them.
    let is_optional =
        |name: &String| ["kubernetes_", "local_", "epp_"].iter().any(|part| name.contains(&format!("gateway_{part}")));
    for name in frozen_metrics().into_keys() {
        assert!(is_optional(&name) || metrics.contains(&name), "the frozen list has {name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_through_the_gateway_is_the_engines_own() {
    let Some(fixture) = start("answers through the gateway", 1).await else { return };
    let messages = [system('x'), user("Say something.")];
    let direct = Caller::of(&fixture.engines.faces[0].url()).chat(&messages).await;
    let whole = fixture.caller.chat(&messages).await;
    let streamed = fixture.caller.stream(&messages).await;
    assert_eq!((&whole.text, &streamed.text), (&direct.text, &direct.text));
    let completion = fixture.caller.post("/v1/completions", &json!({"prompt": [1, 2, 3], "max_tokens": 5})).await;
    assert_eq!((completion.status, completion.text.len()), (200, 5), "tokens, and no model named");
    let unknown = fixture.caller.post("/v1/completions", &json!({"model": "nobody", "prompt": "a"})).await;
    assert_eq!((unknown.status, unknown.body["error"]["code"].as_str()), (404, Some("model_not_found")));
    fixture.figures.until_bookings(0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bookings_end_when_callers_hang_up() {
    let Some(fixture) = start("callers that hang up", 2).await else { return };
    for number in 0..20 {
        let body = chat(&[system('h'), user(&format!("Number {number}"))], number % 2 == 0);
        let sending = fixture.caller.send("/v1/chat/completions", &body, &[]);
        // Some hang up before the headers, some after.
        match tokio::time::timeout(Duration::from_millis(number), sending).await {
            Ok(response) => drop(response),
            Err(_elapsed) => {}
        }
    }
    fixture.figures.until_bookings(0).await;
    assert_eq!(fixture.caller.chat(&[user("Still there?")]).await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engines_death_costs_no_later_request_and_leaves_no_booking() {
    let Some(fixture) = start("an engine that dies", 2).await else { return };
    let mut running = tokio::task::JoinSet::new();
    for number in 0..12 {
        let caller = fixture.caller.clone();
        let messages = [system('k'), user(&format!("Number {number}, at some length, so that it takes a while."))];
        running.spawn(
            async move { caller.try_post("/v1/chat/completions", &chat(&messages, number % 2 == 0), &[]).await },
        );
    }
    tokio::time::sleep(Duration::from_millis(10)).await;
    fixture.engines.faces[0].kill();
    // Requests that had begun may break off; none hangs.
    while let Some(ended) = running.join_next().await {
        if let Ok(Ok(answer)) = ended {
            assert!([200, 502, 503].contains(&answer.status), "{:?}", answer.body);
        }
    }
    for number in 0..10 {
        let answer = fixture.caller.chat(&[system('k'), user(&format!("After it, number {number}"))]).await;
        assert_eq!((answer.status, answer.engine()), (200, Some(2)), "{:?}", answer.body);
    }
    fixture.figures.until_bookings(0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_its_daemon_the_gateway_answers_and_starts_it_again() {
    let Some(mut fixture) = start("a daemon that dies", 2).await else { return };
    assert_eq!(fixture.caller.chat(&[user("Before.")]).await.status, 200);
    signal(fixture.daemon, Signal::KILL);
    for number in 0..20 {
        let answer = fixture.caller.chat(&[user(&format!("Meanwhile, number {number}"))]).await;
        assert_eq!(answer.status, 200, "{:?}", answer.body);
    }
    let before = fixture.daemon;
    let socket = tokio::task::spawn_blocking(move || {
        loop {
            let (pid, socket) = fixture.gateway.daemon();
            if pid != before {
                return (fixture, socket);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    let (fixture, socket) = socket.await.expect("a new daemon");
    let figures = Figures::of(&socket, "demo");
    assert_eq!(fixture.caller.chat(&[user("After.")]).await.status, 200);
    figures.until_bookings(0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_restarts_with_other_endpoints_is_exact_again() {
    let Some(mut fixture) = start_exact("an engine that restarts", 2).await else { return };
    fixture.engines.restart(0).await.expect("the engine starts again");
    let first = Caller::of(&fixture.engines.faces[0].url());
    // The engine answers once the daemon has subscribed to it where it publishes now.
    until("the new engine answers", async || first.chat(&[user("Is anybody there?")]).await.status == 200).await;
    fixture.figures.until_exact(2).await;
    for number in 0..6 {
        let answer = fixture.caller.chat(&[system('r'), user(&format!("Number {number}"))]).await;
        assert_eq!(answer.status, 200, "{:?}", answer.body);
    }
    fixture.figures.until_bookings(0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_daemon_ends_with_the_gateway_however_that_ends() {
    for is_killed in [false, true] {
        let Some(mut fixture) = start("the end of a gateway", 1).await else { return };
        assert!(is_alive(fixture.daemon));
        let daemon = fixture.daemon;
        let ending = tokio::task::spawn_blocking(move || match is_killed {
            true => {
                fixture.gateway.kill();
                None
            }
            false => fixture.gateway.end(),
        });
        let code = ending.await.expect("its end");
        assert_eq!(code, (!is_killed).then_some(0));
        until("the daemon has ended", async || !is_alive(daemon)).await;
    }
}

/// A figure of the gateway's sandbox.
async fn sandbox_figure(gateway: &Gateway, name: &str) -> Option<u64> {
    let text = Caller::of(gateway.admin()).text("/metrics").await;
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("kvrouted_gateway_sandbox{name} ")))?;
    line.parse().ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_gateway_and_its_daemon_work_inside_their_sandboxes() {
    let what = "a gateway in its sandbox";
    let Some(fixture) = start_with(what, 1, &["--sandbox", "on"]).await else { return };
    for part in ["filters", "landlock", "capabilities_dropped", "no_new_privileges"] {
        if sandbox_figure(&fixture.gateway, &format!("{{part=\"{part}\"}}")).await == Some(0) {
            return kit::skipped(what, &format!("this kernel lacks {part}"));
        }
    }
    drop(fixture);
    let Some(mut fixture) = start_with(what, 2, &["--sandbox", "required"]).await else { return };
    for number in 0..6 {
        let messages = [system('s'), user(&format!("Number {number}"))];
        let answer = match number % 2 {
            0 => fixture.caller.chat(&messages).await,
            _ => fixture.caller.stream(&messages).await,
        };
        assert!(answer.status == 200 && answer.is_done, "{:?}", answer.body);
    }
    fixture.figures.until_bookings(0).await;
    // The daemon is confined by the gateway's list for programs and by its own, and is started again from there.
    for pid in [fixture.gateway.pid(), fixture.daemon] {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
        assert!(status.contains("NoNewPrivs:\t1") && status.contains("Seccomp:\t2"), "{status}");
        assert!(status.contains("CapEff:\t0000000000000000"), "{status}");
    }
    signal(fixture.daemon, Signal::KILL);
    let before = fixture.daemon;
    let again = tokio::task::spawn_blocking(move || {
        while fixture.gateway.daemon().0 == before {
            std::thread::sleep(Duration::from_millis(20));
        }
        fixture
    });
    let fixture = again.await.expect("a new daemon");
    signal(fixture.gateway.pid(), Signal::HUP);
    assert_eq!(fixture.caller.chat(&[user("After.")]).await.status, 200);
    assert_eq!(sandbox_figure(&fixture.gateway, "_refused_total").await, Some(0));
    let Fixture { mut gateway, .. } = fixture;
    let code = tokio::task::spawn_blocking(move || gateway.end()).await.expect("its end");
    assert_eq!(code, Some(0));
}
