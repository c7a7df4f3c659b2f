//! The processes of the demo and their folder: start, supervision and end.
//!
//! No process outlives the demo. Engines and gateway read from a pipe whose other end only the demo holds: when the
//! demo dies, by any signal, their standard input ends and so do they. The daemon does not read standard input;
//! [`run_daemon`] starts it and asks the kernel for a signal instead.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::args::DaemonArgs;
use crate::error::{Error, Kind};

/// Longest path of the folder. A Unix socket's path has at most 108 bytes, including a name within the folder.
const FOLDER_PATH_BYTES_MAX: usize = 80;
/// Lines of a process's log that an error shows.
const LOG_LINES_SHOWN: usize = 20;

/// All processes started so far. Dropping it, or a signal, ends them and removes the folder.
pub(crate) struct Processes {
    shared: Arc<Shared>,
}

struct Shared {
    folder: PathBuf,
    keep: bool,
    children: Mutex<Vec<NamedChild>>,
    interrupted: AtomicBool,
}

/// A child process and its name.
struct NamedChild {
    name: String,
    child: Child,
}

impl Processes {
    /// Makes the folder, private to this user, and takes over SIGINT, SIGTERM and SIGHUP.
    ///
    /// # Errors
    /// `config` if the folder to keep is in use or too deep, `system` if none can be made.
    pub(crate) fn new(keep: Option<&Path>) -> Result<Self, Error> {
        let folder = match keep {
            Some(folder) => folder_to_keep(folder)?,
            None => temporary_folder()?,
        };
        let shared = Arc::new(Shared {
            folder,
            keep: keep.is_some(),
            children: Mutex::default(),
            interrupted: AtomicBool::new(false),
        });
        let watched = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || end_on_signal(&watched))
            .map_err(|error| system("no thread can be started").caused_by(error))?;
        Ok(Self { shared })
    }

    /// A path in the folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.shared.folder.join(name)
    }

    /// Starts this program with other arguments. Its standard input stays open while this process lives; its standard
    /// error goes to `NAME.log`.
    ///
    /// # Errors
    /// `system` if it cannot be started.
    pub(crate) fn start(&self, name: &str, arguments: impl FnOnce(&mut Command)) -> Result<ChildStdout, Error> {
        let failed = || system(&format!("{name} cannot be started"));
        let program = std::env::current_exe().map_err(|error| failed().caused_by(error))?;
        let log = File::create(self.log(name)).map_err(|error| failed().caused_by(error))?;
        let mut command = Command::new(program);
        arguments(&mut command);
        // A process group of its own: an interrupt from the terminal goes to the demo only, which then ends the others.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log);
        let mut children = self.shared.children.lock();
        let mut child = command.spawn().map_err(|error| failed().caused_by(error))?;
        let stdout = child.stdout.take();
        children.push(NamedChild { name: name.to_owned(), child });
        stdout.ok_or_else(failed)
    }

    /// Waits for a process that is about to end.
    ///
    /// # Errors
    /// `internal` with its log if it failed.
    pub(crate) fn wait(&self, name: &str) -> Result<(), Error> {
        let mut children = self.shared.children.lock();
        let Some(named) = children.iter_mut().find(|named| named.name == name) else { return Ok(()) };
        match named.child.wait() {
            Ok(status) if status.success() => Ok(()),
            _ => {
                drop(children);
                Err(self.why(&format!("the {name} process failed"), name))
            }
        }
    }

    /// Forgets a process if it has ended, so that another can replace it. Returns whether it had ended.
    pub(crate) fn forget_ended(&self, name: &str) -> bool {
        let has_ended = |named: &mut NamedChild| named.name == name && matches!(named.child.try_wait(), Ok(Some(_)));
        self.shared.children.lock().extract_if(.., has_ended).count() > 0
    }

    /// The error of a process that ended unexpectedly. The daemon comes first: without it the gateway ends, and without
    /// the gateway the engines end.
    pub(crate) fn ended(&self) -> Option<Error> {
        let mut children = self.shared.children.lock();
        let ended = children.iter_mut().filter_map(|named| match named.child.try_wait() {
            Ok(Some(status)) if named.name != "gateway" || !status.success() => Some(named.name.clone()),
            _ => None,
        });
        let name = ended.min_by_key(|name| name != "daemon")?;
        drop(children);
        Some(self.why(&format!("the {name} process ended"), &name))
    }

    /// Never returns after a signal: then an apparent failure is part of the shutdown.
    pub(crate) fn unless_interrupted(&self) {
        while self.shared.interrupted.load(Ordering::SeqCst) {
            std::thread::park_timeout(Duration::from_secs(1));
        }
    }

    fn why(&self, what: &str, name: &str) -> Error {
        let log = std::fs::read_to_string(self.log(name)).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let shown = lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..].join("\n  ");
        let shown = if shown.is_empty() { "(its log is empty)" } else { &shown };
        Error::new(
            Kind::Internal,
            format!("{what}; the end of its log:\n  {shown}"),
            "run again with --keep DIR and read all logs",
        )
    }

    fn log(&self, name: &str) -> PathBuf {
        self.path(&format!("{name}.log"))
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        self.unless_interrupted();
        self.shared.end();
    }
}

