//! Replies that the gateway makes itself.

use hyper::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use hyper::{Response, StatusCode};

use super::body::ReplyBody;
use super::headers::REQUEST_ID;
use crate::api::ApiError;

/// A reply with a JSON body.
pub(crate) fn json(status: StatusCode, text: impl Into<String>) -> Response<ReplyBody> {
    typed(status, "application/json", text)
}

/// A reply with a text of some type.
pub(crate) fn typed(status: StatusCode, kind: &'static str, text: impl Into<String>) -> Response<ReplyBody> {
    let mut response = Response::new(ReplyBody::whole(text.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

/// An error in OpenAI's shape.
pub(crate) fn error(error: &ApiError, request_id: Option<&HeaderValue>) -> Response<ReplyBody> {
    let mut response = json(error.status, error.body());
    let headers = response.headers_mut();
    if let Some(seconds) = error.retry_after_s {
        headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    if error.status == StatusCode::UNAUTHORIZED {
        headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    if let Some(id) = request_id {
        headers.insert(REQUEST_ID, id.clone());
    }
    response
}
