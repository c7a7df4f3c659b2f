//! The changes of a body that an operator may turn on. All other bytes stay as the caller wrote them.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;
use serde_json::value::RawValue;

use super::json::Members;
use super::request::{REPORT_MODE, members_of, object};
use super::{ApiError, ApiPath, PromptForm, RequestFacts};

/// The changes that are wanted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Edits<'a> {
    /// Ask the engine for a stream's usage, where the caller did not.
    pub ask_usage: bool,
    /// Take `kv_cache_report_mode` out.
    pub strip_report_mode: bool,
    /// Send these token ids in place of the text, where the path takes ids.
    pub token_ids: Option<&'a [u32]>,
}

/// The body after its changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EditedBody {
    /// The bytes for the engine.
    pub body: Bytes,
    /// Whether the engine will send a usage chunk that the caller did not ask for. [`super::SseFilter`] takes it out.
    pub has_extra_usage: bool,
    /// Whether token ids took the place of the text.
    pub has_token_ids: bool,
}

/// Applies the changes to a body that [`super::read_request`] has read.
///
/// # Errors
/// As [`super::read_request`].
pub fn edit_body(path: ApiPath, body: &Bytes, facts: &RequestFacts, edits: &Edits<'_>) -> Result<EditedBody, ApiError> {
    let asks_usage = edits.ask_usage && facts.stream && !facts.include_usage && has_stream_options(path);
    let strips = edits.strip_report_mode && facts.has_report_mode;
    let ids = edits.token_ids.filter(|_| facts.prompt == PromptForm::Text);
    if !asks_usage && !strips && ids.is_none() {
        return Ok(EditedBody { body: body.clone(), has_extra_usage: false, has_token_ids: false });
    }
    let members = members_of(body)?;
    let mut splices = Vec::new();
    if asks_usage {
        splices.push(usage_splice(body, &members)?);
    }
    if strips {
        strip_report_mode(&members, &mut splices)?;
    }
    let ids_splice = ids.and_then(|ids| token_splice(path, &members, ids));
    let has_token_ids = ids_splice.is_some();
    splices.extend(ids_splice);
    Ok(EditedBody { body: splice(body, splices), has_extra_usage: asks_usage, has_token_ids })
}

/// Whether streams of the path end with a usage chunk if `stream_options.include_usage` is true. The other paths always
/// tell it.
const fn has_stream_options(path: ApiPath) -> bool {
    matches!(path, ApiPath::ChatCompletions | ApiPath::Completions | ApiPath::VllmGenerate)
}

/// A place of a text, and what stands there afterwards.
pub(super) type Splice = (Range<usize>, String);

/// Replaces places of the body, which do not overlap.
pub(super) fn splice(body: &[u8], mut splices: Vec<Splice>) -> Bytes {
    splices.sort_by_key(|(place, _)| place.start);
    let mut edited = Vec::with_capacity(body.len() + splices.iter().map(|(_, text)| text.len()).sum::<usize>());
    let mut from = 0;
    for (place, text) in splices {
        edited.extend_from_slice(&body[from..place.start]);
        edited.extend_from_slice(text.as_bytes());
        from = place.end;
    }
    edited.extend_from_slice(&body[from..]);
    edited.into()
}

