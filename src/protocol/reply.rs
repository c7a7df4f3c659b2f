//! What a reply says beside its candidates.

use crate::ids::Worker;

/// Whether the prompt could be compared with the index. An unmatchable prompt is not a miss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MatchStatus {
    /// The overlaps are valid.
    #[default]
    Matched,
    /// The scheme, salt, LoRA or media of the prompt cannot be matched soundly; all overlaps are zero.
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
    /// The space's hash scheme is not known yet; the decision used load alone.
    pub const SCHEME_UNKNOWN: Self = Self(1);
    /// The index changed under every try of the look-up.
    pub const READ_CONTENDED: Self = Self(1 << 1);

    /// Every worker that could be eligible is down or backing off; they were ranked all the same.
    pub const ALL_DOWN: Self = Self(1 << 2);
    /// The request names a session, but the policy of the space has affinity off.
    pub const AFFINITY_OFF: Self = Self(1 << 3);
    /// The chosen worker prefills too: the policy bypassed the prefill pool.
    pub const PREFILL_LOCAL: Self = Self(1 << 4);
    /// The chosen worker prefills too: the model has no prefill pool, or no worker of it is eligible.
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

/// One worker's load, including the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PotentialLoad {
    /// The worker.
    pub worker: Worker,
    /// Requests in flight now, without the prompt.
    pub active_requests: u64,
    /// Prefill tokens: the backlog, and the tokens of the prompt that the worker does not hold.
    pub prefill_tokens: u64,
    /// Distinct blocks of the prompts in flight, including this one.
    pub decode_blocks: u64,
}

/// The load of every worker of a space.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PotentialLoads {
    /// Every worker, eligible or not, in table order.
    pub workers: Vec<PotentialLoad>,
    /// Whether overlaps are valid.
    pub matched: MatchStatus,
    /// Whole blocks of the prompt that were looked up.
    pub request_blocks: u32,
    /// Remarks on what was read.
    pub notes: ReplyNotes,
}
