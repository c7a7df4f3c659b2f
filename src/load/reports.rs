//! What a gateway reports of its bookings and of workers.

use super::active::blocks_to;
use super::booking::{BookingOutcome, BookingRef, HeldBlocks};
use super::books::{Ledger, ns};
use super::cell::EngineLoad;
use super::names::Name;
use super::reporters::{BeyondShare, Reporter};
use super::session::SessionId;
use super::table::Loads;
use crate::error::{Error, Kind, Result};
use crate::ids::{SpaceId, WorkerIndex};

/// A booking that was moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// What became of the report.
    pub outcome: BookingOutcome,
    /// Whether its blocks, which others may share, are counted in full from now on for want of memory.
    pub unshared: bool,
}

/// A request that ended, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Freed {
    /// What became of the report.
    pub outcome: BookingOutcome,
    /// Whether the half of it that prefills ended too.
    pub prefill_half: bool,
}

impl Loads {
    /// The gateway says that a booking's prefill is done, after so many microseconds (0 = it does not say).
    pub fn prefill_complete(
        &self,
        session: SessionId,
        booking: BookingRef<'_>,
        prefill_us: u64,
        now_ns: u64,
    ) -> BookingOutcome {
        let mut ledger = self.ledger.lock();
        match ledger.find(session, booking) {
            Ok(slot) => {
                let Some(booking) = ledger.bookings.get_mut(slot) else { return BookingOutcome::Unknown };
                if !std::mem::take(&mut booking.prefilling) {
                    return BookingOutcome::AlreadyApplied;
                }
                let (worker, prefill) = (booking.worker, booking.prefill.take());
                if let Some(prefill) = prefill {
                    ledger.prefills.learn(worker, prefill, prefill_us, now_ns);
                    ledger.prefills.end(worker, prefill, now_ns);
                }
                let backlog = ledger.prefills.backlog(worker);
                self.cells.change(worker, |record| record.backlog = backlog);
                BookingOutcome::Applied
            }
            Err(outcome) => outcome,
        }
    }

    /// The gateway says that a request has ended, however it ended. Idempotent.
    pub fn free(&self, session: SessionId, booking: BookingRef<'_>, now_ns: u64) -> BookingOutcome {
        let mut ledger = self.ledger.lock();
        match ledger.find(session, booking) {
            Ok(slot) => {
                self.end(&mut ledger, slot, now_ns);
                BookingOutcome::Applied
            }
            Err(outcome) => outcome,
        }
    }

    /// The gateway says that a request has ended, by its name: as [`Loads::free`], and the half of it that prefills ends
    /// too, if that was booked by itself. Answers for the request.
    pub fn free_request(&self, session: SessionId, request_id: &str, attempt: u32, now_ns: u64) -> Freed {
        let mut ledger = self.ledger.lock();
        let prefill_half = self.prefill_half(&mut ledger, session, request_id, attempt);
        if let Some(slot) = prefill_half {
            self.end(&mut ledger, slot, now_ns);
        }
        let outcome = match ledger.find(session, BookingRef::Request { request_id, attempt }) {
            Ok(slot) => {
                self.end(&mut ledger, slot, now_ns);
                BookingOutcome::Applied
            }
            Err(outcome) => outcome,
        };
        Freed { outcome, prefill_half: prefill_half.is_some() }
    }

    /// The slot of the half of a request's attempt that prefills, if it is live. Most sessions have no such halves, and
    /// need not be asked for a name.
    fn prefill_half(&self, ledger: &mut Ledger, session: SessionId, request_id: &str, attempt: u32) -> Option<u32> {
        ledger.sessions.get_mut(session).filter(|session| session.prefill_halves > 0)?;
        let name = Name::of_prefill_half(self.config.secret, session, request_id)?;
        let slot = ledger.bookings.live_named(name)?;
        ledger.bookings.get(slot).filter(|booking| booking.attempt == attempt).map(|_| slot)
    }

