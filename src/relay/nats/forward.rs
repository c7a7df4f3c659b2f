//! What a relay stores in a stream of a NATS server, message by message. Pure.
//!
//! | state | what comes next |
//! |---|---|
//! | nothing was stored, and the buffer has batch 0 | the batches from 0 on; once 0 is stored, the start |
//! | nothing was stored, and it has not; or anew | a snapshot, then the batches behind it; once all parts are stored, the start |
//! | as many batches after the last start as the buffer keeps | a further snapshot between the batches; once all its parts are stored, the start |
//! | the start is stored | readers need nothing from before the start before it |
//!
//! Batches come before parts, so live readers do not wait for a snapshot.
//!
//! A bounded number of messages wait for the stream's answer. After a while without an answer, or on a new connection, all of
//! them are sent again, in the same order and under the same names: the stream stores none of them twice. It begins anew
//! when a message is refused, when the buffer no longer has the next batch, and when the relay's generation ends. Messages of
//! before may then be missing in the stream. The batches' numbers show that to readers, and the new start leads past it.

use std::collections::VecDeque;

use bytes::Bytes;

use crate::ids::EventSeq;
use crate::limits::{NATS_STORED_MS_MAX, NATS_UNSTORED_BYTES_MAX, NATS_UNSTORED_MESSAGES_MAX};
use crate::nats::jetstream::{Frame, Kind, Start};
use crate::relay::publish::Kept;
use crate::relay::snapshot::{Progress, TakenSnapshot};

/// What a message is, and which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Batch(u64),
    Part { snapshot: u64, part: usize },
    Start(Start),
}

impl What {
    pub(super) const fn kind(self) -> Kind {
        match self {
            Self::Batch(_) => Kind::Batch,
            Self::Part { .. } => Kind::Part,
            Self::Start(_) => Kind::Start,
        }
    }
}

/// A message that waits for the stream's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Unstored {
    /// Counts messages; the answer names it.
    pub(super) number: u64,
    pub(super) what: What,
    /// No other message of any relay has it.
    pub(super) name: String,
    pub(super) bytes: Bytes,
    is_stored: bool,
}

/// What is to be done next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Todo {
    Send(Unstored),
    NeedsSnapshot,
    /// The snapshot failed: another one is needed after a while.
    Failed,
    Nothing,
}

/// With what readers begin, until it is stored. Numbers are JetStream's; 0 = not known yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beginning {
    FirstBatch {
        stored: u64,
    },
    Snapshot {
        /// Counts the snapshots of this relay.
        snapshot: u64,
        /// The next part.
        part: usize,
        /// All of its parts, once it is whole.
        parts: Option<usize>,
        first: EventSeq,
        begins: u64,
        /// The last part that was stored.
        last: (usize, u64),
        batches: u64,
    },
}

impl Beginning {
    const fn snapshot(snapshot: u64) -> Self {
        Self::Snapshot { snapshot, part: 0, parts: None, first: EventSeq(0), begins: 0, last: (0, 0), batches: 0 }
    }

    /// The start, once everything before it is stored.
    fn start(&self, run: u64) -> Option<Start> {
        match *self {
            Self::FirstBatch { stored: 0 } => None,
            Self::FirstBatch { stored } => Some(Start { run, begins: 0, ends: 0, batches: stored, first: EventSeq(0) }),
            Self::Snapshot { parts, first, begins, last: (part, ends), batches, .. } => {
                let batches = if batches == 0 { begins } else { batches };
                (begins > 0 && parts == Some(part + 1)).then_some(Start { run, begins, ends, batches, first })
            }
        }
    }
}

#[derive(Debug)]
pub(in crate::relay) struct Forward {
    /// Drawn at the start, so that no other run names a message alike.
    run: u64,
    /// Batches after which a snapshot is stored again.
    snapshot_every_batches: u64,
    /// Counts how often it began anew.
    anew: u64,
    /// The next batch; `None` = the first one behind the snapshot that is to be sent.
    next: Option<u64>,
    /// [`Kept::forgotten`] when it began.
    forgotten: u64,
    beginning: Option<Beginning>,
    is_start_sent: bool,
    unstored: VecDeque<Unstored>,
    unstored_bytes: usize,
    sent: u64,
    snapshots: u64,
    /// The newest batches that are stored, with JetStream's numbers.
    places: VecDeque<(u64, u64)>,
    batches_since_start: u64,
    start: Option<Start>,
    heard_ms: u64,
}

