//! One question to an engine's renderer.

use std::time::Instant;

use bytes::Bytes;
use hyper::header::CONTENT_TYPE;
use hyper::{Method, Request, StatusCode};

use super::rendered::Rendered;
use crate::engines::{Engine, body_of, read_bounded};
use crate::limits::RENDER_REPLY_BYTES_MAX;

/// What a question to one engine gave.
pub(super) enum Answer {
    Tokens(Rendered),
    /// The engine refuses the body; others would too.
    Refused(String),
    /// The engine cannot do this.
    Unsupported,
    /// The engine is at fault.
    Failed(String),
}

/// Asks, and reads the reply within its bound.
pub(super) async fn exchange(
    engine: &Engine,
    path: &'static str,
    body: Bytes,
    deadline: Instant,
    read: impl FnOnce(&[u8]) -> Result<Rendered, String>,
) -> Answer {
    let request = Request::builder().method(Method::POST).uri(path).header(CONTENT_TYPE, "application/json");
    let request = match request.body(body_of(body)) {
        Ok(request) => request,
        Err(error) => return Answer::Failed(error.to_string()),
    };
    let reply = match engine.ask(request, deadline).await {
        Ok(reply) => reply,
        Err(error) => return Answer::Failed(error.to_string()),
    };
    match reply.status() {
        StatusCode::OK => {}
        StatusCode::FORBIDDEN
        | StatusCode::NOT_FOUND
        | StatusCode::METHOD_NOT_ALLOWED
        | StatusCode::NOT_IMPLEMENTED => return Answer::Unsupported,
        StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT | StatusCode::UNAUTHORIZED => {
            return Answer::Failed(format!("the engine answers {path} with status {}", reply.status().as_u16()));
        }
        status if status.is_client_error() => {
            return Answer::Refused(format!("the engine refuses the body at {path} with status {}", status.as_u16()));
        }
        status => return Answer::Failed(format!("the engine answers {path} with status {}", status.as_u16())),
    }
    let bytes = match read_bounded(reply.into_body(), RENDER_REPLY_BYTES_MAX, deadline).await {
        Ok(bytes) => bytes,
        Err(error) => return Answer::Failed(format!("the engine's reply at {path} cannot be read: {error}")),
    };
    match read(&bytes) {
        Ok(rendered) => Answer::Tokens(rendered),
        Err(why) => Answer::Failed(format!("the engine's reply at {path} is no rendered prompt: {why}")),
    }
}
