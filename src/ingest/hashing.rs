//! How a stored chain is hashed: by the scheme of its space, and under which seed. Pure.
//!
//! # The scheme
//!
//! A scheme is learnt only from a store that leaves no doubt: in device memory, of a main (or the only) KV group, at
//! the root of a chain, with all its tokens; or from local hashes whose relay states the scheme. A single such block
//! may still be one that is not full yet ([`is_alone`]).
//!
//! # The seed
//!
//! LoRA and salt enter the hash of every block of a chain, but engines name the salt only at the root. So a child takes
//! the seed of its parent's binding. If that is not known, the event itself must contain enough. Binding under a
//! guessed seed could match one tenant's blocks with another tenant's prompt, so a block with an uncertain seed is not
//! bound.
//!
//! | salt of the event | parent | its seed | then |
//! |---|---|---|---|
//! | unknown | any | any | unknown root |
//! | a relay's seed | held | another | conflict |
//! | a relay's seed | any other | | bind under it |
//! | inherited, or named | none | | bind under LoRA and salt (inherited = none) |
//! | named | held | that of LoRA and salt | bind under it |
//! | named | held | another | conflict |
//! | inherited | held | that of neither LoRA nor salt, and the event names a LoRA | conflict |
//! | inherited | held | any other | bind under the parent's |
//! | named | not held | | bind under LoRA and salt |
//! | inherited | not held, the space has no salts | | bind under LoRA |
//! | inherited | not held, the space may have salts | | unknown root |
//!
//! A seed cannot be taken apart again, so a LoRA name that contradicts a salted parent goes unnoticed. The engine's own
//! block hash covers the LoRA, so no engine builds such a chain.

use crate::event::{Content, GroupKind, Medium, Salt, Stored};
use crate::hash;
use crate::ids::{Scheme, Seed, Tier, Window};
use crate::limits::BLOCK_SIZE_TOKENS_MAX;

/// The result of comparing a store's scheme with its space's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fit {
    /// Both are the same.
    Fits(Scheme),
    /// They differ.
    Mismatch {
        /// The scheme of the event.
        own: Scheme,
        /// The scheme of the space.
        known: Scheme,
        /// Whether the scheme could be learnt from the event.
        teaches: bool,
    },
    /// The space has no scheme yet, and can learn this one.
    Learn(Scheme),
    /// The space has no scheme yet, and cannot learn one from this event.
    Unknown,
}

/// Compares a store with usable content. `stated` is the scheme that a relay states for its whole batch.
pub(super) fn fit(known: Option<Scheme>, stored: &Stored<'_>, stated: Option<Scheme>) -> Fit {
    let window = match stored.content {
        Content::Tokens { bigram: true, .. } => Window::Bigram,
        Content::Tokens { bigram: false, .. } => Window::Plain,
        Content::LocalHashes(_) | Content::Unusable => stated.map_or(Window::Plain, |scheme| scheme.window),
    };
    let own = Scheme { block_size: stored.block_size, window };
    let teaches = teaches(stored, stated);
    match known {
        Some(known) if known == own => Fit::Fits(known),
        Some(known) => Fit::Mismatch { own, known, teaches },
        None if teaches => Fit::Learn(own),
        None => Fit::Unknown,
    }
}

fn teaches(stored: &Stored<'_>, stated: Option<Scheme>) -> bool {
    let whole = match stored.content {
        Content::Tokens { tokens, .. } => !tokens.is_empty(),
        // A relay hashes only blocks whose scheme is certain.
        Content::LocalHashes(_) => return stated.is_some_and(|scheme| scheme.block_size == stored.block_size),
        Content::Unusable => false,
    };
    whole
        && stored.medium == Medium::Tier(Tier::Device)
        && matches!(stored.group_kind, GroupKind::Main | GroupKind::Unstated)
        && stored.parent.is_none()
        && !stored.hashes.is_empty()
        && (1..=BLOCK_SIZE_TOKENS_MAX).contains(&stored.block_size)
}

/// Whether a store with another scheme can be a block that is not full yet. Engines announce such blocks one at a time,
/// and again, under another hash, when they are full. Meanwhile no whole block of a prompt can match them.
pub(super) fn is_partial(own: Scheme, known: Scheme, stored: &Stored<'_>) -> bool {
    own.window == known.window && own.block_size < known.block_size && stored.hashes.len() == 1
}

