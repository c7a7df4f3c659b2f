//! The format of a journal file, its writer and its reader. All numbers are little-endian.
//!
//! ```text
//! head     preamble: magic, version, head_bytes   head: JSON   checksum: u64
//! record*  body_bytes: u32  checksum: u64  body: kind: u8, values
//! ```
//!
//! The preamble is a [`Preamble`]. The JSON says who wrote the file, and names the values of a record in their order.
//! The values are numbers of a variable number of bytes ([`put`]). A checksum's seed is the record's position in the
//! file, so that records cannot be lost, repeated or exchanged unnoticed; the seed of the head's checksum is the
//! version.
//!
//! If a file's last record is cut off, its writer died while it wrote; the records before it are good.
//!
//! Version 2 added the identity of a decision's request, the ends of bookings, and the names of classes. Files of version 1
//! are read without them.

use serde::{Deserialize, Serialize};

use super::columns::{self, names, put, take};
use super::decision_record::{DecisionRecord, ListedCandidate, Outcome, RemovedWorker};
use super::identity::RequestIdentity;
use super::prefix_table::PrefixTable;
use crate::columns::Column;
use crate::error::{Error, Kind, Result};
use crate::framed_file::{PREAMBLE_BYTES, Preamble, checksum};
use crate::ids::SpaceId;
use crate::limits::{JOURNAL_NUMBER_MAX, PREFILL_CLASSES_MAX, PROMPT_TOKENS_MAX, SPACES_MAX, WORKERS_MAX};
use crate::load::EndedBooking;
use crate::route::{Observation, Policy, RequestFacts, Rule, WorkerFacts};

const MAGIC: [u8; 8] = *b"KVRDJRNL";
/// The version of the framing. It changes with the framing; values may come and go without.
const VERSION: u32 = 2;
/// The oldest version that this release reads.
const VERSION_MIN: u32 = 1;
const CHECKSUM_BYTES: usize = 8;
const RECORD_HEAD_BYTES: usize = 4 + CHECKSUM_BYTES;

/// The kinds of records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum RecordKind {
    /// The policy of a space from here on.
    Policy = 1,
    /// A decision.
    Decision = 2,
    /// Decisions of one serving thread are missing, because its queue was full.
    Gap = 3,
    /// The writer closed the file.
    End = 4,
    /// A recorded booking has ended.
    Ended = 5,
    /// Ends of recorded bookings are missing, because too many waited.
    EndsLost = 6,
}

impl RecordKind {
    const fn from_u8(value: u8) -> Option<Self> {
        match value {
            1 => Some(Self::Policy),
            2 => Some(Self::Decision),
            3 => Some(Self::Gap),
            4 => Some(Self::End),
            5 => Some(Self::Ended),
            6 => Some(Self::EndsLost),
            _ => None,
        }
    }
}

/// A space as a journal names it. Decisions refer to it by its position in the list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpaceLabel {
    /// The model.
    pub model: String,
    /// The namespace; empty = the default one.
    pub namespace: String,
    /// The pool: `both`, `prefill` or `decode`.
    pub role: String,
}

/// The daemon run that wrote a file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Origin {
    /// The release of the daemon.
    pub release: String,
    /// A number that the daemon draws when it starts.
    pub instance_id: u64,
    /// The start of the daemon, milliseconds since 1970.
    pub started_unix_ms: u64,
    /// The share of decisions that were to be written, 0 to 1.
    pub sample: f64,
    /// The daemon's spaces.
    pub spaces: Vec<SpaceLabel>,
    /// The names of the classes of workers when the file began. Ended bookings refer to them by their position.
    #[serde(default)]
    pub classes: Vec<String>,
}

/// The names of the values, in the order in which they are written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Columns {
    policy: Vec<String>,
    record: Vec<String>,
    /// Files name it `asked`.
    #[serde(rename = "asked")]
    request: Vec<String>,
    worker: Vec<String>,
    listed: Vec<String>,
    removed: Vec<String>,
    #[serde(default)]
    ended: Vec<String>,
    /// The names of the rules, by their number.
    rules: Vec<String>,
}

