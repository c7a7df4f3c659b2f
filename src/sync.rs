//! Atomics that threads share: the standard ones, or under the model checker (`--cfg kvrouted_loom`, tests only) those
//! that try every order of accesses. And [`SeqWord`], the sequence number of a seqlock.

#[cfg(not(all(test, kvrouted_loom)))]
mod chosen {
    pub(crate) use std::hint::spin_loop as spin;
    pub(crate) use std::sync::Arc;
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, fence};
}

#[cfg(all(test, kvrouted_loom))]
mod chosen {
    pub(crate) use ::loom::sync::Arc;
    pub(crate) use ::loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, fence};
    /// A waiting thread lets another thread of the model run.
    pub(crate) use ::loom::thread::yield_now as spin;
}

pub(crate) use chosen::{Arc, AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, fence, spin};
pub(crate) use std::sync::atomic::Ordering;

/// The sequence number of a seqlock: odd while the words that it protects are being changed.
///
/// | tag | writer | reader |
/// |---|---|---|
/// | OPEN | Relaxed store of an odd number, then a Release fence, before the words | Acquire fence after the words, then a Relaxed load |
/// | DONE | Release store of the next even number, after the words | Acquire load before the words |
///
/// * DONE: a reader that begins with an even number sees the words of that change or later ones.
/// * OPEN: a reader that has met a word of a later change sees a later number when it loads the number again. The
///   writer's fence comes before that word's store, and the reader's fence after that word's load.
///
/// So a read whose two loads give the same even number is of one moment. The words are atomics, loaded and stored
/// Relaxed. (A line of the index's table, `index::header`, has a sequence of its own: one word with the node's key.)
#[derive(Debug, Default)]
#[repr(transparent)]
pub(crate) struct SeqWord(AtomicU64);

impl SeqWord {
    pub(crate) fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Begins a change. Only one thread at a time may change the words.
    #[inline]
    pub(crate) fn begin_write(&self) {
        // Relaxed: only the writer stores it.
        let before = self.0.load(Ordering::Relaxed);
        debug_assert!(before.is_multiple_of(2), "one change at a time");
        // OPEN: pairs with the fence and the load in `is_unchanged`.
        self.0.store(before + 1, Ordering::Relaxed);
        fence(Ordering::Release);
    }

    /// Begins a change, where several threads may try to. `false` if another thread is changing the words; rarely, too,
    /// if none is.
    #[inline]
    pub(crate) fn try_begin_write(&self) -> bool {
        // Relaxed: the exchange decides.
        let before = self.0.load(Ordering::Relaxed);
        // Acquire: pairs with DONE, so that the previous writer's words are visible.
        let begun = before.is_multiple_of(2)
            && self.0.compare_exchange_weak(before, before + 1, Ordering::Acquire, Ordering::Relaxed).is_ok();
        if begun {
            // OPEN: pairs with the fence and the load in `is_unchanged`.
            fence(Ordering::Release);
        }
        begun
    }

    /// Ends a change.
    #[inline]
    pub(crate) fn end_write(&self) {
        // Relaxed: the writer reads what it wrote.
        let open = self.0.load(Ordering::Relaxed);
        debug_assert!(!open.is_multiple_of(2), "a change that has begun");
        // DONE: pairs with the load in `load`.
        self.0.store(open + 1, Ordering::Release);
    }

    /// Whether a change is in progress. For the writer.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        // Relaxed: the writer reads what it wrote.
        !self.0.load(Ordering::Relaxed).is_multiple_of(2)
    }

    /// The number before a read; odd while a change is in progress.
    #[inline]
    pub(crate) fn load(&self) -> u64 {
        // DONE: pairs with the store in `end_write`.
        self.0.load(Ordering::Acquire)
    }

    /// The number before a read; `None` while a change is in progress.
    #[inline]
    pub(crate) fn begin_read(&self) -> Option<u64> {
        let now = self.load();
        now.is_multiple_of(2).then_some(now)
    }

    /// Whether everything read since the number was `begun`, an even one, is of one moment.
    #[inline]
    pub(crate) fn is_unchanged(&self, begun: u64) -> bool {
        // OPEN: this fence and the load behind it pair with the store and the fence in `begin_write`.
        fence(Ordering::Acquire);
        self.is_unchanged_behind_fence(begun)
    }

    /// As [`SeqWord::is_unchanged`], after an Acquire fence of the caller's that follows every load of the read.
    #[inline]
    pub(crate) fn is_unchanged_behind_fence(&self, begun: u64) -> bool {
        // OPEN: ordered by the caller's fence.
        self.0.load(Ordering::Relaxed) == begun
    }
}

