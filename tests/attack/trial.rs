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
const COUNT_EVERY: Duration = Duration::from_millis(20);
/// Between two questions of the client whose answers must be right.
const QUESTION_EVERY: Duration = Duration::from_millis(2);
/// How long that client asks before the attack, to know how long an answer takes without it.
const BASELINE: Duration = Duration::from_millis(300);
/// Wrong answers that are shown.
const WRONG_SHOWN_MAX: usize = 5;

/// An attack, and what shows that it did no harm.
pub(crate) struct Attack {
    pub(crate) name: &'static str,
    /// What is done, and how much of it at most.
    pub(crate) description: &'static str,
    pub(crate) run: fn(&mut Trial),
}

/// Makes the tests of a test binary: one for each attack, and the two that only other processes run. `roles` names the
/// modules whose `ROLES` attackers may play. The attacks under `slow` take long: only `scripts/attack` runs them.
macro_rules! attacks {
    (
        roles [$($roles:ident)*]
        attacks [$($module:ident::$name:ident: $description:literal;)*]
        slow [$($slow_module:ident::$slow:ident: $slow_description:literal;)*]
    ) => {
        const ATTACKS: &[$crate::trial::Attack] = &[
            $($crate::trial::Attack { name: stringify!($name), description: $description, run: $module::$name },)*
            $($crate::trial::Attack {
                name: stringify!($slow),
                description: $slow_description,
                run: $slow_module::$slow,
            },)*
        ];

        $(#[test]
        fn $name() {
            ATTACKS.iter().find(|attack| attack.name == stringify!($name)).expect("it is listed").held();
        })*

        #[test]
        #[ignore = "a process that an attack starts"]
        fn attacker() {
            $crate::attackers::play(&[$($roles::ROLES),*].concat());
        }

        #[test]
        #[ignore = "scripts/attack runs it"]
        fn all() {
            $crate::trial::all(ATTACKS);
        }
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
    description: &'static str,
    seconds: f64,
    memory_kib: Span,
    memory_kib_max: u64,
    descriptors: Span,
    /// Of another client, before and during the attack.
    latency_before: Latencies,
    latency_meanwhile: Latencies,
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
        let row = Row { name: self.name, description: self.description, ..Row::default() };
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
            "attack": self.name, "description": self.description, "seconds": self.seconds,
            "memory_kib": span(self.memory_kib), "memory_kib_max": self.memory_kib_max,
            "descriptors": span(self.descriptors),
            "before_us": self.latency_before.json(), "meanwhile_us": self.latency_meanwhile.json(),
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

    /// Reports what a process used; it must not have used more memory than `memory_mib_max`.
    #[track_caller]
    pub(crate) fn used(&mut self, usage: Usage, memory_mib_max: u64) {
        let worst = |ours: Span, theirs: Span| if ours.worst < theirs.worst { theirs } else { ours };
        self.row.memory_kib = worst(self.row.memory_kib, usage.memory_kib);
        self.row.descriptors = worst(self.row.descriptors, usage.descriptors);
        self.row.memory_kib_max = memory_mib_max << 10;
        let Span { worst, .. } = usage.memory_kib;
        self.must(worst <= memory_mib_max << 10, || format!("{} MiB of {memory_mib_max}", worst >> 10));
    }

    /// The most descriptors more than before that the victim had.
    pub(crate) fn descriptors_more(&self) -> u64 {
        self.row.descriptors.worst.saturating_sub(self.row.descriptors.before)
    }

    /// Reports how long another client waited for its answers, which must all be right.
    #[track_caller]
    pub(crate) fn answered(&mut self, answers: Answers) {
        let Answers { before, meanwhile, wrong } = answers;
        self.must(wrong.is_empty(), || format!("wrong answers to another client: {wrong:#?}"));
        self.must(!meanwhile.us.is_empty(), || "another client got no answer".to_owned());
        self.row.latency_before.us.extend(before.us);
        self.row.latency_meanwhile.us.extend(meanwhile.us);
    }
}

/// Counts the open descriptors of a process again and again, and reads its memory at both ends.
pub(crate) struct Watch {
    process: u32,
    memory_before: u64,
    descriptors_before: u64,
    ends: Arc<AtomicBool>,
    counter: JoinHandle<u64>,
}

/// What a process used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Usage {
    pub(crate) memory_kib: Span,
    pub(crate) descriptors: Span,
}

