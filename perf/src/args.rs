//! The command line. Arguments are serialisable: a child process that measures memory gets the same ones.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::{Serialize, Serializer};

use crate::ingest::Shape;

mod cores;
mod faults;
mod fleet;
mod gateway;
mod socket;

pub(crate) use cores::CoresArgs;
pub(crate) use faults::FaultsArgs;
pub(crate) use fleet::{FleetArgs, FleetEnginesArgs};
pub(crate) use gateway::{Asked, GatewayArgs, UpstreamArgs, Way};
pub(crate) use socket::{Io, ServedBy, SocketArgs, SocketAskArgs, SocketServeArgs};

/// kvrouted's index beside the index of its peer, on one tape of operations.
#[derive(Parser, Debug)]
#[command(name = "perf", version, about)]
pub(crate) struct Cli {
    /// What to run.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to run.
#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Compare ingest, lookups, memory and answers of both indexes.
    Index(IndexArgs),
    /// Churn kvrouted's index at a fixed live size and watch its memory.
    Soak(SoakArgs),
    /// Feed kvrouted's ingest thread and its peer's decoder and index over ZeroMQ.
    Ingest(IngestArgs),
    /// Time kvrouted's decision with its booking beside its peer's, in process.
    Decide(DecideArgs),
    /// Measure how decisions scale with serving threads, and ingest with shards, in process.
    Cores(CoresArgs),
    /// Ask kvrouted's decision and its peer's the same random questions; fails where the answers differ.
    Parity(ParityArgs),
    /// Ask kvrouted's daemon, a bare server and the peer's selection service over their sockets.
    Socket(SocketArgs),
    /// Ask kvrouted's daemon by shared memory and by its socket, in turns.
    Lane(LaneArgs),
    /// Put the gateway, the picker and other proxies in front of one trivial upstream, in turns.
    Gateway(GatewayArgs),
    /// Run daemons on a large fleet of simulated engines, and ask them from many gateways.
    Fleet(FleetArgs),
    /// Run routers, engines and gateways in network namespaces under faults; fails unless all agree at the end. Needs root.
    Faults(FaultsArgs),
    /// Simulate engines; `fleet` starts these.
    #[command(hide = true)]
    FleetEngines(FleetEnginesArgs),
    /// Answer fixed bytes over HTTP; `gateway` starts one.
    #[command(hide = true)]
    GatewayUpstream(UpstreamArgs),
    /// Publish prepared messages; `ingest` starts these.
    #[command(hide = true)]
    IngestSend(SendArgs),
    /// Serve one side; `socket` starts these.
    #[command(hide = true)]
    SocketServe(SocketServeArgs),
    /// Ask one server over one connection; `socket --cores` starts these.
    #[command(hide = true)]
    SocketAsk(SocketAskArgs),
    /// Measure the memory of one side in this process and print it as JSON; `index` starts these.
    #[command(hide = true)]
    Memory(MemoryArgs),
}

/// How engine hashes of equal content relate across workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum EngineHashing {
    /// Every worker calls a prefix the same.
    Shared,
    /// Every worker has names of its own.
    PerWorker,
}

/// What decides the tape. Equal arguments make equal tapes.
#[derive(Args, Clone, Debug, Serialize)]
pub(crate) struct TapeArgs {
    /// A trace in Mooncake's format; without one, conversations are generated.
    #[arg(long, value_name = "FILE")]
    #[serde(serialize_with = "file_name")]
    pub(crate) trace: Option<PathBuf>,
    /// Prompts of which most blocks are new, in place of conversations.
    #[arg(long, conflicts_with = "trace")]
    pub(crate) fresh: bool,
    /// Workers of the simulated fleet.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) workers: u16,
    /// Blocks each worker's device cache holds.
    #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(u32).range(8..))]
    pub(crate) capacity: u32,
    /// Tokens per block; divides 512.
    #[arg(long, default_value_t = 16, value_parser = parse_block_size)]
    pub(crate) block_size: u32,
    /// Independent copies of the trace, interleaved row by row.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) copies: u32,
    /// Rows of the trace to use; all when not given, of the generator 12000, with --fresh 1500.
    #[arg(long, value_name = "N")]
    pub(crate) rows: Option<usize>,
    /// Also emit what requests generate, as events of one block.
    #[arg(long)]
    pub(crate) decode: bool,
    /// How engine hashes of equal content relate across workers.
    #[arg(long, value_enum, default_value_t = EngineHashing::Shared)]
    pub(crate) engine_hash: EngineHashing,
    /// Share of requests that store a second copy of blocks the worker holds, 0 to 1.
    #[arg(long, value_name = "RATIO", default_value_t = 0.0, value_parser = parse_ratio)]
    pub(crate) dup: f64,
    /// Device blocks that are evicted move to the host tier, which holds as many again.
    #[arg(long)]
    pub(crate) tiers: bool,
    /// Seed of everything that is left to chance.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

/// Arguments of `index`.
#[derive(Args, Clone, Debug)]
pub(crate) struct IndexArgs {
    /// What decides the tape.
    #[command(flatten)]
    pub(crate) tape: TapeArgs,
    /// Shards over which kvrouted's workers are spread.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) shards: u16,
    /// Times everything is measured; medians are reported.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeat: u32,
    /// Also draw an SVG chart.
    #[arg(long, value_name = "FILE")]
    pub(crate) chart: Option<PathBuf>,
    /// What becomes of the report.
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// What becomes of a report.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct OutputArgs {
    /// Print one JSON object in place of text.
    #[arg(long)]
    pub(crate) json: bool,
    /// Also write NAME.json and NAME.txt into this folder.
    #[arg(long, value_name = "DIR", requires = "name")]
    pub(crate) save: Option<PathBuf>,
    /// The name of what `--save` writes.
    #[arg(long, value_name = "NAME", requires = "save")]
    pub(crate) name: Option<String>,
}

/// Which index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Side {
    /// `ConcurrentRadixTreeCompressed` of dynamo-kv-router.
    Peer,
    /// kvrouted's.
    Kvrouted,
}

