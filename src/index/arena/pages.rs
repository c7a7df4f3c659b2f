//! Memory of chunks, straight from the system: aligned to its own size, so that it can be one huge page, and
//! nothing beside it.

use super::CHUNK_BYTES;
use std::ptr::NonNull;

/// Memory for a chunk that nobody has touched; all zero. `None` if the system has none.
#[cfg(not(miri))]
pub(super) fn map() -> Option<NonNull<u64>> {
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
    let flags = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
    // SAFETY: a new mapping, of memory that is nobody's.
    let whole = unsafe { mmap_anonymous(std::ptr::null_mut(), 2 * CHUNK_BYTES, flags.0, flags.1) }.ok()?;
    let before = whole.align_offset(CHUNK_BYTES);
    let chunk = whole.wrapping_byte_add(before);
    let after = CHUNK_BYTES - before;
    // SAFETY: the parts before and behind the chunk are of the mapping just made, whole pages, and nobody's.
    // Where they cannot be given back they cost addresses and no memory.
    let _ = unsafe { (before > 0).then(|| munmap(whole, before)) };
    // SAFETY: as above.
    let _ = unsafe { (after > 0).then(|| munmap(chunk.wrapping_byte_add(CHUNK_BYTES), after)) };
    // SAFETY: the pages are the chunk's alone, and the advice changes nothing that is in them. Where it is not
    // taken the pages are small ones: slower, not wrong.
    let _ = unsafe { madvise(chunk, CHUNK_BYTES, Advice::LinuxHugepage) };
    NonNull::new(chunk.cast())
}

/// Gives back what [`map`] gave.
///
/// # Safety
/// `chunk` came from [`map`], once, and nobody looks at it any more.
#[cfg(not(miri))]
pub(super) unsafe fn unmap(chunk: *mut u64) {
    // SAFETY: the caller's promise; a chunk is a mapping of this size.
    let _ = unsafe { rustix::mm::munmap(chunk.cast(), CHUNK_BYTES) };
}

#[cfg(miri)]
fn layout() -> std::alloc::Layout {
    std::alloc::Layout::from_size_align(CHUNK_BYTES, CHUNK_BYTES).unwrap_or(std::alloc::Layout::new::<u64>())
}

/// As its twin, for an interpreter that has no pages.
#[cfg(miri)]
pub(super) fn map() -> Option<NonNull<u64>> {
    // SAFETY: the layout is not empty.
    NonNull::new(unsafe { std::alloc::alloc_zeroed(layout()) }.cast())
}

/// As its twin.
///
/// # Safety
/// As its twin.
#[cfg(miri)]
pub(super) unsafe fn unmap(chunk: *mut u64) {
    // SAFETY: allocated in `map` by this layout.
    unsafe { std::alloc::dealloc(chunk.cast(), layout()) };
}
