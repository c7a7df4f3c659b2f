//! The loads of all workers: what decisions book, and what gateways and workers report.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};

use super::active::{ActiveDepths, ActiveTree, BLOCK_PARTS, PlacedPrompt, SeenDivergence, SpareRun, blocks_to};
use super::booking::{Booking, Demand, HeldBlocks, Name, Output, PromptBlocks};
use super::change_log::ChangesSeen;
use super::ended::{EndReason, EndedQueue};
use super::ledger::{Ledger, ns};
use super::load_cells::{Load, LoadCells, LoadStability};
use super::loads_config::LoadsConfig;
use super::prefill::PrefillFigures;
use super::prefill_laws::{LawRestored, LearntLaws, PrefillClass};
use super::recent_work::recent_ms;
use super::reporters::{BeyondShare, Reporter};
use super::restored::ABSENT;
use super::session::SessionId;
use super::spares::Spares;
use crate::engine_law::PrefillLaw;
use crate::error::{Error, Kind, Result};
use crate::ids::{LocalHash, SpaceId, Worker, WorkerIndex};
use crate::limits::{NAME_BYTES_MAX, PREFILL_BOOKING_SUFFIX, RECENT_SWEPT_PER_LOCK_MAX};
use crate::protocol::{BookingHandle, BookingOutcome, BookingRef, EngineLoad, SessionToken};

/// A booking that was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Booked {
    /// Its handle.
    pub handle: BookingHandle,
    /// Whether it took over from an earlier attempt of the same request.
    pub superseded: bool,
    /// Whether its blocks count in full because they had no place in the tree.
    pub unshared: bool,
    /// The user of the session.
    pub uid: u32,
}

/// How a look-up of active blocks went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActiveRead {
    /// The prompt has no blocks.
    Empty,
    /// Without a lock, and where the prompt diverges from the prompts in flight.
    LockFree(SeenDivergence),
    /// Under the lock, because every try met a change.
    Locked,
}

/// The progress in ending a worker's bookings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leaving {
    /// Bookings ended.
    pub ended: u64,
    /// Where to continue; `None` = done.
    pub next: Option<usize>,
}

/// Bookings that ended by themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expired {
    /// Ended by age.
    pub by_age: u64,
    /// Ended because their session was gone.
    pub by_session: u64,
}

impl Expired {
    /// The sum of both.
    #[must_use]
    pub const fn bookings(&self) -> u64 {
        self.by_age + self.by_session
    }
}

/// How a prompt's blocks are counted.
pub(super) struct ChargedBlocks {
    pub(super) held: HeldBlocks,
    /// What they add to the worker, in parts of a block.
    pub(super) added_parts: u64,
    /// Whether they could not be shared.
    unshared: bool,
}

/// The loads of all workers, and the bookings that they come from.
#[derive(Debug)]
pub struct Loads {
    pub(super) cells: LoadCells,
    pub(super) tree: ActiveTree,
    /// One short critical section per report; never held across a system call.
    pub(super) ledger: Mutex<Ledger>,
    spares: Spares,
    /// Memory of bookings, as of the last look for expired bookings. Relaxed: a figure.
    ledger_bytes: AtomicU64,
    pub(super) config: LoadsConfig,
    /// Recorded bookings that have ended; `None` = there is no journal.
    pub(super) ended: Option<EndedQueue>,
    /// Bookings of traced requests that have ended; `None` = nothing is traced.
    pub(super) traced: Option<EndedQueue>,
}

impl Loads {
    /// Idle workers at the places `0..workers`; all other places are unused.
    #[must_use]
    pub fn new(workers: usize, config: LoadsConfig) -> Self {
        let (cells, tree) = (LoadCells::new(workers), ActiveTree::new(config.secret, config.active_words_max));
        let queue = |waiting_max| (waiting_max > 0).then(|| EndedQueue::new(waiting_max));
        let (ended, traced) = (queue(config.ended_waiting_max), queue(config.traced_waiting_max));
        let (ledger, ledger_bytes) = (Mutex::new(Ledger::new(&config)), AtomicU64::new(0));
        Self { cells, tree, ledger, spares: Spares::default(), ledger_bytes, config, ended, traced }
    }

