//! SGLang: `GET /server_info`, and what says that a server is one: `GET /get_model_info`.

use serde_json::Value;

use super::{Object, name, object, tokens, topic};
use crate::engines::address::{publisher_host, reached};
use crate::engines::facts::RankSource;
use crate::limits::RANKS_MAX;

/// What `/server_info` says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::engines) struct SglangInfo {
    pub(in crate::engines) version: Option<String>,
    pub(in crate::engines) block_size: Option<u32>,
    /// Where the ranks publish; empty = it publishes nothing, or does not say.
    pub(in crate::engines) ranks: Vec<RankSource>,
    /// Whether prefixes are cached.
    pub(in crate::engines) has_prefix_caching: bool,
    /// `null`, `prefill` or `decode`.
    pub(in crate::engines) disaggregation_mode: Option<String>,
    /// Where a prefill engine's bootstrap server listens.
    pub(in crate::engines) bootstrap_port: Option<u16>,
}

/// Reads `/server_info`: `kv_events` has `{publisher, endpoint_host, endpoint_port_base, topic, block_size, dp_size,
/// replay_endpoint_port_base}`; rank r publishes at base + r. `disaggregation_mode` and
/// `disaggregation_bootstrap_port` are arguments of the server (`python/sglang/srt/server_args.py` of 0.5), which the
/// reply lists all.
pub(in crate::engines) fn read_sglang_info(body: &[u8], host: &str) -> Result<SglangInfo, String> {
    let reply = object(body)?;
    let events = match reply.get("kv_events") {
        Some(Value::Object(events)) => Some(events),
        _ => None,
    };
    let block_size = events.and_then(|events| tokens(events.get("block_size")));
    let mode = name(reply.get("disaggregation_mode")).map(str::to_owned);
    // Every server has the argument, but only a prefill engine listens there.
    let bootstrap_port = match mode.as_deref() {
        Some("prefill") => port(&reply, "disaggregation_bootstrap_port")?.and_then(|port| u16::try_from(port).ok()),
        _ => None,
    };
    Ok(SglangInfo {
        version: name(reply.get("version")).map(str::to_owned),
        block_size: block_size.or_else(|| tokens(reply.get("page_size"))),
        ranks: events.map_or(Ok(Vec::new()), |events| ranks(events, host))?,
        has_prefix_caching: reply.get("disable_radix_cache") != Some(&Value::Bool(true)),
        disaggregation_mode: mode,
        bootstrap_port,
    })
}

fn ranks(events: &Object, host: &str) -> Result<Vec<RankSource>, String> {
    match events.get("publisher") {
        None | Some(Value::Null) => {}
        Some(Value::String(publisher)) if publisher == "zmq" => {}
        Some(Value::String(publisher)) if publisher == "null" => return Ok(Vec::new()),
        Some(_) => return Err("names a publisher other than zmq, and only zmq is supported".to_owned()),
    }
    let base = port(events, "endpoint_port_base")?.ok_or("has no endpoint_port_base")?;
    let replay = port(events, "replay_endpoint_port_base")?;
    let bound = match events.get("endpoint_host") {
        None | Some(Value::Null) => "",
        Some(Value::String(bound)) => bound,
        Some(_) => return Err("has an endpoint_host that is not text".to_owned()),
    };
    let topic = topic(events.get("topic")).ok_or("has an unusable topic")?;
    let count = match events.get("dp_size") {
        None | Some(Value::Null) => 1,
        value => {
            let count = value.and_then(Value::as_u64).filter(|count| (1..=RANKS_MAX).contains(count));
            count.ok_or("has an impossible dp_size")?
        }
    };
    let host = publisher_host(bound, host);
    let at = |port: u64| reached(&format!("tcp://{host}:{port}"), &host);
    let mut ranks = Vec::with_capacity(count as usize);
    // Ranks beyond the last port cannot publish, and are left out.
    for rank in (0..count).take_while(|rank| base + rank <= 0xffff) {
        let endpoint = at(base + rank).ok_or("has an unusable endpoint_host")?;
        let replay = replay.and_then(|replay| at(replay + rank));
        ranks.push(RankSource { rank: rank as u32, endpoint: Some(endpoint), replay, topic: topic.clone() });
    }
    Ok(ranks)
}

