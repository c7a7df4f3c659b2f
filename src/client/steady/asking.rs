//! One call: from waiting for a connection to the reply, or to the reason why there is none.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::timeout_at;

use super::driver::{Caller, Shared};
use crate::client::conversation::{ClientCounter, Leaves, Phase, Refusal, Report, Told, Word};
use crate::client::fallback::FallbackReason;
use crate::error::{Error, Kind, Result};
use crate::ids::CorrelationId;
use crate::wire::{Reply, RequestEncoder};

/// Why a call has no reply.
#[derive(Debug)]
pub(super) enum Failure {
    /// The daemon could not be asked, or did not answer.
    Unreachable(FallbackReason),
    /// No connection can be made, for the reason that the last try had.
    NotConnected(Refusal),
    /// It, or the client, said no.
    Refused(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let reason = match failure {
            Failure::Refused(error) => return error,
            Failure::NotConnected(why) => return why.unreachable(),
            Failure::Unreachable(reason) => reason,
        };
        let what = match reason {
            FallbackReason::Unreachable => "the daemon cannot be reached",
            FallbackReason::ConnectionLost => "the connection to the daemon ended",
            FallbackReason::Silent => "the daemon did not answer in time",
            FallbackReason::Draining => "the daemon is about to end",
        };
        Self::new(Kind::Connection, what, "check the daemon, or raise the timeout")
    }
}

/// A reply that is waited for. Dropped before it came, its booking is given back.
struct Awaited {
    shared: Arc<Shared>,
    reply: oneshot::Receiver<Result<Told>>,
}

impl Drop for Awaited {
    fn drop(&mut self) {
        self.reply.close();
        // It may have come in this very moment.
        if let Ok(Ok(told)) = self.reply.try_recv() {
            let mut conversation = self.shared.conversation.lock();
            conversation.untaken(&told);
            self.shared.put(conversation);
        }
    }
}

/// How a request is put: appended as a frame, and what it leaves behind if its reply is not taken.
pub(super) trait Put {
    /// Appends it.
    fn encode(&self, encoder: &mut RequestEncoder, id: CorrelationId, out: &mut Vec<u8>) -> Result<()>;

    /// See [`Leaves`].
    fn leaves(&self) -> Leaves {
        Leaves::Nothing
    }
}

impl<F: Fn(&mut RequestEncoder, CorrelationId, &mut Vec<u8>) -> Result<()>> Put for F {
    fn encode(&self, encoder: &mut RequestEncoder, id: CorrelationId, out: &mut Vec<u8>) -> Result<()> {
        self(encoder, id, out)
    }
}

/// Asks, once more on another connection if this one ends; the daemon's errors are failures. `put` is called for each
/// connection, because the daemon there may call things otherwise.
pub(super) async fn ask<P: Put>(
    shared: &Arc<Shared>,
    deadline: Instant,
    put: impl Fn() -> Result<P>,
) -> Result<Told, Failure> {
    let mut lost_before = false;
    loop {
        connected(shared, deadline).await?;
        let place = place(shared, deadline).await?;
        let Some(mut awaited) = send(shared, place, &put)? else {
            // It ended while a place was waited for.
            continue;
        };
        let asked_at = Instant::now();
        match timeout_at(deadline.into(), &mut awaited.reply).await {
            Ok(Ok(Ok(Told { reply: Reply::Error(error), .. }))) => return Err(Failure::Refused(error.into())),
            Ok(Ok(Ok(told))) => return Ok(told),
            // What came cannot be read: the connection lives on.
            Ok(Ok(Err(error))) if error.kind() != Kind::Connection => return Err(Failure::Refused(error)),
            Ok(Ok(Err(_)) | Err(_)) if lost_before => {
                return Err(Failure::Unreachable(FallbackReason::ConnectionLost));
            }
            Ok(Ok(Err(_)) | Err(_)) => lost_before = true,
            Err(_) => return Err(silent(shared, asked_at)),
        }
    }
}

fn silent(shared: &Shared, since: Instant) -> Failure {
    let mut conversation = shared.conversation.lock();
    conversation.count(ClientCounter::DeadlinesPassed);
    conversation.waited_in_vain(since, Instant::now(), Shared::chance());
    Failure::Unreachable(FallbackReason::Silent)
}

/// Waits for a place among the requests in flight.
async fn place(shared: &Arc<Shared>, deadline: Instant) -> Result<OwnedSemaphorePermit, Failure> {
    let since = Instant::now();
    match timeout_at(deadline.into(), Arc::clone(&shared.places).acquire_owned()).await {
        Ok(Ok(place)) => Ok(place),
        // The places are never closed.
        Ok(Err(_)) => Err(Failure::Unreachable(FallbackReason::Unreachable)),
        Err(_) => Err(silent(shared, since)),
    }
}

