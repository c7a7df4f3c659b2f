//! The tables about sockets and ports: for gateways, administration, metrics and HTTP clients.

use std::path::PathBuf;

use super::live;
use crate::config::field::{Field, Kind, Preset, Section};
use crate::config::values;
use crate::config::{AccessConfig, AdminConfig, HttpConfig, IoSetting, MetricsConfig, ServeConfig};
use crate::limits;

use Kind::{Choice, Flag, Integer, List, Parsed};
use Preset::{Absent, Value};

/// A table with `allow_uids` and `allow_gids`.
pub(super) trait Admits {
    fn access(&mut self) -> &mut AccessConfig;
}

impl Admits for ServeConfig {
    fn access(&mut self) -> &mut AccessConfig {
        &mut self.access
    }
}

impl Admits for AdminConfig {
    fn access(&mut self) -> &mut AccessConfig {
        &mut self.access
    }
}

pub(super) const fn allow_uids<T: Admits>(doc: &'static str) -> Field<T> {
    accounts("allow_uids", |c, v| c.access().uids = v, doc)
}

pub(super) const fn allow_gids<T: Admits>(doc: &'static str) -> Field<T> {
    accounts("allow_gids", |c, v| c.access().gids = v, doc)
}

const fn accounts<T>(name: &'static str, set: fn(&mut T, Vec<String>), doc: &'static str) -> Field<T> {
    let kind = Kind::List { items_max: limits::ALLOWED_ACCOUNTS_MAX, bytes_max: limits::NAME_BYTES_MAX, set };
    live(name, "", Value(""), kind, doc)
}

/// The kind of an address to bind, which two ports have.
macro_rules! listen {
    () => {
        Parsed {
            what: "an IP address in quotes, such as \"127.0.0.1\"",
            set: |c, text| {
                c.listen = values::address(text)?;
                Ok(())
            },
        }
    };
}

