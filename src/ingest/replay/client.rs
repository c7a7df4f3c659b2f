//! One replay's socket: a DEALER that asks a publisher's ROUTER once.

use std::os::fd::RawFd;

use zmq::{Message, Socket, SocketType};

use crate::event::flat::UNNUMBERED;
use crate::ids::EventSeq;
use crate::ingest::subscription::receive_frame;
use crate::limits::ZMQ_MESSAGE_BYTES_MAX;

const SEQ_BYTES: usize = 8;
/// A peer that accepts and never speaks ZMTP.
const HANDSHAKE_MS_MAX: i32 = 3_000;

/// One message of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::ingest) enum Answer {
    /// A batch with its sequence. [`ReplayClient::payload`] is not yet looked at.
    Batch(EventSeq),
    /// A message with a payload that is no batch of the stream. [`ReplayClient::payload`] is not yet looked at.
    Part,
    /// There is no more.
    End,
    /// So many frames, and not an 8-byte one before the last.
    Misframed(usize),
}

/// The socket of one replay. A new one for each: what an older question is answered can never be taken for this one's.
pub(in crate::ingest) struct ReplayClient {
    dealer: Socket,
    /// The last frame received and the one before it, used again for every message.
    last: Message,
    previous: Message,
}

impl ReplayClient {
    /// Connects, and asks for everything from a sequence on.
    ///
    /// # Errors
    /// Those of libzmq: the endpoint cannot be used, or there is no socket left.
    pub(in crate::ingest) fn ask(context: &zmq::Context, endpoint: &str, from: EventSeq) -> zmq::Result<Self> {
        let dealer = context.socket(SocketType::DEALER)?;
        dealer.set_linger(0)?;
        dealer.set_ipv6(true)?;
        dealer.set_rcvhwm(0)?;
        dealer.set_maxmsgsize(ZMQ_MESSAGE_BYTES_MAX)?;
        dealer.set_handshake_ivl(HANDSHAKE_MS_MAX)?;
        dealer.connect(endpoint)?;
        // The empty frame is what a REQ would send first; engines ignore a question without it.
        dealer.send(&[][..], zmq::SNDMORE | zmq::DONTWAIT)?;
        dealer.send(&from.0.to_be_bytes()[..], zmq::DONTWAIT)?;
        Ok(Self { dealer, last: Message::new(), previous: Message::new() })
    }

    /// The descriptor to wait on, edge-triggered.
    pub(in crate::ingest) fn descriptor(&self) -> zmq::Result<RawFd> {
        self.dealer.get_fd()
    }

    /// The next message of the answer, if one is there. Older engines send an empty frame, the sequence and the payload,
    /// newer ones also a topic: what matters is taken from the end.
    pub(in crate::ingest) fn receive(&mut self) -> zmq::Result<Option<Answer>> {
        if !receive_frame(&self.dealer, &mut self.last)? {
            return Ok(None);
        }
        let mut frames = 1;
        while self.last.get_more() {
            std::mem::swap(&mut self.last, &mut self.previous);
            if !receive_frame(&self.dealer, &mut self.last)? {
                break;
            }
            frames += 1;
        }
        let seq = <[u8; SEQ_BYTES]>::try_from(&*self.previous).ok().filter(|_| frames > 1);
        let seq = seq.map(|seq| EventSeq(u64::from_be_bytes(seq)));
        Ok(Some(match seq {
            Some(UNNUMBERED) if self.last.is_empty() => Answer::End,
            Some(UNNUMBERED) => Answer::Part,
            Some(seq) => Answer::Batch(seq),
            None => Answer::Misframed(frames),
        }))
    }

    /// The payload of the batch that was received last.
    pub(in crate::ingest) fn payload(&self) -> &[u8] {
        &self.last
    }
}
