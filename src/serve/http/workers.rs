//! `/workers`: the listing of the fleet, and its changes, which the control thread makes. A row of the listing has the
//! fields of the indexer's listing and of the selection service's; their names do not collide.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::extract::{Path, RawQuery, Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde::Serialize;
use tokio::time::Instant;

use super::App;
use super::connections::Caller;
use super::registry::{Lifecycle, RegisteredWorker, WorkerFields, group_of, space_named};
use super::reply::{Refusal, json};
use crate::audit;
use crate::config::{HostRule, parse_worker};
use crate::error::{Error, Kind};
use crate::fleet::{FleetTable, WorkerRecord, WorkerState};
use crate::ids::{SpaceId, Window, Worker, WorkerId};
use crate::limits::{HTTP_RANKS_MAX, HTTP_RECORD_BYTES_MAX, HTTP_SETTLE_MS_MAX, HTTP_SETTLE_PAUSE_MS};
use crate::metrics::HttpCounter;
use crate::trust::TrustReason;

/// The state of a rank's event subscription, with the indexer's fields.
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
    record: RegisteredWorker,
}

impl Row {
    /// Whether it may be chosen.
    pub(super) fn is_schedulable(&self) -> bool {
        self.record.lifecycle == Lifecycle::Schedulable
    }
}

/// The workers that a listing shows.
#[derive(Debug, Default)]
pub(super) struct Filter {
    model_name: Option<String>,
    routing_group: Option<String>,
}

impl Filter {
    /// From the query string of a request.
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

/// `POST`: adds a worker, or replaces its fields.
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
    let record = app.reconcile(RegisteredWorker::new(worker_id, fields), caller).await?;
    Ok(json(StatusCode::CREATED, &record))
}

/// `PATCH`: changes fields of a worker.
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

/// `DELETE`: removes a worker with all its ranks.
pub(super) async fn delete(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(worker_id): Path<String>,
) -> Result<Response, Refusal> {
    app.administering()?;
    let worker_id = number(&worker_id)?;
    let _alone = app.changing.lock().await;
    let known = app.records.lock().get(worker_id).cloned();
    let in_fleet = known_to(&app.backend.fleet(), worker_id);
    let is_in_fleet = in_fleet.is_some();
    let record = known.or(in_fleet).ok_or_else(|| not_found(worker_id))?;
    if is_in_fleet {
        app.remove(Worker::every_rank(WorkerId(worker_id)), caller).await?;
    }
    app.forget(worker_id, caller);
    let record =
        RegisteredWorker { lifecycle: Lifecycle::Unschedulable, not_schedulable_reasons: Vec::new(), ..record };
    Ok(json(StatusCode::OK, &record))
}

/// `GET`: lists the workers, sorted by model, routing group and id.
pub(super) async fn list(State(app): State<Arc<App>>, RawQuery(query): RawQuery) -> Response {
    json(StatusCode::OK, &app.rows(&Filter::of(query.as_deref())))
}

/// A worker's id in a path.
fn number(text: &str) -> Result<u64, Refusal> {
    text.parse()
        .map_err(|_| Refusal::invalid(format!("{text:?} is no worker's id"), "name the worker by a number from 0 on"))
}

fn not_found(worker_id: u64) -> Refusal {
    Refusal::not_found(format!("worker {worker_id} not found"), "GET /workers lists the workers")
}

impl App {
    /// Reconciles the fleet with a registered worker, and keeps the worker with the result.
    async fn reconcile(&self, mut record: RegisteredWorker, caller: Caller) -> Result<RegisteredWorker, Refusal> {
        let (start, size) = record.ranks();
        if size > HTTP_RANKS_MAX || start.checked_add(size).is_none() {
            let message = format!("data_parallel_size {size} exceeds the maximum {HTTP_RANKS_MAX}");
            return Err(Refusal::invalid(message, "register the ranks as several workers"));
        }
        let bytes = record.bytes();
        if bytes > HTTP_RECORD_BYTES_MAX {
            let message = format!("the worker's fields take {bytes} bytes, more than {HTTP_RECORD_BYTES_MAX}");
            return Err(Error::new(
                Kind::Oversized,
                message,
                "send fewer fields, or register its ranks as several workers",
            )
            .into());
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
            self.remove(Worker::every_rank(WorkerId(record.worker_id)), caller).await?;
        }
        record.lifecycle = if reasons.is_empty() { Lifecycle::Schedulable } else { Lifecycle::Incomplete };
        record.not_schedulable_reasons = reasons;
        let mut records = self.records.lock();
        audit_registration(caller, record.worker_id, records.get(record.worker_id), Some(&record));
        records.put(record.clone());
        Ok(record)
    }

