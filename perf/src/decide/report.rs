//! What `decide` found, as JSON and as a table.

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use super::Given;
use crate::args::{DecideArgs, TapeArgs};
use crate::measure::Percentiles;

/// How long one side took, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Times {
    /// To decide and book.
    pub(crate) decide: Percentiles,
    /// To end a booking.
    pub(crate) free: Percentiles,
    /// Both, for each decision.
    pub(crate) both: Percentiles,
}

impl Times {
    /// The median of each over repeats.
    #[must_use]
    pub(crate) fn medians(repeats: &[Self]) -> Self {
        let of = |field: fn(&Self) -> Percentiles| {
            let all: Vec<Percentiles> = repeats.iter().map(field).collect();
            Percentiles::medians(&all)
        };
        Self { decide: of(|times| times.decide), free: of(|times| times.free), both: of(|times| times.both) }
    }
}

/// How many times quicker kvrouted is.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Ratio {
    /// Half of them.
    pub(crate) p50: f64,
    /// All but one in a hundred.
    pub(crate) p99: f64,
}

/// Both sides, asked in one way.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    /// In what shape prompts are given.
    pub(crate) given: &'static str,
    /// The peer's times.
    pub(crate) peer: Times,
    /// kvrouted's times in mode `kv`.
    pub(crate) kvrouted: Times,
    /// kvrouted's times in mode `latency`.
    pub(crate) kvrouted_latency: Times,
    /// Of decision, booking and end, in mode `kv`.
    pub(crate) ratio: Ratio,
}

impl Row {
    /// From the times of both.
    #[must_use]
    pub(crate) fn new(given: Given, peer: Times, kvrouted: Times, kvrouted_latency: Times) -> Self {
        let given = match given {
            Given::Tokens => "tokens",
            Given::Hashes => "hashes",
        };
        let ratio = Ratio { p50: peer.both.p50 / kvrouted.both.p50, p99: peer.both.p99 / kvrouted.both.p99 };
        Self { given, peer, kvrouted, kvrouted_latency, ratio }
    }
}

/// One fleet.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Fleet {
    /// Its workers: all are candidates.
    pub(crate) workers: u16,
    /// Blocks each holds.
    pub(crate) capacity: u32,
    /// Prompts asked for in each pass.
    pub(crate) prompts: usize,
    /// Blocks of a prompt, on average.
    pub(crate) blocks_per_prompt: f64,
    /// One for each shape of prompt.
    pub(crate) rows: Vec<Row>,
}

/// A part of a decision, and its figures.
type Part = (&'static str, fn(&Times) -> Percentiles);

/// What a run found.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    /// The tape of the first fleet; others differ in workers and capacity.
    pub(crate) tape: TapeArgs,
    /// Requests in flight.
    pub(crate) in_flight: usize,
    /// Passes of which medians are taken.
    pub(crate) repeat: u32,
    /// The processor.
    pub(crate) machine: String,
    /// What a reading of the clock costs, taken off.
    pub(crate) clock_ns: f64,
    /// Every fleet, the first one first.
    pub(crate) fleets: Vec<Fleet>,
    /// Of the first fleet: at each percentile the smaller of its rows' ratios.
    pub(crate) ratio: Ratio,
}

impl Report {
    /// Of these fleets.
    #[must_use]
    pub(crate) fn new(args: &DecideArgs, machine: String, clock_ns: f64, fleets: Vec<Fleet>) -> Self {
        let rows = || fleets.iter().take(1).flat_map(|fleet| &fleet.rows);
        let least = |of: fn(&Row) -> f64| rows().map(of).fold(f64::INFINITY, f64::min);
        let ratio = Ratio { p50: least(|row| row.ratio.p50), p99: least(|row| row.ratio.p99) };
        let (tape, in_flight, repeat) = (args.tape.clone(), args.in_flight, args.repeat);
        Self { tape, in_flight, repeat, machine, clock_ns, fleets, ratio }
    }

    /// The report as a person reads it.
    #[must_use]
    pub(crate) fn table(&self) -> String {
        let mut table = Table::new();
        let header = ["workers", "given", "p50/p99 of", "peer", "kv", "ratio", "latency"];
        table.load_style(presets::UTF8_FULL_CONDENSED).set_header(header);
        let in_us = |times: Percentiles| format!("{:.2} / {:.2} us", times.p50 / 1e3, times.p99 / 1e3);
        for (fleet, row) in self.fleets.iter().flat_map(|fleet| fleet.rows.iter().map(move |row| (fleet, row))) {
            let parts: [Part; 3] =
                [("decide + book", |times| times.decide), ("free", |times| times.free), ("both", |times| times.both)];
            for (name, of) in parts {
                let (peer, ours, latency) = (of(&row.peer), of(&row.kvrouted), of(&row.kvrouted_latency));
                let ratio = format!("{:.1}x / {:.1}x", peer.p50 / ours.p50, peer.p99 / ours.p99);
                let cells = [fleet.workers.to_string(), row.given.to_owned(), name.to_owned()];
                table.add_row(cells.into_iter().chain([in_us(peer), in_us(ours), ratio, in_us(latency)]));
            }
        }
        table.column_iter_mut().skip(3).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
        let first = self.fleets.first();
        format!(
            "{} prompts of {:.0} blocks, {} in flight, medians of {} passes; {}; clock {:.0} ns taken off\n{table}",
            first.map_or(0, |fleet| fleet.prompts),
            first.map_or(0.0, |fleet| fleet.blocks_per_prompt),
            self.in_flight,
            self.repeat,
            self.machine,
            self.clock_ns,
        )
    }
}
