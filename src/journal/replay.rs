//! Replay of a journal: judges every decision again from its recorded observation, and compares the outcomes.

use super::decision_record::{DecisionRecord, Outcome};
use super::format::{Ending, JournalEntry, Reader};
use crate::route::{Decision, Draws, judge};

/// Differences that are described in words.
const DIFFERENCES_MAX: usize = 8;

/// The result of replaying journals.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    /// Decisions read.
    pub decisions: u64,
    /// Decisions with the same outcome, bit for bit.
    pub equal: u64,
    /// Decisions with another outcome.
    pub different: u64,
    /// Places where decisions are missing.
    pub gaps: u64,
    /// Decisions that are missing in those places.
    pub lost: u64,
    /// The first differences, in words.
    pub differences: Vec<Difference>,
}

/// One decision whose outcome differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The decision's position among all decisions, from 0.
    pub decision: u64,
    /// The time of the decision, nanoseconds since the daemon started.
    pub at_ns: u64,
    /// The recorded value, then the value of the replay.
    pub what: String,
}

impl Replayed {
    /// Judges every decision of a file again, and adds the results. Answers with how the file ends.
    pub fn read(&mut self, reader: &mut Reader<'_>) -> Ending {
        let (mut record, mut judge) = (DecisionRecord::default(), ReplayJudge::default());
        loop {
            match reader.next(&mut record) {
                JournalEntry::Decision { .. } => self.compare(&record, judge.judge(&record)),
                JournalEntry::Gap { lost, .. } => {
                    (self.gaps, self.lost) = (self.gaps + 1, self.lost.saturating_add(lost))
                }
                JournalEntry::Ended(_) | JournalEntry::EndsLost { .. } => {}
                JournalEntry::End(ending) => return ending,
            }
        }
    }

    fn compare(&mut self, record: &DecisionRecord, replayed: &Outcome) {
        match difference(&record.outcome, replayed) {
            None => self.equal += 1,
            Some(what) => {
                if self.differences.len() < DIFFERENCES_MAX {
                    self.differences.push(Difference { decision: self.decisions, at_ns: record.at_ns, what });
                }
                self.different += 1;
            }
        }
        self.decisions += 1;
    }
}

/// Judges recorded decisions again. Its buffers are reused.
#[derive(Debug, Default)]
pub struct ReplayJudge {
    decision: Decision,
    outcome: Outcome,
}

impl ReplayJudge {
    /// The outcome of a record's decision by this release.
    pub fn judge(&mut self, record: &DecisionRecord) -> &Outcome {
        judge(&record.policy, &record.observation, Draws::new(record.outcome.seed), &mut self.decision);
        self.outcome.copy_from(&self.decision);
        &self.outcome
    }
}

/// Describes the first value that differs, even by one bit.
fn difference(was: &Outcome, is: &Outcome) -> Option<String> {
    let differs =
        |what: &str, was: &dyn std::fmt::Debug, is: &dyn std::fmt::Debug| Some(format!("{what}: {was:?}, now {is:?}"));
    if was.eligible != is.eligible {
        return differs("eligible workers", &was.eligible, &is.eligible);
    }
    if was.removed != is.removed {
        let at = was.removed.iter().zip(&is.removed).take_while(|(was, is)| was == is).count();
        let name =
            |of: &Outcome| of.removed.get(at).map(|removed| format!("{} by {}", removed.worker, removed.rule_name()));
        return differs("excluded worker", &name(was), &name(is));
    }
    if was.ties != is.ties {
        return differs("workers with the lowest cost", &was.ties, &is.ties);
    }
    if was.no_worker_code != is.no_worker_code {
        return differs("the error code of a decision without a worker", &was.no_worker_code, &is.no_worker_code);
    }
    if was.notes != is.notes {
        return differs("notes", &was.notes, &is.notes);
    }
    if was.listed.len() != is.listed.len() {
        return differs("candidates", &was.listed.len(), &is.listed.len());
    }
    for (at, (was, is)) in was.listed.iter().zip(&is.listed).enumerate() {
        if was.index != is.index {
            return differs(
                &format!("candidate {at}, by its place in the fleet table"),
                &was.index.place(),
                &is.index.place(),
            );
        }
        let terms = [
            ("cached tokens", was.cached_tokens, is.cached_tokens),
            ("prefill", was.prefill, is.prefill),
            ("decode", was.decode, is.decode),
            ("cost", was.cost, is.cost),
        ];
        // Compared by their bits: a difference in the last bit counts.
        if let Some((name, was, is)) = terms.iter().find(|(_, was, is)| was.to_bits() != is.to_bits()) {
            return differs(&format!("{name} of candidate {at}"), was, is);
        }
    }
    None
}
