//! One booking, its names, and the slots of live bookings.

use std::ops::RangeInclusive;

use hashbrown::HashTable;
use xxhash_rust::xxh3::xxh3_128_with_seed;

use super::active::{BLOCK_PARTS, NewPrompt, SeenDivergence};
use super::kept::KeptNumbers;
use super::prefill::PrefillId;
use super::session::{SessionId, UserSlot};
use crate::ids::{LocalHash, SpaceId, WorkerIndex};
use crate::limits::{BOOKING_NAME_BYTES_MAX, BOOKING_STRIPES, KEPT_LOST_RANGES_MAX, PREFILL_BOOKING_SUFFIX};

/// The whole blocks of a prompt, as decode blocks of its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptBlocks<'a> {
    /// Blocks that are shared with no other request, or whose hashes are unknown.
    Alone(u64),
    /// Block hashes. A worker counts each block once, however many of its requests have it at the same position.
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
    /// The space of the worker; prompts of different spaces share nothing.
    pub space: SpaceId,
    /// Tokens to prefill: those of the prompt that are not cached.
    pub prefill_tokens: u64,
    /// The other tokens of the prompt: cached, or computed elsewhere.
    pub cached_tokens: u64,
    /// Whole blocks of the prompt.
    pub blocks: PromptBlocks<'a>,
    /// Where the blocks diverge from the prompts in flight, by the last look-up of the same blocks; `None` = unknown.
    pub divergence: Option<&'a SeenDivergence>,
    /// Tokens per block, to count output in blocks; 0 = output is not counted.
    pub block_size: u32,
    /// Expected output tokens; 0 = unknown.
    pub expected_output_tokens: u32,
    /// Whether the journal records what becomes of the booking.
    pub is_recorded: bool,
    /// Whether its request is traced, so that the booking gets a span.
    pub is_traced: bool,
}

impl Demand<'_> {
    /// Its prompt, of these blocks, for a worker.
    pub(super) const fn prompt<'a>(&'a self, locals: &'a [LocalHash], worker: WorkerIndex) -> NewPrompt<'a> {
        NewPrompt { space: self.space, locals, worker, seen: self.divergence }
    }
}

/// The output of a request so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Output {
    pub(super) block_size: u32,
    pub(super) expected_tokens: u32,
    pub(super) tokens: u32,
    pub(super) blocks: u32,
    /// The weight of its output blocks, and of the prompt blocks that it runs alone, in parts of a block. It falls
    /// towards the expected end.
    pub(super) weight: u64,
}

impl Output {
    pub(super) const fn new(block_size: u32, expected_tokens: u32) -> Self {
        Self { block_size, expected_tokens, tokens: 0, blocks: 0, weight: BLOCK_PARTS }
    }

    /// Counts this many output tokens after a prompt of `prompt_tokens`. Output fills the partial block of the prompt
    /// first.
    pub(super) fn grow(&mut self, prompt_tokens: u64, tokens: u32) {
        self.tokens = tokens;
        if self.block_size > 0 {
            let size = u64::from(self.block_size);
            // No more than the tokens.
            self.blocks = ((prompt_tokens + u64::from(tokens)).div_ceil(size) - prompt_tokens.div_ceil(size)) as u32;
        }
        let left = u64::from(self.expected_tokens.saturating_sub(tokens));
        self.weight = (BLOCK_PARTS * left).checked_div(u64::from(self.expected_tokens)).unwrap_or(BLOCK_PARTS);
    }
}

/// How the prompt blocks of a live booking are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HeldBlocks {
    /// As blocks of their own.
    Alone(u64),
    /// As shared blocks: the node of the tree at which the prompt ends.
    Shared(u32),
}

