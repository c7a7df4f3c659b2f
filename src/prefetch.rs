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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_address_may_be_prefetched() {
        prefetch(std::ptr::null());
        prefetch(std::ptr::without_provenance(usize::MAX));
        prefetch([7_u8; 64].as_ptr());
    }
}
