//! The relay's stream: from the ingest thread, which makes it, to the thread that sends it, and to the buffer from
//! which lost batches are replayed.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use crossbeam::queue::ArrayQueue;
use mio::Waker;
use parking_lot::Mutex;

use crate::event::flat::UNNUMBERED;
use crate::ids::EventSeq;
use crate::ingest::Outlet;
use crate::limits::{RELAY_STREAM_BYTES_MAX, RELAY_STREAM_MESSAGES_MAX, RELAY_WAIT_MS};
use crate::metrics::{CounterSet, RelayCounter};
use crate::zmtp::{self, Server, ServerCounts};

/// The state that the ingest thread, which sends, shares with the thread that answers requests.
#[derive(Debug)]
pub(super) struct Kept {
    pub(super) buffer: ReplayBuffer,
    /// The last heartbeat, until a batch follows.
    pub(super) heartbeat: Option<Arc<[u8]>>,
    /// Counts ended generations. A snapshot from before the last end has no continuation.
    pub(super) forgotten: u64,
}

/// The ingest thread's end of the stream.
pub(super) struct Publication {
    pub(super) outbound: Arc<Outbound>,
    pub(super) kept: Arc<Mutex<Kept>>,
    pub(super) counters: Arc<CounterSet<RelayCounter>>,
    /// Wakes the thread that stores the stream at a NATS server, if there is one.
    pub(super) bell: Option<Arc<Bell>>,
}

impl fmt::Debug for Publication {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Publication").field("kept", &self.kept).finish_non_exhaustive()
    }
}

impl Publication {
    fn send(&self, seq: EventSeq, payload: &[u8]) {
        // It never waits. A router that misses a message sees the gap, and requests it.
        if !self.outbound.push(zmtp::message(&[b"", &seq.0.to_be_bytes()], payload)) {
            self.counters.bump(RelayCounter::SendsFailed);
            let times = self.counters.get(RelayCounter::SendsFailed);
            if times.is_power_of_two() {
                tracing::warn!(times, "too many messages wait to be sent; routers must request the dropped ones");
            }
        }
    }
}

impl Publication {
    fn ring(&self) {
        if let Some(bell) = &self.bell {
            bell.ring();
        }
    }
}

impl Outlet for Publication {
    fn batch(&mut self, seq: EventSeq, payload: &[u8]) {
        // Stored before it is sent, so that a router that has seen it can request it.
        let gone = {
            let mut kept = self.kept.lock();
            kept.heartbeat = None;
            kept.buffer.push(seq, payload.into())
        };
        self.counters.add(RelayCounter::BatchesForgotten, gone);
        self.counters.bump(RelayCounter::Batches);
        self.counters.add(RelayCounter::BatchBytes, payload.len() as u64);
        self.send(seq, payload);
        self.ring();
    }

    fn heartbeat(&mut self, payload: &[u8]) {
        self.counters.bump(RelayCounter::Heartbeats);
        self.send(UNNUMBERED, payload);
        if self.bell.is_some() {
            self.kept.lock().heartbeat = Some(payload.into());
            self.ring();
        }
    }

    fn forget(&mut self) {
        self.counters.bump(RelayCounter::Generations);
        let mut kept = self.kept.lock();
        kept.buffer.forget();
        kept.heartbeat = None;
        kept.forgotten += 1;
    }
}

/// Wakes a thread that takes what another one has made.
#[derive(Debug)]
pub(super) struct Bell {
    /// It was rung and not answered since.
    rung: AtomicBool,
    waker: Arc<Waker>,
}

impl Bell {
    pub(super) const fn new(waker: Arc<Waker>) -> Self {
        Self { rung: AtomicBool::new(false), waker }
    }

    /// Tells that there is something to take.
    fn ring(&self) {
        // AcqRel: pairs with the swap in `answer`. If this swap finds it rung, the other thread sees what was made.
        if !self.rung.swap(true, Ordering::AcqRel) && self.waker.wake().is_err() {
            // The thread looks by itself after a short while.
            tracing::debug!("a thread of the relay could not be woken");
        }
    }

    /// Call it before taking.
    pub(super) fn answer(&self) {
        // AcqRel: pairs with the swap in `ring`.
        self.rung.swap(false, Ordering::AcqRel);
    }
}

/// The queue between the two threads, bounded in messages and bytes.
#[derive(Debug)]
pub(super) struct Outbound {
    messages: ArrayQueue<Bytes>,
    bytes: AtomicUsize,
    bell: Bell,
}

impl Outbound {
    pub(super) fn new(waker: Arc<Waker>) -> Self {
        let messages = ArrayQueue::new(RELAY_STREAM_MESSAGES_MAX);
        Self { messages, bytes: AtomicUsize::new(0), bell: Bell::new(waker) }
    }

