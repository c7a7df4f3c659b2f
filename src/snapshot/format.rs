//! The format of a snapshot file, its writer and its reader. All numbers are little-endian.
//!
//! ```text
//! preamble   magic, version, zero
//! section*   body_bytes: u32  kind: u32  checksum: u64  body: [u8; body_bytes]     begin, chunk*, end
//! footer     checksum: u128
//! ```
//!
//! The seed of a section's checksum is its kind; no part of a section is used until the whole section is read and
//! verified. The footer is the XXH3-128 of every byte before it, so that sections cannot be lost, repeated or swapped.
//! Both checksums guard against disk errors and accidents, not against an adversary: any process that can write the
//! directory can write a snapshot.
//!
//! Change the version whenever this framing, `schemas/snapshot.fbs` or the block hashing changes.

use std::io::{self, Read, Write};

use flatbuffers::{FlatBufferBuilder, Follow, Verifiable, VerifierOptions, WIPOffset};
use xxhash_rust::xxh3::Xxh3;

use super::stats::{Fault, Refusal};
use crate::event::SourceTrust;
use crate::fleet::PoolRole;
use crate::framed_file::{PREAMBLE_BYTES, Preamble, checksum};
use crate::ids::{EngineHash, EventSeq, GroupId, LocalHash, Scheme, Seed, Tier, Window, Worker};
use crate::index::StoreBlocks;
use crate::ingest::{DumpBegin, DumpChunk, References};
use crate::limits::{
    BLOCK_SIZE_TOKENS_MAX, FRAME_TABLE_DEPTH_MAX, GATE_PAYLOADS_REMEMBERED, NAME_BYTES_MAX,
    SNAPSHOT_SECTION_BLOCKS_MAX, SNAPSHOT_SECTION_BYTES_MAX,
};
use crate::schema_generated::snapshot as fb;
use crate::trust::{Trust, TrustLevel, TrustReasons};

const MAGIC: [u8; 8] = *b"KVRDSNAP";
/// The version that is written, and the only one that is read.
pub(super) const VERSION: u32 = 1;
pub(super) const SECTION_HEAD_BYTES: usize = 16;
pub(super) const FOOTER_BYTES: usize = 16;
/// Tables of a section: the root and those that it may hold.
const SECTION_TABLES_MAX: usize = 4;

/// The kinds of sections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum SectionKind {
    Begin = 1,
    Chunk = 2,
    End = 3,
}

impl SectionKind {
    pub(super) const fn from_u32(value: u32) -> Option<Self> {
        match value {
            1 => Some(Self::Begin),
            2 => Some(Self::Chunk),
            3 => Some(Self::End),
            _ => None,
        }
    }
}

pub(super) fn section_checksum(kind: SectionKind, body: &[u8]) -> u64 {
    checksum(kind as u64, body)
}

/// A space by its names, which are compared: its number is valid for one daemon run only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpaceName {
    /// The model.
    pub model: String,
    /// The namespace; empty = the default one.
    pub namespace: String,
    /// The pool.
    pub role: PoolRole,
}

/// The beginning of a snapshot: its worker, and the state that its blocks are as of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The worker that held the blocks.
    pub worker: Worker,
    /// The worker's space.
    pub space: SpaceName,
    /// The time of the snapshot, milliseconds of Unix time.
    pub taken_unix_ms: u64,
    /// The first part of the dump.
    pub begin: DumpBegin,
}

// ---- writing ----

/// Writes one snapshot, a section at a time. It takes the memory of one section.
pub struct Encoder<W: Write> {
    out: W,
    written: u64,
    whole: Xxh3,
    builder: FlatBufferBuilder<'static>,
    gathered: Gathered,
    chunks: u64,
}

/// The stores of the section that is being filled.
#[derive(Default)]
struct Gathered {
    runs: Vec<fb::Run>,
    hashes: Vec<u64>,
    locals: Vec<u64>,
}

impl<W: Write> Encoder<W> {
    /// Writes the preamble and the begin section.
    ///
    /// # Errors
    /// The writer's.
    pub fn begin(out: W, header: &Header) -> io::Result<Self> {
        let builder = FlatBufferBuilder::new();
        let gathered = Gathered::default();
        let mut this = Self { out, written: 0, whole: Xxh3::new(), builder, gathered, chunks: 0 };
        this.write(&Preamble { magic: MAGIC, version: VERSION, extra: 0 }.to_bytes())?;
        let root = begin_table(&mut this.builder, header);
        this.builder.finish(root, Some(fb::BEGIN_IDENTIFIER));
        this.section(SectionKind::Begin)?;
        Ok(this)
    }

