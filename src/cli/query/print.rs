//! Answers in print: a decision as a JSON line or as a table that says why, its cost terms, and potential loads.

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Table};
use serde::Serialize;

use crate::cli::exit::{Exit, Failure};
use crate::cli::router_status::router_number;
use crate::error::{Error, Kind, counted};
use crate::fleet::WorkerState;
use crate::ids::{TierBlocks, Worker};
use crate::protocol::OtherLoad;
use crate::route::{CostTerms, MatchStatus, Mode, PotentialLoad, PotentialLoads, ReplyNotes};
use crate::trust::Trust;

/// The daemon's answer to one question.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Answer {
    /// A decision.
    Ranking(Ranking),
    /// The daemon's error.
    Refused(String),
}

/// A decision about one prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Ranking {
    pub(super) matched: MatchStatus,
    pub(super) notes: ReplyNotes,
    /// Whole blocks of the prompt.
    pub(super) request_blocks: u32,
    /// The number of workers with the lowest cost.
    pub(super) ties: u32,
    /// The mode of the decision; `None` = the daemon does not say.
    pub(super) mode: Option<Mode>,
    /// Why no worker was chosen.
    pub(super) no_worker: Option<Kind>,
    /// The chosen worker first, then the others by ascending cost, then workers that are not eligible.
    pub(super) rows: Vec<Row>,
    /// For a pair: the prefill workers, the chosen one first. Empty = the worker chosen above also does the prefill.
    pub(super) prefill: Vec<Row>,
    /// What other routers' bookings add to the workers.
    pub(super) others: Vec<OtherLoad>,
}

/// One worker of a decision.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    pub(super) worker: Worker,
    /// The worker's name; empty = not known.
    pub(super) name: String,
    pub(super) state: Option<WorkerState>,
    pub(super) trust: Option<Trust>,
    pub(super) overlap: TierBlocks,
    /// `None` = not eligible.
    pub(super) cost: Option<f64>,
    pub(super) terms: Option<CostTerms>,
    /// The rule that removed it.
    pub(super) removed_by: Option<String>,
}

impl Ranking {
    /// The chosen worker.
    fn best(&self) -> Option<&Row> {
        self.rows.first().filter(|row| row.cost.is_some())
    }
}

impl Row {
    fn reasons(&self) -> Vec<&str> {
        let trust = self.trust.iter().flat_map(|trust| trust.reasons.iter()).map(|r| -> &str { r.name() });
        trust.chain(self.removed_by.as_deref()).collect()
    }
}

#[derive(Serialize)]
struct RankingJson<'a> {
    best: Option<WorkerJson>,
    #[serde(rename = "match")]
    matched: &'static str,
    candidates: Vec<CandidateJson<'a>>,
    /// Only for pairs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    prefill_candidates: Vec<CandidateJson<'a>>,
    /// Only if other routers have bookings.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    others: Vec<OtherJson>,
}

#[derive(Serialize)]
struct OtherJson {
    worker_id: u64,
    dp_rank: u32,
    origin: String,
    age_ms: u64,
    requests: u32,
    prefill_tokens: u64,
    decode_blocks: u64,
}

#[derive(Serialize)]
struct WorkerJson {
    worker_id: u64,
    dp_rank: u32,
}

#[derive(Serialize)]
struct CandidateJson<'a> {
    worker_id: u64,
    dp_rank: u32,
    overlap_blocks: OverlapJson,
    cost: Option<f64>,
    trust: Option<&'static str>,
    reasons: Vec<&'a str>,
}

#[derive(Serialize)]
struct OverlapJson {
    device: u32,
    host: u32,
    disk: u32,
    external: u32,
}

#[derive(Serialize)]
struct RefusalJson<'a> {
    error: &'a str,
}

fn candidate_json(row: &Row) -> CandidateJson<'_> {
    let TierBlocks { device, host, disk, external } = row.overlap;
    CandidateJson {
        worker_id: row.worker.id.0,
        dp_rank: row.worker.rank.0,
        overlap_blocks: OverlapJson { device, host, disk, external },
        cost: row.cost,
        trust: row.trust.map(|trust| trust.level.name()),
        reasons: row.reasons(),
    }
}

