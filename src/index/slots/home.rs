//! Where an entry belongs in a segment of some size, and how that changes with the size.

use super::Spot;

/// A size of 1 bucket: sizes are counted in parts of a bucket, so that there are many between one and two.
pub(super) const BUCKET_SCALE: u64 = 1 << (u64::BITS - Spot::FRACTION_BITS);

/// What an entry has of its name's hash beside its home: the bits that come after, at most 14, from the highest down.
/// A one comes after the last that is known, and zeros after that, so it is never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tag(u16);

impl Tag {
    /// Bits of a new one.
    const BITS: u32 = 14;
    /// Bits that are worth keeping. Half of the entries are younger than the last doubling and half of the rest
    /// younger than the one before it, so there are always few with a short tag.
    const BITS_MIN: u32 = 6;
    /// The one after so many bits.
    const END: u16 = 1 << (u16::BITS - Self::BITS - 1);

    /// From the bits, highest first. What does not fit is left out.
    #[inline]
    const fn new(bits: u16) -> Self {
        Self(bits & !(2 * Self::END - 1) | Self::END)
    }

    /// A tag whose lowest bit is not used, as it is stored and as it is looked for.
    #[inline]
    pub(super) const fn bits(self) -> u16 {
        self.0
    }

    #[inline]
    pub(super) const fn from_bits(bits: u16) -> Self {
        Self(bits)
    }

    /// The class among `1 << bits`, for so few bits that every tag has them.
    #[inline]
    pub(super) const fn class(self, bits: u32) -> u32 {
        debug_assert!(bits <= Self::BITS_MIN, "shorter than any tag");
        (self.0 >> (u16::BITS - bits)) as u32
    }

    /// How many bits are known.
    #[inline]
    const fn known(self) -> u32 {
        u16::BITS - 1 - self.0.trailing_zeros()
    }
}

/// The bucket in which an entry is looked for first, and its tag there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Home {
    pub(super) bucket: usize,
    pub(super) tag: Tag,
}

impl Home {
    /// The fraction of a hash, in a segment of `scale` parts of a bucket: the product has the bucket before the point
    /// and the tag after it.
    #[inline]
    pub(super) const fn new(fraction: u64, scale: u64) -> Self {
        let product = fraction as u128 * scale as u128;
        Self {
            bucket: (product >> u64::BITS) as usize,
            tag: Tag::new((product as u64 >> (u64::BITS - u16::BITS)) as u16),
        }
    }

    /// The same after `to` doublings, from what it is after `from`. `None` if hardly a bit of the tag would be left.
    #[inline]
    pub(super) const fn moved(self, from: u32, to: u32) -> Option<Self> {
        if to < from { Some(self.halved(from - to)) } else { self.doubled(to - from) }
    }

    #[inline]
    const fn doubled(self, times: u32) -> Option<Self> {
        if self.tag.known() < Tag::BITS_MIN + times {
            return None;
        }
        let both = (self.bucket as u64) << u16::BITS | self.tag.0 as u64;
        Some(Self { bucket: (both << times >> u16::BITS) as usize, tag: Tag(self.tag.0 << times) })
    }

    /// The lowest bits of the bucket become the highest of the tag, which may become longer by them.
    #[inline]
    const fn halved(self, times: u32) -> Self {
        let both = (self.bucket as u64) << u16::BITS | self.tag.0 as u64;
        let tag = (both >> times) as u16;
        let is_short = self.tag.known() + times <= Tag::BITS;
        Self { bucket: self.bucket >> times, tag: if is_short { Tag(tag) } else { Tag::new(tag) } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    const FRACTION_END: u64 = 1 << Spot::FRACTION_BITS;

    #[test]
    fn what_moves_is_where_it_would_have_been_put() {
        let mut rng = StdRng::seed_from_u64(1);
        for _ in 0..20_000 {
            let (fraction, base) =
                (rng.random_range(0..FRACTION_END), rng.random_range(BUCKET_SCALE..2 * BUCKET_SCALE));
            let (from, to) = (rng.random_range(0..20), rng.random_range(0..20));
            let [before, after] = [from, to].map(|doublings| Home::new(fraction, base << doublings));
            let Some(moved) = before.moved(from, to) else {
                assert!(to - from > Tag::BITS - Tag::BITS_MIN);
                continue;
            };
            assert_eq!(moved.bucket, after.bucket);
            let known = Tag::BITS - to.saturating_sub(from);
            assert_eq!(moved.tag.known(), known);
            assert_eq!(moved.tag.0 >> (u16::BITS - known), after.tag.0 >> (u16::BITS - known));
            // And back: what the tag gave to the home it has again, and nothing that was lost.
            match moved.moved(to, from) {
                Some(back) if from <= to => assert_eq!(back, before),
                Some(back) => assert_eq!((back.bucket, back.tag.known()), (before.bucket, Tag::BITS + to - from)),
                None => assert!(from - to > Tag::BITS - Tag::BITS_MIN),
            }
        }
    }

    #[test]
    fn homes_are_within_the_segment() {
        for (fraction, scale) in
            [(0, BUCKET_SCALE), (FRACTION_END - 1, BUCKET_SCALE), (FRACTION_END - 1, 7 * BUCKET_SCALE + 1)]
        {
            let home = Home::new(fraction, scale);
            assert!((home.bucket as u64) < scale.div_ceil(BUCKET_SCALE) && home.tag.known() == Tag::BITS);
        }
    }
}
