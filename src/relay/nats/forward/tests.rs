//! What readers find in a stream that loses answers, connections and messages.

use proptest::prelude::*;

use super::*;
use crate::event::SourceTrust;
use crate::ingest::{DumpBegin, DumpChunk, DumpPart, References, RelayName, Republished};
use crate::relay::ReplayBuffer;
use crate::trust::Trust;

const BUFFER: usize = 8;
const NAME: RelayName = RelayName { generation: 1, worker_id: None, dp_rank: None };

fn kept() -> Kept {
    Kept { buffer: ReplayBuffer::new(BUFFER, usize::MAX), heartbeat: None, forgotten: 0 }
}

/// A whole snapshot of what a buffer's batches have made, in `chunks` and two parts.
fn snapshot(id: u64, kept: &Kept, chunks: usize) -> TakenSnapshot {
    let seq = EventSeq(kept.buffer.next().0 - 1);
    let begin = DumpBegin {
        watermark: None,
        remembered: Vec::new(),
        scheme: None,
        groups: Vec::new(),
        trust: Trust::default(),
        view: SourceTrust::default(),
        lifetime: None,
        republished: Some(Republished { seq, payload_hash: 1, generation: 1 }),
    };
    let mut snapshot = TakenSnapshot::new(id, NAME);
    snapshot.take(&DumpPart::Begin(Box::new(begin)));
    (0..chunks).for_each(|_| snapshot.take(&DumpPart::Chunk(DumpChunk::default())));
    snapshot.take(&DumpPart::End(References::default()));
    snapshot
}

/// A relay, and a stream that stores what it sends.
struct World {
    forward: Forward,
    kept: Kept,
    snapshot: Option<TakenSnapshot>,
    snapshots: u64,
    /// Messages in the order of their numbers, from 1; `None` = dropped.
    stored: Vec<Option<Unstored>>,
    /// Answers that have not come yet.
    answers: VecDeque<(u64, u64)>,
    now_ms: u64,
}

impl World {
    fn new() -> Self {
        Self {
            forward: Forward::new(7, BUFFER as u64),
            kept: kept(),
            snapshot: None,
            snapshots: 0,
            stored: Vec::new(),
            answers: VecDeque::new(),
            now_ms: 0,
        }
    }

    fn batch(&mut self) {
        let seq = self.kept.buffer.next();
        self.kept.buffer.push(seq, seq.0.to_be_bytes().as_slice().into());
    }

    /// The stream takes a message, unless it has one of this name.
    fn send(&mut self, message: &Unstored) {
        let first = self.stored.iter().position(|of| of.as_ref().is_some_and(|of| of.name == message.name));
        let place = first.unwrap_or_else(|| {
            self.stored.push(Some(message.clone()));
            self.stored.len() - 1
        });
        self.answers.push_back((message.number, place as u64 + 1));
    }

    /// One step; `false` = there is nothing to do.
    fn step(&mut self, chunks: usize) -> bool {
        if !self.forward.is_in_snapshot() {
            let follows = |snapshot: &TakenSnapshot| {
                snapshot.watermark().is_some_and(|watermark| watermark.0 + 1 >= self.kept.buffer.first().0)
            };
            self.snapshot = self.snapshot.take().filter(follows);
        }
        match self.forward.step(&self.kept, self.snapshot.as_ref(), self.now_ms) {
            Todo::Send(message) => self.send(&message),
            Todo::NeedsSnapshot => {
                self.snapshots += 1;
                self.snapshot = Some(snapshot(self.snapshots, &self.kept, chunks));
            }
            Todo::Nothing | Todo::Failed => return false,
        }
        true
    }

    fn answer(&mut self) {
        let Some((number, place)) = self.answers.pop_front() else { return };
        if let Some(before) = self.forward.stored(number, place, self.now_ms) {
            for stored in self.stored.iter_mut().take(before as usize - 1) {
                *stored = None;
            }
            assert_eq!(self.check(), Ok(()));
        }
    }

    fn settle(&mut self) {
        // What ends a snapshot is a step without a message.
        while self.step(1) || self.step(1) || !self.answers.is_empty() {
            self.answer();
        }
    }

    /// Reads as one who joins, from the last start. The error says what is missing.
    fn check(&self) -> Result<(), String> {
        let starts = self.stored.iter().flatten().filter_map(|of| match of.what {
            What::Start(start) => Some(start),
            _ => None,
        });
        let Some(start) = starts.last() else { return Err("no start".into()) };
        if start.begins > 0 {
            let within = &self.stored[start.begins as usize - 1..start.ends as usize];
            let parts: Vec<(u64, usize)> = within
                .iter()
                .flatten()
                .filter_map(|of| match of.what {
                    What::Part { snapshot, part } => Some((snapshot, part)),
                    _ => None,
                })
                .collect();
            let snapshot = parts.first().map_or(0, |(snapshot, _)| *snapshot);
            let whole: Vec<(u64, usize)> = (0..parts.len()).map(|part| (snapshot, part)).collect();
            if parts != whole || parts.len() < 2 {
                return Err(format!("{start:?} has {parts:?}"));
            }
        }
        Ok(())
    }

