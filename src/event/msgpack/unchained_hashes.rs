//! Detects engines whose block hashes do not depend on the blocks before.
//!
//! SGLang up to 0.5.5 names a page `hash(tuple(page))`. Python's hash of a tuple of integers has no secret, so it can
//! be computed from the event's own tokens. If the result is the event's hash, the hash covers the tokens alone. Equal
//! pages behind different prefixes then share a hash, and a page that follows another may be announced as a root. So no
//! event of such an engine shows where a block is.

use crate::event::batch::BatchWriter;
use crate::ids::EngineHash;

const PRIME_1: u64 = 11_400_714_785_074_694_791;
const PRIME_2: u64 = 14_029_467_366_897_019_727;
const PRIME_5: u64 = 2_870_177_450_012_600_261;
/// Mixed with the number of elements.
const LENGTH_SALT: u64 = PRIME_5 ^ 3_527_539;
/// Replaces the hash -1, which Python reserves for errors.
const INSTEAD_OF_ERROR: u64 = 1_546_275_796;

/// Python's hash of a tuple, from the hashes of its elements (CPython since 3.8).
fn tuple_hash(elements: impl ExactSizeIterator<Item = u64>) -> u64 {
    let length = elements.len() as u64;
    let mixed = elements.fold(PRIME_5, |hash, element| {
        hash.wrapping_add(element.wrapping_mul(PRIME_2)).rotate_left(31).wrapping_mul(PRIME_1)
    });
    let hash = mixed.wrapping_add(length ^ LENGTH_SALT);
    if hash == u64::MAX { INSTEAD_OF_ERROR } else { hash }
}

/// Whether the hash of the open event's only block covers its tokens alone. An integer is its own hash.
pub(super) fn is_of_tokens_alone(writer: &BatchWriter<'_>, pairs: bool) -> bool {
    let ([name], tokens) = (writer.hashes(), writer.tokens()) else { return false };
    let token = |token: &u32| u64::from(*token);
    let hash = match pairs {
        false => tuple_hash(tokens.iter().map(token)),
        true => tuple_hash(tokens.windows(2).map(|pair| tuple_hash(pair.iter().map(token)))),
    };
    !tokens.is_empty() && *name == EngineHash(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(tokens: &[u32]) -> u64 {
        tuple_hash(tokens.iter().map(|token| u64::from(*token)))
    }

    #[test]
    fn tuples_hash_as_cpython_does() {
        for (tokens, hash) in TUPLES {
            assert_eq!(of(tokens) as i64, hash, "{tokens:?}");
        }
    }

    /// `hash(tuple)` as CPython 3 prints it.
    const TUPLES: [(&[u32], i64); 5] = [
        (&[], 5_740_354_900_026_072_187),
        (&[0], -8_753_497_827_991_233_192),
        (&[7], -6_198_871_656_470_064_846),
        (&[1, 2, 3, 4], 590_899_387_183_067_792),
        (&[4_294_967_295, 0, 128_255, 151_655], 5_843_173_949_115_210_444),
    ];
}
