//! The trial of a process under one attack: what it had of memory and descriptors, how long another client waited, and
//! what was wrong. The gateway's attacks share this file.
#![allow(dead_code, reason = "two test binaries share this file, and each uses a part of it")]

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::kit::{open_descriptors, peak_kib, resident_kib};

/// How long an attack goes on in `cargo test`, where its size alone does not end it.
const SECONDS_DEFAULT: f64 = 2.0;
/// How often the descriptors of the victim are counted.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Between two questions of the client whose answers must be right.
const QUESTION_EVERY: Duration = Duration::from_millis(2);
/// How long that client asks before the attack, to know how long an answer takes in peace.
const PEACE: Duration = Duration::from_millis(300);
/// Wrong answers that are shown.
const WRONG_SHOWN_MAX: usize = 5;

/// An attack, and what shows that it did no harm.
pub(crate) struct Attack {
    pub(crate) name: &'static str,
    /// What is done, and how much of it at most.
    pub(crate) bound: &'static str,
    pub(crate) run: fn(&mut Trial),
}

/// Makes a list of the attacks, and a test of each. Those that take long are for `scripts/attack` alone.
macro_rules! attacks {
    ([$($module:ident::$name:ident: $bound:literal;)*] slow [$($slow_of:ident::$slow:ident: $slow_bound:literal;)*]) => {
        const ATTACKS: &[Attack] = &[
            $(Attack { name: stringify!($name), bound: $bound, run: $module::$name },)*
            $(Attack { name: stringify!($slow), bound: $slow_bound, run: $slow_of::$slow },)*
        ];

        $(#[test]
        fn $name() {
            ATTACKS.iter().find(|attack| attack.name == stringify!($name)).expect("it is listed").held();
        })*
    };
}

pub(crate) use attacks;

/// One attack while it goes on.
pub(crate) struct Trial {
    row: Row,
    began: Instant,
    lasts: Duration,
}

/// What is reported of an attack.
#[derive(Debug, Default)]
struct Row {
    name: &'static str,
    bound: &'static str,
    seconds: f64,
    memory_kib: Span,
    memory_kib_max: u64,
    descriptors: Span,
    /// Round trips of another client, before and during the attack.
    peace: Waits,
    meanwhile: Waits,
    counts: BTreeMap<String, u64>,
    faults: Vec<String>,
}

/// A quantity before the attack, at its worst, and after it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Span {
    pub(crate) before: u64,
    pub(crate) worst: u64,
    pub(crate) after: u64,
}

impl Attack {
    /// Runs the attack as a test: it panics unless the victim held.
    pub(crate) fn held(&self) {
        let faults = self.tried().faults;
        assert!(faults.is_empty(), "{}: {}", self.name, faults.join("\n"));
    }

    fn tried(&self) -> Row {
        let seconds = std::env::var("KVROUTED_ATTACK_SECONDS").ok().and_then(|text| text.parse().ok());
        let lasts = Duration::from_secs_f64(seconds.unwrap_or(SECONDS_DEFAULT));
        let row = Row { name: self.name, bound: self.bound, ..Row::default() };
        let mut trial = Trial { row, began: Instant::now(), lasts };
        // What is wrong has been said by then; the row says it too.
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (self.run)(&mut trial))) {
            let said = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
            trial.row.faults.push(said.unwrap_or("it panicked").to_owned());
        }
        trial.row.seconds = trial.began.elapsed().as_secs_f64();
        trial.row.write();
        trial.row
    }
}

/// Runs all attacks of a list, one after the other, or those whose names hold `KVROUTED_ATTACK_ONLY`.
pub(crate) fn all(attacks: &[Attack]) {
    let only = std::env::var("KVROUTED_ATTACK_ONLY").unwrap_or_default();
    let chosen = attacks.iter().filter(|attack| attack.name.contains(&only));
    let rows: Vec<Row> = chosen.map(Attack::tried).collect();
    let failed: Vec<&str> = rows.iter().filter(|row| !row.faults.is_empty()).map(|row| row.name).collect();
    assert!(failed.is_empty(), "not held: {failed:?}");
}

impl Row {
    /// Adds a line of JSON to the file that `scripts/attack` reads.
    fn write(&self) {
        let Some(path) = std::env::var_os("KVROUTED_ATTACK_OUT") else { return };
        let span = |span: Span| json!({"before": span.before, "worst": span.worst, "after": span.after});
        let line = json!({
            "attack": self.name, "bound": self.bound, "seconds": self.seconds,
            "memory_kib": span(self.memory_kib), "memory_kib_max": self.memory_kib_max,
            "descriptors": span(self.descriptors),
            "peace_us": self.peace.json(), "meanwhile_us": self.meanwhile.json(),
            "counts": self.counts, "held": self.faults.is_empty(), "faults": self.faults,
        });
        let mut file = std::fs::File::options().create(true).append(true).open(path).expect("the file of rows");
        std::io::Write::write_all(&mut file, format!("{line}\n").as_bytes()).expect("written");
    }
}

impl Trial {
    /// For how long the attack goes on.
    pub(crate) fn lasts(&self) -> Duration {
        self.lasts
    }

