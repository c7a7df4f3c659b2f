//! What the admin socket tells about every worker.

use std::rc::Rc;
use std::sync::Arc;

use arc_swap::Guard;

use super::exposition::Sources;
use super::roster::Roster;
use super::service::Shared;
use super::snapshots::Snapshots;
use super::streams::Streams;
use crate::error::{Error, Kind, Result};
use crate::fleet::{FleetTable, WorkerRecord};
use crate::ids::Worker;
use crate::ingest::WorkerView;
use crate::load::Load;
use crate::metrics::{CoreCounter, CounterName, DaemonCounter, PredictorCounter, SnapshotCounter, WorkerCounter};
use crate::serve::{AdminService, HelloInfo};
use crate::trust::{TrustLevel, TrustReason};
use crate::wire::{ResetDone, StatusPage, WorkerChange, WorkerStatus};

/// What to do where events wait for memory that the index cannot free.
const CHOKED_REMEDY: &str = "the index cannot free memory because a query does not end, and events wait: find the core \
                             thread that stands still (a stopped or starved process), or restart the daemon";

/// Answers administration from the tables the daemon runs on.
pub(super) struct Administration {
    pub(super) shared: Shared,
    pub(super) sources: Arc<Sources>,
    pub(super) roster: Rc<Roster>,
    pub(super) streams: Arc<Streams>,
    pub(super) snapshots: Snapshots,
}

impl AdminService for Administration {
    fn hello(&self) -> HelloInfo<'_> {
        self.shared.hello()
    }

    fn fleet(&self) -> Guard<Arc<FleetTable>> {
        self.shared.fleet.load()
    }

    fn status_page(&self, cursor: u32, limit: usize) -> StatusPage {
        let table = self.shared.fleet.load();
        let mut rest = self.sources.views.of(&table);
        rest.retain(|(record, _)| record.index.place() >= cursor as usize);
        let load = |record: &WorkerRecord| self.sources.loads.read(record.index);
        let status = |(record, view): &(&WorkerRecord, Arc<WorkerView>)| WorkerStatus {
            source: self.roster.source_of(record.worker),
            ..worker_status(&table, record, view, load(record))
        };
        StatusPage {
            workers: rest.iter().take(limit).map(status).collect(),
            next_cursor: rest.get(limit).map(|(record, _)| record.index.place() as u32),
            sources: if cursor == 0 { self.roster.sources() } else { Vec::new() },
            fleet_version: table.version,
            instance_id: self.shared.instance_id,
            uptime_ms: self.shared.now_ms(),
            counters: self.counters(),
        }
    }

    fn change_worker(&self, change: &WorkerChange<'_>) -> Result<u32> {
        self.roster.change(change)
    }

    fn reset(&self, worker: Option<Worker>) -> Result<ResetDone> {
        let table = self.shared.fleet.load();
        let one = worker.map(|worker| {
            let record = table.workers.iter().find(|record| record.worker == worker);
            record.map(|record| (record.shard, worker)).ok_or_else(|| {
                let what = format!("there is no worker {worker}");
                Error::new(Kind::InvalidArgument, what, "ask `kvrouted status` for the workers there are")
            })
        });
        let one = one.transpose()?;
        // In this order: a snapshot that is begun after the removal is one of an emptied worker.
        self.streams.reset(one)?;
        let snapshots = self.snapshots.remove(worker)? as u32;
        let workers = one.map_or(table.workers.iter().filter(|record| record.events.is_some()).count(), |_| 1) as u32;
        tracing::info!(workers, snapshots, "reset, as was asked for");
        Ok(ResetDone { workers, snapshots })
    }
}

impl Administration {
    /// The daemon's own counters, cores summed.
    fn counters(&self) -> Vec<(String, u64)> {
        let cores = CoreCounter::ALL.iter().map(|counter| {
            let sum = self.sources.cores.iter().map(|core| core.counters.get(*counter)).sum();
            (counter.name().to_owned(), sum)
        });
        let daemon = DaemonCounter::ALL.iter();
        let daemon = daemon.map(|counter| (counter.name().to_owned(), self.sources.daemon.get(*counter)));
        let predicting = &self.sources.predicting.counters;
        let predictor = PredictorCounter::ALL.iter();
        let predictor = predictor.map(|counter| (counter.name().to_owned(), predicting.get(*counter)));
        let snapshots = &self.sources.snapshots;
        let kept = SnapshotCounter::ALL.iter();
        let kept = kept.map(|counter| (counter.name().to_owned(), snapshots.counters.get(*counter)));
        let refused = snapshots.refused().map(|(reason, times)| (format!("snapshot_{reason}"), times));
        cores.chain(daemon).chain(predictor).chain(kept).chain(refused).collect()
    }
}

