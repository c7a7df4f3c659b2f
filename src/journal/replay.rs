//! A journal once more: every decision is judged again from what it was made from, and held to what came of it.

use super::decode::{Ending, Entry, Reader};
use super::record::{Outcome, Record};
use crate::route::{Decision, Draws, judge};

/// Differences that are told in words.
const TOLD_MAX: usize = 8;

/// What came of judging again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    /// Decisions read.
    pub decisions: u64,
    /// Those that are bit for bit the same.
    pub equal: u64,
    /// Those that are not.
    pub different: u64,
    /// Places where decisions are missing.
    pub gaps: u64,
    /// The decisions that are missing there.
    pub lost: u64,
    /// The first differences.
    pub differences: Vec<Difference>,
}

/// One decision that came out otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Counts the decisions, from 0.
    pub decision: u64,
    /// When it was made, nanoseconds since the daemon started.
    pub at_ns: u64,
    /// What differs: first what was recorded, then what came out.
    pub what: String,
}

impl Replayed {
    /// Judges every decision of a file again, and adds what comes of it; answers with how the file ends.
    pub fn read(&mut self, reader: &mut Reader<'_>) -> Ending {
        let (mut record, mut again) = (Record::default(), Again::default());
        loop {
            match reader.next(&mut record) {
                Entry::Decision { .. } => self.hold(&record, again.judge(&record)),
                Entry::Gap { lost, .. } => (self.gaps, self.lost) = (self.gaps + 1, self.lost.saturating_add(lost)),
                Entry::End(ending) => return ending,
            }
        }
    }

    fn hold(&mut self, record: &Record, again: &Outcome) {
        match difference(&record.outcome, again) {
            None => self.equal += 1,
            Some(what) => {
                if self.differences.len() < TOLD_MAX {
                    self.differences.push(Difference { decision: self.decisions, at_ns: record.at_ns, what });
                }
                self.different += 1;
            }
        }
        self.decisions += 1;
    }
}

/// Judges records again; its buffers are reused.
#[derive(Debug, Default)]
pub struct Again {
    decision: Decision,
    outcome: Outcome,
}

impl Again {
    /// What comes of a record's decision now.
    pub fn judge(&mut self, record: &Record) -> &Outcome {
        judge(&record.policy, &record.observation, Draws::new(record.outcome.seed), &mut self.decision);
        self.outcome.take_over(&self.decision);
        &self.outcome
    }
}

/// The first thing that is not bit for bit the same.
fn difference(was: &Outcome, is: &Outcome) -> Option<String> {
    let told =
        |what: &str, was: &dyn std::fmt::Debug, is: &dyn std::fmt::Debug| Some(format!("{what}: {was:?}, now {is:?}"));
    if was.eligible != is.eligible {
        return told("workers in the running", &was.eligible, &is.eligible);
    }
    if was.removed != is.removed {
        let at = was.removed.iter().zip(&is.removed).take_while(|(was, is)| was == is).count();
        let name =
            |of: &Outcome| of.removed.get(at).map(|removed| format!("{} by {}", removed.worker, removed.rule_name()));
        return told("out of the running", &name(was), &name(is));
    }
    if was.ties != is.ties {
        return told("workers of the lowest cost", &was.ties, &is.ties);
    }
    if was.nobody_code != is.nobody_code {
        return told("the error that nobody is in the running", &was.nobody_code, &is.nobody_code);
    }
    if was.notes != is.notes {
        return told("notes", &was.notes, &is.notes);
    }
    if was.listed.len() != is.listed.len() {
        return told("candidates", &was.listed.len(), &is.listed.len());
    }
    for (place, (was, is)) in was.listed.iter().zip(&is.listed).enumerate() {
        if was.index != is.index {
            return told(&format!("candidate {place}, by place in the fleet"), &was.index.place(), &is.index.place());
        }
        let terms = [
            ("cached tokens", was.cached_tokens, is.cached_tokens),
            ("prefill", was.prefill, is.prefill),
            ("decode", was.decode, is.decode),
            ("cost", was.cost, is.cost),
        ];
        // By their bits: a difference in the last one is a difference.
        if let Some((name, was, is)) = terms.iter().find(|(_, was, is)| was.to_bits() != is.to_bits()) {
            return told(&format!("{name} of candidate {place}"), was, is);
        }
    }
    None
}
