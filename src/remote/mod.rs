//! Connections between hosts: what the daemon's remote port (`serve::remote`) and `kvrouted connect` have in common.
//!
//! ```text
//! client ─ Unix socket ─ kvrouted connect ═ TCP, TLS 1.3 ═ remote port ─ socket pair ─ serving thread
//!          frames                          opening, frames              frames
//! ```
//!
//! The frames are those of the routing socket. They begin once the [`opening`] is over, in which the caller shows its
//! token. The token names a principal, whose number takes the place of a user's in shares and in the ownership of
//! sessions and bookings.
//!
//! | file | subject |
//! |---|---|
//! | `opening` | the caller's token and the daemon's answer, as bytes |
//! | `principals` | who may call: names, numbers, tokens |
//! | `tls` | certificates and keys from files |
//! | `carry` | bytes both ways between two streams, with time limits |

pub(crate) mod carry;
pub mod opening;
pub(crate) mod principals;
pub(crate) mod tls;
