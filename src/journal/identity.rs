//! Which request a decision was about: names of requests, sessions and prefixes that reveal none of them.
//!
//! ```text
//! serving thread: block hashes of the prompt ─▶ one word for each `prefix_tokens` tokens
//! writer thread:  words ─▶ identities: each is SipHash of the identity before it and of its own word
//! ```
//!
//! The key is random, new for each run of the daemon, and in no file. Equal identities mean equal prefixes. Without the
//! key an identity cannot be compared with a prompt.

use std::hash::{BuildHasher, Hasher, RandomState};

use rustc_hash::FxHasher;

use crate::ids::LocalHash;
use crate::limits::JOURNAL_PREFIX_IDENTITIES_MAX;

/// What a journal knows of a request beside its decision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestIdentity {
    /// The generation of the booking's handle, which names the request's end; `None` = it was not booked.
    pub booking: Option<u64>,
    /// A hash of the session that the request named; `None` = it named none.
    pub session: Option<u64>,
    /// How long the request waited in the daemon's queue before it was decided, nanoseconds.
    pub waited_ns: u64,
    /// The output tokens that its gateway expected; 0 = unknown.
    pub expected_output_tokens: u32,
    /// Tokens of the prompt for each identity; 0 = its identities are unknown.
    pub prefix_tokens: u32,
    /// The identities of its prefixes: the first is that of the first `prefix_tokens` tokens, and so on.
    pub prefix: Vec<u64>,
}

/// What a hash is of, so that equal texts of different kinds have different hashes.
#[derive(Clone, Copy)]
enum Named {
    Session = 1,
    Request = 2,
}

/// Makes identities under one key.
#[derive(Clone, Debug, Default)]
pub struct IdentityHasher {
    key: RandomState,
    /// Tokens of a prompt for each identity; 0 = prompts get none.
    prefix_tokens: u32,
}

impl IdentityHasher {
    /// A hasher with a new key.
    #[must_use]
    pub fn new(prefix_tokens: u32) -> Self {
        Self { key: RandomState::new(), prefix_tokens }
    }

    pub(super) fn session(&self, name: &str) -> u64 {
        self.key.hash_one((Named::Session as u8, name))
    }

    pub(super) fn request(&self, name: &str) -> u64 {
        self.key.hash_one((Named::Request as u8, name))
    }

    /// Blocks of this size for each identity; `None` = prompts get no identities.
    pub(super) fn blocks_each(&self, block_size: u32) -> Option<usize> {
        (self.prefix_tokens > 0).then(|| self.prefix_tokens.div_ceil(block_size.max(1)) as usize)
    }

    /// Turns the words of a prompt into its identities.
    pub(super) fn chain(&self, words: &mut [u64]) {
        let mut before = 0;
        for word in words {
            before = self.key.hash_one((before, *word));
            *word = before;
        }
    }
}

/// Identities of a prompt with these blocks.
pub(super) fn identities(blocks: usize, blocks_each: usize) -> usize {
    (blocks / blocks_each).min(JOURNAL_PREFIX_IDENTITIES_MAX)
}

/// Overwrites `words` with one word for each `blocks_each` blocks.
pub(super) fn fold(locals: &[LocalHash], blocks_each: usize, words: &mut Vec<u64>) {
    let word = |blocks: &[LocalHash]| {
        let mut hasher = FxHasher::default();
        blocks.iter().for_each(|block| hasher.write_u64(block.0));
        hasher.finish()
    };
    words.clear();
    words.extend(locals.chunks_exact(blocks_each).take(JOURNAL_PREFIX_IDENTITIES_MAX).map(word));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identities_of(hasher: &IdentityHasher, blocks: &[u64]) -> Vec<u64> {
        let locals: Vec<LocalHash> = blocks.iter().copied().map(LocalHash).collect();
        let mut words = vec![7];
        fold(&locals, 2, &mut words);
        hasher.chain(&mut words);
        words
    }

    #[test]
    fn prompts_share_identities_as_far_as_they_share_a_prefix() {
        let hasher = IdentityHasher::new(32);
        assert_eq!(
            (hasher.blocks_each(16), hasher.blocks_each(20), hasher.blocks_each(64)),
            (Some(2), Some(2), Some(1))
        );
        let one = identities_of(&hasher, &[1, 2, 3, 4, 5, 6, 7]);
        let other = identities_of(&hasher, &[1, 2, 3, 4, 9, 6]);
        assert_eq!((one.len(), &one[..2]), (3, &other[..2]), "the seventh block is no whole identity");
        assert_ne!(one[2], other[2]);
        let same_behind_another = identities_of(&hasher, &[8, 8, 3, 4, 5, 6]);
        assert!(
            same_behind_another.iter().all(|identity| !one.contains(identity)),
            "an identity stands for all before it"
        );
    }

    #[test]
    fn another_key_gives_other_identities() {
        let (one, other) = (IdentityHasher::new(16), IdentityHasher::new(16));
        let of = |hasher: &IdentityHasher| {
            let mut all = identities_of(hasher, &[1, 2, 3, 4]);
            all.extend([hasher.session("a"), hasher.request("a")]);
            all
        };
        assert!(of(&one).iter().all(|identity| !of(&other).contains(identity)));
        assert_eq!(of(&one), of(&one.clone()));
        assert_ne!(one.session("a"), one.request("a"));
        assert_eq!(IdentityHasher::new(0).blocks_each(16), None);
    }

    #[test]
    fn the_identities_of_a_prompt_are_bounded() {
        let mut words = Vec::new();
        fold(&vec![LocalHash(1); 2 * JOURNAL_PREFIX_IDENTITIES_MAX], 1, &mut words);
        assert_eq!(words.len(), JOURNAL_PREFIX_IDENTITIES_MAX);
        assert_eq!(identities(2 * JOURNAL_PREFIX_IDENTITIES_MAX, 1), words.len());
    }
}
