//! The metrics page: every metric in Prometheus' text format, gathered at each scrape.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use super::doctor::Doctor;
use super::other_routers;
use super::process_exposition;
use super::statistics::{OthersPart, Statistics};
use crate::fleet::Space;
use crate::ids::Worker;
use crate::ingest::exposition::{self, WorkerFamilies, worker_labels, worker_labels_and};
use crate::load::{Load, PrefillClass};
use crate::metrics::{CoreCounter, CounterName, Latency, RouteCounter};
use crate::serve::PageForm;
use crate::shadow::ShadowTally;

/// Writes the Prometheus text of `statistics` and of the doctor's latest findings. The control thread never calls it.
pub(super) fn render(
    (statistics, doctor): (&Arc<Statistics>, &Arc<Doctor>),
    form: PageForm,
    text: &mut String,
) -> fmt::Result {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Gatherer { statistics: Arc::clone(statistics), doctor: Arc::clone(doctor) }));
    prometheus_client::encoding::text::encode(text, &registry)?;
    if form == PageForm::WithExemplars {
        statistics.traces.exemplars.add_to(text);
    }
    Ok(())
}

#[derive(Debug)]
struct Gatherer {
    statistics: Arc<Statistics>,
    doctor: Arc<Doctor>,
}

impl Collector for Gatherer {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let table = self.statistics.fleet.load();
        let views = self.statistics.views.of(&table);
        let views: Vec<_> = views.iter().map(|(record, view)| (record.worker, &**view)).collect();
        let families = WorkerFamilies::of(table.workers.len(), self.statistics.detailed_workers_max);
        exposition::encode(&mut encoder, &families, &views)?;
        self.worker_gauges(&mut encoder, &families)?;
        self.worker_routes(&mut encoder, &families)?;
        families.encode_left_out(&mut encoder)?;
        self.findings(&mut encoder)?;
        self.cores(&mut encoder)?;
        self.daemon(&mut encoder)?;
        self.prefill_classes(&mut encoder)?;
        self.remote(&mut encoder)?;
        self.queue(&mut encoder)?;
        self.lanes(&mut encoder)?;
        self.shadow(&mut encoder)?;
        process_exposition::encode(&mut encoder, &self.statistics)?;
        self.snapshots(&mut encoder)?;
        other_routers::encode(&mut encoder, &self.statistics)?;
        exposition::sandbox(&mut encoder)
    }
}

impl Gatherer {
    fn worker_routes(&self, encoder: &mut DescriptorEncoder<'_>, families: &WorkerFamilies) -> Result<(), fmt::Error> {
        let table = self.statistics.fleet.load();
        for counter in RouteCounter::ALL {
            let name = format!("kvrouted_worker_{}", counter.name());
            if !families.keeps(&name) {
                continue;
            }
            let mut family = encoder.encode_descriptor(&name, counter.help(), None, MetricType::Counter)?;
            for record in &table.workers {
                let (labels, value) = (worker_labels(record.worker), self.statistics.routed(record.index, *counter));
                family.encode_family(&labels)?.encode_counter::<NoLabelSet, u64, u64>(&value, None)?;
            }
        }
        Ok(())
    }

