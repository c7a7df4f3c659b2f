//! The result of a run: the gateway's messages, a table for people, JSON for programs.

use comfy_table::{CellAlignment, Table, presets};
use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};

use super::engine::{BLOCK_TOKENS, PRESET, TIME_FACTOR};
use crate::error::counted;
use crate::route::Mode;

/// A line that the gateway prints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum GatewayMessage {
    /// Index of the policy, and how many of its requests are complete.
    Progress(usize, usize),
    /// Index of a policy whose requests are all complete, and their totals.
    Over(usize, PhaseTotals),
    /// All policies are complete; the batches of each engine, by worker id.
    Finished(Vec<(u64, u64)>),
}

/// Totals under one policy.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct PhaseTotals {
    /// Whole blocks of all prompts.
    pub(crate) prompt_blocks: u64,
    /// Those blocks that were in the chosen engine's cache.
    pub(crate) cached_blocks: u64,
    /// Prompt tokens computed by each engine.
    pub(crate) prefill_tokens: Vec<u64>,
    /// Time from a request's arrival in the gateway to its first token.
    pub(crate) ttft_s: UserTimes,
    /// Mean time between two tokens of a request.
    pub(crate) tpot_s: UserTimes,
    /// Time from a request's arrival in the gateway to its last token.
    pub(crate) e2e_s: UserTimes,
    /// Time of the daemon's answers, measured in the gateway.
    pub(crate) round_trip_us: LatencyQuantiles,
    /// Mean time of a decision by the daemon's own clock, in microseconds; `None` if its metrics could not be read.
    pub(crate) daemon_mean_us: Option<f64>,
    /// Overlaps that were wrong.
    pub(crate) wrong_overlaps: u64,
}

/// How long users waited, in seconds of the engines' time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct UserTimes {
    /// Mean.
    pub(crate) mean: f64,
    /// Median.
    pub(crate) p50: f64,
    /// 99 %.
    pub(crate) p99: f64,
}

/// Quantiles of the time around one route request, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct LatencyQuantiles {
    /// Median.
    pub(crate) p50: f64,
    /// 99 %.
    pub(crate) p99: f64,
    /// 99.9 %.
    pub(crate) p999: f64,
}

impl PhaseTotals {
    /// Cached over whole prompt blocks.
    fn hit_rate(&self) -> f64 {
        self.cached_blocks as f64 / self.prompt_blocks.max(1) as f64
    }

    fn prefill_tokens_sum(&self) -> u64 {
        self.prefill_tokens.iter().sum()
    }

    /// The busiest engine's computed prompt tokens over the mean; 1 = all alike.
    fn imbalance(&self) -> f64 {
        let busiest = self.prefill_tokens.iter().max().copied().unwrap_or(0) as f64;
        let mean = self.prefill_tokens_sum() as f64 / self.prefill_tokens.len().max(1) as f64;
        if mean == 0.0 { 1.0 } else { busiest / mean }
    }
}

/// Events that the daemon ingested.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct EventTotals {
    /// Event batches applied.
    pub(crate) batches: u64,
    /// Blocks stored or removed by them.
    pub(crate) blocks: u64,
    /// Gaps in the sequence numbers.
    pub(crate) gaps: u64,
}

/// A whole run.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Report {
    /// The source of the requests.
    pub(crate) workload: String,
    /// Seed of the workload.
    pub(crate) seed: u64,
    /// Requests under each policy.
    pub(crate) requests: u32,
    /// Engines.
    pub(crate) workers: u32,
    /// Processor cores the demo could use; 0 = not known.
    pub(crate) cores: usize,
    /// The policies, in the order they were run.
    pub(crate) phases: Vec<(Mode, PhaseTotals)>,
    /// Events that the daemon ingested.
    pub(crate) events: EventTotals,
    /// Overlaps compared with the engines' caches.
    pub(crate) checked_overlaps: u64,
    /// Overlaps that were wrong.
    pub(crate) wrong_overlaps: u64,
    /// Overlaps with a trust level below `exact`.
    pub(crate) not_exact_overlaps: u64,
}

impl Report {
    /// The object of `--json`, on one line.
    pub(crate) fn json(&self) -> String {
        // Numbers and fixed keys, which JSON can always express.
        serde_json::to_string(&Object(self)).unwrap_or_default()
    }

