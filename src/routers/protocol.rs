//! Messages between routers: `schemas/load_events.fbs` in an envelope.
//!
//! ```text
//! magic: [u8; 4] = "KVLM"   major: u16   minor: u16   origin: u64   mac: [u8; 32]   body: a `Message` of the schema
//! ```
//!
//! Numbers are little-endian. The MAC covers the envelope before it and the body. The envelope is the same in every
//! version, so that a router can say of a message of another major version whose it is. A receiver checks, in this
//! order, the length, the MAC, the major version, and the body, and uses nothing that it has not checked. It allocates
//! no more than [`LOAD_MESSAGE_GAUGES_MAX`] gauges and [`LOAD_MESSAGE_BINDINGS_MAX`] bindings, whatever a length
//! claims.

use std::fmt;

use flatbuffers::{FlatBufferBuilder, Follow, Vector, VerifierOptions, WIPOffset};
use thiserror::Error;

use super::digest::Digest;
use super::mac::{Keys, MAC_BYTES};
use super::values::{Binding, Fingerprint, Gauge, Incarnation, Nonce, OriginId, Sender, SessionName, WorkerGauge};
use crate::ids::Worker;
use crate::limits::{
    LOAD_MESSAGE_BINDINGS_MAX, LOAD_MESSAGE_BYTES_MAX, LOAD_MESSAGE_GAUGES_MAX, LOAD_SNAPSHOT_PARTS_MAX,
};
use crate::schema_generated::load_events as fb;

/// The version that this router writes, and the only major version that it reads.
pub const MAJOR: u16 = 1;
/// Grows with each field that is appended. Routers of different minor versions understand each other.
pub const MINOR: u16 = 0;
/// The beginning of each message.
pub const MAGIC: [u8; 4] = *b"KVLM";
/// Bytes before the MAC.
const SIGNED_HEAD_BYTES: usize = 16;
/// Bytes before the body.
pub const ENVELOPE_BYTES: usize = SIGNED_HEAD_BYTES + MAC_BYTES;

/// Tables of a message: itself, its content, gauges and bindings. Newer routers may add some.
const TABLES_MAX: usize = 16;
/// Nesting of a message.
const DEPTH_MAX: usize = 8;

/// A message: from whom, and what it says.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// The router that signed it.
    pub sender: Sender,
    /// Its minor version.
    pub minor: u16,
    /// What it says.
    pub content: Content,
}

/// What a message says.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// What changed since the last batch.
    Batch(Batch),
    /// The sender lives, and these are its gauges' digest.
    Heartbeat(Heartbeat),
    /// A question for a snapshot.
    Request(SnapshotRequest),
    /// A part of a snapshot.
    Section(SnapshotSection),
}

/// Gauges and bindings that changed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// 1, 2, 3, … within an incarnation.
    pub sequence: u64,
    /// At most [`LOAD_MESSAGE_GAUGES_MAX`].
    pub gauges: Vec<WorkerGauge>,
    /// At most [`LOAD_MESSAGE_BINDINGS_MAX`].
    pub bindings: Vec<Binding>,
}

/// A sign of life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Heartbeat {
    /// 1, 2, 3, … within an incarnation.
    pub beat: u64,
    /// That of the last batch.
    pub sequence: u64,
    /// Of the gauges as of that batch.
    pub digest: Digest,
}

/// A request for a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SnapshotRequest {
    /// The router that is to answer.
    pub origin: OriginId,
    /// What the answer has to repeat.
    pub nonce: Nonce,
    /// The lowest major version that the asking router reads.
    pub major_min: u16,
    /// The highest.
    pub major_max: u16,
}

/// A part of a snapshot.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SnapshotSection {
    /// That of the request.
    pub nonce: Nonce,
    /// The last batch that the snapshot contains.
    pub sequence: u64,
    /// The number of this part, from 0.
    pub part: u32,
    /// All parts, at most [`LOAD_SNAPSHOT_PARTS_MAX`].
    pub parts: u32,
    /// Of the gauges of all parts.
    pub digest: Digest,
    /// At most [`LOAD_MESSAGE_GAUGES_MAX`].
    pub gauges: Vec<WorkerGauge>,
    /// At most [`LOAD_MESSAGE_BINDINGS_MAX`].
    pub bindings: Vec<Binding>,
}

