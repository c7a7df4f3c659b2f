//! The thread of the supervisor, before there is a supervisor.
//!
//! A process in its sandbox starts no programs and makes no folders. So the gateway starts this thread first. The
//! sandbox holds for the threads that the main thread starts later, not for this one, which has a list of its own: it
//! forbids what no daemon needs, for itself and for the daemon. The daemon then confines itself.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use kvrouted::sandbox::{self, Mode};

use super::DaemonError;
use super::files::Folder;
use super::supervisor::Supervisor;

/// A thread that waits for the daemon to start, and the daemon's folder.
#[derive(Clone, Debug)]
pub struct DaemonStarter {
    folder: Arc<Folder>,
    supervisors: Sender<Supervisor>,
}

impl DaemonStarter {
    /// Makes the folder and starts the thread.
    ///
    /// # Errors
    /// There is no folder or no thread, or the kernel takes no filter in mode `required`.
    pub fn new(mode: Mode) -> Result<Self, DaemonError> {
        let failed = |error: &dyn std::fmt::Display| DaemonError::Supervisor(error.to_string());
        let folder = Arc::new(Folder::make()?);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| failed(&error))?;
        let (supervisors, started) = channel::<Supervisor>();
        let (said, forbidden) = channel();
        let body = move || {
            // The receiver waits for this message.
            let _ = said.send(sandbox::forbid_to_programs(mode));
            // Without a supervisor the gateway has ended before it started a daemon.
            if let Ok(supervisor) = started.recv() {
                runtime.block_on(supervisor.run());
            }
        };
        std::thread::Builder::new().name("daemon".to_owned()).spawn(body).map_err(|error| failed(&error))?;
        forbidden.recv().map_err(|error| failed(&error))?.map_err(|error| failed(&error))?;
        Ok(Self { folder, supervisors })
    }

    pub(super) fn folder(&self) -> Arc<Folder> {
        Arc::clone(&self.folder)
    }

    pub(super) fn start(self, supervisor: Supervisor) -> Result<(), DaemonError> {
        self.supervisors.send(supervisor).map_err(|_| DaemonError::Supervisor("its thread has ended".to_owned()))
    }
}
