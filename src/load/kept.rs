//! What a restart keeps of bookings: plain records that one daemon run takes out of its loads, and that the next one
//! gives to its own.
//!
//! A run takes them in slices, so that no booking waits for long ([`Loads::keep`]). Bookings change between two slices:
//! one that ended after its slice is among them, and one that was made in a slot of an earlier slice is not.
//!
//! The next run restores them before it takes connections ([`Loads::restore`]). A booking keeps its slot, its generation
//! and the hash of its name, so that its gateway finds it by handle and by name. A booking whose worker is not there yet
//! adds to no load until the worker comes ([`Loads::place_absent`]).

use std::collections::VecDeque;

use hashbrown::{HashMap, HashSet};

use super::active::{blocks_to, nodes_to};
use super::booking::{Booking, Demand, HeldBlocks, Name, Output, PromptBlocks};
use super::ended::EndReason;
use super::ledger::{Ledger, ns};
use super::loads::Loads;
use super::recent_work::{RecentWork, recent_ms};
use super::session::SessionId;
use crate::ids::{LocalHash, SpaceId, Worker, WorkerIndex};
use crate::limits::{
    BOOKINGS_MAX, BOOKINGS_PER_SESSION_MAX, KEPT_BLOCKS_PER_LOCK_MAX, KEPT_BOOKINGS_PER_LOCK_MAX, KEPT_GENERATIONS_GAP,
    KEPT_PLACED_BLOCKS_MAX, KEPT_SESSIONS_GAP, KEPT_SLOTS_PER_LOCK_MAX, PROMPT_TOKENS_MAX, WORKERS_MAX,
};
use crate::protocol::SessionToken;
use crate::sync::Ordering;

/// A booking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptBooking {
    /// Its slot, below [`BOOKINGS_MAX`].
    pub slot: u32,
    /// Its generation, which no other booking has; never 0.
    pub generation: u64,
    /// Its session.
    pub session: SessionId,
    /// The hash of its request id.
    pub name: [u64; 2],
    /// Its attempt.
    pub attempt: u32,
    /// The worker that runs it.
    pub worker: Worker,
    /// The worker's space.
    pub space: SpaceId,
    /// Tokens of the prompt: to compute, and cached.
    pub prompt_tokens: [u32; 2],
    /// The whole blocks of its prompt.
    pub blocks: KeptBlocks,
    /// Tokens per block, to count output in blocks; 0 = output is not counted.
    pub block_size: u32,
    /// Expected output tokens; 0 = unknown.
    pub expected_output_tokens: u32,
    /// Output tokens so far.
    pub output_tokens: u32,
    /// Whether its first token has not been reported.
    pub prefilling: bool,
    /// Whether it is the prefill half of a request.
    pub is_prefill_half: bool,
    /// The time since it was booked, nanoseconds.
    pub age_ns: u64,
    /// The time since its first token, nanoseconds; 0 while it prefills.
    pub since_first_token_ns: u64,
}

/// The whole blocks of a kept prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptBlocks {
    /// This many, shared with no other request.
    Alone(u64),
    /// Those of the run with this place in [`KeptSlice::runs`], behind those of the runs before it.
    Run(u32),
}

/// Blocks that follow those of another run of the same slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptRun {
    /// The place of the run before, which is smaller than its own; `None` = the prompt begins here.
    pub parent: Option<u32>,
    /// Blocks. In [`KeptSlice::hashes`] they follow those of the run at the place before.
    pub blocks: u32,
}

/// A session with bookings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptSession {
    /// Its number.
    pub id: SessionId,
    /// Its token, with which its gateway comes back.
    pub token: Option<SessionToken>,
    /// Its user.
    pub uid: u32,
}

/// Some bookings, with their sessions and the blocks of their prompts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeptSlice {
    /// The bookings.
    pub bookings: Vec<KeptBooking>,
    /// The sessions of the bookings.
    pub sessions: Vec<KeptSession>,
    /// The runs of their prompts' blocks.
    pub runs: Vec<KeptRun>,
    /// The blocks of all runs.
    pub hashes: Vec<LocalHash>,
}

