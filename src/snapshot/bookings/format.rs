//! The format of an image of bookings, its writer and its reader. All numbers are little-endian.
//!
//! ```text
//! preamble   magic, version, zero
//! section*   body_bytes: u32  kind: u32  checksum: u64  body: [u8; body_bytes]     bookings | workers | bindings, then end
//! ```
//!
//! The seed of a section's checksum is its kind and its position, so that sections cannot be lost, repeated or swapped. The
//! end is written last: without it the image is not whole. Checksums guard against disks, accidents and a crash in the
//! middle of a write, not against an adversary, who could as well write a right image.
//!
//! Change the version whenever this framing, a record or the hashing of blocks or names changes.

use std::io::{self, Write};
use std::ops::RangeInclusive;

use super::{BookingsImage, ImageFacts, ImageTime};
use crate::framed_file::{PREAMBLE_BYTES, Preamble, checksum};
use crate::ids::{LocalHash, SpaceId, Worker};
use crate::limits::{
    BLOCK_SIZE_TOKENS_MAX, BOOKINGS_MAX, KEPT_BINDINGS_MAX, KEPT_BLOCKS_MAX, KEPT_BOOKINGS_PER_LOCK_MAX,
    KEPT_LOST_RANGES_MAX, KEPT_SECTION_BYTES_MAX, KEPT_WORKERS_MAX, PROMPT_BLOCKS_MAX, SPACES_MAX,
};
use crate::load::{
    KeptBlocks, KeptBooking, KeptLoads, KeptNumbers, KeptRun, KeptSession, KeptSlice, KeptWorker, RecentWork, SessionId,
};
use crate::protocol::SessionToken;
use crate::requests::Identity;
use crate::route::KeptBinding;
use crate::snapshot::stats::{Fault, Refusal};

const MAGIC: [u8; 8] = *b"KVRDBOOK";
/// The version that is written, and the only one that is read.
const VERSION: u32 = 1;
pub(super) const SECTION_HEAD_BYTES: usize = 16;
/// The highest number that only grows: of images, generations and versions. No daemon comes near it.
const GROWING_MAX: u64 = 1 << 62;
/// In place of the run before, or of a session without a token.
const NONE: u32 = u32::MAX;
/// Flags of a booking.
const PREFILLING: u32 = 1;
const PREFILL_HALF: u32 = 2;
const BLOCKS_ALONE: u32 = 4;
const FLAGS: u32 = PREFILLING | PREFILL_HALF | BLOCKS_ALONE;

/// The kinds of sections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum SectionKind {
    Bookings = 1,
    Workers = 2,
    Bindings = 3,
    End = 4,
}

impl SectionKind {
    const ALL: [Self; 4] = [Self::Bookings, Self::Workers, Self::Bindings, Self::End];

    /// The checksum of a section at a position.
    fn checksum(self, position: u32, body: &[u8]) -> u64 {
        checksum(u64::from(position) << 32 | self as u64, body)
    }
}

// ---- writing ----

/// Writes one image, a section at a time.
pub struct Encoder<W: Write> {
    out: W,
    body: Vec<u8>,
    sections: u32,
    written: u64,
}

impl<W: Write> Encoder<W> {
    /// Writes the preamble.
    ///
    /// # Errors
    /// The writer's.
    pub fn begin(mut out: W) -> io::Result<Self> {
        out.write_all(&Preamble { magic: MAGIC, version: VERSION, extra: 0 }.to_bytes())?;
        Ok(Self { out, body: Vec::new(), sections: 0, written: PREAMBLE_BYTES as u64 })
    }

    /// Writes bookings; nothing if there are none.
    ///
    /// # Errors
    /// The writer's.
    pub fn slice(&mut self, slice: &KeptSlice) -> io::Result<()> {
        if slice.bookings.is_empty() {
            return Ok(());
        }
        let lens = [slice.sessions.len(), slice.runs.len(), slice.hashes.len(), slice.bookings.len()];
        lens.into_iter().for_each(|len| self.u32(len as u32));
        slice.sessions.iter().for_each(|session| self.session(session));
        for run in &slice.runs {
            self.u32(run.parent.unwrap_or(NONE));
            self.u32(run.blocks);
        }
        slice.hashes.iter().for_each(|hash| self.u64(hash.0));
        slice.bookings.iter().for_each(|booking| self.booking(booking));
        self.section(SectionKind::Bookings)
    }

