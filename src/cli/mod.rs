//! The command line: the arguments of every command and what it runs.
//!
//! Data goes to standard output, everything else to standard error. [`Exit`] lists the exit codes.

mod admin;
mod config;
mod connect;
mod doctor;
mod exit;
mod journal_files;
mod logging;
mod manual;
#[cfg(feature = "simulate")]
mod policy_tables;
mod process_status;
mod query;
mod relay;
mod replay;
mod report;
mod reset;
mod router_status;
mod serve;
#[cfg(feature = "simulate")]
mod simulate;
#[cfg(feature = "simulate")]
mod simulated_load;
mod status;
mod top;
#[cfg(feature = "simulate")]
mod tune;
#[cfg(feature = "simulate")]
mod what_if;
mod worker;

use std::ffi::OsString;
use std::io::Write as _;
use std::sync::Arc;

use clap::Parser as _;

use self::config::ConfigArgs;
use self::doctor::DoctorArgs;
use self::manual::{CompletionsArgs, ManArgs};
use self::query::QueryArgs;
use self::replay::ReplayArgs;
use self::report::ReportArgs;
use self::reset::ResetArgs;
#[cfg(feature = "simulate")]
use self::simulate::SimulateArgs;
use self::status::StatusArgs;
use self::top::TopArgs;
#[cfg(feature = "simulate")]
use self::tune::TuneArgs;
#[cfg(feature = "simulate")]
use self::what_if::WhatIfArgs;
use self::worker::WorkerArgs;
use crate::demo::args::{DaemonArgs, DemoArgs, EngineArgs, GatewayArgs};
use crate::error::Error;
use crate::{daemon, demo};

pub use connect::ConnectArgs;
pub use exit::{Exit, Failure};
pub use logging::init as init_logging;
pub use relay::RelayArgs;
pub use serve::{Prepared, ServeArgs};

/// Tells an LLM gateway which worker should run a prompt.
#[derive(Debug, clap::Parser)]
#[command(name = "kvrouted", version)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Run the daemon.
    Serve(Box<ServeArgs>),
    /// Ask a running daemon which worker should run a prompt, without booking.
    Query(QueryArgs),
    /// Show what a running daemon knows about every worker.
    Status(StatusArgs),
    /// Show a running daemon and its workers live, in a terminal.
    Top(TopArgs),
    /// Find what is wrong with a running daemon and its fleet, and what to do about it.
    Doctor(DoctorArgs),
    /// Write an archive about a daemon, without secrets and prompts, to pass on to support.
    Report(ReportArgs),
    /// Run a relay beside one engine: publish its events again, hashed, so that no loss goes unnoticed.
    Relay(Box<RelayArgs>),
    /// Give the clients of this host the daemon of another host: a local socket, carried over TLS.
    Connect(Box<ConnectArgs>),
    /// Add, remove, change or list the workers of a running daemon.
    Worker(WorkerArgs),
    /// Check, explain and compare configurations, and print the schema of the file.
    Config(ConfigArgs),
    /// Repeat the recorded decisions of a journal and compare the results.
    Replay(ReplayArgs),
    /// Run the recorded load of a journal on a simulated fleet under another policy, and show what requests would have felt.
    #[cfg(feature = "simulate")]
    WhatIf(Box<WhatIfArgs>),
    /// Search for a policy under which the recorded requests of a journal feel better, and let a running daemon try it.
    #[cfg(feature = "simulate")]
    Tune(Box<TuneArgs>),
    /// Run a trace on a simulated fleet under several policies, and compare what its requests felt.
    #[cfg(feature = "simulate")]
    Simulate(Box<SimulateArgs>),
    /// Make a running daemon forget its workers' blocks.
    Reset(ResetArgs),
    /// Run the whole system on this machine: daemon, simulated engines and a gateway.
    Demo(DemoArgs),
    /// Write the manual pages of all commands.
    Man(ManArgs),
    /// Print the completions of a shell.
    Completions(CompletionsArgs),
    /// Run a simulated engine of the demo.
    #[command(hide = true)]
    DemoEngine(EngineArgs),
    /// Run the gateway of the demo.
    #[command(hide = true)]
    DemoGateway(GatewayArgs),
    /// Run the daemon of the demo.
    #[command(hide = true)]
    DemoDaemon(DaemonArgs),
}

