//! The tables that say how the daemon runs and decides.

use std::path::PathBuf;

use super::access::{allow_gids, allow_uids};
use super::field;
use crate::config::endpoint;
use crate::config::field::{Kind, Preset, Reload, Section};
use crate::config::{
    BookingConfig, DiscoveryConfig, IngestConfig, IoEngine, LogConfig, LogFormat, MetricsConfig, PrefillModelName,
    ServeConfig, SnapshotConfig,
};
use crate::limits;

use Kind::{Choice, Flag, Integer, List, Parsed, Text};
use Preset::{Absent, Value};

const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

pub(in crate::config) static SERVE: Section<ServeConfig> = Section {
    name: "serve",
    reload: Reload::Only(super::access::ACCESS_FIELDS),
    repeated: false,
    doc: "How gateways reach the daemon.",
    fields: &[
        field(
            "socket",
            "",
            Value("/run/kvrouted/kvrouted.sock"),
            Parsed {
                what: "a path of at most 107 bytes",
                set: |c, text| {
                    endpoint::check_socket(text)?;
                    c.socket = PathBuf::from(text);
                    Ok(())
                },
            },
            "The Unix socket gateways connect to. Its folder must exist; a stale file is replaced, a live one never.",
        ),
        field(
            "admin_socket",
            "",
            Absent("/run/kvrouted/kvrouted.sock.admin"),
            Parsed {
                what: "a path of at most 107 bytes",
                set: |c, text| {
                    endpoint::check_socket(text)?;
                    c.admin_socket = PathBuf::from(text);
                    Ok(())
                },
            },
            "The Unix socket that answers `kvrouted status`. Absent: the socket's path with `.admin` appended.",
        ),
        field(
            "socket_mode",
            "octal",
            Value("0660"),
            Parsed {
                what: "an octal mode in quotes, such as \"0660\"",
                set: |c, text| {
                    c.socket_mode = endpoint::socket_mode(text)?;
                    Ok(())
                },
            },
            "Permission bits of the routing socket: who may write to it may route and book. The other is [admin]'s.",
        ),
        allow_uids(
            "Users, each a number or a name of /etc/passwd, that may route. With this or allow_gids set nobody else may, root neither.",
        ),
        allow_gids(
            "Groups, each a number or a name of /etc/group, that may too: as the peer's process was when it connected. Open connections stay.",
        ),
        field(
            "frame_timeout_ms",
            "milliseconds",
            Value("10000"),
            Integer { min: 0, max: limits::FRAME_TIMEOUT_MS_CEILING, set: |c, v| c.frame_timeout_ms = v },
            "A connection that leaves a frame unfinished, or hello unsaid, for so long is told so and closed. 0: never.",
        ),
        field(
            "io",
            "",
            Value("auto"),
            Choice {
                names: &IoEngine::NAMES,
                set: |c, at| c.io = [IoEngine::Auto, IoEngine::Uring, IoEngine::Epoll][at],
            },
            "The kernel interface under the connections: epoll or uring. auto: epoll, which was measured to cost less.",
        ),
        field(
            "cores",
            "threads",
            Value("0"),
            Integer { min: 0, max: limits::CORES_MAX as u64, set: |c, v| c.cores = v as u16 },
            "Serving threads. 0: as many as the process has processors, less the ingest shards; from 1 to 8.",
        ),
        field(
            "pin",
            "",
            Value("false"),
            Flag { set: |c, v| c.pin = v },
            "Keep each serving thread on one processor. Pays on machines with processors to spare, costs elsewhere.",
        ),
        field(
            "frame_body_bytes_max",
            "bytes",
            Value("8388608"),
            Integer {
                min: 4096,
                max: limits::FRAME_BODY_BYTES_CEILING as u64,
                set: |c, v| c.frame_body_bytes_max = v as u32,
            },
            "Largest request body answered; a token takes 4 bytes. Each connection may need that much memory.",
        ),
        field(
            "spin_us_max",
            "microseconds",
            Value("0"),
            Integer { min: 0, max: limits::SPIN_US_CEILING as u64, set: |c, v| c.spin_us_max = v as u32 },
            "How long a serving thread looks for requests before it sleeps, where they come that fast. Costs a processor. Not with io = \"uring\".",
        ),
        field(
            "unread_ms_max",
            "milliseconds",
            Value("30000"),
            Integer { min: 0, max: limits::UNREAD_MS_CEILING, set: |c, v| c.unread_ms_max = v },
            "A gateway that leaves its replies unread this long is disconnected. 0: never.",
        ),
        field(
            "lanes_max",
            "lanes",
            Value("64"),
            Integer { min: 0, max: limits::LANES_CEILING, set: |c, v| c.lanes_max = v as usize },
            "Gateways that may share memory with the daemon instead of writing to its socket. Pays with spin_us_max. 0: none.",
        ),
        field(
            "lane_ring_bytes_max",
            "bytes",
            Value("1048576"),
            Integer {
                min: limits::LANE_RING_BYTES_MIN as u64,
                max: limits::LANE_RING_BYTES_CEILING as u64,
                set: |c, v| c.lane_ring_bytes_max = v as u32,
            },
            "Largest ring that a gateway may ask for, rounded down to a power of two; a lane has two. 256 KiB each unless it asks.",
        ),
        field(
            "user_share_percent",
            "percent",
            Value("75"),
            Integer { min: 1, max: 100, set: |c, v| c.user_share_percent = v as u8 },
            "How much of everything that clients can hold (connections, memory for large frames, lanes, requests that wait, sessions, bookings)\n\
             # the processes of one user may take, so that something is left for others. 100: all. All who ask by HTTP are one user.\n\
             # While another user has sessions, one user's reports of failure, and of load, hold for at most this share of a space's\n\
             # workers at a time, rounded down, at least one.",
        ),
        field(
            "drain_ms_max",
            "milliseconds",
            Value("5000"),
            Integer { min: 0, max: limits::DRAIN_MS_CEILING, set: |c, v| c.drain_ms_max = v },
            "How long a stop waits for replies under way before it closes what is left.",
        ),
    ],
};

