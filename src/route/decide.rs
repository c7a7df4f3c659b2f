//! One decision, run to completion: observe, judge, and the load to book.

use super::decision::{Decision, Scored};
use super::judge::judge;
use super::observation::Observation;
use super::read_observation::{self, ObservationBuffers, View, hashes_in_place, observe, observe_bookings};
use super::request_facts::RequestFacts;
use super::select::Draws;
use super::space_cache::SpaceCache;
use crate::error::Result;
use crate::fleet::WorkerRecord;
use crate::ids::{LocalHash, SpaceId, TierBlocks};
use crate::limits::WORKER_WORK;
use crate::load::{Demand, Loads, PromptBlocks};
use crate::protocol::{CostTerms, MatchStatus, Mode, Prompt, RouteRequest};

/// Buffers and caches that consecutive decisions share. All decisions of a scratch are about one fleet and its loads.
pub struct Scratch {
    pub(super) buffers: ObservationBuffers,
    /// The hashes of the last prompt's blocks, if they were computed or copied; those of an earlier prompt otherwise.
    hash_buffer: Vec<LocalHash>,
    /// Where the last prompt lies, and its bytes.
    prompt_at: (usize, usize),
    /// By space; at least one.
    cache: Vec<SpaceCache>,
    /// The space of the last decision.
    space: SpaceId,
}

impl Default for Scratch {
    fn default() -> Self {
        let (buffers, cache) = (ObservationBuffers::default(), vec![SpaceCache::default()]);
        Self { buffers, hash_buffer: Vec::new(), prompt_at: (0, 0), cache, space: SpaceId(0) }
    }
}

impl Scratch {
    /// Reads everything that a decision about `request` depends on.
    pub(super) fn observe(&mut self, view: &View<'_>, request: &RouteRequest<'_>) -> Result<&mut SpaceCache> {
        let (spaces, space) = (view.fleet.spaces.len(), request.space.0 as usize);
        // An unknown space is refused below; its cache is never read.
        if self.cache.len() != spaces.max(1) {
            self.cache.resize_with(spaces.max(1), SpaceCache::default);
        }
        self.space = if space < spaces { request.space } else { SpaceId(0) };
        let cache = &mut self.cache[self.space.0 as usize];
        self.prompt_at = place_of(&request.prompt);
        observe(view, request, &mut self.hash_buffer, &mut self.buffers, cache)?;
        Ok(cache)
    }

    /// As [`Scratch::observe`], for the request of the last decision, of which only bookings are read again. `None` if
    /// it is another request, or the fleet table has changed.
    fn observe_again(&mut self, view: &View<'_>, request: &RouteRequest<'_>) -> Option<&SpaceCache> {
        let Self { buffers, hash_buffer, prompt_at, cache, space } = self;
        let cache = cache.get_mut(space.0 as usize).filter(|cache| cache.is_of(view))?;
        if (request.space, place_of(&request.prompt)) != (*space, *prompt_at) {
            return None;
        }
        let is_matched = cache.observation().matched == MatchStatus::Matched;
        let locals = is_matched.then(|| hashes_in_place(&request.prompt).unwrap_or(hash_buffer));
        observe_bookings(view, request, locals, buffers, cache);
        Some(cache)
    }

    /// The cache of the space of the last decision.
    fn cache(&self) -> &SpaceCache {
        &self.cache[self.space.0 as usize]
    }

    fn cache_mut(&mut self) -> &mut SpaceCache {
        &mut self.cache[self.space.0 as usize]
    }

    /// The observation of the last decision.
    #[must_use]
    pub fn observation(&self) -> &Observation {
        self.cache().observation()
    }

    /// The facts of the last request.
    #[must_use]
    pub fn request_facts(&self) -> RequestFacts {
        self.observation().request
    }

    /// The hashes of the prompt's blocks, if the last decision could look them up; empty otherwise. `request` is the
    /// request of the last decision; of any other, nothing is known.
    #[must_use]
    pub fn locals<'a>(&'a self, request: &RouteRequest<'a>, decision: &Decision) -> &'a [LocalHash] {
        let is_of_last = place_of(&request.prompt) == self.prompt_at;
        debug_assert!(is_of_last, "`request` is not the one that was decided");
        match decision.matched {
            MatchStatus::Matched if is_of_last => hashes_in_place(&request.prompt).unwrap_or(&self.hash_buffer),
            MatchStatus::Matched | MatchStatus::Unmatchable => &[],
        }
    }

    /// The same hashes, if the prompt may share its blocks with other requests in flight; empty otherwise.
    #[must_use]
    pub fn shared_locals<'a>(&'a self, request: &RouteRequest<'a>, decision: &Decision) -> &'a [LocalHash] {
        if decision.shares_blocks { self.locals(request, decision) } else { &[] }
    }

    /// The load that a decision adds to the chosen worker, one of its candidates. `request` is the request of the last
    /// decision.
    #[must_use]
    pub fn demand<'a>(&'a self, request: &RouteRequest<'a>, decision: &Decision, chosen: &Scored) -> Demand<'a> {
        let block_size = self.request_facts().block_size;
        let blocks = match self.shared_locals(request, decision) {
            [] => PromptBlocks::Alone(chosen.terms.additional_decode_blocks as u64),
            locals => PromptBlocks::Shared(locals),
        };
        let prompt_tokens = request.prompt.token_count() as u64;
        let expected_blocks = match decision.mode {
            Mode::Latency => chosen.terms.in_flight_blocks,
            _ => 0.0,
        };
        let cached_tokens = match decision.tracks_prefill {
            true => prompt_tokens.min((chosen.terms.cached_tokens + expected_blocks * f64::from(block_size)) as u64),
            // As in Dynamo: a request that does not track prefill adds none to its worker.
            false => prompt_tokens,
        };
        Demand {
            space: request.space,
            prefill_tokens: prompt_tokens - cached_tokens,
            cached_tokens,
            blocks,
            divergence: self.buffers.divergence(),
            block_size,
            expected_output_tokens: request.expected_output_tokens,
            is_recorded: false,
            is_traced: false,
        }
    }

