//! A worker's events by way of a JetStream stream: an engine, a relay that stores them, and daemons that read them there.
//! What such a daemon says is compared with one that hears the engine itself.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvrouted::fleet::WorkerState;
use kvrouted::ids::Worker;
use kvrouted::trust::TrustLevel;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use tempfile::TempDir;

use crate::kit::http::scrape;
use crate::kit::nats::NatsServer;
use crate::kit::ports::free_port;
use crate::kit::remote::Authority;
use crate::kit::replayer::Engine;
use crate::kit::{Daemon, Process, configure, folder, prompt, text, until, until_ok, write_secret};

const WORKER: u64 = 1;
/// Blocks of each prompt of a test.
const BLOCKS: u32 = 6;
const PROMPTS: u32 = 12;

fn jetstream() -> Option<NatsServer> {
    NatsServer::start("events over NATS", "jetstream { store_dir: \"FOLDER/store\" }\n")
}

fn tokens(of: u32) -> Vec<u32> {
    prompt(of, BLOCKS * 16)
}

/// An engine with what it holds: blocks of each prompt.
struct Site {
    engine: Engine,
    server: NatsServer,
    folder: Arc<TempDir>,
    held: [u32; PROMPTS as usize],
    random: SmallRng,
    /// Batches that the relay keeps, and after which it stores a snapshot.
    kept: u64,
    metrics_port: u16,
    /// The server as relay and daemons name it, and how they log in there: lines of `[ingest]`.
    address: String,
    login: String,
}

impl Site {
    fn new(server: NatsServer, kept: u64) -> Self {
        let (address, login) = (server.address("nats"), String::new());
        Self {
            engine: Engine::new(),
            server,
            folder: folder(),
            held: [0; PROMPTS as usize],
            random: SmallRng::seed_from_u64(kept),
            kept,
            metrics_port: free_port(),
            address,
            login,
        }
    }

    fn engine_worker(&self) -> String {
        let (endpoint, replay) = (self.engine.publisher.endpoint(), self.engine.replayer.endpoint.clone());
        format!("[[worker]]\nid = {WORKER}\nendpoint = \"{endpoint}\"\nreplay = \"{replay}\"\n")
    }

    fn relay(&self) -> Process {
        let config = format!(
            "[relay]\nendpoint = \"tcp://127.0.0.1:0\"\nreplay = \"tcp://127.0.0.1:0\"\nheartbeat_ms = 200\n\
             buffer_batches_max = {}\nnats = [\"{}\"]\n[ingest]\n{}[metrics]\nport = {}\n[[space]]\nmodel = \"m\"\n{}",
            self.kept,
            self.address,
            self.login,
            self.metrics_port,
            self.engine_worker(),
        );
        let file = self.folder.path().join("relay.toml");
        std::fs::write(&file, config).expect("written");
        let relay = Process::start(self.folder.path(), "relay", &["relay", "--config", text(&file)]);
        self.engine.await_subscription();
        relay
    }

    /// A daemon that reads the stream.
    fn router(&self) -> Daemon {
        let folder = folder();
        let worker = format!("[[worker]]\nid = {WORKER}\nendpoint = \"{}\"\n", self.address);
        let ingest = format!("[ingest]\ndown_after_ms = 500\n{}[log]\nlevel = \"debug\"\n", self.login);
        let config = configure(folder.path(), &format!("{worker}{ingest}"));
        Daemon::serve(folder, &["--config", text(&config)])
    }

    /// A daemon that hears the engine itself.
    fn oracle(&self) -> Daemon {
        let oracle = Daemon::configured(&self.engine_worker());
        self.engine.await_subscription();
        oracle
    }

