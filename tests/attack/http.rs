//! Callers of the HTTP and the metrics port. They send bodies that a parser could blow up and heads that never end. They do
//! not read their replies. They send requests that two readers could read differently.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::time::Duration;

use crate::attackers::{Attackers, Orders, Role};
use crate::kit::http::scrape;
use crate::kit::ports::free_port;
use crate::kit::{WAIT_MAX, until};
use crate::scene::Scene;
use crate::trial::Trial;

pub(crate) const ROLES: &[(&str, Role)] = &[
    ("post_bombs", post_bombs),
    ("send_slow_heads", send_slow_heads),
    ("never_read_http", never_read_http),
    ("smuggle", smuggle),
];

/// A daemon with both ports, and with workers that make its pages long.
fn scene(workers: u64) -> (Scene, u16, u16) {
    let (http, metrics) = (free_port(), free_port());
    let workers: String = (100..100 + workers).map(|id| format!("[[worker]]\nid = {id}\n")).collect();
    let scene = Scene::configured("", &format!("[http]\nport = {http}\n[metrics]\nport = {metrics}\n{workers}"));
    (scene, http, metrics)
}

/// A connection that gives up soon.
fn connect(port: &str) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port.parse::<u16>().expect("a port")))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.set_write_timeout(Some(Duration::from_secs(5)))?;
    Ok(stream)
}

/// The daemon still answers on the port.
fn must_be_healthy(trial: &mut Trial, port: u16) {
    until("the port answers", || {
        let asked = connect(&port.to_string()).and_then(|mut stream| {
            stream.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
            let mut reply = String::new();
            stream.read_to_string(&mut reply).map(|_| reply)
        });
        asked.is_ok_and(|reply| reply.starts_with("HTTP/1.1 200"))
    });
    trial.count("healthy after it", 1);
}

pub(crate) fn json_bombs(trial: &mut Trial) {
    let (scene, port, _) = scene(0);
    Attackers::start("post_bombs", 2, &port.to_string(), trial.lasts()).end(trial);
    let accepted = trial.counted("status 200");
    trial.must(accepted == 0, || format!("{accepted} bombs were taken for requests"));
    trial.must_count("http_bodies_unusable", scene.counter("http_bodies_unusable"), 4);
    must_be_healthy(trial, port);
    // Bodies of 8 MiB, 16 at once, and what a parser makes of one of them.
    scene.end(trial, 512);
}

/// Bodies of at most 8 MiB that a careless parser makes more of.
fn bombs() -> Vec<Vec<u8>> {
    let large = 8 << 20;
    let around = |inside: String| format!("{{\"model_name\":\"m\",\"token_ids\":{inside}}}").into_bytes();
    vec![
        around("[".repeat(large - 100)),
        around(format!("[{}[]]", "[],".repeat(large / 3 - 40))),
        around(format!("[{}1]", "1e999999999,".repeat(large / 13))),
        around(format!("[{}]", "9".repeat(large - 100))),
        around(format!("\"{}\"", "\\ud800".repeat(large / 6 - 40))),
        format!("{{{}\"model_name\":\"m\"}}", "\"model_name\":\"m\",".repeat(large / 17 - 10)).into_bytes(),
        format!("{{{}\"a\":1}}", (0..500_000).map(|at| format!("\"{at}\":1,")).collect::<String>()).into_bytes(),
        [b"{\"model_name\":\"".to_vec(), vec![0xff; large - 100], b"\"}".to_vec()].concat(),
        [b"{\"model_name\":\"m".to_vec(), vec![0; large - 100], b"\"}".to_vec()].concat(),
        around(format!("{}1{}", "{\"a\":".repeat(large / 8), "}".repeat(large / 8))),
    ]
}

fn post_bombs(orders: &mut Orders) {
    let bombs = bombs();
    while orders.goes_on() {
        let streams = (0..8).filter_map(|_| connect(&orders.at).ok()).collect::<Vec<_>>();
        for stream in &streams {
            stream.set_read_timeout(Some(WAIT_MAX)).expect("set");
            stream.set_write_timeout(Some(WAIT_MAX)).expect("set");
        }
        std::thread::scope(|scope| {
            let post = |(mut stream, bomb): (TcpStream, &Vec<u8>)| {
                let head = "POST /select HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
                let head = format!("{head}Connection: close\r\nContent-Length: {}\r\n\r\n", bomb.len());
                let mut status = [0; 12];
                // The daemon may answer before it has read all of it.
                let sent = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(bomb));
                let told = stream.read_exact(&mut status);
                (sent.is_ok(), told.is_ok() && status.ends_with(b"200"))
            };
            let bombs = bombs.iter().cycle().skip(orders.number as usize * 5);
            let posts: Vec<_> =
                streams.into_iter().zip(bombs).map(|post_of| scope.spawn(move || post(post_of))).collect();
            for post in posts {
                let (sent, is_taken) = post.join().expect("no panic");
                orders.count("bodies", u64::from(sent));
                orders.count("status 200", u64::from(is_taken));
            }
        });
    }
}

