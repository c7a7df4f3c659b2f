//! The fields of a body that routing needs. The body itself goes on unchanged.

use std::fmt;
use std::marker::PhantomData;

use hyper::StatusCode;
use serde::de::{Deserialize, DeserializeOwned, Deserializer, IgnoredAny, SeqAccess, Visitor};

use super::json::Members;
use super::{ApiError, ApiPath};
use crate::limits::BODY_NAME_BYTES_MAX;

/// The prompt as the body has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PromptForm {
    /// Token ids: no tokenisation is needed.
    Tokens(Vec<u32>),
    /// Text or messages, which the engine's renderer turns into tokens.
    Text,
    /// Several prompts in one body. They are routed together, by the first one.
    Batch {
        /// Prompts in the body.
        prompts: usize,
        /// The first prompt's tokens, if the body has ids.
        first_tokens: Option<Vec<u32>>,
    },
}

/// What routing needs of a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestFacts {
    /// `model`; `None` = absent, which is allowed where one model is served.
    pub model: Option<String>,
    /// Whether the reply is a stream.
    pub stream: bool,
    /// Whether `stream_options.include_usage` is true.
    pub include_usage: bool,
    /// The prompt.
    pub prompt: PromptForm,
    /// `cache_salt`: blocks are shared only between requests of one salt.
    pub cache_salt: Option<String>,
    /// `lora_path` of SGLang; vLLM names an adapter by `model`.
    pub lora_path: Option<String>,
    /// The most tokens to generate: `max_completion_tokens`, `max_tokens`, `max_output_tokens` or
    /// `sampling_params.max_new_tokens`.
    pub output_tokens_max: Option<u32>,
    /// Whether the body has `kv_cache_report_mode`, which the operator may forbid.
    pub has_report_mode: bool,
}

/// The field by which a caller makes vLLM announce all blocks of a prompt again.
pub(super) const REPORT_MODE: &str = "kv_cache_report_mode";
/// The members that are read. No other member is looked at.
pub(super) const FIELDS: [&str; 19] = [
    "model",
    "stream",
    "stream_options",
    "prompt",
    "input",
    "text",
    "input_ids",
    "token_ids",
    "messages",
    "cache_salt",
    "lora_path",
    "max_completion_tokens",
    "max_tokens",
    "max_output_tokens",
    "sampling_params",
    "vllm_xargs",
    "echo",
    "max_new_tokens",
    REPORT_MODE,
];

/// Reads the body of a generating path, or the model of another path's body.
///
/// # Errors
/// 400 for malformed JSON, for a body that is not an object and for fields of a wrong type, in OpenAI's shape.
pub fn read_request(path: ApiPath, body: &[u8]) -> Result<RequestFacts, ApiError> {
    let members = members_of(body)?;
    let options = object(&members, "stream_options", &["include_usage"])?;
    let sampling = sampling_params(&members)?;
    Ok(RequestFacts {
        model: name(&members, "model")?,
        stream: flag(&members, "stream")?,
        include_usage: options.as_ref().map_or(Ok(false), |options| flag(options, "include_usage"))?,
        prompt: prompt(path, &members)?,
        cache_salt: name(&members, "cache_salt")?,
        lora_path: lora_path(&members)?,
        output_tokens_max: output_tokens_max(&members, sampling.as_ref())?,
        has_report_mode: has_report_mode(&members, sampling.as_ref())?,
    })
}

/// The known members of a body.
pub(super) fn members_of(body: &[u8]) -> Result<Members<'_>, ApiError> {
    let text = std::str::from_utf8(body).map_err(|_| {
        let message = "the body is not UTF-8 text; send a JSON object in UTF-8";
        ApiError::caller(StatusCode::BAD_REQUEST, "invalid_json", message)
    })?;
    Members::read(text, &FIELDS).map_err(|error| {
        let place = format!("line {} column {}", error.line(), error.column());
        let message = format!("the body is not a valid JSON object: {}; see {place}", category(&error));
        ApiError::caller(StatusCode::BAD_REQUEST, "invalid_json", message)
    })
}

