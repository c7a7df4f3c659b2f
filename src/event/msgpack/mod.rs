//! Event batches in the format of vLLM, SGLang and TensorRT-LLM.
//!
//! A batch is the msgpack array `[published_at_s, [event…], dp_rank|nil]`; its third element is absent in the
//! oldest engines. An event is a map with the tag under `type` (vLLM from 0.24, SGLang from 0.5.20, TensorRT-LLM), or
//! an array that begins with the tag and whose fields follow in an order that only ever grew. Field names and
//! orders are those of the engines' own msgspec structs.
//!
//! Decoding is one pass of a cursor over the borrowed payload, straight into the arenas of the batch.

mod cursor;
mod event_fields;
mod extra_keys;
mod load_stat;
mod medium;
mod number_run;
mod placement;
mod tokens;
mod unchained_hashes;

use super::batch::{BatchWriter, EventBatch};
use super::error::{DecodeError, Reason};
use super::{DecodeWarning, UnknownName};
use crate::ids::DpRank;
use crate::limits::EVENT_MESSAGE_BYTES_MAX;
use cursor::{Cursor, Type};
use event_fields::{Draft, Field};

pub use load_stat::{LoadStat, decode_load_stat};
pub use placement::{Placed, PlacementHeader, decode_placement_header, decode_placements};

type Result<T> = std::result::Result<T, DecodeError>;

/// Decodes a payload into `batch`, and drops its earlier content.
///
/// Unknown tags, keys and trailing elements are skipped and counted in [`BatchInfo::warnings`](super::BatchInfo); so
/// are stored events whose content cannot be used.
///
/// # Errors
/// The fault and its place. The batch is then empty.
pub fn decode(payload: &[u8], batch: &mut EventBatch) -> Result<()> {
    let writer = BatchWriter::new(batch);
    if payload.len() > EVENT_MESSAGE_BYTES_MAX {
        return Err(DecodeError::new(Reason::MessageTooLarge, EVENT_MESSAGE_BYTES_MAX));
    }
    let mut decoder = Decoder { cursor: Cursor::new(payload), writer };
    decoder.batch()?;
    decoder.writer.finish();
    Ok(())
}

/// The kinds of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tag {
    Stored,
    Removed,
    Cleared,
    Unknown,
}

impl Tag {
    const fn from_name(name: &[u8]) -> Self {
        match name {
            b"BlockStored" => Self::Stored,
            b"BlockRemoved" => Self::Removed,
            b"AllBlocksCleared" => Self::Cleared,
            _ => Self::Unknown,
        }
    }

    /// The fields that follow the tag of an array event, in order.
    const fn fields(self) -> &'static [Field] {
        match self {
            Self::Stored => &[
                Field::BlockHashes,
                Field::Parent,
                Field::TokenIds,
                Field::BlockSize,
                Field::LoraId,
                Field::Medium,
                Field::LoraNameOrMetadata,
                Field::ExtraKeys,
                Field::GroupIndex,
                Field::SpecKind,
                Field::SlidingWindow,
            ],
            Self::Removed => &[Field::BlockHashes, Field::Medium, Field::GroupIndex],
            Self::Cleared | Self::Unknown => &[],
        }
    }
}

struct Decoder<'p, 'b> {
    cursor: Cursor<'p>,
    writer: BatchWriter<'b>,
}

