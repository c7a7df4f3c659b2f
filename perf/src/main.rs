//! kvrouted beside its peer: the indexes on one tape of operations, ingest over ZeroMQ, and decisions; both sides in
//! turns, equal terms.
//!
//! `trace` or `generator` → `fleet` → `tape` → (`ours` | `peer` | `oracle`) → `measure`, `memory`, `verify` →
//! `compare` → `report`, `chart`. `soak` watches our side alone. `ingest` feeds both sides over sockets.
//! `decide` times decisions on both sides, `parity` compares them. `cores` measures ours on several threads. `gateway`
//! measures proxies over HTTP. `large_fleet` runs daemons on thousands of ranks, `faults` several routers in a network
//! that fails. What the figures mean is in the README.

mod args;
mod chart;
mod compare;
mod cores;
mod decide;
mod failure;
mod faults;
mod fleet;
mod gateway;
mod generator;
mod ingest;
mod large_fleet;
mod lru;
mod measure;
mod memory;
mod mix;
mod nodes;
mod oracle;
mod ours;
mod parity;
mod peer;
mod report;
mod script;
mod soak;
mod socket;
mod table;
mod tape;
mod trace;
mod verify;

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use serde::Serialize;

use crate::args::{
    Cli, Command, CoresArgs, DecideArgs, FaultsArgs, FleetArgs, GatewayArgs, IndexArgs, IngestArgs, LaneArgs,
    OutputArgs, ParityArgs, SocketArgs,
};
use crate::failure::Failure;

/// Both sides allocate from it.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let mut out = std::io::stdout().lock();
    let done = match &cli.command {
        Command::Index(args) => index(args, &mut out),
        Command::Ingest(args) => ingest_over_sockets(args, &mut out),
        Command::Decide(args) => time_decisions(args, &mut out),
        Command::Cores(args) => scale_in_process(args, &mut out),
        Command::Parity(args) => compare_decisions(args, &mut out),
        Command::IngestSend(args) => {
            // The child speaks for itself.
            drop(out);
            return ended(ingest::serve(args));
        }
        Command::Socket(args) => ask_over_sockets(args, &mut out),
        Command::Lane(args) => ask_by_lane(args, &mut out),
        Command::Gateway(args) => ask_through_proxies(args, &mut out),
        Command::Fleet(args) => run_large_fleet(args, &mut out),
        Command::Faults(args) => run_under_faults(args, &mut out),
        Command::FleetEngines(args) => {
            // The child speaks for itself.
            drop(out);
            return ended(large_fleet::serve_engines(args));
        }
        Command::GatewayUpstream(args) => return ended(gateway::serve(args)),
        Command::SocketServe(args) => return ended(socket::serve(args)),
        Command::SocketAsk(args) => {
            // The child speaks for itself.
            drop(out);
            return ended(socket::ask(args));
        }
        Command::Soak(args) => soak::run(args, &mut out).and_then(|soak| print(&mut out, &json(&soak)?)),
        Command::Memory(args) => memory::run(args).and_then(|memory| print(&mut out, &json(&memory)?)),
    };
    ended(done)
}

fn ended(done: Result<(), Failure>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            let _ = writeln!(std::io::stderr(), "perf: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn ingest_over_sockets(args: &IngestArgs, out: &mut impl Write) -> Result<(), Failure> {
    let report = ingest::run(args)?;
    let (json, table) = (json(&report)?, report.table());
    show(&args.output, out, (&json, &table))
}

fn time_decisions(args: &DecideArgs, out: &mut impl Write) -> Result<(), Failure> {
    let report = decide::run(args)?;
    let (json, table) = (json(&report)?, report.table());
    show(&args.output, out, (&json, &table))
}

fn scale_in_process(args: &CoresArgs, out: &mut impl Write) -> Result<(), Failure> {
    let report = cores::run(args)?;
    let (json, text) = (json(&report)?, report.text());
    show(&args.output, out, (&json, &text))
}

fn ask_over_sockets(args: &SocketArgs, out: &mut impl Write) -> Result<(), Failure> {
    let (json, table) = if args.cores.is_empty() {
        let report = socket::run(args)?;
        (json(&report)?, report.table())
    } else {
        let curve = socket::scale(args)?;
        (json(&curve)?, curve.table())
    };
    show(&args.output, out, (&json, &table))
}

fn ask_by_lane(args: &LaneArgs, out: &mut impl Write) -> Result<(), Failure> {
    let report = socket::run_lane(args)?;
    print(out, &if args.json { json(&report)? } else { report.table() })
}

fn ask_through_proxies(args: &GatewayArgs, out: &mut impl Write) -> Result<(), Failure> {
    let report = gateway::run(args)?;
    let (json, table) = (json(&report)?, report.table());
    show(&args.output, out, (&json, &table))
}

fn run_large_fleet(args: &FleetArgs, out: &mut impl Write) -> Result<(), Failure> {
    let report = large_fleet::run(args)?;
    let (json, table) = (json(&report)?, report.table());
    show(&args.output, out, (&json, &table))
}

fn run_under_faults(args: &FaultsArgs, out: &mut impl Write) -> Result<(), Failure> {
    let report = faults::run(args)?;
    let (json, text) = (json(&report)?, report.text());
    show(&args.output, out, (&json, &text))?;
    report.verdict()
}

fn compare_decisions(args: &ParityArgs, out: &mut impl Write) -> Result<(), Failure> {
    let report = parity::run(args)?;
    let text = if args.json { json(&report)? } else { report.text() };
    print(out, &text)?;
    match report.compared.different {
        0 => Ok(()),
        different => Err(Failure::Contract(format!("{different} cases are decided differently"))),
    }
}

fn index(args: &IndexArgs, out: &mut impl Write) -> Result<(), Failure> {
    let report = compare::run(args)?;
    let (json, table) = (json(&report)?, report.table());
    if let Some(file) = &args.chart {
        write(file, &chart::draw(&report))?;
    }
    show(&args.output, out, (&json, &table))
}

/// Prints a report, and saves it if that is asked for.
fn show(output: &OutputArgs, out: &mut impl Write, (json, text): (&str, &str)) -> Result<(), Failure> {
    if let (Some(folder), Some(name)) = (&output.save, &output.name) {
        std::fs::create_dir_all(folder).map_err(Failure::file(folder))?;
        write(&folder.join(format!("{name}.json")), json)?;
        write(&folder.join(format!("{name}.txt")), text)?;
    }
    print(out, if output.json { json } else { text })
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
