//! What watches a fleet, in `ops/`: dashboards and alerts name only metrics, labels and values that the programs have;
//! each alert has a section in `docs/alerts.md` and tests that show it fire and stay silent.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde_json::Value;

use crate::promql::{Named, named};
use crate::{report, root};

/// Labels that a scrape adds to every sample.
const TARGET_LABELS: [&str; 2] = ["job", "instance"];
/// What Prometheus itself writes, with its labels.
const OF_PROMETHEUS: [(&str, &[&str]); 2] = [("up", &[]), ("ALERTS", &["alertname", "alertstate", "severity"])];
/// The parts of a section of the runbook, in their order.
const SECTION_PARTS: [&str; 5] = ["**Symptom.**", "**Meaning.**", "**Look.**", "**Do.**", "**Clears.**"];
const COLUMNS: u64 = 24;

/// The samples that a scrape can have, with their labels.
struct Samples(BTreeMap<String, BTreeSet<String>>);

impl Samples {
    /// From the frozen lists, which tests compare with the pages of real processes.
    fn frozen() -> Self {
        let mut samples: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for list in ["metrics.txt", "gateway-metrics.txt"] {
            let path = root().join("tests/fixtures/frozen").join(list);
            let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            for line in text.lines() {
                let [_, name, kind, labels] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{list}: {line}") };
                let labels = labels.trim_matches(['{', '}']).split(',').filter(|label| !label.is_empty());
                let labels: Vec<String> = labels.map(str::to_owned).collect();
                let ends: &[&str] = match kind {
                    "counter" => &["_total"],
                    "histogram" => &["_bucket", "_sum", "_count"],
                    _ => &[""],
                };
                for end in ends {
                    samples.entry(format!("{name}{end}")).or_default().extend(labels.iter().cloned());
                }
            }
        }
        for (name, labels) in OF_PROMETHEUS {
            samples.insert(name.to_owned(), labels.iter().map(|label| (*label).to_owned()).collect());
        }
        Self(samples)
    }

    /// Adds what a rule records.
    fn record(&mut self, name: &str, expression: &str) {
        let labels = self.shown(&named(expression));
        self.0.insert(name.to_owned(), labels);
    }

    fn labels(&self, metric: &str) -> BTreeSet<String> {
        let own = self.0.get(metric).cloned().unwrap_or_default();
        own.into_iter().chain(TARGET_LABELS.map(str::to_owned)).collect()
    }

    /// The labels that the result of an expression may have.
    fn shown(&self, named: &Named) -> BTreeSet<String> {
        let by = named.grouped("by");
        if !by.is_empty() {
            return by.into_iter().map(str::to_owned).collect();
        }
        let (all, without) = (self.all_labels(named), named.grouped("without"));
        all.into_iter().filter(|label| !without.contains(label.as_str())).collect()
    }

    fn all_labels(&self, named: &Named) -> BTreeSet<String> {
        named.selectors.iter().flat_map(|selector| self.labels(&selector.metric)).collect()
    }

    /// What is wrong with the names of an expression, and with the labels that a text beside it shows.
    fn problems(&self, expression: &str, shown: &[String], sources: &str) -> Vec<String> {
        let named = named(expression);
        let mut problems = Vec::new();
        for selector in &named.selectors {
            let metric = &selector.metric;
            if !self.0.contains_key(metric) {
                problems.push(format!("there is no metric {metric}"));
                continue;
            }
            let labels = self.labels(metric);
            for (label, value) in &selector.matchers {
                if !labels.contains(label) {
                    problems.push(format!("{metric} has no label {label}"));
                }
                let is_chosen_elsewhere = TARGET_LABELS.contains(&label.as_str()) || OF_PROMETHEUS[1].0 == metric;
                let literal = |value: &&str| value.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
                for value in value.split('|').filter(literal).filter(|_| !is_chosen_elsewhere) {
                    if !sources.contains(&format!("\"{value}\"")) {
                        problems.push(format!("no source has the value {value} of {metric}'s label {label}"));
                    }
                }
            }
        }
        let all = self.all_labels(&named);
        let unknown = named.groupings.iter().filter(|(_, label)| !all.contains(label));
        problems.extend(unknown.map(|(word, label)| format!("{word} ({label}): no metric here has this label")));
        let left = self.shown(&named);
        let lost = shown.iter().filter(|label| !left.contains(*label));
        problems.extend(lost.map(|label| format!("the label {label} is shown, and the result lacks it")));
        problems
    }
}

/// The text of all sources of both programs.
fn sources() -> String {
    fn read(folder: PathBuf, text: &mut String) {
        for entry in std::fs::read_dir(folder).expect("a folder of sources").flatten() {
            match entry.path() {
                path if path.is_dir() => read(path, text),
                path => text.push_str(&std::fs::read_to_string(path).expect("a source")),
            }
        }
    }
    let mut text = String::new();
    ["src", "gateway/src"].into_iter().for_each(|folder| read(root().join(folder), &mut text));
    text
}

