//! What the process has to divide among its threads: processors, open files and memory; and the list of the threads.

use std::path::Path;
use std::sync::Arc;

use core_affinity::CoreId;

use crate::budget::{Demands, MemoryAccounts, MemoryPart, ShedFlags, divide, least};
use crate::config::{Config, SpaceConfig, WorkerConfig};
use crate::error::Result;
use crate::ingest::Brokers;
use crate::ingest::descriptors::{self, Descriptors, Takers};
use crate::limits::{CONNECTION_BYTES, CONNECTIONS_MAX, MEMORY_SHARE_PERCENT, ROUTER_PEERS_MAX};
use crate::machine::{ResidentMemory, allowed_memory, numa_nodes};
use crate::serve::Turns;
use crate::watchdog::Watchlist;

/// The division of the process.
#[derive(Clone, Debug)]
pub(super) struct Resources {
    pub(super) cpus: Vec<CoreId>,
    /// The NUMA nodes of these; read here, before the sandbox.
    pub(super) numa_nodes: Vec<u32>,
    /// Serving threads.
    pub(super) cores: usize,
    pub(super) descriptors: Descriptors,
    /// The numbers that the open files are divided for.
    pub(super) takers: Takers,
    pub(super) memory: MemoryAccounts,
    /// What the daemon gives up while memory is short.
    pub(super) shed: ShedFlags,
    pub(super) watchlist: Watchlist,
    /// Which daemon decides.
    pub(super) turns: Turns,
    /// What NATS servers of events are shown. Its files are read here, before the sandbox.
    pub(super) brokers: Brokers,
    /// Opened here, before the sandbox; `None` = the kernel does not tell.
    pub(super) resident: Option<Arc<ResidentMemory>>,
}

impl Resources {
    /// Divides what the system allows. Call it before the sandbox; before the runtimes, which panic where they have too
    /// few descriptors; and before any thread is pinned: a pinned thread sees only its own processor.
    ///
    /// # Errors
    /// `System` if the open files do not suffice, `Config` if the memory does not.
    pub(super) fn divide(config: &Config) -> Result<Self> {
        let cpus = core_affinity::get_core_ids().unwrap_or_default();
        let processors: Vec<usize> = cpus.iter().map(|cpu| cpu.id).collect();
        let cores = config.serve.core_count(cpus.len(), usize::from(config.ingest.shards));
        let (takers, mut descriptors) = descriptors_for(config, cores)?;
        let memory = memory_for(config, cores, descriptors)?;
        // The smaller of the two divisions holds.
        let connections_max = memory.division().objects(MemoryPart::Connections, CONNECTION_BYTES);
        let lanes_max = memory.division().lanes(u64::from(config.serve.lane_ring_bytes_max));
        if connections_max < descriptors.connections_max || lanes_max < descriptors.lanes_max {
            tracing::warn!(
                connections_max,
                lanes_max,
                "the memory budget allows fewer connections or lanes than configured; raise memory_bytes_max in [process]"
            );
        }
        descriptors.connections_max = descriptors.connections_max.min(connections_max);
        descriptors.lanes_max = descriptors.lanes_max.min(lanes_max);
        Ok(Self {
            numa_nodes: numa_nodes(Path::new("/"), &processors),
            cpus,
            cores,
            descriptors,
            takers,
            memory,
            shed: ShedFlags::default(),
            watchlist: Watchlist::default(),
            turns: Turns::default(),
            brokers: brokers(config)?,
            resident: ResidentMemory::open().map(Arc::new),
        })
    }

    /// The memory of a space's predictions.
    pub(super) fn predictions_of(&self, space: &SpaceConfig, config: &Config) -> u64 {
        let in_all = predictions(config);
        self.memory.division().predictions_of(space.approximate_memory_bytes_max, in_all)
    }
}

#[cfg(feature = "nats")]
fn brokers(config: &Config) -> Result<Brokers> {
    Ok(Brokers::new(config.ingest.nats_access()?))
}

#[cfg(not(feature = "nats"))]
#[expect(clippy::unnecessary_wraps, reason = "a build with NATS reads files")]
fn brokers(_: &Config) -> Result<Brokers> {
    Ok(Brokers::default())
}

/// The spaces whose caches are predicted, and the memory that is configured for all of them.
fn predictions(config: &Config) -> (u64, u64) {
    let predicted = config.spaces.iter().filter(|space| space.approximate);
    predicted.fold((0, 0), |(spaces, bytes), space| (spaces + 1, bytes + space.approximate_memory_bytes_max))
}

/// Divides the memory budget, and logs it.
fn memory_for(config: &Config, cores: usize, descriptors: Descriptors) -> Result<MemoryAccounts> {
    let (allowed, demands) = (allowed_memory(Path::new("/")), demands(config, cores, descriptors));
    let bytes_max = match (config.process.memory_bytes_max, allowed) {
        // A small machine or container runs a small daemon, if it can run one at all.
        (0, Some(allowed)) => {
            let share = allowed.bytes / 100 * MEMORY_SHARE_PERCENT;
            share.max(least(&demands).min(allowed.bytes))
        }
        (0, None) => {
            tracing::warn!("the system does not tell how much memory there is; set memory_bytes_max in [process]");
            return Ok(MemoryAccounts::unlimited());
        }
        (configured, _) => configured,
    };
    if let Some(allowed) = allowed.filter(|allowed| bytes_max > allowed.bytes) {
        tracing::warn!(
            bytes_max,
            allowed = allowed.bytes,
            by = allowed.by.name(),
            "memory_bytes_max in [process] is more than the system allows: the kernel may end the process first"
        );
    }
    let division = divide(bytes_max, &demands)?;
    tracing::info!(
        bytes_max,
        index_bytes_max = division.bound(MemoryPart::Index),
        by = allowed
            .filter(|_| config.process.memory_bytes_max == 0)
            .map_or("configuration", |allowed| allowed.by.name()),
        "memory budget"
    );
    Ok(MemoryAccounts::new(division))
}