    /// Writes the loads of workers.
    ///
    /// # Errors
    /// The writer's.
    pub fn workers(&mut self, workers: &[KeptWorker]) -> io::Result<()> {
        for KeptWorker { worker, elapsed_ns, recent } in workers {
            self.worker(*worker);
            self.u64(*elapsed_ns);
            [recent.prefill_share.to_bits(), recent.at_ms, recent.decode_s.to_bits(), recent.decodes]
                .into_iter()
                .for_each(|value| self.u32(value));
        }
        self.section(SectionKind::Workers)
    }

    /// Writes bindings.
    ///
    /// # Errors
    /// The writer's.
    pub fn bindings(&mut self, bindings: &[KeptBinding]) -> io::Result<()> {
        for KeptBinding { key, worker, user, age_s } in bindings {
            key.iter().for_each(|half| self.u64(*half));
            self.worker(*worker);
            self.u32(*user);
            self.u32(*age_s);
        }
        self.section(SectionKind::Bindings)
    }

    /// Writes the end. Returns the writer and the bytes of the image.
    ///
    /// # Errors
    /// The writer's.
    pub fn end(mut self, facts: &ImageFacts, numbers: &KeptNumbers) -> io::Result<(W, u64)> {
        let ImageFacts { number, identity, taken, spaces } = facts;
        let Identity { instance_id, secret, affinity_secret, fleet_version } = *identity;
        [*number, instance_id, secret, affinity_secret, fleet_version, taken.unix_ms, taken.since_boot_ns]
            .into_iter()
            .chain([numbers.complete_to, numbers.generations])
            .for_each(|value| self.u64(value));
        self.body.extend_from_slice(&taken.boot.to_le_bytes());
        self.u32(numbers.next_session);
        self.u32(spaces.len() as u32);
        spaces.iter().for_each(|space| self.body.extend_from_slice(&space.to_le_bytes()));
        self.u32(numbers.lost.len() as u32);
        numbers.lost.iter().flat_map(|range| [*range.start(), *range.end()]).for_each(|value| self.u64(value));
        self.section(SectionKind::End)?;
        self.out.flush()?;
        Ok((self.out, self.written))
    }

    fn session(&mut self, session: &KeptSession) {
        let KeptSession { id, token, uid } = *session;
        let SessionToken { hi, lo } = token.unwrap_or(SessionToken { hi: 0, lo: 0 });
        [id.0, uid, if token.is_some() { 0 } else { NONE }].into_iter().for_each(|value| self.u32(value));
        self.u64(hi);
        self.u64(lo);
    }

    fn booking(&mut self, booking: &KeptBooking) {
        let (of_blocks, blocks) = match booking.blocks {
            KeptBlocks::Alone(blocks) => (BLOCKS_ALONE, blocks),
            KeptBlocks::Run(run) => (0, u64::from(run)),
        };
        let flag = |is_set: bool, flag| if is_set { flag } else { 0 };
        let flags = of_blocks | flag(booking.prefilling, PREFILLING) | flag(booking.is_prefill_half, PREFILL_HALF);
        self.worker(booking.worker);
        [booking.slot, booking.session.0, booking.attempt, booking.space.0, flags, booking.block_size]
            .into_iter()
            .chain([booking.expected_output_tokens, booking.output_tokens])
            .chain(booking.prompt_tokens)
            .for_each(|value| self.u32(value));
        let [first, second] = booking.name;
        [booking.generation, first, second, blocks, booking.age_ns, booking.since_first_token_ns]
            .into_iter()
            .for_each(|value| self.u64(value));
    }

    fn worker(&mut self, worker: Worker) {
        self.u64(worker.id.0);
        self.u32(worker.rank.0);
    }

