//! All engines: lookups by worker and by model, and the task that keeps their facts fresh.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::StatusCode;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::engine::{Engine, EngineConfig, EngineError, EngineRole};
use super::facts::{EngineFacts, ModelFacts};
use super::learn::LearnError;
use super::transport::ClientTls;
use crate::api::ApiError;
use crate::limits::{LEARN_AGAIN, LEARN_MAX, LEARNING_MAX};

/// What `model` of a body means.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ServedModel {
    /// The base model, by the first of its names: the model of the daemon's space.
    pub base: String,
    /// The LoRA adapter.
    pub lora: Option<String>,
}

/// All engines.
#[derive(Debug)]
pub struct EngineSet {
    engines: Vec<Arc<Engine>>,
    by_worker: HashMap<u64, usize>,
    changes: watch::Sender<u64>,
}

impl EngineSet {
    /// The engines of a configuration. Nothing is asked yet: see [`EngineSet::learn_all`].
    ///
    /// # Errors
    /// A URL, a key or a TLS file that cannot be used, or a worker id that two engines have.
    pub fn of(configs: Vec<EngineConfig>, tls: &ClientTls) -> Result<Self, EngineError> {
        let has_tls = configs.iter().any(|config| config.url.starts_with("https:"));
        let tls = tls.config(has_tls).map_err(|why| EngineError::BadTls { why })?;
        let mut by_worker = HashMap::with_capacity(configs.len());
        let mut engines = Vec::with_capacity(configs.len());
        for config in configs {
            let worker = config.worker;
            if by_worker.insert(worker, engines.len()).is_some() {
                return Err(EngineError::SameWorker { worker });
            }
            engines.push(Arc::new(Engine::new(config, &tls)?));
        }
        Ok(Self { engines, by_worker, changes: watch::Sender::new(0) })
    }

    /// The engine with this worker id.
    #[must_use]
    pub fn get(&self, worker: u64) -> Option<&Arc<Engine>> {
        self.by_worker.get(&worker).and_then(|index| self.engines.get(*index))
    }

