//! The tables that say how the daemon and a relay run.

use std::path::PathBuf;

use super::{at_start, live};
use crate::config::field::{Kind, Preset, Section};
use crate::config::values;
use crate::config::{
    BookingConfig, DiscoveryConfig, IngestConfig, JournalConfig, LogConfig, LogFormat, PrefillModelName, RelayConfig,
    ShadowConfig, SnapshotConfig,
};
use crate::limits;

use Kind::{Choice, Flag, Integer, List, Number, Parsed, Text};
use Preset::{Absent, Value};

const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

pub(in crate::config) static LOG: Section<LogConfig> = Section {
    name: "log",
    repeated: false,
    doc: "The log, on standard error. The environment variable RUST_LOG wins over `level`.",
    fields: &[
        restart!(
            log.level,
            "",
            Value("info"),
            Choice { names: &LEVELS, set: |c, at| c.level = LEVELS[at] },
            "The least severe level written. debug and trace cost time on every event.",
        ),
        restart!(
            log.format,
            "",
            Value("text"),
            Choice { names: &["text", "json"], set: |c, at| c.format = [LogFormat::Text, LogFormat::Json][at] },
            "text for people, json for one object a line.",
        ),
    ],
};

pub(in crate::config) static INGEST: Section<IngestConfig> = Section {
    name: "ingest",
    repeated: false,
    doc: "How the engines' events are taken in.",
    fields: &[
        restart!(
            ingest.shards,
            "threads",
            Value("1"),
            Integer { min: 1, max: limits::SHARDS_MAX as u64, set: |c, v| c.shards = v as u16 },
            "Ingest threads, each with its share of the workers. More take more events; every query visits all.",
        ),
        restart!(
            ingest.down_after_ms,
            "milliseconds",
            Value("5000"),
            Integer { min: 0, max: limits::EVENTS_MS_CEILING, set: |c, v| c.down_after_ms = v },
            "A worker whose publisher is gone, or was never reached, this long is `down` until it connects. 0: never.",
        ),
        restart!(
            ingest.silence_ms_max,
            "milliseconds",
            Value("0"),
            Integer { min: 0, max: limits::EVENTS_MS_CEILING, set: |c, v| c.silence_ms_max = v },
            "A worker that sends nothing for longer is `unproven`. Idle engines are silent too. 0: never.",
        ),
        restart!(
            ingest.probe_after_ms,
            "milliseconds",
            Value("5000"),
            Integer { min: 0, max: limits::EVENTS_MS_CEILING, set: |c, v| c.probe_after_ms = v },
            "A worker with a replay endpoint that is quiet this long is asked whether its last events were lost. 0: never.",
        ),
        restart!(
            ingest.receive_messages_max,
            "messages",
            Value("100000"),
            Integer { min: 1, max: i32::MAX as u64, set: |c, v| c.receive_messages_max = v as i32 },
            "Messages received from one publisher and not yet applied, at most 16. The others wait in the kernel and in the engine, whose `hwm` decides when it drops them, which is a gap.",
        ),
    ],
};

