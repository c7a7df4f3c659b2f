//! What `fleet` found, as JSON and as tables.

use std::collections::BTreeMap;

use comfy_table::{Table, presets};
use serde::Serialize;

use super::children::Work;
use super::router::{Resources, Started};
use super::run::Settled;
use super::verify::Verified;
use crate::args::FleetArgs;
use crate::socket::Measured;

/// Engines or gateways that reach less of their rate than this are themselves too slow.
const REACHED_MIN: f64 = 0.98;
/// A daemon keeps up if it is behind by less than what engines publish in this time, seconds.
const BEHIND_S_MAX: f64 = 0.25;

/// Everything.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    pub(super) machine: String,
    pub(super) args: FleetArgs,
    pub(super) start: Start,
    pub(super) rows: Vec<Row>,
    pub(super) partition: Option<Partition>,
    pub(super) end: End,
}

/// How the daemons began.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Start {
    pub(super) workers: u32,
    pub(super) ranks: usize,
    pub(super) engine_processes: usize,
    /// Blocks in all caches.
    pub(super) held_blocks: u64,
    /// Batches that filled the caches, and that the daemons replayed.
    pub(super) batches: u64,
    /// By daemon; they start at the same time.
    pub(super) started: Vec<Started>,
    /// By daemon, once all is exact and before gateways connect.
    pub(super) resources: Vec<Resources>,
    pub(super) verified: Vec<Verified>,
    pub(super) load_average: f64,
}

/// One measurement.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    /// Batches a second that engines are to publish, and those that they published.
    pub(super) offered_batches_per_s: f64,
    pub(super) published_batches_per_s: f64,
    /// Routes a second that gateways are to ask for, and those that were answered until the last was.
    pub(super) offered_routes_per_s: f64,
    pub(super) answered_routes_per_s: f64,
    /// Of a route, from when it was due, microseconds.
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    /// Whether the engines published what they were to, and every daemon was hardly behind.
    pub(super) events_kept_up: bool,
    /// Whether hardly a route was left at the end.
    pub(super) routes_kept_up: bool,
    /// Batches that the slowest daemon had not applied when publishing ended.
    pub(super) behind_batches: u64,
    /// Seconds from then until it had, and until all overlaps were exact.
    pub(super) applied_s: Option<f64>,
    pub(super) exact_s: Option<f64>,
    /// Processor time of serving threads for each route with its free, and of ingest threads for each batch of each
    /// daemon; of engines for each batch, of gateways for each route. Microseconds.
    pub(super) serving_us: f64,
    pub(super) ingest_us: f64,
    pub(super) engine_us: f64,
    pub(super) gateway_us: f64,
    /// Processor time of the daemons' threads, seconds.
    pub(super) threads_s: BTreeMap<String, f64>,
    /// Workers replaced.
    pub(super) replaced: u32,
    /// Batches that engines have dropped since they started, of those that run.
    pub(super) dropped: u64,
    /// Counters that grew, summed over daemons.
    pub(super) counters: BTreeMap<String, u64>,
    pub(super) verified: Vec<Verified>,
    /// Before it began.
    pub(super) load_average: f64,
}

/// What came of a partition.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Partition {
    pub(super) seconds: f64,
    pub(super) batches_per_s: f64,
    /// Batches computed meanwhile.
    pub(super) batches: u64,
    /// Batches not applied when publishing ended, a second after the partition.
    pub(super) behind: u64,
    /// Seconds from then until all was exact.
    pub(super) exact_s: Option<f64>,
    pub(super) counters: BTreeMap<String, u64>,
    pub(super) verified: Vec<Verified>,
}

/// What is left.
#[derive(Clone, Debug, Serialize)]
pub(super) struct End {
    /// Bookings left after all gateways freed theirs, by daemon.
    pub(super) bookings_live: Vec<u64>,
    /// Whether all daemons give the same overlaps.
    pub(super) digests_equal: bool,
    pub(super) resources: Vec<Resources>,
    /// Subscribers that engines disconnected because they read too slowly.
    pub(super) subscribers_cut: u64,
}

