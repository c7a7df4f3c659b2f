//! Headers: which ones go on, and what callers say in them.

use std::collections::BTreeMap;

use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::{StatusCode, Uri};
use kvrouted::client::TraceContext;

use crate::api::ApiError;
use crate::engines::DATA_PARALLEL_RANK;
use crate::limits::{HEADER_NAME_BYTES_MAX, REQUEST_ID_BYTES_MAX};

/// The id of a request, passed through or made.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The request's priority, a whole number; higher goes first.
pub(crate) const PRIORITY: HeaderName = HeaderName::from_static("x-kvrouted-priority");
/// The session whose requests should meet again on one worker.
pub(crate) const SESSION: HeaderName = HeaderName::from_static("x-kvrouted-session");
/// The Gateway API's name of a tenant.
pub(crate) const FAIRNESS_ID: HeaderName = HeaderName::from_static("x-gateway-inference-fairness-id");
/// The Gateway API's name of an objective, which the configuration gives a priority.
pub(crate) const OBJECTIVE: HeaderName = HeaderName::from_static("x-gateway-inference-objective");
/// W3C's trace context of a request.
pub(crate) const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// In replies: the worker that served, as `ID/RANK`.
pub(crate) const WORKER: HeaderName = HeaderName::from_static("x-kvrouted-worker");
/// In replies: the worker that computed the prompt, if another one generated the output.
pub(crate) const PREFILL_WORKER: HeaderName = HeaderName::from_static("x-kvrouted-prefill-worker");
/// In replies: tokens of the prompt that the worker (the one that computed the prompt, if there are two) was predicted to have cached.
pub(crate) const OVERLAP_TOKENS: HeaderName = HeaderName::from_static("x-kvrouted-overlap-tokens");
/// For the pick port: the path of the request whose body is sent.
pub(crate) const ORIGINAL_PATH: HeaderName = HeaderName::from_static("x-kvrouted-path");
/// Anthropic's header for API keys.
pub(crate) const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// All headers of this prefix are the gateway's own.
const OWN_PREFIX: &str = "x-kvrouted-";
/// Headers of one connection (RFC 9110, 7.6.1). `te` is judged by its value.
const HOP_BY_HOP: [&str; 8] = [
    "connection",
    "keep-alive",
    "proxy-connection",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "transfer-encoding",
    "upgrade",
];

/// Removes the headers of one connection, those that its `connection` header names, and the gateway's own.
fn remove_local(headers: &mut HeaderMap) {
    let trailers = has_token(headers, &header::TE, "trailers");
    let named: Vec<HeaderName> =
        tokens(headers, &header::CONNECTION).filter_map(|name| HeaderName::from_bytes(name.as_bytes()).ok()).collect();
    for name in named {
        headers.remove(name);
    }
    for name in HOP_BY_HOP {
        headers.remove(name);
    }
    if trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
    let own: Vec<HeaderName> = headers.keys().filter(|name| name.as_str().starts_with(OWN_PREFIX)).cloned().collect();
    for name in own {
        headers.remove(name);
    }
}

fn tokens<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    let values = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim).filter(|token| !token.is_empty())
}

fn has_token(headers: &HeaderMap, name: &HeaderName, wanted: &str) -> bool {
    tokens(headers, name).any(|token| token.eq_ignore_ascii_case(wanted))
}

/// Whether the caller wants another protocol on this connection, which the gateway does not speak.
pub(crate) fn wants_upgrade(headers: &HeaderMap) -> bool {
    has_token(headers, &header::CONNECTION, "upgrade") && headers.contains_key(header::UPGRADE)
}

/// The caller's headers for an engine. The engine's connection adds its host, its length and its key.
pub(crate) fn for_engine(mut headers: HeaderMap, request_id: &HeaderValue, removes_key: bool) -> HeaderMap {
    remove_local(&mut headers);
    headers.remove(header::HOST);
    headers.remove(header::CONTENT_LENGTH);
    headers.remove(header::EXPECT);
    // The router says which rank runs a request.
    headers.remove(DATA_PARALLEL_RANK);
    if removes_key {
        headers.remove(header::AUTHORIZATION);
        headers.remove(X_API_KEY);
    }
    headers.insert(REQUEST_ID, request_id.clone());
    headers
}

/// An engine's headers for the caller.
pub(crate) fn for_caller(headers: &mut HeaderMap, request_id: &HeaderValue, changes_length: bool) {
    remove_local(headers);
    headers.remove(header::TE);
    if changes_length {
        headers.remove(header::CONTENT_LENGTH);
    }
    headers.insert(REQUEST_ID, request_id.clone());
}

/// Bytes of all headers and of the target.
pub(crate) fn size(uri: &Uri, headers: &HeaderMap) -> usize {
    // Each header has a colon, a space and a line end.
    let lines: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
    let target = uri.path_and_query().map_or(0, |target| target.as_str().len());
    lines + target
}

/// A new random id.
pub(crate) fn new_id() -> String {
    format!("{:032x}", rand::random::<u128>())
}

/// The caller's request id, or a new one.
pub(crate) fn request_id(headers: &HeaderMap) -> HeaderValue {
    let is_good = |value: &&HeaderValue| {
        (1..=REQUEST_ID_BYTES_MAX).contains(&value.len()) && value.as_bytes().iter().all(u8::is_ascii_graphic)
    };
    if let Some(id) = headers.get(REQUEST_ID).filter(is_good) {
        return id.clone();
    }
    // Hexadecimal digits are a header's value.
    HeaderValue::from_str(&new_id()).unwrap_or_else(|_| HeaderValue::from_static("none"))
}

