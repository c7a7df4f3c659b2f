//! The binary as a process: its folder, its configuration and sockets, its answers, and its end. Its log goes to a
//! file, whose last lines are shown where a test fails.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;

use kvrouted::client::{Client, ClientOptions};
use kvrouted::ids::Worker;
use kvrouted::route::{Prompt, RouteRequest};
use kvrouted::wire::StatusPage;
use serde_json::Value;
use tempfile::TempDir;

use super::{WAIT_MAX, folder, replace, text, until, until_ok};

/// Lines of a log that are shown where a test fails.
const LOG_LINES_SHOWN: usize = 40;

pub(crate) fn options() -> ClientOptions {
    ClientOptions { name: "test".into(), timeout: Some(WAIT_MAX), ..ClientOptions::default() }
}

/// Puts the daemons and relays of all tests into a sandbox of this mode.
const SANDBOX: &str = "KVROUTED_TEST_SANDBOX";
/// A line of a log, of a call that a list lacks.
const REFUSED: &str = "the sandbox refused a system call";

/// The binary with these arguments, and without this environment's `RUST_LOG`.
pub(crate) fn kvrouted(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvrouted"));
    command.args(arguments).args(sandboxed(arguments)).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// The same by a line of shell, which ends with `exec "$0" "$@"`.
pub(crate) fn by_shell(line: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", line, env!("CARGO_BIN_EXE_kvrouted")]).args(arguments).args(sandboxed(arguments));
    command.env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// The flag of a sandbox, if the environment asks for one and the test does not.
fn sandboxed(arguments: &[&str]) -> Vec<String> {
    let confines =
        matches!(arguments.first(), Some(&"serve" | &"relay" | &"connect")) && !arguments.contains(&"--sandbox");
    let mode = std::env::var(SANDBOX).ok().filter(|_| confines);
    mode.into_iter().flat_map(|mode| ["--sandbox".to_owned(), mode]).collect()
}

/// Runs the binary to its end.
pub(crate) fn run(arguments: &[&str]) -> Output {
    kvrouted(arguments).output().expect("the binary runs")
}

/// A running binary. Dropping it kills it.
pub(crate) struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts the binary. Its log goes to `NAME.log` in the folder.
    pub(crate) fn start(folder: &Path, name: &str, arguments: &[&str]) -> Self {
        Self::spawn(folder, name, kvrouted(arguments))
    }

    /// The same with a variable of its environment.
    pub(crate) fn start_with(folder: &Path, name: &str, (variable, value): (&str, &str), arguments: &[&str]) -> Self {
        let mut command = kvrouted(arguments);
        command.env(variable, value);
        Self::spawn(folder, name, command)
    }

    /// The same with a hard limit on open files.
    pub(crate) fn start_limited(folder: &Path, name: &str, open_files: u32, arguments: &[&str]) -> Self {
        Self::start_by(folder, name, &format!("ulimit -n {open_files} && exec \"$0\" \"$@\""), arguments)
    }

    /// The same by a line of shell, which ends with `exec "$0" "$@"`.
    pub(crate) fn start_by(folder: &Path, name: &str, line: &str, arguments: &[&str]) -> Self {
        Self::spawn(folder, name, by_shell(line, arguments))
    }

    /// Starts any command that ends up as the binary.
    pub(crate) fn spawn(folder: &Path, name: &str, mut command: Command) -> Self {
        let log = folder.join(format!("{name}.log"));
        let file = std::fs::File::options().create(true).append(true).open(&log).expect("a log");
        let child = command.stdout(Stdio::null()).stderr(file).spawn().expect("the binary runs");
        Self { child, log }
    }

    /// A binary that was started already, and whose log goes elsewhere.
    pub(crate) fn of(child: Child, folder: &Path) -> Self {
        Self { child, log: folder.join("elsewhere.log") }
    }

    /// The process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub(crate) fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().expect("kill").success());
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("a child").is_none()
    }

    /// Waits for its end; the exit code, or `None` if a signal ended it.
    pub(crate) fn ended(&mut self) -> Option<i32> {
        let ended = until_ok("it ends", || match self.child.try_wait().expect("a child") {
            Some(status) => Ok(status),
            None => Err("it runs".into()),
        });
        ended.code()
    }

    /// Sends a signal and waits for the end; the exit code.
    pub(crate) fn end(&mut self, signal: &str) -> Option<i32> {
        self.signal(signal);
        self.ended()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A test that ended it has nothing left to kill.
        drop(self.child.kill());
        drop(self.child.wait());
        if std::env::var_os(SANDBOX).is_some() && !std::thread::panicking() {
            let log = self.log();
            let refused = log.lines().find(|line| line.contains(REFUSED));
            assert!(refused.is_none(), "{}", refused.unwrap_or_default());
        }
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            let shown = &lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..];
            let said = format!("the last lines of {}:\n{}\n", self.log.display(), shown.join("\n"));
            drop(std::io::Write::write_all(&mut std::io::stderr(), said.as_bytes()));
        }
    }
}

/// The JSON that a command prints about the daemon at `socket`.
pub(crate) fn asked(socket: &Path, command: &[&str]) -> Result<Value, String> {
    let output = run(&[command, &["--json", "--socket", text(socket)]].concat());
    let said = serde_json::from_slice(&output.stdout).ok().filter(|_| output.status.success());
    said.ok_or_else(|| format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr)))
}

