//! The metrics of workers' streams: `kvrouted_worker_…`, one line for each worker.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use super::WorkerView;
use crate::ids::{Tier, Worker};
use crate::metrics::{CounterName, CounterSet, WorkerCounter};
use crate::sandbox;
use crate::trust::TrustLevel;

/// Encodes all metrics of these workers.
///
/// # Errors
/// Those of the encoder, which writes to memory.
pub(crate) fn encode(encoder: &mut DescriptorEncoder<'_>, workers: &[(Worker, &WorkerView)]) -> fmt::Result {
    counters(encoder, workers)?;
    let help = "Batches that could not be decoded, by reason.";
    by_name(encoder, ("kvrouted_worker_undecodable", "reason", help), workers, |view| {
        view.undecodable_by_reason().collect()
    })?;
    let help = "Aborted dumps of the worker and loads into it, by reason.";
    by_name(encoder, ("kvrouted_worker_transfers_aborted", "reason", help), workers, |view| {
        view.transfers_aborted_by_reason().collect()
    })?;
    let help = "Parts of decodable batches that were skipped or could not be used, by kind.";
    by_name(encoder, ("kvrouted_worker_oddities", "kind", help), workers, |view| view.warnings_by_name().collect())?;
    gauges(encoder, workers)?;
    trust(encoder, workers)
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

fn counters(encoder: &mut DescriptorEncoder<'_>, workers: &[(Worker, &WorkerView)]) -> fmt::Result {
    for counter in WorkerCounter::ALL {
        let name = format!("kvrouted_worker_{}", counter.name());
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
    workers: &[(Worker, &WorkerView)],
    counts: impl Fn(&WorkerView) -> Vec<(&'static str, u64)>,
) -> fmt::Result {
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

fn gauges(encoder: &mut DescriptorEncoder<'_>, workers: &[(Worker, &WorkerView)]) -> fmt::Result {
    let name = "kvrouted_worker_blocks_held";
    let mut family = encoder.encode_descriptor(name, "Blocks held, by tier.", None, MetricType::Gauge)?;
    for (worker, view) in workers {
        let held = view.gauges.by_tier();
        for tier in Tier::ALL {
            let labels = worker_labels_and(*worker, "tier", tier.name());
            family.encode_family(&labels)?.encode_gauge(&(held[tier.index()] as i64))?;
        }
    }
    let name = "kvrouted_worker_choked";
    let help = "1 while the worker's events wait because the index cannot free memory that it gave up.";
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (worker, view) in workers {
        family.encode_family(&worker_labels(*worker))?.encode_gauge(&i64::from(view.gauges.is_choked()))?;
    }
    let name = "kvrouted_worker_messages_waiting";
    let help = "Messages that wait while the worker is dumped, loaded or recovered.";
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (worker, view) in workers {
        family.encode_family(&worker_labels(*worker))?.encode_gauge(&(view.gauges.waiting() as i64))?;
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
