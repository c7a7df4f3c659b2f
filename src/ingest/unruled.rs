//! The names of one worker that no rule covers, for people to see.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::event::Unruled;
use crate::limits::UNRULED_NAMES_WORKER_MAX;

/// Names and how often each came. Written by one thread, read by any, without a lock: an entry is made once.
#[derive(Debug)]
pub struct UnruledNames {
    entries: Box<[Entry]>,
    /// How often names came that there was no entry for.
    others: AtomicU64,
}

#[derive(Debug, Default)]
struct Entry {
    name: OnceLock<(Unruled, Box<str>)>,
    times: AtomicU64,
}

impl Default for UnruledNames {
    fn default() -> Self {
        let entries = (0..UNRULED_NAMES_WORKER_MAX).map(|_| Entry::default()).collect();
        Self { entries, others: AtomicU64::new(0) }
    }
}

impl UnruledNames {
    /// Counts a name. Says whether it came for the first time.
    pub(super) fn count(&self, of: Unruled, name: &str, times: u64) -> bool {
        for entry in &self.entries {
            let is_new = entry.name.get().is_none();
            let (kind, known) = entry.name.get_or_init(|| (of, name.into()));
            if (*kind, &**known) == (of, name) {
                // Relaxed, here and below: a count orders nothing.
                entry.times.fetch_add(times, Ordering::Relaxed);
                return is_new;
            }
        }
        self.others.fetch_add(times, Ordering::Relaxed);
        false
    }

    /// What each name is of, the name and how often it came, in the order in which they first came.
    pub fn iter(&self) -> impl Iterator<Item = (Unruled, &str, u64)> {
        let named = |entry: &'_ Entry| entry.times.load(Ordering::Relaxed);
        self.entries.iter().map_while(move |entry| {
            let (of, name) = entry.name.get()?;
            Some((*of, &**name, named(entry)))
        })
    }

    /// How often names came that are not listed, because too many were.
    #[must_use]
    pub fn others(&self) -> u64 {
        self.others.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_counted_each_and_the_rest_together() {
        let names = UnruledNames::default();
        assert!(names.count(Unruled::Medium, "TAPE", 2));
        assert!(!names.count(Unruled::Medium, "TAPE", 1));
        assert!(names.count(Unruled::Tag, "TAPE", 1), "another kind of name");
        for name in 2..UNRULED_NAMES_WORKER_MAX + 3 {
            names.count(Unruled::Tag, &name.to_string(), 1);
        }
        let listed: Vec<_> = names.iter().collect();
        assert_eq!(listed[..2], [(Unruled::Medium, "TAPE", 3), (Unruled::Tag, "TAPE", 1)]);
        assert_eq!((listed.len(), names.others()), (UNRULED_NAMES_WORKER_MAX, 3));
    }
}