impl KeptSlice {
    /// By run: the blocks of a prompt that ends with it.
    #[must_use]
    pub fn depths(&self) -> Vec<u64> {
        let mut depths: Vec<u64> = Vec::with_capacity(self.runs.len());
        for run in &self.runs {
            let before = run.parent.and_then(|parent| depths.get(parent as usize)).copied().unwrap_or(0);
            depths.push(before.saturating_add(u64::from(run.blocks)));
        }
        depths
    }

    /// The places of the runs of a prompt, from its last one.
    fn runs_to(&self, run: u32) -> impl Iterator<Item = usize> {
        let last = Some(run).filter(|run| (*run as usize) < self.runs.len());
        // Parents have smaller places, so this ends.
        let before = |at: &u32| self.runs[*at as usize].parent.filter(|parent| parent < at);
        std::iter::successors(last, before).map(|at| at as usize)
    }

    /// The blocks of a prompt that ends with a run. `ends` are those of all runs.
    fn prompt(&self, run: u32, ends: &[usize]) -> Vec<LocalHash> {
        let mut places: Vec<usize> = self.runs_to(run).collect();
        places.reverse();
        let of_run = |at: usize| self.hashes.get(ends[at] - self.runs[at].blocks as usize..ends[at]);
        places.into_iter().filter_map(of_run).flatten().copied().collect()
    }

    /// Where the blocks of each run end.
    fn run_ends(&self) -> Vec<usize> {
        let mut end = 0;
        let after = |run: &KeptRun| {
            end += run.blocks as usize;
            end
        };
        self.runs.iter().map(after).collect()
    }

    fn clear(&mut self) {
        self.bookings.clear();
        self.sessions.clear();
        self.runs.clear();
        self.hashes.clear();
    }

    /// Adds a run, and returns its place.
    fn push_run(&mut self, parent: Option<u32>, hashes: impl ExactSizeIterator<Item = LocalHash>) -> u32 {
        self.runs.push(KeptRun { parent, blocks: hashes.len() as u32 });
        self.hashes.extend(hashes);
        self.runs.len() as u32 - 1
    }
}

/// What is kept of a worker's load beside its bookings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KeptWorker {
    /// The worker.
    pub worker: Worker,
    /// The time for which the first of its prefills has been running, nanoseconds.
    pub elapsed_ns: u64,
    /// What it was given lately, with the time since then, milliseconds, in place of [`RecentWork::at_ms`].
    pub recent: RecentWork,
}

/// The numbers that a run has given out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeptNumbers {
    /// The highest generation of a booking when the first slice was taken: each booking up to it is kept or has ended.
    pub complete_to: u64,
    /// The highest generation when the last slice was taken.
    pub generations: u64,
    /// The number of the next session.
    pub next_session: u32,
}

/// What a run kept of its bookings.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KeptLoads {
    /// The numbers that it has given out.
    pub numbers: KeptNumbers,
    /// Its bookings.
    pub slices: Vec<KeptSlice>,
    /// The loads of its workers.
    pub workers: Vec<KeptWorker>,
}

impl KeptLoads {
    /// The age of the oldest booking, nanoseconds.
    #[must_use]
    pub fn oldest_ns(&self) -> u64 {
        self.slices.iter().flat_map(|slice| &slice.bookings).map(|booking| booking.age_ns).max().unwrap_or(0)
    }
}

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

/// The worker of a booking whose worker is not there. No worker gets this index: its place would need a million owners.
const ABSENT: WorkerIndex = WorkerIndex::at((WORKERS_MAX - 1) as u16, WorkerIndex::GENERATIONS - 2);

/// A booking that waits for its worker.
#[derive(Debug)]
pub(super) struct AbsentBooking {
    generation: u64,
    worker: Worker,
    /// The blocks of its prompt; empty if they are not known.
    locals: Vec<LocalHash>,
}

