//! The requests that a command line asks for: of a trace, or generated.

use std::path::Path;

use super::{Format, GENERATED_REQUESTS_MAX, SimulateArgs, usage};
use crate::cli::exit::Failure;
use crate::cli::simulated_load::{JOURNAL_REQUESTS_MAX, read_journal};
use crate::simulate::experiment::is_closed;
use crate::simulate::recorded::RecordedLoad;
use crate::simulate::suite_workloads::open;
use crate::simulate::workload::generated::Generator;
use crate::simulate::workload::{Workload, agent_sessions, lengths, mooncake};

/// Seconds by which the times of the Mooncake traces were rounded down.
const MOONCAKE_GRAIN_S: f64 = 3.0;
/// Agents' longest pause, seconds.
const THINK_S_MAX: f64 = 600.0;

/// Where the requests come from.
pub(super) enum Requests {
    Trace { workload: Workload, format: Format },
    Generated(Box<Generator>),
}

impl Requests {
    /// The requests of a seed, at their own rate.
    pub(super) fn of_seed(&self, seed: u64) -> Workload {
        match self {
            Self::Generated(generator) => generator.generate(seed),
            Self::Trace { workload, format: Format::Mooncake } => {
                let mut of_seed = workload.clone();
                mooncake::jitter(&mut of_seed, MOONCAKE_GRAIN_S, seed);
                of_seed
            }
            Self::Trace { workload, format: Format::Sessions | Format::Csv } if seed > 1 => {
                workload.clone().shuffled(seed)
            }
            Self::Trace { workload, format: Format::Journal } if seed > 1 => workload.clone().jittered(seed),
            Self::Trace { workload, .. } => workload.clone(),
        }
    }
}

/// The requests of a trace, of which there is at least one. `live` sessions of a trace of sessions are live at a time.
pub(in crate::cli) fn read_trace(path: &Path, format: Format, live: usize) -> Result<Workload, Failure> {
    let lines = open(path).map_err(usage)?;
    let workload = match format {
        Format::Mooncake => mooncake::read(lines),
        Format::Sessions => agent_sessions::read(lines, THINK_S_MAX, agent_sessions::Starts::Live(live)),
        Format::Csv => lengths::read(lines),
        Format::Journal => return Err(usage(format!("{} is no trace", path.display()))),
    };
    let workload = workload.map_err(|error| usage(format!("{}, {error}", path.display())))?;
    if workload.requests() == 0 {
        return Err(usage(format!("{} has no requests", path.display())));
    }
    Ok(workload)
}

impl SimulateArgs {
    /// The load of the journal that the command line names, if it names one, and remarks about it.
    pub(super) fn recorded(&self) -> Result<Option<(RecordedLoad, Vec<String>)>, Failure> {
        match (&self.trace, self.format) {
            (Some(path), Format::Journal) => {
                let (load, mut remarks) =
                    read_journal(std::slice::from_ref(path), None, JOURNAL_REQUESTS_MAX as usize)?;
                remarks.extend(load.remarks());
                Ok(Some((load, remarks)))
            }
            _ => Ok(None),
        }
    }

    /// The requests, of which there is at least one. `workers` is the number of engines, `recorded` the load of a journal.
    pub(super) fn requests(&self, workers: usize, recorded: Option<&RecordedLoad>) -> Result<Requests, Failure> {
        let requests = match (&self.generate, &self.trace) {
            (Some(text), _) => self.generated(text)?,
            (None, Some(path)) => {
                let workload = match recorded {
                    Some(recorded) => recorded.workload(),
                    None => read_trace(path, self.format, self.live.unwrap_or(4 * workers))?,
                };
                Requests::Trace { workload, format: self.format }
            }
            (None, None) => return Err(usage("--trace or --generate is needed")),
        };
        let is_closed = match &requests {
            Requests::Trace { workload, .. } => is_closed(workload),
            Requests::Generated(generator) => is_closed(&generator.with_requests(1).generate(1)),
        };
        if self.live.is_some() && !is_closed {
            return Err(usage(
                "--live is for sessions in closed loop; other requests have times of their own, and --rate",
            ));
        }
        if self.rate.is_some() && is_closed {
            return Err(usage(
                "--rate is for requests with times; sessions run in closed loop, and --live says how many",
            ));
        }
        Ok(requests)
    }

    fn generated(&self, text: &str) -> Result<Requests, Failure> {
        let generator = Generator::parse(text).map_err(|message| usage(format!("--generate: {message}")))?;
        let generator = match self.requests {
            Some(count) => generator.with_requests(count as usize),
            None => generator,
        };
        let (requests, bounds) = (generator.requests(), 1..=GENERATED_REQUESTS_MAX);
        if !bounds.contains(&(requests as u64)) {
            return Err(usage(format!("--generate: requests={requests}: must be from 1 to {GENERATED_REQUESTS_MAX}")));
        }
        let generator = self.live.and_then(|live| generator.with_live_sessions(live)).unwrap_or(generator);
        if generator.live_sessions() == Some(0) {
            return Err(usage("--generate: live_sessions=0: must be at least 1, or none"));
        }
        Ok(Requests::Generated(Box::new(generator)))
    }
}
