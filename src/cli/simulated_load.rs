//! The load and the fleet that `what-if` and `tune` simulate: those of a journal, or of a trace and a described fleet.

use std::path::{Path, PathBuf};

use super::exit::{Exit, Failure};
use super::journal_files::{journal_files, open, read, remarks};
use super::simulate::{Format, check_report, read_engine, read_trace, threads, usage};
use crate::config::policy_with;
use crate::ids::SpaceId;
use crate::journal::{DecisionRecord, JournalEntry, Origin};
use crate::route::Policy;
use crate::simulate::experiment::possible_load;
use crate::simulate::policy_trials::{Stretch, Trials, unsimulated};
use crate::simulate::recorded::{
    Agreement, Felt, FittedFleet, LoadBounds, LoadReader, LoadSurvey, RecordedLoad, engine_file,
};
use crate::simulate::workload::Workload;
use crate::simulate::{EngineSpec, Settings, Slo};

/// Tokens of a simulated block of a load without identities of prefixes.
const BLOCK_TOKENS: u32 = 64;
/// Tokens of a block of a trace's policies: vLLM's.
const TRACE_BLOCK_SIZE: u32 = 16;
/// Engines of a trace's fleet, and what they are.
const TRACE_WORKERS: u16 = 8;
const TRACE_ENGINE: &str = "70b-tp4";
/// Requests of a journal that are taken, if the command line has no number.
pub(super) const JOURNAL_REQUESTS_MAX: u32 = 20_000;

/// What to simulate.
#[derive(Clone, Debug, clap::Args)]
pub struct LoadArgs {
    /// Journal files or folders of them, or one trace
    #[arg(value_name = "JOURNAL|TRACE")]
    pub files: Vec<PathBuf>,
    /// The form of the files. Without it, folders and files that end in .kvrj are a journal, and another file is a trace of
    /// Mooncake's format
    #[arg(long, value_enum)]
    pub format: Option<Format>,
    /// Only requests of this space of the journal, by its number; without it, the space with the most requests
    #[arg(long, value_name = "NUMBER")]
    pub space: Option<u32>,
    /// Requests of the journal to take, at most: the newest
    #[arg(long, value_name = "NUMBER", default_value_t = JOURNAL_REQUESTS_MAX, value_parser = clap::value_parser!(u32).range(10..=1_000_000))]
    pub requests_max: u32,
    /// Run at this many times the recorded rate, or with as many times the live sessions
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    pub rate: f64,
    /// Runs of each policy, which differ in arrivals and ties; intervals are over them
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub seeds: u64,
    /// Time to the first token that a request should see, besides that of its prompt's tokens, milliseconds
    #[arg(long, value_name = "MS", default_value_t = 2000.0)]
    pub ttft_ms: f64,
    /// What each token of the prompt adds to it, microseconds
    #[arg(long, value_name = "US", default_value_t = 50.0)]
    pub ttft_token_us: f64,
    /// Mean time between two tokens that a request should see, milliseconds
    #[arg(long, value_name = "MS", default_value_t = 50.0)]
    pub tpot_ms: f64,
    /// Workers of the fleet, instead of the journal's; 8 for a trace
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub workers: Option<u16>,
    /// What the engines are, instead of what the journal tells: a preset or a file, as of simulate; 70b-tp4 for a trace
    #[arg(long, value_name = "PRESET|FILE")]
    pub engine: Option<String>,
    /// A field of [policy] that a trace runs under; repeatable. A journal has its own policy
    #[arg(long, value_name = "FIELD=VALUE")]
    pub base: Vec<String>,
    /// Write the fitted engine to this file, for simulate --engine; further classes to FILE with a number
    #[arg(long, value_name = "FILE")]
    pub write_engine: Option<PathBuf>,
    /// Write curves over load to a file: a picture if it ends in .svg, a page with the table if it ends in .html
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Threads; as many as the machine has cores, if left out. They change no figure
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Print one JSON object instead of tables
    #[arg(long)]
    pub json: bool,
}

/// A load on a fleet.
pub(super) struct SimulatedLoad {
    pub(super) workload: Workload,
    pub(super) fleet: Settings,
    /// The policy that the load was recorded under.
    pub(super) policy: Policy,
    /// Tokens of a block by which its costs count.
    pub(super) block_size: u32,
    /// `None` = a trace.
    pub(super) recorded: Option<RecordedLoad>,
    /// `None` = the command line describes the engines.
    pub(super) fitted: Option<FittedFleet>,
    /// What a reader must know first.
    pub(super) remarks: Vec<String>,
}

