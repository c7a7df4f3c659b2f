//! What carries the bytes of a connection: a socket of the core's engine, or a lane.

use std::io;
use std::net::Shutdown;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

use super::stream::LaneStream;
use crate::serve::engine::Stream;
use crate::serve::looks::LookCost;

/// A socket or a lane.
pub(in crate::serve) enum Carrier<T> {
    /// A socket.
    Socket(T),
    /// A lane.
    Lane(Box<LaneStream>),
}

impl<T: Stream> Stream for Carrier<T> {
    fn from_std(stream: UnixStream) -> io::Result<Self> {
        T::from_std(stream).map(Self::Socket)
    }

    fn look_cost(&self) -> LookCost {
        match self {
            Self::Socket(socket) => socket.look_cost(),
            Self::Lane(_) => LookCost::Load,
        }
    }

    fn try_read(&self, buffer: &mut Vec<u8>) -> Option<io::Result<usize>> {
        match self {
            Self::Socket(socket) => socket.try_read(buffer),
            Self::Lane(lane) => lane.try_read(buffer),
        }
    }

    async fn read(&self, buffer: Vec<u8>) -> (io::Result<usize>, Vec<u8>) {
        match self {
            Self::Socket(socket) => socket.read(buffer).await,
            Self::Lane(lane) => lane.read(buffer).await,
        }
    }

    async fn write_all(&self, bytes: Vec<u8>) -> (io::Result<()>, Vec<u8>) {
        match self {
            Self::Socket(socket) => socket.write_all(bytes).await,
            Self::Lane(lane) => lane.write_all(bytes).await,
        }
    }

    fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        match self {
            Self::Socket(socket) => socket.shutdown(how),
            Self::Lane(lane) => {
                lane.shutdown(how);
                Ok(())
            }
        }
    }

    fn socket(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Socket(socket) => socket.socket(),
            Self::Lane(_) => None,
        }
    }
}
