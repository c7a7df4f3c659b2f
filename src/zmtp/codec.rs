//! ZMTP 3.x as bytes: pure, and bounded as the bytes arrive.
//!
//! | phase | expects | ends with |
//! |---|---|---|
//! | greeting | 64 bytes: signature, version 3 or later, mechanism NULL | [`Item::Greeted`] |
//! | handshake | one READY command of a socket type that fits ours | [`Item::Ready`] |
//! | traffic | message parts; PING, PONG, SUBSCRIBE, CANCEL and unknown commands between any two of them | never |
//!
//! A part or command is refused as soon as its header exceeds a limit, before its body arrives. Of a message only the
//! last part, and an eight-byte part before it, are kept. A message that never ends therefore takes no memory, even
//! below the limits. A caller that needs the other parts too asks for them ([`Bounds::keeps_parts`]): then a message
//! takes the memory of its bytes, up to the limits.

use bytes::{Buf as _, Bytes};

/// Bytes of a greeting.
pub const GREETING_BYTES: usize = 64;
/// Bytes of a batch's sequence, the part before the payload.
pub const SEQ_BYTES: usize = 8;
const MAJOR: u8 = 3;
const MINOR: u8 = 1;
/// Peers from this minor version on take subscriptions as commands.
const MINOR_WITH_SUBSCRIBE: u8 = 1;
const MECHANISM: &[u8; 20] = b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;
/// Bytes of a PING's time to live.
const TTL_BYTES: usize = 2;
/// Bytes of a PING's context that a PONG repeats.
const PING_CONTEXT_BYTES_MAX: usize = 16;

/// The socket type of one end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// SUB: talks to PUB and XPUB.
    Subscriber,
    /// DEALER: talks to ROUTER.
    Dealer,
    /// PUB: talks to SUB and XSUB.
    Publisher,
    /// ROUTER: talks to DEALER and REQ.
    Router,
}

impl Role {
    const fn name(self) -> &'static [u8] {
        match self {
            Self::Subscriber => b"SUB",
            Self::Dealer => b"DEALER",
            Self::Publisher => b"PUB",
            Self::Router => b"ROUTER",
        }
    }

    fn talks_to(self, peer: &[u8]) -> bool {
        match self {
            Self::Subscriber => matches!(peer, b"PUB" | b"XPUB"),
            Self::Dealer => peer == b"ROUTER",
            Self::Publisher => matches!(peer, b"SUB" | b"XSUB"),
            Self::Router => matches!(peer, b"DEALER" | b"REQ"),
        }
    }
}

/// The limits of what a peer may send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Bytes of one message, over all of its parts.
    pub message_bytes_max: usize,
    /// Parts of one message.
    pub parts_max: usize,
    /// Bytes of one command.
    pub command_bytes_max: usize,
    /// Whether messages keep the parts before their last one ([`Message::earlier`]).
    pub keeps_parts: bool,
}

/// Why a connection cannot continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The first bytes are not those of ZMTP.
    #[error("the peer does not speak ZeroMQ")]
    NotZmtp,
    /// An older protocol than ZMTP 3.
    #[error("the peer speaks ZMTP {0}, 3 is needed (libzmq 4.0 or later)")]
    Version(u8),
    /// Another security mechanism than NULL.
    #[error("the peer wants another security mechanism than NULL")]
    Mechanism,
    /// A socket type that does not fit ours.
    #[error("the peer's socket type does not fit")]
    SocketType,
    /// The peer sent ERROR.
    #[error("the peer refused the connection")]
    PeerError,
    /// The peer sent something else than READY.
    #[error("the peer sent something else before READY")]
    NotReady,
    /// Flags that no version of ZMTP 3 has.
    #[error("a frame has the unknown flags {0:#04x}")]
    Flags(u8),
    /// A command with an invalid body.
    #[error("a command is malformed")]
    CommandMalformed,
    /// A command over its limit of bytes.
    #[error("a command of {0} bytes breaks the bound")]
    CommandTooLong(u64),
    /// A message over its limit of bytes.
    #[error("a message of at least {0} bytes breaks the bound")]
    MessageTooLong(u64),
    /// A message for whose next bytes there is no memory: it takes a quarter of it, or other messages do.
    #[error("the messages of all peers take too much memory, or this one does")]
    NoRoom,
    /// A message over its limit of parts.
    #[error("a message of more than {0} parts breaks the bound")]
    TooManyParts(usize),
}

