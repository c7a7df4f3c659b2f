//! The result of a comparison: a table for people, and one JSON object for programs.

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Table};
use serde_json::{Value, json};

use super::figures::Distribution;
use super::measure::Measured;

/// A policy or bound, and its medians over seeds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// Its name.
    pub policy: String,
    /// Its figures.
    pub figures: Measured,
    /// Requests in a second at which 90 % of them meet the SLO; `None` = not searched, or none found.
    pub capacity_rps: Option<f64>,
    /// The same as a factor of the workload's own rate, or as live sessions.
    pub capacity_load: Option<f64>,
}

impl Row {
    /// The row as JSON: times in seconds, shares from 0 to 1.
    #[must_use]
    pub fn json(&self) -> Value {
        let figures = &self.figures;
        json!({
            "policy": self.policy,
            "is_bound": self.policy.ends_with("(bound)"),
            "ttft_s": figures.ttft_s,
            "tpot_s": figures.tpot_s,
            "e2e_s": figures.e2e_s,
            "goodput": figures.goodput,
            "hit_rate": figures.hit_rate,
            "capacity_rps": self.capacity_rps,
            "capacity_load": self.capacity_load,
            "served_rps": figures.served_rps,
            "requests": figures.requests,
            "refused": figures.refused,
            "preemptions": figures.preemptions,
            "prefill_s_saved": figures.prefill_s_saved,
            "worker_ttft_p90_s": figures.worker_ttft_p90_s,
            "ttft_error": figures.ttft_error,
            "ttft_error_p99": figures.ttft_error_p99,
            "decision_regret_s": figures.regret_s,
            "imbalance_s": figures.imbalance_s,
        })
    }
}

/// The whole result. `settings` is what the runs depended on.
#[must_use]
pub fn json(rows: &[Row], settings: &Value, seeds: &[u64]) -> Value {
    json!({ "policies": rows.iter().map(Row::json).collect::<Vec<_>>(), "settings": settings, "seeds": seeds })
}

/// The columns of the table.
const COLUMNS: [&str; 17] = [
    "policy",
    "TTFT mean s",
    "p50",
    "p90",
    "p99",
    "TPOT mean ms",
    "p99",
    "E2E mean s",
    "p99",
    "goodput",
    "hits",
    "capacity /s",
    "saved s",
    "preempted",
    "regret ms",
    "imbalance ms",
    "TTFT error",
];

/// The cells of a row, as [`COLUMNS`] has them.
fn cells(row: &Row) -> [String; 17] {
    let figures = &row.figures;
    let Distribution { mean, p50, p90, p99 } = figures.ttft_s;
    let maybe = |value: Option<f64>, of: fn(f64) -> String| value.map_or_else(|| "–".into(), of);
    let percent = |share: f64| format!("{:.1} %", share * 100.0);
    [
        row.policy.clone(),
        seconds(mean),
        seconds(p50),
        seconds(p90),
        seconds(p99),
        format!("{:.1}", figures.tpot_s.mean * 1e3),
        format!("{:.1}", figures.tpot_s.p99 * 1e3),
        seconds(figures.e2e_s.mean),
        seconds(figures.e2e_s.p99),
        percent(figures.goodput),
        percent(figures.hit_rate),
        maybe(row.capacity_rps, |rps| format!("{rps:.2}")),
        format!("{:.0}", figures.prefill_s_saved),
        format!("{:.0}", figures.preemptions),
        maybe(figures.regret_s, |regret_s| format!("{:.0}", regret_s * 1e3)),
        maybe(figures.imbalance_s, |imbalance_s| format!("{:.0}", imbalance_s * 1e3)),
        maybe(figures.ttft_error, |error| format!("{:.0} %", error * 100.0)),
    ]
}

fn seconds(value_s: f64) -> String {
    if value_s < 10.0 { format!("{value_s:.3}") } else { format!("{value_s:.1}") }
}

/// The table for a terminal. Without colours.
#[must_use]
pub fn table(rows: &[Row]) -> String {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header(COLUMNS);
    for row in rows {
        let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
        let mut row: Vec<Cell> = cells(row).into_iter().map(right).collect();
        if let Some(policy) = row.first_mut() {
            *policy = policy.clone().set_alignment(CellAlignment::Left);
        }
        table.add_row(row);
    }
    table.to_string()
}

/// The same table in HTML.
#[must_use]
pub fn html_table(rows: &[Row], ours: &str) -> String {
    let head: String = COLUMNS.iter().map(|column| format!("<th>{}</th>", escaped(column))).collect();
    let row = |row: &Row| {
        let class = if row.policy == ours { " class=\"ours\"" } else { "" };
        let cells: String = cells(row).iter().map(|cell| format!("<td>{}</td>", escaped(cell))).collect();
        format!("<tr{class}>{cells}</tr>\n")
    };
    format!(
        "<table><thead><tr>{head}</tr></thead><tbody>\n{}</tbody></table>\n",
        rows.iter().map(row).collect::<String>()
    )
}

/// Text as it may stand in HTML and SVG.
#[must_use]
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(policy: &str) -> Row {
        let ttft_s = Distribution { mean: 0.5, p50: 0.25, p90: 1.0, p99: 12.0 };
        let figures = Measured { ttft_s, goodput: 0.875, regret_s: Some(0.004), ..Measured::default() };
        Row { policy: policy.into(), figures, ..Row::default() }
    }

    #[test]
    fn the_json_has_the_keys_that_readers_rely_on() {
        let value = json(&[row("latency")], &json!({ "workers": 8 }), &[1, 2]);
        let policy = &value["policies"][0];
        assert_eq!((policy["policy"].as_str(), policy["ttft_s"]["p99"].as_f64()), (Some("latency"), Some(12.0)));
        for key in ["ttft_s", "tpot_s", "e2e_s", "goodput", "hit_rate", "capacity_rps", "preemptions", "refused"] {
            assert!(policy.get(key).is_some(), "{key}");
        }
        assert!(policy["capacity_rps"].is_null() && policy["ttft_error"].is_null());
        assert_eq!((value["settings"]["workers"].as_u64(), value["seeds"][1].as_u64()), (Some(8), Some(2)));
    }

    #[test]
    fn the_table_has_a_line_for_each_policy_and_a_dash_for_the_unknown() {
        let text = table(&[row("latency"), row("lpwl")]);
        let line = text.lines().find(|line| line.contains("lpwl")).expect("its line");
        assert!(line.contains("87.5 %") && line.contains("12.0") && line.contains('–'), "{line}");
    }

    #[test]
    fn names_are_escaped_in_html() {
        let html = html_table(&[row("<b>&"), row("ours")], "ours");
        assert!(html.contains("<td>&lt;b&gt;&amp;</td>") && html.matches("class=\"ours\"").count() == 1);
    }
}
