//! A lane: memory that a gateway and a daemon share, by which frames pass without a system call.
//!
//! (Not to be mixed up with the lanes of the index, which are the tiers of a worker.)
//!
//! ```text
//! gateway ── request ring ──▶ daemon        each ring: one writer, one reader, a tail and a head
//!         ◀── reply ring ────               each side: a word that says what it sleeps for
//!         ◀── bell ─────────▶               a socket: rung only for a side that sleeps
//! ```
//!
//! Frames are those of the socket, one after the other: a ring is a stream of bytes, and where a frame lies in it, or
//! that it wraps, means nothing. Each side copies what has come into memory of its own and looks at it there; nothing is
//! parsed, verified or measured in shared memory, where the other side could change it between two looks. Verification
//! in place would be unsound for that reason, and the copy of a prompt of 720 hashes takes about a tenth of a microsecond.
//!
//! # Sync points
//!
//! | name | between | holds |
//! |---|---|---|
//! | PUBLISH | the writer's tail and the reader ([`Ring::tail`]) | words are there before they are said to be |
//! | RECLAIM | the reader's head and the writer ([`Ring::head`]) | words were copied before they are written over |
//! | SLEEP | the side that sleeps and the one that moves ([`Awaited`]) | nobody sleeps for what is there |
//!
//! # What a hostile peer can do
//!
//! It can write anything anywhere in the shared memory at any time. Positions are checked against what this side knows;
//! one that cannot be is a [`LaneFault`], and ends the lane. Frames are as untrusted as those of a socket, and go the
//! same way. The memory cannot shrink under this side (it is sealed), and the bell cannot make it wait (it is a socket).
//! The peer can lock the file for as long as it likes: this side makes no call that waits for that lock while the peer has
//! the file open, so the memory, and the lane's place, are given back only once the peer has let go ([`Reclaimer`]).
//! What it can do to the words about sleep harms its own lane alone.

mod bell;
mod end;
mod fault;
#[cfg(all(test, kvrouted_loom))]
mod loom;
mod memory;
mod reclaim;
mod ring;
mod sizes;
#[cfg(all(test, not(kvrouted_loom)))]
mod tests;
mod waits;
mod word;

pub use bell::{Heard, bell_pair, hear, ring};
pub use end::{LaneEnd, LaneSide, Moved};
pub use fault::LaneFault;
pub use memory::LaneMemory;
pub use reclaim::Reclaimer;
pub use ring::{Consumer, Producer, Ring};
pub use sizes::{LANE_LAYOUT, LaneSizes};
pub use waits::Awaited;
pub use word::Word;
