//! The tokens of a prompt, and where they come from.

use std::sync::Arc;

/// Where a prompt's tokens come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TokenSource {
    /// The body has them.
    Body,
    /// The engine's renderer.
    Renderer,
    /// The engine's `/tokenize`.
    Tokenize,
    /// A local tokenizer that has been proved equal to the engine.
    Local,
    /// Nowhere: the request is routed by load.
    None,
}

impl TokenSource {
    /// The name in logs and metrics.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Body => "body",
            Self::Renderer => "renderer",
            Self::Tokenize => "tokenize",
            Self::Local => "local",
            Self::None => "none",
        }
    }
}

/// A prompt for the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptTokens {
    /// The tokens; `None` = the request is routed by load.
    pub tokens: Option<Arc<[u32]>>,
    /// Where they come from.
    pub source: TokenSource,
    /// Why there are no tokens, or not all of them. No part of the prompt.
    pub why_none: Option<String>,
    /// Multimodal objects: the index of a block that an object touches, and the object's hash.
    pub media: Vec<(u32, u64)>,
    /// The cache salt.
    pub salt: Option<String>,
    /// Whether the tokens are the request's whole prompt and the engine looks it up in its cache, so that the cached
    /// tokens of the reply can be compared with a prediction.
    pub is_comparable: bool,
}

impl PromptTokens {
    /// A prompt without tokens.
    #[must_use]
    pub fn none(why: impl Into<String>, salt: Option<String>) -> Self {
        Self {
            tokens: None,
            source: TokenSource::None,
            why_none: Some(why.into()),
            media: Vec::new(),
            salt,
            is_comparable: false,
        }
    }
}
