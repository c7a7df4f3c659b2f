//! Every source of workers, followed side by side.

use std::cell::Cell;

use tokio::signal::unix::Signal;

use super::muster::Muster;
use super::reload::{self, ReadConfig};
use super::roster::Roster;
use super::shared::Shared;
use super::streams::Streams;
use super::{looks, servers, watch};
use crate::config::Config;
use crate::metrics::{CounterSet, DaemonCounter};
use crate::serve::Admissions;

/// What is followed, and what acts on it.
pub(super) struct Discovery<'a> {
    pub(super) config: &'a Config,
    pub(super) read_again: ReadConfig<'a>,
    pub(super) hangup: &'a mut Signal,
    pub(super) roster: &'a Roster,
    pub(super) muster: Muster,
    pub(super) streams: &'a Streams,
    pub(super) shared: &'a Shared,
    pub(super) admissions: &'a Admissions,
    pub(super) counters: &'a CounterSet<DaemonCounter>,
}

/// Follows all sources for ever; answers with what ended by itself.
pub(super) async fn run(discovery: Discovery<'_>) -> &'static str {
    let Discovery { config, read_again, hangup, roster, muster, streams, shared, admissions, counters } = discovery;
    let (policies, recording) = (&*shared.policies, &shared.recording);
    let grace_ms = Cell::new(config.discovery.grace_ms);
    let files = async {
        match config.discovery.path.clone() {
            Some(path) => watch::run(path, config.discovery.rescan_ms, &grace_ms, roster, counters).await,
            None => std::future::pending().await,
        }
    };
    let reload = reload::Reloaded { grace_ms: &grace_ms, roster, policies, admissions, recording, counters };
    tokio::select! {
        () = muster.run(roster, streams) => "the muster of workers",
        () = files => "discovery by files",
        () = servers::run(roster, counters) => "discovery by URL",
        () = looks::run(roster, shared, counters) => "looks at engines",
        () = reload::run(hangup, read_again, config, reload) => "reload",
    }
}
