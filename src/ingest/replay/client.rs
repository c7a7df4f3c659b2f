//! One replay's connection: a DEALER that asks a publisher's ROUTER once.
//!
//! An engine drops, in the middle and without a word, what its ROUTER cannot hand over at once. So everything that is
//! there is received as soon as it is there, up to a bound, and applied later.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use mio::{Registry, Token};

use crate::endpoint::Endpoint;
use crate::error::Result;
use crate::event::flat::UNNUMBERED;
use crate::ids::EventSeq;
use crate::ingest::subscription::BOUNDS;
use crate::limits::{REPLAY_READ_AHEAD_BYTES_MAX, REPLAY_RECEIVE_BYTES_MAX, ZMQ_HELD_MESSAGE_BYTES};
use crate::zmtp::{self, LinkEvent, Message, Next, Opening, Peer, Refusal, Role};

/// One message of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::ingest) enum Answer {
    /// A batch with its sequence and its payload, which is not yet looked at.
    Batch(EventSeq, Bytes),
    /// A payload that is no batch of the stream, and not yet looked at.
    Part(Bytes),
    /// There is no more.
    End,
    /// So many frames, and not an 8-byte one before the last.
    Misframed(usize),
}

impl From<Message> for Answer {
    /// Older engines send an empty frame, the sequence and the payload, newer ones also a topic: what matters is taken
    /// from the end.
    fn from(message: Message) -> Self {
        match message.before_last.map(|seq| EventSeq(u64::from_be_bytes(seq))) {
            // The marker is -1, and -1 is no sequence: a real batch never has it.
            Some(UNNUMBERED) if message.last.is_empty() => Self::End,
            Some(UNNUMBERED) => Self::Part(message.last),
            Some(seq) => Self::Batch(seq, message.last),
            None => Self::Misframed(message.parts),
        }
    }
}

/// Why an answer goes no further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::ingest) enum Lost {
    /// The connection ended.
    Disconnected,
    /// The connection was cut: the publisher sent what it may not.
    Refused(Refusal),
}

/// The connection of one replay. A new one for each: what an older question is answered can never be taken for this
/// one's.
#[derive(Debug)]
pub(in crate::ingest) struct ReplayClient {
    peer: Peer,
    /// Received and not yet taken.
    received: VecDeque<Message>,
    held_bytes: usize,
    /// Something has come, so that asking again on another connection would bring it twice.
    is_answered: bool,
    drained: bool,
    lost: Option<Lost>,
}

impl ReplayClient {
    /// Connects, and asks for everything from a sequence on.
    ///
    /// # Errors
    /// [`crate::error::Kind::Config`] where the endpoint cannot be used.
    pub(in crate::ingest) fn ask(
        endpoint: &Endpoint,
        from: EventSeq,
        signals: (&Arc<Registry>, Token),
        now_ms: u64,
    ) -> Result<Self> {
        // The empty frame is what a REQ would send first; engines ignore a question without it.
        let question = zmtp::message(&[b""], &from.0.to_be_bytes());
        let role = (Role::Dealer, BOUNDS, Opening::Send(question));
        let peer = Peer::open(endpoint, role, (Arc::clone(signals.0), signals.1), now_ms)?;
        let (received, held_bytes) = (VecDeque::new(), 0);
        Ok(Self { peer, received, held_bytes, is_answered: false, drained: false, lost: None })
    }

    /// Signals under another token from now on.
    ///
    /// # Errors
    /// Those of the event loop.
    pub(in crate::ingest) fn set_token(&mut self, token: Token) -> std::io::Result<()> {
        self.peer.set_token(token)
    }

    /// Does what time asks for; `true` = something is to be read.
    pub(in crate::ingest) fn tick(&mut self, now_ms: u64) -> bool {
        self.peer.tick(now_ms)
    }

    /// Receives what is there, as far as it may wait here.
    pub(in crate::ingest) fn receive_ahead(&mut self, now_ms: u64) {
        let held_bytes_max = REPLAY_READ_AHEAD_BYTES_MAX.min(self.held_bytes + REPLAY_RECEIVE_BYTES_MAX);
        while self.lost.is_none() && self.held_bytes < held_bytes_max {
            while let Some(event) = self.peer.link_event() {
                match event {
                    LinkEvent::Refused(refusal) => self.lost = Some(Lost::Refused(refusal)),
                    // Without an answer the next connection asks again.
                    LinkEvent::Disconnected if self.is_answered => {
                        self.lost = self.lost.or(Some(Lost::Disconnected));
                    }
                    _ => {}
                }
            }
            match self.peer.next(now_ms) {
                _ if self.lost.is_some() => {}
                Next::Message(message) => {
                    self.is_answered = true;
                    self.held_bytes += message.last.len() + ZMQ_HELD_MESSAGE_BYTES;
                    self.received.push_back(message);
                }
                Next::Later if self.peer.has_event() => {}
                next => {
                    self.drained = next == Next::Drained;
                    return;
                }
            }
        }
        self.drained = false;
    }

    /// Whether everything that has come was received, so that the next of it will be signalled.
    pub(in crate::ingest) const fn is_drained(&self) -> bool {
        self.drained
    }

    /// The next message of the answer, if one is there.
    ///
    /// # Errors
    /// Why there will be none.
    pub(in crate::ingest) fn receive(&mut self, now_ms: u64) -> std::result::Result<Option<Answer>, Lost> {
        if self.received.is_empty() {
            self.receive_ahead(now_ms);
        }
        match (self.received.pop_front(), self.lost) {
            (Some(message), _) => {
                self.held_bytes -= message.last.len() + ZMQ_HELD_MESSAGE_BYTES;
                Ok(Some(message.into()))
            }
            (None, Some(lost)) => Err(lost),
            (None, None) => Ok(None),
        }
    }
}
