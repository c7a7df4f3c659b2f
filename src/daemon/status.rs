//! The answers of the admin socket.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::sync::Arc;

use arc_swap::Guard;
use tokio::task::spawn_blocking;

use super::audit_texts;
use super::desired_fleet::DesiredFleet;
use super::doctor::Doctor;
use super::ingest_threads::IngestThreads;
use super::other_routers;
use super::process_exposition;
use super::running_config::RunningConfig;
use super::sandboxed;
use super::snapshots::Snapshots;
use super::statistics::{OthersPart, Statistics};
use crate::audit;
use crate::error::{Error, Kind, Result};
use crate::finding::Finding;
use crate::fleet::{FleetTable, WorkerRecord};
use crate::ids::{Tier, Worker};
use crate::ingest::{ResetScope, WorkerView};
use crate::limits::FINDING_WORKERS_MAX;
use crate::load::PrefillClass;
use crate::metrics::{CoreCounter, CounterName, CounterSet, DaemonCounter, LATENCY_COUNTER_PREFIX, RouteCounter};
use crate::requests::{HelloInfo, RequestTables, policy_with_settings};
use crate::serve::{AdminAnswer, AdminCaller, AdminService};
use crate::wire::{AdminReply, AdminRequest, PolicyDone, PolicyOrder, ResetDone, ResetOrder, StatusPage, WorkerStatus};

/// Answers administration from the daemon's tables.
pub(super) struct Administration {
    tables: RequestTables,
    statistics: Arc<Statistics>,
    doctor: Arc<Doctor>,
    desired: Rc<DesiredFleet>,
    ingest_threads: Arc<IngestThreads>,
    snapshots: Snapshots,
    running: Rc<RunningConfig>,
}

impl AdminService for Administration {
    fn hello(&self) -> HelloInfo<'_> {
        self.tables.hello()
    }

    fn fleet(&self) -> Guard<Arc<FleetTable>> {
        self.tables.fleet.load()
    }

    fn answer(self: Rc<Self>, caller: AdminCaller, request: &AdminRequest<'_>) -> Result<AdminAnswer> {
        Ok(match *request {
            AdminRequest::Status { cursor, limit } => AdminAnswer::Later(Box::pin(async move {
                let doctor = Arc::clone(&self.doctor);
                // A diagnosis takes time in proportion to the fleet. Should it panic, the watch ends the daemon soon.
                let findings = spawn_blocking(move || doctor.findings()).await;
                let findings = findings.unwrap_or_else(|_| self.doctor.latest());
                Ok(AdminReply::Status(self.status_page(cursor, limit as usize, &findings)))
            })),
            AdminRequest::ChangeWorker(change) => {
                AdminAnswer::Now(AdminReply::ChangeWorker(self.desired.change(&caller, &change)?))
            }
            AdminRequest::Reset(order) => self.reset(caller, order)?,
            AdminRequest::SetPolicy(order) => AdminAnswer::Now(AdminReply::SetPolicy(self.set_policy(caller, &order)?)),
            AdminRequest::RunningConfig { cursor } => {
                AdminAnswer::Now(AdminReply::RunningConfig(self.running.page(cursor)?))
            }
        })
    }
}

impl Administration {
    fn status_page(&self, cursor: u32, limit: usize, findings: &[Finding]) -> StatusPage {
        let table = self.tables.fleet.load();
        let mut rest = self.statistics.views.of(&table);
        rest.retain(|(record, _)| record.index.place() >= cursor as usize);
        let next_cursor = rest.get(limit).map(|(record, _)| record.index.place() as u32);
        let remedies = remedies(findings);
        let status = |(record, view): &(&WorkerRecord, Arc<WorkerView>)| {
            let remedy = remedies.get(&record.worker).map(|remedy| (*remedy).to_owned());
            let source = self.desired.source_of(record.worker);
            self.with_routes(record, WorkerStatus { remedy, source, ..worker_status(&table, record, view) })
        };
        StatusPage {
            workers: rest.iter().take(limit).map(status).collect(),
            next_cursor,
            sources: if cursor == 0 { self.desired.sources() } else { Vec::new() },
            findings: if next_cursor.is_none() { shortened(findings.to_vec()) } else { Vec::new() },
            daemon_version: env!("CARGO_PKG_VERSION").to_owned(),
            metrics_port: self.running.now().metrics.local_port(),
            routers: if cursor == 0 { other_routers::rows(&self.statistics.routers.shown()) } else { Vec::new() },
            fleet_version: table.version,
            instance_id: self.tables.instance_id(),
            uptime_ms: self.tables.up_ms(),
            counters: self.counters(),
        }
    }