impl Columns {
    /// The columns of this release.
    pub(super) fn ours() -> Self {
        Self {
            policy: names(Policy::COLUMNS),
            record: names(columns::RECORD),
            request: names(RequestFacts::COLUMNS),
            worker: names(WorkerFacts::COLUMNS),
            listed: names(columns::LISTED),
            removed: names(columns::REMOVED),
            ended: names(EndedBooking::COLUMNS),
            rules: Rule::ALL.iter().map(|rule| rule.name().to_owned()).collect(),
        }
    }
}

/// The JSON at the head of a file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Head {
    origin: Origin,
    columns: Columns,
}

// ---- writing ----

/// Appends the records of one file. Its output depends only on its arguments.
#[derive(Debug, Default)]
pub struct Encoder {
    /// The policy that was written last, by space.
    policies: Vec<Option<Policy>>,
    prefixes: PrefixTable,
    /// Records so far.
    records: u64,
}

impl Encoder {
    /// Begins a file: appends its head.
    #[must_use]
    pub fn begin(origin: &Origin, out: &mut Vec<u8>) -> Self {
        let head = Head { origin: origin.clone(), columns: Columns::ours() };
        let head = serde_json::to_vec(&head).unwrap_or_default();
        let preamble = Preamble { magic: MAGIC, version: VERSION, extra: head.len() as u32 };
        out.extend_from_slice(&preamble.to_bytes());
        out.extend_from_slice(&head);
        out.extend_from_slice(&checksum(u64::from(VERSION), &head).to_le_bytes());
        Self::default()
    }

    /// Appends a decision. If the space's policy has changed, its policy precedes it.
    pub fn decision(&mut self, core: u32, record: &DecisionRecord, out: &mut Vec<u8>) {
        let space = record.space.0 as usize;
        if self.policies.len() <= space {
            self.policies.resize(space + 1, None);
        }
        if self.policies[space] != Some(record.policy) {
            self.policies[space] = Some(record.policy);
            self.policy(record.space, &record.policy, out);
        }
        let mut prefixes = std::mem::take(&mut self.prefixes);
        self.record(RecordKind::Decision, out, |out| {
            put(u64::from(core), out);
            put(u64::from(record.space.0), out);
            row(columns::RECORD, record, out);
            row(RequestFacts::COLUMNS, &record.observation.request, out);
            rows(WorkerFacts::COLUMNS, record.observation.workers.iter(), out);
            rows(columns::LISTED, record.outcome.listed.iter().copied(), out);
            rows(columns::REMOVED, record.outcome.removed.iter().copied(), out);
            prefixes.put(&record.identity.prefix, out);
        });
        self.prefixes = prefixes;
    }

    /// Appends what became of a booking.
    pub fn ended(&mut self, ended: &EndedBooking, out: &mut Vec<u8>) {
        self.record(RecordKind::Ended, out, |out| row(EndedBooking::COLUMNS, ended, out));
    }

    /// Appends that the ends of `lost` bookings are missing here.
    pub fn ends_lost(&mut self, lost: u64, out: &mut Vec<u8>) {
        self.record(RecordKind::EndsLost, out, |out| put(lost, out));
    }

    fn policy(&mut self, space: SpaceId, policy: &Policy, out: &mut Vec<u8>) {
        self.record(RecordKind::Policy, out, |out| {
            put(u64::from(space.0), out);
            row(Policy::COLUMNS, policy, out);
        });
    }

    /// Appends a gap: `lost` decisions of a serving thread are missing here.
    pub fn gap(&mut self, core: u32, lost: u64, out: &mut Vec<u8>) {
        self.record(RecordKind::Gap, out, |out| {
            put(u64::from(core), out);
            put(lost, out);
        });
    }

    /// Appends the end of the file.
    pub fn end(mut self, out: &mut Vec<u8>) {
        let records = self.records;
        self.record(RecordKind::End, out, |out| put(records, out));
    }

    fn record(&mut self, kind: RecordKind, out: &mut Vec<u8>, fill: impl FnOnce(&mut Vec<u8>)) {
        let head = out.len();
        out.resize(head + RECORD_HEAD_BYTES, 0);
        out.push(kind as u8);
        fill(out);
        let body = head + RECORD_HEAD_BYTES;
        let (bytes, sum) = ((out.len() - body) as u32, checksum(self.records, &out[body..]));
        out[head..body - CHECKSUM_BYTES].copy_from_slice(&bytes.to_le_bytes());
        out[body - CHECKSUM_BYTES..body].copy_from_slice(&sum.to_le_bytes());
        self.records += 1;
    }
}