/// What kind of error it is. The error's own text may repeat parts of the prompt.
fn category(error: &serde_json::Error) -> &'static str {
    match error.classify() {
        serde_json::error::Category::Eof => "it ends too early",
        serde_json::error::Category::Data => "it has another type",
        serde_json::error::Category::Syntax | serde_json::error::Category::Io => "its syntax is wrong",
    }
}

fn wrong_type(field: &str, expected: &str) -> ApiError {
    ApiError::caller(StatusCode::BAD_REQUEST, "invalid_type", format!("`{field}` must be {expected}"))
}

fn parse<T: DeserializeOwned>(members: &Members<'_>, field: &str, expected: &str) -> Result<Option<T>, ApiError> {
    let Some(raw) = members.get(field) else { return Ok(None) };
    serde_json::from_str(raw).map(Some).map_err(|_| wrong_type(field, expected))
}

fn flag(members: &Members<'_>, field: &str) -> Result<bool, ApiError> {
    Ok(parse(members, field, "true or false")?.unwrap_or(false))
}

fn name(members: &Members<'_>, field: &str) -> Result<Option<String>, ApiError> {
    let name: Option<String> = parse(members, field, "a string")?;
    if name.as_ref().is_some_and(|name| name.len() > BODY_NAME_BYTES_MAX) {
        let message = format!("`{field}` must have at most {BODY_NAME_BYTES_MAX} bytes");
        return Err(ApiError::caller(StatusCode::BAD_REQUEST, "string_too_long", message));
    }
    Ok(name)
}

/// A list of which only the first item and the length are kept: as many short items as a body can hold would take many
/// times its bytes. The engine judges the others.
pub(crate) struct Listed<T> {
    pub(crate) first: Option<T>,
    count: usize,
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Listed<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(ListedVisitor(PhantomData))
    }
}

struct ListedVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ListedVisitor<T> {
    type Value = Listed<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Listed<T>, A::Error> {
        let first = list.next_element()?;
        let mut count = usize::from(first.is_some());
        while list.next_element::<IgnoredAny>()?.is_some() {
            count += 1;
        }
        Ok(Listed { first, count })
    }
}

/// SGLang allows a list of adapters for a list of prompts; the first one counts.
fn lora_path(members: &Members<'_>) -> Result<Option<String>, ApiError> {
    if members.get("lora_path").is_some_and(is_list) {
        let list: Option<Listed<Option<String>>> = parse(members, "lora_path", "a string or a list of strings")?;
        let first = list.and_then(|list| list.first).flatten();
        return Ok(first.filter(|name| name.len() <= BODY_NAME_BYTES_MAX));
    }
    name(members, "lora_path")
}

/// The known members of an object in a body. Options that are not an object are of a wrong type.
pub(super) fn object<'a>(members: &Members<'a>, field: &str, wanted: &[&str]) -> Result<Option<Members<'a>>, ApiError> {
    let Some(raw) = members.get(field) else { return Ok(None) };
    Members::read(raw, wanted).map(Some).map_err(|_| wrong_type(field, "an object"))
}

/// `sampling_params`, of which SGLang allows a list, one for each prompt.
fn sampling_params<'a>(members: &Members<'a>) -> Result<Option<Members<'a>>, ApiError> {
    if members.get("sampling_params").is_some_and(is_list) {
        return Ok(None);
    }
    object(members, "sampling_params", &["max_tokens", "max_new_tokens", "extra_args"])
}

fn output_tokens_max(members: &Members<'_>, sampling: Option<&Members<'_>>) -> Result<Option<u32>, ApiError> {
    for field in ["max_completion_tokens", "max_tokens", "max_output_tokens"] {
        if let Some(number) = parse::<f64>(members, field, "a number")? {
            return Ok(count(number));
        }
    }
    let Some(sampling) = sampling else { return Ok(None) };
    for field in ["max_tokens", "max_new_tokens"] {
        if let Some(number) = parse::<f64>(sampling, field, "a number")? {
            return Ok(count(number));
        }
    }
    Ok(None)
}

/// A number of tokens. The engine judges numbers below 1; routing has no use for them.
fn count(number: f64) -> Option<u32> {
    (number >= 1.0).then_some(number.min(f64::from(u32::MAX)) as u32)
}

