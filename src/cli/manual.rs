//! `kvrouted man` and `kvrouted completions`: what packages install beside the program, made from the arguments themselves.

use std::fs;
use std::io::Write as _;
use std::path::PathBuf;

use clap::CommandFactory as _;
use clap_complete::Shell;

use super::Cli;
use super::exit::{Exit, Failure};

/// Writes a page for each command: kvrouted.1, kvrouted-serve.1 and so on.
#[derive(Debug, clap::Args)]
pub struct ManArgs {
    /// The folder, which is made if it is not there
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
}

impl ManArgs {
    /// Writes the pages.
    ///
    /// # Errors
    /// The folder or a file cannot be written.
    pub fn run(&self) -> Result<Exit, Failure> {
        let failed = |error: std::io::Error| {
            Failure::new(Exit::System, format!("{} cannot be written: {error}", self.dir.display()))
        };
        fs::create_dir_all(&self.dir).map_err(failed)?;
        clap_mangen::generate_to(Cli::command(), &self.dir).map_err(failed)?;
        Ok(Exit::Done)
    }
}

/// Prints what a shell needs to complete the arguments.
#[derive(Debug, clap::Args)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_enum, value_name = "SHELL")]
    pub shell: Shell,
}

impl CompletionsArgs {
    /// Prints the completions.
    ///
    /// # Errors
    /// A closed standard output.
    pub fn run(&self) -> Result<Exit, Failure> {
        // A closed pipe must not be a panic, so they are made first.
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "kvrouted", &mut script);
        let mut stdout = std::io::stdout().lock();
        stdout.write_all(&script)?;
        stdout.flush()?;
        Ok(Exit::Done)
    }
}
