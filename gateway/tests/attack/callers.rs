//! Callers of the gateway. They are too slow or too many. They send requests that two readers could read differently, headers
//! that are not theirs to set, and bodies that a parser could blow up.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::json;

use crate::attackers::{Attackers, Orders, Role};
use crate::http1::{
    Request, answer, answer_as_engine, ask, chat, connect, counted, header, listen, post, posted, reply,
};
use crate::scene::Scene;
use crate::trial::Trial;

pub(crate) const ROLES: &[(&str, Role)] = &[
    ("send_slow_chunks", send_slow_chunks),
    ("send_slow_headers", send_slow_headers),
    ("connect_and_wait", connect_and_wait),
    ("smuggle", smuggle),
    ("forge_headers", forge_headers),
    ("post_hostile_bodies", post_hostile_bodies),
    ("post_wide_prompts", post_wide_prompts),
    ("never_read_streams", never_read_streams),
];

const CHATS: &str = "/v1/chat/completions";
/// A caller that waits this long has no answer.
const ANSWER: Duration = Duration::from_secs(10);

pub(crate) fn slow_chunks(trial: &mut Trial) {
    let Some(scene) = Scene::proxy("deadlines.body_ms = 1000\n", &[]) else { return };
    scene.attacked_by(trial, "send_slow_chunks", 2).end(trial);
    let late = counted(&scene.admin, "kvrouted_gateway_refused_total", "body_timeout");
    trial.must_count("refused: body_timeout", late, 190);
    scene.end(trial, 160);
}

