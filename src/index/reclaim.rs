//! When memory that readers may still look at can be used again.
//!
//! A reader enters ([`Reader::enter`]) before it loads anything and leaves when it has its answer. The writer
//! unlinks something, pushes it onto its [`Garbage`], and gets it back ([`Garbage::collect`]) once
//! every reader that was inside when it was handed over has left: its **grace period**. `seize` keeps
//! the account; this module says what is handed over, and brings it back to the writer's own thread.
//!
//! # How seize 0.5 behaves, as read in its source
//!
//! * To enter is a plain store and a compiler fence where the kernel has `membarrier` (Linux), a SeqCst
//!   store elsewhere; to leave is one atomic swap. A thread that enters twice is inside until it has left twice.
//! * What a thread retires gathers in a batch of that thread. When the batch holds `batch_size` entries
//!   (rounded up to a power of two, 32 or the number of CPUs by default), each further entry tries to send it
//!   off: one process-wide barrier (up to ~11 µs beside a running reader), then a walk over all threads
//!   that ever entered. Of these, each that is inside *now* takes one entry of the batch as its list
//!   node. A batch with fewer entries than threads inside stays where it is: nothing is freed until the same thread
//!   retires more. Nothing else tries again, and no call does so from outside without becoming a reader.
//! * Therefore a batch here is one real entry, a whole batch of ours, and entries that mean nothing up to
//!   [`GUARDS_MAX`], which is also the `batch_size`: every flush is sent off at once, with one barrier,
//!   and leaves nothing behind in the thread, so the writer may move to another. With more than `GUARDS_MAX`
//!   threads inside at that moment the batch waits for the next flush: late, never wrong.
//! * A batch is freed by the last of those readers as it leaves, on its thread, or inside the flush if nobody
//!   was inside. So the callback does next to nothing there: it pushes the batch onto a lock-free stack from
//!   which the writer collects. It neither allocates nor frees while the writer lives.
//! * A reader that stays inside holds up everything that is flushed while it does: [`Garbage::waiting_bytes`]
//!   grows, and it is the writer's duty to stop before that hurts.
//!
//! # Who frees what is left
//!
//! The stack is owned by the writer's `Garbage` and by every batch under way. A dropped `Garbage` flushes; if batches
//! are still under way then, its stack becomes an **orphan**: the reclaimer owns it too, so that the reader who lets
//! the last batch go frees nothing on its own thread. What has come back to orphans is freed by the next writer of the
//! reclaimer that collects, or with the last [`Reclaimer`]. What is still in a thread's batch by then is given back by
//! `seize`.

#![expect(unsafe_code, reason = "seize takes raw pointers, and what comes back goes onto an intrusive stack")]

mod garbage;
mod stack;

pub(super) use garbage::Garbage;
#[cfg(all(test, kvrouted_loom))]
pub(super) use stack::{Node, Stack};

use seize::Guard as _;
use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Threads that can be inside at once without delaying what is freed.
pub(super) const GUARDS_MAX: usize = 64;

/// Keeps memory that was taken out of an index until no lookup can be looking at it. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Reclaimer {
    collector: Arc<seize::Collector>,
    orphans: Arc<Orphans>,
}

/// Stacks whose writer is gone and to which batches still come back. Only writers look here.
#[derive(Debug, Default)]
struct Orphans {
    stacks: Mutex<Vec<Arc<dyn Any + Send + Sync>>>,
    /// Whether there are any.
    any: AtomicBool,
}

impl Orphans {
    fn adopt(&self, stack: Arc<dyn Any + Send + Sync>) {
        self.stacks.lock().unwrap_or_else(PoisonError::into_inner).push(stack);
        // Relaxed: who is late looks the next time; the lock orders the rest.
        self.any.store(true, Ordering::Relaxed);
    }

    /// Frees the stacks to which everything has come back.
    fn free(&self) {
        // Relaxed: as above.
        if !self.any.load(Ordering::Relaxed) {
            return;
        }
        let mut stacks = self.stacks.lock().unwrap_or_else(PoisonError::into_inner);
        let (whole, waiting) =
            std::mem::take(&mut *stacks).into_iter().partition(|stack| Arc::strong_count(stack) == 1);
        *stacks = waiting;
        self.any.store(!stacks.is_empty(), Ordering::Relaxed);
        drop(stacks);
        drop::<Vec<Arc<dyn Any + Send + Sync>>>(whole);
    }
}

impl Reclaimer {
    /// A new one, with nobody inside.
    #[must_use]
    pub fn new() -> Self {
        Self { collector: Arc::new(seize::Collector::new().batch_size(GUARDS_MAX)), orphans: Arc::default() }
    }

    /// A handle to enter by.
    pub(super) fn reader(&self) -> Reader {
        Reader { reclaimer: self.clone() }
    }
}

impl Default for Reclaimer {
    fn default() -> Self {
        Self::new()
    }
}

/// A reader's handle: the way in.
#[derive(Clone, Debug)]
pub(super) struct Reader {
    reclaimer: Reclaimer,
}

impl Reader {
    /// Enters. Until the guard is dropped, nothing is given back that is pushed from now on, nor anything that
    /// was pushed but not yet flushed.
    #[inline]
    pub(super) fn enter(&self) -> Guard<'_> {
        Guard { guard: self.reclaimer.collector.enter() }
    }

    /// Whether this guard has entered here.
    #[inline]
    pub(super) fn is_inside(&self, guard: &Guard<'_>) -> bool {
        guard.is_of(&self.reclaimer)
    }
}

/// Somebody is inside.
#[derive(Debug)]
pub(super) struct Guard<'a> {
    guard: seize::LocalGuard<'a>,
}

impl Guard<'_> {
    /// Whether this guard delays what `reclaimer` frees.
    #[inline]
    pub(super) fn is_of(&self, reclaimer: &Reclaimer) -> bool {
        std::ptr::eq(self.guard.collector(), Arc::as_ptr(&reclaimer.collector))
    }
}

#[cfg(all(test, not(kvrouted_loom)))]
mod tests;
