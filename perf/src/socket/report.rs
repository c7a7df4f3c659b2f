//! What `socket` found, as JSON and as a table.

use comfy_table::{Table, presets};
use serde::Serialize;

use super::contents::Size;
use super::rows::{Figures, Key, Rows};
use super::run::Asked;
use crate::args::{Io, ServedBy, SocketArgs};

/// The request that ratios are taken of.
const OF_RATIOS: &str = "720 hashes";
/// One request in flight, and many.
const SINGLE: (u32, u32) = (1, 1);
const DEEP: (u32, u32) = (1, 32);

/// A size of requests.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Sizes {
    /// Which.
    size: Size,
    /// Bytes of a route: a frame of ours, a request of the peer's.
    request_bytes: [usize; 2],
    /// Bytes of the bodies of our replies, which are the floor's too: to a route, to a free.
    reply_body_bytes: [u32; 2],
}

/// One way to ask one server.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Row {
    size: &'static str,
    server: ServedBy,
    io: Option<Io>,
    ingest: bool,
    client_spins: bool,
    connections: u32,
    in_flight: u32,
    open_loop: bool,
    #[serde(flatten)]
    figures: Figures,
}

/// A figure of two quantiles.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Pair {
    /// Of the medians.
    pub(crate) p50: f64,
    /// Of the 99th of 100.
    pub(crate) p99: f64,
}

/// What came of the messages beside the requests.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Ingest {
    server: ServedBy,
    /// Messages a second that the engines published.
    messages_per_s: f64,
    /// The longest from the last of them to when it was known, milliseconds.
    lag_ms_max: f64,
}

/// How the servers compare.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Summary {
    /// Microseconds that the daemon adds to the floor, by size: one request in flight, both sides spin.
    pub(crate) added_us: Vec<(&'static str, Pair)>,
    /// The same where both sides sleep.
    pub(crate) added_us_blocking: Vec<(&'static str, Pair)>,
    /// Processor time that it adds to a route and its free, by size, microseconds: 32 in flight, closed loop, both
    /// sides sleep.
    pub(crate) added_cpu_us: Vec<(&'static str, f64)>,
    /// How many times quicker than the peer: 720 hashes, one in flight, both sides spin (of the peer only its client).
    pub(crate) ratio_to_peer: Option<Pair>,
    /// The same where both sides sleep.
    pub(crate) ratio_to_peer_blocking: Option<Pair>,
    /// Requests a second of the floor's, 32 in flight, the lowest over the sizes.
    pub(crate) throughput_of_floor: Option<f64>,
}

/// Everything.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    /// As it was called.
    pub(crate) args: SocketArgs,
    /// Processors that this process may use.
    pub(crate) processors: usize,
    /// Tasks that ran or waited to, when it ended: the mean over the last minute, its own included.
    pub(crate) load_average: f64,
    /// The requests.
    pub(crate) sizes: Vec<Sizes>,
    /// Every way to ask every server.
    pub(crate) rows: Vec<Row>,
    /// Messages beside the requests.
    pub(crate) ingest: Vec<Ingest>,
    /// How the servers compare while engines publish. The floor has no engines: its figures are those without.
    pub(crate) with_ingest: Option<Summary>,
    /// The same while they do not.
    #[serde(flatten)]
    pub(crate) quiet: Summary,
}

/// Where figures of one engine are looked up.
struct Compared<'a> {
    names: &'a [&'static str],
    rows: &'a Rows,
    io: Option<Io>,
    ingest: bool,
}

impl Compared<'_> {
    fn closed(&self, size: usize, side: ServedBy, way: (u32, u32), client_spins: bool) -> Option<Figures> {
        let io = if side == ServedBy::Peer { None } else { self.io };
        let ingest = self.ingest && side != ServedBy::Floor;
        self.rows.find(Key { size, side, io, ingest, client_spins, way, is_open: false })
    }

    fn added_us(&self, spins: bool) -> Vec<(&'static str, Pair)> {
        let added = |(size, name): (usize, &&'static str)| {
            let of = |side| self.closed(size, side, SINGLE, spins);
            let (ours, floor) = (of(ServedBy::Kvrouted)?, of(ServedBy::Floor)?);
            Some((*name, Pair { p50: ours.p50_us - floor.p50_us, p99: ours.p99_us - floor.p99_us }))
        };
        self.names.iter().enumerate().filter_map(added).collect()
    }

    fn added_cpu_us(&self) -> Vec<(&'static str, f64)> {
        let added = |(size, name): (usize, &&'static str)| {
            let of = |side| self.closed(size, side, DEEP, false);
            Some((*name, of(ServedBy::Kvrouted)?.server_cpu_us - of(ServedBy::Floor)?.server_cpu_us))
        };
        self.names.iter().enumerate().filter_map(added).collect()
    }

    fn ratio_to_peer(&self, spins: bool) -> Option<Pair> {
        let size = self.names.iter().position(|name| *name == OF_RATIOS)?;
        let of = |side| self.closed(size, side, SINGLE, spins);
        let (ours, peer) = (of(ServedBy::Kvrouted)?, of(ServedBy::Peer)?);
        Some(Pair { p50: peer.p50_us / ours.p50_us, p99: peer.p99_us / ours.p99_us })
    }

    fn throughput_of_floor(&self) -> Option<f64> {
        let of_floor = |size| {
            let best = |side| {
                let of = |spins| self.closed(size, side, DEEP, spins).map(|figures| figures.requests_per_s);
                of(false).into_iter().chain(of(true)).reduce(f64::max)
            };
            Some(best(ServedBy::Kvrouted)? / best(ServedBy::Floor)?)
        };
        (0..self.names.len()).filter_map(of_floor).reduce(f64::min)
    }

    fn summary(&self) -> Summary {
        Summary {
            added_us: self.added_us(true),
            added_us_blocking: self.added_us(false),
            added_cpu_us: self.added_cpu_us(),
            ratio_to_peer: self.ratio_to_peer(true),
            ratio_to_peer_blocking: self.ratio_to_peer(false),
            throughput_of_floor: self.throughput_of_floor(),
        }
    }
}

