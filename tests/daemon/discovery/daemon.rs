//! The workers of a daemon and their sources, as text to compare.

use kvrouted::wire::WorkerStatus;

use crate::kit::Daemon;

/// `id/rank state source` of every worker.
pub(crate) fn workers(daemon: &Daemon) -> Vec<String> {
    let line = |worker: &WorkerStatus| {
        let source = worker.source.replace(&*daemon.folder.path().to_string_lossy(), "");
        format!("{} {} {source}", worker.worker, worker.state.name())
    };
    let mut lines: Vec<_> = daemon.status().workers.iter().map(line).collect();
    lines.sort();
    lines
}

/// The problem of a source whose name ends so.
pub(crate) fn problem(daemon: &Daemon, of: &str) -> Option<String> {
    daemon.status().sources.into_iter().find(|source| source.name.ends_with(of)).and_then(|source| source.problem)
}
