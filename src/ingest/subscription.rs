//! One publisher's sockets: a SUB of its own, since frames carry no publisher identity, and the PAIR over
//! which libzmq tells what becomes of its connection.

use std::collections::VecDeque;
use std::os::fd::RawFd;

use zmq::{Message, Socket, SocketEvent, SocketType};

use crate::error::{Error, Kind, Result};
use crate::fleet::EventSource;
use crate::ids::EventSeq;
use crate::limits::{INGEST_FETCH_BYTES_MAX, INGEST_FETCH_MESSAGES_MAX, ZMQ_MESSAGE_BYTES_MAX};

const RECONNECT_MS_MIN: i32 = 100;
const RECONNECT_MS_MAX: i32 = 2_000;
/// A publisher whose host is gone says nothing; the heartbeat notices.
const HEARTBEAT_MS: i32 = 5_000;
const HEARTBEAT_TIMEOUT_MS: i32 = 15_000;
/// A peer that accepts and never speaks ZMTP.
const HANDSHAKE_MS_MAX: i32 = 10_000;
const SEQ_BYTES: usize = 8;

/// What the connection did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkEvent {
    /// A publisher is there and takes subscriptions.
    Handshake,
    /// A connection ended.
    Disconnected,
    /// The endpoint could not even be tried: its host name does not resolve, or no socket could be made.
    Unopened,
    /// Whoever answers at the endpoint is no publisher that we can talk to.
    HandshakeFailed,
}

const HANDSHAKE_FAILURES: [SocketEvent; 3] = [
    SocketEvent::HANDSHAKE_FAILED_NO_DETAIL,
    SocketEvent::HANDSHAKE_FAILED_PROTOCOL,
    SocketEvent::HANDSHAKE_FAILED_AUTH,
];

/// What libzmq says of an attempt that got as far as a socket.
const ATTEMPTS: [SocketEvent; 3] = [SocketEvent::CONNECTED, SocketEvent::CONNECT_DELAYED, SocketEvent::CLOSED];

/// One message of the stream.
#[derive(Debug)]
pub(super) enum Received {
    /// A batch by its framing: its sequence, and its payload, which is not yet looked at.
    Batch(EventSeq, Message),
    /// So many frames, and not an 8-byte one before the last.
    Misframed(usize),
}

/// The sockets of one publisher.
pub(super) struct Subscription {
    sub: Socket,
    monitor: Socket,
    attempts: Attempts,
    /// The frame before the last, used again for every message.
    previous: Message,
    /// Messages that were fetched and not yet taken.
    fetched: VecDeque<Received>,
}

impl Subscription {
    /// Opens the sockets and starts to connect; an unreachable publisher is tried again for ever.
    ///
    /// `number` is unique within the context.
    ///
    /// # Errors
    /// [`Kind::Config`] where the endpoint cannot be used, [`Kind::System`] where there are no sockets left.
    pub(super) fn open(
        context: &zmq::Context,
        source: &EventSource,
        receive_messages_max: i32,
        number: usize,
    ) -> Result<Self> {
        let (sub, monitor) = sockets(context, receive_messages_max, number).map_err(|error| {
            Error::new(Kind::System, "cannot open the sockets of a publisher", "raise the limit of open files")
                .caused_by(error)
        })?;
        sub.set_subscribe(source.topic.as_bytes()).and_then(|()| sub.connect(&source.endpoint)).map_err(|error| {
            Error::new(
                Kind::Config,
                format!("cannot connect to events endpoint `{}`", source.endpoint),
                "write it as tcp://HOST:PORT or ipc:///PATH",
            )
            .caused_by(error)
        })?;
        Ok(Self { sub, monitor, attempts: Attempts::default(), previous: Message::new(), fetched: VecDeque::new() })
    }

