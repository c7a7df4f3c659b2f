//! The fleet of a journal as simulated engines: constants by robust regression, memory by what is known or was evicted.

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Table};
use serde_json::{Value, json};

use super::cache_size::CacheSize;
use super::regression::{Row, constants, explained};
use super::samples::{DECODE_COLUMNS, DecodeSample, PREFILL_COLUMNS, PrefillSample, prefill_law};
use super::{RecordedLoad, RecordedRequest};
use crate::engine_law::{DecodeLaw, ENGINE_PRESETS, EngineLaw, EnginePreset, PrefillLaw};
use crate::fleet::PoolRole;
use crate::simulate::statistics::median;
use crate::simulate::{
    EVENT_LAG_S, EngineSpec, FleetChange, FleetChangeKind, SEQUENCES_MAX, STEP_TOKENS_MAX, Settings,
};

/// Samples from which constants are fitted; with fewer they are guessed.
const SAMPLES_MIN: usize = 30;
/// Samples of a worker from which its slowness is fitted.
const WORKER_SAMPLES_MIN: usize = 10;
/// A worker is slow or fast if it differs from its class by more than this factor.
const SLOWNESS_MIN: f64 = 1.1;
/// Evictions from which the size of caches is fitted.
const EVICTIONS_MIN: usize = 5;

/// Where constants come from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LawSource {
    /// A fit.
    Fitted {
        /// Prefills or outputs.
        samples: usize,
        /// Median of |predicted − observed| / observed on the later half, by a fit of the earlier half.
        error: f64,
    },
    /// Those of a preset, at the speed that is known.
    Guessed {
        /// Its name.
        preset: &'static str,
    },
}

/// Where the size of the KV memory comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvSource {
    /// The daemon knew it.
    Known,
    /// From prefixes that came again, of which some were gone.
    Evictions {
        /// Prefixes that came again.
        reused: usize,
        /// Those that were gone.
        evicted: usize,
    },
    /// That of a preset, or as much as was seen held. Nothing was seen evicted.
    Guessed,
}

/// Engines that are alike.
#[derive(Clone, Debug, PartialEq)]
pub struct FittedClass {
    /// The engine.
    pub spec: EngineSpec,
    /// The places of its workers.
    workers: Vec<usize>,
    /// Where the constants of a prefill come from.
    pub prefill: LawSource,
    /// Where those of a decode step come from.
    pub decode: LawSource,
    /// Where the size of its KV memory comes from.
    pub kv: KvSource,
}

/// The fleet of a journal.
#[derive(Clone, Debug, PartialEq)]
pub struct FittedFleet {
    /// Its classes.
    pub classes: Vec<FittedClass>,
    /// By place among the workers: the place of its class, and how many times as long as the class it takes.
    workers: Vec<(usize, f64)>,
}

impl FittedFleet {
    /// The fleet of a load. Simulated blocks have `block_size` tokens.
    #[must_use]
    pub fn of(load: &RecordedLoad, block_size: u32) -> Self {
        let (prefills, decodes) = (load.prefill_samples(), load.decode_samples());
        let mut classes: Vec<(&str, Vec<usize>)> = Vec::new();
        for place in &load.present {
            let name = load.workers[*place].class.as_str();
            match classes.iter_mut().find(|(known, _)| *known == name) {
                Some((_, workers)) => workers.push(*place),
                None => classes.push((name, vec![*place])),
            }
        }
        let mut fleet = Self { classes: Vec::new(), workers: vec![(0, 1.0); load.present.len()] };
        for (name, workers) in classes {
            let name = if name.is_empty() { "engine" } else { name };
            let slowness = slowness(&workers, &prefills);
            let of_class = |worker: usize| workers.iter().position(|of| *of == worker).map(|at| slowness[at]);
            let (law, prefill, decode) = fitted_law(&prefills, &decodes, of_class);
            let (kv_tokens, kv) = kv_memory(load, &workers, &law);
            let step_tokens = workers.first().map_or(f64::from(STEP_TOKENS_MAX), |worker| load.step_tokens(*worker));
            let spec = EngineSpec {
                class: name.into(),
                role: PoolRole::Both,
                law,
                kv_tokens: kv_tokens.max(u64::from(block_size)),
                block_size,
                step_tokens_max: step_tokens.clamp(1.0, f64::from(u32::MAX)) as u32,
                sequences_max: SEQUENCES_MAX,
                tiers: Vec::new(),
                receive_token_s: 0.0,
            };
            for (worker, slowness) in workers.iter().zip(&slowness) {
                let at = load.present.iter().position(|place| place == worker).unwrap_or(0);
                fleet.workers[at] = (fleet.classes.len(), *slowness);
            }
            fleet.classes.push(FittedClass { spec, workers, prefill, decode, kv });
        }
        fleet
    }

