use super::{Allocation, Arena, CHUNK_WORDS, EXTENT_WORDS_MAX, FINGERPRINTS_FIRST, GRANULE_WORDS, granules};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// What a test knows of an extent it holds.
#[derive(Clone, Copy, Debug)]
struct Held {
    base: u32,
    words: u32,
    stamp: u32,
}

impl Held {
    /// What each word of the extent should be; no two words of a test are equal.
    fn pattern(self) -> impl Iterator<Item = u64> {
        (0..self.words).map(move |at| u64::from(self.stamp) << 32 | u64::from(self.base + at))
    }

    fn fill(self, arena: &mut Arena) {
        arena.write(self.base, &self.pattern().collect::<Vec<_>>());
        arena.set_owner(self.base, self.words, self.stamp);
    }

    #[track_caller]
    fn check(self, arena: &Arena) {
        assert!(arena.words(self.base, self.words).iter().copied().eq(self.pattern()), "{self:?} was written over");
        for word in (self.base..).take(self.words as usize) {
            assert_eq!(arena.owner(word), self.stamp);
        }
    }
}

/// Words of the chunks that have not given their memory back.
fn present_words(arena: &Arena) -> u64 {
    (arena.chunk_records.len() - arena.released.len()) as u64 * u64::from(FINGERPRINTS_FIRST)
}

#[test]
fn unused_chunks_give_their_memory_back_and_are_used_again() {
    let mut arena = Arena::new(1);
    let view = arena.view();
    let extents = 6 * FINGERPRINTS_FIRST / EXTENT_WORDS_MAX;
    let fill = |arena: &mut Arena| -> Vec<Allocation> {
        let all: Vec<Allocation> = (0..extents).map(|_| arena.allocate(EXTENT_WORDS_MAX).expect("memory")).collect();
        for (at, extent) in all.iter().enumerate() {
            arena.write(extent.base, &[at as u64; EXTENT_WORDS_MAX as usize]);
            arena.set_owner(extent.base, extent.words, at as u32 + 1);
        }
        all
    };
    let mut most = 0;
    for _ in 0..3 {
        let all = fill(&mut arena);
        most = arena.bytes();
        assert!(all.iter().enumerate().all(|(at, extent)| arena.owner(extent.base) == at as u32 + 1));
        assert!(all.iter().enumerate().all(|(at, extent)| arena.word(extent.base + 7) == at as u64));
        all.iter().for_each(|extent| arena.free(extent.base, extent.words));
        // One that is kept, and the newest, of which no granule is in use.
        assert_eq!(arena.chunk_records.len() - arena.released.len(), 2);
        // SAFETY: this thread is the writer and writes nothing while it looks.
        let stale = unsafe { view.words(3 * CHUNK_WORDS, 8) };
        assert_eq!(stale, [0; 8], "a stale index leads to memory");
    }
    assert!(arena.bytes() + 8 * 4 * u64::from(CHUNK_WORDS) <= most, "{} of {most}", arena.bytes());
    assert_eq!(arena.chunk_records.len(), 6, "numbers are used again");
}

/// Panics unless all free granules make whole chunks again.
#[track_caller]
fn assert_whole(arena: &mut Arena) {
    let chunks = arena.chunk_records.len() as u32;
    assert_eq!(arena.free_words(), present_words(arena));
    let mut bases: Vec<u32> = (0..chunks * (FINGERPRINTS_FIRST / EXTENT_WORDS_MAX))
        .map(|_| arena.allocate(EXTENT_WORDS_MAX).expect("there is room").base)
        .collect();
    assert_eq!((arena.free_words(), arena.chunk_records.len() as u32), (0, chunks));
    bases.sort_unstable();
    let of_chunk = |chunk| (chunk..chunk + FINGERPRINTS_FIRST).step_by(EXTENT_WORDS_MAX as usize);
    assert!(bases.iter().copied().eq((0..chunks).flat_map(|chunk| of_chunk(chunk * CHUNK_WORDS))));
    bases.iter().for_each(|base| arena.free(*base, EXTENT_WORDS_MAX));
    assert_eq!(arena.free_words(), present_words(arena));
}

/// Frees all of an extent or some of its granules; the rest is one or two extents.
fn free_some(arena: &mut Arena, rng: &mut StdRng, held: Held, left: &mut Vec<Held>) {
    let count = granules(held.words);
    let from = if rng.random_bool(0.5) { 0 } else { rng.random_range(0..count) };
    let to = if rng.random_bool(0.5) { count } else { rng.random_range(from..count) + 1 };
    let (from, to) = (from * GRANULE_WORDS, to * GRANULE_WORDS);
    arena.free(held.base + from, to - from);
    assert!((from..to).step_by(8).all(|word| arena.owner(held.base + word) == 0));
    if from > 0 {
        left.push(Held { words: from, ..held });
    }
    if to < held.words {
        left.push(Held { base: held.base + to, words: held.words - to, ..held });
    }
}

