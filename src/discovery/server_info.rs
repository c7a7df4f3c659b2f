//! Answers of engines' HTTP servers about where their ranks publish.
//!
//! * SGLang: `GET /server_info`, its field `kv_events`: `{publisher, endpoint_host, endpoint_port_base, topic,
//!   block_size, dp_size, replay_endpoint_port_base, load_endpoint_port_base}`; rank r publishes at base + r.
//! * vLLM: `GET /kv_event_sources`: for each data-parallel rank `{publisher, endpoint, replay_endpoint, topic, …}`.
//!
//! In place of a wildcard host, where the server binds, the URL's host is used. Answers are untrusted: only the needed
//! fields are kept, every endpoint is parsed, and the number of ranks is limited before any worker is made.

use std::fmt;
use std::net::IpAddr;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor, value::MapAccessDeserializer};

use crate::config::{WorkerConfig, of_rank};
use crate::endpoint::{Endpoint, check_topic};
use crate::error::{Error, Kind, Result};
use crate::fleet::EventSource;
use crate::limits::WORKERS_MAX;

/// Hosts where a server binds, which no client can connect to.
const WILDCARDS: [&str; 5] = ["", "*", "0.0.0.0", "::", "[::]"];

/// Where the ranks of an engine publish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerInfo {
    /// At least one, each rank once, in the order of the ranks.
    pub ranks: Vec<RankInfo>,
    /// Tokens in a block, if the answer has it.
    pub block_size: Option<u32>,
}

/// Where one data-parallel rank publishes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankInfo {
    /// The rank, counted from the engine's first.
    pub rank: u32,
    /// The source of its events.
    pub events: EventSource,
    /// The endpoint of its load reports, if it sends any.
    pub load: Option<Endpoint>,
}

/// A JSON value of a field; lists and objects are skipped, not kept.
#[derive(Debug, Default)]
enum Scalar {
    #[default]
    Absent,
    Flag(bool),
    Number(u64),
    Text(String),
    Other,
}

impl Scalar {
    /// The text, `Some(None)` if the field is absent, `None` if it is no text.
    fn text(&self) -> Option<Option<&str>> {
        match self {
            Self::Absent => Some(None),
            Self::Text(text) => Some(Some(text)),
            _ => None,
        }
    }
}

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_any(ScalarVisitor)
    }
}

struct ScalarVisitor;

impl<'de> Visitor<'de> for ScalarVisitor {
    type Value = Scalar;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_bool<E>(self, flag: bool) -> std::result::Result<Scalar, E> {
        Ok(Scalar::Flag(flag))
    }

    fn visit_u64<E>(self, number: u64) -> std::result::Result<Scalar, E> {
        Ok(Scalar::Number(number))
    }

    fn visit_i64<E>(self, _: i64) -> std::result::Result<Scalar, E> {
        Ok(Scalar::Other)
    }

    fn visit_f64<E>(self, _: f64) -> std::result::Result<Scalar, E> {
        Ok(Scalar::Other)
    }

    fn visit_str<E>(self, text: &str) -> std::result::Result<Scalar, E> {
        Ok(Scalar::Text(text.to_owned()))
    }

    fn visit_unit<E>(self) -> std::result::Result<Scalar, E> {
        Ok(Scalar::Absent)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> std::result::Result<Scalar, A::Error> {
        while values.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Scalar::Other)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut values: A) -> std::result::Result<Scalar, A::Error> {
        while values.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Scalar::Other)
    }
}

/// `kv_events` of SGLang's answer.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(default)]
struct SglangEvents {
    publisher: Scalar,
    endpoint_host: Scalar,
    endpoint_port_base: Scalar,
    topic: Scalar,
    block_size: Scalar,
    dp_size: Scalar,
    replay_endpoint_port_base: Scalar,
    load_endpoint_port_base: Scalar,
}

