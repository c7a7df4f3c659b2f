//! Whether a tokenizer has been proved equal to the engine, for one model and one path. No I/O, no clock.
//!
//! ```text
//!             LOCAL_PROOF_PROMPTS equal in a row
//!  Unproved ──────────────────────────────────────▶ Proved
//!      │                                              │ one difference
//!      │ one difference                               ▼
//!      └───────────────────────────────────────▶ Disproved ──▶ Proved, after as many equal in a row
//! ```

use std::collections::BTreeSet;

use crate::limits::{LOCAL_DISPROVED_CHECK_EVERY, LOCAL_PROOF_PROMPTS, LOCAL_PROVED_CHECK_EVERY};

/// The likeliest cause of a difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LocalCause {
    /// Only special tokens at the start or the end differ.
    SpecialTokens,
    /// The engine's tokens are the first or the last ones of the local tokens.
    Truncated,
    /// The tokens stand for other text: the template or its arguments differ.
    Template,
    /// The same text has other tokens: the tokenizer differs.
    Tokenizer,
    /// The engine counted another number of tokens than it was predicted by.
    Count,
    /// The tokens that the proof rests on, those of `/tokenize`, are not the engine's.
    Reference,
}

impl LocalCause {
    /// The name in metrics.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::SpecialTokens => "special_tokens",
            Self::Truncated => "truncated",
            Self::Template => "template",
            Self::Tokenizer => "tokenizer",
            Self::Count => "count",
            Self::Reference => "reference",
        }
    }

    /// What is likely wrong, and what to do.
    #[must_use]
    pub const fn remedy(self) -> &'static str {
        match self {
            Self::SpecialTokens => {
                "the engine puts other special tokens at the start or the end of prompts; compare the folder's \
                 post_processor in tokenizer.json, and add_bos_token in tokenizer_config.json, with the engine's model"
            }
            Self::Truncated => {
                "the engine cuts prompts off; look for a truncation that its command line or its model sets"
            }
            Self::Template => {
                "the engine uses another chat template than the folder, or passes other arguments to it; compare \
                 --chat-template, --chat-template-content-format and --default-chat-template-kwargs of the engine"
            }
            Self::Tokenizer => {
                "the engine has another tokenizer than the folder; copy the files of the engine's own model, of the \
                 same revision"
            }
            Self::Count => {
                "the engine counts other tokens than the local tokenizer; it builds prompts of this kind by other \
                 rules than its renderer or /tokenize"
            }
            Self::Reference => {
                "/tokenize of the engine gives other tokens than the engine runs, so that nothing can be proved by it; \
                 start vLLM with --enable-scale-out, whose renderer is exact"
            }
        }
    }
}

/// One comparison of local tokens with the engine's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compared {
    /// Equal. The number tells prompts apart.
    Equal(u64),
    Different(LocalCause),
}

/// What a comparison changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    None,
    Proved,
    Disproved(LocalCause),
}

/// The state of a proof. A prompt counts once, so that one caller's repetitions prove nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Proof {
    /// Too few comparisons so far; none differed.
    Unproved { equal: BTreeSet<u64> },
    /// The local tokens may be used.
    Proved,
    /// A comparison differed, and too few were equal since.
    Disproved { cause: LocalCause, equal: BTreeSet<u64> },
}

impl Default for Proof {
    fn default() -> Self {
        Self::Unproved { equal: BTreeSet::new() }
    }
}

impl Proof {
    /// Whether the local tokens may be used.
    pub(super) const fn holds(&self) -> bool {
        matches!(self, Self::Proved)
    }

    /// Of how many prompts one is compared. Until the first decision all of them are, as far as threads allow.
    pub(super) const fn check_every(&self) -> u64 {
        match self {
            Self::Unproved { .. } => 1,
            Self::Proved => LOCAL_PROVED_CHECK_EVERY,
            Self::Disproved { .. } => LOCAL_DISPROVED_CHECK_EVERY,
        }
    }

    /// The cause of the last difference, if the proof does not hold because of it.
    pub(super) const fn cause(&self) -> Option<LocalCause> {
        if let Self::Disproved { cause, .. } = self { Some(*cause) } else { None }
    }

    /// Takes a comparison.
    pub(super) fn observe(&mut self, compared: Compared) -> Change {
        match (&mut *self, compared) {
            (Self::Unproved { equal } | Self::Disproved { equal, .. }, Compared::Equal(prompt)) => {
                equal.insert(prompt);
                if equal.len() < LOCAL_PROOF_PROMPTS {
                    return Change::None;
                }
                *self = Self::Proved;
                Change::Proved
            }
            (Self::Proved, Compared::Equal(_)) => Change::None,
            (Self::Disproved { cause: before, equal }, Compared::Different(cause)) => {
                equal.clear();
                *before = cause;
                Change::None
            }
            (Self::Unproved { .. } | Self::Proved, Compared::Different(cause)) => {
                *self = Self::Disproved { cause, equal: BTreeSet::new() };
                Change::Disproved(cause)
            }
        }
    }
}