    /// Writes blocks, in as many sections as they need.
    ///
    /// # Errors
    /// The writer's.
    pub fn chunk(&mut self, chunk: &DumpChunk) -> io::Result<()> {
        for store in (0..chunk.stores()).map_while(|number| chunk.store(number)) {
            // A run of blocks that does not fit continues in the next section, as a child of its own last block.
            let mut rest = store;
            loop {
                let room = SNAPSHOT_SECTION_BLOCKS_MAX - self.gathered.hashes.len();
                let taken = rest.hashes.len().min(room);
                self.gathered.push(&StoreBlocks {
                    hashes: &rest.hashes[..taken],
                    locals: &rest.locals[..taken],
                    ..rest
                });
                if self.gathered.is_full() {
                    self.flush()?;
                }
                if taken == rest.hashes.len() {
                    break;
                }
                let parent = if taken == 0 { rest.parent } else { Some(rest.hashes[taken - 1]) };
                rest = StoreBlocks { parent, hashes: &rest.hashes[taken..], locals: &rest.locals[taken..], ..rest };
            }
        }
        Ok(())
    }

    /// Writes the end section and the footer. Answers with the writer and the bytes written.
    ///
    /// # Errors
    /// The writer's.
    pub fn end(mut self, references: References) -> io::Result<(W, u64)> {
        self.flush()?;
        let args = fb::EndArgs { chunks: self.chunks, references: references.blocks, digest: references.digest };
        let root = fb::End::create(&mut self.builder, &args);
        self.builder.finish(root, Some(fb::BEGIN_IDENTIFIER));
        self.section(SectionKind::End)?;
        let footer = self.whole.digest128().to_le_bytes();
        self.write(&footer)?;
        self.out.flush()?;
        Ok((self.out, self.written))
    }

    /// Writes the gathered stores as one section.
    fn flush(&mut self) -> io::Result<()> {
        if self.gathered.runs.is_empty() {
            return Ok(());
        }
        let Gathered { runs, hashes, locals } = &self.gathered;
        let runs = Some(self.builder.create_vector(runs));
        let hashes = Some(self.builder.create_vector(hashes));
        let locals = Some(self.builder.create_vector(locals));
        let root = fb::Chunk::create(&mut self.builder, &fb::ChunkArgs { runs, hashes, locals });
        self.builder.finish(root, Some(fb::BEGIN_IDENTIFIER));
        self.gathered.clear();
        self.chunks += 1;
        self.section(SectionKind::Chunk)
    }

    /// Writes the table that the builder has finished, as a section.
    fn section(&mut self, kind: SectionKind) -> io::Result<()> {
        let body = self.builder.finished_data();
        let mut head = [0; SECTION_HEAD_BYTES];
        // The limits of a section keep it far below 4 GiB.
        head[..4].copy_from_slice(&(body.len() as u32).to_le_bytes());
        head[4..8].copy_from_slice(&(kind as u32).to_le_bytes());
        head[8..].copy_from_slice(&section_checksum(kind, body).to_le_bytes());
        for part in [&head[..], body] {
            self.whole.update(part);
            self.out.write_all(part)?;
            self.written += part.len() as u64;
        }
        self.builder.reset();
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.whole.update(bytes);
        self.out.write_all(bytes)?;
        self.written += bytes.len() as u64;
        Ok(())
    }
}

impl<W: Write> std::fmt::Debug for Encoder<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Encoder").field("written", &self.written).field("chunks", &self.chunks).finish_non_exhaustive()
    }
}

impl Gathered {
    fn push(&mut self, store: &StoreBlocks<'_>) {
        self.runs.push(fb::Run::new(
            store.parent.unwrap_or_default().0,
            store.seed.0,
            store.group.0,
            store.hashes.len() as u32,
            wire_tier(store.tier),
            store.parent.is_some(),
        ));
        self.hashes.extend(store.hashes.iter().map(|hash| hash.0));
        self.locals.extend(store.locals.iter().map(|local| local.0));
    }

    /// Runs have the same limit as blocks, because a store may be empty.
    const fn is_full(&self) -> bool {
        self.hashes.len() >= SNAPSHOT_SECTION_BLOCKS_MAX || self.runs.len() >= SNAPSHOT_SECTION_BLOCKS_MAX
    }

