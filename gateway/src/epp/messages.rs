//! The messages of Envoy's external processing and of gRPC health, with the fields that the picker uses.
//!
//! Field numbers are those of `envoy.service.ext_proc.v3`, `envoy.config.core.v3`, `envoy.type.v3`,
//! `google.protobuf.Struct` and `grpc.health.v1`. Fields that are not listed here are skipped when a message is read.
//! Enumerations are plain integers with named constants, so that a value of a later release decodes.

use std::collections::HashMap;

use bytes::Bytes;
use prost::Message as _;
use prost::encoding::{DecodeContext, decode_key, skip_field};

/// The gRPC service that Envoy calls.
pub const EXTERNAL_PROCESSOR: &str = "envoy.service.ext_proc.v3.ExternalProcessor";

/// How Envoy sends a body (`ProcessingMode.BodySendMode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyMode {
    /// No body messages.
    None,
    /// Each piece waits for an answer.
    Streamed,
    /// One message with the whole body, or its beginning.
    Buffered,
    /// Pieces, which the picker sends back when it likes. The only mode in which the picker may withhold the answer to
    /// the request headers until it has the body.
    FullDuplexStreamed,
    /// A mode that this release does not know.
    Unknown,
}

impl BodyMode {
    /// The mode that a number of the wire means.
    #[must_use]
    pub const fn of(number: i32) -> Self {
        match number {
            0 => Self::None,
            1 => Self::Streamed,
            2 | 3 => Self::Buffered,
            4 => Self::FullDuplexStreamed,
            _ => Self::Unknown,
        }
    }

    /// The number on the wire.
    #[must_use]
    pub const fn number(self) -> i32 {
        match self {
            Self::None => 0,
            Self::Streamed => 1,
            Self::Buffered => 2,
            Self::FullDuplexStreamed => 4,
            Self::Unknown => -1,
        }
    }
}

/// The modes of a stream, in its first message.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ProtocolConfiguration {
    /// A number of [`BodyMode`].
    #[prost(int32, tag = "1")]
    pub request_body_mode: i32,
    /// A number of [`BodyMode`].
    #[prost(int32, tag = "2")]
    pub response_body_mode: i32,
}

/// A message of Envoy.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ProcessingRequest {
    /// What the message is about.
    #[prost(oneof = "RequestPart", tags = "2, 3, 4, 5, 6, 7")]
    pub part: Option<RequestPart>,
    /// Dynamic metadata of the namespaces that Envoy forwards.
    #[prost(message, optional, tag = "8")]
    pub metadata_context: Option<Metadata>,
    /// The attributes that Envoy is configured to send, by filter name.
    #[prost(map = "string, message", tag = "9")]
    pub attributes: HashMap<String, Struct>,
    /// Envoy ignores answers on this stream.
    #[prost(bool, tag = "10")]
    pub observability_mode: bool,
    /// The modes, in the first message of a stream.
    #[prost(message, optional, tag = "11")]
    pub protocol_config: Option<ProtocolConfiguration>,
}

/// The fields of a message of Envoy that are bodies.
const BODY_FIELDS: [u32; 2] = [4, 5];

/// The bytes of an encoded message of Envoy that belong to no body. What the message takes once it is read grows with
/// them, many times over; a body takes as much as it has.
pub(super) fn bytes_beside_bodies(mut message: &[u8]) -> usize {
    let (all, mut bodies) = (message.len(), 0);
    while let Ok((field, kind)) = decode_key(&mut message) {
        let before = message.len();
        if skip_field(kind, field, &mut message, DecodeContext::default()).is_err() {
            break;
        }
        if BODY_FIELDS.contains(&field) {
            bodies += before - message.len();
        }
    }
    all - bodies
}

/// What a message of Envoy is about.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum RequestPart {
    /// The request's headers.
    #[prost(message, tag = "2")]
    RequestHeaders(HttpHeaders),
    /// The response's headers.
    #[prost(message, tag = "3")]
    ResponseHeaders(HttpHeaders),
    /// A piece of the request's body.
    #[prost(message, tag = "4")]
    RequestBody(HttpBody),
    /// A piece of the response's body.
    #[prost(message, tag = "5")]
    ResponseBody(HttpBody),
    /// The request's trailers.
    #[prost(message, tag = "6")]
    RequestTrailers(HttpTrailers),
    /// The response's trailers.
    #[prost(message, tag = "7")]
    ResponseTrailers(HttpTrailers),
}