fn has_report_mode(members: &Members<'_>, sampling: Option<&Members<'_>>) -> Result<bool, ApiError> {
    let in_xargs = object(members, "vllm_xargs", &[REPORT_MODE])?.is_some_and(|xargs| xargs.get(REPORT_MODE).is_some());
    let in_extra = match sampling {
        Some(sampling) => {
            object(sampling, "extra_args", &[REPORT_MODE])?.is_some_and(|it| it.get(REPORT_MODE).is_some())
        }
        None => false,
    };
    Ok(in_xargs || in_extra || members.get(REPORT_MODE).is_some())
}

fn is_list(raw: &str) -> bool {
    raw.starts_with('[')
}

fn prompt(path: ApiPath, members: &Members<'_>) -> Result<PromptForm, ApiError> {
    match path {
        ApiPath::Completions => text_or_ids(members, "prompt"),
        ApiPath::SglangGenerate if members.get("input_ids").is_some() => text_or_ids(members, "input_ids"),
        ApiPath::SglangGenerate => text_or_ids(members, "text"),
        ApiPath::VllmGenerate => {
            let expected = "a list of token ids";
            let tokens = parse(members, "token_ids", expected)?.ok_or_else(|| wrong_type("token_ids", expected))?;
            Ok(PromptForm::Tokens(tokens))
        }
        ApiPath::ChatCompletions | ApiPath::Messages => {
            let expected = "a list of messages";
            match members.get("messages") {
                Some(raw) if is_list(raw) => Ok(PromptForm::Text),
                Some(_) | None => Err(wrong_type("messages", expected)),
            }
        }
        ApiPath::Responses => match members.get("input") {
            Some(raw) if is_list(raw) || raw.starts_with('"') => Ok(PromptForm::Text),
            Some(_) | None => Err(wrong_type("input", "a string or a list of items")),
        },
        ApiPath::Embeddings | ApiPath::Tokenize | ApiPath::Models | ApiPath::Other => Ok(PromptForm::Text),
    }
}

