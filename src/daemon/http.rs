//! The HTTP port as a part of the daemon: its gateway's half of a core, and the way from it to the control thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use arc_swap::{ArcSwap, Guard};
use tokio::sync::{mpsc, oneshot};

use super::core_metrics::CoreMetrics;
use super::core_seed;
use super::roster::Roster;
use super::service::CoreService;
use super::shared::Shared;
use super::sources::Sources;
use super::streams::Streams;
use crate::config::{Config, SpaceConfig};
use crate::error::{Error, Kind, Result};
use crate::fleet::{Fleet, FleetTable, WorkerRecord};
use crate::ids::{GroupId, SpaceId, Tier};
use crate::index::StoreBlocks;
use crate::ingest::DumpPart;
use crate::limits::HTTP_CHANGES_WAITING_MAX;
use crate::route::PolicyTable;
use crate::serve::{HttpBackend, HttpMetrics, HttpPort, HttpThread, MetricsPages, RequestQueue, WorkerOrder};

/// Changes that belong together, and where to say what came of them.
type Ordered = (Vec<WorkerOrder>, oneshot::Sender<Result<()>>);

/// The HTTP port, where there is one, from the control thread's side.
pub(super) struct Http {
    pub(super) thread: Option<HttpThread>,
    orders: mpsc::Receiver<Ordered>,
    is_draining: Arc<AtomicBool>,
}

impl Http {
    /// Serves a port that is bound. `cores` are the serving cores, behind which it counts as one more.
    pub(super) fn start(
        config: &Config,
        port: Option<HttpPort>,
        (shared, cores): (&Shared, usize),
        (sources, pages): (&Arc<Sources>, &MetricsPages),
        streams: &Arc<Streams>,
    ) -> Result<Self> {
        let (send, orders) = mpsc::channel(HTTP_CHANGES_WAITING_MAX);
        let is_draining = Arc::<AtomicBool>::default();
        let start = |port: HttpPort| {
            let metrics = sources.cores.get(cores).map_or_else(Arc::<CoreMetrics>::default, Arc::clone);
            let counted = HttpMetrics { http: Arc::clone(&sources.http), core: Arc::clone(&metrics.counters) };
            let backend = Backend {
                fleet: Arc::clone(&shared.fleet),
                policies: Arc::clone(&shared.policies),
                room: Arc::clone(&shared.room),
                spaces: config.spaces.clone(),
                pages: pages.clone(),
                // Not the streams themselves: a dump that is under way must not keep them from ending.
                streams: Arc::downgrade(streams),
                orders: send,
                is_draining: Arc::clone(&is_draining),
            };
            let service = CoreService::new(shared.clone(), metrics, cores, core_seed(config, cores));
            port.start(service, cores, counted, Arc::new(backend))
        };
        let thread = port.map(start).transpose()?;
        Ok(Self { thread, orders, is_draining })
    }

    /// Does what HTTP clients order, for ever.
    pub(super) async fn obey(&mut self, roster: &Roster) {
        while let Some((orders, done)) = self.orders.recv().await {
            // Whoever ordered it may have gone; it is done all the same.
            let _ = done.send(roster.change_together(&orders).map(drop));
        }
        std::future::pending().await
    }

    /// Refuses what would begin something from now on. Who waits for an order to be done is told, too.
    pub(super) fn drain(self) {
        // Relaxed: nothing else hangs on it.
        self.is_draining.store(true, Ordering::Relaxed);
    }
}

/// What the thread of the HTTP port sees of the daemon.
struct Backend {
    fleet: Arc<Fleet>,
    policies: Arc<ArcSwap<PolicyTable>>,
    room: Arc<RequestQueue>,
    spaces: Vec<SpaceConfig>,
    pages: MetricsPages,
    streams: Weak<Streams>,
    orders: mpsc::Sender<Ordered>,
    is_draining: Arc<AtomicBool>,
}

impl HttpBackend for Backend {
    fn is_draining(&self) -> bool {
        // Relaxed: nothing else hangs on it.
        self.is_draining.load(Ordering::Relaxed)
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
        self.room.waiting_of(space)
    }

    fn metrics(&self) -> &MetricsPages {
        &self.pages
    }

    fn change(&self, orders: Vec<WorkerOrder>) -> Result<oneshot::Receiver<Result<()>>> {
        let (done, outcome) = oneshot::channel();
        self.orders.try_send((orders, done)).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => {
                Error::new(Kind::Overloaded, "too many changes of workers wait", "ask again later")
            }
            mpsc::error::TrySendError::Closed(_) => {
                Error::new(Kind::Draining, "the daemon drains", "ask another, or this one once it has restarted")
            }
        })?;
        Ok(outcome)
    }

    fn dump(&self, record: &WorkerRecord, each: &mut dyn FnMut(&StoreBlocks<'_>) -> bool) -> Result<(), &'static str> {
        let streams = self.streams.upgrade().ok_or("draining")?;
        let parts = streams.dump(record.shard, record.worker).map_err(|error| error.kind().name())?;
        drop(streams);
        loop {
            match parts.recv().map_err(|_| "broken_off")? {
                // A tier holds what all of its groups have, which one group's stores do not tell.
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
