//! Makes the records of the daemon's tables from a worker's configuration.

use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;

use crate::config::{Salts, SpaceConfig, WorkerConfig};
use crate::fleet::{SchemeCell, Space, TrustCell, WorkerRecord, WorkerState};
use crate::ids::{ShardId, SpaceId, Worker, WorkerIndex, WorkerSlot};
use crate::ingest::{PublisherPlan, WorkerView};
use crate::load::{LawRestored, Loads};
use crate::trust::{Trust, TrustLevel, TrustReason};

/// The settings that all records need.
#[derive(Debug)]
pub(super) struct WorkerRecords {
    spaces: Vec<(SpaceConfig, Arc<SchemeCell>)>,
    shards: u16,
    loads: Arc<Loads>,
}

impl WorkerRecords {
    pub(super) fn new(spaces: &[SpaceConfig], shards: u16, loads: &Arc<Loads>) -> Self {
        let space = |space: &SpaceConfig| (space.clone(), Arc::new(SchemeCell::new(space.scheme())));
        Self { spaces: spaces.iter().map(space).collect(), shards, loads: Arc::clone(loads) }
    }

    /// The configured spaces.
    pub(super) fn configs(&self) -> Vec<SpaceConfig> {
        self.spaces.iter().map(|(config, _)| config.clone()).collect()
    }

    /// The fleet's spaces.
    pub(super) fn spaces(&self) -> Vec<Space> {
        let space = |(id, (config, scheme)): (usize, &(SpaceConfig, Arc<SchemeCell>))| Space {
            id: SpaceId(id as u32),
            model: config.model.clone(),
            namespace: config.namespace.clone(),
            role: config.role,
            scheme: Arc::clone(scheme),
        };
        self.spaces.iter().enumerate().map(space).collect()
    }

    /// The scheme of a space.
    pub(super) fn scheme_of(&self, space: SpaceId) -> Option<Arc<SchemeCell>> {
        self.spaces.get(space.0 as usize).map(|(_, scheme)| Arc::clone(scheme))
    }

    /// Puts a worker into its class, whose workers share the law of their prefills' time.
    pub(super) fn join_class(&self, index: WorkerIndex, worker: &WorkerConfig) {
        let class = worker.engine_class.as_str();
        match self.loads.set_prefill_class(index, worker.worker, class, worker.prefill_prior()) {
            Some(LawRestored::Law { samples }) => tracing::info!(class, samples, "learnt prefill times are restored"),
            Some(LawRestored::Refused(why)) => {
                let (reason, remedy) = (why.reason(), "none needed; the class learns anew");
                tracing::warn!(class, reason, remedy, "learnt prefill times are not used");
            }
            None => {}
        }
    }

    /// The shard of a worker: a hash of its identity, so that it does not depend on other workers.
    pub(super) fn shard_of(&self, worker: Worker) -> ShardId {
        let mut identity = [0; 12];
        identity[..8].copy_from_slice(&worker.id.0.to_le_bytes());
        identity[8..].copy_from_slice(&worker.rank.0.to_le_bytes());
        ShardId((xxh3_64(&identity) % u64::from(self.shards.max(1))) as u16)
    }

    /// The record of a new worker.
    pub(super) fn record(&self, worker: &WorkerConfig, index: WorkerIndex, now_unix_ms: u64) -> WorkerRecord {
        let predicted = self.spaces.get(worker.space.0 as usize).is_some_and(|(space, _)| space.approximate);
        let (level, reason) = match worker.events {
            Some(_) => (TrustLevel::Unproven, TrustReason::Joining),
            None if predicted => (TrustLevel::Predicted, TrustReason::OwnDecisions),
            None => (TrustLevel::None, TrustReason::NoEvents),
        };
        let reasons = [reason].into_iter().collect();
        let trust = Trust { level, reasons, since_unix_ms: now_unix_ms, ..Trust::default() };
        let trust = Arc::new(TrustCell::new(trust));
        self.changed(worker, index, self.shard_of(worker.worker), WorkerSlot(0), trust)
    }

    /// The changed record of a worker, which keeps its place, shard and trust.
    pub(super) fn changed(
        &self,
        worker: &WorkerConfig,
        index: WorkerIndex,
        shard: ShardId,
        slot: WorkerSlot,
        trust: Arc<TrustCell>,
    ) -> WorkerRecord {
        WorkerRecord {
            index,
            worker: worker.worker,
            space: worker.space,
            name: worker.name.clone(),
            shard,
            slot,
            capacity_blocks: worker.capacity_blocks,
            batched_tokens_max: worker.batched_tokens_max,
            device_class: worker.device_class,
            weight: worker.weight,
            taints: worker.taints.clone(),
            loras: worker.loras.clone(),
            // Without events there is nothing to wait for.
            state: match (worker.state, &worker.events) {
                (WorkerState::Joining, None) => WorkerState::Ready,
                (state, _) => state,
            },
            trust,
            events: worker.events.clone(),
        }
    }

    /// The ingest thread's description of a worker that publishes events.
    pub(super) fn publisher(&self, record: &WorkerRecord, view: &Arc<WorkerView>) -> Option<PublisherPlan> {
        let (config, scheme) = self.spaces.get(record.space.0 as usize)?;
        Some(PublisherPlan {
            index: record.index,
            worker: record.worker,
            space: record.space,
            slot: record.slot,
            source: record.events.clone()?,
            scheme: Arc::clone(scheme),
            scheme_configured: config.scheme().is_some(),
            salts_possible: config.salts == Salts::Possible,
            capacity_blocks: record.capacity_blocks,
            view: Arc::clone(view),
            loads: Some(Arc::clone(&self.loads)),
        })
    }
}
