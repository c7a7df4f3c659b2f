//! What bookings are called by their gateways, and the names of those that ended.

use xxhash_rust::xxh3::xxh3_128_with_seed;

use super::session::SessionId;
use crate::limits::{NAME_BYTES_MAX, PREFILL_BOOKING_SUFFIX};

/// A gateway's name for a request: its session, and 128 bits of the request id's hash under a secret in place of the
/// text, which nothing asks for again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name {
    session: SessionId,
    text: [u64; 2],
}

impl Name {
    /// `secret` is not to be known to those who choose request ids.
    pub(super) fn new(secret: u64, session: SessionId, request_id: &str) -> Self {
        Self::of_bytes(secret, session, request_id.as_bytes())
    }

    /// The name of the half of a request that prefills; `None` if that cannot be one.
    pub(super) fn of_prefill_half(secret: u64, session: SessionId, request_id: &str) -> Option<Self> {
        let mut text = [0; NAME_BYTES_MAX];
        let (id, len) = (request_id.as_bytes(), request_id.len() + PREFILL_BOOKING_SUFFIX.len());
        text.get_mut(..id.len())?.copy_from_slice(id);
        text.get_mut(id.len()..len)?.copy_from_slice(PREFILL_BOOKING_SUFFIX.as_bytes());
        Some(Self::of_bytes(secret, session, &text[..len]))
    }

    fn of_bytes(secret: u64, session: SessionId, text: &[u8]) -> Self {
        let hash = xxh3_128_with_seed(text, secret);
        Self { session, text: [hash as u64, (hash >> 64) as u64] }
    }

    /// The session that it is of.
    pub(super) const fn session(&self) -> SessionId {
        self.session
    }

    /// Where it is found in a hash table.
    pub(super) const fn hash(&self) -> u64 {
        self.text[0] ^ (self.session.0 as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

/// A name that is remembered, by its hash alone: that two of so few share one is not to be expected.
#[derive(Clone, Copy, Debug, Default)]
struct Remembered {
    hash: u64,
    attempt: u32,
    /// Which booking ended before it whose name has the same list.
    before: u32,
}

/// The names of the last [`EndedNames::LAST`] bookings that ended, with their attempts, in the order they ended. Names whose
/// hashes end alike are one list, the last first.
///
/// A booking's end writes at the end of a row, and in one of a few places elsewhere, which stay in the cache: a hash table
/// of as many names would have each end wait for memory, and those who ask for a name that ended are few.
#[derive(Debug)]
pub(super) struct EndedNames {
    /// The booking that ended as number `n` is at `n % LAST`.
    row: Box<[Remembered]>,
    /// Which booking is the last of each list.
    last: Box<[u32]>,
    /// The number of the next booking that ends. It wraps.
    next: u32,
}

impl Default for EndedNames {
    fn default() -> Self {
        // All there will be, so that no booking's end waits for more; memory comes as it is touched.
        let (row, last) = (vec![Remembered::default(); Self::LAST as usize], vec![0; Self::LISTS]);
        Self { row: row.into(), last: last.into(), next: 0 }
    }
}

impl EndedNames {
    /// Names that are remembered.
    pub(super) const LAST: u32 = 1 << 16;
    /// Lists: each of some names on average.
    const LISTS: usize = Self::LAST as usize / 4;

    /// Remembers that a booking of this name and attempt ended.
    pub(super) fn add(&mut self, name: Name, attempt: u32) {
        let hash = name.hash();
        let before = std::mem::replace(&mut self.last[list(hash)], self.next);
        self.row[place(self.next)] = Remembered { hash, attempt, before };
        self.next = self.next.wrapping_add(1);
    }

    /// The attempt that ended last under a name.
    pub(super) fn attempt(&self, name: Name) -> Option<u32> {
        let hash = name.hash();
        let (mut at, mut age) = (self.last[list(hash)], 0);
        // What a list begins with, and goes on with, may be forgotten already. It only gets older.
        while age < self.age(at) && self.age(at) <= Self::LAST {
            let remembered = self.row[place(at)];
            if remembered.hash == hash {
                return Some(remembered.attempt);
            }
            (at, age) = (remembered.before, self.age(at));
        }
        None
    }

    /// How many bookings have ended since this one ended, itself included.
    const fn age(&self, number: u32) -> u32 {
        self.next.wrapping_sub(number)
    }
}

/// Where a booking is in the row.
const fn place(number: u32) -> usize {
    (number % EndedNames::LAST) as usize
}

/// In which list a name is.
const fn list(hash: u64) -> usize {
    hash as usize % EndedNames::LISTS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_apart_by_session_and_text() {
        let name = |session, text| Name::new(7, SessionId(session), text);
        assert_eq!(name(1, "a"), name(1, "a"));
        assert_ne!(name(1, "a"), name(2, "a"));
        assert_ne!(name(1, "a"), name(1, "b"));
        assert_ne!(name(1, "a").hash(), name(2, "a").hash());
        assert_ne!(name(1, "a"), Name::new(8, SessionId(1), "a"), "the secret counts");
        assert_eq!(Name::of_prefill_half(7, SessionId(1), "a"), Some(name(1, "a/prefill")));
        assert_eq!(Name::of_prefill_half(7, SessionId(1), &"a".repeat(NAME_BYTES_MAX)), None, "it is too long");
    }

    #[test]
    fn so_many_names_are_remembered_and_the_last_attempt_counts() {
        let name = |at: u32| Name::new(7, SessionId(1), &at.to_string());
        // The second begins where numbers are about to wrap.
        for begins in [0, 0_u32.wrapping_sub(2 * EndedNames::LAST)] {
            let mut ended = EndedNames { next: begins, ..EndedNames::default() };
            assert_eq!(ended.attempt(name(0)), None, "nothing has ended");
            for at in 0..3 * EndedNames::LAST {
                ended.add(name(at), 1);
                if let Some(last) = at.checked_sub(EndedNames::LAST - 1).filter(|last| last % 1000 == 0) {
                    assert_eq!(ended.attempt(name(last)), Some(1));
                    assert_eq!(last.checked_sub(1).and_then(|before| ended.attempt(name(before))), None);
                }
            }
            assert_eq!(ended.attempt(name(0)), None, "long ago");
            ended.add(name(3 * EndedNames::LAST - 1), 2);
            assert_eq!(ended.attempt(name(3 * EndedNames::LAST - 1)), Some(2));
            ended.add(name(0), 3);
            assert_eq!(ended.attempt(name(0)), Some(3));
            assert_eq!(ended.attempt(name(4 * EndedNames::LAST)), None, "never there");
        }
    }
}
