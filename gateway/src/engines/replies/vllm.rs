//! vLLM: `GET /version`, `GET /kv_event_sources`, `GET /metrics`.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{name, object, topic};
use crate::engines::address::reached;
use crate::engines::facts::RankSource;
use crate::limits::RANKS_MAX;

/// `GET /version`: `{"version": "0.32.0"}`.
pub(in crate::engines) fn read_version(body: &[u8]) -> Option<String> {
    let reply = object(body).ok()?;
    name(reply.get("version")).map(str::to_owned)
}

/// Where the ranks publish, in the order of the ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::engines) struct Sources {
    pub(in crate::engines) ranks: Vec<RankSource>,
}

/// `GET /kv_event_sources`: for each data-parallel rank `{publisher, endpoint, replay_endpoint, topic, …}`. `host` is
/// the URL's host, which stands in for wildcards. Ranks that publish nothing have no endpoint.
pub(in crate::engines) fn read_sources(body: &[u8], host: &str) -> Result<Sources, String> {
    let reply = object(body)?;
    let mut ranks = Vec::with_capacity(reply.len().min(RANKS_MAX as usize));
    for (key, value) in &reply {
        let is_rank = |rank: &u32| u64::from(*rank) < RANKS_MAX && rank.to_string() == *key;
        let rank = key.parse().ok().filter(is_rank).ok_or("names an invalid rank")?;
        ranks.push(source(rank, value, host)?);
    }
    ranks.sort_by_key(|source: &RankSource| source.rank);
    Ok(Sources { ranks })
}

fn source(rank: u32, value: &Value, host: &str) -> Result<RankSource, String> {
    let Value::Object(fields) = value else { return Err("has a rank that is not an object".to_owned()) };
    let topic = topic(fields.get("topic")).ok_or("has an unusable topic")?;
    let is_off = fields.get("enable_kv_cache_events") == Some(&Value::Bool(false));
    match fields.get("publisher") {
        _ if is_off => return Ok(RankSource { rank, endpoint: None, replay: None, topic }),
        None | Some(Value::Null) => {}
        Some(Value::String(publisher)) if publisher == "zmq" => {}
        Some(Value::String(publisher)) if publisher == "null" => {
            return Ok(RankSource { rank, endpoint: None, replay: None, topic });
        }
        Some(_) => return Err("names a publisher other than zmq, and only zmq is supported".to_owned()),
    }
    let endpoint = name(fields.get("endpoint")).and_then(|endpoint| reached(endpoint, host));
    let endpoint = endpoint.ok_or("names no usable endpoint")?;
    let replay = match fields.get("replay_endpoint") {
        None | Some(Value::Null) => None,
        Some(Value::String(text)) if text.is_empty() => None,
        value => {
            let replay = name(value).and_then(|endpoint| reached(endpoint, host));
            Some(replay.ok_or("names an unusable replay_endpoint")?)
        }
    };
    Ok(RankSource { rank, endpoint: Some(endpoint), replay, topic })
}

/// What `/metrics` says of the cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::engines) struct CacheConfig {
    /// Tokens in a block, of all ranks: one if they agree.
    pub(in crate::engines) block_sizes: BTreeSet<u32>,
    /// Whether prefixes are cached; `None` = not said.
    pub(in crate::engines) has_prefix_caching: Option<bool>,
}

/// Reads the labels of `vllm:cache_config_info`. A context-parallel engine has larger blocks than `block_size`: it
/// says so in `effective_attention_block_size`.
pub(in crate::engines) fn read_cache_config(text: &[u8]) -> CacheConfig {
    const METRIC: &[u8] = b"vllm:cache_config_info{";
    let mut config = CacheConfig::default();
    for line in text.split(|byte| *byte == b'\n') {
        let Some(labels) = line.strip_prefix(METRIC).and_then(|labels| std::str::from_utf8(labels).ok()) else {
            continue;
        };
        let (mut block_size, mut effective) = (None, None);
        for (label, value) in Labels(labels) {
            match label {
                "block_size" => block_size = block_tokens(value),
                "effective_attention_block_size" => effective = block_tokens(value),
                "enable_prefix_caching" => config.has_prefix_caching = Some(value == "True"),
                _ => {}
            }
        }
        config.block_sizes.extend(effective.or(block_size));
    }
    config
}

fn block_tokens(value: &str) -> Option<u32> {
    value.parse().ok().filter(|size| *size > 0)
}

/// The labels of one line: `name="value",…}`. Values keep their escapes; those that matter here have none.
struct Labels<'a>(&'a str);

impl<'a> Iterator for Labels<'a> {
    type Item = (&'a str, &'a str);