    /// The table with its legend.
    pub(crate) fn table(&self) -> String {
        let mut table = Table::new();
        let names = self.phases.iter().map(|(policy, _)| policy.name());
        table.load_style(presets::UTF8_FULL_CONDENSED).set_header(std::iter::once("").chain(names));
        for (name, cell) in ROWS {
            table.add_row(std::iter::once(name.to_owned()).chain(self.phases.iter().map(|(_, totals)| cell(totals))));
        }
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        let EventTotals { batches, blocks, gaps } = self.events;
        let compared = grouped(self.checked_overlaps);
        format!(
            "{} requests of {}, under each policy, on {} (seed {})\n{table}\n\
             events ingested: {} batches, {} blocks stored or removed; gaps: {}\n\
             wrong overlaps: {} of {compared} compared with the engines' own caches; {} were not marked exact\n{}",
            grouped(self.requests.into()),
            self.workload,
            counted(self.workers as usize, "simulated engine"),
            self.seed,
            grouped(batches),
            grouped(blocks),
            grouped(gaps),
            grouped(self.wrong_overlaps),
            grouped(self.not_exact_overlaps),
            self.legend(),
        )
    }

    /// What each row is.
    fn legend(&self) -> String {
        let cores = match self.cores {
            0 => "the cores".to_owned(),
            1 => "1 core".to_owned(),
            cores => format!("{cores} cores"),
        };
        // The engines, the daemon and the gateway; the demo itself waits for them.
        let processes = self.workers + 2;
        format!(
            "TTFT, TPOT, E2E: time to the first token, between two tokens, to the last one, on {} engines whose clock runs\n  \
             {TIME_FACTOR} times as fast as real time; with the round trip to the daemon in real time\n\
             prefix hit rate: whole {BLOCK_TOKENS}-token prompt blocks that the chosen engine found in its cache\n\
             load imbalance: prompt tokens computed by the busiest engine over the mean; 1 = all alike\n\
             round trip: the client's whole call, with its waits for a core: {processes} processes shared {cores}\n\
             decision: lookup, scoring and booking, without the sockets, by the daemon's own clock\n\
             wrong overlaps: cached blocks that the daemon reported and the engine did not hold, or the reverse\n\
             The seed fixes the workload, not the timing: figures vary between runs.",
            PRESET.name,
        )
    }
}

/// The cell of a policy.
type Cell = fn(&PhaseTotals) -> String;

/// The rows of the table.
const ROWS: [(&str, Cell); 9] = [
    ("TTFT mean / p99", |totals| format!("{:.2} / {:.2} s", totals.ttft_s.mean, totals.ttft_s.p99)),
    ("TPOT mean / p99", |totals| format!("{:.1} / {:.1} ms", totals.tpot_s.mean * 1e3, totals.tpot_s.p99 * 1e3)),
    ("E2E mean / p99", |totals| format!("{:.2} / {:.2} s", totals.e2e_s.mean, totals.e2e_s.p99)),
    ("prefix hit rate", |totals| format!("{:.1} %", totals.hit_rate() * 100.0)),
    ("prefill tokens computed", |totals| grouped(totals.prefill_tokens_sum())),
    ("load imbalance", |totals| format!("{:.2}", totals.imbalance())),
    ("round trip to the daemon p50 / p99", |totals| {
        format!("{} / {} µs", whole(totals.round_trip_us.p50), whole(totals.round_trip_us.p99))
    }),
    ("decision inside the daemon, mean", |totals| {
        totals.daemon_mean_us.map_or("not known".to_owned(), |us| format!("{us:.1} µs"))
    }),
    ("wrong overlaps", |totals| grouped(totals.wrong_overlaps)),
];

/// A report as JSON, a key for each policy.
struct Object<'a>(&'a Report);

/// The object's fields for one policy.
#[derive(Serialize)]
struct Picked {
    hit_rate: f64,
    prefill_tokens: u64,
    imbalance: f64,
    decision_us: LatencyQuantiles,
    ttft_s: UserTimes,
    tpot_s: UserTimes,
    e2e_s: UserTimes,
}

impl Serialize for Object<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Report { seed, requests, workers, events, wrong_overlaps, .. } = self.0;
        let mut object = serializer.serialize_map(None)?;
        object.serialize_entry("seed", seed)?;
        object.serialize_entry("requests", requests)?;
        object.serialize_entry("workers", workers)?;
        for (policy, totals) in &self.0.phases {
            let picked = Picked {
                hit_rate: rounded(totals.hit_rate()),
                prefill_tokens: totals.prefill_tokens_sum(),
                imbalance: rounded(totals.imbalance()),
                decision_us: totals.round_trip_us,
                ttft_s: totals.ttft_s,
                tpot_s: totals.tpot_s,
                e2e_s: totals.e2e_s,
            };
            object.serialize_entry(&policy.name().replace('-', "_"), &picked)?;
        }
        object.serialize_entry("events", events)?;
        object.serialize_entry("wrong_overlaps", wrong_overlaps)?;
        object.end()
    }
}

