//! From what a request says to what is asked: lists are put where a [`RouteRequest`] can borrow them.

use super::fields::{BlockMedia, HashNumber, PromptFields};
use super::refusal::Refusal;
use crate::ids::{Scheme, SpaceId, Window, Worker, WorkerId};
use crate::limits::PROMPT_TOKENS_MAX;
use crate::route::{BookingRequest, Names, Overrides, Preferences, Prompt, RouteRequest};

/// What a request is made of beside what its fields hold as it is needed.
pub(super) struct Materials<'a> {
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

impl<'a> Materials<'a> {
    /// Of a prompt that is cut by `scheme`.
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

    /// What is to be run.
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

    /// Only the question about the prompt.
    pub(super) fn question(&self, space: SpaceId) -> RouteRequest<'_> {
        RouteRequest {
            lora: self.fields.lora_name.as_deref(),
            salt: self.fields.cache_salt.as_deref(),
            media: &self.media,
            ..RouteRequest::new(space, self.prompt())
        }
    }

    /// All that is asked; booked under a name, and pinned, as is said here.
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
            // Who names a worker is not led to another.
            affinity_session: session.map(String::as_str).filter(|name| !name.is_empty() && pin.is_none()),
            expected_output_tokens: fields.expected_output_tokens.unwrap_or(0),
            priority: i32::try_from(fields.strict_priority.unwrap_or(0)).unwrap_or(i32::MAX),
            priority_jump: fields.priority_jump.unwrap_or(0.0),
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

    /// The chained hashes of the prompt's whole blocks: those that were sent, or, of tokens, those that follow.
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

/// The local hashes of a prompt without tokens, as far as they make sense beside the rest.
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

/// Hashes as numbers without a sign.
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
