//! One booking, and the slots bookings are kept in.

use hashbrown::HashTable;

use super::active::BLOCK_PARTS;
use super::names::{EndedNames, Name};
use super::prefill::PrefillId;
use super::users::UserSlot;
use crate::ids::{LocalHash, SpaceId, WorkerIndex};

/// An opaque name of a booking.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BookingHandle {
    /// Where it is kept, and whose it is.
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
pub(super) enum HeldBlocks {
    /// By themselves.
    Alone(u64),
    /// With those of others: the node of the tree that its prompt ends with.
    Shared(u32),
}

/// A live booking.
#[derive(Debug)]
pub(super) struct Booking {
    pub(super) generation: u64,
    pub(super) name: Name,
    pub(super) attempt: u32,
    pub(super) worker: WorkerIndex,
    /// Its prefill, until that ends; `None` = there is nothing to compute.
    pub(super) prefill: Option<PrefillId>,
    pub(super) space: SpaceId,
    /// Tokens of the prompt that were to be computed, and those that were cached.
    pub(super) prompt_tokens: [u64; 2],
    pub(super) held: HeldBlocks,
    pub(super) output: Output,
    pub(super) prefilling: bool,
    /// Whether its name is that of the half of a request that prefills.
    pub(super) is_prefill_half: bool,
    pub(super) booked_at_ns: u64,
}

const _: () = assert!(size_of::<Option<Booking>>() <= 128, "two cache lines");

impl Booking {
    /// What it adds to its worker beside blocks that others may share, in parts of a block.
    pub(super) const fn own_parts(&self) -> u64 {
        let alone = match self.held {
            HeldBlocks::Alone(blocks) => blocks,
            HeldBlocks::Shared(_) => 0,
        };
        (alone + self.output.blocks) * self.output.weight
    }
}

/// What a request id stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NameState {
    /// A live booking in this slot.
    Live(u32),
    /// A booking that ended; remembered for a while, so that ending it again is no surprise.
    Ended {
        /// The attempt that ended.
        attempt: u32,
    },
}

/// "None" of a slot.
const NO_SLOT: u32 = u32::MAX;

/// Where a live booking stands in the lists that it is in. These lie beside the bookings: whoever changes a list touches a
/// few neighbours' places, and none of the bookings.
#[derive(Clone, Copy, Debug)]
struct Links {
    /// The slots of the bookings made just before and just after it, among those alive.
    older: u32,
    younger: u32,
    /// Its place in its session's list.
    session_place: u32,
    /// Prompt blocks that it has in the tree of prompts.
    prompt_blocks: u32,
    /// Where its user is kept.
    user: Option<UserSlot>,
}

/// Bookings by slot and by name. Slots are reused, generations never are.
#[derive(Debug)]
pub(super) struct Bookings {
    slots: Vec<Option<Booking>>,
    /// By slot.
    links: Vec<Links>,
    free: Vec<u32>,
    /// The slots of those alive.
    by_name: HashTable<u32>,
    ended: EndedNames,
    /// The ends of the list that links live bookings in the order they were made.
    oldest: u32,
    youngest: u32,
    generations: u64,
}

impl Default for Bookings {
    fn default() -> Self {
        Self {
            slots: Vec::new(),
            links: Vec::new(),
            free: Vec::new(),
            by_name: HashTable::new(),
            ended: EndedNames::default(),
            oldest: NO_SLOT,
            youngest: NO_SLOT,
            generations: 0,
        }
    }
}

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

    pub(super) fn named(&self, name: Name) -> Option<NameState> {
        match self.live_named(name) {
            Some(slot) => Some(NameState::Live(slot)),
            None => self.ended.attempt(name).map(|attempt| NameState::Ended { attempt }),
        }
    }

    /// The slot of a live booking of this name.
    pub(super) fn live_named(&self, name: Name) -> Option<u32> {
        self.by_name.find(name.hash(), |slot| self.get(*slot).is_some_and(|booking| booking.name == name)).copied()
    }

    /// The highest generation handed out so far.
    pub(super) const fn generations(&self) -> u64 {
        self.generations
    }

    /// Keeps `booking`, whose name no other that is alive has, giving it its generation, at a place in its session's
    /// list, for a user. Answers with its slot and generation.
    #[inline]
    pub(super) fn insert(
        &mut self,
        mut booking: Booking,
        (session_place, prompt_blocks): (u32, u32),
        user: Option<UserSlot>,
    ) -> (u32, u64) {
        self.generations += 1;
        booking.generation = self.generations;
        let (generation, hash) = (booking.generation, booking.name.hash());
        let links = Links { older: self.youngest, younger: NO_SLOT, session_place, prompt_blocks, user };
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.links.push(links);
            (self.slots.len() - 1) as u32
        });
        self.slots[slot as usize] = Some(booking);
        self.links[slot as usize] = links;
        match self.links.get_mut(links.older as usize) {
            Some(older) => older.younger = slot,
            None => self.oldest = slot,
        }
        self.youngest = slot;
        let slots = &self.slots;
        let of_slot = |slot: &u32| slots[*slot as usize].as_ref().map_or(0, |booking| booking.name.hash());
        self.by_name.insert_unique(hash, slot, of_slot);
        (slot, generation)
    }

    /// Ends the booking in `slot`, remembering its name.
    #[inline]
    pub(super) fn end(&mut self, slot: u32) -> Option<Booking> {
        let booking = self.slots.get_mut(slot as usize)?.take()?;
        self.free.push(slot);
        self.unlink(slot);
        if let Ok(entry) = self.by_name.find_entry(booking.name.hash(), |other| *other == slot) {
            entry.remove();
        }
        self.ended.add(booking.name, booking.attempt);
        Some(booking)
    }

    /// Takes an ended booking out of the list by age.
    fn unlink(&mut self, slot: u32) {
        let Links { older, younger, .. } = self.links[slot as usize];
        match self.links.get_mut(older as usize) {
            Some(links) => links.younger = younger,
            None => self.oldest = younger,
        }
        match self.links.get_mut(younger as usize) {
            Some(links) => links.older = older,
            None => self.youngest = older,
        }
    }

    /// The place in its session's list of the booking that is or was last in `slot`.
    pub(super) fn session_place(&self, slot: u32) -> u32 {
        self.links[slot as usize].session_place
    }

    /// The user of the booking that is or was last in `slot`, and the blocks it has in the tree of prompts.
    pub(super) fn held_of(&self, slot: u32) -> (Option<UserSlot>, u32) {
        (self.links[slot as usize].user, self.links[slot as usize].prompt_blocks)
    }

    /// The blocks of the booking in `slot` are no longer in the tree of prompts. Answers how many they were.
    pub(super) fn take_prompt_blocks(&mut self, slot: u32) -> u32 {
        std::mem::take(&mut self.links[slot as usize].prompt_blocks)
    }

    /// The booking in `slot` has another place in its session's list.
    pub(super) fn move_in_session(&mut self, slot: u32, place: u32) {
        self.links[slot as usize].session_place = place;
    }

    /// The slot of the oldest booking, if it is older than `age_ns`.
    pub(super) fn oldest_beyond(&self, now_ns: u64, age_ns: u64) -> Option<u32> {
        let booking = self.get(self.oldest)?;
        (now_ns.saturating_sub(booking.booked_at_ns) >= age_ns).then_some(self.oldest)
    }
}
