//! What a connection writes: the replies to what was just read, and those that come later.

use std::cell::{Cell, RefCell};
use std::io;
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::io_backend::Stream;
use super::lane::{Handed, hand_over};
use crate::limits::REPLY_BUFFER_BYTES_MAX;

/// The writing side of a connection. Of its two writers, the one that reads and answers and the one that brings late
/// replies, one writes at a time: frames never mix.
#[derive(Debug, Default)]
pub(super) struct Outlet {
    late: RefCell<Vec<u8>>,
    is_writing: Cell<bool>,
    is_flushing: Cell<bool>,
    /// How many writes have begun.
    writes: Cell<u64>,
    /// The write that was seen under way, and since when it was.
    seen: Cell<Option<(u64, Instant)>>,
    /// Whether somebody waits for `idle`, so that a connection without late replies pays nothing.
    is_awaited: Cell<bool>,
    idle: Notify,
}

/// What came of a late reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pushed {
    /// Whoever writes already will write it.
    Queued,
    /// Somebody has to [`Outlet::flush`].
    ToFlush,
    /// The peer has left too many unread: the connection is to be closed.
    TooMuch,
}

impl Outlet {
    /// Writes all of `bytes` once nobody else writes.
    pub(super) async fn write_all<S: Stream>(&self, stream: &S, bytes: Vec<u8>) -> (io::Result<()>, Vec<u8>) {
        while self.is_writing.get() {
            self.changed().await;
        }
        self.is_writing.set(true);
        self.writes.set(self.writes.get() + 1);
        let written = stream.write_all(bytes).await;
        self.is_writing.set(false);
        self.wake();
        written
    }

    /// Writes all of `bytes` once nobody else writes, and descriptors with them.
    pub(super) async fn hand_over<S: Stream>(
        &self,
        stream: &S,
        bytes: Vec<u8>,
        handed: &Handed,
    ) -> (io::Result<()>, Vec<u8>) {
        while self.is_writing.get() {
            self.changed().await;
        }
        let Some(socket) = stream.socket() else { return (Err(io::ErrorKind::Unsupported.into()), bytes) };
        self.is_writing.set(true);
        self.writes.set(self.writes.get() + 1);
        let written = match hand_over(socket, &bytes, handed).await {
            Ok(sent) => stream.write_all(bytes[sent..].to_vec()).await.0,
            Err(error) => Err(error),
        };
        self.is_writing.set(false);
        self.wake();
        (written, bytes)
    }

    /// Adds a late reply.
    pub(super) fn push(&self, frame: &[u8]) -> Pushed {
        let mut late = self.late.borrow_mut();
        if late.len() >= REPLY_BUFFER_BYTES_MAX {
            return Pushed::TooMuch;
        }
        late.extend_from_slice(frame);
        if self.is_flushing.replace(true) { Pushed::Queued } else { Pushed::ToFlush }
    }

    /// Whether one write has been under way for `limit`, as far as those who ask this now and then can tell.
    pub(super) fn is_stuck(&self, now: Instant, limit: Duration) -> bool {
        let writing = self.is_writing.get().then(|| self.writes.get());
        match (writing, self.seen.get()) {
            (Some(write), Some((seen, since))) if write == seen => now.saturating_duration_since(since) >= limit,
            (writing, _) => {
                self.seen.set(writing.map(|write| (write, now)));
                false
            }
        }
    }

    /// Whether a late reply is under way.
    pub(super) fn is_flushing(&self) -> bool {
        self.is_flushing.get()
    }

    /// Writes late replies until there are none; what cannot be written is dropped. Only after [`Pushed::ToFlush`].
    pub(super) async fn flush<S: Stream>(&self, stream: &S) -> io::Result<()> {
        let mut written = Ok(());
        while written.is_ok() && !self.late.borrow().is_empty() {
            let bytes = self.late.take();
            written = self.write_all(stream, bytes).await.0;
        }
        self.late.borrow_mut().clear();
        self.is_flushing.set(false);
        self.wake();
        written
    }

    /// Waits until no late reply is under way.
    pub(super) async fn flushed(&self) {
        while self.is_flushing() {
            self.changed().await;
        }
    }

    async fn changed(&self) {
        self.is_awaited.set(true);
        self.idle.notified().await;
    }

    fn wake(&self) {
        if self.is_awaited.replace(false) {
            // At most one waits: the writer that does not write, or the connection that is about to end. Whoever finds
            // that nothing it waits for has changed waits again.
            self.idle.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Shutdown;
    use std::rc::Rc;

    use super::*;

    /// Takes its time for every byte.
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

    fn run(left: usize, scene: impl AsyncFnOnce(Rc<Slow>, Rc<Outlet>)) -> Vec<u8> {
        let (stream, outlet) = (Rc::new(Slow { written: RefCell::default(), left: Cell::new(left) }), Rc::default());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        tokio::task::LocalSet::new().block_on(&runtime, scene(Rc::clone(&stream), outlet));
        stream.written.take()
    }

    fn flush(stream: &Rc<Slow>, outlet: &Rc<Outlet>) -> tokio::task::JoinHandle<io::Result<()>> {
        let (stream, outlet) = (Rc::clone(stream), Rc::clone(outlet));
        tokio::task::spawn_local(async move { outlet.flush(&*stream).await })
    }

    #[test]
    fn frames_of_two_writers_never_mix_and_nothing_is_left_behind() {
        let written = run(usize::MAX, async |stream, outlet| {
            assert_eq!(outlet.push(&[1; 5]), Pushed::ToFlush);
            let flushing = flush(&stream, &outlet);
            for _ in 0..4 {
                assert!(outlet.write_all(&*stream, vec![2; 3]).await.0.is_ok());
                assert_eq!(outlet.push(&[3; 7]), Pushed::Queued);
            }
            outlet.flushed().await;
            assert!(flushing.await.unwrap().is_ok());
            assert_eq!(outlet.push(&[4; 2]), Pushed::ToFlush);
            assert!(outlet.flush(&*stream).await.is_ok());
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
    fn a_peer_that_is_gone_ends_the_wait_and_one_that_does_not_read_is_noticed() {
        run(3, async |stream, outlet| {
            assert_eq!(outlet.push(&[1; 5]), Pushed::ToFlush);
            let flushing = flush(&stream, &outlet);
            assert_eq!(outlet.push(&vec![2; REPLY_BUFFER_BYTES_MAX]), Pushed::Queued);
            assert_eq!(outlet.push(&[3]), Pushed::TooMuch);
            outlet.flushed().await;
            assert!(flushing.await.unwrap().is_err());
            assert_eq!(outlet.push(&[4]), Pushed::ToFlush, "what could not be written is gone");
        });
    }
}
