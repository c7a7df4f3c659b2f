//! One node: a run of blocks, and who runs a prompt through all of them.

use super::lists::LIST_WORDS;
use super::words::{LINE_WORDS, Words, halves, word};
use crate::ids::{SpaceId, WorkerIndex};

/// Words of a node: a cache line, in which there is room for the list of one worker.
pub(super) const NODE_WORDS: u32 = LINE_WORDS;
/// Where in a node the list of one worker is.
const ONE_WORKER_AT: u32 = 6;
/// Workers that a list in words of its own has room for at least: those of a cache line.
const ROOM_MIN: u32 = LINE_WORDS / LIST_WORDS;
/// Parents from here on are no nodes but the roots of spaces.
const ROOTS_FROM: u32 = 1 << 31;

/// The parent of a space's first nodes.
pub(super) const fn root_of(space: SpaceId) -> u32 {
    ROOTS_FROM | space.0
}

/// Whether a parent is a node.
pub(super) const fn is_node(parent: u32) -> bool {
    parent < ROOTS_FROM
}

/// A node's words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Node {
    /// The node above, or the root of a space.
    pub(super) parent: u32,
    /// Its blocks.
    pub(super) len: u32,
    /// Where their hashes are.
    pub(super) hashes: u32,
    /// Where the workers are.
    pub(super) list: u32,
    /// How many they are.
    pub(super) workers: u32,
    /// How many find room there.
    pub(super) room: u32,
    /// Prompts that end with its last block.
    pub(super) ends: u32,
    /// Nodes below.
    pub(super) children: u32,
    /// Their numbers, combined by exclusive or: the only one's, where there is one.
    pub(super) only: u32,
    /// The root it is under.
    pub(super) root: u32,
    /// The hash of its first block.
    pub(super) first: u64,
}

/// The list of one worker that is in the node at `at`.
pub(super) const fn own_list(at: u32) -> u32 {
    at + ONE_WORKER_AT
}

/// How many workers a list is given room for that is to hold so many.
pub(super) const fn room_for(workers: u32) -> u32 {
    if workers <= 1 {
        return 1;
    }
    let room = workers.next_power_of_two();
    if room < ROOM_MIN { ROOM_MIN } else { room }
}

impl Node {
    /// The node at `at` as readers see it, who use no more of it. They may be given nonsense, which they find out later.
    #[inline]
    pub(super) fn see(words: &Words, at: u32) -> Self {
        let Some(all) = words.slice(at, NODE_WORDS) else { return Self::default() };
        // Relaxed: the root's sequence says whether they belong together.
        let half = |place: usize| halves(all[place].load(super::Ordering::Relaxed));
        let ((parent, len), (hashes, list), (workers, room)) = (half(0), half(1), half(2));
        let first = all[5].load(super::Ordering::Relaxed);
        Self { parent, len, hashes, list, workers, room, first, ..Self::default() }
    }

    /// The node at `at`, for the writer.
    #[inline]
    pub(super) fn load(words: &Words, at: u32) -> Self {
        let ((ends, children), (only, root)) = (halves(words.load(at + 3)), halves(words.load(at + 4)));
        Self { ends, children, only, root, ..Self::see(words, at) }
    }

    pub(super) fn store(&self, words: &Words, at: u32) {
        words.store(at, word(self.parent, self.len));
        words.store(at + 1, word(self.hashes, self.list));
        words.store(at + 2, word(self.workers, self.room));
        words.store(at + 3, word(self.ends, self.children));
        words.store(at + 4, word(self.only, self.root));
        words.store(at + 5, self.first);
    }

    /// Changes the node at `at`.
    pub(super) fn change(words: &Words, at: u32, change: impl FnOnce(&mut Self)) {
        let mut node = Self::load(words, at);
        change(&mut node);
        node.store(words, at);
    }

    /// Where a worker stands in the list.
    pub(super) fn place_of(&self, words: &Words, worker: WorkerIndex) -> Option<u32> {
        let all = words.slice(self.list, self.workers)?;
        let is_it = |entry: &super::AtomicU64| halves(entry.load(super::Ordering::Relaxed)).0 == worker.0;
        all.iter().position(is_it).map(|place| place as u32)
    }
}
