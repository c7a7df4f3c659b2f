//! `kvrouted tune`: searches for weights that would have made recorded decisions cheaper, tries them as a shadow
//! policy, and promotes them.

use std::io::Write as _;
use std::path::PathBuf;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Table};
use serde_json::{Map, Value, json};

use super::admin;
use super::exit::{Exit, Failure};
use super::replay::{decisions, journal_files};
use super::what_if::{ESTIMATE, bars, spread_json, spread_table};
use crate::config::socket_default;
use crate::ids::SpaceId;
use crate::journal::DecisionRecord;
use crate::policy_search::{Knob, Objective, Search, Step, Tuned};
use crate::route::Policy;
use crate::wire::{PolicyDone, PolicyOrder};

/// Searches for better weights on the decisions of a journal, and lets a running daemon try them.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true).multiple(true).args(["files", "promote", "end_shadow"]))]
pub struct TuneArgs {
    /// Journal files, or folders of them
    #[arg(value_name = "JOURNAL")]
    pub files: Vec<PathBuf>,
    /// Number of policies to try
    #[arg(long, value_name = "NUMBER", default_value_t = 150, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub trials: u32,
    /// Seed of the random weights; the same seed gives the same result
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub seed: u64,
    /// Most decisions to judge; from a larger journal every n-th is taken
    #[arg(long, value_name = "NUMBER", default_value_t = 5000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub decisions_max: u32,
    /// Weight of a token queued before the prompt; a token to prefill has weight 1
    #[arg(long, value_name = "WEIGHT", default_value_t = 1.0)]
    pub waiting_weight: f64,
    /// Weight of each token by which the busiest worker's prefill exceeds the mean
    #[arg(long, value_name = "WEIGHT", default_value_t = 1.0)]
    pub imbalance_weight: f64,
    /// Only decisions of this space, by its number
    #[arg(long, value_name = "NUMBER")]
    pub space: Option<u32>,
    /// Write the best weights to this file, as part of a configuration
    #[arg(long, value_name = "PATH")]
    pub write: Option<PathBuf>,
    /// Let a running daemon judge this share of its decisions by the best weights, as a shadow policy
    #[arg(long, value_name = "SHARE", num_args = 0..=1, default_missing_value = "1.0", requires = "files", value_parser = share)]
    pub shadow: Option<f64>,
    /// Make a running daemon decide by its shadow policy
    #[arg(long, conflicts_with_all = ["files", "end_shadow"])]
    pub promote: bool,
    /// End the shadow policy of a running daemon
    #[arg(long, conflicts_with = "files")]
    pub end_shadow: bool,
    /// The daemon's Unix socket
    #[arg(long, value_name = "PATH", default_value_os_t = socket_default())]
    pub socket: PathBuf,
    /// The daemon's admin socket [default: as the daemon says on its socket]
    #[arg(long, value_name = "PATH")]
    pub admin_socket: Option<PathBuf>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "expected a number from 0 to 1".into())
}

impl TuneArgs {
    /// Searches and prints, or changes the daemon's shadow policy.
    ///
    /// # Errors
    /// A file that cannot be read or is not a journal, a journal without decisions, a file that cannot be written, a
    /// daemon that does not answer or refuses, a closed standard output.
    pub fn run(&self) -> Result<Exit, Failure> {
        if self.promote {
            let PolicyDone { policy_version, .. } = self.order(&PolicyOrder::Promote)?;
            return self.print(&json!({"policy_version": policy_version}), || {
                format!(
                    "the daemon now decides by the former shadow policy, version {policy_version}\nThe configuration file is \
                     unchanged, and the next start or SIGHUP will apply it. Add the new weights to it."
                )
            });
        }
        if self.end_shadow {
            self.order(&PolicyOrder::EndShadow)?;
            return self.print(&json!({}), || "the shadow policy has ended".into());
        }
        let mut tape = self.load()?;
        let Some(policy) = tape.records.last().map(|record| record.policy) else {
            return Err(Failure::new(Exit::Usage, "the journal has no decisions"));
        };
        let objective = Objective { waiting_weight: self.waiting_weight, imbalance_weight: self.imbalance_weight };
        let tuned = Search::run(&mut tape.records, &policy, objective, self.seed, self.trials);
        if let Some(path) = &self.write {
            std::fs::write(path, fragment(&tuned, tape.records.len()))
                .map_err(|error| Failure::new(Exit::System, format!("{}: {error}", path.display())))?;
        }
        if let Some(share) = self.shadow {
            self.order(&PolicyOrder::Shadow { settings: &settings(&tuned), share })?;
        }
        self.print(&object(&tuned, tape.records.len()), || tape.text(&tuned, self.shadow))
    }

    fn print(&self, json: &Value, text: impl FnOnce() -> String) -> Result<Exit, Failure> {
        let mut stdout = std::io::stdout().lock();
        let output = if self.json { json.to_string() } else { text() };
        writeln!(stdout, "{output}")?;
        stdout.flush()?;
        Ok(Exit::Done)
    }

