//! Asks an engine what it is: models, version, block size, where its ranks publish, which renderers it has.

use std::time::Instant;

use bytes::Bytes;
use hyper::header::CONTENT_TYPE;
use hyper::{Method, Request, StatusCode};

use super::engine::{Engine, EngineError, EngineRole};
use super::facts::{Dialect, EngineFacts, NamedFacts, RankSource, RenderPath, RenderSupport};
use super::replies::{
    CacheConfig, Models, SglangInfo, Sources, read_cache_config, read_models, read_sglang_info, read_sources,
    read_version,
};
use super::transport::{BoxBody, DATA_PARALLEL_RANK, ReadError, body_of, read_bounded};
use crate::limits::{METRICS_BYTES_MAX, REPLY_BYTES_MAX};

const MODELS: &str = "/v1/models";
const VERSION: &str = "/version";
const SOURCES: &str = "/kv_event_sources";
const METRICS: &str = "/metrics";
const SGLANG_INFO: &str = "/server_info";
const SGLANG_MODEL: &str = "/get_model_info";

/// Why an engine could not be asked what it is.
#[derive(Debug, thiserror::Error)]
pub enum LearnError {
    /// No connection, or a broken one.
    #[error("GET {path} fails: {source}; start the engine, or correct its URL")]
    Unreachable {
        /// The path that was asked.
        path: &'static str,
        /// The cause.
        source: EngineError,
    },
    /// No whole reply in time.
    #[error("GET {path} is not answered in time; the engine is overloaded, or the URL is not an engine's")]
    TimedOut {
        /// The path that was asked.
        path: &'static str,
    },
    /// The engine wants another key.
    #[error("GET {path} is answered with status 401 or 403; set the engine's API key")]
    Unauthorized {
        /// The path that was asked.
        path: &'static str,
    },
    /// The reply sends the gateway elsewhere.
    #[error("GET {path} is answered with a redirect, which is not followed; name the URL that it leads to")]
    Redirected {
        /// The path that was asked.
        path: &'static str,
    },
    /// Another status.
    #[error("GET {path} is answered with status {status}; the URL is not an engine's, or the engine is not ready")]
    Refused {
        /// The path that was asked.
        path: &'static str,
        /// The status.
        status: u16,
    },
    /// A reply that cannot be read.
    #[error("the reply of {path} {what}; the URL is not an engine's")]
    Nonsense {
        /// The path that was asked.
        path: &'static str,
        /// What is wrong with it.
        what: String,
    },
    /// A server that lists models and is neither vLLM nor SGLang.
    #[error("the server lists models, but neither /version nor /get_model_info says that it is vLLM or SGLang")]
    UnknownServer,
}

impl LearnError {
    /// Whether the engine's server is not there at all, so that requests should not go to it.
    #[must_use]
    pub const fn is_down(&self) -> bool {
        matches!(self, Self::Unreachable { .. })
    }
}

/// The facts of an engine that has not answered yet.
pub(super) fn unknown(named: &NamedFacts) -> EngineFacts {
    let problem = "the engine has not answered what it is yet";
    let facts = EngineFacts {
        dialect: Dialect::Vllm,
        version: None,
        models: Vec::new(),
        block_size: None,
        ranks: Vec::new(),
        renders: RenderSupport::default(),
        bootstrap_port: None,
        problems: vec![problem.to_owned()],
    };
    facts.with_named(named)
}

/// Asks the engine. A question that fails for the moment leaves what was known `before`.
pub(super) async fn learn(
    engine: &Engine,
    before: Option<&EngineFacts>,
    deadline: Instant,
) -> Result<EngineFacts, LearnError> {
    let models = get(engine, MODELS, REPLY_BYTES_MAX, deadline).await?;
    let models = models.ok_or(LearnError::Refused { path: MODELS, status: 404 })?;
    let mut models = read_models(&models).map_err(|what| LearnError::Nonsense { path: MODELS, what })?;
    keep_created(&mut models, before);
    let before = before
        .filter(|before| before.models.first().map(|model| &model.id) == models.list.first().map(|model| &model.id));
    let mut facts = match dialect(engine, &models, deadline).await? {
        Dialect::Vllm => learn_vllm(engine, models, before, deadline).await,
        Dialect::Sglang => learn_sglang(engine, models, before, deadline).await,
    };
    if engine.has_rank_ports() && engine.config().named.ranks.is_empty() {
        ask_ranks(engine, &mut facts, before, deadline).await;
    }
    Ok(facts)
}

