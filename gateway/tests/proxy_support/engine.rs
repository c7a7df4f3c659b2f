//! An engine that behaves as told, byte by byte.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::caller::unchunk;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// What the engine does with a request for inference.
#[derive(Clone, Debug)]
pub(crate) enum Behaviour {
    /// Answers these bytes and keeps the connection.
    Answer(Vec<u8>),
    /// Answers these bytes and closes the connection.
    AnswerAndClose(Vec<u8>),
    /// Closes the connection without an answer.
    Close,
    /// Closes the connection as [`Behaviour::Close`], and answers `/health`.
    CloseAlive,
    /// Answers nothing until the caller leaves.
    Hang,
    /// Sends the head of a stream and then events, until the caller leaves.
    Endless,
    /// Sends a stream as fast as it is taken.
    Flood,
    /// Sends the head and first event of a stream, and then nothing until the caller leaves.
    Held,
    /// Sends the head and first event of a stream, waits, and ends it well.
    Slow(Duration),
}

/// A request as it came.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    /// Request line and headers.
    pub(crate) head: String,
    /// The body.
    pub(crate) body: Vec<u8>,
}

impl Seen {
    /// A header's value.
    pub(crate) fn header(&self, name: &str) -> Option<String> {
        let lines = self.head.lines().skip(1).filter_map(|line| line.split_once(": "));
        lines.into_iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.to_owned())
    }
}

#[derive(Default)]
struct Log {
    seen: Mutex<Vec<Seen>>,
    left: AtomicUsize,
    sent_bytes: AtomicUsize,
}

