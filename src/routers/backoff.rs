//! A pause that doubles after each try.

/// When the next try may be made.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BackOff {
    doublings: u32,
    next_ms: u64,
}

impl BackOff {
    pub(super) const fn is_over(&self, now_ms: u64) -> bool {
        now_ms >= self.next_ms
    }

    pub(super) const fn next_ms(&self) -> u64 {
        self.next_ms
    }

    /// Begins the next pause, of `first_ms` at first and of `longest_ms` at most.
    pub(super) fn begin(&mut self, now_ms: u64, first_ms: u64, longest_ms: u64) {
        let pause_ms = first_ms.saturating_mul(1 << self.doublings.min(u32::BITS)).min(longest_ms);
        self.next_ms = now_ms.saturating_add(pause_ms);
        self.doublings = self.doublings.saturating_add(1);
    }

    /// Makes the pause after the present one a first one.
    pub(super) const fn succeed(&mut self) {
        self.doublings = 0;
    }
}
