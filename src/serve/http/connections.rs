//! The connections of an HTTP port: how many there are, how long each may take, which one gives way to a new one, and
//! how each ends.
//!
//! A connection gives way only while the daemon waits for its peer: between two requests, or, after
//! `HTTP_DISPLACE_AFTER_MS`, within the body of a request or a reply that is not read. The connection that has kept the
//! daemon waiting longest goes first. A connection whose request the daemon works on keeps its place.

use std::convert::Infallible;
use std::io;
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
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, Sleep};

use super::reader_time::ReaderTime;
use crate::limits::{
    ACCEPT_PAUSE_MS, HTTP_DISPLACE_AFTER_MS, HTTP_END_MS_MAX, HTTP_HEAD_BYTES_MAX, HTTP_HEAD_MS_MAX, HTTP_HEADERS_MAX,
    HTTP_REPLY_BYTES_PER_S_MIN, HTTP_SEND_BUFFER_BYTES, HTTP_WRITE_STALL_MS_MAX,
};
use crate::metrics::{CounterSet, HttpCounter};
use crate::watchdog::{self, ThreadMark, watched};

/// The time limits of a connection.
#[derive(Clone, Copy, Debug)]
pub(in crate::serve) struct TimeLimits {
    /// For the head of a request, and for the next request to begin.
    pub(in crate::serve) head: Duration,
    /// For a reader to be behind with a reply.
    pub(in crate::serve) write: Duration,
    /// For the whole connection.
    pub(in crate::serve) whole: Option<Duration>,
}

impl Default for TimeLimits {
    fn default() -> Self {
        let ms = Duration::from_millis;
        Self { head: ms(HTTP_HEAD_MS_MAX), write: ms(HTTP_WRITE_STALL_MS_MAX), whole: None }
    }
}

/// The limits of a port's connections.
#[derive(Clone, Debug)]
pub(in crate::serve) struct ConnectionLimits {
    pub(in crate::serve) times: TimeLimits,
    pub(in crate::serve) connections_max: usize,
    /// The number of connections beyond `connections_max`, and the router for the one request of each.
    pub(in crate::serve) reserved: (usize, Router),
}

/// The address of a request's sender, as an extension of the request.
#[derive(Clone, Copy, Debug)]
pub(in crate::serve) struct Caller(pub(in crate::serve) SocketAddr);

/// The time within which a reply must be read, as an extension of the reply.
#[derive(Clone, Copy, Debug)]
pub(in crate::serve) struct ReadWithin(pub(in crate::serve) Duration);

/// Accepts and serves connections until `ending` is true. Open connections then have `HTTP_END_MS_MAX` to finish.
pub(in crate::serve) async fn serve(
    listener: TcpListener,
    router: Router,
    limits: ConnectionLimits,
    (counters, mark): (Arc<CounterSet<HttpCounter>>, Arc<ThreadMark>),
    mut ending: watch::Receiver<bool>,
) {
    let (reserved, reserve_router) = limits.reserved;
    let places = Places::new(limits.connections_max, reserved);
    let mut open = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = ended(&mut ending) => break,
        };
        let Ok((stream, peer)) = accepted else {
            tokio::time::sleep(Duration::from_millis(ACCEPT_PAUSE_MS)).await;
            continue;
        };
        let place = tokio::select! {
            place = places.take(|| counters.bump(HttpCounter::ConnectionsDisplaced)) => place,
            () = ended(&mut ending) => break,
        };
        counters.bump(HttpCounter::Connections);
        let router = if place.activity.is_reserved { reserve_router.clone() } else { router.clone() };
        let connection = Connection { stream, peer, place, counters: Arc::clone(&counters), ending: ending.clone() };
        let task = connection.serve(router, limits.times);
        open.spawn(watched(Arc::clone(&mark), watchdog::Activity::AnsweringHttp, task));
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

/// Waits until the port ends, or the sender of that message is gone.
async fn ended(ending: &mut watch::Receiver<bool>) {
    drop(ending.wait_for(|ending| *ending).await);
}

