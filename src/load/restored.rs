//! What a run takes up of an earlier one: its bookings, its sessions, and the recent work of its workers.
//!
//! A run restores them before it takes connections ([`Loads::restore`]). A booking keeps its slot, its generation and the
//! hash of its name, so that its gateway finds it by handle and by name. A booking whose worker is not there yet adds to no
//! load until the worker comes ([`Loads::place_absent`]).

use std::collections::{BTreeMap, VecDeque};

use hashbrown::HashMap;

use super::booking::{Booking, Demand, HeldBlocks, Name, Output, PromptBlocks};
use super::ended::EndReason;
use super::kept::{KeptBlocks, KeptBooking, KeptLoads, KeptSession, KeptSlice, KeptWorker};
use super::ledger::{Ledger, ns};
use super::loads::Loads;
use super::recent_work::{RecentWork, recent_ms};
use super::session::SessionId;
use crate::ids::{LocalHash, SpaceId, Worker, WorkerIndex};
use crate::limits::{
    BOOKINGS_MAX, BOOKINGS_PER_SESSION_MAX, KEPT_GENERATIONS_GAP, KEPT_PLACED_BLOCKS_MAX, KEPT_SESSIONS_GAP,
    PROMPT_TOKENS_MAX, WORKERS_MAX,
};

/// The times of a restoration, nanoseconds of the bookings' clock.
#[derive(Clone, Copy, Debug)]
pub struct RestoredAt {
    /// The time since the bookings were kept.
    pub since_ns: u64,
    /// The clock now. It must have begun before the oldest booking.
    pub now_ns: u64,
}

impl RestoredAt {
    /// The time that was `age_ns` before the bookings were kept.
    const fn time_of(self, age_ns: u64) -> u64 {
        self.now_ns.saturating_sub(self.since_ns.saturating_add(age_ns))
    }
}

/// Numbers that a restoration skips beyond those that the earlier run may have given out. They are random: another run may
/// have begun with the same image, and ended before it could write its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Skipped {
    /// Generations of bookings.
    pub generations: u64,
    /// Numbers of sessions.
    pub sessions: u32,
}

/// What became of the bookings of an earlier run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// Bookings that go on.
    pub bookings: u64,
    /// Of these, the ones whose worker is not there.
    pub absent: u64,
    /// Sessions that wait for their gateways.
    pub sessions: u64,
    /// Bookings that have become too old.
    pub too_old: u64,
    /// Bookings whose worker serves another space than before.
    pub other_space: u64,
    /// Bookings beyond a limit, those that a later attempt has replaced, and those that contradict others.
    pub refused: u64,
}

// ---- Absent workers ----

/// The worker of a booking whose worker is not there. No worker gets this index: its place would need a million owners.
pub(super) const ABSENT: WorkerIndex = WorkerIndex::at((WORKERS_MAX - 1) as u16, WorkerIndex::GENERATIONS - 2);

/// A booking that waits for its worker.
#[derive(Debug)]
pub(super) struct AbsentBooking {
    pub(super) worker: Worker,
    /// The blocks of its prompt; empty if they are not known.
    pub(super) locals: Vec<LocalHash>,
}

/// What an earlier run kept of a worker, by the clock of this one.
#[derive(Clone, Copy, Debug)]
pub(super) struct RestoredWorker {
    /// Since when the first of its prefills has been running.
    pub(super) since_ns: u64,
    pub(super) recent: RecentWork,
}

impl RestoredWorker {
    fn of(kept: &KeptWorker, at: RestoredAt) -> Self {
        let since_ms = u64::from(kept.recent.at_ms).saturating_add(at.since_ns / 1_000_000);
        let at_ms = recent_ms(at.now_ns).wrapping_sub(since_ms.min(RECENT_MS_MAX) as u32);
        Self { since_ns: at.time_of(kept.elapsed_ns), recent: RecentWork { at_ms, ..kept.recent } }
    }
}

/// The longest time since a worker was given anything, milliseconds: half the range of the clock in a record.
const RECENT_MS_MAX: u64 = (u32::MAX / 2) as u64;

/// What waits for workers that are not there.
#[derive(Debug, Default)]
pub(super) struct AbsentWorkers {
    by_slot: HashMap<u32, AbsentBooking>,
    /// The slots of each worker's, in the order in which they were booked. Some may have ended.
    by_worker: HashMap<Worker, VecDeque<u32>>,
    /// The blocks of all prompts.
    blocks: usize,
    workers: BTreeMap<Worker, RestoredWorker>,
    /// When the last of the bookings is too old.
    until_ns: u64,
}

