//! `/workers`: the fleet as HTTP clients see and change it. A row has the fields of the indexer's listing and of the
//! selection service's, whose names do not collide.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Extension;
use axum::extract::{Path, RawQuery, Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde::Serialize;

use super::app::App;
use super::listener::Caller;
use super::orders::WorkerOrder;
use super::records::{Lifecycle, Record, WorkerFields};
use super::refusal::{Refusal, json};
use super::space;
use crate::error::{Error, Kind};
use crate::fleet::{FleetTable, WorkerRecord, WorkerState};
use crate::ids::{SpaceId, Worker, WorkerId};
use crate::limits::{HTTP_RANKS_MAX, HTTP_RECORD_BYTES_MAX};
use crate::trust::TrustReason;

/// How a rank's events come in, as the indexer says it.
#[derive(Serialize)]
struct Listener {
    endpoint: String,
    status: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_error: Option<&'static str>,
}

/// One worker with all of its ranks.
#[derive(Serialize)]
pub(super) struct Row {
    instance_id: u64,
    source: &'static str,
    status: &'static str,
    endpoints: BTreeMap<u32, String>,
    listeners: BTreeMap<u32, Listener>,
    #[serde(flatten)]
    record: Record,
}

impl Row {
    /// Whether it may be chosen.
    pub(super) fn is_schedulable(&self) -> bool {
        self.record.lifecycle == Lifecycle::Schedulable
    }
}

/// What a listing is to be of.
#[derive(Debug, Default)]
pub(super) struct Filter {
    model_name: Option<String>,
    routing_group: Option<String>,
}

impl Filter {
    /// From the text behind the `?` of a request.
    pub(super) fn of(query: Option<&str>) -> Self {
        let mut filter = Self::default();
        for (name, value) in form_urlencoded::parse(query.unwrap_or_default().as_bytes()) {
            match &*name {
                "model_name" => filter.model_name = Some(value.into_owned()),
                "routing_group" => filter.routing_group = Some(value.into_owned()),
                _ => {}
            }
        }
        filter
    }

    pub(super) fn takes(&self, model: &str, group: &str) -> bool {
        let is = |wanted: &Option<String>, value: &str| wanted.as_ref().is_none_or(|wanted| wanted == value);
        is(&self.model_name, model) && is(&self.routing_group, group)
    }
}

/// Adds a worker, or says anew what is known of one.
pub(super) async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, Refusal> {
    app.administering()?;
    let mut fields: WorkerFields = app.bodies.read(request).await?;
    let Some(worker_id) = fields.worker_id.take() else {
        let error = Error::new(Kind::Malformed, "missing field `worker_id`", "name the worker by a number");
        return Err(Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, error));
    };
    let _alone = app.changing.lock().await;
    let record = app.reconcile(Record::new(worker_id, fields), caller).await?;
    Ok(json(StatusCode::CREATED, &record))
}

/// Says more of a worker.
pub(super) async fn patch(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(worker_id): Path<String>,
    request: Request,
) -> Result<Response, Refusal> {
    app.administering()?;
    let worker_id = number(&worker_id)?;
    let fields: WorkerFields = app.bodies.read(request).await?;
    let _alone = app.changing.lock().await;
    let known = app.records.lock().get(worker_id).cloned();
    let known = known.or_else(|| known_to(&app.backend.fleet(), worker_id)).ok_or_else(|| not_found(worker_id))?;
    Ok(json(StatusCode::OK, &app.reconcile(known.patched(fields), caller).await?))
}

/// Removes a worker with all of its ranks.
pub(super) async fn delete(State(app): State<Arc<App>>, Path(worker_id): Path<String>) -> Result<Response, Refusal> {
    app.administering()?;
    let worker_id = number(&worker_id)?;
    let _alone = app.changing.lock().await;
    let known = app.records.lock().get(worker_id).cloned();
    let in_fleet = known_to(&app.backend.fleet(), worker_id);
    let is_in_fleet = in_fleet.is_some();
    let record = known.or(in_fleet).ok_or_else(|| not_found(worker_id))?;
    if is_in_fleet {
        app.remove(Worker::every_rank(WorkerId(worker_id))).await?;
    }
    app.records.lock().remove(worker_id);
    let record = Record { lifecycle: Lifecycle::Unschedulable, not_schedulable_reasons: Vec::new(), ..record };
    Ok(json(StatusCode::OK, &record))
}

/// Lists the workers, by model, routing group and number.
pub(super) async fn list(State(app): State<Arc<App>>, RawQuery(query): RawQuery) -> Response {
    json(StatusCode::OK, &app.rows(&Filter::of(query.as_deref())))
}

