//! Collects the files of the archive: the daemon's answers, its configuration, its journal and facts about its machine.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::super::admin::{self, DaemonSockets};
use super::super::doctor::{self, DoctorArgs};
use super::super::{router_status, status, worker};
use super::archive::Contents;
use super::{journal, machine};
use crate::config::{self, Config, Unshowable};
use crate::finding::{Finding, Symptom};
use crate::limits::{REPORT_CONFIG_BYTES_MAX, REPORT_FILE_BYTES_MAX};
use crate::masking::{MASK, masked};
use crate::wire::StatusPage;

const STATUS: &str = "status.json";
const METRICS: &str = "metrics.txt";
const CONFIG: &str = "kvrouted.toml";
const JOURNAL: &str = "journal/";
/// The last line of a whole metrics page.
const PAGE_END: &str = "# EOF\n";

/// Where the contents of the archive come from.
pub(super) struct Sources {
    pub(super) socket: PathBuf,
    pub(super) admin_socket: Option<PathBuf>,
    pub(super) config_file: Option<PathBuf>,
    /// The configuration in that file, if it is valid.
    pub(super) config: Option<Config>,
    pub(super) minutes: u64,
    pub(super) now_unix_ms: u64,
}

impl Sources {
    /// Collects every file that can be obtained, and notes the others as left out.
    pub(super) fn collect(&self) -> Contents {
        let mut contents = Contents::default();
        let (page, admin_socket) = self.ask(&mut contents);
        contents.add("version.json", "releases of this command and of the daemon.", version(page.as_ref()).to_string());
        self.findings(&mut contents);
        self.metrics(page.as_ref(), &mut contents);
        self.configuration(&mut contents);
        self.journal(&mut contents);
        machine::add(&mut contents, admin_socket.as_deref());
        contents
    }

    /// Asks the admin socket. Returns the status and the path of that socket.
    fn ask(&self, contents: &mut Contents) -> (Option<StatusPage>, Option<PathBuf>) {
        let asked = admin::connect(self.admin_socket.as_ref().unwrap_or(&self.socket)).and_then(|mut client| {
            let admin_socket = client.hello().admin_socket.clone();
            Ok((client.status_all()?, admin_socket))
        });
        let (page, admin_socket) = match asked {
            Ok(answers) => answers,
            Err(failure) => {
                let why = format!("the daemon does not answer: {}", masked(&failure.message));
                for name in [STATUS, "workers.json", "routers.json"] {
                    contents.leave_out(name, why.as_str());
                }
                return (None, self.admin_socket.clone());
            }
        };
        match status::json(&page).and_then(|text| serde_json::from_str::<Value>(&text)) {
            Ok(value) => {
                contents.add(STATUS, "what kvrouted status --json prints.", without_secrets(value).to_string())
            }
            Err(error) => contents.leave_out(STATUS, error.to_string()),
        }
        let workers = without_secrets(worker::listed(&page)).to_string();
        contents.add("workers.json", "what kvrouted worker list --json prints.", workers);
        match router_status::json(&page) {
            rows if rows.is_empty() => {
                contents.leave_out("routers.json", "the daemon shares no load with other routers")
            }
            rows => {
                let rows = without_secrets(rows.into()).to_string();
                contents.add("routers.json", "this router and the others, as in kvrouted status.", rows);
            }
        }
        (Some(page), self.admin_socket.clone().or(admin_socket))
    }

    fn findings(&self, contents: &mut Contents) {
        let doctor = DoctorArgs {
            sockets: DaemonSockets { socket: Some(self.socket.clone()), admin_socket: self.admin_socket.clone() },
            config: self.config_file.clone(),
            gateway: None,
            json: false,
        };
        let findings: Vec<Finding> = doctor.examine().into_iter().map(finding_without_secrets).collect();
        let text = doctor::report_text(&findings, self.now_unix_ms) + "\n";
        contents.add("doctor.txt", "what kvrouted doctor finds, of the daemon and from outside.", text);
    }

    fn metrics(&self, page: Option<&StatusPage>, contents: &mut Contents) {
        let config = self.config.as_ref();
        let address = match page {
            Some(page) => doctor::metrics_address(page, config),
            None => config.and_then(|config| config.metrics.address()),
        };
        let Some(address) = address else {
            return contents.leave_out(METRICS, "neither the daemon nor a configuration names a metrics port");
        };
        let answer = match doctor::get(address, "/metrics", REPORT_FILE_BYTES_MAX as u64) {
            Ok(answer) => answer,
            Err(error) => return contents.leave_out(METRICS, format!("{address} does not answer: {error}")),
        };
        let Some((_, page)) = answer.split_once("\r\n\r\n").filter(|(head, _)| head.contains(" 200 ")) else {
            return contents.leave_out(METRICS, format!("{address} answers with something else than a page"));
        };
        if !page.ends_with(PAGE_END) {
            contents
                .leave_out("the end of metrics.txt", "the page is longer than a file of the archive, or was cut off");
        }
        let text: String = page.lines().map(|line| masked(line) + "\n").collect();
        contents.add(METRICS, "the metrics page.", text);
    }

