//! One question for a snapshot: a DEALER socket that asks the engine's ROUTER socket once, and blocks until the answer is
//! whole, wrong or late.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use mio::{Events, Poll, Token};

use crate::event::engine_snapshot::{AnswerFault, AnswerReader, Answered, EngineSnapshot, question};
use crate::fleet::SnapshotSource;
use crate::ids::DpRank;
use crate::ingest::dump::AbortReason;
use crate::limits::{
    ENGINE_SNAPSHOT_BYTES_MAX, ENGINE_SNAPSHOT_MESSAGES_MAX, ENGINE_SNAPSHOT_PARTS_MAX, ZMQ_COMMAND_BYTES_MAX,
};
use crate::zmtp::{self, Bounds, LinkEvent, Next, Opening, Pace, Peer, PeerPlan, Role};

/// Limits on one message of an answer.
const BOUNDS: Bounds = Bounds {
    message_bytes_max: ENGINE_SNAPSHOT_BYTES_MAX,
    parts_max: ENGINE_SNAPSHOT_PARTS_MAX,
    command_bytes_max: ZMQ_COMMAND_BYTES_MAX,
    keeps_parts: true,
};
/// The longest wait for a signal before deadlines are checked, milliseconds.
const WAIT_MS: u64 = 50;

/// Asks for a snapshot of a rank's publisher.
///
/// # Errors
/// Why there is none.
pub(super) fn ask(source: &SnapshotSource, rank: DpRank, deadline: Instant) -> Result<EngineSnapshot, AbortReason> {
    let began = Instant::now();
    let now_ms = || began.elapsed().as_millis() as u64;
    // The load's answer says so, and the log of the next failures.
    let unopened = |_| AbortReason::Unanswered;
    let mut poll = Poll::new().map_err(unopened)?;
    let registry = Arc::new(poll.registry().try_clone().map_err(unopened)?);
    let opening = Opening::Send(zmtp::message(&[b""], question(source.proposal)));
    let plan = PeerPlan { role: Role::Dealer, bounds: BOUNDS, opening, pace: Pace::ENGINE };
    let mut peer =
        Peer::open(&source.endpoint, plan, (registry, Token(0)), now_ms()).map_err(|_| AbortReason::Unanswered)?;
    let (mut answer, mut events) = (Answer::new(source, rank), Events::with_capacity(4));
    loop {
        while let Some(event) = peer.link_event() {
            answer.link(event)?;
        }
        match peer.next(now_ms()) {
            Next::Message(message) => {
                let mut frames = message.earlier;
                frames.push(message.last);
                if let Some(snapshot) = answer.take(frames)? {
                    return Ok(snapshot);
                }
            }
            Next::Later => {}
            Next::Drained => {
                let wait_ms = Duration::from_millis(WAIT_MS).min(deadline.saturating_duration_since(Instant::now()));
                if let Err(error) = poll.poll(&mut events, Some(wait_ms))
                    && error.kind() != std::io::ErrorKind::Interrupted
                {
                    return Err(AbortReason::Unanswered);
                }
                peer.tick(now_ms());
            }
        }
        if Instant::now() >= deadline {
            return Err(AbortReason::Unanswered);
        }
    }
}

/// The answer so far.
struct Answer {
    reader: AnswerReader,
    messages: usize,
    bytes: usize,
}

impl Answer {
    const fn new(source: &SnapshotSource, rank: DpRank) -> Self {
        Self { reader: AnswerReader::new(source.proposal, rank), messages: 0, bytes: 0 }
    }

    /// Handles an event of the connection. Before the first message the next connection asks again.
    fn link(&self, event: LinkEvent) -> Result<(), AbortReason> {
        match event {
            LinkEvent::Refused(refusal) if refusal.is_bound() => Err(AbortReason::Oversized),
            LinkEvent::Refused(_) | LinkEvent::HandshakeFailed => Err(AbortReason::Corrupt),
            LinkEvent::Disconnected if self.messages > 0 => Err(AbortReason::Corrupt),
            LinkEvent::Disconnected | LinkEvent::Handshake | LinkEvent::Unopened => Ok(()),
        }
    }

    /// Takes a message; `None` = more follow.
    fn take(&mut self, frames: Vec<Bytes>) -> Result<Option<EngineSnapshot>, AbortReason> {
        self.messages += 1;
        self.bytes += frames.iter().map(Bytes::len).sum::<usize>();
        if self.messages > ENGINE_SNAPSHOT_MESSAGES_MAX || self.bytes > ENGINE_SNAPSHOT_BYTES_MAX {
            return Err(AbortReason::Oversized);
        }
        match self.reader.message(frames) {
            Ok(Answered::Partly) => Ok(None),
            Ok(Answered::Wholly(snapshot)) => Ok(Some(snapshot)),
            Err(AnswerFault::Unavailable) => Err(AbortReason::Unavailable),
            Err(AnswerFault::Malformed) => Err(AbortReason::Corrupt),
        }
    }
}
