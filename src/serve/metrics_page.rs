//! `/metrics`, on the loopback interface and off unless a port is given.
//!
//! Every user of the machine can reach the port, whoever may use the sockets. So connections are few and
//! do not stay: they must not use up the files that gateways and engines need.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Sleep;

use crate::error::{Error, Kind, Result};
use crate::limits::{METRICS_CONNECTION_MS_MAX, METRICS_CONNECTIONS_MAX};

/// What OpenMetrics text is called.
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The page's port, bound. Beyond the bound on connections nothing is accepted.
pub struct MetricsPage(Port);

impl MetricsPage {
    /// Binds a port of the loopback interface; 0 = there is to be no page.
    ///
    /// # Errors
    /// [`Kind::System`] if the port is taken or may not be bound.
    pub async fn bind(port: u16) -> Result<Option<Self>> {
        match port {
            0 => Ok(None),
            port => Port::bind(port).await.map(|port| Some(Self(port))),
        }
    }

    /// Answers scrapes with what `render` says, until the runtime ends.
    pub async fn serve(
        self,
        render: impl Fn() -> std::result::Result<String, fmt::Error> + Clone + Send + Sync + 'static,
    ) {
        let metrics = move || {
            let render = render.clone();
            async move {
                match render() {
                    Ok(text) => ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response(),
                    Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
                }
            }
        };
        if let Err(cause) = axum::serve(self.0, Router::new().route("/metrics", get(metrics))).await {
            tracing::error!(%cause, "the metrics page stopped");
        }
    }
}

/// The port itself, and the places of those who scrape.
struct Port {
    listener: TcpListener,
    free: Arc<Semaphore>,
    stay: Duration,
}

impl Port {
    async fn bind(port: u16) -> Result<Self> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let listener = TcpListener::bind(address).await.map_err(|cause| {
            Error::new(Kind::System, format!("cannot bind the metrics port {address}"), "choose another metrics.port")
                .caused_by(cause)
        })?;
        let (free, stay) = (Semaphore::new(METRICS_CONNECTIONS_MAX), Duration::from_millis(METRICS_CONNECTION_MS_MAX));
        Ok(Self { listener, free: Arc::new(free), stay })
    }
}

impl Listener for Port {
    type Io = Scrape;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Scrape, SocketAddr) {
        // The semaphore is never closed.
        let Ok(place) = Arc::clone(&self.free).acquire_owned().await else { return std::future::pending().await };
        let (stream, peer) = Listener::accept(&mut self.listener).await;
        (Scrape { stream, end: Box::pin(tokio::time::sleep(self.stay)), _place: place }, peer)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection until its time is up; then it fails, whatever it waits for.
struct Scrape {
    stream: TcpStream,
    end: Pin<Box<Sleep>>,
    _place: OwnedSemaphorePermit,
}

impl Scrape {
    /// The stream, while there is time.
    fn stream(&mut self, cx: &mut Context<'_>) -> io::Result<Pin<&mut TcpStream>> {
        match self.end.as_mut().poll(cx) {
            Poll::Ready(()) => Err(io::ErrorKind::TimedOut.into()),
            Poll::Pending => Ok(Pin::new(&mut self.stream)),
        }
    }
}

impl AsyncRead for Scrape {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.stream(cx)?.poll_read(cx, into)
    }
}

impl AsyncWrite for Scrape {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.stream(cx)?.poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream(cx)?.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream(cx)?.poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test(flavor = "current_thread")]
    async fn a_connection_that_says_nothing_gives_its_place_back() {
        let mut port = Port::bind(0).await.unwrap();
        port.free = Arc::new(Semaphore::new(1));
        port.stay = Duration::from_millis(20);
        let address = port.local_addr().unwrap();
        assert!(address.ip().is_loopback());
        let asked = async {
            let mut silent = TcpStream::connect(address).await.unwrap();
            silent.write_all(b"GET /metrics HT").await.unwrap();
            let mut scraper = TcpStream::connect(address).await.unwrap();
            scraper.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").await.unwrap();
            let mut page = String::new();
            scraper.read_to_string(&mut page).await.unwrap();
            page
        };
        let page = tokio::select! {
            page = asked => page,
            () = MetricsPage(port).serve(|| Ok("# EOF\n".into())) => String::new(),
        };
        assert!(page.starts_with("HTTP/1.0 200 OK\r\n") && page.ends_with("# EOF\n"), "{page}");
    }
}
