//! One call: it waits for a connection, sends a request, and waits for the reply.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::timeout_at;

use super::driver::{Caller, Shared};
use super::state::{ClientCounter, Failure, Leftover, Phase, Report, ReportKind, RunReply};
use crate::client::fallback::FallbackReason;
use crate::error::{Kind, Result};
use crate::ids::CorrelationId;
use crate::wire::{Reply, RequestEncoder};

/// A reply that a call waits for. If the call ends first, the booking of the reply is freed.
struct Awaited {
    shared: Arc<Shared>,
    reply: oneshot::Receiver<Result<RunReply>>,
}

impl Awaited {
    /// Waits for the reply; `None` = the connection ended first. An error that the daemon replies is returned as
    /// [`Failure::Refused`].
    async fn wait(&mut self, deadline: Instant) -> Result<Option<RunReply>, Failure> {
        let asked_at = Instant::now();
        match timeout_at(deadline.into(), &mut self.reply).await {
            Ok(Ok(Ok(RunReply { reply: Reply::Error(error), .. }))) => Err(Failure::Refused(error.into())),
            Ok(Ok(Ok(reply))) => Ok(Some(reply)),
            // The reply cannot be read, but the connection continues.
            Ok(Ok(Err(error))) if error.kind() != Kind::Connection => Err(Failure::Refused(error)),
            Ok(Ok(Err(_)) | Err(_)) => Ok(None),
            Err(_) => Err(silent(&self.shared, asked_at)),
        }
    }
}

impl Drop for Awaited {
    fn drop(&mut self) {
        self.reply.close();
        // It may have arrived just now.
        if let Ok(Ok(reply)) = self.reply.try_recv() {
            let mut state = self.shared.state.lock();
            state.free_unclaimed(&reply);
            self.shared.send_encoded(state);
        }
    }
}

/// A request for [`ask`].
pub(super) trait Ask {
    /// Appends it as a frame.
    fn encode(&self, encoder: &mut RequestEncoder, id: CorrelationId, out: &mut Vec<u8>) -> Result<()>;

    /// See [`Leftover`].
    fn leftover(&self) -> Leftover {
        Leftover::Nothing
    }
}

impl<F: Fn(&mut RequestEncoder, CorrelationId, &mut Vec<u8>) -> Result<()>> Ask for F {
    fn encode(&self, encoder: &mut RequestEncoder, id: CorrelationId, out: &mut Vec<u8>) -> Result<()> {
        self(encoder, id, out)
    }
}

/// Sends a request and waits for its reply. If the connection ends, it tries once more on the next. An error that the
/// daemon replies is returned as [`Failure::Refused`], and not tried again. `put` makes the request anew for each
/// connection, because a restarted daemon may give the spaces other ids.
pub(super) async fn ask<P: Ask>(
    shared: &Arc<Shared>,
    deadline: Instant,
    put: impl Fn() -> Result<P>,
) -> Result<RunReply, Failure> {
    let mut lost_before = false;
    loop {
        connected(shared, deadline).await?;
        let permit = permit(shared, deadline).await?;
        let Some(mut awaited) = send(shared, permit, &put)? else {
            // The connection ended during the wait for a permit.
            continue;
        };
        match awaited.wait(deadline).await? {
            Some(reply) => return Ok(reply),
            None if lost_before => return Err(Failure::Unreachable(FallbackReason::ConnectionLost)),
            None => lost_before = true,
        }
    }
}

fn silent(shared: &Shared, since: Instant) -> Failure {
    let mut state = shared.state.lock();
    state.count(ClientCounter::DeadlinesPassed);
    state.timed_out(since, Instant::now(), Shared::chance());
    Failure::Unreachable(FallbackReason::Silent)
}

/// Waits for a permit to have a request in flight.
async fn permit(shared: &Arc<Shared>, deadline: Instant) -> Result<OwnedSemaphorePermit, Failure> {
    let since = Instant::now();
    match timeout_at(deadline.into(), Arc::clone(&shared.permits).acquire_owned()).await {
        Ok(Ok(permit)) => Ok(permit),
        // The semaphore is never closed.
        Ok(Err(_)) => Err(Failure::Unreachable(FallbackReason::Unreachable)),
        Err(_) => Err(silent(shared, since)),
    }
}

