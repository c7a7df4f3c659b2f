//! The inference APIs as callers use them: which path asks for what, the fields of a body that routing needs, what a
//! reply tells of itself, and errors in the shape of OpenAI's. No I/O.

mod edit;
mod endpoint;
mod error;
mod json;
mod request;
mod usage;

pub use edit::{EditedBody, Edits, edit_body};
pub use endpoint::{ApiPath, CallKind};
pub use error::{ApiError, Fault};
pub use request::{PromptForm, RequestFacts, read_request};
pub use usage::{SseFilter, Usage, UsageReader};