    /// Empties workers now. Their snapshots are removed on another thread, since a file system may not respond.
    fn reset(&self, caller: AdminCaller, order: ResetOrder) -> Result<AdminAnswer> {
        let table = self.tables.fleet.load();
        let one = order.worker.map(|worker| {
            let record = table.workers.iter().find(|record| record.worker == worker);
            record.map(|record| (record.shard, worker)).ok_or_else(|| {
                let what = format!("there is no worker {worker}");
                Error::new(Kind::InvalidArgument, what, "`kvrouted status` lists the workers")
            })
        });
        let one = one.transpose()?;
        // In this order, so that a snapshot begun after the removal is one of an emptied worker.
        let scope = if order.engine_cleared { ResetScope::ClearedDevice } else { ResetScope::Everything };
        let place = self.snapshots.place_to_remove()?;
        let held = self.blocks_of(&table, order);
        self.ingest_threads.reset(one, scope)?;
        let object = order.worker.map_or_else(|| "every worker".to_owned(), |worker| worker.to_string());
        // At once: the caller may leave before the snapshots are removed.
        let what = if order.engine_cleared { "reset of device memory" } else { "reset" };
        audit::changed(&caller, what, &object, (&format!("blocks={held}"), "blocks=0"));
        let workers = one.map_or(table.workers.iter().filter(|record| record.events.is_some()).count(), |_| 1) as u32;
        let snapshots = self.snapshots.clone();
        Ok(AdminAnswer::Later(Box::pin(async move {
            let remove = move || {
                let _place = place;
                let removed = snapshots.remove(order.worker)?;
                if removed > 0 {
                    let before = format!("snapshots={removed}");
                    audit::changed(&caller, "snapshots removed", &object, (&before, "snapshots=0"));
                }
                Ok::<_, Error>(removed)
            };
            let panicked = |error| Error::new(Kind::Internal, "the removal panicked", "report it").caused_by(error);
            let snapshots = spawn_blocking(remove).await.map_err(panicked)?? as u32;
            Ok(AdminReply::Reset(ResetDone { workers, snapshots }))
        })))
    }

    /// Blocks that the workers of an order hold, of those that it makes the daemon forget.
    fn blocks_of(&self, table: &FleetTable, order: ResetOrder) -> u64 {
        let views = self.statistics.views.of(table);
        let meant = views.iter().filter(|(record, _)| order.worker.is_none_or(|worker| record.worker == worker));
        let held = |view: &WorkerView| match order.engine_cleared {
            true => view.gauges.by_tier()[Tier::Device.index()],
            false => view.gauges.bound(),
        };
        meant.map(|(_, view)| held(view)).sum()
    }

    fn set_policy(&self, caller: AdminCaller, order: &PolicyOrder<'_>) -> Result<PolicyDone> {
        let recording = &self.tables.recording;
        let shadow = || {
            let settings = recording.shadow_settings().unwrap_or_default();
            format!("share={} policy=[{}]", recording.shadow_share(), settings.join(" "))
        };
        let before = shadow();
        match order {
            PolicyOrder::Shadow { settings, share } => {
                let settings: Vec<_> = settings.iter().map(|(name, value)| format!("{name}={value}")).collect();
                recording.set_shadow(&settings, *share)?;
                audit::changed(&caller, "shadow policy set", &"the shadow policy", (&before, &shadow()));
            }
            PolicyOrder::EndShadow => {
                recording.set_shadow(&[], 0.0)?;
                audit::changed(&caller, "shadow policy ended", &"the shadow policy", (&before, &shadow()));
            }
            PolicyOrder::Promote => self.promote(caller)?,
        }
        let (policy_version, shadow_share) = (self.tables.policies.load().version(), recording.shadow_share());
        Ok(PolicyDone { policy_version, shadow_share })
    }