/// A worker's number in a path.
fn number(text: &str) -> Result<u64, Refusal> {
    text.parse()
        .map_err(|_| Refusal::invalid(format!("{text:?} is no worker's number"), "name it by a number from 0 on"))
}

fn not_found(worker_id: u64) -> Refusal {
    Refusal::not_found(format!("worker {worker_id} not found"), "see GET /workers for those there are")
}

impl App {
    /// Makes the fleet what a record says, and keeps the record with what came of it.
    async fn reconcile(&self, mut record: Record, caller: Caller) -> Result<Record, Refusal> {
        let (start, size) = record.ranks();
        if size > HTTP_RANKS_MAX || start.checked_add(size).is_none() {
            let message = format!("data_parallel_size {size} exceeds the maximum {HTTP_RANKS_MAX}");
            return Err(Refusal::invalid(message, "register the ranks as several workers"));
        }
        let bytes = record.bytes();
        if bytes > HTTP_RECORD_BYTES_MAX {
            let message = format!("what is said of the worker is {bytes} bytes, more than {HTTP_RECORD_BYTES_MAX}");
            return Err(Error::new(Kind::Oversized, message, "say less of it, or register its ranks as several").into());
        }
        if !self.records.lock().has_room(record.worker_id) {
            let error = Error::new(Kind::Overloaded, "too many workers are registered", "remove some");
            return Err(error.into());
        }
        let space = self.misfit(&record);
        let approximate =
            |id: &SpaceId| self.backend.spaces().get(id.0 as usize).is_some_and(|space| space.approximate);
        let mut reasons = record.missing(!space.as_ref().is_ok_and(approximate));
        match space {
            Err(misfit) => reasons.push(format!("reconciliation failed: {misfit}")),
            Ok(space) if reasons.is_empty() => {
                self.order_ranks(&record, space, caller).await?;
                if let Some(block_size) = record.fields.block_size {
                    self.records.lock().set_block_size(space, block_size);
                }
            }
            Ok(_) => {}
        }
        let is_there = known_to(&self.backend.fleet(), record.worker_id).is_some();
        if !reasons.is_empty() && is_there && self.records.lock().get(record.worker_id).is_some_and(is_in_use) {
            self.remove(Worker::every_rank(WorkerId(record.worker_id))).await?;
        }
        record.lifecycle = if reasons.is_empty() { Lifecycle::Schedulable } else { Lifecycle::Incomplete };
        record.not_schedulable_reasons = reasons;
        self.records.lock().put(record.clone());
        Ok(record)
    }

    /// Adds the ranks of a worker, and removes those it no longer has.
    async fn order_ranks(&self, record: &Record, space: SpaceId, caller: Caller) -> Result<(), Refusal> {
        let (start, size) = record.ranks();
        let ranks = start..start + size;
        let adds: Result<Vec<_>, _> = ranks.clone().map(|rank| self.order(record, rank, space, caller)).collect();
        let mut orders: Vec<WorkerOrder> = {
            let fleet = self.backend.fleet();
            let of_worker = fleet.workers.iter().filter(|other| other.worker.id.0 == record.worker_id);
            let gone = of_worker.filter(|other| !ranks.contains(&other.worker.rank.0));
            gone.map(|other| WorkerOrder::Remove(other.worker)).collect()
        };
        orders.extend(adds?);
        self.change(orders).await.map_err(|error| match error.kind() {
            Kind::InvalidArgument => Refusal::new(StatusCode::CONFLICT, error),
            _ => error.into(),
        })?;
        self.settle(|fleet| {
            let of_worker = || fleet.workers.iter().filter(|other| other.worker.id.0 == record.worker_id);
            let is_as_said = |rank: u32| {
                let there = of_worker().find(|other| other.worker.rank.0 == rank && other.space == space);
                let events = |there: &WorkerRecord| there.events.as_ref().map(|events| events.endpoint.to_string());
                there.is_some_and(|there| events(there).as_deref() == record.events_of(rank))
            };
            ranks.clone().all(is_as_said) && of_worker().count() == size as usize
        })
        .await
    }

    /// The workers of the fleet and those that are not complete.
    pub(super) fn rows(&self, filter: &Filter) -> Vec<Row> {
        let fleet = self.backend.fleet();
        let records = self.records.lock();
        let mut by_id: BTreeMap<u64, Vec<&WorkerRecord>> = BTreeMap::new();
        for worker in &fleet.workers {
            by_id.entry(worker.worker.id.0).or_default().push(worker);
        }
        let there = by_id.iter().filter_map(|(id, ranks)| row(&fleet, *id, ranks, records.get(*id)));
        let waiting = records.iter().filter(|record| !by_id.contains_key(&record.worker_id));
        let mut rows: Vec<Row> = there.chain(waiting.cloned().map(unheard)).collect();
        rows.retain(|row| filter.takes(&row.record.model_name, &row.record.routing_group));
        rows.sort_by(|a, b| {
            let key = |row: &Row| (row.record.model_name.clone(), row.record.routing_group.clone(), row.instance_id);
            key(a).cmp(&key(b))
        });
        rows
    }
}