/// Bookings that wait for their workers.
#[derive(Debug, Default)]
pub(super) struct AbsentBookings {
    by_slot: HashMap<u32, AbsentBooking>,
    /// The slots of each worker's, in the order in which they were booked.
    by_worker: HashMap<Worker, VecDeque<u32>>,
    /// When the last of them is too old.
    until_ns: u64,
}

impl AbsentBookings {
    /// Forgets them once all of them are too old.
    pub(super) fn expire(&mut self, now_ns: u64) {
        if now_ns >= self.until_ns && !self.by_slot.is_empty() {
            *self = Self::default();
        }
    }

    fn add(&mut self, slot: u32, absent: AbsentBooking) {
        self.by_worker.entry(absent.worker).or_default().push_back(slot);
        self.by_slot.insert(slot, absent);
    }

    /// Takes the first booking of a worker, with its slot.
    fn take_of(&mut self, worker: Worker) -> Option<(u32, AbsentBooking)> {
        let slots = self.by_worker.get_mut(&worker)?;
        while let Some(slot) = slots.pop_front() {
            let absent = self.by_slot.remove(&slot);
            if let Some(absent) = absent.filter(|absent| absent.worker == worker) {
                return Some((slot, absent));
            }
        }
        self.by_worker.remove(&worker);
        None
    }

    /// The booking that waits in a slot, unless the slot has another one by now.
    fn waiting(&self, slot: u32, booking: &Booking) -> Option<&AbsentBooking> {
        let is_it = |absent: &&AbsentBooking| booking.worker == ABSENT && absent.generation == booking.generation;
        self.by_slot.get(&slot).filter(is_it)
    }
}

// ---- Taking ----

impl Loads {
    /// The numbers that were given out so far.
    #[must_use]
    pub fn numbers(&self) -> KeptNumbers {
        let ledger = self.ledger.lock();
        let generations = ledger.bookings.generations();
        KeptNumbers { complete_to: generations, generations, next_session: ledger.sessions.next() }
    }

    /// Overwrites `slice` with the bookings of the slots from `from`, 0 at first, whose workers `worker_of` names. Without
    /// `with_blocks`, prompts are kept as a number of blocks. Returns where to continue; `None` = done.
    ///
    /// The lock is held for a bounded number of slots, bookings and blocks; one prompt may have more blocks.
    pub fn keep(
        &self,
        (from, with_blocks): (usize, bool),
        now_ns: u64,
        worker_of: impl Fn(WorkerIndex) -> Option<Worker>,
        slice: &mut KeptSlice,
    ) -> Option<usize> {
        slice.clear();
        let (mut places, mut sessions) = (HashMap::new(), HashSet::new());
        let ledger = self.ledger.lock();
        let slots = ledger.bookings.slots();
        let to = from.saturating_add(KEPT_SLOTS_PER_LOCK_MAX).min(slots);
        for slot in from..to {
            if slice.bookings.len() >= KEPT_BOOKINGS_PER_LOCK_MAX || slice.hashes.len() >= KEPT_BLOCKS_PER_LOCK_MAX {
                return Some(slot);
            }
            let Some(booking) = ledger.bookings.get(slot as u32) else { continue };
            let absent = ledger.absent.waiting(slot as u32, booking);
            let Some(worker) = absent.map(|absent| absent.worker).or_else(|| worker_of(booking.worker)) else {
                continue;
            };
            let blocks = match (booking.held, absent) {
                (HeldBlocks::Alone(_), Some(absent)) if with_blocks && !absent.locals.is_empty() => {
                    KeptBlocks::Run(slice.push_run(None, absent.locals.iter().copied()))
                }
                (HeldBlocks::Alone(blocks), _) => KeptBlocks::Alone(blocks),
                (HeldBlocks::Shared(node), _) if with_blocks => self.keep_prompt(node, &mut places, slice),
                (HeldBlocks::Shared(node), _) => KeptBlocks::Alone(blocks_to(&self.tree, node)),
            };
            slice.bookings.push(kept(slot as u32, booking, (worker, blocks), now_ns));
            let id = booking.name.session();
            if sessions.insert(id) {
                slice.sessions.extend(ledger.sessions.kept(id));
            }
        }
        (to < slots).then_some(to)
    }