    /// A worker's load as booked, without a lock: every prefill in progress counts in full.
    #[must_use]
    pub fn read(&self, worker: WorkerIndex) -> Load {
        self.cells.read(worker)
    }

    /// The version of a worker's load: not that of a [`Load`] read before if it has changed since, or is being changed.
    #[must_use]
    pub fn version(&self, worker: WorkerIndex) -> u64 {
        self.cells.version(worker)
    }

    /// A worker's load at a time, without a lock: modelled prefills count what is left of them.
    #[must_use]
    pub fn read_at(&self, worker: WorkerIndex, now_ns: u64) -> Load {
        let mut load = Load::default();
        self.read_into(worker, now_ns, &mut load);
        load
    }

    /// As [`Loads::read_at`], written into `to`. Returns whether the load changes with time.
    #[inline]
    pub fn read_into(&self, worker: WorkerIndex, now_ns: u64, to: &mut Load) -> LoadStability {
        self.cells.read_at(worker, now_ns, ns(self.config.reported_load_ms_max), to)
    }

    /// All changes so far. A load that is read after this call is at least as new.
    #[must_use]
    pub fn changes_seen(&self) -> ChangesSeen {
        self.cells.changes_seen()
    }

    /// Fetches ahead the loads that changed since `seen`, and what [`Loads::active`] reads first. It changes no answer.
    #[inline]
    pub fn prefetch(&self, seen: ChangesSeen, space: SpaceId, locals: &[LocalHash]) {
        self.cells.prefetch_changed(seen);
        self.tree.prefetch(space, locals);
    }

    /// Appends the places of the workers whose load changed since `seen`, and moves `seen` on. `false` if any load may
    /// have changed: the log does not reach back, or is of another table.
    #[must_use]
    pub fn changed_since(&self, seen: &mut ChangesSeen, places: &mut Vec<u32>) -> bool {
        self.cells.changed_since(seen, places)
    }

    /// Leading blocks of a prompt that each worker already runs, in any of its requests. Takes no lock unless bookings
    /// of prompts with the same first block come too fast.
    #[inline]
    pub fn active(&self, space: SpaceId, locals: &[LocalHash], depths: &mut impl ActiveDepths) -> ActiveRead {
        if locals.is_empty() {
            depths.clear();
            return ActiveRead::Empty;
        }
        if let Some(divergence) = self.tree.read(space, locals, depths) {
            return ActiveRead::LockFree(divergence);
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

    /// Whether no prefill is in progress.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.ledger.lock().prefills.is_idle()
    }

    /// Memory of the prompts in flight, bytes.
    #[must_use]
    pub fn active_bytes(&self) -> u64 {
        u64::from(self.ledger.lock().active.words_used()) * 8
    }

    /// Memory of bookings and of their prompts' blocks, bytes. It takes no lock; all but the blocks is as old as the last
    /// call of [`Loads::expire`]. Memory of other routers' gauges is reserved for each router, and not counted here.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.ledger_bytes.load(Ordering::Relaxed) + self.tree.bytes()
    }

    /// Gives an unused place to an idle worker.
    pub fn admit(&self, worker: WorkerIndex) {
        let _one_writer = self.ledger.lock();
        self.cells.give(worker);
    }

    /// Sets the prefill figures of an admitted worker, for later bookings, where they differ from the model's.
    pub fn set_prefill(&self, worker: WorkerIndex, figures: PrefillFigures) {
        self.ledger.lock().prefills.set_figures(worker, figures);
    }

    /// Puts an admitted worker into a class, whose workers share the law of their prefills' time. The first worker of a
    /// class gives its prior. Returns what a new class has from an earlier run.
    pub fn set_prefill_class(
        &self,
        index: WorkerIndex,
        worker: Worker,
        name: &str,
        prior: Option<PrefillLaw>,
    ) -> Option<LawRestored> {
        let mut ledger = self.ledger.lock();
        let restored = ledger.prefills.laws.set_class(index, worker, name, prior);
        let prefill = ledger.prefills.load_of(index);
        ledger.others.change(&self.cells, index, |record| record.prefill = prefill);
        restored
    }

