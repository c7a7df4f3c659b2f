//! Where the chunks are, for the writer and for every reader.

use super::{CHUNK_BYTES, CHUNK_WORDS, CHUNKS_MAX, chunk};
use crate::index::ahead::Ahead;
use crate::index::pages;
use crate::index::prefetch::prefetch;
use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The chunks, by number. There is room for all from the beginning, so that the table itself never moves.
pub(super) struct Directory {
    /// Null where there is no chunk yet; set once, by the writer.
    chunks: Box<[AtomicPtr<u64>]>,
}

impl Directory {
    pub(super) fn new() -> Self {
        Self { chunks: (0..CHUNKS_MAX).map(|_| AtomicPtr::new(ptr::null_mut())).collect() }
    }

    /// Makes a chunk of the memory that was mapped ahead, or of memory that nobody has touched; only the writer calls
    /// this. `None` if the system has no memory, or if the chunk has no number.
    ///
    /// The first chunk has small pages: a shard that holds little takes little, and no event waits for a huge page.
    pub(super) fn open(&self, chunk: usize, ahead: &mut Ahead) -> Option<()> {
        let place = self.chunks.get(chunk)?;
        let new = || if chunk == 0 { pages::map_aligned(CHUNK_BYTES) } else { pages::map_huge(CHUNK_BYTES) };
        let memory = ahead.take().or_else(new)?.as_ptr().cast::<u64>();
        // Release: pairs with the Acquire of `ArenaView::words`. What is in the words is published later, by
        // whatever tells the reader their index; this only orders the chunk itself.
        place.store(memory, Ordering::Release);
        Some(())
    }

    /// Gives the memory of a chunk back to the system; its words are zeros from now on. Only the writer calls this, for
    /// a chunk of which no reader looks at any word.
    pub(super) fn discard(&self, chunk: usize) {
        // Relaxed: the writer reads what the writer stored.
        if let Some(memory) = ptr::NonNull::new(self.chunks[chunk].load(Ordering::Relaxed)) {
            // SAFETY: mapped in or for `open` with this size; nobody looks at it.
            unsafe { pages::discard(memory.as_ptr().cast(), CHUNK_BYTES) };
        }
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.chunks)
    }

    /// The address of a word; only for the writer.
    ///
    /// # Safety
    /// The chunk of the word has been opened by this thread, or by one it was handed the arena from.
    #[inline]
    pub(super) unsafe fn at(&self, word: u32) -> *mut u64 {
        // Relaxed: the writer reads what the writer stored.
        let base = self.chunks[chunk(word)].load(Ordering::Relaxed);
        // SAFETY: the caller says that there is a chunk, and the remainder is inside it.
        unsafe { base.add((word % CHUNK_WORDS) as usize) }
    }

    /// Words for the writer to read.
    ///
    /// # Safety
    /// As `at`, and the words are all in that chunk, initialised, and not written while the slice lives.
    #[inline]
    pub(super) unsafe fn words(&self, base: u32, len: u32) -> &[u64] {
        // SAFETY: the caller's, word for word.
        unsafe { std::slice::from_raw_parts(self.at(base), len as usize) }
    }

    #[inline]
    pub(super) fn prefetch(&self, word: u32) {
        // Relaxed: a hint reads nothing, so there is nothing to be ordered.
        let base = self.chunks[chunk(word)].load(Ordering::Relaxed);
        prefetch(base.wrapping_add((word % CHUNK_WORDS) as usize).cast());
    }
}

impl fmt::Debug for Directory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Relaxed: a number for people.
        let open = self.chunks.iter().take_while(|chunk| !chunk.load(Ordering::Relaxed).is_null()).count();
        f.debug_struct("Directory").field("chunks", &open).finish()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        for place in &mut self.chunks {
            let memory = *place.get_mut();
            if memory.is_null() {
                break; // chunks are opened in order
            }
            // SAFETY: mapped in or for `open`; the last of arena and views is going.
            unsafe { pages::unmap(memory.cast(), CHUNK_BYTES) };
        }
    }
}

/// The words of an [`Arena`](super::Arena), for one who reads while the writer writes others.
#[derive(Clone, Debug)]
pub(in crate::index) struct ArenaView {
    directory: Arc<Directory>,
}

impl ArenaView {
    pub(super) fn new(directory: Arc<Directory>) -> Self {
        Self { directory }
    }

    /// These words. None if there is no such chunk or if they would cross its end.
    ///
    /// # Safety
    /// The words have been handed out by the arena, whoever told their index did so after they were written (so
    /// that their content is visible here), and they are not written while the slice lives: a grace period has to
    /// pass between the last moment at which a reader can learn of them and the first write to them.
    #[inline]
    pub(in crate::index) unsafe fn words(&self, base: u32, len: u32) -> &[u64] {
        let inside = (base % CHUNK_WORDS) as usize;
        // Acquire: pairs with the Release of `Directory::open`.
        let memory = self.directory.chunks[chunk(base)].load(Ordering::Acquire);
        if memory.is_null() || inside + len as usize > CHUNK_WORDS as usize {
            return &[];
        }
        // SAFETY: inside the chunk, as just checked; initialised and unchanging, as the caller says.
        unsafe { std::slice::from_raw_parts(memory.add(inside), len as usize) }
    }

    /// Asks for the line of this word.
    #[inline]
    pub(in crate::index) fn prefetch(&self, word: u32) {
        self.directory.prefetch(word);
    }
}
