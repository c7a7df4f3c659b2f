//! `/select`, `/select_and_reserve` and `/reservations`: the choice of a worker for a prompt, and its booking. A
//! selection that was not booked is kept, so that its client can book it without sending the prompt again.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use hyper::body::Body as _;
use serde::{Deserialize, Serialize};

use super::App;
use super::gateway::SelectionRequest;
use super::gateway::unanswered;
use super::memory::HttpMemory;
use super::prompt::{OverlapSummary, PromptFields, RequestBuilder, trace_of};
use super::registry::space_to_select;
use super::reply::{Refusal, done, json};
use crate::budget::Gauge;
use crate::error::{Error, Kind};
use crate::fleet::FleetTable;
use crate::hash;
use crate::ids::{Scheme, SpaceId, TierBlocks, Worker};
use crate::limits::{HTTP_SELECTION_MS_MAX, HTTP_SELECTIONS_MAX, NAME_BYTES_MAX};
use crate::load::{BookingOutcome, BookingRef};
use crate::route::{Decision, RouteRequest, Scored};

/// The reply to a selection.
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
    /// The trust in the overlap. Dynamo has no such field.
    trust: &'static str,
}

/// The worker that runs a prompt.
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

/// The reply to a booking.
#[derive(Serialize)]
struct Reserved {
    selection_id: String,
    #[serde(flatten)]
    place: Place,
}

/// A decision, with its space and scheme.
struct Chosen {
    decision: Box<Decision>,
    space: SpaceId,
    scheme: Scheme,
    place: Place,
}

impl Chosen {
    fn candidate(&self) -> Result<&Scored, Error> {
        self.decision.candidates.first().ok_or_else(unanswered)
    }
}

/// The fields of a request's body, with the trace context of its header.
async fn traced_fields(app: &App, request: Request) -> Result<Arc<PromptFields>, Refusal> {
    let trace = trace_of(request.headers());
    let fields: PromptFields = app.bodies.read(request).await?;
    Ok(Arc::new(PromptFields { trace, ..fields }))
}

/// `/select`: chooses a worker and books nothing.
pub(super) async fn select(State(app): State<Arc<App>>, request: Request) -> Result<Response, Refusal> {
    app.serving()?;
    let fields = traced_fields(&app, request).await?;
    if let Some(id) = &fields.selection_id {
        check_id(id)?;
    }
    let chosen = app.choose(&fields, None, None).await?;
    let selected = app.selected(&fields, &chosen, None)?;
    if let Some(id) = selected.selection_id.clone() {
        let selection = Selection { fields, worker: chosen.candidate()?.worker };
        let forgotten = app.selections.lock().put(chosen.space, &id, selection, app.now_ms());
        app.count_forgotten(forgotten);
    }
    Ok(json(StatusCode::OK, &selected))
}

/// `/select_and_reserve`: chooses a worker and books it.
pub(super) async fn select_and_reserve(State(app): State<Arc<App>>, request: Request) -> Result<Response, Refusal> {
    app.serving()?;
    let fields = traced_fields(&app, request).await?;
    let id = fields.selection_id.clone().unwrap_or_else(|| format!("{:032x}", rand::random::<u128>()));
    check_id(&id)?;
    let chosen = app.choose(&fields, Some(&id), None).await?;
    match app.selected(&fields, &chosen, Some(&id)).and_then(|selected| app.booked(&selected)) {
        Ok(response) => Ok(response),
        Err(refusal) => {
            // A client that gets an error has no booking.
            app.free(&id)?;
            Err(refusal)
        }
    }
}

