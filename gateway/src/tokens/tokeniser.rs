//! Prompts to tokens, by the engines.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;

use super::body::{are_text, changes_ids, fields, may_skip_cache, value, without_payload};
use super::cache::{Outcome, TokenCache};
use super::exchange::{Answer, exchange};
use super::local::{LocalCause, LocalTokenizers};
use super::media::blocks_of;
use super::rendered::{Rendered, read_rendered, read_tokenized};
use super::source::{PromptTokens, TokenSource};
use super::tokenize::tokenize_body;
use crate::api::{ApiPath, PromptForm, RequestFacts, Usage};
use crate::engines::{Dialect, Engine, EngineSet, RenderPath, ServedModel};
use crate::limits::{
    LOCAL_WAIT_MAX, PROMPT_TOKENS_MAX, RENDER_ATTEMPTS_MAX, RENDER_MAX, TOKEN_CACHE_BYTES, TOKENIZE_SUSPENDED,
};

const TOKENIZE: &str = "/tokenize";

/// How prompts become tokens.
#[derive(Clone, Debug)]
pub struct TokenSettings {
    /// Bytes of the cache of rendered prompts.
    pub cache_bytes_max: u64,
    /// The longest wait for a renderer; after it the request is routed by load.
    pub timeout: Duration,
    /// Servers that only render (`vllm launch render`). They are asked before the engines.
    pub renderers: Option<Arc<EngineSet>>,
    /// Whether renderers are asked. Rendering takes time of an engine's HTTP server.
    pub uses_renderer: bool,
    /// Whether `/tokenize` is used where no renderer is.
    pub uses_tokenize: bool,
    /// Tokenizers of the gateway's own.
    pub local: Option<LocalTokenizers>,
}

impl Default for TokenSettings {
    fn default() -> Self {
        Self {
            cache_bytes_max: TOKEN_CACHE_BYTES,
            timeout: RENDER_MAX,
            renderers: None,
            uses_renderer: true,
            uses_tokenize: true,
            local: None,
        }
    }
}

/// Requests by the source of their tokens, and how they were found. For metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenCounts {
    /// Token ids in the body.
    pub body: u64,
    /// By a renderer.
    pub renderer: u64,
    /// By `/tokenize`.
    pub tokenize: u64,
    /// By a local tokenizer.
    pub local: u64,
    /// Routed by load.
    pub none: u64,
    /// Found in the cache.
    pub cache_hits: u64,
    /// Not found in the cache.
    pub cache_misses: u64,
    /// Questions to engines that failed through the engine's fault.
    pub failures: u64,
    /// Bytes in the cache.
    pub cache_bytes: u64,
}

#[derive(Debug, Default)]
struct Counters {
    body: AtomicU64,
    renderer: AtomicU64,
    tokenize: AtomicU64,
    local: AtomicU64,
    none: AtomicU64,
    hits: AtomicU64,
    misses: AtomicU64,
    failures: AtomicU64,
}

fn bump(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Prompts to tokens, by the engines.
#[derive(Clone)]
pub struct Tokeniser(Arc<Shared>);

struct Shared {
    engines: Arc<EngineSet>,
    settings: TokenSettings,
    cache: TokenCache,
    counters: Counters,
    turn: AtomicUsize,
    /// Models and paths whose `/tokenize` counted other tokens than the engine, until when it is not used.
    suspended: Mutex<HashMap<(String, ApiPath), Instant>>,
}

impl std::fmt::Debug for Tokeniser {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokeniser").field("settings", &self.0.settings).finish_non_exhaustive()
    }
}

impl Tokeniser {
    /// A tokeniser for these engines.
    #[must_use]
    pub fn new(engines: Arc<EngineSet>, settings: TokenSettings) -> Self {
        let cache = TokenCache::new(settings.cache_bytes_max, rand::random());
        let (counters, turn, suspended) = (Counters::default(), AtomicUsize::new(0), Mutex::default());
        Self(Arc::new(Shared { engines, settings, cache, counters, turn, suspended }))
    }

