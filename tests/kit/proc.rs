//! What the kernel says of a process, and this test binary as a process. The gateway's tests share this file.

use std::process::{Command, Stdio};

/// Resident memory of a process.
pub(crate) fn resident_kib(process: u32) -> u64 {
    memory_kib(process, "VmRSS:")
}

/// The most resident memory that a process has had so far.
pub(crate) fn peak_kib(process: u32) -> u64 {
    memory_kib(process, "VmHWM:")
}

fn memory_kib(process: u32, name: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("the kernel says it");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

/// How many descriptors a process has open.
pub(crate) fn open_descriptors(process: u32) -> usize {
    std::fs::read_dir(format!("/proc/{process}/fd")).expect("its descriptors").count()
}

/// Runs one test of this binary, ignored or not, in a process of its own. A wrong path is no failure of that process:
/// check that its output has `1 passed`, or a line of the test.
pub(crate) fn test_of_this_binary(path: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this binary"));
    command.args(["--exact", path, "--include-ignored", "--nocapture"]).stdin(Stdio::null());
    command
}