    /// Ends what an attempt before `attempt` booked under this name, if anything; whether there was something.
    pub fn free_earlier(&self, session: SessionId, request_id: &str, attempt: u32, now_ns: u64) -> bool {
        let name = Name::new(self.config.secret, session, request_id);
        let mut ledger = self.ledger.lock();
        let Some(slot) = ledger.bookings.live_named(name) else { return false };
        let is_earlier = ledger.bookings.get(slot).is_some_and(|booking| booking.attempt < attempt);
        if is_earlier {
            self.end(&mut ledger, slot, now_ns);
        }
        is_earlier
    }

    /// The gateway says how many tokens a request has put out so far; less than it said before changes nothing. Where
    /// output is counted it becomes blocks, which weigh less the nearer the end that was expected, and so does the part
    /// of the prompt that the request runs alone.
    pub fn output_progress(&self, session: SessionId, booking: BookingRef<'_>, tokens: u32) -> BookingOutcome {
        let mut ledger = self.ledger.lock();
        let slot = match ledger.find(session, booking) {
            Ok(slot) => slot,
            Err(outcome) => return outcome,
        };
        let Some(booking) = ledger.bookings.get_mut(slot) else { return BookingOutcome::Unknown };
        if tokens <= booking.output.tokens {
            return BookingOutcome::AlreadyApplied;
        }
        if !self.config.track_output_blocks {
            booking.output.tokens = tokens;
            return BookingOutcome::Applied;
        }
        let (worker, held, before_parts) = (booking.worker, booking.held, booking.own_parts());
        booking.output.grow(booking.prompt_tokens.iter().sum(), tokens);
        let (own_parts, weight) = (booking.own_parts(), booking.output.weight);
        let taken_parts = match held {
            HeldBlocks::Shared(node) => ledger.active.weigh(&self.tree, node, worker, weight),
            HeldBlocks::Alone(_) => 0,
        };
        let change = own_parts as i64 - before_parts as i64 - taken_parts;
        self.cells.change(worker, |record| record.decode_parts = record.decode_parts.wrapping_add_signed(change));
        BookingOutcome::Applied
    }

    /// The gateway says that a request runs on another worker of its space than the one it was booked on. What it has to
    /// prefill there counts as it was booked: what the other worker holds of the prompt is not known any more.
    ///
    /// # Errors
    /// `InvalidArgument` if the worker serves another space; `Overloaded` if it has left.
    pub fn served(
        &self,
        session: SessionId,
        booking: BookingRef<'_>,
        (space, to): (SpaceId, WorkerIndex),
        now_ns: u64,
    ) -> Result<Moved> {
        let mut ledger = self.ledger.lock();
        let ended = |outcome| Ok(Moved { outcome, unshared: false });
        let slot = match ledger.find(session, booking) {
            Ok(slot) => slot,
            Err(outcome) => return ended(outcome),
        };
        let Some(booking) = ledger.bookings.get_mut(slot) else { return ended(BookingOutcome::Unknown) };
        if booking.space != space {
            let message = "the worker serves another space than the booking's";
            return Err(Error::new(Kind::InvalidArgument, message, "name a candidate of the route's reply"));
        }
        if booking.worker == to {
            return ended(BookingOutcome::AlreadyApplied);
        }
        if !self.cells.is_of(to) {
            return Err(Error::new(Kind::Overloaded, "the worker has just left", "free the booking"));
        }
        let from = std::mem::replace(&mut booking.worker, to);
        let (own_parts, prompt_tokens, prefill) = (booking.own_parts(), booking.prompt_tokens, booking.prefill.take());
        let (held, begins) = (booking.held, booking.prefilling);
        if let Some(prefill) = prefill {
            ledger.prefills.end(from, prefill, now_ns);
        }
        let prefill = if begins { ledger.begin_prefill(to, prompt_tokens, now_ns) } else { None };
        let (mut left_parts, mut came_parts, mut unshared) = (own_parts, own_parts, false);
        let mut held_there = held;
        if let HeldBlocks::Shared(node) = held {
            if let Some((added_parts, freed_parts)) = ledger.active.pass_on(&self.tree, node, from, to) {
                (left_parts, came_parts) = (own_parts + freed_parts, own_parts + added_parts);
            } else {
                held_there = HeldBlocks::Alone(blocks_to(&self.tree, node));
                left_parts += ledger.active.remove(&self.tree, node, from);
                ledger.unshare(slot);
                unshared = true;
            }
        }
        if let Some(booking) = ledger.bookings.get_mut(slot) {
            (booking.prefill, booking.held) = (prefill, held_there);
            came_parts = if unshared { booking.own_parts() } else { came_parts };
        }
        for (worker, is_there) in [(from, false), (to, true)] {
            let backlog = ledger.prefills.backlog(worker);
            self.cells.change(worker, |record| {
                record.backlog = backlog;
                if is_there {
                    record.decode_parts += came_parts;
                    record.requests += 1;
                } else {
                    record.decode_parts -= left_parts;
                    record.requests -= 1;
                }
            });
        }
        Ok(Moved { outcome: BookingOutcome::Applied, unshared })
    }

