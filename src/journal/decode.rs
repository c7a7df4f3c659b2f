//! Bytes into records. Any bytes are read or refused, and nothing is taken for true that a checksum does not vouch for.

use super::columns::{self, Column};
use super::format::{
    CHECKSUM_BYTES, Head, MAGIC, Origin, PREAMBLE_BYTES, RECORD_HEAD_BYTES, RecordKind, VERSION, checksum,
};
use super::record::{Listed, Outcome, Record, Removed};
use super::word::take;
use crate::error::{Error, Kind, Result};
use crate::ids::SpaceId;
use crate::limits::{JOURNAL_NUMBER_MAX, PROMPT_TOKENS_MAX, SPACES_MAX, WORKERS_MAX};
use crate::route::{Observation, Policy, RequestFacts, Rule, WorkerFacts};

/// What a record says; a decision goes into the caller's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// A decision of this core.
    Decision {
        /// Counts the serving cores.
        core: u32,
    },
    /// Decisions of a core are missing here.
    Gap {
        /// Counts the serving cores.
        core: u32,
        /// How many.
        lost: u64,
    },
    /// No more follows.
    End(Ending),
}

/// How a file ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// As its writer meant it to.
    Closed,
    /// After a whole record: it is being written, or its writer was killed.
    Open,
    /// In the midst of a record: its writer died over it, or the disk was full.
    Torn {
        /// Where the record begins, bytes from the start.
        at: u64,
        /// Bytes that cannot be used.
        bytes: u64,
    },
    /// With a record that is not what was written; what follows it cannot be trusted.
    Damaged {
        /// Where the record begins, bytes from the start.
        at: u64,
        /// Bytes that cannot be used.
        bytes: u64,
    },
}

/// The columns of a file in terms of ours: `None` = a value that is not known here, and passed over.
type Order<T> = Vec<Option<&'static Column<T>>>;

struct Layout {
    policy: Order<Policy>,
    record: Order<Record>,
    request: Order<RequestFacts>,
    worker: Order<WorkerFacts>,
    listed: Order<Listed>,
    removed: Order<Removed>,
    /// Places in [`Rule::ALL`].
    rules: Vec<u32>,
}

/// Reads one file.
pub struct Reader<'a> {
    file: &'a [u8],
    at: usize,
    origin: Origin,
    layout: Layout,
    strange: Vec<String>,
    missing: Vec<String>,
    policies: Vec<Option<Policy>>,
    records: u64,
    ended: Option<Ending>,
}

impl<'a> Reader<'a> {
    /// Reads the head of `file`.
    ///
    /// # Errors
    /// `Config` if it is no journal, or one of another version, or its head is damaged.
    pub fn open(file: &'a [u8]) -> Result<Self> {
        let head = head(file)?;
        let (mut strange, mut missing) = (Vec::new(), Vec::new());
        let theirs = &head.columns;
        let mut notes = (&mut strange, &mut missing);
        let layout = Layout {
            policy: order("policy", columns::POLICY, &theirs.policy, &mut notes),
            record: order("record", columns::RECORD, &theirs.record, &mut notes),
            request: order("asked", columns::REQUEST, &theirs.request, &mut notes),
            worker: order("worker", columns::WORKER, &theirs.worker, &mut notes),
            listed: order("listed", columns::LISTED, &theirs.listed, &mut notes),
            removed: order("removed", columns::REMOVED, &theirs.removed, &mut notes),
            rules: rules(&theirs.rules)?,
        };
        let at = PREAMBLE_BYTES + head_bytes(file) + CHECKSUM_BYTES;
        let (origin, policies) = (head.origin, Vec::new());
        Ok(Self { file, at, origin, layout, strange, missing, policies, records: 0, ended: None })
    }

    /// Who wrote it.
    #[must_use]
    pub const fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Values that the file has and this release does not know: they are passed over.
    #[must_use]
    pub fn strange_values(&self) -> &[String] {
        &self.strange
    }