    /// Makes the shadow policy the one that decides.
    fn promote(&self, caller: AdminCaller) -> Result<()> {
        let recording = &self.tables.recording;
        let settings = recording.shadow_settings().ok_or_else(no_shadow)?;
        let before = self.tables.policies.load();
        let next = before.map(|policy| policy_with_settings(policy, &settings));
        let versions = (before.version(), next.version());
        self.statistics.daemon.bump(DaemonCounter::PoliciesReplaced);
        self.tables.policies.store(Arc::new(next));
        let was = self.running.now().clone();
        self.running.ordered(&settings);
        let (fields_before, fields_after) = audit_texts::difference(&was.difference(&self.running.now()));
        let texts =
            (format!("version={} {fields_before}", versions.0), format!("version={} {fields_after}", versions.1));
        audit::changed(&caller, "shadow policy promoted", &"the policies", (&texts.0, &texts.1));
        recording.set_shadow(&[], 0.0)
    }

    /// Administers the daemon with these tables.
    pub(super) fn new(
        tables: &RequestTables,
        (statistics, doctor): (&Arc<Statistics>, &Arc<Doctor>),
        desired: &Rc<DesiredFleet>,
        ingest_threads: &Arc<IngestThreads>,
        snapshots: &Snapshots,
        running: &Rc<RunningConfig>,
    ) -> Self {
        let (statistics, doctor) = (Arc::clone(statistics), Arc::clone(doctor));
        let (desired, ingest_threads) = (Rc::clone(desired), Arc::clone(ingest_threads));
        Self {
            tables: tables.clone(),
            statistics,
            doctor,
            desired,
            ingest_threads,
            snapshots: snapshots.clone(),
            running: Rc::clone(running),
        }
    }

    /// Adds the counters of decisions for a worker, and its load; also the part of it that other routers told, and the age
    /// of the oldest gauge, if there is such a part.
    fn with_routes(&self, record: &WorkerRecord, mut status: WorkerStatus) -> WorkerStatus {
        let load = self.statistics.loads.read(record.index);
        let routed = RouteCounter::ALL.iter().map(|of| (of.name(), self.statistics.routed(record.index, *of)));
        // Gauges, listed here so that `kvrouted status` shows them.
        let now = [
            ("active_prefill_tokens", load.prefill_tokens),
            ("active_decode_blocks", load.decode_blocks),
            ("active_requests", load.requests),
        ];
        status.counters.extend(routed.chain(now).map(|(name, value)| (name.to_owned(), value)));
        let others = OthersPart::of(&self.statistics.loads, record.index);
        if let Some(oldest_ns) = others.oldest_ns {
            let of_others = [
                ("others_prefill_tokens", others.prefill_tokens),
                ("others_decode_blocks", others.decode_blocks),
                ("others_requests", others.requests),
                ("others_age_ms", self.tables.now_ns().saturating_sub(oldest_ns) / 1_000_000),
            ];
            status.counters.extend(of_others.map(|(name, value)| (name.to_owned(), value)));
        }
        status
    }

    /// The number of decisions in each bucket of their times, summed over the threads.
    fn decision_times(&self) -> Vec<(String, u64)> {
        let mut sums = BTreeMap::<u64, u64>::new();
        for (bound_ns, count) in self.statistics.cores.iter().flat_map(|core| core.decisions.counts()) {
            *sums.entry(bound_ns).or_default() += count;
        }
        sums.into_iter().map(|(bound_ns, count)| (format!("{LATENCY_COUNTER_PREFIX}{bound_ns}"), count)).collect()
    }

