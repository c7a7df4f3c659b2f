//! `kvrouted what-if`: repeats recorded decisions with other weights and shows the differences.

use std::collections::HashMap;
use std::io::Write as _;
use std::path::PathBuf;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Table};
use serde_json::{Value, json};

use super::exit::{Exit, Failure};
use super::replay::{decisions, journal_files};
use crate::config::policy_with;
use crate::ids::{SpaceId, Worker};
use crate::journal::DecisionRecord;
use crate::policy_search::{Spread, WorkerShare};
use crate::route::Policy;
use crate::shadow::PolicyComparison;

/// Most workers in the chart: those with the most prompts.
const CHART_WORKERS_MAX: usize = 16;

/// The note under every table of estimates.
pub(super) const ESTIMATE: &str =
    "This is an estimate: each changed decision would also have changed caches and loads for the decisions after it.";

/// Repeats the decisions of a journal with other weights and shows what would have changed.
#[derive(Debug, clap::Args)]
pub struct WhatIfArgs {
    /// Journal files, or folders of them
    #[arg(value_name = "JOURNAL", required = true)]
    pub files: Vec<PathBuf>,
    /// A field of [policy] and its value; repeatable. Other fields keep their recorded values
    #[arg(long, value_name = "FIELD=VALUE", required = true)]
    pub set: Vec<String>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

/// The recorded decisions beside those with other weights.
#[derive(Debug, Default)]
struct Comparison {
    decisions: u64,
    changed: u64,
    recorded: Spread,
    other: Spread,
}

/// Recorded policies with the settings over them, each made once.
struct Variant<'a> {
    settings: &'a [String],
    made: HashMap<SpaceId, (Policy, Policy)>,
}

impl Variant<'_> {
    fn of(&mut self, record: &DecisionRecord) -> Result<Policy, Failure> {
        match self.made.get(&record.space) {
            Some((base, policy)) if *base == record.policy => Ok(*policy),
            _ => {
                let policy = policy_with(&record.policy, "--set", self.settings)
                    .map_err(|problems| Failure::new(Exit::Usage, problems.to_string()))?;
                self.made.insert(record.space, (record.policy, policy));
                Ok(policy)
            }
        }
    }
}

impl WhatIfArgs {
    /// Repeats, compares and prints.
    ///
    /// # Errors
    /// A file that cannot be read or is not a journal, an invalid setting, a closed standard output.
    pub fn run(&self) -> Result<Exit, Failure> {
        // Check the settings even if the journal has no decision.
        policy_with(&Policy::default(), "--set", &self.set)
            .map_err(|problems| Failure::new(Exit::Usage, problems.to_string()))?;
        let mut variant = Variant { settings: &self.set, made: HashMap::new() };
        let (mut comparison, mut second) = (Comparison::default(), PolicyComparison::default());
        let lines = decisions(&journal_files(&self.files)?, |record| {
            comparison.add(&variant.of(record)?, record, &mut second);
            Ok(())
        })?;
        let mut stdout = std::io::stdout().lock();
        if self.json {
            writeln!(stdout, "{}", comparison.json(&self.set))?;
        } else {
            writeln!(stdout, "{}", comparison.text(&self.set))?;
            lines.iter().try_for_each(|line| writeln!(stdout, "{line}"))?;
        }
        stdout.flush()?;
        Ok(Exit::Done)
    }
}

impl Comparison {
    fn add(&mut self, policy: &Policy, record: &mut DecisionRecord, second: &mut PolicyComparison) {
        let was = PolicyComparison::chosen(&record.observation, record.outcome.chosen());
        let is = second.pick(policy, &mut record.observation, record.outcome.seed);
        self.decisions += 1;
        self.changed += u64::from(was.map(|pick| pick.index) != is.map(|pick| pick.index));
        self.recorded.add(record.space, &record.observation, was);
        self.other.add(record.space, &record.observation, is);
    }

    fn text(&self, settings: &[String]) -> String {
        let changed = percent(self.changed as f64 / self.decisions.max(1) as f64);
        let title = format!(
            "{} decisions; with {} {changed} would have chosen another worker",
            self.decisions,
            settings.join(", ")
        );
        [title, spread_table(&self.recorded, &self.other), self.chart(), ESTIMATE.to_owned()].join("\n")
    }

    /// The workers with the most prompts, recorded and with other weights.
    fn chart(&self) -> String {
        let mut workers: Vec<_> = self.recorded.workers.keys().collect();
        workers
            .sort_by_key(|worker| std::cmp::Reverse(prompts(&self.recorded, worker).max(prompts(&self.other, worker))));
        let left_out = workers.len().saturating_sub(CHART_WORKERS_MAX);
        workers.truncate(CHART_WORKERS_MAX);
        workers.sort();
        let line = |name: String, prompts: u64| (name, prompts as f64, prompts.to_string());
        let both = |worker: &(SpaceId, Worker)| {
            let (was, is) = (prompts(&self.recorded, worker), prompts(&self.other, worker));
            [line(format!("{} recorded", worker.1), was), line(format!("{} what if", worker.1), is)]
        };
        let lines: Vec<_> = workers.into_iter().flat_map(both).collect();
        let more =
            if left_out > 0 { format!("\n{left_out} workers with fewer prompts are not shown") } else { String::new() };
        format!("prompts by worker\n{}{more}", bars(&lines))
    }