/// Readers beside a writer, under every order of accesses that the memory model allows: `RUSTFLAGS="--cfg
/// kvrouted_loom" cargo test --lib --release sync::loom`. Beside the protocol stand mutants that the model must catch.
#[cfg(all(test, kvrouted_loom))]
mod loom {
    use super::*;

    #[derive(Default)]
    struct Shared {
        sequence: SeqWord,
        words: [AtomicU64; 2],
    }

    impl Shared {
        // Relaxed, all words: the sequence orders them.
        fn write(&self, value: u64) {
            self.words.iter().for_each(|word| word.store(value, Ordering::Relaxed));
        }

        fn read(&self) -> [u64; 2] {
            [0, 1].map(|at: usize| self.words[at].load(Ordering::Relaxed))
        }
    }

    fn begin_without_a_fence(sequence: &SeqWord) {
        // Relaxed: only the writer stores it.
        let before = sequence.0.load(Ordering::Relaxed);
        sequence.0.store(before + 1, Ordering::Relaxed);
    }

    /// One change beside one read.
    fn check(begin: fn(&SeqWord), is_unchanged: fn(&SeqWord, u64) -> bool) {
        let seen = std::sync::Arc::new(std::sync::Mutex::new([false; 2]));
        let noted = std::sync::Arc::clone(&seen);
        ::loom::model(move || {
            let shared = Arc::new(Shared::default());
            let of_reader = Arc::clone(&shared);
            let reader = ::loom::thread::spawn(move || {
                let begun = of_reader.sequence.begin_read()?;
                let words = of_reader.read();
                is_unchanged(&of_reader.sequence, begun).then_some(words)
            });
            begin(&shared.sequence);
            shared.write(1);
            shared.sequence.end_write();
            if let Some([one, other]) = reader.join().expect("the reader ended") {
                assert_eq!(one, other, "half a change");
                noted.lock().expect("no model panicked")[one as usize] = true;
            }
        });
        assert_eq!(*seen.lock().expect("no model panicked"), [true; 2], "the read comes before and after the change");
    }

    #[test]
    fn a_read_is_of_one_moment() {
        check(SeqWord::begin_write, SeqWord::is_unchanged);
    }

    #[test]
    #[should_panic(expected = "half a change")]
    fn without_the_writers_fence_a_read_mixes_moments() {
        check(begin_without_a_fence, SeqWord::is_unchanged);
    }

    #[test]
    #[should_panic(expected = "half a change")]
    fn without_the_readers_fence_a_read_mixes_moments() {
        check(SeqWord::begin_write, SeqWord::is_unchanged_behind_fence);
    }

    #[test]
    fn of_two_writers_one_waits_or_gives_up() {
        ::loom::model(|| {
            let shared = Arc::new(Shared::default());
            let of_other = Arc::clone(&shared);
            let change = |shared: &Shared, value: u64| {
                let begun = shared.sequence.try_begin_write();
                if begun {
                    let [one, other] = shared.read();
                    assert_eq!(one, other, "half a change");
                    shared.write(value);
                    shared.sequence.end_write();
                }
                begun
            };
            let other = ::loom::thread::spawn(move || change(&of_other, 1));
            let begun = change(&shared, 2);
            let begun = [begun, other.join().expect("the writer ended")];
            assert!(begun.contains(&true) || shared.read() == [0, 0]);
        });
    }
}
