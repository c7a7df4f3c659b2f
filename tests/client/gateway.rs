//! The example gateway as a process, between callers over HTTP, a daemon, and simulated engines that publish events.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::kit::{self, Daemon, WAIT_MAX, folder, prompt, skipped, text, until};

/// The example, beside the binary; `None` = it was not built, which `cargo test` does and `cargo test --test` does not.
fn example() -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_BIN_EXE_kvrouted")).parent()?.join("examples/gateway");
    if !path.exists() {
        skipped("the example gateway", "it is not built: cargo build --example gateway");
        return None;
    }
    Some(path)
}

/// A process that says a first line on standard output, and ends with its standard input or the test.
struct Helper {
    child: Child,
    first_line: String,
}

impl Helper {
    fn start(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it runs");
        let mut first_line = String::new();
        let out = child.stdout.take().expect("its output");
        BufReader::new(out).read_line(&mut first_line).expect("a line");
        Self { child, first_line: first_line.trim().to_owned() }
    }

    fn kill(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it ends");
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Two engines, a daemon that hears them, and the gateway in front.
struct World {
    address: String,
    engines: Vec<Helper>,
    daemon: Daemon,
    gateway: Helper,
    _folder: Arc<TempDir>,
}

fn world(example: &Path) -> World {
    let folder = folder();
    let link = |id: usize| folder.path().join(format!("engine-{id}"));
    let engine = |id: usize| {
        let (link, log) = (link(id), folder.path().join(format!("engine-{id}.log")));
        let arguments = ["demo-engine", "--link", text(&link), "--log", text(&log), "--capacity-blocks", "4096"];
        Helper::start(kit::kvrouted(&arguments))
    };
    let engines: Vec<_> = (1..=2).map(engine).collect();
    let workers: Vec<_> = engines
        .iter()
        .enumerate()
        .map(|(at, engine)| format!("id={},endpoint={}", at + 1, engine.first_line))
        .collect();
    let daemon = Daemon::start_in(Arc::clone(&folder), &["--worker", &workers[0], "--worker", &workers[1]]);
    let mut command = Command::new(example);
    command.args(["--model", "m", "--listen", "127.0.0.1:0", "--socket", text(&daemon.socket())]);
    for id in 1..=2 {
        command.arg("--engine").arg(format!("{id}={}", link(id).display()));
    }
    let gateway = Helper::start(command);
    let address = gateway.first_line.rsplit(' ').next().expect("an address").to_owned();
    World { address, engines, daemon, gateway, _folder: folder }
}

/// What came of one request.
#[derive(Debug)]
struct Stream {
    status: u16,
    events: Vec<Value>,
    is_whole: bool,
}

impl Stream {
    fn tokens(&self) -> Vec<u64> {
        let tokens = self.events.iter().flat_map(|event| event["choices"][0]["tokens"].as_array().cloned());
        tokens.flatten().filter_map(|token| token.as_u64()).collect()
    }

    /// Who ran it first, who chose that, and the blocks of the prompt that it had.
    fn first(&self) -> (u64, &str, u64) {
        let said = &self.events[0]["kvrouted"];
        let number = |name: &str| said[name].as_u64().expect("a number");
        (number("worker"), said["decided_by"].as_str().expect("a text"), number("cached_blocks"))
    }
}

impl World {
    fn ask(&self, body: &Value) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).expect("the gateway listens");
        stream.set_read_timeout(Some(WAIT_MAX)).expect("a timeout");
        let body = body.to_string();
        // An answer of this version of HTTP ends with the connection, and comes in no chunks.
        let head = format!("POST /v1/completions HTTP/1.0\r\ncontent-length: {}\r\n\r\n", body.len());
        stream.write_all((head + &body).as_bytes()).expect("sent");
        stream
    }

    fn complete(&self, body: &Value) -> Stream {
        let mut answer = String::new();
        self.ask(body).read_to_string(&mut answer).expect("an answer");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        let is_whole = body.ends_with("data: [DONE]\n\n");
        let lines = body.split("\n\n").filter_map(|line| line.strip_prefix("data: "));
        let events = lines.filter_map(|line| serde_json::from_str(line).ok()).collect();
        Stream { status, events, is_whole }
    }

    /// A prompt of 20 blocks, whole and with the tokens it should have.
    fn completed(&self, seed: u32, output: u64) -> Stream {
        let stream = self.complete(&json!({"prompt": prompt(seed, 320), "max_tokens": output}));
        assert_eq!((stream.status, stream.is_whole), (200, true), "{:?}", stream.events.last());
        assert!(stream.tokens().into_iter().eq(0..output), "each token once and in order");
        assert_eq!(stream.events.last().expect("events")["choices"][0]["finish_reason"], "length");
        stream
    }