    fn configuration(&self, contents: &mut Contents) {
        let Some(path) = &self.config_file else {
            return contents.leave_out(CONFIG, "--config names no file");
        };
        let text = match read_config(path) {
            Ok(text) => text,
            Err(why) => return contents.leave_out(CONFIG, format!("{}: {why}", path.display())),
        };
        match config::without_secrets(&text) {
            Ok(shown) => {
                let about = format!(
                    "{}: its known fields without comments; {} values are masked, which are secrets, look like them, or are refused.",
                    path.display(),
                    shown.masked
                );
                contents.add(CONFIG, &about, shown.text);
            }
            Err(Unshowable::Syntax(line)) => {
                let why = format!(
                    "{} has a syntax error in line {line}, so no part can be told from a secret",
                    path.display()
                );
                contents.leave_out(CONFIG, why);
            }
            Err(Unshowable::TooManyProblems) => {
                contents.leave_out(CONFIG, format!("{} has more problems than a check lists", path.display()));
            }
        }
        contents.leave_out(
            "files that the configuration names",
            "secrets, keys, tokens and files of workers are never read",
        );
    }

    fn journal(&self, contents: &mut Contents) {
        let dir = match (&self.config_file, &self.config) {
            (None, _) => Err("--config names no file, which would name the folder"),
            (_, None) => Err("the configuration is not valid, which would name the folder"),
            (_, Some(config)) => {
                config.journal.dir.as_deref().ok_or("[journal] dir is not set: the daemon writes none")
            }
        };
        match dir {
            Ok(dir) => journal::add(contents, dir, self.minutes, self.now_unix_ms),
            Err(why) => contents.leave_out(JOURNAL, why),
        }
    }
}

fn read_config(path: &Path) -> Result<String, String> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(REPORT_CONFIG_BYTES_MAX + 1).read_to_end(&mut bytes));
    read.map_err(|error| format!("it cannot be read: {error}"))?;
    if bytes.len() as u64 > REPORT_CONFIG_BYTES_MAX {
        return Err(format!("it has more than {REPORT_CONFIG_BYTES_MAX} bytes"));
    }
    String::from_utf8(bytes).map_err(|_| "it is not UTF-8".to_owned())
}

fn version(page: Option<&StatusPage>) -> Value {
    let daemon = page.map(|page| {
        json!({
            "version": page.daemon_version,
            "instance": router_status::router_number(page.instance_id),
            "uptime_ms": page.uptime_ms,
            "fleet_version": page.fleet_version,
        })
    });
    let features: Vec<&str> = [("nats", cfg!(feature = "nats")), ("simulate", cfg!(feature = "simulate"))]
        .into_iter()
        .filter_map(|(name, is_on)| is_on.then_some(name))
        .collect();
    json!({
        "command": {
            "version": env!("CARGO_PKG_VERSION"),
            "features": features,
            "build": if cfg!(debug_assertions) { "debug" } else { "release" },
            "processor": std::env::consts::ARCH,
        },
        "daemon": daemon,
    })
}

/// The same value with every text masked. The problem of a source of workers also loses its quotations, which may be from a
/// file.
fn without_secrets(value: Value) -> Value {
    match value {
        Value::String(text) => masked(&text).into(),
        Value::Array(items) => items.into_iter().map(without_secrets).collect(),
        Value::Object(fields) => {
            let shown = |(name, value): (String, Value)| match value {
                Value::String(text) if name == "problem" => (name, masked(&unquoted(&text)).into()),
                value => (name, without_secrets(value)),
            };
            fields.into_iter().map(shown).collect()
        }
        other => other,
    }
}

/// Findings whose text may quote the contents of a file.
const QUOTING: [Symptom; 2] = [Symptom::ConfigInvalid, Symptom::SourceUnusable];

fn finding_without_secrets(finding: Finding) -> Finding {
    let quotes = QUOTING.iter().any(|symptom| symptom.finding().name == finding.name);
    let what = if quotes { unquoted(&finding.what) } else { finding.what.clone() };
    let shown = |text: &str| text.lines().map(masked).collect::<Vec<_>>().join("\n");
    Finding { what: shown(&what), why: shown(&finding.why), remedy: shown(&finding.remedy), ..finding }
}

/// The text with the part of each line from its first backtick or quotation mark to its last masked: a quoted value may
/// contain such marks itself.
fn unquoted(text: &str) -> String {
    let mark = |c: char| matches!(c, '`' | '"');
    let line = |line: &str| match (line.find(mark), line.rfind(mark)) {
        (Some(first), Some(last)) => format!("{}{MASK}{}", &line[..first], &line[last + 1..]),
        _ => line.to_owned(),
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_the_daemon_are_masked_at_any_depth() {
        let value =
            json!({"sources": [{"name": "http://u:p@h", "problem": "`hunter2` is \"no\" endpoint"}], "blocks": 3});
        let shown = without_secrets(value);
        assert_eq!(
            shown,
            json!({"sources": [{"name": "http://(masked)@h", "problem": "(masked) endpoint"}], "blocks": 3})
        );
    }

    #[test]
    fn a_finding_about_a_file_quotes_nothing_of_it() {
        let what = "kvrouted.toml:3: serve.io: `hun`ter2` is none of auto, uring".to_owned();
        let shown = finding_without_secrets(Finding { what, ..Symptom::ConfigInvalid.finding() });
        assert_eq!(shown.what, "kvrouted.toml:3: serve.io: (masked) is none of auto, uring");
    }
}
