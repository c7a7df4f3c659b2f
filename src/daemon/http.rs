//! The HTTP port's connections to the rest of the daemon: its service, and its changes of workers, which the control
//! thread makes.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use arc_swap::{ArcSwap, Guard};
use tokio::sync::{mpsc, oneshot};

use super::core_seed;
use super::desired_fleet::DesiredFleet;
use super::ingest_threads::IngestThreads;
use super::statistics::Statistics;
use crate::budget::MemoryPart;
use crate::config::{Config, SpaceConfig};
use crate::error::{Error, Kind, Result};
use crate::fleet::{Fleet, FleetTable, WorkerRecord};
use crate::ids::{GroupId, SpaceId, Tier};
use crate::index::StoreBlocks;
use crate::ingest::DumpPart;
use crate::limits::HTTP_CHANGES_WAITING_MAX;
use crate::requests::{CoreMetrics, RequestQueue, RequestTables, RoutingService};
use crate::route::PolicyTable;
use crate::routers::RoutersView;
use crate::serve::{
    HttpBackend, HttpMemory, HttpMetrics, HttpPort, MetricsPages, PortThread, WorkerChangeOrder, draining,
};
use crate::watchdog::Watchlist;

/// Changes of workers to make together, and the receiver of the result.
type ChangeRequest = (SocketAddr, Vec<WorkerChangeOrder>, oneshot::Sender<Result<()>>);

/// The HTTP port as the control thread sees it.
pub(super) struct Http {
    pub(super) thread: Option<PortThread>,
    changes: mpsc::Receiver<ChangeRequest>,
    is_draining: Arc<AtomicBool>,
}

impl Http {
    /// Starts the port's thread if there is a port. It decides and counts as thread number `cores`, behind the serving
    /// threads.
    pub(super) fn start(
        config: &Config,
        port: Option<HttpPort>,
        (tables, cores): (&RequestTables, usize),
        (statistics, pages): (&Arc<Statistics>, &MetricsPages),
        ingest_threads: &Arc<IngestThreads>,
    ) -> Result<Self> {
        let (send, changes) = mpsc::channel(HTTP_CHANGES_WAITING_MAX);
        let is_draining = Arc::clone(&statistics.is_draining);
        let start = |port: HttpPort| {
            let metrics = statistics.cores.get(cores).map_or_else(Arc::<CoreMetrics>::default, Arc::clone);
            let counted = HttpMetrics { http: Arc::clone(&statistics.http), core: Arc::clone(&metrics.counters) };
            let backend = Backend {
                fleet: Arc::clone(&tables.fleet),
                policies: Arc::clone(&tables.policies),
                queue: Arc::clone(&tables.queue),
                spaces: config.spaces.clone(),
                pages: pages.clone(),
                // A weak reference: a dump in progress must not keep the ingest threads from ending.
                ingest_threads: Arc::downgrade(ingest_threads),
                changes: send,
                is_draining: Arc::clone(&is_draining),
                watchlist: statistics.watchlist.clone(),
                routers: Arc::clone(&statistics.routers),
            };
            let service = RoutingService::new(tables.clone(), metrics, cores, core_seed(config, cores));
            let accounts = &statistics.memory.accounts;
            let memory = HttpMemory::of(accounts.division().bound(MemoryPart::Http), config.http.body_bytes_max);
            let of_port = memory.clone();
            accounts.watch(MemoryPart::Http, move || of_port.used());
            let mark = statistics.watchlist.add("http", true);
            port.start(service, cores, (counted, mark, memory), Arc::new(backend))
        };
        let thread = port.map(start).transpose()?;
        Ok(Self { thread, changes, is_draining })
    }

    /// Makes the changes of workers that HTTP clients request, for ever.
    pub(super) async fn change_workers(&mut self, desired: &DesiredFleet) {
        while let Some((client, changes, done)) = self.changes.recv().await {
            // The change is made even if its client has gone.
            let _ = done.send(desired.change_together(&format_args!("http={client}"), &changes).map(drop));
        }
        std::future::pending().await
    }

    /// Has the port refuse new selections and changes from now on. Clients that wait for a change get an error.
    pub(super) fn drain(self) {
        // Relaxed: nothing else hangs on it.
        self.is_draining.store(true, Ordering::Relaxed);
    }
}

/// The daemon as the thread of the HTTP port sees it.
struct Backend {
    fleet: Arc<Fleet>,
    policies: Arc<ArcSwap<PolicyTable>>,
    queue: Arc<RequestQueue>,
    spaces: Vec<SpaceConfig>,
    pages: MetricsPages,
    ingest_threads: Weak<IngestThreads>,
    changes: mpsc::Sender<ChangeRequest>,
    is_draining: Arc<AtomicBool>,
    watchlist: Watchlist,
    routers: Arc<RoutersView>,
}

impl HttpBackend for Backend {
    fn is_draining(&self) -> bool {
        // Relaxed: nothing else hangs on it.
        self.is_draining.load(Ordering::Relaxed)
    }

    fn is_stalled(&self) -> bool {
        self.watchlist.is_stalled()
    }

    fn is_joining(&self) -> bool {
        self.routers.is_joining()
    }

    fn fleet(&self) -> Guard<Arc<FleetTable>> {
        self.fleet.load()
    }

    fn spaces(&self) -> &[SpaceConfig] {
        &self.spaces
    }

    fn tracks_prefill(&self, space: SpaceId) -> bool {
        self.policies.load().of(space).track_prefill_tokens
    }

    fn waiting(&self, space: SpaceId) -> (usize, u64) {
        self.queue.waiting_of(space)
    }

    fn metrics(&self) -> &MetricsPages {
        &self.pages
    }

    fn change(&self, client: SocketAddr, changes: Vec<WorkerChangeOrder>) -> Result<oneshot::Receiver<Result<()>>> {
        let (done, outcome) = oneshot::channel();
        self.changes.try_send((client, changes, done)).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => {
                Error::new(Kind::Overloaded, "too many changes of workers wait", "ask again later")
            }
            mpsc::error::TrySendError::Closed(_) => draining(),
        })?;
        Ok(outcome)
    }

    fn dump(&self, record: &WorkerRecord, each: &mut dyn FnMut(&StoreBlocks<'_>) -> bool) -> Result<(), &'static str> {
        let ingest_threads = self.ingest_threads.upgrade().ok_or("draining")?;
        let parts = ingest_threads.dump(record.shard, record.worker).map_err(|error| error.kind().name())?;
        drop(ingest_threads);
        loop {
            match parts.recv().map_err(|_| "broken_off")? {
                // A tier holds a block if all its KV groups do. The stores of one group do not show that.
                DumpPart::Begin(begin) if has_several_groups(&begin.groups) => return Err("several_kv_groups"),
                DumpPart::Begin(_) => {}
                DumpPart::Chunk(chunk) => {
                    for store in (0..chunk.stores()).filter_map(|number| chunk.store(number)) {
                        if !each(&store) {
                            return Err("not_read");
                        }
                    }
                }
                DumpPart::End(_) => return Ok(()),
                DumpPart::Aborted(reason) => return Err(reason.name()),
            }
        }
    }
}

fn has_several_groups(groups: &[(Tier, GroupId)]) -> bool {
    Tier::ALL.iter().any(|tier| groups.iter().filter(|(of, _)| of == tier).count() > 1)
}
