//! What `socket` found, as JSON and as a table.

use comfy_table::{Table, presets};
use serde::Serialize;

use super::contents::Size;
use super::load::{Measured, Pace};
use crate::args::{ServedBy, SocketArgs};

/// The request that ratios are taken of.
const OF_RATIOS: &str = "720 hashes";

/// One way to ask one server.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    /// Connections.
    pub(crate) connections: u32,
    /// Requests in flight on each, at most.
    pub(crate) in_flight: u32,
    /// Whether the client never sleeps.
    pub(crate) client_spins: bool,
    /// Requests a second that come in an open loop; none in a closed one.
    pub(crate) offered_per_s: Option<f64>,
    /// Requests a second that were answered and freed.
    pub(crate) requests_per_s: f64,
    /// Route, begin to reply, microseconds: the median.
    pub(crate) p50_us: f64,
    /// 99 of 100 are at most this.
    pub(crate) p99_us: f64,
    /// 999 of 1000 are at most this.
    pub(crate) p999_us: f64,
    /// Processor time of the server's process for each route and its free, microseconds.
    pub(crate) server_cpu_us: f64,
    /// Open loop: whether the server kept up.
    pub(crate) kept_up: Option<bool>,
}

impl Row {
    /// Of what was measured.
    #[must_use]
    pub(crate) fn new(way: (u32, u32), spins: bool, pace: Pace, measured: &Measured, cpu_ns: u64) -> Self {
        let us = |quantile| measured.latency_ns.value_at_quantile(quantile) as f64 / 1e3;
        let offered_per_s = match pace {
            Pace::Closed => None,
            Pace::Open(per_second) => Some(per_second),
        };
        Self {
            connections: way.0,
            in_flight: way.1,
            client_spins: spins,
            offered_per_s,
            requests_per_s: measured.requests as f64 / measured.seconds.max(1e-9),
            p50_us: us(0.5),
            p99_us: us(0.99),
            p999_us: us(0.999),
            server_cpu_us: cpu_ns as f64 / 1e3 / measured.requests.max(1) as f64,
            kept_up: offered_per_s.map(|_| measured.kept_up),
        }
    }

    fn is(&self, way: (u32, u32), spins: bool) -> bool {
        (self.connections, self.in_flight) == way && self.client_spins == spins && self.offered_per_s.is_none()
    }
}

/// One size of requests.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Sides {
    /// Which.
    pub(crate) size: Size,
    /// Bytes of a route: a frame of ours, a request of the peer's.
    pub(crate) request_bytes: [usize; 2],
    /// Bytes of the bodies of our replies, which are the floor's too: to a route, to a free.
    pub(crate) reply_body_bytes: [u32; 2],
    /// The bare server.
    pub(crate) floor: Vec<Row>,
    /// The daemon.
    pub(crate) kvrouted: Vec<Row>,
    /// The peer's service.
    pub(crate) peer: Vec<Row>,
}

impl Sides {
    /// Of the rows of each.
    #[must_use]
    pub(crate) fn new(
        size: Size,
        request_bytes: [usize; 2],
        reply_body_bytes: [u32; 2],
        rows: [(ServedBy, Vec<Row>); 3],
    ) -> Self {
        let mut sides =
            Self { size, request_bytes, reply_body_bytes, floor: Vec::new(), kvrouted: Vec::new(), peer: Vec::new() };
        for (side, rows) in rows {
            match side {
                ServedBy::Floor => sides.floor = rows,
                ServedBy::Kvrouted => sides.kvrouted = rows,
                ServedBy::Peer => sides.peer = rows,
            }
        }
        sides
    }
}

/// A figure of two quantiles.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Pair {
    /// Of the medians.
    pub(crate) p50: f64,
    /// Of the 99th of 100.
    pub(crate) p99: f64,
}

/// Everything.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    /// As it was called.
    pub(crate) args: SocketArgs,
    /// Every size.
    pub(crate) sizes: Vec<Sides>,
    /// Microseconds that the daemon adds to the floor, by size: one request in flight, a client that never sleeps.
    pub(crate) added_us: Vec<(&'static str, Pair)>,
    /// Processor time that it adds to a route of 720 hashes and its free, microseconds: 32 in flight, closed loop, a
    /// client that sleeps.
    pub(crate) added_cpu_us: Option<f64>,
    /// How many times quicker than the peer: 720 hashes, one in flight, a client that never sleeps.
    pub(crate) ratio_to_peer: Option<Pair>,
    /// The same for a client that sleeps.
    pub(crate) ratio_to_peer_blocking: Option<Pair>,
    /// Requests a second of the floor's, 32 in flight, the lowest over the sizes.
    pub(crate) throughput_of_floor: Option<f64>,
}

