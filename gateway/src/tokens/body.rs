//! What a caller's body says about its prompt, beside the prompt.

use std::borrow::Cow;
use std::collections::BTreeMap;

use bytes::{Bytes, BytesMut};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::api::ApiPath;

/// The members of a body. Of several with one key the last one counts, as for the engines' parsers.
pub(super) type Fields<'a> = BTreeMap<Cow<'a, str>, &'a RawValue>;

/// The members of a body; `None` = it is no JSON object.
pub(super) fn fields(body: &[u8]) -> Option<Fields<'_>> {
    serde_json::from_slice(body).ok()
}

/// The value of a field; `null` counts as absent.
pub(super) fn value<'a>(fields: &Fields<'a>, field: &str) -> Option<&'a str> {
    fields.get(field).map(|raw| raw.get()).filter(|raw| *raw != "null")
}

/// Fields that change the prompt which a body has as token ids.
const CHANGES_COMPLETION_IDS: [&str; 3] = ["truncate_prompt_tokens", "prompt_embeds", "suffix"];
const CHANGES_SGLANG_IDS: [&str; 4] = ["image_data", "video_data", "audio_data", "input_embeds"];

/// The field because of which a body's token ids are not the whole prompt.
pub(super) fn changes_ids(path: ApiPath, fields: &Fields<'_>) -> Option<&'static str> {
    let changes: &[&'static str] = match path {
        ApiPath::Completions => &CHANGES_COMPLETION_IDS,
        ApiPath::SglangGenerate => &CHANGES_SGLANG_IDS,
        _ => &[],
    };
    changes.iter().copied().find(|field| value(fields, field).is_some())
}

/// Whether an engine may compute the whole prompt although it has it cached, because the caller wants the prompt's log
/// probabilities. Looks for the words only: a prompt that contains them is not compared, which does no harm.
pub(super) fn may_skip_cache(body: &[u8]) -> bool {
    let has = |word: &[u8]| memchr::memmem::find(body, word).is_some();
    has(b"\"prompt_logprobs\"") || has(b"\"echo\"")
}

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow)]
    content: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Part<'a> {
    #[serde(borrow, rename = "type")]
    kind: Option<Cow<'a, str>>,
}

/// Whether all messages are text.
pub(super) fn are_text(messages: &str) -> bool {
    let Ok(messages) = serde_json::from_str::<Vec<Message<'_>>>(messages) else { return false };
    messages.iter().all(|message| match message.content.map(RawValue::get) {
        None | Some("null") => true,
        Some(content) if content.starts_with('"') => true,
        Some(content) => {
            let parts = serde_json::from_str::<Vec<Part<'_>>>(content);
            parts.is_ok_and(|parts| parts.iter().all(|part| part.kind.as_deref() == Some("text")))
        }
    })
}

/// The body with `"mm_payload": "none"` as its last member: vLLM's renderer then leaves out the pixels, which may have
/// many megabytes. Servers that do not know the field ignore it.
pub(super) fn without_payload(body: &Bytes) -> Bytes {
    let Some(end) = body.iter().rposition(|byte| *byte == b'}') else { return body.clone() };
    let is_empty = body[..end].trim_ascii_end().last() == Some(&b'{');
    let member: &[u8] = if is_empty { b"\"mm_payload\":\"none\"" } else { b",\"mm_payload\":\"none\"" };
    let mut with = BytesMut::with_capacity(body.len() + member.len());
    with.extend_from_slice(&body[..end]);
    with.extend_from_slice(member);
    with.extend_from_slice(&body[end..]);
    with.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fields_beside_the_ids_are_seen() {
        let changes = |path, body: &str| changes_ids(path, &fields(body.as_bytes()).expect("an object"));
        assert_eq!(changes(ApiPath::Completions, r#"{"prompt": [1], "suffix": null}"#), None);
        let truncated = r#"{"prompt": [1], "truncate\u005fprompt_tokens": 3}"#;
        assert_eq!(changes(ApiPath::Completions, truncated), Some("truncate_prompt_tokens"));
        assert_eq!(changes(ApiPath::SglangGenerate, r#"{"image_data": "x"}"#), Some("image_data"));
        assert!(fields(b"[]").is_none() && fields(b"{").is_none());
        assert!(may_skip_cache(br#"{"prompt_logprobs": 1}"#) && !may_skip_cache(br#"{"prompt": "logprobs"}"#));
    }

    #[test]
    fn text_is_told_from_media() {
        for (messages, expected) in [
            ("[]", true),
            (r#"[{"role": "user", "content": "a"}, {"role": "assistant", "content": null, "tool_calls": []}]"#, true),
            (r#"[{"role": "user", "content": [{"type": "text", "text": "a"}]}]"#, true),
            (r#"[{"role": "user", "content": [{"type": "t\u0065xt", "text": "a"}]}]"#, true),
            (r#"[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]"#, false),
            (r#"[{"role": "user", "content": [{"image_url": "x"}]}]"#, false),
            (r#"[{"role": "user", "content": {"type": "text"}}]"#, false),
            (r#"[{"role": "user", "content": ["a"]}]"#, false),
            ("{}", false),
            ("[1]", false),
        ] {
            assert_eq!(are_text(messages), expected, "{messages}");
        }
    }

    #[test]
    fn the_payload_is_declined_in_any_object() {
        for (body, expected) in [
            ("{}", r#"{"mm_payload":"none"}"#),
            (" { } ", r#" { "mm_payload":"none"} "#),
            (r#"{"a":"}"}"#, r#"{"a":"}","mm_payload":"none"}"#),
            ("[", "["),
        ] {
            assert_eq!(without_payload(&Bytes::from_static(body.as_bytes())), expected.as_bytes());
        }
    }

    proptest! {
        #[test]
        fn declining_the_payload_changes_nothing_else(
            map in proptest::collection::btree_map("\\PC{0,6}", "\\PC{0,12}", 0..5),
        ) {
            let body = Bytes::from(serde_json::to_vec(&map).expect("JSON"));
            let with = without_payload(&body);
            let mut read: BTreeMap<String, String> = serde_json::from_slice(&with).expect("JSON");
            prop_assert_eq!(read.remove("mm_payload"), Some("none".to_owned()));
            let mut map = map;
            map.remove("mm_payload");
            prop_assert_eq!(read, map);
        }
    }
}
