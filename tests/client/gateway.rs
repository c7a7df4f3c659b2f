//! The example gateway as a process, between callers over HTTP, a daemon, and engines that answer as vLLM streams.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use serde_json::{Value, json};

use crate::kit::{Daemon, WAIT_MAX, prompt, skipped, text, until};

/// What an engine sends before the end of its reply.
const EVENTS: &str = "data: {\"choices\": [{\"text\": \"a\"}]}\n\ndata: {\"choices\": [{\"text\": \"b\"}]}\n\n";
const LAST_EVENT: &str = "data: [DONE]\n\n";

/// The example, beside the binary; `None` = it was not built, which `cargo test` does and `cargo test --test` does not.
fn example() -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_BIN_EXE_kvrouted")).parent()?.join("examples/gateway");
    if !path.exists() {
        skipped("the example gateway", "it is not built: cargo build --example gateway");
        return None;
    }
    Some(path)
}

/// An engine's HTTP server.
struct Engine {
    address: String,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    /// Whether replies wait for their caller to hang up before their last event.
    waits: AtomicBool,
    /// Whether connections are closed without a reply.
    is_lost: AtomicBool,
    hung_up: AtomicUsize,
}

impl Engine {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("an address").to_string();
        let state = Arc::new(State::default());
        let of_engine = Arc::clone(&state);
        std::thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                let state = Arc::clone(&of_engine);
                // A gateway that has gone needs no reply.
                std::thread::spawn(move || reply(connection, &state).ok());
            }
        });
        Self { address, state }
    }
}

fn reply(mut connection: TcpStream, state: &State) -> std::io::Result<()> {
    let (_, body) = read_message(&mut connection)?;
    if state.is_lost.load(Ordering::SeqCst) {
        return Ok(());
    }
    // The caller sees in the reply that its body came through unchanged.
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
    connection.write_all(format!("{head}data: {body}\n\n{EVENTS}").as_bytes())?;
    if state.waits.load(Ordering::SeqCst) && connection.read(&mut [0])? == 0 {
        state.hung_up.fetch_add(1, Ordering::SeqCst);
        return Ok(());
    }
    connection.write_all(LAST_EVENT.as_bytes())
}

/// Head and body of a request.
fn read_message(connection: &mut TcpStream) -> std::io::Result<(String, String)> {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        connection.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    let head = String::from_utf8_lossy(&head).to_ascii_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:")).expect("a length");
    let mut body = vec![0; length.trim().parse().expect("a number")];
    connection.read_exact(&mut body)?;
    Ok((head, String::from_utf8(body).expect("JSON")))
}

/// Two engines, a daemon that guesses their caches from what it booked, and the gateway in front.
struct World {
    address: String,
    engines: [Engine; 2],
    daemon: Daemon,
    gateway: Child,
    said: BufReader<ChildStdout>,
}

impl Drop for World {
    fn drop(&mut self) {
        drop(self.gateway.kill());
        drop(self.gateway.wait());
    }
}

fn world(example: &Path) -> World {
    let daemon = Daemon::configured("approximate = true\n[[worker]]\nid = 1\n[[worker]]\nid = 2\n");
    let engines = [Engine::start(), Engine::start()];
    let mut command = Command::new(example);
    command.args([text(&daemon.socket()), "m", "127.0.0.1:0"]);
    command.args([format!("1={}", engines[0].address), format!("2={}", engines[1].address)]);
    let mut gateway = command.stdout(Stdio::piped()).spawn().expect("it runs");
    let said = BufReader::new(gateway.stdout.take().expect("its output"));
    let mut world = World { address: String::new(), engines, daemon, gateway, said };
    world.address = world.said().rsplit(' ').next().expect("an address").to_owned();
    world
}

impl World {
    /// The gateway's next line of output.
    fn said(&mut self) -> String {
        let mut line = String::new();
        self.said.read_line(&mut line).expect("a line");
        line.trim().to_owned()
    }

