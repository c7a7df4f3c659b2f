//! The local tokenizer: its proof against doubles of engines, and its tokens against vLLM's own handlers in Python.

mod double;
mod kit;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use double::{Double, Reply, models, vllm};
use kvrouted_gateway::api::{ApiPath, PromptForm, RequestFacts, Usage};
use kvrouted_gateway::config::{self, Flags};
use kvrouted_gateway::demo::SimulatedEngines;
use kvrouted_gateway::engines::{ClientTls, EngineConfig, EngineSet, ServedModel};
use kvrouted_gateway::proxy::Choose as _;
use kvrouted_gateway::serve::{Core, CoreOptions, Routed};
use kvrouted_gateway::tokens::{
    LocalCounts, LocalFolder, LocalTokenizers, PromptTokens, TokenSettings, TokenSource, Tokeniser,
};
use serde_json::{Value, json};
use tempfile::TempDir;

const CHAT_RENDER: &str = "/v1/chat/completions/render";
const COMPLETION_RENDER: &str = "/v1/completions/render";
/// Equal prompts in a row that prove a tokenizer (`LOCAL_PROOF_PROMPTS`).
const PROOF: u64 = 200;
const PATIENCE: Duration = Duration::from_secs(120);

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

fn model() -> ServedModel {
    ServedModel { base: "m".into(), lora: None }
}

/// A tokenizer whose tokens are words: `w0` is 1, `w1` is 2, and so on.
fn words_folder(template: &str) -> TempDir {
    let vocab: serde_json::Map<String, Value> =
        std::iter::once(("?".to_owned(), json!(0))).chain((0..5000).map(|n| (format!("w{n}"), json!(n + 1)))).collect();
    let tokenizer = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "?"}});
    folder_of(&tokenizer.to_string(), &json!({"chat_template": template}).to_string())
}

fn folder_of(tokenizer: &str, config: &str) -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer).expect("written");
    std::fs::write(folder.path().join("tokenizer_config.json"), config).expect("written");
    folder
}

/// An engine's double, and a tokeniser in front of it that has a local tokenizer.
struct World {
    double: Double,
    tokeniser: Tokeniser,
    /// The number of the next prompt.
    next: u32,
    _folder: TempDir,
}

