//! What is wrong with the fleet and the daemon, looked for every second on the control thread.
//!
//! ```text
//! tables and counters → facts → rules → signs → (since when, and for long enough) → findings
//! ```
//!
//! Only this file reads clocks and tables; the rest is pure. What is found is told by status, by
//! `kvrouted_finding` and, when it begins, by the log.

mod counts;
mod facts;
mod memory;
mod rules;
mod sign;
#[cfg(test)]
mod tests;
mod worker_rules;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use rustix::process::{Resource, getrlimit};

use super::roster::Roster;
use super::sources::Sources;
use crate::finding::{Finding, Harm};
use crate::fleet::WorkerRecord;
use crate::ingest::WorkerView;
use crate::limits::DIAGNOSIS_EVERY_MS;
use crate::wire::SourceStatus;
use facts::{Facts, SpaceFacts, WorkerFacts};
use memory::{Memory, Moment, WorkerCounts};

/// Remembers what a diagnosis needs of earlier ones.
#[derive(Debug)]
pub(super) struct Doctor {
    sources: Arc<Sources>,
    started: Instant,
    /// Taken by the control thread alone: nobody waits for it.
    memory: Mutex<Memory>,
    /// Who names workers, as of the last look.
    naming: Mutex<Vec<SourceStatus>>,
    /// Fields of the configuration whose change waits for the next start, as of the last look.
    pending: Mutex<Vec<&'static str>>,
}

impl Doctor {
    /// Diagnoses by these figures.
    pub(super) fn new(sources: &Arc<Sources>) -> Self {
        let (memory, naming, pending) = (Mutex::default(), Mutex::default(), Mutex::default());
        Self { sources: Arc::clone(sources), started: Instant::now(), memory, naming, pending }
    }

    /// What is wrong now, the worst first.
    pub(super) fn findings(&self) -> Vec<Finding> {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let (now_ms, now_unix_ms) = (self.started.elapsed().as_millis() as u64, unix.as_millis() as u64);
        let mut memory = self.memory.lock();
        let moment = Moment::read(&self.sources);
        let recent = memory.recent(&moment, now_ms);
        let clock_step_ms = memory.clock_step(now_ms, now_unix_ms);
        let (naming, pending) = (self.naming.lock().clone(), self.pending.lock().clone());
        let facts = Facts { naming, pending, ..facts(&self.sources, &moment, &recent, clock_step_ms) };
        sign::findings(memory.since(rules::signs(&facts), now_ms, now_unix_ms))
    }
}

/// Looks again and again, and logs what begins.
pub(super) async fn watch(doctor: &Doctor, roster: &Roster) {
    let mut every = tokio::time::interval(Duration::from_millis(DIAGNOSIS_EVERY_MS));
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut said = BTreeSet::new();
    loop {
        every.tick().await;
        *doctor.naming.lock() = roster.sources();
        *doctor.pending.lock() = roster.pending();
        let findings = doctor.findings();
        // What trust says of a worker is logged where it is found.
        let mut now = BTreeSet::new();
        for finding in findings.iter().filter(|finding| finding.harm > Harm::Note) {
            if now.insert(finding.name.clone()) && !said.contains(&finding.name) {
                let workers: Vec<String> = finding.workers.iter().take(8).map(ToString::to_string).collect();
                let (finding, what, remedy) = (&finding.name, &finding.what, &finding.remedy);
                tracing::warn!(%finding, workers = workers.join(","), %what, %remedy, "found");
            }
        }
        said = now;
    }
}

fn facts(sources: &Sources, moment: &Moment, recent: &Moment, clock_step_ms: i64) -> Facts {
    let table = sources.fleet.load();
    let spaces: Vec<SpaceFacts> = table
        .spaces
        .iter()
        .map(|space| SpaceFacts { id: space.id, model: space.model.clone(), scheme: space.scheme.get() })
        .collect();
    // Who came or went since the counters were read is looked at the next time.
    let views = sources.views.of(&table);
    let workers = views.iter().filter_map(|(record, view)| {
        let counts = (moment.workers.get(&record.index)?, recent.workers.get(&record.index)?);
        Some(worker(record, view, counts))
    });
    Facts {
        workers: workers.collect(),
        spaces,
        cores: recent.cores.clone(),
        daemon: recent.daemon.clone(),
        snapshots: recent.snapshots.clone(),
        open_files: open_files(),
        clock_step_ms,
        naming: Vec::new(),
        pending: Vec::new(),
    }
}

fn worker(record: &WorkerRecord, view: &WorkerView, (total, recent): (&WorkerCounts, &WorkerCounts)) -> WorkerFacts {
    WorkerFacts {
        worker: record.worker,
        space: record.space,
        state: record.state,
        trust: record.trust.load(),
        topic: record.events.as_ref().map(|events| events.topic.clone()),
        refused_scheme: view.refused_scheme.get(),
        blocks_held: view.gauges.bound(),
        messages_waiting: view.gauges.waiting(),
        choked: view.gauges.is_choked(),
        total: total.ingest.clone(),
        recent: recent.ingest.clone(),
        routed_total: total.route.clone(),
        routed_recent: recent.route.clone(),
    }
}

/// Open files of this process and their limit; `None` where the kernel does not tell.
fn open_files() -> Option<(u64, u64)> {
    let limit = getrlimit(Resource::Nofile).current?;
    Some((std::fs::read_dir("/proc/self/fd").ok()?.count() as u64, limit))
}
