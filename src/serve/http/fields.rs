//! What requests say about a prompt and where to run it, as Dynamo 1.6.1's selection service names it.

use std::collections::{BTreeMap, BTreeSet};

use serde::de::{Deserializer, Visitor};
use serde::{Deserialize, Serialize};

/// What a request that names no model means.
pub(super) const MODEL_DEFAULT: &str = "default";
/// What a request that names no routing group means.
pub(super) const GROUP_DEFAULT: &str = "default";

pub(super) fn model_default() -> String {
    MODEL_DEFAULT.to_owned()
}

pub(super) fn group_default() -> String {
    GROUP_DEFAULT.to_owned()
}

/// A 64-bit hash as JSON has it: signed or not, the bits are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HashNumber(pub(super) u64);

impl<'de> Deserialize<'de> for HashNumber {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bits;
        impl Visitor<'_> for Bits {
            type Value = HashNumber;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a 64-bit integer")
            }

            fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<HashNumber, E> {
                Ok(HashNumber(value as u64))
            }

            fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<HashNumber, E> {
                Ok(HashNumber(value))
            }
        }
        deserializer.deserialize_any(Bits)
    }
}

/// One multimodal object of a block.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct MediaObject {
    pub(super) mm_hash: u64,
}

/// The multimodal objects of a block.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct BlockMedia {
    pub(super) mm_objects: Vec<MediaObject>,
}

/// The tokens of a prompt with placeholders for what is no text.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct MediaPrompt {
    pub(super) routing_token_ids: Vec<u32>,
    #[serde(default)]
    pub(super) block_mm_infos: Vec<Option<BlockMedia>>,
}

/// One rank of a worker, or, without the rank, any.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Target {
    pub(super) worker_id: u64,
    pub(super) dp_rank: Option<u32>,
}

/// One rank of a worker.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Pin {
    pub(super) worker_id: u64,
    pub(super) dp_rank: u32,
}

/// Labels that workers must have, or should.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct Constraints {
    #[serde(default)]
    pub(super) required_taints: BTreeSet<String>,
    #[serde(default)]
    pub(super) preferred_taints: BTreeMap<String, f64>,
}

/// The conversation that a request belongs to.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct SessionContext {
    pub(super) session_id: String,
}

/// What a request sets in place of the policy. `overlap_score_weight` is an older name of `prefill_load_scale`, which
/// wins over it, and of which 0 means no credit either.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(try_from = "OverrideFields")]
pub(super) struct Override {
    pub(super) overlap_score_credit: Option<f64>,
    pub(super) prefill_load_scale: Option<f64>,
    pub(super) router_temperature: Option<f64>,
    pub(super) assume_kv_reuse: Option<bool>,
    pub(super) track_prefill_tokens: Option<bool>,
    pub(super) shared_cache_multiplier: Option<f64>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct OverrideFields {
    overlap_score_credit: Option<f64>,
    prefill_load_scale: Option<f64>,
    overlap_score_weight: Option<f64>,
    router_temperature: Option<f64>,
    assume_kv_reuse: Option<bool>,
    track_prefill_tokens: Option<bool>,
    shared_cache_multiplier: Option<f64>,
}

impl TryFrom<OverrideFields> for Override {
    type Error = String;

    fn try_from(fields: OverrideFields) -> Result<Self, String> {
        let mut overridden = Self {
            overlap_score_credit: fields.overlap_score_credit,
            prefill_load_scale: fields.prefill_load_scale,
            router_temperature: fields.router_temperature,
            assume_kv_reuse: fields.assume_kv_reuse,
            track_prefill_tokens: fields.track_prefill_tokens,
            shared_cache_multiplier: fields.shared_cache_multiplier,
        };
        if let Some(weight) = fields.overlap_score_weight {
            overridden.prefill_load_scale = Some(weight);
            if weight == 0.0 {
                overridden.overlap_score_credit = Some(0.0);
            }
        }
        let numbers = [
            ("overlap_score_credit", overridden.overlap_score_credit, f64::MAX),
            ("prefill_load_scale", overridden.prefill_load_scale, f64::MAX),
            ("router_temperature", overridden.router_temperature, f64::MAX),
            ("shared_cache_multiplier", overridden.shared_cache_multiplier, 1.0),
        ];
        // NaN is in no range.
        let outside =
            |(_, value, max): &&(_, Option<f64>, f64)| value.is_some_and(|value| !(0.0..=*max).contains(&value));
        match numbers.iter().find(outside) {
            Some((name, ..)) => Err(format!("{name} is out of range")),
            None => Ok(overridden),
        }
    }
}

/// All that a request about a prompt may say: of `/select`, `/select_and_reserve`, `/reservations`, `/potential_loads`
/// and `/overlap_scores`, each of which passes over what it has no use for.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct PromptFields {
    #[serde(default = "model_default")]
    pub(super) model_name: String,
    #[serde(default = "group_default")]
    pub(super) routing_group: String,
    pub(super) selection_id: Option<String>,
    pub(super) token_ids: Option<Vec<u32>>,
    pub(super) mm_routing_info: Option<MediaPrompt>,
    pub(super) block_mm_infos: Option<Vec<Option<BlockMedia>>>,
    pub(super) block_hashes: Option<Vec<HashNumber>>,
    pub(super) sequence_hashes: Option<Vec<HashNumber>>,
    pub(super) isl_tokens: Option<u32>,
    pub(super) lora_name: Option<String>,
    pub(super) cache_salt: Option<String>,
    pub(super) is_eagle: Option<bool>,
    pub(super) router_config_override: Option<Override>,
    pub(super) expected_output_tokens: Option<u32>,
    pub(super) priority_jump: Option<f64>,
    pub(super) strict_priority: Option<u32>,
    pub(super) session_id: Option<String>,
    pub(super) session_context: Option<SessionContext>,
    pub(super) affinity_target: Option<Target>,
    pub(super) pinned_worker: Option<Pin>,
    pub(super) allowed_worker_ids: Option<BTreeSet<u64>>,
    #[serde(default)]
    pub(super) routing_constraints: Constraints,
    #[serde(default)]
    pub(super) advisory: bool,
    pub(super) worker_id: Option<u64>,
    pub(super) dp_rank: Option<u32>,
    pub(super) effective_prefill_tokens: Option<u32>,
    pub(super) track_prefill_tokens: Option<bool>,
}

