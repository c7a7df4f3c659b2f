//! The reverse proxy with hostile callers and hostile engines. Engines and callers speak bytes; the router is a double
//! that chooses in a fixed order and logs what it hears.

mod proxy_support;

use std::io::Write as _;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use kvrouted_gateway::config::{ReportMode, TlsFiles};
use kvrouted_gateway::engines::{EngineConfig, RankSource};
use kvrouted_gateway::proxy::{ConnectionBounds, LogSocket, Socket, read_log, serve};
use proxy_support::caller::{CHAT, CHAT_PATH, STREAMED_CHAT, chat, exchange, get, post, read_reply, streamed_chat};
use proxy_support::choice::FixedChoice;
use proxy_support::engine::{Behaviour, COMPLETION, EVENT, EngineDouble, SSE_HEAD, USAGE_EVENT, chunk, json, stream};
use proxy_support::gateway::{Gateway, MEMORY_BYTES, config};
use proxy_support::{ends, until};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

const DONE: &str = "data: [DONE]\n\n";

async fn answering(text: &str) -> EngineDouble {
    EngineDouble::start(Behaviour::Answer(json(200, text))).await
}

async fn streaming(events: &[&str]) -> EngineDouble {
    EngineDouble::start(Behaviour::Answer(stream(events))).await
}

/// An engine whose port refuses connections once it was asked what it is.
async fn refusing(engine: EngineDouble) -> String {
    let url = engine.url();
    drop(engine);
    url
}

// ---- what goes through ---------------------------------------------------------------------------------------------

#[tokio::test]
async fn bodies_and_end_to_end_headers_go_through_unchanged() {
    let engine = answering(COMPLETION).await;
    let gateway = Gateway::start(&[&engine]).await;
    let headers = "x-request-id: r-1\r\ntraceparent: 00-aa-bb-01\r\nauthorization: Bearer caller\r\n\
        x-kvrouted-session: s\r\nx-kvrouted-priority: 7\r\nx-gateway-inference-fairness-id: t\r\n\
        x-data-parallel-rank: 5\r\nte: gzip\r\n";
    let reply = exchange(gateway.address, &post(CHAT_PATH, headers, CHAT)).await;
    assert_eq!((reply.status, reply.text(), reply.is_whole), (200, COMPLETION, true));
    assert_eq!(reply.headers["x-request-id"], "r-1");
    let seen = &engine.seen()[0];
    assert_eq!(seen.body, CHAT.as_bytes());
    assert!(seen.head.starts_with("POST /v1/chat/completions HTTP/1.1"), "{}", seen.head);
    assert_eq!(seen.header("traceparent").as_deref(), Some("00-aa-bb-01"));
    assert_eq!(seen.header("x-request-id").as_deref(), Some("r-1"));
    assert_eq!(seen.header("authorization").as_deref(), Some("Bearer caller"));
    assert_eq!(seen.header("host"), Some(engine.address.to_string()));
    for name in ["x-kvrouted-session", "x-data-parallel-rank", "te"] {
        assert_eq!(seen.header(name), None, "{name}");
    }
    gateway.settles().await;
    assert_eq!(gateway.choice.asked(), ["7 Some(\"s\") Some(\"t\")"]);
    assert_eq!(gateway.choice.lines(), ["prefilled", "progress 2", "usage 1/0 9 Some(8) 2", "freed"]);
}

#[tokio::test]
async fn a_stream_is_relayed_whole_and_its_booking_follows() {
    let engine = streaming(&[EVENT, EVENT, USAGE_EVENT, DONE]).await;
    let gateway = Gateway::start(&[&engine]).await;
    let reply = exchange(gateway.address, &streamed_chat()).await;
    assert_eq!((reply.status, reply.is_whole), (200, true));
    assert_eq!(reply.text(), [EVENT, EVENT, USAGE_EVENT, DONE].concat());
    gateway.settles().await;
    assert_eq!(gateway.choice.lines(), ["prefilled", "progress 2", "usage 1/0 9 Some(8) 2", "freed"]);
}

#[tokio::test]
async fn usage_is_asked_for_and_the_extra_chunk_taken_out() {
    let engine = streaming(&[EVENT, USAGE_EVENT, DONE]).await;
    let gateway = Gateway::with(&[&engine], |config| config.forward.asks_usage = true).await;
    let reply = exchange(gateway.address, &streamed_chat()).await;
    assert_eq!((reply.text(), reply.is_whole), ([EVENT, DONE].concat().as_str(), true));
    let sent: serde_json::Value = serde_json::from_slice(&engine.seen()[0].body).expect("JSON");
    assert_eq!(sent["stream_options"]["include_usage"], true);
    gateway.settles().await;
    assert!(gateway.choice.has("usage 1/0 9 Some(8) 2"));
    let asked = STREAMED_CHAT.replace("\"stream\":true", "\"stream\":true,\"stream_options\":{\"include_usage\":true}");
    let reply = exchange(gateway.address, &post(CHAT_PATH, "", &asked)).await;
    assert_eq!(reply.text(), [EVENT, USAGE_EVENT, DONE].concat());
    assert_eq!(engine.seen()[1].body, asked.as_bytes());
}

#[tokio::test]
async fn trailers_are_kept() {
    let mut bytes = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: x-end\r\n\r\n".to_vec();
    bytes.extend(chunk("one"));
    bytes.extend_from_slice(b"0\r\nx-end: yes\r\n\r\n");
    let engine = EngineDouble::start(Behaviour::Answer(bytes)).await;
    let gateway = Gateway::start(&[&engine]).await;
    let reply = exchange(gateway.address, &post(CHAT_PATH, "te: trailers\r\n", CHAT)).await;
    assert_eq!((reply.text(), reply.trailers.trim()), ("one", "x-end: yes"));
    gateway.settles().await;
}