/// An object, or anything else.
#[derive(Debug)]
enum Object<T> {
    Is(T),
    Other,
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct OfMap<T>(std::marker::PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for OfMap<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_bool<E>(self, _: bool) -> std::result::Result<Self::Value, E> {
                Ok(Object::Other)
            }

            fn visit_u64<E>(self, _: u64) -> std::result::Result<Self::Value, E> {
                Ok(Object::Other)
            }

            fn visit_i64<E>(self, _: i64) -> std::result::Result<Self::Value, E> {
                Ok(Object::Other)
            }

            fn visit_f64<E>(self, _: f64) -> std::result::Result<Self::Value, E> {
                Ok(Object::Other)
            }

            fn visit_str<E>(self, _: &str) -> std::result::Result<Self::Value, E> {
                Ok(Object::Other)
            }

            fn visit_unit<E>(self) -> std::result::Result<Self::Value, E> {
                Ok(Object::Other)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> std::result::Result<Self::Value, A::Error> {
                while values.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Object::Other)
            }

            fn visit_map<A: MapAccess<'de>>(self, values: A) -> std::result::Result<Self::Value, A::Error> {
                T::deserialize(MapAccessDeserializer::new(values)).map(Object::Is)
            }
        }
        deserializer.deserialize_any(OfMap(std::marker::PhantomData))
    }
}

/// The used part of SGLang's answer.
#[derive(Debug, serde::Deserialize)]
struct SglangAnswer {
    kv_events: Option<Object<SglangEvents>>,
}

/// One rank in vLLM's answer.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(default)]
struct VllmRank {
    enable_kv_cache_events: Scalar,
    publisher: Scalar,
    endpoint: Scalar,
    replay_endpoint: Scalar,
    topic: Scalar,
}

/// vLLM's answer, by rank; at most as many ranks as there can be workers.
struct VllmRanks(Vec<(String, Object<VllmRank>)>);

impl<'de> Deserialize<'de> for VllmRanks {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct OfMap;
        impl<'de> Visitor<'de> for OfMap {
            type Value = VllmRanks;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object by rank")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut values: A) -> std::result::Result<Self::Value, A::Error> {
                let mut ranks = Vec::new();
                while let Some(entry) = values.next_entry()? {
                    if ranks.len() == WORKERS_MAX {
                        return Err(serde::de::Error::custom(format!("more than {WORKERS_MAX} ranks")));
                    }
                    ranks.push(entry);
                }
                Ok(VllmRanks(ranks))
            }
        }
        deserializer.deserialize_map(OfMap)
    }
}

impl ServerInfo {
    /// Reads the body of SGLang's answer. `url` is the server's `http://host:port`. `None`: the answer has no field
    /// about events.
    ///
    /// # Errors
    /// [`Kind::Undecodable`], with the missing or invalid field.
    pub fn of_sglang(url: &str, body: &[u8]) -> Result<Option<Self>> {
        let path = "/server_info";
        let answer: SglangAnswer =
            serde_json::from_slice(body).map_err(|error| wrong(path, "is not a JSON object").caused_by(error))?;
        let Some(Object::Is(events)) = answer.kv_events else { return Ok(None) };
        let wrong = |what: &str| wrong(path, what);
        match events.publisher.text() {
            Some(None | Some("zmq")) => {}
            _ => return Err(wrong("names a publisher other than zmq, and only zmq is supported")),
        }
        let port = |value: &Scalar, field: &str| match value {
            Scalar::Absent => Ok(None),
            Scalar::Number(port @ 1..=0xffff) => Ok(Some(*port)),
            _ => Err(wrong(&format!("has a {field} that is not a port"))),
        };
        let base = port(&events.endpoint_port_base, "endpoint_port_base")?;
        let base = base.ok_or_else(|| wrong("has no endpoint_port_base"))?;
        let bound_host = events.endpoint_host.text().ok_or_else(|| wrong("has an endpoint_host that is not text"))?;
        let host = host(url, bound_host.unwrap_or_default()).ok_or_else(|| wrong("came from a URL without a host"))?;
        let at = |port: u64| endpoint(path, &format!("tcp://{host}:{port}"));
        let replay = port(&events.replay_endpoint_port_base, "replay_endpoint_port_base")?.map(at).transpose()?;
        let load = port(&events.load_endpoint_port_base, "load_endpoint_port_base")?.map(at).transpose()?;
        let first = EventSource { endpoint: at(base)?, replay, topic: topic(path, &events.topic)?, snapshots: None };
        let count = match events.dp_size {
            Scalar::Absent => 1,
            Scalar::Number(ranks) if (1..=WORKERS_MAX as u64).contains(&ranks) => ranks as u32,
            _ => return Err(wrong("has an impossible dp_size")),
        };
        // If there are more ranks than ports, only the ranks with a port.
        let ranks = (0..count).map_while(|rank| rank_info(&first, load.as_ref(), rank)).collect();
        let block_size = match events.block_size {
            Scalar::Number(size) => u32::try_from(size).ok(),
            _ => None,
        };
        Ok(Some(Self { ranks, block_size }))
    }

