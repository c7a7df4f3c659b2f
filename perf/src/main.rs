//! kvrouted's index beside the index of its peer: one tape of operations, both sides in turns, equal terms.
//!
//! `trace` or `generator` → `fleet` → `tape` → (`ours` | `peer` | `oracle`) → `measure`, `memory`, `verify` →
//! `compare` → `report`, `chart`. `soak` watches our side alone. What the figures mean is in the README.

mod args;
mod chart;
mod compare;
mod failure;
mod fleet;
mod generator;
mod lru;
mod measure;
mod memory;
mod mix;
mod nodes;
mod oracle;
mod ours;
mod peer;
mod report;
mod script;
mod soak;
mod tape;
mod trace;
mod verify;

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use serde::Serialize;

use crate::args::{Cli, Command, IndexArgs};
use crate::failure::Failure;

/// Both sides allocate from it.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let mut out = std::io::stdout().lock();
    let done = match &cli.command {
        Command::Index(args) => index(args, &mut out),
        Command::Soak(args) => soak::run(args, &mut out).and_then(|soak| print(&mut out, &json(&soak)?)),
        Command::Memory(args) => memory::run(args).and_then(|memory| print(&mut out, &json(&memory)?)),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            let _ = writeln!(std::io::stderr(), "perf: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn index(args: &IndexArgs, out: &mut impl Write) -> Result<(), Failure> {
    let report = compare::run(args)?;
    let (json, table) = (json(&report)?, report.table());
    if let (Some(folder), Some(name)) = (&args.save, &args.name) {
        std::fs::create_dir_all(folder).map_err(Failure::file(folder))?;
        write(&folder.join(format!("{name}.json")), &json)?;
        write(&folder.join(format!("{name}.txt")), &table)?;
    }
    if let Some(file) = &args.chart {
        write(file, &chart::draw(&report))?;
    }
    print(out, if args.json { &json } else { &table })
}

fn json(value: &impl Serialize) -> Result<String, Failure> {
    serde_json::to_string_pretty(value).map_err(|error| Failure::Child(error.to_string()))
}

fn write(file: &Path, text: &str) -> Result<(), Failure> {
    std::fs::write(file, format!("{}\n", text.trim_end())).map_err(Failure::file(file))
}

fn print(out: &mut impl Write, text: &str) -> Result<(), Failure> {
    writeln!(out, "{text}").map_err(Failure::system("print"))
}
