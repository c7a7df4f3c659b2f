//! What came out, as JSON and as a table.

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use super::decode::BlockNs;
use super::floor::Taken;
use super::seen::Seen;

/// Everything one run says.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// Where.
    pub(crate) machine: String,
    /// How often each was measured; medians are reported.
    pub(crate) repeat: u32,
    /// How many messages, times the usual number.
    pub(crate) scale: f64,
    /// One for each size in each format.
    #[serde(serialize_with = "figures")]
    pub(crate) rows: Vec<Row>,
}

/// All measurements of one size in one format.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    wire: &'static str,
    blocks: u32,
    messages: u64,
    pub(crate) sender_per_s: Vec<f64>,
    pub(crate) floor: Vec<Taken>,
    pub(crate) ours: Vec<Taken>,
    pub(crate) peer: Vec<Taken>,
    pub(crate) block_ns: Option<BlockNs>,
    pub(crate) seen: Vec<Seen>,
    pub(crate) seen_floor: Vec<Seen>,
}

/// How fast one side took messages in.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Speed {
    /// Messages a second, the median.
    pub(crate) per_s: f64,
    /// The slowest and the quickest turn.
    pub(crate) range: [f64; 2],
    /// Messages missed, over all turns.
    pub(crate) missed: u64,
}

#[derive(Serialize)]
struct Figures {
    wire: &'static str,
    blocks_per_message: u32,
    messages: u64,
    sender_messages_per_s: f64,
    floor: Speed,
    kvrouted: Speed,
    kvrouted_blocks_per_s: f64,
    /// Of the floor's messages a second.
    share_of_floor: f64,
    /// Processor time of the ingest thread.
    thread_cpu_ns_per_message: f64,
    peer: Option<Speed>,
    peer_share_of_floor: Option<f64>,
    ns_per_block: Option<BlockNs>,
    seen_at_half_load: Option<Seen>,
    /// The same messages, received and counted: what of the times is not kvrouted's.
    floor_at_half_load: Option<Seen>,
}

impl Row {
    /// Nothing measured yet.
    #[must_use]
    pub(crate) const fn new(wire: &'static str, blocks: u32, messages: u64) -> Self {
        Self {
            wire,
            blocks,
            messages,
            sender_per_s: Vec::new(),
            floor: Vec::new(),
            ours: Vec::new(),
            peer: Vec::new(),
            block_ns: None,
            seen: Vec::new(),
            seen_floor: Vec::new(),
        }
    }

    /// How fast kvrouted was.
    #[must_use]
    pub(crate) fn ours(&self) -> Speed {
        speed(&self.ours)
    }

    fn figures(&self) -> Figures {
        let (floor, ours) = (speed(&self.floor), speed(&self.ours));
        let share = |of: Speed| of.per_s / floor.per_s.max(1e-9);
        let peer = (!self.peer.is_empty()).then(|| speed(&self.peer));
        let cpu = self.ours.iter().map(|taken| taken.thread_cpu_ns as f64 / taken.messages.max(1) as f64);
        Figures {
            wire: self.wire,
            blocks_per_message: self.blocks,
            messages: self.messages,
            sender_messages_per_s: median(self.sender_per_s.iter().copied()),
            floor,
            kvrouted: ours,
            kvrouted_blocks_per_s: ours.per_s * f64::from(self.blocks),
            share_of_floor: share(ours),
            thread_cpu_ns_per_message: median(cpu),
            peer,
            peer_share_of_floor: peer.map(share),
            ns_per_block: self.block_ns,
            seen_at_half_load: seen(&self.seen),
            floor_at_half_load: seen(&self.seen_floor),
        }
    }
}

fn seen(all: &[Seen]) -> Option<Seen> {
    let of = |figure: fn(&Seen) -> f64| median(all.iter().map(figure));
    (!all.is_empty()).then(|| Seen {
        messages_per_s: of(|seen| seen.messages_per_s),
        samples: all.iter().map(|seen| seen.samples).sum(),
        p50_us: of(|seen| seen.p50_us),
        p99_us: of(|seen| seen.p99_us),
        p999_us: of(|seen| seen.p999_us),
        window_p99_us: of(|seen| seen.window_p99_us),
        missed: all.iter().map(|seen| seen.missed).sum(),
    })
}

