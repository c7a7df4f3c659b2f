//! The columns of a recorded decision beside those of its policy and facts, and the bytes of a word: as few as it needs.
//!
//! The columns of a policy and of the facts of a request and of a worker stand beside their structs in `route`. A file's head
//! names its columns, so a release with more or fewer of them still reads the others.

use super::decision_record::{DecisionRecord, ListedCandidate, RemovedWorker};
use crate::columns::{Column, columns};

pub(super) const RECORD: &[Column<DecisionRecord>] = columns! {
    "at_ns": at_ns;
    "booked": booked;
    "matched": observation.matched;
    "notes": observation.notes;
    "request_blocks": observation.request_blocks;
    "fleet_version": observation.fleet_version;
    "index_epoch": observation.index_epoch;
    "seed": outcome.seed;
    "eligible": outcome.eligible;
    "ties": outcome.ties;
    "notes_after": outcome.notes;
    "nobody_code": outcome.no_worker_code;
    "booking": identity.booking;
    "session_identity": identity.session;
    "waited_ns": identity.waited_ns;
    "expected_output_tokens": identity.expected_output_tokens;
    "prefix_tokens": identity.prefix_tokens;
};

pub(super) const LISTED: &[Column<ListedCandidate>] = columns! {
    "index": index;
    "cached_tokens": cached_tokens;
    "prefill": prefill;
    "decode": decode;
    "cost": cost;
};

pub(super) const REMOVED: &[Column<RemovedWorker>] = columns! {
    "rule": rule;
    "worker_id": worker.id;
    "dp_rank": worker.rank;
};

/// The names of a list of columns.
pub(super) fn names<T>(columns: &[Column<T>]) -> Vec<String> {
    columns.iter().map(|column| column.name.to_owned()).collect()
}

// ---- words ----

/// The bytes of the longest word.
const WORD_BYTES_MAX: u32 = 10;

/// Appends `word`, seven bits a byte, the lowest first; all bytes but the last have their highest bit set.
pub(super) fn put(mut word: u64, out: &mut Vec<u8>) {
    while word >= 0x80 {
        out.push(word as u8 | 0x80);
        word >>= 7;
    }
    out.push(word as u8);
}

/// Takes a word off the front of `bytes`; `None` if they end before it does, or it has more than 64 bits.
pub(super) fn take(bytes: &mut &[u8]) -> Option<u64> {
    let mut word = 0;
    for at in 0..WORD_BYTES_MAX {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        let bits = u64::from(byte & 0x7f);
        if at == WORD_BYTES_MAX - 1 && bits > 1 {
            return None;
        }
        word |= bits << (7 * at);
        if byte & 0x80 == 0 {
            return Some(word);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::columns::Word as _;

    proptest! {
        #[test]
        fn numbers_come_back(words in proptest::collection::vec(any::<u64>().prop_map(|word| word >> (word % 64)), 0..20)) {
            let mut bytes = Vec::new();
            words.iter().for_each(|word| put(*word, &mut bytes));
            let mut rest = bytes.as_slice();
            let back: Vec<u64> = words.iter().map_while(|_| take(&mut rest)).collect();
            prop_assert_eq!(back, words);
            prop_assert!(rest.is_empty());
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..20)) {
            let mut rest = bytes.as_slice();
            while take(&mut rest).is_some() {}
        }
    }

    #[test]
    fn common_fractions_take_few_bytes() {
        for (value, bytes_max) in [(0.0, 1), (1.0, 3), (0.5, 3), (0.75, 3), (1.0e9, 7)] {
            let mut bytes = Vec::new();
            put(f64::to_word(value), &mut bytes);
            assert!(bytes.len() <= bytes_max, "{value}: {} bytes", bytes.len());
        }
    }
}