impl Forward {
    pub(in crate::relay) const fn new(run: u64, snapshot_every_batches: u64) -> Self {
        Self {
            run,
            snapshot_every_batches,
            anew: 0,
            next: None,
            forgotten: 0,
            beginning: None,
            is_start_sent: false,
            unstored: VecDeque::new(),
            unstored_bytes: 0,
            sent: 0,
            snapshots: 0,
            places: VecDeque::new(),
            batches_since_start: 0,
            start: None,
            heard_ms: 0,
        }
    }

    /// The start that is stored.
    pub(super) const fn start(&self) -> Option<Start> {
        self.start
    }

    /// Whether the start that is stored is the one that readers are to find.
    pub(super) const fn is_settled(&self) -> bool {
        self.beginning.is_none() && self.next.is_some()
    }

    /// Whether parts of a snapshot were sent and not all: another one cannot take its place then.
    pub(super) const fn is_in_snapshot(&self) -> bool {
        matches!(self.beginning, Some(Beginning::Snapshot { part: 1.., parts: None, .. }))
    }

    /// Whether the stream has every batch.
    pub(super) fn is_caught_up(&self, kept: &Kept) -> bool {
        self.unstored.is_empty() && self.next == Some(kept.buffer.next().0) && self.forgotten == kept.forgotten
    }

    /// Drops what waits. What comes next begins with a snapshot.
    pub(super) fn begin_anew(&mut self) {
        self.anew += 1;
        (self.next, self.beginning, self.is_start_sent) = (None, None, false);
        self.places.clear();
        self.unstored.clear();
        self.unstored_bytes = 0;
    }

    /// What is to be done next.
    pub(super) fn step(&mut self, kept: &Kept, snapshot: Option<&TakenSnapshot>, now_ms: u64) -> Todo {
        if self.unstored.len() >= NATS_UNSTORED_MESSAGES_MAX || self.unstored_bytes > NATS_UNSTORED_BYTES_MAX {
            return Todo::Nothing;
        }
        let is_behind = |next: u64| next < kept.buffer.first().0 || self.forgotten != kept.forgotten;
        if self.next.is_some_and(is_behind) {
            self.begin_anew();
        }
        if self.next.is_none() && self.beginning.is_none() {
            if kept.buffer.next() == EventSeq(0) {
                return Todo::Nothing;
            }
            self.forgotten = kept.forgotten;
            let has_all = self.anew == 0 && kept.forgotten == 0 && kept.buffer.first() == EventSeq(0);
            self.next = has_all.then_some(0);
            self.beginning = Some(if has_all { Beginning::FirstBatch { stored: 0 } } else { self.snapshot() });
        }
        let start = self.beginning.and_then(|beginning| beginning.start(self.run)).filter(|_| !self.is_start_sent);
        if let Some(start) = start {
            self.is_start_sent = true;
            return Todo::Send(self.send(What::Start(start), "", now_ms));
        }
        if let Some((next, payload)) = self.next.and_then(|next| Some((next, kept.buffer.get(EventSeq(next))?))) {
            (self.next, self.batches_since_start) = (Some(next + 1), self.batches_since_start + 1);
            return Todo::Send(self.send(What::Batch(next), payload, now_ms));
        }
        if self.beginning.is_none() && self.batches_since_start >= self.snapshot_every_batches {
            self.beginning = Some(self.snapshot());
        }
        self.part(snapshot, now_ms)
    }

    const fn snapshot(&mut self) -> Beginning {
        self.snapshots += 1;
        Beginning::snapshot(self.snapshots)
    }

    /// A message behind which all batches are that a snapshot lacks; 0 = its own first part is one.
    fn before(&self, watermark: EventSeq) -> u64 {
        if self.next.is_none() {
            return 0;
        }
        let contained = self.places.iter().rev().find(|(seq, _)| *seq <= watermark.0);
        // A later snapshot lacks nothing that the one of the start contains.
        contained.map(|(_, place)| *place).or(self.start.map(|start| start.batches)).unwrap_or(0)
    }

    /// Gives up the snapshot that is sent. Its parts that are stored lead nowhere.
    pub(super) fn give_up_snapshot(&mut self) {
        if self.next.is_some() { self.beginning = None } else { self.begin_anew() }
    }

