//! What an engine's HTTP server says of where its ranks publish.
//!
//! * SGLang: `GET /server_info`, its field `kv_events`: `{publisher, endpoint_host, endpoint_port_base, topic, block_size,
//!   dp_size, replay_endpoint_port_base, load_endpoint_port_base}`; rank r publishes at base + r.
//! * vLLM: `GET /kv_event_sources`: for each data-parallel rank `{publisher, endpoint, replay_endpoint, topic, …}`.
//!
//! A wildcard host is where the server binds: the URL's host stands for it. An answer is a stranger's: only the fields
//! that are used are kept of it, every endpoint is parsed, and ranks are bounded before a worker is made of any.

use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor, value::MapAccessDeserializer};

use crate::config::{WorkerConfig, rank_of};
use crate::endpoint::{Endpoint, check_topic};
use crate::error::{Error, Kind, Result};
use crate::fleet::EventSource;
use crate::limits::WORKERS_MAX;

/// Hosts that say where a server binds, not where it is.
const WILDCARDS: [&str; 5] = ["", "*", "0.0.0.0", "::", "[::]"];

/// Where the ranks of an engine publish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerInfo {
    /// At least one, each rank once, in the order of the ranks.
    pub ranks: Vec<RankInfo>,
    /// Tokens per block, if it says.
    pub block_size: Option<u32>,
}

/// Where one data-parallel rank publishes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankInfo {
    /// Ranks after the engine's first.
    pub rank: u32,
    /// Where its events come from.
    pub events: EventSource,
    /// Where it says how busy it is, if it does.
    pub load: Option<Endpoint>,
}

/// A JSON value as far as a field may be one; what is larger is skipped and not kept.
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
    /// Text, or nothing where nothing is said.
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

/// SGLang's answer, as far as it is looked at.
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

