//! The daemon's configuration: one TOML file, with a default for every field.
//!
//! The first step (`document`) reads the file, or the flags that replace one, into a draft. The table of fields
//! (`fields`) guides it and holds every default, bound, unit and description. In between, the environment and the command
//! line set fields over the file (`overrides`). The second step (`check`) checks the draft as a whole and makes the
//! [`Config`] on which the daemon runs. All steps list every problem that they find.

mod catalog;
mod check;
mod difference;
mod document;
mod example;
mod field;
mod fields;
#[cfg(feature = "simulate")]
mod fleet_file;
mod load;
mod masked;
mod overrides;
mod problem;
mod reload;
mod schema;
mod values;
mod worker_files;
mod written;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use crate::endpoint::{Endpoint, NatsServer};
use crate::engine_law::{EnginePreset, PrefillLaw};
use crate::fleet::{DeviceClass, EventSource, PoolRole, WorkerState};
use crate::ids::{Scheme, SpaceId, Window, Worker};
use crate::limits::{ORIGINS_MAX, ORIGINS_MIN};
use crate::load::{PrefillFigures, PrefillModel};
#[cfg(feature = "nats")]
use crate::nats::{Access, AccessFiles};
use crate::route::Policy;
use crate::sandbox::Mode;

pub use catalog::{
    FieldInfo, TableInfo, ValueType, field as field_at, similar as similar_fields, table as table_at, tables,
};
pub(crate) use check::of_rank;
pub(crate) use difference::fields_of_worker;
pub use difference::{Difference, FieldDifference, WorkerDifference};
pub use example::example;
#[cfg(feature = "simulate")]
pub use example::example_fleet;
#[cfg(feature = "simulate")]
pub use fleet_file::{EngineGroup, FleetChangeName, FleetFile, FleetRouters, WorkerChange, parse_fleet};
pub use load::{Flags, Setting, load, parse, parse_as, parse_over, text_of};
pub(crate) use load::{policy_with, socket_default};
pub use masked::{MaskedConfig, Unshowable, without_secrets};
pub use overrides::{Environment, Override, VARIABLE_PREFIX, variable_of};
#[cfg(feature = "simulate")]
pub(crate) use problem::nearest;
pub use problem::{Location, Problem, Problems};
pub use schema::schema;
pub(crate) use values::HostRule;
pub use worker_files::{FileFormat, parse_workers};
pub(crate) use worker_files::{WorkerPatch, parse_worker};
pub use written::WrittenTable;

/// The validated configuration.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Config {
    /// `[serve]`.
    pub serve: ServeConfig,
    /// `[admin]`.
    pub admin: AdminConfig,
    /// `[metrics]`.
    pub metrics: MetricsConfig,
    /// `[http]`.
    pub http: HttpConfig,
    /// `[remote]`.
    pub remote: RemoteConfig,
    /// `[log]`.
    pub log: LogConfig,
    /// `[process]`.
    pub process: ProcessConfig,
    /// `[sandbox]`.
    pub sandbox: SandboxConfig,
    /// `[ingest]`.
    pub ingest: IngestConfig,
    /// `[booking]`.
    pub booking: BookingConfig,
    /// `[snapshot]`.
    pub snapshot: SnapshotConfig,
    /// `[journal]`.
    pub journal: JournalConfig,
    /// `[traces]`.
    pub traces: TracesConfig,
    /// `[shadow]`.
    pub shadow: ShadowConfig,
    /// `[policy]`.
    pub policy: PolicyConfig,
    /// The spaces. A [`SpaceId`] is an index of this list.
    pub spaces: Vec<SpaceConfig>,
    /// `[discovery]`.
    pub discovery: DiscoveryConfig,
    /// `[routers]`.
    pub routers: RoutersConfig,
    /// `[relay]`. Only a relay reads it.
    pub relay: RelayConfig,
    /// The workers in the order of the file. A record of several ranks is several workers.
    pub workers: Vec<WorkerConfig>,
    /// The workers named by their engine's URL.
    pub servers: Vec<ServerConfig>,
    /// Every field that differs from its default, as text.
    pub written: Vec<WrittenTable>,
    /// What the environment and the command line set over the file, in the order in which they win.
    pub overrides: Vec<Override>,
}