    fn ask(&self, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).expect("the gateway listens");
        stream.set_read_timeout(Some(WAIT_MAX)).expect("a timeout");
        let head = format!("POST /v1/completions HTTP/1.1\r\nContent-Length: {}\r\n\r\n", body.len());
        stream.write_all((head + body).as_bytes()).expect("sent");
        stream
    }

    /// Status and body of the reply.
    fn post(&self, body: &str) -> (u16, String) {
        let mut reply = String::new();
        self.ask(body).read_to_string(&mut reply).expect("a reply");
        let (head, body) = reply.split_once("\r\n\r\n").expect("a head");
        (head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status"), body.to_owned())
    }

    fn completed(&self, seed: u32) {
        let body = json!({"model": "m", "prompt": prompt(seed, 320), "stream": true}).to_string();
        assert_eq!(self.post(&body), (200, format!("data: {body}\n\n{EVENTS}{LAST_EVENT}")));
    }

    /// The worker that ran a prompt, and who chose it.
    fn chosen(&mut self, seed: u32) -> String {
        self.completed(seed);
        self.said()
    }

    fn counted(&self, name: &str) -> u64 {
        let of = |counters: &[(String, u64)]| counters.iter().find(|(of, _)| of == name).map_or(0, |(_, value)| *value);
        self.daemon.status().workers.iter().map(|worker| of(&worker.counters)).sum()
    }

    fn booked(&self) -> u64 {
        self.counted("active_requests")
    }
}

#[test]
fn it_relays_and_frees_whatever_becomes_of_callers_engines_and_the_daemon() {
    let Some(example) = example() else { return };
    let mut world = world(&example);

    // By the daemon: the worker that computed a prompt gets it again.
    let firsts: Vec<String> = (0..4).map(|seed| world.chosen(seed)).collect();
    assert!(firsts.iter().all(|said| said.ends_with("by the daemon")), "{firsts:?}");
    until("nothing is booked", || world.booked() == 0);
    assert_eq!((0..4).map(|seed| world.chosen(seed)).collect::<Vec<_>>(), firsts);

    // Many at a time.
    std::thread::scope(|scope| {
        let world = &world;
        for seed in 0..8 {
            scope.spawn(move || world.completed(seed));
        }
    });
    (0..8).for_each(|_| drop(world.said()));
    until("nothing is booked", || world.booked() == 0);

    // A caller that hangs up leaves no booking, and ends the request at the engine.
    let waits = |world: &World, yes| world.engines.iter().for_each(|at| at.state.waits.store(yes, Ordering::SeqCst));
    waits(&world, true);
    let mut stream = world.ask(&json!({"prompt": prompt(9, 320)}).to_string());
    stream.read_exact(&mut [0; 15]).expect("it has begun");
    assert_eq!(world.booked(), 1);
    until("its prefill has ended", || world.counted("active_prefill_tokens") == 0);
    drop(stream);
    drop(world.said());
    until("its booking is freed", || world.booked() == 0);
    let hung_up = |world: &World| world.engines.iter().map(|at| at.state.hung_up.load(Ordering::SeqCst)).sum::<usize>();
    until("the engine's connection is closed", || hung_up(&world) == 1);
    waits(&world, false);

    // Bad input.
    for body in [json!({}), json!([]), json!({"prompt": [-1]}), json!({"prompt": 7}), Value::from("text")] {
        assert_eq!(world.post(&body.to_string()).0, 400, "{body}");
    }

    // Without the engine that has it, another one runs it.
    let lost = usize::from(firsts[0].starts_with("worker 2"));
    world.engines[lost].state.is_lost.store(true, Ordering::SeqCst);
    let left = format!("worker {}", 2 - lost);
    for _ in 0..3 {
        let said = world.chosen(0);
        assert!(said.starts_with(&left), "{said}");
    }
    until("nothing is booked", || world.booked() == 0);

    // Without the daemon, the client decides.
    world.daemon.process.end("-KILL");
    for seed in 0..4 {
        let said = world.chosen(seed);
        assert!(said.starts_with(&left) && said.ends_with("by the client"), "{said}");
    }
}