#[tokio::test]
async fn worker_headers_are_told_only_where_the_operator_turned_them_on() {
    let lying = "HTTP/1.1 200 OK\r\nx-kvrouted-worker: 9/9\r\ncontent-length: 2\r\n\r\n{}";
    let engine = EngineDouble::start(Behaviour::Answer(lying.into())).await;
    let gateway = Gateway::start(&[&engine]).await;
    let reply = exchange(gateway.address, &chat()).await;
    assert!(!reply.headers.contains_key("x-kvrouted-worker"));
    let gateway = Gateway::with(&[&engine], |config| config.forward.tells_worker = true).await;
    let reply = exchange(gateway.address, &chat()).await;
    assert_eq!(
        (reply.headers["x-kvrouted-worker"].as_str(), reply.headers["x-kvrouted-overlap-tokens"].as_str()),
        ("1/0", "16")
    );
}

#[tokio::test]
async fn the_rank_is_told_only_to_an_engine_with_several() {
    let engine = answering(COMPLETION).await;
    let config = config(&[engine.url()]);
    let ranks = |count: u32| {
        move |engine: &mut EngineConfig| {
            let source = |rank| RankSource { rank, endpoint: None, replay: None, topic: String::new() };
            engine.named.ranks = (0..count).map(source).collect();
        }
    };
    let gateway = Gateway::of(&config, FixedChoice::of(&[1]).rank(1), ranks(2)).await;
    assert_eq!(exchange(gateway.address, &chat()).await.status, 200);
    let gateway = Gateway::of(&config, FixedChoice::of(&[1]), ranks(1)).await;
    assert_eq!(exchange(gateway.address, &chat()).await.status, 200);
    let ranks: Vec<_> = engine.seen().iter().map(|seen| seen.header("x-data-parallel-rank")).collect();
    assert_eq!(ranks, [Some("1".to_owned()), None]);
}

