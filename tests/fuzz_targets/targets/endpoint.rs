//! Endpoints from any source: libzmq takes an accepted one, a refusal gives its reason in one line.

use kvrouted::config::{FileFormat, NamedWorkers, SpaceConfig, WorkerConfig, parse_workers};
use kvrouted::discovery::ServerInfo;
use kvrouted::endpoint::{BoundEndpoint, Endpoint, EndpointError, check_topic, server_url};
use kvrouted::limits;

const URL: &str = "http://engine:8000";

/// Text as an endpoint, as an engine's answer, and as a file of workers.
pub(crate) fn endpoint(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    for line in text.lines().chain([text]) {
        parsed(line);
    }
    if let Ok(Some(info)) = ServerInfo::of_sglang(URL, data) {
        is_sound(&info);
    }
    if let Ok(info) = ServerInfo::of_vllm(URL, data) {
        is_sound(&info);
    }
    let spaces = [SpaceConfig { model: "m".into(), ..SpaceConfig::default() }];
    for format in [FileFormat::Json, FileFormat::Toml] {
        if let Ok(NamedWorkers { workers, .. }) = parse_workers("fuzz", text, format, &spaces) {
            assert!(workers.len() <= limits::WORKERS_MAX);
            workers.iter().for_each(worker);
        }
    }
}

fn parsed(text: &str) {
    match Endpoint::parse(text) {
        Ok(endpoint) => {
            connectable(&endpoint);
            assert_eq!(endpoint.as_str(), text);
            assert!(BoundEndpoint::parse(text).is_ok(), "what can be connected to can be bound");
            endpoint.of_rank(1).iter().for_each(connectable);
        }
        Err(fault) => one_line(&fault),
    }
    match BoundEndpoint::parse(text) {
        Ok(endpoint) => is_c_string(endpoint.as_str()),
        Err(fault) => one_line(&fault),
    }
    match server_url(text) {
        Ok(url) => {
            is_c_string(&url);
            assert!(url.starts_with("http://") && !url.ends_with('/'), "{url:?}");
        }
        Err(fault) => one_line(&fault),
    }
    check_topic(text).err().iter().for_each(one_line);
}

fn one_line(fault: &EndpointError) {
    assert!(!fault.message.is_empty() && fault.message.len() < 4096, "{} bytes", fault.message.len());
    assert!(!fault.message.chars().any(char::is_control), "{fault:?}");
}

fn connectable(endpoint: &Endpoint) {
    is_c_string(endpoint);
    assert_eq!(Endpoint::parse(endpoint).as_ref(), Ok(endpoint));
    assert!(!endpoint.contains(';') || endpoint.starts_with("ipc://"), "a source address of libzmq's: {endpoint:?}");
    let path = endpoint.strip_prefix("ipc://");
    assert!(path.is_none_or(|path| (1..=limits::SOCKET_PATH_BYTES_MAX).contains(&path.len())), "{endpoint:?}");
}

/// libzmq's binding panics on anything else.
fn is_c_string(text: &str) {
    assert!(std::ffi::CString::new(text).is_ok(), "{text:?}");
}

fn is_sound(info: &ServerInfo) {
    assert!((1..=limits::WORKERS_MAX).contains(&info.ranks.len()));
    for rank in &info.ranks {
        connectable(&rank.events.endpoint);
        rank.events.replay.iter().chain(&rank.load).for_each(connectable);
        assert_eq!(check_topic(&rank.events.topic), Ok(()));
    }
}

fn worker(worker: &WorkerConfig) {
    worker.load.iter().for_each(connectable);
    let Some(events) = &worker.events else { return };
    connectable(&events.endpoint);
    events.replay.iter().for_each(connectable);
    assert_eq!(check_topic(&events.topic), Ok(()));
}
