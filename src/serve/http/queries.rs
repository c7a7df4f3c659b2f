//! Requests that change nothing: loads, overlaps, health, readiness and metrics.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{RawQuery, Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde::Serialize;

use super::App;
use super::connections::ReadWithin;
use super::prompt::PromptFields;
use super::prompt::RequestBuilder;
use super::registry::group_of;
use super::reply::{Refusal, done, json};
use super::workers::{Filter, Row};
use crate::error::{Error, Kind};
use crate::hash;
use crate::ids::SpaceId;
use crate::limits::{HTTP_REPLIES_RETRY_US, METRICS_CONNECTION_MS_MAX};
use crate::route::{Prompt, RouteRequest};
use crate::serve::PageForm;

/// The load that a worker would have if it took a prompt.
#[derive(Serialize)]
struct WorkerLoad {
    worker_id: u64,
    dp_rank: u32,
    potential_prefill_tokens: u64,
    potential_decode_blocks: u64,
    active_requests: u64,
}

#[derive(Serialize)]
struct SpaceLoads {
    model_name: String,
    routing_group: String,
    loads: Vec<WorkerLoad>,
    pending_count: usize,
    pending_isl_tokens: u64,
}

/// `/loads`: the load of every worker.
pub(super) async fn loads(State(app): State<Arc<App>>, RawQuery(query): RawQuery) -> Result<Response, Refusal> {
    let filter = Filter::of(query.as_deref());
    let mut spaces: Vec<(SpaceId, String, String)> = {
        let fleet = app.backend.fleet();
        let has_workers = |id: SpaceId| fleet.workers_of(id).next().is_some();
        let spaces = fleet.spaces.iter().filter(|space| has_workers(space.id));
        spaces.map(|space| (space.id, space.model.clone(), group_of(space).to_owned())).collect()
    };
    spaces.retain(|(_, model, group)| filter.takes(model, group));
    spaces.sort_by(|a, b| (&a.1, &a.2).cmp(&(&b.1, &b.2)));
    let mut listed = Vec::with_capacity(spaces.len());
    for (space, model_name, routing_group) in spaces {
        let loads = app.potential(&RouteRequest::new(space, Prompt::of_tokens(&[])))?;
        let (pending_count, pending_isl_tokens) = app.backend.waiting(space);
        listed.push(SpaceLoads { model_name, routing_group, loads, pending_count, pending_isl_tokens });
    }
    Ok(json(StatusCode::OK, &listed))
}

/// `/potential_loads`: the load that each worker would have if it took a prompt.
pub(super) async fn potential_loads(State(app): State<Arc<App>>, request: Request) -> Result<Response, Refusal> {
    let fields: PromptFields = app.bodies.read(request).await?;
    let (space, scheme) = app.space_of(&fields)?;
    app.has_workers(space)?;
    let builder = RequestBuilder::of(&fields, scheme)?;
    Ok(json(StatusCode::OK, &app.potential(&builder.question(space))?))
}

#[derive(Serialize)]
struct WorkerOverlap {
    worker_id: u64,
    dp_rank: u32,
    device_blocks: u32,
    host_pinned_blocks: u32,
    disk_blocks: u32,
    host_pinned_extension_blocks: u32,
    disk_extension_blocks: u32,
    /// Always unknown: gateways that know a shared cache send its hits with the request.
    shared_beyond_device_blocks: Option<u32>,
    /// The trust in the overlap. Dynamo has no such field.
    trust: &'static str,
}

#[derive(Default, Serialize)]
struct SharedCache {
    enabled: bool,
    total_hit_blocks: u32,
    ranges: [(u32, u32); 0],
    error: Option<String>,
}

#[derive(Serialize)]
struct Overlaps {
    block_size: u32,
    num_blocks: usize,
    workers: Vec<WorkerOverlap>,
    shared_cache: SharedCache,
}