fn random_run(seed: u64, steps: u32, words_max: u32, held_max: usize) {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut arena = Arena::new(1);
    let view = arena.view();
    let mut held: Vec<Held> = Vec::new();
    for stamp in 1..=steps {
        let grow = held.len() < held_max && rng.random_bool(0.6);
        if held.is_empty() || grow {
            let words = rng.random_range(0..=words_max);
            let Allocation { base, words: got } = arena.allocate(words).expect("there is room");
            assert!(got >= words.max(1) && got < words.max(1) + GRANULE_WORDS && base % GRANULE_WORDS == 0);
            assert!(base % CHUNK_WORDS + got <= CHUNK_WORDS && (base..base + got).all(|word| arena.owner(word) == 0));
            let new = Held { base, words: got, stamp };
            new.fill(&mut arena);
            held.push(new);
            continue;
        }
        let at = rng.random_range(0..held.len());
        let mut one = held.swap_remove(at);
        one.check(&arena);
        if rng.random_bool(0.3) {
            let wanted = one.words + rng.random_range(1..=64);
            if arena.extend(one.base, one.words, wanted) {
                one.words = granules(wanted) * GRANULE_WORDS;
                assert!(one.words <= EXTENT_WORDS_MAX);
                one.fill(&mut arena);
            }
            held.push(one);
        } else {
            free_some(&mut arena, &mut rng, one, &mut held);
        }
        // SAFETY: this thread is the writer and writes nothing while it looks.
        let seen = held.last().map(|held| (held, unsafe { view.words(held.base, held.words) }));
        assert!(seen.is_none_or(|(held, words)| words.iter().copied().eq(held.pattern())));
    }
    let in_use: u64 = held.iter().map(|held| u64::from(held.words)).sum();
    assert_eq!(arena.free_words() + in_use, present_words(&arena));
    for one in held {
        one.check(&arena);
        arena.free(one.base, one.words);
    }
    assert_whole(&mut arena);
}

#[test]
fn random_extents_never_overlap_and_all_come_back() {
    for seed in 0..8 {
        random_run(seed, 6_000, 200, 300);
    }
    random_run(100, 6_000, EXTENT_WORDS_MAX, 2_000);
    random_run(101, 6_000, 24, 4_000);
}

#[test]
fn an_extent_grows_only_into_free_granules() {
    let mut arena = Arena::new(1);
    let first = arena.allocate(8).expect("there is room");
    assert!(arena.extend(first.base, 8, 6), "shorter is there already");
    assert!(arena.extend(first.base, 8, 17), "the rest of the chunk is fresh");
    let second = arena.allocate(8).expect("there is room");
    assert_eq!(second.base, first.base + 24);
    assert!(!arena.extend(first.base, 24, 32));
    let third = arena.allocate(8).expect("there is room");
    arena.free(second.base, 8);
    assert!(!arena.extend(first.base, 24, 40), "the run is one granule");
    assert!(arena.extend(first.base, 24, 32));
    assert!(!arena.extend(third.base, 8, EXTENT_WORDS_MAX + 1));
    assert!(arena.extend(third.base, 8, EXTENT_WORDS_MAX));
}

#[test]
fn an_extent_stays_in_its_chunk() {
    let mut arena = Arena::new(1);
    let mut bases = Vec::new();
    // 1016 words do not divide a chunk.
    for _ in 0..FINGERPRINTS_FIRST / 1016 {
        bases.push(arena.allocate(1016).expect("there is room").base);
    }
    assert_eq!(arena.chunk_records.len(), 1);
    let (rest, rest_at) = (FINGERPRINTS_FIRST % 1016, FINGERPRINTS_FIRST - FINGERPRINTS_FIRST % 1016);
    let next = arena.allocate(1016).expect("there is room");
    assert_eq!(next.base, CHUNK_WORDS);
    assert_eq!(arena.allocate(rest).expect("there is room").base, rest_at, "the rest was kept");
    assert!(!arena.extend(rest_at, rest, rest + 8), "fingerprints follow, and another chunk");
    arena.free(rest_at, rest);
    bases.iter().for_each(|base| arena.free(*base, 1016));
    arena.free(next.base, next.words);
    assert_whole(&mut arena);
}

#[test]
fn too_much_is_refused() {
    let mut arena = Arena::new(1);
    assert_eq!(arena.allocate(EXTENT_WORDS_MAX + 1), None);
    assert_eq!((arena.chunk_records.len(), arena.free_words()), (0, 0));
    let empty = arena.bytes();
    arena.allocate(1).expect("there is room");
    assert!(arena.bytes() - empty > u64::from(CHUNK_WORDS) * 8);
}

