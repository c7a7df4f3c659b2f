//! The ingest threads' views of all workers, for those who show them.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::RwLock;

use crate::fleet::{FleetTable, WorkerRecord};
use crate::ids::WorkerIndex;
use crate::ingest::WorkerView;

/// A view for every worker that is, was just, or is about to be in the fleet's table.
#[derive(Debug, Default)]
pub(super) struct Views(RwLock<HashMap<WorkerIndex, Arc<WorkerView>>>);

impl Views {
    pub(super) fn put(&self, index: WorkerIndex, view: Arc<WorkerView>) {
        self.0.write().insert(index, view);
    }

    pub(super) fn take(&self, index: WorkerIndex) {
        self.0.write().remove(&index);
    }

    /// Every worker of `table` with its view.
    pub(super) fn of<'a>(&self, table: &'a FleetTable) -> Vec<(&'a WorkerRecord, Arc<WorkerView>)> {
        let views = self.0.read();
        let with_view = |record: &'a WorkerRecord| Some((record, Arc::clone(views.get(&record.index)?)));
        table.workers.iter().filter_map(with_view).collect()
    }
}
