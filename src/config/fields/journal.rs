//! `[journal]`: the fields about what is kept of decisions.

use std::path::PathBuf;

use super::field;
use crate::config::JournalConfig;
use crate::config::field::{Kind, Preset, Reload, Section};
use crate::limits;

use Kind::{Integer, Number, Text};
use Preset::{Absent, Value};

pub(in crate::config) static JOURNAL: Section<JournalConfig> = Section {
    name: "journal",
    reload: Reload::Never,
    repeated: false,
    doc: "Decisions with all they were made from, for `kvrouted replay`, `what-if` and `tune`. No prompts, no tokens.",
    fields: &[
        field(
            "dir",
            "",
            Absent("/var/lib/kvrouted-journal"),
            Text { bytes_min: 1, bytes_max: 4096, set: |c, text| c.dir = Some(PathBuf::from(text)) },
            "The directory of its files, of mode 0700; it is made if its parent exists. Absent: no journal.",
        ),
        field(
            "sample",
            "",
            Value("1.0"),
            Number { min: 0.0, max: 1.0, set: |c, v| c.sample = v },
            "The share of decisions that are kept, drawn by chance. About 40 bytes a worker and decision.",
        ),
        field(
            "file_bytes_max",
            "bytes",
            Value("67108864"),
            Integer {
                min: limits::JOURNAL_FILE_BYTES_MIN,
                max: limits::JOURNAL_FILE_BYTES_CEILING,
                set: |c, v| {
                    c.file_bytes_max = v;
                },
            },
            "A file that has reached this size is ended, and another is begun.",
        ),
        field(
            "files_max",
            "files",
            Value("16"),
            Integer { min: 1, max: limits::JOURNAL_FILES_CEILING, set: |c, v| c.files_max = v as usize },
            "Files kept, those of runs before included; beyond it the oldest are removed.",
        ),
        field(
            "ring_records_max",
            "decisions",
            Value("1024"),
            Integer { min: 2, max: limits::JOURNAL_RING_RECORDS_CEILING, set: |c, v| c.ring_records_max = v as usize },
            "Decisions of one core that wait to be written. Beyond it they are left out, counted, and the gap is marked.",
        ),
    ],
};
