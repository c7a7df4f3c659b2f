//! Runs of small numbers, as lists of tokens are: many read in one step, without a branch on any.
//!
//! Where a number ends is only known once its first byte is read, so one after the other costs a load, and where
//! lengths are mixed a branch that nobody can foresee, for each. Here 64 bytes are looked at at once, as bit sets with
//! a bit for each byte: of every byte it is told how long a number would be that began there, and numbers begin where
//! the one before ends, that is
//!
//! ```text
//! starts = {0} ∪ {p + length(p) for p in starts}
//! ```
//!
//! Any set that contains the starts and fulfils this is the starts: its smallest element that were none would
//! have to follow a smaller one that is none. So the set of all bytes is narrowed by the right side until nothing
//! changes, which is mostly the case after two rounds. A byte below 0x80 is a number by itself, and runs of
//! these would need a round for each: an addition carries through a whole run instead.
//!
//! The cursor's own loop is what this is held to by the tests, and what reads the last few numbers of a list.

use fearless_simd::prelude::*;
use fearless_simd::{Level, dispatch, u8x64};

/// Bytes looked at in one step, one for each bit of a set.
const WINDOW_BYTES: usize = 64;
/// A number is read with the bytes before it, as if it had four.
const LEAD_BYTES: usize = 4;
const VIEW_BYTES: usize = LEAD_BYTES + WINDOW_BYTES;
/// A byte that begins nothing.
const NEVER: u8 = 0xc1;
/// Numbers that are read of every window without asking how many there are. Half of the token ids of a large
/// vocabulary take three bytes and half five, so that a window holds 16.
const AT_ONCE: usize = 16;
/// Below this, one after the other is quicker.
pub(super) const NUMBERS_MIN: usize = 6;
/// What counts of the last four bytes of a number, by its length with the marker.
const MASKS: [u32; 8] = [0, 0x7f, 0xff, 0xffff, 0, u32::MAX, 0, 0];

/// A window with the bytes before it.
type View = [u8; VIEW_BYTES];

/// Fills `out` with the numbers below 2^32 that lie in `bytes` from `at` on, until fewer than [`NUMBERS_MIN`] are
/// wanted or something else comes. Answers how many there were, and where the last of them ends.
pub(super) fn fill(bytes: &[u8], at: usize, out: &mut [u32]) -> (usize, usize) {
    if out.len() < NUMBERS_MIN {
        return (0, at);
    }
    dispatch!(level(), simd => fill_by(simd, bytes, at, out))
}

/// What this processor can do, AVX2 at most: with AVX-512 the compiler reads the numbers by a gather, which takes
/// as long as all the rest.
fn level() -> Level {
    let best = Level::new();
    #[cfg(target_arch = "x86_64")]
    let best = best.as_avx2().map_or(best, Level::Avx2);
    best
}

/// The same by the instructions of `simd`. What it calls is inlined, so that these hold for all of it.
#[inline(always)]
fn fill_by<S: Simd>(simd: S, bytes: &[u8], mut at: usize, out: &mut [u32]) -> (usize, usize) {
    let mut filled = 0;
    while out.len() - filled >= NUMBERS_MIN {
        let (read, end) = match bytes.get(at.wrapping_sub(LEAD_BYTES)..).and_then(<[u8]>::first_chunk) {
            Some(view) => step(simd, view, WINDOW_BYTES, &mut out[filled..]),
            None => {
                let rest = bytes.get(at..).unwrap_or_default();
                let rest = &rest[..rest.len().min(WINDOW_BYTES)];
                let mut view = [NEVER; VIEW_BYTES];
                view[LEAD_BYTES..][..rest.len()].copy_from_slice(rest);
                step(simd, &view, rest.len(), &mut out[filled..])
            }
        };
        if read == 0 {
            break;
        }
        (filled, at) = (filled + read, at + end);
    }
    (filled, at)
}

