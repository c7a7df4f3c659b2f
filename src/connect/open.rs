//! Opens one connection to the remote daemon: the host's name, TCP, TLS, this host's token.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::path::Path;
use std::sync::Arc;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::Caller;
use crate::endpoint::Endpoint;
use crate::error::{Error, Kind, Result};
use crate::limits::{FRAME_HEADER_BYTES, NAME_ADDRESSES_MAX, REMOTE_REFUSAL_BYTES_MAX, REMOTE_TLS_BUFFER_BYTES};
use crate::metrics::ConnectCounter;
use crate::remote::carry::prepare;
use crate::remote::opening::{self, HEAD_BYTES, Verdict};
use crate::remote::principals::check_token;
use crate::remote::tls;
use crate::sandbox::{self, ThreadKind};
use crate::wire::{FrameHeader, Reply, decode_reply};

/// Host and port of a daemon's remote port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    host: String,
    port: u16,
}

impl Target {
    /// Parses `HOST:PORT`; an IPv6 address in brackets.
    ///
    /// # Errors
    /// What is wrong with the text.
    pub fn parse(text: &str) -> Result<Self, String> {
        Endpoint::parse(&format!("tcp://{text}")).map_err(|fault| fault.message)?;
        let (host, port) = text.rsplit_once(':').ok_or("there is no port")?;
        let port = port.parse().map_err(|_| format!("`{port}` is no TCP port"))?;
        Ok(Self { host: host.trim_start_matches('[').trim_end_matches(']').to_owned(), port })
    }

    /// The host's name or address.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// What this host shows, and whom it trusts.
pub(super) struct Credentials {
    token: Vec<u8>,
    tls: Arc<ClientConfig>,
    server_name: ServerName<'static>,
}

impl Credentials {
    /// Reads the token and the certificates of the authorities.
    ///
    /// # Errors
    /// [`Kind::Config`] with the file that cannot be used, or if `server_name` is neither a host name nor an address.
    pub(super) fn read(token_file: &Path, ca_file: &Path, server_name: &str) -> Result<Self> {
        let text = tls::read_secret(token_file)?;
        let token = text.trim_ascii().to_vec();
        let remedy = "write the token alone into the file, as the daemon's principals_file has it";
        check_token(&token).map_err(|why| tls::unusable(token_file, why, remedy))?;
        let server_name = ServerName::try_from(server_name.to_owned()).map_err(|error| {
            let what = format!("`{server_name}` is neither a host name nor an IP address");
            Error::new(Kind::Config, what, "set --server-name to a name of the daemon's certificate").caused_by(error)
        })?;
        Ok(Self { token, tls: tls::of_caller(ca_file)?, server_name })
    }
}

/// Why a connection could not be opened. Local clients get the error, as one that a retry may solve: nothing in their
/// requests causes it.
#[derive(Debug)]
pub(super) struct Failed {
    pub(super) counter: ConnectCounter,
    pub(super) error: Error,
}

impl Failed {
    fn new(counter: ConnectCounter, message: String, remedy: impl Into<String>) -> Self {
        Self { counter, error: Error::new(Kind::Connection, message, remedy) }
    }

    fn caused(counter: ConnectCounter, message: String, remedy: &str, cause: io::Error) -> Self {
        Self { counter, error: Error::new(Kind::Connection, message, remedy).caused_by(cause) }
    }

    pub(super) fn slow(target: &Target) -> Self {
        let what = format!("the remote daemon at {target} takes too long to open a connection");
        Self::new(ConnectCounter::FailedSlow, what, "check that it runs, and the network on the way to it")
    }
}

/// Opens a connection for one local client.
pub(super) async fn open(caller: &Caller) -> Result<TlsStream<TcpStream>, Failed> {
    let (target, credentials) = (&caller.plan.target, caller.credentials.load_full());
    let stream = connect(caller).await?;
    let broken = |cause: io::Error| {
        let what = format!("the TLS handshake with the remote daemon at {target} failed");
        let remedy = match cause.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
                "look in the daemon's log whether it refuses this host: too many connections begin, or --to names another port"
            }
            _ => "check --ca-file and --server-name against the daemon's certificate_file",
        };
        Failed::caused(ConnectCounter::FailedTls, what, remedy, cause)
    };
    prepare(&stream).map_err(broken)?;
    let connector = TlsConnector::from(Arc::clone(&credentials.tls));
    let bounded = |tls: &mut rustls::ClientConnection| tls.set_buffer_limit(Some(REMOTE_TLS_BUFFER_BYTES));
    let tls = connector.connect_with(credentials.server_name.clone(), stream, bounded);
    let mut tls = tls.await.map_err(broken)?;
    let ended = |cause: io::Error| {
        let what = format!("the peer at {target} ended the connection before it had answered");
        Failed::caused(ConnectCounter::FailedOpening, what, "check that --to names a daemon's remote.listen", cause)
    };
    let mut answer = [0; HEAD_BYTES];
    let exchange = async {
        tls.write_all(&opening::encode(&credentials.token)).await?;
        tls.flush().await?;
        tls.read_exact(&mut answer).await
    };
    exchange.await.map_err(ended)?;
    match opening::verdict(&answer) {
        Ok(Verdict::Accepted) => Ok(tls),
        Ok(Verdict::Refused) => Err(refusal(&mut tls, target).await.map_err(ended)?),
        Err(fault) => {
            let remedy = "check that --to names a daemon's remote.listen, and that both have the same version";
            Err(Failed::new(ConnectCounter::FailedOpening, format!("at {target}: {fault}"), remedy))
        }
    }
}

