//! Prefaulting: a thread of its own maps and touches a chunk of memory before a writer needs it.
//!
//! The kernel finds and zeroes 2 MiB when a huge page is touched first. That takes 0.1 ms on a quiet machine, and 3 to
//! 12 ms were measured on a virtual machine whose host had not backed the memory yet. All events of a shard would wait
//! for it. So a writer asks for a chunk while it fills its present one.
//!
//! There is one spare chunk for all shards of the process, so that memory that no block uses yet does not grow with
//! their number. A writer that finds it taken, or not ready, maps its chunk itself.

#![expect(unsafe_code, reason = "memory is handed from thread to thread as a pointer")]

use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};

use super::pages;
use crate::sandbox::{self, ThreadKind};
use crate::watchdog::{Activity, ThreadMark};

/// Bytes of a chunk.
pub(super) const CHUNK_BYTES: usize = pages::HUGE_PAGE_BYTES;

/// The thread. Unset where there is none: writers then map what they need.
static THREAD: OnceLock<Prefaulter> = OnceLock::new();

/// The mark of the thread, if it runs.
pub(super) fn mark() -> Option<Arc<ThreadMark>> {
    THREAD.get().map(|thread| Arc::clone(&thread.mark))
}

/// Starts the thread, once for the process. It inherits the processors of the caller, so no pinned thread calls this.
pub(super) fn start() {
    if cfg!(any(miri, kvrouted_loom)) || THREAD.get().is_some() {
        return;
    }
    if let Some(thread) = Prefaulter::start() {
        // A second caller at the same time drops its own, and that thread ends.
        let _ = THREAD.set(thread);
    }
}

/// Asks for a spare chunk, unless there is one.
#[inline]
pub(super) fn ask() {
    if let Some(thread) = THREAD.get() {
        thread.ask();
    }
}

/// A mapping of [`CHUNK_BYTES`] in huge pages, all zero and aligned to its size, that belongs to the caller: the spare
/// chunk, or one whose pages are not touched yet. `None` = the system has no memory.
pub(super) fn chunk() -> Option<NonNull<u8>> {
    THREAD.get().and_then(Prefaulter::take).or_else(|| pages::map_huge(CHUNK_BYTES))
}

/// What writers share with the thread.
struct Prefaulter {
    spare: Arc<Spare>,
    requests: Sender<()>,
    mark: Arc<ThreadMark>,
}

impl Prefaulter {
    /// `None` if the system has no thread for it. Writers then touch their memory themselves: later, not wrong.
    fn start() -> Option<Self> {
        let (requests, asked) = channel::<()>();
        let (spare, mark) = (Arc::new(Spare::default()), Arc::new(ThreadMark::new("index-pages", false)));
        let run = {
            let (spare, mark) = (Arc::clone(&spare), Arc::clone(&mark));
            move || {
                sandbox::enter(ThreadKind::IndexPages);
                // It ends when the sender goes.
                for () in asked {
                    mark.begin_round(Activity::MappingMemory);
                    spare.fill();
                    mark.wait();
                }
            }
        };
        std::thread::Builder::new().name("index-pages".to_owned()).spawn(run).ok()?;
        Some(Self { spare, requests, mark })
    }

    #[inline]
    fn ask(&self) {
        if self.spare.is_wanted() {
            self.send();
        }
    }

    #[cold]
    fn send(&self) {
        // Relaxed: the swap alone decides which of several that ask at once sends. Nothing else is passed by it.
        if !self.spare.is_asked.swap(true, Ordering::Relaxed) {
            // The thread ends with the process only.
            let _ = self.requests.send(());
        }
    }

    fn take(&self) -> Option<NonNull<u8>> {
        let chunk = self.spare.take();
        // Afterwards, or a request made in between could be answered by the chunk that goes here, and no writer would ask
        // again. Release: pairs with the Acquire in `is_wanted`. Who reads `false` there sees that the chunk is gone.
        self.spare.is_asked.store(false, Ordering::Release);
        chunk
    }
}

/// Room for one chunk between the thread and the writers.
#[derive(Debug, Default)]
struct Spare {
    /// Null, or a mapping that belongs to this.
    chunk: AtomicPtr<u8>,
    /// Whether a chunk was asked for since the last one was taken.
    is_asked: AtomicBool,
}

