//! One booking, its names, and the slots that live bookings are kept in.

use hashbrown::HashTable;
use xxhash_rust::xxh3::xxh3_128_with_seed;

use super::active::BLOCK_PARTS;
use super::prefill::PrefillId;
use super::session::SessionId;
use super::session::UserSlot;
use crate::ids::{LocalHash, SpaceId, WorkerIndex};
use crate::limits::{NAME_BYTES_MAX, PREFILL_BOOKING_SUFFIX};

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

/// A gateway's name for a request: its session, and 128 bits of the request id's hash under a secret in place of the
/// text, which nothing asks for again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name {
    session: SessionId,
    text: [u64; 2],
}

impl Name {
    /// `secret` is not to be known to those who choose request ids.
    pub(super) fn new(secret: u64, session: SessionId, request_id: &str) -> Self {
        Self::of_bytes(secret, session, request_id.as_bytes())
    }

    /// The name of the half of a request that prefills; `None` if that cannot be one.
    pub(super) fn of_prefill_half(secret: u64, session: SessionId, request_id: &str) -> Option<Self> {
        let mut text = [0; NAME_BYTES_MAX];
        let (id, len) = (request_id.as_bytes(), request_id.len() + PREFILL_BOOKING_SUFFIX.len());
        text.get_mut(..id.len())?.copy_from_slice(id);
        text.get_mut(id.len()..len)?.copy_from_slice(PREFILL_BOOKING_SUFFIX.as_bytes());
        Some(Self::of_bytes(secret, session, &text[..len]))
    }

    fn of_bytes(secret: u64, session: SessionId, text: &[u8]) -> Self {
        let hash = xxh3_128_with_seed(text, secret);
        Self { session, text: [hash as u64, (hash >> 64) as u64] }
    }

    /// The session that it is of.
    pub(super) const fn session(&self) -> SessionId {
        self.session
    }

    /// Where it is found in a hash table.
    pub(super) const fn hash(&self) -> u64 {
        self.text[0] ^ (self.session.0 as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

/// A name that is remembered, by its hash alone: that two of so few share one is not to be expected.
#[derive(Clone, Copy, Debug, Default)]
struct Remembered {
    hash: u64,
    attempt: u32,
    /// Which booking ended before it whose name has the same list.
    before: u32,
}

/// The names of the last [`EndedNames::LAST`] bookings that ended, with their attempts, in the order they ended. Names whose
/// hashes end alike are one list, the last first.
///
/// A booking's end writes at the end of a row, and in one of a few places elsewhere, which stay in the cache: a hash table
/// of as many names would have each end wait for memory, and those who ask for a name that ended are few.
#[derive(Debug)]
pub(super) struct EndedNames {
    /// The booking that ended as number `n` is at `n % LAST`.
    row: Box<[Remembered]>,
    /// Which booking is the last of each list.
    last: Box<[u32]>,
    /// The number of the next booking that ends. It wraps.
    next: u32,
}

impl Default for EndedNames {
    fn default() -> Self {
        // All there will be, so that no booking's end waits for more; memory comes as it is touched.
        let (row, last) = (vec![Remembered::default(); Self::LAST as usize], vec![0; Self::LISTS]);
        Self { row: row.into(), last: last.into(), next: 0 }
    }
}

impl EndedNames {
    /// Names that are remembered.
    pub(super) const LAST: u32 = 1 << 16;
    /// Lists: each of some names on average.
    const LISTS: usize = Self::LAST as usize / 4;

    /// Remembers that a booking of this name and attempt ended.
    pub(super) fn add(&mut self, name: Name, attempt: u32) {
        let hash = name.hash();
        let before = std::mem::replace(&mut self.last[list(hash)], self.next);
        self.row[place(self.next)] = Remembered { hash, attempt, before };
        self.next = self.next.wrapping_add(1);
    }

    /// The attempt that ended last under a name.
    pub(super) fn attempt(&self, name: Name) -> Option<u32> {
        let hash = name.hash();
        let (mut at, mut age) = (self.last[list(hash)], 0);
        // What a list begins with, and goes on with, may be forgotten already. It only gets older.
        while age < self.age(at) && self.age(at) <= Self::LAST {
            let remembered = self.row[place(at)];
            if remembered.hash == hash {
                return Some(remembered.attempt);
            }
            (at, age) = (remembered.before, self.age(at));
        }
        None
    }

    /// How many bookings have ended since this one ended, itself included.
    const fn age(&self, number: u32) -> u32 {
        self.next.wrapping_sub(number)
    }
}

/// Where a booking is in the row.
const fn place(number: u32) -> usize {
    (number % EndedNames::LAST) as usize
}

/// In which list a name is.
const fn list(hash: u64) -> usize {
    hash as usize % EndedNames::LISTS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_apart_by_session_and_text() {
        let name = |session, text| Name::new(7, SessionId(session), text);
        assert_eq!(name(1, "a"), name(1, "a"));
        assert_ne!(name(1, "a"), name(2, "a"));
        assert_ne!(name(1, "a"), name(1, "b"));
        assert_ne!(name(1, "a").hash(), name(2, "a").hash());
        assert_ne!(name(1, "a"), Name::new(8, SessionId(1), "a"), "the secret counts");
        assert_eq!(Name::of_prefill_half(7, SessionId(1), "a"), Some(name(1, "a/prefill")));
        assert_eq!(Name::of_prefill_half(7, SessionId(1), &"a".repeat(NAME_BYTES_MAX)), None, "it is too long");
    }

    #[test]
    fn so_many_names_are_remembered_and_the_last_attempt_counts() {
        let name = |at: u32| Name::new(7, SessionId(1), &at.to_string());
        // The second begins where numbers are about to wrap.
        for begins in [0, 0_u32.wrapping_sub(2 * EndedNames::LAST)] {
            let mut ended = EndedNames { next: begins, ..EndedNames::default() };
            assert_eq!(ended.attempt(name(0)), None, "nothing has ended");
            for at in 0..3 * EndedNames::LAST {
                ended.add(name(at), 1);
                if let Some(last) = at.checked_sub(EndedNames::LAST - 1).filter(|last| last % 1000 == 0) {
                    assert_eq!(ended.attempt(name(last)), Some(1));
                    assert_eq!(last.checked_sub(1).and_then(|before| ended.attempt(name(before))), None);
                }
            }
            assert_eq!(ended.attempt(name(0)), None, "long ago");
            ended.add(name(3 * EndedNames::LAST - 1), 2);
            assert_eq!(ended.attempt(name(3 * EndedNames::LAST - 1)), Some(2));
            ended.add(name(0), 3);
            assert_eq!(ended.attempt(name(0)), Some(3));
            assert_eq!(ended.attempt(name(4 * EndedNames::LAST)), None, "never there");
        }
    }
}
