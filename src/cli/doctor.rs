//! `kvrouted doctor`: what is wrong with a running daemon and its fleet, worst first, and what to do.
//!
//! The daemon's own findings, and what shows from outside: socket, metrics port, release and configuration file.

use std::collections::BTreeSet;
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::process::{Resource, getrlimit};
use serde::{Deserialize, Serialize};

use super::admin::{self, DaemonSockets};
use super::exit::{Exit, Failure};
use crate::config::{self, Config, Environment, Flags};
use crate::error::counted;
use crate::finding::{Finding, Harm, Symptom};
use crate::ids::Worker;
use crate::ingest::descriptors::{self, Takers};
use crate::limits;
use crate::wire::{SpaceInfo, StatusPage};

const DOCTOR_HELP: &str = "\
Exit codes: 0 if nothing is wrong except notes; 1 with a finding of harm warning or severe, also if the daemon does not
answer. For all findings see schemas/README.md, \"Trust reasons\" and \"Findings\".";

/// Prints what is wrong with a running daemon and its fleet, and what to do about it.
#[derive(Debug, clap::Args)]
#[command(after_help = DOCTOR_HELP)]
pub struct DoctorArgs {
    /// The sockets of the daemon.
    #[command(flatten)]
    pub sockets: DaemonSockets,
    /// Also check this configuration file, and whether the daemon runs with it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Also ask this kvrouted-gateway for its findings: the IP:PORT of its [admin] address
    #[arg(long, value_name = "ADDRESS")]
    pub gateway: Option<SocketAddr>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

impl DoctorArgs {
    /// Collects findings and prints them. [`Exit::Refused`] = something is wrong.
    ///
    /// # Errors
    /// A closed standard output.
    pub fn run(&self) -> Result<Exit, Failure> {
        let mut findings = self.examine();
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.harm));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let text = if self.json {
            report_json(&findings).map_err(|error| Failure::new(Exit::Internal, error.to_string()))?
        } else {
            report_text(&findings, now.as_millis() as u64)
        };
        let mut stdout = std::io::stdout().lock();
        writeln!(stdout, "{text}")?;
        stdout.flush()?;
        let is_well = findings.iter().all(|finding| finding.harm == Harm::Note);
        Ok(if is_well { Exit::Done } else { Exit::Refused })
    }

    /// All findings: the command's own, and those of the daemon and the gateway.
    pub(super) fn examine(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        let config = self.config.as_deref().and_then(|path| {
            match config::load(Some(path), &Environment::of_process(), &Flags::default()) {
                Ok(config) => Some(config),
                Err(problems) => {
                    findings.push(Finding { what: problems.to_string(), ..Symptom::ConfigInvalid.finding() });
                    None
                }
            }
        });
        findings.extend(config.as_ref().and_then(|config| check_open_files(config, open_files_max())));
        findings.extend(self.ask(config.as_ref()));
        findings.extend(self.gateway.map_or_else(Vec::new, |gateway| of_gateway(gateway, get)));
        findings
    }

    /// The findings at the daemon's sockets, and its own.
    fn ask(&self, config: Option<&Config>) -> Vec<Finding> {
        let socket = self.sockets.socket(config);
        let mut findings: Vec<Finding> = check_socket(&socket).into_iter().collect();
        if findings.iter().any(|finding| finding.harm == Harm::Severe) {
            return findings;
        }
        let (spaces, page) = match admin::examination(self.sockets.admin_socket.as_ref().unwrap_or(&socket)) {
            Ok(answers) => answers,
            Err(failure) => {
                findings.push(Finding { what: failure.message, ..Symptom::AdminUnreachable.finding() });
                return findings;
            }
        };
        findings.extend(check_version(&page.daemon_version, env!("CARGO_PKG_VERSION")));
        findings.extend(check_metrics(metrics_address(&page, config), scrape));
        findings.extend(config.and_then(|config| check_config(config, &spaces, &page)));
        findings.extend(page.findings);
        findings
    }
}

/// Longest time to read the metrics page or a gateway's findings, seconds.
const SCRAPE_S_MAX: u64 = 10;
/// Bytes of the metrics page that are read.
const SCRAPE_BYTES_MAX: u64 = 64 << 10;
/// Bytes of a gateway's findings that are read.
const GATEWAY_FINDINGS_BYTES_MAX: u64 = 1 << 20;
/// Permission of all other users to write, and so to connect.
const OTHERS_WRITE: u32 = 0o002;

