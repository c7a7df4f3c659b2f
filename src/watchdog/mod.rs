//! The watch over the daemon's threads: which of them stand still, since when, and what they last did.
//!
//! Each watched thread has a [`ThreadMark`], one word that it writes at the phases of its loop: the number of its round,
//! its [`Activity`], and the worker that the activity is about. A thread that has nothing to do writes
//! [`Activity::Waiting`] before it sleeps. The watchdog, a thread of its own, reads all marks a few times a second. A
//! thread is *stalled* if it is in the same round, and not waiting, for `process.stalled_ms_max` ([`Stalls`]).
//!
//! A round is one pass of a thread's loop, and of a long pass one piece ([`ThreadMark::go_on`]): a batch of an ingest
//! thread. Of a thread that runs tasks, it is one poll of a task ([`watched`]).
//!
//! # What a reader of a mark may see
//!
//! Sync point MARK. All loads and stores of a mark are relaxed. One thread writes a mark, and the word is read as a whole,
//! so round, activity and worker always belong together; readers see the words of one mark in the order in which they
//! were written. Nothing else is reached through a mark, so no store needs to be ordered with it. A store is visible to
//! the watchdog long before its next look: it leaves the store buffer of its processor at the latest with the system
//! call by which the thread sleeps.

mod stalls;

use std::future::poll_fn;
use std::ops::Deref;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

pub use stalls::{StallChange, Stalls};

use crate::reasons::reasons;

reasons! {
    /// What a thread does.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[repr(u8)]
    Activity {}
    /// The thread has nothing to do, and sleeps until something wakes it.
    Waiting = "waiting";
    /// The thread begins.
    Starting = "starting";
    /// A connection of a gateway: its frames are read, or its replies written.
    ReadingFrames = "reading frames";
    /// A request of a gateway is answered.
    Deciding = "deciding";
    /// Queued requests are decided.
    DecidingQueued = "deciding queued requests";
    /// Connections are checked for deadlines, or get changes of the fleet.
    CheckingConnections = "checking connections";
    /// Connections are accepted.
    Accepting = "accepting connections";
    /// The admin socket is answered.
    Administering = "answering administration";
    /// Bookings and queued requests end.
    Expiring = "expiring bookings";
    /// The findings of a diagnosis are taken over.
    Diagnosing = "diagnosing";
    /// Workers are added, changed or removed.
    Reconciling = "changing workers";
    /// Files of workers, or answers of engines, are taken over.
    FollowingSources = "taking over files of workers and answers of engines";
    /// The configuration is taken over again.
    Reloading = "reloading the configuration";
    /// The other threads are checked.
    WatchingThreads = "watching threads";
    /// Commands of other threads are handled.
    HandlingCommands = "handling commands";
    /// The events of a worker are applied.
    ApplyingEvents = "applying events";
    /// A worker is dumped, or a dump is loaded into it.
    Transferring = "dumping or loading a worker";
    /// Deadlines of publishers are checked.
    CheckingPublishers = "checking publishers";
    /// Lost batches are requested.
    AskingReplays = "asking for replays";
    /// Cleared blocks are swept out of the index, or memory is reclaimed.
    Sweeping = "sweeping the index";
    /// Predictions change.
    Predicting = "predicting";
    /// Decisions are written to the journal, or judged by the shadow policy.
    WritingJournal = "writing the journal";
    /// Spans are made for the collector.
    MakingSpans = "making spans";
    /// A worker's snapshot is written.
    WritingSnapshot = "writing a snapshot";
    /// Load reports of engines are read.
    ReadingLoads = "reading load reports";
    /// Load is exchanged with other routers.
    SharingLoad = "sharing load with other routers";
    /// Memory of the index is mapped and touched.
    MappingMemory = "mapping memory";
    /// A metrics page is made or served.
    ServingMetrics = "serving metrics";
    /// HTTP requests are answered.
    AnsweringHttp = "answering HTTP";
    /// Bytes of other hosts are carried.
    CarryingRemote = "carrying remote connections";
    /// The memory of the process is measured.
    MeasuringMemory = "measuring memory";
}

/// The word of a mark, as one look saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    /// The number of the round, which wraps.
    pub round: u32,
    /// What the thread does.
    pub activity: Activity,
    /// The number of a worker's [`WorkerIndex`](crate::ids::WorkerIndex), if the activity is about one; else 0.
    pub of: u32,
}