/// Waits for `whole`; `None` = for ever.
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
    async fn serve(self, router: Router, times: TimeLimits) {
        let Self { stream, peer, place, counters, mut ending } = self;
        // Small replies are complete replies, and must not wait for more.
        let _ = stream.set_nodelay(true);
        // Unread bytes in the kernel take memory, too. A connection is served even if this limit cannot be set.
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(&stream, HTTP_SEND_BUFFER_BYTES);
        let activity = &place.activity;
        let reader = Watched::new(stream, times.write, Arc::clone(activity), Arc::clone(&counters));
        let mut builder = http1::Builder::new();
        builder.timer(TokioTimer::new()).header_read_timeout(times.head).keep_alive(!place.activity.is_reserved);
        builder.max_headers(HTTP_HEADERS_MAX).max_buf_size(HTTP_HEAD_BYTES_MAX);
        let router = TowerToHyperService::new(router);
        let service = service_fn(|request| answer(&router, Caller(peer), activity, request));
        let mut connection = pin!(builder.serve_connection(TokioIo::new(reader), service));
        let ended = tokio::select! {
            ended = connection.as_mut() => ended,
            () = activity.displaced() => return,
            () = elapsed(times.whole) => return,
            () = ended(&mut ending) => {
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

/// Answers one request, and notes when the daemon waits for its peer.
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

/// The body of a request. It notes when the daemon waits for more of it.
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

/// The body of a reply. It notes when all of it has been handed over.
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

/// The phase of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The daemon waits for its next request, up to the end of the head.
    Head,
    /// The daemon waits for more of a request's body.
    Body,
    /// The daemon works on its request, or writes the reply.
    Answer,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    /// When the connection was accepted, its last reply ended, or its request began.
    since: Instant,
    /// Since when the reader is behind; `None` = it is not.
    behind_since: Option<Instant>,
    /// The deadline for reading the reply.
    reply_deadline: Option<Instant>,
    is_displaced: bool,
}

/// The activity of one connection. Its own task writes it, and the port reads it.
#[derive(Debug)]
pub(super) struct Activity {
    state: Mutex<State>,
    displaced: Notify,
    /// Whether its place is one of those reserved for clients that watch the daemon.
    pub(super) is_reserved: bool,
}

impl Default for Activity {
    fn default() -> Self {
        let state = State {
            phase: Phase::Head,
            since: Instant::now(),
            behind_since: None,
            reply_deadline: None,
            is_displaced: false,
        };
        Self { state: Mutex::new(state), displaced: Notify::new(), is_reserved: false }
    }
}

impl Activity {
    /// The head of a request has arrived.
    pub(super) fn began(&self) {
        let mut state = self.state.lock();
        (state.phase, state.since, state.reply_deadline) = (Phase::Answer, Instant::now(), None);
    }

    /// Whether the daemon waits for more of the request's body now.
    pub(super) fn awaits_body(&self, awaits: bool) {
        self.state.lock().phase = if awaits { Phase::Body } else { Phase::Answer };
    }

    /// The reply is made, and must be read within `whole`; `None` = without a deadline.
    pub(super) fn answered(&self, whole: Option<Duration>) {
        let mut state = self.state.lock();
        (state.phase, state.reply_deadline) = (Phase::Answer, whole.map(|whole| Instant::now() + whole));
    }

    /// All of the reply has been handed over for writing.
    pub(super) fn handed_over(&self) {
        let mut state = self.state.lock();
        (state.phase, state.since) = (Phase::Head, Instant::now());
    }

    /// The reader has been behind since `since`; `None` = it is not.
    pub(super) fn reader_is_behind(&self, since: Option<Instant>) {
        self.state.lock().behind_since = since;
    }

    pub(super) fn reply_deadline(&self) -> Option<Instant> {
        self.state.lock().reply_deadline
    }

    /// Returns when the connection has to make way for another.
    pub(super) async fn displaced(&self) {
        self.displaced.notified().await;
    }

    /// Since when the daemon has waited for the peer, if another connection may get its place.
    fn may_go_since(&self, now: Instant) -> Option<Instant> {
        let state = self.state.lock();
        let held_up = |since: &Instant| now.duration_since(*since) >= Duration::from_millis(HTTP_DISPLACE_AFTER_MS);
        match (state.behind_since, state.phase) {
            _ if state.is_displaced => None,
            (Some(since), _) => Some(since).filter(held_up),
            (None, Phase::Head) => Some(state.since),
            (None, Phase::Body) => Some(state.since).filter(held_up),
            (None, Phase::Answer) => None,
        }
    }
}

/// All places of one port.
#[derive(Debug)]
pub(super) struct Places {
    free: Arc<Semaphore>,
    reserve: Arc<Semaphore>,
    open: Arc<Mutex<Vec<Arc<Activity>>>>,
}

/// The place of one connection, until dropped.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) activity: Arc<Activity>,
    open: Arc<Mutex<Vec<Arc<Activity>>>>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.open.lock().retain(|other| !Arc::ptr_eq(other, &self.activity));
    }
}