impl Refusal {
    /// Whether the peer exceeded a memory limit, rather than broke the protocol.
    #[must_use]
    pub const fn is_bound(self) -> bool {
        matches!(self, Self::CommandTooLong(_) | Self::MessageTooLong(_) | Self::NoRoom | Self::TooManyParts(_))
    }
}

/// A whole message, as far as the daemon reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// The number of its parts.
    pub parts: usize,
    /// Bytes received for it: its parts with their headers, and the commands since the message before it.
    pub bytes: usize,
    /// The part before the last, if it had eight bytes.
    pub before_last: Option<[u8; SEQ_BYTES]>,
    /// The last part.
    pub last: Bytes,
    /// The parts before the last, if [`Bounds::keeps_parts`] asks for them; otherwise none.
    pub earlier: Vec<Bytes>,
}

/// One item of a peer's stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    /// The greeting is complete.
    Greeted,
    /// The handshake is complete.
    Ready,
    /// A message.
    Message(Message),
    /// A subscription to a prefix.
    Subscribe(Bytes),
    /// The end of a subscription.
    Cancel(Bytes),
    /// A PING, which requires a PONG with this context.
    Ping(Bytes),
    /// A PONG.
    Pong,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Greeting,
    Handshake,
    Traffic,
}

#[derive(Clone, Copy, Debug)]
struct Header {
    flags: u8,
    /// Bytes of the header itself.
    bytes: usize,
    body_bytes: u64,
}

/// Decodes the stream of one peer.
#[derive(Clone, Debug)]
pub struct Decoder {
    role: Role,
    bounds: Bounds,
    phase: Phase,
    minor: u8,
    /// Parts and bytes of the message that is being received.
    parts: usize,
    message_bytes: usize,
    /// All bytes taken since the last message.
    taken_bytes: usize,
    before_last: Option<[u8; SEQ_BYTES]>,
    earlier: Vec<Bytes>,
    /// Missing bytes of the frame at the front of the input.
    missing_bytes: usize,
}

impl Decoder {
    /// A decoder for a new connection; `role` is our own.
    #[must_use]
    pub const fn new(role: Role, bounds: Bounds) -> Self {
        Self {
            role,
            bounds,
            phase: Phase::Greeting,
            minor: 0,
            parts: 0,
            message_bytes: 0,
            taken_bytes: 0,
            before_last: None,
            earlier: Vec::new(),
            missing_bytes: 0,
        }
    }

    /// Takes the next item off the front of `input`. `None` = the item is incomplete: call again with the same bytes
    /// and more after them.
    ///
    /// # Errors
    /// The peer broke the protocol or a limit. The connection must be closed.
    pub fn next(&mut self, input: &mut Bytes) -> Result<Option<Item>, Refusal> {
        if self.phase == Phase::Greeting {
            return self.greeting(input);
        }
        while let Some(header) = self.header(input)? {
            let whole_bytes = header.bytes + header.body_bytes as usize;
            if input.len() < whole_bytes {
                self.missing_bytes = whole_bytes - input.len();
                return Ok(None);
            }
            self.taken_bytes += whole_bytes;
            input.advance(header.bytes);
            let item = if header.flags & COMMAND != 0 {
                self.command(input.split_to(header.body_bytes as usize))?
            } else {
                self.part(header, input)
            };
            if item.is_some() {
                return Ok(item);
            }
        }
        Ok(None)
    }

    /// The bytes known to be missing after [`Self::next`] returned `None`; at least one.
    #[must_use]
    pub fn missing_bytes(&self) -> usize {
        self.missing_bytes.max(1)
    }

