//! The diagnosis of the fleet and the daemon, made every second beside the control thread.
//!
//! ```text
//! tables and counters → facts → rules → symptoms → (those that have lasted long enough, with their beginning) → findings
//! ```
//!
//! Only this file reads clocks, and only this file and `history` read tables; the rest is pure. `kvrouted status`, the
//! metric `kvrouted_finding` and, when a finding is new, the log show the findings.

mod facts;
mod findings;
mod history;
mod router_rules;
mod rules;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use rustix::process::{Resource, getrlimit};

use super::desired_fleet::DesiredFleet;
use super::sandboxed::SandboxCondition;
use super::service_manager::Condition;
use super::statistics::Statistics;
use super::watchdog_thread;
use crate::budget::Shed;
use crate::error::counted;
use crate::finding::{Finding, Harm};
use crate::fleet::WorkerRecord;
use crate::ingest::WorkerView;
use crate::limits::{DIAGNOSIS_AGE_MS_MAX, DIAGNOSIS_EVERY_MS};
use crate::route::Mode;
use crate::watchdog::ThreadMark;
use crate::wire::SourceStatus;
use facts::{Facts, MemoryCondition, SpaceCondition, ThreadCondition, WorkerCondition};
use history::{History, Moment, WorkerCounts};

/// Makes diagnoses, and remembers what the next one needs.
#[derive(Debug)]
pub(super) struct Doctor {
    statistics: Arc<Statistics>,
    started: Instant,
    /// Locked during a diagnosis.
    history: Mutex<History>,
    /// The latest diagnosis, for any thread.
    latest: ArcSwap<Diagnosis>,
    /// The sources of workers at the latest diagnosis.
    naming: Mutex<Vec<SourceStatus>>,
    /// Changed fields of the configuration that need a restart, at the latest diagnosis.
    pending: Mutex<Vec<&'static str>>,
}

/// The findings of one moment.
#[derive(Debug, Default)]
struct Diagnosis {
    /// Milliseconds of the doctor's clock; `None` = there was no diagnosis yet.
    at_ms: Option<u64>,
    findings: Arc<[Finding]>,
}

impl Doctor {
    /// Diagnoses from these statistics.
    pub(super) fn new(statistics: &Arc<Statistics>) -> Self {
        let (history, naming, pending) = (Mutex::default(), Mutex::default(), Mutex::default());
        let latest = ArcSwap::default();
        Self { statistics: Arc::clone(statistics), started: Instant::now(), history, latest, naming, pending }
    }

    /// The findings of the latest diagnosis, the worst first.
    pub(super) fn latest(&self) -> Arc<[Finding]> {
        Arc::clone(&self.latest.load().findings)
    }

    /// How the daemon is, for its service manager.
    pub(super) fn condition(&self) -> Condition {
        let (statistics, findings) = (&self.statistics, self.latest());
        let (is_ready, is_alive) = (statistics.is_ready(), !statistics.watchlist.is_stalled());
        let workers = counted(statistics.fleet.load().workers.len(), "worker");
        let wrong = findings.iter().filter(|finding| finding.harm > Harm::Note).count();
        let state = if is_ready { "ready" } else { "not ready" };
        let status = match wrong {
            0 => format!("{state}: {workers}"),
            wrong => format!("{state}: {workers}, {}; see kvrouted doctor", counted(wrong, "finding")),
        };
        Condition { is_ready, is_alive, status }
    }

    /// Findings that are at most `DIAGNOSIS_AGE_MS_MAX` old, the worst first. While another thread diagnoses, those of
    /// the diagnosis before.
    pub(super) fn findings(&self) -> Arc<[Finding]> {
        let now_ms = self.started.elapsed().as_millis() as u64;
        let latest = self.latest.load();
        let history = match latest.at_ms {
            Some(at_ms) if now_ms.saturating_sub(at_ms) < DIAGNOSIS_AGE_MS_MAX => None,
            Some(_) => self.history.try_lock(),
            None => Some(self.history.lock()),
        };
        history.map_or_else(|| Arc::clone(&latest.findings), |mut history| self.diagnose(&mut history))
    }

    /// Makes a diagnosis, which takes time in proportion to the fleet.
    fn diagnose(&self, history: &mut History) -> Arc<[Finding]> {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let (now_ms, now_unix_ms) = (self.started.elapsed().as_millis() as u64, unix.as_millis() as u64);
        let moment = Moment::read(&self.statistics);
        let recent = history.recent(&moment, now_ms);
        let clock_step_ms = history.clock_step(now_ms, now_unix_ms);
        let (naming, pending) = (self.naming.lock().clone(), self.pending.lock().clone());
        let facts = Facts { naming, pending, ..facts(&self.statistics, &moment, &recent, clock_step_ms) };
        let findings: Arc<[Finding]> =
            findings::findings(history.since(rules::symptoms(&facts), now_ms, now_unix_ms)).into();
        self.latest.store(Arc::new(Diagnosis { at_ms: Some(now_ms), findings: Arc::clone(&findings) }));
        findings
    }
}

