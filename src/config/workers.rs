//! The second step for workers, wherever they are named: each record is checked beside the others, and one of
//! several ranks becomes several.

use super::check::{FirstPlace, find_space, too_many};
use super::fields::WorkerDraft;
use super::problem::Problem;
use super::walk::Entry;
use super::{Named, ServerConfig, SpaceConfig, WorkerConfig};
use crate::fleet::{DeviceClass, EventSource, WorkerState};
use crate::ids::{SpaceId, Worker};
use crate::limits;
use crate::load::PrefillFigures;

/// A GPU worker's throughput where its record does not say, relative to a CPU worker's 1.
const GPU_WEIGHT_DEFAULT: f64 = 8.0;

/// The workers of these records. They are only to be used if no problem was added.
pub(super) fn workers(
    entries: &[Entry<WorkerDraft>],
    spaces: &[Entry<SpaceConfig>],
    problems: &mut Vec<Problem>,
) -> Named {
    too_many(entries, limits::WORKERS_MAX, problems);
    let mut checks = Checks::default();
    let mut named = Named::default();
    for entry in entries {
        checks.record(entry, problems);
        let worker = worker(entry, spaces, problems);
        match &entry.value.url {
            Some(url) => {
                checks.url(entry, url, problems);
                named.servers.push(ServerConfig { url: url.clone(), worker });
            }
            None => checks.ranks(entry, &worker, &mut named.workers, problems),
        }
    }
    if named.workers.len() > limits::WORKERS_MAX && entries.len() <= limits::WORKERS_MAX {
        let message =
            format!("there are {} with their ranks, at most {} are allowed", named.workers.len(), limits::WORKERS_MAX);
        problems.extend(entries.last().map(|last| Problem::new(last.head.clone(), last.path.clone(), message)));
    }
    named
}

/// What no two records may share.
#[derive(Default)]
struct Checks {
    identities: FirstPlace<Worker>,
    endpoints: FirstPlace<String>,
}

impl Checks {
    /// What a record says that goes against itself.
    fn record(&self, entry: &Entry<WorkerDraft>, problems: &mut Vec<Problem>) {
        let draft = &entry.value;
        let told_by_url = draft.url.is_some();
        if told_by_url && draft.load.is_some() {
            problems.push(entry.problem("load", "is what the engine at url says"));
        }
        if entry.written("endpoint").is_none() || told_by_url {
            let set = [
                ("endpoint", draft.endpoint.is_some()),
                ("replay", draft.replay.is_some()),
                ("topic", !draft.topic.is_empty()),
                ("ranks", told_by_url && draft.ranks != 1),
            ];
            let message = if told_by_url { "is what the engine at url says" } else { "means nothing without endpoint" };
            for (field, _) in set.iter().filter(|(_, is_set)| *is_set) {
                problems.push(entry.problem(field, message));
            }
        }
        let within = draft.capacity_blocks <= draft.blocks_max;
        if !within && !entry.is_refused("blocks_max") {
            let message = format!("is beyond blocks_max, {}: its blocks would be refused", draft.blocks_max);
            problems.push(entry.problem("capacity_blocks", message));
        }
    }

    fn url(&mut self, entry: &Entry<WorkerDraft>, url: &str, problems: &mut Vec<Problem>) {
        self.identity(entry, Worker::new(entry.value.id, entry.value.dp_rank), problems);
        self.endpoint(entry, "url", url, problems);
    }

    /// Adds a worker for each rank.
    fn ranks(
        &mut self,
        entry: &Entry<WorkerDraft>,
        first: &WorkerConfig,
        into: &mut Vec<WorkerConfig>,
        problems: &mut Vec<Problem>,
    ) {
        for rank in 0..entry.value.ranks.min(limits::WORKERS_MAX as u32) {
            let Some(worker) = of_rank(first, rank) else {
                let message = "counts up tcp ports, which end at 65535, and dp_rank; name each rank by itself";
                problems.push(entry.problem("ranks", message));
                return;
            };
            self.identity(entry, worker.worker, problems);
            if let Some(events) = &worker.events {
                self.endpoint(entry, "endpoint", &events.endpoint, problems);
                if let Some(replay) = &events.replay {
                    self.endpoint(entry, "replay", replay, problems);
                }
            }
            if let Some(load) = &worker.load {
                self.endpoint(entry, "load", load, problems);
            }
            into.push(worker);
        }
    }

