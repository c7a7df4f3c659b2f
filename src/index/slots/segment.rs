//! A row of buckets that changes size on its own.

use super::bucket::{Bucket, ENTRIES};
use super::room::Room;
use super::{SEGMENTS, Spot};

/// Hundredths of the room that may be used, and below which a segment is too large. A segment that has just grown
/// or shrunk is far from both.
const FULL_PERCENT: usize = 85;
const SPARSE_PERCENT: usize = 40;

/// One part of the map, with its own size.
#[derive(Debug)]
pub(super) struct Segment {
    buckets: Room,
    entries: u32,
    /// Entries at which it is full, and at which it is sparse.
    full: u32,
    sparse: u32,
    /// Which of its sizes it has, and which segment it is.
    step: u16,
    number: u16,
}

/// Where an entry is: bucket and place in it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    bucket: usize,
    at: usize,
}

/// How many buckets the size of this step has. Each step is three fifths larger than the one before, and the
/// segments' sizes are spread evenly between one step and the next.
fn buckets_at(step: u16, number: u16) -> usize {
    const RATIO: f64 = 1.6;
    let start = RATIO.powf(f64::from(number) / SEGMENTS as f64);
    (start * RATIO.powi(i32::from(step))).floor() as usize
}

impl Segment {
    pub(super) fn new(number: u32) -> Self {
        let number = number as u16;
        let mut segment = Self { buckets: Room::new(0), entries: 0, full: 0, sparse: 0, step: 0, number };
        segment.resize(0, |_| Spot { hash: 0 });
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
        (&raw const self.buckets[spot.home(self.buckets.len())]).cast()
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
        let tag = spot.tag();
        let mut bucket = spot.home(self.buckets.len());
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
        self.put_from(spot.home(self.buckets.len()), spot.tag(), slot);
        self.entries += 1;
    }

    /// Puts an entry at the first place from this bucket on.
    #[inline]
    fn put_from(&mut self, mut bucket: usize, tag: u16, slot: u32) {
        loop {
            let line = &mut self.buckets[bucket];
            if let Some(at) = line.vacant().first() {
                line.fill(at, tag, slot);
                return;
            }
            line.pass(tag);
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
        let mut bucket = spot.home(self.buckets.len());
        while bucket != place.bucket {
            self.buckets[bucket].unpass(spot.tag());
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

    /// Gives it the size that suits its entries. The steps below are left out: from full to a step larger, from
    /// sparse to the smallest in which it is not nearly full.
    #[cold]
    #[inline(never)]
    pub(super) fn fit(&mut self, spot_of: impl Fn(u32) -> Spot) {
        /// Of the room, where a segment that shrinks ends up at most.
        const CALM_PERCENT: usize = 70;
        let entries = self.entries as usize;
        let mut step = self.step;
        if self.is_full() {
            while buckets_at(step, self.number) * ENTRIES * FULL_PERCENT / 100 <= entries {
                step += 1;
            }
        } else {
            while step > 0 && entries <= buckets_at(step - 1, self.number) * ENTRIES * CALM_PERCENT / 100 {
                step -= 1;
            }
        }
        self.resize(step, spot_of);
    }

    fn resize(&mut self, step: u16, spot_of: impl Fn(u32) -> Spot) {
        let count = buckets_at(step, self.number);
        let room = count * ENTRIES;
        // A step of a segment of one or two buckets may leave it as it is; small ones are never sparse.
        let sparse = if step == 0 { 0 } else { room * SPARSE_PERCENT / 100 };
        (self.step, self.full, self.sparse) = (step, (room * FULL_PERCENT / 100) as u32, sparse as u32);
        let old = std::mem::replace(&mut self.buckets, Room::new(count));
        let mut batch = Batch::new();
        for lines in old.chunks(Batch::LINES) {
            batch.read(lines, &spot_of);
            for (slot, spot) in batch.entries() {
                self.put_from(spot.home(count), spot.tag(), slot);
            }
        }
    }
}

/// Entries on their way from one row of buckets to another. Their names are far apart in memory: they are read in a
/// loop that does nothing else, so that the misses of many overlap.
struct Batch {
    slots: [u32; Self::LINES * ENTRIES],
    spots: [Spot; Self::LINES * ENTRIES],
    len: usize,
}

impl Batch {
    const LINES: usize = 32;

    fn new() -> Self {
        let nowhere = Spot { hash: 0 };
        Self { slots: [0; Self::LINES * ENTRIES], spots: [nowhere; Self::LINES * ENTRIES], len: 0 }
    }

    fn read(&mut self, lines: &[Bucket], spot_of: impl Fn(u32) -> Spot) {
        self.len = 0;
        for line in lines {
            for at in line.filled() {
                self.slots[self.len] = line.slot(at);
                self.len += 1;
            }
        }
        for (spot, slot) in self.spots.iter_mut().zip(&self.slots[..self.len]) {
            *spot = spot_of(*slot);
        }
    }

    fn entries(&self) -> impl Iterator<Item = (u32, Spot)> {
        self.slots[..self.len].iter().copied().zip(self.spots)
    }
}
