//! `kvrouted doctor`: what is wrong with a running daemon and its fleet, the worst first, and what to do.

mod outside;
mod report;

use std::io::Write as _;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use super::exit::{Exit, Failure};
use super::remote;
use crate::config::{self, Config, Flags, socket_default};
use crate::finding::{Finding, Harm, Symptom};

const DOCTOR_HELP: &str = "\
Exit codes: 0 nothing is wrong (notes apart), 1 something is: a finding of level warning or severe, which includes a
daemon that does not answer. Every finding: schemas/README.md, \"Trust reasons\" and \"Findings\".";

/// Says what is wrong with a running daemon and its fleet, and what to do about it.
#[derive(Debug, clap::Args)]
#[command(after_help = DOCTOR_HELP)]
pub struct DoctorArgs {
    /// The daemon's Unix socket [default: that of --config, else the daemon's default]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// The daemon's administration socket [default: the one its socket names]
    #[arg(long, value_name = "PATH")]
    pub admin_socket: Option<PathBuf>,
    /// Check this configuration file too, and whether the daemon runs on it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

impl DoctorArgs {
    /// Looks and prints. [`Exit::Refused`] = something is wrong.
    ///
    /// # Errors
    /// A closed standard output.
    pub fn run(&self) -> Result<Exit, Failure> {
        let mut findings = self.examine();
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.harm));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let text = if self.json {
            report::json(&findings).map_err(|error| Failure::new(Exit::Internal, error.to_string()))?
        } else {
            report::text(&findings, now.as_millis() as u64)
        };
        let mut stdout = std::io::stdout().lock();
        writeln!(stdout, "{text}")?;
        stdout.flush()?;
        let is_well = findings.iter().all(|finding| finding.harm == Harm::Note);
        Ok(if is_well { Exit::Done } else { Exit::Refused })
    }

    fn examine(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        let config = self.config.as_deref().and_then(|path| match config::load(Some(path), &Flags::default()) {
            Ok(config) => Some(config),
            Err(problems) => {
                findings.push(Finding { what: problems.to_string(), ..Symptom::ConfigInvalid.finding() });
                None
            }
        });
        findings.extend(config.as_ref().and_then(|config| outside::open_files(config, outside::open_files_max())));
        findings.extend(self.ask(config.as_ref()));
        findings
    }

    /// What shows at the daemon's sockets and what it says itself.
    fn ask(&self, config: Option<&Config>) -> Vec<Finding> {
        let told = self.socket.clone().or_else(|| config.map(|config| config.serve.socket.clone()));
        let socket = told.unwrap_or_else(socket_default);
        let mut findings: Vec<Finding> = outside::socket(&socket).into_iter().collect();
        if findings.iter().any(|finding| finding.harm == Harm::Severe) {
            return findings;
        }
        let (spaces, page) = match remote::examination(self.admin_socket.as_ref().unwrap_or(&socket)) {
            Ok(answers) => answers,
            Err(failure) => {
                findings.push(Finding { what: failure.message, ..Symptom::AdminUnreachable.finding() });
                return findings;
            }
        };
        findings.extend(outside::version(&page.daemon_version, env!("CARGO_PKG_VERSION")));
        findings.extend(outside::metrics(page.metrics_port, outside::scrape));
        findings.extend(config.and_then(|config| outside::differs(config, &spaces, &page)));
        findings.extend(page.findings);
        findings
    }
}
