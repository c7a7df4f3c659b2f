//! The I/O backend of the cores' sockets: epoll, or io_uring if the operator asks for it and it works.
//!
//! Where a core has a processor to itself, a request over tokio-uring costs it 13 to 46 % more time than over epoll
//! (perf/results). It costs less only where a gateway with several connections shares the processor. So epoll is the
//! default. Epoll driven by hand was as fast as a ring driven by hand, or faster, so that there is no third backend.
//!
//! # Probe
//!
//! Containers often deny io_uring; some deny its set-up, and some only its use. A runtime on a ring that it cannot
//! enter would hang and then panic. So a plain ring with the real flags must first complete an operation, on a thread
//! that can be left behind if it never returns.
//!
//! # epoll
//!
//! A socket is registered for readability only. A socket that is registered for writability as well, as tokio's own
//! streams are, becomes ready once more whenever its peer takes a reply: a core that sleeps would wake twice for every
//! request, the second time for nothing. A writer that has to wait for space, which is rare, registers the socket once
//! more for that time.
//!
//! # io_uring
//!
//! tokio-uring 0.5 has these requirements:
//!
//! * The probe has passed before the runtime starts, with COOP_TASKRUN and SINGLE_ISSUER but never DEFER_TASKRUN:
//!   tokio-uring waits by epoll on the ring, and would hang.
//! * Listeners are tokio's, because its own cannot bind.
//! * Sockets are blocking, because O_NONBLOCK would turn a read that has to wait into EAGAIN.
//! * Every operation is awaited to its end, because a dropped read goes on and eats data.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::task::{Context, Poll, ready};
use std::thread;
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode};
use rustix::buffer::spare_capacity;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio_uring::buf::BoundedBuf;

use super::busy_poll::PollCost;
use crate::config::IoSetting;
use crate::error::{Error, Kind, Result};
use crate::limits::{IO_PROBE_MS_MAX, SOCKET_POLL_COST, URING_ENTRIES, WRITE_RETRY_MS};
use crate::sandbox::{self, ThreadKind};

/// What the sockets of the cores run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoBackend {
    /// io_uring, by tokio-uring.
    Uring,
    /// epoll, by tokio.
    Epoll,
}

impl IoBackend {
    /// The name in logs and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Uring => "uring",
            Self::Epoll => "epoll",
        }
    }
}

impl fmt::Display for IoBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Chooses the backend of all cores, once, at start. Cores that busy-poll (`spins`) run on epoll: tokio-uring gives its
/// operations to the kernel only when its thread goes to sleep.
///
/// # Errors
/// [`Kind::System`] with the probe's reason if io_uring is asked for and does not work. [`Kind::Config`] if it is asked
/// for and the cores are to busy-poll.
pub fn choose_io_backend(setting: IoSetting, spins: bool) -> Result<IoBackend> {
    match setting {
        IoSetting::Auto | IoSetting::Epoll => {
            tracing::info!(io = %IoBackend::Epoll, "I/O backend");
            Ok(IoBackend::Epoll)
        }
        IoSetting::Uring if spins => {
            let remedy = "set serve.io to auto or epoll, or serve.spin_us_max to 0";
            Err(Error::new(Kind::Config, "serving threads on io_uring cannot busy-poll", remedy))
        }
        IoSetting::Uring => {
            probe_uring()?;
            tracing::info!(io = %IoBackend::Uring, "I/O backend, as configured");
            Ok(IoBackend::Uring)
        }
    }
}

/// Whether a ring with the flags of the real ones completes an operation in time.
///
/// # Errors
/// [`Kind::System`] with the step that failed.
pub fn probe_uring() -> Result<()> {
    let (send, receive) = mpsc::sync_channel(1);
    let probe = move || {
        // The receiver has gone if this comes after the deadline.
        let _ = send.send(complete_one_nop());
    };
    thread::Builder::new()
        .name("kvrouted-io-probe".to_owned())
        .spawn(probe)
        .map_err(|error| refused("no probe thread", error))?;
    match receive.recv_timeout(Duration::from_millis(IO_PROBE_MS_MAX * 2)) {
        Ok(outcome) => outcome,
        Err(_) => Err(refused("the io_uring probe", std::io::ErrorKind::TimedOut.into())),
    }
}

#[expect(unsafe_code, reason = "io-uring takes queue entries by an unsafe call")]
fn complete_one_nop() -> Result<()> {
    let mut ring: IoUring = IoUring::builder()
        .setup_coop_taskrun()
        .setup_single_issuer()
        .build(URING_ENTRIES)
        .map_err(|error| refused("io_uring_setup", error))?;
    let entry = opcode::Nop::new().build().user_data(1);
    // SAFETY: a no-op refers to no memory.
    let pushed = unsafe { ring.submission().push(&entry) };
    pushed.map_err(|_| refused("the ring's queue", std::io::ErrorKind::StorageFull.into()))?;
    ring.submit().map_err(|error| refused("io_uring_enter", error))?;
    let deadline = Instant::now() + Duration::from_millis(IO_PROBE_MS_MAX);
    while Instant::now() < deadline {
        if ring.completion().next().is_some() {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(1));
    }
    Err(refused("an io_uring no-op", std::io::ErrorKind::TimedOut.into()))
}