fn row<T>(columns: &[Column<T>], row: &T, out: &mut Vec<u8>) {
    columns.iter().for_each(|column| put((column.get)(row), out));
}

fn rows<T>(columns: &[Column<T>], all: impl ExactSizeIterator<Item = T>, out: &mut Vec<u8>) {
    put(all.len() as u64, out);
    all.for_each(|one| row(columns, &one, out));
}

// ---- reading ----

/// What [`Reader::next`] found. A decision goes into the caller's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JournalEntry {
    /// A decision of a serving thread.
    Decision {
        /// The number of the serving thread.
        core: u32,
    },
    /// Decisions of a serving thread are missing here.
    Gap {
        /// The number of the serving thread.
        core: u32,
        /// The number of missing decisions.
        lost: u64,
    },
    /// A booking that the journal records has ended.
    Ended(EndedBooking),
    /// The ends of bookings are missing here.
    EndsLost {
        /// The number of missing ends.
        lost: u64,
    },
    /// The file has no more entries.
    End(Ending),
}

/// How a file ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The writer closed it.
    Closed,
    /// After a whole record: the file is being written, or its writer was killed.
    Open,
    /// In the middle of a record: the writer died while it wrote, or the disk was full.
    Torn {
        /// The record's offset in the file, bytes.
        at: u64,
        /// The bytes that cannot be used.
        bytes: u64,
    },
    /// With a record whose bytes have changed. The bytes after it cannot be trusted either.
    Damaged {
        /// The record's offset in the file, bytes.
        at: u64,
        /// The bytes that cannot be used.
        bytes: u64,
    },
}

/// For each column of a file, our column of the same name; `None` = this release does not know it and skips its values.
type Order<T> = Vec<Option<&'static Column<T>>>;

struct Layout {
    policy: Order<Policy>,
    record: Order<DecisionRecord>,
    request: Order<RequestFacts>,
    worker: Order<WorkerFacts>,
    listed: Order<ListedCandidate>,
    removed: Order<RemovedWorker>,
    ended: Order<EndedBooking>,
    /// For each rule of the file, its index in [`Rule::ALL`].
    rules: Vec<u32>,
}

/// Reads one file. It accepts any bytes without panicking, and believes nothing before its checksum is verified.
pub struct Reader<'a> {
    file: &'a [u8],
    at: usize,
    version: u32,
    origin: Origin,
    layout: Layout,
    unknown: Vec<String>,
    missing: Vec<String>,
    policies: Vec<Option<Policy>>,
    prefixes: PrefixTable,
    records: u64,
    ended: Option<Ending>,
}

impl<'a> Reader<'a> {
    /// Reads the head of `file`.
    ///
    /// # Errors
    /// `Config` if the file is not a journal, has another version, or its head is damaged.
    pub fn open(file: &'a [u8]) -> Result<Self> {
        let (head, version, at) = head(file)?;
        let (mut unknown, mut missing) = (Vec::new(), Vec::new());
        let theirs = &head.columns;
        let mut notes = (&mut unknown, &mut missing);
        let layout = Layout {
            policy: order("policy", Policy::COLUMNS, &theirs.policy, &mut notes),
            record: order("record", columns::RECORD, &theirs.record, &mut notes),
            request: order("asked", RequestFacts::COLUMNS, &theirs.request, &mut notes),
            worker: order("worker", WorkerFacts::COLUMNS, &theirs.worker, &mut notes),
            listed: order("listed", columns::LISTED, &theirs.listed, &mut notes),
            removed: order("removed", columns::REMOVED, &theirs.removed, &mut notes),
            ended: match theirs.ended.is_empty() {
                true => {
                    notes.1.push("ended".to_owned());
                    Order::new()
                }
                false => order("ended", EndedBooking::COLUMNS, &theirs.ended, &mut notes),
            },
            rules: rules(&theirs.rules)?,
        };
        let (origin, policies, prefixes) = (head.origin, Vec::new(), PrefixTable::default());
        Ok(Self { file, at, version, origin, layout, unknown, missing, policies, prefixes, records: 0, ended: None })
    }