fn finding_of(symptom: Symptom, what: String) -> Finding {
    Finding { what, ..symptom.finding() }
}

/// Checks the routing socket: its file, a connection, its mode.
fn check_socket(path: &Path) -> Option<Finding> {
    let shown = path.display();
    let metadata = match std::fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) => return Some(unusable(path, &error)),
    };
    if !metadata.file_type().is_socket() {
        return Some(finding_of(Symptom::SocketUnreachable, format!("{shown} is not a socket.")));
    }
    if let Err(error) = UnixStream::connect(path) {
        return Some(unusable(path, &error));
    }
    let mode = metadata.permissions().mode();
    let is_open = mode & OTHERS_WRITE != 0;
    is_open.then(|| {
        finding_of(Symptom::SocketOpen, format!("Every user of the host may use {shown} (mode {:o}).", mode & 0o777))
    })
}

fn unusable(path: &Path, error: &io::Error) -> Finding {
    let shown = path.display();
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            finding_of(Symptom::SocketDenied, format!("{shown} may not be used: {error}."))
        }
        io::ErrorKind::ConnectionRefused => finding_of(
            Symptom::SocketUnreachable,
            format!("No daemon listens on {shown}: one that ended left the file."),
        ),
        _ => finding_of(Symptom::SocketUnreachable, format!("{shown}: {error}.")),
    }
}

/// Compares the releases of daemon and command. A daemon without a version is older.
fn check_version(daemon: &str, own: &str) -> Option<Finding> {
    let daemon = if daemon.is_empty() { "an older release" } else { daemon };
    (daemon != own).then(|| finding_of(Symptom::VersionDiffers, format!("The daemon is {daemon}, this command {own}.")))
}

/// Where the daemon serves its metrics: the port that it names is at 127.0.0.1, another address is in its configuration.
pub(super) fn metrics_address(page: &StatusPage, config: Option<&Config>) -> Option<SocketAddr> {
    match page.metrics_port {
        0 => config.and_then(|config| config.metrics.address()),
        port => Some(SocketAddr::from((Ipv4Addr::LOCALHOST, port))),
    }
}

/// Checks that the address serves the daemon's metrics; `None` = there is no metrics port.
fn check_metrics(address: Option<SocketAddr>, scrape: impl Fn(SocketAddr) -> io::Result<String>) -> Option<Finding> {
    let address = address?;
    match scrape(address) {
        Ok(page) if page.contains("kvrouted_") => None,
        Ok(_) => Some(finding_of(Symptom::MetricsUnreachable, format!("Something else answers on {address}."))),
        Err(error) => Some(finding_of(Symptom::MetricsUnreachable, format!("{address} does not answer: {error}."))),
    }
}

/// Reads the beginning of the metrics page.
fn scrape(address: SocketAddr) -> io::Result<String> {
    get(address, "/metrics", SCRAPE_BYTES_MAX)
}

/// Reads the first bytes of a page: headers and body.
pub(super) fn get(address: SocketAddr, path: &str, bytes_max: u64) -> io::Result<String> {
    get_by(address, path, bytes_max, Instant::now() + Duration::from_secs(SCRAPE_S_MAX))
}

