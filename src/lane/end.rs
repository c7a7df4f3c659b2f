//! One end of a lane: the ring that it writes, the ring that it reads, the words that say who sleeps, and the bell.
//!
//! # Sync point SLEEP
//!
//! Each side has a word in which it announces what it is about to sleep for. A side that goes to sleep announces it
//! first, and checks the ring once more afterwards. A side that moves a position moves it first, and reads the other
//! side's word afterwards. A sequentially consistent fence stands between the two steps of each side, so that one of
//! them sees the other: either the sleeper finds what was moved, or the mover rings.
//!
//! A peer that lies here harms only itself. A bit that it sets without sleeping costs a ring that it ignores. A bit
//! that it clears leaves its own lane unserved until it rings.
//!
//! # The bell
//!
//! One side wakes the other by a byte through a socket that carries nothing else. It is not an eventfd: the two sides
//! would share its file description, and with it O_NONBLOCK. A gateway that cleared the flag and filled the counter
//! could block a serving thread in the middle of a ring. The ends of a socket are descriptions of their own, and
//! `MSG_DONTWAIT` holds whatever their flags are.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::memory::{ControlWord, LaneMemory, LaneSizes};
use super::ring::{Consumer, LaneFault, Producer, Ring, WORD_BYTES, Word};
use crate::error::{Error, Kind, Result};
use crate::limits::LANE_BELL_BYTES;

/// A side of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaneSide {
    /// Writes requests.
    Gateway,
    /// Writes replies.
    Daemon,
}

/// The result of a transfer through a ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// The bytes moved, a multiple of 8.
    pub bytes: usize,
    /// Whether the other side sleeps for this: the caller must ring its bell.
    pub rings: bool,
}

/// One end of a lane, through which whole words pass. A frame has whole words, and the next one follows without a gap.
/// Where a frame lies in the ring does not matter, and it may be longer than the ring.
#[derive(Debug)]
pub struct LaneEnd {
    memory: LaneMemory,
    side: LaneSide,
    outgoing: Producer,
    incoming: Consumer,
}

impl LaneEnd {
    /// An end of a new lane.
    #[must_use]
    pub fn new(memory: LaneMemory, side: LaneSide) -> Self {
        Self { memory, side, outgoing: Producer::default(), incoming: Consumer::default() }
    }

    /// The sizes of its rings.
    #[must_use]
    pub const fn sizes(&self) -> LaneSizes {
        self.memory.sizes()
    }

    /// Keeps the memory after this end is dropped, so that the other side can still receive what was sent. Without this
    /// call the memory is freed with the end.
    pub fn leave(&mut self) {
        self.memory.leave();
    }

    /// Bytes that can be received now.
    ///
    /// # Errors
    /// The other side wrote an invalid position.
    pub fn incoming_bytes(&mut self) -> Result<usize, LaneFault> {
        Ok(self.incoming.ready(&incoming(&self.memory, self.side))? * WORD_BYTES)
    }

    /// Bytes that can be sent now.
    ///
    /// # Errors
    /// As [`LaneEnd::incoming_bytes`].
    pub fn room_bytes(&mut self) -> Result<usize, LaneFault> {
        Ok(self.outgoing.room(&outgoing(&self.memory, self.side))? * WORD_BYTES)
    }

    /// Bytes received since the lane was made.
    #[must_use]
    pub const fn received_bytes(&self) -> u64 {
        self.incoming.position() * WORD_BYTES as u64
    }

    /// Appends received words to `out`, up to `bytes_max` bytes.
    ///
    /// # Errors
    /// As [`Consumer::pop`].
    pub fn receive(&mut self, bytes_max: usize, out: &mut Vec<u8>) -> Result<Moved, LaneFault> {
        let bytes = self.incoming.pop(&incoming(&self.memory, self.side), bytes_max / WORD_BYTES, out)?;
        Ok(Moved { bytes, rings: bytes > 0 && Awaited::ROOM.is_to_ring(self.waits(other(self.side))) })
    }

    /// Sends as many of `bytes` as there is room for. They must be whole words.
    ///
    /// # Errors
    /// As [`LaneEnd::incoming_bytes`].
    pub fn send(&mut self, bytes: &[u8]) -> Result<Moved, LaneFault> {
        debug_assert!(bytes.len().is_multiple_of(WORD_BYTES), "frames are padded");
        let bytes = self.outgoing.push(&outgoing(&self.memory, self.side), bytes)?;
        Ok(Moved { bytes, rings: bytes > 0 && Awaited::DATA.is_to_ring(self.waits(other(self.side))) })
    }

