//! The memory that the two sides of a lane share: the sizes of its rings, its layout, and how it is freed.
//!
//! It is an anonymous file that the daemon makes and seals. No process can shrink it, so no access to it can fail,
//! whatever the other side does. Both sides map it whole. They see it only as atomic words, because the other side may
//! change any word at any time.
//!
//! # Locks that the other side can hold
//!
//! A `write()` from memory that never arrives (a userfaultfd, FUSE) keeps the file's inode locked for as long as the
//! other side likes. A process that waits for that lock cannot be killed. So once the other side has the file, this
//! side makes no system call that takes the lock. These are all its calls on the file:
//!
//! | call | inode lock | when |
//! |---|---|---|
//! | `memfd_create`, `open` of `/proc/self/fd` | no | before the other side has it |
//! | `ftruncate`, `fcntl(F_ADD_SEALS)` | yes | before the other side has it |
//! | `mmap`, `munmap`, page faults, `madvise(MADV_POPULATE_WRITE)` | no | any time |
//! | `fcntl(F_GET_SEALS)`, `fstat` | no | by the gateway |
//! | `fcntl(F_SETLEASE)` | no | before the other side has it, and once the lane has ended |
//! | `fallocate(PUNCH_HOLE)` | yes | once no other process has the file open, so none is in a `write()` |
//! | `close` | no, except for the last descriptor | any time |
//!
//! The two sides have file descriptions of their own. The kernel grants a write lease only if no other process has the
//! file open, so a lease shows that the gateway has closed its description. Until then the lane keeps its place among
//! the lanes, because the memory counts as this process's. Where the kernel grants no leases, no lane is made: the daemon
//! could not tell when one is over, nor bound the memory of those that are.

#![expect(unsafe_code, reason = "memory is mapped, and seen as words")]

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::error::{Error, Kind, Result};
use crate::limits::{
    LANE_CONTROL_BYTES, LANE_RECLAIM_BACK_OFF_MS_MAX, LANE_RECLAIM_BACK_OFF_MS_MIN, LANE_RING_BYTES_CEILING,
    LANE_RING_BYTES_DEFAULT, LANE_RING_BYTES_MIN,
};

/// The command of `fcntl` that chooses the signal of a lease, from `asm-generic/fcntl.h`: libc lacks it.
const F_SETSIG: libc::c_int = 10;

/// The mapped memory of one lane.
pub struct LaneMemory {
    /// The words of `mapping`.
    words: NonNull<AtomicU64>,
    mapping: Option<Arc<Mapping>>,
    sizes: LaneSizes,
    /// The thread that populates the pages.
    filling: Option<JoinHandle<()>>,
    /// The file, on the side that made it.
    made: Option<OwnedFd>,
    /// The same file opened once more, until it is sent to the other side.
    for_peer: Option<OwnedFd>,
    /// Frees the memory, and then drops what is held for it.
    reclaim: Option<(Arc<Reclaimer>, Box<dyn Send>)>,
    /// Whether its pages stay for the other side.
    is_left: bool,
}

impl std::fmt::Debug for LaneMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LaneMemory").field("sizes", &self.sizes).field("is_left", &self.is_left).finish_non_exhaustive()
    }
}

// SAFETY: it owns its mapping, which is not bound to a thread.
unsafe impl Send for LaneMemory {}

impl LaneMemory {
    /// Makes the memory of a new lane: all zero.
    ///
    /// # Errors
    /// [`Kind::System`] if the kernel refuses.
    pub fn make(sizes: LaneSizes) -> Result<Self> {
        let sealed = sealed_file(sizes.memory_bytes()).map_err(|error| cannot("be made", error))?;
        let file = opened_again(&sealed)?;
        drop(sealed);
        check_leases(&file)?;
        let for_peer = opened_again(&file)?;
        let mapping = Mapping::new(&file, sizes, MapFlags::SHARED).map_err(|error| cannot("be mapped", error))?;
        let mapping = Arc::new(mapping);
        let filled = Arc::clone(&mapping);
        // On a thread of its own: clearing the pages of large rings would stop a serving thread for too long.
        let filling = std::thread::Builder::new().name("kvrouted-lane-new".into()).spawn(move || filled.fill());
        let filling =
            filling.inspect_err(|error| tracing::debug!(%error, "the pages of a lane are populated on first use"));
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

    /// Maps the memory that a daemon has made.
    ///
    /// # Errors
    /// [`Kind::Malformed`] if it could shrink or has another size; [`Kind::System`].
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
        let bytes = fstat(file).map_err(|error| cannot("be measured", error))?.st_size;
        if u64::try_from(bytes) != Ok(sizes.memory_bytes() as u64) {
            return Err(not_ours("of another size than the reply says"));
        }
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        let mapping = Mapping::new(file, sizes, flags).map_err(|error| cannot("be mapped", error))?;
        let words = mapping.words;
        let mapping = Some(Arc::new(mapping));
        Ok(Self { words, mapping, sizes, filling: None, made: None, for_peer: None, reclaim: None, is_left: false })
    }

