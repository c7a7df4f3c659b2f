//! Memory reclamation: when memory that readers may still look at can be used again.
//!
//! A reader enters ([`Reader::enter`]) before it loads anything and leaves when it has its answer. The writer unlinks
//! something, pushes it onto its [`Garbage`] and flushes. It gets the thing back ([`Garbage::collect`]) once every
//! reader that was inside at the flush has left: the **grace period**. `seize` tracks the readers; this module decides
//! what is retired, and brings it back to the writer's own thread.
//!
//! # How seize 0.5 behaves, as read in its source
//!
//! * To enter is a plain store and a compiler fence where the kernel has `membarrier` (Linux), a SeqCst store
//!   elsewhere; to leave is one atomic swap. A thread that enters twice is inside until it has left twice.
//! * Entries that a thread retires gather in a batch of that thread. Once the batch holds `batch_size` entries (rounded
//!   up to a power of two, 32 or the number of CPUs by default), each further entry tries to send it off. That takes
//!   one process-wide barrier (up to ~11 µs beside a running reader), then a walk over all threads that ever entered.
//!   Of these, each that is inside *now* takes one entry of the batch as its list node. A batch with fewer entries than
//!   threads inside stays where it is: nothing is freed until the same thread retires more. Nothing else tries again,
//!   and no call does so from outside without becoming a reader.
//! * Therefore a batch here is one real entry, a whole batch of ours, and padding entries up to [`GUARDS_MAX`], which
//!   is also the `batch_size`. Every flush is sent off at once, with one barrier, and leaves nothing behind in the
//!   thread, so the writer may move to another. With more than `GUARDS_MAX` threads inside at that moment, the batch
//!   waits for the next flush: late, never wrong.
//! * The last of those readers frees the batch on its own thread as it leaves, or the flush does if no reader was
//!   inside. So the callback does next to nothing there: it pushes the batch onto a lock-free stack from which the
//!   writer collects. It neither allocates nor frees while the writer lives.
//! * A reader that stays inside delays everything that is flushed meanwhile: [`Garbage::waiting_bytes`] grows, and the
//!   writer must stop in time.
//!
//! # After the writer is dropped
//!
//! The writer's `Garbage` and every batch in progress own the stack. A dropped `Garbage` flushes. If batches are still
//! in progress then, its stack becomes an **orphan**: the reclaimer owns it too, so that the reader that releases the
//! last batch frees nothing on its own thread. The next writer of the reclaimer that collects frees what has come back
//! to orphans; otherwise the last [`Reclaimer`] does. `seize` frees what is still in a thread's batch by then.
//!
//! # The stack
//!
//! | tag  | push                              | take                                  |
//! |------|-----------------------------------|---------------------------------------|
//! | PUSH | Release exchange of the head      | Acquire exchange of the head for null |
//!
//! All nodes are taken at once and never one by one, so a head that compares equal is the same head: there is no ABA.

#![expect(unsafe_code, reason = "seize takes raw pointers, and what comes back goes onto an intrusive stack")]

use crate::sync::{AtomicPtr, Ordering};
use seize::Guard as _;
use std::any::Any;
use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

/// Threads that can be inside at once without delaying what is freed.
const GUARDS_MAX: usize = 64;

/// Keeps memory that was taken out of an index until no lookup can be looking at it. Clones share it.
#[derive(Clone, Debug)]
pub struct Reclaimer {
    collector: Arc<seize::Collector>,
    orphans: Arc<Orphans>,
}

/// Stacks whose writer is gone and to which batches still come back. Only writers use this.
#[derive(Debug, Default)]
struct Orphans {
    stacks: Mutex<Vec<Arc<dyn Any + Send + Sync>>>,
    /// Whether there are any.
    any: AtomicBool,
}

impl Orphans {
    fn adopt(&self, stack: Arc<dyn Any + Send + Sync>) {
        self.stacks.lock().unwrap_or_else(PoisonError::into_inner).push(stack);
        // Relaxed: a thread that is late sees it the next time; the lock orders the rest.
        self.any.store(true, Ordering::Relaxed);
    }

