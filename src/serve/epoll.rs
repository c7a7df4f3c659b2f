//! The engine of plain tokio: epoll says when, read and write are system calls.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::pin;

use tokio::io::AsyncReadExt;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use super::engine::Stream;
use crate::error::{Error, Kind, Result};

/// A stream of this engine.
pub(super) struct EpollStream {
    /// Borrowed within a poll only.
    read: RefCell<OwnedReadHalf>,
    write: OwnedWriteHalf,
}

impl AsFd for EpollStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.write.as_ref().as_fd()
    }
}

impl Stream for EpollStream {
    fn from_std(stream: std::os::unix::net::UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        let (read, write) = tokio::net::UnixStream::from_std(stream)?.into_split();
        Ok(Self { read: RefCell::new(read), write })
    }

    async fn read(&self, mut buffer: Vec<u8>) -> (io::Result<usize>, Vec<u8>) {
        // A read that leaves room has emptied the socket, and the next waits without trying: `try_read` would ask the
        // kernel once more for every request.
        let read = poll_fn(|cx| {
            let mut half = self.read.borrow_mut();
            pin!(half.read_buf(&mut buffer)).poll(cx)
        });
        (read.await, buffer)
    }

    async fn write_all(&self, bytes: Vec<u8>) -> (io::Result<()>, Vec<u8>) {
        let mut written = 0;
        while let Some(rest) = bytes.get(written..).filter(|rest| !rest.is_empty()) {
            match self.write.try_write(rest) {
                Ok(0) => return (Err(io::ErrorKind::WriteZero.into()), bytes),
                Ok(n) => written += n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if let Err(error) = self.write.writable().await {
                        return (Err(error), bytes);
                    }
                }
                Err(error) => return (Err(error), bytes),
            }
        }
        (Ok(()), bytes)
    }

    fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        let how = match how {
            Shutdown::Read => rustix::net::Shutdown::Read,
            Shutdown::Write => rustix::net::Shutdown::Write,
            Shutdown::Both => rustix::net::Shutdown::Both,
        };
        rustix::net::shutdown(self.write.as_ref(), how).map_err(Into::into)
    }

    fn socket(&self) -> Option<BorrowedFd<'_>> {
        Some(self.write.as_ref().as_fd())
    }
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