    fn json(&self, settings: &[String]) -> Value {
        json!({
            "set": settings,
            "decisions": self.decisions,
            "changed": self.changed,
            "recorded": spread_json(&self.recorded),
            "what_if": spread_json(&self.other),
            "prefill_tokens_saved": self.recorded.prefill_tokens as i64 - self.other.prefill_tokens as i64,
        })
    }
}

/// Prompts sent to a worker.
fn prompts(spread: &Spread, worker: &(SpaceId, Worker)) -> u64 {
    spread.workers.get(worker).map_or(0, |share| share.prompts)
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// Sums of two sets of choices, side by side.
pub(super) fn spread_table(recorded: &Spread, other: &Spread) -> String {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header(["", "recorded", "what if", "change"]);
    let mut row = |name: &str, was: String, is: String, change: String| {
        let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
        table.add_row([Cell::new(name), right(was), right(is), right(change)]);
    };
    let both = |of: fn(&Spread) -> f64| (of(recorded), of(other));
    let (was, is) = both(Spread::overlap_mean);
    row("overlap blocks per decision", format!("{was:.2}"), format!("{is:.2}"), format!("{:+.2}", is - was));
    let (was, is) = both(Spread::hit_rate);
    row("overlap, share of prompt blocks", percent(was), percent(is), format!("{:+.1} points", (is - was) * 100.0));
    type Count = fn(&Spread) -> u64;
    let counts: [(&str, Count); 3] = [
        ("tokens to prefill", |of| of.prefill_tokens),
        ("tokens queued before them", |of| of.waiting_tokens),
        ("decisions without an eligible worker", |of| of.no_worker),
    ];
    for (name, of) in counts {
        let (was, is) = (of(recorded), of(other));
        row(name, was.to_string(), is.to_string(), format!("{:+}", is as i64 - was as i64));
    }
    let (was, is) = both(Spread::prompts_imbalance);
    row(
        "prompts of the busiest worker over the mean",
        format!("{was:.2}"),
        format!("{is:.2}"),
        format!("{:+.2}", is - was),
    );
    let (was, is) = both(Spread::prefill_imbalance);
    row(
        "prefill of the busiest worker over the mean",
        format!("{was:.2}"),
        format!("{is:.2}"),
        format!("{:+.2}", is - was),
    );
    table.to_string()
}

pub(super) fn spread_json(spread: &Spread) -> Value {
    let worker = |((space, worker), share): (&(SpaceId, Worker), &WorkerShare)| {
        json!({
            "space": space.0, "worker_id": worker.id.0, "dp_rank": worker.rank.0,
            "prompts": share.prompts, "prefill_tokens": share.prefill_tokens,
        })
    };
    json!({
        "picks": spread.picks,
        "nobody": spread.no_worker,
        "overlap_blocks_mean": spread.overlap_mean(),
        "hit_rate": spread.hit_rate(),
        "prefill_tokens": spread.prefill_tokens,
        "waiting_tokens": spread.waiting_tokens,
        "prompts_imbalance": spread.prompts_imbalance(),
        "prefill_imbalance": spread.prefill_imbalance(),
        "workers": spread.workers.iter().map(worker).collect::<Vec<_>>(),
    })
}

/// Terminal cells of the longest bar.
const BAR_CELLS_MAX: usize = 40;
/// Parts of a cell, from one eighth to seven.
const PARTS: [char; 7] = ['▏', '▎', '▍', '▌', '▋', '▊', '▉'];

/// A bar of `value`, where `most` has the longest bar; empty if there is nothing to show.
pub(super) fn bar(value: f64, most: f64) -> String {
    if !(value > 0.0 && most > 0.0) {
        return String::new();
    }
    let eighths = ((value / most).min(1.0) * (BAR_CELLS_MAX * 8) as f64).round() as usize;
    let mut bar = "█".repeat(eighths / 8);
    bar.extend(eighths.checked_rem(8).and_then(|part| PARTS.get(part.checked_sub(1)?)));
    bar
}

/// A line for each value: its name, its bar and its value.
pub(super) fn bars(lines: &[(String, f64, String)]) -> String {
    let most = lines.iter().map(|(_, value, _)| *value).fold(0.0, f64::max);
    let width = lines.iter().map(|(name, ..)| name.chars().count()).max().unwrap_or(0);
    let line = |(name, value, label): &(String, f64, String)| format!("{name:width$} {} {label}", bar(*value, most));
    lines.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_in_proportion() {
        assert_eq!(bar(8.0, 8.0).chars().count(), BAR_CELLS_MAX);
        assert_eq!((bar(4.0, 8.0).chars().count(), bar(0.0, 8.0), bar(1.0, 0.0)), (20, String::new(), String::new()));
        assert_eq!(bar(1.0, 320.0), "▏");
        assert_eq!(bar(f64::NAN, 1.0), "");
        let text = bars(&[("a".into(), 1.0, "one".into()), ("long".into(), 2.0, "two".into())]);
        assert_eq!(text.lines().next(), Some(format!("a    {} one", "█".repeat(20)).as_str()));
    }
}
