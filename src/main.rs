//! The kvrouted binary: arguments, then one command, then an exit code.

use std::process::ExitCode;

use kvrouted::cli::{self, Cli, Command, Exit, Failure, Prepared, RelayArgs, ServeArgs};
use kvrouted::error::Error;
use kvrouted::{daemon, demo, relay};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let exit = match cli::parse(std::env::args_os()) {
        Ok(cli) => cli::conclude(dispatch(&cli)),
        Err(exit) => exit,
    };
    exit.into()
}

fn dispatch(cli: &Cli) -> Result<Exit, Failure> {
    match &cli.command {
        Command::Serve(args) => serve(args),
        Command::Relay(args) => relayed(args),
        Command::Query(args) => args.run(),
        Command::Status(args) => args.run(),
        Command::Doctor(args) => args.run(),
        Command::Worker(args) => args.run(),
        Command::Replay(args) => args.run(),
        Command::WhatIf(args) => args.run(),
        Command::Tune(args) => args.run(),
        Command::Reset(args) => args.run(),
        Command::Demo(args) => done(demo::run(args)),
        Command::DemoEngine(args) => done(demo::engine::run(args)),
        Command::DemoGateway(args) => done(demo::gateway::run(args)),
        Command::DemoDaemon(args) => Err(demo::run_daemon(args).into()),
    }
}

fn serve(args: &ServeArgs) -> Result<Exit, Failure> {
    let config = match args.prepare()? {
        Prepared::Run(config) => config,
        Prepared::Done(exit) => return Ok(exit),
    };
    cli::init_logging(&config.log);
    done(daemon::run(&config, &|| args.read_again()))
}

fn relayed(args: &RelayArgs) -> Result<Exit, Failure> {
    let (plan, log) = args.prepare()?;
    cli::init_logging(&log);
    done(relay::run(&plan))
}

fn done(outcome: Result<(), Error>) -> Result<Exit, Failure> {
    Ok(outcome.map(|()| Exit::Done)?)
}