impl Places {
    pub(super) fn new(places: usize, reserved: usize) -> Self {
        let [free, reserve] = [places, reserved].map(|places| Arc::new(Semaphore::new(places)));
        Self { free, reserve, open: Arc::default() }
    }

    /// A place for a new connection. `displaced` is called for each connection that gives way to it.
    pub(super) async fn take(&self, displaced: impl Fn()) -> Place {
        loop {
            if let Ok(permit) = Arc::clone(&self.free).try_acquire_owned() {
                return self.place(permit, false);
            }
            if let Some(is_reserved) = self.displace(Instant::now()) {
                displaced();
                let places = if is_reserved { &self.reserve } else { &self.free };
                // Always `Ok`: the semaphores are never closed.
                if let Ok(permit) = Arc::clone(places).acquire_owned().await {
                    return self.place(permit, is_reserved);
                }
            }
            if let Ok(permit) = Arc::clone(&self.reserve).try_acquire_owned() {
                return self.place(permit, true);
            }
            // The daemon works on the requests of all connections.
            tokio::time::sleep(Duration::from_millis(ACCEPT_PAUSE_MS)).await;
        }
    }

    fn place(&self, permit: OwnedSemaphorePermit, is_reserved: bool) -> Place {
        let activity = Arc::new(Activity { is_reserved, ..Activity::default() });
        self.open.lock().push(Arc::clone(&activity));
        Place { activity, open: Arc::clone(&self.open), _permit: permit }
    }

    /// Ends the connection that has kept the daemon waiting longest, if there is one. Returns whether its place is
    /// reserved.
    fn displace(&self, now: Instant) -> Option<bool> {
        let open = self.open.lock();
        let waited = open.iter().filter_map(|activity| Some((activity.may_go_since(now)?, activity)));
        let (_, longest) = waited.min_by_key(|(since, _)| *since)?;
        longest.state.lock().is_displaced = true;
        longest.displaced.notify_one();
        Some(longest.is_reserved)
    }
}

/// How far a connection's reader is behind.
#[derive(Debug)]
struct Progress {
    time: ReaderTime,
    waits_since: Option<Instant>,
}

impl Progress {
    const fn new(max: Duration) -> Self {
        Self { time: ReaderTime::new(max, HTTP_REPLY_BYTES_PER_S_MIN), waits_since: None }
    }

    /// When the connection fails if the reader reads nothing until then. Counts the wait from now on.
    fn deadline(&mut self, now: Instant) -> Instant {
        *self.waits_since.get_or_insert(now) + self.time.left()
    }

    /// Since when the reader is behind, its earlier lag included. Counts the wait from now on.
    fn behind_since(&mut self, now: Instant) -> Option<Instant> {
        self.waits_since.get_or_insert(now).checked_sub(self.time.behind())
    }

    /// The reader took `bytes`, and the wait is over.
    fn took(&mut self, bytes: usize, now: Instant) {
        let waited = self.waits_since.take().map_or(Duration::ZERO, |since| now.duration_since(since));
        self.time.took(bytes, waited);
    }
}

/// A connection that fails once its reader is too far behind.
pub(super) struct Watched {
    stream: TcpStream,
    progress: Progress,
    /// The timer of its failure, while there are unread bytes.
    late: Option<Pin<Box<Sleep>>>,
    activity: Arc<Activity>,
    counters: Arc<CounterSet<HttpCounter>>,
}

