//! Prefaulting: a thread of its own maps and touches chunks of memory before a writer needs them.
//!
//! The kernel finds and zeroes 2 MiB when a huge page is touched first. That takes 0.1 ms on a quiet machine, and 3 to
//! 12 ms were measured on a virtual machine whose host had not backed the memory yet. All events of a shard would wait
//! for it. So the writer asks for the next chunk while it fills the present one. A writer that is faster than the
//! thread maps its chunk itself.

#![expect(unsafe_code, reason = "memory is handed from thread to thread as a pointer")]

use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};

use super::pages;
use crate::sandbox::{self, ThreadKind};
use crate::watchdog::{Activity, ThreadMark};

/// The thread. Unset where there is none: writers then map what they need.
static THREAD: OnceLock<Prefaulter> = OnceLock::new();

struct Prefaulter {
    requests: Sender<Arc<Slot>>,
    mark: Arc<ThreadMark>,
}

/// The mark of the thread, if it runs.
pub(super) fn mark() -> Option<Arc<ThreadMark>> {
    THREAD.get().map(|thread| Arc::clone(&thread.mark))
}

/// Starts the thread, once for the process. It inherits the processors of the caller, so no pinned thread calls this.
pub(super) fn start() {
    if cfg!(any(miri, kvrouted_loom)) || THREAD.get().is_some() {
        return;
    }
    let (requests, slots) = channel::<Arc<Slot>>();
    let mark = Arc::new(ThreadMark::new("index-pages", false));
    let of_thread = Arc::clone(&mark);
    let run = move || {
        sandbox::enter(ThreadKind::IndexPages);
        for slot in slots {
            of_thread.begin_round(Activity::MappingMemory);
            slot.fill();
            of_thread.wait();
        }
    };
    let thread = std::thread::Builder::new().name("index-pages".to_owned());
    // It ends when the sender goes. Without it writers touch their memory themselves: later, not wrong.
    if thread.spawn(run).is_ok() {
        // A second caller at the same time drops its sender, and its thread ends.
        let _ = THREAD.set(Prefaulter { requests, mark });
    }
}

/// The chunk that a writer will need next.
#[derive(Debug)]
pub(super) struct PrefaultedChunk {
    slot: Arc<Slot>,
    is_asked: bool,
}

impl PrefaultedChunk {
    /// For chunks of `chunk_bytes`.
    pub(super) fn new(chunk_bytes: usize) -> Self {
        Self { slot: Arc::new(Slot { chunk: AtomicPtr::new(ptr::null_mut()), chunk_bytes }), is_asked: false }
    }

    /// Asks for a chunk, unless one was asked for and not taken.
    #[inline]
    pub(super) fn ask(&mut self) {
        if !self.is_asked {
            self.send();
        }
    }

    #[cold]
    fn send(&mut self) {
        self.is_asked = true;
        if let Some(thread) = THREAD.get() {
            // The thread ends with the process only.
            let _ = thread.requests.send(Arc::clone(&self.slot));
        }
    }

    /// The chunk that was asked for: a mapping of the chunk's bytes, all zero, that belongs to the caller. `None` = it
    /// is not there yet.
    pub(super) fn take(&mut self) -> Option<NonNull<u8>> {
        self.is_asked = false;
        self.slot.take()
    }

    /// Bytes that wait to be taken.
    pub(super) fn bytes(&self) -> usize {
        // Relaxed: only a figure.
        if self.slot.chunk.load(Ordering::Relaxed).is_null() { 0 } else { self.slot.chunk_bytes }
    }
}

/// Room for one chunk between the thread and a writer.
#[derive(Debug)]
struct Slot {
    /// Null, or a mapping of `chunk_bytes` that belongs to the slot.
    chunk: AtomicPtr<u8>,
    chunk_bytes: usize,
}

impl Slot {
    /// Maps and touches a chunk.
    fn fill(&self) {
        // Relaxed: only this thread makes it anything but null.
        if !self.chunk.load(Ordering::Relaxed).is_null() {
            return;
        }
        if let Some(chunk) = pages::map_huge(self.chunk_bytes) {
            // SAFETY: mapped just now, with this size, and known only here.
            unsafe { pages::touch(chunk, self.chunk_bytes) };
            // Release: pairs with the Acquire of `take`, so that the zeros come before the address.
            self.chunk.store(chunk.as_ptr(), Ordering::Release);
        }
    }

    fn take(&self) -> Option<NonNull<u8>> {
        // Acquire: pairs with the Release of `fill`.
        NonNull::new(self.chunk.swap(ptr::null_mut(), Ordering::Acquire))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(chunk) = self.take() {
            // SAFETY: mapped in `fill` with this size, and never taken.
            unsafe { pages::unmap(chunk.as_ptr(), self.chunk_bytes) };
        }
    }
}

// Under miri and loom there is no thread that would answer.
#[cfg(all(test, not(miri), not(kvrouted_loom)))]
mod tests {
    use super::*;

    const CHUNK_BYTES: usize = 2 << 20;

    #[test]
    fn a_chunk_is_handed_over_once_and_another_is_asked_for() {
        start();
        let mut next = PrefaultedChunk::new(CHUNK_BYTES);
        assert!(next.take().is_none(), "no chunk was asked for");
        for _ in 0..3 {
            next.ask();
            next.ask();
            let chunk = loop {
                match next.slot.take() {
                    Some(chunk) => break chunk,
                    None => std::thread::yield_now(),
                }
            };
            assert!(next.take().is_none(), "it was asked for once");
            assert_eq!((chunk.as_ptr() as usize) % CHUNK_BYTES, 0);
            // SAFETY: a mapping of that size, which is this test's now.
            unsafe {
                assert!(std::slice::from_raw_parts(chunk.as_ptr(), CHUNK_BYTES).iter().all(|byte| *byte == 0));
                pages::unmap(chunk.as_ptr(), CHUNK_BYTES);
            }
        }
    }

    #[test]
    fn an_untaken_chunk_goes_with_the_writer_or_with_the_request() {
        start();
        for _ in 0..20 {
            let mut next = PrefaultedChunk::new(CHUNK_BYTES);
            next.ask();
            drop(next);
        }
        let mut last = PrefaultedChunk::new(CHUNK_BYTES);
        last.ask();
        // The thread answers requests in their order. It lets go of a slot after it has filled it.
        while last.bytes() == 0 || Arc::strong_count(&last.slot) > 1 {
            std::thread::yield_now();
        }
        assert_eq!(last.bytes(), CHUNK_BYTES);
    }
}
