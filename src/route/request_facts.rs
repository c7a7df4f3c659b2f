//! A request as a decision sees it: its facts, and what kind of question it is.

use super::affinity::AffinitySession;
use super::policy::Policy;
use crate::columns::{Column, Word, column};
use crate::hash;
use crate::ids::{Scheme, Window, Worker};
use crate::limits::{CANDIDATES_MAX, NOMINAL_BLOCK_SIZE_TOKENS};
use crate::protocol::{Mode, Overrides, PoolRole, RouteRequest};

/// The facts of a request that a decision depends on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RequestFacts {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens per block, at least 1.
    pub block_size: u32,
    /// Whole blocks of the prompt, which it adds to the decode load. A partial block counts once it is full.
    pub whole_blocks: u32,
    /// The part of a request that the pool serves.
    pub role: PoolRole,
    /// Candidates to list, at least 1.
    pub candidates_max: u32,
    /// The only worker that may be chosen; rank `u32::MAX` = any rank of that worker.
    pub pin: Option<Worker>,
    /// Whether the request prefers or avoids labels.
    pub prefers_taints: bool,
    /// Blocks of the prompt in a cache that all workers share.
    pub shared_blocks: u32,
    /// Policy values that the request overrides.
    pub overrides: Overrides,
    /// The space's round-robin counter when the request was observed.
    pub round_robin_counter: u64,
    /// The worker that the request's session is bound to.
    pub session: AffinitySession,
    /// The time of the decision, nanoseconds of the bookings' clock.
    pub now_ns: u64,
}

impl Default for RequestFacts {
    fn default() -> Self {
        Self {
            prompt_tokens: 0,
            block_size: 1,
            whole_blocks: 0,
            role: PoolRole::Both,
            candidates_max: 1,
            pin: None,
            prefers_taints: false,
            shared_blocks: 0,
            overrides: Overrides::default(),
            round_robin_counter: 0,
            session: AffinitySession::None,
            now_ns: 0,
        }
    }
}

impl RequestFacts {
    /// The values that a journal records.
    pub(crate) const COLUMNS: &'static [Column<Self>] = &[
        column!("prompt_tokens": prompt_tokens),
        column!("block_size": block_size),
        column!("whole_blocks": whole_blocks),
        column!("role": role),
        column!("candidates_max": candidates_max),
        Column {
            name: "pin_worker_id",
            get: |request| request.pin.map(|pin| pin.id).to_word(),
            set: |request, word| {
                request.pin = Option::from_word(word)?.map(|id| Worker { id, ..Worker::default() });
                Some(())
            },
        },
        Column {
            name: "pin_dp_rank",
            get: |request| request.pin.map_or(0, |pin| pin.rank.to_word()),
            set: |request, word| {
                let rank = Word::from_word(word)?;
                request.pin = request.pin.map(|pin| Worker { rank, ..pin });
                Some(())
            },
        },
        column!("prefers_taints": prefers_taints),
        column!("shared_blocks": shared_blocks),
        column!("turn": round_robin_counter),
        Column {
            name: "session",
            get: |request| match request.session {
                AffinitySession::None => 0,
                AffinitySession::Unbound => 1,
                AffinitySession::Bound(_) => 2,
            },
            set: |request, word| {
                request.session = match word {
                    0 => AffinitySession::None,
                    1 => AffinitySession::Unbound,
                    2 => AffinitySession::Bound(Worker::default()),
                    _ => return None,
                };
                Some(())
            },
        },
        Column {
            name: "session_worker_id",
            get: |request| bound(request).id.to_word(),
            set: |request, word| set_bound(request, Worker { id: Word::from_word(word)?, ..bound(request) }),
        },
        Column {
            name: "session_dp_rank",
            get: |request| bound(request).rank.to_word(),
            set: |request, word| set_bound(request, Worker { rank: Word::from_word(word)?, ..bound(request) }),
        },
        column!("now_ns": now_ns),
        column!("override_mode": overrides.mode),
        column!("override_device_credit": overrides.device_credit),
        column!("override_prefill_load_scale": overrides.prefill_load_scale),
        column!("override_temperature": overrides.temperature),
        column!("override_shared_multiplier": overrides.shared_multiplier),
        column!("override_assume_kv_reuse": overrides.assume_kv_reuse),
        column!("override_track_prefill_tokens": overrides.track_prefill_tokens),
    ];

    /// The facts that the request alone gives; the observation adds the others. Without a scheme, blocks have a nominal size.
    pub(super) fn of(request: &RouteRequest<'_>, role: PoolRole, scheme: Option<Scheme>) -> Self {
        let counted_by = scheme.unwrap_or(Scheme { block_size: NOMINAL_BLOCK_SIZE_TOKENS, window: Window::Plain });
        Self {
            prompt_tokens: request.prompt.token_count() as u64,
            block_size: counted_by.block_size,
            whole_blocks: hash::block_count(request.prompt.token_count(), counted_by) as u32,
            role,
            candidates_max: request.candidates_max.min(CANDIDATES_MAX) as u32,
            pin: request.pin,
            prefers_taints: !request.preferred_taints.names.is_empty(),
            overrides: request.overrides,
            ..Self::default()
        }
    }

    /// Blocks of the prompt, including a partial last block.
    #[must_use]
    pub fn request_blocks(&self) -> u64 {
        self.prompt_tokens.div_ceil(u64::from(self.block_size))
    }
}

/// The worker that the session is bound to; worker 0/0 if it is not bound.
const fn bound(request: &RequestFacts) -> Worker {
    match request.session {
        AffinitySession::Bound(worker) => worker,
        AffinitySession::None | AffinitySession::Unbound => Worker::new(0, 0),
    }
}

/// Sets the worker of a bound session.
fn set_bound(request: &mut RequestFacts, worker: Worker) -> Option<()> {
    if let AffinitySession::Bound(bound) = &mut request.session {
        *bound = worker;
    }
    Some(())
}

impl RouteRequest<'_> {
    /// Whether the request is only a question: it compares and explains several candidates, and books none.
    #[must_use]
    pub(super) const fn is_question(&self) -> bool {
        self.explain && self.book.is_none() && self.candidates_max != 1
    }

    /// The same request as a question about every worker of the space, eligible or not. Overrides mode `direct`, which
    /// needs a pin.
    #[must_use]
    pub(super) fn of_every_worker(&self, policy: &Policy) -> Self {
        let mode = if policy.mode == Mode::Direct { Some(Mode::Kv) } else { self.overrides.mode };
        Self { overrides: Overrides { mode, ..self.overrides }, ..self.as_question() }
    }
}