pub(in crate::config) static METRICS: Section<MetricsConfig> = Section {
    name: "metrics",
    reload: Reload::Never,
    repeated: false,
    doc: "The Prometheus page, http://127.0.0.1:PORT/metrics. `kvrouted relay` has one as well.",
    fields: &[
        field(
            "port",
            "TCP port",
            Value("0"),
            Integer { min: 0, max: u16::MAX as u64, set: |c, v| c.port = v as u16 },
            "Where the page is served, on the loopback interface only. 0: nowhere.",
        ),
        field(
            "hosts",
            "",
            Value(""),
            List { items_max: limits::METRICS_HOSTS_MAX, bytes_max: limits::NAME_BYTES_MAX, set: |c, v| c.hosts = v },
            "Names, without a port, by which it may be asked beside IP addresses and localhost, as hosts under [http].",
        ),
    ],
};

pub(in crate::config) static LOG: Section<LogConfig> = Section {
    name: "log",
    reload: Reload::Never,
    repeated: false,
    doc: "The log, on standard error. The environment variable RUST_LOG wins over `level`.",
    fields: &[
        field(
            "level",
            "",
            Value("info"),
            Choice { names: &LEVELS, set: |c, at| c.level = LEVELS[at] },
            "The least severe level written. debug and trace cost time on every event.",
        ),
        field(
            "format",
            "",
            Value("text"),
            Choice { names: &["text", "json"], set: |c, at| c.format = [LogFormat::Text, LogFormat::Json][at] },
            "text for people, json for one object a line.",
        ),
    ],
};

pub(in crate::config) static INGEST: Section<IngestConfig> = Section {
    name: "ingest",
    reload: Reload::Never,
    repeated: false,
    doc: "How the engines' events are taken in.",
    fields: &[
        field(
            "shards",
            "threads",
            Value("1"),
            Integer { min: 1, max: limits::SHARDS_MAX as u64, set: |c, v| c.shards = v as u16 },
            "Ingest threads, each with its share of the workers. More take more events; every query visits all.",
        ),
        field(
            "down_after_ms",
            "milliseconds",
            Value("5000"),
            Integer { min: 0, max: limits::EVENTS_MS_CEILING, set: |c, v| c.down_after_ms = v },
            "A worker whose publisher is gone, or was never reached, this long is `down` until it connects. 0: never.",
        ),
        field(
            "silence_ms_max",
            "milliseconds",
            Value("0"),
            Integer { min: 0, max: limits::EVENTS_MS_CEILING, set: |c, v| c.silence_ms_max = v },
            "A worker that sends nothing for longer is `unproven`. Idle engines are silent too. 0: never.",
        ),
        field(
            "probe_after_ms",
            "milliseconds",
            Value("5000"),
            Integer { min: 0, max: limits::EVENTS_MS_CEILING, set: |c, v| c.probe_after_ms = v },
            "A worker with a replay endpoint that is quiet this long is asked whether its last events were lost. 0: never.",
        ),
        field(
            "receive_messages_max",
            "messages",
            Value("100000"),
            Integer { min: 1, max: i32::MAX as u64, set: |c, v| c.receive_messages_max = v as i32 },
            "Messages received from one publisher and not yet applied, at most 16. The others wait in the kernel and in the engine, whose `hwm` decides when it drops them, which is a gap.",
        ),
    ],
};

