//! The configuration: a TOML file and flags become one checked [`Config`].
//!
//! ```text
//! raw.rs         the file as it is written: every field optional, unknown fields refused
//! check.rs       raw fields become a Config, or a list of problems that name the field and the remedy
//! kubernetes.rs  the same for the table of a cluster's pods
//! example.rs     a file with every field, its default and its description
//! ```

mod check;
mod example;
mod kubernetes;
mod raw;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvrouted::client;
use kvrouted::sandbox::Mode;

pub use check::EngineEntry;
pub use example::example;
pub use kubernetes::KubernetesConfig;
pub use raw::{RawConfig, RawKubernetes};

use crate::tokens::LocalFolder;

/// What the flags of the command line set. They win over the file.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    /// `--engine`, each `URL` or `ID=URL`.
    pub engines: Vec<String>,
    /// `--listen`
    pub listen: Option<String>,
    /// `--admin`
    pub admin: Option<String>,
    /// `--socket`
    pub socket: Option<PathBuf>,
    /// `--kvrouted`
    pub program: Option<PathBuf>,
    /// `--api-key-file`
    pub api_key_file: Option<PathBuf>,
    /// `--sandbox`
    pub sandbox: Option<String>,
    /// `--log-level`
    pub log_level: Option<String>,
    /// `--kubernetes-…`
    pub kubernetes: RawKubernetes,
}

/// A checked configuration.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where callers connect.
    pub listen: Listen,
    /// Where the operator's endpoints are; `None` = nowhere.
    pub admin: Option<SocketAddr>,
    /// The daemon's socket; `None` = the gateway runs a daemon of its own.
    pub socket: Option<PathBuf>,
    /// The daemon's program, if the gateway runs one.
    pub daemon_program: Option<PathBuf>,
    /// The loopback port of the metrics of the daemon that the gateway runs; 0 = none.
    pub daemon_metrics_port: u16,
    /// The memory budget of the daemon that the gateway runs, bytes; 0 = the daemon's own default. Not configured: it
    /// comes from the division of the machine's memory.
    pub daemon_memory_bytes_max: u64,
    /// How the daemon that the gateway runs chooses workers.
    pub daemon_mode: client::Mode,
    /// How the daemon is asked.
    pub questions: Questions,
    /// Where the tokens of prompts come from.
    pub tokens: Tokens,
    /// The engines; worker ids are unique.
    pub engines: Vec<EngineEntry>,
    /// The pods that are the engines, in place of `engines`.
    pub kubernetes: Option<KubernetesConfig>,
    /// The key of engines that are pods.
    pub engines_key_file: Option<PathBuf>,
    /// A file with certificates of the authorities that the engines' certificates come from.
    pub engines_ca: Option<PathBuf>,
    /// Bounds.
    pub bounds: Bounds,
    /// Deadlines.
    pub deadlines: Deadlines,
    /// Retries.
    pub retry: Retry,
    /// What the gateway does with requests and replies.
    pub forward: Forward,
    /// The file of caller keys.
    pub caller_keys: Option<PathBuf>,
    /// The priority of each objective that callers may name.
    pub objectives: BTreeMap<String, i32>,
    /// The pick port.
    pub pick: PickPort,
    /// How much the gateway, and the daemon that it runs, give up once they have started.
    pub sandbox: Mode,
    /// The least severe level logged.
    pub log_level: String,
}

/// How the daemon is asked.
#[derive(Clone, Debug)]
pub struct Questions {
    /// The namespace of the spaces; `None` = the only one of each model.
    pub namespace: Option<String>,
    /// How long a question may take.
    pub timeout: Duration,
    /// Whether hashes of blocks are sent in place of tokens.
    pub hash_locally: bool,
}

/// Where the tokens of prompts come from.
#[derive(Clone, Debug)]
pub struct Tokens {
    /// URLs of servers that only render.
    pub renderers: Vec<String>,
    /// Whether renderers are asked, those that only render and the engines' own.
    pub uses_renderer: bool,
    /// Whether `/tokenize` is used where no renderer is.
    pub uses_tokenize: bool,
    /// The longest wait for a renderer.
    pub timeout: Duration,
    /// Bytes of the cache of rendered prompts.
    pub cache_bytes_max: u64,
    /// Folders of local tokenizers, at most one for each model.
    pub local: Vec<LocalFolder>,
}

/// Where callers connect.
#[derive(Clone, Debug)]
pub struct Listen {
    /// The address.
    pub address: SocketAddr,
    /// Certificate and key; `None` = no TLS.
    pub tls: Option<TlsFiles>,
}

/// A certificate and its key, as PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate chain.
    pub cert: PathBuf,
    /// The private key.
    pub key: PathBuf,
}