    fn clear(&mut self) {
        self.runs.clear();
        self.hashes.clear();
        self.locals.clear();
    }
}

fn begin_table(builder: &mut FlatBufferBuilder<'static>, header: &Header) -> WIPOffset<fb::Begin<'static>> {
    let begin = &header.begin;
    let model = Some(builder.create_string(&header.space.model));
    let namespace = Some(builder.create_string(&header.space.namespace));
    let scheme = begin.scheme.map(|Scheme { block_size, window }| {
        let window = match window {
            Window::Plain => fb::Window::Plain,
            Window::Bigram => fb::Window::Bigram,
        };
        fb::Scheme::create(builder, &fb::SchemeArgs { block_size, window, seed_rule: fb::SeedRule::Xxh3Additive })
    });
    let remembered = begin.remembered.iter().map(|(seq, payload_hash)| fb::Remembered::new(seq.0, *payload_hash));
    let remembered = Some(builder.create_vector_from_iter(remembered));
    let groups = begin.groups.iter().map(|(tier, group)| fb::Group::new(group.0, wire_tier(*tier)));
    let groups = Some(builder.create_vector_from_iter(groups));
    let args = fb::BeginArgs {
        worker_id: header.worker.id.0,
        dp_rank: header.worker.rank.0,
        model,
        namespace,
        role: match header.space.role {
            PoolRole::Both => fb::PoolRole::Both,
            PoolRole::Prefill => fb::PoolRole::Prefill,
            PoolRole::Decode => fb::PoolRole::Decode,
        },
        taken_unix_ms: header.taken_unix_ms,
        watermark: begin.watermark.map(|seq| seq.0),
        remembered,
        scheme,
        groups,
        trust: fb::TrustLevel(begin.view.level as u8),
        reasons: begin.view.reasons.bits(),
        since_unix_ms: begin.trust.since_unix_ms,
        as_of_seq: begin.trust.as_of_seq.map(|seq| seq.0),
        as_of_unix_ms: begin.trust.as_of_unix_ms,
    };
    fb::Begin::create(builder, &args)
}

const fn wire_tier(tier: Tier) -> fb::Tier {
    match tier {
        Tier::Device => fb::Tier::Device,
        Tier::Host => fb::Tier::Host,
        Tier::Disk => fb::Tier::Disk,
        Tier::External => fb::Tier::External,
    }
}

// ---- reading ----

/// A part of a snapshot after its header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Blocks.
    Chunk(DumpChunk),
    /// The end. Every checksum of the file is verified, and its counts agree with the blocks.
    End(References),
}

/// Reads a whole snapshot.
///
/// # Errors
/// The first fault of the bytes, and its offset.
pub fn decode(bytes: &[u8]) -> Result<(Header, Vec<DumpChunk>, References), Fault> {
    let (header, mut decoder) = Decoder::open(bytes)?;
    let mut chunks = Vec::new();
    loop {
        match decoder.part()? {
            Part::Chunk(chunk) => chunks.push(chunk),
            Part::End(references) => return Ok((header, chunks, references)),
        }
    }
}

/// Reads one snapshot, a section at a time. Any bytes are read or refused without a panic. It takes the
/// memory of one section, and never more than the bytes that arrived.
pub(super) struct Decoder<R> {
    input: R,
    offset: u64,
    whole: Xxh3,
    body: Vec<u8>,
    chunks: u64,
    references: References,
}

impl<R: Read> Decoder<R> {
    /// Reads the preamble and the begin section.
    ///
    /// # Errors
    /// The first fault of the bytes.
    pub(super) fn open(input: R) -> Result<(Header, Self), Fault> {
        let references = References::default();
        let mut this = Self { input, offset: 0, whole: Xxh3::new(), body: Vec::new(), chunks: 0, references };
        let mut preamble = [0; PREAMBLE_BYTES];
        this.fill(&mut preamble)?;
        this.whole.update(&preamble);
        let Preamble { magic, version, extra } = Preamble::from_bytes(&preamble);
        if magic != MAGIC {
            return Err(this.fault(Refusal::NotASnapshot));
        }
        if version != VERSION {
            return Err(this.fault(Refusal::OtherVersion));
        }
        if extra != 0 {
            return Err(this.fault(Refusal::Malformed));
        }
        if this.section()? != SectionKind::Begin {
            return Err(this.fault(Refusal::Malformed));
        }
        let header = this.root::<fb::Begin<'_>>().and_then(header_of).ok_or_else(|| this.fault(Refusal::Malformed))?;
        Ok((header, this))
    }