/// An engine that serves the model `m`.
pub(crate) struct EngineDouble {
    /// Where it listens.
    pub(crate) address: SocketAddr,
    behaviour: Arc<Mutex<Behaviour>>,
    log: Arc<Log>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for EngineDouble {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl EngineDouble {
    pub(crate) async fn start(behaviour: Behaviour) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("its address");
        let behaviour = Arc::new(Mutex::new(behaviour));
        let log = Arc::new(Log::default());
        let task = tokio::spawn({
            let (behaviour, log) = (Arc::clone(&behaviour), Arc::clone(&log));
            async move {
                let mut connections = tokio::task::JoinSet::new();
                loop {
                    let Ok((stream, _)) = listener.accept().await else { return };
                    connections.spawn(converse(stream, Arc::clone(&behaviour), Arc::clone(&log)));
                }
            }
        });
        Self { address, behaviour, log, task }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn behave(&self, behaviour: Behaviour) {
        *self.behaviour.lock() = behaviour;
    }

    /// The requests for inference so far.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.log.seen.lock().clone()
    }

    /// How many callers left before the end of their answer.
    pub(crate) fn left(&self) -> usize {
        self.log.left.load(Ordering::SeqCst)
    }

    pub(crate) fn sent_bytes(&self) -> usize {
        self.log.sent_bytes.load(Ordering::SeqCst)
    }
}

async fn converse(mut stream: TcpStream, behaviour: Arc<Mutex<Behaviour>>, log: Arc<Log>) {
    while let Some(seen) = read_request(&mut stream).await {
        let line = seen.head.lines().next().unwrap_or_default().to_owned();
        let lives = line.starts_with("GET /health ") && matches!(*behaviour.lock(), Behaviour::CloseAlive);
        if let Some(answer) = lives.then(|| json(200, "")).or_else(|| about_itself(&line)) {
            if stream.write_all(&answer).await.is_err() {
                return;
            }
            continue;
        }
        log.seen.lock().push(seen);
        let behaviour = behaviour.lock().clone();
        match behaviour {
            Behaviour::Answer(bytes) => {
                if stream.write_all(&bytes).await.is_err() {
                    return;
                }
            }
            Behaviour::AnswerAndClose(bytes) => {
                let _ = stream.write_all(&bytes).await;
                let _ = stream.shutdown().await;
                return;
            }
            Behaviour::Close | Behaviour::CloseAlive => return,
            Behaviour::Hang => {
                until_left(&mut stream, &log).await;
                return;
            }
            Behaviour::Endless => {
                let _ = stream.write_all(SSE_HEAD).await;
                loop {
                    if stream.write_all(&chunk(EVENT)).await.is_err() {
                        log.left.fetch_add(1, Ordering::SeqCst);
                        return;
                    }
                    let waited = tokio::time::timeout(Duration::from_millis(5), until_left(&mut stream, &log)).await;
                    if waited.is_ok() {
                        return;
                    }
                }
            }
            Behaviour::Held => {
                let _ = stream.write_all(SSE_HEAD).await;
                let _ = stream.write_all(&chunk(EVENT)).await;
                until_left(&mut stream, &log).await;
                return;
            }
            Behaviour::Flood => {
                let _ = stream.write_all(SSE_HEAD).await;
                let part = chunk(&format!("data: {}\n\n", "x".repeat(64 << 10)));
                while stream.write_all(&part).await.is_ok() {
                    log.sent_bytes.fetch_add(part.len(), Ordering::SeqCst);
                }
                log.left.fetch_add(1, Ordering::SeqCst);
                return;
            }
            Behaviour::Slow(pause) => {
                let _ = stream.write_all(SSE_HEAD).await;
                let _ = stream.write_all(&chunk(EVENT)).await;
                tokio::time::sleep(pause).await;
                let _ = stream.write_all(&chunk("data: [DONE]\n\n")).await;
                let _ = stream.write_all(b"0\r\n\r\n").await;
            }
        }
    }
}

async fn until_left(stream: &mut TcpStream, log: &Log) {
    let mut byte = [0];
    // A caller sends nothing more: whatever comes is its end.
    let _ = stream.read(&mut byte).await;
    log.left.fetch_add(1, Ordering::SeqCst);
}

fn about_itself(line: &str) -> Option<Vec<u8>> {
    if line.starts_with("GET /v1/models ") {
        let models = r#"{"object":"list","data":[{"id":"m","object":"model","owned_by":"vllm","max_model_len":4096}]}"#;
        return Some(json(200, models));
    }
    if line.starts_with("GET /version ") {
        return Some(json(200, r#"{"version":"0.32.0"}"#));
    }
    let is_inference = line.starts_with("POST /v1/") || line.starts_with("POST /generate") || line.contains(" /custom");
    (!is_inference || line.contains("/render")).then(|| json(404, "{}"))
}

async fn read_request(stream: &mut TcpStream) -> Option<Seen> {
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break end + 4;
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    };
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let mut body = bytes.split_off(end);
    let seen = Seen { head, body: Vec::new() };
    if seen.header("transfer-encoding").is_some() {
        loop {
            if let (body, Some(_)) = unchunk(&body) {
                return Some(Seen { body, ..seen });
            }
            if stream.read_buf(&mut body).await.ok()? == 0 {
                return None;
            }
        }
    }
    let length: usize = seen.header("content-length").map_or(0, |text| text.parse().expect("a length"));
    while body.len() < length {
        if stream.read_buf(&mut body).await.ok()? == 0 {
            return None;
        }
    }
    Some(Seen { body, ..seen })
}

/// An event of a chat stream.
pub(crate) const EVENT: &str = "data: {\"id\":\"1\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n";
/// The usage chunk of a chat stream.
pub(crate) const USAGE_EVENT: &str = "data: {\"id\":\"1\",\"choices\":[],\"usage\":{\"prompt_tokens\":9,\
    \"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":8}}}\n\n";
/// The head of a stream.
pub(crate) const SSE_HEAD: &[u8] =
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";

pub(crate) fn chunk(text: &str) -> Vec<u8> {
    format!("{:x}\r\n{text}\r\n", text.len()).into_bytes()
}

/// A whole stream of events.
pub(crate) fn stream(events: &[&str]) -> Vec<u8> {
    let mut bytes = SSE_HEAD.to_vec();
    for event in events {
        bytes.extend(chunk(event));
    }
    bytes.extend_from_slice(b"0\r\n\r\n");
    bytes
}

pub(crate) fn json(status: u16, text: &str) -> Vec<u8> {
    let head =
        format!("HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n", text.len());
    [head.as_bytes(), text.as_bytes()].concat()
}

/// A whole reply with usage.
pub(crate) const COMPLETION: &str = "{\"id\":\"1\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\
    \"content\":\"hi\"}}],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":2,\
    \"prompt_tokens_details\":{\"cached_tokens\":8}}}";
