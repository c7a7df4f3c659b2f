//! A bucket of the name map: two cache lines of entries, and the comparison of all its tags at once.
//!
//! A stored tag is a bit ([`AWAY`] or not), then known bits of the hash, a one, and zeros. A searched tag has all its
//! bits and is shifted left by one: it has no bit for [`AWAY`], and its lowest bit is not used.

#![cfg_attr(
    any(target_arch = "x86_64", all(target_arch = "aarch64", not(miri))),
    expect(unsafe_code, reason = "vector loads take raw pointers")
)]

use super::home::Tag;
use crate::prefetch::prefetch;

/// Entries of a bucket.
pub(super) const ENTRIES: usize = 20;
/// Cache lines of a bucket.
pub(super) const BUCKET_LINES: usize = 2;
const ALL: u32 = (1 << ENTRIES) - 1;

/// Two lines that are neighbours. All that a search compares is in the first.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(128))]
pub(super) struct Bucket {
    tags: [u16; ENTRIES],
    passed: Passed,
    words: [u32; ENTRIES],
}

/// How many entries, with their home here or before, were sent past a full bucket: a count of 4 bits for each of 16
/// classes of tags, so that few searches for unknown names go on to the next bucket. A count that has reached 15 stays,
/// because the true number is no longer known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Passed(u64);

impl Passed {
    const BITS: u32 = 4;
    const MANY: u64 = (1 << Self::BITS) - 1;
    const CLASSES: u32 = u64::BITS / Self::BITS;

    /// Where the count for this tag begins.
    #[inline]
    const fn place(tag: Tag) -> u32 {
        tag.class(Self::CLASSES.ilog2()) * Self::BITS
    }

    #[inline]
    const fn count(self, tag: Tag) -> u64 {
        self.0 >> Self::place(tag) & Self::MANY
    }
}

const _: () = assert!(size_of::<Bucket>() == 128, "a bucket is two lines");
const _: () = assert!(std::mem::offset_of!(Bucket, words) <= 64, "a search reads one line");

/// Some entries of a bucket, one bit each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entries(u32);

impl Entries {
    #[inline]
    pub(super) const fn first(self) -> Option<usize> {
        if self.0 == 0 { None } else { Some(self.0.trailing_zeros() as usize) }
    }
}

impl Iterator for Entries {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        let first = self.first()?;
        self.0 &= self.0 - 1;
        Some(first)
    }
}

impl Bucket {
    #[cfg(test)]
    pub(super) const EMPTY: Self = Self { tags: [NO_TAG; ENTRIES], passed: Passed(0), words: [0; ENTRIES] };

    #[inline]
    pub(super) fn prefetch(&self) {
        let start = std::ptr::from_ref(self).cast::<u8>();
        prefetch(start);
        prefetch(start.wrapping_add(64));
    }

    /// The entries that may have this tag: their known bits are equal.
    #[inline(always)]
    pub(super) fn with_tag<C: CompareTags>(&self, tag: Tag) -> Entries {
        Entries(C::alike(self, tag.bits()))
    }

    #[inline(always)]
    pub(super) fn vacant<C: CompareTags>(&self) -> Entries {
        Entries(C::vacant(self))
    }

    #[inline]
    pub(super) fn filled(&self) -> Entries {
        Entries(!self.vacant::<Narrow>().0 & ALL)
    }

    /// Whether entries with this tag may have been sent past the bucket.
    #[inline]
    pub(super) fn has_passed(&self, tag: Tag) -> bool {
        self.passed.count(tag) > 0
    }

    /// Counts an entry with this tag that is sent past.
    #[inline]
    pub(super) fn pass(&mut self, tag: Tag) {
        if self.passed.count(tag) < Passed::MANY {
            self.passed.0 += 1 << Passed::place(tag);
        }
    }

    /// Counts that an entry with this tag that was sent past is gone.
    #[inline]
    pub(super) fn unpass(&mut self, tag: Tag) {
        debug_assert!(self.has_passed(tag), "an entry that is gone was counted");
        if self.passed.count(tag) < Passed::MANY {
            self.passed.0 -= 1 << Passed::place(tag);
        }
    }

