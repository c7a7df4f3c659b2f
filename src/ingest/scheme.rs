//! Whether a stored event is cut as its space is, and which events may teach a space its scheme: pure.
//!
//! A scheme is learnt only from a store that leaves no doubt: in device memory, of a main (or the only)
//! KV group, at the root of a chain, with all its tokens; or from local hashes whose relay states the scheme. One such
//! block alone may still be one that is not full yet ([`is_alone`]).

use crate::event::{Content, GroupKind, Medium, Stored};
use crate::ids::{Scheme, Tier, Window};
use crate::limits::BLOCK_SIZE_TOKENS_MAX;

/// What a store's scheme is to its space's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fit {
    /// The same.
    Fits(Scheme),
    /// Another one; `teaches` says whether it could have been learnt.
    Mismatch {
        /// The event's.
        own: Scheme,
        /// The space's.
        known: Scheme,
        /// Whether the event leaves no doubt.
        teaches: bool,
    },
    /// The space has none yet and this is it.
    Learn(Scheme),
    /// The space has none yet, and this event cannot say it.
    Unknown,
}

/// Judges a store with usable content. `stated` is the scheme a relay states for its whole batch.
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
        // A relay hashes only what it has no doubt of.
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

/// Whether a store that does not fit can be a block that is not full yet. Engines announce such blocks one at a
/// time, and again, under another hash, when they are full; no prompt's whole blocks can match them meanwhile.
pub(super) fn is_partial(own: Scheme, known: Scheme, stored: &Stored<'_>) -> bool {
    own.window == known.window && own.block_size < known.block_size && stored.hashes.len() == 1
}

/// Whether a store may be of a block that is not full yet, as only one that comes alone can be: of several blocks each
/// has the same size. A relay knows what it hashed.
pub(super) fn is_alone(stored: &Stored<'_>) -> bool {
    stored.hashes.len() == 1 && !matches!(stored.content, Content::LocalHashes(_))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Salt;
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
}