    /// Its engines, as a simulation runs them. No journal tells the size of a batch and the delay of events: they are the usual ones.
    #[must_use]
    pub fn settings(&self) -> Settings {
        let engines = self.workers.iter().map(|(class, _)| self.classes[*class].spec.clone()).collect();
        let differs = |slowness: f64| !(1.0 / SLOWNESS_MIN..=SLOWNESS_MIN).contains(&slowness);
        let slow = self.workers.iter().enumerate().filter(|(_, (_, slowness))| differs(*slowness));
        let slows = |(worker, (_, slowness)): (usize, &(usize, f64))| FleetChange {
            at_s: 0.0,
            worker,
            kind: FleetChangeKind::Slows(*slowness),
        };
        Settings { changes: slow.map(slows).collect(), ..Settings::of(engines, 1) }
    }

    /// The table for a terminal, and notes about what was guessed.
    #[must_use]
    pub fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED).set_header([
            "class",
            "workers",
            "base ms",
            "token µs",
            "attention ns",
            "error",
            "step ms",
            "request µs",
            "KV token ns",
            "error",
            "KV tokens",
            "known by",
        ]);
        for class in &self.classes {
            let EngineLaw { prefill, decode } = class.spec.law;
            let source = |source: LawSource| match source {
                LawSource::Fitted { samples, error } => format!("{:.1} % of {samples}", error * 100.0),
                LawSource::Guessed { preset } => format!("guessed: {preset}"),
            };
            let kv = match class.kv {
                KvSource::Known => "the configuration".into(),
                KvSource::Evictions { reused, evicted } => format!("{evicted} of {reused} evicted"),
                KvSource::Guessed => "guessed".into(),
            };
            let cells = [
                class.spec.class.clone(),
                class.workers.len().to_string(),
                format!("{:.2}", prefill.base_s * 1e3),
                format!("{:.2}", prefill.token_s * 1e6),
                format!("{:.3}", prefill.attention_s * 1e9),
                source(class.prefill),
                format!("{:.2}", decode.step_s * 1e3),
                format!("{:.2}", decode.request_s * 1e6),
                format!("{:.2}", decode.kv_token_s * 1e9),
                source(class.decode),
                class.spec.kv_tokens.to_string(),
                kv,
            ];
            let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
            table.add_row(cells.into_iter().map(right).collect::<Vec<_>>());
        }
        let slow: Vec<String> = self
            .settings()
            .changes
            .iter()
            .filter_map(|change| match change.kind {
                FleetChangeKind::Slows(factor) => {
                    Some(format!("worker {} takes {factor:.2} times as long", change.worker))
                }
                _ => None,
            })
            .collect();
        let slow = if slow.is_empty() { String::new() } else { format!("\n{}", slow.join("; ")) };
        format!(
            "{table}{slow}\nerror: the median on the later half, by a fit of the earlier half. {SEQUENCES_MAX} requests of a batch and \
             {:.0} ms of event delay are guessed.",
            EVENT_LAG_S * 1e3
        )
    }

    /// The same as JSON: times in the units of `--engine` files.
    #[must_use]
    pub fn json(&self) -> Value {
        let source = |source: LawSource| match source {
            LawSource::Fitted { samples, error } => json!({ "samples": samples, "error_held_out": error }),
            LawSource::Guessed { preset } => json!({ "guessed": preset }),
        };
        let class = |class: &FittedClass| {
            json!({
                "class": class.spec.class,
                "workers": class.workers.len(),
                "engine": engine_file(&class.spec),
                "prefill": source(class.prefill),
                "decode": source(class.decode),
                "kv": match class.kv {
                    KvSource::Known => json!("known"),
                    KvSource::Evictions { reused, evicted } => json!({ "reused": reused, "evicted": evicted }),
                    KvSource::Guessed => json!("guessed"),
                },
            })
        };
        Value::Array(self.classes.iter().map(class).collect())
    }
}

/// An engine as a file for `simulate --engine`.
#[must_use]
pub fn engine_file(spec: &EngineSpec) -> Value {
    let EngineLaw { prefill, decode } = spec.law;
    json!({
        "base_ms": prefill.base_s * 1e3,
        "token_us": prefill.token_s * 1e6,
        "attention_ns": prefill.attention_s * 1e9,
        "step_ms": decode.step_s * 1e3,
        "request_us": decode.request_s * 1e6,
        "kv_token_ns": decode.kv_token_s * 1e9,
        "kv_tokens": spec.kv_tokens,
        "step_tokens_max": spec.step_tokens_max,
        "sequences_max": spec.sequences_max,
    })
}

/// How many times as long each worker of a class takes as the class, by its prefills; 1 for a worker with few of them.
fn slowness(workers: &[usize], prefills: &[PrefillSample]) -> Vec<f64> {
    let mut slowness = vec![1.0; workers.len()];
    // The law and the factors depend on each other: the second round has the law of the first round's factors.
    for _ in 0..2 {
        let of_class = |worker: usize| workers.iter().position(|of| *of == worker).map(|at| slowness[at]);
        let rows = rows(prefills, of_class, |sample| sample.worker, PrefillSample::row);
        let Some(constants) = constants(&rows) else { return slowness };
        let of_worker = |worker: usize| {
            let ratios: Vec<f64> = prefills
                .iter()
                .filter(|sample| sample.worker == worker)
                .map(|sample| sample.row(1.0))
                .map(|row| row.value / explained(&row, &constants).max(1e-9))
                .collect();
            if ratios.len() >= WORKER_SAMPLES_MIN { median(&ratios).clamp(0.1, 10.0) } else { 1.0 }
        };
        let found: Vec<f64> = workers.iter().map(|worker| of_worker(*worker)).collect();
        let usual = median(&found);
        slowness = found.into_iter().map(|of| of / usual).collect();
    }
    slowness
}

