//! The command line: arguments, and the commands that ask a running daemon.
//!
//! Data goes to standard output, everything else to standard error; exit codes are [`Exit`]'s.

mod admin;
mod doctor;
mod exit;
mod logging;
mod query;
mod relay;
mod replay;
mod reset;
mod serve;
mod status;
mod tune;
mod what_if;
mod worker;

use std::ffi::OsString;
use std::io::Write as _;

use clap::Parser as _;

use crate::demo::args::{DaemonArgs, DemoArgs, EngineArgs, GatewayArgs};

pub use doctor::DoctorArgs;
pub use exit::{Exit, Failure};
pub use logging::init as init_logging;
pub use query::QueryArgs;
pub use relay::RelayArgs;
pub use replay::ReplayArgs;
pub use reset::ResetArgs;
pub use serve::{Prepared, ServeArgs};
pub use status::StatusArgs;
pub use tune::TuneArgs;
pub use what_if::WhatIfArgs;
pub use worker::{WorkerAction, WorkerArgs};

/// Tells an LLM gateway which worker should run a prompt.
#[derive(Debug, clap::Parser)]
#[command(name = "kvrouted", version)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Run the daemon.
    Serve(Box<ServeArgs>),
    /// Ask a running daemon which worker should run a prompt; books nothing.
    Query(QueryArgs),
    /// Show what a running daemon knows of every worker.
    Status(StatusArgs),
    /// Say what is wrong with a running daemon and its fleet, and what to do about it.
    Doctor(DoctorArgs),
    /// Run a relay beside one engine: what the engine says, hashed, and so that nothing is lost unseen.
    Relay(Box<RelayArgs>),
    /// Add, remove, change or list the workers of a running daemon.
    Worker(WorkerArgs),
    /// Judge the recorded decisions of a journal again: do they come out the same?
    Replay(ReplayArgs),
    /// Judge the recorded decisions of a journal by other weights: what would have been chosen?
    WhatIf(WhatIfArgs),
    /// Search better weights on the recorded decisions of a journal, and have a running daemon try them.
    Tune(Box<TuneArgs>),
    /// Let a running daemon forget what it knows of its workers' blocks.
    Reset(ResetArgs),
    /// The whole system on this machine: daemon, simulated engines and a gateway.
    Demo(DemoArgs),
    /// A simulated engine of the demo.
    #[command(hide = true)]
    DemoEngine(EngineArgs),
    /// The gateway of the demo.
    #[command(hide = true)]
    DemoGateway(GatewayArgs),
    /// The daemon of the demo.
    #[command(hide = true)]
    DemoDaemon(DaemonArgs),
}

/// Reads the command line. What is not to be run is said here: help and version on standard output, mistakes
/// on standard error.
///
/// # Errors
/// The code to exit with.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Cli, Exit> {
    Cli::try_parse_from(args).map_err(|error| {
        // Nobody to tell if the terminal is gone.
        let _ = error.print();
        if error.use_stderr() { Exit::Usage } else { Exit::Done }
    })
}

/// Ends a command: says why it failed, if it did, and gives its code.
pub fn conclude(outcome: Result<Exit, Failure>) -> Exit {
    match outcome {
        Ok(exit) => exit,
        Err(failure) => {
            if !failure.message.is_empty() {
                // Nobody to tell if standard error is gone; the code still says it.
                let _ = writeln!(std::io::stderr().lock(), "kvrouted: {}", failure.message);
            }
            failure.exit
        }
    }
}