    /// Stores or removes some blocks of one prompt, or clears the cache.
    fn change(&mut self) {
        let of = self.random.random_range(0..PROMPTS);
        let held = self.held[of as usize];
        match self.random.random_range(0..20) {
            0 => {
                self.engine.clear();
                self.held = [0; PROMPTS as usize];
            }
            1..8 if held > 0 => {
                let blocks = self.random.random_range(1..=held);
                self.engine.remove_last(&tokens(of)[..held as usize * 16], blocks as usize);
                self.held[of as usize] -= blocks;
            }
            // An engine announces only blocks that it did not hold.
            _ if held == 0 => {
                let blocks = self.random.random_range(1..=BLOCKS);
                self.engine.store(&tokens(of)[..blocks as usize * 16]);
                self.held[of as usize] = blocks;
            }
            _ => {}
        }
    }

    fn change_often(&mut self, times: u32) {
        (0..times).for_each(|_| self.change());
    }

    fn overlaps(router: &Daemon) -> Vec<u32> {
        (0..PROMPTS).map(|of| router.device(&tokens(of), Worker::new(WORKER, 0)).unwrap_or_default()).collect()
    }

    /// Waits until a router is exact and says what the engine holds. No exact answer on the way may be one that it never was.
    #[track_caller]
    fn until_exact(&self, router: &Daemon) {
        until_ok("the router says what the engine holds", || {
            let (trust, overlaps) = (trust(router), Self::overlaps(router));
            let is_right = trust == TrustLevel::Exact && overlaps == self.held;
            if is_right { Ok(()) } else { Err(format!("{trust:?} {overlaps:?}, held {:?}", self.held)) }
        });
    }

    /// A counter of the relay.
    fn counted(&self, name: &str) -> u64 {
        let (_, page) = scrape(self.metrics_port);
        let line = page.lines().find_map(|line| line.strip_prefix(&format!("kvrouted_relay_{name}_total ")));
        line.and_then(|count| count.parse().ok()).unwrap_or_else(|| panic!("no counter {name} in {page}"))
    }

    fn subject(what: &str) -> String {
        format!("kvrouted.{what}.{WORKER}.0")
    }
}

fn trust(router: &Daemon) -> TrustLevel {
    router.status().workers[0].trust.level
}

#[test]
fn what_comes_by_the_stream_is_what_comes_from_the_engine_itself() {
    let Some(server) = jetstream() else { return };
    let mut site = Site::new(server, 1 << 14);
    let _relay = site.relay();
    let (oracle, router) = (site.oracle(), site.router());
    for _ in 0..10 {
        site.change_often(30);
        site.until_exact(&oracle);
        site.until_exact(&router);
        assert_eq!(Site::overlaps(&oracle), Site::overlaps(&router));
    }
    // Who comes late replays the stream from its first batch.
    let late = site.router();
    site.until_exact(&late);
    assert_eq!((late.worker_counter(0, "snapshots_taken"), site.counted("nats_starts")), (0, 1));
    assert!(late.worker_counter(0, "batches") >= 100);
    site.change_often(30);
    site.until_exact(&late);
    until("heartbeats are heard", || late.worker_counter(0, "heartbeats") > 0);
}

#[test]
fn who_joins_begins_with_a_snapshot_however_often_what_was_before_it_is_purged() {
    let Some(server) = jetstream() else { return };
    let mut site = Site::new(server, 8);
    let _relay = site.relay();
    site.change_often(60);
    until("a snapshot is stored", || site.counted("nats_starts") > 0);
    // The stream is purged all the time while others join.
    let first = site.router();
    for _ in 0..6 {
        site.change_often(100);
        let joins = site.router();
        site.change_often(100);
        site.until_exact(&joins);
        assert!(joins.worker_counter(0, "snapshots_taken") > 0);
    }
    site.until_exact(&first);
    assert!(site.counted("nats_starts") > 6, "{}", site.counted("nats_starts"));
    let mut operator = site.server.stranger();
    operator.subscribe("answers");
    operator.publish("$JS.API.STREAM.INFO.kvrouted_events", "answers", b"");
    let (_, info) = operator.message();
    let info: serde_json::Value = serde_json::from_slice(&info).expect("JSON");
    assert!(info["state"]["messages"].as_u64().expect("a number") < 200, "{info}");
}

