//! The bytes of replies that are read whole, counted for the whole process: a renderer's, an engine's that prefills, and
//! what engines say about themselves. Each has a bound of its own, and together they have one too.

use std::sync::atomic::{AtomicU64, Ordering};

// Relaxed everywhere: a bound on memory, which guards no other memory.
static BYTES_MAX: AtomicU64 = AtomicU64::new(u64::MAX);
static HELD: AtomicU64 = AtomicU64::new(0);

/// Sets the bound of all replies.
pub(super) fn bound(bytes_max: u64) {
    BYTES_MAX.store(bytes_max, Ordering::Relaxed);
}

/// The bytes of all replies that are being read.
pub(super) fn held() -> u64 {
    HELD.load(Ordering::Relaxed)
}

/// The bytes of one reply, counted until this is dropped.
#[derive(Debug, Default)]
pub(crate) struct HeldReply(u64);

impl HeldReply {
    /// Counts more bytes; `false` = there is no room for them.
    pub(crate) fn grow(&mut self, bytes: usize) -> bool {
        let bytes = bytes as u64;
        let bytes_max = BYTES_MAX.load(Ordering::Relaxed);
        let fits = |held: u64| held.checked_add(bytes).filter(|held| *held <= bytes_max);
        let grown = HELD.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok();
        self.0 += if grown { bytes } else { 0 };
        grown
    }
}

impl Drop for HeldReply {
    fn drop(&mut self) {
        HELD.fetch_sub(self.0, Ordering::Relaxed);
    }
}