    /// Forgets a worker's registration, if it has one.
    fn forget(&self, worker_id: u64, caller: Caller) {
        let mut records = self.records.lock();
        audit_registration(caller, worker_id, records.get(worker_id), None);
        records.remove(worker_id);
    }

    /// Adds the ranks of a worker, and removes ranks that it no longer has.
    async fn order_ranks(&self, record: &RegisteredWorker, space: SpaceId, caller: Caller) -> Result<(), Refusal> {
        let (start, size) = record.ranks();
        let ranks = start..start + size;
        let adds: Result<Vec<_>, _> = ranks.clone().map(|rank| self.order(record, rank, space, caller)).collect();
        let mut orders: Vec<WorkerChangeOrder> = {
            let fleet = self.backend.fleet();
            let of_worker = fleet.workers.iter().filter(|other| other.worker.id.0 == record.worker_id);
            let gone = of_worker.filter(|other| !ranks.contains(&other.worker.rank.0));
            gone.map(|other| WorkerChangeOrder::Remove(other.worker)).collect()
        };
        orders.extend(adds?);
        self.change(orders, caller).await.map_err(|error| match error.kind() {
            Kind::InvalidArgument => Refusal::new(StatusCode::CONFLICT, error),
            _ => error.into(),
        })?;
        self.settle(|fleet| {
            let of_worker = || fleet.workers.iter().filter(|other| other.worker.id.0 == record.worker_id);
            let is_as_ordered = |rank: u32| {
                let there = of_worker().find(|other| other.worker.rank.0 == rank && other.space == space);
                let events = |there: &WorkerRecord| there.events.as_ref().map(|events| events.endpoint.to_string());
                there.is_some_and(|there| events(there).as_deref() == record.events_of(rank))
            };
            ranks.clone().all(is_as_ordered) && of_worker().count() == size as usize
        })
        .await
    }

    /// The workers of the fleet, and registered workers that are not in it.
    pub(super) fn rows(&self, filter: &Filter) -> Vec<Row> {
        let fleet = self.backend.fleet();
        let records = self.records.lock();
        let mut by_id: BTreeMap<u64, Vec<&WorkerRecord>> = BTreeMap::new();
        for worker in &fleet.workers {
            by_id.entry(worker.worker.id.0).or_default().push(worker);
        }
        let there = by_id.iter().filter_map(|(id, ranks)| row(&fleet, ranks, records.get(*id)));
        let waiting = records.iter().filter(|record| !by_id.contains_key(&record.worker_id));
        let mut rows: Vec<Row> = there.chain(waiting.cloned().map(row_outside_fleet)).collect();
        rows.retain(|row| filter.takes(&row.record.model_name, &row.record.routing_group));
        rows.sort_by(|a, b| {
            let key = |row: &Row| (row.record.model_name.clone(), row.record.routing_group.clone(), row.instance_id);
            key(a).cmp(&key(b))
        });
        rows
    }
}

/// Logs what a client changed of a registration, if it changed something. The fleet's workers have audit lines of their own.
fn audit_registration(caller: Caller, id: u64, before: Option<&RegisteredWorker>, after: Option<&RegisteredWorker>) {
    let text = |record: Option<&RegisteredWorker>| {
        let json = record.and_then(|record| serde_json::to_string(record).ok());
        json.unwrap_or_else(|| audit::ABSENT.to_owned())
    };
    let (before, after) = (text(before), text(after));
    if before != after {
        audit::changed(&format_args!("http={}", caller.0), "registration", &id, (&before, &after));
    }
}

fn is_in_use(record: &RegisteredWorker) -> bool {
    record.lifecycle == Lifecycle::Schedulable
}

/// The row of a worker that is not in the fleet. If it was there before and another source removed it, it cannot be
/// chosen.
fn row_outside_fleet(mut record: RegisteredWorker) -> Row {
    if record.lifecycle == Lifecycle::Schedulable {
        record.lifecycle = Lifecycle::Unschedulable;
        record.not_schedulable_reasons = vec!["removed from the fleet: register it again".to_owned()];
    }
    let (endpoints, listeners) = Default::default();
    Row { instance_id: record.worker_id, source: "zmq", status: "pending", endpoints, listeners, record }
}