impl Side {
    /// As the command line spells it.
    #[must_use]
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Peer => "peer",
            Self::Kvrouted => "kvrouted",
        }
    }
}

/// Arguments of `memory`.
#[derive(Args, Clone, Debug)]
pub(crate) struct MemoryArgs {
    /// Which index.
    #[arg(long, value_enum)]
    pub(crate) side: Side,
    /// Shards of kvrouted's index.
    #[arg(long, default_value_t = 1)]
    pub(crate) shards: u16,
    /// What decides the tape.
    #[command(flatten)]
    pub(crate) tape: TapeArgs,
}

/// Arguments of `soak`.
#[derive(Args, Clone, Debug)]
pub(crate) struct SoakArgs {
    /// How long.
    #[arg(long, default_value_t = 30.0, value_parser = parse_minutes)]
    pub(crate) minutes: f64,
    /// Workers of the fleet.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(2..=4096))]
    pub(crate) workers: u16,
    /// Blocks each worker holds once warm.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1024..))]
    pub(crate) capacity: u32,
    /// Seed of everything that is left to chance.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

/// A format of event messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Wire {
    /// As vLLM 0.24 and later send it.
    Msgpack,
    /// kvrouted's own.
    Flatbuffer,
}

impl Wire {
    /// Both.
    pub(crate) const ALL: [Self; 2] = [Self::Msgpack, Self::Flatbuffer];

    /// As the command line spells it.
    #[must_use]
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Msgpack => "msgpack",
            Self::Flatbuffer => "flatbuffer",
        }
    }
}

