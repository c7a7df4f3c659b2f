//! A caller's body and an engine's reply.

use bytes::Bytes;
use kvrouted_gateway::api::{
    ApiPath, Bootstrap, Edits, PromptForm, SseFilter, UsageReader, asks_one_output, bootstrap_body, decode_body,
    edit_body, prefill_body, read_request, refuse_transfer_fields, transfer_params,
};
use kvrouted_gateway::tokens::readers::{cached, tokenize_request};
use serde_json::Value;

use super::path_of;

/// The first byte is the path, the second which changes are wanted, the rest the body. Facts are those that a JSON
/// parser finds, and changes change nothing else.
pub(crate) fn openai_body(data: &[u8]) {
    let [path, wanted, body @ ..] = data else { return };
    let (path, body) = (path_of(*path), Bytes::copy_from_slice(body));
    // Numbers beyond what a parser holds, and lone surrogates, are text to the gateway.
    let parsed = serde_json::from_slice::<Value>(&body).ok();
    let Ok(facts) = read_request(path, &body) else { return };
    if let Some(parsed) = &parsed {
        assert!(parsed.is_object(), "facts of what is no object");
        assert_eq!(facts.model.as_deref(), parsed["model"].as_str(), "the model");
        assert_eq!(facts.stream, parsed["stream"] == true, "whether it is a stream");
        if let PromptForm::Tokens(tokens) = &facts.prompt {
            let is_list = |field: &str| parsed[field].as_array().is_some_and(|list| list.len() == tokens.len());
            let fields = ["prompt", "input", "input_ids", "token_ids"];
            assert!(fields.into_iter().any(is_list), "tokens that the body has not");
        }
    }
    let edits = Edits {
        ask_usage: wanted & 1 > 0,
        strip_report_mode: wanted & 2 > 0,
        token_ids: (wanted & 4 > 0).then_some(&[1, 2, 3]),
    };
    let edited = edit_body(path, &body, &facts, &edits).expect("a body that was read");
    if !edited.has_extra_usage && !edited.has_token_ids && !facts.has_report_mode {
        assert_eq!(edited.body, body, "a change that was not asked for");
    }
    if let Some(parsed) = &parsed {
        is_changed_only_in(
            parsed,
            &edited.body,
            &[
                "stream_options",
                "prompt",
                "input_ids",
                "text",
                "token_ids",
                "kv_cache_report_mode",
                "vllm_xargs",
                "sampling_params",
                "messages",
            ],
        );
    }
    on_two_engines(path, &body, parsed.as_ref());
    for is_sglang in [false, true] {
        if let Some(request) = tokenize_request(path, is_sglang, &body) {
            assert!(serde_json::from_slice::<Value>(&request).is_ok_and(|it| it.is_object()) || parsed.is_none());
        }
    }
    if let (Some(kept), Some(_)) = (cached(&body), &parsed) {
        assert!(serde_json::from_slice::<Value>(&kept).is_ok_and(|it| it["mm_payload"] == "none"), "what is cached");
    }
}

/// The bodies for two engines are JSON, and all but the fields of the transfer is the caller's.
fn on_two_engines(path: ApiPath, body: &Bytes, parsed: Option<&Value>) {
    let transfer = ["kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"];
    let Some(parsed) = parsed else { return };
    let is_free = refuse_transfer_fields(body).is_ok();
    assert!(!is_free || transfer.iter().all(|field| parsed[*field].is_null()), "a transfer of the caller's own");
    let _ = (asks_one_output(body), path);
    let limits =
        ["kv_transfer_params", "max_tokens", "max_completion_tokens", "min_tokens", "stream", "stream_options"];
    let prefill = prefill_body(body).expect("an object");
    is_changed_only_in(parsed, &prefill, &limits);
    let prefilled: Value = serde_json::from_slice(&prefill).expect("JSON");
    assert!(prefilled["max_tokens"] == 1 && prefilled["stream"] == false, "{prefilled}");
    let params = transfer_params(br#"{"kv_transfer_params": {"remote_host": "a"}}"#).expect("an object");
    let decode = decode_body(body, params).expect("an object");
    is_changed_only_in(parsed, &decode, &transfer);
    let decoded: Value = serde_json::from_slice(&decode).expect("JSON");
    assert_eq!(decoded["kv_transfer_params"]["remote_host"], "a", "the caller's parameters win");
    let bootstrap = Bootstrap { host: "[fd00::1]", port: 8998, rooms: &[7, 8], is_list: true };
    let both: Value = serde_json::from_slice(&bootstrap_body(body, &bootstrap).expect("an object")).expect("JSON");
    assert_eq!(both["bootstrap_room"], serde_json::json!([7, 8]), "the caller's room wins");
}

/// A parser finds the same members with the same values, but for some.
fn is_changed_only_in(before: &Value, after: &[u8], fields: &[&str]) {
    let after: Value = serde_json::from_slice(after).expect("JSON");
    let without = |value: &Value| {
        let mut object = value.as_object().expect("an object").clone();
        fields.iter().for_each(|field| drop(object.remove(*field)));
        object
    };
    assert_eq!(without(before), without(&after), "a change elsewhere");
}

/// The first byte is the path, the second the length of the pieces, the third whether it is a stream. How the bytes are
/// cut changes nothing, and the filter only leaves out.
pub(crate) fn openai_reply(data: &[u8]) {
    let [path, piece, flags, reply @ ..] = data else { return };
    let (path, is_stream, piece) = (path_of(*path), flags & 1 > 0, usize::from(*piece).max(1));
    let read = |pieces: std::slice::Chunks<'_, u8>| {
        let (mut reader, mut filter, mut passed) = (UsageReader::new(path, is_stream), SseFilter::new(), Vec::new());
        for piece in pieces {
            reader.feed(piece);
            passed.extend_from_slice(&filter.feed(piece));
        }
        passed.extend_from_slice(&filter.finish());
        (reader.output_events(), reader.finish(), passed)
    };
    let (whole, cut) = (read(reply.chunks(reply.len().max(1))), read(reply.chunks(piece)));
    assert_eq!(whole, cut, "how a reply is cut");
    let mut rest = reply.iter();
    assert!(whole.2.iter().all(|byte| rest.any(|of| of == byte)), "the filter has added or moved bytes");
    let _ = transfer_params(reply);
}
