//! From the entries of journal files to a load: the requests of one space, its workers and its policy.

use std::collections::VecDeque;

use hashbrown::HashMap;

use super::cache_size::ReuseProbe;
use super::prefixes::{Prefix, Prefixes};
use super::{Booked, Losses, RecordedLoad, RecordedRequest, RecordedWorker};
use crate::ids::{SpaceId, Worker, WorkerIndex};
use crate::journal::{DecisionRecord, JournalEntry, Origin};
use crate::limits::WORKERS_MAX;
use crate::load::{EndReason, EndedBooking};
use crate::protocol::{Overrides, PoolRole, WorkerState};
use crate::route::{Policy, WorkerFacts};
use crate::trust::TrustLevel;

/// What a load may hold, so that a journal of any size takes bounded memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadBounds {
    /// Requests; the newest are taken.
    pub requests_max: usize,
    /// Tokens of their prompts.
    pub tokens_max: u64,
    /// Different prefixes of their prompts.
    pub prefixes_max: usize,
}

impl LoadBounds {
    /// Bounds for a number of requests. A run of 2²⁸ tokens takes seconds to tens of seconds, and at most one byte of memory
    /// for each token.
    #[must_use]
    pub const fn of(requests_max: usize) -> Self {
        Self { requests_max, tokens_max: 1 << 28, prefixes_max: 1 << 22 }
    }
}

/// A daemon that has run for longer than this has a broken clock, nanoseconds: ten years.
const RUN_NS_MAX: u64 = 10 * 365 * 86_400 * 1_000_000_000;
/// A load spans at most this, nanoseconds: a year. Of a journal that spans more, a clock was broken.
const SPAN_NS_MAX: u64 = 366 * 86_400 * 1_000_000_000;
/// No request waits longer in the daemon's queue, nanoseconds: a day.
const WAITED_NS_MAX: u64 = 86_400 * 1_000_000_000;
/// Different policies that a load counts.
const POLICIES_MAX: usize = 64;
/// Ends that came before their decision and wait for it.
const EARLY_ENDS_MAX: usize = 1 << 16;
/// Indexes of workers, over all runs of the daemon.
const INDEXES_MAX: usize = 4 * WORKERS_MAX;

/// Whether a decision stands for a request: it chose a worker and booked it.
fn is_request(record: &DecisionRecord) -> bool {
    record.booked && record.outcome.chosen().is_some() && record.at_ns <= RUN_NS_MAX
}

/// First reading: which requests of which space the bounds leave.
#[derive(Debug, Default)]
pub struct LoadSurvey {
    spaces: HashMap<SpaceId, SpaceSurvey>,
    /// Decisions that booked no worker.
    unbooked: u64,
}

#[derive(Debug, Default)]
struct SpaceSurvey {
    requests: u64,
    /// The tokens of the newest requests, and their sum.
    newest: VecDeque<u32>,
    tokens: u64,
}

/// Which requests to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadChoice {
    space: SpaceId,
    /// Requests of the space before the first that is taken.
    skipped: u64,
}

impl LoadSurvey {
    /// Notes a decision. Each request of a sample runs several times, so that fewer of them fit the bounds.
    pub fn add(&mut self, bounds: &LoadBounds, origin: &Origin, record: &DecisionRecord) {
        if !is_request(record) {
            self.unbooked += 1;
            return;
        }
        let of_space = self.spaces.entry(record.space).or_default();
        let tokens = prompt_tokens(record);
        of_space.newest.push_back(tokens);
        (of_space.requests, of_space.tokens) = (of_space.requests + 1, of_space.tokens + u64::from(tokens));
        let within = |bound: f64| (bound * sample_of(origin)).max(1.0) as u64;
        while of_space.newest.len() as u64 > within(bounds.requests_max as f64)
            || (of_space.tokens > within(bounds.tokens_max as f64) && of_space.newest.len() > 1)
        {
            of_space.tokens -= u64::from(of_space.newest.pop_front().unwrap_or(0));
        }
    }

