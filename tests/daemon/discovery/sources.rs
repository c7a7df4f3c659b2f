//! Files, a reload of the configuration, and engines that say where they publish.

use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvrouted::ids::Worker;
use kvrouted::route::{Prompt, RouteRequest};
use kvrouted::trust::TrustReason;

use super::daemon::{problem, workers};
use super::hostile::{answering, first_line, http};
use crate::kit::engine::Publisher;
use crate::kit::http::server;
use crate::kit::ports::free_port;
use crate::kit::{self, Daemon, Process, folder, prompt, replace, text, until};

#[test]
fn files_are_followed_and_bad_ones_change_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().display();
    let discovery = format!("[discovery]\npath = \"{path}\"\ngrace_ms = 300\nrescan_ms = 200\n[[worker]]\nid = 1\n");
    let daemon = Daemon::configured(&discovery);
    let mut publisher = Publisher::new();
    let (file, tokens) = (folder.path().join("a.json"), prompt(1, 64));
    let line = |id: u32| format!("{id}/0 ready file {}", file.display());
    replace(&file, &format!(r#"[{{"id": 2, "endpoint": "{}"}}, {{"id": 3}}]"#, publisher.endpoint()));
    publisher.await_subscription();
    publisher.store(&tokens);
    until("it is heard", || daemon.device(&tokens, Worker::new(2, 0)) == Some(4));
    assert_eq!(workers(&daemon), ["1/0 ready config".to_owned(), line(2), line(3)]);

    replace(&file, r#"[{"id": 2, "#);
    until("it is named", || {
        problem(&daemon, "a.json").is_some_and(|problem| problem.contains("its earlier contents stay in force"))
    });
    assert_eq!((workers(&daemon).len(), daemon.counter("discovery_files_unusable")), (3, 1));
    replace(&file, r#"[{"id": 2, "model": "nobody's"}]"#);
    until("the other problem is named", || {
        problem(&daemon, "a.json").is_some_and(|problem| problem.contains("nobody's"))
    });
    assert_eq!(workers(&daemon).len(), 3);

    let toml = folder.path().join("b.toml");
    replace(&toml, "[[worker]]\nid = 1\n[[worker]]\nid = 4\ndraining = true\n");
    until("a second file is read", || workers(&daemon).len() == 4);
    assert!(problem(&daemon, "b.toml").is_some_and(|problem| problem.contains("config names it too")));

    replace(&file, &format!(r#"[{{"id": 2, "endpoint": "{}", "weight": 2}}]"#, publisher.endpoint()));
    until("a worker leaves with its line", || workers(&daemon).len() == 3);
    assert_eq!(problem(&daemon, "a.json"), None);
    assert_eq!(daemon.device(&tokens, Worker::new(2, 0)), Some(4), "its stream was not touched");

    std::fs::remove_file(&file).expect("removed");
    std::fs::remove_file(&toml).expect("removed");
    until("the grace is over", || workers(&daemon) == ["1/0 ready config"]);
    assert_eq!(daemon.counter("discovery_files_gone"), 2);
}

#[test]
fn a_worker_that_was_added_by_a_command_moves_into_the_configuration_with_its_blocks() {
    let (mut publisher, daemon, tokens) = (Publisher::new(), Daemon::configured(""), prompt(1, 64));
    let endpoint = publisher.endpoint();
    daemon.worker_ok(&["add", &format!("id=1,endpoint={endpoint}")]);
    publisher.await_subscription();
    publisher.store(&tokens);
    until("it is heard", || daemon.device(&tokens, Worker::new(1, 0)) == Some(4));
    daemon.reconfigure(&format!("[[worker]]\nid = 1\nendpoint = \"{endpoint}\"\n"));
    until("two sources name it", || problem(&daemon, "config").is_some());
    daemon.worker_ok(&["remove", "1"]);
    until("the configuration does", || workers(&daemon) == ["1/0 ready config"]);
    assert_eq!((problem(&daemon, "config"), daemon.device(&tokens, Worker::new(1, 0))), (None, Some(4)));
    assert_eq!(daemon.counter("workers_removed"), 0);
}

#[test]
fn a_single_file_is_named_for_as_long_as_it_cannot_be_used() {
    let folder = tempfile::tempdir().expect("a folder");
    let (parent, file) = (folder.path().join("at"), folder.path().join("at/w.toml"));
    std::fs::write(&parent, "no folder").expect("written");
    let daemon = Daemon::configured(&format!("[discovery]\npath = \"{}\"\nrescan_ms = 100\n", file.display()));
    until("that it cannot be looked for is named", || problem(&daemon, "w.toml").is_some());
    std::fs::remove_file(&parent).expect("removed");
    std::fs::create_dir(&parent).expect("a folder");
    until("it can be looked for", || problem(&daemon, "w.toml").is_none());

    replace(&file, "[[worker]]\nid = 1\n[[worker]]\nweight = 3\n");
    until("it is named", || problem(&daemon, "w.toml").is_some());
    // Several scans, each of which finds the same file.
    std::thread::sleep(std::time::Duration::from_secs(1));
    assert!(problem(&daemon, "w.toml").is_some_and(|problem| problem.contains("worker[1].id")));
    replace(&file, "[[worker]]\nid = 1\n");
    until("it is read", || workers(&daemon).len() == 1);
    assert_eq!(problem(&daemon, "w.toml"), None);
}

#[test]
fn the_configuration_is_read_again_on_sighup() {
    let daemon = Daemon::configured("[[worker]]\nid = 1\n[[worker]]\nid = 2\n");
    daemon.reconfigure("[[worker]]\nid = 1\nweight = 3\n[[worker]]\nid = 7\nranks = 2\n");
    until("it is taken over", || workers(&daemon) == ["1/0 ready config", "7/0 ready config", "7/1 ready config"]);
    daemon.reconfigure("[[worker]]\nid = 1\n[[wroker]]\nid = 8\n");
    until("it is refused", || daemon.counter("config_reloads_refused") == 1);
    assert!(problem(&daemon, "config").is_some_and(|problem| problem.contains("did you mean")));
    assert_eq!(workers(&daemon).len(), 3);
    daemon.reconfigure("[[space]]\nmodel = \"another\"\n");
    until("other spaces are refused", || daemon.counter("config_reloads_refused") == 2);
    assert!(problem(&daemon, "config").is_some_and(|problem| problem.contains("restart")));
    daemon.reconfigure("");
    until("no worker is left", || workers(&daemon).is_empty());
    assert_eq!((problem(&daemon, "config"), daemon.counter("config_reloads")), (None, 2));
}

/// Two publishers at neighbouring ports.
fn neighbours() -> [(Publisher, u16); 2] {
    loop {
        let first = Publisher::new();
        let port: u16 = first.endpoint().rsplit_once(':').and_then(|(_, port)| port.parse().ok()).expect("a port");
        let Some(next) = port.checked_add(1) else { continue };
        if let Ok(second) = Publisher::bind(&format!("tcp://127.0.0.1:{next}")) {
            return [(first, port), (second, next)];
        }
    }
}

#[test]
fn an_engine_named_by_its_url_says_where_its_ranks_publish() {
    let [(mut first, base), (mut second, _)] = neighbours();
    let port = server(format!(
        r#"{{"model_path": "m", "kv_events": {{"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": {base},
        "topic": "", "block_size": 16, "dp_size": 2}}}}"#
    ));
    let daemon = Daemon::configured("");
    daemon.worker_ok(&["add", &format!("id=9,url=http://127.0.0.1:{port}/,name=sg")]);
    first.await_subscription();
    second.await_subscription();
    let tokens = prompt(1, 64);
    first.store(&tokens);
    second.store(&tokens[..32]);
    until("rank 0 is heard", || daemon.device(&tokens, Worker::new(9, 0)) == Some(4));
    until("rank 1 is heard", || daemon.device(&tokens, Worker::new(9, 1)) == Some(2));
    assert_eq!(workers(&daemon), ["9/0 ready admin", "9/1 ready admin"]);
    assert!(daemon.counter("server_info_failed") >= 1, "it was not ready at first");
    assert_eq!(problem(&daemon, &port.to_string()), None);
    daemon.worker_ok(&["remove", "9"]);
    until("both ranks are gone", || workers(&daemon).is_empty());
}

#[test]
fn a_vllm_server_named_by_its_url_says_where_its_ranks_publish() {
    let (mut first, mut second) = (Publisher::new(), Publisher::new());
    let bound = |publisher: &Publisher| publisher.endpoint().replace("127.0.0.1", "*");
    let sources = format!(
        r#"{{"0": {{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "{}", "replay_endpoint": null,
        "buffer_steps": 10000, "hwm": 100000, "max_queue_size": 100000, "topic": ""}}, "2": {{"endpoint": "{}"}}}}"#,
        bound(&first),
        bound(&second)
    );
    // As vLLM answers in development mode, and as it answers else.
    for info in [http("200 OK", r#"{"vllm_config": "x"}"#), http("404 Not Found", r#"{"detail": "Not Found"}"#)] {
        let (info, sources) = (info.clone(), sources.clone());
        let (port, _) = answering(move |line| match line {
            "GET /server_info HTTP/1.1" => info.clone(),
            "GET /kv_event_sources HTTP/1.1" => http("200 OK", &sources),
            "GET /health HTTP/1.1" => http("200 OK", ""),
            other => panic!("asked {other}"),
        });
        let daemon = Daemon::configured("");
        daemon.worker_ok(&["add", &format!("id=9,url=http://127.0.0.1:{port},name=vllm")]);
        first.await_subscription();
        second.await_subscription();
        (first.seq, second.seq) = (0, 0);
        let tokens = prompt(1, 64);
        first.store(&tokens);
        second.store(&tokens[..32]);
        until("rank 0 is heard", || daemon.device(&tokens, Worker::new(9, 0)) == Some(4));
        until("rank 2 is heard", || daemon.device(&tokens, Worker::new(9, 2)) == Some(2));
        assert_eq!(workers(&daemon), ["9/0 ready admin", "9/2 ready admin"]);
        assert_eq!(problem(&daemon, &port.to_string()), None);
    }
}

