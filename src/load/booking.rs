//! One booking, and the slots bookings are kept in.

use hashbrown::{Equivalent, HashMap};
use std::collections::VecDeque;
use std::hash::{Hash, Hasher};

use super::active::BLOCK_PARTS;
use super::session::SessionId;
use crate::ids::{LocalHash, SpaceId, WorkerIndex};

/// An opaque name of a booking.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BookingHandle {
    /// Where it is kept.
    pub slot: u64,
    /// Which of the bookings once kept there; never 0.
    pub generation: u64,
}

/// How a gateway names a booking it made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BookingRef<'a> {
    /// By the handle of the reply.
    Handle(BookingHandle),
    /// By its own name of the request.
    Request {
        /// Unique within the session while the booking lives.
        request_id: &'a str,
        /// The try that made the booking.
        attempt: u32,
    },
}

/// What became of a report about a booking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BookingOutcome {
    /// It changed the booking.
    Applied,
    /// It had been said before; nothing changed.
    AlreadyApplied,
    /// Never seen by this daemon run, expired long ago, or another session's.
    Unknown,
    /// A later attempt of the same request holds the booking.
    Superseded,
}

/// The whole blocks of a prompt, as its worker decodes on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptBlocks<'a> {
    /// So many that are shared with no other request, or of which it is not known.
    Alone(u64),
    /// These, by their hashes: each counted once for a worker however many of its requests have it at the same place.
    Shared(&'a [LocalHash]),
}

impl Default for PromptBlocks<'_> {
    fn default() -> Self {
        Self::Alone(0)
    }
}

/// What a booking adds to its worker's load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Demand<'a> {
    /// The space of the worker; prompts of other spaces share nothing.
    pub space: SpaceId,
    /// Tokens to be prefilled: those of the prompt that are not cached.
    pub prefill_tokens: u64,
    /// The others: those that are cached, or computed elsewhere. Together they are the prompt, behind which output begins.
    pub cached_tokens: u64,
    /// Whole blocks of the prompt.
    pub blocks: PromptBlocks<'a>,
    /// Tokens per block, by which output becomes blocks; 0 = output is not counted.
    pub block_size: u32,
    /// Output tokens that are expected; 0 = no idea.
    pub expected_output_tokens: u32,
}

/// What a request has put out so far, as blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Output {
    pub(super) block_size: u32,
    pub(super) expected_tokens: u32,
    pub(super) tokens: u32,
    pub(super) blocks: u64,
    /// What its blocks and those of the prompt that it runs alone weigh, in parts of a block: less, the nearer the end
    /// that is expected.
    pub(super) weight: u64,
}

impl Output {
    pub(super) const fn new(block_size: u32, expected_tokens: u32) -> Self {
        Self { block_size, expected_tokens, tokens: 0, blocks: 0, weight: BLOCK_PARTS }
    }

    /// So many tokens have come after a prompt of `prompt_tokens`. Blocks begin where the prompt's partial one ends.
    pub(super) fn grow(&mut self, prompt_tokens: u64, tokens: u32) {
        self.tokens = tokens;
        if self.block_size > 0 {
            let size = u64::from(self.block_size);
            self.blocks = (prompt_tokens + u64::from(tokens)).div_ceil(size) - prompt_tokens.div_ceil(size);
        }
        let left = u64::from(self.expected_tokens.saturating_sub(tokens));
        self.weight = (BLOCK_PARTS * left).checked_div(u64::from(self.expected_tokens)).unwrap_or(BLOCK_PARTS);
    }
}

/// How the blocks of a live booking are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Held {
    /// By themselves.
    Alone(u64),
    /// With those of others: the node of the tree that its prompt ends with.
    Shared(u32),
}

/// A live booking.
#[derive(Debug)]
pub(super) struct Booking {
    pub(super) generation: u64,
    pub(super) session: SessionId,
    pub(super) request_id: Box<str>,
    pub(super) attempt: u32,
    pub(super) worker: WorkerIndex,
    /// Its number among the prefills of its worker; 0 = there is nothing to compute.
    pub(super) prefill: u64,
    pub(super) space: SpaceId,
    /// Tokens of the prompt that were to be computed, and those that were cached.
    pub(super) prompt_tokens: [u64; 2],
    pub(super) held: Held,
    pub(super) output: Output,
    pub(super) prefilling: bool,
    pub(super) booked_at_ns: u64,
    /// Its place in its session's list.
    pub(super) session_place: u32,
    /// The slots of the bookings made just before and just after it, among those alive.
    pub(super) older: Option<u32>,
    pub(super) younger: Option<u32>,
}