/// Asks the servers of ranks 1, 2 and so on where they publish. vLLM's external load balancing
/// (`--data-parallel-rank`) and SGLang's separate servers have one for each rank, which tells only of itself.
async fn ask_ranks(engine: &Engine, facts: &mut EngineFacts, before: Option<&EngineFacts>, deadline: Instant) {
    let told = std::mem::take(&mut facts.ranks);
    facts.ranks.push(of_rank(&told, 0));
    let host = engine.base().host().unwrap_or_default();
    for rank in (1..).take(engine.config().rank_ports.len()) {
        let (path, dialect) = match facts.dialect {
            Dialect::Vllm => (SOURCES, Dialect::Vllm),
            Dialect::Sglang => (SGLANG_INFO, Dialect::Sglang),
        };
        let reply = get_of_rank(engine, rank, path, REPLY_BYTES_MAX, deadline).await;
        let read = |body: Bytes| match dialect {
            Dialect::Vllm => read_sources(&body, host).map(|sources| sources.ranks),
            Dialect::Sglang => read_sglang_info(&body, host).map(|info| info.ranks),
        };
        let sources = match reply {
            Ok(Some(body)) => read(body).map_err(|what| format!("the reply of {path} {what}")),
            Ok(None) => Ok(Vec::new()), // the server of rank 0 has said so already
            Err(error) => Err(error.to_string()),
        };
        let known = before.and_then(|before| before.ranks.iter().find(|source| source.rank == rank));
        facts.ranks.push(match (sources, known) {
            (Ok(sources), _) => of_rank(&sources, rank),
            (Err(_), Some(known)) => known.clone(),
            (Err(why), None) => {
                let port = engine.config().rank_ports.get(rank as usize - 1).copied().unwrap_or_default();
                facts
                    .problems
                    .push(format!("the server of rank {rank}, at port {port}, does not say where it publishes: {why}"));
                of_rank(&[], rank)
            }
        });
    }
}

/// What a server says of a rank. One that tells of a single rank tells of its own, whatever number it gives it: the
/// ranks of a group of pods are counted on from pod to pod.
fn of_rank(sources: &[RankSource], rank: u32) -> RankSource {
    let source = match sources {
        [only] => Some(only),
        several => several.iter().find(|source| source.rank == rank),
    };
    let silent = RankSource { rank, endpoint: None, replay: None, topic: String::new() };
    source.map_or(silent, |source| RankSource { rank, ..source.clone() })
}

/// vLLM says of each model that it was made just now, whenever it is asked. The first answer counts, or each answer
/// would be a change.
fn keep_created(models: &mut Models, before: Option<&EngineFacts>) {
    let known = before.map_or(&[][..], |before| &before.models);
    for model in &mut models.list {
        if let Some(known) = known.iter().find(|known| known.id == model.id) {
            model.created = known.created;
        }
    }
}

/// Which engine it is: by the owner of its models, which an operator may change; else by the path that only one has.
async fn dialect(engine: &Engine, models: &Models, deadline: Instant) -> Result<Dialect, LearnError> {
    match models.list.first().and_then(|model| model.owned_by.as_deref()) {
        Some("vllm") => return Ok(Dialect::Vllm),
        Some("sglang") => return Ok(Dialect::Sglang),
        _ => {}
    }
    let is_object = |body: &Bytes| body.trim_ascii_start().starts_with(b"{");
    if get(engine, SGLANG_MODEL, REPLY_BYTES_MAX, deadline).await?.as_ref().is_some_and(is_object) {
        return Ok(Dialect::Sglang);
    }
    let version = get(engine, VERSION, REPLY_BYTES_MAX, deadline).await?;
    version.and_then(|body| read_version(&body)).map(|_| Dialect::Vllm).ok_or(LearnError::UnknownServer)
}

async fn learn_vllm(engine: &Engine, models: Models, before: Option<&EngineFacts>, deadline: Instant) -> EngineFacts {
    let named = &engine.config().named;
    let host = engine.base().host().unwrap_or_default();
    let (version, sources, metrics, renders) = tokio::join!(
        get(engine, VERSION, REPLY_BYTES_MAX, deadline),
        get(engine, SOURCES, REPLY_BYTES_MAX, deadline),
        get(engine, METRICS, METRICS_BYTES_MAX, deadline),
        renderers(engine, before, deadline),
    );
    let mut problems = model_problems(&models);
    let version = version.ok().flatten().and_then(|body| read_version(&body));
    let ranks = match sources {
        Ok(Some(body)) => match read_sources(&body, host) {
            Ok(Sources { ranks }) => ranks,
            Err(what) => not_told(&mut problems, named, &format!("the reply of {SOURCES} {what}")),
        },
        Ok(None) => not_told(&mut problems, named, &format!("this version of vLLM has no {SOURCES}")),
        Err(error) => before.map_or_else(|| not_told(&mut problems, named, &error.to_string()), |it| it.ranks.clone()),
    };
    let cache = match metrics {
        Ok(Some(body)) => read_cache_config(&body),
        Ok(None) => CacheConfig::default(),
        Err(error) => {
            problems.push(error.to_string());
            let block_sizes = before.and_then(|before| before.block_size).into_iter().collect();
            CacheConfig { block_sizes, has_prefix_caching: None }
        }
    };
    if cache.has_prefix_caching == Some(false) {
        problems.push("prefix caching is off; start vLLM without --no-enable-prefix-caching".to_owned());
    }
    let block_size = block_size(&mut problems, named, &cache);
    rank_problems(&mut problems, named, &ranks, "--kv-events-config");
    if !renders.has(RenderPath::ChatCompletions) {
        let problem = "it renders no prompts, so that most chat requests are tokenised by /tokenize or routed by load; \
            start vLLM with --enable-scale-out, or name a render server";
        problems.push(problem.to_owned());
    }
    let facts = EngineFacts {
        dialect: Dialect::Vllm,
        version,
        models: models.list,
        block_size,
        ranks,
        renders,
        bootstrap_port: None,
        problems,
    };
    facts.with_named(named)
}