/// `/overlap_scores`: every worker's overlap with a prompt, in blocks.
pub(super) async fn overlap_scores(State(app): State<Arc<App>>, request: Request) -> Result<Response, Refusal> {
    let fields: PromptFields = app.bodies.read(request).await?;
    let (space, scheme) = app.space_of(&fields)?;
    app.has_workers(space)?;
    let builder = RequestBuilder::of(&fields, scheme)?;
    let overlaps = app.gateway.overlaps(&builder.question(space))?;
    let mut workers: Vec<WorkerOverlap> = overlaps
        .iter()
        .map(|entry| {
            let (held, below) = (entry.overlap, entry.overlap.disk + entry.overlap.external);
            WorkerOverlap {
                worker_id: entry.worker.id.0,
                dp_rank: entry.worker.rank.0,
                device_blocks: held.device,
                host_pinned_blocks: held.device + held.host,
                disk_blocks: held.total(),
                host_pinned_extension_blocks: held.host,
                disk_extension_blocks: below,
                shared_beyond_device_blocks: None,
                trust: entry.trust.level.name(),
            }
        })
        .collect();
    workers.sort_by_key(|worker| (worker.worker_id, worker.dp_rank));
    let num_blocks = hash::block_count(builder.prompt_tokens(), scheme);
    let overlaps =
        Overlaps { block_size: scheme.block_size, num_blocks, workers, shared_cache: SharedCache::default() };
    Ok(json(StatusCode::OK, &overlaps))
}

/// `/health`: the process answers.
pub(super) async fn health() -> Response {
    done(StatusCode::OK)
}

#[derive(Serialize)]
struct Ready {
    ready: bool,
    schedulable_workers: usize,
    /// Why the daemon is not ready. Dynamo has no such field.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    workers: Vec<Row>,
}

/// `/ready`: whether the daemon takes requests, its threads go round, the load of other routers is known, and a worker may be chosen.
pub(super) async fn ready(State(app): State<Arc<App>>) -> Response {
    let workers = app.rows(&Filter::default());
    let schedulable_workers = workers.iter().filter(|row| row.is_schedulable()).count();
    let reason = if app.backend.is_draining() {
        Some("the daemon drains")
    } else if app.backend.is_stalled() {
        Some("a thread is stalled: see kvrouted doctor")
    } else if app.backend.is_joining() {
        Some("the load of other routers is not known yet: see kvrouted status")
    } else {
        (schedulable_workers == 0).then_some("no worker may be chosen: register one, or see /workers")
    };
    let ready = Ready { ready: reason.is_none(), schedulable_workers, reason, workers };
    json(if ready.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, &ready)
}

/// `/metrics`: every metric.
pub(super) async fn metrics(State(app): State<Arc<App>>, headers: HeaderMap) -> Response {
    let mut response = app.backend.metrics().response(PageForm::accepted(&headers)).await;
    // As on the metrics port: a slow reader would hold up newer pages.
    response.extensions_mut().insert(ReadWithin(Duration::from_millis(METRICS_CONNECTION_MS_MAX)));
    response
}

/// The reply on a reserved connection to other requests than `/health` and `/metrics`.
pub(super) async fn crowded() -> Refusal {
    let error =
        Error::new(Kind::Overloaded, "all connections of the port have requests in progress", "ask again later");
    error.retry_after_us(HTTP_REPLIES_RETRY_US).into()
}

/// The path is unknown.
pub(super) async fn not_found() -> Refusal {
    Refusal::not_found("route not found", "see docs/http-dynamo.md for what the HTTP port answers")
}

/// The path is known, with another method.
pub(super) async fn method_not_allowed() -> Refusal {
    let error = Error::new(Kind::Unsupported, "method not allowed", "use a method of the Allow header");
    Refusal::new(StatusCode::METHOD_NOT_ALLOWED, error)
}

impl App {
    fn potential(&self, question: &RouteRequest<'_>) -> Result<Vec<WorkerLoad>, Refusal> {
        let mut loads: Vec<WorkerLoad> = self
            .gateway
            .potential_loads(question)?
            .into_iter()
            .map(|load| WorkerLoad {
                worker_id: load.worker.id.0,
                dp_rank: load.worker.rank.0,
                potential_prefill_tokens: load.prefill_tokens,
                potential_decode_blocks: load.decode_blocks,
                active_requests: load.active_requests,
            })
            .collect();
        loads.sort_by_key(|load| (load.worker_id, load.dp_rank));
        Ok(loads)
    }

    /// Refuses a space without workers.
    fn has_workers(&self, space: SpaceId) -> Result<(), Refusal> {
        if self.backend.fleet().workers_of(space).next().is_some() {
            return Ok(());
        }
        let error = Error::new(Kind::NobodyAvailable, "no schedulable workers are available", "register a worker");
        Err(error.into())
    }
}