    /// The daemon run that wrote the file.
    #[must_use]
    pub const fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Values of the file that this release does not know. They are skipped.
    #[must_use]
    pub fn unknown_values(&self) -> &[String] {
        &self.unknown
    }

    /// Values that the file lacks. They keep their defaults.
    #[must_use]
    pub fn missing_values(&self) -> &[String] {
        &self.missing
    }

    /// Reads the next entry; a decision overwrites `record`. After the end, every call returns the end again.
    pub fn next(&mut self, record: &mut DecisionRecord) -> JournalEntry {
        loop {
            if let Some(ending) = self.ended {
                return JournalEntry::End(ending);
            }
            let begun = self.at;
            let Some(body) = self.body() else { continue };
            match self.read(body, record) {
                Some(Some(JournalEntry::End(ending))) => self.ended = Some(ending),
                Some(Some(entry)) => return entry,
                Some(None) => {}
                None => self.ended = Some(self.damaged(begun)),
            }
        }
    }

    const fn damaged(&self, at: usize) -> Ending {
        Ending::Damaged { at: at as u64, bytes: (self.file.len() - at) as u64 }
    }

    /// The next record's body, with its checksum verified. Otherwise the file has ended.
    fn body(&mut self) -> Option<&'a [u8]> {
        let rest = &self.file[self.at..];
        if rest.is_empty() {
            self.ended = Some(Ending::Open);
            return None;
        }
        let Some((body, sum)) = framed(rest) else {
            self.ended = Some(Ending::Torn { at: self.at as u64, bytes: rest.len() as u64 });
            return None;
        };
        if checksum(self.records, body) != sum {
            // The end of the last record may not have reached the disk.
            let is_last = rest.len() == RECORD_HEAD_BYTES + body.len();
            let (at, bytes) = (self.at as u64, rest.len() as u64);
            self.ended = Some(if is_last { Ending::Torn { at, bytes } } else { Ending::Damaged { at, bytes } });
            return None;
        }
        self.at += RECORD_HEAD_BYTES + body.len();
        self.records += 1;
        Some(body)
    }

    /// Reads a record. `None` if its values are invalid; `Some(None)` if the caller need not know of it.
    fn read(&mut self, body: &[u8], record: &mut DecisionRecord) -> Option<Option<JournalEntry>> {
        let (kind, mut rest) = body.split_first()?;
        let rest = &mut rest;
        let entry = match RecordKind::from_u8(*kind)? {
            RecordKind::Policy => {
                let space = take(rest).filter(|space| *space < SPACES_MAX as u64)? as usize;
                let mut policy = Policy::default();
                fill(&self.layout.policy, &mut policy, rest)?;
                if self.policies.len() <= space {
                    self.policies.resize(space + 1, None);
                }
                self.policies[space] = Some(policy);
                None
            }
            RecordKind::Decision => {
                let core = take(rest)?.try_into().ok()?;
                let space = take(rest)? as usize;
                // A policy precedes the decisions that it made.
                record.policy = (*self.policies.get(space)?)?;
                record.space = SpaceId(space as u32);
                self.layout.decision(record, rest)?;
                if self.version > VERSION_MIN {
                    self.prefixes.take(rest, &mut record.identity.prefix)?;
                }
                Some(JournalEntry::Decision { core })
            }
            RecordKind::Gap => Some(JournalEntry::Gap { core: take(rest)?.try_into().ok()?, lost: take(rest)? }),
            RecordKind::Ended => {
                let mut ended = EndedBooking::default();
                fill(&self.layout.ended, &mut ended, rest)?;
                Some(JournalEntry::Ended(is_valid_end(&ended).then_some(ended)?))
            }
            RecordKind::EndsLost => Some(JournalEntry::EndsLost { lost: take(rest)? }),
            RecordKind::End => {
                let is_whole = take(rest)?.checked_add(1) == Some(self.records) && self.at == self.file.len();
                is_whole.then_some(Some(JournalEntry::End(Ending::Closed)))?
            }
        };
        rest.is_empty().then_some(entry)
    }
}

