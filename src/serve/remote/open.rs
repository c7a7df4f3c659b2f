//! Opens one connection: TLS, the caller's token, and the principal's share of the port.

use std::io;
use std::net::IpAddr;
use std::os::unix::net::UnixStream as StdStream;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, Join, Take, join};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::error::TrySendError;
use tokio_rustls::server::TlsStream;
use tokio_rustls::{LazyConfigAcceptor, StartHandshake};

use super::{Port, RemoteConnection};
use crate::error::{Error, Kind};
use crate::ids::CorrelationId;
use crate::limits::{REMOTE_END_MS_MAX, REMOTE_OPENING_BYTES_MAX, REMOTE_TLS_BUFFER_BYTES, TOKEN_BYTES_MAX};
use crate::metrics::RemoteCounter;
use crate::remote::carry::{TimeLimits, carry, prepare};
use crate::remote::opening::{self, HEAD_BYTES, OpeningFault, Verdict};
use crate::remote::principals::Holder;
use crate::serve::draining;
use crate::shares::{SharedResource, UserReservation};
use crate::wire::ReplyEncoder;

/// A peer's TCP connection. Until it is open, only its first bytes can be read.
type Peer = Join<Take<OwnedReadHalf>, OwnedWriteHalf>;

/// An open connection.
pub(super) struct Open {
    pub(super) holder: Holder,
    tls: TlsStream<Peer>,
    /// The other end of the serving thread's stream.
    pair: UnixStream,
    /// One of the port's connections, and one of the principal's share.
    _place: (OwnedSemaphorePermit, UserReservation),
}

/// A connection that is refused.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) counter: RemoteCounter,
    pub(super) why: String,
    /// Whose token it has shown, if it has shown one.
    pub(super) principal: Option<String>,
}

impl Refused {
    fn new(counter: RemoteCounter, why: impl Into<String>) -> Self {
        Self { counter, why: why.into(), principal: None }
    }

    pub(super) fn slow() -> Self {
        Self::new(RemoteCounter::RefusedSlow, "the TLS handshake and the token took too long")
    }

    pub(super) fn frequent() -> Self {
        Self::new(RemoteCounter::RefusedFrequent, "its address has begun too many connections")
    }

    pub(super) fn displaced() -> Self {
        Self::new(RemoteCounter::RefusedDisplaced, "it made room for a newer connection before it had sent its token")
    }
}

impl Open {
    /// Carries its bytes until either side ends.
    ///
    /// # Errors
    /// Why it broke.
    pub(super) async fn carry(self) -> io::Result<()> {
        let Self { tls, pair, _place, .. } = self;
        carry(tls, pair, TimeLimits::default()).await
    }
}

/// Opens a connection. A refused peer that speaks TLS has been told why.
pub(super) async fn open(port: &Port, stream: TcpStream, address: IpAddr) -> Result<Open, Refused> {
    prepare(&stream).map_err(|error| no_tls(&error))?;
    let (read, write) = stream.into_split();
    let peer = join(read.take(REMOTE_OPENING_BYTES_MAX), write);
    // Reading the peer's greeting costs little. What follows costs much.
    let greeted =
        LazyConfigAcceptor::new(rustls::server::Acceptor::default(), peer).await.map_err(|error| no_tls(&error))?;
    if !port.may_shake_hands(address) {
        let why = "handshakes of strangers have taken their share of a processor";
        return Err(Refused::new(RemoteCounter::RefusedStrangers, why));
    }
    port.measured(address, open_greeted(port, greeted)).await
}

fn no_tls(error: &io::Error) -> Refused {
    Refused::new(RemoteCounter::RefusedTls, format!("no TLS handshake: {error}"))
}

fn ended(error: &io::Error) -> Refused {
    Refused::new(RemoteCounter::RefusedOpening, format!("it ended early: {error}"))
}