    /// The file for the other side. It can be taken once.
    ///
    /// # Errors
    /// [`Kind::System`] on the side that maps, and on a second call.
    pub fn share(&mut self) -> Result<OwnedFd> {
        self.for_peer.take().ok_or_else(|| cannot("be shared twice, or by the side that maps it", Errno::BADF))
    }

    /// Keeps the pages for the other side after this value is dropped.
    pub const fn leave(&mut self) {
        self.is_left = true;
    }

    /// Lets `reclaimer` free the memory after this value is dropped, once the other side has closed the file. `held` is
    /// dropped then.
    pub fn reclaimed_by(&mut self, reclaimer: &Arc<Reclaimer>, held: impl Send + 'static) {
        self.reclaim = Some((Arc::clone(reclaimer), Box::new(held)));
    }

    /// The sizes of its rings.
    #[must_use]
    pub const fn sizes(&self) -> LaneSizes {
        self.sizes
    }

    /// All words of the memory.
    #[must_use]
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping has exactly these bytes, is aligned to a page, readable and writable, and lives as long
        // as `self`. The file is sealed against shrinking, so every page of it can be accessed. Any bytes are a valid
        // word, and this process accesses words only as atomics, so what another process does to them races with atomic
        // accesses only.
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
        reclaimer.add(EndedMemory { file, mapping, filling, bytes, is_logged: false, _held: held });
    }
}

/// The memory of a lane that has ended, on the side that made it.
struct EndedMemory {
    file: OwnedFd,
    mapping: Option<Arc<Mapping>>,
    filling: Option<JoinHandle<()>>,
    bytes: usize,
    /// Whether the log says why it is not freed.
    is_logged: bool,
    /// Dropped when the memory is freed.
    _held: Box<dyn Send>,
}

impl EndedMemory {
    /// Frees the memory, unless the other side still has the file open, or may have: then it returns `self` for a later
    /// try. It never waits for the other side.
    fn free(mut self) -> Option<Self> {
        // The filling thread would populate the pages again.
        if self.filling.as_ref().is_some_and(|filling| !filling.is_finished()) {
            return Some(self);
        }
        // A panic of the filling thread has reported itself.
        let _ = self.filling.take().map(JoinHandle::join);
        match is_sole_opener(&self.file) {
            Ok(true) => {
                self.mapping = None;
                punch(&self.file, self.bytes);
                None
            }
            Ok(false) => Some(self),
            Err(error) => {
                if !std::mem::replace(&mut self.is_logged, true) {
                    tracing::warn!(
                        %error,
                        "the kernel no longer grants leases (fs.leases-enable): an ended lane counts against serve.lanes_max until it does"
                    );
                }
                Some(self)
            }
        }
    }
}

/// A mapping of a lane's file.
struct Mapping {
    words: NonNull<AtomicU64>,
    bytes: usize,
}

// SAFETY: it is not bound to a thread, and its words are accessed as atomics only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(file: &impl AsFd, sizes: LaneSizes, flags: MapFlags) -> rustix::io::Result<Self> {
        let bytes = sizes.memory_bytes();
        // SAFETY: no address is requested, so no existing mapping is touched.
        let address = unsafe { mmap(null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags, file, 0) }?;
        Ok(Self { words: NonNull::new(address.cast()).ok_or(Errno::NOMEM)?, bytes })
    }

    /// Makes the kernel populate the pages, so that a serving thread finds them there. Other pages are populated on
    /// first use.
    fn fill(&self) {
        // SAFETY: the mapping lives as long as `self`, and its contents stay unchanged.
        let filled = unsafe { madvise(self.words.as_ptr().cast(), self.bytes, Advice::LinuxPopulateWrite) };
        if let Err(error) = filled {
            // Kernels before 5.14 do not have this advice.
            tracing::debug!(%error, "the pages of a lane are populated on first use");
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `new` made this mapping of `bytes` bytes, and every view of it borrows from `self`.
        let unmapped = unsafe { munmap(self.words.as_ptr().cast(), self.bytes) };
        if let Err(error) = unmapped {
            tracing::warn!(%error, "the memory of a lane stays mapped");
        }
    }
}

