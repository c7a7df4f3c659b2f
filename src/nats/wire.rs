//! One connection to a server: a stream that never blocks, TLS once the server has said what it is, and what waits to be
//! sent.

use std::collections::VecDeque;
use std::io::{self, Write as _};
use std::sync::Arc;

use bytes::{Buf as _, Bytes, BytesMut};
use mio::net::TcpStream;
use mio::{Interest, Registry, Token};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection};

use super::codec::{Decoder, Item, Violation};
use crate::limits::NATS_READ_BYTES;

/// Why a connection is over.
#[derive(Debug)]
pub(super) enum Broken {
    /// The server closed it, or the network did.
    Ended,
    /// The server broke the protocol.
    Violation(&'static str),
    /// TLS failed.
    Tls(String),
}

impl From<Violation> for Broken {
    fn from(Violation(what): Violation) -> Self {
        Self::Violation(what)
    }
}

/// The result of [`Wire::next`].
pub(super) enum Step {
    Item(Item),
    /// No more for now: the event loop signals further bytes.
    Drained,
    /// The budget of this call is used up, and there may be more.
    Budget,
}

pub(super) struct Wire {
    stream: TcpStream,
    tls: Option<Box<ClientConnection>>,
    decoder: Decoder,
    /// What one read fills.
    block: Box<[u8]>,
    outgoing: VecDeque<Bytes>,
    outgoing_bytes: usize,
    has_received: bool,
}

impl Wire {
    pub(super) fn new(
        mut stream: TcpStream,
        payload_bytes_max: usize,
        (registry, token): (&Registry, Token),
    ) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        registry.register(&mut stream, token, Interest::READABLE | Interest::WRITABLE)?;
        Ok(Self {
            stream,
            tls: None,
            decoder: Decoder::new(payload_bytes_max),
            block: vec![0; NATS_READ_BYTES].into(),
            outgoing: VecDeque::new(),
            outgoing_bytes: 0,
            has_received: false,
        })
    }

    pub(super) fn reregister(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        registry.reregister(&mut self.stream, token, Interest::READABLE | Interest::WRITABLE)
    }

    /// Speaks TLS from now on.
    pub(super) fn secure(&mut self, config: &Arc<ClientConfig>, host: &str) -> Result<(), Broken> {
        if !self.decoder.is_empty() {
            // They might pass for what comes inside TLS.
            return Err(Broken::Violation("bytes came before TLS"));
        }
        let fault = |error: &dyn std::fmt::Display| Broken::Tls(error.to_string());
        let name = ServerName::try_from(host.to_owned()).map_err(|error| fault(&error))?;
        let tls = ClientConnection::new(Arc::clone(config), name).map_err(|error| fault(&error))?;
        self.tls = Some(Box::new(tls));
        self.flush()
    }

    /// Whether bytes have come since the call before.
    pub(super) const fn take_received(&mut self) -> bool {
        std::mem::replace(&mut self.has_received, false)
    }

    /// Bytes that wait to be sent.
    pub(super) const fn waiting_bytes(&self) -> usize {
        self.outgoing_bytes
    }

    /// The next item. It reads up to `budget_bytes`, and subtracts the bytes read.
    pub(super) fn next(&mut self, budget_bytes: &mut usize) -> Result<Step, Broken> {
        loop {
            if let Some(item) = self.decoder.next()? {
                return Ok(Step::Item(item));
            }
            if *budget_bytes == 0 {
                return Ok(Step::Budget);
            }
            match self.read()? {
                None => return Ok(Step::Drained),
                Some(bytes) => *budget_bytes = budget_bytes.saturating_sub(bytes),
            }
        }
    }

    /// Reads once; `None` = nothing has come.
    fn read(&mut self) -> Result<Option<usize>, Broken> {
        let Some(tls) = &mut self.tls else {
            let read = append(&mut self.stream, &mut self.block, self.decoder.received())?;
            self.has_received |= read.is_some();
            return Ok(read);
        };
        loop {
            if let Some(read) = append(&mut tls.reader(), &mut self.block, self.decoder.received())? {
                self.has_received = true;
                return Ok(Some(read));
            }
            match tls.read_tls(&mut self.stream) {
                Ok(0) => return Err(Broken::Ended),
                Ok(_) => {
                    tls.process_new_packets().map_err(|error| Broken::Tls(error.to_string()))?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => return Err(Broken::Ended),
            }
        }
        // The handshake may have something to say.
        self.flush()?;
        Ok(None)
    }

    /// Queues bytes for sending.
    pub(super) fn queue(&mut self, bytes: Bytes) {
        self.outgoing_bytes += bytes.len();
        self.outgoing.push_back(bytes);
    }

    /// Sends as many queued bytes as the kernel takes.
    pub(super) fn flush(&mut self) -> Result<(), Broken> {
        while self.has_more_to_send() {
            match self.send() {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Linux returns the latter for a connection that is still being made.
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::NotConnected) => break,
                Err(_) => return Err(Broken::Ended),
            }
        }
        Ok(())
    }

    /// Whether something waits that may be sent now: nothing goes before the end of TLS's handshake.
    fn has_more_to_send(&self) -> bool {
        match &self.tls {
            None => !self.outgoing.is_empty(),
            Some(tls) => tls.wants_write() || (!tls.is_handshaking() && !self.outgoing.is_empty()),
        }
    }

    /// Sends once: TLS's records before further bytes go into one.
    fn send(&mut self) -> io::Result<()> {
        let front: &[u8] = self.outgoing.front().map_or(&[], |front| front);
        let taken = match &mut self.tls {
            None => self.stream.write(front)?,
            Some(tls) if tls.wants_write() => {
                tls.write_tls(&mut self.stream)?;
                0
            }
            Some(tls) => tls.writer().write(front)?,
        };
        self.sent(taken);
        Ok(())
    }

    fn sent(&mut self, mut bytes: usize) {
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

/// Reads once into a block, and appends what came; `None` = nothing has come.
fn append(from: &mut impl io::Read, block: &mut [u8], received: &mut BytesMut) -> Result<Option<usize>, Broken> {
    loop {
        match from.read(block) {
            Ok(0) => return Err(Broken::Ended),
            Ok(read) => {
                received.extend_from_slice(&block[..read]);
                return Ok(Some(read));
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(_) => return Err(Broken::Ended),
        }
    }
}
