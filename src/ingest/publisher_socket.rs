//! The sockets to one publisher: its subscription, the life of that connection, and the socket of one replay.
//!
//! A publisher has a SUB socket of its own, because frames carry no publisher identity. The life of its connection is
//! [`Link`], a pure state machine:
//!
//! | state | handshake | disconnected | tick |
//! |---|---|---|---|
//! | Connecting since `t` | Up, ready | Connecting since `t` | Down once `down_after` has passed, unreached |
//! | Up | Up | Lost since now | – |
//! | Lost since `t` | Up, ready | Lost since `t` | Down once `down_after` has passed, gone |
//! | Down | Up, ready | Down | – |
//!
//! With a `down_after` of 0 no connection is ever Down.
//!
//! A replay is asked for over a DEALER socket ([`ReplayClient`]). An engine drops, in the middle and without an error,
//! what its ROUTER socket cannot hand over at once. So the client receives everything as soon as it is there, up to a
//! bound, and the stream applies it later.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use mio::{Registry, Token};

use crate::endpoint::Endpoint;
use crate::error::Result;
use crate::event::flat::UNNUMBERED;
use crate::fleet::{EventSource, FleetTable, WorkerState};
use crate::ids::{EventSeq, WorkerIndex};
use crate::limits::{
    INGEST_FETCH_BYTES_MAX, INGEST_FETCH_MESSAGES_MAX, REPLAY_READ_AHEAD_BYTES_MAX, REPLAY_RECEIVE_BYTES_MAX,
    ZMQ_COMMAND_BYTES_MAX, ZMQ_HELD_MESSAGE_BYTES, ZMQ_MESSAGE_BYTES_MAX, ZMQ_PARTS_MAX,
};
use crate::zmtp::{self, Bounds, LinkEvent, Message, Next, Opening, Peer, Refusal, Role};

/// What a publisher, or a replay, may send.
pub(super) const BOUNDS: Bounds = Bounds {
    message_bytes_max: ZMQ_MESSAGE_BYTES_MAX,
    parts_max: ZMQ_PARTS_MAX,
    command_bytes_max: ZMQ_COMMAND_BYTES_MAX,
};

/// One message of the stream.
#[derive(Debug)]
pub(super) enum Received {
    /// A batch by its framing: its sequence, and its payload, which is not yet looked at.
    Batch(EventSeq, Bytes),
    /// So many frames, and not an 8-byte one before the last.
    Misframed(usize),
}

impl From<Message> for Received {
    fn from(message: Message) -> Self {
        match message.before_last {
            Some(seq) => Self::Batch(EventSeq(u64::from_be_bytes(seq)), message.last),
            None => Self::Misframed(message.parts),
        }
    }
}

/// The connection to one publisher.
#[derive(Debug)]
pub(super) struct Subscription {
    peer: Peer,
    /// Messages that were fetched and not yet taken.
    fetched: VecDeque<Received>,
    fetch_messages_max: usize,
}

impl Subscription {
    /// Starts to connect; an unreachable publisher is tried again for ever. Events are signalled to `registry`, under
    /// `token`.
    ///
    /// # Errors
    /// [`crate::error::Kind::Config`] where the endpoint cannot be used.
    pub(super) fn open(
        source: &EventSource,
        receive_messages_max: i32,
        signals: (&Arc<Registry>, Token),
        now_ms: u64,
    ) -> Result<Self> {
        let topic = Bytes::copy_from_slice(source.topic.as_bytes());
        let role = (Role::Subscriber, BOUNDS, Opening::Subscribe(topic));
        let peer = Peer::open(&source.endpoint, role, (Arc::clone(signals.0), signals.1), now_ms)?;
        let fetch_messages_max =
            usize::try_from(receive_messages_max).unwrap_or_default().clamp(1, INGEST_FETCH_MESSAGES_MAX);
        Ok(Self { peer, fetched: VecDeque::new(), fetch_messages_max })
    }

    /// Signals under another token from now on.
    ///
    /// # Errors
    /// Those of the event loop.
    pub(super) fn set_token(&mut self, token: Token) -> std::io::Result<()> {
        self.peer.set_token(token)
    }

    /// Does what time asks for; `true` = [`Self::link_event`] has something to say.
    pub(super) fn tick(&mut self, now_ms: u64) -> bool {
        self.peer.tick(now_ms)
    }

    /// Fetches some messages from the connection, unless some are still to be taken; `true` = there is no more, and
    /// the next message or link event will be signalled.
    ///
    /// All others wait in the kernel's buffer of the connection, and behind it in the engine. Behind them waits the news
    /// that the connection ended.
    pub(super) fn fetch(&mut self, now_ms: u64) -> bool {
        let mut bytes = 0;
        if !self.fetched.is_empty() {
            return false;
        }
        while self.fetched.len() < self.fetch_messages_max && bytes < INGEST_FETCH_BYTES_MAX {
            match self.peer.next(now_ms) {
                Next::Message(message) => {
                    bytes += message.last.len();
                    self.fetched.push_back(message.into());
                }
                Next::Drained => return true,
                Next::Later => return false,
            }
        }
        false
    }

