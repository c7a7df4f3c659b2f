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
//! asked for, or skipped unread, and a message beyond the limit is skipped as it comes. The connection runs on its caller's thread, as those
//! of [`crate::zmtp`] do, without a runtime, and adds one small crate to the daemon instead of dozens.
//!
//! Of JetStream only what a worker's events need is spoken: a stream is made, written, read and purged. Its questions and
//! answers are JSON in plain messages. Queue groups are not spoken.
//!
//! ```text
//! relay ─▶ Link ─▶ stream of a server ─▶ Feed (live), Replay (what was missed) ─▶ ingest, as from a publisher's sockets
//! ```
//!
//! | file | subject |
//! |---|---|
//! | `codec` | what a server sends and what a client sends, as bytes |
//! | `login` | token, password or key |
//! | `wire` | a stream with TLS, and what waits to be sent |
//! | `link` | servers, handshake, signs of life, reconnects |
//! | `access` | what connections have in common |
//! | `jetstream` | a worker's events in a stream: subjects, messages, questions and answers |
//! | `feed` | live events of a worker, as a publisher's socket would bring them |
//! | `replay` | events of a worker that were missed, as a replay socket would bring them |

mod access;
mod codec;
mod feed;
pub(crate) mod jetstream;
mod link;
mod login;
mod replay;
#[cfg(test)]
mod tests;
mod wire;

pub(crate) use access::{Access, AccessFiles};
pub(crate) use feed::Feed;
pub(crate) use link::{Link, LinkEvent, Next};
pub(crate) use replay::Replay;
