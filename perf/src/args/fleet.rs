//! Arguments of `fleet` and of the processes that simulate its engines.

use clap::Args;
use serde::Serialize;

use super::OutputArgs;

/// Arguments of `fleet`.
#[derive(Args, Clone, Debug, Serialize)]
pub(crate) struct FleetArgs {
    /// Engines of the fleet, each with a worker id of its own.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(2..=4096))]
    pub(crate) workers: u32,
    /// Ranks of each engine, every one with a publisher and a replay socket of its own.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) ranks: u32,
    /// Daemons that hear the same engines.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) routers: u32,
    /// The part of the fleet that is run: of its engines, its batches and its routes. 0 to 1.
    #[arg(long, default_value_t = 1.0, value_parser = super::parse_ratio)]
    pub(crate) share: f64,
    /// Batches a second that all engines of the whole fleet publish; one measurement for each.
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "220000", value_parser = super::parse_seconds)]
    pub(crate) batches_per_s: Vec<f64>,
    /// Routes a second that all gateways of the whole fleet ask for; one measurement for each, at each rate of batches.
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "2700,50000", value_parser = super::parse_seconds)]
    pub(crate) routes_per_s: Vec<f64>,
    /// Connections of gateways, over all daemons.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) gateways: u32,
    /// Seconds of each measurement.
    #[arg(long, default_value_t = 10.0, value_parser = super::parse_seconds)]
    pub(crate) seconds: f64,
    /// Seconds for which a gateway holds each booking before it frees it.
    #[arg(long, default_value_t = 1.0, value_parser = super::parse_seconds)]
    pub(crate) hold_s: f64,
    /// Engines replaced a second, each by a new one with an empty cache and another worker id. 0: none.
    #[arg(long, default_value_t = 1.0, value_parser = super::parse_rate)]
    pub(crate) replaced_per_s: f64,
    /// Blocks in the cache of each rank. Each is full before the daemons start.
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u32).range(64..=1_000_000))]
    pub(crate) cache_blocks: u32,
    /// The share of batches that engines drop instead of publishing, as at their high-water mark. 0 to 1.
    #[arg(long, default_value_t = 0.0, value_parser = super::parse_ratio)]
    pub(crate) loss: f64,
    /// At the end, cut the first process of engines off for this many seconds. 0: do not.
    #[arg(long, default_value_t = 0.0, value_parser = super::parse_rate)]
    pub(crate) partition_s: f64,
    /// Ingest threads of each daemon.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) shards: u16,
    /// What becomes of the report.
    #[command(flatten)]
    #[serde(skip)]
    pub(crate) output: OutputArgs,
}

impl FleetArgs {
    /// Workers that are run.
    #[must_use]
    pub(crate) fn workers_run(&self) -> u32 {
        ((f64::from(self.workers) * self.share).round() as u32).max(2)
    }
}

/// Arguments of `fleet-engines`.
#[derive(Args, Clone, Debug)]
pub(crate) struct FleetEnginesArgs {
    /// The worker ids of its engines at the start.
    #[arg(long, value_delimiter = ',')]
    pub(crate) workers: Vec<u32>,
    /// Ranks of each.
    #[arg(long)]
    pub(crate) ranks: u32,
    /// Blocks in the cache of each rank.
    #[arg(long)]
    pub(crate) cache_blocks: u32,
    /// The share of batches that are dropped.
    #[arg(long)]
    pub(crate) loss: f64,
}
