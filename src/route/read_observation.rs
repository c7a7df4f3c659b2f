//! Observing: reads fleet, loads, index and predictions into plain values. The only part of a decision that reads what
//! other threads change.

use std::sync::atomic::{AtomicU64, Ordering};

use super::affinity::{AffinityMode, AffinitySession, AffinityTable};
use super::observation::ConstraintFacts;
use super::policy::Policy;
use super::request_facts::RequestFacts;
use super::space_cache::SpaceCache;
use crate::error::{Error, Kind, Result, counted};
use crate::fleet::{FleetTable, WorkerRecord};
use crate::hash;
use crate::ids::{LocalHash, RankSelection, Scheme, Worker};
use crate::index::{Depths, IndexReader};
use crate::limits::PROMPT_TOKENS_MAX;
use crate::load::{ActiveRead, Loads, SeenDivergence};
use crate::predict::PredictionReader;
use crate::protocol::{Mode, Prompt, ReplyNotes, RouteRequest};

/// The shared state that a decision reads. Index readers are by space.
#[derive(Clone, Copy)]
pub struct View<'a> {
    /// The fleet table.
    pub fleet: &'a FleetTable,
    /// The indexes, by `SpaceId`.
    pub indexes: &'a [IndexReader],
    /// Predictions for workers without events, by `SpaceId`; `None` or no entry = the space has none.
    pub predictions: &'a [Option<PredictionReader>],
    /// The loads of all workers.
    pub loads: &'a Loads,
    /// The policy of the request's space.
    pub policy: &'a Policy,
    /// Round-robin counters, by `SpaceId`; a space without an entry always chooses its first worker.
    pub round_robin_counters: &'a [AtomicU64],
    /// The table of sessions and their workers.
    pub affinities: &'a AffinityTable,
    /// The time, nanoseconds of the bookings' clock.
    pub now_ns: u64,
}

/// Buffers of an observation, reused by the next.
#[derive(Default)]
pub(super) struct ObservationBuffers {
    pub(super) depths: Depths,
    predicted: Depths,
    /// How the look-up of active prompts went, if there was one.
    active: Option<ActiveRead>,
    /// The request's allow-list, sorted for binary search.
    allowed: Vec<Worker>,
    shared: SharedHits,
}

impl ObservationBuffers {
    /// Where the prompt diverges from the prompts in flight, if that was seen.
    pub(super) const fn divergence(&self) -> Option<&SeenDivergence> {
        match &self.active {
            Some(ActiveRead::LockFree(divergence)) => Some(divergence),
            _ => None,
        }
    }

    /// Whether the look-up of active prompts waited for the bookings' lock.
    pub(super) const fn active_locked(&self) -> bool {
        matches!(self.active, Some(ActiveRead::Locked))
    }
}

/// Reads everything that a decision about `request` depends on into the cache of its space. `hash_buffer` takes the
/// hashes of the prompt's blocks, unless [`hashes_in_place`] has them. Allocates nothing once `hash_buffer`, `buffers` and
/// `cache` are warm.
///
/// # Errors
/// `UnknownSpace`, `SchemeMismatch`, `InvalidArgument` or `Oversized`, if the request cannot be judged.
pub(super) fn observe(
    view: &View<'_>,
    request: &RouteRequest<'_>,
    hash_buffer: &mut Vec<LocalHash>,
    buffers: &mut ObservationBuffers,
    cache: &mut SpaceCache,
) -> Result<()> {
    let space = view.fleet.space(request.space).ok_or_else(|| unknown_space(request))?;
    let mode = request.overrides.mode.unwrap_or(view.policy.mode);
    check(view, request, mode)?;
    let scheme = space.scheme.get();
    let mut facts = RequestFacts::of(request, space.role, scheme);
    let mut notes = ReplyNotes::default();
    facts.now_ns = view.now_ns;
    facts.session = session(view, request, &mut notes);
    cache.begin(facts, notes, view.fleet.version);
    buffers.active = None;
    // Hashing comes before the workers are read, so that their facts are fresh when one is booked. Refusals come before
    // the workers are read too, because they are not charged to the connection's share of the thread.
    let locals = match scheme {
        Some(scheme) => {
            buffers.shared.set(request.shared_hits, facts.whole_blocks)?;
            Some((block_hashes(request, scheme, hash_buffer)?, scheme))
        }
        None => None,
    };
    // Trust comes before the index, so that the index is at least as new.
    cache.refresh(view, request.space);
    // For `observe_bookings`: it arrives while the index is read.
    cache.prefetch_loads(view, request.space, locals.map_or(&[], |(locals, _)| locals));
    apply_constraints(view, request, buffers, cache);
    look_up_overlaps(view, request, locals, mode, buffers, cache);
    set_shared_blocks(request, scheme, buffers, cache);
    // What bookings change comes last, so that it is as new as it can be.
    observe_bookings(view, request, locals.map(|(locals, _)| locals), buffers, cache);
    if mode == Mode::RoundRobin {
        cache.set_round_robin_counter(round_robin_counter(view, request));
    }
    Ok(())
}