/// Sends a request on the connection there is; `None` = there is none any more.
fn send<P: Put>(
    shared: &Arc<Shared>,
    place: OwnedSemaphorePermit,
    put: impl Fn() -> Result<P>,
) -> Result<Option<Awaited>, Failure> {
    let connection = shared.conversation.lock().connection();
    let put = put()?;
    let (sender, reply) = oneshot::channel();
    let mut conversation = shared.conversation.lock();
    // By another connection's names it would be another question.
    if conversation.phase != Phase::Open || conversation.connection() != connection {
        return Ok(None);
    }
    let caller = Caller { reply: sender, _place: place };
    let leaves = put.leaves();
    conversation.ask(|encoder, id, out| put.encode(encoder, id, out), leaves, caller)?;
    shared.put(conversation);
    Ok(Some(Awaited { shared: Arc::clone(shared), reply }))
}

/// Says something of a booking; `None` = it will be said when the daemon can be reached again.
///
/// It is said to the run of the daemon that holds the booking, and to no other.
pub(super) async fn tell(
    shared: &Arc<Shared>,
    deadline: Instant,
    instance_id: u64,
    report: Report,
) -> Result<Option<Reply>, Failure> {
    let guard = Owing { shared, instance_id, report: Some(report) };
    if connected(shared, deadline).await.is_err() {
        return Ok(None);
    }
    let Ok(place) = place(shared, deadline).await else { return Ok(None) };
    let Some(mut awaited) = guard.said(place) else { return Ok(None) };
    let asked_at = Instant::now();
    match timeout_at(deadline.into(), &mut awaited.reply).await {
        Ok(Ok(Ok(Told { reply: Reply::Error(error), .. }))) => Err(Failure::Refused(error.into())),
        Ok(Ok(Ok(told))) => Ok(Some(told.reply)),
        Ok(Ok(Err(error))) if error.kind() != Kind::Connection => Err(Failure::Refused(error)),
        // It was in flight when the connection ended: it goes with the next one.
        Ok(Ok(Err(_)) | Err(_)) => Ok(None),
        Err(_) => {
            // Still in flight: it is answered later, or goes with the next connection.
            silent(shared, asked_at);
            Ok(None)
        }
    }
}

/// A report that is owed unless it is said first, however the call ends: also where its task is cancelled.
struct Owing<'a> {
    shared: &'a Arc<Shared>,
    instance_id: u64,
    report: Option<Report>,
}

impl Owing<'_> {
    fn said(mut self, place: OwnedSemaphorePermit) -> Option<Awaited> {
        let (sender, reply) = oneshot::channel();
        let mut conversation = self.shared.conversation.lock();
        if conversation.phase != Phase::Open || !conversation.is_run(self.instance_id) {
            return None;
        }
        let caller = Caller { reply: sender, _place: place };
        if let Some(report) = self.report.take() {
            conversation.say(report, Some(caller));
        }
        self.shared.put(conversation);
        Some(Awaited { shared: Arc::clone(self.shared), reply })
    }
}

impl Drop for Owing<'_> {
    fn drop(&mut self) {
        let Some(report) = self.report.take() else { return };
        let mut conversation = self.shared.conversation.lock();
        if !conversation.is_run(self.instance_id) {
            return;
        }
        match conversation.phase {
            // The next count says it all; nothing bounds how many could wait for a daemon that hangs.
            Phase::Open if matches!(report.word, Word::OutputProgress { .. }) => return,
            // It was left alone for its silence, or had too much in flight: what is in the socket's buffer is not lost.
            Phase::Open => conversation.say(report, None),
            _ => conversation.owe(report),
        }
        self.shared.put(conversation);
    }
}

/// Waits until requests can be sent, no longer than is worth it.
pub(super) async fn connected(shared: &Shared, deadline: Instant) -> Result<(), Failure> {
    let mut phases = shared.phases.subscribe();
    let mut is_tried = false;
    loop {
        {
            let conversation = shared.conversation.lock();
            let rests = conversation.silence.rests_until(Instant::now()).is_some();
            match conversation.phase {
                Phase::Open if !rests => return Ok(()),
                Phase::Connecting { is_first: true } => {}
                // It is tried now: what comes of that is worth the wait for the one who found it due.
                Phase::Resting if !rests => is_tried = true,
                Phase::Connecting { is_first: false } if is_tried => {}
                _ => {
                    return Err(match (&conversation.refusal, &conversation.last_failure) {
                        (Some(refusal), _) => Failure::Refused(refusal.error()),
                        (None, Some(why)) => Failure::NotConnected(why.clone()),
                        (None, None) => Failure::Unreachable(FallbackReason::Unreachable),
                    });
                }
            }
        }
        match timeout_at(deadline.into(), phases.changed()).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return Err(Failure::Unreachable(FallbackReason::Unreachable)),
            Err(_) => return Err(Failure::Unreachable(FallbackReason::Silent)),
        }
    }
}
