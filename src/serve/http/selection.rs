//! `/select`, `/select_and_reserve` and `/reservations`: who runs a prompt, and that it does.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use hyper::body::Body as _;
use serde::{Deserialize, Serialize};

use super::app::App;
use super::desk::broken;
use super::fields::{OverlapSummary, PromptFields};
use super::materials::Materials;
use super::refusal::{Refusal, done, json};
use super::selections::Selection;
use super::space;
use crate::error::{Error, Kind};
use crate::fleet::FleetTable;
use crate::hash;
use crate::ids::{CorrelationId, Scheme, SpaceId, TierBlocks, Worker};
use crate::limits::NAME_BYTES_MAX;
use crate::load::{BookingOutcome, BookingRef};
use crate::route::RouteRequest;
use crate::wire::{Candidate, Reply, RouteReply};

/// Who was chosen, and what is known of that.
#[derive(Serialize)]
struct Selected {
    #[serde(skip_serializing_if = "Option::is_none")]
    selection_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sequence_hashes: Option<Vec<i64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    isl_tokens: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    track_prefill_tokens: Option<bool>,
    #[serde(flatten)]
    place: Place,
    block_size: u32,
    overlap: OverlapSummary,
    effective_prefill_tokens: u64,
    potential_decode_blocks: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    decode_busy: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    worker_load: Option<WorkerLoad>,
    /// How far the overlap may be believed; not among what Dynamo says.
    trust: &'static str,
}

/// Where a prompt runs.
#[derive(Clone, Serialize)]
struct Place {
    model_name: String,
    routing_group: String,
    worker_id: u64,
    dp_rank: u32,
    endpoint: String,
}

/// The chosen worker's load, without the prompt.
#[derive(Serialize)]
struct WorkerLoad {
    active_prefill_tokens: u64,
    prefill_token_capacity: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    total_kv_blocks: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prefill_busy: Option<bool>,
}

/// A booking that was made for an earlier selection, or without one.
#[derive(Serialize)]
struct Reserved {
    selection_id: String,
    #[serde(flatten)]
    place: Place,
}

/// A decision with what it was made from.
struct Chosen {
    reply: RouteReply,
    space: SpaceId,
    scheme: Scheme,
    place: Place,
}

impl Chosen {
    fn candidate(&self) -> Result<&Candidate, Error> {
        self.reply.candidates.first().ok_or_else(broken)
    }
}

/// Chooses a worker and books nothing.
pub(super) async fn select(State(app): State<Arc<App>>, request: Request) -> Result<Response, Refusal> {
    app.serving()?;
    let fields: PromptFields = app.bodies.read(request).await?;
    if let Some(id) = &fields.selection_id {
        check_id(id)?;
    }
    let chosen = app.choose(&fields, None, None).await?;
    let selected = app.selected(&fields, &chosen, None).await?;
    if let Some(id) = selected.selection_id.clone() {
        let selection = Selection { fields: Arc::new(fields), worker: chosen.candidate()?.worker };
        let forgotten = app.selections.lock().put(chosen.space, &id, selection, app.now_ms());
        app.count_forgotten(forgotten);
    }
    Ok(json(StatusCode::OK, &selected))
}

/// Chooses a worker and books it, in one.
pub(super) async fn select_and_reserve(State(app): State<Arc<App>>, request: Request) -> Result<Response, Refusal> {
    app.serving()?;
    let fields: PromptFields = app.bodies.read(request).await?;
    let id = fields.selection_id.clone().unwrap_or_else(|| format!("{:032x}", rand::random::<u128>()));
    check_id(&id)?;
    let chosen = app.choose(&fields, Some(&id), None).await?;
    match app.selected(&fields, &chosen, Some(&id)).await.and_then(|selected| app.booked(&selected)) {
        Ok(response) => Ok(response),
        Err(refusal) => {
            // Who is told of an error has nothing booked.
            app.free(&id).await?;
            Err(refusal)
        }
    }
}