impl Layout {
    fn decision(&self, record: &mut DecisionRecord, rest: &mut &[u8]) -> Option<()> {
        let workers = std::mem::take(&mut record.observation.workers);
        let (listed, removed) =
            (std::mem::take(&mut record.outcome.listed), std::mem::take(&mut record.outcome.removed));
        let mut prefix = std::mem::take(&mut record.identity.prefix);
        prefix.clear();
        *record = DecisionRecord {
            space: record.space,
            policy: record.policy,
            observation: Observation { workers, ..Observation::default() },
            outcome: Outcome { listed, removed, ..Outcome::default() },
            identity: RequestIdentity { prefix, ..RequestIdentity::default() },
            ..DecisionRecord::default()
        };
        fill(&self.record, record, rest)?;
        fill(&self.request, &mut record.observation.request, rest)?;
        let workers = &mut record.observation.workers;
        workers.clear();
        each(&self.worker, WorkerFacts::default(), |facts| workers.push(&facts), rest)?;
        all(&self.listed, ListedCandidate::default(), &mut record.outcome.listed, rest)?;
        all(&self.removed, RemovedWorker::default(), &mut record.outcome.removed, rest)?;
        for removed in &mut record.outcome.removed {
            removed.rule = *self.rules.get(removed.rule as usize)?;
        }
        let Observation { request, workers, .. } = &record.observation;
        let is_valid_request = request.block_size > 0 && request.prompt_tokens <= PROMPT_TOKENS_MAX as u64;
        (is_valid_request && workers.iter().all(|facts| is_valid(&facts))).then_some(())
    }
}

/// Whether a worker's numbers are within their limits: sums over a fleet then stay exact.
fn is_valid(facts: &WorkerFacts) -> bool {
    let (load, overlap) = (&facts.load, &facts.overlap);
    let loads = [load.prefill_tokens, load.decode_blocks, load.requests];
    let blocks = [overlap.device, overlap.host, overlap.disk, overlap.external, facts.active_depth_blocks];
    loads.iter().all(|number| *number <= JOURNAL_NUMBER_MAX)
        && blocks.iter().all(|number| *number as usize <= PROMPT_TOKENS_MAX)
}

/// Whether the numbers of an ended booking are within their limits.
fn is_valid_end(ended: &EndedBooking) -> bool {
    let tokens = ended.prefill_tokens.checked_add(ended.cached_tokens);
    let has_valid_load = ended.requests <= JOURNAL_NUMBER_MAX && ended.decode_blocks <= JOURNAL_NUMBER_MAX;
    let has_valid_class = (ended.class as usize) < PREFILL_CLASSES_MAX;
    tokens.is_some_and(|tokens| tokens <= PROMPT_TOKENS_MAX as u64) && has_valid_load && has_valid_class
}

/// The body of the first record of `rest`, and the checksum that it should have; `None` if the record is cut off.
fn framed(rest: &[u8]) -> Option<(&[u8], u64)> {
    let (bytes, rest) = rest.split_first_chunk()?;
    let (sum, rest) = rest.split_first_chunk()?;
    Some((rest.get(..u32::from_le_bytes(*bytes) as usize)?, u64::from_le_bytes(*sum)))
}

fn refused(message: impl Into<String>, remedy: &str) -> Error {
    Error::new(Kind::Config, message, remedy)
}

/// The head of a file, its version, and the offset of its first record.
fn head(file: &[u8]) -> Result<(Head, u32, usize)> {
    if !file.starts_with(&MAGIC) {
        return Err(refused("it is not a journal", "name files of the directory that [journal] dir names"));
    }
    let damaged = || refused("its head is cut off or damaged", "leave it out");
    let (preamble, rest) = file.split_first_chunk::<PREAMBLE_BYTES>().ok_or_else(damaged)?;
    let Preamble { version, extra: head_bytes, .. } = Preamble::from_bytes(preamble);
    if !(VERSION_MIN..=VERSION).contains(&version) {
        let message = format!("it has version {version}; this release reads versions {VERSION_MIN} to {VERSION}");
        return Err(refused(message, "read it with the release that wrote it"));
    }
    let (json, rest) = rest.split_at_checked(head_bytes as usize).ok_or_else(damaged)?;
    let sum = rest.first_chunk().ok_or_else(damaged)?;
    if u64::from_le_bytes(*sum) != checksum(u64::from(version), json) {
        return Err(damaged());
    }
    let head = serde_json::from_slice(json).map_err(|error| damaged().caused_by(error))?;
    Ok((head, version, PREAMBLE_BYTES + json.len() + CHECKSUM_BYTES))
}

