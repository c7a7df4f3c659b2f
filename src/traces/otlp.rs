//! OTLP: the messages of OpenTelemetry's trace service, as far as the daemon writes them, and their numbers.
//!
//! The fields and their numbers are those of `opentelemetry/proto/trace/v1/trace.proto` and its neighbours.

use prost::Message;

/// Spans for a collector: `ExportTraceServiceRequest`.
#[derive(Clone, PartialEq, Message)]
struct ExportRequest {
    #[prost(message, repeated, tag = "1")]
    resource_spans: Vec<ResourceSpans>,
}

#[derive(Clone, PartialEq, Message)]
struct ResourceSpans {
    #[prost(message, optional, tag = "1")]
    resource: Option<Resource>,
    #[prost(message, repeated, tag = "2")]
    scope_spans: Vec<ScopeSpans>,
}

#[derive(Clone, PartialEq, Message)]
struct Resource {
    #[prost(message, repeated, tag = "1")]
    attributes: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
struct ScopeSpans {
    #[prost(message, optional, tag = "1")]
    scope: Option<Scope>,
    #[prost(message, repeated, tag = "2")]
    spans: Vec<Span>,
}

#[derive(Clone, PartialEq, Message)]
struct Scope {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    version: String,
}

/// One span.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Span {
    /// 16 bytes, the most significant first.
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) trace_id: Vec<u8>,
    /// 8 bytes.
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) span_id: Vec<u8>,
    /// 8 bytes; empty = the trace begins here.
    #[prost(bytes = "vec", tag = "4")]
    pub(crate) parent_span_id: Vec<u8>,
    #[prost(string, tag = "5")]
    pub(crate) name: String,
    #[prost(enumeration = "SpanKind", tag = "6")]
    pub(crate) kind: i32,
    #[prost(fixed64, tag = "7")]
    pub(crate) start_unix_ns: u64,
    #[prost(fixed64, tag = "8")]
    pub(crate) end_unix_ns: u64,
    #[prost(message, repeated, tag = "9")]
    pub(crate) attributes: Vec<KeyValue>,
    #[prost(message, repeated, tag = "11")]
    pub(crate) events: Vec<Event>,
    #[prost(message, optional, tag = "15")]
    pub(crate) status: Option<Status>,
}

/// What a span is to its parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum SpanKind {
    /// Not said.
    Unspecified = 0,
    /// A part of its parent, within the daemon.
    Internal = 1,
    /// The answer to a request.
    Server = 2,
}

/// Something that happened during a span.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Event {
    #[prost(fixed64, tag = "1")]
    pub(crate) at_unix_ns: u64,
    #[prost(string, tag = "2")]
    pub(crate) name: String,
}

/// Whether a span failed.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Status {
    #[prost(string, tag = "2")]
    pub(crate) message: String,
    #[prost(enumeration = "StatusCode", tag = "3")]
    pub(crate) code: i32,
}

/// The code of a [`Status`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum StatusCode {
    /// Not said.
    Unset = 0,
    /// It succeeded.
    Ok = 1,
    /// It failed.
    Error = 2,
}

/// An attribute.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct KeyValue {
    #[prost(string, tag = "1")]
    pub(crate) key: String,
    #[prost(message, optional, tag = "2")]
    pub(crate) value: Option<AnyValue>,
}

/// The value of an attribute.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct AnyValue {
    #[prost(oneof = "Value", tags = "1, 3")]
    pub(crate) value: Option<Value>,
}

/// A value, of the types that the daemon writes.
#[derive(Clone, PartialEq, prost::Oneof)]
pub(crate) enum Value {
    /// A text.
    #[prost(string, tag = "1")]
    Text(String),
    /// A number.
    #[prost(int64, tag = "3")]
    Number(i64),
}

impl KeyValue {
    pub(crate) fn text(key: &str, value: impl Into<String>) -> Self {
        Self::new(key, Value::Text(value.into()))
    }