pub(in crate::config) static SERVE: Section<ServeConfig> = Section {
    name: "serve",
    repeated: false,
    doc: "How gateways reach the daemon.",
    fields: &[
        restart!(
            serve.socket,
            "",
            Value("/run/kvrouted/kvrouted.sock"),
            Parsed {
                what: "a path of at most 107 bytes",
                set: |c, text| {
                    values::check_socket(text)?;
                    c.socket = PathBuf::from(text);
                    Ok(())
                },
            },
            "The Unix socket to which gateways connect. Its folder must exist. The daemon replaces a stale socket file, never one in use.",
        ),
        restart!(
            serve.admin_socket,
            "",
            Absent("/run/kvrouted/kvrouted.sock.admin"),
            Parsed {
                what: "a path of at most 107 bytes",
                set: |c, text| {
                    values::check_socket(text)?;
                    c.admin_socket = PathBuf::from(text);
                    Ok(())
                },
            },
            "The Unix socket for `kvrouted status` and other administration. Absent: the path of socket with `.admin` appended.",
        ),
        restart!(
            serve.socket_mode,
            "octal",
            Value("0660"),
            Parsed {
                what: "an octal mode in quotes, such as \"0660\"",
                set: |c, text| {
                    c.socket_mode = values::socket_mode(text)?;
                    Ok(())
                },
            },
            "Permission bits of the routing socket. A user who may write to it may route and book. For administration see [admin].",
        ),
        allow_uids(
            "Users who may route, each a number or a name of /etc/passwd. If this or allow_gids is set, no other user may, not even root.",
        ),
        allow_gids(
            "Groups whose members may also route, each a number or a name of /etc/group. The groups of the peer's process at the time of\n\
             its connection count. Open connections stay open.",
        ),
        restart!(
            serve.frame_timeout_ms,
            "milliseconds",
            Value("10000"),
            Integer { min: 0, max: limits::FRAME_TIMEOUT_MS_CEILING, set: |c, v| c.frame_timeout_ms = v },
            "A connection that has not sent hello, or has not finished a frame, within this time gets an error and is closed. 0: no limit.",
        ),
        restart!(
            serve.io,
            "",
            Value("auto"),
            Choice {
                names: &IoSetting::NAMES,
                set: |c, at| c.io = [IoSetting::Auto, IoSetting::Uring, IoSetting::Epoll][at],
            },
            "The kernel interface for connections: epoll or uring. auto: epoll, which costs less processor time in measurements.",
        ),
        restart!(
            serve.cores,
            "threads",
            Value("0"),
            Integer { min: 0, max: limits::CORES_MAX as u64, set: |c, v| c.cores = v as u16 },
            "Serving threads. 0: one for each processor of the process, less the ingest shards, at least 1 and at most 8.",
        ),
        restart!(
            serve.pin,
            "",
            Value("false"),
            Flag { set: |c, v| c.pin = v },
            "Pin each serving thread to one processor. Helps on machines with spare processors, hurts on others.",
        ),
        restart!(
            serve.frame_body_bytes_max,
            "bytes",
            Value("8388608"),
            Integer {
                min: 4096,
                max: limits::FRAME_BODY_BYTES_CEILING as u64,
                set: |c, v| c.frame_body_bytes_max = v as u32,
            },
            "Largest request body that the daemon answers. A token takes 4 bytes. Each connection may need this much memory.",
        ),
        restart!(
            serve.spin_us_max,
            "microseconds",
            Value("0"),
            Integer { min: 0, max: limits::SPIN_US_CEILING as u64, set: |c, v| c.spin_us_max = v as u32 },
            "How long a serving thread may busy-poll before it sleeps, while requests arrive that close together. Uses a whole processor.\n\
             Not with io = \"uring\". 0: never.",
        ),
        restart!(
            serve.unread_ms_max,
            "milliseconds",
            Value("30000"),
            Integer { min: 0, max: limits::UNREAD_MS_CEILING, set: |c, v| c.unread_ms_max = v },
            "A gateway that does not read its replies for this long is disconnected. 0: never.",
        ),
        restart!(
            serve.lanes_max,
            "lanes",
            Value("64"),
            Integer { min: 0, max: limits::LANES_CEILING, set: |c, v| c.lanes_max = v as usize },
            "Gateways that may use shared memory instead of the socket, each over a shm lane. Worthwhile with spin_us_max. 0: none.",
        ),
        restart!(
            serve.lane_ring_bytes_max,
            "bytes",
            Value("1048576"),
            Integer {
                min: limits::LANE_RING_BYTES_MIN as u64,
                max: limits::LANE_RING_BYTES_CEILING as u64,
                set: |c, v| c.lane_ring_bytes_max = v as u32,
            },
            "Largest ring that a gateway may request for a shm lane, rounded down to a power of two. A lane has two rings.\n\
             Default of a request: 256 KiB for each.",
        ),
        restart!(
            serve.user_share_percent,
            "percent",
            Value("75"),
            Integer { min: 1, max: 100, set: |c, v| c.user_share_percent = v as u8 },
            "The share of everything clients can hold (connections, memory for large frames, lanes, queued requests, sessions, bookings)\n\
             that the processes of one user may take. The rest stays free for other users. 100: all. All HTTP clients are one user.\n\
             While another user has sessions, one user's reports of failure and of load apply to at most this share of a space's\n\
             workers at a time, rounded down, but to at least one.",
        ),
        restart!(
            serve.drain_ms_max,
            "milliseconds",
            Value("5000"),
            Integer { min: 0, max: limits::DRAIN_MS_CEILING, set: |c, v| c.drain_ms_max = v },
            "How long a stopping daemon waits for pending replies before it closes the remaining connections.",
        ),
    ],
};

/// The default of `admin.socket_mode`, as a number.
pub(in crate::config) const ADMIN_SOCKET_MODE_PRESET: u32 = 0o600;

pub(in crate::config) static ADMIN: Section<AdminConfig> = Section {
    name: "admin",
    repeated: false,
    doc: "Who may administer: status, adding and removing workers, resets, policies.",
    fields: &[
        restart!(
            admin.socket_mode,
            "octal",
            Value("0600"),
            Parsed {
                what: "an octal mode in quotes, such as \"0660\"",
                set: |c, text| {
                    c.socket_mode = values::socket_mode(text)?;
                    Ok(())
                },
            },
            "Permission bits of the admin socket. 0600: only the daemon's own user and root, whatever the lists allow.",
        ),
        allow_uids("As serve.allow_uids, for administration. Neither list affects the other."),
        allow_gids("As serve.allow_gids, for administration."),
    ],
};