    /// What is learnt of the workers' prefill times: samples of all classes, since the start and before it, and the mean
    /// error of predicted times to the first token, of the class for which it is largest.
    fn learnt(&self) -> [(String, u64); 3] {
        let classes = self.tables.loads.prefill_classes();
        let largest = classes.iter().map(|class| class.error_mean).fold(0.0, f64::max);
        let sum = |of: fn(&PrefillClass) -> u64| classes.iter().map(of).fold(0, u64::saturating_add);
        [
            ("prefill_samples".to_owned(), sum(|class| class.samples)),
            ("prefill_samples_restored".to_owned(), sum(|class| class.samples_restored)),
            ("ttft_error_percent".to_owned(), (100.0 * largest).round() as u64),
        ]
    }

    /// The daemon's counters, summed over its threads.
    fn counters(&self) -> Vec<(String, u64)> {
        let cores = CoreCounter::ALL.iter().map(|counter| {
            let sum = self.statistics.cores.iter().map(|core| core.counters.get(*counter)).sum();
            (counter.name().to_owned(), sum)
        });
        let (statistics, queue, lanes) = (&self.statistics, &self.statistics.queue, &self.statistics.lanes);
        // Gauges.
        let now = [
            ("queue_waiting".to_owned(), queue.waiting() as u64),
            ("bookings_live".to_owned(), self.tables.loads.live() as u64),
            ("lanes_open".to_owned(), lanes.open() as u64),
            ("lanes_ended_held".to_owned(), lanes.ended_and_held() as u64),
        ];
        let tally = statistics.recording.shadow.total();
        let regret = ("shadow_cost_regret".to_owned(), tally.cost_regret as u64);
        let shadow = tally.counts().map(|(name, _, count)| (name.to_owned(), count)).into_iter().chain([regret]);
        let snapshots = &statistics.snapshots;
        let refused = snapshots.refused().map(|(reason, times)| (format!("snapshot_{reason}"), times));
        cores
            .chain(named(&statistics.daemon))
            .chain(named(queue.counters()))
            .chain(now)
            .chain(self.decision_times())
            .chain(self.learnt())
            .chain(named(&statistics.load_reports))
            .chain(named(&statistics.routers.counters))
            .chain(named(lanes.counters()))
            .chain(named(&statistics.predictions.counters))
            .chain(named(&statistics.recording.counters))
            .chain(named(&statistics.traces.counters))
            .chain(shadow)
            .chain(named(&snapshots.counters))
            .chain(refused)
            .chain(named(&statistics.http))
            .chain(named(&statistics.remote.counters))
            .chain(remote_open(statistics))
            .chain(named(&statistics.pages))
            .chain(other_routers::figures(&statistics.routers.shown()))
            .chain(process_exposition::status(statistics))
            .chain(sandboxed::figures())
            .collect()
    }
}

/// Open connections from other hosts: in all, and of each principal.
fn remote_open(statistics: &Statistics) -> impl Iterator<Item = (String, u64)> {
    let open = statistics.remote.open();
    let all = ("remote_connections_open".to_owned(), open.iter().map(|(_, open)| open).sum());
    let of_each = open.into_iter().map(|(name, open)| (format!("remote_connections_open_{name}"), open));
    std::iter::once(all).chain(of_each)
}

fn no_shadow() -> Error {
    let remedy = "set one first: [shadow], or kvrouted tune JOURNAL --shadow";
    Error::new(Kind::InvalidArgument, "there is no shadow policy to promote", remedy)
}

/// For each worker the remedy of its worst finding.
fn remedies(findings: &[Finding]) -> HashMap<Worker, &str> {
    let mut remedies = HashMap::new();
    for finding in findings {
        for worker in &finding.workers {
            remedies.entry(*worker).or_insert(finding.remedy.as_str());
        }
    }
    remedies
}

/// Findings for a reply: each names a bounded number of workers.
fn shortened(mut findings: Vec<Finding>) -> Vec<Finding> {
    findings.iter_mut().for_each(|finding| finding.workers.truncate(FINDING_WORKERS_MAX));
    findings
}

