//! Engines that attack the gateway in front of them: each answers what the gateway asks to learn of it, and then does
//! its worst. Another model's engines behave, and their callers must notice nothing.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

use serde_json::{Value, json};

use crate::attackers::{Attackers, Orders, Role};
use crate::http1::{chat, connect, header, posted};
use crate::scene::Scene;
use crate::trial::Trial;

pub(crate) const ROLES: &[(&str, Role)] = &[
    ("serve_hostile_replies", serve_hostile_replies),
    ("call_hostile_engines", call_hostile_engines),
    ("rename_models", rename_models),
];

/// How an engine answers a chat.
const MISCHIEF: [&str; 10] = [
    "endless_headers",
    "endless_interim",
    "endless_events",
    "endless_line",
    "long_length",
    "short_length",
    "cut_off",
    "compressed_bomb",
    "silence",
    "endless_trailers",
];

/// A gateway gives up an engine soon.
const DEADLINES: &str = "deadlines.first_byte_ms = 4000\ndeadlines.total_ms = 8000\ndeadlines.stall_ms = 1000\n";

pub(crate) fn hostile_replies(trial: &mut Trial) {
    let engines: Vec<Attackers> = MISCHIEF
        .iter()
        .map(|mischief| {
            let lasts = trial.lasts() + Duration::from_secs(15);
            Attackers::start("serve_hostile_replies", 1, mischief, lasts)
        })
        .collect();
    let urls: Vec<String> =
        engines.iter().map(|engine| engine.offers()[0].as_str().expect("a URL").to_owned()).collect();
    let Some(scene) = Scene::proxy(DEADLINES, &urls) else { return };
    scene.attacked_by(trial, "call_hostile_engines", 1).end(trial);
    let (asked, ended) = (trial.counted("callers"), trial.counted("callers whose reply ended"));
    trial.must(asked == ended && asked >= MISCHIEF.len() as u64, || format!("{ended} replies of {asked} ended"));
    drop(engines);
    scene.end(trial, 288);
}

/// Asks each hostile engine's model, several times at once, until each reply has ended in some way.
fn call_hostile_engines(orders: &mut Orders) {
    let at = orders.at.clone();
    loop {
        std::thread::scope(|scope| {
            let call = |mischief: &str, is_stream: bool| {
                let model = format!("evil-{mischief}");
                let mut stream = connect(&at, Duration::from_secs(20)).ok()?;
                let request = posted("/v1/chat/completions", chat(&model, "Go.", is_stream).to_string().as_bytes());
                stream.write_all(&request).ok()?;
                let (mut part, mut bytes) = (vec![0; 1 << 16], 0);
                loop {
                    match stream.read(&mut part) {
                        Ok(0) => return Some(bytes),
                        Ok(read) => {
                            bytes += read as u64;
                            // A whole reply with its length: the connection stays open after it.
                            let head = String::from_utf8_lossy(&part[..read]);
                            if bytes == read as u64 && header(&head, "content-length").is_some() {
                                return Some(bytes);
                            }
                        }
                        // A reset ends it too, a deadline of this side does not.
                        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return None,
                        Err(_) => return Some(bytes),
                    }
                }
            };
            let calls: Vec<_> = MISCHIEF
                .iter()
                .flat_map(|mischief| [(mischief, true), (mischief, false)])
                .map(|(mischief, is_stream)| scope.spawn(move || call(mischief, is_stream)))
                .collect();
            for bytes in calls.into_iter().map(|call| call.join().expect("no panic")) {
                orders.count("callers", 1);
                orders.count("callers whose reply ended", u64::from(bytes.is_some()));
                orders.count("KiB relayed", bytes.unwrap_or_default() >> 10);
            }
        });
        if !orders.goes_on() {
            break;
        }
    }
}

fn listener() -> (TcpListener, String) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("the loopback interface");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    (listener, url)
}

/// Reads a request; its first line.
fn request(stream: &mut TcpStream) -> std::io::Result<String> {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let length = header(&head, "content-length").and_then(|text| text.parse().ok()).unwrap_or(0);
    stream.read_exact(&mut vec![0; length])?;
    Ok(head.lines().next().unwrap_or_default().to_owned())
}

fn answer(stream: &mut TcpStream, status: u16, body: &Value) -> std::io::Result<()> {
    let body = body.to_string();
    let head =
        format!("HTTP/1.1 {status} It\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all(format!("{head}{body}").as_bytes())
}

fn models(id: &str) -> Value {
    json!({"object": "list", "data": [{"id": id, "object": "model", "created": 1}]})
}

/// Serves a model `evil-MISCHIEF`; which mischief is the order's place.
fn serve_hostile_replies(orders: &mut Orders) {
    let (listener, url) = listener();
    orders.offer(&url.into());
    let mischief = orders.at.clone();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mischief = mischief.clone();
            std::thread::spawn(move || {
                // A gateway that does not read is given up.
                stream.set_write_timeout(Some(Duration::from_secs(5))).expect("set");
                while let Ok(line) = request(&mut stream) {
                    let said = match line.split(' ').nth(1) {
                        Some("/v1/models") => answer(&mut stream, 200, &models(&format!("evil-{mischief}"))),
                        Some("/health" | "/version") => answer(&mut stream, 200, &json!({"version": "0.32.0"})),
                        Some("/v1/chat/completions") => misbehave(&mut stream, &mischief),
                        _ => answer(&mut stream, 404, &json!({})),
                    };
                    if said.is_err() {
                        return;
                    }
                }
            });
        }
    });
    orders.hold();
}