/// Does the rest: the handshake, the token, the principal's share.
async fn open_greeted(port: &Port, greeted: StartHandshake<Peer>) -> Result<Open, Refused> {
    let access = port.access.borrow().clone();
    let bounded = |tls: &mut rustls::ServerConnection| tls.set_buffer_limit(Some(REMOTE_TLS_BUFFER_BYTES));
    let mut tls = greeted.into_stream_with(access.tls.clone(), bounded).await.map_err(|error| no_tls(&error))?;
    let (mut head, mut token) = ([0; HEAD_BYTES], [0; TOKEN_BYTES_MAX]);
    tls.read_exact(&mut head).await.map_err(|error| ended(&error))?;
    let holder = match opening::token_bytes(&head) {
        Ok(bytes) => {
            tls.read_exact(&mut token[..bytes]).await.map_err(|error| ended(&error))?;
            access.principals.holder(&token[..bytes])
        }
        Err(fault) => {
            let refused = Refused::new(RemoteCounter::RefusedOpening, fault.to_string());
            return Err(refuse(tls, &opening_error(fault), refused).await);
        }
    };
    let Some(holder) = holder else {
        let refused = Refused::new(RemoteCounter::RefusedToken, "no principal has its token");
        return Err(refuse(tls, &token_error(), refused).await);
    };
    match admit(port, &holder) {
        Ok((pair, place)) => {
            let accepted = async {
                tls.write_all(&opening::answer(Verdict::Accepted)).await?;
                tls.flush().await
            };
            accepted.await.map_err(|error| ended(&error))?;
            tls.get_mut().0.reader_mut().set_limit(u64::MAX);
            Ok(Open { holder, tls, pair, _place: place })
        }
        Err((counter, error)) => {
            let principal = Some(holder.principal.name.to_string());
            let refused = Refused { principal, ..Refused::new(counter, error.message()) };
            Err(refuse(tls, &error, refused).await)
        }
    }
}

/// Takes a place of the port and of the principal's share, and gives the acceptor one end of a socket pair.
fn admit(
    port: &Port,
    holder: &Holder,
) -> Result<(UnixStream, (OwnedSemaphorePermit, UserReservation)), (RemoteCounter, Error)> {
    let overloaded = |what: &str, remedy: &str| Error::new(Kind::Overloaded, what, remedy);
    let share = "share connections: one connection takes any number of requests in flight";
    let place = port.places.clone().try_acquire_owned().map_err(|_| {
        let remedy = "raise connections_max in [remote], or share connections";
        (RemoteCounter::RefusedFull, overloaded("the remote port has too many connections", remedy))
    })?;
    let principal = holder.principal.clone();
    let reserved = port.shares.reserve(principal.user, SharedResource::Connections, 1, port.connections_max);
    let reserved = reserved.ok_or_else(|| {
        (RemoteCounter::RefusedShare, overloaded("too many connections of this principal are open", share))
    })?;
    let system = |cause: io::Error| {
        let error = Error::new(Kind::System, "cannot make a socket pair", "raise the limit of open files");
        (RemoteCounter::RefusedSystem, error.caused_by(cause))
    };
    let pair = || {
        let (ours, stream) = StdStream::pair()?;
        ours.set_nonblocking(true)?;
        stream.set_nonblocking(true)?;
        Ok((UnixStream::from_std(ours)?, stream))
    };
    let (ours, stream) = pair().map_err(system)?;
    port.acceptor.try_send(RemoteConnection { stream, principal }).map_err(|error| match error {
        TrySendError::Full(_) => {
            (RemoteCounter::RefusedFull, overloaded("too many connections are being opened", "try again"))
        }
        TrySendError::Closed(_) => (RemoteCounter::RefusedDraining, draining()),
    })?;
    Ok((ours, (place, reserved)))
}

/// Tells a peer why it is refused, and waits for its end: a TCP connection that is closed before all its bytes are read
/// may lose the answer.
async fn refuse(mut tls: TlsStream<Peer>, error: &Error, refused: Refused) -> Refused {
    let mut answer = opening::answer(Verdict::Refused).to_vec();
    ReplyEncoder::default().error(CorrelationId(0), error, &mut answer);
    let tell = async {
        tls.write_all(&answer).await?;
        tls.shutdown().await?;
        let mut rest = [0; 1024];
        while tls.read(&mut rest).await? > 0 {}
        Ok::<_, io::Error>(())
    };
    // It is refused whether it reads the answer or not.
    let _ = tokio::time::timeout(Duration::from_millis(REMOTE_END_MS_MAX), tell).await;
    refused
}

fn opening_error(fault: OpeningFault) -> Error {
    match fault {
        OpeningFault::Version(_) => {
            Error::new(Kind::UnsupportedVersion, fault.to_string(), "run kvrouted connect of the daemon's version")
        }
        _ => Error::new(Kind::Malformed, fault.to_string(), "connect to this port with kvrouted connect"),
    }
}

fn token_error() -> Error {
    let remedy =
        "give kvrouted connect a token of the daemon's principals_file, and send the daemon SIGHUP if it is new";
    Error::new(Kind::NotPermitted, "no principal has this token", remedy)
}