    /// The batches that one who joins applies, in their order, as its gate lets them through.
    fn read(&self) -> Vec<u64> {
        let starts = self.stored.iter().flatten().filter_map(|of| match of.what {
            What::Start(start) => Some(start),
            _ => None,
        });
        let start = starts.last().expect("a start");
        let mut next = start.first.0;
        let mut read = Vec::new();
        for message in self.stored[start.batches as usize - 1..].iter().flatten() {
            if let What::Batch(seq) = message.what
                && seq == next
            {
                read.push(seq);
                next += 1;
            }
        }
        read
    }
}

#[test]
fn every_row_of_the_table() {
    let mut world = World::new();
    assert!(!world.step(1), "nothing was sent yet");
    (0..3).for_each(|_| world.batch());
    world.settle();
    let start = world.forward.start().expect("stored");
    assert_eq!((start.begins, start.batches, start.first), (0, 1, EventSeq(0)), "the first batch");
    assert_eq!(world.read(), [0, 1, 2]);
    assert!(world.forward.is_caught_up(&world.kept) && world.forward.is_settled());

    (0..BUFFER).for_each(|_| {
        world.batch();
        world.settle();
    });
    let start = world.forward.start().expect("stored");
    assert!(start.begins > 0 && start.first.0 >= BUFFER as u64, "{start:?}: a further snapshot");
    assert_eq!(world.stored[0].as_ref().map(|of| of.what), Some(What::Batch(0)), "of the start before");

    world.kept.buffer.forget();
    world.kept.forgotten += 1;
    world.batch();
    world.settle();
    let anew = world.forward.start().expect("stored");
    assert_eq!((anew.batches, anew.first), (anew.begins, world.kept.buffer.next()), "a generation has ended");
    world.batch();
    world.settle();
    assert_eq!(world.read(), [world.kept.buffer.next().0 - 1]);
}

#[test]
fn what_has_no_answer_is_sent_again_and_stored_once() {
    let mut world = World::new();
    (0..3).for_each(|_| world.batch());
    while world.step(1) {}
    world.answers.clear();
    assert_eq!(world.forward.late(NATS_STORED_MS_MAX - 1), []);
    let again = world.forward.late(NATS_STORED_MS_MAX);
    assert_eq!(again.iter().map(|of| of.what).collect::<Vec<_>>(), [What::Batch(0), What::Batch(1), What::Batch(2)]);
    again.iter().for_each(|message| world.send(message));
    world.settle();
    assert_eq!((world.read(), world.stored.len()), (vec![0, 1, 2], 4));
}

#[test]
fn no_more_waits_than_may() {
    let mut forward = Forward::new(7, 1 << 20);
    let mut kept = kept();
    let mut sent = 0;
    for seq in 0..2 * NATS_UNSTORED_MESSAGES_MAX as u64 {
        kept.buffer.push(EventSeq(seq), seq.to_be_bytes().as_slice().into());
        sent += usize::from(matches!(forward.step(&kept, None, 0), Todo::Send(_)));
    }
    assert_eq!(sent, NATS_UNSTORED_MESSAGES_MAX);
}

#[derive(Clone, Debug)]
enum Happening {
    Batch,
    Step {
        chunks: usize,
    },
    Answer,
    /// Answers are lost, and all is sent again.
    Reconnect,
    /// The same after messages were lost too.
    Lose {
        messages: usize,
    },
    Refuse,
    Forget,
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        6 => Just(Happening::Batch),
        12 => (0..4_usize).prop_map(|chunks| Happening::Step { chunks }),
        8 => Just(Happening::Answer),
        1 => Just(Happening::Reconnect),
        1 => (0..6_usize).prop_map(|messages| Happening::Lose { messages }),
        1 => Just(Happening::Refuse),
        1 => Just(Happening::Forget),
    ]
}

proptest! {
    #[test]
    fn readers_find_whole_snapshots_and_every_batch_whatever_the_stream_loses(
        happenings in prop::collection::vec(happening(), 0..300),
    ) {
        let mut world = World::new();
        for happening in happenings {
            match happening {
                Happening::Batch => world.batch(),
                Happening::Step { chunks } => drop(world.step(chunks)),
                Happening::Answer => world.answer(),
                Happening::Reconnect | Happening::Lose { .. } => {
                    if let Happening::Lose { messages } = happening {
                        // Those that were under way, and of which no answer has come.
                        for (_, place) in world.answers.iter().rev().take(messages) {
                            world.stored[*place as usize - 1] = None;
                        }
                    }
                    world.answers.clear();
                    let again = world.forward.again(world.now_ms);
                    again.iter().for_each(|message| world.send(message));
                }
                Happening::Refuse => world.forward.begin_anew(),
                Happening::Forget => {
                    world.kept.buffer.forget();
                    world.kept.forgotten += 1;
                }
            }
        }
        world.batch();
        world.settle();
        // What was lost before it began anew shows by its number; the next start leads past it.
        for _ in 0..=BUFFER {
            world.batch();
            world.settle();
        }
        prop_assert_eq!(world.check(), Ok(()));
        let start = world.forward.start().expect("stored");
        let wanted: Vec<u64> = (start.first.0..world.kept.buffer.next().0).collect();
        prop_assert_eq!(world.read(), wanted);
        prop_assert!(world.forward.is_caught_up(&world.kept));
    }
}
