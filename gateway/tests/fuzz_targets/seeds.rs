//! Seeds for mutations: what callers, engines, Envoy and the Kubernetes API send.

use kvrouted_gateway::config::example;
use kvrouted_gateway::epp::messages::{ProcessingRequest, Value};
use prost::Message as _;

use crate::player::{
    CHAT, opening, request_body, request_trailers, response_body, response_headers, response_trailers, with_attribute,
    with_metadata,
};
use crate::targets::PATHS;

/// Seeds of a target.
pub(crate) fn of(target: &str) -> Vec<Vec<u8>> {
    match target {
        "openai_body" => bodies(),
        "openai_reply" => replies(),
        "engine_replies" => ENGINE_REPLIES.map(|reply| reply.as_bytes().to_vec()).into(),
        "renders" => RENDERS.map(|reply| [&[16], reply.as_bytes()].concat()).into(),
        "watch" => watches(),
        "ext_proc" => exchanges(),
        "chat_template" => templates(),
        "log_line" => LOG_LINES.map(|line| line.as_bytes().to_vec()).into(),
        "gateway_config" => configurations(),
        _ => Vec::new(),
    }
}

const BODIES: [&str; 12] = [
    r#"{"model": "m", "messages": [{"role": "user", "content": "Hello"}], "stream": true, "max_tokens": 7}"#,
    r#"{"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "stream_options": {}}"#,
    r#"{"model": "m", "prompt": "text", "stream": true, "stream_options": {"include_usage": false}}"#,
    r#"{"model": "m", "prompt": [1, 2, 3], "kv_cache_report_mode": "full"}"#,
    r#"{"model": "m", "prompt": [[1, 2], [3]], "n": 2, "best_of": 2}"#,
    r#"{"prompt": ["a", "b"], "vllm_xargs": {"kv_cache_report_mode": "full", "kv_transfer_params": {}}}"#,
    r#"{"text": "a", "sampling_params": {"max_new_tokens": 3, "extra_args": {"kv_cache_report_mode": 1}}, "lora_path": "l"}"#,
    r#"{"input_ids": [5, 6], "stream": false, "bootstrap_room": 7}"#,
    r#"{"token_ids": [1], "sampling_params": {"max_tokens": 2}, "cache_salt": "s"}"#,
    r#"{"model": "m", "input": "text", "max_output_tokens": 5, "tools": [{"type": "function", "function": {"name": "f"}}]}"#,
    r#"{"model": "m", "model": "n", "str\u0065am": true, "messages": []}"#,
    r#"{"model": "m", "messages": [], "stream": true, "stream_options": {"a": 1}, "min_tokens": 2, "max_completion_tokens": 9}"#,
];

/// Each text after each of these beginnings, which take turns.
fn after(texts: &[&str], beginnings: &[&[u8]]) -> Vec<Vec<u8>> {
    let both = |(at, text): (usize, &&str)| {
        [at, at + 1].map(|at| [beginnings[at % beginnings.len()], text.as_bytes()].concat())
    };
    texts.iter().enumerate().flat_map(both).collect()
}

fn bodies() -> Vec<Vec<u8>> {
    let beginnings: Vec<[u8; 2]> = (0..PATHS.len() as u8).map(|path| [path, 7 - path % 3]).collect();
    after(&BODIES, &beginnings.iter().map(|beginning| &beginning[..]).collect::<Vec<_>>())
}

const REPLIES: [&str; 6] = [
    "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\ndata: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\ndata: [DONE]\n\n",
    "{\"choices\":[{\"message\":{\"content\":\"a\"}}],\"usage\":{\"prompt_tokens\":5,\"total_tokens\":7,\"completion_tokens\":2,\"prompt_tokens_details\":null}}",
    "event: message_start\r\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":5,\"cache_read_input_tokens\":3}}}\r\n\r\nevent: message_delta\r\ndata: {\"usage\":{\"output_tokens\":9}}\r\n\r\n",
    "event: response.completed\ndata: {\"response\":{\"usage\":{\"input_tokens\":5,\"output_tokens\":2,\"input_tokens_details\":{\"cached_tokens\":1}}}}\n\n",
    "{\"text\":\"a\",\"meta_info\":{\"prompt_tokens\":5,\"completion_tokens\":2,\"cached_tokens\":3}}",
    ": comment\n\ndata: {\"error\":{\"message\":\"no\"},\"kv_transfer_params\":{\"remote_host\":\"a\"}}\n\n",
];

