//! One connection: a stream that never blocks, the decoder of received bytes, and the queue of bytes to send.
//!
//! A message's payload is the memory that it was received into. Small messages share the block of one read. A large one
//! gets a block of its own, which doubles as its bytes arrive. A connection between two messages holds no memory.
//!
//! What a thread's connections hold in the middle of messages is counted, and so are large messages until they are
//! dropped, wherever they wait. Each connection has [`ZMQ_MESSAGE_BYTES_FREE`] of its own, whatever other peers send.
//! Beyond it a large message grows only within the thread's bound ([`bound_messages`]), and takes at most a quarter of
//! it, so that one peer leaves room for the others.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io::{self, IoSlice, Write as _};
use std::os::fd::{AsFd, BorrowedFd};

use bytes::{Buf as _, Bytes};
use mio::event::Source;
use mio::net::{TcpStream, UnixStream};
use mio::{Interest, Registry, Token};

use super::codec::{Decoder, Item, Refusal};
use crate::budget::Gauge;
use crate::limits::{SHARD_MESSAGES_BYTES_MAX, ZMQ_MESSAGE_BYTES_FREE, ZMQ_READ_BYTES};

/// The most pieces that one system call sends.
const WRITE_PIECES: usize = 16;

/// Blocks that a thread keeps for further reads. New memory costs a page fault for every 4 KiB.
const BLOCKS_KEPT: usize = 8;

thread_local! {
    /// A block whose read got nothing.
    static SPARE: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
    /// Blocks whose messages may still be in use. One without other holders is used for a read again.
    static BLOCKS: RefCell<Vec<Bytes>> = const { RefCell::new(Vec::new()) };
    /// The memory of the messages of the thread's connections.
    static MESSAGES: RefCell<MessageMemory> =
        RefCell::new(MessageMemory { bytes_max: SHARD_MESSAGES_BYTES_MAX, gauge: Gauge::default() });
}

/// The memory of messages, and the most that large ones may take of it.
struct MessageMemory {
    bytes_max: u64,
    gauge: Gauge,
}

/// Bounds the memory of the messages that the connections of the calling thread receive from now on. `gauge` shows it.
pub(crate) fn bound_messages(bytes_max: u64, gauge: Gauge) {
    MESSAGES.set(MessageMemory { bytes_max, gauge });
}

/// Memory of one message, counted until this is dropped, on any thread.
#[derive(Debug)]
struct Counted {
    /// Of all connections of the thread.
    of_thread: Gauge,
    of_connection: Gauge,
    bytes: u64,
}

impl Counted {
    fn new(of_connection: &Gauge) -> Self {
        let of_thread = MESSAGES.with_borrow(|of| of.gauge.clone());
        Self { of_thread, of_connection: of_connection.clone(), bytes: 0 }
    }

    /// Counts more bytes, whatever else is counted.
    fn add(&mut self, bytes: u64) {
        self.of_thread.add(bytes);
        self.of_connection.add(bytes);
        self.bytes += bytes;
    }

    /// Counts more bytes, unless there is no room for them.
    fn take(&mut self, bytes: u64) -> Result<(), Refusal> {
        let is_free = self.of_connection.get().saturating_add(bytes) <= ZMQ_MESSAGE_BYTES_FREE as u64;
        let (own, all) = (self.bytes.saturating_add(bytes), self.of_thread.get().saturating_add(bytes));
        // The gauge has few writers, and is a bound on memory only: two threads that take at once may exceed it a little.
        if !is_free && MESSAGES.with_borrow(|of| own > of.bytes_max / 4 || all > of.bytes_max) {
            return Err(Refusal::NoRoom);
        }
        self.add(bytes);
        Ok(())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.of_thread.subtract(self.bytes);
        self.of_connection.subtract(self.bytes);
    }
}

/// A block with a large message, counted until its last part is dropped.
struct LargeBlock {
    block: Vec<u8>,
    _counted: Option<Counted>,
}

impl AsRef<[u8]> for LargeBlock {
    fn as_ref(&self) -> &[u8] {
        &self.block
    }
}

