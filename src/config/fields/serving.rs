//! The tables that say how gateways, operators and scrapers reach the daemon.

use std::path::PathBuf;

use super::live;
use crate::config::field::{Fault, Field, Kind, Preset, Section};
use crate::config::values;
use crate::config::{AccessConfig, AdminConfig, HttpConfig, IoEngine, MetricsConfig, ServeConfig};
use crate::limits;

use Kind::{Choice, Flag, Integer, List, Parsed};
use Preset::{Absent, Value};

/// A table with lists of those who may connect.
pub(super) trait Admits {
    /// The lists.
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

/// The users that may connect.
pub(super) const fn allow_uids<T: Admits>(doc: &'static str) -> Field<T> {
    accounts("allow_uids", |c, v| c.access().uids = v, doc)
}

/// The groups that may connect.
pub(super) const fn allow_gids<T: Admits>(doc: &'static str) -> Field<T> {
    accounts("allow_gids", |c, v| c.access().gids = v, doc)
}

const fn accounts<T>(name: &'static str, set: fn(&mut T, Vec<String>), doc: &'static str) -> Field<T> {
    let kind = Kind::List { items_max: limits::ALLOWED_ACCOUNTS_MAX, bytes_max: limits::NAME_BYTES_MAX, set };
    live(name, "", Value(""), kind, doc)
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
            "The Unix socket gateways connect to. Its folder must exist; a stale file is replaced, a live one never.",
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
            "The Unix socket that answers `kvrouted status`. Absent: the socket's path with `.admin` appended.",
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
            "Permission bits of the routing socket: who may write to it may route and book. The other is [admin]'s.",
        ),
        allow_uids(
            "Users, each a number or a name of /etc/passwd, that may route. With this or allow_gids set nobody else may, root neither.",
        ),
        allow_gids(
            "Groups, each a number or a name of /etc/group, that may too: as the peer's process was when it connected. Open connections stay.",
        ),
        restart!(
            serve.frame_timeout_ms,
            "milliseconds",
            Value("10000"),
            Integer { min: 0, max: limits::FRAME_TIMEOUT_MS_CEILING, set: |c, v| c.frame_timeout_ms = v },
            "A connection that leaves a frame unfinished, or hello unsaid, for so long is told so and closed. 0: never.",
        ),
        restart!(
            serve.io,
            "",
            Value("auto"),
            Choice {
                names: &IoEngine::NAMES,
                set: |c, at| c.io = [IoEngine::Auto, IoEngine::Uring, IoEngine::Epoll][at],
            },
            "The kernel interface under the connections: epoll or uring. auto: epoll, which was measured to cost less.",
        ),
        restart!(
            serve.cores,
            "threads",
            Value("0"),
            Integer { min: 0, max: limits::CORES_MAX as u64, set: |c, v| c.cores = v as u16 },
            "Serving threads. 0: as many as the process has processors, less the ingest shards; from 1 to 8.",
        ),
        restart!(
            serve.pin,
            "",
            Value("false"),
            Flag { set: |c, v| c.pin = v },
            "Keep each serving thread on one processor. Pays on machines with processors to spare, costs elsewhere.",
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
            "Largest request body answered; a token takes 4 bytes. Each connection may need that much memory.",
        ),
        restart!(
            serve.spin_us_max,
            "microseconds",
            Value("0"),
            Integer { min: 0, max: limits::SPIN_US_CEILING as u64, set: |c, v| c.spin_us_max = v as u32 },
            "How long a serving thread looks for requests before it sleeps, where they come that fast. Costs a processor. Not with io = \"uring\".",
        ),
        restart!(
            serve.unread_ms_max,
            "milliseconds",
            Value("30000"),
            Integer { min: 0, max: limits::UNREAD_MS_CEILING, set: |c, v| c.unread_ms_max = v },
            "A gateway that leaves its replies unread this long is disconnected. 0: never.",
        ),
        restart!(
            serve.lanes_max,
            "lanes",
            Value("64"),
            Integer { min: 0, max: limits::LANES_CEILING, set: |c, v| c.lanes_max = v as usize },
            "Gateways that may share memory with the daemon instead of writing to its socket. Pays with spin_us_max. 0: none.",
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
            "Largest ring that a gateway may ask for, rounded down to a power of two; a lane has two. 256 KiB each unless it asks.",
        ),
        restart!(
            serve.user_share_percent,
            "percent",
            Value("75"),
            Integer { min: 1, max: 100, set: |c, v| c.user_share_percent = v as u8 },
            "How much of everything that clients can hold (connections, memory for large frames, lanes, requests that wait, sessions, bookings)\n\
             # the processes of one user may take, so that something is left for others. 100: all. All who ask by HTTP are one user.\n\
             # While another user has sessions, one user's reports of failure, and of load, hold for at most this share of a space's\n\
             # workers at a time, rounded down, at least one.",
        ),
        restart!(
            serve.drain_ms_max,
            "milliseconds",
            Value("5000"),
            Integer { min: 0, max: limits::DRAIN_MS_CEILING, set: |c, v| c.drain_ms_max = v },
            "How long a stop waits for replies under way before it closes what is left.",
        ),
    ],
};