    /// The tokens of a request. Never fails: without tokens the request is routed by load.
    pub async fn tokens(
        &self,
        path: ApiPath,
        facts: &RequestFacts,
        model: &ServedModel,
        body: &Bytes,
        deadline: Instant,
    ) -> PromptTokens {
        let found = self.find(path, facts, model, body, deadline).await;
        let prompt = match found {
            Ok(rendered) => self.0.prompt(&rendered, facts, model, body),
            Err(why) => PromptTokens::none(why.as_ref(), facts.cache_salt.clone()),
        };
        let counters = &self.0.counters;
        bump(match prompt.source {
            TokenSource::Body => &counters.body,
            TokenSource::Renderer => &counters.renderer,
            TokenSource::Tokenize => &counters.tokenize,
            TokenSource::Local => &counters.local,
            TokenSource::None => &counters.none,
        });
        prompt
    }

    async fn find(
        &self,
        path: ApiPath,
        facts: &RequestFacts,
        model: &ServedModel,
        body: &Bytes,
        deadline: Instant,
    ) -> Outcome {
        if let Some(outcome) = from_body(path, &facts.prompt, body) {
            return outcome.map(Arc::new).map_err(Arc::from);
        }
        let is_sglang = path == ApiPath::SglangGenerate;
        if RenderPath::of(path).is_none() && !is_sglang {
            return Err(Arc::from("this path has no renderer"));
        }
        let shared = &self.0;
        let key = shared.cache.key(path, model, body);
        if let Some(rendered) = shared.cache.get(key) {
            let is_trusted = match rendered.source {
                TokenSource::Tokenize => !shared.is_suspended(path, model, Instant::now()),
                TokenSource::Local => shared.local(path, model).is_some(),
                _ => true,
            };
            if is_trusted {
                bump(&shared.counters.hits);
                return Ok(rendered);
            }
            shared.cache.remove(key);
        }
        bump(&shared.counters.misses);
        let render = || {
            let (shared, model, body) = (shared.clone(), model.clone(), body.clone());
            async move { shared.render(path, &model, &body).await }
        };
        shared.cache.wait(key, deadline, render).await
    }

    /// Compares the number of tokens with what the engine counted. A difference suspends `/tokenize` for the model
    /// and the path: the engine builds the prompt by other rules there, as vLLM does for gpt-oss. It disproves a local
    /// tokenizer, and with `/tokenize` also one that was proved by it.
    pub fn observe(&self, path: ApiPath, model: &ServedModel, prompt: &PromptTokens, usage: &Usage, now: Instant) {
        let Some(tokens) = &prompt.tokens else { return };
        if !prompt.is_comparable || tokens.len() == usage.prompt_tokens as usize {
            return;
        }
        let cause = match prompt.source {
            TokenSource::Tokenize => LocalCause::Reference,
            TokenSource::Local => LocalCause::Count,
            _ => return,
        };
        if let Some(local) = &self.0.settings.local {
            local.disprove(path, model, cause);
        }
        if prompt.source != TokenSource::Tokenize {
            return;
        }
        let until = now + TOKENIZE_SUSPENDED;
        let before = self.0.suspended.lock().insert((model.base.clone(), path), until);
        if before.is_none_or(|before| before <= now) {
            tracing::warn!(
                model = model.base,
                path = path.label(),
                tokenize = tokens.len(),
                engine = usage.prompt_tokens,
                "/tokenize counts other tokens than the engine; requests of this path are routed by load for a time; \
                 start vLLM with --enable-scale-out, whose renderer is exact"
            );
        }
    }

    /// The local tokenizers.
    #[must_use]
    pub fn local(&self) -> Option<&LocalTokenizers> {
        self.0.settings.local.as_ref()
    }

    /// Drops all rendered prompts of the cache.
    pub fn empty_cache(&self) {
        self.0.cache.clear();
    }

