//! The paths of the inference APIs.

/// What a path asks of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallKind {
    /// The body has a prompt; the call is routed by its tokens and booked.
    Generate,
    /// The call goes to any healthy engine that serves its model: embeddings, `/tokenize`.
    Stateless,
    /// The gateway answers itself, from all engines: `/v1/models`.
    Models,
    /// A path that the gateway does not know.
    Unknown,
}

/// A path that the gateway knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ApiPath {
    /// `/v1/chat/completions`
    ChatCompletions,
    /// `/v1/completions`
    Completions,
    /// `/v1/responses`
    Responses,
    /// `/v1/messages`, Anthropic's
    Messages,
    /// `/generate`, SGLang's
    SglangGenerate,
    /// `/inference/v1/generate`, vLLM's: tokens in, tokens out
    VllmGenerate,
    /// `/v1/embeddings`
    Embeddings,
    /// `/tokenize` and `/v1/tokenize`
    Tokenize,
    /// `/v1/models`
    Models,
    /// Any other path.
    Other,
}

impl ApiPath {
    /// The path without its query, as it stands in a request line.
    #[must_use]
    pub fn of(path: &str) -> Self {
        match path {
            "/v1/chat/completions" => Self::ChatCompletions,
            "/v1/completions" => Self::Completions,
            "/v1/responses" => Self::Responses,
            "/v1/messages" => Self::Messages,
            "/generate" => Self::SglangGenerate,
            "/inference/v1/generate" => Self::VllmGenerate,
            "/v1/embeddings" => Self::Embeddings,
            "/tokenize" | "/v1/tokenize" => Self::Tokenize,
            "/v1/models" => Self::Models,
            _ => Self::Other,
        }
    }

    /// What the path asks of an engine.
    #[must_use]
    pub const fn kind(self) -> CallKind {
        match self {
            Self::ChatCompletions
            | Self::Completions
            | Self::Responses
            | Self::Messages
            | Self::SglangGenerate
            | Self::VllmGenerate => CallKind::Generate,
            Self::Embeddings | Self::Tokenize => CallKind::Stateless,
            Self::Models => CallKind::Models,
            Self::Other => CallKind::Unknown,
        }
    }

    /// The name in metrics and logs: bounded, whatever callers send.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::ChatCompletions => "chat_completions",
            Self::Completions => "completions",
            Self::Responses => "responses",
            Self::Messages => "messages",
            Self::SglangGenerate => "generate",
            Self::VllmGenerate => "inference_generate",
            Self::Embeddings => "embeddings",
            Self::Tokenize => "tokenize",
            Self::Models => "models",
            Self::Other => "other",
        }
    }
}