/// A live booking, on two lines of its own.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Booking {
    pub(super) generation: u64,
    pub(super) name: Name,
    pub(super) attempt: u32,
    pub(super) worker: WorkerIndex,
    /// The prefill in progress; `None` = nothing to compute.
    pub(super) prefill: Option<PrefillId>,
    pub(super) space: SpaceId,
    /// Tokens of the prompt that were to be computed, and cached ones.
    pub(super) prompt_tokens: [u32; 2],
    pub(super) held: HeldBlocks,
    pub(super) output: Output,
    pub(super) prefilling: bool,
    /// When the first token was reported; meaningless while it prefills.
    pub(super) first_token_at_ns: u64,
    /// Whether the journal records what becomes of it; the two fields below are for that.
    pub(super) is_recorded: bool,
    /// Whether its request is traced.
    pub(super) is_traced: bool,
    /// Whether its worker had no other prefill, of any router, when it was booked. Known with the first token.
    pub(super) began_alone: bool,
    /// The worker's count of predicted prefill time at the first token, microseconds, modulo 2³².
    pub(super) prefilled_us: u32,
    /// Whether the name is that of the prefill half of a request.
    pub(super) is_prefill_half: bool,
    pub(super) booked_at_ns: u64,
}

const _: () = assert!(size_of::<Option<Booking>>() <= 128, "two cache lines");

impl Booking {
    /// Tokens of the prompt that were to be computed, and cached ones.
    pub(super) fn tokens(&self) -> [u64; 2] {
        self.prompt_tokens.map(u64::from)
    }

    /// What the booking adds to its worker beyond shared blocks, in parts of a block.
    pub(super) const fn own_parts(&self) -> u64 {
        let alone = match self.held {
            HeldBlocks::Alone(blocks) => blocks,
            HeldBlocks::Shared(_) => 0,
        };
        (alone + self.output.blocks as u64) * self.output.weight
    }
}

/// The meaning of a request id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NameState {
    /// A live booking in this slot.
    Live(u32),
    /// An ended booking, remembered so that a repeated report is recognized.
    Ended {
        /// The attempt that ended.
        attempt: u32,
    },
}

/// No slot.
const NO_SLOT: u32 = u32::MAX;

/// The links of a live booking in the lists that contain it. They lie beside the bookings, so that a list operation
/// touches no booking.
#[derive(Clone, Copy, Debug)]
struct Links {
    /// The slots of the live bookings of its stripe that were made just before and just after it. Of a free slot, the next
    /// free one is in place of the older.
    older: u32,
    younger: u32,
    /// Its place in its session's list.
    session_place: u32,
    /// Blocks of its prompt that are in the tree.
    prompt_blocks: u32,
    /// The slot of its user.
    user: Option<UserSlot>,
}

/// The names and slots of every [`BOOKING_STRIPES`]th session, on lines of their own. A session's bookings are mostly made
/// and ended by one serving thread. What they alone change then stays in its processor's cache.
#[derive(Debug)]
#[repr(align(128))]
struct Stripe {
    /// The last slot that one of these sessions freed. The others follow by [`Links::older`].
    free: u32,
    /// The slots of live bookings.
    by_name: HashTable<u32>,
    /// The ends of the list of live bookings, in order of their creation.
    oldest: u32,
    youngest: u32,
}

/// Free slots that a stripe without any takes from another one.
const SLOTS_TAKEN: usize = 16;

/// The number of the stripe of a session.
pub(super) const fn stripe_of(session: SessionId) -> usize {
    session.0 as usize % BOOKING_STRIPES
}

/// Bookings by slot and by name. Slots are reused, generations are not.
#[derive(Debug)]
pub(super) struct Bookings {
    slots: Vec<Option<Booking>>,
    /// By slot.
    links: Vec<Links>,
    stripes: Box<[Stripe; BOOKING_STRIPES]>,
    ended: EndedNames,
    live: usize,
    generations: u64,
    /// Generations that earlier runs may have given out to bookings that this run does not know, in ascending order.
    lost: Vec<RangeInclusive<u64>>,
}

impl Default for Stripe {
    fn default() -> Self {
        Self { free: NO_SLOT, by_name: HashTable::new(), oldest: NO_SLOT, youngest: NO_SLOT }
    }
}

