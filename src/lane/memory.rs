//! The memory that the two sides of a lane share.
//!
//! It is an anonymous file that the daemon makes and seals: nobody can shrink it, so no access to it can fail, whatever
//! the other side does. Both map it whole. The only view of it is as atomic words, because the other side may change any
//! of them at any time.
//!
//! # What the other side can hold
//!
//! A `write()` from memory that never comes (a userfaultfd, FUSE) keeps the file's inode locked for as long as the other
//! side likes, and whoever else wants that lock waits for it and cannot be killed. So once the other side has the file, this
//! side makes no system call that takes the lock. All that it makes of the file:
//!
//! | call | inode lock | when |
//! |---|---|---|
//! | `memfd_create`, `open` of `/proc/self/fd` | no | before the other side has it |
//! | `ftruncate`, `fcntl(F_ADD_SEALS)` | yes | before the other side has it |
//! | `mmap`, `munmap`, page faults, `madvise(MADV_POPULATE_WRITE)` | no | any time |
//! | `fcntl(F_GET_SEALS)`, `fstat` | no | by the gateway |
//! | `fcntl(F_SETLEASE)` | no | once the lane has ended |
//! | `fallocate(PUNCH_HOLE)` | yes | once nobody else has the file open: nobody is in a `write()` then |
//! | `close` | no, except by the last who has the file | any time |
//!
//! The two sides have file descriptions of their own, so that the kernel knows whether the gateway still has its one: it
//! gives a write lease only where nobody else has the file open. Until then the lane keeps its place among the lanes,
//! because its memory is this process's.
#![expect(unsafe_code, reason = "memory is mapped, and seen as words")]

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread::JoinHandle;

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use super::reclaim::Reclaimer;
use super::sizes::LaneSizes;
use crate::error::{Error, Kind, Result};

/// The command of `fcntl` that chooses the signal of a lease: from `asm-generic/fcntl.h`, where libc does not have it.
const F_SETSIG: libc::c_int = 10;

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
    /// The same file opened once more, until the other side has it.
    for_peer: Option<OwnedFd>,
    /// Gives the memory back, and ends what is held for it.
    reclaim: Option<(Arc<Reclaimer>, Box<dyn Send>)>,
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
        let sealed = sealed_file(sizes.memory_bytes()).map_err(|error| cannot("be made", error))?;
        let (file, for_peer) = (opened_again(&sealed)?, opened_again(&sealed)?);
        drop(sealed);
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
            for_peer: Some(for_peer),
            reclaim: None,
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
        Ok(Self { words, mapping, sizes, filling: None, made: None, for_peer: None, reclaim: None, is_left: false })
    }

    /// The file as the other side is to have it. It can be taken once.
    ///
    /// # Errors
    /// [`Kind::System`] on the side that maps, and where it was taken before.
    pub fn share(&mut self) -> Result<OwnedFd> {
        self.for_peer.take().ok_or_else(|| cannot("be shared twice, or by who maps it", Errno::BADF))
    }

    /// Leaves its pages to whoever else maps it when this side lets go of it.
    pub const fn leave(&mut self) {
        self.is_left = true;
    }

    /// Has the memory given back by `reclaimer` once this is dropped. `held` is kept until then, which is not before the
    /// other side has let go of the file.
    pub fn reclaimed_by(&mut self, reclaimer: &Arc<Reclaimer>, held: impl Send + 'static) {
        self.reclaim = Some((Arc::clone(reclaimer), Box::new(held)));
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
        let (Some(file), Some((reclaimer, held))) = (self.made.take().filter(|_| !self.is_left), self.reclaim.take())
        else {
            return;
        };
        let (mapping, filling, bytes) = (self.mapping.take(), self.filling.take(), self.sizes.memory_bytes());
        reclaimer.take_over(EndedMemory { file, mapping, filling, bytes, _held: held });
    }
}

/// The memory of a lane that has ended, on the side that made it.
pub(super) struct EndedMemory {
    file: OwnedFd,
    mapping: Option<Arc<Mapping>>,
    filling: Option<JoinHandle<()>>,
    bytes: usize,
    /// What ends when the memory is given back.
    _held: Box<dyn Send>,
}

impl EndedMemory {
    /// Gives the memory back, unless the other side still has the file open: then this is to be tried again later. Never
    /// waits for the other side.
    pub(super) fn give_back(mut self) -> Option<Self> {
        // Nobody is to make the pages again.
        if self.filling.as_ref().is_some_and(|filling| !filling.is_finished()) {
            return Some(self);
        }
        // A panic of who made them is told by itself.
        let _ = self.filling.take().map(JoinHandle::join);
        match is_sole_opener(&self.file) {
            Ok(true) => {
                self.mapping = None;
                punch(&self.file, self.bytes);
                None
            }
            Ok(false) => Some(self),
            Err(error) => {
                tracing::warn!(%error, "this kernel gives no leases (fs.leases-enable): the memory of a lane stays until its gateway lets go of it");
                None
            }
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

/// Whether nobody else has the file open. Then nobody else is in a `write()` to it, and until the lease has been broken,
/// which takes the kernel's `fs.lease-break-time`, nobody can open it for one.
///
/// Who has it by a path alone (`O_PATH`) is not seen: such a descriptor keeps the pages, and cannot write.
fn is_sole_opener(file: &OwnedFd) -> rustix::io::Result<bool> {
    // Whoever opens it while the lease is held has the kernel send this signal; its default is to be ignored, that of the
    // usual one to end the process.
    fcntl(file, F_SETSIG, libc::SIGURG)?;
    match fcntl(file, libc::F_SETLEASE, libc::F_WRLCK) {
        Ok(()) => Ok(true),
        Err(Errno::AGAIN) => Ok(false),
        Err(error) => Err(error),
    }
}

/// An `fcntl` with a number, of those that rustix does not know.
fn fcntl(file: &OwnedFd, command: libc::c_int, value: libc::c_int) -> rustix::io::Result<()> {
    // SAFETY: the descriptor is open, and these commands take a number and touch no memory of this process.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, value) } {
        -1 => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)),
        _ => Ok(()),
    }
}

/// Gives back the pages of a file that others may have by a path. Only for who is its sole opener.
fn punch(file: &OwnedFd, bytes: usize) {
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    if let Err(error) = fallocate(file, hole, 0, bytes as u64) {
        tracing::warn!(%error, "the memory of a lane is given back only when its gateway lets go of it");
    }
}

/// A file description of its own for the same file. The one that `memfd_create` gives is not among those that a lease
/// counts.
fn opened_again(file: &OwnedFd) -> Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let opened = File::options().read(true).write(true).open(path);
    opened.map(OwnedFd::from).map_err(|error| {
        let remedy = "mount /proc, raise the limit of open files, or ask without a lane";
        Error::new(Kind::System, "the memory of a lane cannot be opened once more", remedy).caused_by(error)
    })
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