    /// A worker says itself how busy it is, whatever gateways reported of it before. `false` = the worker has left.
    pub fn report_load(&self, worker: WorkerIndex, load: EngineLoad, now_ns: u64) -> bool {
        let mut ledger = self.ledger.lock();
        ledger.load_reporters.end(worker);
        self.cells.change(worker, |record| record.engine_report = Some((load, now_ns)));
        self.cells.is_of(worker)
    }

    /// A gateway says how busy a worker is. `false` = the worker has left.
    ///
    /// # Errors
    /// [`BeyondShare`]: the load counts for nothing.
    pub fn report_load_by(
        &self,
        reporter: Reporter,
        worker: WorkerIndex,
        load: EngineLoad,
        now_ns: u64,
    ) -> Result<bool, BeyondShare> {
        let mut ledger = self.ledger.lock();
        if !self.cells.is_of(worker) {
            return Ok(false);
        }
        let (user, workers_max) = ledger.user_of(reporter);
        if !ledger.load_reporters.admits(user, worker, workers_max, now_ns) {
            return Err(BeyondShare);
        }
        ledger.load_reporters.put(user, worker, now_ns.saturating_add(ns(self.config.reported_load_ms_max)));
        self.cells.change(worker, |record| record.engine_report = Some((load, now_ns)));
        Ok(true)
    }

    /// A gateway says that a request failed on a worker. Returns for how many nanoseconds the worker is left alone from
    /// now on. While a worker is left alone, a report adds nothing, and is answered whoever sends it.
    ///
    /// # Errors
    /// [`BeyondShare`]: the worker is not left alone.
    pub fn report_failure(&self, reporter: Reporter, worker: WorkerIndex, now_ns: u64) -> Result<u64, BeyondShare> {
        let mut ledger = self.ledger.lock();
        if !self.cells.is_of(worker) {
            return Ok(0);
        }
        if let Some(until_ns) = ledger.failures.in_force(worker, now_ns) {
            return Ok(until_ns - now_ns);
        }
        let (user, workers_max) = ledger.user_of(reporter);
        if !ledger.failure_reporters.admits(user, worker, workers_max, now_ns) {
            return Err(BeyondShare);
        }
        let until_ns = ledger.failures.add(worker, self.config.back_off, now_ns);
        if until_ns > now_ns {
            ledger.failure_reporters.put(user, worker, until_ns);
        }
        self.cells.change(worker, |record| record.back_off_until_ns = record.back_off_until_ns.max(until_ns));
        Ok(until_ns.saturating_sub(now_ns))
    }

    /// The daemon itself saw that a worker's engine serves no requests: it is left alone until then.
    pub fn leave_alone(&self, worker: WorkerIndex, until_ns: u64) {
        let _books = self.books.lock();
        if self.cells.is_of(worker) {
            self.cells.change(worker, |record| record.back_off_until_ns = record.back_off_until_ns.max(until_ns));
        }
    }
}