fn figures<S: serde::Serializer>(rows: &[Row], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(rows.iter().map(Row::figures))
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

fn speed(taken: &[Taken]) -> Speed {
    let all = || taken.iter().map(Taken::per_second);
    let range = [all().fold(f64::INFINITY, f64::min), all().fold(0.0, f64::max)];
    Speed { per_s: median(all()), range, missed: taken.iter().map(|taken| taken.missed).sum() }
}

/// Columns of the table of speeds.
const SPEED_COLUMNS: [&str; 11] = [
    "wire",
    "blocks",
    "sender msg/s",
    "floor msg/s",
    "kvrouted msg/s",
    "of floor",
    "blocks/s",
    "missed",
    "thread CPU ns/msg",
    "peer msg/s",
    "of floor",
];
/// Columns of the table of costs and delays.
const BLOCK_COLUMNS: [&str; 17] = [
    "wire",
    "blocks",
    "decode ns",
    "+ hash",
    "+ index",
    "peer decode",
    "+ hash",
    "seen at msg/s",
    "p50 us",
    "p99 us",
    "p999 us",
    "window p99",
    "floor p50",
    "floor p99",
    "window p99",
    "samples",
    "missed",
];

impl Report {
    /// For people.
    #[must_use]
    pub(crate) fn table(&self) -> String {
        let (mut speeds, mut blocks) = (table(&SPEED_COLUMNS), table(&BLOCK_COLUMNS));
        for row in self.rows.iter().map(Row::figures) {
            let size = row.blocks_per_message.to_string();
            let name = || [row.wire.to_owned(), size.clone()];
            let peer = row.peer.map_or_else(dash, |peer| thousands(peer.per_s));
            let peer_share = row.peer_share_of_floor.map_or_else(dash, percent);
            speeds.add_row(name().into_iter().chain([
                thousands(row.sender_messages_per_s),
                thousands(row.floor.per_s),
                thousands(row.kvrouted.per_s),
                percent(row.share_of_floor),
                thousands(row.kvrouted_blocks_per_s),
                row.kvrouted.missed.to_string(),
                format!("{:.0}", row.thread_cpu_ns_per_message),
                peer,
                peer_share,
            ]));
            let (Some(ns), Some(seen)) = (row.ns_per_block, row.seen_at_half_load) else { continue };
            let floor = row.floor_at_half_load.unwrap_or_default();
            let [tenth, whole] = [|value: f64| format!("{value:.1}"), |value: f64| format!("{value:.0}")];
            blocks.add_row(name().into_iter().chain([
                tenth(ns.decode),
                tenth(ns.with_hashing),
                tenth(ns.with_index),
                ns.peer_decode.map_or_else(dash, tenth),
                ns.peer_with_hashing.map_or_else(dash, tenth),
                thousands(seen.messages_per_s),
                whole(seen.p50_us),
                whole(seen.p99_us),
                whole(seen.p999_us),
                whole(seen.window_p99_us),
                whole(floor.p50_us),
                whole(floor.p99_us),
                whole(floor.window_p99_us),
                seen.samples.to_string(),
                seen.missed.to_string(),
            ]));
        }
        format!("{}, medians of {}\n\n{speeds}\n\n{blocks}", self.machine, self.repeat)
    }
}

fn table(heads: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_header(heads.to_vec());
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn dash() -> String {
    "-".to_owned()
}

fn thousands(value: f64) -> String {
    format!("{:.0} k", value / 1e3)
}

fn percent(ratio: f64) -> String {
    format!("{:.0} %", ratio * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_says_the_share_of_the_floor() {
        let taken = |messages, missed| Taken { messages, missed, seconds: 1.0, thread_cpu_ns: messages };
        let mut row = Row::new("msgpack", 16, 100);
        row.floor = vec![taken(100, 0), taken(80, 0), taken(120, 0)];
        row.ours = vec![taken(60, 1), taken(70, 0), taken(50, 2)];
        let figures = row.figures();
        assert_eq!((figures.floor.per_s, figures.kvrouted.per_s, figures.kvrouted.missed), (100.0, 60.0, 3));
        assert_eq!((figures.share_of_floor, figures.kvrouted_blocks_per_s), (0.6, 960.0));
        assert_eq!((figures.thread_cpu_ns_per_message, figures.kvrouted.range), (1.0, [50.0, 70.0]));
        assert!(figures.peer.is_none() && figures.seen_at_half_load.is_none());
    }
}
