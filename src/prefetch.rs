//! Prefetching a cache line that the processor cannot foresee.

#![cfg_attr(
    any(target_arch = "x86_64", all(target_arch = "aarch64", not(miri))),
    expect(unsafe_code, reason = "prefetches take raw pointers")
)]

/// Prefetches the cache line at `line`, which may be any address: nothing is read, and nothing faults.
#[inline(always)]
pub(crate) fn prefetch(line: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch is a hint; the instruction makes no access that the program could notice, at any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    // SAFETY: as on x86-64: the instruction is a hint that never faults. It changes neither the stack nor the flags.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{0}]", in(reg) line, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri))))]
    let _ = line;
}

/// As [`prefetch`], for a line that is about to be written: no other processor keeps it. A processor without such an
/// instruction does nothing.
#[inline(always)]
pub(crate) fn prefetch_to_write(line: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: as above: `prefetchw` is a hint that never faults. It changes neither the stack nor the flags.
    unsafe {
        std::arch::asm!("prefetchw [{0}]", in(reg) line, options(nostack, preserves_flags, readonly));
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("prfm pstl1keep, [{0}]", in(reg) line, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri))))]
    let _ = line;
}

/// [`prefetch_to_write`] for every line of a value.
#[inline(always)]
pub(crate) fn prefetch_value_to_write<T>(value: *const T) {
    for at in (0..size_of::<T>()).step_by(LINE_BYTES) {
        prefetch_to_write(value.cast::<u8>().wrapping_add(at));
    }
}

/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_address_may_be_prefetched() {
        prefetch(std::ptr::null());
        prefetch(std::ptr::without_provenance(usize::MAX));
        prefetch([7_u8; 64].as_ptr());
        prefetch_to_write(std::ptr::null());
        let value = [7_u8; 100];
        prefetch_value_to_write(&value);
        assert_eq!(value, [7; 100]);
    }
}
