//! Records into bytes.

use super::columns::{self, Column};
use super::format::{CHECKSUM_BYTES, Columns, Head, MAGIC, Origin, RECORD_HEAD_BYTES, RecordKind, VERSION, checksum};
use super::record::Record;
use super::word::put;
use crate::ids::SpaceId;
use crate::route::Policy;

/// Appends the records of one file. What it appends depends on nothing but what it was given.
#[derive(Debug, Default)]
pub struct Encoder {
    /// The policy that was written last, by space.
    policies: Vec<Option<Policy>>,
    /// Records so far.
    records: u64,
}

impl Encoder {
    /// Begins a file with who writes it.
    #[must_use]
    pub fn begin(origin: &Origin, out: &mut Vec<u8>) -> Self {
        let head = Head { origin: origin.clone(), columns: Columns::ours() };
        let head = serde_json::to_vec(&head).unwrap_or_default();
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&(head.len() as u32).to_le_bytes());
        out.extend_from_slice(&head);
        out.extend_from_slice(&checksum(u64::from(VERSION), &head).to_le_bytes());
        Self::default()
    }

    /// Appends a decision, and its policy before it where that is another than before.
    pub fn decision(&mut self, core: u32, record: &Record, out: &mut Vec<u8>) {
        let space = record.space.0 as usize;
        if self.policies.len() <= space {
            self.policies.resize(space + 1, None);
        }
        if self.policies[space] != Some(record.policy) {
            self.policies[space] = Some(record.policy);
            self.policy(record.space, &record.policy, out);
        }
        self.record(RecordKind::Decision, out, |out| {
            put(u64::from(core), out);
            put(u64::from(record.space.0), out);
            row(columns::RECORD, record, out);
            row(columns::REQUEST, &record.observation.request, out);
            rows(columns::WORKER, record.observation.workers.iter(), out);
            rows(columns::LISTED, record.outcome.listed.iter().copied(), out);
            rows(columns::REMOVED, record.outcome.removed.iter().copied(), out);
        });
    }

    fn policy(&mut self, space: SpaceId, policy: &Policy, out: &mut Vec<u8>) {
        self.record(RecordKind::Policy, out, |out| {
            put(u64::from(space.0), out);
            row(columns::POLICY, policy, out);
        });
    }

    /// Appends that so many decisions of a core are missing here.
    pub fn gap(&mut self, core: u32, lost: u64, out: &mut Vec<u8>) {
        self.record(RecordKind::Gap, out, |out| {
            put(u64::from(core), out);
            put(lost, out);
        });
    }

    /// Appends the end.
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