/// Whether a store may be of a block that is not full yet. Only a block that comes alone can be: several blocks all
/// have the same size. Blocks of a relay are full.
pub(super) fn is_alone(stored: &Stored<'_>) -> bool {
    stored.hashes.len() == 1 && !matches!(stored.content, Content::LocalHashes(_))
}

/// The block before the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Before {
    /// None: the chain starts at the root.
    Root,
    /// A block bound under this seed.
    Held(Seed),
    /// A block that is not bound.
    NotHeld,
}

/// The decision about a seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SeedOf {
    /// Hash and bind under this seed.
    Known(Seed),
    /// The seed cannot be known.
    UnknownRoot,
    /// The event contradicts its parent.
    Conflict,
}

/// Decides by the table above. `salts_possible` is false if the space's configuration says that no salts are used.
pub(super) fn seed_of(before: Before, lora: Option<&str>, salt: Salt<'_>, salts_possible: bool) -> SeedOf {
    let named = match salt {
        Salt::Unknown => return SeedOf::UnknownRoot,
        Salt::Inherited => None,
        Salt::Of(salt) => Some(salt),
        Salt::Seed(seed) => return stated_by_relay(before, seed),
    };
    match before {
        Before::Root => SeedOf::Known(hash::seed(lora, named)),
        Before::Held(parent) => {
            let contradicts = match named {
                Some(_) => hash::seed(lora, named) != parent,
                None => lora.is_some() && parent == hash::seed(None, None),
            };
            if contradicts { SeedOf::Conflict } else { SeedOf::Known(parent) }
        }
        Before::NotHeld if named.is_some() || !salts_possible => SeedOf::Known(hash::seed(lora, named)),
        Before::NotHeld => SeedOf::UnknownRoot,
    }
}

