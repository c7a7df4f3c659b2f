//! Reconciles the fleet with the desired fleet, one step after another, while serving threads go on.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::oneshot;

use super::desired_fleet::DesiredFleet;
use super::ingest_threads::IngestThreads;
use super::snapshots::Snapshots;
use super::statistics::{Statistics, WorkerViews};
use super::worker_records::WorkerRecords;
use crate::config::{Config, WorkerConfig};
use crate::discovery::{Step, plan};
use crate::endpoint::Endpoint;
use crate::error::{Error, Kind, Result};
use crate::fleet::{Fleet, PlaceAllocator, TrustCell, WorkerRecord};
use crate::ids::{ShardId, SpaceId, Worker, WorkerIndex};
use crate::ingest::descriptors::Descriptors;
use crate::ingest::{
    AddWorker, IngestHandle, LoadListener, LoadSource, RemoveWorker, UpdateWorker, WorkerAccepted, WorkerView,
};
use crate::limits::{BOOKINGS_LEAVING_PER_LOCK_MAX, KEPT_BOOKINGS_PER_LOCK_MAX, RECONCILE_RETRY_MS};
use crate::load::Loads;
use crate::metrics::{CounterSet, DaemonCounter, LoadReportCounter};
use crate::trust::{Trust, TrustLevel, TrustReason};

/// The tables that a change of the fleet touches, and the workers in them.
pub(super) struct FleetReconciler {
    fleet: Arc<Fleet>,
    loads: Arc<Loads>,
    views: Arc<WorkerViews>,
    counters: Arc<CounterSet<DaemonCounter>>,
    load_reports: Arc<CounterSet<LoadReportCounter>>,
    listener: Arc<LoadListener>,
    records: WorkerRecords,
    snapshots: Snapshots,
    places: PlaceAllocator,
    /// Every worker as it is now, also those that were refused: they are tried again when they change, or as the next two
    /// fields say.
    present: BTreeMap<Worker, WorkerConfig>,
    /// Workers that were refused for want of a place: they are tried again when one is free.
    refused: BTreeSet<Worker>,
    /// Workers whose events are not received for want of open files: they are added anew when others need fewer.
    unsubscribed: BTreeSet<Worker>,
    /// Whether a place has become free since refused workers were tried.
    has_new_room: bool,
    indexes: BTreeMap<Worker, WorkerIndex>,
    /// Removed workers that the index may still hold. Their places are not free yet.
    leaving: Vec<(WorkerIndex, oneshot::Receiver<()>)>,
    /// The limit of publishers.
    descriptors: Descriptors,
}

impl FleetReconciler {
    /// Begins with the workers of `config`.
    pub(super) fn new(
        (config, descriptors): (&Config, Descriptors),
        (records, places): (WorkerRecords, PlaceAllocator),
        (snapshots, listener): (&Snapshots, &Arc<LoadListener>),
        statistics: &Statistics,
    ) -> Self {
        let fleet = statistics.fleet.load();
        let is_unsubscribed = |record: &&WorkerRecord| record.events.is_some() && !is_heard(record);
        // More publishers than the limit: those that the start left out are not heard.
        let unsubscribed = match fleet.workers.iter().filter(|record| record.events.is_some()).count() {
            publishers if publishers > descriptors.publishers_max => {
                fleet.workers.iter().filter(is_unsubscribed).map(|record| record.worker).collect()
            }
            _ => BTreeSet::new(),
        };
        drop(fleet);
        let indexes = statistics.fleet.load().workers.iter().map(|record| (record.worker, record.index)).collect();
        Self {
            fleet: Arc::clone(&statistics.fleet),
            loads: Arc::clone(&statistics.loads),
            views: Arc::clone(&statistics.views),
            counters: Arc::clone(&statistics.daemon),
            load_reports: Arc::clone(&statistics.load_reports),
            listener: Arc::clone(listener),
            records,
            snapshots: snapshots.clone(),
            places,
            present: config.workers.iter().map(|worker| (worker.worker, worker.clone())).collect(),
            refused: BTreeSet::new(),
            unsubscribed,
            has_new_room: false,
            indexes,
            leaving: Vec::new(),
            descriptors,
        }
    }

