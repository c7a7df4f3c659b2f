//! The picker's listener: HTTP/2 on TCP or on a Unix socket, with TLS or without, until it is told to end.

use std::fs;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::Duration;

use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::chooser::Chooser;
use super::health::Health;
use super::service::Services;
use super::tls::{Certificate, CertificateError, Tls};
use crate::limits::{
    ACCEPT_PAUSE, EPP_CONNECTION_WINDOW_BYTES, EPP_CONNECTIONS_MAX, EPP_EARLY_RESETS_MAX, EPP_HANDSHAKE_TIMEOUT,
    EPP_PING_INTERVAL, EPP_PING_TIMEOUT, EPP_STREAM_WINDOW_BYTES, EPP_STREAMS_MAX,
};

/// Where the picker listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// A TCP port.
    Tcp(SocketAddr),
    /// A Unix socket, by its path.
    Unix(PathBuf),
}

/// Why the picker cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The port cannot be bound.
    #[error("cannot listen on {0}: {1}; choose another port by --listen")]
    Tcp(SocketAddr, io::Error),
    /// The socket cannot be bound.
    #[error("cannot listen on the Unix socket {0}: {1}")]
    Unix(PathBuf, io::Error),
    /// Another process answers on the socket.
    #[error("another process listens on the Unix socket {0}; choose another path by --listen")]
    Taken(PathBuf),
    /// There is no certificate.
    #[error(transparent)]
    Certificate(#[from] CertificateError),
}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, PathBuf),
}

enum Accepted {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// A picker that listens, and does not serve yet.
pub struct EppServer {
    listener: Listener,
    tls: Option<Tls>,
}

impl EppServer {
    /// Binds the listener and reads the certificate; `None` = without TLS.
    ///
    /// # Errors
    /// [`ListenError`], with what to do.
    pub async fn bind(listen: &Listen, certificate: Option<Certificate>) -> Result<Self, ListenError> {
        let tls = match certificate {
            Some(certificate) => Some(Tls::new(certificate).await?),
            None => None,
        };
        let listener = match listen {
            Listen::Tcp(address) => {
                Listener::Tcp(TcpListener::bind(address).await.map_err(|error| ListenError::Tcp(*address, error))?)
            }
            Listen::Unix(path) => Listener::Unix(bind_unix(path).await?, path.clone()),
        };
        Ok(Self { listener, tls })
    }

    /// The bound TCP address; `None` on a Unix socket.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        match &self.listener {
            Listener::Tcp(listener) => listener.local_addr().ok(),
            Listener::Unix(..) => None,
        }
    }

    /// Serves until `end` is ready. Then the health service says so, nothing more is accepted, and answers under way
    /// may go on for at most `drain`: Envoy cuts an answer whose stream the picker ends.
    pub async fn serve<C: Chooser>(
        self,
        services: Services<C>,
        health: Health,
        end: impl Future<Output = ()>,
        drain: Duration,
    ) {
        let Self { listener, tls } = self;
        let (ending, is_ending) = watch::channel(false);
        let mut connections = JoinSet::new();
        let mut end = pin!(end);
        let mut follow = pin!(follow(tls.clone()));
        loop {
            tokio::select! {
                () = &mut end => break,
                () = &mut follow => {}
                Some(_) = connections.join_next(), if !connections.is_empty() => {}
                accepted = listener.accept(), if connections.len() < EPP_CONNECTIONS_MAX => match accepted {
                    Ok(accepted) => {
                        connections.spawn(connection(accepted, tls.clone(), services.clone(), is_ending.clone()));
                    }
                    Err(error) => {
                        tracing::warn!(%error, "could not accept a connection");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                },
            }
        }
        health.end();
        drop(listener);
        ending.send_replace(true);
        let drained = tokio::time::timeout(drain, async { while connections.join_next().await.is_some() {} }).await;
        if drained.is_err() {
            tracing::warn!(
                connections = connections.len(),
                "answers under way were cut: they took longer than the drain time"
            );
        }
    }
}

impl Listener {
    async fn accept(&self) -> io::Result<Accepted> {
        match self {
            Self::Tcp(listener) => listener.accept().await.map(|(stream, _)| Accepted::Tcp(stream)),
            Self::Unix(listener, _) => listener.accept().await.map(|(stream, _)| Accepted::Unix(stream)),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            let _ = fs::remove_file(path); // gone already is as good
        }
    }
}

/// Binds a Unix socket, in place of one that a process left behind when it died.
async fn bind_unix(path: &Path) -> Result<UnixListener, ListenError> {
    let failed = |error| ListenError::Unix(path.to_owned(), error);
    if fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
        if UnixStream::connect(path).await.is_ok() {
            return Err(ListenError::Taken(path.to_owned()));
        }
        fs::remove_file(path).map_err(failed)?;
    }
    UnixListener::bind(path).map_err(failed)
}

async fn follow(tls: Option<Tls>) {
    match tls {
        Some(tls) => tls.follow_files().await,
        None => std::future::pending().await,
    }
}

async fn connection<C: Chooser>(
    accepted: Accepted,
    tls: Option<Tls>,
    services: Services<C>,
    is_ending: watch::Receiver<bool>,
) {
    match (accepted, tls) {
        (Accepted::Tcp(stream), tls) => {
            if let Err(error) = stream.set_nodelay(true) {
                tracing::debug!(%error, "no TCP_NODELAY");
            }
            match tls {
                Some(tls) => over_tls(stream, &tls, services, is_ending).await,
                None => http2(stream, services, is_ending).await,
            }
        }
        (Accepted::Unix(stream), Some(tls)) => over_tls(stream, &tls, services, is_ending).await,
        (Accepted::Unix(stream), None) => http2(stream, services, is_ending).await,
    }
}

async fn over_tls<C: Chooser>(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    tls: &Tls,
    services: Services<C>,
    is_ending: watch::Receiver<bool>,
) {
    match tokio::time::timeout(EPP_HANDSHAKE_TIMEOUT, tls.acceptor().accept(stream)).await {
        Ok(Ok(stream)) => http2(stream, services, is_ending).await,
        Ok(Err(error)) => tracing::info!(%error, "a TLS handshake failed; does Envoy's cluster use TLS?"),
        Err(_) => tracing::info!("a TLS handshake took too long"),
    }
}

async fn http2<C: Chooser>(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    services: Services<C>,
    mut is_ending: watch::Receiver<bool>,
) {
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .keep_alive_interval(EPP_PING_INTERVAL)
        .keep_alive_timeout(EPP_PING_TIMEOUT)
        .initial_stream_window_size(EPP_STREAM_WINDOW_BYTES)
        .initial_connection_window_size(EPP_CONNECTION_WINDOW_BYTES)
        .max_concurrent_streams(u32::try_from(EPP_STREAMS_MAX).unwrap_or(u32::MAX))
        .max_pending_accept_reset_streams(EPP_EARLY_RESETS_MAX);
    let service = service_fn(move |request| services.clone().call(request));
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let ended = tokio::select! {
        ended = &mut connection => ended,
        () = async { is_ending.wait_for(|is_ending| *is_ending).await.ok(); } => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection of Envoy ended");
    }
}