/// Makes a block readable, and remembers it unless it is a large message's own.
fn seal(block: Vec<u8>, counted: Option<Counted>) -> Bytes {
    if block.capacity() != ZMQ_READ_BYTES {
        return Bytes::from_owner(LargeBlock { block, _counted: counted });
    }
    let block = Bytes::from(block);
    BLOCKS.with_borrow_mut(|blocks| {
        if blocks.len() < BLOCKS_KEPT {
            blocks.push(block.clone());
        }
    });
    block
}

/// A block to receive into, empty, with room for one read.
fn block() -> Vec<u8> {
    let spare = SPARE.take();
    if spare.capacity() > 0 {
        return spare;
    }
    let free = BLOCKS.with_borrow_mut(|blocks| {
        let free = blocks.iter().position(Bytes::is_unique)?;
        Some(blocks.swap_remove(free))
    });
    let Some(mut free) = free else { return Vec::with_capacity(ZMQ_READ_BYTES) };
    // Its remaining bytes, which are few, move to its front.
    free.advance(free.len().saturating_sub(1));
    let mut block = Vec::from(free);
    block.clear();
    block
}

/// A stream of either transport.
#[derive(Debug)]
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    pub(super) fn source(&mut self) -> &mut dyn Source {
        match self {
            Self::Tcp(stream) => stream,
            Self::Unix(stream) => stream,
        }
    }

    fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write_vectored(pieces),
            Self::Unix(stream) => stream.write_vectored(pieces),
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

/// Why a connection is over.
#[derive(Debug)]
pub(super) enum Broken {
    /// The peer closed it, or the network did.
    Ended,
    /// The peer broke the protocol or a limit.
    Refused(Refusal),
}

impl From<Refusal> for Broken {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

/// The result of [`Wire::next`].
#[derive(Debug)]
pub(super) enum Step {
    Item(Item),
    /// No more for now: the event loop signals further bytes.
    Drained,
    /// The budget of this call is used up, and there may be more.
    Budget,
}

/// One connection.
#[derive(Debug)]
pub(super) struct Wire {
    stream: Stream,
    decoder: Decoder,
    /// Received bytes that are not decoded yet. After a decoder's `None` they are the beginning of a frame.
    input: Bytes,
    /// The block being received into: the same beginning, and more bytes after it, up to `needed_bytes`.
    filling: Vec<u8>,
    /// The memory of `filling`, once it waits for more bytes.
    counted: Option<Counted>,
    /// What is counted of this connection's messages.
    held: Gauge,
    needed_bytes: usize,
    outgoing: VecDeque<Bytes>,
    outgoing_bytes: usize,
    sent_bytes: u64,
    received_bytes: u64,
    /// The end of the last reply, in the count of sent bytes.
    reply_ends: u64,
}

impl Wire {
    pub(super) fn new(stream: Stream, decoder: Decoder) -> Self {
        Self {
            stream,
            decoder,
            input: Bytes::new(),
            filling: Vec::new(),
            counted: None,
            held: Gauge::default(),
            needed_bytes: 0,
            outgoing: VecDeque::new(),
            outgoing_bytes: 0,
            sent_bytes: 0,
            received_bytes: 0,
            reply_ends: 0,
        }
    }

    pub(super) fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        registry.register(self.stream.source(), token, Interest::READABLE | Interest::WRITABLE)
    }

    pub(super) fn reregister(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        registry.reregister(self.stream.source(), token, Interest::READABLE | Interest::WRITABLE)
    }

    pub(super) fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// Bytes the kernel has taken so far.
    pub(super) const fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// Bytes received so far.
    pub(super) const fn received_bytes(&self) -> u64 {
        self.received_bytes
    }

    /// Bytes and pieces that wait to be sent.
    pub(super) fn waiting(&self) -> (usize, usize) {
        (self.outgoing_bytes, self.outgoing.len())
    }

