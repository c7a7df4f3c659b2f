//! Every metric in Prometheus text, gathered when somebody scrapes.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use super::doctor::Doctor;
use super::sources::Sources;
use crate::fleet::Space;
use crate::ids::Worker;
use crate::ingest::exposition::{self, worker_labels, worker_labels_and};
use crate::metrics::{CoreCounter, CounterName, Latency, RouteCounter};
use crate::shadow::ShadowTally;

/// Writes the Prometheus text of `sources` now, and of what the doctor found last. Never called by the control thread.
pub(super) fn render(sources: &Arc<Sources>, doctor: &Arc<Doctor>, text: &mut String) -> fmt::Result {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Gatherer { sources: Arc::clone(sources), doctor: Arc::clone(doctor) }));
    prometheus_client::encoding::text::encode(text, &registry)
}

#[derive(Debug)]
struct Gatherer {
    sources: Arc<Sources>,
    doctor: Arc<Doctor>,
}

impl Collector for Gatherer {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let table = self.sources.fleet.load();
        let views = self.sources.views.of(&table);
        let views: Vec<_> = views.iter().map(|(record, view)| (record.worker, &**view)).collect();
        exposition::encode(&mut encoder, &views)?;
        self.worker_gauges(&mut encoder)?;
        self.worker_routes(&mut encoder)?;
        self.findings(&mut encoder)?;
        self.cores(&mut encoder)?;
        self.daemon(&mut encoder)?;
        self.queue(&mut encoder)?;
        self.lanes(&mut encoder)?;
        self.shadow(&mut encoder)?;
        self.snapshots(&mut encoder)
    }
}

impl Gatherer {
    fn worker_routes(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let table = self.sources.fleet.load();
        for counter in RouteCounter::ALL {
            let name = format!("kvrouted_worker_{}", counter.name());
            let mut family = encoder.encode_descriptor(&name, counter.help(), None, MetricType::Counter)?;
            for record in &table.workers {
                let (labels, value) = (worker_labels(record.worker), self.sources.routed(record.index, *counter));
                family.encode_family(&labels)?.encode_counter::<NoLabelSet, u64, u64>(&value, None)?;
            }
        }
        Ok(())
    }

    /// What is wrong: a line for each worker, and one without a worker for what is wrong with the daemon.
    fn findings(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let help = "1 for everything that kvrouted doctor finds wrong, by worker where it is about one.";
        let mut family = encoder.encode_descriptor("kvrouted_finding", help, None, MetricType::Gauge)?;
        // Findings that differ only in their words are one line.
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

    fn worker_gauges(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let table = self.sources.fleet.load();
        let name = "kvrouted_worker_predicted_blocks";
        let help = "Blocks that a worker without events is predicted to hold.";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for record in &table.workers {
            if let Some(blocks) = self.sources.predicting.blocks_of(record) {
                family.encode_family(&worker_labels(record.worker))?.encode_gauge(&(blocks as i64))?;
            }
        }
        let name = "kvrouted_worker_state";
        let help = "1 for the state that a worker is in: joining, ready, draining or down.";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for record in &table.workers {
            let labels = worker_labels_and(record.worker, "state", record.state.name());
            family.encode_family(&labels)?.encode_gauge(&1_i64)?;
        }
        self.load_gauges(encoder)
    }

    fn load_gauges(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let table = self.sources.fleet.load();
        type Pick = fn(crate::load::Load) -> u64;
        let gauges: [(&str, &str, Pick); 3] = [
            ("kvrouted_worker_active_prefill_tokens", "Booked tokens still to be prefilled.", |load| {
                load.prefill_tokens
            }),
            (
                "kvrouted_worker_active_decode_blocks",
                "Blocks of the booked prompts; those that several share count once.",
                |load| load.decode_blocks,
            ),
            ("kvrouted_worker_active_requests", "Booked requests.", |load| load.requests),
        ];
        for (name, help, pick) in gauges {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for record in &table.workers {
                let labels = worker_labels(record.worker);
                family.encode_family(&labels)?.encode_gauge(&(pick(self.sources.loads.read(record.index)) as i64))?;
            }
        }
        Ok(())
    }

    fn cores(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for counter in CoreCounter::ALL {
            let name = format!("kvrouted_{}", counter.name());
            let sum: u64 = self.sources.cores.iter().map(|core| core.counters.get(*counter)).sum();
            let mut metric = encoder.encode_descriptor(&name, counter.help(), None, MetricType::Counter)?;
            metric.encode_counter::<NoLabelSet, u64, u64>(&sum, None)?;
        }
        let (mut sum, mut merged) = Latency::default().read();
        for core in &self.sources.cores {
            let (core_sum, buckets) = core.decisions.read();
            sum += core_sum;
            for (into, from) in merged.iter_mut().zip(buckets) {
                into.1 += from.1;
            }
        }
        let count = merged.iter().map(|bucket| bucket.1).sum();
        let name = "kvrouted_decision_seconds";
        let help = "Time to decide and book one request, sockets excluded.";
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
        metric.encode_histogram::<NoLabelSet>(sum, count, &merged, None)
    }

    fn daemon(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        exposition::counters_of(encoder, &self.sources.daemon)?;
        exposition::counters_of(encoder, &self.sources.heard)?;
        exposition::counters_of(encoder, &self.sources.predicting.counters)?;
        exposition::counters_of(encoder, &self.sources.recording.counters)?;
        exposition::counters_of(encoder, &self.sources.http)?;
        exposition::counters_of(encoder, &self.sources.pages)?;
        let gauges = [
            ("kvrouted_bookings_live", "Bookings that are live.", self.sources.loads.live() as i64),
            (
                "kvrouted_active_bytes",
                "Memory in use for the blocks of the booked prompts.",
                self.sources.loads.active_bytes() as i64,
            ),
            ("kvrouted_fleet_version", "Version of the fleet table.", self.sources.fleet.load().version as i64),
        ];
        for (name, help, value) in gauges {
            encoder.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&value)?;
        }
        Ok(())
    }