/// Books an earlier selection, or a worker that is named.
pub(super) async fn reserve(State(app): State<Arc<App>>, request: Request) -> Result<Response, Refusal> {
    app.serving()?;
    let fields: PromptFields = app.bodies.read(request).await?;
    let Some(id) = fields.selection_id.clone() else {
        let error = Error::new(Kind::Malformed, "missing field `selection_id`", "name the booking");
        return Err(Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, error));
    };
    check_id(&id)?;
    let space = space::to_select(&app.backend.fleet(), &fields.model_name, &fields.routing_group)?.id;
    let chosen = match fields.worker_id {
        Some(worker_id) => {
            app.selections.lock().take(space, &id);
            let worker = Worker::new(worker_id, fields.dp_rank.unwrap_or(0));
            app.is_of_space(space, worker)?;
            app.reserve_named(&fields, &id, worker).await?
        }
        None => {
            let (selection, expired) = app.selections.lock().get(space, &id, app.now_ms());
            app.count_forgotten(super::selections::Forgotten { expired, evicted: 0 });
            let Selection { fields, worker } = selection.ok_or_else(|| {
                let message = format!("no selection {id} waits to be booked: it expired, was booked, or never made");
                Refusal::not_found(message, "ask /select with this selection_id first, or name worker_id and prompt")
            })?;
            app.is_of_space(space, worker)?;
            let chosen = app.choose(&fields, Some(&id), Some(worker)).await?;
            app.selections.lock().take(space, &id);
            chosen
        }
    };
    Ok(json(StatusCode::CREATED, &Reserved { selection_id: id, place: chosen.place }))
}