impl PromptFields {
    /// Memory that it takes, about.
    pub(super) fn bytes(&self) -> usize {
        let tokens = self.token_ids.as_ref().map_or(0, Vec::len);
        let media = self.mm_routing_info.as_ref().map_or(0, |media| media.routing_token_ids.len());
        let hashes = [&self.block_hashes, &self.sequence_hashes].map(|hashes| hashes.as_ref().map_or(0, Vec::len));
        let objects = |blocks: &[Option<BlockMedia>]| {
            blocks.iter().map(|block| 32 + block.as_ref().map_or(0, |block| block.mm_objects.len() * 8)).sum::<usize>()
        };
        let objects = self.block_mm_infos.as_deref().map_or(0, objects)
            + self.mm_routing_info.as_ref().map_or(0, |media| objects(&media.block_mm_infos));
        let names = [&self.selection_id, &self.lora_name, &self.cache_salt, &self.session_id];
        let names: usize = names.iter().map(|name| name.as_ref().map_or(0, String::len)).sum();
        let session = self.session_context.as_ref().map_or(0, |context| context.session_id.len());
        let Constraints { required_taints, preferred_taints } = &self.routing_constraints;
        let taints: usize = required_taints.iter().chain(preferred_taints.keys()).map(|taint| 64 + taint.len()).sum();
        let allowed = self.allowed_worker_ids.as_ref().map_or(0, BTreeSet::len) * 16;
        let text = self.model_name.len() + self.routing_group.len() + names + session + taints;
        size_of::<Self>() + (tokens + media) * 4 + (hashes[0] + hashes[1]) * 8 + objects + text + allowed
    }
}

/// What a query of the index says, as the indexer names it.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct QueryFields {
    pub(super) token_ids: Vec<u32>,
    pub(super) model_name: String,
    #[serde(default = "group_default")]
    pub(super) routing_group: String,
    pub(super) lora_name: Option<String>,
    pub(super) cache_salt: Option<String>,
}

/// The same with hashes in place of tokens.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct HashQueryFields {
    pub(super) block_hashes: Vec<HashNumber>,
    pub(super) model_name: String,
    #[serde(default = "group_default")]
    pub(super) routing_group: String,
    pub(super) cache_salt: Option<String>,
}

/// What is held of a prompt, in tokens, each tier with those above it; over the ranks of an instance the most.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct OverlapSummary {
    pub(super) longest_matched: u64,
    pub(super) gpu: u64,
    /// Tokens in device memory, by rank.
    pub(super) dp: BTreeMap<String, u64>,
    pub(super) cpu: u64,
    pub(super) disk: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_bits_whatever_their_sign() {
        let hashes: Vec<HashNumber> = serde_json::from_str("[-1, 18446744073709551615, 5]").unwrap();
        assert_eq!(hashes, [HashNumber(u64::MAX), HashNumber(u64::MAX), HashNumber(5)]);
        assert!(
            serde_json::from_str::<HashNumber>("1.5").is_err() && serde_json::from_str::<HashNumber>("\"1\"").is_err()
        );
    }

    #[test]
    fn the_older_name_of_a_weight_means_what_it_meant() {
        let read = |json: &str| serde_json::from_str::<Override>(json);
        let zero = read(r#"{"overlap_score_weight": 0}"#).unwrap();
        assert_eq!((zero.prefill_load_scale, zero.overlap_score_credit), (Some(0.0), Some(0.0)));
        let both = read(r#"{"overlap_score_weight": 2, "prefill_load_scale": 3}"#).unwrap();
        assert_eq!((both.prefill_load_scale, both.overlap_score_credit), (Some(2.0), None));
        for wrong in [r#"{"router_temperature": -1}"#, r#"{"shared_cache_multiplier": 1.5}"#] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
