//! Engines named by their URL: asked where they publish, again with growing rests until they say.
//!
//! An engine is a stranger: its answer is bounded in bytes and time, it cannot send the daemon to another host, and what
//! it says is parsed (`discovery::ServerInfo`) before anything connects.

use std::collections::HashMap;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::roster::Roster;
use crate::discovery::{ServerInfo, no_events};
use crate::error::{Error, Kind, Result};
use crate::limits::{
    SERVER_INFO_BYTES_MAX, SERVER_INFO_MS_MAX, SERVER_INFO_REST_MS, SERVER_LOOK_MS_MAX, SERVERS_ASKED_MAX,
};
use crate::metrics::{CounterSet, DaemonCounter};

/// One engine that has not said.
#[derive(Debug)]
struct Attempt {
    /// Not asked before then.
    next: Instant,
    rest_ms: u64,
    asking: bool,
}

/// Asks, for ever.
pub(super) async fn run(roster: &Roster, counters: &CounterSet<DaemonCounter>) {
    let mut changes = roster.changes();
    let mut attempts: HashMap<String, Attempt> = HashMap::new();
    let mut asking: JoinSet<(String, Result<ServerInfo>)> = JoinSet::new();
    loop {
        changes.mark_unchanged();
        let unanswered = roster.directory().unanswered();
        attempts.retain(|url, attempt| attempt.asking || unanswered.contains(url));
        let now = Instant::now();
        for url in unanswered {
            let [first_ms, _] = SERVER_INFO_REST_MS;
            let new = || Attempt { next: now, rest_ms: first_ms, asking: false };
            let attempt = attempts.entry(url.clone()).or_insert_with(new);
            if !attempt.asking && attempt.next <= now && asking.len() < SERVERS_ASKED_MAX {
                attempt.asking = true;
                asking.spawn_blocking(move || {
                    let answer = ask(&url);
                    (url, answer)
                });
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
            Some(done) = finished(&mut asking) => take(done, &mut attempts, roster, counters),
        }
    }
}

async fn finished(asking: &mut JoinSet<(String, Result<ServerInfo>)>) -> Option<(String, Result<ServerInfo>)> {
    match asking.join_next().await {
        Some(Ok(done)) => Some(done),
        Some(Err(error)) => {
            tracing::error!(%error, "asking an engine ended by a fault");
            None
        }
        None => std::future::pending().await,
    }
}

fn take(
    (url, answer): (String, Result<ServerInfo>),
    attempts: &mut HashMap<String, Attempt>,
    roster: &Roster,
    counters: &CounterSet<DaemonCounter>,
) {
    match answer {
        Ok(info) => {
            attempts.remove(&url);
            tracing::info!(
                url,
                ranks = info.ranks.len(),
                endpoint = info.ranks.first().map(|first| first.events.endpoint.as_str()),
                "the engine says where it publishes"
            );
            roster.answered(&url, &info);
        }
        Err(error) => {
            let [_, rest_ms_max] = SERVER_INFO_REST_MS;
            counters.bump(DaemonCounter::ServerInfoFailed);
            let Some(attempt) = attempts.get_mut(&url) else { return };
            if !roster.directory().names_url(&url) {
                // It was named when it was asked, and is not any more: nothing is the matter with it.
                attempts.remove(&url);
                return;
            }
            *attempt = Attempt {
                next: Instant::now() + Duration::from_millis(attempt.rest_ms),
                rest_ms: (attempt.rest_ms * 2).min(rest_ms_max),
                asking: false,
            };
            if roster.note(&url, Some(error.to_string())) {
                tracing::warn!(url, %error, "the engine does not say where it publishes; it is asked again");
            }
        }
    }
}

/// `GET /server_info`, and `GET /kv_event_sources` where that says nothing of events. Blocks for as long as the engine
/// may take.
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
pub(super) fn look(url: &str) -> Result<()> {
    let deadline = std::time::Instant::now() + Duration::from_millis(SERVER_LOOK_MS_MAX);
    let response = request(url, "/health", deadline)?;
    if response.status().is_server_error() { Err(refused(url, "/health", response.status().as_u16())) } else { Ok(()) }
}

/// The body of an answer; `None` where the server has no such page.
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

/// Asks, and answers with what comes before the body.
///
/// Redirects are not followed: an engine that is named by its host must not choose whom the daemon asks next.
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
