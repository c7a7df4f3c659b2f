//! `kvrouted report`: one archive with the facts that support needs about a daemon that misbehaves.
//!
//! ```text
//! admin socket, metrics port, configuration, journal, /proc ─▶ collect ─▶ parts, without secrets ─▶ archive
//! ```
//!
//! The daemon may be down: a part that cannot be obtained is left out, and the archive says why. No part has prompts or
//! tokens of prompts, and secrets are masked: see [`masking`](crate::masking), [`config::without_secrets`] and `journal`.

mod archive;
mod collect;
mod journal;
mod machine;

use std::io::Write as _;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use self::archive::Contents;
use self::collect::Sources;
use super::admin::DaemonSockets;
use super::exit::{Exit, Failure};
use crate::config::{self, Config, Environment, Flags};
use crate::limits::{REPORT_MINUTES_DEFAULT, REPORT_MINUTES_MAX};

const REPORT_HELP: &str = "\
The archive has no secrets, prompts or tokens of prompts; its README.txt says what each file is and what was left out.
Look through it before you pass it on. It asks the sockets and the metrics port of the daemon, reads files, and changes nothing.
Exit code: 0 also if the daemon does not answer; 71 if the archive cannot be written.";

/// Writes an archive about a daemon, for support: what it says of itself, its configuration, its journal, its machine.
#[derive(Debug, clap::Args)]
#[command(after_help = REPORT_HELP)]
pub struct ReportArgs {
    /// The sockets of the daemon.
    #[command(flatten)]
    pub sockets: DaemonSockets,
    /// The daemon's configuration file, which also names its journal
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The archive, which must not exist [default: kvrouted-report-TIME.tar.gz, TIME in seconds since 1970]
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Minutes of the journal
    #[arg(long, value_name = "N", default_value_t = REPORT_MINUTES_DEFAULT, value_parser = clap::value_parser!(u64).range(1..=REPORT_MINUTES_MAX))]
    pub minutes: u64,
}

impl ReportArgs {
    /// Collects, writes the archive, and prints what is in it.
    ///
    /// # Errors
    /// The archive exists or cannot be written, a closed standard output.
    pub fn run(&self) -> Result<Exit, Failure> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let path = self.output.clone().unwrap_or_else(|| format!("kvrouted-report-{}.tar.gz", now.as_secs()).into());
        // First, so that a path that cannot be written is refused at once.
        let file = archive::create(&path)?;
        let contents = self.collect(now.as_millis() as u64);
        let bytes = archive::write(&file, &path, &contents, now.as_secs())?;
        let mut stdout = std::io::stdout().lock();
        writeln!(stdout, "{}: {bytes} bytes, for its owner only", path.display())?;
        for part in contents.parts() {
            writeln!(stdout, "  {:<40} {:>10} bytes", part.name, part.bytes.len())?;
        }
        for (name, why) in contents.left_out() {
            writeln!(stdout, "  left out: {name}: {why}")?;
        }
        stdout.flush()?;
        Ok(Exit::Done)
    }

    fn collect(&self, now_unix_ms: u64) -> Contents {
        let config: Option<Config> = self
            .config
            .as_deref()
            .and_then(|path| config::load(Some(path), &Environment::of_process(), &Flags::default()).ok());
        let sources = Sources {
            socket: self.sockets.socket(config.as_ref()),
            admin_socket: self.sockets.admin_socket.clone(),
            config_file: self.config.clone(),
            config,
            minutes: self.minutes,
            now_unix_ms,
        };
        sources.collect()
    }
}
