//! How long an engine takes: the law of a prefill, which costs in seconds are made of, that of a step, which simulated
//! engines obey, and the constants of some engines.
//!
//! The constants are fits of the operator tables of aiconfigurator-core 0.12.0 (vLLM 0.24 on H100 SXM, Apache-2.0). Their
//! mean error is 1.4 to 3.5 %, the largest 10 %.

/// `base_s + token_s·u + attention_s·u·(c + u/2)` seconds for `u` tokens to compute behind `c` tokens that are cached.
///
/// The last term is attention: each new token attends to every token before it, cached ones too. On long prompts that
/// are mostly cached it is the largest term, so that a count of uncached tokens alone misjudges them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillLaw {
    /// Seconds of every prefill.
    pub base_s: f64,
    /// Seconds of each token to compute.
    pub token_s: f64,
    /// Seconds of each pair of a token to compute and a token before it.
    pub attention_s: f64,
}

impl PrefillLaw {
    /// The law with these constants, seconds, in the order of the fields.
    #[must_use]
    pub const fn of([base_s, token_s, attention_s]: [f64; 3]) -> Self {
        Self { base_s, token_s, attention_s }
    }

    /// Its constants, in the order of the fields.
    #[must_use]
    pub const fn constants(&self) -> [f64; 3] {
        [self.base_s, self.token_s, self.attention_s]
    }

    /// Seconds to compute `uncached` tokens behind `cached` ones.
    #[must_use]
    #[inline(always)]
    pub fn prefill_s(&self, uncached: f64, cached: f64) -> f64 {
        self.base_s + uncached * (self.token_s + self.attention_s * (cached + 0.5 * uncached))
    }

    /// The same engine, `factor` times as slow.
    #[must_use]
    pub const fn slowed(&self, factor: f64) -> Self {
        Self { base_s: self.base_s * factor, token_s: self.token_s * factor, attention_s: self.attention_s * factor }
    }
}

/// An engine of which nothing is known: Llama 70B in bf16 on four H100. As long as all workers have the same law, only
/// the ratios of its constants matter, and those differ little between models.
impl Default for PrefillLaw {
    fn default() -> Self {
        ENGINE_PRESETS[3].law.prefill
    }
}

/// What decoding adds to the time of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecodeLaw {
    /// Seconds of a step that only decodes: to read the weights once.
    pub step_s: f64,
    /// Seconds of each decoding request.
    pub request_s: f64,
    /// Seconds of each token in the KV memory of the decoding requests.
    pub kv_token_s: f64,
}

/// The time of an engine's steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineLaw {
    /// The part of prompts.
    pub prefill: PrefillLaw,
    /// The part of outputs.
    pub decode: DecodeLaw,
}

impl EngineLaw {
    /// The law with these constants, in seconds and in the order of the fields.
    #[must_use]
    pub const fn of(prefill: [f64; 3], [step_s, request_s, kv_token_s]: [f64; 3]) -> Self {
        Self { prefill: PrefillLaw::of(prefill), decode: DecodeLaw { step_s, request_s, kv_token_s } }
    }

    /// Seconds of a step that computes `new_tokens` of prompts, in which new tokens attend to `attention` pairs of a new
    /// token and one before it, while `decoding` requests with `kv_tokens` tokens decode. The weights are read once.
    #[must_use]
    pub fn step_s(&self, new_tokens: f64, attention: f64, decoding: f64, kv_tokens: f64) -> f64 {
        let PrefillLaw { base_s, token_s, attention_s } = self.prefill;
        let compute_s = if new_tokens > 0.0 { base_s + token_s * new_tokens } else { 0.0 };
        let decode_s = self.decode.request_s * decoding + self.decode.kv_token_s * kv_tokens;
        self.decode.step_s.max(compute_s) + attention_s * attention + decode_s
    }

    /// Seconds to compute `uncached` tokens behind `cached` ones, in steps of at most `step_tokens_max` tokens.
    #[must_use]
    pub fn prefill_s(&self, uncached: f64, cached: f64, step_tokens_max: f64) -> f64 {
        let steps = (uncached / step_tokens_max).ceil().max(1.0);
        self.prefill.prefill_s(uncached, cached) + (steps - 1.0) * self.prefill.base_s
    }
}

/// An engine whose constants are known: a model on some H100.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EnginePreset {
    /// Its name: parameters, and GPUs over which the model is split.
    pub name: &'static str,
    /// Its law.
    pub law: EngineLaw,
    /// Tokens of its KV memory at 90 % of the GPUs' memory.
    pub kv_tokens: u64,
    /// The KV of one token over all layers and KV heads, keys and values, bytes. By the models' published shapes.
    pub kv_token_bytes: u32,
}

/// The presets of this release.
pub const ENGINE_PRESETS: [EnginePreset; 6] = [
    preset("8b-tp1", [3.0, 19.1, 0.792], [6.4, 10.5, 41.7], [433_000, 32 * KV_LAYER_BYTES]),
    preset("32b-tp2", [7.5, 47.7, 1.604], [13.6, 24.6, 42.5], [302_000, 64 * KV_LAYER_BYTES]),
    preset("32b-tp4", [7.3, 28.4, 0.786], [8.3, 20.7, 21.4], [856_000, 64 * KV_LAYER_BYTES]),
    preset("70b-tp4", [6.9, 60.5, 0.990], [15.2, 33.2, 26.6], [454_000, 80 * KV_LAYER_BYTES]),
    preset("70b-tp8", [6.2, 38.6, 0.495], [10.0, 26.7, 13.3], [1_340_000, 80 * KV_LAYER_BYTES]),
    preset("70b-fp8-tp4", [7.1, 45.9, 1.047], [10.2, 40.2, 14.6], [1_330_000, 80 * KV_LAYER_BYTES / 2]),
];