impl Default for Bookings {
    fn default() -> Self {
        Self {
            slots: Vec::new(),
            links: Vec::new(),
            stripes: Box::new(std::array::from_fn(|_| Stripe::default())),
            ended: EndedNames::default(),
            live: 0,
            generations: 0,
            lost: Vec::new(),
        }
    }
}

impl Bookings {
    pub(super) const fn live(&self) -> usize {
        self.live
    }

    /// Slots ever used; all live bookings are below.
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

    /// The slot of the live booking of this name.
    pub(super) fn live_named(&self, name: Name) -> Option<u32> {
        let is_named = |slot: &u32| self.get(*slot).is_some_and(|booking| booking.name == name);
        self.stripes[stripe_of(name.session)].by_name.find(name.hash(), is_named).copied()
    }

    /// The highest generation so far.
    pub(super) const fn generations(&self) -> u64 {
        self.generations
    }

    /// Stores `booking`, whose name no live booking has, gives it a generation, and links it into its session's list.
    /// Returns slot and generation.
    #[inline]
    pub(super) fn insert(
        &mut self,
        mut booking: Booking,
        (session_place, prompt_blocks): (u32, u32),
        user: Option<UserSlot>,
    ) -> (u32, u64) {
        self.generations += 1;
        booking.generation = self.generations;
        let stripe = stripe_of(booking.name.session);
        let older = self.stripes[stripe].youngest;
        let links = Links { older, younger: NO_SLOT, session_place, prompt_blocks, user };
        let slot = self.take_free(stripe).unwrap_or_else(|| {
            self.slots.push(None);
            self.links.push(links);
            (self.slots.len() - 1) as u32
        });
        self.put(slot, booking, links);
        (slot, self.generations)
    }

    /// Takes a free slot, of this stripe if it has one; `None` if all slots are in use.
    fn take_free(&mut self, stripe: usize) -> Option<u32> {
        if self.stripes[stripe].free == NO_SLOT {
            // A few at once: neighbours share lines.
            let other = self.stripes.iter().position(|other| other.free != NO_SLOT)?;
            let first = self.stripes[other].free;
            let next = |slot: &u32| Some(self.links[*slot as usize].older).filter(|next| *next != NO_SLOT);
            let last = std::iter::successors(Some(first), next).take(SLOTS_TAKEN).last().unwrap_or(first);
            self.stripes[other].free = std::mem::replace(&mut self.links[last as usize].older, NO_SLOT);
            self.stripes[stripe].free = first;
        }
        let slot = self.stripes[stripe].free;
        self.stripes[stripe].free = self.links[slot as usize].older;
        Some(slot)
    }

    /// Adds a slot to the free ones of a stripe.
    fn give_free(&mut self, stripe: usize, slot: u32) {
        self.links[slot as usize].older = std::mem::replace(&mut self.stripes[stripe].free, slot);
    }

    /// Stores a booking of an earlier run in its slot, which is free, under its generation, which is the highest so far.
    /// Call [`Bookings::continue_from`] after the last one.
    pub(super) fn insert_at(&mut self, slot: u32, booking: Booking, session_place: u32, user: Option<UserSlot>) {
        self.generations = booking.generation;
        let older = self.stripes[stripe_of(booking.name.session)].youngest;
        let links = Links { older, younger: NO_SLOT, session_place, prompt_blocks: 0, user };
        if slot as usize >= self.slots.len() {
            self.slots.resize_with(slot as usize + 1, || None);
            self.links.resize(slot as usize + 1, links);
        }
        self.put(slot, booking, links);
    }