    /// The findings: one sample for each worker, and one without a worker for a finding about the daemon.
    fn findings(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let help = "1 for each finding of kvrouted doctor, by worker if it is about a worker.";
        let mut family = encoder.encode_descriptor("kvrouted_finding", help, None, MetricType::Gauge)?;
        // Findings that differ only in their text are one sample.
        let mut lines: BTreeSet<(String, &'static str, Option<Worker>)> = BTreeSet::new();
        for finding in self.doctor.latest().iter() {
            let line = |worker| (finding.name.clone(), finding.harm.name(), worker);
            match finding.workers.as_slice() {
                [] => drop(lines.insert(line(None))),
                workers => lines.extend(workers.iter().map(|worker| line(Some(*worker)))),
            }
        }
        for (name, harm, worker) in lines {
            let mut labels = vec![("finding", name), ("harm", harm.to_owned())];
            if let Some(worker) = worker {
                labels.push(("worker_id", worker.id.0.to_string()));
                labels.push(("dp_rank", worker.rank.0.to_string()));
            }
            family.encode_family(&labels.as_slice())?.encode_gauge(&1_i64)?;
        }
        Ok(())
    }

    fn worker_gauges(&self, encoder: &mut DescriptorEncoder<'_>, families: &WorkerFamilies) -> Result<(), fmt::Error> {
        let table = self.statistics.fleet.load();
        let name = "kvrouted_worker_predicted_blocks";
        if families.keeps(name) {
            let help = "Blocks that a worker without events is predicted to hold.";
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for record in &table.workers {
                if let Some(blocks) = self.statistics.predictions.blocks_of(record) {
                    family.encode_family(&worker_labels(record.worker))?.encode_gauge(&(blocks as i64))?;
                }
            }
        }
        let name = "kvrouted_worker_state";
        let help = "1 for the present state of a worker: joining, ready, draining or down.";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for record in &table.workers {
            let labels = worker_labels_and(record.worker, "state", record.state.name());
            family.encode_family(&labels)?.encode_gauge(&1_i64)?;
        }
        self.load_gauges(encoder, families)
    }

    fn load_gauges(&self, encoder: &mut DescriptorEncoder<'_>, families: &WorkerFamilies) -> Result<(), fmt::Error> {
        let table = self.statistics.fleet.load();
        type Pick = fn(&Load, &OthersPart) -> u64;
        let gauges: [(&str, &str, Pick); 6] = [
            (
                "kvrouted_worker_active_prefill_tokens",
                "Tokens of booked requests that are still to be prefilled.",
                |load, _| load.prefill_tokens,
            ),
            (
                "kvrouted_worker_active_decode_blocks",
                "Blocks of the booked prompts. Blocks that several prompts share count once.",
                |load, _| load.decode_blocks,
            ),
            ("kvrouted_worker_active_requests", "Booked requests.", |load, _| load.requests),
            (
                "kvrouted_worker_others_prefill_tokens",
                "The part of kvrouted_worker_active_prefill_tokens that other routers booked.",
                |_, others| others.prefill_tokens,
            ),
            (
                "kvrouted_worker_others_decode_blocks",
                "The part of kvrouted_worker_active_decode_blocks that other routers booked.",
                |_, others| others.decode_blocks,
            ),
            (
                "kvrouted_worker_others_requests",
                "The part of kvrouted_worker_active_requests that other routers booked.",
                |_, others| others.requests,
            ),
        ];
        let loads = &self.statistics.loads;
        let of_worker = |index| (loads.read(index), OthersPart::of(loads, index));
        let values: Vec<_> = table.workers.iter().map(|record| of_worker(record.index)).collect();
        for (name, help, pick) in gauges.into_iter().filter(|(name, ..)| families.keeps(name)) {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (record, (load, others)) in table.workers.iter().zip(&values) {
                let labels = worker_labels(record.worker);
                family.encode_family(&labels)?.encode_gauge(&(pick(load, others) as i64))?;
            }
        }
        Ok(())
    }

    fn cores(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for counter in CoreCounter::ALL {
            let name = format!("kvrouted_{}", counter.name());
            let sum: u64 = self.statistics.cores.iter().map(|core| core.counters.get(*counter)).sum();
            let mut metric = encoder.encode_descriptor(&name, counter.help(), None, MetricType::Counter)?;
            metric.encode_counter::<NoLabelSet, u64, u64>(&sum, None)?;
        }
        let (mut sum, mut merged) = Latency::default().read();
        for core in &self.statistics.cores {
            let (core_sum, buckets) = core.decisions.read();
            sum += core_sum;
            for (into, from) in merged.iter_mut().zip(buckets) {
                into.1 += from.1;
            }
        }
        let count = merged.iter().map(|bucket| bucket.1).sum();
        let name = "kvrouted_decision_seconds";
        let help = "Time to decide and book one request, without the time on the socket.";
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
        metric.encode_histogram::<NoLabelSet>(sum, count, &merged, None)
    }

    fn daemon(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        exposition::counters_of(encoder, &self.statistics.daemon)?;
        exposition::counters_of(encoder, &self.statistics.load_reports)?;
        exposition::counters_of(encoder, &self.statistics.routers.counters)?;
        exposition::counters_of(encoder, &self.statistics.predictions.counters)?;
        exposition::counters_of(encoder, &self.statistics.recording.counters)?;
        exposition::counters_of(encoder, &self.statistics.traces.counters)?;
        exposition::counters_of(encoder, &self.statistics.http)?;
        exposition::counters_of(encoder, &self.statistics.pages)?;
        let gauges = [
            ("kvrouted_bookings_live", "Live bookings.", self.statistics.loads.live() as i64),
            (
                "kvrouted_active_bytes",
                "Memory in use for the blocks of booked prompts.",
                self.statistics.loads.active_bytes() as i64,
            ),
            ("kvrouted_fleet_version", "Version of the fleet table.", self.statistics.fleet.load().version as i64),
            (
                "kvrouted_ready",
                "1 while GET /ready answers with 200: the daemon does not drain, no thread is stalled, the load of other routers is known, and a worker may be chosen.",
                i64::from(self.statistics.takes_requests()),
            ),
        ];
        for (name, help, value) in gauges {
            encoder.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&value)?;
        }
        Ok(())
    }