/// Diagnoses again and again, and logs new findings. Returns only if a diagnosis panicked.
pub(super) async fn watch(doctor: &Arc<Doctor>, desired: &DesiredFleet) {
    let mut every = tokio::time::interval(Duration::from_millis(DIAGNOSIS_EVERY_MS));
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut logged = BTreeSet::new();
    loop {
        every.tick().await;
        *doctor.naming.lock() = desired.sources();
        *doctor.pending.lock() = desired.pending();
        // On another thread, so that the control thread accepts gateways meanwhile, however large the fleet is.
        let diagnosing = Arc::clone(doctor);
        let diagnose = move || diagnosing.diagnose(&mut diagnosing.history.lock());
        let Ok(findings) = tokio::task::spawn_blocking(diagnose).await else { return };
        // Notes are not logged here: changes of a worker's trust are logged where they happen.
        let mut now = BTreeSet::new();
        for finding in findings.iter().filter(|finding| finding.harm > Harm::Note) {
            if now.insert(finding.name.clone()) && !logged.contains(&finding.name) {
                let workers: Vec<String> = finding.workers.iter().take(8).map(ToString::to_string).collect();
                let (finding, what, remedy) = (&finding.name, &finding.what, &finding.remedy);
                tracing::warn!(%finding, workers = workers.join(","), %what, %remedy, "finding");
            }
        }
        logged = now;
    }
}

fn facts(statistics: &Statistics, moment: &Moment, recent: &Moment, clock_step_ms: i64) -> Facts {
    let table = statistics.fleet.load();
    let spaces: Vec<SpaceCondition> = table
        .spaces
        .iter()
        .map(|space| SpaceCondition { id: space.id, model: space.model.clone(), scheme: space.scheme.get() })
        .collect();
    // Workers added or removed since the counters were read are part of the next diagnosis.
    let views = statistics.views.of(&table);
    let workers = views.iter().filter_map(|(record, view)| {
        let counts = (moment.workers.get(&record.index)?, recent.workers.get(&record.index)?);
        Some(worker(record, view, counts))
    });
    let open_files = open_files();
    statistics.open_files.open.set(open_files.map_or(0, |(open, _)| open));
    Facts {
        workers: workers.collect(),
        spaces,
        cores: recent.cores.clone(),
        daemon: recent.daemon.clone(),
        snapshots: recent.snapshots.clone(),
        remote: recent.remote.clone(),
        traces: recent.traces.clone(),
        decides_by_latency: statistics.policies.load().has_mode(Mode::Latency),
        prefill_classes: statistics.loads.prefill_classes(),
        open_files,
        memory: memory(statistics),
        numa_nodes: statistics.numa_nodes.clone(),
        threads_stalled: stalled(statistics),
        clock_step_ms,
        sandbox: SandboxCondition::now(),
        routers: statistics.routers.shown(),
        naming: Vec::new(),
        pending: Vec::new(),
    }
}

fn worker(
    record: &WorkerRecord,
    view: &WorkerView,
    (total, recent): (&WorkerCounts, &WorkerCounts),
) -> WorkerCondition {
    WorkerCondition {
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

fn memory(statistics: &Statistics) -> MemoryCondition {
    let (memory, all) = (&statistics.memory, Shed::ALL.iter().copied());
    MemoryCondition { used_bytes: memory.used_bytes(), shed: all.filter(|shed| memory.flags.has(*shed)).collect() }
}

fn stalled(statistics: &Statistics) -> Vec<ThreadCondition> {
    let table = statistics.fleet.load();
    let marks = statistics.watchlist.marks();
    let condition = |mark: &Arc<ThreadMark>| ThreadCondition {
        name: mark.name().to_owned(),
        is_vital: mark.is_vital(),
        activity: watchdog_thread::describe(mark.stalled_in(), &table),
    };
    marks.iter().filter(|mark| mark.stalled_ms() > 0).map(condition).collect()
}

/// Open files of this process and their limit; `None` = the kernel does not tell.
fn open_files() -> Option<(u64, u64)> {
    let limit = getrlimit(Resource::Nofile).current?;
    Some((std::fs::read_dir("/proc/self/fd").ok()?.count() as u64, limit))
}
