//! Memory for rows of cache lines that double and halve: a buddy allocator over chunks of one huge page each.
//!
//! Huge pages save TLB misses: a TLB holds the translations of a few thousand pages, and with pages of 4 KiB these cover
//! less memory than the names of a large fleet take. A row has a power of two of lines. A freed row merges with its other
//! half, its buddy, once that is free too. So rows that all double leave no gaps.
//!
//! Free memory is always zeroed.

#![expect(unsafe_code, reason = "memory comes from the system as pointers")]

use super::prefault::CHUNK_BYTES;
use super::{pages, prefault};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::ptr::NonNull;
use std::sync::Arc;

/// Bytes of a line.
const LINE_BYTES: usize = 64;
/// Lines of a chunk, as a power of two.
const CHUNK_ORDER: u32 = (CHUNK_BYTES / LINE_BYTES).ilog2();
/// Bytes of an ordinary page, at most: 4 KiB on x86-64, up to 64 KiB on aarch64. To ask the system takes a call that a
/// sandboxed thread may not make.
const PAGE_BYTES_MAX: usize = 64 << 10;
/// Chunks without a row that keep their memory.
const WHOLE_CHUNKS_KEPT: usize = 1;

/// A row of zeroed lines.
#[derive(Debug)]
pub(super) struct Row {
    start: NonNull<u8>,
    /// Lines, as a power of two.
    order: u32,
    /// The chunk and the line in it; `None` for a row that is larger than a chunk and has a mapping of its own.
    place: Option<u32>,
}

impl Row {
    /// Its first byte, aligned to the size of a line.
    #[inline]
    pub(super) const fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Its lines.
    #[cfg(test)]
    const fn lines(&self) -> usize {
        1 << self.order
    }

    #[cfg(test)]
    const fn bytes(&self) -> usize {
        LINE_BYTES << self.order
    }
}

/// The rows of a shard: those of its name map, and those of its table. The table retires rows as garbage, and they are freed
/// once no reader can see them.
///
/// The writer takes the lock for each row that it allocates or frees. If the writer is gone, the threads that drop its garbage
/// take the lock.
#[derive(Clone, Debug)]
pub(super) struct Rows(Arc<Mutex<RowPool>>);

impl Rows {
    /// A pool without a chunk.
    pub(super) fn new() -> Self {
        Self(Arc::new(Mutex::new(RowPool::new())))
    }

    /// Sets whether a spare chunk is asked for before a row needs it.
    pub(super) fn set_maps_ahead(&self, maps_ahead: bool) {
        self.0.lock().maps_ahead = maps_ahead;
    }

    /// A row of `lines` lines, a power of two. It belongs to the caller until [`free`](Self::free).
    ///
    /// If the system has no memory, the process ends, as with any other allocation.
    pub(super) fn allocate(&self, lines: usize) -> Row {
        self.0.lock().allocate(lines)
    }

    /// Takes a row back.
    pub(super) fn free(&self, row: Row) {
        self.0.lock().free(row);
    }

    /// As [`free`](Self::free), for a row that is known by its first byte and its number of lines.
    ///
    /// # Safety
    /// The row was allocated here, is freed once, and nothing uses it any more.
    pub(super) unsafe fn free_at(&self, start: NonNull<u8>, lines: usize) {
        // SAFETY: the caller's promise, word for word.
        unsafe { self.0.lock().free_at(start, lines) };
    }

    /// Mapped memory that belongs to no row, in bytes. Free pages of the first chunk are given back to the system and do not
    /// count.
    pub(super) fn idle_bytes(&self) -> u64 {
        self.0.lock().idle_bytes() as u64
    }

    /// An upper bound of the bytes by which the pool grows if rows of `rows_bytes` in all are allocated.
    pub(super) fn growth_bytes(&self, rows_bytes: u64) -> u64 {
        self.0.lock().growth_bytes(rows_bytes as usize) as u64
    }
}