fn worker_status(table: &FleetTable, record: &WorkerRecord, view: &WorkerView, load: Load) -> WorkerStatus {
    let trust = record.trust.load();
    // The remedy of the reason that costs most.
    let worst = trust.reasons.iter().min_by_key(|reason| reason.cap());
    let remedy = worst.filter(|_| trust.level != TrustLevel::Exact).map(TrustReason::remedy);
    // Behind by more every moment, whatever else is the matter.
    let remedy = if view.gauges.is_choked() { Some(CHOKED_REMEDY) } else { remedy };
    // Not counters: they fall again. They are here so that they show in `kvrouted status`.
    let now = [
        ("choked", u64::from(view.gauges.is_choked())),
        ("active_prefill_tokens", load.prefill_tokens),
        ("active_decode_blocks", load.decode_blocks),
        ("active_requests", load.requests),
    ];
    let now = now.into_iter().map(|(name, value)| (name.to_owned(), value));
    let named = WorkerCounter::ALL.iter().map(|counter| (counter.name().to_owned(), view.counters.get(*counter)));
    let reasons = view.undecodable_by_reason().map(|(reason, times)| (format!("undecodable_{reason}"), times));
    let oddities = view.oddities_by_name().map(|(oddity, times)| (format!("oddity_{oddity}"), times));
    let unruled = view.unruled.iter().map(|(of, name, times)| (format!("unruled_{}_{name}", of.name()), times));
    let others = Some(view.unruled.others()).filter(|times| *times > 0);
    let unruled = unruled.chain(others.map(|times| ("unruled_others".to_owned(), times)));
    let aborted = view.transfers_aborted_by_reason();
    let aborted = aborted.map(|(reason, times)| (format!("transfer_aborted_{reason}"), times));
    WorkerStatus {
        worker: record.worker,
        space: record.space,
        model: table.space(record.space).map(|space| space.model.clone()).unwrap_or_default(),
        name: record.name.clone(),
        state: record.state,
        trust,
        blocks_held: view.gauges.bound(),
        blocks_by_tier: view.gauges.by_tier(),
        counters: named.chain(reasons).chain(oddities).chain(unruled).chain(aborted).chain(now).collect(),
        remedy: remedy.map(str::to_owned),
        source: String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::{DeviceClass, TrustCell, WorkerState};
    use crate::ids::{ShardId, SpaceId, WorkerIndex, WorkerSlot};
    use crate::ingest::AbortReason;
    use crate::trust::Trust;

    fn record(trust: Trust) -> WorkerRecord {
        WorkerRecord {
            index: WorkerIndex(0),
            worker: Worker::new(1, 0),
            space: SpaceId(0),
            name: "w1".into(),
            shard: ShardId(0),
            slot: WorkerSlot(0),
            capacity_blocks: 0,
            batched_tokens_max: 1,
            device_class: DeviceClass::Gpu,
            weight: 1.0,
            taints: Vec::new(),
            state: WorkerState::Ready,
            trust: Arc::new(TrustCell::new(trust)),
            events: None,
        }
    }

    #[test]
    fn events_that_wait_blocks_refused_and_broken_dumps_are_told_with_a_remedy() {
        let exact = Trust { level: TrustLevel::Exact, ..Trust::default() };
        let full = [TrustReason::MemoryBound].into_iter().collect();
        let full = Trust { level: TrustLevel::LowerBound, reasons: full, ..Trust::default() };
        for (trust, choked, remedy) in [
            (exact, false, None),
            (full, false, Some(TrustReason::MemoryBound.remedy())),
            (exact, true, Some(CHOKED_REMEDY)),
            (full, true, Some(CHOKED_REMEDY)),
        ] {
            let record = record(trust);
            let view = WorkerView::new(Arc::clone(&record.trust));
            view.gauges.set_choked(choked);
            view.counters.bump(WorkerCounter::StoresMemoryBound);
            view.transfers_aborted.add(AbortReason::Overflow as usize, 2);
            let status = worker_status(&FleetTable::default(), &record, &view, Load::default());
            assert_eq!(status.remedy.as_deref(), remedy);
            let count = |name: &str| status.counters.iter().find(|(of, _)| of == name).map(|(_, value)| *value);
            assert_eq!(count("choked"), Some(u64::from(choked)));
            assert_eq!((count("transfer_aborted_overflow"), count("stores_memory_bound")), (Some(2), Some(1)));
        }
    }
}
