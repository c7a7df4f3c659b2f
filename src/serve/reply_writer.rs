//! The writing side of a connection: replies to the requests just read, and pending replies, which come later.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::io_backend::Stream;
use super::lane::{LaneDescriptors, send_descriptors};
use crate::budget::Gauge;
use crate::limits::REPLY_BUFFER_BYTES_MAX;

/// The memory of the replies that the gateways of one core have not read.
#[derive(Debug)]
pub(super) struct ReplyBudget {
    bytes_max: usize,
    held: Cell<usize>,
    /// Shows what is held.
    gauge: Gauge,
    /// Wakes the task that closes connections when more is held than may be.
    over: Notify,
}

impl Default for ReplyBudget {
    /// A budget without limit, for a connection by itself.
    fn default() -> Self {
        Self::new(usize::MAX, Gauge::default())
    }
}

impl ReplyBudget {
    pub(super) fn new(bytes_max: usize, gauge: Gauge) -> Self {
        Self { bytes_max, held: Cell::new(0), gauge, over: Notify::new() }
    }

    /// Whether more is held than may be.
    pub(super) fn is_over(&self) -> bool {
        self.held.get() > self.bytes_max
    }

    /// Waits until more is held than may be.
    pub(super) async fn exceeded(&self) {
        while !self.is_over() {
            self.over.notified().await;
        }
    }

    fn set(&self, held: usize) {
        self.held.set(held);
        self.gauge.set(held as u64);
        if self.is_over() {
            self.over.notify_one();
        }
    }
}

/// Writes the replies of one connection. It has two writers: the task that reads and answers, and the task that flushes
/// pending replies. One of them writes at a time, so that frames never mix.
#[derive(Debug, Default)]
pub(super) struct ReplyWriter {
    pending: RefCell<Vec<u8>>,
    is_writing: Cell<bool>,
    is_flushing: Cell<bool>,
    /// The number of writes begun.
    writes: Cell<u64>,
    /// The write in progress at the last check, and the time when a check first saw it.
    write_seen: Cell<Option<(u64, Instant)>>,
    /// Whether a task waits for `idle`, so that a connection without pending replies pays nothing.
    has_waiter: Cell<bool>,
    idle: Notify,
    budget: Rc<ReplyBudget>,
    /// Its part of the budget: replies that are being written, and pending ones.
    held: Cell<usize>,
}

impl Drop for ReplyWriter {
    fn drop(&mut self) {
        self.release(self.held.get());
    }
}

/// The outcome for a pending reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pushed {
    /// The task that flushes already will write it.
    Queued,
    /// The caller has to [`ReplyWriter::flush`].
    NeedsFlush,
    /// The peer has left too many bytes unread: the connection is to be closed.
    OverLimit,
}

impl ReplyWriter {
    /// A writer within a budget that the writers of a core share.
    pub(super) fn within(budget: &Rc<ReplyBudget>) -> Self {
        let mut this = Self::default();
        this.budget = Rc::clone(budget);
        this
    }

    /// Bytes that its peer has not read.
    pub(super) fn held(&self) -> usize {
        self.held.get()
    }

    fn hold(&self, bytes: usize) {
        self.held.set(self.held.get() + bytes);
        self.budget.set(self.budget.held.get() + bytes);
    }

    fn release(&self, bytes: usize) {
        self.held.set(self.held.get() - bytes);
        self.budget.set(self.budget.held.get() - bytes);
    }

    /// Writes all of `bytes` once the other writer is idle.
    pub(super) async fn write_all<S: Stream>(&self, stream: &S, bytes: Vec<u8>) -> (io::Result<()>, Vec<u8>) {
        while self.is_writing.get() {
            self.changed().await;
        }
        self.is_writing.set(true);
        self.writes.set(self.writes.get() + 1);
        let held = bytes.len();
        self.hold(held);
        let written = stream.write_all(bytes).await;
        self.release(held);
        self.is_writing.set(false);
        self.wake();
        written
    }

