//! Symptoms that the rules found, and the findings made from them. Pure.

use crate::finding::{Finding, Harm, Symptom};
use crate::ids::Worker;
use crate::trust::TrustReason;

/// The symptom or reason that a finding is named after.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Cause {
    Symptom(Symptom),
    Reason(TrustReason),
}

impl Cause {
    pub(super) const fn harm(self) -> Harm {
        match self {
            Self::Symptom(symptom) => symptom.harm(),
            Self::Reason(reason) => reason.harm(),
        }
    }

    fn finding(self) -> Finding {
        match self {
            Self::Symptom(symptom) => symptom.finding(),
            Self::Reason(reason) => Finding {
                name: reason.name().to_owned(),
                harm: reason.harm(),
                what: reason.meaning().to_owned(),
                why: reason.cap().consequence().to_owned(),
                remedy: reason.remedy().to_owned(),
                ..Finding::default()
            },
        }
    }
}

/// One symptom of one worker or of the daemon. Symptoms that differ only in worker, count and time make one finding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FoundSymptom {
    pub(super) cause: Cause,
    /// `None` = it is about the daemon.
    pub(super) worker: Option<Worker>,
    /// More about it, without a full stop.
    pub(super) detail: String,
    /// A remedy in place of the cause's own.
    pub(super) remedy: Option<String>,
    /// A counter that shows it, by its name in status and metrics.
    pub(super) count: Option<(&'static str, u64)>,
    /// How long it must last before it becomes a finding, milliseconds.
    pub(super) lasting_ms_min: u64,
    /// Its beginning, milliseconds of Unix time; `None` = unknown.
    pub(super) since_unix_ms: Option<u64>,
}

impl FoundSymptom {
    pub(super) fn new(cause: Cause, worker: Option<Worker>) -> Self {
        let (detail, remedy, count) = (String::new(), None, None);
        Self { cause, worker, detail, remedy, count, lasting_ms_min: 0, since_unix_ms: None }
    }

    pub(super) fn symptom(symptom: Symptom, worker: Worker) -> Self {
        Self::new(Cause::Symptom(symptom), Some(worker))
    }

    pub(super) fn saying(self, detail: impl Into<String>) -> Self {
        Self { detail: detail.into(), ..self }
    }

    pub(super) fn counted(self, name: &'static str, count: u64) -> Self {
        Self { count: (count > 0).then_some((name, count)), ..self }
    }
}

/// Joins symptoms into findings, the worst first. Every symptom has its beginning.
pub(super) fn findings(symptoms: Vec<FoundSymptom>) -> Vec<Finding> {
    let mut groups: Vec<(FoundSymptom, Vec<Worker>)> = Vec::new();
    for found in symptoms {
        let same = groups.iter_mut().find(|(first, _)| {
            (first.cause, &first.detail, &first.remedy) == (found.cause, &found.detail, &found.remedy)
        });
        match same {
            Some((first, workers)) => {
                first.since_unix_ms = first.since_unix_ms.min(found.since_unix_ms);
                if let (Some((_, sum)), Some((_, count))) = (&mut first.count, found.count) {
                    *sum += count;
                }
                workers.extend(found.worker);
            }
            None => {
                let workers = found.worker.into_iter().collect();
                groups.push((found, workers));
            }
        }
    }
    let mut findings: Vec<Finding> = groups.into_iter().map(|(first, workers)| finding(first, workers)).collect();
    // A stable sort: the worst first, then the oldest, then in the order of the rules.
    findings.sort_by_key(|finding| (std::cmp::Reverse(finding.harm), finding.since_unix_ms));
    findings
}

fn finding(first: FoundSymptom, workers: Vec<Worker>) -> Finding {
    let mut finding = first.cause.finding();
    if !first.detail.is_empty() {
        finding.what = format!("{}: {}.", finding.what.trim_end_matches('.'), first.detail);
    }
    if let Some((name, count)) = first.count {
        finding.what.push_str(&format!(" ({name} {count})"));
    }
    if let Some(remedy) = first.remedy {
        finding.remedy = remedy;
    }
    let since_unix_ms = first.since_unix_ms.unwrap_or_default();
    Finding { since_unix_ms, workers_total: workers.len() as u32, workers, ..finding }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_symptoms_make_one_finding_and_the_worst_comes_first() {
        let at = |found: FoundSymptom, since| FoundSymptom { since_unix_ms: Some(since), ..found };
        let worker = |id| Worker::new(id, 0);
        let late = |id| FoundSymptom::new(Cause::Reason(TrustReason::JoinedLate), Some(worker(id)));
        let found = findings(vec![
            at(late(1), 9),
            at(late(2), 7),
            at(FoundSymptom::symptom(Symptom::RestartLoop, worker(1)).counted("restarts", 3), 8),
            at(FoundSymptom::symptom(Symptom::RestartLoop, worker(2)).counted("restarts", 4), 8),
            at(FoundSymptom::new(Cause::Symptom(Symptom::ClockStepped), None).saying("by 5 s"), 1),
        ]);
        let rows: Vec<_> = found.iter().map(|f| (f.name.as_str(), f.harm, f.since_unix_ms, f.workers_total)).collect();
        let rows_expected = [
            ("restart_loop", Harm::Severe, 8, 2),
            ("joined_late", Harm::Warning, 7, 2),
            ("clock_stepped", Harm::Note, 1, 0),
        ];
        assert_eq!(rows, rows_expected);
        assert!(found[0].what.ends_with("(restarts 7)"), "{}", found[0].what);
        assert!(found[2].what.ends_with(": by 5 s."), "{}", found[2].what);
        assert_eq!(found[1].workers, [worker(1), worker(2)]);
    }

    #[test]
    fn symptoms_with_different_details_make_different_findings() {
        let found = |detail: &str| FoundSymptom::symptom(Symptom::EventsOff, Worker::new(1, 0)).saying(detail);
        assert_eq!(findings(vec![found("a"), found("b"), found("a")]).len(), 2);
    }
}