fn send_slow_chunks(orders: &mut Orders) {
    let mut streams: Vec<TcpStream> = (0..100).filter_map(|_| connect(&orders.at, ANSWER).ok()).collect();
    let head = format!("{}transfer-encoding: chunked\r\n\r\n", post(CHATS));
    streams.retain_mut(|stream| stream.write_all(head.as_bytes()).is_ok());
    orders.count("callers", streams.len() as u64);
    for _ in 0..100 {
        streams.retain_mut(|stream| stream.write_all(b"1\r\n{\r\n").is_ok());
        if streams.is_empty() {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

pub(crate) fn slow_headers(trial: &mut Trial) {
    let Some(scene) = Scene::proxy("deadlines.header_ms = 1000\n", &[]) else { return };
    scene.attacked_by(trial, "send_slow_headers", 1).end(trial);
    let closed = trial.counted("closed by the gateway");
    trial.must(closed == 300, || format!("{closed} callers of 300 were closed"));
    scene.end(trial, 160);
}

/// Slow from the first byte, slow after a few headers, and slow in the preface of HTTP/2.
fn send_slow_headers(orders: &mut Orders) {
    let beginnings: [&[u8]; 3] = [b"P", b"POST /v1/models HTTP/1.1\r\nhost: a\r\nx: ", b"PRI * HTTP/2.0\r\n"];
    let mut streams = Vec::new();
    for beginning in beginnings.iter().cycle().take(300) {
        let mut stream = connect(&orders.at, ANSWER).expect("a connection");
        stream.write_all(beginning).expect("sent");
        streams.push(stream);
    }
    for _ in 0..200 {
        let before = streams.len();
        streams.retain_mut(|stream| stream.write_all(b"y").is_ok());
        orders.count("closed by the gateway", (before - streams.len()) as u64);
        if streams.is_empty() {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

pub(crate) fn idle_connections(trial: &mut Trial) {
    let tables = "bounds.connections_max = 256\ndeadlines.header_ms = 1000\n";
    let Some(scene) = Scene::proxy(tables, &[]) else { return };
    scene.attacked_by(trial, "connect_and_wait", 1).end(trial);
    // They have waited in the kernel's queue, and a new caller after them.
    scene.end(trial, 160);
}

fn connect_and_wait(orders: &mut Orders) {
    let streams: Vec<TcpStream> = (0..600).filter_map(|_| connect(&orders.at, ANSWER).ok()).collect();
    orders.count("connections", streams.len() as u64);
    let mut caller = connect(&orders.at, Duration::from_secs(30)).expect("a connection");
    let answer = ask(&mut caller, &posted(CHATS, chat("demo", "Me too.", false).to_string().as_bytes()));
    orders.count("callers behind them that were answered", u64::from(answer.is_ok_and(|reply| reply.status == 200)));
    orders.hold();
}

/// An engine that answers each chat and keeps what it got, byte for byte.
struct Recorder {
    url: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Recorder {
    fn start(model: &'static str) -> Self {
        let (listener, url) = listen();
        let requests: Arc<Mutex<Vec<Request>>> = Arc::default();
        let kept = Arc::clone(&requests);
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let kept = Arc::clone(&kept);
                // A connection that ends ends its thread.
                std::thread::spawn(move || while record(&mut stream, model, &kept).is_ok() {});
            }
        });
        Self { url, requests }
    }

    /// The chats that it got.
    fn chats(&self) -> Vec<Request> {
        let requests = self.requests.lock().expect("no panic");
        requests.iter().filter(|request| request.head.starts_with("POST /v1/chat/completions HTTP")).cloned().collect()
    }

    /// The heads of all others but the gateway's own questions about the engine.
    fn others(&self) -> Vec<String> {
        let known = ["GET /", "POST /tokenize", "POST /v1/chat/completions"];
        let requests = self.requests.lock().expect("no panic");
        let is_known = |head: &str| known.iter().any(|known| head.starts_with(known)) || head.contains("/render HTTP");
        requests.iter().map(|request| request.head.clone()).filter(|head| !is_known(head)).collect()
    }
}

/// Reads one request and answers it.
fn record(stream: &mut TcpStream, model: &str, kept: &Mutex<Vec<Request>>) -> std::io::Result<()> {
    let request = Request::read(stream)?;
    kept.lock().expect("no panic").push(request.clone());
    match request.path() {
        CHATS => answer(stream, 200, &json!({"choices": [{"message": {"content": "recorded"}}]})),
        path => answer_as_engine(stream, path, model),
    }
}

pub(crate) fn smuggled_requests(trial: &mut Trial) {
    let recorder = Recorder::start("recorded");
    let Some(scene) = Scene::proxy("", std::slice::from_ref(&recorder.url)) else { return };
    scene.attacked_by(trial, "smuggle", 1).end(trial);
    let chats = recorder.chats();
    trial.count("requests at the engine", chats.len() as u64);
    for Request { head, body } in &chats {
        let lengths = head.lines().filter(|line| line.to_ascii_lowercase().starts_with("content-length")).count();
        let is_clear = lengths == 1 && header(head, "transfer-encoding").is_none() && !head.contains('\0');
        trial.must(is_clear, || format!("a head that can be read in two ways: {head:?}"));
        trial.must(serde_json::from_slice::<serde_json::Value>(body).is_ok(), || format!("a cut body: {body:?}"));
    }
    trial.must(recorder.others().is_empty(), || format!("smuggled to the engine: {:?}", recorder.others()));
    let (answered, smuggled) = (trial.counted("answered with 200"), trial.counted("smuggled and answered"));
    trial.must(chats.len() as u64 <= answered + smuggled, || {
        format!("{} requests at the engine for {answered} answers", chats.len())
    });
    trial.must_count("refused", trial.counted("refused with 400"), 8);
    scene.end(trial, 160);
}

/// Requests whose body's length can be read in two ways. What stands behind a body is a request of its own, which the
/// gateway may answer as such; the engine must never see it as part of another.
fn smuggle(orders: &mut Orders) {
    let body = chat("recorded", "first", false).to_string();
    let behind = "POST /admin/delete HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n";
    let both = format!("{body}{behind}");
    let (length, whole) = (body.len(), both.len());
    let chunked = format!("{length:x}\r\n{body}\r\n0\r\n\r\n");
    let lines = |lines: &str, rest: &str| format!("{}{lines}\r\n\r\n{rest}", post(CHATS)).into_bytes();
    let requests = [
        // Two lengths; a length and chunks, either way round.
        lines(&format!("content-length: {length}\r\ncontent-length: {whole}"), &both),
        lines(&format!("content-length: {length}, {whole}"), &both),
        lines(
            &format!("content-length: {}\r\ntransfer-encoding: chunked", chunked.len() + 30),
            &format!("{chunked}{behind}"),
        ),
        lines(&format!("transfer-encoding: chunked\r\ncontent-length: {length}"), &format!("{chunked}{behind}")),
        lines("transfer-encoding: identity, chunked", &format!("{chunked}{behind}")),
        lines(&format!("transfer-encoding: chunked, identity\r\ncontent-length: {whole}"), &both),
        lines(&format!("transfer-encoding:\x0bchunked\r\ncontent-length: {whole}"), &both),
        lines(&format!("transfer-encoding : chunked\r\ncontent-length: {whole}"), &both),
        // Lines that are folded, end with a bare line feed, or hold a carriage return or a zero byte.
        lines(&format!("x: y\r\n content-length: 5\r\ncontent-length: {whole}"), &both),
        lines(&format!("x: y\ntransfer-encoding: chunked\r\ncontent-length: {whole}"), &both),
        lines(&format!("x: y\rcontent-length: 0\r\ncontent-length: {length}"), &both),
        lines(&format!("x: \0\r\ncontent-length: {length}"), &both),
        // Chunks with extensions, trailers, and lengths that are no lengths.
        lines("transfer-encoding: chunked", &format!("{length:x};a=\"\r\n\"\r\n{body}\r\n0\r\n\r\n{behind}")),
        lines("transfer-encoding: chunked", &format!("{length:x};{}\r\n{body}\r\n0\r\n\r\n", "e".repeat(100_000))),
        lines("transfer-encoding: chunked", &format!("{length:x}\r\n{body}\r\n0\r\ncontent-length: 9\r\n\r\n{behind}")),
        lines("transfer-encoding: chunked", &format!("{length:x}\r\n{body}\r\n0\r\n{}\r\n", "t: t\r\n".repeat(20_000))),
        lines("transfer-encoding: chunked", &format!("+{length:x}\r\n{body}\r\n0\r\n\r\n")),
        lines("transfer-encoding: chunked", &format!("ffffffffffffffff1\r\n{body}\r\n0\r\n\r\n")),
        lines("transfer-encoding: chunked", &format!("{length:x}\n{body}\n0\n\n{behind}")),
        // Targets that lead elsewhere.
        format!("POST http://other.example{CHATS} HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\n\r\n{body}")
            .into_bytes(),
        format!("POST {CHATS}\x01x HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\n\r\n{body}").into_bytes(),
        format!("POST {CHATS} HTTP/1.0\r\ntransfer-encoding: chunked\r\ncontent-length: {length}\r\n\r\n{chunked}")
            .into_bytes(),
    ];
    for request in &requests {
        let Ok(mut stream) = connect(&orders.at, Duration::from_millis(700)) else { continue };
        // The gateway may close before it has read all of it.
        let _ = stream.write_all(request);
        orders.count("requests", 1);
        match reply(&mut stream) {
            Ok(reply) if reply.status == 200 => orders.count("answered with 200", 1),
            Ok(reply) if reply.status == 400 => orders.count("refused with 400", 1),
            Ok(_) => orders.count("refused with another status", 1),
            Err(_) => orders.count("no answer", 1),
        }
        // What stood behind it is no path of the gateway.
        if let Ok(second) = reply(&mut stream) {
            orders.count(if second.status == 200 { "smuggled and answered" } else { "seen as another request" }, 1);
        }
    }
}

pub(crate) fn forged_headers(trial: &mut Trial) {
    let recorder = Recorder::start("recorded");
    let Some(scene) = Scene::proxy("", std::slice::from_ref(&recorder.url)) else { return };
    scene.attacked_by(trial, "forge_headers", 1).end(trial);
    let local = [
        "connection",
        "keep-alive",
        "proxy-authorization",
        "te",
        "upgrade",
        "x-hop",
        "x-kvrouted-worker",
        "x-data-parallel-rank",
        "x-kvrouted-priority",
        "expect",
        "proxy-connection",
    ];
    for Request { head, .. } in recorder.chats() {
        let passed: Vec<&str> = local.iter().copied().filter(|name| header(&head, name).is_some()).collect();
        // The gateway's own connection says so.
        let passed: Vec<&&str> = passed.iter().filter(|name| **name != "connection").collect();
        trial.must(passed.is_empty(), || format!("headers of the caller's connection at the engine: {passed:?}"));
        trial.must(head.lines().filter(|line| line.starts_with("host:")).count() == 1, || format!("hosts: {head:?}"));
        trial.count("requests at the engine", 1);
    }
    trial.must_count("refused", trial.counted("refused with 4xx"), 5);
    scene.end(trial, 160);
}

fn forge_headers(orders: &mut Orders) {
    let body = chat("recorded", "headers", false).to_string();
    let with =
        |lines: &str| format!("{}content-length: {}\r\n{lines}\r\n\r\n{body}", post(CHATS), body.len()).into_bytes();
    let hop =
        "connection: close, x-hop, x-request-id\r\nx-hop: 1\r\nkeep-alive: 5\r\nproxy-authorization: a\r\nte: gzip";
    let many: String = (0..5000).map(|at| format!("x-{at}: {at}\r\n")).collect();
    let requests = [
        with(hop),
        with(
            "proxy-connection: keep-alive\r\nx-kvrouted-worker: 9/9\r\nx-data-parallel-rank: 3\r\nexpect: 100-continue",
        ),
        with("x-gateway-destination-endpoint: 10.6.6.6:1\r\nx-request-id: a\tb\r\nx-kvrouted-session: s"),
        with("connection: upgrade\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__"),
        with("x-kvrouted-priority: 99999999999999"),
        with(&format!("x-kvrouted-session: {}", "s".repeat(60_000))),
        with(&format!("x-bomb: {}", "b".repeat(4 << 20))),
        with(many.trim_end()),
        with("x-zero: a\0b"),
        with("x name: a"),
        with(": empty"),
        with("host: other.example\r\nhost: third.example"),
    ];
    for request in &requests {
        let Ok(mut stream) = connect(&orders.at, ANSWER) else { continue };
        let _ = stream.write_all(request);
        orders.count("requests", 1);
        match reply(&mut stream) {
            Ok(reply) if reply.status == 200 => orders.count("answered with 200", 1),
            Ok(reply) if (400..500).contains(&reply.status) => orders.count("refused with 4xx", 1),
            Ok(_) => orders.count("refused with another status", 1),
            Err(_) => orders.count("closed", 1),
        }
    }
}

pub(crate) fn hostile_bodies(trial: &mut Trial) {
    let Some(scene) = Scene::proxy("", &[]) else { return };
    scene.attacked_by(trial, "post_hostile_bodies", 2).end(trial);
    trial.must_count("refused", trial.counted("refused with 4xx"), 10);
    // 8 bodies of 8 MiB from each process, what a parser makes of two at a time, and a copy on its way to an engine.
    scene.end(trial, 640);
}

fn bodies() -> Vec<Vec<u8>> {
    let large = 8 << 20;
    let around = |inside: String| format!("{{\"model\":\"demo\",\"messages\":{inside}}}").into_bytes();
    vec![
        around("[".repeat(large)),
        around(format!("[{}{{}}]", "{},".repeat(large / 3))),
        around(format!("[{{\"role\":\"user\",\"content\":{}1{}}}]", "[".repeat(100_000), "]".repeat(100_000))),
        format!("{{\"model\":\"demo\",\"prompt\":[{}1]}}", "9".repeat(300) + ",").into_bytes(),
        format!("{{\"model\":\"demo\",\"max_tokens\":{},\"messages\":[]}}", "9".repeat(large)).into_bytes(),
        format!("{{{}\"model\":\"demo\",\"messages\":[]}}", "\"model\":\"demo\",".repeat(large / 15)).into_bytes(),
        format!(
            "{{\"model\":\"demo\",\"messages\":[],{}\"a\":1}}",
            (0..500_000).map(|at| format!("\"{at}\":1,")).collect::<String>()
        )
        .into_bytes(),
        [b"{\"model\":\"demo\",\"messages\":[{\"content\":\"".to_vec(), vec![0xff; large], b"\"}]}".to_vec()].concat(),
        format!("{{\"model\":\"{}\",\"messages\":[]}}", "m".repeat(large)).into_bytes(),
        format!(
            "{{\"model\":\"\\ud800\\u0000\",\"messages\":[{{\"role\":\"user\",\"content\":\"{}\"}}]}}",
            "\\ud83d".repeat(large / 6)
        )
        .into_bytes(),
        // Compressed, by its first bytes.
        [&[0x1f, 0x8b, 8, 0][..], &vec![0; large]].concat(),
        Vec::new(),
    ]
}

fn post_hostile_bodies(orders: &mut Orders) {
    let (bodies, at) = (bodies(), orders.at.clone());
    loop {
        std::thread::scope(|scope| {
            let post = |body: &Vec<u8>| {
                let mut stream = connect(&at, Duration::from_secs(60)).ok()?;
                // The gateway may answer before it has read all of it.
                let _ = stream.write_all(&posted(CHATS, body));
                reply(&mut stream).ok().map(|reply| reply.status)
            };
            let skipped = orders.number as usize * 6;
            let posts: Vec<_> =
                bodies.iter().cycle().skip(skipped).take(8).map(|body| scope.spawn(move || post(body))).collect();
            for status in posts.into_iter().map(|post| post.join().expect("no panic")) {
                match status {
                    Some(400..500) => orders.count("refused with 4xx", 1),
                    Some(200) => orders.count("answered with 200", 1),
                    Some(_) => orders.count("another status", 1),
                    None => orders.count("closed", 1),
                }
            }
        });
        if !orders.goes_on() {
            break;
        }
    }
}

pub(crate) fn wide_prompts(trial: &mut Trial) {
    let Some(scene) = Scene::proxy("", &[]) else { return };
    scene.attacked_by(trial, "post_wide_prompts", 1).end(trial);
    // A body as it comes, its copy on the way to an engine, and little for its prompts: each has 4 bytes in it.
    scene.end(trial, 256);
}

fn post_wide_prompts(orders: &mut Orders) {
    let wide = |field: &str, item: &str| {
        let items = format!("{item},").repeat((24 << 20) / (item.len() + 1));
        format!("{{\"model\":\"demo\",\"{field}\":[{items}{item}]}}").into_bytes()
    };
    let bodies = [wide("prompt", "[1]"), wide("prompt", "\"\""), wide("lora_path", "\"\"")];
    loop {
        for body in &bodies {
            let Ok(mut stream) = connect(&orders.at, Duration::from_secs(60)) else { continue };
            let _ = stream.write_all(&posted("/v1/completions", body));
            orders.count("answered", u64::from(reply(&mut stream).is_ok()));
        }
        if !orders.goes_on() {
            break;
        }
    }
}

pub(crate) fn unread_streams(trial: &mut Trial) {
    // An engine whose stream never ends, as attacker.
    let engine = Attackers::start("serve_hostile_replies", 1, "endless_events", trial.lasts() * 3);
    let url = engine.offers()[0].as_str().expect("a URL").to_owned();
    let Some(scene) = Scene::proxy("deadlines.stall_ms = 1000\n", &[url]) else { return };
    scene.attacked_by(trial, "never_read_streams", 1).end(trial);
    let stalled = counted(&scene.admin, "kvrouted_gateway_replies_ended_total", "stalled");
    trial.must_count("replies ended: stalled", stalled, 32);
    drop(engine);
    scene.end(trial, 224);
}

fn never_read_streams(orders: &mut Orders) {
    let request = posted(CHATS, chat("evil-endless_events", "Go on.", true).to_string().as_bytes());
    let mut streams: Vec<TcpStream> = (0..64).filter_map(|_| connect(&orders.at, ANSWER).ok()).collect();
    streams.retain_mut(|stream| stream.write_all(&request).is_ok());
    orders.count("callers", streams.len() as u64);
    orders.hold();
    // Until the gateway has given each of them up.
    for mut stream in streams {
        let mut part = [0; 1 << 16];
        while stream.read(&mut part).is_ok_and(|read| read > 0) {}
    }
}