/// Why a message is not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It has more than [`LOAD_MESSAGE_BYTES_MAX`].
    TooLarge,
    /// It is no message of a router.
    NoEnvelope,
    /// No key of this router made its MAC.
    WrongMac,
    /// It has another major version.
    Major(u16),
    /// Its body does not verify as the schema's.
    Malformed,
    /// A number or a length exceeds its limit.
    OutOfRange,
    /// A newer router says something that this one does not know. It is ignored.
    Unknown,
}

impl Fault {
    /// What an operator can do about it.
    #[must_use]
    pub const fn remedy(self) -> &'static str {
        match self {
            Self::TooLarge | Self::NoEnvelope => "check what listens at the address of this router",
            Self::WrongMac => "give all routers the same secret file; to change it, accept both secrets for a while",
            Self::Major(_) => "upgrade the routers one version after the other",
            Self::Malformed | Self::OutOfRange => "report the sender's version with a capture of the message",
            Self::Unknown => "nothing: a newer router says more than this one understands",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLarge => write!(f, "it has more than {LOAD_MESSAGE_BYTES_MAX} bytes"),
            Self::NoEnvelope => f.write_str("it is no message of a router"),
            Self::WrongMac => f.write_str("it was not signed with a secret of this router"),
            Self::Major(major) => write!(f, "it has major version {major}, and this router reads {MAJOR}"),
            Self::Malformed => f.write_str("its body does not verify"),
            Self::OutOfRange => f.write_str("a number or a length in it exceeds its limit"),
            Self::Unknown => f.write_str("its content is not known to this version"),
        }
    }
}

/// A message that is not read.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("a message is refused: {fault}")]
pub struct Refusal {
    /// The origin that the message names. It is proven unless [`Refusal::is_proven`] says otherwise.
    pub origin: Option<OriginId>,
    /// Why.
    pub fault: Fault,
}

impl Refusal {
    /// Whether the MAC shows that the named origin, or a router with the same secret, sent the message.
    #[must_use]
    pub const fn is_proven(&self) -> bool {
        !matches!(self.fault, Fault::TooLarge | Fault::NoEnvelope | Fault::WrongMac)
    }
}

// ---- encoding ----

/// The bytes of a message of this version, signed.
#[must_use]
pub fn encode(sender: &Sender, content: &Content, keys: &Keys) -> Vec<u8> {
    let mut builder = FlatBufferBuilder::new();
    let root = message_table(&mut builder, sender, content);
    builder.finish(root, Some(fb::MESSAGE_IDENTIFIER));
    seal((MAJOR, MINOR), sender.origin, builder.finished_data(), keys)
}

/// A body in its envelope, signed.
#[must_use]
pub fn seal((major, minor): (u16, u16), origin: OriginId, body: &[u8], keys: &Keys) -> Vec<u8> {
    let mut bytes = signed_head((major, minor), origin);
    let tag = keys.sign([&bytes, body]);
    bytes.extend(tag);
    bytes.extend(body);
    bytes
}

/// The answer to a stranger: it says whose connection this is, under a MAC of zeros, which says that the secrets differ. With a
/// signed message a stranger could pass for this router at another one.
#[must_use]
pub fn unsigned(origin: OriginId) -> Vec<u8> {
    let mut bytes = signed_head((MAJOR, MINOR), origin);
    bytes.extend([0; MAC_BYTES]);
    bytes
}

fn signed_head((major, minor): (u16, u16), origin: OriginId) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(ENVELOPE_BYTES);
    bytes.extend(MAGIC);
    bytes.extend(major.to_le_bytes());
    bytes.extend(minor.to_le_bytes());
    bytes.extend(origin.0.to_le_bytes());
    bytes
}

type Builder = FlatBufferBuilder<'static>;