/// The prefill of a booking is done.
pub(super) async fn prefill_complete(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, Refusal> {
    let booking = BookingRef::Request { request_id: &id, attempt: 0 };
    // One that has ended has had its prefill, and is not found all the same.
    if app.desk.output(&booking).is_none() {
        return told(&id, BookingOutcome::Unknown, true);
    }
    let reply = app.desk.ask(|encoder, out| {
        encoder.prefill_complete(CorrelationId(0), &booking, 0, out);
        Ok(())
    });
    match reply.await? {
        Reply::PrefillComplete(outcome) => told(&id, outcome, true),
        _ => Err(broken().into()),
    }
}

#[derive(Deserialize)]
struct OutputBlock {
    decay_fraction: Option<f64>,
}

/// A booking has put out another block.
pub(super) async fn output_block(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Response, Refusal> {
    let OutputBlock { decay_fraction } = app.bodies.read(request).await?;
    if decay_fraction.is_some_and(|fraction| !(0.0..=1.0).contains(&fraction)) {
        let remedy = "send what is left of the output, or leave it out: it follows from expected_output_tokens";
        return Err(Refusal::invalid("decay_fraction must be between 0.0 and 1.0", remedy));
    }
    let booking = BookingRef::Request { request_id: &id, attempt: 0 };
    let Some((tokens, block_size)) = app.desk.output(&booking) else {
        return told(&id, BookingOutcome::Unknown, true);
    };
    let output_tokens = tokens.saturating_add(block_size.max(1));
    let reply = app.desk.ask(|encoder, out| {
        encoder.output_progress(CorrelationId(0), &booking, output_tokens, out);
        Ok(())
    });
    match reply.await? {
        Reply::OutputProgress(outcome) => told(&id, outcome, true),
        _ => Err(broken().into()),
    }
}

/// A booking is done.
pub(super) async fn free(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, Refusal> {
    told(&id, app.free(&id).await?, false)
}

/// What came of word about a booking. One that has ended is unknown, unless `again` says that this may be said twice.
fn told(id: &str, outcome: BookingOutcome, again: bool) -> Result<Response, Refusal> {
    match outcome {
        BookingOutcome::Applied => Ok(done(StatusCode::OK)),
        BookingOutcome::AlreadyApplied if again => Ok(done(StatusCode::OK)),
        BookingOutcome::AlreadyApplied | BookingOutcome::Unknown | BookingOutcome::Superseded => {
            Err(Refusal::not_found(format!("reservation {id} not found"), "it ended, expired, or was never made here"))
        }
    }
}

fn check_id(id: &str) -> Result<(), Refusal> {
    if (1..=NAME_BYTES_MAX).contains(&id.len()) {
        return Ok(());
    }
    let remedy = format!("name the selection with 1 to {NAME_BYTES_MAX} bytes");
    Err(Refusal::invalid(format!("selection_id has {} bytes", id.len()), remedy))
}

impl App {
    async fn free(&self, id: &str) -> Result<BookingOutcome, Error> {
        let booking = BookingRef::Request { request_id: id, attempt: 0 };
        let reply = self.desk.ask(|encoder, out| {
            encoder.free(CorrelationId(0), &booking, out);
            Ok(())
        });
        match reply.await? {
            Reply::Free(outcome) => Ok(outcome),
            _ => Err(broken()),
        }
    }

    /// Decides, and books under `book`.
    async fn choose(&self, fields: &PromptFields, book: Option<&str>, pin: Option<Worker>) -> Result<Chosen, Refusal> {
        let (space, scheme) = self.space_of(fields)?;
        let materials = Materials::of(fields, scheme)?;
        let request = materials.request(space, book, pin);
        let reply = self.desk.ask(|encoder, out| encoder.route(CorrelationId(0), &request, out)).await?;
        let Reply::Route(reply) = reply else { return Err(broken().into()) };
        let retry_after_us = reply.retry_after_us;
        let worker = reply
            .chosen()
            .map(|chosen| chosen.worker)
            .map_err(|error| if retry_after_us == 0 { error } else { error.retry_after_us(retry_after_us) })?;
        let place = Place {
            model_name: fields.model_name.clone(),
            routing_group: fields.routing_group.clone(),
            worker_id: worker.id.0,
            dp_rank: worker.rank.0,
            endpoint: self.records.lock().endpoint_of(worker.id.0).unwrap_or_default(),
        };
        Ok(Chosen { reply, space, scheme, place })
    }

    /// Books a worker that the request names itself.
    async fn reserve_named(&self, fields: &PromptFields, id: &str, worker: Worker) -> Result<Chosen, Refusal> {
        let prompt_tokens = fields.token_ids.as_ref().map(Vec::len).or(fields.isl_tokens.map(|tokens| tokens as usize));
        if let (Some(effective), Some(all)) = (fields.effective_prefill_tokens, prompt_tokens)
            && effective as usize > all
        {
            let message = format!("effective_prefill_tokens {effective} exceeds isl_tokens {all}");
            return Err(Refusal::invalid(message, "send what is left of the prompt to prefill"));
        }
        self.choose(fields, Some(id), Some(worker)).await
    }

    /// All that is told of a decision; of one that was booked under `booked`, more.
    async fn selected(
        &self,
        fields: &PromptFields,
        chosen: &Chosen,
        booked: Option<&str>,
    ) -> Result<Selected, Refusal> {
        let materials = Materials::of(fields, chosen.scheme)?;
        let (candidate, block_size) = (chosen.candidate()?, chosen.scheme.block_size);
        let terms = candidate.terms.ok_or_else(broken)?;
        let prompt_tokens = materials.prompt_tokens();
        let whole_blocks = hash::block_count(prompt_tokens, chosen.scheme) as u64;
        let untracked_blocks = (prompt_tokens as u64).div_ceil(u64::from(block_size)).saturating_sub(whole_blocks);
        let overlap = self.summary(chosen, &materials.question(chosen.space)).await?;
        let worker_load = match fields.advisory && booked.is_none() {
            true => self.worker_load(candidate.worker, terms.active_prefill_tokens as u64),
            false => None,
        };
        Ok(Selected {
            selection_id: booked.map(str::to_owned).or_else(|| fields.selection_id.clone()),
            sequence_hashes: booked.map(|_| materials.sequence_hashes()),
            isl_tokens: booked.map(|_| prompt_tokens),
            track_prefill_tokens: booked.map(|_| self.tracks_prefill(fields, chosen.space)),
            place: chosen.place.clone(),
            block_size,
            overlap,
            effective_prefill_tokens: (prompt_tokens as u64).saturating_sub(terms.cached_tokens.max(0.0) as u64),
            potential_decode_blocks: terms.decode as u64 + untracked_blocks,
            decode_busy: None,
            worker_load,
            trust: candidate.trust.level.name(),
        })
    }

    /// The response about a booking, with room for it.
    fn booked(&self, selected: &Selected) -> Result<Response, Refusal> {
        let mut response = json(StatusCode::OK, selected);
        let bytes = response.body().size_hint().exact().unwrap_or_default();
        if let Some(room) = self.replies.room(bytes as usize)? {
            response.extensions_mut().insert(room);
        }
        Ok(response)
    }

    fn tracks_prefill(&self, fields: &PromptFields, space: SpaceId) -> bool {
        let said = fields.router_config_override.and_then(|said| said.track_prefill_tokens);
        fields.track_prefill_tokens.or(said).unwrap_or_else(|| self.backend.tracks_prefill(space))
    }

    /// What the chosen worker holds, and on which of its ranks: of several, the others are asked for.
    async fn summary(&self, chosen: &Chosen, question: &RouteRequest<'_>) -> Result<OverlapSummary, Refusal> {
        let candidate = chosen.candidate()?;
        let ranks = {
            let fleet = self.backend.fleet();
            fleet.workers_of(chosen.space).filter(|record| record.worker.id == candidate.worker.id).count()
        };
        let mut ranks_held = BTreeMap::from([(candidate.worker.rank.0, candidate.overlap)]);
        if ranks > 1 {
            let reply = self.desk.ask(|encoder, out| encoder.overlap(CorrelationId(0), question, out)).await?;
            let Reply::Overlap(overlaps) = reply else { return Err(broken().into()) };
            let of_worker = overlaps.workers.iter().filter(|entry| entry.worker.id == candidate.worker.id);
            for entry in of_worker {
                ranks_held.entry(entry.worker.rank.0).or_insert(entry.overlap);
            }
        }
        Ok(summary_of(ranks_held, chosen.scheme.block_size))
    }

    fn worker_load(&self, worker: Worker, active_prefill_tokens: u64) -> Option<WorkerLoad> {
        let fleet = self.backend.fleet();
        let record = fleet.workers.iter().find(|record| record.worker == worker)?;
        Some(WorkerLoad {
            active_prefill_tokens,
            prefill_token_capacity: record.batched_tokens_max,
            total_kv_blocks: Some(record.capacity_blocks).filter(|blocks| *blocks > 0),
            prefill_busy: None,
        })
    }

    /// Refuses a worker that the space does not have.
    fn is_of_space(&self, space: SpaceId, worker: Worker) -> Result<(), Refusal> {
        let is_there = |fleet: &FleetTable| fleet.workers_of(space).any(|record| record.worker == worker);
        if is_there(&self.backend.fleet()) {
            return Ok(());
        }
        let message = format!("schedulable worker {} (dp_rank {}) not found", worker.id, worker.rank);
        Err(Refusal::not_found(message, "see GET /workers for those there are"))
    }
}

/// The tokens that ranks of one instance hold, in device memory, with host memory, and with everything below.
pub(super) fn summary_of(ranks: impl IntoIterator<Item = (u32, TierBlocks)>, block_size: u32) -> OverlapSummary {
    let tokens = |blocks: u32| u64::from(blocks) * u64::from(block_size);
    let mut summary = OverlapSummary::default();
    for (rank, held) in ranks {
        summary.dp.insert(rank.to_string(), tokens(held.device));
        summary.gpu = summary.gpu.max(tokens(held.device));
        summary.cpu = summary.cpu.max(tokens(held.device + held.host));
        summary.disk = summary.disk.max(tokens(held.total()));
    }
    summary.longest_matched = summary.disk;
    summary
}
