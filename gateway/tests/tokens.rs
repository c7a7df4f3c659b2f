//! Prompts to tokens, against doubles of engines: the order of the sources, the cache, and what bad renderers do.

mod double;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use double::{Double, Reply, models, vllm};
use kvrouted_gateway::api::{ApiPath, PromptForm, RequestFacts, Usage};
use kvrouted_gateway::engines::{ClientTls, EngineConfig, EngineSet, ServedModel};
use kvrouted_gateway::tokens::{PromptTokens, TokenSettings, TokenSource, Tokeniser};

const CHAT_RENDER: &str = "/v1/chat/completions/render";
const CHAT: &str = r#"{"model": "m", "messages": [{"role": "user", "content": "a secret"}], "temperature": 0.5}"#;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

async fn engines(doubles: &[&Double]) -> Arc<EngineSet> {
    let configs = doubles.iter().zip(1..).map(|(double, worker)| EngineConfig::new(worker, &double.url)).collect();
    let set = EngineSet::of(configs, &ClientTls::default()).expect("good URLs");
    let failed = set.learn_all(soon()).await;
    assert!(failed.is_empty(), "{failed:?}");
    Arc::new(set)
}

async fn tokeniser(doubles: &[&Double]) -> Tokeniser {
    let settings = TokenSettings { timeout: Duration::from_secs(10), ..TokenSettings::default() };
    Tokeniser::new(engines(doubles).await, settings)
}

