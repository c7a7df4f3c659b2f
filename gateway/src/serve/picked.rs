//! The picker's questions, answered by the core: tokens, then the router's decision, then the workers' addresses.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use hyper::StatusCode;
use hyper::header::{HeaderMap, HeaderValue};
use kvrouted::ids::Worker;

use super::Core;
use crate::api::{ApiError, ApiPath, CallKind, RequestFacts, UsageReader, read_request, refuse_transfer_fields};
use crate::engines::ServedModel;
use crate::epp::{Choice, Chooser, Decision, EndpointTable, Endpoints, Lease, Question, ResponseStart, names, nobody};
use crate::parity::Prediction;
use crate::proxy::{Hints, OVERLAP_TOKENS, WORKER};
use crate::router::{Ask, BookingGuard, Pick};
use crate::tokens::PromptTokens;

/// What the configuration says of answers.
pub(super) struct PickRules {
    /// The priority of each objective that callers may name.
    pub(super) objectives: BTreeMap<String, i32>,
    /// The most endpoints in a list.
    pub(super) list_length: usize,
    /// Whether responses name the worker, and the tokens that it should have cached.
    pub(super) tells_worker: bool,
}

/// Chooses by the core.
pub(super) struct CoreChooser {
    core: Arc<Core>,
    rules: PickRules,
    endpoints: Endpoints,
    /// Calls without a prompt go round the engines.
    next: AtomicUsize,
}

/// A request on its way. Without a booking for calls without a prompt, and while the daemon does not answer.
pub(super) struct CoreLease {
    core: Arc<Core>,
    path: ApiPath,
    model: Option<ServedModel>,
    prompt: Option<PromptTokens>,
    booking: Option<BookingGuard>,
    predictions: Vec<Prediction>,
    table: Arc<EndpointTable>,
    /// What Envoy was told, best first.
    listed: Vec<(Worker, SocketAddr)>,
    served: Option<Worker>,
    has_answered: bool,
    tells_worker: bool,
    reader: Option<UsageReader>,
}

impl CoreChooser {
    /// Chooses among `endpoints`.
    #[must_use]
    pub(super) const fn new(core: Arc<Core>, rules: PickRules, endpoints: Endpoints) -> Self {
        Self { core, rules, endpoints, next: AtomicUsize::new(0) }
    }

    async fn generate(&self, question: &Question) -> Result<Choice<CoreLease>, ApiError> {
        let facts = read_request(question.path, &question.body)?;
        if self.core.engines().has_roles() {
            refuse_transfer_fields(&question.body)?;
        }
        let hints = Hints::read(&hint_headers(question), &self.rules.objectives)?;
        let model = self.core.engines().model(facts.model.as_deref())?;
        let tokeniser = self.core.tokeniser();
        let prompt = tokeniser.tokens(question.path, &facts, &model, &question.body, question.deadline).await;
        let table = self.endpoints.now();
        let (pick, listed) = self.pick(question, &facts, &hints, &model, &prompt, &table).await?;
        let decision = self.decision(&table, &listed);
        let listed = listed.into_iter().filter(|(_, address)| decision.endpoints.contains(address)).collect();
        let lease = CoreLease {
            core: Arc::clone(&self.core),
            path: question.path,
            model: Some(model),
            prompt: Some(prompt),
            booking: pick.booking,
            predictions: pick.predictions,
            table,
            listed,
            served: None,
            has_answered: false,
            tells_worker: self.rules.tells_worker,
            reader: None,
        };
        Ok(Choice { decision, lease })
    }

    /// Asks the router; again, and only for workers with an endpoint, if none that it chose has one.
    async fn pick(
        &self,
        question: &Question,
        facts: &RequestFacts,
        hints: &Hints,
        model: &ServedModel,
        prompt: &PromptTokens,
        table: &EndpointTable,
    ) -> Result<(Pick, Vec<(Worker, SocketAddr)>), ApiError> {
        let mut allow = question.subset.as_ref().map(|subset| table.workers(Some(subset)));
        loop {
            if allow.as_ref().is_some_and(Vec::is_empty) {
                return Err(self.nobody(question, table));
            }
            let ask = Ask {
                model,
                prompt,
                request_id: question.headers.text("x-request-id").unwrap_or_default(),
                output_tokens: facts.output_tokens_max,
                priority: hints.priority,
                session: hints.session.as_deref(),
                tenant: hints.tenant.as_deref(),
                trace: hints.trace,
                allow: allow.as_deref(),
                exclude: &[],
                deadline: question.deadline,
                disaggregate: false,
            };
            let pick = self.core.router().pick(&ask).await?;
            let listed = placed(&pick.candidates, table);
            if !listed.is_empty() {
                return Ok((pick, listed));
            }
            if allow.is_some() {
                return Err(self.nobody(question, table));
            }
            drop(pick); // and its booking
            allow = Some(table.workers(None));
        }
    }