#[test]
fn events_come_through_tls_to_those_who_log_in_and_to_no_others() {
    let (files, authority) = (folder(), Authority::new());
    let (certificate, key) = authority.certify("localhost");
    let write = |name: &str, content: &str| {
        let path = files.path().join(name);
        write_secret(&path, content);
        path
    };
    let (crt, key) = (write("crt", &certificate), write("key", &key));
    let options = format!(
        "jetstream {{ store_dir: \"FOLDER/store\" }}\nauthorization {{ user: kvrouted, password: hush }}\n\
         tls {{ cert_file: {crt:?}, key_file: {key:?} }}\n"
    );
    let Some(server) = NatsServer::start("events over NATS", &options) else { return };
    let mut site = Site::new(server, 1 << 14);
    site.address = site.server.address("tls").replace("127.0.0.1", "localhost");
    let login = |password: &Path, authority: &Path| {
        format!("nats_user = \"kvrouted\"\nnats_secret_file = {password:?}\nnats_ca_file = {authority:?}\n")
    };
    let (password, known) = (write("password", "hush\n"), write("known", &authority.certificate));
    site.login = login(&password, &known);
    let (_relay, router) = (site.relay(), site.router());
    site.change_often(60);
    site.until_exact(&router);
    let (wrong, other) = (write("wrong", "guess\n"), write("other", &Authority::new().certificate));
    for (lines, said) in [(login(&wrong, &known), "Authorization Violation"), (login(&password, &other), "TLS: ")] {
        site.login = lines;
        let refused = site.router();
        until("the refusal is said", || refused.process.log().contains(said));
        assert_ne!(trust(&refused), TrustLevel::Exact);
        assert_eq!(Site::overlaps(&refused), [0; PROMPTS as usize]);
        assert!(!refused.process.log().contains("guess"), "{}", refused.process.log());
    }
}

#[test]
fn a_relay_that_was_killed_and_one_that_comes_behind_leave_nothing_wrong() {
    let Some(server) = jetstream() else { return };
    let mut site = Site::new(server, 16);
    let mut relay = site.relay();
    let router = site.router();
    for _ in 0..3 {
        site.change_often(60);
        site.until_exact(&router);
        assert_eq!(relay.end("-KILL"), None);
        // Nobody stores these, until the next relay has fetched them.
        site.change_often(20);
        until("the relay is missed", || trust(&router) == TrustLevel::Unproven);
        relay = site.relay();
        site.until_exact(&router);
        site.until_exact(&site.router());
    }
    assert!(router.worker_counter(0, "restarts") >= 3);
    // The engine begins again with an empty cache.
    site.engine.restart();
    site.held = [0; PROMPTS as usize];
    site.engine.store(&tokens(0));
    site.held[0] = BLOCKS;
    site.until_exact(&router);
    site.until_exact(&site.router());
}

#[test]
fn while_the_server_is_away_decisions_go_on_and_what_it_lost_is_stored_again() {
    let Some(server) = jetstream() else { return };
    let mut site = Site::new(server, 1 << 14);
    let _relay = site.relay();
    let router = site.router();
    for round in 0..3 {
        site.change_often(60);
        site.until_exact(&router);
        let (known, lost) = (Site::overlaps(&router), site.counted("nats_lost"));
        site.server.kill();
        until("trust says so", || trust(&router) == TrustLevel::Unproven);
        until("the relay knows", || site.counted("nats_lost") > lost);
        site.change_often(60);
        // For longer than it takes until a worker is down whose own publisher is away.
        std::thread::sleep(std::time::Duration::from_millis(1000));
        assert_eq!((Site::overlaps(&router), router.status().workers[0].state), (known, WorkerState::Ready));
        if round == 1 {
            std::fs::remove_dir_all(site.server.folder().join("store")).expect("removed");
        }
        site.server.start_again();
        site.until_exact(&router);
        site.until_exact(&site.router());
    }
    assert_eq!(router.worker_counter(0, "restarts"), 0, "one relay, and one engine");
    assert!(site.counted("nats_anew") >= 1);
}

