//! Dumps and loads of one worker, step by step, beside streams that go on.

use crossbeam::channel::{Receiver, bounded};

use super::vllm::Batch;
use super::{C, Options, Rig, chain};
use crate::ids::EventSeq;
use crate::ingest::dump::{Loading, Sending, Step};
use crate::ingest::{AbortReason, DumpBegin, DumpPart, LoadAnswer, References};
use crate::limits::{DUMP_PARTS_MAX, DUMP_SLICE_BLOCKS, HELD_MESSAGES_MAX, TRANSFER_STALL_MS_MAX};
use crate::trust::TrustLevel;

impl Rig {
    fn dumping(&mut self, sending: &mut Sending) -> Step {
        self.now.uptime_ms += 1;
        sending.step(&mut self.streams[0], &mut self.space, self.now)
    }

    pub(super) fn loading(&mut self, loading: &mut Loading) -> Step {
        self.now.uptime_ms += 1;
        loading.step(&mut self.streams[0], &mut self.space, self.now)
    }

    /// Applies the messages that waited, as the shard does once the dump or load is over.
    pub(super) fn release(&mut self) {
        while !self.streams[0].release(&mut self.space, &mut self.scratch, self.now) {}
        self.streams[0].show(&mut self.space);
    }

    /// The whole dump of the first worker.
    pub(super) fn dump(&mut self) -> Vec<DumpPart> {
        let (mut sending, parts) = Sending::new();
        let mut taken = Vec::new();
        while self.dumping(&mut sending) != Step::Over {
            taken.extend(parts.try_iter());
        }
        self.release();
        taken.extend(parts.try_iter());
        taken
    }

    /// Loads a dump into the first worker.
    pub(super) fn load(&mut self, parts: Vec<DumpPart>) -> Result<References, AbortReason> {
        let last = self.streams[0].gate().last();
        let (mut loading, answers) = Loading::new(channel(parts));
        while self.loading(&mut loading) == Step::Moved {}
        self.release();
        assert_eq!(answers.try_recv(), Ok(LoadAnswer::Held { last }));
        ended(&answers)
    }

    pub(super) fn aborted(&self) -> Vec<(&'static str, u64)> {
        self.streams[0].view.transfers_aborted_by_reason().collect()
    }
}

/// The answer that ends a load.
pub(super) fn ended(answers: &Receiver<LoadAnswer>) -> Result<References, AbortReason> {
    match answers.try_iter().last() {
        Some(LoadAnswer::Loaded(references)) => Ok(references),
        Some(LoadAnswer::Failed(reason)) => Err(reason),
        other => panic!("{other:?}"),
    }
}

/// A channel with these parts whose sender is gone.
fn channel(parts: Vec<DumpPart>) -> Receiver<DumpPart> {
    let (sender, receiver) = bounded(parts.len());
    parts.into_iter().for_each(|part| sender.try_send(part).expect("room"));
    receiver
}

pub(super) fn begin_of(parts: &[DumpPart]) -> &DumpBegin {
    let Some(DumpPart::Begin(begin)) = parts.first() else { panic!("{parts:?}") };
    begin
}

fn last(parts: &Receiver<DumpPart>) -> Option<DumpPart> {
    parts.try_iter().last()
}

/// More blocks than two slices hold, in chains of 8.
pub(super) fn many() -> Batch {
    let chains = 2 * DUMP_SLICE_BLOCKS as u64 / 8 + 1;
    (0..chains).fold(Batch::new(0), |batch, chain| {
        let hashes: Vec<u64> = (1..=8).map(|at| chain * 10 + at).collect();
        let contents: Vec<u32> = std::iter::once(chain as u32 + 10).chain(1..8).collect();
        batch.stored(None, &hashes, &contents)
    })
}

#[test]
fn a_worker_answers_as_of_the_watermark_until_its_dump_ends_and_loses_nothing() {
    let mut rig = Rig::new(&Options { workers: 2, ..Options::default() });
    rig.send(0, &many());
    let (mut sending, parts) = Sending::new();
    assert_eq!(rig.dumping(&mut sending), Step::Moved);
    rig.send(1, &Batch::new(1).stored(None, &[9], &[7]));
    let now = rig.now;
    rig.streams[0].misframed(&mut rig.space, 1, now);
    rig.send(2, &Batch::new(2).stored(Some(9), &[19], &[8]));
    rig.send_bytes(1, 0, &chain(5).payload());
    assert_eq!((rig.depth(0, &[7, 8]).device, rig.depth(1, &[1, 2, 3]).device), (0, 3), "the other goes on");
    rig.expect(TrustLevel::Exact, &[], 0);
    let mut steps = 0;
    while rig.dumping(&mut sending) == Step::Moved {
        steps += 1;
    }
    assert!((2..=4).contains(&steps), "{steps}");
    rig.release();
    assert_eq!(rig.device(&[7, 8]), 2);
    rig.expect(TrustLevel::Exact, &[], 2);
    let parts: Vec<DumpPart> = parts.try_iter().collect();
    assert_eq!(begin_of(&parts).watermark, Some(EventSeq(0)));
    let chunks = parts.iter().filter_map(|part| if let DumpPart::Chunk(chunk) = part { Some(chunk) } else { None });
    let (mut blocks, mut references) = (0, References::default());
    for chunk in chunks {
        assert!(chunk.blocks() < DUMP_SLICE_BLOCKS + 8);
        blocks += chunk.blocks() as u64;
        (0..chunk.stores()).for_each(|number| references.add(&chunk.store(number).expect("a store")));
    }
    assert_eq!(blocks, 2 * DUMP_SLICE_BLOCKS as u64 + 8);
    assert_eq!(parts.last(), Some(&DumpPart::End(references)));
    assert_eq!((rig.count(C::Dumps), rig.count(C::MessagesHeld), rig.aborted()), (1, 3, vec![]));
}