/// Reads what bookings change: the loads, and which prompts run. All else stays as [`observe`] read it for the same
/// request. `locals` are the hashes of the prompt's blocks, if the prompt can be matched.
///
/// The prompts are read after the loads: a booking between the two counts in neither, or belongs to the chosen worker and
/// is noticed.
pub(super) fn observe_bookings(
    view: &View<'_>,
    request: &RouteRequest<'_>,
    locals: Option<&[LocalHash]>,
    buffers: &mut ObservationBuffers,
    cache: &mut SpaceCache,
) {
    cache.refresh_loads(view);
    if let Some(locals) = locals {
        buffers.active = Some(view.loads.active(request.space, locals, &mut cache.active_rows()));
    }
}

/// The worker that the request's session is bound to.
fn session(view: &View<'_>, request: &RouteRequest<'_>, notes: &mut ReplyNotes) -> AffinitySession {
    let Some(name) = request.affinity_session else { return AffinitySession::None };
    let affinity = &view.policy.affinity;
    if affinity.mode == AffinityMode::Off {
        notes.insert(ReplyNotes::AFFINITY_OFF);
        return AffinitySession::None;
    }
    let bound = view.affinities.worker_of(request.space, name, seconds(view.now_ns), affinity.ttl_s);
    bound.map_or(AffinitySession::Unbound, AffinitySession::Bound)
}

/// A time of the bookings' clock in the seconds of session bindings.
#[must_use]
pub const fn seconds(now_ns: u64) -> u32 {
    (now_ns / 1_000_000_000) as u32
}

/// The space's round-robin counter; reading does not advance it.
fn round_robin_counter(view: &View<'_>, request: &RouteRequest<'_>) -> u64 {
    // Relaxed: the counter publishes no other memory.
    view.round_robin_counters.get(request.space.0 as usize).map_or(0, |counter| counter.load(Ordering::Relaxed))
}

/// Advances the round-robin counter, unless the request is only a question or names one rank. Returns the value before.
pub(super) fn advance_round_robin(view: &View<'_>, request: &RouteRequest<'_>) -> Option<u64> {
    let is_named = request.pin.is_some_and(|pin| pin.ranks() != RankSelection::Every);
    if request.is_question() || is_named {
        return None;
    }
    // Relaxed: as in `round_robin_counter`.
    view.round_robin_counters.get(request.space.0 as usize).map(|counter| counter.fetch_add(1, Ordering::Relaxed))
}

fn unknown_space(request: &RouteRequest<'_>) -> Error {
    Error::new(
        Kind::UnknownSpace,
        format!("there is no space {}", request.space),
        "use a space_id of the hello reply of this instance",
    )
}

fn check(view: &View<'_>, request: &RouteRequest<'_>, mode: Mode) -> Result<()> {
    let invalid = |message: &str, remedy: &str| Err(Error::new(Kind::InvalidArgument, message, remedy));
    if mode == Mode::Direct && request.pin.is_none() {
        return invalid("mode direct without a pin", "pin the request to a worker");
    }
    let is_predicted = view.predictions.get(request.space.0 as usize).is_some_and(Option::is_some);
    if mode == Mode::Approximate && !is_predicted {
        return invalid("mode approximate where nothing is predicted", "set approximate = true in the [[space]]");
    }
    if request.prompt.token_count() > PROMPT_TOKENS_MAX {
        return Err(Error::new(
            Kind::Oversized,
            format!("the prompt has {} tokens, more than {PROMPT_TOKENS_MAX}", request.prompt.token_count()),
            "route it without its tail",
        ));
    }
    Ok(())
}

/// Notes how every worker meets the request's constraints, if it has any.
fn apply_constraints(
    view: &View<'_>,
    request: &RouteRequest<'_>,
    buffers: &mut ObservationBuffers,
    cache: &mut SpaceCache,
) {
    buffers.allowed.clear();
    buffers.allowed.extend_from_slice(request.allow.unwrap_or_default());
    buffers.allowed.sort_unstable();
    if has_constraints(request) {
        let records = view.fleet.workers_of(request.space);
        cache.constrain(records.map(|record| constraints_of(request, &buffers.allowed, record)));
    }
}