    /// Writes all of `bytes` once the other writer is idle, with a lane's descriptors.
    pub(super) async fn write_with_descriptors<S: Stream>(
        &self,
        stream: &S,
        bytes: Vec<u8>,
        descriptors: &LaneDescriptors,
    ) -> (io::Result<()>, Vec<u8>) {
        while self.is_writing.get() {
            self.changed().await;
        }
        let Some(socket) = stream.socket() else { return (Err(io::ErrorKind::Unsupported.into()), bytes) };
        self.is_writing.set(true);
        self.writes.set(self.writes.get() + 1);
        let written = match send_descriptors(socket, &bytes, descriptors).await {
            Ok(sent) => stream.write_all(bytes[sent..].to_vec()).await.0,
            Err(error) => Err(error),
        };
        self.is_writing.set(false);
        self.wake();
        (written, bytes)
    }

    /// Adds a pending reply.
    pub(super) fn push(&self, frame: &[u8]) -> Pushed {
        let mut pending = self.pending.borrow_mut();
        if pending.len() >= REPLY_BUFFER_BYTES_MAX {
            return Pushed::OverLimit;
        }
        pending.extend_from_slice(frame);
        self.hold(frame.len());
        if self.is_flushing.replace(true) { Pushed::Queued } else { Pushed::NeedsFlush }
    }

    /// Whether one write has been in progress for `limit`, as far as periodic calls of this function can see.
    pub(super) fn is_stalled(&self, now: Instant, limit: Duration) -> bool {
        let writing = self.is_writing.get().then(|| self.writes.get());
        match (writing, self.write_seen.get()) {
            (Some(write), Some((seen, since))) if write == seen => now.saturating_duration_since(since) >= limit,
            (writing, _) => {
                self.write_seen.set(writing.map(|write| (write, now)));
                false
            }
        }
    }

    /// Whether a pending reply is being written.
    pub(super) fn is_flushing(&self) -> bool {
        self.is_flushing.get()
    }

    /// Writes pending replies until there are none; drops them on an error. Call it only after [`Pushed::NeedsFlush`].
    pub(super) async fn flush<S: Stream>(&self, stream: &S) -> io::Result<()> {
        let mut written = Ok(());
        while written.is_ok() && !self.pending.borrow().is_empty() {
            let bytes = self.pending.take();
            // `write_all` counts them from here on.
            self.release(bytes.len());
            written = self.write_all(stream, bytes).await.0;
        }
        self.release(self.pending.take().len());
        self.is_flushing.set(false);
        self.wake();
        written
    }

    /// Waits until no pending reply is being written.
    pub(super) async fn flushed(&self) {
        while self.is_flushing() {
            self.changed().await;
        }
    }

    async fn changed(&self) {
        self.has_waiter.set(true);
        self.idle.notified().await;
    }

