//! The least that answering takes: frames are cut from what is read, and replies of the same length written, all whole
//! frames of one read by one write.

use std::path::Path;

use kvrouted::limits::FRAME_HEADER_BYTES;
use kvrouted::wire::{FrameHeader, FrameKind};
use tokio::net::{UnixListener, UnixStream};

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

/// Answers on the socket at `path` until the process is killed, on tokio's epoll as the daemon's fallback engine.
/// `spins` = never sleep.
///
/// # Errors
/// There is no socket.
pub(crate) fn serve(path: &Path, bytes: ReplyBytes, spins: bool) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(Failure::system("start a runtime"))?;
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let listener = UnixListener::bind(path).map_err(Failure::file(path))?;
        if spins {
            tokio::task::spawn_local(async {
                loop {
                    tokio::task::yield_now().await;
                }
            });
        }
        loop {
            let (stream, _) = listener.accept().await.map_err(Failure::system("accept"))?;
            tokio::task::spawn_local(async move {
                // The client has left: nobody is to be told.
                let _ = answer(&stream, bytes).await;
            });
        }
    })
}

async fn answer(stream: &UnixStream, bytes: ReplyBytes) -> std::io::Result<()> {
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
