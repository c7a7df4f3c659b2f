//! The stream on its way from the ingest thread, which makes it and waits for nobody, to the thread that sends it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use crossbeam::queue::ArrayQueue;
use mio::Waker;

use crate::limits::{RELAY_STREAM_BYTES_MAX, RELAY_STREAM_MESSAGES_MAX, RELAY_WAIT_MS};
use crate::metrics::{CounterSet, RelayCounter};
use crate::zmtp::{Server, ServerCounts};

/// Messages between the two threads, bounded in number and bytes.
#[derive(Debug)]
pub(super) struct Outbound {
    messages: ArrayQueue<Bytes>,
    bytes: AtomicUsize,
    /// The sending thread was woken and has not looked since.
    woken: AtomicBool,
    waker: Arc<Waker>,
}

impl Outbound {
    pub(super) fn new(waker: Arc<Waker>) -> Self {
        let messages = ArrayQueue::new(RELAY_STREAM_MESSAGES_MAX);
        Self { messages, bytes: AtomicUsize::new(0), woken: AtomicBool::new(false), waker }
    }

    /// Hands a message over; `false` = too much waits, and the message is not sent. One message always fits where
    /// nothing waits.
    pub(super) fn push(&self, message: Bytes) -> bool {
        // Relaxed: only the sum counts, and only this thread adds to it.
        let waiting = self.bytes.load(Ordering::Relaxed);
        if waiting > 0 && waiting + message.len() > RELAY_STREAM_BYTES_MAX {
            return false;
        }
        // Relaxed: as above. Added first, so that the other thread never takes away what is not there yet.
        let bytes = message.len();
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let is_taken = self.messages.push(message).is_ok();
        if !is_taken {
            // Relaxed: as above.
            self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
        // AcqRel: pairs with the swap in `drain`, which sees the message where this one sees that it was woken.
        if !self.woken.swap(true, Ordering::AcqRel) && self.waker.wake().is_err() {
            // The thread looks by itself after RELAY_WAIT_MS.
            tracing::debug!("the sending thread could not be woken");
        }
        is_taken
    }

    fn drain(&self, mut send: impl FnMut(&Bytes)) {
        // AcqRel: pairs with the swap in `push`.
        self.woken.swap(false, Ordering::AcqRel);
        // As many as there are at most: peers are looked at in between.
        for _ in 0..RELAY_STREAM_MESSAGES_MAX {
            let Some(message) = self.messages.pop() else { return };
            send(&message);
            // Relaxed: only the sum counts.
            self.bytes.fetch_sub(message.len(), Ordering::Relaxed);
        }
    }
}

/// The thread that sends the stream to every subscriber.
pub(super) struct Sending {
    pub(super) server: Server,
    pub(super) outbound: Arc<Outbound>,
    pub(super) counters: Arc<CounterSet<RelayCounter>>,
    pub(super) ends: Arc<AtomicBool>,
}

impl Sending {
    /// Sends until it is told to end, or its event loop fails.
    pub(super) fn run(&mut self) {
        let (started, mut said, mut counted) = (Instant::now(), Vec::new(), ServerCounts::default());
        // Relaxed: nothing else hangs on it.
        while !self.ends.load(Ordering::Relaxed) {
            let now_ms = started.elapsed().as_millis() as u64;
            if let Err(error) = self.server.turn(Duration::from_millis(RELAY_WAIT_MS), now_ms, &mut said) {
                tracing::error!(%error, "the event loop of the stream failed; nobody hears it any more");
                return;
            }
            // Subscribers have nothing to say beside their subscriptions.
            said.clear();
            let server = &mut self.server;
            self.outbound.drain(|message| server.publish(message));
            count(&self.counters, &mut counted, self.server.counts());
        }
    }
}

/// Adds to a relay's counters what a server has counted since `before`.
pub(super) fn count(counters: &CounterSet<RelayCounter>, before: &mut ServerCounts, now: ServerCounts) {
    counters.add(RelayCounter::PeersRefused, now.peers_refused - before.peers_refused);
    counters.add(RelayCounter::PeersCut, now.peers_cut - before.peers_cut);
    counters.add(RelayCounter::PeersStalled, now.peers_stalled - before.peers_stalled);
    counters.add(RelayCounter::MessagesDropped, now.messages_dropped - before.messages_dropped);
    *before = now;
}