impl Watch {
    pub(crate) fn begin(process: u32) -> Self {
        let (ends, descriptors_before) = (Arc::<AtomicBool>::default(), open_descriptors(process) as u64);
        let ends_there = Arc::clone(&ends);
        let counter = std::thread::spawn(move || {
            let mut most = descriptors_before;
            // Relaxed: the flag stands for nothing but itself, and a late look at it costs one more count.
            while !ends_there.load(Ordering::Relaxed) {
                // It may have ended: the attack says whether it should.
                let open = std::fs::read_dir(format!("/proc/{process}/fd")).map_or(0, Iterator::count);
                most = most.max(open as u64);
                std::thread::sleep(COUNT_EVERY);
            }
            most
        });
        Self { process, memory_before: resident_kib(process), descriptors_before, ends, counter }
    }

    /// The process still runs; its memory at most is the kernel's own figure.
    pub(crate) fn end(self) -> Usage {
        self.ends.store(true, Ordering::Relaxed);
        let most = self.counter.join().expect("counting never panics");
        let memory_kib =
            Span { before: self.memory_before, worst: peak_kib(self.process), after: resident_kib(self.process) };
        let after = open_descriptors(self.process) as u64;
        Usage { memory_kib, descriptors: Span { before: self.descriptors_before, worst: most, after } }
    }
}

/// Round trips, in microseconds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Latencies {
    us: Vec<u64>,
}

impl Latencies {
    fn quantile(&self, part: f64) -> Option<u64> {
        let mut sorted = self.us.clone();
        sorted.sort_unstable();
        sorted.get(((sorted.len() as f64 * part) as usize).min(sorted.len().saturating_sub(1))).copied()
    }

    fn json(&self) -> Value {
        json!({"answers": self.us.len(), "p50": self.quantile(0.5), "p99": self.quantile(0.99)})
    }
}

/// Another client, which behaves: it asks all the time and checks each answer.
pub(crate) struct Bystander {
    ends: Arc<AtomicBool>,
    asks: JoinHandle<Answers>,
}

/// How long right answers took, and what was wrong with the others.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    before: Latencies,
    meanwhile: Latencies,
    wrong: Vec<String>,
}

impl Bystander {
    /// Asks for a while before the attack, and goes on asking.
    pub(crate) fn begin(mut ask: impl FnMut() -> Result<(), String> + Send + 'static) -> Self {
        let (is_attacked, ends) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let (attacked_there, ends_there) = (Arc::clone(&is_attacked), Arc::clone(&ends));
        let asks = std::thread::spawn(move || {
            let mut answers = Answers::default();
            // Relaxed: neither flag stands for more than itself.
            while !ends_there.load(Ordering::Relaxed) && answers.wrong.len() < WRONG_SHOWN_MAX {
                let asked = Instant::now();
                let is_attacked = attacked_there.load(Ordering::Relaxed);
                match ask() {
                    Ok(()) if is_attacked => answers.meanwhile.us.push(asked.elapsed().as_micros() as u64),
                    Ok(()) => answers.before.us.push(asked.elapsed().as_micros() as u64),
                    Err(why) => answers.wrong.push(why),
                }
                std::thread::sleep(QUESTION_EVERY);
            }
            answers
        });
        std::thread::sleep(BASELINE);
        is_attacked.store(true, Ordering::Relaxed);
        Self { ends, asks }
    }

    pub(crate) fn end(self) -> Answers {
        self.ends.store(true, Ordering::Relaxed);
        self.asks.join().expect("a wrong answer is no panic")
    }
}
