//! The memory that the two sides of a lane share.
//!
//! It is an anonymous file that the daemon makes and seals: nobody can shrink it, so no access to it can fail, whatever
//! the other side does. Both map it whole. The only view of it is as atomic words, because the other side may change any
//! of them at any time.
#![expect(unsafe_code, reason = "memory is mapped, and seen as words")]

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread::JoinHandle;

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use super::sizes::LaneSizes;
use crate::error::{Error, Kind, Result};

/// The mapped memory of one lane.
pub struct LaneMemory {
    /// The words of `mapping`.
    words: NonNull<AtomicU64>,
    mapping: Option<Arc<Mapping>>,
    sizes: LaneSizes,
    /// Has its pages made.
    filling: Option<JoinHandle<()>>,
    /// The file, on the side that made it.
    made: Option<OwnedFd>,
    /// What ends when the memory is given back.
    held: Option<Box<dyn Send>>,
    /// Whether its pages stay for whoever still maps it.
    is_left: bool,
}

impl std::fmt::Debug for LaneMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LaneMemory").field("sizes", &self.sizes).field("is_left", &self.is_left).finish_non_exhaustive()
    }
}

// SAFETY: it owns its mapping, which belongs to no thread.
unsafe impl Send for LaneMemory {}

impl LaneMemory {
    /// Makes the memory of a lane: all zero, which is how a lane begins.
    ///
    /// # Errors
    /// [`Kind::System`] where the kernel has none.
    pub fn make(sizes: LaneSizes) -> Result<Self> {
        let file = sealed_file(sizes.memory_bytes()).map_err(|error| cannot("be made", error))?;
        let mapping = Mapping::new(&file, sizes, MapFlags::SHARED).map_err(|error| cannot("be mapped", error))?;
        let mapping = Arc::new(mapping);
        let filled = Arc::clone(&mapping);
        // By a thread of its own: to clear the pages of large rings takes longer than a core may be away.
        let filling = std::thread::Builder::new().name("kvrouted-lane-new".into()).spawn(move || filled.fill());
        let filling =
            filling.inspect_err(|error| tracing::debug!(%error, "the pages of a lane come when they are used"));
        let words = mapping.words;
        Ok(Self {
            words,
            mapping: Some(mapping),
            sizes,
            filling: filling.ok(),
            made: Some(file),
            held: None,
            is_left: false,
        })
    }

    /// Maps what a daemon has made.
    ///
    /// # Errors
    /// [`Kind::Malformed`] if it could shrink or is of another size; [`Kind::System`].
    pub fn map(file: &OwnedFd, sizes: LaneSizes) -> Result<Self> {
        let not_ours = |what: &str| {
            let remedy = "check that the socket is kvrouted's and of the same release";
            Error::new(Kind::Malformed, format!("the daemon's lane is {what}"), remedy)
        };
        let seals =
            fcntl_get_seals(file).map_err(|error| not_ours("no memory").caused_by(std::io::Error::from(error)))?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::SEAL) {
            return Err(not_ours("not sealed"));
        }
        let bytes = fstat(file).map_err(|error| cannot("be looked at", error))?.st_size;
        if u64::try_from(bytes) != Ok(sizes.memory_bytes() as u64) {
            return Err(not_ours("of another size than was said"));
        }
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        let mapping = Mapping::new(file, sizes, flags).map_err(|error| cannot("be mapped", error))?;
        let words = mapping.words;
        let mapping = Some(Arc::new(mapping));
        Ok(Self { words, mapping, sizes, filling: None, made: None, held: None, is_left: false })
    }

    /// A second descriptor of the file, for the other side.
    ///
    /// # Errors
    /// [`Kind::System`] on the side that maps, and where descriptors are short.
    pub fn share(&self) -> Result<OwnedFd> {
        let made = self.made.as_ref().ok_or_else(|| cannot("be shared by who maps it", Errno::BADF))?;
        made.try_clone().map_err(cannot_share)
    }

    /// Leaves its pages to whoever else maps it when this side lets go of it.
    pub const fn leave(&mut self) {
        self.is_left = true;
    }

    /// Keeps a value until the memory is given back, which may be after this is dropped.
    pub fn hold(&mut self, value: impl Send + 'static) {
        self.held = Some(Box::new(value));
    }

    /// How large its rings are.
    #[must_use]
    pub const fn sizes(&self) -> LaneSizes {
        self.sizes
    }

    /// All of it.
    #[must_use]
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is of exactly so many bytes, aligned to a page, readable and writable, and there for as long
        // as `self` is. The file is sealed against shrinking, so every page of it can be accessed. Any bytes are a valid
        // word, and words are only ever accessed as atomics here; what another process does to them is a race with
        // nothing but atomic accesses.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr(), self.sizes.memory_bytes() / size_of::<AtomicU64>()) }
    }
}

