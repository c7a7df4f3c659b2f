//! What the admin socket tells about every worker.

use std::sync::Arc;

use arc_swap::Guard;

use super::exposition::Sources;
use super::service::Shared;
use crate::fleet::{FleetTable, WorkerRecord};
use crate::ingest::WorkerView;
use crate::load::Load;
use crate::metrics::{CoreCounter, CounterName, DaemonCounter, WorkerCounter};
use crate::serve::{AdminService, HelloInfo};
use crate::trust::TrustLevel;
use crate::wire::{StatusPage, WorkerStatus};

/// Answers administration from the tables the daemon runs on.
pub(super) struct Administration {
    pub(super) shared: Shared,
    pub(super) sources: Arc<Sources>,
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
        let from = (cursor as usize).min(table.workers.len());
        let to = from.saturating_add(limit).min(table.workers.len());
        let load = |record: &WorkerRecord| self.sources.loads.read(record.index);
        let page = table.workers[from..to].iter().zip(&self.sources.views[from..to]);
        StatusPage {
            workers: page.map(|(record, view)| worker_status(&table, record, view, load(record))).collect(),
            next_cursor: (to < table.workers.len()).then_some(to as u32),
            fleet_version: table.version,
            instance_id: self.shared.instance_id,
            uptime_ms: self.shared.now_ms(),
            counters: self.counters(),
        }
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
        cores.chain(daemon.map(|counter| (counter.name().to_owned(), self.sources.daemon.get(*counter)))).collect()
    }
}

fn worker_status(table: &FleetTable, record: &WorkerRecord, view: &WorkerView, load: Load) -> WorkerStatus {
    let trust = record.trust.load();
    // The remedy of the reason that costs most.
    let worst = trust.reasons.iter().min_by_key(|reason| reason.cap());
    let remedy = worst.filter(|_| trust.level != TrustLevel::Exact).map(|reason| reason.remedy().to_owned());
    // Not counters: they fall again. They are here so that bookings show in `kvrouted status`.
    let booked = [
        ("active_prefill_tokens", load.prefill_tokens),
        ("active_decode_blocks", load.decode_blocks),
        ("active_requests", load.requests),
    ];
    let booked = booked.into_iter().map(|(name, value)| (name.to_owned(), value));
    let named = WorkerCounter::ALL.iter().map(|counter| (counter.name().to_owned(), view.counters.get(*counter)));
    let reasons = view.undecodable_by_reason().map(|(reason, times)| (format!("undecodable_{reason}"), times));
    let oddities = view.oddities_by_name().map(|(oddity, times)| (format!("oddity_{oddity}"), times));
    WorkerStatus {
        worker: record.worker,
        space: record.space,
        model: table.space(record.space).map(|space| space.model.clone()).unwrap_or_default(),
        name: record.name.clone(),
        state: record.state,
        trust,
        blocks_held: view.gauges.bound(),
        blocks_by_tier: view.gauges.by_tier(),
        counters: named.chain(reasons).chain(oddities).chain(booked).collect(),
        remedy,
    }
}
