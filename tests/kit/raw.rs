//! A raw client: a connection to the routing or admin socket that sends any bytes.

use std::io::{self, ErrorKind, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use flatbuffers::{FlatBufferBuilder, WIPOffset};
use kvrouted::client::Reply;
use kvrouted::error::Kind;
use kvrouted::ids::{CorrelationId, SpaceId};
use kvrouted::limits::FRAME_HEADER_BYTES;
use kvrouted::load::SessionToken;
use kvrouted::route::{Prompt, RouteRequest};
use kvrouted::schema_generated::routing as fb;
use kvrouted::wire::{
    FRAME_IDENTIFIER, FrameHeader, FrameKind, HelloReply, LaneRequest, RequestEncoder, RouteReply, decode_reply,
};
use rand::{Rng, RngExt as _};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use super::WAIT_MAX;

/// A connection without a protocol on it.
pub(crate) struct Raw {
    pub(crate) stream: UnixStream,
}

impl Raw {
    pub(crate) fn connect(path: &Path) -> Self {
        Self::over(UnixStream::connect(path).expect("a connection"))
    }

    pub(crate) fn over(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(WAIT_MAX)).expect("set");
        stream.set_write_timeout(Some(WAIT_MAX)).expect("set");
        Self { stream }
    }

    /// A connection that has said hello.
    pub(crate) fn greeted(path: &Path) -> Self {
        let mut raw = Self::connect(path);
        raw.hello(None).expect("hello");
        raw
    }

    pub(crate) fn hello(&mut self, session: Option<SessionToken>) -> Result<HelloReply, Kind> {
        let hello = hello_frame(session);
        // The daemon may refuse and close a connection before its hello.
        let _ = self.stream.write_all(&hello);
        match self.reply() {
            (1, Reply::Hello(hello)) => Ok(hello),
            // A refused connection gets an error with correlation id 0 or that of the hello.
            (0 | 1, Reply::Error(error)) => Err(error.kind.expect("a known kind")),
            other => panic!("no answer to hello: {other:?}"),
        }
    }

    #[track_caller]
    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("sent");
    }

    #[track_caller]
    pub(crate) fn reply(&mut self) -> (u64, Reply) {
        self.next().expect("a reply")
    }

    /// The next reply; `None` once the daemon has ended the connection.
    pub(crate) fn next(&mut self) -> Option<(u64, Reply)> {
        match read_frame(&mut self.stream) {
            Ok((header, body)) => {
                let reply = decode_reply(header.kind, &body).expect("a reply that can be read");
                Some((header.correlation_id.0, reply))
            }
            Err(error) if matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset) => None,
            Err(error) => panic!("neither a reply nor an end: {error}"),
        }
    }

    pub(crate) fn is_at_end(&mut self) -> bool {
        matches!(self.stream.read(&mut [0; 1]), Ok(0))
    }

    /// The kind of the error that answers request `id`.
    #[track_caller]
    pub(crate) fn error(&mut self, id: u64) -> Kind {
        match self.reply() {
            (got, Reply::Error(error)) if got == id => {
                assert!(!error.remedy.is_empty() && !error.message.is_empty());
                error.kind.expect("a known kind")
            }
            other => panic!("no error on {id}: {other:?}"),
        }
    }

    /// The kinds of what comes until the daemon ends the connection.
    pub(crate) fn errors_until_end(&mut self) -> Vec<Kind> {
        let mut kinds = Vec::new();
        while let Some((_, reply)) = self.next() {
            let Reply::Error(error) = reply else { panic!("an answer to what was not asked: {reply:?}") };
            kinds.push(error.kind.expect("a known kind"));
        }
        kinds
    }

    #[track_caller]
    pub(crate) fn decided(&mut self, id: u64) -> RouteReply {
        match self.reply() {
            (got, Reply::Route(reply)) if got == id => reply,
            other => panic!("no decision on {id}: {other:?}"),
        }
    }

    /// A route gets one candidate.
    #[track_caller]
    pub(crate) fn assert_served(&mut self) {
        self.send(&route_frame(77, 40));
        assert_eq!(self.decided(77).candidates.len(), 1);
    }
}

/// The next frame of a connection, header and body. The end of a connection within a body is another kind of error than
/// one between frames.
pub(crate) fn read_frame(stream: &mut impl Read) -> io::Result<(FrameHeader, Vec<u8>)> {
    let mut header = [0; FRAME_HEADER_BYTES];
    stream.read_exact(&mut header)?;
    let header = FrameHeader::parse(&header).map_err(|fault| io::Error::other(fault.to_string()))?;
    let mut body = vec![0; header.body_bytes as usize];
    stream.read_exact(&mut body).map_err(|error| io::Error::other(format!("in the body of a frame: {error}")))?;
    Ok((header, body))
}