impl Drop for LaneMemory {
    fn drop(&mut self) {
        let Some(file) = self.made.take().filter(|_| !self.is_left) else { return };
        let (mapping, filling, held) = (self.mapping.take(), self.filling.take(), self.held.take());
        let bytes = self.sizes.memory_bytes();
        // On a thread of its own: whoever else has the file can hold its lock for as long as a write of theirs takes.
        let give_back = move || {
            // Nobody is to make the pages again. A panic of who did is told by itself.
            let _ = filling.map(JoinHandle::join);
            give_back(&file, bytes);
            drop((mapping, held));
        };
        if let Err(error) = std::thread::Builder::new().name("kvrouted-lane-end".into()).spawn(give_back) {
            tracing::warn!(%error, "the memory of a lane is given back only when its gateway lets go of it");
        }
    }
}

/// A mapping of a lane's file.
struct Mapping {
    words: NonNull<AtomicU64>,
    bytes: usize,
}

// SAFETY: it belongs to no thread, and its words are accessed as atomics only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(file: &impl AsFd, sizes: LaneSizes, flags: MapFlags) -> rustix::io::Result<Self> {
        let bytes = sizes.memory_bytes();
        // SAFETY: no address is asked for, so nothing that is mapped already is touched.
        let address = unsafe { mmap(null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags, file, 0) }?;
        Ok(Self { words: NonNull::new(address.cast()).ok_or(Errno::NOMEM)?, bytes })
    }

    /// Has the kernel make its pages, so that a core finds them there. Those that it does not make come when they are used.
    fn fill(&self) {
        // SAFETY: the mapping is there as long as `self` is, and what lies in it stays as it is.
        let filled = unsafe { madvise(self.words.as_ptr().cast(), self.bytes, Advice::LinuxPopulateWrite) };
        if let Err(error) = filled {
            // Kernels before 5.14 cannot be asked for it.
            tracing::debug!(%error, "the pages of a lane come when they are used");
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `new` made this mapping of so many bytes, and whoever has a view of it holds `self`.
        let unmapped = unsafe { munmap(self.words.as_ptr().cast(), self.bytes) };
        if let Err(error) = unmapped {
            tracing::warn!(%error, "the memory of a lane stays mapped");
        }
    }
}

/// The other side may keep the file for as long as it likes, on this process's account: its pages are given back.
fn give_back(file: &OwnedFd, bytes: usize) {
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    if let Err(error) = fallocate(file, hole, 0, bytes as u64) {
        tracing::warn!(%error, "the memory of a lane is given back only when its gateway lets go of it");
    }
}

fn sealed_file(bytes: usize) -> rustix::io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = match memfd_create("kvrouted-lane", flags | MemfdFlags::NOEXEC_SEAL) {
        // Kernels before 6.3 do not know that it is not to be run.
        Err(Errno::INVAL) => memfd_create("kvrouted-lane", flags),
        made => made,
    }?;
    ftruncate(&file, bytes as u64)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

fn cannot(what: &str, error: Errno) -> Error {
    let remedy = "raise the limits of memory and of open files, or ask without a lane";
    Error::new(Kind::System, format!("the memory of a lane cannot {what}"), remedy)
        .caused_by(std::io::Error::from(error))
}

fn cannot_share(error: std::io::Error) -> Error {
    let remedy = "raise the limit of open files, or ask without a lane";
    Error::new(Kind::System, "the memory of a lane cannot be handed on", remedy).caused_by(error)
}
