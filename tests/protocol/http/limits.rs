//! Health, metrics, bounds, and the port's end with its daemon.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use serde_json::json;

use super::client::Served;
use crate::kit::http::scrape;
use crate::kit::ports::free_port;
use crate::kit::{Daemon, folder, run, text, until};

#[test]
fn health_and_metrics_are_served_beside_the_rest() {
    let port = free_port();
    let served = Served::start(&["--metrics-port", &port.to_string(), "--worker", "id=1"]);
    assert_eq!(served.get("/health"), (200, json!({"status": "ok"})));
    assert_eq!(served.post("/select_and_reserve", &json!({"model_name": "m", "token_ids": [1]})).0, 200);
    let (head, page) = scrape(served.port);
    assert!(head.contains("openmetrics-text"), "{head}");
    // It counts as a core does.
    for line in ["kvrouted_routes_total 1", "kvrouted_bookings_total 1", "kvrouted_http_requests_total 2"] {
        assert!(page.lines().any(|on_page| on_page == line), "{line}");
    }
    let (_, own_page) = scrape(port);
    let families =
        |page: &str| page.lines().filter(|line| line.starts_with("# TYPE")).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(families(&page), families(&own_page), "one exposition on both ports");
}

#[test]
fn bodies_are_bounded_and_typed() {
    let served = Served::configured("body_bytes_max = 4096", "[[worker]]\nid = 1\n");
    let large = json!({"model_name": "m", "token_ids": vec![1; 4096]}).to_string();
    assert_eq!(served.post_text("/select", "application/json", &large).0, 413);
    assert_eq!(served.post_text("/select", "text/plain", "{}").0, 415);
    assert_eq!(served.post_text("/select", "application/json", "{").0, 400);
    assert_eq!(served.post_text("/select", "application/json", "[1]").0, 422);
    let deep = format!(r#"{{"model_name":"m","x":{}{}}}"#, "[".repeat(500), "]".repeat(500));
    assert_eq!(served.post_text("/select", "application/json", &deep).0, 400);
    assert_eq!((served.daemon.counter("http_bodies_oversized"), served.daemon.counter("http_bodies_unusable")), (1, 4));
    // Of a body whose length is not announced no more is read than is allowed.
    let mut stream = TcpStream::connect(("127.0.0.1", served.port)).expect("the port");
    let head = "POST /select HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
    stream.write_all(format!("{head}1388\r\n{}\r\n", " ".repeat(5000)).as_bytes()).expect("sent");
    let mut reply = [0; 12];
    stream.read_exact(&mut reply).expect("answered");
    assert_eq!(&reply[9..], b"413");
}

#[test]
fn bodies_that_are_announced_and_never_sent_keep_no_other_body_out() {
    let served = Served::start(&["--worker", "id=1"]);
    let announced = |at: usize| {
        let mut stream = TcpStream::connect(("127.0.0.1", served.port)).expect("the port");
        let size = if at.is_multiple_of(2) { "Content-Length: 8388608" } else { "Transfer-Encoding: chunked" };
        let head = "POST /overlap_scores HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json";
        stream.write_all(format!("{head}\r\n{size}\r\n\r\n").as_bytes()).expect("sent");
        stream
    };
    let held: Vec<TcpStream> = (0..64).map(announced).collect();
    until("all are connected", || served.daemon.counter("http_connections") >= held.len() as u64);
    for tokens in [3, 200_000] {
        let prompt = json!({"model_name": "m", "token_ids": vec![1; tokens]});
        assert_eq!(served.post("/overlap_scores", &prompt).0, 200, "{tokens} tokens");
    }
    assert_eq!((served.daemon.counter("http_bodies_crowded"), served.daemon.counter("http_bodies_late")), (0, 0));
}

/// The response to a question with these lines in its head.
fn asked(served: &Served, lines: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", served.port)).expect("the port");
    let head = format!("GET /loads HTTP/1.1\r\nConnection: close\r\n{lines}\r\n\r\n");
    stream.write_all(head.as_bytes()).expect("sent");
    let mut reply = String::new();
    stream.read_to_string(&mut reply).expect("answered");
    reply
}

#[test]
fn a_port_that_others_reach_is_asked_by_its_address_or_by_a_name_that_is_configured() {
    let http = "listen = \"0.0.0.0\"\nadminister = false\nhosts = [\"Router.example\"]";
    let served = Served::configured(http, "[[worker]]\nid = 1\n");
    for host in ["evil.example", "evil.router.example:80", "router.example.evil"] {
        let reply = asked(&served, &format!("Host: {host}"));
        assert!(reply.starts_with("HTTP/1.1 403") && reply.contains("http.hosts"), "{host}: {reply}");
    }
    for host in ["router.example", "router.example.:8090", "10.0.0.7:8090", "localhost"] {
        let reply = asked(&served, &format!("Host: {host}"));
        assert!(reply.starts_with("HTTP/1.1 200"), "{host}: {reply}");
    }
    assert_eq!(served.daemon.counter("http_pages_refused"), 3);
    let served = Served::configured("hosts = [\"*\"]", "[[worker]]\nid = 1\n");
    assert!(asked(&served, "Host: whatever.example").starts_with("HTTP/1.1 200"));
    let page = asked(&served, "Host: whatever.example\r\nOrigin: http://whatever.example");
    assert!(page.starts_with("HTTP/1.1 403"), "a page all the same: {page}");
}

#[test]
fn no_web_page_is_answered_whatever_it_asks() {
    let served = Served::start(&["--worker", "id=1"]);
    let asked = |lines: &str| asked(&served, lines);
    for page in [
        "Host: 127.0.0.1\r\nOrigin: http://127.0.0.1",
        "Host: localhost\r\nSec-Fetch-Site: cross-site",
        "Host: evil.example",
    ] {
        let reply = asked(page);
        assert!(reply.starts_with("HTTP/1.1 403") && reply.contains("not_permitted"), "{page}: {reply}");
    }
    for program in ["Host: 127.0.0.1:1", "Host: localhost", "Host: [::1]:8090\r\nSec-Fetch-Site: none"] {
        let reply = asked(program);
        assert!(reply.starts_with("HTTP/1.1 200"), "{program}: {reply}");
    }
    assert_eq!((served.daemon.counter("http_pages_refused"), served.daemon.counter("http_refused")), (3, 3));
}

#[test]
fn a_stop_ends_the_port_whoever_is_connected() {
    let mut served = Served::start(&["--worker", "id=1"]);
    let mut idle = TcpStream::connect(("127.0.0.1", served.port)).expect("the port");
    let mut half = TcpStream::connect(("127.0.0.1", served.port)).expect("the port");
    half.write_all(b"POST /select HTTP/1.1\r\nContent-Le").expect("sent");
    until("both are accepted", || served.daemon.counter("http_connections") >= 2);
    assert_eq!(served.daemon.process.end("-TERM"), Some(0));
    let mut rest = Vec::new();
    // Closed or reset: over, in any case.
    let _ = idle.read_to_end(&mut rest);
    assert!(rest.is_empty() && TcpStream::connect(("127.0.0.1", served.port)).is_err());
}

#[test]
fn a_port_that_is_taken_or_open_to_all_is_refused_by_name() {
    let served = Served::start(&[]);
    let socket = folder();
    let path = socket.path().join("t");
    let taken = served.port.to_string();
    let output = run(&["serve", "--socket", text(&path), "--model", "m", "--http-port", &taken]);
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("http.port"), "{output:?}");
    let tables = "[http]\nport = 8090\nlisten = \"0.0.0.0\"\n";
    let file = crate::kit::configure(socket.path(), tables);
    let output = run(&["serve", "--config", text(&file), "--check"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("http.listen") && said.contains("administer"), "{said}");
    let file = crate::kit::configure(socket.path(), &format!("{tables}administer = false\n"));
    assert!(run(&["serve", "--config", text(&file), "--check"]).status.success());
    // Without a port nothing listens.
    let daemon = Daemon::start(&[]);
    assert_eq!(daemon.counter("http_connections"), 0);
}
