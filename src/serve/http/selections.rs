//! Selections that were made and not booked, so that they can be booked without sending the prompt again. Bounded in
//! number, memory and time; the oldest goes first.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::fields::PromptFields;
use crate::ids::{SpaceId, Worker};
use crate::limits::{HTTP_SELECTION_MS_MAX, HTTP_SELECTIONS_BYTES_MAX, HTTP_SELECTIONS_MAX};

/// A selection by its space and name.
type Key = (SpaceId, String);

/// What is needed to book a selection.
#[derive(Clone, Debug)]
pub(super) struct Selection {
    /// What was asked.
    pub(super) fields: Arc<PromptFields>,
    /// Who was chosen.
    pub(super) worker: Worker,
}

#[derive(Debug)]
struct Held {
    selection: Selection,
    number: u64,
    bytes: usize,
}

/// What was forgotten to make room, or for its age.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Forgotten {
    pub(super) evicted: u64,
    pub(super) expired: u64,
}

/// The selections that wait.
#[derive(Debug, Default)]
pub(super) struct Selections {
    held: HashMap<Key, Held>,
    /// When each came, milliseconds of the caller's clock, and which; oldest first.
    by_age: BTreeMap<u64, (u64, Key)>,
    bytes: usize,
    next: u64,
}

impl Selections {
    /// Takes a selection in place of one of the same name.
    pub(super) fn put(&mut self, space: SpaceId, id: &str, selection: Selection, now_ms: u64) -> Forgotten {
        let key = (space, id.to_owned());
        self.remove(&key);
        let mut forgotten = Forgotten { expired: self.expire(now_ms), evicted: 0 };
        let bytes = selection.fields.bytes() + 2 * id.len() + size_of::<Held>();
        if bytes > HTTP_SELECTIONS_BYTES_MAX {
            return Forgotten { evicted: 1, ..forgotten };
        }
        while self.held.len() >= HTTP_SELECTIONS_MAX || self.bytes + bytes > HTTP_SELECTIONS_BYTES_MAX {
            let Some((_, (_, oldest))) = self.by_age.pop_first() else { break };
            self.forget(&oldest);
            forgotten.evicted += 1;
        }
        self.next += 1;
        self.by_age.insert(self.next, (now_ms, key.clone()));
        self.held.insert(key, Held { selection, number: self.next, bytes });
        self.bytes += bytes;
        forgotten
    }

    /// A selection that is not too old, and how many were.
    pub(super) fn get(&mut self, space: SpaceId, id: &str, now_ms: u64) -> (Option<Selection>, u64) {
        let expired = self.expire(now_ms);
        (self.held.get(&(space, id.to_owned())).map(|held| held.selection.clone()), expired)
    }

    /// Forgets a selection.
    pub(super) fn take(&mut self, space: SpaceId, id: &str) {
        self.remove(&(space, id.to_owned()));
    }

    fn remove(&mut self, key: &Key) {
        if let Some(number) = self.forget(key) {
            self.by_age.remove(&number);
        }
    }

    fn forget(&mut self, key: &Key) -> Option<u64> {
        let held = self.held.remove(key)?;
        self.bytes -= held.bytes;
        Some(held.number)
    }

    fn expire(&mut self, now_ms: u64) -> u64 {
        let mut expired = 0;
        while let Some(oldest) = self.by_age.first_entry() {
            if now_ms.saturating_sub(oldest.get().0) < HTTP_SELECTION_MS_MAX {
                break;
            }
            let (_, key) = oldest.remove();
            self.forget(&key);
            expired += 1;
        }
        expired
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPACE: SpaceId = SpaceId(0);

    fn selection(tokens: usize) -> Selection {
        let fields = serde_json::json!({ "token_ids": vec![1_u32; tokens] });
        let fields = Arc::new(serde_json::from_value(fields).unwrap());
        Selection { fields, worker: Worker::new(1, 0) }
    }

    fn is_there(selections: &mut Selections, id: &str, now_ms: u64) -> bool {
        selections.get(SPACE, id, now_ms).0.is_some()
    }

    #[test]
    fn the_oldest_makes_room_and_the_old_are_forgotten() {
        let mut selections = Selections::default();
        for at in 0..HTTP_SELECTIONS_MAX {
            assert_eq!(selections.put(SPACE, &at.to_string(), selection(1), 0), Forgotten::default());
        }
        let one = Forgotten { evicted: 1, expired: 0 };
        assert_eq!(selections.put(SPACE, "new", selection(1), 1), one);
        assert!(!is_there(&mut selections, "0", 1) && is_there(&mut selections, "1", 1));
        assert_eq!(
            selections.put(SPACE, "1", selection(1), 2),
            Forgotten::default(),
            "the same name is the same place"
        );
        let (left, expired) = selections.get(SPACE, "1", HTTP_SELECTION_MS_MAX);
        assert!(left.is_some() && expired == HTTP_SELECTIONS_MAX as u64 - 2, "{expired}");
        selections.take(SPACE, "1");
        selections.take(SPACE, "new");
        assert_eq!((selections.held.len(), selections.by_age.len(), selections.bytes), (0, 0, 0));
    }

    #[test]
    fn prompts_count_by_their_size() {
        let mut selections = Selections::default();
        let large = HTTP_SELECTIONS_BYTES_MAX / 4 / 2;
        selections.put(SPACE, "a", selection(large), 0);
        assert_eq!(selections.put(SPACE, "b", selection(large), 0).evicted, 1);
        assert!(!is_there(&mut selections, "a", 0) && is_there(&mut selections, "b", 0));
        assert!(!is_there(&mut selections, "c", 0));
        assert!(selections.get(SpaceId(1), "b", 0).0.is_none(), "a name is of one space");
    }
}
