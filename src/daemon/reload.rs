//! SIGHUP: the configuration is read again, and what can be taken over is.

use std::cell::Cell;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio::signal::unix::Signal;

use super::recording::Recording;
use super::roster::Roster;
use crate::config::{Config, NamedWorkers, Problems, ShadowConfig};
use crate::discovery::Source;
use crate::error;
use crate::metrics::{CounterSet, DaemonCounter};
use crate::route::PolicyTable;
use crate::serve::Admissions;

/// Reads the configuration the daemon was started with once more.
pub type ReadConfig<'a> = &'a dyn Fn() -> Result<Config, Problems>;

/// The workers that a configuration names.
pub(super) fn named(config: &Config) -> NamedWorkers {
    NamedWorkers { workers: config.workers.clone(), servers: config.servers.clone() }
}

/// The policies that a configuration names.
pub(super) fn policies(config: &Config, version: u64) -> PolicyTable {
    PolicyTable::new(version, &config.policy.weights, &config.policy.spaces)
}

/// What is taken over while the daemon runs.
#[derive(Clone, Copy)]
pub(super) struct Reloaded<'a> {
    pub(super) grace_ms: &'a Cell<u64>,
    pub(super) roster: &'a Roster,
    pub(super) policies: &'a ArcSwap<PolicyTable>,
    pub(super) admissions: &'a Admissions,
    pub(super) recording: &'a Recording,
    pub(super) counters: &'a CounterSet<DaemonCounter>,
}

impl Reloaded<'_> {
    /// Replaces who may connect. Those who are connected stay.
    fn replace_admissions(&self, next: &Config) -> error::Result<()> {
        if self.admissions.replace(next)? {
            tracing::info!("who may connect is replaced");
        }
        Ok(())
    }

    /// Replaces the policies, if they say anything else: under the next version, so that every reply tells by which it
    /// was decided. A decision under way ends by those it began with.
    fn replace_policies(&self, next: &Config) {
        let before = self.policies.load();
        let next = policies(next, before.version() + 1);
        if !next.equals_but_for_version(&before) {
            tracing::info!(version = next.version(), "the policies are replaced");
            self.counters.bump(DaemonCounter::PoliciesReplaced);
            self.policies.store(Arc::new(next));
        }
    }
}

impl Reloaded<'_> {
    /// Replaces the shadow policy, if the file says another than when it was last read: `before`. What was set by command
    /// meanwhile stays otherwise.
    fn replace_shadow(&self, next: &Config, before: &mut ShadowConfig) {
        if next.shadow == *before {
            return;
        }
        let ShadowConfig { share, policy } = &next.shadow;
        match self.recording.shadow(policy, *share) {
            Ok(()) => tracing::info!(share, settings = policy.join(" "), "the shadow policy is replaced"),
            // Checked with the file, so it is not refused.
            Err(error) => tracing::error!(%error, "the shadow policy cannot be replaced"),
        }
        before.clone_from(&next.shadow);
    }

    /// Says which changes wait for the next start: in the log, and as a finding until they are taken back.
    fn note_pending(&self, fields: Vec<&'static str>) {
        for field in &fields {
            tracing::warn!(field, "changed in the configuration, and takes effect at the next start");
        }
        self.roster.note_pending(fields);
    }
}

/// Waits for SIGHUP, for ever. `running` is what the daemon was started with.
pub(super) async fn run(hangup: &mut Signal, read: ReadConfig<'_>, running: &Config, reloaded: Reloaded<'_>) {
    let Reloaded { grace_ms, roster, counters, .. } = reloaded;
    let mut shadow = running.shadow.clone();
    while hangup.recv().await.is_some() {
        match read() {
            Ok(next) if next.spaces != running.spaces => {
                // Its workers name its spaces by their order.
                counters.bump(DaemonCounter::ConfigReloadsRefused);
                let problem = "its spaces differ from those that run: restart the daemon";
                roster.note(&Source::Config.to_string(), Some(problem.to_owned()));
                tracing::error!(problem, "the configuration is not taken over");
            }
            Ok(next) => {
                // First, as it alone may still refuse: names of users are looked up anew.
                if let Err(error) = reloaded.replace_admissions(&next) {
                    counters.bump(DaemonCounter::ConfigReloadsRefused);
                    roster.note(&Source::Config.to_string(), Some(error.to_string()));
                    tracing::error!(%error, "the configuration cannot be used; what was read before holds");
                    continue;
                }
                counters.bump(DaemonCounter::ConfigReloads);
                roster.note(&Source::Config.to_string(), None);
                grace_ms.set(next.discovery.grace_ms);
                reloaded.replace_policies(&next);
                reloaded.replace_shadow(&next, &mut shadow);
                roster.say(Source::Config, named(&next));
                tracing::info!(
                    workers = next.workers.len(),
                    urls = next.servers.len(),
                    "the configuration is read again"
                );
                reloaded.note_pending(running.waiting_for_restart(&next));
            }
            Err(problems) => {
                counters.bump(DaemonCounter::ConfigReloadsRefused);
                roster.note(&Source::Config.to_string(), Some(problems.to_string().trim().to_owned()));
                tracing::error!(%problems, "the configuration cannot be used; what was read before holds");
            }
        }
    }
    std::future::pending().await
}
