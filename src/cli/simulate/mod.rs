//! `kvrouted simulate`: its arguments, and what it runs.

mod comparison;
mod fleet;
mod requests;
mod suite;
#[cfg(test)]
mod tests;

use std::io::Write;
use std::path::{Path, PathBuf};

use indicatif::{ProgressBar, ProgressStyle};

use self::comparison::Comparison;
pub(super) use self::fleet::read_engine;
pub(super) use self::requests::read_trace;
use super::exit::{Exit, Failure};
use crate::config::example_fleet;
use crate::limits::{SIMULATED_ENGINES_MAX, SIMULATED_ROUTERS_MAX};
use crate::simulate::picture::{self, Section};
use crate::simulate::{EVENT_LAG_S, SimulatedPolicy};

/// Tries of the search in hindsight, unless the command line has another number, and the most.
const HINDSIGHT_TRIES: &str = "200";
const HINDSIGHT_TRIES_MAX: u64 = 100_000;
/// Requests that are generated, at most.
const GENERATED_REQUESTS_MAX: u64 = 20_000_000;

/// The form of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// JSON lines with hashed blocks of 512 tokens.
    Mooncake,
    /// Recorded sessions of agents, one a line; they run in closed loop.
    Sessions,
    /// Lines of a time, prompt tokens and output tokens.
    Csv,
    /// The files of a daemon's journal.
    Journal,
}

/// How much the suite runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum SuiteForm {
    /// All policies with 3 seeds, the best with 20: at most an hour on 2 cores.
    Quick,
    /// All policies with 20 seeds.
    Full,
}

/// Runs a workload on a simulated fleet under several policies and compares what its requests felt.
#[derive(Clone, Debug, clap::Args)]
pub struct SimulateArgs {
    /// The trace, plain or compressed with gzip; - reads standard input. With --format journal, a folder or a file of a journal
    #[arg(long, value_name = "FILE", required_unless_present_any = ["suite", "generate", "example_fleet"],
        conflicts_with = "generate")]
    pub trace: Option<PathBuf>,
    /// The form of the trace
    #[arg(long, value_enum, default_value = "mooncake")]
    pub format: Format,
    /// Generate requests instead of a trace: chat, documents, agents or few-shot, perhaps with parameters, as
    /// "chat:sessions_per_s=4;turns.mean=6"
    #[arg(long, value_name = "NAME")]
    pub generate: Option<String>,
    /// Requests to generate; 10000, if left out
    #[arg(long, value_name = "N", requires = "generate", conflicts_with_all = ["trace", "suite"],
        value_parser = clap::value_parser!(u64).range(1..=GENERATED_REQUESTS_MAX))]
    pub requests: Option<u64>,
    /// A TOML file that describes the fleet: engines, pools, what happens to workers, and routers
    #[arg(long, value_name = "FILE", conflicts_with_all = ["workers", "engine", "cache_tokens", "block_size",
        "event_lag_ms", "routers", "router_age_ms", "sessions_stick"])]
    pub fleet: Option<PathBuf>,
    /// Print a file for --fleet with every field, its default and its description
    #[arg(long)]
    pub example_fleet: bool,
    /// Engines of the fleet
    #[arg(long, value_name = "N", default_value_t = 8,
        value_parser = clap::value_parser!(u16).range(1..=SIMULATED_ENGINES_MAX as i64))]
    pub workers: u16,
    /// What the engines are: a preset, or a JSON file with the keys base_ms, token_us, attention_ns, step_ms,
    /// request_us, kv_token_ns and kv_tokens, and perhaps step_tokens_max and sequences_max; or fitted: the fleet of the
    /// journal
    #[arg(long, value_name = "PRESET|FILE", default_value = "70b-tp4")]
    pub engine: String,
    /// Tokens that an engine's KV memory holds, instead of the preset's
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub cache_tokens: Option<u64>,
    /// Tokens of a KV block
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub block_size: u32,
    /// Routers, over which requests are spread at random
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u16).range(1..=SIMULATED_ROUTERS_MAX as i64))]
    pub routers: u16,
    /// How late a router learns of the others' bookings, first tokens and ends, milliseconds
    #[arg(long, value_name = "MS", default_value_t = 0.0)]
    pub router_age_ms: f64,
    /// Send all requests of a session to one router
    #[arg(long)]
    pub sessions_stick: bool,
    /// Run at this many times the requests' own rate
    #[arg(long, value_name = "X", conflicts_with = "load")]
    pub rate: Option<f64>,
    /// Sessions that are live at a time, for traces of sessions and for agents
    #[arg(long, value_name = "N", conflicts_with_all = ["load", "rate"])]
    pub live: Option<usize>,
    /// Run at this share of the capacity of the best of the other systems' rules, which is found first
    #[arg(long, value_name = "SHARE")]
    pub load: Option<f64>,
    /// Runs of each policy, which differ in arrivals within the trace's grain, the order of sessions and ties
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub seeds: u64,
    /// The policies to compare, separated by commas; all but tried-terms, if left out. latency takes the weights delay,
    /// later_delay, output_delay, near_s and unseen, as "latency:delay=0.5;unseen=0"; tried-terms takes a weight for each of
    /// its terms
    #[arg(long = "policy", value_name = "NAME", value_delimiter = ',')]
    pub policies: Vec<String>,
    /// Also find the capacity of every policy
    #[arg(long)]
    pub capacity: bool,
    /// Also run the pooled bound, and search in hindsight with this many tries, each of which replays the first 400 requests;
    /// 0 = do not search
    #[arg(long, value_name = "TRIES", num_args = 0..=1, default_missing_value = HINDSIGHT_TRIES,
        value_parser = clap::value_parser!(u64).range(..=HINDSIGHT_TRIES_MAX))]
    pub bounds: Option<u64>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
    /// Write curves over load to a file: a picture if it ends in .svg, a page with the table if it ends in .html
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// The delay of KV events, milliseconds
    #[arg(long, value_name = "MS", default_value_t = EVENT_LAG_S * 1e3)]
    pub event_lag_ms: f64,
    /// Gateways only book and free: they never report first tokens
    #[arg(long)]
    pub no_first_tokens: bool,
    /// Run the suite: every policy on every workload, with the verdict
    #[arg(long, value_enum, num_args = 0..=1, default_missing_value = "quick", conflicts_with_all = ["trace", "generate", "fleet", "rate", "load"])]
    pub suite: Option<SuiteForm>,
    /// Only print what the suite would run, and how long it would take here
    #[arg(long, requires = "suite")]
    pub plan: bool,
    /// The folder of the suite's traces: mooncake_conversation.jsonl and agentic_sessions.jsonl, plain or .gz
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub traces: PathBuf,
    /// Workloads of the suite, separated by commas; all, if left out
    #[arg(long = "case", value_name = "NAME", value_delimiter = ',')]
    pub cases: Vec<String>,
    /// The folder of the suite's results; a suite that was stopped goes on with what is there
    #[arg(long, value_name = "DIR", requires = "suite")]
    pub out: Option<PathBuf>,
    /// Threads; as many as the machine has cores, if left out. They change no figure
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
}

