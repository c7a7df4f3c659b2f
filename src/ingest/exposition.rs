//! The metrics of workers' streams: `kvrouted_worker_…`, one line for each worker.

use std::cell::Cell;
use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use super::WorkerView;
use crate::ids::{Tier, Worker};
use crate::metrics::{CounterName, CounterSet, WATCHED_WORKER_METRICS, WorkerCounter};
use crate::sandbox;
use crate::trust::TrustLevel;

/// Which metrics of each worker a page has. The default is all of them.
#[derive(Debug, Default)]
pub(crate) struct WorkerFamilies {
    has_only_watched: bool,
    left_out: Cell<u64>,
}

impl WorkerFamilies {
    /// Those of a fleet of `workers`: all, or in a fleet larger than `detailed_max` those of [`WATCHED_WORKER_METRICS`].
    pub(crate) fn of(workers: usize, detailed_max: usize) -> Self {
        Self { has_only_watched: workers > detailed_max, left_out: Cell::default() }
    }

    /// Whether the page has the metric of this name. A metric that it has not is counted.
    pub(crate) fn keeps(&self, name: &str) -> bool {
        let is_watched =
            || name.strip_prefix("kvrouted_worker_").is_some_and(|of| WATCHED_WORKER_METRICS.contains(&of));
        let keeps = !self.has_only_watched || is_watched();
        self.left_out.set(self.left_out.get() + u64::from(!keeps));
        keeps
    }

    /// Writes how many metrics were left out.
    ///
    /// # Errors
    /// Those of the encoder, which writes to memory.
    pub(crate) fn encode_left_out(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let name = "kvrouted_metrics_left_out";
        let help = "Metrics of each worker that this page leaves out, because the fleet has more workers than metrics.detailed_workers_max.";
        encoder.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&(self.left_out.get() as i64))
    }
}

/// Encodes the metrics of these workers that `families` keeps.
///
/// # Errors
/// Those of the encoder, which writes to memory.
pub(crate) fn encode(
    encoder: &mut DescriptorEncoder<'_>,
    families: &WorkerFamilies,
    workers: &[(Worker, &WorkerView)],
) -> fmt::Result {
    counters(encoder, families, workers)?;
    reasons(encoder, families, workers)?;
    gauges(encoder, families, workers)?;
    trust(encoder, workers)
}

fn reasons(
    encoder: &mut DescriptorEncoder<'_>,
    families: &WorkerFamilies,
    workers: &[(Worker, &WorkerView)],
) -> fmt::Result {
    let help = "Batches that could not be decoded, by reason.";
    let named = ("kvrouted_worker_undecodable", "reason", help);
    by_name(encoder, named, families, workers, |view| view.undecodable_by_reason().collect())?;
    let help = "Aborted dumps of the worker and loads into it, by reason.";
    let named = ("kvrouted_worker_transfers_aborted", "reason", help);
    by_name(encoder, named, families, workers, |view| view.transfers_aborted_by_reason().collect())?;
    let help = "Parts of decodable batches that were skipped or could not be used, by kind.";
    let named = ("kvrouted_worker_oddities", "kind", help);
    by_name(encoder, named, families, workers, |view| view.warnings_by_name().collect())
}

/// Encodes every counter of a list, without labels.
///
/// # Errors
/// Those of the encoder, which writes to memory.
pub(crate) fn counters_of<L: CounterName>(
    encoder: &mut DescriptorEncoder<'_>,
    counters: &CounterSet<L>,
) -> fmt::Result {
    for counter in L::ALL {
        let name = format!("kvrouted_{}", counter.name());
        let mut metric = encoder.encode_descriptor(&name, counter.help(), None, MetricType::Counter)?;
        metric.encode_counter::<NoLabelSet, u64, u64>(&counters.get(*counter), None)?;
    }
    Ok(())
}

fn counters(
    encoder: &mut DescriptorEncoder<'_>,
    families: &WorkerFamilies,
    workers: &[(Worker, &WorkerView)],
) -> fmt::Result {
    for counter in WorkerCounter::ALL {
        let name = format!("kvrouted_worker_{}", counter.name());
        if !families.keeps(&name) {
            continue;
        }
        let mut family = encoder.encode_descriptor(&name, counter.help(), None, MetricType::Counter)?;
        for (worker, view) in workers {
            let (labels, value) = (worker_labels(*worker), view.counters.get(*counter));
            family.encode_family(&labels)?.encode_counter::<NoLabelSet, u64, u64>(&value, None)?;
        }
    }
    Ok(())
}

