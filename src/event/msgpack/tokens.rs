//! Decodes `token_ids`: numbers, pairs of numbers, and lists that are neither.

use super::cursor::{Cursor, Type};
use super::{Decoder, Result};
use crate::event::DecodeWarning;
use crate::event::error::Reason;

/// The kind of a list of tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Tokens {
    /// Empty, as offloading connectors send it.
    #[default]
    None,
    /// Token ids.
    Plain,
    /// Overlapping pairs, as SGLang sends them under EAGLE.
    Pairs,
    /// A list that cannot be used.
    Unusable(DecodeWarning),
}

impl Tokens {
    /// The warning if `count` tokens of this kind cannot be cut into `blocks` blocks.
    ///
    /// If the counts differ, tokens are never assigned by their position: an engine that leaves out masked blocks sends
    /// the tokens of all of them.
    pub(super) fn mismatch(self, count: usize, blocks: usize, block_size: u32) -> Option<DecodeWarning> {
        let overlap = match self {
            Self::None => return Some(DecodeWarning::NoTokens),
            Self::Unusable(warning) => return Some(warning),
            Self::Plain => 0,
            Self::Pairs => 1,
        };
        (count != blocks * block_size as usize + overlap).then_some(DecodeWarning::TokenCount)
    }
}

impl Decoder<'_, '_> {
    /// Decodes the list into the open event.
    pub(super) fn token_ids(&mut self) -> Result<Tokens> {
        if self.cursor.take_nil()? {
            return Ok(Tokens::None);
        }
        match self.cursor.array()? {
            0 => Ok(Tokens::None),
            count if self.cursor.peek()? == Type::Array => self.pairs(count),
            count => self.flat(count),
        }
    }

    fn flat(&mut self, count: usize) -> Result<Tokens> {
        let start = self.cursor;
        let tokens = self.writer.extend_tokens(count).map_err(|reason| start.error(reason))?;
        let mut kind = Tokens::Plain;
        let mut at = self.cursor.fill_u32(tokens);
        while at < count {
            match token(&mut self.cursor)? {
                Some(value) => tokens[at] = value,
                None => kind = Tokens::Unusable(DecodeWarning::TokenValue),
            }
            at += 1;
            at += self.cursor.fill_u32(&mut tokens[at..]);
        }
        Ok(kind)
    }

    /// `[[a, b], [b, c], …]` as `a b c …`.
    fn pairs(&mut self, count: usize) -> Result<Tokens> {
        let start = self.cursor;
        let tokens = self.writer.extend_tokens(count + 1).map_err(|reason| start.error(reason))?;
        let mut kind = Tokens::Pairs;
        for at in 0..count {
            let pair = self.cursor;
            if self.cursor.array()? != 2 {
                return Err(pair.error(Reason::WrongType));
            }
            let (Some(first), Some(second)) = (token(&mut self.cursor)?, token(&mut self.cursor)?) else {
                kind = Tokens::Unusable(DecodeWarning::TokenValue);
                continue;
            };
            if at == 0 {
                tokens[0] = first;
            } else if tokens[at] != first && kind == Tokens::Pairs {
                kind = Tokens::Unusable(DecodeWarning::PairOverlap);
            }
            tokens[at + 1] = second;
        }
        Ok(kind)
    }
}

/// One token ID; `None` for a value that engines send instead of one (digests of multimodal objects, wide IDs).
fn token(cursor: &mut Cursor<'_>) -> Result<Option<u32>> {
    match cursor.peek()? {
        Type::Int => {
            let (value, negative) = cursor.int()?;
            Ok(if negative { None } else { u32::try_from(value).ok() })
        }
        Type::Str | Type::Bin => cursor.skip().map(|()| None),
        _ => Err(cursor.error(Reason::WrongType)),
    }
}