impl Start {
    /// A line that says how far the run is.
    #[must_use]
    pub(super) fn line(&self) -> String {
        let slowest = |of: fn(&Started) -> f64| self.started.iter().map(of).fold(0.0, f64::max);
        let (ready_s, exact_s) = (slowest(|of| of.ready_s), slowest(|of| of.exact_s));
        format!("{} ranks are connected after {ready_s:.2} s and exact after {exact_s:.2} s", self.ranks)
    }
}

impl Row {
    /// A line that says how far the run is.
    #[must_use]
    pub(super) fn line(&self) -> String {
        format!(
            "{:.0} of {:.0} batches/s, {} behind; {:.0} of {:.0} routes/s, p99 {:.0} us",
            self.published_batches_per_s,
            self.offered_batches_per_s,
            self.behind_batches,
            self.answered_routes_per_s,
            self.offered_routes_per_s,
            self.p99_us
        )
    }

    /// The row of a measurement that took `seconds`, without what came after it.
    pub(super) fn new(
        (offered_batches_per_s, offered_routes_per_s): (f64, f64),
        seconds: f64,
        engines: Work,
        asked: &Measured,
        gateways_ns: u64,
        threads_s: BTreeMap<String, f64>,
    ) -> Self {
        let us = |quantile| asked.latency_ns.value_at_quantile(quantile) as f64 / 1e3;
        let each = |seconds: f64, of: u64| seconds * 1e6 / of.max(1) as f64;
        let of_thread = |kind: &str| threads_s.get(kind).copied().unwrap_or(0.0);
        Self {
            offered_batches_per_s,
            published_batches_per_s: engines.batches as f64 / seconds,
            offered_routes_per_s,
            answered_routes_per_s: 0.0,
            p50_us: us(0.5),
            p99_us: us(0.99),
            events_kept_up: false,
            routes_kept_up: asked.kept_up,
            behind_batches: 0,
            applied_s: None,
            exact_s: None,
            serving_us: each(of_thread("kvrouted-core"), asked.requests),
            ingest_us: each(of_thread("ingest"), engines.batches),
            engine_us: each(engines.cpu_ns as f64 / 1e9, engines.batches),
            gateway_us: each(gateways_ns as f64 / 1e9, asked.requests),
            threads_s,
            replaced: 0,
            dropped: 0,
            counters: BTreeMap::new(),
            verified: Vec::new(),
            load_average: 0.0,
        }
    }

    /// Adds how the daemons got to the last batch. With a loss, replays decide how far a daemon is behind, so nothing is
    /// said of whether it keeps up.
    pub(super) fn settle(&mut self, settled: Settled, loss: f64) {
        (self.behind_batches, self.applied_s, self.exact_s) = (settled.behind, settled.applied_s, settled.exact_s);
        let is_published = self.published_batches_per_s >= REACHED_MIN * self.offered_batches_per_s;
        let is_behind = settled.behind as f64 > BEHIND_S_MAX * self.offered_batches_per_s;
        self.events_kept_up = is_published && !is_behind && (loss > 0.0 || settled.applied_s.is_some());
    }
}

impl Report {
    /// As text.
    #[must_use]
    pub(crate) fn table(&self) -> String {
        format!("{}\n{}\n{}", self.head(), self.measurements(), self.tail())
    }

    fn head(&self) -> String {
        let (start, args) = (&self.start, &self.args);
        let mut text = format!(
            "{} workers x {} ranks = {} ranks in {} processes, {} daemons; {} blocks in caches of {}; {}; load average {:.1}\n",
            start.workers,
            args.ranks,
            start.ranks,
            start.engine_processes,
            args.routers,
            start.held_blocks,
            args.cache_blocks,
            self.machine,
            start.load_average
        );
        for (at, (started, resources)) in start.started.iter().zip(&start.resources).enumerate() {
            text.push_str(&format!(
                "daemon {at}: answers after {:.2} s, all ranks connected after {:.2} s, all exact after {:.2} s \
                 ({} batches replayed); {} descriptors ({:.2} a rank), {:.1} MiB resident ({:.1} B a block)\n",
                started.answers_s,
                started.ready_s,
                started.exact_s,
                start.batches,
                resources.descriptors,
                resources.descriptors as f64 / start.ranks as f64,
                resources.resident_bytes as f64 / f64::from(1 << 20),
                resources.resident_bytes as f64 / start.held_blocks.max(1) as f64
            ));
        }
        text.push_str(&checked("at the start", &start.verified));
        text
    }

