//! The tokens that requests are routed by, against a real vLLM: every prompt is sent to the engine too, which answers
//! the token ids that it ran (`return_token_ids`) and how many of them it had cached.
//!
//! `KVROUTED_VLLM_URLS=http://127.0.0.1:8101 cargo test --test real_vllm -- --ignored`

use std::time::{Duration, Instant};

use bytes::Bytes;
use kvrouted_gateway::api::{ApiPath, PromptForm, RequestFacts, Usage};
use kvrouted_gateway::engines::{
    ClientTls, Dialect, Engine, EngineConfig, EngineSet, RenderPath, body_of, read_bounded,
};
use kvrouted_gateway::parity::{ParityOutcome, ParityWatch, Prediction};
use kvrouted_gateway::tokens::{PromptTokens, TokenSettings, TokenSource, Tokeniser};
use serde_json::{Value, json};
use std::sync::Arc;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

async fn engines() -> Arc<EngineSet> {
    let urls = std::env::var("KVROUTED_VLLM_URLS").expect("KVROUTED_VLLM_URLS names vLLM servers");
    let configs = urls.split(',').zip(1..).map(|(url, worker)| EngineConfig::new(worker, url)).collect();
    let set = EngineSet::of(configs, &ClientTls::default()).expect("good URLs");
    let failed = set.learn_all(soon()).await;
    assert!(failed.is_empty(), "{failed:?}");
    Arc::new(set)
}

async fn post(engine: &Engine, path: &str, body: &Value) -> Value {
    let request = hyper::Request::post(path).header("content-type", "application/json");
    let request = request.body(body_of(Bytes::from(body.to_string()))).expect("a request");
    let reply = engine.send(request, soon()).await.expect("a reply");
    let status = reply.status();
    let bytes = read_bounded(reply.into_body(), 1 << 24, soon()).await.expect("a body");
    let value: Value = serde_json::from_slice(&bytes).expect("JSON");
    assert!(status.is_success(), "{path} {status}: {value}");
    value
}

fn facts(prompt: PromptForm) -> RequestFacts {
    RequestFacts {
        model: None,
        stream: false,
        include_usage: false,
        prompt,
        cache_salt: None,
        lora_path: None,
        output_tokens_max: None,
        has_report_mode: false,
    }
}

async fn tokens(tokeniser: &Tokeniser, engines: &EngineSet, path: ApiPath, body: &Value) -> PromptTokens {
    let model = engines.model(body["model"].as_str()).expect("a model");
    let form = match serde_json::from_value::<Vec<u32>>(body["prompt"].clone()) {
        Ok(ids) => PromptForm::Tokens(ids),
        Err(_) => PromptForm::Text,
    };
    let body = Bytes::from(body.to_string());
    tokeniser.tokens(path, &facts(form), &model, &body, soon()).await
}

/// The token ids that the engine says it ran.
fn ran(reply: &Value) -> Vec<u32> {
    let ids = [&reply["prompt_token_ids"], &reply["choices"][0]["prompt_token_ids"]];
    let ids = ids.into_iter().find(|ids| ids.is_array()).expect("prompt_token_ids");
    serde_json::from_value(ids.clone()).expect("token ids")
}

