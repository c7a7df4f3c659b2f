//! SIGHUP: the configuration is read again, and what can be taken over is.

use std::cell::Cell;

use tokio::signal::unix::Signal;

use super::roster::Roster;
use crate::config::{Config, Named, Problems};
use crate::discovery::Source;
use crate::metrics::{CounterSet, DaemonCounter};

/// Reads the configuration the daemon was started with once more.
pub type ReadConfig<'a> = &'a dyn Fn() -> Result<Config, Problems>;

/// The workers that a configuration names.
pub(super) fn named(config: &Config) -> Named {
    Named { workers: config.workers.clone(), servers: config.servers.clone() }
}

/// Waits for SIGHUP, for ever. `running` is what the daemon was started with.
pub(super) async fn run(
    hangup: &mut Signal,
    read: ReadConfig<'_>,
    running: &Config,
    grace_ms: &Cell<u64>,
    roster: &Roster,
    counters: &CounterSet<DaemonCounter>,
) {
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
                counters.bump(DaemonCounter::ConfigReloads);
                roster.note(&Source::Config.to_string(), None);
                grace_ms.set(next.discovery.grace_ms);
                roster.say(Source::Config, named(&next));
                tracing::info!(
                    workers = next.workers.len(),
                    urls = next.servers.len(),
                    "the configuration is read again"
                );
                for field in running.waiting_for_restart(&next) {
                    tracing::warn!(field, "changed in the configuration, and takes effect at the next start");
                }
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
