//! A connection, whatever carries its bytes: frames in, replies out.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::io;
use std::rc::Rc;

use super::busy_poll::Looker;
use super::deadlines::Owed;
use super::io_backend::Stream;
use super::lane::Handed;
use super::receive::{FrameReader, Next, NoRoom, ReceiveRoom};
use super::reply_writer::Outlet;
use crate::error::{Error, Kind};
use crate::ids::CorrelationId;
use crate::limits::{
    FRAMES_PER_TURN_MAX, READS_PER_TURN_MAX, REPLY_BUFFER_BYTES_KEPT, REPLY_BYTES_PER_TURN_MAX,
    REQUEST_BYTES_PER_TURN_MAX, WORK_PER_TURN_MAX,
};
use crate::load::SessionId;
use crate::wire::{FrameHeader, HeaderFault, PROTOCOL_VERSION, unsupported_version};

/// Who is at the other end, and how far the dialogue has come.
#[derive(Debug)]
pub struct Peer {
    /// The number of its connection on its core.
    pub connection: u64,
    /// The user the peer's process ran as when it connected.
    pub uid: u32,
    /// How far the dialogue has come.
    pub phase: Phase,
    /// What carries its bytes.
    pub carried: Carried,
    /// What is to go with the last reply.
    pub handed: Option<Handed>,
}

/// What carries a connection's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carried {
    /// A socket.
    Socket,
    /// A lane, which is part of a socket's connection.
    Lane,
}

/// How far a connection's dialogue has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Nothing but hello is answered.
    HelloAwaited,
    /// Said hello; on the routing socket, for this session.
    Open(Option<SessionId>),
}

/// What answers the frames of connections. Every call appends one reply to `out`, or none if it comes later.
pub trait Respond {
    /// Answers a frame whose version is spoken here.
    fn respond(&mut self, peer: &mut Peer, header: &FrameHeader, body: &[u8], out: &mut Vec<u8>);

    /// Answers a frame that is not looked into.
    fn refuse(&mut self, id: CorrelationId, error: &Error, out: &mut Vec<u8>);

    /// The connection is gone.
    fn closed(&mut self, peer: &mut Peer);

    /// How much work the answers since the last call were, in blocks of prompts. 0 = it is not reckoned.
    fn take_work(&mut self) -> u64 {
        0
    }

    /// A turn is over only because of how much work it was.
    fn turn_ended_by_work(&mut self) {}
}

/// What a connection wants next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Every whole frame is answered: write what there is, then read.
    Continue,
    /// The turn is over: write what there is, let the other connections have theirs, then call
    /// [`Connection::on_bytes`] again before reading.
    Yield,
    /// Write what there is, then close: the next frame cannot be found.
    Close {
        /// What was wrong with the header.
        reason: HeaderFault,
    },
}

/// The state of one connection.
#[derive(Debug)]
pub struct Connection {
    frames: FrameReader,
    peer: Peer,
    turn: Turn,
    /// Frames answered.
    frames_done: u64,
    owed: Rc<Cell<Owed>>,
}

/// What a connection has had since it last gave way to others.
#[derive(Clone, Copy, Debug, Default)]
struct Turn {
    frames: u32,
    request_bytes: usize,
    reply_bytes: usize,
    work: u64,
}

impl Turn {
    const fn is_over(self) -> bool {
        self.is_full() || self.work >= WORK_PER_TURN_MAX
    }

    /// Whether it is over whatever work it was.
    const fn is_full(self) -> bool {
        self.frames >= FRAMES_PER_TURN_MAX
            || self.request_bytes >= REQUEST_BYTES_PER_TURN_MAX
            || self.reply_bytes >= REPLY_BYTES_PER_TURN_MAX
    }
}

impl Connection {
    /// A connection of user `uid` that answers bodies of up to `body_bytes_max` bytes.
    #[must_use]
    pub fn new(uid: u32, body_bytes_max: u32) -> Self {
        let (phase, carried) = (Phase::HelloAwaited, Carried::Socket);
        let peer = Peer { connection: 0, uid, phase, carried, handed: None };
        let (frames, owed) = (FrameReader::new(body_bytes_max, Rc::default(), uid), Rc::default());
        Self { frames, peer, turn: Turn::default(), frames_done: 0, owed }
    }

