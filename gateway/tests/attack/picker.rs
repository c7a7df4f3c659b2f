//! Clients of the picker that do not behave as Envoy does. They send messages out of order, bodies in tiny pieces or without
//! an end, and headers and subsets that are too large. They end streams at any point, or send nothing on them.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::StreamExt as _;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Frame;
use hyper_util::rt::{TokioExecutor, TokioIo};
use kvrouted_gateway::epp::messages::{
    HeaderMap, HeaderValue, HttpHeaders, ListValue, ProcessingRequest, RequestPart, Struct, Value,
};
use rand::{RngExt as _, SeedableRng as _};
use rand_xoshiro::Xoshiro256PlusPlus;
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use crate::attackers::{Orders, Role};
use crate::http1::counted;
use crate::player::{
    CHAT, Connection, Stream, opening, request_body, request_trailers, response_body, response_headers,
    response_trailers, with_metadata,
};
use crate::scene::Scene;
use crate::trial::Trial;

pub(crate) const ROLES: &[(&str, Role)] = &[
    ("send_disorder", send_disorder),
    ("send_small_pieces", send_small_pieces),
    ("send_unfinished", send_unfinished),
    ("send_endless_bodies", send_endless_bodies),
    ("send_huge_headers", send_huge_headers),
    ("send_hostile_subsets", send_hostile_subsets),
    ("cancel_streams", cancel_streams),
    ("open_silent_streams", open_silent_streams),
];

/// What all bodies and headers that the picker withholds may take here.
const BODIES: [&str; 2] = ["--bodies-bytes-max", "67108864"];
/// The most memory of a picker with that bound, MiB: what it has at rest, the bound, and what the allocator keeps.
const MEMORY_MIB_MAX: u64 = 288;
/// The path of an ext_proc stream.
pub(crate) const PROCESS: &str = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";

fn run(orders: &mut Orders, act: impl AsyncFnOnce(&mut Orders, SocketAddr)) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let at = orders.at.parse().expect("an address");
    runtime.expect("a runtime").block_on(act(orders, at));
}

async fn connected(at: SocketAddr) -> Connection {
    Connection::over(TcpStream::connect(at).await.expect("the picker accepts")).await
}

/// Reads what comes on a stream until it ends or a while is over; how many messages.
async fn drain(stream: &mut Stream, lasts: Duration) -> u64 {
    let mut messages = 0;
    let all = async {
        while let Ok(Some(_)) = stream.next().await {
            messages += 1;
        }
    };
    let _ = tokio::time::timeout(lasts, all).await;
    messages
}

pub(crate) fn disorder(trial: &mut Trial) {
    let Some(scene) = Scene::picker(&BODIES) else { return };
    scene.attacked_by(trial, "send_disorder", 2).end(trial);
    trial.must_count("messages answered in disorder", trial.counted("messages answered"), 1);
    scene.end(trial, MEMORY_MIB_MAX);
}

/// Messages in any order, of which some are no messages.
fn send_disorder(orders: &mut Orders) {
    run(orders, async |orders, at| {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(orders.number);
        let body = r#"{"model": "demo", "messages": [{"role": "user", "content": "a"}]}"#;
        while orders.goes_on() {
            let connection = connected(at).await;
            let mut streams = Vec::new();
            for _ in 0..100 {
                let stream = connection.stream().await;
                for _ in 0..random.random_range(0..12) {
                    let message = match random.random_range(0..10) {
                        0 => opening(&CHAT, false),
                        1 => opening(&CHAT, true),
                        2 => request_body(body, random.random()),
                        3 => request_body("", true),
                        4 => request_trailers(),
                        5 => response_headers(&[(":status", "abc")], random.random()),
                        6 => response_body(vec![0xff; 100], random.random()),
                        7 => response_trailers(),
                        8 => ProcessingRequest { observability_mode: true, ..opening(&CHAT, false) },
                        _ => ProcessingRequest::default(),
                    };
                    // The picker may have ended the stream.
                    orders.count("messages", u64::from(stream.try_send(message)));
                }
                streams.push(stream);
            }
            for stream in &mut streams {
                let answers = drain(stream, Duration::from_millis(1)).await;
                orders.count("messages answered", answers);
            }
        }
    });
}

pub(crate) fn small_pieces(trial: &mut Trial) {
    let Some(scene) = Scene::picker(&BODIES) else { return };
    scene.attacked_by(trial, "send_small_pieces", 1).end(trial);
    scene.end(trial, MEMORY_MIB_MAX);
}

/// A piece of one byte, in a message that is long for other reasons.
fn long_message() -> ProcessingRequest {
    let fields = [("padding".to_owned(), Value::text("p".repeat(64 << 10)))].into();
    let attributes = [("padding".to_owned(), Struct { fields })].into();
    ProcessingRequest { attributes, ..request_body("x", false) }
}

