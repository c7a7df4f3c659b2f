//! The free runs of an arena: their lists, and the bookkeeping that each run stores in its own words.

use super::{ChunkTable, EXTENT_GRANULES_MAX, EXTENTS_GRANULES, GRANULE_BITS};

/// Where the first granule of a run stores its neighbours on its list: the next in the lower half, the previous in the
/// upper half.
const NEIGHBOURS: u32 = 0;
/// Where the first granule of a run stores its length.
const LENGTH: u32 = 1;
const NONE: u32 = u32::MAX;
/// The list of the runs that are longer than any extent; the lists before it are by exact length.
const LONG: usize = EXTENT_GRANULES_MAX as usize;

/// Free runs by length, threaded through the runs themselves. The caller sees to it that a given run is one, and that
/// granules which are handed out are in none: the words of a run belong to these lists.
#[derive(Debug)]
pub(super) struct FreeRuns {
    /// The first run of each list; that of runs of `n` granules is `heads[n - 1]`.
    heads: [u32; LONG + 1],
    /// Which of the lists by exact length have a run.
    filled: u128,
    granules: u32,
    /// Runs that are a whole chunk.
    whole: u32,
}

impl FreeRuns {
    pub(super) const fn new() -> Self {
        Self { heads: [NONE; LONG + 1], filled: 0, granules: 0, whole: 0 }
    }

    pub(super) const fn granules(&self) -> u32 {
        self.granules
    }

    pub(super) const fn whole_chunks(&self) -> u32 {
        self.whole
    }

    /// Takes granules (1 to the most that an extent can have) from the shortest run that is long enough.
    pub(super) fn take_fit(&mut self, memory: &ChunkTable, granules: u32) -> Option<u32> {
        let longer = self.filled >> (granules - 1);
        let list = if longer == 0 { LONG } else { (granules - 1 + longer.trailing_zeros()) as usize };
        let run = self.heads[list];
        if run == NONE {
            return None;
        }
        self.take(memory, run, granules);
        Some(run)
    }

    /// Takes the first granules of a run; the rest stays a run. The low end goes, so that granules in use stay low and
    /// the long runs high.
    pub(super) fn take(&mut self, memory: &ChunkTable, run: u32, granules: u32) {
        let length = self.length(memory, run);
        debug_assert!(granules <= length, "a run is taken from, and not what follows it");
        self.unlink(memory, run);
        if granules < length {
            self.link(memory, run + granules, length - granules);
        }
    }

    /// The length of the run that begins here.
    #[inline]
    pub(super) fn length(&self, memory: &ChunkTable, run: u32) -> u32 {
        load(memory, word(run) + LENGTH) as u32
    }

    /// The length of the run that ends before this granule.
    #[inline]
    pub(super) fn length_before(&self, memory: &ChunkTable, granule: u32) -> u32 {
        load(memory, word(granule) - 1) as u32
    }

    /// Adds a run, which touches no other.
    pub(super) fn link(&mut self, memory: &ChunkTable, run: u32, length: u32) {
        let list = list_of(length);
        let next = self.heads[list];
        store(memory, word(run) + NEIGHBOURS, neighbours(next, NONE));
        store(memory, word(run) + LENGTH, u64::from(length));
        // Computed from the granule's own start: the word behind the last run of all has no number.
        store(memory, word(run + length - 1) + (1 << GRANULE_BITS) - 1, u64::from(length));
        if next != NONE {
            let (after, _) = load_neighbours(memory, next);
            store(memory, word(next) + NEIGHBOURS, neighbours(after, run));
        }
        self.heads[list] = run;
        if list < LONG {
            self.filled |= 1 << list;
        }
        self.granules += length;
        self.whole += u32::from(length == EXTENTS_GRANULES);
    }

    /// Takes a run off its list.
    pub(super) fn unlink(&mut self, memory: &ChunkTable, run: u32) {
        let length = self.length(memory, run);
        let list = list_of(length);
        let (next, before) = load_neighbours(memory, run);
        if next != NONE {
            let (after, _) = load_neighbours(memory, next);
            store(memory, word(next) + NEIGHBOURS, neighbours(after, before));
        }
        if before == NONE {
            self.heads[list] = next;
            if next == NONE && list < LONG {
                self.filled &= !(1 << list);
            }
        } else {
            let (_, earlier) = load_neighbours(memory, before);
            store(memory, word(before) + NEIGHBOURS, neighbours(next, earlier));
        }
        self.granules -= length;
        self.whole -= u32::from(length == EXTENTS_GRANULES);
    }
}

const fn list_of(length: u32) -> usize {
    if length > EXTENT_GRANULES_MAX { LONG } else { length as usize - 1 }
}

/// The first word of a granule.
#[inline]
const fn word(granule: u32) -> u32 {
    granule << GRANULE_BITS
}

#[inline]
fn neighbours(next: u32, before: u32) -> u64 {
    u64::from(next) | u64::from(before) << 32
}

#[inline]
fn load_neighbours(memory: &ChunkTable, run: u32) -> (u32, u32) {
    let both = load(memory, word(run) + NEIGHBOURS);
    (both as u32, (both >> 32) as u32)
}

#[inline]
fn load(memory: &ChunkTable, word: u32) -> u64 {
    // SAFETY: a word of a free run: in an open chunk, which was mapped as zeros, and in no extent.
    unsafe { memory.at(word).read() }
}

#[inline]
fn store(memory: &ChunkTable, word: u32, value: u64) {
    // SAFETY: as in `load`; no reader looks at a free run, and the writer holds `&mut` of these lists.
    unsafe { memory.at(word).write(value) };
}