    /// The counts so far.
    #[must_use]
    pub fn counts(&self) -> TokenCounts {
        let counters = &self.0.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        TokenCounts {
            body: read(&counters.body),
            renderer: read(&counters.renderer),
            tokenize: read(&counters.tokenize),
            local: read(&counters.local),
            none: read(&counters.none),
            cache_hits: read(&counters.hits),
            cache_misses: read(&counters.misses),
            failures: read(&counters.failures),
            cache_bytes: self.0.cache.bytes(),
        }
    }
}

/// The prompt that a body has as token ids. `None` = it has none, or other fields change it and a renderer must be
/// asked.
fn from_body(path: ApiPath, prompt: &PromptForm, body: &[u8]) -> Option<Result<Rendered, String>> {
    let ids = match prompt {
        PromptForm::Tokens(ids) | PromptForm::Batch { first_tokens: Some(ids), .. } => ids,
        PromptForm::Text | PromptForm::Batch { .. } => return None,
    };
    if path == ApiPath::VllmGenerate {
        return Some(read_rendered(body, TokenSource::Body).map_err(|why| format!("the body's prompt: {why}")));
    }
    let changes = fields(body).map(|fields| changes_ids(path, &fields));
    match changes {
        None => return Some(Err("the body is no JSON object".to_owned())),
        Some(Some(_)) if RenderPath::of(path).is_some() => return None,
        Some(Some(field)) => return Some(Err(format!("the token ids are not the whole prompt: the body has {field}"))),
        Some(None) => {}
    }
    match ids.len() {
        0 => Some(Err("the prompt is empty".to_owned())),
        count if count > PROMPT_TOKENS_MAX => Some(Err(format!("the prompt has more than {PROMPT_TOKENS_MAX} tokens"))),
        _ => {
            let (tokens, media) = (Arc::from(ids.as_slice()), Arc::from([]));
            Some(Ok(Rendered { tokens, media, salt: None, source: TokenSource::Body }))
        }
    }
}

/// Why no engine gives the tokens of a body.
enum Refusal {
    /// An engine refuses the body.
    Body(Arc<str>),
    /// No engine could be asked, or all failed.
    Engines(Arc<str>),
}

impl Refusal {
    fn engines(why: impl Into<Arc<str>>) -> Self {
        Self::Engines(why.into())
    }

    fn into_reason(self) -> Arc<str> {
        match self {
            Self::Body(why) | Self::Engines(why) => why,
        }
    }
}

impl Shared {
    /// Places the media and decides what can be compared.
    fn prompt(&self, rendered: &Rendered, facts: &RequestFacts, model: &ServedModel, body: &[u8]) -> PromptTokens {
        let is_one =
            matches!(facts.prompt, PromptForm::Tokens(_) | PromptForm::Text | PromptForm::Batch { prompts: 1, .. });
        let mut prompt = PromptTokens {
            tokens: Some(rendered.tokens.clone()),
            source: rendered.source,
            why_none: None,
            media: Vec::new(),
            salt: rendered.salt.as_deref().map(str::to_owned).or_else(|| facts.cache_salt.clone()),
            is_comparable: is_one && !may_skip_cache(body),
        };
        let Some(first) = rendered.media.first() else { return prompt };
        let block_size = self.engines.block_size(model);
        let why = match (&model.lora, block_size) {
            (Some(_), _) => "the engine may name images by the adapter too",
            (None, None) => "the engine's block size is unknown",
            (None, Some(block_size)) => {
                prompt.media = blocks_of(&rendered.media, rendered.tokens.len(), block_size);
                return prompt;
            }
        };
        // Blocks from the first object on cannot be named as the engine names them.
        let whole = &rendered.tokens[..first.offset as usize];
        prompt.tokens = (!whole.is_empty()).then(|| Arc::from(whole));
        prompt.source = if whole.is_empty() { TokenSource::None } else { rendered.source };
        prompt.why_none = Some(format!("only the tokens before the first multimodal object are used: {why}"));
        prompt.is_comparable = false;
        prompt
    }

