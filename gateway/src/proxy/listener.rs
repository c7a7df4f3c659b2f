//! Listeners: connections of callers over TCP, TLS or a Unix socket, each speaking HTTP/1.1 or HTTP/2, within their
//! bounds and deadlines.

use std::convert::Infallible;
use std::fs::Permissions;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Notify, Semaphore, watch};
use tokio::task::JoinSet;

use super::body::ReplyBody;
use super::tls::ServerTls;
use crate::config::Bounds;
use crate::limits::{ACCEPT_PAUSE, H2_STREAMS_MAX};
use crate::metrics::{Counted, Metrics};

/// What a connection is doing. Requests on it share this.
#[derive(Debug, Default)]
pub struct ConnectionState {
    /// Requests under way.
    running: AtomicUsize,
    /// Whether a request came since it was last looked at.
    was_used: AtomicBool,
    abandoned: Notify,
}

impl ConnectionState {
    /// Closes the connection at once, whatever it is doing: its caller reads nothing.
    pub(crate) fn abandon(&self) {
        self.abandoned.notify_one();
    }
}

/// A request on a connection, until its handler has answered.
struct Running(Arc<ConnectionState>);

impl Running {
    fn of(state: &Arc<ConnectionState>) -> Self {
        state.running.fetch_add(1, Ordering::Relaxed);
        state.was_used.store(true, Ordering::Relaxed);
        Self(Arc::clone(state))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::Relaxed);
        self.0.was_used.store(true, Ordering::Relaxed);
    }
}

/// Answers requests.
pub trait Handle: Send + Sync + 'static {
    /// Answers one request.
    fn handle(
        self: Arc<Self>,
        request: Request<Incoming>,
        connection: Arc<ConnectionState>,
    ) -> impl Future<Output = Response<ReplyBody>> + Send;
}

/// A bound socket.
pub enum Socket {
    /// TCP, with TLS or without.
    Tcp(TcpListener, Option<Arc<ServerTls>>),
    /// A Unix socket; its file is removed at the end.
    Unix(UnixListener, PathBuf),
}

impl Socket {
    /// Binds a TCP address.
    ///
    /// # Errors
    /// The address is in use or not of this machine.
    pub async fn tcp(address: SocketAddr, tls: Option<Arc<ServerTls>>) -> io::Result<Self> {
        Ok(Self::Tcp(TcpListener::bind(address).await?, tls))
    }

    /// Binds a Unix socket. The socket of a process that has gone is replaced; one that answers is not.
    ///
    /// # Errors
    /// Another process listens, or the folder cannot be written.
    pub async fn unix(path: &Path, mode: u32) -> io::Result<Self> {
        if tokio::net::UnixStream::connect(path).await.is_ok() {
            return Err(io::Error::new(io::ErrorKind::AddrInUse, "another process listens on this socket"));
        }
        remove_socket(path)?;
        let listener = UnixListener::bind(path)?;
        std::fs::set_permissions(path, Permissions::from_mode(mode))?;
        Ok(Self::Unix(listener, path.to_owned()))
    }

    /// The TCP address.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(listener, _) => listener.local_addr().ok(),
            Self::Unix(..) => None,
        }
    }
}

