//! `kvrouted status`: every worker with its trust, its counters and a remedy.

use std::io::Write as _;
use std::path::PathBuf;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Table};
use serde::Serialize;
use serde_json::{Map, Value};

use super::admin;
use super::exit::{Exit, Failure};
use super::process_status;
use super::router_status;
use crate::config::socket_default;
use crate::finding::Finding;
use crate::sandbox::Mode;
use crate::trust::TrustReason;
use crate::wire::{SourceStatus, StatusPage, WorkerStatus};

/// Prints what the daemon knows about every worker.
#[derive(Debug, clap::Args)]
pub struct StatusArgs {
    /// The daemon's Unix socket
    #[arg(long, value_name = "PATH", default_value_os_t = socket_default())]
    pub socket: PathBuf,
    /// The daemon's admin socket [default: as the daemon says on its socket]
    #[arg(long, value_name = "PATH")]
    pub admin_socket: Option<PathBuf>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

impl StatusArgs {
    /// Asks the daemon and prints.
    ///
    /// # Errors
    /// A daemon that does not answer, a closed standard output.
    pub fn run(&self) -> Result<Exit, Failure> {
        let page = admin::connect(self.admin_socket.as_ref().unwrap_or(&self.socket))?.status_all()?;
        let text = if self.json {
            json(&page).map_err(|error| Failure::new(Exit::Internal, error.to_string()))?
        } else {
            text(&page)
        };
        let mut stdout = std::io::stdout().lock();
        writeln!(stdout, "{text}")?;
        stdout.flush()?;
        Ok(Exit::Done)
    }
}

#[derive(Serialize)]
struct StatusJson {
    workers: Vec<WorkerJson>,
    sources: Vec<Value>,
    findings: Vec<FindingJson>,
    /// Only if a shadow policy has judged decisions.
    #[serde(skip_serializing_if = "Map::is_empty")]
    shadow: Map<String, Value>,
    /// The memory, the open files and the readiness of the daemon.
    #[serde(flatten)]
    process: Map<String, Value>,
    /// Only if the daemon has a sandbox.
    #[serde(skip_serializing_if = "Map::is_empty")]
    sandbox: Map<String, Value>,
    /// Only if the daemon shares its load with other routers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    routers: Vec<Value>,
}

#[derive(Serialize)]
struct FindingJson {
    finding: String,
    harm: &'static str,
}

#[derive(Serialize)]
struct WorkerJson {
    worker_id: u64,
    dp_rank: u32,
    source: String,
    trust: &'static str,
    reasons: Vec<&'static str>,
    blocks_held: u64,
    last_seq: Option<u64>,
    counters: Map<String, Value>,
}

/// The status as one JSON object.
pub(super) fn json(page: &StatusPage) -> serde_json::Result<String> {
    let finding = |of: &Finding| FindingJson { finding: of.name.clone(), harm: of.harm.name() };
    let worker = |line: &WorkerStatus| WorkerJson {
        worker_id: line.worker.id.0,
        dp_rank: line.worker.rank.0,
        source: line.source.clone(),
        trust: line.trust.level.name(),
        reasons: line.trust.reasons.iter().map(TrustReason::name).collect(),
        blocks_held: line.blocks_held,
        last_seq: line.trust.as_of_seq.map(|seq| seq.0),
        counters: line.counters.iter().map(|(name, value)| (name.clone(), (*value).into())).collect(),
    };
    let (workers, findings) = (page.workers.iter().map(worker).collect(), page.findings.iter().map(finding).collect());
    let (sources, shadow) = (sources_json(&page.sources), shadow_json(page));
    let (process, sandbox, routers) = (process_status::json(page), sandbox_json(page), router_status::json(page));
    serde_json::to_string(&StatusJson { workers, sources, findings, shadow, process, sandbox, routers })
}

pub(super) fn sources_json(sources: &[SourceStatus]) -> Vec<Value> {
    let source = |source: &SourceStatus| serde_json::json!({"name": source.name, "workers": source.workers, "problem": source.problem});
    sources.iter().map(source).collect()
}

/// A line for each source with a problem.
pub(super) fn source_lines(sources: &[SourceStatus]) -> impl Iterator<Item = String> {
    sources.iter().filter_map(|source| Some(format!("{}: {}", source.name, source.problem.as_ref()?)))
}

const HEADER: [&str; 12] =
    ["worker", "name", "model", "source", "state", "trust", "last seq", "held", "device", "host", "disk", "external"];

fn text(page: &StatusPage) -> String {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header(HEADER);
    for line in &page.workers {
        table.add_row(cells(line));
    }
    let mut parts = vec![table.to_string()];
    for line in &page.workers {
        let counted: Vec<_> =
            line.counters.iter().filter(|(_, v)| *v > 0).map(|(name, value)| format!("{name} {value}")).collect();
        if !counted.is_empty() {
            parts.push(format!("{}: {}", line.worker, counted.join(", ")));
        }
        if let Some(remedy) = remedy(line) {
            parts.push(format!("{}: to do: {remedy}", line.worker));
        }
    }
    parts.extend(shadow_line(page));
    parts.extend(router_status::text(page));
    parts.extend(process_status::text(page));
    parts.extend(sandbox_line(page));
    parts.extend(source_lines(&page.sources));
    let finding = |of: &Finding| format!("{} {}: {}", of.harm.name(), of.name, of.what);
    parts.extend(page.findings.iter().map(finding));
    parts.join("\n")
}

/// Counts of the shadow policy by name; empty if none has judged.
fn shadow_json(page: &StatusPage) -> Map<String, Value> {
    if shadow_count(page, "shadow_decisions") == 0 {
        return Map::new();
    }
    let named = |(name, count): &(String, u64)| Some((name.strip_prefix("shadow_")?.to_owned(), (*count).into()));
    page.counters.iter().filter_map(named).collect()
}

fn shadow_count(page: &StatusPage, name: &str) -> u64 {
    count(page, name).unwrap_or(0)
}

fn count(page: &StatusPage, name: &str) -> Option<u64> {
    page.counters.iter().find(|(of, _)| of == name).map(|(_, count)| *count)
}

/// The mode of the daemon's sandbox; `None` = it has none.
fn sandbox_mode(page: &StatusPage) -> Option<&'static str> {
    let mode = count(page, "sandbox_mode")?;
    // A newer daemon may have more.
    Some(Mode::NAMES.get(mode as usize).copied().unwrap_or("unknown"))
}