    /// What is known of each class of workers.
    #[must_use]
    pub fn prefill_classes(&self) -> Vec<PrefillClass> {
        self.ledger.lock().prefills.laws.classes().cloned().collect()
    }

    /// Takes what an earlier run learnt of the workers, for those that join a class from now on. Returns the names of
    /// classes whose constants are beyond the bounds of learning: these are left out.
    pub fn restore_laws(&self, learnt: &LearntLaws, now_unix_ms: u64) -> Vec<String> {
        self.ledger.lock().prefills.laws.restore(learnt, now_unix_ms)
    }

    /// What is learnt so far, for the next run, and what an earlier one knew of workers that have not joined for at most
    /// `keep_ms`.
    #[must_use]
    pub fn learnt_laws(&self, now_ns: u64, now_unix_ms: u64, keep_ms: u64) -> LearntLaws {
        self.ledger.lock().prefills.laws.save(now_ns, now_unix_ms, keep_ms)
    }

    /// Publishes laws that have changed, and gives them to their workers among `places_max` places from `from`, 0 at
    /// first. Returns where to continue; `None` = done, or no law has changed.
    ///
    /// Reports only change the estimates, so that no report pays for the other workers of its class.
    pub fn publish_laws(&self, from: usize, places_max: usize) -> Option<usize> {
        let mut ledger = self.ledger.lock();
        if from == 0 && !ledger.prefills.laws.publish() {
            return None;
        }
        let to = from.saturating_add(places_max);
        let Ledger { prefills, others, .. } = &mut *ledger;
        for index in prefills.laws.with_new_law(from..to) {
            let prefill = prefills.load_of(index);
            others.change(&self.cells, index, |record| record.prefill = prefill);
        }
        (to < prefills.laws.places()).then_some(to)
    }

    /// The names of all classes of workers, in the order in which [`EndedBooking::class`] counts them.
    #[must_use]
    pub fn prefill_class_names(&self) -> Vec<String> {
        self.ledger.lock().prefills.laws.class_names().map(str::to_owned).collect()
    }

    /// Whether a worker can be booked.
    #[must_use]
    pub fn is_admitted(&self, worker: WorkerIndex) -> bool {
        let _one_writer = self.ledger.lock();
        self.cells.is_of(worker)
    }

    /// Removes a worker: its load is zero and it cannot be booked. Its bookings end in [`Loads::end_of`].
    pub fn leave(&self, worker: WorkerIndex) {
        let mut ledger = self.ledger.lock();
        self.cells.take(worker);
        ledger.others.forget(worker);
        ledger.prefills.forget(worker);
        ledger.failures.forget(worker);
        ledger.failure_reporters.end(worker);
        ledger.load_reporters.end(worker);
    }

    /// Ends the bookings of a removed worker among `slots_max` slots from `from`, 0 at first.
    pub fn end_of(&self, worker: WorkerIndex, from: usize, slots_max: usize) -> Leaving {
        let mut ledger = self.ledger.lock();
        let to = from.saturating_add(slots_max).min(ledger.bookings.slots());
        let of_worker = |slot: &u32| ledger.bookings.get(*slot).is_some_and(|booking| booking.worker == worker);
        let slots: Vec<u32> = (from as u32..to as u32).filter(of_worker).collect();
        // The time does not matter: no reader is left for the backlog of a removed worker.
        slots.iter().for_each(|slot| self.end(&mut ledger, *slot, EndReason::WorkerLeft, 0));
        Leaving { ended: slots.len() as u64, next: (to < ledger.bookings.slots()).then_some(to) }
    }

    /// The worker of a live booking of `session`.
    #[must_use]
    pub fn worker_of(&self, session: SessionId, booking: BookingRef<'_>) -> Option<WorkerIndex> {
        let ledger = self.ledger.lock();
        let slot = ledger.find(session, booking).ok()?;
        ledger.bookings.get(slot).map(|booking| booking.worker)
    }

