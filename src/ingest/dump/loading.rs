//! A load under way: where its parts come from, and what they add up to so far.

use crossbeam::channel::{Receiver, Sender, TryRecvError, bounded};

use super::{AbortReason, DumpBegin, DumpChunk, DumpPart, LoadAnswer, Patience, References, Step};
use crate::event::gate::SequenceGate;
use crate::ingest::stream::{Home, Now, Stream};
use crate::limits::DUMP_SLICE_BLOCKS;
use crate::metrics::WorkerCounter;

/// One load, from its request to its answer.
#[derive(Debug)]
pub(in crate::ingest) struct Loading {
    parts: Receiver<DumpPart>,
    answers: Sender<LoadAnswer>,
    holds: bool,
    begin: Option<Box<DumpBegin>>,
    /// The chunk that is being stored, and the number of its next store.
    chunk: Option<(DumpChunk, usize)>,
    stored: References,
    /// Whether the dump has ended as its chunks add up.
    whole: bool,
    patience: Patience,
}

/// What a slice of a load came to.
enum Slice {
    /// Everything so far is stored.
    Stored,
    /// The other side has sent no more.
    Empty,
    /// The dump is stored in full.
    Whole(Box<DumpBegin>),
}

impl Loading {
    /// A load that has not begun, and where its answers will be.
    pub(in crate::ingest) fn new(parts: Receiver<DumpPart>) -> (Self, Receiver<LoadAnswer>) {
        // Held, and how it ended: neither ever finds the channel full.
        let (answers, answered) = bounded(2);
        (Self::of(parts, answers), answered)
    }

    /// The same, with where its answers go.
    pub(super) fn of(parts: Receiver<DumpPart>, answers: Sender<LoadAnswer>) -> Self {
        let (stored, patience) = (References::default(), Patience::default());
        Self { parts, answers, holds: false, begin: None, chunk: None, stored, whole: false, patience }
    }

    /// Whether the worker's messages wait for it already.
    pub(in crate::ingest) const fn has_begun(&self) -> bool {
        self.holds
    }

    /// Stores one slice.
    pub(in crate::ingest) fn step(&mut self, stream: &mut Stream, home: &mut Home, now: Now) -> Step {
        if let Some(reason) = stream.take_broken_off() {
            return self.abort(stream, home, reason, now);
        }
        if !self.holds {
            // What waited for the dump or load before this one comes first.
            if stream.is_held() {
                return Step::Waits;
            }
            stream.hold_for_load();
            self.holds = true;
            self.answer(LoadAnswer::Held { last: stream.gate().last() });
        }
        let slice = self.slice(stream, home, now);
        stream.show(home);
        match slice {
            Err(reason) => self.abort(stream, home, reason, now),
            Ok(Slice::Stored) => {
                self.patience.renew();
                Step::Moved
            }
            Ok(Slice::Empty) if self.patience.is_over(now.uptime_ms) => {
                let reason = if self.whole { AbortReason::OtherIncarnation } else { AbortReason::Stalled };
                self.abort(stream, home, reason, now)
            }
            Ok(Slice::Empty) => Step::Waits,
            Ok(Slice::Whole(begin)) => {
                stream.loaded(home, &begin, now);
                stream.show(home);
                stream.count(WorkerCounter::Loads, 1);
                let references = self.stored.blocks;
                tracing::info!(worker = %stream.worker, references, watermark = ?begin.watermark, "dump loaded");
                self.answer(LoadAnswer::Loaded(self.stored));
                Step::Over
            }
        }
    }

    fn slice(&mut self, stream: &mut Stream, home: &mut Home, now: Now) -> Result<Slice, AbortReason> {
        let mut blocks = 0;
        while blocks < DUMP_SLICE_BLOCKS {
            if self.whole {
                return self.follows(stream);
            }
            if let Some((chunk, number)) = &mut self.chunk {
                let Some(store) = chunk.store(*number) else {
                    self.chunk = None;
                    continue;
                };
                *number += 1;
                blocks += store.hashes.len().max(1);
                self.stored.add(&store);
                stream.load_store(home, &store, now)?;
                continue;
            }
            match (self.parts.try_recv(), self.begin.is_some()) {
                (Ok(DumpPart::Begin(begin)), false) => {
                    agrees(&begin, stream.gate())?;
                    stream.begin_load(home, &begin, now)?;
                    self.begin = Some(begin);
                }
                (Ok(DumpPart::Chunk(chunk)), true) => {
                    self.chunk = Some((chunk, 0));
                    blocks += 1;
                }
                (Ok(DumpPart::End(end)), true) if end == self.stored => self.whole = true,
                (Ok(DumpPart::Aborted(_)), _) => return Err(AbortReason::SourceAborted),
                (Ok(_), _) => return Err(AbortReason::Corrupt),
                (Err(TryRecvError::Empty), _) if blocks == 0 => return Ok(Slice::Empty),
                (Err(TryRecvError::Empty), _) => return Ok(Slice::Stored),
                (Err(TryRecvError::Disconnected), _) => return Err(AbortReason::PeerGone),
            }
        }
        Ok(Slice::Stored)
    }

    /// Whether the stream that waits is the one that was dumped. Where it is behind, that shows once it has come
    /// to the payloads that the dump remembers.
    fn follows(&mut self, stream: &mut Stream) -> Result<Slice, AbortReason> {
        let Some(begin) = self.begin.take_if(|begin| stream.follows(begin)) else {
            return match &self.begin {
                Some(begin) if stream.contradicts(begin) => Err(AbortReason::OtherIncarnation),
                _ => Ok(Slice::Empty),
            };
        };
        Ok(Slice::Whole(begin))
    }

    /// Ends it before its end.
    fn abort(&mut self, stream: &mut Stream, home: &mut Home, reason: AbortReason, now: Now) -> Step {
        if self.holds {
            stream.break_hold(home, reason, now);
            stream.take_broken_off();
            stream.show(home);
        }
        stream.view.transfers_aborted.add(reason as usize, 1);
        tracing::warn!(worker = %stream.worker, reason = reason.name(), "dump not loaded; the worker's events go on");
        self.refuse(reason);
        Step::Over
    }

    /// Says why there will be no more of it.
    pub(in crate::ingest) fn refuse(&self, reason: AbortReason) {
        self.answer(LoadAnswer::Failed(reason));
    }

    fn answer(&self, answer: LoadAnswer) {
        // Whoever asked may be gone; the worker is loaded all the same.
        let _ = self.answers.try_send(answer);
    }
}

/// Whether what the worker's stream has seen so far can be the beginning of what the dump contains.
fn agrees(begin: &DumpBegin, gate: &SequenceGate) -> Result<(), AbortReason> {
    let watermark = begin.watermark.ok_or(AbortReason::NoWatermark)?;
    let Some(last) = gate.last() else { return Ok(()) };
    if last > watermark {
        return Err(AbortReason::Outdated);
    }
    let there = begin.remembered.iter().find(|(seq, _)| *seq == last).map(|(_, hash)| *hash);
    if there.is_some() && there != gate.payload_hash(last) { Err(AbortReason::OtherIncarnation) } else { Ok(()) }
}