/// What the daemon says of its refusal.
async fn refusal(tls: &mut TlsStream<TcpStream>, target: &Target) -> io::Result<Failed> {
    let mut head = [0; FRAME_HEADER_BYTES];
    tls.read_exact(&mut head).await?;
    let header = FrameHeader::parse(&head).map_err(|fault| io::Error::other(fault.to_string()))?;
    if header.body_bytes > REMOTE_REFUSAL_BYTES_MAX {
        return Err(io::Error::other("its error is too large"));
    }
    let mut body = vec![0; header.body_bytes as usize];
    tls.read_exact(&mut body).await?;
    let reply = decode_reply(header.kind, &body).map_err(|error| io::Error::other(error.to_string()))?;
    let Reply::Error(error) = reply else { return Err(io::Error::other("its error is another message")) };
    let what = format!("the remote daemon at {target} refuses this host: {}", one_line(&error.message));
    Ok(Failed::new(ConnectCounter::Refused, what, one_line(&error.remedy)))
}

/// Text of a peer as one line of a log.
fn one_line(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect()
}

/// A TCP connection to the first of the target's addresses that answers.
async fn connect(caller: &Caller) -> Result<TcpStream, Failed> {
    let target = &caller.plan.target;
    let mut last = io::ErrorKind::AddrNotAvailable.into();
    for address in addresses(caller).await? {
        match TcpStream::connect(address).await {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    let what = format!("the remote daemon at {target} cannot be reached");
    Err(Failed::caused(ConnectCounter::FailedTcp, what, "check that it runs with remote.listen, and the network", last))
}

/// The addresses of the target, looked up anew each time: the daemon may have moved.
async fn addresses(caller: &Caller) -> Result<Vec<SocketAddr>, Failed> {
    let Target { host, port } = caller.plan.target.clone();
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![(address, port).into()]);
    }
    let failed = |why: String| {
        let what = format!("the name of the remote daemon's host {host} cannot be looked up: {why}");
        Failed::new(ConnectCounter::FailedLookup, what, "check --to, and the host's resolver")
    };
    // Clients that connect together wait for each other, and for no longer than their own opening may take.
    let place = caller.lookups.clone().acquire_owned().await.map_err(|error| failed(error.to_string()))?;
    let looked = host.clone();
    let found = tokio::task::spawn_blocking(move || {
        sandbox::count_as(ThreadKind::Connect);
        let _place = place;
        (looked.as_str(), port).to_socket_addrs().map(|found| found.take(NAME_ADDRESSES_MAX).collect::<Vec<_>>())
    });
    match found.await {
        Ok(Ok(found)) if !found.is_empty() => Ok(found),
        Ok(Ok(_)) => Err(failed("it has no address".to_owned())),
        Ok(Err(error)) => Err(failed(error.to_string())),
        Err(error) => Err(failed(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_daemon_says_makes_no_lines_of_the_log() {
        assert_eq!(one_line("full\nINFO all is well\x1b[2J\u{85}"), "full INFO all is well [2J ");
    }

    #[test]
    fn a_target_is_a_host_and_a_port() {
        for (text, host) in
            [("router-2.local:7443", "router-2.local"), ("[::1]:7443", "::1"), ("10.0.0.5:1", "10.0.0.5")]
        {
            let target = Target::parse(text).expect(text);
            assert_eq!((target.host(), target.to_string().as_str()), (host, text));
        }
        for wrong in ["", "router", "router:", "router:70000", ":7443", "*:7443", "0.0.0.0:7443", "https://router:7443"]
        {
            assert!(Target::parse(wrong).is_err(), "{wrong}");
        }
    }
}
