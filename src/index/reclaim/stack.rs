//! A lock-free stack: anybody pushes a node, one takes them all.
//!
//! | tag  | who pushes                        | who takes                          |
//! |------|-----------------------------------|------------------------------------|
//! | PUSH | Release exchange of the head      | Acquire exchange of the head for null |
//!
//! Nodes are taken all at once and never one by one, so a head that is compared equal is the head: there is no ABA.

use crate::index::sync::{AtomicPtr, Ordering};
use std::marker::PhantomData;
use std::ptr;

/// A value that can be on a stack.
#[derive(Debug)]
pub(in crate::index) struct Node<T> {
    below: *mut Node<T>,
    pub(in crate::index) value: T,
}

impl<T> Node<T> {
    pub(in crate::index) fn new(value: T) -> Self {
        Self { below: ptr::null_mut(), value }
    }
}

/// The stack. It owns what is on it.
#[derive(Debug)]
pub(in crate::index) struct Stack<T> {
    head: AtomicPtr<Node<T>>,
    owned: PhantomData<*mut Node<T>>,
}

// SAFETY: nodes go from thread to thread by value, so a value that may do so is enough for both.
unsafe impl<T: Send> Send for Stack<T> {}
// SAFETY: as above; no reference to a value on the stack is given out.
unsafe impl<T: Send> Sync for Stack<T> {}

impl<T> Stack<T> {
    pub(in crate::index) fn new() -> Self {
        Self { head: AtomicPtr::new(ptr::null_mut()), owned: PhantomData }
    }

    /// Puts a node on top. Neither allocates nor frees.
    ///
    /// # Safety
    ///
    /// `node` came from `Box::into_raw` and is the caller's alone; it is the stack's from now on.
    pub(in crate::index) unsafe fn push(&self, node: *mut Node<T>) {
        // Relaxed: what is below is not looked at, only remembered.
        let mut below = self.head.load(Ordering::Relaxed);
        loop {
            // SAFETY: the node is the caller's alone until the exchange succeeds.
            unsafe { (*node).below = below };
            // PUSH: pairs with the exchange in `take`. Nodes that others pushed below are handed on with it: an
            // exchange continues the release sequence of those before. Relaxed on failure: as above.
            match self.head.compare_exchange_weak(below, node, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(found) => below = found,
            }
        }
    }

    /// Takes all nodes, the last pushed first.
    pub(in crate::index) fn take(&self) -> Taken<T> {
        // Relaxed: nothing is looked at; what is pushed at this moment is there the next time.
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

/// What was taken from a stack; drops what is not asked for.
pub(in crate::index) struct Taken<T> {
    top: *mut Node<T>,
}

impl<T> Iterator for Taken<T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        if self.top.is_null() {
            return None;
        }
        // SAFETY: it came from `Box::into_raw` by the promise of `push`, and was taken off the stack by this alone.
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
