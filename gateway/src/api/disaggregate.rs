//! Bodies of requests whose prompt one engine computes and whose output another one generates. All bytes but those of
//! the named fields stay as the caller wrote them.
//!
//! The fields are those of vLLM 0.32 (`vllm/entrypoints/openai/*/protocol.py` and
//! `vllm/distributed/kv_transfer/kv_connector/v1/nixl/`, used as in
//! `tests/v1/kv_connector/nixl_integration/toy_proxy_server.py`) and of SGLang 0.5
//! (`python/sglang/srt/managers/io_struct.py`, used as in `python/sglang/srt/disaggregation/mini_lb.py`).

use bytes::Bytes;
use hyper::StatusCode;

use super::edit::{Splice, splice};
use super::json::Members;
use super::{ApiError, ApiPath, PromptForm, RequestFacts};

/// What a caller must not send where engines have roles: by these fields an engine opens network connections to
/// addresses that they name, or waits for them.
const TRANSFER_FIELDS: [&str; 6] = [
    "kv_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "disagg_prefill_dp_rank",
];
/// Members that say whether a body asks for one output.
const OUTPUT_FIELDS: [&str; 4] = ["n", "best_of", "use_beam_search", "sampling_params"];
/// Members of the body for a prefill engine of vLLM.
const PREFILL_FIELDS: [&str; 6] =
    ["kv_transfer_params", "max_tokens", "max_completion_tokens", "min_tokens", "stream", "stream_options"];
/// What vLLM's prefill engine is told: compute the prompt, and keep its blocks for another engine to read.
const KEEP_FOR_DECODE: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;

/// How SGLang's two engines find each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bootstrap<'a> {
    /// The host of the prefill engine; an IPv6 address in brackets.
    pub host: &'a str,
    /// The port of its bootstrap server.
    pub port: u16,
    /// For each prompt, the number by which the two engines find each other; below 2^63.
    pub rooms: &'a [u64],
    /// Whether the body has a list of prompts, so that the fields are lists too.
    pub is_list: bool,
}

/// Refuses a body by which the caller would steer the transfer between engines.
///
/// # Errors
/// 400 that names the field; 400 for a body that is not an object.
pub fn refuse_transfer_fields(body: &[u8]) -> Result<(), ApiError> {
    let mut wanted = TRANSFER_FIELDS.to_vec();
    wanted.extend(["vllm_xargs", "sampling_params"]);
    let members = read(body, &wanted)?;
    // vLLM copies both of these into the arguments among which its connector looks for the field.
    let xargs = inner(members.get("vllm_xargs"), &TRANSFER_FIELDS);
    let sampling = inner(members.get("sampling_params"), &["extra_args"]);
    let extra = inner(sampling.as_ref().and_then(|sampling| sampling.get("extra_args")), &TRANSFER_FIELDS);
    let has =
        |field: &str| [Some(&members), xargs.as_ref(), extra.as_ref()].into_iter().flatten().any(|it| it.has(field));
    match TRANSFER_FIELDS.into_iter().find(|field| has(field)) {
        None => Ok(()),
        Some(field) => {
            let message = format!("`{field}` is not allowed here: the gateway sets it; remove it");
            Err(ApiError::caller(StatusCode::BAD_REQUEST, "transfer_field_refused", message))
        }
    }
}

/// Whether a body asks for one output of each prompt. Several outputs would read the prefill engine's blocks several
/// times, and it frees them after the first time.
///
/// # Errors
/// 400 for a body that is not an object.
pub fn asks_one_output(body: &[u8]) -> Result<bool, ApiError> {
    let members = read(body, &OUTPUT_FIELDS)?;
    let is_one = |members: &Members<'_>| {
        let is_single = |field| members.get(field).is_none_or(|raw| raw == "1");
        is_single("n") && is_single("best_of") && members.get("use_beam_search").is_none_or(|raw| raw == "false")
    };
    let sampling = members.get("sampling_params");
    // SGLang takes a list of parameters too, one for each prompt.
    let is_plain = sampling.is_none_or(|raw| !(raw.starts_with('[') && raw.contains("\"n\"")));
    Ok(is_plain && is_one(&members) && inner(sampling, &["n"]).is_none_or(|sampling| is_one(&sampling)))
}

