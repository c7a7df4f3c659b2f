//! What the proxy and the endpoint picker share: the engines, the daemon, the router, the tokeniser and the parity
//! watch.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::kubernetes::{KubernetesOptions, Pods};
use super::{Failure, sandboxed};
use crate::config::{Config, EngineEntry, Questions, ReportMode, Tokens};
use crate::engines::{
    ClientTls, EngineConfig, EngineError, EngineRole, EngineSet, NamedFacts, Secret, expand_addresses, keep_learning,
};
use crate::limits::{DAEMON_READY_MAX, ENGINES_LEARN_INTERVAL, ENGINES_READY_MAX, PLAN_INTERVAL, SECRET_BYTES_MAX};
use crate::memory::{Memory, MemoryPart};
use crate::parity::ParityWatch;
use crate::router::{DaemonError, DaemonOptions, DaemonProcess, DaemonStarter, DaemonState, Router, RouterOptions};
use crate::tokens::{LocalTokenizers, TokenSettings, Tokeniser};

/// What the core needs of a configuration. Files with keys have been read.
#[derive(Clone, Debug)]
pub struct CoreOptions {
    engines: Vec<EngineConfig>,
    pods: Option<KubernetesOptions>,
    tls: ClientTls,
    daemon: Daemon,
    starter: Option<DaemonStarter>,
    questions: Questions,
    tokens: Tokens,
    local: Option<LocalTokenizers>,
    memory: Arc<Memory>,
}

/// Which daemon answers.
#[derive(Clone, Debug)]
enum Daemon {
    /// One that runs already.
    Socket(std::path::PathBuf),
    /// A child of the gateway.
    Child(DaemonOptions),
}

impl CoreOptions {
    /// Those of a configuration.
    ///
    /// # Errors
    /// A file with an API key, or the folder of a tokenizer, that cannot be used, or pods without a cluster.
    pub fn of(config: &Config) -> Result<Self, Failure> {
        let engines = config.engines.iter().map(engine_config).collect::<Result<_, _>>()?;
        let pods = config.kubernetes.as_ref().map(|kubernetes| {
            let api_key = config.engines_key_file.as_deref().map(read_secret).transpose()?;
            KubernetesOptions::of(kubernetes, api_key)
        });
        let pods = pods.transpose()?;
        let daemon = match &config.socket {
            Some(socket) => Daemon::Socket(socket.clone()),
            None => Daemon::Child(DaemonOptions {
                program: config.daemon_program.clone(),
                metrics_port: config.daemon_metrics_port,
                memory_bytes_max: config.daemon_memory_bytes_max,
                mode: config.daemon_mode,
                log_level: config.log_level.clone(),
                request_max: config.deadlines.total,
                report_mode_passes: config.forward.report_mode == ReportMode::Pass,
                sandbox: config.sandbox,
            }),
        };
        let tls = ClientTls { ca_file: config.engines_ca.clone() };
        let (questions, tokens) = (config.questions.clone(), config.tokens.clone());
        let local = (!tokens.local.is_empty()).then(|| LocalTokenizers::load(&tokens.local));
        let local = local.transpose().map_err(|why| Failure::Usage(format!("tokens.local: {why}")))?;
        Ok(Self { engines, pods, tls, daemon, starter: None, questions, tokens, local, memory: Arc::default() })
    }

    /// Starts the daemon on a thread that was started before the sandbox.
    #[must_use]
    pub fn starting_on(self, starter: Option<DaemonStarter>) -> Self {
        Self { starter, ..self }
    }

    /// The same within a memory budget, which has lowered the bounds of the configuration already.
    #[must_use]
    pub fn within(self, memory: &Arc<Memory>) -> Self {
        Self { memory: Arc::clone(memory), ..self }
    }
}

fn engine_config(entry: &EngineEntry) -> Result<EngineConfig, Failure> {
    let api_key = entry.api_key_file.as_deref().map(read_secret).transpose()?;
    let role = match entry.role.as_str() {
        "prefill" => EngineRole::Prefill,
        "decode" => EngineRole::Decode,
        _ => EngineRole::Any,
    };
    let named =
        NamedFacts { block_size: entry.block_size, ranks: entry.ranks.clone(), bootstrap_port: entry.bootstrap_port };
    let tls_name = entry.tls_name.clone();
    Ok(EngineConfig { api_key, role, tls_name, named, ..EngineConfig::new(entry.worker, &entry.url) })
}