impl LoadArgs {
    /// Refuses what clap cannot.
    pub(super) fn check(&self) -> Result<(), Failure> {
        if self.files.is_empty() {
            return Err(usage("name the files or the folder of a journal, or a trace"));
        }
        let ranges = [
            ("--rate", self.rate, 1e-3..=1e3),
            ("--ttft-ms", self.ttft_ms, 1e-3..=1e9),
            ("--tpot-ms", self.tpot_ms, 1e-3..=1e9),
            ("--ttft-token-us", self.ttft_token_us, 0.0..=1e9),
        ];
        for (name, value, range) in ranges {
            if !range.contains(&value) {
                return Err(usage(format!("{name} must be from {} to {}", range.start(), range.end())));
            }
        }
        check_report(self.report.as_deref())
    }

    pub(super) fn slo(&self) -> Slo {
        Slo { ttft_s: self.ttft_ms * 1e-3, ttft_token_s: self.ttft_token_us * 1e-6, tpot_s: self.tpot_ms * 1e-3 }
    }

    /// Runs of policies on a stretch of a load. `tick` is called after each.
    pub(super) fn trials<'a>(
        &self,
        subject: &'a SimulatedLoad,
        stretch: &'a Stretch,
        tick: &'a (dyn Fn() + Sync),
    ) -> Trials<'a> {
        let (slo, threads) = (self.slo(), threads(self.threads));
        Trials { stretch, fleet: &subject.fleet, slo, block_size: subject.block_size, threads, tick }
    }

    /// The load at which a stretch runs.
    pub(super) fn load_of(&self, stretch: &Stretch) -> f64 {
        possible_load(self.rate * stretch.own_load(), stretch.is_closed())
    }

    /// Reads the load, and fits the fleet if it is a journal's.
    pub(super) fn read(&self) -> Result<SimulatedLoad, Failure> {
        let is_journal = |path: &PathBuf| path.is_dir() || path.extension().is_some_and(|kind| kind == "kvrj");
        match self.format {
            Some(Format::Journal) => self.of_journal(),
            None if self.files.iter().all(is_journal) => self.of_journal(),
            format => self.of_trace(format.unwrap_or(Format::Mooncake)),
        }
    }

    fn of_journal(&self) -> Result<SimulatedLoad, Failure> {
        if !self.base.is_empty() {
            return Err(usage("--base is for traces; a journal has its own policy"));
        }
        let (recorded, mut remarks) = read_journal(&self.files, self.space.map(SpaceId), self.requests_max as usize)?;
        remarks.extend(recorded.remarks());
        let fitted = FittedFleet::of(&recorded, recorded.simulated_block_size(BLOCK_TOKENS));
        let mut fleet = fitted.settings();
        if let Some(engine) = &self.engine {
            let block_size = recorded.simulated_block_size(BLOCK_TOKENS);
            fleet.engines.fill(read_engine(engine, block_size, None)?);
        }
        if let Some(workers) = self.workers {
            let engines = fleet.engines.iter().cloned().cycle().take(usize::from(workers)).collect();
            // Which of the recorded workers a further one is like is not known.
            fleet = Settings { engines, changes: Vec::new(), ..fleet };
        }
        let (workload, policy, block_size) = (recorded.workload(), *recorded.policy(), recorded.block_size());
        let load = SimulatedLoad {
            workload,
            fleet,
            policy,
            block_size,
            recorded: Some(recorded),
            fitted: self.engine.is_none().then_some(fitted),
            remarks,
        };
        self.write_engines(load.fitted.as_ref())?;
        load.checked()
    }

    fn of_trace(&self, format: Format) -> Result<SimulatedLoad, Failure> {
        let [path] = self.files.as_slice() else { return Err(usage("name one trace")) };
        let workers = self.workers.unwrap_or(TRACE_WORKERS);
        let workload = read_trace(path, format, 4 * usize::from(workers))?;
        let engine: EngineSpec = read_engine(self.engine.as_deref().unwrap_or(TRACE_ENGINE), BLOCK_TOKENS, None)?;
        let policy =
            policy_with(&Policy::default(), "--base", &self.base).map_err(|problems| usage(problems.to_string()))?;
        let engines = vec![engine; usize::from(workers)];
        let fleet = Settings::of(engines, 1);
        let remarks = vec![format!("{} requests of {}", workload.requests(), path.display())];
        self.write_engines(None)?;
        let (recorded, fitted, block_size) = (None, None, TRACE_BLOCK_SIZE);
        SimulatedLoad { workload, fleet, policy, block_size, recorded, fitted, remarks }.checked()
    }

    /// Writes the fitted engines, if the command line asks for it.
    fn write_engines(&self, fitted: Option<&FittedFleet>) -> Result<(), Failure> {
        let Some(path) = &self.write_engine else { return Ok(()) };
        let Some(fitted) = fitted else {
            return Err(usage("--write-engine is for engines that are fitted to a journal"));
        };
        for (at, class) in fitted.classes.iter().enumerate() {
            let path = if at == 0 { path.clone() } else { numbered(path, at + 1) };
            super::simulate::write(&path, &format!("{:#}\n", engine_file(&class.spec)))?;
        }
        Ok(())
    }
}

