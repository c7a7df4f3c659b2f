//! What a soak saw, and what must hold.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};

/// Growth of memory between the middle third and the last that is not a leak, beside a twentieth: what an allocator keeps.
const GROWTH_KIB: u64 = 8 << 10;
/// The same of a soak in which caches still fill.
const GROWTH_SHORT_KIB: u64 = 128 << 10;
const SHORT: Duration = Duration::from_secs(300);
/// Descriptors that may come between the thirds: connections to callers and engines go up and down.
const DESCRIPTORS_MORE: u64 = 16;
/// Faults that are told one by one.
const FAULTS_TOLD: usize = 20;

/// Counts what callers saw.
#[derive(Default)]
pub(crate) struct Tally {
    counts: Mutex<BTreeMap<String, u64>>,
    faults: Mutex<Vec<String>>,
}

impl Tally {
    /// One more of `what`.
    pub(crate) fn count(&self, what: impl Into<String>) {
        *self.counts.lock().entry(what.into()).or_default() += 1;
    }

    /// A fault, unless it holds.
    pub(crate) fn must(&self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.faults.lock().push(what());
        }
    }
}

/// A process whose memory and descriptors are looked at.
pub(crate) struct Watched {
    name: &'static str,
    pid: u32,
    rss_kib: Vec<u64>,
    descriptors: Vec<u64>,
}

impl Watched {
    /// This process.
    pub(crate) fn of(name: &'static str, pid: u32) -> Self {
        Self { name, pid, rss_kib: Vec::new(), descriptors: Vec::new() }
    }

    /// Looks now.
    pub(crate) fn look(&mut self) {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap_or_default();
        let rss = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = rss.and_then(|rest| rest.split_whitespace().next()).and_then(|text| text.parse().ok());
        self.rss_kib.push(kib.unwrap_or(0));
        self.descriptors.push(std::fs::read_dir(format!("/proc/{}/fd", self.pid)).map_or(0, |all| all.count() as u64));
    }

    fn is_there(&self) -> bool {
        self.rss_kib.iter().all(|kib| *kib > 0)
    }
}

/// The median of a third of the values.
fn median(values: &[u64], third: usize) -> u64 {
    let length = values.len() / 3;
    let mut part = values[third * length..(third + 1) * length].to_vec();
    part.sort_unstable();
    part.get(length / 2).copied().unwrap_or_default()
}

/// All of it.
pub(crate) struct Report {
    pub(crate) seed: u64,
    pub(crate) lasted: Duration,
    pub(crate) deaths: u64,
    pub(crate) stuck: bool,
    pub(crate) bookings: Option<u64>,
    pub(crate) watched: [Watched; 2],
    pub(crate) tally: Arc<Tally>,
}

impl Report {
    /// Everything that is not as it should be.
    pub(crate) fn faults(&self) -> Vec<String> {
        let seen = self.tally.faults.lock();
        let mut faults: Vec<String> = seen.iter().take(FAULTS_TOLD).cloned().collect();
        if seen.len() > FAULTS_TOLD {
            faults.push(format!("and {} more", seen.len() - FAULTS_TOLD));
        }
        let mut must = |holds: bool, what: String| {
            if !holds {
                faults.push(what);
            }
        };
        must(!self.stuck, "some callers never got an answer".to_owned());
        must(self.bookings == Some(0), format!("bookings are left: {:?}", self.bookings));
        let allowed = if self.lasted < SHORT { GROWTH_SHORT_KIB } else { GROWTH_KIB };
        for process in &self.watched {
            let name = process.name;
            must(process.is_there(), format!("the {name} ended"));
            let (middle, last) = (median(&process.rss_kib, 1), median(&process.rss_kib, 2));
            must(
                last <= middle + middle / 20 + allowed,
                format!("the {name}'s memory grows: {middle} KiB, then {last}"),
            );
            let (middle, last) = (median(&process.descriptors, 1), median(&process.descriptors, 2));
            must(last <= middle + DESCRIPTORS_MORE, format!("the {name}'s descriptors grow: {middle}, then {last}"));
        }
        let counts = self.tally.counts.lock();
        must(counts.get("well-behaved: whole").is_some_and(|count| *count > 0), "nothing was answered".to_owned());
        must(self.lasted < SHORT || self.deaths > 0, "no engine died".to_owned());
        faults
    }

    pub(crate) fn json(&self) -> Value {
        let thirds = |values: &[u64]| json!([median(values, 0), median(values, 1), median(values, 2)]);
        let processes = self.watched.iter().map(|process| {
            let descriptors = thirds(&process.descriptors);
            let last = process.descriptors.last();
            let said =
                json!({"rss_kib": thirds(&process.rss_kib), "descriptors": descriptors, "descriptors_at_end": last});
            (process.name.to_owned(), said)
        });
        json!({
            "seed": self.seed, "seconds": self.lasted.as_secs_f64(), "engine_deaths": self.deaths,
            "bookings_left": self.bookings, "callers": *self.tally.counts.lock(),
            "thirds": processes.collect::<serde_json::Map<_, _>>(), "faults": self.faults(),
        })
    }

    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        for (name, value) in self.json().as_object().into_iter().flatten() {
            // Writing to a string cannot fail.
            let _ = match value {
                Value::Object(parts) => {
                    let parts: Vec<_> = parts.iter().map(|(part, value)| format!("  {part}: {value}")).collect();
                    writeln!(text, "{name}\n{}", parts.join("\n"))
                }
                value => writeln!(text, "{name}: {value}"),
            };
        }
        text
    }
}