/// The chunks, and what is free in them.
#[derive(Debug)]
struct RowPool {
    /// `None` for a chunk that was given back.
    chunks: Vec<Option<NonNull<u8>>>,
    /// The free blocks of each order, by their first lines, counted over all chunks. The lowest is used first, so that
    /// the highest chunks become empty.
    free: [BTreeSet<u32>; CHUNK_ORDER as usize + 1],
    free_lines: usize,
    /// Free lines of the first chunk, part of `free_lines`. Free blocks of a page or more take no memory there,
    /// and smaller ones are not counted.
    first_free_lines: usize,
    /// The order of the largest row so far.
    order_most: u32,
    maps_ahead: bool,
}

// SAFETY: it owns its chunks, like boxes, and gives out disjoint parts of them.
unsafe impl Send for RowPool {}
// SAFETY: as above; a shared reference reads only numbers.
unsafe impl Sync for RowPool {}

impl RowPool {
    /// A pool without a chunk.
    pub(super) fn new() -> Self {
        Self {
            chunks: Vec::new(),
            free: std::array::from_fn(|_| BTreeSet::new()),
            free_lines: 0,
            first_free_lines: 0,
            order_most: 0,
            maps_ahead: false,
        }
    }

    fn allocate(&mut self, lines: usize) -> Row {
        debug_assert!(lines.is_power_of_two(), "a row has a power of two of lines");
        let order = lines.ilog2();
        if order > CHUNK_ORDER {
            let start = mapped(pages::map_huge(lines * LINE_BYTES), lines * LINE_BYTES);
            return Row { start, order, place: None };
        }
        let (found, first) = self.find(order).unwrap_or_else(|| (CHUNK_ORDER, self.open_chunk()));
        self.free[found as usize].remove(&first);
        // The upper halves of what is too large stay free.
        for half in order..found {
            self.free[half as usize].insert(first + (1 << half));
        }
        self.count_free(first, order, false);
        self.order_most = self.order_most.max(order);
        // The next row of that size needs another chunk.
        if self.maps_ahead && self.find(self.order_most).is_none() {
            prefault::ask();
        }
        let chunk = self.chunks[chunk_of(first)].expect("a free block is in a chunk");
        // SAFETY: the line is inside the chunk.
        let start = unsafe { chunk.add(line_of(first) * LINE_BYTES) };
        Row { start, order, place: Some(first) }
    }

    fn free(&mut self, Row { start, order: of, place }: Row) {
        let bytes = LINE_BYTES << of;
        let Some(mut first) = place else {
            // SAFETY: mapped in `allocate` with this size; the row is not used any more.
            return unsafe { pages::unmap(start.as_ptr(), bytes) };
        };
        let is_first = chunk_of(first) == 0;
        // SAFETY: the row's own lines.
        unsafe { start.write_bytes(0, bytes) };
        self.count_free(first, of, true);
        let mut order = of;
        while order < CHUNK_ORDER && self.free[order as usize].remove(&(first ^ 1 << order)) {
            first &= !(1 << order);
            order += 1;
        }
        self.free[order as usize].insert(first);
        if is_first {
            self.discard(first, order);
        }
        if order == CHUNK_ORDER && !is_first {
            self.give_back();
        }
    }

    /// # Safety
    /// As [`Rows::free_at`].
    unsafe fn free_at(&mut self, start: NonNull<u8>, lines: usize) {
        let order = lines.ilog2();
        let line_in = |(at, chunk): (usize, &Option<NonNull<u8>>)| {
            let bytes =
                start.addr().get().checked_sub(chunk.as_ref()?.addr().get()).filter(|bytes| *bytes < CHUNK_BYTES)?;
            Some(((at as u32) << CHUNK_ORDER) + (bytes / LINE_BYTES) as u32)
        };
        let place = if order > CHUNK_ORDER { None } else { self.chunks.iter().enumerate().find_map(line_in) };
        self.free(Row { start, order, place });
    }