    /// The descriptors to wait on, of the stream and of its monitor. Both are edge-triggered: after a wake each
    /// must be read until it says that nothing is left.
    pub(super) fn descriptors(&self) -> zmq::Result<[RawFd; 2]> {
        Ok([self.sub.get_fd()?, self.monitor.get_fd()?])
    }

    /// Fetches some messages from the socket, unless some are still to be taken; `true` = the socket has no more, so
    /// that its descriptor will signal what comes next.
    ///
    /// Several at once, because whoever takes them has to know first what became of the connection, and asking for
    /// that is a system call.
    pub(super) fn fetch(&mut self) -> zmq::Result<bool> {
        let mut bytes = 0;
        if !self.fetched.is_empty() {
            return Ok(false);
        }
        while self.fetched.len() < INGEST_FETCH_MESSAGES_MAX && bytes < INGEST_FETCH_BYTES_MAX {
            let Some(received) = self.receive()? else { return Ok(true) };
            if let Received::Batch(_, payload) = &received {
                bytes += payload.len();
            }
            self.fetched.push_back(received);
        }
        Ok(false)
    }

    /// The next of the messages that were fetched.
    pub(super) fn take(&mut self) -> Option<Received> {
        self.fetched.pop_front()
    }

    /// Drops what was fetched and not taken.
    pub(super) fn drop_fetched(&mut self) {
        self.fetched.clear();
    }

    /// The next message, if one is there.
    fn receive(&mut self) -> zmq::Result<Option<Received>> {
        let mut last = Message::new();
        if !receive_frame(&self.sub, &mut last)? {
            return Ok(None);
        }
        let mut frames = 1;
        while last.get_more() {
            std::mem::swap(&mut last, &mut self.previous);
            // Frames of one message arrive together.
            if !receive_frame(&self.sub, &mut last)? {
                break;
            }
            frames += 1;
        }
        let seq = <[u8; SEQ_BYTES]>::try_from(&*self.previous);
        Ok(Some(match seq {
            Ok(seq) if frames > 1 => Received::Batch(EventSeq(u64::from_be_bytes(seq)), last),
            _ => Received::Misframed(frames),
        }))
    }

    /// The next thing the connection did, if there is one.
    pub(super) fn link_event(&mut self) -> zmq::Result<Option<LinkEvent>> {
        let mut frame = Message::new();
        loop {
            if !receive_frame(&self.monitor, &mut frame)? {
                return Ok(None);
            }
            let event = self.attempts.link_event(&frame);
            while frame.get_more() && receive_frame(&self.monitor, &mut frame)? {}
            if event.is_some() {
                return Ok(event);
            }
        }
    }
}

/// Tells attempts to connect that failed from those that could not be made: of the latter libzmq says nothing
/// but that it will try again. Of a peer whose socket is of a type that does not fit, such as a replay socket, it says
/// nothing but that the connection ended.
#[derive(Debug, Default)]
struct Attempts {
    /// Something was tried since libzmq last said that it will try again.
    tried: bool,
    /// The connection that ends next has shaken hands, or has been told not to.
    told: bool,
}

impl Attempts {
    /// Reads a monitor's first frame: event (u16) and value (u32), in the host's byte order. `None` for an
    /// event that changes nothing or was not asked for.
    fn link_event(&mut self, frame: &[u8]) -> Option<LinkEvent> {
        let number = u16::from_ne_bytes(frame.get(..2)?.try_into().ok()?);
        let is = |event: SocketEvent| event.to_raw() == number;
        if is(SocketEvent::CONNECT_RETRIED) {
            return (!std::mem::take(&mut self.tried)).then_some(LinkEvent::Unopened);
        }
        if ATTEMPTS.into_iter().any(is) {
            self.tried = true;
            None
        } else if is(SocketEvent::HANDSHAKE_SUCCEEDED) {
            self.told = true;
            Some(LinkEvent::Handshake)
        } else if is(SocketEvent::DISCONNECTED) {
            Some(if std::mem::take(&mut self.told) { LinkEvent::Disconnected } else { LinkEvent::HandshakeFailed })
        } else {
            let failed = HANDSHAKE_FAILURES.into_iter().any(is);
            self.told |= failed;
            failed.then_some(LinkEvent::HandshakeFailed)
        }
    }
}

