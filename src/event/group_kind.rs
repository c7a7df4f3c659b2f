//! The kinds of attention of KV groups, and which blocks of a group a prompt needs.
//!
//! | kind | the blocks that the engine needs to reuse a prompt up to a block | proved |
//! |---|---|---|
//! | full, MLA, sink-full attention | all | vLLM and SGLang, every version of the tests |
//! | sliding window of `w` tokens | the last `ceil((w - 1) / block size)` | vLLM 0.22.0, 0.24.0, 0.28.0, 0.33.0 |
//! | sliding window over MLA | the same | no |
//! | Mamba | the last | no |
//! | chunked local attention | those of the last chunk; events do not say how long a chunk is | no rule |
//! | encoder-only, cross attention | – | no rule |
//!
//! *Proved* means that `scripts/engines/scoreboard` compared the rule with such an engine's own cache, and the answers
//! were the same. No event states the engine's version. The versions tried begin with the first that names the kinds of
//! its groups, and cover every form of events since. A rule that is not proved is used, and its worker is `unproven`
//! (`hybrid`). The rules are those of vLLM's `find_longest_cache_hit` if all groups have blocks of one size and there
//! is no draft model.

/// The kind of attention that a KV group serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum GroupKind {
    /// The event does not say: the only group of an engine that names none.
    #[default]
    Unstated,
    /// Full, MLA or sink-full attention: a block is reusable only if the group holds it.
    Main,
    /// Attention that reaches back over a window of tokens.
    Sliding {
        /// The size of the window, including the token itself; at least 2.
        window_tokens: u32,
    },
    /// A sliding window over multi-head latent attention.
    SlidingMla {
        /// The size of the window, including the token itself; at least 2.
        window_tokens: u32,
    },
    /// A state that the engine stores at the end of a block.
    Mamba,
    /// A known kind without a rule for the blocks that a prompt needs.
    Other,
    /// A kind that this version or the engine does not know. It counts as a kind that needs every block, which can only
    /// under-count.
    Unknown,
}

impl GroupKind {
    /// Reads vLLM's name of a kind, with the window that the event states beside it.
    #[must_use]
    pub fn from_name(name: &[u8], window_tokens: Option<u32>) -> Self {
        // A window of one token needs no earlier block. How engines treat it is not known.
        let window_tokens = window_tokens.filter(|tokens| *tokens > 1);
        match (name, window_tokens) {
            (b"full_attention" | b"mla_attention" | b"sink_full_attention", _) => Self::Main,
            (b"sliding_window", Some(window_tokens)) => Self::Sliding { window_tokens },
            (b"sliding_window_mla", Some(window_tokens)) => Self::SlidingMla { window_tokens },
            (b"mamba", _) => Self::Mamba,
            (
                b"sliding_window"
                | b"sliding_window_mla"
                | b"chunked_local_attention"
                | b"encoder_only_attention"
                | b"cross_attention",
                _,
            ) => Self::Other,
            _ => Self::Unknown,
        }
    }

    /// How many of the last blocks of a prompt the group must have; `None` = all of them, or no rule.
    #[must_use]
    pub fn window_blocks(self, block_size: u32) -> Option<u32> {
        match self {
            Self::Sliding { window_tokens } | Self::SlidingMla { window_tokens } => {
                (block_size > 0).then(|| (window_tokens - 1).div_ceil(block_size))
            }
            Self::Mamba => Some(1),
            Self::Unstated | Self::Main | Self::Other | Self::Unknown => None,
        }
    }

    /// Whether the kind's rule was compared with an engine's own answers: see the table above.
    #[must_use]
    pub const fn is_proved(self) -> bool {
        matches!(self, Self::Main | Self::Sliding { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_needs_the_blocks_of_the_tokens_before_the_next() {
        let needs = |tokens: u32| GroupKind::from_name(b"sliding_window", Some(tokens)).window_blocks(16);
        assert_eq!([2, 17, 18, 33, 128].map(needs), [Some(1), Some(1), Some(2), Some(2), Some(8)]);
        assert_eq!((needs(0), needs(1)), (None, None));
        assert_eq!(GroupKind::Sliding { window_tokens: u32::MAX }.window_blocks(1), Some(u32::MAX - 1));
        assert_eq!(GroupKind::Sliding { window_tokens: 9 }.window_blocks(0), None, "a placeholder");
        assert_eq!(GroupKind::Mamba.window_blocks(16), Some(1));
    }
}