    fn nobody(&self, question: &Question, table: &EndpointTable) -> ApiError {
        match &question.subset {
            Some(subset) if subset.unreadable() > 0 => nobody(
                "the gateway's subset of endpoints has entries that are no addresses, and no other endpoint is in it",
            ),
            Some(_) => nobody("no endpoint of the gateway's subset may run this request"),
            None if table.is_empty() => {
                nobody("the endpoint picker knows no endpoint; see /findings, or name some by --endpoint")
            }
            None => nobody("no worker that may run this request has an endpoint; see --endpoint"),
        }
    }

    /// The list, and the header that names a rank where one port serves several.
    ///
    /// Envoy sends the same headers to every endpoint of the list, so the others must want the same rank.
    fn decision(&self, table: &EndpointTable, listed: &[(Worker, SocketAddr)]) -> Decision {
        let rank = |worker: Worker| {
            let is_shared = table.place(worker).is_some_and(|place| place.is_shared);
            let ranks = self.core.engines().get(worker.id.0).map_or(0, |engine| engine.facts().ranks.len());
            (is_shared && ranks > 1).then_some(worker.rank.0)
        };
        let Some((best, _)) = listed.first() else { return Decision::default() };
        let wanted = rank(*best);
        let mut endpoints: Vec<SocketAddr> = Vec::with_capacity(self.rules.list_length);
        for (worker, address) in listed {
            if endpoints.len() < self.rules.list_length && rank(*worker) == wanted && !endpoints.contains(address) {
                endpoints.push(*address);
            }
        }
        let headers = wanted.map(|rank| (names::DATA_PARALLEL_RANK.to_owned(), rank.to_string()));
        Decision { endpoints, headers: headers.into_iter().collect() }
    }

    /// A call without a prompt: any engine that is usable and, if the body names a model, serves it.
    fn any(&self, question: &Question) -> Result<Choice<CoreLease>, ApiError> {
        let table = self.endpoints.now();
        let engines = self.core.engines();
        let model = (question.path.kind() == CallKind::Stateless)
            .then(|| read_request(question.path, &question.body).ok())
            .flatten()
            .map(|facts| engines.model(facts.model.as_deref()))
            .transpose()?;
        let now = Instant::now();
        let may = |worker: &Worker, is_picky: bool| {
            let Some(engine) = engines.get(worker.id.0) else { return !is_picky };
            let serves = model
                .as_ref()
                .is_none_or(|model| engines.serving(model).any(|serving| serving.worker() == engine.worker()));
            serves && (!is_picky || engine.is_usable(now))
        };
        // Selectors name ranks that do not exist where one port serves all; rank 0 always does.
        let workers = table.workers(question.subset.as_ref());
        let first_rank = |selector: &Worker| match table.place(*selector) {
            Some(place) if place.is_shared => Worker::new(selector.id.0, 0),
            _ => *selector,
        };
        let mut able: Vec<Worker> = workers.iter().filter(|worker| may(worker, true)).map(first_rank).collect();
        if able.is_empty() {
            able = workers.iter().filter(|worker| may(worker, false)).map(first_rank).collect();
        }
        if able.is_empty() {
            return Err(self.nobody(question, &table));
        }
        let turn = self.next.fetch_add(1, Ordering::Relaxed) % able.len();
        able.rotate_left(turn);
        let mut listed = placed(&able, &table);
        listed.truncate(self.rules.list_length);
        let endpoints = listed.iter().map(|(_, address)| *address).collect();
        let lease = CoreLease {
            core: Arc::clone(&self.core),
            path: question.path,
            model,
            prompt: None,
            booking: None,
            predictions: Vec::new(),
            table,
            listed,
            served: None,
            has_answered: false,
            tells_worker: false,
            reader: None,
        };
        Ok(Choice { decision: Decision { endpoints, headers: Vec::new() }, lease })
    }
}

impl Chooser for CoreChooser {
    type Lease = CoreLease;

    async fn choose(&self, question: Question) -> Result<Choice<CoreLease>, ApiError> {
        match question.path.kind() {
            CallKind::Generate => self.generate(&question).await,
            CallKind::Stateless | CallKind::Models | CallKind::Unknown => self.any(&question),
        }
    }
}

/// The candidates that have an endpoint.
fn placed(candidates: &[Worker], table: &EndpointTable) -> Vec<(Worker, SocketAddr)> {
    candidates.iter().filter_map(|worker| Some((*worker, table.place(*worker)?.address))).collect()
}