    fn remote(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let remote = &self.statistics.remote;
        exposition::counters_of(encoder, &remote.counters)?;
        let (name, help) = ("kvrouted_remote_connections_open", "Open connections from other hosts, by principal.");
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (principal, open) in remote.open() {
            family.encode_family(&[("principal", &*principal)].as_slice())?.encode_gauge(&(open as i64))?;
        }
        Ok(())
    }

    /// What is known of the prefill times of each class of workers.
    fn prefill_classes(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let classes = self.statistics.loads.prefill_classes();
        type Pick = fn(&PrefillClass) -> f64;
        let gauges: [(&str, &str, Pick); 5] = [
            ("kvrouted_prefill_base_seconds", "Learnt time of every prefill.", |class| class.law.base_s),
            ("kvrouted_prefill_token_seconds", "Learnt time of each token to compute.", |class| class.law.token_s),
            (
                "kvrouted_prefill_attention_seconds",
                "Learnt time of each pair of a token to compute and one before it.",
                |class| class.law.attention_s,
            ),
            (
                "kvrouted_ttft_error_ratio",
                "Mean of |predicted - observed| / observed over recent times to the first token.",
                |class| class.error_mean,
            ),
            (
                "kvrouted_prefill_samples_restored",
                "Prefills before the restart that times were learnt from.",
                |class| class.samples_restored as f64,
            ),
        ];
        for (name, help, pick) in gauges {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for class in &classes {
                family.encode_family(&[("class", class.name.as_str())].as_slice())?.encode_gauge(&pick(class))?;
            }
        }
        let sums: [(&str, &str, Pick); 4] = [
            ("kvrouted_prefill_samples", "Prefills since the start that times were learnt from.", |class| {
                class.samples as f64
            }),
            ("kvrouted_ttft_predictions", "Predicted first tokens that came.", |class| class.predictions as f64),
            ("kvrouted_ttft_predicted_seconds", "Sum of predicted times to the first token.", |class| {
                class.predicted_s
            }),
            ("kvrouted_ttft_observed_seconds", "Sum of the observed times.", |class| class.observed_s),
        ];
        for (name, help, pick) in sums {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for class in &classes {
                let labels = [("class", class.name.as_str())];
                family.encode_family(&labels.as_slice())?.encode_counter::<NoLabelSet, f64, u64>(&pick(class), None)?;
            }
        }
        Ok(())
    }

