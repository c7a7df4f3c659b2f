//! What a request says about a prompt and where to run it, as Dynamo 1.6.1's selection service names it, and the
//! [`RouteRequest`] made from it.

use std::collections::{BTreeMap, BTreeSet};

use axum::http::HeaderMap;
use serde::de::{Deserializer, Visitor};
use serde::{Deserialize, Serialize};

use super::reply::Refusal;
use crate::ids::{Scheme, SpaceId, Window, Worker, WorkerId};
use crate::limits::PROMPT_TOKENS_MAX;
use crate::protocol::TraceContext;
use crate::route::{BookingRequest, Names, Overrides, Preferences, Prompt, RouteRequest};

/// The model of a request that names none.
pub(super) const MODEL_DEFAULT: &str = "default";
/// The routing group of a request that names none.
pub(super) const GROUP_DEFAULT: &str = "default";

pub(super) fn model_default() -> String {
    MODEL_DEFAULT.to_owned()
}

pub(super) fn group_default() -> String {
    GROUP_DEFAULT.to_owned()
}

/// The trace context of a request, by W3C's header. One that is not valid, or that comes twice, is none.
pub(super) fn trace_of(headers: &HeaderMap) -> Option<TraceContext> {
    let mut values = headers.get_all("traceparent").into_iter();
    let value = values.next().filter(|_| values.next().is_none())?;
    TraceContext::parse(value.to_str().ok()?)
}

/// A 64-bit hash in JSON, signed or unsigned: only the bits count.
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

/// The tokens of a multimodal prompt, with placeholders for images and other objects.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct MediaPrompt {
    pub(super) routing_token_ids: Vec<u32>,
    #[serde(default)]
    pub(super) block_mm_infos: Vec<Option<BlockMedia>>,
}

/// One rank of a worker; without a rank, any rank of it.
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

/// Labels that workers must have, and labels that they should have.
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

/// Policy values that a request overrides. `overlap_score_weight` is an older name of `prefill_load_scale` and wins
/// over it. Its value 0 also sets the credit to 0.
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
        // NaN is outside every range.
        let outside =
            |(_, value, max): &&(_, Option<f64>, f64)| value.is_some_and(|value| !(0.0..=*max).contains(&value));
        match numbers.iter().find(outside) {
            Some((name, ..)) => Err(format!("{name} is out of range")),
            None => Ok(overridden),
        }
    }
}

/// The fields of requests about a prompt: `/select`, `/select_and_reserve`, `/reservations`, `/potential_loads` and
/// `/overlap_scores`. Each ignores the fields that it does not need.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct PromptFields {
    /// From the request's header; no field of the body.
    #[serde(skip)]
    pub(super) trace: Option<TraceContext>,
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
    /// Its approximate memory.
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

/// The fields of a query, as the indexer names them.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct QueryFields {
    pub(super) token_ids: Vec<u32>,
    pub(super) model_name: String,
    #[serde(default = "group_default")]
    pub(super) routing_group: String,
    pub(super) lora_name: Option<String>,
    pub(super) cache_salt: Option<String>,
}

/// The fields of a query with hashes in place of tokens.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct HashQueryFields {
    pub(super) block_hashes: Vec<HashNumber>,
    pub(super) model_name: String,
    #[serde(default = "group_default")]
    pub(super) routing_group: String,
    pub(super) cache_salt: Option<String>,
}

/// The overlap of an instance with a prompt, in tokens: the maximum over its ranks. Each tier includes those above it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct OverlapSummary {
    pub(super) longest_matched: u64,
    pub(super) gpu: u64,
    /// Tokens in device memory, by rank.
    pub(super) dp: BTreeMap<String, u64>,
    pub(super) cpu: u64,
    pub(super) disk: u64,
}

/// Holds the lists that a [`RouteRequest`] made from the fields borrows.
pub(super) struct RequestBuilder<'a> {
    fields: &'a PromptFields,
    scheme: Scheme,
    tokens: Option<&'a [u32]>,
    hashes: Vec<u64>,
    media: Vec<(u32, u64)>,
    allow: Option<Vec<Worker>>,
    required: Vec<&'a str>,
    preferred: Vec<&'a str>,
    weights: Vec<f64>,
}

