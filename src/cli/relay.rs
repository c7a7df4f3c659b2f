//! `kvrouted relay`: makes a relay's plan of the arguments.

use std::path::PathBuf;

use super::exit::{Exit, Failure};
use crate::config::{self, Config, Environment, Flags, FullReports, LogConfig, Override, Salts, Setting};
#[cfg(feature = "nats")]
use crate::ingest::Brokers;
use crate::ingest::IngestConfig;
use crate::relay::RelayPlan;

const WORKER_HELP: &str = "\
The engine is written as a worker for `kvrouted serve`: --worker id=1,endpoint=tcp://127.0.0.1:5557,replay=tcp://127.0.0.1:5657
The daemon then gets the relay instead of the engine: --worker id=1,endpoint=tcp://HOST:5567,replay=tcp://HOST:5667
With --to nats://HOST:4222 it may also get the NATS server: --worker id=1,endpoint=nats://HOST:4222
For all fields with defaults and descriptions: kvrouted serve --example-config, tables [relay], [ingest], [metrics], [[space]], [[worker]]";

/// The model's name without a file. A relay answers no requests, so the name has no effect.
const MODEL: &str = "relayed";

/// Runs a relay beside one engine: hashes its events there and publishes them again, numbered so that a router notices
/// every loss.
#[derive(Debug, clap::Args)]
#[command(after_help = WORKER_HELP)]
pub struct RelayArgs {
    /// The configuration file, with one [[worker]]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Without a file: the engine
    #[arg(long, value_name = "FIELD=VALUE,...", conflicts_with = "config", required_unless_present = "config")]
    pub worker: Option<String>,
    /// Where to publish [default: tcp://*:5567]
    #[arg(long, value_name = "ENDPOINT")]
    pub endpoint: Option<String>,
    /// Where to replay lost batches and send snapshots [default: tcp://*:5667]
    #[arg(long, value_name = "ENDPOINT")]
    pub replay: Option<String>,
    /// A NATS server in which the relay also stores batches and snapshots: nats://HOST:4222. Further servers of its cluster
    /// follow after a `+`
    #[arg(long, value_name = "SERVER")]
    pub to: Option<String>,
    /// Without a file: tokens in a KV block [default: learnt from the first events]
    #[arg(long, value_name = "TOKENS", conflicts_with = "config", allow_negative_numbers = true)]
    pub block_size: Option<String>,
    /// Without a file: whether prompts may carry cache salts, `possible` or `none` [default: possible]
    #[arg(long, value_name = "SALTS", conflicts_with = "config")]
    pub salts: Option<String>,
    /// Without a file: whether a caller can send vLLM `kv_cache_report_mode=full`, `possible` or `none` [default:
    /// possible]
    #[arg(long, value_name = "REPORTS", conflicts_with = "config")]
    pub full_reports: Option<String>,
    /// Serve Prometheus metrics on this port of the loopback interface; 0 = off [default: 0]
    #[arg(long, value_name = "PORT", allow_negative_numbers = true)]
    pub metrics_port: Option<String>,
    /// What the relay gives up once it has started: off, report, on or required [default: off]
    #[arg(long, value_name = "MODE")]
    pub sandbox: Option<String>,
    /// The least severe level logged: off, error, warn, info, debug or trace [default: info]
    #[arg(long, value_name = "LEVEL")]
    pub log_level: Option<String>,
    /// The format of log lines: text or json [default: text]
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<String>,
}

impl RelayArgs {
    /// Makes the relay's plan, its log configuration, and what the environment and flags set in the configuration.
    ///
    /// # Errors
    /// Every problem of file and flags, with its exit code. Nothing has been bound yet.
    pub fn prepare(&self) -> Result<(RelayPlan, LogConfig, Vec<Override>), Failure> {
        let unusable =
            |why: &dyn std::fmt::Display| Failure::new(Exit::Usage, format!("the configuration cannot be used\n{why}"));
        let config = config::load(self.config.as_deref(), &Environment::of_process(), &self.flags())
            .map_err(|problems| unusable(&problems))?;
        let plan = plan(&config).map_err(|why| unusable(&why))?;
        #[cfg(feature = "nats")]
        let plan = {
            let access = config.ingest.nats_access().map_err(|error| unusable(&error))?;
            RelayPlan { ingest: IngestConfig { brokers: Brokers::new(access), ..plan.ingest }, ..plan }
        };
        Ok((plan, config.log, config.overrides))
    }

    fn flags(&self) -> Flags {
        let model = self.config.is_none().then(|| MODEL.to_owned());
        let settings = [
            ("--endpoint", "relay", "endpoint", &self.endpoint),
            ("--replay", "relay", "replay", &self.replay),
            ("--to", "relay", "nats", &self.to),
            ("--metrics-port", "metrics", "port", &self.metrics_port),
            ("--sandbox", "sandbox", "mode", &self.sandbox),
            ("--log-level", "log", "level", &self.log_level),
            ("--log-format", "log", "format", &self.log_format),
            ("--worker", "space", "model", &model),
            ("--block-size", "space", "block_size", &self.block_size),
            ("--salts", "space", "salts", &self.salts),
            ("--full-reports", "space", "full_reports", &self.full_reports),
        ];
        let setting = |(flag, section, field, text): (_, _, _, &Option<String>)| {
            Some(Setting { flag, section, field, text: text.clone()? })
        };
        Flags {
            settings: settings.into_iter().filter_map(setting).collect(),
            workers: self.worker.iter().cloned().collect(),
        }
    }
}

fn plan(config: &Config) -> Result<RelayPlan, String> {
    let [worker] = config.workers.as_slice() else {
        return Err(format!(
            "a relay serves exactly one worker, but {} are configured; leave one [[worker]]",
            config.workers.len()
        ));
    };
    let source =
        worker.events.clone().ok_or("the worker has no endpoint, so there are no events to relay; set endpoint")?;
    if source.snapshots.is_some() {
        return Err(
            "a relay does not use engine_snapshots: leave it out, and give the daemons the relay's replay".into()
        );
    }
    let space = config.spaces.get(worker.space.0 as usize).ok_or("the worker has no space")?;
    let ingest = IngestConfig {
        core: None,
        down_after_ms: config.ingest.down_after_ms,
        silence_ms_max: config.ingest.silence_ms_max,
        probe_after_ms: config.ingest.probe_after_ms,
        receive_messages_max: config.ingest.receive_messages_max,
        shards: 1,
        ..IngestConfig::default()
    };
    Ok(RelayPlan {
        scheme: space.scheme(),
        salts_possible: space.salts == Salts::Possible,
        counts_copies: space.full_reports == FullReports::None,
        capacity_blocks: worker.capacity_blocks,
        blocks_max: worker.blocks_max,
        memory_bytes_max: if space.memory_bytes_max == 0 { u64::MAX } else { space.memory_bytes_max },
        buffer_batches_max: config.relay.buffer_batches_max,
        buffer_bytes_max: config.relay.buffer_bytes_max,
        heartbeat_ms: config.relay.heartbeat_ms,
        nats: config.relay.nats_servers(),
        worker: worker.worker,
        ingest,
        sandbox: config.sandbox.mode,
        metrics: config.metrics.address(),
        metrics_hosts: config.metrics.hosts.clone(),
        ..RelayPlan::new(&config.relay.endpoint, &config.relay.replay, source)
    })
}