    /// Continues after an earlier run, which has given out these numbers. New bookings are above `generations`.
    pub(super) fn continue_from(&mut self, numbers: &KeptNumbers, generations: u64) {
        self.generations = self.generations.max(generations);
        self.lost.clone_from(&numbers.lost);
        self.lost.push(numbers.complete_to.saturating_add(1)..=generations);
        if self.lost.len() > KEPT_LOST_RANGES_MAX {
            // What lay between the two oldest has ended long ago. It is unknown from now on.
            let first = self.lost.remove(0);
            self.lost[0] = *first.start()..=*self.lost[0].end();
        }
        self.stripes.iter_mut().for_each(|stripe| stripe.free = NO_SLOT);
        // From the end, so that the lowest is given out first. Other stripes take their slots from this one.
        for slot in (0..self.slots.len() as u32).rev() {
            if self.slots[slot as usize].is_none() {
                self.give_free(0, slot);
            }
        }
    }

    /// Whether an earlier run may have given out a generation to a booking that this run does not know.
    pub(super) fn may_be_lost(&self, generation: u64) -> bool {
        self.lost.iter().any(|range| range.contains(&generation))
    }

    /// All such generations.
    pub(super) fn lost(&self) -> &[RangeInclusive<u64>] {
        &self.lost
    }

    /// Stores a booking in a free slot, as the youngest.
    fn put(&mut self, slot: u32, booking: Booking, links: Links) {
        let (hash, stripe) = (booking.name.hash(), &mut self.stripes[stripe_of(booking.name.session)]);
        self.slots[slot as usize] = Some(booking);
        self.live += 1;
        self.links[slot as usize] = links;
        match self.links.get_mut(links.older as usize) {
            Some(older) => older.younger = slot,
            None => stripe.oldest = slot,
        }
        stripe.youngest = slot;
        let slots = &self.slots;
        let of_slot = |slot: &u32| slots[*slot as usize].as_ref().map_or(0, |booking| booking.name.hash());
        stripe.by_name.insert_unique(hash, slot, of_slot);
    }

    /// Ends the booking in `slot` and remembers its name.
    #[inline]
    pub(super) fn end(&mut self, slot: u32) -> Option<Booking> {
        let booking = self.slots.get_mut(slot as usize)?.take()?;
        self.live -= 1;
        let stripe = stripe_of(booking.name.session);
        self.unlink(slot, stripe);
        self.give_free(stripe, slot);
        let by_name = &mut self.stripes[stripe].by_name;
        if let Ok(entry) = by_name.find_entry(booking.name.hash(), |other| *other == slot) {
            entry.remove();
        }
        self.ended.add(booking.name, booking.attempt);
        Some(booking)
    }

    /// Removes an ended booking from the list by age of its stripe.
    fn unlink(&mut self, slot: u32, stripe: usize) {
        let Links { older, younger, .. } = self.links[slot as usize];
        match self.links.get_mut(older as usize) {
            Some(links) => links.younger = younger,
            None => self.stripes[stripe].oldest = younger,
        }
        match self.links.get_mut(younger as usize) {
            Some(links) => links.older = older,
            None => self.stripes[stripe].youngest = older,
        }
    }

    /// The place in its session's list of the booking that is or was in `slot`.
    pub(super) fn session_place(&self, slot: u32) -> u32 {
        self.links[slot as usize].session_place
    }

    /// The user of the booking that is or was in `slot`, and its blocks in the tree.
    pub(super) fn user_and_blocks_of(&self, slot: u32) -> (Option<UserSlot>, u32) {
        (self.links[slot as usize].user, self.links[slot as usize].prompt_blocks)
    }

    /// Notes that the blocks of the booking in `slot` have left the tree. Returns how many they were.
    pub(super) fn take_prompt_blocks(&mut self, slot: u32) -> u32 {
        std::mem::take(&mut self.links[slot as usize].prompt_blocks)
    }

    /// Notes that the blocks of the booking in `slot` are in the tree.
    pub(super) fn set_prompt_blocks(&mut self, slot: u32, blocks: u32) {
        self.links[slot as usize].prompt_blocks = blocks;
    }

    /// Changes the place of a booking in its session's list.
    pub(super) fn move_in_session(&mut self, slot: u32, place: u32) {
        self.links[slot as usize].session_place = place;
    }