    /// Frees the stacks to which all batches have come back.
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
    /// A new one, without readers.
    #[must_use]
    pub fn new() -> Self {
        Self { collector: Arc::new(seize::Collector::new().batch_size(GUARDS_MAX)), orphans: Arc::default() }
    }

    pub(super) fn reader(&self) -> Reader {
        Reader { reclaimer: self.clone() }
    }
}

impl Default for Reclaimer {
    fn default() -> Self {
        Self::new()
    }
}

/// A reader's handle.
#[derive(Clone, Debug)]
pub(super) struct Reader {
    reclaimer: Reclaimer,
}

impl Reader {
    /// Enters. Until the guard is dropped, garbage is not returned if it is pushed from now on, or was pushed but not
    /// yet flushed.
    #[inline]
    pub(super) fn enter(&self) -> Guard<'_> {
        Guard { guard: self.reclaimer.collector.enter() }
    }

    /// Whether this guard protects readers of this handle.
    #[inline]
    pub(super) fn is_inside(&self, guard: &Guard<'_>) -> bool {
        guard.is_of(&self.reclaimer)
    }
}

/// Proof that a reader is inside.
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

/// A batch is handed over when it holds this many items.
const BATCH_ITEMS: usize = 64;
/// A batch is handed over when it holds this many bytes.
const BATCH_BYTES: u64 = 1 << 20;

/// Items that are retired together.
#[derive(Debug)]
struct Batch<T> {
    items: Vec<T>,
    bytes: u64,
    /// Where the batch comes back; the batch keeps it alive.
    bin: Option<Arc<Bin<T>>>,
}

/// Where batches come back.
#[derive(Debug)]
struct Bin<T> {
    returned: Stack<Batch<T>>,
}

/// Memory that a writer has unlinked and readers may still look at. When dropped, it leaves the rest to the reclaimer.
#[derive(Debug)]
pub(super) struct Garbage<T: Send + 'static> {
    reclaimer: Reclaimer,
    bin: Arc<Bin<T>>,
    items: Vec<T>,
    items_bytes: u64,
    waiting_bytes: u64,
    waiting_items: usize,
}

impl<T: Send + 'static> Garbage<T> {
    pub(super) fn new(reclaimer: &Reclaimer) -> Self {
        Self {
            reclaimer: reclaimer.clone(),
            bin: Arc::new(Bin { returned: Stack::new() }),
            items: Vec::new(),
            items_bytes: 0,
            waiting_bytes: 0,
            waiting_items: 0,
        }
    }

    /// Adds an item that no reader can reach that enters from now on. `bytes` is the memory that it occupies.
    pub(super) fn push(&mut self, item: T, bytes: u64) {
        if self.items.capacity() == 0 {
            self.items.reserve(BATCH_ITEMS);
        }
        self.items.push(item);
        self.items_bytes += bytes;
        self.waiting_bytes += bytes;
        self.waiting_items += 1;
    }

    /// Hands over the pushed items, if they are enough for a batch.
    pub(super) fn flush(&mut self) {
        if self.items.len() >= BATCH_ITEMS || self.items_bytes >= BATCH_BYTES {
            self.flush_now();
        }
    }

    /// Hands over the pushed items: their grace period begins.
    pub(super) fn flush_now(&mut self) {
        if self.items.is_empty() {
            return;
        }
        let (items, bytes) = (std::mem::take(&mut self.items), std::mem::take(&mut self.items_bytes));
        let batch = Batch { items, bytes, bin: Some(Arc::clone(&self.bin)) };
        let node = Box::into_raw(Box::new(StackNode::new(batch)));
        let collector = &self.reclaimer.collector;
        // SAFETY: only this call has the node, which stays valid until `passed` gets it, once. Readers that enter from
        // now on cannot reach its items, by the contract of `push`; the items may have come from another thread and go
        // to another, which `T: Send` allows.
        unsafe { collector.retire(node, passed::<T>) };
        for _ in 1..GUARDS_MAX {
            // SAFETY: the pointer is never used.
            unsafe { collector.retire(NonNull::<u8>::dangling().as_ptr(), nothing) };
        }
    }

    /// Returns every item that has passed its grace period.
    pub(super) fn collect(&mut self, mut give: impl FnMut(T)) {
        for batch in self.bin.returned.take() {
            self.waiting_bytes -= batch.bytes;
            self.waiting_items -= batch.items.len();
            batch.items.into_iter().for_each(&mut give);
        }
        self.reclaimer.orphans.free();
    }

    /// Bytes that were pushed and have not been returned.
    pub(super) fn waiting_bytes(&self) -> u64 {
        self.waiting_bytes
    }

    /// Items that were pushed and have not been returned.
    #[cfg(test)]
    pub(super) fn waiting_items(&self) -> usize {
        self.waiting_items
    }
}