#[test]
fn one_message_too_many_ends_the_dump_and_not_the_stream() {
    let mut rig = Rig::new(&Options::default());
    rig.send(0, &chain(0));
    let (mut sending, parts) = Sending::new();
    rig.dumping(&mut sending);
    let seqs = 1..=HELD_MESSAGES_MAX as u64 + 3;
    for seq in seqs.clone() {
        rig.take(0, seq, &Batch::new(seq as u32).stored(None, &[seq + 100], &[seq as u32 + 100]).payload());
        assert_eq!(rig.streams[0].is_releasing(), seq > HELD_MESSAGES_MAX as u64);
    }
    assert_eq!(rig.dumping(&mut sending), Step::Over);
    assert_eq!(last(&parts), Some(DumpPart::Aborted(AbortReason::Overflow)));
    rig.release();
    rig.expect(TrustLevel::Exact, &[], *seqs.end());
    assert_eq!(rig.streams[0].view.gauges.bound(), 3 + seqs.end());
    assert_eq!((rig.aborted(), rig.count(C::Dumps), rig.count(C::Gaps)), (vec![("overflow", 1)], 0, 0));
}

#[test]
fn a_batch_that_empties_the_worker_aborts_its_dump_at_once() {
    for (seq, stamp, reason) in [(0, 9, AbortReason::Restarted), (5, 5, AbortReason::Gap)] {
        let mut rig = Rig::new(&Options::default());
        rig.send(0, &chain(0));
        let (mut sending, parts) = Sending::new();
        rig.dumping(&mut sending);
        rig.send(0, &chain(0));
        rig.send(1, &Batch::new(1).stored(Some(13), &[14], &[4]));
        assert!(!rig.streams[0].is_releasing(), "a duplicate and the next empty nothing");
        rig.send(seq, &Batch::new(stamp).stored(None, &[21], &[7]));
        assert!(rig.streams[0].is_releasing());
        assert_eq!(rig.dumping(&mut sending), Step::Over);
        assert_eq!(last(&parts), Some(DumpPart::Aborted(reason)));
        rig.release();
        assert_eq!((rig.device(&[1]), rig.device(&[7])), (0, 1));
        assert_eq!((rig.count(C::Duplicates), rig.count(C::BlocksStored)), (1, 5), "in their order, each once");
        assert_eq!(rig.aborted(), [(reason.name(), 1)]);
    }
}

#[test]
fn a_broken_connection_aborts_the_dump_after_the_waiting_messages() {
    let mut rig = Rig::new(&Options::default());
    rig.send(0, &chain(0));
    let (mut sending, parts) = Sending::new();
    rig.dumping(&mut sending);
    rig.send(1, &Batch::new(1).stored(None, &[21], &[7]));
    let now = rig.now;
    rig.streams[0].break_hold(&mut rig.space, AbortReason::Disconnected, now);
    rig.release();
    assert_eq!(rig.device(&[7]), 1);
    rig.streams[0].disconnected(&mut rig.space, now);
    assert_eq!(rig.dumping(&mut sending), Step::Over, "also where all is applied already");
    assert_eq!(last(&parts), Some(DumpPart::Aborted(AbortReason::Disconnected)));
    rig.send(0, &chain(9));
    rig.expect(TrustLevel::Exact, &[], 0);
}

#[test]
fn a_receiver_that_goes_or_sleeps_ends_the_dump() {
    let mut rig = Rig::new(&Options::default());
    rig.send(0, &chain(0));
    let (mut sending, parts) = Sending::new();
    rig.dumping(&mut sending);
    rig.send(1, &Batch::new(1).stored(None, &[21], &[7]));
    drop(parts);
    assert_eq!(rig.dumping(&mut sending), Step::Over);
    rig.release();
    assert_eq!((rig.device(&[7]), rig.aborted()), (1, vec![("peer_gone", 1)]));

    let mut rig = Rig::new(&Options::default());
    let slices = DUMP_PARTS_MAX as u64 + 2;
    for slice in 0..slices {
        let hashes: Vec<u64> = (1..=DUMP_SLICE_BLOCKS as u64 + 2).map(|at| slice * 10_000 + at).collect();
        let contents: Vec<u32> = hashes.iter().map(|hash| *hash as u32).collect();
        rig.send(slice, &Batch::new(0).stored(None, &hashes, &contents));
    }
    let (mut sending, parts) = Sending::new();
    while rig.dumping(&mut sending) == Step::Moved {}
    assert_eq!(parts.len(), DUMP_PARTS_MAX);
    parts.try_recv().expect("the first");
    assert_eq!((rig.dumping(&mut sending), rig.dumping(&mut sending)), (Step::Moved, Step::Waits), "it goes on");
    rig.now.uptime_ms += TRANSFER_STALL_MS_MAX;
    assert_eq!(rig.dumping(&mut sending), Step::Over);
    assert_eq!(last(&parts), Some(DumpPart::Aborted(AbortReason::Stalled)), "there is always room for the last part");
}
