//! The answer to one question for lost batches, message by message: pure.
//!
//! | what is asked for | the answer |
//! |---|---|
//! | a batch that has not been sent | the end marker: who asks knows another stream |
//! | a batch in the buffer | it, all that follow, the end marker |
//! | an older one | a snapshot, the batches behind its watermark, the end marker |
//!
//! Where batches leave the buffer before they are sent, the answer goes on with the oldest that is there. Whoever asked
//! sees the hole and asks again. Without a snapshot where one is needed there is no end marker either: nothing may be
//! taken for a whole answer that is not.

use std::sync::Arc;

use super::buffer::ReplayBuffer;
use super::snapshot::{Progress, TakenSnapshot};
use crate::ids::EventSeq;

/// One message of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// A batch.
    Batch(EventSeq, Arc<[u8]>),
    /// A part of a snapshot.
    Part(Arc<[u8]>),
    /// There is no more.
    End,
}

/// What is to be done for an answer now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Send this, and tell [`Answer::sent`].
    Send(Message),
    /// A snapshot is needed, and there is none that can be used, or no more of it yet.
    NeedsSnapshot,
    /// The snapshot failed: there will be no more.
    GiveUp,
    /// All is sent.
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Asked { from: u64 },
    Snapshot { part: usize },
    Batches { next: u64 },
    Over,
}

/// One answer.
#[derive(Clone, Debug)]
pub struct Answer {
    state: State,
}

impl Answer {
    /// The answer to a question for everything from a sequence on.
    #[must_use]
    pub const fn new(from: EventSeq) -> Self {
        Self { state: State::Asked { from: from.0 } }
    }

    /// What is to be done now.
    #[must_use]
    pub fn step(&mut self, buffer: &ReplayBuffer, snapshot: Option<&TakenSnapshot>) -> Step {
        if let State::Asked { from } = self.state {
            let is_kept = from >= buffer.first().0 || from >= buffer.next().0;
            self.state = if is_kept { State::Batches { next: from } } else { State::Snapshot { part: 0 } };
        }
        if let State::Snapshot { part } = self.state {
            let Some(snapshot) = snapshot else { return Step::NeedsSnapshot };
            match (snapshot.part(part), snapshot.progress(), snapshot.watermark()) {
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

    /// A message was sent.
    pub const fn sent(&mut self, message: &Message) {
        match (message, &mut self.state) {
            (Message::Batch(seq, _), State::Batches { next }) => *next = seq.0 + 1,
            (Message::Part(_), State::Snapshot { part }) => *part += 1,
            _ => self.state = State::Over,
        }
    }

    /// Whether some parts of a snapshot were sent and not all: no other one can take its place.
    #[must_use]
    pub const fn is_in_snapshot(&self) -> bool {
        matches!(self.state, State::Snapshot { part: 1.. })
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

    /// What is sent, `b3` a batch, `p` a part and `end` the marker; and what comes then.
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

    fn begin() -> DumpPart {
        let (remembered, groups) = (Vec::new(), Vec::new());
        DumpPart::Begin(Box::new(DumpBegin {
            watermark: None,
            remembered,
            scheme: None,
            groups,
            trust: Trust::default(),
            view: SourceTrust::default(),
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
        snapshot.take(&begin(), Some(last));
        assert_eq!(all(3, &kept, Some(&snapshot)), (vec!["p".into()], Step::NeedsSnapshot));
        snapshot.take(&DumpPart::Chunk(DumpChunk::default()), None);
        snapshot.take(&DumpPart::End(References::default()), None);
        let whole = ["p", "p", "p", "b6", "end"].map(String::from).to_vec();
        assert_eq!(all(3, &kept, Some(&snapshot)), (whole, Step::Over));
        let late = ["p", "p", "p", "b9", "end"].map(String::from).to_vec();
        assert_eq!(all(3, &buffer(9, 10), Some(&snapshot)), (late, Step::Over), "whoever asked sees the hole");
    }

    #[test]
    fn a_snapshot_that_fails_ends_the_answer_without_a_marker() {
        let kept = buffer(4, 7);
        let mut snapshot = TakenSnapshot::new(1, NAME);
        snapshot.take(&begin(), None);
        assert!(matches!(snapshot.progress(), Progress::Failed(_)), "nothing was sent before it began");
        assert_eq!(all(3, &kept, Some(&snapshot)), (vec![], Step::GiveUp));
        let mut headless = TakenSnapshot::new(2, NAME);
        headless.take(&DumpPart::End(References::default()), None);
        assert_eq!(all(3, &kept, Some(&headless)), (vec![], Step::GiveUp));
    }
}
