//! Answers as engines give them, and as somebody else may.

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
fn what_sglang_says_becomes_endpoints() {
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
    let six = sglang("http://[fd00::1]:80", r#"{"endpoint_host": "*", "endpoint_port_base": 1}"#).expect("an answer");
    assert_eq!(six.ranks[0].events.endpoint.as_str(), "tcp://[fd00::1]:1");
    let ends = sglang(URL, r#"{"endpoint_port_base": 65534, "dp_size": 4}"#).expect("an answer");
    assert_eq!(ends.ranks.len(), 2, "ports end before the ranks do");
}

#[test]
fn what_sglang_says_and_cannot_be_used_is_named() {
    let host = "a".repeat(300);
    let long_host = format!(r#"{{"endpoint_host": "{host}", "endpoint_port_base": 1}}"#);
    let long_topic = format!(r#"{{"endpoint_port_base": 1, "topic": "{host}"}}"#);
    for (events, said) in [
        ("null", "publishes no KV events"),
        ("7", "publishes no KV events"),
        (r#"[{"endpoint_port_base": 1}]"#, "publishes no KV events"),
        (r#"{"publisher": "nats", "endpoint_port_base": 1}"#, "only zmq"),
        (r#"{"publisher": [], "endpoint_port_base": 1}"#, "only zmq"),
        (r#"{"endpoint_host": "*"}"#, "no endpoint_port_base"),
        (r#"{"endpoint_port_base": 70000}"#, "no port"),
        (r#"{"endpoint_port_base": -1}"#, "no port"),
        (r#"{"endpoint_port_base": 1.5}"#, "no port"),
        (r#"{"endpoint_port_base": {"a": [1]}}"#, "no port"),
        (r#"{"endpoint_port_base": 1, "replay_endpoint_port_base": "x"}"#, "no port"),
        (r#"{"endpoint_port_base": 1, "load_endpoint_port_base": 0}"#, "no port"),
        (r#"{"endpoint_port_base": 1, "dp_size": 0}"#, "cannot be meant"),
        (r#"{"endpoint_port_base": 1, "dp_size": 1000000}"#, "cannot be meant"),
        (r#"{"endpoint_port_base": 1, "dp_size": "2"}"#, "cannot be meant"),
        (r#"{"endpoint_port_base": 1, "endpoint_host": "a\u0000b"}"#, "zero byte"),
        (r#"{"endpoint_port_base": 1, "endpoint_host": "a b"}"#, "host name"),
        (r#"{"endpoint_port_base": 1, "endpoint_host": "[::1]:2;[::1]"}"#, "host name"),
        (r#"{"endpoint_port_base": 1, "endpoint_host": 7}"#, "no text"),
        (r#"{"endpoint_port_base": 1, "topic": "a\u0000"}"#, "zero byte"),
        (r#"{"endpoint_port_base": 1, "topic": ["a"]}"#, "no text"),
        (long_host.as_str(), "host name"),
        (long_topic.as_str(), "cannot be meant"),
    ] {
        let error = sglang(URL, events).expect_err(events).to_string();
        assert!(error.contains(said) && error.len() < 1000, "{events}: {error}");
    }
    for body in ["<html>", "", "[]", "7", "{\"kv_events\":", "\u{0}"] {
        assert!(ServerInfo::of_sglang(URL, body.as_bytes()).is_err(), "{body:?}");
    }
    assert_eq!(ServerInfo::of_sglang(URL, b"{}").expect("an answer"), None);
}

#[test]
fn what_vllm_says_becomes_endpoints() {
    let info = vllm(
        URL,
        r#"{"1": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5558",
        "replay_endpoint": "tcp://0.0.0.0:5658", "buffer_steps": 10000, "hwm": 100000, "topic": "kv"},
        "0": {"endpoint": "tcp://10.0.0.2:5557", "replay_endpoint": null, "topic": ""},
        "3": {"endpoint": "tcp://[::]:41233"}, "4": {"publisher": "null", "endpoint": "tcp://*:5561"},
        "5": {"enable_kv_cache_events": false, "endpoint": "tcp://*:5562"}}"#,
    )
    .expect("an answer");
    let said: Vec<_> = info
        .ranks
        .iter()
        .map(|info| (info.rank, info.events.endpoint.as_str(), info.events.replay.as_deref(), &*info.events.topic))
        .collect();
    let expected = [
        (0, "tcp://10.0.0.2:5557", None, ""),
        (1, "tcp://engine-3:5558", Some("tcp://engine-3:5658"), "kv"),
        (3, "tcp://engine-3:41233", None, ""),
    ];
    assert_eq!(said, expected);
}

#[test]
fn what_vllm_says_and_cannot_be_used_is_named() {
    let many: Vec<_> = (0..=WORKERS_MAX).map(|rank| format!("\"{rank}\": {{\"endpoint\": \"tcp://*:1\"}}")).collect();
    let many = format!("{{{}}}", many.join(","));
    for (body, said) in [
        ("{}", "publishes no KV events"),
        (r#"{"0": {"publisher": "null"}}"#, "publishes no KV events"),
        ("[]", "no JSON object by rank"),
        ("null", "no JSON object by rank"),
        (many.as_str(), "no JSON object by rank"),
        (r#"{"0": 7}"#, "no object"),
        (r#"{"0": null}"#, "no object"),
        (r#"{"0": {}}"#, "names no endpoint"),
        (r#"{"0": {"endpoint": ["tcp://*:1"]}}"#, "names no endpoint"),
        (r#"{"0": {"endpoint": "tcp://*:0"}}"#, "1 to 65535"),
        (r#"{"0": {"endpoint": "inproc://cache"}}"#, "transport"),
        (r#"{"0": {"endpoint": "tcp://a\u0000:1"}}"#, "zero byte"),
        (r#"{"0": {"endpoint": "tcp://*:1", "replay_endpoint": 7}}"#, "no text"),
        (r#"{"0": {"endpoint": "tcp://*:1", "replay_endpoint": "ipc://x\u0000"}}"#, "zero byte"),
        (r#"{"0": {"endpoint": "tcp://*:1", "topic": "\u0000"}}"#, "zero byte"),
        (r#"{"0": {"publisher": "kafka", "endpoint": "tcp://*:1"}}"#, "only zmq"),
        (r#"{"4096": {"endpoint": "tcp://*:1"}}"#, "a rank that is none"),
        (r#"{"-1": {"endpoint": "tcp://*:1"}}"#, "a rank that is none"),
        (r#"{"00": {"endpoint": "tcp://*:1"}}"#, "a rank that is none"),
        (r#"{"": {"endpoint": "tcp://*:1"}}"#, "a rank that is none"),
        (r#"{"0": {"endpoint": "tcp://*:1"}, "0": {"endpoint": "tcp://*:2"}}"#, "a rank twice"),
    ] {
        let error = vllm(URL, body).expect_err(said).to_string();
        assert!(error.contains(said), "{said}: {error}");
    }
}
