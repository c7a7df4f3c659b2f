//! The engine of plain tokio: epoll says when, read and write are system calls.
//!
//! A socket is registered for what comes, and for nothing else. One that is registered for room as well, as tokio's own
//! streams are, becomes ready once more whenever its peer takes a reply: a core that sleeps would wake twice for every
//! request, for nothing the second time. Who has to wait for room, which is rare, registers the socket once more for that
//! long.

use std::future::poll_fn;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::engine::Stream;
use super::looks::LookCost;
use crate::error::{Error, Kind, Result};
use crate::limits::{SOCKET_LOOK_COST, WRITE_REST_MS};

/// A stream of this engine.
pub(super) struct EpollStream {
    /// Registered for what comes.
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
                    // A read that leaves room has emptied the socket, and the next waits without trying. The end of the
                    // stream stays ready.
                    if read.as_ref().is_ok_and(|read| (1..room).contains(read)) {
                        ready.clear_ready();
                    }
                    return Poll::Ready(read);
                }
                None => ready.clear_ready(),
            }
        }
    }

    /// Sends as much of `bytes` as there is room for; `None` = there is none.
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

    /// Writes all of `bytes`, whose beginning found no room.
    async fn write_waiting(&self, bytes: &[u8]) -> io::Result<()> {
        let (mut rest, mut room) = (bytes, None);
        while !rest.is_empty() {
            if room.is_none() {
                room = self.told_of_room()?;
            }
            let ready = match &room {
                Some(room) => Some(room.writable().await?),
                // No descriptor is left: it is looked again and again. Whoever reads nothing is cut as ever.
                None => {
                    tokio::time::sleep(Duration::from_millis(WRITE_REST_MS)).await;
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

    /// The socket once more, registered for room: epoll knows each descriptor once. `None` = there is no descriptor left.
    fn told_of_room(&self) -> io::Result<Option<AsyncFd<OwnedFd>>> {
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

    fn look_cost(&self) -> LookCost {
        LookCost::SystemCall(SOCKET_LOOK_COST)
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

/// Has the runtime of this thread say when `interest` is there.
pub(super) fn registered<F: AsRawFd + AsFd>(descriptor: F, interest: Interest) -> io::Result<AsyncFd<F>> {
    #[allow(deprecated, reason = "what is to replace it is missing from the oldest release that this builds with")]
    AsyncFd::with_interest(descriptor, interest)
}

/// Builds this engine's runtime, reports by `ready`, and runs `future` to its end.
pub(super) fn block_on<F: Future<Output = ()>>(ready: impl FnOnce(Result<()>), future: F) {
    match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => {
            ready(Ok(()));
            tokio::task::LocalSet::new().block_on(&runtime, future);
        }
        Err(error) => {
            let remedy = "raise the limit of open files, or lower the number of cores";
            ready(Err(Error::new(Kind::System, "cannot build a core's epoll runtime", remedy).caused_by(error)));
        }
    }
}
