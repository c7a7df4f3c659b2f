//! One event while its fields are decoded, in any order.

use super::cursor::{Cursor, Type};
use super::medium::medium_of;
use super::tokens::Tokens;
use super::unchained_hashes::is_of_tokens_alone;
use super::{Decoder, Result};
use crate::event::batch::{Filling, SaltText, StoredHead, Text};
use crate::event::error::Reason;
use crate::event::{DecodeWarning, GroupKind, Medium, UnknownName};
use crate::ids::{EngineHash, GroupId, Tier};
use crate::limits::{BLOCK_SIZE_TOKENS_MAX, NAME_BYTES_MAX};

/// The prefix that Dynamo's frontend, as a gateway, puts before the salt that it hands to vLLM.
const SALT_PREFIX: &str = "dynamo-cache-salt:";

/// The fields of events. The discriminant is a bit of [`Draft::seen`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Field {
    Type,
    BlockHashes,
    Parent,
    TokenIds,
    BlockSize,
    LoraId,
    Medium,
    LoraName,
    /// Position 7 of an array: vLLM's LoRA name, or SGLang's map with the salt.
    LoraNameOrMetadata,
    ExtraKeys,
    GroupIndex,
    SpecKind,
    SlidingWindow,
    Locality,
    Ownership,
    SessionId,
    Lookahead,
    CacheSalt,
    BlockMedia,
    MediaKeys,
}

impl Field {
    #[inline]
    pub(super) fn from_key(key: &[u8]) -> Option<Self> {
        // Compared whole words at a time, in the order in which engines send them. A match on the slices compares bytes.
        let is = |name: &[u8]| key == name;
        Some(match () {
            _ if is(b"type") => Self::Type,
            _ if is(b"block_hashes") => Self::BlockHashes,
            _ if is(b"parent_block_hash") => Self::Parent,
            _ if is(b"token_ids") => Self::TokenIds,
            _ if is(b"block_size") => Self::BlockSize,
            _ if is(b"lora_id") => Self::LoraId,
            _ if is(b"medium") => Self::Medium,
            _ if is(b"lora_name") => Self::LoraName,
            _ if is(b"extra_keys") => Self::ExtraKeys,
            _ if is(b"group_idx") => Self::GroupIndex,
            _ if is(b"kv_cache_spec_kind") => Self::SpecKind,
            _ if is(b"kv_cache_spec_sliding_window") => Self::SlidingWindow,
            _ if is(b"locality") => Self::Locality,
            _ if is(b"ownership") => Self::Ownership,
            _ if is(b"session_id") => Self::SessionId,
            _ if is(b"lookahead_token_ids") => Self::Lookahead,
            _ if is(b"cache_salt") => Self::CacheSalt,
            _ if is(b"block_mm_infos") => Self::BlockMedia,
            _ if is(b"mm_keys") => Self::MediaKeys,
            () => return None,
        })
    }
}

/// The fields of a stored event that an engine always sends.
const STORED_FIELDS: [Field; 4] = [Field::BlockHashes, Field::Parent, Field::TokenIds, Field::BlockSize];

/// The fields of an event that were decoded so far. Hashes and tokens are in the writer's open event.
#[derive(Debug, Default)]
pub(super) struct Draft<'p> {
    seen: u32,
    parent: Option<EngineHash>,
    tokens: Tokens,
    block_size: u32,
    /// The name of the medium.
    medium: Option<&'p [u8]>,
    remote: bool,
    /// The event names an owner of its tier.
    owned: bool,
    pub(super) group: GroupId,
    /// The name of the kind of attention that the group serves.
    group_kind: Option<&'p [u8]>,
    /// How many tokens back the group's attention reaches.
    window_tokens: Option<u32>,
    /// The adapter's name, unless absent or empty.
    pub(super) lora: Option<&'p str>,
    /// Whether the event gives the number of an adapter.
    lora_id: bool,
    /// The salt under its own key, unless absent or empty.
    pub(super) salt: Option<&'p str>,
    /// The beginning of the extra keys: they can only be decoded once the adapter's name is known.
    extra_keys: Option<Cursor<'p>>,
    block_media: Option<Cursor<'p>>,
    media_keys: Option<Cursor<'p>>,
}

impl Draft<'_> {
    /// Notes a field.
    pub(super) fn mark(&mut self, field: Field) -> std::result::Result<(), Reason> {
        if self.has(field) {
            return Err(Reason::RepeatedField);
        }
        self.seen |= 1 << field as u32;
        Ok(())
    }

    /// Whether the event has a field.
    pub(super) const fn has(&self, field: Field) -> bool {
        self.seen & (1 << field as u32) != 0
    }

    /// Whether the chain begins with this event.
    pub(super) const fn is_root(&self) -> bool {
        self.parent.is_none()
    }

    /// The medium of the blocks. Engines that do not state it mean the device.
    pub(super) fn medium(&self) -> Medium {
        match self.medium {
            _ if self.remote => Medium::Remote,
            Some(name) => medium_of(name, self.owned),
            None => Medium::Tier(Tier::Device),
        }
    }
}

