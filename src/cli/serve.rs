//! `kvrouted serve`: makes a configuration of the arguments.

use std::io::Write as _;
use std::path::PathBuf;

use super::exit::{Exit, Failure};
use crate::config::{self, Config, Environment, Flags, Override, Setting};
use crate::daemon::unusable_files;
use crate::error::counted;
use crate::serve::{Admissions, RemoteAccess};

const WORKER_HELP: &str = "\
A worker is a list of fields as in [[worker]] of the file, separated by commas:
  --worker id=1,endpoint=tcp://127.0.0.1:5557,replay=tcp://127.0.0.1:5657
id is required; all other fields are optional, such as dp_rank, topic, name, capacity_blocks, weight and taints=a+b.
For all fields with defaults and descriptions: kvrouted serve --example-config";

/// Runs the daemon with a configuration file, or with flags alone. Flags win over the file.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = WORKER_HELP)]
pub struct ServeArgs {
    /// The configuration file
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Check the configuration and list its problems, without running the daemon
    #[arg(long)]
    pub check: bool,
    /// Print a configuration file with every field, its default and its description
    #[arg(long)]
    pub example_config: bool,
    /// The Unix socket for gateways [default: /run/kvrouted/kvrouted.sock]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<String>,
    /// The Unix socket for administration [default: the socket's path with `.admin` appended]
    #[arg(long, value_name = "PATH")]
    pub admin_socket: Option<String>,
    /// Without a file: the model of the only space
    #[arg(long, value_name = "NAME", conflicts_with = "config")]
    pub model: Option<String>,
    /// Without a file: the namespace of the only space
    #[arg(long, value_name = "NAME", conflicts_with = "config")]
    pub namespace: Option<String>,
    /// Without a file: tokens in a KV block [default: learnt from the first events]
    #[arg(long, value_name = "TOKENS", conflicts_with = "config", allow_negative_numbers = true)]
    pub block_size: Option<String>,
    /// Without a file: whether prompts may carry cache salts, `possible` or `none` [default: possible]
    #[arg(long, value_name = "SALTS", conflicts_with = "config")]
    pub salts: Option<String>,
    /// Without a file: whether a caller can send vLLM `kv_cache_report_mode=full`, `possible` or `none` [default:
    /// possible]
    #[arg(long, value_name = "REPORTS", conflicts_with = "config")]
    pub full_reports: Option<String>,
    /// Without a file: a worker; repeatable
    #[arg(long, value_name = "FIELD=VALUE,...", conflicts_with = "config")]
    pub worker: Vec<String>,
    /// The kernel interface under the connections: auto, uring or epoll [default: auto]
    #[arg(long, value_name = "ENGINE")]
    pub io: Option<String>,
    /// Serving threads; 0 = depends on the machine [default: 0]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub cores: Option<String>,
    /// Pin each serving thread to one processor
    #[arg(long)]
    pub pin: bool,
    /// Serve Prometheus metrics on this port of the loopback interface; 0 = off [default: 0]
    #[arg(long, value_name = "PORT", allow_negative_numbers = true)]
    pub metrics_port: Option<String>,
    /// Serve clients of Dynamo's indexer and selection service on this port of the loopback interface; 0 = off
    /// [default: 0]
    #[arg(long, value_name = "PORT", allow_negative_numbers = true)]
    pub http_port: Option<String>,
    /// How workers are chosen in every space without a mode of its own: latency, kv (as Dynamo does) or another of
    /// docs/policy.md [default: latency]
    #[arg(long, value_name = "MODE")]
    pub mode: Option<String>,
    /// Keep snapshots of the workers in this folder [default: no snapshots]
    #[arg(long, value_name = "PATH")]
    pub snapshot_dir: Option<String>,
    /// Delete existing snapshots and start without them
    #[arg(long)]
    pub fresh: bool,
    /// Take over from the daemon that serves this socket, which then ends: nothing is refused, and bookings go on
    #[arg(long, value_name = "SOCKET", conflicts_with_all = ["fresh", "check", "example_config"])]
    pub take_over: Option<PathBuf>,
    /// Seed of all random draws; 0 = a random seed at the start [default: 0]
    #[arg(long, value_name = "SEED", allow_negative_numbers = true)]
    pub seed: Option<String>,
    /// A file of workers, or a folder of such files, which the daemon watches while it runs
    #[arg(long, value_name = "PATH")]
    pub discovery: Option<String>,
    /// What the daemon gives up once it has started: off, report, on or required [default: off]
    #[arg(long, value_name = "MODE")]
    pub sandbox: Option<String>,
    /// The least severe level logged: off, error, warn, info, debug or trace [default: info]
    #[arg(long, value_name = "LEVEL")]
    pub log_level: Option<String>,
    /// The format of log lines: text or json [default: text]
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<String>,
}