/// The part of a list that Envoy tried before the worker that served. A worker from outside the list says nothing about those
/// in it: Envoy chooses by itself where it does not have their endpoints.
fn passed_over(listed: &[(Worker, SocketAddr)], served: Worker) -> &[(Worker, SocketAddr)] {
    &listed[..listed.iter().position(|(worker, _)| *worker == served).unwrap_or(0)]
}

impl CoreLease {
    /// The worker at the endpoint that served. Among the ranks of one port it is the one that was chosen.
    fn worker_at(&self, address: &SocketAddr) -> Option<Worker> {
        let listed = self.listed.iter().find(|(_, listed)| listed == address).map(|(worker, _)| *worker);
        listed.or_else(|| self.table.worker(address))
    }

    /// The worker that serves. Without a report of it, only a list of one is certain.
    fn worker(&self) -> Option<Worker> {
        let only = (self.listed.len() == 1).then(|| self.listed[0].0);
        self.served.or(only)
    }

    fn prediction(&self, worker: Worker) -> Option<&Prediction> {
        Prediction::of_worker(&self.predictions, worker)
    }
}

impl Lease for CoreLease {
    fn answered(&mut self, start: &ResponseStart) {
        if std::mem::replace(&mut self.has_answered, true) {
            return;
        }
        self.reader =
            (start.status == Some(StatusCode::OK.as_u16())).then(|| UsageReader::new(self.path, start.is_event_stream));
        let Some(served) = start.served.as_ref().and_then(|address| self.worker_at(address)) else { return };
        self.served = Some(served);
        if let Some(booking) = &mut self.booking {
            booking.served(served);
        }
        let Some(model) = &self.model else { return };
        for (worker, address) in passed_over(&self.listed, served) {
            tracing::info!(%address, "Envoy did not get an answer from an endpoint and went to the next one");
            self.core.router().report_failure(*worker, &model.base, "Envoy went to the next endpoint of the list");
        }
    }

    fn output(&mut self, piece: &[u8]) {
        let Some(booking) = &mut self.booking else {
            if let Some(reader) = &mut self.reader {
                reader.feed(piece);
            }
            return;
        };
        booking.prefill_complete();
        if let Some(reader) = &mut self.reader {
            reader.feed(piece);
            booking.output_progress(reader.output_events());
        }
    }

    fn response_headers(&self) -> Vec<(String, String)> {
        let Some(worker) = self.worker().filter(|_| self.tells_worker) else { return Vec::new() };
        let mut headers = vec![(WORKER.as_str().to_owned(), worker.to_string())];
        if let Some(prediction) = self.prediction(worker) {
            headers.push((OVERLAP_TOKENS.as_str().to_owned(), prediction.overlap_tokens().to_string()));
        }
        headers
    }

    fn complete(mut self) {
        drop(self.booking.take());
        let (Some(model), Some(prompt)) = (&self.model, &self.prompt) else { return };
        let Some(usage) = self.reader.take().and_then(UsageReader::finish) else { return };
        self.core.tokeniser().observe(self.path, model, prompt, &usage, Instant::now());
        if let Some(prediction) = self.worker().and_then(|worker| self.prediction(worker)) {
            self.core.parity().observe(&model.base, prediction, &usage);
        }
    }
}

/// The headers in which a caller says how its request should be routed, each as often as it came.
fn hint_headers(question: &Question) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for header in &question.headers.headers {
        let name = Hints::HEADERS.into_iter().find(|name| name.as_str() == header.key);
        if let (Some(name), Ok(value)) = (name, HeaderValue::from_bytes(header.bytes())) {
            headers.append(name, value);
        }
    }
    headers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::epp::messages;

    #[test]
    fn only_workers_before_the_one_that_served_were_passed_over() {
        let address = SocketAddr::from(([10, 0, 0, 1], 8000));
        let listed = [1, 2, 3].map(|id| (Worker::new(id, 0), address));
        let before =
            |id| passed_over(&listed, Worker::new(id, 0)).iter().map(|(worker, _)| worker.id.0).collect::<Vec<_>>();
        assert_eq!((before(1), before(3)), (vec![], vec![1, 2]));
        assert_eq!(before(4), [0; 0], "it is not in the list");
    }

    #[test]
    fn a_trace_context_that_comes_twice_is_ignored() {
        const GOOD: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let trace = |times: usize| {
            let header = messages::HeaderValue { key: "traceparent".into(), value: GOOD.into(), ..Default::default() };
            let question = Question {
                method: "POST".into(),
                target: "/v1/completions".into(),
                path: ApiPath::Completions,
                headers: messages::HeaderMap { headers: vec![header; times] },
                body: Default::default(),
                subset: None,
                deadline: Instant::now(),
            };
            Hints::read(&hint_headers(&question), &BTreeMap::new()).expect("hints").trace.is_some()
        };
        assert_eq!([trace(0), trace(1), trace(2)], [false, true, false]);
    }
}
