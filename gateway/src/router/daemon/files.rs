//! The child's folder: its configuration, its sockets and its snapshots.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use serde::Serialize;
use tempfile::TempDir;

use super::plan::{FleetPlan, PlannedSpace, PlannedWorker};
use super::{DaemonError, DaemonOptions};
use crate::limits::DAEMON_FOLDER_BYTES_MAX;

/// A folder that only this user can enter, removed with the last reference at the latest.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    socket: PathBuf,
    /// `None` = removed.
    made: Mutex<Option<TempDir>>,
}

impl Folder {
    /// Makes the folder in the system's folder for temporary files.
    pub(super) fn make() -> Result<Self, DaemonError> {
        let parent = std::env::temp_dir();
        // Mode 0700.
        let made = tempfile::Builder::new().prefix("kvrouted-").tempdir_in(&parent);
        let folder = made.map_err(|error| unusable(&parent, &error.to_string()))?;
        if folder.path().as_os_str().len() > DAEMON_FOLDER_BYTES_MAX {
            return Err(unusable(folder.path(), "it is too long a path for Unix sockets"));
        }
        let (path, socket) = (folder.path().to_owned(), folder.path().join("kvrouted.sock"));
        Ok(Self { path, socket, made: Mutex::new(Some(folder)) })
    }

    /// Removes the folder: nobody needs it any more.
    pub(super) fn remove(&self) {
        if let Some(Err(error)) = self.made.lock().take().map(TempDir::close) {
            tracing::warn!(folder = %self.path.display(), %error, "the daemon's folder cannot be removed");
        }
    }

    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    pub(super) fn configuration(&self) -> PathBuf {
        self.path.join("kvrouted.toml")
    }

    /// Writes the configuration.
    pub(super) fn write(&self, plan: &FleetPlan, options: &DaemonOptions) -> Result<(), DaemonError> {
        let path = self.configuration();
        let text = configuration(&self.path, &self.socket, plan, options).map_err(|error| unusable(&path, &error))?;
        self.replace(&path, text.as_bytes())
    }

    /// Renames a new file over the old one, so that the daemon never reads half of it.
    fn replace(&self, path: &Path, text: &[u8]) -> Result<(), DaemonError> {
        let write = || {
            let mut file = tempfile::NamedTempFile::new_in(&self.path)?;
            file.write_all(text)?;
            file.persist(path).map_err(|error| error.error)
        };
        write().map(drop).map_err(|error| unusable(path, &error.to_string()))
    }
}

fn unusable(path: &Path, why: &str) -> DaemonError {
    DaemonError::Folder { folder: path.display().to_string(), why: why.to_owned() }
}

/// The fields of the daemon's configuration that differ from its defaults.
#[derive(Serialize)]
struct Configuration<'a> {
    serve: Serve<'a>,
    metrics: Metrics,
    log: Log<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    process: Option<Process>,
    sandbox: Sandbox,
    booking: Booking,
    snapshot: Snapshot,
    policy: Policy,
    space: Vec<Space>,
    worker: Vec<WorkerRecord<'a>>,
}

#[derive(Serialize)]
struct Serve<'a> {
    socket: &'a Path,
    socket_mode: &'static str,
}

#[derive(Serialize)]
struct Metrics {
    port: u16,
}

#[derive(Serialize)]
struct Log<'a> {
    level: &'a str,
    format: &'static str,
}

/// What the gateway's own budget leaves.
#[derive(Serialize)]
struct Process {
    memory_bytes_max: u64,
}

#[derive(Serialize)]
struct Sandbox {
    mode: &'static str,
}

#[derive(Serialize)]
struct Booking {
    age_s_max: u64,
    track_output_blocks: bool,
}

/// Blocks of workers with a replay endpoint survive a restart of the child.
#[derive(Serialize)]
struct Snapshot {
    dir: PathBuf,
}

/// Callers name sessions by a header, which would do nothing with affinity off.
#[derive(Serialize)]
struct Policy {
    mode: &'static str,
    affinity: &'static str,
}

#[derive(Serialize)]
struct Space {
    model: String,
    role: &'static str,
    block_size: u32,
    full_reports: &'static str,
}

