//! What carries messages between routers.
//!
//! A carrier may lose, repeat, delay and reorder messages, and deliver those of strangers. It knows nothing of their
//! content. One thread uses it.

use std::io;
use std::time::Duration;

use bytes::Bytes;

use super::values::OriginId;

/// A way to other routers.
pub trait Carrier {
    /// Waits for messages for at most `wait`, and adds those that have come to `arrived`. Also does what is due at `now_ms`,
    /// of a monotonic clock.
    ///
    /// # Errors
    /// The carrier has failed for good.
    fn receive(&mut self, wait: Duration, now_ms: u64, arrived: &mut Vec<Arrived>) -> io::Result<()>;

    /// Sends a message to every router that listens.
    fn publish(&mut self, message: &[u8]);

    /// Sends a request to the router from which the messages of `origin` come. `false` = there is no way to it now.
    fn ask(&mut self, origin: OriginId, message: &[u8]) -> bool;

    /// Sends a part of an answer. `false` = the router that asked is gone, or reads too slowly.
    fn answer(&mut self, asker: Asker, message: &[u8]) -> bool;

    /// Says that a router that listens has proven that it is one. Only such routers get what is published, unless a broker
    /// decides who gets it.
    fn admit(&mut self, asker: Asker);

    /// Whether a router that was admitted is still connected. `false` where a broker decides who hears this one.
    fn is_admitted(&self, asker: Asker) -> bool;

    /// Says that a message that came by a link is one of `origin`. The message proves it.
    fn identify(&mut self, link: usize, origin: OriginId);

    /// The links to the peers, configured or heard, with their numbers.
    fn links(&self) -> Vec<(usize, Link)>;

    /// Where other routers hear this one.
    fn address(&self) -> &str;

    /// What was counted since the call before.
    fn counts(&mut self) -> CarrierCounts;
}

/// A message that has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrived {
    /// From where.
    pub from: Source,
    /// The message.
    pub bytes: Bytes,
}

/// Where a message came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The link of this number, on which this router listens: batches, heartbeats and answers.
    Link(usize),
    /// A router that listens to this one: its requests.
    Asker(Asker),
}

/// A router, or a stranger, that asks this one. No other one has its place and number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Asker {
    /// Its place among those connected, where there are connections.
    pub place: usize,
    /// Its number.
    pub number: u64,
}

/// The link to a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The peer's address.
    pub address: String,
    /// Whether it is connected.
    pub is_up: bool,
    /// The router that is there, once its messages have proven it.
    pub origin: Option<OriginId>,
    /// Whether a broker is there in place of a router.
    pub is_broker: bool,
}

/// What a carrier counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CarrierCounts {
    /// Messages that a router missed because it reads too slowly.
    pub messages_dropped: u64,
    /// Connections that were refused or cut: too many, or bytes that no router sends.
    pub connections_cut: u64,
    /// Connections to peers that ended.
    pub links_lost: u64,
}