pub(in crate::config) static BOOKING: Section<BookingConfig> = Section {
    name: "booking",
    repeated: false,
    doc: "How long the daemon counts a request that its gateway has booked.",
    fields: &[
        restart!(
            booking.age_s_max,
            "seconds",
            Value("300"),
            Integer { min: 1, max: limits::BOOKING_S_CEILING, set: |c, v| c.age_s_max = v },
            "A booking that nobody frees is dropped at this age. Below the longest request, load is under-counted.",
        ),
        restart!(
            booking.session_grace_s,
            "seconds",
            Value("10"),
            Integer { min: 0, max: limits::BOOKING_S_CEILING, set: |c, v| c.session_grace_s = v },
            "A gateway's bookings outlive its last connection by this, so that it may reconnect.",
        ),
        restart!(
            booking.track_output_blocks,
            "",
            Value("false"),
            Flag { set: |c, v| c.track_output_blocks = v },
            "Count the output that gateways report as decode blocks, which weigh less towards the end that was expected.",
        ),
        restart!(
            booking.back_off_ms,
            "milliseconds",
            Value("500"),
            Integer { min: 0, max: limits::REPORT_MS_CEILING, set: |c, v| c.back_off_ms = v },
            "A worker that a gateway reports to have failed a request gets none for this long while others can. 0: never.",
        ),
        restart!(
            booking.back_off_ms_max,
            "milliseconds",
            Value("30000"),
            Integer { min: 0, max: limits::REPORT_MS_CEILING, set: |c, v| c.back_off_ms_max = v },
            "Each failure after that doubles the time up to this; this long without one takes a doubling back.",
        ),
        restart!(
            booking.reported_load_ms_max,
            "milliseconds",
            Value("5000"),
            Integer { min: 0, max: limits::REPORT_MS_CEILING, set: |c, v| c.reported_load_ms_max = v },
            "A load that was reported of a worker is forgotten at this age.",
        ),
        restart!(
            booking.prefill_model,
            "",
            Value("off"),
            Choice {
                names: &["off", "fixed", "learnt"],
                set: |c, at| {
                    c.prefill_model = [PrefillModelName::Off, PrefillModelName::Fixed, PrefillModelName::Learnt][at];
                },
            },
            "Whether a worker's prefill backlog falls with time: by the figures below, or by its own last prefills. off: only by reports.",
        ),
        restart!(
            booking.prefill_base_us,
            "microseconds",
            Value("5000"),
            Integer { min: 0, max: limits::PREFILL_NS_CEILING / 1000, set: |c, v| c.prefill_base_us = v },
            "What every prefill takes, with the fixed model.",
        ),
        restart!(
            booking.prefill_token_ns,
            "nanoseconds",
            Value("50000"),
            Integer { min: 0, max: limits::PREFILL_NS_CEILING, set: |c, v| c.prefill_token_ns = v },
            "What a token that is not cached adds, with the fixed model. Too low: busy workers look idle. Measure it.",
        ),
        restart!(
            booking.prefill_cached_token_ns,
            "nanoseconds",
            Value("0"),
            Integer { min: 0, max: limits::PREFILL_NS_CEILING, set: |c, v| c.prefill_cached_token_ns = v },
            "What a cached token adds, with the fixed model.",
        ),
    ],
};

pub(in crate::config) static SNAPSHOT: Section<SnapshotConfig> = Section {
    name: "snapshot",
    repeated: false,
    doc: "What a restart need not forget: each worker's blocks in a file. Only workers with a replay endpoint use them.",
    fields: &[
        restart!(
            snapshot.dir,
            "",
            Absent("/var/lib/kvrouted"),
            Kind::Text { bytes_min: 1, bytes_max: 4096, set: |c, text| c.dir = Some(PathBuf::from(text)) },
            "The directory, of mode 0700 and this daemon's alone; it is made if its parent exists. Absent: no snapshots.",
        ),
        restart!(
            snapshot.every_s,
            "seconds",
            Value("60"),
            Integer { min: 1, max: limits::SNAPSHOT_S_CEILING, set: |c, v| c.every_s = v },
            "Time from one round of snapshots to the next; one more is taken at a stop. Only what has changed is written.",
        ),
        restart!(
            snapshot.keep_s,
            "seconds",
            Value("86400"),
            Integer { min: 0, max: limits::SNAPSHOT_S_CEILING, set: |c, v| c.keep_s = v },
            "The snapshot of a worker that is no longer there is removed at this age.",
        ),
    ],
};