/// Sends a request on the present connection; `None` = it has ended.
fn send<P: Ask>(
    shared: &Arc<Shared>,
    permit: OwnedSemaphorePermit,
    put: impl Fn() -> Result<P>,
) -> Result<Option<Awaited>, Failure> {
    let connection = shared.state.lock().connection();
    let put = put()?;
    let (sender, reply) = oneshot::channel();
    let mut state = shared.state.lock();
    // The ids in the request are valid for the connection that it was made for.
    if state.phase != Phase::Open || state.connection() != connection {
        return Ok(None);
    }
    let caller = Caller { reply: sender, _permit: permit };
    let leftover = put.leftover();
    state.ask(|encoder, id, out| put.encode(encoder, id, out), leftover, caller)?;
    shared.send_encoded(state);
    Ok(Some(Awaited { shared: Arc::clone(shared), reply }))
}

/// Sends a report about a booking, to the daemon run that holds the booking and to no other. `None` = the report is sent when
/// the daemon can be reached again.
pub(super) async fn report(
    shared: &Arc<Shared>,
    deadline: Instant,
    instance_id: u64,
    report: Report,
) -> Result<Option<Reply>, Failure> {
    let guard = PendingReport { shared, instance_id, report: Some(report) };
    if connected(shared, deadline).await.is_err() {
        return Ok(None);
    }
    let Ok(permit) = permit(shared, deadline).await else { return Ok(None) };
    let Some(mut awaited) = guard.send(permit) else { return Ok(None) };
    match awaited.wait(deadline).await {
        // If the connection ended while the report was in flight, the next connection sends it again. If the deadline passed, it
        // is still in flight: it is answered later, or the next connection sends it again.
        Ok(reply) => Ok(reply.map(|reply| reply.reply)),
        Err(Failure::Unreachable(_)) => Ok(None),
        Err(failure) => Err(failure),
    }
}

/// A report that is sent or stored however the call ends, also if its task is cancelled.
struct PendingReport<'a> {
    shared: &'a Arc<Shared>,
    instance_id: u64,
    report: Option<Report>,
}

impl PendingReport<'_> {
    fn send(mut self, permit: OwnedSemaphorePermit) -> Option<Awaited> {
        let (sender, reply) = oneshot::channel();
        let mut state = self.shared.state.lock();
        if state.phase != Phase::Open || !state.is_run(self.instance_id) {
            return None;
        }
        let caller = Caller { reply: sender, _permit: permit };
        if let Some(report) = self.report.take() {
            state.send_report(&report, Some(caller));
        }
        self.shared.send_encoded(state);
        Some(Awaited { shared: Arc::clone(self.shared), reply })
    }
}

impl Drop for PendingReport<'_> {
    fn drop(&mut self) {
        let Some(report) = self.report.take() else { return };
        let mut state = self.shared.state.lock();
        if !state.is_run(self.instance_id) {
            return;
        }
        match state.phase {
            // The next count replaces this one. Without this rule, counts for a daemon that hangs would have no limit.
            Phase::Open if matches!(report.kind, ReportKind::OutputProgress { .. }) => return,
            // The daemon is in a pause, or has too many requests in flight. Bytes in the socket's buffer are not lost.
            Phase::Open => state.send_report(&report, None),
            _ => state.store_report(report),
        }
        self.shared.send_encoded(state);
    }
}

/// Waits until requests can be sent. It fails early if the daemon is in a pause.
pub(super) async fn connected(shared: &Shared, deadline: Instant) -> Result<(), Failure> {
    let mut phases = shared.phases.subscribe();
    let mut is_tried = false;
    loop {
        if shared.state.lock().may_send(Instant::now(), &mut is_tried)? {
            return Ok(());
        }
        match timeout_at(deadline.into(), phases.changed()).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return Err(Failure::Unreachable(FallbackReason::Unreachable)),
            Err(_) => return Err(Failure::Unreachable(FallbackReason::Silent)),
        }
    }
}