/// Rounded to four decimals: more would be noise.
fn rounded(ratio: f64) -> f64 {
    (ratio * 10_000.0).round() / 10_000.0
}

/// Rounded to a microsecond.
fn whole(us: f64) -> String {
    grouped(us.round() as u64)
}

/// With a space between groups of three digits.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let totals = |cached_blocks, prefill_tokens| PhaseTotals {
            prompt_blocks: 1000,
            cached_blocks,
            prefill_tokens,
            round_trip_us: LatencyQuantiles { p50: 41.5, p99: 1120.25, p999: 3000.0 },
            ttft_s: UserTimes { mean: 0.5, p50: 0.25, p99: 2.125 },
            tpot_s: UserTimes { mean: 0.025, p50: 0.02, p99: 0.05 },
            e2e_s: UserTimes { mean: 3.5, p50: 3.0, p99: 9.0 },
            daemon_mean_us: Some(4.26),
            wrong_overlaps: 0,
        };
        Report {
            workload: "multi-turn conversations".to_owned(),
            seed: 1,
            requests: 1800,
            workers: 2,
            cores: 2,
            phases: vec![
                (Mode::LeastLoaded, totals(350, vec![1_000_000, 1_000_000])),
                (Mode::Kv, totals(751, vec![300_000, 100_000])),
            ],
            events: EventTotals { batches: 20, blocks: 3000, gaps: 0 },
            checked_overlaps: 7200,
            wrong_overlaps: 0,
            not_exact_overlaps: 3,
        }
    }

    #[test]
    fn json_has_exactly_the_documented_keys_in_order() {
        let times = "\"decision_us\":{\"p50\":41.5,\"p99\":1120.25,\"p999\":3000.0},\
                     \"ttft_s\":{\"mean\":0.5,\"p50\":0.25,\"p99\":2.125},\
                     \"tpot_s\":{\"mean\":0.025,\"p50\":0.02,\"p99\":0.05},\
                     \"e2e_s\":{\"mean\":3.5,\"p50\":3.0,\"p99\":9.0}";
        let expected = format!(
            "{{\"seed\":1,\"requests\":1800,\"workers\":2,\
             \"least_loaded\":{{\"hit_rate\":0.35,\"prefill_tokens\":2000000,\"imbalance\":1.0,{times}}},\
             \"kv\":{{\"hit_rate\":0.751,\"prefill_tokens\":400000,\"imbalance\":1.5,{times}}},\
             \"events\":{{\"batches\":20,\"blocks\":3000,\"gaps\":0}},\"wrong_overlaps\":0}}"
        );
        assert_eq!(report().json(), expected);
    }

    #[test]
    fn the_table_shows_every_figure() {
        let text = report().table();
        for part in [
            "1 800 requests of multi-turn conversations, under each policy, on 2 simulated engines",
            "35.0 %",
            "75.1 %",
            "2 000 000",
            "1.50",
            "least-loaded",
            "┆  0.50 / 2.12 s ",
            "┆ 25.0 / 50.0 ms ",
            "┆  3.50 / 9.00 s ",
            " 42 / 1 120 µs ",
            "4.3 µs ",
            "on 70b-tp4 engines whose clock runs\n  8 times as fast as real time;",
            "4 processes shared 2 cores",
            "The seed fixes the workload, not the timing",
            "gaps: 0",
            "wrong overlaps: 0 of 7 200",
            "; 3 were not marked exact",
        ] {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
    }

    #[test]
    fn an_unknown_decision_time_is_shown_as_not_known() {
        let mut report = report();
        report.phases[1].1.daemon_mean_us = None;
        assert!(report.table().contains("not known"), "{}", report.table());
        assert!(report.json().contains("\"p50\":41.5"), "the object does not depend on it");
    }

    #[test]
    fn nothing_computed_is_balanced() {
        assert_eq!(PhaseTotals { prefill_tokens: vec![0, 0], ..PhaseTotals::default() }.imbalance(), 1.0);
    }
}
