//! The atomics of what readers share with the writer: the standard ones, or under the model checker
//! (`--cfg kvrouted_loom`, tests only) those that try every order of accesses.

#[cfg(not(all(test, kvrouted_loom)))]
mod chosen {
    pub(in crate::load) use std::hint::spin_loop as spin;
    pub(in crate::load) use std::sync::atomic::{AtomicU64, fence};
}

#[cfg(all(test, kvrouted_loom))]
mod chosen {
    pub(in crate::load) use ::loom::sync::atomic::{AtomicU64, fence};
    /// To wait is to let another thread of the model go on.
    pub(in crate::load) use ::loom::thread::yield_now as spin;
}

pub(super) use chosen::{AtomicU64, fence, spin};
pub(super) use std::sync::atomic::Ordering;