/// A message to Envoy.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ProcessingResponse {
    /// What the message answers.
    #[prost(oneof = "ResponsePart", tags = "1, 2, 3, 4, 5, 6, 7")]
    pub part: Option<ResponsePart>,
    /// Dynamic metadata to set, by namespace.
    #[prost(message, optional, tag = "8")]
    pub dynamic_metadata: Option<Struct>,
}

/// What a message to Envoy answers.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum ResponsePart {
    /// The answer to the request's headers.
    #[prost(message, tag = "1")]
    RequestHeaders(CommonAnswer),
    /// The answer to the response's headers.
    #[prost(message, tag = "2")]
    ResponseHeaders(CommonAnswer),
    /// A piece of the request's body to send on.
    #[prost(message, tag = "3")]
    RequestBody(CommonAnswer),
    /// A piece of the response's body to send on.
    #[prost(message, tag = "4")]
    ResponseBody(CommonAnswer),
    /// The answer to the request's trailers.
    #[prost(message, tag = "5")]
    RequestTrailers(TrailersResponse),
    /// The answer to the response's trailers.
    #[prost(message, tag = "6")]
    ResponseTrailers(TrailersResponse),
    /// An answer to the caller, in place of an endpoint's.
    #[prost(message, tag = "7")]
    ImmediateResponse(ImmediateResponse),
}

/// `HttpHeaders`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct HttpHeaders {
    /// The headers, pseudo-headers such as `:path` among them.
    #[prost(message, optional, tag = "1")]
    pub headers: Option<HeaderMap>,
    /// Neither body nor trailers follow.
    #[prost(bool, tag = "3")]
    pub end_of_stream: bool,
}

/// `HttpBody`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct HttpBody {
    /// A piece of the body; may be empty.
    #[prost(bytes = "bytes", tag = "1")]
    pub body: Bytes,
    /// The body's last piece, and no trailers follow.
    #[prost(bool, tag = "2")]
    pub end_of_stream: bool,
}

/// `HttpTrailers`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct HttpTrailers {
    /// The trailers.
    #[prost(message, optional, tag = "1")]
    pub trailers: Option<HeaderMap>,
}

/// `envoy.config.core.v3.HeaderMap`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct HeaderMap {
    /// The headers in the order in which they came; names are in lower case.
    #[prost(message, repeated, tag = "1")]
    pub headers: Vec<HeaderValue>,
}

impl HeaderMap {
    /// The same headers in memory of their own. Those of a message keep the whole message in memory.
    #[must_use]
    pub(super) fn detached(&self) -> Self {
        let detach = |header: &HeaderValue| HeaderValue {
            key: header.key.clone(),
            value: Bytes::copy_from_slice(&header.value),
            raw_value: Bytes::copy_from_slice(&header.raw_value),
        };
        Self { headers: self.headers.iter().map(detach).collect() }
    }

    /// The memory that they take, in bytes: an empty header has two bytes in a message, and takes many times that once it
    /// is read.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.encoded_len() + self.headers.len() * size_of::<HeaderValue>()
    }

    /// The value of the first header of a name, as it came.
    #[must_use]
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        self.headers.iter().find(|header| header.key == name).map(HeaderValue::bytes)
    }

    /// The value of the first header of a name; `None` also if it is not UTF-8.
    #[must_use]
    pub fn text(&self, name: &str) -> Option<&str> {
        self.bytes(name).and_then(|bytes| std::str::from_utf8(bytes).ok())
    }
}

/// `envoy.config.core.v3.HeaderValue`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct HeaderValue {
    /// The name.
    #[prost(string, tag = "1")]
    pub key: String,
    /// The value, if Envoy is configured to send text. Read as bytes, so that a value that is not UTF-8 ends no stream.
    #[prost(bytes = "bytes", tag = "2")]
    pub value: Bytes,
    /// The value, otherwise.
    #[prost(bytes = "bytes", tag = "3")]
    pub raw_value: Bytes,
}

impl HeaderValue {
    /// The value, in whichever field it came.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        if self.raw_value.is_empty() { &self.value } else { &self.raw_value }
    }
}

/// `HeadersResponse` and `BodyResponse`, which have one shape.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CommonAnswer {
    /// What to change.
    #[prost(message, optional, tag = "1")]
    pub response: Option<CommonResponse>,
}

