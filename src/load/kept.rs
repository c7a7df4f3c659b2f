//! What a restart keeps of bookings: plain records that one daemon run takes out of its loads, and that the next one
//! gives to its own (`restored`).
//!
//! A run takes them in slices, so that no booking waits for long ([`Loads::keep`]). Bookings change between two slices:
//! one that ended after its slice is among them, and one that was made in a slot of an earlier slice is not.

use std::ops::{Bound, RangeInclusive};

use hashbrown::{HashMap, HashSet};

use super::active::{blocks_to, nodes_to};
use super::booking::{Booking, HeldBlocks};
use super::loads::Loads;
use super::recent_work::{RecentWork, recent_ms};
use super::restored::RestoredWorker;
use super::session::SessionId;
use crate::ids::{LocalHash, SpaceId, Worker, WorkerIndex};
use crate::limits::{
    KEPT_BLOCKS_PER_LOCK_MAX, KEPT_BOOKINGS_PER_LOCK_MAX, KEPT_SLOTS_PER_LOCK_MAX, KEPT_WORKERS_PER_LOCK_MAX,
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
    pub(super) fn prompt(&self, run: u32, ends: &[usize]) -> Vec<LocalHash> {
        let mut places: Vec<usize> = self.runs_to(run).collect();
        places.reverse();
        let of_run = |at: usize| self.hashes.get(ends[at] - self.runs[at].blocks as usize..ends[at]);
        places.into_iter().filter_map(of_run).flatten().copied().collect()
    }

    /// Where the blocks of each run end.
    pub(super) fn run_ends(&self) -> Vec<usize> {
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
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeptNumbers {
    /// The highest generation of a booking when the first slice was taken: each booking up to it is kept or has ended.
    pub complete_to: u64,
    /// The highest generation when the last slice was taken.
    pub generations: u64,
    /// The number of the next session.
    pub next_session: u32,
    /// Generations that runs before it may have given out to bookings that no image has: ranges in ascending order, at most
    /// [`KEPT_LOST_RANGES_MAX`](crate::limits::KEPT_LOST_RANGES_MAX).
    pub lost: Vec<RangeInclusive<u64>>,
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

impl Loads {
    /// The numbers that were given out so far.
    #[must_use]
    pub fn numbers(&self) -> KeptNumbers {
        let ledger = self.ledger.lock();
        let generations = ledger.bookings.generations();
        let (next_session, lost) = (ledger.sessions.next(), ledger.bookings.lost().to_vec());
        KeptNumbers { complete_to: generations, generations, next_session, lost }
    }

    /// Counts what changes in the bookings: while it is the same, so is what a restart keeps of them.
    #[must_use]
    pub fn booking_changes(&self) -> u64 {
        self.ledger.lock().changes
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
            let absent = ledger.absent.waiting(slot as u32);
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

    /// What is kept of these workers, in one critical section: what this router's own bookings make of their load.
    #[must_use]
    pub fn keep_workers(&self, workers: &[(Worker, WorkerIndex)], now_ns: u64) -> Vec<KeptWorker> {
        let ledger = self.ledger.lock();
        let keep = |(worker, index): &(Worker, WorkerIndex)| {
            let own = ledger.own(&self.cells, *index);
            let since_ns = own.prefill.work.since_ns;
            let is_busy = own.prefill.backlog.tokens > 0;
            let elapsed_ns = if is_busy { now_ns.saturating_sub(since_ns) } else { 0 };
            KeptWorker { worker: *worker, elapsed_ns, recent: aged(own.recent, now_ns) }
        };
        workers.iter().map(keep).collect()
    }

    /// What an earlier run kept of workers that have not come yet, of at most [`KEPT_WORKERS_PER_LOCK_MAX`] behind `after`;
    /// `None` = from the first. No more = done.
    #[must_use]
    pub fn keep_absent_workers(&self, after: Option<Worker>, now_ns: u64) -> Vec<KeptWorker> {
        let ledger = self.ledger.lock();
        let behind = (after.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
        let keep = |(worker, restored): (&Worker, &RestoredWorker)| KeptWorker {
            worker: *worker,
            elapsed_ns: now_ns.saturating_sub(restored.since_ns),
            recent: aged(restored.recent, now_ns),
        };
        ledger.absent.workers().range(behind).take(KEPT_WORKERS_PER_LOCK_MAX).map(keep).collect()
    }
}

/// Recent work, with the time since then in place of the time.
fn aged(recent: RecentWork, now_ns: u64) -> RecentWork {
    RecentWork { at_ms: recent_ms(now_ns).wrapping_sub(recent.at_ms), ..recent }
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
