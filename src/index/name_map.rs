//! The map from a block's engine hash, its **name**, to the words of the arena at which that name is stored.
//!
//! The map stores no names. An entry is a word and a *tag*, some bits of the name's hash. An entry with a matching tag is
//! a candidate: the caller reads the name at the word and compares it. Several words may have the same name; each has an
//! entry of its own.
//!
//! # How it is stored
//!
//! There are 256 segments, chosen by bits of the hash, each a row of buckets with room for 20 entries. An entry is in its
//! home bucket or, if that is full, in the first bucket after it with room. Each bucket counts the entries that were sent
//! past it, by a few bits of the tag. A search ends at the first bucket that has sent no similar tag past it. So a search
//! for an unknown name nearly always reads one line.
//!
//! A bucket is two lines. Buckets of one line, with room for 10 entries, are full more than twice as often, and each full
//! home costs a mispredicted branch and a line that was not prefetched: an insertion took 1.3 times as long.
//!
//! A segment doubles and halves on its own, and no insertion moves more than a few thousand entries. The hash is scaled
//! to the size of the segment: the integer part is the home, and the fraction is the tag. In a segment of twice the
//! size, the first bit of the tag becomes the last bit of the home. So a resize moves most entries by their tags, in the
//! order of memory. It reads names only of entries outside their home, and of the few that have moved so often that
//! hardly a bit of their tag is left. On the way to any size, that is about one name for every fourteen entries.
//!
//! Segments are out of step by design: the map spreads hashes twice as densely over the first segment as over the last.
//! So each segment changes size at another number of entries of the map, and the map is always as full as segments are on
//! average. The buckets of a segment are one row, a power of two of them, from a pool of huge pages (`row_pool`).
//!
//! The hash is keyed: without the secret, a client that chooses names cannot aim at one bucket. Many words with the same
//! name do fill one bucket after another, and a search for that name may read all of these.

#![cfg_attr(
    all(target_arch = "x86_64", not(miri)),
    expect(unsafe_code, reason = "a function with vectors that not every processor has")
)]

mod bucket;
mod home;
mod segment;
#[cfg(test)]
mod tests;

