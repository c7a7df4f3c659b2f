//! Pages straight from the system, all zero, for what would be kept in pieces by an allocator.

#![expect(unsafe_code, reason = "memory comes from the system as pointers")]

use std::ptr::NonNull;

/// A mapping of `bytes` that is nobody's yet. `None` if the system has none.
#[cfg(not(miri))]
pub(super) fn map(bytes: usize) -> Option<NonNull<u8>> {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
    let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
    // SAFETY: a new mapping, of memory that is nobody's.
    let start = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, protection, flags) }.ok()?;
    NonNull::new(start.cast())
}

/// As [`map`], aligned to its own size, a power of two and of pages.
#[cfg(not(miri))]
pub(super) fn map_aligned(bytes: usize) -> Option<NonNull<u8>> {
    let whole = map(2 * bytes)?.as_ptr();
    let before = whole.align_offset(bytes);
    let start = whole.wrapping_add(before);
    // SAFETY: the parts before and behind are of the mapping just made, whole pages, and nobody's.
    unsafe {
        unmap(whole, before);
        unmap(start.wrapping_add(bytes), bytes - before);
    }
    NonNull::new(start)
}

/// As [`map_aligned`], of huge pages where the system has them.
#[cfg(not(miri))]
pub(super) fn map_huge(bytes: usize) -> Option<NonNull<u8>> {
    let start = map_aligned(bytes)?;
    // SAFETY: the pages are this mapping's alone, and the advice changes nothing that is in them. Where it is not
    // taken the pages are small ones: slower, not wrong.
    let _ = unsafe { rustix::mm::madvise(start.as_ptr().cast(), bytes, rustix::mm::Advice::LinuxHugepage) };
    Some(start)
}

/// Has the system find the memory of a mapping now instead of at the first touch of each page.
///
/// # Safety
/// They are whole pages of a mapping made here, all zero, and nobody looks at them meanwhile.
#[cfg(not(miri))]
pub(super) unsafe fn touch(start: NonNull<u8>, bytes: usize) {
    let advice = rustix::mm::Advice::LinuxPopulateWrite;
    // SAFETY: the caller's promise; the advice changes nothing that is in the pages.
    if unsafe { rustix::mm::madvise(start.as_ptr().cast(), bytes, advice) }.is_err() {
        // A kernel before 5.14: one byte of each page does it too.
        for at in (0..bytes).step_by(4096) {
            // SAFETY: inside the mapping, which is the caller's alone.
            unsafe { start.add(at).write_volatile(0) };
        }
    }
}

/// Gives back pages of a mapping; none if there are none. Where the system cannot take them they cost addresses.
///
/// # Safety
/// They are whole pages of a mapping made here, given back once, and nobody looks at them any more.
#[cfg(not(miri))]
pub(super) unsafe fn unmap(start: *mut u8, bytes: usize) {
    if bytes > 0 {
        // SAFETY: the caller's promise.
        let _ = unsafe { rustix::mm::munmap(start.cast(), bytes) };
    }
}

/// Gives the memory of some pages back; they stay mapped, and are zeros.
///
/// # Safety
/// They are whole pages of a mapping made here, and nobody looks at them meanwhile.
#[cfg(not(miri))]
pub(super) unsafe fn discard(start: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise: a private mapping of no file reads as zeros after this. Where the system does not
    // take the advice the old words stay, which are initialised too.
    let _ = unsafe { rustix::mm::madvise(start.cast(), bytes, rustix::mm::Advice::LinuxDontNeed) };
}

/// Where there are no pages, as under an interpreter, memory of the allocator's, aligned in the same way.
#[cfg(miri)]
fn layout(bytes: usize) -> Option<std::alloc::Layout> {
    std::alloc::Layout::from_size_align(bytes, bytes.next_power_of_two().max(4096)).ok()
}

/// As its twin.
#[cfg(miri)]
pub(super) fn map(bytes: usize) -> Option<NonNull<u8>> {
    // SAFETY: nobody maps nothing.
    NonNull::new(unsafe { std::alloc::alloc_zeroed(layout(bytes)?) })
}

/// As its twin.
#[cfg(miri)]
pub(super) fn map_aligned(bytes: usize) -> Option<NonNull<u8>> {
    map(bytes)
}

/// As its twin.
#[cfg(miri)]
pub(super) fn map_huge(bytes: usize) -> Option<NonNull<u8>> {
    map(bytes)
}

/// As its twin.
///
/// # Safety
/// As its twin.
#[cfg(miri)]
pub(super) unsafe fn touch(_: NonNull<u8>, _: usize) {}

/// As its twin.
///
/// # Safety
/// As its twin.
#[cfg(miri)]
pub(super) unsafe fn discard(start: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { start.write_bytes(0, bytes) };
}

/// As its twin, for a whole mapping.
///
/// # Safety
/// As its twin.
#[cfg(miri)]
pub(super) unsafe fn unmap(start: *mut u8, bytes: usize) {
    if let Some(layout) = layout(bytes) {
        // SAFETY: allocated by this layout in `map`.
        unsafe { std::alloc::dealloc(start, layout) };
    }
}
