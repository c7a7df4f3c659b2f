//! Journal files: a file that was read is written the same. Checksums are also corrected, to reach the code behind
//! them.

use kvrouted::journal::{DecisionRecord, Encoder, Ending, JournalEntry, Reader, ReplayJudge};
use kvrouted::route::Policy;
use kvrouted::shadow::PolicyComparison;
use xxhash_rust::xxh3::xxh3_64_with_seed;

const PREAMBLE_BYTES: usize = 16;
const CHECKSUM_BYTES: usize = 8;
const RECORD_HEAD_BYTES: usize = 4 + CHECKSUM_BYTES;

/// A file as it is, and with its checksums put right.
pub(crate) fn journal(data: &[u8]) {
    read(data);
    let mut repaired = data.to_vec();
    repair(&mut repaired);
    read(&repaired);
}

fn read(data: &[u8]) {
    let Ok(mut reader) = Reader::open(data) else { return };
    let (mut record, mut again, mut comparison) =
        (DecisionRecord::default(), ReplayJudge::default(), PolicyComparison::default());
    let mut bytes = Vec::new();
    let mut encoder = Encoder::begin(reader.origin(), &mut bytes);
    let mut said = Vec::new();
    loop {
        match reader.next(&mut record) {
            JournalEntry::Decision { core } => {
                again.judge(&record);
                let chosen = record.outcome.chosen();
                comparison.compare(&Policy::default(), &mut record.observation, record.outcome.seed, chosen);
                encoder.decision(core, &record, &mut bytes);
                said.push((core, format!("{record:?}")));
            }
            JournalEntry::Gap { core, lost } => encoder.gap(core, lost, &mut bytes),
            JournalEntry::Ended(ended) => encoder.ended(&ended, &mut bytes),
            JournalEntry::EndsLost { lost } => encoder.ends_lost(lost, &mut bytes),
            JournalEntry::End(Ending::Torn { at, bytes } | Ending::Damaged { at, bytes }) => {
                assert_eq!((at + bytes) as usize, data.len(), "all that is not used is told");
                break;
            }
            JournalEntry::End(Ending::Closed | Ending::Open) => break,
        }
    }
    encoder.end(&mut bytes);
    let mut reader = Reader::open(&bytes).expect("what is written can be read");
    for (core, said) in said {
        let entry = loop {
            match reader.next(&mut record) {
                JournalEntry::Gap { .. } | JournalEntry::Ended(_) | JournalEntry::EndsLost { .. } => {}
                entry => break entry,
            }
        };
        assert_eq!((entry, format!("{record:?}")), (JournalEntry::Decision { core }, said));
    }
}

/// The checksums of the head and of every record that lies there whole.
fn repair(file: &mut [u8]) {
    let number = |file: &[u8], at: usize| Some(u32::from_le_bytes(*file.get(at..)?.first_chunk::<4>()?) as usize);
    let (Some(version), Some(head_bytes)) = (number(file, 8), number(file, 12)) else { return };
    let Some(mut at) = PREAMBLE_BYTES.checked_add(head_bytes) else { return };
    if at + CHECKSUM_BYTES > file.len() {
        return;
    }
    let sum = xxh3_64_with_seed(&file[PREAMBLE_BYTES..at], version as u64);
    file[at..at + CHECKSUM_BYTES].copy_from_slice(&sum.to_le_bytes());
    at += CHECKSUM_BYTES;
    for place in 0.. {
        let Some(body_bytes) = number(file, at) else { return };
        let body = at + RECORD_HEAD_BYTES..(at + RECORD_HEAD_BYTES).saturating_add(body_bytes);
        if body.end > file.len() {
            return;
        }
        let sum = xxh3_64_with_seed(&file[body.clone()], place);
        file[at + 4..at + RECORD_HEAD_BYTES].copy_from_slice(&sum.to_le_bytes());
        at = body.end;
    }
}