    #[inline]
    pub(super) fn word(&self, at: usize) -> u32 {
        self.words[at]
    }

    /// The entries that [`split`](Self::split) moves: this bucket is their home, and more than the fewest bits of their
    /// tags are left.
    #[inline]
    fn movable(&self) -> Entries {
        let short = matching(self, LAST_BITS, 0);
        Entries(!(matching(self, AWAY, AWAY) | short) & ALL)
    }

    /// Moves entries to the two empty buckets that take the place of this one when the segment doubles: the first bit of
    /// the tag says to which. There is room in them for all entries of this bucket.
    #[inline]
    pub(super) fn split(&self, into: &mut [Self; 2]) {
        let (movable, upper) = (self.movable().0, matching(self, FIRST_BIT, FIRST_BIT));
        for (half, moved) in into.iter_mut().zip([movable & !upper, movable & upper]) {
            for ((tag, word), from) in half.tags.iter_mut().zip(&mut half.words).zip(Entries(moved)) {
                *tag = self.tags[from] << 1 & !AWAY;
                *word = self.words[from];
            }
        }
    }

    /// The entries that a split does not move.
    #[inline]
    pub(super) fn strays(&self) -> Entries {
        Entries(self.filled().0 & !self.movable().0)
    }

    /// The tag of an entry, if this bucket is its home.
    #[inline]
    pub(super) fn tag_at_home(&self, at: usize) -> Option<Tag> {
        let tag = self.tags[at];
        (tag & AWAY == 0).then(|| Tag::from_bits(tag << 1))
    }

    /// Puts an entry at a place; `is_home` tells whether this bucket is its home.
    #[inline]
    pub(super) fn fill(&mut self, at: usize, tag: Tag, is_home: bool, word: u32) {
        self.tags[at] = tag.bits() >> 1 | if is_home { 0 } else { AWAY };
        self.words[at] = word;
    }

    #[inline]
    pub(super) fn vacate(&mut self, at: usize) {
        self.tags[at] = NO_TAG;
    }

    #[inline]
    pub(super) fn set_word(&mut self, at: usize, word: u32) {
        self.words[at] = word;
    }
}

/// The tag of a vacant place.
const NO_TAG: u16 = 0;

/// Set if an entry is in another bucket than its home.
const AWAY: u16 = 1 << 15;

/// The first bit of a tag, as it is stored.
const FIRST_BIT: u16 = AWAY >> 1;

/// Bits of a stored tag that are all zero if only the fewest bits are left.
const LAST_BITS: u16 = (FIRST_BIT >> Tag::BITS_MIN) - 1;

/// The comparison of all tags of a bucket.
pub(super) trait CompareTags {
    /// Which of the tags may be the wanted one, one bit each: their known bits are equal.
    fn alike(bucket: &Bucket, wanted: u16) -> u32;

    /// Which of the places are vacant, one bit each.
    fn vacant(bucket: &Bucket) -> u32;
}

/// By the vectors that every processor of the target has.
pub(super) struct Narrow;

impl CompareTags for Narrow {
    #[inline(always)]
    fn alike(bucket: &Bucket, wanted: u16) -> u32 {
        alike(bucket, wanted)
    }

    #[inline(always)]
    fn vacant(bucket: &Bucket) -> u32 {
        matching(bucket, u16::MAX, NO_TAG)
    }
}

/// By one register of 512 bits. Only functions that enable AVX-512BW may name this type; what they call is inlined into them,
/// down to the instructions.
#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(super) struct Wide;

#[cfg(all(target_arch = "x86_64", not(miri)))]
impl CompareTags for Wide {
    #[inline(always)]
    fn alike(bucket: &Bucket, wanted: u16) -> u32 {
        // SAFETY: the function that names this type is called only on processors with AVX-512BW.
        unsafe { avx512::alike(bucket, wanted) }
    }

    #[inline(always)]
    fn vacant(bucket: &Bucket) -> u32 {
        // SAFETY: as above.
        unsafe { avx512::vacant(bucket) }
    }
}

