//! The relay as its users meet it: an engine, `kvrouted relay` beside it, `kvrouted serve` behind that, and a query.

#![cfg(unix)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

#[allow(dead_code, reason = "each user of the encoder needs a part of it")]
#[path = "../src/ingest/tests/vllm.rs"]
mod vllm;
use vllm::{BLOCK_SIZE, Batch};

/// Far beyond what anything here takes: reached only by a failure.
const PATIENCE: Duration = Duration::from_secs(60);

#[track_caller]
fn until<T>(what: &str, mut holds: impl FnMut() -> Result<T, String>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match holds() {
            Ok(held) => return held,
            Err(why) => assert!(Instant::now() < deadline, "waited in vain until {what}: {why}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// An engine without a replay socket. XPUB, to know when the relay listens.
struct Engine {
    socket: zmq::Socket,
    next: u64,
    stamp: u32,
}

impl Engine {
    fn start(endpoint: &str, stamp: u32) -> Self {
        let socket = zmq::Context::new().socket(zmq::XPUB).expect("a socket");
        socket.set_linger(0).expect("no linger");
        socket.set_rcvtimeo(PATIENCE.as_millis() as i32).expect("a time limit");
        until("the endpoint is free", || socket.bind(endpoint).map_err(|error| error.to_string()));
        Self { socket, next: 0, stamp }
    }

    fn heard(self) -> Self {
        while self.socket.recv_bytes(0).expect("a subscription").first() != Some(&1) {}
        self
    }

    fn send(&mut self, fill: impl FnOnce(Batch) -> Batch) {
        let payload = fill(Batch::new(self.stamp + self.next as u32)).payload();
        self.socket.send_multipart([b"".as_slice(), &self.next.to_be_bytes(), &payload], 0).expect("sent");
        self.next += 1;
    }

    /// One block more of a chain in each batch.
    fn extend(&mut self, blocks: std::ops::RangeInclusive<u64>) {
        for at in blocks {
            self.send(|batch| batch.stored((at > 1).then_some(at - 1), &[at], &[at as u32]));
        }
    }
}

/// A process that is killed when it is dropped.
struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    fn start(folder: &Path, name: &str, args: &[String]) -> Self {
        let log = folder.join(format!("{name}.log"));
        let file = std::fs::File::options().create(true).append(true).open(&log).expect("a log");
        let child = Command::new(env!("CARGO_BIN_EXE_kvrouted"))
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(file)
            .spawn()
            .expect("the binary runs");
        Self { child, log }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
        if std::thread::panicking() {
            let log = std::fs::read_to_string(&self.log).unwrap_or_default();
            let tail: Vec<&str> = log.lines().rev().take(40).collect();
            let lines: Vec<&str> = tail.into_iter().rev().collect();
            drop(std::io::Write::write_all(&mut std::io::stderr(), lines.join("\n").as_bytes()));
        }
    }
}

/// A folder with every socket in it.
struct Place {
    folder: tempfile::TempDir,
    /// Batches the relay keeps.
    kept: u64,
}

impl Place {
    fn new(kept: u64) -> Self {
        Self { folder: tempfile::tempdir().expect("a folder"), kept }
    }

    fn endpoint(&self, name: &str) -> String {
        format!("ipc://{}/{name}", self.folder.path().display())
    }

    fn socket(&self) -> String {
        self.folder.path().join("router").display().to_string()
    }

    fn relay(&self) -> Process {
        let text = format!(
            "[relay]\nendpoint = \"{}\"\nreplay = \"{}\"\nheartbeat_ms = 200\nbuffer_batches_max = {}\n\
             [[space]]\nmodel = \"m\"\n[[worker]]\nid = 1\nendpoint = \"{}\"\n",
            self.endpoint("events"),
            self.endpoint("replay"),
            self.kept,
            self.endpoint("engine"),
        );
        let file = self.folder.path().join("relay.toml");
        std::fs::write(&file, text).expect("written");
        Process::start(self.folder.path(), "relay", &["relay".into(), "--config".into(), file.display().to_string()])
    }

    fn router(&self) -> Process {
        let worker = format!("id=1,endpoint={},replay={}", self.endpoint("events"), self.endpoint("replay"));
        let args = ["serve", "--socket", &self.socket(), "--model", "m", "--worker", &worker].map(String::from);
        Process::start(self.folder.path(), "router", &args)
    }

    /// What a command says in JSON.
    fn ask(&self, args: &[&str]) -> Result<Value, String> {
        let asked = Command::new(env!("CARGO_BIN_EXE_kvrouted"))
            .args(args)
            .args(["--json", "--socket", &self.socket()])
            .stdin(Stdio::null())
            .output()
            .expect("the binary runs");
        let words = String::from_utf8_lossy(&asked.stdout).into_owned();
        serde_json::from_str(&words).map_err(|_| String::from_utf8_lossy(&asked.stderr).into_owned())
    }

    /// Trust and blocks held of a chain of so many.
    fn held(&self, blocks: u32) -> Result<(String, u64), String> {
        let contents: Vec<u32> = (1..=blocks).collect();
        let tokens: Vec<String> = vllm::tokens(&contents).iter().map(u32::to_string).collect();
        let reply = self.ask(&["query", "--model", "m", "--tokens", &tokens.join(",")])?;
        let candidate = &reply["candidates"][0];
        let (trust, device) = (candidate["trust"].as_str(), candidate["overlap_blocks"]["device"].as_u64());
        trust.zip(device).map(|(trust, device)| (trust.to_owned(), device)).ok_or_else(|| reply.to_string())
    }

    #[track_caller]
    fn await_held(&self, blocks: u32, trust: &str, device: u64) {
        until(&format!("{device} blocks are held and {trust}"), || {
            let held = self.held(blocks)?;
            if held == (trust.to_owned(), device) { Ok(()) } else { Err(format!("{held:?}")) }
        });
    }

    fn count(&self, counter: &str) -> u64 {
        let status = self.ask(&["status"]).expect("a status");
        status["workers"][0]["counters"][counter].as_u64().unwrap_or_else(|| panic!("{counter}: {status}"))
    }
}

#[test]
fn a_router_that_comes_late_is_exact_by_batches_or_by_a_snapshot() {
    assert_eq!(BLOCK_SIZE, 4);
    for (kept, snapshots) in [(1000, 0), (2, 1)] {
        let place = Place::new(kept);
        let mut engine = Engine::start(&place.endpoint("engine"), 0);
        let _relay = place.relay();
        engine = engine.heard();
        engine.extend(1..=20);
        let _router = place.router();
        place.await_held(20, "exact", 20);
        assert_eq!(place.count("snapshots_taken"), snapshots);
        engine.send(|batch| batch.removed(&[20]));
        engine.extend(20..=22);
        place.await_held(22, "exact", 22);
        until("heartbeats are heard", || if place.count("heartbeats") > 0 { Ok(()) } else { Err(String::new()) });
    }
}

#[test]
fn a_restart_of_the_engine_or_of_the_relay_is_a_restart_of_the_worker() {
    let place = Place::new(1000);
    let mut engine = Engine::start(&place.endpoint("engine"), 0);
    let relay = place.relay();
    let _router = place.router();
    engine = engine.heard();
    engine.extend(1..=5);
    place.await_held(5, "exact", 5);

    drop(engine);
    place.await_held(5, "unproven", 0);
    let mut engine = Engine::start(&place.endpoint("engine"), 1000).heard();
    engine.extend(1..=3);
    place.await_held(5, "exact", 3);

    // Without a replay socket of the engine's the next relay cannot know what was before it.
    drop(relay);
    let _relay = place.relay();
    engine = engine.heard();
    engine.send(|batch| batch.stored(None, &[101], &[9]));
    place.await_held(5, "lower_bound", 0);
    engine.send(Batch::cleared);
    engine.extend(1..=4);
    place.await_held(5, "exact", 4);
    assert!(place.count("restarts") >= 1);
}