    fn wake(&self) {
        if self.has_waiter.replace(false) {
            // At most one task waits: the other writer, or the connection's task that is about to end. If its condition
            // does not hold yet, it waits again.
            self.idle.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Shutdown;
    use std::rc::Rc;

    use super::*;

    /// Yields before every byte.
    struct Slow {
        written: RefCell<Vec<u8>>,
        left: Cell<usize>,
    }

    impl Stream for Slow {
        fn from_std(_: std::os::unix::net::UnixStream) -> io::Result<Self> {
            Err(io::ErrorKind::Unsupported.into())
        }

        async fn read(&self, buffer: Vec<u8>) -> (io::Result<usize>, Vec<u8>) {
            (Ok(0), buffer)
        }

        async fn write_all(&self, bytes: Vec<u8>) -> (io::Result<()>, Vec<u8>) {
            for byte in &bytes {
                tokio::task::yield_now().await;
                if self.left.get() == 0 {
                    return (Err(io::ErrorKind::BrokenPipe.into()), bytes);
                }
                self.left.set(self.left.get() - 1);
                self.written.borrow_mut().push(*byte);
            }
            (Ok(()), bytes)
        }

        fn shutdown(&self, _: Shutdown) -> io::Result<()> {
            Ok(())
        }
    }

    fn run(left: usize, scene: impl AsyncFnOnce(Rc<Slow>, Rc<ReplyWriter>)) -> Vec<u8> {
        let (stream, writer) = (Rc::new(Slow { written: RefCell::default(), left: Cell::new(left) }), Rc::default());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        tokio::task::LocalSet::new().block_on(&runtime, scene(Rc::clone(&stream), writer));
        stream.written.take()
    }

    fn flush(stream: &Rc<Slow>, writer: &Rc<ReplyWriter>) -> tokio::task::JoinHandle<io::Result<()>> {
        let (stream, writer) = (Rc::clone(stream), Rc::clone(writer));
        tokio::task::spawn_local(async move { writer.flush(&*stream).await })
    }

    #[test]
    fn frames_of_two_writers_never_mix_and_none_is_lost() {
        let written = run(usize::MAX, async |stream, writer| {
            assert_eq!(writer.push(&[1; 5]), Pushed::NeedsFlush);
            let flushing = flush(&stream, &writer);
            for _ in 0..4 {
                assert!(writer.write_all(&*stream, vec![2; 3]).await.0.is_ok());
                assert_eq!(writer.push(&[3; 7]), Pushed::Queued);
            }
            writer.flushed().await;
            assert!(flushing.await.unwrap().is_ok());
            assert_eq!(writer.push(&[4; 2]), Pushed::NeedsFlush);
            assert!(writer.flush(&*stream).await.is_ok());
        });
        let runs: Vec<_> = written.chunk_by(|a, b| a == b).map(|run| (run[0], run.len())).collect();
        let frame = |byte| match byte {
            1 => 5,
            2 => 3,
            3 => 7,
            _ => 2,
        };
        assert!(runs.iter().all(|(byte, len)| len % frame(*byte) == 0), "{runs:?}");
        let of = |byte| written.iter().filter(|at| **at == byte).count();
        assert_eq!([1, 2, 3, 4].map(of), [5, 12, 28, 2]);
    }

    #[test]
    fn unread_bytes_are_counted_until_they_are_written_or_dropped() {
        let gauge = Gauge::default();
        let budget = Rc::new(ReplyBudget::new(10, gauge.clone()));
        let writer = Rc::new(ReplyWriter::within(&budget));
        assert_eq!(writer.push(&[1; 8]), Pushed::NeedsFlush);
        assert_eq!((writer.held(), gauge.get(), budget.is_over()), (8, 8, false));
        assert_eq!(writer.push(&[1; 3]), Pushed::Queued);
        assert!(budget.is_over());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(budget.exceeded());
        let stream = Slow { written: RefCell::default(), left: Cell::new(5) };
        assert!(runtime.block_on(writer.flush(&stream)).is_err());
        assert_eq!((writer.held(), gauge.get()), (0, 0), "a failed flush drops what it could not write");
        assert_eq!(writer.push(&[1; 4]), Pushed::NeedsFlush);
        drop(writer);
        assert_eq!((gauge.get(), budget.is_over()), (0, false));
    }

    #[test]
    fn a_closed_peer_ends_the_wait_and_unread_replies_reach_a_limit() {
        run(3, async |stream, writer| {
            assert_eq!(writer.push(&[1; 5]), Pushed::NeedsFlush);
            let flushing = flush(&stream, &writer);
            assert_eq!(writer.push(&vec![2; REPLY_BUFFER_BYTES_MAX]), Pushed::Queued);
            assert_eq!(writer.push(&[3]), Pushed::OverLimit);
            writer.flushed().await;
            assert!(flushing.await.unwrap().is_err());
            assert_eq!(writer.push(&[4]), Pushed::NeedsFlush, "a failed flush drops what it could not write");
        });
    }
}