/// Whether no other process has the file open. Then none is in a `write()` to it, and none can open it for one until
/// the lease is broken, which takes the kernel's `fs.lease-break-time`.
///
/// A descriptor of the path alone (`O_PATH`) is not seen. It keeps the pages, and cannot write.
fn is_sole_opener(file: &OwnedFd) -> rustix::io::Result<bool> {
    // The kernel sends this signal if a process opens the file while the lease is held. By default it is ignored; the
    // usual signal would end the process.
    fcntl(file, F_SETSIG, libc::SIGURG)?;
    match fcntl(file, libc::F_SETLEASE, libc::F_WRLCK) {
        Ok(()) => Ok(true),
        Err(Errno::AGAIN) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether the kernel grants leases on a file that no other process has open.
///
/// # Errors
/// [`Kind::System`] if it does not.
fn check_leases(file: &OwnedFd) -> Result<()> {
    let checked = match is_sole_opener(file) {
        Ok(true) => fcntl(file, libc::F_SETLEASE, libc::F_UNLCK),
        checked => checked.map(drop),
    };
    checked.map_err(|error| {
        let message = "the kernel grants no leases, which show when the memory of a lane can be freed";
        let remedy = "set fs.leases-enable to 1, or ask without a lane";
        Error::new(Kind::System, message, remedy).caused_by(std::io::Error::from(error))
    })
}

/// An `fcntl` with a number, for commands that rustix lacks.
fn fcntl(file: &OwnedFd, command: libc::c_int, value: libc::c_int) -> rustix::io::Result<()> {
    // SAFETY: the descriptor is open, and these commands take a number and touch no memory of this process.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, value) } {
        -1 => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)),
        _ => Ok(()),
    }
}

/// Frees the pages of a file that other processes may hold by a path. Only its sole opener may call it.
fn punch(file: &OwnedFd, bytes: usize) {
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    if let Err(error) = fallocate(file, hole, 0, bytes as u64) {
        tracing::warn!(%error, "the memory of a lane is freed only when its gateway closes it");
    }
}

/// Another file description of the same file. A lease does not count the one that `memfd_create` returns.
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
        // Kernels before 6.3 lack NOEXEC_SEAL.
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

/// The version of the layout below. A gateway that does not know it must not map the memory.
pub const LANE_LAYOUT: u16 = 1;
/// Words before the rings.
const CONTROL_WORDS: usize = LANE_CONTROL_BYTES / 8;
/// Words between two that different sides write: two cache lines, because processors fetch them in pairs.
const APART_WORDS: usize = 16;

/// The sizes of a lane's two rings, bytes: powers of two, within limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneSizes {
    request_bytes: u32,
    reply_bytes: u32,
}

/// The control words of a lane's memory, in this order, each [`APART_WORDS`] from the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ControlWord {
    RequestTail,
    RequestHead,
    ReplyTail,
    ReplyHead,
    GatewayWaits,
    DaemonWaits,
}

impl ControlWord {
    /// Its index among all words.
    pub(super) const fn index(self) -> usize {
        self as usize * APART_WORDS
    }
}

impl LaneSizes {
    /// The sizes that a gateway requests, with a limit of `bytes_max` for each ring; 0 = the default.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] with the valid sizes.
    pub fn requested(request_bytes: u32, reply_bytes: u32, bytes_max: u32) -> Result<Self> {
        let usual = |bytes: u32| if bytes == 0 { LANE_RING_BYTES_DEFAULT.min(bytes_max) } else { bytes };
        let (request_bytes, reply_bytes) = (usual(request_bytes), usual(reply_bytes));
        for bytes in [request_bytes, reply_bytes] {
            if !bytes.is_power_of_two() || !(LANE_RING_BYTES_MIN..=bytes_max).contains(&bytes) {
                return Err(Error::new(
                    Kind::InvalidArgument,
                    format!("a ring of {bytes} bytes"),
                    format!("ask for a power of two from {LANE_RING_BYTES_MIN} to {bytes_max}, or for 0"),
                ));
            }
        }
        Ok(Self { request_bytes, reply_bytes })
    }

    /// The sizes in a daemon's reply.
    ///
    /// # Errors
    /// As [`LaneSizes::requested`].
    pub fn granted(request_bytes: u32, reply_bytes: u32) -> Result<Self> {
        Self::requested(request_bytes, reply_bytes, LANE_RING_BYTES_CEILING)
    }

    /// Bytes of the request ring.
    #[must_use]
    pub const fn request_bytes(self) -> u32 {
        self.request_bytes
    }

    /// Bytes of the reply ring.
    #[must_use]
    pub const fn reply_bytes(self) -> u32 {
        self.reply_bytes
    }

    /// Bytes of the lane's memory.
    #[must_use]
    pub const fn memory_bytes(self) -> usize {
        LANE_CONTROL_BYTES + self.request_bytes as usize + self.reply_bytes as usize
    }

    pub(super) const fn request_words(self) -> Range<usize> {
        CONTROL_WORDS..CONTROL_WORDS + self.request_bytes as usize / 8
    }

    pub(super) const fn reply_words(self) -> Range<usize> {
        let start = self.request_words().end;
        start..start + self.reply_bytes as usize / 8
    }
}