    /// The next item. It reads up to `budget_bytes`, and subtracts the bytes read.
    pub(super) fn next(&mut self, budget_bytes: &mut usize) -> Result<Step, Broken> {
        loop {
            if self.filling.is_empty() {
                if let Some(item) = self.decoder.next(&mut self.input)? {
                    return Ok(Step::Item(item));
                }
                self.begin_fill();
            }
            if *budget_bytes == 0 {
                return Ok(Step::Budget);
            }
            match self.fill()? {
                None => return Ok(Step::Drained),
                Some(read) => *budget_bytes = budget_bytes.saturating_sub(read),
            }
            if self.filling.len() >= self.needed_bytes {
                self.input = seal(std::mem::take(&mut self.filling), self.counted.take());
            }
        }
    }

    /// Moves the beginning of a frame to the block that receives the rest of it.
    fn begin_fill(&mut self) {
        self.needed_bytes = self.input.len() + self.decoder.missing_bytes();
        if !self.input.is_empty() {
            self.filling = block();
            self.filling.extend_from_slice(&self.input);
            self.input = Bytes::new();
        }
    }

    /// Reads once; `None` = nothing has arrived.
    fn fill(&mut self) -> Result<Option<usize>, Broken> {
        if self.filling.capacity() == 0 {
            self.filling = block();
        }
        let held = self.filling.len();
        if self.filling.capacity() == held {
            // Doubles what has arrived: a length alone takes no memory.
            let missing = self.needed_bytes.saturating_sub(held);
            let more = missing.min(held).max(ZMQ_READ_BYTES);
            let first = if self.counted.is_none() { held } else { 0 };
            self.counted().take((first + more) as u64)?;
            self.filling.reserve_exact(more);
        }
        loop {
            match rustix::io::read(&self.stream, rustix::buffer::spare_capacity(&mut self.filling)) {
                Ok(0) => return Err(Broken::Ended),
                Ok(read) => {
                    self.received_bytes += read as u64;
                    return Ok(Some(read));
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => {
                    if self.filling.is_empty() {
                        SPARE.set(std::mem::take(&mut self.filling));
                    } else if self.counted.is_none() {
                        let bytes = self.filling.capacity() as u64;
                        self.counted().add(bytes);
                    }
                    return Ok(None);
                }
                Err(_) => return Err(Broken::Ended),
            }
        }
    }

    fn counted(&mut self) -> &mut Counted {
        self.counted.get_or_insert_with(|| Counted::new(&self.held))
    }

    /// Queues bytes for sending.
    pub(super) fn queue(&mut self, bytes: Bytes) {
        if !bytes.is_empty() {
            self.outgoing_bytes += bytes.len();
            self.outgoing.push_back(bytes);
        }
    }

    /// As [`Self::queue`], for answers to frames that the peer can send without end: at most one answer waits.
    pub(super) fn reply(&mut self, bytes: Bytes) {
        if self.sent_bytes >= self.reply_ends {
            self.queue(bytes);
            self.reply_ends = self.sent_bytes + self.outgoing_bytes as u64;
        }
    }

    /// Sends as many queued bytes as the kernel takes.
    pub(super) fn flush(&mut self) -> Result<(), Broken> {
        while !self.outgoing.is_empty() {
            let mut pieces = [IoSlice::new(&[]); WRITE_PIECES];
            let count = self.outgoing.len().min(WRITE_PIECES);
            for (piece, bytes) in pieces.iter_mut().zip(&self.outgoing) {
                *piece = IoSlice::new(bytes);
            }
            match self.stream.write_vectored(&pieces[..count]) {
                Ok(0) => return Err(Broken::Ended),
                Ok(sent) => self.sent(sent),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                // Linux returns this for a connection that is still being made.
                Err(error) if error.kind() == io::ErrorKind::NotConnected => return Ok(()),
                Err(_) => return Err(Broken::Ended),
            }
        }
        Ok(())
    }

    fn sent(&mut self, mut bytes: usize) {
        self.sent_bytes += bytes as u64;
        self.outgoing_bytes -= bytes;
        while let Some(front) = self.outgoing.front_mut() {
            if bytes < front.len() {
                front.advance(bytes);
                return;
            }
            bytes -= front.len();
            self.outgoing.pop_front();
        }
    }
}
