//! All engines: lookups by worker and by model, engines that come and go, and the task that keeps their facts fresh.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use hyper::StatusCode;
use rustls::ClientConfig;
use tokio::sync::{Notify, watch};
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

/// An engine that a source of engines wants in the set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedEngine {
    /// The engine.
    pub config: EngineConfig,
    /// Whether new requests may go to it. An engine that is ending, or not ready for a while, only finishes its own.
    pub takes_requests: bool,
}

/// All engines.
#[derive(Debug)]
pub struct EngineSet {
    members: ArcSwap<Members>,
    tls: ArcSwap<ClientConfig>,
    changes: watch::Sender<u64>,
    /// An engine came that has not been asked yet.
    arrival: Notify,
}

/// The engines at one moment.
#[derive(Debug, Default)]
struct Members {
    engines: Vec<Arc<Engine>>,
    by_worker: HashMap<u64, usize>,
}

impl Members {
    /// Adds an engine. `false` = another one has its worker id.
    fn add(&mut self, engine: Arc<Engine>) -> bool {
        let is_new = !self.by_worker.contains_key(&engine.worker());
        if is_new {
            self.by_worker.insert(engine.worker(), self.engines.len());
            self.engines.push(engine);
        }
        is_new
    }

    fn get(&self, worker: u64) -> Option<&Arc<Engine>> {
        self.by_worker.get(&worker).and_then(|index| self.engines.get(*index))
    }
}

impl EngineSet {
    /// The engines of a configuration. Nothing is asked yet: see [`EngineSet::learn_all`].
    ///
    /// # Errors
    /// A URL, a key or a TLS file that cannot be used, or a worker id that two engines have.
    pub fn of(configs: Vec<EngineConfig>, tls: &ClientTls) -> Result<Self, EngineError> {
        let has_tls = configs.iter().any(|config| config.url.starts_with("https:"));
        let tls = tls.config(has_tls).map_err(|why| EngineError::BadTls { why })?;
        let mut members = Members::default();
        for config in configs {
            let worker = config.worker;
            if !members.add(Arc::new(Engine::new(config, &tls)?)) {
                return Err(EngineError::SameWorker { worker });
            }
        }
        let (changes, arrival) = (watch::Sender::new(0), Notify::new());
        Ok(Self { members: ArcSwap::from_pointee(members), tls: ArcSwap::new(tls), changes, arrival })
    }

    /// Makes the set hold these engines, in this order. An engine whose configuration is the same stays as it is, with
    /// its facts, its health and its requests. Requests of an engine that goes end as they would have.
    ///
    /// Returns why engines are left out: an unusable URL, or the worker id of an earlier one.
    pub fn replace(&self, wanted: Vec<WantedEngine>) -> Vec<EngineError> {
        let (before, tls) = (self.members.load_full(), self.tls.load_full());
        let (mut members, mut problems) = (Members::default(), Vec::new());
        let (mut has_new, mut has_changed) = (false, false);
        for WantedEngine { config, takes_requests } in wanted {
            let worker = config.worker;
            let known = before.get(worker).filter(|engine| *engine.config() == config);
            let engine = match known {
                Some(engine) => Arc::clone(engine),
                None => match Engine::new(config, &tls) {
                    Ok(engine) => Arc::new(engine),
                    Err(error) => {
                        problems.push(error);
                        continue;
                    }
                },
            };
            if !members.add(Arc::clone(&engine)) {
                problems.push(EngineError::SameWorker { worker });
                continue;
            }
            has_new |= known.is_none();
            has_changed |= engine.set_takes_requests(takes_requests);
        }
        has_changed |= has_new || members.engines.len() != before.engines.len();
        if has_changed {
            self.members.store(Arc::new(members));
            self.changes.send_modify(|generation| *generation += 1);
        }
        if has_new {
            self.arrival.notify_one();
        }
        problems
    }

    /// The engine with this worker id.
    #[must_use]
    pub fn get(&self, worker: u64) -> Option<Arc<Engine>> {
        self.members.load().get(worker).cloned()
    }

    /// All engines at this moment, in the order of the configuration.
    pub fn iter(&self) -> impl Iterator<Item = Arc<Engine>> + use<> {
        let members = self.members.load_full();
        (0..members.engines.len()).map(move |index| Arc::clone(&members.engines[index]))
    }