fn closed(rows: &[Row], way: (u32, u32), spins: bool) -> Option<&Row> {
    rows.iter().find(|row| row.is(way, spins))
}

impl Report {
    /// Of every size.
    #[must_use]
    pub(crate) fn new(args: SocketArgs, sizes: Vec<Sides>) -> Self {
        let (single, deep) = ((1, 1), (1, 32));
        let added = |sides: &Sides| {
            let (ours, floor) = (closed(&sides.kvrouted, single, true)?, closed(&sides.floor, single, true)?);
            Some((sides.size.name, Pair { p50: ours.p50_us - floor.p50_us, p99: ours.p99_us - floor.p99_us }))
        };
        let of_ratios = sizes.iter().find(|sides| sides.size.name == OF_RATIOS);
        let ratio = |spins| {
            let sides = of_ratios?;
            let (ours, peer) = (closed(&sides.kvrouted, single, spins)?, closed(&sides.peer, single, spins)?);
            Some(Pair { p50: peer.p50_us / ours.p50_us, p99: peer.p99_us / ours.p99_us })
        };
        let cpu = || {
            let sides = of_ratios?;
            let (ours, floor) = (closed(&sides.kvrouted, deep, false)?, closed(&sides.floor, deep, false)?);
            Some(ours.server_cpu_us - floor.server_cpu_us)
        };
        let of_floor = |sides: &Sides| {
            let best = |rows: &[Row]| {
                let of = |spins| closed(rows, deep, spins).map_or(0.0, |row| row.requests_per_s);
                of(false).max(of(true))
            };
            best(&sides.kvrouted) / best(&sides.floor)
        };
        Self {
            args,
            added_us: sizes.iter().filter_map(added).collect(),
            added_cpu_us: cpu(),
            ratio_to_peer: ratio(true),
            ratio_to_peer_blocking: ratio(false),
            throughput_of_floor: sizes.iter().map(of_floor).min_by(f64::total_cmp),
            sizes,
        }
    }

    /// For people.
    #[must_use]
    pub(crate) fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_FULL_CONDENSED);
        table.set_header(vec![
            "request",
            "server",
            "connections",
            "in flight",
            "client",
            "loop",
            "req/s",
            "p50 us",
            "p99 us",
            "p99.9 us",
            "server CPU us",
            "kept up",
        ]);
        for sides in &self.sizes {
            for (name, rows) in [("floor", &sides.floor), ("kvrouted", &sides.kvrouted), ("peer", &sides.peer)] {
                for row in rows {
                    table.add_row(vec![
                        sides.size.name.to_owned(),
                        name.to_owned(),
                        row.connections.to_string(),
                        row.in_flight.to_string(),
                        if row.client_spins { "spins" } else { "sleeps" }.to_owned(),
                        row.offered_per_s.map_or_else(|| "closed".to_owned(), |rate| format!("{rate:.0}/s")),
                        format!("{:.0}", row.requests_per_s),
                        format!("{:.1}", row.p50_us),
                        format!("{:.1}", row.p99_us),
                        format!("{:.1}", row.p999_us),
                        format!("{:.2}", row.server_cpu_us),
                        row.kept_up.map_or("", |kept_up| if kept_up { "yes" } else { "no" }).to_owned(),
                    ]);
                }
            }
        }
        let pair = |pair: Option<Pair>| {
            pair.map_or_else(|| "-".to_owned(), |pair| format!("p50 {:.2}, p99 {:.2}", pair.p50, pair.p99))
        };
        let number = |number: Option<f64>| number.map_or_else(|| "-".to_owned(), |number| format!("{number:.2}"));
        let mut text = table.to_string();
        for (size, added) in &self.added_us {
            text.push_str(&format!("\nadded to the floor, {size}, us: {}", pair(Some(*added))));
        }
        text.push_str(&format!("\nadded processor time, us: {}", number(self.added_cpu_us)));
        text.push_str(&format!("\nratio to the peer: {}", pair(self.ratio_to_peer)));
        text.push_str(&format!("\nratio to the peer, client sleeps: {}", pair(self.ratio_to_peer_blocking)));
        text.push_str(&format!("\nthroughput of the floor's: {}", number(self.throughput_of_floor)));
        text
    }
}