fn other_json(load: &OtherLoad) -> OtherJson {
    let OtherLoad { worker, origin, age_ms, requests, prefill_tokens, decode_blocks } = *load;
    let origin = router_number(origin);
    OtherJson {
        worker_id: worker.id.0,
        dp_rank: worker.rank.0,
        origin,
        age_ms,
        requests,
        prefill_tokens,
        decode_blocks,
    }
}

/// An answer as one line of JSON, without line end.
///
/// # Errors
/// Those of the serializer.
pub(super) fn answer_json(answer: &Answer) -> serde_json::Result<String> {
    match answer {
        Answer::Ranking(ranking) => serde_json::to_string(&RankingJson {
            best: ranking.best().map(|row| WorkerJson { worker_id: row.worker.id.0, dp_rank: row.worker.rank.0 }),
            matched: ranking.matched.name(),
            candidates: ranking.rows.iter().map(candidate_json).collect(),
            prefill_candidates: ranking.prefill.iter().map(candidate_json).collect(),
            others: ranking.others.iter().map(other_json).collect(),
        }),
        Answer::Refused(error) => serde_json::to_string(&RefusalJson { error }),
    }
}

const HEADER: [&str; 13] = [
    "",
    "worker",
    "name",
    "state",
    "trust",
    "device",
    "host",
    "disk",
    "external",
    "cached tokens",
    "prefill",
    "decode",
    "cost",
];

/// An answer for people: the prompt, the ranking, and remarks.
pub(super) fn answer_text(answer: &Answer, token_count: usize) -> String {
    let ranking = match answer {
        Answer::Ranking(ranking) => ranking,
        Answer::Refused(error) => return format!("refused: {error}\n"),
    };
    let eligible = ranking.rows.iter().filter(|row| row.cost.is_some()).count();
    let mut text = format!(
        "prompt of {}, {}: {}; {eligible} of {} eligible{}\n",
        counted(token_count, "token"),
        counted(ranking.request_blocks as usize, "whole block"),
        ranking.matched.name(),
        counted(ranking.rows.len(), "worker"),
        ranking.mode.map(|mode| format!("; by {}", mode.name())).unwrap_or_default()
    );
    if !ranking.prefill.is_empty() {
        text.push_str(&format!("prefill:\n{}\ndecode:\n", table(&ranking.prefill)));
    }
    text.push_str(&table(&ranking.rows).to_string());
    text.push('\n');
    for remark in remarks(ranking) {
        text.push_str(remark);
        text.push('\n');
    }
    text
}

fn remarks(ranking: &Ranking) -> Vec<&'static str> {
    let unmatchable = ranking.matched == MatchStatus::Unmatchable;
    let remarks = [
        (ranking.rows.is_empty(), "the space has no workers"),
        (
            !ranking.rows.is_empty() && ranking.best().is_none(),
            "no worker is eligible; the column trust shows the rule that removed each",
        ),
        (
            ranking.no_worker == Some(Kind::AllBusy),
            "every worker that could run the prompt is beyond a busy threshold of [policy]",
        ),
        (
            unmatchable,
            "unmatchable: the prompt cannot be compared with cached blocks; the ranking is by load, and no overlap counts",
        ),
        (
            ranking.notes.contains(ReplyNotes::SCHEME_UNKNOWN),
            "the block size is not known yet; the ranking is by load until an engine shows it or [[space]] sets it",
        ),
        (
            ranking.notes.contains(ReplyNotes::READ_CONTENDED),
            "the index changed during the lookup; overlaps may miss the latest changes",
        ),
        (
            ranking.notes.contains(ReplyNotes::ALL_DOWN),
            "every worker is down, according to their event streams; they are ranked all the same",
        ),
        (ranking.notes.contains(ReplyNotes::AFFINITY_OFF), "the session has no effect: `affinity` in [policy] is off"),
        (
            ranking.notes.contains(ReplyNotes::PREFILL_NOBODY),
            "the decode worker also does the prefill: the model has no prefill pool, or no worker in it is eligible",
        ),
        (
            ranking.notes.contains(ReplyNotes::PREFILL_LOCAL),
            "the decode worker also does the prefill, because `prefill_bypass` in [policy] says so",
        ),
        (ranking.ties > 1, "several workers have the lowest cost; one of them was drawn at random"),
    ];
    remarks.into_iter().filter(|(applies, _)| *applies).map(|(_, remark)| remark).collect()
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header(HEADER);
    for (at, row) in rows.iter().enumerate() {
        table.add_row(cells(row, at == 0 && row.cost.is_some()));
    }
    table
}

