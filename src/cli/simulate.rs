//! `kvrouted simulate`: its arguments, and what it runs.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};

use super::exit::{Exit, Failure};
use super::simulated_load::{REQUESTS_MAX, read_journal};
use crate::engine_law::{ENGINE_PRESET_NAMES, EngineLaw, engine_preset};
use crate::simulate::bounds::{self, HINDSIGHT, POOLED};
use crate::simulate::capacity::Search;
use crate::simulate::cells::Cells;
use crate::simulate::experiment::{self, OURS, in_parallel, is_closed, loaded, own_rps, peers};
use crate::simulate::measure::Measured;
use crate::simulate::picture::{self, Section, panels};
use crate::simulate::recorded::FittedFleet;
use crate::simulate::report::{self, Row};
use crate::simulate::suite::{self, LOAD_SHARES, Shape, Suite};
use crate::simulate::suite_workloads::{Case, Traces, cases, open};
use crate::simulate::verdict::verdict;
use crate::simulate::workload::{Arrivals, Workload, agent_sessions, lengths, mooncake};
use crate::simulate::{EngineSpec, NAMES, Outcome, Settings, SimulatedPolicy, Slo, TRIED_TERMS};

/// The name of the engines of a journal.
const FITTED: &str = "fitted";
/// Requests of the workload that hindsight searches: each try replays them all.
const HINDSIGHT_REQUESTS: usize = 400;

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
    /// The trace, plain or compressed with gzip; - reads standard input. A folder or a file of a journal
    #[arg(long, value_name = "FILE", required_unless_present = "suite")]
    pub trace: Option<PathBuf>,
    /// The form of the trace
    #[arg(long, value_enum, default_value = "mooncake")]
    pub format: Format,
    /// Engines of the fleet
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024))]
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
    /// Run at this many times the trace's own rate
    #[arg(long, value_name = "X", conflicts_with = "load")]
    pub rate: Option<f64>,
    /// Sessions that are live at a time, for traces of sessions
    #[arg(long, value_name = "N", conflicts_with_all = ["load", "rate"])]
    pub live: Option<usize>,
    /// Run at this share of the capacity of the best of the other systems' rules, which is found first
    #[arg(long, value_name = "SHARE")]
    pub load: Option<f64>,
    /// Runs of each policy, which differ in arrivals within the trace's grain, the order of sessions and ties
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub seeds: u64,
    /// The policies to compare, separated by commas; all, if left out. latency takes a weight, "latency:delay=0.5"; so does
    /// each term of tried-terms
    #[arg(long = "policy", value_name = "NAME", value_delimiter = ',')]
    pub policies: Vec<String>,
    /// Also find the capacity of every policy
    #[arg(long)]
    pub capacity: bool,
    /// Also run the pooled bound, and with a number of tries search in hindsight
    #[arg(long, value_name = "TRIES", num_args = 0..=1, default_missing_value = "0")]
    pub bounds: Option<usize>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
    /// Write curves over load to a file: a picture if it ends in .svg, a page with the table if it ends in .html
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// The delay of KV events, milliseconds
    #[arg(long, value_name = "MS", default_value_t = 5.0)]
    pub event_lag_ms: f64,
    /// Run the suite: every policy on every workload, with the verdict
    #[arg(long, value_enum, num_args = 0..=1, default_missing_value = "quick", conflicts_with_all = ["trace", "rate", "load"])]
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

/// An engine in a file, in the units of published tables.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct EngineFile {
    base_ms: f64,
    token_us: f64,
    attention_ns: f64,
    step_ms: f64,
    request_us: f64,
    kv_token_ns: f64,
    kv_tokens: u64,
    #[serde(default = "step_tokens_max")]
    step_tokens_max: u32,
    #[serde(default = "sequences_max")]
    sequences_max: u32,
}

/// Tokens of a step, and requests of a batch, of presets and where a file does not say.
const STEP_TOKENS_MAX: u32 = 8192;
const SEQUENCES_MAX: u32 = 256;

fn step_tokens_max() -> u32 {
    STEP_TOKENS_MAX
}