impl AbsentWorkers {
    /// Forgets all of it once all bookings are too old.
    pub(super) fn expire(&mut self, now_ns: u64) {
        if now_ns >= self.until_ns && !(self.by_slot.is_empty() && self.workers.is_empty()) {
            *self = Self::default();
        }
    }

    /// The blocks of the prompts that wait.
    pub(super) const fn blocks(&self) -> usize {
        self.blocks
    }

    /// Memory, bytes.
    pub(super) fn bytes(&self) -> u64 {
        let of_booking = size_of::<(u32, AbsentBooking)>() + size_of::<u32>();
        let of_worker = size_of::<(Worker, RestoredWorker)>();
        (self.by_slot.capacity() * of_booking + self.blocks * size_of::<LocalHash>() + self.workers.len() * of_worker)
            as u64
    }

    pub(super) fn add(&mut self, slot: u32, absent: AbsentBooking) {
        self.blocks += absent.locals.len();
        self.by_worker.entry(absent.worker).or_default().push_back(slot);
        self.by_slot.insert(slot, absent);
    }

    /// Takes the booking in a slot, which ends or has a worker now.
    pub(super) fn take(&mut self, slot: u32) -> Option<AbsentBooking> {
        let absent = self.by_slot.remove(&slot)?;
        self.blocks -= absent.locals.len();
        Some(absent)
    }

    /// Takes the first booking of a worker, with its slot.
    fn take_of(&mut self, worker: Worker) -> Option<(u32, AbsentBooking)> {
        let slots = self.by_worker.get_mut(&worker)?;
        while let Some(slot) = slots.pop_front() {
            // The slot may have got a booking of another worker.
            if self.by_slot.get(&slot).is_some_and(|absent| absent.worker == worker) {
                return self.take(slot).map(|absent| (slot, absent));
            }
        }
        self.by_worker.remove(&worker);
        None
    }

    /// The booking that waits in a slot.
    pub(super) fn waiting(&self, slot: u32) -> Option<&AbsentBooking> {
        self.by_slot.get(&slot)
    }

    /// The workers that have not come, each with what is kept of it.
    pub(super) const fn workers(&self) -> &BTreeMap<Worker, RestoredWorker> {
        &self.workers
    }

    /// Keeps what is known of a worker that is not there. Those beyond [`WORKERS_MAX`] are left out.
    fn add_worker(&mut self, worker: Worker, restored: RestoredWorker) {
        if self.workers.len() < WORKERS_MAX {
            self.workers.insert(worker, restored);
        }
    }
}

// ---- Restoring ----

impl Loads {
    /// Restores what an earlier run kept. `worker_of` finds the workers that are there, with their spaces. Numbers that the
    /// earlier run may have given out after it are skipped, and those of `skipped` on top.
    ///
    /// Call it once, before the first booking.
    pub fn restore(
        &self,
        kept: &KeptLoads,
        at: RestoredAt,
        skipped: Skipped,
        worker_of: impl Fn(Worker) -> Option<(WorkerIndex, SpaceId)>,
    ) -> Restored {
        let mut ledger = self.ledger.lock();
        let mut restored = self.restore_bookings(&mut ledger, kept, at, &worker_of);
        ledger.absent.until_ns = at.now_ns.saturating_add(ns(self.config.age_ms_max));
        let generations = kept.numbers.generations.saturating_add(KEPT_GENERATIONS_GAP);
        ledger.bookings.continue_from(&kept.numbers, generations.saturating_add(skipped.generations));
        let sessions = KEPT_SESSIONS_GAP.wrapping_add(skipped.sessions);
        ledger.sessions.continue_from(kept.numbers.next_session.wrapping_add(sessions));
        (0..ledger.bookings.slots() as u32).for_each(|slot| self.weigh_kept(&mut ledger, slot));
        for kept in &kept.workers {
            let of_worker = RestoredWorker::of(kept, at);
            match worker_of(kept.worker) {
                Some((index, _)) => self.restore_worker(&mut ledger, index, &of_worker),
                None => ledger.absent.add_worker(kept.worker, of_worker),
            }
        }
        restored.sessions = ledger.sessions.len() as u64;
        restored
    }

