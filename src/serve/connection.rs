//! A connection, whatever carries its bytes: frames in, replies out.

use super::frames::{FrameReader, Next};
use crate::error::{Error, Kind};
use crate::ids::CorrelationId;
use crate::limits::{FRAMES_PER_TURN_MAX, REPLY_BUFFER_BYTES_MAX};
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
}

/// What a connection wants next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Every whole frame is answered: write what there is, then read.
    Continue,
    /// Enough frames were answered in a row: let the other connections have their turn, then call
    /// [`Connection::on_bytes`] again before reading.
    Yield,
    /// Enough replies wait: write them, then call [`Connection::on_bytes`] again before reading.
    Write,
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
    /// Frames answered since the last [`Flow::Yield`].
    frames_in_turn: u32,
}

impl Connection {
    /// A connection of user `uid` that answers bodies of up to `body_bytes_max` bytes.
    #[must_use]
    pub fn new(uid: u32, body_bytes_max: u32) -> Self {
        let peer = Peer { connection: 0, uid, phase: Phase::HelloAwaited };
        Self { frames: FrameReader::new(body_bytes_max), peer, frames_in_turn: 0 }
    }

    /// The same as number `connection` of its core.
    #[must_use]
    pub const fn numbered(mut self, connection: u64) -> Self {
        self.peer.connection = connection;
        self
    }

    /// The receive buffer, to be read into behind what it holds; there is room.
    pub fn take_buffer(&mut self) -> Vec<u8> {
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

    /// Answers every whole frame in the buffer, until enough replies wait in `out` or it is the others' turn.
    pub fn on_bytes<R: Respond>(&mut self, responder: &mut R, out: &mut Vec<u8>) -> Flow {
        loop {
            if out.len() >= REPLY_BUFFER_BYTES_MAX {
                return Flow::Write;
            }
            if self.frames_in_turn >= FRAMES_PER_TURN_MAX {
                self.frames_in_turn = 0;
                return Flow::Yield;
            }
            match self.frames.next() {
                Next::Frame(header, body) if header.version == PROTOCOL_VERSION => {
                    responder.respond(&mut self.peer, &header, self.frames.body(body), out);
                }
                Next::Frame(header, _) => {
                    let error = unsupported_version(&format!("the frame is of protocol version {}", header.version));
                    responder.refuse(header.correlation_id, &error, out);
                }
                Next::Oversized(header) => {
                    let error = oversized(&header, self.frames.body_bytes_max());
                    responder.refuse(header.correlation_id, &error, out);
                }
                Next::Incomplete => return Flow::Continue,
                Next::Untrusted(reason) => return Flow::Close { reason },
            }
            self.frames_in_turn += 1;
        }
    }

    /// Tells `responder` that the connection is gone. Call it once, last.
    pub fn on_closed<R: Respond>(&mut self, responder: &mut R) {
        responder.closed(&mut self.peer);
    }
}

fn oversized(header: &FrameHeader, max: u32) -> Error {
    Error::new(
        Kind::Oversized,
        format!("a body of {} bytes, the limit is {max}", header.body_bytes),
        "send a shorter prompt, or send it as local hashes, or raise frame_body_bytes_max in the configuration",
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::limits::FRAME_HEADER_BYTES;
    use crate::wire::FrameKind;

    /// Answers every frame with as many bytes as it is told, the id first.
    struct Echo {
        reply_bytes: usize,
        refused: usize,
    }

    impl Respond for Echo {
        fn respond(&mut self, _: &mut Peer, header: &FrameHeader, _: &[u8], out: &mut Vec<u8>) {
            out.push(header.correlation_id.0 as u8);
            out.resize(out.len() + self.reply_bytes - 1, 0);
        }

        fn refuse(&mut self, _: CorrelationId, _: &Error, _: &mut Vec<u8>) {
            self.refused += 1;
        }

        fn closed(&mut self, _: &mut Peer) {}
    }

    fn receive(connection: &mut Connection, bytes: &[u8]) {
        let mut buffer = connection.take_buffer();
        buffer.extend_from_slice(bytes);
        connection.give_back(buffer);
    }

    #[test]
    fn replies_beyond_the_bound_are_written_before_more_is_answered() {
        let (mut connection, mut echo) =
            (Connection::new(0, 64), Echo { reply_bytes: REPLY_BUFFER_BYTES_MAX / 2, refused: 0 });
        let frames: Vec<u8> =
            (0..5).flat_map(|id| FrameHeader::new(FrameKind::Route, 0, CorrelationId(id)).encode()).collect();
        receive(&mut connection, &frames);
        let (mut out, mut written) = (Vec::new(), Vec::new());
        while connection.on_bytes(&mut echo, &mut out) == Flow::Write {
            assert_eq!(out.len(), REPLY_BUFFER_BYTES_MAX);
            written.append(&mut out);
        }
        written.append(&mut out);
        let ids: Vec<_> = written.chunks(echo.reply_bytes).map(|reply| reply[0]).collect();
        assert_eq!(ids, [0, 1, 2, 3, 4]);
    }

    #[test]
    fn many_frames_are_answered_in_turns() {
        let (mut connection, mut echo) = (Connection::new(0, 64), Echo { reply_bytes: 1, refused: 0 });
        let count = FRAMES_PER_TURN_MAX as usize * 2 + 1;
        let frames: Vec<u8> = (0..count as u64)
            .flat_map(|id| FrameHeader::new(FrameKind::Route, 0, CorrelationId(id)).encode())
            .collect();
        receive(&mut connection, &frames);
        let mut out = Vec::new();
        for turn in 1..=2 {
            assert_eq!(connection.on_bytes(&mut echo, &mut out), Flow::Yield);
            assert_eq!(out.len(), turn * FRAMES_PER_TURN_MAX as usize);
        }
        assert_eq!(connection.on_bytes(&mut echo, &mut out), Flow::Continue);
        assert_eq!(out, (0..count).map(|id| id as u8).collect::<Vec<_>>(), "in order, none twice");
    }

    #[test]
    fn versions_and_sizes_are_refused_and_a_bad_header_closes() {
        let (mut connection, mut echo) = (Connection::new(0, 64), Echo { reply_bytes: 1, refused: 0 });
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

    proptest! {
        #[test]
        fn garbage_never_panics(chunks in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..80), 1..20)) {
            let (mut connection, mut echo) = (Connection::new(0, 64), Echo { reply_bytes: 1, refused: 0 });
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