/// The likeliest cause of a difference. `text_of` gives the text of tokens, if all of them are known.
pub(super) fn likeliest(
    local: &[u32],
    engine: &[u32],
    is_special: impl Fn(u32) -> bool,
    text_of: impl Fn(&[u32]) -> Option<String>,
) -> LocalCause {
    let bare = |ids: &[u32]| -> Vec<u32> {
        let start = ids.iter().position(|id| !is_special(*id)).unwrap_or(ids.len());
        let end = ids.iter().rposition(|id| !is_special(*id)).map_or(start, |last| last + 1);
        ids[start..end].to_vec()
    };
    if bare(local) == bare(engine) {
        return LocalCause::SpecialTokens;
    }
    if local.starts_with(engine) || local.ends_with(engine) {
        return LocalCause::Truncated;
    }
    match (text_of(local), text_of(engine)) {
        (Some(local), Some(engine)) if local != engine => LocalCause::Template,
        _ => LocalCause::Tokenizer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_proof_needs_different_prompts() {
        let mut proof = Proof::default();
        for _ in 0..10 * LOCAL_PROOF_PROMPTS {
            assert_eq!(proof.observe(Compared::Equal(7)), Change::None);
        }
        assert!(!proof.holds());
    }

    #[test]
    fn the_cause_is_the_likeliest() {
        let special = |id| id < 10;
        let text = |ids: &[u32]| {
            ids.iter().map(|id| if *id < 100 { char::from_u32(id % 7 + 97) } else { None }).collect::<Option<String>>()
        };
        for (local, engine, cause) in [
            (&[1, 20, 21][..], &[20, 21][..], LocalCause::SpecialTokens),
            (&[20, 21], &[1, 20, 21, 2], LocalCause::SpecialTokens),
            (&[20, 21, 22], &[20, 21], LocalCause::Truncated),
            (&[20, 21, 22], &[22], LocalCause::Truncated),
            (&[20, 21, 22], &[20, 25, 22], LocalCause::Template),
            (&[20, 21, 22], &[20, 28, 22], LocalCause::Tokenizer),
            (&[20, 21], &[20, 500], LocalCause::Tokenizer),
        ] {
            assert_eq!(likeliest(local, engine, special, text), cause, "{local:?} {engine:?}");
        }
        let causes = [
            LocalCause::SpecialTokens,
            LocalCause::Truncated,
            LocalCause::Template,
            LocalCause::Tokenizer,
            LocalCause::Count,
            LocalCause::Reference,
        ];
        let labels: BTreeSet<&str> = causes.iter().map(|cause| cause.label()).collect();
        assert!(labels.len() == causes.len() && causes.iter().all(|cause| cause.remedy().len() > 40));
    }

    fn comparison() -> impl Strategy<Value = Compared> {
        prop_oneof![
            // Long runs of equal prompts reach a proof; some prompts come twice.
            400 => any::<u16>().prop_map(|prompt| Compared::Equal(prompt.into())),
            40 => (0_u64..4).prop_map(Compared::Equal),
            1 => Just(Compared::Different(LocalCause::Template)),
            1 => Just(Compared::Different(LocalCause::Count)),
        ]
    }

    proptest! {
        /// The state after any comparisons is what the comparisons since the last difference say.
        #[test]
        fn a_proof_holds_after_enough_equal_prompts_in_a_row(all in proptest::collection::vec(comparison(), 0..600)) {
            let mut proof = Proof::default();
            let mut since: BTreeSet<u64> = BTreeSet::new();
            let mut cause = None;
            for compared in all {
                let held = proof.holds();
                let change = proof.observe(compared);
                match compared {
                    Compared::Equal(prompt) => {
                        since.insert(prompt);
                    }
                    Compared::Different(why) => {
                        since.clear();
                        cause = Some(why);
                    }
                }
                let holds = since.len() >= LOCAL_PROOF_PROMPTS;
                prop_assert_eq!(proof.holds(), holds);
                prop_assert_eq!(change == Change::Proved, holds && !held);
                prop_assert_eq!(proof.cause(), cause.filter(|_| !holds));
                if let Change::Disproved(why) = change {
                    prop_assert_eq!((Compared::Different(why), proof.holds()), (compared, false));
                }
            }
        }
    }
}