/// The rows of a class's samples.
fn rows<S, const N: usize>(
    samples: &[S],
    slowness: impl Fn(usize) -> Option<f64>,
    worker: impl Fn(&S) -> usize,
    row: impl Fn(&S, f64) -> Row<N>,
) -> Vec<Row<N>> {
    samples.iter().filter_map(|sample| Some(row(sample, slowness(worker(sample))?))).collect()
}

/// The constants of rows, and where they come from; `None` = there are too few rows.
fn fitted<const N: usize>(rows: &[Row<N>]) -> Option<([f64; N], LawSource)> {
    if rows.len() < SAMPLES_MIN {
        return None;
    }
    let (earlier, later) = rows.split_at(rows.len() / 2);
    let by_earlier = constants(earlier)?;
    let errors: Vec<f64> = later.iter().map(|row| (explained(row, &by_earlier) / row.value - 1.0).abs()).collect();
    Some((constants(rows)?, LawSource::Fitted { samples: rows.len(), error: median(&errors) }))
}

/// The law of a class, and where its two parts come from.
fn fitted_law(
    prefills: &[PrefillSample],
    decodes: &[DecodeSample],
    slowness: impl Fn(usize) -> Option<f64> + Copy,
) -> (EngineLaw, LawSource, LawSource) {
    let prefill = fitted::<PREFILL_COLUMNS>(&rows(prefills, slowness, |sample| sample.worker, PrefillSample::row));
    let decode = fitted::<DECODE_COLUMNS>(&rows(decodes, slowness, |sample| sample.worker, DecodeSample::row));
    let known = prefill.map(|(constants, source)| (prefill_law(&constants), source));
    let preset = nearest_preset(known.map(|(law, _)| law));
    let (prefill, prefill_source) = known.unwrap_or((preset.law.prefill, LawSource::Guessed { preset: preset.name }));
    // A preset for an engine of this speed.
    let factor = prefill.token_s / preset.law.prefill.token_s;
    let guessed = DecodeLaw {
        step_s: preset.law.decode.step_s * factor,
        request_s: preset.law.decode.request_s * factor,
        kv_token_s: preset.law.decode.kv_token_s * factor,
    };
    let (decode, decode_source) = match decode {
        Some((constants, source)) => {
            (DecodeLaw { step_s: constants[0], request_s: constants[1], kv_token_s: constants[2] }, source)
        }
        None => (guessed, LawSource::Guessed { preset: preset.name }),
    };
    // An engine takes some time for every token and for every step, also where a fit finds none.
    let law = EngineLaw {
        prefill: PrefillLaw { token_s: prefill.token_s.max(1e-9), ..prefill },
        decode: DecodeLaw { step_s: decode.step_s.max(1e-6), ..decode },
    };
    (law, prefill_source, decode_source)
}

/// The preset whose time of a token is nearest; the usual one if no time is known.
fn nearest_preset(law: Option<PrefillLaw>) -> &'static EnginePreset {
    let wanted = law.unwrap_or_default().token_s.max(1e-9);
    let distance = |preset: &&EnginePreset| (preset.law.prefill.token_s / wanted).ln().abs();
    ENGINE_PRESETS.iter().min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap_or(&ENGINE_PRESETS[0])
}

/// Tokens of the KV memory of a class.
fn kv_memory(load: &RecordedLoad, workers: &[usize], law: &EngineLaw) -> (u64, KvSource) {
    let known: Vec<u64> = workers.iter().map(|worker| load.workers[*worker].capacity_tokens).collect();
    if let Some(least) = known.iter().copied().min().filter(|least| *least > 0) {
        return (least, KvSource::Known);
    }
    let of_class = |worker: usize| workers.contains(&worker);
    let size = CacheSize::of(load.reuses.iter().copied().filter(|reuse| of_class(reuse.worker)), load.sample);
    let own = |request: &RecordedRequest| {
        f64::from(request.prompt_tokens.saturating_add(request.output_tokens().unwrap_or(0)))
    };
    // What is booked may wait at the engine; one request that ran was held.
    let held = load.requests.iter().filter(|request| of_class(request.worker)).map(own).fold(0.0, f64::max);
    let bounded = |tokens: f64| tokens.clamp(1.0, 1e15) as u64;
    if size.evicted >= EVICTIONS_MIN {
        let source = KvSource::Evictions { reused: size.reused, evicted: size.evicted };
        return (bounded(size.tokens.max(held)), source);
    }
    let preset = nearest_preset(Some(law.prefill)).kv_tokens as f64;
    (bounded(preset.max(size.tokens).max(held)), KvSource::Guessed)
}
