//! The record of a decision: everything that a reply, an explanation or a metric needs.

use super::affinity::AffinityOutcome;
use super::observation::{Observation, WorkerColumns};
use super::policy::Policy;
use super::rules::Rule;
use crate::error::Kind;
use crate::ids::{TierBlocks, Worker, WorkerId, WorkerIndex};
use crate::protocol::{BookingHandle, CostTerms, MatchStatus, Mode, OtherLoad, ReplyNotes, WorkerState};
use crate::trust::Trust;

/// One candidate with its cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scored {
    /// Its place in the fleet table of the decision's version.
    pub index: WorkerIndex,
    /// The candidate's id and rank.
    pub worker: Worker,
    /// Blocks of the prompt that it holds.
    pub overlap: TierBlocks,
    /// Trust in the overlap.
    pub trust: Trust,
    /// The worker's state.
    pub state: WorkerState,
    /// The terms of its cost; `terms.cost` decides. Behind the first candidate the others are 0 if
    /// [`Decision::only_costs`].
    pub terms: CostTerms,
}

impl Default for Scored {
    fn default() -> Self {
        Self {
            index: WorkerIndex::default(),
            worker: Worker::default(),
            overlap: TierBlocks::default(),
            trust: Trust::default(),
            state: WorkerState::Ready,
            terms: CostTerms::default(),
        }
    }
}

impl Scored {
    /// Overwrites it with the candidate in a row of an observation, all but the terms of its cost.
    #[inline(always)]
    pub(super) fn set(&mut self, workers: &WorkerColumns, row: usize) {
        self.index = workers.index(row);
        self.worker = workers.worker(row);
        self.overlap = workers.overlap(row);
        self.trust = workers.trust(row);
        self.state = workers.state(row);
    }
}

/// The cost of one eligible worker, as the selection compares it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CandidateCost {
    /// Its place among the eligible workers.
    pub place: u32,
    /// The cost that decides.
    pub cost: f64,
    /// Requests in flight if they break ties; 0 otherwise.
    pub active_requests: f64,
}

/// One decision. Its buffers are reused.
#[derive(Clone, Debug, Default)]
pub struct Decision {
    /// Set by the caller before it decides: the terms of candidates behind the first are not read, so only their costs are
    /// listed.
    pub only_costs: bool,
    /// The chosen worker first, the others by ascending cost; empty = no worker was eligible.
    pub candidates: Vec<Scored>,
    /// Eligible workers, listed or not.
    pub eligible: u32,
    /// Workers with the lowest cost.
    pub ties: u32,
    /// Whether overlaps are valid.
    pub matched: MatchStatus,
    /// Remarks on the reply.
    pub notes: ReplyNotes,
    /// Whole blocks of the prompt that were looked up.
    pub request_blocks: u32,
    /// The mode, which says what the costs count.
    pub mode: Mode,
    /// The version of the policy.
    pub policy_version: u64,
    /// The version of the fleet table.
    pub fleet_version: u64,
    /// Batches that had ended in the index, summed over its shards; the answer reflects all of them.
    pub index_epoch: u64,
    /// The booking, if the request asked for one and a worker was eligible.
    pub booking: Option<BookingHandle>,
    /// Removed workers, and the rule that removed each.
    pub removed: Vec<(Rule, Worker)>,
    /// The rows of the eligible workers, ascending, listed or not.
    pub eligible_rows: Vec<u32>,
    /// The cost of each eligible worker.
    pub costs: Vec<f64>,
    /// The listed workers, in the order of `candidates`.
    pub selected: Vec<CandidateCost>,
    /// The seed of the random draws.
    pub seed: u64,
    /// Why no worker is eligible; `None` = at least one is.
    pub no_worker: Option<Kind>,
    /// Whether the prompt, once booked, may share its blocks with other requests in flight.
    pub shares_blocks: bool,
    /// Whether the prefill counts for the worker, once booked.
    pub tracks_prefill: bool,
    /// Engines with at least one rank that is not busy, ascending; only filled if the policy has busy thresholds.
    pub engines_idle: Vec<WorkerId>,
    /// The outcome for the session's binding.
    pub affinity: AffinityOutcome,
    /// What other routers' bookings add to the candidates; only filled if the request asks to explain.
    pub others: Vec<OtherLoad>,
    /// The worker that prefills, if that is another one; the chosen worker then only decodes.
    pub prefill: Option<Box<Decision>>,
}

impl Decision {
    /// Takes the decision for a reply. The buffers that no reply reads stay here for the next decision.
    #[must_use]
    pub fn take(&mut self) -> Self {
        let mut taken = std::mem::take(self);
        std::mem::swap(&mut self.eligible_rows, &mut taken.eligible_rows);
        std::mem::swap(&mut self.costs, &mut taken.costs);
        std::mem::swap(&mut self.selected, &mut taken.selected);
        std::mem::swap(&mut self.engines_idle, &mut taken.engines_idle);
        taken
    }
}

impl Decision {
    /// Resets the record for a decision about `observation`.
    ///
    /// The candidates stay. Each decision overwrites them, which costs less than to append them again.
    pub(super) fn begin(&mut self, policy: &Policy, observation: &Observation) {
        self.removed.clear();
        self.others.clear();
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
