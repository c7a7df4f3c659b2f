//! A dump to bytes, a section at a time.

use std::io::{self, Write};

use flatbuffers::{FlatBufferBuilder, WIPOffset};
use xxhash_rust::xxh3::Xxh3;

use super::format::{Header, MAGIC, SectionKind, VERSION, section_checksum};
use crate::fleet::PoolRole;
use crate::ids::{Scheme, Tier, Window};
use crate::index::StoreBlocks;
use crate::ingest::{DumpChunk, References};
use crate::limits::SNAPSHOT_SECTION_BLOCKS_MAX;
use crate::schema_generated::snapshot as fb;

/// Writes one snapshot. The memory it takes is that of one section.
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
    /// Writes what comes before the blocks.
    ///
    /// # Errors
    /// The writer's.
    pub fn begin(out: W, header: &Header) -> io::Result<Self> {
        let builder = FlatBufferBuilder::new();
        let gathered = Gathered::default();
        let mut this = Self { out, written: 0, whole: Xxh3::new(), builder, gathered, chunks: 0 };
        let mut preamble = [0; super::format::PREAMBLE_BYTES];
        preamble[..8].copy_from_slice(&MAGIC);
        preamble[8..12].copy_from_slice(&VERSION.to_le_bytes());
        this.write(&preamble)?;
        let root = header_of(&mut this.builder, header);
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
            // A run of any length: one that does not fit goes on as a child of its own last block.
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

    /// Writes what comes behind the blocks, and answers with the writer and the bytes written.
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

    /// Writes the stores gathered so far as one section.
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

    /// Writes what the builder has finished.
    fn section(&mut self, kind: SectionKind) -> io::Result<()> {
        let body = self.builder.finished_data();
        let mut head = [0; super::format::SECTION_HEAD_BYTES];
        // A section is bounded by far less than 4 GiB.
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
            tier_of(store.tier),
            store.parent.is_some(),
        ));
        self.hashes.extend(store.hashes.iter().map(|hash| hash.0));
        self.locals.extend(store.locals.iter().map(|local| local.0));
    }

    /// Runs are bounded as blocks are: a store may be empty.
    const fn is_full(&self) -> bool {
        self.hashes.len() >= SNAPSHOT_SECTION_BLOCKS_MAX || self.runs.len() >= SNAPSHOT_SECTION_BLOCKS_MAX
    }

    fn clear(&mut self) {
        self.runs.clear();
        self.hashes.clear();
        self.locals.clear();
    }
}

fn header_of(builder: &mut FlatBufferBuilder<'static>, header: &Header) -> WIPOffset<fb::Begin<'static>> {
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
    let groups = begin.groups.iter().map(|(tier, group)| fb::Group::new(group.0, tier_of(*tier)));
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

const fn tier_of(tier: Tier) -> fb::Tier {
    match tier {
        Tier::Device => fb::Tier::Device,
        Tier::Host => fb::Tier::Host,
        Tier::Disk => fb::Tier::Disk,
        Tier::External => fb::Tier::External,
    }
}
