//! Relaying a reply: a task reads the engine part by part and hands each on when the caller takes it. The task ends
//! with the reply, when the caller hangs up or takes nothing, when the engine breaks off, or at the deadline. Its end
//! drops the engine's reply, which cancels the request there, and the booking, which frees it.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::body::{Body as _, Frame, Incoming};
use kvrouted::ids::Worker;
use tokio::sync::mpsc::{Sender, channel};

use super::body::{ReplyBody, ReplyError};
use super::choose::{Booking, Observer};
use super::disaggregate::PrefillUsage;
use super::keys::KeyUse;
use super::listener::ConnectionState;
use crate::api::{ApiPath, SseFilter, Usage, UsageReader};
use crate::config::Deadlines;
use crate::engines::InflightGuard;
use crate::limits::RELAY_PARTS_MAX;
use crate::metrics::{Counted, Metrics, ReplyEnd};

/// What a request holds until its reply has ended.
pub(crate) struct Held {
    pub(crate) _in_flight: Counted,
    pub(crate) _key: Option<KeyUse>,
    pub(crate) _place: tokio::sync::OwnedSemaphorePermit,
}

/// A request whose reply has begun.
pub(crate) struct Relay {
    pub(crate) path: ApiPath,
    pub(crate) request_id: String,
    pub(crate) status: u16,
    pub(crate) started: Instant,
    pub(crate) deadline: Instant,
    pub(crate) deadlines: Deadlines,
    pub(crate) worker: Worker,
    /// Whether an error can be told as an event of the stream.
    pub(crate) is_event_stream: bool,
    pub(crate) reader: Option<UsageReader>,
    pub(crate) filter: Option<SseFilter>,
    pub(crate) booking: Option<Box<dyn Booking>>,
    pub(crate) observer: Option<Observer>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) connection: Arc<ConnectionState>,
    pub(crate) held: Held,
    pub(crate) engine: InflightGuard,
    /// What the engine that computed the prompt says, if there are two: only it knows what was cached.
    pub(crate) prefill_usage: Option<PrefillUsage>,
}

type Part = Result<Frame<Bytes>, ReplyError>;

impl Relay {
    /// Begins with the first part. A reply that has no more parts needs no task.
    pub(crate) fn begin(mut self, first: Option<Frame<Bytes>>, rest: Incoming) -> ReplyBody {
        self.metrics.first_byte(self.path, self.started.elapsed());
        let is_whole = rest.is_end_stream() && first.as_ref().is_none_or(|frame| frame.is_data());
        let first = first.and_then(|frame| self.pass(frame));
        if is_whole {
            let data = first.and_then(|frame| frame.into_data().ok()).unwrap_or_default();
            let body = match self.held_back() {
                Some(more) => [data, more].concat().into(),
                None => data,
            };
            self.finish(ReplyEnd::Whole);
            return ReplyBody::whole(body);
        }
        let remaining = match self.filter {
            Some(_) => None,
            None => rest.size_hint().exact().map(|bytes| bytes + first.as_ref().map_or(0, data_bytes)),
        };
        let (sender, parts) = channel(RELAY_PARTS_MAX);
        tokio::spawn(self.run(first, rest, sender));
        ReplyBody::Parts { parts, failed: None, remaining }
    }

    async fn run(mut self, first: Option<Frame<Bytes>>, mut rest: Incoming, sender: Sender<Part>) {
        let end = match self.relay(first, &mut rest, &sender).await {
            Ok(()) => ReplyEnd::Whole,
            Err(end) => end,
        };
        // The engine stops before anything else is done.
        drop(rest);
        match end {
            ReplyEnd::Engine => self.tell(&sender, ReplyError::Engine).await,
            ReplyEnd::Deadline => self.tell(&sender, ReplyError::Deadline).await,
            ReplyEnd::Stalled => self.connection.abandon(),
            ReplyEnd::Whole | ReplyEnd::HungUp => {}
        }
        self.finish(end);
    }