impl<'a> RequestBuilder<'a> {
    /// For a prompt in a space with this scheme.
    pub(super) fn of(fields: &'a PromptFields, scheme: Scheme) -> Result<Self, Refusal> {
        if fields.is_eagle.is_some_and(|is_eagle| is_eagle != (scheme.window == Window::Bigram)) {
            let message = format!(
                "is_eagle is {}, and the space's window is {:?}",
                !matches!(scheme.window, Window::Bigram),
                scheme.window
            );
            return Err(Refusal::invalid(message, "leave is_eagle out, or set window in the [[space]]"));
        }
        let routing = fields.mm_routing_info.as_ref().filter(|media| !media.routing_token_ids.is_empty());
        let (tokens, blocks) = match routing {
            Some(media) => (Some(media.routing_token_ids.as_slice()), Some(media.block_mm_infos.as_slice())),
            None => (fields.token_ids.as_deref(), fields.block_mm_infos.as_deref()),
        };
        let hashes = match tokens {
            Some(_) => Vec::new(),
            None => hashes_of(fields)?,
        };
        let constraints = &fields.routing_constraints;
        let every_rank = |id: &u64| Worker::every_rank(WorkerId(*id));
        Ok(Self {
            fields,
            scheme,
            tokens,
            hashes,
            media: if tokens.is_some() { media_of(blocks.unwrap_or_default()) } else { Vec::new() },
            allow: fields.allowed_worker_ids.as_ref().map(|ids| ids.iter().map(every_rank).collect()),
            required: constraints.required_taints.iter().map(String::as_str).collect(),
            preferred: constraints.preferred_taints.keys().map(String::as_str).collect(),
            weights: constraints.preferred_taints.values().copied().collect(),
        })
    }

    /// Tokens of the prompt.
    pub(super) fn prompt_tokens(&self) -> usize {
        self.prompt().token_count()
    }

    /// The prompt.
    pub(super) fn prompt(&self) -> Prompt<'_> {
        match self.tokens {
            Some(tokens) => Prompt::of_tokens(tokens),
            None => Prompt::LocalHashes {
                hashes: bytemuck::cast_slice(&self.hashes),
                scheme: self.scheme,
                token_count: self.fields.isl_tokens.unwrap_or(0),
            },
        }
    }

    /// A question about the prompt alone.
    pub(super) fn question(&self, space: SpaceId) -> RouteRequest<'_> {
        RouteRequest {
            lora: given(&self.fields.lora_name),
            salt: given(&self.fields.cache_salt),
            media: &self.media,
            ..RouteRequest::new(space, self.prompt())
        }
    }

    /// The whole request, booked under the name `book` and pinned to `pin` if they are given.
    pub(super) fn request<'b>(
        &'b self,
        space: SpaceId,
        book: Option<&'b str>,
        pin: Option<Worker>,
    ) -> RouteRequest<'b> {
        let fields = self.fields;
        let target = fields.affinity_target.map(|to| Worker::of_ranks(to.worker_id, to.dp_rank));
        let pinned = fields.pinned_worker.map(|to| Worker::new(to.worker_id, to.dp_rank));
        let session = fields.session_context.as_ref().map(|context| &context.session_id).or(fields.session_id.as_ref());
        let pin = pin.or(pinned).or(target);
        RouteRequest {
            book: book.map(|request_id| BookingRequest { request_id, attempt: 0 }),
            explain: true,
            candidates_max: 1,
            allow: self.allow.as_deref(),
            pin,
            required_taints: Names::Listed(&self.required),
            preferred_taints: Preferences { names: Names::Listed(&self.preferred), weights: &self.weights },
            overrides: self.overrides(),
            // A request that names a worker has no affinity to another.
            affinity_session: session.map(String::as_str).filter(|name| !name.is_empty() && pin.is_none()),
            expected_output_tokens: fields.expected_output_tokens.unwrap_or(0),
            priority: i32::try_from(fields.strict_priority.unwrap_or(0)).unwrap_or(i32::MAX),
            priority_jump: fields.priority_jump.unwrap_or(0.0),
            trace: fields.trace,
            ..self.question(space)
        }
    }

    fn overrides(&self) -> Overrides {
        let said = self.fields.router_config_override.unwrap_or_default();
        Overrides {
            mode: None,
            device_credit: said.overlap_score_credit,
            prefill_load_scale: said.prefill_load_scale,
            temperature: said.router_temperature,
            shared_multiplier: said.shared_cache_multiplier,
            assume_kv_reuse: said.assume_kv_reuse,
            track_prefill_tokens: self.fields.track_prefill_tokens.or(said.track_prefill_tokens),
        }
    }

    /// The sequence hashes of the prompt's whole blocks: those that were sent, or those computed from the tokens.
    pub(super) fn sequence_hashes(&self) -> Vec<i64> {
        let Some(tokens) = self.tokens else {
            let sent = self.fields.sequence_hashes.as_deref().unwrap_or_default();
            return sent.iter().map(|hash| hash.0 as i64).collect();
        };
        let seed = crate::hash::seed(self.fields.lora_name.as_deref(), self.fields.cache_salt.as_deref());
        let (mut locals, mut chain) = (Vec::new(), Vec::new());
        let bytes = crate::hash::token_bytes(tokens);
        crate::hash::local_hashes(self.scheme, seed, bytes, &self.media, &mut locals);
        crate::hash::sequence_hashes(&locals, &mut chain);
        chain.into_iter().map(|hash| hash.0 as i64).collect()
    }
}

