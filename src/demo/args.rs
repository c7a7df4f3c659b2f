//! The command lines of the demo and of the processes it starts.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

use super::engine::TIME_FACTOR;
use crate::route::Mode;

/// `kvrouted demo`: daemon, simulated engines and gateway; the same requests under one policy after another.
#[derive(Clone, Debug, Args)]
pub struct DemoArgs {
    /// Seed of the generated workload and all its tokens.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Number of simulated engines.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub workers: u32,
    /// Modes to compare, each for all requests and from empty caches: kv, load-aware, least-loaded, power-of-two,
    /// round-robin, random, device-aware-weighted, lmetric, latency.
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = parse_policy, default_value = POLICIES_DEFAULT)]
    pub policies: Vec<Mode>,
    /// Requests under each policy [default: 1500 generated ones, or 600 of a trace].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub requests: Option<u32>,
    /// Replay this Mooncake trace (each line a JSON object: timestamp, input_length, output_length, hash_ids).
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
    /// Keep sockets and logs in this folder, which must not exist or be empty.
    #[arg(long, value_name = "DIR")]
    pub keep: Option<PathBuf>,
}

/// `kvrouted demo-engine`: one simulated engine. Runs until its standard input closes.
#[derive(Clone, Debug, Args)]
pub struct EngineArgs {
    /// The Unix socket for requests.
    #[arg(long)]
    pub link: PathBuf,
    /// The file for published batches, a JSON object in each line.
    #[arg(long)]
    pub log: PathBuf,
    /// Capacity of its cache in KV blocks.
    #[arg(long)]
    pub capacity_blocks: usize,
    /// Seconds of its time in a second.
    #[arg(long, default_value_t = TIME_FACTOR, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub time_factor: u16,
}

/// `kvrouted demo-gateway`: replays the workload through the daemon. Runs until the workload is complete or its
/// standard input closes.
#[derive(Clone, Debug, Args)]
pub struct GatewayArgs {
    /// The daemon's socket.
    #[arg(long)]
    pub socket: PathBuf,
    /// An engine as `ID=PATH` of its Unix socket; repeatable.
    #[arg(long = "engine", value_name = "ID=PATH", value_parser = parse_engine)]
    pub engines: Vec<(u64, PathBuf)>,
    /// The daemon's metrics port on the loopback interface, if it has one.
    #[arg(long)]
    pub metrics_port: Option<u16>,
    /// The file for the daemon's replies, a JSON object in each line.
    #[arg(long)]
    pub log: PathBuf,
    /// Most requests in flight at once. They start as they arrive.
    #[arg(long, default_value_t = 128)]
    pub in_flight: usize,
    /// As for `demo`.
    #[arg(long)]
    pub seed: u64,
    /// As for `demo`.
    #[arg(long)]
    pub requests: u32,
    /// As for `demo`.
    #[arg(long, value_delimiter = ',', value_parser = parse_policy)]
    pub policies: Vec<Mode>,
    /// As for `demo`.
    #[arg(long)]
    pub trace: Option<PathBuf>,
}

/// `kvrouted demo-daemon`: becomes `kvrouted ARGS`, killed when the process that started it dies.
#[derive(Clone, Debug, Args)]
pub struct DaemonArgs {
    /// Process id of the demo.
    #[arg(long)]
    pub parent: i32,
    /// The daemon's own command line.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<OsString>,
}

fn parse_engine(text: &str) -> Result<(u64, PathBuf), String> {
    let (id, path) = text.split_once('=').ok_or("expected ID=PATH")?;
    Ok((id.parse().map_err(|error| format!("{id:?} is not a worker id: {error}"))?, path.into()))
}

/// The modes compared by default: one that ignores caches, Dynamo's rule, and the default policy.
const POLICIES_DEFAULT: &str = "round-robin,kv,latency";

/// Reads a mode.
///
/// # Errors
/// The list of modes, for an unknown name and for modes without a use here: the demo pins no request, and its engines
/// publish events, so nothing needs to be predicted.
fn parse_policy(text: &str) -> Result<Mode, String> {
    let shown = |mode: &&Mode| !matches!(mode, Mode::Direct | Mode::Approximate);
    let named = Mode::ALL.iter().filter(shown).find(|mode| mode.name() == text);
    named.copied().ok_or_else(|| {
        let names: Vec<_> = Mode::ALL.iter().filter(shown).map(|mode| mode.name()).collect();
        format!("expected one of {}", names.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_read_by_name_except_those_without_a_use() {
        assert_eq!(parse_policy("lmetric"), Ok(Mode::Lmetric));
        assert!(POLICIES_DEFAULT.split(',').all(|name| parse_policy(name).is_ok()));
        for name in ["direct", "approximate", "KV", ""] {
            assert!(parse_policy(name).unwrap_err().starts_with("expected one of kv, load-aware, least-loaded"));
        }
    }
}
