//! The loads of all workers: what decisions book, and what gateways and workers report.

use parking_lot::Mutex;

use super::active::{ActiveDepths, ActiveTree, BLOCK_PARTS, PlacedPrompt, blocks_to};
use super::booking::Name;
use super::booking::{Booking, BookingHandle, BookingOutcome, BookingRef, Demand, HeldBlocks, Output, PromptBlocks};
use super::cell::{EngineLoad, Load, LoadCells, LoadStability};
use super::changes::ChangesSeen;
use super::ledger::{Ledger, ns};
use super::prefill::{PrefillFigures, PrefillModel};
use super::reporters::BackOff;
use super::reporters::{BeyondShare, Reporter};
use super::session::{SessionId, SessionToken};
use crate::error::{Error, Kind, Result};
use crate::ids::{LocalHash, SpaceId, WorkerIndex};
use crate::limits::{NAME_BYTES_MAX, PREFILL_BOOKING_SUFFIX};

/// When bookings end by themselves, and what the tree of their prompts is hashed by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadsConfig {
    /// A booking older than this is dropped.
    pub age_ms_max: u64,
    /// A session without connections for this long is dropped with its bookings.
    pub session_grace_ms: u64,
    /// Not to be known to those who choose prompts, who could have them collide.
    pub secret: u64,
    /// How long a prefill is reckoned to take.
    pub prefill: PrefillModel,
    /// Whether output counts as decode blocks.
    pub track_output_blocks: bool,
    /// How long a worker is left alone after it failed a request.
    pub back_off: BackOff,
    /// What a worker says of its load is forgotten at this age.
    pub reported_load_ms_max: u64,
    /// Of the sessions, the bookings and the memory for their prompts, one user may have so much, percent.
    pub user_share_percent: u8,
}

impl Default for LoadsConfig {
    fn default() -> Self {
        let prefill = PrefillModel::Off;
        Self {
            age_ms_max: 300_000,
            session_grace_ms: 10_000,
            secret: 0,
            prefill,
            track_output_blocks: false,
            back_off: BackOff::default(),
            reported_load_ms_max: 5_000,
            user_share_percent: 100,
        }
    }
}

/// A booking that was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Booked {
    /// Its name.
    pub handle: BookingHandle,
    /// Whether it took over from an earlier attempt of the same request.
    pub superseded: bool,
    /// Whether its blocks, which others may share, are counted in full for want of memory.
    pub unshared: bool,
    /// The user whose session it is.
    pub uid: u32,
}

/// How a look-up of active blocks went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActiveRead {
    /// Without a lock.
    LockFree,
    /// Something changed under every try, so the bookings stood still for it.
    Locked,
}

/// How far the end of a worker's bookings has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leaving {
    /// Bookings ended.
    pub ended: u64,
    /// Where to go on; `None` = that was all.
    pub next: Option<usize>,
}

/// How many bookings ended by themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expired {
    /// Because they were too old.
    pub by_age: u64,
    /// Because their session had gone.
    pub by_session: u64,
}

impl Expired {
    /// All of them.
    #[must_use]
    pub const fn bookings(&self) -> u64 {
        self.by_age + self.by_session
    }
}

/// How a prompt's blocks are counted.
struct ChargedBlocks {
    held: HeldBlocks,
    /// What they add to the worker, in parts of a block.
    added_parts: u64,
    /// Whether they could not be shared.
    unshared: bool,
}

/// The loads of all workers and the bookings they come from.
#[derive(Debug)]
pub struct Loads {
    pub(super) cells: LoadCells,
    pub(super) tree: ActiveTree,
    /// One short critical section per report; never held across a system call.
    pub(super) ledger: Mutex<Ledger>,
    pub(super) config: LoadsConfig,
}

impl Loads {
    /// Idle workers, the first of the places `0..workers`; the other places are nobody's.
    #[must_use]
    pub fn new(workers: usize, config: LoadsConfig) -> Self {
        let (cells, tree) = (LoadCells::new(workers), ActiveTree::new(config.secret));
        Self { cells, tree, ledger: Mutex::new(Ledger::new(&config)), config }
    }

