//! How much the code allocates, and how much memory goes back to the system.
//!
//! A binary of its own, because a process has one allocator: this one counts.
#![cfg(feature = "daemon")]

mod deciding;
mod index_memory;
#[path = "../kit/mod.rs"]
mod kit;
mod serving;

use std::alloc::{GlobalAlloc, Layout};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use mimalloc::MiMalloc;

/// The daemon's allocator. It counts the requests of one thread.
struct Counting;

/// The thread whose requests are counted; 0 = no thread. Relaxed, as is the count: before a test reads the count of
/// another thread, it gets an answer from that thread, and sockets order that.
static COUNTED_THREAD: AtomicI32 = AtomicI32::new(0);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

impl Counting {
    fn count() {
        let counted = COUNTED_THREAD.load(Ordering::Relaxed);
        if counted != 0 && this_thread() == counted {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[expect(unsafe_code, reason = "an allocator is unsafe to make")]
// SAFETY: the daemon's allocator does everything.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::count();
        // SAFETY: the caller's promise is passed on.
        unsafe { MiMalloc.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Self::count();
        // SAFETY: as above.
        unsafe { MiMalloc.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { MiMalloc.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        Self::count();
        // SAFETY: as above.
        unsafe { MiMalloc.realloc(at, layout, bytes) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Held by a test while it counts.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The kernel's id of this thread.
fn this_thread() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

/// How often a thread asks for memory while `run` runs. The caller holds [`ONE_AT_A_TIME`].
fn allocations(thread: i32, run: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    COUNTED_THREAD.store(thread, Ordering::Relaxed);
    run();
    COUNTED_THREAD.store(0, Ordering::Relaxed);
    ALLOCATIONS.load(Ordering::Relaxed) - before
}