impl World {
    async fn new(replies: Vec<(&'static str, Reply)>, prefer: bool) -> Self {
        let folder = words_folder("{% for m in messages %}{{ m.content }} {% endfor %}");
        let double = Double::start(replies).await;
        let tokeniser = tokeniser(&double, folder.path(), prefer).await;
        Self { double, tokeniser, next: 0, _folder: folder }
    }

    fn counts(&self) -> LocalCounts {
        self.tokeniser.local().expect("a local tokenizer").counts()
    }

    /// A new prompt, and its tokens.
    fn prompt(&mut self) -> (String, Vec<u32>) {
        let first = self.next;
        self.next += 1;
        let body = json!({"model": "m", "messages": [{"role": "user", "content": format!("w{first} w7")}]});
        (body.to_string(), vec![first + 1, 8])
    }

    /// Has the engine render a new prompt, and waits for the comparison if it is its turn.
    async fn rendered(&mut self, ids: impl Fn(&[u32]) -> Vec<u32>) {
        let (body, expected) = self.prompt();
        self.double.set(CHAT_RENDER, Reply::ok(json!({"token_ids": ids(&expected)}).to_string()));
        let prompt = ask(&self.tokeniser, ApiPath::ChatCompletions, &body).await;
        assert_ne!(prompt.source, TokenSource::None, "{prompt:?}");
        until(|| self.tokeniser.local().is_some_and(LocalTokenizers::is_idle)).await;
    }

    async fn equal(&mut self, count: u64) {
        for _ in 0..count {
            self.rendered(<[u32]>::to_vec).await;
        }
    }

    /// The tokens of a new prompt while no engine renders.
    async fn without_engine(&mut self) -> (PromptTokens, Vec<u32>) {
        self.double.set(CHAT_RENDER, Reply::Json(404, "{}".into()));
        let (body, expected) = self.prompt();
        (ask(&self.tokeniser, ApiPath::ChatCompletions, &body).await, expected)
    }

    fn findings(&self) -> Vec<String> {
        let local = self.tokeniser.local().expect("a local tokenizer");
        local.findings().into_iter().map(|finding| format!("{} {}", finding.what, finding.remedy)).collect()
    }
}

async fn tokeniser(double: &Double, folder: &Path, prefer: bool) -> Tokeniser {
    let set = EngineSet::of(vec![EngineConfig::new(1, &double.url)], &ClientTls::default()).expect("good URLs");
    let failed = set.learn_all(soon()).await;
    assert!(failed.is_empty(), "{failed:?}");
    let folder = LocalFolder { model: "m".into(), folder: folder.to_owned(), prefer };
    let local = Some(LocalTokenizers::load(&[folder]).expect("a good folder"));
    let settings = TokenSettings { timeout: PATIENCE, local, ..TokenSettings::default() };
    Tokeniser::new(Arc::new(set), settings)
}

async fn until(mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn ask(tokeniser: &Tokeniser, path: ApiPath, body: &str) -> PromptTokens {
    ask_for(tokeniser, &model(), path, body).await
}

async fn ask_for(tokeniser: &Tokeniser, model: &ServedModel, path: ApiPath, body: &str) -> PromptTokens {
    let facts = RequestFacts {
        model: None,
        stream: false,
        include_usage: false,
        prompt: PromptForm::Text,
        cache_salt: None,
        lora_path: None,
        output_tokens_max: None,
        has_report_mode: false,
    };
    tokeniser.tokens(path, &facts, model, &Bytes::copy_from_slice(body.as_bytes()), soon()).await
}

#[tokio::test]
async fn local_tokens_are_used_only_while_they_are_proved() {
    let mut world = World::new(vllm(), false).await;
    // One prompt too few proves nothing.
    world.equal(PROOF - 1).await;
    assert_eq!((world.counts().equal, world.counts().proved), (PROOF - 1, 0));
    assert_eq!(world.without_engine().await.0.source, TokenSource::None);
    // Neither does a prompt that was compared before.
    let (body, ids) = (r#"{"messages": [{"role": "user", "content": "w0 w7"}], "seed": 5}"#, "[1, 8]");
    world.double.set(CHAT_RENDER, Reply::ok(format!(r#"{{"token_ids": {ids}}}"#)));
    ask(&world.tokeniser, ApiPath::ChatCompletions, body).await;
    until(|| world.counts().equal == PROOF).await;
    assert_eq!(world.counts().proved, 0);
    world.equal(1).await;
    assert_eq!((world.counts().proved, world.findings().len()), (1, 0));
    let (prompt, expected) = world.without_engine().await;
    assert_eq!((prompt.source, prompt.tokens.as_deref()), (TokenSource::Local, Some(&expected[..])));
    assert!(prompt.is_comparable && world.tokeniser.counts().local == 1);
    // A body whose rules are not followed stays without tokens, and another path has its own proof.
    let body = r#"{"messages": [{"role": "user", "content": "a secret"}], "truncate_prompt_tokens": 1}"#;
    let prompt = ask(&world.tokeniser, ApiPath::ChatCompletions, body).await;
    assert!(prompt.source == TokenSource::None && prompt.why_none.is_some_and(|why| why.contains("truncate_prompt")));
    world.double.set(COMPLETION_RENDER, Reply::Json(404, "{}".into()));
    let prompt = ask(&world.tokeniser, ApiPath::Completions, r#"{"prompt": "w1"}"#).await;
    assert_eq!(prompt.source, TokenSource::None);
    // A share is compared as long as the proof holds, and one difference ends it, also for what is cached.
    let (cached, _) = world.without_engine().await;
    assert_eq!(cached.source, TokenSource::Local);
    let cached = json!({"model": "m", "messages": [{"role": "user", "content": format!("w{} w7", world.next - 1)}]});
    let before = world.counts();
    while world.counts().different == 0 {
        world.rendered(|ids| [ids, &[9]].concat()).await;
    }
    assert_eq!((world.counts().equal, world.counts().proved, world.counts().disproved), (before.equal, 0, 1));
    world.double.set(CHAT_RENDER, Reply::Json(404, "{}".into()));
    let prompt = ask(&world.tokeniser, ApiPath::ChatCompletions, &cached.to_string()).await;
    assert_eq!(prompt.source, TokenSource::None);
    let findings = world.findings();
    assert!(findings.len() == 1 && findings[0].contains("chat template"), "{findings:?}");
    // It is proved again after as many prompts as at first, one in five being compared now.
    world.equal(5 * (PROOF - 1)).await;
    assert_eq!(world.counts().proved, 0);
    world.equal(10).await;
    assert_eq!((world.counts().proved, world.findings().len()), (1, 0));
    // The engine's own count disproves it too.
    let (prompt, expected) = world.without_engine().await;
    assert_eq!(prompt.source, TokenSource::Local);
    let usage = |prompt_tokens| Usage { prompt_tokens, cached_tokens: None, completion_tokens: 1 };
    let observe = |tokens: usize| {
        let usage = usage(tokens as u32);
        world.tokeniser.observe(ApiPath::ChatCompletions, &model(), &prompt, &usage, Instant::now());
    };
    observe(expected.len());
    assert_eq!(world.counts().proved, 1);
    observe(expected.len() + 1);
    assert_eq!((world.counts().proved, world.counts().disproved), (0, 1));
}

#[tokio::test]
async fn preferred_local_tokens_spare_the_engine_most_prompts() {
    let mut world = World::new(vllm(), true).await;
    world.equal(PROOF).await;
    assert_eq!(world.counts().proved, 1);
    let asked = |world: &World| world.double.asked(CHAT_RENDER).len();
    let (before, compared) = (asked(&world), world.counts().equal);
    world.equal(500).await;
    let more = asked(&world) - before;
    assert!((9..=11).contains(&more), "{more} of 500 prompts went to the engine");
    assert_eq!(world.counts().equal - compared, more as u64);
    assert!(world.tokeniser.counts().local >= 489);
    // A renderer that refuses is believed for the prompts that it gets, and a difference ends the preference.
    while world.counts().different == 0 {
        world.rendered(|ids| [&[9], ids].concat()).await;
    }
    let before = asked(&world);
    world.equal(3).await;
    assert_eq!(asked(&world), before + 3);
}

#[tokio::test]
async fn tokenize_proves_it_too_and_takes_the_proof_with_it() {
    let mut world = World::new(vllm(), false).await;
    world.double.set(CHAT_RENDER, Reply::Json(404, "{}".into()));
    for _ in 0..PROOF {
        let (body, ids) = world.prompt();
        world.double.set("/tokenize", Reply::ok(json!({"tokens": ids}).to_string()));
        let prompt = ask(&world.tokeniser, ApiPath::ChatCompletions, &body).await;
        assert_eq!(prompt.source, TokenSource::Tokenize);
        until(|| world.tokeniser.local().is_some_and(LocalTokenizers::is_idle)).await;
    }
    assert_eq!(world.counts().proved, 1);
    // Equal once more, so that only the count of the engine's answer says otherwise.
    let (body, ids) = world.prompt();
    world.double.set("/tokenize", Reply::ok(json!({"tokens": ids}).to_string()));
    let prompt = ask(&world.tokeniser, ApiPath::ChatCompletions, &body).await;
    until(|| world.tokeniser.local().is_some_and(LocalTokenizers::is_idle)).await;
    let usage = Usage { prompt_tokens: 99, cached_tokens: None, completion_tokens: 1 };
    world.tokeniser.observe(ApiPath::ChatCompletions, &model(), &prompt, &usage, Instant::now());
    assert_eq!(world.without_engine().await.0.source, TokenSource::None);
    let findings = world.findings();
    assert!(findings[0].contains("/tokenize of the engine gives other tokens"), "{findings:?}");
}

#[tokio::test]
async fn a_body_that_the_engine_refuses_is_not_tokenised() {
    let mut world = World::new(vllm(), false).await;
    world.equal(PROOF).await;
    let (body, _) = world.prompt();
    world.double.set(CHAT_RENDER, Reply::Json(400, "{}".into()));
    assert_eq!(ask(&world.tokeniser, ApiPath::ChatCompletions, &body).await.source, TokenSource::None);
    // An engine that fails is another matter.
    world.double.set(CHAT_RENDER, Reply::Json(500, "{}".into()));
    assert_eq!(ask(&world.tokeniser, ApiPath::ChatCompletions, &body).await.source, TokenSource::Local);
}

#[tokio::test]
async fn sglangs_prompts_are_not_compared() {
    // `/server_info` and `/v1/models` of SGLang 0.5.16, srt/entrypoints/http_server.py.
    let replies = vec![
        ("/v1/models", Reply::ok(models("sglang", &["m"], &[]))),
        ("/server_info", Reply::ok(r#"{"version": "0.5.16", "page_size": 16, "dp_size": 1}"#)),
        ("/tokenize", Reply::ok(r#"{"tokens": [1, 8]}"#)),
    ];
    let mut world = World::new(replies, false).await;
    let (body, _) = world.prompt();
    assert_eq!(ask(&world.tokeniser, ApiPath::ChatCompletions, &body).await.source, TokenSource::Tokenize);
    until(|| world.tokeniser.local().is_some_and(LocalTokenizers::is_idle)).await;
    assert_eq!(world.counts(), LocalCounts::default());
}

#[test]
fn a_folder_that_cannot_be_used_is_named() {
    let folder = folder_of("{}", "{}");
    let error =
        LocalTokenizers::load(&[LocalFolder { model: "m".into(), folder: folder.path().to_owned(), prefer: false }]);
    let error = error.expect_err("no tokenizer");
    assert!(error.contains(&folder.path().display().to_string()) && error.contains("tokenizer.json"), "{error}");
}

/// The tokenizer of the simulated engines (`demo/tokenizer.rs`): a token for each byte, and for each mark of a chat.
fn bytes_folder() -> TempDir {
    // GPT-2's alphabet: a printable byte stands for itself, each other one for the next character from 256 on.
    let is_itself = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut others = 256..;
    let vocab = (0..=255_u8).map(|byte| {
        let char = if is_itself(byte) { u32::from(byte) } else { others.next().expect("without end") };
        (char::from_u32(char).expect("a character").to_string(), json!(byte))
    });
    let vocab: serde_json::Map<String, Value> = vocab.collect();
    let marks = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"];
    let added: Vec<Value> = marks
        .iter()
        .zip(256..)
        .map(|(mark, id)| {
            json!({"id": id, "content": mark,
        "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true})
        })
        .collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let tokenizer = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []}});
    let template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}\
        {% if add_generation_prompt %}<|assistant|>{% endif %}";
    folder_of(&tokenizer.to_string(), &json!({"chat_template": template}).to_string())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_configured_folder_is_proved_by_the_engines_and_replaces_them() {
    let Some(kvrouted) = kit::kvrouted_or_skip("a local tokenizer beside simulated engines") else { return };
    let engines = SimulatedEngines::start(&kvrouted, 1).await.expect("an engine");
    let folder = bytes_folder();
    let file = folder.path().join("gateway.toml");
    let table = format!("[[tokens.local]]\nmodel = \"demo\"\nfolder = {:?}\n", folder.path().display().to_string());
    std::fs::write(&file, table).expect("written");
    let flags =
        Flags { engines: engines.urls(), program: Some(kvrouted), admin: Some(String::new()), ..Flags::default() };
    let config = config::load(Some(&file), &flags).expect("a good configuration");
    let (_stop, stopping) = tokio::sync::watch::channel(false);
    let core = Core::start(CoreOptions::of(&config).expect("good files"), stopping).await.expect("a core");
    let core = Arc::new(core);
    let model = ServedModel { base: "demo".into(), lora: None };
    let chat_body = |number: u64| {
        let content = format!("Grüße {number}: end 世界");
        json!({"model": "demo", "messages": [{"role": "user", "content": content}]}).to_string()
    };
    for number in 0..PROOF {
        let prompt = ask_for(core.tokeniser(), &model, ApiPath::ChatCompletions, &chat_body(number)).await;
        assert_eq!(prompt.source, TokenSource::Renderer, "{prompt:?}");
        until(|| core.tokeniser().local().is_some_and(LocalTokenizers::is_idle)).await;
    }
    let routed = Routed::new(Arc::clone(&core));
    let metrics = routed.metrics();
    assert!(metrics.contains("kvrouted_gateway_local_proofs{state=\"proved\"} 1"), "{metrics}");
    assert!(kit::compare_metrics(&metrics).contains("kvrouted_gateway_local_tokens"));
    drop(engines);
    let begun = Instant::now();
    let mut number = PROOF;
    let prompt = loop {
        let prompt = ask_for(core.tokeniser(), &model, ApiPath::ChatCompletions, &chat_body(number)).await;
        // An engine may answer until its process has ended, and what it answered is kept: the next question is another.
        if prompt.source != TokenSource::Renderer || begun.elapsed() > PATIENCE {
            break prompt;
        }
        number += 1;
    };
    let text = format!("Grüße {number}: end 世界");
    let bytes = text.bytes().map(u32::from);
    let expected: Vec<u32> = std::iter::once(257).chain(bytes).chain([260, 258]).collect();
    assert_eq!((prompt.source, prompt.tokens.as_deref()), (TokenSource::Local, Some(&expected[..])));
    core.stop().await;
}

/// Python with vLLM, and the folder of the tiny model, or a line that `scripts/test` lists at its end.
fn python_and_model() -> Option<(PathBuf, PathBuf)> {
    let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    let cache =
        std::env::var_os("KVROUTED_ENGINES").map_or_else(|| home.join(".cache/kvrouted-engines"), PathBuf::from);
    let found = (cache.join("cpu-venv/bin/python"), cache.join("models/tiny"));
    if found.0.exists() && found.1.join("tokenizer.json").exists() {
        return Some(found);
    }
    let why = "vLLM for CPU and its tiny model are not installed";
    let line = format!("\nskipped: local tokens against vLLM: {why}\n");
    std::io::stderr().lock().write_all(line.as_bytes()).expect("said");
    None
}

/// Takes texts, as most templates do, with much of what real ones use.
const TEXT_TEMPLATE: &str = r#"{%- set ns = namespace(turns=0, last=-1) -%}
{{- bos_token }}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- if tools %}
    {{- "<|system|>\n# Tools\n" }}
    {%- for tool in tools %}
        {{- "\n" ~ tool | tojson }}
        {{- "\n" ~ (tool.function.parameters | tojson(indent=4)) }}
    {%- endfor %}
    {{- "\n" }}
{%- endif %}
{%- for document in documents or [] %}{{ document['title'] ~ ': ' ~ document.text }}
{% endfor -%}
{%- if style is defined and style is not none %}{{ style }} {{ style | tojson(sort_keys=true) }}{% endif -%}
{%- for message in messages %}
    {%- set body = message.content.strip() if message.role != 'tool' else message.content -%}
    {%- if message.role == 'assistant' and message.reasoning_content is defined and loop.index0 > ns.last %}
        {{- '<think>' + message.reasoning_content.split('</think>')[0].lstrip('\n') + '</think>' }}
    {%- endif %}
    {%- generation %}
    {{- '<|' + message['role'] + '|>' + (' ' + message.name if message.name is string else '') + '\n' }}
    {{- body }}
    {%- endgeneration %}
    {%- for call in message.tool_calls or [] %}
        {%- set function = call.function %}
        {{- '\n{"name": "' ~ function.name ~ '", "arguments": ' ~ (function.arguments | tojson) ~ '}' }}
        {%- for key, value in function.arguments | items %}{{ '\n' ~ key ~ '=' ~ (value if value is string or value is number else value | tojson) }}{% endfor %}
    {%- endfor %}
    {%- if message.tool_call_id %}{{ ' (' ~ message.tool_call_id | upper ~ ')' }}{% endif %}
    {{- '<|end|>\n' if not loop.last else '<|end|>' }}
{%- endfor %}
{{- strftime_now('%d %b %Y') }}
{%- if add_generation_prompt %}
<|assistant|>
{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{{ reasoning_effort or '' }}
{%- endif -%}
"#;
/// Takes parts, by a macro.
const PARTS_TEMPLATE: &str = r#"{% macro shown(content, first) -%}
{% if content is string %}{{ content | trim }}{% else %}{% for part in content %}{% if part.type == 'text' %}{{ part.text }}
{% endif %}{% endfor %}{% endif %}
{%- endmacro %}
{% for message in messages %}
<|{{ message.role }}|>
{{ shown(message.content, loop.first) }}{{ message.tool_calls | length if message.tool_calls else none }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% else %}{{ true }}{% endif %}"#;

#[tokio::test]
async fn local_tokens_are_those_of_vllms_handlers() {
    let Some((python, tiny)) = python_and_model() else { return };
    let read = |name: &str| std::fs::read_to_string(tiny.join(name)).expect("a file");
    let (tokenizer, config) = (read("tokenizer.json"), read("tokenizer_config.json"));
    let with = |template: &str| {
        let mut config: Value = serde_json::from_str(&config).expect("JSON");
        config.as_object_mut().expect("an object").remove("chat_template");
        let folder = folder_of(&tokenizer, &config.to_string());
        std::fs::write(folder.path().join("chat_template.jinja"), template).expect("written");
        folder
    };
    let made = [with(TEXT_TEMPLATE), with(PARTS_TEMPLATE)];
    let folders: Vec<&Path> = std::iter::once(tiny.as_path()).chain(made.iter().map(TempDir::path)).collect();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/local_tokens/engine_tokens.py");
    let output = tokio::process::Command::new(python).arg(script).args(["400", "7"]).args(&folders).output().await;
    let output = output.expect("Python runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let lines: Vec<Value> =
        output.stdout.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect();
    let mut compared = 0;
    for folder in folders {
        let of_folder: Vec<&Value> =
            lines.iter().filter(|line| line["folder"].as_str().map(Path::new) == Some(folder)).collect();
        assert!(of_folder.len() > 350, "{} prompts: {said}", of_folder.len());
        // While a proof holds, few prompts are compared: so each part begins without one.
        for part in of_folder.chunks(PROOF as usize) {
            let double = Double::start(vllm()).await;
            let tokeniser = tokeniser(&double, folder, false).await;
            let local = tokeniser.local().expect("a local tokenizer");
            for line in part {
                let (path, at, reply) = match line["path"].as_str() {
                    Some("chat") => (ApiPath::ChatCompletions, CHAT_RENDER, json!({"token_ids": line["ids"]})),
                    _ => (ApiPath::Completions, COMPLETION_RENDER, json!([{"token_ids": line["ids"]}])),
                };
                double.set(at, Reply::ok(reply.to_string()));
                let before = local.counts();
                let prompt = ask(&tokeniser, path, line["body"].as_str().expect("a body")).await;
                assert_eq!(prompt.source, TokenSource::Renderer, "{line}");
                until(|| local.is_idle()).await;
                let expected = LocalCounts { equal: before.equal + 1, ..before };
                assert_eq!(local.counts(), expected, "{}: {line}", folder.display());
                compared += 1;
            }
        }
    }
    assert!(compared > 1000, "{compared} prompts: {said}");
}
