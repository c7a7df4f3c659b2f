//! Counters read at one moment, and how much they grew of late. Pure.

use std::marker::PhantomData;

use crate::limits::RECENT_MS;
use crate::metrics::CounterName;

/// The values of one list at one moment, or what was added between two. Without values everything is 0.
#[derive(Debug)]
pub(in crate::daemon) struct Counts<L>(Vec<u64>, PhantomData<fn() -> L>);

impl<L> Default for Counts<L> {
    fn default() -> Self {
        Self(Vec::new(), PhantomData)
    }
}

impl<L> Clone for Counts<L> {
    fn clone(&self) -> Self {
        Self(self.0.clone(), PhantomData)
    }
}

impl<L: CounterName> Counts<L> {
    /// Reads every counter of the list.
    pub(super) fn read(value: impl Fn(L) -> u64) -> Self {
        Self(L::ALL.iter().map(|counter| value(*counter)).collect(), PhantomData)
    }

    pub(in crate::daemon) fn get(&self, counter: L) -> u64 {
        self.0.get(counter.index()).copied().unwrap_or(0)
    }

    /// What was added since `earlier`; a counter that began again counts from 0.
    pub(super) fn since(&self, earlier: &Self) -> Self {
        let grown = |(at, value): (usize, &u64)| value.saturating_sub(earlier.0.get(at).copied().unwrap_or(0));
        Self(self.0.iter().enumerate().map(grown).collect(), PhantomData)
    }

    #[cfg(test)]
    pub(super) fn of(values: &[(L, u64)]) -> Self {
        let value = |counter: &L| values.iter().find(|(of, _)| of.index() == counter.index()).map_or(0, |(_, n)| *n);
        Self(L::ALL.iter().map(value).collect(), PhantomData)
    }
}

/// Two earlier moments. The older is between half of what is recent and all of it ago, once the daemon is up that
/// long; until then it is the start, when everything was 0.
#[derive(Debug)]
pub(super) struct Recent<T> {
    older: T,
    newer: T,
    newer_at_ms: u64,
}

impl<T: Default> Default for Recent<T> {
    fn default() -> Self {
        Self { older: T::default(), newer: T::default(), newer_at_ms: 0 }
    }
}

impl<T: Clone> Recent<T> {
    /// The moment that what is recent is counted from. `now` is remembered where it is time for it.
    pub(super) fn older(&mut self, now: &T, now_ms: u64) -> &T {
        if now_ms.saturating_sub(self.newer_at_ms) >= RECENT_MS / 2 {
            self.older = std::mem::replace(&mut self.newer, now.clone());
            self.newer_at_ms = now_ms;
        }
        &self.older
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::DaemonCounter as C;

    #[test]
    fn counts_differ_by_what_was_added() {
        let (before, after) = (Counts::of(&[(C::MailboxFull, 2)]), Counts::of(&[(C::MailboxFull, 5)]));
        assert_eq!(after.since(&before).get(C::MailboxFull), 3);
        assert_eq!(after.since(&Counts::default()).get(C::MailboxFull), 5);
        assert_eq!(before.since(&after).get(C::MailboxFull), 0);
    }

    #[test]
    fn recent_is_between_half_and_the_whole() {
        let (half, mut recent) = (RECENT_MS / 2, Recent::<u64>::default());
        assert_eq!(*recent.older(&10, 1), 0);
        assert_eq!(*recent.older(&20, half), 0, "the start, half a window ago");
        assert_eq!(*recent.older(&30, 2 * half - 1), 0);
        assert_eq!(*recent.older(&40, 2 * half), 20);
        assert_eq!(*recent.older(&50, 3 * half), 40);
    }
}
