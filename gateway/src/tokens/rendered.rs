//! The replies of renderers and of `/tokenize`.
//!
//! vLLM's renderers answer the body of `/inference/v1/generate`: `{token_ids, features: {mm_hashes, mm_placeholders},
//! cache_salt, …}`; for completions a list with one for each prompt. SGLang's renderer answers `input_ids`.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::media::{MediaSpan, identifier_hash};
use super::source::TokenSource;
use crate::limits::{MEDIA_MAX, NAME_BYTES_MAX, PROMPT_TOKENS_MAX};

/// A prompt as an engine renders it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rendered {
    pub(super) tokens: Arc<[u32]>,
    /// Sorted by offset.
    pub(super) media: Arc<[MediaSpan]>,
    pub(super) salt: Option<Arc<str>>,
    pub(super) source: TokenSource,
}

#[derive(Deserialize)]
struct Place {
    offset: u32,
    length: u32,
}

#[derive(Deserialize)]
struct Features {
    #[serde(default)]
    mm_hashes: BTreeMap<String, Vec<String>>,
    #[serde(default)]
    mm_placeholders: BTreeMap<String, Vec<Place>>,
}

#[derive(Deserialize)]
struct Generate {
    token_ids: Option<Vec<u32>>,
    input_ids: Option<Vec<u32>>,
    features: Option<Features>,
    content_parts: Option<IgnoredAny>,
    cache_salt: Option<String>,
}

#[derive(Deserialize)]
struct Tokenized {
    tokens: Vec<u32>,
}

/// Reads a renderer's reply, or a body of `/inference/v1/generate`. Of several prompts the first one counts. The
/// error says what is wrong, without a part of the prompt.
pub(super) fn read_rendered(bytes: &[u8], source: TokenSource) -> Result<Rendered, String> {
    let is_list = bytes.trim_ascii_start().first() == Some(&b'[');
    let generate: Generate = if is_list {
        let all: Vec<Generate> = serde_json::from_slice(bytes).map_err(|_| "it is not a list of prompts")?;
        all.into_iter().next().ok_or("it has no prompt")?
    } else {
        serde_json::from_slice(bytes).map_err(|_| "it is not a rendered prompt")?
    };
    if generate.content_parts.is_some() {
        return Err("its multimodal objects are not rendered yet".to_owned());
    }
    let tokens = checked(generate.token_ids.or(generate.input_ids).ok_or("it has no token ids")?)?;
    let media = generate.features.map_or(Ok(Vec::new()), |features| spans(&features, tokens.len()))?;
    let salt = generate.cache_salt.filter(|salt| !salt.is_empty()).map(Arc::from);
    Ok(Rendered { tokens, media: media.into(), salt, source })
}

/// Reads the reply of `/tokenize`: `{"tokens": […], "count": n, …}`.
pub(super) fn read_tokenized(bytes: &[u8]) -> Result<Rendered, String> {
    let reply: Tokenized = serde_json::from_slice(bytes).map_err(|_| "it has no list of tokens")?;
    Ok(Rendered { tokens: checked(reply.tokens)?, media: Arc::from([]), salt: None, source: TokenSource::Tokenize })
}

fn checked(tokens: Vec<u32>) -> Result<Arc<[u32]>, String> {
    match tokens.len() {
        0 => Err("it has no tokens".to_owned()),
        count if count > PROMPT_TOKENS_MAX => Err(format!("it has more than {PROMPT_TOKENS_MAX} tokens")),
        _ => Ok(tokens.into()),
    }
}

