//! The only way into a core: connections, replies that come late, and the drain.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use crossbeam::queue::ArrayQueue;

use super::late::{Late, LateBox};
use super::users::UserPlace;
use crate::limits::MAILBOX_MESSAGES_MAX;

/// What other threads hand to a core.
pub(super) enum Message {
    Connection { stream: UnixStream, uid: u32, place: UserPlace },
    Drain { deadline: Instant },
    Late(Late),
}

/// What other threads may touch of a core.
pub(super) struct Mailbox {
    pub(super) queue: ArrayQueue<Message>,
    /// Replies to requests that waited, and word that some may find room. Its bell rings for `queue` too.
    pub(super) late: Arc<LateBox>,
    /// Connections handed over and not yet ended. Relaxed everywhere: it only guides the acceptor's choice.
    pub(super) connections: AtomicUsize,
    /// Cleared, for good, when the thread no longer takes messages.
    pub(super) alive: AtomicBool,
}

impl Mailbox {
    pub(super) fn new() -> Self {
        Self {
            // One place more than connections may take, so that a drain always finds room.
            queue: ArrayQueue::new(MAILBOX_MESSAGES_MAX + 1),
            late: Arc::default(),
            connections: AtomicUsize::new(0),
            alive: AtomicBool::new(true),
        }
    }

    /// The next message.
    pub(super) async fn next(&self) -> Message {
        loop {
            if let Some(message) = self.queue.pop() {
                return message;
            }
            if let Some(late) = self.late.pop() {
                return Message::Late(late);
            }
            // A message that arrives here leaves a permit: `notified` returns at once.
            self.late.arrived.notified().await;
        }
    }

    /// What comes late, without what else waits.
    pub(super) async fn next_late(&self) -> Late {
        loop {
            if let Some(late) = self.late.pop() {
                return late;
            }
            self.late.arrived.notified().await;
        }
    }
}

/// The sending side of a core's mailbox.
#[derive(Clone)]
pub struct CoreHandle {
    pub(super) mailbox: Arc<Mailbox>,
}

impl CoreHandle {
    /// Connections it has, those on their way to it included.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.mailbox.connections.load(Ordering::Relaxed)
    }

    /// Whether it still takes connections.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        // Relaxed: a connection handed to a core that is just ending is dropped by whoever finds it.
        self.mailbox.alive.load(Ordering::Relaxed)
    }

    /// Hands over a connection of user `uid`, with its place among that user's. Only one thread may call it.
    ///
    /// # Errors
    /// Gives the stream back if the mailbox is full.
    pub(super) fn hand_over(&self, stream: UnixStream, uid: u32, place: UserPlace) -> Result<(), UnixStream> {
        if self.mailbox.queue.len() >= MAILBOX_MESSAGES_MAX {
            return Err(stream);
        }
        self.mailbox.connections.fetch_add(1, Ordering::Relaxed);
        match self.mailbox.queue.push(Message::Connection { stream, uid, place }) {
            Ok(()) => self.mailbox.late.arrived.notify_one(),
            Err(Message::Connection { stream, .. }) => {
                self.mailbox.connections.fetch_sub(1, Ordering::Relaxed);
                return Err(stream);
            }
            // The queue gives back what was pushed.
            Err(Message::Drain { .. } | Message::Late(_)) => {}
        }
        Ok(())
    }

    /// Asks it to end: to answer what has come in, and to cut what is still open at `deadline`. Stop the
    /// acceptor first. A second call changes nothing.
    pub fn drain(&self, deadline: Instant) {
        if self.mailbox.queue.push(Message::Drain { deadline }).is_err() {
            tracing::warn!("the core is draining already");
        }
        self.mailbox.late.arrived.notify_one();
    }
}
