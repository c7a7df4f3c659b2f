//! `kvrouted doctor` beside a daemon whose publishers misbehave.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvrouted::client::{Client, ClientOptions};
use kvrouted::event::flat::Encoder;
use kvrouted::event::{BatchInfo, Content, GroupKind, KvEvent, Medium, Salt, Stored};
use kvrouted::ids::{EngineHash, GroupId, Scheme, Tier, Window};
use kvrouted::limits::{EVENTS_OFF_DECISIONS_MIN, FOREIGN_BLOCKS_HELD_MIN, FOREIGN_REPEATS_MIN};
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use serde_json::Value;

/// Far beyond what anything here takes: reached only by a failure.
const PATIENCE: Duration = Duration::from_secs(120);
const PLAIN_16: Scheme = Scheme { block_size: 16, window: Window::Plain };

/// A publisher of our own flatbuffers. XPUB, to know when the subscription has arrived.
struct Publisher {
    socket: zmq::Socket,
    encoder: Encoder,
    seq: u64,
}

impl Publisher {
    fn new() -> Self {
        let socket = zmq::Context::new().socket(zmq::XPUB).expect("a socket");
        socket.set_linger(0).expect("no linger");
        socket.set_rcvtimeo(PATIENCE.as_millis() as i32).expect("a time limit");
        socket.bind("tcp://127.0.0.1:*").expect("a free port");
        Self { socket, encoder: Encoder::new(), seq: 0 }
    }

    fn endpoint(&self) -> String {
        self.socket.get_last_endpoint().expect("an endpoint").expect("of text")
    }

    fn await_subscription(&self) {
        assert_eq!(self.socket.recv_bytes(0).expect("a subscription").first(), Some(&1));
    }

    /// Stores a chain of so many blocks of `block_size` tokens, all of them `token`.
    fn store(&mut self, token: u32, blocks: u64, block_size: u32) {
        let hashes: Vec<EngineHash> = (0..blocks).map(|at| EngineHash(u64::from(token) << 32 | at)).collect();
        let tokens = vec![token; hashes.len() * block_size as usize];
        let stored = KvEvent::Stored(Stored {
            hashes: &hashes,
            parent: None,
            content: Content::Tokens { tokens: &tokens, bigram: false },
            block_size,
            medium: Medium::Tier(Tier::Device),
            group: GroupId(0),
            group_kind: GroupKind::Main,
            lora: None,
            salt: Salt::Inherited,
            media: &[],
        });
        let info = BatchInfo { scheme: Some(Scheme { block_size, ..PLAIN_16 }), ..BatchInfo::default() };
        let payload = self.encoder.encode(&info, [stored]).to_vec();
        self.send(&self.seq.to_be_bytes(), &payload);
        self.seq += 1;
    }

    fn send(&self, seq: &[u8], payload: &[u8]) {
        self.socket.send_multipart([b"".as_slice(), seq, payload], 0).expect("sent");
    }
}

struct Daemon {
    process: Child,
    folder: tempfile::TempDir,
}

impl Daemon {
    fn start(workers: &[String]) -> Self {
        Self::start_in(tempfile::tempdir().expect("a folder"), workers)
    }

    /// In a folder that may have a folder `workers` of files that name some.
    fn start_in(folder: tempfile::TempDir, workers: &[String]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvrouted"));
        command.args(["serve", "--model", "m", "--block-size", "16", "--log-level", "off", "--socket"]);
        command.arg(folder.path().join("s"));
        let files = folder.path().join("workers");
        if files.exists() {
            command.arg("--discovery").arg(files);
        }
        for worker in workers {
            command.args(["--worker", worker]);
        }
        let daemon = Self { process: command.stderr(Stdio::inherit()).spawn().expect("the daemon starts"), folder };
        let deadline = Instant::now() + PATIENCE;
        while Client::connect(&daemon.socket(), &ClientOptions::default()).is_err() {
            assert!(Instant::now() < deadline, "the daemon does not serve");
            std::thread::sleep(Duration::from_millis(5));
        }
        daemon
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("s")
    }

