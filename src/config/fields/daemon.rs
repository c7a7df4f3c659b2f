//! The tables about running the daemon and a relay: log, sandbox, events, bookings, snapshots, journal, shadow policy,
//! traces, files of workers.

use std::path::PathBuf;

use super::{at_start, live};
use crate::config::field::{Kind, Preset, Section};
use crate::config::values;
use crate::config::{
    BookingConfig, DiscoveryConfig, IngestConfig, JournalConfig, LogConfig, LogFormat, PrefillModelName, ProcessConfig,
    RelayConfig, SandboxConfig, ShadowConfig, SnapshotConfig, TracesConfig,
};
use crate::limits;
use crate::sandbox::Mode;

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
            "The least severe level that is logged. debug and trace slow down every event. Audit lines are logged at every level but off.",
        ),
        restart!(
            log.format,
            "",
            Value("text"),
            Choice { names: &["text", "json"], set: |c, at| c.format = [LogFormat::Text, LogFormat::Json][at] },
            "text for people; json for one object in each line.",
        ),
    ],
};

pub(in crate::config) static PROCESS: Section<ProcessConfig> = Section {
    name: "process",
    repeated: false,
    doc: "Limits of the daemon's process as a whole.",
    fields: &[
        restart!(
            process.memory_bytes_max,
            "bytes",
            Value("0"),
            Integer { min: 0, max: limits::MEMORY_BYTES_CEILING, set: |c, v| c.memory_bytes_max = v },
            "Memory budget of the process, divided among its parts. While it is nearly used, the daemon refuses new connections, dumps,\n\
             predictions and new blocks of the largest workers. A budget below the fixed parts is refused. 0: three quarters of what the\n\
             cgroup or the machine allows.",
        ),
        restart!(
            process.stalled_ms_max,
            "milliseconds",
            Value("1000"),
            Integer { min: 100, max: limits::STALLED_MS_CEILING, set: |c, v| c.stalled_ms_max = v },
            "A thread that stays in one round of its loop for this long, and does not wait, counts as stalled: a finding says so, and the\n\
             daemon is not ready meanwhile. Too low: a busy machine raises false findings.",
        ),
    ],
};

pub(in crate::config) static SANDBOX: Section<SandboxConfig> = Section {
    name: "sandbox",
    repeated: false,
    doc: "What the daemon or relay gives up once it has started: privileges, files and system calls that it does not need.",
    fields: &[restart!(
        sandbox.mode,
        "",
        Value("off"),
        Choice { names: &Mode::NAMES, set: |c, at| c.mode = Mode::ALL[at] },
        "off: nothing. on: what the kernel can take; the log names what it cannot. required: no start without all of it. report: nothing,\n\
         but the kernel's audit log names the system calls that `on` would refuse.",
    )],
};

pub(in crate::config) static INGEST: Section<IngestConfig> = Section {
    name: "ingest",
    repeated: false,
    doc: "How the daemon receives the engines' events.",
    fields: &[
        restart!(
            ingest.shards,
            "threads",
            Value("1"),
            Integer { min: 1, max: limits::SHARDS_MAX as u64, set: |c, v| c.shards = v as u16 },
            "Ingest threads, each with a part of the workers. More threads take more events, but every lookup visits all shards.",
        ),
        restart!(
            ingest.down_after_ms,
            "milliseconds",
            Value("5000"),
            Integer { min: 0, max: limits::EVENTS_MS_CEILING, set: |c, v| c.down_after_ms = v },
            "A worker is `down` once its publisher has been disconnected, or never reached, for this long, until it connects. 0: never.",
        ),
        restart!(
            ingest.silence_ms_max,
            "milliseconds",
            Value("0"),
            Integer { min: 0, max: limits::EVENTS_MS_CEILING, set: |c, v| c.silence_ms_max = v },
            "A worker that sends nothing for longer is `unproven`. Idle engines send nothing either. 0: never.",
        ),
        restart!(
            ingest.probe_after_ms,
            "milliseconds",
            Value("5000"),
            Integer { min: 0, max: limits::EVENTS_MS_CEILING, set: |c, v| c.probe_after_ms = v },
            "After this long without a batch, the daemon asks a worker with a replay endpoint whether its last events were lost. 0: never.",
        ),
        restart!(
            ingest.receive_messages_max,
            "messages",
            Value("100000"),
            Integer { min: 1, max: i32::MAX as u64, set: |c, v| c.receive_messages_max = v as i32 },
            "Messages received from one publisher and not yet applied; never more than 16. Further messages wait in the kernel and in the\n\
             engine. The engine's `hwm` decides when it drops messages, which causes a gap.",
        ),
        restart!(
            ingest.nats_prefix,
            "",
            Value("kvrouted"),
            Parsed {
                what: "a string: words of letters, digits, - and _, with dots between them",
                set: |c, text| {
                    values::check_subject_prefix(text)?;
                    text.clone_into(&mut c.nats_prefix);
                    Ok(())
                },
            },
            "What the NATS subjects of events begin with, the same at relays and routers. Another fleet needs another one. This and\n\
             the next four fields hold for workers whose endpoint is a NATS server, and for a relay with nats.",
        ),
        nats_login!(user of ingest),
        nats_login!(secret_file of ingest),
        nats_login!(credentials_file of ingest),
        nats_login!(ca_file of ingest),
    ],
};

