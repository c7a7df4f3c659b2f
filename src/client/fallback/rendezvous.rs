//! Rendezvous hashing (highest random weight): every client that knows the same workers gives a key to the same one, and
//! a worker that goes moves only its own keys.
//!
//! Whole numbers and one division, so that clients in every language compute the same bits; the vectors in
//! `tests/fixtures/fallback_vectors.json` hold them to it:
//!
//! ```text
//! key      = CRC-32 (IEEE) of the bytes of a name, or of a prompt's first tokens (u32) or local hashes (u64), little
//!            endian, and then 0xFF lora 0xFF salt
//! next(x)  = the output of SplitMix64 for the state x
//! draw     = next(next(next(key) ^ worker id) ^ dp rank)
//! cost     = -log2((draw | 1) / 2^64) in units of 2^-32, / weight
//! ```
//!
//! The lowest cost is chosen, so that each worker gets keys in proportion to its weight; where two are equal, the higher
//! draw, then the lower worker id and rank.

use crate::hash::TOKEN_BYTES;
use crate::ids::Worker;
use crate::protocol::{Prompt, RouteRequest};

/// Bytes of a local hash.
const HASH_BYTES: usize = 8;
/// Before a name in a key: no UTF-8 has it.
const NAME_MARK: u8 = 0xFF;

/// What is the same for requests that should go to the same worker: the session they name, else how their prompts begin.
#[must_use]
pub(super) fn key(request: &RouteRequest<'_>, prefix_tokens_max: usize) -> u32 {
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
pub(super) const fn draw(key: u32, worker: Worker) -> u64 {
    next(next(next(key as u64) ^ worker.id.0) ^ worker.rank.0 as u64)
}

/// -log2((draw | 1) / 2^64) in units of 2^-32: from 1 to 2^38. Never rises with the draw.
#[must_use]
pub(super) const fn surprise(draw: u64) -> u64 {
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

/// What a worker costs by what it drew; a weight that is no positive number counts as 1.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "below 2^53")]
pub(super) fn cost(draw: u64, weight: f64) -> f64 {
    surprise(draw) as f64 / if weight > 0.0 && weight.is_finite() { weight } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Scheme, SpaceId, Window};

    #[test]
    fn the_cost_of_a_draw_is_its_negative_logarithm() {
        assert_eq!(surprise(0), 64 << 32);
        assert_eq!(surprise(1 << 63), 1 << 32);
        assert_eq!(surprise(3 << 62), 1_782_572_487, "log2(4/3) = 0.415037...");
        let mut before = 64 << 32;
        for at in 0..4096_u64 {
            let draw = next(at).rotate_left((at % 64) as u32) >> (at % 60);
            let exact = (64.0 - ((draw | 1) as f64).log2()) * (1_u64 << 32) as f64;
            assert!((surprise(draw) as f64 - exact).abs() < 64.0, "{draw:#x}: {} and {exact}", surprise(draw));
            let risen = surprise(at << 52);
            assert!(risen <= before, "it falls");
            before = risen;
        }
        assert_eq!(cost(1 << 63, 2.0), (1_u64 << 31) as f64);
        assert_eq!(cost(1 << 63, f64::NAN), cost(1 << 63, 1.0));
    }

    #[test]
    fn a_key_is_of_the_session_or_of_how_the_prompt_begins() {
        let tokens: Vec<u32> = (0..100).collect();
        let request = RouteRequest::new(SpaceId(0), Prompt::of_tokens(&tokens));
        let named = |request: RouteRequest<'_>, prefix| key(&request, prefix);
        let begun = RouteRequest::new(SpaceId(0), Prompt::of_tokens(&tokens[..10]));
        assert_eq!(named(request, 10), named(begun, 10));
        assert_ne!(named(request, 0), named(begun, 0), "0 = the whole prompt");
        let session = |session| RouteRequest { affinity_session: Some(session), ..request };
        assert_eq!(named(session("123456789"), 10), 0xCBF4_3926, "the check value of CRC-32");
        assert_eq!(named(session(""), 10), named(request, 10), "no name is no session");
        assert_ne!(
            named(RouteRequest { lora: Some("x"), ..request }, 10),
            named(RouteRequest { salt: Some("x"), ..request }, 10)
        );
        let scheme = Scheme { block_size: 16, window: Window::Plain };
        let hashed = |hashes| Prompt::LocalHashes { hashes, scheme, token_count: 48 };
        let of = |hashes, prefix| named(RouteRequest::new(SpaceId(0), hashed(hashes)), prefix);
        assert_eq!(of(&[7; 24], 32), of(&[7; 16], 32));
        assert_eq!(of(&[7; 24], 1), of(&[7; 8], 0), "no less than a block");
    }
}