    fn is_suspended(&self, path: ApiPath, model: &ServedModel, now: Instant) -> bool {
        self.suspended.lock().get(&(model.base.clone(), path)).is_some_and(|until| *until > now)
    }

    /// The local tokenizers, if their tokens may be used for a model and a path.
    fn local(&self, path: ApiPath, model: &ServedModel) -> Option<&LocalTokenizers> {
        self.settings.local.as_ref().filter(|local| local.is_proved(path, model))
    }

    /// Asks the engines, and the local tokenizer where they fail or where it is preferred.
    async fn render(&self, path: ApiPath, model: &ServedModel, body: &Bytes) -> Outcome {
        let deadline = Instant::now() + self.settings.timeout;
        let Some(local) = &self.settings.local else {
            return self.ask_engines(path, model, body, deadline).await.map_err(Refusal::into_reason);
        };
        // Its rules are vLLM's.
        let is_vllm = self.engines.serving(model).all(|engine| engine.facts().dialect == Dialect::Vllm);
        let comes_first = is_vllm && local.comes_first(path, model);
        if comes_first && let Ok(rendered) = local.tokens(path, model, body, deadline).await {
            return Ok(Arc::new(rendered));
        }
        match self.ask_engines(path, model, body, deadline).await {
            Ok(rendered) => {
                if is_vllm {
                    local.compare(path, model, body, &rendered);
                }
                Ok(rendered)
            }
            // What the engine refuses it will not run.
            Err(Refusal::Body(why)) => Err(why),
            Err(Refusal::Engines(why)) if is_vllm && !comes_first && local.is_proved(path, model) => {
                // The engines may have used up their time, and a local tokenizer needs little.
                let deadline = deadline.max(Instant::now() + LOCAL_WAIT_MAX);
                let tokens = local.tokens(path, model, body, deadline).await;
                tokens.map(Arc::new).map_err(|local| Arc::from(format!("{why}; {local}")))
            }
            Err(Refusal::Engines(why)) => Err(why),
        }
    }

    /// Asks engines in turn: renderers first, then `/tokenize`.
    async fn ask_engines(
        &self,
        path: ApiPath,
        model: &ServedModel,
        body: &Bytes,
        deadline: Instant,
    ) -> Result<Arc<Rendered>, Refusal> {
        let mut attempts = 0;
        let mut why = None;
        for engine in self.renderers(path, model) {
            if attempts == RENDER_ATTEMPTS_MAX || Instant::now() >= deadline {
                break;
            }
            if !engine.renderer().lock().is_usable(Instant::now()) {
                why = why.or_else(|| Some("the renderer failed lately and is not asked for a time".to_owned()));
                continue;
            }
            attempts += 1;
            match self.ask_renderer(&engine, path, body, deadline).await {
                Answer::Tokens(rendered) => return Ok(Arc::new(rendered)),
                Answer::Refused(refused) => return Err(Refusal::Body(Arc::from(refused))),
                Answer::Unsupported => {}
                Answer::Failed(failed) => why = Some(failed),
            }
        }
        let tokenize = match self.tokenize(path, model, body, attempts, deadline).await {
            Ok(rendered) => return Ok(Arc::new(rendered)),
            Err(Refusal::Body(why)) => return Err(Refusal::Body(why)),
            Err(Refusal::Engines(tokenize)) => tokenize,
        };
        Err(Refusal::engines(match why {
            Some(why) => format!("{why}; {tokenize}"),
            None => format!("no engine renders this path; {tokenize}"),
        }))
    }