/// Reads what numbers lie whole in the first `len` bytes of the window; how many, and where the last one ends.
#[inline(always)]
fn step<S: Simd>(simd: S, view: &View, len: usize, out: &mut [u32]) -> (usize, usize) {
    // One behind the other; the last of them is where no number of this window begins that is whole.
    let starts = Lengths::of(simd, view).starts() & (u64::MAX >> (WINDOW_BYTES - 1 - len.min(WINDOW_BYTES - 1)));
    let count = starts.count_ones() as usize - 1;
    let mut numbers = Numbers { view, ends: starts & (starts - 1), start: 0 };
    let mut read = 0;
    if let Some(first) = out.first_chunk_mut::<AT_ONCE>() {
        for slot in first {
            *slot = numbers.next();
        }
        if count <= AT_ONCE {
            return (count, WINDOW_BYTES - 1 - starts.leading_zeros() as usize);
        }
        read = AT_ONCE;
    }
    for slot in out.iter_mut().take(count).skip(read) {
        *slot = numbers.next();
        read += 1;
    }
    (read, numbers.start)
}

/// The numbers of a window, from their ends.
struct Numbers<'v> {
    view: &'v View,
    ends: u64,
    start: usize,
}

impl Numbers<'_> {
    /// The next one; where none is left, any.
    #[inline(always)]
    fn next(&mut self) -> u32 {
        // 64 where none is left.
        let end = self.ends.trailing_zeros() as usize;
        self.ends &= self.ends.wrapping_sub(1);
        let mut last = [0; LEAD_BYTES];
        last.copy_from_slice(&self.view[end..end + LEAD_BYTES]);
        let length = end - self.start;
        self.start = end;
        u32::from_be_bytes(last) & MASKS[length % MASKS.len()]
    }
}

/// Where in a window a number of a length would begin, if one began there at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Lengths {
    one: u64,
    two: u64,
    three: u64,
    five: u64,
}

impl Lengths {
    /// Of the window in `view`, its first byte in the lowest bit.
    #[inline(always)]
    fn of<S: Simd>(simd: S, view: &View) -> Self {
        let window = u8x64::from_slice(simd, &view[LEAD_BYTES..]);
        Self {
            one: window.simd_lt(0x80).to_bitmask(),
            two: window.simd_eq(0xcc).to_bitmask(),
            three: window.simd_eq(0xcd).to_bitmask(),
            five: window.simd_eq(0xce).to_bitmask(),
        }
    }

    /// Where numbers begin and, last, where something else does or a number that is not whole.
    #[inline(always)]
    fn starts(self) -> u64 {
        let mut starts = self.behind(self.behind(u64::MAX));
        loop {
            let narrowed = self.behind(starts);
            if narrowed == starts {
                return starts;
            }
            starts = narrowed;
        }
    }

    /// The window's first byte, and what follows a number that begins in `starts`.
    #[inline(always)]
    fn behind(self, starts: u64) -> u64 {
        let longer = 1 | (self.two & starts) << 2 | (self.three & starts) << 3 | (self.five & starts) << 5;
        // Through every run of single bytes that one of those leads into: the sum carries to where the run ends.
        (((longer & self.one).wrapping_add(self.one)) ^ self.one) | longer
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The starts by walking from one to the next.
    fn walked(view: &View) -> u64 {
        let (mut starts, mut at) = (0, 0);
        while at < WINDOW_BYTES {
            starts |= 1 << at;
            at += match view[LEAD_BYTES + at] {
                0x00..=0x7f => 1,
                0xcc => 2,
                0xcd => 3,
                0xce => 5,
                _ => break,
            };
        }
        starts
    }

    fn byte() -> impl Strategy<Value = u8> {
        prop_oneof![any::<u8>(), prop::sample::select(vec![0x00, 0x7f, 0x80, 0xcc, 0xcd, 0xce])]
    }

    proptest! {
        #[test]
        fn starts_are_those_that_a_walk_finds(bytes in prop::collection::vec(byte(), VIEW_BYTES)) {
            let view: View = bytes.try_into().expect("as many as asked for");
            // Whatever this processor can do, and what every one of its kind can.
            for level in [Level::new(), level(), Level::baseline()] {
                prop_assert_eq!(dispatch!(level, simd => Lengths::of(simd, &view).starts()), walked(&view));
            }
        }
    }
}