/// vLLM's answer: by rank, and no more than there can be workers.
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
    /// Reads the body of SGLang's answer, to a question at `url`, which is `http://host:port`. `None`: it is the answer
    /// of a server that says nothing of events.
    ///
    /// # Errors
    /// [`Kind::Undecodable`] with what is missing or means nothing.
    pub fn of_sglang(url: &str, body: &[u8]) -> Result<Option<Self>> {
        let path = "/server_info";
        let answer: SglangAnswer =
            serde_json::from_slice(body).map_err(|error| wrong(path, "is no JSON object").caused_by(error))?;
        let Some(Object::Is(events)) = answer.kv_events else { return Ok(None) };
        let wrong = |what: &str| wrong(path, what);
        match events.publisher.text() {
            Some(None | Some("zmq")) => {}
            _ => return Err(wrong("names another publisher than zmq, and only zmq is served")),
        }
        let port = |said: &Scalar, field: &str| match said {
            Scalar::Absent => Ok(None),
            Scalar::Number(port @ 1..=0xffff) => Ok(Some(*port)),
            _ => Err(wrong(&format!("has a {field} that is no port"))),
        };
        let base = port(&events.endpoint_port_base, "endpoint_port_base")?;
        let base = base.ok_or_else(|| wrong("has no endpoint_port_base"))?;
        let said = events.endpoint_host.text().ok_or_else(|| wrong("has an endpoint_host that is no text"))?;
        let host = host(url, said.unwrap_or_default()).ok_or_else(|| wrong("was asked at a URL without a host"))?;
        let at = |port: u64| endpoint(path, &format!("tcp://{host}:{port}"));
        let replay = port(&events.replay_endpoint_port_base, "replay_endpoint_port_base")?.map(at).transpose()?;
        let load = port(&events.load_endpoint_port_base, "load_endpoint_port_base")?.map(at).transpose()?;
        let first = EventSource { endpoint: at(base)?, replay, topic: topic(path, &events.topic)? };
        let count = match events.dp_size {
            Scalar::Absent => 1,
            Scalar::Number(ranks) if (1..=WORKERS_MAX as u64).contains(&ranks) => ranks as u32,
            _ => return Err(wrong("has a dp_size that cannot be meant")),
        };
        // Ports that end before the ranks do: those that there are.
        let ranks = (0..count).map_while(|rank| rank_info(&first, load.as_ref(), rank)).collect();
        let block_size = match events.block_size {
            Scalar::Number(size) => u32::try_from(size).ok(),
            _ => None,
        };
        Ok(Some(Self { ranks, block_size }))
    }

    /// Reads the body of vLLM's answer, to a question at `url`, which is `http://host:port`.
    ///
    /// # Errors
    /// [`Kind::Undecodable`] with what is missing or means nothing, or where no rank publishes.
    pub fn of_vllm(url: &str, body: &[u8]) -> Result<Self> {
        let path = "/kv_event_sources";
        let VllmRanks(said) =
            serde_json::from_slice(body).map_err(|error| wrong(path, "is no JSON object by rank").caused_by(error))?;
        let mut ranks: Vec<RankInfo> = Vec::with_capacity(said.len());
        for (name, said) in &said {
            let is_rank = |rank: &u32| (*rank as usize) < WORKERS_MAX && rank.to_string() == *name;
            let rank = name.parse().ok().filter(is_rank).ok_or_else(|| wrong(path, "names a rank that is none"))?;
            let Object::Is(said) = said else { return Err(wrong(path, "says of a rank what is no object")) };
            ranks.extend(vllm_rank(url, rank, said)?);
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

    /// A worker for each rank, otherwise as `first`, which is the first rank's.
    #[must_use]
    pub fn workers(&self, first: &WorkerConfig) -> Vec<WorkerConfig> {
        let first = WorkerConfig { events: None, load: None, ..first.clone() };
        let worker = |info: &RankInfo| {
            let worker = rank_of(&first, info.rank)?;
            Some(WorkerConfig { events: Some(info.events.clone()), load: info.load.clone(), ..worker })
        };
        self.ranks.iter().filter_map(worker).collect()
    }
}

/// The error of an engine that answers and publishes nothing.
#[must_use]
pub fn no_events() -> Error {
    let remedy = "start the engine with --kv-events-config, or name its endpoint";
    Error::new(Kind::Undecodable, "the engine publishes no KV events", remedy)
}

/// `None` = the rank publishes nothing.
fn vllm_rank(url: &str, rank: u32, said: &VllmRank) -> Result<Option<RankInfo>> {
    let path = "/kv_event_sources";
    let wrong = |what: &str| wrong(path, what);
    match said.publisher.text() {
        Some(None | Some("zmq")) => {}
        Some(Some("null")) => return Ok(None),
        _ => return Err(wrong("names another publisher than zmq, and only zmq is served")),
    }
    if matches!(said.enable_kv_cache_events, Scalar::Flag(false)) {
        return Ok(None);
    }
    let reached = |said: &str| -> Result<Endpoint> {
        let bound = said.strip_prefix("tcp://").and_then(|address| address.rsplit_once(':'));
        let Some((bound, port)) = bound.filter(|(bound, _)| WILDCARDS.contains(bound)) else {
            return endpoint(path, said);
        };
        let host = host(url, bound).ok_or_else(|| wrong("was asked at a URL without a host"))?;
        endpoint(path, &format!("tcp://{host}:{port}"))
    };
    let Some(Some(events)) = said.endpoint.text() else { return Err(wrong("names no endpoint")) };
    let replay = said.replay_endpoint.text().ok_or_else(|| wrong("has a replay_endpoint that is no text"))?;
    let replay = replay.filter(|replay| !replay.is_empty()).map(reached).transpose()?;
    let events = EventSource { endpoint: reached(events)?, replay, topic: topic(path, &said.topic)? };
    Ok(Some(RankInfo { rank, events, load: None }))
}

fn rank_info(first: &EventSource, load: Option<&Endpoint>, rank: u32) -> Option<RankInfo> {
    let replay = match &first.replay {
        Some(replay) => Some(replay.of_rank(rank)?),
        None => None,
    };
    let load = match load {
        Some(load) => Some(load.of_rank(rank)?),
        None => None,
    };
    let events = EventSource { endpoint: first.endpoint.of_rank(rank)?, replay, topic: first.topic.clone() };
    Some(RankInfo { rank, events, load })
}

/// Where a publisher is reached; `None` where the URL has no host to stand for a wildcard.
fn host(url: &str, said: &str) -> Option<String> {
    if !WILDCARDS.contains(&said) {
        let bare = said.trim_matches(['[', ']']);
        return Some(if bare.contains(':') { format!("[{bare}]") } else { bare.to_owned() });
    }
    let host = url.strip_prefix("http://").and_then(|address| address.rsplit_once(':')).map(|(host, _)| host);
    host.map(str::to_owned)
}

fn endpoint(path: &str, text: &str) -> Result<Endpoint> {
    Endpoint::parse(text).map_err(|fault| wrong(path, &format!("leads to no endpoint: {fault}")))
}

fn topic(path: &str, said: &Scalar) -> Result<String> {
    let topic = said.text().ok_or_else(|| wrong(path, "has a topic that is no text"))?.unwrap_or_default();
    check_topic(topic).map_err(|fault| wrong(path, &format!("has a topic that cannot be meant: {fault}")))?;
    Ok(topic.to_owned())
}

fn wrong(path: &str, what: &str) -> Error {
    Error::new(Kind::Undecodable, format!("the answer of {path} {what}"), "name the worker by its endpoint")
}

#[cfg(test)]
mod tests;
