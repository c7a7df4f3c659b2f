//! Requests that find every worker busy: left to wait, decided once somebody has room, answered where they came from.

use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use super::connection::Peer;
use super::late::{Booked, LateBox};
use super::responder::RoutingResponder;
use super::room::{Answered, InHand, Parked, WaitingRoom};
use super::service::{Routed, Service};
use crate::error::{Error, Kind, Result};
use crate::ids::WorkerIndex;
use crate::limits::{QUEUE_LOOKS_MAX, QUEUE_SERVED_PER_TURN_MAX, WORK_PER_TURN_MAX};
use crate::load::{BookingRef, SessionId};
use crate::metrics::{CoreCounter, QueueCounter};
use crate::queue::{Claim, Ticket};
use crate::route::{RouteRequest, Wait};
use crate::wire::{FrameHeader, FrameKind, Request, RequestScratch, decode_request};

/// Where a core's requests wait, and which of them do.
#[derive(Debug)]
pub(super) struct Parking {
    pub(super) room: Arc<WaitingRoom>,
    core: usize,
    /// Told what is left to be done in another turn.
    late: Arc<LateBox>,
    /// By connection.
    tickets: FxHashMap<u64, FxHashSet<Ticket>>,
    scratch: RequestScratch,
}

impl Parking {
    /// Of core number `core`, which is told by `late`.
    pub(super) fn new(room: Arc<WaitingRoom>, core: usize, late: &Arc<LateBox>) -> Self {
        room.open_core(core, late);
        let (tickets, scratch) = (FxHashMap::default(), RequestScratch::default());
        Self { room, core, late: Arc::clone(late), tickets, scratch }
    }

    fn forget(&mut self, connection: u64, ticket: Ticket) {
        if let Some(tickets) = self.tickets.get_mut(&connection) {
            tickets.remove(&ticket);
            if tickets.is_empty() {
                self.tickets.remove(&connection);
            }
        }
    }
}

impl<S: Service> RoutingResponder<S> {
    /// Whether a reply to one of the core's requests is still to come.
    pub(super) fn has_parked(&self) -> bool {
        self.parking.as_ref().is_some_and(|parking| !parking.tickets.is_empty())
    }

    /// Nobody waits any more, on any core.
    pub(super) fn drain_waiting(&self) {
        if let Some(parking) = &self.parking {
            parking.room.drain();
        }
    }

    /// Leaves a request to wait whose workers are all busy.
    pub(super) fn park(
        &mut self,
        peer: &Peer,
        session: SessionId,
        (header, body): (&FrameHeader, &[u8]),
        route: &RouteRequest<'_>,
        wait: &Wait,
    ) -> Result<()> {
        let Some(parking) = &mut self.parking else {
            return Err(Error::new(Kind::AllBusy, "every worker is busy, and nobody waits here", "ask again"));
        };
        let (connection, id) = (peer.connection, header.correlation_id);
        let (space, prompt_tokens) = (route.space, route.prompt.token_count() as u64);
        let (core, uid, places, body_kept) = (parking.core, peer.uid, None, body.into());
        let parked = Parked { core, connection, session, id, uid, places, space, prompt_tokens, body: body_kept };
        let bytes = body.len() + size_of::<Parked>() + size_of_val(wait.workers.as_slice());
        let ticket = parking.room.park(&Claim { bytes, user: peer.uid, ..wait.claim }, &wait.workers, parked)?;
        parking.tickets.entry(connection).or_default().insert(ticket);
        self.look_again(ticket, wait.workers.clone());
        Ok(())
    }

    /// A request has begun to wait for `workers`: if one of them has had room since it was looked at, whoever made that
    /// room may not have known of the request, and it is decided here.
    fn look_again(&mut self, ticket: Ticket, workers: Vec<WorkerIndex>) {
        let mut waiting = (ticket, workers);
        for _ in 0..QUEUE_LOOKS_MAX {
            let (ticket, workers) = &waiting;
            if !workers.iter().any(|worker| self.service.has_room(*worker)) {
                return;
            }
            let Some(parking) = &self.parking else { return };
            let Some(in_hand) = parking.room.take_back(*ticket) else { return };
            match self.serve(in_hand) {
                Some(again) => waiting = again,
                None => return,
            }
        }
        // Loads move faster than they can be looked at: others first.
        if let Some(parking) = &self.parking {
            parking.late.serve();
        }
    }

    /// Something has ended that may give room, of this worker if it is known.
    pub(super) fn on_room(&mut self, worker: Option<WorkerIndex>) {
        if self.parking.as_ref().is_some_and(|parking| parking.room.is_awaited()) {
            self.serve_waiting(worker);
        }
    }

    /// Whose load is about to change, if somebody waits who may want to know.
    pub(super) fn about_to_end(&self, session: SessionId, booking: &BookingRef<'_>) -> Option<WorkerIndex> {
        let is_awaited = self.parking.as_ref().is_some_and(|parking| parking.room.waiting() > 0);
        if is_awaited { self.service.booked_worker(session, booking) } else { None }
    }

