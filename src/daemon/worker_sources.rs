//! Follows every source of workers: the configuration, files, URLs and requests; and the file of other routers.

use std::cell::Cell;
use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::signal::unix::Signal;
use tokio::sync::watch;

use super::desired_fleet::DesiredFleet;
use super::fleet_reconciler::FleetReconciler;
use super::ingest_threads::IngestThreads;
use super::reload::{self, ReadConfig};
use super::routers_thread::NamedPeers;
use super::running_config::RunningConfig;
use super::{engine_http, engine_snapshots, peers_file, worker_files};
use crate::config::Config;
use crate::requests::RequestTables;
use crate::serve::{Admissions, RemoteAccess};
use crate::watchdog::{Activity, ThreadMark, phase};

/// The sources, and the parts that act on them.
pub(super) struct WorkerSources<'a> {
    pub(super) config: &'a Config,
    pub(super) read_again: ReadConfig,
    /// The threads that ask engines.
    pub(super) asking: &'a Handle,
    pub(super) hangup: &'a mut Signal,
    pub(super) desired: &'a DesiredFleet,
    pub(super) running: &'a RunningConfig,
    pub(super) reconciler: FleetReconciler,
    pub(super) ingest_threads: &'a IngestThreads,
    pub(super) tables: &'a RequestTables,
    pub(super) admissions: &'a Admissions,
    pub(super) peers: &'a NamedPeers,
    pub(super) remote: Option<&'a watch::Sender<Arc<RemoteAccess>>>,
    pub(super) mark: &'a ThreadMark,
}

/// Follows all sources, for ever. Returns the name of a part that ended by itself.
pub(super) async fn run(sources: WorkerSources<'_>) -> &'static str {
    let WorkerSources { config, read_again, asking, hangup, desired, running, reconciler, .. } = sources;
    let WorkerSources { ingest_threads, tables, admissions, peers, remote, mark, .. } = sources;
    let counters = desired.counters();
    let (policies, recording) = (&*tables.policies, &tables.recording);
    let grace_ms = Cell::new(config.discovery.grace_ms);
    let files = async {
        match config.discovery.path.clone() {
            Some(path) => worker_files::run(path, config.discovery.rescan_ms, &grace_ms, desired, counters).await,
            None => std::future::pending().await,
        }
    };
    let other_routers = async {
        match &config.routers.peers_file {
            Some(path) => peers_file::run(path, peers, desired).await,
            None => std::future::pending().await,
        }
    };
    let reload = reload::Reloaded {
        grace_ms: &grace_ms,
        desired,
        running,
        policies,
        admissions,
        peers,
        remote,
        recording,
        counters,
    };
    tokio::select! {
        () = phase(mark, Activity::Reconciling, reconciler.run(desired, ingest_threads)) => "the reconciler of the fleet",
        () = phase(mark, Activity::FollowingSources, files) => "discovery by files",
        () = phase(mark, Activity::FollowingSources, engine_http::find_publishers(desired, asking, counters)) => "discovery by URL",
        () = phase(mark, Activity::FollowingSources, engine_http::check_health(desired, asking, tables, counters)) => "health checks of engines",
        () = phase(mark, Activity::FollowingSources, other_routers) => "the file of other routers",
        () = phase(mark, Activity::FollowingSources, engine_snapshots::run(config, &tables.fleet, ingest_threads, asking)) => "snapshots of engines",
        () = phase(mark, Activity::Reloading, reload::run(hangup, read_again, config, reload)) => "reload",
    }
}
