//! Makes the fleet what the roster says, one step after another, while everybody else goes on.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::oneshot;

use super::records::Records;
use super::roster::Roster;
use super::snapshots::Snapshots;
use super::sources::Sources;
use super::streams::Streams;
use super::views::Views;
use crate::config::{Config, WorkerConfig};
use crate::discovery::{Step, plan};
use crate::endpoint::Endpoint;
use crate::error::{Error, Kind, Result};
use crate::fleet::{Fleet, PlaceAllocator, TrustCell};
use crate::ids::{ShardId, Worker, WorkerIndex};
use crate::ingest::descriptors::Descriptors;
use crate::ingest::{
    AddWorker, IngestHandle, LoadListener, LoadSource, RemoveWorker, UpdateWorker, WorkerAccepted, WorkerView,
};
use crate::limits::{BOOKINGS_LEAVING_PER_TURN_MAX, MUSTER_REST_MS};
use crate::load::Loads;
use crate::metrics::{CounterSet, DaemonCounter, LoadReportCounter};
use crate::trust::{Trust, TrustLevel, TrustReason};

/// What is changed, and who is in it.
pub(super) struct Muster {
    fleet: Arc<Fleet>,
    loads: Arc<Loads>,
    views: Arc<Views>,
    counters: Arc<CounterSet<DaemonCounter>>,
    heard: Arc<CounterSet<LoadReportCounter>>,
    listener: Arc<LoadListener>,
    records: Records,
    snapshots: Snapshots,
    places: PlaceAllocator,
    /// Every worker as it is, also those that could not be taken in: they are tried again when they change.
    are: BTreeMap<Worker, WorkerConfig>,
    indexes: BTreeMap<Worker, WorkerIndex>,
    /// Those that have left and may still be met in the index; their places are not free yet.
    leaving: Vec<(WorkerIndex, oneshot::Receiver<()>)>,
    /// How many may publish.
    descriptors: Descriptors,
}

impl Muster {
    /// The workers of `config`, who are there when the daemon starts.
    pub(super) fn new(
        (config, descriptors): (&Config, Descriptors),
        (records, places): (Records, PlaceAllocator),
        snapshots: Snapshots,
        listener: Arc<LoadListener>,
        sources: &Sources,
    ) -> Self {
        let indexes = sources.fleet.load().workers.iter().map(|record| (record.worker, record.index)).collect();
        Self {
            fleet: Arc::clone(&sources.fleet),
            loads: Arc::clone(&sources.loads),
            views: Arc::clone(&sources.views),
            counters: Arc::clone(&sources.daemon),
            heard: Arc::clone(&sources.heard),
            listener,
            records,
            snapshots,
            places,
            are: config.workers.iter().map(|worker| (worker.worker, worker.clone())).collect(),
            indexes,
            leaving: Vec::new(),
            descriptors,
        }
    }

    /// Follows the roster for ever.
    pub(super) async fn run(mut self, roster: &Roster, streams: &Streams) {
        let mut changes = roster.changes();
        self.listen();
        loop {
            changes.mark_unchanged();
            let steps = plan(&self.are, roster.directory().merged());
            let changed = !steps.is_empty();
            for step in steps {
                self.take(step, roster, streams).await;
            }
            if changed {
                self.listen();
            }
            while !self.leaving.is_empty() && !changes.has_changed().unwrap_or(true) {
                self.settle();
                tokio::time::sleep(Duration::from_millis(MUSTER_REST_MS)).await;
            }
            if changes.changed().await.is_err() {
                // The roster is held by whoever runs this.
                std::future::pending::<()>().await;
            }
        }
    }

    async fn take(&mut self, step: Step, roster: &Roster, streams: &Streams) {
        match step {
            Step::Remove(worker) => self.remove(worker, streams).await,
            // It has no sockets whose place others could take.
            Step::Change { config, restream } if restream && !self.is_heard(config.worker) => {
                self.remove(config.worker, streams).await;
                self.add(config, roster, streams).await;
            }
            Step::Change { config, restream } => self.change(config, restream, roster, streams).await,
            Step::Add(config) => self.add(config, roster, streams).await,
        }
    }

