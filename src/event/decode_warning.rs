//! Decode warnings: parts of a decodable batch that the decoder skipped or could not use, counted so that no part is
//! lost without a trace.

use crate::limits::UNKNOWN_NAME_BYTES_MAX;
use crate::reasons::reasons;

reasons! {
    /// A part of a decodable batch that was skipped, or an event whose content cannot be used.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    DecodeWarning {}
    /// An event of an unknown kind; skipped.
    UnknownTag = "unknown_tag";
    /// An unknown key of an event; skipped.
    UnknownKey = "unknown_key";
    /// A value of an enumeration that this version does not know; read as the least that it can mean.
    UnknownValue = "unknown_value";
    /// An element of an array beyond the known fields; skipped.
    TrailingElement = "trailing_element";
    /// A LoRA name or salt longer than `NAME_BYTES_MAX`: the chain's salt is `Unknown`.
    OversizedName = "oversized_name";
    /// A LoRA adapter without a name: the chain's salt is `Unknown`.
    NamelessLora = "nameless_lora";
    /// Extra keys that fit several salts, or none: the chain's salt is `Unknown`.
    AmbiguousSalt = "ambiguous_salt";
    /// Blocks without tokens (an offloading placeholder): content `Unusable`.
    NoTokens = "no_tokens";
    /// The number of tokens is not hashes × block size: content `Unusable`.
    TokenCount = "token_count";
    /// A token that is not a u32 (a string, a wide or negative number): content `Unusable`.
    TokenValue = "token_value";
    /// Pairs that do not overlap each other by one token: content `Unusable`.
    PairOverlap = "pair_overlap";
    /// The numbers of local hashes and of hashes differ: content `Unusable`.
    LocalHashCount = "local_hash_count";
    /// The prompt consists of embeddings instead of tokens: content `Unusable`.
    PromptEmbeds = "prompt_embeds";
    /// Multimodal objects that cannot be assigned to blocks: content `Unusable`.
    UnassignedMedia = "unassigned_media";
    /// The engine's hash covers tokens after the block; the content is that of the block alone.
    LookaheadTokens = "lookahead_tokens";
    /// A form of stored event that has no place for a salt, so it is unknown whether its prompt was salted.
    NoPlaceForSalt = "no_place_for_salt";
    /// The engine's hash covers an unknown further key: content `Unusable`.
    UnknownExtraKey = "unknown_extra_key";
    /// A block whose hash covers its own tokens alone, and not the blocks before it.
    UnchainedHash = "unchained_hash";
}

const COUNT: usize = DecodeWarning::ALL.len();

/// The count of each [`DecodeWarning`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecodeWarnings([u32; COUNT]);

impl DecodeWarnings {
    /// Adds to the count of a warning.
    pub const fn count(&mut self, warning: DecodeWarning, times: u32) {
        let slot = &mut self.0[warning as usize];
        *slot = slot.saturating_add(times);
    }

    /// The count of a warning.
    #[must_use]
    pub const fn get(&self, warning: DecodeWarning) -> u32 {
        self.0[warning as usize]
    }

    /// The warnings that occurred, with their counts.
    pub fn iter(&self) -> impl Iterator<Item = (DecodeWarning, u32)> {
        DecodeWarning::ALL.iter().map(|warning| (*warning, self.get(*warning))).filter(|(_, times)| *times > 0)
    }

    /// Whether no warning occurred.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        // Without a branch for each: every batch is asked.
        self.0.iter().fold(0, |all, times| all | times) == 0
    }
}

/// The kind of a name that this version does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UnknownName {
    /// A kind of event: skipped.
    Tag,
    /// A medium: its blocks are not counted.
    Medium,
    /// A kind of attention of a KV group, other than main attention.
    GroupKind,
}

impl UnknownName {
    /// The name used in status.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tag => "tag",
            Self::Medium => "medium",
            Self::GroupKind => "group_kind",
        }
    }
}

/// The printable form of a name: its first [`UNKNOWN_NAME_BYTES_MAX`] bytes, with a `?` for each byte that is not
/// printable ASCII.
pub(super) fn shown(name: &[u8]) -> impl Iterator<Item = char> + Clone + '_ {
    let shown = |byte: &u8| if byte.is_ascii_graphic() { char::from(*byte) } else { '?' };
    name.iter().take(UNKNOWN_NAME_BYTES_MAX).map(shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shown_names_are_short_and_printable() {
        assert_eq!(shown(b"sliding_window").collect::<String>(), "sliding_window");
        assert_eq!(shown("a b\n\u{e9}".as_bytes()).collect::<String>(), "a?b???");
        assert_eq!(shown(&[b'x'; 1000]).count(), UNKNOWN_NAME_BYTES_MAX);
    }
}