    /// The next of the messages that were fetched.
    pub(super) fn take(&mut self) -> Option<Received> {
        self.fetched.pop_front()
    }

    /// Whether all that was fetched has been taken.
    pub(super) fn has_fetched(&self) -> bool {
        !self.fetched.is_empty()
    }

    /// Drops what was fetched and not taken.
    pub(super) fn drop_fetched(&mut self) {
        self.fetched.clear();
    }

    /// The next thing the connection did, if there is one. Messages that came before it are taken first.
    pub(super) fn link_event(&mut self) -> Option<LinkEvent> {
        if self.fetched.is_empty() { self.peer.link_event() } else { None }
    }
}

#[cfg(test)]
impl Subscription {
    /// Has the connection end, whatever it is doing.
    pub(super) fn break_up(&mut self) {
        self.peer.break_up();
    }
}

/// What the rest of the daemon is to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkChange {
    /// The publisher is connected.
    Ready,
    /// It has been gone for too long.
    Gone,
    /// It has not been reached once, for too long.
    Unreached,
}

/// A connection's state. Times are milliseconds of one monotonic clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Link {
    /// Never reached yet, and tried since then.
    Connecting { since_ms: u64 },
    /// Connected.
    Up,
    /// Was connected, until then.
    Lost { since_ms: u64 },
    /// Not there for longer than is tolerated.
    Down,
}

impl Link {
    /// A connection that is tried from now on.
    pub(super) const fn new(now_ms: u64) -> Self {
        Self::Connecting { since_ms: now_ms }
    }

    /// The publisher shook hands.
    pub(super) fn handshake(&mut self) -> Option<LinkChange> {
        let was = std::mem::replace(self, Self::Up);
        (was != Self::Up).then_some(LinkChange::Ready)
    }

    /// A connection ended. Answers whether it was one that had shaken hands: an attempt that fails, by a
    /// peer that does not speak the protocol, ends too.
    pub(super) fn disconnected(&mut self, now_ms: u64) -> bool {
        let was_up = *self == Self::Up;
        if was_up {
            *self = Self::Lost { since_ms: now_ms };
        }
        was_up
    }

    /// Time has passed. `down_after_ms` 0 = for ever.
    pub(super) fn tick(&mut self, now_ms: u64, down_after_ms: u64) -> Option<LinkChange> {
        let (since_ms, change) = match *self {
            Self::Connecting { since_ms } => (since_ms, LinkChange::Unreached),
            Self::Lost { since_ms } => (since_ms, LinkChange::Gone),
            Self::Up | Self::Down => return None,
        };
        if down_after_ms == 0 || now_ms.saturating_sub(since_ms) < down_after_ms {
            return None;
        }
        *self = Self::Down;
        Some(change)
    }
}

/// Moves a worker's state as its publisher says; `true` = it changed. A worker that an operator drains stays so.
pub(super) fn update_worker_state(table: &mut FleetTable, (index, change): (WorkerIndex, LinkChange)) -> bool {
    let Some(record) = table.worker_mut(index) else { return false };
    let state = match (change, record.state) {
        (LinkChange::Ready, WorkerState::Joining | WorkerState::Down) => WorkerState::Ready,
        (LinkChange::Gone | LinkChange::Unreached, WorkerState::Joining | WorkerState::Ready) => WorkerState::Down,
        _ => return false,
    };
    record.state = state;
    true
}

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

#[cfg(test)]
mod tests {
    use mio::{Events, Poll};
    use std::time::{Duration, Instant};

    use super::*;
    use crate::endpoint::Endpoint;

    struct Watched {
        poll: Poll,
        started: Instant,
        subscription: Subscription,
    }

    impl Watched {
        fn open(endpoint: &str) -> Self {
            let poll = Poll::new().expect("an event loop");
            let registry = Arc::new(poll.registry().try_clone().expect("a descriptor"));
            let source = EventSource { endpoint: Endpoint::unparsed(endpoint), replay: None, topic: String::new() };
            let subscription = Subscription::open(&source, 1000, (&registry, Token(0)), 0).expect("well formed");
            Self { poll, started: Instant::now(), subscription }
        }

        /// Waits a while for a signal, and does what time asks for.
        fn wait(&mut self) -> u64 {
            let mut events = Events::with_capacity(8);
            self.poll.poll(&mut events, Some(Duration::from_millis(20))).expect("an event loop");
            let now_ms = self.started.elapsed().as_millis() as u64;
            self.subscription.tick(now_ms);
            now_ms
        }