impl<'p> Decoder<'p, '_> {
    fn batch(&mut self) -> Result<()> {
        let elements = self.cursor.array()?;
        if elements < 2 {
            return Err(self.cursor.error(Reason::MissingField));
        }
        self.writer.info_mut().published_at_unix_s = self.cursor.f64()?;
        for _ in 0..self.cursor.array()? {
            self.event()?;
        }
        if elements > 2 && !self.cursor.take_nil()? {
            self.writer.info_mut().dp_rank = Some(DpRank(self.cursor.u32()?));
        }
        self.skip_trailing(elements.saturating_sub(3))?;
        if self.cursor.remaining() > 0 {
            return Err(self.cursor.error(Reason::TrailingBytes));
        }
        Ok(())
    }

    fn event(&mut self) -> Result<()> {
        match self.cursor.peek()? {
            Type::Map => self.map_event(),
            Type::Array => self.array_event(),
            _ => Err(self.cursor.error(Reason::WrongType)),
        }
    }

    fn map_event(&mut self) -> Result<()> {
        let start = self.cursor;
        let entries = self.cursor.map()?;
        let name = map_tag(self.cursor, entries)?;
        let tag = Tag::from_name(name);
        if matches!(tag, Tag::Cleared | Tag::Unknown) {
            self.cursor = start;
            self.cursor.skip()?;
            return self.close_without_fields(tag, name, start);
        }
        let mut draft = Draft::default();
        for _ in 0..entries {
            let key = self.cursor;
            match Field::from_key(self.cursor.str_bytes()?) {
                Some(field) => {
                    draft.mark(field).map_err(|reason| key.error(reason))?;
                    self.field(field, &mut draft)?;
                }
                None => {
                    self.writer.count(DecodeWarning::UnknownKey);
                    self.cursor.skip()?;
                }
            }
        }
        self.close(tag, &draft, start)
    }

    fn array_event(&mut self) -> Result<()> {
        let start = self.cursor;
        let elements = self.cursor.array()?;
        if elements == 0 {
            return Err(start.error(Reason::MissingField));
        }
        let name = self.cursor.str_bytes()?;
        let tag = Tag::from_name(name);
        if tag == Tag::Unknown {
            self.cursor = start;
            self.cursor.skip()?;
            return self.close_without_fields(tag, name, start);
        }
        let mut draft = Draft::default();
        let known = tag.fields();
        for field in known.iter().take(elements - 1) {
            draft.mark(*field).map_err(|reason| self.cursor.error(reason))?;
            self.field(*field, &mut draft)?;
        }
        self.skip_trailing((elements - 1).saturating_sub(known.len()))?;
        if tag == Tag::Stored && !draft.has(Field::ExtraKeys) && draft.salt.is_none() {
            self.writer.count(DecodeWarning::NoPlaceForSalt);
        }
        // The engines with such hashes never state a medium.
        if tag == Tag::Stored && !draft.has(Field::Medium) && self.is_unchained(&draft) {
            self.writer.count(DecodeWarning::UnchainedHash);
        }
        self.close(tag, &draft, start)
    }

    /// Adds the event to the batch. `start` is the beginning of the event.
    fn close(&mut self, tag: Tag, draft: &Draft<'p>, start: Cursor<'p>) -> Result<()> {
        let written = match tag {
            Tag::Stored => return self.close_stored(draft, start),
            Tag::Removed if draft.has(Field::BlockHashes) => self.writer.removed(draft.medium(), draft.group),
            Tag::Removed => Err(Reason::MissingField),
            Tag::Cleared => self.writer.cleared(None),
            Tag::Unknown => Ok(()),
        };
        written.map_err(|reason| start.error(reason))
    }

    /// As [`close`](Self::close), for an event whose fields do not matter. `name` is the engine's name of its kind.
    fn close_without_fields(&mut self, tag: Tag, name: &[u8], start: Cursor<'p>) -> Result<()> {
        if tag == Tag::Unknown {
            self.writer.count(DecodeWarning::UnknownTag);
            self.writer.count_unknown_name(UnknownName::Tag, name);
        }
        self.close(tag, &Draft::default(), start)
    }

    fn skip_trailing(&mut self, elements: usize) -> Result<()> {
        for _ in 0..elements {
            self.writer.count(DecodeWarning::TrailingElement);
            self.cursor.skip()?;
        }
        Ok(())
    }
}

/// The tag of a map event, which comes first in practice but need not. The cursor is a copy, so the caller's does not
/// move.
fn map_tag<'p>(mut cursor: Cursor<'p>, entries: usize) -> Result<&'p [u8]> {
    for _ in 0..entries {
        if cursor.str_bytes()? == b"type" {
            return cursor.str_bytes();
        }
        cursor.skip()?;
    }
    Err(cursor.error(Reason::MissingField))
}

#[cfg(test)]
pub(crate) mod tests;