/// The body for vLLM's prefill engine: one token, not streamed, and the order to keep the prompt's blocks.
///
/// # Errors
/// 400 for a body that is not an object.
pub fn prefill_body(body: &Bytes) -> Result<Bytes, ApiError> {
    let members = read(body, &PREFILL_FIELDS)?;
    let mut changes = Changes::of(body, &members);
    changes.set("kv_transfer_params", KEEP_FOR_DECODE);
    changes.set("stream", "false");
    changes.set("max_tokens", "1");
    changes.set_present("max_completion_tokens", "1");
    // More than `max_tokens` would be refused.
    changes.set_present("min_tokens", "1");
    // vLLM takes null for absent.
    changes.set_present("stream_options", "null");
    Ok(changes.apply())
}

/// The body for vLLM's decode engine: the caller's, with what the prefill engine said.
///
/// # Errors
/// 400 for a body that is not an object.
pub fn decode_body(body: &Bytes, transfer_params: &str) -> Result<Bytes, ApiError> {
    let members = read(body, &["kv_transfer_params"])?;
    let mut changes = Changes::of(body, &members);
    changes.set("kv_transfer_params", transfer_params);
    Ok(changes.apply())
}

/// The body for both engines of SGLang.
///
/// # Errors
/// 400 for a body that is not an object.
pub fn bootstrap_body(body: &Bytes, bootstrap: &Bootstrap<'_>) -> Result<Bytes, ApiError> {
    let members = read(body, &TRANSFER_FIELDS)?;
    let mut changes = Changes::of(body, &members);
    let host = serde_json::Value::from(bootstrap.host).to_string();
    let port = bootstrap.port.to_string();
    let each = |of: &dyn Fn(&u64) -> String| {
        let values: Vec<String> = bootstrap.rooms.iter().map(of).collect();
        if bootstrap.is_list {
            format!("[{}]", values.join(","))
        } else {
            values.into_iter().next().unwrap_or_default()
        }
    };
    changes.set("bootstrap_host", &each(&|_| host.clone()));
    changes.set("bootstrap_port", &each(&|_| port.clone()));
    changes.set("bootstrap_room", &each(&u64::to_string));
    Ok(changes.apply())
}

/// The prompts of a body, and whether they are a list.
#[must_use]
pub const fn prompts(facts: &RequestFacts) -> (usize, bool) {
    match &facts.prompt {
        PromptForm::Batch { prompts, .. } => (*prompts, true),
        PromptForm::Text | PromptForm::Tokens(_) => (1, false),
    }
}

/// `kv_transfer_params` of a prefill engine's reply, as it stands there; `None` = the engine gave none.
#[must_use]
pub fn transfer_params(reply: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(reply).ok()?;
    Members::read(text, &["kv_transfer_params"]).ok()?.get("kv_transfer_params").filter(|raw| raw.starts_with('{'))
}

/// Whether vLLM's server takes and gives `kv_transfer_params` on this path, with the fields that
/// [`prefill_body`] sets.
///
/// Not `/v1/responses`, whose replies the server may store, and not `/inference/v1/generate`, whose limit of tokens is
/// elsewhere.
#[must_use]
pub const fn vllm_splits(path: ApiPath) -> bool {
    matches!(path, ApiPath::ChatCompletions | ApiPath::Completions | ApiPath::Messages)
}

/// Whether SGLang's server takes the bootstrap fields on this path.
#[must_use]
pub const fn sglang_splits(path: ApiPath) -> bool {
    matches!(path, ApiPath::ChatCompletions | ApiPath::Completions | ApiPath::SglangGenerate)
}

fn read<'a>(body: &'a [u8], wanted: &[&str]) -> Result<Members<'a>, ApiError> {
    let text = std::str::from_utf8(body).ok();
    text.and_then(|text| Members::read(text, wanted).ok())
        .ok_or_else(|| ApiError::caller(StatusCode::BAD_REQUEST, "invalid_json", "the body is not a valid JSON object"))
}

