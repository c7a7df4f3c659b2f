//! The endpoints of Dynamo's standalone indexer.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};

use super::app::App;
use super::desk::broken;
use super::fields::{HashQueryFields, OverlapSummary, QueryFields, group_default};
use super::listener::Caller;
use super::materials::bits;
use super::records::{Record, WorkerFields};
use super::refusal::{Refusal, done, json};
use super::selection::summary_of;
use super::space;
use crate::error::{Error, Kind};
use crate::ids::{CorrelationId, Scheme, SpaceId, TierBlocks, Window, Worker};
use crate::route::{Prompt, RouteRequest};
use crate::trust::Trust;
use crate::wire::{OverlapReply, Reply};

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

/// Adds one rank of an engine.
pub(super) async fn register(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, Refusal> {
    app.administering()?;
    let said: Registration = app.bodies.read(request).await?;
    let worker = Worker::new(said.instance_id, said.dp_rank.unwrap_or(0));
    let _alone = app.changing.lock().await;
    let fields = WorkerFields {
        model_name: Some(said.model_name),
        routing_group: Some(said.routing_group),
        kv_events_endpoint: Some(said.endpoint),
        replay_endpoint: said.replay_endpoint,
        data_parallel_start_rank: Some(worker.rank.0),
        ..WorkerFields::default()
    };
    let record = Record::new(worker.id.0, fields);
    let space = app.register_space(&record, worker, said.block_size)?;
    let order = app.order(&record, worker.rank.0, space, caller)?;
    app.change(vec![order]).await.map_err(|error| Refusal::new(StatusCode::CONFLICT, error))?;
    app.settle(|fleet| fleet.workers.iter().any(|record| record.worker == worker)).await?;
    app.records.lock().set_block_size(space, said.block_size);
    Ok(done(StatusCode::CREATED))
}

#[derive(Deserialize)]
struct Unregistration {
    instance_id: u64,
    model_name: String,
    routing_group: Option<String>,
    dp_rank: Option<u32>,
}

/// Removes an engine, or one rank of it.
pub(super) async fn unregister(State(app): State<Arc<App>>, request: Request) -> Result<Response, Refusal> {
    app.administering()?;
    let said: Unregistration = app.bodies.read(request).await?;
    let _alone = app.changing.lock().await;
    let worker = Worker::of_ranks(said.instance_id, said.dp_rank);
    let is_meant = move |is: Worker| worker.selects(is);
    {
        let fleet = app.backend.fleet();
        let is_of = |space: SpaceId| {
            let space = fleet.space(space).filter(|space| space.model == said.model_name);
            space.is_some_and(|space| said.routing_group.as_ref().is_none_or(|group| group == space::group_of(space)))
        };
        if !fleet.workers.iter().any(|record| is_meant(record.worker) && is_of(record.space)) {
            let message = format!("instance {} is not registered for model={}", said.instance_id, said.model_name);
            return Err(Refusal::not_found(message, "see GET /workers for what is registered"));
        }
    }
    app.remove(worker).await?;
    Ok(done(StatusCode::OK))
}

#[derive(Serialize)]
struct Scores {
    /// Tokens in device memory, by instance and rank, of those that hold any.
    scores: BTreeMap<String, BTreeMap<String, u64>>,
    /// Always empty, as there.
    frequencies: [u64; 0],
    instances: BTreeMap<String, Instance>,
}

#[derive(Default, Serialize)]
struct Instance {
    #[serde(flatten)]
    held: OverlapSummary,
    /// How far that may be believed, by rank; not among what Dynamo says.
    trust: BTreeMap<String, &'static str>,
}

/// Who holds how much of a prompt.
pub(super) async fn query(State(app): State<Arc<App>>, request: Request) -> Result<Response, Refusal> {
    let fields: QueryFields = app.bodies.read(request).await?;
    let (space, scheme) = app.indexed(&fields.model_name, &fields.routing_group)?;
    let question = RouteRequest {
        lora: fields.lora_name.as_deref(),
        salt: fields.cache_salt.as_deref(),
        ..RouteRequest::new(space, Prompt::of_tokens(&fields.token_ids))
    };
    Ok(json(StatusCode::OK, &scores(&app.overlaps(&question).await?, scheme)))
}

/// The same of a prompt whose blocks are hashed already, its salt included.
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
    Ok(json(StatusCode::OK, &scores(&app.overlaps(&RouteRequest::new(space, prompt)).await?, scheme)))
}

/// Only those who hold something are told.
fn scores(overlaps: &OverlapReply, scheme: Scheme) -> Scores {
    let mut scores = Scores { scores: BTreeMap::new(), frequencies: [], instances: BTreeMap::new() };
    let mut ranks: BTreeMap<u64, Vec<(u32, TierBlocks, Trust)>> = BTreeMap::new();
    for entry in overlaps.workers.iter().filter(|entry| entry.overlap.total() > 0) {
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
    /// Where a new rank is to be registered, unless it is there already or goes against what is there.
    fn register_space(&self, record: &Record, worker: Worker, block_size: u32) -> Result<SpaceId, Refusal> {
        let fleet = self.backend.fleet();
        let space = space::of(&fleet, &record.model_name, &record.routing_group);
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

    /// The space that is queried, and how its prompts are cut.
    fn indexed(&self, model: &str, group: &str) -> Result<(SpaceId, Scheme), Refusal> {
        let fleet = self.backend.fleet();
        let space = space::of(&fleet, model, group)?;
        if fleet.workers_of(space.id).next().is_none() {
            let message = format!("no indexer for model={model} routing_group={group}");
            return Err(Refusal::not_found(message, "register a worker for it"));
        }
        Ok((space.id, space::scheme_of(space, self.records.lock().block_size_of(space.id))))
    }

    /// What every worker holds of a prompt.
    pub(super) async fn overlaps(&self, question: &RouteRequest<'_>) -> Result<OverlapReply, Refusal> {
        match self.desk.ask(|encoder, out| encoder.overlap(CorrelationId(0), question, out)).await? {
            Reply::Overlap(overlaps) => Ok(overlaps),
            _ => Err(broken().into()),
        }
    }
}

/// What only means something between daemons that ask each other: there is nobody here to be told of.
pub(super) async fn no_peers() -> Refusal {
    let message = "daemons do not ask each other for their index";
    let remedy =
        "give workers a replay endpoint and the daemon a [snapshot] dir: that is what a restart is recovered from";
    Error::new(Kind::Unsupported, message, remedy).into()
}

/// The peers there are: none.
pub(super) async fn peers() -> Response {
    json(StatusCode::OK, &[(); 0])
}

/// Nothing is logged to a file, so that there is nothing to open again.
pub(super) async fn reopen_logs() -> Response {
    done(StatusCode::OK)
}
