//! Findings as people and scripts read them.

use serde::Serialize;

use crate::error::counted;
use crate::finding::Finding;
use crate::ids::Worker;

/// Workers named in a line before it says how many more there are.
const WORKERS_NAMED_MAX: usize = 8;

#[derive(Serialize)]
struct ReportJson<'a> {
    /// The worst; null = nothing was found.
    harm: Option<&'static str>,
    findings: Vec<FindingJson<'a>>,
}

#[derive(Serialize)]
struct FindingJson<'a> {
    finding: &'a str,
    harm: &'static str,
    since_unix_ms: u64,
    workers: Vec<WorkerJson>,
    workers_total: u32,
    what: &'a str,
    why: &'a str,
    remedy: &'a str,
}

#[derive(Serialize)]
struct WorkerJson {
    worker_id: u64,
    dp_rank: u32,
}

/// One JSON object; `findings` the worst first.
pub(super) fn json(findings: &[Finding]) -> serde_json::Result<String> {
    let worker = |worker: &Worker| WorkerJson { worker_id: worker.id.0, dp_rank: worker.rank.0 };
    let told = findings.iter().map(|of| FindingJson {
        finding: &of.name,
        harm: of.harm.name(),
        since_unix_ms: of.since_unix_ms,
        workers: of.workers.iter().map(worker).collect(),
        workers_total: of.workers_total,
        what: &of.what,
        why: &of.why,
        remedy: &of.remedy,
    });
    let harm = findings.iter().map(|finding| finding.harm).max().map(|harm| harm.name());
    serde_json::to_string(&ReportJson { harm, findings: told.collect() })
}

/// A paragraph a finding.
pub(super) fn text(findings: &[Finding], now_unix_ms: u64) -> String {
    if findings.is_empty() {
        return "nothing is wrong".to_owned();
    }
    let mut parts = vec![counted(findings.len(), "finding")];
    parts.extend(findings.iter().map(|finding| paragraph(finding, now_unix_ms)));
    parts.join("\n\n")
}

fn paragraph(finding: &Finding, now_unix_ms: u64) -> String {
    let mut head = format!("{} {}", finding.harm.name(), finding.name);
    if finding.since_unix_ms > 0 {
        head += &format!(", for {}", lasting(now_unix_ms.saturating_sub(finding.since_unix_ms)));
    }
    if !finding.workers.is_empty() {
        let named: Vec<_> = finding.workers.iter().take(WORKERS_NAMED_MAX).map(ToString::to_string).collect();
        let more = (finding.workers_total as usize).saturating_sub(named.len());
        let more = if more == 0 { String::new() } else { format!(" and {more} more") };
        let noun = if named.len() == 1 { "worker" } else { "workers" };
        head += &format!(", {noun} {}{more}", named.join(" "));
    }
    format!("{head}\n  what:  {}\n  why:   {}\n  to do: {}", finding.what, finding.why, finding.remedy)
}

/// A length of time in its two largest units.
fn lasting(ms: u64) -> String {
    let s = ms / 1000;
    match (s / 86_400, s / 3600 % 24, s / 60 % 60, s % 60) {
        (0, 0, 0, s) => format!("{s} s"),
        (0, 0, min, s) => format!("{min} min {s} s"),
        (0, h, min, _) => format!("{h} h {min} min"),
        (days, h, _, _) => format!("{days} d {h} h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Symptom;

    fn findings() -> Vec<Finding> {
        let workers: Vec<Worker> = (1..=9).map(|id| Worker::new(id, 0)).collect();
        let workers_total = 12;
        vec![
            Finding { since_unix_ms: 1_000, workers, workers_total, ..Symptom::EventsOff.finding() },
            Symptom::VersionDiffers.finding(),
        ]
    }

    #[test]
    fn a_paragraph_says_since_when_who_what_why_and_what_to_do() {
        let said = text(&findings(), 63_000);
        assert!(said.starts_with("2 findings\n\nsevere events_off, for 1 min 2 s, workers 1/0 2/0 "), "{said}");
        for words in
            ["8/0 and 4 more\n", Symptom::EventsOff.why(), Symptom::EventsOff.remedy(), "note version_differs\n"]
        {
            assert!(said.contains(words), "{words}: {said}");
        }
        assert_eq!(text(&[], 0), "nothing is wrong");
    }

    #[test]
    fn json_names_the_worst_and_every_field() {
        let said: serde_json::Value = serde_json::from_str(&json(&findings()).unwrap()).unwrap();
        assert_eq!((&said["harm"], &said["findings"][0]["finding"]), (&"severe".into(), &"events_off".into()));
        assert_eq!(said["findings"][0]["workers"][0], serde_json::json!({"worker_id": 1, "dp_rank": 0}));
        assert_eq!(said["findings"][0]["workers_total"], 12);
        assert_eq!(json(&[]).unwrap(), r#"{"harm":null,"findings":[]}"#);
    }

    #[test]
    fn times_are_told_in_two_units() {
        for (ms, said) in [(900, "0 s"), (62_000, "1 min 2 s"), (3_720_000, "1 h 2 min"), (90_000_000, "1 d 1 h")] {
            assert_eq!(lasting(ms), said);
        }
    }
}
