//! Processes that end with the test.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use tempfile::TempDir;

use super::PATIENCE;
use super::ports::free_address;

/// Sends a signal to a process.
pub(crate) fn signal(pid: u32, signal: Signal) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a process id");
    kill_process(pid, signal).expect("the process is there");
}

/// Whether a process is there.
#[must_use]
pub(crate) fn is_alive(pid: u32) -> bool {
    i32::try_from(pid).ok().and_then(Pid::from_raw).is_some_and(|pid| test_kill_process(pid).is_ok())
}

/// A child whose log is kept.
struct Process {
    child: Child,
    log: Arc<Mutex<Vec<String>>>,
}

impl Process {
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().expect("a process");
        let stderr = child.stderr.take().expect("a pipe");
        let log: Arc<Mutex<Vec<String>>> = Arc::default();
        let lines = Arc::clone(&log);
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                lines.lock().expect("no panic").push(line);
            }
        });
        Self { child, log }
    }

    fn lines(&self) -> Vec<String> {
        self.log.lock().expect("no panic").clone()
    }

    /// Waits for a line of the log, and returns what `find` makes of the last one that it finds.
    fn wait_for<T>(&mut self, what: &str, find: impl Fn(&str) -> Option<T>) -> T {
        let begun = Instant::now();
        loop {
            if let Some(found) = self.lines().iter().rev().find_map(|line| find(line)) {
                return found;
            }
            let ended = self.child.try_wait().expect("a status");
            let is_late = begun.elapsed() > PATIENCE;
            assert!(ended.is_none() && !is_late, "{what}: {ended:?}; its log:\n{}", self.lines().join("\n"));
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Ends it with a signal and waits. The exit code.
    fn end(&mut self, with: Signal) -> Option<i32> {
        signal(self.child.id(), with);
        self.child.wait().expect("a status").code()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // An error means that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("its log:\n{}", self.lines().join("\n"));
        }
    }
}

/// `kvrouted serve` with a configuration.
pub(crate) struct Daemon {
    process: Option<Process>,
    program: PathBuf,
    folder: TempDir,
}

impl Daemon {
    /// Starts it with `tables` beside its sockets.
    #[must_use]
    pub(crate) fn start(program: &Path, tables: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("kvrouted.sock");
        let text = format!("serve.socket = {:?}\nserve.cores = 1\n{tables}", socket.display().to_string());
        std::fs::write(folder.path().join("kvrouted.toml"), text).expect("a file");
        let mut daemon = Self { process: None, program: program.to_owned(), folder };
        daemon.start_again();
        daemon
    }

    /// Its socket.
    #[must_use]
    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("kvrouted.sock")
    }

    /// Ends it as SIGKILL does.
    pub(crate) fn kill(&mut self) {
        self.process = None;
    }

    /// Sends it a signal.
    pub(crate) fn signal(&self, number: Signal) {
        signal(self.process.as_ref().expect("it runs").child.id(), number);
    }

    /// Starts it, and waits until it listens.
    pub(crate) fn start_again(&mut self) {
        let mut command = Command::new(&self.program);
        command.arg("serve").arg("--config").arg(self.folder.path().join("kvrouted.toml"));
        let mut process = Process::start(&mut command);
        process.wait_for("the daemon serves", |line| line.contains("serving").then_some(()));
        self.process = Some(process);
    }
}

/// `kvrouted connect` to a daemon's remote port.
pub(crate) struct Connect {
    _process: Process,
    socket: PathBuf,
    _folder: TempDir,
}

impl Connect {
    /// Starts it with files of the token and of the certificate that it trusts, and waits until it listens.
    #[must_use]
    pub(crate) fn start(program: &Path, (to, server_name): (&str, &str), token: &Path, authorities: &Path) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("kvrouted.sock");
        let mut command = Command::new(program);
        command.args(["connect", "--to", to, "--server-name", server_name]).arg("--socket").arg(&socket);
        command.arg("--token-file").arg(token).arg("--ca-file").arg(authorities);
        let mut process = Process::start(&mut command);
        process.wait_for("connect listens", |_| socket.exists().then_some(()));
        Self { _process: process, socket, _folder: folder }
    }

    /// The socket for clients of this host.
    #[must_use]
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }
}

/// Puts the gateways of all tests, and their daemons, into sandboxes of this mode.
const SANDBOX: &str = "KVROUTED_TEST_SANDBOX";