    /// The newest requests of a space, by default of the one with the most.
    ///
    /// # Errors
    /// A sentence: there are none.
    pub fn choose(&self, space: Option<SpaceId>) -> Result<LoadChoice, String> {
        let most = || self.spaces.iter().max_by_key(|(space, of)| (of.requests, std::cmp::Reverse(space.0)));
        let chosen = match space {
            Some(space) => self.spaces.get_key_value(&space),
            None => most(),
        };
        let Some((space, of)) = chosen else {
            return Err(match self.unbooked {
                0 => "the journal has no decisions".into(),
                _ => "no decision of the journal booked its worker, so the load of the fleet is not known; gateways must \
                      book the requests that they route"
                    .into(),
            });
        };
        Ok(LoadChoice { space: *space, skipped: of.requests - of.newest.len() as u64 })
    }
}

/// The share of the requests that a run recorded. A share below one in a thousand tells too little of the others.
fn sample_of(origin: &Origin) -> f64 {
    if origin.sample > 0.0 && origin.sample <= 1.0 { origin.sample.max(1e-3) } else { 1.0 }
}

fn prompt_tokens(record: &DecisionRecord) -> u32 {
    // The reader refuses longer prompts than a u32 holds.
    record.observation.request.prompt_tokens.max(1).try_into().unwrap_or(u32::MAX)
}

/// A booking of a run of the daemon.
type BookingName = (u64, u64);

/// Second reading: takes the chosen requests.
#[derive(Debug)]
pub struct LoadReader {
    choice: LoadChoice,
    seen: u64,
    load: RecordedLoad,
    probe: ReuseProbe,
    /// The place of each request whose end has not come.
    open: HashMap<BookingName, usize>,
    early_ends: HashMap<BookingName, EndedBooking>,
    policies: Vec<(Policy, u64)>,
    places: HashMap<Worker, usize>,
    /// Places by the daemon's own index, within its run.
    indexes: HashMap<(u64, WorkerIndex), usize>,
}

impl LoadReader {
    /// A reader that takes what was chosen.
    #[must_use]
    pub fn new(choice: LoadChoice, bounds: &LoadBounds) -> Self {
        let load = RecordedLoad { prefixes: Prefixes::new(bounds.prefixes_max), ..RecordedLoad::default() };
        Self {
            choice,
            seen: 0,
            load,
            probe: ReuseProbe::default(),
            open: HashMap::default(),
            early_ends: HashMap::default(),
            policies: Vec::new(),
            places: HashMap::default(),
            indexes: HashMap::default(),
        }
    }

    /// Takes an entry of a file; a decision is in `record`.
    pub fn take(&mut self, origin: &Origin, entry: JournalEntry, record: &DecisionRecord) {
        match entry {
            JournalEntry::Decision { .. } if record.space == self.choice.space => self.decision(origin, record),
            JournalEntry::Decision { .. } | JournalEntry::End(_) => {}
            JournalEntry::Gap { lost, .. } => {
                self.load.losses.decisions = self.load.losses.decisions.saturating_add(lost)
            }
            JournalEntry::EndsLost { lost } => self.load.losses.ends = self.load.losses.ends.saturating_add(lost),
            JournalEntry::Ended(ended) => self.ended(origin, ended),
        }
    }

    fn decision(&mut self, origin: &Origin, record: &DecisionRecord) {
        if !is_request(record) {
            return;
        }
        self.seen += 1;
        if self.seen <= self.choice.skipped {
            return;
        }
        let workers = self.note_workers(origin, record);
        let Some(chosen) = record.outcome.chosen() else { return };
        let Some((worker, facts)) = workers.iter().find(|(_, facts)| facts.index == chosen) else { return };
        self.note_policy(record);
        self.note_sample(origin);
        let request = self.request(origin, record, *worker, facts);
        let held = |worker: usize| {
            let of_worker = workers.iter().find(|(place, _)| *place == worker)?;
            let is_known = of_worker.1.trust.level == TrustLevel::Exact;
            is_known.then(|| of_worker.1.overlap.device.saturating_mul(record.observation.request.block_size))
        };
        self.probe.prompt(&self.load.prefixes, (request.prefix, self.load.prefix_tokens), *worker, held);
        self.probe.take(*worker, f64::from(request.prompt_tokens.saturating_sub(request.held_tokens)));
        let place = self.load.requests.len();
        self.load.requests.push(request);
        if let Some(booking) = record.identity.booking {
            let name = (origin.instance_id, booking);
            match self.early_ends.remove(&name) {
                Some(ended) => self.end(origin, place, ended),
                None => drop(self.open.insert(name, place)),
            }
        }
    }