    /// Reads the body of vLLM's answer. `url` is the server's `http://host:port`.
    ///
    /// # Errors
    /// [`Kind::Undecodable`], with the missing or invalid field, or if no rank publishes.
    pub fn of_vllm(url: &str, body: &[u8]) -> Result<Self> {
        let path = "/kv_event_sources";
        let VllmRanks(answer) = serde_json::from_slice(body)
            .map_err(|error| wrong(path, "is not a JSON object by rank").caused_by(error))?;
        let mut ranks: Vec<RankInfo> = Vec::with_capacity(answer.len());
        for (name, rank_answer) in &answer {
            let is_rank = |rank: &u32| (*rank as usize) < WORKERS_MAX && rank.to_string() == *name;
            let rank = name.parse().ok().filter(is_rank).ok_or_else(|| wrong(path, "names an invalid rank"))?;
            let Object::Is(rank_answer) = rank_answer else {
                return Err(wrong(path, "has a rank that is not an object"));
            };
            ranks.extend(vllm_rank(url, rank, rank_answer)?);
        }
        ranks.sort_by_key(|info| info.rank);
        if ranks.windows(2).any(|pair| pair[0].rank == pair[1].rank) {
            return Err(wrong(path, "names a rank twice"));
        }
        if ranks.is_empty() {
            return Err(no_events());
        }
        Ok(Self { ranks, block_size: None })
    }

    /// A worker for each rank; all other fields come from `first`, the first rank.
    #[must_use]
    pub fn workers(&self, first: &WorkerConfig) -> Vec<WorkerConfig> {
        let first = WorkerConfig { events: None, load: None, ..first.clone() };
        let worker = |info: &RankInfo| {
            let worker = of_rank(&first, info.rank)?;
            Some(WorkerConfig { events: Some(info.events.clone()), load: info.load.clone(), ..worker })
        };
        self.ranks.iter().filter_map(worker).collect()
    }
}

/// The error for an engine that answers and publishes no events.
#[must_use]
pub(crate) fn no_events() -> Error {
    let remedy = "start the engine with --kv-events-config, or set endpoint instead of url in the worker's record";
    Error::new(Kind::Undecodable, "the engine publishes no KV events", remedy)
}

/// Where a rank of vLLM publishes; `None` = it publishes no events.
fn vllm_rank(url: &str, rank: u32, answer: &VllmRank) -> Result<Option<RankInfo>> {
    let path = "/kv_event_sources";
    let wrong = |what: &str| wrong(path, what);
    match answer.publisher.text() {
        Some(None | Some("zmq")) => {}
        Some(Some("null")) => return Ok(None),
        _ => return Err(wrong("names a publisher other than zmq, and only zmq is supported")),
    }
    if matches!(answer.enable_kv_cache_events, Scalar::Flag(false)) {
        return Ok(None);
    }
    let reached = |text: &str| -> Result<Endpoint> {
        // A socket's path is of this machine: an engine elsewhere must not name one.
        if text.starts_with("ipc://") && !is_of_this_machine(url) {
            return Err(wrong("names a Unix socket, and the engine is on another machine"));
        }
        let bound = text.strip_prefix("tcp://").and_then(|address| address.rsplit_once(':'));
        let Some((bound, port)) = bound.filter(|(bound, _)| WILDCARDS.contains(bound)) else {
            return endpoint(path, text);
        };
        let host = host(url, bound).ok_or_else(|| wrong("came from a URL without a host"))?;
        endpoint(path, &format!("tcp://{host}:{port}"))
    };
    let Some(Some(events)) = answer.endpoint.text() else { return Err(wrong("names no endpoint")) };
    let replay = answer.replay_endpoint.text().ok_or_else(|| wrong("has a replay_endpoint that is not text"))?;
    let replay = replay.filter(|replay| !replay.is_empty()).map(reached).transpose()?;
    let events =
        EventSource { endpoint: reached(events)?, replay, topic: topic(path, &answer.topic)?, snapshots: None };
    Ok(Some(RankInfo { rank, events, load: None }))
}