    fn identity(&mut self, entry: &Entry<WorkerDraft>, worker: Worker, problems: &mut Vec<Problem>) {
        if entry.written("id").is_none() || entry.is_refused("id") || entry.is_refused("dp_rank") {
            return;
        }
        if let Some(first) = self.identities.repeats(worker, &entry.place("id")) {
            let message = format!("worker {} with dp_rank {} is already defined at {first}", worker.id, worker.rank);
            problems.push(entry.problem("id", message));
        }
    }

    fn endpoint(&mut self, entry: &Entry<WorkerDraft>, field: &str, value: &str, problems: &mut Vec<Problem>) {
        if let Some(first) = self.endpoints.repeats(value.to_ascii_lowercase(), &entry.place(field)) {
            let message = format!("`{value}` is already used at {first}; every rank has sockets of its own");
            problems.push(entry.problem(field, message));
        }
    }
}

/// The worker `rank` ranks after `first`. `None` where its numbers or ports end.
pub(super) fn of_rank(first: &WorkerConfig, rank: u32) -> Option<WorkerConfig> {
    let dp_rank = first.worker.rank.0.checked_add(rank).filter(|rank| *rank < u32::MAX)?;
    let events = match &first.events {
        Some(events) => Some(EventSource {
            endpoint: events.endpoint.of_rank(rank)?,
            replay: match &events.replay {
                Some(replay) => Some(replay.of_rank(rank)?),
                None => None,
            },
            topic: events.topic.clone(),
        }),
        None => None,
    };
    let load = match &first.load {
        Some(load) => Some(load.of_rank(rank)?),
        None => None,
    };
    let worker = Worker::new(first.worker.id.0, dp_rank);
    let name = if rank == 0 {
        first.name.clone()
    } else if first.name == preset_name(first.worker) {
        preset_name(worker)
    } else {
        format!("{}.{dp_rank}", first.name)
    };
    Some(WorkerConfig { worker, name, events, load, ..first.clone() })
}

/// What people call a worker that nobody named.
fn preset_name(worker: Worker) -> String {
    match worker.rank.0 {
        0 => format!("w{}", worker.id),
        rank => format!("w{}.{rank}", worker.id),
    }
}

fn worker(entry: &Entry<WorkerDraft>, spaces: &[Entry<SpaceConfig>], problems: &mut Vec<Problem>) -> WorkerConfig {
    let draft = &entry.value;
    let space = match find_space(entry, spaces) {
        Ok(space) => space,
        Err(problem) => {
            problems.extend(problem);
            SpaceId(0)
        }
    };
    let worker = Worker::new(draft.id, draft.dp_rank);
    let events = draft.endpoint.clone().map(|endpoint| EventSource {
        endpoint,
        replay: draft.replay.clone(),
        topic: draft.topic.clone(),
    });
    WorkerConfig {
        worker,
        space,
        name: draft.name.clone().unwrap_or_else(|| preset_name(worker)),
        events,
        load: draft.load.clone(),
        capacity_blocks: draft.capacity_blocks,
        blocks_max: draft.blocks_max,
        batched_tokens_max: draft.batched_tokens_max,
        prefill: prefill(draft),
        device_class: draft.device,
        weight: weight(draft),
        taints: draft.taints.clone(),
        loras: draft.loras.clone(),
        state: state(draft),
    }
}

pub(super) fn weight(draft: &WorkerDraft) -> f64 {
    draft.weight.unwrap_or(match draft.device {
        DeviceClass::Gpu => GPU_WEIGHT_DEFAULT,
        DeviceClass::Cpu => 1.0,
    })
}

pub(super) fn prefill(draft: &WorkerDraft) -> PrefillFigures {
    PrefillFigures {
        base_ns: draft.prefill_base_us.map(|us| us * 1000),
        token_ns: draft.prefill_token_ns,
        cached_token_ns: draft.prefill_cached_token_ns,
    }
}

pub(super) const fn state(draft: &WorkerDraft) -> WorkerState {
    if draft.draining { WorkerState::Draining } else { WorkerState::Joining }
}
