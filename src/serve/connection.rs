//! A connection, whatever transport carries its bytes: frames in, replies out.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::io;
use std::rc::Rc;

use super::busy_poll::Poller;
use super::deadlines::PeerWait;
use super::io_backend::Stream;
use super::lane::LaneDescriptors;
use super::receive::{FrameReader, Next, OverBudget, ReceiveBudget};
use super::reply_writer::ReplyWriter;
use crate::error::{Error, Kind};
use crate::ids::CorrelationId;
use crate::limits::{
    FRAMES_OF_BUSY_PEER_MIN, FRAMES_PER_QUANTUM_MAX, FRAMES_PER_WRITE_MAX, READS_PER_QUANTUM_MAX,
    REPLY_BUFFER_BYTES_IDLE, REPLY_BUFFER_BYTES_KEPT, REPLY_BYTES_PER_QUANTUM_MAX, REQUEST_BYTES_PER_QUANTUM_MAX,
    WORK_PER_QUANTUM_MAX,
};
use crate::load::SessionId;
use crate::wire::{FrameHeader, HeaderFault, PROTOCOL_VERSION, unsupported_version};

/// The process at the other end, and the state of the dialogue.
#[derive(Debug)]
pub struct Peer {
    /// The number of its connection on its core.
    pub connection: u64,
    /// The user of the peer's process when it connected.
    pub uid: u32,
    /// The state of the dialogue.
    pub phase: Phase,
    pub(crate) transport: TransportKind,
    /// Descriptors to send with the last reply.
    pub(crate) descriptors: Option<LaneDescriptors>,
}

/// The transport of a connection's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TransportKind {
    Socket,
    /// A lane, which belongs to a socket's connection.
    Lane,
    /// A connection from another host, which the remote port carries.
    Remote,
}

/// The state of a connection's dialogue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Only hello is answered.
    HelloAwaited,
    /// Hello was said; on the routing socket, for this session.
    Open(Option<SessionId>),
}

/// Answers the frames of connections. Every call appends one reply to `out`, or none if the reply comes later.
pub trait Respond {
    /// Answers a frame of a supported protocol version.
    fn respond(&mut self, peer: &mut Peer, header: &FrameHeader, body: &[u8], out: &mut Vec<u8>);

    /// Refuses a frame without reading its body.
    fn refuse(&mut self, id: CorrelationId, error: &Error, out: &mut Vec<u8>);

    /// The connection is closed.
    fn closed(&mut self, peer: &mut Peer);

    /// The work of the answers since the last call, in blocks of prompts. 0 = not measured.
    fn take_work(&mut self) -> u64 {
        0
    }

    /// Frames that have arrived are answered from now on, until [`Respond::end_batch`].
    fn begin_batch(&mut self) {}

    /// The batch is over: its replies are in the buffer.
    fn end_batch(&mut self) {}

    /// A quantum has ended only because of its work.
    fn quantum_ended_by_work(&mut self) {}
}

/// The next step of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Every whole frame is answered: write the replies, then read.
    Continue,
    /// Some frames are answered: write the replies, then call [`Connection::on_bytes`] again before reading.
    Write,
    /// The quantum is over: write the replies, let the other connections have theirs, then call
    /// [`Connection::on_bytes`] again before reading.
    Yield,
    /// Write the replies, then close: the next frame cannot be found.
    Close {
        /// The header's fault.
        reason: HeaderFault,
    },
}

/// The state of one connection.
#[derive(Debug)]
pub struct Connection {
    frames: FrameReader,
    peer: Peer,
    quantum: Quantum,
    frames_done: u64,
    peer_wait: Rc<Cell<PeerWait>>,
}

/// The use of the current fairness quantum.
#[derive(Clone, Copy, Debug, Default)]
struct Quantum {
    frames: u32,
    request_bytes: usize,
    reply_bytes: usize,
    work: u64,
}

impl Quantum {
    const fn is_over(self) -> bool {
        self.is_full() || self.work >= WORK_PER_QUANTUM_MAX
    }

    /// Whether it is over regardless of its work.
    const fn is_full(self) -> bool {
        self.frames >= FRAMES_PER_QUANTUM_MAX
            || self.request_bytes >= REQUEST_BYTES_PER_QUANTUM_MAX
            || self.reply_bytes >= REPLY_BYTES_PER_QUANTUM_MAX
    }
}

