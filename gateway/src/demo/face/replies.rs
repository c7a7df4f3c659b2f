//! The JSON of a simulated engine's replies, with vLLM's fields.

use serde_json::{Value, json};

use crate::demo::engine::BLOCK_TOKENS;
use crate::limits::{DEMO_CAPACITY_BLOCKS, DEMO_TOKENS_MAX};

/// The release whose API is spoken here.
const VERSION: &str = "0.32.0";

/// What identifies one reply.
#[derive(Clone, Debug)]
pub(super) struct Head {
    pub(super) id: String,
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) is_chat: bool,
}

impl Head {
    fn object(&self, is_chunk: bool) -> Value {
        let object = match (self.is_chat, is_chunk) {
            (true, true) => "chat.completion.chunk",
            (true, false) => "chat.completion",
            (false, _) => "text_completion",
        };
        json!({"id": self.id, "object": object, "created": self.created, "model": self.model})
    }

    /// A reply in one piece.
    pub(super) fn whole(&self, text: &str, finish_reason: &str, usage: &Value) -> String {
        let mut reply = self.object(false);
        reply["choices"] = match self.is_chat {
            true => {
                json!([{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}])
            }
            false => json!([{"index": 0, "text": text, "logprobs": null, "finish_reason": finish_reason}]),
        };
        reply["usage"] = usage.clone();
        reply.to_string()
    }

    /// The event that begins a streamed chat.
    pub(super) fn begin(&self) -> Option<String> {
        self.is_chat.then(|| {
            let mut chunk = self.object(true);
            chunk["choices"] =
                json!([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null}]);
            event(&chunk)
        })
    }

    /// The event of some output; the last one has the reason why it ends.
    pub(super) fn part(&self, text: &str, finish_reason: Option<&str>) -> String {
        let mut chunk = self.object(true);
        chunk["choices"] = match self.is_chat {
            true => json!([{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]),
            false => json!([{"index": 0, "text": text, "logprobs": null, "finish_reason": finish_reason}]),
        };
        event(&chunk)
    }

    /// The event with the usage, if the caller wants it.
    pub(super) fn usage(&self, usage: &Value) -> String {
        let mut chunk = self.object(true);
        chunk["choices"] = json!([]);
        chunk["usage"] = usage.clone();
        event(&chunk)
    }
}

/// The event that ends a stream.
pub(super) const LAST_EVENT: &str = "data: [DONE]\n\n";

fn event(chunk: &Value) -> String {
    format!("data: {chunk}\n\n")
}

/// The usage of a request. As in vLLM, the last token of a prompt is always computed, and with it its block.
pub(super) fn usage(prompt_tokens: usize, completion_tokens: usize, cached_blocks: u32) -> Value {
    let cached =
        usize::try_from(cached_blocks).unwrap_or(usize::MAX).min(prompt_tokens.saturating_sub(1) / BLOCK_TOKENS);
    json!({
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached * BLOCK_TOKENS},
    })
}

/// `/v1/models`
pub(super) fn models(model: &str) -> String {
    let card = json!({
        "id": model, "object": "model", "created": 0, "owned_by": "kvrouted", "root": model, "parent": null,
        "max_model_len": DEMO_TOKENS_MAX,
    });
    json!({"object": "list", "data": [card]}).to_string()
}

/// `/version`
pub(super) fn version() -> String {
    json!({"version": VERSION}).to_string()
}

/// `/kv_event_sources`: by rank.
pub(super) fn event_sources(endpoint: &str) -> String {
    let source = json!({
        "enable_kv_cache_events": true, "publisher": "zmq", "endpoint": endpoint, "replay_endpoint": null,
        "buffer_steps": 10_000, "hwm": 100_000, "max_queue_size": 100_000, "topic": "",
    });
    json!({"0": source}).to_string()
}

/// `/metrics`: the one that says how the cache is laid out.
pub(super) fn metrics() -> String {
    format!(
        "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n\
         # TYPE vllm:cache_config_info gauge\n\
         vllm:cache_config_info{{block_size=\"{BLOCK_TOKENS}\",enable_prefix_caching=\"True\",engine=\"0\",\
         num_gpu_blocks=\"{DEMO_CAPACITY_BLOCKS}\"}} 1.0\n"
    )
}

/// `/tokenize`
pub(super) fn tokenized(tokens: &[u32]) -> String {
    json!({"count": tokens.len(), "max_model_len": DEMO_TOKENS_MAX, "tokens": tokens, "token_strs": null}).to_string()
}

/// The renderers: an object for a chat, a list of one for a text.
pub(super) fn rendered(id: &str, model: &str, tokens: &[u32], is_chat: bool) -> String {
    let request = json!({
        "request_id": id, "token_ids": tokens, "features": null, "sampling_params": {}, "model": model,
        "stream": false, "cache_salt": null, "priority": 0,
    });
    if is_chat { request.to_string() } else { json!([request]).to_string() }
}

/// An error in vLLM's shape.
pub(super) fn error(status: u16, why: &str) -> String {
    let kind = match status {
        404 => "NotFoundError",
        503 => "ServiceUnavailableError",
        _ => "BadRequestError",
    };
    json!({"error": {"message": why, "type": kind, "param": null, "code": status}}).to_string()
}

/// A path that is not served.
pub(super) fn not_found() -> String {
    json!({"detail": "Not Found"}).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_token_of_a_prompt_is_always_computed() {
        let cached = |prompt, blocks| usage(prompt, 1, blocks)["prompt_tokens_details"]["cached_tokens"].clone();
        assert_eq!((cached(32, 2), cached(33, 2), cached(64, 1)), (json!(16), json!(32), json!(16)));
        assert_eq!(cached(1, 0), json!(0));
    }

    #[test]
    fn a_stream_has_the_shape_of_its_api() {
        let head = |is_chat| Head { id: "x".into(), created: 1, model: "demo".into(), is_chat };
        assert!(head(true).begin().is_some() && head(false).begin().is_none());
        let read = |event: &str| -> Value {
            serde_json::from_str(event.strip_prefix("data: ").expect("an event")).expect("JSON")
        };
        assert_eq!(read(&head(true).part("a", None))["choices"][0]["delta"]["content"], "a");
        assert_eq!(read(&head(false).part("a", Some("stop")))["choices"][0]["finish_reason"], "stop");
        let usage = read(&head(true).usage(&usage(20, 4, 1)));
        assert_eq!((usage["choices"].as_array().map(Vec::len), &usage["usage"]["total_tokens"]), (Some(0), &json!(24)));
    }
}