/// The names of [`ENGINE_PRESETS`].
pub const ENGINE_PRESET_NAMES: [&str; 6] = ["8b-tp1", "32b-tp2", "32b-tp4", "70b-tp4", "70b-tp8", "70b-fp8-tp4"];

/// Bytes of one token's KV in one layer of these models: keys and values of 8 heads of 128 numbers of 16 bits.
const KV_LAYER_BYTES: u32 = 2 * 8 * 128 * 2;

/// Milliseconds of a step, microseconds of a token or request, nanoseconds of a pair or of a token in the KV memory; tokens
/// of the KV memory, and bytes of one of them.
const fn preset(
    name: &'static str,
    prefill: [f64; 3],
    decode: [f64; 3],
    [kv_tokens, kv_token_bytes]: [u32; 2],
) -> EnginePreset {
    let [base_ms, token_us, attention_ns] = prefill;
    let [step_ms, request_us, kv_token_ns] = decode;
    let prefill = PrefillLaw { base_s: base_ms * 1e-3, token_s: token_us * 1e-6, attention_s: attention_ns * 1e-9 };
    let decode = DecodeLaw { step_s: step_ms * 1e-3, request_s: request_us * 1e-6, kv_token_s: kv_token_ns * 1e-9 };
    EnginePreset { name, law: EngineLaw { prefill, decode }, kv_tokens: kv_tokens as u64, kv_token_bytes }
}

/// The preset of this name.
#[must_use]
pub fn engine_preset(name: &str) -> Option<&'static EnginePreset> {
    ENGINE_PRESETS.iter().find(|preset| preset.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attention_over_what_is_cached_takes_time() {
        let law = PrefillLaw { base_s: 1.0, token_s: 0.5, attention_s: 0.25 };
        assert_eq!(law.prefill_s(0.0, 100.0), 1.0);
        assert_eq!(law.prefill_s(4.0, 0.0), 1.0 + 2.0 + 0.25 * 4.0 * 2.0);
        assert_eq!(law.prefill_s(4.0, 10.0), 1.0 + 2.0 + 0.25 * 4.0 * 12.0);
        assert_eq!(law.slowed(2.0).prefill_s(4.0, 10.0), 2.0 * law.prefill_s(4.0, 10.0));
    }

    /// Rows of the operator tables, milliseconds: prefill of 2k, 8k and 32k tokens; of 2k tokens behind 8k, 32k and 64k
    /// cached ones; one decode step at a context of 2k with 1, 32, 128 and 256 requests.
    type Row = (&'static str, [f64; 3], [f64; 3], [f64; 4]);
    const TABLE: [Row; 6] = [
        ("8b-tp1", [43.0, 200.0, 1082.0], [56.0, 96.0, 150.0], [6.2, 9.6, 18.1, 30.7]),
        ("32b-tp2", [107.0, 476.0, 2503.0], [134.0, 214.0, 323.0], [13.5, 17.6, 27.5, 42.3]),
        ("32b-tp4", [66.0, 274.0, 1426.0], [79.0, 118.0, 172.0], [8.2, 11.0, 15.9, 24.4]),
        ("70b-tp4", [130.0, 577.0, 2531.0], [147.0, 196.0, 263.0], [15.0, 18.4, 26.1, 37.2]),
        ("70b-tp8", [86.0, 344.0, 1536.0], [93.0, 118.0, 153.0], [10.2, 11.2, 16.3, 23.2]),
        ("70b-fp8-tp4", [109.0, 395.0, 1976.0], [125.0, 179.0, 252.0], [10.7, 12.8, 18.9, 27.8]),
    ];

    #[test]
    fn the_presets_give_the_rows_of_the_operator_tables() {
        let (mut worst, mut sum, mut rows) = (0.0_f64, 0.0, 0.0);
        for (name, prefills, behind, decodes) in TABLE {
            let law = engine_preset(name).expect("a preset of this name").law;
            let k = |thousands: f64| thousands * 1024.0;
            let of_prefill = [2.0, 8.0, 32.0].map(|tokens| law.prefill_s(k(tokens), 0.0, k(8.0)));
            let of_behind = [8.0, 32.0, 64.0].map(|cached| law.prefill_s(k(2.0), k(cached), k(8.0)));
            let of_decode = [1.0, 32.0, 128.0, 256.0].map(|batch| law.step_s(0.0, 0.0, batch, batch * k(2.0)));
            let ours = of_prefill.iter().chain(&of_behind).chain(&of_decode);
            for (ours, table) in ours.zip(prefills.iter().chain(&behind).chain(&decodes)) {
                let error = (ours * 1e3 / table - 1.0).abs();
                assert!(error < 0.16, "{name}: {} ms for {table} ms", ours * 1e3);
                (worst, sum, rows) = (worst.max(error), sum + error, rows + 1.0);
            }
        }
        assert!(sum / rows < 0.05, "mean error {}, worst {worst}", sum / rows);
    }

    #[test]
    fn presets_are_found_by_name() {
        assert_eq!(ENGINE_PRESETS.map(|preset| preset.name), ENGINE_PRESET_NAMES);
        assert_eq!(engine_preset("70b-tp4").map(|preset| preset.law.prefill), Some(PrefillLaw::default()));
        assert_eq!(engine_preset("70B"), None);
    }
}