    /// Values that the file does not have: they are what they are where nobody sets them.
    #[must_use]
    pub fn missing_values(&self) -> &[String] {
        &self.missing
    }

    /// Reads what comes next; a decision is put into `record`. After the end it is the end again.
    pub fn next(&mut self, record: &mut Record) -> Entry {
        loop {
            if let Some(ending) = self.ended {
                return Entry::End(ending);
            }
            let begun = self.at;
            let Some(body) = self.body() else { continue };
            match self.read(body, record) {
                Some(Some(Entry::End(ending))) => self.ended = Some(ending),
                Some(Some(entry)) => return entry,
                Some(None) => {}
                None => self.ended = Some(self.damaged(begun)),
            }
        }
    }

    const fn damaged(&self, at: usize) -> Ending {
        Ending::Damaged { at: at as u64, bytes: (self.file.len() - at) as u64 }
    }

    /// The next record's bytes, if its checksum vouches for them; else the file has ended.
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
            // The last record: what was written of it last need not be on the disk.
            let is_last = rest.len() == RECORD_HEAD_BYTES + body.len();
            let (at, bytes) = (self.at as u64, rest.len() as u64);
            self.ended = Some(if is_last { Ending::Torn { at, bytes } } else { Ending::Damaged { at, bytes } });
            return None;
        }
        self.at += RECORD_HEAD_BYTES + body.len();
        self.records += 1;
        Some(body)
    }

    /// Reads a record; `None` if its values cannot be, `Some(None)` if it is one that nobody needs to know of.
    fn read(&mut self, body: &[u8], record: &mut Record) -> Option<Option<Entry>> {
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
                // A decision comes after its policy.
                record.policy = (*self.policies.get(space)?)?;
                record.space = SpaceId(space as u32);
                self.layout.decision(record, rest)?;
                Some(Entry::Decision { core })
            }
            RecordKind::Gap => Some(Entry::Gap { core: take(rest)?.try_into().ok()?, lost: take(rest)? }),
            RecordKind::End => {
                let is_whole = take(rest)?.checked_add(1) == Some(self.records) && self.at == self.file.len();
                is_whole.then_some(Some(Entry::End(Ending::Closed)))?
            }
        };
        rest.is_empty().then_some(entry)
    }
}

impl Layout {
    fn decision(&self, record: &mut Record, rest: &mut &[u8]) -> Option<()> {
        let workers = std::mem::take(&mut record.observation.workers);
        let (listed, removed) =
            (std::mem::take(&mut record.outcome.listed), std::mem::take(&mut record.outcome.removed));
        *record = Record {
            space: record.space,
            policy: record.policy,
            observation: Observation { workers, ..Observation::default() },
            outcome: Outcome { listed, removed, ..Outcome::default() },
            ..Record::default()
        };
        fill(&self.record, record, rest)?;
        fill(&self.request, &mut record.observation.request, rest)?;
        let workers = &mut record.observation.workers;
        workers.clear();
        each(&self.worker, WorkerFacts::default(), |facts| workers.push(&facts), rest)?;
        all(&self.listed, Listed::default(), &mut record.outcome.listed, rest)?;
        all(&self.removed, Removed::default(), &mut record.outcome.removed, rest)?;
        for removed in &mut record.outcome.removed {
            removed.rule = *self.rules.get(removed.rule as usize)?;
        }
        let Observation { request, workers, .. } = &record.observation;
        let is_asked_soundly = request.block_size > 0 && request.prompt_tokens <= PROMPT_TOKENS_MAX as u64;
        (is_asked_soundly && workers.iter().all(|facts| is_sound(&facts))).then_some(())
    }
}

/// Whether a worker's numbers are such as are counted with: a sum over a fleet stays a number.
fn is_sound(facts: &WorkerFacts) -> bool {
    let (load, overlap) = (&facts.load, &facts.overlap);
    let loads = [load.prefill_tokens, load.decode_blocks, load.requests];
    let blocks = [overlap.device, overlap.host, overlap.disk, overlap.external, facts.active_depth_blocks];
    loads.iter().all(|number| *number <= JOURNAL_NUMBER_MAX)
        && blocks.iter().all(|number| *number as usize <= PROMPT_TOKENS_MAX)
}