/// Never returns well: the connection ends.
fn misbehave(stream: &mut TcpStream, mischief: &str) -> std::io::Result<()> {
    let (ok, event_stream) =
        ("HTTP/1.1 200 OK\r\n", "content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n");
    let chunk = |data: &[u8]| [format!("{:x}\r\n", data.len()).as_bytes(), data, b"\r\n"].concat();
    let (first, then): (Vec<u8>, Vec<u8>) = match mischief {
        "endless_headers" => (ok.into(), b"x-more: and more\r\n".repeat(1000)),
        "endless_interim" => (Vec::new(), b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n".repeat(500)),
        "endless_events" => {
            let event = format!("data: {}\n\n", json!({"choices": [{"delta": {"content": "on and on "}}]}));
            (format!("{ok}{event_stream}").into(), chunk(event.repeat(100).as_bytes()))
        }
        "endless_line" => (format!("{ok}{event_stream}").into(), chunk(&vec![b'x'; 32 << 10])),
        "long_length" => (format!("{ok}content-length: 18446744073709551615\r\n\r\n").into(), vec![b' '; 32 << 10]),
        "short_length" => (
            format!("{ok}content-length: 5\r\n\r\n{{}}   HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx").into(),
            Vec::new(),
        ),
        "cut_off" => (format!("{ok}content-length: 500\r\n\r\n{{\"choices\": [").into(), Vec::new()),
        "compressed_bomb" => {
            let head = format!(
                "{ok}content-type: application/json\r\ncontent-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n"
            );
            // The header of gzip, and stored blocks of zeros.
            let mut bomb = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3];
            bomb.extend([&[0, 0xff, 0xff, 0, 0][..], &vec![0; 0xffff]].concat());
            (head.into(), chunk(&bomb))
        }
        "endless_trailers" => (
            format!("{ok}content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n")
                .into(),
            b"x-trailer: and more\r\n".repeat(1000),
        ),
        _ => {
            std::thread::sleep(Duration::from_secs(30));
            (Vec::new(), Vec::new())
        }
    };
    stream.write_all(&first)?;
    while !then.is_empty() {
        stream.write_all(&then)?;
        // Fast, and no faster than a network.
        std::thread::sleep(Duration::from_millis(5));
    }
    Err(std::io::Error::other("the mischief is done"))
}

pub(crate) fn renamed_models(trial: &mut Trial) {
    // The engines are asked every 15 seconds.
    let lasts = trial.lasts().max(Duration::from_secs(120));
    let engine = Attackers::start("rename_models", 1, "", lasts + Duration::from_secs(60));
    let url = engine.offers()[0].as_str().expect("a URL").to_owned();
    let Some(mut scene) = Scene::proxy("", std::slice::from_ref(&url)) else { return };
    let (before, _) = scene.gateway.daemon();
    std::thread::sleep(lasts);
    let starts =
        scene.gateway.log().iter().filter(|line| line.contains("the daemon is started again for another")).count();
    trial.count("restarts of the daemon", starts as u64);
    trial.must(starts <= 3, || format!("{starts} restarts, for one engine that names other models"));
    let is_told = scene.gateway.log().iter().any(|line| line.contains("named another model"));
    trial.must(is_told, || "nothing is said of the engine that names other models".to_owned());
    let (after, _) = scene.gateway.daemon();
    trial.count("daemon's process is the first one", u64::from(before == after));
    drop(engine);
    scene.end(trial, 224);
}

/// Names another model and another block size each time.
fn rename_models(orders: &mut Orders) {
    let (listener, url) = listener();
    orders.offer(&url.into());
    std::thread::spawn(move || {
        let mut asked = 0;
        for mut stream in listener.incoming().flatten() {
            stream.set_read_timeout(Some(Duration::from_millis(500))).expect("set");
            while let Ok(line) = request(&mut stream) {
                let said = match line.split(' ').nth(1) {
                    Some("/v1/models") => {
                        asked += 1;
                        answer(&mut stream, 200, &models(&format!("model-{asked}")))
                    }
                    Some("/health" | "/version") => answer(&mut stream, 200, &json!({"version": "0.32.0"})),
                    _ => answer(&mut stream, 404, &json!({})),
                };
                if said.is_err() {
                    break;
                }
            }
        }
    });
    orders.hold();
}
