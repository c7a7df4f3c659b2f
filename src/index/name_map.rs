//! The map from a block's engine hash, its **name**, to the words of the arena at which that name is stored.
//!
//! The map stores no names. An entry is a word and a *tag*, some bits of the name's hash. An entry with a matching tag is
//! a candidate: the caller reads the name at the word and compares it. Several words may have the same name; each has an
//! entry of its own.
//!
//! # How it is stored
//!
//! There are 256 segments, chosen by bits of the hash, each a row of 64-byte buckets with room for 10 entries. An entry
//! is in its home bucket or, if that is full, in the first bucket after it with room. Each bucket counts the entries
//! that were sent past it, by a few bits of the tag. A search ends at the first bucket that has sent no similar tag past
//! it. So a search for an unknown name nearly always reads one line.
//!
//! A segment doubles and halves on its own, and no insertion moves more than a few thousand entries. The hash is scaled
//! to the size of the segment: the integer part is the home, and the fraction is the tag. In a segment of twice the
//! size, the first bit of the tag becomes the last bit of the home. So a resize moves most entries by their tags, in the
//! order of memory. It reads names only of entries outside their home, and of the few that have moved so often that
//! hardly a bit of their tag is left. On the way to any size, that is about one name for every six entries.
//!
//! Segments are out of step by design: the map spreads hashes twice as densely over the first segment as over the last.
//! So each segment changes size at another number of entries of the map, and the map is always as full as segments are on
//! average. The buckets of a segment are one row, a power of two of them, from a pool of huge pages (`row_pool`).
//!
//! The hash is keyed: without the secret, a client that chooses names cannot aim at one bucket. Many words with the same
//! name do fill one bucket after another, and a search for that name may read all of these.

#![expect(unsafe_code, reason = "memory comes from the system as pointers")]

mod bucket;
#[cfg(test)]
mod tests;

use self::bucket::{Bucket, ENTRIES};
use super::row_pool::{Row, Rows};
use super::types::spread;
use crate::prefetch::prefetch;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

const SEGMENTS: usize = 256;

/// The hash of a name, from which follows its home at any size of its segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Spot {
    hash: u64,
}

impl Spot {
    /// Bits that give the home within the segment.
    const FRACTION_BITS: u32 = u64::BITS - SEGMENTS.ilog2();

    /// The highest bits choose the segment.
    #[inline]
    fn segment(self) -> usize {
        (self.hash >> Self::FRACTION_BITS) as usize
    }

    /// All bits below them choose the home.
    #[inline]
    fn home(self, scale: u64) -> Home {
        Home::new(self.hash & ((1 << Self::FRACTION_BITS) - 1), scale)
    }
}

/// The keyed hash of names.
#[derive(Clone, Copy, Debug)]
struct Mixer {
    keys: [u64; 2],
    /// Tests keep only a few bits of the hash, so that many names share few homes.
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

    /// Two folded multiplications, because one leaves names that differ in few bits too close together.
    #[inline]
    fn spot(self, name: u64) -> Spot {
        let [first, second] = self.keys;
        let hash = fold(fold(name ^ first, second) ^ first, 0x9fb2_1c65_1e98_df25);
        #[cfg(test)]
        let hash = hash & self.keep;
        Spot { hash: skewed(hash) }
    }
}

/// Skews an evenly spread hash, so that hashes are twice as dense at 0 as at the other end. As a fraction of one, `u` becomes
/// `u * (2 + u) / 3`.
#[inline]
const fn skewed(hash: u64) -> u64 {
    const THIRD: u64 = u64::MAX / 3;
    let part = ((hash as u128 * THIRD as u128) >> u64::BITS) as u64 + 2 * THIRD;
    ((hash as u128 * part as u128) >> u64::BITS) as u64
}

#[inline]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

