//! Decodes runs of small numbers, as in lists of tokens: many in one step, without a branch for each.
//!
//! The end of a number is known only once its first byte is read. So decoding one after the other costs a load for
//! each, and, if lengths are mixed, a branch that the processor cannot predict. Here 64 bytes are decoded at once, as
//! bit sets with one bit for each byte. For every byte a set says how long a number would be that began there. A number
//! begins where the one before ends, that is
//!
//! ```text
//! starts = {0} ∪ {p + length(p) for p in starts}
//! ```
//!
//! Any set that contains the starts and satisfies this equation equals the starts: its smallest element that is not a
//! start would have to follow a smaller such element. So the right side is applied to the set of all bytes until it no
//! longer changes, mostly after two rounds. A byte below 0x80 is a number by itself. A run of such bytes would need a
//! round for each: an addition that carries through the whole run replaces them.
//!
//! With AVX-512, `avx512` walks in vectors instead.
//!
//! The cursor's own loop decodes the last few numbers of a list, and the tests compare this code with it.

#[cfg(target_arch = "x86_64")]
mod avx512;

use fearless_simd::prelude::*;
use fearless_simd::{Level, dispatch, u8x64};

/// Bytes decoded in one step, one for each bit of a set.
const WINDOW_BYTES: usize = 64;
/// Bytes before the window: each number is read as if it had four bytes, which may begin before it.
const LEAD_BYTES: usize = 4;
const VIEW_BYTES: usize = LEAD_BYTES + WINDOW_BYTES;
/// A byte that begins no value.
const NEVER: u8 = 0xc1;
/// Numbers that are read from every window before the count is checked. Half of the token IDs of a large vocabulary
/// take three bytes and half take five, so a window holds 16.
const AT_ONCE: usize = 16;
/// With fewer numbers, decoding one after the other is faster.
pub(super) const NUMBERS_MIN: usize = 6;
/// The part of the last four bytes that belongs to a number, by its length including the marker.
const MASKS: [u32; 8] = [0, 0x7f, 0xff, 0xffff, 0, u32::MAX, 0, 0];

/// A window with the bytes before it.
type View = [u8; VIEW_BYTES];

/// Fills `out` with the numbers below 2^32 in `bytes` from `at` on, until another value comes or `out` is full. It may leave
/// the last few, fewer than [`NUMBERS_MIN`]. Returns how many there were, and the end of the last one.
pub(super) fn fill(bytes: &[u8], at: usize, out: &mut [u32]) -> (usize, usize) {
    if out.len() < NUMBERS_MIN {
        return (0, at);
    }
    fill_at(Level::new(), bytes, at, out)
}

/// As [`fill`], with the instructions of a level. With AVX-512 the compiler would read the numbers of [`fill_by`] by a
/// gather, which takes as long as all the rest.
#[inline]
fn fill_at(level: Level, bytes: &[u8], at: usize, out: &mut [u32]) -> (usize, usize) {
    #[cfg(target_arch = "x86_64")]
    if let Some(avx512) = level.as_avx512() {
        return avx512::fill(avx512, bytes, at, out);
    }
    dispatch!(level, simd => fill_by(simd, bytes, at, out))
}

/// As [`fill`], with the instructions of `simd`. The functions that it calls are inlined, so that they use them too.
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

/// Reads the whole numbers in the first `len` bytes of the window. Returns how many there are, and the end of the last
/// one.
#[inline(always)]
fn step<S: Simd>(simd: S, view: &View, len: usize, out: &mut [u32]) -> (usize, usize) {
    // The starts of the numbers. At the last start no whole number begins in this window.
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
    /// The next number; any number if none is left.
    #[inline(always)]
    fn next(&mut self) -> u32 {
        // 64 if none is left.
        let end = self.ends.trailing_zeros() as usize;
        self.ends &= self.ends.wrapping_sub(1);
        let mut last = [0; LEAD_BYTES];
        last.copy_from_slice(&self.view[end..end + LEAD_BYTES]);
        let length = end - self.start;
        self.start = end;
        u32::from_be_bytes(last) & MASKS[length % MASKS.len()]
    }
}

/// For each length, the bytes of a window at which a number of that length would begin, if one began there at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Lengths {
    one: u64,
    two: u64,
    three: u64,
    five: u64,
}

impl Lengths {
    /// The sets of the window in `view`. The first byte is the lowest bit.
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

    /// The starts of numbers and, last, the start of another value or of a number that is not whole.
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

    /// The window's first byte, and the bytes that follow a number that begins in `starts`.
    #[inline(always)]
    fn behind(self, starts: u64) -> u64 {
        let longer = 1 | (self.two & starts) << 2 | (self.three & starts) << 3 | (self.five & starts) << 5;
        // Adds every run of single bytes that follows one of those: the sum carries to the end of the run.
        (((longer & self.one).wrapping_add(self.one)) ^ self.one) | longer
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The starts, by walking from one number to the next.
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

    /// Every level that this processor has a form for.
    fn levels() -> impl Iterator<Item = Level> {
        let best = Level::new();
        #[cfg(target_arch = "x86_64")]
        let narrower = best.as_avx2().map(Level::Avx2);
        #[cfg(not(target_arch = "x86_64"))]
        let narrower = None;
        [Some(best), narrower, Some(Level::baseline())].into_iter().flatten()
    }

    /// The numbers, at most `count`, and the end of the last one, one number after the other.
    fn read_singly(bytes: &[u8], mut at: usize, count: usize) -> (Vec<u32>, usize) {
        let mut numbers = Vec::new();
        while numbers.len() < count {
            let (number, len) = match bytes[at..] {
                [marker @ 0x00..=0x7f, ..] => (u32::from(marker), 1),
                [0xcc, a, ..] => (u32::from(a), 2),
                [0xcd, a, b, ..] => (u32::from(u16::from_be_bytes([a, b])), 3),
                [0xce, a, b, c, d, ..] => (u32::from_be_bytes([a, b, c, d]), 5),
                _ => break,
            };
            numbers.push(number);
            at += len;
        }
        (numbers, at)
    }

    fn number() -> impl Strategy<Value = Vec<u8>> {
        let marked = |marker: u8, bytes: usize| {
            prop::collection::vec(byte(), bytes).prop_map(move |number| [vec![marker], number].concat())
        };
        prop_oneof![Just(vec![0x7f]), marked(0xcc, 1), marked(0xcd, 2), marked(0xce, 4)]
    }

    proptest! {
        #[test]
        fn starts_are_those_that_a_walk_finds(bytes in prop::collection::vec(byte(), VIEW_BYTES)) {
            let view: View = bytes.try_into().expect("as many as asked for");
            // Whatever this processor can do, and what every one of its kind can.
            for level in levels() {
                prop_assert_eq!(dispatch!(level, simd => Lengths::of(simd, &view).starts()), walked(&view));
            }
        }

        #[test]
        fn every_level_reads_the_numbers_that_are_there(
            bytes in prop_oneof![
                prop::collection::vec(byte(), 0..300),
                prop::collection::vec(number(), 0..100).prop_map(|numbers| numbers.concat()),
            ],
            at in 0_usize..9,
            count in 0_usize..120,
        ) {
            let at = at.min(bytes.len());
            for level in levels() {
                let mut out = vec![7; count];
                let (filled, end) = fill_at(level, &bytes, at, &mut out);
                prop_assert_eq!((out[..filled].to_vec(), end), read_singly(&bytes, at, filled));
                let all = read_singly(&bytes, at, count).0.len();
                prop_assert!(all - filled < NUMBERS_MIN, "{filled} of {all} at {level:?}");
            }
        }
    }
}
