//! The atomics of what threads share: the standard ones, or under the model checker (`--cfg kvrouted_loom`, tests only)
//! those that try every order of accesses.

#[cfg(not(all(test, kvrouted_loom)))]
mod chosen {
    pub(crate) use std::hint::spin_loop as spin;
    pub(crate) use std::sync::Arc;
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, fence};
}

#[cfg(all(test, kvrouted_loom))]
mod chosen {
    pub(crate) use ::loom::sync::Arc;
    pub(crate) use ::loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, fence};
    /// To wait is to let another thread of the model go on.
    pub(crate) use ::loom::thread::yield_now as spin;
}

pub(crate) use chosen::{Arc, AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, fence, spin};
pub(crate) use std::sync::atomic::Ordering;