/// Receives into `frame`; `false` = nothing there, so that the descriptor will signal what comes next.
pub(super) fn receive_frame(socket: &Socket, frame: &mut Message) -> zmq::Result<bool> {
    loop {
        match socket.recv(frame, zmq::DONTWAIT) {
            Ok(()) => return Ok(true),
            Err(zmq::Error::EINTR) => {}
            // libzmq takes in every signal and looks once more before it says this: what comes later signals anew.
            Err(zmq::Error::EAGAIN) => return Ok(false),
            Err(error) => return Err(error),
        }
    }
}

fn sockets(context: &zmq::Context, receive_messages_max: i32, number: usize) -> zmq::Result<(Socket, Socket)> {
    let sub = context.socket(SocketType::SUB)?;
    sub.set_linger(0)?;
    sub.set_ipv6(true)?;
    sub.set_rcvhwm(receive_messages_max)?;
    sub.set_maxmsgsize(ZMQ_MESSAGE_BYTES_MAX)?;
    sub.set_reconnect_ivl(RECONNECT_MS_MIN)?;
    sub.set_reconnect_ivl_max(RECONNECT_MS_MAX)?;
    sub.set_heartbeat_ivl(HEARTBEAT_MS)?;
    sub.set_heartbeat_timeout(HEARTBEAT_TIMEOUT_MS)?;
    sub.set_handshake_ivl(HANDSHAKE_MS_MAX)?;
    let endpoint = format!("inproc://monitor-{number}");
    let ours = [SocketEvent::HANDSHAKE_SUCCEEDED, SocketEvent::DISCONNECTED, SocketEvent::CONNECT_RETRIED];
    let events = HANDSHAKE_FAILURES.into_iter().chain(ATTEMPTS).chain(ours);
    sub.monitor(&endpoint, events.fold(0, |mask, event| mask | i32::from(event.to_raw())))?;
    let monitor = context.socket(SocketType::PAIR)?;
    monitor.set_linger(0)?;
    monitor.connect(&endpoint)?;
    Ok((sub, monitor))
}