/// Finds our column for each of theirs. Columns that only one side has are noted.
fn order<T>(
    row: &str,
    ours: &'static [Column<T>],
    theirs: &[String],
    (unknown, missing): &mut (&mut Vec<String>, &mut Vec<String>),
) -> Order<T> {
    let known = |name: &String| ours.iter().find(|column| column.name == name);
    unknown.extend(theirs.iter().filter(|name| known(name).is_none()).map(|name| format!("{row}.{name}")));
    let is_there = |column: &&Column<T>| theirs.iter().any(|name| name == column.name);
    missing.extend(ours.iter().filter(|column| !is_there(column)).map(|column| format!("{row}.{}", column.name)));
    theirs.iter().map(known).collect()
}

fn rules(theirs: &[String]) -> Result<Vec<u32>> {
    let number = |name: &String| {
        let number = Rule::ALL.iter().position(|rule| rule.name() == name);
        let unknown = || {
            let message = format!("it names the rule `{name}`, which this release does not know");
            refused(message, "read it with the release that wrote it")
        };
        number.map(|number| number as u32).ok_or_else(unknown)
    };
    theirs.iter().map(number).collect()
}

fn fill<T>(order: &Order<T>, row: &mut T, rest: &mut &[u8]) -> Option<()> {
    for column in order {
        let word = take(rest)?;
        if let Some(column) = column {
            (column.set)(row, word)?;
        }
    }
    Some(())
}

/// Overwrites `rows` with the rows that follow. A value without a column in the file stays as in `default`.
fn all<T: Copy>(order: &Order<T>, default: T, rows: &mut Vec<T>, rest: &mut &[u8]) -> Option<()> {
    rows.clear();
    each(order, default, |row| rows.push(row), rest)
}

/// As [`all`], with a callback for each row.
fn each<T: Copy>(order: &Order<T>, default: T, mut take_row: impl FnMut(T), rest: &mut &[u8]) -> Option<()> {
    let count = take(rest).filter(|count| *count <= WORKERS_MAX as u64)?;
    for _ in 0..count {
        let mut row = default;
        fill(order, &mut row, rest)?;
        take_row(row);
    }
    Some(())
}

#[cfg(test)]
pub(super) mod tests_of_old_files {
    use super::*;

    /// A file of version 1 with these decisions, each of a serving thread.
    pub(in crate::journal) fn first_version(decisions: &[(u32, DecisionRecord)]) -> Vec<u8> {
        let is_old = |name: &&Column<DecisionRecord>| {
            !["booking", "session_identity", "waited_ns", "expected_output_tokens", "prefix_tokens"]
                .contains(&name.name)
        };
        let columns: Vec<&Column<DecisionRecord>> = columns::RECORD.iter().filter(is_old).collect();
        let mut names = Columns::ours();
        names.record = columns.iter().map(|column| column.name.to_owned()).collect();
        let mut head = serde_json::to_value(Head { columns: names, ..Head::default() }).unwrap();
        head["columns"].as_object_mut().unwrap().remove("ended");
        head["origin"].as_object_mut().unwrap().remove("classes");
        let head = head.to_string().into_bytes();
        let mut file = Preamble { magic: MAGIC, version: 1, extra: head.len() as u32 }.to_bytes().to_vec();
        file.extend_from_slice(&head);
        file.extend_from_slice(&checksum(1, &head).to_le_bytes());
        let mut encoder = Encoder::default();
        for (core, record) in decisions {
            encoder.policy(record.space, &record.policy, &mut file);
            encoder.record(RecordKind::Decision, &mut file, |out| {
                put(u64::from(*core), out);
                put(u64::from(record.space.0), out);
                columns.iter().for_each(|column| put((column.get)(record), out));
                row(RequestFacts::COLUMNS, &record.observation.request, out);
                rows(WorkerFacts::COLUMNS, record.observation.workers.iter(), out);
                rows(columns::LISTED, record.outcome.listed.iter().copied(), out);
                rows(columns::REMOVED, record.outcome.removed.iter().copied(), out);
            });
        }
        file
    }
}