fn message_table(builder: &mut Builder, sender: &Sender, content: &Content) -> WIPOffset<fb::Message<'static>> {
    let mut args = fb::MessageArgs {
        fingerprint: sender.fingerprint.0,
        incarnation: sender.incarnation.0,
        ..fb::MessageArgs::default()
    };
    match content {
        Content::Batch(batch) => {
            let gauges = gauges_table(builder, &batch.gauges);
            let bindings = bindings_table(builder, &batch.bindings);
            let batch = fb::BatchArgs { sequence: batch.sequence, gauges, bindings };
            args.batch = Some(fb::Batch::create(builder, &batch));
        }
        Content::Heartbeat(Heartbeat { beat, sequence, digest }) => {
            let (beat, sequence, digest, count) = (*beat, *sequence, digest.sum, digest.count);
            let heartbeat = fb::HeartbeatArgs { beat, sequence, digest, count };
            args.heartbeat = Some(fb::Heartbeat::create(builder, &heartbeat));
        }
        Content::Request(SnapshotRequest { origin, nonce, major_min, major_max }) => {
            let (origin, nonce, major_min, major_max) = (origin.0, nonce.0, *major_min, *major_max);
            let request = fb::SnapshotRequestArgs { origin, nonce, major_min, major_max };
            args.request = Some(fb::SnapshotRequest::create(builder, &request));
        }
        Content::Section(section) => {
            let section = fb::SnapshotSectionArgs {
                nonce: section.nonce.0,
                sequence: section.sequence,
                part: section.part,
                parts: section.parts,
                digest: section.digest.sum,
                count: section.digest.count,
                gauges: gauges_table(builder, &section.gauges),
                bindings: bindings_table(builder, &section.bindings),
            };
            args.section = Some(fb::SnapshotSection::create(builder, &section));
        }
    }
    fb::Message::create(builder, &args)
}

fn is_zero<T: Copy + Default + PartialEq>(value: T) -> bool {
    value == T::default()
}

fn gauges_table(builder: &mut Builder, gauges: &[WorkerGauge]) -> Option<WIPOffset<fb::Gauges<'static>>> {
    if gauges.is_empty() {
        return None;
    }
    // A column of zeros is left out.
    macro_rules! column {
        ($of:expr) => {{
            let values = gauges.iter().map($of);
            (!values.clone().all(is_zero)).then(|| builder.create_vector_from_iter(values))
        }};
    }
    let args = fb::GaugesArgs {
        requests: column!(|row| row.gauge.requests),
        prefills: column!(|row| row.gauge.prefills),
        prefill_tokens: column!(|row| row.gauge.prefill_tokens),
        decode_parts: column!(|row| row.gauge.decode_parts),
        queued_ns: column!(|row| row.gauge.queued_ns),
        running_ns: column!(|row| row.gauge.running_ns),
        elapsed_ns: column!(|row| row.gauge.elapsed_ns),
        recent_shares: column!(|row| row.gauge.recent_share),
        ages_ms: column!(|row| row.age_ms),
        worker_ids: Some(builder.create_vector_from_iter(gauges.iter().map(|row| row.worker.id.0))),
        ranks: Some(builder.create_vector_from_iter(gauges.iter().map(|row| row.worker.rank.0))),
    };
    Some(fb::Gauges::create(builder, &args))
}

fn bindings_table(builder: &mut Builder, bindings: &[Binding]) -> Option<WIPOffset<fb::Bindings<'static>>> {
    if bindings.is_empty() {
        return None;
    }
    let args = fb::BindingsArgs {
        names_hi: Some(builder.create_vector_from_iter(bindings.iter().map(|row| (row.session.0 >> 64) as u64))),
        names_lo: Some(builder.create_vector_from_iter(bindings.iter().map(|row| row.session.0 as u64))),
        worker_ids: Some(builder.create_vector_from_iter(bindings.iter().map(|row| row.worker.id.0))),
        ranks: Some(builder.create_vector_from_iter(bindings.iter().map(|row| row.worker.rank.0))),
        unused_ms: Some(builder.create_vector_from_iter(bindings.iter().map(|row| row.unused_ms))),
        ended: Some(builder.create_vector_from_iter(bindings.iter().map(|row| row.ended))),
    };
    Some(fb::Bindings::create(builder, &args))
}