/// Bounds of what callers may hold.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Bytes of memory of the process; 0 = a share of what the machine or the cgroup has.
    pub memory_bytes_max: u64,
    /// Connections of callers.
    pub connections_max: usize,
    /// Requests under way.
    pub requests_max: usize,
    /// Bytes of one body.
    pub body_bytes_max: usize,
    /// Bytes of all bodies that are held.
    pub bodies_bytes_max: usize,
    /// Bytes of a request's headers.
    pub header_bytes_max: usize,
    /// Headers of a request.
    pub headers_max: usize,
    /// Picks of other proxies whose end has not come. Not configured: the memory budget may lower it.
    pub picks_max: usize,
}

/// Deadlines.
#[derive(Clone, Copy, Debug)]
pub struct Deadlines {
    /// From the first byte of a request, or from the connection's start, to the end of the headers; also how long a
    /// connection may be idle.
    pub header: Duration,
    /// From the end of the headers to the end of the body.
    pub body: Duration,
    /// From the request to the first byte of a streamed reply.
    pub first_byte: Duration,
    /// From the request to the end of the reply.
    pub total: Duration,
    /// For how long a caller may take nothing of its reply.
    pub stall: Duration,
    /// For how long requests may go on after SIGTERM.
    pub drain: Duration,
}

/// Retries on another engine, before the first byte of the reply.
#[derive(Clone, Copy, Debug)]
pub struct Retry {
    /// Engines that one request may be sent to.
    pub attempts_max: usize,
    /// Bytes of a body up to which a request is sent again.
    pub body_bytes_max: usize,
}

/// What becomes of `kv_cache_report_mode` in a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportMode {
    /// It goes on to the engine.
    Pass,
    /// It is taken out.
    Strip,
    /// The request is refused.
    Refuse,
}

/// What the gateway does with requests and replies.
#[derive(Clone, Debug)]
pub struct Forward {
    /// Whether paths that the gateway does not know go to any usable engine.
    pub passes_unknown_paths: bool,
    /// Beginnings of paths that go to any usable engine even so.
    pub passed_prefixes: Vec<String>,
    /// Whether streams are asked for their usage.
    pub asks_usage: bool,
    /// What becomes of `kv_cache_report_mode`.
    pub report_mode: ReportMode,
    /// Whether token ids take the place of text.
    pub sends_token_ids: bool,
    /// Whether replies name their worker and its overlap.
    pub tells_worker: bool,
}

/// The pick port.
#[derive(Clone, Debug)]
pub struct PickPort {
    /// Its Unix socket.
    pub socket: Option<PathBuf>,
    /// The mode bits of its Unix socket and of the log socket.
    pub socket_mode: u32,
    /// Its loopback address.
    pub listen: Option<SocketAddr>,
    /// The Unix datagram socket for access logs.
    pub log_socket: Option<PathBuf>,
    /// The loopback UDP address for access logs.
    pub log_listen: Option<SocketAddr>,
    /// For how long a pick is booked if its end does not come.
    pub booking: Duration,
}

/// One problem of a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The field, as `table.field`, or a flag; empty for a syntax error.
    pub field: String,
    /// What is wrong and what to write instead.
    pub message: String,
}

/// Every problem of a configuration; never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problems {
    /// The file, or `command line`.
    pub source: String,
    /// The problems.
    pub list: Vec<Problem>,
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, Problem { field, message }) in self.list.iter().enumerate() {
            if at > 0 {
                f.write_str("\n")?;
            }
            match field.is_empty() {
                true => write!(f, "{}: {message}", self.source)?,
                false => write!(f, "{}: {field}: {message}", self.source)?,
            }
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

/// Reads the file, if there is one, and applies the flags.
///
/// # Errors
/// Every problem of file and flags.
pub fn load(file: Option<&Path>, flags: &Flags) -> Result<Config, Problems> {
    let source = file.map_or_else(|| "command line".into(), |path| path.display().to_string());
    let text = file.map(std::fs::read_to_string).transpose().map_err(|error| {
        problem(&source, format!("the file cannot be read: {error}; name a readable TOML file with --config"))
    })?;
    read(&source, text.as_deref().unwrap_or_default(), flags)
}

/// The same of the file's text.
///
/// # Errors
/// Every problem of text and flags.
#[doc(hidden)]
pub fn read(source: &str, text: &str, flags: &Flags) -> Result<Config, Problems> {
    let raw = raw::parse(text).map_err(|message| problem(source, message))?;
    check::check(raw, flags).map_err(|list| Problems { source: source.to_owned(), list })
}

fn problem(source: &str, message: String) -> Problems {
    Problems { source: source.to_owned(), list: vec![Problem { field: String::new(), message }] }
}