/// Every counter of a list, by its name.
fn named<L: CounterName>(counters: &CounterSet<L>) -> impl Iterator<Item = (String, u64)> {
    L::ALL.iter().map(|counter| (counter.name().to_owned(), counters.get(*counter)))
}

fn worker_status(table: &FleetTable, record: &WorkerRecord, view: &WorkerView) -> WorkerStatus {
    let now = [("choked", u64::from(view.gauges.is_choked())), ("messages_waiting", view.gauges.waiting())];
    let now = now.into_iter().map(|(name, value)| (name.to_owned(), value));
    let counted = named(&view.counters);
    let reasons = view.undecodable_by_reason().map(|(reason, times)| (format!("undecodable_{reason}"), times));
    let warnings = view.warnings_by_name().map(|(name, times)| (format!("oddity_{name}"), times));
    let unknown_names =
        view.unknown_names.iter().map(|(of, name, times)| (format!("unruled_{}_{name}", of.name()), times));
    let others = Some(view.unknown_names.others()).filter(|times| *times > 0);
    let unknown_names = unknown_names.chain(others.map(|times| ("unruled_others".to_owned(), times)));
    let aborted = view.transfers_aborted_by_reason();
    let aborted = aborted.map(|(reason, times)| (format!("transfer_aborted_{reason}"), times));
    WorkerStatus {
        worker: record.worker,
        space: record.space,
        model: table.space(record.space).map(|space| space.model.clone()).unwrap_or_default(),
        name: record.name.clone(),
        state: record.state,
        trust: record.trust.load(),
        blocks_held: view.gauges.bound(),
        blocks_by_tier: view.gauges.by_tier(),
        counters: counted.chain(reasons).chain(warnings).chain(unknown_names).chain(aborted).chain(now).collect(),
        remedy: None,
        source: String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Symptom;
    use crate::ids::{WorkerIndex, WorkerSlot};
    use crate::ingest::AbortReason;
    use crate::metrics::WorkerCounter;

    fn record() -> WorkerRecord {
        WorkerRecord {
            name: "w1".into(),
            batched_tokens_max: 1,
            ..WorkerRecord::new(WorkerIndex(0), Worker::new(1, 0), WorkerSlot(0))
        }
    }

    #[test]
    fn status_shows_waiting_events_refused_blocks_and_aborted_dumps() {
        for choked in [false, true] {
            let record = record();
            let view = WorkerView::new(Arc::clone(&record.trust));
            view.gauges.set_choked(choked);
            view.gauges.set_waiting(3);
            view.counters.bump(WorkerCounter::StoresMemoryBound);
            view.transfers_aborted.add(AbortReason::Overflow as usize, 2);
            let status = worker_status(&FleetTable::default(), &record, &view);
            let count = |name: &str| status.counters.iter().find(|(of, _)| of == name).map(|(_, value)| *value);
            assert_eq!((count("choked"), count("messages_waiting")), (Some(u64::from(choked)), Some(3)));
            assert_eq!((count("transfer_aborted_overflow"), count("stores_memory_bound")), (Some(2), Some(1)));
        }
    }

    #[test]
    fn a_worker_gets_the_remedy_of_its_worst_finding_and_a_finding_names_a_bounded_number() {
        let workers: Vec<Worker> = (0..2 * FINDING_WORKERS_MAX as u64).map(|id| Worker::new(id, 0)).collect();
        let total = workers.len() as u32;
        let worst = Finding { workers: workers[..1].to_vec(), ..Symptom::EventsChoked.finding() };
        let other = Finding { workers: workers.clone(), workers_total: total, ..Symptom::DuplicateStorm.finding() };
        let findings = vec![worst, other];
        let remedies = remedies(&findings);
        assert_eq!(remedies[&workers[0]], Symptom::EventsChoked.remedy());
        assert_eq!(remedies[&workers[1]], Symptom::DuplicateStorm.remedy());
        let shortened = shortened(findings);
        assert_eq!((shortened[1].workers.len(), shortened[1].workers_total), (FINDING_WORKERS_MAX, total));
    }
}
