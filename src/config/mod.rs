//! The daemon's configuration: one TOML file, a default for every field, two steps.
//!
//! The first step reads the document (or the flags that stand in for one) into a draft, guided by one
//! table of fields (`fields`) that also holds every default, bound, unit and description; the second
//! checks the draft as a whole and makes the [`Config`] the daemon runs on. Both steps list everything they
//! find wrong before anything is refused.

mod check;
mod document;
mod example;
mod field;
mod fields;
mod load;
mod problem;
mod reload;
mod values;
mod worker_files;

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use crate::endpoint::Endpoint;
use crate::fleet::{DeviceClass, EventSource, PoolRole, WorkerState};
use crate::ids::{Scheme, SpaceId, Window, Worker};
use crate::load::{PrefillFigures, PrefillModel};

use crate::route::Policy;

pub use check::admin_socket_beside;
pub use example::example;
pub use load::{Flags, Setting, load, parse, policy_with, socket_default};
pub use problem::{Location, Problem, Problems, nearest};
pub use values::HostRule;
pub use worker_files::{FileFormat, WorkerPatch, parse_worker, parse_workers, rank_of};

/// Everything the daemon is told at its start, validated.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Config {
    /// How gateways reach the daemon.
    pub serve: ServeConfig,
    /// Who may administer.
    pub admin: AdminConfig,
    /// The metrics page.
    pub metrics: MetricsConfig,
    /// The HTTP port.
    pub http: HttpConfig,
    /// The log.
    pub log: LogConfig,
    /// How events are taken in.
    pub ingest: IngestConfig,
    /// How long bookings live.
    pub booking: BookingConfig,
    /// What a restart need not forget.
    pub snapshot: SnapshotConfig,
    /// What is kept of decisions.
    pub journal: JournalConfig,
    /// What judges decisions beside the policy.
    pub shadow: ShadowConfig,
    /// How workers are chosen.
    pub policy: PolicyConfig,
    /// The spaces; a [`SpaceId`] is a place in this list.
    pub spaces: Vec<SpaceConfig>,
    /// Workers that come and go with files.
    pub discovery: DiscoveryConfig,
    /// What a relay does; the daemon does not look at it.
    pub relay: RelayConfig,
    /// The workers, in the order they were named, a record of several ranks as several.
    pub workers: Vec<WorkerConfig>,
    /// The workers that are named by their engine's URL.
    pub servers: Vec<ServerConfig>,
}

/// `[relay]`: where a relay says once more what its one worker says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RelayConfig {
    /// Where it publishes, to be bound.
    pub endpoint: String,
    /// Where it replays, to be bound.
    pub replay: String,
    /// How long it may say nothing, milliseconds.
    pub heartbeat_ms: u64,
    /// Batches kept for replays.
    pub buffer_batches_max: usize,
    /// Bytes of those batches.
    pub buffer_bytes_max: usize,
}

/// `[discovery]`: workers that come and go with files.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DiscoveryConfig {
    /// A file of workers or a folder of such files; `None` = none.
    pub path: Option<PathBuf>,
    /// How long the workers of a file that has gone stay, milliseconds.
    pub grace_ms: u64,
    /// How often the files are looked at even if nothing tells of a change, milliseconds.
    pub rescan_ms: u64,
}

/// The workers that one source names.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NamedWorkers {
    /// By what they publish.
    pub workers: Vec<WorkerConfig>,
    /// By their engine's URL.
    pub servers: Vec<ServerConfig>,
}

/// An engine that says itself where its ranks publish.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerConfig {
    /// `http://host:port`.
    pub url: String,
    /// Its first rank, as far as it is known without asking.
    pub worker: WorkerConfig,
}

/// Which interface to the kernel carries the connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoSetting {
    /// What costs least: epoll.
    #[default]
    Auto,
    /// io_uring or nothing.
    Uring,
    /// epoll.
    Epoll,
}

impl IoSetting {
    /// The names used in the configuration and on the command line.
    pub const NAMES: [&'static str; 3] = ["auto", "uring", "epoll"];
}

/// `[serve]`: how gateways reach the daemon. The units are the names'; the field table says what follows
/// from each value.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServeConfig {
    /// Where gateways connect.
    pub socket: PathBuf,
    /// Where administration is answered.
    pub admin_socket: PathBuf,
    /// Permission bits of the routing socket.
    pub socket_mode: u32,
    /// Who may route, beside what those bits say.
    pub access: AccessConfig,
    /// How long a frame that has begun, or hello, may take, milliseconds; 0 = for ever.
    pub frame_timeout_ms: u64,
    /// Which kernel interface carries the connections.
    pub io: IoSetting,
    /// Serving threads; 0 = as [`ServeConfig::core_count`] says.
    pub cores: u16,
    /// Keep each serving thread on one processor.
    pub pin: bool,
    /// Largest request body answered, bytes.
    pub frame_body_bytes_max: u32,
    /// How long a serving thread looks for requests before it sleeps, microseconds; 0 = not at all.
    pub spin_us_max: u32,
    /// How long a gateway may leave its replies unread, milliseconds; 0 = for ever.
    pub unread_ms_max: u64,
    /// Lanes that may be open; 0 = none.
    pub lanes_max: usize,
    /// Largest ring of a lane, bytes.
    pub lane_ring_bytes_max: u32,
    /// How much of what there is for all the processes of one user may take, percent.
    pub user_share_percent: u8,
    /// How long a stop waits for replies under way, milliseconds.
    pub drain_ms_max: u64,
}

