//! A row of buckets that changes size on its own.

use super::bucket::ENTRIES;
use super::home::{BUCKET_SCALE, Home};
use super::room::Room;
use super::{SEGMENTS, Spot};

/// Hundredths of the room that may be used, and below which a segment is too large. A segment that has just grown
/// or shrunk is far from both.
const FULL_PERCENT: u64 = 90;
const SPARSE_PERCENT: u64 = 37;

/// One part of the map, with its own size.
#[derive(Debug)]
pub(super) struct Segment {
    buckets: Room,
    entries: u32,
    /// Entries at which it is full, and at which it is sparse.
    full: u32,
    sparse: u32,
    /// Its size when it is new, and now, in parts of a bucket.
    base: u16,
    scale: u64,
}

/// Where an entry is: bucket and place in it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    bucket: usize,
    at: usize,
}

/// Entries that fill so many hundredths of a segment of this size.
const fn entries_at(scale: u64, percent: u64) -> u64 {
    scale * ENTRIES as u64 * percent / (100 * BUCKET_SCALE)
}

impl Segment {
    /// Between one bucket and two, as its number is between the first and the last: so segments double out of step.
    pub(super) fn new(number: u32) -> Self {
        let octave = f64::from(number) / SEGMENTS as f64;
        let base = (BUCKET_SCALE as f64 * octave.exp2()) as u16;
        let mut segment = Self { buckets: Room::new(0), entries: 0, full: 0, sparse: 0, base, scale: u64::from(base) };
        segment.resize(u64::from(base), |_| Spot { hash: 0 });
        segment
    }