    /// All engines in the order of the configuration.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Engine>> {
        self.engines.iter()
    }

    /// Whether an engine has a role other than `any`.
    #[must_use]
    pub fn has_roles(&self) -> bool {
        self.engines.iter().any(|engine| engine.config().role != EngineRole::Any)
    }

    /// The engines that serve a model, in the order of the configuration.
    pub fn serving<'a>(&'a self, model: &'a ServedModel) -> impl Iterator<Item = &'a Arc<Engine>> {
        let wanted = model.lora.as_ref().unwrap_or(&model.base);
        self.engines.iter().filter(move |engine| engine.facts().models.iter().any(|listed| listed.id == *wanted))
    }

    /// Tokens in a block of a model, if all engines that serve it agree.
    #[must_use]
    pub fn block_size(&self, model: &ServedModel) -> Option<u32> {
        let mut sizes = self.serving(model).map(|engine| engine.facts().block_size);
        let first = sizes.next()??;
        sizes.all(|size| size == Some(first)).then_some(first)
    }

    /// The base model of an engine, by the name that [`ServedModel::base`] has.
    #[must_use]
    pub fn base_of(&self, engine: &Engine) -> Option<String> {
        let facts = engine.facts();
        facts.base().map(|model| self.canonical(&model.id))
    }

    /// The base model and, for a LoRA adapter, its name: what `model` of a body means. Without a name: the one base
    /// model.
    ///
    /// # Errors
    /// 404 `model_not_found`; 400 if there is no name and there are several base models; 503 if no engine has answered
    /// yet.
    pub fn model(&self, name: Option<&str>) -> Result<ServedModel, ApiError> {
        if !self.engines.iter().any(|engine| engine.has_answered()) {
            let message = "no engine has answered yet which models it serves; try again";
            let status = StatusCode::SERVICE_UNAVAILABLE;
            return Err(ApiError::engine(status, "no_engine_ready", message).retry_after(1));
        }
        let Some(name) = name.filter(|name| !name.is_empty()) else { return self.only_model() };
        let not_found = || {
            let message = format!("the model {name:?} does not exist; GET /v1/models lists those that do");
            ApiError::caller(StatusCode::NOT_FOUND, "model_not_found", message)
        };
        self.find(name, |model| {
            let parent = model.parent.as_deref();
            let base = self.canonical(parent.unwrap_or(name));
            ServedModel { base, lora: parent.map(|_| name.to_owned()) }
        })
        .ok_or_else(not_found)
    }

    /// The model where a body names none.
    fn only_model(&self) -> Result<ServedModel, ApiError> {
        let bases: HashSet<_> = self.engines.iter().filter_map(|engine| self.base_of(engine)).collect();
        let mut bases = bases.into_iter();
        match (bases.next(), bases.next()) {
            (Some(base), None) => Ok(ServedModel { base, lora: None }),
            _ => {
                let message = "several models are served, so `model` is needed; GET /v1/models lists them";
                Err(ApiError::caller(StatusCode::BAD_REQUEST, "model_required", message))
            }
        }
    }

    /// The first engine's entry for a name.
    fn find<T>(&self, name: &str, with: impl FnOnce(&ModelFacts) -> T) -> Option<T> {
        let facts = self.engines.iter().map(|engine| engine.facts());
        let found = facts.into_iter().find_map(|facts: Arc<EngineFacts>| {
            let index = facts.models.iter().position(|model| model.id == name)?;
            Some((facts, index))
        });
        found.and_then(|(facts, index)| facts.models.get(index).map(with))
    }

    /// The first name of a base model: an engine lists all its names with one root.
    fn canonical(&self, name: &str) -> String {
        for engine in &self.engines {
            let facts = engine.facts();
            let Some(model) = facts.models.iter().find(|model| model.id == name && model.parent.is_none()) else {
                continue;
            };
            let is_alias =
                |other: &&ModelFacts| other.parent.is_none() && other.root.is_some() && other.root == model.root;
            return facts.models.iter().find(is_alias).unwrap_or(model).id.clone();
        }
        name.to_owned()
    }

    /// Asks all engines what they are, several at once. Engines that cannot be asked are returned with the reason.
    pub async fn learn_all(&self, deadline: Instant) -> Vec<(u64, LearnError)> {
        let mut failed = Vec::new();
        let mut has_changed = false;
        let mut waiting = self.engines.iter();
        let mut asking = JoinSet::new();
        loop {
            for engine in waiting.by_ref().take(LEARNING_MAX - asking.len()) {
                let engine = engine.clone();
                asking.spawn(async move {
                    let answer = engine.learn(deadline.min(Instant::now() + LEARN_MAX)).await;
                    (engine, answer)
                });
            }
            match asking.join_next().await {
                None => break,
                Some(Ok((_, Ok(engine_changed)))) => has_changed |= engine_changed,
                Some(Ok((engine, Err(error)))) => {
                    if error.is_down() {
                        engine.failed(Instant::now(), &error.to_string());
                    }
                    failed.push((engine.worker(), error));
                }
                Some(Err(error)) => tracing::error!(%error, "a question to an engine ended without an answer"),
            }
        }
        if has_changed {
            self.changes.send_modify(|generation| *generation += 1);
        }
        failed.sort_by_key(|(worker, _)| *worker);
        failed
    }

    /// A number that grows with each change of any engine's facts.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// New connections trust these authorities; the file is read again. Connections in use stay.
    ///
    /// # Errors
    /// A file that cannot be used. The engines keep what they had.
    pub fn reload_tls(&self, tls: &ClientTls) -> Result<(), EngineError> {
        let has_tls = self.engines.iter().any(|engine| engine.base().scheme_str() == Some("https"));
        let tls = tls.config(has_tls).map_err(|why| EngineError::BadTls { why })?;
        self.engines.iter().try_for_each(|engine| engine.set_tls(&tls))
    }

    /// The reply of `GET /v1/models`: every model of every engine once. `max_model_len` is the least of its engines'.
    #[must_use]
    pub fn merged_models_json(&self) -> String {
        let mut order = Vec::new();
        let mut merged: BTreeMap<String, ModelFacts> = BTreeMap::new();
        for engine in &self.engines {
            for model in &engine.facts().models {
                let Some(known) = merged.get_mut(&model.id) else {
                    order.push(model.id.clone());
                    merged.insert(model.id.clone(), model.clone());
                    continue;
                };
                known.created = known.created.min(model.created);
                known.tokens_max = match (known.tokens_max, model.tokens_max) {
                    (Some(known), Some(other)) => Some(known.min(other)),
                    (known, other) => known.or(other),
                };
            }
        }
        let card = |model: &ModelFacts| {
            serde_json::json!({
                "id": model.id, "object": "model", "created": model.created, "owned_by": model.owned_by,
                "root": model.root, "parent": model.parent, "max_model_len": model.tokens_max,
            })
        };
        let data: Vec<_> = order.iter().filter_map(|id| merged.get(id)).map(card).collect();
        serde_json::json!({ "object": "list", "data": data }).to_string()
    }
}

/// Asks all engines again at an interval, for ever: models come and go, adapters are loaded, engines restart with other
/// arguments. Engines that have never answered are asked more often.
pub async fn keep_learning(engines: Arc<EngineSet>, interval: Duration) {
    let mut told: HashMap<u64, String> = HashMap::new();
    loop {
        let all_known = engines.iter().all(|engine| engine.has_answered());
        tokio::time::sleep(if all_known { interval } else { interval.min(LEARN_AGAIN) }).await;
        let failed = engines.learn_all(Instant::now() + LEARN_MAX * 4).await;
        let workers: HashSet<u64> = failed.iter().map(|(worker, _)| *worker).collect();
        told.retain(|worker, _| workers.contains(worker));
        for (worker, error) in failed {
            let text = error.to_string();
            if told.get(&worker) != Some(&text) {
                tracing::warn!(worker, %error, "the engine does not answer what it is; it is asked again");
                told.insert(worker, text);
            }
        }
    }
}