const OF_BITS: u32 = 32;
const ACTIVITY_BITS: u32 = 8;
/// Rounds before their number wraps: more than any thread makes between two looks.
const ROUNDS: u64 = 1 << (u64::BITS - OF_BITS - ACTIVITY_BITS);

impl Look {
    const fn word(self) -> u64 {
        (self.round as u64 % ROUNDS) << (OF_BITS + ACTIVITY_BITS) | (self.activity as u64) << OF_BITS | self.of as u64
    }

    fn from_word(word: u64) -> Self {
        let activity = usize::from((word >> OF_BITS) as u8);
        Self {
            round: (word >> (OF_BITS + ACTIVITY_BITS)) as u32,
            // Only `word` makes words.
            activity: Activity::ALL.get(activity).copied().unwrap_or(Activity::Waiting),
            of: word as u32,
        }
    }
}

/// The word that a thread writes, on a cache line of its own.
#[derive(Debug)]
#[repr(align(128))]
struct Word(AtomicU64);

/// The mark of one thread. Only that thread writes the word; only the watchdog writes the rest.
#[derive(Debug)]
pub struct ThreadMark {
    word: Word,
    name: String,
    is_vital: bool,
    stalls: AtomicU64,
    longest_ms: AtomicU64,
    stalled_ms: AtomicU64,
    /// What it did at the last look during a stall.
    stalled_in: AtomicU64,
}

impl ThreadMark {
    /// The mark of a thread that begins. `is_vital` = requests or events stand still while the thread does.
    #[must_use]
    pub fn new(name: impl Into<String>, is_vital: bool) -> Self {
        let word = Word(AtomicU64::new(Look { round: 0, activity: Activity::Waiting, of: 0 }.word()));
        let zero = || AtomicU64::new(0);
        let (name, stalled_in) = (name.into(), AtomicU64::new(word.0.load(Ordering::Relaxed)));
        Self { word, name, is_vital, stalls: zero(), longest_ms: zero(), stalled_ms: zero(), stalled_in }
    }

    /// The thread's name in metrics, logs and findings.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether requests or events stand still while the thread does.
    #[must_use]
    pub const fn is_vital(&self) -> bool {
        self.is_vital
    }

    /// Begins a round.
    #[inline]
    pub fn begin_round(&self, activity: Activity) {
        self.begin_round_of(activity, 0);
    }

    /// Begins a round that is about a worker.
    #[inline]
    pub fn begin_round_of(&self, activity: Activity, of: u32) {
        // Relaxed, here and below: sync point MARK.
        let rounds = self.word.0.load(Ordering::Relaxed) >> (OF_BITS + ACTIVITY_BITS);
        self.write(Look { round: rounds as u32 + 1, activity, of });
    }

    /// Begins another phase of the same round.
    #[inline]
    pub fn enter(&self, activity: Activity) {
        self.enter_of(activity, 0);
    }

    /// Begins a phase of the same round that is about a worker.
    #[inline]
    pub fn enter_of(&self, activity: Activity, of: u32) {
        let rounds = self.word.0.load(Ordering::Relaxed) >> (OF_BITS + ACTIVITY_BITS);
        self.write(Look { round: rounds as u32, activity, of });
    }

    /// Begins another round of the same phase: a piece of its work is done.
    #[inline]
    pub fn go_on(&self) {
        let before = self.look();
        self.write(Look { round: before.round + 1, ..before });
    }

    /// Ends the round: the thread has nothing to do.
    #[inline]
    pub fn wait(&self) {
        self.enter(Activity::Waiting);
    }

    #[inline]
    fn write(&self, look: Look) {
        self.word.0.store(look.word(), Ordering::Relaxed);
        #[cfg(debug_assertions)]
        failpoint::stall(&self.name, look.activity);
    }

    /// What the thread does now.
    #[must_use]
    pub fn look(&self) -> Look {
        Look::from_word(self.word.0.load(Ordering::Relaxed))
    }

