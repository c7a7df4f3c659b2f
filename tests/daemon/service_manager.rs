//! What the daemon tells the service manager, and the listening sockets that it gets from there.

use std::fs::Permissions;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvrouted::client::Client;
use tempfile::TempDir;

use crate::kit::{Process, WAIT_MAX, by_shell, configure, folder, options, text};

const EXEC: &str = "exec \"$0\" \"$@\"";

/// A service manager that only listens.
struct Manager {
    folder: Arc<TempDir>,
    socket: UnixDatagram,
}

impl Manager {
    fn new(tables: &str) -> Self {
        let folder = folder();
        configure(folder.path(), tables);
        let socket = UnixDatagram::bind(folder.path().join("notify")).expect("bound");
        socket.set_read_timeout(Some(Duration::from_millis(200))).expect("set");
        Self { folder, socket }
    }

    /// A daemon of this manager, by a line of shell before it.
    fn start(&self, line: &str) -> Process {
        Process::spawn(self.folder.path(), "daemon", self.command(line))
    }

    /// A daemon that this manager passes a listening socket: its descriptor 3.
    fn start_listening(&self, listener: &UnixListener) -> Process {
        let mut command =
            self.command("exec 3<&0 0</dev/null; export LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=routing");
        // As its standard input: a shell knows no number of two digits, and this process may have many files open.
        command.stdin(OwnedFd::from(listener.try_clone().expect("cloned")));
        Process::spawn(self.folder.path(), "daemon", command)
    }

    fn command(&self, line: &str) -> Command {
        let (folder, config) = (self.folder.path(), self.folder.path().join("kvrouted.toml"));
        let line = format!("export NOTIFY_SOCKET={}; {line}; {EXEC}", folder.join("notify").display());
        by_shell(&line, &["serve", "--config", text(&config)])
    }

    /// What the daemon says until a line begins so.
    #[track_caller]
    fn until(&self, wanted: &str) -> Vec<String> {
        let (mut said, began) = (Vec::new(), Instant::now());
        while began.elapsed() < WAIT_MAX {
            let mut bytes = [0; 4096];
            let Ok(length) = self.socket.recv(&mut bytes) else { continue };
            said.extend(String::from_utf8_lossy(&bytes[..length]).lines().map(str::to_owned));
            if said.iter().any(|line| line.starts_with(wanted)) {
                return said;
            }
        }
        panic!("'{wanted}' was not said: {said:?}");
    }
}

#[test]
fn a_daemon_says_when_it_is_ready_that_it_lives_and_that_it_stops() {
    let manager = Manager::new("[[worker]]\nid = 1\n");
    let mut process = manager.start("export WATCHDOG_USEC=600000");
    let said = manager.until("READY=1");
    assert!(said.contains(&"STATUS=ready: 1 worker".to_owned()), "{said:?}");
    let socket = manager.folder.path().join("s");
    assert!(Client::connect(&socket, &options()).is_ok(), "it serves by then");
    for _ in 0..3 {
        let said = manager.until("WATCHDOG=1");
        assert!(!said.contains(&"READY=1".to_owned()), "that is said once");
    }
    process.signal("-TERM");
    manager.until("STOPPING=1");
    assert_eq!(process.ended(), Some(0));
}

#[test]
fn a_daemon_takes_the_folder_of_snapshots_that_the_packaged_unit_makes() {
    let unit = include_str!("../../packaging/systemd/kvrouted.service");
    let mode = unit.lines().find_map(|line| line.strip_prefix("StateDirectoryMode=")).expect("the unit names it");
    let mode = u32::from_str_radix(mode, 8).expect("octal");
    let state = folder();
    std::fs::set_permissions(state.path(), Permissions::from_mode(mode)).expect("set");
    let manager = Manager::new(&format!("[snapshot]\ndir = \"{}\"\n", text(state.path())));
    let _process = manager.start("true");
    manager.until("READY=1");
}

#[test]
fn a_daemon_is_not_ready_while_it_waits_for_other_routers() {
    let secret = "0123456789abcdef0123456789abcdef";
    let manager = Manager::new("");
    let at = manager.folder.path();
    std::fs::write(at.join("secret"), secret).expect("written");
    let routers = format!(
        "[routers]\nlisten = \"ipc://{0}/routers\"\npeers = [\"ipc://{0}/nowhere\"]\nsecret_file = \"{0}/secret\"\njoin_ms_max = 2000\n",
        at.display()
    );
    configure(at, &routers);
    let _process = manager.start("true");
    let said = manager.until("READY=1");
    assert!(said.iter().any(|line| line.starts_with("STATUS=not ready")), "{said:?}");
    assert!(!said.iter().any(|line| line.starts_with("WATCHDOG")), "it was not asked for");
}

#[test]
fn sockets_that_the_manager_passes_are_served_and_stay() {
    let manager = Manager::new("");
    let path = manager.folder.path().join("s");
    let listener = UnixListener::bind(&path).expect("bound");
    for round in 0..2 {
        let mut process = manager.start_listening(&listener);
        manager.until("READY=1");
        assert!(Client::connect(&path, &options()).is_ok(), "round {round}");
        assert!(!process.log().contains("replacing a socket file"), "it binds no other one");
        process.signal("-TERM");
        assert_eq!(process.ended(), Some(0));
        assert!(path.exists(), "the manager's file stays");
    }
    // A connection that is made while no daemon runs waits for the next one.
    let early = std::thread::spawn({
        let path = path.clone();
        move || Client::connect(&path, &options()).is_ok()
    });
    std::thread::sleep(Duration::from_millis(100));
    let _process = manager.start_listening(&listener);
    assert!(early.join().expect("no panic"));
}
