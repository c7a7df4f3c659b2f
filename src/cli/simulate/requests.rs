//! The requests that a command line asks for: of a trace, or generated.

use super::{Format, SimulateArgs, usage};
use crate::cli::exit::Failure;
use crate::simulate::experiment::is_closed;
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
            Self::Trace { workload, .. } => workload.clone(),
        }
    }
}

impl SimulateArgs {
    /// The requests, of which there is at least one. `workers` is the number of engines.
    pub(super) fn requests(&self, workers: usize) -> Result<Requests, Failure> {
        let requests = match (&self.generate, &self.trace) {
            (Some(text), _) => self.generated(text)?,
            (None, Some(path)) => {
                let lines = open(path).map_err(usage)?;
                let live = agent_sessions::Starts::Live(self.live.unwrap_or(4 * workers));
                let workload = match self.format {
                    Format::Mooncake => mooncake::read(lines),
                    Format::Sessions => agent_sessions::read(lines, THINK_S_MAX, live),
                    Format::Csv => lengths::read(lines),
                };
                let workload = workload.map_err(|error| usage(format!("{}, {error}", path.display())))?;
                if workload.requests() == 0 {
                    return Err(usage(format!("{} has no requests", path.display())));
                }
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
        let live = self.live.and_then(|live| generator.with_live_sessions(live));
        Ok(Requests::Generated(Box::new(live.unwrap_or(generator))))
    }
}
