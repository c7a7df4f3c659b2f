//! Facts about the machine: kernel, processors, memory, and the limits of the daemon's process and of this command's.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::net::sockopt::socket_peercred;

use super::archive::Contents;
use crate::limits::REPORT_FACT_BYTES_MAX;
use crate::machine::allowed_memory;
use crate::masking::masked;

const NAME: &str = "machine.txt";
/// The program's name in /proc.
const COMM: &str = "kvrouted";

/// Files with facts about the whole machine.
const FACTS: [&str; 5] = [
    "/proc/version",
    "/proc/loadavg",
    "/proc/meminfo",
    "/proc/pressure/memory",
    "/sys/kernel/mm/transparent_hugepage/enabled",
];
/// Files of a process in /proc. Its arguments and its environment are not among them: they may hold secrets.
const OF_PROCESS: [&str; 3] = ["limits", "status", "cgroup"];
/// The limits of a cgroup.
const OF_CGROUP: [&str; 5] = ["memory.max", "memory.high", "memory.current", "cpu.max", "pids.max"];

/// Adds the facts, with those of the daemon's process if the daemon answers.
pub(super) fn add(contents: &mut Contents, admin_socket: Option<&Path>) {
    let mut text = format!("processors: {}\n", std::thread::available_parallelism().map_or(0, usize::from));
    text += &format!("processor: {}\n", processor().unwrap_or_else(|| "not known".to_owned()));
    if let Some(allowed) = allowed_memory(Path::new("/")) {
        text += &format!("memory allowed: {} bytes, by {}\n", allowed.bytes, allowed.by.name());
    }
    for path in FACTS {
        text += &fact(Path::new(path));
    }
    text += &process("this command", Path::new("/proc/self"));
    match admin_socket.and_then(daemon) {
        Some(folder) => text += &process("the daemon", &folder),
        None => contents
            .leave_out("the daemon's process in machine.txt", "its admin socket does not say which process it is"),
    }
    let text: String = text.lines().map(|line| masked(line) + "\n").collect();
    contents.add(NAME, "kernel, processors, memory, limits and cgroups; no arguments and no environment.", text);
}

/// The folder in /proc of the process at a socket, if that is a daemon.
fn daemon(socket: &Path) -> Option<PathBuf> {
    let stream = UnixStream::connect(socket).ok()?;
    let peer = socket_peercred(&stream).ok()?;
    let folder = PathBuf::from(format!("/proc/{}", peer.pid.as_raw_nonzero()));
    // With socket activation the peer may be the service manager, which opened the socket.
    let comm = read(&folder.join("comm"))?;
    comm.trim_end().starts_with(COMM).then_some(folder)
}

fn processor() -> Option<String> {
    let text = read(Path::new("/proc/cpuinfo"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("model name"))?;
    Some(line.trim_start_matches([' ', '\t', ':']).to_owned())
}

fn process(whose: &str, folder: &Path) -> String {
    let mut text = format!("\n-- {whose}\n");
    for name in OF_PROCESS {
        text += &fact(&folder.join(name));
    }
    let cgroup = read(&folder.join("cgroup")).unwrap_or_default();
    let own = cgroup.lines().find_map(|line| line.strip_prefix("0::/"));
    // In a container the path may be that of the host, of which only the last cgroup is mounted.
    for at in own.into_iter().chain([""]) {
        for name in OF_CGROUP {
            let path = Path::new("/sys/fs/cgroup").join(at).join(name);
            if path.exists() {
                text += &fact(&path);
            }
        }
    }
    text
}

/// The path and the contents of a file of facts, or a note that it cannot be read.
fn fact(path: &Path) -> String {
    let text = read(path).unwrap_or_else(|| "(cannot be read)".to_owned());
    format!("\n{}\n{}\n", path.display(), text.trim_end())
}

fn read(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(REPORT_FACT_BYTES_MAX).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_of_this_machine_are_there_and_a_daemon_that_is_not_is_named() {
        let mut contents = Contents::default();
        add(&mut contents, None);
        let text = String::from_utf8(contents.parts()[0].bytes.clone()).unwrap();
        for part in ["/proc/version", "MemTotal", "Max open files", "-- this command"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("-- the daemon") && contents.left_out().len() == 1, "{contents:?}");
    }

    #[test]
    fn a_socket_of_another_program_is_no_daemon() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        // The test binary has the crate's name before its hash.
        let found = daemon(&path).is_some();
        assert_eq!(found, read(Path::new("/proc/self/comm")).unwrap().starts_with(COMM));
        assert_eq!(daemon(&folder.path().join("none")), None);
    }
}