    /// Decides who waits and finds room of which nobody told; how many they are is counted, unless the fleet has changed,
    /// for which everybody is decided again.
    pub(super) fn look_for_room(&mut self) {
        let Some(parking) = &self.parking else { return };
        let (room, reconsiders) = (Arc::clone(&parking.room), parking.room.reconsiders());
        let answered = self.serve_waiting(None);
        if !reconsiders {
            room.counters().add(QueueCounter::FoundByLook, answered as u64);
        }
    }

    /// Decides who waits and finds room, with this worker or with any; a bounded number, and so much work, the rest in
    /// another turn. Returns how many were answered.
    pub(super) fn serve_waiting(&mut self, worker: Option<WorkerIndex>) -> usize {
        let (mut answered, begun_at) = (0, self.gather_work());
        for _ in 0..QUEUE_SERVED_PER_TURN_MAX {
            if self.gather_work() - begun_at >= WORK_PER_TURN_MAX {
                self.counters().bump(CoreCounter::TurnsEndedByWork);
                break;
            }
            let (Some(parking), service) = (&self.parking, &self.service) else { return answered };
            if worker.is_some_and(|worker| !service.has_room(worker)) {
                return answered;
            }
            let mut seen = FxHashMap::default();
            let has_room = |worker| *seen.entry(worker).or_insert_with(|| service.has_room(worker));
            let Some(in_hand) = parking.room.next(worker, has_room) else { return answered };
            if let Some((ticket, workers)) = self.serve(in_hand) {
                self.look_again(ticket, workers);
                // It waits for others now, or the room has gone again. Who is behind it is looked at in time.
                if worker.is_some() {
                    return answered;
                }
            } else {
                answered += 1;
            }
        }
        // A whole turn in vain is not followed by another at once, unless there are some who are to be decided anyhow.
        if let Some(parking) = self.parking.as_ref().filter(|parking| answered > 0 || parking.room.reconsiders()) {
            parking.late.serve();
        }
        answered
    }

    /// Decides a request that waits and answers it; if everybody is busy again it waits on, and that is returned.
    fn serve(&mut self, in_hand: InHand) -> Option<(Ticket, Vec<WorkerIndex>)> {
        let parked = in_hand.parked()?;
        let mut scratch = self.parking.as_mut().map(|parking| std::mem::take(&mut parking.scratch)).unwrap_or_default();
        let mut frame = Vec::new();
        let decided = self.decide_parked(parked, &mut scratch, &mut frame);
        if let Some(parking) = &mut self.parking {
            parking.scratch = scratch;
        }
        let booked = match decided {
            Ok(Routed::Busy(wait)) => return in_hand.put_back(&wait.workers).map(|ticket| (ticket, wait.workers)),
            Ok(Routed::Decided) => self.booked(),
            Err(error) => {
                self.refuse_with(parked.id, &error, &mut frame);
                Booked::default()
            }
        };
        let session = parked.session;
        if in_hand.answer(frame, booked) == Answered::Unwanted {
            self.undo(session, booked);
        }
        None
    }

    fn decide_parked(&mut self, parked: &Parked, scratch: &mut RequestScratch, frame: &mut Vec<u8>) -> Result<Routed> {
        match decode_request(FrameKind::Route as u8, &parked.body, scratch)? {
            Request::Route(request) => self.route(parked.session, parked.id, &request, frame),
            _ => Err(Error::new(Kind::Internal, "what waited is no route", "report it")),
        }
    }

    /// A reply is about to be given to connection number `connection`, which may have gone.
    pub(super) fn unpark(&mut self, connection: u64, ticket: Ticket) {
        if let Some(parking) = &mut self.parking {
            parking.forget(connection, ticket);
        }
    }

    /// A connection is closed because it does not read what comes late.
    pub(super) fn count_unread(&self) {
        if let Some(parking) = &self.parking {
            parking.room.counters().bump(QueueCounter::RepliesUnread);
        }
    }

    /// A reply could not be given to anybody: what it booked is freed.
    pub(super) fn undo(&mut self, session: SessionId, booked: Booked) {
        let Some(parking) = self.parking.as_ref().filter(|_| booked != Booked::default()) else { return };
        parking.room.counters().bump(QueueCounter::Undelivered);
        for handle in booked.into_iter().flatten() {
            if let Err(error) = self.service.free(session, &BookingRef::Handle(handle)) {
                tracing::warn!(%error, "what was booked for a connection that has gone stays booked until it is too old");
            }
        }
        // In another turn: whoever undoes may be serving who waits.
        parking.late.serve();
    }

    /// The connection has gone, and with it whoever wants to know.
    pub(super) fn cancel_parked(&mut self, connection: u64) {
        let Some(parking) = &mut self.parking else { return };
        for ticket in parking.tickets.remove(&connection).unwrap_or_default() {
            parking.room.cancel(ticket);
        }
    }
}
