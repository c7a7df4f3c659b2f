//! The test kit: one daemon as a process, one simulated engine, one raw client, one way to wait.
//!
//! The oracles (`tests/oracle`, `tests/routing/oracle`) are no part of it: what decides whether an answer is right shares
//! nothing with what asks for it.

#![allow(dead_code, unused_imports, reason = "each test binary uses a part of it")]

mod daemon;
pub(crate) mod engine;
pub(crate) mod http;
pub(crate) mod raw;
pub(crate) mod replayer;

pub(crate) use daemon::{
    Daemon, Process, asked, configure, configure_serve, kvrouted, open_descriptors, options, resident_kib, run,
    serving_threads,
};

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// Far beyond what anything here takes: reached only by a failure.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// Waits until something holds.
#[track_caller]
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    until_ok(what, || if holds() { Ok(()) } else { Err("it does not hold".to_owned()) });
}

/// Waits for something; what it last failed for is said where it never comes.
#[track_caller]
pub(crate) fn until_ok<T>(what: &str, mut come: impl FnMut() -> Result<T, String>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match come() {
            Ok(come) => return come,
            Err(why) => assert!(Instant::now() < deadline, "waited in vain until {what}: {why}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A folder that goes with whoever uses it last.
pub(crate) fn folder() -> Arc<TempDir> {
    Arc::new(tempfile::tempdir().expect("a folder"))
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("a path of text")
}

/// Writes a file as whole: readers see the one before or this one.
pub(crate) fn replace(path: &Path, text: &str) {
    let unfinished = path.with_extension("unfinished");
    std::fs::write(&unfinished, text).expect("written");
    std::fs::rename(unfinished, path).expect("renamed");
}

/// What distinguishes one prompt from another.
pub(crate) fn prompt(seed: u32, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|at| seed.wrapping_mul(7919).wrapping_add(at * 31)).collect()
}

/// One test of this binary in a process of its own: by its path, also where it is ignored otherwise. A path of no test is
/// no failure of the process: see that its output says `1 passed`, or what the test prints.
pub(crate) fn test_of_this_binary(path: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this binary"));
    command.args(["--exact", path, "--include-ignored", "--nocapture"]).stdin(Stdio::null());
    command
}

/// Says what is not tested and why. `scripts/test` collects these lines; libtest would keep what a passing test prints.
pub(crate) fn skipped(what: &str, why: &str) {
    let line = format!("\nskipped: {what}: {why}\n");
    std::io::Write::write_all(&mut std::io::stderr().lock(), line.as_bytes()).expect("said");
}

/// The same where real engines are missing; a failure where `KVROUTED_REQUIRE_ENGINES=1`.
pub(crate) fn skipped_without_engines(what: &str, why: &str) {
    let required = std::env::var("KVROUTED_REQUIRE_ENGINES").is_ok_and(|value| value == "1");
    assert!(!required, "{what} is required: {why}");
    skipped(what, why);
}
