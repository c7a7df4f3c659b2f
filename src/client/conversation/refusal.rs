//! Errors that outlive the call that met them.

use std::error::Error as _;

use crate::error::{Error, Kind};

/// An error as it is remembered, to be told as often as is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::client) struct Refusal {
    kind: Kind,
    message: String,
    remedy: String,
}

impl Refusal {
    /// What to remember of an error.
    pub(in crate::client) fn of(error: &Error) -> Self {
        let cause = error.source().map(|cause| format!(": {cause}")).unwrap_or_default();
        let message = format!("{}{cause}", error.message());
        Self { kind: error.kind(), message, remedy: error.remedy().to_owned() }
    }

    /// The error.
    pub(in crate::client) fn error(&self) -> Error {
        Error::new(self.kind, self.message.as_str(), self.remedy.as_str())
    }

    /// The error where this is why the daemon cannot be reached.
    pub(in crate::client) fn unreachable(&self) -> Error {
        let what = format!("the daemon cannot be reached: {}", self.message);
        Error::new(Kind::Connection, what, self.remedy.as_str())
    }
}
