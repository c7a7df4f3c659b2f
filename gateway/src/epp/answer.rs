//! The messages that the picker sends to Envoy.

use std::collections::HashMap;

use bytes::Bytes;

use super::messages::{
    BodyMode, BodyMutation, CommonAnswer, CommonResponse, HeaderMutation, HeaderValue, HeaderValueOption, HttpBody,
    HttpStatus, ImmediateResponse, ProcessingResponse, ResponsePart, Struct, TrailersResponse, Value,
};
use super::names;
use crate::api::ApiError;
use crate::limits::EPP_BODY_PIECE_BYTES_MAX;

/// Which body a piece belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Request,
    Response,
}

/// The answer to the request's headers: the ordered list, in the header and in the dynamic metadata.
///
/// Both, because an Envoy cluster reads only one of them, and ignores the other without a word. Headers that only a
/// gateway may set are removed before any is set, so that no value of the caller's stays.
pub(super) fn chosen(list: &str, more_headers: &[(String, String)]) -> ProcessingResponse {
    let mut set_headers = vec![set_header(names::DESTINATION, list)];
    set_headers.extend(more_headers.iter().map(|(name, value)| set_header(name, value)));
    let remove_headers = vec![names::DESTINATION.to_owned(), names::DATA_PARALLEL_RANK.to_owned()];
    let common = CommonResponse {
        header_mutation: Some(HeaderMutation { set_headers, remove_headers }),
        clear_route_cache: true, // a route may match the header
        ..CommonResponse::default()
    };
    ProcessingResponse {
        part: Some(ResponsePart::RequestHeaders(CommonAnswer { response: Some(common) })),
        dynamic_metadata: Some(namespace(names::LB_NAMESPACE, names::DESTINATION, Value::text(list))),
    }
}

/// The answer to the response's headers, which changes nothing.
pub(super) fn response_headers() -> ProcessingResponse {
    part(ResponsePart::ResponseHeaders(CommonAnswer { response: Some(CommonResponse::default()) }))
}

/// Lets an answer to the response's headers set headers, in place of those that the endpoint sent by these names.
pub(super) fn add_response_headers(answer: &mut ProcessingResponse, headers: &[(String, String)]) {
    if headers.is_empty() {
        return;
    }
    if let Some(ResponsePart::ResponseHeaders(CommonAnswer { response: Some(common) })) = &mut answer.part {
        let set_headers = headers.iter().map(|(name, value)| set_header(name, value)).collect();
        common.header_mutation = Some(HeaderMutation { set_headers, remove_headers: Vec::new() });
    }
}

/// The answer to trailers, which changes nothing.
pub(super) fn trailers(side: Side) -> ProcessingResponse {
    part(match side {
        Side::Request => ResponsePart::RequestTrailers(TrailersResponse {}),
        Side::Response => ResponsePart::ResponseTrailers(TrailersResponse {}),
    })
}

/// A body in pieces that Envoy takes. An empty body is one piece if it carries the end, and none otherwise.
pub(super) fn body(side: Side, mut body: Bytes, end_of_stream: bool) -> impl Iterator<Item = ProcessingResponse> {
    let mut is_over = body.is_empty() && !end_of_stream;
    std::iter::from_fn(move || {
        if is_over {
            return None;
        }
        let piece = body.split_to(body.len().min(EPP_BODY_PIECE_BYTES_MAX));
        is_over = body.is_empty();
        Some(streamed(side, HttpBody { body: piece, end_of_stream: end_of_stream && is_over }))
    })
}

/// The answer to a piece of the response's body: the piece itself, or leave to send it on in the modes without full
/// duplex.
pub(super) fn response_body(mode: BodyMode, piece: HttpBody) -> Vec<ProcessingResponse> {
    match mode {
        BodyMode::FullDuplexStreamed => body(Side::Response, piece.body, piece.end_of_stream).collect(),
        BodyMode::None | BodyMode::Streamed | BodyMode::Buffered | BodyMode::Unknown => {
            vec![part(ResponsePart::ResponseBody(CommonAnswer { response: None }))]
        }
    }
}

