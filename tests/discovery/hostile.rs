//! Files and engines that mean no good: the daemon serves on, names them, and ends when it is told to.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::daemon::{problem, workers};
use super::process::{Daemon, replace, until};

/// A daemon that follows the workers' files of a folder.
fn following(folder: &tempfile::TempDir) -> Daemon {
    let path = folder.path().display();
    Daemon::configured(&format!("[discovery]\npath = \"{path}\"\ngrace_ms = 300\nrescan_ms = 200\n"))
}

/// An HTTP server that answers each request with what `answer` says of its first line; how often it was asked.
pub(crate) fn answering(answer: impl Fn(&str) -> Vec<u8> + Send + Sync + 'static) -> (u16, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("an address").port();
    let asked = Arc::new(AtomicUsize::new(0));
    let (counter, answer) = (Arc::clone(&asked), Arc::new(answer));
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { continue };
            counter.fetch_add(1, Ordering::Relaxed);
            let answer = Arc::clone(&answer);
            std::thread::spawn(move || {
                let (mut request, mut byte) = (Vec::new(), [0_u8]);
                while !request.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|read| read > 0) {
                    request.push(byte[0]);
                }
                let line = String::from_utf8_lossy(&request).lines().next().unwrap_or_default().to_owned();
                // The daemon may have hung up.
                let _ = stream.write_all(&answer(&line));
            });
        }
    });
    (port, asked)
}

/// A whole answer.
pub(crate) fn http(status: &str, body: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len()).into_bytes()
}

#[test]
fn a_file_with_a_zero_byte_in_an_endpoint_is_named_and_the_daemon_serves_on() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut daemon = following(&folder);
    let cases = [
        ("endpoint", r#"{"id": 1, "endpoint": "ipc:///tmp/x\u0000y"}"#),
        ("endpoint", r#"{"id": 1, "endpoint": "tcp://127.0.0.1\u0000:1"}"#),
        ("replay", r#"{"id": 1, "endpoint": "tcp://127.0.0.1:1", "replay": "ipc:///tmp/x\u0000y"}"#),
        ("load", r#"{"id": 1, "load": "ipc:///tmp/x\u0000y"}"#),
        ("topic", r#"{"id": 1, "endpoint": "tcp://127.0.0.1:1", "topic": "a\u0000b"}"#),
    ];
    for (field, line) in cases {
        let file = folder.path().join(format!("{field}.json"));
        replace(&file, line);
        until("the file is named", || {
            problem(&daemon, &format!("{field}.json")).is_some_and(|problem| problem.contains("zero byte"))
        });
        std::fs::remove_file(&file).expect("removed");
    }
    assert!(workers(&daemon).is_empty());
    assert_eq!(daemon.process.end("-TERM"), Some(0));
}

#[test]
fn an_engine_whose_host_has_a_zero_byte_is_named_and_the_daemon_serves_on() {
    let info = r#"{"kv_events": {"publisher": "zmq", "endpoint_host": "a\u0000b", "endpoint_port_base": 5557}}"#;
    let (port, _) = answering(move |_| http("200 OK", info));
    let mut daemon = Daemon::configured("");
    daemon.worker_ok(&["add", &format!("id=9,url=http://127.0.0.1:{port}")]);
    until("it is named", || problem(&daemon, &port.to_string()).is_some_and(|problem| problem.contains("zero byte")));
    assert_eq!(daemon.process.end("-TERM"), Some(0));
}

#[test]
fn an_engine_cannot_send_the_daemon_elsewhere() {
    let info = r#"{"kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557}}"#;
    let (elsewhere, visited) = answering(move |_| http("200 OK", info));
    let to = format!("http://127.0.0.1:{elsewhere}/server_info");
    let (port, asked) = answering(move |_| {
        format!("HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").into_bytes()
    });
    let daemon = Daemon::configured("");
    daemon.worker_ok(&["add", &format!("id=9,url=http://127.0.0.1:{port}")]);
    until("it is asked again", || asked.load(Ordering::Relaxed) >= 4);
    assert_eq!(visited.load(Ordering::Relaxed), 0, "the daemon went where it was sent");
    assert!(problem(&daemon, &port.to_string()).is_some() && workers(&daemon).is_empty());
}

#[test]
fn an_engine_that_is_named_no_more_is_no_finding_any_more() {
    let free = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = free.local_addr().expect("an address").port();
    drop(free);
    let daemon = Daemon::configured("");
    daemon.worker_ok(&["add", &format!("id=9,url=http://127.0.0.1:{port}")]);
    until("it is named", || problem(&daemon, &port.to_string()).is_some());
    daemon.worker_ok(&["remove", "9"]);
    until("nothing is the matter", || problem(&daemon, &port.to_string()).is_none());
    let found = |daemon: &Daemon| daemon.status().findings.iter().any(|finding| finding.name == "source_unusable");
    until("the finding is gone", || !found(&daemon));
}
