//! Identities: newtypes for values that would otherwise be bare integers, and other small types that every room uses.
//!
//! Units are in the name or the doc line. These types know no encoding: the wire and the engines' formats convert.

use std::fmt;

macro_rules! newtype {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

newtype! {
    /// The number of an engine, as operators and gateways use it.
    WorkerId(u64)
}
newtype! {
    /// A data-parallel rank of an engine. Each rank has a cache, an event stream and a load of its own.
    DpRank(u32)
}
newtype! {
    /// XXH3-64 of one block's tokens under the seed of its space, LoRA and salt.
    LocalHash(u64)
}
newtype! {
    /// Chained XXH3-64 of all blocks up to and including one.
    SequenceHash(u64)
}
newtype! {
    /// An engine's name for a block. Opaque, and never compared across workers.
    EngineHash(u64)
}
newtype! {
    /// The sequence number of an event batch in its publisher's stream, from 0.
    EventSeq(u64)
}
/// The lifetime of an engine's publisher: 16 bytes that it draws when it starts and sends with each batch and with each
/// of its snapshots. Only engines with snapshots have one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime(pub [u8; 16]);

/// The open proposal that an engine's snapshots follow. docs/engines.md has what each proposes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotProposal {
    /// Pull request 57789 of vllm-project/vllm.
    Vllm57789,
    /// Pull request 34407 of sgl-project/sglang.
    Sglang34407,
}

newtype! {
    /// The number of a space (model, namespace and role). Spaces share nothing.
    SpaceId(u32)
}
newtype! {
    /// The number of a shard: an ingest thread and the part of the index that only it writes.
    ShardId(u16)
}
newtype! {
    /// A worker's dense number within its shard, for the index.
    WorkerSlot(u16)
}
newtype! {
    /// A worker's place in the fleet table, with a generation that tells apart the workers that had this place. It is
    /// never reused in one run of the daemon. The index of a place's first worker is the place itself.
    WorkerIndex(u32)
}
newtype! {
    /// A KV group of a hybrid model; 0 if there is only one.
    GroupId(u32)
}
newtype! {
    /// The XXH3 seed of a chain, from LoRA adapter and salt. Blocks with different seeds never match.
    Seed(u64)
}
newtype! {
    /// Chosen by the gateway for a request, and repeated in the reply.
    CorrelationId(u64)
}

/// Bits of a [`WorkerIndex`] for the place.
pub const WORKER_PLACE_BITS: u32 = 12;

impl WorkerIndex {
    /// How many workers may have a place, one after another.
    pub const GENERATIONS: u32 = 1 << (u32::BITS - WORKER_PLACE_BITS);

    /// The worker with number `generation`, from 0, at a place.
    #[must_use]
    pub const fn at(place: u16, generation: u32) -> Self {
        Self(generation << WORKER_PLACE_BITS | place as u32)
    }

    /// The place in every table of workers, below `WORKERS_MAX`.
    #[must_use]
    pub const fn place(self) -> usize {
        (self.0 & ((1 << WORKER_PLACE_BITS) - 1)) as usize
    }

    /// How many workers had the place before.
    #[must_use]
    pub const fn generation(self) -> u32 {
        self.0 >> WORKER_PLACE_BITS
    }
}

/// A worker: one data-parallel rank of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Worker {
    /// The engine.
    pub id: WorkerId,
    /// Its data-parallel rank.
    pub rank: DpRank,
}

impl Worker {
    /// A worker from its two numbers.
    #[must_use]
    pub const fn new(id: u64, rank: u32) -> Self {
        Self { id: WorkerId(id), rank: DpRank(rank) }
    }

    /// The selector of every rank of an engine: see [`Worker::selects`].
    #[must_use]
    pub const fn every_rank(id: WorkerId) -> Self {
        Self { id, rank: RankSelection::Every.to_rank() }
    }

    /// The selector of one rank of an engine; `None` = of every rank.
    #[must_use]
    pub const fn of_ranks(id: u64, rank: Option<u32>) -> Self {
        match rank {
            Some(rank) => Self::new(id, rank),
            None => Self::every_rank(WorkerId(id)),
        }
    }