impl Booking {
    /// What it adds to its worker beside blocks that others may share, in parts of a block.
    pub(super) const fn own_parts(&self) -> u64 {
        let alone = match self.held {
            Held::Alone(blocks) => blocks,
            Held::Shared(_) => 0,
        };
        (alone + self.output.blocks) * self.output.weight
    }
}

/// The key of a booking by its gateway's name for it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RequestKey {
    session: SessionId,
    request_id: Box<str>,
}

#[derive(Clone, Copy)]
struct RequestKeyRef<'a>(SessionId, &'a str);

impl Hash for RequestKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        RequestKeyRef(self.session, &self.request_id).hash(state);
    }
}

impl Hash for RequestKeyRef<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hash(state);
        self.1.hash(state);
    }
}

impl Equivalent<RequestKey> for RequestKeyRef<'_> {
    fn equivalent(&self, key: &RequestKey) -> bool {
        self.0 == key.session && self.1 == &*key.request_id
    }
}

/// What a request id stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Named {
    /// A live booking in this slot.
    Live(u32),
    /// A booking that ended; remembered for a while, so that ending it again is no surprise.
    Ended {
        /// The attempt that ended.
        attempt: u32,
    },
}

/// Bookings by slot and by request id. Slots are reused, generations never are.
#[derive(Debug, Default)]
pub(super) struct Bookings {
    slots: Vec<Option<Booking>>,
    free: Vec<u32>,
    by_request: HashMap<RequestKey, Named>,
    /// Ended request ids, oldest first, bounded.
    ended: VecDeque<(SessionId, Box<str>)>,
    /// The ends of the list that links live bookings in the order they were made.
    oldest: Option<u32>,
    youngest: Option<u32>,
    generations: u64,
}

/// Request ids of ended bookings that are remembered.
const ENDED_REMEMBERED: usize = 1 << 16;

impl Bookings {
    pub(super) fn live(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Slots ever used: those of all live bookings are below.
    pub(super) fn slots(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn get(&self, slot: u32) -> Option<&Booking> {
        self.slots.get(slot as usize)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, slot: u32) -> Option<&mut Booking> {
        self.slots.get_mut(slot as usize)?.as_mut()
    }

    pub(super) fn named(&self, session: SessionId, request_id: &str) -> Option<Named> {
        self.by_request.get(&RequestKeyRef(session, request_id)).copied()
    }

    /// The highest generation handed out so far.
    pub(super) const fn generations(&self) -> u64 {
        self.generations
    }

    /// Keeps `booking`, giving it its generation.
    pub(super) fn insert(&mut self, mut booking: Booking) -> BookingHandle {
        self.generations += 1;
        booking.generation = self.generations;
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            (self.slots.len() - 1) as u32
        });
        let key = RequestKey { session: booking.session, request_id: booking.request_id.clone() };
        self.by_request.insert(key, Named::Live(slot));
        booking.older = self.youngest.replace(slot);
        booking.younger = None;
        match booking.older.and_then(|older| self.get_mut(older)) {
            Some(older) => older.younger = Some(slot),
            None => self.oldest = Some(slot),
        }
        let handle = BookingHandle { slot: u64::from(slot), generation: booking.generation };
        self.slots[slot as usize] = Some(booking);
        handle
    }

    /// Ends the booking in `slot`, remembering its name.
    pub(super) fn end(&mut self, slot: u32) -> Option<Booking> {
        let booking = self.slots.get_mut(slot as usize)?.take()?;
        self.free.push(slot);
        self.unlink(&booking);
        if let Some(named) = self.by_request.get_mut(&RequestKeyRef(booking.session, &booking.request_id)) {
            *named = Named::Ended { attempt: booking.attempt };
        }
        self.ended.push_back((booking.session, booking.request_id.clone()));
        while self.ended.len() > ENDED_REMEMBERED {
            let Some((session, request_id)) = self.ended.pop_front() else { break };
            let key = RequestKeyRef(session, &request_id);
            if matches!(self.by_request.get(&key), Some(Named::Ended { .. })) {
                self.by_request.remove(&key);
            }
        }
        Some(booking)
    }

    /// Takes an ended booking out of the list by age.
    fn unlink(&mut self, booking: &Booking) {
        match booking.older.and_then(|older| self.get_mut(older)) {
            Some(older) => older.younger = booking.younger,
            None => self.oldest = booking.younger,
        }
        match booking.younger.and_then(|younger| self.get_mut(younger)) {
            Some(younger) => younger.older = booking.older,
            None => self.youngest = booking.older,
        }
    }

    /// The slot of the oldest booking, if it is older than `age_ns`.
    pub(super) fn oldest_beyond(&self, now_ns: u64, age_ns: u64) -> Option<u32> {
        let slot = self.oldest?;
        (now_ns.saturating_sub(self.get(slot)?.booked_at_ns) >= age_ns).then_some(slot)
    }
}