    fn queue(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let room = &self.sources.room;
        exposition::counters_of(encoder, room.counters())?;
        let help = "Requests that wait for a worker.";
        let mut metric = encoder.encode_descriptor("kvrouted_queue_waiting", help, None, MetricType::Gauge)?;
        metric.encode_gauge(&(room.waiting() as i64))?;
        let (sum, buckets) = room.waited();
        let count = buckets.iter().map(|bucket| bucket.1).sum();
        let help = "Time that requests waited for a worker which were then answered.";
        let mut metric = encoder.encode_descriptor("kvrouted_queue_wait_seconds", help, None, MetricType::Histogram)?;
        metric.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
    }

    fn lanes(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let lanes = &self.sources.lanes;
        exposition::counters_of(encoder, lanes.counters())?;
        let mut metric =
            encoder.encode_descriptor("kvrouted_lanes_open", "Lanes that have a place.", None, MetricType::Gauge)?;
        metric.encode_gauge(&(lanes.open() as i64))?;
        let help = "Lanes that have ended and whose memory their gateways still hold; they are among the open ones.";
        let mut metric = encoder.encode_descriptor("kvrouted_lanes_ended_held", help, None, MetricType::Gauge)?;
        metric.encode_gauge(&(lanes.ended_and_held() as i64))
    }

    /// By space, as far as the shadow policy has judged there.
    fn shadow(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let (table, tallies) = (self.sources.fleet.load(), self.sources.recording.shadowing.tallies());
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
        let help = "What the chosen workers cost the shadow policy above its least, summed. Blocks, where its mode counts in blocks.";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, tally) in &tallies {
            family.encode_family(labels)?.encode_counter::<NoLabelSet, f64, u64>(&tally.cost_regret, None)?;
        }
        Ok(())
    }

    fn snapshots(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let stats = &self.sources.snapshots;
        exposition::counters_of(encoder, &stats.counters)?;
        let help = "Snapshots found at the start that were not used, by reason.";
        let mut family = encoder.encode_descriptor("kvrouted_snapshots_refused", help, None, MetricType::Counter)?;
        for (reason, times) in stats.refused() {
            let labels = [("reason", reason)];
            family.encode_family(&labels)?.encode_counter::<NoLabelSet, u64, u64>(&times, None)?;
        }
        let help = "Time spent to take and write snapshots.";
        let mut metric = encoder.encode_descriptor("kvrouted_snapshot_seconds", help, None, MetricType::Counter)?;
        metric.encode_counter::<NoLabelSet, f64, u64>(&stats.writing_seconds(), None)?;
        let now_unix_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        let name = "kvrouted_snapshot_oldest_age_seconds";
        let help = "Time since the snapshot that is furthest behind its worker was last found to be whole.";
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
    use crate::daemon::predicting::Predicting;
    use crate::daemon::recording::Recording;
    use crate::fleet::{Fleet, FleetTable};
    use crate::load::{Loads, LoadsConfig};
    use crate::metrics::RelayCounter;
    use crate::serve::{Lanes, RequestQueue};

    #[test]
    fn every_metric_that_the_documents_name_is_there() {
        let sources = Sources {
            fleet: Arc::new(Fleet::new(FleetTable::default())),
            loads: Arc::new(Loads::new(0, LoadsConfig::default())),
            views: Arc::default(),
            predicting: Predicting::default(),
            recording: Recording::default(),
            cores: vec![Arc::default()],
            daemon: Arc::default(),
            snapshots: Arc::default(),
            heard: Arc::default(),
            lanes: Arc::new(Lanes::new(1, 0)),
            room: Arc::new(RequestQueue::new(1, 1, Instant::now())),
            http: Arc::default(),
            pages: Arc::default(),
        };
        let sources = Arc::new(sources);
        let mut page = String::new();
        render(&sources, &Arc::new(Doctor::new(&sources)), &mut page).unwrap();
        // Families are there without samples too.
        let of_daemon =
            page.lines().filter_map(|line| Some(line.strip_prefix("# TYPE ")?.split(' ').next()?.to_owned()));
        let of_relay = RelayCounter::ALL.iter().map(|counter| format!("kvrouted_{}", counter.name()));
        let families: BTreeSet<String> = of_daemon.chain(of_relay).collect();
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let pages = std::fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
        let is_name = |c: char| c.is_ascii_lowercase() || c == '_';
        let mut named = 0;
        for path in pages.chain([root.join("README.md"), root.join("schemas/README.md")]) {
            let text = std::fs::read_to_string(&path).unwrap();
            for (at, _) in text.match_indices("kvrouted_") {
                let name: String = text[at..].chars().take_while(|c| is_name(*c)).collect();
                // A switch of the compiler, and headers.
                if name == "kvrouted_loom" || text[at + name.len()..].starts_with(".h") {
                    continue;
                }
                named += 1;
                assert!(families.contains(name.trim_end_matches("_total")), "{} names {name}", path.display());
            }
        }
        assert!(named > 30, "the documents name metrics");
    }
}
