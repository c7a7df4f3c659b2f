//! The memory of the HTTP port: what bodies, replies and selections may take, and what they take.

use std::sync::Arc;

use tokio::sync::Semaphore;

use crate::budget::Gauge;
use crate::limits::{
    HTTP_BODIES_BYTES_MAX, HTTP_BODY_SMALL_BYTES, HTTP_BODY_SMALL_BYTES_MIN, HTTP_BYTES_MAX, HTTP_REPLIES_BYTES_MAX,
    HTTP_SELECTIONS_BYTES_MAX,
};

/// The bytes of one permit.
pub(super) const PERMIT_BYTES: usize = 1024;

/// Bytes in permits, which are given back when their owners are dropped.
#[derive(Clone, Debug)]
pub(super) struct Permits {
    pub(super) free: Arc<Semaphore>,
    all: usize,
}

impl Permits {
    fn of(bytes: u64) -> Self {
        let all = (bytes as usize / PERMIT_BYTES).clamp(1, Semaphore::MAX_PERMITS);
        Self { free: Arc::new(Semaphore::new(all)), all }
    }

    /// All bytes.
    pub(super) const fn bytes_max(&self) -> usize {
        self.all * PERMIT_BYTES
    }

    fn used(&self) -> u64 {
        ((self.all - self.free.available_permits().min(self.all)) * PERMIT_BYTES) as u64
    }
}

/// The memory of one HTTP port.
#[derive(Clone, Debug)]
pub(crate) struct HttpMemory {
    pub(super) bodies: Permits,
    /// Bytes of each body that need no permit. The number of connections bounds them.
    pub(super) body_small_bytes: usize,
    /// What bodies take without a permit.
    pub(super) small_bodies: Gauge,
    pub(super) replies: Permits,
    pub(super) selections_bytes_max: usize,
    pub(super) selections: Gauge,
}

impl Default for HttpMemory {
    /// The bounds of the implementation alone.
    fn default() -> Self {
        Self::of(u64::MAX, 0)
    }
}

impl HttpMemory {
    /// Divides `bytes_max` in proportion to the bounds of the implementation. A single body of `body_bytes_max` always
    /// fits.
    pub(crate) fn of(bytes_max: u64, body_bytes_max: u64) -> Self {
        let part = |bytes: u64| {
            (u128::from(bytes) * u128::from(bytes_max.min(HTTP_BYTES_MAX)) / u128::from(HTTP_BYTES_MAX)) as u64
        };
        let selections_bytes_max = part(HTTP_SELECTIONS_BYTES_MAX as u64) as usize;
        Self {
            bodies: Permits::of(part(HTTP_BODIES_BYTES_MAX).max(body_bytes_max)),
            body_small_bytes: (part(HTTP_BODY_SMALL_BYTES as u64) as usize).max(HTTP_BODY_SMALL_BYTES_MIN),
            small_bodies: Gauge::default(),
            replies: Permits::of(part(HTTP_REPLIES_BYTES_MAX as u64)),
            selections_bytes_max,
            selections: Gauge::default(),
        }
    }

    /// What the port takes now, bytes.
    pub(crate) fn used(&self) -> u64 {
        self.bodies.used() + self.small_bodies.get() + self.replies.used() + self.selections.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_part_is_divided_in_proportion_and_a_large_one_changes_nothing() {
        let ample = HttpMemory::default();
        assert_eq!(ample.bodies.bytes_max() as u64, HTTP_BODIES_BYTES_MAX);
        assert_eq!(
            (ample.replies.bytes_max(), ample.selections_bytes_max, ample.body_small_bytes),
            (HTTP_REPLIES_BYTES_MAX, HTTP_SELECTIONS_BYTES_MAX, HTTP_BODY_SMALL_BYTES)
        );
        let small = HttpMemory::of(HTTP_BYTES_MAX / 64, 1 << 20);
        assert_eq!(
            (small.bodies.bytes_max(), small.replies.bytes_max(), small.selections_bytes_max),
            (4 << 20, 1 << 20, 4 << 20)
        );
        assert_eq!(small.body_small_bytes, HTTP_BODY_SMALL_BYTES_MIN);
        assert_eq!(HttpMemory::of(HTTP_BYTES_MAX / 4, 0).body_small_bytes, HTTP_BODY_SMALL_BYTES / 4);
        assert_eq!(HttpMemory::of(1 << 20, 8 << 20).bodies.bytes_max(), 8 << 20, "one body always fits");
        let held = small.bodies.free.try_acquire_many(100).unwrap();
        small.selections.set(5);
        small.small_bodies.add(7);
        assert_eq!(small.used(), 100 * PERMIT_BYTES as u64 + 12);
        drop(held);
    }
}
