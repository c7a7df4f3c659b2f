//! Who sleeps, and who has to wake whom.
//!
//! Each side has a word in which it says what it is about to sleep for. Sync point SLEEP: whoever goes to sleep says so
//! first and looks at the ring once more after; who moves a position moves it first and looks whether the other side
//! sleeps after. Between the two steps of each stands a fence of sequential consistency, so that one of them sees the
//! other: either the sleeper finds what was moved, or the mover rings.
//!
//! A peer that lies here harms itself alone. A bit that it sets in vain costs a ring that nobody hears; one that it takes
//! away leaves its own lane unserved until it rings.

use std::sync::atomic::Ordering;

use super::word::Word;

/// What a side sleeps for: bits of its word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Awaited(u64);

impl Awaited {
    /// Something to read.
    pub const DATA: Self = Self(1);
    /// Room to write.
    pub const ROOM: Self = Self(1 << 1);
    /// Either.
    pub const BOTH: Self = Self(Self::DATA.0 | Self::ROOM.0);

    /// Says that this side, whose word `own` is, is about to sleep. It must look at the ring once more before it does.
    pub fn announce<W: Word>(self, own: &W) {
        // Relaxed: the fence orders it.
        own.set(self.0, Ordering::Relaxed);
        // SeqCst: SLEEP, pairs with the fence in `is_to_ring`.
        W::fence();
    }

    /// Takes that back.
    pub fn settle<W: Word>(self, own: &W) {
        // Relaxed: if the other side does not see it yet it rings once too often.
        own.clear(self.0, Ordering::Relaxed);
    }

    /// Whether the other side, whose word `peer` is, has to be woken because there is now what this says. To be called
    /// after the position was moved; of several calls one says so.
    pub fn is_to_ring<W: Word>(self, peer: &W) -> bool {
        // SeqCst: SLEEP, pairs with the fence in `announce`.
        W::fence();
        // Relaxed: the fence orders the load; the swap hands on nothing. What was announced between them is woken too:
        // the swap takes every bit, so it rings for every bit.
        peer.load(Ordering::Relaxed) & self.0 != 0 && peer.swap(0, Ordering::Relaxed) != 0
    }
}