/// `CommonResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CommonResponse {
    /// Headers to change.
    #[prost(message, optional, tag = "2")]
    pub header_mutation: Option<HeaderMutation>,
    /// The body to send on.
    #[prost(message, optional, tag = "3")]
    pub body_mutation: Option<BodyMutation>,
    /// Whether Envoy should choose the route again, by the changed headers.
    #[prost(bool, tag = "5")]
    pub clear_route_cache: bool,
}

/// `TrailersResponse`, which changes nothing.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TrailersResponse {}

/// `ImmediateResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ImmediateResponse {
    /// The HTTP status.
    #[prost(message, optional, tag = "1")]
    pub status: Option<HttpStatus>,
    /// Headers to set.
    #[prost(message, optional, tag = "2")]
    pub headers: Option<HeaderMutation>,
    /// The body.
    #[prost(bytes = "bytes", tag = "3")]
    pub body: Bytes,
    /// The reason in Envoy's access log.
    #[prost(string, tag = "5")]
    pub details: String,
}

/// `envoy.type.v3.HttpStatus`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct HttpStatus {
    /// The code.
    #[prost(int32, tag = "1")]
    pub code: i32,
}

/// `HeaderMutation`. Envoy removes first, then sets.
#[derive(Clone, PartialEq, prost::Message)]
pub struct HeaderMutation {
    /// Headers to set.
    #[prost(message, repeated, tag = "1")]
    pub set_headers: Vec<HeaderValueOption>,
    /// Headers to remove.
    #[prost(string, repeated, tag = "2")]
    pub remove_headers: Vec<String>,
}

/// `envoy.config.core.v3.HeaderValueOption`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct HeaderValueOption {
    /// The header.
    #[prost(message, optional, tag = "1")]
    pub header: Option<HeaderValue>,
    /// What to do if the header exists: [`HeaderValueOption::OVERWRITE`].
    #[prost(int32, tag = "3")]
    pub append_action: i32,
}

impl HeaderValueOption {
    /// `OVERWRITE_IF_EXISTS_OR_ADD`.
    pub const OVERWRITE: i32 = 2;
}

/// `BodyMutation`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct BodyMutation {
    /// A piece of a body, in [`BodyMode::FullDuplexStreamed`].
    #[prost(message, optional, tag = "3")]
    pub streamed_response: Option<HttpBody>,
}

/// `envoy.config.core.v3.Metadata`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Metadata {
    /// By namespace.
    #[prost(map = "string, message", tag = "1")]
    pub filter_metadata: HashMap<String, Struct>,
}

/// `google.protobuf.Struct`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Struct {
    /// By name.
    #[prost(map = "string, message", tag = "1")]
    pub fields: HashMap<String, Value>,
}

/// `google.protobuf.Value`: text, an object or a list. Of other kinds all fields are `None`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Value {
    /// Text.
    #[prost(string, optional, tag = "3")]
    pub string_value: Option<String>,
    /// An object.
    #[prost(message, optional, tag = "5")]
    pub struct_value: Option<Struct>,
    /// A list.
    #[prost(message, optional, tag = "6")]
    pub list_value: Option<ListValue>,
}

impl Value {
    /// Text.
    #[must_use]
    pub fn text(text: impl Into<String>) -> Self {
        Self { string_value: Some(text.into()), ..Self::default() }
    }

    /// A list of texts.
    #[must_use]
    pub fn texts(texts: &[&str]) -> Self {
        let values = texts.iter().map(|text| Self::text(*text)).collect();
        Self { list_value: Some(ListValue { values }), ..Self::default() }
    }
}

/// `google.protobuf.ListValue`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ListValue {
    /// The values.
    #[prost(message, repeated, tag = "1")]
    pub values: Vec<Value>,
}

/// `grpc.health.v1.HealthCheckRequest`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct HealthCheckRequest {
    /// The name asked for.
    #[prost(string, tag = "1")]
    pub service: String,
}

/// `grpc.health.v1.HealthCheckResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct HealthCheckResponse {
    /// One of the constants.
    #[prost(int32, tag = "1")]
    pub status: i32,
}

impl HealthCheckResponse {
    /// Requests are served.
    pub const SERVING: i32 = 1;
    /// Requests are not served.
    pub const NOT_SERVING: i32 = 2;
    /// No service has this name; only in answers to `Watch`.
    pub const SERVICE_UNKNOWN: i32 = 3;
}
