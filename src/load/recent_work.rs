//! What a worker was given lately: the share of its time that booked prefills take, and how long its requests decode.
//!
//! A prefill delays the output of every request that decodes beside it. A prompt that is placed now will decode beside
//! the prefills to come; those of the last half minute are the best guess at them.

/// The time after which a prefill counts about 1/e, milliseconds.
const WINDOW_MS: f64 = 30_000.0;
/// The least weight of a request that ends in the mean decode of its worker.
const DECODE_WEIGHT_MIN: f32 = 0.05;
/// A decode counts at most this many times the mean, or a second if that is longer: a gateway may report an end late.
const SURPRISE_MAX: f32 = 4.0;
/// The longest decode that counts, seconds.
const DECODE_S_MAX: f32 = 600.0;
/// Recent prefills count nothing after this time, milliseconds: less than 1/7000 of them is left. Far from the time after
/// which [`RecentWork::at_ms`] cannot tell the past from the future.
const FADED_MS: u32 = 3_600_000;
/// The largest share. A worker with more booked is as overloaded, and prompts that were booked and given up are forgotten
/// within minutes.
pub(super) const SHARE_MAX: f64 = 4.0;

/// A worker's recent prefills and decodes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RecentWork {
    /// The share of its time that booked prefills took, at `at_ms`. Above 1, more was booked than it can do.
    pub prefill_share: f32,
    /// When a prefill was booked last: milliseconds of the bookings' clock, modulo 2³². Where the share is not zero, less
    /// than 2³¹ ms ago: [`Loads::expire`](super::Loads::expire) forgets the share long before.
    pub at_ms: u32,
    /// The mean time from a request's first token to its end, seconds.
    pub decode_s: f32,
    /// Requests that it is the mean of; 0 = it is not known.
    pub decodes: u32,
}

/// A time of the bookings' clock as [`RecentWork::at_ms`] has it.
#[must_use]
#[inline(always)]
pub const fn recent_ms(now_ns: u64) -> u32 {
    (now_ns / 1_000_000) as u32
}

impl RecentWork {
    /// The share at a time, from [`recent_ms`].
    ///
    /// It falls as `1 / (1 + x + x²/2)` with `x` the time in windows: within 0.07 of e^−x, without a call.
    #[must_use]
    #[inline(always)]
    pub fn prefill_share_at(&self, now_ms: u32) -> f64 {
        // As a signed number: processors convert several of those at once. A clock that an older reading is compared with may
        // be behind.
        let windows = f64::from((now_ms.wrapping_sub(self.at_ms) as i32).max(0)) * (1.0 / WINDOW_MS);
        f64::from(self.prefill_share) / (1.0 + windows + 0.5 * windows * windows)
    }

    /// Whether what is left of a share is to be forgotten, at a time from [`recent_ms`].
    pub(super) fn has_faded(&self, now_ms: u32) -> bool {
        let since_ms = now_ms.wrapping_sub(self.at_ms);
        self.prefill_share != 0.0 && (FADED_MS..=u32::MAX / 2).contains(&since_ms)
    }

    /// The recent work of this router and another at one worker: the sum of the shares. The decodes are those of `self`.
    pub(super) fn beside(&self, other: &Self) -> Self {
        if other.prefill_share == 0.0 {
            return *self;
        }
        if self.prefill_share == 0.0 {
            return Self { prefill_share: other.prefill_share, at_ms: other.at_ms, ..*self };
        }
        let is_later = other.at_ms.wrapping_sub(self.at_ms) as i32 > 0;
        let at_ms = if is_later { other.at_ms } else { self.at_ms };
        let share = self.prefill_share_at(at_ms) + other.prefill_share_at(at_ms);
        Self { prefill_share: share.min(SHARE_MAX) as f32, at_ms, ..*self }
    }

    /// Whether a worker can have been given this.
    #[must_use]
    pub fn is_plausible(&self) -> bool {
        (0.0..=SHARE_MAX as f32).contains(&self.prefill_share) && (0.0..=DECODE_S_MAX).contains(&self.decode_s)
    }

    /// Books a prefill of this predicted time.
    pub(super) fn add_prefill(&mut self, work_ns: u64, now_ns: u64) {
        let now_ms = recent_ms(now_ns);
        let share = self.prefill_share_at(now_ms) + work_ns as f64 * 1e-6 / WINDOW_MS;
        self.prefill_share = share.min(SHARE_MAX) as f32;
        self.at_ms = now_ms;
    }

    /// Learns from a request that ended, `took_s` after its first token.
    pub(super) fn end_decode(&mut self, took_s: f32) {
        self.decodes = self.decodes.saturating_add(1);
        let took_s_max = if self.decodes == 1 { DECODE_S_MAX } else { (self.decode_s * SURPRISE_MAX).max(1.0) };
        let weight = (1.0 / self.decodes as f32).max(DECODE_WEIGHT_MIN);
        self.decode_s += weight * (took_s.min(took_s_max).min(DECODE_S_MAX) - self.decode_s);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;

    #[test]
    fn a_steady_load_is_its_share_and_falls_when_it_stops() {
        let mut recent = RecentWork::default();
        // 300 ms of prefill a second, from just before the clock's milliseconds wrap.
        let start_ns = (u64::from(u32::MAX) - 100_000) * 1_000_000;
        for second in 0..200 {
            recent.add_prefill(300_000_000, start_ns + second * SECOND_NS);
        }
        let at = |second: u64| recent.prefill_share_at(recent_ms(start_ns + second * SECOND_NS));
        assert!((0.28..0.34).contains(&at(199)), "{}", at(199));
        assert!((at(229) / at(199) - 0.4).abs() < 0.01, "1/e, about: {}", at(229));
        assert!(at(500) < 0.01 && at(190) == at(199), "a reading of an older clock is not extrapolated");
    }

    #[test]
    fn prompts_that_were_booked_and_given_up_are_forgotten_within_minutes() {
        let mut recent = RecentWork::default();
        (0..100_000).for_each(|_| recent.add_prefill(3600 * SECOND_NS, SECOND_NS));
        assert_eq!(f64::from(recent.prefill_share), SHARE_MAX);
        assert!(recent.prefill_share_at(recent_ms(301 * SECOND_NS)) < 0.1);
    }

    #[test]
    fn the_mean_decode_is_learnt_and_one_late_end_moves_it_little() {
        let mut recent = RecentWork::default();
        recent.end_decode(1e6);
        assert_eq!((recent.decode_s, recent.decodes), (DECODE_S_MAX, 1), "the first is bounded too");
        recent = RecentWork::default();
        recent.end_decode(2.0);
        assert_eq!((recent.decode_s, recent.decodes), (2.0, 1));
        (0..200).for_each(|_| recent.end_decode(2.0));
        recent.end_decode(1e6);
        assert!(recent.decode_s < 2.4, "{recent:?}");
        (0..1000).for_each(|_| recent.end_decode(0.0));
        assert!(recent.decode_s >= 0.0 && recent.decode_s < 1e-6);
        (0..1000).for_each(|_| recent.end_decode(3.0));
        assert!((recent.decode_s - 3.0).abs() < 0.01, "it is found again: {recent:?}");
    }
}