    /// Blocks of the prompt that a worker of the space holds, listed or not.
    #[must_use]
    pub fn overlap_of(&self, record: &WorkerRecord) -> TierBlocks {
        self.buffers.depths.of(record.shard, record.slot)
    }

    /// The work of the last observation: blocks that were hashed and looked up, plus [`WORKER_WORK`] for each worker.
    #[must_use]
    pub fn work(&self) -> u64 {
        let Observation { request_blocks, workers, .. } = self.observation();
        u64::from(*request_blocks) + workers.len() as u64 * WORKER_WORK
    }

    /// Whether the last decision waited for the bookings' lock to read active prompts.
    #[must_use]
    pub const fn active_locked(&self) -> bool {
        self.buffers.active_locked()
    }

    /// Whether the chosen worker's load changed since the decision read it, and the mode depends on load.
    #[must_use]
    pub fn chosen_moved(&self, decision: &Decision, loads: &Loads) -> bool {
        let chosen = decision.candidates.first().filter(|_| decision.mode.depends_on_load());
        chosen.is_some_and(|chosen| loads.version(chosen.index) != self.cache().load_version_of(chosen.index))
    }
}

/// Where a prompt lies in memory, and its bytes.
fn place_of(prompt: &Prompt<'_>) -> (usize, usize) {
    let (Prompt::Tokens(bytes) | Prompt::LocalHashes { hashes: bytes, .. }) = prompt;
    (bytes.as_ptr().addr(), bytes.len())
}

/// Decides `request` and overwrites `decision`, whose buffers are reused. Books nothing.
///
/// # Errors
/// `UnknownSpace`, `SchemeMismatch`, `InvalidArgument` or `Oversized`, if the request cannot be judged.
pub fn decide(
    view: &View<'_>,
    request: &RouteRequest<'_>,
    scratch: &mut Scratch,
    draws: Draws,
    decision: &mut Decision,
) -> Result<()> {
    propose(view, request, scratch, draws, decision)?;
    advance_round_robin(view, request, scratch, decision);
    Ok(())
}

/// As [`decide`], without advancing the round-robin counter. In round-robin mode the decision takes effect after
/// [`advance_round_robin`]. A queued request is proposed several times and advances the counter once.
///
/// # Errors
/// As [`decide`].
pub fn propose(
    view: &View<'_>,
    request: &RouteRequest<'_>,
    scratch: &mut Scratch,
    draws: Draws,
    decision: &mut Decision,
) -> Result<()> {
    judge(view.policy, scratch.observe(view, request)?.observation(), draws, decision);
    Ok(())
}

/// As [`propose`], for the request that was just proposed, because the chosen worker was booked meanwhile. Only what
/// bookings change is read again: hashes, overlaps and trust stay.
///
/// # Errors
/// As [`decide`].
pub fn propose_again(
    view: &View<'_>,
    request: &RouteRequest<'_>,
    scratch: &mut Scratch,
    draws: Draws,
    decision: &mut Decision,
) -> Result<()> {
    if let Some(cache) = scratch.observe_again(view, request) {
        judge(view.policy, cache.observation(), draws, decision);
        return Ok(());
    }
    propose(view, request, scratch, draws, decision)
}

/// Advances the round-robin counter for the request that was just proposed, if it counts. If another request advanced
/// the counter meanwhile, judges the same observation again with the new value.
pub fn advance_round_robin(
    view: &View<'_>,
    request: &RouteRequest<'_>,
    scratch: &mut Scratch,
    decision: &mut Decision,
) {
    if decision.mode != Mode::RoundRobin {
        return;
    }
    let cache = scratch.cache_mut();
    let read = cache.observation().request.round_robin_counter;
    let counter = read_observation::advance_round_robin(view, request).filter(|counter| *counter != read);
    // If the policy was replaced meanwhile, the decision stands and is recorded with the counter that it read.
    if let Some(counter) = counter.filter(|_| decision.policy_version == view.policy.version) {
        cache.set_round_robin_counter(counter);
        judge(view.policy, cache.observation(), Draws::new(decision.seed), decision);
    }
}

/// Fills `decision.candidates` with the overlap of every worker of the space, eligible or not, in table order and
/// without a cost. Decides nothing and does not advance the round-robin counter.
///
/// # Errors
/// As [`decide`].
pub fn overlaps(
    view: &View<'_>,
    request: &RouteRequest<'_>,
    scratch: &mut Scratch,
    decision: &mut Decision,
) -> Result<()> {
    let observation = scratch.observe(view, &request.of_every_worker(view.policy))?.observation();
    decision.begin(&view.policy.under(&observation.request.overrides), observation);
    let workers = &observation.workers;
    decision.candidates.resize(workers.len(), Scored::default());
    for (row, listed) in decision.candidates.iter_mut().enumerate() {
        listed.set(workers, row);
        listed.terms = CostTerms::default();
    }
    Ok(())
}