    fn measurements(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_FULL_CONDENSED).set_header([
            "batches/s",
            "published",
            "kept up",
            "behind",
            "exact after",
            "routes/s",
            "answered",
            "kept up",
            "p50 us",
            "p99 us",
            "us/route",
            "us/batch",
            "engine",
            "gateway",
            "wrong",
            "inexact",
            "load",
        ]);
        let yes = |is: bool| if is { "yes" } else { "no" }.to_owned();
        let seconds = |of: Option<f64>| of.map_or_else(|| "never".to_owned(), |s| format!("{s:.2} s"));
        for row in &self.rows {
            let sum = |of: fn(&Verified) -> u64| row.verified.iter().map(of).sum::<u64>();
            table.add_row([
                format!("{:.0}", row.offered_batches_per_s),
                format!("{:.0}", row.published_batches_per_s),
                yes(row.events_kept_up),
                row.behind_batches.to_string(),
                seconds(row.exact_s),
                format!("{:.0}", row.offered_routes_per_s),
                format!("{:.0}", row.answered_routes_per_s),
                yes(row.routes_kept_up),
                format!("{:.0}", row.p50_us),
                format!("{:.0}", row.p99_us),
                format!("{:.1}", row.serving_us),
                format!("{:.2}", row.ingest_us),
                format!("{:.2}", row.engine_us),
                format!("{:.1}", row.gateway_us),
                sum(|of| of.wrong).to_string(),
                sum(|of| of.inexact).to_string(),
                format!("{:.1}", row.load_average),
            ]);
        }
        let compared: u64 = self.rows.iter().flat_map(|row| &row.verified).map(|of| of.compared).sum();
        format!("{table}\n(wrong: of {compared} exact overlaps in all; engine: us/batch; gateway: us/route)")
    }

    fn tail(&self) -> String {
        let mut text = String::new();
        for row in &self.rows {
            let threads: Vec<_> = row.threads_s.iter().filter(|(_, s)| **s >= 0.05).collect();
            text.push_str(&format!(
                "{:.0} batches/s, {:.0} routes/s: {} workers replaced, {} batches dropped; threads, s: {threads:?}; \
                 counters: {:?}\n",
                row.offered_batches_per_s, row.offered_routes_per_s, row.replaced, row.dropped, row.counters
            ));
        }
        if let Some(partition) = &self.partition {
            let exact = partition.exact_s.map_or_else(|| "never".to_owned(), |s| format!("after {s:.2} s"));
            text.push_str(&format!(
                "partition of {} s at {:.0} batches/s: {} batches behind at its end, all exact {exact}; counters: {:?}\n{}",
                partition.seconds,
                partition.batches_per_s,
                partition.behind,
                partition.counters,
                checked("after it", &partition.verified)
            ));
        }
        let end = &self.end;
        let resources: Vec<_> = end.resources.iter().map(|of| (of.descriptors, of.resident_bytes >> 20)).collect();
        text.push_str(&format!(
            "at the end: bookings left {:?}, answers of all daemons equal: {}, subscribers disconnected by engines: {}, \
             descriptors and MiB: {resources:?}\n",
            end.bookings_live, end.digests_equal, end.subscribers_cut
        ));
        text
    }
}

fn checked(when: &str, verified: &[Verified]) -> String {
    let sum = |of: fn(&Verified) -> u64| verified.iter().map(of).sum::<u64>();
    let (wrong, compared, inexact) = (sum(|of| of.wrong), sum(|of| of.compared), sum(|of| of.inexact));
    format!("{when}: {wrong} wrong of {compared} exact overlaps, {inexact} not exact\n")
}
