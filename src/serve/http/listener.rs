//! The port: who may connect, for how long, and how a connection ends.

use std::future::Future as _;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::Sleep;

use crate::limits::{
    ACCEPT_REST_MS, HTTP_CONNECTIONS_MAX, HTTP_END_MS_MAX, HTTP_HEAD_BYTES_MAX, HTTP_HEAD_MS_MAX, HTTP_HEADERS_MAX,
    HTTP_WRITE_STALL_MS_MAX,
};
use crate::metrics::{CounterSet, HttpCounter};

/// How long connections may take for what they do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// For the head of a request, and for the next request to begin.
    pub(super) head: Duration,
    /// For a reader to take something of a response.
    pub(super) write: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        let ms = Duration::from_millis;
        Self { head: ms(HTTP_HEAD_MS_MAX), write: ms(HTTP_WRITE_STALL_MS_MAX) }
    }
}

/// Accepts and serves connections until `ending` says so; then those that are open may finish what they do for a moment.
pub(super) async fn serve(
    listener: TcpListener,
    router: Router,
    patience: Patience,
    counters: Arc<CounterSet<HttpCounter>>,
    mut ending: watch::Receiver<bool>,
) {
    let places = Arc::new(Semaphore::new(HTTP_CONNECTIONS_MAX));
    let mut open = JoinSet::new();
    loop {
        // Beyond the bound nobody is accepted; the semaphore is never closed.
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { break };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = told(&mut ending) => break,
        };
        let Ok((stream, peer)) = accepted else {
            tokio::time::sleep(Duration::from_millis(ACCEPT_REST_MS)).await;
            continue;
        };
        counters.bump(HttpCounter::Connections);
        let connection = connection(stream, peer, router.clone(), patience, Arc::clone(&counters), ending.clone());
        open.spawn(async move {
            connection.await;
            drop(place);
        });
        while let Some(ended) = open.try_join_next() {
            if let Err(error) = ended {
                counters.bump(HttpCounter::ConnectionsFailed);
                tracing::error!(%error, "answering an HTTP request panicked; its connection is closed, the others go on");
            }
        }
    }
    drop(listener);
    let all_ended = async { while open.join_next().await.is_some() {} };
    if tokio::time::timeout(Duration::from_millis(HTTP_END_MS_MAX), all_ended).await.is_err() {
        tracing::warn!("responses on the HTTP port are cut");
    }
}

/// Waits until it is said that the port ends, or nobody is left to say it.
async fn told(ending: &mut watch::Receiver<bool>) {
    drop(ending.wait_for(|ending| *ending).await);
}

async fn connection(
    stream: TcpStream,
    peer: SocketAddr,
    router: Router,
    patience: Patience,
    counters: Arc<CounterSet<HttpCounter>>,
    mut ending: watch::Receiver<bool>,
) {
    // Small replies are whole replies.
    let _ = stream.set_nodelay(true);
    let reader = Watched { stream, patience: patience.write, stalled: None, counters: Arc::clone(&counters) };
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(patience.head);
    builder.max_headers(HTTP_HEADERS_MAX).max_buf_size(HTTP_HEAD_BYTES_MAX);
    let connection = builder.serve_connection(TokioIo::new(reader), TowerToHyperService::new(router));
    let mut connection = pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = told(&mut ending) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        counters.bump(HttpCounter::ConnectionsFailed);
        tracing::debug!(%peer, %error, "a connection to the HTTP port is closed");
    }
}

/// A connection that fails once its reader has taken nothing for too long.
struct Watched {
    stream: TcpStream,
    patience: Duration,
    /// When it fails, while there is something that is not taken.
    stalled: Option<Pin<Box<Sleep>>>,
    counters: Arc<CounterSet<HttpCounter>>,
}

