//! Gateways: each routes at a steady rate over a client that reconnects, reports each request's progress and frees it.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvrouted::client::{
    Answer, AsyncClient, BackOff, BookingOutcome, BookingRequest, Prompt, RouteRequest, SteadyOptions,
};
use kvrouted::error::Result;
use kvrouted::ids::{LocalHash, SpaceId};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use serde::Serialize;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

use crate::failure::Failure;
use crate::ingest::{BLOCK_SIZE, SCHEME};
use crate::large_fleet::contents::{SHARED_PROMPTS, shared_prompt};

/// How long a call may take before the gateway decides by itself.
const CALL_MAX: Duration = Duration::from_millis(500);
/// How long a client that waits to reconnect pauses at most.
const RECONNECT_MAX: Duration = Duration::from_millis(200);
/// How long a request prefills and decodes, at least and at most, milliseconds.
const PREFILL_MS: std::ops::Range<u64> = 5..100;
const DECODE_MS: std::ops::Range<u64> = 50..1500;

/// What gateways do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// They route.
    Route,
    /// They keep what is booked, and do nothing.
    Hold,
    /// They free everything and end.
    End,
}

/// What gateways saw.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Seen {
    /// Requests that a daemon decided.
    pub(super) routed: u64,
    /// Requests that the client decided, because no daemon answered.
    pub(super) fallback: u64,
    /// Requests that a daemon refused.
    pub(super) refused: u64,
    /// Reports that were applied.
    pub(super) applied: u64,
    /// Reports about a booking that the daemon no longer knew.
    pub(super) unknown: u64,
    /// Reports that were kept until a daemon would answer again.
    pub(super) kept: u64,
    /// Reports that a daemon refused.
    pub(super) reports_refused: u64,
    /// Clients that could not deliver all reports at the end.
    pub(super) undelivered: u64,
}

#[derive(Default)]
struct Counts {
    routed: AtomicU64,
    fallback: AtomicU64,
    refused: AtomicU64,
    applied: AtomicU64,
    unknown: AtomicU64,
    kept: AtomicU64,
    reports_refused: AtomicU64,
    undelivered: AtomicU64,
}

/// Relaxed, here and in `seen`: pairs with each other; figures only.
fn count(of: &AtomicU64) {
    of.fetch_add(1, Ordering::Relaxed);
}

impl Counts {
    fn report(&self, reported: &Result<Option<BookingOutcome>>) {
        count(match reported {
            Ok(Some(BookingOutcome::Unknown)) => &self.unknown,
            Ok(Some(_)) => &self.applied,
            Ok(None) => &self.kept,
            Err(_) => &self.reports_refused,
        });
    }
}

/// All gateways.
pub(super) struct Gateways {
    phase: watch::Sender<Phase>,
    counts: Arc<Counts>,
    tasks: Vec<JoinHandle<()>>,
}

impl Gateways {
    /// Starts `each` gateways at each socket. All of them together ask for `routes_per_s` routes a second.
    pub(super) fn start(
        runtime: &Handle,
        sockets: &[impl AsRef<Path>],
        each: u32,
        routes_per_s: f64,
        seed: u64,
    ) -> Self {
        let (phase, phases) = watch::channel(Phase::Route);
        let prompts: Arc<[_]> = (0..SHARED_PROMPTS).map(shared_prompt).collect();
        let per_s = routes_per_s / f64::from(each) / sockets.len() as f64;
        let (counts, mut tasks) = (Arc::<Counts>::default(), Vec::new());
        let _within = runtime.enter();
        for (at, socket) in sockets.iter().enumerate() {
            for number in 0..each {
                let name = format!("gateway-{at}-{number}");
                let options = SteadyOptions {
                    name: name.clone(),
                    timeout: CALL_MAX,
                    back_off: BackOff { most: RECONNECT_MAX, ..BackOff::default() },
                    ..SteadyOptions::default()
                };
                let gateway = Gateway {
                    client: AsyncClient::new(socket.as_ref(), options),
                    name,
                    per_s,
                    prompts: Arc::clone(&prompts),
                    counts: Arc::clone(&counts),
                    phases: phases.clone(),
                    random: Xoshiro256PlusPlus::seed_from_u64(seed ^ (at as u64) << 32 ^ u64::from(number)),
                };
                tasks.push(tokio::spawn(gateway.serve()));
            }
        }
        Self { phase, counts, tasks }
    }

    /// Lets them keep what is booked, and do nothing.
    pub(super) fn hold(&self) {
        // No gateway has ended.
        let _ = self.phase.send(Phase::Hold);
    }

