//! A segment of the name map: a row of buckets that doubles and halves as entries come and go.

#![expect(unsafe_code, reason = "memory comes from the system as pointers")]

use super::super::row_pool::{Row, Rows};
use super::bucket::{BUCKET_LINES, Bucket, CompareTags, ENTRIES, Narrow};
use super::home::{Home, Spot};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Percent of the room up to which a segment may be filled, and below which it is underfull. A segment that has just
/// changed size is far from both.
const FULL_PERCENT: u64 = 90;
const UNDERFULL_PERCENT: u64 = 37;

/// One part of the map, with its own size.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Segment {
    buckets: BucketRow,
    entries: u32,
    /// Numbers of entries at which it is full and underfull.
    full: u32,
    underfull: u32,
}

/// The position of an entry: bucket, and place in it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    bucket: usize,
    at: usize,
}

/// The number of entries that fill this percentage of a number of buckets.
const fn entries_at(buckets: usize, percent: u64) -> u32 {
    (buckets as u64 * ENTRIES as u64 * percent / 100) as u32
}

impl Segment {
    /// Of one bucket.
    pub(super) fn new(rows: &Rows) -> Self {
        Self {
            buckets: BucketRow::new(rows, 1),
            entries: 0,
            full: entries_at(1, FULL_PERCENT),
            // The smallest is never underfull.
            underfull: 0,
        }
    }

    /// Returns the memory.
    pub(super) fn give_back(&mut self, rows: &Rows) {
        self.buckets.give_back(rows);
    }

    /// Whether one more entry would be too many.
    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.entries >= self.full
    }

    /// Whether it is much too large for its entries.
    #[inline]
    pub(super) fn is_underfull(&self) -> bool {
        self.entries < self.underfull
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.buckets)
    }

    /// Where an entry belongs, until the segment changes its size.
    #[inline]
    pub(super) fn home(&self, spot: Spot) -> Home {
        spot.home(self.buckets.len())
    }

    /// Prefetches a home.
    #[inline]
    pub(super) fn prefetch(&self, home: Home) {
        self.buckets[home.bucket()].prefetch();
    }

    #[inline]
    pub(super) fn word(&self, place: Place) -> u32 {
        self.buckets[place.bucket].word(place.at)
    }

    /// The bucket after this one; after the last comes the first.
    #[inline]
    fn after(&self, bucket: usize) -> usize {
        (bucket + 1) & (self.buckets.len() - 1)
    }

    /// The first entry with the tag for which `is_it` returns `true`.
    #[inline]
    pub(super) fn find(&self, home: Home, mut is_it: impl FnMut(u32) -> bool) -> Option<Place> {
        let mut bucket = home.bucket();
        // Bounded, because counts that have stayed at their maximum may lead all the way round.
        for _ in 0..self.buckets.len() {
            let line = &self.buckets[bucket];
            if let Some(at) = line.with_tag::<Narrow>(home.tag()).find(|at| is_it(line.word(*at))) {
                return Some(Place { bucket, at });
            }
            if !line.has_passed(home.tag()) {
                return None;
            }
            bucket = self.after(bucket);
        }
        None
    }

    /// Adds an entry. The segment is not full, so there is room.
    #[inline(always)]
    pub(super) fn put<C: CompareTags>(&mut self, home: Home, word: u32) {
        self.put_from::<C>(home, word);
        self.entries += 1;
    }

    /// Puts an entry at the first free position from its home on.
    #[inline(always)]
    fn put_from<C: CompareTags>(&mut self, home: Home, word: u32) {
        let line = &mut self.buckets[home.bucket()];
        match line.vacant::<C>().first() {
            Some(at) => line.fill(at, home.tag(), true, word),
            None => self.put_past(home, word),
        }
    }

    /// Puts an entry whose home is full.
    #[inline(never)]
    fn put_past(&mut self, home: Home, word: u32) {
        let mut bucket = home.bucket();
        loop {
            self.buckets[bucket].pass(home.tag());
            bucket = self.after(bucket);
            let line = &mut self.buckets[bucket];
            if let Some(at) = line.vacant::<Narrow>().first() {
                line.fill(at, home.tag(), false, word);
                return;
            }
        }
    }

    /// Adds an entry, unless `same` returns `true` for the word of a candidate: then returns that word and changes nothing.
    /// The segment is not full.
    #[inline(always)]
    pub(super) fn put_unless<C: CompareTags>(
        &mut self,
        home: Home,
        word: u32,
        same: impl FnMut(u32) -> bool,
    ) -> Result<(), u32> {
        let line = &self.buckets[home.bucket()];
        // Nearly always the first line answers.
        if line.with_tag::<C>(home.tag()).first().is_some() || line.has_passed(home.tag()) {
            self.refuse_same(home, same)?;
        }
        self.put::<C>(home, word);
        Ok(())
    }

    /// The word of the first candidate for which `same` returns `true`, as an error.
    #[inline(never)]
    fn refuse_same(&self, home: Home, same: impl FnMut(u32) -> bool) -> Result<(), u32> {
        self.find(home, same).map_or(Ok(()), |place| Err(self.word(place)))
    }

    /// Removes the entry with this word; returns whether there was one.
    #[inline(always)]
    pub(super) fn take<C: CompareTags>(&mut self, home: Home, word: u32) -> bool {
        let line = &mut self.buckets[home.bucket()];
        // Nearly every entry is at home.
        if let Some(at) = line.with_tag::<C>(home.tag()).find(|at| line.word(*at) == word) {
            line.vacate(at);
            self.entries -= 1;
            return true;
        }
        self.take_far(home, word)
    }

    #[inline(never)]
    fn take_far(&mut self, home: Home, word: u32) -> bool {
        let Some(place) = self.find(home, |other| other == word) else { return false };
        let mut bucket = home.bucket();
        while bucket != place.bucket {
            self.buckets[bucket].unpass(home.tag());
            bucket = self.after(bucket);
        }
        self.buckets[place.bucket].vacate(place.at);
        self.entries -= 1;
        true
    }

    /// Replaces the word of an entry; returns whether there was one.
    #[inline]
    pub(super) fn replace(&mut self, home: Home, from: u32, to: u32) -> bool {
        let Some(place) = self.find(home, |other| other == from) else { return false };
        self.buckets[place.bucket].set_word(place.at, to);
        true
    }

    /// Doubles the segment, in one step.
    ///
    /// Two buckets take the place of one, so the entries at home find room there without a search. Strays, whose home
    /// follows only from their names, are put afterwards.
    #[cold]
    #[inline(never)]
    pub(super) fn double(&mut self, rows: &Rows, spot_of: impl Fn(u32) -> Spot) {
        let mut old = self.replace_buckets(rows, self.buckets.len() * 2);
        for (line, halves) in old.iter().zip(self.buckets.as_chunks_mut().0) {
            line.split(halves);
        }
        let mut strays = Strays::new();
        for line in old.iter() {
            line.strays().for_each(|at| strays.push(line.word(at)));
            self.put_strays_if_many(&mut strays, &spot_of);
        }
        self.put_strays(&mut strays, &spot_of);
        old.give_back(rows);
    }

    /// Halves the segment, in one step, to the smallest size at which it is not nearly full.
    #[cold]
    #[inline(never)]
    pub(super) fn halve(&mut self, rows: &Rows, spot_of: impl Fn(u32) -> Spot) {
        /// How full it may become.
        const CALM_PERCENT: u64 = 75;
        let mut times = 0;
        while self.buckets.len() >> times > 1
            && self.entries <= entries_at(self.buckets.len() >> (times + 1), CALM_PERCENT)
        {
            times += 1;
        }
        let mut old = self.replace_buckets(rows, self.buckets.len() >> times);
        let mut strays = Strays::new();
        for (bucket, line) in old.iter().enumerate() {
            for at in line.filled() {
                match line.tag_at_home(at) {
                    Some(tag) => self.put_from::<Narrow>(Home::known(bucket, tag).halved(times), line.word(at)),
                    None => strays.push(line.word(at)),
                }
            }
            self.put_strays_if_many(&mut strays, &spot_of);
        }
        self.put_strays(&mut strays, &spot_of);
        old.give_back(rows);
    }

    /// Replaces the buckets by a number of empty ones; returns those before.
    fn replace_buckets(&mut self, rows: &Rows, buckets: usize) -> BucketRow {
        self.full = entries_at(buckets, FULL_PERCENT);
        self.underfull = if buckets == 1 { 0 } else { entries_at(buckets, UNDERFULL_PERCENT) };
        std::mem::replace(&mut self.buckets, BucketRow::new(rows, buckets))
    }

    /// Puts strays if there may not be room for those of another bucket.
    fn put_strays_if_many(&mut self, strays: &mut Strays, spot_of: impl Fn(u32) -> Spot) {
        if strays.len > Strays::MAX - ENTRIES {
            self.put_strays(strays, spot_of);
        }
    }

    fn put_strays(&mut self, strays: &mut Strays, spot_of: impl Fn(u32) -> Spot) {
        for (word, spot) in strays.take(spot_of) {
            self.put_from::<Narrow>(self.home(spot), word);
        }
    }
}

