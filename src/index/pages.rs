//! Zeroed pages straight from the system, for memory that an allocator would fragment.

#![expect(unsafe_code, reason = "memory comes from the system as pointers")]

use std::ptr::NonNull;

/// Bytes of a huge page, as x86-64 and aarch64 with pages of 4 KiB have it.
pub(super) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A new mapping of `bytes`. `None` if the system has no memory.
#[cfg(not(miri))]
pub(super) fn map(bytes: usize) -> Option<NonNull<u8>> {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
    let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
    // SAFETY: a new mapping, of memory that has no owner yet.
    let start = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, protection, flags) }.ok()?;
    NonNull::new(start.cast())
}

/// As [`map`], aligned to its own size, a power of two and a multiple of pages.
#[cfg(not(miri))]
pub(super) fn map_aligned(bytes: usize) -> Option<NonNull<u8>> {
    let whole = map(2 * bytes)?.as_ptr();
    let before = whole.align_offset(bytes);
    let start = whole.wrapping_add(before);
    // SAFETY: the parts before and behind belong to the mapping just made, are whole pages, and have no owner yet.
    unsafe {
        unmap(whole, before);
        unmap(start.wrapping_add(bytes), bytes - before);
    }
    NonNull::new(start)
}

/// As [`map_aligned`], of small pages, also where the system makes huge ones unasked.
#[cfg(not(miri))]
pub(super) fn map_small(bytes: usize) -> Option<NonNull<u8>> {
    let start = map_aligned(bytes)?;
    // SAFETY: as in `map_huge`.
    let _ = unsafe { rustix::mm::madvise(start.as_ptr().cast(), bytes, rustix::mm::Advice::LinuxNoHugepage) };
    Some(start)
}

/// As [`map_aligned`], of huge pages where the system has them.
#[cfg(not(miri))]
pub(super) fn map_huge(bytes: usize) -> Option<NonNull<u8>> {
    let start = map_aligned(bytes)?;
    // SAFETY: the pages belong to this mapping alone, and the advice does not change their content. If the system
    // ignores it, the pages are small ones: slower, not wrong.
    let _ = unsafe { rustix::mm::madvise(start.as_ptr().cast(), bytes, rustix::mm::Advice::LinuxHugepage) };
    Some(start)
}

/// Makes the system find the memory of a mapping now instead of at the first touch of each page.
///
/// # Safety
/// They are whole pages of a mapping made here, all zero, and no other thread accesses them meanwhile.
#[cfg(not(miri))]
pub(super) unsafe fn touch(start: NonNull<u8>, bytes: usize) {
    let advice = rustix::mm::Advice::LinuxPopulateWrite;
    // SAFETY: the caller's promise; the advice does not change the content of the pages.
    if unsafe { rustix::mm::madvise(start.as_ptr().cast(), bytes, advice) }.is_err() {
        // A kernel before 5.14: one byte of each page does it too.
        for at in (0..bytes).step_by(4096) {
            // SAFETY: inside the mapping, which only the caller accesses.
            unsafe { start.add(at).write_volatile(0) };
        }
    }
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
pub(super) fn map_aligned(bytes: usize) -> Option<NonNull<u8>> {
    map(bytes)
}

/// As outside of miri.
#[cfg(miri)]
pub(super) fn map_small(bytes: usize) -> Option<NonNull<u8>> {
    map(bytes)
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
pub(super) unsafe fn touch(_: NonNull<u8>, _: usize) {}

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
