//! What was decided, and everything a reply, an explanation or a metric says of it.

use super::affinity::AffinityOutcome;
use super::cost::CostTerms;
use super::observation::{Observation, WorkerFacts};
use super::policy::Mode;
use super::policy::Policy;
use super::rules::Rule;
use crate::error::Kind;
use crate::fleet::WorkerState;
use crate::ids::{TierBlocks, Worker, WorkerId, WorkerIndex};
use crate::load::BookingHandle;
use crate::trust::Trust;

/// Whether the prompt could be compared with the index at all. Never reported as a miss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MatchStatus {
    /// Overlaps mean what they say.
    #[default]
    Matched,
    /// The prompt's scheme, salt, LoRA or media cannot be matched soundly; overlaps are all zero.
    Unmatchable,
}

impl MatchStatus {
    /// The name used in JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Matched => "matched",
            Self::Unmatchable => "unmatchable",
        }
    }
}

/// Remarks on a whole reply; bits of `schemas/README.md`, "reply notes".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplyNotes(pub u64);

impl ReplyNotes {
    /// The space's hash scheme is not known yet: the decision was made by load alone.
    pub const SCHEME_UNKNOWN: Self = Self(1);
    /// The index moved under the query more often than it was willing to look again.
    pub const READ_CONTENDED: Self = Self(1 << 1);

    /// Every worker that could have been in the running is down or backing off; they were ranked all the same.
    pub const ALL_DOWN: Self = Self(1 << 2);
    /// The request names a session, and the space keeps none with a worker.
    pub const AFFINITY_OFF: Self = Self(1 << 3);
    /// The chosen worker prefills too, as the policy wants: it is not worth the way to another.
    pub const PREFILL_LOCAL: Self = Self(1 << 4);
    /// The chosen worker prefills too: the model has no pool for that, or nobody in it is eligible.
    pub const PREFILL_NOBODY: Self = Self(1 << 5);

    /// Adds `other`'s bits.
    pub const fn insert(&mut self, other: Self) {
        self.0 |= other.0;
    }

    /// Whether all of `other`'s bits are set.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// One candidate with what it would cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scored {
    /// Its place in the fleet table of the decision's version.
    pub index: WorkerIndex,
    /// Who it is.
    pub worker: Worker,
    /// What it holds of the prompt.
    pub overlap: TierBlocks,
    /// How far that may be believed.
    pub trust: Trust,
    /// Where it is in its life.
    pub state: WorkerState,
    /// What its cost is made of; `terms.cost` is the cost.
    pub terms: CostTerms,
}

impl Scored {
    /// A worker as it was observed, at this cost.
    #[must_use]
    pub const fn of(facts: &WorkerFacts, terms: CostTerms) -> Self {
        let WorkerFacts { index, worker, overlap, trust, state, .. } = *facts;
        Self { index, worker, overlap, trust, state, terms }
    }
}

/// What somebody in the running would cost, as far as choosing goes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CandidateCost {
    /// A place among those in the running.
    pub place: u32,
    /// What decides.
    pub cost: f64,
    /// Requests in flight, where they decide among equals; else 0.
    pub active_requests: f64,
}

/// The record of one decision, reused from one to the next.
#[derive(Clone, Debug, Default)]
pub struct Decision {
    /// The chosen one first, then by ascending cost; empty = nobody was eligible.
    pub candidates: Vec<Scored>,
    /// How many were in the running, however many are listed.
    pub eligible: u32,
    /// How many shared the lowest cost.
    pub ties: u32,
    /// Whether overlaps mean anything.
    pub matched: MatchStatus,
    /// Remarks.
    pub notes: ReplyNotes,
    /// Whole blocks of the prompt that were looked up.
    pub request_blocks: u32,
    /// How the worker was chosen: what costs are costs of.
    pub mode: Mode,
    /// Which policy was used.
    pub policy_version: u64,
    /// Which fleet table was used.
    pub fleet_version: u64,
    /// How many batches had ended in the index, summed over shards: the answer reflects them all.
    pub index_epoch: u64,
    /// The booking, if one was asked for and somebody was eligible.
    pub booking: Option<BookingHandle>,
    /// Who was taken out of the running, and by which rule.
    pub removed: Vec<(Rule, Worker)>,
    /// Who was in the running, however many are listed: places in the observation, ascending.
    pub eligible_rows: Vec<u32>,
    /// What each of them costs.
    pub costs: Vec<f64>,
    /// Those of them who are listed, as they were chosen: in the order of `candidates`.
    pub selected: Vec<CandidateCost>,
    /// What the draws of it follow from.
    pub seed: u64,
    /// Why nobody is in the running; `None` = somebody is.
    pub no_worker: Option<Kind>,
    /// Whether the prompt is taken to share its blocks with others in flight, once booked.
    pub shares_blocks: bool,
    /// Whether its prefill counts for its worker, once booked.
    pub tracks_prefill: bool,
    /// Engines with a rank that is not busy, ascending, where there are busy thresholds.
    pub engines_idle: Vec<WorkerId>,
    /// What became of the session's binding.
    pub affinity: AffinityOutcome,
    /// Who prefills, where that is another than the chosen one, who then only decodes.
    pub prefill: Option<Box<Decision>>,
}

impl Decision {
    /// Nothing decided yet about `observation`.
    pub(super) fn begin(&mut self, policy: &Policy, observation: &Observation) {
        self.candidates.clear();
        self.removed.clear();
        self.eligible_rows.clear();
        self.costs.clear();
        self.selected.clear();
        self.engines_idle.clear();
        (self.mode, self.no_worker) = (policy.mode, None);
        (self.shares_blocks, self.tracks_prefill) = (policy.assume_kv_reuse, policy.track_prefill_tokens);
        (self.affinity, self.prefill) = (AffinityOutcome::None, None);
        (self.eligible, self.ties, self.seed) = (0, 0, 0);
        self.matched = observation.matched;
        self.notes = observation.notes;
        self.request_blocks = observation.request_blocks;
        self.policy_version = policy.version;
        self.fleet_version = observation.fleet_version;
        self.index_epoch = observation.index_epoch;
        self.booking = None;
    }
}