impl Connection {
    /// A connection of user `uid` that answers bodies of up to `body_bytes_max` bytes.
    #[must_use]
    pub fn new(uid: u32, body_bytes_max: u32) -> Self {
        let (phase, transport) = (Phase::HelloAwaited, TransportKind::Socket);
        let peer = Peer { connection: 0, uid, phase, transport, descriptors: None };
        let (frames, peer_wait) = (FrameReader::new(body_bytes_max, Rc::default(), uid), Rc::default());
        Self { frames, peer, quantum: Quantum::default(), frames_done: 0, peer_wait }
    }

    /// The same with a receive buffer within a budget that connections share.
    #[must_use]
    pub(super) fn within(mut self, budget: &Rc<ReceiveBudget>) -> Self {
        self.frames = FrameReader::new(self.frames.body_bytes_max(), Rc::clone(budget), self.peer.uid);
        self
    }

    /// The same over another transport.
    #[must_use]
    pub(super) const fn over(mut self, transport: TransportKind) -> Self {
        self.peer.transport = transport;
        self
    }

    /// The same as number `connection` of its core.
    #[must_use]
    pub(super) const fn numbered(mut self, connection: u64) -> Self {
        self.peer.connection = connection;
        self
    }

    /// What the connection waits for, as of the last call.
    #[must_use]
    pub(super) fn peer_wait(&self) -> Rc<Cell<PeerWait>> {
        Rc::clone(&self.peer_wait)
    }

    /// The lane of a connection, as number `connection` of its core.
    pub(super) fn of_lane(owner: &Peer, connection: u64, body_bytes_max: u32) -> Self {
        let peer = Peer { connection, transport: TransportKind::Lane, descriptors: None, ..*owner };
        Self { peer, ..Self::new(0, body_bytes_max) }
    }

    /// The descriptors to send with the last replies.
    pub(super) fn take_descriptors(&mut self) -> Option<LaneDescriptors> {
        self.peer.descriptors.take()
    }

    /// The receive buffer, to read into behind its contents. It has space.
    pub fn take_buffer(&mut self) -> Vec<u8> {
        self.peer_wait.set(match self.peer.phase {
            _ if self.frames.is_mid_frame() => PeerWait::Frame(self.frames_done),
            Phase::HelloAwaited => PeerWait::Hello,
            Phase::Open(_) => PeerWait::Nothing,
        });
        self.frames.take()
    }

    /// Takes the receive buffer back after a read, whether it succeeded or not.
    pub fn give_back(&mut self, buffer: Vec<u8>) {
        self.frames.give_back(buffer);
    }

    /// Whether part of a frame waits for the rest.
    #[must_use]
    pub const fn is_mid_frame(&self) -> bool {
        self.frames.is_mid_frame()
    }

    /// Answers the whole frames in the buffer, until the quantum is over.
    pub fn on_bytes<R: Respond>(&mut self, responder: &mut R, out: &mut Vec<u8>) -> Flow {
        let batch = OpenBatch::new(responder);
        let flow = self.answer_frames(batch.0, out);
        drop(batch);
        self.peer_wait.set(if out.is_empty() { PeerWait::Nothing } else { PeerWait::ReplySpace(self.frames_done) });
        flow
    }

    fn answer_frames<R: Respond>(&mut self, responder: &mut R, out: &mut Vec<u8>) -> Flow {
        let mut answered = 0;
        loop {
            // Descriptors go with the last reply before them.
            if self.quantum.is_over() || self.peer.descriptors.is_some() {
                if self.quantum.is_over() && !self.quantum.is_full() {
                    responder.quantum_ended_by_work();
                }
                self.quantum = Quantum::default();
                return Flow::Yield;
            }
            if answered == FRAMES_PER_WRITE_MAX {
                return Flow::Write;
            }
            let written = out.len();
            let request_bytes = match self.frames.next() {
                Next::Frame(header, body) if header.version == PROTOCOL_VERSION => {
                    let body = self.frames.body(body);
                    responder.respond(&mut self.peer, &header, body, out);
                    body.len()
                }
                Next::Frame(header, body) => {
                    let error = unsupported_version(&format!("the frame has protocol version {}", header.version));
                    responder.refuse(header.correlation_id, &error, out);
                    body.len()
                }
                Next::Oversized(header) => {
                    let error = oversized(&header, self.frames.body_bytes_max());
                    responder.refuse(header.correlation_id, &error, out);
                    0
                }
                Next::OverBudget(header, why) => {
                    responder.refuse(header.correlation_id, &over_budget(why), out);
                    0
                }
                Next::Incomplete => return Flow::Continue,
                Next::Untrusted(reason) => return Flow::Close { reason },
            };
            self.quantum.frames += 1;
            self.quantum.request_bytes += request_bytes;
            self.quantum.reply_bytes += out.len() - written;
            self.quantum.work += responder.take_work();
            self.frames_done += 1;
            answered += 1;
        }
    }