    /// The same with a receive buffer that shares `room` with those of others.
    #[must_use]
    pub fn within(mut self, room: &Rc<ReceiveRoom>) -> Self {
        self.frames = FrameReader::new(self.frames.body_bytes_max(), Rc::clone(room), self.peer.uid);
        self
    }

    /// The same as number `connection` of its core.
    #[must_use]
    pub const fn numbered(mut self, connection: u64) -> Self {
        self.peer.connection = connection;
        self
    }

    /// What the peer owes, as of the last call.
    #[must_use]
    pub fn owed(&self) -> Rc<Cell<Owed>> {
        Rc::clone(&self.owed)
    }

    /// The lane of a connection, as number `connection` of its core.
    pub(super) fn of_lane(owner: &Peer, connection: u64, body_bytes_max: u32) -> Self {
        let peer = Peer { connection, carried: Carried::Lane, handed: None, ..*owner };
        Self { peer, ..Self::new(0, body_bytes_max) }
    }

    /// What is to go with the replies that were answered last.
    pub fn take_handed(&mut self) -> Option<Handed> {
        self.peer.handed.take()
    }

    /// The receive buffer, to be read into behind what it holds; there is room.
    pub fn take_buffer(&mut self) -> Vec<u8> {
        self.owed.set(match self.peer.phase {
            _ if self.frames.is_mid_frame() => Owed::Frame(self.frames_done),
            Phase::HelloAwaited => Owed::Hello,
            Phase::Open(_) => Owed::Nothing,
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

    /// Answers every whole frame in the buffer, until it is the others' turn.
    pub fn on_bytes<R: Respond>(&mut self, responder: &mut R, out: &mut Vec<u8>) -> Flow {
        let flow = self.answer_frames(responder, out);
        self.owed.set(if out.is_empty() { Owed::Nothing } else { Owed::Room(self.frames_done) });
        flow
    }

    fn answer_frames<R: Respond>(&mut self, responder: &mut R, out: &mut Vec<u8>) -> Flow {
        loop {
            // What is handed over goes with the reply that was answered last.
            if self.turn.is_over() || self.peer.handed.is_some() {
                if self.turn.is_over() && !self.turn.is_full() {
                    responder.turn_ended_by_work();
                }
                self.turn = Turn::default();
                return Flow::Yield;
            }
            let written = out.len();
            let request_bytes = match self.frames.next() {
                Next::Frame(header, body) if header.version == PROTOCOL_VERSION => {
                    let body = self.frames.body(body);
                    responder.respond(&mut self.peer, &header, body, out);
                    body.len()
                }
                Next::Frame(header, body) => {
                    let error = unsupported_version(&format!("the frame is of protocol version {}", header.version));
                    responder.refuse(header.correlation_id, &error, out);
                    body.len()
                }
                Next::Oversized(header) => {
                    let error = oversized(&header, self.frames.body_bytes_max());
                    responder.refuse(header.correlation_id, &error, out);
                    0
                }
                Next::NoRoom(header, why) => {
                    responder.refuse(header.correlation_id, &no_room(why), out);
                    0
                }
                Next::Incomplete => return Flow::Continue,
                Next::Untrusted(reason) => return Flow::Close { reason },
            };
            self.turn.frames += 1;
            self.turn.request_bytes += request_bytes;
            self.turn.reply_bytes += out.len() - written;
            self.turn.work += responder.take_work();
            self.frames_done += 1;
        }
    }

    /// Tells `responder` that the connection is gone. Call it once, last.
    pub fn on_closed<R: Respond>(&mut self, responder: &mut R) {
        responder.closed(&mut self.peer);
    }
}

/// How a connection ended.
#[derive(Debug)]
pub(super) enum Ended {
    /// The peer, or a drain, ended it.
    Eof {
        /// Part of a frame had come, the rest never did.
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
    /// Whether the peer merely left: at the end of a frame, or without reading what it had asked for.
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

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Eof { mid_frame: false } => f.write_str("the peer has ended it"),
            Self::Eof { mid_frame: true } => f.write_str("it ended in the middle of a frame"),
            Self::Untrusted(reason) => write!(f, "its frame header cannot be trusted: {reason}"),
            Self::Failed(error) => write!(f, "its socket failed: {error}"),
            Self::Unread => f.write_str("its peer left its replies unread"),
        }
    }
}

/// Reads, answers and writes until the connection ends. What is answered in one turn goes by one write; while a write
/// waits, nothing more is read. Replies that come later go by the `outlet` too.
/// `looker` reads where the core looks for work, and is told of every read.
pub(super) async fn drive<S: Stream, R: Respond>(
    stream: &S,
    responder: &RefCell<R>,
    connection: &RefCell<Connection>,
    outlet: &Outlet,
    looker: Option<&Looker>,
) -> Ended {
    let mut out = Vec::new();
    let mut reads_in_turn = 0;
    loop {
        let buffer = connection.borrow_mut().take_buffer();
        let (read, buffer) = match looker {
            Some(looker) => looker.read(stream, buffer).await,
            None => stream.read(buffer).await,
        };
        connection.borrow_mut().give_back(buffer);
        match read {
            Ok(0) => return Ended::Eof { mid_frame: connection.borrow().is_mid_frame() },
            Ok(_) => looker.into_iter().for_each(Looker::worked),
            Err(error) => return Ended::Failed(error),
        }
        loop {
            let flow = connection.borrow_mut().on_bytes(&mut *responder.borrow_mut(), &mut out);
            if !out.is_empty() {
                let handed = connection.borrow_mut().take_handed();
                let (written, buffer) = match &handed {
                    None => outlet.write_all(stream, out).await,
                    Some(handed) => outlet.hand_over(stream, out, handed).await,
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
                Flow::Yield => {
                    reads_in_turn = 0;
                    tokio::task::yield_now().await;
                }
                Flow::Close { reason } => return Ended::Untrusted(reason),
            }
        }
        reads_in_turn += 1;
        if reads_in_turn == READS_PER_TURN_MAX {
            // A peer that always has more must not keep the core from the others.
            reads_in_turn = 0;
            tokio::task::yield_now().await;
        }
    }
}

fn oversized(header: &FrameHeader, max: u32) -> Error {
    Error::new(
        Kind::Oversized,
        format!("a body of {} bytes, the limit is {max}", header.body_bytes),
        "send a shorter prompt, or send it as local hashes, or raise frame_body_bytes_max in the configuration",
    )
}

fn no_room(why: NoRoom) -> Error {
    let what = match why {
        NoRoom::All => "too many large frames are on their way at once",
        NoRoom::User => "large frames of this user take as much room as serve.user_share_percent allows",
    };
    let remedy = "ask again, keep fewer large requests in flight, or send prompts as local hashes";
    Error::new(Kind::Overloaded, what, remedy)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::limits::FRAME_HEADER_BYTES;
    use crate::wire::FrameKind;

    /// Answers every frame with as many bytes as it is told, the id first.
    #[derive(Default)]
    struct Echo {
        reply_bytes: usize,
        refused: usize,
        /// What each answer is.
        work: u64,
        undone: u64,
        turns_by_work: usize,
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

        fn turn_ended_by_work(&mut self) {
            self.turns_by_work += 1;
        }
    }

    fn receive(connection: &mut Connection, bytes: &[u8]) {
        let mut buffer = connection.take_buffer();
        buffer.extend_from_slice(bytes);
        connection.give_back(buffer);
    }

    /// Takes turns until everything is answered; how many replies each had.
    fn turns(connection: &mut Connection, echo: &mut Echo) -> Vec<usize> {
        let (mut turns, mut ids) = (Vec::new(), Vec::new());
        loop {
            let mut out = Vec::new();
            let flow = connection.on_bytes(echo, &mut out);
            turns.push(out.len() / echo.reply_bytes);
            ids.extend(out.chunks(echo.reply_bytes).map(|reply| reply[0]));
            match flow {
                Flow::Yield => {}
                Flow::Continue => break,
                Flow::Close { reason } => panic!("{reason}"),
            }
        }
        assert_eq!(ids, (0..ids.len()).map(|id| id as u8).collect::<Vec<_>>(), "in order, none twice");
        turns
    }

    fn frames(count: u64, body_bytes: usize) -> Vec<u8> {
        let frame = |id| {
            let header = FrameHeader::new(FrameKind::Route, body_bytes as u32, CorrelationId(id));
            [header.encode().as_slice(), &vec![0; body_bytes]].concat()
        };
        (0..count).flat_map(frame).collect()
    }

    #[test]
    fn a_turn_is_so_many_frames_or_bytes_of_requests_or_of_replies() {
        let new = || Connection::new(0, 1 << 20);
        let frames_max = u64::from(FRAMES_PER_TURN_MAX);
        let (mut connection, mut echo) = (new(), Echo::of(1));
        receive(&mut connection, &frames(frames_max * 2 + 1, 0));
        assert_eq!(turns(&mut connection, &mut echo), [frames_max as usize, frames_max as usize, 1]);
        let (mut connection, mut echo) = (new(), Echo::of(1));
        receive(&mut connection, &frames(7, REQUEST_BYTES_PER_TURN_MAX / 2 - 8));
        assert_eq!(turns(&mut connection, &mut echo), [3, 3, 1], "the one that reaches the bound is the last");
        let (mut connection, mut echo) = (new(), Echo::of(REPLY_BYTES_PER_TURN_MAX / 2));
        receive(&mut connection, &frames(5, 0));
        assert_eq!(turns(&mut connection, &mut echo), [2, 2, 1]);
        let (mut connection, mut echo) = (new(), Echo::of(REPLY_BYTES_PER_TURN_MAX * 4));
        receive(&mut connection, &frames(2, 0));
        assert_eq!(turns(&mut connection, &mut echo), [1, 1, 0], "the largest is answered, too");
    }

    #[test]
    fn a_turn_is_so_much_work_however_few_its_bytes() {
        let (mut connection, mut echo) =
            (Connection::new(0, 1 << 20), Echo { work: WORK_PER_TURN_MAX / 3, ..Echo::of(1) });
        receive(&mut connection, &frames(9, 0));
        assert_eq!(turns(&mut connection, &mut echo), [4, 4, 1], "the one that reaches the bound is the last");
        assert_eq!(echo.turns_by_work, 2);
        // A turn that is over by its frames is not over by its work.
        let (mut connection, mut echo) = (Connection::new(0, 1 << 20), Echo::of(1));
        echo.work = WORK_PER_TURN_MAX / u64::from(FRAMES_PER_TURN_MAX);
        receive(&mut connection, &frames(u64::from(FRAMES_PER_TURN_MAX) + 1, 0));
        assert_eq!(turns(&mut connection, &mut echo).len(), 2);
        assert_eq!(echo.turns_by_work, 0);
    }

    #[test]
    fn a_turn_goes_on_over_reads() {
        let (mut connection, mut echo) = (Connection::new(0, 64), Echo::of(1));
        let mut out = Vec::new();
        for _ in 1..FRAMES_PER_TURN_MAX {
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
    fn what_the_peer_owes_is_known() {
        let (mut connection, mut echo) = (Connection::new(0, 64), Echo::of(1));
        let (owed, mut out) = (connection.owed(), Vec::new());
        receive(&mut connection, &[]);
        assert_eq!(owed.get(), Owed::Hello);
        connection.peer.phase = Phase::Open(None);
        let frame = FrameHeader::new(FrameKind::Route, 0, CorrelationId(1)).encode();
        receive(&mut connection, &[&frame[..], &frame[..3]].concat());
        assert_eq!(owed.get(), Owed::Nothing);
        assert_eq!(connection.on_bytes(&mut echo, &mut out), Flow::Continue);
        assert_eq!(owed.get(), Owed::Room(1));
        out.clear();
        for byte in &frame[3..] {
            receive(&mut connection, &[*byte]);
            assert_eq!(owed.get(), Owed::Frame(1));
        }
        assert_eq!(connection.on_bytes(&mut echo, &mut out), Flow::Continue);
        receive(&mut connection, &[]);
        assert_eq!(owed.get(), Owed::Nothing);
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
                    if flow != Flow::Yield {
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
