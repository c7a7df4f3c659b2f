//! A relay's metrics: what it counts of its answers, and what it knows of its engine.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Registry;

use crate::ids::Worker;
use crate::ingest::{WorkerView, exposition};
use crate::metrics::{CounterSet, PageCounter, RelayCounter};

/// Where a relay's figures are found.
#[derive(Clone, Debug)]
pub(super) struct Sources {
    pub(super) worker: Worker,
    pub(super) view: Arc<WorkerView>,
    pub(super) counters: Arc<CounterSet<RelayCounter>>,
    pub(super) pages: Arc<CounterSet<PageCounter>>,
}

impl Sources {
    /// Writes the Prometheus text of them now.
    pub(super) fn render(&self, text: &mut String) -> fmt::Result {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self.clone()));
        prometheus_client::encoding::text::encode(text, &registry)
    }
}

impl Collector for Sources {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        exposition::counters_of(&mut encoder, &self.counters)?;
        exposition::counters_of(&mut encoder, &self.pages)?;
        exposition::encode(&mut encoder, &[(self.worker, &self.view)])
    }
}