    fn greeting(&mut self, input: &mut Bytes) -> Result<Option<Item>, Refusal> {
        let is_signature = input.first().is_none_or(|byte| *byte == 0xff) && input.get(9).is_none_or(|b| b & 1 == 1);
        if !is_signature {
            return Err(Refusal::NotZmtp);
        }
        if let Some(major) = input.get(10).filter(|major| **major < MAJOR) {
            return Err(Refusal::Version(*major));
        }
        if input.len() < GREETING_BYTES {
            self.missing_bytes = GREETING_BYTES - input.len();
            return Ok(None);
        }
        let greeting = input.split_to(GREETING_BYTES);
        if &greeting[12..32] != MECHANISM {
            return Err(Refusal::Mechanism);
        }
        (self.minor, self.phase) = (greeting[11], Phase::Handshake);
        Ok(Some(Item::Greeted))
    }

    /// The header at the front of the input, checked against every limit; `None` = it is incomplete.
    fn header(&mut self, input: &[u8]) -> Result<Option<Header>, Refusal> {
        self.missing_bytes = 0;
        let Some(flags) = input.first().copied() else { return Ok(None) };
        let is_command = flags & COMMAND != 0;
        if flags & !(MORE | LONG | COMMAND) != 0 || (is_command && flags & MORE != 0) {
            return Err(Refusal::Flags(flags));
        }
        if self.phase == Phase::Handshake && !is_command {
            return Err(Refusal::NotReady);
        }
        if !is_command && self.parts >= self.bounds.parts_max {
            return Err(Refusal::TooManyParts(self.bounds.parts_max));
        }
        let (bytes, body_bytes) = if flags & LONG == 0 {
            let Some(length) = input.get(1) else { return Ok(None) };
            (2, u64::from(*length))
        } else {
            let Some(length) = input.get(1..9).and_then(|length| length.try_into().ok()) else { return Ok(None) };
            (9, u64::from_be_bytes(length))
        };
        if is_command {
            if body_bytes > self.bounds.command_bytes_max as u64 {
                return Err(Refusal::CommandTooLong(body_bytes));
            }
        } else {
            let message_bytes = body_bytes.saturating_add(self.message_bytes as u64);
            if message_bytes > self.bounds.message_bytes_max as u64 {
                return Err(Refusal::MessageTooLong(message_bytes));
            }
        }
        Ok(Some(Header { flags, bytes, body_bytes }))
    }

    fn part(&mut self, header: Header, input: &mut Bytes) -> Option<Item> {
        let body_bytes = header.body_bytes as usize;
        self.parts += 1;
        self.message_bytes += body_bytes;
        if header.flags & MORE != 0 {
            self.before_last = input[..body_bytes].try_into().ok();
            if self.bounds.keeps_parts {
                self.earlier.push(input.split_to(body_bytes));
            } else {
                input.advance(body_bytes);
            }
            return None;
        }
        let last = if body_bytes == 0 { Bytes::new() } else { input.split_to(body_bytes) };
        self.message_bytes = 0;
        let (parts, before_last) = (std::mem::take(&mut self.parts), self.before_last.take());
        let (bytes, earlier) = (std::mem::take(&mut self.taken_bytes), std::mem::take(&mut self.earlier));
        Some(Item::Message(Message { parts, bytes, before_last, last, earlier }))
    }

    fn command(&mut self, mut body: Bytes) -> Result<Option<Item>, Refusal> {
        let name_bytes = body.first().map_or(usize::MAX, |length| usize::from(*length) + 1);
        if name_bytes > body.len() || name_bytes == 1 {
            return Err(Refusal::CommandMalformed);
        }
        let name = body.split_to(name_bytes);
        match (&name[1..], self.phase) {
            (b"ERROR", _) => Err(Refusal::PeerError),
            (b"READY", Phase::Handshake) => {
                if !self.role.talks_to(socket_type(&body)?) {
                    return Err(Refusal::SocketType);
                }
                (self.phase, self.taken_bytes) = (Phase::Traffic, 0);
                Ok(Some(Item::Ready))
            }
            (_, Phase::Greeting | Phase::Handshake) => Err(Refusal::NotReady),
            (b"SUBSCRIBE", Phase::Traffic) => Ok(Some(Item::Subscribe(body))),
            (b"CANCEL", Phase::Traffic) => Ok(Some(Item::Cancel(body))),
            (b"PING", Phase::Traffic) => {
                if body.len() < TTL_BYTES {
                    return Err(Refusal::CommandMalformed);
                }
                let context = body.split_off(TTL_BYTES);
                Ok(Some(Item::Ping(context.slice(..context.len().min(PING_CONTEXT_BYTES_MAX)))))
            }
            (b"PONG", Phase::Traffic) => Ok(Some(Item::Pong)),
            // A newer peer may have other commands.
            (_, Phase::Traffic) => Ok(None),
        }
    }