/// `[routers]`: the other routers of the fleet.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RoutersConfig {
    /// The endpoint to bind for other routers; `None` = no load is shared.
    pub listen: Option<String>,
    /// The endpoints of the other routers.
    pub peers: Vec<String>,
    /// A host name of which every address is another router, and its port.
    pub peers_dns: Option<(String, u16)>,
    /// A file with the endpoints of other routers, which is followed.
    pub peers_file: Option<PathBuf>,
    /// NATS servers of one cluster, in place of `listen`; none = no NATS.
    pub nats: Vec<String>,
    /// What the subjects begin with.
    pub nats_prefix: String,
    /// The user whose password is in `nats_secret_file`.
    pub nats_user: Option<String>,
    /// A file with a password, or with a token if there is no user.
    pub nats_secret_file: Option<PathBuf>,
    /// A file with credentials.
    pub nats_credentials_file: Option<PathBuf>,
    /// A file with the certificates of authorities.
    pub nats_ca_file: Option<PathBuf>,
    /// This router's name; `None` = the host's name and `listen`, or `nats_prefix`.
    pub name: Option<String>,
    /// The file of the secret.
    pub secret_file: Option<PathBuf>,
    /// The file of a second secret, which is only accepted.
    pub accepted_secret_file: Option<PathBuf>,
    /// Time between two batches, milliseconds.
    pub batch_ms: u64,
    /// Silence after which the load of another router is dropped, milliseconds.
    pub silent_ms_max: u64,
    /// How long the load of others may be missing before the daemon is ready all the same, milliseconds.
    pub join_ms_max: u64,
}

impl RoutersConfig {
    /// The most other routers whose load is added until the next start: more than peers, as peers may be added, and as one
    /// that gets another name counts twice for a while.
    #[must_use]
    pub fn origins_max(&self) -> usize {
        match (&self.listen, self.nats.is_empty()) {
            (Some(_), _) if self.peers_dns.is_none() && self.peers_file.is_none() => {
                (2 * self.peers.len()).clamp(ORIGINS_MIN, ORIGINS_MAX)
            }
            // No list says who the others will be.
            (Some(_), _) | (None, false) => ORIGINS_MAX,
            (None, true) => 0,
        }
    }

    /// The NATS servers; those that are none are left out, which the configuration has refused.
    #[must_use]
    pub fn nats_servers(&self) -> Vec<NatsServer> {
        self.nats.iter().filter_map(|server| NatsServer::parse(server).ok()).collect()
    }

    /// The addresses of the peers; those that are none are left out, which the configuration has refused.
    #[must_use]
    pub fn peer_endpoints(&self) -> Vec<Endpoint> {
        self.peers.iter().filter_map(|peer| Endpoint::parse(peer).ok()).collect()
    }
}

/// `[relay]`: where a relay publishes its worker's events again.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RelayConfig {
    /// The endpoint to bind for events.
    pub endpoint: String,
    /// The endpoint to bind for replays.
    pub replay: String,
    /// Interval of heartbeats without events, milliseconds.
    pub heartbeat_ms: u64,
    /// Batches kept for replays.
    pub buffer_batches_max: usize,
    /// Bytes of batches kept for replays.
    pub buffer_bytes_max: usize,
    /// NATS servers where it also stores its batches; empty = nowhere.
    pub nats: Vec<String>,
}

impl RelayConfig {
    /// The NATS servers, parsed.
    #[must_use]
    pub fn nats_servers(&self) -> Vec<NatsServer> {
        self.nats.iter().filter_map(|server| NatsServer::parse(server).ok()).collect()
    }
}

/// `[discovery]`: files of workers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DiscoveryConfig {
    /// A file of workers, or a folder of such files; `None` = none.
    pub path: Option<PathBuf>,
    /// How long the workers of a deleted file stay, milliseconds.
    pub grace_ms: u64,
    /// How often the files are checked without a change notification, milliseconds.
    pub rescan_ms: u64,
}

/// The workers of one source.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NamedWorkers {
    /// Workers named by their endpoints, or without any.
    pub workers: Vec<WorkerConfig>,
    /// Workers named by their engine's URL.
    pub servers: Vec<ServerConfig>,
}

/// An engine named by its URL. Its HTTP server says where its ranks publish.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerConfig {
    /// `http://host:port`.
    pub url: String,
    /// The first rank, as far as the record describes it.
    pub worker: WorkerConfig,
}

