//! Our own ZeroMQ connections, whose memory is bounded before a peer is trusted.
//!
//! libzmq counts whole messages against its high-water mark and single frames against `maxmsgsize`. A message whose
//! parts never end passes both and grows without bound, before any authentication. No socket option prevents that, so
//! the sockets that face other machines are our own:
//!
//! ```text
//! Peer (connects: SUB, DEALER) ─┐
//!                               ├─ Wire (one connection) ─ Decoder (bytes → items, pure)
//! Server (binds: PUB, ROUTER) ──┘
//! ```
//!
//! The alternative, a filter in front of a libzmq socket, needs the same decoder and connections, and on top a second
//! connection for each peer with back-pressure both ways. A socket of ours is less code, runs on its caller's thread,
//! takes one descriptor, and lets subscribers share the bytes of a message.
//!
//! The protocol is ZMTP 3.0 and 3.1 with the NULL mechanism, over TCP and Unix sockets. Peers from libzmq 4.0 on speak
//! it. Every limit is in [`crate::limits`].

mod address;
mod codec;
mod peer;
mod server;
#[cfg(test)]
mod tests;
mod wire;

pub(crate) use address::{Looked, Lookup, prepare_lookups};
pub use codec::{
    Bounds, Decoder, GREETING_BYTES, Item, Message, Refusal, Role, SEQ_BYTES, greeting, head, message, ping, pong,
    ready,
};
pub use peer::{LinkEvent, Next, Opening, Pace, Peer, PeerPlan};
pub use server::{PeerId, Sent, Server, ServerCounts, ServerPlan};
pub(crate) use wire::bound_messages;