    /// A fault of the victim, unless it holds.
    #[track_caller]
    pub(crate) fn must(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            let place = std::panic::Location::caller();
            self.row.faults.push(format!("{}:{}: {}", place.file(), place.line(), what()));
        }
    }

    /// Reports a number, in sum.
    pub(crate) fn count(&mut self, what: &str, number: u64) {
        *self.row.counts.entry(what.to_owned()).or_default() += number;
    }

    /// What was counted so far.
    pub(crate) fn counted(&self, what: &str) -> u64 {
        self.row.counts.get(what).copied().unwrap_or_default()
    }

    /// Something was refused this many times at least, by a counter or a finding that says so.
    #[track_caller]
    pub(crate) fn must_count(&mut self, what: &str, number: u64, least: u64) {
        self.count(what, number);
        self.must(number >= least, || format!("{what} is {number}, not {least} or more"));
    }

    /// What a process had meanwhile; it must not have had more memory than `memory_mib_max`.
    #[track_caller]
    pub(crate) fn saw(&mut self, seen: Seen, memory_mib_max: u64) {
        let worst = |ours: Span, theirs: Span| if ours.worst < theirs.worst { theirs } else { ours };
        self.row.memory_kib = worst(self.row.memory_kib, seen.memory_kib);
        self.row.descriptors = worst(self.row.descriptors, seen.descriptors);
        self.row.memory_kib_max = memory_mib_max << 10;
        let Span { worst, .. } = seen.memory_kib;
        self.must(worst <= memory_mib_max << 10, || format!("{} MiB of {memory_mib_max}", worst >> 10));
    }

    /// The most descriptors more than before that the victim had.
    pub(crate) fn descriptors_more(&self) -> u64 {
        self.row.descriptors.worst.saturating_sub(self.row.descriptors.before)
    }

    /// What another client was answered before and meanwhile. All of it must be right.
    #[track_caller]
    pub(crate) fn answered(&mut self, heard: Heard) {
        let Heard { peace, meanwhile, wrong } = heard;
        self.must(wrong.is_empty(), || format!("wrong answers to another client: {wrong:#?}"));
        self.must(!meanwhile.us.is_empty(), || "another client got no answer".to_owned());
        self.row.peace.us.extend(peace.us);
        self.row.meanwhile.us.extend(meanwhile.us);
    }
}

/// Looks at a process again and again.
pub(crate) struct Watch {
    process: u32,
    memory_before: u64,
    descriptors_before: u64,
    ends: Arc<AtomicBool>,
    looks: JoinHandle<u64>,
}

/// What a process had.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) memory_kib: Span,
    pub(crate) descriptors: Span,
}

impl Watch {
    pub(crate) fn begin(process: u32) -> Self {
        let (ends, descriptors_before) = (Arc::<AtomicBool>::default(), open_descriptors(process) as u64);
        let ends_there = Arc::clone(&ends);
        let looks = std::thread::spawn(move || {
            let mut most = descriptors_before;
            // Relaxed: it is only to end some time.
            while !ends_there.load(Ordering::Relaxed) {
                // It may have ended: the attack says whether it should.
                let open = std::fs::read_dir(format!("/proc/{process}/fd")).map_or(0, Iterator::count);
                most = most.max(open as u64);
                std::thread::sleep(LOOK_EVERY);
            }
            most
        });
        Self { process, memory_before: resident_kib(process), descriptors_before, ends, looks }
    }

    /// The process still runs; its memory at most is the kernel's own figure.
    pub(crate) fn end(self) -> Seen {
        self.ends.store(true, Ordering::Relaxed);
        let most = self.looks.join().expect("it only looks");
        let memory_kib =
            Span { before: self.memory_before, worst: peak_kib(self.process), after: resident_kib(self.process) };
        let after = open_descriptors(self.process) as u64;
        Seen { memory_kib, descriptors: Span { before: self.descriptors_before, worst: most, after } }
    }
}

/// Round trips, in microseconds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Waits {
    us: Vec<u64>,
}

impl Waits {
    fn quantile(&self, part: f64) -> Option<u64> {
        let mut sorted = self.us.clone();
        sorted.sort_unstable();
        sorted.get(((sorted.len() as f64 * part) as usize).min(sorted.len().saturating_sub(1))).copied()
    }

    fn json(&self) -> Value {
        json!({"answers": self.us.len(), "p50": self.quantile(0.5), "p99": self.quantile(0.99)})
    }
}

/// Another client: it behaves, asks all the time, and looks whether each answer is right.
pub(crate) struct Bystander {
    ends: Arc<AtomicBool>,
    asks: JoinHandle<Heard>,
}

/// What it heard.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    peace: Waits,
    meanwhile: Waits,
    wrong: Vec<String>,
}

impl Bystander {
    /// Asks in peace for a while, and goes on asking.
    pub(crate) fn begin(mut ask: impl FnMut() -> Result<(), String> + Send + 'static) -> Self {
        let (is_attacked, ends) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let (attacked_there, ends_there) = (Arc::clone(&is_attacked), Arc::clone(&ends));
        let asks = std::thread::spawn(move || {
            let mut heard = Heard::default();
            // Relaxed: neither tells more than itself.
            while !ends_there.load(Ordering::Relaxed) && heard.wrong.len() < WRONG_SHOWN_MAX {
                let asked = Instant::now();
                let is_attacked = attacked_there.load(Ordering::Relaxed);
                match ask() {
                    Ok(()) if is_attacked => heard.meanwhile.us.push(asked.elapsed().as_micros() as u64),
                    Ok(()) => heard.peace.us.push(asked.elapsed().as_micros() as u64),
                    Err(why) => heard.wrong.push(why),
                }
                std::thread::sleep(QUESTION_EVERY);
            }
            heard
        });
        std::thread::sleep(PEACE);
        is_attacked.store(true, Ordering::Relaxed);
        Self { ends, asks }
    }

    pub(crate) fn end(self) -> Heard {
        self.ends.store(true, Ordering::Relaxed);
        self.asks.join().expect("a wrong answer is no panic")
    }
}
