//! Rings and sleep under every order of accesses that the memory model allows.
//!
//! `RUSTFLAGS="--cfg kvrouted_loom" cargo test --lib --release lane::loom`
//!
//! The models run the real ring and the real protocol on the model checker's words. Each also asserts that its subject
//! occurs: a model in which no side ever sleeps would prove nothing. The mutants are the protocol without a fence,
//! which must be caught.

use std::sync::atomic::AtomicU64 as Counter;

use ::loom::sync::Arc;
use ::loom::sync::atomic::{AtomicU64, Ordering, fence};
use ::loom::thread;

use super::{Awaited, Consumer, Producer, Ring, Word};

impl Word for AtomicU64 {
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }

    fn store(&self, value: u64, order: Ordering) {
        self.store(value, order);
    }

    fn swap(&self, value: u64, order: Ordering) -> u64 {
        self.swap(value, order)
    }

    fn set(&self, bits: u64, order: Ordering) {
        self.fetch_or(bits, order);
    }

    fn clear(&self, bits: u64, order: Ordering) {
        self.fetch_and(!bits, order);
    }

    fn fence() {
        fence(Ordering::SeqCst);
    }
}

struct World {
    tail: AtomicU64,
    head: AtomicU64,
    words: [AtomicU64; 2],
    waits: AtomicU64,
}

impl World {
    fn new() -> Arc<Self> {
        let [tail, head, waits] = std::array::from_fn(|_| AtomicU64::new(0));
        Arc::new(Self { tail, head, words: std::array::from_fn(|_| AtomicU64::new(0)), waits })
    }

    fn ring(&self) -> Ring<'_, AtomicU64> {
        Ring { tail: &self.tail, head: &self.head, words: &self.words }
    }
}

/// Whether a reader that goes to sleep beside a writer would sleep although there are words and no ring comes.
/// `announce` and `is_to_ring` are the protocol or a mutant of it.
fn sleep_beside_a_writer(announce: fn(&World), is_to_ring: fn(&World) -> bool) -> (usize, usize) {
    let (slept, lost) = (std::sync::Arc::new(Counter::new(0)), std::sync::Arc::new(Counter::new(0)));
    let (slept_in, lost_in) = (std::sync::Arc::clone(&slept), std::sync::Arc::clone(&lost));
    ::loom::model(move || {
        let world = World::new();
        let reader = Arc::clone(&world);
        let reading = thread::spawn(move || {
            let mut consumer = Consumer::default();
            announce(&reader);
            consumer.ready(&reader.ring()) == Ok(0)
        });
        let mut producer = Producer::default();
        assert_eq!(producer.push(&world.ring(), &[5; 8]), Ok(8));
        let rings = is_to_ring(&world);
        let sleeps = reading.join().unwrap();
        slept_in.fetch_add(u64::from(sleeps && rings), Ordering::Relaxed);
        lost_in.fetch_add(u64::from(sleeps && !rings), Ordering::Relaxed);
    });
    (slept.load(Ordering::Relaxed) as usize, lost.load(Ordering::Relaxed) as usize)
}

#[test]
fn no_side_sleeps_for_words_that_are_there() {
    let (slept, lost) = sleep_beside_a_writer(
        |world| Awaited::DATA.announce(&world.waits),
        |world| Awaited::DATA.is_to_ring(&world.waits),
    );
    assert!(slept > 0, "in some order it sleeps and is woken");
    assert_eq!(lost, 0);
}

#[test]
fn without_either_fence_a_side_would() {
    let (_, lost) = sleep_beside_a_writer(
        |world| world.waits.set(1, Ordering::Relaxed),
        |world| Awaited::DATA.is_to_ring(&world.waits),
    );
    assert!(lost > 0, "who announces must fence");
    let (_, lost) = sleep_beside_a_writer(
        |world| Awaited::DATA.announce(&world.waits),
        |world| world.waits.load(Ordering::Relaxed) != 0,
    );
    assert!(lost > 0, "who rings must fence");
}

/// A side sleeps for room while its other half sleeps for data. A ring for one takes the announcements of both.
#[test]
fn a_ring_for_one_announcement_rings_for_all_that_it_took() {
    ::loom::model(|| {
        let world = World::new();
        let sleeper = Arc::clone(&world);
        Awaited::DATA.announce(&world.waits);
        let announcing = thread::spawn(move || Awaited::ROOM.announce(&sleeper.waits));
        let rings = Awaited::DATA.is_to_ring(&world.waits);
        announcing.join().unwrap();
        let left = world.waits.load(Ordering::Relaxed);
        assert!(rings && left & 1 == 0 || left == 3, "{rings} {left}");
    });
}

#[test]
fn words_come_whole_and_are_not_written_over_before_they_are_read() {
    let taken_ahead = std::sync::Arc::new(Counter::new(0));
    let counts = std::sync::Arc::clone(&taken_ahead);
    ::loom::model(move || {
        let counts = std::sync::Arc::clone(&counts);
        let world = World::new();
        let writer = Arc::clone(&world);
        let writing = thread::spawn(move || {
            let (mut producer, mut sent) = (Producer::default(), 0_u8);
            for _ in 0..3 {
                if sent < 3 && producer.push(&writer.ring(), &[sent + 1; 8]).unwrap() == 8 {
                    sent += 1;
                }
                counts.fetch_add(u64::from(producer.own_ahead(&writer.ring())), Ordering::Relaxed);
            }
            sent
        });
        let (mut consumer, mut out) = (Consumer::default(), Vec::new());
        for _ in 0..2 {
            consumer.pop(&world.ring(), 1, &mut out).unwrap();
        }
        let sent = writing.join().unwrap();
        consumer.pop(&world.ring(), usize::MAX, &mut out).unwrap();
        assert!(sent >= 2);
        assert_eq!(out, (1..=sent).flat_map(|at| [at; 8]).collect::<Vec<_>>());
    });
    assert!(taken_ahead.load(Ordering::Relaxed) > 0, "a word is taken ahead");
}
