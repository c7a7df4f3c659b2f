//! Well-behaved gateways: they compare every reply with the engines' caches, and end every booking.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use kvrouted::client::{Client, ClientOptions};
use kvrouted::error::Kind;
use kvrouted::ids::{TierBlocks, Worker};
use kvrouted::load::{BookingHandle, BookingOutcome, BookingRef, SessionToken};
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use kvrouted::trust::{Trust, TrustLevel};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::engine::{BLOCKS, CONVERSATIONS, Engine, Prompts};
use crate::kit::WAIT_MAX;
use crate::kit::engine::BLOCK_SIZE;

/// Wrong replies that are kept word for word.
const WRONG_SHOWN_MAX: usize = 20;
/// Bookings a gateway has at once.
const BOOKINGS_AT_ONCE: usize = 12;
/// A booking held for longer may have ended by its age; nothing is concluded from what becomes of it.
pub(crate) const HELD_MAX: Duration = Duration::from_secs(5);
/// Between two questions.
const QUESTION_EVERY: Duration = Duration::from_millis(2);

/// What there is to be known, and what was found.
pub(crate) struct Truth {
    pub(crate) prompts: Arc<Prompts>,
    /// Worker 1 is the first of them.
    pub(crate) engines: Vec<Engine>,
    pub(crate) tally: Mutex<Tally>,
}

/// What all gateways have seen.
#[derive(Debug)]
pub(crate) struct Tally {
    pub(crate) replies: u64,
    /// What was said of one worker's cache in one reply.
    pub(crate) overlaps: u64,
    pub(crate) exact: u64,
    pub(crate) over_counts: u64,
    pub(crate) wrong: u64,
    pub(crate) wrong_shown: Vec<String>,
    pub(crate) bookings: u64,
    /// Requests that waited for a worker and were refused for a reason that they may be refused for.
    pub(crate) waits_refused: u64,
    pub(crate) round_trip_us: Histogram<u64>,
}

impl Default for Tally {
    fn default() -> Self {
        let round_trip_us = Histogram::new_with_bounds(1, 600_000_000, 3).expect("ten minutes, three digits");
        Self {
            replies: 0,
            overlaps: 0,
            exact: 0,
            over_counts: 0,
            wrong: 0,
            wrong_shown: Vec::new(),
            bookings: 0,
            waits_refused: 0,
            round_trip_us,
        }
    }
}

impl Truth {
    pub(crate) fn wrong(&self, what: String) {
        let mut tally = self.tally.lock().unwrap();
        tally.wrong += 1;
        if tally.wrong_shown.len() < WRONG_SHOWN_MAX {
            tally.wrong_shown.push(what);
        }
    }

    fn replied(&self, since: Instant) {
        let mut tally = self.tally.lock().unwrap();
        tally.replies += 1;
        tally.round_trip_us.saturating_record(since.elapsed().as_micros() as u64);
    }

    /// Holds what was said of a worker against what it held at some time between what was `heard` of it before and what
    /// it has published by now.
    fn check(
        &self,
        (conversation, blocks): (usize, u32),
        (worker, overlap, trust): (Worker, TierBlocks, Trust),
        heard: Option<u64>,
    ) {
        let engine = &self.engines[worker.id.0 as usize - 1];
        // What is said of the batch may be one ahead of the blocks.
        let first = heard.and_then(|seq| seq.checked_sub(1));
        let (fewest, most) = engine.depths(conversation, first, engine.published());
        let (fewest, most, said) = (fewest.min(blocks), most.min(blocks), overlap.device);
        let is_exact = trust.level == TrustLevel::Exact;
        {
            let mut tally = self.tally.lock().unwrap();
            tally.overlaps += 1;
            tally.exact += u64::from(is_exact);
            tally.over_counts += u64::from(said > most);
        }
        let beside = overlap.host + overlap.disk + overlap.external;
        if said > most || beside > 0 || (is_exact && said < fewest) {
            self.wrong(format!(
                "worker {worker}: {said} of {blocks} blocks of conversation {conversation}, held {fewest} to {most} \
                 since {first:?}: {trust:?}"
            ));
        }
    }
}