    /// Takes cache lines of the next bytes to send. Call it while busy-polling.
    pub fn own_ahead(&mut self) {
        self.outgoing.own_ahead(&outgoing(&self.memory, self.side));
    }

    /// Announces that this end is about to sleep. Check once more before sleeping.
    pub fn announce(&self, awaited: Awaited) {
        awaited.announce(self.waits(self.side));
    }

    /// Withdraws the announcement.
    pub fn settle(&self, awaited: Awaited) {
        awaited.settle(self.waits(self.side));
    }

    fn waits(&self, side: LaneSide) -> &AtomicU64 {
        let place = match side {
            LaneSide::Gateway => ControlWord::GatewayWaits,
            LaneSide::Daemon => ControlWord::DaemonWaits,
        };
        &self.memory.words()[place.index()]
    }
}

const fn other(side: LaneSide) -> LaneSide {
    match side {
        LaneSide::Gateway => LaneSide::Daemon,
        LaneSide::Daemon => LaneSide::Gateway,
    }
}

fn outgoing(memory: &LaneMemory, side: LaneSide) -> Ring<'_, AtomicU64> {
    let words = memory.words();
    let (tail, head, range) = match side {
        LaneSide::Gateway => (ControlWord::RequestTail, ControlWord::RequestHead, memory.sizes().request_words()),
        LaneSide::Daemon => (ControlWord::ReplyTail, ControlWord::ReplyHead, memory.sizes().reply_words()),
    };
    Ring { tail: &words[tail.index()], head: &words[head.index()], words: &words[range] }
}

fn incoming(memory: &LaneMemory, side: LaneSide) -> Ring<'_, AtomicU64> {
    outgoing(memory, other(side))
}

/// What a sleeping side waits for: bits of its word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Awaited(u64);

impl Awaited {
    /// Words to read.
    pub const DATA: Self = Self(1);
    /// Room to write.
    pub const ROOM: Self = Self(1 << 1);
    /// Words to read, or room to write.
    pub const BOTH: Self = Self(Self::DATA.0 | Self::ROOM.0);

    /// Announces in this side's word `own` that it is about to sleep. It must check the ring once more before it
    /// sleeps.
    pub fn announce<W: Word>(self, own: &W) {
        // Relaxed: the fence orders it.
        own.set(self.0, Ordering::Relaxed);
        // SeqCst: SLEEP, pairs with the fence in `is_to_ring`.
        W::fence();
    }

    /// Withdraws the announcement.
    pub fn settle<W: Word>(self, own: &W) {
        // Relaxed: if the other side does not see it yet, it rings once too often.
        own.clear(self.0, Ordering::Relaxed);
    }

    /// Whether the other side, whose word is `peer`, sleeps for what this side has just made available. Call it after
    /// the position was moved. Of several concurrent calls, one returns `true`.
    pub fn is_to_ring<W: Word>(self, peer: &W) -> bool {
        // SeqCst: SLEEP, pairs with the fence in `announce`.
        W::fence();
        // Relaxed: the fence orders the load, and the swap publishes nothing. A bit announced between the two is woken
        // too: the swap takes every bit, so the caller rings for every bit.
        peer.load(Ordering::Relaxed) & self.0 != 0 && peer.swap(0, Ordering::Relaxed) != 0
    }
}

/// The state of a bell after [`hear`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// The other side still holds its end, whether it rang or not.
    Quiet,
    /// The other side has closed its end.
    Gone,
}

/// Makes a bell: a ring at one end is heard at the other.
///
/// # Errors
/// [`Kind::System`] if no descriptor is free.
pub fn bell_pair() -> Result<(UnixStream, UnixStream)> {
    UnixStream::pair().map_err(|error| {
        let remedy = "raise the limit of open files, or ask without a lane";
        Error::new(Kind::System, "a lane's bell cannot be made", remedy).caused_by(error)
    })
}

/// Rings, and never waits. A full bell has rung already. If the other end is closed, the connection shows it.
pub fn ring(bell: &impl AsFd) {
    while let Err(Errno::INTR) = send(bell, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {}
}

/// Empties the bell.
pub fn hear(bell: &impl AsFd) -> Heard {
    let mut rings = [0; LANE_BELL_BYTES];
    loop {
        match recv(bell, &mut rings, RecvFlags::DONTWAIT) {
            Ok((_, 0)) | Err(Errno::CONNRESET) => return Heard::Gone,
            // A full buffer may leave bytes in the socket. They may wake no thread again (epoll reports edges), and
            // need not: one ring stands for all before it, and the woken thread checks the ring of words before it
            // sleeps.
            Ok(_) | Err(Errno::AGAIN) => return Heard::Quiet,
            Err(Errno::INTR) => {}
            Err(_) => return Heard::Gone,
        }
    }
}
