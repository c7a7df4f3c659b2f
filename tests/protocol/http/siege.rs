//! Callers that hold connections, or ask for much and read nothing: the daemon's bounds for them, and that other
//! callers get answers.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use kvrouted::limits::{HTTP_CONNECTIONS_MAX, HTTP_REPLIES_BYTES_MAX, METRICS_CONNECTIONS_MAX, METRICS_PAGES_MAX};
use serde_json::{Value, json};

use super::client::Served;
use crate::kit::http::scrape;
use crate::kit::ports::free_port;
use crate::kit::{Daemon, WAIT_MAX, resident_kib, until};

/// How much more memory than the bound is no breach of it: what the allocator keeps, and one reply that is being made.
const RSS_BYTES_MARGIN: usize = 48 << 20;

fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).expect("the port");
    stream.set_read_timeout(Some(WAIT_MAX)).expect("set");
    stream
}

fn ask(stream: &mut TcpStream, path: &str) {
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes()).expect("sent");
}

/// The status of a response whose rest stays unread; 0 = the connection was closed instead.
fn status(stream: &mut TcpStream) -> u16 {
    let mut line = [0; 12];
    if stream.read_exact(&mut line).is_err() {
        return 0;
    }
    std::str::from_utf8(&line[9..]).expect("text").parse().expect("a status")
}

/// Reads the whole response to `/health`.
fn assert_healthy(stream: &mut TcpStream) {
    ask(stream, "/health");
    let (mut response, mut part) = (Vec::new(), [0; 256]);
    while !response.ends_with(b"{\"status\":\"ok\"}") {
        let read = stream.read(&mut part).expect("a response");
        assert!(read > 0, "closed after {:?}", String::from_utf8_lossy(&response));
        response.extend_from_slice(&part[..read]);
    }
}

#[test]
fn on_a_full_port_the_longest_idle_connection_gives_way() {
    let served = Served::start(&["--worker", "id=1"]);
    let mut open: Vec<TcpStream> = (0..HTTP_CONNECTIONS_MAX).map(|_| connect(served.port)).collect();
    open.iter_mut().for_each(assert_healthy);
    assert_healthy(&mut connect(served.port));
    let mut rest = Vec::new();
    open[0].read_to_end(&mut rest).expect("closed");
    assert!(rest.is_empty(), "the one that was idle longest is closed without a word");
    assert_healthy(open.last_mut().expect("connections"));
    assert_eq!(served.daemon.counter("http_connections_displaced"), 1);
}

/// Adds workers of which each takes 64 KiB in a listing.
fn register_large(served: &Served, workers: usize) {
    let domains: Value =
        (0..16).map(|at| (format!("d{at}"), json!("x".repeat(3800)))).collect::<serde_json::Map<_, _>>().into();
    for id in 0..workers {
        let fields = json!({"worker_id": id, "model_name": "m", "topology_domains": domains});
        assert_eq!(served.post("/workers", &fields).0, 201);
    }
}

#[test]
fn replies_that_nobody_reads_share_one_bound() {
    let served = Served::start(&[]);
    register_large(&served, 100);
    let reply_bytes = served.get("/workers").1.to_string().len();
    let before = resident_kib(served.daemon.process.id()) as usize * 1024;
    let mut readers: Vec<TcpStream> = (0..48).map(|_| connect(served.port)).collect();
    readers.iter_mut().for_each(|stream| ask(stream, "/workers"));
    let statuses: Vec<u16> = readers.iter_mut().map(status).collect();
    let grown = (resident_kib(served.daemon.process.id()) as usize * 1024).saturating_sub(before);
    assert!(
        grown <= HTTP_REPLIES_BYTES_MAX + RSS_BYTES_MARGIN,
        "{} MiB more for {} unread replies of {reply_bytes} bytes",
        grown >> 20,
        readers.len()
    );
    let whole = statuses.iter().filter(|status| **status == 200).count();
    assert!(whole > 0 && whole * reply_bytes <= HTTP_REPLIES_BYTES_MAX, "{whole} at once: {statuses:?}");
    let refused = statuses.iter().filter(|status| **status == 503).count();
    assert_eq!(whole + refused, readers.len(), "{statuses:?}");
    assert_eq!(served.daemon.counter("http_replies_crowded"), refused as u64);
    assert_healthy(&mut connect(served.port));
    drop(readers);
    until("there is room again", || served.get("/workers").0 == 200);
}

#[test]
fn a_metrics_page_that_many_ask_for_and_nobody_reads_is_held_once() {
    let port = free_port();
    let workers: String = (0..600).map(|id| format!("[[worker]]\nid = {id}\n")).collect();
    let daemon = Daemon::configured(&format!("[metrics]\nport = {port}\n{workers}"));
    let page_bytes = scrape(port).1.len();
    let before = resident_kib(daemon.process.id()) as usize * 1024;
    let mut readers: Vec<TcpStream> = (0..METRICS_CONNECTIONS_MAX - 4).map(|_| connect(port)).collect();
    readers.iter_mut().for_each(|stream| ask(stream, "/metrics"));
    let answered = readers.iter_mut().map(status).filter(|status| *status == 200).count();
    let grown = (resident_kib(daemon.process.id()) as usize * 1024).saturating_sub(before);
    assert!(
        grown <= METRICS_PAGES_MAX * page_bytes + RSS_BYTES_MARGIN,
        "{} MiB more for {answered} unread pages of {page_bytes} bytes",
        grown >> 20
    );
    assert_eq!(answered, readers.len());
    let (made, asked) = (daemon.counter("metrics_pages"), daemon.counter("metrics_scrapes"));
    assert_eq!(asked, 1 + readers.len() as u64);
    assert!(made < asked, "{made} pages for {asked} scrapes");
}

#[test]
fn the_metrics_port_refuses_web_pages_and_foreign_hosts() {
    let port = free_port();
    let daemon = Daemon::configured(&format!("[metrics]\nport = {port}\nhosts = [\"Router.example\"]\n"));
    let asked = |lines: &str| {
        let mut stream = connect(port);
        stream.write_all(format!("GET /metrics HTTP/1.1\r\n{lines}\r\n\r\n").as_bytes()).expect("sent");
        status(&mut stream)
    };
    for page in ["Host: evil.example", "Host: localhost\r\nOrigin: http://evil.example", "Host: localhost.evil.example"]
    {
        assert_eq!(asked(page), 403, "{page}");
    }
    for program in ["Host: localhost:1", "Host: 127.0.0.1", "Host: router.example"] {
        assert_eq!(asked(program), 200, "{program}");
    }
    assert_eq!(daemon.counter("metrics_scrapes_refused"), 3);
}
