//! Reads msgpack values from borrowed bytes, without copies or allocations, and with bounded recursion.

use super::number_run;
use crate::event::error::{DecodeError, Reason};
use crate::limits::MSGPACK_DEPTH_MAX;

/// The type of a value, by its first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Type {
    Nil,
    Bool,
    Int,
    Float,
    Str,
    Bin,
    Array,
    Map,
    Ext,
}

/// A position in a payload.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cursor<'p> {
    bytes: &'p [u8],
    at: usize,
}

type Result<T> = std::result::Result<T, DecodeError>;

impl<'p> Cursor<'p> {
    pub(super) const fn new(bytes: &'p [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Bytes left.
    pub(super) const fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// An error at this position.
    pub(super) const fn error(&self, reason: Reason) -> DecodeError {
        DecodeError::new(reason, self.at)
    }

    /// The type of the next value, without reading it.
    #[inline]
    pub(super) fn peek(&self) -> Result<Type> {
        Ok(match self.marker()? {
            0x00..=0x7f | 0xcc..=0xd3 | 0xe0..=0xff => Type::Int,
            0x80..=0x8f | 0xde | 0xdf => Type::Map,
            0x90..=0x9f | 0xdc | 0xdd => Type::Array,
            0xa0..=0xbf | 0xd9..=0xdb => Type::Str,
            0xc0 => Type::Nil,
            0xc1 => return Err(self.error(Reason::InvalidMarker)),
            0xc2 | 0xc3 => Type::Bool,
            0xc4..=0xc6 => Type::Bin,
            0xca | 0xcb => Type::Float,
            0xc7..=0xc9 | 0xd4..=0xd8 => Type::Ext,
        })
    }

    /// Reads a nil, if one comes next.
    #[inline]
    pub(super) fn take_nil(&mut self) -> Result<bool> {
        let nil = self.marker()? == 0xc0;
        self.at += usize::from(nil);
        Ok(nil)
    }

    /// Reads an array's length: at most one element per byte left.
    #[inline]
    pub(super) fn array(&mut self) -> Result<usize> {
        let start = *self;
        let len = match self.byte()? {
            marker @ 0x90..=0x9f => usize::from(marker & 0x0f),
            0xdc => self.be::<2>()? as usize,
            0xdd => self.be::<4>()? as usize,
            _ => return Err(start.wrong_type()),
        };
        if len > self.remaining() { Err(start.error(Reason::Truncated)) } else { Ok(len) }
    }

    /// Reads a map's number of entries: at most one per two bytes left.
    pub(super) fn map(&mut self) -> Result<usize> {
        let start = *self;
        let len = match self.byte()? {
            marker @ 0x80..=0x8f => usize::from(marker & 0x0f),
            0xde => self.be::<2>()? as usize,
            0xdf => self.be::<4>()? as usize,
            _ => return Err(start.wrong_type()),
        };
        if len > self.remaining() / 2 { Err(start.error(Reason::Truncated)) } else { Ok(len) }
    }

    /// Reads a string's bytes.
    #[inline]
    pub(super) fn str_bytes(&mut self) -> Result<&'p [u8]> {
        // Keys and names are short.
        if let Some((marker @ 0xa0..=0xbf, rest)) = self.bytes[self.at..].split_first()
            && let Some(text) = rest.get(..usize::from(marker & 0x1f))
        {
            self.at += 1 + text.len();
            return Ok(text);
        }
        self.long_str_bytes()
    }