/// Whether a request constrains its workers beyond their space.
fn has_constraints(request: &RouteRequest<'_>) -> bool {
    let labels = !request.required_taints.is_empty() || !request.preferred_taints.names.is_empty();
    labels || request.allow.is_some() || request.pin.is_some() || request.lora.is_some()
}

/// How a worker meets the constraints of a request, whose allow-list is `allowed`, sorted.
fn constraints_of(request: &RouteRequest<'_>, allowed: &[Worker], record: &WorkerRecord) -> ConstraintFacts {
    let every_rank = Worker::every_rank(record.worker.id);
    let is_listed = |worker: &Worker| allowed.binary_search(worker).is_ok();
    ConstraintFacts {
        allowed: request.allow.is_none() || is_listed(&record.worker) || is_listed(&every_rank),
        is_pinned: request.pin.is_none_or(|pin| pin.selects(record.worker)),
        has_adapter: request.lora.is_some_and(|lora| record.loras.iter().any(|has| has == lora)),
        has_required_taints: request.required_taints.iter().all(|taint| has_taint(record, taint)),
        taint_weight: taint_weight(request, record),
    }
}

fn has_taint(record: &WorkerRecord, taint: &str) -> bool {
    record.taints.iter().any(|has| has == taint)
}

/// Sum of the weights of the preferred labels that the worker has.
fn taint_weight(request: &RouteRequest<'_>, record: &WorkerRecord) -> f64 {
    request.preferred_taints.iter().filter(|(taint, _)| has_taint(record, taint)).map(|(_, weight)| weight).sum()
}

/// Notes the blocks of a shared cache beyond those in each device. Needs the overlaps; without a scheme, block ranges
/// mean nothing.
fn set_shared_blocks(
    request: &RouteRequest<'_>,
    scheme: Option<Scheme>,
    buffers: &ObservationBuffers,
    cache: &mut SpaceCache,
) {
    if !request.shared_hits.is_empty() && scheme.is_some() {
        cache.set_shared_blocks(|depth| buffers.shared.beyond(depth));
    }
}

/// Looks up the overlap of every worker with the prompt, given the hashes of its blocks, or notes that the prompt is
/// unmatchable.
fn look_up_overlaps(
    view: &View<'_>,
    request: &RouteRequest<'_>,
    locals: Option<(&[LocalHash], Scheme)>,
    mode: Mode,
    buffers: &mut ObservationBuffers,
    cache: &mut SpaceCache,
) {
    let Some((locals, scheme)) = locals else { return cache.set_unmatchable() };
    overlap(view, request, (locals, scheme), buffers, cache);
    if mode == Mode::Approximate {
        cache.clear_overlaps();
    }
    if let Some(Some(predictions)) = view.predictions.get(request.space.0 as usize) {
        predict(view, request, (locals, predictions), buffers, cache);
    }
}

/// The block hashes inside the request, without a copy. `None` for tokens and for hashes that are not aligned.
pub(super) fn hashes_in_place<'a>(prompt: &Prompt<'a>) -> Option<&'a [LocalHash]> {
    match prompt {
        Prompt::LocalHashes { hashes, .. } => hash::given_in_place(hashes),
        Prompt::Tokens(_) => None,
    }
}

/// The hashes of the prompt's blocks under the scheme of the space. Those that are not [`hashes_in_place`] go to
/// `hash_buffer`.
fn block_hashes<'a>(
    request: &RouteRequest<'a>,
    scheme: Scheme,
    hash_buffer: &'a mut Vec<LocalHash>,
) -> Result<&'a [LocalHash]> {
    let blocks = hash::block_count(request.prompt.token_count(), scheme);
    if let Some((block, _)) = request.media.iter().find(|(block, _)| *block as usize >= blocks.max(1)) {
        return Err(Error::new(
            Kind::InvalidArgument,
            format!("a multimodal hash names block {block} of a prompt of {}", counted(blocks, "whole block")),
            "count blocks from 0, and leave out objects in the partial last block",
        ));
    }
    match request.prompt {
        Prompt::Tokens(tokens) => {
            let seed = hash::seed(request.lora, request.salt);
            hash::local_hashes(scheme, seed, tokens, request.media, hash_buffer);
        }
        Prompt::LocalHashes { hashes, scheme: theirs, .. } => {
            if theirs != scheme {
                return Err(Error::new(
                    Kind::SchemeMismatch,
                    format!(
                        "the hashes are of {} tokens a block ({:?}), the space's of {} ({:?})",
                        theirs.block_size, theirs.window, scheme.block_size, scheme.window
                    ),
                    "hash by the scheme of the hello reply, or send tokens",
                ));
            }
            if hashes.len() != blocks * 8 {
                return Err(Error::new(
                    Kind::InvalidArgument,
                    format!("{} hashes for {}", hashes.len() / 8, counted(blocks, "whole block")),
                    "send one hash for each whole block, and token_count",
                ));
            }
            if let Some(in_place) = hashes_in_place(&request.prompt) {
                return Ok(in_place);
            }
            hash::given_hashes(hashes, hash_buffer);
        }
    }
    Ok(hash_buffer)
}

