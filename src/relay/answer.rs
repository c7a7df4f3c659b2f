//! Replays: the thread that answers requests for lost batches, over a ROUTER socket and with the engines' own frames.
//!
//! [`Answer`] decides, message by message; it is pure.
//!
//! | requested | the answer |
//! |---|---|
//! | a batch that was not sent yet | the end marker: the requester knows another stream |
//! | a batch in the buffer | that batch, all that follow, the end marker |
//! | an older batch | a snapshot, the batches after its watermark, the end marker |
//!
//! If batches leave the buffer before they are sent, the answer continues with the oldest batch that is there. The
//! requester sees the gap and asks again. If a newer snapshot replaces the one that is being sent, because nothing follows
//! that one any more, the answer continues with the first part of the newer one, with which the requester begins anew. If a
//! snapshot is needed and there is none, the end marker is not sent either: an incomplete answer must not look complete.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;

use super::publish::{Kept, ReplayBuffer, count};
use super::snapshot::{Progress, TakenSnapshot};
use super::snapshot_taker::SnapshotTaker;
use crate::event::flat::UNNUMBERED;
use crate::ids::EventSeq;
use crate::limits::{
    RELAY_ANSWER_BYTES_PER_S_MIN, RELAY_ANSWER_QUANTUM_MESSAGES_MAX, RELAY_ANSWER_STALL_MS_MAX, RELAY_ANSWERS_MAX,
    RELAY_PAUSE_MS, RELAY_WAIT_MS,
};
use crate::metrics::{CounterSet, RelayCounter};
use crate::zmtp::{self, PeerId, Sent, Server, ServerCounts};

/// A requester, and the rest of its answer.
struct Asker {
    peer: PeerId,
    answer: Answer,
    moved_at_ms: u64,
    pace: Pace,
}

/// How fast a requester takes its answers, counted from the first message that one of them had.
#[derive(Clone, Copy, Debug, Default)]
struct Pace {
    since_ms: Option<u64>,
    bytes: u64,
}

impl Pace {
    fn sent(&mut self, bytes: usize, now_ms: u64) {
        self.since_ms.get_or_insert(now_ms);
        self.bytes += bytes as u64;
    }

    /// By how many bytes it is behind the slowest pace that keeps a place.
    fn behind_bytes(&self, now_ms: u64) -> u64 {
        let moving_ms = self.since_ms.map_or(0, |since_ms| now_ms.saturating_sub(since_ms));
        let due_ms = moving_ms.saturating_sub(RELAY_ANSWER_STALL_MS_MAX);
        (due_ms * RELAY_ANSWER_BYTES_PER_S_MIN / 1000).saturating_sub(self.bytes)
    }
}

pub(super) struct Answering {
    server: Server,
    snapshots: SnapshotTaker,
    kept: Arc<Mutex<Kept>>,
    counters: Arc<CounterSet<RelayCounter>>,
    ends: Arc<AtomicBool>,
    counted: ServerCounts,
    /// Received messages that are not handled yet.
    questions: Vec<(PeerId, zmtp::Message)>,
    askers: Vec<Asker>,
    started: Instant,
}

impl Answering {
    pub(super) fn new(
        server: Server,
        snapshots: SnapshotTaker,
        kept: Arc<Mutex<Kept>>,
        (counters, ends): (Arc<CounterSet<RelayCounter>>, Arc<AtomicBool>),
    ) -> Self {
        Self {
            server,
            snapshots,
            kept,
            counters,
            ends,
            counted: ServerCounts::default(),
            questions: Vec::new(),
            askers: Vec::new(),
            started: Instant::now(),
        }
    }

