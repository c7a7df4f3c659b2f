//! What a decoder passed over or could not use, counted so that nothing disappears unseen.

use crate::reasons::reasons;

reasons! {
    /// Something in a decodable batch that was passed over, or an event whose content cannot be used.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    Oddity {}
    /// An event of a kind unknown here; skipped.
    UnknownTag = "unknown_tag";
    /// A key of an event that is unknown here; skipped.
    UnknownKey = "unknown_key";
    /// A value of an enumeration that is newer than this decoder; taken as the least it can mean.
    UnknownValue = "unknown_value";
    /// An element beyond the fields known of an array; skipped.
    TrailingElement = "trailing_element";
    /// A LoRA name or salt longer than `NAME_BYTES_MAX`: the chain's salt is `Unknown`.
    OversizedName = "oversized_name";
    /// A LoRA adapter without a name: the chain's salt is `Unknown`.
    NamelessLora = "nameless_lora";
    /// Extra keys that several salts would explain, or none: the chain's salt is `Unknown`.
    AmbiguousSalt = "ambiguous_salt";
    /// Blocks without tokens (an offloading placeholder): content `Unusable`.
    NoTokens = "no_tokens";
    /// The number of tokens is not hashes x block size: content `Unusable`.
    TokenCount = "token_count";
    /// A token that is no u32 (a string, a wide or negative number): content `Unusable`.
    TokenValue = "token_value";
    /// Pairs that do not overlap each other by one token: content `Unusable`.
    PairOverlap = "pair_overlap";
    /// The number of local hashes is not that of the hashes: content `Unusable`.
    LocalHashCount = "local_hash_count";
    /// The prompt was embeddings instead of tokens: content `Unusable`.
    PromptEmbeds = "prompt_embeds";
    /// Multimodal objects that cannot be assigned to blocks: content `Unusable`.
    UnassignedMedia = "unassigned_media";
    /// Tokens after the block entered the engine's hash; the content is that of the block alone.
    LookaheadTokens = "lookahead_tokens";
    /// A form of stored event that has no place for a salt: whether its prompt was salted is unknown.
    NoPlaceForSalt = "no_place_for_salt";
    /// Something else entered the engine's hash: content `Unusable`.
    UnknownExtraKey = "unknown_extra_key";
    /// A block whose hash is of its tokens alone and says nothing of what is before it.
    UnchainedHash = "unchained_hash";
}

const COUNT: usize = Oddity::ALL.len();

/// How often each [`Oddity`] occurred.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Oddities([u32; COUNT]);

impl Oddities {
    /// Counts one kind.
    pub const fn count(&mut self, oddity: Oddity, times: u32) {
        let slot = &mut self.0[oddity as usize];
        *slot = slot.saturating_add(times);
    }

    /// How often this one occurred.
    #[must_use]
    pub const fn get(&self, oddity: Oddity) -> u32 {
        self.0[oddity as usize]
    }

    /// Those that occurred at all.
    pub fn iter(&self) -> impl Iterator<Item = (Oddity, u32)> {
        Oddity::ALL.iter().map(|oddity| (*oddity, self.get(*oddity))).filter(|(_, times)| *times > 0)
    }

    /// Whether none occurred.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|times| *times == 0)
    }
}