#[test]
fn strangers_on_the_subjects_change_nothing_and_are_counted() {
    let Some(server) = jetstream() else { return };
    let mut site = Site::new(server, 1 << 14);
    let _relay = site.relay();
    let router = site.router();
    site.change_often(60);
    site.until_exact(&router);
    let (mut listener, mut stranger) = (site.server.stranger(), site.server.stranger());
    listener.subscribe(&Site::subject("events"));
    site.engine.clear();
    site.held = [0; PROMPTS as usize];
    let genuine = listener.message().1;
    assert!(genuine.starts_with(b"KVE1\x01"));
    let other_kinds: Vec<Vec<u8>> = [2, 3, 4, 9].map(|kind| [b"KVE1", &[kind][..], &genuine[5..]].concat()).into();
    for _ in 0..20 {
        for what in ["events", "snapshot", "alive"] {
            let subject = Site::subject(what);
            for junk in [&b"junk"[..], b"", b"KVE1", &genuine[..12]] {
                stranger.publish(&subject, "", junk);
                stranger.publish_with_headers(&subject, b"\xff\xff\r\n\r\n", junk);
                stranger.publish_with_headers(&subject, b"NATS/1.0 404 x\r\n\r\n", junk);
            }
        }
        other_kinds.iter().for_each(|other| stranger.publish(&Site::subject("events"), "", other));
        // A recording.
        stranger.publish(&Site::subject("events"), "", &genuine);
        site.change();
    }
    stranger.publish(&Site::subject("events"), "", &vec![b'\n'; 1 << 20]);
    stranger.settle();
    until("they are counted", || router.worker_counter(0, "messages_misframed") > 500);
    site.until_exact(&router);
    assert_eq!((router.worker_counter(0, "restarts"), router.worker_counter(0, "disconnects")), (0, 0));
    site.until_exact(&site.router());
    // A stranger replaces, then drops, what readers begin with. A reader can join again once the relay has noticed that.
    let anew = site.counted("nats_anew");
    stranger.publish(&Site::subject("start"), "", &[b"KVE1\x03", &[7; 40][..]].concat());
    site.until_exact(&site.router());
    stranger.publish("$JS.API.STREAM.PURGE.kvrouted_events", "nowhere", b"");
    stranger.settle();
    site.until_exact(&site.router());
    assert!(site.counted("nats_anew") >= anew + 2);
    site.change_often(30);
    site.until_exact(&router);
}

#[test]
fn a_server_that_never_stops_to_speak_keeps_no_relay_from_ending() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let (engine, folder) = (Engine::new(), folder());
    let worker = format!("id={WORKER},endpoint={}", engine.publisher.endpoint());
    let to = format!("nats://{}", listener.local_addr().expect("bound"));
    let ports = ["--endpoint", "tcp://127.0.0.1:0", "--replay", "tcp://127.0.0.1:0"];
    let arguments = [&["relay", "--worker", &worker, "--to", &to], &ports[..]].concat();
    let mut relay = Process::start(folder.path(), "relay", &arguments);
    let (mut stream, _) = listener.accept().expect("it connects");
    stream.write_all(b"INFO {\"max_payload\":1048576}\r\n").expect("sent");
    let mut said = BufReader::new(stream.try_clone().expect("a copy")).lines();
    said.find(|line| line.as_ref().is_ok_and(|line| line == "PING")).expect("its login").expect("read");
    let spoken_bytes = Arc::new(AtomicU64::new(0));
    let speaking = std::thread::spawn({
        let spoken_bytes = Arc::clone(&spoken_bytes);
        move || {
            let words = b"PONG\r\n".repeat(10_000);
            while stream.write_all(&words).is_ok() {
                spoken_bytes.fetch_add(words.len() as u64, Ordering::Relaxed);
            }
        }
    });
    until("it hears", || spoken_bytes.load(Ordering::Relaxed) > 32 << 20);
    assert_eq!(relay.end("-TERM"), Some(0), "{}", relay.log());
    speaking.join().expect("it ends with the connection");
}