fn sequences_max() -> u32 {
    SEQUENCES_MAX
}

impl SimulateArgs {
    /// Runs the command and writes its result to `out`.
    ///
    /// # Errors
    /// The exit code and a sentence: the arguments or a file cannot be used, or the result cannot be written.
    pub fn run(&self, out: &mut impl Write) -> Result<Exit, Failure> {
        self.check()?;
        let text = match self.suite {
            Some(form) => self.run_suite(form)?,
            None => self.compare()?,
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
        if !(0.0..=60_000.0).contains(&self.event_lag_ms) {
            return Err(usage("--event-lag-ms must be from 0 to 60000"));
        }
        for policy in &self.policies {
            SimulatedPolicy::parse(policy).map_err(usage)?;
        }
        if self.report.as_deref().is_some_and(|file| kind_of(file).is_none()) {
            return Err(usage("--report needs a file that ends in .svg or .html"));
        }
        Ok(())
    }

    fn threads(&self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        self.threads.map_or_else(cores, usize::from)
    }

    /// The requests, the fleet of their journal, and remarks about it.
    fn workload(&self) -> Result<(Workload, Option<FittedFleet>, Vec<String>), Failure> {
        let Some(path) = &self.trace else { return Err(usage("--trace is needed")) };
        let (workload, fitted, remarks) = match self.format {
            Format::Journal => {
                let (load, mut remarks) = read_journal(std::slice::from_ref(path), None, REQUESTS_MAX as usize)?;
                remarks.extend(load.remarks());
                let fitted = FittedFleet::of(&load, load.simulated_block_size(self.block_size));
                (load.workload(), Some(fitted), remarks)
            }
            format => {
                let live = self.live.unwrap_or(4 * usize::from(self.workers));
                (read_trace(path, format, live)?, None, Vec::new())
            }
        };
        if self.live.is_some() && !is_closed(&workload) {
            return Err(usage("--live is for traces of sessions; other traces have times of their own, and --rate"));
        }
        if self.rate.is_some() && is_closed(&workload) {
            return Err(usage(
                "--rate is for traces with times; sessions run in closed loop, and --live says how many",
            ));
        }
        Ok((workload, fitted, remarks))
    }

    /// The fleet that the command line describes, or that was fitted to a journal.
    fn fleet(&self, fitted: Option<&FittedFleet>) -> Result<Settings, Failure> {
        let event_lag_s = self.event_lag_ms / 1e3;
        if self.engine == FITTED {
            let fitted = fitted.ok_or_else(|| usage("--engine fitted is for --format journal"))?;
            return Ok(Settings { event_lag_s, ..fitted.settings() });
        }
        let engine = read_engine(&self.engine, self.block_size, self.cache_tokens)?;
        let engines = vec![engine; usize::from(self.workers)];
        Ok(Settings { engines, event_lag_s, changes: Vec::new(), prior_factor: Some(1.0), seed: 1 })
    }

    /// The workload of a seed.
    fn seeded(&self, workload: &Workload, seed: u64) -> Workload {
        let mut of_seed = workload.clone();
        match self.format {
            Format::Mooncake => mooncake::jitter(&mut of_seed, 3.0, seed),
            Format::Sessions | Format::Csv if seed > 1 => of_seed = of_seed.shuffled(seed),
            Format::Journal if seed > 1 => of_seed = of_seed.jittered(seed),
            Format::Sessions | Format::Csv | Format::Journal => {}
        }
        of_seed
    }

    fn compare(&self) -> Result<String, Failure> {
        let (workload, fitted, remarks) = self.workload()?;
        let settings = self.fleet(fitted.as_ref())?;
        let (policies, bar) = (self.chosen(), progress(u64::MAX, self.json));
        Comparison { args: self, workload, settings, remarks, policies, bar }.run()
    }

    /// The policies and bounds to run.
    fn chosen(&self) -> Vec<&str> {
        let mut policies: Vec<&str> = self.policies.iter().map(String::as_str).collect();
        if policies.is_empty() {
            policies.extend(NAMES.into_iter().filter(|name| *name != TRIED_TERMS));
        }
        policies.into_iter().chain(self.bounds.map(|_| POOLED)).collect()
    }

    fn run_suite(&self, form: SuiteForm) -> Result<String, Failure> {
        let traces = Traces::read(&self.traces).map_err(usage)?;
        let mut chosen = cases();
        if let Some(unknown) = self.cases.iter().find(|name| !chosen.iter().any(|case| case.name == name.as_str())) {
            let names: Vec<&str> = chosen.iter().map(|case| case.name).collect();
            return Err(usage(format!("there is no workload {unknown:?}; the workloads are {}", names.join(", "))));
        }
        let mut note = String::new();
        chosen.retain(|case| {
            let is_asked = self.cases.is_empty() || self.cases.iter().any(|name| name == case.name);
            let has_trace = traces.workload(case, 1).is_some();
            if is_asked && !has_trace {
                note += &format!("{} is left out: its trace is not in {}\n", case.name, self.traces.display());
            }
            is_asked && has_trace
        });
        let shape = if form == SuiteForm::Full { Shape::FULL } else { Shape::QUICK };
        let cells = match &self.out {
            Some(folder) => {
                let cannot =
                    |error: std::io::Error| usage(format!("cannot make the folder {}: {error}", folder.display()));
                std::fs::create_dir_all(folder).map_err(cannot)?;
                Cells::open(&folder.join("cells.jsonl")).map_err(usage)?
            }
            None => Cells::default(),
        };
        let bar = progress(0, self.plan);
        let tick = |jobs: usize, stage: &str| {
            if bar.length() != Some(jobs as u64) || bar.message() != stage {
                bar.reset();
                bar.set_length(jobs as u64);
                bar.set_message(stage.to_owned());
            }
            bar.inc(1);
        };
        let (threads, slo) = (self.threads(), Slo::default());
        let suite = Suite { cases: chosen, traces: &traces, shape, slo, threads, cells: &cells, tick: &tick };
        if self.plan {
            return Ok(note + &suite.plan(&run_times(&suite)));
        }
        let results = suite.run().map_err(|message| Failure::new(Exit::Output, message))?;
        bar.finish_and_clear();
        self.suite_result(&suite, &results, &note)
    }

    fn suite_result(&self, suite: &Suite, results: &[suite::CaseResults], note: &str) -> Result<String, Failure> {
        let lines = verdict(&suite.cases, results);
        let sections: Vec<Section> =
            suite.cases.iter().zip(results).map(|(case, of_case)| suite::section(case, of_case)).collect();
        let verdict_text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        if let Some(folder) = &self.out {
            let mut page = vec![Section { title: "Verdict".into(), text: verdict_text.clone(), ..Section::default() }];
            page.extend(sections.iter().cloned());
            write(&folder.join("suite.html"), &picture::html("The suite of policies", &page, OURS))?;
            for (case, section) in suite.cases.iter().zip(&sections) {
                let svg = picture::svg(&section.title, &section.panels, OURS);
                write(&folder.join(format!("{}.svg", case.name)), &svg)?;
            }
        }
        if self.json {
            let shape = suite.shape;
            let of_case = |(case, section): (&Case, &Section)| {
                let settings = json!({ "workload": case.name, "workers": case.workers, "engine": case.engine,
                    "load_share": suite::VERDICT_SHARE });
                report::json(&section.rows, &settings, &(1..=shape.seeds_all).collect::<Vec<_>>())
            };
            let cases: Vec<Value> = suite.cases.iter().zip(&sections).map(of_case).collect();
            let lines: Vec<String> = lines.iter().map(ToString::to_string).collect();
            return Ok(json!({ "cases": cases, "verdict": lines }).to_string() + "\n");
        }
        let table =
            |section: &Section| format!("{}\n{}\n{}\n\n", section.title, section.text, report::table(&section.rows));
        Ok(note.to_owned() + &sections.iter().map(table).collect::<String>() + &verdict_text)
    }
}

/// An engine that runs whole requests: a preset, or a file of constants.
pub(super) fn read_engine(engine: &str, block_size: u32, cache_tokens: Option<u64>) -> Result<EngineSpec, Failure> {
    let spec = match engine_preset(engine) {
        Some(preset) => EngineSpec {
            class: preset.name.into(),
            law: preset.law,
            kv_tokens: preset.kv_tokens,
            block_size,
            step_tokens_max: STEP_TOKENS_MAX,
            sequences_max: SEQUENCES_MAX,
            tiers: Vec::new(),
        },
        None => engine_of_file(engine, block_size)?,
    };
    let kv_tokens = cache_tokens.unwrap_or(spec.kv_tokens);
    if kv_tokens < u64::from(block_size) {
        return Err(usage("the KV memory of an engine must hold at least one block"));
    }
    Ok(EngineSpec { kv_tokens, ..spec })
}

fn engine_of_file(engine: &str, block_size: u32) -> Result<EngineSpec, Failure> {
    let text = std::fs::read_to_string(engine).map_err(|error| {
        let names = ENGINE_PRESET_NAMES.join(", ");
        usage(format!("--engine {engine} is neither a preset ({names}) nor a file that can be read: {error}"))
    })?;
    let file: EngineFile = serde_json::from_str(&text).map_err(|error| usage(format!("{engine}: {error}")))?;
    let prefill = [file.base_ms * 1e-3, file.token_us * 1e-6, file.attention_ns * 1e-9];
    let decode = [file.step_ms * 1e-3, file.request_us * 1e-6, file.kv_token_ns * 1e-9];
    let are_sane = prefill.iter().chain(&decode).all(|constant| (0.0..=1e3).contains(constant));
    let (step_tokens_max, sequences_max) = (file.step_tokens_max, file.sequences_max);
    if !are_sane || file.token_us <= 0.0 || file.step_ms <= 0.0 || step_tokens_max == 0 || sequences_max == 0 {
        return Err(usage(format!(
            "{engine}: constants must be from 0 to 1000 s; token_us, step_ms, step_tokens_max and sequences_max above 0"
        )));
    }
    Ok(EngineSpec {
        class: engine.into(),
        law: EngineLaw::of(prefill, decode),
        kv_tokens: file.kv_tokens,
        block_size,
        step_tokens_max,
        sequences_max,
        tiers: Vec::new(),
    })
}

/// The requests of a trace, of which there is at least one. `live` sessions of a trace of sessions are live at a time.
pub(super) fn read_trace(path: &Path, format: Format, live: usize) -> Result<Workload, Failure> {
    let lines = open(path).map_err(usage)?;
    let workload = match format {
        Format::Mooncake => mooncake::read(lines),
        Format::Sessions => agent_sessions::read(lines, 600.0, agent_sessions::Starts::Live(live)),
        Format::Csv => lengths::read(lines),
        Format::Journal => return Err(usage(format!("{} is no trace", path.display()))),
    };
    let workload = workload.map_err(|error| usage(format!("{}, {error}", path.display())))?;
    if workload.requests() == 0 {
        return Err(usage(format!("{} has no requests", path.display())));
    }
    Ok(workload)
}

/// What is written to a report's file: `svg` or `html`.
pub(super) fn kind_of(file: &Path) -> Option<&str> {
    file.extension().and_then(|kind| kind.to_str()).filter(|kind| ["svg", "html"].contains(kind))
}

pub(super) fn write(file: &Path, text: &str) -> Result<(), Failure> {
    std::fs::write(file, text)
        .map_err(|error| Failure::new(Exit::Output, format!("cannot write {}: {error}", file.display())))
}

/// A progress bar on standard error, which indicatif hides where that is no terminal.
pub(super) fn progress(length: u64, is_hidden: bool) -> ProgressBar {
    let bar = if is_hidden { ProgressBar::hidden() } else { ProgressBar::new(length) };
    match ProgressStyle::with_template("{msg} [{bar:32}] {pos}/{len} {eta}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// Seconds of a run of each case here, by one run of LPWL near its capacity.
fn run_times(suite: &Suite) -> Vec<f64> {
    let run_s = |case: &Case| {
        let (Some(workload), Some(settings)) = (suite.traces.workload(case, 1), case.settings(1)) else { return 0.0 };
        let begun = Instant::now();
        let _ = experiment::measure(&workload, case.first_load, &settings, &suite.slo, "lpwl");
        begun.elapsed().as_secs_f64()
    };
    suite.cases.iter().map(run_s).collect()
}

/// Policies on one workload.
struct Comparison<'a> {
    args: &'a SimulateArgs,
    workload: Workload,
    settings: Settings,
    /// What a reader must know first.
    remarks: Vec<String>,
    policies: Vec<&'a str>,
    bar: ProgressBar,
}

impl Comparison<'_> {
    fn run(&self) -> Result<String, Failure> {
        let (args, slo) = (self.args, Slo::default());
        let reference = match args.load {
            Some(_) => Some(self.best_peer(&slo)?),
            None => None,
        };
        let load = match (args.load, &reference) {
            (Some(share), Some((_, capacity))) => share * capacity,
            _ => self.own_load(),
        };
        let runs = self.measured(load, &slo);
        let mut rows: Vec<Row> = self
            .policies
            .iter()
            .zip(&runs)
            .map(|(policy, runs)| Row { policy: (*policy).into(), figures: Measured::median(runs), ..Row::default() })
            .collect();
        if args.capacity {
            self.add_capacities(&mut rows, &slo);
        }
        if let Some(tries) = args.bounds.filter(|tries| *tries > 0) {
            rows.extend(self.hindsight(load, tries, &slo));
        }
        if let Some(file) = &args.report {
            self.report(file, load, &rows, &slo)?;
        }
        self.bar.finish_and_clear();
        if args.json {
            let seeds: Vec<u64> = (1..=args.seeds).collect();
            return Ok(report::json(&rows, &self.json_settings(load, reference.as_ref()), &seeds).to_string() + "\n");
        }
        let unit = if is_closed(&self.workload) { "live sessions" } else { "times the trace's own rate" };
        let head = format!(
            "{} requests, {} engines {}, {load:.3} {unit}\n",
            self.workload.requests(),
            self.settings.engines.len(),
            args.engine
        );
        let remarks: String = self.remarks.iter().map(|remark| format!("{remark}\n")).collect();
        Ok(remarks + &head + &report::table(&rows) + "\n")
    }

    fn own_load(&self) -> f64 {
        match self.workload.arrivals {
            Arrivals::Timed => self.args.rate.unwrap_or(1.0),
            Arrivals::Live(live) => live as f64,
        }
    }

    fn json_settings(&self, load: f64, reference: Option<&(&str, f64)>) -> Value {
        let args = self.args;
        let engine = self.settings.engines.first();
        json!({
            "trace": args.trace,
            "remarks": self.remarks,
            "requests": self.workload.requests(),
            "workers": self.settings.engines.len(),
            "engine": args.engine,
            "kv_tokens": engine.map(|engine| engine.kv_tokens),
            "block_size": args.block_size,
            "event_lag_ms": args.event_lag_ms,
            "load": load,
            "load_unit": if is_closed(&self.workload) { "live sessions" } else { "times the trace's own rate" },
            "load_share": args.load,
            "best_peer": reference.map(|(peer, _)| peer),
            "best_peer_capacity": reference.map(|(_, capacity)| capacity),
            "own_rps": own_rps(&self.workload),
        })
    }

    /// By policy: the figures of all seeds.
    fn measured(&self, load: f64, slo: &Slo) -> Vec<Vec<Measured>> {
        let seeds = self.args.seeds;
        let jobs = self.policies.len() * seeds as usize;
        self.bar.set_length(jobs as u64);
        let mut runs = in_parallel(jobs, self.args.threads(), |job| {
            let (policy, seed) = (self.policies[job / seeds as usize], job as u64 % seeds + 1);
            let measured = self.once(policy, seed, load, slo);
            self.bar.inc(1);
            measured
        });
        let mut by_policy = Vec::new();
        while !runs.is_empty() {
            by_policy.push(runs.drain(..seeds as usize).collect());
        }
        by_policy
    }

    fn once(&self, policy: &str, seed: u64, load: f64, slo: &Slo) -> Measured {
        let settings = Settings { seed, ..self.settings.clone() };
        experiment::measure(&self.args.seeded(&self.workload, seed), load, &settings, slo, policy).unwrap_or_default()
    }

    /// The capacity of each of these policies by the first seed, as a load and in requests a second.
    fn capacities(&self, policies: &[&str], slo: &Slo) -> Vec<Option<(f64, f64)>> {
        let how = Search::new(self.own_load(), is_closed(&self.workload));
        let workload = self.args.seeded(&self.workload, 1);
        self.bar.set_message("capacity");
        in_parallel(policies.len(), self.args.threads(), |at| {
            let found = experiment::capacity(&workload, &self.settings, slo, policies[at], &how)?;
            Some((found.0.load, found.1))
        })
    }

    fn best_peer(&self, slo: &Slo) -> Result<(&'static str, f64), Failure> {
        let peers: Vec<&'static str> = peers().collect();
        let found = peers.iter().zip(self.capacities(&peers, slo));
        let found = found.filter_map(|(peer, found)| Some((*peer, found?.0)));
        let best = found.max_by(|a, b| a.1.total_cmp(&b.1));
        best.ok_or_else(|| {
            usage("no policy meets the SLO for 90 % of these requests at any load, so --load has no meaning")
        })
    }

    fn add_capacities(&self, rows: &mut [Row], slo: &Slo) {
        for (row, found) in rows.iter_mut().zip(self.capacities(&self.policies, slo)) {
            (row.capacity_load, row.capacity_rps) = found.unzip();
        }
    }

    /// Hindsight on the first requests of the workload, beside the run that it began with.
    fn hindsight(&self, load: f64, tries: usize, slo: &Slo) -> Vec<Row> {
        let mut first = loaded(&self.args.seeded(&self.workload, 1), load);
        let mut left = HINDSIGHT_REQUESTS;
        first.sessions.retain(|session| {
            let is_kept = left > 0;
            left = left.saturating_sub(session.turns.len());
            is_kept
        });
        let from = self.policies.first().copied().unwrap_or(OURS);
        let Some(outcomes) = experiment::outcomes(&first, &self.settings, from) else { return Vec::new() };
        let row = |policy: String, outcomes: &[Outcome]| Row {
            policy,
            figures: Measured::of(outcomes, slo, &self.settings.engines),
            ..Row::default()
        };
        let began = row(format!("{from}, first {} requests", outcomes.len()), &outcomes);
        let found = bounds::hindsight(&first, &self.settings, outcomes, tries, 1);
        vec![began, row(HINDSIGHT.into(), &found.outcomes)]
    }

    /// Writes curves over load: at shares of the capacity of the first policy, by the first seed, around `load` if it
    /// has none.
    fn report(&self, file: &Path, load: f64, rows: &[Row], slo: &Slo) -> Result<(), Failure> {
        let capacity = match rows.iter().filter_map(|row| row.capacity_load).reduce(f64::max) {
            Some(capacity) => capacity,
            None => load / suite::VERDICT_SHARE,
        };
        let mut loads: Vec<f64> = LOAD_SHARES.map(|share| share * capacity).to_vec();
        if is_closed(&self.workload) {
            loads.iter_mut().for_each(|load| *load = load.round().max(1.0));
            loads.dedup();
        }
        let jobs = self.policies.len() * loads.len();
        self.bar.set_length(jobs as u64);
        let runs = in_parallel(jobs, self.args.threads(), |job| {
            let measured = self.once(self.policies[job / loads.len()], 1, loads[job % loads.len()], slo);
            self.bar.inc(1);
            measured
        });
        let unit = if is_closed(&self.workload) { "live sessions" } else { "load, times the trace's own rate" };
        let curve = |(policy, runs): (&&str, &[Measured])| {
            ((*policy).to_owned(), loads.iter().copied().zip(runs.iter().cloned()).collect())
        };
        let curves: Vec<_> = self.policies.iter().zip(runs.chunks(loads.len())).map(curve).collect();
        let section = Section {
            title: format!("{} engines {}", self.settings.engines.len(), self.args.engine),
            text: format!(
                "the table is at load {load:.3}, medians over {} seeds; the curves are of seed 1",
                self.args.seeds
            ),
            panels: panels(unit, &curves),
            rows: rows.to_vec(),
        };
        match kind_of(file) {
            Some("svg") => write(file, &picture::svg(&section.title, &section.panels, OURS)),
            _ => write(file, &picture::html("Policies on a simulated fleet", &[section], OURS)),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: SimulateArgs,
    }

    fn args(line: &str) -> SimulateArgs {
        Line::try_parse_from(["x"].into_iter().chain(line.split_whitespace())).expect(line).args
    }

    fn run(line: &str) -> Result<String, Failure> {
        let mut out = Vec::new();
        args(line).run(&mut out).map(|_| String::from_utf8(out).expect("text"))
    }

    /// A trace of lengths in a file of its own.
    fn trace(name: &str, gzips: bool) -> PathBuf {
        let file = std::env::temp_dir().join(format!("simulate-{}-{name}", std::process::id()));
        let text: String = (0..300).map(|at| format!("{},{},{}\n", at, 800 + at * 7 % 900, 40 + at % 60)).collect();
        if gzips {
            let mut to = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            to.write_all(text.as_bytes()).expect("memory");
            std::fs::write(&file, to.finish().expect("memory")).expect("written");
        } else {
            std::fs::write(&file, text).expect("written");
        }
        file
    }

    #[test]
    fn json_is_one_object_and_the_same_on_any_number_of_threads() {
        let file = trace("json", false);
        let line = format!("--trace {} --format csv --workers 2 --seeds 3 --policy kv,lpwl --json", file.display());
        let text = run(&format!("{line} --threads 1")).expect("a result");
        assert_eq!(text, run(&format!("{line} --threads 3")).expect("a result"));
        let value: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(value["policies"].as_array().map(Vec::len), Some(2));
        assert_eq!(value["seeds"], json!([1, 2, 3]));
        assert!(value["policies"][0]["ttft_s"]["mean"].as_f64().is_some_and(|mean_s| mean_s > 0.0));
    }

    #[test]
    fn a_compressed_trace_is_read_as_the_plain_one() {
        let (plain, packed) = (trace("plain", false), trace("packed", true));
        let of = |file: &Path| run(&format!("--trace {} --format csv --workers 2 --policy lpwl", file.display()));
        assert_eq!(of(&plain), of(&packed));
        assert!(of(&plain).is_ok());
    }

    #[test]
    fn a_load_is_a_share_of_the_best_peers_capacity() {
        let file = trace("load", false);
        let line = format!("--trace {} --format csv --workers 1 --load 0.5 --policy lpwl --json", file.display());
        let value: Value = serde_json::from_str(&run(&line).expect("a result")).expect("JSON");
        let of = |key: &str| value["settings"][key].as_f64().unwrap_or(0.0);
        assert!(of("load") > 0.0 && (of("load") / of("best_peer_capacity") - 0.5).abs() < 1e-9, "{value}");
    }

    #[test]
    fn what_cannot_be_used_is_refused_in_a_sentence() {
        let file = trace("refused", false);
        let with = |more: &str| format!("--trace {} --format csv {more}", file.display());
        for (line, says) in [
            (with("--policy lpwl,best"), "there is no policy \"best\""),
            (with("--rate 0"), "--rate must be above 0"),
            (with("--engine 9000b"), "neither a preset (8b-tp1"),
            (with("--engine fitted"), "for --format journal"),
            (with("--report x.png"), ".svg or .html"),
            (with("--cache-tokens 3"), "at least one block"),
            (with("--live 4"), "--live is for traces of sessions"),
            ("--trace /nonexistent".into(), "cannot read /nonexistent"),
            (format!("--trace {}", file.display()), "line 1"),
        ] {
            let failure = run(&line).expect_err(&line);
            assert_eq!(failure.exit, Exit::Usage, "{line}");
            assert!(failure.message.contains(says), "{line}: {}", failure.message);
        }
        assert!(Line::try_parse_from(["x"]).is_err(), "a trace or the suite is needed");
    }
}