#[cfg(all(target_arch = "x86_64", not(miri)))]
use self::bucket::Wide;
use self::bucket::{CompareTags, Narrow};
use self::home::{Home, SEGMENTS, Spot};
use self::segment::Segment;
use super::row_pool::Rows;
use super::types::spread;
#[cfg(all(target_arch = "x86_64", not(miri)))]
use crate::simd::SimdLevel;

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
        Spot::new(skewed(hash))
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
    segments: Box<[Segment; SEGMENTS]>,
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
        let segments: Box<[Segment; SEGMENTS]> = Box::new(std::array::from_fn(|_| Segment::new(&rows)));
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
    fn segment(&self, spot: Spot) -> &Segment {
        &self.segments[usize::from(spot.segment())]
    }

    #[inline]
    pub(super) fn spot(&self, name: u64) -> Spot {
        self.mixer.spot(name)
    }

    /// Prefetches the line at which a search begins.
    #[inline]
    pub(super) fn prefetch(&self, spot: Spot) {
        let segment = self.segment(spot);
        segment.prefetch(segment.home(spot));
    }

    /// The first candidate for which `is_it` returns `true`.
    #[inline]
    pub(super) fn find(&self, spot: Spot, is_it: impl FnMut(u32) -> bool) -> Option<u32> {
        let segment = self.segment(spot);
        segment.find(segment.home(spot), is_it).map(|place| segment.word(place))
    }

    /// A word that may have a name: the first entry with its tag. For hints only; the name may be elsewhere, or
    /// unknown.
    #[inline]
    pub(super) fn likely(&self, spot: Spot) -> Option<u32> {
        self.find(spot, |_| true)
    }

    /// Adds a word, even if others have the same name.
    pub(super) fn put(&mut self, name: u64, word: u32, name_of: impl Fn(u32) -> u64) {
        let (at, mut home) = self.aim(name).parts();
        if self.segments[at].is_full() {
            home = self.double(at, name, &name_of);
        }
        self.segments[at].put::<Narrow>(home, word);
        self.entries += 1;
    }

    /// Adds consecutive words, of which `base` is the first. Ends at the first name that another word has: returns how
    /// many words before it were added.
    pub(super) fn put_new(&mut self, names: &[u64], base: u32, name_of: impl Fn(u32) -> u64) -> Result<(), usize> {
        if let [name] = names {
            return if self.put_one_new(*name, base, name_of) { Ok(()) } else { Err(0) };
        }
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if SimdLevel::here() >= SimdLevel::Avx512Ifma {
            // SAFETY: this level has AVX-512BW.
            return unsafe { self.put_new_wide(names, base, name_of) };
        }
        self.put_new_by::<Narrow>(names, base, name_of)
    }

    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn put_new_wide(&mut self, names: &[u64], base: u32, name_of: impl Fn(u32) -> u64) -> Result<(), usize> {
        self.put_new_by::<Wide>(names, base, name_of)
    }

    #[inline(always)]
    fn put_new_by<C: CompareTags>(
        &mut self,
        names: &[u64],
        base: u32,
        name_of: impl Fn(u32) -> u64,
    ) -> Result<(), usize> {
        let mut ahead = AimsAhead::new(self, names);
        for (at, name) in names.iter().enumerate() {
            let aim = ahead.next(self, names, at);
            let mut home = aim.home;
            if self.segments[aim.segment()].is_full() {
                home = self.double(aim.segment(), *name, &name_of);
                ahead.renew(self, names, at + 1);
            }
            let segment = &mut self.segments[aim.segment()];
            if segment.put_unless::<C>(home, base + at as u32, |other| name_of(other) == *name).is_err() {
                self.entries += at;
                return Err(at);
            }
        }
        self.entries += names.len();
        Ok(())
    }

    /// As [`put_new`](Self::put_new), for a block that an engine has just generated: there are no names behind it to compute
    /// ahead. Returns whether it added the word.
    fn put_one_new(&mut self, name: u64, word: u32, name_of: impl Fn(u32) -> u64) -> bool {
        let Aim { segment, mut home } = self.aim(name);
        let segment = usize::from(segment);
        if self.segments[segment].is_full() {
            home = self.double(segment, name, &name_of);
        }
        let is_put = self.segments[segment].put_unless::<Narrow>(home, word, |other| name_of(other) == name).is_ok();
        self.entries += usize::from(is_put);
        is_put
    }

    /// Removes consecutive words, of which `base` is the first; returns how many of them were there. Segments are shrunk
    /// only by [`shrink`](Self::shrink), because names may not be readable in the middle of a removal.
    pub(super) fn take(&mut self, names: &[u64], base: u32) -> usize {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if SimdLevel::here() >= SimdLevel::Avx512Ifma {
            // SAFETY: this level has AVX-512BW.
            return unsafe { self.take_wide(names, base) };
        }
        self.take_by::<Narrow>(names, base)
    }

    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn take_wide(&mut self, names: &[u64], base: u32) -> usize {
        self.take_by::<Wide>(names, base)
    }

    #[inline(always)]
    fn take_by<C: CompareTags>(&mut self, names: &[u64], base: u32) -> usize {
        let mut ahead = AimsAhead::new(self, names);
        let mut taken = 0;
        for at in 0..names.len() {
            let (segment, home) = ahead.next(self, names, at).parts();
            taken += usize::from(self.segments[segment].take::<C>(home, base + at as u32));
            if self.segments[segment].is_underfull() {
                self.underfull[segment / 64] |= 1 << (segment % 64);
            }
        }
        self.entries -= taken;
        taken
    }

    /// Replaces consecutive words by others with the same names; returns how many of them were there.
    pub(super) fn replace(&mut self, names: &[u64], from: u32, to: u32) -> usize {
        let mut ahead = AimsAhead::new(self, names);
        let replaced = (0..names.len()).filter(|at| {
            let (segment, home) = ahead.next(self, names, *at).parts();
            self.segments[segment].replace(home, from + *at as u32, to + *at as u32)
        });
        replaced.count()
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
                    segment.halve(&self.rows, |word| mixer.spot(name_of(word)));
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

    /// Doubles a segment that is full; returns where a name belongs in it now.
    #[cold]
    fn double(&mut self, segment: usize, name: u64, name_of: impl Fn(u32) -> u64) -> Home {
        let mixer = self.mixer;
        let segment = &mut self.segments[segment];
        self.buckets_bytes -= segment.bytes();
        segment.double(&self.rows, |word| mixer.spot(name_of(word)));
        self.buckets_bytes += segment.bytes();
        segment.home(mixer.spot(name))
    }

    /// Where a name belongs.
    #[inline]
    fn aim(&self, name: u64) -> Aim {
        let spot = self.spot(name);
        Aim { segment: spot.segment(), home: self.segment(spot).home(spot) }
    }
}

impl Drop for NameMap {
    fn drop(&mut self) {
        for segment in &mut *self.segments {
            segment.give_back(&self.rows);
        }
    }
}

/// Where a name belongs, until the segment changes its size.
#[derive(Clone, Copy, Default)]
struct Aim {
    segment: u8,
    home: Home,
}

impl Aim {
    #[inline]
    fn segment(self) -> usize {
        usize::from(self.segment)
    }

    #[inline]
    fn parts(self) -> (usize, Home) {
        (self.segment(), self.home)
    }
}

/// How many names ahead are prefetched.
pub(super) const AHEAD: usize = 16;

/// Where consecutive names belong. Each is computed some names before it is needed, so that its line is on its way.
struct AimsAhead {
    /// Those of the next names, each at its number modulo [`AHEAD`].
    aims: [Aim; AHEAD],
}

impl AimsAhead {
    /// For the first of `names`.
    #[inline]
    fn new(map: &NameMap, names: &[u64]) -> Self {
        let mut ahead = Self { aims: [Aim::default(); AHEAD] };
        for (at, name) in names.iter().enumerate().take(AHEAD) {
            ahead.compute(map, *name, at);
        }
        ahead
    }

    /// Computes the aims again from name `at` on, after a segment has changed its size.
    #[cold]
    fn renew(&mut self, map: &NameMap, names: &[u64], at: usize) {
        for (at, name) in names.iter().enumerate().skip(at).take(AHEAD) {
            self.compute(map, *name, at);
        }
    }

    #[inline]
    fn compute(&mut self, map: &NameMap, name: u64, at: usize) {
        let aim = map.aim(name);
        map.segments[aim.segment()].prefetch(aim.home);
        self.aims[at % AHEAD] = aim;
    }

    /// That of name `at`. Called for one name after the other.
    #[inline]
    fn next(&mut self, map: &NameMap, names: &[u64], at: usize) -> Aim {
        let aim = self.aims[at % AHEAD];
        if let Some(name) = names.get(at + AHEAD) {
            self.compute(map, *name, at + AHEAD);
        }
        aim
    }
}