    /// A worker's load as it was booked, without a lock: every prefill under way counts in full.
    #[must_use]
    pub fn read(&self, worker: WorkerIndex) -> Load {
        self.cells.read(worker)
    }

    /// A worker's load at a time, without a lock: of prefills whose time is known counts what is left of them.
    #[must_use]
    pub fn read_at(&self, worker: WorkerIndex, now_ns: u64) -> Load {
        let mut load = Load::default();
        self.read_into(worker, now_ns, &mut load);
        load
    }

    /// As [`Loads::read_at`], written to where it is wanted. Says whether it stays so until it is changed.
    #[inline]
    pub fn read_into(&self, worker: WorkerIndex, now_ns: u64, to: &mut Load) -> LoadStability {
        self.cells.read_at(worker, now_ns, ns(self.config.reported_load_ms_max), to)
    }

    /// All changes of loads so far: what is read after this call is at least as new.
    #[must_use]
    pub fn changes_seen(&self) -> ChangesSeen {
        self.cells.changes_seen()
    }

    /// Appends the places in the table of the workers whose loads changed since `seen`, and moves `seen` on. `false` if
    /// any may have: there were too many, or `seen` is of another table.
    #[must_use]
    pub fn changed_since(&self, seen: &mut ChangesSeen, places: &mut Vec<u32>) -> bool {
        self.cells.changed_since(seen, places)
    }

    /// How many leading blocks of a prompt each worker runs already, whichever of its requests they are of. No lock is
    /// taken unless bookings of prompts with the same first block come too fast.
    pub fn active(&self, space: SpaceId, locals: &[LocalHash], depths: &mut ActiveDepths) -> ActiveRead {
        if self.tree.read(space, locals, depths) {
            return ActiveRead::LockFree;
        }
        let _no_writer = self.ledger.lock();
        self.tree.read_alone(space, locals, depths);
        ActiveRead::Locked
    }

    /// A worker's decode blocks before they are rounded, in parts of a block.
    #[cfg(test)]
    pub(super) fn decode_parts(&self, worker: WorkerIndex) -> u64 {
        self.cells.decode_parts(worker)
    }

