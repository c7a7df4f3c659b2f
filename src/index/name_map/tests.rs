use super::home::Tag;
use super::*;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::cell::Cell;
use std::collections::{BTreeSet, HashMap};

/// The map beside a model of it.
struct Pair {
    map: NameMap,
    words: HashMap<u64, BTreeSet<u32>>,
    /// The name at each word, whether or not the map has the word.
    names: Vec<u64>,
    /// (name, word) of every entry, to pick from.
    entries: Vec<(u64, u32)>,
}

impl Pair {
    fn new(secret: u64, keep: u64) -> Self {
        let mut map = NameMap::new(secret, Rows::new());
        map.mixer.keep = keep;
        Self { map, words: HashMap::new(), names: Vec::new(), entries: Vec::new() }
    }

    fn spot(&self, name: u64) -> Spot {
        let spot = self.map.spot(name);
        self.map.prefetch(spot);
        spot
    }

    fn new_word(&mut self, name: u64) -> u32 {
        self.names.push(name);
        self.names.len() as u32 - 1
    }

    fn put(&mut self, name: u64) {
        let word = self.new_word(name);
        let names = &self.names;
        self.map.put(name, word, |word| names[word as usize]);
        self.added(name, word);
    }

    /// Puts consecutive words, up to the first name that is known.
    fn put_new(&mut self, run: &[u64]) {
        let base = self.names.len() as u32;
        self.names.extend(run);
        let names = &self.names;
        let outcome = self.map.put_new(run, base, |word| names[word as usize]);
        let mut done = 0;
        for (name, word) in run.iter().zip(base..) {
            if self.words.get(name).is_some_and(|known| !known.is_empty()) {
                break;
            }
            self.added(*name, word);
            done += 1;
        }
        assert_eq!(outcome, if done == run.len() { Ok(()) } else { Err(done) });
    }

    fn added(&mut self, name: u64, word: u32) {
        self.words.entry(name).or_default().insert(word);
        self.entries.push((name, word));
    }

    fn take(&mut self, at: usize) {
        let (name, word) = self.entries.swap_remove(at);
        assert_eq!(self.map.take(&[name], word), 1, "{name} at {word} is not there");
        assert_eq!(self.map.take(&[name], word), 0, "{name} at {word} is there twice");
        self.words.entry(name).or_default().remove(&word);
    }

    fn replace(&mut self, at: usize) {
        let (name, from) = self.entries[at];
        let to = self.new_word(name);
        assert_eq!((self.map.replace(&[name], from, to), self.map.replace(&[name], from, to)), (1, 0));
        let words = self.words.entry(name).or_default();
        words.remove(&from);
        words.insert(to);
        self.entries[at].1 = to;
    }

    fn shrink(&mut self, segments_max: usize) -> bool {
        let names = &self.names;
        self.map.shrink(segments_max, |word| names[word as usize])
    }

    /// Every word of a name is found, and no other.
    fn check(&self, name: u64) {
        let mut found = BTreeSet::new();
        let first = self.map.find(self.spot(name), |word| {
            // No removed or replaced word is a candidate, whatever its name.
            assert!(self.words[&self.names[word as usize]].contains(&word));
            if self.names[word as usize] == name {
                assert!(found.insert(word), "{word} is there twice");
            }
            false
        });
        assert_eq!(first, None);
        assert_eq!(found, self.words.get(&name).cloned().unwrap_or_default());
        let any = self.map.find(self.spot(name), |word| self.names[word as usize] == name);
        assert_eq!(any.is_some(), !found.is_empty());
    }
}

fn random_run(seed: u64, keep: u64, names_max: u64, entries_max: usize) {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut pair = Pair::new(seed, keep);
    let mut filling = true;
    for _ in 0..12_000 {
        // It fills and empties in turn, so that segments grow and shrink.
        filling = if filling { pair.entries.len() < entries_max } else { pair.entries.len() < entries_max / 8 };
        let name = rng.random_range(0..names_max);
        match rng.random_range(0..100) {
            0..10 => pair.check(name),
            10..20 if !pair.entries.is_empty() => pair.replace(rng.random_range(0..pair.entries.len())),
            20..22 => drop(pair.shrink(rng.random_range(0..4))),
            22..30 => {
                let run = rng.random_range(1..3 * AHEAD as u64);
                let names: Vec<u64> = (0..run).map(|at| (name + at * at) % names_max).collect();
                pair.put_new(&names[..if filling { names.len() } else { 1 }]);
            }
            _ if filling => pair.put(name),
            _ if !pair.entries.is_empty() => pair.take(rng.random_range(0..pair.entries.len())),
            _ => {}
        }
        assert_eq!(pair.map.len(), pair.entries.len());
    }
    (0..names_max.min(2_000)).for_each(|name| pair.check(name));
    let empty = NameMap::new(0, Rows::new()).bytes();
    while !pair.entries.is_empty() {
        pair.take(pair.entries.len() - 1);
    }
    while pair.shrink(3) {}
    assert_eq!((pair.map.len(), pair.map.bytes()), (0, empty));
}

