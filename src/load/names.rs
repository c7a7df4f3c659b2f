//! What bookings are called by their gateways, and the names of those that ended.

use hashbrown::HashTable;
use xxhash_rust::xxh3::xxh3_128_with_seed;

use super::session::SessionId;

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
        let hash = xxh3_128_with_seed(request_id.as_bytes(), secret);
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

/// Names of bookings that ended, with the attempt that did: at least the last [`Ended::LAST`] of them, and at most twice
/// as many. Two tables, the older of which is emptied when the younger is full: none is looked up to be forgotten.
#[derive(Debug)]
pub(super) struct Ended {
    recent: HashTable<(Name, u32)>,
    before: HashTable<(Name, u32)>,
}

impl Default for Ended {
    fn default() -> Self {
        // All there will be, so that no booking's end waits for a table that grows; memory comes as it is touched.
        let table = || HashTable::with_capacity(Self::LAST);
        Self { recent: table(), before: table() }
    }
}

impl Ended {
    /// Names that are remembered for certain.
    pub(super) const LAST: usize = 1 << 16;

    /// Remembers that a booking of this name and attempt ended.
    pub(super) fn add(&mut self, name: Name, attempt: u32) {
        if self.recent.len() >= Self::LAST {
            std::mem::swap(&mut self.recent, &mut self.before);
            self.recent.clear();
        }
        let of_entry = |(name, _): &(Name, u32)| name.hash();
        let entry = self.recent.entry(name.hash(), |(other, _)| *other == name, of_entry);
        entry.and_modify(|(_, ended)| *ended = attempt).or_insert((name, attempt));
    }

    /// The attempt that ended last under a name.
    pub(super) fn attempt(&self, name: Name) -> Option<u32> {
        let found = [&self.recent, &self.before].map(|table| table.find(name.hash(), |(other, _)| *other == name));
        found.into_iter().flatten().next().map(|(_, attempt)| *attempt)
    }
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
    }

    #[test]
    fn so_many_names_are_remembered_and_the_last_attempt_counts() {
        let mut ended = Ended::default();
        let name = |at: usize| Name::new(7, SessionId(1), &at.to_string());
        let [recent, before] = [ended.recent.capacity(), ended.before.capacity()];
        for at in 0..3 * Ended::LAST {
            ended.add(name(at), 1);
            if let Some(last) = at.checked_sub(Ended::LAST - 1).filter(|last| last % 1000 == 0) {
                assert_eq!(ended.attempt(name(last)), Some(1));
            }
        }
        assert_eq!(ended.attempt(name(0)), None, "long ago");
        assert!(ended.recent.len() + ended.before.len() <= 2 * Ended::LAST);
        assert_eq!([ended.recent.capacity(), ended.before.capacity()], [recent, before], "no table grew");
        ended.add(name(3 * Ended::LAST - 1), 2);
        assert_eq!(ended.attempt(name(3 * Ended::LAST - 1)), Some(2));
        // Its name from before the tables changed places is not in the way.
        ended.add(name(2 * Ended::LAST), 3);
        assert_eq!(ended.attempt(name(2 * Ended::LAST)), Some(3));
    }
}
