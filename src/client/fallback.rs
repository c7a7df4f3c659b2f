//! Decisions without the daemon, among the workers that it last reported as healthy. Caches and loads are not known here.
//!
//! The decision is rendezvous hashing (highest random weight): every client that knows the same workers gives a key to
//! the same one, and a worker that leaves moves only its own keys. It takes whole numbers and one division, so that
//! clients in every language compute the same bits. Tests compare them with
//! `tests/fixtures/fallback_vectors.json`.
//!
//! ```text
//! key      = CRC-32 (IEEE) of the bytes of a name, or of a prompt's first tokens (u32) or local hashes (u64), little
//!            endian, and then 0xFF lora 0xFF salt
//! next(x)  = the output of SplitMix64 for the state x
//! draw     = next(next(next(key) ^ worker id) ^ dp rank)
//! cost     = -log2((draw | 1) / 2^64) in units of 2^-32, / weight
//! ```
//!
//! The lowest cost is chosen, so that each worker gets keys in proportion to its weight. Of equal costs the higher draw
//! is chosen, then the lower worker id and rank.

use std::cmp::Ordering;
use std::time::Instant;

use crate::hash::TOKEN_BYTES;
use crate::ids::Worker;
use crate::protocol::{Prompt, RouteRequest, WorkerState};
use crate::wire::WorkerInfo;

/// The workers of all spaces, as a daemon last reported them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fleet {
    /// The workers, with the client's own ids of their spaces.
    pub workers: Vec<WorkerInfo>,
    /// The version of the daemon's fleet table; 0 = no report yet.
    pub version: u64,
    /// The daemon run that reported them.
    pub instance_id: u64,
}

/// Why the daemon did not decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FallbackReason {
    /// It cannot be reached. The client goes on trying in the background.
    Unreachable,
    /// The connection ended before the reply arrived, twice.
    ConnectionLost,
    /// It did not answer within the timeout of the call.
    Silent,
    /// It is draining: it takes no new requests.
    Draining,
}

impl FallbackReason {
    /// Every reason.
    pub const ALL: [Self; 4] = [Self::Unreachable, Self::ConnectionLost, Self::Silent, Self::Draining];

    /// The name used in logs and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unreachable => "unreachable",
            Self::ConnectionLost => "connection_lost",
            Self::Silent => "silent",
            Self::Draining => "draining",
        }
    }
}

/// A decision without the daemon. Nothing is booked, and caches did not count. For a request for a pair it names workers that
/// run both halves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fallback {
    /// The workers, the best first; never empty.
    pub workers: Vec<Worker>,
    /// The daemon last reported every worker that the request may use as down.
    pub all_down: bool,
    /// Why the daemon did not decide.
    pub why: FallbackReason,
    /// The start of the daemon's silence.
    pub since: Instant,
}

/// Ranks the workers that may run a request, the best first, and says whether all of them were reported as down. Like the
/// daemon, it uses a worker that is down only if no other worker is left. The list is empty if no worker is known.
pub(in crate::client) fn rank(
    fleet: &Fleet,
    request: &RouteRequest<'_>,
    prefix_tokens_max: usize,
) -> (Vec<Worker>, bool) {
    let wanted = |state: fn(WorkerState) -> bool| {
        let fits = move |info: &&WorkerInfo| info.space == request.space && state(info.state) && may_run(info, request);
        fleet.workers.iter().filter(fits)
    };
    let healthy = |state| matches!(state, WorkerState::Joining | WorkerState::Ready);
    let mut running: Vec<_> = wanted(healthy).collect();
    let all_down = running.is_empty();
    if all_down {
        running = wanted(|state| state == WorkerState::Down).collect();
    }
    let key = key(request, prefix_tokens_max);
    let drawn = |info: &WorkerInfo| {
        let draw = draw(key, info.worker);
        (cost(draw, info.weight), draw, info.worker)
    };
    let mut ranked: Vec<_> = running.into_iter().map(drawn).collect();
    ranked.sort_unstable_by(by_cost);
    ranked.truncate(request.candidates_max.max(1));
    (ranked.into_iter().map(|(_, _, worker)| worker).collect(), all_down)
}