const _: () = assert!(ControlWord::DaemonWaits.index() + APART_WORDS <= CONTROL_WORDS);

/// Frees the memory of ended lanes once their gateways have closed it. A thread tries this while there are any.
#[derive(Default)]
pub struct Reclaimer {
    ended: Mutex<Ended>,
    /// Notified when a lane ends.
    arrived: Condvar,
}

#[derive(Default)]
struct Ended {
    memories: Vec<EndedMemory>,
    /// Those that the thread is trying.
    in_hand: usize,
    is_running: bool,
}

impl std::fmt::Debug for Reclaimer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reclaimer").field("waiting", &self.waiting()).finish()
    }
}

impl Reclaimer {
    /// The number of ended lanes whose memory is not freed yet.
    #[must_use]
    pub fn waiting(&self) -> usize {
        let ended = self.ended.lock();
        ended.memories.len() + ended.in_hand
    }

    /// Adds the memory of a lane that has ended. Never waits.
    fn add(self: &Arc<Self>, memory: EndedMemory) {
        let mut ended = self.ended.lock();
        ended.memories.push(memory);
        self.arrived.notify_one();
        if ended.is_running {
            return;
        }
        let reclaimer = Arc::clone(self);
        // On a thread of its own: freeing the pages of large rings would stop a serving thread for too long.
        match std::thread::Builder::new().name("kvrouted-lane-end".into()).spawn(move || reclaimer.run()) {
            Ok(_) => ended.is_running = true,
            Err(error) => {
                tracing::warn!(%error, "the memory of ended lanes is freed when the next lane ends");
            }
        }
    }

    /// Tries until all memory is freed, with growing pauses while no further lane ends.
    fn run(&self) {
        let mut back_off_ms = LANE_RECLAIM_BACK_OFF_MS_MIN;
        loop {
            let memories = {
                let mut ended = self.ended.lock();
                ended.in_hand = ended.memories.len();
                std::mem::take(&mut ended.memories)
            };
            let held: Vec<EndedMemory> = memories.into_iter().filter_map(EndedMemory::free).collect();
            let mut ended = self.ended.lock();
            let has_new = !ended.memories.is_empty();
            ended.in_hand = 0;
            ended.memories.extend(held);
            if ended.memories.is_empty() {
                ended.is_running = false;
                return;
            }
            let arrived = has_new || !self.arrived.wait_for(&mut ended, Duration::from_millis(back_off_ms)).timed_out();
            back_off_ms = if arrived {
                LANE_RECLAIM_BACK_OFF_MS_MIN
            } else {
                (back_off_ms * 2).min(LANE_RECLAIM_BACK_OFF_MS_MAX)
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file on which the kernel grants no lease, as on all files if `fs.leases-enable` is 0.
    fn without_leases() -> OwnedFd {
        std::io::pipe().expect("a pipe").0.into()
    }

    #[test]
    fn memory_whose_holders_the_kernel_does_not_show_stays_counted_and_none_is_made() {
        let (held, given_back) = std::sync::mpsc::channel::<()>();
        let (file, bytes) = (without_leases(), LANE_RING_BYTES_MIN as usize);
        let ended = EndedMemory { file, mapping: None, filling: None, bytes, is_logged: false, _held: Box::new(held) };
        let ended = ended.free().and_then(EndedMemory::free).expect("a later try");
        assert_eq!(given_back.try_recv(), Err(std::sync::mpsc::TryRecvError::Empty));
        drop(ended);
        let refused = check_leases(&without_leases()).unwrap_err();
        assert!(refused.kind() == Kind::System && refused.remedy().contains("fs.leases-enable"), "{refused}");
    }

    #[test]
    fn sizes_are_powers_of_two_within_bounds_and_rings_do_not_overlap() {
        let usual = LaneSizes::requested(0, 0, LANE_RING_BYTES_CEILING).unwrap();
        assert_eq!([usual.request_bytes(), usual.reply_bytes()], [LANE_RING_BYTES_DEFAULT; 2]);
        assert_eq!(LaneSizes::requested(0, 0, 8192).unwrap().request_bytes(), 8192, "the limit");
        for refused in [1, 4095, 4097, 6000, 2 * 8192, u32::MAX, 1 << 31] {
            assert_eq!(LaneSizes::requested(refused, 0, 8192).unwrap_err().kind(), Kind::InvalidArgument);
            assert_eq!(LaneSizes::requested(0, refused, 8192).unwrap_err().kind(), Kind::InvalidArgument);
        }
        let sizes = LaneSizes::requested(4096, 8192, 8192).unwrap();
        assert_eq!((sizes.request_words().len() * 8, sizes.reply_words().len() * 8), (4096, 8192));
        assert_eq!(sizes.reply_words().end * 8, sizes.memory_bytes());
        assert_eq!(sizes.request_words().end, sizes.reply_words().start);
    }
}
