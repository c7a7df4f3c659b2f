//! A gateway that may write anything into its shm lane.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvrouted::ids::{CorrelationId, SpaceId};
use kvrouted::lane::{LaneEnd, LaneMemory, LaneSide, LaneSizes, ring};
use kvrouted::limits::{FRAME_HEADER_BYTES, LANE_CONTROL_BYTES};
use kvrouted::route::{Prompt, RouteRequest};
use kvrouted::wire::{FrameHeader, LaneOpened, LaneRequest, Reply, decode_reply};

pub(crate) use crate::kit::raw::ask_for_lane as ask;
use crate::kit::raw::{self, encoded};
use crate::kit::{Daemon, WAIT_MAX, until_ok};

/// Words of the lane's memory, as schemas/README.md has them.
pub(crate) const REQUEST_TAIL: usize = 0;
pub(crate) const REPLY_HEAD: usize = 48;
pub(crate) const DAEMON_WAITS: usize = 80;
pub(crate) const REQUESTS: usize = LANE_CONTROL_BYTES / 8;

/// Bytes of its rings.
const RING_BYTES: u32 = 4096;

/// A raw connection, and a lane of it that is mapped twice: once to be used, once to be written into.
pub(crate) struct Raw {
    pub(crate) socket: UnixStream,
    pub(crate) bell: UnixStream,
    pub(crate) end: LaneEnd,
    pub(crate) memory: LaneMemory,
    received: Vec<u8>,
}

/// A new connection that has said hello.
pub(crate) fn hello(daemon: &Daemon) -> UnixStream {
    raw::Raw::greeted(&daemon.socket()).stream
}

impl Raw {
    pub(crate) fn open(daemon: &Daemon) -> Self {
        let mut socket = hello(daemon);
        let asked = LaneRequest { request_ring_bytes: RING_BYTES, reply_ring_bytes: RING_BYTES };
        let (reply, descriptors) = ask(&mut socket, asked);
        let opened = LaneOpened { layout: 1, request_ring_bytes: RING_BYTES, reply_ring_bytes: RING_BYTES };
        assert_eq!(reply, Reply::OpenLane(opened));
        let [memory, bell] = <[OwnedFd; 2]>::try_from(descriptors).expect("memory and bell");
        let sizes = LaneSizes::granted(RING_BYTES, RING_BYTES).expect("sizes");
        let map = || LaneMemory::map(&memory, sizes).expect("mapped");
        let (end, mapped) = (LaneEnd::new(map(), LaneSide::Gateway), map());
        Self { socket, bell: bell.into(), end, memory: mapped, received: Vec::new() }
    }

    pub(crate) fn word(&self, at: usize) -> &AtomicU64 {
        &self.memory.words()[at]
    }

    /// Writes a word and rings, whether anybody sleeps or not.
    pub(crate) fn poke(&self, at: usize, value: u64) {
        self.word(at).store(value, Ordering::SeqCst);
        ring(&self.bell);
    }

    /// Sends bytes that are whole words, as far as they fit.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> usize {
        let moved = self.end.send(bytes).expect("room");
        ring(&self.bell);
        moved.bytes
    }

    /// The next reply, waited for.
    pub(crate) fn reply(&mut self) -> (CorrelationId, Reply) {
        until_ok("a reply comes by the lane", || {
            let moved = self.end.receive(usize::MAX, &mut self.received).map_err(|fault| fault.to_string())?;
            if moved.rings {
                ring(&self.bell);
            }
            let (head, rest) = self.received.split_first_chunk::<FRAME_HEADER_BYTES>().ok_or("no header")?;
            let header = FrameHeader::parse(head).expect("a header");
            let body = rest.get(..header.body_bytes as usize).ok_or("no body")?;
            let reply = decode_reply(header.kind, body).expect("a reply");
            let bytes = FRAME_HEADER_BYTES + body.len();
            self.received.drain(..bytes);
            Ok((header.correlation_id, reply))
        })
    }

    /// Waits until the daemon has closed the connection.
    pub(crate) fn closed(&mut self) {
        self.socket.set_read_timeout(Some(WAIT_MAX)).expect("set");
        let mut rest = Vec::new();
        match self.socket.read_to_end(&mut rest) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}"),
        }
    }

    /// Asserts that the daemon goes on with it for a while.
    pub(crate) fn is_open(&mut self) {
        self.socket.set_read_timeout(Some(Duration::from_millis(20))).expect("set");
        let error = self.socket.read(&mut [0; 8]).expect_err("nothing comes by the socket");
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "{error}");
    }
}

/// A route of the space `m` that asks for `tokens`.
pub(crate) fn route(id: u64, tokens: &[u32]) -> Vec<u8> {
    let request = RouteRequest::new(SpaceId(0), Prompt::of_tokens(tokens));
    encoded(|encoder, out| encoder.route(CorrelationId(id), &request, out).expect("a request"))
}