/// The load average of the last minute; 0 = the system does not say.
#[must_use]
pub(crate) fn load_average() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|number| number.parse().ok()).unwrap_or(0.0)
}

impl Report {
    /// Of every way to ask, on so many processors.
    #[must_use]
    pub(crate) fn new(args: SocketArgs, processors: usize, asked: &[Asked], rows: &Rows) -> Self {
        let names: Vec<_> = asked.iter().map(|asked| asked.size.name).collect();
        let compared = |ingest| Compared { names: &names, rows, io: args.io.first().copied(), ingest };
        let sizes = asked.iter().map(|asked| Sizes {
            size: asked.size,
            request_bytes: [asked.frames.request_bytes(), asked.http.request_bytes()],
            reply_body_bytes: asked.frames.reply_bytes.get(),
        });
        let row = |(key, figures): (Key, Figures)| Row {
            size: names[key.size],
            server: key.side,
            io: key.io,
            ingest: key.ingest,
            client_spins: key.client_spins,
            connections: key.way.0,
            in_flight: key.way.1,
            open_loop: key.is_open,
            figures,
        };
        let ingest = [ServedBy::Kvrouted, ServedBy::Peer].into_iter().filter_map(|server| {
            let (messages_per_s, lag_ms_max) = rows.ingest_of(server)?;
            Some(Ingest { server, messages_per_s, lag_ms_max })
        });
        Self {
            processors,
            load_average: load_average(),
            sizes: sizes.collect(),
            rows: rows.all().into_iter().map(row).collect(),
            ingest: ingest.collect(),
            with_ingest: (args.ingest_rate > 0.0).then(|| compared(true).summary()),
            quiet: compared(false).summary(),
            args,
        }
    }

    /// For people.
    #[must_use]
    pub(crate) fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_FULL_CONDENSED);
        table.set_header(
            "request|server|io|ingest|sides|connections|in flight|loop|req/s|p50 us|p99 us|p99.9 us|server CPU us|kept up"
                .split('|'),
        );
        for row in &self.rows {
            let (figures, said) =
                (&row.figures, |is: bool, yes: &str, no: &str| (if is { yes } else { no }).to_owned());
            table.add_row([
                row.size.to_owned(),
                row.server.name().to_owned(),
                row.io.map_or("http", Io::name).to_owned(),
                said(row.ingest, "yes", ""),
                said(row.client_spins, "spin", "sleep"),
                row.connections.to_string(),
                row.in_flight.to_string(),
                if row.open_loop { format!("{:.0}/s", self.args.rate) } else { "closed".to_owned() },
                format!("{:.0}", figures.requests_per_s),
                format!("{:.1}", figures.p50_us),
                format!("{:.1}", figures.p99_us),
                format!("{:.1}", figures.p999_us),
                format!("{:.2}", figures.server_cpu_us),
                if row.open_loop { said(figures.kept_up, "yes", "no") } else { String::new() },
            ]);
        }
        let mut text = format!(
            "medians of {} repeats of {} s, {} workers; {} processors, load average {:.1}\n{table}",
            self.args.repeat, self.args.seconds, self.args.workers, self.processors, self.load_average
        );
        for ingest in &self.ingest {
            let (server, per_s, lag_ms) = (ingest.server.name(), ingest.messages_per_s, ingest.lag_ms_max);
            text.push_str(&format!("\nbeside {server}: {per_s:.0} messages/s, the last known after {lag_ms:.0} ms"));
        }
        if let Some(summary) = &self.with_ingest {
            text.push_str(&summary.text("while engines publish: "));
        }
        text.push_str(&self.quiet.text(""));
        text
    }
}