/// An HTTP server of an engine that publishes at an endpoint, on this port until the test ends it.
fn mortal(port: u16, endpoint: &str) -> (u16, impl FnOnce() + use<>) {
    let listener = TcpListener::bind(("127.0.0.1", port)).expect("a free port");
    let address = listener.local_addr().expect("an address");
    let is_over = Arc::new(AtomicBool::new(false));
    let (ends, sources) = (Arc::clone(&is_over), format!(r#"{{"0": {{"endpoint": "{endpoint}"}}}}"#));
    let thread = std::thread::spawn(move || {
        for stream in listener.incoming() {
            if ends.load(Ordering::Relaxed) {
                return;
            }
            let Ok(mut stream) = stream else { continue };
            let line = first_line(&mut stream);
            let answer = match line.as_str() {
                "GET /kv_event_sources HTTP/1.1" => http("200 OK", &sources),
                "GET /health HTTP/1.1" => http("200 OK", ""),
                _ => http("404 Not Found", ""),
            };
            // The daemon may have hung up.
            let _ = stream.write_all(&answer);
        }
    });
    let end = move || {
        is_over.store(true, Ordering::Relaxed);
        drop(TcpStream::connect(address));
        thread.join().expect("the server ends");
    };
    (address.port(), end)
}

#[test]
fn an_engine_whose_http_server_ends_while_it_publishes_on_is_named_and_not_chosen() {
    let (mut publisher, mut other) = (Publisher::new(), Publisher::new());
    let (port, end) = mortal(0, &publisher.endpoint());
    let daemon = Daemon::configured(&format!("[[worker]]\nid = 1\nendpoint = \"{}\"\n", other.endpoint()));
    daemon.worker_ok(&["add", &format!("id=9,url=http://127.0.0.1:{port}")]);
    publisher.await_subscription();
    other.await_subscription();
    let tokens = prompt(1, 64);
    publisher.store(&tokens);
    other.store(&prompt(2, 64));
    let chosen = || {
        let mut client = daemon.client();
        let space = client.space("m", None).expect("the space").id;
        let reply = client.route(&RouteRequest::new(space, Prompt::of_tokens(&tokens))).expect("a decision");
        reply.chosen().expect("a candidate").worker.id.0
    };
    until("the worker that holds the prompt is chosen", || chosen() == 9);
    end();
    let named = |part: &str| problem(&daemon, &port.to_string()).is_some_and(|problem| problem.contains(part));
    until("it is named", || named("does not answer"));
    let is_found = || daemon.status().findings.iter().any(|finding| finding.name == "source_unusable");
    until("it is a finding", is_found);
    until("it is not chosen", || named("are not chosen") && chosen() == 1);
    // The engine core publishes on, and what it says is still heard.
    publisher.remove_last(&tokens, 1);
    until("its events are heard", || daemon.device(&tokens, Worker::new(9, 0)) == Some(3));
    let (_, end) = mortal(port, &publisher.endpoint());
    until("nothing is the matter", || problem(&daemon, &port.to_string()).is_none());
    until("it is chosen again", || chosen() == 9);
    end();
}

#[test]
fn an_engine_that_never_answers_a_look_holds_nobody_up() {
    let mut publisher = Publisher::new();
    let sources = format!(r#"{{"0": {{"endpoint": "{}"}}}}"#, publisher.endpoint());
    let (silent, _) = answering(move |line| match line {
        "GET /kv_event_sources HTTP/1.1" => http("200 OK", &sources),
        "GET /health HTTP/1.1" => {
            std::thread::park();
            Vec::new()
        }
        _ => http("404 Not Found", ""),
    });
    let (failing, _) = answering(|line| match line {
        "GET /kv_event_sources HTTP/1.1" => http("200 OK", r#"{"0": {"endpoint": "tcp://127.0.0.1:1"}}"#),
        // What follows the head is not read.
        "GET /health HTTP/1.1" => http("503 Service Unavailable", &"x".repeat(8 << 20)),
        _ => http("404 Not Found", ""),
    });
    let mut daemon = Daemon::configured("");
    for (id, port) in [(8, silent), (9, failing)] {
        daemon.worker_ok(&["add", &format!("id={id},url=http://127.0.0.1:{port}")]);
    }
    publisher.await_subscription();
    publisher.store(&prompt(1, 64));
    let named = |port: u16, part: &str| problem(&daemon, &port.to_string()).is_some_and(|said| said.contains(part));
    until("both are named", || named(silent, "/health fails") && named(failing, "status 503"));
    // Where no other can be chosen, it is chosen all the same.
    until("both are not chosen", || named(silent, "are not chosen") && named(failing, "are not chosen"));
    let mut client = daemon.client();
    let space = client.space("m", None).expect("the space").id;
    let tokens = prompt(1, 64);
    assert!(client.route(&RouteRequest::new(space, Prompt::of_tokens(&tokens))).expect("a decision").chosen().is_ok());
    assert_eq!(daemon.process.end("-TERM"), Some(0));
}

#[test]
fn a_server_without_events_is_named() {
    for sources in [http("200 OK", "{}"), http("404 Not Found", "")] {
        let (port, _) = answering(move |line| match line {
            "GET /kv_event_sources HTTP/1.1" => sources.clone(),
            _ => http("404 Not Found", ""),
        });
        let daemon = Daemon::configured("");
        daemon.worker_ok(&["add", &format!("id=9,url=http://127.0.0.1:{port}")]);
        until("it is named", || {
            problem(&daemon, &port.to_string()).is_some_and(|problem| problem.contains("publishes no KV events"))
        });
    }
}

#[test]
fn an_engine_that_does_not_answer_is_named() {
    let port = free_port();
    let daemon = Daemon::configured(&format!("[[worker]]\nid = 1\nurl = \"http://127.0.0.1:{port}\"\n"));
    until("it is named", || {
        problem(&daemon, &port.to_string()).is_some_and(|problem| problem.contains("start the engine"))
    });
    assert!(workers(&daemon).is_empty());
}

#[test]
fn a_worker_with_too_few_open_files_for_its_events_is_heard_once_another_one_leaves() {
    let folder = folder();
    let config = kit::configure_serve(folder.path(), "cores = 1", "");
    let process = Process::start_limited(folder.path(), "daemon", 1024, &["serve", "--config", text(&config)]);
    let daemon = Daemon::served_by(process, folder);
    daemon.worker_ok(&["add", "id=1,endpoint=tcp://127.0.0.1:20000,ranks=200"]);
    until("all are there", || daemon.status().workers.len() == 200);
    let unheard = || {
        let workers = daemon.status().workers;
        workers.iter().filter(|worker| worker.trust.reasons.contains(TrustReason::NoEvents)).count()
    };
    until("some are not heard", || unheard() as u64 == daemon.counter("workers_unheard") && unheard() > 1);
    let before = unheard();
    daemon.worker_ok(&["remove", "1/0"]);
    until("one is heard in its place", || unheard() == before - 1 && daemon.status().workers.len() == 199);
}