fn bodies(model: &str) -> Vec<(ApiPath, &'static str, Value)> {
    let chat = |fields: Value| {
        let mut body = json!({"model": model, "max_tokens": 1, "temperature": 0,
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße, 世界! 🙂"}]});
        body.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
        (ApiPath::ChatCompletions, "/v1/chat/completions", body)
    };
    let completion = |fields: Value| {
        let mut body = json!({"model": model, "max_tokens": 1, "prompt": "Once upon a time"});
        body.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
        (ApiPath::Completions, "/v1/completions", body)
    };
    let parts =
        json!([{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]);
    let opened = json!([{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one, two"}]);
    vec![
        chat(json!({})),
        chat(json!({"seed": 5, "top_p": 0.5, "stop": ["x"], "user": "u", "logprobs": true, "top_logprobs": 1})),
        chat(json!({"messages": parts})),
        chat(json!({"messages": opened, "add_generation_prompt": false, "continue_final_message": true})),
        chat(json!({"add_special_tokens": true})),
        chat(json!({"chat_template_kwargs": {"enable_thinking": false}})),
        chat(json!({"truncate_prompt_tokens": 5})),
        chat(json!({"documents": [{"title": "t", "text": "x"}]})),
        chat(json!({"reasoning_effort": "low"})),
        completion(json!({})),
        completion(json!({"add_special_tokens": false})),
        completion(json!({"prompt": "Ein langer Satz. ".repeat(200)})),
        completion(json!({"prompt": [5, 6, 7, 8, 9]})),
        completion(json!({"prompt": [5, 6, 7, 8, 9], "truncate_prompt_tokens": 3})),
    ]
}

#[tokio::test]
#[ignore = "needs a vLLM server with --enable-scale-out, named by KVROUTED_VLLM_URLS"]
async fn the_engine_runs_the_very_tokens() {
    let engines = engines().await;
    let engine = &engines.get(1).expect("an engine");
    let model = engines.base_of(engine).expect("a base model");
    let rendering = Tokeniser::new(engines.clone(), TokenSettings::default());
    let without = TokenSettings { uses_renderer: false, ..TokenSettings::default() };
    let tokenising = Tokeniser::new(engines.clone(), without);
    let (mut rendered, mut tokenised) = (0, 0);
    for (path, at, body) in bodies(&model) {
        let mut asking = body.clone();
        asking["return_token_ids"] = json!(true);
        let expected = ran(&post(engine, at, &asking).await);
        let prompt = tokens(&rendering, &engines, path, &body).await;
        assert_eq!(prompt.tokens.as_deref(), Some(&expected[..]), "{body}: {prompt:?}");
        rendered += usize::from(prompt.source == TokenSource::Renderer);
        let prompt = tokens(&tokenising, &engines, path, &body).await;
        match prompt.tokens.as_deref() {
            Some(tokens) => assert_eq!(tokens, &expected[..], "{body}"),
            None => assert!(prompt.why_none.is_some(), "{body}"),
        }
        tokenised += usize::from(prompt.source == TokenSource::Tokenize);
    }
    assert_eq!((rendered, tokenised), (13, 9), "of the bodies above");
    assert_eq!((rendering.counts().failures, tokenising.counts().failures), (0, 0));
}

/// A prompt that nobody has sent before, sent twice: the second time the engine has all of its blocks.
#[tokio::test]
#[ignore = "needs a vLLM server with --enable-prompt-tokens-details, named by KVROUTED_VLLM_URLS"]
async fn cached_tokens_are_those_of_the_blocks_less_the_last_token() {
    let engines = engines().await;
    let engine = &engines.get(1).expect("an engine");
    let block_size = engine.facts().block_size.expect("a block size");
    let model = engines.base_of(engine).expect("a base model");
    let watch = ParityWatch::default();
    let nonce = std::time::UNIX_EPOCH.elapsed().expect("a time").subsec_nanos();
    for (prompt_tokens, expected) in [
        (2 * block_size, ParityOutcome::LastBlock),
        (2 * block_size + 1, ParityOutcome::Equal),
        (2 * block_size - 1, ParityOutcome::Equal),
        (block_size - 1, ParityOutcome::Equal),
    ] {
        let prompt: Vec<u32> = (0..prompt_tokens).map(|at| 5 + (nonce / 7 + at * at + prompt_tokens) % 200).collect();
        let body = json!({"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0});
        post(engine, "/v1/completions", &body).await;
        let usage = post(engine, "/v1/completions", &body).await["usage"].clone();
        let count = |value: &Value| value.as_u64().map(|count| count as u32);
        let usage = Usage {
            prompt_tokens: count(&usage["prompt_tokens"]).expect("prompt_tokens"),
            cached_tokens: count(&usage["prompt_tokens_details"]["cached_tokens"]),
            completion_tokens: 1,
        };
        let prediction = Prediction {
            worker: (1, 0),
            overlap_blocks: prompt_tokens / block_size,
            block_size,
            prompt_tokens,
            is_exact: true,
            source: TokenSource::Body,
        };
        assert_eq!(watch.observe(&model, &prediction, &usage), expected, "{prediction:?} {usage:?}");
    }
    assert!(watch.findings().is_empty());
}

#[tokio::test]
#[ignore = "needs a vLLM server with --enable-scale-out, named by KVROUTED_VLLM_URLS"]
async fn what_is_learnt_is_what_the_server_was_started_with() {
    let engines = engines().await;
    for engine in engines.iter() {
        let facts = engine.facts();
        assert_eq!(facts.dialect, Dialect::Vllm);
        assert!(facts.version.is_some() && facts.block_size.is_some() && !facts.models.is_empty(), "{facts:?}");
        assert!(
            facts.ranks.iter().all(|rank| rank.endpoint.as_deref().is_some_and(|it| !it.contains('*'))),
            "{facts:?}"
        );
        assert!(RenderPath::ALL.into_iter().all(|path| facts.renders.has(path)), "{facts:?}");
        assert_eq!(facts.problems, Vec::<String>::new());
    }
}

#[tokio::test]
#[ignore = "needs a vLLM server with --enable-scale-out, named by KVROUTED_VLLM_URLS"]
async fn responses_and_messages_are_rendered() {
    let engines = engines().await;
    let engine = &engines.get(1).expect("an engine");
    let model = engines.base_of(engine).expect("a base model");
    let tokeniser = Tokeniser::new(engines.clone(), TokenSettings::default());
    let input = json!({"model": model, "input": "Tell me a story.", "max_output_tokens": 16, "temperature": 0});
    let messages = json!({"model": model, "max_tokens": 16, "system": "Be brief.",
        "messages": [{"role": "user", "content": "Tell me a story."}]});
    for (path, at, body) in
        [(ApiPath::Responses, "/v1/responses", input), (ApiPath::Messages, "/v1/messages", messages)]
    {
        let prompt = tokens(&tokeniser, &engines, path, &body).await;
        assert_eq!(prompt.source, TokenSource::Renderer, "{prompt:?}");
        let usage = post(engine, at, &body).await["usage"].clone();
        let read = usage["cache_read_input_tokens"].as_u64().unwrap_or(0);
        let counted = usage["input_tokens"].as_u64().expect("input_tokens");
        let count = prompt.tokens.map_or(0, |tokens| tokens.len() as u64);
        assert!(count == counted || count == counted + read, "{path:?}: {count} tokens, and the engine says {usage}");
    }
}

/// A server without `--enable-scale-out` has no renderer, and `/tokenize` gives the same tokens for its adapter too.
#[tokio::test]
#[ignore = "needs a vLLM server without --enable-scale-out and with an adapter, named by KVROUTED_VLLM_URLS"]
async fn without_scale_out_tokenize_gives_the_very_tokens() {
    let engines = engines().await;
    let engine = &engines.get(1).expect("an engine");
    let facts = engine.facts();
    assert!(facts.renders.is_none(), "{facts:?}");
    assert!(matches!(facts.problems.as_slice(), [problem] if problem.contains("--enable-scale-out")), "{facts:?}");
    let adapter = facts.models.iter().find(|model| model.parent.is_some()).expect("an adapter");
    let served = engines.model(Some(&adapter.id)).expect("a model");
    assert_eq!((Some(served.base), served.lora), (engines.base_of(engine), Some(adapter.id.clone())));
    let tokeniser = Tokeniser::new(engines.clone(), TokenSettings::default());
    let mut tokenised = 0;
    for (path, at, body) in bodies(&adapter.id) {
        let prompt = tokens(&tokeniser, &engines, path, &body).await;
        let mut asking = body.clone();
        asking["return_token_ids"] = json!(true);
        let expected = ran(&post(engine, at, &asking).await);
        match prompt.tokens.as_deref() {
            Some(tokens) => assert_eq!(tokens, &expected[..], "{body}"),
            None => assert!(prompt.why_none.is_some(), "{body}"),
        }
        tokenised += usize::from(prompt.source == TokenSource::Tokenize);
    }
    assert_eq!((tokenised, tokeniser.counts().failures), (9, 0));
}
