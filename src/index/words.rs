//! Block hashes as the words they are.

#![expect(unsafe_code, reason = "newtypes over u64 are looked at as u64")]

use crate::ids::{EngineHash, LocalHash};

/// Local hashes as words.
pub(super) const fn of_locals(locals: &[LocalHash]) -> &[u64] {
    // SAFETY: `LocalHash` is a transparent newtype of `u64`, so a slice of it is one of as many `u64`.
    unsafe { std::slice::from_raw_parts(locals.as_ptr().cast(), locals.len()) }
}

/// Engine hashes as words.
pub(super) const fn of_names(names: &[EngineHash]) -> &[u64] {
    // SAFETY: `EngineHash` is a transparent newtype of `u64`, so a slice of it is one of as many `u64`.
    unsafe { std::slice::from_raw_parts(names.as_ptr().cast(), names.len()) }
}

/// Words as the engine hashes they are.
pub(super) const fn as_names(words: &[u64]) -> &[EngineHash] {
    // SAFETY: as in `of_names`, the other way round; every `u64` is an engine hash.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), words.len()) }
}

/// Words as the local hashes they are.
pub(super) const fn as_locals(words: &[u64]) -> &[LocalHash] {
    // SAFETY: as in `of_locals`, the other way round; every `u64` is a local hash.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), words.len()) }
}
