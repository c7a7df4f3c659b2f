//! The result of a soak.

use std::collections::BTreeMap;
use std::time::Duration;

use comfy_table::{Table, presets};
use serde_json::{Value, json};

use super::gateway::Tally;

/// Memory that may come between the middle third of a soak and its last, beside a twentieth.
const GROWTH_KIB: u64 = 16 << 10;
/// The same of a soak too short for its allocator to have come to rest.
const GROWTH_SHORT_KIB: u64 = 64 << 10;
const SHORT: Duration = Duration::from_secs(120);

/// What a process had, time after time.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) rss_kib: Vec<u64>,
}

impl Memory {
    /// The median of the third number `third` of three.
    fn median_kib(&self, third: usize) -> u64 {
        let length = self.rss_kib.len() / 3;
        let mut part = self.rss_kib[third * length..(third + 1) * length].to_vec();
        part.sort_unstable();
        part.get(length / 2).copied().unwrap_or_default()
    }
}

/// What there is at the end, when all clients have left.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LeftOver {
    pub(crate) connections: u64,
    pub(crate) waiting: u64,
    pub(crate) bookings: u64,
    /// Descriptors more than before the first client.
    pub(crate) descriptors: i64,
}

/// All of it.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) seed: u64,
    pub(crate) lasted: Duration,
    pub(crate) tally: Tally,
    /// Overlaps that were compared when nothing changed any more.
    pub(crate) at_rest: u64,
    pub(crate) memory: Memory,
    pub(crate) left_over: LeftOver,
    /// Rounds by vice.
    pub(crate) rounds: BTreeMap<String, u64>,
    /// The daemon's counters that speak of clients.
    pub(crate) counters: BTreeMap<String, u64>,
    pub(crate) batches: u64,
}

impl Report {
    /// Everything that is not as it should be.
    pub(crate) fn faults(&self) -> Vec<String> {
        let mut faults = self.tally.wrong_shown.clone();
        let mut must = |holds: bool, what: String| {
            if !holds {
                faults.push(what);
            }
        };
        let LeftOver { connections, waiting, bookings, descriptors } = self.left_over;
        must(connections == 0, format!("{connections} connections are stuck"));
        must(waiting == 0, format!("{waiting} requests wait for ever"));
        must(bookings == 0, format!("{bookings} bookings are left"));
        must(descriptors <= 4, format!("{descriptors} descriptors are left"));
        let (middle, last) = (self.memory.median_kib(1), self.memory.median_kib(2));
        let allowed = if self.lasted < SHORT { GROWTH_SHORT_KIB } else { GROWTH_KIB };
        must(last <= middle + middle / 20 + allowed, format!("memory grows: {middle} KiB, then {last} KiB"));
        must(self.tally.exact > 0 && self.tally.bookings > 0 && self.at_rest > 0, "nothing was checked".to_owned());
        must(self.rounds.values().all(|rounds| *rounds > 0), format!("some were idle: {:?}", self.rounds));
        faults
    }

    pub(crate) fn json(&self) -> Value {
        let Self { tally, memory, left_over, .. } = self;
        let us = |quantile| tally.round_trip_us.value_at_quantile(quantile);
        json!({
            "seed": self.seed, "seconds": self.lasted.as_secs_f64(), "batches": self.batches,
            "replies": tally.replies, "overlaps": tally.overlaps, "overlaps_exact": tally.exact,
            "overlaps_at_rest": self.at_rest, "over_counts": tally.over_counts, "wrong": tally.wrong,
            "bookings": tally.bookings, "waits_refused": tally.waits_refused,
            "round_trip_us": {"p50": us(0.5), "p99": us(0.99), "max": tally.round_trip_us.max()},
            "rss_kib": {"first_third": memory.median_kib(0), "middle_third": memory.median_kib(1),
                "last_third": memory.median_kib(2), "max": memory.rss_kib.iter().max()},
            "left_over": {"connections": left_over.connections, "waiting": left_over.waiting,
                "bookings": left_over.bookings, "descriptors": left_over.descriptors},
            "chaos_rounds": self.rounds, "counters": self.counters, "faults": self.faults(),
        })
    }

    pub(crate) fn table(&self) -> String {
        let said = self.json();
        let mut table = Table::new();
        table.load_style(presets::UTF8_FULL_CONDENSED);
        for (name, value) in said.as_object().into_iter().flatten() {
            match value {
                Value::Object(parts) => {
                    let parts: Vec<_> = parts.iter().map(|(part, value)| format!("{part} {value}")).collect();
                    table.add_row([name.clone(), parts.join("\n")]);
                }
                value => drop(table.add_row([name.clone(), value.to_string()])),
            }
        }
        format!("{table}\n")
    }
}
