//! The inference APIs as callers use them: which path asks for what, the fields of a body that routing needs, what a
//! reply tells of itself, and errors in the shape of OpenAI's. No I/O.

mod disaggregate;
mod edit;
mod endpoint;
mod error;
mod json;
mod request;
mod usage;

pub use disaggregate::{
    Bootstrap, asks_one_output, bootstrap_body, decode_body, prefill_body, prompts, refuse_transfer_fields,
    sglang_splits, transfer_params, vllm_splits,
};
pub use edit::{EditedBody, Edits, edit_body};
pub(crate) use endpoint::decoded;
pub use endpoint::{ApiPath, CallKind};
pub use error::{ApiError, Fault};
pub(crate) use request::Listed;
pub use request::{PromptForm, RequestFacts, read_request};
pub use usage::{SseFilter, Usage, UsageReader};
