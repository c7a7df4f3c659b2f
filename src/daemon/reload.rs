//! SIGHUP: the daemon reads its configuration again and takes over the fields that can change while it runs.
//!
//! The file, and the system's list of users, may be on a file system that does not respond. A thread of its own reads
//! them; the control thread waits a bounded time, then goes on with the configuration that it has.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use arc_swap::ArcSwap;
use rand::RngExt;
use tokio::signal::unix::Signal;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::audit_texts;
use super::desired_fleet::DesiredFleet;
use super::routers_thread::NamedPeers;
use super::running_config::RunningConfig;
use crate::audit;
use crate::config::{Config, NamedWorkers, Problems, RemoteConfig, ShadowConfig};
use crate::discovery::Source;
use crate::limits::{CONFIG_READS_HELD_MAX, DISCOVERY_READ_MS_MAX};
use crate::metrics::{CounterSet, DaemonCounter};
use crate::requests::DecisionRecording;
use crate::route::{Policy, PolicyTable};
use crate::serve::{Admissions, RemoteAccess};

/// Reads the configuration that the daemon was started with once more, on any thread.
pub type ReadConfig = Arc<dyn Fn() -> Result<Config, Problems> + Send + Sync>;

/// The workers that a configuration names.
pub(super) fn named(config: &Config) -> NamedWorkers {
    NamedWorkers { workers: config.workers.clone(), servers: config.servers.clone() }
}

/// The policies with which a daemon begins.
pub(super) fn policies_at_start(config: &Config) -> PolicyTable {
    policies(config, config.policy.seed, 1)
}

/// The policies that a configuration names. This daemon's own order of workers follows from the seed with which it was
/// started, or from a number that is drawn once and stays when the file is read again.
fn policies(config: &Config, seed: u64, version: u64) -> PolicyTable {
    static DRAWN_ID: LazyLock<u64> = LazyLock::new(|| rand::rng().random());
    let router_id = if seed == 0 { *DRAWN_ID } else { seed };
    let own = |policy: &Policy| Policy { router_id, ..*policy };
    let spaces: Vec<Policy> = config.policy.spaces.iter().map(own).collect();
    PolicyTable::new(version, &own(&config.policy.weights), &spaces)
}

/// Logs weights that are configured and have no effect, because the mode does not use them.
pub(super) fn note_weights_without_effect(config: &Config) {
    let policies = std::iter::once(&config.policy.weights).chain(&config.policy.spaces);
    let fields: BTreeSet<&str> = policies.flat_map(Policy::weights_without_effect).collect();
    if !fields.is_empty() {
        let fields = fields.into_iter().collect::<Vec<_>>().join(" ");
        let remedy = "set mode = \"kv\" in [policy] to use them, or remove them";
        tracing::warn!(fields, remedy, "mode latency does not use these fields of the policy");
    }
}

/// The parts of the daemon that a reload changes.
#[derive(Clone, Copy)]
pub(super) struct Reloaded<'a> {
    pub(super) grace_ms: &'a Cell<u64>,
    pub(super) desired: &'a DesiredFleet,
    pub(super) running: &'a RunningConfig,
    pub(super) policies: &'a ArcSwap<PolicyTable>,
    pub(super) admissions: &'a Admissions,
    pub(super) peers: &'a NamedPeers,
    /// `None` = there is no remote port.
    pub(super) remote: Option<&'a watch::Sender<Arc<RemoteAccess>>>,
    pub(super) recording: &'a DecisionRecording,
    pub(super) counters: &'a CounterSet<DaemonCounter>,
}

impl Reloaded<'_> {
    /// Replaces the users that may connect. Open connections stay.
    fn replace_admissions(&self, next: &Admissions) {
        if self.admissions.replace(next) {
            tracing::info!("the lists of users that may connect are replaced");
        }
    }

    /// Replaces the remote port's certificate and principals. Connections whose token has gone end.
    fn replace_remote_access(&self, next: Option<RemoteAccess>) {
        if let (Some(remote), Some(next)) = (self.remote, next) {
            remote.send_replace(Arc::new(next));
            tracing::info!("certificate and principals of the remote port are read again");
        }
    }

    /// Replaces the policies if they differ. They get the next version, which every reply names. A decision in progress
    /// keeps the policies that it began with.
    fn replace_policies(&self, next: &Config, seed: u64) {
        let before = self.policies.load();
        let table = policies(next, seed, before.version() + 1);
        if !table.equals_but_for_version(&before) {
            tracing::info!(version = table.version(), "the policies are replaced");
            self.counters.bump(DaemonCounter::PoliciesReplaced);
            self.policies.store(Arc::new(table));
            note_weights_without_effect(next);
        }
    }
}