#[tokio::test]
async fn token_ids_take_the_place_of_text_where_the_operator_turned_it_on() {
    let engine = answering(COMPLETION).await;
    let gateway = Gateway::with(&[&engine], |config| config.forward.sends_token_ids = true).await;
    let body = r#"{"model":"m","prompt":"hi"}"#;
    assert_eq!(exchange(gateway.address, &post("/v1/completions", "", body)).await.status, 200);
    assert_eq!(engine.seen()[0].body, br#"{"model":"m","prompt":[1,2,3]}"#);
}

#[tokio::test]
async fn the_report_mode_is_passed_stripped_or_refused() {
    let engine = answering(COMPLETION).await;
    let body = r#"{"model":"m","prompt":"hi","vllm_xargs":{"kv_cache_report_mode":"full"}}"#;
    let request = post("/v1/completions", "", body);
    let gateway = Gateway::start(&[&engine]).await;
    assert_eq!(exchange(gateway.address, &request).await.status, 200);
    let gateway = Gateway::with(&[&engine], |config| config.forward.report_mode = ReportMode::Strip).await;
    assert_eq!(exchange(gateway.address, &request).await.status, 200);
    let gateway = Gateway::with(&[&engine], |config| config.forward.report_mode = ReportMode::Refuse).await;
    let reply = exchange(gateway.address, &request).await;
    assert_eq!((reply.status, reply.code().as_str()), (400, "report_mode_refused"));
    let bodies: Vec<Vec<u8>> = engine.seen().into_iter().map(|seen| seen.body).collect();
    assert_eq!(bodies, [body.as_bytes(), br#"{"model":"m","prompt":"hi","vllm_xargs":{}}"#]);
}

#[tokio::test]
async fn http2_goes_in() {
    let engine = streaming(&[EVENT, DONE]).await;
    let gateway = Gateway::start(&[&engine]).await;
    let stream = TcpStream::connect(gateway.address).await.expect("a connection");
    let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
    let (mut sender, connection) = handshake.await.expect("HTTP/2");
    tokio::spawn(connection);
    let request = hyper::Request::post(format!("http://{}{CHAT_PATH}", gateway.address));
    let request = request.body(Full::new(bytes::Bytes::from(STREAMED_CHAT))).expect("a request");
    let reply = ends("a reply", sender.send_request(request)).await.expect("a reply");
    let body = ends("a body", reply.into_body().collect()).await.expect("a body").to_bytes();
    assert_eq!(body, [EVENT, DONE].concat());
    gateway.settles().await;
}

#[tokio::test]
async fn tls_goes_in_and_its_certificate_is_read_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let files = TlsFiles { cert: folder.path().join("cert.pem"), key: folder.path().join("key.pem") };
    let write_certificate = || {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
        std::fs::write(&files.cert, made.cert.pem()).expect("written");
        std::fs::write(&files.key, made.signing_key.serialize_pem()).expect("written");
        made.cert.der().clone()
    };
    let first = write_certificate();
    let engine = answering(COMPLETION).await;
    let gateway = Gateway::with(&[&engine], |config| config.listen.tls = Some(files.clone())).await;
    let reply = over_tls(gateway.address, &first, &chat()).await.expect("a handshake");
    assert_eq!(reply.text(), COMPLETION);
    let tls = kvrouted_gateway::proxy::ServerTls::load(&files).expect("good files");
    std::fs::write(&files.key, "nonsense").expect("written");
    assert!(tls.reload().expect_err("a bad key").contains("key.pem"));
    write_certificate();
    tls.reload().expect("good files");
}

async fn over_tls(
    to: std::net::SocketAddr,
    trusted: &rustls::pki_types::CertificateDer<'static>,
    request: &[u8],
) -> std::io::Result<proxy_support::caller::Reply> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(trusted.clone()).expect("a root");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = TcpStream::connect(to).await?;
    let name = "localhost".try_into().expect("a name");
    let mut stream = tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
    stream.write_all(request).await?;
    Ok(read_reply(&mut stream).await)
}

// ---- paths ---------------------------------------------------------------------------------------------------------

#[tokio::test]
async fn models_are_merged_and_unknown_paths_refused_or_passed() {
    let engine = answering("{}").await;
    let gateway = Gateway::with(&[&engine], |config| config.forward.passed_prefixes = vec!["/custom/".into()]).await;
    let models = exchange(gateway.address, &get("/v1/models")).await;
    assert!(models.text().contains("\"id\":\"m\""), "{}", models.text());
    for path in ["/metrics", "/custom", "/custom/../v1/load_lora_adapter", "/custom/%2E%2e/x", "/custom/x%2f..%2F../y"]
    {
        let reply = exchange(gateway.address, &get(path)).await;
        assert_eq!((reply.status, reply.code().as_str()), (404, "unknown_path"), "{path}");
    }
    assert_eq!(exchange(gateway.address, &get("/custom/x?y=1")).await.status, 200);
    assert!(engine.seen()[0].head.starts_with("GET /custom/x?y=1 "), "{}", engine.seen()[0].head);
    let gateway = Gateway::with(&[&engine], |config| config.forward.passes_unknown_paths = true).await;
    assert_eq!(exchange(gateway.address, &get("/custom")).await.status, 200);
    // An engine decodes the second one, and would run it unseen.
    for path in [CHAT_PATH, "/v1/ch%61t/completions"] {
        let reply = exchange(gateway.address, &get(path)).await;
        assert_eq!((reply.status, reply.code().as_str()), (405, "method_not_allowed"), "{path}");
    }
}

#[tokio::test]
async fn requests_without_a_prompt_are_spread_and_not_booked() {
    let (first, second) = (answering("{}").await, answering("{}").await);
    let gateway = Gateway::start(&[&first, &second]).await;
    for _ in 0..4 {
        let reply = exchange(gateway.address, &post("/v1/embeddings", "", r#"{"model":"m","input":"a"}"#)).await;
        assert_eq!(reply.status, 200);
    }
    assert_eq!((first.seen().len(), second.seen().len()), (2, 2));
    assert!(gateway.choice.lines().is_empty());
}

// ---- engines that fail ---------------------------------------------------------------------------------------------

#[tokio::test]
async fn a_request_goes_to_the_next_engine_before_the_first_byte() {
    let head_only = [SSE_HEAD, b""].concat();
    for (behaviour, why) in [
        (Behaviour::Close, "broken"),
        (Behaviour::AnswerAndClose(head_only), "broken"),
        (Behaviour::Answer(json(503, "{}")), "unavailable"),
    ] {
        let bad = EngineDouble::start(behaviour.clone()).await;
        let good = streaming(&[EVENT, DONE]).await;
        let gateway = Gateway::start(&[&bad, &good]).await;
        let reply = exchange(gateway.address, &streamed_chat()).await;
        assert_eq!((reply.status, reply.text()), (200, [EVENT, DONE].concat().as_str()), "{behaviour:?}");
        assert_eq!((bad.seen().len(), good.seen().len()), (1, 1));
        gateway.settles().await;
        let lines = gateway.choice.lines();
        assert_eq!(lines[..2], [format!("failure 1/0 m {why}"), "served 2/0".to_owned()], "{behaviour:?}");
        assert!(gateway.metrics.text("").contains(&format!("kvrouted_gateway_retried_total{{reason=\"{why}\"}} 1")));
        // The engine that failed is backed off: the next request does not go to it.
        assert_eq!(exchange(gateway.address, &streamed_chat()).await.status, 200);
        assert_eq!((bad.seen().len(), good.seen().len()), (1, 2));
    }
}

#[tokio::test]
async fn a_request_that_only_breaks_its_own_connection_takes_the_engine_from_nobody() {
    let (first, second) = (EngineDouble::start(Behaviour::CloseAlive).await, answering(COMPLETION).await);
    let gateway = Gateway::start(&[&first, &second]).await;
    assert_eq!(exchange(gateway.address, &chat()).await.text(), COMPLETION, "the next engine runs it");
    gateway.settles().await;
    assert_eq!(gateway.choice.lines()[0], "served 2/0", "no failure is reported");
    assert!(gateway.metrics.text("").contains("kvrouted_gateway_retried_total{reason=\"cut_off\"} 1"));
    first.behave(Behaviour::Answer(json(200, COMPLETION)));
    assert_eq!(exchange(gateway.address, &chat()).await.status, 200);
    assert_eq!(first.seen().len(), 2, "it still gets requests");
    // Eight breaks without a request that goes well are the engine's, whatever it says of its health.
    first.behave(Behaviour::CloseAlive);
    for _ in 0..8 {
        assert_eq!(exchange(gateway.address, &chat()).await.text(), COMPLETION);
    }
    let asked = first.seen().len();
    assert_eq!(exchange(gateway.address, &chat()).await.text(), COMPLETION);
    assert_eq!(first.seen().len(), asked, "it backs off");
}

#[tokio::test]
async fn a_refused_connection_moves_the_request_and_its_booking() {
    let (gone, good) = (answering("{}").await, answering(COMPLETION).await);
    let config = config(&[gone.url(), good.url()]);
    let gateway = Gateway::of(&config, FixedChoice::of(&[1, 2]), |_| {}).await;
    refusing(gone).await;
    assert_eq!(exchange(gateway.address, &chat()).await.text(), COMPLETION);
    gateway.settles().await;
    let lines = gateway.choice.lines();
    assert!(lines[0].starts_with("failure 1/0 m "), "{lines:?}");
    assert_eq!(lines[1], "served 2/0");
}

#[tokio::test]
async fn errors_of_the_last_engine_reach_the_caller() {
    let engine = EngineDouble::start(Behaviour::Answer(json(503, "{\"busy\":1}"))).await;
    let gateway = Gateway::start(&[&engine]).await;
    let reply = exchange(gateway.address, &chat()).await;
    assert_eq!((reply.status, reply.text()), (503, "{\"busy\":1}"));
    gateway.settles().await;

    let engine = EngineDouble::start(Behaviour::Close).await;
    let gateway = Gateway::start(&[&engine]).await;
    let reply = exchange(gateway.address, &chat()).await;
    assert_eq!((reply.status, reply.code().as_str()), (502, "engine_failed"));
    let reply = exchange(gateway.address, &chat()).await;
    assert_eq!(reply.status, 503, "the engine backs off");
    assert_eq!(engine.seen().len(), 1);
    gateway.settles().await;

    let engine = EngineDouble::start(Behaviour::Answer(json(400, "{\"too\":\"long\"}"))).await;
    let gateway = Gateway::start(&[&engine, &answering("{}").await]).await;
    let reply = exchange(gateway.address, &chat()).await;
    assert_eq!((reply.status, reply.text()), (400, "{\"too\":\"long\"}"));
    gateway.settles().await;
}

#[tokio::test]
async fn a_body_beyond_the_retry_bound_is_sent_once() {
    let (bad, good) = (EngineDouble::start(Behaviour::Close).await, answering(COMPLETION).await);
    let gateway = Gateway::with(&[&bad, &good], |config| config.retry.body_bytes_max = CHAT.len() - 1).await;
    let reply = exchange(gateway.address, &chat()).await;
    assert_eq!((reply.status, good.seen().len()), (502, 0));
    gateway.settles().await;
}

#[tokio::test]
async fn no_more_engines_are_tried_than_allowed() {
    let (first, second) = (EngineDouble::start(Behaviour::Close).await, EngineDouble::start(Behaviour::Close).await);
    let third = answering(COMPLETION).await;
    let gateway = Gateway::with(&[&first, &second, &third], |config| config.retry.attempts_max = 2).await;
    assert_eq!(exchange(gateway.address, &chat()).await.status, 502);
    assert_eq!((first.seen().len(), second.seen().len(), third.seen().len()), (1, 1, 0));
    gateway.settles().await;
}

#[tokio::test]
async fn an_engine_that_dies_within_a_stream_ends_it_with_an_error() {
    let mut bytes = SSE_HEAD.to_vec();
    bytes.extend(chunk(EVENT));
    let (bad, other) = (EngineDouble::start(Behaviour::AnswerAndClose(bytes)).await, answering("{}").await);
    let gateway = Gateway::start(&[&bad, &other]).await;
    let reply = exchange(gateway.address, &streamed_chat()).await;
    assert_eq!((reply.status, reply.is_whole), (200, false));
    let rest = reply.text().strip_prefix(EVENT).expect("what had come");
    let error = rest.trim().strip_prefix("data: ").expect("an event");
    let error: serde_json::Value = serde_json::from_str(error).expect("JSON");
    assert_eq!(error["error"]["code"], "engine_failed");
    assert!(other.seen().is_empty(), "nothing is sent again after the first byte");
    gateway.settles().await;
    assert_eq!(gateway.choice.lines(), ["prefilled", "progress 1", "freed"]);
}

#[tokio::test]
async fn an_engine_that_lies_about_its_length_is_no_whole_reply() {
    let lying = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{\"a\":1}";
    let engine = EngineDouble::start(Behaviour::AnswerAndClose(lying.into())).await;
    let gateway = Gateway::start(&[&engine]).await;
    let reply = exchange(gateway.address, &chat()).await;
    assert_eq!((reply.status, reply.is_whole), (200, false));
    gateway.settles().await;
    assert!(gateway.metrics.text("").contains("replies_ended_total{reason=\"engine\"} 1"));
}

#[tokio::test]
async fn an_engine_that_speaks_nonsense_is_a_bad_gateway() {
    let engine = EngineDouble::start(Behaviour::AnswerAndClose(b"\x00\x01nonsense\r\n\r\n".to_vec())).await;
    let gateway = Gateway::start(&[&engine]).await;
    let reply = exchange(gateway.address, &chat()).await;
    assert_eq!((reply.status, reply.code().as_str()), (502, "engine_failed"));
    gateway.settles().await;
}

#[tokio::test]
async fn an_engine_that_hangs_is_a_timeout() {
    let engine = EngineDouble::start(Behaviour::Hang).await;
    let gateway = Gateway::with(&[&engine], |config| {
        config.deadlines.first_byte = Duration::from_millis(50);
        config.deadlines.total = Duration::from_secs(600);
    })
    .await;
    let reply = exchange(gateway.address, &streamed_chat()).await;
    assert_eq!((reply.status, reply.code().as_str()), (504, "engine_timeout"));
    // On a busy machine the time may be up before the request reaches the engine.
    until("the engine is left", || engine.left() == engine.seen().len()).await;
    gateway.settles().await;
}

#[tokio::test]
async fn a_stream_beyond_its_time_ends_with_an_error() {
    let engine = EngineDouble::start(Behaviour::Endless).await;
    let gateway = Gateway::with(&[&engine], |config| config.deadlines.total = Duration::from_millis(200)).await;
    let reply = exchange(gateway.address, &streamed_chat()).await;
    assert_eq!((reply.status, reply.is_whole), (200, false));
    assert!(reply.text().contains("\"code\":\"deadline_exceeded\""), "{}", reply.text());
    until("the engine is left", || engine.left() == 1).await;
    gateway.settles().await;
}

// ---- callers that misbehave ----------------------------------------------------------------------------------------

#[tokio::test]
async fn bad_bodies_are_refused_before_any_engine_sees_them() {
    let engine = answering(COMPLETION).await;
    let gateway = Gateway::with(&[&engine], |config| config.bounds.body_bytes_max = 1024).await;
    let long = format!("{{\"model\":\"m\",\"messages\":[\"{}\"]}}", "x".repeat(2000));
    for (body, status, code) in [
        ("{", 400, "invalid_json"),
        ("", 400, "invalid_json"),
        ("[1]", 400, "invalid_json"),
        ("{\"model\":\"m\",\"messages\":5}", 400, "invalid_type"),
        ("{\"model\":7,\"messages\":[]}", 400, "invalid_type"),
        ("{\"model\":\"other\",\"messages\":[]}", 404, "model_not_found"),
        (long.as_str(), 413, "body_too_large"),
    ] {
        let reply = exchange(gateway.address, &post(CHAT_PATH, "", body)).await;
        assert_eq!((reply.status, reply.code().as_str()), (status, code), "{body}");
    }
    let mut chunked =
        format!("POST {CHAT_PATH} HTTP/1.1\r\nhost: g\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n");
    chunked.push_str(&format!("{:x}\r\n{long}\r\n0\r\n\r\n", long.len()));
    let reply = exchange(gateway.address, chunked.as_bytes()).await;
    assert_eq!((reply.status, reply.code().as_str()), (413, "body_too_large"));
    let bad_header = post(CHAT_PATH, "x-kvrouted-priority: high\r\n", CHAT);
    assert_eq!(exchange(gateway.address, &bad_header).await.code(), "invalid_header");
    assert!(engine.seen().is_empty());
    assert!(gateway.choice.lines().is_empty());
    gateway.settles().await;
}

#[tokio::test]
async fn header_bombs_are_refused() {
    let engine = answering(COMPLETION).await;
    let gateway = Gateway::with(&[&engine], |config| config.bounds.header_bytes_max = 8192).await;
    let one_long = format!("x-long: {}\r\n", "x".repeat(100_000));
    assert_eq!(exchange(gateway.address, &post(CHAT_PATH, &one_long, CHAT)).await.status, 431);
    let many: String = (0..500).map(|at| format!("x-{at}: 1\r\n")).collect();
    assert_eq!(exchange(gateway.address, &post(CHAT_PATH, &many, CHAT)).await.status, 431);
    assert!(engine.seen().is_empty());
    assert_eq!(exchange(gateway.address, &chat()).await.status, 200);
}

#[tokio::test]
async fn a_caller_that_sends_less_than_it_says_costs_nothing() {
    let engine = answering(COMPLETION).await;
    let gateway = Gateway::start(&[&engine]).await;
    let mut stream = TcpStream::connect(gateway.address).await.expect("a connection");
    let lying = format!("POST {CHAT_PATH} HTTP/1.1\r\nhost: g\r\ncontent-length: 1000\r\n\r\n{CHAT}");
    stream.write_all(lying.as_bytes()).await.expect("sent");
    drop(stream);
    gateway.settles().await;
    // One that sends more: the rest is no request.
    let lying =
        format!("POST {CHAT_PATH} HTTP/1.1\r\nhost: g\r\ncontent-length: {}\r\n\r\n{CHAT}rubbish\r\n\r\n", CHAT.len());
    let mut stream = TcpStream::connect(gateway.address).await.expect("a connection");
    stream.write_all(lying.as_bytes()).await.expect("sent");
    let mut all = Vec::new();
    let _ = ends("the replies", stream.read_to_end(&mut all)).await;
    assert!(all.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&all));
    assert_eq!(engine.seen().len(), 1);
    gateway.settles().await;
}

#[tokio::test]
async fn slow_callers_are_cut_off() {
    let engine = answering(COMPLETION).await;
    let gateway = Gateway::with(&[&engine], |config| {
        config.deadlines.header = Duration::from_millis(100);
        config.deadlines.body = Duration::from_millis(100);
    })
    .await;
    // A body that never ends.
    let mut stream = TcpStream::connect(gateway.address).await.expect("a connection");
    let slow = format!("POST {CHAT_PATH} HTTP/1.1\r\nhost: g\r\nconnection: close\r\ncontent-length: 1000\r\n\r\n{{");
    stream.write_all(slow.as_bytes()).await.expect("sent");
    let reply = read_reply(&mut stream).await;
    assert_eq!((reply.status, reply.code().as_str()), (408, "body_timeout"));
    // Headers that never end, no bytes at all, and half of HTTP/2's preface.
    for bytes in ["POST / HTTP/1.1\r\nhost:", "", "PRI * HTTP"] {
        let mut stream = TcpStream::connect(gateway.address).await.expect("a connection");
        stream.write_all(bytes.as_bytes()).await.expect("sent");
        let mut all = Vec::new();
        let _ = ends("a connection without a request", stream.read_to_end(&mut all)).await;
    }
    assert!(engine.seen().is_empty());
    gateway.settles().await;
}

#[tokio::test]
async fn a_caller_that_hangs_up_cancels_its_request() {
    for behaviour in [Behaviour::Hang, Behaviour::Endless] {
        let engine = EngineDouble::start(behaviour.clone()).await;
        let gateway = Gateway::start(&[&engine]).await;
        let mut stream = TcpStream::connect(gateway.address).await.expect("a connection");
        stream.write_all(&streamed_chat()).await.expect("sent");
        until("the engine has the request", || engine.seen().len() == 1).await;
        if matches!(behaviour, Behaviour::Endless) {
            let mut some = [0; 64];
            ends("the first bytes", stream.read_exact(&mut some)).await.expect("bytes");
        }
        drop(stream);
        until("the engine is left", || engine.left() == 1).await;
        gateway.settles().await;
        assert_eq!(gateway.choice.lines().last().map(String::as_str), Some("freed"), "{behaviour:?}");
        assert!(gateway.metrics.text("").contains("replies_ended_total{reason=\"hung_up\"} 1"), "{behaviour:?}");
    }
}

#[tokio::test]
async fn a_caller_that_reads_nothing_slows_its_engine_and_is_cut_off() {
    let engine = EngineDouble::start(Behaviour::Flood).await;
    let gateway = Gateway::with(&[&engine], |config| config.deadlines.stall = Duration::from_millis(500)).await;
    let mut stream = TcpStream::connect(gateway.address).await.expect("a connection");
    stream.write_all(&streamed_chat()).await.expect("sent");
    until("the caller is cut off", || engine.left() == 1).await;
    // Buffers of the kernel and two parts of the relay; without back-pressure it would be gigabytes.
    assert!(engine.sent_bytes() < 64 << 20, "{} bytes", engine.sent_bytes());
    gateway.settles().await;
    assert!(gateway.metrics.text("").contains("replies_ended_total{reason=\"stalled\"} 1"));
    until("the connection is closed", || gateway.metrics.text("").contains("kvrouted_gateway_connections 0\n")).await;
}

#[tokio::test]
async fn while_memory_is_short_new_requests_and_picks_are_refused_and_those_under_way_go_on() {
    let engine = answering(COMPLETION).await;
    let gateway = Gateway::start(&[&engine]).await;
    let used = |percent: u64| gateway.memory.look(MEMORY_BYTES / 100 * percent);
    used(91);
    assert_eq!(exchange(gateway.address, &chat()).await.status, 200, "at first only the cache is given up");
    used(93);
    for (address, request) in [(gateway.address, chat()), (gateway.pick, post("/pick", "", CHAT))] {
        let reply = exchange(address, &request).await;
        assert_eq!((reply.status, reply.code().as_str()), (503, "memory_short"));
        assert_eq!(reply.headers["retry-after"], "1");
    }
    assert!(gateway.metrics.text("").contains("kvrouted_gateway_refused_total{reason=\"memory_short\"} 2\n"));
    for _ in 0..20 {
        used(88);
    }
    assert_eq!(exchange(gateway.address, &chat()).await.status, 503, "not before there is room");
    for _ in 0..20 {
        used(10);
    }
    assert_eq!(exchange(gateway.address, &chat()).await.status, 200);
}

#[tokio::test]
async fn only_so_many_requests_are_under_way() {
    let engine = EngineDouble::start(Behaviour::Hang).await;
    let gateway = Gateway::with(&[&engine], |config| config.bounds.requests_max = 1).await;
    let mut stream = TcpStream::connect(gateway.address).await.expect("a connection");
    stream.write_all(&chat()).await.expect("sent");
    until("the engine has the request", || engine.seen().len() == 1).await;
    let reply = exchange(gateway.address, &chat()).await;
    assert_eq!((reply.status, reply.code().as_str()), (503, "overloaded"));
    assert_eq!(reply.headers["retry-after"], "1");
    drop(stream);
    gateway.settles().await;
    engine.behave(Behaviour::Answer(json(200, COMPLETION)));
    assert_eq!(exchange(gateway.address, &chat()).await.status, 200);
}

#[tokio::test]
async fn bodies_that_are_announced_and_never_sent_keep_no_other_body_out() {
    let engine = answering(COMPLETION).await;
    let gateway = Gateway::with(&[&engine], |config| {
        config.bounds.body_bytes_max = 64 << 10;
        config.bounds.bodies_bytes_max = 64 << 10;
    })
    .await;
    let mut stream = TcpStream::connect(gateway.address).await.expect("a connection");
    let announced = format!("POST {CHAT_PATH} HTTP/1.1\r\nhost: g\r\ncontent-length: 65536\r\n\r\n{{");
    stream.write_all(announced.as_bytes()).await.expect("sent");
    let is_under_way = || gateway.metrics.text("").contains("kvrouted_gateway_requests_in_flight 1\n");
    until("the gateway waits for the body", is_under_way).await;
    assert_eq!(exchange(gateway.address, &chat()).await.status, 200);
    // Those that come take their part of the budget.
    let rest = " ".repeat(60 << 10);
    stream.write_all(rest.as_bytes()).await.expect("sent");
    let large = post(CHAT_PATH, "", &CHAT.replacen('{', &format!("{{{}", " ".repeat(8 << 10)), 1));
    let mut refused = None;
    for _ in 0..400 {
        let reply = exchange(gateway.address, &large).await;
        refused = (reply.status == 503).then(|| reply.code());
        if refused.is_some() {
            break;
        }
    }
    assert_eq!(refused.as_deref(), Some("overloaded"));
    drop(stream);
    gateway.settles().await;
    assert_eq!(exchange(gateway.address, &large).await.status, 200);
}

// ---- keys ----------------------------------------------------------------------------------------------------------

#[tokio::test]
async fn callers_need_a_key_and_engines_never_see_it() {
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    // printf %s secret | sha256sum
    let sha256 = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";
    let text = format!(
        "[[key]]\nname = \"team\"\nsha256 = \"{sha256}\"\nrequests_per_minute = 2\nburst = 2\npriority_max = 1"
    );
    file.write_all(text.as_bytes()).expect("written");
    let engine = answering(COMPLETION).await;
    let gateway = Gateway::with(&[&engine], |config| config.caller_keys = Some(file.path().to_owned())).await;
    let reply = exchange(gateway.address, &chat()).await;
    assert_eq!((reply.status, reply.code().as_str()), (401, "missing_api_key"));
    let wrong = post(CHAT_PATH, "authorization: Bearer wrong\r\n", CHAT);
    assert_eq!(exchange(gateway.address, &wrong).await.code(), "invalid_api_key");
    let hints = "x-kvrouted-priority: 9\r\nx-gateway-inference-fairness-id: other\r\n";
    let good = post(CHAT_PATH, &format!("authorization: Bearer secret\r\n{hints}"), CHAT);
    assert_eq!(exchange(gateway.address, &good).await.status, 200);
    assert_eq!(gateway.choice.asked(), ["1 None Some(\"team\")"]);
    assert_eq!(engine.seen()[0].header("authorization"), None);
    assert_eq!(exchange(gateway.address, &good).await.status, 200);
    let reply = exchange(gateway.address, &good).await;
    assert_eq!((reply.status, reply.code().as_str()), (429, "rate_limit"));
    assert!(reply.headers.contains_key("retry-after"));
    gateway.settles().await;
}

// ---- the pick port and the operator's ------------------------------------------------------------------------------

#[tokio::test]
async fn other_proxies_pick_and_tell_the_end() {
    let (first, second) = (answering("{}").await, answering("{}").await);
    let gateway = Gateway::start(&[&first, &second]).await;
    let pick = |id: &str| post("/pick", &format!("x-request-id: {id}\r\nx-kvrouted-path: {CHAT_PATH}\r\n"), CHAT);
    let reply = exchange(gateway.pick, &pick("p-1")).await;
    let answer: serde_json::Value = serde_json::from_slice(&reply.body).expect("JSON");
    let endpoints = [first.address.to_string(), second.address.to_string()];
    assert_eq!((reply.status, &answer["id"], &answer["first"]), (200, &"p-1".into(), &"1".into()));
    assert_eq!(answer["endpoints"], serde_json::json!(endpoints));
    assert_eq!(
        (reply.headers["x-first"].as_str(), reply.headers["x-endpoints"].as_str()),
        ("1", endpoints.join(",").as_str())
    );
    assert_eq!(gateway.choice.open(), 1);
    let served = format!("{{\"id\":\"p-1\",\"worker\":\"{}\"}}", second.address);
    assert_eq!(exchange(gateway.pick, &post("/prefilled", "", &served)).await.status, 200);
    let end = "{\"id\":\"p-1\",\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":2,\"cached_tokens\":8}}";
    assert_eq!(exchange(gateway.pick, &post("/end", "", end)).await.status, 200);
    assert_eq!(gateway.choice.open(), 0);
    let lines = ["served 2/0", "prefilled", "usage 2/0 9 Some(8) 2", "freed"];
    assert_eq!(gateway.choice.lines(), lines);
    let again = exchange(gateway.pick, &post("/end", "", end)).await;
    assert_eq!((again.status, again.code().as_str()), (404, "unknown_pick"));
    assert_eq!(exchange(gateway.pick, &post("/pick", "", "{")).await.code(), "invalid_json");
    assert_eq!(exchange(gateway.pick, &post("/end", "", "{}")).await.code(), "invalid_json");
    assert!(first.seen().is_empty() && second.seen().is_empty());
}

#[tokio::test]
async fn an_access_log_ends_picks() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("log");
    let engine = answering("{}").await;
    let gateway = Gateway::start(&[&engine]).await;
    let (stop, stopping) = tokio::sync::watch::channel(false);
    let reading = tokio::spawn({
        let socket = LogSocket::unix(&path, 0o660).expect("a socket");
        read_log(socket, Arc::clone(&gateway.picks), stopping)
    });
    assert_eq!(exchange(gateway.pick, &post("/pick", "x-request-id: p-2\r\n", CHAT)).await.status, 200);
    assert_eq!(gateway.choice.open(), 1);
    let socket = tokio::net::UnixDatagram::unbound().expect("a socket");
    for line in [&b"\xff nonsense"[..], b"<134>done id=other server=1", b"<134>done id=p-2 server=1 code=200"] {
        socket.send_to(line, &path).await.expect("sent");
    }
    until("the pick ends", || gateway.choice.open() == 0).await;
    stop.send(true).expect("a reader");
    ends("the reader", reading).await.expect("no panic");
    assert!(!path.exists());
}

#[tokio::test]
async fn log_lines_tell_who_failed_and_who_serves() {
    let (first, second) = (answering("{}").await, answering("{}").await);
    let gateway = Gateway::start(&[&first, &second]).await;
    let (stop, stopping) = tokio::sync::watch::channel(false);
    let socket = LogSocket::udp(SocketAddr::from(([127, 0, 0, 1], 0))).await.expect("a socket");
    let to = socket.address().expect("its address");
    let reading = tokio::spawn(read_log(socket, Arc::clone(&gateway.picks), stopping));
    let from = tokio::net::UdpSocket::bind("127.0.0.1:0").await.expect("a socket");
    let reply = exchange(gateway.pick, &post("/pick", "x-request-id: p-4\r\n", CHAT)).await;
    assert_eq!((reply.headers["x-workers"].as_str(), reply.headers["x-ranks"].as_str()), ("1/0,2/0", "-,-"));
    from.send_to(b"prefilled=p-4 worker=2/0", to).await.expect("sent");
    until("the second engine serves", || gateway.choice.has("prefilled")).await;
    // An engine that is not of the list cannot fail for it.
    let end = format!("<190>x: id=p-4 failed={} failed=10.0.0.1:1 status=200", first.address);
    from.send_to(end.as_bytes(), to).await.expect("sent");
    until("the pick ends", || gateway.choice.open() == 0).await;
    until("the failure is reported", || gateway.choice.lines().len() == 4).await;
    let mut lines = gateway.choice.lines();
    lines.sort_unstable();
    assert_eq!(lines, ["failure 1/0 m proxy", "freed", "prefilled", "served 2/0"]);
    stop.send(true).expect("a reader");
    ends("the reader", reading).await.expect("no panic");
}

#[tokio::test]
async fn the_operators_port_tells_what_there_is() {
    let engine = answering(COMPLETION).await;
    let gateway = Gateway::start(&[&engine]).await;
    assert_eq!(exchange(gateway.address, &chat()).await.status, 200);
    gateway.settles().await;
    let metrics = exchange(gateway.admin, &get("/metrics")).await;
    for line in [
        "kvrouted_gateway_requests_total{path=\"chat_completions\",status=\"200\"} 1",
        "kvrouted_gateway_cached_tokens_total 8",
        "kvrouted_gateway_replies_ended_total{reason=\"whole\"} 1",
    ] {
        assert!(metrics.text().contains(line), "{line} is missing in\n{}", metrics.text());
    }
    assert_eq!(exchange(gateway.admin, &get("/health")).await.status, 200);
    assert_eq!(exchange(gateway.admin, &get("/ready")).await.status, 200);
    assert!(exchange(gateway.admin, &get("/findings")).await.text().contains("a finding"));
    assert_eq!(exchange(gateway.admin, &get("/other")).await.status, 404);
    let _ = gateway.stop.send(true);
    let ready = exchange(gateway.admin, &get("/ready")).await;
    assert_eq!((ready.status, ready.text().contains("stopping")), (503, true));
}

// ---- the end -------------------------------------------------------------------------------------------------------

#[tokio::test]
async fn a_stop_finishes_what_is_under_way_and_takes_nothing_new() {
    let engine = EngineDouble::start(Behaviour::Slow(Duration::from_millis(300))).await;
    let gateway = Gateway::start(&[&engine]).await;
    let address = gateway.address;
    let running = tokio::spawn(async move { exchange(address, &streamed_chat()).await });
    until("the engine has the request", || engine.seen().len() == 1).await;
    let choice = gateway.choice.clone();
    gateway.stops().await;
    assert!(TcpStream::connect(address).await.is_err());
    let reply = running.await.expect("no panic");
    assert_eq!((reply.text(), reply.is_whole), ([EVENT, DONE].concat().as_str(), true));
    assert_eq!(choice.open(), 0);
}

#[tokio::test]
async fn a_stop_cuts_off_what_takes_too_long() {
    let engine = EngineDouble::start(Behaviour::Endless).await;
    let gateway = Gateway::with(&[&engine], |config| config.deadlines.drain = Duration::from_millis(100)).await;
    let mut stream = TcpStream::connect(gateway.address).await.expect("a connection");
    stream.write_all(&streamed_chat()).await.expect("sent");
    until("the engine has the request", || engine.seen().len() == 1).await;
    let choice = gateway.choice.clone();
    gateway.stops().await;
    until("the engine is left", || engine.left() == 1).await;
    until("the booking is freed", || choice.open() == 0).await;
}

#[tokio::test]
async fn a_unix_socket_is_replaced_only_where_nobody_listens() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("pick.sock");
    let engine = answering("{}").await;
    let gateway = Gateway::start(&[&engine]).await;
    let (stop, stopping) = tokio::sync::watch::channel(false);
    // What a process left that was killed.
    drop(std::os::unix::net::UnixListener::bind(&path).expect("a socket"));
    let socket = Socket::unix(&path, 0o600).await.expect("nobody listens");
    assert_eq!(std::fs::metadata(&path).expect("a file").permissions().mode() & 0o777, 0o600);
    let config = config(&[engine.url()]);
    let bounds = ConnectionBounds::of(&config.bounds, config.deadlines.header);
    let serving = serve(
        socket,
        Arc::clone(&gateway.picks),
        bounds,
        Arc::clone(&gateway.metrics),
        stopping,
        Duration::from_secs(1),
    );
    let serving = tokio::spawn(serving);
    assert!(Socket::unix(&path, 0o600).await.is_err(), "another process listens");
    let mut stream = tokio::net::UnixStream::connect(&path).await.expect("a connection");
    stream.write_all(&post("/pick", "x-request-id: p-3\r\n", CHAT)).await.expect("sent");
    assert_eq!(read_reply(&mut stream).await.status, 200);
    stop.send(true).expect("a listener");
    ends("the listener", serving).await.expect("no panic");
    assert!(!path.exists());
    std::fs::write(&path, "a file").expect("written");
    assert!(Socket::unix(&path, 0o600).await.is_err(), "a file is not replaced");
}