    fn request(
        &mut self,
        origin: &Origin,
        record: &DecisionRecord,
        worker: usize,
        facts: &WorkerFacts,
    ) -> RecordedRequest {
        let (asked, identity) = (&record.observation.request, &record.identity);
        let prompt_tokens = prompt_tokens(record);
        let begun_ns = origin.started_unix_ms.saturating_mul(1_000_000);
        let block_size = u64::from(asked.block_size);
        if self.load.block_size == 0 {
            self.load.block_size = asked.block_size;
        }
        if self.load.prefix_tokens == 0 {
            self.load.prefix_tokens = identity.prefix_tokens;
        }
        let is_known = identity.prefix_tokens > 0 && identity.prefix_tokens == self.load.prefix_tokens;
        // A prompt's identities end with the prompt, whatever a file says.
        let within =
            (prompt_tokens.checked_div(identity.prefix_tokens).unwrap_or(0) as usize).min(identity.prefix.len());
        let prefix = if is_known { self.load.prefixes.insert(&identity.prefix[..within]) } else { Prefix::EMPTY };
        let losses = &mut self.load.losses;
        losses.without_prefix += u64::from(!is_known);
        losses.constrained += u64::from(asked.pin.is_some() || asked.overrides != Overrides::NONE);
        losses.pairs += u64::from(asked.role != PoolRole::Both);
        losses.queued += u64::from(identity.waited_ns > 0);
        let held_tokens = (u64::from(facts.overlap.total()) * block_size).min(u64::from(prompt_tokens));
        RecordedRequest {
            session: identity.session.map(|session| (origin.instance_id, session)),
            arrived_ns: begun_ns.saturating_add(record.at_ns).saturating_sub(identity.waited_ns.min(WAITED_NS_MAX)),
            booked_ns: begun_ns.saturating_add(record.at_ns),
            prompt_tokens,
            prefix,
            expected_output_tokens: identity.expected_output_tokens,
            worker,
            held_tokens: held_tokens as u32,
            before: Booked {
                requests: facts.load.requests as f64,
                kv_tokens: facts.load.decode_blocks as f64 * block_size as f64,
            },
            end: None,
        }
    }

    /// Notes the workers of an observation. Returns each with its place among all.
    fn note_workers(&mut self, origin: &Origin, record: &DecisionRecord) -> Vec<(usize, WorkerFacts)> {
        let block_size = u64::from(record.observation.request.block_size);
        let mut noted = Vec::with_capacity(record.observation.workers.len());
        self.load.present.clear();
        for facts in record.observation.workers.iter() {
            let known = self.places.len();
            if known >= WORKERS_MAX && !self.places.contains_key(&facts.worker) {
                continue;
            }
            let place = *self.places.entry(facts.worker).or_insert(known);
            if place == self.load.workers.len() {
                self.load.workers.push(RecordedWorker::new(facts.worker));
            }
            let worker = &mut self.load.workers[place];
            worker.capacity_tokens = facts.capacity_blocks.saturating_mul(block_size);
            worker.step_tokens_max = facts.batched_tokens_max;
            worker.believed |= facts.trust.level >= TrustLevel::LowerBound;
            if self.indexes.len() < INDEXES_MAX {
                self.indexes.insert((origin.instance_id, facts.index), place);
            }
            if matches!(facts.state, WorkerState::Ready | WorkerState::Joining) {
                self.load.present.push(place);
            }
            noted.push((place, facts));
        }
        noted
    }

    fn note_policy(&mut self, record: &DecisionRecord) {
        let policy = Policy { version: 0, ..record.policy };
        if let Some((_, decisions)) = self.policies.iter_mut().find(|(known, _)| *known == policy) {
            *decisions += 1;
        } else if self.policies.len() < POLICIES_MAX {
            self.policies.push((policy, 1));
        }
    }

