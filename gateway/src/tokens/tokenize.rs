//! The body of `/tokenize` for a caller's body, where the result is the same prompt.
//!
//! Both engines ignore fields that they do not know, so a field that is not passed on could change the prompt
//! unnoticed. Therefore each field of a body must be listed here: it is passed on, or it cannot change the prompt.
//! With any other field `/tokenize` is not used.

use serde_json::value::RawValue;

use super::body::{Fields, are_text, fields, value};
use crate::api::{ApiPath, Listed};
use crate::engines::Dialect;

/// Fields that choose among outputs or shape the reply: they are not part of any prompt.
pub(super) const NEUTRAL: [&str; 53] = [
    "allowed_token_ids",
    "bad_words",
    "best_of",
    "cache_salt",
    "echo",
    "frequency_penalty",
    "ignore_eos",
    "include_reasoning",
    "include_stop_str_in_output",
    "length_penalty",
    "logit_bias",
    "logprob_token_ids",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "metadata",
    "min_p",
    "min_tokens",
    "n",
    "no_stop_trim",
    "parallel_tool_calls",
    "presence_penalty",
    "priority",
    "prompt_logprobs",
    "repetition_detection",
    "repetition_penalty",
    "request_id",
    "return_prompt_text",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "rid",
    "routed_experts_prompt_start",
    "sampling_params",
    "seed",
    "service_tier",
    "session_id",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop",
    "stop_token_ids",
    "store",
    "stream",
    "stream_interval",
    "stream_options",
    "structured_outputs",
    "temperature",
    "thinking_token_budget",
    "top_k",
    "top_logprobs",
    "top_p",
    "use_beam_search",
    "user",
    "watermarking",
];
/// Passed on for a chat. `tool_choice` reaches a few templates, but not in its default `auto`.
const VLLM_CHAT: [&str; 11] = [
    "model",
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "tools",
    "tool_choice",
];
const SGLANG_CHAT: [&str; 7] =
    ["model", "messages", "tools", "tool_choice", "reasoning_effort", "continue_final_message", "chat_template_kwargs"];
const COMPLETION: [&str; 3] = ["model", "prompt", "add_special_tokens"];

/// The body of `/tokenize` that gives the same prompt, or why there is none.
pub(super) fn tokenize_body(dialect: Dialect, path: ApiPath, body: &[u8]) -> Result<Vec<u8>, String> {
    let mut fields = fields(body).ok_or("the body is no JSON object")?;
    let passed: &[&str] = match (path, dialect) {
        (ApiPath::ChatCompletions, Dialect::Vllm) => &VLLM_CHAT,
        (ApiPath::ChatCompletions, Dialect::Sglang) => &SGLANG_CHAT,
        (ApiPath::Completions, _) => &COMPLETION,
        (ApiPath::SglangGenerate, Dialect::Sglang) => {
            if let Some(text) = fields.remove("text") {
                fields.insert("prompt".into(), text);
            }
            &COMPLETION
        }
        _ => return Err("this path has no /tokenize".to_owned()),
    };
    fields.retain(|_, raw| raw.get() != "null");
    let is_known = |field: &str| passed.contains(&field) || NEUTRAL.contains(&field);
    if let Some(field) = fields.keys().find(|field| !is_known(field)) {
        return Err(format!("/tokenize does not take the field {}", shown(field)));
    }
    let wanted = if path == ApiPath::ChatCompletions { chat(dialect, &fields)? } else { completion(&fields)? };
    fields.retain(|field, _| passed.contains(&&**field) && wanted.keeps(field));
    if let Some(prompt) = wanted.prompt {
        fields.insert("prompt".into(), prompt);
    }
    serde_json::to_vec(&fields).map_err(|_| "the body cannot be written as JSON".to_owned())
}

struct Wanted<'a> {
    /// Instead of a list of prompts, its first one.
    prompt: Option<&'a RawValue>,
    with_tool_choice: bool,
}

impl Wanted<'_> {
    fn keeps(&self, field: &str) -> bool {
        field != "tool_choice" || self.with_tool_choice
    }
}

fn chat<'a>(dialect: Dialect, fields: &Fields<'a>) -> Result<Wanted<'a>, String> {
    let messages = value(fields, "messages").ok_or("the body has no messages")?;
    if !are_text(messages) {
        return Err("/tokenize does not tell the hashes of images, audio and video".to_owned());
    }
    // vLLM renames this field of a message for a chat, but not for /tokenize.
    if dialect == Dialect::Vllm && memchr::memmem::find(messages.as_bytes(), b"\"reasoning_content\"").is_some() {
        return Err("/tokenize does not take reasoning_content of messages".to_owned());
    }
    let has_tools = value(fields, "tools").is_some_and(|tools| tools != "[]");
    let is_default = matches!(value(fields, "tool_choice"), None | Some("\"auto\""));
    if dialect == Dialect::Vllm && has_tools && !is_default {
        return Err("/tokenize does not take tool_choice, and some templates use it".to_owned());
    }
    Ok(Wanted { prompt: None, with_tool_choice: dialect == Dialect::Sglang })
}