    fn idle_bytes(&self) -> usize {
        (self.free_lines - self.first_free_lines) * LINE_BYTES
    }

    fn growth_bytes(&self, bytes: usize) -> usize {
        // If rows are allocated from one block and none is freed, at most one block of each order stays free. So rows fit
        // into a block if their sum is no larger than the block.
        let largest = self.free.iter().rposition(|free| !free.is_empty()).map_or(0, |order| LINE_BYTES << order);
        match bytes {
            _ if bytes <= largest => bytes,
            _ if bytes <= CHUNK_BYTES => bytes + CHUNK_BYTES,
            // If a row does not fit into a chunk, the free part of that chunk is smaller than the row.
            _ => bytes + 2 * bytes.next_multiple_of(CHUNK_BYTES),
        }
    }

    fn find(&self, order: u32) -> Option<(u32, u32)> {
        (order..=CHUNK_ORDER).find_map(|order| self.free[order as usize].first().map(|first| (order, *first)))
    }

    /// Adds a chunk; returns its first line. The first chunk has small pages, so that a shard that holds little takes
    /// little.
    fn open_chunk(&mut self) -> u32 {
        let at = self.chunks.iter().position(Option::is_none).unwrap_or(self.chunks.len());
        let memory = if at == 0 { pages::map_small(CHUNK_BYTES) } else { prefault::chunk() };
        let memory = Some(mapped(memory, CHUNK_BYTES));
        match self.chunks.get_mut(at) {
            Some(chunk) => *chunk = memory,
            None => self.chunks.push(memory),
        }
        let first = (at as u32) << CHUNK_ORDER;
        self.free[CHUNK_ORDER as usize].insert(first);
        self.count_free(first, CHUNK_ORDER, true);
        first
    }

    fn count_free(&mut self, first: u32, order: u32, is_more: bool) {
        let counted = |count: usize| if is_more { count + (1 << order) } else { count - (1 << order) };
        self.free_lines = counted(self.free_lines);
        if chunk_of(first) == 0 {
            self.first_free_lines = counted(self.first_free_lines);
        }
    }

    /// Gives the pages of a free block of the first chunk back to the system, if the block has whole pages. Its lines are
    /// zero even if the system refuses.
    fn discard(&self, first: u32, order: u32) {
        if let Some(chunk) = self.chunks[0]
            && LINE_BYTES << order >= PAGE_BYTES_MAX
        {
            // SAFETY: inside the chunk, and no row's. A block begins at a multiple of its size, so these are whole pages.
            unsafe { pages::discard(chunk.add(line_of(first) * LINE_BYTES).as_ptr(), LINE_BYTES << order) };
        }
    }

    /// Unmaps chunks without a row, the highest first, except for those that are kept and for the first chunk.
    fn give_back(&mut self) {
        let whole = &mut self.free[CHUNK_ORDER as usize];
        while whole.iter().filter(|first| chunk_of(**first) > 0).count() > WHOLE_CHUNKS_KEPT
            && let Some(first) = whole.pop_last()
        {
            self.free_lines -= 1 << CHUNK_ORDER;
            if let Some(chunk) = self.chunks[chunk_of(first)].take() {
                // SAFETY: mapped in `open_chunk` with this size; no row is in it.
                unsafe { pages::unmap(chunk.as_ptr(), CHUNK_BYTES) };
            }
        }
    }
}

impl Drop for RowPool {
    /// Unmaps all chunks. The owners of rows larger than a chunk must have freed them before.
    fn drop(&mut self) {
        for chunk in self.chunks.iter().flatten() {
            // SAFETY: mapped in `open_chunk` with this size; the owner of the pool no longer uses its rows.
            unsafe { pages::unmap(chunk.as_ptr(), CHUNK_BYTES) };
        }
    }
}

const fn chunk_of(line: u32) -> usize {
    (line >> CHUNK_ORDER) as usize
}

const fn line_of(line: u32) -> usize {
    line as usize % (1 << CHUNK_ORDER)
}

