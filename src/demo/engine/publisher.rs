//! The engine's ZeroMQ socket and the record of everything sent on it.

use std::path::Path;

use super::super::clock::{monotonic_ns, unix_s};
use super::super::record::{BatchRecord, EventRecord, RecordWriter};
use super::publish::{CacheEvent, encode_batch};
use crate::error::{Error, Kind};
use crate::limits::ZMQ_RECEIVE_MESSAGES_MAX;

/// Numbers batches, writes them down, and sends them.
///
/// XPUB instead of vLLM's PUB: the same on the wire, but it tells when a subscription has arrived, so that
/// nothing is published before the daemon listens.
pub(super) struct Publisher {
    socket: zmq::Socket,
    log: RecordWriter,
    seq_next: u64,
}

impl Publisher {
    /// Binds a free port of the loopback interface and creates the log.
    ///
    /// # Errors
    /// `system` if either fails.
    pub(super) fn bind(log: &Path) -> Result<Self, Error> {
        let socket = zmq::Context::new().socket(zmq::XPUB).map_err(failed)?;
        socket.set_sndhwm(ZMQ_RECEIVE_MESSAGES_MAX).map_err(failed)?;
        socket.set_linger(0).map_err(failed)?;
        socket.bind("tcp://127.0.0.1:*").map_err(failed)?;
        Ok(Self { socket, log: RecordWriter::create(log)?, seq_next: 0 })
    }

    /// Where a subscriber connects.
    ///
    /// # Errors
    /// `system` if the socket cannot say.
    pub(super) fn endpoint(&self) -> Result<String, Error> {
        let endpoint = self.socket.get_last_endpoint().map_err(failed)?;
        endpoint.map_err(|_| failed(zmq::Error::EINVAL))
    }

    /// Returns once somebody has subscribed.
    ///
    /// # Errors
    /// `system` if the socket fails.
    pub(super) fn wait_for_subscription(&self) -> Result<(), Error> {
        // XPUB hands over subscriptions as 1 and cancellations as 0, each followed by the prefix.
        while self.socket.recv_bytes(0).map_err(failed)?.first() != Some(&1) {}
        Ok(())
    }

    /// Sends one batch and answers its sequence.
    ///
    /// # Errors
    /// `system` if it can be neither written down nor sent.
    pub(super) fn publish(&mut self, events: &[CacheEvent<'_>]) -> Result<u64, Error> {
        let seq = self.seq_next;
        self.seq_next += 1;
        let payload = encode_batch(unix_s(), events.iter().copied());
        // Before the send: nobody can know of the batch earlier than this.
        let sent_ns = monotonic_ns();
        self.socket.send_multipart([&[][..], &seq.to_be_bytes(), &payload], 0).map_err(failed)?;
        self.log.write(&BatchRecord { seq, sent_ns, events: events.iter().map(record).collect() })?;
        Ok(seq)
    }

    /// Completes the log and answers how many batches it has.
    ///
    /// # Errors
    /// `system` if it cannot be written.
    pub(super) fn finish(&mut self) -> Result<u64, Error> {
        self.log.flush()?;
        Ok(self.seq_next)
    }
}

fn record(event: &CacheEvent<'_>) -> EventRecord {
    match event {
        CacheEvent::Stored { names, .. } => EventRecord::Stored(names.to_vec()),
        CacheEvent::Removed { name } => EventRecord::Removed(vec![*name]),
        CacheEvent::Cleared => EventRecord::Cleared,
    }
}

fn failed(error: zmq::Error) -> Error {
    Error::new(Kind::System, "the engine's ZeroMQ socket cannot be used", "check the limits on files and ports")
        .caused_by(error)
}