/// Removes a socket's file; any other file stays and is an error.
pub(super) fn remove_socket(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::FileTypeExt as _;
    match std::fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => std::fs::remove_file(path),
        Ok(_) => Err(io::Error::new(io::ErrorKind::AlreadyExists, "the path is a file that is no socket")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// The bounds of a listener's connections.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionBounds {
    connections_max: usize,
    header_bytes_max: usize,
    headers_max: usize,
    /// For headers, the TLS handshake and idle connections.
    header: Duration,
}

impl ConnectionBounds {
    /// Those of the configuration.
    #[must_use]
    pub const fn of(bounds: &Bounds, header: Duration) -> Self {
        let Bounds { connections_max, header_bytes_max, headers_max, .. } = *bounds;
        Self { connections_max, header_bytes_max, headers_max, header }
    }
}

/// Serves a socket until `stop` says so; then finishes the requests under way, for at most `drain`.
pub async fn serve<H: Handle>(
    socket: Socket,
    handler: Arc<H>,
    bounds: ConnectionBounds,
    metrics: Arc<Metrics>,
    mut stop: watch::Receiver<bool>,
    drain: Duration,
) {
    let places = Arc::new(Semaphore::new(bounds.connections_max));
    let mut connections = JoinSet::new();
    loop {
        // Beyond the bound, callers wait in the kernel's queue.
        let place = tokio::select! {
            place = Arc::clone(&places).acquire_owned() => place,
            _ = stop.wait_for(|stops| *stops) => break,
        };
        let accepted = tokio::select! {
            accepted = accept(&socket) => accepted,
            _ = stop.wait_for(|stops| *stops) => break,
        };
        let stream = match accepted {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let counted = Counted::of(&metrics.connections);
        let (handler, stop) = (Arc::clone(&handler), stop.clone());
        connections.spawn(async move {
            connect(stream, handler, bounds, stop).await;
            drop((place, counted));
        });
        while connections.try_join_next().is_some() {}
    }
    if let Socket::Unix(_, path) = &socket {
        // A file that stays is replaced at the next start.
        let _ = remove_socket(path);
    }
    drop(socket);
    let all = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(drain, all).await.is_err() {
        tracing::warn!(
            connections = connections.len(),
            "requests took longer than deadlines.drain_ms and were cut off"
        );
        connections.shutdown().await;
    }
}

/// A connection before its first byte.
enum Stream {
    Tcp(tokio::net::TcpStream, Option<Arc<ServerTls>>),
    Unix(tokio::net::UnixStream),
}

async fn accept(socket: &Socket) -> io::Result<Stream> {
    match socket {
        Socket::Tcp(listener, tls) => {
            let (stream, _) = listener.accept().await?;
            // Events of a stream are small, and must not wait for each other.
            stream.set_nodelay(true)?;
            Ok(Stream::Tcp(stream, tls.clone()))
        }
        Socket::Unix(listener, _) => Ok(Stream::Unix(listener.accept().await?.0)),
    }
}

async fn connect<H: Handle>(stream: Stream, handler: Arc<H>, bounds: ConnectionBounds, stop: watch::Receiver<bool>) {
    match stream {
        Stream::Tcp(stream, None) => converse(stream, handler, bounds, stop).await,
        Stream::Unix(stream) => converse(stream, handler, bounds, stop).await,
        Stream::Tcp(stream, Some(tls)) => match tokio::time::timeout(bounds.header, tls.accept(stream)).await {
            Ok(Ok(stream)) => converse(stream, handler, bounds, stop).await,
            Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
            Err(_) => tracing::debug!("a TLS handshake did not end in time"),
        },
    }
}

fn builder(bounds: &ConnectionBounds) -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(bounds.header)
        .max_headers(bounds.headers_max)
        .max_buf_size(bounds.header_bytes_max);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(H2_STREAMS_MAX)
        .max_header_list_size(u32::try_from(bounds.header_bytes_max).unwrap_or(u32::MAX))
        .keep_alive_interval(bounds.header)
        .keep_alive_timeout(bounds.header);
    builder
}

async fn converse<S, H>(stream: S, handler: Arc<H>, bounds: ConnectionBounds, mut stop: watch::Receiver<bool>)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    H: Handle,
{
    let state = Arc::new(ConnectionState::default());
    let service = service_fn(|request| {
        let (handler, state) = (Arc::clone(&handler), Arc::clone(&state));
        async move {
            let running = Running::of(&state);
            let response = handler.handle(request, state).await;
            Ok::<_, Infallible>(response.map(|body| RunningBody { body, _running: running }))
        }
    });
    let builder = builder(&bounds);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let mut idle = tokio::time::interval(bounds.header);
    idle.tick().await;
    let mut is_closing = false;
    loop {
        tokio::select! {
            // A caller that hangs up is no error of the gateway.
            _ = connection.as_mut() => return,
            () = state.abandoned.notified() => return,
            _ = stop.wait_for(|stops| *stops), if !is_closing => {
                is_closing = true;
                connection.as_mut().graceful_shutdown();
            }
            _ = idle.tick() => {
                let is_idle = !state.was_used.swap(false, Ordering::Relaxed)
                    && state.running.load(Ordering::Relaxed) == 0;
                match (is_idle, is_closing) {
                    (true, true) => return,
                    (true, false) => {
                        is_closing = true;
                        connection.as_mut().graceful_shutdown();
                    }
                    (false, _) => {}
                }
            }
        }
    }
}

/// A reply's body, for whose time the connection is in use.
struct RunningBody {
    body: ReplyBody,
    _running: Running,
}

impl hyper::body::Body for RunningBody {
    type Data = bytes::Bytes;
    type Error = super::body::ReplyError;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<hyper::body::Frame<Self::Data>, Self::Error>>> {
        std::pin::Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        self.body.size_hint()
    }
}
