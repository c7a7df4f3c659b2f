//! The gateway's fuzz targets: functions of bytes that panic when a promise is broken. libFuzzer calls them through the
//! package in `fuzz/`, `cargo test` calls them with seeded mutations.

mod bodies;
mod engines;
mod picker;
mod settings;
mod templates;

use kvrouted_gateway::api::ApiPath;

/// Takes any bytes.
pub(crate) type Target = fn(&[u8]);

/// Targets by their names.
pub(crate) const ALL: &[(&str, Target)] = &[
    ("openai_body", bodies::openai_body),
    ("openai_reply", bodies::openai_reply),
    ("engine_replies", engines::engine_replies),
    ("renders", engines::renders),
    ("watch", engines::watch),
    ("ext_proc", picker::ext_proc),
    ("chat_template", templates::chat_template),
    ("log_line", settings::log_line),
    ("gateway_config", settings::gateway_config),
];

/// Paths whose bodies are read.
pub(crate) const PATHS: [ApiPath; 8] = [
    ApiPath::ChatCompletions,
    ApiPath::Completions,
    ApiPath::Responses,
    ApiPath::Messages,
    ApiPath::SglangGenerate,
    ApiPath::VllmGenerate,
    ApiPath::Embeddings,
    ApiPath::Tokenize,
];

fn path_of(byte: u8) -> ApiPath {
    PATHS[usize::from(byte) % PATHS.len()]
}
