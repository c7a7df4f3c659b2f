//! Where another proxy's access-log lines arrive: datagrams on a Unix socket or on the loopback interface.

use std::fs::Permissions;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::net::{UdpSocket, UnixDatagram};
use tokio::sync::watch;

use super::listener::remove_socket;
use super::log_line::LogLine;
use super::pick::PickServer;
use crate::limits::{ACCEPT_PAUSE, LOG_DATAGRAM_BYTES_MAX, LOG_QUEUE_BYTES, LOG_SOCKET_LINES_MIN};

/// A bound socket for log lines.
#[derive(Debug)]
pub enum LogSocket {
    /// Of the loopback interface.
    Udp(UdpSocket),
    /// A Unix datagram socket; its file is removed at the end.
    Unix(UnixDatagram, PathBuf),
}

impl LogSocket {
    /// Binds a UDP address.
    ///
    /// # Errors
    /// The address is in use or not of this machine.
    pub async fn udp(address: SocketAddr) -> io::Result<Self> {
        let socket = UdpSocket::bind(address).await?;
        // Lines that find no room are lost, and their bookings stay until their time is over. The kernel's own bound
        // (net.core.rmem_max) holds.
        rustix::net::sockopt::set_socket_recv_buffer_size(&socket, LOG_QUEUE_BYTES)?;
        Ok(Self::Udp(socket))
    }

    /// Binds a Unix datagram socket, and warns where the kernel gives it little room.
    ///
    /// # Errors
    /// The folder cannot be written, or the path is a file that is no socket.
    pub fn unix(path: &Path, mode: u32) -> io::Result<Self> {
        let room = std::fs::read_to_string("/proc/sys/net/unix/max_dgram_qlen").ok();
        if let Some(lines) = room.and_then(|text| text.trim().parse::<u32>().ok())
            && lines < LOG_SOCKET_LINES_MIN
        {
            tracing::warn!(
                lines,
                "pick.log_socket loses lines under load, and their bookings stay: set pick.log_address, or \
                 net.unix.max_dgram_qlen to {LOG_SOCKET_LINES_MIN}"
            );
        }
        remove_socket(path)?;
        let socket = UnixDatagram::bind(path)?;
        std::fs::set_permissions(path, Permissions::from_mode(mode))?;
        Ok(Self::Unix(socket, path.to_owned()))
    }

    /// The UDP address.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        match self {
            Self::Udp(socket) => socket.local_addr().ok(),
            Self::Unix(..) => None,
        }
    }

    async fn receive(&self, line: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Udp(socket) => socket.recv(line).await,
            Self::Unix(socket, _) => socket.recv(line).await,
        }
    }
}

/// Reads log lines until `stop` says so, and does what they say.
pub async fn read_log(socket: LogSocket, server: Arc<PickServer>, mut stop: watch::Receiver<bool>) {
    let mut line = vec![0; LOG_DATAGRAM_BYTES_MAX];
    loop {
        let received = tokio::select! {
            received = socket.receive(&mut line) => received,
            _ = stop.wait_for(|stops| *stops) => break,
        };
        match received {
            Ok(bytes) => {
                if let Some(said) = LogLine::read(&String::from_utf8_lossy(&line[..bytes])) {
                    server.log_line(&said);
                }
            }
            Err(error) => {
                tracing::warn!(%error, "an access-log line could not be read");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    if let LogSocket::Unix(_, path) = &socket {
        // A file that stays is replaced at the next start.
        let _ = remove_socket(path);
    }
}
