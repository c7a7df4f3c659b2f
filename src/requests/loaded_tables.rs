//! What the requests of one batch share: the fleet table and the policies as they were loaded for the first of them, and a
//! reading of the clock. To load a shared pointer takes two locked instructions.

use std::sync::Arc;

use arc_swap::{ArcSwap, Cache, Guard};

use crate::fleet::{Fleet, FleetTable};
use crate::route::PolicyTable;

/// The fleet table and the policies that were loaded last, and the clock as it was read last.
///
/// A table of policies is kept until the next request: it is small, and nothing waits for its end. A fleet table is kept
/// only while a batch lasts, because the places of removed workers are used again once nothing reads the tables that had
/// them.
pub(super) struct LoadedTables {
    /// `None` = it was given back.
    fleet: Option<Guard<Arc<FleetTable>>>,
    policies: Cache<Arc<ArcSwap<PolicyTable>>, Arc<PolicyTable>>,
    is_in_batch: bool,
    /// The last reading of the clock in this batch.
    read_ns: Option<u64>,
}

impl LoadedTables {
    /// Nothing is loaded but the policies.
    pub(super) fn new(policies: &Arc<ArcSwap<PolicyTable>>) -> Self {
        let policies = Cache::new(Arc::clone(policies));
        Self { fleet: None, policies, is_in_batch: false, read_ns: None }
    }

    /// The current table of `fleet`, always the same one, and the current policies.
    pub(super) fn current(&mut self, fleet: &Fleet) -> (&FleetTable, &PolicyTable) {
        let Self { fleet: loaded, policies, .. } = self;
        (current_table(loaded, fleet), policies.load())
    }

    /// The current table of `fleet`.
    pub(super) fn fleet(&mut self, fleet: &Fleet) -> &FleetTable {
        current_table(&mut self.fleet, fleet)
    }

    /// The current policies.
    pub(super) fn policies(&mut self) -> &PolicyTable {
        self.policies.load()
    }

    /// The fleet table that was loaded last; `None` = it was given back.
    pub(super) fn last_fleet(&self) -> Option<&FleetTable> {
        self.fleet.as_deref().map(|fleet| &**fleet)
    }

    /// Notes a reading of the clock, nanoseconds of the bookings' clock.
    pub(super) const fn note_time(&mut self, now_ns: u64) {
        self.read_ns = Some(now_ns);
    }

    /// The clock as it was read last in this batch. `read` reads it, if it was not read in this batch or if there is none.
    pub(super) fn recent_ns(&mut self, read: impl FnOnce() -> u64) -> u64 {
        match self.read_ns.filter(|_| self.is_in_batch) {
            Some(read_ns) => read_ns,
            None => *self.read_ns.insert(read()),
        }
    }

    /// Begins a batch: its requests come one after the other, without a pause.
    pub(super) const fn begin_batch(&mut self) {
        (self.is_in_batch, self.read_ns) = (true, None);
    }

    /// Ends the batch, and gives the fleet table back.
    pub(super) fn end_batch(&mut self) {
        self.is_in_batch = false;
        self.fleet = None;
    }

    /// Gives the fleet table back after a request that is in no batch.
    pub(super) fn end_request(&mut self) {
        if !self.is_in_batch {
            self.fleet = None;
        }
    }
}

fn current_table<'a>(loaded: &'a mut Option<Guard<Arc<FleetTable>>>, fleet: &Fleet) -> &'a FleetTable {
    let newest = fleet.version();
    if loaded.as_ref().is_none_or(|table| table.version < newest) {
        *loaded = None;
    }
    loaded.get_or_insert_with(|| fleet.load())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::route::Policy;

    fn loaded() -> (Fleet, Arc<ArcSwap<PolicyTable>>, LoadedTables) {
        let policies = Arc::new(ArcSwap::from_pointee(PolicyTable::new(1, &Policy::kv(), &[])));
        let loaded = LoadedTables::new(&policies);
        (Fleet::new(FleetTable::default()), policies, loaded)
    }

    fn change(fleet: &Fleet) {
        assert!(fleet.update(|_| true));
    }

    #[test]
    fn a_change_is_seen_by_the_next_request_of_the_same_batch() {
        let (fleet, policies, mut loaded) = loaded();
        loaded.begin_batch();
        let versions = |loaded: &mut LoadedTables| {
            let (fleet, policies) = loaded.current(&fleet);
            (fleet.version, policies.version())
        };
        assert_eq!(versions(&mut loaded), (1, 1));
        change(&fleet);
        policies.store(Arc::new(policies.load().map(|policy| *policy)));
        assert_eq!(versions(&mut loaded), (2, 2));
        assert_eq!(loaded.last_fleet().map(|table| table.version), Some(2));
    }

    #[test]
    fn a_fleet_table_is_given_back_at_the_end_of_a_batch_or_of_a_request_outside_of_one() {
        let (fleet, _, mut loaded) = loaded();
        loaded.begin_batch();
        loaded.fleet(&fleet);
        loaded.end_request();
        change(&fleet);
        assert_eq!(fleet.oldest_in_use(), 1, "the batch goes on");
        loaded.end_batch();
        assert_eq!(fleet.oldest_in_use(), 2);
        loaded.fleet(&fleet);
        loaded.end_request();
        change(&fleet);
        assert_eq!(fleet.oldest_in_use(), 3);
        assert!(loaded.last_fleet().is_none());
    }

    #[test]
    fn requests_of_a_batch_share_a_reading_of_the_clock_and_others_do_not() {
        let (_, _, mut loaded) = loaded();
        assert_eq!([1, 2].map(|now_ns| loaded.recent_ns(|| now_ns)), [1, 2]);
        loaded.begin_batch();
        assert_eq!([3, 4].map(|now_ns| loaded.recent_ns(|| now_ns)), [3, 3], "not that of before the batch");
        loaded.note_time(5);
        assert_eq!(loaded.recent_ns(|| 6), 5);
        loaded.end_batch();
        assert_eq!(loaded.recent_ns(|| 7), 7);
    }
}
