//! The values of a recorded decision as columns: each has a name and is written as a *word*, a number of 64 bits.
//!
//! A struct whose values are recorded lists its columns beside its fields. `journal` writes and reads them.

use crate::ids::{DpRank, EventSeq, WorkerId, WorkerIndex};
use crate::protocol::{DeviceClass, MatchStatus, Mode, PoolRole, ReplyNotes, WorkerState};
use crate::trust::{TrustLevel, TrustReasons};

/// One value of a row, with its name in the files.
pub(crate) struct Column<T> {
    pub(crate) name: &'static str,
    pub(crate) get: fn(&T) -> u64,
    /// `None` if the word is no value of this column.
    pub(crate) set: fn(&mut T, u64) -> Option<()>,
}

macro_rules! column {
    ($name:literal: $($field:ident).+) => {
        $crate::columns::Column {
            name: $name,
            get: |row| $crate::columns::Word::to_word(row.$($field).+),
            set: |row, word| {
                row.$($field).+ = $crate::columns::Word::from_word(word)?;
                Some(())
            },
        }
    };
}

macro_rules! columns {
    ($($name:literal: $($field:ident).+;)*) => { &[$($crate::columns::column!($name: $($field).+),)*] };
}

pub(crate) use {column, columns};

/// A value that a journal writes as one word.
pub(crate) trait Word: Copy {
    fn to_word(self) -> u64;

    /// The value of a word; `None` if the word has none.
    fn from_word(word: u64) -> Option<Self>;
}

impl Word for u64 {
    fn to_word(self) -> u64 {
        self
    }

    fn from_word(word: u64) -> Option<Self> {
        Some(word)
    }
}

impl Word for u32 {
    fn to_word(self) -> u64 {
        u64::from(self)
    }

    fn from_word(word: u64) -> Option<Self> {
        word.try_into().ok()
    }
}

impl Word for bool {
    fn to_word(self) -> u64 {
        u64::from(self)
    }

    fn from_word(word: u64) -> Option<Self> {
        (word <= 1).then_some(word == 1)
    }
}

/// Bit for bit, with the bytes in reverse order: the low bytes of common numbers are zero. Reversed they are the high
/// bytes of the word, which take no room in a file.
impl Word for f64 {
    fn to_word(self) -> u64 {
        self.to_bits().swap_bytes()
    }

    fn from_word(word: u64) -> Option<Self> {
        Some(Self::from_bits(word.swap_bytes()))
    }
}

/// Bit for bit, as `f64`.
impl Word for f32 {
    fn to_word(self) -> u64 {
        u64::from(self.to_bits().swap_bytes())
    }

    fn from_word(word: u64) -> Option<Self> {
        u32::try_from(word).ok().map(|bits| Self::from_bits(bits.swap_bytes()))
    }
}

/// 0 is `None`, and other words are one more than the value's. The largest word is written as the one below it; no
/// optional value reaches it.
impl<T: Word> Word for Option<T> {
    fn to_word(self) -> u64 {
        self.map_or(0, |value| value.to_word().saturating_add(1))
    }

    fn from_word(word: u64) -> Option<Self> {
        match word {
            0 => Some(None),
            word => T::from_word(word - 1).map(Some),
        }
    }
}

macro_rules! wrapped {
    ($($name:ident($inner:ty);)*) => {
        $(impl Word for $name {
            fn to_word(self) -> u64 {
                self.0.to_word()
            }

            fn from_word(word: u64) -> Option<Self> {
                <$inner>::from_word(word).map(Self)
            }
        })*
    };
}

wrapped! {
    WorkerIndex(u32);
    WorkerId(u64);
    DpRank(u32);
    EventSeq(u64);
    ReplyNotes(u64);
}

/// Variants by fixed numbers: their order in the code may change without changing the file format.
macro_rules! numbered {
    ($($name:ident { $($variant:ident = $number:literal),* })*) => {
        $(impl $crate::columns::Word for $name {
            fn to_word(self) -> u64 {
                match self { $(Self::$variant => $number,)* }
            }

            fn from_word(word: u64) -> Option<Self> {
                match word { $($number => Some(Self::$variant),)* _ => None }
            }
        })*
    };
}

pub(crate) use numbered;

numbered! {
    PoolRole { Both = 0, Prefill = 1, Decode = 2 }
    WorkerState { Joining = 0, Ready = 1, Draining = 2, Down = 3 }
    DeviceClass { Gpu = 0, Cpu = 1 }
    TrustLevel { None = 0, Predicted = 1, Unproven = 2, LowerBound = 3, Exact = 4 }
    Mode {
        Kv = 1, LoadAware = 2, Approximate = 3, LeastLoaded = 4, PowerOfTwo = 5, RoundRobin = 6, Random = 7, Direct = 8,
        DeviceAwareWeighted = 9, Lmetric = 10, Latency = 11
    }
    MatchStatus { Matched = 0, Unmatchable = 1 }
}

impl Word for TrustReasons {
    fn to_word(self) -> u64 {
        self.bits()
    }

    fn from_word(word: u64) -> Option<Self> {
        Some(Self::from_bits(word))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_bit_of_a_fraction_comes_back(bits in any::<u64>()) {
            let back = f64::from_word(f64::from_bits(bits).to_word()).map(f64::to_bits);
            prop_assert_eq!(back, Some(bits));
        }
    }

    #[test]
    fn a_missing_value_differs_from_zero() {
        for value in [None, Some(0.0), Some(1.5)] {
            assert_eq!(Option::<f64>::from_word(value.to_word()), Some(value));
        }
        assert_eq!((bool::from_word(2), DeviceClass::from_word(7), u32::from_word(1 << 40)), (None, None, None));
    }
}