/// Serving threads are not multiplied beyond this unless the configuration names a number.
const CORES_DEFAULT_MAX: usize = 8;

impl ServeConfig {
    /// How many serving threads to start where `cpus` processors may be used and `shards` ingest threads
    /// run: the configured number, else what the shards leave, from 1 to 8.
    #[must_use]
    pub fn core_count(&self, cpus: usize, shards: usize) -> usize {
        match self.cores {
            0 => cpus.saturating_sub(shards).clamp(1, CORES_DEFAULT_MAX),
            cores => usize::from(cores),
        }
    }
}

/// Which users may connect to a socket, beside what the mode of its file says. With both lists empty that mode decides
/// alone; else a peer has to be named in one of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessConfig {
    /// Users, each a number or a name.
    pub uids: Vec<String>,
    /// Groups, each a number or a name; a peer is in its own group and in its supplementary ones.
    pub gids: Vec<String>,
}

/// `[admin]`: who may administer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AdminConfig {
    /// Permission bits of the admin socket.
    pub socket_mode: u32,
    /// Who may administer, beside what those bits say.
    pub access: AccessConfig,
}

/// `[metrics]`: the metrics page.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MetricsConfig {
    /// TCP port on the loopback interface; 0 = none.
    pub port: u16,
    /// Names by which it may be asked, beside IP addresses and `localhost`; `*` = by any.
    pub hosts: Vec<String>,
}

/// `[http]`: the HTTP port, for clients of Dynamo's standalone indexer and selection service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpConfig {
    /// TCP port; 0 = none.
    pub port: u16,
    /// The address it is bound to.
    pub listen: IpAddr,
    /// Whether workers may be registered, removed and dumped by it, by whoever reaches it: it knows nobody's name.
    pub administer: bool,
    /// Names by which it may be asked, beside IP addresses and `localhost`; `*` = by any.
    pub hosts: Vec<String>,
    /// Where a worker that is registered by it may publish, each a [`HostRule`]. Empty = anywhere where the caller is on
    /// the loopback interface, else at the caller's own address.
    pub worker_hosts: Vec<String>,
    /// Largest request body answered, bytes.
    pub body_bytes_max: u64,
    /// How long the dump of one worker may take, milliseconds.
    pub dump_worker_ms_max: u64,
}

impl Default for HttpConfig {
    fn default() -> Self {
        let (listen, hosts, worker_hosts) = (IpAddr::V4(Ipv4Addr::LOCALHOST), Vec::new(), Vec::new());
        Self { port: 0, listen, administer: true, hosts, worker_hosts, body_bytes_max: 0, dump_worker_ms_max: 0 }
    }
}

/// What a log line looks like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// `[log]`: the log, on standard error.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogConfig {
    /// The least severe level written: `off`, `error`, `warn`, `info`, `debug` or `trace`.
    pub level: &'static str,
    /// What a line looks like.
    pub format: LogFormat,
}

/// `[ingest]`: how events are taken in.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct IngestConfig {
    /// Ingest threads.
    pub shards: u16,
    /// A worker whose publisher has been gone, or not been reached, for this long is down, milliseconds; 0 = never.
    pub down_after_ms: u64,
    /// A worker silent for longer is no longer believed, milliseconds; 0 = never.
    pub silence_ms_max: u64,
    /// A worker quiet for so long is asked whether its last events were lost, milliseconds; 0 = never.
    pub probe_after_ms: u64,
    /// Messages received from one publisher and not yet applied; see [`crate::ingest::IngestConfig`].
    pub receive_messages_max: i32,
}

