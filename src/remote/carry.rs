//! Carries bytes both ways between two streams, as they come. Neither side is understood; back-pressure passes through.

use std::io;
use std::pin::pin;
use std::time::Duration;

use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadHalf, WriteHalf, split};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::limits::{
    REMOTE_CARRIED_BYTES, REMOTE_END_MS_MAX, REMOTE_PROBE_AFTER_S, REMOTE_PROBES_MAX, REMOTE_UNACKNOWLEDGED_MS_MAX,
    REMOTE_WRITE_MS_MAX,
};

/// Sets up a TCP connection: small frames leave at once, and the kernel ends it when the peer's host has gone.
///
/// # Errors
/// Those of the kernel.
pub(crate) fn prepare(stream: &TcpStream) -> io::Result<()> {
    let pause = Duration::from_secs(REMOTE_PROBE_AFTER_S);
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, pause)?;
    sockopt::set_tcp_keepintvl(stream, pause)?;
    sockopt::set_tcp_keepcnt(stream, REMOTE_PROBES_MAX)?;
    Ok(sockopt::set_tcp_user_timeout(stream, REMOTE_UNACKNOWLEDGED_MS_MAX)?)
}

/// The time limits of carrying.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TimeLimits {
    /// For a side to take what was written to it.
    write: Duration,
    /// For one direction after the other has ended.
    rest: Duration,
}

impl Default for TimeLimits {
    fn default() -> Self {
        let (write, rest) = (Duration::from_millis(REMOTE_WRITE_MS_MAX), Duration::from_millis(REMOTE_END_MS_MAX));
        Self { write, rest }
    }
}

/// Carries until both sides have ended. What a side does not read within its time is lost, as when a socket is closed.
///
/// # Errors
/// The first error of either side; `TimedOut` if one does not read.
pub(crate) async fn carry<A, B>(one: A, other: B, limits: TimeLimits) -> io::Result<()>
where
    A: AsyncRead + AsyncWrite,
    B: AsyncRead + AsyncWrite,
{
    let ((from_one, to_one), (from_other, to_other)) = (split(one), split(other));
    let (mut there, mut back) = (pin!(one_way(from_one, to_other, limits)), pin!(one_way(from_other, to_one, limits)));
    tokio::select! {
        end = &mut there => finish(end, back, limits).await,
        end = &mut back => finish(end, there, limits).await,
    }
}

/// How one direction has ended.
enum End {
    /// The side that was read has ended, and the other knows.
    Whole,
    /// The side that was written to has closed. It may have said why, in bytes of the other direction.
    Closed(io::Error),
    /// Nothing more can come of either direction.
    Broken(io::Error),
}

/// Lets the other direction end after the first, if it still can.
async fn finish(end: End, rest: impl Future<Output = End>, limits: TimeLimits) -> io::Result<()> {
    let first = match end {
        End::Whole => Ok(()),
        End::Closed(error) => Err(error),
        End::Broken(error) => return Err(error),
    };
    match timeout(limits.rest, rest).await {
        Ok(End::Closed(error) | End::Broken(error)) => first.and(Err(error)),
        Ok(End::Whole) | Err(_) => first,
    }
}

async fn one_way<A, B>(mut from: ReadHalf<A>, mut to: WriteHalf<B>, limits: TimeLimits) -> End
where
    A: AsyncRead,
    B: AsyncWrite,
{
    let mut buffer = vec![0; REMOTE_CARRIED_BYTES];
    loop {
        let bytes = match from.read(&mut buffer).await {
            Ok(0) => {
                // A side that has gone already needs no end.
                let _ = timeout(limits.write, to.shutdown()).await;
                return End::Whole;
            }
            Ok(bytes) => bytes,
            Err(error) => return End::Broken(error),
        };
        let write = async {
            to.write_all(&buffer[..bytes]).await?;
            to.flush().await
        };
        match timeout(limits.write, write).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return End::Closed(error),
            Err(late) => return End::Broken(late.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::duplex;

    use super::*;

    #[tokio::test]
    async fn bytes_go_both_ways_and_each_end_is_passed_on() {
        let ((mut left, near), (far, mut right)) = (duplex(64), duplex(64));
        let carried = tokio::spawn(carry(near, far, TimeLimits::default()));
        let sent: Vec<u8> = (0..5000_u32).map(|at| at as u8).collect();
        let mut got = Vec::new();
        let writing = async {
            left.write_all(&sent).await.unwrap();
            left.shutdown().await.unwrap();
        };
        tokio::join!(writing, async { right.read_to_end(&mut got).await.unwrap() });
        assert_eq!(got, sent);
        right.write_all(b"late").await.unwrap();
        right.shutdown().await.unwrap();
        let mut got = Vec::new();
        left.read_to_end(&mut got).await.unwrap();
        assert_eq!(got, b"late", "the other direction goes on for a while");
        carried.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn the_last_words_of_a_side_that_has_closed_are_passed_on() {
        let ((mut left, near), (far, mut right)) = (duplex(64), duplex(64));
        right.write_all(b"why").await.unwrap();
        drop(right);
        left.write_all(b"more").await.unwrap();
        let carried = tokio::spawn(carry(near, far, TimeLimits::default()));
        let mut got = Vec::new();
        left.read_to_end(&mut got).await.unwrap();
        assert_eq!(got, b"why");
        drop(left);
        assert!(carried.await.unwrap().is_err_and(|error| error.kind() == io::ErrorKind::BrokenPipe));
    }

    #[tokio::test]
    async fn a_side_that_does_not_read_and_a_side_that_does_not_end_are_given_up() {
        let (soon, never) = (Duration::from_millis(10), Duration::from_secs(3600));
        let ((mut left, near), (far, _right)) = (duplex(64), duplex(64));
        let carried = tokio::spawn(carry(near, far, TimeLimits { write: soon, rest: never }));
        left.write_all(&[0; 100]).await.unwrap();
        assert_eq!(carried.await.unwrap().unwrap_err().kind(), io::ErrorKind::TimedOut);
        let ((mut left, near), (far, _right)) = (duplex(64), duplex(64));
        let carried = tokio::spawn(carry(near, far, TimeLimits { write: never, rest: soon }));
        left.shutdown().await.unwrap();
        carried.await.unwrap().expect("an end in time");
    }
}