pub(in crate::config) static BOOKING: Section<BookingConfig> = Section {
    name: "booking",
    repeated: false,
    doc: "How long a booked request counts as load of its worker.",
    fields: &[
        restart!(
            booking.age_s_max,
            "seconds",
            Value("300"),
            Integer { min: 1, max: limits::BOOKING_S_CEILING, set: |c, v| c.age_s_max = v },
            "A booking that its gateway does not free is dropped at this age. If requests take longer, their load is under-counted.",
        ),
        restart!(
            booking.session_grace_s,
            "seconds",
            Value("10"),
            Integer { min: 0, max: limits::BOOKING_S_CEILING, set: |c, v| c.session_grace_s = v },
            "How long a gateway's bookings outlive its last connection, so that it can reconnect.",
        ),
        restart!(
            booking.track_output_blocks,
            "",
            Value("false"),
            Flag { set: |c, v| c.track_output_blocks = v },
            "Count generated output, as gateways report it, as decode blocks. They weigh less as the expected end comes near.",
        ),
        restart!(
            booking.back_off_ms,
            "milliseconds",
            Value("500"),
            Integer { min: 0, max: limits::REPORT_MS_CEILING, set: |c, v| c.back_off_ms = v },
            "After a gateway reports that a worker failed a request, the worker gets no requests for this long while others can take\n\
             them. 0: never.",
        ),
        restart!(
            booking.back_off_ms_max,
            "milliseconds",
            Value("30000"),
            Integer { min: 0, max: limits::REPORT_MS_CEILING, set: |c, v| c.back_off_ms_max = v },
            "Each further failure doubles that time, up to this. Each such period without a failure takes back one doubling.",
        ),
        restart!(
            booking.reported_load_ms_max,
            "milliseconds",
            Value("5000"),
            Integer { min: 0, max: limits::REPORT_MS_CEILING, set: |c, v| c.reported_load_ms_max = v },
            "A reported load of a worker is ignored once it is this old.",
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
            "Mode kv, queues and thresholds: whether a worker's prefill backlog, in tokens, shrinks with time. fixed: by the figures\n\
             below; learnt: by what mode latency learns of the worker; off: only by reports.",
        ),
        restart!(
            booking.prefill_base_us,
            "microseconds",
            Value("5000"),
            Integer { min: 0, max: limits::PREFILL_NS_CEILING / 1000, set: |c, v| c.prefill_base_us = v },
            "The fixed model's time for each prefill, besides its tokens.",
        ),
        restart!(
            booking.prefill_token_ns,
            "nanoseconds",
            Value("50000"),
            Integer { min: 0, max: limits::PREFILL_NS_CEILING, set: |c, v| c.prefill_token_ns = v },
            "The fixed model's time for each token that is not cached. If it is too low, busy workers look idle. Measure it.",
        ),
        restart!(
            booking.prefill_cached_token_ns,
            "nanoseconds",
            Value("0"),
            Integer { min: 0, max: limits::PREFILL_NS_CEILING, set: |c, v| c.prefill_cached_token_ns = v },
            "The fixed model's time for each cached token.",
        ),
    ],
};

