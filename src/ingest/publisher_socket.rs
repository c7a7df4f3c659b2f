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
//!
//! Where a relay stores events at a NATS server, both are connections to that server ([`super::connection`]). While the
//! server is away no publisher is Down: its state cannot be known.

use std::collections::VecDeque;

use bytes::Bytes;
use mio::Token;

use super::connection::{Brokers, Connection, Signals};
use crate::endpoint::Endpoint;
use crate::error::Result;
use crate::event::engine_snapshot::live_frames;
use crate::event::flat::UNNUMBERED;
use crate::fleet::{EventSource, FleetTable, WorkerState};
use crate::ids::{EventSeq, Lifetime, SnapshotProposal, Worker, WorkerIndex};
use crate::limits::{
    INGEST_FETCH_BYTES_MAX, INGEST_FETCH_MESSAGES_MAX, REPLAY_READ_AHEAD_BYTES_MAX, REPLAY_RECEIVE_BYTES_MAX,
    ZMQ_COMMAND_BYTES_MAX, ZMQ_HELD_MESSAGE_BYTES, ZMQ_MESSAGE_BYTES_MAX, ZMQ_PARTS_MAX, ZMQ_READ_BYTES,
};
use crate::zmtp::{Bounds, LinkEvent, Message, Next, Refusal};

/// Limits on the messages of a publisher and of a replay.
pub(super) const BOUNDS: Bounds = Bounds {
    message_bytes_max: ZMQ_MESSAGE_BYTES_MAX,
    parts_max: ZMQ_PARTS_MAX,
    command_bytes_max: ZMQ_COMMAND_BYTES_MAX,
    keeps_parts: false,
};

/// One message of a subscription.
#[derive(Debug)]
pub(super) enum Received {
    /// A batch by its framing: its sequence number and its payload, not yet decoded.
    Batch(EventSeq, Bytes),
    /// The same from a publisher with snapshots of its own, with its lifetime.
    BatchOf(Lifetime, EventSeq, Bytes),
    /// This number of frames, without an 8-byte frame before the last.
    Misframed(usize),
}

impl Received {
    fn new(message: Message, snapshots: Option<SnapshotProposal>) -> Self {
        let framed = match snapshots {
            None => message.before_last.map(|seq| (EventSeq(u64::from_be_bytes(seq)), None)),
            Some(proposal) => live_frames(proposal, &message.earlier),
        };
        match framed {
            Some((seq, None)) => Self::Batch(seq, message.last),
            Some((seq, Some(lifetime))) => Self::BatchOf(lifetime, seq, message.last),
            None => Self::Misframed(message.parts),
        }
    }
}

/// The connection to one publisher.
#[derive(Debug)]
pub(super) struct Subscription {
    connection: Connection,
    /// Messages that were fetched and not yet taken.
    fetched: VecDeque<Received>,
    fetch_messages_max: usize,
    /// What the engine's own snapshots follow, and with it the frames of its batches.
    snapshots: Option<SnapshotProposal>,
}

impl Subscription {
    /// Starts to connect; an unreachable publisher is tried again for ever. `signals` = the registry of the event loop,
    /// and the token under which it is signalled.
    ///
    /// # Errors
    /// [`crate::error::Kind::Config`] if the endpoint cannot be used.
    pub(super) fn open(
        source: &EventSource,
        (of, receive_messages_max): ((&Brokers, Worker), i32),
        signals: Signals<'_>,
        now_ms: u64,
    ) -> Result<Self> {
        let snapshots = source.snapshots.as_ref().map(|of| of.proposal);
        let connection = Connection::subscribe(source, of, signals, now_ms)?;
        let fetch_messages_max =
            usize::try_from(receive_messages_max).unwrap_or_default().clamp(1, INGEST_FETCH_MESSAGES_MAX);
        Ok(Self { connection, fetched: VecDeque::new(), fetch_messages_max, snapshots })
    }