/// Words by name. `name_of` returns the name at a word of the map, the one with which the word was added.
#[derive(Debug)]
pub(super) struct NameMap {
    mixer: Mixer,
    segments: Box<[Segment]>,
    entries: usize,
    /// The pool of the segments' buckets, which the map shares with the shard's table.
    rows: Rows,
    /// Bytes of all segments' buckets.
    buckets_bytes: usize,
    /// One bit for each segment: set if the segment may have become too large for its entries.
    underfull: [u64; SEGMENTS / u64::BITS as usize],
}

impl NameMap {
    /// An empty map, whose hash cannot be predicted without the secret.
    pub(super) fn new(secret: u64, rows: Rows) -> Self {
        let segments: Box<[Segment]> = (0..SEGMENTS).map(|_| Segment::new(&rows)).collect();
        Self {
            mixer: Mixer::new(secret),
            rows,
            buckets_bytes: segments.iter().map(Segment::bytes).sum(),
            segments,
            entries: 0,
            underfull: [0; SEGMENTS / u64::BITS as usize],
        }
    }

    #[inline]
    pub(super) fn spot(&self, name: u64) -> Spot {
        self.mixer.spot(name)
    }

    /// The spot of a name, whose line is prefetched.
    #[inline]
    pub(super) fn prefetched(&self, name: u64) -> Spot {
        let spot = self.spot(name);
        self.prefetch(spot);
        spot
    }

    /// Prefetches the line at which a search begins.
    #[inline]
    pub(super) fn prefetch(&self, spot: Spot) {
        prefetch(self.segments[spot.segment()].line(spot));
    }

    /// The first candidate for which `is_it` returns `true`.
    #[inline]
    pub(super) fn find(&self, spot: Spot, is_it: impl FnMut(u32) -> bool) -> Option<u32> {
        let segment = &self.segments[spot.segment()];
        segment.find(spot, is_it).map(|place| segment.word(place))
    }

    /// A word that may have a name: the first entry with its tag. For hints only; the name may be elsewhere, or
    /// unknown.
    #[inline]
    pub(super) fn likely(&self, spot: Spot) -> Option<u32> {
        self.find(spot, |_| true)
    }

    /// Adds an entry, even if there is an equal one.
    #[inline]
    pub(super) fn put(&mut self, spot: Spot, word: u32, name_of: impl Fn(u32) -> u64) {
        self.make_room(spot, name_of);
        self.segments[spot.segment()].put(spot, word);
        self.entries += 1;
    }

    /// Adds an entry, unless `same` returns `true` for a candidate: then returns that one and changes nothing.
    #[inline]
    pub(super) fn put_unless(
        &mut self,
        spot: Spot,
        word: u32,
        same: impl FnMut(u32) -> bool,
        name_of: impl Fn(u32) -> u64,
    ) -> Result<(), u32> {
        self.make_room(spot, name_of);
        self.segments[spot.segment()].put_unless(spot, word, same)?;
        self.entries += 1;
        Ok(())
    }

    /// Removes the entry of exactly this word; returns whether there was one. The segment is shrunk only by
    /// [`shrink`](Self::shrink), because names may not be readable in the middle of a removal.
    #[inline]
    pub(super) fn take(&mut self, spot: Spot, word: u32) -> bool {
        let at = spot.segment();
        let segment = &mut self.segments[at];
        let taken = segment.take(spot, word);
        if taken {
            self.entries -= 1;
            self.underfull[at / 64] |= u64::from(segment.is_underfull()) << (at % 64);
        }
        taken
    }

    /// Replaces the word of an entry by another word with the same name; returns whether there was one.
    #[inline]
    pub(super) fn replace(&mut self, spot: Spot, from: u32, to: u32) -> bool {
        self.segments[spot.segment()].replace(spot, from, to)
    }

