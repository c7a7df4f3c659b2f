//! A bounded queue to one consumer thread, which gives the items back so that their buffers are used again.
//!
//! Producers never wait: an item that finds no room is refused. Once as many items circulate as may wait, and their
//! buffers have grown to the usual size, neither side allocates.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Thread;

use crossbeam::queue::ArrayQueue;

/// An item that owns buffers.
pub(crate) trait Recycle: Default {
    /// How much the item counts towards the queue's weight limit.
    fn weight(&self) -> usize;

    /// Empties the buffers. They keep a bounded capacity.
    fn clear(&mut self);
}

/// When a push wakes the consumer, which costs the producer a system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    /// For each item.
    EachItem,
    /// When half of the places are taken. As a rule the consumer polls.
    HalfFull,
}

/// What bounds a queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueBounds {
    pub(crate) items_max: usize,
    /// The sum of the waiting items' weights.
    pub(crate) weight_max: usize,
}

/// Any thread may push; one thread pops and recycles.
#[derive(Debug)]
pub(crate) struct RecyclingQueue<T> {
    waiting: ArrayQueue<T>,
    spent: ArrayQueue<T>,
    /// The weight of the waiting items. Relaxed everywhere: it bounds memory, and orders nothing.
    weight: AtomicUsize,
    weight_max: usize,
    wake: Wake,
    consumer: OnceLock<Thread>,
}

impl<T: Recycle> RecyclingQueue<T> {
    pub(crate) fn new(QueueBounds { items_max, weight_max }: QueueBounds, wake: Wake) -> Self {
        let queue = || ArrayQueue::new(items_max.max(1));
        let (weight, consumer) = (AtomicUsize::new(0), OnceLock::new());
        Self { waiting: queue(), spent: queue(), weight, weight_max, wake, consumer }
    }

    /// Sets the thread that pushes wake from now on.
    pub(crate) fn set_consumer(&self, consumer: Thread) {
        if self.consumer.set(consumer).is_err() {
            tracing::warn!(remedy = "report it", "a queue got a second consumer; it goes on waking the first");
        }
    }

    /// Queues an item that `fill` writes into recycled buffers; `false` if there is no room for it. The item must have
    /// this weight afterwards.
    #[must_use]
    pub(crate) fn push(&self, weight: usize, fill: impl FnOnce(&mut T)) -> bool {
        let before = self.weight.fetch_add(weight, Ordering::Relaxed);
        if before + weight > self.weight_max || self.waiting.is_full() {
            self.weight.fetch_sub(weight, Ordering::Relaxed);
            return false;
        }
        let mut item = self.spent.pop().unwrap_or_default();
        fill(&mut item);
        if let Err(refused) = self.waiting.push(item) {
            self.recycle(refused);
            return false;
        }
        let wakes = match self.wake {
            Wake::EachItem => true,
            Wake::HalfFull => self.waiting.len() == self.waiting.capacity().div_ceil(2),
        };
        if wakes && let Some(consumer) = self.consumer.get() {
            consumer.unpark();
        }
        true
    }

    /// The weight of the items that wait or are being consumed.
    pub(crate) fn weight(&self) -> usize {
        self.weight.load(Ordering::Relaxed)
    }

    /// The item that has waited longest. Pass it to [`recycle`](Self::recycle) afterwards.
    #[must_use]
    pub(crate) fn pop(&self) -> Option<T> {
        self.waiting.pop()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Takes a popped item back, so that its buffers are used again. It has the weight that it was pushed with.
    pub(crate) fn recycle(&self, mut item: T) {
        self.weight.fetch_sub(item.weight(), Ordering::Relaxed);
        item.clear();
        // An item without a place is freed.
        drop(self.spent.push(item));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Recycle for Vec<u8> {
        fn weight(&self) -> usize {
            self.len()
        }

        fn clear(&mut self) {
            self.clear();
        }
    }

    fn queue(items_max: usize, weight_max: usize) -> RecyclingQueue<Vec<u8>> {
        RecyclingQueue::new(QueueBounds { items_max, weight_max }, Wake::EachItem)
    }

    fn push(queue: &RecyclingQueue<Vec<u8>>, bytes: &[u8]) -> bool {
        queue.push(bytes.len(), |item| item.extend_from_slice(bytes))
    }

    #[test]
    fn items_leave_in_their_order_and_their_buffers_come_back_empty() {
        let queue = queue(2, 100);
        assert!(push(&queue, b"first") && push(&queue, b"second") && !push(&queue, b"third"));
        let first = queue.pop().unwrap();
        assert_eq!(first, b"first");
        let buffer = first.as_ptr();
        queue.recycle(first);
        assert!(push(&queue, b"4"));
        assert_eq!(queue.pop().unwrap(), b"second");
        let last = queue.pop().unwrap();
        assert_eq!((last.as_slice(), last.as_ptr()), (&b"4"[..], buffer));
        assert!(queue.is_empty());
    }

    #[test]
    fn an_item_over_the_weight_limit_is_refused_until_others_are_recycled() {
        let queue = queue(8, 10);
        assert!(push(&queue, b"1234567") && !push(&queue, b"4567") && push(&queue, b"456"));
        let popped = queue.pop().unwrap();
        assert!(!push(&queue, b"4567"), "a popped item counts until it is recycled");
        queue.recycle(popped);
        assert!(push(&queue, b"4567"));
    }
}
