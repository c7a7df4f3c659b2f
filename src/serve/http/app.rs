//! What the handlers of requests share.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::Guard;
use parking_lot::Mutex;
use tokio::sync::{Semaphore, oneshot};

use super::body::Bodies;
use super::desk::Desk;
use super::fields::PromptFields;
use super::orders::WorkerOrder;
use super::records::Records;
use super::refusal::Refusal;
use super::replies::Replies;
use super::selections::{Forgotten, Selections};
use super::space;
use crate::config::{HostRule, HttpConfig, SpaceConfig};
use crate::error::{Error, Kind, Result};
use crate::fleet::{FleetTable, WorkerRecord};
use crate::ids::{Scheme, SpaceId};
use crate::index::StoreBlocks;
use crate::limits::HTTP_DUMPS_MAX;
use crate::metrics::{CounterSet, HttpCounter};
use crate::serve::MetricsPages;

/// The daemon behind an HTTP port, beside what a [`Service`](crate::serve::Service) answers.
pub trait HttpBackend: Send + Sync + 'static {
    /// Whether it takes no more requests.
    fn is_draining(&self) -> bool;

    /// The current fleet table.
    fn fleet(&self) -> Guard<Arc<FleetTable>>;

    /// The spaces as they are configured, by [`SpaceId`].
    fn spaces(&self) -> &[SpaceConfig];

    /// Whether the prefill term counts in a space.
    fn tracks_prefill(&self, space: SpaceId) -> bool;

    /// How many requests of a space wait for a worker, and the tokens of their prompts.
    fn waiting(&self, space: SpaceId) -> (usize, u64);

    /// Where the metrics page is had.
    fn metrics(&self) -> &MetricsPages;

    /// Has workers changed as administration would: all of the orders, or none. The receiver is told what came of it.
    ///
    /// # Errors
    /// [`Kind::Overloaded`] if too many changes wait, [`Kind::Draining`].
    fn change(&self, orders: Vec<WorkerOrder>) -> Result<oneshot::Receiver<Result<()>>>;

    /// Gives out every block of a worker, a parent before its children, until `each` answers that nobody wants more.
    /// Blocks the calling thread.
    ///
    /// # Errors
    /// Why there is nothing, or not all of it, by name.
    fn dump(&self, worker: &WorkerRecord, each: &mut dyn FnMut(&StoreBlocks<'_>) -> bool) -> Result<(), &'static str>;
}

/// The state of one HTTP port.
pub(super) struct App {
    pub(super) desk: Desk,
    pub(super) backend: Arc<dyn HttpBackend>,
    pub(super) bodies: Bodies,
    pub(super) records: Mutex<Records>,
    pub(super) selections: Mutex<Selections>,
    /// Held while workers are changed: what is looked at before holds until it is done.
    pub(super) changing: tokio::sync::Mutex<()>,
    pub(super) dumps: Arc<Semaphore>,
    pub(super) replies: Replies,
    pub(super) counters: Arc<CounterSet<HttpCounter>>,
    may_administer: bool,
    /// Names by which the port may be asked.
    pub(super) hosts: Vec<String>,
    /// Where workers may be that are registered here; empty = see [`HttpConfig::worker_hosts`].
    pub(super) worker_hosts: Vec<HostRule>,
    /// How long the dump of one worker may take.
    pub(super) dump_worker: Duration,
    started: Instant,
}

impl App {
    pub(super) fn new(
        desk: Desk,
        backend: Arc<dyn HttpBackend>,
        counters: Arc<CounterSet<HttpCounter>>,
        config: HttpConfig,
    ) -> Self {
        Self {
            desk,
            backend,
            bodies: Bodies::new(config.body_bytes_max, Arc::clone(&counters)),
            records: Mutex::default(),
            selections: Mutex::default(),
            changing: tokio::sync::Mutex::default(),
            dumps: Arc::new(Semaphore::new(HTTP_DUMPS_MAX)),
            replies: Replies::new(Arc::clone(&counters)),
            counters,
            may_administer: config.administer,
            hosts: config.hosts,
            // The configuration was checked: every one of them means something.
            worker_hosts: config.worker_hosts.iter().filter_map(|rule| HostRule::parse(rule)).collect(),
            dump_worker: Duration::from_millis(config.dump_worker_ms_max),
            started: Instant::now(),
        }
    }

    /// Milliseconds of this port's clock.
    pub(super) fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Refuses what begins something while the daemon ends.
    pub(super) fn serving(&self) -> Result<()> {
        if self.backend.is_draining() {
            return Err(Error::new(
                Kind::Draining,
                "the daemon drains",
                "ask another, or this one once it has restarted",
            ));
        }
        Ok(())
    }

    /// Refuses what is administration, changes of workers and dumps, where that is not allowed here.
    pub(super) fn administering(&self) -> Result<()> {
        if self.may_administer {
            return self.serving();
        }
        self.counters.bump(HttpCounter::AdministrationRefused);
        let remedy = "set administer = true under [http], or use `kvrouted worker` on the daemon's host";
        let message = "this HTTP port neither changes nor dumps workers: http.administer is false";
        Err(Error::new(Kind::NotPermitted, message, remedy))
    }

    /// The space of a request that wants a worker, and how its prompts are cut.
    pub(super) fn space_of(&self, fields: &PromptFields) -> Result<(SpaceId, Scheme), Refusal> {
        let fleet = self.backend.fleet();
        let space = space::to_select(&fleet, &fields.model_name, &fields.routing_group)?;
        Ok((space.id, space::scheme_of(space, self.records.lock().block_size_of(space.id))))
    }

    pub(super) fn count_forgotten(&self, forgotten: Forgotten) {
        self.counters.add(HttpCounter::SelectionsEvicted, forgotten.evicted);
        self.counters.add(HttpCounter::SelectionsExpired, forgotten.expired);
    }
}
