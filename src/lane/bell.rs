//! How one side of a lane wakes the other: a byte by a socket that nothing else goes through.
//!
//! Not by an eventfd: the two sides would share its file description, and with it O_NONBLOCK. A gateway that took the
//! flag away and filled the counter could stop a core in the middle of a ring. The ends of a socket are descriptions of
//! their own, and `MSG_DONTWAIT` holds whatever their flags are.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::error::{Error, Kind, Result};
use crate::limits::LANE_BELL_BYTES;

/// What is left of a bell once it was heard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// Whether it rang or not, the other side is there.
    Quiet,
    /// The other side has let go of it.
    Gone,
}

/// The two ends of a bell: who rings one is heard at the other.
///
/// # Errors
/// [`Kind::System`] where descriptors are short.
pub fn bell_pair() -> Result<(UnixStream, UnixStream)> {
    UnixStream::pair().map_err(|error| {
        let remedy = "raise the limit of open files, or ask without a lane";
        Error::new(Kind::System, "a lane's bell cannot be made", remedy).caused_by(error)
    })
}

/// Rings; never waits. One that cannot be rung has either rung already or nobody to hear it, which the connection says.
pub fn ring(bell: &impl AsFd) {
    while let Err(Errno::INTR) = send(bell, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {}
}

/// Takes what has rung.
pub fn hear(bell: &impl AsFd) -> Heard {
    let mut rings = [0; LANE_BELL_BYTES];
    loop {
        match recv(bell, &mut rings, RecvFlags::DONTWAIT) {
            Ok((_, 0)) | Err(Errno::CONNRESET) => return Heard::Gone,
            // A full buffer may have left some. They may not wake anybody again (epoll tells edges), and need not: one ring
            // means all that came before it, and who was woken looks at the ring of words before it sleeps.
            Ok(_) | Err(Errno::AGAIN) => return Heard::Quiet,
            Err(Errno::INTR) => {}
            Err(_) => return Heard::Gone,
        }
    }
}