    fn queue(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let queue = &self.statistics.queue;
        exposition::counters_of(encoder, queue.counters())?;
        let help = "Requests in the queue now.";
        let mut metric = encoder.encode_descriptor("kvrouted_queue_waiting", help, None, MetricType::Gauge)?;
        metric.encode_gauge(&(queue.waiting() as i64))?;
        let (sum, buckets) = queue.waited();
        let count = buckets.iter().map(|bucket| bucket.1).sum();
        let help = "Time in the queue, of requests that then got a decision.";
        let mut metric = encoder.encode_descriptor("kvrouted_queue_wait_seconds", help, None, MetricType::Histogram)?;
        metric.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
    }

    fn lanes(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let lanes = &self.statistics.lanes;
        exposition::counters_of(encoder, lanes.counters())?;
        let mut metric = encoder.encode_descriptor(
            "kvrouted_lanes_open",
            "Lanes that count against serve.lanes_max.",
            None,
            MetricType::Gauge,
        )?;
        metric.encode_gauge(&(lanes.open() as i64))?;
        let help = "Lanes that have ended while their gateways still hold the memory. Open lanes include them.";
        let mut metric = encoder.encode_descriptor("kvrouted_lanes_ended_held", help, None, MetricType::Gauge)?;
        metric.encode_gauge(&(lanes.ended_and_held() as i64))
    }

    /// By space in which the shadow policy has judged.
    fn shadow(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let (table, tallies) = (self.statistics.fleet.load(), self.statistics.recording.shadow.tallies());
        let tallies: Vec<_> =
            tallies.iter().filter_map(|(id, tally)| Some((space_labels(table.space(*id)?), tally))).collect();
        for (at, (name, help, _)) in ShadowTally::default().counts().into_iter().enumerate() {
            let name = format!("kvrouted_{name}");
            let mut family = encoder.encode_descriptor(&name, help, None, MetricType::Counter)?;
            for (labels, tally) in &tallies {
                let (_, _, value) = tally.counts()[at];
                family.encode_family(labels)?.encode_counter::<NoLabelSet, u64, u64>(&value, None)?;
            }
        }
        let name = "kvrouted_shadow_cost_regret";
        let help = "Sum over decisions of the chosen worker's cost under the shadow policy, minus the lowest cost under it. In blocks if the mode counts in blocks.";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, tally) in &tallies {
            family.encode_family(labels)?.encode_counter::<NoLabelSet, f64, u64>(&tally.cost_regret, None)?;
        }
        Ok(())
    }

    fn snapshots(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let stats = &self.statistics.snapshots;
        exposition::counters_of(encoder, &stats.counters)?;
        let help = "Snapshots that were found and not used, by reason.";
        let mut family = encoder.encode_descriptor("kvrouted_snapshots_refused", help, None, MetricType::Counter)?;
        for (reason, times) in stats.refused() {
            let labels = [("reason", reason)];
            family.encode_family(&labels)?.encode_counter::<NoLabelSet, u64, u64>(&times, None)?;
        }
        let help = "Time spent taking and writing snapshots.";
        let mut metric = encoder.encode_descriptor("kvrouted_snapshot_seconds", help, None, MetricType::Counter)?;
        metric.encode_counter::<NoLabelSet, f64, u64>(&stats.writing_seconds(), None)?;
        let help = "Time spent taking and writing images of the bookings.";
        let mut metric =
            encoder.encode_descriptor("kvrouted_booking_image_seconds", help, None, MetricType::Counter)?;
        metric.encode_counter::<NoLabelSet, f64, u64>(&stats.bookings_seconds(), None)?;
        let now_unix_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        let name = "kvrouted_snapshot_oldest_age_seconds";
        let help = "Age of the snapshot that is furthest behind its worker: the time since it was last confirmed to be complete.";
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        stats.oldest_age_seconds(now_unix_ms).map_or(Ok(()), |age| metric.encode_gauge(&age))
    }
}

