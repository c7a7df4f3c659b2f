//! What came out, as JSON and as a table.

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use crate::args::TapeArgs;
use crate::measure::Percentiles;

/// Everything one run says.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    /// What was measured.
    pub(crate) config: Config,
    /// One side.
    pub(crate) peer: SideReport,
    /// The other.
    pub(crate) kvrouted: SideReport,
    /// How many times better kvrouted is.
    pub(crate) ratio: Ratio,
    /// Whether all lookups of the measurement gave the same sum of depths on both sides.
    pub(crate) checksum_equal: bool,
    /// Answers beside the plain model's.
    pub(crate) wrong: Wrong,
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Config {
    /// What the tape was made from.
    pub(crate) tape: TapeArgs,
    /// Shards on kvrouted's side.
    pub(crate) shards: u16,
    /// Repeats.
    pub(crate) repeat: u32,
    /// Rows of the tape, copies included.
    pub(crate) rows: usize,
    /// Events of the tape.
    pub(crate) events: usize,
    /// Blocks of the tape's events, stored and removed.
    pub(crate) blocks: usize,
    /// Events of the tape that was cut into single blocks.
    pub(crate) single_block_events: usize,
    /// Blocks held at the end, over all workers and tiers.
    pub(crate) memberships: usize,
    /// Prompts that were looked up.
    pub(crate) queries: usize,
    /// Their mean length.
    pub(crate) blocks_per_query: f64,
    /// The clock's cost, taken off every lookup.
    pub(crate) clock_ns: f64,
    /// The channel's cost for each event, taken off the peer's direct ingest.
    pub(crate) channel_ns: f64,
    /// Where.
    pub(crate) machine: String,
}

/// The figures of a side: medians over repeats.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct SideReport {
    /// Blocks stored and removed by direct calls.
    pub(crate) ingest_blocks_per_s: f64,
    /// The same through the side's queue, until the last is applied.
    pub(crate) ingest_queued_blocks_per_s: f64,
    /// Events of one block by direct calls.
    pub(crate) single_block_events_per_s: f64,
    /// Lookups of prompts that were just hashed.
    pub(crate) find_ns: Percentiles,
    /// Lookups of prompts out of memory.
    pub(crate) find_cold_ns: Percentiles,
    /// Lookups beside a writer at full speed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) read_under_write_ns: Option<Percentiles>,
    /// What that writer did meanwhile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) written_beside_blocks_per_s: Option<f64>,
    /// Lookups beside the writer that gave up, over all repeats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) contended: Option<u64>,
    /// Growth of the resident set for each block that a worker's tier holds.
    pub(crate) bytes_per_membership: f64,
    /// The same by the index's own account.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) accounted_bytes_per_membership: Option<f64>,
    /// Sum of the device depths of all workers over all lookups.
    pub(crate) checksum: u64,
}

/// How many times better kvrouted is; above 1 is better, whatever the unit.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Ratio {
    /// Direct ingest.
    pub(crate) ingest: f64,
    /// Queued ingest.
    pub(crate) ingest_queued: f64,
    /// Events of one block.
    pub(crate) single_block: f64,
    /// Hot lookups, median.
    pub(crate) find_p50: f64,
    /// Hot lookups, tail.
    pub(crate) find_p99: f64,
    /// Cold lookups, median.
    pub(crate) find_cold_p50: f64,
    /// Cold lookups, tail.
    pub(crate) find_cold_p99: f64,
    /// Bytes for each block held.
    pub(crate) memory: f64,
}

/// Answers that differ from the plain model's.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Wrong {
    /// The peer's, device tier.
    pub(crate) peer: u64,
    /// kvrouted's, all tiers.
    pub(crate) kvrouted: u64,
    /// Answers looked at on each side: one worker's depths for one prompt.
    pub(crate) answers: u64,
}

/// A figure of both sides.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    /// What it is.
    pub(crate) name: &'static str,
    /// The peer's, in words.
    pub(crate) peer: String,
    /// kvrouted's, in words.
    pub(crate) kvrouted: String,
    /// How many times better kvrouted is.
    pub(crate) ratio: f64,
}

impl Ratio {
    /// From the figures of both.
    #[must_use]
    pub(crate) fn of(peer: &SideReport, kvrouted: &SideReport) -> Self {
        let more = |of: fn(&SideReport) -> f64| of(kvrouted) / of(peer);
        let less = |of: fn(&SideReport) -> f64| of(peer) / of(kvrouted);
        Self {
            ingest: more(|side| side.ingest_blocks_per_s),
            ingest_queued: more(|side| side.ingest_queued_blocks_per_s),
            single_block: more(|side| side.single_block_events_per_s),
            find_p50: less(|side| side.find_ns.p50),
            find_p99: less(|side| side.find_ns.p99),
            find_cold_p50: less(|side| side.find_cold_ns.p50),
            find_cold_p99: less(|side| side.find_cold_ns.p99),
            memory: less(|side| side.bytes_per_membership),
        }
    }
}

