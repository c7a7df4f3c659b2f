//! A shm lane: memory that a gateway and the daemon share, through which frames pass without a system call.
//!
//! ```text
//! gateway ── request ring ──▶ daemon        each ring: one writer, one reader, a tail and a head
//!         ◀── reply ring ────               each side: a word that announces what it sleeps for
//!         ◀── bell ─────────▶               a socket: rung only for a side that sleeps
//! ```
//!
//! The frames are those of the socket, one after the other. A ring is a stream of bytes: where a frame lies in it, and
//! whether it wraps, does not matter. Each side copies received bytes into memory of its own and parses them there.
//! Nothing is parsed, verified or measured in shared memory, where the other side could change it between two reads.
//! Verification in place would therefore be unsound. Copying a prompt of 720 hashes takes about a tenth of a
//! microsecond once its cache lines are there.
//!
//! # Cache lines
//!
//! Most of the time of a long frame goes into cache lines that pass between two processors. A line that the reader has
//! read can be written only after the reader's copy is gone. On a Zen 4 whose two processors share no cache, this took
//! 30 ns a line. Three habits shorten it:
//!
//! * A side that polls in vain takes the lines that it will write next ([`LaneEnd::own_ahead`]).
//! * A reader copies from the last word to the first, because its processor then fetches hardly any of those lines
//!   ([`Consumer::pop`]).
//! * A writer stores once to every line of a piece before it fills the first, so that the processor takes several lines
//!   at a time ([`Producer::push`]).
//!
//! # Sync points
//!
//! | name | between | guarantee |
//! |---|---|---|
//! | PUBLISH | the writer's tail and the reader ([`Ring::tail`]) | words are there before they are announced |
//! | RECLAIM | the reader's head and the writer ([`Ring::head`]) | words are copied before they are overwritten |
//! | SLEEP | the side that sleeps and the side that moves a position ([`Awaited`]) | no side sleeps for words or room that are there |
//!
//! # What a hostile peer can do
//!
//! It can write anything anywhere in the shared memory at any time.
//!
//! * Positions are checked against what this side knows. An invalid one is a [`LaneFault`], and ends the lane.
//! * Frames are as untrusted as those of a socket, and are decoded by the same code.
//! * The memory cannot shrink, because it is sealed. The bell cannot make this side wait, because it is a socket.
//! * The peer can lock the file for as long as it likes. This side makes no call that waits for that lock while the
//!   peer has the file open. The memory, and the lane's place, are therefore freed only after the peer has closed it
//!   ([`Reclaimer`]).
//! * Wrong words about sleep harm only the peer's own lane.

mod end;
#[cfg(all(test, kvrouted_loom))]
mod loom;
mod memory;
mod ring;
#[cfg(all(test, not(kvrouted_loom)))]
mod tests;

pub use end::{Awaited, Heard, LaneEnd, LaneSide, Moved, bell_pair, hear, ring};
pub use memory::{LANE_LAYOUT, LaneMemory, LaneSizes, Reclaimer};
pub use ring::{Consumer, LaneFault, Producer, Ring, Word};