/// As [`get`], until a deadline: a peer that sends a byte now and then would never let a read time out.
fn get_by(address: SocketAddr, path: &str, bytes_max: u64, deadline: Instant) -> io::Result<String> {
    // A timeout of 0 would be none.
    let left = || match deadline.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(io::Error::from(io::ErrorKind::TimedOut)),
        left => Ok(left),
    };
    let mut stream = TcpStream::connect_timeout(&address, left()?)?;
    stream.set_write_timeout(Some(left()?))?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes())?;
    let (mut page, mut piece) = (Vec::new(), [0; 64 << 10]);
    while (page.len() as u64) < bytes_max {
        stream.set_read_timeout(Some(left()?))?;
        match stream.read(&mut piece) {
            Ok(0) => break,
            Ok(bytes) => page.extend_from_slice(&piece[..bytes]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    page.truncate(usize::try_from(bytes_max).unwrap_or(usize::MAX));
    Ok(String::from_utf8_lossy(&page).into_owned())
}

/// A gateway's answer to /findings.
#[derive(Deserialize)]
struct GatewayFindings {
    findings: Vec<GatewayFinding>,
}

#[derive(Deserialize)]
struct GatewayFinding {
    what: String,
    #[serde(default)]
    remedy: String,
}

/// The findings of a gateway, or why they cannot be read.
fn of_gateway(address: SocketAddr, get: impl Fn(SocketAddr, &str, u64) -> io::Result<String>) -> Vec<Finding> {
    let unreachable = |why: String| vec![finding_of(Symptom::GatewayUnreachable, format!("{address} {why}."))];
    let page = match get(address, "/findings", GATEWAY_FINDINGS_BYTES_MAX) {
        Ok(page) => page,
        Err(error) => return unreachable(format!("does not answer: {error}")),
    };
    let body = page.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    let Ok(GatewayFindings { findings }) = serde_json::from_str(body) else {
        return unreachable("is not the admin port of a gateway".into());
    };
    let finding = |GatewayFinding { what, remedy }| {
        let known = finding_of(Symptom::GatewayFinding, what);
        if remedy.is_empty() { known } else { Finding { remedy, ..known } }
    };
    findings.into_iter().map(finding).collect()
}

/// Compares the daemon with a configuration file. Workers that the file does not name are no difference: a request may
/// have added them.
fn check_config(config: &Config, spaces: &[SpaceInfo], page: &StatusPage) -> Option<Finding> {
    let mut differences = Vec::new();
    for space in &config.spaces {
        let of_daemon = spaces
            .iter()
            .find(|other| (&other.model, &other.namespace, other.role) == (&space.model, &space.namespace, space.role));
        match (of_daemon, space.scheme()) {
            (None, _) => differences.push(format!("it has no space {:?}", space.model)),
            (Some(SpaceInfo { scheme: Some(held), .. }), Some(wanted)) if *held != wanted => differences.push(format!(
                "its blocks of {:?} have {} tokens, the file's have {}",
                space.model, held.block_size, wanted.block_size
            )),
            _ => {}
        }
    }
    let known: BTreeSet<_> = page.workers.iter().map(|status| status.worker).collect();
    let unknown = config.workers.iter().map(|worker| worker.worker).filter(|worker| !known.contains(worker));
    differences.extend(unknown.map(|worker| format!("it has no worker {worker}")));
    let (first, more) = (differences.first()?, differences.len() - 1);
    let more = if more == 0 { String::new() } else { format!(", and {more} more differences") };
    Some(finding_of(Symptom::ConfigDiffers, format!("The daemon does not run with the file: {first}{more}.")))
}

/// The hard limit on open files; `None` = unlimited.
fn open_files_max() -> Option<u64> {
    getrlimit(Resource::Nofile).maximum
}

/// Checks that a configuration's publishers fit into `max` open files.
fn check_open_files(config: &Config, max: Option<u64>) -> Option<Finding> {
    let publishers = config.workers.iter().filter(|worker| worker.events.is_some()).count();
    let (needed, max) = (descriptors::needed(takers(config, publishers)), max?);
    (needed > max).then(|| {
        finding_of(
            Symptom::OpenFilesShort,
            format!("{publishers} publishers need {needed} open files, but the limit is {max}."),
        )
    })
}

/// The users of descriptors in a daemon with this configuration, as far as the configuration fixes them.
fn takers(config: &Config, publishers: usize) -> Takers {
    let (cores, shards) = (usize::from(config.serve.cores), usize::from(config.ingest.shards));
    let routers = config.routers.listen.as_ref().map_or(0, |_| limits::ROUTER_PEERS_MAX);
    Takers { cores: cores.max(1), shards, publishers, lanes: 0, routers, remote: config.remote.connections() }
}

/// Most workers named in one line.
const WORKERS_NAMED_MAX: usize = 8;

#[derive(Serialize)]
struct ReportJson<'a> {
    /// The worst harm; null = no finding.
    harm: Option<&'static str>,
    findings: Vec<FindingJson<'a>>,
}

#[derive(Serialize)]
struct FindingJson<'a> {
    finding: &'a str,
    harm: &'static str,
    since_unix_ms: u64,
    workers: Vec<WorkerJson>,
    workers_total: u32,
    what: &'a str,
    why: &'a str,
    remedy: &'a str,
}

#[derive(Serialize)]
struct WorkerJson {
    worker_id: u64,
    dp_rank: u32,
}

/// One JSON object with `findings`, worst first.
fn report_json(findings: &[Finding]) -> serde_json::Result<String> {
    let worker = |worker: &Worker| WorkerJson { worker_id: worker.id.0, dp_rank: worker.rank.0 };
    let listed = findings.iter().map(|of| FindingJson {
        finding: &of.name,
        harm: of.harm.name(),
        since_unix_ms: of.since_unix_ms,
        workers: of.workers.iter().map(worker).collect(),
        workers_total: of.workers_total,
        what: &of.what,
        why: &of.why,
        remedy: &of.remedy,
    });
    let harm = findings.iter().map(|finding| finding.harm).max().map(|harm| harm.name());
    serde_json::to_string(&ReportJson { harm, findings: listed.collect() })
}

