//! What shows of a daemon from outside: its socket, metrics port, release and configuration file.

use std::collections::BTreeSet;
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::process::{Resource, getrlimit};

use crate::config::Config;
use crate::finding::{Finding, Symptom};
use crate::ingest::descriptors::{self, Takers};
use crate::wire::{SpaceInfo, StatusPage};

/// How long the metrics page may take.
const SCRAPE_S_MAX: u64 = 5;
/// Bytes of the metrics page that are looked at.
const SCRAPE_BYTES_MAX: u64 = 64 << 10;
/// Permission of everybody else to write, and so to connect.
const OTHERS_WRITE: u32 = 0o002;

fn says(symptom: Symptom, what: String) -> Finding {
    Finding { what, ..symptom.finding() }
}

/// What the routing socket's file and a connection to it show.
pub(super) fn socket(path: &Path) -> Option<Finding> {
    let shown = path.display();
    let metadata = match std::fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) => return Some(unusable(path, &error)),
    };
    if !metadata.file_type().is_socket() {
        return Some(says(Symptom::SocketUnreachable, format!("{shown} is no socket.")));
    }
    if let Err(error) = UnixStream::connect(path) {
        return Some(unusable(path, &error));
    }
    let mode = metadata.permissions().mode();
    let is_open = mode & OTHERS_WRITE != 0;
    is_open.then(|| {
        says(Symptom::SocketOpen, format!("Every user of the host may use {shown} (mode {:o}).", mode & 0o777))
    })
}

fn unusable(path: &Path, error: &io::Error) -> Finding {
    let shown = path.display();
    match error.kind() {
        io::ErrorKind::PermissionDenied => says(Symptom::SocketDenied, format!("{shown} may not be used: {error}.")),
        io::ErrorKind::ConnectionRefused => {
            says(Symptom::SocketUnreachable, format!("Nobody listens on {shown}: a daemon that ended left the file."))
        }
        _ => says(Symptom::SocketUnreachable, format!("{shown}: {error}.")),
    }
}

/// Whether daemon and command are of one release. A daemon that does not say is older.
pub(super) fn version(daemon: &str, own: &str) -> Option<Finding> {
    let daemon = if daemon.is_empty() { "an older release" } else { daemon };
    (daemon != own).then(|| says(Symptom::VersionDiffers, format!("The daemon is {daemon}, this command {own}.")))
}

/// Whether the port serves the daemon's metrics; 0 = it is to serve none.
pub(super) fn metrics(port: u16, scrape: impl Fn(u16) -> io::Result<String>) -> Option<Finding> {
    if port == 0 {
        return None;
    }
    match scrape(port) {
        Ok(page) if page.contains("kvrouted_") => None,
        Ok(_) => Some(says(Symptom::MetricsUnreachable, format!("Something else answers on port {port}."))),
        Err(error) => Some(says(Symptom::MetricsUnreachable, format!("127.0.0.1:{port} does not answer: {error}."))),
    }
}

/// The beginning of the metrics page.
pub(super) fn scrape(port: u16) -> io::Result<String> {
    let patience = Duration::from_secs(SCRAPE_S_MAX);
    let mut stream = TcpStream::connect_timeout(&SocketAddr::from((Ipv4Addr::LOCALHOST, port)), patience)?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
    let mut page = Vec::new();
    stream.take(SCRAPE_BYTES_MAX).read_to_end(&mut page)?;
    Ok(String::from_utf8_lossy(&page).into_owned())
}

/// Whether the daemon runs on what a configuration file says. Workers that the file does not name are no difference:
/// they may have been added since.
pub(super) fn differs(config: &Config, spaces: &[SpaceInfo], page: &StatusPage) -> Option<Finding> {
    let mut differences = Vec::new();
    for space in &config.spaces {
        let of_daemon = spaces
            .iter()
            .find(|other| (&other.model, &other.namespace, other.role) == (&space.model, &space.namespace, space.role));
        match (of_daemon, space.scheme()) {
            (None, _) => differences.push(format!("it has no space {:?}", space.model)),
            (Some(SpaceInfo { scheme: Some(held), .. }), Some(said)) if *held != said => differences.push(format!(
                "its blocks of {:?} are of {} tokens, the file's of {}",
                space.model, held.block_size, said.block_size
            )),
            _ => {}
        }
    }
    let known: BTreeSet<_> = page.workers.iter().map(|status| status.worker).collect();
    let unknown = config.workers.iter().map(|worker| worker.worker).filter(|worker| !known.contains(worker));
    differences.extend(unknown.map(|worker| format!("it has no worker {worker}")));
    let (first, more) = (differences.first()?, differences.len() - 1);
    let more = if more == 0 { String::new() } else { format!(", and {more} more differences") };
    Some(says(Symptom::ConfigDiffers, format!("The daemon does not run on the file: {first}{more}.")))
}