    /// Output tokens of a live booking of `session` so far, and tokens per block; 0 = output is not counted.
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

    /// Takes the lock for a booking or its end, and fetches ahead what every one of them changes.
    #[inline]
    fn lock_to_change(&self) -> MutexGuard<'_, Ledger> {
        Ledger::prefetch_to_write(self.ledger.data_ptr());
        self.ledger.lock()
    }

    /// Adds a connection of `uid` to the session of `token`; without a token, to a session of its own.
    ///
    /// # Errors
    /// `NotPermitted` if the token is another user's; `Overloaded` if there are too many sessions.
    pub fn open_session(&self, token: Option<SessionToken>, uid: u32) -> Result<SessionId> {
        self.ledger.lock().sessions.open(token, uid)
    }

    /// Removes a connection from a session. Its bookings live on for the configured grace.
    pub fn close_session(&self, session: SessionId, now_ns: u64) {
        self.ledger.lock().sessions.close(session, now_ns);
    }

    /// Books `demand` on a worker under the session's name for the request. A later attempt takes over.
    ///
    /// # Errors
    /// `InvalidArgument` for an empty or overlong request id. `BookingExists` if this or a later attempt is booked.
    /// `TooManyBookings` at the limit of a session or user. `Overloaded` at the limit of all bookings, or if the worker
    /// has left.
    pub fn book(
        &self,
        session: SessionId,
        request_id: &str,
        attempt: u32,
        worker: WorkerIndex,
        demand: Demand<'_>,
        now_ns: u64,
    ) -> Result<Booked> {
        check_name(request_id)?;
        let name = Name::new(self.config.secret, session, request_id);
        let mut spare = self.spares.prepare(&self.tree, (session, worker), &demand);
        self.cells.prefetch_to_write(worker);
        let mut ledger = self.lock_to_change();
        ledger.prefills.prefetch_to_write(worker, None);
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
            self.end(&mut ledger, slot, EndReason::Superseded, now_ns);
        }
        let placed = self.place(&mut ledger, (session, worker), &demand, spare.as_deref_mut());
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
            prompt_tokens: [demand.prefill_tokens, demand.cached_tokens].map(|of| of.try_into().unwrap_or(u32::MAX)),
            held: placed.held,
            output: Output::new(demand.block_size, demand.expected_output_tokens),
            prefilling: true,
            is_recorded: demand.is_recorded,
            is_traced: demand.is_traced,
            began_alone: false,
            prefilled_us: 0,
            first_token_at_ns: 0,
            is_prefill_half: request_id.ends_with(PREFILL_BOOKING_SUFFIX),
            booked_at_ns: now_ns,
        };
        let (slot, generation) = ledger.keep(booking, prompt_blocks);
        let handle = ledger.handle(session, slot, generation);
        let (work_ns, prefill) = (ledger.prefills.work_ns(prefill), ledger.prefills.load_of(worker));
        ledger.others.change(&self.cells, worker, |record| {
            record.prefill = prefill;
            record.recent.add_prefill(work_ns, now_ns);
            record.decode_parts += placed.added_parts;
            record.requests += 1;
        });
        let uid = ledger.sessions.uid_of(session);
        Ok(Booked { handle, superseded: superseded.is_some(), unshared: placed.unshared, uid })
    }

    /// Ends the bookings of abandoned sessions and those that are too old: at most `bookings_max`, so that a caller can
    /// let others in between. Forgets recent prefills that no longer count. Call it every second.
    pub fn expire(&self, now_ns: u64, bookings_max: usize) -> Expired {
        let mut ledger = self.ledger.lock();
        self.ledger_bytes.store(ledger.bytes(), Ordering::Relaxed);
        let mut expired = Expired::default();
        ledger.absent.expire(now_ns);
        self.forget_faded(&mut ledger, now_ns);
        for slot in ledger.sessions.end_abandoned(now_ns, ns(self.config.session_grace_ms), bookings_max) {
            self.end(&mut ledger, slot, EndReason::SessionGone, now_ns);
            expired.by_session += 1;
        }
        while expired.bookings() < bookings_max as u64 {
            let Some(slot) = ledger.bookings.oldest_beyond(now_ns, ns(self.config.age_ms_max)) else { break };
            self.end(&mut ledger, slot, EndReason::TooOld, now_ns);
            expired.by_age += 1;
        }
        expired
    }

    /// Forgets recent prefills of long ago among a few workers at a time, before their times wrap.
    fn forget_faded(&self, ledger: &mut Ledger, now_ns: u64) {
        let (from, now_ms) = (ledger.swept_to, recent_ms(now_ns));
        let to = from.saturating_add(RECENT_SWEPT_PER_LOCK_MAX).min(self.cells.places());
        ledger.swept_to = if to == self.cells.places() { 0 } else { to };
        for worker in self.cells.owners(from..to) {
            if ledger.own(&self.cells, worker).recent.has_faded(now_ms) {
                ledger.others.change(&self.cells, worker, |record| record.recent.prefill_share = 0.0);
            }
        }
    }

    pub(super) fn place(
        &self,
        ledger: &mut Ledger,
        (session, worker): (SessionId, WorkerIndex),
        demand: &Demand<'_>,
        spare: Option<&mut SpareRun>,
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
            PromptBlocks::Shared(locals) => {
                match ledger.active.add(&self.tree, &demand.prompt(locals, worker), spare) {
                    Some(PlacedPrompt { node, added_parts }) => {
                        ChargedBlocks { held: HeldBlocks::Shared(node), added_parts, unshared: false }
                    }
                    None => alone(locals.len() as u64, true),
                }
            }
        }
    }

    /// Ends the booking in `slot` and subtracts its load. If its gateway freed it, learns how long it decoded.
    pub(super) fn end(&self, ledger: &mut Ledger, slot: u32, reason: EndReason, now_ns: u64) {
        let Some(booking) = ledger.end(slot) else { return };
        self.cells.prefetch_to_write(booking.worker);
        ledger.prefills.prefetch_to_write(booking.worker, booking.prefill);
        self.record_end(ledger, &booking, reason, now_ns);
        let is_decoded = reason == EndReason::Freed && !booking.prefilling;
        let mut freed_parts = booking.own_parts();
        if let HeldBlocks::Shared(node) = booking.held {
            freed_parts += ledger.active.remove(&self.tree, node, booking.worker);
        }
        if let Some(prefill) = booking.prefill {
            ledger.prefills.end(booking.worker, prefill, now_ns);
        }
        let prefill = ledger.prefills.load_of(booking.worker);
        ledger.others.change(&self.cells, booking.worker, |record| {
            record.prefill = prefill;
            record.decode_parts -= freed_parts;
            record.requests -= 1;
            if is_decoded {
                record.recent.end_decode(now_ns.saturating_sub(booking.first_token_at_ns) as f32 * 1e-9);
            }
        });
    }
}