/// An error, which Envoy sends to the caller instead of asking an endpoint.
pub(super) fn refusal(error: &ApiError) -> ProcessingResponse {
    let mut set_headers = vec![set_header("content-type", "application/json")];
    if let Some(seconds) = error.retry_after_s {
        set_headers.push(set_header("retry-after", &seconds.to_string()));
    }
    part(ResponsePart::ImmediateResponse(ImmediateResponse {
        status: Some(HttpStatus { code: known_status(error.status.as_u16()) }),
        headers: Some(HeaderMutation { set_headers, remove_headers: Vec::new() }),
        body: Bytes::from(error.body()),
        details: format!("kvrouted_{}", error.code),
    }))
}

/// The status, or 500: Envoy ends the stream with an error if its enumeration lacks the code.
fn known_status(code: u16) -> i32 {
    let is_known = matches!(code, 200..=208 | 226 | 300..=305 | 307 | 308 | 500..=508 | 510 | 511)
        || matches!(code, 400..=417 | 421..=424 | 426 | 428 | 429 | 431);
    if is_known { i32::from(code) } else { 500 }
}

fn part(part: ResponsePart) -> ProcessingResponse {
    ProcessingResponse { part: Some(part), dynamic_metadata: None }
}

fn streamed(side: Side, piece: HttpBody) -> ProcessingResponse {
    let common = CommonResponse {
        body_mutation: Some(BodyMutation { streamed_response: Some(piece) }),
        ..CommonResponse::default()
    };
    let answer = CommonAnswer { response: Some(common) };
    part(match side {
        Side::Request => ResponsePart::RequestBody(answer),
        Side::Response => ResponsePart::ResponseBody(answer),
    })
}

fn set_header(name: &str, value: &str) -> HeaderValueOption {
    let header =
        HeaderValue { key: name.to_owned(), value: Bytes::new(), raw_value: Bytes::copy_from_slice(value.as_bytes()) };
    HeaderValueOption { header: Some(header), append_action: HeaderValueOption::OVERWRITE }
}

/// `{namespace: {key: value}}`.
fn namespace(namespace: &str, key: &str, value: Value) -> Struct {
    let inner = Struct { fields: HashMap::from([(key.to_owned(), value)]) };
    let outer = Value { struct_value: Some(inner), ..Value::default() };
    Struct { fields: HashMap::from([(namespace.to_owned(), outer)]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(length: usize, end: bool) -> Vec<HttpBody> {
        body(Side::Request, Bytes::from(vec![b'x'; length]), end)
            .map(|answer| match answer.part {
                Some(ResponsePart::RequestBody(answer)) => {
                    answer.response.and_then(|r| r.body_mutation).and_then(|m| m.streamed_response).expect("a piece")
                }
                other => panic!("not a piece of the request: {other:?}"),
            })
            .collect()
    }

    #[test]
    fn a_body_is_cut_into_pieces_and_only_the_last_one_ends_it() {
        for (length, end, sizes) in [
            (0, true, vec![0]),
            (0, false, vec![]),
            (1, true, vec![1]),
            (62_000, true, vec![62_000]),
            (62_001, true, vec![62_000, 1]),
            (150_000, false, vec![62_000, 62_000, 26_000]),
        ] {
            let pieces = pieces(length, end);
            assert_eq!(pieces.iter().map(|piece| piece.body.len()).collect::<Vec<_>>(), sizes, "{length} bytes");
            for (number, piece) in pieces.iter().enumerate() {
                assert_eq!(piece.end_of_stream, end && number + 1 == pieces.len(), "piece {number} of {length} bytes");
            }
        }
    }

    #[test]
    fn a_status_that_envoy_does_not_know_becomes_500() {
        assert_eq!(known_status(429), 429);
        assert_eq!(known_status(504), 504);
        assert_eq!(known_status(418), 500);
        assert_eq!(known_status(499), 500);
        assert_eq!(known_status(529), 500);
    }
}
