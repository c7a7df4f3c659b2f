//! Arguments of `socket` and of the processes it starts.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::OutputArgs;

/// An io engine of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Io {
    /// tokio over epoll.
    Epoll,
    /// tokio-uring.
    Uring,
}

impl Io {
    /// As the command line spells it, the daemon's too.
    #[must_use]
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Epoll => "epoll",
            Self::Uring => "uring",
        }
    }
}

/// Arguments of `socket`.
#[derive(Args, Clone, Debug, Serialize)]
pub(crate) struct SocketArgs {
    /// Seconds of each measurement; a fifth of it goes before, and does not count.
    #[arg(long, default_value_t = 0.5, value_parser = super::parse_seconds)]
    pub(crate) seconds: f64,
    /// Times everything is measured, the servers in turns; medians are reported.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeat: u32,
    /// Requests a second where they come whether answered or not.
    #[arg(long, default_value_t = 1000.0, value_parser = super::parse_seconds)]
    pub(crate) rate: f64,
    /// Messages a second from the engines while it is asked, where it is measured with them too; 0 = never.
    #[arg(long, default_value_t = 10_000.0, value_parser = super::parse_rate)]
    pub(crate) ingest_rate: f64,
    /// Workers of the fleet.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..=256))]
    pub(crate) workers: u64,
    /// Only requests of this size; repeatable.
    #[arg(long = "size", value_name = "SIZE", value_parser = ["14-hashes", "720-hashes", "12000-tokens"])]
    pub(crate) sizes: Vec<String>,
    /// Only so many connections with so many requests in flight on each; repeatable.
    #[arg(long = "way", value_name = "CONNECTIONSxREQUESTS", value_parser = ["1x1", "1x32", "8x1"])]
    pub(crate) ways: Vec<String>,
    /// Only requests that come as soon as there is room for them.
    #[arg(long)]
    pub(crate) closed: bool,
    /// Only both sides spinning.
    #[arg(long)]
    pub(crate) spinning: bool,
    /// The io engines of daemon and floor; ratios are of the first.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "epoll")]
    pub(crate) io: Vec<Io>,
    /// A line more for the daemon's `[serve]`; repeatable.
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) serve: Vec<String>,
    /// A line more for it where both sides spin; repeatable.
    #[arg(long, value_name = "KEY=VALUE", default_value = "spin_us_max=1000")]
    pub(crate) serve_spinning: Vec<String>,
    /// Leave the peer out.
    #[arg(long)]
    pub(crate) no_peer: bool,
    /// In place of all that: requests a second of so many serving cores, each with a client process of its own.
    #[arg(long, value_name = "N,N", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) cores: Vec<u16>,
    /// What becomes of the report.
    #[command(flatten)]
    #[serde(skip)]
    pub(crate) output: OutputArgs,
}

/// Which server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ServedBy {
    /// Nothing but frames.
    Floor,
    /// kvrouted's daemon.
    Kvrouted,
    /// The peer's selection service over HTTP.
    Peer,
}

impl ServedBy {
    /// As the command line spells it.
    #[must_use]
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Floor => "floor",
            Self::Kvrouted => "kvrouted",
            Self::Peer => "peer",
        }
    }
}

/// Arguments of `socket-serve`.
#[derive(Args, Clone, Debug)]
pub(crate) struct SocketServeArgs {
    /// Which server.
    #[arg(long, value_enum)]
    pub(crate) side: ServedBy,
    /// The floor's socket, or the daemon's configuration.
    #[arg(long, default_value = "s")]
    pub(crate) path: PathBuf,
    /// The peer's port.
    #[arg(long, default_value_t = 0)]
    pub(crate) port: u16,
    /// Bytes of the body of the floor's reply to a route.
    #[arg(long, default_value_t = 0)]
    pub(crate) route_bytes: u32,
    /// Bytes of the body of its reply to a free.
    #[arg(long, default_value_t = 0)]
    pub(crate) free_bytes: u32,
    /// The floor's io engine.
    #[arg(long, value_enum, default_value = "epoll")]
    pub(crate) io: Io,
    /// The floor's serving threads.
    #[arg(long, default_value_t = 1)]
    pub(crate) cores: u16,
    /// Whether the floor never sleeps.
    #[arg(long)]
    pub(crate) spin: bool,
    /// Processors that it is kept on; all if none is named.
    #[arg(long, value_delimiter = ',')]
    pub(crate) processors: Vec<usize>,
}

/// Arguments of `socket-ask`.
#[derive(Args, Clone, Debug)]
pub(crate) struct SocketAskArgs {
    /// The server's socket.
    #[arg(long)]
    pub(crate) path: PathBuf,
    /// Which requests.
    #[arg(long)]
    pub(crate) size: String,
    /// Requests in flight.
    #[arg(long)]
    pub(crate) in_flight: u32,
    /// For how long.
    #[arg(long)]
    pub(crate) seconds: f64,
    /// The number before that of its first request.
    #[arg(long)]
    pub(crate) after: u64,
}