    /// A counter of each worker.
    fn counted(&self, name: &str) -> Vec<u64> {
        let of = |counters: &[(String, u64)]| counters.iter().find(|(of, _)| of == name).map_or(0, |(_, value)| *value);
        self.daemon.status().workers.iter().map(|worker| of(&worker.counters)).collect()
    }

    fn booked(&self) -> u64 {
        self.counted("active_requests").iter().sum()
    }

    fn is_cached(&self, seed: u32, worker: u64) -> bool {
        self.daemon.device(&prompt(seed, 320), kvrouted::ids::Worker::new(worker, 0)) == Some(20)
    }
}

#[test]
fn it_streams_and_frees_whatever_becomes_of_callers_engines_and_the_daemon() {
    let Some(example) = example() else { return };
    let mut world = world(&example);

    // The engine that computed a prompt gets it again.
    let firsts: Vec<(u64, String)> = std::thread::scope(|scope| {
        let callers: Vec<_> = (0..8)
            .map(|seed| {
                let world = &world;
                scope.spawn(move || world.completed(seed, 40))
            })
            .collect();
        let firsts = callers.into_iter().map(|caller| caller.join().expect("it ends"));
        firsts.map(|stream| (stream.first().0, stream.first().1.to_owned())).collect()
    });
    assert!(firsts.iter().all(|(_, decided_by)| decided_by == "daemon"), "{firsts:?}");
    until("nothing is booked", || world.booked() == 0);
    for (seed, (worker, _)) in (0..).zip(&firsts) {
        until("its blocks are known", || world.is_cached(seed, *worker));
        assert_eq!(world.completed(seed, 40).first(), (*worker, "daemon", 20));
        until("nothing is booked", || world.booked() == 0);
    }

    // A caller that hangs up leaves no booking.
    let mut stream = world.ask(&json!({"prompt": [1, 2, 3], "max_tokens": 16_000}));
    stream.read_exact(&mut [0; 15]).expect("it has begun");
    assert!(world.booked() > 0);
    drop(stream);
    until("its booking is freed", || world.booked() == 0);

    // What means nothing.
    for body in [json!({}), json!([]), json!({"prompt": [-1]}), json!({"prompt": 7})] {
        assert_eq!(world.complete(&body).status, 400, "{body}");
    }

    // An engine is lost with streams on it: they go on elsewhere. Either engine has room for all of them and what was given up.
    let streams: Vec<Stream> = std::thread::scope(|scope| {
        let callers: Vec<_> = (100..108)
            .map(|seed| {
                let world = &world;
                scope.spawn(move || world.completed(seed, 5_000))
            })
            .collect();
        until("all have begun, some on each", || {
            let counted = |name| world.counted(name);
            let (requests, prefills) = (counted("active_requests"), counted("active_prefill_tokens"));
            requests.iter().sum::<u64>() == 8 && requests.iter().all(|of| *of > 0) && prefills == [0, 0]
        });
        // Only its process is touched; callers hold the rest.
        let pid = world.engines[0].child.id().to_string();
        assert!(Command::new("kill").args(["-KILL", &pid]).status().expect("kill").success());
        callers.into_iter().map(|caller| caller.join().expect("it ends")).collect()
    });
    let moved = |stream: &Stream| {
        let workers = stream.events.iter().map(|event| event["kvrouted"]["worker"].as_u64());
        workers.collect::<std::collections::BTreeSet<_>>().len() == 2
    };
    assert!(streams.iter().any(moved), "some were on it");
    until("nothing is booked", || world.booked() == 0);
    world.engines[0].kill();
    until("the other one takes all", || (0..8).all(|seed| world.completed(seed, 40).first().0 == 2));
    until("nothing is booked", || world.booked() == 0);

    // Without the daemon the gateway decides alone.
    world.daemon.process.end("-KILL");
    for seed in 0..8 {
        assert_eq!(world.completed(seed, 40).first().1, "fallback");
    }
}

#[test]
fn a_gateway_that_is_short_of_descriptors_answers_once_it_has_some() {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    let Some(example) = example() else { return };
    let world = world(&example);
    let pid = world.gateway.child.id();
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("its descriptors").count() as u64;
    let pid = Pid::from_raw(pid as i32).expect("a process");
    let limit = |descriptors| Rlimit { current: Some(descriptors), maximum: Some(descriptors) };
    let before = prlimit(Some(pid), Resource::Nofile, limit(open + 8)).expect("its limit");
    assert!(before.maximum.is_none_or(|most| most > open + 8));
    let idle: Vec<_> = (0..64).map(|_| TcpStream::connect(&world.address).expect("the kernel takes it")).collect();
    let is_full =
        || std::fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero())).expect("it runs").count() as u64 >= open + 8;
    until("it has no descriptor left", is_full);
    drop(idle);
    world.completed(9, 4);
}