    /// Queues a message; `false` = the queue is full, and the message is dropped. An empty queue takes a message of any
    /// size.
    pub(super) fn push(&self, message: Bytes) -> bool {
        // Relaxed: only the sum counts, and only this thread adds to it.
        let waiting = self.bytes.load(Ordering::Relaxed);
        if waiting > 0 && waiting + message.len() > RELAY_STREAM_BYTES_MAX {
            return false;
        }
        // Relaxed: as above. Added before the push, so that the other thread never subtracts too early.
        let bytes = message.len();
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let is_taken = self.messages.push(message).is_ok();
        if !is_taken {
            // Relaxed: as above.
            self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
        self.bell.ring();
        is_taken
    }

    fn drain(&self, mut send: impl FnMut(&Bytes)) {
        self.bell.answer();
        // At most as many as there are now: peers are served in between.
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
    /// Sends until the relay ends or the event loop fails.
    pub(super) fn run(&mut self) {
        let (started, mut said, mut counted) = (Instant::now(), Vec::new(), ServerCounts::default());
        // Relaxed: nothing else depends on it.
        while !self.ends.load(Ordering::Relaxed) {
            let now_ms = started.elapsed().as_millis() as u64;
            if let Err(error) = self.server.serve_peers(Duration::from_millis(RELAY_WAIT_MS), now_ms, &mut said) {
                tracing::error!(%error, "the event loop of the stream failed; nothing is sent any more");
                return;
            }
            // Subscribers send nothing but subscriptions.
            said.clear();
            let server = &mut self.server;
            self.outbound.drain(|message| server.publish(message));
            count(&self.counters, &mut counted, self.server.counts());
        }
    }
}

/// Adds a server's counts since `before` to the relay's counters.
pub(super) fn count(counters: &CounterSet<RelayCounter>, before: &mut ServerCounts, now: ServerCounts) {
    counters.add(RelayCounter::PeersRefused, now.peers_refused - before.peers_refused);
    counters.add(RelayCounter::PeersCut, now.peers_cut - before.peers_cut);
    counters.add(RelayCounter::PeersStalled, now.peers_stalled - before.peers_stalled);
    counters.add(RelayCounter::MessagesDropped, now.messages_dropped - before.messages_dropped);
    *before = now;
}

/// Consecutive batches, bounded in number and bytes. The last batch is always there, whatever its size, so that a
/// router that has it learns that nothing is missing.
#[derive(Debug)]
pub struct ReplayBuffer {
    first: u64,
    batches: VecDeque<Arc<[u8]>>,
    bytes: usize,
    batches_max: usize,
    bytes_max: usize,
}

impl ReplayBuffer {
    /// An empty buffer.
    #[must_use]
    pub const fn new(batches_max: usize, bytes_max: usize) -> Self {
        Self { first: 0, batches: VecDeque::new(), bytes: 0, batches_max, bytes_max }
    }

    /// Adds the next batch. Answers with how many batches it displaced. A batch that does not follow the last begins
    /// anew.
    pub fn push(&mut self, seq: EventSeq, payload: Arc<[u8]>) -> u64 {
        if seq != self.next() {
            self.forget();
            self.first = seq.0;
        }
        self.bytes += payload.len();
        self.batches.push_back(payload);
        let mut gone = 0;
        while self.batches.len() > 1 && (self.batches.len() > self.batches_max || self.bytes > self.bytes_max) {
            self.pop();
            gone += 1;
        }
        gone
    }

    fn pop(&mut self) {
        if let Some(oldest) = self.batches.pop_front() {
            self.bytes -= oldest.len();
            self.first += 1;
        }
    }

    /// Drops every batch. The next one has the next sequence.
    pub fn forget(&mut self) {
        while !self.batches.is_empty() {
            self.pop();
        }
    }

    /// The sequence of the oldest batch, or of the next one if there is none.
    #[must_use]
    pub const fn first(&self) -> EventSeq {
        EventSeq(self.first)
    }

    /// The sequence of the next batch.
    #[must_use]
    pub fn next(&self) -> EventSeq {
        EventSeq(self.first + self.batches.len() as u64)
    }

    /// Bytes of all batches.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// A batch, if it is there.
    #[must_use]
    pub fn get(&self, seq: EventSeq) -> Option<&Arc<[u8]>> {
        self.batches.get(usize::try_from(seq.0.checked_sub(self.first)?).ok()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(bytes: usize) -> Arc<[u8]> {
        vec![7; bytes].into()
    }

    #[test]
    fn it_is_bounded_in_batches_and_bytes_and_keeps_the_last() {
        let mut buffer = ReplayBuffer::new(3, 100);
        assert_eq!((buffer.first(), buffer.next()), (EventSeq(0), EventSeq(0)));
        let gone: Vec<u64> = (0..5).map(|seq| buffer.push(EventSeq(seq), batch(10))).collect();
        assert_eq!((gone, buffer.first(), buffer.bytes()), (vec![0, 0, 0, 1, 1], EventSeq(2), 30));
        assert!(buffer.get(EventSeq(1)).is_none() && buffer.get(EventSeq(2)).is_some());
        assert_eq!((buffer.push(EventSeq(5), batch(1000)), buffer.first()), (3, EventSeq(5)), "larger than the limit");
        assert_eq!((buffer.push(EventSeq(6), batch(1)), buffer.bytes()), (1, 1));
        buffer.forget();
        assert_eq!((buffer.first(), buffer.next(), buffer.bytes()), (EventSeq(7), EventSeq(7), 0));
        buffer.push(EventSeq(9), batch(1));
        assert_eq!(
            (buffer.first(), buffer.next()),
            (EventSeq(9), EventSeq(10)),
            "a batch that does not follow begins anew"
        );
    }
}
