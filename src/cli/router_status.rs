//! The routers in `kvrouted status`: this one, and what each other one adds to the load.

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Table};
use serde_json::{Map, Value, json};

use crate::wire::{RouterStatus, StatusPage};

const HEADER: [&str; 9] =
    ["router", "heard at", "state", "age", "last batch", "workers", "requests", "prefill tokens", "decode blocks"];

/// The rows of the JSON; none for a daemon that shares no load.
pub(super) fn json(page: &StatusPage) -> Vec<Value> {
    let row = |of: &RouterStatus| {
        let counters: Map<String, Value> =
            of.counters.iter().map(|(name, value)| (name.clone(), (*value).into())).collect();
        json!({
            "address": of.address,
            "state": of.state,
            "origin": router_number(of.origin),
            "incarnation": router_number(of.incarnation),
            "sequence": of.sequence,
            "digest": router_number(of.digest),
            "workers": of.workers,
            "requests": of.requests,
            "prefill_tokens": of.prefill_tokens,
            "decode_blocks": of.decode_blocks,
            "age_ms": of.age_ms,
            "problem": of.problem,
            "counters": counters,
        })
    };
    page.routers.iter().map(row).collect()
}

/// A random number, as the log shows it; JSON has no integers of that size.
pub(super) fn router_number(of: u64) -> String {
    format!("{of:016x}")
}

/// The lines of the text.
pub(super) fn text(page: &StatusPage) -> Vec<String> {
    if page.routers.is_empty() {
        return Vec::new();
    }
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header(HEADER);
    let right = |value: u64| Cell::new(value).set_alignment(CellAlignment::Right);
    for of in &page.routers {
        let name = if of.origin == 0 { "-".to_owned() } else { router_number(of.origin) };
        let age = if of.state == "self" { String::new() } else { format!("{} ms", of.age_ms) };
        let mut cells = vec![Cell::new(name), Cell::new(&of.address), Cell::new(&of.state)];
        cells.push(Cell::new(age).set_alignment(CellAlignment::Right));
        cells.extend([of.sequence, of.workers.into(), of.requests, of.prefill_tokens, of.decode_blocks].map(right));
        table.add_row(cells);
    }
    let mut lines = vec![table.to_string()];
    let figure = |name: &str| page.counters.iter().find(|(of, _)| of == name).map_or(0, |(_, value)| *value);
    match (figure("router_join_state"), figure("router_join_missing")) {
        (0, _) => {}
        (1, missing) => lines.push(format!("routers: the load of {missing} peers is not known yet")),
        (_, missing) => lines.push(format!("routers: the load of {missing} peers was not known in time")),
    }
    for of in page.routers.iter().filter(|of| of.problem.is_some()) {
        let name = if of.address.is_empty() { router_number(of.origin) } else { of.address.clone() };
        lines.push(format!("router {name}: {}", of.problem.as_deref().unwrap_or_default()));
    }
    for of in &page.routers {
        let counted: Vec<_> = of.counters.iter().map(|(name, value)| format!("{name} {value}")).collect();
        if !counted.is_empty() {
            lines.push(format!("router {}: {}", router_number(of.origin), counted.join(", ")));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_that_shares_no_load_shows_nothing() {
        let page = StatusPage::default();
        assert!(json(&page).is_empty() && text(&page).is_empty());
    }

    #[test]
    fn each_router_is_a_row_and_problems_have_a_line() {
        let own =
            RouterStatus { address: "tcp://0.0.0.0:1".into(), state: "self".into(), origin: 1, ..Default::default() };
        let other = RouterStatus {
            address: "tcp://b:1".into(),
            state: "quarantined".into(),
            origin: u64::MAX,
            requests: 7,
            problem: Some("it serves another fleet; split them".into()),
            counters: vec![("restarts".into(), 2)],
            ..Default::default()
        };
        let counters = vec![("router_join_state".into(), 2), ("router_join_missing".into(), 1)];
        let page = StatusPage { routers: vec![own, other], counters, ..StatusPage::default() };
        let shown = text(&page).join("\n");
        for part in [
            "0000000000000001",
            "self",
            "quarantined",
            "the load of 1 peers was not known in time",
            "router tcp://b:1: it serves another fleet; split them",
            "router ffffffffffffffff: restarts 2",
        ] {
            assert!(shown.contains(part), "{part} in {shown}");
        }
        let rows = json(&page);
        assert_eq!((&rows[1]["origin"], &rows[1]["requests"]), (&json!("ffffffffffffffff"), &json!(7)));
        assert_eq!(rows[1]["counters"], json!({"restarts": 2}));
    }
}