fn cells(row: &Row, chosen: bool) -> Vec<Cell> {
    let number = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
    let term = |pick: fn(&CostTerms) -> f64| {
        number(row.terms.as_ref().map_or_else(dash, |terms| format!("{:.2}", pick(terms))))
    };
    let level = row.trust.map(|trust| trust.level.name());
    let reasons = Some(row.reasons().join(", ")).filter(|reasons| !reasons.is_empty());
    let trust = match (level, reasons) {
        (Some(level), Some(reasons)) => format!("{level}: {reasons}"),
        (Some(level), None) => level.to_owned(),
        (None, reasons) => reasons.unwrap_or_else(dash),
    };
    vec![
        Cell::new(if chosen { "*" } else { "" }),
        Cell::new(row.worker.to_string()),
        Cell::new(&row.name),
        Cell::new(row.state.map_or("-", WorkerState::name)),
        Cell::new(trust),
        number(row.overlap.device.to_string()),
        number(row.overlap.host.to_string()),
        number(row.overlap.disk.to_string()),
        number(row.overlap.external.to_string()),
        number(row.terms.as_ref().map_or_else(dash, |terms| format!("{:.0}", terms.cached_tokens))),
        term(|terms| terms.prefill),
        term(|terms| terms.decode),
        number(row.cost.map_or_else(dash, |cost| format!("{cost:.2}"))),
    ]
}

fn dash() -> String {
    "-".to_owned()
}

/// Most candidates in one table: more do not fit a line.
const COLUMNS_MAX: usize = 8;

/// The cost terms of the first candidates; empty if no candidate has terms.
pub(super) fn terms_text(ranking: &Ranking) -> String {
    let explained = || ranking.rows.iter().filter_map(|row| Some((row, row.terms.as_ref()?))).take(COLUMNS_MAX);
    if explained().next().is_none() {
        return String::new();
    }
    let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
    let mut table = Table::new();
    let head = [Cell::new("term"), Cell::new("in")].into_iter();
    table.load_style(UTF8_FULL_CONDENSED);
    table.set_header(head.chain(explained().map(|(row, _)| right(row.worker.to_string()))));
    for (name, unit, pick) in CostTerms::ALL {
        let values = explained().map(|(_, terms)| right(term_number(pick(terms))));
        table.add_row([Cell::new(*name), Cell::new(*unit)].into_iter().chain(values));
    }
    format!("{table}\n{}", others_text(&ranking.others))
}

/// What each other router adds to the load of each worker; empty if there is nothing.
fn others_text(others: &[OtherLoad]) -> String {
    if others.is_empty() {
        return String::new();
    }
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    table.set_header(["worker", "other router", "said, ms ago", "requests", "prefill tokens", "decode blocks"]);
    for load in others {
        let numbers = [load.age_ms, load.requests.into(), load.prefill_tokens, load.decode_blocks];
        let numbers = numbers.map(|number| Cell::new(number).set_alignment(CellAlignment::Right));
        table.add_row([Cell::new(load.worker), Cell::new(router_number(load.origin))].into_iter().chain(numbers));
    }
    format!("{table}\n")
}

/// Whole numbers without a decimal point, others with four decimals.
fn term_number(value: f64) -> String {
    if value.fract() == 0.0 { format!("{value:.0}") } else { format!("{value:.4}") }
}

/// The daemon's answer about one prompt's potential loads.
pub(super) type Loads = Result<PotentialLoads, Error>;

#[derive(Serialize)]
struct LoadsJson {
    matched: &'static str,
    workers: Vec<WorkerLoadJson>,
}

#[derive(Serialize)]
struct WorkerLoadJson {
    worker_id: u64,
    dp_rank: u32,
    active_requests: u64,
    prefill_tokens: u64,
    decode_blocks: u64,
}