impl Spare {
    /// Whether there is no chunk and none was asked for.
    #[inline]
    fn is_wanted(&self) -> bool {
        // Acquire: pairs with the Release in `Prefaulter::take`. Relaxed: a chunk that came meanwhile is seen by `fill`.
        !self.is_asked.load(Ordering::Acquire) && self.chunk.load(Ordering::Relaxed).is_null()
    }

    /// Maps and touches a chunk, unless there is one.
    fn fill(&self) {
        // Relaxed: only this thread makes it anything but null.
        if !self.chunk.load(Ordering::Relaxed).is_null() {
            return;
        }
        if let Some(chunk) = pages::map_huge(CHUNK_BYTES) {
            // SAFETY: mapped just now, with this size, and known only here.
            unsafe { pages::touch(chunk, CHUNK_BYTES) };
            // Release: pairs with the Acquire of `take`, so that the zeros come before the address.
            self.chunk.store(chunk.as_ptr(), Ordering::Release);
        }
    }

    fn take(&self) -> Option<NonNull<u8>> {
        // Acquire: pairs with the Release of `fill`.
        NonNull::new(self.chunk.swap(ptr::null_mut(), Ordering::Acquire))
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        if let Some(chunk) = self.take() {
            // SAFETY: mapped in `fill` with this size, and never taken.
            unsafe { pages::unmap(chunk.as_ptr(), CHUNK_BYTES) };
        }
    }
}

// Under miri and loom there is no thread that would answer.
#[cfg(all(test, not(miri), not(kvrouted_loom)))]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn wait_for(mut found: impl FnMut() -> Option<NonNull<u8>>) -> NonNull<u8> {
        loop {
            match found() {
                Some(chunk) => return chunk,
                None => std::thread::yield_now(),
            }
        }
    }

    fn unmap(chunk: NonNull<u8>) {
        // SAFETY: a whole mapping of that size, which is this test's.
        unsafe { pages::unmap(chunk.as_ptr(), CHUNK_BYTES) };
    }

    #[test]
    fn a_chunk_is_handed_over_once_and_another_is_asked_for() {
        let thread = Prefaulter::start().expect("a thread");
        assert!(thread.take().is_none(), "no chunk was asked for");
        for _ in 0..3 {
            thread.ask();
            thread.ask();
            let chunk = wait_for(|| thread.spare.take());
            assert!(thread.take().is_none(), "it was asked for once");
            assert_eq!((chunk.as_ptr() as usize) % CHUNK_BYTES, 0);
            // SAFETY: a mapping of that size, which is this test's now.
            let bytes = unsafe { std::slice::from_raw_parts(chunk.as_ptr(), CHUNK_BYTES) };
            assert!(bytes.iter().all(|byte| *byte == 0));
            unmap(chunk);
        }
    }

    #[test]
    fn a_chunk_that_one_writer_takes_is_asked_for_again_by_the_other() {
        let thread = Prefaulter::start().expect("a thread");
        let takes = || {
            let taken = |_| {
                wait_for(|| {
                    thread.ask();
                    thread.take()
                })
            };
            (0..8).map(taken).map(|chunk| chunk.addr()).collect::<Vec<_>>()
        };
        let taken = std::thread::scope(|scope| {
            let writers = [scope.spawn(takes), scope.spawn(takes)];
            writers.map(|writer| writer.join().expect("it ends"))
        });
        let taken: Vec<_> = taken.concat();
        assert_eq!(taken.iter().collect::<BTreeSet<_>>().len(), taken.len(), "each chunk has one owner");
        for chunk in taken {
            unmap(NonNull::without_provenance(chunk));
        }
    }

    #[test]
    fn an_untaken_chunk_goes_with_the_thread() {
        let thread = Prefaulter::start().expect("a thread");
        thread.ask();
        while thread.spare.chunk.load(Ordering::Relaxed).is_null() {
            std::thread::yield_now();
        }
        let spare = Arc::downgrade(&thread.spare);
        drop(thread);
        while spare.strong_count() > 0 {
            std::thread::yield_now();
        }
    }
}
