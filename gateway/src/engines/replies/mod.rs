//! What engines reply about themselves, from bytes to facts. Pure, and nothing is believed unchecked: an error says
//! what is wrong with the reply in words that follow "the reply of PATH …".

mod models;
mod sglang;
mod vllm;

pub(super) use models::{Models, read_models};
pub(super) use sglang::{SglangInfo, read_sglang_info};
pub(super) use vllm::{CacheConfig, Sources, read_cache_config, read_sources, read_version};

use serde_json::{Map, Value};

use crate::limits::NAME_BYTES_MAX;

type Object = Map<String, Value>;

/// The JSON object of a reply.
fn object(body: &[u8]) -> Result<Object, String> {
    match serde_json::from_slice(body) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err("is not a JSON object".to_owned()),
        Err(_) => Err("is not JSON".to_owned()),
    }
}

/// A name that an engine gives: text of bounded length without control characters.
fn name(value: Option<&Value>) -> Option<&str> {
    let text = value?.as_str()?;
    (!text.is_empty() && text.len() <= NAME_BYTES_MAX && !text.chars().any(char::is_control)).then_some(text)
}

/// A number of tokens, at least 1.
fn tokens(value: Option<&Value>) -> Option<u32> {
    value?.as_u64().and_then(|number| u32::try_from(number).ok()).filter(|number| *number > 0)
}

/// A topic: text of bounded length, maybe empty. `None` = the field is something else.
fn topic(value: Option<&Value>) -> Option<String> {
    match value {
        None | Some(Value::Null) => Some(String::new()),
        Some(Value::String(text)) if text.is_empty() => Some(String::new()),
        value => name(value).map(str::to_owned),
    }
}