impl<T: Send + 'static> Drop for Garbage<T> {
    fn drop(&mut self) {
        self.flush_now();
        // If only this writer has the bin, everything has come back, and is freed with the writer.
        if Arc::strong_count(&self.bin) > 1 {
            self.reclaimer.orphans.adopt(Arc::clone(&self.bin) as Arc<dyn std::any::Any + Send + Sync>);
        }
    }
}

/// Called once for every batch, on any thread, when its grace period has passed.
///
/// # Safety
///
/// `node` came from `Box::into_raw` and belongs to this call.
unsafe fn passed<T>(node: *mut StackNode<Batch<T>>, _: &seize::Collector) {
    // SAFETY: by the promise above, no other thread has the node.
    let bin = unsafe { &mut (*ptr::addr_of_mut!((*node).value)).bin }.take();
    if let Some(bin) = bin {
        // SAFETY: as above; from here on it belongs to the stack.
        unsafe { bin.returned.push(node) };
        // If the writer is gone, the reclaimer has the bin too, so that nothing is freed here.
        drop(bin);
    }
}

/// Pads a batch of `seize`.
///
/// # Safety
///
/// None needed: the pointer is not used.
unsafe fn nothing(_: *mut u8, _: &seize::Collector) {}

/// A value that can be on a stack.
#[derive(Debug)]
pub(super) struct StackNode<T> {
    below: *mut StackNode<T>,
    pub(super) value: T,
}

impl<T> StackNode<T> {
    pub(super) fn new(value: T) -> Self {
        Self { below: ptr::null_mut(), value }
    }
}

/// A lock-free stack: any thread pushes a node, one takes them all. It owns its nodes.
#[derive(Debug)]
pub(super) struct Stack<T> {
    head: AtomicPtr<StackNode<T>>,
    owned: PhantomData<*mut StackNode<T>>,
}

// SAFETY: nodes go from thread to thread by value, so `T: Send` suffices for both.
unsafe impl<T: Send> Send for Stack<T> {}
// SAFETY: as above; no reference to a value on the stack is given out.
unsafe impl<T: Send> Sync for Stack<T> {}

impl<T> Stack<T> {
    pub(super) fn new() -> Self {
        Self { head: AtomicPtr::new(ptr::null_mut()), owned: PhantomData }
    }

    /// Puts a node on top. Neither allocates nor frees.
    ///
    /// # Safety
    ///
    /// `node` came from `Box::into_raw` and belongs to the caller alone; from now on it belongs to the stack.
    pub(super) unsafe fn push(&self, node: *mut StackNode<T>) {
        // Relaxed: the node below is not read, only stored.
        let mut below = self.head.load(Ordering::Relaxed);
        loop {
            // SAFETY: the node belongs to the caller alone until the exchange succeeds.
            unsafe { (*node).below = below };
            // PUSH: pairs with the exchange in `take`. It also publishes the nodes that others pushed below: an
            // exchange continues the release sequence of those before. Relaxed on failure: as above.
            match self.head.compare_exchange_weak(below, node, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(found) => below = found,
            }
        }
    }