pub(in crate::config) static METRICS: Section<MetricsConfig> = Section {
    name: "metrics",
    repeated: false,
    doc: "The Prometheus page, http://127.0.0.1:PORT/metrics. It asks for no credentials. `kvrouted relay` also has one.",
    fields: &[
        restart!(
            metrics.port,
            "TCP port",
            Value("0"),
            Integer { min: 0, max: u16::MAX as u64, set: |c, v| c.port = v as u16 },
            "The port of the metrics page. 0: no metrics page.",
        ),
        restart!(
            metrics.listen,
            "",
            Value("127.0.0.1"),
            listen!(),
            "The address to bind. On an address other than the loopback interface, everyone who can reach it may read the page: names of\n\
             models, workers, classes and principals, and their load. `kvrouted doctor` looks for the page at 127.0.0.1 or, with\n\
             --config, here.",
        ),
        restart!(
            metrics.detailed_workers_max,
            "workers",
            Value("1024"),
            Integer { min: 0, max: limits::WORKERS_MAX as u64, set: |c, v| c.detailed_workers_max = v as usize },
            "Of a larger fleet, the page has only those metrics of each worker that the alerts and dashboards in ops/ use; the metric\n\
             kvrouted_metrics_left_out counts the others. A worker takes 6.5 kB of the page with all of them.",
        ),
        restart!(
            metrics.hosts,
            "",
            Value(""),
            List { items_max: limits::METRICS_HOSTS_MAX, bytes_max: limits::NAME_BYTES_MAX, set: |c, v| c.hosts = v },
            "Host names, without a port, that a request may use besides IP addresses and localhost. See hosts under [http].",
        ),
    ],
};

pub(in crate::config) static HTTP: Section<HttpConfig> = Section {
    name: "http",
    repeated: false,
    doc: "A port with the HTTP endpoints of Dynamo's standalone indexer and selection service, and /metrics. It asks for\n\
          no credentials.",
    fields: &[
        restart!(
            http.port,
            "TCP port",
            Value("0"),
            Integer { min: 0, max: u16::MAX as u64, set: |c, v| c.port = v as u16 },
            "The port. One thread of its own serves it. 0: no HTTP port.",
        ),
        restart!(
            http.listen,
            "",
            Value("127.0.0.1"),
            listen!(),
            "The address to bind. On an address other than the loopback interface, everyone who can reach it may route and book.",
        ),
        restart!(
            http.administer,
            "",
            Absent("true"),
            Flag { set: |c, v| c.administer = v },
            "Whether HTTP clients may register, remove and dump workers. Absent: only if the port is on the loopback interface.\n\
             Required on another address, and also with allow_uids or allow_gids in [serve] or [admin], or a changed admin.socket_mode:\n\
             the port applies none of these.",
        ),
        restart!(
            http.hosts,
            "",
            Value(""),
            List { items_max: limits::HTTP_HOSTS_MAX, bytes_max: limits::NAME_BYTES_MAX, set: |c, v| c.hosts = v },
            "Host names, without a port, that a request may use besides IP addresses and localhost. The port refuses any other name in a\n\
             Host header, because the author of a web page can make a name resolve to this port. \"*\": any name; use it behind a proxy\n\
             that checks the host.",
        ),
        restart!(
            http.worker_hosts,
            "",
            Value(""),
            List {
                items_max: limits::HTTP_WORKER_HOSTS_MAX,
                bytes_max: limits::NAME_BYTES_MAX,
                set: |c, v| c.worker_hosts = v,
            },
            "Allowed hosts in the endpoints of workers registered by HTTP: host names, IP addresses, networks (\"10.0.0.0/8\"),\n\
             \"ipc\" for Unix sockets, \"*\" for every host. The daemon connects to these endpoints, and GET /workers shows whether they\n\
             answer. Empty: any host for clients on the loopback interface; for other clients only their own IP address.",
        ),
        restart!(
            http.body_bytes_max,
            "bytes",
            Value("8388608"),
            Integer { min: 4096, max: limits::HTTP_BODY_BYTES_CEILING, set: |c, v| c.body_bytes_max = v },
            "Largest request body that the port answers. A token takes about 7 bytes of JSON.",
        ),
        restart!(
            http.dump_worker_ms_max,
            "milliseconds",
            Value("30000"),
            Integer { min: 1, max: limits::HTTP_DUMP_WORKER_MS_CEILING, set: |c, v| c.dump_worker_ms_max = v },
            "How long /dump may read one worker's blocks. The worker's events wait meanwhile. Blocks not read by then are left out.",
        ),
    ],
};
