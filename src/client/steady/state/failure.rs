//! The errors of calls, and why a client has no connection.

use std::error::Error as _;

use crate::client::fallback::FallbackReason;
use crate::error::{Error, Kind};

/// Why a call has no reply.
#[derive(Debug)]
pub(in crate::client) enum Failure {
    /// The daemon could not be reached, or did not answer.
    Unreachable(FallbackReason),
    /// There is no connection; the error is that of the last try.
    NotConnected(StoredError),
    /// The daemon or the client refused the request.
    Refused(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let reason = match failure {
            Failure::Refused(error) => return error,
            Failure::NotConnected(why) => return why.unreachable(),
            Failure::Unreachable(reason) => reason,
        };
        let what = match reason {
            FallbackReason::Unreachable => "the daemon cannot be reached",
            FallbackReason::ConnectionLost => "the connection to the daemon ended",
            FallbackReason::Silent => "the daemon did not answer in time",
            FallbackReason::Draining => "the daemon is draining",
        };
        Self::new(Kind::Connection, what, "check the daemon, or raise the timeout")
    }
}

/// A copy of an error, for calls that fail later for the same reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::client) struct StoredError {
    kind: Kind,
    message: String,
    remedy: String,
}

impl StoredError {
    pub(in crate::client) fn of(error: &Error) -> Self {
        let cause = error.source().map(|cause| format!(": {cause}")).unwrap_or_default();
        let message = format!("{}{cause}", error.message());
        Self { kind: error.kind(), message, remedy: error.remedy().to_owned() }
    }

    pub(in crate::client) fn error(&self) -> Error {
        Error::new(self.kind, self.message.as_str(), self.remedy.as_str())
    }

    /// The error of a call that needs a connection, if this is why there is none.
    pub(in crate::client) fn unreachable(&self) -> Error {
        let what = format!("the daemon cannot be reached: {}", self.message);
        Error::new(Kind::Connection, what, self.remedy.as_str())
    }
}