    /// Signals under another token from now on.
    ///
    /// # Errors
    /// Those of the event loop.
    pub(super) fn set_token(&mut self, token: Token) -> std::io::Result<()> {
        self.connection.set_token(token)
    }

    /// Checks deadlines; `true` = [`Self::link_event`] has an event.
    pub(super) fn tick(&mut self, now_ms: u64) -> bool {
        self.connection.tick(now_ms)
    }

    /// Fetches some messages from the connection, unless fetched ones are still to be taken; `true` = the connection is
    /// drained, and the event loop will signal the next message or link event.
    ///
    /// All other messages wait in the kernel's buffer of the connection, and behind it in the engine. The end of the
    /// connection shows only after them.
    pub(super) fn fetch(&mut self, now_ms: u64) -> bool {
        let mut bytes = 0;
        if !self.fetched.is_empty() {
            return false;
        }
        while self.fetched.len() < self.fetch_messages_max && bytes < INGEST_FETCH_BYTES_MAX {
            match self.connection.next(now_ms) {
                Next::Message(message) => {
                    bytes += message.bytes;
                    self.fetched.push_back(Received::new(message, self.snapshots));
                }
                Next::Drained => return true,
                Next::Later => return false,
            }
        }
        false
    }

    /// Takes the next fetched message.
    pub(super) fn take(&mut self) -> Option<Received> {
        self.fetched.pop_front()
    }

    /// Messages of strangers that were skipped since the last call.
    pub(super) fn take_skipped(&mut self) -> u64 {
        self.connection.take_skipped()
    }

    /// Whether nothing can be known of the publisher, because what stands between is away.
    pub(super) fn excuses_silence(&self, now_ms: u64) -> bool {
        self.connection.excuses_silence(now_ms)
    }

    /// Whether fetched messages are still to be taken.
    pub(super) fn has_fetched(&self) -> bool {
        !self.fetched.is_empty()
    }

    /// Drops the fetched messages.
    pub(super) fn drop_fetched(&mut self) {
        self.fetched.clear();
    }

    /// The next event of the connection. Messages that came before it are taken first.
    pub(super) fn link_event(&mut self) -> Option<LinkEvent> {
        if self.fetched.is_empty() { self.connection.link_event() } else { None }
    }
}

#[cfg(test)]
impl Subscription {
    /// Ends the connection in any state.
    pub(super) fn break_up(&mut self) {
        self.connection.break_up();
    }
}

/// A change of a connection that changes the state of its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkChange {
    /// The publisher is connected.
    Ready,
    /// It has been disconnected for too long.
    Gone,
    /// It has not been reached since the start, for too long.
    Unreached,
}

/// The state of a connection. Times are milliseconds of one monotonic clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Link {
    /// Tried since this time, and never reached yet.
    Connecting { since_ms: u64 },
    /// Connected.
    Up,
    /// Was connected until this time.
    Lost { since_ms: u64 },
    /// Disconnected or not reached for longer than `down_after_ms`.
    Down,
}

impl Link {
    /// A connection whose first attempt begins now.
    pub(super) const fn new(now_ms: u64) -> Self {
        Self::Connecting { since_ms: now_ms }
    }

    /// Handles a handshake.
    pub(super) fn handshake(&mut self) -> Option<LinkChange> {
        let was = std::mem::replace(self, Self::Up);
        (was != Self::Up).then_some(LinkChange::Ready)
    }

    /// Handles the end of a connection. Returns whether there had been a handshake: an attempt that fails because the
    /// peer does not speak the protocol ends too.
    pub(super) fn disconnected(&mut self, now_ms: u64) -> bool {
        let was_up = *self == Self::Up;
        if was_up {
            *self = Self::Lost { since_ms: now_ms };
        }
        was_up
    }