/// `[booking]`: how long bookings live.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BookingConfig {
    /// A booking is dropped at this age, seconds.
    pub age_s_max: u64,
    /// A session's bookings outlive its last connection by this, seconds.
    pub session_grace_s: u64,
    /// Whether output counts as decode blocks.
    pub track_output_blocks: bool,
    /// How long a worker is left alone after its first failure, milliseconds; 0 = not at all.
    pub back_off_ms: u64,
    /// The longest that grows to, milliseconds.
    pub back_off_ms_max: u64,
    /// The age at which a reported load is forgotten, milliseconds.
    pub reported_load_ms_max: u64,
    /// Whether and how it is reckoned how long a prefill takes.
    pub prefill_model: PrefillModelName,
    /// Of every prefill, microseconds; for a fixed model.
    pub prefill_base_us: u64,
    /// Of a token that is computed, nanoseconds; for a fixed model.
    pub prefill_token_ns: u64,
    /// Of a token that is cached, nanoseconds; for a fixed model.
    pub prefill_cached_token_ns: u64,
}

/// How long a prefill is reckoned to take, by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PrefillModelName {
    /// It counts in full until it is done.
    #[default]
    Off,
    /// As the configuration says.
    Fixed,
    /// As each worker's prefills before took.
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

/// `[snapshot]`: what a restart need not forget.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SnapshotConfig {
    /// Where snapshots are kept; `None` = nowhere.
    pub dir: Option<PathBuf>,
    /// Time from the end of one round of snapshots to the next, seconds.
    pub every_s: u64,
    /// The age at which the snapshot of a worker that is gone is removed, seconds.
    pub keep_s: u64,
    /// Whether what is there at the start is removed and not loaded. Never in a file: `serve --fresh` says it.
    pub fresh: bool,
}

/// `[journal]`: decisions with all they were made from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct JournalConfig {
    /// Where it is kept; `None` = nowhere.
    pub dir: Option<PathBuf>,
    /// The share of decisions that are kept, 0 to 1.
    pub sample: f64,
    /// A file is ended once it has so many bytes.
    pub file_bytes_max: u64,
    /// Files kept.
    pub files_max: usize,
    /// Decisions of one core that may wait to be written.
    pub ring_records_max: usize,
}

/// `[shadow]`: a second policy, which decides nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ShadowConfig {
    /// The share of decisions that it judges, 0 to 1; 0 = none.
    pub share: f64,
    /// What differs from each space's policy, `field=value` each.
    pub policy: Vec<String>,
}

/// `[policy]`: how workers are chosen.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PolicyConfig {
    /// How, in spaces that say nothing else.
    pub weights: Policy,
    /// How, by space: `[space.policy]` over `[policy]`.
    pub spaces: Vec<Policy>,
    /// Requests of all spaces that may wait for a worker.
    pub queue_requests_max: usize,
    /// Sessions of all spaces that may be bound to a worker.
    pub affinity_sessions_max: usize,
    /// Seed of the draws between equal costs; 0 = drawn at the start.
    pub seed: u64,
}

/// Whether prompts of a space can carry cache salts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Salts {
    /// They can; an engine whose wire does not tell is believed less.
    #[default]
    Possible,
    /// None does: no isolation can be lost.
    None,
}

/// Whether callers of a space's engines can have them announce blocks once more that are held already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FullReports {
    /// They can; a chain that is announced again is not counted again.
    #[default]
    Possible,
    /// Nobody can: a chain that is announced again is one more copy.
    None,
}

/// `[[space]]`: prompts and blocks that may be compared.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SpaceConfig {
    /// The model, as gateways say it.
    pub model: String,
    /// What else separates it; empty = the default namespace.
    pub namespace: String,
    /// Which pool it is.
    pub role: PoolRole,
    /// Tokens per block; 0 = learnt from the first worker that shows it.
    pub block_size: u32,
    /// How blocks' tokens lie.
    pub window: Window,
    /// Whether prompts can be salted.
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
    /// Who it is.
    pub worker: Worker,
    /// The space it serves: a place in [`Config::spaces`].
    pub space: SpaceId,
    /// A short name for people.
    pub name: String,
    /// Where its events come from; `None` = it publishes none.
    pub events: Option<EventSource>,
    /// ZeroMQ endpoint where it says how busy it is; `None` = it does not.
    pub load: Option<Endpoint>,
    /// KV blocks its device holds; 0 = not known.
    pub capacity_blocks: u64,
    /// Blocks bound for it at most, over all tiers.
    pub blocks_max: u64,
    /// Tokens it batches in one step.
    pub batched_tokens_max: u64,
    /// What a prefill takes on it, where it is not as on all.
    pub prefill: PrefillFigures,
    /// What it computes on.
    pub device_class: DeviceClass,
    /// Its throughput relative to a CPU worker's 1.
    pub weight: f64,
    /// Labels that constraints match.
    pub taints: Vec<String>,
    /// LoRA adapters it has loaded.
    pub loras: Vec<String>,
    /// [`WorkerState::Joining`], or [`WorkerState::Draining`] where the file says so.
    pub state: WorkerState,
}
