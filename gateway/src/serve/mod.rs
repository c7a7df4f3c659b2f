//! Assembles the gateway: the command line, what all commands share, and what becomes of signals.
//!
//! ```text
//! args.rs        the command line
//! core.rs        engines, daemon, router and tokeniser: what the proxy and the endpoint picker share
//! kubernetes.rs  engines that are pods: they come and go
//! demo.rs        `demo`: simulated engines behind the gateway
//! routed.rs      the proxy's questions, answered by the core
//! picked.rs      the endpoint picker's questions, answered by the core
//! epp.rs         `epp`: listener, endpoints, signals, the end
//! proxy.rs       `serve`: listeners, signals, the end
//! peers.rs       `peers`: the routers behind a service, as a file
//! sandboxed.rs   what is given up before any of it starts
//! ```

mod args;
mod core;
mod demo;
mod epp;
mod kubernetes;
mod peers;
mod picked;
mod proxy;
mod routed;
mod sandboxed;

use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;

pub use args::{Cli, Command, CommonArgs, DemoArgs, EppArgs, KubernetesArgs, PeersArgs, ServeArgs};
pub use core::{Core, CoreOptions};
pub use routed::Routed;

use kvrouted::log_writer::LogWriter;

use crate::config;
use crate::limits::LOCAL_END_MAX;

/// Why a command ends early. The codes are those of `sysexits.h`.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The command line, the configuration or a file that it names cannot be used.
    #[error("{0}")]
    Usage(String),
    /// A system call failed: an address is in use, a socket cannot be made.
    #[error("{0}")]
    System(String),
    /// There is no daemon.
    #[error("{0}")]
    Unavailable(String),
}

impl Failure {
    const fn code(&self) -> u8 {
        match self {
            Self::Usage(_) => 64,
            Self::Unavailable(_) => 69,
            Self::System(_) => 71,
        }
    }
}

/// Runs a command to its end.
#[must_use]
pub fn run(cli: Cli) -> ExitCode {
    let done = match cli.command {
        Some(Command::Serve(args)) => serve(&args),
        Some(Command::Epp(args)) => pick(&args),
        Some(Command::Demo(args)) => demo::run(&args),
        Some(Command::Peers(args)) => peers::run(&args),
        None => serve(&cli.serve),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // Standard error may be closed; there is nobody else to tell.
            let _ = writeln!(std::io::stderr(), "kvrouted-gateway: {failure}");
            failure.code().into()
        }
    }
}

fn serve(args: &ServeArgs) -> Result<(), Failure> {
    if args.example_config {
        return print(config::example());
    }
    let mut config = config::load(args.config.as_deref(), &args.flags())
        .map_err(|problems| Failure::Usage(format!("the configuration cannot be used\n{problems}")))?;
    if args.check {
        let engines = config.engines.len();
        proxy::check(&config)?;
        return print(&format!("ok: {engines} {}\n", if engines == 1 { "engine" } else { "engines" }));
    }
    log_to_stderr(&config.log_level);
    let memory = proxy::divide(&mut config)?;
    let starter = sandboxed::start(&config, None)?;
    to_its_end(runtime()?, proxy::run(config, memory, starter))
}

fn pick(args: &EppArgs) -> Result<(), Failure> {
    let mut config = config::load(args.config.as_deref(), &args.flags())
        .map_err(|problems| Failure::Usage(format!("the configuration cannot be used\n{problems}")))?;
    log_to_stderr(&config.log_level);
    let memory = epp::divide(&mut config, &args.picker)?;
    let starter = sandboxed::start(&config, Some(&args.picker))?;
    to_its_end(runtime()?, epp::run(config, &args.picker, memory, starter))
}

/// Runs a command. A local tokenizer that still works on a prompt then does not hold up the end.
fn to_its_end(
    runtime: tokio::runtime::Runtime,
    command: impl Future<Output = Result<(), Failure>>,
) -> Result<(), Failure> {
    let done = runtime.block_on(command);
    runtime.shutdown_timeout(LOCAL_END_MAX);
    done
}

fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    let printed = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    printed.map_err(|error| Failure::System(format!("standard output cannot be written: {error}")))
}

/// The runtime of all commands.
///
/// # Errors
/// The system starts no more threads.
pub fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    let built = tokio::runtime::Builder::new_multi_thread().enable_all().thread_name("kvrouted-gateway").build();
    built.map_err(|error| Failure::System(format!("threads cannot be started: {error}; raise the limit on processes")))
}

/// Logs to standard error. `RUST_LOG` wins over `level`.
pub fn log_to_stderr(level: &str) {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env();
    let filter = filter.unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(level));
    // A second call, in tests, changes nothing.
    let has_colours = std::io::stderr().is_terminal();
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(has_colours).with_writer(|| LogWriter);
    let _ = log.try_init();
}
