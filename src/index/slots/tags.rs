//! The tags of a bucket as they are stored, looked at all at once.
//!
//! A stored tag is [`AWAY`] or not, then known bits of the hash, a one, and zeros. The one that is looked for has all its
//! bits, and is shifted left by one: nothing is in the place of [`AWAY`], and the lowest bit is not used.

#![cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "vector loads take raw pointers"))]

use super::bucket::ENTRIES;

/// The tag of an entry that is not there.
pub(super) const NO_TAG: u16 = 0;

/// Set where an entry is in another bucket than its home.
pub(super) const AWAY: u16 = 1 << 15;

/// Which of the tags may be the one that is wanted, one bit each: as far as they are known, they are the same.
#[inline]
pub(super) fn alike(tags: &[u16; ENTRIES], wanted: u16) -> u32 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    return alike_sse2(tags, wanted);
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    alike_scalar(tags, wanted)
}

/// Which of the entries are not there.
#[inline]
pub(super) fn vacant(tags: &[u16; ENTRIES]) -> u32 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    return vacant_sse2(tags);
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    vacant_scalar(tags)
}

#[cfg(any(test, miri, not(target_arch = "x86_64")))]
fn alike_scalar(tags: &[u16; ENTRIES], wanted: u16) -> u32 {
    which(tags, |stored| {
        let tag = stored << 1;
        // The last one and all below it. Of what is not there it is nothing, and nothing is never wanted.
        let unknown = tag ^ tag.saturating_sub(1);
        tag | unknown == wanted | unknown
    })
}

#[cfg(any(test, miri, not(target_arch = "x86_64")))]
fn vacant_scalar(tags: &[u16; ENTRIES]) -> u32 {
    which(tags, |stored| stored == NO_TAG)
}

#[cfg(any(test, miri, not(target_arch = "x86_64")))]
fn which(tags: &[u16; ENTRIES], is_it: impl Fn(u16) -> bool) -> u32 {
    tags.iter().enumerate().fold(0, |found, (at, stored)| found | u32::from(is_it(*stored)) << at)
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
use std::arch::x86_64 as sse2;

/// Tags of a register; a second load covers the last 8, of which the first load has seen 6.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const WIDE: usize = 8;

/// As the scalar twin.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
fn alike_sse2(tags: &[u16; ENTRIES], wanted: u16) -> u32 {
    let [low, high] = load(tags);
    // SAFETY: SSE2 is there on every x86-64, and what is used of it takes no pointers.
    unsafe {
        let wanted = sse2::_mm_set1_epi16(wanted.cast_signed());
        let ones = sse2::_mm_set1_epi16(1);
        let alike = |stored| {
            let tag = sse2::_mm_slli_epi16::<1>(stored);
            let unknown = sse2::_mm_xor_si128(tag, sse2::_mm_subs_epu16(tag, ones));
            sse2::_mm_cmpeq_epi16(sse2::_mm_or_si128(tag, unknown), sse2::_mm_or_si128(wanted, unknown))
        };
        gather(alike(low), alike(high))
    }
}

/// As the scalar twin.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
fn vacant_sse2(tags: &[u16; ENTRIES]) -> u32 {
    let [low, high] = load(tags);
    // SAFETY: as above.
    unsafe {
        let nothing = sse2::_mm_set1_epi16(NO_TAG.cast_signed());
        gather(sse2::_mm_cmpeq_epi16(low, nothing), sse2::_mm_cmpeq_epi16(high, nothing))
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
fn load(tags: &[u16; ENTRIES]) -> [sse2::__m128i; 2] {
    let start = tags.as_ptr();
    // SAFETY: both loads are of 8 of the 10 tags, at any alignment.
    unsafe { [sse2::_mm_loadu_si128(start.cast()), sse2::_mm_loadu_si128(start.add(ENTRIES - WIDE).cast())] }
}

/// A bit for each tag from all or none of its bits.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
fn gather(low: sse2::__m128i, high: sse2::__m128i) -> u32 {
    // SAFETY: as above.
    let found = unsafe { sse2::_mm_movemask_epi8(sse2::_mm_packs_epi16(low, high)) }.cast_unsigned();
    found & 0xff | found >> WIDE << (ENTRIES - WIDE)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether the wanted tag begins with the known bits of a stored one, bit by bit.
    fn is_alike(stored: u16, wanted: u16) -> bool {
        let known = 14_u32.saturating_sub(stored.trailing_zeros());
        stored & !AWAY != NO_TAG && (0..known).all(|bit| stored << 1 << bit >> 15 == wanted << bit >> 15)
    }

    #[test]
    fn tags_are_alike_down_to_the_last_one() {
        for wanted in [0x0002, 0xfffe, 0x5556, 0xaaaa, 0x8002, 0x1236] {
            for stored in 0..=u16::MAX {
                let tags = std::array::from_fn(|at| if at % 3 == 0 { stored } else { stored.rotate_left(at as u32) });
                let alike = which(&tags, |stored| is_alike(stored, wanted));
                assert_eq!(alike_scalar(&tags, wanted), alike, "{wanted:x} among {tags:x?}");
                #[cfg(all(target_arch = "x86_64", not(miri)))]
                assert_eq!(alike_sse2(&tags, wanted), alike, "{wanted:x} among {tags:x?}");
            }
        }
    }

    #[test]
    fn tags_are_found_wherever_they_are() {
        for pattern in 0..1_u32 << ENTRIES {
            for (wanted, stored, other) in [(0x0002, AWAY | 1, 3), (0x8002, 0x4001, NO_TAG), (0xfffe, 0x7000, 0x5000)] {
                let tags = std::array::from_fn(|at| if pattern >> at & 1 == 1 { stored } else { other });
                let rest = if other == NO_TAG { !pattern & ((1 << ENTRIES) - 1) } else { 0 };
                assert_eq!((alike_scalar(&tags, wanted), vacant_scalar(&tags)), (pattern, rest));
                #[cfg(all(target_arch = "x86_64", not(miri)))]
                assert_eq!((alike_sse2(&tags, wanted), vacant_sse2(&tags)), (pattern, rest));
            }
        }
    }
}
