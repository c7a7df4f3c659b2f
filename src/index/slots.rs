//! From a block's engine hash, its **name**, to the slots at which that name is stored.
//!
//! The map holds no names: an entry is some bits of the name's hash, the tag, and a slot. A tag that fits makes a
//! candidate, and whoever asks looks at the slot to see whether the name is there. Several slots may have the same
//! name, and each is an entry of its own.
//!
//! # How it is stored
//!
//! 256 segments, chosen by bits of the hash, each a row of 64-byte buckets with room for 10 entries. An entry lives
//! in its home bucket or, where that is full, in the first one after it with room; each bucket counts the entries
//! that were sent past it, by a few bits of the tag, so a search ends at the first bucket that sent none like it: for a
//! name that is not there nearly always in the first line it looks at.
//!
//! A segment doubles and halves on its own, and no insertion moves more than a few thousand entries. The home is the
//! hash scaled to the size of the segment, and the tag is what comes after the point: in a segment of twice the size
//! the first bit of the tag is the last of the home. So entries move by what is written beside them, in the order of
//! memory. Only those that do not lie in their home have their names read, and the few that have grown so often that
//! hardly a bit of their tag is left: about one read for six entries on the way to any size. Segments are out of step by design: each changes size at another number of
//! entries, so the map as a whole is always as full as segments are on average.
//!
//! The hash is keyed. Whoever names blocks cannot aim at one bucket without the secret; the same name many times
//! over does fill a row of buckets, and a search for that name looks at all of it.

mod bucket;
mod home;
mod room;
mod segment;
mod tags;
#[cfg(test)]
mod tests;

use super::prefetch::prefetch;
use home::Home;
use segment::Segment;

const SEGMENTS: usize = 256;

/// Where a name would be, whatever the size of the map at the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::index) struct Spot {
    hash: u64,
}

impl Spot {
    /// Bits that say where in its segment.
    const FRACTION_BITS: u32 = u64::BITS - SEGMENTS.ilog2();

    /// The highest bits choose the segment.
    #[inline]
    fn segment(self) -> usize {
        (self.hash >> Self::FRACTION_BITS) as usize
    }

    /// And all below them the home in it.
    #[inline]
    fn home(self, scale: u64) -> Home {
        Home::new(self.hash & ((1 << Self::FRACTION_BITS) - 1), scale)
    }
}

/// The keyed hash of names.
#[derive(Clone, Copy, Debug)]
struct Mixer {
    keys: [u64; 2],
    /// Tests keep only a few bits of the hash, to have many names in few places.
    #[cfg(test)]
    keep: u64,
}

impl Mixer {
    fn new(secret: u64) -> Self {
        let first = spread(secret);
        Self {
            keys: [first, spread(first) | 1],
            #[cfg(test)]
            keep: u64::MAX,
        }
    }

    /// Two folded multiplications, as one leaves names that differ in few bits too close together.
    #[inline]
    fn spot(self, name: u64) -> Spot {
        let [first, second] = self.keys;
        let hash = fold(fold(name ^ first, second) ^ first, 0x9fb2_1c65_1e98_df25);
        #[cfg(test)]
        let hash = hash & self.keep;
        Spot { hash }
    }
}

#[inline]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