#[test]
fn random_names_and_words() {
    random_run(1, u64::MAX, 1 << 40, 6_000);
    random_run(2, u64::MAX, 3_000, 6_000);
    random_run(3, u64::MAX, 20, 800);
}

#[test]
fn names_that_collide() {
    // One segment, and at most 256 homes and tags; then one home for all, and tags alike; then segment,
    // home and tag are equal for all.
    random_run(4, 0x00ff_0000_0000_0000, 1_000, 2_000);
    random_run(5, 0xff00_0000_0000_ffff, 1_000, 2_000);
    random_run(6, 0x0180_0000_0000_0000, 50, 300);
    random_run(7, 0, 50, 200);
}

#[test]
fn the_last_bucket_is_followed_by_the_first() {
    // All homes are the last bucket of their segment.
    let mut pair = Pair::new(9, u64::MAX);
    let last = |pair: &Pair, name: u64| pair.map.spot(name).home(1 << 8).bucket() >= 0xf0;
    let names: Vec<u64> = (0..200_000).filter(|name| last(&pair, *name)).collect();
    names.iter().for_each(|name| pair.put(*name));
    names.iter().for_each(|name| pair.check(*name));
    while !pair.entries.is_empty() {
        pair.take(0);
    }
    assert!(names.iter().all(|name| pair.map.find(pair.spot(*name), |_| true).is_none()));
}

#[test]
fn spots_are_spread_and_secret() {
    let (mixer, other) = (Mixer::new(0), Mixer::new(1));
    let mut segments = [0_u32; SEGMENTS];
    let mut tags = BTreeSet::new();
    for name in 0..65_536 {
        let spot = mixer.spot(name);
        segments[usize::from(spot.segment())] += 1;
        let home = spot.home(8);
        tags.insert((home.bucket(), home.tag().bits()));
        assert!(home.bucket() < 8 && spot != other.spot(name));
    }
    // A segment has the names between two hashes: 384 are expected in the first one and 192 in the last, give or take
    // the root of as many. Of 8 homes with 16384 tags each, a part of 1 - 1/e to the power of 1/2 is expected.
    let below = |segment: usize| 65_536.0 * ((1.0 + 3.0 * segment as f64 / SEGMENTS as f64).sqrt() - 1.0);
    for (at, count) in segments.iter().enumerate() {
        let expected = below(at + 1) - below(at);
        assert!((f64::from(*count) - expected).abs() < 6.0 * expected.sqrt(), "{at}: {count} for {expected}");
    }
    assert!((50_000..53_200).contains(&tags.len()), "{}", tags.len());
}

/// Names as engines make them: hashes, in the order of their words.
fn names(count: u32) -> Vec<u64> {
    (0..u64::from(count)).map(super::spread).collect()
}

#[test]
fn memory_follows_the_entries() {
    let names = names(60_000);
    let mut map = NameMap::new(5, Rows::new());
    let name_of = |word: u32| names[word as usize];
    for (word, name) in (0..).zip(&names) {
        map.put(*name, word, name_of);
        let entries = u64::from(word) + 1;
        assert!(entries < 20_000 || map.bytes() < entries * 12, "{} bytes for {entries}", map.bytes());
    }
    for (word, name) in (0..).zip(&names).take(50_000) {
        assert_eq!(map.take(&[*name], word), 1);
    }
    assert!(map.shrink(1, name_of), "256 segments are too large by now");
    while map.shrink(16, name_of) {}
    assert!(map.bytes() < 10_000 * 15, "{}", map.bytes());
    let there = |word: u32, name: u64| map.find(map.spot(name), |found| found == word) == Some(word);
    assert!((50_000..).zip(&names[50_000..]).all(|(word, name)| there(word, *name)));
}

/// Fills and empties it in waves, each time to another size.
fn waves(seed: u64, keep: u64, sizes: &[usize]) {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut pair = Pair::new(seed, keep);
    for (wave, size) in sizes.iter().enumerate() {
        while pair.entries.len() < *size {
            pair.put(rng.random_range(0..1 << 40));
        }
        while pair.entries.len() > *size {
            pair.take(rng.random_range(0..pair.entries.len()));
            if rng.random_range(0..64) == 0 {
                pair.shrink(1);
            }
        }
        while pair.shrink(1) {}
        let names: Vec<u64> = pair.words.keys().copied().collect();
        names.iter().for_each(|name| pair.check(*name));
        assert!(
            (0..500).all(|name| pair.map.find(pair.spot(name), |word| pair.names[word as usize] == name).is_none())
        );
        assert_eq!(pair.map.len(), *size, "after wave {wave}");
    }
}