/// The names after `mark` in a text.
fn labels_after(text: &str, mark: &str) -> Vec<String> {
    let name = |rest: &str| rest.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect::<String>();
    text.match_indices(mark).map(|(at, _)| name(&text[at + mark.len()..])).filter(|name| !name.is_empty()).collect()
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_default()
}

fn yaml(path: &str) -> Value {
    let text = std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
    serde_norway::from_str(&text).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// The recording rules and the alerts.
fn rules() -> (Vec<Value>, Vec<Value>) {
    let file = yaml("ops/prometheus/alerts.yaml");
    let rules = list(&file["groups"]).flat_map(|group| list(&group["rules"]).cloned().collect::<Vec<_>>());
    rules.partition(|rule| rule["record"].is_string())
}

/// All samples that panels and alerts may use.
fn samples() -> Samples {
    let mut samples = Samples::frozen();
    rules().0.iter().for_each(|rule| samples.record(text(rule, "record"), text(rule, "expr")));
    samples
}

#[test]
fn rules_name_what_the_programs_have() {
    let (samples, sources, (recorded, alerts)) = (samples(), sources(), rules());
    assert!(recorded.len() > 5 && alerts.len() > 20, "the rules were found");
    let mut problems = Vec::new();
    for rule in recorded.iter().chain(&alerts) {
        let name = format!("{}{}", text(rule, "record"), text(rule, "alert"));
        let annotations = rule["annotations"].as_object().into_iter().flatten();
        let shown = annotations.flat_map(|(_, value)| labels_after(value.as_str().unwrap_or_default(), "$labels."));
        let found = samples.problems(text(rule, "expr"), &shown.collect::<Vec<_>>(), &sources);
        problems.extend(found.into_iter().map(|problem| format!("{name}: {problem}")));
    }
    report(&problems);
}

#[test]
fn panels_name_what_the_programs_have_and_explain_themselves() {
    let (samples, sources) = (samples(), sources());
    let (mut problems, mut panels, mut uids) = (Vec::new(), 0, BTreeSet::new());
    for entry in std::fs::read_dir(root().join("ops/grafana")).expect("the dashboards").flatten() {
        let file = entry.file_name().to_string_lossy().into_owned();
        if !file.ends_with(".json") {
            continue;
        }
        let content = std::fs::read_to_string(entry.path()).expect("a dashboard");
        let dashboard: Value = serde_json::from_str(&content).unwrap_or_else(|error| panic!("{file}: {error}"));
        assert!(uids.insert(text(&dashboard, "uid").to_owned()), "{file}: another dashboard has its uid");
        let mut places = BTreeSet::new();
        for panel in list(&dashboard["panels"]) {
            panels += 1;
            let title = text(panel, "title");
            let mut found = panel_problems(panel, &mut places);
            for target in list(&panel["targets"]) {
                let shown = labels_after(text(target, "legendFormat"), "{{");
                found.extend(samples.problems(text(target, "expr"), &shown, &sources));
            }
            problems.extend(found.into_iter().map(|problem| format!("{file}, {title}: {problem}")));
        }
        for choice in list(&dashboard["templating"]["list"]).filter(|choice| choice["type"] == "query") {
            let query = text(&choice["query"], "query");
            let inside = query.strip_prefix("label_values(").and_then(|inside| inside.strip_suffix(')'));
            let (selector, label) = inside.and_then(|inside| inside.rsplit_once(", ")).expect("label_values(…)");
            let found = samples.problems(selector, &[label.to_owned()], &sources);
            problems.extend(found.into_iter().map(|problem| format!("{file}, {query}: {problem}")));
        }
    }
    report(&problems);
    assert!(uids.len() >= 5 && panels > 40, "{} dashboards with {panels} panels", uids.len());
}

/// What a panel lacks, or whether another one lies at its place.
fn panel_problems(panel: &Value, places: &mut BTreeSet<(u64, u64)>) -> Vec<String> {
    let mut problems = Vec::new();
    let unit = text(&panel["fieldConfig"]["defaults"], "unit");
    for (what, is_there) in [
        ("a title", !text(panel, "title").is_empty()),
        ("a description", text(panel, "description").ends_with('.')),
        ("a unit", !unit.is_empty()),
        ("a query", list(&panel["targets"]).next().is_some()),
        ("a legend", list(&panel["targets"]).all(|target| !text(target, "legendFormat").is_empty())),
    ] {
        problems.extend((!is_there).then(|| format!("it lacks {what}")));
    }
    let [x, y, width, height] = ["x", "y", "w", "h"].map(|side| panel["gridPos"][side].as_u64().unwrap_or(COLUMNS));
    let cells = (x..x + width).flat_map(|column| (y..y + height).map(move |row| (column, row)));
    let taken = cells.filter(|cell| !places.insert(*cell)).count();
    if x + width > COLUMNS || taken > 0 {
        problems.push("it lies on another panel or outside".to_owned());
    }
    problems
}

/// The sections of the runbook about alerts, by the alert.
fn sections() -> BTreeMap<String, String> {
    let runbook = std::fs::read_to_string(root().join("docs/alerts.md")).expect("the runbook");
    let parts = runbook.split("\n### ").skip(1).filter_map(|section| section.split_once('\n'));
    let body = |body: &str| body.split("\n## ").next().unwrap_or_default().to_owned();
    parts.map(|(name, text)| (name.trim().to_owned(), body(text))).collect()
}

#[test]
fn each_alert_has_a_section_in_the_runbook_and_each_section_an_alert() {
    let (sections, (_, alerts)) = (sections(), rules());
    let names: BTreeSet<&str> = alerts.iter().map(|alert| text(alert, "alert")).collect();
    assert_eq!(names.len(), alerts.len(), "each alert has a name of its own");
    let unknown = sections.keys().filter(|name| !names.contains(name.as_str()));
    let mut problems: Vec<String> =
        unknown.map(|name| format!("docs/alerts.md: no alert has the name {name}")).collect();
    for alert in &alerts {
        let (name, annotations) = (text(alert, "alert"), &alert["annotations"]);
        let mut lacks = |what: &str| problems.push(format!("{name}: {what}"));
        if !["page", "ticket"].contains(&text(&alert["labels"], "severity")) {
            lacks("its severity is neither page nor ticket");
        }
        if text(annotations, "runbook_url") != format!("docs/alerts.md#{}", name.to_lowercase()) {
            lacks("its runbook_url does not lead to its section");
        }
        if ["summary", "description"].iter().any(|field| text(annotations, field).is_empty()) {
            lacks("it lacks a summary or a description");
        }
        let Some(section) = sections.get(name) else {
            lacks("docs/alerts.md has no section of this name");
            continue;
        };
        let places: Vec<Option<usize>> = SECTION_PARTS.iter().map(|part| section.find(part)).collect();
        if places.iter().any(Option::is_none) || !places.is_sorted() {
            lacks(&format!("its section needs {} in this order", SECTION_PARTS.join(" ")));
        }
        if !section.contains("```console\n$ ") {
            lacks("its section has no command");
        }
    }
    report(&problems);
}

#[test]
fn each_alert_is_tested_to_fire_and_to_stay_silent() {
    let (tests, (_, alerts)) = (yaml("ops/prometheus/alerts.test.yaml"), rules());
    let cases = || list(&tests["tests"]).flat_map(|test| list(&test["alert_rule_test"]));
    let fires = |name: &str, wanted: bool| {
        cases().any(|case| text(case, "alertname") == name && list(&case["exp_alerts"]).next().is_some() == wanted)
    };
    let names = alerts.iter().map(|alert| text(alert, "alert"));
    let lacking = names.filter(|name| !fires(name, true) || !fires(name, false));
    report(&lacking.map(|name| format!("{name}: a case that fires and one that does not")).collect::<Vec<_>>());
}

/// A unit test of the daemon compares the documents with its own page; the gateway is a package of its own.
#[test]
fn the_documents_name_metrics_that_the_gateway_has() {
    let samples = Samples::frozen();
    let (mut problems, mut seen) = (Vec::new(), 0);
    for entry in std::fs::read_dir(root().join("docs")).expect("docs/").flatten() {
        let page = std::fs::read_to_string(entry.path()).expect("a page");
        for name in labels_after(&page, "kvrouted_gateway_").into_iter().map(|rest| format!("kvrouted_gateway_{rest}"))
        {
            seen += 1;
            let is_known = samples.0.keys().any(|sample| *sample == name);
            problems.extend((!is_known).then(|| format!("{}: {name}", entry.path().display())));
        }
    }
    report(&problems);
    assert!(seen > 10, "the documents name metrics");
}

#[test]
fn a_name_that_no_program_has_is_found() {
    let samples = samples();
    let problems = |expression: &str, shown: &str| {
        samples.problems(expression, &labels_after(shown, "$labels."), "\"down\" \"ready\"").join("; ")
    };
    assert_eq!(problems(r#"sum by (state) (kvrouted_worker_state{state=~"down|ready"}) > 0"#, "$labels.state"), "");
    assert_eq!(problems("kvrouted_worker_stat == 1", ""), "there is no metric kvrouted_worker_stat");
    assert_eq!(problems("kvrouted_worker_gaps > 0", ""), "there is no metric kvrouted_worker_gaps");
    assert!(problems(r#"kvrouted_worker_state{status="down"}"#, "").contains("has no label status"));
    assert!(problems(r#"kvrouted_worker_state{state="dead"}"#, "").contains("no source has the value dead"));
    assert!(problems("sum by (worker) (kvrouted_worker_state)", "").contains("by (worker)"));
    assert!(problems("sum by (state) (kvrouted_worker_state)", "$labels.worker_id").contains("worker_id is shown"));
    assert!(problems("rate(kvrouted_decision_seconds_bucket{le=\"1\"}[5m])", "").contains("the value 1"));
}