/// The figures of the daemon's sandbox by name; empty if it has none.
fn sandbox_json(page: &StatusPage) -> Map<String, Value> {
    let Some(mode) = sandbox_mode(page) else { return Map::new() };
    let named = |(name, value): &(String, u64)| Some((name.strip_prefix("sandbox_")?.to_owned(), (*value).into()));
    let mut figures: Map<String, Value> = page.counters.iter().filter_map(named).collect();
    figures.insert("mode".to_owned(), mode.into());
    figures
}

/// The daemon's sandbox as a sentence.
fn sandbox_line(page: &StatusPage) -> Option<String> {
    let mode = sandbox_mode(page)?;
    let has = |name, present: &str, absent: &str| match count(page, name) {
        Some(0) | None => absent.to_owned(),
        Some(_) => present.to_owned(),
    };
    Some(format!(
        "sandbox {mode}: {}, {}, {}, {}; {} system calls refused",
        has("sandbox_filters", "system calls filtered", "system calls not filtered"),
        has("sandbox_landlock", "files restricted", "files not restricted"),
        has("sandbox_capabilities_dropped", "capabilities dropped", "capabilities kept"),
        has("sandbox_no_new_privileges", "no new privileges", "new privileges possible"),
        count(page, "sandbox_refused").unwrap_or(0)
    ))
}

/// Counts of the shadow policy as a sentence.
fn shadow_line(page: &StatusPage) -> Option<String> {
    let count = |name| shadow_count(page, name);
    let (decisions, agreements) = (count("shadow_decisions"), count("shadow_agreements"));
    (decisions > 0).then(|| {
        let share = agreements as f64 / decisions as f64 * 100.0;
        format!(
            "shadow policy: agrees on {share:.1} % of {decisions} decisions; where it differs, its workers held {} prompt blocks \
             more in some and {} fewer in others; by its costs the chosen workers were {} blocks worse than its own",
            count("shadow_blocks_saved"),
            count("shadow_blocks_lost"),
            count("shadow_cost_regret")
        )
    })
}

fn cells(line: &WorkerStatus) -> Vec<Cell> {
    let number = |value: u64| Cell::new(value).set_alignment(CellAlignment::Right);
    let reasons: Vec<_> = line.trust.reasons.iter().map(TrustReason::name).collect();
    let level = line.trust.level.name();
    let trust = if reasons.is_empty() { level.to_owned() } else { format!("{level}: {}", reasons.join(", ")) };
    let mut cells = vec![
        Cell::new(line.worker),
        Cell::new(&line.name),
        Cell::new(&line.model),
        Cell::new(&line.source),
        Cell::new(line.state.name()),
        Cell::new(trust),
        line.trust.as_of_seq.map_or_else(|| Cell::new("-").set_alignment(CellAlignment::Right), |seq| number(seq.0)),
        number(line.blocks_held),
    ];
    cells.extend(line.blocks_by_tier.map(number));
    cells
}