fn check_name(request_id: &str) -> Result<()> {
    // The suffix comes on top of the id that the gateway sent, whose length the codec checks.
    let sent = request_id.strip_suffix(PREFILL_BOOKING_SUFFIX).unwrap_or(request_id);
    if request_id.is_empty() || sent.len() > NAME_BYTES_MAX {
        let message = format!("a booking needs a request_id of 1 to {NAME_BYTES_MAX} bytes, not {}", sent.len());
        return Err(Error::new(Kind::InvalidArgument, message, "name each request, or ask without booking"));
    }
    Ok(())
}

/// A booking that moved to another worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// The outcome of the report.
    pub outcome: BookingOutcome,
    /// Whether its blocks count in full from now on because they had no place in the tree.
    pub unshared: bool,
}

/// A request that ended, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Freed {
    /// The outcome of the report.
    pub outcome: BookingOutcome,
    /// Whether its prefill half ended too.
    pub prefill_half: bool,
}

impl Loads {
    /// Reports that the prefill of a booking is done, after `prefill_us` microseconds (0 = unknown).
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
                booking.first_token_at_ns = now_ns;
                let (worker, prefill) = (booking.worker, booking.prefill.take());
                let (is_recorded, booked_at_ns) = (booking.is_recorded, booking.booked_at_ns);
                ledger.changes += 1;
                let mut began_alone = false;
                if let Some(prefill) = prefill {
                    ledger.learn_prefill(worker, prefill, prefill_us, now_ns);
                    began_alone = ledger.prefills.began_alone_at(prefill, booked_at_ns);
                    ledger.prefills.end(worker, prefill, now_ns);
                }
                if is_recorded {
                    let prefilled_us = ledger.prefills.done_us(worker);
                    if let Some(booking) = ledger.bookings.get_mut(slot) {
                        (booking.began_alone, booking.prefilled_us) = (began_alone, prefilled_us);
                    }
                }
                let prefill = ledger.prefills.load_of(worker);
                ledger.others.change(&self.cells, worker, |record| record.prefill = prefill);
                BookingOutcome::Applied
            }
            Err(outcome) => outcome,
        }
    }

    /// Reports that a request has ended. Idempotent.
    pub fn free(&self, session: SessionId, booking: BookingRef<'_>, now_ns: u64) -> BookingOutcome {
        let mut ledger = self.lock_to_change();
        match ledger.find(session, booking) {
            Ok(slot) => {
                self.end(&mut ledger, slot, EndReason::Freed, now_ns);
                BookingOutcome::Applied
            }
            Err(outcome) => outcome,
        }
    }

    /// Reports that a request has ended, by its name: as [`Loads::free`], and also ends its prefill half, if that has a
    /// booking of its own. Returns the outcome for the request.
    pub fn free_request(&self, session: SessionId, request_id: &str, attempt: u32, now_ns: u64) -> Freed {
        let mut ledger = self.ledger.lock();
        let prefill_half = self.prefill_half(&mut ledger, session, request_id, attempt);
        if let Some(slot) = prefill_half {
            self.end(&mut ledger, slot, EndReason::Freed, now_ns);
        }
        let outcome = match ledger.find(session, BookingRef::Request { request_id, attempt }) {
            Ok(slot) => {
                self.end(&mut ledger, slot, EndReason::Freed, now_ns);
                BookingOutcome::Applied
            }
            Err(outcome) => outcome,
        };
        Freed { outcome, prefill_half: prefill_half.is_some() }
    }

    /// The slot of the live prefill half of a request's attempt. Most sessions have no such halves; they skip hashing
    /// the name.
    fn prefill_half(&self, ledger: &mut Ledger, session: SessionId, request_id: &str, attempt: u32) -> Option<u32> {
        ledger.sessions.get_mut(session).filter(|session| session.prefill_halves > 0)?;
        let name = Name::of_prefill_half(self.config.secret, session, request_id)?;
        let slot = ledger.bookings.live_named(name)?;
        ledger.bookings.get(slot).filter(|booking| booking.attempt == attempt).map(|_| slot)
    }

    /// Ends the booking of an earlier attempt under this name. Returns whether there was one.
    pub fn free_earlier(&self, session: SessionId, request_id: &str, attempt: u32, now_ns: u64) -> bool {
        let name = Name::new(self.config.secret, session, request_id);
        let mut ledger = self.ledger.lock();
        let Some(slot) = ledger.bookings.live_named(name) else { return false };
        let is_earlier = ledger.bookings.get(slot).is_some_and(|booking| booking.attempt < attempt);
        if is_earlier {
            self.end(&mut ledger, slot, EndReason::Superseded, now_ns);
        }
        is_earlier
    }

    /// Reports the output tokens of a request so far; a smaller number than before changes nothing. If output is
    /// counted, it becomes blocks. These, and the prompt blocks that the request runs alone, weigh less towards the
    /// expected end.
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
            ledger.changes += 1;
            return BookingOutcome::Applied;
        }
        let (worker, held, before_parts) = (booking.worker, booking.held, booking.own_parts());
        booking.output.grow(booking.tokens().iter().sum(), tokens);
        let (own_parts, weight) = (booking.own_parts(), booking.output.weight);
        ledger.changes += 1;
        let taken_parts = match held {
            HeldBlocks::Shared(node) => ledger.active.weigh(&self.tree, node, worker, weight),
            HeldBlocks::Alone(_) => 0,
        };
        let change = own_parts as i64 - before_parts as i64 - taken_parts;
        ledger.others.change(&self.cells, worker, |record| {
            record.decode_parts = record.decode_parts.wrapping_add_signed(change)
        });
        BookingOutcome::Applied
    }

    /// Reports that a request runs on another worker of its space. Its prefill counts there as it was booked, because
    /// the overlap of the other worker is no longer known.
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
        let (own_parts, prompt_tokens, prefill) = (booking.own_parts(), booking.tokens(), booking.prefill.take());
        let (held, begins) = (booking.held, booking.prefilling);
        ledger.changes += 1;
        if from == ABSENT {
            ledger.absent.take(slot);
        }
        if let Some(prefill) = prefill {
            ledger.prefills.end(from, prefill, now_ns);
        }
        let prefill = if begins { ledger.begin_prefill(to, prompt_tokens, now_ns) } else { None };
        let work_ns = ledger.prefills.work_ns(prefill);
        let (mut left_parts, mut came_parts, mut unshared) = (own_parts, own_parts, false);
        let mut held_there = held;
        if let HeldBlocks::Shared(node) = held {
            if let Some((added_parts, freed_parts)) = ledger.active.transfer(&self.tree, node, from, to) {
                (left_parts, came_parts) = (own_parts + freed_parts, own_parts + added_parts);
            } else {
                held_there = HeldBlocks::Alone(blocks_to(&self.tree, node));
                left_parts += ledger.active.remove(&self.tree, node, from);
                ledger.unshare(slot);
                unshared = true;
            }
        }
        let prefilled_us = ledger.prefills.done_us(to);
        if let Some(booking) = ledger.bookings.get_mut(slot) {
            (booking.prefill, booking.held, booking.prefilled_us) = (prefill, held_there, prefilled_us);
            came_parts = if unshared { booking.own_parts() } else { came_parts };
        }
        for (worker, is_there) in [(from, false), (to, true)] {
            let prefill = ledger.prefills.load_of(worker);
            ledger.others.change(&self.cells, worker, |record| {
                record.prefill = prefill;
                if is_there {
                    record.recent.add_prefill(work_ns, now_ns);
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

    /// A worker's own load report, which replaces those of gateways. `false` = the worker has left.
    pub fn report_load(&self, worker: WorkerIndex, load: EngineLoad, now_ns: u64) -> bool {
        let mut ledger = self.ledger.lock();
        ledger.load_reporters.end(worker);
        ledger.others.change(&self.cells, worker, |record| record.engine_report = Some((load, now_ns)));
        self.cells.is_of(worker)
    }

    /// A load report of a gateway about a worker. `false` = the worker has left.
    ///
    /// # Errors
    /// [`BeyondShare`]: the report is ignored.
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
        ledger.others.change(&self.cells, worker, |record| record.engine_report = Some((load, now_ns)));
        Ok(true)
    }

    /// A gateway's report that a request failed on a worker. Returns the remaining back-off of the worker, nanoseconds.
    /// A report during the back-off adds nothing, and is answered whatever its sender.
    ///
    /// # Errors
    /// [`BeyondShare`]: the report is ignored.
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
        ledger
            .others
            .change(&self.cells, worker, |record| record.back_off_until_ns = record.back_off_until_ns.max(until_ns));
        Ok(until_ns.saturating_sub(now_ns))
    }

    /// Gives a worker a back-off until a time: the daemon saw that its engine does not answer.
    pub fn back_off_until(&self, worker: WorkerIndex, until_ns: u64) {
        let mut ledger = self.ledger.lock();
        if self.cells.is_of(worker) {
            ledger.others.change(&self.cells, worker, |record| {
                record.back_off_until_ns = record.back_off_until_ns.max(until_ns)
            });
        }
    }
}