/// One of the gateways.
pub(crate) struct Gateway<'a> {
    truth: &'a Truth,
    client: Client,
    /// By worker: the last batch it was said of.
    heard: Vec<Option<u64>>,
    random: Xoshiro256PlusPlus,
    held: VecDeque<(BookingHandle, Instant)>,
    asked: u64,
}

impl<'a> Gateway<'a> {
    pub(crate) fn new(truth: &'a Truth, socket: &Path, seed: u64) -> Self {
        let session = Some(SessionToken { hi: seed, lo: 1 });
        let options = ClientOptions {
            name: format!("gateway-{seed}"),
            session,
            timeout: Some(WAIT_MAX),
            ..ClientOptions::default()
        };
        let client = Client::connect(socket, &options).expect("a connection");
        let (heard, random) = (vec![None; truth.engines.len()], Xoshiro256PlusPlus::seed_from_u64(seed));
        Self { truth, client, heard, random, held: VecDeque::new(), asked: 0 }
    }

    pub(crate) fn run(mut self, stop: &AtomicBool) {
        // Relaxed: it is only to end some time.
        while !stop.load(Ordering::Relaxed) {
            let conversation = self.random.random_range(0..CONVERSATIONS);
            let tokens = self.random.random_range(1..=BLOCKS * BLOCK_SIZE as usize);
            match self.random.random_range(0..8) {
                0 => self.ask_overlap(conversation, tokens),
                1..=4 => drop(self.route(conversation, tokens, None)),
                _ => self.book(conversation, tokens),
            }
            if self.held.len() > BOOKINGS_AT_ONCE {
                self.end_oldest();
            }
            std::thread::sleep(QUESTION_EVERY);
        }
        while !self.held.is_empty() {
            self.end_oldest();
        }
    }

    /// Does nothing but wait for workers that others keep busy.
    pub(crate) fn run_patiently(mut self, stop: &AtomicBool) {
        while !stop.load(Ordering::Relaxed) {
            self.wait_for_a_worker();
            std::thread::sleep(QUESTION_EVERY);
        }
    }

    /// Every conversation, once nothing changes any more: it has to be exactly what the engines hold.
    pub(crate) fn ask_all_at_rest(mut self, last: &[u64]) {
        for (heard, last) in self.heard.iter_mut().zip(last) {
            *heard = Some(*last + 1);
        }
        for conversation in 0..CONVERSATIONS {
            self.ask_overlap(conversation, BLOCKS * BLOCK_SIZE as usize);
            self.route(conversation, BLOCKS * BLOCK_SIZE as usize, None);
        }
    }

    fn book(&mut self, conversation: usize, tokens: usize) {
        let name = format!("request-{}", self.asked);
        if let Some(handle) = self.route(conversation, tokens, Some(&name)) {
            self.truth.tally.lock().unwrap().bookings += 1;
            self.held.push_back((handle, Instant::now()));
        }
    }

    fn route(&mut self, conversation: usize, tokens: usize, book: Option<&str>) -> Option<BookingHandle> {
        self.asked += 1;
        let (truth, prompts) = (self.truth, Arc::clone(&self.truth.prompts));
        let prompt = prompts.tokens(conversation, tokens);
        let space = self.client.space("m", None).expect("the space").id;
        let book = book.map(|request_id| BookingRequest { request_id, attempt: 0 });
        let (heard, since) = (self.heard.clone(), Instant::now());
        let reply =
            match self.client.route(&RouteRequest { book, ..RouteRequest::new(space, Prompt::of_tokens(prompt)) }) {
                Ok(reply) => reply,
                Err(error) => {
                    truth.wrong(format!("a route is refused: {error}"));
                    return None;
                }
            };
        truth.replied(since);
        let is_whole = reply.candidates.len() == truth.engines.len() && reply.booking.is_some() == book.is_some();
        let is_ordered = reply.candidates[1..].is_sorted_by(|a, b| a.cost <= b.cost);
        if !is_whole || !is_ordered {
            truth.wrong(format!("a reply that lists {} and books {:?}", reply.candidates.len(), reply.booking));
        }
        for one in &reply.candidates {
            self.check((conversation, tokens), (one.worker, one.overlap, one.trust), &heard);
        }
        reply.booking
    }

