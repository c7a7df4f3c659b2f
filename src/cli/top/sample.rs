//! What a daemon did between two status pages.

use std::collections::HashMap;
use std::time::Duration;

use crate::ids::Worker;
use crate::metrics::LATENCY_COUNTER_PREFIX;
use crate::trust::{Trust, TrustReason};
use crate::wire::{StatusPage, WorkerStatus};

/// Looks that the history keeps.
pub(super) const HISTORY_SAMPLES_MAX: usize = 240;

/// A status page, and what had changed since the one before.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    pub(super) page: StatusPage,
    at: Duration,
    /// `None` = there is no page before it, or it is of another run of the daemon.
    pub(super) rates: Option<Rates>,
    pub(super) workers: Vec<WorkerLine>,
}

/// What the daemon did in the time between two pages.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Rates {
    pub(super) routes_per_s: f64,
    pub(super) no_worker_per_s: f64,
    pub(super) batches_per_s: f64,
    pub(super) gaps: u64,
    /// The share of looked-up blocks that the chosen workers held; `None` = nothing was looked up.
    pub(super) hit: Option<f64>,
    /// Bounds of the time of a decision, microseconds: half of the decisions took at most the first; `None` = there was none.
    pub(super) decision_us: Option<[f64; 2]>,
}

/// One point of the history.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Point {
    pub(super) routes_per_s: f64,
    pub(super) batches_per_s: f64,
}

/// One worker.
#[derive(Clone, Debug)]
pub(super) struct WorkerLine {
    pub(super) worker: Worker,
    pub(super) name: String,
    pub(super) model: String,
    pub(super) state: &'static str,
    pub(super) trust: Trust,
    pub(super) blocks: u64,
    pub(super) requests: u64,
    pub(super) prefill_tokens: u64,
    /// The share of its prompts' blocks that it held when it was chosen; `None` = it was never chosen.
    pub(super) hit: Option<f64>,
    /// `None` = not known yet.
    pub(super) batches_per_s: Option<f64>,
    pub(super) gaps: Option<u64>,
    pub(super) counters: Vec<(String, u64)>,
    pub(super) remedy: Option<String>,
}

fn counter(counters: &[(String, u64)], name: &str) -> u64 {
    counters.iter().find(|(of, _)| of == name).map_or(0, |(_, value)| *value)
}

impl Sample {
    /// The first page, as of a time since the start.
    pub(super) fn first(page: StatusPage, at: Duration) -> Self {
        let workers = page.workers.iter().map(|now| WorkerLine::of(now, None)).collect();
        Self { page, at, rates: None, workers }
    }

    /// The page after this one.
    pub(super) fn next(&self, page: StatusPage, at: Duration) -> Self {
        let seconds = at.saturating_sub(self.at).as_secs_f64();
        if page.instance_id != self.page.instance_id || page.uptime_ms < self.page.uptime_ms || seconds <= 0.0 {
            return Self::first(page, at);
        }
        let before: HashMap<Worker, &WorkerStatus> = self.page.workers.iter().map(|of| (of.worker, of)).collect();
        let line = |now: &WorkerStatus| WorkerLine::of(now, before.get(&now.worker).map(|before| (*before, seconds)));
        let workers: Vec<WorkerLine> = page.workers.iter().map(line).collect();
        let rates = Some(Rates::of((&self.page, &page), &workers, seconds));
        Self { page, at, rates, workers }
    }

    /// Its point of the history.
    pub(super) fn point(&self) -> Option<Point> {
        let Rates { routes_per_s, batches_per_s, .. } = *self.rates.as_ref()?;
        Some(Point { routes_per_s, batches_per_s })
    }

    /// A counter or gauge of the daemon; 0 = an older daemon does not have it.
    pub(super) fn figure(&self, name: &str) -> u64 {
        counter(&self.page.counters, name)
    }
}

impl Rates {
    fn of((before, now): (&StatusPage, &StatusPage), workers: &[WorkerLine], seconds: f64) -> Self {
        let more = |name: &str| counter(&now.counters, name).saturating_sub(counter(&before.counters, name));
        let per_s = |name: &str| more(name) as f64 / seconds;
        let looked_up = more("request_blocks");
        Self {
            routes_per_s: per_s("routes"),
            no_worker_per_s: per_s("routes_nobody"),
            batches_per_s: workers.iter().filter_map(|line| line.batches_per_s).sum(),
            gaps: workers.iter().filter_map(|line| line.gaps).sum(),
            hit: (looked_up > 0).then(|| more("chosen_overlap_blocks") as f64 / looked_up as f64),
            decision_us: decision_us(before, now),
        }
    }
}

/// The bounds below which half, and 99 in 100, of the decisions between two pages took.
fn decision_us(before: &StatusPage, now: &StatusPage) -> Option<[f64; 2]> {
    let bound_ns = |name: &str| name.strip_prefix(LATENCY_COUNTER_PREFIX)?.parse::<u64>().ok();
    let mut buckets: Vec<(u64, u64)> = now
        .counters
        .iter()
        .filter_map(|(name, value)| Some((bound_ns(name)?, value.saturating_sub(counter(&before.counters, name)))))
        .collect();
    buckets.sort_unstable();
    let all: u64 = buckets.iter().map(|(_, count)| count).sum();
    let quantile = |share: f64| {
        let (wanted, mut seen) = ((all as f64 * share).ceil() as u64, 0);
        let reached = buckets.iter().find(|(_, count)| {
            seen += count;
            seen >= wanted
        });
        reached.map_or(0.0, |(bound_ns, _)| *bound_ns as f64 / 1e3)
    };
    (all > 0).then(|| [quantile(0.5), quantile(0.99)])
}