    /// Shrinks up to `segments_max` underfull segments; returns whether there are more. Call it now and then, when the
    /// names of all words can be read.
    pub(super) fn shrink(&mut self, segments_max: usize, name_of: impl Fn(u32) -> u64) -> bool {
        let mixer = self.mixer;
        let mut left = segments_max;
        for (at, underfull) in self.underfull.iter_mut().enumerate() {
            while *underfull != 0 {
                if left == 0 {
                    return true;
                }
                left -= 1;
                let segment = &mut self.segments[at * 64 + underfull.trailing_zeros() as usize];
                *underfull &= *underfull - 1;
                // It may have been filled again since.
                if segment.is_underfull() {
                    self.buckets_bytes -= segment.bytes();
                    segment.fit(&self.rows, |word| mixer.spot(name_of(word)));
                    self.buckets_bytes += segment.bytes();
                }
            }
        }
        false
    }

    pub(super) const fn len(&self) -> usize {
        self.entries
    }

    pub(super) fn bytes(&self) -> u64 {
        (self.buckets_bytes + size_of_val(&*self.segments)) as u64
    }

    /// Enlarges the segment if one more entry would be too many.
    #[inline]
    fn make_room(&mut self, spot: Spot, name_of: impl Fn(u32) -> u64) {
        let mixer = self.mixer;
        let segment = &mut self.segments[spot.segment()];
        if segment.is_full() {
            self.buckets_bytes -= segment.bytes();
            segment.fit(&self.rows, |word| mixer.spot(name_of(word)));
            self.buckets_bytes += segment.bytes();
        }
    }
}

impl Drop for NameMap {
    fn drop(&mut self) {
        for segment in &mut self.segments {
            segment.buckets.give_back(&self.rows);
        }
    }
}

/// How many names ahead are prefetched.
pub(super) const AHEAD: usize = 16;

/// The spots of consecutive names. Each is computed some names before it is needed, so that its line is on its way.
pub(super) struct SpotsAhead {
    /// Those of the next names, each at its number modulo [`AHEAD`].
    spots: [Spot; AHEAD],
}

impl SpotsAhead {
    /// For the first of `names`.
    #[inline]
    pub(super) fn new(map: &NameMap, names: &[u64]) -> Self {
        let mut spots = [Spot::default(); AHEAD];
        for (spot, name) in spots.iter_mut().zip(names) {
            *spot = map.prefetched(*name);
        }
        Self { spots }
    }

    /// The spot of name `at`. Called for one name after the other.
    #[inline]
    pub(super) fn next(&mut self, map: &NameMap, names: &[u64], at: usize) -> Spot {
        let spot = self.spots[at % AHEAD];
        if let Some(ahead) = names.get(at + AHEAD) {
            self.spots[at % AHEAD] = map.prefetched(*ahead);
        }
        spot
    }
}

/// Percent of the room up to which a segment may be filled, and below which it is underfull. A segment that has just
/// changed size is far from both.
const FULL_PERCENT: u64 = 90;
const UNDERFULL_PERCENT: u64 = 37;

/// One part of the map, with its own size.
#[derive(Debug)]
struct Segment {
    buckets: BucketRow,
    entries: u32,
    /// Numbers of entries at which it is full and underfull.
    full: u32,
    underfull: u32,
    /// Its size in parts of a bucket.
    scale: u64,
}

/// The position of an entry: bucket, and place in it.
#[derive(Clone, Copy, Debug)]
struct Place {
    bucket: usize,
    at: usize,
}

/// The number of entries that fill this percentage of a segment of this size.
const fn entries_at(scale: u64, percent: u64) -> u64 {
    scale * ENTRIES as u64 * percent / (100 * BUCKET_SCALE)
}

impl Segment {
    /// Of one bucket.
    fn new(rows: &Rows) -> Self {
        Self {
            buckets: BucketRow::new(rows, 1),
            entries: 0,
            full: entries_at(BUCKET_SCALE, FULL_PERCENT) as u32,
            // The smallest is never underfull.
            underfull: 0,
            scale: BUCKET_SCALE,
        }
    }

    /// Whether one more entry would be too many.
    #[inline]
    fn is_full(&self) -> bool {
        self.entries >= self.full
    }

    /// Whether it is much too large for its entries.
    #[inline]
    fn is_underfull(&self) -> bool {
        self.entries < self.underfull
    }

    fn bytes(&self) -> usize {
        size_of_val(&*self.buckets)
    }