/// The most open files that a process here can be given; `None` = unlimited.
pub(super) fn open_files_max() -> Option<u64> {
    getrlimit(Resource::Nofile).maximum
}

/// Whether a configuration's publishers fit into so many open files.
pub(super) fn open_files(config: &Config, max: Option<u64>) -> Option<Finding> {
    let publishers = config.workers.iter().filter(|worker| worker.events.is_some()).count();
    let (needed, max) = (descriptors::needed(takers(config, publishers)), max?);
    (needed > max).then(|| {
        says(Symptom::OpenFilesShort, format!("{publishers} publishers need {needed} open files; there may be {max}."))
    })
}

/// Who takes descriptors of a daemon with a configuration, as far as that says it.
fn takers(config: &Config, publishers: usize) -> Takers {
    let (cores, shards) = (usize::from(config.serve.cores), usize::from(config.ingest.shards));
    Takers { cores: cores.max(1), shards, publishers, lanes: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

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
    fn a_socket_that_is_not_there_stale_or_no_socket_is_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        assert_eq!(name(socket(&path)), "socket_unreachable");
        std::fs::write(&path, "").unwrap();
        assert!(socket(&path).unwrap().what.contains("is no socket"));
        std::fs::remove_file(&path).unwrap();
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o660)).unwrap();
        assert_eq!(socket(&path), None);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
        assert_eq!(name(socket(&path)), "socket_open");
        drop(listener);
        assert!(socket(&path).unwrap().what.contains("Nobody listens"));
        assert_eq!(unusable(&path, &io::ErrorKind::PermissionDenied.into()).name, "socket_denied");
    }

    #[test]
    fn release_and_metrics() {
        assert_eq!(version("1.0", "1.0"), None);
        assert_eq!(name(version("", "1.0")), "version_differs");
        assert_eq!(name(version("1.1", "1.0")), "version_differs");
        assert_eq!(metrics(0, |_| Err(io::ErrorKind::Other.into())), None);
        assert_eq!(metrics(1, |_| Ok("kvrouted_routes_total 1".into())), None);
        assert_eq!(name(metrics(1, |_| Ok("nginx".into()))), "metrics_unreachable");
        assert_eq!(name(metrics(1, |_| Err(io::ErrorKind::ConnectionRefused.into()))), "metrics_unreachable");
    }

    #[test]
    fn a_daemon_on_another_file_is_noticed() {
        let space = |config: &Config| SpaceInfo {
            id: crate::ids::SpaceId(0),
            model: "m".into(),
            namespace: config.spaces[0].namespace.clone(),
            role: config.spaces[0].role,
            scheme: config.spaces[0].scheme(),
        };
        let none = StatusPage::default();
        assert_eq!(differs(&config(16, 0), &[space(&config(16, 0))], &none), None);
        let what = |finding: Option<Finding>| finding.unwrap().what;
        assert!(what(differs(&config(16, 0), &[], &none)).contains("no space \"m\""));
        assert!(
            what(differs(&config(16, 0), &[space(&config(32, 0))], &none)).contains("of 32 tokens, the file's of 16")
        );
        let missing = what(differs(&config(16, 2), &[space(&config(16, 0))], &none));
        assert!(missing.contains("no worker 1/0, and 1 more"), "{missing}");
    }

    #[test]
    fn publishers_that_do_not_fit_are_counted() {
        let needed = descriptors::needed(takers(&config(16, 2), 2));
        assert_eq!(open_files(&config(16, 2), Some(needed)), None);
        assert_eq!(name(open_files(&config(16, 2), Some(needed - 1))), "open_files_short");
        assert_eq!(open_files(&config(16, 2), None), None);
    }
}
