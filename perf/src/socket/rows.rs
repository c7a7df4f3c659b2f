//! What was measured of each way to ask each server, and its medians over repeats.

use serde::Serialize;

use super::known::Caught;
use super::load::Measured;
use crate::args::{Io, ServedBy};
use crate::measure::median;

/// A way to ask a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    /// The place of the requests' size among those that are asked about.
    pub(crate) size: usize,
    /// Which server.
    pub(crate) side: ServedBy,
    /// Its io engine; `None` = the peer's.
    pub(crate) io: Option<Io>,
    /// Whether engines published meanwhile.
    pub(crate) ingest: bool,
    /// Whether the client never slept, nor the server where it has the choice.
    pub(crate) client_spins: bool,
    /// Connections, and requests in flight on each.
    pub(crate) way: (u32, u32),
    /// Whether requests came at a rate of their own.
    pub(crate) is_open: bool,
}

/// One measurement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    requests_per_s: f64,
    p50_us: f64,
    p99_us: f64,
    p999_us: f64,
    server_cpu_us: f64,
    kept_up: bool,
}

impl Sample {
    /// Of what was measured, with the processor time of the server's process.
    #[must_use]
    pub(crate) fn new(measured: &Measured, cpu_ns: u64) -> Self {
        let us = |quantile| measured.latency_ns.value_at_quantile(quantile) as f64 / 1e3;
        Self {
            requests_per_s: measured.requests as f64 / measured.seconds.max(1e-9),
            p50_us: us(0.5),
            p99_us: us(0.99),
            p999_us: us(0.999),
            server_cpu_us: cpu_ns as f64 / 1e3 / measured.requests.max(1) as f64,
            kept_up: measured.kept_up,
        }
    }
}

#[cfg(test)]
impl Sample {
    /// Made up: requests a second, p50 and p99 in microseconds, and processor time of the server.
    pub(crate) const fn made_up(requests_per_s: f64, [p50_us, p99_us]: [f64; 2], server_cpu_us: f64) -> Self {
        Self { requests_per_s, p50_us, p99_us, p999_us: p99_us, server_cpu_us, kept_up: true }
    }
}

/// Figures of one way to ask one server, each the median over repeats.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Figures {
    /// Requests a second that were answered and freed.
    pub(crate) requests_per_s: f64,
    /// Route, begin to reply, microseconds: the median.
    pub(crate) p50_us: f64,
    /// The lowest and the highest median of a repeat.
    pub(crate) p50_us_range: [f64; 2],
    /// 99 of 100 are at most this.
    pub(crate) p99_us: f64,
    /// 999 of 1000 are at most this.
    pub(crate) p999_us: f64,
    /// Processor time of the server's process for each route and its free, microseconds.
    pub(crate) server_cpu_us: f64,
    /// Open loop: whether the server kept up, each time.
    pub(crate) kept_up: bool,
}

impl Figures {
    fn of(samples: &[Sample]) -> Self {
        let all = |field: fn(&Sample) -> f64| samples.iter().map(field).collect::<Vec<_>>();
        let of = |field| median(all(field));
        let p50s = all(|sample| sample.p50_us);
        Self {
            requests_per_s: of(|sample| sample.requests_per_s),
            p50_us: of(|sample| sample.p50_us),
            p50_us_range: [
                p50s.iter().copied().reduce(f64::min).unwrap_or(0.0),
                p50s.iter().copied().reduce(f64::max).unwrap_or(0.0),
            ],
            p99_us: of(|sample| sample.p99_us),
            p999_us: of(|sample| sample.p999_us),
            server_cpu_us: of(|sample| sample.server_cpu_us),
            kept_up: samples.iter().all(|sample| sample.kept_up),
        }
    }
}

/// Everything that was measured.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    samples: Vec<(Key, Vec<Sample>)>,
    caught: Vec<(ServedBy, Caught)>,
}

impl Rows {
    /// One measurement more.
    pub(crate) fn add(&mut self, key: Key, sample: Sample) {
        match self.samples.iter_mut().find(|(other, _)| *other == key) {
            Some((_, samples)) => samples.push(sample),
            None => self.samples.push((key, vec![sample])),
        }
    }

    /// What came of messages beside one turn.
    pub(crate) fn caught(&mut self, side: ServedBy, caught: Caught) {
        self.caught.push((side, caught));
    }

    /// Every way to ask, by size, server and way.
    #[must_use]
    pub(crate) fn all(&self) -> Vec<(Key, Figures)> {
        let mut all: Vec<_> = self.samples.iter().map(|(key, samples)| (*key, Figures::of(samples))).collect();
        all.sort_by_key(|(key, _)| {
            let side = [ServedBy::Floor, ServedBy::Kvrouted, ServedBy::Peer].iter().position(|side| *side == key.side);
            let io = [Io::Epoll, Io::Uring].iter().position(|io| Some(*io) == key.io);
            (key.size, side, io, key.client_spins, key.ingest, key.way, key.is_open)
        });
        all
    }

    /// Figures of one way to ask, if it was measured.
    #[must_use]
    pub(crate) fn find(&self, key: Key) -> Option<Figures> {
        self.samples.iter().find(|(other, _)| *other == key).map(|(_, samples)| Figures::of(samples))
    }

    /// Messages a second that were published beside a server's turns, and the longest of its lags, milliseconds.
    #[must_use]
    pub(crate) fn ingest_of(&self, side: ServedBy) -> Option<(f64, f64)> {
        let of_side = || self.caught.iter().filter(|(other, _)| *other == side).map(|(_, caught)| *caught);
        let lag_ms = of_side().map(|caught| caught.lag_ms).reduce(f64::max)?;
        Some((median(of_side().map(|caught| caught.messages_per_s).collect()), lag_ms))
    }
}