/// Which of the tags may be the wanted one, one bit each: their known bits are equal.
#[inline]
fn alike(bucket: &Bucket, wanted: u16) -> u32 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    return sse2::alike(bucket, wanted);
    // SAFETY: each processor of the target has NEON.
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    return unsafe { neon::alike(bucket, wanted) };
    #[cfg(not(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri))))]
    scalar::alike(bucket, wanted)
}

/// Which of the tags have this value in these bits, one bit each.
#[inline]
fn matching(bucket: &Bucket, bits: u16, value: u16) -> u32 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    return sse2::matching(bucket, bits, value);
    // SAFETY: each processor of the target has NEON.
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    return unsafe { neon::matching(bucket, bits, value) };
    #[cfg(not(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri))))]
    scalar::matching(bucket, bits, value)
}

/// The reference.
#[cfg(any(test, miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod scalar {
    use super::{Bucket, ENTRIES};

    pub(super) fn alike(bucket: &Bucket, wanted: u16) -> u32 {
        which(&bucket.tags, |stored| {
            let tag = stored << 1;
            // The last one bit and all below it. A vacant place has none, and the wanted tag is never 0.
            let unknown = tag ^ tag.saturating_sub(1);
            tag | unknown == wanted | unknown
        })
    }

    pub(super) fn matching(bucket: &Bucket, bits: u16, value: u16) -> u32 {
        which(&bucket.tags, |stored| stored & bits == value)
    }

    pub(super) fn which(tags: &[u16; ENTRIES], is_it: impl Fn(u16) -> bool) -> u32 {
        tags.iter().enumerate().fold(0, |found, (at, stored)| found | u32::from(is_it(*stored)) << at)
    }
}

/// Registers that have tags: 8 in each of the first two, and 4 before the counts in the last.
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
const REGISTERS: usize = 3;
/// Elements of a register.
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
const WIDE: usize = 8;

/// As the scalar reference.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod sse2 {
    use super::{ALL, Bucket, REGISTERS, WIDE};
    use std::arch::x86_64::{
        __m128i, _mm_and_si128, _mm_cmpeq_epi16, _mm_load_si128, _mm_movemask_epi8, _mm_or_si128, _mm_packs_epi16,
        _mm_set1_epi16, _mm_slli_epi16, _mm_subs_epu16, _mm_xor_si128,
    };

    #[inline]
    pub(super) fn alike(bucket: &Bucket, wanted: u16) -> u32 {
        // SAFETY: every x86-64 processor has SSE2, and these intrinsics take no pointers.
        unsafe {
            let wanted = _mm_set1_epi16(wanted.cast_signed());
            let ones = _mm_set1_epi16(1);
            gather(registers(bucket).map(|stored| {
                let tag = _mm_slli_epi16::<1>(stored);
                let unknown = _mm_xor_si128(tag, _mm_subs_epu16(tag, ones));
                _mm_cmpeq_epi16(_mm_or_si128(tag, unknown), _mm_or_si128(wanted, unknown))
            }))
        }
    }

    #[inline]
    pub(super) fn matching(bucket: &Bucket, bits: u16, value: u16) -> u32 {
        // SAFETY: as above.
        unsafe {
            let (bits, value) = (_mm_set1_epi16(bits.cast_signed()), _mm_set1_epi16(value.cast_signed()));
            gather(registers(bucket).map(|stored| _mm_cmpeq_epi16(_mm_and_si128(stored, bits), value)))
        }
    }

    #[inline]
    fn registers(bucket: &Bucket) -> [__m128i; REGISTERS] {
        let start = std::ptr::from_ref(bucket).cast::<__m128i>();
        // SAFETY: a bucket is aligned, and is longer than these registers.
        unsafe { [_mm_load_si128(start), _mm_load_si128(start.add(1)), _mm_load_si128(start.add(2))] }
    }

    /// One bit for each tag, from all or none of its bits.
    #[inline]
    fn gather([low, middle, high]: [__m128i; REGISTERS]) -> u32 {
        // SAFETY: as above.
        let [low, high] = unsafe {
            [_mm_movemask_epi8(_mm_packs_epi16(low, middle)), _mm_movemask_epi8(_mm_packs_epi16(high, high))]
        };
        (low.cast_unsigned() | high.cast_unsigned() << (2 * WIDE)) & ALL
    }
}

