//! The file as it is written. Unknown fields are refused, so that a typing error does not go unseen.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;

/// The whole file.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawConfig {
    /// `[listen]`
    pub listen: RawListen,
    /// `[admin]`
    pub admin: RawAdmin,
    /// `[daemon]`
    pub daemon: RawDaemon,
    /// `[[engine]]`
    pub engine: Vec<RawEngine>,
    /// `[engines]`
    pub engines: RawEngines,
    /// `[kubernetes]`
    pub kubernetes: RawKubernetes,
    /// `[tokens]`
    pub tokens: RawTokens,
    /// `[bounds]`
    pub bounds: RawBounds,
    /// `[deadlines]`
    pub deadlines: RawDeadlines,
    /// `[retry]`
    pub retry: RawRetry,
    /// `[forward]`
    pub forward: RawForward,
    /// `[callers]`
    pub callers: RawCallers,
    /// `[objectives]`
    pub objectives: BTreeMap<String, i32>,
    /// `[pick]`
    pub pick: RawPick,
    /// `[sandbox]`
    pub sandbox: RawSandbox,
    /// `[log]`
    pub log: RawLog,
}

/// `[listen]`
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawListen {
    /// The address for callers.
    pub address: Option<String>,
    /// The certificate chain.
    pub tls_cert: Option<PathBuf>,
    /// The private key.
    pub tls_key: Option<PathBuf>,
}

/// `[admin]`
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawAdmin {
    /// The address; an empty text = off.
    pub address: Option<String>,
}

/// `[daemon]`
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawDaemon {
    /// The socket of a daemon that runs already.
    pub socket: Option<PathBuf>,
    /// The program of the daemon that the gateway runs.
    pub program: Option<PathBuf>,
    /// The loopback port of that daemon's metrics.
    pub metrics_port: Option<u16>,
    /// How that daemon chooses workers.
    pub mode: Option<String>,
    /// The namespace of the spaces.
    pub namespace: Option<String>,
    /// How long a question may take.
    pub timeout_ms: Option<u64>,
    /// Send hashes of blocks in place of tokens.
    pub hash_locally: Option<bool>,
}

/// `[kubernetes]`
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawKubernetes {
    /// `[NAMESPACE/]NAME` of a service.
    pub service: Option<String>,
    /// `[NAMESPACE/]NAME` of an InferencePool.
    pub pool: Option<String>,
    /// Name or number of each rank's port of the service.
    pub ports: Vec<String>,
    /// The API server, outside of its cluster.
    pub url: Option<String>,
    /// A file with its bearer token.
    pub token_file: Option<PathBuf>,
    /// A PEM file with its authorities.
    pub ca_file: Option<PathBuf>,
}

/// `[tokens]`
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawTokens {
    /// URLs of servers that only render.
    pub renderers: Vec<String>,
    /// Whether renderers are asked, those that only render and the engines' own.
    pub render: Option<bool>,
    /// Whether `/tokenize` is used.
    pub tokenize: Option<bool>,
    /// The longest wait for a renderer.
    pub timeout_ms: Option<u64>,
    /// Bytes of the cache of rendered prompts.
    pub cache_bytes_max: Option<u64>,
    /// `[[tokens.local]]`
    pub local: Vec<RawLocal>,
}

/// `[[tokens.local]]`
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawLocal {
    /// The base model, as the engines name it.
    pub model: Option<String>,
    /// The folder of its tokenizer.
    pub folder: Option<PathBuf>,
    /// Whether local tokens come before the engine's, where they are proved.
    pub prefer: Option<bool>,
}

/// `[[engine]]`
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawEngine {
    /// `http(s)://host:port`
    pub url: Option<String>,
    /// The daemon's worker id.
    pub id: Option<u64>,
    /// A file with the engine's API key.
    pub api_key_file: Option<PathBuf>,
    /// `any`, `prefill` or `decode`.
    pub role: Option<String>,
    /// The name in its certificate.
    pub tls_name: Option<String>,
    /// Tokens in a block.
    pub block_size: Option<u32>,
    /// The port of SGLang's bootstrap server.
    pub bootstrap_port: Option<u16>,
    /// `[[engine.rank]]`
    pub rank: Vec<RawRank>,
}

/// `[[engine.rank]]`
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawRank {
    /// The rank.
    pub rank: u32,
    /// Where it publishes.
    pub endpoint: String,
    /// Where lost events are asked for again.
    pub replay: Option<String>,
    /// The topic of its events.
    #[serde(default)]
    pub topic: String,
}

/// `[engines]`
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawEngines {
    /// Certificates of authorities.
    pub ca_file: Option<PathBuf>,
    /// A file with the API key of all engines that have none of their own.
    pub api_key_file: Option<PathBuf>,
}

/// `[bounds]`
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawBounds {
    /// Bytes of memory of the process.
    pub memory_bytes_max: Option<u64>,
    /// Connections of callers.
    pub connections_max: Option<u64>,
    /// Requests under way.
    pub requests_max: Option<u64>,
    /// Bytes of a body.
    pub body_bytes_max: Option<u64>,
    /// Bytes of all bodies.
    pub bodies_bytes_max: Option<u64>,
    /// Bytes of headers.
    pub header_bytes_max: Option<u64>,
    /// Headers.
    pub headers_max: Option<u64>,
}

/// `[deadlines]`
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawDeadlines {
    /// Headers.
    pub header_ms: Option<u64>,
    /// Body.
    pub body_ms: Option<u64>,
    /// First byte of a stream.
    pub first_byte_ms: Option<u64>,
    /// The whole request.
    pub total_ms: Option<u64>,
    /// A caller that takes nothing.
    pub stall_ms: Option<u64>,
    /// After SIGTERM.
    pub drain_ms: Option<u64>,
}

/// `[retry]`
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawRetry {
    /// Engines tried.
    pub attempts_max: Option<u64>,
    /// Bytes of a body that is sent again.
    pub body_bytes_max: Option<u64>,
}

/// `[forward]`
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawForward {
    /// `refuse` or `pass`.
    pub unknown_paths: Option<String>,
    /// Beginnings of paths.
    pub passed_prefixes: Vec<String>,
    /// Ask streams for their usage.
    pub include_usage: Option<bool>,
    /// `pass`, `strip` or `refuse`.
    pub kv_cache_report_mode: Option<String>,
    /// Send ids in place of text.
    pub token_ids: Option<bool>,
    /// Response headers.
    pub worker_headers: Option<bool>,
}

/// `[callers]`
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawCallers {
    /// The file of keys.
    pub keys_file: Option<PathBuf>,
}

/// `[pick]`
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawPick {
    /// A Unix socket.
    pub socket: Option<PathBuf>,
    /// The mode bits of both sockets, in octal.
    pub socket_mode: Option<String>,
    /// A loopback address.
    pub address: Option<String>,
    /// A Unix datagram socket.
    pub log_socket: Option<PathBuf>,
    /// A UDP address on the loopback interface.
    pub log_address: Option<String>,
    /// How long a pick is booked.
    pub booking_ms_max: Option<u64>,
}

/// `[sandbox]`
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawSandbox {
    /// How much the gateway and its daemon give up.
    pub mode: Option<String>,
}

/// `[log]`
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawLog {
    /// The least severe level.
    pub level: Option<String>,
}

/// Reads the text of a file.
pub(super) fn parse(text: &str) -> Result<RawConfig, String> {
    toml::from_str(text)
        .map_err(|error| format!("{}; --example-config prints every field with its type", error.to_string().trim_end()))
}
