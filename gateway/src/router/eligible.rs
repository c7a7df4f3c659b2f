//! The engines that may run a request, and an order among them that needs no daemon.

use std::sync::Arc;
use std::time::Instant;

use hyper::StatusCode;
use kvrouted::ids::{Worker, WorkerId};

use super::Ask;
use crate::api::ApiError;
use crate::engines::{Engine, EngineFacts, EngineRole, ServedModel};

/// An engine at one moment.
#[derive(Clone, Debug)]
pub(super) struct EngineView {
    pub(super) engine: u64,
    pub(super) role: EngineRole,
    pub(super) facts: Arc<EngineFacts>,
    pub(super) takes_requests: bool,
    pub(super) is_usable: bool,
    pub(super) inflight: usize,
}

impl EngineView {
    pub(super) fn of(engine: &Engine, now: Instant) -> Self {
        Self {
            engine: engine.worker(),
            role: engine.config().role,
            facts: engine.facts(),
            takes_requests: engine.takes_requests(),
            is_usable: engine.is_usable(now),
            inflight: engine.inflight(),
        }
    }

    fn lists(&self, name: &str) -> bool {
        self.facts.models.iter().any(|model| model.id == name)
    }

    fn workers(&self) -> Vec<Worker> {
        let ranks = self.facts.ranks.iter().map(|source| Worker::new(self.engine, source.rank));
        let workers: Vec<_> = ranks.collect();
        if workers.is_empty() { vec![Worker::new(self.engine, 0)] } else { workers }
    }
}

/// The engines that may run a request; never empty.
#[derive(Clone, Debug)]
pub(super) struct Eligible {
    views: Vec<EngineView>,
    /// Whether an engine of the model was left out, so that the daemon needs an allow-list.
    pub(super) is_narrowed: bool,
}

impl Eligible {
    /// The engines that serve the request's model, without those that failed for it, those that its subset does not
    /// name, those that are ending, and those that back off, unless all do. For a request on two engines: those that
    /// decode. For a whole request: those for whole requests, or decode engines if there are no others.
    ///
    /// # Errors
    /// 404 if no engine serves the model, 503 if none of those that do may run the request.
    pub(super) fn among(all: impl Iterator<Item = EngineView>, ask: &Ask<'_>) -> Result<Self, ApiError> {
        let fits = |role| role == EngineRole::Decode || role == EngineRole::Any && !ask.disaggregate;
        let mut views: Vec<EngineView> = all.filter(|view| fits(view.role) && view.lists(&ask.model.base)).collect();
        if views.is_empty() {
            return Err(unknown_model(ask.model));
        }
        let has_ending = views.iter().any(|view| !view.takes_requests);
        views.retain(|view| view.takes_requests);
        if views.is_empty() {
            let text = format!("every engine of {:?} is ending or not ready", ask.model.base);
            return Err(ApiError::engine(StatusCode::SERVICE_UNAVAILABLE, "engines_not_ready", text).retry_after(1));
        }
        let is_allowed =
            |view: &EngineView| ask.allow.is_none_or(|allow| allow.iter().any(|worker| worker.id.0 == view.engine));
        views.retain(is_allowed);
        if views.is_empty() {
            let text = format!("no engine of {:?} is in the subset that the request names", ask.model.base);
            return Err(ApiError::gateway(StatusCode::SERVICE_UNAVAILABLE, "subset_empty", text));
        }
        prefer(&mut views, |view| view.role == EngineRole::Any);
        let serving = views.len();
        views.retain(|view| !ask.exclude.contains(&view.engine));
        if views.is_empty() {
            let text = format!("every engine of {:?} failed for this request", ask.model.base);
            return Err(ApiError::engine(StatusCode::SERVICE_UNAVAILABLE, "engines_failed", text).retry_after(1));
        }
        prefer(&mut views, |view| ask.model.lora.as_deref().is_none_or(|lora| view.lists(lora)));
        prefer(&mut views, |view| view.is_usable);
        let is_narrowed = ask.allow.is_some() || has_ending || views.len() < serving;
        Ok(Self { views, is_narrowed })
    }

