//! Arguments of `faults`.

use clap::Args;
use serde::Serialize;

use super::OutputArgs;

/// Arguments of `faults`.
#[derive(Args, Clone, Debug, Serialize)]
pub(crate) struct FaultsArgs {
    /// Routers, each in a network namespace of its own.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(2..=16))]
    pub(crate) routers: u8,
    /// Simulated engines, each in a network namespace of its own.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=60))]
    pub(crate) engines: u8,
    /// Gateways, as many at each router.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) gateways: u32,
    /// Minutes of faults.
    #[arg(long, default_value_t = 10.0, value_parser = super::parse_seconds)]
    pub(crate) minutes: f64,
    /// Batches a second that all engines publish.
    #[arg(long, default_value_t = 400.0, value_parser = super::parse_seconds)]
    pub(crate) batches_per_s: f64,
    /// Routes a second that all gateways ask for.
    #[arg(long, default_value_t = 600.0, value_parser = super::parse_seconds)]
    pub(crate) routes_per_s: f64,
    /// Blocks in the cache of each engine.
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u32).range(64..=1_000_000))]
    pub(crate) cache_blocks: u32,
    /// Routers hear each other over a real nats-server, which fails too, in place of ZeroMQ.
    #[arg(long)]
    pub(crate) nats: bool,
    /// Fixes the plan of faults, not the timing.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// What becomes of the report.
    #[command(flatten)]
    #[serde(skip)]
    pub(crate) output: OutputArgs,
}
