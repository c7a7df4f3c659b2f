//! Memory of a segment's buckets: large ones straight from the system, as segments change size all the time and
//! an allocator would keep what lies between those that are left.

#![expect(unsafe_code, reason = "memory comes from the system as pointers")]

use super::bucket::Bucket;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Buckets from which on they are mapped: what they waste of a page is then small.
const MAPPED_BUCKETS_MIN: usize = 256;

/// Some buckets, empty at first.
#[derive(Debug)]
pub(super) struct Room {
    start: NonNull<Bucket>,
    len: usize,
    mapped: bool,
}

// SAFETY: it owns its buckets, as a box would.
unsafe impl Send for Room {}
// SAFETY: as above.
unsafe impl Sync for Room {}

impl Room {
    pub(super) fn new(len: usize) -> Self {
        if let Some(start) = map(len) {
            return Self { start, len, mapped: true };
        }
        let buckets = Box::leak(vec![Bucket::EMPTY; len].into_boxed_slice());
        Self { start: NonNull::from(buckets).cast(), len, mapped: false }
    }
}

/// Memory for buckets from the system, if they are many; all zero, which is what empty buckets are.
#[cfg(not(miri))]
fn map(len: usize) -> Option<NonNull<Bucket>> {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
    let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
    let bytes = len * size_of::<Bucket>();
    // SAFETY: a new mapping, of memory that is nobody's.
    let start = (len >= MAPPED_BUCKETS_MIN)
        .then(|| unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, protection, flags) })?
        .ok()?;
    NonNull::new(start.cast())
}

/// As its twin, for an interpreter that has no pages.
#[cfg(miri)]
fn map(_: usize) -> Option<NonNull<Bucket>> {
    None
}

impl Drop for Room {
    fn drop(&mut self) {
        #[cfg(not(miri))]
        if self.mapped {
            // SAFETY: mapped in `map` with this size, and nobody else's.
            let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len * size_of::<Bucket>()) };
            return;
        }
        // SAFETY: leaked from a box of so many in `new`.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.start.as_ptr(), self.len)) });
    }
}

impl Deref for Room {
    type Target = [Bucket];

    #[inline]
    fn deref(&self) -> &[Bucket] {
        // SAFETY: so many buckets, initialised (zero is a bucket), and borrowed with `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Room {
    #[inline]
    fn deref_mut(&mut self) -> &mut [Bucket] {
        // SAFETY: as above, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_and_large_are_empty_and_apart() {
        for len in [0, 1, MAPPED_BUCKETS_MIN - 1, MAPPED_BUCKETS_MIN, 3 * MAPPED_BUCKETS_MIN + 1] {
            let mut room = Room::new(len);
            assert_eq!((room.len(), room.iter().map(|bucket| bucket.filled().count()).sum::<usize>()), (len, 0));
            if let Some(last) = room.last_mut() {
                last.fill(9, 7, 70);
                assert_eq!(room.iter().map(|bucket| bucket.filled().count()).sum::<usize>(), 1);
            }
        }
    }
}
