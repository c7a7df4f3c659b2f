//! The thread that makes spans of traced requests and sends them to the collector. It runs if `[traces]` names one.
//!
//! The collector is not trusted: a request to it ends within `traces.timeout_ms`, its reply is read to a bound, it cannot
//! redirect the daemon to another host, and it cannot have more memory than the bound on spans that wait. Nothing else waits
//! for this thread.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::endable_thread::EndableThread;
use crate::config::{Config, TracesConfig};
use crate::error::Result;
use crate::fleet::Fleet;
use crate::limits::{
    TRACE_BOOKINGS_PER_RECORD, TRACE_END_MS_MAX, TRACE_PAUSE_MS, TRACE_PURGE_EVERY_MS, TRACE_RECORDS_PER_QUANTUM_MAX,
    TRACE_REPLY_BYTES_MAX, TRACE_SPANS_PER_RECORD,
};
use crate::load::{EndedBooking, Loads};
use crate::metrics::TraceCounter;
use crate::requests::RequestTables;
use crate::sandbox::{self, ThreadKind};
use crate::traces::{Answer, Delivery, Sender, SpanMaker, Traces, UnixClock, rejected_spans};
use crate::watchdog::{Activity, Watchlist};

/// Bytes of a collector's own words in the log.
const SAID_BYTES_MAX: usize = 200;
/// What a warning says to do.
const REMEDY: &str = "start the collector, or correct endpoint in [traces]; requests are answered meanwhile";

/// Starts the thread if `config` names a collector.
///
/// # Errors
/// `System` if the thread cannot be started.
pub(super) fn start(config: &Config, tables: &RequestTables, watchlist: &Watchlist) -> Result<Option<EndableThread>> {
    let TracesConfig { endpoint: Some(endpoint), .. } = &config.traces else { return Ok(None) };
    let mark = watchlist.add("traces", false);
    let timeout = Duration::from_millis(config.traces.timeout_ms);
    let collector = Collector::new(endpoint.clone(), timeout);
    let mut exporter = SpanExporter::new(config, tables, collector);
    let thread = EndableThread::start("traces", "the export of traces", move |ending| {
        sandbox::enter(ThreadKind::Traces);
        while !ending.is_asked_for() {
            mark.begin_round(Activity::MakingSpans);
            let more = exporter.take();
            // The collector's time is its own.
            mark.wait();
            exporter.send_due();
            if !more {
                std::thread::park_timeout(Duration::from_millis(TRACE_PAUSE_MS));
            }
        }
        mark.begin_round(Activity::MakingSpans);
        while exporter.take() {}
        mark.wait();
        exporter.send_last(Instant::now() + Duration::from_millis(TRACE_END_MS_MAX / 2));
    })?;
    Ok(Some(thread))
}

/// Ends the thread, which sends what it has. A collector that does not answer is not waited for.
///
/// # Errors
/// `Internal` if it panicked.
pub(super) fn finish(thread: EndableThread) -> Result<()> {
    let in_time = thread.stop_by(Instant::now() + Duration::from_millis(TRACE_END_MS_MAX))?;
    if !in_time {
        tracing::warn!("the collector does not answer: the last spans are lost");
    }
    Ok(())
}

/// The thread's work.
struct SpanExporter {
    traces: Traces,
    loads: Arc<Loads>,
    fleet: Arc<Fleet>,
    /// The bookings' clock.
    clock: Box<dyn Fn() -> u64 + Send>,
    spans: SpanMaker,
    /// When the first of the lost ends was noticed after which `spans` was not purged yet.
    lost_at: Option<Instant>,
    /// Open bookings of `spans` that have ended, by their generations. Once no end waits, their ends were lost.
    ended: Vec<u64>,
    /// Ends of bookings whose decisions are taken next.
    ends: VecDeque<EndedBooking>,
    delivery: Delivery,
    sender: Sender,
    collector: Collector,
    /// Decisions that may wait.
    waiting_max: usize,
}