        /// What the connection first does that is told, `None` after so long without.
        fn first_told(&mut self, for_ms: u64) -> Option<LinkEvent> {
            loop {
                let now_ms = self.wait();
                self.subscription.fetch(now_ms);
                if let Some(event) = self.subscription.link_event() {
                    return Some(event);
                }
                if now_ms > for_ms {
                    return None;
                }
            }
        }
    }

    #[test]
    fn a_name_that_does_not_resolve_is_told_from_a_publisher_that_is_not_there() {
        // No resolver is asked for a name with an empty label.
        assert_eq!(Watched::open("tcp://no..such.host:5557").first_told(60_000), Some(LinkEvent::Unopened));
        let folder = tempfile::tempdir().expect("a folder");
        let nobody = format!("ipc://{}/nobody", folder.path().display());
        assert_eq!(Watched::open(&nobody).first_told(500), None);
        assert_eq!(Watched::open("tcp://127.0.0.1:1").first_told(500), None);
    }

    #[test]
    fn messages_are_fetched_a_few_at_a_time_and_taken_in_their_order() {
        let context = zmq::Context::new();
        let publisher = context.socket(zmq::XPUB).expect("a socket");
        publisher.bind("tcp://127.0.0.1:*").expect("a free port");
        let endpoint = publisher.get_last_endpoint().expect("bound").expect("text");
        let mut watched = Watched::open(&endpoint.replace("127.0.0.1", "localhost"));
        assert_eq!(watched.first_told(60_000), Some(LinkEvent::Handshake), "through a name and both its addresses");
        publisher.recv_bytes(0).expect("the subscription");
        let numbers = 0..2 * INGEST_FETCH_MESSAGES_MAX as u64 + 1;
        for number in numbers.clone() {
            publisher.send_multipart([&b""[..], &number.to_be_bytes(), &[7; 3]], 0).expect("a subscriber");
        }
        publisher.send("alone", 0).expect("a subscriber");
        publisher
            .send_multipart([vec![], 0_u64.to_be_bytes().into(), vec![7; 3 * INGEST_FETCH_BYTES_MAX]], 0)
            .expect("sent");
        publisher.send_multipart([vec![], 9_u64.to_be_bytes().into(), vec![7]], 0).expect("sent");
        let (mut sequences, mut misframed) = (Vec::new(), 0);
        while sequences.last() != Some(&9) {
            let now_ms = watched.wait();
            let subscription = &mut watched.subscription;
            let mut drained = false;
            while !drained {
                drained = subscription.fetch(now_ms);
                assert!(subscription.fetched.len() <= INGEST_FETCH_MESSAGES_MAX);
                assert!(subscription.fetched.is_empty() || !subscription.fetch(now_ms), "those come first");
                while let Some(received) = subscription.take() {
                    match received {
                        Received::Batch(seq, payload) => {
                            assert!(payload.iter().all(|byte| *byte == 7));
                            sequences.push(seq.0);
                        }
                        Received::Misframed(frames) => misframed += frames,
                    }
                }
            }
        }
        assert_eq!(sequences, numbers.chain([0, 9]).collect::<Vec<_>>());
        assert_eq!(misframed, 1);
        drop(publisher);
        assert_eq!(watched.first_told(60_000), Some(LinkEvent::Disconnected));
    }

    #[test]
    fn every_cell_of_the_table() {
        use Link::{Connecting, Down, Lost, Up};
        let (connecting, lost) = (Connecting { since_ms: 100 }, Lost { since_ms: 100 });
        let ready = Some(LinkChange::Ready);
        let rows = [
            (connecting, (Up, ready), connecting, (Down, Some(LinkChange::Unreached))),
            (Up, (Up, None), Lost { since_ms: 150 }, (Up, None)),
            (lost, (Up, ready), lost, (Down, Some(LinkChange::Gone))),
            (Down, (Up, ready), Down, (Down, None)),
        ];
        for (state, (after_handshake, change), after_break, (after_tick, tick)) in rows {
            let mut link = state;
            assert_eq!((link.handshake(), link), (change, after_handshake), "{state:?}");
            link = state;
            assert_eq!(link.disconnected(150), state == Up, "{state:?}");
            assert_eq!(link, after_break, "{state:?}");
            link = state;
            assert_eq!((link.tick(199, 100), link), (None, state), "{state:?}: not yet");
            assert_eq!((link.tick(200, 100), link), (tick, after_tick), "{state:?}");
            assert_eq!(link.tick(u64::MAX, 100), None, "{state:?}: said once");
            link = state;
            assert_eq!((link.tick(u64::MAX, 0), link), (None, state), "{state:?}: never, if 0");
        }
    }

    #[test]
    fn an_attempt_that_fails_does_not_put_off_being_down() {
        let mut link = Link::new(7);
        assert!(!link.disconnected(100));
        assert_eq!(link.tick(107, 100), Some(LinkChange::Unreached));
        assert_eq!(link.handshake(), Some(LinkChange::Ready));
    }
}
