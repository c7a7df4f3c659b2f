//! Zeroed pages straight from the system, for memory that an allocator would fragment.

#![expect(unsafe_code, reason = "memory comes from the system as pointers")]

use std::ptr::NonNull;

/// A new mapping of `bytes`. `None` if the system has no memory.
#[cfg(not(miri))]
pub(super) fn map(bytes: usize) -> Option<NonNull<u8>> {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
    let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
    // SAFETY: a new mapping, of memory that has no owner yet.
    let start = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, protection, flags) }.ok()?;
    NonNull::new(start.cast())
}

/// As [`map`], aligned to its own size, a power of two and a multiple of pages, so that it can consist of huge pages.
#[cfg(not(miri))]
pub(super) fn map_huge(bytes: usize) -> Option<NonNull<u8>> {
    let whole = map(2 * bytes)?.as_ptr();
    let before = whole.align_offset(bytes);
    let start = whole.wrapping_add(before);
    // SAFETY: the parts before and behind belong to the mapping just made, are whole pages, and have no owner yet.
    unsafe {
        unmap(whole, before);
        unmap(start.wrapping_add(bytes), bytes - before);
    }
    // SAFETY: the pages belong to this mapping alone, and the advice does not change their content. If the system
    // ignores it, the pages are small ones: slower, not wrong.
    let _ = unsafe { rustix::mm::madvise(start.cast(), bytes, rustix::mm::Advice::LinuxHugepage) };
    NonNull::new(start)
}

/// Unmaps pages of a mapping, if there are any. If the system refuses, they cost addresses.
///
/// # Safety
/// They are whole pages of a mapping made here, unmapped once, and no thread accesses them any more.
#[cfg(not(miri))]
pub(super) unsafe fn unmap(start: *mut u8, bytes: usize) {
    if bytes > 0 {
        // SAFETY: the caller's promise.
        let _ = unsafe { rustix::mm::munmap(start.cast(), bytes) };
    }
}

/// Gives the memory of some pages back; they stay mapped and read as zeros.
///
/// # Safety
/// They are whole pages of a mapping made here, and no thread accesses them meanwhile.
#[cfg(not(miri))]
pub(super) unsafe fn discard(start: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise: a private mapping without a file reads as zeros after this. If the system ignores
    // the advice, the old words stay, which are initialised too.
    let _ = unsafe { rustix::mm::madvise(start.cast(), bytes, rustix::mm::Advice::LinuxDontNeed) };
}

/// Under an interpreter there are no pages: memory of the allocator, aligned in the same way.
#[cfg(miri)]
fn layout(bytes: usize) -> Option<std::alloc::Layout> {
    std::alloc::Layout::from_size_align(bytes, bytes.next_power_of_two().max(4096)).ok()
}

/// As outside of miri.
#[cfg(miri)]
pub(super) fn map(bytes: usize) -> Option<NonNull<u8>> {
    // SAFETY: no caller maps 0 bytes.
    NonNull::new(unsafe { std::alloc::alloc_zeroed(layout(bytes)?) })
}

/// As outside of miri.
#[cfg(miri)]
pub(super) fn map_huge(bytes: usize) -> Option<NonNull<u8>> {
    map(bytes)
}

/// As outside of miri.
///
/// # Safety
/// As outside of miri.
#[cfg(miri)]
pub(super) unsafe fn discard(start: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { start.write_bytes(0, bytes) };
}

/// As outside of miri, for a whole mapping.
///
/// # Safety
/// As outside of miri.
#[cfg(miri)]
pub(super) unsafe fn unmap(start: *mut u8, bytes: usize) {
    if let Some(layout) = layout(bytes) {
        // SAFETY: allocated by this layout in `map`.
        unsafe { std::alloc::dealloc(start, layout) };
    }
}