    /// The slot of the oldest booking, if it is older than `age_ns`.
    pub(super) fn oldest_beyond(&self, now_ns: u64, age_ns: u64) -> Option<u32> {
        let oldest = self.stripes.iter().filter_map(|stripe| Some((stripe.oldest, self.get(stripe.oldest)?)));
        let (slot, booking) = oldest.min_by_key(|(_, booking)| booking.generation)?;
        (now_ns.saturating_sub(booking.booked_at_ns) >= age_ns).then_some(slot)
    }
}

/// A gateway's name of a request: its session, and a 128-bit hash of the request id with a secret. Nothing needs the
/// text again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name {
    session: SessionId,
    text: [u64; 2],
}

impl Name {
    /// `secret` must be unknown to those who choose request ids.
    pub(super) fn new(secret: u64, session: SessionId, request_id: &str) -> Self {
        Self::of_bytes(secret, session, request_id.as_bytes())
    }

    /// The name of the prefill half of a request; `None` if that is too long.
    pub(super) fn of_prefill_half(secret: u64, session: SessionId, request_id: &str) -> Option<Self> {
        let mut text = [0; BOOKING_NAME_BYTES_MAX];
        let (id, len) = (request_id.as_bytes(), request_id.len() + PREFILL_BOOKING_SUFFIX.len());
        text.get_mut(..id.len())?.copy_from_slice(id);
        text.get_mut(id.len()..len)?.copy_from_slice(PREFILL_BOOKING_SUFFIX.as_bytes());
        Some(Self::of_bytes(secret, session, &text[..len]))
    }

    fn of_bytes(secret: u64, session: SessionId, text: &[u8]) -> Self {
        let hash = xxh3_128_with_seed(text, secret);
        Self { session, text: [hash as u64, (hash >> 64) as u64] }
    }

    /// A name by the hash of its text, from [`Name::text`].
    pub(super) const fn kept(session: SessionId, text: [u64; 2]) -> Self {
        Self { session, text }
    }

    /// The hash of its text.
    pub(super) const fn text(&self) -> [u64; 2] {
        self.text
    }

    /// The session of the name.
    pub(super) const fn session(&self) -> SessionId {
        self.session
    }