fn rank_info(first: &EventSource, load: Option<&Endpoint>, rank: u32) -> Option<RankInfo> {
    let load = match load {
        Some(load) => Some(load.of_rank(rank)?),
        None => None,
    };
    Some(RankInfo { rank, events: first.of_rank(rank)?, load })
}

/// The host of a publisher; `None` if it is a wildcard and the URL has no host.
fn host(url: &str, bound: &str) -> Option<String> {
    if !WILDCARDS.contains(&bound) {
        let bare = bound.trim_matches(['[', ']']);
        return Some(if bare.contains(':') { format!("[{bare}]") } else { bare.to_owned() });
    }
    url_host(url).map(str::to_owned)
}

/// The host of an engine's URL; an IPv6 address in brackets.
fn url_host(url: &str) -> Option<&str> {
    url.strip_prefix("http://").and_then(|address| address.rsplit_once(':')).map(|(host, _)| host)
}

/// Whether an engine's URL is of the loopback interface.
fn is_of_this_machine(url: &str) -> bool {
    let bare = url_host(url).unwrap_or_default().trim_matches(['[', ']']);
    bare == "localhost" || bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Whether an engine says that it publishes on another host than that of its URL. A server of several ranks may; so may an
/// engine that wants the events of another one.
pub(super) fn publishes_elsewhere(url: &str, worker: &WorkerConfig) -> bool {
    let home = url_host(url).map(|host| format!("tcp://{host}:").to_ascii_lowercase());
    let is_at_home = |endpoint: &Endpoint| {
        let endpoint = endpoint.as_str().to_ascii_lowercase();
        endpoint.starts_with("ipc://") || home.as_ref().is_some_and(|home| endpoint.starts_with(home))
    };
    worker.events.as_ref().is_some_and(|events| !is_at_home(&events.endpoint))
}

fn endpoint(path: &str, text: &str) -> Result<Endpoint> {
    Endpoint::parse(text).map_err(|fault| wrong(path, &format!("has an invalid endpoint: {fault}")))
}

fn topic(path: &str, value: &Scalar) -> Result<String> {
    let topic = value.text().ok_or_else(|| wrong(path, "has a topic that is not text"))?.unwrap_or_default();
    check_topic(topic).map_err(|fault| wrong(path, &format!("has an impossible topic: {fault}")))?;
    Ok(topic.to_owned())
}

fn wrong(path: &str, what: &str) -> Error {
    Error::new(
        Kind::Undecodable,
        format!("the answer of {path} {what}"),
        "set endpoint instead of url in the worker's record",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const URL: &str = "http://engine-3:30000";

    fn sglang(url: &str, events: &str) -> Result<ServerInfo> {
        let body = format!(r#"{{"model_path": "m", "kv_events": {events}, "internal_states": [[1], {{"a": null}}]}}"#);
        ServerInfo::of_sglang(url, body.as_bytes())?.ok_or_else(no_events)
    }

    fn vllm(url: &str, body: &str) -> Result<ServerInfo> {
        ServerInfo::of_vllm(url, body.as_bytes())
    }

    #[test]
    fn sglangs_answers_become_endpoints() {
        let info = sglang(
            URL,
            r#"{"publisher": "zmq", "endpoint_host": "0.0.0.0", "endpoint_port_base": 5557, "topic": "kv", "block_size": 64,
            "dp_size": 4, "replay_endpoint_port_base": 5657, "load_endpoint_port_base": 5757, "load_topic": "load"}"#,
        )
        .expect("an answer");
        assert_eq!((info.ranks.len(), info.block_size), (4, Some(64)));
        let [first, .., last] = info.ranks.as_slice() else { panic!("{info:?}") };
        assert_eq!(first.events.endpoint.as_str(), "tcp://engine-3:5557");
        assert_eq!(first.load.as_deref(), Some("tcp://engine-3:5757"));
        assert_eq!((first.events.replay.as_deref(), first.events.topic.as_str()), (Some("tcp://engine-3:5657"), "kv"));
        assert_eq!((last.rank, last.events.endpoint.as_str()), (3, "tcp://engine-3:5560"));
        assert_eq!(last.load.as_deref(), Some("tcp://engine-3:5760"));
        let least = sglang(URL, r#"{"endpoint_host": "10.1.1.1", "endpoint_port_base": 1}"#).expect("an answer");
        assert_eq!((least.ranks[0].events.endpoint.as_str(), least.ranks.len()), ("tcp://10.1.1.1:1", 1));
        let six =
            sglang("http://[fd00::1]:80", r#"{"endpoint_host": "*", "endpoint_port_base": 1}"#).expect("an answer");
        assert_eq!(six.ranks[0].events.endpoint.as_str(), "tcp://[fd00::1]:1");
        let ends = sglang(URL, r#"{"endpoint_port_base": 65534, "dp_size": 4}"#).expect("an answer");
        assert_eq!(ends.ranks.len(), 2, "ports end before the ranks do");
    }

    #[test]
    fn unusable_answers_of_sglang_are_named() {
        let host = "a".repeat(300);
        let long_host = format!(r#"{{"endpoint_host": "{host}", "endpoint_port_base": 1}}"#);
        let long_topic = format!(r#"{{"endpoint_port_base": 1, "topic": "{host}"}}"#);
        for (events, words) in [
            ("null", "publishes no KV events"),
            ("7", "publishes no KV events"),
            (r#"[{"endpoint_port_base": 1}]"#, "publishes no KV events"),
            (r#"{"publisher": "nats", "endpoint_port_base": 1}"#, "only zmq"),
            (r#"{"publisher": [], "endpoint_port_base": 1}"#, "only zmq"),
            (r#"{"endpoint_host": "*"}"#, "no endpoint_port_base"),
            (r#"{"endpoint_port_base": 70000}"#, "not a port"),
            (r#"{"endpoint_port_base": -1}"#, "not a port"),
            (r#"{"endpoint_port_base": 1.5}"#, "not a port"),
            (r#"{"endpoint_port_base": {"a": [1]}}"#, "not a port"),
            (r#"{"endpoint_port_base": 1, "replay_endpoint_port_base": "x"}"#, "not a port"),
            (r#"{"endpoint_port_base": 1, "load_endpoint_port_base": 0}"#, "not a port"),
            (r#"{"endpoint_port_base": 1, "dp_size": 0}"#, "impossible"),
            (r#"{"endpoint_port_base": 1, "dp_size": 1000000}"#, "impossible"),
            (r#"{"endpoint_port_base": 1, "dp_size": "2"}"#, "impossible"),
            (r#"{"endpoint_port_base": 1, "endpoint_host": "a\u0000b"}"#, "zero byte"),
            (r#"{"endpoint_port_base": 1, "endpoint_host": "a b"}"#, "host name"),
            (r#"{"endpoint_port_base": 1, "endpoint_host": "[::1]:2;[::1]"}"#, "host name"),
            (r#"{"endpoint_port_base": 1, "endpoint_host": 7}"#, "not text"),
            (r#"{"endpoint_port_base": 1, "topic": "a\u0000"}"#, "zero byte"),
            (r#"{"endpoint_port_base": 1, "topic": ["a"]}"#, "not text"),
            (long_host.as_str(), "host name"),
            (long_topic.as_str(), "impossible"),
        ] {
            let error = sglang(URL, events).expect_err(events).to_string();
            assert!(error.contains(words) && error.len() < 1000, "{events}: {error}");
        }
        for body in ["<html>", "", "[]", "7", "{\"kv_events\":", "\u{0}"] {
            assert!(ServerInfo::of_sglang(URL, body.as_bytes()).is_err(), "{body:?}");
        }
        assert_eq!(ServerInfo::of_sglang(URL, b"{}").expect("an answer"), None);
    }

    #[test]
    fn vllms_answers_become_endpoints() {
        let info = vllm(
            URL,
            r#"{"1": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5558",
            "replay_endpoint": "tcp://0.0.0.0:5658", "buffer_steps": 10000, "hwm": 100000, "topic": "kv"},
            "0": {"endpoint": "tcp://10.0.0.2:5557", "replay_endpoint": null, "topic": ""},
            "3": {"endpoint": "tcp://[::]:41233"}, "4": {"publisher": "null", "endpoint": "tcp://*:5561"},
            "5": {"enable_kv_cache_events": false, "endpoint": "tcp://*:5562"}}"#,
        )
        .expect("an answer");
        let ranks: Vec<_> = info
            .ranks
            .iter()
            .map(|info| (info.rank, info.events.endpoint.as_str(), info.events.replay.as_deref(), &*info.events.topic))
            .collect();
        let expected = [
            (0, "tcp://10.0.0.2:5557", None, ""),
            (1, "tcp://engine-3:5558", Some("tcp://engine-3:5658"), "kv"),
            (3, "tcp://engine-3:41233", None, ""),
        ];
        assert_eq!(ranks, expected);
    }

    #[test]
    fn unusable_answers_of_vllm_are_named() {
        let many: Vec<_> =
            (0..=WORKERS_MAX).map(|rank| format!("\"{rank}\": {{\"endpoint\": \"tcp://*:1\"}}")).collect();
        let many = format!("{{{}}}", many.join(","));
        for (body, words) in [
            ("{}", "publishes no KV events"),
            (r#"{"0": {"publisher": "null"}}"#, "publishes no KV events"),
            ("[]", "not a JSON object by rank"),
            ("null", "not a JSON object by rank"),
            (many.as_str(), "not a JSON object by rank"),
            (r#"{"0": 7}"#, "not an object"),
            (r#"{"0": null}"#, "not an object"),
            (r#"{"0": {}}"#, "names no endpoint"),
            (r#"{"0": {"endpoint": ["tcp://*:1"]}}"#, "names no endpoint"),
            (r#"{"0": {"endpoint": "tcp://*:0"}}"#, "1 to 65535"),
            (r#"{"0": {"endpoint": "inproc://cache"}}"#, "transport"),
            (r#"{"0": {"endpoint": "tcp://a\u0000:1"}}"#, "zero byte"),
            (r#"{"0": {"endpoint": "tcp://*:1", "replay_endpoint": 7}}"#, "not text"),
            (r#"{"0": {"endpoint": "tcp://*:1", "replay_endpoint": "tcp://x\u0000:1"}}"#, "zero byte"),
            (r#"{"0": {"endpoint": "ipc:///run/docker.sock"}}"#, "on another machine"),
            (r#"{"0": {"endpoint": "tcp://*:1", "replay_endpoint": "ipc://@x"}}"#, "on another machine"),
            (r#"{"0": {"endpoint": "tcp://*:1", "topic": "\u0000"}}"#, "zero byte"),
            (r#"{"0": {"publisher": "kafka", "endpoint": "tcp://*:1"}}"#, "only zmq"),
            (r#"{"4096": {"endpoint": "tcp://*:1"}}"#, "an invalid rank"),
            (r#"{"-1": {"endpoint": "tcp://*:1"}}"#, "an invalid rank"),
            (r#"{"00": {"endpoint": "tcp://*:1"}}"#, "an invalid rank"),
            (r#"{"": {"endpoint": "tcp://*:1"}}"#, "an invalid rank"),
            (r#"{"0": {"endpoint": "tcp://*:1"}, "0": {"endpoint": "tcp://*:2"}}"#, "a rank twice"),
        ] {
            let error = vllm(URL, body).expect_err(words).to_string();
            assert!(error.contains(words), "{words}: {error}");
        }
    }
}