async fn learn_sglang(engine: &Engine, models: Models, before: Option<&EngineFacts>, deadline: Instant) -> EngineFacts {
    let named = &engine.config().named;
    let host = engine.base().host().unwrap_or_default();
    let (info, renders) =
        tokio::join!(get(engine, SGLANG_INFO, REPLY_BYTES_MAX, deadline), renderers(engine, before, deadline));
    let mut problems = model_problems(&models);
    let info = match info {
        Ok(Some(body)) => read_sglang_info(&body, host).map_err(|what| format!("the reply of {SGLANG_INFO} {what}")),
        Ok(None) => Err(format!("this version of SGLang has no {SGLANG_INFO}")),
        Err(error) => Err(error.to_string()),
    };
    let role = engine.config().role;
    let (version, mut block_size, ranks, bootstrap_port) = match info {
        Ok(info) => {
            role_problems(&mut problems, role, named, &info);
            if !info.has_prefix_caching {
                problems.push("prefix caching is off; start SGLang without --disable-radix-cache".to_owned());
            }
            (info.version, info.block_size, info.ranks, info.bootstrap_port)
        }
        Err(why) => match before {
            Some(before) => (before.version.clone(), before.block_size, before.ranks.clone(), before.bootstrap_port),
            None => (None, None, not_told(&mut problems, named, &why), None),
        },
    };
    block_size = named.block_size.or(block_size);
    if block_size.is_none() {
        problems.push("it does not say how many tokens a block has; name block_size: SGLang's --page-size".to_owned());
    }
    rank_problems(&mut problems, named, &ranks, "--kv-events-config");
    let facts = EngineFacts {
        dialect: Dialect::Sglang,
        version,
        models: models.list,
        block_size,
        ranks,
        renders,
        bootstrap_port,
        problems,
    };
    facts.with_named(named)
}

/// What SGLang says of its half of the work, beside the role that the operator gave it.
fn role_problems(problems: &mut Vec<String>, role: EngineRole, named: &NamedFacts, info: &SglangInfo) {
    let wanted = match role {
        EngineRole::Any => "null",
        EngineRole::Prefill => "prefill",
        EngineRole::Decode => "decode",
    };
    if let Some(mode) = info.disaggregation_mode.as_deref().filter(|mode| *mode != wanted) {
        problems.push(format!(
            "its role needs SGLang's --disaggregation-mode {wanted}, and it says {mode}: start it so, or correct `role`"
        ));
    }
    if role == EngineRole::Prefill && named.bootstrap_port.or(info.bootstrap_port).is_none() {
        problems.push(
            "it does not say where its bootstrap server is; name bootstrap_port: SGLang's \
             --disaggregation-bootstrap-port"
                .to_owned(),
        );
    }
}

fn model_problems(models: &Models) -> Vec<String> {
    match models.left_out {
        0 => Vec::new(),
        count => vec![format!("{count} entries of {MODELS} are left out: they have no usable name, or are too many")],
    }
}

/// The ranks of an engine that does not say where it publishes: none, and a problem unless they are named by hand.
fn not_told(problems: &mut Vec<String>, named: &NamedFacts, why: &str) -> Vec<RankSource> {
    if named.ranks.is_empty() {
        problems.push(format!(
            "it does not say where it publishes its events ({why}); name endpoint and replay_endpoint of each rank as \
             in its --kv-events-config, with its host in place of a wildcard"
        ));
    }
    Vec::new()
}