impl Reloaded<'_> {
    /// Replaces the shadow policy if the file has another one than when it was last read (`before`). Otherwise a shadow
    /// policy that was set by command stays.
    fn replace_shadow(&self, next: &Config, before: &mut ShadowConfig) {
        if next.shadow == *before {
            return;
        }
        let ShadowConfig { share, policy } = &next.shadow;
        match self.recording.set_shadow(policy, *share) {
            Ok(()) => tracing::info!(share, settings = policy.join(" "), "the shadow policy is replaced"),
            // It was checked with the file, so this does not happen.
            Err(error) => tracing::error!(%error, "the shadow policy cannot be replaced"),
        }
        before.clone_from(&next.shadow);
    }

    /// Lists the changed fields that need a restart: in the log, and in a finding until the changes are taken back.
    fn note_pending(&self, fields: Vec<&'static str>) {
        for field in &fields {
            tracing::warn!(field, "changed in the configuration; takes effect at the next start");
        }
        self.desired.note_pending(fields);
    }
}

/// A configuration that has been read, the users that it admits, and what the remote port's files say.
type Read = (Config, Admissions, Option<RemoteAccess>);
/// The same, or the problem with it.
type Fresh = Result<Read, String>;

/// Reads the configuration on a thread of its own.
struct Reader {
    read: ReadConfig,
    /// The remote port as it runs: other files need a restart.
    remote: RemoteConfig,
    /// Readings that have taken too long. Each holds a thread; its result, if one comes, is dropped.
    late: Vec<JoinHandle<Fresh>>,
}

impl Reader {
    /// Reads the configuration as it is now.
    async fn fresh(&mut self) -> Fresh {
        self.late.retain(|reading| !reading.is_finished());
        if self.late.len() >= CONFIG_READS_HELD_MAX {
            return Err("is not read: earlier readings of it have not returned; check its file system".into());
        }
        let (read, remote) = (Arc::clone(&self.read), self.remote.clone());
        let mut reading = tokio::task::spawn_blocking(move || {
            let next = read().map_err(|problems| problems.to_string().trim().to_owned())?;
            // It looks user names up again.
            let admissions = Admissions::resolve(&next).map_err(|error| error.to_string())?;
            let access = RemoteAccess::read(&remote).map_err(|error| error.to_string())?;
            Ok((next, admissions, access))
        });
        match tokio::time::timeout(Duration::from_millis(DISCOVERY_READ_MS_MAX), &mut reading).await {
            Ok(Ok(fresh)) => fresh,
            Ok(Err(error)) => Err(format!("reading it panicked: {error}")),
            Err(_) => {
                self.late.push(reading);
                Err("reading it takes too long; check whether its file system responds, then send SIGHUP again".into())
            }
        }
    }
}

/// Handles SIGHUP, for ever. `running` is the configuration that the daemon was started with.
pub(super) async fn run(hangup: &mut Signal, read: ReadConfig, running: &Config, reloaded: Reloaded<'_>) {
    let Reloaded { grace_ms, desired, counters, .. } = reloaded;
    let mut reader = Reader { read, remote: running.remote.clone(), late: Vec::new() };
    let mut shadow = running.shadow.clone();
    while hangup.recv().await.is_some() {
        match reader.fresh().await {
            Ok((next, ..)) if next.spaces != running.spaces => {
                // Workers name their space by its position in the configuration.
                counters.bump(DaemonCounter::ConfigReloadsRefused);
                let problem = "its spaces differ from those of the running daemon: restart it";
                desired.note(&Source::Config.to_string(), Some(problem.to_owned()));
                tracing::error!(problem, "the configuration is refused; the daemon keeps the one it read before");
            }
            Ok((next, admissions, access)) => {
                counters.bump(DaemonCounter::ConfigReloads);
                desired.note(&Source::Config.to_string(), None);
                grace_ms.set(next.discovery.grace_ms);
                reloaded.replace_admissions(&admissions);
                reloaded.replace_remote_access(access);
                reloaded.replace_policies(&next, running.policy.seed);
                reloaded.replace_shadow(&next, &mut shadow);
                reloaded.peers.set_configured(next.routers.peer_endpoints());
                desired.set_source(Source::Config, named(&next));
                tracing::info!(
                    workers = next.workers.len(),
                    urls = next.servers.len(),
                    "the configuration is reloaded"
                );
                let (before, after) = audit_texts::difference(&reloaded.running.reloaded(&next));
                audit::changed(&"signal=SIGHUP", "reload", &reloaded.running.source(), (&before, &after));
                reloaded.note_pending(running.waiting_for_restart(&next));
            }
            Err(problem) => {
                counters.bump(DaemonCounter::ConfigReloadsRefused);
                desired.note(&Source::Config.to_string(), Some(problem.clone()));
                tracing::error!(problem, "the configuration cannot be used; the daemon keeps the one it read before");
            }
        }
    }
    std::future::pending().await
}