    /// The engines that may prefill the request, without those that failed for it or back off; `None` = there is none.
    pub(super) fn to_prefill(all: impl Iterator<Item = EngineView>, ask: &Ask<'_>) -> Option<Self> {
        let may = |view: &EngineView| {
            let is_left = view.takes_requests && view.is_usable && !ask.exclude.contains(&view.engine);
            view.role == EngineRole::Prefill && is_left && view.lists(&ask.model.base)
        };
        let mut views: Vec<EngineView> = all.filter(may).collect();
        prefer(&mut views, |view| ask.model.lora.as_deref().is_none_or(|lora| view.lists(lora)));
        (!views.is_empty()).then_some(Self { views, is_narrowed: true })
    }

    /// Whether they are decode engines.
    pub(super) fn only_decode(&self) -> bool {
        self.views.iter().all(|view| view.role == EngineRole::Decode)
    }

    /// Whether an engine may run the request.
    pub(super) fn has(&self, id: WorkerId) -> bool {
        self.views.iter().any(|view| view.engine == id.0)
    }

    /// Tokens in a block of an engine, as the engine says.
    pub(super) fn block_size(&self, id: WorkerId) -> Option<u32> {
        self.views.iter().find(|view| view.engine == id.0).and_then(|view| view.facts.block_size)
    }

    /// The allow-list for the daemon: the workers of `asked` on eligible engines, or every rank of these engines.
    pub(super) fn allow_list(&self, asked: Option<&[Worker]>) -> Vec<Worker> {
        match asked {
            Some(asked) => asked.iter().copied().filter(|worker| self.has(worker.id)).collect(),
            None => self.views.iter().map(|view| Worker::every_rank(WorkerId(view.engine))).collect(),
        }
    }

    /// The workers of eligible engines, those of the engine with the fewest requests in flight first. Equal engines
    /// take turns, by `count`.
    pub(super) fn by_load(&self, asked: Option<&[Worker]>, count: usize) -> Vec<Worker> {
        let mut views: Vec<&EngineView> = self.views.iter().collect();
        views.rotate_left(count % self.views.len().max(1));
        views.sort_by_key(|view| view.inflight);
        let selects = |worker: &Worker| asked.is_none_or(|asked| asked.iter().any(|one| one.selects(*worker)));
        let rotated = |view: &&EngineView| {
            let mut workers = view.workers();
            let at = count / self.views.len().max(1) % workers.len().max(1);
            workers.rotate_left(at);
            workers
        };
        views.iter().flat_map(rotated).filter(selects).collect()
    }
}

/// Keeps what `holds` for, unless it holds for none.
fn prefer(views: &mut Vec<EngineView>, holds: impl Fn(&EngineView) -> bool) {
    if views.iter().any(&holds) {
        views.retain(holds);
    }
}