fn port(events: &Object, field: &str) -> Result<Option<u64>, String> {
    match events.get(field) {
        None | Some(Value::Null) => Ok(None),
        value => match value.and_then(Value::as_u64) {
            Some(port @ 1..=0xffff) => Ok(Some(port)),
            _ => Err(format!("has a {field} that is not a port")),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(events: &str) -> Result<SglangInfo, String> {
        let body = format!(r#"{{"model_path": "m", "page_size": 1, "version": "0.5.23", "kv_events": {events}}}"#);
        read_sglang_info(body.as_bytes(), "host")
    }

    #[test]
    fn ranks_follow_from_the_base_ports() {
        let info = info(
            r#"{"publisher": "zmq", "endpoint_host": "0.0.0.0", "endpoint_port_base": 5557, "topic": "kv",
            "block_size": 64, "dp_size": 3, "replay_endpoint_port_base": 5657}"#,
        )
        .expect("an answer");
        assert_eq!((info.block_size, info.version.as_deref()), (Some(64), Some("0.5.23")));
        let last = info.ranks.last().expect("three ranks");
        assert_eq!((last.rank, last.endpoint.as_deref()), (2, Some("tcp://host:5559")));
        assert_eq!((last.replay.as_deref(), last.topic.as_str()), (Some("tcp://host:5659"), "kv"));
        let ends = read_sglang_info(br#"{"kv_events": {"endpoint_port_base": 65534, "dp_size": 4}}"#, "[fd00::1]");
        let ends = ends.expect("an answer");
        assert_eq!(ends.ranks.len(), 2, "ports end before the ranks do");
        assert_eq!(ends.ranks[0].endpoint.as_deref(), Some("tcp://[fd00::1]:65534"));
    }

    #[test]
    fn without_events_the_page_size_is_the_block_size() {
        for events in ["null", "7", "[]", r#"{"publisher": "null"}"#] {
            let info = info(events).expect("an answer");
            assert_eq!((info.ranks.len(), info.block_size), (0, Some(1)), "{events}");
        }
        assert!(!read_sglang_info(br#"{"disable_radix_cache": true}"#, "h").expect("an answer").has_prefix_caching);
    }

    #[test]
    fn only_a_prefill_engine_has_a_bootstrap_server() {
        let read = |mode: &str| {
            let body = format!(r#"{{"disaggregation_mode": "{mode}", "disaggregation_bootstrap_port": 8998}}"#);
            let info = read_sglang_info(body.as_bytes(), "h").expect("an answer");
            (info.disaggregation_mode, info.bootstrap_port)
        };
        assert_eq!(read("prefill"), (Some("prefill".into()), Some(8998)));
        assert_eq!(read("decode"), (Some("decode".into()), None));
        assert_eq!(read("null"), (Some("null".into()), None));
        let bad = br#"{"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 70000}"#;
        assert!(read_sglang_info(bad, "h").expect_err("no port").contains("not a port"));
    }

    #[test]
    fn unusable_answers_are_named() {
        for (events, words) in [
            ("{}", "no endpoint_port_base"),
            (r#"{"endpoint_port_base": 0}"#, "not a port"),
            (r#"{"endpoint_port_base": "5557"}"#, "not a port"),
            (r#"{"endpoint_port_base": 1, "replay_endpoint_port_base": 70000}"#, "not a port"),
            (r#"{"endpoint_port_base": 1, "dp_size": 0}"#, "impossible"),
            (r#"{"endpoint_port_base": 1, "dp_size": 1000000}"#, "impossible"),
            (r#"{"endpoint_port_base": 1, "endpoint_host": 7}"#, "not text"),
            (r#"{"endpoint_port_base": 1, "endpoint_host": "a b"}"#, "unusable endpoint_host"),
            (r#"{"endpoint_port_base": 1, "topic": ["a"]}"#, "topic"),
            (r#"{"publisher": "nats", "endpoint_port_base": 1}"#, "only zmq"),
        ] {
            let error = info(events).expect_err(events);
            assert!(error.contains(words), "{events}: {error}");
        }
    }
}