/// A paragraph for each finding.
pub(super) fn report_text(findings: &[Finding], now_unix_ms: u64) -> String {
    if findings.is_empty() {
        return "nothing is wrong".to_owned();
    }
    let mut parts = vec![counted(findings.len(), "finding")];
    parts.extend(findings.iter().map(|finding| paragraph(finding, now_unix_ms)));
    parts.join("\n\n")
}

fn paragraph(finding: &Finding, now_unix_ms: u64) -> String {
    let mut head = format!("{} {}", finding.harm.name(), finding.name);
    if finding.since_unix_ms > 0 {
        head += &format!(", for {}", lasting(now_unix_ms.saturating_sub(finding.since_unix_ms)));
    }
    if !finding.workers.is_empty() {
        let named: Vec<_> = finding.workers.iter().take(WORKERS_NAMED_MAX).map(ToString::to_string).collect();
        let more = (finding.workers_total as usize).saturating_sub(named.len());
        let more = if more == 0 { String::new() } else { format!(" and {more} more") };
        let noun = if named.len() == 1 { "worker" } else { "workers" };
        head += &format!(", {noun} {}{more}", named.join(" "));
    }
    format!("{head}\n  what:  {}\n  why:   {}\n  to do: {}", finding.what, finding.why, finding.remedy)
}