impl Shared {
    fn end(&self) {
        let mut children = self.children.lock();
        for named in children.iter_mut() {
            // This fails only if the process has already ended.
            let _ = named.child.kill();
        }
        for mut named in children.drain(..) {
            let _ = named.child.wait();
        }
        if !self.keep
            && let Err(error) = std::fs::remove_dir_all(&self.folder)
        {
            tracing::warn!(folder = %self.folder.display(), %error, "the demo's folder could not be removed");
        }
    }
}

/// Ends all processes on a signal, and this process with that signal's exit code.
fn end_on_signal(shared: &Shared) {
    use tokio::signal::unix::{SignalKind, signal};
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
    let number = runtime.block_on(async {
        let (Ok(mut interrupt), Ok(mut terminate), Ok(mut hangup)) =
            (signal(SignalKind::interrupt()), signal(SignalKind::terminate()), signal(SignalKind::hangup()))
        else {
            return std::future::pending().await;
        };
        tokio::select! {
            _ = interrupt.recv() => SignalKind::interrupt(),
            _ = terminate.recv() => SignalKind::terminate(),
            _ = hangup.recv() => SignalKind::hangup(),
        }
    });
    shared.interrupted.store(true, Ordering::SeqCst);
    shared.end();
    std::process::exit(128 + number.as_raw_value());
}

fn folder_to_keep(folder: &Path) -> Result<PathBuf, Error> {
    let refuse = |what: &str| {
        Error::new(Kind::Config, format!("--keep {}: {what}", folder.display()), "name an absent or empty folder")
    };
    std::fs::create_dir_all(folder).map_err(|error| refuse("cannot be made").caused_by(error))?;
    let mut entries = std::fs::read_dir(folder).map_err(|error| refuse("cannot be read").caused_by(error))?;
    if entries.next().is_some() {
        return Err(refuse("is not empty"));
    }
    let folder = folder.canonicalize().map_err(|error| refuse("cannot be resolved").caused_by(error))?;
    within_bound(folder)
}

fn temporary_folder() -> Result<PathBuf, Error> {
    let parent = std::env::temp_dir();
    for attempt in 0..100 {
        let folder = parent.join(format!("kvrouted-demo-{}-{attempt}", std::process::id()));
        match std::fs::DirBuilder::new().mode(0o700).create(&folder) {
            Ok(()) => return within_bound(folder),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => {
                return Err(system(&format!("{} cannot be made", folder.display())).caused_by(error));
            }
        }
    }
    Err(system(&format!("{} is full of folders of earlier demos", parent.display())))
}

fn within_bound(folder: PathBuf) -> Result<PathBuf, Error> {
    if folder.as_os_str().len() <= FOLDER_PATH_BYTES_MAX {
        return Ok(folder);
    }
    Err(Error::new(
        Kind::Config,
        format!("{} is too long a path for Unix sockets", folder.display()),
        "set TMPDIR or --keep to a shorter path",
    ))
}

fn system(what: &str) -> Error {
    Error::new(Kind::System, what, "check the limits on processes and the temporary folder, or set TMPDIR")
}

/// Ends this process when its standard input ends.
///
/// # Errors
/// `system` if no thread can be started.
pub(crate) fn end_with_stdin() -> Result<(), Error> {
    let watch = || {
        let (mut stdin, mut ignored) = (std::io::stdin().lock(), [0_u8; 256]);
        while !matches!(stdin.read(&mut ignored), Ok(0) | Err(_)) {}
        std::process::exit(0);
    };
    std::thread::Builder::new().name("lifetime".to_owned()).spawn(watch).map(drop).map_err(|error| {
        Error::new(Kind::System, "no thread can be started", "raise the limit on processes").caused_by(error)
    })
}

/// Becomes the daemon, which the kernel kills when the demo's process dies. Returns only on failure.
#[must_use]
pub fn run_daemon(args: &DaemonArgs) -> Error {
    use rustix::process::{Signal, getppid, set_parent_process_death_signal};
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        return unusable("the kernel refuses a parent-death signal").caused_by(error);
    }
    // The demo may have died before the request to the kernel.
    if getppid().map(|pid| pid.as_raw_nonzero().get()) != Some(args.parent) {
        return unusable("the demo that started this daemon has ended");
    }
    match std::env::current_exe() {
        Ok(program) => {
            unusable("the daemon cannot be started").caused_by(Command::new(program).args(&args.command).exec())
        }
        Err(error) => unusable("this program's own file cannot be found").caused_by(error),
    }
}

fn unusable(what: &str) -> Error {
    Error::new(Kind::System, what, "start the demo again")
}
