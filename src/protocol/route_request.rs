//! A gateway's route request, borrowed from its frame.

use super::mode::Mode;
use super::trace_context::TraceContext;
use crate::hash;
use crate::ids::{Scheme, SpaceId, Worker};

/// A prompt, as tokens or as the hashes of its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prompt<'a> {
    /// Token ids, little-endian u32 each, at any alignment.
    Tokens(&'a [u8]),
    /// Local hashes of the whole blocks, little-endian u64 each, at any alignment.
    LocalHashes {
        /// The hashes.
        hashes: &'a [u8],
        /// The scheme of the hashes.
        scheme: Scheme,
        /// Tokens of the prompt, including a partial last block.
        token_count: u32,
    },
}

impl<'a> Prompt<'a> {
    /// A prompt of these tokens, without a copy.
    #[must_use]
    pub fn of_tokens(tokens: &'a [u32]) -> Self {
        Self::Tokens(hash::token_bytes(tokens))
    }

    /// Tokens of the prompt.
    #[must_use]
    pub const fn token_count(&self) -> usize {
        match self {
            Self::Tokens(bytes) => bytes.len() / 4,
            Self::LocalHashes { token_count, .. } => *token_count as usize,
        }
    }
}

/// The name of the booking that a decision makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BookingRequest<'a> {
    /// The gateway's name of the request, unique within its session while the booking lives.
    pub request_id: &'a str,
    /// The attempt of that request; a later attempt takes the booking over.
    pub attempt: u32,
}

/// Candidates that [`RouteRequest::new`] asks for: the best one, and some to retry on.
const CANDIDATES_DEFAULT: usize = 8;

/// The fields of a request that are one number or one flag, listed once: documentation, name, type, default, and field of the
/// schema's table `Route`. The default is 0 or `false`, which frames leave out.
///
/// [`RouteRequest`] and its codec in `wire` are made from this list.
macro_rules! plain_request_fields {
    ($make:ident) => {
        $make! {
            /// Whether the reply lists cost terms and removed workers.
            explain: bool = false, VT_EXPLAIN;
            /// Whether a worker of the model's prefill pool is chosen too, so that the worker here only decodes.
            disaggregate: bool = false, VT_DISAGGREGATE;
            /// Output tokens that the gateway expects; 0 = unknown.
            expected_output_tokens: u32 = 0, VT_EXPECTED_OUTPUT_TOKENS;
            /// Queue priority: requests of a higher priority leave the queue first.
            priority: i32 = 0, VT_PRIORITY;
            /// How far the request jumps ahead within its priority: see the queue's discipline. Finite.
            priority_jump: f64 = 0.0, VT_PRIORITY_JUMP;
            /// The longest wait in the queue, microseconds; 0 = that of the policy.
            deadline_us: u32 = 0, VT_DEADLINE_US;
        }
    };
}

pub(crate) use plain_request_fields;

