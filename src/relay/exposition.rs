//! A relay's metrics: what it counts of its answers, and what it knows of its engine.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use crate::ids::Worker;
use crate::ingest::{WorkerView, exposition};
use crate::metrics::{CounterName, CounterSet, RelayCounter};

/// Where a relay's figures are found.
#[derive(Clone, Debug)]
pub(super) struct Sources {
    pub(super) worker: Worker,
    pub(super) view: Arc<WorkerView>,
    pub(super) counters: Arc<CounterSet<RelayCounter>>,
}

impl Sources {
    /// The Prometheus text of them now.
    pub(super) fn render(&self) -> Result<String, fmt::Error> {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self.clone()));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry)?;
        Ok(text)
    }
}

impl Collector for Sources {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for counter in RelayCounter::ALL {
            let name = format!("kvrouted_{}", counter.name());
            let mut metric = encoder.encode_descriptor(&name, counter.help(), None, MetricType::Counter)?;
            metric.encode_counter::<NoLabelSet, u64, u64>(&self.counters.get(*counter), None)?;
        }
        exposition::encode(&mut encoder, &[(self.worker, &self.view)])
    }
}
