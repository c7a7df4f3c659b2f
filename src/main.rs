//! The kvrouted binary: arguments, then one command, then an exit code.

use std::process::ExitCode;

use kvrouted::cli;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let exit = match cli::parse(std::env::args_os()) {
        Ok(cli) => cli::conclude(cli.command.run()),
        Err(exit) => exit,
    };
    exit.into()
}