    /// Adds the blocks of a prompt that ends at `node`, but for those that are in the slice: `places` has the runs of nodes.
    fn keep_prompt(&self, node: u32, places: &mut HashMap<u32, u32>, slice: &mut KeptSlice) -> KeptBlocks {
        let nodes: Vec<_> = nodes_to(&self.tree, node).take_while(|(at, _)| !places.contains_key(at)).collect();
        let above = nodes_to(&self.tree, node).nth(nodes.len());
        let mut last = above.and_then(|(at, _)| places.get(&at).copied());
        for (at, words) in nodes.into_iter().rev() {
            // Relaxed: the caller keeps the writer out.
            let place = slice.push_run(last, words.iter().map(|word| LocalHash(word.load(Ordering::Relaxed))));
            places.insert(at, place);
            last = Some(place);
        }
        last.map_or(KeptBlocks::Alone(0), KeptBlocks::Run)
    }

    /// What is kept of these workers, in one critical section.
    #[must_use]
    pub fn keep_workers(&self, workers: &[(Worker, WorkerIndex)], now_ns: u64) -> Vec<KeptWorker> {
        let _no_writer = self.ledger.lock();
        let keep = |(worker, index): &(Worker, WorkerIndex)| {
            let load = self.read(*index);
            let is_busy = load.prefill_tokens > 0;
            let elapsed_ns = if is_busy { now_ns.saturating_sub(load.work.since_ns) } else { 0 };
            let at_ms = recent_ms(now_ns).wrapping_sub(load.recent.at_ms);
            KeptWorker { worker: *worker, elapsed_ns, recent: RecentWork { at_ms, ..load.recent } }
        };
        workers.iter().map(keep).collect()
    }
}

/// The record of a live booking.
fn kept(slot: u32, booking: &Booking, (worker, blocks): (Worker, KeptBlocks), now_ns: u64) -> KeptBooking {
    let since_first_token_ns = if booking.prefilling { 0 } else { now_ns.saturating_sub(booking.first_token_at_ns) };
    KeptBooking {
        slot,
        generation: booking.generation,
        session: booking.name.session(),
        name: booking.name.text(),
        attempt: booking.attempt,
        worker,
        space: booking.space,
        prompt_tokens: booking.prompt_tokens,
        blocks,
        block_size: booking.output.block_size,
        expected_output_tokens: booking.output.expected_tokens,
        output_tokens: booking.output.tokens,
        prefilling: booking.prefilling,
        is_prefill_half: booking.is_prefill_half,
        age_ns: now_ns.saturating_sub(booking.booked_at_ns),
        since_first_token_ns,
    }
}

// ---- Restoring ----