impl Watched {
    /// What came of an attempt to write.
    fn written<T>(&mut self, cx: &mut Context<'_>, attempt: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if attempt.is_ready() {
            self.stalled = None;
            return attempt;
        }
        let patience = self.patience;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
        if stalled.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        self.counters.bump(HttpCounter::ConnectionsStalled);
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Watched {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, into)
    }
}

impl AsyncWrite for Watched {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let attempt = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.written(cx, attempt)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let attempt = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        self.written(cx, attempt)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// A port whose connections have 50 ms for everything.
    async fn port(answer: String) -> (SocketAddr, Arc<CounterSet<HttpCounter>>, watch::Sender<bool>) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/", get(move || std::future::ready(answer.clone())));
        let patience = Patience { head: Duration::from_millis(50), write: Duration::from_millis(50) };
        let (end, ending) = watch::channel(false);
        let counters = Arc::<CounterSet<HttpCounter>>::default();
        tokio::spawn(serve(listener, router, patience, Arc::clone(&counters), ending));
        (address, counters, end)
    }

    #[tokio::test(flavor = "current_thread")]
    async fn half_a_head_and_silence_are_given_up() {
        let (address, counters, _end) = port("x".into()).await;
        let mut slow = TcpStream::connect(address).await.unwrap();
        slow.write_all(b"GET / HTTP/1.1\r\nHo").await.unwrap();
        let mut idle = TcpStream::connect(address).await.unwrap();
        let mut rest = String::new();
        // Both come to their end by what the other side does.
        slow.read_to_string(&mut rest).await.unwrap();
        idle.read_to_string(&mut rest).await.unwrap();
        assert_eq!(counters.get(HttpCounter::Connections), 2);
    }

    #[tokio::test(flavor = "current_thread")]
    async fn who_does_not_read_is_closed() {
        let (address, counters, _end) = port("x".repeat(64 << 20)).await;
        let mut deaf = TcpStream::connect(address).await.unwrap();
        deaf.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        while counters.get(HttpCounter::ConnectionsStalled) == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    #[tokio::test(flavor = "current_thread")]
    async fn too_many_headers_and_garbage_are_refused() {
        let (address, counters, _end) = port("x".into()).await;
        let many: String = (0..=HTTP_HEADERS_MAX).map(|at| format!("x{at}: y\r\n")).collect();
        let long = format!("x: {}\r\n", "y".repeat(3 * HTTP_HEAD_BYTES_MAX));
        for (request, status) in [
            (format!("GET / HTTP/1.1\r\nHost: x\r\n{many}\r\n"), "431"),
            (format!("GET / HTTP/1.1\r\nHost: x\r\n{long}\r\n"), "431"),
            ("\u{1}\u{2}garbage\r\n\r\n".to_owned(), "400"),
        ] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut reply = [0; 12];
            // Who is closed while it still sends may not be told.
            let read = stream.read_exact(&mut reply).await;
            assert!(read.is_err() || &reply[9..] == status.as_bytes(), "{request:.40}: {reply:?}");
        }
        while counters.get(HttpCounter::ConnectionsFailed) < 3 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test(flavor = "current_thread")]
    async fn connections_beyond_the_bound_wait_and_an_end_closes_the_idle() {
        let (address, counters, end) = port("x".into()).await;
        let mut open = Vec::new();
        for _ in 0..HTTP_CONNECTIONS_MAX {
            open.push(TcpStream::connect(address).await.unwrap());
        }
        let mut late = TcpStream::connect(address).await.unwrap();
        late.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        while counters.get(HttpCounter::Connections) < HTTP_CONNECTIONS_MAX as u64 {
            tokio::task::yield_now().await;
        }
        assert_eq!(counters.get(HttpCounter::Connections), HTTP_CONNECTIONS_MAX as u64);
        open.clear();
        let mut reply = [0; 12];
        late.read_exact(&mut reply).await.unwrap();
        assert_eq!(&reply[9..], b"200");
        end.send(true).unwrap();
        let mut rest = Vec::new();
        late.read_to_end(&mut rest).await.unwrap();
    }
}
