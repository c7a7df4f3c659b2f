//! The hashes of multimodal objects, from the identifiers that engines use.

use xxhash_rust::xxh3::xxh3_64;

/// Hex digits of a SHA-256 or BLAKE3 digest, the identifier that engines derive from an object's content.
const DIGEST_HEX_DIGITS: usize = 64;
/// Hex digits of a u64.
const HASH_HEX_DIGITS: usize = 16;

/// The hash of an object as it enters a block's hash: the first 16 digits of the identifier if that is a 64-digit hex
/// digest, otherwise XXH3-64 of its bytes (seed 0).
#[must_use]
pub fn identifier_hash(identifier: &str) -> u64 {
    let bytes = identifier.as_bytes();
    let is_digest = bytes.len() == DIGEST_HEX_DIGITS && bytes.iter().all(u8::is_ascii_hexdigit);
    if is_digest && let Ok(hash) = u64::from_str_radix(&identifier[..HASH_HEX_DIGITS], 16) {
        return hash;
    }
    xxh3_64(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_gives_its_first_digits_and_any_other_identifier_is_hashed() {
        assert_eq!(identifier_hash("uuid-A"), 654_580_061_887_968_210);
        assert_eq!(identifier_hash(&"00112233445566FF".repeat(4)), 0x0011_2233_4455_66ff);
        let not_hex = "g".repeat(64);
        assert_eq!(identifier_hash(&not_hex), xxh3_64(not_hex.as_bytes()));
        let short = "0".repeat(63);
        assert_eq!(identifier_hash(&short), xxh3_64(short.as_bytes()));
    }
}