/// As the scalar reference.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod avx512 {
    use super::{ALL, Bucket};
    use std::arch::x86_64::{
        __m512i, _mm512_add_epi16, _mm512_andnot_si512, _mm512_load_si512, _mm512_set1_epi16, _mm512_subs_epu16,
        _mm512_testn_epi16_mask, _mm512_xor_si512,
    };

    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    pub(super) fn alike(bucket: &Bucket, wanted: u16) -> u32 {
        let stored = first_line(bucket);
        let tag = _mm512_add_epi16(stored, stored);
        let unknown = _mm512_xor_si512(tag, _mm512_subs_epu16(tag, _mm512_set1_epi16(1)));
        let differ = _mm512_xor_si512(tag, _mm512_set1_epi16(wanted.cast_signed()));
        let differ = _mm512_andnot_si512(unknown, differ);
        _mm512_testn_epi16_mask(differ, differ) & ALL
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    pub(super) fn vacant(bucket: &Bucket) -> u32 {
        let stored = first_line(bucket);
        _mm512_testn_epi16_mask(stored, stored) & ALL
    }

    /// All tags, the counts, and some words.
    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    fn first_line(bucket: &Bucket) -> __m512i {
        // SAFETY: a bucket is longer than the register, and is aligned.
        unsafe { _mm512_load_si512(std::ptr::from_ref(bucket).cast()) }
    }
}

/// As the scalar reference.
#[cfg(all(target_arch = "aarch64", not(miri)))]
mod neon {
    use super::{ALL, Bucket, REGISTERS, WIDE};
    use std::arch::aarch64::{
        uint16x8_t, vaddvq_u16, vandq_u16, vceqq_u16, vdupq_n_u16, veorq_u16, vld1q_u16, vorrq_u16, vqsubq_u16,
        vshlq_n_u16,
    };

    #[target_feature(enable = "neon")]
    pub(super) fn alike(bucket: &Bucket, wanted: u16) -> u32 {
        let [low, middle, high] = registers(bucket);
        gather([one_alike(low, wanted), one_alike(middle, wanted), one_alike(high, wanted)])
    }

    #[target_feature(enable = "neon")]
    #[inline]
    fn one_alike(stored: uint16x8_t, wanted: u16) -> uint16x8_t {
        let tag = vshlq_n_u16::<1>(stored);
        let unknown = veorq_u16(tag, vqsubq_u16(tag, vdupq_n_u16(1)));
        vceqq_u16(vorrq_u16(tag, unknown), vorrq_u16(vdupq_n_u16(wanted), unknown))
    }

    #[target_feature(enable = "neon")]
    pub(super) fn matching(bucket: &Bucket, bits: u16, value: u16) -> u32 {
        let [low, middle, high] = registers(bucket);
        gather([one_matching(low, bits, value), one_matching(middle, bits, value), one_matching(high, bits, value)])
    }

    #[target_feature(enable = "neon")]
    #[inline]
    fn one_matching(stored: uint16x8_t, bits: u16, value: u16) -> uint16x8_t {
        vceqq_u16(vandq_u16(stored, vdupq_n_u16(bits)), vdupq_n_u16(value))
    }

    #[target_feature(enable = "neon")]
    #[inline]
    fn registers(bucket: &Bucket) -> [uint16x8_t; REGISTERS] {
        let start = std::ptr::from_ref(bucket).cast::<u16>();
        // SAFETY: a bucket is longer than these registers.
        unsafe { [vld1q_u16(start), vld1q_u16(start.add(WIDE)), vld1q_u16(start.add(2 * WIDE))] }
    }

