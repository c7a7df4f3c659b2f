//! One cache line of entries.

#![cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "vector loads take raw pointers"))]

/// Entries of a bucket.
pub(super) const ENTRIES: usize = 10;

/// The tag of an entry that is not there.
const NO_TAG: u16 = 0;

/// Tags first and together, as they are compared all at once.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct Bucket {
    tags: [u16; ENTRIES],
    passed: Passed,
    slots: [u32; ENTRIES],
}

/// How many entries, whose home is here or before here, were sent past a full bucket: a count of 4 bits for each of
/// 8 classes of tags, so that few of those who look here for what is not there go on to the next bucket. A count
/// that has reached 15 stays: it is no longer known how many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Passed(u32);

impl Passed {
    const BITS: u32 = 4;
    const MANY: u32 = (1 << Self::BITS) - 1;

    /// Where the count for this tag begins.
    #[inline]
    const fn place(tag: u16) -> u32 {
        tag as u32 % (u32::BITS / Self::BITS) * Self::BITS
    }

    #[inline]
    const fn count(self, tag: u16) -> u32 {
        self.0 >> Self::place(tag) & Self::MANY
    }
}

const _: () = assert!(size_of::<Bucket>() == 64, "a bucket is a line");

/// Which entries of a bucket, one bit each.
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
    pub(super) const EMPTY: Self = Self { tags: [NO_TAG; ENTRIES], passed: Passed(0), slots: [0; ENTRIES] };

    /// The entries with this tag.
    #[inline]
    pub(super) fn with_tag(&self, tag: u16) -> Entries {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        return Entries(equal_sse2(&self.tags, tag));
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        Entries(equal_scalar(&self.tags, tag))
    }

    /// The places without an entry.
    #[inline]
    pub(super) fn vacant(&self) -> Entries {
        self.with_tag(NO_TAG)
    }

    /// All entries.
    #[inline]
    pub(super) fn filled(&self) -> Entries {
        Entries(!self.vacant().0 & ((1 << ENTRIES) - 1))
    }

    /// Whether entries with this tag may have been sent past the bucket.
    #[inline]
    pub(super) fn has_passed(&self, tag: u16) -> bool {
        self.passed.count(tag) > 0
    }

    /// One with this tag is sent past.
    #[inline]
    pub(super) fn pass(&mut self, tag: u16) {
        if self.passed.count(tag) < Passed::MANY {
            self.passed.0 += 1 << Passed::place(tag);
        }
    }

    /// One with this tag that was sent past is gone.
    #[inline]
    pub(super) fn unpass(&mut self, tag: u16) {
        debug_assert!(self.has_passed(tag), "whoever is gone was counted");
        if self.passed.count(tag) < Passed::MANY {
            self.passed.0 -= 1 << Passed::place(tag);
        }
    }

    #[inline]
    pub(super) fn slot(&self, at: usize) -> u32 {
        self.slots[at]
    }

    #[inline]
    pub(super) fn fill(&mut self, at: usize, tag: u16, slot: u32) {
        self.tags[at] = tag;
        self.slots[at] = slot;
    }

    #[inline]
    pub(super) fn vacate(&mut self, at: usize) {
        self.tags[at] = NO_TAG;
    }

    #[inline]
    pub(super) fn set_slot(&mut self, at: usize, slot: u32) {
        self.slots[at] = slot;
    }
}

/// Which of the tags are this one.
#[cfg(any(test, miri, not(target_arch = "x86_64")))]
fn equal_scalar(tags: &[u16; ENTRIES], tag: u16) -> u32 {
    tags.iter().enumerate().fold(0, |found, (at, other)| found | u32::from(*other == tag) << at)
}

/// As the scalar twin. SSE2 is part of x86-64, so nothing has to be asked for.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
fn equal_sse2(tags: &[u16; ENTRIES], tag: u16) -> u32 {
    use std::arch::x86_64::{_mm_cmpeq_epi16, _mm_loadu_si128, _mm_movemask_epi8, _mm_packs_epi16, _mm_set1_epi16};
    /// Tags of a register; a second load covers the last 8, of which the first load has seen 6.
    const WIDE: usize = 8;
    let start = tags.as_ptr();
    // SAFETY: SSE2 is there on every x86-64, and both loads are of 8 of the 10 tags, at any alignment.
    let found = unsafe {
        let wanted = _mm_set1_epi16(tag.cast_signed());
        let low = _mm_cmpeq_epi16(_mm_loadu_si128(start.cast()), wanted);
        let high = _mm_cmpeq_epi16(_mm_loadu_si128(start.add(ENTRIES - WIDE).cast()), wanted);
        _mm_movemask_epi8(_mm_packs_epi16(low, high)).cast_unsigned()
    };
    found & 0xff | found >> WIDE << (ENTRIES - WIDE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_found_wherever_they_are() {
        for pattern in 0..1_u32 << ENTRIES {
            for (tag, other) in [(1, 2), (0, 0x8000), (u16::MAX, 0), (0x100, 1), (0x8000, 0x80)] {
                let tags = std::array::from_fn(|at| if pattern >> at & 1 == 1 { tag } else { other });
                assert_eq!(equal_scalar(&tags, tag), pattern);
                #[cfg(all(target_arch = "x86_64", not(miri)))]
                assert_eq!(equal_sse2(&tags, tag), pattern);
            }
        }
    }

    #[test]
    fn entries_come_and_go() {
        let mut bucket = Bucket::EMPTY;
        assert_eq!((bucket.filled().count(), bucket.vacant().count()), (0, ENTRIES));
        bucket.fill(9, 7, 70);
        bucket.fill(0, 7, 71);
        bucket.fill(4, 8, 80);
        assert_eq!(bucket.with_tag(7).map(|at| bucket.slot(at)).collect::<Vec<_>>(), [71, 70]);
        bucket.vacate(0);
        bucket.set_slot(9, 72);
        assert_eq!(bucket.filled().map(|at| bucket.slot(at)).collect::<Vec<_>>(), [80, 72]);
        assert_eq!(bucket.with_tag(9).first(), None);
    }

    #[test]
    fn many_that_passed_are_not_forgotten() {
        let mut bucket = Bucket::EMPTY;
        for tag in [3, 3, 4, 7] {
            bucket.pass(tag);
        }
        bucket.unpass(3);
        assert!([3, 4, 7, 11].iter().all(|tag| bucket.has_passed(*tag)) && !bucket.has_passed(8));
        bucket.unpass(3);
        assert!(!bucket.has_passed(3) && bucket.has_passed(12));
        (0..20).for_each(|_| bucket.pass(7));
        (0..21).for_each(|_| bucket.unpass(7));
        assert!(bucket.has_passed(7) && !bucket.has_passed(6) && bucket.has_passed(4));
    }
}