    /// Tells `responder` that the connection is closed. Call it once, last.
    pub fn on_closed<R: Respond>(&mut self, responder: &mut R) {
        responder.closed(&mut self.peer);
    }
}

/// How a connection ended.
#[derive(Debug)]
pub(super) enum Ended {
    /// The peer, or a drain, ended it.
    Eof {
        /// Part of a frame came, and the rest did not.
        mid_frame: bool,
    },
    /// A header could not be trusted.
    Untrusted(HeaderFault),
    /// The socket failed.
    Failed(io::Error),
    /// It was closed because the peer left its replies unread.
    Unread,
}

impl Ended {
    /// Whether the peer merely left: at the end of a frame, or without reading its replies.
    pub(super) fn is_peer_leaving(&self) -> bool {
        match self {
            Self::Eof { mid_frame } => !mid_frame,
            Self::Untrusted(_) | Self::Unread => false,
            Self::Failed(error) => {
                matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
            }
        }
    }
}

/// A batch that ends also if an answer panics.
struct OpenBatch<'a, R: Respond>(&'a mut R);

impl<'a, R: Respond> OpenBatch<'a, R> {
    fn new(responder: &'a mut R) -> Self {
        responder.begin_batch();
        Self(responder)
    }
}

impl<R: Respond> Drop for OpenBatch<'_, R> {
    fn drop(&mut self) {
        self.0.end_batch();
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Eof { mid_frame: false } => f.write_str("the peer ended it"),
            Self::Eof { mid_frame: true } => f.write_str("it ended in the middle of a frame"),
            Self::Untrusted(reason) => write!(f, "its frame header cannot be trusted: {reason}"),
            Self::Failed(error) => write!(f, "its socket failed: {error}"),
            Self::Unread => f.write_str("its peer left its replies unread"),
        }
    }
}

/// Reads, answers and writes until the connection ends. One write sends the replies to at most [`FRAMES_PER_WRITE_MAX`]
/// frames, so that a peer with many requests in flight reads the first of them while the last are being answered. While a
/// write waits, nothing more is read. Pending replies go through the same `writer`. Where the core busy-polls, a `poller`
/// reads, and every read counts as its work.
pub(super) async fn drive<S: Stream, R: Respond>(
    stream: &S,
    responder: &RefCell<R>,
    connection: &RefCell<Connection>,
    writer: &ReplyWriter,
    poller: Option<&Poller>,
) -> Ended {
    let mut out = Vec::new();
    let (mut reads_in_quantum, mut frames_before) = (0, 0);
    loop {
        let frames_done = connection.borrow().frames_done;
        let is_busy = frames_done - std::mem::replace(&mut frames_before, frames_done) >= FRAMES_OF_BUSY_PEER_MIN;
        let mut buffer = connection.borrow_mut().take_buffer();
        // A peer with many requests in flight has sent more meanwhile, and one with large replies may have. From others, to
        // ask the kernel first would take a call more.
        let asks_first = is_busy || out.capacity() > REPLY_BUFFER_BYTES_IDLE;
        let arrived = if asks_first { stream.try_read(&mut buffer) } else { None };
        if arrived.is_none() {
            // The peer may be silent for hours.
            out.shrink_to(REPLY_BUFFER_BYTES_IDLE);
        }
        let (read, buffer) = match (arrived, poller) {
            (Some(read), _) => (read, buffer),
            (None, Some(poller)) => poller.read(stream, buffer).await,
            (None, None) => stream.read(buffer).await,
        };
        connection.borrow_mut().give_back(buffer);
        match read {
            Ok(0) => return Ended::Eof { mid_frame: connection.borrow().is_mid_frame() },
            Ok(_) => poller.into_iter().for_each(Poller::on_work),
            Err(error) => return Ended::Failed(error),
        }
        loop {
            let flow = connection.borrow_mut().on_bytes(&mut *responder.borrow_mut(), &mut out);
            if !out.is_empty() {
                let descriptors = connection.borrow_mut().take_descriptors();
                let (written, buffer) = match &descriptors {
                    None => writer.write_all(stream, out).await,
                    Some(descriptors) => writer.write_with_descriptors(stream, out, descriptors).await,
                };
                out = buffer;
                out.clear();
                out.shrink_to(REPLY_BUFFER_BYTES_KEPT);
                if let Err(error) = written {
                    return Ended::Failed(error);
                }
            }
            match flow {
                Flow::Continue => break,
                Flow::Write => {}
                Flow::Yield => {
                    reads_in_quantum = 0;
                    tokio::task::yield_now().await;
                }
                Flow::Close { reason } => return Ended::Untrusted(reason),
            }
        }
        reads_in_quantum += 1;
        if reads_in_quantum == READS_PER_QUANTUM_MAX {
            // A peer that always has more to read must not keep the core from the others.
            reads_in_quantum = 0;
            tokio::task::yield_now().await;
        }
    }
}