fn demands(config: &Config, cores: usize, descriptors: Descriptors) -> Demands {
    let (predicted_spaces, predictions_bytes_max) = predictions(config);
    let of_index = config.spaces.iter().map(|space| Some(space.memory_bytes_max).filter(|bytes| *bytes > 0));
    Demands {
        cores: cores as u64,
        shards: u64::from(config.ingest.shards.max(1)),
        spaces: config.spaces.len() as u64,
        workers: config.workers.len() as u64,
        connections_max: descriptors.connections_max as u64,
        frame_body_bytes_max: u64::from(config.serve.frame_body_bytes_max),
        lanes_max: descriptors.lanes_max as u64,
        lane_ring_bytes_max: u64::from(config.serve.lane_ring_bytes_max),
        predicted_spaces,
        predictions_bytes_max,
        index_bytes_max: of_index.sum::<Option<u64>>().filter(|bytes| *bytes > 0),
        affinity_sessions_max: config.policy.affinity_sessions_max as u64,
        routers_max: config.routers.origins_max() as u64,
        ended_bookings_max: config.journal.ended_waiting_max() as u64,
        traced_max: config.traces.waiting_max() as u64,
        remote_connections_max: config.remote.connections() as u64,
        http_body_bytes_max: (config.http.port != 0).then_some(config.http.body_bytes_max),
        snapshots: config.snapshot.dir.is_some(),
    }
}

/// Raises the limit of open files and divides them among connections, lanes and publishers. Warns if one gets fewer
/// than configured.
fn descriptors_for(config: &Config, cores: usize) -> Result<(Takers, Descriptors)> {
    let count = |has: fn(&WorkerConfig) -> bool| config.workers.iter().filter(|worker| has(worker)).count();
    let publishers = count(|worker| worker.events.is_some()) + count(|worker| worker.load.is_some());
    let (shards, lanes) = (usize::from(config.ingest.shards), config.serve.lanes_max);
    let routers = config.routers.listen.as_ref().map_or(0, |_| ROUTER_PEERS_MAX);
    let takers = Takers { cores, shards, publishers, lanes, routers, remote: config.remote.connections() };
    let descriptors = descriptors::divide(descriptors::raise(), takers)?;
    let Descriptors { limit, connections_max, lanes_max, publishers_max } = descriptors;
    if connections_max < CONNECTIONS_MAX || lanes_max < lanes || publishers_max < publishers {
        tracing::warn!(
            limit,
            connections_max,
            lanes_max,
            publishers_max,
            "too few open files: the daemon allows fewer connections, lanes and workers than configured; raise the hard limit (ulimit -Hn, LimitNOFILE=)"
        );
    }
    Ok((takers, descriptors))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Flags, parse};
    use crate::error::Kind;

    fn resources(text: &str) -> Result<Resources> {
        Resources::divide(&parse("t", text, &Flags::default()).expect("valid"))
    }

    const SPACE: &str = "[[space]]\nmodel = \"m\"\n";

    #[test]
    fn a_small_budget_bounds_every_part_and_one_below_the_fixed_parts_is_refused() {
        let serve = "[serve]\ncores = 1\nframe_body_bytes_max = 65536\n";
        let small = resources(&format!("{serve}[process]\nmemory_bytes_max = 134217728\n{SPACE}")).expect("enough");
        let division = *small.memory.division();
        assert_eq!(division.bytes_max(), 128 << 20);
        assert!(small.descriptors.connections_max < CONNECTIONS_MAX && division.bound(MemoryPart::Index) > 16 << 20);
        let large = "[serve]\ncores = 64\n[process]\nmemory_bytes_max = 134217728\n";
        let refused = resources(&format!("{large}{SPACE}")).expect_err("too little");
        assert!(refused.kind() == Kind::Config && refused.remedy().contains("serve.cores"), "{refused}");
    }

    #[test]
    fn predictions_of_all_spaces_share_their_part() {
        let space = |model: &str| format!("[[space]]\nmodel = \"{model}\"\nblock_size = 16\napproximate = true\n");
        let serve = "[serve]\ncores = 1\nframe_body_bytes_max = 65536\n[process]\nmemory_bytes_max = 268435456\n";
        let text = format!("{serve}{}{}", space("a"), space("b"));
        let config = parse("t", &text, &Flags::default()).expect("valid");
        let resources = Resources::divide(&config).expect("enough");
        let each: u64 = config.spaces.iter().map(|space| resources.predictions_of(space, &config)).sum();
        assert!(each <= resources.memory.division().bound(MemoryPart::Predictions) && each >= 16 << 20, "{each}");
    }
}
