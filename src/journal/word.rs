//! One value as a journal writes it: a number of 64 bits, in as few bytes as it needs.

use crate::fleet::{DeviceClass, PoolRole, WorkerState};
use crate::ids::{DpRank, EventSeq, WorkerId, WorkerIndex};
use crate::route::{AffinityMode, MatchStatus, Mode, ReplyNotes};
use crate::trust::{TrustLevel, TrustReasons};

/// The bytes of the longest number.
const WORD_BYTES_MAX: u32 = 10;

/// Appends `word`, seven bits a byte, the lowest first; all bytes but the last have their highest bit set.
pub(super) fn put(mut word: u64, out: &mut Vec<u8>) {
    while word >= 0x80 {
        out.push(word as u8 | 0x80);
        word >>= 7;
    }
    out.push(word as u8);
}

/// Takes a number off the front of `bytes`; `None` if there is none, or it is larger than 64 bits.
pub(super) fn take(bytes: &mut &[u8]) -> Option<u64> {
    let mut word = 0;
    for at in 0..WORD_BYTES_MAX {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        let bits = u64::from(byte & 0x7f);
        if at == WORD_BYTES_MAX - 1 && bits > 1 {
            return None;
        }
        word |= bits << (7 * at);
        if byte & 0x80 == 0 {
            return Some(word);
        }
    }
    None
}

/// What can be written as a number.
pub(super) trait Word: Copy {
    fn to_word(self) -> u64;

    /// The value that was written so; `None` if none is.
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

/// Bit for bit. The bytes are turned round: those of everyday numbers that are zero stand last in a number, and those
/// are not written.
impl Word for f64 {
    fn to_word(self) -> u64 {
        self.to_bits().swap_bytes()
    }

    fn from_word(word: u64) -> Option<Self> {
        Some(Self::from_bits(word.swap_bytes()))
    }
}

/// 0 is none. The largest number of all is written as the one below it: no value that can be missing gets there.
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

/// Values by fixed numbers of their own: the order in which a list stands in the code may change.
macro_rules! numbered {
    ($($name:ident { $($variant:ident = $number:literal),* })*) => {
        $(impl Word for $name {
            fn to_word(self) -> u64 {
                match self { $(Self::$variant => $number,)* }
            }

            fn from_word(word: u64) -> Option<Self> {
                match word { $($number => Some(Self::$variant),)* _ => None }
            }
        })*
    };
}

numbered! {
    PoolRole { Both = 0, Prefill = 1, Decode = 2 }
    WorkerState { Joining = 0, Ready = 1, Draining = 2, Down = 3 }
    DeviceClass { Gpu = 0, Cpu = 1 }
    TrustLevel { None = 0, Predicted = 1, Unproven = 2, LowerBound = 3, Exact = 4 }
    Mode {
        Kv = 1, LoadAware = 2, Approximate = 3, LeastLoaded = 4, PowerOfTwo = 5, RoundRobin = 6, Random = 7, Direct = 8,
        DeviceAwareWeighted = 9, Lmetric = 10
    }
    MatchStatus { Matched = 0, Unmatchable = 1 }
    AffinityMode { Off = 0, Soft = 1, Hard = 2 }
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
        fn numbers_come_back(words in proptest::collection::vec(any::<u64>().prop_map(|word| word >> (word % 64)), 0..20)) {
            let mut bytes = Vec::new();
            words.iter().for_each(|word| put(*word, &mut bytes));
            let mut rest = bytes.as_slice();
            let back: Vec<u64> = words.iter().map_while(|_| take(&mut rest)).collect();
            prop_assert_eq!(back, words);
            prop_assert!(rest.is_empty());
        }

        #[test]
        fn any_bytes_are_taken_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..20)) {
            let mut rest = bytes.as_slice();
            while take(&mut rest).is_some() {}
        }

        #[test]
        fn every_bit_of_a_fraction_comes_back(bits in any::<u64>()) {
            let back = f64::from_word(f64::from_bits(bits).to_word()).map(f64::to_bits);
            prop_assert_eq!(back, Some(bits));
        }
    }

    #[test]
    fn everyday_fractions_are_short() {
        for (value, bytes_max) in [(0.0, 1), (1.0, 3), (0.5, 3), (0.75, 3), (1.0e9, 7)] {
            let mut bytes = Vec::new();
            put(f64::to_word(value), &mut bytes);
            assert!(bytes.len() <= bytes_max, "{value}: {} bytes", bytes.len());
        }
    }

    #[test]
    fn what_is_missing_is_told_from_nought() {
        for value in [None, Some(0.0), Some(1.5)] {
            assert_eq!(Option::<f64>::from_word(value.to_word()), Some(value));
        }
        assert_eq!((bool::from_word(2), DeviceClass::from_word(7), u32::from_word(1 << 40)), (None, None, None));
    }
}
