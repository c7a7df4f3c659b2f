//! One publisher's connection as a stream of batches: a SUB of its own, since frames carry no publisher identity.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use mio::{Registry, Token};

use crate::error::Result;
use crate::fleet::EventSource;
use crate::ids::EventSeq;
use crate::limits::{
    INGEST_FETCH_BYTES_MAX, INGEST_FETCH_MESSAGES_MAX, ZMQ_COMMAND_BYTES_MAX, ZMQ_MESSAGE_BYTES_MAX, ZMQ_PARTS_MAX,
};
use crate::zmtp::{Bounds, LinkEvent, Message, Next, Opening, Peer, Role};

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
}
