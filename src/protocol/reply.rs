//! The parts of a reply beside its candidates, and the terms of a cost.

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

/// What the bookings of one other router add to the load of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OtherLoad {
    /// The worker.
    pub worker: Worker,
    /// The number of the router.
    pub origin: u64,
    /// How long ago it said so, milliseconds.
    pub age_ms: u64,
    /// Its requests in flight.
    pub requests: u32,
    /// Tokens of its prefills in progress, as booked.
    pub prefill_tokens: u64,
    /// Its decode blocks, rounded.
    pub decode_blocks: u64,
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

/// The terms of a cost, listed once: documentation, name, unit, and field of the schema's table `CostTerms`.
///
/// The struct below, its codec in `wire` and the table of `kvrouted query --explain` are made from this list. The types of
/// the Python and C clients are made from the schema.
macro_rules! cost_terms {
    ($make:ident) => {
        $make! {
            /// Blocks of the prompt, including a partial last block.
            request_blocks: "blocks" = VT_REQUEST_BLOCKS;
            /// Tokens of the prompt that need no computation, each tier at its weight.
            cached_tokens: "tokens" = VT_CACHED_TOKENS;
            /// The same in blocks.
            effective_overlap: "blocks" = VT_EFFECTIVE_OVERLAP;
            /// Tokens in the worker's prefill backlog.
            active_prefill_tokens: "tokens" = VT_ACTIVE_PREFILL_TOKENS;
            /// Factor in (0, 1] by which a backlog reduces the device credit.
            decay: "factor" = VT_DECAY;
            /// Credit for blocks in device memory.
            device_credit: "blocks" = VT_DEVICE_CREDIT;
            /// Credit for blocks in host memory.
            host_credit: "blocks" = VT_HOST_CREDIT;
            /// Credit for blocks on disk or in an external store.
            disk_credit: "blocks" = VT_DISK_CREDIT;
            /// Credit for blocks in a cache that all workers share.
            shared_credit: "blocks" = VT_SHARED_CREDIT;
            /// The prefill term: blocks to compute, minus all credits, times the scale.
            prefill: "blocks" = VT_PREFILL;
            /// Active decode blocks of the worker.
            active_decode_blocks: "blocks" = VT_ACTIVE_DECODE_BLOCKS;
            /// Decode blocks that the prompt would add.
            additional_decode_blocks: "blocks" = VT_ADDITIONAL_DECODE_BLOCKS;
            /// The decode term: the sum of both.
            decode: "blocks" = VT_DECODE;
            /// Requests in flight on the worker.
            active_requests: "requests" = VT_ACTIVE_REQUESTS;
            /// The cost of these requests.
            active_requests_cost: "blocks" = VT_ACTIVE_REQUESTS_COST;
            /// The worker's weight, which divides the sum; 1 = not applied.
            capability_weight: "divisor" = VT_CAPABILITY_WEIGHT;
            /// Factor of the preferred labels; 1 = none.
            taint_factor: "factor" = VT_TAINT_FACTOR;
            /// Factor of a session that is bound to the worker; 1 = none.
            affinity_factor: "factor" = VT_AFFINITY_FACTOR;
            /// Blocks of the prompt that the worker does not hold yet, but computes for other requests.
            in_flight_blocks: "blocks" = VT_IN_FLIGHT_BLOCKS;
            /// Predicted rest of the prefills that are booked before this one.
            queue_s: "s" = VT_QUEUE_S;
            /// Predicted prefill of this prompt, with attention to what is cached.
            prefill_s: "s" = VT_PREFILL_S;
            /// Predicted fetch of the blocks below the device's memory.
            fetch_s: "s" = VT_FETCH_S;
            /// What this prefill costs the worker's other requests: its time, weighted, for each of them.
            delay_s: "s" = VT_DELAY_S;
            /// What this prefill costs requests that come later: its time, weighted by how busy all workers are.
            later_delay_s: "s" = VT_LATER_DELAY_S;
            /// What other prefills on the worker cost this request's output: the share of the worker's time that they took
            /// lately, times the mean time of an output.
            output_delay_s: "s" = VT_OUTPUT_DELAY_S;
            /// The cost that decides. In `kv` it is the sum in blocks; other modes count something else.
            cost: "" = VT_COST;
        }
    };
}

pub(crate) use cost_terms;

macro_rules! define_terms {
    ($($(#[$doc:meta])* $term:ident: $unit:literal = $slot:ident;)*) => {
        /// The terms of a cost, in the order of their computation. The unit is blocks unless a term says otherwise.
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        pub struct CostTerms {
            $($(#[$doc])* pub $term: f64,)*
        }

        impl CostTerms {
            /// Every term in this order: its name, its unit, and its value.
            #[cfg(feature = "daemon")]
            pub(crate) const ALL: &'static [(&'static str, &'static str, fn(&Self) -> f64)] =
                &[$((stringify!($term), $unit, |terms| terms.$term),)*];
        }
    };
}

cost_terms!(define_terms);
