//! From the cores to the predictor: bounded, and nobody waits.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Thread;

use crossbeam::queue::ArrayQueue;

use crate::ids::{LocalHash, SpaceId, Worker, WorkerIndex};
use crate::limits::{PREDICTED_BOOKINGS_WAITING_MAX, PREDICTED_BUFFER_BLOCKS_KEPT, PREDICTED_WAITING_BLOCKS_MAX};

/// A prompt that was booked.
#[derive(Debug)]
pub struct Booked {
    /// In which space.
    pub space: SpaceId,
    /// The worker's place in the fleet table.
    pub index: WorkerIndex,
    /// On whom.
    pub worker: Worker,
    /// When, on the clock of bookings.
    pub now_ms: u64,
    /// The prompt's whole blocks.
    pub locals: Vec<LocalHash>,
}

/// Why a booking was not handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotTaken {
    /// Too many bookings, or blocks of them, wait.
    Full,
}

/// What waits for the predictor. Any thread may hand over; one takes.
#[derive(Debug)]
pub struct HandOver {
    waiting: ArrayQueue<Booked>,
    /// Blocks of what waits. Relaxed everywhere: it bounds memory, and orders nothing.
    waiting_blocks: AtomicUsize,
    /// Buffers to use again.
    spent: ArrayQueue<Vec<LocalHash>>,
    /// Who takes, once it runs.
    predictor: OnceLock<Thread>,
}

impl Default for HandOver {
    fn default() -> Self {
        Self {
            waiting: ArrayQueue::new(PREDICTED_BOOKINGS_WAITING_MAX),
            waiting_blocks: AtomicUsize::new(0),
            spent: ArrayQueue::new(PREDICTED_BOOKINGS_WAITING_MAX),
            predictor: OnceLock::new(),
        }
    }
}

impl HandOver {
    /// Hands over that a prompt with the blocks `locals` was booked. Allocates nothing once as many buffers go round
    /// as wait at most, unless the prompt is larger than what a buffer keeps.
    ///
    /// # Errors
    /// [`NotTaken::Full`]; nothing is predicted of the booking then.
    pub fn push(
        &self,
        space: SpaceId,
        (index, worker): (WorkerIndex, Worker),
        locals: &[LocalHash],
        now_ms: u64,
    ) -> Result<(), NotTaken> {
        let before = self.waiting_blocks.fetch_add(locals.len(), Ordering::Relaxed);
        if before + locals.len() > PREDICTED_WAITING_BLOCKS_MAX || self.waiting.is_full() {
            self.waiting_blocks.fetch_sub(locals.len(), Ordering::Relaxed);
            return Err(NotTaken::Full);
        }
        let mut buffer = self.spent.pop().unwrap_or_default();
        buffer.clear();
        buffer.extend_from_slice(locals);
        if let Err(refused) = self.waiting.push(Booked { space, index, worker, now_ms, locals: buffer }) {
            self.give_back(refused);
            return Err(NotTaken::Full);
        }
        if let Some(predictor) = self.predictor.get() {
            predictor.unpark();
        }
        Ok(())
    }

    /// The booking that has waited longest. Give it back.
    #[must_use]
    pub fn pop(&self) -> Option<Booked> {
        self.waiting.pop()
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Gives back what was taken, so that its buffer is used again.
    pub fn give_back(&self, Booked { mut locals, .. }: Booked) {
        self.waiting_blocks.fetch_sub(locals.len(), Ordering::Relaxed);
        locals.clear();
        locals.shrink_to(PREDICTED_BUFFER_BLOCKS_KEPT);
        // One that finds no room is freed.
        drop(self.spent.push(locals));
    }

    /// Says which thread takes: it is woken by what is handed over from now on.
    pub fn wakes(&self, predictor: Thread) {
        if self.predictor.set(predictor).is_err() {
            tracing::warn!("the predictor was named before");
        }
    }
}
