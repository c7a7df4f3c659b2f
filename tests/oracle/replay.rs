//! The seeds that a test takes, and the command that it prints to take a failing seed again.

use std::ops::RangeInclusive;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long one seed may take before the test says which it is and ends: long enough for a busy machine
/// under a sanitizer.
const STUCK_AFTER: Duration = Duration::from_secs(300);

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is a number, not '{text}'")))
}

/// The one seed of `KVROUTED_SEED`, or else as many as `KVROUTED_SEEDS` says, or `default`, from 1 on.
pub(crate) fn seeds(default: u64) -> RangeInclusive<u64> {
    match number("KVROUTED_SEED") {
        Some(seed) => seed..=seed,
        None => 1..=number("KVROUTED_SEEDS").unwrap_or(default),
    }
}

/// As many seconds as `KVROUTED_STRESS_SECONDS` says, or `default`.
pub(crate) fn stress_time(default: Duration) -> Duration {
    number("KVROUTED_STRESS_SECONDS").map_or(default, Duration::from_secs)
}

/// Calls `body` with one seed after another: at least with the first `count`, then until the time of
/// [`stress_time`] is up; with `KVROUTED_SEED` with that one alone.
pub(crate) fn for_seeds(test: &'static str, count: u64, time: Duration, mut body: impl FnMut(u64)) {
    let until = Instant::now() + stress_time(time);
    let single = number("KVROUTED_SEED");
    let mut seed = single.unwrap_or(1);
    loop {
        let _watch = Watch::new(test, seed);
        body(seed);
        if single.is_some() || (seed >= count && Instant::now() >= until) {
            return;
        }
        seed += 1;
    }
}

/// The command that takes a seed again.
pub(crate) fn command(test: &str, seed: u64) -> String {
    let (file, name) = test.split_once("::").unwrap_or((test, ""));
    format!("KVROUTED_SEED={seed} cargo test --release --test {file} -- --nocapture {name}")
}

/// Says on a failure, or when nothing comes of it, how to take a seed again.
pub(crate) struct Watch {
    command: String,
    /// Dropped when the seed is through.
    done: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// `test` is `file::function`.
    pub(crate) fn new(test: &str, seed: u64) -> Self {
        let command = command(test, seed);
        let (done, wait) = channel();
        let of_thread = command.clone();
        let thread = std::thread::spawn(move || end_when_stuck(&wait, &of_thread));
        Self { command, done: Some(done), thread: Some(thread) }
    }
}

#[allow(clippy::print_stderr, reason = "the test ends without a panic that could say it")]
fn end_when_stuck(wait: &Receiver<()>, command: &str) {
    if std::env::var_os("KVROUTED_TRACE").is_some() {
        eprintln!("next: {command}");
    }
    if wait.recv_timeout(STUCK_AFTER) == Err(RecvTimeoutError::Timeout) {
        eprintln!("nothing for {STUCK_AFTER:?}; to take this again:\n  {command}");
        std::process::abort();
    }
}

impl Drop for Watch {
    #[allow(clippy::print_stderr, reason = "beside the message of the panic")]
    fn drop(&mut self) {
        drop(self.done.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        if std::thread::panicking() {
            eprintln!("to take this again:\n  {}", self.command);
        }
    }
}
