//! Arguments of `gateway` and of the upstream it starts.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::OutputArgs;

/// A way from the caller to the upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Way {
    /// Nothing in between.
    Direct,
    /// nginx as a plain proxy with keep-alive.
    Nginx,
    /// Envoy with the recipe's route, without a picker.
    Envoy,
    /// `kvrouted-gateway serve` with the daemon that it runs.
    Gateway,
    /// Envoy with the recipe, and `kvrouted-gateway epp` with the daemon that it runs.
    EnvoyPicker,
    /// SGLang's router.
    SglangRouter,
    /// The vLLM project's router in Rust.
    VllmRouter,
    /// The router in Python of vLLM's production-stack.
    ProductionStack,
}

impl Way {
    /// As the command line spells it.
    #[must_use]
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Nginx => "nginx",
            Self::Envoy => "envoy",
            Self::Gateway => "gateway",
            Self::EnvoyPicker => "envoy-picker",
            Self::SglangRouter => "sglang-router",
            Self::VllmRouter => "vllm-router",
            Self::ProductionStack => "production-stack",
        }
    }
}

/// A request and its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Asked {
    /// A completion with its prompt as token ids.
    Ids,
    /// A chat.
    Chat,
    /// A chat whose reply is a stream of events.
    Stream,
}

impl Asked {
    /// As the command line spells it.
    #[must_use]
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Ids => "ids",
            Self::Chat => "chat",
            Self::Stream => "stream",
        }
    }
}

/// Arguments of `gateway`.
#[derive(Args, Clone, Debug, Serialize)]
pub(crate) struct GatewayArgs {
    /// Seconds of each measurement; a fifth of it goes before, and does not count.
    #[arg(long, default_value_t = 1.0, value_parser = super::parse_seconds)]
    pub(crate) seconds: f64,
    /// Times everything is measured, the ways in turns; medians are reported.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeat: u32,
    /// Connections where there are many, each with one request in flight.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(2..=1024))]
    pub(crate) connections: u32,
    /// Only these ways; `direct` is always measured.
    #[arg(long = "way", value_enum, value_delimiter = ',')]
    pub(crate) ways: Vec<Way>,
    /// Only these requests.
    #[arg(long = "request", value_enum, value_delimiter = ',')]
    pub(crate) requests: Vec<Asked>,
    /// The gateway's program [default: kvrouted-gateway beside this program, or in PATH].
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub(crate) gateway: Option<PathBuf>,
    /// The daemon's program [default: where the gateway finds it].
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub(crate) kvrouted: Option<PathBuf>,
    /// Where `scripts/gateways/fetch` and `perf/fetch-proxies` put the proxies [default: $KVROUTED_ENGINES, or
    /// ~/.cache/kvrouted-engines].
    #[arg(long, value_name = "DIR")]
    #[serde(skip)]
    pub(crate) proxies: Option<PathBuf>,
    /// What becomes of the report.
    #[command(flatten)]
    #[serde(skip)]
    pub(crate) output: OutputArgs,
}

/// Arguments of `gateway-upstream`.
#[derive(Args, Clone, Debug)]
pub(crate) struct UpstreamArgs {
    /// Its port on the loopback interface.
    #[arg(long)]
    pub(crate) port: u16,
}
