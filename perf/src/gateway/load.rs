//! Asks through a port: so many connections, one request in flight on each, the next as soon as the reply is whole.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hdrhistogram::Histogram;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use crate::args::Asked;
use crate::failure::Failure;

/// Longest time that is told from longer ones.
const LATENCY_NS_MAX: u64 = 10_000_000_000;
/// How long one reply may take.
const REPLY_MAX: Duration = Duration::from_secs(10);

/// What was measured.
#[derive(Debug)]
pub(crate) struct Measured {
    /// From just before a request is sent until its reply is whole.
    pub(crate) latency_ns: Histogram<u64>,
    /// Whole replies.
    pub(crate) requests: u64,
    /// From the first request to the last reply.
    pub(crate) seconds: f64,
}

/// A request with its different bodies, and the bytes of its reply.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    path: &'static str,
    bodies: Vec<Bytes>,
    reply: Bytes,
}

impl Call {
    /// Of a kind of requests.
    #[must_use]
    pub(crate) fn of(asked: Asked) -> Self {
        let bodies = asked.bodies().into_iter().map(Bytes::from).collect();
        Self { path: asked.path(), bodies, reply: asked.reply().into() }
    }
}

/// Who asks: one thread.
pub(crate) struct Client(Runtime);

/// A connection, and the place of the body that it sends next.
struct Connection {
    sender: SendRequest<Full<Bytes>>,
    next: usize,
}

impl Client {
    /// A client.
    ///
    /// # Errors
    /// The system refuses.
    pub(crate) fn new() -> Result<Self, Failure> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.map(Self).map_err(Failure::system("start a runtime"))
    }

    /// Asks each body once and compares each whole reply.
    ///
    /// # Errors
    /// What is not as it should be.
    pub(crate) fn try_all(&self, port: u16, call: &Call) -> Result<(), String> {
        self.0.block_on(async {
            let mut connection = connect(port, 0).await?;
            for body in &call.bodies {
                let reply = ask(&mut connection.sender, call.path, body.clone());
                let reply = tokio::time::timeout(REPLY_MAX, reply).await.map_err(|_| "no reply in time")??;
                if reply != call.reply {
                    return Err(format!("another reply than the upstream's, of {} bytes", reply.len()));
                }
            }
            Ok(())
        })
    }

    /// The text at a path.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn get(&self, port: u16, path: &str) -> Result<String, String> {
        self.0.block_on(async {
            let mut connection = connect(port, 0).await?;
            let request = Request::get(path).header(HOST, "localhost").body(Full::default());
            let request = request.map_err(|error| error.to_string())?;
            let (_, body) = whole(&mut connection.sender, request).await?;
            Ok(String::from_utf8_lossy(&body).into_owned())
        })
    }

    /// Asks over so many connections for some seconds, after a fifth of them that does not count. `read` is called just
    /// before and just after the time that counts.
    ///
    /// # Errors
    /// A request that fails ends all.
    pub(crate) fn load<T>(
        &self,
        port: u16,
        call: &Call,
        (connections, seconds): (u32, f64),
        mut read: impl FnMut() -> T,
    ) -> Result<(Measured, T, T), String> {
        self.0.block_on(async {
            let mut open = Vec::new();
            for number in 0..connections as usize {
                open.push(connect(port, number).await?);
            }
            let (open, _) = run(open, call, seconds / 5.0).await?;
            let before = read();
            let (_, measured) = run(open, call, seconds).await?;
            Ok((measured, before, read()))
        })
    }
}

async fn connect(port: u16, next: usize) -> Result<Connection, String> {
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.map_err(|error| error.to_string())?;
    stream.set_nodelay(true).map_err(|error| error.to_string())?;
    let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(|error| error.to_string())?;
    // An error shows in the request that needed the connection.
    tokio::spawn(async move { drop(connection.await) });
    Ok(Connection { sender, next })
}

async fn run(open: Vec<Connection>, call: &Call, seconds: f64) -> Result<(Vec<Connection>, Measured), String> {
    let began = Instant::now();
    let until = began + Duration::from_secs_f64(seconds);
    let mut tasks = JoinSet::new();
    let count = open.len();
    for connection in open {
        tasks.spawn(ask_until(connection, call.clone(), until));
    }
    let (mut open, mut latency_ns) = (Vec::with_capacity(count), histogram());
    while let Some(ended) = tasks.join_next().await {
        let (connection, latencies) = ended.map_err(|error| error.to_string())??;
        open.push(connection);
        // Both have the same bounds.
        latency_ns.add(latencies).map_err(|error| error.to_string())?;
    }
    let measured = Measured { requests: latency_ns.len(), latency_ns, seconds: began.elapsed().as_secs_f64() };
    Ok((open, measured))
}

async fn ask_until(
    mut connection: Connection,
    call: Call,
    until: Instant,
) -> Result<(Connection, Histogram<u64>), String> {
    let mut latency_ns = histogram();
    loop {
        let body = call.bodies[connection.next % call.bodies.len()].clone();
        connection.next += 1;
        connection.sender.ready().await.map_err(|error| error.to_string())?;
        let began = Instant::now();
        let reply = tokio::time::timeout(REPLY_MAX, ask_length(&mut connection.sender, call.path, body));
        let length = reply.await.map_err(|_| "no reply in time")??;
        let ended = Instant::now();
        if length != call.reply.len() {
            return Err(format!("a reply of {length} bytes in place of {}", call.reply.len()));
        }
        let ns = u64::try_from((ended - began).as_nanos()).unwrap_or(u64::MAX);
        latency_ns.saturating_record(ns);
        if ended >= until {
            return Ok((connection, latency_ns));
        }
    }
}

fn histogram() -> Histogram<u64> {
    Histogram::new_with_max(LATENCY_NS_MAX, 3).unwrap_or_else(|_| unreachable!("bounds that hdrhistogram takes"))
}

fn post(path: &str, body: Bytes) -> Result<Request<Full<Bytes>>, String> {
    let request = Request::post(path).header(HOST, "localhost").header(CONTENT_TYPE, "application/json");
    request.body(Full::new(body)).map_err(|error| error.to_string())
}

/// The bytes of the reply; none are kept.
async fn ask_length(sender: &mut SendRequest<Full<Bytes>>, path: &str, body: Bytes) -> Result<usize, String> {
    let mut reply = sender.send_request(post(path, body)?).await.map_err(|error| error.to_string())?;
    if reply.status() != StatusCode::OK {
        return Err(format!("status {}", reply.status().as_u16()));
    }
    let mut length = 0;
    while let Some(frame) = reply.frame().await {
        let frame = frame.map_err(|error| error.to_string())?;
        length += frame.data_ref().map_or(0, Bytes::len);
    }
    Ok(length)
}

async fn ask(sender: &mut SendRequest<Full<Bytes>>, path: &str, body: Bytes) -> Result<Bytes, String> {
    match whole(sender, post(path, body)?).await? {
        (StatusCode::OK, body) => Ok(body),
        (status, _) => Err(format!("status {}", status.as_u16())),
    }
}

async fn whole(
    sender: &mut SendRequest<Full<Bytes>>,
    request: Request<Full<Bytes>>,
) -> Result<(StatusCode, Bytes), String> {
    sender.ready().await.map_err(|error| error.to_string())?;
    let reply = sender.send_request(request).await.map_err(|error| error.to_string())?;
    let status = reply.status();
    let body = reply.into_body().collect().await.map_err(|error| error.to_string())?;
    Ok((status, body.to_bytes()))
}