/// The flag of a sandbox, if the environment asks for one and the test does not.
fn sandboxed(flags: &[&str]) -> Vec<String> {
    let mode = std::env::var(SANDBOX).ok().filter(|_| !flags.contains(&"--sandbox"));
    mode.into_iter().flat_map(|mode| ["--sandbox".to_owned(), mode]).collect()
}

/// `kvrouted-gateway serve`, or `epp`.
pub(crate) struct Gateway {
    process: Process,
    url: String,
    /// Where its /metrics and /findings are; a picker has none.
    admin: String,
    _folder: TempDir,
}

impl Gateway {
    /// Starts it in front of these engines, with a daemon of its own unless the flags name a socket. Its replies name the
    /// worker.
    #[must_use]
    pub(crate) fn start(kvrouted: &Path, engines: &[String], flags: &[&str]) -> Self {
        Self::start_with(kvrouted, "", engines, flags)
    }

    /// The same with `tables` in its configuration file.
    #[must_use]
    pub(crate) fn start_with(kvrouted: &Path, tables: &str, engines: &[String], flags: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let config = folder.path().join("gateway.toml");
        std::fs::write(&config, format!("forward.worker_headers = true\n{tables}")).expect("a file");
        // Another build of it can be tested too.
        let named = std::env::var_os("KVROUTED_GATEWAY_BIN");
        let mut command = Command::new(named.unwrap_or_else(|| env!("CARGO_BIN_EXE_kvrouted-gateway").into()));
        command.arg("serve").arg("--config").arg(&config);
        if !flags.contains(&"--socket") {
            command.arg("--kvrouted").arg(kvrouted);
        }
        let port = free_address();
        command.args(["--listen", "127.0.0.1:0", "--admin", &port.to_string()]).args(flags).args(sandboxed(flags));
        // What a killed gateway leaves is removed with the test's folder.
        command.env_remove("RUST_LOG").env("NO_COLOR", "1").env("TMPDIR", folder.path());
        for url in engines {
            command.args(["--engine", url]);
        }
        let mut process = Process::start(&mut command);
        let url = process.wait_for("the gateway serves", |line| after(line, "serving on "));
        Self { process, url, admin: format!("http://{port}"), _folder: folder }
    }

    /// Starts it as an endpoint picker for these engines, with a daemon of its own unless the flags name a socket.
    #[must_use]
    pub(crate) fn start_picker(kvrouted: &Path, engines: &[String], flags: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let config = folder.path().join("picker.toml");
        std::fs::write(&config, "forward.worker_headers = true\n").expect("a file");
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvrouted-gateway"));
        command.arg("epp");
        if !flags.contains(&"--socket") {
            command.arg("--kvrouted").arg(kvrouted);
        }
        if !flags.contains(&"--config") {
            command.arg("--config").arg(&config);
        }
        command.args(["--listen", "127.0.0.1:0"]).args(flags).args(sandboxed(flags));
        if !flags.contains(&"--admin") {
            command.args(["--admin", ""]);
        }
        command.env_remove("RUST_LOG").env("NO_COLOR", "1");
        for url in engines {
            command.args(["--engine", url]);
        }
        let mut process = Process::start(&mut command);
        let url = process.wait_for("the picker serves", |line| after(line, "serving on "));
        Self { process, url, admin: String::new(), _folder: folder }
    }

    /// Where callers connect; the address of a picker.
    #[must_use]
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Where its /metrics and /findings are.
    #[must_use]
    pub(crate) fn admin(&self) -> &str {
        &self.admin
    }

    /// Its process id.
    #[must_use]
    pub(crate) fn pid(&self) -> u32 {
        self.process.child.id()
    }

    /// The process id and the socket of its daemon, as it last said.
    #[must_use]
    pub(crate) fn daemon(&mut self) -> (u32, PathBuf) {
        self.process.wait_for("the daemon answers", |line| {
            let pid = line.contains("the daemon answers").then(|| after(line, "pid="))??;
            Some((pid.parse().ok()?, after(line, "socket=")?.into()))
        })
    }

    /// The lines of its log.
    #[must_use]
    pub(crate) fn log(&self) -> Vec<String> {
        self.process.lines()
    }

    /// Ends it as an operator does. The exit code.
    pub(crate) fn end(&mut self) -> Option<i32> {
        self.process.end(Signal::TERM)
    }

    /// Ends it as SIGKILL does.
    pub(crate) fn kill(&mut self) {
        self.process.end(Signal::KILL);
    }
}

/// The word after `mark` in a line.
fn after(line: &str, mark: &str) -> Option<String> {
    let rest = &line[line.find(mark)? + mark.len()..];
    rest.split_whitespace().next().map(str::to_owned)
}