pub(in crate::config) static JOURNAL: Section<JournalConfig> = Section {
    name: "journal",
    repeated: false,
    doc: "Decisions with all they were made from, for `kvrouted replay`, `what-if` and `tune`. No prompts, no tokens.",
    fields: &[
        restart!(
            journal.dir,
            "",
            Absent("/var/lib/kvrouted-journal"),
            Text { bytes_min: 1, bytes_max: 4096, set: |c, text| c.dir = Some(PathBuf::from(text)) },
            "The directory of its files, of mode 0700; it is made if its parent exists. Absent: no journal.",
        ),
        restart!(
            journal.sample,
            "",
            Value("1.0"),
            Number { min: 0.0, max: 1.0, set: |c, v| c.sample = v },
            "The share of decisions that are kept, drawn by chance. About 45 bytes a worker and decision.",
        ),
        restart!(
            journal.file_bytes_max,
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
        restart!(
            journal.files_max,
            "files",
            Value("16"),
            Integer { min: 1, max: limits::JOURNAL_FILES_CEILING, set: |c, v| c.files_max = v as usize },
            "Files kept, those of runs before included; beyond it the oldest are removed.",
        ),
        restart!(
            journal.ring_records_max,
            "decisions",
            Value("1024"),
            Integer { min: 2, max: limits::JOURNAL_RING_RECORDS_CEILING, set: |c, v| c.ring_records_max = v as usize },
            "Decisions of one core that wait to be written. Beyond it they are left out, counted, and the gap is marked.",
        ),
    ],
};

pub(in crate::config) static SHADOW: Section<ShadowConfig> = Section {
    name: "shadow",
    repeated: false,
    doc: "A second policy that judges decisions after they were made and decides nothing. `kvrouted tune` sets it, too.",
    fields: &[
        live(
            "share",
            "",
            Value("0.0"),
            Number { min: 0.0, max: 1.0, set: |c, v| c.share = v },
            "The share of decisions that it judges, drawn by chance. 0: none.",
        ),
        live(
            "policy",
            "",
            Absent("device_credit=0.5+mode=kv"),
            List { items_max: limits::POLICY_SETTINGS_MAX, bytes_max: 128, set: |c, v| c.policy = v },
            "What differs from each space's policy, `field=value` each. Absent: it is the policy, and never disagrees.",
        ),
    ],
};

pub(in crate::config) static DISCOVERY: Section<DiscoveryConfig> = Section {
    name: "discovery",
    repeated: false,
    doc: "Workers that files name while the daemon runs, beside those of this file and of `kvrouted worker`.",
    fields: &[
        restart!(
            discovery.path,
            "",
            Absent("/etc/kvrouted/workers"),
            Text { bytes_min: 1, bytes_max: 4096, set: |c, v| c.path = Some(v.into()) },
            "A file of workers, or a folder of such files: .toml with [[worker]], or .json. Replace them by renaming.",
        ),
        live(
            "grace_ms",
            "milliseconds",
            Value("5000"),
            Integer { min: 0, max: limits::DISCOVERY_MS_CEILING, set: |c, v| c.grace_ms = v },
            "The workers of a file that has gone stay this long, so that one that is written anew harms nobody.",
        ),
        restart!(
            discovery.rescan_ms,
            "milliseconds",
            Value("10000"),
            Integer { min: 50, max: limits::DISCOVERY_MS_CEILING, set: |c, v| c.rescan_ms = v },
            "The files are looked at this often even if nothing tells of a change, as network file systems may not.",
        ),
    ],
};

pub(in crate::config) static RELAY: Section<RelayConfig> = Section {
    name: "relay",
    repeated: false,
    doc: "`kvrouted relay` only: what is said once more of the file's one worker. Routers name these endpoints.",
    fields: &[
        at_start(
            "endpoint",
            "",
            Value("tcp://*:5567"),
            Parsed {
                what: "a string: tcp://*:port, tcp://address:port or ipc://path",
                set: |c, text| {
                    values::check_bound(text)?;
                    text.clone_into(&mut c.endpoint);
                    Ok(())
                },
            },
            "Where the relay publishes. Port 0: a free one, which the log names.",
        ),
        at_start(
            "replay",
            "",
            Value("tcp://*:5667"),
            Parsed {
                what: "a string: tcp://*:port, tcp://address:port or ipc://path",
                set: |c, text| {
                    values::check_bound(text)?;
                    text.clone_into(&mut c.replay);
                    Ok(())
                },
            },
            "Where it replays lost batches and sends snapshots.",
        ),
        at_start(
            "heartbeat_ms",
            "milliseconds",
            Value("1000"),
            Integer { min: 200, max: limits::RELAY_SILENT_MS_MAX / 2, set: |c, v| c.heartbeat_ms = v },
            "How long it may say nothing. A router that hears nothing for 5 s believes the worker no more.",
        ),
        at_start(
            "buffer_batches_max",
            "batches",
            Value("16384"),
            Integer { min: 1, max: 1 << 32, set: |c, v| c.buffer_batches_max = v as usize },
            "Batches kept for replays. Who asks for an older one gets a snapshot.",
        ),
        at_start(
            "buffer_bytes_max",
            "bytes",
            Value("268435456"),
            Integer { min: 1, max: 1 << 40, set: |c, v| c.buffer_bytes_max = v as usize },
            "Bytes of those batches.",
        ),
    ],
};