/// The kernel interface for connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoSetting {
    /// The cheaper one: epoll.
    #[default]
    Auto,
    /// io_uring; without it the daemon does not start.
    Uring,
    /// epoll.
    Epoll,
}

impl IoSetting {
    /// The names used in the configuration and on the command line.
    pub const NAMES: [&'static str; 3] = ["auto", "uring", "epoll"];
}

/// `[serve]`: how gateways reach the daemon. The names end in units. The field table describes each field.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServeConfig {
    /// The Unix socket for gateways.
    pub socket: PathBuf,
    /// The Unix socket for administration.
    pub admin_socket: PathBuf,
    /// Permission bits of the routing socket.
    pub socket_mode: u32,
    /// Users and groups who may route, if restricted further.
    pub access: AccessConfig,
    /// Time for hello and for the rest of a frame, milliseconds; 0 = no limit.
    pub frame_timeout_ms: u64,
    /// The kernel interface for connections.
    pub io: IoSetting,
    /// Serving threads; 0 = see [`ServeConfig::core_count`].
    pub cores: u16,
    /// Whether each serving thread is pinned to one processor.
    pub pin: bool,
    /// Largest request body answered, bytes.
    pub frame_body_bytes_max: u32,
    /// How long a serving thread busy-polls before it sleeps, microseconds; 0 = never.
    pub spin_us_max: u32,
    /// How long a gateway may leave its replies unread, milliseconds; 0 = no limit.
    pub unread_ms_max: u64,
    /// Most shm lanes at once; 0 = none.
    pub lanes_max: usize,
    /// Largest ring of a shm lane, bytes.
    pub lane_ring_bytes_max: u32,
    /// Share of a shared resource that the processes of one user may take, percent.
    pub user_share_percent: u8,
    /// How long a stopping daemon waits for pending replies, milliseconds.
    pub drain_ms_max: u64,
}

/// Most serving threads unless the configuration sets a number.
const CORES_DEFAULT_MAX: usize = 8;

impl ServeConfig {
    /// The number of serving threads on `cpus` processors with `shards` ingest threads: the configured number, else
    /// the processors that the shards leave, from 1 to 8.
    #[must_use]
    pub fn core_count(&self, cpus: usize, shards: usize) -> usize {
        match self.cores {
            0 => cpus.saturating_sub(shards).clamp(1, CORES_DEFAULT_MAX),
            cores => usize::from(cores),
        }
    }
}

/// Users who may connect to a socket, besides the mode of its file. If both lists are empty, only the mode counts. Else
/// one of them must list the peer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessConfig {
    /// Users, by number or name.
    pub uids: Vec<String>,
    /// Groups, by number or name. A peer's own group counts, and its supplementary groups.
    pub gids: Vec<String>,
}

/// `[admin]`: access to the admin socket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AdminConfig {
    /// Permission bits of the admin socket.
    pub socket_mode: u32,
    /// Users and groups who may administer, if restricted further.
    pub access: AccessConfig,
}

/// `[metrics]`: the metrics page.
#[derive(Clone, Debug, PartialEq)]
pub struct MetricsConfig {
    /// The TCP port; 0 = none.
    pub port: u16,
    /// The address to bind.
    pub listen: IpAddr,
    /// The largest fleet of which the page has every metric of each worker.
    pub detailed_workers_max: usize,
    /// Host names that requests may use, besides IP addresses and `localhost`; `*` = any.
    pub hosts: Vec<String>,
}

impl Default for MetricsConfig {
    fn default() -> Self {
        Self { port: 0, listen: IpAddr::V4(Ipv4Addr::LOCALHOST), detailed_workers_max: 0, hosts: Vec::new() }
    }
}

impl MetricsConfig {
    /// The address and port to bind; `None` = no port.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        (self.port != 0).then(|| SocketAddr::new(self.listen, self.port))
    }

    /// The port at which 127.0.0.1 answers; 0 = none does.
    #[must_use]
    pub fn local_port(&self) -> u16 {
        let is_local = self.listen == IpAddr::V4(Ipv4Addr::LOCALHOST) || self.listen.is_unspecified();
        if is_local { self.port } else { 0 }
    }
}

