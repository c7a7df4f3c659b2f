//! What one serving core counts.

use std::sync::Arc;

use crate::limits::WORKERS_MAX;
use crate::metrics::{CoreCounter, CounterSet, CounterTable, Latency, RouteCounter};

/// The counters of a core, its own: nobody else writes them.
#[derive(Debug)]
pub(super) struct CoreMetrics {
    pub(super) counters: Arc<CounterSet<CoreCounter>>,
    pub(super) decisions: Latency,
    pub(super) workers: Arc<CounterTable<RouteCounter>>,
}

impl Default for CoreMetrics {
    fn default() -> Self {
        let workers = Arc::new(CounterTable::new(WORKERS_MAX));
        Self { counters: Arc::default(), decisions: Latency::default(), workers }
    }
}