fn usage_splice(body: &[u8], members: &Members<'_>) -> Result<Splice, ApiError> {
    const ASKED: &str = r#""include_usage":true"#;
    let Some(place) = members.place("stream_options") else {
        // The body has `stream`, so that a member follows.
        let open = body.iter().position(|byte| *byte == b'{').map_or(0, |at| at + 1);
        return Ok((open..open, format!(r#""stream_options":{{{ASKED}}},"#)));
    };
    let text = match members.get("stream_options") {
        None => format!("{{{ASKED}}}"),
        // The last of several members with one key counts, so that the new one goes to the end.
        Some(raw) => {
            let is_empty = raw[1..].trim_start().starts_with('}');
            let comma = if is_empty { "" } else { "," };
            format!("{}{comma}{ASKED}}}", &raw[..raw.len() - 1])
        }
    };
    Ok((place, text))
}

fn strip_report_mode(members: &Members<'_>, splices: &mut Vec<Splice>) -> Result<(), ApiError> {
    if let (Some(place), Some(_)) = (members.place(REPORT_MODE), members.get(REPORT_MODE)) {
        splices.push((place, "null".into()));
    }
    if let (Some(place), Some(raw)) = (members.place("vllm_xargs"), members.get("vllm_xargs")) {
        splices.extend(without_report_mode(raw).map(|text| (place, text)));
    }
    let Some(sampling) = members.get("sampling_params").filter(|raw| raw.starts_with('{')) else { return Ok(()) };
    let base = members.place("sampling_params").map_or(0, |place| place.start);
    let inner = object(members, "sampling_params", &["extra_args"])?;
    let Some((place, raw)) = inner.as_ref().and_then(|it| Some((it.place("extra_args")?, it.get("extra_args")?)))
    else {
        return Ok(());
    };
    debug_assert!(place.end <= sampling.len());
    splices.extend(without_report_mode(raw).map(|text| (base + place.start..base + place.end, text)));
    Ok(())
}

/// The object's text without the field, if it has it. The object is written anew: a key may be written in several ways. Its
/// values stay text, because a number that this program cannot hold must not keep the field in.
fn without_report_mode(raw: &str) -> Option<String> {
    let mut object: BTreeMap<Cow<'_, str>, &RawValue> = serde_json::from_str(raw).ok()?;
    object.remove(REPORT_MODE)?;
    serde_json::to_string(&object).ok()
}

/// Token ids in place of a text. Only where the engine does the same with the ids as with the text: not with `echo`,
/// whose reply repeats the text.
fn token_splice(path: ApiPath, members: &Members<'_>, ids: &[u32]) -> Option<Splice> {
    let field = match path {
        ApiPath::Completions if members.get("echo").is_none_or(|raw| raw == "false") => "prompt",
        ApiPath::SglangGenerate => "text",
        _ => return None,
    };
    if !members.get(field)?.starts_with('"') {
        return None;
    }
    let ids = serde_json::to_string(ids).ok()?;
    match path {
        ApiPath::SglangGenerate => Some((members.member_place(field)?, format!("\"input_ids\":{ids}"))),
        _ => Some((members.place(field)?, ids)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::read_request;
    use super::*;

    fn edited(path: ApiPath, body: &str, edits: &Edits<'_>) -> EditedBody {
        let body = Bytes::from(body.to_owned());
        let facts = read_request(path, &body).expect("a good body");
        edit_body(path, &body, &facts, edits).expect("edits")
    }

    #[test]
    fn a_body_without_changes_is_the_same_bytes() {
        let body = "  {\"messages\" : [ ] ,\n\"stream\":true}";
        let after = edited(ApiPath::ChatCompletions, body, &Edits::default());
        assert_eq!(after.body, body.as_bytes());
        let asked = r#"{"messages":[],"stream":true,"stream_options":{"include_usage":true}}"#;
        let after = edited(ApiPath::ChatCompletions, asked, &Edits { ask_usage: true, ..Edits::default() });
        assert_eq!((after.body.as_ref(), after.has_extra_usage), (asked.as_bytes(), false));
    }

    #[test]
    fn usage_is_asked_for_once_and_nothing_else_changes() {
        for (body, expected) in [
            (
                r#" {"messages":[], "stream":true}"#,
                r#" {"stream_options":{"include_usage":true},"messages":[], "stream":true}"#,
            ),
            (
                r#"{"messages":[],"stream":true,"stream_options": null }"#,
                r#"{"messages":[],"stream":true,"stream_options": {"include_usage":true} }"#,
            ),
            (
                r#"{"stream_options":{ },"messages":[],"stream":true}"#,
                r#"{"stream_options":{ "include_usage":true},"messages":[],"stream":true}"#,
            ),
            (
                r#"{"stream_options":{"include_usage":false},"messages":[],"stream":true}"#,
                r#"{"stream_options":{"include_usage":false,"include_usage":true},"messages":[],"stream":true}"#,
            ),
        ] {
            let after = edited(ApiPath::ChatCompletions, body, &Edits { ask_usage: true, ..Edits::default() });
            assert_eq!(std::str::from_utf8(&after.body), Ok(expected));
            assert!(after.has_extra_usage);
            let again = read_request(ApiPath::ChatCompletions, &after.body).expect("still a good body");
            assert!(again.include_usage);
        }
    }

    #[test]
    fn the_report_mode_is_taken_out_wherever_it_is() {
        for body in [
            r#"{"prompt":"a","vllm_xargs":{"kv_cache_report_mode":"full","b":1}}"#,
            r#"{"prompt":"a","vllm_xargs":{"kv_cache\u005freport_mode":"full","b":1}}"#,
            r#"{"prompt":"a","sampling_params": {"x":1, "extra_args": {"kv_cache_report_mode":"full"} }}"#,
            r#"{"prompt":"a","vllm_xargs":{"kv_cache_report_mode":"full","b":1e999}}"#,
            r#"{"prompt":"a","kv_cache_report_mode":"full"}"#,
        ] {
            let edits = Edits { strip_report_mode: true, ..Edits::default() };
            let after = edited(ApiPath::Completions, body, &edits);
            let facts = read_request(ApiPath::Completions, &after.body).expect("still a good body");
            assert!(!facts.has_report_mode, "{body}");
            assert_ne!(after.body, body.as_bytes());
        }
    }

    #[test]
    fn ids_take_the_place_of_text_only_where_the_reply_stays_the_same() {
        let edits = Edits { token_ids: Some(&[1, 2]), ..Edits::default() };
        let after = edited(ApiPath::Completions, r#"{"prompt" : "hi", "n":1}"#, &edits);
        assert_eq!(after.body, &br#"{"prompt" : [1,2], "n":1}"#[..]);
        let after = edited(ApiPath::SglangGenerate, r#"{"a":1, "text" : "hi"}"#, &edits);
        assert_eq!(after.body, &br#"{"a":1, "input_ids":[1,2]}"#[..]);
        for (path, body) in [
            (ApiPath::Completions, r#"{"prompt":"hi","echo":true}"#),
            (ApiPath::Completions, r#"{"prompt":["hi"]}"#),
            (ApiPath::ChatCompletions, r#"{"messages":[]}"#),
        ] {
            let after = edited(path, body, &edits);
            assert_eq!((after.body.as_ref(), after.has_token_ids), (body.as_bytes(), false));
        }
    }
}
