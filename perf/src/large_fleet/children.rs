//! The processes of engines, from where they are started.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use super::orders::{Endpoints, Order, RankState, Reply};
use crate::args::FleetArgs;
use crate::failure::Failure;

/// Descriptors of a rank in its process beside its connections: an event loop, a waker and a listener for each socket.
const DESCRIPTORS_PER_RANK: u32 = 6;
/// Descriptors of a rank for each daemon: its subscription and its replay.
const DESCRIPTORS_PER_ROUTER: u32 = 2;
/// Descriptors that one process of engines takes.
const DESCRIPTORS_MAX: u32 = 16_000;

/// One process of engines.
struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

/// All engines.
pub(super) struct Engines {
    processes: Vec<Process>,
}

/// What all engines have done since their start.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Work {
    /// Batches since the caches were filled.
    pub(super) batches: u64,
    /// Processor time, nanoseconds.
    pub(super) cpu_ns: u64,
}

impl Engines {
    /// Starts the engines of workers 0, 1 and so on, each in as few processes as their descriptors allow; where their
    /// ranks are.
    ///
    /// # Errors
    /// A process does not start.
    pub(super) fn start(args: &FleetArgs) -> Result<(Self, Vec<Endpoints>), Failure> {
        let workers = args.workers_run();
        let per_worker = args.ranks * (DESCRIPTORS_PER_RANK + DESCRIPTORS_PER_ROUTER * args.routers);
        // A partition leaves one process.
        let processes = (workers * per_worker).div_ceil(DESCRIPTORS_MAX).max(2);
        let (mut engines, mut endpoints) = (Self { processes: Vec::new() }, Vec::new());
        for process in 0..processes {
            let ids = (0..workers).filter(|worker| worker % processes == process).map(|worker| worker.to_string());
            let own = std::env::current_exe().map_err(Failure::system("find this program"))?;
            let mut command = Command::new(own);
            command.args(["fleet-engines", "--workers", &ids.collect::<Vec<_>>().join(",")]);
            command.args(["--ranks", &args.ranks.to_string(), "--cache-blocks", &args.cache_blocks.to_string()]);
            command.args(["--loss", &args.loss.to_string()]);
            let mut process = Process::spawn(command)?;
            endpoints.extend(process.endpoints()?);
            engines.processes.push(process);
        }
        Ok((engines, endpoints))
    }

    /// The number of processes.
    pub(super) const fn processes(&self) -> usize {
        self.processes.len()
    }

    /// Gives an order to every process, and waits until all have carried it out.
    ///
    /// # Errors
    /// A process has ended.
    pub(super) fn order(&mut self, order: impl Fn(usize) -> Order) -> Result<Work, Failure> {
        for (at, process) in self.processes.iter_mut().enumerate() {
            process.say(order(at))?;
        }
        let mut work = Work::default();
        for process in &mut self.processes {
            let Reply::Done { batches, cpu_ns } = process.reply()? else { return Err(misunderstood()) };
            work = Work { batches: work.batches + batches, cpu_ns: work.cpu_ns + cpu_ns };
        }
        Ok(work)
    }

    /// Lets all of them together publish this number of batches a second.
    ///
    /// # Errors
    /// As [`Self::order`].
    pub(super) fn publish(&mut self, per_s: f64) -> Result<Work, Failure> {
        let processes = self.processes.len() as f64;
        self.order(|_| Order::Publish { per_s: per_s / processes })
    }

    /// What every rank holds.
    ///
    /// # Errors
    /// As [`Self::order`].
    pub(super) fn state(&mut self) -> Result<Vec<RankState>, Failure> {
        let mut ranks = Vec::new();
        for process in &mut self.processes {
            process.say(Order::State)?;
            let Reply::State(state) = process.reply()? else { return Err(misunderstood()) };
            ranks.extend(state);
        }
        Ok(ranks)
    }

    /// Puts the worker `by` in the place of the worker of a slot; where its ranks are.
    ///
    /// # Errors
    /// As [`Self::order`].
    pub(super) fn replace(&mut self, slot: usize, worker: u32, by: u32) -> Result<Vec<Endpoints>, Failure> {
        let processes = self.processes.len();
        let process = &mut self.processes[slot % processes];
        process.say(Order::Replace { worker, by })?;
        process.endpoints()
    }
}

fn misunderstood() -> Failure {
    Failure::Child("has replied to another order".to_owned())
}

impl Process {
    fn spawn(mut command: Command) -> Result<Self, Failure> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(Failure::system("start a child process"))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Failure::Child("has no pipes".to_owned()));
        };
        Ok(Self { child, input, output: BufReader::new(output) })
    }

    fn say(&mut self, order: Order) -> Result<(), Failure> {
        let line = serde_json::to_string(&order).map_err(|error| Failure::Child(error.to_string()))?;
        writeln!(self.input, "{line}").map_err(Failure::system("give an order to a child process"))
    }

    fn reply(&mut self) -> Result<Reply, Failure> {
        let mut line = String::new();
        self.output.read_line(&mut line).map_err(Failure::system("read from a child process"))?;
        serde_json::from_str(&line).map_err(|error| Failure::Child(error.to_string()))
    }

    fn endpoints(&mut self) -> Result<Vec<Endpoints>, Failure> {
        match self.reply()? {
            Reply::Endpoints(endpoints) => Ok(endpoints),
            _ => Err(misunderstood()),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It has nothing to save. That it is gone already is no fault.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