    fn u32(&mut self, value: u32) {
        self.body.extend_from_slice(&value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.body.extend_from_slice(&value.to_le_bytes());
    }

    fn section(&mut self, kind: SectionKind) -> io::Result<()> {
        let mut head = [0; SECTION_HEAD_BYTES];
        head[..4].copy_from_slice(&(self.body.len() as u32).to_le_bytes());
        head[4..8].copy_from_slice(&(kind as u32).to_le_bytes());
        head[8..].copy_from_slice(&kind.checksum(self.sections, &self.body).to_le_bytes());
        self.out.write_all(&head)?;
        self.out.write_all(&self.body)?;
        self.written += (SECTION_HEAD_BYTES + self.body.len()) as u64;
        self.sections += 1;
        self.body.clear();
        Ok(())
    }
}

/// The bytes of an image.
///
/// # Errors
/// None: memory takes them.
pub fn encode_bookings(image: &BookingsImage) -> io::Result<Vec<u8>> {
    let mut encoder = Encoder::begin(Vec::new())?;
    image.loads.slices.iter().try_for_each(|slice| encoder.slice(slice))?;
    encoder.workers(&image.loads.workers)?;
    encoder.bindings(&image.bindings)?;
    encoder.end(&image.facts, &image.loads.numbers).map(|(bytes, _)| bytes)
}

// ---- reading ----

/// The fields of a section that are left.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const BYTES: usize>(&mut self) -> Option<[u8; BYTES]> {
        let (field, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*field)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn u128(&mut self) -> Option<u128> {
        self.take().map(u128::from_le_bytes)
    }

    fn worker(&mut self) -> Option<Worker> {
        Some(Worker::new(self.u64()?, self.u32()?))
    }

    /// This many records, each of at least 4 bytes.
    fn list<T>(&mut self, len: u32, read: impl Fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let len = len as usize;
        if len > self.0.len() / 4 {
            return None;
        }
        (0..len).map(|_| read(self)).collect()
    }

    /// Records up to the end.
    fn all<T>(mut self, read: impl Fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let mut all = Vec::new();
        while !self.0.is_empty() {
            all.push(read(&mut self)?);
        }
        Some(all)
    }
}

/// Reads the bytes of an image.
///
/// # Errors
/// The first fault of the bytes, and its offset.
pub fn decode_bookings(bytes: &[u8]) -> Result<BookingsImage, Fault> {
    let fault = |refusal, offset: usize| Fault { refusal, offset: offset as u64 };
    let truncated = fault(Refusal::Truncated, bytes.len());
    let (preamble, mut rest) = bytes.split_first_chunk::<PREAMBLE_BYTES>().ok_or(truncated)?;
    let preamble = Preamble::from_bytes(preamble);
    if preamble.magic != MAGIC {
        return Err(fault(Refusal::NotASnapshot, 0));
    }
    if preamble.version != VERSION {
        return Err(fault(Refusal::OtherVersion, 8));
    }
    if preamble.extra != 0 {
        return Err(fault(Refusal::Malformed, 12));
    }
    let (mut read, mut position) = (ReadSections::default(), 0);
    loop {
        let offset = bytes.len() - rest.len();
        let (head, behind) = rest.split_first_chunk::<SECTION_HEAD_BYTES>().ok_or(truncated)?;
        let [b0, b1, b2, b3, k0, k1, k2, k3, sum @ ..] = *head;
        let body_bytes = u32::from_le_bytes([b0, b1, b2, b3]) as usize;
        let kind = u32::from_le_bytes([k0, k1, k2, k3]);
        let kind = SectionKind::ALL.into_iter().find(|of| *of as u32 == kind);
        let malformed = fault(Refusal::Malformed, offset);
        let kind = kind.filter(|_| body_bytes <= KEPT_SECTION_BYTES_MAX).ok_or(malformed)?;
        let (body, behind) = behind.split_at_checked(body_bytes).ok_or(truncated)?;
        if kind.checksum(position, body) != u64::from_le_bytes(sum) {
            return Err(fault(Refusal::Checksum, offset));
        }
        (rest, position) = (behind, position + 1);
        if kind == SectionKind::End {
            let whole = rest.is_empty().then(|| read.end(Fields(body))).flatten();
            return whole.ok_or(malformed);
        }
        read.section(kind, Fields(body)).ok_or(malformed)?;
    }
}