fn read_secret(path: &Path) -> Result<Secret, Failure> {
    let wrong = |why: String| Failure::Usage(format!("the API key in {} cannot be used: {why}", path.display()));
    let size = std::fs::metadata(path).map_err(|error| wrong(error.to_string()))?.len();
    if size > SECRET_BYTES_MAX {
        return Err(wrong(format!("the file has more than {SECRET_BYTES_MAX} bytes; write the key on its only line")));
    }
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    match text.trim() {
        "" => Err(wrong("the file is empty; write the key on its only line".into())),
        key if key.lines().count() > 1 => {
            Err(wrong("the file has several lines; write the key on its only one".into()))
        }
        key => Ok(Secret::new(key)),
    }
}

/// Engines, daemon, router, tokeniser and parity watch of a running gateway.
pub struct Core {
    engines: Arc<EngineSet>,
    pods: Option<Arc<Pods>>,
    tls: ClientTls,
    daemon: Option<Arc<DaemonProcess>>,
    router: Router,
    tokeniser: Tokeniser,
    parity: ParityWatch,
    memory: Arc<Memory>,
}

impl Core {
    /// Asks the engines what they are, starts the daemon if none is named, and connects to it. What is not there yet is
    /// waited for in the background.
    ///
    /// # Errors
    /// An engine's URL or key, the file of authorities or the daemon's program cannot be used.
    pub async fn start(options: CoreOptions, stop: watch::Receiver<bool>) -> Result<Self, Failure> {
        let CoreOptions { engines, pods, tls, daemon, starter, questions, tokens, local, memory } = options;
        let engines = engine_set(engines, &tls).await?;
        let pods = match pods {
            Some(options) => Some(Pods::start(options, &engines).await),
            None => None,
        };
        for (worker, error) in engines.learn_all(Instant::now() + ENGINES_READY_MAX).await {
            tracing::warn!(worker, %error, "the engine does not say what it is; it gets no requests until it does");
        }
        let (socket, daemon) = match daemon {
            Daemon::Socket(socket) => (socket, None),
            Daemon::Child(options) => {
                let daemon = start_daemon(options, starter, &engines).await?;
                (daemon.socket().to_owned(), Some(daemon))
            }
        };
        let router_options = RouterOptions {
            namespace: questions.namespace,
            timeout: questions.timeout,
            hash_locally: questions.hash_locally,
            ..RouterOptions::new(socket)
        };
        let router = Router::new(router_options, Arc::clone(&engines));
        // A daemon of the gateway's own needs a model to start with.
        let has_daemon = daemon.as_ref().is_none_or(|daemon| daemon.state() != DaemonState::NoModels);
        if has_daemon && !router.ready(Instant::now() + DAEMON_READY_MAX).await {
            tracing::warn!("the daemon does not answer yet; requests are spread by load until it does");
        }
        let settings = TokenSettings { local, ..token_settings(&tokens, &tls, stop.clone()).await? };
        let tokeniser = Tokeniser::new(Arc::clone(&engines), settings);
        if let Some(pods) = &pods {
            tokio::spawn(Arc::clone(pods).follow(Arc::clone(&engines), stop.clone()));
        }
        let counted = tokeniser.clone();
        memory.watch(MemoryPart::TokenCache, move || counted.counts().cache_bytes);
        tokio::spawn(watch_memory(Arc::clone(&memory), tokeniser.clone(), stop.clone()));
        tokio::spawn(watch_engines(Arc::clone(&engines), daemon.clone(), stop));
        tokio::spawn(sandboxed::watch());
        Ok(Self { engines, pods, tls, daemon, router, tokeniser, parity: ParityWatch::default(), memory })
    }

    /// The engines.
    #[must_use]
    pub const fn engines(&self) -> &Arc<EngineSet> {
        &self.engines
    }

    /// The pods that are the engines, if they are pods.
    pub(super) const fn pods(&self) -> Option<&Arc<Pods>> {
        self.pods.as_ref()
    }

    /// The router.
    #[must_use]
    pub const fn router(&self) -> &Router {
        &self.router
    }

    /// The tokeniser.
    #[must_use]
    pub const fn tokeniser(&self) -> &Tokeniser {
        &self.tokeniser
    }

    /// The memory of the process.
    #[must_use]
    pub const fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// The parity watch.
    #[must_use]
    pub const fn parity(&self) -> &ParityWatch {
        &self.parity
    }

    /// The daemon, if it is a child.
    #[must_use]
    pub fn daemon(&self) -> Option<&DaemonProcess> {
        self.daemon.as_deref()
    }