    /// Whether one more entry would be too many.
    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.entries >= self.full
    }

    /// Whether it is much too large for what is in it.
    #[inline]
    pub(super) fn is_sparse(&self) -> bool {
        self.entries < self.sparse
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.buckets)
    }

    #[inline]
    pub(super) fn line(&self, spot: Spot) -> *const u8 {
        (&raw const self.buckets[spot.home(self.scale).bucket]).cast()
    }

    #[inline]
    pub(super) fn slot(&self, place: Place) -> u32 {
        self.buckets[place.bucket].slot(place.at)
    }

    /// The bucket after this one, which is the first after the last.
    #[inline]
    fn after(&self, bucket: usize) -> usize {
        if bucket + 1 == self.buckets.len() { 0 } else { bucket + 1 }
    }

    /// The first entry with the tag that `is_it` says yes to.
    #[inline]
    pub(super) fn find(&self, spot: Spot, mut is_it: impl FnMut(u32) -> bool) -> Option<Place> {
        let Home { mut bucket, tag } = spot.home(self.scale);
        // Bounded, as a count that has stayed at many may say so all the way round.
        for _ in 0..self.buckets.len() {
            let line = &self.buckets[bucket];
            if let Some(at) = line.with_tag(tag).find(|at| is_it(line.slot(*at))) {
                return Some(Place { bucket, at });
            }
            if !line.has_passed(tag) {
                return None;
            }
            bucket = self.after(bucket);
        }
        None
    }

    /// Adds an entry. The segment is not full, so there is a place.
    #[inline]
    pub(super) fn put(&mut self, spot: Spot, slot: u32) {
        self.put_from(spot.home(self.scale), slot);
        self.entries += 1;
    }

    /// Puts an entry at the first place from its home on.
    #[inline]
    fn put_from(&mut self, home: Home, slot: u32) {
        let mut bucket = home.bucket;
        loop {
            let line = &mut self.buckets[bucket];
            if let Some(at) = line.vacant().first() {
                line.fill(at, home.tag, bucket == home.bucket, slot);
                return;
            }
            line.pass(home.tag);
            bucket = self.after(bucket);
        }
    }

    /// Adds an entry unless there is a candidate that `same` says yes to. Both halves look at the same line, or
    /// lines, so that the second finds them at hand.
    #[inline]
    pub(super) fn put_unless(&mut self, spot: Spot, slot: u32, same: impl FnMut(u32) -> bool) -> Result<(), u32> {
        match self.find(spot, same) {
            Some(place) => Err(self.slot(place)),
            None => {
                self.put(spot, slot);
                Ok(())
            }
        }
    }

    /// Removes the entry with this slot.
    #[inline]
    pub(super) fn take(&mut self, spot: Spot, slot: u32) -> bool {
        let Some(place) = self.find(spot, |other| other == slot) else { return false };
        let Home { mut bucket, tag } = spot.home(self.scale);
        while bucket != place.bucket {
            self.buckets[bucket].unpass(tag);
            bucket = self.after(bucket);
        }
        self.buckets[place.bucket].vacate(place.at);
        self.entries -= 1;
        true
    }

    /// Puts another slot into the entry with this one.
    #[inline]
    pub(super) fn replace(&mut self, spot: Spot, from: u32, to: u32) -> bool {
        let Some(place) = self.find(spot, |other| other == from) else { return false };
        self.buckets[place.bucket].set_slot(place.at, to);
        true
    }

    /// Gives it the size that suits its entries. Sizes between are left out: from full to the first that is not,
    /// from sparse to the smallest in which it is not nearly full.
    #[cold]
    #[inline(never)]
    pub(super) fn fit(&mut self, spot_of: impl Fn(u32) -> Spot) {
        /// Of the room, where a segment that shrinks ends up at most.
        const CALM_PERCENT: u64 = 75;
        let entries = u64::from(self.entries);
        let mut scale = self.scale;
        if self.is_full() {
            while entries_at(scale, FULL_PERCENT) <= entries {
                scale *= 2;
            }
        } else {
            while scale > u64::from(self.base) && entries <= entries_at(scale / 2, CALM_PERCENT) {
                scale /= 2;
            }
        }
        self.resize(scale, spot_of);
    }

    fn resize(&mut self, scale: u64, spot_of: impl Fn(u32) -> Spot) {
        // The smallest is never sparse.
        let sparse = if scale == u64::from(self.base) { 0 } else { entries_at(scale, SPARSE_PERCENT) };
        (self.full, self.sparse) = (entries_at(scale, FULL_PERCENT) as u32, sparse as u32);
        let before = std::mem::replace(&mut self.scale, scale);
        let buckets = scale.div_ceil(BUCKET_SCALE) as usize;
        let old = std::mem::replace(&mut self.buckets, Room::new(buckets));
        let mut strays = Strays::new();
        for (bucket, line) in old.iter().enumerate() {
            for at in line.filled() {
                let home =
                    line.tag_at_home(at).and_then(|tag| Home { bucket, tag }.moved(before.ilog2(), scale.ilog2()));
                match home {
                    Some(home) => self.put_from(home, line.slot(at)),
                    None => strays.push(line.slot(at)),
                }
            }
            if strays.len > Strays::MAX - ENTRIES {
                self.put_strays(&mut strays, &spot_of);
            }
        }
        self.put_strays(&mut strays, &spot_of);
    }

    fn put_strays(&mut self, strays: &mut Strays, spot_of: impl Fn(u32) -> Spot) {
        for (slot, spot) in strays.take(spot_of) {
            self.put_from(spot.home(self.scale), slot);
        }
    }
}

/// Entries whose home has to be found by their names. These are far apart in memory: they are read in a loop that does
/// nothing else, so that the misses of many overlap.
struct Strays {
    slots: [u32; Self::MAX],
    spots: [Spot; Self::MAX],
    len: usize,
}

impl Strays {
    const MAX: usize = 128;

    fn new() -> Self {
        Self { slots: [0; Self::MAX], spots: [Spot { hash: 0 }; Self::MAX], len: 0 }
    }

    fn push(&mut self, slot: u32) {
        self.slots[self.len] = slot;
        self.len += 1;
    }

    /// All of them; there are none after it.
    fn take(&mut self, spot_of: impl Fn(u32) -> Spot) -> impl Iterator<Item = (u32, Spot)> {
        let slots = &self.slots[..std::mem::take(&mut self.len)];
        for (spot, slot) in self.spots.iter_mut().zip(slots) {
            *spot = spot_of(*slot);
        }
        slots.iter().copied().zip(self.spots.iter().copied())
    }
}
