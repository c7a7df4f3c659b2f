//! Errors as HTTP tells them: a status, and JSON with the reason, its name and what to do.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use crate::error::{Error, Kind};

/// A request that is not done.
#[derive(Debug)]
pub(super) struct Refusal {
    status: StatusCode,
    error: Error,
}

impl Refusal {
    /// One of another status than its kind's.
    pub(super) const fn new(status: StatusCode, error: Error) -> Self {
        Self { status, error }
    }

    /// Something in the request means nothing.
    pub(super) fn invalid(message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Error::new(Kind::InvalidArgument, message, remedy).into()
    }

    /// What is named is not there.
    pub(super) fn not_found(message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, Error::new(Kind::InvalidArgument, message, remedy))
    }

    /// What is there already is in the way.
    pub(super) fn conflict(message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, Error::new(Kind::InvalidArgument, message, remedy))
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self { status: status_of(error.kind()), error }
    }
}

/// What each kind is in HTTP; as Dynamo's services have it where they know the like.
const fn status_of(kind: Kind) -> StatusCode {
    match kind {
        Kind::Malformed
        | Kind::InvalidArgument
        | Kind::SchemeMismatch
        | Kind::HelloRequired
        | Kind::UnsupportedVersion
        | Kind::PinnedNotAllowed => StatusCode::BAD_REQUEST,
        Kind::NotPermitted | Kind::AdminOnly => StatusCode::FORBIDDEN,
        Kind::UnknownSpace => StatusCode::NOT_FOUND,
        Kind::BookingExists => StatusCode::CONFLICT,
        Kind::Oversized => StatusCode::PAYLOAD_TOO_LARGE,
        Kind::TooManyBookings | Kind::PinnedBusy | Kind::AllBusy | Kind::QueueFull | Kind::DeadlinePassed => {
            StatusCode::TOO_MANY_REQUESTS
        }
        Kind::Unsupported => StatusCode::NOT_IMPLEMENTED,
        Kind::Draining | Kind::Overloaded | Kind::NobodyAvailable | Kind::AllFiltered | Kind::Connection => {
            StatusCode::SERVICE_UNAVAILABLE
        }
        Kind::Config | Kind::System | Kind::Undecodable | Kind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

#[derive(Serialize)]
struct Told<'a> {
    error: &'a str,
    code: &'static str,
    retryable: bool,
    remedy: &'a str,
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Self { status, error } = &self;
        let told = Told {
            error: error.message(),
            code: error.kind().name(),
            retryable: error.is_retryable(),
            remedy: error.remedy(),
        };
        let mut response = json(*status, &told);
        if let Some(us) = error.retry_after() {
            let seconds = HeaderValue::from(us.div_ceil(1_000_000));
            response.headers_mut().insert(header::RETRY_AFTER, seconds);
        }
        response
    }
}

/// A response of JSON.
pub(super) fn json(status: StatusCode, body: &impl Serialize) -> Response {
    match serde_json::to_vec(body) {
        Ok(bytes) => (status, [(header::CONTENT_TYPE, "application/json")], bytes).into_response(),
        Err(error) => {
            tracing::error!(%error, "a response cannot be written as JSON");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

/// That something is done, in the words of Dynamo's services.
pub(super) fn done(status: StatusCode) -> Response {
    #[derive(Serialize)]
    struct Done {
        status: &'static str,
    }
    json(status, &Done { status: "ok" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_may_try_again_is_told_when_and_every_kind_is_an_error() {
        let error = Error::new(Kind::QueueFull, "full", "wait").retry_after_us(1_500_000);
        let response = Refusal::from(error).into_response();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(response.headers()[header::RETRY_AFTER], "2");
        for kind in Kind::ALL {
            let status = status_of(*kind);
            assert!(status.is_client_error() || status.is_server_error(), "{kind:?} is {status}");
            let may_help = status == StatusCode::TOO_MANY_REQUESTS || status == StatusCode::SERVICE_UNAVAILABLE;
            assert!(may_help || !kind.is_retryable(), "{kind:?} may be tried again, which {status} does not say");
        }
    }
}
