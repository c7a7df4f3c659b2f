//! What the integration tests share: the daemon's program, processes that end with the test, a caller, and the daemon's
//! figures.

// Each test binary uses a part of it.
#![allow(dead_code, unused_imports, clippy::print_stderr)]

mod caller;
mod frozen;
#[path = "../../../tests/kit/ports.rs"]
pub(crate) mod ports;
#[path = "../../../tests/kit/proc.rs"]
mod proc;
mod processes;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvrouted::client::{AsyncClient, Prompt, RouteRequest, SteadyOptions};
use kvrouted::ids::Worker;

pub(crate) use caller::{Answer, Caller, chat};
pub(crate) use frozen::{compare_metrics, frozen_metrics};
pub(crate) use proc::{open_descriptors, peak_kib, resident_kib, test_of_this_binary};
pub(crate) use processes::{Connect, Daemon, Gateway, is_alive, signal};

/// How long a test waits for what must come.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// The daemon's program: as `KVROUTED_BIN` names it, or as the root package builds it.
#[must_use]
pub(crate) fn kvrouted() -> Option<PathBuf> {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
    let named = std::env::var_os("KVROUTED_BIN").map(PathBuf::from);
    let places = named.into_iter().chain(["debug", "release"].map(|profile| target.join(profile).join("kvrouted")));
    places.into_iter().find(|place| place.is_file())
}

/// The daemon's program, or a line that `scripts/test` lists at its end.
#[must_use]
pub(crate) fn kvrouted_or_skip(what: &str) -> Option<PathBuf> {
    let found = kvrouted();
    if found.is_none() {
        skipped(what, "kvrouted is not built; run cargo build in the root, or set KVROUTED_BIN");
    }
    found
}

/// Reports a test that cannot run here.
pub(crate) fn skipped(what: &str, why: &str) {
    // Past the test harness, which shows what tests print only if they fail.
    let line = format!("\nskipped: {what}: {why}\n");
    std::io::stderr().lock().write_all(line.as_bytes()).expect("said");
}

/// Waits until `holds`.
pub(crate) async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let begun = Instant::now();
    while !holds().await {
        assert!(begun.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The daemon's figures, over a connection of the test's own.
pub(crate) struct Figures {
    client: AsyncClient,
    model: String,
}

impl Figures {
    /// Those of a model, of the daemon at `socket`.
    #[must_use]
    pub(crate) fn of(socket: &Path, model: &str) -> Self {
        let options = SteadyOptions { name: "test".into(), fallback: false, ..SteadyOptions::default() };
        Self { client: AsyncClient::new(socket, options), model: model.to_owned() }
    }

    /// Requests in flight by worker, as the daemon's bookings say; `None` = the daemon does not answer.
    pub(crate) async fn in_flight(&self) -> Option<Vec<(Worker, u64)>> {
        self.client.connected().await.ok()?;
        let space = self.client.space(&self.model, None, None).ok()?;
        let request = RouteRequest::new(space.id, Prompt::of_tokens(&[]));
        let loads = self.client.potential_loads(&request).await.ok()?;
        let mut by_worker: Vec<_> = loads.workers.iter().map(|load| (load.worker, load.active_requests)).collect();
        by_worker.sort_unstable();
        Some(by_worker)
    }

    /// All requests in flight.
    pub(crate) async fn bookings(&self) -> Option<u64> {
        self.in_flight().await.map(|workers| workers.iter().map(|(_, requests)| requests).sum())
    }

    /// Waits until this many requests are in flight.
    pub(crate) async fn until_bookings(&self, wanted: u64) {
        until(&format!("{wanted} bookings"), async || self.bookings().await == Some(wanted)).await;
    }

    /// Waits until a worker is known to hold this many of the prompt's first blocks.
    pub(crate) async fn until_held(&self, tokens: &[u32], blocks: u32) {
        let space = self.client.space(&self.model, None, None).expect("the model's space");
        let request = RouteRequest::new(space.id, Prompt::of_tokens(tokens));
        until(&format!("{blocks} blocks are held"), async || {
            let overlap = self.client.overlap(&request).await;
            overlap.is_ok_and(|reply| reply.workers.iter().any(|entry| entry.overlap.device >= blocks))
        })
        .await;
    }

    /// Waits until every worker of the model is `exact`: the daemon has subscribed to its events from the first one on.
    pub(crate) async fn until_exact(&self, workers: usize) {
        until("every worker is exact", async || {
            let Ok(infos) = self.client.workers(None).await else { return false };
            let is_exact =
                |info: &kvrouted::client::WorkerInfo| info.trust.level == kvrouted::client::TrustLevel::Exact;
            infos.len() == workers && infos.iter().all(is_exact)
        })
        .await;
    }
}