    #[inline]
    fn line(&self, spot: Spot) -> *const u8 {
        (&raw const self.buckets[spot.home(self.scale).bucket]).cast()
    }

    #[inline]
    fn word(&self, place: Place) -> u32 {
        self.buckets[place.bucket].word(place.at)
    }

    /// The bucket after this one; after the last comes the first.
    #[inline]
    fn after(&self, bucket: usize) -> usize {
        if bucket + 1 == self.buckets.len() { 0 } else { bucket + 1 }
    }

    /// The first entry with the tag for which `is_it` returns `true`.
    #[inline]
    fn find(&self, spot: Spot, mut is_it: impl FnMut(u32) -> bool) -> Option<Place> {
        let Home { mut bucket, tag } = spot.home(self.scale);
        // Bounded, because counts that have stayed at their maximum may lead all the way round.
        for _ in 0..self.buckets.len() {
            let line = &self.buckets[bucket];
            if let Some(at) = line.with_tag(tag).find(|at| is_it(line.word(*at))) {
                return Some(Place { bucket, at });
            }
            if !line.has_passed(tag) {
                return None;
            }
            bucket = self.after(bucket);
        }
        None
    }

    /// Adds an entry. The segment is not full, so there is room.
    #[inline]
    fn put(&mut self, spot: Spot, word: u32) {
        self.put_from(spot.home(self.scale), word);
        self.entries += 1;
    }

    /// Puts an entry at the first free position from its home on.
    #[inline]
    fn put_from(&mut self, home: Home, word: u32) {
        let mut bucket = home.bucket;
        loop {
            let line = &mut self.buckets[bucket];
            if let Some(at) = line.vacant().first() {
                line.fill(at, home.tag, bucket == home.bucket, word);
                return;
            }
            line.pass(home.tag);
            bucket = self.after(bucket);
        }
    }

    /// Adds an entry, unless `same` returns `true` for a candidate. Search and insertion read the same lines, so the
    /// insertion finds them in the cache.
    #[inline]
    fn put_unless(&mut self, spot: Spot, word: u32, same: impl FnMut(u32) -> bool) -> Result<(), u32> {
        match self.find(spot, same) {
            Some(place) => Err(self.word(place)),
            None => {
                self.put(spot, word);
                Ok(())
            }
        }
    }

    /// Removes the entry with this word.
    #[inline]
    fn take(&mut self, spot: Spot, word: u32) -> bool {
        let Some(place) = self.find(spot, |other| other == word) else { return false };
        let Home { mut bucket, tag } = spot.home(self.scale);
        while bucket != place.bucket {
            self.buckets[bucket].unpass(tag);
            bucket = self.after(bucket);
        }
        self.buckets[place.bucket].vacate(place.at);
        self.entries -= 1;
        true
    }

    /// Replaces the word of an entry.
    #[inline]
    fn replace(&mut self, spot: Spot, from: u32, to: u32) -> bool {
        let Some(place) = self.find(spot, |other| other == from) else { return false };
        self.buckets[place.bucket].set_word(place.at, to);
        true
    }

    /// Resizes the segment to fit its entries, in one step. A full segment gets the first size at which it is not full, an
    /// underfull one the smallest size at which it is not nearly full.
    #[cold]
    #[inline(never)]
    fn fit(&mut self, rows: &Rows, spot_of: impl Fn(u32) -> Spot) {
        /// How full a segment that shrinks may become.
        const CALM_PERCENT: u64 = 75;
        let entries = u64::from(self.entries);
        let mut scale = self.scale;
        if self.is_full() {
            while entries_at(scale, FULL_PERCENT) <= entries {
                scale *= 2;
            }
        } else {
            while scale > BUCKET_SCALE && entries <= entries_at(scale / 2, CALM_PERCENT) {
                scale /= 2;
            }
        }
        self.resize(rows, scale, spot_of);
    }

