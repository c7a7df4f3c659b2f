//! SIGHUP: the daemon reads its configuration again and takes over the fields that can change while it runs.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock};

use arc_swap::ArcSwap;
use rand::RngExt;
use tokio::signal::unix::Signal;

use super::desired_fleet::DesiredFleet;
use crate::config::{Config, NamedWorkers, Problems, ShadowConfig};
use crate::discovery::Source;
use crate::error;
use crate::metrics::{CounterSet, DaemonCounter};
use crate::requests::DecisionRecording;
use crate::route::{Policy, PolicyTable};
use crate::serve::Admissions;

/// Reads the configuration that the daemon was started with once more.
pub type ReadConfig<'a> = &'a dyn Fn() -> Result<Config, Problems>;

/// The workers that a configuration names.
pub(super) fn named(config: &Config) -> NamedWorkers {
    NamedWorkers { workers: config.workers.clone(), servers: config.servers.clone() }
}

/// The policies that a configuration names. This daemon's own order of workers follows from the configured seed, or from
/// a number that is drawn once and stays when the file is read again.
pub(super) fn policies(config: &Config, version: u64) -> PolicyTable {
    static DRAWN_ID: LazyLock<u64> = LazyLock::new(|| rand::rng().random());
    let router_id = if config.policy.seed == 0 { *DRAWN_ID } else { config.policy.seed };
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
    pub(super) policies: &'a ArcSwap<PolicyTable>,
    pub(super) admissions: &'a Admissions,
    pub(super) recording: &'a DecisionRecording,
    pub(super) counters: &'a CounterSet<DaemonCounter>,
}

impl Reloaded<'_> {
    /// Replaces the users that may connect. Open connections stay.
    fn replace_admissions(&self, next: &Config) -> error::Result<()> {
        if self.admissions.replace(next)? {
            tracing::info!("the lists of users that may connect are replaced");
        }
        Ok(())
    }

    /// Replaces the policies if they differ. They get the next version, which every reply names. A decision in progress
    /// keeps the policies that it began with.
    fn replace_policies(&self, next: &Config) {
        let before = self.policies.load();
        let table = policies(next, before.version() + 1);
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

/// Handles SIGHUP, for ever. `running` is the configuration that the daemon was started with.
pub(super) async fn run(hangup: &mut Signal, read: ReadConfig<'_>, running: &Config, reloaded: Reloaded<'_>) {
    let Reloaded { grace_ms, desired, counters, .. } = reloaded;
    let mut shadow = running.shadow.clone();
    while hangup.recv().await.is_some() {
        match read() {
            Ok(next) if next.spaces != running.spaces => {
                // Workers name their space by its position in the configuration.
                counters.bump(DaemonCounter::ConfigReloadsRefused);
                let problem = "its spaces differ from those of the running daemon: restart it";
                desired.note(&Source::Config.to_string(), Some(problem.to_owned()));
                tracing::error!(problem, "the configuration is refused; the daemon keeps the one it read before");
            }
            Ok(next) => {
                // First, because only this can still fail: it looks user names up again.
                if let Err(error) = reloaded.replace_admissions(&next) {
                    counters.bump(DaemonCounter::ConfigReloadsRefused);
                    desired.note(&Source::Config.to_string(), Some(error.to_string()));
                    tracing::error!(%error, "the configuration cannot be used; the daemon keeps the one it read before");
                    continue;
                }
                counters.bump(DaemonCounter::ConfigReloads);
                desired.note(&Source::Config.to_string(), None);
                grace_ms.set(next.discovery.grace_ms);
                reloaded.replace_policies(&next);
                reloaded.replace_shadow(&next, &mut shadow);
                desired.set_source(Source::Config, named(&next));
                tracing::info!(
                    workers = next.workers.len(),
                    urls = next.servers.len(),
                    "the configuration is reloaded"
                );
                reloaded.note_pending(running.waiting_for_restart(&next));
            }
            Err(problems) => {
                counters.bump(DaemonCounter::ConfigReloadsRefused);
                desired.note(&Source::Config.to_string(), Some(problems.to_string().trim().to_owned()));
                tracing::error!(%problems, "the configuration cannot be used; the daemon keeps the one it read before");
            }
        }
    }
    std::future::pending().await
}