/// The row of a worker of the fleet, with the fields that an HTTP client registered.
fn row(fleet: &FleetTable, ranks: &[&WorkerRecord], said: Option<&RegisteredWorker>) -> Option<Row> {
    let known = known_of(fleet, ranks)?;
    let mut record = said.cloned().unwrap_or_else(|| known.clone());
    record.lifecycle = known.lifecycle;
    record.fields.block_size = record.fields.block_size.or(known.fields.block_size);
    let listeners: BTreeMap<u32, Listener> = ranks.iter().copied().filter_map(listener).collect();
    let endpoints = listeners.iter().map(|(rank, listener)| (*rank, listener.endpoint.clone())).collect();
    let status = ["failed", "pending", "active"].into_iter().find(|status| {
        let mut all = listeners.values();
        all.any(|listener| listener.status == *status)
    });
    let (instance_id, status) = (known.worker_id, status.unwrap_or("paused"));
    Some(Row { instance_id, source: "zmq", status, endpoints, listeners, record })
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

/// A worker with the fields that the fleet shows. It may be chosen if one of its ranks may.
fn known_to(fleet: &FleetTable, id: u64) -> Option<RegisteredWorker> {
    let ranks: Vec<&WorkerRecord> = fleet.workers.iter().filter(|record| record.worker.id.0 == id).collect();
    known_of(fleet, &ranks)
}

/// The same, by the records of all ranks of the worker; `None` = there are none.
fn known_of(fleet: &FleetTable, ranks: &[&WorkerRecord]) -> Option<RegisteredWorker> {
    let first = *ranks.iter().min_by_key(|record| record.worker.rank.0)?;
    let space = fleet.space(first.space)?;
    let mut fields = WorkerFields {
        model_name: Some(space.model.clone()),
        routing_group: Some(group_of(space).to_owned()),
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
    if let ([only], Some(endpoint)) = (ranks, endpoints.values().next()) {
        fields.kv_events_endpoint = Some(endpoint.clone());
        fields.replay_endpoint =
            only.events.as_ref().and_then(|events| events.replay.as_ref().map(ToString::to_string));
    }
    fields.kv_events_endpoints = Some(endpoints).filter(|endpoints| !endpoints.is_empty());
    let mut record = RegisteredWorker::new(first.worker.id.0, fields);
    let is = |state: WorkerState| ranks.iter().any(|record| record.state == state);
    record.lifecycle = if ranks.iter().any(|record| record.state.is_schedulable()) {
        Lifecycle::Schedulable
    } else if is(WorkerState::Draining) {
        Lifecycle::Draining
    } else {
        Lifecycle::Unschedulable
    };
    Some(record)
}

/// One change of the fleet that an HTTP client orders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum WorkerChangeOrder {
    /// Add a worker, or replace one that a request added before. The fields of a `[[worker]]`.
    Add(Vec<(String, String)>),
    /// Remove a worker that a request added; rank 2³² - 1 = every rank.
    Remove(Worker),
}

/// Whether a worker has this endpoint already.
fn is_connected(fleet: &FleetTable, worker: Worker, endpoint: &str) -> bool {
    let events = fleet.workers.iter().find(|record| record.worker == worker).and_then(|record| record.events.as_ref());
    events.is_some_and(|events| events.endpoint == endpoint || events.replay.as_deref() == Some(endpoint))
}

impl App {
    /// The order to add one rank of a worker.
    ///
    /// # Errors
    /// A field is invalid, or the caller may not name one of the endpoints.
    pub(super) fn order(
        &self,
        record: &RegisteredWorker,
        rank: u32,
        space: SpaceId,
        caller: Caller,
    ) -> Result<WorkerChangeOrder, Refusal> {
        if let Some(taint) = record.fields.taints.iter().flatten().find(|taint| taint.is_empty() || taint.contains('+'))
        {
            let message = format!("the taint {taint:?} cannot be a label");
            return Err(Refusal::invalid(message, "name taints without +, which joins them, and none that is empty"));
        }
        let fields = {
            let fleet = self.backend.fleet();
            let space = fleet.space(space).ok_or_else(|| Refusal::not_found("the space is gone", "ask again"))?;
            record.worker_fields(rank, (&space.namespace, space.role.name()))
        };
        let worker = Worker::new(record.worker_id, rank);
        for (_, endpoint) in fields.iter().filter(|(name, _)| name == "endpoint" || name == "replay") {
            if !is_connected(&self.backend.fleet(), worker, endpoint) {
                self.may_name(endpoint, caller)?;
            }
        }
        match parse_worker("the request", &fields, self.backend.spaces()) {
            Ok(_) => Ok(WorkerChangeOrder::Add(fields)),
            Err(problems) => Err(Refusal::invalid(problems.to_string().trim().to_owned(), "correct the named fields")),
        }
    }

    /// Refuses an endpoint to which this caller may not make the daemon connect.
    fn may_name(&self, endpoint: &str, caller: Caller) -> Result<(), Refusal> {
        let caller = caller.0.ip().to_canonical();
        let is_allowed = match self.worker_hosts.as_slice() {
            [] => caller.is_loopback() || HostRule::is_at(endpoint, caller),
            rules => rules.iter().any(|rule| rule.allows(endpoint)),
        };
        if is_allowed {
            return Ok(());
        }
        self.counters.bump(HttpCounter::EndpointsRefused);
        let message = format!("http.worker_hosts does not allow the endpoint {endpoint}");
        let remedy =
            "name its host or network in worker_hosts under [http], or use `kvrouted worker` on the daemon's host";
        Err(Error::new(Kind::NotPermitted, message, remedy).into())
    }

    /// Has the control thread make all of the changes, or none.
    ///
    /// # Errors
    /// Another source names a worker, there are too many workers, or the daemon drains.
    pub(super) async fn change(&self, orders: Vec<WorkerChangeOrder>, caller: Caller) -> Result<(), Error> {
        let done = self.backend.change(caller.0, orders)?;
        done.await.map_err(|_| super::draining())?
    }

    /// Removes a worker that a request added, and its registration.
    ///
    /// # Errors
    /// Another source names it.
    pub(super) async fn remove(&self, worker: Worker, caller: Caller) -> Result<(), Refusal> {
        let removed = self.change(vec![WorkerChangeOrder::Remove(worker)], caller).await;
        removed.map_err(|error| match error.kind() {
            Kind::InvalidArgument => Refusal::new(StatusCode::CONFLICT, error),
            _ => error.into(),
        })?;
        let is_meant = move |is: Worker| worker.selects(is);
        self.settle(|fleet| !fleet.workers.iter().any(|record| is_meant(record.worker))).await?;
        let fleet = self.backend.fleet();
        if !fleet.workers.iter().any(|record| record.worker.id == worker.id) {
            self.forget(worker.id.0, caller);
        }
        // The first worker of an empty space may register another block size.
        self.records.lock().keep_block_sizes(|space| fleet.workers_of(space).next().is_some());
        Ok(())
    }

    /// Waits until the fleet shows the ordered change.
    ///
    /// # Errors
    /// The change takes too long, or was refused; the log has the reason.
    pub(super) async fn settle(&self, shows: impl Fn(&FleetTable) -> bool) -> Result<(), Refusal> {
        let deadline = Instant::now() + Duration::from_millis(HTTP_SETTLE_MS_MAX);
        while !shows(&self.backend.fleet()) {
            if Instant::now() >= deadline {
                let message = format!("the change is ordered, but not made after {HTTP_SETTLE_MS_MAX} ms");
                return Err(
                    Error::new(Kind::Overloaded, message, "check GET /workers, and the log for a refusal").into()
                );
            }
            tokio::time::sleep(Duration::from_millis(HTTP_SETTLE_PAUSE_MS)).await;
        }
        Ok(())
    }

    /// The space of a registered worker, or the conflict that keeps it out.
    pub(super) fn misfit(&self, record: &RegisteredWorker) -> Result<SpaceId, String> {
        let fleet = self.backend.fleet();
        let found = space_named(&fleet, &record.model_name, &record.routing_group);
        let space = found.map_err(|error| format!("{}; {}", error.message(), error.remedy()))?;
        let records = self.records.lock();
        let scheme = space.scheme.get();
        let known = scheme.map(|scheme| scheme.block_size).or(records.block_size_of(space.id));
        let (known, asked) = (known.unwrap_or_default(), record.fields.block_size.unwrap_or_default());
        if known != 0 && asked != 0 && asked != known {
            return Err(format!("block_size mismatch: existing={known} requested={asked}"));
        }
        let is_eagle = record.fields.is_eagle.unwrap_or(false);
        match scheme {
            Some(scheme) if is_eagle != (scheme.window == Window::Bigram) => {
                Err(format!("is_eagle mismatch: requested={is_eagle}; the space's window says otherwise"))
            }
            _ => Ok(space.id),
        }
    }
}