/// What the arguments of `serve` ask for.
#[derive(Debug)]
pub enum Prepared {
    /// Run the daemon with this configuration.
    Run(Box<Config>),
    /// Nothing more: the output is printed.
    Done(Exit),
}

/// Checks what a start would read besides the configuration, and says what the configuration has: also what the environment
/// sets in it.
///
/// # Errors
/// Users, files of the remote port or files of workers cannot be used; standard output is closed.
pub(super) fn check(config: &Config, stdout: &mut dyn std::io::Write) -> Result<Exit, Failure> {
    Admissions::resolve(config)?;
    RemoteAccess::read(&config.remote)?;
    let unusable = unusable_files(config);
    if !unusable.is_empty() {
        let message = format!("files of workers cannot be used\n{}", unusable.join("\n"));
        return Err(Failure::new(Exit::Usage, message));
    }
    let (spaces, workers) = (counted(config.spaces.len(), "space"), counted(config.workers.len(), "worker"));
    let engines = match config.servers.len() {
        0 => String::new(),
        engines => format!(", {} named by url", counted(engines, "engine")),
    };
    writeln!(stdout, "ok: {spaces}, {workers}{engines}")?;
    for Override { source, table, field, text } in config.overrides.iter().filter(|set| set.is_variable()) {
        writeln!(stdout, "{source} sets {table}.{field} to {text:?}")?;
    }
    stdout.flush()?;
    Ok(Exit::Done)
}

/// Logs what the environment sets in a configuration.
pub(super) fn log_environment(overrides: &[Override]) {
    for Override { source, table, field, text } in overrides.iter().filter(|set| set.is_variable()) {
        tracing::info!(variable = source, field = format!("{table}.{field}"), value = text, "set by the environment");
    }
}

impl ServeArgs {
    /// Makes the configuration, or prints what was asked for instead of running.
    ///
    /// # Errors
    /// Every problem of file and flags, with its exit code. Nothing has been bound yet.
    pub fn prepare(&self) -> Result<Prepared, Failure> {
        let mut stdout = std::io::stdout().lock();
        if self.example_config {
            stdout.write_all(config::example().as_bytes())?;
            stdout.flush()?;
            return Ok(Prepared::Done(Exit::Done));
        }
        let mut config = self
            .read_again()
            .map_err(|problems| Failure::new(Exit::Usage, format!("the configuration cannot be used\n{problems}")))?;
        config.snapshot.fresh = self.fresh;
        config.sandbox.file.clone_from(&self.config);
        if self.check {
            return Ok(Prepared::Done(check(&config, &mut stdout)?));
        }
        Ok(Prepared::Run(Box::new(config)))
    }

    /// Reads the configuration again: the file, the environment and the flags.
    ///
    /// # Errors
    /// Every problem of file, environment and flags.
    pub fn read_again(&self) -> Result<Config, config::Problems> {
        config::load(self.config.as_deref(), &Environment::of_process(), &self.flags())
    }

    /// The configuration fields that the flags set.
    #[must_use]
    pub fn flags(&self) -> Flags {
        let pin = self.pin.then(|| "true".to_owned());
        let settings = [
            ("--socket", "serve", "socket", &self.socket),
            ("--admin-socket", "serve", "admin_socket", &self.admin_socket),
            ("--io", "serve", "io", &self.io),
            ("--cores", "serve", "cores", &self.cores),
            ("--pin", "serve", "pin", &pin),
            ("--metrics-port", "metrics", "port", &self.metrics_port),
            ("--http-port", "http", "port", &self.http_port),
            ("--snapshot-dir", "snapshot", "dir", &self.snapshot_dir),
            ("--mode", "policy", "mode", &self.mode),
            ("--seed", "policy", "seed", &self.seed),
            ("--sandbox", "sandbox", "mode", &self.sandbox),
            ("--log-level", "log", "level", &self.log_level),
            ("--log-format", "log", "format", &self.log_format),
            ("--discovery", "discovery", "path", &self.discovery),
            ("--model", "space", "model", &self.model),
            ("--namespace", "space", "namespace", &self.namespace),
            ("--block-size", "space", "block_size", &self.block_size),
            ("--salts", "space", "salts", &self.salts),
            ("--full-reports", "space", "full_reports", &self.full_reports),
        ];
        let setting = |(flag, section, field, text): (_, _, _, &Option<String>)| {
            Some(Setting { flag, section, field, text: text.clone()? })
        };
        Flags { settings: settings.into_iter().filter_map(setting).collect(), workers: self.worker.clone() }
    }
}
