//! What a gateway asks, borrowed from the request frame.

use super::policy::Mode;
use super::policy::{Overrides, Policy};
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
        /// How they were made.
        scheme: Scheme,
        /// Tokens of the prompt, the last partial block included.
        token_count: u32,
    },
}

impl<'a> Prompt<'a> {
    /// A prompt of these tokens, without copying.
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

/// Under what name a decision is to be booked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BookingRequest<'a> {
    /// The gateway's name of the request, unique within its session while the booking lives.
    pub request_id: &'a str,
    /// Counts the gateway's tries of that request; a later try takes the booking over.
    pub attempt: u32,
}

/// Candidates that [`RouteRequest::new`] asks for: the best, and some to turn to if it fails.
const CANDIDATES_DEFAULT: usize = 8;

/// One question: which worker should run this prompt?
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouteRequest<'a> {
    /// Among the workers of this space.
    pub space: SpaceId,
    /// What is to be run.
    pub prompt: Prompt<'a>,
    /// LoRA adapter; `None` or empty = none.
    pub lora: Option<&'a str>,
    /// Cache salt; `None` or empty = none.
    pub salt: Option<&'a str>,
    /// Multimodal objects as (block index, hash).
    pub media: &'a [(u32, u64)],
    /// Book the chosen worker, or only ask.
    pub book: Option<BookingRequest<'a>>,
    /// Return the terms of every candidate's cost and what removed the others.
    pub explain: bool,
    /// How many candidates to list, from 1. Who wants to know of one alone is going to send the prompt there, so that
    /// it takes its turn also if it explains itself and books nothing. The daemon refuses 0 and lists at most
    /// `limits::CANDIDATES_MAX`.
    pub candidates_max: usize,
    /// Only these workers, rank `u32::MAX` = every rank; `None` = all.
    pub allow: Option<&'a [Worker]>,
    /// Only this worker, rank `u32::MAX` = any rank of it; `None` = any.
    pub pin: Option<Worker>,
    /// Labels that the worker must have.
    pub required_taints: Names<'a>,
    /// Labels that the worker should have, or should not.
    pub preferred_taints: Preferences<'a>,
    /// Blocks of the prompt that a cache shared by all workers holds, as ranges `[start, end)`.
    pub shared_hits: &'a [(u32, u32)],
    /// What is set in place of the space's policy.
    pub overrides: Overrides,
    /// The conversation it belongs to, whose requests are to come to one worker; `None` or empty = none.
    pub affinity_session: Option<&'a str>,
    /// Choose a worker of the model's prefill pool too, and the one here for decode alone.
    pub disaggregate: bool,
    /// How many output tokens the gateway expects; 0 = no idea.
    pub expected_output_tokens: u32,
    /// Before requests of a lower one, where they wait for a worker.
    pub priority: i32,
    /// How far it jumps ahead of its likes, where they wait: see [`Discipline`](crate::queue::Discipline). Finite.
    pub priority_jump: f64,
    /// How long it may wait for a worker, microseconds; 0 = as long as the policy says.
    pub deadline_us: u32,
}

impl<'a> RouteRequest<'a> {
    /// A plain question: no adapter, salt or media, nothing booked or explained, any worker, 8 candidates.
    /// Set what differs: `RouteRequest { salt: Some("s"), ..RouteRequest::new(space, prompt) }`.
    #[must_use]
    pub const fn new(space: SpaceId, prompt: Prompt<'a>) -> Self {
        Self {
            space,
            prompt,
            lora: None,
            salt: None,
            media: &[],
            book: None,
            explain: false,
            candidates_max: CANDIDATES_DEFAULT,
            allow: None,
            pin: None,
            required_taints: Names::NONE,
            preferred_taints: Preferences { names: Names::NONE, weights: &[] },
            shared_hits: &[],
            overrides: Overrides::NONE,
            affinity_session: None,
            disaggregate: false,
            expected_output_tokens: 0,
            priority: 0,
            priority_jump: 0.0,
            deadline_us: 0,
        }
    }

    /// The same only to be looked at: nothing is booked, and nobody's turn is taken.
    #[must_use]
    pub const fn as_question(&self) -> Self {
        let candidates_max = if self.candidates_max > 1 { self.candidates_max } else { 2 };
        Self { book: None, explain: true, candidates_max, ..*self }
    }

    /// Whether it takes nobody's turn: candidates are compared and explained, and none of them is booked.
    #[must_use]
    pub(super) const fn is_question(&self) -> bool {
        self.explain && self.book.is_none() && self.candidates_max != 1
    }

    /// The same as a question about every worker, whom `policy` would choose or not. Where only pinned requests are
    /// decided, it may still be asked.
    #[must_use]
    pub(super) fn of_every_worker(&self, policy: &Policy) -> Self {
        let mode = if policy.mode == Mode::Direct { Some(Mode::Kv) } else { self.overrides.mode };
        Self { overrides: Overrides { mode, ..self.overrides }, ..self.as_question() }
    }
}

/// Names of a request. A gateway lists them; a request that came over the wire has them packed.
#[derive(Clone, Copy, Debug)]
pub enum Names<'a> {
    /// One by one.
    Listed(&'a [&'a str]),
    /// All in one text, each from where the one before ends.
    Packed {
        /// The names, one behind the other.
        text: &'a str,
        /// Where each ends.
        ends: &'a [u32],
    },
}

impl<'a> Names<'a> {
    /// No names.
    pub const NONE: Names<'static> = Names::Listed(&[]);

    /// How many there are.
    #[must_use]
    pub const fn len(&self) -> usize {
        match self {
            Self::Listed(names) => names.len(),
            Self::Packed { ends, .. } => ends.len(),
        }
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The name at a place; `None` where there is none.
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

    /// All of them, in order.
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

/// Labels of workers that a request would rather, or rather not, have.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Preferences<'a> {
    /// The labels.
    pub names: Names<'a>,
    /// How much each matters, in the order of the names; below 0 = rather not.
    pub weights: &'a [f64],
}

impl<'a> Preferences<'a> {
    /// Labels with their weights.
    pub fn iter(&self) -> impl Iterator<Item = (&'a str, f64)> + use<'a> {
        self.names.iter().zip(self.weights.iter().copied())
    }
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