fn load_json(load: &PotentialLoad) -> WorkerLoadJson {
    let PotentialLoad { worker, active_requests, prefill_tokens, decode_blocks } = *load;
    WorkerLoadJson { worker_id: worker.id.0, dp_rank: worker.rank.0, active_requests, prefill_tokens, decode_blocks }
}

/// Potential loads as one line of JSON, without line end.
///
/// # Errors
/// Those of the serializer.
pub(super) fn loads_json(answer: &Loads) -> Result<String, Failure> {
    let written = match answer {
        Ok(loads) => serde_json::to_string(&LoadsJson {
            matched: loads.matched.name(),
            workers: loads.workers.iter().map(load_json).collect(),
        }),
        Err(error) => serde_json::to_string(&RefusalJson { error: &error.to_string() }),
    };
    written.map_err(|error| Failure::new(Exit::Internal, error.to_string()))
}

/// Potential loads as a table, with line end.
pub(super) fn loads_text(answer: &Loads, token_count: usize) -> String {
    let loads = match answer {
        Ok(loads) => loads,
        Err(error) => return format!("refused: {error}\n"),
    };
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    table.set_header(["worker", "requests now", "prefill tokens with it", "decode blocks with it"]);
    let number = |number: u64| Cell::new(number).set_alignment(CellAlignment::Right);
    for load in &loads.workers {
        let worker = Cell::new(load.worker);
        table.add_row([worker, number(load.active_requests), number(load.prefill_tokens), number(load.decode_blocks)]);
    }
    let (tokens, blocks) = (counted(token_count, "token"), counted(loads.request_blocks as usize, "whole block"));
    format!("prompt of {tokens}, {blocks}: {}\n{table}\n", loads.matched.name())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::EventSeq;
    use crate::trust::{TrustLevel, TrustReason};

    fn ranking() -> Ranking {
        let trust = |level, reasons: &[TrustReason]| {
            let reasons = reasons.iter().copied().collect();
            Some(Trust { level, reasons, as_of_seq: Some(EventSeq(4)), ..Trust::default() })
        };
        let terms = CostTerms { cached_tokens: 32.0, prefill: 3.0, decode: 5.25, cost: 8.25, ..CostTerms::default() };
        let chosen = Row {
            worker: Worker::new(7, 1),
            name: "w7.1".into(),
            state: Some(WorkerState::Ready),
            trust: trust(TrustLevel::Exact, &[]),
            overlap: TierBlocks { device: 2, host: 1, disk: 0, external: 0 },
            cost: Some(8.25),
            terms: Some(terms),
            removed_by: None,
        };
        let second = Row {
            worker: Worker::new(u64::MAX, 0),
            name: "big".into(),
            trust: trust(TrustLevel::LowerBound, &[TrustReason::JoinedLate, TrustReason::Gap]),
            overlap: TierBlocks::default(),
            cost: Some(11.0),
            terms: None,
            ..chosen.clone()
        };
        let out = Row {
            worker: Worker::new(9, 0),
            name: String::new(),
            state: None,
            trust: None,
            overlap: TierBlocks::default(),
            cost: None,
            terms: None,
            removed_by: Some("draining".into()),
        };
        Ranking { request_blocks: 5, ties: 1, rows: vec![chosen, second, out], ..Ranking::default() }
    }

    #[test]
    fn json_has_exactly_the_documented_shape() {
        assert_eq!(
            answer_json(&Answer::Ranking(ranking())).unwrap(),
            concat!(
                r#"{"best":{"worker_id":7,"dp_rank":1},"match":"matched","candidates":["#,
                r#"{"worker_id":7,"dp_rank":1,"overlap_blocks":{"device":2,"host":1,"disk":0,"external":0},"#,
                r#""cost":8.25,"trust":"exact","reasons":[]},"#,
                r#"{"worker_id":18446744073709551615,"dp_rank":0,"#,
                r#""overlap_blocks":{"device":0,"host":0,"disk":0,"external":0},"#,
                r#""cost":11.0,"trust":"lower_bound","reasons":["joined_late","gap"]},"#,
                r#"{"worker_id":9,"dp_rank":0,"overlap_blocks":{"device":0,"host":0,"disk":0,"external":0},"#,
                r#""cost":null,"trust":null,"reasons":["draining"]}]}"#,
            )
        );
    }

    #[test]
    fn json_shows_missing_candidates_and_unmatchable_prompts() {
        let mut empty = ranking();
        empty.rows.drain(..2);
        empty.matched = MatchStatus::Unmatchable;
        let line = answer_json(&Answer::Ranking(empty)).unwrap();
        assert!(line.starts_with(r#"{"best":null,"match":"unmatchable","candidates":[{"worker_id":9,"#), "{line}");
        let empty = answer_json(&Answer::Ranking(Ranking::default())).unwrap();
        assert_eq!(empty, r#"{"best":null,"match":"matched","candidates":[]}"#);
        assert_eq!(answer_json(&Answer::Refused("no \"x\"".into())).unwrap(), r#"{"error":"no \"x\""}"#);
    }

    #[test]
    fn the_table_marks_the_chosen_worker_and_says_why() {
        let text = answer_text(&Answer::Ranking(ranking()), 90);
        assert!(text.starts_with("prompt of 90 tokens, 5 whole blocks: matched; 2 of 3 workers eligible\n"), "{text}");
        let line =
            |words: &str| text.lines().find(|line| line.contains(words)).unwrap_or_else(|| panic!("{words}: {text}"));
        let chosen = line("w7.1");
        for words in ["*", "7/1", "ready", "exact", "32", "3.00", "5.25", "8.25"] {
            assert!(chosen.contains(words), "{words}: {chosen}");
        }
        assert!(line("big").contains("lower_bound: joined_late, gap"));
        assert!(!line("big").contains('*'));
        assert!(line("9/0").contains("draining"));
    }

    #[test]
    fn remarks_explain_what_numbers_do_not_show() {
        let mut ranking = ranking();
        ranking.notes.insert(ReplyNotes::SCHEME_UNKNOWN);
        ranking.ties = 2;
        let shown = answer_text(&Answer::Ranking(ranking), 0);
        assert!(shown.contains("block size is not known") && shown.contains("have the lowest cost"), "{shown}");
        assert!(answer_text(&Answer::Ranking(Ranking::default()), 0).contains("no workers"));
        assert_eq!(answer_text(&Answer::Refused("why".into()), 0), "refused: why\n");
    }

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
        assert_eq!(terms_text(&Ranking { rows: vec![row(1, None)], ..Ranking::default() }), "");
        let terms = CostTerms { prefill: 2.25, cost: 7.0, ..CostTerms::default() };
        let shown = terms_text(&Ranking { rows: vec![row(1, Some(terms)), row(2, None)], ..Ranking::default() });
        assert!(shown.contains("1/0") && !shown.contains("2/0"), "{shown}");
        assert!(CostTerms::ALL.iter().all(|(name, unit, _)| shown.contains(name) && shown.contains(unit)), "{shown}");
        assert!(shown.contains("2.2500") && shown.lines().any(|line| line.contains("cost") && line.contains(" 7 ")));
    }

    #[test]
    fn loads_are_printed_for_people_and_for_scripts() {
        let load =
            PotentialLoad { worker: Worker::new(7, 1), active_requests: 2, prefill_tokens: 300, decode_blocks: 40 };
        let answer = Ok(PotentialLoads { workers: vec![load], ..PotentialLoads::default() });
        let shown = loads_text(&answer, 64);
        assert!(shown.starts_with("prompt of 64 tokens, 0 whole blocks: matched\n"), "{shown}");
        for cell in ["7/1", "300", "40"] {
            assert!(shown.contains(cell), "{cell}: {shown}");
        }
        let line = "{\"matched\":\"matched\",\"workers\":[{\"worker_id\":7,\"dp_rank\":1,\"active_requests\":2,\
                    \"prefill_tokens\":300,\"decode_blocks\":40}]}";
        assert_eq!(loads_json(&answer).unwrap(), line);
        let unknown = PotentialLoads { matched: MatchStatus::Unmatchable, ..PotentialLoads::default() };
        assert!(loads_text(&Ok(unknown), 1).starts_with("prompt of 1 token, 0 whole blocks: unmatchable"));
        let refused = Err(Error::new(Kind::UnknownSpace, "there is no space 4", "ask hello"));
        assert!(loads_json(&refused).unwrap().starts_with("{\"error\":\""));
        assert!(loads_text(&refused, 1).contains("there is no space 4"));
    }
}