fn rank_problems(problems: &mut Vec<String>, named: &NamedFacts, ranks: &[RankSource], option: &str) {
    if !named.ranks.is_empty() {
        return;
    }
    let was_asked = !problems.iter().any(|problem| problem.contains("where it publishes"));
    if was_asked && ranks.iter().all(|rank| rank.endpoint.is_none()) {
        problems.push(format!(
            "it publishes no KV events, so that its cache is unknown; start it with {option} \
             '{{\"enable_kv_cache_events\": true, \"publisher\": \"zmq\", \"endpoint\": \"tcp://*:5557\", \
             \"replay_endpoint\": \"tcp://*:5558\"}}'"
        ));
    } else if ranks.iter().any(|rank| rank.endpoint.is_some() && rank.replay.is_none()) {
        problems.push(format!("it cannot send lost events again; add \"replay_endpoint\" to its {option}"));
    }
}

fn block_size(problems: &mut Vec<String>, named: &NamedFacts, cache: &CacheConfig) -> Option<u32> {
    if named.block_size.is_some() {
        return named.block_size;
    }
    let mut sizes = cache.block_sizes.iter();
    match (sizes.next(), sizes.next()) {
        (Some(size), None) => Some(*size),
        (None, _) => {
            problems.push(format!(
                "{METRICS} does not say how many tokens a block has; name block_size: vLLM's --block-size"
            ));
            None
        }
        (Some(_), Some(_)) => {
            problems.push(format!(
                "its ranks have blocks of different sizes ({:?}), which is not supported",
                cache.block_sizes
            ));
            None
        }
    }
}

/// Which renderers the engine has. Each is sent an object without a prompt: a renderer refuses the object, a server
/// without it refuses the path, and one that has it switched off (vLLM without `--enable-scale-out`) answers 403.
async fn renderers(engine: &Engine, before: Option<&EngineFacts>, deadline: Instant) -> RenderSupport {
    let ask = async |path: RenderPath| {
        let reply = ask(engine, Method::POST, path.path(), body_of(Bytes::from_static(b"{}")), deadline).await;
        match reply.map(|reply| reply.status()) {
            Ok(StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY | StatusCode::OK) => true,
            Ok(_) => false,
            Err(_) => before.is_some_and(|before| before.renders.has(path)),
        }
    };
    let [chat, completions, responses, messages] = RenderPath::ALL;
    let has = tokio::join!(ask(chat), ask(completions), ask(responses), ask(messages));
    let all = RenderPath::ALL.into_iter().zip([has.0, has.1, has.2, has.3]);
    all.filter(|(_, has)| *has).fold(RenderSupport::default(), |support, (path, _)| support.with(path))
}

async fn ask(
    engine: &Engine,
    method: Method,
    path: &'static str,
    body: BoxBody,
    deadline: Instant,
) -> Result<hyper::Response<hyper::body::Incoming>, LearnError> {
    let request = Request::builder().method(method).uri(path).header(CONTENT_TYPE, "application/json").body(body);
    send(engine, path, request, deadline).await
}

async fn send(
    engine: &Engine,
    path: &'static str,
    request: Result<Request<BoxBody>, hyper::http::Error>,
    deadline: Instant,
) -> Result<hyper::Response<hyper::body::Incoming>, LearnError> {
    let request = request.map_err(|error| LearnError::Nonsense { path, what: error.to_string() })?;
    engine.ask(request, deadline).await.map_err(|error| match error {
        EngineError::TimedOut => LearnError::TimedOut { path },
        source => LearnError::Unreachable { path, source },
    })
}

/// The body of a reply; `None` = the server has no such path.
async fn get(
    engine: &Engine,
    path: &'static str,
    bytes_max: usize,
    deadline: Instant,
) -> Result<Option<Bytes>, LearnError> {
    get_of_rank(engine, 0, path, bytes_max, deadline).await
}

/// The same of the server of a rank, where each has one.
async fn get_of_rank(
    engine: &Engine,
    rank: u32,
    path: &'static str,
    bytes_max: usize,
    deadline: Instant,
) -> Result<Option<Bytes>, LearnError> {
    let mut request = Request::get(path);
    if rank > 0 {
        request = request.header(DATA_PARALLEL_RANK, rank);
    }
    let reply = send(engine, path, request.body(body_of(Bytes::new())), deadline).await?;
    match reply.status() {
        StatusCode::OK => {}
        StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED => return Ok(None),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => return Err(LearnError::Unauthorized { path }),
        status if status.is_redirection() => return Err(LearnError::Redirected { path }),
        status => return Err(LearnError::Refused { path, status: status.as_u16() }),
    }
    match read_bounded(reply.into_body(), bytes_max, deadline).await {
        Ok(body) => Ok(Some(body)),
        Err(ReadError::TimedOut) => Err(LearnError::TimedOut { path }),
        Err(error) => Err(LearnError::Nonsense { path, what: format!("cannot be read: {error}") }),
    }
}