/// A vLLM server that learns with every renderer, and from then on renders a chat so.
async fn renderer(reply: Reply) -> (Double, Tokeniser) {
    let double = Double::start(vllm()).await;
    let tokeniser = tokeniser(&[&double]).await;
    double.set(CHAT_RENDER, reply);
    (double, tokeniser)
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

fn model(lora: Option<&str>) -> ServedModel {
    ServedModel { base: "m".into(), lora: lora.map(str::to_owned) }
}

async fn ask(tokeniser: &Tokeniser, path: ApiPath, prompt: PromptForm, body: &str) -> PromptTokens {
    let body = Bytes::copy_from_slice(body.as_bytes());
    tokeniser.tokens(path, &facts(prompt), &model(None), &body, soon()).await
}

async fn chat(tokeniser: &Tokeniser, body: &str) -> PromptTokens {
    ask(tokeniser, ApiPath::ChatCompletions, PromptForm::Text, body).await
}

#[track_caller]
fn assert_none(prompt: &PromptTokens, why: &str) {
    assert_eq!((prompt.source, &prompt.tokens, prompt.is_comparable), (TokenSource::None, &None, false), "{prompt:?}");
    let said = prompt.why_none.as_deref().expect("a reason");
    assert!(said.contains(why) && !said.contains("secret"), "{said}");
}

/// How often a path was asked with a body other than the probe's.
fn asked(double: &Double, path: &str) -> usize {
    double.asked(path).iter().filter(|asked| asked.body != "{}").count()
}

#[tokio::test]
async fn the_renderers_tokens_are_used_and_cached_by_exact_body() {
    let (double, tokeniser) =
        renderer(Reply::ok(r#"{"token_ids": [1, 2, 3], "features": null, "cache_salt": "s"}"#)).await;
    let prompt = chat(&tokeniser, CHAT).await;
    assert_eq!((prompt.source, prompt.tokens.as_deref()), (TokenSource::Renderer, Some(&[1, 2, 3][..])));
    assert_eq!((prompt.salt.as_deref(), prompt.why_none.as_deref(), prompt.is_comparable), (Some("s"), None, true));
    let body: serde_json::Value =
        serde_json::from_slice(&double.asked(CHAT_RENDER).last().expect("asked").body).expect("JSON");
    assert_eq!((&body["temperature"], &body["mm_payload"]), (&0.5.into(), &"none".into()));
    assert_eq!(chat(&tokeniser, CHAT).await, prompt);
    assert_eq!(asked(&double, CHAT_RENDER), 1);
    chat(&tokeniser, &CHAT.replace("0.5", "0.6")).await;
    assert_eq!(asked(&double, CHAT_RENDER), 2);
    let counts = tokeniser.counts();
    assert_eq!((counts.renderer, counts.cache_hits, counts.cache_misses), (3, 1, 2));
    assert!(counts.cache_bytes > 0);
}

#[tokio::test]
async fn token_ids_in_the_body_need_no_engine() {
    let (double, tokeniser) = renderer(Reply::Hang).await;
    let ids = || PromptForm::Tokens(vec![5, 6]);
    let prompt = ask(&tokeniser, ApiPath::Completions, ids(), r#"{"prompt": [5, 6]}"#).await;
    assert_eq!((prompt.source, prompt.tokens.as_deref()), (TokenSource::Body, Some(&[5, 6][..])));
    assert!(prompt.is_comparable);
    let echo = ask(&tokeniser, ApiPath::Completions, ids(), r#"{"prompt": [5, 6], "prompt_logprobs": 1}"#).await;
    assert!(!echo.is_comparable, "the engine does not look such a prompt up in its cache");
    let batch = PromptForm::Batch { prompts: 2, first_tokens: Some(vec![5]) };
    let prompt = ask(&tokeniser, ApiPath::Completions, batch, r#"{"prompt": [[5], [6]]}"#).await;
    assert_eq!((prompt.tokens.as_deref(), prompt.is_comparable), (Some(&[5][..]), false));
    let prompt = ask(&tokeniser, ApiPath::SglangGenerate, ids(), r#"{"input_ids": [5, 6], "image_data": "x"}"#).await;
    assert_none(&prompt, "image_data");
    assert_none(&ask(&tokeniser, ApiPath::Completions, PromptForm::Tokens(vec![]), "{}").await, "empty");
    let paths = [CHAT_RENDER, "/v1/completions/render", "/tokenize"];
    assert_eq!(paths.into_iter().map(|path| asked(&double, path)).sum::<usize>(), 0);
}

#[tokio::test]
async fn ids_that_other_fields_change_go_to_the_renderer() {
    let (double, tokeniser) = renderer(Reply::Hang).await;
    double.set("/v1/completions/render", Reply::ok(r#"[{"token_ids": [6]}]"#));
    let body = r#"{"prompt": [5, 6], "truncate_prompt_tokens": 1}"#;
    let prompt = ask(&tokeniser, ApiPath::Completions, PromptForm::Tokens(vec![5, 6]), body).await;
    assert_eq!((prompt.source, prompt.tokens.as_deref()), (TokenSource::Renderer, Some(&[6][..])));
}

#[tokio::test]
async fn vllms_own_generate_has_tokens_and_media() {
    let (_double, tokeniser) = renderer(Reply::Hang).await;
    let ids: Vec<u32> = (0..48).collect();
    let features =
        r#"{"mm_hashes": {"image": ["uuid-A"]}, "mm_placeholders": {"image": [{"offset": 20, "length": 15}]}}"#;
    let body = format!(r#"{{"token_ids": {ids:?}, "sampling_params": {{}}, "features": {features}}}"#);
    let prompt = ask(&tokeniser, ApiPath::VllmGenerate, PromptForm::Tokens(ids.clone()), &body).await;
    let hash = 654_580_061_887_968_210;
    assert_eq!((prompt.source, prompt.media), (TokenSource::Body, vec![(1, hash), (2, hash)]));
    let raw = r#"{"token_ids": [1], "sampling_params": {}, "content_parts": [{"type": "image_url"}]}"#;
    let prompt = ask(&tokeniser, ApiPath::VllmGenerate, PromptForm::Tokens(vec![1]), raw).await;
    assert_none(&prompt, "not rendered");
}

#[tokio::test]
async fn media_are_named_as_the_engines_events_name_them_or_not_at_all() {
    let ids: Vec<u32> = (0..40).collect();
    let features =
        r#"{"mm_hashes": {"image": ["uuid-A"]}, "mm_placeholders": {"image": [{"offset": 18, "length": 4}]}}"#;
    let reply = Reply::ok(format!(r#"{{"token_ids": {ids:?}, "features": {features}}}"#));
    let (double, tokeniser) = renderer(reply.clone()).await;
    let prompt = chat(&tokeniser, CHAT).await;
    assert_eq!((prompt.media.as_slice(), prompt.is_comparable), (&[(1, 654_580_061_887_968_210)][..], true));
    // An adapter may change the name, so only the tokens before the object are used.
    double.set("/v1/models", Reply::ok(models("vllm", &["m"], &["sql"])));
    let body = Bytes::from_static(CHAT.as_bytes());
    double.set(CHAT_RENDER, Reply::Json(400, "{}".into()));
    let engines = engines(&[&double]).await;
    double.set(CHAT_RENDER, reply);
    let tokeniser = Tokeniser::new(engines, TokenSettings::default());
    let text = facts(PromptForm::Text);
    let prompt = tokeniser.tokens(ApiPath::ChatCompletions, &text, &model(Some("sql")), &body, soon()).await;
    assert_eq!((prompt.tokens.as_deref(), prompt.source), (Some(&ids[..18]), TokenSource::Renderer));
    assert_eq!((prompt.media.len(), prompt.is_comparable), (0, false));
    assert!(prompt.why_none.is_some_and(|why| why.contains("before the first multimodal object")));
}

#[tokio::test]
async fn without_a_renderer_tokenize_gets_the_fields_of_the_prompt() {
    let double = Double::start(vllm()).await;
    for path in [CHAT_RENDER, "/v1/completions/render"] {
        double.set(path, Reply::Json(403, "{}".into()));
    }
    double.set("/tokenize", Reply::ok(r#"{"tokens": [7, 8], "count": 2, "max_model_len": 4096}"#));
    let tokeniser = tokeniser(&[&double]).await;
    let prompt = chat(&tokeniser, CHAT).await;
    assert_eq!((prompt.source, prompt.tokens.as_deref()), (TokenSource::Tokenize, Some(&[7, 8][..])));
    let body: serde_json::Value = serde_json::from_slice(&double.asked("/tokenize")[0].body).expect("JSON");
    let expected = serde_json::json!({"model": "m", "messages": [{"role": "user", "content": "a secret"}]});
    assert_eq!(body, expected);
    assert_eq!(asked(&double, CHAT_RENDER), 0);
    let changed = CHAT.replace("temperature\": 0.5", "documents\": [{\"text\": \"a\"}]");
    assert_none(&chat(&tokeniser, &changed).await, "documents");
    assert_eq!(asked(&double, "/tokenize"), 1);
    double.set("/v1/responses/render", Reply::Json(403, "{}".into()));
    let prompt = ask(&tokeniser, ApiPath::Responses, PromptForm::Text, r#"{"input": "secret"}"#).await;
    assert_none(&prompt, "has no /tokenize");
}

#[tokio::test]
async fn tokenize_is_suspended_when_the_engine_counts_other_tokens() {
    let double = Double::start(vllm()).await;
    double.set(CHAT_RENDER, Reply::Json(403, "{}".into()));
    double.set("/tokenize", Reply::ok(r#"{"tokens": [7, 8]}"#));
    let tokeniser = tokeniser(&[&double]).await;
    let prompt = chat(&tokeniser, CHAT).await;
    let now = Instant::now();
    let usage = |prompt_tokens| Usage { prompt_tokens, cached_tokens: None, completion_tokens: 1 };
    tokeniser.observe(ApiPath::ChatCompletions, &model(None), &prompt, &usage(2), now);
    assert_eq!(chat(&tokeniser, CHAT).await.source, TokenSource::Tokenize);
    tokeniser.observe(ApiPath::ChatCompletions, &model(None), &prompt, &usage(5), now);
    assert_none(&chat(&tokeniser, CHAT).await, "counted other tokens");
    let completion = ask(&tokeniser, ApiPath::Completions, PromptForm::Text, r#"{"prompt": "x"}"#).await;
    assert_none(&completion, "refuses");
    assert_eq!(asked(&double, "/tokenize"), 1);
}

#[tokio::test]
async fn a_renderer_that_hangs_costs_one_wait() {
    let double = Double::start(vllm()).await;
    double.set("/tokenize", Reply::Hang);
    let engines = engines(&[&double]).await;
    double.set(CHAT_RENDER, Reply::Hang);
    let settings = TokenSettings { timeout: Duration::from_millis(100), ..TokenSettings::default() };
    let tokeniser = Tokeniser::new(engines.clone(), settings);
    assert_none(&chat(&tokeniser, CHAT).await, "deadline");
    assert_none(&chat(&tokeniser, CHAT).await, "failed lately");
    assert_eq!((asked(&double, CHAT_RENDER), asked(&double, "/tokenize")), (1, 0));
    assert!(engines.get(1).expect("engine 1").is_usable(Instant::now()), "the engine still generates");
    double.set(CHAT_RENDER, Reply::ok(r#"{"token_ids": [1]}"#));
    let prompt = loop {
        let prompt = chat(&tokeniser, CHAT).await;
        if prompt.source != TokenSource::None {
            break prompt;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert_eq!(prompt.source, TokenSource::Renderer);
}

#[tokio::test]
async fn a_callers_deadline_ends_its_wait_alone() {
    let (double, tokeniser) = renderer(Reply::Slow(Duration::from_millis(300), r#"{"token_ids": [1]}"#.into())).await;
    let body = Bytes::from_static(CHAT.as_bytes());
    let text = facts(PromptForm::Text);
    let impatient = tokeniser.tokens(ApiPath::ChatCompletions, &text, &model(None), &body, Instant::now()).await;
    assert_none(&impatient, "deadline");
    assert_eq!(chat(&tokeniser, CHAT).await.source, TokenSource::Renderer);
    assert_eq!(asked(&double, CHAT_RENDER), 1, "the second caller found the first one's rendering");
}

#[tokio::test]
async fn callers_with_one_body_share_one_rendering() {
    let (double, tokeniser) = renderer(Reply::Slow(Duration::from_millis(200), r#"{"token_ids": [1]}"#.into())).await;
    let callers: Vec<_> = (0..20)
        .map(|_| {
            let tokeniser = tokeniser.clone();
            tokio::spawn(async move { chat(&tokeniser, CHAT).await })
        })
        .collect();
    callers[0].abort();
    for caller in callers.into_iter().skip(1) {
        assert_eq!(caller.await.expect("no panic").source, TokenSource::Renderer);
    }
    assert_eq!(asked(&double, CHAT_RENDER), 1);
}

#[tokio::test]
async fn nonsense_of_a_renderer_is_not_routed_by() {
    for reply in [
        Reply::ok("secret"),
        Reply::ok("{}"),
        Reply::ok(r#"{"token_ids": "secret"}"#),
        Reply::ok(r#"{"token_ids": [-1]}"#),
        Reply::Json(500, "secret".into()),
        Reply::Json(429, "secret".into()),
        Reply::Redirect("http://127.0.0.1:1/".into()),
        Reply::Endless,
        Reply::Long(1 << 40),
        Reply::Cut,
    ] {
        let (double, tokeniser) = renderer(reply.clone()).await;
        let prompt = chat(&tokeniser, CHAT).await;
        assert_eq!(prompt.source, TokenSource::None, "{reply:?}");
        assert!(prompt.why_none.is_some_and(|why| !why.contains("secret")), "{reply:?}");
        assert_none(&chat(&tokeniser, CHAT).await, "failed lately");
        assert_eq!((asked(&double, CHAT_RENDER), tokeniser.counts().failures), (1, 1), "{reply:?}");
    }
}

#[tokio::test]
async fn another_engine_renders_when_one_fails() {
    let good = Double::start(vllm()).await;
    let bad = Double::start(vllm()).await;
    let tokeniser = tokeniser(&[&bad, &good]).await;
    bad.set(CHAT_RENDER, Reply::ok("nonsense"));
    good.set(CHAT_RENDER, Reply::ok(r#"{"token_ids": [4]}"#));
    for temperature in 0..4 {
        let body = CHAT.replace("0.5", &temperature.to_string());
        assert_eq!(chat(&tokeniser, &body).await.tokens.as_deref(), Some(&[4][..]));
    }
    assert_eq!((asked(&bad, CHAT_RENDER), asked(&good, CHAT_RENDER)), (1, 4));
}

#[tokio::test]
async fn a_body_that_the_engine_refuses_is_no_failure_of_the_renderer() {
    let (double, tokeniser) =
        renderer(Reply::Json(400, r#"{"error": {"message": "a secret is too long"}}"#.into())).await;
    assert_none(&chat(&tokeniser, CHAT).await, "refuses the body");
    double.set(CHAT_RENDER, Reply::ok(r#"{"token_ids": [1]}"#));
    assert_eq!(chat(&tokeniser, CHAT).await.source, TokenSource::Renderer);
    assert_eq!(tokeniser.counts().failures, 0);
}

#[tokio::test]
async fn a_server_that_only_renders_is_asked_first() {
    let engine = Double::start(vllm()).await;
    let only_renders = Double::start(vllm()).await;
    let renderers = engines(&[&only_renders]).await;
    let set = engines(&[&engine]).await;
    only_renders.set(CHAT_RENDER, Reply::ok(r#"{"token_ids": [9]}"#));
    engine.set(CHAT_RENDER, Reply::ok(r#"{"token_ids": [8]}"#));
    let tokeniser = Tokeniser::new(set, TokenSettings { renderers: Some(renderers), ..TokenSettings::default() });
    assert_eq!(chat(&tokeniser, CHAT).await.tokens.as_deref(), Some(&[9][..]));
    only_renders.set(CHAT_RENDER, Reply::Cut);
    let other = CHAT.replace("0.5", "0.7");
    assert_eq!(chat(&tokeniser, &other).await.tokens.as_deref(), Some(&[8][..]));
}

#[tokio::test]
async fn a_path_without_a_prompt_has_no_tokens() {
    let (_double, tokeniser) = renderer(Reply::Hang).await;
    let prompt = ask(&tokeniser, ApiPath::Embeddings, PromptForm::Text, r#"{"input": "secret"}"#).await;
    assert_none(&prompt, "no renderer");
    let salted = RequestFacts { cache_salt: Some("s".into()), ..facts(PromptForm::Text) };
    let body = Bytes::from_static(b"{}");
    let prompt = tokeniser.tokens(ApiPath::Embeddings, &salted, &model(None), &body, soon()).await;
    assert_eq!(prompt.salt.as_deref(), Some("s"));
}