    /// The next part of the snapshot that is to be sent, if one is.
    fn part(&mut self, snapshot: Option<&TakenSnapshot>, now_ms: u64) -> Todo {
        let before = snapshot.and_then(TakenSnapshot::watermark).map_or(0, |watermark| self.before(watermark));
        let Some(Beginning::Snapshot { snapshot: count, part, parts: parts @ None, first, batches, .. }) =
            &mut self.beginning
        else {
            return Todo::Nothing;
        };
        let Some(snapshot) = snapshot else { return Todo::NeedsSnapshot };
        let (count, number) = (*count, *part);
        match (snapshot.part(number), snapshot.progress(), snapshot.watermark()) {
            (Some(payload), ..) => {
                *part += 1;
                Todo::Send(self.send(What::Part { snapshot: count, part: number }, payload, now_ms))
            }
            (None, Progress::Whole, Some(watermark)) => {
                (*parts, *first, *batches) = (Some(number), EventSeq(watermark.0 + 1), before);
                self.next = self.next.or(Some(watermark.0 + 1));
                Todo::Nothing
            }
            (None, Progress::Failed(_), _) => {
                self.give_up_snapshot();
                Todo::Failed
            }
            (None, ..) => Todo::NeedsSnapshot,
        }
    }

    fn send(&mut self, what: What, payload: impl AsRef<[u8]>, now_ms: u64) -> Unstored {
        let bytes = match what {
            What::Batch(seq) => Frame::encode(Kind::Batch, EventSeq(seq), payload.as_ref()),
            What::Part { .. } => Frame::encode(Kind::Part, EventSeq(u64::MAX), payload.as_ref()),
            What::Start(start) => start.encode(),
        };
        let name = match what {
            What::Batch(seq) => format!("{:016x}.{}.{seq}", self.run, self.anew),
            // Parts of one snapshot are not parts of another one.
            What::Part { .. } | What::Start(_) => {
                format!("{:016x}.{}.{}.{:?}", self.run, self.anew, self.sent, what.kind())
            }
        };
        if self.unstored.is_empty() {
            self.heard_ms = now_ms;
        }
        let message = Unstored { number: self.sent, what, name, bytes, is_stored: false };
        self.sent += 1;
        self.unstored_bytes += message.bytes.len();
        self.unstored.push_back(message.clone());
        message
    }

    /// Notes that a message is stored, under JetStream's number. Answers with the number before which readers need nothing,
    /// if that has changed. Unknown messages are of before it began anew.
    pub(super) fn stored(&mut self, number: u64, place: u64, now_ms: u64) -> Option<u64> {
        let at = usize::try_from(number.checked_sub(self.unstored.front()?.number)?).ok()?;
        let message = self.unstored.get_mut(at).filter(|message| !message.is_stored)?;
        message.is_stored = true;
        (self.heard_ms, self.unstored_bytes) = (now_ms, self.unstored_bytes - message.bytes.len());
        let what = message.what;
        while self.unstored.front().is_some_and(|message| message.is_stored) {
            self.unstored.pop_front();
        }
        match (what, &mut self.beginning) {
            (What::Batch(seq), beginning) => {
                self.places.push_back((seq, place));
                if self.places.len() as u64 > self.snapshot_every_batches + NATS_UNSTORED_MESSAGES_MAX as u64 {
                    self.places.pop_front();
                }
                if let (0, Some(Beginning::FirstBatch { stored })) = (seq, beginning) {
                    *stored = place;
                }
            }
            (What::Part { snapshot, part }, Some(Beginning::Snapshot { snapshot: of, begins, last, .. }))
                if snapshot == *of =>
            {
                if part == 0 {
                    *begins = place;
                }
                *last = (*last).max((part, place));
            }
            (What::Part { .. }, _) => {}
            (What::Start(start), _) => {
                let before = self.start.replace(start);
                (self.beginning, self.is_start_sent, self.batches_since_start) = (None, false, 0);
                // A reader may just be reading from the start before.
                return Some(before.unwrap_or(start).oldest().min(start.oldest()));
            }
        }
        None
    }

    /// The messages to send again: no answer has come for too long.
    pub(super) fn late(&mut self, now_ms: u64) -> Vec<Unstored> {
        if now_ms.saturating_sub(self.heard_ms) < NATS_STORED_MS_MAX { Vec::new() } else { self.again(now_ms) }
    }

    /// The messages to send again on a new connection.
    pub(super) fn again(&mut self, now_ms: u64) -> Vec<Unstored> {
        self.heard_ms = now_ms;
        self.unstored.iter().filter(|message| !message.is_stored).cloned().collect()
    }
}

#[cfg(test)]
mod tests;