/// Of several prompts the first one.
fn completion<'a>(fields: &Fields<'a>) -> Result<Wanted<'a>, String> {
    let prompt = value(fields, "prompt").ok_or("the body has no prompt as text")?;
    if prompt.starts_with('"') {
        return Ok(Wanted { prompt: None, with_tool_choice: false });
    }
    let prompts: Listed<&RawValue> = serde_json::from_str(prompt).map_err(|_| "the prompt is no text")?;
    let first = prompts.first.filter(|first| first.get().starts_with('"'));
    Ok(Wanted { prompt: Some(first.ok_or("the first prompt is no text")?), with_tool_choice: false })
}

/// A caller's field name for a log: short, without control characters.
pub(super) fn shown(field: &str) -> String {
    let short: String = field.chars().filter(|char| char.is_ascii_graphic()).take(40).collect();
    format!("`{short}`")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn of(dialect: Dialect, path: ApiPath, body: &Value) -> Result<Value, String> {
        let body = tokenize_body(dialect, path, body.to_string().as_bytes())?;
        Ok(serde_json::from_slice(&body).expect("JSON"))
    }

    fn chat(body: &Value) -> Result<Value, String> {
        of(Dialect::Vllm, ApiPath::ChatCompletions, body)
    }

    #[test]
    fn the_lists_are_sorted_and_apart() {
        assert!(NEUTRAL.is_sorted());
        for field in VLLM_CHAT.iter().chain(&SGLANG_CHAT).chain(&COMPLETION) {
            assert!(!NEUTRAL.contains(field), "{field}");
        }
    }

    #[test]
    fn fields_of_the_prompt_are_passed_on_and_others_are_not() {
        let messages = json!([{"role": "user", "content": "hello"}]);
        let tools = json!([{"type": "function", "function": {"name": "f"}}]);
        let body = json!({"model": "m", "messages": messages, "temperature": 0.5, "stream": true, "max_tokens": 9,
            "tools": tools, "tool_choice": "auto", "chat_template_kwargs": {"enable_thinking": false},
            "add_generation_prompt": true, "seed": null, "unknown": null});
        let expected = json!({"model": "m", "messages": messages, "tools": tools, "add_generation_prompt": true,
            "chat_template_kwargs": {"enable_thinking": false}});
        assert_eq!(chat(&body), Ok(expected));
        let sglang =
            json!({"messages": messages, "tools": tools, "tool_choice": "required", "reasoning_effort": "low"});
        assert_eq!(of(Dialect::Sglang, ApiPath::ChatCompletions, &sglang), Ok(sglang));
    }

    #[test]
    fn a_field_that_could_change_the_prompt_forbids_tokenize() {
        let messages = json!([{"role": "user", "content": "hello"}]);
        for (field, value) in [
            ("documents", json!([{"text": "a"}])),
            ("reasoning_effort", json!("low")),
            ("truncate_prompt_tokens", json!(5)),
            ("truncation_side", json!("left")),
            ("kv_transfer_params", json!({"prompt_token_ids": [1]})),
            ("response_format", json!({"type": "json_object"})),
            ("a_field_of_tomorrow", json!(1)),
        ] {
            let error = chat(&json!({"messages": messages, field: value})).expect_err(field);
            assert!(error.contains(field), "{error}");
        }
        let tools = json!([{"type": "function", "function": {"name": "f"}}]);
        for choice in [json!("none"), json!("required"), json!({"type": "function"})] {
            assert!(chat(&json!({"messages": messages, "tools": tools, "tool_choice": choice})).is_err());
        }
        assert!(chat(&json!({"messages": messages, "tool_choice": "none"})).is_ok(), "without tools it has no effect");
        let image = json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "secret"}}]}]);
        assert!(chat(&json!({"messages": image})).is_err_and(|why| !why.contains("secret")));
        let thought = json!([{"role": "assistant", "content": "a", "reasoning_content": "b"}]);
        assert!(chat(&json!({"messages": thought})).is_err());
        assert!(of(Dialect::Vllm, ApiPath::Responses, &json!({"input": "a"})).is_err());
    }

    #[test]
    fn completions_are_tokenised_by_their_first_prompt() {
        let completion = |body: Value| of(Dialect::Vllm, ApiPath::Completions, &body);
        let one = completion(json!({"model": "m", "prompt": "a", "max_tokens": 1, "add_special_tokens": false}));
        assert_eq!(one, Ok(json!({"model": "m", "prompt": "a", "add_special_tokens": false})));
        assert_eq!(completion(json!({"prompt": ["a", "b"]})), Ok(json!({"prompt": "a"})));
        for body in [json!({"prompt": "a", "suffix": "b"}), json!({"prompt": []}), json!({"prompt": [1]}), json!({})] {
            assert!(completion(body.clone()).is_err(), "{body}");
        }
        let generate = json!({"text": "a", "sampling_params": {"temperature": 0}});
        assert_eq!(of(Dialect::Sglang, ApiPath::SglangGenerate, &generate), Ok(json!({"prompt": "a"})));
        assert!(of(Dialect::Sglang, ApiPath::SglangGenerate, &json!({"text": "a", "image_data": "b"})).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            for path in [ApiPath::ChatCompletions, ApiPath::Completions, ApiPath::SglangGenerate] {
                let _ = tokenize_body(Dialect::Vllm, path, &bytes);
            }
        }

        #[test]
        fn no_unknown_field_is_dropped_silently(field in "[a-z_]{1,20}") {
            let known = NEUTRAL.contains(&&*field) || VLLM_CHAT.contains(&&*field);
            let body = json!({"messages": [], field.clone(): 1});
            prop_assert_eq!(chat(&body).is_ok(), known && field != "messages");
        }
    }
}