/// A daemon that serves at the socket `s` of a folder.
pub(crate) struct Daemon {
    pub(crate) process: Process,
    pub(crate) folder: Arc<TempDir>,
}

impl Daemon {
    /// A daemon with a space `m`, blocks of 16 tokens, and more flags.
    pub(crate) fn start(flags: &[&str]) -> Self {
        Self::start_in(folder(), flags)
    }

    /// The same in a folder that a daemon before it may have used.
    pub(crate) fn start_in(folder: Arc<TempDir>, flags: &[&str]) -> Self {
        let socket = folder.path().join("s");
        let simple = ["--socket", text(&socket), "--model", "m", "--block-size", "16"];
        Self::serve(folder, &[&simple, flags].concat())
    }

    /// A daemon on a configuration file with a space `m`, blocks of 16 tokens, and `tables`.
    pub(crate) fn configured(tables: &str) -> Self {
        let folder = folder();
        let config = configure(folder.path(), tables);
        Self::serve(folder, &["--config", text(&config)])
    }

    /// A daemon with exactly these flags, which name the folder's socket.
    pub(crate) fn serve(folder: Arc<TempDir>, flags: &[&str]) -> Self {
        let process = Process::start(folder.path(), "daemon", &[&["serve"], flags].concat());
        Self::served_by(process, folder)
    }

    /// Waits until the daemon of a process serves.
    pub(crate) fn served_by(process: Process, folder: Arc<TempDir>) -> Self {
        let mut daemon = Self { process, folder };
        until("the daemon serves", || {
            let ended = daemon.process.child.try_wait().expect("a child");
            assert!(ended.is_none(), "the daemon ended before it served: {ended:?}");
            Client::connect(&daemon.socket(), &options()).is_ok()
        });
        daemon
    }

    /// Writes another configuration file and makes the daemon read it with SIGHUP.
    pub(crate) fn reconfigure(&self, tables: &str) {
        configure(self.folder.path(), tables);
        self.process.signal("-HUP");
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("s")
    }

    pub(crate) fn client(&self) -> Client {
        Client::connect(&self.socket(), &options()).expect("a connection")
    }

    pub(crate) fn admin(&self) -> Client {
        Client::connect_admin(&self.socket(), &options()).expect("a connection")
    }

    pub(crate) fn status(&self) -> StatusPage {
        self.admin().status_all().expect("status")
    }

    /// A counter of the whole daemon.
    #[track_caller]
    pub(crate) fn counter(&self, name: &str) -> u64 {
        named(&self.status().counters, name)
    }

    /// A counter of one worker, by its place in the status.
    #[track_caller]
    pub(crate) fn worker_counter(&self, worker: usize, name: &str) -> u64 {
        named(&self.status().workers[worker].counters, name)
    }

    /// The JSON that `kvrouted COMMAND` prints about this daemon.
    #[track_caller]
    pub(crate) fn said(&self, command: &[&str]) -> Value {
        asked(&self.socket(), command).expect("JSON")
    }

    /// `kvrouted worker ARGUMENTS`.
    pub(crate) fn worker(&self, arguments: &[&str]) -> Output {
        run(&[&["worker", "--socket", text(&self.socket())], arguments].concat())
    }

    #[track_caller]
    pub(crate) fn worker_ok(&self, arguments: &[&str]) {
        let output = self.worker(arguments);
        assert!(output.status.success(), "{output:?}");
    }

    /// Leading blocks of a prompt in a worker's device memory; `None` if the daemon has no such worker.
    pub(crate) fn device(&self, tokens: &[u32], worker: Worker) -> Option<u32> {
        let mut client = self.client();
        let space = client.space("m", None).expect("the space").id;
        let overlap = client.overlap(&RouteRequest::new(space, Prompt::of_tokens(tokens))).expect("overlaps");
        overlap.workers.iter().find(|entry| entry.worker == worker).map(|entry| entry.overlap.device)
    }
}

#[track_caller]
fn named(counters: &[(String, u64)], name: &str) -> u64 {
    let found = counters.iter().find(|(of, _)| of == name);
    found.unwrap_or_else(|| panic!("no counter {name} in {counters:?}")).1
}

/// Writes the configuration file of a folder: a space `m` with blocks of 16 tokens, and `tables`.
pub(crate) fn configure(folder: &Path, tables: &str) -> PathBuf {
    configure_serve(folder, "", tables)
}

/// The same with settings of the table `[serve]`.
pub(crate) fn configure_serve(folder: &Path, serve: &str, tables: &str) -> PathBuf {
    let (path, socket) = (folder.join("kvrouted.toml"), folder.join("s"));
    let space = "[[space]]\nmodel = \"m\"\nblock_size = 16\n";
    replace(&path, &format!("[serve]\nsocket = \"{}\"\n{serve}\n{space}{tables}", socket.display()));
    path
}

/// The serving threads of a process, by their kernel ids; `self` = this process.
pub(crate) fn serving_threads(process: &str) -> BTreeSet<i32> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).expect("threads").flatten();
    let is_serving = |path: &Path| {
        std::fs::read_to_string(path.join("comm")).is_ok_and(|name| name.trim_end().starts_with("kvrouted-core-"))
    };
    let serving = tasks.filter(|task| is_serving(&task.path()));
    serving.filter_map(|task| task.file_name().to_str()?.parse().ok()).collect()
}