/// The local hashes of a prompt without tokens, checked against the other fields.
fn hashes_of(fields: &PromptFields) -> Result<Vec<u64>, Refusal> {
    let missing = |what: &str| {
        let remedy = "send token_ids, or block_hashes with sequence_hashes and isl_tokens";
        Refusal::invalid(format!("{what} is required without token_ids"), remedy)
    };
    let locals = fields.block_hashes.as_ref().ok_or_else(|| missing("block_hashes"))?;
    let chained = fields.sequence_hashes.as_ref().ok_or_else(|| missing("sequence_hashes"))?;
    let tokens = fields.isl_tokens.ok_or_else(|| missing("isl_tokens"))?;
    if tokens == 0 {
        return Err(Refusal::invalid("isl_tokens must be greater than 0", "send the length of the prompt in tokens"));
    }
    if locals.len() != chained.len() {
        let message =
            format!("block_hashes length {} must match sequence_hashes length {}", locals.len(), chained.len());
        return Err(Refusal::invalid(message, "send one of each for every whole block"));
    }
    if tokens as usize > PROMPT_TOKENS_MAX {
        return Err(Refusal::invalid(format!("isl_tokens is {tokens}"), format!("keep it within {PROMPT_TOKENS_MAX}")));
    }
    Ok(bits(locals))
}

/// Hashes as unsigned numbers.
pub(super) fn bits(hashes: &[HashNumber]) -> Vec<u64> {
    hashes.iter().map(|hash| hash.0).collect()
}

fn media_of(blocks: &[Option<BlockMedia>]) -> Vec<(u32, u64)> {
    let objects = |(at, block): (usize, &Option<BlockMedia>)| {
        let objects = block.iter().flat_map(|block| &block.mm_objects);
        objects.map(move |object| (at as u32, object.mm_hash)).collect::<Vec<_>>()
    };
    blocks.iter().enumerate().flat_map(objects).collect()
}

/// A name as the decision takes it: an empty one is none, as in a frame.
pub(super) fn given(name: &Option<String>) -> Option<&str> {
    name.as_deref().filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_read_with_and_without_a_sign() {
        let hashes: Vec<HashNumber> = serde_json::from_str("[-1, 18446744073709551615, 5]").unwrap();
        assert_eq!(hashes, [HashNumber(u64::MAX), HashNumber(u64::MAX), HashNumber(5)]);
        assert!(
            serde_json::from_str::<HashNumber>("1.5").is_err() && serde_json::from_str::<HashNumber>("\"1\"").is_err()
        );
    }

    #[test]
    fn the_older_name_of_a_weight_keeps_its_meaning() {
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
