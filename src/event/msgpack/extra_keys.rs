//! The extra keys that the engine's block hashes cover beside tokens.
//!
//! vLLM lists them per block, untagged: `[[key…]|nil…]` with a string for the LoRA adapter's name (every block) or the
//! cache salt (only the first block of a request), `[identifier, offset]` for a multimodal object, and bytes for a
//! digest of prompt embeddings. TensorRT-LLM's relay sends `block_mm_infos`, TensorRT-LLM itself `mm_keys`.

use super::cursor::{Cursor, Type};
use super::event_fields::Draft;
use super::{Decoder, Result};
use crate::event::DecodeWarning;
use crate::event::media::identifier_hash;

/// The content of the extra keys.
#[derive(Debug)]
pub(super) struct Said<'p> {
    /// The salt, or the warning if it is ambiguous.
    pub(super) salt: std::result::Result<Option<&'p str>, DecodeWarning>,
    /// The warning if the tokens are not the whole content.
    pub(super) unusable: Option<DecodeWarning>,
}

impl<'p> Said<'p> {
    /// Notes a string that is not the adapter's name.
    fn candidate(&mut self, text: &'p str, may_be_salt: bool) {
        self.salt = match self.salt {
            Ok(None) if may_be_salt => Ok(Some(text)),
            _ => Err(DecodeWarning::AmbiguousSalt),
        };
    }
}

impl<'p> Decoder<'p, '_> {
    /// Decodes the extra keys that begin at `keys`. Multimodal objects go to the open event.
    pub(super) fn extra_keys(&mut self, draft: &Draft<'p>, keys: Option<Cursor<'p>>) -> Result<Said<'p>> {
        let mut said = Said { salt: Ok(None), unusable: None };
        let Some(mut cursor) = keys else { return Ok(said) };
        for block in 0..cursor.array()? {
            if cursor.take_nil()? {
                continue;
            }
            // One of the strings is the adapter's name. A second, equal string is the salt.
            let mut lora = draft.lora;
            for _ in 0..cursor.array()? {
                match cursor.peek()? {
                    Type::Nil => cursor.skip()?,
                    Type::Str => {
                        let text = cursor.str()?;
                        if lora == Some(text) {
                            lora = None;
                        } else if draft.salt.is_none() || draft.salt != super::event_fields::salt_of(text) {
                            said.candidate(text, block == 0 && draft.is_root() && draft.salt.is_none());
                        }
                    }
                    Type::Array => {
                        let warning = self.media_object(&mut cursor, block)?;
                        said.unusable = said.unusable.or(warning);
                    }
                    Type::Bin => {
                        cursor.skip()?;
                        said.unusable = said.unusable.or(Some(DecodeWarning::PromptEmbeds));
                    }
                    _ => {
                        cursor.skip()?;
                        said.unusable = said.unusable.or(Some(DecodeWarning::UnknownExtraKey));
                    }
                }
            }
        }
        Ok(said)
    }

    /// Decodes `[identifier, offset]`. The offset of the object relative to the block does not matter.
    fn media_object(&mut self, cursor: &mut Cursor<'p>, block: usize) -> Result<Option<DecodeWarning>> {
        let mut object = *cursor;
        cursor.skip()?;
        if object.array()? != 2 || object.peek()? != Type::Str {
            return Ok(Some(DecodeWarning::UnknownExtraKey));
        }
        let hash = identifier_hash(object.str()?);
        if object.peek()? != Type::Int {
            return Ok(Some(DecodeWarning::UnknownExtraKey));
        }
        self.block_object(object, block, hash)
    }

    /// Decodes `[{mm_objects: [{mm_hash, …}…]}|nil…]`, one entry per block.
    pub(super) fn block_media(&mut self, infos: Option<Cursor<'p>>) -> Result<Option<DecodeWarning>> {
        let mut unusable = None;
        let Some(mut cursor) = infos else { return Ok(None) };
        for block in 0..cursor.array()? {
            if cursor.take_nil()? {
                continue;
            }
            for _ in 0..cursor.map()? {
                if cursor.str_bytes()? != b"mm_objects" {
                    cursor.skip()?;
                    continue;
                }
                for _ in 0..cursor.array()? {
                    unusable = self.hashed_object(&mut cursor, block)?.or(unusable);
                }
            }
        }
        Ok(unusable)
    }

    fn hashed_object(&mut self, cursor: &mut Cursor<'p>, block: usize) -> Result<Option<DecodeWarning>> {
        let mut hash = None;
        for _ in 0..cursor.map()? {
            if cursor.str_bytes()? == b"mm_hash" {
                hash = Some(cursor.int()?.0);
            } else {
                cursor.skip()?;
            }
        }
        match hash {
            Some(hash) => self.block_object(*cursor, block, hash),
            None => Ok(Some(DecodeWarning::UnassignedMedia)),
        }
    }

    /// Assigns an object to a block of the open event.
    fn block_object(&mut self, at: Cursor<'p>, block: usize, hash: u64) -> Result<Option<DecodeWarning>> {
        if block >= self.writer.hashes().len() {
            return Ok(Some(DecodeWarning::UnassignedMedia));
        }
        self.writer.push_media(block as u32, hash).map_err(|reason| at.error(reason))?;
        Ok(None)
    }

    /// Decodes `[[key…]|nil…]`, TensorRT-LLM's own keys. They show that there are objects, but in a form without an
    /// agreed hash.
    pub(super) fn media_keys(&mut self, keys: Option<Cursor<'p>>) -> Result<Option<DecodeWarning>> {
        let mut unusable = None;
        let Some(mut cursor) = keys else { return Ok(None) };
        for _ in 0..cursor.array()? {
            if cursor.take_nil()? {
                continue;
            }
            let mut objects = cursor;
            cursor.skip()?;
            if objects.array()? > 0 {
                unusable = Some(DecodeWarning::UnassignedMedia);
            }
        }
        Ok(unusable)
    }
}