    /// Lets them free everything and close their connections.
    ///
    /// # Errors
    /// A gateway panicked.
    pub(super) async fn end(&mut self) -> Result<(), Failure> {
        let _ = self.phase.send(Phase::End);
        for task in self.tasks.drain(..) {
            task.await.map_err(|error| Failure::Contract(format!("a gateway: {error}")))?;
        }
        Ok(())
    }

    /// What they saw so far.
    pub(super) fn seen(&self) -> Seen {
        let read = |of: &AtomicU64| of.load(Ordering::Relaxed);
        Seen {
            routed: read(&self.counts.routed),
            fallback: read(&self.counts.fallback),
            refused: read(&self.counts.refused),
            applied: read(&self.counts.applied),
            unknown: read(&self.counts.unknown),
            kept: read(&self.counts.kept),
            reports_refused: read(&self.counts.reports_refused),
            undelivered: read(&self.counts.undelivered),
        }
    }
}

struct Gateway {
    client: AsyncClient,
    name: String,
    per_s: f64,
    prompts: Arc<[Vec<LocalHash>]>,
    counts: Arc<Counts>,
    phases: watch::Receiver<Phase>,
    random: Xoshiro256PlusPlus,
}

impl Gateway {
    async fn serve(mut self) {
        let (mut requests, mut number) = (JoinSet::new(), 0_u64);
        while *self.phases.borrow() == Phase::Route {
            let pause = Duration::from_secs_f64(self.random.random_range(0.0..2.0) / self.per_s);
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                _ = self.phases.changed() => continue,
            }
            while requests.try_join_next().is_some() {}
            number += 1;
            requests.spawn(self.request(number).run());
        }
        // A task that panicked has said so on the standard error.
        while requests.join_next().await.is_some() {}
        if !self.client.close().await {
            count(&self.counts.undelivered);
        }
    }

    fn request(&mut self, number: u64) -> Request {
        let mut between = |range: std::ops::Range<u64>| Duration::from_millis(self.random.random_range(range));
        let (prefill, decode) = (between(PREFILL_MS), between(DECODE_MS));
        // Low numbers are asked for more often.
        let prompt = (self.random.random_range(0.0..1.0_f64).powi(2) * self.prompts.len() as f64) as usize;
        Request {
            client: self.client.clone(),
            id: format!("{}-{number}", self.name),
            prompt: self.prompts[prompt].iter().flat_map(|local| local.0.to_le_bytes()).collect(),
            prefill,
            decode,
            counts: Arc::clone(&self.counts),
            phases: self.phases.clone(),
        }
    }
}

struct Request {
    client: AsyncClient,
    id: String,
    /// Hashes of its blocks.
    prompt: Vec<u8>,
    prefill: Duration,
    decode: Duration,
    counts: Arc<Counts>,
    phases: watch::Receiver<Phase>,
}

impl Request {
    async fn run(mut self) {
        let token_count = (self.prompt.len() / size_of::<u64>()) as u32 * BLOCK_SIZE;
        let prompt = Prompt::LocalHashes { hashes: &self.prompt, scheme: SCHEME, token_count };
        let book = Some(BookingRequest { request_id: &self.id, attempt: 0 });
        let answer = self.client.route(&RouteRequest { book, ..RouteRequest::new(SpaceId(0), prompt) }).await;
        count(match &answer {
            Ok(Answer::Daemon { .. }) => &self.counts.routed,
            Ok(Answer::Fallback(_)) => &self.counts.fallback,
            Err(_) => &self.counts.refused,
        });
        let Some(booking) = answer.ok().and_then(|answer| answer.booking()) else { return };
        if self.routes_on_after(self.prefill).await {
            let prefill_us = self.prefill.as_micros() as u64;
            self.counts.report(&self.client.prefill_complete(booking, prefill_us).await);
            self.routes_on_after(self.decode).await;
        }
        self.counts.report(&self.client.free(booking).await);
    }

    /// Waits; `false` = all requests are to end now. While gateways hold, it waits on.
    async fn routes_on_after(&mut self, wait: Duration) -> bool {
        let over = tokio::time::sleep(wait);
        tokio::pin!(over);
        loop {
            tokio::select! {
                () = &mut over, if *self.phases.borrow() == Phase::Route => return true,
                changed = self.phases.changed() => {
                    if changed.is_err() || *self.phases.borrow() == Phase::End {
                        return false;
                    }
                }
            }
        }
    }
}
