//! A port's connections: how many there are, for how long, which of them gives way, and how each ends.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::places::{Activity, Place, Places};
use super::progress::Watched;
use crate::limits::{
    ACCEPT_REST_MS, HTTP_END_MS_MAX, HTTP_HEAD_BYTES_MAX, HTTP_HEAD_MS_MAX, HTTP_HEADERS_MAX, HTTP_SEND_BUFFER_BYTES,
    HTTP_WRITE_STALL_MS_MAX,
};
use crate::metrics::{CounterSet, HttpCounter};

/// How long connections may take for what they do.
#[derive(Clone, Copy, Debug)]
pub(in crate::serve) struct Patience {
    /// For the head of a request, and for the next request to begin.
    pub(in crate::serve) head: Duration,
    /// For a reader to be behind with a response.
    pub(in crate::serve) write: Duration,
    /// For everything.
    pub(in crate::serve) whole: Option<Duration>,
}

impl Default for Patience {
    fn default() -> Self {
        let ms = Duration::from_millis;
        Self { head: ms(HTTP_HEAD_MS_MAX), write: ms(HTTP_WRITE_STALL_MS_MAX), whole: None }
    }
}

/// What a port allows its connections.
#[derive(Clone, Debug)]
pub(in crate::serve) struct Terms {
    pub(in crate::serve) patience: Patience,
    pub(in crate::serve) connections_max: usize,
    /// Connections beyond that number, and what answers the one request of each.
    pub(in crate::serve) reserved: (usize, Router),
}

/// Who sent a request, as an extension of it.
#[derive(Clone, Copy, Debug)]
pub(in crate::serve) struct Caller(pub(in crate::serve) SocketAddr);

/// Within which time a response has to be read, as an extension of it.
#[derive(Clone, Copy, Debug)]
pub(in crate::serve) struct ReadWithin(pub(in crate::serve) Duration);

/// Accepts and serves connections until `ending` says so; then those that are open may finish what they do for a moment.
pub(in crate::serve) async fn serve(
    listener: TcpListener,
    router: Router,
    terms: Terms,
    counters: Arc<CounterSet<HttpCounter>>,
    mut ending: watch::Receiver<bool>,
) {
    let (reserved, reserve_router) = terms.reserved;
    let places = Places::new(terms.connections_max, reserved);
    let mut open = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = told(&mut ending) => break,
        };
        let Ok((stream, peer)) = accepted else {
            tokio::time::sleep(Duration::from_millis(ACCEPT_REST_MS)).await;
            continue;
        };
        let place = tokio::select! {
            place = places.take(|| counters.bump(HttpCounter::ConnectionsDisplaced)) => place,
            () = told(&mut ending) => break,
        };
        counters.bump(HttpCounter::Connections);
        let router = if place.activity.is_reserved { reserve_router.clone() } else { router.clone() };
        let connection = Connection { stream, peer, place, counters: Arc::clone(&counters), ending: ending.clone() };
        open.spawn(connection.serve(router, terms.patience));
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
        tracing::warn!("responses on an HTTP port are cut");
    }
}

/// Waits until it is said that the port ends, or nobody is left to say it.
async fn told(ending: &mut watch::Receiver<bool>) {
    drop(ending.wait_for(|ending| *ending).await);
}

/// Waits for so long, or for ever.
async fn elapsed(whole: Option<Duration>) {
    match whole {
        Some(whole) => tokio::time::sleep(whole).await,
        None => std::future::pending().await,
    }
}

/// An accepted connection.
struct Connection {
    stream: TcpStream,
    peer: SocketAddr,
    place: Place,
    counters: Arc<CounterSet<HttpCounter>>,
    ending: watch::Receiver<bool>,
}

impl Connection {
    async fn serve(self, router: Router, patience: Patience) {
        let Self { stream, peer, place, counters, mut ending } = self;
        // Small replies are whole replies.
        let _ = stream.set_nodelay(true);
        // What the kernel holds of a reply that is not read is memory, too. A connection without the bound is served.
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(&stream, HTTP_SEND_BUFFER_BYTES);
        let activity = &place.activity;
        let reader = Watched::new(stream, patience.write, Arc::clone(activity), Arc::clone(&counters));
        let mut builder = http1::Builder::new();
        builder.timer(TokioTimer::new()).header_read_timeout(patience.head).keep_alive(!place.activity.is_reserved);
        builder.max_headers(HTTP_HEADERS_MAX).max_buf_size(HTTP_HEAD_BYTES_MAX);
        let router = TowerToHyperService::new(router);
        let service = service_fn(|request| answer(&router, Caller(peer), activity, request));
        let mut connection = pin!(builder.serve_connection(TokioIo::new(reader), service));
        let ended = tokio::select! {
            ended = connection.as_mut() => ended,
            () = activity.displaced() => return,
            () = elapsed(patience.whole) => return,
            () = told(&mut ending) => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = ended {
            counters.bump(HttpCounter::ConnectionsFailed);
            tracing::debug!(%peer, %error, "a connection to an HTTP port is closed");
        }
    }
}

/// Answers one request, and notes what it waits for.
fn answer(
    router: &TowerToHyperService<Router>,
    caller: Caller,
    activity: &Arc<Activity>,
    mut request: hyper::Request<Incoming>,
) -> impl Future<Output = Result<hyper::Response<Sent>, Infallible>> + Send + use<> {
    activity.began();
    request.extensions_mut().insert(caller);
    let activity = Arc::clone(activity);
    let answering = router.call(request.map(|body| Received { body, activity: Arc::clone(&activity) }));
    async move {
        let response = answering.await?;
        activity.answered(response.extensions().get::<ReadWithin>().map(|within| within.0));
        Ok(response.map(|body| Sent { body, activity }))
    }
}

/// The body of a request, which notes when more of it is waited for.
struct Received {
    body: Incoming,
    activity: Arc<Activity>,
}

impl hyper::body::Body for Received {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        self.activity.awaits_body(polled.is_pending());
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of a reply, which notes when all of it was handed over.
struct Sent {
    body: Body,
    activity: Arc<Activity>,
}

impl Drop for Sent {
    fn drop(&mut self) {
        self.activity.handed_over();
    }
}

impl hyper::body::Body for Sent {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::limits::HTTP_CONNECTIONS_MAX;

