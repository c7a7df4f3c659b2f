//! What costs were made of, in print: a line a term, a column a candidate.

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Table};

use super::ranking::Ranking;
use crate::route::CostTerms;

/// Candidates beside each other at most: more do not fit a line.
const COLUMNS_MAX: usize = 8;

/// A term's name, what it counts in, and where it is.
type Term = (&'static str, &'static str, fn(&CostTerms) -> f64);

/// Every term, in the order in which they are applied.
const TERMS: [Term; 19] = [
    ("request_blocks", "blocks", |terms| terms.request_blocks),
    ("cached_tokens", "tokens", |terms| terms.cached_tokens),
    ("effective_overlap", "blocks", |terms| terms.effective_overlap),
    ("active_prefill_tokens", "tokens", |terms| terms.active_prefill_tokens),
    ("decay", "factor", |terms| terms.decay),
    ("device_credit", "blocks", |terms| terms.device_credit),
    ("host_credit", "blocks", |terms| terms.host_credit),
    ("disk_credit", "blocks", |terms| terms.disk_credit),
    ("shared_credit", "blocks", |terms| terms.shared_credit),
    ("prefill", "blocks", |terms| terms.prefill),
    ("active_decode_blocks", "blocks", |terms| terms.active_decode_blocks),
    ("additional_decode_blocks", "blocks", |terms| terms.additional_decode_blocks),
    ("decode", "blocks", |terms| terms.decode),
    ("active_requests", "requests", |terms| terms.active_requests),
    ("active_requests_cost", "blocks", |terms| terms.active_requests_cost),
    ("capability_weight", "divisor", |terms| terms.capability_weight),
    ("taint_factor", "factor", |terms| terms.taint_factor),
    ("affinity_factor", "factor", |terms| terms.affinity_factor),
    ("cost", "", |terms| terms.cost),
];

/// The terms of the first candidates; empty where none says its terms.
pub(super) fn text(ranking: &Ranking) -> String {
    let told = || ranking.rows.iter().filter_map(|row| Some((row, row.terms.as_ref()?))).take(COLUMNS_MAX);
    if told().next().is_none() {
        return String::new();
    }
    let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
    let mut table = Table::new();
    let head = [Cell::new("term"), Cell::new("in")].into_iter();
    table.load_style(UTF8_FULL_CONDENSED);
    table.set_header(head.chain(told().map(|(row, _)| right(row.worker.to_string()))));
    for (name, unit, pick) in TERMS {
        let values = told().map(|(_, terms)| right(number(pick(terms))));
        table.add_row([Cell::new(name), Cell::new(unit)].into_iter().chain(values));
    }
    format!("{table}\n")
}

/// Whole numbers without a point, others with as many places as tell them apart.
fn number(value: f64) -> String {
    if value.fract() == 0.0 { format!("{value:.0}") } else { format!("{value:.4}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::ranking::Row;
    use crate::ids::{TierBlocks, Worker};

    #[test]
    fn every_term_of_every_candidate_is_shown_with_its_unit() {
        let row = |id, terms| Row {
            worker: Worker::new(id, 0),
            name: String::new(),
            state: None,
            trust: None,
            overlap: TierBlocks::default(),
            cost: None,
            terms,
            removed_by: None,
        };
        assert_eq!(text(&Ranking { rows: vec![row(1, None)], ..Ranking::default() }), "");
        let terms = CostTerms { prefill: 2.25, cost: 7.0, ..CostTerms::default() };
        let shown = text(&Ranking { rows: vec![row(1, Some(terms)), row(2, None)], ..Ranking::default() });
        assert!(shown.contains("1/0") && !shown.contains("2/0"), "{shown}");
        assert!(TERMS.iter().all(|(name, unit, _)| shown.contains(name) && shown.contains(unit)), "{shown}");
        assert!(shown.contains("2.2500") && shown.lines().any(|line| line.contains("cost") && line.contains(" 7 ")));
    }
}