pub(in crate::config) static SNAPSHOT: Section<SnapshotConfig> = Section {
    name: "snapshot",
    repeated: false,
    doc: "Bookings, learnt prefill times, and the blocks of workers with a replay endpoint, in files, so that a restart does not\n\
          lose them.",
    fields: &[
        restart!(
            snapshot.dir,
            "",
            Absent("/var/lib/kvrouted"),
            Kind::Text { bytes_min: 1, bytes_max: 4096, set: |c, text| c.dir = Some(PathBuf::from(text)) },
            "The folder for snapshots, with mode 0700 and for this daemon alone. Created if its parent exists. Absent: no snapshots.",
        ),
        restart!(
            snapshot.every_s,
            "seconds",
            Value("60"),
            Integer { min: 1, max: limits::SNAPSHOT_S_CEILING, set: |c, v| c.every_s = v },
            "The time between two rounds of snapshots. A stopping daemon takes one more. Only changes are written.",
        ),
        restart!(
            snapshot.keep_s,
            "seconds",
            Value("86400"),
            Integer { min: 0, max: limits::SNAPSHOT_S_CEILING, set: |c, v| c.keep_s = v },
            "The snapshot of a worker that no longer exists, and what was learnt of it, is removed at this age.",
        ),
        restart!(
            snapshot.bookings_image_ms,
            "milliseconds",
            Value("1000"),
            Integer { min: 0, max: limits::BOOKINGS_IMAGE_MS_CEILING, set: |c, v| c.bookings_image_ms = v },
            "How often the daemon writes down bookings, sessions and affinity bindings while they change, so that a crash costs only\n\
             what came after. They go to the service manager's descriptor store if it has one (FileDescriptorStoreMax=2), else to\n\
             `dir`, which gets one every 10 s at most beside the store. 0: only when the daemon stops.",
        ),
    ],
};

pub(in crate::config) static JOURNAL: Section<JournalConfig> = Section {
    name: "journal",
    repeated: false,
    doc: "Decisions with everything each was made from, and how their requests went, for `kvrouted replay`, `what-if`, `tune` and\n\
          `simulate`. No prompts, no tokens.",
    fields: &[
        restart!(
            journal.dir,
            "",
            Absent("/var/lib/kvrouted-journal"),
            Text { bytes_min: 1, bytes_max: 4096, set: |c, text| c.dir = Some(PathBuf::from(text)) },
            "The folder for journal files, with mode 0700. Created if its parent exists. Absent: no journal.",
        ),
        restart!(
            journal.sample,
            "",
            Value("1.0"),
            Number { min: 0.0, max: 1.0, set: |c, v| c.sample = v },
            "The share of requests recorded. Requests of one session (`affinity_session`) are recorded together or not at all, as are\n\
             the attempts of one request. A decision takes about 45 bytes for each worker, the end of a request about 45.",
        ),
        restart!(
            journal.prefix_tokens,
            "tokens",
            Value("64"),
            Integer { min: 0, max: limits::JOURNAL_PREFIX_TOKENS_CEILING, set: |c, v| c.prefix_tokens = v as u32 },
            "Prompts that begin with the same tokens get the same hash for each this many of them, rounded up to whole blocks, under a\n\
             key that is in no file. `simulate`, `what-if` and `tune` need the hashes. A prompt takes 30 bytes and 8 for each hash that\n\
             its file does not have yet. 0: no hashes.",
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
            "A file of this size is closed, and a new one begins.",
        ),
        restart!(
            journal.files_max,
            "files",
            Value("16"),
            Integer { min: 1, max: limits::JOURNAL_FILES_CEILING, set: |c, v| c.files_max = v as usize },
            "Files kept, including those of earlier runs. The oldest are removed first.",
        ),
        restart!(
            journal.ring_records_max,
            "decisions",
            Value("1024"),
            Integer { min: 2, max: limits::JOURNAL_RING_RECORDS_CEILING, set: |c, v| c.ring_records_max = v as usize },
            "Decisions of one serving thread that may wait to be written, and a quarter of the ended requests that may. Further ones are\n\
             left out and counted, and the file marks the gap.",
        ),
    ],
};

pub(in crate::config) static SHADOW: Section<ShadowConfig> = Section {
    name: "shadow",
    repeated: false,
    doc: "A second policy that judges decisions after they were made and decides nothing. `kvrouted tune --shadow` also sets it.",
    fields: &[
        live(
            "share",
            "",
            Value("0.0"),
            Number { min: 0.0, max: 1.0, set: |c, v| c.share = v },
            "The share of decisions that the shadow policy judges, drawn at random. 0: none.",
        ),
        live(
            "policy",
            "",
            Absent("device_credit=0.5+mode=kv"),
            List { items_max: limits::POLICY_SETTINGS_MAX, bytes_max: 128, set: |c, v| c.policy = v },
            "How the shadow policy differs from each space's policy, each `field=value`. Absent: it is the same policy and always agrees.",
        ),
    ],
};