    fn restore_bookings(
        &self,
        ledger: &mut Ledger,
        kept: &KeptLoads,
        at: RestoredAt,
        worker_of: impl Fn(Worker) -> Option<(WorkerIndex, SpaceId)>,
    ) -> Restored {
        let mut restored = Restored::default();
        let all = kept.slices.iter().flat_map(|slice| &slice.sessions);
        let sessions: HashMap<SessionId, KeptSession> = all.map(|session| (session.id, *session)).collect();
        let ends: Vec<Vec<usize>> = kept.slices.iter().map(KeptSlice::run_ends).collect();
        let depths: Vec<Vec<u64>> = kept.slices.iter().map(KeptSlice::depths).collect();
        let of_slice = |(at, slice): (usize, &'_ KeptSlice)| (0..slice.bookings.len()).map(move |place| (at, place));
        let mut bookings: Vec<(usize, usize)> = kept.slices.iter().enumerate().flat_map(of_slice).collect();
        let of = |(slice, place): (usize, usize)| kept.slices[slice].bookings[place];
        // As they were made: the order of prefills and of ages.
        bookings.sort_unstable_by_key(|place| of(*place).generation);
        let mut blocks_left = KEPT_PLACED_BLOCKS_MAX;
        for place in bookings {
            let (booking, slice) = (of(place), &kept.slices[place.0]);
            let found = worker_of(booking.worker);
            if let Err(counted) = self.check_kept(ledger, &booking, found, at) {
                *counted(&mut restored) += 1;
                continue;
            }
            let (blocks, run) = match booking.blocks {
                KeptBlocks::Alone(blocks) => (blocks, None),
                KeptBlocks::Run(run) => (depths[place.0].get(run as usize).copied().unwrap_or(0), Some(run)),
            };
            if !self.take_kept(ledger, &booking, (blocks, sessions.get(&booking.session)), at, &mut restored) {
                restored.refused += 1;
                continue;
            }
            let run = run.filter(|_| blocks <= blocks_left);
            let locals = run.map_or_else(Vec::new, |run| slice.prompt(run, &ends[place.0]));
            blocks_left -= locals.len() as u64;
            match found {
                Some((index, _)) => self.place_kept(ledger, booking.slot, &locals, index),
                None => {
                    ledger.keep_absent(booking.slot, AbsentBooking { worker: booking.worker, locals });
                    restored.absent += 1;
                }
            }
        }
        restored
    }

    /// Whether a booking can go on; else what it counts as.
    fn check_kept(
        &self,
        ledger: &Ledger,
        booking: &KeptBooking,
        found: Option<(WorkerIndex, SpaceId)>,
        at: RestoredAt,
    ) -> Result<(), fn(&mut Restored) -> &mut u64> {
        if booking.age_ns.saturating_add(at.since_ns) >= ns(self.config.age_ms_max) {
            return Err(|restored| &mut restored.too_old);
        }
        if found.is_some_and(|(_, space)| space != booking.space) {
            return Err(|restored| &mut restored.other_space);
        }
        let is_new = booking.generation > ledger.bookings.generations() && ledger.bookings.get(booking.slot).is_none();
        if !is_new || booking.slot as usize >= BOOKINGS_MAX {
            return Err(|restored| &mut restored.refused);
        }
        Ok(())
    }
    /// Makes a booking live again, without a worker. `false` = a limit is reached, or it has no session.
    fn take_kept(
        &self,
        ledger: &mut Ledger,
        booking: &KeptBooking,
        (blocks, session): (u64, Option<&KeptSession>),
        at: RestoredAt,
        restored: &mut Restored,
    ) -> bool {
        let Some(session) = session else { return false };
        if !ledger.sessions.restore(session, at.now_ns) {
            return false;
        }
        let held = ledger.sessions.get_mut(session.id).map_or(0, |session| session.bookings.len());
        if held >= BOOKINGS_PER_SESSION_MAX || restored.bookings >= self.config.bookings_max as u64 {
            return false;
        }
        let name = Name::kept(session.id, booking.name);
        if let Some(earlier) = ledger.bookings.live_named(name) {
            restored.absent -= u64::from(ledger.absent.waiting(earlier).is_some());
            self.end(ledger, earlier, EndReason::Superseded, at.now_ns);
            restored.bookings -= 1;
            restored.refused += 1;
        }
        restored.bookings += 1;
        let mut output = Output::new(booking.block_size, booking.expected_output_tokens);
        let output_tokens = booking.output_tokens.min(PROMPT_TOKENS_MAX as u32);
        if self.config.track_output_blocks {
            output.grow(booking.prompt_tokens.iter().copied().map(u64::from).sum(), output_tokens);
        } else {
            output.tokens = output_tokens;
        }
        let taken = Booking {
            generation: booking.generation,
            name,
            attempt: booking.attempt,
            worker: ABSENT,
            prefill: None,
            space: booking.space,
            prompt_tokens: booking.prompt_tokens,
            held: HeldBlocks::Alone(blocks),
            output,
            prefilling: booking.prefilling,
            first_token_at_ns: at.time_of(booking.since_first_token_ns),
            // The journal of this run does not have its decision.
            is_recorded: false,
            is_traced: false,
            began_alone: false,
            prefilled_us: 0,
            is_prefill_half: booking.is_prefill_half,
            booked_at_ns: at.time_of(booking.age_ns),
        };
        ledger.keep_at(booking.slot, taken);
        true
    }

    /// Adds a booking that has no worker to the load of a worker.
    fn place_kept(&self, ledger: &mut Ledger, slot: u32, locals: &[LocalHash], worker: WorkerIndex) {
        let Some(booking) = ledger.bookings.get(slot) else { return };
        let (session, space, held) = (booking.name.session(), booking.space, booking.held);
        let (tokens, begins, booked_at_ns) = (booking.tokens(), booking.prefilling, booking.booked_at_ns);
        let blocks = match held {
            HeldBlocks::Alone(blocks) if locals.is_empty() => PromptBlocks::Alone(blocks),
            _ => PromptBlocks::Shared(locals),
        };
        let placed = self.place(ledger, (session, worker), &Demand { space, blocks, ..Demand::default() }, None);
        let prefill = if begins { ledger.begin_prefill(worker, tokens, booked_at_ns) } else { None };
        if let Some(prefill) = prefill {
            ledger.prefills.note_restored(prefill);
        }
        let mut parts = 0;
        if let Some(booking) = ledger.bookings.get_mut(slot) {
            (booking.worker, booking.held, booking.prefill) = (worker, placed.held, prefill);
            parts = booking.own_parts();
        }
        if let HeldBlocks::Shared(_) = placed.held {
            parts += placed.added_parts;
            ledger.share(slot, locals.len());
        }
        let prefill = ledger.prefills.load_of(worker);
        ledger.others.change(&self.cells, worker, |record| {
            record.prefill = prefill;
            record.decode_parts += parts;
            record.requests += 1;
        });
    }

    /// Gives the prompt blocks that a restored booking runs alone the weight that its output has left them.
    fn weigh_kept(&self, ledger: &mut Ledger, slot: u32) {
        let Some(booking) = ledger.bookings.get(slot) else { return };
        let (HeldBlocks::Shared(node), worker, weight) = (booking.held, booking.worker, booking.output.weight) else {
            return;
        };
        let taken_parts = ledger.active.weigh(&self.tree, node, worker, weight);
        if taken_parts != 0 {
            ledger.others.change(&self.cells, worker, |record| {
                record.decode_parts = record.decode_parts.wrapping_add_signed(-taken_parts);
            });
        }
    }

    /// Gives a worker its recent work, and its first prefill the time since when it has been running.
    fn restore_worker(&self, ledger: &mut Ledger, index: WorkerIndex, restored: &RestoredWorker) {
        ledger.prefills.run_since(index, restored.since_ns);
        let prefill = ledger.prefills.load_of(index);
        ledger.others.change(&self.cells, index, |record| {
            record.prefill = prefill;
            // The worker may have been given more since it came.
            record.recent = restored.recent.beside(&record.recent);
        });
    }

    /// Adds the bookings that waited for a worker, at most `bookings_max` of them, to its load. If the worker serves another
    /// space than they, they end. Returns how many waited; if these are `bookings_max`, call it again.
    pub fn place_absent(&self, worker: Worker, (index, space): (WorkerIndex, SpaceId), bookings_max: usize) -> usize {
        let mut ledger = self.ledger.lock();
        for placed in 0..bookings_max {
            let Some((slot, absent)) = ledger.absent.take_of(worker) else {
                if let Some(restored) = ledger.absent.workers.remove(&worker) {
                    self.restore_worker(&mut ledger, index, &restored);
                    ledger.changes += 1;
                }
                return placed;
            };
            match ledger.bookings.get(slot).map(|booking| booking.space) {
                Some(of) if of == space => {
                    self.place_kept(&mut ledger, slot, &absent.locals, index);
                    self.weigh_kept(&mut ledger, slot);
                    ledger.changes += 1;
                }
                // The time does not matter: it adds to no load.
                _ => self.end(&mut ledger, slot, EndReason::WorkerLeft, 0),
            }
        }
        bookings_max
    }
}