/// The sections that were read so far.
#[derive(Default)]
struct ReadSections {
    loads: KeptLoads,
    bindings: Vec<KeptBinding>,
    bookings: usize,
    blocks: usize,
    /// The highest number of a space of a booking, and the highest generation.
    space_max: Option<u32>,
    generation_max: u64,
}

impl ReadSections {
    /// Takes a section. `None` = it is malformed, or beyond a limit.
    fn section(&mut self, kind: SectionKind, fields: Fields<'_>) -> Option<()> {
        match kind {
            SectionKind::Bookings => {
                let slice = slice_of(fields)?;
                self.bookings += slice.bookings.len();
                self.blocks += slice.hashes.len();
                self.space_max = self.space_max.max(slice.bookings.iter().map(|booking| booking.space.0).max());
                let generation = slice.bookings.iter().map(|booking| booking.generation).max();
                self.generation_max = self.generation_max.max(generation.unwrap_or(0));
                self.loads.slices.push(slice);
            }
            SectionKind::Workers => self.loads.workers.extend(fields.all(worker_of)?),
            SectionKind::Bindings => self.bindings.extend(fields.all(binding_of)?),
            SectionKind::End => return None,
        }
        let is_bounded = self.bookings <= BOOKINGS_MAX
            && self.blocks <= KEPT_BLOCKS_MAX
            && self.loads.workers.len() <= KEPT_WORKERS_MAX
            && self.bindings.len() <= KEPT_BINDINGS_MAX;
        is_bounded.then_some(())
    }

    fn end(mut self, mut fields: Fields<'_>) -> Option<BookingsImage> {
        let number = fields.u64()?;
        let identity = Identity {
            instance_id: fields.u64().filter(|id| *id != 0)?,
            secret: fields.u64()?,
            affinity_secret: fields.u64()?,
            fleet_version: fields.u64()?,
        };
        let (unix_ms, since_boot_ns) = (fields.u64()?, fields.u64()?);
        let (complete_to, generations) = (fields.u64()?, fields.u64()?);
        let taken = ImageTime { boot: fields.u128()?, since_boot_ns, unix_ms };
        let next_session = fields.u32()?;
        let len = fields.u32().filter(|len| *len as usize <= SPACES_MAX)?;
        let spaces = fields.list(len, Fields::u128)?;
        let len = fields.u32().filter(|len| *len as usize <= KEPT_LOST_RANGES_MAX)?;
        let lost = fields.list(len, |fields| Some(fields.u64()?..=fields.u64()?))?;
        let ascend = |ranges: &[RangeInclusive<u64>]| ranges[0].end() < ranges[1].start();
        let is_sound = fields.0.is_empty()
            && lost.iter().all(|range| !range.is_empty() && *range.end() <= complete_to)
            && lost.windows(2).all(ascend)
            && number.max(identity.fleet_version).max(generations) <= GROWING_MAX
            && complete_to.max(self.generation_max) <= generations
            && self.space_max.is_none_or(|space| (space as usize) < spaces.len());
        self.loads.numbers = KeptNumbers { complete_to, generations, next_session, lost };
        let facts = ImageFacts { number, identity, taken, spaces };
        is_sound.then_some(BookingsImage { facts, loads: self.loads, bindings: self.bindings })
    }
}

