//! One cache line of entries.

use super::home::Tag;
use super::tags::{self, AWAY, NO_TAG};

/// Entries of a bucket.
pub(super) const ENTRIES: usize = 10;

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
    const CLASSES: u32 = u32::BITS / Self::BITS;

    /// Where the count for this tag begins.
    #[inline]
    const fn place(tag: Tag) -> u32 {
        tag.class(Self::CLASSES.ilog2()) * Self::BITS
    }

    #[inline]
    const fn count(self, tag: Tag) -> u32 {
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

    /// The entries that may have this tag: as far as theirs are known, they are the same.
    #[inline]
    pub(super) fn with_tag(&self, tag: Tag) -> Entries {
        Entries(tags::alike(&self.tags, tag.bits()))
    }

    /// The places without an entry.
    #[inline]
    pub(super) fn vacant(&self) -> Entries {
        Entries(tags::vacant(&self.tags))
    }

    /// All entries.
    #[inline]
    pub(super) fn filled(&self) -> Entries {
        Entries(!self.vacant().0 & ((1 << ENTRIES) - 1))
    }

    /// Whether entries with this tag may have been sent past the bucket.
    #[inline]
    pub(super) fn has_passed(&self, tag: Tag) -> bool {
        self.passed.count(tag) > 0
    }

    /// One with this tag is sent past.
    #[inline]
    pub(super) fn pass(&mut self, tag: Tag) {
        if self.passed.count(tag) < Passed::MANY {
            self.passed.0 += 1 << Passed::place(tag);
        }
    }

    /// One with this tag that was sent past is gone.
    #[inline]
    pub(super) fn unpass(&mut self, tag: Tag) {
        debug_assert!(self.has_passed(tag), "whoever is gone was counted");
        if self.passed.count(tag) < Passed::MANY {
            self.passed.0 -= 1 << Passed::place(tag);
        }
    }

    #[inline]
    pub(super) fn slot(&self, at: usize) -> u32 {
        self.slots[at]
    }

    /// The tag of an entry, if this bucket is its home.
    #[inline]
    pub(super) fn tag_at_home(&self, at: usize) -> Option<Tag> {
        let tag = self.tags[at];
        (tag & AWAY == 0).then(|| Tag::from_bits(tag << 1))
    }

    /// Puts an entry at a place, of which this bucket is the home or not.
    #[inline]
    pub(super) fn fill(&mut self, at: usize, tag: Tag, is_home: bool, slot: u32) {
        self.tags[at] = tag.bits() >> 1 | if is_home { 0 } else { AWAY };
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Of some bits, highest first, with a one after them.
    fn tag(bits: &str) -> Tag {
        let end = u16::from_str_radix(&format!("{bits}1"), 2).unwrap();
        Tag::from_bits(end << (15 - bits.len()))
    }

    #[test]
    fn entries_come_and_go() {
        let mut bucket = Bucket::EMPTY;
        assert_eq!((bucket.filled().count(), bucket.vacant().count()), (0, ENTRIES));
        let [seven, eight, nine] = [tag("000111"), tag("001000"), tag("001001")];
        bucket.fill(9, seven, true, 70);
        bucket.fill(0, seven, false, 71);
        bucket.fill(4, eight, true, 80);
        assert_eq!(bucket.with_tag(seven).map(|at| bucket.slot(at)).collect::<Vec<_>>(), [71, 70]);
        assert_eq!([0, 4, 9].map(|at| bucket.tag_at_home(at)), [None, Some(eight), Some(seven)]);
        bucket.vacate(0);
        bucket.set_slot(9, 72);
        assert_eq!(bucket.filled().map(|at| bucket.slot(at)).collect::<Vec<_>>(), [80, 72]);
        assert_eq!(bucket.with_tag(nine).first(), None);
    }

    #[test]
    fn many_that_passed_are_not_forgotten() {
        let mut bucket = Bucket::EMPTY;
        let class = |class: u16| Tag::from_bits(class << 13 | 0x1002);
        for number in [3, 3, 4, 7] {
            bucket.pass(class(number));
        }
        bucket.unpass(class(3));
        assert!([3, 4, 7].iter().all(|number| bucket.has_passed(class(*number))) && !bucket.has_passed(class(0)));
        // A longer tag that begins alike is of the same class.
        assert!(bucket.has_passed(Tag::from_bits(0x7ffe)));
        bucket.unpass(class(3));
        assert!(!bucket.has_passed(class(3)) && bucket.has_passed(class(4)));
        (0..20).for_each(|_| bucket.pass(class(7)));
        (0..21).for_each(|_| bucket.unpass(class(7)));
        assert!(bucket.has_passed(class(7)) && !bucket.has_passed(class(6)) && bucket.has_passed(class(4)));
    }
}
