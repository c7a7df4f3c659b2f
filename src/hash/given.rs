//! Block hashes that whoever asks has computed.

#![expect(unsafe_code, reason = "newtypes over u64 are written as bytes")]

use crate::ids::LocalHash;

/// Clears `out` and fills it with local hashes given as little-endian u64 at any alignment; what does not fill a hash is
/// ignored. Allocates nothing once `out` is large enough.
pub fn given_hashes(hashes_le: &[u8], out: &mut Vec<LocalHash>) {
    let count = hashes_le.len() / size_of::<LocalHash>();
    // What is there already is written over: a long buffer is not cleared for nothing.
    out.resize(count, LocalHash(0));
    let whole = &hashes_le[..count * size_of::<LocalHash>()];
    // SAFETY: `LocalHash` is a transparent newtype of `u64`, so as many of them are so many bytes, and any bytes are some
    // of them. They are borrowed from `out` alone.
    let bytes = unsafe { std::slice::from_raw_parts_mut(out.as_mut_ptr().cast::<u8>(), whole.len()) };
    bytes.copy_from_slice(whole);
}