fn replies() -> Vec<Vec<u8>> {
    after(&REPLIES, &[&[0, 3, 1], &[1, 10, 0], &[3, 1, 1], &[2, 7, 1], &[4, 5, 0], &[5, 2, 1]])
}

const ENGINE_REPLIES: [&str; 6] = [
    r#"{"object": "list", "data": [{"id": "llama", "root": "/m", "parent": null, "max_model_len": 4096}, {"id": "sql", "parent": "llama"}]}"#,
    r#"{"0": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://0.0.0.0:5657", "topic": "kv"}, "1": {"endpoint": "ipc:///run/e"}}"#,
    r#"{"version": "0.5.23", "page_size": 64, "kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "kv", "block_size": 64, "dp_size": 2, "replay_endpoint_port_base": 5657}}"#,
    r#"{"version": "0.32.0"}"#,
    "# TYPE\nvllm:cache_config_info{block_size=\"16\",effective_attention_block_size=\"32\",enable_prefix_caching=\"True\",engine=\"0\"} 1.0\n",
    r#"{"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 8998, "dp_size": 1, "kv_events": null}"#,
];

const RENDERS: [&str; 5] = [
    r#"{"token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18], "features": {"mm_hashes": {"image": ["ab", "cd"]}, "mm_placeholders": {"image": [{"offset": 0, "length": 4}, {"offset": 8, "length": 9}]}}, "cache_salt": "s"}"#,
    r#"[{"token_ids": [1, 2]}, {"token_ids": [3]}]"#,
    r#"{"input_ids": [1, 2, 3]}"#,
    r#"{"tokens": [5, 6, 7], "count": 3, "max_model_len": 4096}"#,
    r#"{"token_ids": [1], "content_parts": [{}], "features": {"mm_hashes": {}, "mm_placeholders": {}}}"#,
];

fn watches() -> Vec<Vec<u8>> {
    let slice = r#"{"type": "ADDED", "object": {"kind": "EndpointSlice", "metadata": {"name": "vllm-1", "namespace": "s", "resourceVersion": "7"}, "addressType": "IPv4", "endpoints": [{"addresses": ["10.0.0.8"], "conditions": {"ready": true}, "targetRef": {"kind": "Pod", "name": "p", "namespace": "s", "uid": "u-1"}}], "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}]}}"#;
    let pod = r#"{"type": "MODIFIED", "object": {"metadata": {"name": "p", "namespace": "s", "uid": "u-1", "resourceVersion": "8"}, "status": {"phase": "Running", "podIP": "10.0.0.8", "conditions": [{"type": "Ready", "status": "True"}]}}}"#;
    let pool = r#"{"type": "ADDED", "object": {"metadata": {"name": "pool", "resourceVersion": "9"}, "spec": {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 8000}, {"number": 8001}]}}}"#;
    let bookmark =
        r#"{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "12", "creationTimestamp": null}}}"#;
    let gone =
        r#"{"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}}"#;
    let lines = |lines: &[&str]| [&[9][..], lines.join("\n").as_bytes(), b"\n"].concat();
    vec![lines(&[slice, bookmark]), lines(&[pool, pod, bookmark]), lines(&[slice, pod, pool]), lines(&[bookmark, gone])]
}