    /// Reads the file of the engines' authorities again.
    pub fn read_again(&self) {
        match self.engines.reload_tls(&self.tls) {
            Ok(()) => tracing::info!("the certificates for engines were read again"),
            Err(error) => tracing::error!(%error, "the certificates for engines stay as they were"),
        }
    }

    /// Frees what is booked and ends the child.
    pub async fn stop(&self) {
        if !self.router.close().await {
            tracing::warn!("the daemon did not take every report before the end; it frees the bookings by their age");
        }
        if let Some(daemon) = &self.daemon {
            daemon.stop().await;
        }
    }
}

/// Looks at the memory until `stop` says so, and keeps the cache empty while memory is short.
async fn watch_memory(memory: Arc<Memory>, tokeniser: Tokeniser, mut stop: watch::Receiver<bool>) {
    tokio::select! {
        () = memory.watch_resident(|| tokeniser.empty_cache()) => {}
        _ = stop.wait_for(|stops| *stops) => {}
    }
}

/// The engines of a configuration, one for each address where a URL asks for it.
async fn engine_set(configs: Vec<EngineConfig>, tls: &ClientTls) -> Result<Arc<EngineSet>, Failure> {
    let unusable = |error: EngineError| Failure::Usage(error.to_string());
    let mut all = Vec::with_capacity(configs.len());
    for config in configs {
        all.extend(expand_addresses(config).await.map_err(unusable)?);
    }
    EngineSet::of(all, tls).map(Arc::new).map_err(unusable)
}

async fn token_settings(
    tokens: &Tokens,
    tls: &ClientTls,
    stop: watch::Receiver<bool>,
) -> Result<TokenSettings, Failure> {
    let mut renderers = None;
    if !tokens.renderers.is_empty() {
        let configs = tokens.renderers.iter().zip(1..).map(|(url, number)| EngineConfig::new(number, url));
        let set = engine_set(configs.collect(), tls).await?;
        for (number, error) in set.learn_all(Instant::now() + ENGINES_READY_MAX).await {
            tracing::warn!(number, %error, "a renderer of tokens.renderers does not say what it is; it is asked again");
        }
        tokio::spawn(watch_engines(Arc::clone(&set), None, stop));
        renderers = Some(set);
    }
    let Tokens { uses_renderer, uses_tokenize, timeout, cache_bytes_max, .. } = *tokens;
    Ok(TokenSettings { cache_bytes_max, timeout, renderers, uses_renderer, uses_tokenize, local: None })
}

async fn start_daemon(
    options: DaemonOptions,
    starter: Option<DaemonStarter>,
    engines: &EngineSet,
) -> Result<Arc<DaemonProcess>, Failure> {
    let started = match starter {
        Some(starter) => DaemonProcess::start_on(starter, options, engines),
        None => DaemonProcess::start(options, engines),
    };
    let daemon = started.map_err(|error| match error {
        DaemonError::NoProgram { .. } => Failure::Usage(error.to_string()),
        error => Failure::Unavailable(error.to_string()),
    })?;
    // The supervisor goes on trying, and the router decides alone until then. Pods that do not run yet have no model.
    if daemon.state() == DaemonState::NoModels && engines.is_empty() {
        tracing::info!("there is no engine yet: the daemon is started with the first one");
    } else if let Err(error) = daemon.ready(Instant::now() + DAEMON_READY_MAX).await {
        tracing::error!("{error}");
    }
    Ok(Arc::new(daemon))
}

/// Keeps the engines' facts fresh, and passes changes on to the child, until `stop` says so.
async fn watch_engines(engines: Arc<EngineSet>, daemon: Option<Arc<DaemonProcess>>, mut stop: watch::Receiver<bool>) {
    let (mut changes, mut again) = (engines.changes(), tokio::time::interval(PLAN_INTERVAL));
    let learning = keep_learning(Arc::clone(&engines), ENGINES_LEARN_INTERVAL);
    let mut learning = std::pin::pin!(learning);
    loop {
        tokio::select! {
            () = &mut learning => return,
            _ = stop.wait_for(|stops| *stops) => return,
            changed = changes.changed() => {
                if changed.is_err() {
                    return;
                }
            }
            _ = again.tick() => {}
        }
        if let Some(daemon) = &daemon {
            daemon.update(&engines);
        }
    }
}

const _: () = assert!(ENGINES_LEARN_INTERVAL.as_millis() >= Duration::from_secs(1).as_millis());
