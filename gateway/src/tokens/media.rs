//! Multimodal objects: which blocks they touch, and the hash that the daemon knows them by.
//!
//! vLLM's events name an object of a block by its identifier, which is the `mm_hash` of its renderer. An engine with
//! adapters for the vision tower (`--enable-tower-connector-lora`) puts the adapter's name before it; whether it does
//! cannot be asked.

use xxhash_rust::xxh3::xxh3_64;

/// Hex digits of a SHA-256 or BLAKE3 digest, the identifier that engines derive from an object's content.
const DIGEST_HEX_DIGITS: usize = 64;
/// Hex digits of a u64.
const HASH_HEX_DIGITS: usize = 16;

/// One object in a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MediaSpan {
    /// Its first token.
    pub(super) offset: u32,
    /// Its tokens, at least 1.
    pub(super) length: u32,
    /// Its hash.
    pub(super) hash: u64,
}

impl MediaSpan {
    /// The token after its last one.
    pub(super) const fn end(&self) -> u64 {
        self.offset as u64 + self.length as u64
    }
}

/// The hash of an object as the daemon derives it from the identifier in an event: the first 16 digits of a 64-digit
/// hex digest, otherwise XXH3-64 of the identifier's bytes.
pub(super) fn identifier_hash(identifier: &str) -> u64 {
    let bytes = identifier.as_bytes();
    let is_digest = bytes.len() == DIGEST_HEX_DIGITS && bytes.iter().all(u8::is_ascii_hexdigit);
    if is_digest && let Ok(hash) = u64::from_str_radix(&identifier[..HASH_HEX_DIGITS], 16) {
        return hash;
    }
    xxh3_64(bytes)
}

/// Every whole block that an object touches, with the object's hash: in the order of blocks, then of objects.
pub(super) fn blocks_of(spans: &[MediaSpan], tokens: usize, block_size: u32) -> Vec<(u32, u64)> {
    let size = u64::from(block_size.max(1));
    let blocks = tokens as u64 / size;
    let mut touched = Vec::new();
    for span in spans {
        let first = u64::from(span.offset) / size;
        let end = span.end().div_ceil(size).min(blocks);
        touched.extend((first..end).map(|block| (block as u32, span.hash)));
    }
    touched.sort_by_key(|(block, _)| *block);
    touched
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The same vectors as in the daemon's tests.
    #[test]
    fn a_digest_gives_its_first_digits_and_any_other_identifier_is_hashed() {
        assert_eq!(identifier_hash("uuid-A"), 654_580_061_887_968_210);
        assert_eq!(identifier_hash(&"00112233445566FF".repeat(4)), 0x0011_2233_4455_66ff);
        let not_hex = "g".repeat(64);
        assert_eq!(identifier_hash(&not_hex), xxh3_64(not_hex.as_bytes()));
        let short = "0".repeat(63);
        assert_eq!(identifier_hash(&short), xxh3_64(short.as_bytes()));
        assert_eq!(identifier_hash(""), xxh3_64(b""));
        assert_eq!(identifier_hash(&"é".repeat(32)), xxh3_64("é".repeat(32).as_bytes()));
    }

    #[test]
    fn objects_touch_blocks() {
        let span = |offset, length, hash| MediaSpan { offset, length, hash };
        assert_eq!(blocks_of(&[span(4, 8, 9)], 12, 4), [(1, 9), (2, 9)]);
        assert_eq!(blocks_of(&[span(3, 2, 9), span(5, 1, 8)], 9, 4), [(0, 9), (1, 9), (1, 8)]);
        assert_eq!(blocks_of(&[span(7, 3, 9)], 10, 4), [(1, 9)], "the last block is not whole");
        assert_eq!(blocks_of(&[span(9, 1, 9)], 10, 4), []);
    }

    proptest! {
        /// A block has an object exactly if one of its tokens is the object's, which is vLLM's own rule.
        #[test]
        fn blocks_are_those_of_the_tokens(
            spans in proptest::collection::vec((0_u32..200, 1_u32..60), 0..6),
            tokens in 0_usize..300,
            size in 1_u32..40,
        ) {
            let spans: Vec<_> = spans.into_iter().zip(1_u64..)
                .map(|((offset, length), hash)| MediaSpan { offset, length, hash }).collect();
            let found = blocks_of(&spans, tokens, size);
            let mut expected = Vec::new();
            for block in 0..tokens as u64 / u64::from(size) {
                let (start, end) = (block * u64::from(size), (block + 1) * u64::from(size));
                for span in spans.iter().filter(|span| end > u64::from(span.offset) && start < span.end()) {
                    expected.push((block as u32, span.hash));
                }
            }
            prop_assert_eq!(found, expected);
        }
    }
}
