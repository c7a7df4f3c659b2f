//! The thread that answers questions for lost batches, over a ROUTER and with the engines' own frames.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use crossbeam::channel::{self, Receiver, TryRecvError};
use parking_lot::Mutex;

use super::answer::{Answer, Message, Step};
use super::outbound::count;
use super::publication::Kept;
use super::snapshot::{Failure, Progress, TakenSnapshot};
use crate::event::flat::UNNUMBERED;
use crate::ids::{EventSeq, Worker};
use crate::ingest::{AbortReason, DumpPart, IngestHandle, RelayName};
use crate::limits::{
    RELAY_ANSWER_STALL_MS_MAX, RELAY_ANSWER_TURN_MESSAGES_MAX, RELAY_ANSWERS_MAX, RELAY_REST_MS,
    RELAY_SNAPSHOT_KEPT_MS, RELAY_SNAPSHOT_REST_MS, RELAY_WAIT_MS,
};
use crate::metrics::{CounterSet, RelayCounter};
use crate::zmtp::{self, PeerId, Sent, Server, ServerCounts};

/// Who asked, and what is still to be sent there.
struct Asker {
    peer: PeerId,
    answer: Answer,
    moved_at_ms: u64,
}

/// The snapshot that answers are taken from.
struct Current {
    snapshot: TakenSnapshot,
    parts: Receiver<DumpPart>,
    /// Of [`Kept::forgotten`], when it was asked for.
    forgotten: u64,
    used_at_ms: u64,
}

pub(super) struct Answering {
    pub(super) server: Server,
    pub(super) worker: Worker,
    pub(super) name: RelayName,
    pub(super) ingest: Arc<IngestHandle>,
    pub(super) kept: Arc<Mutex<Kept>>,
    pub(super) counters: Arc<CounterSet<RelayCounter>>,
    pub(super) ends: Arc<AtomicBool>,
    counted: ServerCounts,
    /// Messages that came and are not yet looked at.
    questions: Vec<(PeerId, zmtp::Message)>,
    askers: Vec<Asker>,
    current: Option<Current>,
    snapshots: u64,
    started: Instant,
}

impl Answering {
    pub(super) fn new(
        server: Server,
        (worker, name): (Worker, RelayName),
        ingest: Arc<IngestHandle>,
        kept: Arc<Mutex<Kept>>,
        counters: Arc<CounterSet<RelayCounter>>,
        ends: Arc<AtomicBool>,
    ) -> Self {
        Self {
            server,
            worker,
            name,
            ingest,
            kept,
            counters,
            ends,
            counted: ServerCounts::default(),
            questions: Vec::new(),
            askers: Vec::new(),
            current: None,
            snapshots: 0,
            started: Instant::now(),
        }
    }

    /// Answers until it is told to end, or its event loop fails.
    pub(super) fn run(&mut self) {
        // Relaxed: nothing else hangs on it.
        while !self.ends.load(Ordering::Relaxed) {
            let wait_ms = if self.askers.is_empty() { RELAY_WAIT_MS } else { RELAY_REST_MS };
            if !self.questions(wait_ms) {
                return;
            }
            let now_ms = self.now_ms();
            self.take_parts(now_ms);
            // As long as anything can be sent nothing is waited for, but questions are looked at in between.
            while self.turn(now_ms) && !self.ends.load(Ordering::Relaxed) {
                if !self.questions(0) {
                    return;
                }
                self.take_parts(now_ms);
            }
        }
    }

    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Waits for questions, at most so long, and takes every one that is there; `false` = the event loop failed.
    fn questions(&mut self, wait_ms: u64) -> bool {
        let (mut questions, now_ms) = (std::mem::take(&mut self.questions), self.now_ms());
        if let Err(error) = self.server.turn(Duration::from_millis(wait_ms), now_ms, &mut questions) {
            tracing::error!(%error, "the event loop of replays failed; lost batches are not sent again any more");
            return false;
        }
        count(&self.counters, &mut self.counted, self.server.counts());
        for (peer, question) in questions.drain(..) {
            let from = <[u8; 8]>::try_from(&question.last[..]).ok();
            let (Some(from), true) = (from.map(u64::from_be_bytes), (1..=2).contains(&question.parts)) else {
                self.counters.bump(RelayCounter::QuestionsMisframed);
                continue;
            };
            self.counters.bump(RelayCounter::Questions);
            if self.askers.len() >= RELAY_ANSWERS_MAX {
                self.counters.bump(RelayCounter::QuestionsRefused);
                let times = self.counters.get(RelayCounter::QuestionsRefused);
                // Whoever asks without end writes no log without end.
                if times.is_power_of_two() {
                    tracing::warn!(
                        answers = RELAY_ANSWERS_MAX,
                        times,
                        "too many replays at once; one more is not answered"
                    );
                }
                continue;
            }
            tracing::debug!(from, "replay asked for");
            // Whoever asks once more wants no other answer.
            self.askers.retain(|asker| asker.peer != peer);
            self.askers.push(Asker { peer, answer: Answer::new(EventSeq(from)), moved_at_ms: now_ms });
        }
        self.questions = questions;
        true
    }