    fn next(&mut self) -> Option<Self::Item> {
        let rest = self.0.trim_start_matches([',', ' ']);
        let (label, rest) = rest.split_once("=\"")?;
        let mut is_escaped = false;
        let end = rest.bytes().position(|byte| {
            let is_end = byte == b'"' && !is_escaped;
            is_escaped = byte == b'\\' && !is_escaped;
            is_end
        })?;
        self.0 = &rest[end + 1..];
        Some((label.trim(), &rest[..end]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ranks_are_read_in_order_and_wildcards_are_replaced() {
        let body = br#"{"1": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5558",
            "replay_endpoint": "tcp://0.0.0.0:5658", "buffer_steps": 10000, "hwm": 100000, "topic": "kv"},
            "0": {"endpoint": "tcp://10.0.0.2:5557", "replay_endpoint": null, "topic": ""},
            "4": {"publisher": "null", "endpoint": "tcp://*:5561"},
            "5": {"enable_kv_cache_events": false, "endpoint": "tcp://*:5562"}}"#;
        let sources = read_sources(body, "host").expect("sources");
        let short = |source: &RankSource| (source.rank, source.endpoint.clone(), source.replay.clone());
        let expected = [
            (0, Some("tcp://10.0.0.2:5557".to_owned()), None),
            (1, Some("tcp://host:5558".to_owned()), Some("tcp://host:5658".to_owned())),
            (4, None, None),
            (5, None, None),
        ];
        assert_eq!(sources.ranks.iter().map(short).collect::<Vec<_>>(), expected);
        assert_eq!(sources.ranks[1].topic, "kv");
        assert_eq!(read_sources(b"{}", "host"), Ok(Sources::default()));
    }

    #[test]
    fn unusable_sources_are_named() {
        for (body, words) in [
            ("[]", "not a JSON object"),
            ("nonsense", "not JSON"),
            (r#"{"0": 7}"#, "not an object"),
            (r#"{"-1": {"endpoint": "tcp://*:1"}}"#, "invalid rank"),
            (r#"{"00": {"endpoint": "tcp://*:1"}}"#, "invalid rank"),
            (r#"{"4096": {"endpoint": "tcp://*:1"}}"#, "invalid rank"),
            (r#"{"0": {}}"#, "no usable endpoint"),
            (r#"{"0": {"endpoint": 7}}"#, "no usable endpoint"),
            (r#"{"0": {"endpoint": "tcp://*:0"}}"#, "no usable endpoint"),
            (r#"{"0": {"endpoint": "tcp://*:1", "replay_endpoint": {}}}"#, "replay_endpoint"),
            (r#"{"0": {"endpoint": "tcp://*:1", "topic": 7}}"#, "topic"),
            (r#"{"0": {"publisher": "kafka", "endpoint": "tcp://*:1"}}"#, "only zmq"),
            (r#"{"0": {"publisher": [], "endpoint": "tcp://*:1"}}"#, "only zmq"),
        ] {
            let error = read_sources(body.as_bytes(), "host").expect_err(body);
            assert!(error.contains(words), "{body}: {error}");
        }
    }

    #[test]
    fn the_block_size_is_a_label_of_the_metrics() {
        let text = "# HELP vllm:cache_config_info Information\n# TYPE vllm:cache_config_info gauge\n\
            vllm:cache_config_info{block_size=\"16\",cpu=\"a\\\"b,block_size=\\\"99\\\"\",\
            effective_attention_block_size=\"None\",enable_prefix_caching=\"True\",engine=\"0\"} 1.0\n\
            vllm:num_requests_running{engine=\"0\"} 0.0\n";
        let config = read_cache_config(text.as_bytes());
        assert_eq!((config.block_sizes, config.has_prefix_caching), (BTreeSet::from([16]), Some(true)));
        let parallel = b"vllm:cache_config_info{block_size=\"16\",effective_attention_block_size=\"32\"} 1.0";
        assert_eq!(read_cache_config(parallel).block_sizes, BTreeSet::from([32]));
        let two = b"vllm:cache_config_info{block_size=\"16\"} 1\nvllm:cache_config_info{block_size=\"32\"} 1\n";
        assert_eq!(read_cache_config(two).block_sizes.len(), 2);
        let off = b"vllm:cache_config_info{block_size=\"0\",enable_prefix_caching=\"False\"} 1";
        assert_eq!(
            read_cache_config(off),
            CacheConfig { block_sizes: BTreeSet::new(), has_prefix_caching: Some(false) }
        );
    }

    #[test]
    fn a_version_is_text() {
        assert_eq!(read_version(br#"{"version": "0.32.0"}"#).as_deref(), Some("0.32.0"));
        for body in ["", "{}", r#"{"version": 3}"#, r#"{"version": ""}"#, r#"["version"]"#] {
            assert_eq!(read_version(body.as_bytes()), None, "{body}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
            label in "\\PC{0,40}",
        ) {
            let _ = read_cache_config(&bytes);
            let _ = read_cache_config(format!("vllm:cache_config_info{{{label}").as_bytes());
            let _ = (read_sources(&bytes, "h"), read_version(&bytes));
        }
    }
}
