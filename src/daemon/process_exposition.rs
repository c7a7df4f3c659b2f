//! The process in metrics and status: its memory by part, its open files, and its threads.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use super::statistics::Statistics;
use crate::budget::{MemoryPart, Shed};
use crate::watchdog::ThreadMark;

/// Writes the metrics of the process.
pub(super) fn encode(encoder: &mut DescriptorEncoder<'_>, statistics: &Statistics) -> Result<(), fmt::Error> {
    memory(encoder, statistics)?;
    open_files(encoder, statistics)?;
    threads(encoder, statistics)
}

fn gauge(encoder: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: i64) -> Result<(), fmt::Error> {
    encoder.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&value)
}

/// A family of gauges with one label each.
fn gauges<'a>(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help, label): (&str, &str, &'static str),
    rows: impl Iterator<Item = (&'a str, i64)>,
) -> Result<(), fmt::Error> {
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (of, value) in rows {
        family.encode_family(&[(label, of)].as_slice())?.encode_gauge(&value)?;
    }
    Ok(())
}

fn memory(encoder: &mut DescriptorEncoder<'_>, statistics: &Statistics) -> Result<(), fmt::Error> {
    let (memory, parts) = (&statistics.memory, || MemoryPart::ALL.iter());
    let accounts = &memory.accounts;
    let help = "Memory that a part of the daemon takes, as its accounts say.";
    let now = parts().map(|part| (part.name(), accounts.used(*part) as i64));
    gauges(encoder, ("kvrouted_memory_bytes", help, "part"), now)?;
    let division = accounts.division();
    let is_bounded = division.bytes_max() < u64::MAX;
    let help = "The most memory that a part may take. No samples without a budget.";
    let most = parts().filter(|_| is_bounded).map(|part| (part.name(), division.bound(*part) as i64));
    gauges(encoder, ("kvrouted_memory_bytes_max", help, "part"), most)?;
    let (used, resident) = (accounts.used_in_all() as i64, memory.resident.get() as i64);
    let budget = if is_bounded { division.bytes_max() as i64 } else { 0 };
    gauge(encoder, "kvrouted_memory_budget_bytes", "The memory budget of the process; 0 = none.", budget)?;
    gauge(encoder, "kvrouted_memory_resident_bytes", "Resident memory of the process.", resident)?;
    let help = "Resident memory less what the accounts say: slack of the allocator and what no account counts. Below 0 if reserved memory is not touched yet.";
    gauge(encoder, "kvrouted_memory_unaccounted_bytes", help, resident - used)?;
    let help = "1 for each thing that the daemon refuses now because its memory budget is nearly used.";
    let shed = Shed::ALL.iter().map(|shed| (shed.name(), i64::from(memory.flags.has(*shed))));
    gauges(encoder, ("kvrouted_memory_shed", help, "what"), shed)
}

fn open_files(encoder: &mut DescriptorEncoder<'_>, statistics: &Statistics) -> Result<(), fmt::Error> {
    let rows = statistics.open_files();
    let help = "Open files set aside for what is open now, by what takes them.";
    gauges(encoder, ("kvrouted_open_files", help, "for"), rows.iter().map(|(name, now, _)| (*name, *now as i64)))?;
    let help = "The most open files for it.";
    gauges(
        encoder,
        ("kvrouted_open_files_max", help, "for"),
        rows.iter().map(|(name, _, most)| (*name, *most as i64)),
    )?;
    let files = &statistics.open_files;
    gauge(encoder, "kvrouted_open_files_limit", "The limit of open files.", capped(files.descriptors.limit))?;
    gauge(encoder, "kvrouted_open_files_now", "Open files of the process.", capped(files.open.get()))
}

fn capped(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn threads(encoder: &mut DescriptorEncoder<'_>, statistics: &Statistics) -> Result<(), fmt::Error> {
    let marks = statistics.watchlist.marks();
    type Pick = fn(&ThreadMark) -> f64;
    let figures: [(&str, &str, Pick); 2] = [
        ("kvrouted_thread_stalled_seconds", "How long the thread has been stalled by now; 0 = it is not.", |mark| {
            mark.stalled_ms() as f64 / 1e3
        }),
        ("kvrouted_thread_longest_stall_seconds", "The longest stall of the thread.", |mark| {
            mark.longest_ms() as f64 / 1e3
        }),
    ];
    for (name, help, pick) in figures {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for mark in &marks {
            family.encode_family(&[("thread", mark.name())].as_slice())?.encode_gauge(&pick(mark))?;
        }
    }
    let help = "Times the thread stayed in one round of its loop for process.stalled_ms_max.";
    let name = "kvrouted_thread_stalls";
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for mark in &marks {
        let value = mark.stalls();
        family
            .encode_family(&[("thread", mark.name())].as_slice())?
            .encode_counter::<NoLabelSet, u64, u64>(&value, None)?;
    }
    Ok(())
}

/// The same figures for a status reply, by name.
pub(super) fn status(statistics: &Statistics) -> Vec<(String, u64)> {
    let memory = &statistics.memory;
    let (accounts, division) = (&memory.accounts, memory.accounts.division());
    let mut figures = vec![
        ("memory_used_bytes".to_owned(), memory.used_bytes()),
        ("memory_accounted_bytes".to_owned(), accounts.used_in_all()),
        ("memory_resident_bytes".to_owned(), memory.resident.get()),
        ("open_files_limit".to_owned(), statistics.open_files.descriptors.limit),
        ("open_files_now".to_owned(), statistics.open_files.open.get()),
        ("threads_stalled_now".to_owned(), stalled_now(statistics)),
        ("is_ready".to_owned(), u64::from(statistics.is_ready())),
    ];
    if division.bytes_max() < u64::MAX {
        figures.push(("memory_budget_bytes".to_owned(), division.bytes_max()));
        for part in MemoryPart::ALL {
            figures.push((format!("memory_{}_bytes", part.name()), accounts.used(*part)));
            figures.push((format!("memory_{}_bytes_max", part.name()), division.bound(*part)));
        }
    }
    for shed in Shed::ALL {
        figures.push((format!("memory_sheds_{}_now", shed.name()), u64::from(memory.flags.has(*shed))));
    }
    for (name, now, most) in statistics.open_files() {
        figures.push((format!("open_files_{name}"), now));
        figures.push((format!("open_files_{name}_max"), most));
    }
    figures
}

fn stalled_now(statistics: &Statistics) -> u64 {
    statistics.watchlist.marks().iter().filter(|mark| mark.stalled_ms() > 0).count() as u64
}
