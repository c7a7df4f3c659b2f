//! The writer's side: what waits for its grace period.

use super::stack::{Node, Stack};
use super::{GUARDS_MAX, Reclaimer};
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// A batch is handed over when it holds so many items.
pub(in crate::index) const BATCH_ITEMS: usize = 64;
/// A batch is handed over when it holds so much.
pub(in crate::index) const BATCH_BYTES: u64 = 1 << 20;

/// Items that are retired together.
#[derive(Debug)]
struct Batch<T> {
    items: Vec<T>,
    bytes: u64,
    /// Where it goes when it comes back; kept by the batch so that there is such a place.
    bin: Option<Arc<Bin<T>>>,
}

/// Where batches come back.
#[derive(Debug)]
struct Bin<T> {
    returned: Stack<Batch<T>>,
}

/// What a writer has unlinked and readers may still be looking at. Dropped, it leaves the rest to the reclaimer.
#[derive(Debug)]
pub(in crate::index) struct Garbage<T: Send + 'static> {
    reclaimer: Reclaimer,
    bin: Arc<Bin<T>>,
    items: Vec<T>,
    items_bytes: u64,
    waiting_bytes: u64,
    waiting_items: usize,
}

impl<T: Send + 'static> Garbage<T> {
    /// Nothing waits yet.
    pub(in crate::index) fn new(reclaimer: &Reclaimer) -> Self {
        Self {
            reclaimer: reclaimer.clone(),
            bin: Arc::new(Bin { returned: Stack::new() }),
            items: Vec::new(),
            items_bytes: 0,
            waiting_bytes: 0,
            waiting_items: 0,
        }
    }

    /// Takes something that no reader who enters from now on can reach. `bytes` is what it keeps from being used.
    pub(in crate::index) fn push(&mut self, item: T, bytes: u64) {
        if self.items.capacity() == 0 {
            self.items.reserve(BATCH_ITEMS);
        }
        self.items.push(item);
        self.items_bytes += bytes;
        self.waiting_bytes += bytes;
        self.waiting_items += 1;
    }

    /// Hands over what was pushed, if it is enough for a batch.
    pub(in crate::index) fn flush(&mut self) {
        if self.items.len() >= BATCH_ITEMS || self.items_bytes >= BATCH_BYTES {
            self.flush_now();
        }
    }

    /// Hands over what was pushed: its grace period begins.
    pub(in crate::index) fn flush_now(&mut self) {
        if self.items.is_empty() {
            return;
        }
        let (items, bytes) = (std::mem::take(&mut self.items), std::mem::take(&mut self.items_bytes));
        let batch = Batch { items, bytes, bin: Some(Arc::clone(&self.bin)) };
        let node = Box::into_raw(Box::new(Node::new(batch)));
        let collector = &self.reclaimer.collector;
        // SAFETY: the node is this call's alone and stays valid until `passed` gets it, once. Its items are out of
        // the reach of readers who enter from now on, by the contract of `push`; they may have come from another
        // thread and go to another, which `T: Send` allows.
        unsafe { collector.retire(node, passed::<T>) };
        for _ in 1..GUARDS_MAX {
            // SAFETY: nothing is done with the pointer.
            unsafe { collector.retire(NonNull::<u8>::dangling().as_ptr(), nothing) };
        }
    }

    /// Gives back everything that has passed its grace period.
    pub(in crate::index) fn collect(&mut self, mut give: impl FnMut(T)) {
        for batch in self.bin.returned.take() {
            self.waiting_bytes -= batch.bytes;
            self.waiting_items -= batch.items.len();
            batch.items.into_iter().for_each(&mut give);
        }
        self.reclaimer.orphans.free();
    }

    /// What was pushed and has not been given back, in bytes.
    pub(in crate::index) fn waiting_bytes(&self) -> u64 {
        self.waiting_bytes
    }

    /// How many things were pushed and have not been given back.
    #[cfg(test)]
    pub(in crate::index) fn waiting_items(&self) -> usize {
        self.waiting_items
    }
}

impl<T: Send + 'static> Drop for Garbage<T> {
    fn drop(&mut self) {
        self.flush_now();
        // This writer and nobody else: everything has come back, and goes with the writer.
        if Arc::strong_count(&self.bin) > 1 {
            self.reclaimer.orphans.adopt(Arc::clone(&self.bin) as Arc<dyn std::any::Any + Send + Sync>);
        }
    }
}

/// Called once for every batch, on any thread, when its grace period has passed.
///
/// # Safety
///
/// `node` came from `Box::into_raw` and is given to this call.
unsafe fn passed<T>(node: *mut Node<Batch<T>>, _: &seize::Collector) {
    // SAFETY: by the promise above nobody else has the node.
    let bin = unsafe { &mut (*ptr::addr_of_mut!((*node).value)).bin }.take();
    if let Some(bin) = bin {
        // SAFETY: as above; it is the stack's from here on.
        unsafe { bin.returned.push(node) };
        // Where the writer is gone, the reclaimer has the bin too, so that nothing is freed here.
        drop(bin);
    }
}

/// Fills a batch of `seize`.
///
/// # Safety
///
/// None needed: the pointer is not used.
unsafe fn nothing(_: *mut u8, _: &seize::Collector) {}