    /// What the doctor says as JSON, and its exit code.
    fn doctor(&self) -> (Value, i32) {
        doctor(&["--socket", self.socket().to_str().expect("a path of text")])
    }

    /// Asks the doctor until it names `finding`, and does `meanwhile` in between.
    fn until_found(&self, finding: &str, mut meanwhile: impl FnMut()) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let (said, code) = self.doctor();
            let found =
                said["findings"].as_array().expect("findings").iter().find(|of| of["finding"] == finding).cloned();
            if let Some(found) = found {
                assert_eq!(code, i32::from(found["harm"] != "note"), "{said}");
                return found;
            }
            assert!(Instant::now() < deadline, "{finding} is not found: {said}");
            meanwhile();
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn doctor(arguments: &[&str]) -> (Value, i32) {
    let output = Command::new(env!("CARGO_BIN_EXE_kvrouted"))
        .args(["doctor", "--json"])
        .args(arguments)
        .output()
        .expect("the binary runs");
    let said = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    (said, output.status.code().expect("a code"))
}

/// A gateway that books every prompt, and never frees.
struct Gateway {
    client: Client,
    requests: u32,
}

impl Gateway {
    fn new(daemon: &Daemon) -> Self {
        let options = ClientOptions { timeout: Some(PATIENCE), ..ClientOptions::default() };
        Self { client: Client::connect(&daemon.socket(), &options).expect("a connection"), requests: 0 }
    }

    fn send(&mut self, tokens: &[u32]) {
        self.requests += 1;
        let name = self.requests.to_string();
        let space = self.client.space("m", None).expect("the space").id;
        let book = Some(BookingRequest { request_id: &name, attempt: 0 });
        let request = RouteRequest { book, ..RouteRequest::new(space, Prompt::of_tokens(tokens)) };
        self.client.route(&request).expect("a decision");
    }
}

#[test]
fn a_daemon_that_does_not_answer_is_a_finding() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("s");
    let (said, code) = doctor(&["--socket", socket.to_str().expect("a path of text")]);
    assert_eq!((said["findings"][0]["finding"].as_str(), code), (Some("socket_unreachable"), 1));
    let file = folder.path().join("bad.toml");
    std::fs::write(&file, "[serve]\nsokket = 1\n").expect("written");
    let (said, code) = doctor(&["--config", file.to_str().expect("a path of text")]);
    assert_eq!((said["findings"][0]["finding"].as_str(), code), (Some("config_invalid"), 1));
}

