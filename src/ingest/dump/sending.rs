//! A dump under way: what is walked, and who receives it.

use crossbeam::channel::{Receiver, Sender, TrySendError, bounded};

use super::{AbortReason, DumpBegin, DumpChunk, DumpPart, Patience, References, Step};
use crate::index::DumpCursor;
use crate::ingest::republish::Republisher;
use crate::ingest::stream::{Home, Now, Stream};
use crate::limits::{DUMP_PARTS_MAX, DUMP_SLICE_BLOCKS};
use crate::metrics::WorkerCounter;

/// One dump, from its request to its last part.
#[derive(Debug)]
pub(in crate::ingest) struct Sending {
    parts: Sender<DumpPart>,
    begun: bool,
    cursor: DumpCursor,
    sent: References,
    patience: Patience,
}

impl Sending {
    /// A dump that has not begun, and where its parts will be.
    pub(in crate::ingest) fn new() -> (Self, Receiver<DumpPart>) {
        // The last place is the last part's: it never finds the channel full.
        let (parts, received) = bounded(DUMP_PARTS_MAX + 1);
        let cursor = DumpCursor::default();
        let (sent, patience) = (References::default(), Patience::default());
        (Self { parts, begun: false, cursor, sent, patience }, received)
    }

    /// Walks one slice.
    pub(in crate::ingest) fn step(&mut self, stream: &mut Stream, home: &mut Home, now: Now) -> Step {
        if let Some(reason) = stream.take_broken_off() {
            return self.abort(stream, home, reason, now);
        }
        if self.parts.len() >= DUMP_PARTS_MAX {
            if self.patience.is_over(now.uptime_ms) {
                return self.abort(stream, home, AbortReason::Stalled, now);
            }
            return Step::Waits;
        }
        if !self.begun {
            return self.begin(stream, home, now);
        }
        self.patience.renew();
        let (mut chunk, sent) = (DumpChunk::default(), &mut self.sent);
        let more = home.writer.dump(stream.slot, &mut self.cursor, DUMP_SLICE_BLOCKS, &mut |store| {
            chunk.push(&store);
            sent.add(&store);
        });
        if chunk.stores() > 0 && !self.send(DumpPart::Chunk(chunk)) {
            return self.abort(stream, home, AbortReason::PeerGone, now);
        }
        if more {
            return Step::Moved;
        }
        if !self.send(DumpPart::End(self.sent)) {
            return self.abort(stream, home, AbortReason::PeerGone, now);
        }
        stream.finish_hold(now);
        stream.count(WorkerCounter::Dumps, 1);
        tracing::info!(worker = %stream.worker, references = self.sent.blocks, "worker dumped");
        Step::Over
    }

    fn begin(&mut self, stream: &mut Stream, home: &mut Home, now: Now) -> Step {
        // What waited for the dump before this one comes first.
        if stream.is_held() {
            return Step::Waits;
        }
        // What moves to its place while it is walked might be given out twice, or not at all.
        if home.writer.is_deferring(stream.slot) {
            let is_over = self.patience.is_over(now.uptime_ms);
            return if is_over { self.abort(stream, home, AbortReason::Stalled, now) } else { Step::Waits };
        }
        self.begun = true;
        let (watermark, remembered) = stream.hold_for_dump();
        stream.say(home);
        stream.said(Republisher::dump_begins);
        let (scheme, groups) = (home.scheme.get(), stream.groups.clone());
        let (trust, view) = (stream.trust(), stream.view_of_blocks());
        let begin = DumpBegin { watermark, remembered, scheme, groups, trust, view };
        if !self.send(DumpPart::Begin(Box::new(begin))) {
            return self.abort(stream, home, AbortReason::PeerGone, now);
        }
        Step::Moved
    }

    /// Ends it before its end.
    fn abort(&mut self, stream: &mut Stream, home: &mut Home, reason: AbortReason, now: Now) -> Step {
        if self.begun {
            stream.break_hold(home, reason, now);
            stream.take_broken_off();
        }
        stream.view.transfers_aborted.add(reason as usize, 1);
        tracing::warn!(worker = %stream.worker, reason = reason.name(), "dump broken off; its worker's events go on");
        self.refuse(reason);
        Step::Over
    }

    /// Says why there will be no more of it.
    pub(in crate::ingest) fn refuse(&self, reason: AbortReason) {
        // Whoever asked may be gone, which is then the reason.
        let _ = self.parts.try_send(DumpPart::Aborted(reason));
    }

    /// Hands a part over; `false` = nobody is there to take it.
    fn send(&self, part: DumpPart) -> bool {
        match self.parts.try_send(part) {
            Ok(()) => true,
            Err(TrySendError::Disconnected(_)) => false,
            Err(TrySendError::Full(_)) => {
                debug_assert!(false, "a part was sent without room for it");
                false
            }
        }
    }
}