pub(crate) fn slow_heads(trial: &mut Trial) {
    let (scene, port, metrics) = scene(0);
    let attackers: Vec<Attackers> =
        [port, metrics].map(|port| Attackers::start("send_slow_heads", 1, &port.to_string(), trial.lasts())).into();
    attackers.iter().for_each(|attackers| drop(attackers.offers()));
    // Other callers get in meanwhile: the connection that keeps its peer waiting longest makes way.
    until("connections make way", || scene.counter("http_connections_displaced") > 0);
    must_be_healthy(trial, port);
    trial.must(scrape(metrics).0.starts_with("HTTP/1.1 200"), || "the metrics port is taken".to_owned());
    attackers.into_iter().for_each(|attackers| attackers.end(trial));
    trial.must_count("http_connections_displaced", scene.counter("http_connections_displaced"), 1);
    scene.end(trial, 128);
}

/// Heads and chunked bodies that come byte by byte, on more connections than the port has.
fn send_slow_heads(orders: &mut Orders) {
    let head = "POST /select HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".repeat(100);
    let body = "POST /select HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n";
    let mut streams = Vec::new();
    for at in 0.. {
        while streams.len() < 400 {
            let Ok(mut stream) = connect(&orders.at) else { break };
            if streams.len() % 2 == 1 {
                // It may be closed at once.
                let _ = stream.write_all(body.as_bytes());
            }
            streams.push((stream, streams.len() % 2 == 1));
            orders.count("connections", 1);
        }
        if at == 0 {
            orders.offer(&streams.len().into());
        }
        let byte = head.as_bytes()[at % head.len()];
        streams.retain_mut(|(stream, in_body)| {
            let more: &[u8] = if *in_body { b"1\r\n \r\n" } else { &[byte] };
            stream.write_all(more).is_ok()
        });
        if !orders.goes_on() {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub(crate) fn unread_pages(trial: &mut Trial) {
    let (scene, port, metrics) = scene(400);
    let attackers: Vec<Attackers> =
        [port, metrics].map(|port| Attackers::start("never_read_http", 1, &port.to_string(), trial.lasts())).into();
    attackers.into_iter().for_each(|attackers| attackers.end(trial));
    must_be_healthy(trial, port);
    let (made, asked) = (scene.counter("metrics_pages"), scene.counter("metrics_scrapes"));
    trial.count("metrics_scrapes", asked);
    trial.must(made < asked, || format!("{made} pages were made for {asked} scrapes"));
    // The bound of unread replies, four pages, and what the allocator keeps.
    scene.end(trial, 256);
}

fn never_read_http(orders: &mut Orders) {
    let mut streams: Vec<TcpStream> = (0..60).filter_map(|_| connect(&orders.at).ok()).collect();
    for path in ["/metrics", "/workers", "/metrics", "/loads"] {
        for stream in &mut streams {
            let asked = stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes());
            orders.count("requests", u64::from(asked.is_ok()));
        }
    }
    orders.hold();
}

pub(crate) fn smuggled_requests(trial: &mut Trial) {
    let (scene, port, _) = scene(0);
    Attackers::start("smuggle", 1, &port.to_string(), trial.lasts()).end(trial);
    let both = trial.counted("answered twice");
    trial.must(both == 0, || format!("{both} requests were taken for two"));
    must_be_healthy(trial, port);
    scene.end(trial, 96);
}

/// Requests whose length can be read in two ways. A reader must refuse them, or read what the other reader would see as
/// a second request as part of the first one's body.
fn smuggle(orders: &mut Orders) {
    let inner = "GET /workers HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let post = |lines: &str, body: &str| format!("POST /health HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n\r\n{body}");
    let length = inner.len();
    let ambiguous = [
        post(&format!("Content-Length: {length}\r\nContent-Length: 0"), inner),
        post(&format!("Content-Length: 0, {length}"), inner),
        post(&format!("Content-Length: +{length}"), inner),
        post(&format!("Content-Length: 0x{length:x}"), inner),
        post("Transfer-Encoding: chunked, identity", &format!("0\r\n\r\n{inner}")),
        post("Transfer-Encoding: xchunked", &format!("0\r\n\r\n{inner}")),
        post("Transfer-Encoding : chunked", &format!("0\r\n\r\n{inner}")),
        post("X: a\r\n Transfer-Encoding: chunked", &format!("0\r\n\r\n{inner}")),
        post("Transfer-Encoding: chunked", &format!("0\0\r\n\r\n{inner}")),
        post("Transfer-Encoding: chunked", &format!("-0\r\n\r\n{inner}")),
        post("Transfer-Encoding: chunked", &format!("10000000000000000\r\n{inner}")),
        post("Host: elsewhere\0", inner),
    ];
    for request in &ambiguous {
        let Ok(mut stream) = connect(&orders.at) else { continue };
        stream.set_read_timeout(Some(Duration::from_millis(300))).expect("set");
        let mut reply = Vec::new();
        // A connection that stays open is no answer to what was not asked.
        let _ = stream.write_all(request.as_bytes()).and_then(|()| stream.read_to_end(&mut reply).map(drop));
        let reply = String::from_utf8_lossy(&reply).into_owned();
        orders.count("requests", 1);
        orders.count("refused with 400", u64::from(reply.starts_with("HTTP/1.1 400")));
        orders.count("answered twice", u64::from(reply.matches("HTTP/1.1 ").count() > 1));
    }
}
