//! The pages of a fleet, put together.

use rustc_hash::FxHashSet;

use crate::wire::WatchReply;

/// What has come of a fleet that is not told to its end.
#[derive(Debug, Default)]
pub(super) struct FleetPages {
    begun: WatchReply,
}

impl FleetPages {
    /// Takes the next page; gives the fleet with the last. A page of another version than those before begins anew. Who left and
    /// came back between two pages may be in both, and is as the later says.
    pub(super) fn take(&mut self, page: WatchReply) -> Option<WatchReply> {
        if page.fleet_version != self.begun.fleet_version {
            self.begun = WatchReply { fleet_version: page.fleet_version, ..WatchReply::default() };
        }
        self.begun.workers.extend(page.workers);
        (page.next_cursor == 0).then(|| {
            let mut fleet = std::mem::take(&mut self.begun);
            let mut named = FxHashSet::default();
            fleet.workers.reverse();
            fleet.workers.retain(|info| named.insert((info.space, info.worker)));
            fleet.workers.reverse();
            fleet
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{SpaceId, Worker};
    use crate::protocol::{DeviceClass, WorkerState};
    use crate::trust::Trust;
    use crate::wire::WorkerInfo;

    fn page(fleet_version: u64, next_cursor: u32, ids: &[u64]) -> WatchReply {
        let info = |id: &u64| WorkerInfo {
            worker: Worker::new(*id, 0),
            space: SpaceId(0),
            name: String::new(),
            state: WorkerState::Ready,
            device_class: DeviceClass::Gpu,
            weight: 1.0,
            capacity_blocks: 0,
            batched_tokens_max: 0,
            taints: Vec::new(),
            trust: Trust::default(),
        };
        WatchReply { workers: ids.iter().map(info).collect(), fleet_version, next_cursor }
    }

    #[test]
    fn a_fleet_is_its_pages_and_one_that_is_overtaken_is_forgotten() {
        let mut pages = FleetPages::default();
        assert_eq!(pages.take(page(1, 0, &[1])), Some(page(1, 0, &[1])));
        assert_eq!(pages.take(page(2, 2, &[1, 2])), None);
        assert_eq!(pages.take(page(2, 0, &[3])), Some(page(2, 0, &[1, 2, 3])));
        assert_eq!(pages.take(page(3, 1, &[1])), None);
        assert_eq!(pages.take(page(4, 1, &[7])), None);
        assert_eq!(pages.take(page(4, 0, &[8])), Some(page(4, 0, &[7, 8])));
        assert_eq!(pages.take(page(4, 0, &[9])), Some(page(4, 0, &[9])), "told again");
    }

    #[test]
    fn who_is_in_two_pages_is_as_the_later_says() {
        let mut pages = FleetPages::default();
        assert_eq!(pages.take(page(1, 2, &[1, 2])), None);
        let mut last = page(1, 0, &[3, 1]);
        last.workers[1].state = WorkerState::Draining;
        let told = pages.take(last).unwrap();
        let states: Vec<_> = told.workers.iter().map(|info| (info.worker.id.0, info.state)).collect();
        assert_eq!(states, [(2, WorkerState::Ready), (3, WorkerState::Ready), (1, WorkerState::Draining)]);
    }
}
