//! One decision as the journal keeps it: what it was made from, its policy and its outcome. Plain values.

use super::identity::RequestIdentity;
use crate::ids::{SpaceId, Worker, WorkerIndex};
use crate::route::{Decision, Observation, Policy, ReplyNotes, Rule};

/// A candidate of a reply, with the parts of its cost. In blocks, unless the name says otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ListedCandidate {
    /// Its place in the fleet table.
    pub index: WorkerIndex,
    /// Tokens of the prompt that it need not compute.
    pub cached_tokens: f64,
    /// The prefill term.
    pub prefill: f64,
    /// The decode term.
    pub decode: f64,
    /// The cost that the selection compared.
    pub cost: f64,
}

/// A worker that a rule excluded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemovedWorker {
    /// The rule, as an index into [`Rule::ALL`].
    pub rule: u32,
    /// The excluded worker.
    pub worker: Worker,
}

impl RemovedWorker {
    pub(super) fn rule_name(&self) -> &'static str {
        Rule::ALL.get(self.rule as usize).map_or("unknown", |rule| rule.name())
    }
}

/// The outcome of a decision.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// The seed of the decision's random draws.
    pub seed: u64,
    /// Eligible workers.
    pub eligible: u32,
    /// Workers that shared the lowest cost.
    pub ties: u32,
    /// The notes of the reply.
    pub notes: ReplyNotes,
    /// The error code that says why no worker was eligible; `None` = some were.
    pub no_worker_code: Option<u32>,
    /// The chosen worker first, then the other candidates of the reply.
    pub listed: Vec<ListedCandidate>,
    /// The excluded workers.
    pub removed: Vec<RemovedWorker>,
}

impl Outcome {
    /// Overwrites this outcome with that of a decision.
    pub fn copy_from(&mut self, decision: &Decision) {
        (self.seed, self.eligible, self.ties) = (decision.seed, decision.eligible, decision.ties);
        self.notes = decision.notes;
        self.no_worker_code = decision.no_worker.map(|kind| kind as u32);
        self.listed.clear();
        self.listed.extend(decision.candidates.iter().map(|scored| ListedCandidate {
            index: scored.index,
            cached_tokens: scored.terms.cached_tokens,
            prefill: scored.terms.prefill,
            decode: scored.terms.decode,
            cost: scored.terms.cost,
        }));
        self.removed.clear();
        let number = |rule: Rule| Rule::ALL.iter().position(|other| *other == rule).unwrap_or(Rule::ALL.len());
        let removed = decision.removed.iter();
        self.removed
            .extend(removed.map(|(rule, worker)| RemovedWorker { rule: number(*rule) as u32, worker: *worker }));
    }

    /// The chosen worker; `None` = no worker was eligible.
    #[must_use]
    pub fn chosen(&self) -> Option<WorkerIndex> {
        self.listed.first().map(|listed| listed.index)
    }
}

/// One decision, in buffers that are used again.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DecisionRecord {
    /// The time of the decision, nanoseconds since the daemon started.
    pub at_ns: u64,
    /// The space whose workers were candidates.
    pub space: SpaceId,
    /// Whether the chosen worker was booked.
    pub booked: bool,
    /// The policy that decided.
    pub policy: Policy,
    /// Everything that the decision was made from.
    pub observation: Observation,
    /// The outcome.
    pub outcome: Outcome,
    /// Which request it was about. No decision depends on it.
    pub identity: RequestIdentity,
}

impl DecisionRecord {
    /// Overwrites this record, but for the identity of its request, with a decision that was made from `observation`.
    /// Allocates nothing if the buffers are large enough.
    pub fn copy_from(
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
        // The notes about a pair follow from two decisions, so judging this one again would not set them.
        for note in [ReplyNotes::PREFILL_LOCAL, ReplyNotes::PREFILL_NOBODY] {
            if decision.notes.contains(note) {
                self.observation.notes.insert(note);
            }
        }
        self.outcome.copy_from(decision);
    }
}