    /// The bytes that subscribe to a prefix, in the form that this peer understands.
    #[must_use]
    pub fn subscription(&self, prefix: &[u8]) -> Bytes {
        let mut bytes = Vec::with_capacity(prefix.len() + 16);
        if self.minor >= MINOR_WITH_SUBSCRIBE {
            push_command(&mut bytes, b"SUBSCRIBE", prefix);
        } else {
            push_header(&mut bytes, 0, prefix.len() + 1);
            bytes.push(1);
            bytes.extend_from_slice(prefix);
        }
        bytes.into()
    }
}

/// The value of `Socket-Type` among a READY command's properties.
fn socket_type(mut properties: &[u8]) -> Result<&[u8], Refusal> {
    let malformed = Refusal::CommandMalformed;
    let mut found = None;
    while let Some((name_bytes, rest)) = properties.split_first() {
        let (name, rest) = rest.split_at_checked(usize::from(*name_bytes)).ok_or(malformed)?;
        let (value_bytes, rest) = rest.split_first_chunk::<4>().ok_or(malformed)?;
        let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*value_bytes) as usize).ok_or(malformed)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            found = Some(value);
        }
        properties = rest;
    }
    found.ok_or(malformed)
}

/// The greeting of either end.
#[must_use]
pub fn greeting() -> Bytes {
    let mut bytes = [0; GREETING_BYTES];
    (bytes[0], bytes[9], bytes[10], bytes[11]) = (0xff, 0x7f, MAJOR, MINOR);
    bytes[12..32].copy_from_slice(MECHANISM);
    Bytes::copy_from_slice(&bytes)
}

/// The READY command of a role.
#[must_use]
pub fn ready(role: Role) -> Bytes {
    let (property, value) = (b"Socket-Type", role.name());
    let mut properties = vec![property.len() as u8];
    properties.extend_from_slice(property);
    properties.extend_from_slice(&(value.len() as u32).to_be_bytes());
    properties.extend_from_slice(value);
    command(b"READY", &properties)
}

/// A PING without a time to live or context.
#[must_use]
pub fn ping() -> Bytes {
    command(b"PING", &[0; TTL_BYTES])
}

/// The answer to a PING.
#[must_use]
pub fn pong(context: &[u8]) -> Bytes {
    command(b"PONG", context)
}

fn command(name: &[u8], body: &[u8]) -> Bytes {
    let mut bytes = Vec::with_capacity(name.len() + body.len() + 10);
    push_command(&mut bytes, name, body);
    bytes.into()
}

fn push_command(bytes: &mut Vec<u8>, name: &[u8], body: &[u8]) {
    push_header(bytes, COMMAND, name.len() + body.len() + 1);
    bytes.push(name.len() as u8);
    bytes.extend_from_slice(name);
    bytes.extend_from_slice(body);
}

fn push_header(bytes: &mut Vec<u8>, flags: u8, body_bytes: usize) {
    match u8::try_from(body_bytes) {
        Ok(short) => bytes.extend_from_slice(&[flags, short]),
        Err(_) => {
            bytes.push(flags | LONG);
            bytes.extend_from_slice(&(body_bytes as u64).to_be_bytes());
        }
    }
}

/// A message without the body of its last part, which has `last_bytes` bytes.
#[must_use]
pub fn head(parts_before_last: &[&[u8]], last_bytes: usize) -> Vec<u8> {
    let before: usize = parts_before_last.iter().map(|part| part.len() + 9).sum();
    let mut bytes = Vec::with_capacity(before + 9);
    for part in parts_before_last {
        push_header(&mut bytes, MORE, part.len());
        bytes.extend_from_slice(part);
    }
    push_header(&mut bytes, 0, last_bytes);
    bytes
}

/// A whole message as bytes.
#[must_use]
pub fn message(parts_before_last: &[&[u8]], last: &[u8]) -> Bytes {
    let mut bytes = head(parts_before_last, last.len());
    bytes.extend_from_slice(last);
    bytes.into()
}
