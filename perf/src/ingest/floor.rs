//! The least that receiving takes: the same SUB socket, frames counted and dropped.

use std::time::{Duration, Instant};

use super::sender::Sender;
use crate::failure::Failure;

/// How long nothing may come before what is missing counts as lost, milliseconds.
const PATIENCE_MS: i32 = 3_000;
/// Messages that libzmq keeps, as kvrouted's ingest has it.
const RECEIVE_MESSAGES_MAX: i32 = kvrouted::limits::ZMQ_RECEIVE_MESSAGES_MAX;

/// What came.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Taken {
    /// Messages.
    pub(crate) messages: u64,
    /// Numbers that were left out.
    pub(crate) missed: u64,
    /// From the first message to the last, or until the last was applied.
    pub(crate) seconds: f64,
    /// Processor time of the thread that takes messages from the socket, where it is known.
    pub(crate) thread_cpu_ns: u64,
}

impl Taken {
    /// Messages a second.
    #[must_use]
    pub(crate) fn per_second(&self) -> f64 {
        self.messages as f64 / self.seconds.max(1e-9)
    }
}

/// A SUB socket at a sender.
///
/// # Errors
/// Those of libzmq.
pub(crate) fn subscribe(context: &zmq::Context, endpoint: &str) -> Result<zmq::Socket, Failure> {
    let socket = context.socket(zmq::SUB).map_err(Failure::zmq)?;
    socket.set_rcvhwm(RECEIVE_MESSAGES_MAX).map_err(Failure::zmq)?;
    socket.set_rcvtimeo(PATIENCE_MS).map_err(Failure::zmq)?;
    socket.set_subscribe(b"").and_then(|()| socket.connect(endpoint)).map_err(Failure::zmq)?;
    Ok(socket)
}

/// Takes `messages` messages, and hands each to `take`. Ends early where nothing comes any more.
///
/// # Errors
/// Those of libzmq, and of `take`.
pub(crate) fn receive(
    socket: &zmq::Socket,
    messages: u64,
    mut take: impl FnMut(u64, &[u8]) -> Result<(), Failure>,
) -> Result<Taken, Failure> {
    let (mut topic, mut seq, mut payload) = (zmq::Message::new(), zmq::Message::new(), zmq::Message::new());
    let (mut taken, mut next, mut first, mut last) = (Taken::default(), 0, None, Instant::now());
    while next < messages {
        match socket.recv(&mut topic, 0) {
            Err(zmq::Error::EAGAIN) => break,
            other => other.map_err(Failure::zmq)?,
        }
        first.get_or_insert_with(Instant::now);
        socket.recv(&mut seq, 0).and_then(|()| socket.recv(&mut payload, 0)).map_err(Failure::zmq)?;
        let number = <[u8; 8]>::try_from(&*seq).map_or(next, u64::from_be_bytes);
        take(number, &payload)?;
        taken.messages += 1;
        taken.missed += number.saturating_sub(next);
        next = number + 1;
        last = Instant::now();
    }
    taken.missed += messages.saturating_sub(next);
    taken.seconds = first.map_or(Duration::ZERO, |first| last.saturating_duration_since(first)).as_secs_f64();
    Ok(taken)
}

/// Receives everything and drops it; also answers how long the sender took to send.
///
/// # Errors
/// Those of libzmq and of the sender.
pub(crate) fn measure(mut sender: Sender, messages: u64) -> Result<(Taken, f64), Failure> {
    let context = zmq::Context::new();
    let socket = subscribe(&context, &sender.endpoint)?;
    sender.go()?;
    let taken = receive(&socket, messages, |_, payload| {
        std::hint::black_box(payload.len());
        Ok(())
    })?;
    Ok((taken, sender.sent()?.seconds))
}
