//! The prefixes that a file has named so far. A prompt that continues one of them names it and its own identities only,
//! so that a long conversation costs a few bytes a turn.
//!
//! Writer and reader keep the same table, and empty it at the same records: when it reaches
//! [`JOURNAL_KNOWN_IDENTITIES_MAX`]. So no file makes either of them remember more.

use hashbrown::HashMap;

use super::columns::{put, take};
use crate::limits::{JOURNAL_KNOWN_IDENTITIES_MAX, JOURNAL_PREFIX_IDENTITIES_MAX};

/// One identity, and the prefix that it continues.
#[derive(Clone, Copy, Debug)]
struct Known {
    identity: u64,
    /// The place of the identity before it; without meaning at depth 1.
    before: u32,
    /// Identities up to this one.
    depth: u32,
}

#[derive(Clone, Debug, Default)]
pub(super) struct PrefixTable {
    places: HashMap<u64, u32>,
    known: Vec<Known>,
}

impl PrefixTable {
    /// Appends the identities of a prompt, and remembers them.
    pub(super) fn put(&mut self, prefix: &[u64], out: &mut Vec<u8>) {
        // An identity is only known if all before it are.
        let known = prefix.partition_point(|identity| self.places.contains_key(identity));
        let (held, new) = prefix.split_at(known);
        put(known as u64, out);
        held.last().into_iter().for_each(|identity| out.extend_from_slice(&identity.to_le_bytes()));
        put(new.len() as u64, out);
        new.iter().for_each(|identity| out.extend_from_slice(&identity.to_le_bytes()));
        let before = held.last().and_then(|identity| self.places.get(identity).copied());
        self.remember(before.unwrap_or(0), known as u32, new);
    }

    /// Takes the identities of a prompt off the front of `bytes` and overwrites `prefix` with them. `None` if they are
    /// too many, or continue a prefix that the file has not named.
    pub(super) fn take(&mut self, bytes: &mut &[u8], prefix: &mut Vec<u64>) -> Option<()> {
        prefix.clear();
        let depth = take(bytes).filter(|depth| *depth <= JOURNAL_PREFIX_IDENTITIES_MAX as u64)? as u32;
        let mut before = 0;
        if depth > 0 {
            before = *self.places.get(&word(bytes)?)?;
            let mut at = *self.known.get(before as usize).filter(|known| known.depth == depth)?;
            prefix.push(at.identity);
            while at.depth > 1 {
                at = *self.known.get(at.before as usize)?;
                prefix.push(at.identity);
            }
            prefix.reverse();
        }
        let new = take(bytes).filter(|new| u64::from(depth) + new <= JOURNAL_PREFIX_IDENTITIES_MAX as u64)?;
        for _ in 0..new {
            prefix.push(word(bytes)?);
        }
        let new = prefix.get(depth as usize..)?;
        if new.iter().any(|identity| self.places.contains_key(identity)) {
            return None;
        }
        self.remember(before, depth, new);
        Some(())
    }

    fn remember(&mut self, mut before: u32, depth: u32, new: &[u64]) {
        for (identity, depth) in new.iter().zip(depth + 1..) {
            let place = self.known.len() as u32;
            self.known.push(Known { identity: *identity, before, depth });
            self.places.insert(*identity, place);
            before = place;
        }
        if self.known.len() >= JOURNAL_KNOWN_IDENTITIES_MAX {
            self.known.clear();
            self.places.clear();
        }
    }
}

/// Takes 64 bits off the front of `bytes`. Hashes are as likely long as short, so that [`put`] would lengthen them.
fn word(bytes: &mut &[u8]) -> Option<u64> {
    let (word, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(u64::from_le_bytes(*word))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use xxhash_rust::xxh3::xxh3_64;

    use super::*;

    /// The identities of a conversation: each of a number and of all before it.
    fn prefix(numbers: &[u8]) -> Vec<u64> {
        (1..=numbers.len()).map(|depth| xxh3_64(&numbers[..depth])).collect()
    }

    proptest! {
        #[test]
        fn prefixes_come_back(prompts in prop::collection::vec(prop::collection::vec(0..3_u8, 0..12), 0..30)) {
            let (mut written, mut read, mut bytes) = (PrefixTable::default(), PrefixTable::default(), Vec::new());
            let prompts: Vec<Vec<u64>> = prompts.iter().map(|numbers| prefix(numbers)).collect();
            prompts.iter().for_each(|prompt| written.put(prompt, &mut bytes));
            let (mut rest, mut prompt) = (bytes.as_slice(), vec![9]);
            for expected in &prompts {
                prop_assert_eq!(read.take(&mut rest, &mut prompt), Some(()));
                prop_assert_eq!(&prompt, expected);
            }
            prop_assert!(rest.is_empty());
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let (mut table, mut rest, mut prompt) = (PrefixTable::default(), bytes.as_slice(), Vec::new());
            table.put(&prefix(&[1, 2]), &mut Vec::new());
            while !rest.is_empty() && table.take(&mut rest, &mut prompt).is_some() {}
            prop_assert!(prompt.len() <= JOURNAL_PREFIX_IDENTITIES_MAX);
        }
    }

    #[test]
    fn a_turn_of_a_conversation_costs_its_own_identities() {
        let (mut table, mut bytes) = (PrefixTable::default(), Vec::new());
        let all: Vec<u8> = (0..100).collect();
        table.put(&prefix(&all), &mut bytes);
        let first = bytes.len();
        table.put(&prefix(&[all.as_slice(), &[7]].concat()), &mut bytes);
        assert_eq!((first, bytes.len() - first), (2 + 800, 2 + 8 + 8));
    }

    #[test]
    fn a_table_that_is_full_begins_anew_on_both_sides() {
        let (mut written, mut read, mut bytes) = (PrefixTable::default(), PrefixTable::default(), Vec::new());
        let mut identity = 0_u64;
        let mut prompts = Vec::new();
        for _ in 0..JOURNAL_KNOWN_IDENTITIES_MAX / 4000 + 2 {
            let prompt: Vec<u64> = (0..4000).map(|at| identity + at).collect();
            identity += 4000;
            written.put(&prompt, &mut bytes);
            written.put(&prompt, &mut bytes);
            prompts.push(prompt);
        }
        let (mut rest, mut prompt) = (bytes.as_slice(), Vec::new());
        for expected in prompts.iter().flat_map(|prompt| [prompt; 2]) {
            assert!(read.take(&mut rest, &mut prompt).is_some() && prompt == *expected);
        }
        assert!(read.known.len() < JOURNAL_KNOWN_IDENTITIES_MAX && read.places.len() == read.known.len());
    }
}
