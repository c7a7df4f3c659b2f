//! The kvrouted-gateway binary: arguments, then one command, then an exit code.

use std::process::ExitCode;

use clap::Parser as _;
use kvrouted_gateway::serve::{Cli, run};

fn main() -> ExitCode {
    run(Cli::parse())
}
