//! `[journal]` and `[shadow]`: the fields about what is kept of decisions, and what judges them once more.

use std::path::PathBuf;

use super::field;
use crate::config::field::{Kind, Preset, Reload, Section};
use crate::config::{JournalConfig, ShadowConfig};
use crate::limits;

use Kind::{Integer, List, Number, Text};
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
            "The share of decisions that are kept, drawn by chance. About 45 bytes a worker and decision.",
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

pub(in crate::config) static SHADOW: Section<ShadowConfig> = Section {
    name: "shadow",
    reload: Reload::Always,
    repeated: false,
    doc: "A second policy that judges decisions after they were made and decides nothing. `kvrouted tune` sets it, too.",
    fields: &[
        field(
            "share",
            "",
            Value("0.0"),
            Number { min: 0.0, max: 1.0, set: |c, v| c.share = v },
            "The share of decisions that it judges, drawn by chance. 0: none.",
        ),
        field(
            "policy",
            "",
            Absent("device_credit=0.5+mode=kv"),
            List { items_max: limits::POLICY_SETTINGS_MAX, bytes_max: 128, set: |c, v| c.policy = v },
            "What differs from each space's policy, `field=value` each. Absent: it is the policy, and never disagrees.",
        ),
    ],
};