/// The members of an inner object; `None` if the value is no object, which the engine itself will refuse.
fn inner<'a>(raw: Option<&'a str>, wanted: &[&str]) -> Option<Members<'a>> {
    Members::read(raw?, wanted).ok()
}

/// Values to be set in an object's text.
struct Changes<'a> {
    body: &'a [u8],
    members: &'a Members<'a>,
    splices: Vec<Splice>,
    added: String,
}

impl<'a> Changes<'a> {
    fn of(body: &'a [u8], members: &'a Members<'a>) -> Self {
        Self { body, members, splices: Vec::new(), added: String::new() }
    }

    /// Sets a member. Of several with one key the last one counts, and is the one that changes.
    fn set(&mut self, key: &str, value: &str) {
        match self.members.place(key) {
            Some(place) => self.splices.push((place, value.to_owned())),
            None => {
                let comma = if self.added.is_empty() { "" } else { "," };
                self.added.push_str(&format!("{comma}\"{key}\":{value}"));
            }
        }
    }

    /// Sets a member that the body has.
    fn set_present(&mut self, key: &str, value: &str) {
        if self.members.place(key).is_some() {
            self.set(key, value);
        }
    }

    fn apply(mut self) -> Bytes {
        let open = self.body.iter().position(|byte| *byte == b'{').map_or(0, |at| at + 1);
        let is_empty = self.body[open..].trim_ascii_start().starts_with(b"}");
        if !self.added.is_empty() {
            if !is_empty {
                self.added.push(',');
            }
            self.splices.push((open..open, self.added));
        }
        splice(self.body, self.splices)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(body: Result<Bytes, ApiError>) -> String {
        String::from_utf8(body.expect("a body").to_vec()).expect("text")
    }

    fn json(body: Result<Bytes, ApiError>) -> serde_json::Value {
        serde_json::from_str(&text(body)).expect("JSON")
    }

    #[test]
    fn a_prefill_gets_one_token_and_no_stream_and_keeps_every_other_byte() {
        let body = Bytes::from_static(
            br#" {"model" : "m","messages":[ ],"max_completion_tokens": 900,"min_tokens":7, "stream":true,
                "stream_options":{"include_usage":true},"logit_bias":{"5" : 1.50}}"#,
        );
        let expected = format!(
            r#" {{"kv_transfer_params":{KEEP_FOR_DECODE},"max_tokens":1,"model" : "m","messages":[ ],"max_completion_tokens": 1,"min_tokens":1, "stream":false,
                "stream_options":null,"logit_bias":{{"5" : 1.50}}}}"#
        );
        assert_eq!(text(prefill_body(&body)), expected);
        let short = json(prefill_body(&Bytes::from_static(br#"{"prompt":"a","max_tokens":64}"#)));
        assert_eq!((&short["max_tokens"], &short["stream"]), (&1.into(), &false.into()));
        assert!(short.get("max_completion_tokens").is_none() && short.get("min_tokens").is_none());
        let params = &short["kv_transfer_params"];
        assert_eq!((&params["do_remote_decode"], &params["do_remote_prefill"]), (&true.into(), &false.into()));
        for field in ["remote_engine_id", "remote_block_ids", "remote_host", "remote_port"] {
            assert_eq!(params.get(field), Some(&serde_json::Value::Null), "{field}");
        }
        assert_eq!(json(prefill_body(&Bytes::from_static(b"{ }")))["max_tokens"], 1, "no comma too many");
    }

    #[test]
    fn transfer_params_go_on_byte_for_byte_and_win_over_a_null_of_the_caller() {
        let params = r#"{"remote_block_ids" : [[1, 2]],"remote_port":5600,"x":1e3}"#;
        let reply = format!(r#"{{"choices":[],"kv_transfer_params":{params} }}"#);
        assert_eq!(transfer_params(reply.as_bytes()), Some(params));
        let body = Bytes::from_static(br#"{"prompt":"a"}"#);
        assert_eq!(text(decode_body(&body, params)), format!(r#"{{"kv_transfer_params":{params},"prompt":"a"}}"#));
        let body = Bytes::from_static(br#"{"prompt":"a","kv_transfer_params": null}"#);
        assert_eq!(text(decode_body(&body, params)), format!(r#"{{"prompt":"a","kv_transfer_params": {params}}}"#));
        for none in [r#"{"kv_transfer_params":null}"#, r#"{"kv_transfer_params":7}"#, "{}", "no", "\u{fe}"] {
            assert_eq!(transfer_params(none.as_bytes()), None, "{none}");
        }
    }

    #[test]
    fn both_engines_of_sglang_get_one_room_for_each_prompt() {
        let body = Bytes::from_static(br#"{"text":"a"}"#);
        let one = Bootstrap { host: "[fd00::1]", port: 8998, rooms: &[(1 << 63) - 1], is_list: false };
        let expected =
            r#"{"bootstrap_host":"[fd00::1]","bootstrap_port":8998,"bootstrap_room":9223372036854775807,"text":"a"}"#;
        assert_eq!(text(bootstrap_body(&body, &one)), expected);
        let body = Bytes::from_static(br#"{"text":["a","b"],"bootstrap_room":null}"#);
        let two = json(bootstrap_body(&body, &Bootstrap { host: "h", port: 1, rooms: &[5, 6], is_list: true }));
        assert_eq!(two["bootstrap_host"], serde_json::json!(["h", "h"]));
        assert_eq!((&two["bootstrap_port"], &two["bootstrap_room"]), (&vec![1, 1].into(), &vec![5, 6].into()));
    }

    #[test]
    fn fields_that_steer_a_transfer_are_refused_wherever_an_engine_reads_them() {
        for (body, field) in [
            (r#"{"kv_transfer_params":{}}"#, "kv_transfer_params"),
            (r#"{"kv_transfer\u005fparams":{"remote_host":"evil"}}"#, "kv_transfer_params"),
            (r#"{"kv_transfer_params":{"a":1},"kv_transfer_params":null}"#, "kv_transfer_params"),
            (r#"{"vllm_xargs":{"kv_transfer_params":"x"}}"#, "kv_transfer_params"),
            (r#"{"sampling_params":{"extra_args":{"kv_transfer_params":{}}}}"#, "kv_transfer_params"),
            (r#"{"bootstrap_host":"10.0.0.1"}"#, "bootstrap_host"),
            (r#"{"bootstrap_port":[1]}"#, "bootstrap_port"),
            (r#"{"bootstrap_room":7}"#, "bootstrap_room"),
            (r#"{"disagg_prefill_dp_rank":1}"#, "disagg_prefill_dp_rank"),
        ] {
            let error = refuse_transfer_fields(body.as_bytes()).expect_err(body);
            assert_eq!((error.status, error.code), (StatusCode::BAD_REQUEST, "transfer_field_refused"), "{body}");
            assert!(error.message.contains(field) && !error.message.contains("evil"), "{}", error.message);
        }
        for body in [r#"{"kv_transfer_params":null}"#, r#"{"prompt":"bootstrap_room","vllm_xargs":{"a":1}}"#] {
            assert_eq!(refuse_transfer_fields(body.as_bytes()), Ok(()), "{body}");
        }
    }

    #[test]
    fn several_outputs_are_seen() {
        for (body, is_one) in [
            (r#"{"prompt":"a"}"#, true),
            (r#"{"prompt":"a","n":1,"best_of":null,"use_beam_search":false}"#, true),
            (r#"{"prompt":"a","n":2}"#, false),
            (r#"{"prompt":"a","best_of":3}"#, false),
            (r#"{"prompt":"a","use_beam_search":true}"#, false),
            (r#"{"text":"a","sampling_params":{"n":2}}"#, false),
            (r#"{"text":["a"],"sampling_params":[{"n":2}]}"#, false),
            (r#"{"text":["a"],"sampling_params":[{"temperature":0}]}"#, true),
        ] {
            assert_eq!(asks_one_output(body.as_bytes()), Ok(is_one), "{body}");
        }
    }
}
