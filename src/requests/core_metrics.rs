//! The counters of one serving thread's requests.

use std::sync::Arc;

use crate::limits::WORKERS_MAX;
use crate::metrics::{CoreCounter, CounterSet, CounterTable, Latency, RouteCounter};

/// The counters of one serving thread, which alone writes them.
#[derive(Debug)]
pub(crate) struct CoreMetrics {
    pub(crate) counters: Arc<CounterSet<CoreCounter>>,
    pub(crate) decisions: Latency,
    pub(crate) workers: Arc<CounterTable<RouteCounter>>,
}

impl Default for CoreMetrics {
    fn default() -> Self {
        let workers = Arc::new(CounterTable::new(WORKERS_MAX));
        Self { counters: Arc::default(), decisions: Latency::default(), workers }
    }
}
