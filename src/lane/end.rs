//! One end of a lane: the ring it writes, the ring it reads, and whom to wake.

use std::sync::atomic::AtomicU64;

use super::fault::LaneFault;
use super::memory::LaneMemory;
use super::ring::{Consumer, Producer, Ring, WORD_BYTES};
use super::sizes::{LaneSizes, Place};
use super::waits::Awaited;

/// Which end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaneSide {
    /// Writes requests.
    Gateway,
    /// Writes replies.
    Daemon,
}

/// What was moved through a ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// How much, bytes; a multiple of 8.
    pub bytes: usize,
    /// Whether the other side sleeps for that and is to be woken: its bell is to be rung.
    pub rings: bool,
}

/// One end of a lane, by which whole words pass. Frames are of whole words and follow each other without gaps; how they
/// lie in the ring means nothing, and one may be longer than the ring is.
#[derive(Debug)]
pub struct LaneEnd {
    memory: LaneMemory,
    side: LaneSide,
    outgoing: Producer,
    incoming: Consumer,
}

impl LaneEnd {
    /// An end of a lane through which nothing has passed.
    #[must_use]
    pub fn new(memory: LaneMemory, side: LaneSide) -> Self {
        Self { memory, side, outgoing: Producer::default(), incoming: Consumer::default() }
    }

    /// How large its rings are.
    #[must_use]
    pub const fn sizes(&self) -> LaneSizes {
        self.memory.sizes()
    }

    /// Leaves what was sent to be received after this end has gone. Otherwise the memory is given back with it.
    pub fn leave(&mut self) {
        self.memory.leave();
    }

    /// Bytes that can be received now.
    ///
    /// # Errors
    /// Where the other side cannot be trusted.
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

    /// Copies what has come, in whole words and up to `bytes_max`, behind what `out` holds.
    ///
    /// # Errors
    /// As [`Consumer::pop`].
    pub fn receive(&mut self, bytes_max: usize, out: &mut Vec<u8>) -> Result<Moved, LaneFault> {
        let bytes = self.incoming.pop(&incoming(&self.memory, self.side), bytes_max / WORD_BYTES, out)?;
        Ok(Moved { bytes, rings: bytes > 0 && Awaited::ROOM.is_to_ring(self.waits(other(self.side))) })
    }

    /// Sends as much of `bytes`, which are whole words, as there is room for.
    ///
    /// # Errors
    /// As [`LaneEnd::incoming_bytes`].
    pub fn send(&mut self, bytes: &[u8]) -> Result<Moved, LaneFault> {
        debug_assert!(bytes.len().is_multiple_of(WORD_BYTES), "frames are padded");
        let bytes = self.outgoing.push(&outgoing(&self.memory, self.side), bytes)?;
        Ok(Moved { bytes, rings: bytes > 0 && Awaited::DATA.is_to_ring(self.waits(other(self.side))) })
    }

    /// Says that this end is about to sleep: look once more, then sleep.
    pub fn announce(&self, awaited: Awaited) {
        awaited.announce(self.waits(self.side));
    }

    /// Takes that back.
    pub fn settle(&self, awaited: Awaited) {
        awaited.settle(self.waits(self.side));
    }

    fn waits(&self, side: LaneSide) -> &AtomicU64 {
        let place = match side {
            LaneSide::Gateway => Place::GatewayWaits,
            LaneSide::Daemon => Place::DaemonWaits,
        };
        &self.memory.words()[place.word()]
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
        LaneSide::Gateway => (Place::RequestTail, Place::RequestHead, memory.sizes().request_words()),
        LaneSide::Daemon => (Place::ReplyTail, Place::ReplyHead, memory.sizes().reply_words()),
    };
    Ring { tail: &words[tail.word()], head: &words[head.word()], words: &words[range] }
}

fn incoming(memory: &LaneMemory, side: LaneSide) -> Ring<'_, AtomicU64> {
    outgoing(memory, other(side))
}
