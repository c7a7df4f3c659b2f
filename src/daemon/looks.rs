//! Engines named by their URL, looked at for as long as they are named: an engine's HTTP server may end while its
//! publisher goes on, and then the events alone would have the worker chosen.
//!
//! A look is `GET /health`. Any answer but a server error shows that requests are served. An engine that does not answer
//! is named by a finding from the first look on; after [`SERVER_LOOKS_FAILED_MAX`] looks in a row its workers are left
//! alone, as after a gateway's report of failure, until it answers. A gateway that sees a request fail is quicker.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::roster::Roster;
use super::servers;
use super::shared::Shared;
use crate::error::Result;
use crate::limits::{SERVER_LOOK_MS_MAX, SERVER_LOOK_REST_MS, SERVER_LOOKS_FAILED_MAX, SERVERS_ASKED_MAX};
use crate::metrics::{CounterSet, DaemonCounter};

/// Looks, for ever: one round over all engines after another.
pub(super) async fn run(roster: &Roster, shared: &Shared, counters: &CounterSet<DaemonCounter>) {
    // By URL: looks that failed since the last that did not.
    let mut failed: HashMap<String, u32> = HashMap::new();
    let mut round = Duration::ZERO;
    loop {
        tokio::time::sleep(Duration::from_millis(SERVER_LOOK_REST_MS)).await;
        failed.retain(|url, _| roster.directory().has_answered(url));
        let mut urls = roster.directory().answered_urls().into_iter();
        let (began, mut under_way) = (Instant::now(), JoinSet::new());
        loop {
            urls.by_ref().take(SERVERS_ASKED_MAX - under_way.len()).for_each(|url| {
                under_way.spawn_blocking(move || (servers::look(&url), url));
            });
            let (answer, url) = match under_way.join_next().await {
                None => break,
                Some(Ok(done)) => done,
                Some(Err(error)) => {
                    tracing::error!(%error, "a look at an engine ended by a fault");
                    continue;
                }
            };
            let times = failed.remove(&url).unwrap_or(0);
            let times = take(&url, answer, times, roster);
            if times == 0 {
                continue;
            }
            counters.bump(DaemonCounter::ServerLooksFailed);
            if times >= SERVER_LOOKS_FAILED_MAX {
                leave_alone(&url, round, roster, shared);
            }
            failed.insert(url, times);
        }
        round = began.elapsed();
    }
}

/// Notes what a look showed; how many have failed in a row.
fn take(url: &str, answer: Result<()>, failed: u32, roster: &Roster) -> u32 {
    let Err(error) = answer else {
        if roster.note(url, None) {
            tracing::info!(url, "the engine answers again");
        }
        return 0;
    };
    if !roster.directory().has_answered(url) {
        // It was named when it was looked at, and is not any more: nothing is the matter with it.
        return 0;
    }
    let failed = failed.saturating_add(1);
    let what = if failed >= SERVER_LOOKS_FAILED_MAX {
        format!("the engine does not answer, and its workers are not chosen: {error}")
    } else {
        format!("the engine does not answer: {error}")
    };
    if roster.note(url, Some(what)) {
        let failed_max = SERVER_LOOKS_FAILED_MAX;
        tracing::warn!(url, %error, failed, failed_max, "the engine does not answer; from failed_max on its workers are not chosen");
    }
    failed
}

/// Has the workers of an engine chosen no more while others can be, until after the next two looks. `round` is how long
/// the last round over all engines took.
fn leave_alone(url: &str, round: Duration, roster: &Roster, shared: &Shared) {
    let look = round.as_nanos() as u64 + (SERVER_LOOK_REST_MS + SERVER_LOOK_MS_MAX) * 1_000_000;
    let until_ns = shared.now_ns().saturating_add(2 * look);
    let workers = roster.directory().workers_of_url(url);
    let fleet = shared.fleet.load();
    for record in fleet.workers.iter().filter(|record| workers.contains(&record.worker)) {
        shared.loads.leave_alone(record.index, until_ns);
    }
}