    fn resize(&mut self, rows: &Rows, scale: u64, spot_of: impl Fn(u32) -> Spot) {
        let underfull = if scale == BUCKET_SCALE { 0 } else { entries_at(scale, UNDERFULL_PERCENT) };
        (self.full, self.underfull) = (entries_at(scale, FULL_PERCENT) as u32, underfull as u32);
        let before = std::mem::replace(&mut self.scale, scale);
        let buckets = (scale / BUCKET_SCALE) as usize;
        let mut old = std::mem::replace(&mut self.buckets, BucketRow::new(rows, buckets));
        let mut strays = Strays::new();
        for (bucket, line) in old.iter().enumerate() {
            for at in line.filled() {
                let home =
                    line.tag_at_home(at).and_then(|tag| Home { bucket, tag }.moved(before.ilog2(), scale.ilog2()));
                match home {
                    Some(home) => self.put_from(home, line.word(at)),
                    None => strays.push(line.word(at)),
                }
            }
            if strays.len > Strays::MAX - ENTRIES {
                self.put_strays(&mut strays, &spot_of);
            }
        }
        self.put_strays(&mut strays, &spot_of);
        old.give_back(rows);
    }

    fn put_strays(&mut self, strays: &mut Strays, spot_of: impl Fn(u32) -> Spot) {
        for (word, spot) in strays.take(spot_of) {
            self.put_from(spot.home(self.scale), word);
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
        Self { words: [0; Self::MAX], spots: [Spot { hash: 0 }; Self::MAX], len: 0 }
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

/// The size of 1 bucket: sizes are in parts of a bucket, so that there are many between one and two.
const BUCKET_SCALE: u64 = 1 << (u64::BITS - Spot::FRACTION_BITS);

/// The bits of the name's hash that an entry stores beside its home: at most 14, those after the home, from the highest
/// down. The last known bit is followed by a one, then by zeros, so a tag is never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tag(u16);

impl Tag {
    /// Bits of a new one.
    const BITS: u32 = 14;
    /// The fewest bits worth keeping. Half of the entries are younger than the last doubling and half of the rest
    /// younger than the one before it, so there are always few with a short tag.
    const BITS_MIN: u32 = 6;
    /// The one that follows the last bit of a new tag.
    const END: u16 = 1 << (u16::BITS - Self::BITS - 1);

    /// From the bits, highest first. Drops bits that do not fit.
    #[inline]
    const fn new(bits: u16) -> Self {
        Self(bits & !(2 * Self::END - 1) | Self::END)
    }

    /// A tag whose lowest bit is not used, as it is stored and as it is searched.
    #[inline]
    const fn bits(self) -> u16 {
        self.0
    }

    #[inline]
    const fn from_bits(bits: u16) -> Self {
        Self(bits)
    }

    /// The class among `1 << bits`; every tag has at least this many bits.
    #[inline]
    const fn class(self, bits: u32) -> u32 {
        debug_assert!(bits <= Self::BITS_MIN, "shorter than any tag");
        (self.0 >> (u16::BITS - bits)) as u32
    }

    /// Number of known bits.
    #[inline]
    const fn known(self) -> u32 {
        u16::BITS - 1 - self.0.trailing_zeros()
    }
}

/// The bucket in which the search for an entry begins, and the tag there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Home {
    bucket: usize,
    tag: Tag,
}

impl Home {
    /// The home of a hash's fraction, in a segment of `scale` parts of a bucket: the integer part of their product is
    /// the bucket, and the tag comes from its fraction.
    #[inline]
    const fn new(fraction: u64, scale: u64) -> Self {
        let product = fraction as u128 * scale as u128;
        Self {
            bucket: (product >> u64::BITS) as usize,
            tag: Tag::new((product as u64 >> (u64::BITS - u16::BITS)) as u16),
        }
    }

    /// The home after `to` doublings, from that after `from`. `None` if hardly a bit of the tag would be left.
    #[inline]
    const fn moved(self, from: u32, to: u32) -> Option<Self> {
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
        let row = rows.allocate(len);
        Self { start: row.start().cast(), len: row.lines(), row: Some(row) }
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