/// One prompt or several, as text or as token ids. A body without a prompt goes on: engines know prompts of other
/// forms, such as embeddings.
fn text_or_ids(members: &Members<'_>, field: &str) -> Result<PromptForm, ApiError> {
    let expected = "a string, a list of strings, a list of token ids or a list of lists of token ids";
    let Some(raw) = members.get(field) else { return Ok(PromptForm::Text) };
    if raw.starts_with('"') {
        return Ok(PromptForm::Text);
    }
    let within = raw.strip_prefix('[').map(str::trim_start).ok_or_else(|| wrong_type(field, expected))?;
    match within.as_bytes().first() {
        Some(b']') => Ok(PromptForm::Batch { prompts: 0, first_tokens: None }),
        Some(b'"') => {
            let prompts: Option<Listed<IgnoredAny>> = parse(members, field, expected)?;
            Ok(PromptForm::Batch { prompts: prompts.map_or(0, |prompts| prompts.count), first_tokens: None })
        }
        Some(b'[') => {
            let prompts: Option<Listed<Vec<u32>>> = parse(members, field, expected)?;
            let (prompts, first_tokens) = prompts.map_or((0, None), |prompts| (prompts.count, prompts.first));
            Ok(PromptForm::Batch { prompts, first_tokens })
        }
        _ => Ok(PromptForm::Tokens(parse(members, field, expected)?.unwrap_or_default())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(path: ApiPath, body: &str) -> RequestFacts {
        read_request(path, body.as_bytes()).expect("a good body")
    }

    fn refused(path: ApiPath, body: &[u8]) -> ApiError {
        let error = read_request(path, body).expect_err("a bad body");
        assert_eq!(error.status, StatusCode::BAD_REQUEST);
        error
    }

    #[test]
    fn a_chat_body_gives_what_routing_needs() {
        let facts = read(
            ApiPath::ChatCompletions,
            r#"{"model": "m", "messages": [{"role": "user", "content": "say \"stream\": true"}], "stream": true,
                "stream_options": {"include_usage": true}, "max_completion_tokens": 9, "cache_salt": "s"}"#,
        );
        let expected = RequestFacts {
            model: Some("m".into()),
            stream: true,
            include_usage: true,
            prompt: PromptForm::Text,
            cache_salt: Some("s".into()),
            lora_path: None,
            output_tokens_max: Some(9),
            has_report_mode: false,
        };
        assert_eq!(facts, expected);
    }

    #[test]
    fn each_form_of_a_prompt_is_known() {
        let completions = |prompt: &str| read(ApiPath::Completions, &format!("{{\"prompt\": {prompt}}}")).prompt;
        assert_eq!(completions("\"text\""), PromptForm::Text);
        assert_eq!(completions("[1, 2]"), PromptForm::Tokens(vec![1, 2]));
        assert_eq!(completions("[\"a\", \"b\"]"), PromptForm::Batch { prompts: 2, first_tokens: None });
        assert_eq!(completions("[ [1], [2]]"), PromptForm::Batch { prompts: 2, first_tokens: Some(vec![1]) });
        assert_eq!(completions("[]"), PromptForm::Batch { prompts: 0, first_tokens: None });
        assert_eq!(completions("[[], [1]]"), PromptForm::Batch { prompts: 2, first_tokens: Some(vec![]) });
        let generate = r#"{"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3}, "lora_path": ["l"]}"#;
        let facts = read(ApiPath::SglangGenerate, generate);
        assert_eq!((facts.prompt, facts.output_tokens_max), (PromptForm::Tokens(vec![5, 6]), Some(3)));
        assert_eq!(facts.lora_path.as_deref(), Some("l"));
        let facts = read(ApiPath::VllmGenerate, r#"{"token_ids": [7], "sampling_params": {"max_tokens": 4}}"#);
        assert_eq!((facts.prompt, facts.output_tokens_max), (PromptForm::Tokens(vec![7]), Some(4)));
    }

    #[test]
    fn the_report_mode_is_seen_wherever_vllm_reads_it() {
        let of = |body: &str| read(ApiPath::Completions, body).has_report_mode;
        assert!(of(r#"{"prompt": "a", "vllm_xargs": {"kv_cache_report_mode": "full"}}"#));
        assert!(of(r#"{"prompt": "a", "vllm_xargs": {"kv_cache\u005freport_mode": "full"}}"#));
        assert!(of(r#"{"prompt": "a", "sampling_params": {"extra_args": {"kv_cache_report_mode": "full"}}}"#));
        assert!(!of(r#"{"prompt": "kv_cache_report_mode", "vllm_xargs": {"a": 1}}"#));
    }

    #[test]
    fn wrong_types_name_the_field_and_nothing_of_the_prompt() {
        let path = ApiPath::ChatCompletions;
        for (body, field) in [
            (r#"{"messages": "secret words"}"#, "messages"),
            (r#"{"messages": [], "stream": "secret words"}"#, "stream"),
            (r#"{"messages": [], "model": 7}"#, "model"),
            (r#"{"messages": [], "stream_options": []}"#, "stream_options"),
            (r#"{"messages": [], "max_tokens": "secret words"}"#, "max_tokens"),
            (r#"{"messages": [], "vllm_xargs": 5}"#, "vllm_xargs"),
            (r#"{"messages": [], "cache_salt": {}}"#, "cache_salt"),
        ] {
            let error = refused(path, body.as_bytes());
            assert!(error.message.contains(&format!("`{field}`")), "{}", error.message);
            assert!(!error.message.contains("secret"), "{}", error.message);
        }
        assert_eq!(refused(ApiPath::Completions, br#"{"prompt": [1, -2]}"#).code, "invalid_type");
        assert_eq!(refused(ApiPath::Completions, br#"{"prompt": [1, 4294967296]}"#).code, "invalid_type");
    }

    #[test]
    fn malformed_bodies_are_refused() {
        for body in [&b""[..], b"{", b"[]", b"{\"messages\": [}", b"\xff\xfe", b"{\"messages\": []} {}", b"null"] {
            assert_eq!(refused(ApiPath::ChatCompletions, body).code, "invalid_json");
        }
        let deep = format!("{{\"messages\": {}{}}}", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(read(ApiPath::ChatCompletions, &deep).prompt, PromptForm::Text);
    }
}
