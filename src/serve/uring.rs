//! The engine of tokio-uring: reads and writes are submitted to a ring.
//!
//! What its version 0.5 asks of us: a runtime only after the probe has passed, with COOP_TASKRUN and
//! SINGLE_ISSUER but never DEFER_TASKRUN (it waits by epoll on the ring and would hang); listeners of
//! tokio, because its own cannot bind; blocking sockets, because O_NONBLOCK would turn a read that must
//! wait into EAGAIN; every operation awaited to its end, because a dropped read goes on and eats data.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsRawFd, BorrowedFd};

use tokio_uring::buf::BoundedBuf;

use super::engine::Stream;
use crate::error::{Error, Kind, Result};
use crate::limits::URING_ENTRIES;

/// A stream of this engine.
pub(super) struct UringStream(tokio_uring::net::UnixStream);

impl Stream for UringStream {
    fn from_std(stream: std::os::unix::net::UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        Ok(Self(tokio_uring::net::UnixStream::from_std(stream)))
    }

    async fn read(&self, buffer: Vec<u8>) -> (io::Result<usize>, Vec<u8>) {
        let held = buffer.len();
        if held == buffer.capacity() {
            // A slice of no bytes is refused with a panic; the caller always leaves room.
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

/// Builds this engine's runtime, reports by `ready`, and runs `future` to its end.
pub(super) fn block_on<F: Future<Output = ()>>(ready: impl FnOnce(Result<()>), future: F) {
    let mut ring = tokio_uring::uring_builder();
    ring.setup_coop_taskrun().setup_single_issuer();
    match tokio_uring::Runtime::new(tokio_uring::builder().entries(URING_ENTRIES).uring_builder(&ring)) {
        Ok(runtime) => {
            ready(Ok(()));
            runtime.block_on(future);
        }
        Err(error) => {
            let remedy = "start with --io epoll, or raise the limit of open files";
            ready(Err(Error::new(Kind::System, "cannot build a core's io_uring runtime", remedy).caused_by(error)));
        }
    }
}