    /// The ranks that this worker selects where it is used as a selector.
    #[must_use]
    pub const fn ranks(self) -> RankSelection {
        RankSelection::from_rank(self.rank)
    }

    /// Whether this worker, used as a selector, selects `worker`: the same engine, and that rank or every rank.
    #[must_use]
    pub fn selects(self, worker: Self) -> bool {
        self.id == worker.id && self.ranks().matches(worker.rank)
    }
}

/// The ranks that a selector selects: in an allow-list, a pin, a report, or an operator's command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankSelection {
    /// One rank.
    One(DpRank),
    /// Every rank of the engine.
    Every,
}

impl RankSelection {
    /// The rank that means every rank, on the wire and in [`Worker`].
    const EVERY: u32 = u32::MAX;

    /// The selection that a rank of the wire means.
    #[must_use]
    pub const fn from_rank(rank: DpRank) -> Self {
        if rank.0 == Self::EVERY { Self::Every } else { Self::One(rank) }
    }

    /// The rank of the wire that means this selection.
    #[must_use]
    pub const fn to_rank(self) -> DpRank {
        match self {
            Self::One(rank) => rank,
            Self::Every => DpRank(Self::EVERY),
        }
    }

    /// Whether a rank is selected.
    #[must_use]
    pub fn matches(self, rank: DpRank) -> bool {
        match self {
            Self::One(one) => one == rank,
            Self::Every => true,
        }
    }
}

impl fmt::Display for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.id, self.rank)
    }
}

/// A tier: where a worker holds a block, fastest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Tier {
    /// The accelerator's memory.
    Device = 0,
    /// The host's memory.
    Host = 1,
    /// Local storage.
    Disk = 2,
    /// A remote store, possibly shared.
    External = 3,
}

impl Tier {
    /// Every tier. In this order each tier extends the overlap of the one before.
    pub const ALL: [Self; 4] = [Self::Device, Self::Host, Self::Disk, Self::External];

    /// Its index in [`Tier::ALL`] and in every array by tier.
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }

    /// The lower-case name used in logs, metrics and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
            Self::Disk => "disk",
            Self::External => "external",
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A worker's overlap with a prompt, in blocks by tier. Each lower tier counts only blocks that extend the tier above.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierBlocks {
    /// Leading blocks in device memory.
    pub device: u32,
    /// The run that follows in host memory.
    pub host: u32,
    /// The run that follows on disk.
    pub disk: u32,
    /// The run that follows in an external store.
    pub external: u32,
}

impl TierBlocks {
    /// The overlap over all tiers.
    #[must_use]
    pub const fn total(self) -> u32 {
        self.device + self.host + self.disk + self.external
    }
}

/// How the tokens of consecutive blocks relate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Window {
    /// Without overlap: block `i` covers `[i*size, (i+1)*size)`.
    #[default]
    Plain,
    /// Overlapping by one token, as EAGLE's pairs do: block `i` covers `[i*size, (i+1)*size]`.
    Bigram,
}

/// The hash scheme. A worker's and a prompt's hashes can only be compared if their schemes are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Scheme {
    /// Tokens per block, at least 1.
    pub block_size: u32,
    /// How the tokens of consecutive blocks relate.
    pub window: Window,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_selector_selects_one_rank_or_every_rank_of_its_engine() {
        let [one, every] = [Worker::of_ranks(7, Some(1)), Worker::of_ranks(7, None)];
        let selected = |by: Worker| [(7, 0), (7, 1), (8, 1)].map(|(id, rank)| by.selects(Worker::new(id, rank)));
        assert_eq!((selected(one), selected(every)), ([false, true, false], [true, true, false]));
        assert_eq!((one.ranks(), every.ranks()), (RankSelection::One(DpRank(1)), RankSelection::Every));
        assert_eq!(every, Worker::new(7, u32::MAX), "the number of the wire");
    }
}