/// `engine.json` and 2 give `engine.2.json`.
fn numbered(path: &Path, number: usize) -> PathBuf {
    match path.extension() {
        Some(kind) => path.with_extension(format!("{number}.{}", kind.display())),
        None => path.with_extension(number.to_string()),
    }
}

impl SimulatedLoad {
    /// What was recorded of a stretch, beside a simulation of it; `None` = a trace.
    pub(super) fn agreement(&self, stretch: &Stretch, simulated: Felt) -> Option<Agreement> {
        let recorded = self.recorded.as_ref()?.felt(stretch.measured_from_s());
        Some(Agreement { recorded, simulated })
    }

    /// The parts of a text that a reader must know before a comparison of policies.
    pub(super) fn head(&self, agreement: Option<Agreement>) -> Vec<String> {
        let mut parts = self.remarks.clone();
        parts.extend(self.fitted.as_ref().map(|fitted| format!("\nThe fleet, as fitted\n{}", fitted.table())));
        parts.extend(agreement.map(|agreement| format!("\n{}", agreement.text())));
        parts
    }

    fn checked(self) -> Result<Self, Failure> {
        match unsimulated(&self.policy) {
            None => Ok(self),
            Some(why) => Err(usage(format!("the recorded policy cannot be simulated: {why}"))),
        }
    }
}

/// The load of a journal, and remarks about its files.
pub(super) fn read_journal(
    named: &[PathBuf],
    space: Option<SpaceId>,
    requests_max: usize,
) -> Result<(RecordedLoad, Vec<String>), Failure> {
    let (files, bounds) = (journal_files(named)?, LoadBounds::of(requests_max));
    let mut survey = LoadSurvey::default();
    let remarks = entries(&files, |origin, entry, record| {
        if let JournalEntry::Decision { .. } = entry {
            survey.add(&bounds, origin, record);
        }
    })?;
    let choice = survey.choose(space).map_err(|why| Failure::new(Exit::Usage, why))?;
    let mut reader = LoadReader::new(choice, &bounds);
    entries(&files, |origin, entry, record| reader.take(origin, entry, record))?;
    Ok((reader.finish(), remarks))
}

/// Passes every entry of the files to `each`; a decision is in the record. Returns remarks about incomplete files.
fn entries(
    files: &[PathBuf],
    mut each: impl FnMut(&Origin, JournalEntry, &DecisionRecord),
) -> Result<Vec<String>, Failure> {
    let mut lines = Vec::new();
    for path in files {
        let bytes = read(path)?;
        let mut reader = open(path, &bytes)?;
        let (origin, mut record) = (reader.origin().clone(), DecisionRecord::default());
        let ending = loop {
            match reader.next(&mut record) {
                JournalEntry::End(ending) => break ending,
                entry => each(&origin, entry, &record),
            }
        };
        lines.extend(remarks(path, &reader, ending));
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_of_further_classes_are_numbered() {
        assert_eq!(numbered(Path::new("a/engine.json"), 2), Path::new("a/engine.2.json"));
        assert_eq!(numbered(Path::new("engine"), 3), Path::new("engine.3"));
    }
}