/// A frame by the client's encoder.
pub(crate) fn encoded(fill: impl FnOnce(&mut RequestEncoder, &mut Vec<u8>)) -> Vec<u8> {
    let mut out = Vec::new();
    fill(&mut RequestEncoder::default(), &mut out);
    out
}

pub(crate) fn hello_frame(session: Option<SessionToken>) -> Vec<u8> {
    encoded(|encoder, out| encoder.hello(CorrelationId(1), "raw", session, out))
}

pub(crate) fn question(tokens: &[u8]) -> RouteRequest<'_> {
    RouteRequest { candidates_max: 1, ..RouteRequest::new(SpaceId(0), Prompt::Tokens(tokens)) }
}

pub(crate) fn route_frame(id: u64, tokens: usize) -> Vec<u8> {
    let tokens = vec![1; tokens * 4];
    encoded(|encoder, out| encoder.route(CorrelationId(id), &question(&tokens), out).expect("encoded"))
}

pub(crate) fn header(kind: FrameKind, body_bytes: u32, id: u64) -> FrameHeader {
    FrameHeader::new(kind, body_bytes, CorrelationId(id))
}

pub(crate) fn frame(header: FrameHeader, body: &[u8]) -> Vec<u8> {
    [&header.encode(), body].concat()
}

/// Asks for a lane; gives the reply with what came with it.
pub(crate) fn ask_for_lane(socket: &mut UnixStream, asked: LaneRequest) -> (Reply, Vec<OwnedFd>) {
    socket.write_all(&encoded(|encoder, out| encoder.open_lane(CorrelationId(2), asked, out))).expect("sent");
    let (mut bytes, mut space) = ([0; 4096], [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))]);
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(&*socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC);
    let got = got.expect("a reply").bytes;
    let mut descriptors = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            descriptors.extend(rights);
        }
    }
    let (head, body) = bytes[..got].split_first_chunk().expect("a header");
    let header = FrameHeader::parse(head).expect("a header");
    assert_eq!(header.body_bytes as usize, body.len(), "the whole reply came at once");
    (decode_reply(header.kind, body).expect("a reply"), descriptors)
}

/// What is no conversation: bytes by chance, or, each third time, frames whose headers can be trusted and whose bodies
/// cannot.
pub(crate) fn garbage(random: &mut impl Rng, round: usize) -> Vec<u8> {
    if round.is_multiple_of(3) {
        return (0..20).flat_map(|id| garbage_frame(random, id)).collect();
    }
    (0..random.random_range(1..4000)).map(|_| random.random()).collect()
}

fn garbage_frame(random: &mut impl Rng, id: u64) -> Vec<u8> {
    let kind = random.random_range(1..60_u8);
    let mut body: Vec<u8> = (0..random.random_range(0..40_usize) * 8).map(|_| random.random()).collect();
    if let Some(identifier) = body.get_mut(4..8) {
        identifier.copy_from_slice(b"KVRT");
    }
    frame(FrameHeader { kind, ..header(FrameKind::Route, body.len() as u32, id) }, &body)
}

/// A frame whose body is built by hand.
pub(crate) fn built<T>(
    kind: FrameKind,
    id: u64,
    build: impl FnOnce(&mut FlatBufferBuilder<'static>) -> WIPOffset<T>,
) -> Vec<u8> {
    let mut builder = FlatBufferBuilder::new();
    let root = build(&mut builder);
    builder.finish(root, Some(FRAME_IDENTIFIER));
    let mut body = builder.finished_data().to_vec();
    body.resize(body.len().next_multiple_of(8), 0);
    frame(header(kind, body.len() as u32, id), &body)
}

/// A route built by hand, with three tokens.
pub(crate) fn built_route(
    id: u64,
    fill: impl FnOnce(&mut FlatBufferBuilder<'static>, &mut fb::RouteArgs<'static>),
) -> Vec<u8> {
    built(FrameKind::Route, id, |builder| {
        let tokens = builder.create_vector(&[1_u32, 2, 3]);
        let mut args = fb::RouteArgs { tokens: Some(tokens), candidates_max: 1, ..fb::RouteArgs::default() };
        fill(builder, &mut args);
        fb::Route::create(builder, &args)
    })
}