    async fn tokenize(
        &self,
        path: ApiPath,
        model: &ServedModel,
        body: &Bytes,
        mut attempts: usize,
        deadline: Instant,
    ) -> Result<Rendered, Refusal> {
        if !self.settings.uses_tokenize {
            return Err(Refusal::engines("/tokenize is switched off"));
        }
        if self.is_suspended(path, model, Instant::now()) {
            return Err(Refusal::engines("/tokenize counted other tokens than the engine"));
        }
        let mut why = "no engine could be asked for /tokenize".to_owned();
        for engine in self.in_turn(self.engines.serving(model).collect()) {
            if attempts == RENDER_ATTEMPTS_MAX || Instant::now() >= deadline {
                break;
            }
            let body = tokenize_body(engine.facts().dialect, path, body).map_err(Refusal::engines)?;
            if !engine.renderer().lock().is_usable(Instant::now()) {
                continue;
            }
            attempts += 1;
            match self.question(&engine, TOKENIZE, Bytes::from(body), deadline, read_tokenized).await {
                Answer::Tokens(rendered) => return Ok(rendered),
                // It may refuse more than the path itself does, but that is not known.
                Answer::Refused(refused) => return Err(Refusal::Body(Arc::from(refused))),
                Answer::Unsupported => why = "the engine has no /tokenize".to_owned(),
                Answer::Failed(failed) => why = failed,
            }
        }
        Err(Refusal::engines(why))
    }

    /// The servers that render a path: those that only render, then the engines, each in turn.
    fn renderers(&self, path: ApiPath, model: &ServedModel) -> Vec<Arc<Engine>> {
        let Some(render) = RenderPath::of(path).filter(|_| self.settings.uses_renderer) else { return Vec::new() };
        let of = |set: &EngineSet| -> Vec<Arc<Engine>> {
            set.serving(model).filter(|engine| engine.facts().renders.has(render)).collect()
        };
        let mut servers = self.settings.renderers.as_deref().map(of).map(|list| self.in_turn(list)).unwrap_or_default();
        servers.extend(self.in_turn(of(&self.engines)));
        servers
    }

    /// The list from another server on each time, so that all get their share.
    fn in_turn(&self, mut list: Vec<Arc<Engine>>) -> Vec<Arc<Engine>> {
        if !list.is_empty() {
            let first = self.turn.fetch_add(1, Ordering::Relaxed) % list.len();
            list.rotate_left(first);
        }
        list
    }

    async fn ask_renderer(&self, engine: &Engine, path: ApiPath, body: &Bytes, deadline: Instant) -> Answer {
        let Some(render) = RenderPath::of(path) else { return Answer::Unsupported };
        let body = match engine.facts().dialect {
            Dialect::Vllm => without_payload(body),
            Dialect::Sglang => {
                let has_media =
                    fields(body).is_none_or(|fields| value(&fields, "messages").is_some_and(|text| !are_text(text)));
                if has_media {
                    return Answer::Refused("SGLang's renderer does not tell the hashes of media".to_owned());
                }
                body.clone()
            }
        };
        let read = |bytes: &[u8]| read_rendered(bytes, TokenSource::Renderer);
        self.question(engine, render.path(), body, deadline, read).await
    }

    /// One question. The health of the engine's renderers follows from its end.
    async fn question(
        &self,
        engine: &Engine,
        path: &'static str,
        body: Bytes,
        deadline: Instant,
        read: impl FnOnce(&[u8]) -> Result<Rendered, String>,
    ) -> Answer {
        engine.renderer().lock().began(Instant::now());
        let answer = exchange(engine, path, body, deadline, read).await;
        let Answer::Failed(why) = &answer else {
            if engine.renderer().lock().succeeded() {
                tracing::info!(worker = engine.worker(), path, "the engine renders prompts again");
            }
            return answer;
        };
        bump(&self.counters.failures);
        let now = Instant::now();
        let rest = engine.renderer().lock().failed(now, rand::random());
        tracing::warn!(
            worker = engine.worker(),
            path,
            why,
            back_off_ms = rest.as_millis() as u64,
            "the engine does not render prompts; it is not asked for this time, and requests may be routed by load"
        );
        answer
    }
}
