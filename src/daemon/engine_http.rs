//! HTTP requests to engines that are named by their URL.
//!
//! * Until an engine has answered, the daemon asks it where it publishes, with a growing back-off.
//! * From then on the daemon checks its health (`GET /health`): an engine's HTTP server may end while its publisher
//!   goes on. The first failed check makes a finding. After several failures in a row the engine's workers get a
//!   back-off, until it answers again.
//!
//! Engines are not trusted: an answer is bounded in bytes and time, an engine cannot redirect the daemon to another
//! host, and answers are parsed (`discovery::ServerInfo`) before anything connects.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::desired_fleet::DesiredFleet;
use crate::discovery::{ServerInfo, no_events};
use crate::error::{Error, Kind, Result};
use crate::limits::{
    SERVER_CHECK_EVERY_MS, SERVER_CHECK_MS_MAX, SERVER_CHECKS_FAILED_MAX, SERVER_INFO_BACK_OFF_MS,
    SERVER_INFO_BYTES_MAX, SERVER_INFO_MS_MAX, SERVERS_ASKED_MAX,
};
use crate::metrics::{CounterSet, DaemonCounter};
use crate::requests::RequestTables;

/// An engine that has not answered yet.
#[derive(Debug)]
struct Attempt {
    /// The earliest time of the next request.
    next: Instant,
    back_off_ms: u64,
    asking: bool,
}