impl Loads {
    /// Restores what an earlier run kept. `worker_of` finds the workers that are there, with their spaces. Numbers that the
    /// earlier run may have given out after it are skipped, and `skipped` generations more.
    ///
    /// Call it once, before the first booking.
    pub fn restore(
        &self,
        kept: &KeptLoads,
        at: RestoredAt,
        skipped: u64,
        worker_of: impl Fn(Worker) -> Option<(WorkerIndex, SpaceId)>,
    ) -> Restored {
        let (mut ledger, mut restored) = (self.ledger.lock(), Restored::default());
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
            if let Err(counted) = self.check_kept(&ledger, &booking, found, at) {
                *counted(&mut restored) += 1;
                continue;
            }
            let (blocks, run) = match booking.blocks {
                KeptBlocks::Alone(blocks) => (blocks, None),
                KeptBlocks::Run(run) => (depths[place.0].get(run as usize).copied().unwrap_or(0), Some(run)),
            };
            if !self.take_kept(&mut ledger, &booking, (blocks, sessions.get(&booking.session)), at, &mut restored) {
                restored.refused += 1;
                continue;
            }
            let run = run.filter(|_| blocks <= blocks_left);
            let locals = run.map_or_else(Vec::new, |run| slice.prompt(run, &ends[place.0]));
            blocks_left -= locals.len() as u64;
            match found {
                Some((index, _)) => self.place_kept(&mut ledger, booking.slot, &locals, index),
                None => {
                    let absent = AbsentBooking { generation: booking.generation, worker: booking.worker, locals };
                    ledger.absent.add(booking.slot, absent);
                    restored.absent += 1;
                }
            }
        }
        ledger.absent.until_ns = at.now_ns.saturating_add(ns(self.config.age_ms_max));
        ledger.bookings.continue_from(
            kept.numbers.complete_to,
            kept.numbers.generations.saturating_add(KEPT_GENERATIONS_GAP).saturating_add(skipped),
        );
        ledger.sessions.continue_from(kept.numbers.next_session.wrapping_add(KEPT_SESSIONS_GAP));
        (0..ledger.bookings.slots() as u32).for_each(|slot| self.weigh_kept(&mut ledger, slot));
        for worker in &kept.workers {
            if let Some((index, _)) = worker_of(worker.worker) {
                self.restore_worker(&mut ledger, index, worker, at);
            }
        }
        restored.sessions = ledger.sessions.len() as u64;
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
            restored.absent -= u64::from(ledger.absent.by_slot.remove(&earlier).is_some());
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
        let placed = self.place(ledger, (session, worker), &Demand { space, blocks, ..Demand::default() });
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
        self.cells.change(worker, |record| {
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
            self.cells.change(worker, |record| {
                record.decode_parts = record.decode_parts.wrapping_add_signed(-taken_parts);
            });
        }
    }

    fn restore_worker(&self, ledger: &mut Ledger, index: WorkerIndex, kept: &KeptWorker, at: RestoredAt) {
        ledger.prefills.run_since(index, at.time_of(kept.elapsed_ns));
        let prefill = ledger.prefills.load_of(index);
        let since_ms = u64::from(kept.recent.at_ms).saturating_add(at.since_ns / 1_000_000);
        let at_ms = recent_ms(at.now_ns).wrapping_sub(since_ms.min(RECENT_MS_MAX) as u32);
        self.cells.change(index, |record| {
            record.prefill = prefill;
            record.recent = RecentWork { at_ms, ..kept.recent };
        });
    }

    /// Adds the bookings that waited for a worker, at most `bookings_max` of them, to its load. If the worker serves another
    /// space than they, they end. Returns how many waited; if these are `bookings_max`, call it again.
    pub fn place_absent(&self, worker: Worker, (index, space): (WorkerIndex, SpaceId), bookings_max: usize) -> usize {
        let mut ledger = self.ledger.lock();
        for placed in 0..bookings_max {
            let Some((slot, absent)) = ledger.absent.take_of(worker) else { return placed };
            let live = ledger.bookings.get(slot).filter(|booking| booking.generation == absent.generation);
            match live.map(|booking| (booking.worker, booking.space)) {
                Some((ABSENT, of)) if of == space => {
                    self.place_kept(&mut ledger, slot, &absent.locals, index);
                    self.weigh_kept(&mut ledger, slot);
                }
                // The time does not matter: it adds to no load.
                Some((ABSENT, _)) => self.end(&mut ledger, slot, EndReason::WorkerLeft, 0),
                // It has ended, or its gateway has said which worker runs it.
                _ => {}
            }
        }
        bookings_max
    }
}

/// The longest time since a worker was given anything, milliseconds: half the range of the clock in a record.
const RECENT_MS_MAX: u64 = (u32::MAX / 2) as u64;