/// `/reservations`: books an earlier selection, or a named worker.
pub(super) async fn reserve(State(app): State<Arc<App>>, request: Request) -> Result<Response, Refusal> {
    app.serving()?;
    let fields = traced_fields(&app, request).await?;
    let Some(id) = fields.selection_id.clone() else {
        let error = Error::new(Kind::Malformed, "missing field `selection_id`", "name the booking");
        return Err(Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, error));
    };
    check_id(&id)?;
    let space = space_to_select(&app.backend.fleet(), &fields.model_name, &fields.routing_group)?.id;
    let chosen = match fields.worker_id {
        Some(worker_id) => {
            app.selections.lock().take(space, &id);
            let worker = Worker::new(worker_id, fields.dp_rank.unwrap_or(0));
            app.is_of_space(space, worker)?;
            app.reserve_named(&fields, &id, worker).await?
        }
        None => {
            let (selection, expired) = app.selections.lock().get(space, &id, app.now_ms());
            app.count_forgotten(Forgotten { expired, evicted: 0 });
            let Selection { fields, worker } = selection.ok_or_else(|| {
                let message =
                    format!("no selection {id} waits to be booked: it expired, was booked, or was never made");
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

/// `…/prefill_complete`: the prefill of a booking is done.
pub(super) async fn prefill_complete(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, Refusal> {
    let booking = BookingRef::Request { request_id: &id, attempt: 0 };
    // A booking that has ended is not found, although its prefill is done.
    if app.gateway.output(&booking).is_none() {
        return outcome_reply(&id, BookingOutcome::Unknown, true);
    }
    outcome_reply(&id, app.gateway.prefill_complete(&booking)?, true)
}

#[derive(Deserialize)]
struct OutputBlock {
    decay_fraction: Option<f64>,
}

/// `…/output_block`: a booking has produced another block.
pub(super) async fn output_block(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Response, Refusal> {
    let OutputBlock { decay_fraction } = app.bodies.read(request).await?;
    if decay_fraction.is_some_and(|fraction| !(0.0..=1.0).contains(&fraction)) {
        let remedy =
            "send the remaining fraction of the output, or leave it out: it follows from expected_output_tokens";
        return Err(Refusal::invalid("decay_fraction must be between 0.0 and 1.0", remedy));
    }
    let booking = BookingRef::Request { request_id: &id, attempt: 0 };
    let Some((tokens, block_size)) = app.gateway.output(&booking) else {
        return outcome_reply(&id, BookingOutcome::Unknown, true);
    };
    let output_tokens = tokens.saturating_add(block_size.max(1));
    outcome_reply(&id, app.gateway.output_progress(&booking, output_tokens)?, true)
}

/// `DELETE`: a booking is done.
pub(super) async fn free(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, Refusal> {
    outcome_reply(&id, app.free(&id)?, false)
}

/// The reply to a message about a booking. A booking that has ended is not found, unless `may_repeat`.
fn outcome_reply(id: &str, outcome: BookingOutcome, may_repeat: bool) -> Result<Response, Refusal> {
    match outcome {
        BookingOutcome::Applied => Ok(done(StatusCode::OK)),
        BookingOutcome::AlreadyApplied if may_repeat => Ok(done(StatusCode::OK)),
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
    fn free(&self, id: &str) -> Result<BookingOutcome, Error> {
        self.gateway.free(&BookingRef::Request { request_id: id, attempt: 0 })
    }

    /// Chooses a worker, and books it under the name `book` if there is one.
    async fn choose(
        &self,
        fields: &Arc<PromptFields>,
        book: Option<&str>,
        pin: Option<Worker>,
    ) -> Result<Chosen, Refusal> {
        let (space, scheme) = self.space_of(fields)?;
        let request =
            SelectionRequest { fields: Arc::clone(fields), space, scheme, book: book.map(str::to_owned), pin };
        let decision = self.gateway.select(&request).await?;
        let worker = decision.candidates.first().ok_or_else(unanswered)?.worker;
        let place = Place {
            model_name: fields.model_name.clone(),
            routing_group: fields.routing_group.clone(),
            worker_id: worker.id.0,
            dp_rank: worker.rank.0,
            endpoint: self.records.lock().endpoint_of(worker.id.0).unwrap_or_default(),
        };
        Ok(Chosen { decision, space, scheme, place })
    }

    /// Books a worker that the request names.
    async fn reserve_named(&self, fields: &Arc<PromptFields>, id: &str, worker: Worker) -> Result<Chosen, Refusal> {
        let prompt_tokens = fields.token_ids.as_ref().map(Vec::len).or(fields.isl_tokens.map(|tokens| tokens as usize));
        if let (Some(effective), Some(all)) = (fields.effective_prefill_tokens, prompt_tokens)
            && effective as usize > all
        {
            let message = format!("effective_prefill_tokens {effective} exceeds isl_tokens {all}");
            return Err(Refusal::invalid(message, "send the part of the prompt that is still to be prefilled"));
        }
        self.choose(fields, Some(id), Some(worker)).await
    }

    /// The reply to a selection. A selection that was booked under the name `booked` has more fields.
    fn selected(&self, fields: &PromptFields, chosen: &Chosen, booked: Option<&str>) -> Result<Selected, Refusal> {
        let builder = RequestBuilder::of(fields, chosen.scheme)?;
        let (candidate, block_size) = (chosen.candidate()?, chosen.scheme.block_size);
        let terms = &candidate.terms;
        let prompt_tokens = builder.prompt_tokens();
        let whole_blocks = hash::block_count(prompt_tokens, chosen.scheme) as u64;
        let untracked_blocks = (prompt_tokens as u64).div_ceil(u64::from(block_size)).saturating_sub(whole_blocks);
        let overlap = self.summary(chosen, &builder.question(chosen.space))?;
        let worker_load = match fields.advisory && booked.is_none() {
            true => self.worker_load(candidate.worker, terms.active_prefill_tokens as u64),
            false => None,
        };
        Ok(Selected {
            selection_id: booked.map(str::to_owned).or_else(|| fields.selection_id.clone()),
            sequence_hashes: booked.map(|_| builder.sequence_hashes()),
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

    /// The reply to a booking, with reserved memory.
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

    /// The overlap of the chosen worker, over all its ranks. If there are several, the others are looked up.
    fn summary(&self, chosen: &Chosen, question: &RouteRequest<'_>) -> Result<OverlapSummary, Refusal> {
        let candidate = chosen.candidate()?;
        let ranks = {
            let fleet = self.backend.fleet();
            fleet.workers_of(chosen.space).filter(|record| record.worker.id == candidate.worker.id).count()
        };
        let mut ranks_held = BTreeMap::from([(candidate.worker.rank.0, candidate.overlap)]);
        if ranks > 1 {
            let overlaps = self.gateway.overlaps(question)?;
            let of_worker = overlaps.iter().filter(|entry| entry.worker.id == candidate.worker.id);
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

    /// Refuses a worker that is not in the space.
    fn is_of_space(&self, space: SpaceId, worker: Worker) -> Result<(), Refusal> {
        let is_there = |fleet: &FleetTable| fleet.workers_of(space).any(|record| record.worker == worker);
        if is_there(&self.backend.fleet()) {
            return Ok(());
        }
        let message = format!("schedulable worker {} (dp_rank {}) not found", worker.id, worker.rank);
        Err(Refusal::not_found(message, "GET /workers lists the workers"))
    }
}

/// The tokens that the ranks of one instance hold: in device memory, in device and host memory, and in all tiers.
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

/// The space and name of a selection.
type Key = (SpaceId, String);

/// A selection that can be booked.
#[derive(Clone, Debug)]
pub(super) struct Selection {
    /// The request.
    pub(super) fields: Arc<PromptFields>,
    /// The chosen worker.
    pub(super) worker: Worker,
}

#[derive(Debug)]
struct Held {
    selection: Selection,
    number: u64,
    bytes: usize,
}

/// The numbers of selections that were evicted or expired.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Forgotten {
    pub(super) evicted: u64,
    pub(super) expired: u64,
}

/// The selections that wait for their booking, bounded in number, memory and time. The oldest goes first.
#[derive(Debug)]
pub(super) struct Selections {
    held: HashMap<Key, Held>,
    /// The time (milliseconds of the caller's clock) and key of each, by number; oldest first.
    by_age: BTreeMap<u64, (u64, Key)>,
    bytes: usize,
    next: u64,
    bytes_max: usize,
    /// Shows the bytes.
    gauge: Gauge,
}

impl Selections {
    /// No selections, within the memory of the port.
    pub(super) fn within(memory: &HttpMemory) -> Self {
        let (held, by_age, gauge) = (HashMap::new(), BTreeMap::new(), memory.selections.clone());
        Self { held, by_age, bytes: 0, next: 0, bytes_max: memory.selections_bytes_max, gauge }
    }

    /// Adds a selection. It replaces one of the same name.
    pub(super) fn put(&mut self, space: SpaceId, id: &str, selection: Selection, now_ms: u64) -> Forgotten {
        let key = (space, id.to_owned());
        self.remove(&key);
        let mut forgotten = Forgotten { expired: self.expire(now_ms), evicted: 0 };
        let bytes = selection.fields.bytes() + 2 * id.len() + size_of::<Held>();
        if bytes > self.bytes_max {
            return Forgotten { evicted: 1, ..forgotten };
        }
        while self.held.len() >= HTTP_SELECTIONS_MAX || self.bytes + bytes > self.bytes_max {
            let Some((_, (_, oldest))) = self.by_age.pop_first() else { break };
            self.forget(&oldest);
            forgotten.evicted += 1;
        }
        self.next += 1;
        self.by_age.insert(self.next, (now_ms, key.clone()));
        self.held.insert(key, Held { selection, number: self.next, bytes });
        self.bytes += bytes;
        self.gauge.set(self.bytes as u64);
        forgotten
    }

    /// A selection that has not expired, and the number of those that expired.
    pub(super) fn get(&mut self, space: SpaceId, id: &str, now_ms: u64) -> (Option<Selection>, u64) {
        let expired = self.expire(now_ms);
        (self.held.get(&(space, id.to_owned())).map(|held| held.selection.clone()), expired)
    }

    /// Removes a selection.
    fn take(&mut self, space: SpaceId, id: &str) {
        self.remove(&(space, id.to_owned()));
    }

    fn remove(&mut self, key: &Key) {
        if let Some(number) = self.forget(key) {
            self.by_age.remove(&number);
        }
    }

    fn forget(&mut self, key: &Key) -> Option<u64> {
        let held = self.held.remove(key)?;
        self.bytes -= held.bytes;
        self.gauge.set(self.bytes as u64);
        Some(held.number)
    }

    fn expire(&mut self, now_ms: u64) -> u64 {
        let mut expired = 0;
        while let Some(oldest) = self.by_age.first_entry() {
            if now_ms.saturating_sub(oldest.get().0) < HTTP_SELECTION_MS_MAX {
                break;
            }
            let (_, key) = oldest.remove();
            self.forget(&key);
            expired += 1;
        }
        expired
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::HTTP_SELECTIONS_BYTES_MAX;

    const SPACE: SpaceId = SpaceId(0);

    fn selection(tokens: usize) -> Selection {
        let fields = serde_json::json!({ "token_ids": vec![1_u32; tokens] });
        let fields = Arc::new(serde_json::from_value(fields).unwrap());
        Selection { fields, worker: Worker::new(1, 0) }
    }

    fn is_there(selections: &mut Selections, id: &str, now_ms: u64) -> bool {
        selections.get(SPACE, id, now_ms).0.is_some()
    }

    #[test]
    fn the_oldest_selection_is_evicted_and_old_ones_expire() {
        let mut selections = Selections::within(&HttpMemory::default());
        for at in 0..HTTP_SELECTIONS_MAX {
            assert_eq!(selections.put(SPACE, &at.to_string(), selection(1), 0), Forgotten::default());
        }
        let one = Forgotten { evicted: 1, expired: 0 };
        assert_eq!(selections.put(SPACE, "new", selection(1), 1), one);
        assert!(!is_there(&mut selections, "0", 1) && is_there(&mut selections, "1", 1));
        assert_eq!(
            selections.put(SPACE, "1", selection(1), 2),
            Forgotten::default(),
            "a selection replaces one of the same name"
        );
        let (left, expired) = selections.get(SPACE, "1", HTTP_SELECTION_MS_MAX);
        assert!(left.is_some() && expired == HTTP_SELECTIONS_MAX as u64 - 2, "{expired}");
        selections.take(SPACE, "1");
        selections.take(SPACE, "new");
        assert_eq!((selections.held.len(), selections.by_age.len(), selections.bytes), (0, 0, 0));
    }

    #[test]
    fn selections_are_bounded_by_the_memory_of_their_prompts() {
        let mut selections = Selections::within(&HttpMemory::default());
        let large = HTTP_SELECTIONS_BYTES_MAX / 4 / 2;
        selections.put(SPACE, "a", selection(large), 0);
        assert_eq!(selections.put(SPACE, "b", selection(large), 0).evicted, 1);
        assert!(!is_there(&mut selections, "a", 0) && is_there(&mut selections, "b", 0));
        assert!(!is_there(&mut selections, "c", 0));
        assert!(selections.get(SpaceId(1), "b", 0).0.is_none(), "a name belongs to one space");
    }
}