fn oversized(header: &FrameHeader, max: u32) -> Error {
    Error::new(
        Kind::Oversized,
        format!("the body has {} bytes, the limit is {max}", header.body_bytes),
        "send a shorter prompt, or send it as local hashes, or raise frame_body_bytes_max in the configuration",
    )
}

fn over_budget(why: OverBudget) -> Error {
    let what = match why {
        OverBudget::Total => "too many large frames are being received at once",
        OverBudget::User => "the large frames of this user take as much memory as serve.user_share_percent allows",
    };
    let remedy = "retry, keep fewer large requests in flight, or send prompts as local hashes";
    Error::new(Kind::Overloaded, what, remedy)
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;
    use crate::limits::FRAME_HEADER_BYTES;
    use crate::wire::FrameKind;

    /// Answers every frame with a reply of `reply_bytes` bytes, the id first.
    #[derive(Default)]
    struct Echo {
        reply_bytes: usize,
        refused: usize,
        /// The work of each answer.
        work: u64,
        undone: u64,
        quanta_by_work: usize,
    }

    impl Echo {
        fn of(reply_bytes: usize) -> Self {
            Self { reply_bytes, ..Self::default() }
        }
    }

    impl Respond for Echo {
        fn respond(&mut self, _: &mut Peer, header: &FrameHeader, _: &[u8], out: &mut Vec<u8>) {
            out.push(header.correlation_id.0 as u8);
            out.resize(out.len() + self.reply_bytes - 1, 0);
            self.undone += self.work;
        }

        fn refuse(&mut self, _: CorrelationId, _: &Error, _: &mut Vec<u8>) {
            self.refused += 1;
        }

        fn closed(&mut self, _: &mut Peer) {}

        fn take_work(&mut self) -> u64 {
            std::mem::take(&mut self.undone)
        }

        fn quantum_ended_by_work(&mut self) {
            self.quanta_by_work += 1;
        }
    }

    fn receive(connection: &mut Connection, bytes: &[u8]) {
        let mut buffer = connection.take_buffer();
        buffer.extend_from_slice(bytes);
        connection.give_back(buffer);
    }

    /// Runs quanta until everything is answered; the number of replies of each.
    fn quanta(connection: &mut Connection, echo: &mut Echo) -> Vec<usize> {
        let (mut quanta, mut ids, mut out) = (Vec::new(), Vec::new(), Vec::new());
        loop {
            let flow = connection.on_bytes(echo, &mut out);
            if flow == Flow::Write {
                continue;
            }
            quanta.push(out.len() / echo.reply_bytes);
            ids.extend(out.chunks(echo.reply_bytes).map(|reply| reply[0]));
            out.clear();
            match flow {
                Flow::Yield | Flow::Write => {}
                Flow::Continue => break,
                Flow::Close { reason } => panic!("{reason}"),
            }
        }
        assert_eq!(ids, (0..ids.len()).map(|id| id as u8).collect::<Vec<_>>(), "in order, each once");
        quanta
    }

    fn frames(count: u64, body_bytes: usize) -> Vec<u8> {
        let frame = |id| {
            let header = FrameHeader::new(FrameKind::Route, body_bytes as u32, CorrelationId(id));
            [header.encode().as_slice(), &vec![0; body_bytes]].concat()
        };
        (0..count).flat_map(frame).collect()
    }

    #[test]
    fn a_quantum_bounds_frames_request_bytes_and_reply_bytes() {
        let new = || Connection::new(0, 1 << 20);
        let frames_max = u64::from(FRAMES_PER_QUANTUM_MAX);
        let (mut connection, mut echo) = (new(), Echo::of(1));
        receive(&mut connection, &frames(frames_max * 2 + 1, 0));
        assert_eq!(quanta(&mut connection, &mut echo), [frames_max as usize, frames_max as usize, 1]);
        let (mut connection, mut echo) = (new(), Echo::of(1));
        receive(&mut connection, &frames(7, REQUEST_BYTES_PER_QUANTUM_MAX / 2 - 8));
        assert_eq!(quanta(&mut connection, &mut echo), [3, 3, 1], "the frame that reaches the limit is the last");
        let (mut connection, mut echo) = (new(), Echo::of(REPLY_BYTES_PER_QUANTUM_MAX / 2));
        receive(&mut connection, &frames(5, 0));
        assert_eq!(quanta(&mut connection, &mut echo), [2, 2, 1]);
        let (mut connection, mut echo) = (new(), Echo::of(REPLY_BYTES_PER_QUANTUM_MAX * 4));
        receive(&mut connection, &frames(2, 0));
        assert_eq!(quanta(&mut connection, &mut echo), [1, 1, 0], "the largest reply is written, too");
    }

    #[test]
    fn a_quantum_bounds_work_however_few_its_bytes() {
        let (mut connection, mut echo) =
            (Connection::new(0, 1 << 20), Echo { work: WORK_PER_QUANTUM_MAX / 3, ..Echo::of(1) });
        receive(&mut connection, &frames(9, 0));
        assert_eq!(quanta(&mut connection, &mut echo), [4, 4, 1], "the frame that reaches the limit is the last");
        assert_eq!(echo.quanta_by_work, 2);
        // A quantum that is over by its frames is not over by its work.
        let (mut connection, mut echo) = (Connection::new(0, 1 << 20), Echo::of(1));
        echo.work = WORK_PER_QUANTUM_MAX / u64::from(FRAMES_PER_QUANTUM_MAX);
        receive(&mut connection, &frames(u64::from(FRAMES_PER_QUANTUM_MAX) + 1, 0));
        assert_eq!(quanta(&mut connection, &mut echo).len(), 2);
        assert_eq!(echo.quanta_by_work, 0);
    }

    #[test]
    fn the_replies_to_many_frames_are_written_a_few_at_a_time() {
        let (mut connection, mut echo) = (Connection::new(0, 64), Echo::of(1));
        receive(&mut connection, &frames(u64::from(FRAMES_PER_WRITE_MAX) + 1, 0));
        let mut written = || {
            let mut out = Vec::new();
            (connection.on_bytes(&mut echo, &mut out), out.len())
        };
        assert_eq!(written(), (Flow::Write, FRAMES_PER_WRITE_MAX as usize));
        assert_eq!(written(), (Flow::Continue, 1));
    }

    /// Frames that arrive: before the connection waits for them, or only then. It notes the capacity of each buffer that it
    /// writes.
    #[derive(Default)]
    struct Scripted {
        arriving: RefCell<VecDeque<(bool, Vec<u8>)>>,
        capacities: RefCell<Vec<usize>>,
    }

    impl Stream for Scripted {
        fn from_std(_: std::os::unix::net::UnixStream) -> io::Result<Self> {
            Err(io::ErrorKind::Unsupported.into())
        }

        fn try_read(&self, buffer: &mut Vec<u8>) -> Option<io::Result<usize>> {
            let (_, bytes) = self.arriving.borrow_mut().pop_front_if(|(is_there, _)| *is_there)?;
            buffer.extend_from_slice(&bytes);
            Some(Ok(bytes.len()))
        }

        async fn read(&self, mut buffer: Vec<u8>) -> (io::Result<usize>, Vec<u8>) {
            let (_, bytes) = self.arriving.borrow_mut().pop_front().unwrap_or_default();
            buffer.extend_from_slice(&bytes);
            (Ok(bytes.len()), buffer)
        }

        async fn write_all(&self, bytes: Vec<u8>) -> (io::Result<()>, Vec<u8>) {
            self.capacities.borrow_mut().push(bytes.capacity());
            (Ok(()), bytes)
        }

        fn shutdown(&self, _: std::net::Shutdown) -> io::Result<()> {
            Ok(())
        }
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_connection_that_waits_for_requests_keeps_a_small_reply_buffer() {
        let stream = Scripted::default();
        let (many, one) = (frames(8, 0), frames(1, 0));
        stream.arriving.replace([(false, many), (true, one.clone()), (false, one.clone()), (false, one)].into());
        let (large, reply_bytes) = (REPLY_BYTES_PER_QUANTUM_MAX, REPLY_BYTES_PER_QUANTUM_MAX / 8);
        let (echo, connection) = (RefCell::new(Echo::of(reply_bytes)), RefCell::new(Connection::new(0, 64)));
        let ended = drive(&stream, &echo, &connection, &ReplyWriter::default(), None).await;
        assert!(matches!(ended, Ended::Eof { mid_frame: false }), "{ended}");
        let capacities = stream.capacities.take();
        let [first, arrived, waited, again] = capacities[..] else { panic!("{capacities:?}") };
        assert!(first >= large && arrived >= large, "{capacities:?}");
        assert!(waited < large / 2 && again < large / 2, "{capacities:?}");
    }

    #[test]
    fn a_quantum_spans_several_reads() {
        let (mut connection, mut echo) = (Connection::new(0, 64), Echo::of(1));
        let mut out = Vec::new();
        for _ in 1..FRAMES_PER_QUANTUM_MAX {
            receive(&mut connection, &frames(1, 8));
            assert_eq!(connection.on_bytes(&mut echo, &mut out), Flow::Continue);
        }
        receive(&mut connection, &frames(1, 8));
        assert_eq!(connection.on_bytes(&mut echo, &mut out), Flow::Yield);
        assert_eq!(connection.on_bytes(&mut echo, &mut out), Flow::Continue);
    }

    #[test]
    fn versions_and_sizes_are_refused_and_a_bad_header_closes() {
        let (mut connection, mut echo) = (Connection::new(0, 64), Echo::of(1));
        let good = FrameHeader::new(FrameKind::Route, 0, CorrelationId(1));
        let mut bytes = FrameHeader { version: 7, ..good }.encode().to_vec();
        bytes.extend(FrameHeader { body_bytes: 72, ..good }.encode());
        bytes.extend([0; 72]);
        bytes.extend(good.encode());
        receive(&mut connection, &bytes);
        let mut out = Vec::new();
        assert_eq!(connection.on_bytes(&mut echo, &mut out), Flow::Continue);
        assert_eq!((out.len(), echo.refused, connection.is_mid_frame()), (1, 2, false));
        receive(&mut connection, &[0; FRAME_HEADER_BYTES]);
        assert_eq!(connection.on_bytes(&mut echo, &mut out), Flow::Close { reason: HeaderFault::KindZero });
    }

    #[test]
    fn a_connection_notes_what_it_waits_for() {
        let (mut connection, mut echo) = (Connection::new(0, 64), Echo::of(1));
        let (peer_wait, mut out) = (connection.peer_wait(), Vec::new());
        receive(&mut connection, &[]);
        assert_eq!(peer_wait.get(), PeerWait::Hello);
        connection.peer.phase = Phase::Open(None);
        let frame = FrameHeader::new(FrameKind::Route, 0, CorrelationId(1)).encode();
        receive(&mut connection, &[&frame[..], &frame[..3]].concat());
        assert_eq!(peer_wait.get(), PeerWait::Nothing);
        assert_eq!(connection.on_bytes(&mut echo, &mut out), Flow::Continue);
        assert_eq!(peer_wait.get(), PeerWait::ReplySpace(1));
        out.clear();
        for byte in &frame[3..] {
            receive(&mut connection, &[*byte]);
            assert_eq!(peer_wait.get(), PeerWait::Frame(1));
        }
        assert_eq!(connection.on_bytes(&mut echo, &mut out), Flow::Continue);
        receive(&mut connection, &[]);
        assert_eq!(peer_wait.get(), PeerWait::Nothing);
    }

    proptest! {
        #[test]
        fn garbage_never_panics(chunks in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..80), 1..20)) {
            let (mut connection, mut echo) = (Connection::new(0, 64), Echo::of(1));
            let mut out = Vec::new();
            for chunk in chunks {
                receive(&mut connection, &chunk);
                let flow = loop {
                    let flow = connection.on_bytes(&mut echo, &mut out);
                    if !matches!(flow, Flow::Yield | Flow::Write) {
                        break flow;
                    }
                };
                if let Flow::Close { .. } = flow {
                    break;
                }
            }
        }
    }
}
