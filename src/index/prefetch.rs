//! Asking for a cache line before it is needed.

#![expect(unsafe_code, reason = "the instruction takes a raw pointer")]

/// Asks for the line at `line`, which may be any address: nothing is read, and nothing faults.
#[inline(always)]
pub(super) fn prefetch(line: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch is a hint; the instruction accesses no memory the program could notice, at any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = line;
}

#[cfg(test)]
mod tests {
    #[test]
    fn any_address_will_do() {
        super::prefetch(std::ptr::null());
        super::prefetch(std::ptr::without_provenance(usize::MAX));
        super::prefetch([7_u8; 64].as_ptr());
    }
}