    /// Notes how long the thread has been stalled by now, and in what; 0 = it is not. Only the watchdog calls it.
    pub fn note_stalled_ms(&self, stalled_ms: u64, look: Look) {
        // Relaxed, here and below: figures, which order nothing.
        if stalled_ms > 0 {
            self.stalled_in.store(look.word(), Ordering::Relaxed);
        }
        if self.stalled_ms.swap(stalled_ms, Ordering::Relaxed) == 0 && stalled_ms > 0 {
            self.stalls.fetch_add(1, Ordering::Relaxed);
        }
        self.longest_ms.fetch_max(stalled_ms, Ordering::Relaxed);
    }

    /// How long the thread has been stalled by now, milliseconds; 0 = it is not.
    #[must_use]
    pub fn stalled_ms(&self) -> u64 {
        self.stalled_ms.load(Ordering::Relaxed)
    }

    /// What the thread did at the last look during a stall.
    #[must_use]
    pub fn stalled_in(&self) -> Look {
        Look::from_word(self.stalled_in.load(Ordering::Relaxed))
    }

    /// How often the thread was stalled.
    #[must_use]
    pub fn stalls(&self) -> u64 {
        self.stalls.load(Ordering::Relaxed)
    }

    /// The longest stall, milliseconds.
    #[must_use]
    pub fn longest_ms(&self) -> u64 {
        self.longest_ms.load(Ordering::Relaxed)
    }
}

/// Ends a round when a poll ends, also by a panic.
struct Round<'a>(&'a ThreadMark);

impl Drop for Round<'_> {
    fn drop(&mut self) {
        self.0.wait();
    }
}

/// A task of a watched thread: each poll is a round, and between two polls the thread waits.
pub async fn watched<F: Future>(mark: impl Deref<Target = ThreadMark>, activity: Activity, task: F) -> F::Output {
    let mut task = pin!(task);
    poll_fn(|context| {
        mark.begin_round(activity);
        let _round = Round(&mark);
        task.as_mut().poll(context)
    })
    .await
}

/// A part of a watched task: each poll is a phase of the task's round.
pub async fn phase<F: Future>(mark: &ThreadMark, activity: Activity, part: F) -> F::Output {
    let mut part = pin!(part);
    poll_fn(|context| {
        mark.enter(activity);
        part.as_mut().poll(context)
    })
    .await
}

/// The watched threads of one daemon.
#[derive(Clone, Debug, Default)]
pub struct Watchlist(Arc<Mutex<Vec<Arc<ThreadMark>>>>);

impl Watchlist {
    /// Adds a thread that is about to begin; see [`ThreadMark::new`].
    #[must_use]
    pub fn add(&self, name: impl Into<String>, is_vital: bool) -> Arc<ThreadMark> {
        let mark = Arc::new(ThreadMark::new(name, is_vital));
        self.add_mark(Arc::clone(&mark));
        mark
    }

    /// Adds a thread that has its mark already.
    pub fn add_mark(&self, mark: Arc<ThreadMark>) {
        self.0.lock().push(mark);
    }

    /// The marks of all threads, in the order in which they were added.
    #[must_use]
    pub fn marks(&self) -> Vec<Arc<ThreadMark>> {
        self.0.lock().clone()
    }

    /// Whether a thread without which requests or events stand still is stalled now.
    #[must_use]
    pub fn is_stalled(&self) -> bool {
        self.0.lock().iter().any(|mark| mark.is_vital && mark.stalled_ms() > 0)
    }
}

/// How often the watchdog looks, for a limit of `stalled_ms_max`.
#[must_use]
pub fn look_every(stalled_ms_max: u64) -> Duration {
    Duration::from_millis((stalled_ms_max / 8).clamp(5, 250))
}

/// Stalls on purpose, for tests of the whole process. Only builds with debug assertions have it.
#[cfg(debug_assertions)]
mod failpoint {
    use std::path::PathBuf;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::Activity;

    /// `THREAD:ACTIVITY:MILLISECONDS:FILE`: once the file exists, the thread sleeps for this long, once, when it begins
    /// this activity.
    const VARIABLE: &str = "KVROUTED_STALL";

    struct Stall {
        thread: String,
        activity: String,
        pause: Duration,
        file: PathBuf,
        is_done: AtomicBool,
    }

    static STALL: OnceLock<Option<Stall>> = OnceLock::new();

