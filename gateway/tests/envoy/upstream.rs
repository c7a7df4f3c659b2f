//! A trivial upstream: says its name, keeps what arrived, and sends events when the test says so.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::HeaderMap;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use xxhash_rust::xxh3::xxh3_64;

/// What arrived.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

pub(crate) struct Upstream {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

struct Shared {
    name: &'static str,
    seen: Mutex<Vec<Seen>>,
    /// The stream of events under way.
    events: Mutex<Option<mpsc::UnboundedSender<()>>>,
}

impl Upstream {
    pub(crate) async fn start(name: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let shared = Arc::new(Shared { name, seen: Mutex::default(), events: Mutex::default() });
        let task = tokio::spawn(serve(listener, Arc::clone(&shared)));
        Self { address, shared, task }
    }

    /// As if the process had died: nobody listens, and connections are gone.
    pub(crate) async fn stop(&mut self) {
        self.task.abort();
        let _ = (&mut self.task).await; // aborted
    }

    pub(crate) fn count(&self) -> usize {
        self.shared.seen.lock().len()
    }

    pub(crate) fn last(&self) -> Seen {
        self.shared.seen.lock().last().expect("a request").clone()
    }

    /// Sends the next event of the stream under way.
    pub(crate) fn send_event(&self) {
        let events = self.shared.events.lock();
        let sent = events.as_ref().expect("a stream of events").send(());
        assert!(sent.is_ok(), "the stream of events is over");
    }

    /// Ends the stream under way.
    pub(crate) fn end_events(&self) {
        *self.shared.events.lock() = None;
    }
}

async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new(); // aborted when dropped
    loop {
        let Ok((stream, _)) = listener.accept().await else { return };
        let shared = Arc::clone(&shared);
        connections.spawn(async move {
            let service = service_fn(move |request| answer(Arc::clone(&shared), request));
            // Envoy may break a connection whenever it likes.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

async fn answer(
    shared: Arc<Shared>,
    request: Request<Incoming>,
) -> Result<Response<BoxBody<Bytes, Infallible>>, hyper::Error> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let hash = format!("{:016x}", xxh3_64(&body));
    let is_stream = parts.headers.contains_key("x-test-stream");
    shared.seen.lock().push(Seen { headers: parts.headers, body });
    let response = Response::builder().header("x-test-upstream", shared.name).header("x-test-hash", hash);
    if !is_stream {
        let body = Full::new(Bytes::from_static(b"{}")).boxed();
        return Ok(response.header("content-type", "application/json").body(body).expect("a response"));
    }
    let (send, receive) = mpsc::unbounded_channel();
    *shared.events.lock() = Some(send);
    let name = shared.name;
    let events = stream::unfold((receive, 0), move |(mut receive, number)| async move {
        receive.recv().await?;
        let event = Frame::data(Bytes::from(format!("data: {name} {number}\n\n")));
        Some((Ok(event), (receive, number + 1)))
    });
    let body = BodyExt::boxed(StreamBody::new(events));
    Ok(response.header("content-type", "text/event-stream").body(body).expect("a response"))
}