/// Reads the index once.
fn overlap(
    view: &View<'_>,
    request: &RouteRequest<'_>,
    (locals, scheme): (&[LocalHash], Scheme),
    buffers: &mut ObservationBuffers,
    cache: &mut SpaceCache,
) {
    cache.set_request_blocks(locals.len() as u32);
    let Some(index) = view.indexes.get(request.space.0 as usize) else { return cache.clear_overlaps() };
    // Engines always compute the last token, and with it its whole block.
    let usable = request.prompt.token_count().saturating_sub(1) / scheme.block_size.max(1) as usize;
    let lookup = index.lookup_usable(locals, usable as u32, &mut buffers.depths);
    cache.set_overlaps(&buffers.depths, lookup.epoch);
    if cache.mark_contended(lookup.contended) {
        cache.note(ReplyNotes::READ_CONTENDED);
    }
}

/// Reads the predictions once, for the workers that publish no events.
fn predict(
    view: &View<'_>,
    request: &RouteRequest<'_>,
    (locals, predictions): (&[LocalHash], &PredictionReader),
    buffers: &mut ObservationBuffers,
    cache: &mut SpaceCache,
) {
    let predicted = predictions.look_up(locals, &mut buffers.predicted);
    if predicted.is_contended() {
        cache.note(ReplyNotes::READ_CONTENDED);
    }
    let of_worker = |record: &WorkerRecord| match record.events {
        None => predicted.blocks(record.index, record.worker),
        Some(_) => None,
    };
    cache.predict(predicted.is_contended(), view.fleet.workers_of(request.space).map(of_worker));
}

/// Block ranges of a cache that all workers share: ascending and disjoint.
#[derive(Clone, Debug, Default)]
pub(super) struct SharedHits {
    /// Start, end, and the number of blocks from the start of this range to the end of the last one.
    ranges: Vec<(u32, u32, u32)>,
}

impl SharedHits {
    /// Takes half-open ranges in any order, which may overlap, and cuts them at `whole_blocks`.
    ///
    /// # Errors
    /// `InvalidArgument` if a range ends before it starts.
    pub(super) fn set(&mut self, ranges: &[(u32, u32)], whole_blocks: u32) -> Result<()> {
        self.ranges.clear();
        if let Some((start, end)) = ranges.iter().find(|(start, end)| start > end) {
            return Err(Error::new(
                Kind::InvalidArgument,
                format!("a range of shared_hits starts at {start} and ends at {end}"),
                "give ranges as [start, end)",
            ));
        }
        let within = |&(start, end): &(u32, u32)| (start, end.min(whole_blocks), 0);
        self.ranges.extend(ranges.iter().map(within).filter(|(start, end, _)| start < end));
        self.ranges.sort_unstable();
        self.ranges.dedup_by(|next, before| {
            let touches = next.0 <= before.1;
            if touches {
                before.1 = before.1.max(next.1);
            }
            touches
        });
        let mut behind = 0;
        for (start, end, blocks) in self.ranges.iter_mut().rev() {
            behind += *end - *start;
            *blocks = behind;
        }
        Ok(())
    }

    /// Blocks in the ranges behind the first `depth` blocks of the prompt.
    pub(super) fn beyond(&self, depth: u32) -> u32 {
        let from = self.ranges.partition_point(|(_, end, _)| *end <= depth);
        self.ranges.get(from).map_or(0, |(start, _, blocks)| blocks - depth.saturating_sub(*start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn shared_blocks_equal_a_count_one_by_one(
            ranges in proptest::collection::vec((0_u32..40, 0_u32..12), 0..6),
            whole_blocks in 0_u32..40,
        ) {
            let ranges: Vec<_> = ranges.into_iter().map(|(start, blocks)| (start, start + blocks)).collect();
            let mut hits = SharedHits::default();
            hits.set(&ranges, whole_blocks).unwrap();
            for depth in 0..45 {
                let held = |block: &u32| ranges.iter().any(|(start, end)| (start..end).contains(&block));
                prop_assert_eq!(hits.beyond(depth) as usize, (depth..whole_blocks).filter(held).count());
            }
        }
    }

    #[test]
    fn a_range_that_ends_before_it_starts_is_refused() {
        assert_eq!(SharedHits::default().set(&[(0, 1), (3, 2)], 9).unwrap_err().kind(), Kind::InvalidArgument);
    }
}