/// Arguments of `ingest`.
#[derive(Args, Clone, Debug)]
pub(crate) struct IngestArgs {
    /// Times everything is measured; medians are reported.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeat: u32,
    /// How many messages, times the usual number.
    #[arg(long, default_value_t = 1.0, value_parser = parse_minutes)]
    pub(crate) scale: f64,
    /// Only messages that store so many blocks: 1, 16 or 256.
    #[arg(long, value_name = "N")]
    pub(crate) blocks: Option<u32>,
    /// Also send the messages of a recording, in the form of kvrouted's tests/fixtures/events.
    #[arg(long, value_name = "FILE")]
    pub(crate) capture: Option<PathBuf>,
    /// What becomes of the report.
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Arguments of `decide`.
#[derive(Args, Clone, Debug)]
pub(crate) struct DecideArgs {
    /// What decides the tape.
    #[command(flatten)]
    pub(crate) tape: TapeArgs,
    /// Also fleets of so many workers, all of which together hold 1.28 M blocks.
    #[arg(long, value_name = "N,N", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) fleets: Vec<u16>,
    /// Requests in flight.
    #[arg(long, default_value_t = 256)]
    pub(crate) in_flight: usize,
    /// Times everything is measured; medians are reported.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeat: u32,
    /// What becomes of the report.
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Arguments of `parity`.
#[derive(Args, Clone, Debug)]
pub(crate) struct ParityArgs {
    /// How many questions.
    #[arg(long, default_value_t = 5000)]
    pub(crate) cases: u64,
    /// Seed of everything that is left to chance.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Print one JSON object in place of sentences.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Arguments of `lane`.
#[derive(Args, Clone, Debug, Serialize)]
pub(crate) struct LaneArgs {
    /// Seconds of each measurement; a fifth of it goes before, and does not count.
    #[arg(long, default_value_t = 0.5, value_parser = parse_seconds)]
    pub(crate) seconds: f64,
    /// Rounds, in each of which every way has its turn.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) repeat: u32,
    /// Only requests of this size; repeatable.
    #[arg(long = "size", value_name = "SIZE", value_parser = ["14-hashes", "720-hashes", "12000-tokens"])]
    pub(crate) sizes: Vec<String>,
    /// Only with both sides looking.
    #[arg(long)]
    pub(crate) looking: bool,
    /// Print one JSON object in place of the table.
    #[arg(long)]
    #[serde(skip)]
    pub(crate) json: bool,
}

/// Arguments of `ingest-send`.
#[derive(Args, Clone, Debug)]
pub(crate) struct SendArgs {
    /// The messages' format.
    #[arg(long, value_enum)]
    pub(crate) wire: Wire,
    /// Blocks that each stores.
    #[arg(long)]
    pub(crate) blocks: u32,
    /// How many.
    #[arg(long)]
    pub(crate) messages: u64,
    /// Messages a second; 0 = as fast as they go.
    #[arg(long)]
    pub(crate) rate: f64,
    /// A recording to send instead.
    #[arg(long)]
    pub(crate) capture: Option<PathBuf>,
}

impl SendArgs {
    /// Which messages.
    #[must_use]
    pub(crate) const fn shape(&self) -> Shape {
        Shape { wire: self.wire, blocks: self.blocks, messages: self.messages }
    }
}

impl TapeArgs {
    /// The arguments as a command line, for a child process.
    #[must_use]
    pub(crate) fn command_line(&self) -> Vec<String> {
        let mut line = Vec::new();
        let mut push = |name: &str, value: String| line.extend([name.to_owned(), value]);
        if let Some(trace) = &self.trace {
            push("--trace", trace.display().to_string());
        }
        if let Some(rows) = self.rows {
            push("--rows", rows.to_string());
        }
        push("--workers", self.workers.to_string());
        push("--capacity", self.capacity.to_string());
        push("--block-size", self.block_size.to_string());
        push("--copies", self.copies.to_string());
        push("--dup", self.dup.to_string());
        push("--seed", self.seed.to_string());
        let hashing = match self.engine_hash {
            EngineHashing::Shared => "shared",
            EngineHashing::PerWorker => "per-worker",
        };
        push("--engine-hash", hashing.to_owned());
        line.extend(self.fresh.then(|| "--fresh".to_owned()));
        line.extend(self.decode.then(|| "--decode".to_owned()));
        line.extend(self.tiers.then(|| "--tiers".to_owned()));
        line
    }
}

/// Results are kept in the repository: where a file is on one machine is not for them.
fn file_name<S: Serializer>(file: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
    file.as_ref().and_then(|file| file.file_name()).map(|name| name.to_string_lossy()).serialize(serializer)
}

fn parse_block_size(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(size @ 1..=512) if 512 % size == 0 => Ok(size),
        _ => Err("a block size divides 512".to_owned()),
    }
}

fn parse_ratio(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|ratio| (0.0..=1.0).contains(ratio)).ok_or_else(|| "a ratio is 0 to 1".to_owned())
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    parse_minutes(text)
}

fn parse_rate(text: &str) -> Result<f64, String> {
    let rate = text.parse().ok().filter(|rate: &f64| rate.is_finite() && *rate >= 0.0);
    rate.ok_or_else(|| "a number of at least 0".to_owned())
}

fn parse_minutes(text: &str) -> Result<f64, String> {
    let minutes = text.parse().ok().filter(|minutes: &f64| minutes.is_finite() && *minutes > 0.0);
    minutes.ok_or_else(|| "a number above 0".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_gets_the_same_tape() {
        let line = "perf index --workers 3 --capacity 99 --block-size 32 --copies 2 --rows 7 --decode --dup 0.25 \
                    --engine-hash per-worker --tiers --seed 9 --trace a.jsonl";
        let Command::Index(first) = Cli::parse_from(line.split_whitespace()).command else { panic!("not index") };
        let again = |of: &IndexArgs| {
            let line = ["perf".to_owned(), "index".to_owned()].into_iter().chain(of.tape.command_line());
            let Command::Index(second) = Cli::parse_from(line).command else { panic!("not index") };
            second
        };
        assert_eq!(format!("{:?}", first.tape), format!("{:?}", again(&first).tape));
        let fresh = Cli::parse_from(["perf", "index", "--fresh"]).command;
        let Command::Index(fresh) = fresh else { panic!("not index") };
        assert!(again(&fresh).tape.fresh);
    }

    #[test]
    fn block_sizes_divide_a_trace_block() {
        assert_eq!(parse_block_size("64"), Ok(64));
        assert!(parse_block_size("48").is_err() && parse_block_size("0").is_err() && parse_block_size("1024").is_err());
    }
}