#[test]
fn doublings_and_halvings() {
    // Two segments, so that each doubles more often than a tag has bits to spare.
    waves(11, 0x01ff_ffff_ffff_ffff, &[9_000, 200, 30_000, 20_000, 3_000, 5, 12_000, 0, 700]);
    // Then with so few bits that tags are much alike.
    waves(12, 0x01ff_ff00_0000_0000, &[9_000, 200, 14_000, 6, 4_000, 0]);
    waves(13, u64::MAX, &[20_000, 9_000, 300, 4_000, 0]);
}

#[test]
fn few_names_are_read_to_grow_and_to_shrink() {
    let names = names(120_000);
    let read = Cell::new(0_usize);
    let name_of = |word: u32| {
        read.set(read.get() + 1);
        names[word as usize]
    };
    let mut map = NameMap::new(6, Rows::new());
    for (word, name) in (0..).zip(&names) {
        map.put(*name, word, name_of);
    }
    assert!(read.get() > 0 && read.get() < names.len() / 10, "{} to grow", read.get());
    read.set(0);
    for (word, name) in (0..).zip(&names).skip(1_000) {
        assert_eq!(map.take(&[*name], word), 1);
        map.shrink(1, name_of);
    }
    assert!(read.get() < names.len() / 8, "{} to shrink", read.get());
}

#[test]
#[ignore = "takes times; run with --release --nocapture"]
fn quick_timing() {
    const ENTRIES: usize = 1_280_000;
    const RUN: usize = 512;
    let names = names(2 * ENTRIES as u32);
    let name_of = |word: u32| names[word as usize];
    let mut map = NameMap::new(7, Rows::new());
    let started = std::time::Instant::now();
    for at in (0..ENTRIES).step_by(RUN) {
        assert_eq!(map.put_new(&names[at..at + RUN], at as u32, name_of), Ok(()));
    }
    let nanos = |started: std::time::Instant| started.elapsed().as_nanos() as f64 / ENTRIES as f64;
    println!("filling: {:.1} ns each, {:.2} B each", nanos(started), map.bytes() as f64 / ENTRIES as f64);
    let started = std::time::Instant::now();
    for at in (0..ENTRIES).step_by(RUN) {
        assert_eq!(map.take(&names[at..at + RUN], at as u32), RUN);
        let at = at + ENTRIES;
        assert_eq!(map.put_new(&names[at..at + RUN], at as u32, name_of), Ok(()));
    }
    println!("take and put: {:.1} ns a pair, {} entries", nanos(started), map.len());
    let started = std::time::Instant::now();
    let missed =
        names[..ENTRIES].iter().filter(|name| map.find(map.spot(**name), |other| name_of(other) == **name).is_none());
    println!("{} missed: {:.1} ns each", missed.count(), nanos(started));
}

#[test]
fn a_moved_entry_is_where_it_would_have_been_put() {
    let mut rng = StdRng::seed_from_u64(1);
    for _ in 0..20_000 {
        let fraction = rng.random();
        let (from, to) = (rng.random_range(0..20), rng.random_range(0..20));
        let [before, after] = [from, to].map(|doublings| Home::new(fraction, 1 << doublings));
        let moved = if to < from { Some(before.halved(from - to)) } else { doubled(before, to - from) };
        let Some(moved) = moved else {
            assert!(to - from > Tag::BITS - Tag::BITS_MIN);
            continue;
        };
        assert_eq!(moved.bucket(), after.bucket());
        let known = Tag::BITS - u32::saturating_sub(to, from);
        assert_eq!(moved.tag().known(), known);
        assert_eq!(moved.tag().bits() >> (u16::BITS - known), after.tag().bits() >> (u16::BITS - known));
        // And back: the tag has again the bits that it gave to the home; bits that were lost stay lost.
        if from <= to {
            assert_eq!(moved.halved(to - from), before);
        } else if let Some(back) = doubled(moved, from - to) {
            assert_eq!((back.bucket(), back.tag().known()), (before.bucket(), Tag::BITS + to - from));
        } else {
            assert!(from - to > Tag::BITS - Tag::BITS_MIN);
        }
    }
}

/// The home after some doublings, if enough of the tag is left at each.
fn doubled(home: Home, times: u32) -> Option<Home> {
    (0..times).try_fold(home, |home, _| home.doubled())
}

#[test]
fn homes_are_within_the_segment() {
    for (fraction, buckets) in [(0, 1), (u64::MAX, 1), (u64::MAX, 1 << 20)] {
        let home = Home::new(fraction, buckets);
        assert!(home.bucket() < buckets && home.tag().known() == Tag::BITS);
    }
}
