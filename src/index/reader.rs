//! The read half: what a serving core asks.

use super::trie::Trie;
use super::walk::Walk;
use crate::ids::{LocalHash, ShardId, TierBlocks, WorkerSlot};
use left_right::ReadHandle;

/// A reader of one shard. Clone it for every thread; it is `Send`, and no two threads share one.
#[derive(Clone, Debug)]
pub struct ShardReader {
    id: ShardId,
    trie: ReadHandle<Trie>,
}

impl ShardReader {
    pub(super) const fn new(id: ShardId, trie: ReadHandle<Trie>) -> Self {
        Self { id, trie }
    }

    /// The shard that is read.
    #[must_use]
    pub const fn id(&self) -> ShardId {
        self.id
    }
}

/// A reader of every shard of a space.
#[derive(Clone, Debug)]
pub struct IndexReader {
    shards: Vec<ShardReader>,
}

/// How a lookup went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lookup {
    /// Publishes the answer reflects, summed over the shards.
    pub epoch: u64,
    /// A shard changed so often under the reader that the answer may mix two of its boundaries.
    pub contended: bool,
}

impl IndexReader {
    /// A reader of these shards.
    #[must_use]
    pub const fn new(shards: Vec<ShardReader>) -> Self {
        Self { shards }
    }

    /// Fills `out` with what every worker holds of a prompt whose blocks have the hashes `locals`.
    ///
    /// Takes no lock and waits for nobody; allocates nothing once `out` has seen as many workers. A shard
    /// whose writer has gone holds nothing. Every shard is answered as of one publish (see the module).
    pub fn lookup(&self, locals: &[LocalHash], out: &mut Depths) -> Lookup {
        let mut lookup = Lookup::default();
        out.shards.resize_with(self.shards.len(), ShardDepths::default);
        for (reader, depths) in self.shards.iter().zip(&mut out.shards) {
            depths.shard = reader.id;
            match reader.trie.enter() {
                Some(trie) => {
                    out.walk.run(&trie, locals, &mut depths.workers);
                    lookup.epoch += trie.publishes();
                }
                None => depths.workers.clear(),
            }
        }
        lookup
    }
}

/// A caller's buffer for the answer to a lookup. Reuse it: a warm one is filled without allocating.
#[derive(Clone, Debug, Default)]
pub struct Depths {
    shards: Vec<ShardDepths>,
    walk: Walk,
}

#[derive(Clone, Debug, Default)]
struct ShardDepths {
    shard: ShardId,
    workers: Vec<TierBlocks>,
}

impl Depths {
    /// An empty buffer.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// What one worker holds; nothing for a worker that the lookup did not meet.
    #[must_use]
    pub fn of(&self, shard: ShardId, slot: WorkerSlot) -> TierBlocks {
        self.shard(shard).get(usize::from(slot.0)).copied().unwrap_or_default()
    }

    /// What the workers of one shard hold, by slot. A slot beyond the end holds nothing.
    #[must_use]
    pub fn shard(&self, shard: ShardId) -> &[TierBlocks] {
        let likely = self.shards.get(usize::from(shard.0)).filter(|depths| depths.shard == shard);
        let found = likely.or_else(|| self.shards.iter().find(|depths| depths.shard == shard));
        found.map_or(&[], |depths| depths.workers.as_slice())
    }
}