    fn ask_overlap(&mut self, conversation: usize, tokens: usize) {
        let prompts = Arc::clone(&self.truth.prompts);
        let prompt = prompts.tokens(conversation, tokens);
        let space = self.client.space("m", None).expect("the space").id;
        let (heard, since) = (self.heard.clone(), Instant::now());
        match self.client.overlap(&RouteRequest::new(space, Prompt::of_tokens(prompt))) {
            Ok(reply) => {
                self.truth.replied(since);
                for one in &reply.workers {
                    self.check((conversation, tokens), (one.worker, one.overlap, one.trust), &heard);
                }
            }
            Err(error) => self.truth.wrong(format!("an overlap is refused: {error}")),
        }
    }

    fn check(
        &mut self,
        (conversation, tokens): (usize, usize),
        said: (Worker, TierBlocks, Trust),
        heard: &[Option<u64>],
    ) {
        let worker = said.0.id.0 as usize - 1;
        let blocks = tokens as u32 / BLOCK_SIZE;
        self.truth.check((conversation, blocks), said, heard[worker]);
        self.heard[worker] = self.heard[worker].max(said.2.as_of_seq.map(|seq| seq.0));
    }

    /// One of a space whose workers are few, and kept busy by others.
    fn wait_for_a_worker(&mut self) {
        let space = self.client.space("q", None).expect("the space").id;
        let name = format!("waiting-{}", self.asked);
        self.asked += 1;
        let book = Some(BookingRequest { request_id: &name, attempt: 0 });
        let prompt = [7; 256];
        match self.client.route(&RouteRequest { book, ..RouteRequest::new(space, Prompt::of_tokens(&prompt)) }) {
            Ok(reply) => match reply.booking {
                Some(handle) => {
                    self.held.push_front((handle, Instant::now()));
                    // Others wait for it.
                    self.end_oldest();
                }
                None => self.truth.wrong("who waited is booked nowhere".to_owned()),
            },
            Err(error) if matches!(error.kind(), Kind::DeadlinePassed | Kind::QueueFull) => {
                self.truth.tally.lock().unwrap().waits_refused += 1;
            }
            Err(error) => self.truth.wrong(format!("a wait ends by {error}")),
        }
    }

    fn end_oldest(&mut self) {
        let Some((handle, since)) = self.held.pop_front() else { return };
        let booking = BookingRef::Handle(handle);
        let told = [
            self.client.prefill_complete(&booking),
            self.client.output_progress(&booking, 40),
            self.client.free(&booking),
        ];
        for (at, outcome) in told.into_iter().enumerate() {
            match outcome {
                Ok(BookingOutcome::Applied) => {}
                // Nothing was to be computed, or its time was reckoned to be over.
                Ok(BookingOutcome::AlreadyApplied) if at == 0 => {}
                Ok(_) if since.elapsed() > HELD_MAX => {}
                other => self.truth.wrong(format!("report {at} of a booking of {:?}: {other:?}", since.elapsed())),
            }
        }
        // Once more is no surprise.
        if !matches!(self.client.free(&booking), Ok(BookingOutcome::AlreadyApplied)) && since.elapsed() < HELD_MAX {
            self.truth.wrong("a second free is not seen as one".to_owned());
        }
    }
}
