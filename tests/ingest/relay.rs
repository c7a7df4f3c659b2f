//! A relay as users run it: an engine, `kvrouted relay` beside it, `kvrouted serve` behind the relay, and a query.

use std::sync::Arc;

use tempfile::TempDir;

use crate::kit::engine::Publisher;
use crate::kit::http::scrape;
use crate::kit::ports::free_port;
use crate::kit::{Daemon, Process, folder, text, until, until_ok};
use crate::vllm::{self, BLOCK_SIZE, Batch};

/// An engine without a replay socket.
struct Engine {
    publisher: Publisher,
    stamp: u32,
}

impl Engine {
    fn start(endpoint: &str, stamp: u32) -> Self {
        Self { publisher: Publisher::start(endpoint), stamp }
    }

    fn heard(self) -> Self {
        self.publisher.await_subscription();
        self
    }

    fn send(&mut self, fill: impl FnOnce(Batch) -> Batch) {
        self.publisher.send_payload(&fill(Batch::new(self.stamp + self.publisher.seq as u32)).payload());
    }

    /// One block more of a chain in each batch.
    fn extend(&mut self, blocks: std::ops::RangeInclusive<u64>) {
        for at in blocks {
            self.send(|batch| batch.stored((at > 1).then_some(at - 1), &[at], &[at as u32]));
        }
    }
}

/// A folder with every socket in it.
struct Place {
    folder: Arc<TempDir>,
    /// Batches the relay keeps.
    kept: u64,
    /// Where the relay serves its metrics; 0 = nowhere.
    metrics_port: u16,
}

impl Place {
    fn new(kept: u64) -> Self {
        Self { folder: folder(), kept, metrics_port: 0 }
    }

    fn endpoint(&self, name: &str) -> String {
        format!("ipc://{}/{name}", self.folder.path().display())
    }

    fn socket(&self) -> String {
        self.folder.path().join("s").display().to_string()
    }

    fn relay(&self) -> Process {
        let config = format!(
            "[relay]\nendpoint = \"{}\"\nreplay = \"{}\"\nheartbeat_ms = 200\nbuffer_batches_max = {}\n\
             [metrics]\nport = {}\n[[space]]\nmodel = \"m\"\n[[worker]]\nid = 1\nendpoint = \"{}\"\n",
            self.endpoint("events"),
            self.endpoint("replay"),
            self.kept,
            self.metrics_port,
            self.endpoint("engine"),
        );
        let file = self.folder.path().join("relay.toml");
        std::fs::write(&file, config).expect("written");
        Process::start(self.folder.path(), "relay", &["relay", "--config", text(&file)])
    }

    fn router(&self) -> Daemon {
        let worker = format!("id=1,endpoint={},replay={}", self.endpoint("events"), self.endpoint("replay"));
        Daemon::serve(Arc::clone(&self.folder), &["--socket", &self.socket(), "--model", "m", "--worker", &worker])
    }
}

/// Trust, and the blocks held of a chain of `blocks`.
fn held(router: &Daemon, blocks: u32) -> Result<(String, u64), String> {
    let contents: Vec<u32> = (1..=blocks).collect();
    let tokens: Vec<String> = vllm::tokens(&contents).iter().map(u32::to_string).collect();
    let reply = router.said(&["query", "--model", "m", "--tokens", &tokens.join(",")]);
    let candidate = &reply["candidates"][0];
    let (trust, device) = (candidate["trust"].as_str(), candidate["overlap_blocks"]["device"].as_u64());
    trust.zip(device).map(|(trust, device)| (trust.to_owned(), device)).ok_or_else(|| reply.to_string())
}

#[track_caller]
fn await_held(router: &Daemon, blocks: u32, trust: &str, device: u64) {
    until_ok(&format!("{device} blocks are held and {trust}"), || {
        let held = held(router, blocks)?;
        if held == (trust.to_owned(), device) { Ok(()) } else { Err(format!("{held:?}")) }
    });
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
        let router = place.router();
        await_held(&router, 20, "exact", 20);
        assert_eq!(router.worker_counter(0, "snapshots_taken"), snapshots);
        engine.send(|batch| batch.removed(&[20]));
        engine.extend(20..=22);
        await_held(&router, 22, "exact", 22);
        until("heartbeats are heard", || router.worker_counter(0, "heartbeats") > 0);
    }
}

#[test]
fn a_restart_of_the_engine_or_of_the_relay_is_a_restart_of_the_worker() {
    let place = Place::new(1000);
    let mut engine = Engine::start(&place.endpoint("engine"), 0);
    let relay = place.relay();
    let router = place.router();
    engine = engine.heard();
    engine.extend(1..=5);
    await_held(&router, 5, "exact", 5);

    drop(engine);
    await_held(&router, 5, "unproven", 0);
    let mut engine = Engine::start(&place.endpoint("engine"), 1000).heard();
    engine.extend(1..=3);
    await_held(&router, 5, "exact", 3);

    // Without a replay socket of the engine's the next relay cannot know what was before it.
    drop(relay);
    let _relay = place.relay();
    engine = engine.heard();
    engine.send(|batch| batch.stored(None, &[101], &[9]));
    await_held(&router, 5, "lower_bound", 0);
    engine.send(Batch::cleared);
    engine.extend(1..=4);
    await_held(&router, 5, "exact", 4);
    assert!(router.worker_counter(0, "restarts") >= 1);
}

#[test]
fn a_relay_shows_what_it_counts_and_what_it_knows_of_its_engine() {
    let place = Place { metrics_port: free_port(), ..Place::new(1000) };
    let mut engine = Engine::start(&place.endpoint("engine"), 0);
    let _relay = place.relay();
    engine = engine.heard();
    engine.extend(1..=5);
    let router = place.router();
    await_held(&router, 5, "exact", 5);
    let (head, page) = scrape(place.metrics_port);
    assert!(head.starts_with("HTTP/1.1 200") && head.contains("openmetrics-text"), "{head}");
    for line in [
        // The first says how far the relay believes itself.
        "kvrouted_relay_batches_total 6",
        "kvrouted_relay_questions_total 1",
        "kvrouted_worker_batches_total{worker_id=\"1\",dp_rank=\"0\"} 5",
        "kvrouted_worker_trust{worker_id=\"1\",dp_rank=\"0\"} 4",
        "kvrouted_worker_blocks_held{worker_id=\"1\",dp_rank=\"0\",tier=\"device\"} 5",
    ] {
        assert!(page.contains(&format!("\n{line}\n")), "{line} in {page}");
    }
    drop(engine);
    until("the loss is shown", || scrape(place.metrics_port).1.contains(",reason=\"disconnected\"} 1\n"));
}