    /// The hash for hash tables.
    pub(super) const fn hash(&self) -> u64 {
        self.text[0] ^ (self.session.0 as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

/// A remembered name, by its hash alone: a collision among so few is not to be expected.
#[derive(Clone, Copy, Debug, Default)]
struct Remembered {
    hash: u64,
    attempt: u32,
    /// The previously ended booking in the same list.
    before: u32,
}

/// The names of the last [`EndedNames::LAST`] ended bookings with their attempts, in order of their end. Names with
/// equal low hash bits form a list, the last one first.
///
/// The end of a booking writes to the end of a ring and to one of a few list heads, which stay in the cache. A hash
/// table of as many names would wait for memory at every end, although few reports ask for an ended name.
#[derive(Debug)]
pub(super) struct EndedNames {
    /// The ended booking number `n` is at `n % LAST`.
    row: Box<[Remembered]>,
    /// The last ended booking of each list.
    last: Box<[u32]>,
    /// The number of the next booking to end. It wraps.
    next: u32,
}

impl Default for EndedNames {
    fn default() -> Self {
        // Allocated at once, so that no end of a booking waits for it; the kernel maps memory as it is touched.
        let (row, last) = (vec![Remembered::default(); Self::LAST as usize], vec![0; Self::LISTS]);
        Self { row: row.into(), last: last.into(), next: 0 }
    }
}

impl EndedNames {
    /// Remembered names.
    pub(super) const LAST: u32 = 1 << 16;
    /// Lists; each holds a few names on average.
    const LISTS: usize = Self::LAST as usize / 4;

    /// Remembers the end of a booking.
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
        // A link may lead to a forgotten name. Along a list, ages only grow.
        while age < self.age(at) && self.age(at) <= Self::LAST {
            let remembered = self.row[place(at)];
            if remembered.hash == hash {
                return Some(remembered.attempt);
            }
            (at, age) = (remembered.before, self.age(at));
        }
        None
    }

    /// Bookings that have ended since this one, itself included.
    const fn age(&self, number: u32) -> u32 {
        self.next.wrapping_sub(number)
    }
}

/// The place of a booking in the ring.
const fn place(number: u32) -> usize {
    (number % EndedNames::LAST) as usize
}

/// The list of a name.
const fn list(hash: u64) -> usize {
    hash as usize % EndedNames::LISTS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::NAME_BYTES_MAX;

    #[test]
    fn names_are_told_apart_by_session_and_text() {
        let name = |session, text| Name::new(7, SessionId(session), text);
        assert_eq!(name(1, "a"), name(1, "a"));
        assert_ne!(name(1, "a"), name(2, "a"));
        assert_ne!(name(1, "a"), name(1, "b"));
        assert_ne!(name(1, "a").hash(), name(2, "a").hash());
        assert_ne!(name(1, "a"), Name::new(8, SessionId(1), "a"), "the secret counts");
        assert_eq!(Name::of_prefill_half(7, SessionId(1), "a"), Some(name(1, "a/prefill")));
        let longest = "a".repeat(NAME_BYTES_MAX);
        assert_eq!(Name::of_prefill_half(7, SessionId(1), &longest), Some(name(1, &format!("{longest}/prefill"))));
        assert_eq!(Name::of_prefill_half(7, SessionId(1), &format!("{longest}a")), None, "it is too long");
    }

    fn booking(session: u32, text: &str, booked_at_ns: u64) -> Booking {
        Booking {
            generation: 0,
            name: Name::new(7, SessionId(session), text),
            attempt: 0,
            worker: WorkerIndex(0),
            prefill: None,
            space: SpaceId(0),
            prompt_tokens: [0; 2],
            held: HeldBlocks::Alone(0),
            output: Output::new(0, 0),
            prefilling: true,
            first_token_at_ns: 0,
            is_recorded: false,
            is_traced: false,
            began_alone: false,
            prefilled_us: 0,
            is_prefill_half: false,
            booked_at_ns,
        }
    }

    #[test]
    fn slots_that_one_session_frees_are_taken_by_others_before_there_are_more() {
        const EACH: u32 = 50;
        let mut bookings = Bookings::default();
        for session in 0..2 * BOOKING_STRIPES as u32 {
            let slots: Vec<u32> = (0..EACH)
                .map(|at| bookings.insert(booking(session, &at.to_string(), u64::from(session)), (0, 0), None).0)
                .collect();
            let distinct: std::collections::BTreeSet<&u32> = slots.iter().collect();
            assert_eq!((bookings.live(), bookings.slots(), distinct.len()), (50, 50, 50));
            let name = Name::new(7, SessionId(session), "49");
            assert_eq!(bookings.live_named(name), slots.last().copied());
            for slot in slots {
                assert!(bookings.end(slot).is_some() && bookings.end(slot).is_none());
            }
            assert_eq!((bookings.live(), bookings.live_named(name)), (0, None));
        }
    }

    #[test]
    fn the_oldest_booking_of_all_sessions_is_found() {
        let mut bookings = Bookings::default();
        let mut slots: Vec<u32> = (0..20_u32)
            .map(|at| bookings.insert(booking(at % 7, &at.to_string(), u64::from(at)), (0, 0), None).0)
            .collect();
        // The middle one ends early.
        bookings.end(slots.remove(10));
        for slot in slots {
            assert_eq!(bookings.oldest_beyond(100, 101), None, "too young");
            assert_eq!(bookings.oldest_beyond(100, 1), Some(slot));
            bookings.end(slot);
        }
        assert_eq!(bookings.oldest_beyond(100, 1), None);
    }

    #[test]
    fn a_bounded_number_of_names_is_remembered_with_the_last_attempt() {
        let name = |at: u32| Name::new(7, SessionId(1), &at.to_string());
        // The second run starts just before the numbers wrap.
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