    fn read() -> Option<Stall> {
        let text = std::env::var(VARIABLE).ok()?;
        let mut parts = text.split(':').map(str::to_owned);
        let (thread, activity) = (parts.next()?, parts.next()?);
        let pause = Duration::from_millis(parts.next()?.parse().ok()?);
        let file = parts.next()?.into();
        Some(Stall { thread, activity, pause, file, is_done: AtomicBool::new(false) })
    }

    pub(super) fn stall(thread: &str, activity: Activity) {
        if let Some(stall) = STALL.get_or_init(read)
            && stall.thread == thread
            && stall.activity == activity.name()
            // Relaxed: the sleep orders nothing.
            && !stall.is_done.load(Ordering::Relaxed)
            && stall.file.exists()
            && !stall.is_done.swap(true, Ordering::Relaxed)
        {
            std::thread::sleep(stall.pause);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_holds_all_parts_of_a_look() {
        for activity in Activity::ALL {
            for (round, of) in [(0, 0), (1, 7), ((ROUNDS - 1) as u32, u32::MAX)] {
                let look = Look { round, activity: *activity, of };
                assert_eq!(Look::from_word(look.word()), look);
            }
        }
        assert!(Activity::ALL.len() <= 1 << ACTIVITY_BITS);
    }

    #[test]
    fn a_round_goes_through_phases_and_its_number_wraps() {
        let mark = ThreadMark::new("t", true);
        let look = |round, activity, of| Look { round, activity, of };
        assert_eq!(mark.look(), look(0, Activity::Waiting, 0));
        mark.begin_round_of(Activity::ApplyingEvents, 9);
        assert_eq!(mark.look(), look(1, Activity::ApplyingEvents, 9));
        mark.go_on();
        assert_eq!(mark.look(), look(2, Activity::ApplyingEvents, 9));
        mark.enter(Activity::Sweeping);
        assert_eq!(mark.look(), look(2, Activity::Sweeping, 0));
        mark.wait();
        assert_eq!(mark.look(), look(2, Activity::Waiting, 0));
        mark.write(look((ROUNDS - 1) as u32, Activity::Sweeping, 0));
        mark.begin_round(Activity::Deciding);
        assert_eq!(mark.look(), look(0, Activity::Deciding, 0));
    }

    /// Sync point MARK: every look of another thread is a word that was written, and words are seen in their order.
    #[test]
    fn another_thread_sees_whole_words_in_their_order() {
        const ROUNDS: u32 = 50_000;
        let mark = ThreadMark::new("t", false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1..=ROUNDS {
                    mark.begin_round_of(Activity::ApplyingEvents, round * 3);
                    mark.enter_of(Activity::Sweeping, round * 5);
                }
            });
            let mut before = 0;
            while before < ROUNDS {
                let Look { round, activity, of } = mark.look();
                let written = match activity {
                    Activity::ApplyingEvents => of == round * 3,
                    Activity::Sweeping => of == round * 5,
                    _ => round == 0,
                };
                assert!(written && round >= before, "{round} {activity:?} {of} after {before}");
                before = round;
            }
        });
    }

    #[tokio::test]
    async fn each_poll_of_a_watched_task_is_a_round_with_its_phases() {
        let mark = ThreadMark::new("t", true);
        let part = async {
            assert_eq!(mark.look().activity, Activity::Accepting);
            tokio::task::yield_now().await;
            assert_eq!((mark.look().activity, mark.look().round), (Activity::Accepting, 2));
        };
        watched(&mark, Activity::Deciding, async {
            assert_eq!((mark.look().activity, mark.look().round), (Activity::Deciding, 1));
            phase(&mark, Activity::Accepting, part).await;
        })
        .await;
        assert_eq!((mark.look().activity, mark.look().round), (Activity::Waiting, 2));
    }

    #[test]
    fn a_vital_thread_that_is_stalled_is_counted_and_shown() {
        let list = Watchlist::default();
        let (vital, other) = (list.add("vital", true), list.add("other", false));
        other.note_stalled_ms(1000, other.look());
        assert!(!list.is_stalled());
        [1000, 1500, 0, 1200].into_iter().for_each(|ms| vital.note_stalled_ms(ms, vital.look()));
        assert!(list.is_stalled());
        assert_eq!((vital.stalls(), vital.longest_ms(), vital.stalled_ms()), (2, 1500, 1200));
    }
}