/// The daemon's remedy, else that of the reason that lowers trust most.
fn remedy(line: &WorkerStatus) -> Option<&str> {
    line.remedy.as_deref().or_else(|| line.trust.reasons.iter().min_by_key(|r| r.cap()).map(TrustReason::remedy))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Symptom;
    use crate::fleet::WorkerState;
    use crate::ids::{EventSeq, SpaceId, Worker};
    use crate::trust::{Trust, TrustLevel};

    fn lines() -> Vec<WorkerStatus> {
        let exact = WorkerStatus {
            worker: Worker::new(1, 0),
            name: "w1".into(),
            space: SpaceId(0),
            model: "m".into(),
            state: WorkerState::Ready,
            trust: Trust { level: TrustLevel::Exact, as_of_seq: Some(EventSeq(41)), ..Trust::default() },
            blocks_held: 12,
            blocks_by_tier: [10, 5, 0, 0],
            counters: vec![("batches".into(), 42), ("gaps".into(), 0)],
            remedy: None,
            source: "config".into(),
        };
        let reasons = [TrustReason::JoinedLate, TrustReason::Joining].into_iter().collect();
        let joining = WorkerStatus {
            worker: Worker::new(2, 3),
            name: "w2.3".into(),
            state: WorkerState::Joining,
            trust: Trust { level: TrustLevel::Unproven, reasons, ..Trust::default() },
            blocks_held: 0,
            blocks_by_tier: [0; 4],
            counters: Vec::new(),
            ..exact.clone()
        };
        vec![exact, joining]
    }

    fn page(workers: Vec<WorkerStatus>, symptoms: &[Symptom]) -> StatusPage {
        let findings = symptoms.iter().map(|symptom| symptom.finding()).collect();
        StatusPage { workers, findings, ..StatusPage::default() }
    }

    #[test]
    fn json_has_exactly_the_promised_shape() {
        assert_eq!(
            json(&page(lines(), &[Symptom::EventsOff])).unwrap(),
            concat!(
                r#"{"workers":[{"worker_id":1,"dp_rank":0,"source":"config","trust":"exact","reasons":[],"blocks_held":12,"#,
                r#""last_seq":41,"counters":{"batches":42,"gaps":0}},"#,
                r#"{"worker_id":2,"dp_rank":3,"source":"config","trust":"unproven","reasons":["joining","joined_late"],"#,
                r#""blocks_held":0,"last_seq":null,"counters":{}}],"sources":[],"#,
                r#""findings":[{"finding":"events_off","harm":"severe"}]}"#,
            )
        );
        let torn = SourceStatus { name: "file f".into(), workers: 2, problem: Some("torn".into()) };
        let page = StatusPage { sources: vec![torn], ..StatusPage::default() };
        let shown = json(&page).unwrap();
        assert_eq!(shown, r#"{"workers":[],"sources":[{"name":"file f","problem":"torn","workers":2}],"findings":[]}"#);
        assert!(text(&page).ends_with("file f: torn"));
    }

    #[test]
    fn a_sandbox_is_shown_if_there_is_one() {
        let figures =
            [("mode", 2), ("no_new_privileges", 1), ("capabilities_dropped", 1), ("filters", 1), ("landlock", 0)];
        let named = |(name, value): (&str, u64)| (format!("sandbox_{name}"), value);
        let counters: Vec<_> = figures.into_iter().chain([("refused", 3)]).map(named).collect();
        let page = StatusPage { counters, ..StatusPage::default() };
        let line = "sandbox on: system calls filtered, files not restricted, capabilities dropped, no new privileges; \
                    3 system calls refused";
        assert!(text(&page).ends_with(line), "{}", text(&page));
        let shown: Value = serde_json::from_str(&json(&page).unwrap()).unwrap();
        assert_eq!((&shown["sandbox"]["mode"], &shown["sandbox"]["refused"]), (&"on".into(), &3.into()));
    }

    #[test]
    fn the_table_shows_remedies() {
        let mut lines = lines();
        let shown = text(&page(lines.clone(), &[Symptom::EventsOff]));
        assert!(shown.contains("severe events_off: "), "{shown}");
        assert!(shown.contains("unproven: joining, joined_late"), "{shown}");
        assert!(shown.contains("1/0: batches 42") && !shown.contains("gaps"), "{shown}");
        assert!(shown.contains(&format!("2/3: to do: {}", TrustReason::Joining.remedy())), "{shown}");
        lines[1].remedy = Some("ask the daemon".into());
        assert!(text(&page(lines, &[])).contains("2/3: to do: ask the daemon"));
    }
}
