//! The seeds of a test, and the command that it prints to repeat a failing seed.

use std::ops::RangeInclusive;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Timeout of one seed, after which the test prints the seed and ends: long enough for a busy machine under a
/// sanitizer.
const STUCK_AFTER: Duration = Duration::from_secs(300);

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is a number, not '{text}'")))
}

/// The seed `KVROUTED_SEED` alone; or the seeds from 1 to `KVROUTED_SEEDS`, or to `default`.
pub(crate) fn seeds(default: u64) -> RangeInclusive<u64> {
    match number("KVROUTED_SEED") {
        Some(seed) => seed..=seed,
        None => 1..=number("KVROUTED_SEEDS").unwrap_or(default),
    }
}

/// The number of seconds in `KVROUTED_STRESS_SECONDS`, or `default`.
pub(crate) fn stress_time(default: Duration) -> Duration {
    number("KVROUTED_STRESS_SECONDS").map_or(default, Duration::from_secs)
}

/// Calls `body` with one seed after another: with the first `count` seeds, and with more until [`stress_time`] has
/// passed. If `KVROUTED_SEED` is set, only with that seed.
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

/// The command that repeats a seed.
pub(crate) fn command(test: &str, seed: u64) -> String {
    let (binary, name) = test.split_once("::").unwrap_or((test, ""));
    format!("KVROUTED_SEED={seed} cargo test --release --test {binary} -- --nocapture {name}")
}

/// Prints the command that repeats a seed if the test fails or hangs.
pub(crate) struct Watch {
    command: String,
    /// Dropped at the end of the seed.
    done: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// `test` is `binary::path::of::the::test`.
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
        eprintln!("no result for {STUCK_AFTER:?}; to repeat this seed:\n  {command}");
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
            eprintln!("to repeat this seed:\n  {}", self.command);
        }
    }
}
