//! What engines reply about themselves, from bytes to facts. Pure, and nothing is believed unchecked: an error says
//! what is wrong with the reply in words that follow "the reply of PATH …".

mod models;
mod sglang;
mod vllm;

pub(super) use models::{Models, read_models};
pub(super) use sglang::{SglangInfo, read_sglang_info};
pub(super) use vllm::{CacheConfig, Sources, read_cache_config, read_sources, read_version};

use serde_json::{Map, Value};

use super::facts::RankSource;
use crate::limits::NAME_BYTES_MAX;

type Object = Map<String, Value>;

/// Every name and endpoint that a reply can give to an engine, whichever question it answers, for the fuzz target. `host`
/// is the host of the engine's URL.
#[doc(hidden)]
#[must_use]
pub fn read_replies(body: &[u8], host: &str) -> Vec<(u32, String)> {
    let mut ranks = read_sources(body, host).map(|sources| sources.ranks).unwrap_or_default();
    ranks.extend(read_sglang_info(body, host).map(|info| info.ranks).unwrap_or_default());
    let of_rank = |source: RankSource| {
        let texts = [source.endpoint, source.replay, Some(source.topic)].into_iter().flatten();
        texts.map(move |text| (source.rank, text)).collect::<Vec<_>>()
    };
    let mut texts: Vec<(u32, String)> = ranks.into_iter().flat_map(of_rank).collect();
    let models = read_models(body).map(|models| models.list).unwrap_or_default();
    let names = models.into_iter().flat_map(|model| [Some(model.id), model.parent, model.root]).flatten();
    texts.extend(names.map(|name| (0, name)));
    texts.extend(read_version(body).map(|version| (0, version)));
    texts.extend(read_cache_config(body).block_sizes.into_iter().map(|size| (0, size.to_string())));
    texts
}

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