fn refused(what: &str, error: std::io::Error) -> Error {
    let remedy =
        "use --io auto or epoll, or allow io_uring (kernel.io_uring_disabled, the container's seccomp profile)";
    Error::new(Kind::System, format!("io_uring does not work here: {what} failed"), remedy).caused_by(error)
}

/// A connected stream. Its futures are always awaited to their end: an io_uring operation that is dropped goes on and
/// takes the bytes it reads. [`Stream::shutdown`] ends one.
pub(super) trait Stream: Sized + 'static {
    /// Takes over a connected socket.
    fn from_std(stream: UnixStream) -> io::Result<Self>;
    /// The cost of one [`Stream::try_read`].
    fn poll_cost(&self) -> PollCost {
        PollCost::Impossible
    }
    /// Reads what has arrived without waiting, as [`Stream::read`] does; `None` = nothing has, or the stream cannot be
    /// polled.
    fn try_read(&self, _buffer: &mut Vec<u8>) -> Option<io::Result<usize>> {
        None
    }
    /// Prepares the next write, in much less than a microsecond, so that it takes less time.
    fn prepare_write(&self) {}
    /// Appends received bytes to `buffer`; 0 = the peer has ended.
    async fn read(&self, buffer: Vec<u8>) -> (io::Result<usize>, Vec<u8>);
    /// Writes all of `bytes`.
    async fn write_all(&self, bytes: Vec<u8>) -> (io::Result<()>, Vec<u8>);
    /// Ends reads, writes or both. Those in progress return.
    fn shutdown(&self, how: Shutdown) -> io::Result<()>;
    /// The socket that can send descriptors; `None` = it has none.
    fn socket(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A socket on epoll.
pub(super) struct EpollStream {
    /// Registered for readability only.
    socket: AsyncFd<UnixStream>,
}

impl AsFd for EpollStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.get_ref().as_fd()
    }
}

impl EpollStream {
    fn poll_read(&self, cx: &mut Context<'_>, buffer: &mut Vec<u8>) -> Poll<io::Result<usize>> {
        loop {
            let mut ready = ready!(self.socket.poll_read_ready(cx))?;
            let room = buffer.capacity() - buffer.len();
            match self.try_read(buffer) {
                Some(read) => {
                    // A read that leaves space has emptied the socket, and the next one waits without trying. The end
                    // of the stream stays ready.
                    if read.as_ref().is_ok_and(|read| (1..room).contains(read)) {
                        ready.clear_ready();
                    }
                    return Poll::Ready(read);
                }
                None => ready.clear_ready(),
            }
        }
    }

    /// Sends as much of `bytes` as the socket takes; `None` = its buffer is full.
    fn try_write(&self, bytes: &[u8]) -> Option<io::Result<usize>> {
        loop {
            match send(self, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return None,
                Ok(0) => return Some(Err(io::ErrorKind::WriteZero.into())),
                sent => return Some(sent.map_err(Into::into)),
            }
        }
    }

    /// Writes all of `bytes` to a socket whose buffer was full.
    async fn write_waiting(&self, bytes: &[u8]) -> io::Result<()> {
        let (mut rest, mut room) = (bytes, None);
        while !rest.is_empty() {
            if room.is_none() {
                room = self.register_writable()?;
            }
            let ready = match &room {
                Some(room) => Some(room.writable().await?),
                // No descriptor is left: the write is retried after each pause. The unread limit still cuts a peer that
                // reads nothing.
                None => {
                    tokio::time::sleep(Duration::from_millis(WRITE_RETRY_MS)).await;
                    None
                }
            };
            match (self.try_write(rest), ready) {
                (Some(sent), _) => rest = rest.get(sent?..).unwrap_or_default(),
                (None, Some(mut ready)) => ready.clear_ready(),
                (None, None) => {}
            }
        }
        Ok(())
    }

    /// Registers the socket a second time, for writability: epoll knows each descriptor once. `None` = no descriptor is
    /// left.
    fn register_writable(&self) -> io::Result<Option<AsyncFd<OwnedFd>>> {
        match self.as_fd().try_clone_to_owned() {
            Ok(second) => registered(second, Interest::WRITABLE).map(Some),
            Err(error) if matches!(Errno::from_io_error(&error), Some(Errno::MFILE | Errno::NFILE)) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl Stream for EpollStream {
    fn from_std(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self { socket: registered(stream, Interest::READABLE)? })
    }

    fn poll_cost(&self) -> PollCost {
        PollCost::SystemCall(SOCKET_POLL_COST)
    }

    fn try_read(&self, buffer: &mut Vec<u8>) -> Option<io::Result<usize>> {
        loop {
            match recv(self, spare_capacity(buffer), RecvFlags::DONTWAIT) {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return None,
                received => return Some(received.map(|(_, read)| read).map_err(Into::into)),
            }
        }
    }

    async fn read(&self, mut buffer: Vec<u8>) -> (io::Result<usize>, Vec<u8>) {
        let read = poll_fn(|cx| self.poll_read(cx, &mut buffer)).await;
        (read, buffer)
    }

    async fn write_all(&self, bytes: Vec<u8>) -> (io::Result<()>, Vec<u8>) {
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            match self.try_write(rest) {
                Some(Ok(sent)) => rest = rest.get(sent..).unwrap_or_default(),
                Some(Err(error)) => return (Err(error), bytes),
                None => {
                    let written = self.write_waiting(rest).await;
                    return (written, bytes);
                }
            }
        }
        (Ok(()), bytes)
    }

    fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.socket.get_ref().shutdown(how)
    }