    /// OTLP has no unsigned numbers: one beyond its range becomes the largest.
    pub(crate) fn number(key: &str, value: u64) -> Self {
        Self::new(key, Value::Number(i64::try_from(value).unwrap_or(i64::MAX)))
    }

    fn new(key: &str, value: Value) -> Self {
        Self { key: key.to_owned(), value: Some(AnyValue { value: Some(value) }) }
    }
}

/// Who sends the spans.
#[derive(Clone, Debug)]
pub(crate) struct Sender {
    resource: Resource,
    scope: Scope,
}

impl Sender {
    /// The attributes of a daemon.
    pub(crate) fn new(service_name: &str, instance: &str) -> Self {
        let version = env!("CARGO_PKG_VERSION");
        let attributes = vec![
            KeyValue::text("service.name", service_name),
            KeyValue::text("service.instance.id", instance),
            KeyValue::text("service.version", version),
        ];
        Self { resource: Resource { attributes }, scope: Scope { name: "kvrouted".into(), version: version.into() } }
    }

    /// The body of a request with these spans.
    pub(crate) fn body(&self, spans: Vec<Span>) -> Vec<u8> {
        let of_scope = ScopeSpans { scope: Some(self.scope.clone()), spans };
        let of_resource = ResourceSpans { resource: Some(self.resource.clone()), scope_spans: vec![of_scope] };
        ExportRequest { resource_spans: vec![of_resource] }.encode_to_vec()
    }
}

/// `ExportTraceServiceResponse`.
#[derive(Clone, PartialEq, Message)]
struct ExportReply {
    #[prost(message, optional, tag = "1")]
    partial: Option<Partial>,
}

#[derive(Clone, PartialEq, Message)]
struct Partial {
    #[prost(int64, tag = "1")]
    rejected_spans: i64,
    #[prost(string, tag = "2")]
    message: String,
}

/// The spans of a batch that a collector did not take although it took the batch, and what it says of that. A reply that
/// is no such message says nothing.
pub(crate) fn rejected_spans(reply: &[u8]) -> (u64, String) {
    let partial = ExportReply::decode(reply).ok().and_then(|reply| reply.partial).unwrap_or_default();
    (u64::try_from(partial.rejected_spans).unwrap_or(0), partial.message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_those_of_the_protocol() {
        let span = Span {
            trace_id: vec![0xaa; 16],
            span_id: vec![0xbb; 8],
            name: "r".into(),
            kind: SpanKind::Server.into(),
            start_unix_ns: 1,
            end_unix_ns: 2,
            attributes: vec![KeyValue::number("n", u64::MAX)],
            status: Some(Status { message: String::new(), code: StatusCode::Error.into() }),
            ..Span::default()
        };
        // Each field: its number and wire type, then its length or value.
        let expected = [
            &[0x0a, 16][..],
            &[0xaa; 16],
            &[0x12, 8],
            &[0xbb; 8],
            &[0x2a, 1, b'r', 0x30, 2],
            &[0x39, 1, 0, 0, 0, 0, 0, 0, 0, 0x41, 2, 0, 0, 0, 0, 0, 0, 0],
            &[0x4a, 15, 0x0a, 1, b'n', 0x12, 10, 0x18, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f],
            &[0x7a, 2, 0x18, 2],
        ];
        assert_eq!(span.encode_to_vec(), expected.concat());
    }

    #[test]
    fn a_reply_says_what_was_rejected_and_junk_says_nothing() {
        assert_eq!(rejected_spans(&[0x0a, 6, 0x08, 3, 0x12, 2, b'n', b'o']), (3, "no".to_owned()));
        let negative = [&[0x0a, 11, 0x08][..], &[0xff; 9], &[1]].concat();
        for junk in [&[][..], &[0xff; 40], b"<html>", &negative] {
            assert_eq!(rejected_spans(junk).0, 0, "{junk:?}");
        }
    }
}