    /// Whether there is no engine.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.members.load().engines.is_empty()
    }

    /// Whether an engine has a role other than `any`.
    #[must_use]
    pub fn has_roles(&self) -> bool {
        self.iter().any(|engine| engine.config().role != EngineRole::Any)
    }

    /// The engines that serve a model and take requests, in the order of the configuration.
    pub fn serving<'a>(&'a self, model: &'a ServedModel) -> impl Iterator<Item = Arc<Engine>> + use<'a> {
        let wanted = model.lora.as_ref().unwrap_or(&model.base);
        let serves = move |engine: &Arc<Engine>| engine.facts().models.iter().any(|listed| listed.id == *wanted);
        self.iter().filter(move |engine| engine.takes_requests() && serves(engine))
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
        if !self.iter().any(|engine| engine.has_answered()) {
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
        let bases: HashSet<_> = self.iter().filter_map(|engine| self.base_of(&engine)).collect();
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
        let mut facts = self.iter().map(|engine| engine.facts());
        let found = facts.find_map(|facts: Arc<EngineFacts>| {
            let index = facts.models.iter().position(|model| model.id == name)?;
            Some((facts, index))
        });
        found.and_then(|(facts, index)| facts.models.get(index).map(with))
    }

    /// The first name of a base model: an engine lists all its names with one root.
    fn canonical(&self, name: &str) -> String {
        for engine in self.iter() {
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
        self.learn(deadline, |_| true).await
    }

    /// Asks some engines. Those that take no requests are not asked: a server that ends answers nothing.
    async fn learn(&self, deadline: Instant, asks: impl Fn(&Engine) -> bool) -> Vec<(u64, LearnError)> {
        let mut failed = Vec::new();
        let mut has_changed = false;
        let mut waiting = self.iter().filter(|engine| engine.takes_requests() && asks(engine));
        let mut asking = JoinSet::new();
        loop {
            for engine in waiting.by_ref().take(LEARNING_MAX - asking.len()) {
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

    /// A number that grows with each change of the engines and of their facts.
    #[must_use]
    pub fn generation(&self) -> u64 {
        *self.changes.borrow()
    }

    /// A channel with the same number, which tells of each change.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// New connections trust these authorities; the file is read again. Connections in use stay.
    ///
    /// # Errors
    /// A file that cannot be used. The engines keep what they had.
    pub fn reload_tls(&self, tls: &ClientTls) -> Result<(), EngineError> {
        let has_tls = self.iter().any(|engine| engine.base().scheme_str() == Some("https"));
        let tls = tls.config(has_tls).map_err(|why| EngineError::BadTls { why })?;
        self.iter().try_for_each(|engine| engine.set_tls(&tls))?;
        self.tls.store(tls);
        Ok(())
    }

    /// The reply of `GET /v1/models`: every model of every engine once. `max_model_len` is the least of its engines'.
    #[must_use]
    pub fn merged_models_json(&self) -> String {
        let mut order = Vec::new();
        let mut merged: BTreeMap<String, ModelFacts> = BTreeMap::new();
        for engine in self.iter() {
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
/// arguments. Engines that have never answered are asked more often, and new ones at once.
pub async fn keep_learning(engines: Arc<EngineSet>, interval: Duration) {
    let mut told: HashMap<u64, String> = HashMap::new();
    let mut asks_all_at = Instant::now() + interval;
    loop {
        let all_known = engines.iter().all(|engine| engine.has_answered() || !engine.takes_requests());
        let rest = asks_all_at.saturating_duration_since(Instant::now());
        tokio::select! {
            () = tokio::time::sleep(if all_known { rest } else { rest.min(LEARN_AGAIN) }) => {}
            () = engines.arrival.notified() => {}
        }
        let asks_all = Instant::now() >= asks_all_at;
        let failed = engines.learn(Instant::now() + LEARN_MAX * 4, |engine| asks_all || !engine.has_answered()).await;
        if asks_all {
            asks_all_at = Instant::now() + interval;
        }
        let workers: HashSet<u64> = failed.iter().map(|(worker, _)| *worker).collect();
        let was_asked = |worker| asks_all || engines.get(worker).is_none_or(|engine| !engine.has_answered());
        told.retain(|worker, _| workers.contains(worker) || !was_asked(*worker));
        for (worker, error) in failed {
            let text = error.to_string();
            if told.get(&worker) != Some(&text) {
                tracing::warn!(worker, %error, "the engine does not answer what it is; it is asked again");
                told.insert(worker, text);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(worker: u64, url: &str, takes_requests: bool) -> WantedEngine {
        WantedEngine { config: EngineConfig::new(worker, url), takes_requests }
    }

    #[test]
    fn engines_come_and_go_and_those_that_stay_keep_their_state() {
        let set = EngineSet::of(Vec::new(), &ClientTls::default()).expect("no engine");
        let changes = set.changes();
        assert!(set.is_empty() && set.iter().next().is_none());
        let [one, two] = ["http://10.0.0.1:8000", "http://10.0.0.2:8000"];
        assert!(set.replace(vec![wanted(1, one, true), wanted(2, two, true)]).is_empty());
        let first = set.get(1).expect("engine 1");
        let running = first.enter();
        assert_eq!(*changes.borrow(), 1);
        set.replace(vec![wanted(1, one, true), wanted(2, two, true)]);
        assert_eq!(*changes.borrow(), 1, "nothing has changed");
        set.replace(vec![wanted(1, one, false), wanted(2, two, true)]);
        assert!(!first.takes_requests() && first.inflight() == 1 && *changes.borrow() == 2);
        set.replace(vec![wanted(1, one, true), wanted(2, "http://10.0.0.3:8000", true)]);
        assert!(Arc::ptr_eq(&first, &set.get(1).expect("it stays")) && first.takes_requests());
        assert_eq!(set.get(2).expect("at another address").base().host(), Some("10.0.0.3"));
        set.replace(vec![wanted(2, two, true)]);
        assert!(set.get(1).is_none() && *changes.borrow() == 4);
        drop(running);
        assert_eq!(first.inflight(), 0, "its requests ended as they would have");
    }

    #[test]
    fn what_cannot_be_an_engine_is_left_out_and_the_others_stay() {
        let set = EngineSet::of(Vec::new(), &ClientTls::default()).expect("no engine");
        let list = vec![wanted(1, "http://a:1", true), wanted(1, "http://b:1", true), wanted(2, "nonsense", true)];
        let problems: Vec<String> = set.replace(list).iter().map(ToString::to_string).collect();
        assert!(problems[0].contains("two engines have the worker id 1") && problems[1].contains("nonsense"));
        assert_eq!(set.iter().map(|engine| engine.worker()).collect::<Vec<_>>(), [1]);
    }
}