    #[inline(never)]
    fn long_str_bytes(&mut self) -> Result<&'p [u8]> {
        let start = *self;
        let len = match self.byte()? {
            marker @ 0xa0..=0xbf => usize::from(marker & 0x1f),
            0xd9 => self.be::<1>()? as usize,
            0xda => self.be::<2>()? as usize,
            0xdb => self.be::<4>()? as usize,
            _ => return Err(start.wrong_type()),
        };
        self.take(len)
    }

    /// Reads a string.
    pub(super) fn str(&mut self) -> Result<&'p str> {
        let start = *self;
        std::str::from_utf8(self.str_bytes()?).map_err(|_| start.error(Reason::InvalidUtf8))
    }

    /// Reads a binary value.
    pub(super) fn bin(&mut self) -> Result<&'p [u8]> {
        let start = *self;
        let len = match self.byte()? {
            0xc4 => self.be::<1>()? as usize,
            0xc5 => self.be::<2>()? as usize,
            0xc6 => self.be::<4>()? as usize,
            _ => return Err(start.wrong_type()),
        };
        self.take(len)
    }

    /// Reads an integer as (its 64 bits in two's complement, whether it is negative).
    pub(super) fn int(&mut self) -> Result<(u64, bool)> {
        let start = *self;
        let signed = |value: i64| (value as u64, value < 0);
        Ok(match self.byte()? {
            marker @ 0x00..=0x7f => (u64::from(marker), false),
            marker @ 0xe0..=0xff => signed(i64::from(marker as i8)),
            0xcc => (self.be::<1>()?, false),
            0xcd => (self.be::<2>()?, false),
            0xce => (self.be::<4>()?, false),
            0xcf => (self.be::<8>()?, false),
            0xd0 => signed(i64::from(self.be::<1>()? as i8)),
            0xd1 => signed(i64::from(self.be::<2>()? as i16)),
            0xd2 => signed(i64::from(self.be::<4>()? as i32)),
            0xd3 => signed(self.be::<8>()? as i64),
            _ => return Err(start.wrong_type()),
        })
    }

    /// Reads an integer that must fit u32.
    pub(super) fn u32(&mut self) -> Result<u32> {
        let start = *self;
        match self.int()? {
            (value, false) => u32::try_from(value).map_err(|_| start.error(Reason::OutOfRange)),
            (_, true) => Err(start.error(Reason::OutOfRange)),
        }
    }

    /// Reads a number as f64.
    pub(super) fn f64(&mut self) -> Result<f64> {
        let start = *self;
        match self.marker()? {
            0xca => {
                self.at += 1;
                Ok(f64::from(f32::from_bits(self.be::<4>()? as u32)))
            }
            0xcb => {
                self.at += 1;
                Ok(f64::from_bits(self.be::<8>()?))
            }
            _ => match self.int().map_err(|_| start.wrong_type())? {
                (value, false) => Ok(value as f64),
                (value, true) => Ok(value as i64 as f64),
            },
        }
    }

    /// Fills `out` with as many non-negative u32 as come next, and returns how many there were.
    ///
    /// Stops before any other value. The rest of `out` is then undefined. Most of the time of a decode is spent here,
    /// hence [`run`].
    pub(super) fn fill_u32(&mut self, out: &mut [u32]) -> usize {
        let (filled, at) = number_run::fill(self.bytes, self.at, out);
        self.at = at;
        filled + self.fill_u32_singly(&mut out[filled..])
    }

    /// As [`fill_u32`](Self::fill_u32), one number after the other: one branch on each marker, no table, no closure.
    fn fill_u32_singly(&mut self, out: &mut [u32]) -> usize {
        let bytes = self.bytes;
        let mut at = self.at;
        let mut filled = 0;
        for slot in out {
            let (value, len) = match bytes[at..] {
                [marker @ 0x00..=0x7f, ..] => (u32::from(marker), 1),
                [0xcd, a, b, ..] => (u32::from(u16::from_be_bytes([a, b])), 3),
                [0xce, a, b, c, d, ..] => (u32::from_be_bytes([a, b, c, d]), 5),
                [0xcc, a, ..] => (u32::from(a), 2),
                _ => break,
            };
            *slot = value;
            at += len;
            filled += 1;
        }
        self.at = at;
        filled
    }

    /// The unsigned 64-bit numbers in their longest form that come next, at most `count`, with how many there are. Block
    /// hashes are spread over all 64 bits, so nearly all of them have this form.
    pub(super) fn wide_u64s(&mut self, count: usize) -> impl ExactSizeIterator<Item = u64> + 'p {
        const MARKER: u8 = 0xcf;
        const BYTES: usize = 1 + size_of::<u64>();
        let (numbers, _) = self.bytes[self.at..].as_chunks::<BYTES>();
        let numbers = &numbers[..numbers.len().min(count)];
        let wide = numbers.iter().position(|number| number[0] != MARKER).unwrap_or(numbers.len());
        self.at += wide * BYTES;
        numbers[..wide].iter().map(|[_, number @ ..]| u64::from_be_bytes(*number))
    }

    /// Skips one value of any type.
    pub(super) fn skip(&mut self) -> Result<()> {
        self.skip_within(MSGPACK_DEPTH_MAX)
    }

    fn skip_within(&mut self, depth: usize) -> Result<()> {
        let (values, nested) = match self.peek()? {
            Type::Nil | Type::Bool => return self.take(1).map(drop),
            Type::Int => return self.int().map(drop),
            Type::Float => return self.f64().map(drop),
            Type::Str => return self.str_bytes().map(drop),
            Type::Bin => return self.bin().map(drop),
            Type::Ext => return self.skip_ext(),
            Type::Array => (self.array()?, depth.checked_sub(1)),
            Type::Map => (self.map()? * 2, depth.checked_sub(1)),
        };
        let nested = nested.ok_or_else(|| self.error(Reason::TooDeep))?;
        for _ in 0..values {
            self.skip_within(nested)?;
        }
        Ok(())
    }

    fn skip_ext(&mut self) -> Result<()> {
        let len = match self.byte()? {
            0xc7 => self.be::<1>()? as usize,
            0xc8 => self.be::<2>()? as usize,
            0xc9 => self.be::<4>()? as usize,
            fixed => 1 << (fixed - 0xd4),
        };
        self.take(len + 1).map(drop)
    }

    /// A byte that begins no value is a worse fault than a value of another type.
    fn wrong_type(&self) -> DecodeError {
        match self.peek() {
            Ok(_) => self.error(Reason::WrongType),
            Err(error) => error,
        }
    }

    fn marker(&self) -> Result<u8> {
        self.bytes.get(self.at).copied().ok_or_else(|| self.error(Reason::Truncated))
    }

    fn byte(&mut self) -> Result<u8> {
        let byte = self.marker()?;
        self.at += 1;
        Ok(byte)
    }

    fn take(&mut self, len: usize) -> Result<&'p [u8]> {
        if len > self.remaining() {
            return Err(self.error(Reason::Truncated));
        }
        let taken = &self.bytes[self.at..self.at + len];
        self.at += len;
        Ok(taken)
    }

    /// `N` bytes, at most 8, as a big-endian number.
    fn be<const N: usize>(&mut self) -> Result<u64> {
        let mut wide = [0; 8];
        wide[8 - N..].copy_from_slice(self.take(N)?);
        Ok(u64::from_be_bytes(wide))
    }
}

#[cfg(test)]
mod tests;