fn send_small_pieces(orders: &mut Orders) {
    run(orders, async |orders, at| {
        let connection = connected(at).await;
        let mut streams = Vec::new();
        for _ in 0..200 {
            let stream = connection.stream().await;
            stream.send(opening(&CHAT, false)).await;
            streams.push(stream);
        }
        let message = long_message();
        for _ in 0..40 {
            for stream in &streams {
                orders.count("pieces", u64::from(stream.try_send(message.clone())));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        orders.hold();
    });
}

pub(crate) fn unfinished_messages(trial: &mut Trial) {
    let Some(scene) = Scene::picker(&BODIES) else { return };
    scene.attacked_by(trial, "send_unfinished", 1).end(trial);
    scene.end(trial, MEMORY_MIB_MAX);
}

/// Streams of bytes that are no whole message, on one connection.
fn send_unfinished(orders: &mut Orders) {
    run(orders, async |orders, at| {
        let io = TokioIo::new(TcpStream::connect(at).await.expect("the picker accepts"));
        let (mut sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await.expect("HTTP/2");
        tokio::spawn(connection);
        let mut bodies = Vec::new();
        for _ in 0..20 {
            let (send, receive) = mpsc::channel::<Bytes>(4);
            let frames = futures_util::stream::unfold(receive, |mut receive| async move {
                Some((Ok::<_, std::convert::Infallible>(Frame::data(receive.recv().await?)), receive))
            });
            let request =
                hyper::Request::post(format!("http://epp{PROCESS}")).header("content-type", "application/grpc");
            let request = request.header("te", "trailers").body(StreamBody::new(Box::pin(frames))).expect("a request");
            let reply = tokio::spawn(sender.send_request(request));
            bodies.push((send, reply));
        }
        // A message of 30 MiB, without its last bytes.
        let length = 30_u32 << 20;
        let (first, part) = ([&[0][..], &length.to_be_bytes()].concat(), Bytes::from(vec![0x22; 1 << 20]));
        for (send, _) in &bodies {
            let _ = send.send(first.clone().into()).await;
        }
        for _ in 0..29 {
            for (send, _) in &bodies {
                // A stream that the picker refuses takes no more.
                let sent = tokio::time::timeout(Duration::from_secs(2), send.send(part.clone())).await;
                orders.count("MiB sent", u64::from(matches!(sent, Ok(Ok(())))));
            }
        }
        let refused = bodies.iter().filter(|(send, _)| send.is_closed()).count();
        orders.count("streams refused", refused as u64);
        orders.hold();
        for (_, reply) in bodies {
            if let Ok(Ok(Ok(reply))) = tokio::time::timeout(Duration::from_millis(10), reply).await {
                drop(reply.into_body().boxed());
            }
        }
    });
}

pub(crate) fn endless_bodies(trial: &mut Trial) {
    let Some(scene) = Scene::picker(&BODIES) else { return };
    scene.attacked_by(trial, "send_endless_bodies", 1).end(trial);
    let refused = counted(&scene.admin, "kvrouted_gateway_epp_requests_total", "refused");
    trial.must_count("requests refused", refused, 16);
    scene.end(trial, MEMORY_MIB_MAX);
}

fn send_endless_bodies(orders: &mut Orders) {
    run(orders, async |orders, at| {
        let connection = connected(at).await;
        let piece = request_body(vec![b'x'; 60 << 10], false);
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..64 {
            let (mut stream, piece) = (connection.stream().await, piece.clone());
            tasks.spawn(async move {
                stream.send(opening(&CHAT, false)).await;
                let mut sent = 0;
                // More than any body may have.
                for _ in 0..600 {
                    if !stream.try_send(piece.clone()) {
                        tokio::time::sleep(Duration::from_millis(2)).await;
                    } else {
                        sent += 1;
                    }
                }
                (sent, drain(&mut stream, Duration::from_millis(100)).await)
            });
        }
        while let Some(Ok((sent, answers))) = tasks.join_next().await {
            orders.count("pieces", sent);
            orders.count("answers", answers);
        }
    });
}

pub(crate) fn huge_headers(trial: &mut Trial) {
    let Some(scene) = Scene::picker(&BODIES) else { return };
    scene.attacked_by(trial, "send_huge_headers", 1).end(trial);
    let refused = counted(&scene.admin, "kvrouted_gateway_epp_requests_total", "refused");
    trial.must_count("requests refused", refused, 500);
    trial.must_count("empty headers refused", trial.counted("empty headers refused"), 6);
    scene.end(trial, MEMORY_MIB_MAX);
}

fn huge_opening() -> ProcessingRequest {
    let header =
        |at: usize| HeaderValue { key: format!("x-{at}"), value: Bytes::new(), raw_value: vec![b'v'; 2048].into() };
    let headers = HeaderMap { headers: (0..100).map(header).collect() };
    let part = RequestPart::RequestHeaders(HttpHeaders { headers: Some(headers), end_of_stream: false });
    ProcessingRequest { part: Some(part), ..opening(&CHAT, false) }
}

/// Two bytes for each header.
fn empty_headers(count: usize) -> ProcessingRequest {
    let headers = HeaderMap { headers: vec![HeaderValue::default(); count] };
    let part = RequestPart::RequestHeaders(HttpHeaders { headers: Some(headers), end_of_stream: false });
    ProcessingRequest { part: Some(part), ..opening(&CHAT, false) }
}

fn send_huge_headers(orders: &mut Orders) {
    run(orders, async |orders, at| {
        let (connection, message) = (connected(at).await, huge_opening());
        let mut streams = Vec::new();
        // The first fit a message without a body, and the others do not.
        for count in [400_000, 1_000_000] {
            let message = empty_headers(count);
            for _ in 0..3 {
                let mut stream = connection.stream().await;
                orders.count("openings", u64::from(stream.try_send(message.clone())));
                let answer = tokio::time::timeout(Duration::from_secs(10), stream.next()).await;
                orders.count("empty headers refused", u64::from(matches!(answer, Ok(Ok(Some(_))))));
                streams.push(stream);
            }
        }
        for _ in 0..1000 {
            let stream = connection.stream().await;
            orders.count("openings", u64::from(stream.try_send(message.clone())));
            streams.push(stream);
        }
        orders.hold();
    });
}

pub(crate) fn hostile_subsets(trial: &mut Trial) {
    let Some(scene) = Scene::picker(&BODIES) else { return };
    scene.attacked_by(trial, "send_hostile_subsets", 1).end(trial);
    let chosen = trial.counted("answered with an endpoint");
    trial.must(chosen == 0, || format!("{chosen} subsets that name no engine got one"));
    scene.end(trial, MEMORY_MIB_MAX);
}

fn nested(depth: usize) -> Value {
    let mut value = Value::text("10.0.0.1:1");
    for _ in 0..depth {
        value = Value { list_value: Some(ListValue { values: vec![value] }), ..Value::default() };
    }
    value
}

fn send_hostile_subsets(orders: &mut Orders) {
    run(orders, async |orders, at| {
        let (namespace, key) = ("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset");
        let many: Vec<String> =
            (0..50_000).map(|at| format!("10.{}.{}.1:{}", at >> 8, at & 255, at % 60_000 + 1)).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let subsets = [
            Value::texts(&many),
            Value::text(",".repeat(500_000)),
            Value::texts(&["*", "0.0.0.0/0", "localhost:80", "[::", "10.0.0.1:99999", "\u{0}"]),
            Value::default(),
            nested(90),
            nested(1000),
        ];
        while orders.goes_on() {
            let connection = connected(at).await;
            for subset in &subsets {
                let mut stream = connection.stream().await;
                let message = with_metadata(opening(&CHAT, true), namespace, key, subset.clone());
                orders.count("subsets", u64::from(stream.try_send(message)));
                match tokio::time::timeout(Duration::from_secs(10), stream.next()).await {
                    Ok(Ok(Some(answer))) if answer.dynamic_metadata.is_some() => {
                        orders.count("answered with an endpoint", 1);
                    }
                    Ok(Ok(Some(_))) => orders.count("refused", 1),
                    Ok(_) => orders.count("ended with an error", 1),
                    Err(_) => orders.count("no answer", 1),
                }
            }
        }
    });
}

pub(crate) fn cancelled_streams(trial: &mut Trial) {
    let Some(scene) = Scene::picker(&BODIES) else { return };
    scene.attacked_by(trial, "cancel_streams", 4).end(trial);
    trial.must_count("streams cancelled", trial.counted("cancelled"), 20);
    scene.end(trial, MEMORY_MIB_MAX);
}

fn cancel_streams(orders: &mut Orders) {
    run(orders, async |orders, at| {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(orders.number);
        let body = r#"{"model": "demo", "stream": true, "messages": [{"role": "user", "content": "Who is there?"}]}"#;
        while orders.goes_on() {
            let connection = connected(at).await;
            for _ in 0..50 {
                let mut stream = connection.stream().await;
                let steps = random.random_range(0..6);
                let messages = [
                    opening(&CHAT, false),
                    request_body(body, true),
                    response_headers(&[(":status", "200")], false),
                    response_body("data: 1\n\n", false),
                    response_trailers(),
                ];
                for message in messages.into_iter().take(steps) {
                    stream.try_send(message);
                }
                drain(&mut stream, Duration::from_millis(random.random_range(0..8))).await;
                orders.count("cancelled", 1);
            }
        }
    });
}

pub(crate) fn silent_streams(trial: &mut Trial) {
    let Some(scene) = Scene::picker(&[&BODIES[..], &["--body-timeout-ms", "1000"]].concat()) else { return };
    scene.attacked_by(trial, "open_silent_streams", 1).end(trial);
    trial.must_count("streams ended by the picker", trial.counted("ended by the picker"), 2900);
    scene.end(trial, MEMORY_MIB_MAX);
}

fn open_silent_streams(orders: &mut Orders) {
    run(orders, async |orders, at| {
        let mut streams = Vec::new();
        for _ in 0..3 {
            let connection = connected(at).await;
            for _ in 0..1000 {
                streams.push(connection.stream().await);
            }
        }
        orders.count("streams", streams.len() as u64);
        let all = futures_util::stream::iter(streams)
            .for_each_concurrent(None, |mut stream| async move { while let Ok(Some(_)) = stream.next().await {} });
        let ended = tokio::time::timeout(Duration::from_secs(20), all).await;
        orders.count("ended by the picker", if ended.is_ok() { 3000 } else { 0 });
    });
}