    /// Reads the next part. Do not call it after the end.
    ///
    /// # Errors
    /// The first fault of the bytes.
    pub(super) fn part(&mut self) -> Result<Part, Fault> {
        match self.section()? {
            SectionKind::Begin => Err(self.fault(Refusal::Malformed)),
            SectionKind::Chunk => {
                let chunk = self.root::<fb::Chunk<'_>>().and_then(|table| chunk_of(&table));
                let chunk = chunk.ok_or_else(|| self.fault(Refusal::Malformed))?;
                self.chunks += 1;
                (0..chunk.stores()).filter_map(|at| chunk.store(at)).for_each(|store| self.references.add(&store));
                Ok(Part::Chunk(chunk))
            }
            SectionKind::End => {
                let end = self.root::<fb::End<'_>>();
                let end = end.map(|end| (end.chunks(), References { blocks: end.references(), digest: end.digest() }));
                let agrees = end == Some((self.chunks, self.references));
                let (whole, mut footer) = (self.whole.digest128(), [0; FOOTER_BYTES]);
                self.fill(&mut footer)?;
                if footer != whole.to_le_bytes() {
                    return Err(self.fault(Refusal::Checksum));
                }
                // Nothing may follow the footer.
                if !agrees || self.read_some(&mut [0])? != 0 {
                    return Err(self.fault(Refusal::Malformed));
                }
                Ok(Part::End(self.references))
            }
        }
    }

    /// The bytes read so far.
    pub(super) const fn offset(&self) -> u64 {
        self.offset
    }

    /// Reads a section into `body`, and verifies its checksum.
    fn section(&mut self) -> Result<SectionKind, Fault> {
        let mut head = [0; SECTION_HEAD_BYTES];
        self.fill(&mut head)?;
        let [b0, b1, b2, b3, k0, k1, k2, k3, checksum @ ..] = head;
        let body_bytes = u32::from_le_bytes([b0, b1, b2, b3]) as usize;
        let kind = SectionKind::from_u32(u32::from_le_bytes([k0, k1, k2, k3]));
        let Some(kind) = kind.filter(|_| body_bytes <= SNAPSHOT_SECTION_BYTES_MAX) else {
            return Err(self.fault(Refusal::Malformed));
        };
        self.body.clear();
        // The buffer grows as bytes arrive: a length alone takes no memory.
        let read = (&mut self.input).take(body_bytes as u64).read_to_end(&mut self.body);
        self.offset += self.body.len() as u64;
        if read.is_err() {
            return Err(self.fault(Refusal::Unreadable));
        }
        if self.body.len() < body_bytes {
            return Err(self.fault(Refusal::Truncated));
        }
        if checksum != section_checksum(kind, &self.body).to_le_bytes() {
            return Err(self.fault(Refusal::Checksum));
        }
        self.whole.update(&head);
        self.whole.update(&self.body);
        Ok(kind)
    }

    fn fill(&mut self, into: &mut [u8]) -> Result<(), Fault> {
        let mut filled = 0;
        while filled < into.len() {
            match self.read_some(&mut into[filled..])? {
                0 => return Err(self.fault(Refusal::Truncated)),
                bytes => filled += bytes,
            }
        }
        Ok(())
    }

    fn read_some(&mut self, into: &mut [u8]) -> Result<usize, Fault> {
        loop {
            match self.input.read(into) {
                Ok(bytes) => {
                    self.offset += bytes as u64;
                    return Ok(bytes);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Err(self.fault(Refusal::Unreadable)),
            }
        }
    }

    const fn fault(&self, refusal: Refusal) -> Fault {
        Fault { refusal, offset: self.offset }
    }

    /// The table in `body`; `None` if it does not verify.
    fn root<'a, T>(&'a self) -> Option<T::Inner>
    where
        T: Follow<'a> + Verifiable + 'a,
    {
        if self.body.get(4..8) != Some(fb::BEGIN_IDENTIFIER.as_bytes()) {
            return None;
        }
        let options = VerifierOptions {
            max_depth: FRAME_TABLE_DEPTH_MAX,
            max_tables: SECTION_TABLES_MAX,
            max_apparent_size: self.body.len().saturating_mul(2),
            ignore_missing_null_terminator: true,
        };
        flatbuffers::root_with_opts::<T>(&options, &self.body).ok()
    }
}

