//! What every core shares.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use arc_swap::ArcSwap;
use rand::RngExt;

use super::predicting::Predicting;
use super::recording::Recording;
use super::reload;
use crate::config::{Config, ServeConfig};
use crate::fleet::{Fleet, FleetTable};
use crate::ids::SpaceId;
use crate::index::IndexReader;
use crate::ingest::descriptors::Descriptors;
use crate::limits::{BOOKINGS_PER_SESSION_MAX, CORES_MAX};
use crate::load::Loads;
use crate::route::{AffinityTable, PolicyTable, View};
use crate::serve::{HelloInfo, Lanes, RequestQueue, UserQuotas};

/// One of each for the whole daemon; a core has a clone.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) instance_id: u64,
    pub(super) admin_socket: PathBuf,
    pub(super) fleet: Arc<Fleet>,
    pub(super) indexes: Vec<IndexReader>,
    pub(super) predicting: Predicting,
    pub(super) loads: Arc<Loads>,
    /// Replaced whole when the configuration is read again.
    pub(super) policies: Arc<ArcSwap<PolicyTable>>,
    /// Round-robin counters, by `SpaceId`.
    pub(super) round_robin_counters: Arc<[AtomicU64]>,
    pub(super) recording: Recording,
    /// Where requests wait that find every worker busy.
    pub(super) room: Arc<RequestQueue>,
    /// Lanes of gateways, on all cores together.
    pub(super) lanes: Arc<Lanes>,
    /// What the processes of each user have of those, and of connections.
    pub(super) users: Arc<UserQuotas>,
    /// How many may connect, have lanes and publish.
    pub(super) descriptors: Descriptors,
    /// Whom sessions are bound to.
    pub(super) affinities: Arc<AffinityTable>,
    /// Where the clock of bookings starts.
    pub(super) started: Instant,
}

impl Shared {
    /// What the `cores` of a daemon share that starts now with these descriptors, under an identity that is drawn.
    pub(super) fn new(
        config: &Config,
        (cores, descriptors): (usize, Descriptors),
        started: Instant,
        fleet: &Arc<Fleet>,
        indexes: Vec<IndexReader>,
        predicting: &Predicting,
        loads: &Arc<Loads>,
    ) -> Self {
        let ServeConfig { lane_ring_bytes_max, user_share_percent, .. } = config.serve;
        let users = Arc::new(UserQuotas::new(user_share_percent));
        let lanes = Lanes::new(descriptors.lanes_max, lane_ring_bytes_max);
        let room = RequestQueue::new(CORES_MAX + 1, config.policy.queue_requests_max, started);
        let affinities = AffinityTable::new(config.policy.affinity_sessions_max, rand::rng().random());
        Self {
            instance_id: rand::rng().random_range(1..=u64::MAX),
            admin_socket: config.serve.admin_socket.clone(),
            fleet: Arc::clone(fleet),
            indexes,
            predicting: predicting.clone(),
            loads: Arc::clone(loads),
            policies: Arc::new(ArcSwap::from_pointee(reload::policies(config, 1))),
            round_robin_counters: config.spaces.iter().map(|_| AtomicU64::new(0)).collect(),
            recording: Recording::new(config, cores),
            affinities: Arc::new(affinities.shared_by(user_share_percent)),
            lanes: Arc::new(lanes.shared_by(Arc::clone(&users))),
            room: Arc::new(room.shared_by(Arc::clone(&users))),
            users,
            descriptors,
            started,
        }
    }

    /// Milliseconds since the daemon started: the clock of bookings.
    pub(super) fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Nanoseconds of the same clock.
    pub(super) fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// The clock of [`Shared::now_ns`], for other threads.
    pub(super) fn clock(&self) -> impl Fn() -> u64 + Send + 'static {
        let started = self.started;
        move || started.elapsed().as_nanos() as u64
    }

    /// The daemon's identity.
    pub(super) fn hello(&self) -> HelloInfo<'_> {
        HelloInfo {
            instance_id: self.instance_id,
            bookings_per_session_max: BOOKINGS_PER_SESSION_MAX as u32,
            admin_socket: Some(&self.admin_socket),
        }
    }

    /// What a decision in `space` looks at, at a time of [`Shared::now_ns`].
    pub(super) fn view<'a>(
        &'a self,
        fleet: &'a FleetTable,
        policies: &'a PolicyTable,
        (space, now_ns): (SpaceId, u64),
    ) -> View<'a> {
        let predictions = &self.predicting.readers;
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