/// Encodes counts by the name of a reason or kind. Only names that occurred have a line.
fn by_name(
    encoder: &mut DescriptorEncoder<'_>,
    (name, label, help): (&str, &'static str, &str),
    families: &WorkerFamilies,
    workers: &[(Worker, &WorkerView)],
    counts: impl Fn(&WorkerView) -> Vec<(&'static str, u64)>,
) -> fmt::Result {
    if !families.keeps(name) {
        return Ok(());
    }
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (worker, view) in workers {
        for (name, times) in counts(view) {
            let labels = worker_labels_and(*worker, label, name);
            family.encode_family(&labels)?.encode_counter::<NoLabelSet, u64, u64>(&times, None)?;
        }
    }
    Ok(())
}

/// The metrics of the process's sandbox.
pub(crate) fn sandbox(encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let help = "1 for each part of the sandbox that is in force, 0 for each that is not; of landlock, its version.";
    let mut family = encoder.encode_descriptor("kvrouted_sandbox", help, None, MetricType::Gauge)?;
    for (part, value) in sandbox::in_force().cloned().unwrap_or_default().figures() {
        family.encode_family(&[("part", part)].as_slice())?.encode_gauge(&i64::from(value))?;
    }
    let help = "System calls that the sandbox refused, by kind of thread. The log names the calls.";
    let mut family = encoder.encode_descriptor("kvrouted_sandbox_refused", help, None, MetricType::Counter)?;
    let refused = sandbox::refused();
    for thread in sandbox::thread_names() {
        let times: u64 = refused.iter().filter(|of| of.thread == thread).map(|of| of.times).sum();
        let labels = [("thread", thread)];
        family.encode_family(&labels.as_slice())?.encode_counter::<NoLabelSet, u64, u64>(&times, None)?;
    }
    let help = "Threads that the sandbox could not confine as their kind should be.";
    let mut metric = encoder.encode_descriptor("kvrouted_sandbox_threads_unconfined", help, None, MetricType::Gauge)?;
    metric.encode_gauge(&(sandbox::threads_unconfined() as i64))
}

fn gauges(
    encoder: &mut DescriptorEncoder<'_>,
    families: &WorkerFamilies,
    workers: &[(Worker, &WorkerView)],
) -> fmt::Result {
    let name = "kvrouted_worker_blocks_held";
    let mut family = encoder.encode_descriptor(name, "Blocks held, by tier.", None, MetricType::Gauge)?;
    for (worker, view) in workers {
        let held = view.gauges.by_tier();
        for tier in Tier::ALL {
            let labels = worker_labels_and(*worker, "tier", tier.name());
            family.encode_family(&labels)?.encode_gauge(&(held[tier.index()] as i64))?;
        }
    }
    type Pick = fn(&WorkerView) -> i64;
    let gauges: [(&str, &str, Pick); 2] = [
        (
            "kvrouted_worker_choked",
            "1 while the worker's events wait because the index cannot free memory that it gave up.",
            |view| i64::from(view.gauges.is_choked()),
        ),
        (
            "kvrouted_worker_messages_waiting",
            "Messages that wait while the worker is dumped, loaded or recovered.",
            |view| view.gauges.waiting() as i64,
        ),
    ];
    for (name, help, pick) in gauges.into_iter().filter(|(name, ..)| families.keeps(name)) {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (worker, view) in workers {
            family.encode_family(&worker_labels(*worker))?.encode_gauge(&pick(view))?;
        }
    }
    Ok(())
}

fn trust(encoder: &mut DescriptorEncoder<'_>, workers: &[(Worker, &WorkerView)]) -> fmt::Result {
    let name = "kvrouted_worker_trust";
    let help = "Trust in the worker's view: 4 exact, 3 lower_bound, 2 unproven, 1 predicted, 0 none.";
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (worker, view) in workers {
        family.encode_family(&worker_labels(*worker))?.encode_gauge(&(view.trust.load().level as i64))?;
    }
    let name = "kvrouted_worker_trust_reason";
    let help = "1 for each reason why a worker's trust is not exact.";
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (worker, view) in workers {
        let trust = view.trust.load();
        for reason in trust.reasons.iter().filter(|_| trust.level != TrustLevel::Exact) {
            let labels = worker_labels_and(*worker, "reason", reason.name());
            family.encode_family(&labels)?.encode_gauge(&1_i64)?;
        }
    }
    Ok(())
}

/// The labels that identify a worker.
#[must_use]
pub(crate) fn worker_labels(worker: Worker) -> [(&'static str, String); 2] {
    [("worker_id", worker.id.0.to_string()), ("dp_rank", worker.rank.0.to_string())]
}

/// The labels that identify a worker, and one more.
#[must_use]
pub(crate) fn worker_labels_and(worker: Worker, label: &'static str, value: &str) -> [(&'static str, String); 3] {
    let [id, rank] = worker_labels(worker);
    [id, rank, (label, value.to_owned())]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    const PREFIX: &str = "kvrouted_worker_";

    /// The metrics of workers that a text names.
    fn named(text: &str) -> impl Iterator<Item = String> {
        let is_name = |c: char| c.is_ascii_lowercase() || c == '_';
        let name = move |(at, _): (usize, &str)| -> String {
            text[at + PREFIX.len()..].chars().take_while(|c| is_name(*c)).collect()
        };
        text.match_indices(PREFIX).map(name).map(|name| name.trim_end_matches("_total").to_owned())
    }

    #[test]
    fn the_watched_metrics_are_those_of_alerts_and_dashboards() {
        let ops = Path::new(env!("CARGO_MANIFEST_DIR")).join("ops");
        let dashboards = std::fs::read_dir(ops.join("grafana")).unwrap().map(|entry| entry.unwrap().path());
        let dashboards = dashboards.filter(|path| path.extension().is_some_and(|of| of == "json"));
        let mut used = BTreeSet::new();
        for path in dashboards.chain([ops.join("prometheus/alerts.yaml")]) {
            used.extend(named(&std::fs::read_to_string(&path).unwrap()));
        }
        assert_eq!(used, WATCHED_WORKER_METRICS.iter().map(|name| (*name).to_owned()).collect());
    }

    #[test]
    fn a_large_fleet_has_only_watched_metrics_and_the_others_are_counted() {
        let (small, large) = (WorkerFamilies::of(2, 2), WorkerFamilies::of(3, 2));
        for (name, is_watched) in [("kvrouted_worker_trust", true), ("kvrouted_worker_unknown_tags", false)] {
            assert!(small.keeps(name));
            assert_eq!(large.keeps(name), is_watched);
        }
        assert_eq!((small.left_out.get(), large.left_out.get()), (0, 1));
    }
}
