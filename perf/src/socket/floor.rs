//! The least that answering takes: frames are cut from what is read, and replies of the same length written, all whole
//! frames of one read by one write, on the daemon's io engines.

use std::cell::Cell;
use std::os::unix::net::{UnixListener, UnixStream};
use std::rc::Rc;
use std::thread;

use kvrouted::limits::FRAME_HEADER_BYTES;
use kvrouted::wire::{FrameHeader, FrameKind};
use rustix::buffer::spare_capacity;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio_uring::buf::BoundedBuf;

use crate::args::{Io, SocketServeArgs};
use crate::failure::Failure;

/// Bytes read at once.
const READ_BYTES: usize = 64 << 10;

/// Bytes of the replies' bodies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReplyBytes {
    /// To a route.
    pub(crate) route: u32,
    /// To all else.
    pub(crate) free: u32,
}

/// Answers on the socket until the process is killed: so many threads, connections handed to them in turns.
///
/// # Errors
/// There is no socket, or a thread or its engine cannot be had.
pub(crate) fn serve(args: &SocketServeArgs) -> Result<(), Failure> {
    let bytes = ReplyBytes { route: args.route_bytes, free: args.free_bytes };
    let (io, spins) = (args.io, args.spin);
    let mut cores = Vec::new();
    for _ in 0..args.cores {
        let (send, receive) = unbounded_channel();
        cores.push(send);
        thread::Builder::new()
            .spawn(move || match io {
                Io::Epoll => on_epoll(receive, bytes, spins),
                Io::Uring => on_uring(receive, bytes, spins),
            })
            .map_err(Failure::system("start a thread"))?;
    }
    let listener = UnixListener::bind(&args.path).map_err(Failure::file(&args.path))?;
    for at in (0..cores.len()).cycle() {
        let (stream, _) = listener.accept().map_err(Failure::system("accept"))?;
        cores[at].send(stream).map_err(|_| Failure::Child("cannot run on this io engine".to_owned()))?;
    }
    Ok(())
}

/// A thread's life on plain tokio, as the daemon's epoll engine. `spins` = never sleep, and try to read from the only
/// connection where there is one.
fn on_epoll(mut connections: UnboundedReceiver<UnixStream>, bytes: ReplyBytes, spins: bool) {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
    tokio::task::LocalSet::new().block_on(&runtime, async {
        if spins {
            tokio::task::spawn_local(async {
                loop {
                    tokio::task::yield_now().await;
                }
            });
        }
        let open = Rc::new(Cell::new(0_u32));
        while let Some(stream) = connections.recv().await {
            let stream = stream.set_nonblocking(true).and_then(|()| AsyncFd::with_interest(stream, Interest::READABLE));
            let Ok(stream) = stream else { return };
            let open = Rc::clone(&open);
            tokio::task::spawn_local(async move {
                open.set(open.get() + 1);
                // The client has left: nobody is to be told.
                let _ = answer_polled(&stream, bytes, || spins && open.get() == 1).await;
                open.set(open.get() - 1);
            });
        }
    });
}

/// Answers until the client leaves; while `tries` says so, reads without asking first whether there is anything.
async fn answer_polled(
    stream: &AsyncFd<UnixStream>,
    bytes: ReplyBytes,
    tries: impl Fn() -> bool,
) -> std::io::Result<()> {
    let (mut received, mut out) = (Vec::new(), Vec::new());
    loop {
        received.reserve(READ_BYTES);
        let room = received.capacity() - received.len();
        let mut ready = if tries() { None } else { Some(stream.readable().await?) };
        let read = match recv(stream, spare_capacity(&mut received), RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Ok(()),
            Ok((read, _)) => read,
            Err(Errno::AGAIN) => 0,
            Err(error) => return Err(error.into()),
        };
        if let Some(ready) = ready.as_mut().filter(|_| read < room) {
            ready.clear_ready();
        }
        if read == 0 {
            tokio::task::yield_now().await;
            continue;
        }
        let taken = replies(&received, bytes, &mut out)?;
        received.drain(..taken);
        let mut sent = 0;
        while sent < out.len() {
            match send(stream, &out[sent..], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(more) => sent += more,
                Err(Errno::AGAIN) => tokio::task::yield_now().await,
                Err(error) => return Err(error.into()),
            }
        }
        out.clear();
    }
}

/// The same on tokio-uring, with the flags of the daemon's ring.
fn on_uring(mut connections: UnboundedReceiver<UnixStream>, bytes: ReplyBytes, spins: bool) {
    let mut ring = tokio_uring::uring_builder();
    ring.setup_coop_taskrun().setup_single_issuer();
    let Ok(runtime) = tokio_uring::Runtime::new(tokio_uring::builder().uring_builder(&ring)) else { return };
    runtime.block_on(async {
        if spins {
            tokio_uring::spawn(async {
                // Merely giving way would submit nothing: the ring is entered only before the thread would sleep.
                while tokio_uring::no_op().await.is_ok() {}
            });
        }
        while let Some(stream) = connections.recv().await {
            // The ring wants sockets that block.
            if stream.set_nonblocking(false).is_err() {
                return;
            }
            let stream = tokio_uring::net::UnixStream::from_std(stream);
            tokio_uring::spawn(async move {
                // The client has left: nobody is to be told.
                let _ = answer_submitted(&stream, bytes).await;
            });
        }
    });
}

async fn answer_submitted(stream: &tokio_uring::net::UnixStream, bytes: ReplyBytes) -> std::io::Result<()> {
    let (mut received, mut out) = (Vec::new(), Vec::new());
    loop {
        received.reserve(READ_BYTES);
        let held = received.len();
        let (read, slice) = stream.read(received.slice(held..)).await;
        received = slice.into_inner();
        if read? == 0 {
            return Ok(());
        }
        let taken = replies(&received, bytes, &mut out)?;
        received.drain(..taken);
        if !out.is_empty() {
            let (written, buffer) = stream.write_all(out).await;
            written?;
            out = buffer;
            out.clear();
        }
    }
}

/// Appends a reply to every whole frame of `received`; answers with their bytes.
fn replies(received: &[u8], bytes: ReplyBytes, out: &mut Vec<u8>) -> std::io::Result<usize> {
    let mut at = 0;
    while let Some(header) = received[at..].first_chunk::<FRAME_HEADER_BYTES>() {
        let header = FrameHeader::parse(header).map_err(|fault| std::io::Error::other(fault.to_string()))?;
        let end = at + FRAME_HEADER_BYTES + header.body_bytes as usize;
        if received.len() < end {
            break;
        }
        at = end;
        let (kind, body) = match FrameKind::from_u8(header.kind) {
            Some(FrameKind::Route) => (FrameKind::RouteReply, bytes.route),
            Some(FrameKind::Free) => (FrameKind::FreeReply, bytes.free),
            _ => (FrameKind::HelloReply, bytes.free),
        };
        out.extend_from_slice(&FrameHeader::new(kind, body, header.correlation_id).encode());
        out.resize(out.len() + body as usize, 0);
    }
    Ok(at)
}