fn slice_of(mut fields: Fields<'_>) -> Option<KeptSlice> {
    let [sessions, runs, hashes, bookings] = [fields.u32()?, fields.u32()?, fields.u32()?, fields.u32()?];
    // Without bookings, there would be no limit to the number of slices.
    if bookings == 0 || sessions.max(bookings) as usize > KEPT_BOOKINGS_PER_LOCK_MAX {
        return None;
    }
    let slice = KeptSlice {
        sessions: fields.list(sessions, session_of)?,
        runs: fields.list(runs, run_of)?,
        hashes: fields.list(hashes, |fields| fields.u64().map(LocalHash))?,
        bookings: fields.list(bookings, booking_of)?,
    };
    let depths = slice.depths();
    let is_sound = |(place, run): (usize, &KeptRun)| {
        run.blocks > 0
            && run.parent.is_none_or(|parent| (parent as usize) < place)
            && depths[place] <= PROMPT_BLOCKS_MAX as u64
    };
    let has_prompt = |booking: &KeptBooking| match booking.blocks {
        KeptBlocks::Alone(blocks) => blocks <= PROMPT_BLOCKS_MAX as u64,
        KeptBlocks::Run(run) => (run as usize) < slice.runs.len(),
    };
    let blocks: u64 = slice.runs.iter().map(|run| u64::from(run.blocks)).sum();
    let is_whole = fields.0.is_empty() && blocks == slice.hashes.len() as u64;
    let are_sound = slice.runs.iter().enumerate().all(is_sound) && slice.bookings.iter().all(has_prompt);
    (is_whole && are_sound).then_some(slice)
}

fn session_of(fields: &mut Fields<'_>) -> Option<KeptSession> {
    let (id, uid, no_token) = (SessionId(fields.u32()?), fields.u32()?, fields.u32()?);
    let token = SessionToken { hi: fields.u64()?, lo: fields.u64()? };
    match no_token {
        0 => Some(KeptSession { id, token: Some(token), uid }),
        NONE => (token == SessionToken { hi: 0, lo: 0 }).then_some(KeptSession { id, token: None, uid }),
        _ => None,
    }
}

fn run_of(fields: &mut Fields<'_>) -> Option<KeptRun> {
    let parent = fields.u32()?;
    Some(KeptRun { parent: (parent != NONE).then_some(parent), blocks: fields.u32()? })
}

fn booking_of(fields: &mut Fields<'_>) -> Option<KeptBooking> {
    let worker = fields.worker()?;
    let (slot, session, attempt) = (fields.u32()?, SessionId(fields.u32()?), fields.u32()?);
    let (space, flags) = (SpaceId(fields.u32()?), fields.u32().filter(|flags| flags & !FLAGS == 0)?);
    let block_size = fields.u32().filter(|size| *size <= BLOCK_SIZE_TOKENS_MAX)?;
    let (expected_output_tokens, output_tokens) = (fields.u32()?, fields.u32()?);
    let prompt_tokens = [fields.u32()?, fields.u32()?];
    let generation = fields.u64().filter(|generation| *generation > 0)?;
    let (name, blocks) = ([fields.u64()?, fields.u64()?], fields.u64()?);
    let blocks = match flags & BLOCKS_ALONE {
        0 => KeptBlocks::Run(blocks.try_into().ok()?),
        _ => KeptBlocks::Alone(blocks),
    };
    Some(KeptBooking {
        slot: Some(slot).filter(|slot| (*slot as usize) < BOOKINGS_MAX)?,
        generation,
        session,
        name,
        attempt,
        worker,
        space,
        prompt_tokens,
        blocks,
        block_size,
        expected_output_tokens,
        output_tokens,
        prefilling: flags & PREFILLING != 0,
        is_prefill_half: flags & PREFILL_HALF != 0,
        age_ns: fields.u64()?,
        since_first_token_ns: fields.u64()?,
    })
}

fn worker_of(fields: &mut Fields<'_>) -> Option<KeptWorker> {
    let (worker, elapsed_ns) = (fields.worker()?, fields.u64()?);
    let (share, at_ms, decode, decodes) = (fields.u32()?, fields.u32()?, fields.u32()?, fields.u32()?);
    let recent = RecentWork { prefill_share: f32::from_bits(share), at_ms, decode_s: f32::from_bits(decode), decodes };
    recent.is_plausible().then_some(KeptWorker { worker, elapsed_ns, recent })
}

fn binding_of(fields: &mut Fields<'_>) -> Option<KeptBinding> {
    let key = [fields.u64()?, fields.u64()?];
    Some(KeptBinding { key, worker: fields.worker()?, user: fields.u32()?, age_s: fields.u32()? })
}