fn is_in_use(record: &Record) -> bool {
    record.lifecycle == Lifecycle::Schedulable
}

/// A worker that is not in the fleet. One that was once, and was removed elsewhere, is nobody to send to.
fn unheard(mut record: Record) -> Row {
    if record.lifecycle == Lifecycle::Schedulable {
        record.lifecycle = Lifecycle::Unschedulable;
        record.not_schedulable_reasons = vec!["removed from the fleet: register it again".to_owned()];
    }
    let (endpoints, listeners) = Default::default();
    Row { instance_id: record.worker_id, source: "zmq", status: "pending", endpoints, listeners, record }
}

/// A worker of the fleet, and what an HTTP client said of it.
fn row(fleet: &FleetTable, id: u64, ranks: &[&WorkerRecord], said: Option<&Record>) -> Option<Row> {
    let known = known_to(fleet, id)?;
    let mut record = said.cloned().unwrap_or_else(|| known.clone());
    record.lifecycle = known.lifecycle;
    record.fields.block_size = record.fields.block_size.or(known.fields.block_size);
    let listeners: BTreeMap<u32, Listener> = ranks.iter().copied().filter_map(listener).collect();
    let endpoints = listeners.iter().map(|(rank, listener)| (*rank, listener.endpoint.clone())).collect();
    let status = ["failed", "pending", "active"].into_iter().find(|status| {
        let mut all = listeners.values();
        all.any(|listener| listener.status == *status)
    });
    Some(Row { instance_id: id, source: "zmq", status: status.unwrap_or("paused"), endpoints, listeners, record })
}

fn listener(rank: &WorkerRecord) -> Option<(u32, Listener)> {
    let endpoint = rank.events.as_ref()?.endpoint.to_string();
    let is_lost = rank.trust.load().reasons.contains(TrustReason::Disconnected);
    let (status, last_error) = match rank.state {
        WorkerState::Down => ("failed", Some("the publisher cannot be reached")),
        WorkerState::Joining => ("pending", None),
        WorkerState::Draining if is_lost => ("failed", Some("the publisher's connection broke")),
        WorkerState::Ready | WorkerState::Draining => ("active", None),
    };
    Some((rank.worker.rank.0, Listener { endpoint, status, last_error }))
}

/// A worker as the daemon itself knows it. A worker may be chosen as long as one of its ranks may.
fn known_to(fleet: &FleetTable, id: u64) -> Option<Record> {
    let ranks: Vec<&WorkerRecord> = fleet.workers.iter().filter(|record| record.worker.id.0 == id).collect();
    let first = *ranks.iter().min_by_key(|record| record.worker.rank.0)?;
    let space = fleet.space(first.space)?;
    let mut fields = WorkerFields {
        model_name: Some(space.model.clone()),
        routing_group: Some(space::group_of(space).to_owned()),
        block_size: space.scheme.get().map(|scheme| scheme.block_size),
        data_parallel_start_rank: Some(first.worker.rank.0),
        data_parallel_size: Some(ranks.len() as u32),
        max_num_batched_tokens: Some(first.batched_tokens_max),
        total_kv_blocks: Some(first.capacity_blocks).filter(|blocks| *blocks > 0),
        taints: Some(first.taints.iter().cloned().collect()),
        ..WorkerFields::default()
    };
    let endpoint = |record: &&WorkerRecord| Some((record.worker.rank.0, record.events.as_ref()?.endpoint.to_string()));
    let endpoints: BTreeMap<u32, String> = ranks.iter().filter_map(endpoint).collect();
    if let ([only], Some(endpoint)) = (ranks.as_slice(), endpoints.values().next()) {
        fields.kv_events_endpoint = Some(endpoint.clone());
        fields.replay_endpoint =
            only.events.as_ref().and_then(|events| events.replay.as_ref().map(ToString::to_string));
    }
    fields.kv_events_endpoints = Some(endpoints).filter(|endpoints| !endpoints.is_empty());
    let mut record = Record::new(id, fields);
    let is = |state: WorkerState| ranks.iter().any(|record| record.state == state);
    record.lifecycle = if is(WorkerState::Ready) || is(WorkerState::Joining) {
        Lifecycle::Schedulable
    } else if is(WorkerState::Draining) {
        Lifecycle::Draining
    } else {
        Lifecycle::Unschedulable
    };
    Some(record)
}
