//! Changes of workers: ordered from the control thread, as administration orders them, and waited for.

use std::time::Duration;

use axum::http::StatusCode;
use tokio::time::Instant;

use super::app::App;
use super::listener::Caller;
use super::records::Record;
use super::refusal::Refusal;
use super::space;
use crate::config::{HostRule, parse_worker};
use crate::error::{Error, Kind};
use crate::fleet::FleetTable;
use crate::ids::{SpaceId, Worker};
use crate::limits::{HTTP_SETTLE_MS_MAX, HTTP_SETTLE_REST_MS};
use crate::metrics::HttpCounter;

/// One change of the fleet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerOrder {
    /// Add a worker, or replace one that a request added before. The fields of a `[[worker]]`.
    Add(Vec<(String, String)>),
    /// Remove one that a request added; rank 2³² - 1 = every rank.
    Remove(Worker),
}

/// Whether an endpoint is a worker's already, whoever named it.
fn is_connected(fleet: &FleetTable, worker: Worker, endpoint: &str) -> bool {
    let events = fleet.workers.iter().find(|record| record.worker == worker).and_then(|record| record.events.as_ref());
    events.is_some_and(|events| events.endpoint == endpoint || events.replay.as_deref() == Some(endpoint))
}

impl App {
    /// The order to add one rank of a worker.
    ///
    /// # Errors
    /// A field of it means nothing, or the caller may not name one of its endpoints.
    pub(super) fn order(
        &self,
        record: &Record,
        rank: u32,
        space: SpaceId,
        caller: Caller,
    ) -> Result<WorkerOrder, Refusal> {
        if let Some(taint) = record.fields.taints.iter().flatten().find(|taint| taint.is_empty() || taint.contains('+'))
        {
            let message = format!("the taint {taint:?} cannot be a label");
            return Err(Refusal::invalid(message, "name taints without +, which joins them, and none with nothing"));
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
            Ok(_) => Ok(WorkerOrder::Add(fields)),
            Err(problems) => Err(Refusal::invalid(problems.to_string().trim().to_owned(), "correct what is named")),
        }
    }

    /// Refuses an endpoint that the daemon may not be made to connect to by a caller.
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

    /// Has all of the orders done, or none.
    ///
    /// # Errors
    /// Why not: another source names a worker, there are too many, the daemon drains.
    pub(super) async fn change(&self, orders: Vec<WorkerOrder>) -> Result<(), Error> {
        let draining =
            || Error::new(Kind::Draining, "the daemon drains", "ask another, or this one once it has restarted");
        let done = self.backend.change(orders)?;
        done.await.map_err(|_| draining())?
    }

    /// Removes a worker that a request added, and what is remembered of it.
    ///
    /// # Errors
    /// Somebody else names it.
    pub(super) async fn remove(&self, worker: Worker) -> Result<(), Refusal> {
        let removed = self.change(vec![WorkerOrder::Remove(worker)]).await;
        removed.map_err(|error| match error.kind() {
            Kind::InvalidArgument => Refusal::new(StatusCode::CONFLICT, error),
            _ => error.into(),
        })?;
        let is_meant = move |is: Worker| worker.selects(is);
        self.settle(|fleet| !fleet.workers.iter().any(|record| is_meant(record.worker))).await?;
        let (fleet, mut records) = (self.backend.fleet(), self.records.lock());
        if !fleet.workers.iter().any(|record| record.worker.id == worker.id) {
            records.remove(worker.id.0);
        }
        // Who comes to a space that nobody serves may say anew how it is cut.
        records.keep_block_sizes(|space| fleet.workers_of(space).next().is_some());
        Ok(())
    }

    /// Waits until the fleet shows what was ordered.
    ///
    /// # Errors
    /// It does not in time: it was refused, which the log tells, or takes longer.
    pub(super) async fn settle(&self, shows: impl Fn(&FleetTable) -> bool) -> Result<(), Refusal> {
        let deadline = Instant::now() + Duration::from_millis(HTTP_SETTLE_MS_MAX);
        while !shows(&self.backend.fleet()) {
            if Instant::now() >= deadline {
                let message = format!("it is ordered, and not done after {HTTP_SETTLE_MS_MAX} ms");
                return Err(Error::new(Kind::Overloaded, message, "see GET /workers, and the log for a refusal").into());
            }
            tokio::time::sleep(Duration::from_millis(HTTP_SETTLE_REST_MS)).await;
        }
        Ok(())
    }

    /// What keeps a worker from its space, if that can be seen beforehand.
    pub(super) fn misfit(&self, record: &Record) -> Result<SpaceId, String> {
        let fleet = self.backend.fleet();
        let found = space::of(&fleet, &record.model_name, &record.routing_group);
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
            Some(scheme) if is_eagle != (scheme.window == crate::ids::Window::Bigram) => {
                Err(format!("is_eagle mismatch: requested={is_eagle}; the space's window says otherwise"))
            }
            _ => Ok(space.id),
        }
    }
}