impl SpanExporter {
    fn new(config: &Config, tables: &RequestTables, collector: Collector) -> Self {
        let TracesConfig { service_name, instance, queue_max, .. } = &config.traces;
        let instance = instance.clone().unwrap_or_else(|| format!("{:016x}", tables.instance_id()));
        // Beyond this age a booking has ended, and its end was lost.
        let age_ns_max = (config.booking.age_s_max + 60).saturating_mul(1_000_000_000);
        Self {
            traces: tables.traces.clone(),
            loads: Arc::clone(&tables.loads),
            fleet: Arc::clone(&tables.fleet),
            clock: Box::new(tables.clock()),
            spans: SpanMaker::new(queue_max.saturating_mul(TRACE_BOOKINGS_PER_RECORD), age_ns_max),
            lost_at: None,
            ended: Vec::new(),
            ends: VecDeque::new(),
            delivery: Delivery::new(queue_max.saturating_mul(TRACE_SPANS_PER_RECORD)),
            sender: Sender::new(service_name, &instance),
            collector,
            waiting_max: *queue_max,
        }
    }

    /// Makes spans of what waits. Whether more may wait.
    fn take(&mut self) -> bool {
        self.look_for_lost_ends();
        // Ends first: the decision of a booking that has ended is in its queue already, and is among those taken below.
        let ends = std::iter::from_fn(|| self.loads.take_traced_end());
        self.ends.extend(ends.take(TRACE_RECORDS_PER_QUANTUM_MAX));
        let more = self.ends.len() >= TRACE_RECORDS_PER_QUANTUM_MAX;
        let (fleet, clock, now) = (self.fleet.load(), self.unix_clock(), Instant::now());
        let Some(queue) = self.traces.queue().cloned() else { return false };
        let (mut spans, counters) = (Vec::new(), Arc::clone(&self.traces.counters));
        for decision in std::iter::from_fn(|| queue.pop()).take(self.waiting_max) {
            let surroundings = (clock, &**fleet, &*self.traces.exemplars);
            if !self.spans.decided(&decision, surroundings, &mut spans) {
                counters.bump(TraceCounter::BookingsUntracked);
            }
        }
        for ended in self.ends.drain(..) {
            // A booking without room has no span, which was counted.
            spans.extend(self.spans.ended(&ended, &fleet));
        }
        let lost = self.loads.take_traced_ends_lost();
        counters.add(TraceCounter::RecordsLost, lost);
        if lost > 0 {
            self.lost_at.get_or_insert(now);
        }
        if !more {
            self.spans.forget(&std::mem::take(&mut self.ended));
        }
        let dropped = spans.into_iter().filter_map(|span| (!self.delivery.push(span, now)).then_some(())).count();
        counters.add(TraceCounter::SpansDropped, dropped as u64);
        more
    }

    /// If ends were lost, finds the open bookings that have ended. By then their decisions were taken long since.
    fn look_for_lost_ends(&mut self) {
        if self.lost_at.is_some_and(|lost_at| lost_at.elapsed() >= Duration::from_millis(TRACE_PURGE_EVERY_MS)) {
            self.lost_at = None;
            self.ended = self.loads.ended_of(&self.spans.open());
        }
    }

    fn unix_clock(&self) -> UnixClock {
        let unix_ns = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
        UnixClock { began_unix_ns: unix_ns.saturating_sub((self.clock)()) }
    }

    /// Sends the next batch if it is due.
    fn send_due(&mut self) {
        if let Some(spans) = self.delivery.due(Instant::now()) {
            let count = spans.len();
            let answer = self.collector.post(&self.sender.body(spans), self.collector.timeout);
            self.note(count, answer);
        }
    }