impl WorkerLine {
    /// A worker as it is, and as it was some seconds before.
    fn of(now: &WorkerStatus, before: Option<(&WorkerStatus, f64)>) -> Self {
        let of = |name: &str| counter(&now.counters, name);
        // A worker that has left and come back counts from 0 again.
        let more = |name: &str| {
            let (before, seconds) = before?;
            Some((of(name).checked_sub(counter(&before.counters, name))?, seconds))
        };
        let chosen_for = of("prompt_blocks");
        Self {
            worker: now.worker,
            name: now.name.clone(),
            model: now.model.clone(),
            state: now.state.name(),
            trust: now.trust,
            blocks: now.blocks_held,
            requests: of("active_requests"),
            prefill_tokens: of("active_prefill_tokens"),
            hit: (chosen_for > 0).then(|| of("prompt_blocks_held") as f64 / chosen_for as f64),
            batches_per_s: more("batches").map(|(batches, seconds)| batches as f64 / seconds),
            gaps: more("gaps").map(|(gaps, _)| gaps),
            counters: now.counters.clone(),
            remedy: now.remedy.clone().or_else(|| {
                let worst = now.trust.reasons.iter().min_by_key(|reason| reason.cap());
                worst.map(|reason| TrustReason::remedy(reason).to_owned())
            }),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::fleet::WorkerState;
    use crate::ids::SpaceId;
    use crate::trust::TrustLevel;

    /// A page of this many workers, `seconds` after the start.
    pub(in super::super) fn page(workers: u64, seconds: u64) -> StatusPage {
        let named = |(name, value): (&str, u64)| (name.to_owned(), value);
        let worker = |id: u64| WorkerStatus {
            worker: Worker::new(id, 0),
            space: SpaceId(0),
            model: "m".into(),
            name: format!("w{id}"),
            state: WorkerState::Ready,
            trust: Trust { level: TrustLevel::Exact, ..Trust::default() },
            blocks_held: 1000 * id,
            blocks_by_tier: [1000 * id, 0, 0, 0],
            counters: [("batches", 10 * id * seconds), ("gaps", 0), ("active_requests", id), ("prompt_blocks", 4)]
                .into_iter()
                .chain([("prompt_blocks_held", 3)])
                .map(named)
                .collect(),
            remedy: None,
            source: "config".into(),
        };
        let bucket = |ns: u64, count: u64| (format!("{LATENCY_COUNTER_PREFIX}{ns}"), count);
        let routes = 500 * seconds;
        StatusPage {
            workers: (1..=workers).map(worker).collect(),
            uptime_ms: 1000 * seconds,
            daemon_version: "0.1.0".into(),
            counters: [
                ("routes", routes),
                ("request_blocks", 400 * seconds),
                ("chosen_overlap_blocks", 300 * seconds),
                ("bookings_live", 7),
            ]
            .map(named)
            .into_iter()
            .chain([bucket(2000, routes / 100 * 99), bucket(65_536, routes / 100)])
            .collect(),
            ..StatusPage::default()
        }
    }

    pub(in super::super) fn fleet(workers: u64) -> [StatusPage; 2] {
        [page(workers, 10), page(workers, 20)]
    }

    #[test]
    fn rates_are_those_between_two_pages() {
        let [first, second] = fleet(3);
        let sample = Sample::first(first, Duration::from_secs(1)).next(second, Duration::from_secs(11));
        let rates = sample.rates.as_ref().expect("two pages");
        assert_eq!((rates.routes_per_s, rates.batches_per_s, rates.gaps), (500.0, 60.0, 0));
        assert_eq!((rates.hit, rates.decision_us), (Some(0.75), Some([2.0, 2.0])));
        assert_eq!(sample.workers[1].batches_per_s, Some(20.0));
        assert_eq!((sample.workers[1].hit, sample.workers[2].requests), (Some(0.75), 3));
    }

    #[test]
    fn another_run_of_the_daemon_has_no_rates_and_a_worker_that_came_back_begins_anew() {
        let [first, mut second] = fleet(2);
        second.instance_id = 9;
        let sample = Sample::first(first.clone(), Duration::ZERO);
        assert!(sample.next(second, Duration::from_secs(10)).rates.is_none());
        let [_, mut second] = fleet(2);
        second.workers[0].counters[0].1 = 0;
        let sample = sample.next(second, Duration::from_secs(10));
        assert_eq!((sample.workers[0].batches_per_s, sample.workers[1].batches_per_s), (None, Some(20.0)));
        let page = StatusPage::default();
        assert!(Sample::first(first, Duration::ZERO).next(page, Duration::ZERO).rates.is_none(), "no time has passed");
    }
}
