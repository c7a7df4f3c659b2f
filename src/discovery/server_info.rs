//! What an SGLang server says of itself: `GET /server_info`, its field `kv_events`.
//!
//! `{publisher, endpoint_host, endpoint_port_base, topic, block_size, dp_size, replay_endpoint_port_base,
//! load_endpoint_port_base}`; rank r publishes at base + r. A wildcard host is where the server binds: the URL's host stands for it.

use serde_json::Value;

use crate::config::{WorkerConfig, ranks_of};
use crate::error::{Error, Kind, Result};
use crate::fleet::EventSource;
use crate::limits::{NAME_BYTES_MAX, WORKERS_MAX};

/// Hosts that say where a server binds, not where it is.
const WILDCARDS: [&str; 5] = ["", "*", "0.0.0.0", "::", "[::]"];

/// Where the ranks of an engine publish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerInfo {
    /// Of the first rank.
    pub events: EventSource,
    /// Where the first rank says how busy it is, if it does.
    pub load: Option<String>,
    /// Data-parallel ranks, at least 1.
    pub ranks: u32,
    /// Tokens per block, if it says.
    pub block_size: Option<u32>,
}

impl ServerInfo {
    /// Reads the body of the answer of `url`, which is `http://host:port`.
    ///
    /// # Errors
    /// [`Kind::Undecodable`] with what is missing or means nothing.
    pub fn parse(url: &str, body: &[u8]) -> Result<Self> {
        let said: Value = serde_json::from_slice(body).map_err(|error| wrong("is no JSON").caused_by(error))?;
        let events = match said.get("kv_events") {
            Some(events) if events.is_object() => events,
            _ => {
                let remedy = "start the engine with --kv-events-config, or name its endpoint";
                return Err(Error::new(Kind::Undecodable, "the engine publishes no KV events", remedy));
            }
        };
        match events.get("publisher").and_then(Value::as_str) {
            None | Some("zmq") => {}
            Some(other) => return Err(wrong(&format!("names the publisher `{other}`, only zmq is served"))),
        }
        let port = |field: &str| match events.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(port) => {
                let port = port.as_u64().and_then(|port| u16::try_from(port).ok()).filter(|port| *port > 0);
                port.map(Some).ok_or_else(|| wrong(&format!("has a {field} that is no port")))
            }
        };
        let base = port("endpoint_port_base")?.ok_or_else(|| wrong("has no endpoint_port_base"))?;
        let host = host(url, events.get("endpoint_host").and_then(Value::as_str).unwrap_or_default())?;
        let topic = events.get("topic").and_then(Value::as_str).unwrap_or_default();
        let ranks = events.get("dp_size").and_then(Value::as_u64).unwrap_or(1);
        let info = Self {
            events: EventSource {
                endpoint: format!("tcp://{host}:{base}"),
                replay: port("replay_endpoint_port_base")?.map(|port| format!("tcp://{host}:{port}")),
                topic: topic.to_owned(),
            },
            load: port("load_endpoint_port_base")?.map(|port| format!("tcp://{host}:{port}")),
            ranks: u32::try_from(ranks).unwrap_or(u32::MAX),
            block_size: events.get("block_size").and_then(Value::as_u64).and_then(|size| u32::try_from(size).ok()),
        };
        info.check()
    }

    fn check(self) -> Result<Self> {
        if self.ranks == 0 || self.ranks as usize > WORKERS_MAX || self.events.topic.len() > NAME_BYTES_MAX {
            return Err(wrong("has a dp_size or a topic that cannot be meant"));
        }
        Ok(self)
    }

    /// A worker for each rank, otherwise as `first`, which is the first rank's.
    #[must_use]
    pub fn workers(&self, first: &WorkerConfig) -> Vec<WorkerConfig> {
        let first = WorkerConfig { events: Some(self.events.clone()), load: self.load.clone(), ..first.clone() };
        // Ports that end before the ranks do: those that there are.
        (1..=self.ranks).rev().find_map(|ranks| ranks_of(&first, ranks)).unwrap_or_default()
    }
}

/// Where the publisher is reached.
fn host(url: &str, said: &str) -> Result<String> {
    if !WILDCARDS.contains(&said) {
        let bare = said.trim_matches(['[', ']']);
        return Ok(if bare.contains(':') { format!("[{bare}]") } else { bare.to_owned() });
    }
    let host = url.strip_prefix("http://").and_then(|address| address.rsplit_once(':')).map(|(host, _)| host);
    host.map(str::to_owned).ok_or_else(|| wrong("was asked at a URL without a host"))
}

fn wrong(what: &str) -> Error {
    Error::new(Kind::Undecodable, format!("the answer of /server_info {what}"), "name the worker by its endpoint")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str, events: &str) -> Result<ServerInfo> {
        ServerInfo::parse(url, format!(r#"{{"model_path": "m", "kv_events": {events}}}"#).as_bytes())
    }

    #[test]
    fn what_a_server_says_becomes_endpoints() {
        let url = "http://engine-3:30000";
        let info = parse(
            url,
            r#"{"publisher": "zmq", "endpoint_host": "0.0.0.0", "endpoint_port_base": 5557, "topic": "kv", "block_size": 64,
            "dp_size": 4, "replay_endpoint_port_base": 5657, "load_endpoint_port_base": 5757, "load_topic": "load"}"#,
        )
        .expect("an answer");
        assert_eq!((info.ranks, info.block_size), (4, Some(64)));
        assert_eq!(info.events.endpoint, "tcp://engine-3:5557");
        assert_eq!(info.load.as_deref(), Some("tcp://engine-3:5757"));
        assert_eq!((info.events.replay.as_deref(), info.events.topic.as_str()), (Some("tcp://engine-3:5657"), "kv"));
        let least = parse(url, r#"{"endpoint_host": "10.1.1.1", "endpoint_port_base": 1}"#).expect("an answer");
        assert_eq!((least.events.endpoint.as_str(), least.events.replay, least.ranks), ("tcp://10.1.1.1:1", None, 1));
        let six =
            parse("http://[fd00::1]:80", r#"{"endpoint_host": "*", "endpoint_port_base": 1}"#).expect("an answer");
        assert_eq!(six.events.endpoint, "tcp://[fd00::1]:1");
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        for (events, said) in [
            ("null", "publishes no KV events"),
            (r#"{"publisher": "nats", "endpoint_port_base": 1}"#, "only zmq"),
            (r#"{"endpoint_host": "*"}"#, "no endpoint_port_base"),
            (r#"{"endpoint_port_base": 70000}"#, "no port"),
            (r#"{"endpoint_port_base": 1, "replay_endpoint_port_base": "x"}"#, "no port"),
            (r#"{"endpoint_port_base": 1, "load_endpoint_port_base": 0}"#, "no port"),
            (r#"{"endpoint_port_base": 1, "dp_size": 0}"#, "cannot be meant"),
        ] {
            let error = parse("http://h:1", events).expect_err(events).to_string();
            assert!(error.contains(said), "{events}: {error}");
        }
        assert!(ServerInfo::parse("http://h:1", b"<html>").is_err());
    }
}