/// The body of the record at the front of `rest`, and the checksum it should have; `None` if it is cut off.
fn framed(rest: &[u8]) -> Option<(&[u8], u64)> {
    let (bytes, rest) = rest.split_first_chunk()?;
    let (sum, rest) = rest.split_first_chunk()?;
    Some((rest.get(..u32::from_le_bytes(*bytes) as usize)?, u64::from_le_bytes(*sum)))
}

fn refused(what: impl Into<String>, remedy: &str) -> Error {
    Error::new(Kind::Config, what, remedy)
}

/// Bytes of the JSON at the head; 0 where there is no head.
fn head_bytes(file: &[u8]) -> usize {
    let bytes = file.get(12..PREAMBLE_BYTES).and_then(|bytes| bytes.first_chunk());
    bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes) as usize)
}

fn head(file: &[u8]) -> Result<Head> {
    if file.get(..MAGIC.len()) != Some(&MAGIC) {
        return Err(refused("it is not a journal", "name files that [journal] dir holds"));
    }
    let version = file.get(8..12).and_then(|bytes| bytes.first_chunk()).map_or(0, |bytes| u32::from_le_bytes(*bytes));
    if version != VERSION {
        let what = format!("it is of version {version}, this release reads {VERSION}");
        return Err(refused(what, "read it with the release that wrote it"));
    }
    let damaged = || refused("its head is cut off or damaged", "leave it out");
    let json = file.get(PREAMBLE_BYTES..).and_then(|rest| rest.get(..head_bytes(file))).ok_or_else(damaged)?;
    let sum = file.get(PREAMBLE_BYTES + json.len()..).and_then(|rest| rest.first_chunk()).ok_or_else(damaged)?;
    if u64::from_le_bytes(*sum) != checksum(u64::from(VERSION), json) {
        return Err(damaged());
    }
    serde_json::from_slice(json).map_err(|error| damaged().caused_by(error))
}

/// Which of ours each of their columns is; those that only one side has are noted.
fn order<T>(
    row: &str,
    ours: &'static [Column<T>],
    theirs: &[String],
    (strange, missing): &mut (&mut Vec<String>, &mut Vec<String>),
) -> Order<T> {
    let known = |name: &String| ours.iter().find(|column| column.name == name);
    strange.extend(theirs.iter().filter(|name| known(name).is_none()).map(|name| format!("{row}.{name}")));
    let is_there = |column: &&Column<T>| theirs.iter().any(|name| name == column.name);
    missing.extend(ours.iter().filter(|column| !is_there(column)).map(|column| format!("{row}.{}", column.name)));
    theirs.iter().map(known).collect()
}

fn rules(theirs: &[String]) -> Result<Vec<u32>> {
    let place = |name: &String| {
        let place = Rule::ALL.iter().position(|rule| rule.name() == name);
        let unknown =
            || refused(format!("it speaks of a rule `{name}` that is not known here"), "use the release that wrote it");
        place.map(|place| place as u32).ok_or_else(unknown)
    };
    theirs.iter().map(place).collect()
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

/// Overwrites `rows` with the rows that follow; a row has the values of `unsaid` where the file has no column.
fn all<T: Copy>(order: &Order<T>, unsaid: T, rows: &mut Vec<T>, rest: &mut &[u8]) -> Option<()> {
    rows.clear();
    each(order, unsaid, |row| rows.push(row), rest)
}

/// As [`all`], one row after the other.
fn each<T: Copy>(order: &Order<T>, unsaid: T, mut take_row: impl FnMut(T), rest: &mut &[u8]) -> Option<()> {
    let count = take(rest).filter(|count| *count <= WORKERS_MAX as u64)?;
    for _ in 0..count {
        let mut row = unsaid;
        fill(order, &mut row, rest)?;
        take_row(row);
    }
    Some(())
}