/// Decides for a seed that a relay states.
fn stated_by_relay(before: Before, seed: Seed) -> SeedOf {
    match before {
        Before::Held(parent) if parent != seed => SeedOf::Conflict,
        Before::Root | Before::Held(_) | Before::NotHeld => SeedOf::Known(seed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{EngineHash, GroupId, LocalHash};

    const PLAIN: Scheme = Scheme { block_size: 2, window: Window::Plain };
    const BIGRAM: Scheme = Scheme { block_size: 2, window: Window::Bigram };

    fn root() -> Stored<'static> {
        Stored {
            hashes: &[EngineHash(1)],
            parent: None,
            content: Content::Tokens { tokens: &[1, 2], bigram: false },
            block_size: 2,
            medium: Medium::Tier(Tier::Device),
            group: GroupId(0),
            group_kind: GroupKind::Unstated,
            lora: None,
            salt: Salt::Inherited,
            media: &[],
        }
    }

    #[test]
    fn only_a_store_without_doubt_teaches() {
        assert_eq!(fit(None, &root(), None), Fit::Learn(PLAIN));
        assert_eq!(fit(None, &Stored { group_kind: GroupKind::Main, ..root() }, None), Fit::Learn(PLAIN));
        let pairs = Stored { content: Content::Tokens { tokens: &[1, 2, 3], bigram: true }, ..root() };
        assert_eq!(fit(None, &pairs, None), Fit::Learn(BIGRAM));
        let hashed = Stored { content: Content::LocalHashes(&[LocalHash(1)]), ..root() };
        assert_eq!(fit(None, &hashed, Some(BIGRAM)), Fit::Learn(BIGRAM));
        let below = Stored { parent: Some(EngineHash(7)), medium: Medium::Tier(Tier::Host), ..hashed };
        assert_eq!(fit(None, &below, Some(BIGRAM)), Fit::Learn(BIGRAM), "the relay has learnt it");
        for doubtful in [
            Stored { parent: Some(EngineHash(7)), ..root() },
            Stored { medium: Medium::Tier(Tier::Host), ..root() },
            Stored { group_kind: GroupKind::Other, ..root() },
            Stored { group_kind: GroupKind::Unknown, ..root() },
            Stored { hashes: &[], ..root() },
            Stored { block_size: 0, ..root() },
            Stored { block_size: BLOCK_SIZE_TOKENS_MAX + 1, ..root() },
            Stored { content: Content::Unusable, ..root() },
            hashed,
        ] {
            assert_eq!(fit(None, &doubtful, None), Fit::Unknown, "{doubtful:?}");
        }
    }

    #[test]
    fn size_and_window_must_both_agree() {
        assert_eq!(fit(Some(PLAIN), &root(), None), Fit::Fits(PLAIN));
        let child = Stored { parent: Some(EngineHash(7)), block_size: 4, ..root() };
        let own = Scheme { block_size: 4, ..PLAIN };
        assert_eq!(fit(Some(PLAIN), &child, None), Fit::Mismatch { own, known: PLAIN, teaches: false });
        assert_eq!(fit(Some(BIGRAM), &root(), None), Fit::Mismatch { own: PLAIN, known: BIGRAM, teaches: true });
        let hashed = Stored { content: Content::LocalHashes(&[LocalHash(1)]), ..root() };
        assert_eq!(fit(Some(BIGRAM), &hashed, Some(BIGRAM)), Fit::Fits(BIGRAM));
    }

    #[test]
    fn a_partial_block_comes_alone_and_is_smaller() {
        let wide = Scheme { block_size: 4, ..PLAIN };
        assert!(is_partial(PLAIN, wide, &root()));
        assert!(!is_partial(wide, PLAIN, &root()));
        assert!(!is_partial(PLAIN, PLAIN, &root()));
        assert!(!is_partial(BIGRAM, wide, &root()));
        let two = Stored { hashes: &[EngineHash(1), EngineHash(2)], ..root() };
        assert!(!is_partial(PLAIN, wide, &two));
    }

    #[test]
    fn every_row_of_the_table() {
        let (plain, lora, salted) = (hash::seed(None, None), hash::seed(Some("l"), None), hash::seed(None, Some("s")));
        let both = hash::seed(Some("l"), Some("s"));
        let rows: &[(Before, Option<&str>, Salt<'_>, bool, SeedOf)] = &[
            (Before::Root, None, Salt::Unknown, true, SeedOf::UnknownRoot),
            (Before::Root, None, Salt::Unknown, false, SeedOf::UnknownRoot),
            (Before::Held(plain), None, Salt::Unknown, true, SeedOf::UnknownRoot),
            (Before::Root, None, Salt::Seed(both), true, SeedOf::Known(both)),
            (Before::Held(both), None, Salt::Seed(both), true, SeedOf::Known(both)),
            (Before::Held(plain), None, Salt::Seed(both), false, SeedOf::Conflict),
            (Before::NotHeld, None, Salt::Seed(both), true, SeedOf::Known(both)),
            (Before::Root, None, Salt::Inherited, true, SeedOf::Known(plain)),
            (Before::Root, Some("l"), Salt::Inherited, true, SeedOf::Known(lora)),
            (Before::Root, None, Salt::Of("s"), true, SeedOf::Known(salted)),
            (Before::Root, Some("l"), Salt::Of("s"), true, SeedOf::Known(both)),
            (Before::Held(both), Some("l"), Salt::Of("s"), true, SeedOf::Known(both)),
            (Before::Held(plain), None, Salt::Of("s"), true, SeedOf::Conflict),
            (Before::Held(lora), Some("l"), Salt::Of("s"), true, SeedOf::Conflict),
            (Before::Held(plain), Some("l"), Salt::Inherited, true, SeedOf::Conflict),
            (Before::Held(salted), None, Salt::Inherited, true, SeedOf::Known(salted)),
            (Before::Held(both), Some("l"), Salt::Inherited, true, SeedOf::Known(both)),
            (Before::Held(lora), None, Salt::Inherited, true, SeedOf::Known(lora)),
            (Before::NotHeld, Some("l"), Salt::Of("s"), true, SeedOf::Known(both)),
            (Before::NotHeld, Some("l"), Salt::Inherited, false, SeedOf::Known(lora)),
            (Before::NotHeld, None, Salt::Inherited, false, SeedOf::Known(plain)),
            (Before::NotHeld, Some("l"), Salt::Inherited, true, SeedOf::UnknownRoot),
        ];
        for (before, lora, salt, salts_possible, seed) in rows {
            let got = seed_of(*before, *lora, *salt, *salts_possible);
            assert_eq!(got, *seed, "{before:?} {lora:?} {salt:?} {salts_possible}");
        }
    }
}
