//! Errors in the shape of OpenAI's.

use hyper::StatusCode;

/// The side at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The caller's request cannot be served as it is.
    Caller,
    /// An engine, or the way to it.
    Engine,
    /// The gateway or its daemon.
    Gateway,
}

/// An error reply to a caller.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {message}")]
pub struct ApiError {
    /// The HTTP status.
    pub status: StatusCode,
    /// A short name that programs compare, such as `model_not_found`.
    pub code: &'static str,
    /// A sentence for people: what is wrong and what to do.
    pub message: String,
    /// The side at fault.
    pub fault: Fault,
    /// After how many seconds the caller should try again; the reply gets `Retry-After`.
    pub retry_after_s: Option<u32>,
}

impl ApiError {
    /// An error of the caller.
    #[must_use]
    pub fn caller(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into(), fault: Fault::Caller, retry_after_s: None }
    }

    /// An error of an engine, or of the way to it.
    #[must_use]
    pub fn engine(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into(), fault: Fault::Engine, retry_after_s: None }
    }

    /// An error of the gateway or its daemon.
    #[must_use]
    pub fn gateway(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into(), fault: Fault::Gateway, retry_after_s: None }
    }

    /// The same with `Retry-After`.
    #[must_use]
    pub fn retry_after(self, seconds: u32) -> Self {
        Self { retry_after_s: Some(seconds), ..self }
    }

    /// The JSON body: `{"error": {"message", "type", "param", "code"}}`.
    #[must_use]
    pub fn body(&self) -> String {
        let kind = match (self.fault, self.status.as_u16()) {
            (_, 401 | 403) => "authentication_error",
            (_, 429) => "rate_limit_error",
            (Fault::Caller, _) => "invalid_request_error",
            (Fault::Engine | Fault::Gateway, _) => "server_error",
        };
        let error = serde_json::json!({
            "error": { "message": self.message, "type": kind, "param": null, "code": self.code }
        });
        error.to_string()
    }
}
