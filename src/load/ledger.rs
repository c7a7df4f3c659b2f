//! The state behind the bookings' lock.

use std::mem::offset_of;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::active::ActiveWriter;
use super::booking::{Booking, Bookings, Name, NameState};
use super::gauge::{Gauge, GaugeEffect, OriginPlace};
use super::load_cells::{LoadCells, Record};
use super::loads_config::LoadsConfig;
use super::others::Others;
use super::prefill::{PrefillId, Prefills};
use super::reporters::{Failures, Reporter, Reporters};
use super::restored::{ABSENT, AbsentBooking, AbsentWorkers};
use super::session::{SessionId, Sessions};
use crate::error::{Error, Kind, Result};
use crate::ids::{SpaceId, WorkerIndex};
use crate::limits::{BOOKING_BYTES, BOOKINGS_PER_SESSION_MAX};
use crate::prefetch::{prefetch_to_write, prefetch_value_to_write};
use crate::protocol::{BookingHandle, BookingOutcome, BookingRef};
use crate::shares::{share, share_rounded_down};

/// Everything that one thread at a time may change. On lines of its own, so that a thread which waits for the lock before
/// it reads none of them, and none of them lies beside what readers without the lock read.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Ledger {
    pub(super) sessions: Sessions,
    pub(super) bookings: Bookings,
    pub(super) active: ActiveWriter,
    pub(super) prefills: Prefills,
    /// What other routers add to the workers' loads.
    pub(super) others: Others,
    pub(super) failures: Failures,
    /// The users whose failure reports are in force.
    pub(super) failure_reporters: Reporters,
    /// The users whose load reports are in force.
    pub(super) load_reporters: Reporters,
    /// Bookings of an earlier run whose workers are not there.
    pub(super) absent: AbsentWorkers,
    /// The place where the next look for faded recent work begins.
    pub(super) swept_to: usize,
    /// Counts what changes in bookings.
    pub(super) changes: u64,
    /// The secret of name hashes.
    pub(super) secret: u64,
    /// The share of each limit that one user may take, percent.
    user_share_percent: u8,
    /// The most bookings, and words of their prompts.
    bookings_max: usize,
    active_words_max: usize,
}

/// Milliseconds in nanoseconds of the bookings' clock.
pub(super) const fn ns(ms: u64) -> u64 {
    ms.saturating_mul(1_000_000)
}

impl Ledger {
    /// An empty ledger.
    pub(super) fn new(config: &LoadsConfig) -> Self {
        Self {
            sessions: Sessions::new(config.user_share_percent),
            bookings: Bookings::default(),
            active: ActiveWriter::default(),
            prefills: Prefills::new(config.prefill),
            others: Others::default(),
            failures: Failures::default(),
            failure_reporters: Reporters::default(),
            load_reporters: Reporters::default(),
            absent: AbsentWorkers::default(),
            swept_to: 0,
            changes: 0,
            secret: config.secret,
            user_share_percent: config.user_share_percent,
            bookings_max: config.bookings_max,
            active_words_max: config.active_words_max,
        }
    }

    /// Prefetches what every booking changes in a ledger whose lock the caller is about to take: its lines come from another
    /// processor at once, and not one after the other.
    #[inline]
    pub(super) fn prefetch_to_write(ledger: *const Self) {
        let at = |offset: usize| ledger.cast::<u8>().wrapping_add(offset);
        prefetch_value_to_write(at(offset_of!(Self, bookings)).cast::<Bookings>());
        prefetch_value_to_write(at(offset_of!(Self, active)).cast::<ActiveWriter>());
        prefetch_to_write(at(offset_of!(Self, changes)));
    }

    /// Adds a booking's prefill, computed and cached tokens, to its worker; `None` if there is nothing to compute.
    pub(super) fn begin_prefill(&mut self, worker: WorkerIndex, tokens: [u64; 2], now_ns: u64) -> Option<PrefillId> {
        (tokens[0] > 0).then(|| self.prefills.begin(worker, tokens, &self.others.of(worker), now_ns))
    }

    /// As [`Prefills::learn`].
    pub(super) fn learn_prefill(&mut self, worker: WorkerIndex, id: PrefillId, took_us: u64, now_ns: u64) {
        let beside_others = self.others.of(worker).has_prefills();
        self.prefills.learn((worker, beside_others), id, took_us, now_ns);
    }

