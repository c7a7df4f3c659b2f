//! What an io engine gives a connection, and the one loop that drives a connection over either.

use std::cell::RefCell;
use std::fmt;
use std::io;
use std::net::Shutdown;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

use super::connection::{Connection, Flow, Respond};
use super::looks::{LookCost, Looker};
use super::outlet::Outlet;
use crate::limits::{READS_PER_TURN_MAX, REPLY_BUFFER_BYTES_KEPT};
use crate::wire::HeaderFault;

/// A connected stream of one engine. A future of it is always awaited to its end: an io_uring operation
/// that is dropped goes on and swallows what it reads. [`Stream::shutdown`] is how one is ended.
pub(super) trait Stream: Sized + 'static {
    /// Takes over a connected socket.
    fn from_std(stream: UnixStream) -> io::Result<Self>;
    /// What [`Stream::try_read`] costs.
    fn look_cost(&self) -> LookCost {
        LookCost::Impossible
    }
    /// Reads what is there, without waiting, as [`Stream::read`] does; `None` = nothing is, or it cannot be looked at.
    fn try_read(&self, _buffer: &mut Vec<u8>) -> Option<io::Result<usize>> {
        None
    }
    /// Reads behind what `buffer` holds; 0 = the peer has ended.
    async fn read(&self, buffer: Vec<u8>) -> (io::Result<usize>, Vec<u8>);
    /// Writes all of `bytes`.
    async fn write_all(&self, bytes: Vec<u8>) -> (io::Result<()>, Vec<u8>);
    /// Ends reads, writes or both; those that wait return.
    fn shutdown(&self, how: Shutdown) -> io::Result<()>;
    /// Its socket, by which descriptors can be handed over; `None` = it has none.
    fn socket(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// How a connection ended.
#[derive(Debug)]
pub(super) enum Ended {
    /// The peer, or a drain, ended it.
    Eof {
        /// Part of a frame had come, the rest never did.
        mid_frame: bool,
    },
    /// A header could not be trusted.
    Untrusted(HeaderFault),
    /// The socket failed.
    Failed(io::Error),
    /// It was closed because the peer left its replies unread.
    Unread,
}

impl Ended {
    /// Whether the peer merely left: at the end of a frame, or without reading what it had asked for.
    pub(super) fn is_peer_leaving(&self) -> bool {
        match self {
            Self::Eof { mid_frame } => !mid_frame,
            Self::Untrusted(_) | Self::Unread => false,
            Self::Failed(error) => {
                matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
            }
        }
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Eof { mid_frame: false } => f.write_str("the peer has ended it"),
            Self::Eof { mid_frame: true } => f.write_str("it ended in the middle of a frame"),
            Self::Untrusted(reason) => write!(f, "its frame header cannot be trusted: {reason}"),
            Self::Failed(error) => write!(f, "its socket failed: {error}"),
            Self::Unread => f.write_str("its peer left its replies unread"),
        }
    }
}

/// Reads, answers and writes until the connection ends. What is answered in one turn goes by one write; while a write
/// waits, nothing more is read. Replies that come later go by the `outlet` too.
/// `looker` reads where the core looks for work, and is told of every read.
pub(super) async fn drive<S: Stream, R: Respond>(
    stream: &S,
    responder: &RefCell<R>,
    connection: &RefCell<Connection>,
    outlet: &Outlet,
    looker: Option<&Looker>,
) -> Ended {
    let mut out = Vec::new();
    let mut reads_in_turn = 0;
    loop {
        let buffer = connection.borrow_mut().take_buffer();
        let (read, buffer) = match looker {
            Some(looker) => looker.read(stream, buffer).await,
            None => stream.read(buffer).await,
        };
        connection.borrow_mut().give_back(buffer);
        match read {
            Ok(0) => return Ended::Eof { mid_frame: connection.borrow().is_mid_frame() },
            Ok(_) => looker.into_iter().for_each(Looker::worked),
            Err(error) => return Ended::Failed(error),
        }
        loop {
            let flow = connection.borrow_mut().on_bytes(&mut *responder.borrow_mut(), &mut out);
            if !out.is_empty() {
                let handed = connection.borrow_mut().take_handed();
                let (written, buffer) = match &handed {
                    None => outlet.write_all(stream, out).await,
                    Some(handed) => outlet.hand_over(stream, out, handed).await,
                };
                out = buffer;
                out.clear();
                out.shrink_to(REPLY_BUFFER_BYTES_KEPT);
                if let Err(error) = written {
                    return Ended::Failed(error);
                }
            }
            match flow {
                Flow::Continue => break,
                Flow::Yield => {
                    reads_in_turn = 0;
                    tokio::task::yield_now().await;
                }
                Flow::Close { reason } => return Ended::Untrusted(reason),
            }
        }
        reads_in_turn += 1;
        if reads_in_turn == READS_PER_TURN_MAX {
            // A peer that always has more must not keep the core from the others.
            reads_in_turn = 0;
            tokio::task::yield_now().await;
        }
    }
}
