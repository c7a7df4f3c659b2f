//! Bytes to a dump, a section at a time. Whatever the bytes are: no panic, and no more memory than they take.

use std::io::{self, Read};

use flatbuffers::{Follow, Verifiable, VerifierOptions};
use xxhash_rust::xxh3::Xxh3;

use super::format::{
    FOOTER_BYTES, Header, MAGIC, PREAMBLE_BYTES, SECTION_HEAD_BYTES, SectionKind, SpaceName, VERSION, section_checksum,
};
use super::refusal::{Fault, Refusal};
use crate::event::SourceTrust;
use crate::fleet::PoolRole;
use crate::ids::{EngineHash, EventSeq, GroupId, LocalHash, Scheme, Seed, Tier, Window, Worker};
use crate::index::StoreBlocks;
use crate::ingest::{DumpBegin, DumpChunk, References};
use crate::limits::{
    BLOCK_SIZE_TOKENS_MAX, FRAME_TABLE_DEPTH_MAX, GATE_PAYLOADS_REMEMBERED, NAME_BYTES_MAX,
    SNAPSHOT_SECTION_BLOCKS_MAX, SNAPSHOT_SECTION_BYTES_MAX,
};
use crate::schema_generated::snapshot as fb;
use crate::trust::{Trust, TrustLevel, TrustReasons};

/// Tables of a section: the root and what it may hold.
const SECTION_TABLES_MAX: usize = 4;

/// What follows the header, part by part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Some of the blocks.
    Chunk(DumpChunk),
    /// The end. Every checksum of the file has been compared, and what it says of the blocks is so.
    End(References),
}

/// Everything in a snapshot.
///
/// # Errors
/// What is wrong with the bytes, and where that showed.
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

/// Reads one snapshot. The memory it takes is that of one section.
pub struct Decoder<R> {
    input: R,
    offset: u64,
    whole: Xxh3,
    body: Vec<u8>,
    chunks: u64,
    references: References,
}

impl<R: Read> Decoder<R> {
    /// Reads what comes before the blocks.
    ///
    /// # Errors
    /// What is wrong with the bytes.
    pub fn open(input: R) -> Result<(Header, Self), Fault> {
        let references = References::default();
        let mut this = Self { input, offset: 0, whole: Xxh3::new(), body: Vec::new(), chunks: 0, references };
        let mut preamble = [0; PREAMBLE_BYTES];
        this.fill(&mut preamble)?;
        this.whole.update(&preamble);
        let [magic @ .., _, _, _, _, _, _, _, _] = preamble;
        if magic != MAGIC {
            return Err(this.fault(Refusal::NotASnapshot));
        }
        if preamble[8..12] != VERSION.to_le_bytes() {
            return Err(this.fault(Refusal::OtherVersion));
        }
        if preamble[12..] != [0; 4] {
            return Err(this.fault(Refusal::Malformed));
        }
        if this.section()? != SectionKind::Begin {
            return Err(this.fault(Refusal::Malformed));
        }
        let header = this.root::<fb::Begin<'_>>().and_then(header_of).ok_or_else(|| this.fault(Refusal::Malformed))?;
        Ok((header, this))
    }

    /// The next part. After the end there is none to ask for.
    ///
    /// # Errors
    /// What is wrong with the bytes.
    pub fn part(&mut self) -> Result<Part, Fault> {
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
                // Whatever is behind the footer is nobody's.
                if !agrees || self.read_some(&mut [0])? != 0 {
                    return Err(self.fault(Refusal::Malformed));
                }
                Ok(Part::End(self.references))
            }
        }
    }

    /// How many bytes have been read.
    #[must_use]
    pub const fn offset(&self) -> u64 {
        self.offset
    }

    /// Reads a section into `body`, and compares its checksum.
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
        // Grows as bytes come: a length alone takes no memory.
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

    /// The table in `body`; `None` = it does not verify.
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

/// `None` where a value means nothing here.
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
        begin: DumpBegin { watermark, remembered, scheme, groups, trust, view },
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

/// `None` where the runs are not those of the blocks.
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