impl<'p> Decoder<'p, '_> {
    /// Decodes the value of one field.
    // A call would save and restore every register for each field.
    #[inline(always)]
    pub(super) fn field(&mut self, field: Field, draft: &mut Draft<'p>) -> Result<()> {
        match field {
            Field::BlockHashes => return self.block_hashes(),
            Field::TokenIds => draft.tokens = self.token_ids()?,
            _ if self.cursor.take_nil()? => {}
            Field::Parent => draft.parent = Some(self.hash()?),
            Field::BlockSize => draft.block_size = self.block_size()?,
            Field::LoraId => draft.lora_id = self.lora_id()?,
            Field::Medium => draft.medium = Some(self.medium()?),
            Field::LoraName => draft.lora = non_empty(self.cursor.str()?),
            Field::LoraNameOrMetadata if self.cursor.peek()? == Type::Map => self.metadata(draft)?,
            Field::LoraNameOrMetadata => draft.lora = non_empty(self.cursor.str()?),
            Field::GroupIndex => draft.group = GroupId(self.cursor.u32()?),
            Field::SpecKind => draft.group_kind = Some(self.cursor.str_bytes()?),
            Field::SlidingWindow => draft.window_tokens = self.window_tokens()?,
            Field::Locality => draft.remote = self.cursor.str_bytes()?.eq_ignore_ascii_case(b"REMOTE"),
            Field::CacheSalt => {
                let said = self.cursor.str()?;
                draft.salt = self.salt(said);
            }
            Field::ExtraKeys => draft.extra_keys = Some(self.set_aside()?),
            Field::BlockMedia => draft.block_media = Some(self.set_aside()?),
            Field::MediaKeys => draft.media_keys = Some(self.set_aside()?),
            Field::Lookahead => {
                if self.set_aside()?.array()? > 0 {
                    self.writer.count(DecodeWarning::LookaheadTokens);
                }
            }
            Field::Ownership => {
                draft.owned = true;
                self.cursor.skip()?;
            }
            Field::Type | Field::SessionId => self.cursor.skip()?,
        }
        Ok(())
    }

    /// Skips a value and returns its beginning.
    fn set_aside(&mut self) -> Result<Cursor<'p>> {
        let value = self.cursor;
        self.cursor.skip()?;
        Ok(value)
    }

    fn block_hashes(&mut self) -> Result<()> {
        let start = self.cursor;
        let count = self.cursor.array()?;
        self.writer.reserve_hashes(count).map_err(|reason| start.error(reason))?;
        let wide = self.cursor.wide_u64s(count);
        let rest = count - wide.len();
        self.writer.push_hashes(wide.map(EngineHash));
        for _ in 0..rest {
            let hash = self.hash()?;
            self.writer.push_hash(hash);
        }
        Ok(())
    }

    /// The hash of a block: an integer by its two's complement, bytes by their last eight, big endian.
    fn hash(&mut self) -> Result<EngineHash> {
        let start = self.cursor;
        if start.peek()? != Type::Bin {
            return Ok(EngineHash(self.cursor.int()?.0));
        }
        let bytes = self.cursor.bin()?;
        if bytes.is_empty() {
            return Err(start.error(Reason::OutOfRange));
        }
        let last = &bytes[bytes.len().saturating_sub(8)..];
        Ok(EngineHash(last.iter().fold(0, |value, byte| value << 8 | u64::from(*byte))))
    }

    fn medium(&mut self) -> Result<&'p [u8]> {
        let name = self.cursor.str_bytes()?;
        if medium_of(name, false) == Medium::Unknown {
            self.writer.count_unknown_name(UnknownName::Medium, name);
        }
        Ok(name)
    }

    /// The kind of attention that the group serves: two fields state it, in either order.
    fn group_kind(&mut self, draft: &Draft<'p>) -> GroupKind {
        let Some(name) = draft.group_kind else { return GroupKind::Unstated };
        let kind = GroupKind::from_name(name, draft.window_tokens);
        if !kind.is_proved() {
            self.writer.count_unknown_name(UnknownName::GroupKind, name);
        }
        kind
    }

    /// `None` for a value that is not a number of tokens.
    fn window_tokens(&mut self) -> Result<Option<u32>> {
        if self.cursor.peek()? == Type::Int {
            return Ok(u32::try_from(self.cursor.int()?.0).ok());
        }
        self.cursor.skip()?;
        Ok(None)
    }

    fn block_size(&mut self) -> Result<u32> {
        let start = self.cursor;
        let size = self.cursor.u32()?;
        if size > BLOCK_SIZE_TOKENS_MAX { Err(start.error(Reason::OutOfRange)) } else { Ok(size) }
    }

    /// Whether the number names an adapter; engines count from 1.
    fn lora_id(&mut self) -> Result<bool> {
        if self.cursor.peek()? == Type::Int {
            return Ok(self.cursor.int()?.0 != 0);
        }
        self.cursor.skip()?;
        Ok(true)
    }

    /// The salt as the gateway's caller gave it. Notes the form in which it came.
    fn salt(&mut self, said: &'p str) -> Option<&'p str> {
        let salt = salt_of(said)?;
        let info = self.writer.info_mut();
        let form = if salt.len() < said.len() { &mut info.has_prefixed_salts } else { &mut info.has_plain_salts };
        *form = true;
        Some(salt)
    }

    fn metadata(&mut self, draft: &mut Draft<'p>) -> Result<()> {
        for _ in 0..self.cursor.map()? {
            if self.cursor.str_bytes()? != b"cache_salt" {
                self.writer.count(DecodeWarning::UnknownKey);
                self.cursor.skip()?;
            } else if !self.cursor.take_nil()? {
                let said = self.cursor.str()?;
                draft.salt = self.salt(said);
            }
        }
        Ok(())
    }

    /// Whether the hash of the open event covers its tokens alone.
    pub(super) fn is_unchained(&self, draft: &Draft<'p>) -> bool {
        match draft.tokens {
            Tokens::Plain => is_of_tokens_alone(&self.writer, false),
            Tokens::Pairs => is_of_tokens_alone(&self.writer, true),
            Tokens::None | Tokens::Unusable(_) => false,
        }
    }

    /// Adds a stored event to the batch.
    pub(super) fn close_stored(&mut self, draft: &Draft<'p>, start: Cursor<'p>) -> Result<()> {
        if !STORED_FIELDS.iter().all(|field| draft.has(*field)) {
            return Err(start.error(Reason::MissingField));
        }
        let said = self.extra_keys(draft, draft.extra_keys)?;
        let unassigned = self.block_media(draft.block_media)?.or(self.media_keys(draft.media_keys)?);
        let unusable = draft.tokens.mismatch(self.writer.tokens().len(), self.writer.hashes().len(), draft.block_size);
        let filling = match unusable.or(said.unusable).or(unassigned) {
            Some(warning) => {
                self.writer.count(warning);
                Filling::Unusable
            }
            None => Filling::Tokens { bigram: draft.tokens == Tokens::Pairs },
        };
        let (lora, salt) = self.names(draft, said.salt, start)?;
        let head = StoredHead {
            parent: draft.parent,
            filling,
            block_size: draft.block_size,
            medium: draft.medium(),
            group: draft.group,
            group_kind: self.group_kind(draft),
            lora,
            salt,
        };
        self.writer.stored(head).map_err(|reason| start.error(reason))
    }

    /// The names that separate the chain from others. `said` is the salt by the extra keys.
    fn names(
        &mut self,
        draft: &Draft<'p>,
        said: std::result::Result<Option<&'p str>, DecodeWarning>,
        start: Cursor<'p>,
    ) -> Result<(Option<Text>, SaltText)> {
        let too_long = |name: Option<&str>| name.is_some_and(|name| name.len() > NAME_BYTES_MAX);
        let salt = said.map(|said| draft.salt.or_else(|| said.and_then(|said| self.salt(said))));
        let salt = match salt {
            _ if draft.lora.is_none() && draft.lora_id => Err(DecodeWarning::NamelessLora),
            Ok(salt) if too_long(draft.lora) || too_long(salt) => Err(DecodeWarning::OversizedName),
            other => other,
        };
        let mut keep = |name: Option<&str>| {
            let kept = name.filter(|name| name.len() <= NAME_BYTES_MAX).map(|name| self.writer.keep_text(name));
            kept.transpose().map_err(|reason| start.error(reason))
        };
        let lora = keep(draft.lora)?;
        let salt = match salt {
            Ok(salt) => keep(salt)?.map_or(SaltText::Inherited, SaltText::Of),
            Err(warning) => {
                self.writer.count(warning);
                SaltText::Unknown
            }
        };
        Ok((lora, salt))
    }
}

fn non_empty(name: &str) -> Option<&str> {
    Some(name).filter(|name| !name.is_empty())
}

/// The salt without a gateway's prefix.
pub(super) fn salt_of(salt: &str) -> Option<&str> {
    // The prefix alone is a salt too: if it counted as none, prompts without a salt would match a salted prompt's
    // blocks.
    non_empty(salt.strip_prefix(SALT_PREFIX).filter(|salt| !salt.is_empty()).unwrap_or(salt))
}
