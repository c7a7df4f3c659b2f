//! Hostile files and engines: the daemon keeps serving, names them, and stops when it should.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::daemon::{problem, workers};
use crate::kit::ports::free_port;
use crate::kit::{Daemon, configure, peak_kib, replace, run, text, until};

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
                let line = first_line(&mut stream);
                // The daemon may have hung up.
                let _ = stream.write_all(&answer(&line));
            });
        }
    });
    (port, asked)
}

/// Reads the head of a request; its first line.
pub(crate) fn first_line(stream: &mut TcpStream) -> String {
    let (mut request, mut byte) = (Vec::new(), [0_u8]);
    while !request.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|read| read > 0) {
        request.push(byte[0]);
    }
    String::from_utf8_lossy(&request).lines().next().unwrap_or_default().to_owned()
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
fn a_check_names_what_no_socket_can_have() {
    let folder = tempfile::tempdir().expect("a folder");
    let check = |tables: &str| {
        let config = configure(folder.path(), tables);
        let output = run(&["serve", "--check", "--config", text(&config)]);
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let worker = "[[worker]]\nid = 1\nendpoint = \"ipc:///tmp/x\\u0000y\"\n";
    let (code, said) = check(worker);
    assert!(code == Some(64) && said.contains("worker[0].endpoint") && said.contains("zero byte"), "{code:?}: {said}");
    let (code, said) = check("[relay]\nreplay = \"tcp://*\\u0000:1\"\n");
    assert!(code == Some(64) && said.contains("relay.replay") && said.contains("zero byte"), "{code:?}: {said}");
    let files = tempfile::tempdir().expect("a folder");
    replace(&files.path().join("a.toml"), worker);
    let (code, said) = check(&format!("[discovery]\npath = \"{}\"\n", text(files.path())));
    assert!(code == Some(64) && said.contains("a.toml") && said.contains("zero byte"), "{code:?}: {said}");
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
fn a_pipe_among_the_files_of_workers_holds_nobody_up() {
    let folder = tempfile::tempdir().expect("a folder");
    let pipe = folder.path().join("a.json");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo");
    assert!(made.success());
    replace(&folder.path().join("b.json"), r#"{"id": 2}"#);
    std::os::unix::fs::symlink("/dev/zero", folder.path().join("c.json")).expect("a link");
    std::fs::create_dir(folder.path().join("d.json")).expect("a folder");
    let mut daemon = following(&folder);
    until("the file beside it is read", || workers(&daemon).len() == 1);
    for name in ["a.json", "c.json", "d.json"] {
        until("what is no file is named", || {
            problem(&daemon, name).is_some_and(|problem| problem.contains("not a regular file"))
        });
    }
    replace(&folder.path().join("b.json"), r#"[{"id": 2}, {"id": 3}]"#);
    until("changes are followed", || workers(&daemon).len() == 2);
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
fn engines_that_answer_without_end_or_never_are_named_and_hold_nobody_up() {
    let (huge, _) = answering(|_| http("200 OK", &" ".repeat(8 << 20)));
    let (endless, _) = answering(|_| {
        let mut answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
        (0..1 << 10).for_each(|_| answer.extend([b"2000\r\n".as_slice(), &[b' '; 0x2000], b"\r\n"].concat()));
        answer
    });
    let (silent, _) = answering(|_| {
        std::thread::park();
        Vec::new()
    });
    let mut daemon = Daemon::configured("");
    let before = peak_kib(daemon.process.id());
    for (id, port) in [(1, huge), (2, endless), (3, silent)] {
        daemon.worker_ok(&["add", &format!("id={id},url=http://127.0.0.1:{port}")]);
    }
    for port in [huge, endless, silent] {
        until("it is named", || {
            problem(&daemon, &port.to_string()).is_some_and(|problem| problem.contains("/server_info fails"))
        });
    }
    let taken = peak_kib(daemon.process.id()) - before;
    assert!(taken < ANSWERS_MEMORY_KIB_MAX, "answers took {} MiB", taken >> 10);
    // One of them is asked again and again.
    assert_eq!(daemon.process.end("-TERM"), Some(0));
}

#[test]
fn an_engine_that_is_named_no_more_is_no_finding_any_more() {
    let port = free_port();
    let daemon = Daemon::configured("");
    daemon.worker_ok(&["add", &format!("id=9,url=http://127.0.0.1:{port}")]);
    until("it is named", || problem(&daemon, &port.to_string()).is_some());
    daemon.worker_ok(&["remove", "9"]);
    until("nothing is the matter", || problem(&daemon, &port.to_string()).is_none());
    let found = |daemon: &Daemon| daemon.status().findings.iter().any(|finding| finding.name == "source_unusable");
    until("the finding is gone", || !found(&daemon));
}

/// What the answers of two engines may take while they are read: 4 MiB are read of each, into a buffer that doubles,
/// and the allocator keeps what was freed for a while.
const ANSWERS_MEMORY_KIB_MAX: u64 = 64 << 10;
/// What a file of 1 MiB may take while it is read.
const FILE_MEMORY_KIB_MAX: u64 = 48 << 10;

#[test]
fn a_small_file_of_very_many_entries_takes_little_memory() {
    let folder = tempfile::tempdir().expect("a folder");
    let daemon = following(&folder);
    let before = peak_kib(daemon.process.id());
    let files = [
        ("objects.json", format!("[{}{{}}]", "{},".repeat((1 << 20) / 3))),
        ("wrapped.json", format!("{{\"worker\":[{}{{}}]}}", "{},".repeat((1 << 20) / 3))),
        ("nested.json", format!("[{}]", "[],".repeat((1 << 20) / 3).trim_end_matches(','))),
        ("list.json", format!("{{\"id\": 1, \"taints\": [{}1]}}", "1,".repeat(1 << 19))),
        ("fields.json", format!("{{{}\"id\": 1}}", (0..100_000).map(|at| format!("\"{at}\":1,")).collect::<String>())),
        ("tables.toml", "[[worker]]\n".repeat((1 << 20) / 11)),
        ("inline.toml", format!("worker = [{}{{}}]\n", "{},".repeat((1 << 20) / 3))),
        ("values.toml", format!("[[worker]]\nid = 1\ntaints = [{}1]\n", "1,".repeat(1 << 19))),
        ("lines.toml", "a=1\n".repeat(1 << 18)),
    ];
    for (name, content) in &files {
        replace(&folder.path().join(name), content);
        until("the file is named", || problem(&daemon, name).is_some());
        let taken = peak_kib(daemon.process.id()) - before;
        assert!(taken < FILE_MEMORY_KIB_MAX, "{name} took {} MiB", taken >> 10);
        std::fs::remove_file(folder.path().join(name)).expect("removed");
    }
}