    fn socket(&self) -> Option<BorrowedFd<'_>> {
        Some(self.as_fd())
    }
}

/// Registers a descriptor with this thread's runtime.
pub(super) fn registered<F: AsRawFd + AsFd>(descriptor: F, interest: Interest) -> io::Result<AsyncFd<F>> {
    #[allow(deprecated, reason = "the oldest supported release of tokio lacks its replacement")]
    AsyncFd::with_interest(descriptor, interest)
}

/// Builds a runtime on epoll, reports by `ready`, and runs `future` to its end.
pub(super) fn block_on_epoll<F: Future<Output = ()>>(ready: impl FnOnce(Result<()>), future: F) {
    match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => {
            sandbox::enter(ThreadKind::Serving);
            ready(Ok(()));
            tokio::task::LocalSet::new().block_on(&runtime, future);
        }
        Err(error) => {
            let remedy = "raise the limit of open files, or lower serve.cores";
            ready(Err(
                Error::new(Kind::System, "cannot build the epoll runtime of a serving thread", remedy).caused_by(error)
            ));
        }
    }
}

/// A socket on io_uring.
pub(super) struct UringStream(tokio_uring::net::UnixStream);

impl Stream for UringStream {
    fn from_std(stream: std::os::unix::net::UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        Ok(Self(tokio_uring::net::UnixStream::from_std(stream)))
    }

    async fn read(&self, buffer: Vec<u8>) -> (io::Result<usize>, Vec<u8>) {
        let held = buffer.len();
        if held == buffer.capacity() {
            // tokio-uring panics on a slice without bytes. The caller always leaves space.
            return (Err(io::ErrorKind::OutOfMemory.into()), buffer);
        }
        let (read, slice) = self.0.read(buffer.slice(held..)).await;
        (read, slice.into_inner())
    }

    async fn write_all(&self, bytes: Vec<u8>) -> (io::Result<()>, Vec<u8>) {
        self.0.write_all(bytes).await
    }

    fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.0.shutdown(how)
    }

    #[expect(unsafe_code, reason = "tokio-uring knows its descriptor as a number only")]
    fn socket(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the descriptor is open as long as `self.0` is, which the borrow cannot outlive.
        Some(unsafe { BorrowedFd::borrow_raw(self.0.as_raw_fd()) })
    }
}

/// Builds a runtime on io_uring, reports by `ready`, and runs `future` to its end.
pub(super) fn block_on_uring<F: Future<Output = ()>>(ready: impl FnOnce(Result<()>), future: F) {
    let mut ring = tokio_uring::uring_builder();
    ring.setup_coop_taskrun().setup_single_issuer();
    match tokio_uring::Runtime::new(tokio_uring::builder().entries(URING_ENTRIES).uring_builder(&ring)) {
        Ok(runtime) => {
            // After the runtime, which makes its ring: the thread makes no other.
            sandbox::enter(ThreadKind::ServingUring);
            ready(Ok(()));
            runtime.block_on(future);
        }
        Err(error) => {
            let remedy = "start with --io epoll, or raise the limit of open files";
            ready(Err(Error::new(Kind::System, "cannot build the io_uring runtime of a serving thread", remedy)
                .caused_by(error)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_always_finds_a_backend_and_uring_gives_its_reason() {
        assert!(matches!(choose_io_backend(IoSetting::Epoll, false), Ok(IoBackend::Epoll)));
        assert!(matches!(choose_io_backend(IoSetting::Auto, false), Ok(IoBackend::Epoll)));
        match choose_io_backend(IoSetting::Uring, false) {
            Ok(backend) => assert_eq!(backend, IoBackend::Uring),
            Err(error) => assert!(error.to_string().contains("--io"), "{error}"),
        }
    }

    #[test]
    fn cores_that_busy_poll_run_on_epoll() {
        assert!(matches!(choose_io_backend(IoSetting::Auto, true), Ok(IoBackend::Epoll)));
        assert!(matches!(choose_io_backend(IoSetting::Epoll, true), Ok(IoBackend::Epoll)));
        assert_eq!(choose_io_backend(IoSetting::Uring, true).unwrap_err().kind(), Kind::Config);
    }
}
