//! A router that chooses as it is told, and logs what it hears.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hyper::StatusCode;
use kvrouted::ids::Worker;
use kvrouted_gateway::api::{ApiError, Usage};
use kvrouted_gateway::proxy::{Asked, Booking, BoxFuture, Candidate, Choice, Choose, Finding, PrefillChoice};
use parking_lot::Mutex;

#[derive(Default)]
struct Log {
    lines: Mutex<Vec<String>>,
    open: AtomicUsize,
    asked: Mutex<Vec<String>>,
    order: Mutex<Vec<(u64, u32)>>,
    refusal: Mutex<Option<ApiError>>,
    pause: Mutex<Duration>,
}

/// Chooses the engines in a fixed order.
#[derive(Clone)]
pub(crate) struct FixedChoice {
    /// For requests on two engines: those that prefill, and those that run whole requests.
    pair: Option<(Vec<u64>, Vec<u64>)>,
    log: Arc<Log>,
}

/// The log, and what stands before each line.
struct LoggedBooking(Arc<Log>, &'static str);

impl LoggedBooking {
    fn log(&self, line: &str) {
        let line = format!("{}{line}", self.1);
        let mut lines = self.0.lines.lock();
        // Progress comes with each part; the last figure counts.
        if line.starts_with("progress") && lines.last().is_some_and(|last| last.starts_with("progress")) {
            lines.pop();
        }
        lines.push(line);
    }
}

impl Booking for LoggedBooking {
    fn prefill_complete(&mut self) {
        let line = format!("{}prefilled", self.1);
        if !self.0.lines.lock().contains(&line) {
            self.log("prefilled");
        }
    }

    fn output_progress(&mut self, tokens: u32) {
        self.log(&format!("progress {tokens}"));
    }

    fn served(&mut self, worker: Worker) {
        self.log(&format!("served {worker}"));
    }
}

impl Drop for LoggedBooking {
    fn drop(&mut self) {
        self.log("freed");
        self.0.open.fetch_sub(1, Ordering::SeqCst);
    }
}

impl FixedChoice {
    pub(crate) fn of(order: &[u64]) -> Self {
        let choice = Self { pair: None, log: Arc::default() };
        choice.order(&order.iter().map(|id| (*id, 0)).collect::<Vec<_>>());
        choice
    }

    /// Chooses a prefill engine and a decode engine; for a whole request, one of `whole`.
    pub(crate) fn of_pairs(prefill: &[u64], decode: &[u64], whole: &[u64]) -> Self {
        Self { pair: Some((prefill.to_vec(), whole.to_vec())), ..Self::of(decode) }
    }

    /// Changes the order of the engines and their ranks.
    pub(crate) fn order(&self, order: &[(u64, u32)]) {
        *self.log.order.lock() = order.to_vec();
    }

    /// Refuses what comes from now on.
    pub(crate) fn refuse(&self, with: Option<ApiError>) {
        *self.log.refusal.lock() = with;
    }

    /// Takes this long for what comes from now on.
    pub(crate) fn pause(&self, time: Duration) {
        *self.log.pause.lock() = time;
    }

    /// Names a rank of the first engine.
    pub(crate) fn rank(self, rank: u32) -> Self {
        self.log.order.lock()[0].1 = rank;
        self
    }

    /// What bookings and failures said, in order.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.log.lines.lock().clone()
    }

    /// The priority, session and tenant of each question.
    pub(crate) fn asked(&self) -> Vec<String> {
        self.log.asked.lock().clone()
    }

    /// Bookings that are not freed.
    pub(crate) fn open(&self) -> usize {
        self.log.open.load(Ordering::SeqCst)
    }

    pub(crate) fn has(&self, line: &str) -> bool {
        self.log.lines.lock().iter().any(|logged| logged == line)
    }
}

impl Choose for FixedChoice {
    fn choose<'a>(&'a self, asked: Asked<'a>) -> BoxFuture<'a, Result<Choice, ApiError>> {
        let hints = format!("{} {:?} {:?}", asked.priority, asked.session, asked.tenant);
        self.log.asked.lock().push(hints);
        if let Some(error) = self.log.refusal.lock().clone() {
            return Box::pin(async { Err(error) });
        }
        let order = self.log.order.lock().clone();
        let listed = |order: &[(u64, u32)]| -> Vec<Candidate> {
            let left = order.iter().filter(|(id, _)| !asked.exclude.contains(id));
            left.map(|(id, rank)| Candidate { worker: Worker::new(*id, *rank), overlap_tokens: Some(16) }).collect()
        };
        let of = |ids: &[u64]| listed(&ids.iter().map(|id| (*id, 0)).collect::<Vec<_>>());
        let (candidates, prefill) = match &self.pair {
            Some((prefill, _)) if asked.disaggregate => (listed(&order), of(prefill)),
            Some((_, whole)) => (of(whole), Vec::new()),
            None => (listed(&order), Vec::new()),
        };
        if candidates.is_empty() {
            let error = ApiError::gateway(StatusCode::SERVICE_UNAVAILABLE, "nobody", "no engine is left");
            return Box::pin(async { Err(error) });
        }
        let booking = |half| -> Box<dyn Booking> {
            self.log.open.fetch_add(1, Ordering::SeqCst);
            Box::new(LoggedBooking(Arc::clone(&self.log), half))
        };
        let prefill =
            (!prefill.is_empty()).then(|| PrefillChoice { candidates: prefill, booking: Some(booking("prefill ")) });
        let log = Arc::clone(&self.log);
        let observer = move |worker: Worker, usage: &Usage| {
            let Usage { prompt_tokens, cached_tokens, completion_tokens } = usage;
            let line = format!("usage {worker} {prompt_tokens} {cached_tokens:?} {completion_tokens}");
            log.lines.lock().push(line);
        };
        let choice = Choice {
            candidates,
            booking: Some(booking("")),
            prefill,
            observer: Some(Box::new(observer)),
            token_ids: Some(Arc::from([1, 2, 3])),
            decided_by: "test",
            token_source: "test",
        };
        let pause = *self.log.pause.lock();
        Box::pin(async move {
            tokio::time::sleep(pause).await;
            Ok(choice)
        })
    }

    fn report_failure(&self, worker: Worker, model: &str, why: &str) {
        self.log.lines.lock().push(format!("failure {worker} {model} {why}"));
    }

    fn is_ready(&self) -> bool {
        true
    }

    fn findings(&self) -> Vec<Finding> {
        vec![Finding { what: "a finding".into(), remedy: "a remedy".into() }]
    }
}