#[cfg(test)]
impl Subscription {
    /// Makes every further [`Subscription::receive`] fail.
    pub(super) fn sabotage(&mut self) -> zmq::Result<()> {
        self.sub = zmq::Context::new().socket(SocketType::PUSH)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(event: SocketEvent) -> Vec<u8> {
        [event.to_raw().to_ne_bytes().as_slice(), &[0; 4]].concat()
    }

    #[test]
    fn monitor_frames_become_link_events() {
        let mut attempts = Attempts::default();
        assert_eq!(attempts.link_event(&frame(SocketEvent::HANDSHAKE_SUCCEEDED)), Some(LinkEvent::Handshake));
        assert_eq!(attempts.link_event(&frame(SocketEvent::DISCONNECTED)), Some(LinkEvent::Disconnected));
        for failure in HANDSHAKE_FAILURES {
            assert_eq!(attempts.link_event(&frame(failure)), Some(LinkEvent::HandshakeFailed));
            let ended = attempts.link_event(&frame(SocketEvent::DISCONNECTED));
            assert_eq!(ended, Some(LinkEvent::Disconnected), "counted once");
        }
        let untold = attempts.link_event(&frame(SocketEvent::DISCONNECTED));
        assert_eq!(untold, Some(LinkEvent::HandshakeFailed), "it ended before anybody shook hands");
        assert_eq!(attempts.link_event(&frame(SocketEvent::LISTENING)), None);
        assert_eq!(attempts.link_event(&[1]), None);
    }

    #[test]
    fn only_an_attempt_that_was_not_made_is_unopened() {
        for tried in ATTEMPTS {
            let mut attempts = Attempts::default();
            assert_eq!(attempts.link_event(&frame(tried)), None);
            assert_eq!(attempts.link_event(&frame(SocketEvent::CONNECT_RETRIED)), None, "{tried:?}");
            assert_eq!(attempts.link_event(&frame(SocketEvent::CONNECT_RETRIED)), Some(LinkEvent::Unopened));
        }
    }

    /// What the connection to `endpoint` first does that is told, `None` after so many attempts without.
    fn first_told(endpoint: &str, attempts: usize) -> Option<LinkEvent> {
        let source = EventSource { endpoint: endpoint.into(), replay: None, topic: String::new() };
        let mut subscription = Subscription::open(&zmq::Context::new(), &source, 10, 0).expect("well formed");
        let mut frame = Message::new();
        let mut retries = 0;
        while retries < attempts {
            subscription.monitor.recv(&mut frame, 0).expect("an event");
            retries += usize::from(frame[..2] == SocketEvent::CONNECT_RETRIED.to_raw().to_ne_bytes());
            let event = subscription.attempts.link_event(&frame);
            while frame.get_more() {
                subscription.monitor.recv(&mut frame, 0).expect("the rest of it");
            }
            if event.is_some() {
                return event;
            }
        }
        None
    }

    #[test]
    fn libzmq_lets_a_name_that_does_not_resolve_be_told_from_a_publisher_that_is_not_there() {
        // No resolver is asked for a name with an empty label.
        assert_eq!(first_told("tcp://no..such.host:5557", 1), Some(LinkEvent::Unopened));
        let folder = tempfile::tempdir().expect("a folder");
        assert_eq!(first_told(&format!("ipc://{}/nobody", folder.path().display()), 3), None);
        assert_eq!(first_told("tcp://127.0.0.1:1", 3), None);
    }

    #[test]
    fn messages_are_fetched_a_few_at_a_time_and_taken_in_their_order() {
        let context = zmq::Context::new();
        let publisher = context.socket(zmq::XPUB).expect("a socket");
        publisher.bind("inproc://publisher").expect("a free name");
        let source = EventSource { endpoint: "inproc://publisher".into(), replay: None, topic: String::new() };
        let mut subscription = Subscription::open(&context, &source, 1000, 0).expect("well formed");
        assert!(subscription.fetch().expect("nothing yet"));
        publisher.recv_bytes(0).expect("the subscription");
        let numbers = 0..2 * INGEST_FETCH_MESSAGES_MAX as u64 + 1;
        for number in numbers.clone() {
            publisher.send_multipart([&b""[..], &number.to_be_bytes(), &[7; 3]], 0).expect("a subscriber");
        }
        publisher.send("alone", 0).expect("a subscriber");
        publisher
            .send_multipart([vec![], 0_u64.to_be_bytes().into(), vec![7; INGEST_FETCH_BYTES_MAX]], 0)
            .expect("sent");
        publisher.send_multipart([vec![], 9_u64.to_be_bytes().into(), vec![7]], 0).expect("sent");
        let (mut sequences, mut fetches, mut misframed) = (Vec::new(), Vec::new(), 0);
        loop {
            let drained = subscription.fetch().expect("a socket that works");
            fetches.push(subscription.fetched.len());
            assert!(subscription.fetched.is_empty() || !subscription.fetch().expect("as before"), "those come first");
            while let Some(received) = subscription.take() {
                match received {
                    Received::Batch(seq, payload) => {
                        assert!(payload.iter().all(|byte| *byte == 7));
                        sequences.push(seq.0);
                    }
                    Received::Misframed(frames) => misframed += frames,
                }
            }
            if drained {
                break;
            }
        }
        assert_eq!(sequences, numbers.chain([0, 9]).collect::<Vec<_>>());
        assert_eq!((fetches, misframed), (vec![INGEST_FETCH_MESSAGES_MAX, INGEST_FETCH_MESSAGES_MAX, 3, 1], 1));
    }
}