#[test]
fn words_outside_the_arena_are_no_words() {
    let mut arena = Arena::new(1);
    let view = arena.view();
    // SAFETY: the arena has no words that could change.
    assert!(unsafe { view.words(0, 8) }.is_empty());
    assert!(arena.words(77, 0).is_empty() && arena.owner(u32::MAX) == 0);
    let extent = arena.allocate(8).expect("there is room");
    arena.write(extent.base, &[]);
    arena.copy(0, 0, 0);
    // SAFETY: this thread is the writer and writes nothing while it looks.
    let (crossing, other) = unsafe { (view.words(CHUNK_WORDS - 4, 8), view.words(CHUNK_WORDS, 8)) };
    assert!(crossing.is_empty() && other.is_empty());
    // SAFETY: as above.
    assert_eq!(unsafe { view.words(extent.base, 8) }, [0; 8], "fresh words are zero");
    drop(arena);
    // SAFETY: the writer is gone.
    assert_eq!(unsafe { view.words(extent.base, 8) }, [0; 8], "the memory outlives the arena");
}

#[test]
#[should_panic(expected = "not of the arena")]
fn words_never_handed_out_are_a_bug() {
    let mut arena = Arena::new(1);
    arena.allocate(8).expect("there is room");
    arena.set(8, 1);
}

#[test]
fn words_are_set_and_moved() {
    let mut arena = Arena::new(1);
    let extent = arena.allocate(32).expect("there is room");
    arena.write(extent.base + 1, &[1, 2, 3]);
    arena.set(extent.base + 2, 9);
    arena.copy(extent.base + 1, extent.base + 2, 3);
    assert_eq!(arena.words(extent.base, 6), [0, 1, 1, 9, 3, 0]);
    assert_eq!(arena.word(extent.base + 3), 9);
    arena.set_owner(extent.base + 9, 8, 5);
    let owners: Vec<u32> = (0..4).map(|granule| arena.owner(extent.base + granule * 8)).collect();
    assert_eq!(owners, [0, 5, 5, 0], "every granule that is touched");
}

#[test]
fn a_reader_sees_the_words_of_an_index_that_it_got() {
    use std::sync::mpsc;
    let mut arena = Arena::new(1);
    let view = arena.view();
    let (send, received) = mpsc::channel::<Held>();
    let reader = std::thread::spawn(move || {
        let mut seen = 0_u64;
        for held in received {
            // SAFETY: the channel orders the write before this, and nothing is written again or freed.
            assert!(unsafe { view.words(held.base, held.words) }.iter().copied().eq(held.pattern()));
            seen += u64::from(held.words);
        }
        seen
    });
    let mut rng = StdRng::seed_from_u64(3);
    let mut sent = 0;
    for stamp in 0..2_000 {
        let Allocation { base, words } = arena.allocate(rng.random_range(1..=EXTENT_WORDS_MAX)).expect("there is room");
        let held = Held { base, words, stamp };
        held.fill(&mut arena);
        sent += u64::from(words);
        send.send(held).expect("the reader is there");
    }
    drop(send);
    assert_eq!(reader.join().expect("the reader found all as it should be"), sent);
}

#[test]
#[ignore = "takes times; run with --release --nocapture"]
fn quick_timing() {
    let mut arena = Arena::new(1);
    let mut rng = StdRng::seed_from_u64(1);
    let rounds = 2_000_000_u32;
    let started = std::time::Instant::now();
    for _ in 0..rounds {
        let extent = arena.allocate(64).expect("there is room");
        arena.free(std::hint::black_box(extent.base), 64);
    }
    println!("the same 64 words: {:.1} ns a pair", started.elapsed().as_nanos() as f64 / f64::from(rounds));
    for (words_max, held) in [(64, 1_000_usize), (64, 20_000), (1024, 2_000), (1024, 20_000)] {
        let mut sizes = || if words_max == 64 { 64 } else { 8 * rng.random_range(1..=words_max / 8) };
        let mut extents: Vec<Allocation> = (0..held).map(|_| arena.allocate(sizes()).expect("there is room")).collect();
        let plan: Vec<(usize, u32)> = (0..1 << 16).map(|at| (at * 7919 % held, sizes())).collect();
        let started = std::time::Instant::now();
        for at in 0..rounds as usize {
            let (victim, words) = plan[at % plan.len()];
            arena.free(extents[victim].base, extents[victim].words);
            extents[victim] = arena.allocate(words).expect("there is room");
        }
        let nanos = started.elapsed().as_nanos() as f64 / f64::from(rounds);
        println!("{held} extents of up to {words_max} words: {nanos:.1} ns a pair, {} B", arena.bytes());
        extents.iter().for_each(|extent| arena.free(extent.base, extent.words));
    }
}
