//! Newtypes for everything that would otherwise be a bare integer at a boundary.
//!
//! Units are part of the name or of the doc line. None of these types knows how it travels: the wire
//! and the engines' formats convert at their own edge.

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
    /// An engine instance, as the operator or the gateway names it.
    WorkerId(u64)
}
newtype! {
    /// A data-parallel rank of a worker. Each rank has a cache, an event stream and a load of its own.
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
    /// Whatever an engine calls a block. An opaque handle, never compared across workers.
    EngineHash(u64)
}
newtype! {
    /// Position of an event batch in its publisher's stream, from 0.
    EventSeq(u64)
}
newtype! {
    /// A (model, namespace, pool role), interned. Spaces share nothing.
    SpaceId(u32)
}
newtype! {
    /// One ingest thread and everything only it may write.
    ShardId(u16)
}
newtype! {
    /// A dense number of a worker within its shard, the index's name for it.
    WorkerSlot(u16)
}
newtype! {
    /// A worker's place in the fleet table, and which of the workers that had the place it is: never another
    /// worker's in one daemon run. The first of a place has the place itself as its number.
    WorkerIndex(u32)
}
newtype! {
    /// A KV-cache group of a hybrid model; 0 where there is only one.
    GroupId(u32)
}
newtype! {
    /// The XXH3 seed that LoRA and salt give a chain. Blocks with different seeds never match.
    Seed(u64)
}
newtype! {
    /// Echoed by the daemon on every reply; chosen by the gateway.
    CorrelationId(u64)
}

/// Bits of a [`WorkerIndex`] that say the place.
pub const WORKER_PLACE_BITS: u32 = 12;

impl WorkerIndex {
    /// How many workers may have a place one after another.
    pub const GENERATIONS: u32 = 1 << (u32::BITS - WORKER_PLACE_BITS);

    /// The worker that is number `generation`, from 0, to have a place.
    #[must_use]
    pub const fn at(place: u16, generation: u32) -> Self {
        Self(generation << WORKER_PLACE_BITS | place as u32)
    }

    /// Its place in every table of workers, below `WORKERS_MAX`.
    #[must_use]
    pub const fn place(self) -> usize {
        (self.0 & ((1 << WORKER_PLACE_BITS) - 1)) as usize
    }

    /// How many had the place before it.
    #[must_use]
    pub const fn generation(self) -> u32 {
        self.0 >> WORKER_PLACE_BITS
    }
}

/// One candidate of a decision: a data-parallel rank of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Worker {
    /// The engine instance.
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

/// The ranks that a selector names: an allow-list, a pin, a report, or an operator's command.
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

/// Where a worker keeps a block, nearest to the compute first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Tier {
    /// The accelerator's own memory.
    Device = 0,
    /// The host's memory.
    Host = 1,
    /// Local storage.
    Disk = 2,
    /// A store shared with others.
    External = 3,
}

impl Tier {
    /// Every tier, in the order in which each extends the one before.
    pub const ALL: [Self; 4] = [Self::Device, Self::Host, Self::Disk, Self::External];

    /// Its place in [`Tier::ALL`] and in every `[_; 4]` indexed by tier.
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

/// Blocks of one prompt that one worker holds, tier by tier; each lower tier counts only what
/// extends the tier above.
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
    /// Every block that need not be computed again, whichever tier holds it.
    #[must_use]
    pub const fn total(self) -> u32 {
        self.device + self.host + self.disk + self.external
    }
}

/// How the tokens of consecutive blocks lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Window {
    /// Side by side: block `i` covers `[i*size, (i+1)*size)`.
    #[default]
    Plain,
    /// Overlapping by one token, as EAGLE's pairs do: block `i` covers `[i*size, (i+1)*size]`.
    Bigram,
}

/// What must agree between a worker and a prompt for their hashes to mean the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Scheme {
    /// Tokens per block, at least 1.
    pub block_size: u32,
    /// How blocks' tokens lie.
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