    /// Follows the desired fleet, for ever.
    pub(super) async fn run(mut self, desired: &DesiredFleet, ingest_threads: &IngestThreads) {
        let mut changes = desired.changes();
        self.listen();
        loop {
            changes.mark_unchanged();
            let steps = plan(&self.present, desired.merge().merged());
            let changed = !steps.is_empty();
            for step in steps {
                self.take(step, desired, ingest_threads).await;
            }
            if changed {
                self.hear_more(desired, ingest_threads).await;
                self.listen();
            }
            while !self.leaving.is_empty() && !changes.has_changed().unwrap_or(true) {
                self.settle();
                tokio::time::sleep(Duration::from_millis(RECONCILE_RETRY_MS)).await;
            }
            if self.try_refused() {
                continue;
            }
            if changes.changed().await.is_err() {
                // Cannot happen: the caller holds the desired fleet.
                std::future::pending::<()>().await;
            }
        }
    }

    async fn take(&mut self, step: Step, desired: &DesiredFleet, ingest_threads: &IngestThreads) {
        match step {
            Step::Remove(worker) => self.remove(worker, ingest_threads).await,
            // It has no sockets that others could get meanwhile.
            Step::Change { config, resubscribe } if resubscribe && !self.receives_events(config.worker) => {
                self.remove(config.worker, ingest_threads).await;
                self.add(config, desired, ingest_threads).await;
            }
            Step::Change { config, resubscribe } => self.change(config, resubscribe, desired, ingest_threads).await,
            Step::Add(config) => self.add(config, desired, ingest_threads).await,
        }
    }

    /// Whether refused workers are to be tried again. The next plan adds them.
    fn try_refused(&mut self) -> bool {
        let is_tried = std::mem::take(&mut self.has_new_room) && !self.refused.is_empty();
        if is_tried {
            let refused = std::mem::take(&mut self.refused);
            self.present.retain(|worker, _| !refused.contains(worker));
        }
        is_tried
    }

    /// Adds workers anew that had too few open files for their events, as long as there are enough.
    async fn hear_more(&mut self, desired: &DesiredFleet, ingest_threads: &IngestThreads) {
        while self.too_few_descriptors().is_none()
            && let Some(worker) = self.unsubscribed.pop_first()
        {
            if let Some(config) = self.present.get(&worker).filter(|_| !self.receives_events(worker)).cloned() {
                self.remove(worker, ingest_threads).await;
                self.add(config, desired, ingest_threads).await;
            }
        }
    }