fn unknown_model(model: &ServedModel) -> ApiError {
    let text = format!("no engine serves the model {:?}", model.base);
    ApiError::caller(StatusCode::NOT_FOUND, "model_not_found", text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engines::{Dialect, ModelFacts, RankSource, RenderSupport};
    use crate::tokens::PromptTokens;

    fn model(id: &str, parent: Option<&str>) -> ModelFacts {
        let parent = parent.map(str::to_owned);
        ModelFacts { id: id.to_owned(), parent, root: None, tokens_max: None, created: 0, owned_by: None }
    }

    fn view(engine: u64, inflight: usize) -> EngineView {
        let rank = |rank| RankSource { rank, endpoint: None, replay: None, topic: String::new() };
        let facts = EngineFacts {
            dialect: Dialect::Vllm,
            version: None,
            models: vec![model("m", None)],
            block_size: Some(16),
            ranks: vec![rank(0), rank(1)],
            renders: RenderSupport::default(),
            bootstrap_port: None,
            problems: Vec::new(),
        };
        EngineView {
            engine,
            role: EngineRole::Any,
            facts: Arc::new(facts),
            takes_requests: true,
            is_usable: true,
            inflight,
        }
    }

    fn with_adapter(view: &EngineView) -> EngineView {
        let mut facts = EngineFacts::clone(&view.facts);
        facts.models.push(model("tuned", Some("m")));
        EngineView { facts: Arc::new(facts), ..view.clone() }
    }

    /// The engines that may run a request, and whether the daemon needs an allow-list.
    fn eligible(
        views: &[EngineView],
        lora: Option<&str>,
        allow: Option<&[Worker]>,
        exclude: &[u64],
    ) -> Result<(Vec<u64>, bool), ApiError> {
        let model = ServedModel { base: "m".to_owned(), lora: lora.map(str::to_owned) };
        let prompt = PromptTokens::none("a test", None);
        let ask = Ask {
            model: &model,
            prompt: &prompt,
            request_id: "r",
            output_tokens: None,
            priority: 0,
            session: None,
            tenant: None,
            trace: None,
            allow,
            exclude,
            deadline: Instant::now(),
            disaggregate: false,
        };
        let found = Eligible::among(views.iter().cloned(), &ask)?;
        Ok((found.views.iter().map(|view| view.engine).collect(), found.is_narrowed))
    }

    #[test]
    fn failed_engines_are_left_out_and_those_that_back_off_unless_all_do() {
        let down = |view: EngineView| EngineView { is_usable: false, ..view };
        let views = [view(1, 0), view(2, 0), down(view(3, 0))];
        assert_eq!(eligible(&views[..2], None, None, &[]), Ok((vec![1, 2], false)));
        assert_eq!(eligible(&views, None, None, &[]), Ok((vec![1, 2], true)));
        assert_eq!(eligible(&views, None, None, &[1, 2]), Ok((vec![3], true)), "better than none");
        let error = eligible(&views, None, None, &[1, 2, 3]).unwrap_err();
        assert_eq!((error.status.as_u16(), error.code), (503, "engines_failed"));
    }

    #[test]
    fn an_engine_that_is_ending_gets_no_request_even_if_no_other_is_left() {
        let ending = |view: EngineView| EngineView { takes_requests: false, ..view };
        assert_eq!(eligible(&[ending(view(1, 0)), view(2, 0)], None, None, &[]), Ok((vec![2], true)));
        let error = eligible(&[ending(view(1, 0))], None, None, &[]).unwrap_err();
        assert_eq!((error.status.as_u16(), error.code), (503, "engines_not_ready"));
    }

    #[test]
    fn a_subset_is_strict() {
        let views = [view(1, 0), view(2, 0)];
        let worker = Worker::new(2, 1);
        assert_eq!(eligible(&views, None, Some(&[worker]), &[]), Ok((vec![2], true)));
        assert_eq!(eligible(&views, None, Some(&[]), &[]).unwrap_err().code, "subset_empty");
        assert_eq!(eligible(&views, None, Some(&[Worker::new(9, 0)]), &[]).unwrap_err().code, "subset_empty");
        let all = Eligible { views: views.to_vec(), is_narrowed: true };
        assert_eq!(all.allow_list(Some(&[worker, Worker::new(9, 0)])), [worker]);
        assert_eq!(all.by_load(Some(&[worker]), 0), [worker]);
        assert_eq!(all.allow_list(None), [Worker::every_rank(WorkerId(1)), Worker::every_rank(WorkerId(2))]);
    }

    #[test]
    fn an_adapter_is_run_where_it_is_loaded_and_prefill_engines_run_no_request() {
        let views = [view(1, 0), with_adapter(&view(2, 0))];
        assert_eq!(eligible(&views, Some("tuned"), None, &[]), Ok((vec![2], true)));
        assert_eq!(eligible(&views, Some("elsewhere"), None, &[]), Ok((vec![1, 2], false)));
        let decode = EngineView { role: EngineRole::Decode, ..view(4, 0) };
        assert_eq!(eligible(&[views[0].clone(), decode.clone()], None, None, &[]), Ok((vec![1], false)));
        assert_eq!(eligible(&[decode], None, None, &[]), Ok((vec![4], false)), "better than none");
        let prefill = EngineView { role: EngineRole::Prefill, ..view(3, 0) };
        let error = eligible(&[prefill], None, None, &[]).unwrap_err();
        assert_eq!((error.status.as_u16(), error.code), (404, "model_not_found"));
    }

    #[test]
    fn without_a_daemon_the_least_loaded_engine_is_first_and_equals_take_turns() {
        let found = Eligible { views: vec![view(1, 2), view(2, 0), view(3, 0)], is_narrowed: false };
        let engines = |count| found.by_load(None, count).iter().map(|worker| worker.id.0).collect::<Vec<_>>();
        assert_eq!((engines(0), engines(2)), (vec![2, 2, 3, 3, 1, 1], vec![3, 3, 2, 2, 1, 1]));
        let first = |count| found.by_load(None, count)[0].rank.0;
        assert_eq!((first(0), first(3)), (0, 1), "the ranks take turns too");
    }
}