impl Command {
    /// Runs the command to its end.
    ///
    /// # Errors
    /// The reason why it failed, with its exit code.
    pub fn run(&self) -> Result<Exit, Failure> {
        match self {
            Self::Serve(args) => serve(args),
            Self::Relay(args) => relayed(args),
            Self::Connect(args) => connected(args),
            Self::Query(args) => args.run(),
            Self::Status(args) => args.run(),
            Self::Top(args) => args.run(),
            Self::Doctor(args) => args.run(),
            Self::Report(args) => args.run(),
            Self::Worker(args) => args.run(),
            Self::Config(args) => args.run(),
            Self::Replay(args) => args.run(),
            #[cfg(feature = "simulate")]
            Self::WhatIf(args) => args.run(&mut std::io::stdout().lock()),
            #[cfg(feature = "simulate")]
            Self::Tune(args) => args.run(&mut std::io::stdout().lock()),
            #[cfg(feature = "simulate")]
            Self::Simulate(args) => args.run(&mut std::io::stdout().lock()),
            Self::Reset(args) => args.run(),
            Self::Demo(args) => done(demo::run(args)),
            Self::Man(args) => args.run(),
            Self::Completions(args) => args.run(),
            Self::DemoEngine(args) => done(demo::engine::run(args)),
            Self::DemoGateway(args) => done(demo::gateway::run(args)),
            Self::DemoDaemon(args) => Err(demo::run_daemon(args).into()),
        }
    }
}

fn serve(args: &ServeArgs) -> Result<Exit, Failure> {
    let config = match args.prepare()? {
        Prepared::Run(config) => config,
        Prepared::Done(exit) => return Ok(exit),
    };
    init_logging(&config.log);
    serve::log_environment(&config.overrides);
    let args = args.clone();
    let socket = args.take_over.clone();
    let read_again = Arc::new(move || args.read_again());
    done(match socket {
        None => daemon::run(&config, read_again),
        Some(socket) => daemon::take_over(&socket, &config, read_again),
    })
}

fn relayed(args: &RelayArgs) -> Result<Exit, Failure> {
    let (plan, log, overrides) = args.prepare()?;
    init_logging(&log);
    serve::log_environment(&overrides);
    done(crate::relay::run(&plan))
}

fn connected(args: &ConnectArgs) -> Result<Exit, Failure> {
    let (plan, log) = args.prepare()?;
    init_logging(&log);
    done(crate::connect::run(&plan))
}

fn done(outcome: Result<(), Error>) -> Result<Exit, Failure> {
    Ok(outcome.map(|()| Exit::Done)?)
}

/// Reads the command line. Prints help and version on standard output, and mistakes on standard error.
///
/// # Errors
/// The code to exit with.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Cli, Exit> {
    Cli::try_parse_from(args).map_err(|error| {
        let printed = error.print().and_then(|()| std::io::stdout().flush());
        if error.use_stderr() {
            // A closed terminal leaves no way to report the mistake.
            return Exit::Usage;
        }
        conclude(printed.map(|()| Exit::Done).map_err(Failure::from))
    })
}

/// Ends a command: prints why it failed, if it did, and returns its exit code.
pub fn conclude(outcome: Result<Exit, Failure>) -> Exit {
    match outcome {
        Ok(exit) => exit,
        Err(failure) => {
            if !failure.message.is_empty() {
                // If standard error is closed, the exit code still tells.
                let _ = writeln!(std::io::stderr().lock(), "kvrouted: {}", failure.message);
            }
            failure.exit
        }
    }
}