impl Watched {
    pub(super) fn new(
        stream: TcpStream,
        times: Duration,
        activity: Arc<Activity>,
        counters: Arc<CounterSet<HttpCounter>>,
    ) -> Self {
        Self { stream, progress: Progress::new(times), late: None, activity, counters }
    }

    /// Notes the result of an attempt to write.
    fn written(&mut self, cx: &mut Context<'_>, attempt: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        let now = Instant::now();
        if let Poll::Ready(written) = attempt {
            self.progress.took(*written.as_ref().unwrap_or(&0), now);
            if self.late.take().is_some() {
                self.activity.reader_is_behind(None);
            }
            return Poll::Ready(written);
        }
        let deadline = self.progress.deadline(now);
        if self.late.is_none() {
            self.activity.reader_is_behind(self.progress.behind_since(now));
        }
        let deadline = self.activity.reply_deadline().map_or(deadline, |reply| reply.min(deadline));
        let late = self.late.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
        if std::future::Future::poll(late.as_mut(), cx).is_pending() {
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

    // With vectored writes hyper keeps the bytes of a reply where they are; otherwise it copies them for each
    // connection.
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
    use crate::limits::HTTP_CONNECTIONS_MAX;

    fn mark() -> Arc<ThreadMark> {
        Arc::new(ThreadMark::new("http", true))
    }

    /// A port whose connections have 50 ms for each step.
    async fn port(answer: String) -> (SocketAddr, Arc<CounterSet<HttpCounter>>, watch::Sender<bool>) {
        let times = TimeLimits { head: Duration::from_millis(50), write: Duration::from_millis(50), whole: None };
        port_of(answer, ConnectionLimits { times, connections_max: HTTP_CONNECTIONS_MAX, reserved: (0, Router::new()) })
            .await
    }

    async fn port_of(
        answer: String,
        limits: ConnectionLimits,
    ) -> (SocketAddr, Arc<CounterSet<HttpCounter>>, watch::Sender<bool>) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/", get(move || std::future::ready(answer.clone())));
        let (end, ending) = watch::channel(false);
        let counters = Arc::<CounterSet<HttpCounter>>::default();
        tokio::spawn(serve(listener, router, limits, (Arc::clone(&counters), mark()), ending));
        (address, counters, end)
    }

    #[tokio::test(flavor = "current_thread")]
    async fn half_a_head_and_silence_are_closed() {
        let (address, counters, _end) = port("x".into()).await;
        let mut slow = TcpStream::connect(address).await.unwrap();
        slow.write_all(b"GET / HTTP/1.1\r\nHo").await.unwrap();
        let mut idle = TcpStream::connect(address).await.unwrap();
        let mut rest = String::new();
        // The port closes both.
        slow.read_to_string(&mut rest).await.unwrap();
        idle.read_to_string(&mut rest).await.unwrap();
        assert_eq!(counters.get(HttpCounter::Connections), 2);
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_connection_that_does_not_read_is_closed() {
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
            // A client that is closed while it still sends may not get the status.
            let read = stream.read_exact(&mut reply).await;
            assert!(read.is_err() || &reply[9..] == status.as_bytes(), "{request:.40}: {reply:?}");
        }
        while counters.get(HttpCounter::ConnectionsFailed) < 3 {
            tokio::task::yield_now().await;
        }
    }

    /// As [`port`], without time limits.
    async fn patient_port(connections_max: usize, reserved: (usize, Router)) -> (SocketAddr, watch::Sender<bool>) {
        let times = TimeLimits { head: Duration::from_secs(3600), write: Duration::from_secs(3600), whole: None };
        let (address, _, end) = port_of("x".into(), ConnectionLimits { times, connections_max, reserved }).await;
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
        // There are no time limits here: only a new connection ends an old one.
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
    async fn while_all_connections_are_at_work_a_reserved_place_answers_one_request() {
        let watched = Router::new().route("/", get(|| std::future::ready("watched")));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let began = Arc::new(tokio::sync::Semaphore::new(0));
        let begins = Arc::clone(&began);
        let working = get(move || {
            begins.add_permits(1);
            std::future::pending::<&str>()
        });
        let times = TimeLimits { head: Duration::from_secs(3600), write: Duration::from_secs(3600), whole: None };
        let limits = ConnectionLimits { times, connections_max: 1, reserved: (1, watched) };
        let (_end, ending) = watch::channel(false);
        tokio::spawn(serve(listener, Router::new().route("/", working), limits, (Arc::default(), mark()), ending));
        let mut busy = TcpStream::connect(address).await.unwrap();
        busy.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        began.acquire().await.unwrap().forget();
        for _ in 0..3 {
            assert!(asked(address).await.ends_with("watched"));
        }
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_reader_that_takes_a_byte_now_and_then_is_closed() {
        let (address, counters, _end) = port("x".repeat(64 << 20)).await;
        let mut slow = TcpStream::connect(address).await.unwrap();
        slow.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        while counters.get(HttpCounter::ConnectionsStalled) == 0 {
            // It is never silent for long: a limit on silence alone would let it go on.
            let _ = slow.read(&mut [0]).await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    const HELD_UP: Duration = Duration::from_millis(HTTP_DISPLACE_AFTER_MS);

    #[tokio::test(flavor = "current_thread")]
    async fn a_connection_whose_request_is_in_progress_keeps_its_place() {
        let places = Places::new(3, 1);
        let [working, sending, idle] = [places.take(|| {}).await, places.take(|| {}).await, places.take(|| {}).await];
        working.activity.began();
        sending.activity.began();
        sending.activity.awaits_body(true);
        idle.activity.began();
        idle.activity.handed_over();
        let later = Instant::now() + HELD_UP;
        assert_eq!(places.displace(later), Some(false), "the daemon has waited longest for the missing body");
        sending.activity.displaced().await;
        assert_eq!(places.displace(later), Some(false), "then the connection that is idle");
        idle.activity.displaced().await;
        assert_eq!(places.displace(later), None, "and no connection is displaced twice");
        let reserved = places.take(|| panic!("no connection gives way")).await;
        assert!(reserved.activity.is_reserved);
        drop(idle);
        assert!(!places.take(|| panic!("there is a place")).await.activity.is_reserved);
        assert_eq!(places.displace(later), Some(true), "a connection on a reserved place gives way, too");
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_slow_reader_and_a_slow_sender_keep_their_places_at_first() {
        let (places, now) = (Places::new(2, 0), Instant::now());
        let [reading, sending] = [places.take(|| {}).await, places.take(|| {}).await];
        reading.activity.began();
        reading.activity.answered(None);
        reading.activity.reader_is_behind(Some(Instant::now()));
        sending.activity.began();
        sending.activity.awaits_body(true);
        assert_eq!(places.displace(now), None);
        let later = Instant::now() + HELD_UP;
        assert!(places.displace(later).is_some() && places.displace(later).is_some());
        assert_eq!(places.displace(later), None);
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_new_connection_gets_the_place_that_was_freed_and_not_a_reserved_one() {
        let places = Places::new(1, 1);
        let idle = places.take(|| {}).await;
        let ending = tokio::spawn(async move {
            let held = idle;
            held.activity.displaced().await;
        });
        let next = places.take(|| {}).await;
        assert!(!next.activity.is_reserved);
        ending.await.unwrap();
    }

    #[test]
    fn only_a_reader_at_the_minimum_rate_keeps_its_time() {
        let (begin, s) = (Instant::now(), Duration::from_secs(1));
        let mut progress = Progress::new(10 * s);
        for second in 0..100 {
            let now = begin + second * s;
            assert_eq!(progress.deadline(now), now + 10 * s, "it keeps up");
            progress.took(HTTP_REPLY_BYTES_PER_S_MIN as usize, now + s);
        }
        let mut now = begin;
        let mut waits = 0;
        while progress.deadline(now) > now + s {
            now += s;
            progress.took(1, now);
            waits += 1;
        }
        assert_eq!(waits, 10, "a byte a second counts as nothing");
        assert!(progress.behind_since(now).is_some_and(|since| since <= now - 8 * s));
    }
}