/// Entries whose home follows only from their names. The names are far apart in memory: a loop that does nothing else
/// reads them, so that many cache misses overlap.
struct Strays {
    words: [u32; Self::MAX],
    spots: [Spot; Self::MAX],
    len: usize,
}

impl Strays {
    const MAX: usize = 128;

    fn new() -> Self {
        Self { words: [0; Self::MAX], spots: [Spot::new(0); Self::MAX], len: 0 }
    }

    fn push(&mut self, word: u32) {
        self.words[self.len] = word;
        self.len += 1;
    }

    /// Takes all of them.
    fn take(&mut self, spot_of: impl Fn(u32) -> Spot) -> impl Iterator<Item = (u32, Spot)> {
        let words = &self.words[..std::mem::take(&mut self.len)];
        for (spot, word) in self.spots.iter_mut().zip(words) {
            *spot = spot_of(*word);
        }
        words.iter().copied().zip(self.spots.iter().copied())
    }
}

/// A row of buckets, until [`give_back`](Self::give_back).
#[derive(Debug)]
struct BucketRow {
    /// `None` once it was given back.
    row: Option<Row>,
    start: NonNull<Bucket>,
    len: usize,
}

// SAFETY: it owns its buckets, like a box.
unsafe impl Send for BucketRow {}
// SAFETY: as above.
unsafe impl Sync for BucketRow {}

impl BucketRow {
    /// Of `len` empty buckets, a power of two.
    fn new(rows: &Rows, len: usize) -> Self {
        // Rows are zero, and zeros are empty buckets.
        let row = rows.allocate(len * BUCKET_LINES);
        Self { start: row.start().cast(), len, row: Some(row) }
    }

    /// Returns the memory. No bucket is left.
    fn give_back(&mut self, rows: &Rows) {
        self.len = 0;
        if let Some(row) = self.row.take() {
            rows.free(row);
        }
    }
}

impl Deref for BucketRow {
    type Target = [Bucket];

    #[inline]
    fn deref(&self) -> &[Bucket] {
        // SAFETY: `len` buckets, initialised (zero is a bucket), and borrowed with `self`; none once they were given back.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for BucketRow {
    #[inline]
    fn deref_mut(&mut self) -> &mut [Bucket] {
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}
