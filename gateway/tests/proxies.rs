//! nginx and HAProxy that ask the pick port, with the very files of `gateway/recipes`.
//!
//! `scripts/test` installs them. Without them these tests say so and check nothing.

#![allow(clippy::print_stderr, reason = "a test that checks nothing must say so")]

#[path = "proxies/bench.rs"]
mod bench;
#[path = "proxies/fleet.rs"]
mod fleet;
mod kit;
#[path = "proxies/process.rs"]
mod process;
mod proxy_support;

use std::time::Duration;

use bench::Bench;
use fleet::Fleet;
use hyper::StatusCode;
use kvrouted_gateway::api::ApiError;
use process::Kind;
use proxy_support::caller::{CHAT, CHAT_PATH, Reply, chat, get, post, streamed_chat};
use proxy_support::engine::{Behaviour, COMPLETION, EVENT, SSE_HEAD, USAGE_EVENT, chunk, json, stream};
use proxy_support::{ends, until};
use serde_json::{Value, json as value};
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;

const DONE: &str = "data: [DONE]\n\n";

/// Runs a check behind each proxy.
macro_rules! checks {
    ($($name:ident: $fixture:ident;)*) => {
        $(mod $name {
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn nginx() {
                if let Some(fixture) = super::$fixture::start(super::Kind::Nginx).await {
                    super::$name(fixture).await;
                }
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn haproxy() {
                if let Some(fixture) = super::$fixture::start(super::Kind::Haproxy).await {
                    super::$name(fixture).await;
                }
            }
        })*
    };
}

checks! {
    answers_and_bodies_pass_unchanged: Bench;
    a_stream_passes_event_by_event_and_a_hang_up_reaches_the_engine: Bench;
    the_next_engine_of_the_list_gets_what_the_first_cannot_take: Bench;
    refusals_reach_the_caller: Bench;
    callers_cannot_speak_for_the_proxy: Bench;
    hang_ups_leave_no_booking: Bench;
    without_the_gateway_engines_take_turns: Bench;
    conversations_stay_and_an_engines_death_costs_no_unbegun_answer: Fleet;
    a_gateway_that_returns_routes_again: Fleet;
}

/// A body of this many bytes.
fn sized(bytes: usize) -> String {
    let text = CHAT.replace("\"hi\"", &format!("\"{}\"", "x".repeat(bytes.saturating_sub(CHAT.len() - 2))));
    assert_eq!(text.len(), bytes);
    text
}

async fn answers_and_bodies_pass_unchanged(bench: Bench) {
    let events = [EVENT, EVENT, USAGE_EVENT, DONE];
    for order in [[1, 2, 3], [2, 3, 1], [3, 1, 2]] {
        bench.order(&order);
        let engine = bench.engine(order[0] as usize);
        let reply = bench.ask(&chat()).await;
        assert_eq!((reply.status, reply.text(), reply.is_whole), (200, COMPLETION, true));
        assert_eq!(reply.headers["content-type"], "application/json");
        engine.behave(Behaviour::Answer(stream(&events)));
        let reply = bench.ask(&streamed_chat()).await;
        assert_eq!((reply.status, reply.text(), reply.is_whole), (200, events.concat().as_str(), true));
        assert_eq!(reply.headers["content-type"], "text/event-stream; charset=utf-8");
        engine.behave(Behaviour::Answer(json(200, COMPLETION)));
        for bytes in [1_000, 17_000, 300_000, 1 << 20] {
            let body = sized(bytes);
            let reply = bench.ask(&post(CHAT_PATH, "", &body)).await;
            assert_eq!((reply.status, reply.text()), (200, COMPLETION), "{bytes} bytes");
            assert!(engine.seen().last().expect("a request").body == body.as_bytes(), "{bytes} bytes have changed");
            let head = format!(
                "POST {CHAT_PATH} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
            );
            let mut chunked = head.into_bytes();
            for part in body.as_bytes().chunks(50_001) {
                chunked.extend(chunk(std::str::from_utf8(part).expect("ASCII")));
            }
            chunked.extend_from_slice(b"0\r\n\r\n");
            let reply = bench.ask(&chunked).await;
            assert_eq!((reply.status, reply.text()), (200, COMPLETION), "{bytes} bytes, chunked");
            assert!(engine.seen().last().expect("a request").body == body.as_bytes(), "{bytes} bytes have changed");
        }
        assert_eq!(engine.seen().len(), 10, "all of them to engine {}", order[0]);
    }
    if bench.kind == Kind::Nginx {
        let body = sized(8_000_000);
        assert_eq!(bench.ask(&post(CHAT_PATH, "", &body)).await.status, 200);
        assert!(bench.engine(3).seen().last().expect("a request").body == body.as_bytes(), "the body has changed");
    }
    let models = bench.ask(&get("/v1/models")).await;
    assert!(models.status == 200 && models.text().contains("max_model_len"), "{models:?}");
    bench.settles().await;
    assert!(bench.gateway.choice.lines().iter().all(|line| line == "prefilled" || line == "freed"));
}

/// Reads until this text has come.
async fn read_until(stream: &mut TcpStream, text: &str) -> String {
    let mut bytes = Vec::new();
    let reading = async {
        while !String::from_utf8_lossy(&bytes).contains(text) {
            assert!(stream.read_buf(&mut bytes).await.expect("a connection") > 0, "it ended before {text:?}");
        }
    };
    ends(text, reading).await;
    String::from_utf8_lossy(&bytes).into_owned()
}

async fn a_stream_passes_event_by_event_and_a_hang_up_reaches_the_engine(bench: Bench) {
    bench.order(&[2, 1, 3]);
    bench.engine(2).behave(Behaviour::Held);
    // The engine sends one event and then nothing: it is not kept back until there are more.
    let mut held = bench.begin(&streamed_chat()).await;
    read_until(&mut held, EVENT.trim()).await;
    if bench.kind == Kind::Nginx {
        until("the first byte is told", || bench.gateway.choice.has("prefilled")).await;
    }
    assert_eq!(bench.gateway.choice.open(), 1);
    drop(held);
    until("the engine is left", || bench.engine(2).left() == 1).await;
    bench.settles().await;
    // Before the first byte, too.
    bench.engine(2).behave(Behaviour::Hang);
    let waiting = bench.begin(&streamed_chat()).await;
    until("the engine has the request", || bench.engine(2).seen().len() == 2).await;
    drop(waiting);
    until("the engine is left", || bench.engine(2).left() == 2).await;
    bench.settles().await;
    assert_eq!(bench.counts(), [0, 2, 0]);
}

async fn the_next_engine_of_the_list_gets_what_the_first_cannot_take(mut bench: Bench) {
    let engine_failed = |id: u64| format!("failure {id}/0 m proxy");
    bench.engine(2).behave(Behaviour::Answer(json(503, "{}")));
    bench.order(&[2, 3, 1]);
    assert_eq!(bench.ask(&chat()).await.text(), COMPLETION);
    bench.engine(2).behave(Behaviour::Close);
    assert_eq!(bench.ask(&chat()).await.text(), COMPLETION);
    assert_eq!(bench.counts(), [0, 2, 2]);
    bench.settles().await;
    until("the failures are reported", || {
        bench.gateway.choice.lines().iter().filter(|line| **line == engine_failed(2)).count() == 2
    })
    .await;
    bench.end(2);
    let body = sized(1_000_000);
    assert_eq!(bench.ask(&post(CHAT_PATH, "", &body)).await.text(), COMPLETION);
    assert!(bench.engine(3).seen().last().expect("a request").body == body.as_bytes(), "the body has changed");
    bench.order(&[3, 2, 1]);
    bench.engine(3).behave(Behaviour::Close);
    assert_eq!(bench.ask(&chat()).await.text(), COMPLETION, "the third of the list");
    assert_eq!(bench.counts(), [1, 0, 4]);
    if bench.kind == Kind::Nginx {
        until("the engine that served is told", || bench.gateway.choice.has("served 1/0")).await;
    }
    // An answer that has begun is not begun again.
    let begun = [SSE_HEAD, &chunk(EVENT)].concat();
    bench.engine(3).behave(Behaviour::AnswerAndClose(begun));
    let reply = bench.ask(&streamed_chat()).await;
    assert_eq!((reply.status, reply.text(), reply.is_whole), (200, EVENT, false));
    assert_eq!(bench.counts(), [1, 0, 5]);
    // Nobody is left.
    bench.end(1);
    bench.end(3);
    let reply = bench.ask(&chat()).await;
    assert_eq!((reply.status, reply.code().as_str()), (bench.kind.nobody(), "engine_unreachable"));
    assert_eq!(reply.headers["retry-after"], "1");
    bench.settles().await;
    until("the engine is reported", || bench.gateway.choice.has(&engine_failed(3))).await;
}

async fn refusals_reach_the_caller(bench: Bench) {
    for (status, code) in [(StatusCode::TOO_MANY_REQUESTS, "all_busy"), (StatusCode::SERVICE_UNAVAILABLE, "no_engine")]
    {
        let error = ApiError::gateway(status, code, "wait a little").retry_after(7);
        bench.gateway.choice.refuse(Some(error.clone()));
        let reply = bench.ask(&chat()).await;
        assert_eq!((reply.status, reply.text()), (status.as_u16(), error.body().as_str()));
        assert_eq!((&*reply.headers["retry-after"], &*reply.headers["content-type"]), ("7", "application/json"));
        assert!(reply.headers.contains_key("x-request-id"));
    }
    bench.gateway.choice.refuse(None);
    let code = |reply: Reply| (reply.status, reply.code());
    for (request, expected) in [
        (post(CHAT_PATH, "", "{"), (400, "invalid_json")),
        (post(CHAT_PATH, "", &CHAT.replace("\"m\"", "\"other\"")), (404, "model_not_found")),
        (post("/v1/load_lora_adapter", "", CHAT), (404, "unknown_path")),
        (post("/v1/models/", "", CHAT), (404, "unknown_path")),
    ] {
        assert_eq!(code(bench.ask(&request).await), (expected.0, expected.1.to_owned()));
    }
    let bytes = bench.kind.body_bytes_max();
    assert_eq!(code(bench.ask(&post(CHAT_PATH, "", &sized(bytes + 1))).await), (413, "body_too_large".to_owned()));
    assert_eq!(bench.counts(), [0, 0, 0]);
    assert_eq!(bench.ask(&post(CHAT_PATH, "", &sized(bytes))).await.status, 200, "the largest");
    bench.settles().await;
}

async fn callers_cannot_speak_for_the_proxy(bench: Bench) {
    bench.engine(1).behave(Behaviour::Held);
    let mut victim = bench.begin(&streamed_chat()).await;
    read_until(&mut victim, EVENT.trim()).await;
    let id = bench.engine(1).seen()[0].header("x-request-id").expect("an id");
    bench.engine(1).behave(Behaviour::Answer(json(200, COMPLETION)));
    // Its id is not free for others, neither by header nor in what the log says.
    let headers = format!(
        "x-request-id: {id}\r\nx-data-parallel-rank: 3\r\nX-Data-Parallel-Rank: 4\r\nx-kvrouted-path: /v1/models\r\n\
         x-kvrouted-priority: 9\r\nx-gateway-inference-objective: fast\r\nx-gateway-inference-fairness-id: rich\r\n\
         x-kvrouted-session: s-1\r\nuser-agent: id={id}\r\nauthorization: Bearer own\r\n"
    );
    let path = format!("{CHAT_PATH}?id={id}&failed={}", bench.engine(1).address);
    assert_eq!(bench.ask(&post(&path, &headers, CHAT)).await.text(), COMPLETION);
    until("the pick has ended", || bench.gateway.choice.open() == 1).await;
    let seen = bench.engine(1).seen().pop().expect("a request");
    assert_ne!(seen.header("x-request-id"), Some(id));
    for name in ["x-data-parallel-rank", "x-kvrouted-path", "x-kvrouted-priority", "x-kvrouted-session"] {
        assert_eq!(seen.header(name), None, "{name} reaches the engine");
    }
    assert_eq!(seen.header("authorization").as_deref(), Some("Bearer own"));
    assert_eq!(bench.gateway.choice.asked().last().map(String::as_str), Some("0 Some(\"s-1\") None"));
    assert!(!bench.gateway.choice.lines().iter().any(|line| line.starts_with("failure")));
    drop(victim);
    bench.settles().await;
}

async fn hang_ups_leave_no_booking(bench: Bench) {
    bench.gateway.choice.pause(Duration::from_millis(60));
    for number in 0..60 {
        let asking = bench.begin(&streamed_chat()).await;
        tokio::time::sleep(Duration::from_millis(2 * number)).await;
        drop(asking);
    }
    bench.gateway.choice.pause(Duration::ZERO);
    assert_eq!(bench.ask(&chat()).await.status, 200);
    bench.settles().await;
}

async fn without_the_gateway_engines_take_turns(mut bench: Bench) {
    assert_eq!(bench.ask(&chat()).await.status, 200);
    bench.settles().await;
    let before = bench.counts();
    let _ = bench.gateway.stop.send(true);
    let pick = bench.gateway.pick;
    until("the pick port is closed", || std::net::TcpStream::connect(pick).is_err()).await;
    for _ in 0..9 {
        let headers = "x-data-parallel-rank: 3\r\nx-kvrouted-session: s\r\n";
        let reply = bench.ask(&post(CHAT_PATH, headers, CHAT)).await;
        assert_eq!((reply.status, reply.text()), (200, COMPLETION));
    }
    let each: Vec<_> = bench.counts().iter().zip(&before).map(|(now, before)| now - before).collect();
    assert_eq!(each.iter().sum::<usize>(), 9);
    assert!(each.iter().all(|count| *count >= 2), "every engine works: {each:?}");
    for id in 1..=3 {
        assert_eq!(bench.engine(id).seen().pop().expect("a request").header("x-data-parallel-rank"), None);
    }
    // One that is down costs nobody an answer.
    bench.end(2);
    for _ in 0..9 {
        assert_eq!(bench.ask(&chat()).await.text(), COMPLETION);
    }
}

async fn ranks_are_told(kind: Kind) {
    let Some(mut bench) = Bench::with_ranks(kind, &[2, 4, 1]).await else { return };
    bench.gateway.choice.order(&[(1, 1), (2, 3), (3, 0)]);
    let rank = |bench: &Bench, id| bench.engine(id).seen().pop().expect("a request").header("x-data-parallel-rank");
    assert_eq!(bench.ask(&chat()).await.text(), COMPLETION);
    assert_eq!(rank(&bench, 1).as_deref(), Some("1"));
    bench.end(1);
    match kind {
        Kind::Nginx => {
            assert_eq!(bench.ask(&chat()).await.text(), COMPLETION);
            assert_eq!(rank(&bench, 2).as_deref(), Some("3"), "the second engine has a rank of its own");
            bench.end(2);
            assert_eq!(bench.ask(&chat()).await.text(), COMPLETION);
            assert_eq!(rank(&bench, 3), None, "the third has one rank");
        }
        // It cannot change the header between attempts: only engines with the same rank can follow.
        Kind::Haproxy => {
            bench.gateway.choice.order(&[(1, 1), (2, 3), (2, 1), (3, 0)]);
            let reply = bench.ask(&chat()).await;
            assert!(reply.status == 200 || reply.status == 503, "{reply:?}");
            bench.gateway.choice.order(&[(1, 1), (2, 1)]);
            assert_eq!(bench.ask(&chat()).await.text(), COMPLETION);
            assert_eq!(rank(&bench, 2).as_deref(), Some("1"));
        }
    }
    bench.settles().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nginx_tells_each_engine_its_rank() {
    ranks_are_told(Kind::Nginx).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn haproxy_tells_the_first_engine_its_rank() {
    ranks_are_told(Kind::Haproxy).await;
}

// ---- with a daemon and simulated engines ---------------------------------------------------------------------------

async fn conversations_stay_and_an_engines_death_costs_no_unbegun_answer(fleet: Fleet) {
    fleet.until_exact().await;
    fleet.converse(['a', 'b', 'c', 'd']).await;
    fleet.fifty_at_once().await;
    fleet.an_engine_dies_under_load().await;
}

async fn a_gateway_that_returns_routes_again(mut fleet: Fleet) {
    let asked: Value = value!({"role": "user", "content": "Is the gateway there?"});
    assert_eq!(fleet.caller.chat(std::slice::from_ref(&asked)).await.status, 200);
    fleet.kill_gateway().await;
    for _ in 0..9 {
        assert_eq!(fleet.caller.chat(std::slice::from_ref(&asked)).await.status, 200, "without the gateway");
    }
    fleet.start_gateway().await;
    fleet.converse(['p', 'q', 'r', 's']).await;
}
