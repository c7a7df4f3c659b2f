//! Memory of a segment's buckets: large ones straight from the system, as segments change size all the time and
//! an allocator would keep what lies between those that are left.

#![expect(unsafe_code, reason = "memory comes from the system as pointers")]

use super::bucket::Bucket;
use crate::index::pages;
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
        // Pages are zero, which is what empty buckets are.
        if len >= MAPPED_BUCKETS_MIN
            && let Some(start) = pages::map(len * size_of::<Bucket>())
        {
            return Self { start: start.cast(), len, mapped: true };
        }
        let buckets = Box::leak(vec![Bucket::EMPTY; len].into_boxed_slice());
        Self { start: NonNull::from(buckets).cast(), len, mapped: false }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if self.mapped {
            // SAFETY: mapped in `new` with this size, and nobody else's.
            return unsafe { pages::unmap(self.start.as_ptr().cast(), self.len * size_of::<Bucket>()) };
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
    use crate::index::slots::home::Tag;

    #[test]
    fn small_and_large_are_empty_and_apart() {
        for len in [0, 1, MAPPED_BUCKETS_MIN - 1, MAPPED_BUCKETS_MIN, 3 * MAPPED_BUCKETS_MIN + 1] {
            let mut room = Room::new(len);
            assert_eq!((room.len(), room.iter().map(|bucket| bucket.filled().count()).sum::<usize>()), (len, 0));
            if let Some(last) = room.last_mut() {
                last.fill(9, Tag::from_bits(2), true, 70);
                assert_eq!(room.iter().map(|bucket| bucket.filled().count()).sum::<usize>(), 1);
            }
        }
    }
}