    /// One bit for each tag, from all or none of its bits.
    #[target_feature(enable = "neon")]
    #[inline]
    fn gather([low, middle, high]: [uint16x8_t; REGISTERS]) -> u32 {
        const PLACES: [u16; WIDE] = [1, 1 << 1, 1 << 2, 1 << 3, 1 << 4, 1 << 5, 1 << 6, 1 << 7];
        // SAFETY: the array is a register's size.
        let places = unsafe { vld1q_u16(PLACES.as_ptr()) };
        let found = |all: uint16x8_t| u32::from(vaddvq_u16(vandq_u16(all, places)));
        (found(low) | found(middle) << WIDE | found(high) << (2 * WIDE)) & ALL
    }
}

#[cfg(test)]
mod tests {
    use super::super::home::Home;
    use super::*;

    /// A tag of these bits, highest first, with a one after them.
    fn tag(bits: &str) -> Tag {
        let end = u16::from_str_radix(&format!("{bits}1"), 2).unwrap();
        Tag::from_bits(end << (15 - bits.len()))
    }

    #[test]
    fn entries_come_and_go() {
        let mut bucket = Bucket::EMPTY;
        assert_eq!((bucket.filled().count(), bucket.vacant::<Narrow>().count()), (0, ENTRIES));
        let [seven, eight, nine] = [tag("000111"), tag("001000"), tag("001001")];
        bucket.fill(9, seven, true, 70);
        bucket.fill(0, seven, false, 71);
        bucket.fill(4, eight, true, 80);
        assert_eq!(bucket.with_tag::<Narrow>(seven).map(|at| bucket.word(at)).collect::<Vec<_>>(), [71, 70]);
        assert_eq!([0, 4, 9].map(|at| bucket.tag_at_home(at)), [None, Some(eight), Some(seven)]);
        bucket.vacate(0);
        bucket.set_word(9, 72);
        assert_eq!(bucket.filled().map(|at| bucket.word(at)).collect::<Vec<_>>(), [80, 72]);
        assert_eq!(bucket.with_tag::<Narrow>(nine).first(), None);
    }

    #[test]
    fn many_that_passed_are_not_forgotten() {
        let mut bucket = Bucket::EMPTY;
        let class = |class: u16| Tag::from_bits(class << 12 | 0x0802);
        for number in [3, 3, 4, 7] {
            bucket.pass(class(number));
        }
        bucket.unpass(class(3));
        assert!([3, 4, 7].iter().all(|number| bucket.has_passed(class(*number))) && !bucket.has_passed(class(0)));
        // A longer tag that begins alike is of the same class.
        assert!(bucket.has_passed(Tag::from_bits(0x3ffe)));
        bucket.unpass(class(3));
        assert!(!bucket.has_passed(class(3)) && bucket.has_passed(class(4)));
        (0..20).for_each(|_| bucket.pass(class(7)));
        (0..21).for_each(|_| bucket.unpass(class(7)));
        assert!(bucket.has_passed(class(7)) && !bucket.has_passed(class(6)) && bucket.has_passed(class(4)));
    }

    /// Whether the wanted tag begins with the known bits of a stored one, bit by bit.
    fn is_alike(stored: u16, wanted: u16) -> bool {
        let known = 14_u32.saturating_sub(stored.trailing_zeros());
        stored & !AWAY != NO_TAG && (0..known).all(|bit| stored << 1 << bit >> 15 == wanted << bit >> 15)
    }

    fn with_tags(tags: [u16; ENTRIES]) -> Bucket {
        // Neither the counts nor the words are tags.
        Bucket { tags, passed: Passed(0x0001_8000_7000_0003), words: [0; ENTRIES] }
    }

    /// The tags that are alike, and the vacant places, by AVX-512 if this machine has it.
    fn wide(_bucket: &Bucket, _wanted: u16) -> Option<(u32, u32)> {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if is_x86_feature_detected!("avx512bw") {
            return Some((Wide::alike(_bucket, _wanted), Wide::vacant(_bucket)));
        }
        None
    }