#[test]
fn nothing_is_wrong_with_a_fleet_that_is_well() {
    let mut publisher = Publisher::new();
    let daemon = Daemon::start(&[format!("id=1,endpoint={}", publisher.endpoint())]);
    publisher.await_subscription();
    publisher.store(7, 4, 16);
    let deadline = Instant::now() + PATIENCE;
    loop {
        let (said, code) = daemon.doctor();
        if said["findings"].as_array().expect("findings").is_empty() {
            assert_eq!((code, &said["harm"]), (0, &Value::Null));
            break;
        }
        assert!(Instant::now() < deadline, "{said}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_block_size_of_its_own_is_named_with_both_sizes() {
    let mut publisher = Publisher::new();
    let daemon = Daemon::start(&[format!("id=1,endpoint={}", publisher.endpoint())]);
    publisher.await_subscription();
    publisher.store(7, 4, 32);
    let found = daemon.until_found("scheme_mismatch", || {});
    let (what, remedy) = (found["what"].as_str().expect("text"), found["remedy"].as_str().expect("text"));
    assert!(what.contains("of 32 tokens") && what.contains("of 16"), "{what}");
    assert!(remedy.contains("--block-size 16") && remedy.contains("block_size = 32"), "{remedy}");
    assert_eq!(found["workers"], serde_json::json!([{"worker_id": 1, "dp_rank": 0}]));
    let output = Command::new(env!("CARGO_BIN_EXE_kvrouted"))
        .args(["status", "--socket", daemon.socket().to_str().expect("a path of text")])
        .output()
        .expect("the binary runs");
    let status = String::from_utf8_lossy(&output.stdout);
    assert!(status.contains("1/0: to do: start the engine with blocks of 16 tokens"), "{status}");
}

#[test]
fn an_engine_that_says_nothing_and_one_that_repeats_itself_are_named() {
    let (silent, mut storming, forgetful) = (Publisher::new(), Publisher::new(), Publisher::new());
    let routers = [(); 2].map(|()| {
        let router = zmq::Context::new().socket(zmq::ROUTER).expect("a socket");
        router.bind("tcp://127.0.0.1:*").expect("a free port");
        router
    });
    let [replay, unread] = routers.each_ref().map(|of| of.get_last_endpoint().expect("an endpoint").expect("of text"));
    let daemon = Daemon::start(&[
        format!("id=1,endpoint={}", silent.endpoint()),
        format!("id=2,endpoint={}", storming.endpoint()),
        format!("id=3,endpoint={replay}"),
        format!("id=4,endpoint={},replay={unread}", forgetful.endpoint()),
    ]);
    silent.await_subscription();
    storming.await_subscription();
    let found = daemon.until_found("no_publisher", || {});
    assert_eq!(found["workers"][0]["worker_id"], 3);

    storming.store(7, 4, 16);
    let found = daemon.until_found("duplicate_storm", || {
        for _ in 0..32 {
            // The same bytes under the same sequence, as a relay beside the engine would repeat them.
            storming.seq = 0;
            storming.store(7, 4, 16);
        }
    });
    assert_eq!(found["workers"][0]["worker_id"], 2);

    let mut gateway = Gateway::new(&daemon);
    let found = daemon.until_found("events_off", || {
        for token in 0..2 * EVENTS_OFF_DECISIONS_MIN {
            gateway.send(&[token as u32; 64]);
        }
    });
    assert_eq!(found["workers"][0]["worker_id"], 1);

    // Nobody reads what is asked there.
    let found = daemon.until_found("replay_silent", || {});
    assert_eq!((&found["workers"][0]["worker_id"], &found["workers_total"]), (&4.into(), &1.into()));
}

#[test]
fn a_file_of_workers_that_cannot_be_used_is_named_until_it_can() {
    let folder = tempfile::tempdir().expect("a folder");
    let files = folder.path().join("workers");
    std::fs::create_dir(&files).expect("a folder");
    std::fs::write(files.join("a.json"), r#"[{"id": 1"#).expect("written");
    let daemon = Daemon::start_in(folder, &[]);
    let found = daemon.until_found("source_unusable", || {});
    assert!(found["what"].as_str().expect("text").contains("a.json"), "{found}");
    assert_eq!((&found["harm"], &found["workers_total"]), (&"severe".into(), &0.into()));
    std::fs::write(files.join("b.unfinished"), r#"[{"id": 1}]"#).expect("written");
    std::fs::rename(files.join("b.unfinished"), files.join("a.json")).expect("renamed");
    let deadline = Instant::now() + PATIENCE;
    loop {
        let (said, _) = daemon.doctor();
        if !said.to_string().contains("source_unusable") {
            break;
        }
        assert!(Instant::now() < deadline, "{said}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn prompts_that_never_match_are_named() {
    let mut publisher = Publisher::new();
    let daemon = Daemon::start(&[format!("id=1,endpoint={}", publisher.endpoint())]);
    publisher.await_subscription();
    // What it says it holds is of another tokenizer.
    publisher.store(1_000_000, 2 * FOREIGN_BLOCKS_HELD_MIN, 16);
    let mut gateway = Gateway::new(&daemon);
    let found = daemon.until_found("foreign_hashes", || {
        for token in 0..FOREIGN_REPEATS_MIN {
            gateway.send(&[token as u32; 64]);
        }
    });
    assert_eq!((&found["harm"], &found["workers_total"]), (&"severe".into(), &1.into()));
    assert!(found["what"].as_str().expect("text").contains("repeats_missed"), "{found}");

    // One hit takes it back.
    publisher.store(3, 4, 16);
    let deadline = Instant::now() + PATIENCE;
    loop {
        gateway.send(&[3; 64]);
        let (said, _) = daemon.doctor();
        if !said.to_string().contains("foreign_hashes") {
            break;
        }
        assert!(Instant::now() < deadline, "{said}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
