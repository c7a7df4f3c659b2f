//! Sessions, bookings and loads together: what a decision books and a gateway reports.

use parking_lot::Mutex;

use super::active::{ActiveDepths, ActiveTree, BLOCK_PARTS, PlacedPrompt};
use super::booking::{Booking, BookingHandle, BookingRef, Demand, HeldBlocks, Output, PromptBlocks};
use super::books::{Ledger, ns};
use super::cell::{Load, LoadCells, LoadStability};
use super::changes::ChangesSeen;
use super::failures::BackOff;
use super::names::Name;
use super::prefill::{PrefillFigures, PrefillModel};
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
