//! Tables and JSON about two policies on one load.

use std::path::Path;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Table};
use serde_json::{Value, json};

use super::exit::Failure;
use super::simulate;
use crate::simulate::experiment::loads_at;
use crate::simulate::measure::Measured;
use crate::simulate::picture::{Section, panels};
use crate::simulate::policy_trials::{Difference, FIGURES, Figure, Pair, Stretch};
use crate::simulate::report::Row;

/// Shares of the recorded load of the curves.
const LOADS: [f64; 7] = [0.5, 0.7, 0.85, 1.0, 1.15, 1.3, 1.5];

/// Figures by load.
pub(super) type OverLoads = Vec<(f64, Measured)>;

fn right(text: String) -> Cell {
    Cell::new(text).set_alignment(CellAlignment::Right)
}

/// The loads of the curves around a load.
pub(super) fn curve_loads(stretch: &Stretch, load: f64) -> Vec<f64> {
    loads_at(&LOADS, load, stretch.is_closed())
}

/// What a load counts.
pub(super) fn load_unit(stretch: &Stretch) -> &'static str {
    if stretch.is_closed() { "live sessions" } else { "times the recorded rate" }
}

/// Two policies side by side, with the difference and its interval.
pub(super) fn difference_table(names: [&str; 2], pair: &Pair) -> String {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header(["", names[0], names[1], "difference", "95 % interval"]);
    for Figure { name, unit, scale, of } in &FIGURES {
        let difference = Difference::of(&pair.runs[0], &pair.runs[1], of);
        let places = if *unit == "s" { 3 } else { 1 };
        let text = |value: f64| format!("{:.places$} {unit}", value * scale);
        let signed = |value: f64| format!("{:+.places$}", value * scale);
        let interval = difference.interval;
        table.add_row([
            Cell::new(name),
            right(text(difference.before)),
            right(text(difference.after)),
            right(format!("{} {}", signed(interval.median), if *unit == "%" { "points" } else { unit })),
            right(format!(
                "{} to {}{}",
                signed(interval.low),
                signed(interval.high),
                if difference.is_clear() { "" } else { " (unclear)" }
            )),
        ]);
    }
    table.to_string()
}

/// The same as JSON.
pub(super) fn difference_json(pair: &Pair) -> Value {
    let one = |figure: &Figure| {
        let Difference { before, after, interval } = Difference::of(&pair.runs[0], &pair.runs[1], figure.of);
        let of = json!({
            "before": before * figure.scale, "after": after * figure.scale, "unit": figure.unit,
            "difference": interval.median * figure.scale,
            "low": interval.low * figure.scale, "high": interval.high * figure.scale,
        });
        (figure.name.to_owned(), of)
    };
    Value::Object(FIGURES.iter().map(one).collect())
}

/// The curves of two policies over load, as a table.
pub(super) fn curve_table(unit: &str, names: [&str; 2], curves: &[OverLoads]) -> String {
    let mut table = Table::new();
    let [before, after] = names;
    table.load_style(UTF8_FULL_CONDENSED).set_header([
        unit.to_owned(),
        format!("TTFT mean s {before}"),
        after.to_owned(),
        format!("E2E mean s {before}"),
        after.to_owned(),
        format!("goodput {before}"),
        after.to_owned(),
    ]);
    let [before, after] = curves else { return String::new() };
    for ((load, before), (_, after)) in before.iter().zip(after) {
        let percent = |share: f64| right(format!("{:.1} %", share * 100.0));
        let seconds = |value: f64| right(format!("{value:.3}"));
        table.add_row([
            right(format!("{load:.2}")),
            seconds(before.ttft_s.mean),
            seconds(after.ttft_s.mean),
            seconds(before.e2e_s.mean),
            seconds(after.e2e_s.mean),
            percent(before.goodput),
            percent(after.goodput),
        ]);
    }
    table.to_string()
}

/// The same as JSON.
pub(super) fn curve_json(curves: &[OverLoads]) -> Value {
    let [before, after] = curves else { return Value::Null };
    let point = |((load, before), (_, after)): (&(f64, Measured), &(f64, Measured))| {
        let figures = |of: &Measured| json!({ "ttft_s": of.ttft_s, "tpot_s": of.tpot_s, "e2e_s": of.e2e_s, "goodput": of.goodput, "hit_rate": of.hit_rate });
        json!({ "load": load, "before": figures(before), "after": figures(after) })
    };
    Value::Array(before.iter().zip(after).map(point).collect())
}

/// Writes the curves, and for a page also the table of the figures over seeds.
pub(super) fn write_report(
    file: &Path,
    (title, unit): (&str, &str),
    names: [&str; 2],
    pair: &Pair,
    curves: &[OverLoads],
) -> Result<(), Failure> {
    let named = names.iter().zip(curves).map(|(name, of)| ((*name).to_owned(), of.clone())).collect::<Vec<_>>();
    let row = |(name, figures): (&&str, Measured)| Row { policy: (*name).to_owned(), figures, ..Row::default() };
    let section = Section {
        title: title.to_owned(),
        text: format!("the table has medians over {} seeds; the curves are of seed 1", pair.runs[0].len()),
        panels: panels(unit, &named),
        rows: names.iter().zip(pair.medians()).map(row).collect(),
    };
    simulate::write_report(file, title, section, names[1])
}
