//! The fleet that a command line or a file describes.

use std::path::Path;

use super::{SimulateArgs, usage};
use crate::cli::exit::Failure;
use crate::config::parse_fleet;
use crate::engine_law::{ENGINE_PRESET_NAMES, EngineLaw, engine_preset};
use crate::fleet::PoolRole;
use crate::simulate::recorded::FittedFleet;
use crate::simulate::{EngineSpec, RouterSettings, SEQUENCES_MAX, STEP_TOKENS_MAX, Settings};

/// The name of the engines of a journal.
const FITTED: &str = "fitted";

/// An engine in a file, in the units of published tables.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct EngineFile {
    base_ms: f64,
    token_us: f64,
    attention_ns: f64,
    step_ms: f64,
    request_us: f64,
    kv_token_ns: f64,
    kv_tokens: u64,
    #[serde(default = "step_tokens_max")]
    step_tokens_max: u32,
    #[serde(default = "sequences_max")]
    sequences_max: u32,
}

fn step_tokens_max() -> u32 {
    STEP_TOKENS_MAX
}

fn sequences_max() -> u32 {
    SEQUENCES_MAX
}

impl SimulateArgs {
    /// The settings of a run with seed 1. `fitted` is the fleet of the journal that the requests come from.
    pub(super) fn settings(&self, fitted: Option<&FittedFleet>) -> Result<Settings, Failure> {
        let reports_first_tokens = !self.no_first_tokens;
        if let Some(file) = &self.fleet {
            return Ok(Settings { reports_first_tokens, ..fleet_of(file)? });
        }
        let of_engines = match (self.engine.as_str(), fitted) {
            (FITTED, Some(fitted)) => fitted.settings(),
            (FITTED, None) => return Err(usage("--engine fitted is for --format journal")),
            (engine, _) => {
                let engine = read_engine(engine, self.block_size, self.cache_tokens)?;
                Settings::of(vec![engine; usize::from(self.workers)], 1)
            }
        };
        let routers = RouterSettings {
            count: usize::from(self.routers),
            age_s: Some(self.router_age_ms / 1e3),
            sessions_stick: self.sessions_stick,
        };
        let event_lag_s = self.event_lag_ms / 1e3;
        Ok(Settings { event_lag_s, reports_first_tokens, routers, ..of_engines })
    }
}

/// An engine that runs whole requests: a preset, or a file of constants.
pub(in crate::cli) fn read_engine(
    engine: &str,
    block_size: u32,
    cache_tokens: Option<u64>,
) -> Result<EngineSpec, Failure> {
    let spec = match engine_preset(engine) {
        Some(preset) => EngineSpec::of(preset, block_size),
        None => engine_of_file(engine, block_size)?,
    };
    let kv_tokens = cache_tokens.unwrap_or(spec.kv_tokens);
    if kv_tokens < u64::from(block_size) {
        return Err(usage("the KV memory of an engine must hold at least one block"));
    }
    Ok(EngineSpec { kv_tokens, ..spec })
}

fn engine_of_file(engine: &str, block_size: u32) -> Result<EngineSpec, Failure> {
    let text = std::fs::read_to_string(engine).map_err(|error| {
        let names = ENGINE_PRESET_NAMES.join(", ");
        usage(format!("--engine {engine} is neither a preset ({names}) nor a file that can be read: {error}"))
    })?;
    let file: EngineFile = serde_json::from_str(&text).map_err(|error| usage(format!("{engine}: {error}")))?;
    let prefill = [file.base_ms * 1e-3, file.token_us * 1e-6, file.attention_ns * 1e-9];
    let decode = [file.step_ms * 1e-3, file.request_us * 1e-6, file.kv_token_ns * 1e-9];
    let are_sane = prefill.iter().chain(&decode).all(|constant| (0.0..=1e3).contains(constant));
    let (step_tokens_max, sequences_max) = (file.step_tokens_max, file.sequences_max);
    if !are_sane || file.token_us <= 0.0 || file.step_ms <= 0.0 || step_tokens_max == 0 || sequences_max == 0 {
        return Err(usage(format!(
            "{engine}: constants must be from 0 to 1000 s; token_us, step_ms, step_tokens_max and sequences_max above 0"
        )));
    }
    Ok(EngineSpec {
        class: engine.into(),
        role: PoolRole::Both,
        law: EngineLaw::of(prefill, decode),
        kv_tokens: file.kv_tokens,
        block_size,
        step_tokens_max,
        sequences_max,
        tiers: Vec::new(),
        receive_token_s: 0.0,
    })
}

/// The fleet of a file.
fn fleet_of(file: &Path) -> Result<Settings, Failure> {
    let source = file.display().to_string();
    let text = std::fs::read_to_string(file).map_err(|error| usage(format!("cannot read {source}: {error}")))?;
    let fleet = parse_fleet(&source, &text).map_err(|problems| usage(problems.to_string()))?;
    Ok(Settings::from(&fleet))
}

/// The engines of a fleet in words: "4 70b-tp4 (prefill), 4 70b-tp4 (decode)".
pub(super) fn described(engines: &[EngineSpec]) -> String {
    let groups = engines.chunk_by(|a, b| (&a.class, a.role) == (&b.class, b.role));
    let group = |group: &[EngineSpec]| {
        let role = match group[0].role {
            PoolRole::Both => "",
            PoolRole::Prefill => " (prefill)",
            PoolRole::Decode => " (decode)",
        };
        format!("{} {}{role}", group.len(), group[0].class)
    };
    groups.map(group).collect::<Vec<_>>().join(", ")
}