/// Asks engines where they publish, for ever, on `threads`.
pub(super) async fn find_publishers(desired: &DesiredFleet, threads: &Handle, counters: &CounterSet<DaemonCounter>) {
    let mut changes = desired.changes();
    let mut attempts: HashMap<String, Attempt> = HashMap::new();
    let mut asking: JoinSet<(String, Result<ServerInfo>)> = JoinSet::new();
    loop {
        changes.mark_unchanged();
        let unanswered: HashSet<String> = desired.merge().unanswered().into_iter().collect();
        attempts.retain(|url, attempt| attempt.asking || unanswered.contains(url));
        let now = Instant::now();
        for url in unanswered {
            let [first_ms, _] = SERVER_INFO_BACK_OFF_MS;
            let new = || Attempt { next: now, back_off_ms: first_ms, asking: false };
            let attempt = attempts.entry(url.clone()).or_insert_with(new);
            if !attempt.asking && attempt.next <= now && asking.len() < SERVERS_ASKED_MAX {
                attempt.asking = true;
                let ask = move || {
                    let answer = ask(&url);
                    (url, answer)
                };
                asking.spawn_blocking_on(ask, threads);
            }
        }
        let next = attempts.values().filter(|attempt| !attempt.asking).map(|attempt| attempt.next.max(now)).min();
        let next = next.filter(|_| asking.len() < SERVERS_ASKED_MAX);
        let rest = async {
            match next {
                Some(next) => tokio::time::sleep_until(next).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = rest => {}
            Ok(()) = changes.changed() => {}
            Some(done) = finished(&mut asking) => take_answer(done, &mut attempts, desired, counters),
        }
    }
}

async fn finished(asking: &mut JoinSet<(String, Result<ServerInfo>)>) -> Option<(String, Result<ServerInfo>)> {
    match asking.join_next().await {
        Some(Ok(done)) => Some(done),
        Some(Err(error)) => {
            tracing::error!(%error, "a request to an engine panicked");
            None
        }
        None => std::future::pending().await,
    }
}

fn take_answer(
    (url, answer): (String, Result<ServerInfo>),
    attempts: &mut HashMap<String, Attempt>,
    desired: &DesiredFleet,
    counters: &CounterSet<DaemonCounter>,
) {
    match answer {
        Ok(info) => {
            attempts.remove(&url);
            tracing::info!(
                url,
                ranks = info.ranks.len(),
                endpoint = info.ranks.first().map(|first| first.events.endpoint.as_str()),
                "the engine answered where it publishes"
            );
            desired.set_answer(&url, &info);
        }
        Err(error) => {
            let [_, back_off_ms_max] = SERVER_INFO_BACK_OFF_MS;
            counters.bump(DaemonCounter::ServerInfoFailed);
            let Some(attempt) = attempts.get_mut(&url) else { return };
            if !desired.merge().names_url(&url) {
                // No source names it any more: there is no problem to report.
                attempts.remove(&url);
                return;
            }
            *attempt = Attempt {
                next: Instant::now() + Duration::from_millis(attempt.back_off_ms),
                back_off_ms: (attempt.back_off_ms * 2).min(back_off_ms_max),
                asking: false,
            };
            if desired.note(&url, Some(error.to_string())) {
                tracing::warn!(url, %error, "the engine does not answer where it publishes; the daemon asks again");
            }
        }
    }
}

/// `GET /server_info`, and `GET /kv_event_sources` if the first answer names no events. Blocks for at most
/// `SERVER_INFO_MS_MAX`.
fn ask(url: &str) -> Result<ServerInfo> {
    let deadline = std::time::Instant::now() + Duration::from_millis(SERVER_INFO_MS_MAX);
    if let Some(body) = get(url, "/server_info", deadline)?
        && let Some(info) = ServerInfo::of_sglang(url, &body)?
    {
        return Ok(info);
    }
    match get(url, "/kv_event_sources", deadline)? {
        Some(body) => ServerInfo::of_vllm(url, &body),
        None => Err(no_events()),
    }
}

/// `GET /health`: whether the engine's HTTP server serves requests.
fn health(url: &str) -> Result<()> {
    let deadline = std::time::Instant::now() + Duration::from_millis(SERVER_CHECK_MS_MAX);
    let response = request(url, "/health", deadline)?;
    if response.status().is_server_error() { Err(refused(url, "/health", response.status().as_u16())) } else { Ok(()) }
}

/// Checks the health of engines, for ever, on `threads`: one round over all engines after another.
pub(super) async fn check_health(
    desired: &DesiredFleet,
    threads: &Handle,
    tables: &RequestTables,
    counters: &CounterSet<DaemonCounter>,
) {
    // By URL: failed checks since the last good one.
    let mut failed: HashMap<String, u32> = HashMap::new();
    let mut round = Duration::ZERO;
    loop {
        tokio::time::sleep(Duration::from_millis(SERVER_CHECK_EVERY_MS)).await;
        failed.retain(|url, _| desired.merge().has_answered(url));
        let mut urls = desired.merge().answered_urls().into_iter();
        let (began, mut under_way) = (std::time::Instant::now(), JoinSet::new());
        loop {
            urls.by_ref().take(SERVERS_ASKED_MAX - under_way.len()).for_each(|url| {
                under_way.spawn_blocking_on(move || (health(&url), url), threads);
            });
            let (answer, url) = match under_way.join_next().await {
                None => break,
                Some(Ok(done)) => done,
                Some(Err(error)) => {
                    tracing::error!(%error, "a health check of an engine panicked");
                    continue;
                }
            };
            let times = failed.remove(&url).unwrap_or(0);
            let times = take_health(&url, answer, times, desired);
            if times == 0 {
                continue;
            }
            counters.bump(DaemonCounter::ServerLooksFailed);
            if times >= SERVER_CHECKS_FAILED_MAX {
                back_off(&url, round, desired, tables);
            }
            failed.insert(url, times);
        }
        round = began.elapsed();
    }
}

/// Notes the result of a health check. Returns how many have failed in a row.
fn take_health(url: &str, answer: Result<()>, failed: u32, desired: &DesiredFleet) -> u32 {
    let Err(error) = answer else {
        if desired.note(url, None) {
            tracing::info!(url, "the engine answers again");
        }
        return 0;
    };
    if !desired.merge().has_answered(url) {
        // No source names it any more: there is no problem to report.
        return 0;
    }
    let failed = failed.saturating_add(1);
    let what = if failed >= SERVER_CHECKS_FAILED_MAX {
        format!("the engine does not answer, and its workers are not chosen: {error}")
    } else {
        format!("the engine does not answer: {error}")
    };
    if desired.note(url, Some(what)) {
        let failed_max = SERVER_CHECKS_FAILED_MAX;
        tracing::warn!(url, %error, failed, failed_max, "the engine does not answer; after failed_max failures its workers are not chosen");
    }
    failed
}

/// Gives the workers of an engine a back-off until after the next two checks: they are chosen only if no other worker
/// can be. `round` is the time that the last round over all engines took.
fn back_off(url: &str, round: Duration, desired: &DesiredFleet, tables: &RequestTables) {
    let check_ns = round.as_nanos() as u64 + (SERVER_CHECK_EVERY_MS + SERVER_CHECK_MS_MAX) * 1_000_000;
    let until_ns = tables.now_ns().saturating_add(2 * check_ns);
    let workers = desired.merge().workers_of_url(url);
    let fleet = tables.fleet.load();
    for record in fleet.workers.iter().filter(|record| workers.contains(&record.worker)) {
        tables.loads.back_off_until(record.index, until_ns);
    }
}

/// The body of an answer; `None` = the server has no such page.
fn get(url: &str, path: &str, deadline: std::time::Instant) -> Result<Option<Vec<u8>>> {
    let mut response = request(url, path, deadline)?;
    match response.status().as_u16() {
        200 => {}
        404 | 405 => return Ok(None),
        status => return Err(refused(url, path, status)),
    }
    let body = response.body_mut().with_config().limit(SERVER_INFO_BYTES_MAX).read_to_vec();
    Ok(Some(body.map_err(|error| unreached(url, path, error))?))
}

/// Sends a request, and returns the head of the answer.
///
/// It follows no redirects: an engine must not choose which host the daemon asks next.
fn request(url: &str, path: &str, deadline: std::time::Instant) -> Result<ureq::http::Response<ureq::Body>> {
    let rest = deadline.saturating_duration_since(std::time::Instant::now());
    let config = ureq::Agent::config_builder().timeout_global(Some(rest)).max_redirects(0).http_status_as_error(false);
    let agent: ureq::Agent = config.proxy(None).build().into();
    agent.get(format!("{url}{path}")).call().map_err(|error| unreached(url, path, error))
}

const REMEDY: &str = "start the engine, or correct the URL";

fn unreached(url: &str, path: &str, error: ureq::Error) -> Error {
    Error::new(Kind::Connection, format!("GET {url}{path} fails"), REMEDY).caused_by(error)
}

fn refused(url: &str, path: &str, status: u16) -> Error {
    Error::new(Kind::Connection, format!("GET {url}{path} is answered with status {status}"), REMEDY)
}