// ---- decoding ----

/// Reads a message of any bytes.
///
/// # Errors
/// Why it is not read, and whose it says it is.
pub fn decode(bytes: &[u8], keys: &Keys) -> Result<Message, Refusal> {
    let unnamed = |fault| Refusal { origin: None, fault };
    if bytes.len() > LOAD_MESSAGE_BYTES_MAX {
        return Err(unnamed(Fault::TooLarge));
    }
    let (head, rest) = bytes.split_first_chunk::<SIGNED_HEAD_BYTES>().ok_or(unnamed(Fault::NoEnvelope))?;
    let (tag, body) = rest.split_first_chunk::<MAC_BYTES>().ok_or(unnamed(Fault::NoEnvelope))?;
    let [m0, m1, m2, m3, major_0, major_1, minor_0, minor_1, origin @ ..] = *head;
    if [m0, m1, m2, m3] != MAGIC {
        return Err(unnamed(Fault::NoEnvelope));
    }
    let origin = OriginId(u64::from_le_bytes(origin));
    let named = |fault| Refusal { origin: Some(origin), fault };
    if !keys.verify([head, body], tag) {
        return Err(named(Fault::WrongMac));
    }
    let (major, minor) = (u16::from_le_bytes([major_0, major_1]), u16::from_le_bytes([minor_0, minor_1]));
    if major != MAJOR {
        return Err(named(Fault::Major(major)));
    }
    let (sender, content) = body_of(body, origin).map_err(named)?;
    Ok(Message { sender, minor, content })
}

fn body_of(body: &[u8], origin: OriginId) -> Result<(Sender, Content), Fault> {
    if body.len() < 8 || !fb::message_buffer_has_identifier(body) {
        return Err(Fault::Malformed);
    }
    let options = VerifierOptions {
        max_depth: DEPTH_MAX,
        max_tables: TABLES_MAX,
        max_apparent_size: 2 * LOAD_MESSAGE_BYTES_MAX,
        ignore_missing_null_terminator: false,
    };
    let table = fb::root_as_message_with_opts(&options, body).map_err(|_| Fault::Malformed)?;
    let (incarnation, fingerprint) = (Incarnation(table.incarnation()), Fingerprint(table.fingerprint()));
    let content = match (table.batch(), table.heartbeat(), table.request(), table.section()) {
        (Some(batch), None, None, None) => Content::Batch(batch_of(&batch)?),
        (None, Some(heartbeat), None, None) => Content::Heartbeat(Heartbeat {
            beat: heartbeat.beat(),
            sequence: heartbeat.sequence(),
            digest: Digest { sum: heartbeat.digest(), count: heartbeat.count() },
        }),
        (None, None, Some(request), None) => Content::Request(SnapshotRequest {
            origin: OriginId(request.origin()),
            nonce: Nonce(request.nonce()),
            major_min: request.major_min(),
            major_max: request.major_max(),
        }),
        (None, None, None, Some(section)) => Content::Section(section_of(&section)?),
        (None, None, None, None) => return Err(Fault::Unknown),
        _ => return Err(Fault::Malformed),
    };
    Ok((Sender { origin, incarnation, fingerprint }, content))
}

fn batch_of(batch: &fb::Batch<'_>) -> Result<Batch, Fault> {
    // The number before it, and the number after it, exist.
    if batch.sequence() == 0 || batch.sequence() == u64::MAX {
        return Err(Fault::OutOfRange);
    }
    let (gauges, bindings) = (gauges_of(batch.gauges())?, bindings_of(batch.bindings())?);
    Ok(Batch { sequence: batch.sequence(), gauges, bindings })
}

