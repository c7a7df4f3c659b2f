//! The body of a request to a simulated engine. No I/O.

use serde_json::Value;

use crate::demo::tokenizer::{Message, chat_tokens, text_tokens};
use crate::limits::DEMO_TOKENS_MAX;

/// What a path wants to have done with a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallKind {
    /// Run a chat.
    Chat,
    /// Run a text, or tokens.
    Completion,
    /// The tokens of a chat.
    RenderChat,
    /// The tokens of a text.
    RenderCompletion,
    /// The tokens of either.
    Tokenize,
}

impl CallKind {
    /// What `path` wants; `None` = a simulated engine does not serve it.
    pub(super) fn of(path: &str) -> Option<Self> {
        Some(match path {
            "/v1/chat/completions" => Self::Chat,
            "/v1/completions" => Self::Completion,
            "/v1/chat/completions/render" => Self::RenderChat,
            "/v1/completions/render" => Self::RenderCompletion,
            "/tokenize" => Self::Tokenize,
            _ => return None,
        })
    }
}

/// A refusal: the status and a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) status: u16,
    pub(super) why: String,
}

/// A request that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) prompt: Vec<u32>,
    pub(super) is_stream: bool,
    pub(super) wants_usage: bool,
    /// The most tokens to generate; `None` = as many as the reply has.
    pub(super) output_max: Option<usize>,
}

/// vLLM's default for completions.
const COMPLETION_TOKENS_DEFAULT: usize = 16;

/// Reads a body.
pub(super) fn read(kind: CallKind, body: &[u8], model: &str) -> Result<Asked, Refusal> {
    let refuse = |status, why: &str| Refusal { status, why: why.to_owned() };
    let Ok(Value::Object(fields)) = serde_json::from_slice(body) else {
        return Err(refuse(400, "the body is not a JSON object"));
    };
    if let Some(name) = fields.get("model").filter(|name| name.as_str() != Some(model)) {
        return Err(refuse(404, &format!("The model `{}` does not exist.", name.as_str().unwrap_or_default())));
    }
    if fields.get("cache_salt").is_some_and(|salt| !salt.is_null()) {
        return Err(refuse(400, "a simulated engine has one cache for all and takes no cache_salt"));
    }
    let is_chat = match kind {
        CallKind::Chat | CallKind::RenderChat => true,
        CallKind::Completion | CallKind::RenderCompletion => false,
        CallKind::Tokenize => fields.contains_key("messages"),
    };
    let prompt = if is_chat {
        let adds_prompt = fields.get("add_generation_prompt").and_then(Value::as_bool).unwrap_or(true);
        let messages = messages(fields.get("messages").unwrap_or(&Value::Null)).map_err(|why| refuse(400, &why))?;
        chat_tokens(&messages, adds_prompt).map_err(|why| refuse(400, &why))?
    } else {
        let given = fields.get("prompt").unwrap_or(&Value::Null);
        prompt(given).ok_or_else(|| refuse(400, "`prompt` is one text or one list of token ids"))?
    };
    if prompt.is_empty() || prompt.len() >= DEMO_TOKENS_MAX {
        let why = format!("the prompt has {} tokens; it may have 1 to {}", prompt.len(), DEMO_TOKENS_MAX - 1);
        return Err(refuse(400, &why));
    }
    let count = |name: &str| fields.get(name).filter(|value| !value.is_null());
    let output_max = match count("max_completion_tokens").or_else(|| count("max_tokens")) {
        Some(value) => {
            let tokens = value.as_u64().filter(|tokens| *tokens > 0).and_then(|tokens| usize::try_from(tokens).ok());
            Some(tokens.ok_or_else(|| refuse(400, "the most tokens to generate are a number from 1 on"))?)
        }
        None => (!is_chat).then_some(COMPLETION_TOKENS_DEFAULT),
    };
    let flag = |value: Option<&Value>| value.and_then(Value::as_bool).unwrap_or(false);
    let wants_usage = flag(fields.get("stream_options").and_then(|options| options.get("include_usage")));
    Ok(Asked { prompt, is_stream: flag(fields.get("stream")), wants_usage, output_max })
}

fn messages(value: &Value) -> Result<Vec<Message>, String> {
    let list = value.as_array().ok_or("`messages` is not a list")?;
    list.iter()
        .map(|message| {
            let role = message.get("role").and_then(Value::as_str).ok_or("a message has no `role`")?;
            let text = text(message.get("content").unwrap_or(&Value::Null))?;
            Ok(Message { role: role.to_owned(), text })
        })
        .collect()
}

/// The text of a message's content: a text, or parts of type `text`.
fn text(content: &Value) -> Result<String, String> {
    match content {
        Value::String(text) => Ok(text.clone()),
        Value::Null => Ok(String::new()),
        Value::Array(parts) => parts
            .iter()
            .map(|part| part.get("text").and_then(Value::as_str))
            .collect::<Option<String>>()
            .ok_or_else(|| "a simulated engine reads only parts of type text".to_owned()),
        _ => Err("the `content` of a message is no text".to_owned()),
    }
}

fn prompt(value: &Value) -> Option<Vec<u32>> {
    let token = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Value::String(text) => Some(text_tokens(text)),
        Value::Array(list) => match list.as_slice() {
            // A batch of one.
            [one @ (Value::String(_) | Value::Array(_))] => prompt(one),
            ids => ids.iter().map(token).collect(),
        },
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(kind: CallKind, body: &str) -> Result<Asked, u16> {
        read(kind, body.as_bytes(), "demo").map_err(|refusal| refusal.status)
    }

    #[test]
    fn a_chat_a_text_and_tokens_are_prompts() {
        let chat =
            asked(CallKind::Chat, r#"{"model":"demo","messages":[{"role":"user","content":"ab"}],"stream":true}"#);
        assert_eq!(
            chat,
            Ok(Asked { prompt: vec![257, 97, 98, 260, 258], is_stream: true, wants_usage: false, output_max: None })
        );
        let parts = r#"{"messages":[{"role":"user","content":[{"type":"text","text":"ab"}]}],"max_tokens":3}"#;
        let parts = asked(CallKind::RenderChat, parts).expect("a chat of parts");
        assert_eq!((parts.prompt.len(), parts.output_max), (5, Some(3)));
        for body in [r#"{"prompt":"ab"}"#, r#"{"prompt":["ab"]}"#, r#"{"prompt":[97,98]}"#, r#"{"prompt":[[97,98]]}"#] {
            let read = asked(CallKind::Completion, body).expect(body);
            assert_eq!((read.prompt, read.output_max), (vec![97, 98], Some(16)), "{body}");
        }
    }

    #[test]
    fn what_the_engine_cannot_run_is_refused() {
        for (body, status) in [
            ("[]", 400),
            (r#"{"model":"other","prompt":"a"}"#, 404),
            (r#"{"prompt":""}"#, 400),
            (r#"{"prompt":["a","b"]}"#, 400),
            (r#"{"prompt":"a","max_tokens":0}"#, 400),
            (r#"{"prompt":"a","cache_salt":"s"}"#, 400),
        ] {
            assert_eq!(asked(CallKind::Completion, body), Err(status), "{body}");
        }
        let long = format!(r#"{{"prompt":"{}"}}"#, "a".repeat(DEMO_TOKENS_MAX));
        assert_eq!(asked(CallKind::Completion, &long), Err(400), "longer than its cache holds");
        assert_eq!(
            asked(CallKind::Chat, r#"{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}"#),
            Err(400)
        );
    }
}