    async fn add(&mut self, config: WorkerConfig, desired: &DesiredFleet, ingest_threads: &IngestThreads) {
        let (worker, source) = (config.worker, desired.source_of(config.worker));
        self.present.insert(worker, config.clone());
        let Some(index) = self.place().await else {
            self.refused.insert(worker);
            self.counters.bump(DaemonCounter::WorkersRefusedFull);
            tracing::error!(%worker, source, "worker refused: the daemon has as many workers as it can hold");
            return;
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let record = self.records.record(&config, index, now.as_millis() as u64);
        let view = Arc::new(WorkerView::new(Arc::clone(&record.trust)));
        let (shard, trust) = (record.shard, Arc::clone(&record.trust));
        let mut no_events = None;
        let publisher = self.records.publisher(&record, &view).filter(|_| {
            no_events = self.too_few_descriptors();
            no_events.is_none()
        });
        if no_events.is_some() {
            self.unsubscribed.insert(worker);
        }
        self.views.put(index, view);
        self.loads.admit(index);
        self.loads.set_prefill(index, config.prefill);
        self.records.join_class(index, &config);
        let newcomer = match &publisher {
            Some(_) => {
                let newcomer = self.snapshots.of_newcomer(&self.fleet.load(), &record);
                newcomer.await
            }
            None => None,
        };
        let load = newcomer.as_ref().map(|newcomer| newcomer.load.clone());
        let command = AddWorker { record, blocks_max: config.blocks_max, publisher, load };
        let answer = asked(ingest_threads, shard, |thread| thread.add_worker(command.clone())).await;
        drop(command);
        if let Some(Err(error)) = newcomer.map(|newcomer| self.snapshots.feed_newcomer(newcomer)) {
            tracing::warn!(%worker, %error, "the worker's snapshot is not loaded");
        }
        match answer {
            Ok(WorkerAccepted { no_events: refused }) => {
                self.indexes.insert(worker, index);
                self.counters.bump(DaemonCounter::WorkersAdded);
                tracing::info!(%worker, source, name = config.name, "worker added");
                self.place_absent(worker, (index, config.space)).await;
                self.note_no_events(worker, no_events.or(refused), &trust);
            }
            Err(error) => {
                self.views.take(index);
                self.loads.leave(index);
                self.places.give_back(index);
                if error.kind() == Kind::Overloaded {
                    self.refused.insert(worker);
                }
                self.counters.bump(DaemonCounter::WorkersRefusedFull);
                tracing::error!(%worker, source, %error, "worker refused");
            }
        }
    }

    /// Adds bookings of an earlier run, which waited for the worker, to its load.
    async fn place_absent(&self, worker: Worker, place: (WorkerIndex, SpaceId)) {
        while self.loads.place_absent(worker, place, KEPT_BOOKINGS_PER_LOCK_MAX) == KEPT_BOOKINGS_PER_LOCK_MAX {
            tokio::task::yield_now().await;
        }
    }

    async fn change(
        &mut self,
        config: WorkerConfig,
        resubscribe: bool,
        desired: &DesiredFleet,
        ingest_threads: &IngestThreads,
    ) {
        let (worker, source) = (config.worker, desired.source_of(config.worker));
        let held = self.indexes.get(&worker).and_then(|index| self.fleet.load().worker(*index).cloned());
        let Some(held) = held else {
            // It could not be taken in as it was.
            self.present.remove(&worker);
            return self.add(config, desired, ingest_threads).await;
        };
        let trust = Arc::clone(&held.trust);
        let record = self.records.changed(&config, held.index, held.shard, held.slot, held.trust);
        let command = UpdateWorker { record, blocks_max: config.blocks_max, resubscribe };
        self.present.insert(worker, config.clone());
        match asked(ingest_threads, held.shard, |thread| thread.update_worker(command.clone())).await {
            Ok(WorkerAccepted { no_events }) => {
                self.loads.set_prefill(held.index, config.prefill);
                self.records.join_class(held.index, &config);
                self.counters.bump(DaemonCounter::WorkersChanged);
                if resubscribe {
                    self.counters.bump(DaemonCounter::WorkersEmptied);
                }
                tracing::info!(%worker, source, resubscribe, "worker changed");
                if resubscribe {
                    self.note_no_events(worker, no_events, &trust);
                }
            }
            Err(error) => tracing::error!(%worker, source, %error, "worker not changed"),
        }
    }

    /// Removes a worker: from the table, so that it is not chosen; from the loads, so that it is not booked; and from
    /// its shard, which frees its blocks once no reader can see them.
    async fn remove(&mut self, worker: Worker, ingest_threads: &IngestThreads) {
        self.present.remove(&worker);
        self.refused.remove(&worker);
        self.unsubscribed.remove(&worker);
        let Some(index) = self.indexes.remove(&worker) else { return };
        let Some(record) = self.fleet.load().worker(index).cloned() else { return };
        self.fleet.update(|table| table.take(index).is_some());
        let gone_since = self.fleet.load().version;
        self.loads.leave(index);
        let command = RemoveWorker { index, space: record.space, slot: record.slot, table_version: gone_since };
        match queued(ingest_threads, record.shard, |thread| thread.remove_worker(command)).await {
            Ok(gone) => self.leaving.push((index, gone)),
            Err(error) => tracing::error!(%worker, %error, "the shard of a removed worker still holds it"),
        }
        let bookings = self.end_bookings(index).await;
        self.views.take(index);
        self.counters.bump(DaemonCounter::WorkersRemoved);
        tracing::info!(%worker, name = record.name, bookings, "worker removed");
    }

    async fn end_bookings(&self, index: WorkerIndex) -> u64 {
        let (mut bookings, mut from) = (0, Some(0));
        while let Some(at) = from {
            let ended = self.loads.end_of(index, at, BOOKINGS_LEAVING_PER_LOCK_MAX);
            (bookings, from) = (bookings + ended.ended, ended.next);
            tokio::task::yield_now().await;
        }
        self.counters.add(DaemonCounter::BookingsEndedWorkerRemoved, bookings);
        bookings
    }

    /// Frees the places of workers that no reader can see any more.
    fn settle(&mut self) {
        let (places, has_new_room) = (&mut self.places, &mut self.has_new_room);
        self.leaving.retain_mut(|(index, gone)| match gone.try_recv() {
            Ok(()) => {
                places.give_back(*index);
                *has_new_room = true;
                false
            }
            // A thread that ended never answers, so that place stays taken.
            Err(error) => error == oneshot::error::TryRecvError::Empty,
        });
    }

    /// Tells the load listener which workers publish loads.
    fn listen(&self) {
        let publish = self.present.values().filter_map(|config| Some((config, config.load.clone()?)));
        let source = |(config, endpoint): (&WorkerConfig, Endpoint)| {
            let index = *self.indexes.get(&config.worker)?;
            let scheme = self.records.scheme_of(config.space)?;
            Some(LoadSource { index, worker: config.worker, endpoint, scheme })
        };
        let mut sources: Vec<_> = publish.filter_map(source).collect();
        let event_publishers = self.fleet.load().workers.iter().filter(|record| record.events.is_some()).count();
        let limits = self.descriptors;
        // Events come first: without them prefixes are missed, without a load only its report is.
        for refused in sources.split_off(limits.publishers_max.saturating_sub(event_publishers).min(sources.len())) {
            self.load_reports.bump(LoadReportCounter::SourcesRefused);
            let (worker, limit) = (refused.worker, limits.limit);
            tracing::error!(%worker, limit, "too few open files to receive the worker's load: raise the limit (ulimit -n)");
        }
        if let Err(error) = self.listener.follow(sources) {
            tracing::error!(%error, "the load listener goes on with the workers it had");
        }
    }

    /// A free place. Waits for places that are about to be free.
    async fn place(&mut self) -> Option<WorkerIndex> {
        loop {
            self.settle();
            if let Some(index) = self.places.take() {
                return Some(index);
            }
            if self.leaving.is_empty() {
                return None;
            }
            tokio::time::sleep(Duration::from_millis(RECONCILE_RETRY_MS)).await;
        }
    }

    /// Whether its shard has sockets for its events.
    fn receives_events(&self, worker: Worker) -> bool {
        let table = self.fleet.load();
        let record = self.indexes.get(&worker).and_then(|index| table.worker(*index));
        record.is_some_and(is_heard)
    }

    /// Logs and marks a worker whose events cannot be received.
    fn note_no_events(&self, worker: Worker, cause: Option<Error>, trust: &TrustCell) {
        let Some(error) = cause else { return };
        self.counters.bump(DaemonCounter::WorkersUnheard);
        tracing::error!(%worker, %error, "the worker's events cannot be received");
        let reasons = [TrustReason::NoEvents].into_iter().collect();
        trust.store(Trust { level: TrustLevel::None, reasons, ..trust.load() });
    }

    /// The error if one more publisher's connections are beyond the limit of open files.
    fn too_few_descriptors(&self) -> Option<Error> {
        let has_sockets = |record: &&WorkerRecord| record.events.is_some() && is_heard(record);
        let publishers = self.fleet.load().workers.iter().filter(has_sockets).count() + 1;
        let limits = self.descriptors;
        let message = format!("{} open files are too few for {publishers} publishers", limits.limit);
        (limits.publishers_max < publishers).then(|| Error::new(Kind::System, message, "raise the limit (ulimit -n)"))
    }
}

/// Whether the worker's shard has sockets for its events, if it publishes any.
fn is_heard(record: &WorkerRecord) -> bool {
    !record.trust.load().reasons.contains(TrustReason::NoEvents)
}

/// Sends a command to a shard's thread and waits for the answer.
async fn asked<T>(
    ingest_threads: &IngestThreads,
    shard: ShardId,
    ask: impl Fn(&IngestHandle) -> Result<oneshot::Receiver<Result<T>>>,
) -> Result<T> {
    queued(ingest_threads, shard, ask).await?.await.map_err(|_| no_thread(shard))?
}

/// Sends a command to a shard's thread; retries while too many commands wait for it.
async fn queued<T>(
    ingest_threads: &IngestThreads,
    shard: ShardId,
    ask: impl Fn(&IngestHandle) -> Result<oneshot::Receiver<T>>,
) -> Result<oneshot::Receiver<T>> {
    let thread = ingest_threads.of(shard).ok_or_else(|| no_thread(shard))?;
    loop {
        match ask(thread) {
            Err(error) if error.kind() == Kind::Overloaded && thread.is_running() => {
                tokio::time::sleep(Duration::from_millis(RECONCILE_RETRY_MS)).await;
            }
            answer => return answer,
        }
    }
}

fn no_thread(shard: ShardId) -> Error {
    Error::new(Kind::Internal, format!("the ingest thread of shard {shard} is gone"), "restart the daemon")
}