    #[test]
    fn tags_are_alike_down_to_the_last_one() {
        for wanted in [0x0002, 0xfffe, 0x5556, 0xaaaa, 0x8002, 0x1236] {
            for stored in 0..=u16::MAX {
                let tags = std::array::from_fn(|at| if at % 3 == 0 { stored } else { stored.rotate_left(at as u32) });
                let alike = scalar::which(&tags, |stored| is_alike(stored, wanted));
                assert_eq!(scalar::alike(&with_tags(tags), wanted), alike, "{wanted:x} among {tags:x?}");
                assert_eq!(super::alike(&with_tags(tags), wanted), alike, "{wanted:x} among {tags:x?}");
                assert!(wide(&with_tags(tags), wanted).is_none_or(|(wide, _)| wide == alike), "{wanted:x}, {tags:x?}");
            }
        }
    }

    #[test]
    fn bits_are_compared_with_a_value() {
        for stored in 0..=u16::MAX {
            let bucket = with_tags(std::array::from_fn(|at| stored.rotate_left(at as u32)));
            for (bits, value) in [(u16::MAX, NO_TAG), (AWAY, AWAY), (FIRST_BIT, FIRST_BIT), (LAST_BITS, 0)] {
                let expected = scalar::which(&bucket.tags, |stored| stored & bits == value);
                assert_eq!(scalar::matching(&bucket, bits, value), expected);
                assert_eq!(matching(&bucket, bits, value), expected, "{bits:x} of {:x?}", bucket.tags);
            }
        }
    }

    #[test]
    fn a_split_moves_entries_to_their_new_homes() {
        for seed in 0..1_000_u64 {
            let random = |at: usize| super::super::spread(seed << 8 | at as u64);
            // Vacant places, entries of other homes, and tags of every length.
            let tags = std::array::from_fn(|at| match random(at) % 8 {
                0 => NO_TAG,
                1 => (random(at) >> 16) as u16 | AWAY | 1,
                _ => {
                    let end = 1 << ((random(at) >> 8) % 9);
                    (random(at) >> 32) as u16 & !AWAY & !(2 * end - 1) | end
                }
            });
            let bucket = Bucket { tags, passed: Passed(0), words: std::array::from_fn(|at| at as u32) };
            let mut halves = [Bucket::EMPTY; 2];
            bucket.split(&mut halves);
            let strays: Vec<usize> = bucket.strays().collect();
            let mut expected = [Vec::new(), Vec::new()];
            for at in bucket.filled() {
                match bucket.tag_at_home(at).and_then(|tag| Home::known(5, tag).doubled()) {
                    Some(home) => expected[home.bucket() - 10].push((Some(home.tag()), at as u32)),
                    None => assert!(strays.contains(&at)),
                }
            }
            let found = halves
                .each_ref()
                .map(|half| half.filled().map(|at| (half.tag_at_home(at), half.word(at))).collect::<Vec<_>>());
            assert_eq!(found, expected);
            assert_eq!(found[0].len() + found[1].len() + strays.len(), bucket.filled().count());
        }
    }

    #[test]
    fn tags_are_found_wherever_they_are() {
        const WINDOW: u32 = 6;
        // All patterns of some neighbours, among tags that are and among tags that are not what is sought.
        let windows = (0..=ENTRIES as u32 - WINDOW).flat_map(|at| (0..1_u32 << WINDOW).map(move |some| some << at));
        for pattern in windows.flat_map(|some| [some, !some & ALL]) {
            for (wanted, stored, other) in [(0x0002, AWAY | 1, 3), (0x8002, 0x4001, NO_TAG), (0xfffe, 0x7000, 0x5000)] {
                let bucket = with_tags(std::array::from_fn(|at| if pattern >> at & 1 == 1 { stored } else { other }));
                let rest = if other == NO_TAG { !pattern & ALL } else { 0 };
                assert_eq!((scalar::alike(&bucket, wanted), scalar::matching(&bucket, u16::MAX, 0)), (pattern, rest));
                assert_eq!((alike(&bucket, wanted), matching(&bucket, u16::MAX, 0)), (pattern, rest));
                assert!(wide(&bucket, wanted).is_none_or(|wide| wide == (pattern, rest)));
            }
        }
    }
}