/// `[http]`: the HTTP port, for clients of Dynamo's standalone indexer and selection service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpConfig {
    /// The TCP port; 0 = none.
    pub port: u16,
    /// The address to bind.
    pub listen: IpAddr,
    /// Whether every client may register, remove and dump workers. The port cannot tell clients apart.
    pub administer: bool,
    /// Host names that requests may use, besides IP addresses and `localhost`; `*` = any.
    pub hosts: Vec<String>,
    /// Allowed hosts of registered workers' endpoints, each a [`HostRule`]. Empty = any host for a caller on the
    /// loopback interface, else the caller's own address.
    pub worker_hosts: Vec<String>,
    /// Largest request body answered, bytes.
    pub body_bytes_max: u64,
    /// Time for the dump of one worker, milliseconds.
    pub dump_worker_ms_max: u64,
}

impl Default for HttpConfig {
    fn default() -> Self {
        let (listen, hosts, worker_hosts) = (IpAddr::V4(Ipv4Addr::LOCALHOST), Vec::new(), Vec::new());
        Self { port: 0, listen, administer: true, hosts, worker_hosts, body_bytes_max: 0, dump_worker_ms_max: 0 }
    }
}

/// `[remote]`: the port for gateways on other hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemoteConfig {
    /// The address and TCP port to bind; `None` = no port.
    pub listen: Option<SocketAddr>,
    /// The daemon's certificate chain, PEM. This and the other files are set if `listen` is.
    pub certificate_file: PathBuf,
    /// The private key of the certificate, PEM.
    pub key_file: PathBuf,
    /// Who may connect: a name and a token on each line.
    pub principals_file: PathBuf,
    /// Most open connections.
    pub connections_max: usize,
}

impl RemoteConfig {
    /// Connections that the port may have at once, half-open ones included; 0 without a port.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.listen.map_or(0, |_| self.connections_max + crate::limits::REMOTE_HALF_OPEN_MAX)
    }
}

/// The format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// Text for people.
    #[default]
    Text,
    /// One JSON object in each line.
    Json,
}

/// `[log]`: the log, on standard error.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogConfig {
    /// The least severe level logged: `off`, `error`, `warn`, `info`, `debug` or `trace`.
    pub level: &'static str,
    /// The format of log lines.
    pub format: LogFormat,
}

/// `[process]`: limits of the process as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessConfig {
    /// The memory budget, bytes; 0 = a share of what the machine or the cgroup allows.
    pub memory_bytes_max: u64,
    /// How long a thread may be in one round of its loop before it counts as stalled, milliseconds.
    pub stalled_ms_max: u64,
}

/// `[sandbox]`: what the process gives up once it has started.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SandboxConfig {
    /// How much it gives up.
    pub mode: Mode,
    /// The configuration file, which a running daemon reads again; `None` = there is none. Not a field of the file.
    pub file: Option<PathBuf>,
}

/// `[ingest]`: how the daemon receives events.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct IngestConfig {
    /// Ingest threads.
    pub shards: u16,
    /// A worker is down once its publisher has been unreachable for this long, milliseconds; 0 = never.
    pub down_after_ms: u64,
    /// A worker that sends nothing for longer is `unproven`, milliseconds; 0 = never.
    pub silence_ms_max: u64,
    /// After this long without a batch a worker is asked whether events were lost, milliseconds; 0 = never.
    pub probe_after_ms: u64,
    /// Most messages received from one publisher and not yet applied; see [`crate::ingest::IngestConfig`].
    pub receive_messages_max: i32,
    /// What the NATS subjects of events begin with.
    pub nats_prefix: String,
    /// The user whose password is in `nats_secret_file`.
    pub nats_user: Option<String>,
    /// A password, or a token.
    pub nats_secret_file: Option<PathBuf>,
    /// Credentials, in place of a secret.
    pub nats_credentials_file: Option<PathBuf>,
    /// Certificates of the authorities that may vouch for NATS servers.
    pub nats_ca_file: Option<PathBuf>,
}

#[cfg(feature = "nats")]
impl IngestConfig {
    /// What connections to the NATS servers of events need.
    ///
    /// # Errors
    /// [`Kind::Config`](crate::error::Kind::Config) if a file cannot be used.
    pub(crate) fn nats_access(&self) -> crate::error::Result<Access> {
        let files = AccessFiles {
            user: self.nats_user.as_deref(),
            secret: self.nats_secret_file.as_deref(),
            credentials: self.nats_credentials_file.as_deref(),
            authorities: self.nats_ca_file.as_deref(),
        };
        Access::read(&self.nats_prefix, &files)
    }
}