fn space_labels(space: &Space) -> [(&'static str, String); 3] {
    [("model", space.model.clone()), ("namespace", space.namespace.clone()), ("role", space.role.name().to_owned())]
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::budget::{Gauge, MemoryAccounts, ShedFlags};
    use crate::daemon::statistics::{MemoryFigures, OpenFiles};
    use crate::fleet::{Fleet, FleetTable};
    use crate::ingest::descriptors::{self, Takers};
    use crate::limits::WORKERS_MAX;
    use crate::load::{Loads, LoadsConfig};
    use crate::metrics::{ConnectCounter, RelayCounter};
    use crate::requests::{DecisionRecording, PredictionAccess, RequestQueue};
    use crate::serve::Lanes;
    use crate::traces::Traces;
    use crate::watchdog::Watchlist;

    #[test]
    fn the_page_has_every_metric_that_the_documents_name() {
        let statistics = Statistics {
            fleet: Arc::new(Fleet::new(FleetTable::default())),
            loads: Arc::new(Loads::new(0, LoadsConfig::default())),
            policies: Arc::default(),
            views: Arc::default(),
            predictions: PredictionAccess::default(),
            recording: DecisionRecording::default(),
            traces: Traces::default(),
            cores: vec![Arc::default()],
            daemon: Arc::default(),
            snapshots: Arc::default(),
            load_reports: Arc::default(),
            routers: Arc::default(),
            lanes: Arc::new(Lanes::new(1, 0)),
            queue: Arc::new(RequestQueue::new(1, (1, 1), Instant::now())),
            http: Arc::default(),
            remote: Arc::default(),
            pages: Arc::default(),
            memory: MemoryFigures {
                accounts: MemoryAccounts::unlimited(),
                flags: ShedFlags::default(),
                resident: Gauge::default(),
            },
            watchlist: Watchlist::default(),
            numa_nodes: Vec::new(),
            is_draining: Arc::default(),
            detailed_workers_max: WORKERS_MAX,
            open_files: OpenFiles {
                descriptors: descriptors::divide(1 << 20, Takers::default()).unwrap(),
                takers: Takers::default(),
                cores: Vec::new(),
                open: Gauge::default(),
            },
        };
        let statistics = Arc::new(statistics);
        let mut page = String::new();
        render((&statistics, &Arc::new(Doctor::new(&statistics))), PageForm::Plain, &mut page).unwrap();
        // Families without samples are listed too.
        let of_daemon =
            page.lines().filter_map(|line| Some(line.strip_prefix("# TYPE ")?.split(' ').next()?.to_owned()));
        let of_relay = RelayCounter::ALL.iter().map(|counter| counter.name());
        let of_others = of_relay.chain(ConnectCounter::ALL.iter().map(|counter| counter.name()));
        let of_others = of_others.map(|name| format!("kvrouted_{name}"));
        let families: BTreeSet<String> = of_daemon.chain(of_others).collect();
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let pages = std::fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
        let is_name = |c: char| c.is_ascii_lowercase() || c == '_';
        let mut named = 0;
        for path in pages.chain([root.join("README.md"), root.join("schemas/README.md")]) {
            let text = std::fs::read_to_string(&path).unwrap();
            for (at, _) in text.match_indices("kvrouted_") {
                let name: String = text[at..].chars().take_while(|c| is_name(*c)).collect();
                // A switch of the compiler, headers, and the metrics of another program, whose own test looks for them.
                let is_gateways = name.starts_with("kvrouted_gateway_");
                if name == "kvrouted_loom" || is_gateways || text[at + name.len()..].starts_with(".h") {
                    continue;
                }
                named += 1;
                assert!(families.contains(name.trim_end_matches("_total")), "{} names {name}", path.display());
            }
        }
        assert!(named > 30, "the documents name metrics");
    }
}