pub(in crate::config) static BOOKING: Section<BookingConfig> = Section {
    name: "booking",
    reload: Reload::Never,
    repeated: false,
    doc: "How long the daemon counts a request that its gateway has booked.",
    fields: &[
        field(
            "age_s_max",
            "seconds",
            Value("300"),
            Integer { min: 1, max: limits::BOOKING_S_CEILING, set: |c, v| c.age_s_max = v },
            "A booking that nobody frees is dropped at this age. Below the longest request, load is under-counted.",
        ),
        field(
            "session_grace_s",
            "seconds",
            Value("10"),
            Integer { min: 0, max: limits::BOOKING_S_CEILING, set: |c, v| c.session_grace_s = v },
            "A gateway's bookings outlive its last connection by this, so that it may reconnect.",
        ),
        field(
            "track_output_blocks",
            "",
            Value("false"),
            Flag { set: |c, v| c.track_output_blocks = v },
            "Count the output that gateways report as decode blocks, which weigh less towards the end that was expected.",
        ),
        field(
            "back_off_ms",
            "milliseconds",
            Value("500"),
            Integer { min: 0, max: limits::REPORT_MS_CEILING, set: |c, v| c.back_off_ms = v },
            "A worker that a gateway reports to have failed a request gets none for this long while others can. 0: never.",
        ),
        field(
            "back_off_ms_max",
            "milliseconds",
            Value("30000"),
            Integer { min: 0, max: limits::REPORT_MS_CEILING, set: |c, v| c.back_off_ms_max = v },
            "Each failure after that doubles the time up to this; this long without one takes a doubling back.",
        ),
        field(
            "reported_load_ms_max",
            "milliseconds",
            Value("5000"),
            Integer { min: 0, max: limits::REPORT_MS_CEILING, set: |c, v| c.reported_load_ms_max = v },
            "A load that was reported of a worker is forgotten at this age.",
        ),
        field(
            "prefill_model",
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
        field(
            "prefill_base_us",
            "microseconds",
            Value("5000"),
            Integer { min: 0, max: limits::PREFILL_NS_CEILING / 1000, set: |c, v| c.prefill_base_us = v },
            "What every prefill takes, with the fixed model.",
        ),
        field(
            "prefill_token_ns",
            "nanoseconds",
            Value("50000"),
            Integer { min: 0, max: limits::PREFILL_NS_CEILING, set: |c, v| c.prefill_token_ns = v },
            "What a token that is not cached adds, with the fixed model. Too low: busy workers look idle. Measure it.",
        ),
        field(
            "prefill_cached_token_ns",
            "nanoseconds",
            Value("0"),
            Integer { min: 0, max: limits::PREFILL_NS_CEILING, set: |c, v| c.prefill_cached_token_ns = v },
            "What a cached token adds, with the fixed model.",
        ),
    ],
};

pub(in crate::config) static SNAPSHOT: Section<SnapshotConfig> = Section {
    reload: Reload::Never,
    name: "snapshot",
    repeated: false,
    doc: "What a restart need not forget: each worker's blocks in a file. Only workers with a replay endpoint use them.",
    fields: &[
        field(
            "dir",
            "",
            Absent("/var/lib/kvrouted"),
            Kind::Text { bytes_min: 1, bytes_max: 4096, set: |c, text| c.dir = Some(PathBuf::from(text)) },
            "The directory, of mode 0700 and this daemon's alone; it is made if its parent exists. Absent: no snapshots.",
        ),
        field(
            "every_s",
            "seconds",
            Value("60"),
            Integer { min: 1, max: limits::SNAPSHOT_S_CEILING, set: |c, v| c.every_s = v },
            "Time from one round of snapshots to the next; one more is taken at a stop. Only what has changed is written.",
        ),
        field(
            "keep_s",
            "seconds",
            Value("86400"),
            Integer { min: 0, max: limits::SNAPSHOT_S_CEILING, set: |c, v| c.keep_s = v },
            "The snapshot of a worker that is no longer there is removed at this age.",
        ),
    ],
};

pub(in crate::config) static DISCOVERY: Section<DiscoveryConfig> = Section {
    name: "discovery",
    reload: Reload::Only(&["grace_ms"]),
    repeated: false,
    doc: "Workers that files name while the daemon runs, beside those of this file and of `kvrouted worker`.",
    fields: &[
        field(
            "path",
            "",
            Absent("/etc/kvrouted/workers"),
            Text { bytes_min: 1, bytes_max: 4096, set: |c, v| c.path = Some(v.into()) },
            "A file of workers, or a folder of such files: .toml with [[worker]], or .json. Replace them by renaming.",
        ),
        field(
            "grace_ms",
            "milliseconds",
            Value("5000"),
            Integer { min: 0, max: limits::DISCOVERY_MS_CEILING, set: |c, v| c.grace_ms = v },
            "The workers of a file that has gone stay this long, so that one that is written anew harms nobody.",
        ),
        field(
            "rescan_ms",
            "milliseconds",
            Value("10000"),
            Integer { min: 50, max: limits::DISCOVERY_MS_CEILING, set: |c, v| c.rescan_ms = v },
            "The files are looked at this often even if nothing tells of a change, as network file systems may not.",
        ),
    ],
};
