//! The test kit: one daemon as a process, one simulated engine, one raw client, one way to wait.
//!
//! The oracles (`tests/oracle`, `tests/routing/oracle.rs`) are no part of it: the code that decides whether an
//! answer is right shares nothing with the code that asks.

#![allow(dead_code, unused_imports, reason = "each test binary uses a part of it")]

pub(crate) mod collector;
mod daemon;
pub(crate) mod endless;
pub(crate) mod engine;
pub(crate) mod http;
pub(crate) mod nats;
pub(crate) mod ports;
mod proc;
pub(crate) mod proxy;
pub(crate) mod raw;
pub(crate) mod remote;
pub(crate) mod replayer;

pub(crate) use daemon::{
    Daemon, Process, asked, by_shell, configure, configure_serve, kvrouted, options, run, serving_threads,
};
pub(crate) use proc::{open_descriptors, peak_kib, resident_kib, test_of_this_binary};

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// The longest wait of any test. Only a failure takes this long.
pub(crate) const WAIT_MAX: Duration = Duration::from_secs(120);

/// Waits until a condition holds.
#[track_caller]
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    until_ok(what, || if holds() { Ok(()) } else { Err("it does not hold".to_owned()) });
}

/// Waits for a value. A failure names the last error.
#[track_caller]
pub(crate) fn until_ok<T>(what: &str, mut come: impl FnMut() -> Result<T, String>) -> T {
    let deadline = Instant::now() + WAIT_MAX;
    loop {
        match come() {
            Ok(come) => return come,
            Err(why) => assert!(Instant::now() < deadline, "waited in vain until {what}: {why}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A folder that its last user removes.
pub(crate) fn folder() -> Arc<TempDir> {
    Arc::new(tempfile::tempdir().expect("a folder"))
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("a path of text")
}

/// Writes a file that only its owner may read.
pub(crate) fn write_secret(path: &Path, text: &str) {
    std::fs::write(path, text).expect("written");
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).expect("closed");
}

/// Replaces a file in one step: a reader sees the old one or the new one.
pub(crate) fn replace(path: &Path, text: &str) {
    let unfinished = path.with_extension("unfinished");
    std::fs::write(&unfinished, text).expect("written");
    std::fs::rename(unfinished, path).expect("renamed");
}

/// Tokens of a prompt; another seed gives another prompt.
pub(crate) fn prompt(seed: u32, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|at| seed.wrapping_mul(7919).wrapping_add(at * 31)).collect()
}

/// Reports a test that cannot run here. `scripts/test` collects these lines. They go past libtest, which hides the
/// output of a test that passes.
pub(crate) fn skipped(what: &str, why: &str) {
    let line = format!("\nskipped: {what}: {why}\n");
    std::io::Write::write_all(&mut std::io::stderr().lock(), line.as_bytes()).expect("said");
}

/// Reports that real engines are missing; fails if `KVROUTED_REQUIRE_ENGINES=1`.
pub(crate) fn skipped_without_engines(what: &str, why: &str) {
    let required = std::env::var("KVROUTED_REQUIRE_ENGINES").is_ok_and(|value| value == "1");
    assert!(!required, "{what} is required: {why}");
    skipped(what, why);
}
