//! What is wrong with the fleet and the daemon, looked for every second beside the control thread.
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

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use rustix::process::{Resource, getrlimit};

use super::roster::Roster;
use super::sources::Sources;
use crate::finding::{Finding, Harm};
use crate::fleet::WorkerRecord;
use crate::ingest::WorkerView;
use crate::limits::{DIAGNOSIS_AGE_MS_MAX, DIAGNOSIS_EVERY_MS};
use crate::wire::SourceStatus;
use facts::{Facts, SpaceFacts, WorkerFacts};
use memory::{Memory, Moment, WorkerCounts};

/// Remembers what a diagnosis needs of earlier ones.
#[derive(Debug)]
pub(super) struct Doctor {
    sources: Arc<Sources>,
    started: Instant,
    /// Held while somebody looks.
    memory: Mutex<Memory>,
    /// What was found at the last look, for whoever asks from any thread.
    latest: ArcSwap<Diagnosis>,
    /// Who names workers, as of the last look.
    naming: Mutex<Vec<SourceStatus>>,
    /// Fields of the configuration whose change waits for the next start, as of the last look.
    pending: Mutex<Vec<&'static str>>,
}

/// What was found at one look.
#[derive(Debug, Default)]
struct Diagnosis {
    /// On the doctor's clock, milliseconds; `None` = nobody has looked yet.
    at_ms: Option<u64>,
    findings: Arc<[Finding]>,
}

impl Doctor {
    /// Diagnoses by these figures.
    pub(super) fn new(sources: &Arc<Sources>) -> Self {
        let (memory, naming, pending) = (Mutex::default(), Mutex::default(), Mutex::default());
        let latest = ArcSwap::default();
        Self { sources: Arc::clone(sources), started: Instant::now(), memory, latest, naming, pending }
    }

    /// What was wrong at the last look, the worst first.
    pub(super) fn latest(&self) -> Arc<[Finding]> {
        Arc::clone(&self.latest.load().findings)
    }

    /// What is wrong, the worst first, as of `DIAGNOSIS_AGE_MS_MAX` ago or later, or as of the last look while another
    /// thread looks.
    pub(super) fn findings(&self) -> Arc<[Finding]> {
        let now_ms = self.started.elapsed().as_millis() as u64;
        let latest = self.latest.load();
        let memory = match latest.at_ms {
            Some(at_ms) if now_ms.saturating_sub(at_ms) < DIAGNOSIS_AGE_MS_MAX => None,
            Some(_) => self.memory.try_lock(),
            None => Some(self.memory.lock()),
        };
        memory.map_or_else(|| Arc::clone(&latest.findings), |mut memory| self.look(&mut memory))
    }

    /// Looks at everything, which takes time in proportion to the fleet.
    fn look(&self, memory: &mut Memory) -> Arc<[Finding]> {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let (now_ms, now_unix_ms) = (self.started.elapsed().as_millis() as u64, unix.as_millis() as u64);
        let moment = Moment::read(&self.sources);
        let recent = memory.recent(&moment, now_ms);
        let clock_step_ms = memory.clock_step(now_ms, now_unix_ms);
        let (naming, pending) = (self.naming.lock().clone(), self.pending.lock().clone());
        let facts = Facts { naming, pending, ..facts(&self.sources, &moment, &recent, clock_step_ms) };
        let findings: Arc<[Finding]> = sign::findings(memory.since(rules::signs(&facts), now_ms, now_unix_ms)).into();
        self.latest.store(Arc::new(Diagnosis { at_ms: Some(now_ms), findings: Arc::clone(&findings) }));
        findings
    }
}

/// Looks again and again, and logs what begins. Returns only where a look panicked.
pub(super) async fn watch(doctor: &Arc<Doctor>, roster: &Roster) {
    let mut every = tokio::time::interval(Duration::from_millis(DIAGNOSIS_EVERY_MS));
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut said = BTreeSet::new();
    loop {
        every.tick().await;
        *doctor.naming.lock() = roster.sources();
        *doctor.pending.lock() = roster.pending();
        // On a thread beside: the control thread greets gateways meanwhile, however large the fleet is.
        let looking = Arc::clone(doctor);
        let look = move || looking.look(&mut looking.memory.lock());
        let Ok(findings) = tokio::task::spawn_blocking(look).await else { return };
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