    /// Takes all nodes, the last pushed first.
    pub(super) fn take(&self) -> Taken<T> {
        // Relaxed: no node is read; one that is pushed at this moment is taken the next time.
        if self.head.load(Ordering::Relaxed).is_null() {
            return Taken { top: ptr::null_mut() };
        }
        // PUSH: pairs with the exchanges in `push`.
        Taken { top: self.head.swap(ptr::null_mut(), Ordering::Acquire) }
    }
}

impl<T> Drop for Stack<T> {
    fn drop(&mut self) {
        drop(self.take());
    }
}

/// The nodes taken from a stack; drops those that are not iterated.
pub(super) struct Taken<T> {
    top: *mut StackNode<T>,
}

impl<T> Iterator for Taken<T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        if self.top.is_null() {
            return None;
        }
        // SAFETY: it came from `Box::into_raw` by the promise of `push`, and only this has taken it off the stack.
        let node = unsafe { Box::from_raw(self.top) };
        self.top = node.below;
        Some(node.value)
    }
}

impl<T> Drop for Taken<T> {
    fn drop(&mut self) {
        self.for_each(drop);
    }
}

#[cfg(all(test, not(kvrouted_loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::sync::{Barrier, mpsc};
    use std::thread;

    /// Counts how often it is dropped; the flag reveals a second drop of the same value.
    struct Counted {
        drops: Arc<AtomicUsize>,
        alive: Box<bool>,
    }

    impl Counted {
        fn new(drops: &Arc<AtomicUsize>) -> Self {
            Self { drops: Arc::clone(drops), alive: Box::new(true) }
        }
    }

    impl Drop for Counted {
        fn drop(&mut self) {
            assert!(std::mem::take(&mut *self.alive));
            // Relaxed: the counting thread has joined or dropped the thread that did this.
            self.drops.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn collected<T: Send + 'static>(garbage: &mut Garbage<T>) -> Vec<T> {
        let mut items = Vec::new();
        garbage.collect(|item| items.push(item));
        items
    }

    #[test]
    fn without_readers_everything_comes_back_at_once() {
        let mut garbage = Garbage::new(&Reclaimer::new());
        (0..10_u32).for_each(|item| garbage.push(item, 100));
        garbage.flush();
        assert_eq!((collected(&mut garbage), garbage.waiting_bytes()), (vec![], 1000));
        garbage.flush_now();
        assert_eq!(garbage.waiting_items(), 10);
        assert_eq!(collected(&mut garbage), (0..10).collect::<Vec<_>>());
        assert_eq!((garbage.waiting_bytes(), garbage.waiting_items()), (0, 0));
        garbage.flush_now();
        assert!(collected(&mut garbage).is_empty());
    }

    #[test]
    fn batches_are_flushed_by_items_or_bytes() {
        let mut garbage = Garbage::new(&Reclaimer::new());
        for item in 1..=BATCH_ITEMS {
            garbage.push(item, 1);
            garbage.flush();
            assert_eq!(collected(&mut garbage).len(), if item == BATCH_ITEMS { BATCH_ITEMS } else { 0 });
        }
        garbage.push(0, BATCH_BYTES);
        garbage.flush();
        assert_eq!(collected(&mut garbage), [0]);
    }

    #[test]
    fn a_guard_keeps_what_is_flushed_while_it_lives() {
        let reclaimer = Reclaimer::new();
        let mut garbage = Garbage::new(&reclaimer);
        let reader = reclaimer.reader();
        let (outer, inner) = (reader.enter(), reader.enter());
        assert!(outer.is_of(&reclaimer) && !outer.is_of(&Reclaimer::new()));
        for item in 0..3 {
            garbage.push(item, 8);
            garbage.flush_now();
        }
        assert!(collected(&mut garbage).is_empty());
        drop(outer);
        assert!(collected(&mut garbage).is_empty(), "the same thread is inside twice");
        drop(inner);
        let mut items = collected(&mut garbage);
        items.sort_unstable();
        assert_eq!(items, [0, 1, 2]);
    }

    #[test]
    fn a_guard_of_another_thread_counts_and_one_entered_later_does_not() {
        let reclaimer = Reclaimer::new();
        let mut garbage = Garbage::new(&reclaimer);
        let (leave, left) = (Barrier::new(2), Barrier::new(2));
        let entered = Barrier::new(2);
        thread::scope(|scope| {
            scope.spawn(|| {
                let reader = reclaimer.reader();
                let guard = reader.enter();
                entered.wait();
                leave.wait();
                drop(guard);
                left.wait();
            });
            entered.wait();
            garbage.push('a', 1);
            garbage.flush_now();
            assert!(collected(&mut garbage).is_empty());
            let reader = reclaimer.reader();
            let late = reader.enter();
            leave.wait();
            left.wait();
            assert_eq!(collected(&mut garbage), ['a'], "a reader that enters after the flush does not delay it");
            drop(late);
        });
    }

    /// `threads` threads are inside while one item is flushed; returns whether it comes back when they have left.
    fn comes_back_beside(threads: usize) -> bool {
        let reclaimer = Reclaimer::new();
        let mut garbage = Garbage::new(&reclaimer);
        let (entered, leave) = (Barrier::new(threads + 1), Barrier::new(threads + 1));
        thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    let reader = reclaimer.reader();
                    let guard = reader.enter();
                    entered.wait();
                    leave.wait();
                    drop(guard);
                });
            }
            entered.wait();
            garbage.push(1, 1);
            garbage.flush_now();
            assert!(collected(&mut garbage).is_empty());
            leave.wait();
        });
        let first = collected(&mut garbage).len() == 1;
        garbage.push(2, 1);
        garbage.flush_now();
        assert_eq!(collected(&mut garbage).len(), if first { 1 } else { 2 }, "the next flush takes the rest along");
        assert_eq!(garbage.waiting_bytes(), 0);
        first
    }

    #[test]
    fn one_item_comes_back_beside_as_many_guards_as_are_allowed() {
        assert!(comes_back_beside(GUARDS_MAX));
        assert!(!comes_back_beside(GUARDS_MAX + 1), "more are allowed than the docs say");
    }

    #[test]
    fn a_writer_may_be_dropped_before_its_readers() {
        let drops = Arc::new(AtomicUsize::new(0));
        let reclaimer = Reclaimer::new();
        let reader = reclaimer.reader();
        let guard = reader.enter();
        let mut garbage = Garbage::new(&reclaimer);
        for _ in 0..100 {
            garbage.push(Counted::new(&drops), 1);
            garbage.flush();
        }
        drop((garbage, reclaimer));
        // Relaxed, here and below: one thread.
        assert_eq!(drops.load(Ordering::Relaxed), 0);
        drop(guard);
        drop(reader);
        assert_eq!(drops.load(Ordering::Relaxed), 100);
    }

    #[test]
    fn a_reader_that_leaves_last_frees_nothing_of_a_writer_that_is_gone() {
        let drops = Arc::new(AtomicUsize::new(0));
        let reclaimer = Reclaimer::new();
        let reader = reclaimer.reader();
        let guard = reader.enter();
        let mut garbage = Garbage::new(&reclaimer);
        for _ in 0..200 {
            garbage.push(Counted::new(&drops), 1);
            garbage.flush();
        }
        drop(garbage);
        let mut next: Garbage<u8> = Garbage::new(&reclaimer);
        next.collect(drop);
        drop(guard);
        // Relaxed, here and below: one thread.
        assert_eq!(drops.load(Ordering::Relaxed), 0, "freed where a reader left");
        // The next writer frees it.
        next.collect(drop);
        assert_eq!(drops.load(Ordering::Relaxed), 200);
        assert!(!reclaimer.orphans.any.load(Ordering::Relaxed));
    }

    #[test]
    fn readers_may_be_dropped_before_their_writer() {
        let drops = Arc::new(AtomicUsize::new(0));
        let mut garbage = {
            let reclaimer = Reclaimer::new();
            let reader = reclaimer.reader();
            drop(reader.enter());
            Garbage::new(&reclaimer)
        };
        (0..70).for_each(|_| garbage.push(Counted::new(&drops), 1));
        garbage.flush();
        garbage.push(Counted::new(&drops), 1);
        drop(garbage);
        // Relaxed: one thread.
        assert_eq!(drops.load(Ordering::Relaxed), 71);
    }

    #[test]
    fn readers_never_see_reclaimed_memory() {
        const ROUNDS: usize = 3_000;
        let drops = Arc::new(AtomicUsize::new(0));
        let reclaimer = Reclaimer::new();
        /// Owns what readers may still look at; frees it whenever it is dropped.
        struct Retired {
            address: usize,
            _counted: Counted,
        }
        impl Drop for Retired {
            fn drop(&mut self) {
                let old = std::ptr::with_exposed_provenance_mut::<AtomicUsize>(self.address);
                // SAFETY: it has passed its grace period, or no reader is left. Relaxed: no reader looks at it, and one
                // that did would fail.
                unsafe { (*old).store(usize::MAX, Ordering::Relaxed) };
                // SAFETY: as above; it came from `Box::into_raw`, and comes back once.
                drop(unsafe { Box::from_raw(old) });
            }
        }
        let boxed = |value: usize| Box::into_raw(Box::new(AtomicUsize::new(value)));
        let current = std::sync::atomic::AtomicPtr::new(boxed(0));
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let reader = reclaimer.reader();
                    let mut last = 0;
                    // Relaxed: only ends the loop.
                    while !done.load(Ordering::Relaxed) {
                        let _guard = reader.enter();
                        // SeqCst: as the loads of the index; pairs with the exchange below.
                        let value = current.load(Ordering::SeqCst);
                        for _ in 0..20 {
                            // SAFETY: loaded under the guard, and freed only after its grace period. Relaxed: a probe.
                            let seen = unsafe { &*value }.load(Ordering::Relaxed);
                            assert!(seen != usize::MAX && seen >= last);
                            last = seen;
                        }
                    }
                });
            }
            let mut garbage: Garbage<Retired> = Garbage::new(&reclaimer);
            for round in 1..=ROUNDS {
                // AcqRel: pairs with the readers' load.
                let old = current.swap(boxed(round), Ordering::AcqRel);
                garbage.push(Retired { address: old as usize, _counted: Counted::new(&drops) }, 8);
                garbage.flush();
                garbage.collect(drop);
            }
            // Relaxed: only ends the loops.
            done.store(true, Ordering::Relaxed);
        });
        drop(reclaimer);
        // The last one was never retired. Relaxed: one thread.
        drop(Retired { address: current.load(Ordering::Relaxed) as usize, _counted: Counted::new(&drops) });
        assert_eq!(drops.load(Ordering::Relaxed), ROUNDS + 1);
    }

    #[test]
    fn a_stack_loses_and_doubles_nothing() {
        let stack = Stack::new();
        let (send, receive) = mpsc::channel::<()>();
        thread::scope(|scope| {
            for pusher in 0..4_u32 {
                let (stack, send) = (&stack, send.clone());
                scope.spawn(move || {
                    for item in 0..2_000 {
                        let node = Box::into_raw(Box::new(StackNode::new(pusher << 16 | item)));
                        // SAFETY: fresh from `Box::into_raw`.
                        unsafe { stack.push(node) };
                    }
                    drop(send);
                });
            }
            drop(send);
            let mut seen = std::collections::BTreeSet::new();
            let mut is_over = false;
            while !is_over {
                is_over = matches!(receive.try_recv(), Err(mpsc::TryRecvError::Disconnected));
                stack.take().for_each(|item| assert!(seen.insert(item)));
            }
            assert_eq!(seen.len(), 8_000);
        });
        // SAFETY: fresh from `Box::into_raw`; dropped with the stack.
        unsafe { stack.push(Box::into_raw(Box::new(StackNode::new(1)))) };
    }
}