/// `[booking]`: lifetimes of bookings and reports, and the prefill model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BookingConfig {
    /// A booking is dropped at this age, seconds.
    pub age_s_max: u64,
    /// How long a session's bookings outlive its last connection, seconds.
    pub session_grace_s: u64,
    /// Whether reported output counts as decode blocks.
    pub track_output_blocks: bool,
    /// Back-off of a worker after its first failure, milliseconds; 0 = none.
    pub back_off_ms: u64,
    /// The longest back-off, milliseconds.
    pub back_off_ms_max: u64,
    /// The age at which a reported load is ignored, milliseconds.
    pub reported_load_ms_max: u64,
    /// How the time of a prefill is estimated.
    pub prefill_model: PrefillModelName,
    /// The fixed model's time for each prefill, microseconds.
    pub prefill_base_us: u64,
    /// The fixed model's time for each computed token, nanoseconds.
    pub prefill_token_ns: u64,
    /// The fixed model's time for each cached token, nanoseconds.
    pub prefill_cached_token_ns: u64,
}

/// How the time of a prefill is estimated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PrefillModelName {
    /// Not at all: a prefill counts in full until a report ends it.
    #[default]
    Off,
    /// By the configured figures.
    Fixed,
    /// By the law that is learnt for the worker.
    Learnt,
}

impl BookingConfig {
    /// The model with its figures.
    #[must_use]
    pub const fn prefill(&self) -> PrefillModel {
        match self.prefill_model {
            PrefillModelName::Off => PrefillModel::Off,
            PrefillModelName::Fixed => PrefillModel::Fixed {
                base_ns: self.prefill_base_us * 1000,
                token_ns: self.prefill_token_ns,
                cached_token_ns: self.prefill_cached_token_ns,
            },
            PrefillModelName::Learnt => PrefillModel::Learnt,
        }
    }
}

/// `[snapshot]`: each worker's blocks on disk, for the next start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SnapshotConfig {
    /// The folder for snapshots; `None` = no snapshots.
    pub dir: Option<PathBuf>,
    /// Time from the end of one round of snapshots to the next, seconds.
    pub every_s: u64,
    /// The age at which the snapshot of a removed worker is deleted, seconds.
    pub keep_s: u64,
    /// Time from the end of one image of the bookings to the next, milliseconds; 0 = one when the daemon stops.
    pub bookings_image_ms: u64,
    /// Whether the start deletes existing snapshots instead of loading them. Not a field of the file: `serve --fresh`.
    pub fresh: bool,
}

/// `[journal]`: decisions with everything each was made from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct JournalConfig {
    /// The folder for its files; `None` = no journal.
    pub dir: Option<PathBuf>,
    /// The share of decisions recorded, 0 to 1.
    pub sample: f64,
    /// The size at which a file is closed, bytes.
    pub file_bytes_max: u64,
    /// Most files kept.
    pub files_max: usize,
    /// Most decisions of one serving thread that wait to be written.
    pub ring_records_max: usize,
    /// Tokens of a prompt for each identity of its prefix; 0 = no identities.
    pub prefix_tokens: u32,
}

impl JournalConfig {
    /// Most ended requests that wait to be written; 0 without a journal.
    #[must_use]
    pub fn ended_waiting_max(&self) -> usize {
        self.dir.as_ref().map_or(0, |_| self.ring_records_max.saturating_mul(crate::limits::JOURNAL_ENDS_PER_RECORD))
    }
}

/// `[traces]`: spans for an OpenTelemetry collector.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TracesConfig {
    /// The collector's URL for traces; `None` = no traces.
    pub endpoint: Option<String>,
    /// The share of requests without a context that are traced, 0 to 1.
    pub sample_ratio: f64,
    /// The name of the service in all spans.
    pub service_name: String,
    /// The name of this daemon among those of the service; `None` = its number.
    pub instance: Option<String>,
    /// The longest time for a request to the collector.
    pub timeout_ms: u64,
    /// Most traced decisions that wait.
    pub queue_max: usize,
}

impl TracesConfig {
    /// Most traced decisions, and ends of traced bookings, that wait; 0 without traces.
    #[must_use]
    pub fn waiting_max(&self) -> usize {
        self.endpoint.as_ref().map_or(0, |_| self.queue_max)
    }
}