fn exchanges() -> Vec<Vec<u8>> {
    let subset = Value::texts(&["10.0.0.8:8000", "10.0.0.9"]);
    let key = "x-gateway-destination-endpoint-subset";
    let subset = with_metadata(opening(&CHAT, true), "envoy.lb.subset_hint", key, subset);
    // A message is as long as four times its step says; a field that nothing reads fills it up.
    let said = |message: &ProcessingRequest| {
        let mut bytes = message.encode_to_vec();
        let padding = (4 - (bytes.len() + 3) % 4) % 4;
        bytes.extend([0xfa, 0x7f, padding as u8]);
        bytes.resize(bytes.len() + padding, 0);
        assert!((12..=1020).contains(&bytes.len()) && bytes.len().is_multiple_of(4), "{} bytes", bytes.len());
        [vec![(bytes.len() / 4) as u8], bytes].concat()
    };
    let request = [said(&opening(&CHAT, false)), said(&request_body("{\"model\":\"m\"}", true))].concat();
    let response = [
        said(&response_headers(&[(":status", "200"), ("content-type", "text/event-stream")], false)),
        said(&response_body("data: 1\n\n", false)),
        said(&response_body("the end", true)),
        said(&with_attribute(response_trailers(), "upstream.address", "10.0.0.8:8000")),
    ]
    .concat();
    vec![
        [&request[..], &[0], &response].concat(),
        [&said(&opening(&CHAT, false))[..], &said(&request_trailers()), &[0], &response].concat(),
        [&said(&subset)[..], &[2]].concat(),
        [&request[..], &[1], &response].concat(),
        [&said(&opening(&CHAT, true))[..], &[0], &response[..20]].concat(),
        [&response[..], &request, &[0]].concat(),
    ]
}

fn templates() -> Vec<Vec<u8>> {
    let template = b"{{ bos_token }}{% for message in messages %}{% if loop.first and message.role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ message['role'] ~ ': ' ~ message['content'] | trim }}{% for call in message.tool_calls or [] %}{{ call | tojson(indent=2) }}{% endfor %}{% endfor %}{{ strftime_now('%Y-%m-%d') }}";
    let macros = b"{%- macro f(x, depth=0) -%}{%- if depth < 9 -%}{{ f(x, depth + 1) }}{%- else -%}{{ x }}{%- endif -%}{%- endmacro -%}{{ f(messages[0].content) }}{% set ns = namespace(n=0) %}{% for i in range(100) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}{{ 'ab'.upper().split('B') }}";
    let body = br#"{"model": "m", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "continue_final_message": true, "add_generation_prompt": false, "chat_template_kwargs": {"x": [1, 2.5e3]}}"#;
    let tools = br#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "a\ud83d\ude00"}]}], "tools": [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": null}}}], "documents": [{"text": "d"}], "reasoning_effort": "low"}"#;
    vec![
        [&[0][..], template].concat(),
        [&[0][..], macros].concat(),
        [&[1][..], body].concat(),
        [&[1][..], tools].concat(),
        [&[2][..], br#"{"prompt": ["a", "b"], "add_special_tokens": false}"#].concat(),
    ]
}

const LOG_LINES: [&str; 5] = [
    "id=4f6e failed=10.0.0.8:8000 failed=10.0.0.9:8000 status=200",
    "prefilled=4f6e worker=3/0",
    "<134>Nov 28 08:00:00 host haproxy[7]: \"id=abc, status=503\"",
    "id= prefilled=x status=2000",
    "nothing; id=\u{e9} failed=",
];

fn configurations() -> Vec<Vec<u8>> {
    let small =
        "[[engine]]\nurl = \"http://10.0.0.8:8000\"\nid = 7\nrole = \"prefill\"\n[bounds]\nbody_bytes_max = 1024\n";
    let listen =
        "listen.address = \"127.0.0.1:8080\"\nforward.worker_headers = true\n[kubernetes]\npool = \"ns/pool\"\n";
    let endpoints = "1=10.0.0.8:8000,8001\n2=[fd00::1]:80\n3=engine.example:8000\n";
    vec![example().into(), small.into(), listen.into(), endpoints.into()]
}