/// The preset of the admin socket's mode, as a number.
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
            "Permission bits of the admin socket. 0600: only the daemon's own user, and root, whatever the lists say.",
        ),
        allow_uids("As serve.allow_uids, for those who administer. The two lists know nothing of each other."),
        allow_gids("As serve.allow_gids, for those who administer."),
    ],
};

pub(in crate::config) static METRICS: Section<MetricsConfig> = Section {
    name: "metrics",
    repeated: false,
    doc: "The Prometheus page, http://127.0.0.1:PORT/metrics. `kvrouted relay` has one as well.",
    fields: &[
        restart!(
            metrics.port,
            "TCP port",
            Value("0"),
            Integer { min: 0, max: u16::MAX as u64, set: |c, v| c.port = v as u16 },
            "Where the page is served, on the loopback interface only. 0: nowhere.",
        ),
        restart!(
            metrics.hosts,
            "",
            Value(""),
            List { items_max: limits::METRICS_HOSTS_MAX, bytes_max: limits::NAME_BYTES_MAX, set: |c, v| c.hosts = v },
            "Names, without a port, by which it may be asked beside IP addresses and localhost, as hosts under [http].",
        ),
    ],
};

pub(in crate::config) static HTTP: Section<HttpConfig> = Section {
    name: "http",
    repeated: false,
    doc: "A port with the HTTP endpoints of Dynamo's standalone indexer and selection service, and /metrics. It asks for\n\
          # no credentials.",
    fields: &[
        restart!(
            http.port,
            "TCP port",
            Value("0"),
            Integer { min: 0, max: u16::MAX as u64, set: |c, v| c.port = v as u16 },
            "Where it is served, by a thread of its own. 0: nowhere.",
        ),
        restart!(
            http.listen,
            "",
            Value("127.0.0.1"),
            Parsed {
                what: "an IP address in quotes, such as \"127.0.0.1\"",
                set: |c, text| {
                    c.listen = text.parse().map_err(|_| Fault::new(format!("`{text}` is no IP address")))?;
                    Ok(())
                },
            },
            "The address it is bound to. On another than the loopback interface whoever reaches it may route and book.",
        ),
        restart!(
            http.administer,
            "",
            Absent("true"),
            Flag { set: |c, v| c.administer = v },
            "Whether workers may be registered, removed and dumped by it. Absent: on the loopback interface. It must be said on another,\n\
             # and beside lists of who may connect in [serve] or [admin] or another admin.socket_mode: the port knows none of\n\
             # them.",
        ),
        restart!(
            http.hosts,
            "",
            Value(""),
            List { items_max: limits::HTTP_HOSTS_MAX, bytes_max: limits::NAME_BYTES_MAX, set: |c, v| c.hosts = v },
            "Names, without a port, by which it may be asked beside IP addresses and localhost. A Host that is another name is refused:\n\
             # the author of a web page can have a name lead here. \"*\": any name, where something before it checks the host.",
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
            "Where the endpoints of a worker that is registered by HTTP may be: host names, IP addresses, networks (\"10.0.0.0/8\"),\n\
             # \"ipc\" for Unix sockets, \"*\" for every host. The daemon connects to them, and GET /workers says whether somebody\n\
             # answered. Empty: anywhere for callers on the loopback interface; for others their own IP address only.",
        ),
        restart!(
            http.body_bytes_max,
            "bytes",
            Value("8388608"),
            Integer { min: 4096, max: limits::HTTP_BODY_BYTES_CEILING, set: |c, v| c.body_bytes_max = v },
            "Largest request body answered; a token takes some 7 bytes of JSON.",
        ),
        restart!(
            http.dump_worker_ms_max,
            "milliseconds",
            Value("30000"),
            Integer { min: 1, max: limits::HTTP_DUMP_WORKER_MS_CEILING, set: |c, v| c.dump_worker_ms_max = v },
            "How long /dump may read one worker's blocks, whose own events wait meanwhile; what is not read by then is left out.",
        ),
    ],
};