    /// Sends what waits until `deadline`, or until the collector does not take a batch.
    fn send_last(&mut self, deadline: Instant) {
        while self.delivery.waiting() > 0 {
            let left = deadline.saturating_duration_since(Instant::now()).min(self.collector.timeout);
            let spans = self.delivery.batch();
            let (count, is_late) = (spans.len(), left.is_zero());
            let answer =
                if is_late { Answer::Later(None) } else { self.collector.post(&self.sender.body(spans), left) };
            if let Answer::Later(_) = answer {
                self.traces.counters.add(TraceCounter::SpansGivenUp, self.delivery.waiting() as u64);
                return;
            }
            self.note(count, answer);
        }
    }

    /// Counts the answer to a batch.
    fn note(&mut self, spans: usize, answer: Answer) {
        let undelivered = self.delivery.answered(spans, answer, Instant::now());
        let counters = &self.traces.counters;
        counters.add(TraceCounter::SpansRefused, undelivered.refused);
        counters.add(TraceCounter::SpansGivenUp, undelivered.given_up);
        if let Answer::Taken { .. } = answer {
            counters.bump(TraceCounter::Exports);
            counters.add(TraceCounter::SpansSent, spans as u64 - undelivered.refused);
        } else {
            counters.bump(TraceCounter::ExportsFailed);
        }
    }
}

/// The collector.
struct Collector {
    agent: ureq::Agent,
    endpoint: String,
    timeout: Duration,
    /// Whether the last request failed. Only a change is logged.
    has_failed: bool,
    /// Whether a rejection was logged since it last failed.
    has_rejected: bool,
}

impl Collector {
    fn new(endpoint: String, timeout: Duration) -> Self {
        let config = ureq::Agent::config_builder().max_redirects(0).http_status_as_error(false).proxy(None);
        let config = config.user_agent(concat!("kvrouted/", env!("CARGO_PKG_VERSION")));
        Self { agent: config.build().into(), endpoint, timeout, has_failed: false, has_rejected: false }
    }

    /// Sends a batch. Blocks for at most `timeout`.
    fn post(&mut self, body: &[u8], timeout: Duration) -> Answer {
        let request = self.agent.post(&self.endpoint).header("content-type", "application/x-protobuf");
        let sent = request.config().timeout_global(Some(timeout)).build().send(body);
        let mut response = match sent {
            Ok(response) => response,
            Err(error) => return self.failed(&error.to_string(), Answer::Later(None)),
        };
        let status = response.status().as_u16();
        let after = response.headers().get("retry-after").and_then(|value| value.to_str().ok()?.trim().parse().ok());
        match status {
            200..=299 => {
                // It took the batch, whatever becomes of the rest of its reply.
                let reply = response.body_mut().with_config().limit(TRACE_REPLY_BYTES_MAX).read_to_vec();
                self.taken(&reply.unwrap_or_default())
            }
            429 | 502..=504 => self.failed(&format!("status {status}"), Answer::Later(after.map(Duration::from_secs))),
            _ => self.failed(&format!("status {status}"), Answer::Refused),
        }
    }

    fn taken(&mut self, reply: &[u8]) -> Answer {
        let (rejected, mut said) = rejected_spans(reply);
        if std::mem::take(&mut self.has_failed) {
            self.has_rejected = false;
            tracing::info!(endpoint = self.endpoint, "the collector takes traces again");
        }
        if rejected > 0 && !std::mem::replace(&mut self.has_rejected, true) {
            said.truncate(said.floor_char_boundary(SAID_BYTES_MAX));
            tracing::warn!(rejected, ?said, "the collector rejects spans; further rejections are only counted");
        }
        Answer::Taken { rejected }
    }

    fn failed(&mut self, error: &str, answer: Answer) -> Answer {
        if !std::mem::replace(&mut self.has_failed, true) {
            tracing::warn!(
                endpoint = self.endpoint,
                error,
                remedy = REMEDY,
                "the collector does not take traces; they are dropped while it does not"
            );
        }
        answer
    }
}