fn configuration(folder: &Path, socket: &Path, plan: &FleetPlan, options: &DaemonOptions) -> Result<String, String> {
    let full_reports = if options.report_mode_passes { "possible" } else { "none" };
    let space = |space: &PlannedSpace| Space {
        model: space.model.clone(),
        role: space.role,
        block_size: space.block_size,
        full_reports,
    };
    let configuration = Configuration {
        serve: Serve { socket, socket_mode: "0600" },
        metrics: Metrics { port: options.metrics_port },
        log: Log { level: &options.log_level, format: "json" },
        process: (options.memory_bytes_max > 0).then_some(Process { memory_bytes_max: options.memory_bytes_max }),
        sandbox: Sandbox { mode: options.sandbox.name() },
        booking: Booking { age_s_max: options.request_max.as_secs().clamp(1, 86_400), track_output_blocks: true },
        snapshot: Snapshot { dir: folder.join("snapshots") },
        policy: Policy { mode: options.mode.name(), affinity: "soft" },
        space: plan.spaces.iter().map(space).collect(),
        worker: plan.workers.iter().map(WorkerRecord::of).collect(),
    };
    let head = "# Written by kvrouted-gateway from what its engines say; a change here is lost.\n";
    toml::to_string(&configuration).map(|text| format!("{head}{text}")).map_err(|error| error.to_string())
}

/// A worker as the daemon's configuration has it.
#[derive(Serialize)]
struct WorkerRecord<'a> {
    /// A string, because TOML's integers end at 2^63 - 1.
    id: String,
    dp_rank: u32,
    name: &'a str,
    model: &'a str,
    role: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    endpoint: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    replay: Option<&'a str>,
    #[serde(skip_serializing_if = "str::is_empty")]
    topic: &'a str,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    loras: &'a [String],
}

impl<'a> WorkerRecord<'a> {
    fn of(worker: &'a PlannedWorker) -> Self {
        Self {
            id: worker.id.to_string(),
            dp_rank: worker.rank,
            name: &worker.name,
            model: &worker.model,
            role: worker.role,
            endpoint: worker.endpoint.as_deref(),
            replay: worker.replay.as_deref(),
            topic: if worker.endpoint.is_some() { &worker.topic } else { "" },
            loras: &worker.loras,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::router::daemon::plan::tests::engine;

    #[test]
    fn the_configuration_has_the_spaces_and_the_workers() {
        let plan = FleetPlan::of(&[engine(1, &[5557]), engine(2, &[])]);
        let folder = Folder::make().expect("a folder");
        let mode = kvrouted::client::Mode::Kv;
        let options = DaemonOptions { report_mode_passes: false, mode, ..DaemonOptions::default() };
        folder.write(&plan, &options).expect("files");
        let text = std::fs::read_to_string(folder.configuration()).expect("the configuration");
        let parsed: toml::Table = text.parse().expect("TOML");
        let space = &parsed["space"][0];
        assert_eq!((space["model"].as_str(), space["block_size"].as_integer()), (Some("m"), Some(16)));
        assert_eq!((space["role"].as_str(), space["full_reports"].as_str()), (Some("both"), Some("none")));
        assert_eq!(parsed["serve"]["socket"].as_str(), folder.socket().to_str());
        assert_eq!(parsed["policy"]["mode"].as_str(), Some("kv"));
        let workers = &parsed["worker"];
        assert_eq!(workers[0]["endpoint"].as_str(), Some("tcp://10.0.0.1:5557"));
        assert_eq!((workers[1]["id"].as_str(), workers[1].get("endpoint")), (Some("2"), None));
    }

    #[test]
    fn a_name_with_quotes_stays_one_value() {
        let mut plan = FleetPlan::of(&[engine(1, &[5557])]);
        plan.spaces[0].model = "a\"b\\c\n[x]".to_owned();
        let text = configuration(Path::new("/f"), Path::new("/f/s"), &plan, &DaemonOptions::default()).expect("TOML");
        let parsed: toml::Table = text.parse().expect("TOML");
        assert_eq!(parsed["space"][0]["model"].as_str(), Some("a\"b\\c\n[x]"));
        assert!(parsed.get("x").is_none());
    }
}