impl Report {
    /// The figures that both sides have, in the order of the table.
    #[must_use]
    pub(crate) fn lines(&self) -> Vec<Line> {
        let line = |name, of: fn(&SideReport) -> f64, unit: fn(f64) -> String, ratio| {
            let (peer, kvrouted) = (unit(of(&self.peer)), unit(of(&self.kvrouted)));
            Line { name, peer, kvrouted, ratio }
        };
        let ratio = &self.ratio;
        vec![
            line("ingest, direct", |side| side.ingest_blocks_per_s, blocks_per_s, ratio.ingest),
            line("ingest, queued", |side| side.ingest_queued_blocks_per_s, blocks_per_s, ratio.ingest_queued),
            line("one-block events", |side| side.single_block_events_per_s, events_per_s, ratio.single_block),
            line("lookup hot p50", |side| side.find_ns.p50, nanoseconds, ratio.find_p50),
            line("lookup hot p99", |side| side.find_ns.p99, nanoseconds, ratio.find_p99),
            line("lookup cold p50", |side| side.find_cold_ns.p50, nanoseconds, ratio.find_cold_p50),
            line("lookup cold p99", |side| side.find_cold_ns.p99, nanoseconds, ratio.find_cold_p99),
            line("memory per block held", |side| side.bytes_per_membership, bytes, ratio.memory),
        ]
    }

    /// The report as a person reads it.
    #[must_use]
    pub(crate) fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_FULL_CONDENSED).set_header(["", "peer", "kvrouted", "ratio"]);
        for Line { name, peer, kvrouted, ratio } in self.lines() {
            table.add_row([name.to_owned(), peer, kvrouted, format!("{ratio:.1}x")]);
        }
        let mut alone = |name: &str, figure: Option<String>| {
            if let Some(figure) = figure {
                table.add_row([name.to_owned(), "-".to_owned(), figure, "-".to_owned()]);
            }
        };
        let ours = &self.kvrouted;
        alone("  by its own account", ours.accounted_bytes_per_membership.map(bytes));
        alone("lookup beside writer p50", ours.read_under_write_ns.map(|times| nanoseconds(times.p50)));
        alone("lookup beside writer p99", ours.read_under_write_ns.map(|times| nanoseconds(times.p99)));
        alone("  that writer", ours.written_beside_blocks_per_s.map(blocks_per_s));
        alone("  lookups that gave up", ours.contended.map(|count| count.to_string()));
        let Wrong { peer, kvrouted, answers } = self.wrong;
        table.add_row([format!("wrong of {answers} answers"), peer.to_string(), kvrouted.to_string(), String::new()]);
        let sums = [self.peer.checksum, ours.checksum].map(|sum| sum.to_string());
        let [peer, kvrouted] = sums;
        let equal = if self.checksum_equal { "equal" } else { "differ" };
        table.add_row(["checksum".to_owned(), peer, kvrouted, equal.to_owned()]);
        table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
        format!("{}\n{table}", self.config.sentence())
    }
}

impl Config {
    /// What was measured, in one paragraph.
    #[must_use]
    pub(crate) fn sentence(&self) -> String {
        let tape = &self.tape;
        let trace = tape.trace.as_ref().and_then(|file| file.file_name()).map_or_else(
            || format!("generated conversations, seed {}", tape.seed),
            |name| name.to_string_lossy().into_owned(),
        );
        let flags = [(tape.decode, "decode"), (tape.tiers, "host tier"), (tape.dup > 0.0, "second copies")];
        let flags: String = flags.iter().filter(|(on, _)| *on).map(|(_, name)| format!(", {name}")).collect();
        format!(
            "{trace}: {} rows, {} workers x {} blocks of {} tokens, {} copies, engine hashes {:?}{flags}\n\
             {} events, {} blocks, {} held at the end; {} lookups of {:.0} blocks; {} shards, medians of {} repeats\n\
             {}; clock {:.0} ns and channel {:.0} ns taken off",
            self.rows,
            tape.workers,
            tape.capacity,
            tape.block_size,
            tape.copies,
            tape.engine_hash,
            self.events,
            self.blocks,
            self.memberships,
            self.queries,
            self.blocks_per_query,
            self.shards,
            self.repeat,
            self.machine,
            self.clock_ns,
            self.channel_ns,
        )
    }
}

fn blocks_per_s(value: f64) -> String {
    format!("{:.2} M blocks/s", value / 1e6)
}

fn events_per_s(value: f64) -> String {
    format!("{:.2} M events/s", value / 1e6)
}

fn nanoseconds(value: f64) -> String {
    format!("{value:.0} ns")
}

fn bytes(value: f64) -> String {
    format!("{value:.1} B")
}