    async fn relay(
        &mut self,
        first: Option<Frame<Bytes>>,
        rest: &mut Incoming,
        sender: &Sender<Part>,
    ) -> Result<(), ReplyEnd> {
        let deadline = tokio::time::Instant::from_std(self.deadline);
        if let Some(first) = first {
            self.hand_on(first, sender).await?;
        }
        loop {
            let frame = tokio::select! {
                frame = rest.frame() => frame,
                () = sender.closed() => return Err(ReplyEnd::HungUp),
                () = tokio::time::sleep_until(deadline) => return Err(ReplyEnd::Deadline),
            };
            match frame {
                Some(Ok(frame)) => {
                    // Trailers end the reply; what was held back goes before them.
                    if frame.is_trailers()
                        && let Some(more) = self.held_back()
                    {
                        self.hand_on(Frame::data(more), sender).await?;
                    }
                    if let Some(frame) = self.pass(frame) {
                        self.hand_on(frame, sender).await?;
                    }
                }
                Some(Err(_)) => return Err(ReplyEnd::Engine),
                None => break,
            }
        }
        if let Some(more) = self.held_back() {
            self.hand_on(Frame::data(more), sender).await?;
        }
        Ok(())
    }

    /// Waits until the caller takes the part.
    async fn hand_on(&self, frame: Frame<Bytes>, sender: &Sender<Part>) -> Result<(), ReplyEnd> {
        let stall = Instant::now() + self.deadlines.stall;
        let (until, end) =
            if stall < self.deadline { (stall, ReplyEnd::Stalled) } else { (self.deadline, ReplyEnd::Deadline) };
        match tokio::time::timeout_at(until.into(), sender.send(Ok(frame))).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(ReplyEnd::HungUp),
            Err(_) => Err(end),
        }
    }

    /// Reads a part, reports progress, and gives what goes on.
    fn pass(&mut self, frame: Frame<Bytes>) -> Option<Frame<Bytes>> {
        let data = match frame.into_data() {
            Ok(data) => data,
            Err(other) => return Some(other),
        };
        if let Some(reader) = &mut self.reader {
            reader.feed(&data);
            let events = reader.output_events();
            if let Some(booking) = self.booking.as_mut().filter(|_| events > 0) {
                booking.prefill_complete();
                booking.output_progress(events);
            }
        }
        let data = match &mut self.filter {
            Some(filter) => filter.feed(&data),
            None => data,
        };
        (!data.is_empty()).then(|| Frame::data(data))
    }

    /// The bytes that the filter still holds at the end.
    fn held_back(&mut self) -> Option<Bytes> {
        let bytes = self.filter.take()?.finish();
        (!bytes.is_empty()).then_some(bytes)
    }

    /// Tells the caller of a stream why it ends, then breaks it off, so that nobody takes it for whole.
    async fn tell(&mut self, sender: &Sender<Part>, error: ReplyError) {
        if self.is_event_stream {
            let (code, status) = match error {
                ReplyError::Engine => ("engine_failed", 502),
                ReplyError::Deadline => ("deadline_exceeded", 504),
            };
            let error = serde_json::json!({
                "error": { "message": error.to_string(), "type": "server_error", "param": null, "code": code,
                    "status": status }
            });
            let event = format!("\n\ndata: {error}\n\n");
            let _ = self.hand_on(Frame::data(event.into()), sender).await;
        }
        // A caller who has left, or reads nothing, needs no error.
        let _ = tokio::time::timeout(self.deadlines.stall, sender.send(Err(error))).await;
    }

    fn finish(self, end: ReplyEnd) {
        let Self {
            path,
            request_id,
            status,
            started,
            worker,
            reader,
            mut booking,
            observer,
            metrics,
            held,
            engine,
            prefill_usage,
            ..
        } = self;
        if let Some(reader) = reader.filter(|_| end == ReplyEnd::Whole) {
            let mut usage = reader.finish();
            if let (Some(usage), Some(prefill)) = (&mut usage, prefill_usage.as_ref().and_then(|cell| cell.get())) {
                usage.cached_tokens = prefill.cached_tokens;
            }
            report_usage(&metrics, usage.as_ref(), worker, booking.as_deref_mut(), observer);
        }
        let after = started.elapsed();
        metrics.ended(path, end, after);
        tracing::debug!(request_id, path = path.label(), status, worker = %worker, end = end.label(),
            ms = after.as_millis() as u64, "a reply ended");
        drop((booking, engine, held));
    }
}

fn report_usage(
    metrics: &Metrics,
    usage: Option<&Usage>,
    worker: Worker,
    booking: Option<&mut (dyn Booking + 'static)>,
    observer: Option<Observer>,
) {
    metrics.usage(usage);
    let Some(usage) = usage else { return };
    if let Some(booking) = booking {
        booking.output_progress(usage.completion_tokens);
    }
    if let Some(observer) = observer {
        observer(worker, usage);
    }
}

fn data_bytes(frame: &Frame<Bytes>) -> u64 {
    frame.data_ref().map_or(0, |data| data.len() as u64)
}