    /// Checks the deadline. `down_after_ms` 0 = for ever.
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

/// Changes a worker's state after its connection; `true` = the state changed. A draining worker stays draining.
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

/// One message of the answer to a replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// A batch with its sequence number and its payload, not yet decoded.
    Batch(EventSeq, Bytes),
    /// A payload that is not a batch of the stream, not yet decoded.
    Part(Bytes),
    /// The end marker.
    End,
    /// This number of frames, without an 8-byte frame before the last.
    Misframed(usize),
}

impl From<Message> for Answer {
    /// Older engines send an empty frame, the sequence number and the payload. Newer engines send a topic too. So the
    /// frames are counted from the end.
    fn from(message: Message) -> Self {
        match message.before_last.map(|seq| EventSeq(u64::from_be_bytes(seq))) {
            // The marker is -1, which is not a sequence number: a real batch never has it.
            Some(UNNUMBERED) if message.last.is_empty() => Self::End,
            Some(UNNUMBERED) => Self::Part(message.last),
            Some(seq) => Self::Batch(seq, message.last),
            None => Self::Misframed(message.parts),
        }
    }
}

/// Why an answer ends early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lost {
    /// The connection ended.
    Disconnected,
    /// The daemon cut the connection: a message broke the protocol or a limit.
    Refused(Refusal),
}

/// The connection of one replay: a DEALER socket that asks the publisher's ROUTER socket once. Each replay has a new
/// connection, so the answer to an older question can never be mistaken for the answer to this one.
#[derive(Debug)]
pub(super) struct ReplayClient {
    connection: Connection,
    /// Received and not yet taken.
    received: VecDeque<Message>,
    held_bytes: usize,
    /// The most bytes that wait to be taken.
    held_bytes_max: usize,
    /// A message has come, so asking again on another connection would bring it twice.
    is_answered: bool,
    drained: bool,
    lost: Option<Lost>,
}

impl ReplayClient {
    /// Connects, and asks for all batches from a sequence number on.
    ///
    /// # Errors
    /// [`crate::error::Kind::Config`] if the endpoint cannot be used.
    pub(super) fn ask(
        question: (&Endpoint, EventSeq),
        of: (&Brokers, Worker),
        signals: Signals<'_>,
        now_ms: u64,
    ) -> Result<Self> {
        let connection = Connection::ask(question, of, signals, now_ms)?;
        let (received, held_bytes, held_bytes_max) = (VecDeque::new(), 0, REPLAY_READ_AHEAD_BYTES_MAX);
        Ok(Self { connection, received, held_bytes, held_bytes_max, is_answered: false, drained: false, lost: None })
    }

    /// The same with at most this many bytes that wait to be taken, and one message.
    pub(super) fn holding(self, bytes_max: usize) -> Self {
        Self { held_bytes_max: bytes_max.min(REPLAY_READ_AHEAD_BYTES_MAX), ..self }
    }

    /// Bytes that wait to be taken.
    pub(super) const fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Signals under another token from now on.
    ///
    /// # Errors
    /// Those of the event loop.
    pub(super) fn set_token(&mut self, token: Token) -> std::io::Result<()> {
        self.connection.set_token(token)
    }

    /// Checks deadlines; `true` = there is something to read.
    pub(super) fn tick(&mut self, now_ms: u64) -> bool {
        self.connection.tick(now_ms)
    }

    /// Receives the messages that have arrived, up to the limit on messages that wait here.
    pub(super) fn receive_ahead(&mut self, now_ms: u64) {
        let held_bytes_max = self.held_bytes_max.min(self.held_bytes + REPLAY_RECEIVE_BYTES_MAX);
        while self.lost.is_none() && self.held_bytes < held_bytes_max {
            while let Some(event) = self.connection.link_event() {
                match event {
                    LinkEvent::Refused(refusal) => self.lost = Some(Lost::Refused(refusal)),
                    // Before the first message the next connection asks again.
                    LinkEvent::Disconnected if self.is_answered => {
                        self.lost = self.lost.or(Some(Lost::Disconnected));
                    }
                    _ => {}
                }
            }
            match self.connection.next(now_ms) {
                _ if self.lost.is_some() => {}
                Next::Message(mut message) => {
                    self.is_answered = true;
                    self.held_bytes += message.bytes + ZMQ_HELD_MESSAGE_BYTES;
                    // A piece of a block would keep the whole block, of which other parts are no longer held.
                    if message.last.len() < ZMQ_READ_BYTES {
                        message.last = Bytes::copy_from_slice(&message.last);
                    }
                    self.received.push_back(message);
                }
                Next::Later if self.connection.has_event() => {}
                next => {
                    self.drained = next == Next::Drained;
                    return;
                }
            }
        }
        self.drained = false;
    }

