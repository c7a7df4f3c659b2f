//! The least that answering takes: frames are cut from what is read, and replies of the same length written, all whole
//! frames of one read by one write, on the daemon's io engines.

use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;

use kvrouted::limits::FRAME_HEADER_BYTES;
use kvrouted::wire::{FrameHeader, FrameKind};
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

/// A thread's life on plain tokio, as the daemon's epoll engine. `spins` = never sleep.
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
        while let Some(stream) = connections.recv().await {
            let stream = stream.set_nonblocking(true).and_then(|()| tokio::net::UnixStream::from_std(stream));
            let Ok(stream) = stream else { return };
            tokio::task::spawn_local(async move {
                // The client has left: nobody is to be told.
                let _ = answer_polled(&stream, bytes).await;
            });
        }
    });
}

async fn answer_polled(stream: &tokio::net::UnixStream, bytes: ReplyBytes) -> std::io::Result<()> {
    let (mut received, mut out) = (Vec::new(), Vec::new());
    loop {
        stream.readable().await?;
        received.reserve(READ_BYTES);
        match stream.try_read_buf(&mut received) {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error),
        }
        let taken = replies(&received, bytes, &mut out)?;
        received.drain(..taken);
        let mut sent = 0;
        while sent < out.len() {
            match stream.try_write(&out[sent..]) {
                Ok(more) => sent += more,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => stream.writable().await?,
                Err(error) => return Err(error),
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
