//! Where an entry of the name map belongs: its segment and its home bucket, with the tag by which it is known there.

/// Segments of the map, as a power of two.
const SEGMENT_BITS: u32 = 8;
pub(super) const SEGMENTS: usize = 1 << SEGMENT_BITS;

/// The hash of a name, from which follows its home at any size of its segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Spot {
    hash: u64,
}

impl Spot {
    #[inline]
    pub(super) const fn new(hash: u64) -> Self {
        Self { hash }
    }

    /// The highest bits choose the segment.
    #[inline]
    pub(super) const fn segment(self) -> u8 {
        (self.hash >> (u64::BITS - SEGMENT_BITS)) as u8
    }

    /// All bits below them choose the home in a segment of `buckets` buckets.
    #[inline]
    pub(super) const fn home(self, buckets: usize) -> Home {
        Home::new(self.hash << SEGMENT_BITS, buckets)
    }
}

/// The bits of the name's hash that an entry stores beside its home: at most 14, those after the home, from the highest
/// down. The last known bit is followed by a one, then by zeros, so a tag is never 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tag(u16);

impl Tag {
    /// Bits of a new one.
    pub(super) const BITS: u32 = 14;
    /// The fewest bits worth keeping. Half of the entries are younger than the last doubling and half of the rest
    /// younger than the one before it, so there are always few with a short tag.
    pub(super) const BITS_MIN: u32 = 6;
    /// The one that follows the last bit of a new tag.
    const END: u16 = 1 << (u16::BITS - Self::BITS - 1);

    /// From the bits, highest first. Drops bits that do not fit.
    #[inline]
    const fn new(bits: u16) -> Self {
        Self(bits & !(2 * Self::END - 1) | Self::END)
    }

    /// A tag whose lowest bit is not used, as it is stored and as it is searched.
    #[inline]
    pub(super) const fn bits(self) -> u16 {
        self.0
    }

    #[inline]
    pub(super) const fn from_bits(bits: u16) -> Self {
        Self(bits)
    }

    /// The class among `1 << bits`; every tag has at least this many bits.
    #[inline]
    pub(super) const fn class(self, bits: u32) -> u32 {
        debug_assert!(bits <= Self::BITS_MIN, "shorter than any tag");
        (self.0 >> (u16::BITS - bits)) as u32
    }

    /// Number of known bits.
    #[inline]
    pub(super) const fn known(self) -> u32 {
        u16::BITS - 1 - self.0.trailing_zeros()
    }
}

/// The bucket in which the search for an entry begins, and the tag there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Home {
    bucket: u32,
    tag: Tag,
}

impl Home {
    /// The home of a hash's fraction of one, in a segment of `buckets` buckets: the integer part of their product is the
    /// bucket, and the tag comes from its fraction.
    #[inline]
    pub(super) const fn new(fraction: u64, buckets: usize) -> Self {
        let product = fraction as u128 * buckets as u128;
        Self {
            bucket: (product >> u64::BITS) as u32,
            tag: Tag::new((product as u64 >> (u64::BITS - u16::BITS)) as u16),
        }
    }

    #[inline]
    pub(super) const fn known(bucket: usize, tag: Tag) -> Self {
        Self { bucket: bucket as u32, tag }
    }

    #[inline]
    pub(super) const fn bucket(self) -> usize {
        self.bucket as usize
    }

    #[inline]
    pub(super) const fn tag(self) -> Tag {
        self.tag
    }

    /// The home after a doubling of the segment, to which a bucket's `split` moves an entry. `None` if hardly a bit of the
    /// tag would be left.
    #[cfg(test)]
    pub(super) const fn doubled(self) -> Option<Self> {
        if self.tag.known() <= Tag::BITS_MIN {
            return None;
        }
        let bit = self.tag.0 >> (u16::BITS - 1);
        Some(Self { bucket: self.bucket << 1 | bit as u32, tag: Tag(self.tag.0 << 1) })
    }

    /// The home after some halvings. The lowest bits of the bucket become the highest of the tag, which may become longer
    /// by them.
    #[inline]
    pub(super) const fn halved(self, times: u32) -> Self {
        let both = (self.bucket as u64) << u16::BITS | self.tag.0 as u64;
        let tag = (both >> times) as u16;
        let is_short = self.tag.known() + times <= Tag::BITS;
        Self { bucket: self.bucket >> times, tag: if is_short { Tag(tag) } else { Tag::new(tag) } }
    }
}