    /// Whether nothing is to be prefilled anywhere.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.ledger.lock().prefills.is_idle()
    }

    /// Bytes in use for the prompts in flight.
    #[must_use]
    pub fn active_bytes(&self) -> u64 {
        u64::from(self.ledger.lock().active.words_used()) * 8
    }

    /// A worker comes, to a place that is nobody's, and is idle.
    pub fn admit(&self, worker: WorkerIndex) {
        let _one_writer = self.ledger.lock();
        self.cells.give(worker);
    }

    /// What prefills take on a worker that is there, where it is not as on all; of those booked from now on.
    pub fn set_prefill(&self, worker: WorkerIndex, figures: PrefillFigures) {
        self.ledger.lock().prefills.set_figures(worker, figures);
    }

    /// Whether a worker can be booked.
    #[must_use]
    pub fn is_admitted(&self, worker: WorkerIndex) -> bool {
        let _one_writer = self.ledger.lock();
        self.cells.is_of(worker)
    }

    /// A worker leaves: it has no load and can be booked no more. Its bookings end in [`Loads::end_of`].
    pub fn leave(&self, worker: WorkerIndex) {
        let mut ledger = self.ledger.lock();
        self.cells.take(worker);
        ledger.prefills.forget(worker);
        ledger.failures.forget(worker);
        ledger.failure_reporters.end(worker);
        ledger.load_reporters.end(worker);
    }

    /// Ends the bookings of a worker that has left, among `slots_max` slots from `from`, 0 at first.
    pub fn end_of(&self, worker: WorkerIndex, from: usize, slots_max: usize) -> Leaving {
        let mut ledger = self.ledger.lock();
        let to = from.saturating_add(slots_max).min(ledger.bookings.slots());
        let of_worker = |slot: &u32| ledger.bookings.get(*slot).is_some_and(|booking| booking.worker == worker);
        let slots: Vec<u32> = (from as u32..to as u32).filter(of_worker).collect();
        // At no time in particular: nobody asks what is left for it to prefill.
        slots.iter().for_each(|slot| self.end(&mut ledger, *slot, 0));
        Leaving { ended: slots.len() as u64, next: (to < ledger.bookings.slots()).then_some(to) }
    }

    /// The worker of a live booking of `session`.
    #[must_use]
    pub fn worker_of(&self, session: SessionId, booking: BookingRef<'_>) -> Option<WorkerIndex> {
        let ledger = self.ledger.lock();
        let slot = ledger.find(session, booking).ok()?;
        ledger.bookings.get(slot).map(|booking| booking.worker)
    }

    /// How many tokens a live booking of `session` is known to have put out, and how many make a block; 0 = output is
    /// not counted.
    #[must_use]
    pub fn output_of(&self, session: SessionId, booking: BookingRef<'_>) -> Option<(u32, u32)> {
        let ledger = self.ledger.lock();
        let slot = ledger.find(session, booking).ok()?;
        ledger.bookings.get(slot).map(|booking| (booking.output.tokens, booking.output.block_size))
    }

    /// Live bookings of all sessions.
    #[must_use]
    pub fn live(&self) -> usize {
        self.ledger.lock().bookings.live()
    }

    /// Adds a connection of `uid` to the session of `token`; no token = a session of its own.
    ///
    /// # Errors
    /// `NotPermitted` if the token is another user's; `Overloaded` if there are too many sessions.
    pub fn open_session(&self, token: Option<SessionToken>, uid: u32) -> Result<SessionId> {
        self.ledger.lock().sessions.open(token, uid)
    }

    /// Takes a connection from a session. Its bookings live on for the configured grace.
    pub fn close_session(&self, session: SessionId, now_ns: u64) {
        self.ledger.lock().sessions.close(session, now_ns);
    }

    /// Books `demand` on a worker under the session's name for the request. A later attempt takes over.
    ///
    /// # Errors
    /// `InvalidArgument` for an empty or overlong request id; `BookingExists` if this or a later attempt
    /// is booked already; `TooManyBookings` at the bounds of a session and of a user, `Overloaded` at that of all; `Overloaded` too if the worker has left.
    pub fn book(
        &self,
        session: SessionId,
        request_id: &str,
        attempt: u32,
        worker: WorkerIndex,
        demand: Demand<'_>,
        now_ns: u64,
    ) -> Result<Booked> {
        if request_id.is_empty() || request_id.len() > NAME_BYTES_MAX {
            return Err(Error::new(
                Kind::InvalidArgument,
                format!("a booking needs a request_id of 1 to {NAME_BYTES_MAX} bytes, not {}", request_id.len()),
                "name each request, or ask without booking",
            ));
        }
        let name = Name::new(self.config.secret, session, request_id);
        let mut ledger = self.ledger.lock();
        if !self.cells.is_of(worker) {
            return Err(Error::new(Kind::Overloaded, "the chosen worker has just left", "ask again"));
        }
        let superseded = ledger.bookings.live_named(name);
        let live_attempt = superseded.and_then(|slot| ledger.bookings.get(slot)).map(|booking| booking.attempt);
        if let Some(live_attempt) = live_attempt.filter(|live| *live >= attempt) {
            return Err(Error::new(
                Kind::BookingExists,
                format!("request {request_id:?} is booked by attempt {live_attempt}"),
                "free it, or ask under a higher attempt",
            ));
        }
        ledger.admit(session, superseded.is_some())?;
        if let Some(slot) = superseded {
            self.end(&mut ledger, slot, now_ns);
        }
        let placed = self.place(&mut ledger, (session, worker), &demand);
        let prefill = ledger.begin_prefill(worker, [demand.prefill_tokens, demand.cached_tokens], now_ns);
        let prompt_blocks = match (placed.held, demand.blocks) {
            (HeldBlocks::Shared(_), PromptBlocks::Shared(locals)) => locals.len(),
            _ => 0,
        };
        let booking = Booking {
            generation: 0,
            name,
            attempt,
            worker,
            prefill,
            space: demand.space,
            prompt_tokens: [demand.prefill_tokens, demand.cached_tokens],
            held: placed.held,
            output: Output::new(demand.block_size, demand.expected_output_tokens),
            prefilling: true,
            is_prefill_half: request_id.ends_with(PREFILL_BOOKING_SUFFIX),
            booked_at_ns: now_ns,
        };
        let (slot, generation) = ledger.keep(booking, prompt_blocks);
        let handle = ledger.handle(session, slot, generation);
        let backlog = ledger.prefills.backlog(worker);
        self.cells.change(worker, |record| {
            record.backlog = backlog;
            record.decode_parts += placed.added_parts;
            record.requests += 1;
        });
        let uid = ledger.sessions.uid_of(session);
        Ok(Booked { handle, superseded: superseded.is_some(), unshared: placed.unshared, uid })
    }

    /// Drops whose session has gone and what is too old; at most `bookings_max` together, so that a caller
    /// may let others in between.
    pub fn expire(&self, now_ns: u64, bookings_max: usize) -> Expired {
        let mut ledger = self.ledger.lock();
        let mut expired = Expired::default();
        for slot in ledger.sessions.end_abandoned(now_ns, ns(self.config.session_grace_ms), bookings_max) {
            self.end(&mut ledger, slot, now_ns);
            expired.by_session += 1;
        }
        while expired.bookings() < bookings_max as u64 {
            let Some(slot) = ledger.bookings.oldest_beyond(now_ns, ns(self.config.age_ms_max)) else { break };
            self.end(&mut ledger, slot, now_ns);
            expired.by_age += 1;
        }
        expired
    }

    fn place(
        &self,
        ledger: &mut Ledger,
        (session, worker): (SessionId, WorkerIndex),
        demand: &Demand<'_>,
    ) -> ChargedBlocks {
        let alone = |blocks, unshared| ChargedBlocks {
            held: HeldBlocks::Alone(blocks),
            added_parts: blocks * BLOCK_PARTS,
            unshared,
        };
        match demand.blocks {
            PromptBlocks::Alone(blocks) => alone(blocks, false),
            PromptBlocks::Shared([]) => alone(0, false),
            PromptBlocks::Shared(locals) if !ledger.may_share(session, locals.len()) => {
                alone(locals.len() as u64, true)
            }
            PromptBlocks::Shared(locals) => match ledger.active.add(&self.tree, demand.space, locals, worker) {
                Some(PlacedPrompt { node, added_parts }) => {
                    ChargedBlocks { held: HeldBlocks::Shared(node), added_parts, unshared: false }
                }
                None => alone(locals.len() as u64, true),
            },
        }
    }

    /// Ends the booking in `slot` and gives its load back.
    pub(super) fn end(&self, ledger: &mut Ledger, slot: u32, now_ns: u64) {
        let Some(booking) = ledger.end(slot) else { return };
        let mut freed_parts = booking.own_parts();
        if let HeldBlocks::Shared(node) = booking.held {
            freed_parts += ledger.active.remove(&self.tree, node, booking.worker);
        }
        if let Some(prefill) = booking.prefill {
            ledger.prefills.end(booking.worker, prefill, now_ns);
        }
        let backlog = ledger.prefills.backlog(booking.worker);
        self.cells.change(booking.worker, |record| {
            record.backlog = backlog;
            record.decode_parts -= freed_parts;
            record.requests -= 1;
        });
    }
}

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

    /// The daemon itself saw that a worker's engine answers no requests: no request is routed to it until then.
    pub fn leave_alone(&self, worker: WorkerIndex, until_ns: u64) {
        let _ledger = self.ledger.lock();
        if self.cells.is_of(worker) {
            self.cells.change(worker, |record| record.back_off_until_ns = record.back_off_until_ns.max(until_ns));
        }
    }
}
