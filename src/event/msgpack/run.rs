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

use wide::u8x16;

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
pub(super) fn fill(bytes: &[u8], mut at: usize, out: &mut [u32]) -> (usize, usize) {
    let mut filled = 0;
    while out.len() - filled >= NUMBERS_MIN {
        let (read, end) = match bytes.get(at.wrapping_sub(LEAD_BYTES)..).and_then(<[u8]>::first_chunk) {
            Some(view) => step(view, WINDOW_BYTES, &mut out[filled..]),
            None => {
                let rest = bytes.get(at..).unwrap_or_default();
                let rest = &rest[..rest.len().min(WINDOW_BYTES)];
                let mut view = [NEVER; VIEW_BYTES];
                view[LEAD_BYTES..][..rest.len()].copy_from_slice(rest);
                step(&view, rest.len(), &mut out[filled..])
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
fn step(view: &View, len: usize, out: &mut [u32]) -> (usize, usize) {
    // One behind the other; the last of them is where no number of this window begins that is whole.
    let starts = Lengths::of(view).starts() & (u64::MAX >> (WINDOW_BYTES - 1 - len.min(WINDOW_BYTES - 1)));
    let count = starts.count_ones() as usize - 1;
    let (mut ends, mut start) = (starts & (starts - 1), 0);
    let mut next = || {
        // 64 where none is left; what is then read is written where the next number belongs.
        let end = ends.trailing_zeros() as usize;
        ends &= ends.wrapping_sub(1);
        let mut last = [0; LEAD_BYTES];
        last.copy_from_slice(&view[end..end + LEAD_BYTES]);
        let number = u32::from_be_bytes(last) & MASKS[(end - start) % MASKS.len()];
        start = end;
        number
    };
    let mut read = 0;
    if let Some(first) = out.first_chunk_mut::<AT_ONCE>() {
        first.iter_mut().for_each(|slot| *slot = next());
        if count <= AT_ONCE {
            return (count, WINDOW_BYTES - 1 - starts.leading_zeros() as usize);
        }
        read = AT_ONCE;
    }
    for slot in out.iter_mut().take(count).skip(read) {
        *slot = next();
        read += 1;
    }
    (read, start)
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
    fn of(view: &View) -> Self {
        let mut lengths = Self::default();
        for (at, part) in view[LEAD_BYTES..].as_chunks::<16>().0.iter().enumerate() {
            let part = u8x16::new(*part);
            // A byte's bit in its set is its highest.
            let set = |bytes: u8x16| u64::from(bytes.to_bitmask() as u16) << (16 * at);
            let is = |byte: u8| set(part.simd_eq(u8x16::splat(byte)));
            lengths.one |= set(!part);
            lengths.two |= is(0xcc);
            lengths.three |= is(0xcd);
            lengths.five |= is(0xce);
        }
        lengths
    }

    /// Where numbers begin and, last, where something else does or a number that is not whole.
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
            prop_assert_eq!(Lengths::of(&view).starts(), walked(&view));
        }
    }
}
