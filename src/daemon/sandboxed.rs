//! What the daemon keeps of its privileges and files once it has started: see [`sandbox`].

use std::path::Path;

use crate::config::{Config, RemoteConfig};
use crate::error::Result;
use crate::owned_directory;
use crate::sandbox::{self, Grant, InForce, Place, Plan, Program, Refused};
use crate::zmtp;

/// Names of users and groups, for the lists of those who may connect.
const ACCOUNT_FILES: [&str; 2] = ["/etc/passwd", "/etc/group"];

/// Confines the process, and starts the thread that looks up host names. Call it before any other thread starts.
///
/// # Errors
/// In mode `required`, the part that the kernel lacks; a folder that cannot be made.
pub(super) fn start(config: &Config) -> Result<()> {
    if config.sandbox.mode != sandbox::Mode::Off {
        if let Some(dir) = &config.journal.dir {
            // A rule is about a folder that exists.
            owned_directory::make(dir, "journal.dir")?;
        }
        let bind_ports = Vec::new();
        sandbox::start(&Plan {
            mode: config.sandbox.mode,
            program: Program::Daemon,
            grants: grants(config),
            bind_ports,
        })?;
    }
    zmtp::prepare_lookups();
    Ok(())
}

/// The sandbox of the running daemon.
#[derive(Debug, Default)]
pub(super) struct SandboxCondition {
    /// `None` = there is none.
    pub(super) in_force: Option<InForce>,
    pub(super) refused: Vec<Refused>,
    pub(super) threads_unconfined: u64,
    /// Files that can no longer be opened because they were replaced.
    pub(super) files_replaced: Vec<String>,
}

impl SandboxCondition {
    pub(super) fn now() -> Self {
        let Some(in_force) = sandbox::in_force().cloned() else { return Self::default() };
        Self {
            in_force: Some(in_force),
            refused: sandbox::refused(),
            threads_unconfined: sandbox::threads_unconfined(),
            files_replaced: sandbox::files_replaced().iter().map(|path| path.display().to_string()).collect(),
        }
    }
}

/// What `kvrouted status` shows of the sandbox, beside the counters; nothing without a sandbox.
pub(super) fn figures() -> Vec<(String, u64)> {
    let Some(in_force) = sandbox::in_force() else { return Vec::new() };
    let refused = sandbox::refused().iter().map(|refused| refused.times).sum();
    let figures = in_force.figures().into_iter().map(|(name, value)| (name, value.into()));
    let counts = [("refused", refused), ("threads_unconfined", sandbox::threads_unconfined())];
    let named = |(name, value): (&str, u64)| (format!("sandbox_{name}"), value);
    std::iter::once(("mode", in_force.mode as u64)).chain(figures).chain(counts).map(named).collect()
}

fn grants(config: &Config) -> Vec<Grant> {
    let mut grants = Grant::resolver();
    grants.extend(ACCOUNT_FILES.map(|file| Grant::new(Place::Accounts, file)));
    grants.push(Grant::new(Place::Process, "/proc/self"));
    if let Some(file) = &config.sandbox.file {
        grants.extend(Grant::replaceable(Place::Config, file));
    }
    if let Some(file) = &config.routers.peers_file {
        grants.extend(Grant::replaceable(Place::Config, file));
    }
    if let Some(path) = &config.discovery.path {
        grants.extend(if path.is_dir() {
            vec![Grant::new(Place::Workers, path)]
        } else {
            Grant::replaceable(Place::Workers, path)
        });
    }
    if config.remote.listen.is_some() {
        let RemoteConfig { certificate_file, key_file, principals_file, .. } = &config.remote;
        let files = [certificate_file, key_file, principals_file];
        grants.extend(files.into_iter().flat_map(|file| Grant::replaceable(Place::Keys, file)));
    }
    grants.extend(config.snapshot.dir.iter().map(|dir| Grant::new(Place::Snapshots, dir)));
    grants.extend(config.journal.dir.iter().map(|dir| Grant::new(Place::Journal, dir)));
    let listen = config.routers.listen.as_deref().and_then(|listen| listen.strip_prefix("ipc://"));
    let path = listen.filter(|path| !path.starts_with('@'));
    grants.extend(path.and_then(|path| Grant::folder_of(Place::Sockets, Path::new(path))));
    for socket in [&config.serve.socket, &config.serve.admin_socket] {
        grants.extend(Grant::folder_of(Place::Sockets, socket));
    }
    grants
}