impl Summary {
    fn text(&self, prefix: &str) -> String {
        let pair = |pair: &Pair| format!("p50 {:.2}, p99 {:.2}", pair.p50, pair.p99);
        let ratio = |ratio: &Option<Pair>| ratio.as_ref().map_or_else(|| "-".to_owned(), pair);
        let mut text = String::new();
        let mut line = |what: &str, figure: String| text.push_str(&format!("\n{prefix}{what}: {figure}"));
        for (sides, all) in [("spin", &self.added_us), ("sleep", &self.added_us_blocking)] {
            for (size, added) in all {
                line(&format!("added to the floor, {size}, both sides {sides}, us"), pair(added));
            }
        }
        for (size, added) in &self.added_cpu_us {
            line(&format!("added processor time, {size}, us"), format!("{added:.2}"));
        }
        line("ratio to the peer", ratio(&self.ratio_to_peer));
        line("ratio to the peer, both sides sleep", ratio(&self.ratio_to_peer_blocking));
        line(
            "throughput of the floor's",
            self.throughput_of_floor.map_or_else(|| "-".to_owned(), |of| format!("{of:.2}")),
        );
        text
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};
    use crate::socket::rows::Sample;

    fn key(side: ServedBy, size: usize, way: (u32, u32), client_spins: bool, ingest: bool) -> Key {
        let io = (side != ServedBy::Peer).then_some(Io::Epoll);
        Key { size, side, io, ingest, client_spins, way, is_open: false }
    }

    fn report(line: &str, rows: &Rows) -> Report {
        let Command::Socket(args) = Cli::parse_from(line.split_whitespace()).command else { panic!("not socket") };
        let asked = Asked::all(&args.sizes).unwrap();
        Report::new(args, 2, &asked, rows)
    }

    #[test]
    fn what_is_compared_is_of_the_same_requests_and_medians_of_repeats() {
        let (mut rows, spins, sleeps) = (Rows::default(), true, false);
        for p50_us in [9.0, 10.0, 30.0] {
            rows.add(key(ServedBy::Kvrouted, 1, SINGLE, spins, false), Sample::made_up(1.0, [p50_us, 20.0], 0.0));
        }
        rows.add(key(ServedBy::Floor, 1, SINGLE, spins, false), Sample::made_up(1.0, [6.0, 15.0], 0.0));
        rows.add(key(ServedBy::Peer, 1, SINGLE, spins, false), Sample::made_up(1.0, [100.0, 500.0], 0.0));
        rows.add(key(ServedBy::Kvrouted, 1, SINGLE, sleeps, false), Sample::made_up(1.0, [50.0, 80.0], 0.0));
        rows.add(key(ServedBy::Peer, 1, SINGLE, sleeps, false), Sample::made_up(1.0, [150.0, 160.0], 0.0));
        rows.add(key(ServedBy::Kvrouted, 1, SINGLE, spins, true), Sample::made_up(1.0, [20.0, 40.0], 0.0));
        for (size, per_s) in [(0, 50.0), (1, 40.0), (2, 90.0)] {
            rows.add(key(ServedBy::Floor, size, DEEP, sleeps, false), Sample::made_up(100.0, [1.0, 1.0], 1.0));
            rows.add(key(ServedBy::Floor, size, DEEP, spins, false), Sample::made_up(80.0, [1.0, 1.0], 9.0));
            rows.add(key(ServedBy::Kvrouted, size, DEEP, sleeps, false), Sample::made_up(per_s, [1.0, 1.0], 3.5));
        }
        let report = report("perf socket", &rows);
        let pair = |pair: Pair| [pair.p50, pair.p99];
        assert_eq!(report.quiet.added_us.iter().map(|(_, added)| pair(*added)).collect::<Vec<_>>(), [[4.0, 5.0]]);
        assert_eq!(report.quiet.ratio_to_peer.map(pair), Some([10.0, 25.0]));
        assert_eq!(report.quiet.ratio_to_peer_blocking.map(pair), Some([3.0, 2.0]));
        assert_eq!(report.quiet.throughput_of_floor, Some(0.4), "the lowest over the sizes, of the floor's best");
        assert_eq!(report.quiet.added_cpu_us, [("14 hashes", 2.5), ("720 hashes", 2.5), ("12000 tokens", 2.5)]);
        let beside = report.with_ingest.as_ref().unwrap();
        assert_eq!(beside.added_us.iter().map(|(_, added)| pair(*added)).collect::<Vec<_>>(), [[14.0, 25.0]]);
        assert!(beside.ratio_to_peer.is_none(), "the peer was not asked while engines published");

        let json = serde_json::to_string(&report).unwrap();
        let end = r#""ratio_to_peer":{"p50":10.0,"p99":25.0},"ratio_to_peer_blocking":{"p50":3.0,"p99":2.0},"throughput_of_floor":0.4}"#;
        assert!(json.ends_with(end), "{json}");
        assert!(report.table().contains("ratio to the peer: p50 10.00, p99 25.00"));
    }
}
