//! One decision as it is kept: what it was made from, by which policy, and what came of it. Plain values.

use crate::ids::{SpaceId, Worker, WorkerIndex};
use crate::route::{Decision, Observation, Policy, ReplyNotes, Rule};

/// A candidate of a reply, and what its cost was made of; blocks unless said otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Listed {
    /// Its place in the fleet table.
    pub index: WorkerIndex,
    /// Tokens of the prompt that it need not compute.
    pub cached_tokens: f64,
    /// The prefill term.
    pub prefill: f64,
    /// The decode term.
    pub decode: f64,
    /// What decided.
    pub cost: f64,
}

/// A worker that was out of the running.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// The rule that removed it: a place in [`Rule::ALL`].
    pub rule: u32,
    /// Who it is.
    pub worker: Worker,
}

impl Removed {
    /// The rule's name.
    #[must_use]
    pub fn rule_name(&self) -> &'static str {
        Rule::ALL.get(self.rule as usize).map_or("unknown", |rule| rule.name())
    }
}

/// What came of a decision.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// What its draws followed from.
    pub seed: u64,
    /// How many were in the running.
    pub eligible: u32,
    /// How many shared the lowest cost.
    pub ties: u32,
    /// Remarks.
    pub notes: ReplyNotes,
    /// The error code of why nobody was in the running; `None` = somebody was.
    pub nobody_code: Option<u32>,
    /// The chosen one first, then the others that were listed.
    pub listed: Vec<Listed>,
    /// Who was out of the running.
    pub removed: Vec<Removed>,
}

impl Outcome {
    /// Takes over what came of a decision.
    pub fn take_over(&mut self, decision: &Decision) {
        (self.seed, self.eligible, self.ties) = (decision.seed, decision.eligible, decision.ties);
        self.notes = decision.notes;
        self.nobody_code = decision.no_worker.map(|kind| kind as u32);
        self.listed.clear();
        self.listed.extend(decision.candidates.iter().map(|scored| Listed {
            index: scored.index,
            cached_tokens: scored.terms.cached_tokens,
            prefill: scored.terms.prefill,
            decode: scored.terms.decode,
            cost: scored.terms.cost,
        }));
        self.removed.clear();
        let place = |rule: Rule| Rule::ALL.iter().position(|other| *other == rule).unwrap_or(Rule::ALL.len());
        let removed = decision.removed.iter();
        self.removed.extend(removed.map(|(rule, worker)| Removed { rule: place(*rule) as u32, worker: *worker }));
    }

    /// The worker that was chosen; `None` = nobody was eligible.
    #[must_use]
    pub fn chosen(&self) -> Option<WorkerIndex> {
        self.listed.first().map(|listed| listed.index)
    }
}

/// One decision, in buffers that are used again.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Record {
    /// When it was made, nanoseconds since the daemon started.
    pub at_ns: u64,
    /// Among the workers of which space.
    pub space: SpaceId,
    /// Whether the chosen worker was booked.
    pub booked: bool,
    /// By which policy.
    pub policy: Policy,
    /// What it was made from.
    pub observation: Observation,
    /// What came of it.
    pub outcome: Outcome,
}

impl Record {
    /// Takes over a decision that was made from `observation`. Allocates nothing where the buffers are large enough.
    pub fn take_over(
        &mut self,
        (at_ns, space): (u64, SpaceId),
        policy: &Policy,
        observation: &Observation,
        decision: &Decision,
    ) {
        (self.at_ns, self.space, self.booked, self.policy) = (at_ns, space, decision.booking.is_some(), *policy);
        let mut workers = std::mem::take(&mut self.observation.workers);
        workers.copy_from(&observation.workers);
        self.observation = Observation { workers, ..*observation };
        // What is said of a pair follows from two decisions, not from judging this one.
        for note in [ReplyNotes::PREFILL_LOCAL, ReplyNotes::PREFILL_NOBODY] {
            if decision.notes.contains(note) {
                self.observation.notes.insert(note);
            }
        }
        self.outcome.take_over(decision);
    }
}