fn section_of(section: &fb::SnapshotSection<'_>) -> Result<SnapshotSection, Fault> {
    let (part, parts) = (section.part(), section.parts());
    if parts > LOAD_SNAPSHOT_PARTS_MAX || part >= parts || section.sequence() == u64::MAX {
        return Err(Fault::OutOfRange);
    }
    Ok(SnapshotSection {
        nonce: Nonce(section.nonce()),
        sequence: section.sequence(),
        part,
        parts,
        digest: Digest { sum: section.digest(), count: section.count() },
        gauges: gauges_of(section.gauges())?,
        bindings: bindings_of(section.bindings())?,
    })
}

/// A column, which is absent if all of its values are zero.
struct Column<'a, T>(Option<Vector<'a, T>>);

impl<'a, T: Follow<'a> + 'a> Column<'a, T>
where
    T::Inner: Default,
{
    /// A column of this many rows, if it is one.
    fn of(vector: Option<Vector<'a, T>>, rows: usize) -> Result<Self, Fault> {
        match vector {
            Some(vector) if vector.len() != rows => Err(Fault::Malformed),
            column => Ok(Self(column)),
        }
    }

    /// The value of a row below the number of rows.
    fn at(&self, row: usize) -> T::Inner {
        self.0.as_ref().map_or_else(T::Inner::default, |vector| vector.get(row))
    }
}

fn gauges_of(table: Option<fb::Gauges<'_>>) -> Result<Vec<WorkerGauge>, Fault> {
    let Some(table) = table else { return Ok(Vec::new()) };
    let rows = table.worker_ids().len();
    if rows > LOAD_MESSAGE_GAUGES_MAX {
        return Err(Fault::OutOfRange);
    }
    let ids = Column::of(Some(table.worker_ids()), rows)?;
    let ranks = Column::of(Some(table.ranks()), rows)?;
    let requests = Column::of(table.requests(), rows)?;
    let prefills = Column::of(table.prefills(), rows)?;
    let prefill_tokens = Column::of(table.prefill_tokens(), rows)?;
    let decode_parts = Column::of(table.decode_parts(), rows)?;
    let queued_ns = Column::of(table.queued_ns(), rows)?;
    let running_ns = Column::of(table.running_ns(), rows)?;
    let elapsed_ns = Column::of(table.elapsed_ns(), rows)?;
    let recent_shares = Column::of(table.recent_shares(), rows)?;
    let ages_ms = Column::of(table.ages_ms(), rows)?;
    let row = |row| {
        let gauge = Gauge {
            requests: requests.at(row),
            prefills: prefills.at(row),
            prefill_tokens: prefill_tokens.at(row),
            decode_parts: decode_parts.at(row),
            queued_ns: queued_ns.at(row),
            running_ns: running_ns.at(row),
            elapsed_ns: elapsed_ns.at(row),
            recent_share: recent_shares.at(row),
        };
        let worker = Worker::new(ids.at(row), ranks.at(row));
        if gauge.is_in_range() {
            Ok(WorkerGauge { worker, gauge, age_ms: ages_ms.at(row) })
        } else {
            Err(Fault::OutOfRange)
        }
    };
    (0..rows).map(row).collect()
}

fn bindings_of(table: Option<fb::Bindings<'_>>) -> Result<Vec<Binding>, Fault> {
    let Some(table) = table else { return Ok(Vec::new()) };
    let rows = table.worker_ids().len();
    if rows > LOAD_MESSAGE_BINDINGS_MAX {
        return Err(Fault::OutOfRange);
    }
    let names_hi = Column::of(Some(table.names_hi()), rows)?;
    let names_lo = Column::of(Some(table.names_lo()), rows)?;
    let ids = Column::of(Some(table.worker_ids()), rows)?;
    let ranks = Column::of(Some(table.ranks()), rows)?;
    let unused_ms = Column::of(table.unused_ms(), rows)?;
    let ended = Column::of(table.ended(), rows)?;
    let row = |row| Binding {
        session: SessionName(u128::from(names_hi.at(row)) << 64 | u128::from(names_lo.at(row))),
        worker: Worker::new(ids.at(row), ranks.at(row)),
        unused_ms: unused_ms.at(row),
        ended: ended.at(row),
    };
    Ok((0..rows).map(row).collect())
}