/// A duration in its two largest units.
fn lasting(ms: u64) -> String {
    let s = ms / 1000;
    match (s / 86_400, s / 3600 % 24, s / 60 % 60, s % 60) {
        (0, 0, 0, s) => format!("{s} s"),
        (0, 0, min, s) => format!("{min} min {s} s"),
        (0, h, min, _) => format!("{h} h {min} min"),
        (days, h, _, _) => format!("{days} d {h} h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(finding: Option<Finding>) -> String {
        finding.map(|finding| finding.name).unwrap_or_default()
    }

    fn config(block_size: u32, workers: usize) -> Config {
        let mut text = format!("[[space]]\nmodel = \"m\"\nblock_size = {block_size}\n");
        for id in 1..=workers {
            text += &format!("[[worker]]\nid = {id}\nmodel = \"m\"\nendpoint = \"tcp://h:{}\"\n", 5000 + id);
        }
        config::parse("test.toml", &text, &config::Flags::default()).unwrap()
    }

    #[test]
    fn missing_stale_and_wrong_sockets_are_distinguished() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        assert_eq!(name(check_socket(&path)), "socket_unreachable");
        std::fs::write(&path, "").unwrap();
        assert!(check_socket(&path).unwrap().what.contains("is not a socket"));
        std::fs::remove_file(&path).unwrap();
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o660)).unwrap();
        assert_eq!(check_socket(&path), None);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
        assert_eq!(name(check_socket(&path)), "socket_open");
        drop(listener);
        assert!(check_socket(&path).unwrap().what.contains("No daemon listens"));
        assert_eq!(unusable(&path, &io::ErrorKind::PermissionDenied.into()).name, "socket_denied");
    }

    #[test]
    fn releases_and_the_metrics_port_are_checked() {
        let at = Some(SocketAddr::from(([10, 0, 0, 5], 1)));
        assert_eq!(check_version("1.0", "1.0"), None);
        assert_eq!(name(check_version("", "1.0")), "version_differs");
        assert_eq!(name(check_version("1.1", "1.0")), "version_differs");
        assert_eq!(check_metrics(None, |_| Err(io::ErrorKind::Other.into())), None);
        assert_eq!(check_metrics(at, |_| Ok("kvrouted_routes_total 1".into())), None);
        assert_eq!(name(check_metrics(at, |_| Ok("nginx".into()))), "metrics_unreachable");
        assert_eq!(name(check_metrics(at, |_| Err(io::ErrorKind::ConnectionRefused.into()))), "metrics_unreachable");
    }

    #[test]
    fn a_peer_that_never_ends_its_page_holds_nothing_up() {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            let (mut peer, _) = listener.accept().unwrap();
            while peer.write_all(b"x").is_ok() {
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let deadline = Instant::now() + Duration::from_millis(200);
        let error = get_by(address, "/metrics", 1 << 20, deadline).unwrap_err();
        assert!(matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock), "{error}");
    }

    #[test]
    fn findings_of_a_gateway_are_shown_with_their_remedies() {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 9464));
        let of = |body: &'static str| of_gateway(address, move |_, _, _| Ok(format!("HTTP/1.0 200 OK\r\n\r\n{body}")));
        let shown = of(r#"{"findings": [{"what": "w", "remedy": "r"}, {"what": "v"}]}"#);
        let (first, second) = (&shown[0], &shown[1]);
        assert_eq!((first.name.as_str(), first.what.as_str(), first.remedy.as_str()), ("gateway_finding", "w", "r"));
        assert_eq!((second.what.as_str(), second.remedy.as_str()), ("v", Symptom::GatewayFinding.remedy()));
        assert_eq!(of(r#"{"findings": []}"#), []);
        for hostile in ["", "[]", r#"{"findings": 1}"#, "<html>"] {
            assert_eq!(of(hostile)[0].name, "gateway_unreachable", "{hostile}");
        }
        let refused = of_gateway(address, |_, _, _| Err(io::ErrorKind::ConnectionRefused.into()));
        assert_eq!(refused[0].name, "gateway_unreachable");
    }

    #[test]
    fn a_daemon_with_another_file_is_noticed() {
        let space = |config: &Config| SpaceInfo {
            id: crate::ids::SpaceId(0),
            model: "m".into(),
            namespace: config.spaces[0].namespace.clone(),
            role: config.spaces[0].role,
            scheme: config.spaces[0].scheme(),
        };
        let none = StatusPage::default();
        assert_eq!(check_config(&config(16, 0), &[space(&config(16, 0))], &none), None);
        let what = |finding: Option<Finding>| finding.unwrap().what;
        assert!(what(check_config(&config(16, 0), &[], &none)).contains("no space \"m\""));
        assert!(
            what(check_config(&config(16, 0), &[space(&config(32, 0))], &none))
                .contains("have 32 tokens, the file's have 16")
        );
        let missing = what(check_config(&config(16, 2), &[space(&config(16, 0))], &none));
        assert!(missing.contains("no worker 1/0, and 1 more"), "{missing}");
    }

    #[test]
    fn publishers_that_do_not_fit_are_counted() {
        let needed = descriptors::needed(takers(&config(16, 2), 2));
        assert_eq!(check_open_files(&config(16, 2), Some(needed)), None);
        assert_eq!(name(check_open_files(&config(16, 2), Some(needed - 1))), "open_files_short");
        assert_eq!(check_open_files(&config(16, 2), None), None);
    }

    fn findings() -> Vec<Finding> {
        let workers: Vec<Worker> = (1..=9).map(|id| Worker::new(id, 0)).collect();
        let workers_total = 12;
        vec![
            Finding { since_unix_ms: 1_000, workers, workers_total, ..Symptom::EventsOff.finding() },
            Symptom::VersionDiffers.finding(),
        ]
    }

    #[test]
    fn a_paragraph_has_duration_workers_harm_and_remedy() {
        let shown = report_text(&findings(), 63_000);
        assert!(shown.starts_with("2 findings\n\nsevere events_off, for 1 min 2 s, workers 1/0 2/0 "), "{shown}");
        for words in
            ["8/0 and 4 more\n", Symptom::EventsOff.why(), Symptom::EventsOff.remedy(), "note version_differs\n"]
        {
            assert!(shown.contains(words), "{words}: {shown}");
        }
        assert_eq!(report_text(&[], 0), "nothing is wrong");
    }

    #[test]
    fn json_names_the_worst_and_every_field() {
        let shown: serde_json::Value = serde_json::from_str(&report_json(&findings()).unwrap()).unwrap();
        assert_eq!((&shown["harm"], &shown["findings"][0]["finding"]), (&"severe".into(), &"events_off".into()));
        assert_eq!(shown["findings"][0]["workers"][0], serde_json::json!({"worker_id": 1, "dp_rank": 0}));
        assert_eq!(shown["findings"][0]["workers_total"], 12);
        assert_eq!(report_json(&[]).unwrap(), r#"{"harm":null,"findings":[]}"#);
    }

    #[test]
    fn durations_have_two_units() {
        for (ms, shown) in [(900, "0 s"), (62_000, "1 min 2 s"), (3_720_000, "1 h 2 min"), (90_000_000, "1 d 1 h")] {
            assert_eq!(lasting(ms), shown);
        }
    }
}