    async fn add(&mut self, config: WorkerConfig, roster: &Roster, streams: &Streams) {
        let (worker, source) = (config.worker, roster.source_of(config.worker));
        self.are.insert(worker, config.clone());
        let Some(index) = self.place().await else {
            self.counters.bump(DaemonCounter::WorkersRefusedFull);
            tracing::error!(%worker, source, "worker refused: every place is taken");
            return;
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let record = self.records.record(&config, index, now.as_millis() as u64);
        let view = Arc::new(WorkerView::new(Arc::clone(&record.trust)));
        let (shard, trust) = (record.shard, Arc::clone(&record.trust));
        let mut unheard = None;
        let publisher = self.records.publisher(&record, &view).filter(|_| {
            unheard = self.too_few_descriptors();
            unheard.is_none()
        });
        self.views.put(index, view);
        self.loads.admit(index);
        self.loads.set_prefill(index, config.prefill);
        let newcomer = match &publisher {
            Some(_) => {
                let newcomer = self.snapshots.of_newcomer(&self.fleet.load(), &record);
                newcomer.await
            }
            None => None,
        };
        let load = newcomer.as_ref().map(|newcomer| newcomer.load.clone());
        let admission = AddWorker { record, blocks_max: config.blocks_max, publisher, load };
        let answer = asked(streams, shard, |stream| stream.add_worker(admission.clone())).await;
        drop(admission);
        if let Some(Err(error)) = newcomer.map(|newcomer| self.snapshots.feed_newcomer(newcomer)) {
            tracing::warn!(%worker, %error, "the worker's snapshot is not loaded");
        }
        match answer {
            Ok(WorkerAccepted { no_events: unopened }) => {
                self.indexes.insert(worker, index);
                self.counters.bump(DaemonCounter::WorkersAdded);
                tracing::info!(%worker, source, name = config.name, "worker added");
                self.hear(worker, unheard.or(unopened), &trust);
            }
            Err(error) => {
                self.views.take(index);
                self.loads.leave(index);
                self.places.give_back(index);
                self.counters.bump(DaemonCounter::WorkersRefusedFull);
                tracing::error!(%worker, source, %error, "worker refused");
            }
        }
    }

    async fn change(&mut self, config: WorkerConfig, restream: bool, roster: &Roster, streams: &Streams) {
        let (worker, source) = (config.worker, roster.source_of(config.worker));
        let held = self.indexes.get(&worker).and_then(|index| self.fleet.load().worker(*index).cloned());
        let Some(held) = held else {
            // It could not be taken in as it was.
            self.are.remove(&worker);
            return self.add(config, roster, streams).await;
        };
        let trust = Arc::clone(&held.trust);
        let record = self.records.amended(&config, held.index, held.shard, held.slot, held.trust);
        let amendment = UpdateWorker { record, blocks_max: config.blocks_max, resubscribe: restream };
        let prefill = config.prefill;
        self.are.insert(worker, config);
        match asked(streams, held.shard, |stream| stream.update_worker(amendment.clone())).await {
            Ok(WorkerAccepted { no_events: unheard }) => {
                self.loads.set_prefill(held.index, prefill);
                self.counters.bump(DaemonCounter::WorkersChanged);
                if restream {
                    self.counters.bump(DaemonCounter::WorkersEmptied);
                }
                tracing::info!(%worker, source, restream, "worker changed");
                if restream {
                    self.hear(worker, unheard, &trust);
                }
            }
            Err(error) => tracing::error!(%worker, source, %error, "worker not changed"),
        }
    }

    /// Takes a worker out: of the table, so that nobody chooses it; of the loads, so that nobody books it; and of
    /// its shard, which gives up its blocks once nobody can meet it.
    async fn remove(&mut self, worker: Worker, streams: &Streams) {
        self.are.remove(&worker);
        let Some(index) = self.indexes.remove(&worker) else { return };
        let Some(record) = self.fleet.load().worker(index).cloned() else { return };
        self.fleet.update(|table| table.take(index).is_some());
        let gone_since = self.fleet.load().version;
        self.loads.leave(index);
        let departure = RemoveWorker { index, space: record.space, slot: record.slot, table_version: gone_since };
        match queued(streams, record.shard, |stream| stream.remove_worker(departure)).await {
            Ok(gone) => self.leaving.push((index, gone)),
            Err(error) => tracing::error!(%worker, %error, "a worker that left is still held by its shard"),
        }
        let bookings = self.end_bookings(index).await;
        self.views.take(index);
        self.counters.bump(DaemonCounter::WorkersRemoved);
        tracing::info!(%worker, name = record.name, bookings, "worker removed");
    }

    async fn end_bookings(&self, index: WorkerIndex) -> u64 {
        let (mut bookings, mut from) = (0, Some(0));
        while let Some(at) = from {
            let ended = self.loads.end_of(index, at, BOOKINGS_LEAVING_PER_TURN_MAX);
            (bookings, from) = (bookings + ended.ended, ended.next);
            tokio::task::yield_now().await;
        }
        self.counters.add(DaemonCounter::BookingsEndedWorkerRemoved, bookings);
        bookings
    }

    /// Frees the places of those whom nobody can meet any more.
    fn settle(&mut self) {
        let places = &mut self.places;
        self.leaving.retain_mut(|(index, gone)| match gone.try_recv() {
            Ok(()) => {
                places.give_back(*index);
                false
            }
            // A thread that ended never answers, and its place is not used again.
            Err(error) => error == oneshot::error::TryRecvError::Empty,
        });
    }

    /// Says whose load is to be listened to.
    fn listen(&self) {
        let publish = self.are.values().filter_map(|config| Some((config, config.load.clone()?)));
        let source = |(config, endpoint): (&WorkerConfig, Endpoint)| {
            let index = *self.indexes.get(&config.worker)?;
            let scheme = self.records.scheme_of(config.space)?;
            Some(LoadSource { index, worker: config.worker, endpoint, scheme })
        };
        let mut sources: Vec<_> = publish.filter_map(source).collect();
        let heard = self.fleet.load().workers.iter().filter(|record| record.events.is_some()).count();
        let room = self.descriptors;
        // Events come first: without them a prefix is missed, without a load only its report.
        for refused in sources.split_off(room.publishers_max.saturating_sub(heard).min(sources.len())) {
            self.heard.bump(LoadReportCounter::SourcesRefused);
            let (worker, limit) = (refused.worker, room.limit);
            tracing::error!(%worker, limit, "too few open files to hear the worker's load: raise the limit (ulimit -n)");
        }
        if let Err(error) = self.listener.follow(sources) {
            tracing::error!(%error, "who is listened to for loads does not change");
        }
    }

    /// A free place, waiting for those that are about to be.
    async fn place(&mut self) -> Option<WorkerIndex> {
        loop {
            self.settle();
            if let Some(index) = self.places.take() {
                return Some(index);
            }
            if self.leaving.is_empty() {
                return None;
            }
            tokio::time::sleep(Duration::from_millis(MUSTER_REST_MS)).await;
        }
    }

    /// Whether its shard has sockets for its events.
    fn is_heard(&self, worker: Worker) -> bool {
        let table = self.fleet.load();
        let record = self.indexes.get(&worker).and_then(|index| table.worker(*index));
        record.is_some_and(|record| !record.trust.load().reasons.contains(TrustReason::NoEvents))
    }

    /// Says that a worker's events cannot be received, if so.
    fn hear(&self, worker: Worker, unheard: Option<Error>, trust: &TrustCell) {
        let Some(error) = unheard else { return };
        self.counters.bump(DaemonCounter::WorkersUnheard);
        tracing::error!(%worker, %error, "the worker's events cannot be received");
        let reasons = [TrustReason::NoEvents].into_iter().collect();
        trust.store(Trust { level: TrustLevel::None, reasons, ..trust.load() });
    }

    /// Why there is no room for one more publisher's connections.
    fn too_few_descriptors(&self) -> Option<Error> {
        let publishers = self.fleet.load().workers.iter().filter(|record| record.events.is_some()).count() + 1;
        let room = self.descriptors;
        let message = format!("{} open files are too few for {publishers} publishers", room.limit);
        (room.publishers_max < publishers).then(|| Error::new(Kind::System, message, "raise the limit (ulimit -n)"))
    }
}

/// Asks a shard's thread and waits for what it says.
async fn asked<T>(
    streams: &Streams,
    shard: ShardId,
    ask: impl Fn(&IngestHandle) -> Result<oneshot::Receiver<Result<T>>>,
) -> Result<T> {
    queued(streams, shard, ask).await?.await.map_err(|_| no_thread(shard))?
}

/// Asks a shard's thread, again while too many commands wait for it.
async fn queued<T>(
    streams: &Streams,
    shard: ShardId,
    ask: impl Fn(&IngestHandle) -> Result<oneshot::Receiver<T>>,
) -> Result<oneshot::Receiver<T>> {
    let stream = streams.of(shard).ok_or_else(|| no_thread(shard))?;
    loop {
        match ask(stream) {
            Err(error) if error.kind() == Kind::Overloaded && stream.is_running() => {
                tokio::time::sleep(Duration::from_millis(MUSTER_REST_MS)).await;
            }
            answer => return answer,
        }
    }
}

fn no_thread(shard: ShardId) -> Error {
    Error::new(Kind::Internal, format!("the ingest thread of shard {shard} is gone"), "restart the daemon")
}