pub(in crate::config) static TRACES: Section<TracesConfig> = Section {
    name: "traces",
    repeated: false,
    doc: "Spans of requests for an OpenTelemetry collector: the decision, the wait in the queue, and the booking. No prompts, no\n\
          tokens, no names that gateways give.",
    fields: &[
        restart!(
            traces.endpoint,
            "",
            Absent("http://127.0.0.1:4318/v1/traces"),
            Parsed {
                what: "a string: http://host:port, with a path if it is not /v1/traces",
                set: |c, text| {
                    c.endpoint = Some(values::collector_url(text)?);
                    Ok(())
                },
            },
            "Where a collector takes traces by OTLP/HTTP, as protobuf. Absent: no traces.",
        ),
        restart!(
            traces.sample_ratio,
            "",
            Value("0.01"),
            Number { min: 0.0, max: 1.0, set: |c, v| c.sample_ratio = v },
            "The share of requests without a trace context that are traced. A request with one is traced if its caller records the\n\
             trace, whatever this is.",
        ),
        restart!(
            traces.service_name,
            "",
            Value("kvrouted"),
            Text { bytes_min: 1, bytes_max: limits::NAME_BYTES_MAX, set: |c, v| c.service_name = v.to_owned() },
            "The attribute service.name of all spans.",
        ),
        restart!(
            traces.instance,
            "",
            Absent("router-1"),
            Text { bytes_min: 1, bytes_max: limits::NAME_BYTES_MAX, set: |c, v| c.instance = Some(v.to_owned()) },
            "The attribute service.instance.id. Absent: the number by which gateways know the daemon.",
        ),
        restart!(
            traces.timeout_ms,
            "milliseconds",
            Value("2000"),
            Integer { min: 10, max: limits::TRACE_TIMEOUT_MS_CEILING, set: |c, v| c.timeout_ms = v },
            "The longest time for one request to the collector. No gateway waits for it.",
        ),
        restart!(
            traces.queue_max,
            "decisions",
            Value("2048"),
            Integer { min: 2, max: limits::TRACE_QUEUE_CEILING, set: |c, v| c.queue_max = v as usize },
            "Traced decisions that may wait for their span, as many ends of bookings, and half as many as there may be spans that wait\n\
             for the collector. Further ones are dropped and counted. Each takes 8 KiB of the memory budget.",
        ),
    ],
};

pub(in crate::config) static DISCOVERY: Section<DiscoveryConfig> = Section {
    name: "discovery",
    repeated: false,
    doc: "Workers in files that may change while the daemon runs, besides the workers of this file and of `kvrouted worker`.",
    fields: &[
        restart!(
            discovery.path,
            "",
            Absent("/etc/kvrouted/workers"),
            Text { bytes_min: 1, bytes_max: 4096, set: |c, v| c.path = Some(v.into()) },
            "A file of workers, or a folder of such files: .toml with [[worker]], or .json. Replace a file by renaming a new one over it.",
        ),
        live(
            "grace_ms",
            "milliseconds",
            Value("5000"),
            Integer { min: 0, max: limits::DISCOVERY_MS_CEILING, set: |c, v| c.grace_ms = v },
            "How long the workers of a deleted file stay, so that a file may be deleted and written again.",
        ),
        restart!(
            discovery.rescan_ms,
            "milliseconds",
            Value("10000"),
            Integer { min: 50, max: limits::DISCOVERY_MS_CEILING, set: |c, v| c.rescan_ms = v },
            "How often the daemon checks the files even without a change notification. Network file systems may send none.",
        ),
    ],
};

pub(in crate::config) static RELAY: Section<RelayConfig> = Section {
    name: "relay",
    repeated: false,
    doc: "`kvrouted relay` only: where it publishes the events of the file's one worker again. Routers use these endpoints.",
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
            "Where the relay publishes. Port 0: a free port, which the log names.",
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
            "Where the relay replays lost batches and sends snapshots.",
        ),
        at_start(
            "heartbeat_ms",
            "milliseconds",
            Value("1000"),
            Integer { min: 200, max: limits::RELAY_SILENT_MS_MAX / 2, set: |c, v| c.heartbeat_ms = v },
            "How often the relay sends a heartbeat while it has no events. A router that receives nothing for 5 s stops trusting the worker.",
        ),
        at_start(
            "buffer_batches_max",
            "batches",
            Value("16384"),
            Integer { min: 1, max: 1 << 32, set: |c, v| c.buffer_batches_max = v as usize },
            "Batches kept for replays. A router that needs an older batch gets a snapshot.",
        ),
        at_start(
            "buffer_bytes_max",
            "bytes",
            Value("268435456"),
            Integer { min: 1, max: 1 << 40, set: |c, v| c.buffer_bytes_max = v as usize },
            "Bytes of the batches kept for replays.",
        ),
        at_start(
            "nats",
            "",
            Value(""),
            List { items_max: limits::NATS_SERVERS_MAX, bytes_max: limits::NAME_BYTES_MAX, set: |c, v| c.nats = v },
            "NATS servers of one cluster in which the relay also stores its batches and snapshots: nats://host:port, or tls://host:port,\n\
             which needs nats_ca_file in [ingest]. Needs JetStream, and a relay built with the feature `nats`.",
        ),
    ],
};