fn spans(features: &Features, tokens: usize) -> Result<Vec<MediaSpan>, String> {
    if !features.mm_hashes.keys().eq(features.mm_placeholders.keys()) {
        return Err("its multimodal hashes and placeholders are of different kinds".to_owned());
    }
    let mut spans = Vec::new();
    for (hashes, places) in features.mm_hashes.values().zip(features.mm_placeholders.values()) {
        if hashes.len() != places.len() || spans.len() + hashes.len() > MEDIA_MAX {
            return Err("its multimodal hashes and placeholders do not match, or are too many".to_owned());
        }
        for (identifier, place) in hashes.iter().zip(places) {
            let span = MediaSpan { offset: place.offset, length: place.length, hash: identifier_hash(identifier) };
            if place.length == 0 || span.end() > tokens as u64 || identifier.len() > NAME_BYTES_MAX {
                return Err("it has a multimodal object outside of its tokens".to_owned());
            }
            spans.push(span);
        }
    }
    spans.sort_by_key(|span| span.offset);
    if spans.windows(2).any(|pair| pair[0].end() > u64::from(pair[1].offset)) {
        return Err("it has overlapping multimodal objects".to_owned());
    }
    Ok(spans)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(text: &str) -> Result<Rendered, String> {
        read_rendered(text.as_bytes(), TokenSource::Renderer)
    }

    #[test]
    fn tokens_media_and_salt_are_read() {
        let digest = "00000000000000ff".repeat(4);
        let text = format!(
            r#"{{"request_id": "r", "token_ids": [1, 2, 3, 4, 5, 6], "token_offsets": null, "cache_salt": "s",
            "sampling_params": {{"temperature": 1.0}}, "features": {{
                "mm_hashes": {{"audio": ["uuid-A"], "image": ["{digest}"]}},
                "mm_placeholders": {{"audio": [{{"offset": 4, "length": 2}}], "image": [{{"offset": 1, "length": 2}}]}},
                "kwargs_data": null}}}}"#
        );
        let rendered = read(&text).expect("a prompt");
        assert_eq!((&*rendered.tokens, rendered.salt.as_deref()), (&[1, 2, 3, 4, 5, 6][..], Some("s")));
        let expected = [
            MediaSpan { offset: 1, length: 2, hash: 0xff },
            MediaSpan { offset: 4, length: 2, hash: identifier_hash("uuid-A") },
        ];
        assert_eq!(&*rendered.media, expected);
        let list = read(r#"[{"token_ids": [7], "features": null}, {"token_ids": [8]}]"#).expect("a prompt");
        assert_eq!((&*list.tokens, list.media.len(), list.salt), (&[7][..], 0, None));
        assert_eq!(&*read(r#"{"input_ids": [9]}"#).expect("a prompt").tokens, [9]);
        let tokenized = read_tokenized(br#"{"tokens": [5], "count": 1, "max_model_len": 9, "token_strs": null}"#);
        assert_eq!(&*tokenized.expect("tokens").tokens, [5]);
    }

    #[test]
    fn nonsense_is_refused_and_not_repeated() {
        for text in [
            "",
            "secret",
            "[]",
            "{}",
            "null",
            r#"{"token_ids": []}"#,
            r#"{"token_ids": "secret"}"#,
            r#"{"token_ids": [1, -1]}"#,
            r#"{"token_ids": [1.5]}"#,
            r#"{"token_ids": [4294967296]}"#,
            r#"{"token_ids": [[1]]}"#,
            r#"{"token_ids": [1], "content_parts": []}"#,
            r#"{"token_ids": [1], "features": {"mm_hashes": {"image": ["a"]}}}"#,
            r#"{"token_ids": [1], "features": {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": []}}}"#,
            r#"{"token_ids": [1], "features": {"mm_hashes": {"i": ["a"]},
                "mm_placeholders": {"i": [{"offset": 0, "length": 2}]}}}"#,
            r#"{"token_ids": [1], "features": {"mm_hashes": {"i": ["a"]},
                "mm_placeholders": {"i": [{"offset": 0, "length": 0}]}}}"#,
            r#"{"token_ids": [1, 2], "features": {"mm_hashes": {"i": ["a", "b"]},
                "mm_placeholders": {"i": [{"offset": 0, "length": 2}, {"offset": 1, "length": 1}]}}}"#,
        ] {
            let error = read(text).expect_err(text);
            assert!(!error.contains("secret"), "{error}");
        }
        for text in ["", "{}", r#"{"tokens": []}"#, r#"{"tokens": [[1]]}"#, r#"{"tokens": null}"#] {
            assert!(read_tokenized(text.as_bytes()).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = (read_rendered(&bytes, TokenSource::Renderer), read_tokenized(&bytes));
        }

        #[test]
        fn what_is_read_is_within_the_tokens(
            tokens in proptest::collection::vec(any::<u32>(), 1..50),
            places in proptest::collection::vec((0_u32..60, 0_u32..20), 0..5),
        ) {
            let hashes: Vec<_> = places.iter().map(|_| "x").collect();
            let places: Vec<_> = places.iter()
                .map(|(offset, length)| serde_json::json!({"offset": offset, "length": length})).collect();
            let reply = serde_json::json!({
                "token_ids": tokens, "features": {"mm_hashes": {"i": hashes}, "mm_placeholders": {"i": places}}
            });
            if let Ok(rendered) = read(&reply.to_string()) {
                prop_assert_eq!(&*rendered.tokens, &tokens[..]);
                prop_assert!(rendered.media.iter().all(|span| span.end() <= tokens.len() as u64 && span.length > 0));
                prop_assert!(rendered.media.windows(2).all(|pair| pair[0].end() <= u64::from(pair[1].offset)));
            }
        }
    }
}
