//! The endpoints of Dynamo's standalone indexer.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};

use super::App;
use super::connections::Caller;
use super::prompt::{HashQueryFields, OverlapSummary, QueryFields, bits, given, group_default};
use super::registry::{RegisteredWorker, WorkerFields, group_of, scheme_of, space_named};
use super::reply::{Refusal, done, json};
use super::selection::summary_of;
use crate::error::{Error, Kind};
use crate::ids::{Scheme, SpaceId, TierBlocks, Window, Worker};
use crate::route::{Prompt, RouteRequest, Scored};
use crate::trust::Trust;

#[derive(Deserialize)]
struct Registration {
    instance_id: u64,
    endpoint: String,
    model_name: String,
    #[serde(default = "group_default")]
    routing_group: String,
    block_size: u32,
    dp_rank: Option<u32>,
    replay_endpoint: Option<String>,
}

/// `/register`: adds one rank of an engine.
pub(super) async fn register(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, Refusal> {
    app.administering()?;
    let registration: Registration = app.bodies.read(request).await?;
    let worker = Worker::new(registration.instance_id, registration.dp_rank.unwrap_or(0));
    let _alone = app.changing.lock().await;
    let fields = WorkerFields {
        model_name: Some(registration.model_name),
        routing_group: Some(registration.routing_group),
        kv_events_endpoint: Some(registration.endpoint),
        replay_endpoint: registration.replay_endpoint,
        data_parallel_start_rank: Some(worker.rank.0),
        ..WorkerFields::default()
    };
    let record = RegisteredWorker::new(worker.id.0, fields);
    let space = app.register_space(&record, worker, registration.block_size)?;
    let order = app.order(&record, worker.rank.0, space, caller)?;
    app.change(vec![order], caller).await.map_err(|error| Refusal::new(StatusCode::CONFLICT, error))?;
    app.settle(|fleet| fleet.workers.iter().any(|record| record.worker == worker)).await?;
    app.records.lock().set_block_size(space, registration.block_size);
    Ok(done(StatusCode::CREATED))
}

#[derive(Deserialize)]
struct Unregistration {
    instance_id: u64,
    model_name: String,
    routing_group: Option<String>,
    dp_rank: Option<u32>,
}

/// `/unregister`: removes an engine, or one rank of it.
pub(super) async fn unregister(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, Refusal> {
    app.administering()?;
    let unregistration: Unregistration = app.bodies.read(request).await?;
    let _alone = app.changing.lock().await;
    let worker = Worker::of_ranks(unregistration.instance_id, unregistration.dp_rank);
    let is_meant = move |is: Worker| worker.selects(is);
    {
        let fleet = app.backend.fleet();
        let is_of = |space: SpaceId| {
            let space = fleet.space(space).filter(|space| space.model == unregistration.model_name);
            space
                .is_some_and(|space| unregistration.routing_group.as_ref().is_none_or(|group| group == group_of(space)))
        };
        if !fleet.workers.iter().any(|record| is_meant(record.worker) && is_of(record.space)) {
            let message = format!(
                "instance {} is not registered for model={}",
                unregistration.instance_id, unregistration.model_name
            );
            return Err(Refusal::not_found(message, "GET /workers lists the registered workers"));
        }
    }
    app.remove(worker, caller).await?;
    Ok(done(StatusCode::OK))
}

#[derive(Serialize)]
struct Scores {
    /// Tokens in device memory, by instance and rank, of those that hold any.
    scores: BTreeMap<String, BTreeMap<String, u64>>,
    /// Always empty, as in Dynamo.
    frequencies: [u64; 0],
    instances: BTreeMap<String, Instance>,
}

#[derive(Default, Serialize)]
struct Instance {
    #[serde(flatten)]
    held: OverlapSummary,
    /// The trust in the overlap, by rank. Dynamo has no such field.
    trust: BTreeMap<String, &'static str>,
}

/// `/query`: the workers' overlaps with a prompt.
pub(super) async fn query(State(app): State<Arc<App>>, request: Request) -> Result<Response, Refusal> {
    let fields: QueryFields = app.bodies.read(request).await?;
    let (space, scheme) = app.indexed(&fields.model_name, &fields.routing_group)?;
    let question = RouteRequest {
        lora: given(&fields.lora_name),
        salt: given(&fields.cache_salt),
        ..RouteRequest::new(space, Prompt::of_tokens(&fields.token_ids))
    };
    Ok(json(StatusCode::OK, &scores(&app.gateway.overlaps(&question)?, scheme)))
}

/// `/query_by_hash`: the same for a prompt whose block hashes are sent, the salt included in them.
pub(super) async fn query_by_hash(State(app): State<Arc<App>>, request: Request) -> Result<Response, Refusal> {
    let fields: HashQueryFields = app.bodies.read(request).await?;
    if fields.cache_salt.is_some() {
        let message = "cache_salt is not accepted by /query_by_hash";
        return Err(Refusal::invalid(message, "hash the blocks with the salt, and leave cache_salt out"));
    }
    let (space, scheme) = app.indexed(&fields.model_name, &fields.routing_group)?;
    let hashes = bits(&fields.block_hashes);
    let tokens = hashes.len() as u64 * u64::from(scheme.block_size) + u64::from(scheme.window == Window::Bigram);
    let too_long = |_| Refusal::invalid("block_hashes are too many", "query the beginning of the prompt");
    let token_count = u32::try_from(tokens).map_err(too_long)?;
    let prompt = Prompt::LocalHashes { hashes: bytemuck::cast_slice(&hashes), scheme, token_count };
    Ok(json(StatusCode::OK, &scores(&app.gateway.overlaps(&RouteRequest::new(space, prompt))?, scheme)))
}

/// The scores of instances with an overlap.
fn scores(overlaps: &[Scored], scheme: Scheme) -> Scores {
    let mut scores = Scores { scores: BTreeMap::new(), frequencies: [], instances: BTreeMap::new() };
    let mut ranks: BTreeMap<u64, Vec<(u32, TierBlocks, Trust)>> = BTreeMap::new();
    for entry in overlaps.iter().filter(|entry| entry.overlap.total() > 0) {
        ranks.entry(entry.worker.id.0).or_default().push((entry.worker.rank.0, entry.overlap, entry.trust));
    }
    for (id, ranks) in ranks {
        let held = summary_of(ranks.iter().map(|(rank, held, _)| (*rank, *held)), scheme.block_size);
        let on_device: BTreeMap<_, _> = held.dp.iter().filter(|(_, tokens)| **tokens > 0).collect();
        if !on_device.is_empty() {
            let on_device = on_device.into_iter().map(|(rank, tokens)| (rank.clone(), *tokens)).collect();
            scores.scores.insert(id.to_string(), on_device);
        }
        let trust = ranks.iter().map(|(rank, _, trust)| (rank.to_string(), trust.level.name())).collect();
        scores.instances.insert(id.to_string(), Instance { held, trust });
    }
    scores
}

impl App {
    /// The space for a new rank. Refuses a rank that is registered already, or conflicts with its space.
    fn register_space(&self, record: &RegisteredWorker, worker: Worker, block_size: u32) -> Result<SpaceId, Refusal> {
        let fleet = self.backend.fleet();
        let space = space_named(&fleet, &record.model_name, &record.routing_group);
        let space = space.map_err(|error| Refusal::new(StatusCode::CONFLICT, error))?;
        for other in fleet.workers.iter().filter(|other| other.worker.id == worker.id) {
            if other.space != space.id {
                let message = format!("instance {} is registered for another model or routing group", worker.id);
                return Err(Refusal::conflict(message, "unregister it there first"));
            }
            if other.worker == worker {
                let message = format!("instance {} dp_rank {} already registered", worker.id, worker.rank);
                return Err(Refusal::conflict(message, "unregister it first, or go on using it"));
            }
        }
        let registered = self.records.lock().block_size_of(space.id);
        let known = space.scheme.get().map(|scheme| scheme.block_size).or(registered);
        if block_size == 0 || known.is_some_and(|known| known != block_size) {
            let existing = known.map_or("none yet".to_owned(), |known| known.to_string());
            let message = format!("block_size mismatch: existing={existing}, requested={block_size}");
            return Err(Refusal::conflict(message, "register it with the block size of its space"));
        }
        Ok(space.id)
    }

    /// The queried space and its scheme.
    fn indexed(&self, model: &str, group: &str) -> Result<(SpaceId, Scheme), Refusal> {
        let fleet = self.backend.fleet();
        let space = space_named(&fleet, model, group)?;
        if fleet.workers_of(space.id).next().is_none() {
            let message = format!("no indexer for model={model} routing_group={group}");
            return Err(Refusal::not_found(message, "register a worker for it"));
        }
        Ok((space.id, scheme_of(space, self.records.lock().block_size_of(space.id))))
    }
}

/// Endpoints for indexers that recover from each other. kvrouted has no such peers.
pub(super) async fn no_peers() -> Refusal {
    let message = "kvrouted daemons do not recover from each other";
    let remedy =
        "give workers a replay endpoint and the daemon a [snapshot] dir: it recovers from these after a restart";
    Error::new(Kind::Unsupported, message, remedy).into()
}

/// The list of peers, which is empty.
pub(super) async fn peers() -> Response {
    json(StatusCode::OK, &[(); 0])
}

/// Does nothing: the daemon logs to no file.
pub(super) async fn reopen_logs() -> Response {
    done(StatusCode::OK)
}