/// A number without pattern from one that may have any: the finisher of splitmix64.
const fn spread(secret: u64) -> u64 {
    let mut z = secret.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Slots by name. Wherever `name_of` is asked for, it gives the name at a slot of the map, the same with which the
/// slot was put there.
#[derive(Debug)]
pub(in crate::index) struct SlotMap {
    mixer: Mixer,
    segments: Box<[Segment]>,
    entries: usize,
    /// Segments that have become too empty for their size, one bit each.
    sparse: [u64; SEGMENTS / u64::BITS as usize],
}

impl SlotMap {
    /// An empty map, whose hash nobody can predict who does not know the secret.
    pub(in crate::index) fn new(secret: u64) -> Self {
        Self {
            mixer: Mixer::new(secret),
            segments: (0..SEGMENTS as u32).map(Segment::new).collect(),
            entries: 0,
            sparse: [0; SEGMENTS / u64::BITS as usize],
        }
    }

    /// Where this name would be.
    #[inline]
    pub(in crate::index) fn spot(&self, name: u64) -> Spot {
        self.mixer.spot(name)
    }

    /// Asks for the line that a look-up would begin with.
    #[inline]
    pub(in crate::index) fn prefetch(&self, spot: Spot) {
        prefetch(self.segments[spot.segment()].line(spot));
    }

    /// The first candidate for which `is_it` says yes.
    #[inline]
    pub(in crate::index) fn find(&self, spot: Spot, is_it: impl FnMut(u32) -> bool) -> Option<u32> {
        let segment = &self.segments[spot.segment()];
        segment.find(spot, is_it).map(|place| segment.slot(place))
    }

    /// Where a name may be: the first entry with its tag. For hints only; the name may be elsewhere, or unknown.
    #[inline]
    pub(in crate::index) fn likely(&self, spot: Spot) -> Option<u32> {
        self.find(spot, |_| true)
    }

    /// Adds an entry, whether or not there is one like it.
    #[inline]
    pub(in crate::index) fn put(&mut self, spot: Spot, slot: u32, name_of: impl Fn(u32) -> u64) {
        self.make_room(spot, name_of);
        self.segments[spot.segment()].put(spot, slot);
        self.entries += 1;
    }

    /// Adds an entry unless there is a candidate that `same` says yes to: then it is that one, and nothing changes.
    #[inline]
    pub(in crate::index) fn put_unless(
        &mut self,
        spot: Spot,
        slot: u32,
        same: impl FnMut(u32) -> bool,
        name_of: impl Fn(u32) -> u64,
    ) -> Result<(), u32> {
        self.make_room(spot, name_of);
        self.segments[spot.segment()].put_unless(spot, slot, same)?;
        self.entries += 1;
        Ok(())
    }

    /// Removes the entry of exactly this slot; whether there was one. The segment does not get smaller by this but
    /// by [`shrink`](Self::shrink), as names may not be there to be read in the middle of a removal.
    #[inline]
    pub(in crate::index) fn take(&mut self, spot: Spot, slot: u32) -> bool {
        let at = spot.segment();
        let segment = &mut self.segments[at];
        let taken = segment.take(spot, slot);
        if taken {
            self.entries -= 1;
            self.sparse[at / 64] |= u64::from(segment.is_sparse()) << (at % 64);
        }
        taken
    }

    /// Lets the entry of one slot name another, at which the same name is stored; whether there was one.
    #[inline]
    pub(in crate::index) fn replace(&mut self, spot: Spot, from: u32, to: u32) -> bool {
        self.segments[spot.segment()].replace(spot, from, to)
    }

    /// Makes segments smaller that have become too empty, so many of them at most; whether there are more. To be
    /// called now and then, when the names of all slots can be read.
    pub(in crate::index) fn shrink(&mut self, segments_max: usize, name_of: impl Fn(u32) -> u64) -> bool {
        let mixer = self.mixer;
        let mut left = segments_max;
        for (word, sparse) in self.sparse.iter_mut().enumerate() {
            while *sparse != 0 {
                if left == 0 {
                    return true;
                }
                left -= 1;
                let segment = &mut self.segments[word * 64 + sparse.trailing_zeros() as usize];
                *sparse &= *sparse - 1;
                // It may have been filled again since.
                if segment.is_sparse() {
                    segment.fit(|slot| mixer.spot(name_of(slot)));
                }
            }
        }
        false
    }

    /// Entries.
    pub(in crate::index) const fn len(&self) -> usize {
        self.entries
    }

    /// Memory of the map.
    pub(in crate::index) fn bytes(&self) -> u64 {
        let buckets: usize = self.segments.iter().map(Segment::bytes).sum();
        (buckets + size_of_val(&*self.segments)) as u64
    }

    /// Makes the segment larger if one more would be too many.
    #[inline]
    fn make_room(&mut self, spot: Spot, name_of: impl Fn(u32) -> u64) {
        let mixer = self.mixer;
        let segment = &mut self.segments[spot.segment()];
        if segment.is_full() {
            segment.fit(|slot| mixer.spot(name_of(slot)));
        }
    }
}
