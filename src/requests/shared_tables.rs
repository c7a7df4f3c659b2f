//! The tables that the requests of all serving threads share.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use arc_swap::ArcSwap;

use super::decision_recording::DecisionRecording;
use super::identity::Identity;
use super::prediction_access::PredictionAccess;
use super::request_queue::RequestQueue;
use super::service::HelloInfo;
use crate::budget::{Division, MemoryPart};
use crate::config::Config;
use crate::fleet::{Fleet, FleetTable};
use crate::ids::SpaceId;
use crate::index::IndexReader;
use crate::limits::{BOOKINGS_PER_SESSION_MAX, CORES_MAX};
use crate::load::Loads;
use crate::route::{AffinityTable, PolicyTable, View};
use crate::shares::UserQuotas;
use crate::traces::Traces;

/// One of each for the whole daemon. Each serving thread has a clone.
#[derive(Clone)]
pub(crate) struct RequestTables {
    identity: Identity,
    admin_socket: PathBuf,
    pub(crate) fleet: Arc<Fleet>,
    pub(super) indexes: Vec<IndexReader>,
    pub(crate) predictions: PredictionAccess,
    pub(crate) loads: Arc<Loads>,
    /// Replaced as a whole when the configuration is reloaded.
    pub(crate) policies: Arc<ArcSwap<PolicyTable>>,
    /// Round-robin counters, by `SpaceId`.
    pub(super) round_robin_counters: Arc<[AtomicU64]>,
    pub(crate) recording: DecisionRecording,
    pub(crate) traces: Traces,
    /// The requests that found every worker busy.
    pub(crate) queue: Arc<RequestQueue>,
    /// The share of each user of the queue, the lanes and the connections.
    pub(crate) users: Arc<UserQuotas>,
    /// The worker of each affinity session.
    pub(crate) affinities: Arc<AffinityTable>,
    /// Where the clock of bookings begins: at the start, or before the oldest booking of an earlier run.
    clock_began: Instant,
    started: Instant,
}

impl RequestTables {
    /// The tables of a daemon that starts now with `cores` threads that decide, within the bounds of `division`.
    pub(crate) fn new(
        (config, division): (&Config, &Division),
        (cores, clock_began): (usize, Instant),
        (fleet, policies): (&Arc<Fleet>, PolicyTable),
        indexes: Vec<IndexReader>,
        predictions: &PredictionAccess,
        (loads, identity): (&Arc<Loads>, &Identity),
    ) -> Self {
        let users = Arc::new(UserQuotas::new(config.serve.user_share_percent));
        let queue_bytes_max = division.of_each(MemoryPart::Queue, 1);
        let queue = RequestQueue::new(CORES_MAX + 1, (config.policy.queue_requests_max, queue_bytes_max), clock_began);
        let traces = match config.traces.waiting_max() {
            0 => Traces::default(),
            waiting_max => Traces::new(waiting_max, config.traces.sample_ratio),
        };
        let affinities = AffinityTable::new(config.policy.affinity_sessions_max, identity.affinity_secret);
        Self {
            identity: *identity,
            admin_socket: config.serve.admin_socket.clone(),
            fleet: Arc::clone(fleet),
            indexes,
            predictions: predictions.clone(),
            loads: Arc::clone(loads),
            policies: Arc::new(ArcSwap::from_pointee(policies)),
            round_robin_counters: config.spaces.iter().map(|_| AtomicU64::new(0)).collect(),
            recording: DecisionRecording::new(config, cores, division),
            affinities: Arc::new(affinities.shared_by(config.serve.user_share_percent)),
            queue: Arc::new(queue.shared_by(Arc::clone(&users)).traced_by(traces.clone())),
            traces,
            users,
            clock_began,
            started: Instant::now(),
        }
    }

    /// Names the daemon to gateways.
    pub(crate) const fn instance_id(&self) -> u64 {
        self.identity.instance_id
    }

    /// Milliseconds since the daemon started.
    pub(crate) fn up_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Nanoseconds of the clock of bookings.
    pub(crate) fn now_ns(&self) -> u64 {
        self.clock_began.elapsed().as_nanos() as u64
    }

    /// The clock of [`RequestTables::now_ns`], for other threads.
    pub(crate) fn clock(&self) -> impl Fn() -> u64 + Send + 'static {
        let began = self.clock_began;
        move || began.elapsed().as_nanos() as u64
    }

    /// The daemon's identity.
    pub(crate) fn hello(&self) -> HelloInfo<'_> {
        HelloInfo {
            instance_id: self.identity.instance_id,
            bookings_per_session_max: BOOKINGS_PER_SESSION_MAX as u32,
            admin_socket: Some(&self.admin_socket),
        }
    }

    /// The view of a decision in `space`, at a time of [`RequestTables::now_ns`].
    pub(super) fn view<'a>(
        &'a self,
        fleet: &'a FleetTable,
        policies: &'a PolicyTable,
        (space, now_ns): (SpaceId, u64),
    ) -> View<'a> {
        let predictions = &self.predictions.readers;
        View {
            fleet,
            indexes: &self.indexes,
            predictions,
            loads: &self.loads,
            policy: policies.of(space),
            round_robin_counters: &self.round_robin_counters,
            affinities: &self.affinities,
            now_ns,
        }
    }
}
