//! `peers`: the routers behind a service of Kubernetes, as a file that each router's daemon follows.
//!
//! The daemon asks no API server itself: it has no rights in the cluster, and its file is there while the server is away.

use std::fmt::Write as _;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::Path;

use super::args::PeersArgs;
use super::kubernetes::KubernetesOptions;
use super::proxy::Signals;
use super::{Failure, log_to_stderr, runtime, to_its_end};
use crate::config;
use crate::kubernetes::{Fleet, FleetWatch};

/// Follows the service until SIGTERM or SIGINT.
pub(super) fn run(args: &PeersArgs) -> Result<(), Failure> {
    let config = config::load(None, &args.flags())
        .map_err(|problems| Failure::Usage(format!("the service cannot be followed\n{problems}")))?;
    log_to_stderr(&config.log_level);
    let kubernetes = config.kubernetes.as_ref().ok_or_else(|| Failure::Usage("--service is missing".to_owned()))?;
    let options = KubernetesOptions::of(kubernetes, None)?;
    to_its_end(runtime()?, follow(options, &args.out))
}

async fn follow(options: KubernetesOptions, out: &Path) -> Result<(), Failure> {
    let mut signals = Signals::take()?;
    let watch = options.watch();
    tokio::select! {
        ended = write_each(&watch, out) => ended,
        () = signals.end(|| {}) => Ok(()),
    }
}

/// Writes the file whenever the addresses change. While the API server is away, the file stays as it is.
async fn write_each(watch: &FleetWatch, out: &Path) -> Result<(), Failure> {
    let mut fleets = watch.fleets();
    let (mut written, mut problems) = (None, Vec::new());
    loop {
        let fleet = fleets.borrow_and_update().clone();
        if fleet.problems != problems {
            problems.clone_from(&fleet.problems);
            problems.iter().for_each(|problem| tracing::warn!(remedy = problem.remedy, "{}", problem.what));
        }
        let lines = lines(&fleet);
        if fleet.is_known && written.as_ref() != Some(&lines) {
            replace(out, &lines)
                .map_err(|error| Failure::System(format!("{} cannot be written: {error}", out.display())))?;
            tracing::info!(routers = fleet.pods.len(), path = %out.display(), "the file of routers is written");
            written = Some(lines);
        }
        if fleets.changed().await.is_err() {
            return Err(Failure::System("the watch of the service has ended".to_owned()));
        }
    }
}

/// The addresses, one on each line. A router that is not ready yet, or is being deleted, is one too: what it has booked
/// counts.
fn lines(fleet: &Fleet) -> String {
    let mut lines = String::from("# Written by kvrouted-gateway peers: do not change it.\n");
    let ports = |pod: &crate::kubernetes::FleetPod| pod.ports.first().copied();
    let addresses = fleet.pods.iter().filter_map(|pod| Some(SocketAddr::new(pod.address, ports(pod)?)));
    let mut addresses: Vec<SocketAddr> = addresses.collect();
    addresses.sort_unstable();
    for address in addresses {
        // Writing to a string cannot fail.
        let _ = writeln!(lines, "tcp://{address}");
    }
    lines
}

/// Replaces the file at once, so that no reader sees a part of it.
fn replace(path: &Path, contents: &str) -> std::io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut next = tempfile::Builder::new().prefix(".peers").permissions(mode()).tempfile_in(folder)?;
    next.write_all(contents.as_bytes())?;
    next.persist(path).map(drop).map_err(|error| error.error)
}

/// Other users may read it: the daemon may be one.
fn mode() -> std::fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(0o644)
}