pub(super) fn usage(message: impl Into<String>) -> Failure {
    Failure::new(Exit::Usage, message)
}

impl SimulateArgs {
    /// Runs the command and writes its result to `out`.
    ///
    /// # Errors
    /// The exit code and a sentence: the arguments or a file cannot be used, or the result cannot be written.
    pub fn run(&self, out: &mut impl Write) -> Result<Exit, Failure> {
        self.check()?;
        let text = match self.suite {
            _ if self.example_fleet => example_fleet(),
            Some(form) => self.run_suite(form)?,
            None => return Comparison::of(self)?.run(out),
        };
        out.write_all(text.as_bytes())?;
        out.flush()?;
        Ok(Exit::Done)
    }

    /// Refuses what clap cannot.
    fn check(&self) -> Result<(), Failure> {
        for (name, value) in [("--rate", self.rate), ("--load", self.load)] {
            if value.is_some_and(|value| !(value > 0.0 && value <= 1e6)) {
                return Err(usage(format!("{name} must be above 0 and at most 1000000")));
            }
        }
        for (name, value) in [("--event-lag-ms", self.event_lag_ms), ("--router-age-ms", self.router_age_ms)] {
            if !(0.0..=60_000.0).contains(&value) {
                return Err(usage(format!("{name} must be from 0 to 60000")));
            }
        }
        if self.live == Some(0) {
            return Err(usage("--live must be at least 1"));
        }
        for policy in &self.policies {
            SimulatedPolicy::parse(policy).map_err(usage)?;
        }
        check_report(self.report.as_deref())
    }

    fn threads(&self) -> usize {
        threads(self.threads)
    }
}

/// The threads that a command line asks for: as many as the machine has cores, if it does not say.
pub(super) fn threads(asked: Option<u16>) -> usize {
    let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    asked.map_or_else(cores, usize::from)
}

/// What is written to a report's file: `svg` or `html`.
fn kind_of(file: &Path) -> Option<&str> {
    file.extension().and_then(|kind| kind.to_str()).filter(|kind| ["svg", "html"].contains(kind))
}

/// Refuses a file that is neither a picture nor a page.
pub(super) fn check_report(file: Option<&Path>) -> Result<(), Failure> {
    match file.is_none_or(|file| kind_of(file).is_some()) {
        true => Ok(()),
        false => Err(usage("--report needs a file that ends in .svg or .html")),
    }
}

/// Writes curves to a picture, or curves and table to a page with this title. The policy `ours` stands out.
pub(super) fn write_report(file: &Path, title: &str, section: Section, ours: &str) -> Result<(), Failure> {
    match kind_of(file) {
        Some("svg") => write(file, &picture::svg(&section.title, &section.panels, ours)),
        _ => write(file, &picture::html(title, &[section], ours)),
    }
}

pub(super) fn write(file: &Path, text: &str) -> Result<(), Failure> {
    std::fs::write(file, text)
        .map_err(|error| Failure::new(Exit::Output, format!("cannot write {}: {error}", file.display())))
}

/// A progress bar on standard error, which indicatif hides where that is no terminal. Its length is in requests or runs.
pub(super) fn progress(length: u64, is_hidden: bool) -> ProgressBar {
    let bar = if is_hidden { ProgressBar::hidden() } else { ProgressBar::new(length) };
    match ProgressStyle::with_template("{msg} [{bar:32}] {pos}/{len} {eta}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