    /// Takes what there is of the dump that the snapshot is made of.
    fn take_parts(&mut self, now_ms: u64) {
        let Some(current) = &mut self.current else { return };
        while current.snapshot.progress() == Progress::Taking {
            match current.parts.try_recv() {
                Ok(part) => current.snapshot.take(&part, self.kept.lock().dumped_after),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    current.snapshot.fail(Failure::Aborted(AbortReason::PeerGone));
                }
            }
            match current.snapshot.progress() {
                Progress::Taking => {}
                Progress::Whole => self.counters.bump(RelayCounter::Snapshots),
                Progress::Failed(failure) => {
                    self.counters.bump(RelayCounter::SnapshotsFailed);
                    tracing::warn!(?failure, "no snapshot of the worker; whoever needs it asks again");
                }
            }
        }
        let kept_ms = match current.snapshot.progress() {
            Progress::Taking => u64::MAX,
            Progress::Whole => RELAY_SNAPSHOT_KEPT_MS,
            Progress::Failed(_) => RELAY_SNAPSHOT_REST_MS,
        };
        if now_ms.saturating_sub(current.used_at_ms) > kept_ms {
            self.current = None;
        }
    }

    /// Sends some of every answer; `true` = there may be more to send at once.
    fn turn(&mut self, now_ms: u64) -> bool {
        let mut askers = std::mem::take(&mut self.askers);
        let mut moved = false;
        askers.retain_mut(|asker| {
            let (goes_on, sent) = self.serve(asker, now_ms);
            moved |= sent;
            goes_on
        });
        self.askers = askers;
        moved
    }

    /// Whether the answer goes on, and whether some of it was sent.
    fn serve(&mut self, asker: &mut Asker, now_ms: u64) -> (bool, bool) {
        for number in 0..RELAY_ANSWER_TURN_MESSAGES_MAX {
            let message = match self.step(asker, now_ms) {
                Step::Send(message) => message,
                Step::NeedsSnapshot => {
                    self.need_snapshot(now_ms);
                    return (true, number > 0);
                }
                Step::GiveUp => {
                    self.counters.bump(RelayCounter::AnswersWithoutSnapshot);
                    return (false, number > 0);
                }
                Step::Over => {
                    self.counters.bump(RelayCounter::Answers);
                    return (false, number > 0);
                }
            };
            match self.send(asker.peer, &message) {
                Sent::Yes => {
                    asker.answer.sent(&message);
                    asker.moved_at_ms = now_ms;
                }
                Sent::Full if now_ms.saturating_sub(asker.moved_at_ms) > RELAY_ANSWER_STALL_MS_MAX => {
                    self.counters.bump(RelayCounter::AnswersStalled);
                    tracing::warn!("whoever asked for a replay takes nothing of it; it is given up");
                    return (false, false);
                }
                Sent::Full => return (true, number > 0),
                Sent::Gone => {
                    self.counters.bump(RelayCounter::AnswersUnreachable);
                    return (false, number > 0);
                }
            }
        }
        (true, true)
    }

    fn step(&mut self, asker: &mut Asker, now_ms: u64) -> Step {
        let kept = self.kept.lock();
        let snapshot = self.current.as_mut().and_then(|current| {
            // One that failed ends the answers that wait for it.
            let failed = matches!(current.snapshot.progress(), Progress::Failed(_));
            if !failed {
                current.used_at_ms = now_ms;
            }
            let serves = failed || asker.answer.is_in_snapshot() || is_of_use(current, &kept);
            serves.then_some(&current.snapshot)
        });
        asker.answer.step(&kept.buffer, snapshot)
    }

    /// Has a snapshot taken, unless one is that can be used, or that somebody is being sent.
    fn need_snapshot(&mut self, now_ms: u64) {
        let kept = self.kept.lock();
        let is_there = self.current.as_ref().is_some_and(|current| is_of_use(current, &kept));
        if is_there || self.askers.iter().any(|asker| asker.answer.is_in_snapshot()) {
            return;
        }
        let forgotten = kept.forgotten;
        drop(kept);
        self.snapshots += 1;
        let mut snapshot = TakenSnapshot::new(self.snapshots, self.name);
        let parts = self.ingest.dump(self.worker).unwrap_or_else(|error| {
            self.counters.bump(RelayCounter::SnapshotsFailed);
            tracing::warn!(%error, "no snapshot of the worker can be asked for");
            snapshot.fail(Failure::Aborted(AbortReason::Busy));
            channel::never()
        });
        self.current = Some(Current { snapshot, parts, forgotten, used_at_ms: now_ms });
    }

    fn send(&mut self, peer: PeerId, message: &Message) -> Sent {
        let (seq, payload) = match message {
            Message::Batch(seq, payload) => (*seq, Bytes::from_owner(Arc::clone(payload))),
            Message::Part(payload) => (UNNUMBERED, Bytes::from_owner(Arc::clone(payload))),
            Message::End => (UNNUMBERED, Bytes::new()),
        };
        let head = zmtp::head(&[b"", b"", &seq.0.to_be_bytes()], payload.len());
        self.server.send(peer, [Bytes::from(head), payload])
    }
}

/// Whether the batches behind a snapshot are there and lead on from it.
fn is_of_use(current: &Current, kept: &Kept) -> bool {
    let follows = match current.snapshot.progress() {
        Progress::Failed(_) => false,
        Progress::Taking | Progress::Whole => {
            current.snapshot.watermark().is_none_or(|watermark| watermark.0 + 1 >= kept.buffer.first().0)
        }
    };
    follows && current.forgotten == kept.forgotten
}