    /// Answers requests until the relay ends or the event loop fails.
    pub(super) fn run(&mut self) {
        let mut wait_ms = RELAY_WAIT_MS;
        // Relaxed: nothing else depends on it.
        while !self.ends.load(Ordering::Relaxed) {
            if !self.questions(wait_ms) {
                return;
            }
            let now_ms = self.now_ms();
            self.snapshots.take_parts(now_ms);
            // While anything can be sent, it does not wait, but it reads requests in between.
            wait_ms = match (self.serve_all(now_ms), self.askers.is_empty()) {
                (true, _) => 0,
                (false, true) => RELAY_WAIT_MS,
                (false, false) => RELAY_PAUSE_MS,
            };
        }
    }

    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Waits for requests, for a limited time, and takes all that are there. `false` = the event loop failed.
    fn questions(&mut self, wait_ms: u64) -> bool {
        let (mut questions, now_ms) = (std::mem::take(&mut self.questions), self.now_ms());
        if let Err(error) = self.server.serve_peers(Duration::from_millis(wait_ms), now_ms, &mut questions) {
            tracing::error!(%error, "the event loop of replays failed; lost batches are not replayed any more");
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
            // A new request of the same requester replaces its answer. Its pace goes on: asking again gains no time.
            let before = self.askers.iter().position(|asker| asker.peer == peer);
            let pace = before.map_or_else(Pace::default, |at| self.askers.remove(at).pace);
            if self.askers.len() >= RELAY_ANSWERS_MAX && !self.make_way(now_ms) {
                self.counters.bump(RelayCounter::QuestionsRefused);
                let times = self.counters.get(RelayCounter::QuestionsRefused);
                // A requester that asks without end must not fill the log.
                if times.is_power_of_two() {
                    tracing::warn!(
                        answers = RELAY_ANSWERS_MAX,
                        times,
                        "too many replays at once; a further request is not answered"
                    );
                }
                continue;
            }
            tracing::debug!(from, "replay requested");
            self.askers.push(Asker { peer, answer: Answer::new(EventSeq(from)), moved_at_ms: now_ms, pace });
        }
        self.questions = questions;
        true
    }

    /// Aborts the slowest answer, if it is too slow to keep its place from another one. Whether there is a place now.
    fn make_way(&mut self, now_ms: u64) -> bool {
        let behind = self.askers.iter().map(|asker| asker.pace.behind_bytes(now_ms)).enumerate();
        let Some((slowest, _)) = behind.filter(|(_, bytes)| *bytes > 0).max_by_key(|(_, bytes)| *bytes) else {
            return false;
        };
        self.askers.swap_remove(slowest);
        self.counters.bump(RelayCounter::AnswersStalled);
        true
    }