    /// Sets what another router adds to an admitted worker, within the limits of a gauge.
    pub(super) fn set_gauge(
        &mut self,
        cells: &LoadCells,
        (origin, worker): (OriginPlace, WorkerIndex),
        gauge: &Gauge,
        now_ns: u64,
    ) -> GaugeEffect {
        if gauge.prefills > 0 {
            self.prefills.laws.share_stretch(worker);
        }
        if gauge.is_zero() {
            return self.others.take(cells, worker.place(), origin);
        }
        let prefills = &self.prefills;
        self.others.set(cells, (origin, worker), gauge, now_ns, || {
            let mut own = cells.record(worker);
            own.prefill.ended_ns = prefills.ended_ns(worker);
            own
        })
    }

    /// What this router's own bookings, reports and laws make of a worker's load.
    pub(super) fn own(&self, cells: &LoadCells, worker: WorkerIndex) -> Record {
        self.others.own_of(worker).unwrap_or_else(|| cells.record(worker))
    }

    /// Memory of bookings, and of what waits for absent workers, bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.bookings.slots() as u64 * BOOKING_BYTES + self.absent.bytes()
    }

    /// Lets a booking of an earlier run wait for its worker. Its blocks wait with it while they leave room in the tree;
    /// else they are counted, and shared with no other request.
    pub(super) fn keep_absent(&mut self, slot: u32, mut absent: AbsentBooking) {
        let words = self.active.words_used() as usize + self.absent.blocks();
        if words + absent.locals.len() > self.active_words_max {
            absent.locals = Vec::new();
        }
        self.absent.add(slot, absent);
    }

    /// Whether one more booking of `session` is within the limits; a booking that replaces another always is.
    pub(super) fn admit(&mut self, session: SessionId, replaces: bool) -> Result<()> {
        if replaces {
            return Ok(());
        }
        let session = self.sessions.get_mut(session);
        let (held, user) = session.map_or((0, None), |session| (session.bookings.len(), Some(session.user)));
        if held >= BOOKINGS_PER_SESSION_MAX {
            return Err(Error::new(
                Kind::TooManyBookings,
                format!("the session holds {BOOKINGS_PER_SESSION_MAX} bookings"),
                "free requests when they end",
            ));
        }
        let bookings_max = self.bookings_max;
        let user_max = share(self.user_share_percent, bookings_max);
        let of_user = user.map_or(0, |user| self.sessions.users.get(user).bookings);
        if of_user >= user_max && self.bookings.live() < bookings_max {
            return Err(Error::new(
                Kind::TooManyBookings,
                format!("{user_max} bookings of this user are live"),
                "free requests when they end, or raise serve.user_share_percent",
            ));
        }
        if self.bookings.live() >= bookings_max {
            return Err(Error::new(
                Kind::Overloaded,
                format!("{bookings_max} bookings are live"),
                "free requests when they end, lower booking.age_s_max, or raise process.memory_bytes_max",
            ));
        }
        Ok(())
    }

    /// The user and space of a reporter, and how many workers of the space its reports may cover at a time: all of them
    /// while no other user has sessions.
    pub(super) fn user_of(&self, reporter: Reporter) -> ((u32, SpaceId), usize) {
        let uid = self.sessions.uid_of(reporter.session);
        let workers_max = match self.sessions.users.has_others(uid) {
            true => share_rounded_down(self.user_share_percent, reporter.workers),
            false => usize::MAX,
        };
        ((uid, reporter.space), workers_max)
    }

    /// Whether one more prompt of `session` may go into the tree. A user whose prompts could fill more than its share,
    /// if they had no block in common, leaves the rest to others.
    pub(super) fn may_share(&mut self, session: SessionId, blocks: usize) -> bool {
        let user_max = share(self.user_share_percent, self.active_words_max) as u64;
        let user = self.sessions.get_mut(session).map(|session| session.user);
        let of_user = user.map_or(0, |user| self.sessions.users.get(user).prompt_blocks);
        let (blocks, used) = (blocks as u64, u64::from(self.active.words_used()));
        of_user + blocks <= user_max || used + blocks <= user_max
    }

    /// Notes that the blocks of the booking in `slot` have left the tree.
    pub(super) fn unshare(&mut self, slot: u32) {
        let blocks = u64::from(self.bookings.take_prompt_blocks(slot));
        if let (Some(user), _) = self.bookings.user_and_blocks_of(slot) {
            self.sessions.users.get_mut(user).prompt_blocks -= blocks;
        }
    }

    /// Notes that the blocks of the booking in `slot`, which were not in the tree, are in it now.
    pub(super) fn share(&mut self, slot: u32, blocks: usize) {
        self.bookings.set_prompt_blocks(slot, blocks as u32);
        if let (Some(user), _) = self.bookings.user_and_blocks_of(slot) {
            self.sessions.users.get_mut(user).prompt_blocks += blocks as u64;
        }
    }

    /// The handle of a booking of `session`. Its upper half checks the session, even long after the booking has ended.
    /// To another session the handle names nothing, so it learns nothing of the booking.
    pub(super) fn handle(&self, session: SessionId, slot: u32, generation: u64) -> BookingHandle {
        let mut whose = [0; 16];
        whose[..8].copy_from_slice(&generation.to_le_bytes());
        whose[8..12].copy_from_slice(&session.0.to_le_bytes());
        whose[12..].copy_from_slice(&slot.to_le_bytes());
        let shown = xxh3_64_with_seed(&whose, self.secret) as u32;
        BookingHandle { slot: u64::from(shown) << 32 | u64::from(slot), generation }
    }

    /// The slot of a live booking of `session`, or the answer to give instead.
    pub(super) fn find(&self, session: SessionId, booking: BookingRef<'_>) -> Result<u32, BookingOutcome> {
        match booking {
            BookingRef::Handle(handle) => {
                let slot = handle.slot as u32;
                if self.handle(session, slot, handle.generation) != handle {
                    return Err(BookingOutcome::Unknown);
                }
                match self.bookings.get(slot) {
                    Some(live) if live.generation == handle.generation && live.name.session() == session => Ok(slot),
                    _ if self.bookings.may_be_lost(handle.generation) => Err(BookingOutcome::Unknown),
                    // A generation that was handed out to this session and is gone has ended.
                    _ if handle.generation <= self.bookings.generations() => Err(BookingOutcome::AlreadyApplied),
                    _ => Err(BookingOutcome::Unknown),
                }
            }
            BookingRef::Request { request_id, attempt } => {
                match self.bookings.named(Name::new(self.secret, session, request_id)) {
                    Some(NameState::Live(slot)) => match self.bookings.get(slot) {
                        Some(live) if live.attempt == attempt => Ok(slot),
                        Some(live) if live.attempt > attempt => Err(BookingOutcome::Superseded),
                        _ => Err(BookingOutcome::Unknown),
                    },
                    Some(NameState::Ended { attempt: ended }) if ended == attempt => {
                        Err(BookingOutcome::AlreadyApplied)
                    }
                    Some(NameState::Ended { attempt: ended }) if ended > attempt => Err(BookingOutcome::Superseded),
                    _ => Err(BookingOutcome::Unknown),
                }
            }
        }
    }

    /// Stores a new booking with this many blocks in the tree, also in its session's list. Returns slot and generation.
    #[inline]
    pub(super) fn keep(&mut self, booking: Booking, prompt_blocks: usize) -> (u32, u64) {
        let (id, is_prefill_half) = (booking.name.session(), booking.is_prefill_half);
        let session = self.sessions.get_mut(id);
        let (place, user) = session.map_or((0, None), |session| (session.bookings.len() as u32, Some(session.user)));
        let (slot, generation) = self.bookings.insert(booking, (place, prompt_blocks as u32), user);
        self.changes += 1;
        if let Some(user) = user {
            self.sessions.add_booking(id, slot, is_prefill_half);
            let user = self.sessions.users.get_mut(user);
            user.bookings += 1;
            user.prompt_blocks += prompt_blocks as u64;
        }
        (slot, generation)
    }

    /// Stores a booking of an earlier run in its slot, also in its session's list. None of its blocks is in the tree.
    pub(super) fn keep_at(&mut self, slot: u32, booking: Booking) {
        let (id, is_prefill_half) = (booking.name.session(), booking.is_prefill_half);
        let session = self.sessions.get_mut(id);
        let (place, user) = session.map_or((0, None), |session| (session.bookings.len() as u32, Some(session.user)));
        self.bookings.insert_at(slot, booking, place, user);
        if let Some(user) = user {
            self.sessions.add_booking(id, slot, is_prefill_half);
            self.sessions.users.get_mut(user).bookings += 1;
        }
    }

    /// Ends a booking and removes it from its session's list.
    #[inline]
    pub(super) fn end(&mut self, slot: u32) -> Option<Booking> {
        let booking = self.bookings.end(slot)?;
        self.changes += 1;
        if booking.worker == ABSENT {
            self.absent.take(slot);
        }
        let (id, place) = (booking.name.session(), self.bookings.session_place(slot));
        if let Some(moved) = self.sessions.take_booking(id, place as usize, booking.is_prefill_half) {
            self.bookings.move_in_session(moved, place);
        }
        if let (Some(user), blocks) = self.bookings.user_and_blocks_of(slot) {
            let held = self.sessions.users.get_mut(user);
            held.bookings -= 1;
            held.prompt_blocks -= u64::from(blocks);
            self.sessions.users.remove_if_unused(user);
        }
        Some(booking)
    }
}