/// Lowest cost first; equal costs by the higher draw, then by id and rank.
fn by_cost(one: &(f64, u64, Worker), other: &(f64, u64, Worker)) -> Ordering {
    one.0.total_cmp(&other.0).then(other.1.cmp(&one.1)).then(one.2.cmp(&other.2))
}

fn may_run(info: &WorkerInfo, request: &RouteRequest<'_>) -> bool {
    let names = |listed: &Worker| listed.selects(info.worker);
    request.allow.is_none_or(|allow| allow.iter().any(names))
        && request.pin.is_none_or(|pin| names(&pin))
        && request.required_taints.iter().all(|label| info.taints.iter().any(|taint| taint == label))
}

const HASH_BYTES: usize = 8;
/// Precedes a name in a key. UTF-8 has no such byte.
const NAME_MARK: u8 = 0xFF;

/// A number that is equal for requests that should go to the same worker: made of their session, or else of the beginning of
/// their prompts.
#[must_use]
fn key(request: &RouteRequest<'_>, prefix_tokens_max: usize) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    if let Some(session) = request.affinity_session.filter(|session| !session.is_empty()) {
        crc.update(session.as_bytes());
        return crc.finalize();
    }
    let prefix = |bytes: &mut &[u8], items: usize, item_bytes: usize| {
        *bytes = bytes.get(..items.saturating_mul(item_bytes)).unwrap_or(bytes);
    };
    let mut bytes = match request.prompt {
        Prompt::Tokens(bytes) => bytes,
        Prompt::LocalHashes { hashes, .. } => hashes,
    };
    if prefix_tokens_max > 0 {
        match request.prompt {
            Prompt::Tokens(_) => prefix(&mut bytes, prefix_tokens_max, TOKEN_BYTES),
            Prompt::LocalHashes { scheme, .. } => {
                let blocks = prefix_tokens_max.checked_div(scheme.block_size as usize).unwrap_or(0).max(1);
                prefix(&mut bytes, blocks, HASH_BYTES);
            }
        }
    }
    crc.update(bytes);
    for name in [request.lora, request.salt] {
        crc.update(&[NAME_MARK]);
        crc.update(name.unwrap_or_default().as_bytes());
    }
    crc.finalize()
}

/// The output of SplitMix64 for a state.
const fn next(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The number that a worker draws for a key.
#[must_use]
const fn draw(key: u32, worker: Worker) -> u64 {
    next(next(next(key as u64) ^ worker.id.0) ^ worker.rank.0 as u64)
}

/// -log2((draw | 1) / 2^64) in units of 2^-32: from 1 to 2^38. Never rises with the draw.
#[must_use]
const fn surprise(draw: u64) -> u64 {
    let drawn = draw | 1;
    let zeros = drawn.leading_zeros();
    // The first 32 bits after the leading zeros: a number from 1 up to 2, in units of 2^-31.
    let mut mantissa = (drawn << zeros) >> 32;
    let mut log2 = (63 - zeros as u64) << 32;
    let mut bit = 1 << 31;
    while bit > 0 {
        mantissa = (mantissa * mantissa) >> 31;
        if mantissa >= 1 << 32 {
            mantissa >>= 1;
            log2 |= bit;
        }
        bit >>= 1;
    }
    (64 << 32) - log2
}

/// A worker's cost, by its draw. A weight that is not a positive number counts as 1.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "below 2^53")]
fn cost(draw: u64, weight: f64) -> f64 {
    surprise(draw) as f64 / if weight > 0.0 && weight.is_finite() { weight } else { 1.0 }
}

#[cfg(test)]
mod tests;