/// The memory of a mapping, or the end of the process.
fn mapped(memory: Option<NonNull<u8>>, bytes: usize) -> NonNull<u8> {
    memory.unwrap_or_else(|| match std::alloc::Layout::from_size_align(bytes, LINE_BYTES) {
        Ok(layout) => std::alloc::handle_alloc_error(layout),
        Err(error) => panic!("a row of {bytes} bytes: {error}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    fn lines_of(row: &mut Row) -> &mut [u64] {
        // SAFETY: the row's own lines, initialised, and borrowed with it.
        unsafe { std::slice::from_raw_parts_mut(row.start.as_ptr().cast(), row.bytes() / 8) }
    }

    #[test]
    fn rows_are_zero_and_apart_and_their_memory_comes_back() {
        let mut rng = StdRng::seed_from_u64(1);
        let mut pool = RowPool::new();
        let held =
            |pool: &RowPool| pool.chunks.iter().flatten().count() * CHUNK_BYTES - pool.first_free_lines * LINE_BYTES;
        let mut rows: Vec<(Row, u64)> = Vec::new();
        let orders = if cfg!(miri) { 8 } else { CHUNK_ORDER + 1 };
        for step in 1..if cfg!(miri) { 200 } else { 3_000 } {
            if rng.random_range(0..8) < 4 && !rows.is_empty() {
                let (mut row, mark) = rows.swap_remove(rng.random_range(0..rows.len()));
                assert!(lines_of(&mut row).iter().all(|word| *word == mark));
                pool.free(row);
            } else {
                let order = rng.random_range(0..orders).min(rng.random_range(0..orders));
                let before = (held(&pool), pool.growth_bytes(LINE_BYTES << order));
                let mut row = pool.allocate(1 << order);
                assert!(held(&pool) <= before.0 + before.1, "{before:?}, then {}", held(&pool));
                assert_eq!((row.lines(), row.start().as_ptr() as usize % LINE_BYTES), (1 << order, 0));
                assert!(lines_of(&mut row).iter().all(|word| *word == 0), "free memory is zero");
                lines_of(&mut row).fill(step);
                rows.push((row, step));
            }
        }
        rows.into_iter().for_each(|(row, _)| pool.free(row));
        // What is left is whole: the first chunk, and the one that is kept.
        assert!(pool.idle_bytes() <= WHOLE_CHUNKS_KEPT * CHUNK_BYTES, "{}", pool.idle_bytes());
        assert!(pool.free[..CHUNK_ORDER as usize].iter().all(BTreeSet::is_empty));
    }

    #[test]
    fn many_small_holes_are_no_room_for_a_row() {
        let mut pool = RowPool::new();
        let mut rows: Vec<Row> = (0..1 << CHUNK_ORDER).map(|_| pool.allocate(1)).collect();
        for at in (0..rows.len() / 2).rev() {
            pool.free(rows.swap_remove(2 * at));
        }
        assert_eq!(pool.first_free_lines, 1 << (CHUNK_ORDER - 1));
        assert!(pool.growth_bytes(LINE_BYTES) == LINE_BYTES && pool.growth_bytes(2 * LINE_BYTES) > CHUNK_BYTES);
        let _row = pool.allocate(2);
        assert_eq!(pool.chunks.len(), 2);
    }

    #[test]
    fn a_pool_takes_little_for_little_and_a_mapping_for_a_row_larger_than_a_chunk() {
        let mut pool = RowPool::new();
        let small = pool.allocate(4);
        assert_eq!((small.bytes(), pool.idle_bytes()), (4 * LINE_BYTES, 0));
        if !cfg!(miri) {
            let mut large = pool.allocate(2 << CHUNK_ORDER);
            lines_of(&mut large).fill(1);
            assert_eq!((pool.chunks.len(), pool.idle_bytes()), (1, 0));
            pool.free(large);
        }
        pool.free(small);
        assert_eq!(pool.idle_bytes(), 0);
    }
}
