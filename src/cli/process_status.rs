//! The process in `kvrouted status`: its memory by part, its open files, and whether its threads go round. All figures
//! come by name among the counters of a status page; a daemon that does not send them shows nothing.

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Table};
use serde_json::{Map, Value, json};

use crate::budget::{MemoryPart, Shed};
use crate::wire::StatusPage;

/// What takes open files, by the names in a status page.
const OPEN_FILES: [&str; 4] = ["reserved", "connections", "lanes", "publishers"];

fn figure(page: &StatusPage, name: &str) -> Option<u64> {
    page.counters.iter().find(|(of, _)| of == name).map(|(_, value)| *value)
}

/// The parts of the memory: what each takes, and the most that it may take.
fn parts(page: &StatusPage) -> impl Iterator<Item = (&'static str, u64, u64)> {
    MemoryPart::ALL.iter().filter_map(|part| {
        let name = part.name();
        let (now, most) = (format!("memory_{name}_bytes"), format!("memory_{name}_bytes_max"));
        Some((name, figure(page, &now)?, figure(page, &most)?))
    })
}

fn open_files(page: &StatusPage) -> impl Iterator<Item = (&'static str, u64, u64)> {
    OPEN_FILES.iter().filter_map(|name| {
        let (now, most) = (format!("open_files_{name}"), format!("open_files_{name}_max"));
        Some((*name, figure(page, &now)?, figure(page, &most)?))
    })
}

/// What the daemon gives up now.
fn shed(page: &StatusPage) -> impl Iterator<Item = &'static Shed> {
    let is_shed = |shed: &&Shed| figure(page, &format!("memory_sheds_{}_now", shed.name())).is_some_and(|now| now > 0);
    Shed::ALL.iter().filter(is_shed)
}

/// The fields of the JSON object: empty for a daemon that does not send these figures.
pub(super) fn json(page: &StatusPage) -> Map<String, Value> {
    let mut process = Map::new();
    let rows = |rows: &mut dyn Iterator<Item = (&'static str, u64, u64)>, unit: &str| -> Map<String, Value> {
        let row =
            |(name, now, most): (&str, u64, u64)| (name.to_owned(), json!({unit: now, format!("{unit}_max"): most}));
        rows.map(row).collect()
    };
    if let Some(used) = figure(page, "memory_used_bytes") {
        let of = |name: &str| figure(page, name);
        let sheds: Vec<&str> = shed(page).map(|shed| shed.name()).collect();
        let memory = json!({
            "budget_bytes": of("memory_budget_bytes"),
            "used_bytes": used,
            "accounted_bytes": of("memory_accounted_bytes"),
            "resident_bytes": of("memory_resident_bytes"),
            "sheds": sheds,
            "parts": rows(&mut parts(page), "bytes"),
        });
        process.insert("memory".into(), memory);
    }
    if let Some(limit) = figure(page, "open_files_limit") {
        let open = figure(page, "open_files_now");
        let files = json!({"limit": limit, "open": open, "for": rows(&mut open_files(page), "files")});
        process.insert("open_files".into(), files);
    }
    if let Some(ready) = figure(page, "is_ready") {
        process.insert("ready".into(), (ready > 0).into());
    }
    process
}

/// The lines of the text.
pub(super) fn text(page: &StatusPage) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(used) = figure(page, "memory_used_bytes") {
        let of = |name| figure(page, name).unwrap_or(0);
        let (accounted, resident) = (mib(of("memory_accounted_bytes")), mib(of("memory_resident_bytes")));
        let budget =
            figure(page, "memory_budget_bytes").map_or("no budget".to_owned(), |budget| format!("of {}", mib(budget)));
        lines.push(format!("memory: {} used, {budget}; accounts {accounted}, resident {resident}", mib(used)));
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED).set_header(["memory of", "now", "at most"]);
        let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
        let mut is_empty = true;
        for (name, now, most) in parts(page) {
            is_empty = false;
            table.add_row([Cell::new(name.replace('_', " ")), right(mib(now)), right(mib(most))]);
        }
        lines.extend((!is_empty).then(|| table.to_string()));
        lines.extend(shed(page).map(|shed| format!("memory is short: {}", shed.meaning())));
    }
    if let Some(limit) = figure(page, "open_files_limit") {
        let rows: Vec<String> = open_files(page).map(|(name, now, most)| format!("{name} {now} of {most}")).collect();
        let open = figure(page, "open_files_now").unwrap_or(0);
        lines.push(format!("open files: {open} of {limit}; set aside: {}", rows.join(", ")));
    }
    let is_joining = figure(page, "router_join_state") == Some(1);
    if figure(page, "is_ready") == Some(0) && is_joining {
        lines.push("not ready: the load of other routers is not known yet".to_owned());
    } else if figure(page, "is_ready") == Some(0) {
        lines.push("not ready: a thread is stalled; see the finding thread_stalled".to_owned());
    }
    lines
}

/// A number of bytes for people.
fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(counters: &[(&str, u64)]) -> StatusPage {
        let counters = counters.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        StatusPage { counters, ..StatusPage::default() }
    }

    #[test]
    fn a_daemon_without_these_figures_shows_nothing() {
        assert!(json(&page(&[("routed", 3)])).is_empty() && text(&page(&[("routed", 3)])).is_empty());
    }

    #[test]
    fn memory_open_files_and_stalls_are_shown() {
        let page = page(&[
            ("memory_used_bytes", 3 << 20),
            ("memory_accounted_bytes", 2 << 20),
            ("memory_resident_bytes", 3 << 20),
            ("memory_budget_bytes", 64 << 20),
            ("memory_index_bytes", 1 << 20),
            ("memory_index_bytes_max", 32 << 20),
            ("memory_sheds_dumps_now", 1),
            ("memory_sheds_stores_now", 0),
            ("open_files_limit", 1024),
            ("open_files_now", 40),
            ("open_files_lanes", 0),
            ("open_files_lanes_max", 320),
            ("is_ready", 0),
        ]);
        let shown = Value::from(json(&page));
        assert_eq!(shown["memory"]["parts"], json!({"index": {"bytes": 1 << 20, "bytes_max": 32 << 20}}));
        assert_eq!((&shown["memory"]["sheds"], &shown["ready"]), (&json!(["dumps"]), &json!(false)));
        assert_eq!(
            shown["open_files"],
            json!({"limit": 1024, "open": 40, "for": {"lanes": {"files": 0, "files_max": 320}}})
        );
        let text = text(&page).join("\n");
        assert!(text.starts_with("memory: 3.0 MiB used, of 64.0 MiB; accounts 2.0 MiB, resident 3.0 MiB\n"), "{text}");
        assert!(
            text.contains("32.0 MiB") && text.contains("memory is short: ") && text.contains("not ready"),
            "{text}"
        );
        assert!(text.contains("open files: 40 of 1024; set aside: lanes 0 of 320"), "{text}");
    }
}