/// `[shadow]`: a second policy, which judges decisions and makes none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ShadowConfig {
    /// The share of decisions judged, 0 to 1; 0 = none.
    pub share: f64,
    /// Differences from each space's policy, each `field=value`.
    pub policy: Vec<String>,
}

/// `[policy]`: how workers are chosen.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PolicyConfig {
    /// The policy of spaces without `[space.policy]`.
    pub weights: Policy,
    /// The policy of each space: `[policy]` with the fields of `[space.policy]`.
    pub spaces: Vec<Policy>,
    /// Most requests, of all spaces, that wait for a worker.
    pub queue_requests_max: usize,
    /// Most sessions, of all spaces, bound to a worker.
    pub affinity_sessions_max: usize,
    /// Seed of all random draws; 0 = a random seed at the start.
    pub seed: u64,
}

/// Whether prompts of a space may carry cache salts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Salts {
    /// They may. An engine whose events do not show salts is trusted less.
    #[default]
    Possible,
    /// They do not, so no isolation can be lost.
    None,
}

/// Whether callers of a space's engines can make them announce held blocks again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FullReports {
    /// They can. A chain announced again is not counted again.
    #[default]
    Possible,
    /// They cannot. A chain announced again is another copy.
    None,
}

/// `[[space]]`: the workers whose blocks may be compared.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SpaceConfig {
    /// The model's name, as gateways send it.
    pub model: String,
    /// The namespace; empty = the default namespace.
    pub namespace: String,
    /// The role of its workers.
    pub role: PoolRole,
    /// Tokens in a block; 0 = learnt from the first worker that shows it.
    pub block_size: u32,
    /// How the tokens of consecutive blocks relate.
    pub window: Window,
    /// Whether prompts may carry cache salts.
    pub salts: Salts,
    /// Whether callers can ask for full reports.
    pub full_reports: FullReports,
    /// Memory of its index over all shards, bytes; 0 = no ceiling.
    pub memory_bytes_max: u64,
    /// Whether the caches of workers without events are predicted from what is booked on them.
    pub approximate: bool,
    /// How long a prediction holds unless it is booked again, seconds.
    pub approximate_ttl_s: u64,
    /// Blocks predicted for a worker whose capacity is not known.
    pub approximate_blocks_max: u64,
    /// Memory of the predictions, bytes.
    pub approximate_memory_bytes_max: u64,
}

impl SpaceConfig {
    /// The hash scheme, where it is configured.
    #[must_use]
    pub const fn scheme(&self) -> Option<Scheme> {
        match self.block_size {
            0 => None,
            block_size => Some(Scheme { block_size, window: self.window }),
        }
    }
}

/// `[[worker]]`: one data-parallel rank of an engine.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerConfig {
    /// The engine and rank.
    pub worker: Worker,
    /// The worker's space: an index of [`Config::spaces`].
    pub space: SpaceId,
    /// A short name for people.
    pub name: String,
    /// The source of its events; `None` = it publishes none.
    pub events: Option<EventSource>,
    /// ZeroMQ endpoint of its load reports; `None` = it sends none.
    pub load: Option<Endpoint>,
    /// KV blocks in device memory; 0 = not known.
    pub capacity_blocks: u64,
    /// Most blocks remembered, over all tiers.
    pub blocks_max: u64,
    /// Tokens that it batches in one step.
    pub batched_tokens_max: u64,
    /// Its own figures of the prefill model, if any.
    pub prefill: PrefillFigures,
    /// The class of workers that are alike.
    pub engine_class: String,
    /// The constants of the class before they are learnt.
    pub engine_preset: Option<&'static EnginePreset>,
    /// The kind of device.
    pub device_class: DeviceClass,
    /// Its throughput relative to a CPU worker's 1.
    pub weight: f64,
    /// Labels that requests may require or prefer.
    pub taints: Vec<String>,
    /// LoRA adapters that it has loaded.
    pub loras: Vec<String>,
    /// [`WorkerState::Draining`] if the record says `draining`, else [`WorkerState::Joining`].
    pub state: WorkerState,
}

impl WorkerConfig {
    /// What is believed of its prefills before they are learnt.
    #[must_use]
    pub fn prefill_prior(&self) -> Option<PrefillLaw> {
        self.engine_preset.map(|preset| preset.law.prefill)
    }
}