    /// Of several shares the smallest counts: what the others have more is only seen once.
    fn note_sample(&mut self, origin: &Origin) {
        let sample = sample_of(origin);
        self.load.sample = if self.load.requests.is_empty() { sample } else { self.load.sample.min(sample) };
        self.load.runs.insert(origin.instance_id);
    }

    fn ended(&mut self, origin: &Origin, ended: EndedBooking) {
        let name = (origin.instance_id, ended.booking);
        match self.open.remove(&name) {
            Some(place) => self.end(origin, place, ended),
            None if self.early_ends.len() < EARLY_ENDS_MAX => drop(self.early_ends.insert(name, ended)),
            None => {}
        }
    }

    fn end(&mut self, origin: &Origin, place: usize, ended: EndedBooking) {
        let Some(request) = self.load.requests.get_mut(place) else { return };
        if let Some(worker) = self.indexes.get(&(origin.instance_id, ended.worker)) {
            request.worker = *worker;
            let class = origin.classes.get(ended.class as usize);
            self.load.workers[*worker].class = class.cloned().unwrap_or_else(|| format!("class {}", ended.class));
        }
        self.probe.take(request.worker, f64::from(ended.output_tokens));
        request.end = Some(ended);
    }

    /// The load.
    #[must_use]
    pub fn finish(mut self) -> RecordedLoad {
        let load = &mut self.load;
        let is_superseded =
            |request: &RecordedRequest| request.end.is_some_and(|end| end.reason == EndReason::Superseded);
        load.losses.superseded = load.requests.iter().filter(|request| is_superseded(request)).count() as u64;
        load.requests.retain(|request| !is_superseded(request));
        load.requests.sort_by_key(|request| request.arrived_ns);
        let last_ns = load.requests.last().map_or(0, |request| request.arrived_ns);
        load.requests.retain(|request| last_ns - request.arrived_ns <= SPAN_NS_MAX);
        if load.present.is_empty() {
            load.present = (0..load.workers.len()).collect();
        }
        load.losses.skipped = self.choice.skipped;
        load.losses.prefixes = load.prefixes.left_out();
        load.losses.endless = load.requests.iter().filter(|request| request.end.is_none()).count() as u64;
        load.policies = self.policies.len();
        let most = self.policies.iter().rev().max_by_key(|(_, decisions)| *decisions);
        load.policy = most.map_or_else(Policy::default, |(policy, _)| *policy);
        load.reuses = self.probe.reuses;
        self.load
    }
}

impl Losses {
    /// What a reader must know before it believes a simulation of the load, each as a sentence.
    #[must_use]
    pub fn remarks(&self, requests: usize) -> Vec<String> {
        let all = (requests as u64).max(1);
        let share = |count: u64| format!("{:.1} % of the requests", 100.0 * count as f64 / all as f64);
        let is_of_old_release = self.endless >= all;
        let remarks = [
            (self.skipped > 0, format!("{} older requests are left out (--requests-max of what-if and tune)", self.skipped)),
            (
                self.without_prefix > 0,
                format!(
                    "{} have no identity of their prefix ([journal] prefix_tokens is 0, or an older release wrote them): they \
                     share nothing in simulation",
                    share(self.without_prefix)
                ),
            ),
            (
                is_of_old_release,
                "no request has an end (an older release wrote the journal, or gateways do not free): times, outputs and \
                 the speed of engines are not known"
                    .into(),
            ),
            (
                !is_of_old_release && self.endless * 50 > all,
                format!("{} have no end in the journal", share(self.endless)),
            ),
            (
                self.decisions.saturating_add(self.ends) > 0,
                format!("{} decisions and {} ends were lost because too many waited", self.decisions, self.ends),
            ),
            (self.prefixes > 0, format!("{} identities of prefixes had no room", self.prefixes)),
            (
                self.constrained > 0,
                format!("{} had a pin or overrides, which are not simulated", share(self.constrained)),
            ),
            (
                self.queued * 100 > all,
                format!("{} waited in the daemon's queue, which is not simulated", share(self.queued)),
            ),
            (
                self.pairs > 0,
                format!("{} ran on a prefill and decode pair; in simulation one worker does both", share(self.pairs)),
            ),
        ];
        remarks.into_iter().filter_map(|(is_so, text)| is_so.then_some(text)).collect()
    }
}
