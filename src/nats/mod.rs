//! A connection to a NATS server, whose memory is bounded whatever the server or a publisher sends.
//!
//! ```text
//! Link (one of several servers, login, reconnects) ─ Wire (one connection, TLS) ─ Decoder (bytes → items, pure)
//! ```
//!
//! **Why our own.** The protocol of a client that publishes and subscribes has six verbs. The library for it, async-nats,
//! takes any length that a server names: it waits for a message of any size, and a size near the largest number, or an
//! empty `-ERR`, makes it panic. It asks for headers, and ends the connection when it cannot read those of a message. So
//! one publisher on a subject, who needs no secret, cuts off all subscribers as often as it likes. Here headers are not
//! asked for, and a message beyond the limit is skipped as it comes. The connection runs on its caller's thread, as those
//! of [`crate::zmtp`] do, without a runtime, and adds one small crate to the daemon instead of dozens.
//!
//! JetStream, queue groups and headers are not spoken.
//!
//! | file | subject |
//! |---|---|
//! | `codec` | what a server sends and what a client sends, as bytes |
//! | `login` | token, password or key |
//! | `wire` | a stream with TLS, and what waits to be sent |
//! | `link` | servers, handshake, signs of life, reconnects |

mod codec;
mod link;
mod login;
#[cfg(test)]
mod tests;
mod wire;

pub(crate) use link::{Link, LinkEvent, LinkPlan, Next};
pub(crate) use login::Login;
