//! Traces: the context of an HTTP request reaches the daemon's spans, through the proxy and through the endpoint picker.
//!
//! They use the real `kvrouted` program, and are skipped with a message if it is not built.

#[path = "../../tests/kit/collector.rs"]
#[allow(dead_code, reason = "shared with the daemon's tests")]
mod collector;
mod kit;
#[path = "epp/kit.rs"]
mod player;

use std::path::Path;

use collector::{Collector, Manner};
use kit::{Daemon, Gateway, chat, kvrouted_or_skip, until};
use kvrouted_gateway::demo::{Face, SimulatedEngines};
use player::{Connection, opening, request_body};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

const TRACES: [&str; 3] =
    ["4bf92f3577b34da6a3ce929d0e0e4736", "5bf92f3577b34da6a3ce929d0e0e4736", "6bf92f3577b34da6a3ce929d0e0e4736"];
const PARENT: &str = "00f067aa0ba902b7";

fn traceparent(trace: &str, flags: &str) -> String {
    format!("00-{trace}-{PARENT}-{flags}")
}

/// A daemon that traces what its callers trace, for simulated engines.
fn daemon(kvrouted: &Path, engines: &SimulatedEngines, collector: &Collector) -> Daemon {
    let worker = |(id, face): (u64, &Face)| format!("[[worker]]\nid = {id}\nendpoint = \"{}\"\n", face.events());
    let workers: String = (1..).zip(&engines.faces).map(worker).collect();
    let traces = format!("[traces]\nendpoint = \"{}\"\nsample_ratio = 0.0\n", collector.url());
    Daemon::start(kvrouted, &format!("{traces}[[space]]\nmodel = \"demo\"\nblock_size = 16\n{workers}"))
}

/// Sends a chat with these headers, and returns the status.
async fn post(url: &str, headers: &str) -> u16 {
    let body = chat(&[json!({"role": "user", "content": "A prompt that fills more than a block of tokens."})], false);
    let (address, body) = (url.trim_start_matches("http://"), body.to_string());
    let head = format!("POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\nContent-Length: {}\r\n", body.len());
    let mut stream = TcpStream::connect(address).await.expect("the gateway accepts");
    let request = format!("{head}Content-Type: application/json\r\nConnection: close\r\n{headers}\r\n{body}");
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut reply = String::new();
    stream.read_to_string(&mut reply).await.expect("answered");
    reply.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_spans_of_a_request_through_the_proxy_join_its_callers_trace() {
    let Some(kvrouted) = kvrouted_or_skip("traces through the proxy") else { return };
    let (engines, collector) =
        (SimulatedEngines::start(&kvrouted, 2).await.expect("engines"), Collector::start(Manner::Takes));
    let (urls, daemon) = (engines.urls(), daemon(&kvrouted, &engines, &collector));
    let socket = daemon.socket().display().to_string();
    let starting = tokio::task::spawn_blocking(move || Gateway::start(&kvrouted, &urls, &["--socket", &socket]));
    let gateway = starting.await.expect("a gateway");
    // Not sampled, not valid, twice: none of them is traced, and all are answered.
    let wrong = ["traceparent: 00-1-2-01\r\n".to_owned(), format!("traceparent: {}\r\n", traceparent(TRACES[1], "00"))];
    let twice = format!("traceparent: {}\r\n", traceparent(TRACES[1], "01")).repeat(2);
    for headers in wrong.iter().chain([&twice]) {
        assert_eq!(post(gateway.url(), headers).await, 200, "{headers}");
    }
    let good = format!("traceparent: {}\r\n", traceparent(TRACES[0], "01"));
    // Until the gateway knows the daemon's space it decides alone.
    until("the daemon's spans have come", async || {
        assert_eq!(post(gateway.url(), &good).await, 200);
        collector.trace(TRACES[0]).contains_key("booking")
    })
    .await;
    // Each request has spans of its own.
    let spans = collector.spans();
    let booking = spans.iter().find(|span| span.name == "booking").expect("a booking");
    let route = spans.iter().find(|span| span.id == booking.parent).expect("its request");
    assert_eq!((&*route.name, &*route.parent), ("route", PARENT));
    assert_eq!((&*route.attributes["kvrouted.model"], &*booking.attributes["kvrouted.end"]), ("demo", "freed"));
    assert!(collector.spans().iter().all(|span| span.trace == TRACES[0]), "no other request is traced");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_spans_of_a_request_through_the_picker_join_its_callers_trace() {
    let Some(kvrouted) = kvrouted_or_skip("traces through the endpoint picker") else { return };
    let (engines, collector) =
        (SimulatedEngines::start(&kvrouted, 2).await.expect("engines"), Collector::start(Manner::Takes));
    let (urls, daemon) = (engines.urls(), daemon(&kvrouted, &engines, &collector));
    let socket = daemon.socket().display().to_string();
    let starting = tokio::task::spawn_blocking(move || {
        Gateway::start_picker(&kvrouted, &urls, &["--plaintext", "--socket", &socket])
    });
    let picker = starting.await.expect("a picker");
    let good = traceparent(TRACES[2], "01");
    let headers = [(":method", "POST"), (":path", "/v1/chat/completions"), ("traceparent", good.as_str())];
    let body = chat(&[json!({"role": "user", "content": "A prompt that fills more than a block of tokens."})], false);
    until("the daemon's spans have come", async || {
        let stream = TcpStream::connect(picker.url()).await.expect("the picker accepts");
        let mut stream = Connection::over(stream).await.stream().await;
        stream.send(opening(&headers, false)).await;
        stream.send(request_body(body.to_string(), true)).await;
        stream.chosen().await;
        collector.trace(TRACES[2]).contains_key("route")
    })
    .await;
    assert_eq!(collector.trace(TRACES[2])["route"].parent, PARENT);
}