    /// Sends some messages of every answer. `true` = more could be sent at once.
    fn serve_all(&mut self, now_ms: u64) -> bool {
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

    /// Whether the answer continues, and whether some of it was sent.
    fn serve(&mut self, asker: &mut Asker, now_ms: u64) -> (bool, bool) {
        for number in 0..RELAY_ANSWER_QUANTUM_MESSAGES_MAX {
            let message = match self.step(asker, now_ms) {
                Step::Send(message) => message,
                Step::NeedsSnapshot => {
                    self.snapshots.need(&self.kept, now_ms);
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
                    asker.pace.sent(message.bytes(), now_ms);
                }
                Sent::Full if now_ms.saturating_sub(asker.moved_at_ms) > RELAY_ANSWER_STALL_MS_MAX => {
                    self.counters.bump(RelayCounter::AnswersStalled);
                    tracing::warn!("a router that requested a replay reads nothing; the replay is aborted");
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
        let snapshot = self.snapshots.usable(&kept, asker.answer.is_in_snapshot(), now_ms);
        asker.answer.step(&kept.buffer, snapshot)
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

/// One message of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// A batch.
    Batch(EventSeq, Arc<[u8]>),
    /// A part of a snapshot.
    Part(Arc<[u8]>),
    /// The end marker.
    End,
}

impl Message {
    fn bytes(&self) -> usize {
        match self {
            Self::Batch(_, payload) | Self::Part(payload) => payload.len(),
            Self::End => 0,
        }
    }
}

/// The next step of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Send this, and then call [`Answer::sent`].
    Send(Message),
    /// A snapshot is needed, and none can be used, or its next part is not there yet.
    NeedsSnapshot,
    /// The snapshot failed: no further part will come.
    GiveUp,
    /// The answer is complete.
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Asked { from: u64 },
    // `id` is that of the snapshot whose parts before `part` were sent; `None` before the first.
    Snapshot { id: Option<u64>, part: usize },
    Batches { next: u64 },
    Over,
}

/// The answer to one request.
#[derive(Clone, Debug)]
pub struct Answer {
    state: State,
}

impl Answer {
    /// The answer to a request for everything from a sequence on.
    #[must_use]
    pub const fn new(from: EventSeq) -> Self {
        Self { state: State::Asked { from: from.0 } }
    }

    /// The next step.
    #[must_use]
    pub fn step(&mut self, buffer: &ReplayBuffer, snapshot: Option<&TakenSnapshot>) -> Step {
        if let State::Asked { from } = self.state {
            let is_kept = from >= buffer.first().0 || from >= buffer.next().0;
            self.state = if is_kept { State::Batches { next: from } } else { State::Snapshot { id: None, part: 0 } };
        }
        if let State::Snapshot { id, part } = &mut self.state {
            let Some(snapshot) = snapshot else { return Step::NeedsSnapshot };
            if *id != Some(snapshot.id()) {
                (*id, *part) = (Some(snapshot.id()), 0);
            }
            match (snapshot.part(*part), snapshot.progress(), snapshot.watermark()) {
                (Some(payload), ..) => return Step::Send(Message::Part(Arc::clone(payload))),
                (None, Progress::Whole, Some(watermark)) => self.state = State::Batches { next: watermark.0 + 1 },
                (None, Progress::Failed(_), _) => return Step::GiveUp,
                (None, ..) => return Step::NeedsSnapshot,
            }
        }
        match self.state {
            State::Batches { next } => {
                let at = EventSeq(next.max(buffer.first().0));
                match buffer.get(at) {
                    Some(payload) => Step::Send(Message::Batch(at, Arc::clone(payload))),
                    None => Step::Send(Message::End),
                }
            }
            State::Asked { .. } | State::Snapshot { .. } | State::Over => Step::Over,
        }
    }

    /// Notes that the message was sent.
    pub const fn sent(&mut self, message: &Message) {
        match (message, &mut self.state) {
            (Message::Batch(seq, _), State::Batches { next }) => *next = seq.0 + 1,
            (Message::Part(_), State::Snapshot { part, .. }) => *part += 1,
            _ => self.state = State::Over,
        }
    }

    /// Whether some parts of a snapshot were sent and not all.
    #[must_use]
    pub const fn is_in_snapshot(&self) -> bool {
        matches!(self.state, State::Snapshot { part: 1.., .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::SourceTrust;
    use crate::ingest::{DumpBegin, DumpChunk, DumpPart, References, RelayName, Republished};
    use crate::trust::Trust;

    const NAME: RelayName = RelayName { generation: 1, worker_id: None, dp_rank: None };

    fn buffer(first: u64, next: u64) -> ReplayBuffer {
        let mut buffer = ReplayBuffer::new(100, 1000);
        for seq in first..next {
            buffer.push(EventSeq(seq), vec![seq as u8].into());
        }
        buffer
    }

    /// The messages sent, `b3` a batch, `p` a part and `end` the marker; and the step after them.
    fn all(from: u64, buffer: &ReplayBuffer, snapshot: Option<&TakenSnapshot>) -> (Vec<String>, Step) {
        let (mut answer, mut sent) = (Answer::new(EventSeq(from)), Vec::new());
        loop {
            match answer.step(buffer, snapshot) {
                Step::Send(message) => {
                    answer.sent(&message);
                    sent.push(match message {
                        Message::Batch(seq, _) => format!("b{seq}"),
                        Message::Part(_) => "p".into(),
                        Message::End => "end".into(),
                    });
                }
                step => return (sent, step),
            }
        }
    }

    fn begin(republished: Option<Republished>) -> DumpPart {
        let (remembered, groups) = (Vec::new(), Vec::new());
        DumpPart::Begin(Box::new(DumpBegin {
            watermark: None,
            remembered,
            scheme: None,
            groups,
            trust: Trust::default(),
            view: SourceTrust::default(),
            lifetime: None,
            republished,
        }))
    }

    #[test]
    fn every_row_of_the_table() {
        let kept = buffer(4, 7);
        assert_eq!(all(5, &kept, None), (vec!["b5".into(), "b6".into(), "end".into()], Step::Over));
        assert_eq!(all(7, &kept, None), (vec!["end".into()], Step::Over));
        assert_eq!(all(70, &kept, None), (vec!["end".into()], Step::Over));
        assert_eq!(all(0, &buffer(0, 0), None), (vec!["end".into()], Step::Over));
        assert_eq!(all(3, &kept, None), (vec![], Step::NeedsSnapshot));

        let last = Republished { seq: EventSeq(5), payload_hash: 9, generation: 1 };
        let mut snapshot = TakenSnapshot::new(1, NAME);
        snapshot.take(&begin(Some(last)));
        assert_eq!(all(3, &kept, Some(&snapshot)), (vec!["p".into()], Step::NeedsSnapshot));
        snapshot.take(&DumpPart::Chunk(DumpChunk::default()));
        snapshot.take(&DumpPart::End(References::default()));
        let whole = ["p", "p", "p", "b6", "end"].map(String::from).to_vec();
        assert_eq!(all(3, &kept, Some(&snapshot)), (whole, Step::Over));
        let late = ["p", "p", "p", "b9", "end"].map(String::from).to_vec();
        assert_eq!(all(3, &buffer(9, 10), Some(&snapshot)), (late, Step::Over), "the requester sees the gap");
    }

    #[test]
    fn an_answer_never_mixes_the_parts_of_two_snapshots() {
        let kept = buffer(9, 11);
        let [mut older, mut newer] = [1, 2].map(|id| TakenSnapshot::new(id, NAME));
        for (snapshot, seq) in [(&mut older, 5), (&mut newer, 9)] {
            snapshot.take(&begin(Some(Republished { seq: EventSeq(seq), payload_hash: 9, generation: 1 })));
            snapshot.take(&DumpPart::Chunk(DumpChunk::default()));
            snapshot.take(&DumpPart::End(References::default()));
        }
        let mut answer = Answer::new(EventSeq(3));
        for (snapshot, part) in [(&older, 0), (&older, 1), (&newer, 0), (&newer, 1), (&newer, 2)] {
            let message = Message::Part(Arc::clone(snapshot.part(part).expect("whole")));
            assert_eq!(answer.step(&kept, Some(snapshot)), Step::Send(message.clone()));
            answer.sent(&message);
        }
        let batch = Message::Batch(EventSeq(10), vec![10].into());
        assert_eq!(answer.step(&kept, Some(&newer)), Step::Send(batch), "three parts of the newer one were sent");
    }

    #[test]
    fn an_answer_keeps_its_place_as_long_as_its_requester_reads_fast_enough() {
        let per_s = RELAY_ANSWER_BYTES_PER_S_MIN;
        let mut pace = Pace::default();
        assert_eq!(pace.behind_bytes(1 << 40), 0, "it waits for a snapshot");
        pace.sent(per_s as usize, 1_000);
        let late_ms = 1_000 + RELAY_ANSWER_STALL_MS_MAX + 1_000;
        assert_eq!((pace.behind_bytes(late_ms), pace.behind_bytes(late_ms + 2_000)), (0, 2 * per_s));
        pace.sent(2 * per_s as usize, late_ms + 2_000);
        assert_eq!((pace.behind_bytes(late_ms + 2_000), pace.behind_bytes(u64::MAX / per_s) > 0), (0, true));
    }

    #[test]
    fn a_snapshot_that_fails_ends_the_answer_without_a_marker() {
        let kept = buffer(4, 7);
        let mut snapshot = TakenSnapshot::new(1, NAME);
        snapshot.take(&begin(None));
        assert!(matches!(snapshot.progress(), Progress::Failed(_)), "nothing was sent before it began");
        assert_eq!(all(3, &kept, Some(&snapshot)), (vec![], Step::GiveUp));
        let mut headless = TakenSnapshot::new(2, NAME);
        headless.take(&DumpPart::End(References::default()));
        assert_eq!(all(3, &kept, Some(&headless)), (vec![], Step::GiveUp));
    }
}