    /// A port whose connections have 50 ms for everything.
    async fn port(answer: String) -> (SocketAddr, Arc<CounterSet<HttpCounter>>, watch::Sender<bool>) {
        let patience = Patience { head: Duration::from_millis(50), write: Duration::from_millis(50), whole: None };
        port_of(answer, Terms { patience, connections_max: HTTP_CONNECTIONS_MAX, reserved: (0, Router::new()) }).await
    }

    async fn port_of(answer: String, terms: Terms) -> (SocketAddr, Arc<CounterSet<HttpCounter>>, watch::Sender<bool>) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/", get(move || std::future::ready(answer.clone())));
        let (end, ending) = watch::channel(false);
        let counters = Arc::<CounterSet<HttpCounter>>::default();
        tokio::spawn(serve(listener, router, terms, Arc::clone(&counters), ending));
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

    /// As [`port`], for connections that may take as long as they like.
    async fn patient_port(connections_max: usize, reserved: (usize, Router)) -> (SocketAddr, watch::Sender<bool>) {
        let patience = Patience { head: Duration::from_secs(3600), write: Duration::from_secs(3600), whole: None };
        let (address, _, end) = port_of("x".into(), Terms { patience, connections_max, reserved }).await;
        (address, end)
    }

    async fn asked(address: SocketAddr) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).await.unwrap();
        reply
    }

    #[tokio::test(flavor = "current_thread")]
    async fn on_a_full_port_the_longest_idle_gives_way_and_an_end_closes_the_others() {
        let (address, end) = patient_port(2, (0, Router::new())).await;
        let mut half = TcpStream::connect(address).await.unwrap();
        half.write_all(b"GET / HTTP/1.1\r\nHo").await.unwrap();
        let mut idle = TcpStream::connect(address).await.unwrap();
        let mut rest = Vec::new();
        // Nobody has a bound of time here: only the one that comes ends the one that was there.
        assert!(asked(address).await.starts_with("HTTP/1.1 200"));
        half.read_to_end(&mut rest).await.unwrap();
        let mut filler = TcpStream::connect(address).await.unwrap();
        assert!(asked(address).await.starts_with("HTTP/1.1 200"));
        idle.read_to_end(&mut rest).await.unwrap();
        end.send(true).unwrap();
        filler.read_to_end(&mut rest).await.unwrap();
        assert!(rest.is_empty());
    }

    #[tokio::test(flavor = "current_thread")]
    async fn while_the_daemon_works_for_all_a_reserved_place_answers_one_request() {
        let watched = Router::new().route("/", get(|| std::future::ready("watched")));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let began = Arc::new(tokio::sync::Semaphore::new(0));
        let begins = Arc::clone(&began);
        let working = get(move || {
            begins.add_permits(1);
            std::future::pending::<&str>()
        });
        let patience = Patience { head: Duration::from_secs(3600), write: Duration::from_secs(3600), whole: None };
        let terms = Terms { patience, connections_max: 1, reserved: (1, watched) };
        let (_end, ending) = watch::channel(false);
        tokio::spawn(serve(listener, Router::new().route("/", working), terms, Arc::default(), ending));
        let mut busy = TcpStream::connect(address).await.unwrap();
        busy.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        began.acquire().await.unwrap().forget();
        for _ in 0..3 {
            assert!(asked(address).await.ends_with("watched"));
        }
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_reader_that_takes_a_byte_now_and_then_is_given_up() {
        let (address, counters, _end) = port("x".repeat(64 << 20)).await;
        let mut slow = TcpStream::connect(address).await.unwrap();
        slow.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        while counters.get(HttpCounter::ConnectionsStalled) == 0 {
            // Never long without a byte: a bound on silence alone would let it go on.
            let _ = slow.read(&mut [0]).await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