    fn order(&self, order: &PolicyOrder<'_>) -> Result<PolicyDone, Failure> {
        Ok(admin::connect(self.admin_socket.as_ref().unwrap_or(&self.socket))?.set_policy(order)?)
    }

    /// Loads the decisions to judge: all, or every n-th.
    fn load(&self) -> Result<Tape, Failure> {
        let wanted = |record: &DecisionRecord| self.space.is_none_or(|space| record.space == SpaceId(space));
        let files = journal_files(&self.files)?;
        let (mut recorded, mut records) = (0_u64, Vec::new());
        let remarks = decisions(&files, |record| {
            recorded += u64::from(wanted(record));
            Ok(())
        })?;
        let every = recorded.div_ceil(u64::from(self.decisions_max)).max(1);
        let mut seen = 0_u64;
        decisions(&files, |record| {
            if wanted(record) {
                if seen.is_multiple_of(every) {
                    records.push(std::mem::take(record));
                }
                seen += 1;
            }
            Ok(())
        })?;
        Ok(Tape { records, recorded, remarks })
    }
}

/// The decisions to judge.
#[derive(Debug)]
struct Tape {
    records: Vec<DecisionRecord>,
    /// Number of decisions in the journal.
    recorded: u64,
    remarks: Vec<String>,
}

impl Tape {
    fn text(&self, tuned: &Tuned, shadow: Option<f64>) -> String {
        let title = format!(
            "{} policies tried on {} of {} decisions; the best needs {:.1} % fewer tokens ¹",
            tuned.trials,
            self.records.len(),
            self.recorded,
            saving(tuned) * 100.0
        );
        let line =
            |step: &Step| (changes(&tuned.before.policy, &step.policy), step.tokens, format!("{:.0}", step.tokens));
        let steps: Vec<_> = tuned.steps.iter().map(line).collect();
        let mut parts = vec![
            title,
            knob_table(tuned),
            spread_table(&tuned.before_spread, &tuned.best_spread),
            format!("tokens ¹ of each policy that was better than all before it\n{}", bars(&steps)),
            "¹ Weighted sum of tokens to prefill, tokens queued before them, and tokens by which the busiest worker's prefill".into(),
            format!("  exceeds the mean. {ESTIMATE}"),
        ];
        parts.extend(self.remarks.iter().cloned());
        parts.push(match shadow {
            Some(_) => {
                "The daemon now judges by the best weights as its shadow policy. See `kvrouted status`, then `kvrouted tune --promote`."
                    .into()
            }
            None => format!("For the configuration:\n{}", fragment(tuned, self.records.len())),
        });
        parts.join("\n")
    }
}

/// The saving of the best policy over the recorded one, 0 to 1.
fn saving(tuned: &Tuned) -> f64 {
    if tuned.before.tokens > 0.0 { 1.0 - tuned.best.tokens / tuned.before.tokens } else { 0.0 }
}

/// The weights in which a policy differs from another, in a line.
fn changes(before: &Policy, policy: &Policy) -> String {
    let changed = Knob::ALL.iter().filter(|knob| knob.of(before) != knob.of(policy));
    let changed: Vec<_> = changed.map(|knob| format!("{}={}", knob.name, knob.of(policy))).collect();
    if changed.is_empty() { "as recorded".into() } else { changed.join(" ") }
}

/// The best weights, as fields of `[policy]`.
fn settings(tuned: &Tuned) -> Vec<(String, String)> {
    let setting = |knob: &Knob| (knob.name.to_owned(), format!("{:?}", knob.of(&tuned.best.policy)));
    Knob::ALL.iter().map(setting).collect()
}

fn fragment(tuned: &Tuned, decisions: usize) -> String {
    let head = format!(
        "# kvrouted tune: {decisions} decisions, {} policies tried, {:.1} % fewer tokens by estimate.\n[policy]\n",
        tuned.trials,
        saving(tuned) * 100.0
    );
    let line = |knob: &Knob| format!("{} = {:?}\n", knob.name, knob.of(&tuned.best.policy));
    head + &Knob::ALL.iter().map(line).collect::<String>()
}

fn knob_table(tuned: &Tuned) -> String {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header(["weight", "recorded", "best"]);
    for knob in Knob::ALL {
        let right = |value: f64| Cell::new(value).set_alignment(CellAlignment::Right);
        table.add_row([Cell::new(knob.name), right(knob.of(&tuned.before.policy)), right(knob.of(&tuned.best.policy))]);
    }
    table.to_string()
}

fn object(tuned: &Tuned, decisions: usize) -> Value {
    let weights = |policy: &Policy| -> Map<String, Value> {
        Knob::ALL.iter().map(|knob| (knob.name.to_owned(), knob.of(policy).into())).collect()
    };
    let step = |step: &Step| json!({"weights": weights(&step.policy), "tokens": step.tokens});
    json!({
        "decisions": decisions,
        "trials": tuned.trials,
        "saving": saving(tuned),
        "before": step(&tuned.before),
        "best": step(&tuned.best),
        "steps": tuned.steps.iter().map(step).collect::<Vec<_>>(),
        "before_spread": spread_json(&tuned.before_spread),
        "best_spread": spread_json(&tuned.best_spread),
    })
}