impl<R> std::fmt::Debug for Decoder<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Decoder").field("offset", &self.offset).field("chunks", &self.chunks).finish_non_exhaustive()
    }
}

/// The header of a begin table; `None` if a value is invalid.
fn header_of(table: fb::Begin<'_>) -> Option<Header> {
    let name = |text: &str| (text.len() <= NAME_BYTES_MAX).then(|| text.to_owned());
    let role = match table.role() {
        fb::PoolRole::Both => PoolRole::Both,
        fb::PoolRole::Prefill => PoolRole::Prefill,
        fb::PoolRole::Decode => PoolRole::Decode,
        _ => return None,
    };
    let remembered: Vec<(EventSeq, u64)> =
        table.remembered().iter().flatten().map(|held| (EventSeq(held.seq()), held.payload_hash())).collect();
    let watermark = table.watermark().map(EventSeq);
    let ascends =
        remembered.is_sorted_by(|a, b| a.0 < b.0) && remembered.last().is_none_or(|last| Some(last.0) <= watermark);
    if remembered.len() > GATE_PAYLOADS_REMEMBERED || !ascends {
        return None;
    }
    let group = |held: &fb::Group| Some((tier_of(held.tier())?, GroupId(held.group())));
    let groups = table.groups().iter().flatten().map(group).collect::<Option<_>>()?;
    let scheme = match table.scheme() {
        Some(scheme) => Some(scheme_of(&scheme)?),
        None => None,
    };
    let trust = Trust {
        level: TrustLevel::from_u8(table.trust().0)?,
        reasons: TrustReasons::from_bits(table.reasons()),
        since_unix_ms: table.since_unix_ms(),
        as_of_seq: table.as_of_seq().map(EventSeq),
        as_of_unix_ms: table.as_of_unix_ms(),
    };
    let view = SourceTrust { level: trust.level, reasons: trust.reasons };
    Some(Header {
        worker: Worker::new(table.worker_id(), table.dp_rank()),
        space: SpaceName { model: name(table.model())?, namespace: name(table.namespace())?, role },
        taken_unix_ms: table.taken_unix_ms(),
        begin: DumpBegin { watermark, remembered, scheme, groups, trust, view, lifetime: None, republished: None },
    })
}

fn scheme_of(scheme: &fb::Scheme<'_>) -> Option<Scheme> {
    let window = match scheme.window() {
        fb::Window::Plain => Window::Plain,
        fb::Window::Bigram => Window::Bigram,
        _ => return None,
    };
    let is_ours =
        scheme.seed_rule() == fb::SeedRule::Xxh3Additive && (1..=BLOCK_SIZE_TOKENS_MAX).contains(&scheme.block_size());
    is_ours.then(|| Scheme { block_size: scheme.block_size(), window })
}

/// The blocks of a chunk table; `None` if its runs and its blocks disagree.
fn chunk_of(table: &fb::Chunk<'_>) -> Option<DumpChunk> {
    let (runs, blocks) = (table.runs(), table.hashes().len());
    if blocks != table.locals().len() || blocks.max(runs.len()) > SNAPSHOT_SECTION_BLOCKS_MAX {
        return None;
    }
    let hashes: Vec<EngineHash> = table.hashes().iter().map(EngineHash).collect();
    let locals: Vec<LocalHash> = table.locals().iter().map(LocalHash).collect();
    let (mut chunk, mut from) = (DumpChunk::default(), 0);
    for run in runs {
        let to = from + run.blocks() as usize;
        chunk.push(&StoreBlocks {
            parent: run.has_parent().then(|| EngineHash(run.parent())),
            hashes: hashes.get(from..to)?,
            locals: locals.get(from..to)?,
            tier: tier_of(run.tier())?,
            group: GroupId(run.group()),
            seed: Seed(run.seed()),
        });
        from = to;
    }
    (from == blocks).then_some(chunk)
}

const fn tier_of(tier: fb::Tier) -> Option<Tier> {
    match tier {
        fb::Tier::Device => Some(Tier::Device),
        fb::Tier::Host => Some(Tier::Host),
        fb::Tier::Disk => Some(Tier::Disk),
        fb::Tier::External => Some(Tier::External),
        _ => None,
    }
}