    /// Whether all messages that have arrived were received, so that the event loop will signal the next one.
    pub(super) const fn is_drained(&self) -> bool {
        self.drained
    }

    /// The next message of the answer, if one has arrived.
    ///
    /// # Errors
    /// Why no further message will come.
    pub(super) fn receive(&mut self, now_ms: u64) -> std::result::Result<Option<Answer>, Lost> {
        if self.received.is_empty() {
            self.receive_ahead(now_ms);
        }
        match (self.received.pop_front(), self.lost) {
            (Some(message), _) => {
                self.held_bytes -= message.bytes + ZMQ_HELD_MESSAGE_BYTES;
                Ok(Some(message.into()))
            }
            (None, Some(lost)) => Err(lost),
            (None, None) => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use mio::{Events, Poll};

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
            let source = EventSource {
                endpoint: Endpoint::unparsed(endpoint),
                replay: None,
                topic: String::new(),
                snapshots: None,
            };
            let subscription =
                Subscription::open(&source, ((&Brokers::default(), Worker::new(1, 0)), 1000), (&registry, Token(0)), 0)
                    .expect("well formed");
            Self { poll, started: Instant::now(), subscription }
        }

        /// Waits a while for a signal, and checks deadlines.
        fn wait(&mut self) -> u64 {
            let mut events = Events::with_capacity(8);
            self.poll.poll(&mut events, Some(Duration::from_millis(20))).expect("an event loop");
            let now_ms = self.started.elapsed().as_millis() as u64;
            self.subscription.tick(now_ms);
            now_ms
        }

        /// The first event of the connection; `None` if there is none within `for_ms`.
        fn first_event(&mut self, for_ms: u64) -> Option<LinkEvent> {
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
    fn a_name_that_does_not_resolve_is_distinguished_from_a_publisher_that_is_not_there() {
        // No resolver is asked for a name with an empty label.
        assert_eq!(Watched::open("tcp://no..such.host:5557").first_event(60_000), Some(LinkEvent::Unopened));
        let folder = tempfile::tempdir().expect("a folder");
        let absent = format!("ipc://{}/absent", folder.path().display());
        assert_eq!(Watched::open(&absent).first_event(500), None);
        assert_eq!(Watched::open("tcp://127.0.0.1:1").first_event(500), None);
    }

    #[test]
    fn messages_are_fetched_a_few_at_a_time_and_taken_in_their_order() {
        let context = zmq::Context::new();
        let publisher = context.socket(zmq::XPUB).expect("a socket");
        publisher.bind("tcp://127.0.0.1:*").expect("a free port");
        let endpoint = publisher.get_last_endpoint().expect("bound").expect("text");
        let mut watched = Watched::open(&endpoint.replace("127.0.0.1", "localhost"));
        assert_eq!(watched.first_event(60_000), Some(LinkEvent::Handshake), "through a name and both its addresses");
        publisher.recv_bytes(0).expect("the subscription");
        let numbers = 0..2 * INGEST_FETCH_MESSAGES_MAX as u64 + 1;
        for number in numbers.clone() {
            publisher.send_multipart([&b""[..], &number.to_be_bytes(), &[7; 3]], 0).expect("a subscriber");
        }
        publisher.send("alone", 0).expect("a subscriber");
        publisher
            .send_multipart([vec![], 0_u64.to_be_bytes().into(), vec![7; 3 * INGEST_FETCH_BYTES_MAX]], 0)
            .expect("sent");
        let last = numbers.end;
        publisher.send_multipart([vec![], last.to_be_bytes().into(), vec![7]], 0).expect("sent");
        let (mut sequences, mut misframed) = (Vec::new(), 0);
        while sequences.last() != Some(&last) {
            let now_ms = watched.wait();
            let subscription = &mut watched.subscription;
            let mut drained = false;
            while !drained {
                drained = subscription.fetch(now_ms);
                assert!(subscription.fetched.len() <= INGEST_FETCH_MESSAGES_MAX);
                assert!(subscription.fetched.is_empty() || !subscription.fetch(now_ms), "fetched messages come first");
                while let Some(received) = subscription.take() {
                    match received {
                        Received::Batch(seq, payload) => {
                            assert!(payload.iter().all(|byte| *byte == 7));
                            sequences.push(seq.0);
                        }
                        Received::BatchOf(..) => panic!("no lifetime was asked for"),
                        Received::Misframed(frames) => misframed += frames,
                    }
                }
            }
        }
        assert_eq!(sequences, numbers.chain([0, last]).collect::<Vec<_>>());
        assert_eq!(misframed, 1);
        drop(publisher);
        assert_eq!(watched.first_event(60_000), Some(LinkEvent::Disconnected));
    }

    #[test]
    fn a_replay_counts_all_parts_of_its_messages_and_keeps_none_but_the_payload() {
        let (parts, messages) = (60_000, 150);
        let engine = zmq::Context::new().socket(zmq::ROUTER).expect("a socket");
        engine.set_linger(0).expect("no linger");
        engine.set_sndhwm(0).expect("no mark");
        engine.bind("tcp://127.0.0.1:*").expect("a free port");
        let endpoint = engine.get_last_endpoint().expect("bound").expect("text");
        let mut poll = Poll::new().expect("an event loop");
        let (registry, started) = (Arc::new(poll.registry().try_clone().expect("a descriptor")), Instant::now());
        let question = (&Endpoint::unparsed(&endpoint), EventSeq(0));
        let of = (&Brokers::default(), Worker::new(1, 0));
        let mut client = ReplayClient::ask(question, of, (&registry, Token(0)), 0).expect("well formed");
        let mut receive = |client: &mut ReplayClient| {
            poll.poll(&mut Events::with_capacity(8), Some(Duration::from_millis(20))).expect("an event loop");
            let now_ms = started.elapsed().as_millis() as u64;
            client.tick(now_ms);
            client.receive_ahead(now_ms);
        };
        while engine.poll(zmq::POLLIN, 0).expect("polled") == 0 {
            receive(&mut client);
        }
        let peer = engine.recv_multipart(0).expect("the question").swap_remove(0);
        for seq in 0..messages {
            let sent = [peer.clone(), vec![], vec![7; parts], u64::to_be_bytes(seq).to_vec(), vec![1, 2, 3]];
            engine.send_multipart(sent, 0).expect("sent");
        }
        let deadline = Instant::now() + Duration::from_secs(60);
        while client.received.len() < messages as usize {
            assert!(Instant::now() < deadline, "{} came", client.received.len());
            let before = client.received.len();
            receive(&mut client);
            assert!((client.received.len() - before) * parts <= REPLAY_RECEIVE_BYTES_MAX + parts);
        }
        assert!(client.held_bytes() > messages as usize * parts);
        assert!(client.received.iter().all(|message| message.last.is_unique()), "no payload keeps a block");
        for seq in 0..messages {
            assert_eq!(client.receive(0), Ok(Some(Answer::Batch(EventSeq(seq), vec![1, 2, 3].into()))));
        }
        assert_eq!(client.held_bytes(), 0);
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
            assert_eq!(link.tick(u64::MAX, 100), None, "{state:?}: once only");
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
