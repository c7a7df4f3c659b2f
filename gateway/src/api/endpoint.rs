//! The paths of the inference APIs.

use std::borrow::Cow;

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
    /// The path without its query, as it stands in a request line. Engines decode it, so that `/v1/ch%61t/completions` is a
    /// chat.
    #[must_use]
    pub fn of(path: &str) -> Self {
        match &*decoded(path) {
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

/// A path without its query, as engines look it up: `%` and two hexadecimal digits are one byte.
pub(crate) fn decoded(path: &str) -> Cow<'_, str> {
    if !path.contains('%') {
        return Cow::Borrowed(path);
    }
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let (mut bytes, mut rest) = (Vec::with_capacity(path.len()), path.as_bytes());
    while let Some((first, after)) = rest.split_first() {
        let digits = after.first_chunk().filter(|_| *first == b'%');
        let byte = digits.and_then(|[high, low]| u8::try_from(digit(*high)? * 16 + digit(*low)?).ok());
        bytes.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &after[2..] } else { after };
    }
    Cow::Owned(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_known_however_it_is_encoded() {
        for path in ["/v1/chat/completions", "/v1/ch%61t/completions", "/v1%2Fchat%2fcompletions"] {
            assert_eq!(ApiPath::of(path), ApiPath::ChatCompletions, "{path}");
        }
        for path in ["/v1/chat/completions%", "/v1/ch%6", "/v1/ch%6\u{e9}t", "/v1/ch%2561t/completions", "%", "/%ff"] {
            assert_eq!(ApiPath::of(path), ApiPath::Other, "{path}");
        }
    }
}
