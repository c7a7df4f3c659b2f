//! The daemon's refusals as errors for callers. Callers get the reason in words; what an operator can do about it is
//! logged.

use std::time::Duration;

use hyper::StatusCode;
use kvrouted::client::RouteReply;
use kvrouted::error::{Error, Kind};

use super::RouterFigure;
use crate::api::ApiError;
use crate::limits::RETRY_AFTER_DEFAULT;

/// The error of a reply without candidates.
pub(super) fn nobody(reply: &RouteReply) -> ApiError {
    let error = match reply.chosen() {
        Err(error) => error,
        // Only called without candidates, or with none that this gateway has an engine for.
        Ok(_) => Error::new(Kind::NobodyAvailable, "no worker that the daemon listed is an engine of this gateway", ""),
    };
    let after = (reply.retry_after_us > 0).then_some(reply.retry_after_us);
    as_api_error(&error, after)
}

/// The error of a question that the daemon refused.
pub(super) fn of(error: &Error) -> ApiError {
    as_api_error(error, error.retry_after())
}

/// The error of a request that waited for a decision until its deadline.
pub(super) fn deadline_passed() -> ApiError {
    let text = "the request waited for an engine until its deadline";
    ApiError::gateway(StatusCode::TOO_MANY_REQUESTS, Kind::DeadlinePassed.name(), text)
        .retry_after(whole_seconds(RETRY_AFTER_DEFAULT))
}

/// What the error counts as.
pub(super) fn figure(error: &ApiError) -> RouterFigure {
    match (error.status, error.code) {
        (StatusCode::TOO_MANY_REQUESTS, "deadline_passed") => RouterFigure::Deadline,
        (StatusCode::TOO_MANY_REQUESTS, _) => RouterFigure::Busy,
        (StatusCode::SERVICE_UNAVAILABLE, _) => RouterFigure::Nobody,
        _ => RouterFigure::Refused,
    }
}

fn as_api_error(error: &Error, retry_after_us: Option<u32>) -> ApiError {
    let (code, text) = (error.kind().name(), error.message());
    let after = retry_after_us.map_or(RETRY_AFTER_DEFAULT, |us| Duration::from_micros(us.into()));
    let after_s = whole_seconds(after);
    match error.kind() {
        Kind::AllBusy
        | Kind::PinnedBusy
        | Kind::QueueFull
        | Kind::DeadlinePassed
        | Kind::TooManyBookings
        | Kind::Overloaded => ApiError::gateway(StatusCode::TOO_MANY_REQUESTS, code, text).retry_after(after_s),
        Kind::NobodyAvailable => ApiError::engine(StatusCode::SERVICE_UNAVAILABLE, code, text).retry_after(after_s),
        Kind::AllFiltered | Kind::PinnedNotAllowed => ApiError::gateway(StatusCode::SERVICE_UNAVAILABLE, code, text),
        Kind::Draining | Kind::Connection => {
            ApiError::gateway(StatusCode::SERVICE_UNAVAILABLE, code, text).retry_after(after_s)
        }
        Kind::UnknownSpace => ApiError::caller(StatusCode::NOT_FOUND, "model_not_found", text),
        Kind::Oversized => ApiError::caller(StatusCode::PAYLOAD_TOO_LARGE, code, text),
        Kind::InvalidArgument => ApiError::caller(StatusCode::BAD_REQUEST, code, text),
        _ => {
            tracing::warn!(%error, "the daemon refused a request");
            ApiError::gateway(StatusCode::INTERNAL_SERVER_ERROR, code, text)
        }
    }
}

/// Rounded up: a caller that comes back too early is refused again.
fn whole_seconds(time: Duration) -> u32 {
    u32::try_from(time.as_millis().div_ceil(1000)).unwrap_or(u32::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::Fault;

    #[test]
    fn the_callers_status_says_whether_to_try_again() {
        let of = |kind| of(&Error::new(kind, "why", "what an operator does"));
        for (kind, status, retry) in [
            (Kind::AllBusy, 429, true),
            (Kind::QueueFull, 429, true),
            (Kind::DeadlinePassed, 429, true),
            (Kind::NobodyAvailable, 503, true),
            (Kind::AllFiltered, 503, false),
            (Kind::Draining, 503, true),
            (Kind::UnknownSpace, 404, false),
            (Kind::Oversized, 413, false),
            (Kind::InvalidArgument, 400, false),
            (Kind::Internal, 500, false),
        ] {
            let error = of(kind);
            assert_eq!((error.status.as_u16(), error.retry_after_s.is_some()), (status, retry), "{kind:?}");
            assert_eq!(error.message, "why", "the remedy is not the caller's");
        }
        assert_eq!(of(Kind::UnknownSpace).fault, Fault::Caller);
    }

    #[test]
    fn a_wait_is_rounded_up_to_whole_seconds() {
        let error = Error::new(Kind::QueueFull, "full", "").retry_after_us(1_200_000);
        assert_eq!(of(&error).retry_after_s, Some(2));
        assert_eq!(of(&Error::new(Kind::QueueFull, "full", "")).retry_after_s, Some(1));
    }

    #[test]
    fn an_answer_without_candidates_names_the_reason_and_the_rules() {
        let reply = RouteReply {
            nobody: Kind::AllBusy as u16,
            retry_after_us: 2_500_000,
            removed: vec![("busy_prefill".into(), vec![kvrouted::ids::Worker::new(1, 0)])],
            ..RouteReply::default()
        };
        let error = nobody(&reply);
        assert_eq!((error.status.as_u16(), error.code, error.retry_after_s), (429, "all_busy", Some(3)));
        assert!(error.message.contains("1 busy_prefill"), "{error}");
        assert_eq!(figure(&error), RouterFigure::Busy);
        assert_eq!(nobody(&RouteReply::default()).status.as_u16(), 503, "an empty space");
    }
}