macro_rules! define_request {
    ($($(#[$doc:meta])* $field:ident: $type:ty = $default:expr, $slot:ident;)*) => {
        /// One question: which worker should run this prompt?
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub struct RouteRequest<'a> {
            /// The space of the workers.
            pub space: SpaceId,
            /// The prompt to run.
            pub prompt: Prompt<'a>,
            /// LoRA adapter; `None` or empty = none.
            pub lora: Option<&'a str>,
            /// Cache salt; `None` or empty = none.
            pub salt: Option<&'a str>,
            /// Multimodal objects as (block index, hash).
            pub media: &'a [(u32, u64)],
            /// The booking to make; `None` = make none.
            pub book: Option<BookingRequest<'a>>,
            /// Candidates to list, at least 1. A request for one candidate advances the round-robin counter even if it explains
            /// and books nothing, because its gateway will send the prompt there. The daemon refuses 0 and lists at most
            /// `limits::CANDIDATES_MAX`.
            pub candidates_max: usize,
            /// The allowed workers, rank `u32::MAX` = every rank; `None` = all.
            pub allow: Option<&'a [Worker]>,
            /// The only worker that may be chosen, rank `u32::MAX` = any rank of it; `None` = any worker.
            pub pin: Option<Worker>,
            /// Labels that the worker must have.
            pub required_taints: Names<'a>,
            /// Labels that the request prefers or avoids.
            pub preferred_taints: Preferences<'a>,
            /// Blocks of the prompt in a cache that all workers share, as ranges `[start, end)`.
            pub shared_hits: &'a [(u32, u32)],
            /// Policy values that the request overrides.
            pub overrides: Overrides,
            /// The session whose requests should go to one worker; `None` or empty = none.
            pub affinity_session: Option<&'a str>,
            /// The caller's trace context; `None` or one that is not valid = the daemon may begin a trace.
            pub trace: Option<TraceContext>,
            $($(#[$doc])* pub $field: $type,)*
        }

        impl<'a> RouteRequest<'a> {
            /// A plain question: no adapter, salt or media, no booking or explanation, any worker, 8 candidates. Set what
            /// differs: `RouteRequest { salt: Some("s"), ..RouteRequest::new(space, prompt) }`.
            #[must_use]
            pub const fn new(space: SpaceId, prompt: Prompt<'a>) -> Self {
                Self {
                    space,
                    prompt,
                    lora: None,
                    salt: None,
                    media: &[],
                    book: None,
                    candidates_max: CANDIDATES_DEFAULT,
                    allow: None,
                    pin: None,
                    required_taints: Names::NONE,
                    preferred_taints: Preferences { names: Names::NONE, weights: &[] },
                    shared_hits: &[],
                    overrides: Overrides::NONE,
                    affinity_session: None,
                    trace: None,
                    $($field: $default,)*
                }
            }
        }
    };
}

plain_request_fields!(define_request);

impl RouteRequest<'_> {
    /// The same request as a question: it books nothing and does not advance the round-robin counter.
    #[must_use]
    pub const fn as_question(&self) -> Self {
        let candidates_max = if self.candidates_max > 1 { self.candidates_max } else { 2 };
        Self { book: None, explain: true, candidates_max, ..*self }
    }
}

/// A list of names, borrowed. Requests from the wire have it packed.
#[derive(Clone, Copy, Debug)]
pub enum Names<'a> {
    /// Separate strings.
    Listed(&'a [&'a str]),
    /// One string; each name begins where the previous one ends.
    Packed {
        /// The concatenated names.
        text: &'a str,
        /// Where each name ends.
        ends: &'a [u32],
    },
}

impl<'a> Names<'a> {
    /// The empty list.
    pub const NONE: Names<'static> = Names::Listed(&[]);

    /// Names in the list.
    #[must_use]
    pub const fn len(&self) -> usize {
        match self {
            Self::Listed(names) => names.len(),
            Self::Packed { ends, .. } => ends.len(),
        }
    }

    /// Whether the list is empty.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The name at a position.
    #[must_use]
    pub fn get(&self, at: usize) -> Option<&'a str> {
        match self {
            Self::Listed(names) => names.get(at).copied(),
            Self::Packed { text, ends } => {
                let end = *ends.get(at)? as usize;
                let start = at.checked_sub(1).map_or(0, |before| ends[before] as usize);
                text.get(start..end)
            }
        }
    }

    /// All names, in order.
    pub fn iter(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        let names = *self;
        (0..names.len()).filter_map(move |at| names.get(at))
    }
}

impl Default for Names<'_> {
    fn default() -> Self {
        Self::NONE
    }
}

impl PartialEq for Names<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for Names<'_> {}

/// Labels that a request prefers or avoids.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Preferences<'a> {
    /// The labels.
    pub names: Names<'a>,
    /// The weight of each label, in the order of the names; negative = avoid.
    pub weights: &'a [f64],
}

impl<'a> Preferences<'a> {
    /// Each label with its weight.
    pub fn iter(&self) -> impl Iterator<Item = (&'a str, f64)> + use<'a> {
        self.names.iter().zip(self.weights.iter().copied())
    }
}

/// Policy values that a request overrides.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Overrides {
    /// The mode of choosing.
    pub mode: Option<Mode>,
    /// Credit of a block in device memory.
    pub device_credit: Option<f64>,
    /// Factor of the prefill term.
    pub prefill_load_scale: Option<f64>,
    /// Randomness of the choice.
    pub temperature: Option<f64>,
    /// Credit of a block in a cache that all workers share.
    pub shared_multiplier: Option<f64>,
    /// Whether requests with a common prefix share its blocks.
    pub assume_kv_reuse: Option<bool>,
    /// Whether costs include the prefill term.
    pub track_prefill_tokens: Option<bool>,
}

impl Overrides {
    /// No override.
    pub const NONE: Self = Self {
        mode: None,
        device_credit: None,
        prefill_load_scale: None,
        temperature: None,
        shared_multiplier: None,
        assume_kv_reuse: None,
        track_prefill_tokens: None,
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_names_are_the_same_names() {
        let listed = Names::Listed(&["a", "", "bcd"]);
        let packed = Names::Packed { text: "abcd", ends: &[1, 1, 4] };
        assert_eq!(listed, packed);
        assert_eq!((packed.len(), packed.get(2), packed.get(3)), (3, Some("bcd"), None));
        assert!(Names::NONE.is_empty() && listed != Names::NONE);
    }
}