/// What a caller says in headers of how its request should be routed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Hints {
    pub(crate) priority: i32,
    pub(crate) session: Option<String>,
    pub(crate) tenant: Option<String>,
    /// The trace that the request belongs to; `None` = it names none, or not as W3C's recommendation has it.
    pub(crate) trace: Option<TraceContext>,
}

impl Hints {
    /// The headers that are read.
    pub(crate) const HEADERS: [HeaderName; 5] = [PRIORITY, SESSION, FAIRNESS_ID, OBJECTIVE, TRACEPARENT];

    /// Reads the headers.
    pub(crate) fn read(headers: &HeaderMap, objectives: &BTreeMap<String, i32>) -> Result<Self, ApiError> {
        let objective = name(headers, &OBJECTIVE)?;
        let priority = match name(headers, &PRIORITY)? {
            Some(text) => text.parse().map_err(|_| {
                let message = format!("the header {PRIORITY} must be a whole number of 32 bits");
                ApiError::caller(StatusCode::BAD_REQUEST, "invalid_header", message)
            })?,
            None => objective.and_then(|name| objectives.get(&name).copied()).unwrap_or(0),
        };
        let (session, tenant) = (name(headers, &SESSION)?, name(headers, &FAIRNESS_ID)?);
        Ok(Self { priority, session, tenant, trace: trace(headers) })
    }
}

/// The trace context. A header that is not valid, or that comes twice, is ignored: it is no reason to refuse a request.
fn trace(headers: &HeaderMap) -> Option<TraceContext> {
    let mut values = headers.get_all(TRACEPARENT).into_iter();
    let value = values.next().filter(|_| values.next().is_none())?;
    TraceContext::parse(value.to_str().ok()?)
}

fn name(headers: &HeaderMap, header: &HeaderName) -> Result<Option<String>, ApiError> {
    let Some(value) = headers.get(header) else { return Ok(None) };
    match value.to_str() {
        Ok("") => Ok(None),
        Ok(text) if text.len() <= HEADER_NAME_BYTES_MAX => Ok(Some(text.to_owned())),
        Ok(_) | Err(_) => {
            let message = format!("the header {header} must be at most {HEADER_NAME_BYTES_MAX} bytes of visible ASCII");
            Err(ApiError::caller(StatusCode::BAD_REQUEST, "invalid_header", message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(list: &[(&'static str, &'static str)]) -> HeaderMap {
        let pair = |(name, value): &(&'static str, &'static str)| {
            (HeaderName::from_static(name), HeaderValue::from_static(value))
        };
        list.iter().map(pair).collect()
    }

    #[test]
    fn only_end_to_end_headers_go_on() {
        let from = headers(&[
            ("connection", "close, x-hop"),
            ("x-hop", "1"),
            ("keep-alive", "5"),
            ("te", "gzip, trailers"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("host", "evil"),
            ("content-length", "7"),
            ("expect", "100-continue"),
            ("authorization", "Bearer k"),
            ("x-kvrouted-session", "s"),
            ("x-data-parallel-rank", "3"),
            ("traceparent", "00-1-2-01"),
            ("x-gateway-inference-objective", "o"),
        ]);
        let id = HeaderValue::from_static("id");
        let to = for_engine(from.clone(), &id, true);
        let expected = headers(&[
            ("te", "trailers"),
            ("traceparent", "00-1-2-01"),
            ("x-gateway-inference-objective", "o"),
            ("x-request-id", "id"),
        ]);
        assert_eq!(to, expected);
        assert!(for_engine(from, &id, false).contains_key("authorization"));
    }

    #[test]
    fn an_engine_cannot_speak_for_the_gateway() {
        let mut from = headers(&[("x-kvrouted-worker", "9/9"), ("content-length", "5"), ("trailer", "x-end")]);
        for_caller(&mut from, &HeaderValue::from_static("id"), true);
        assert_eq!(from, headers(&[("trailer", "x-end"), ("x-request-id", "id")]));
    }

    #[test]
    fn a_request_id_is_kept_if_it_is_harmless() {
        assert_eq!(request_id(&headers(&[("x-request-id", "abc-1")])), "abc-1");
        assert_ne!(request_id(&headers(&[("x-request-id", "a b")])), "a b");
        assert_eq!(request_id(&HeaderMap::new()).len(), 32);
    }

    #[test]
    fn hints_come_from_the_documented_headers() {
        let objectives = BTreeMap::from([("fast".to_owned(), 5)]);
        let read = |list: &[(&'static str, &'static str)]| Hints::read(&headers(list), &objectives);
        let both = [("x-gateway-inference-objective", "fast"), ("x-gateway-inference-fairness-id", "t")];
        let expected = Hints { priority: 5, tenant: Some("t".into()), ..Hints::default() };
        assert_eq!(read(&both), Ok(expected));
        let own =
            [("x-gateway-inference-objective", "fast"), ("x-kvrouted-priority", "-2"), ("x-kvrouted-session", "s")];
        assert_eq!(read(&own), Ok(Hints { priority: -2, session: Some("s".into()), ..Hints::default() }));
        assert!(read(&[("x-kvrouted-priority", "high")]).is_err());
    }

    #[test]
    fn a_trace_context_is_taken_and_one_that_is_not_valid_is_ignored() {
        const GOOD: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let trace = |values: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(TRACEPARENT, HeaderValue::from_static(value));
            }
            Hints::read(&headers, &BTreeMap::new()).unwrap().trace
        };
        assert_eq!(trace(&[GOOD]).unwrap().to_string(), GOOD);
        assert_eq!(trace(&[]), None);
        assert_eq!(trace(&[GOOD, GOOD]), None, "twice");
        for wrong in ["", "00-1-2-01", "00-00000000000000000000000000000000-00f067aa0ba902b7-01"] {
            assert_eq!(trace(&[wrong]), None, "{wrong}");
        }
    }
}
