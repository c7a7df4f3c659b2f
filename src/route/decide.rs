//! One decision, run to completion: filter, look up, cost, select.

use rand::Rng;

use super::cost::{Ask, cost};
use super::decision::{Decision, MatchStatus, ReplyNotes, Rule, Scored};
use super::policy::Policy;
use super::request::{Prompt, RouteRequest};
use super::select::choose;
use crate::error::{Error, Kind, Result, counted};
use crate::fleet::{FleetTable, PoolRole, Space, WorkerRecord, WorkerState};
use crate::hash;
use crate::ids::{DpRank, LocalHash, Scheme, TierBlocks, Window, Worker, WorkerIndex};
use crate::index::{Depths, IndexReader};
use crate::limits::{CANDIDATES_MAX, NOMINAL_BLOCK_SIZE_TOKENS, PROMPT_TOKENS_MAX};
use crate::load::{Demand, Load, Loads};
use crate::predict::PredictionReader;
use crate::trust::{TrustLevel, TrustReason};

/// What a decision is made from. Index readers are by space.
#[derive(Clone, Copy)]
pub struct View<'a> {
    /// Who there is.
    pub fleet: &'a FleetTable,
    /// Where blocks are, by `SpaceId`.
    pub indexes: &'a [IndexReader],
    /// What is predicted for workers without events, by `SpaceId`; nothing where the list ends or has `None`.
    pub predictions: &'a [Option<PredictionReader>],
    /// How busy workers are.
    pub loads: &'a Loads,
    /// What the terms are weighed by.
    pub policy: &'a Policy,
}

/// Buffers reused from one decision to the next.
#[derive(Default)]
pub struct Scratch {
    locals: Vec<LocalHash>,
    depths: Depths,
    predicted: Depths,
    /// The request's allow-list in order, so that a long one is not gone through for every worker.
    allowed: Vec<Worker>,
    /// Who was admitted, in table order, and their loads.
    admitted: Vec<WorkerIndex>,
    loads: Vec<Load>,
    /// The load's version of the chosen candidate when it was read.
    chosen_load_version: u64,
}

impl Scratch {
    /// The hashes of the prompt's blocks, if the last decision could look them up; else none.
    #[must_use]
    pub fn locals(&self, decision: &Decision) -> &[LocalHash] {
        let looked_up = decision.matched == MatchStatus::Matched;
        if looked_up { &self.locals } else { &[] }
    }

    /// What a worker of the decision's space holds of the prompt, listed or not, where it was looked up.
    #[must_use]
    pub fn overlap_of(&self, record: &WorkerRecord) -> TierBlocks {
        self.depths.of(record.shard, record.slot)
    }

    /// Whether the chosen worker's load has moved since the decision read it.
    #[must_use]
    pub fn chosen_moved(&self, decision: &Decision, loads: &Loads) -> bool {
        decision.candidates.first().is_some_and(|chosen| loads.read(chosen.index).version != self.chosen_load_version)
    }
}

/// Decides `request`; the record goes into `decision`, whose buffers are reused. Books nothing.
///
/// # Errors
/// `UnknownSpace`, `SchemeMismatch`, `InvalidArgument` or `Oversized`, if the request cannot be judged.
pub fn decide(
    view: &View<'_>,
    request: &RouteRequest<'_>,
    scratch: &mut Scratch,
    rng: &mut impl Rng,
    decision: &mut Decision,
) -> Result<()> {
    let space = view.fleet.space(request.space).ok_or_else(|| unknown_space(request))?;
    check(request)?;
    let scheme = space.scheme.get();
    reset(decision, view);
    admit(view, request, space, scratch, decision);
    look_up(view, request, scheme, scratch, decision)?;
    let counted_by = scheme.unwrap_or(Scheme { block_size: NOMINAL_BLOCK_SIZE_TOKENS, window: Window::Plain });
    let ask = Ask {
        prompt_tokens: request.prompt.token_count() as u64,
        block_size: counted_by.block_size,
        whole_blocks: hash::block_count(request.prompt.token_count(), counted_by) as u32,
        prefill_tokens_min: scratch.loads.iter().map(|load| load.prefill_tokens).min().unwrap_or(0),
        decode_pool: space.role == PoolRole::Decode,
    };
    for (scored, load) in decision.candidates.iter_mut().zip(&scratch.loads) {
        scored.terms = cost(view.policy, &ask, scored.overlap, load);
    }
    decision.eligible = decision.candidates.len() as u32;
    decision.ties = choose(&mut decision.candidates, request.candidates_max.min(CANDIDATES_MAX), rng);
    if let Some(chosen) = decision.candidates.first() {
        // Candidates were admitted in table order, so the load is found by the index it was read for.
        let read = scratch.admitted.binary_search(&chosen.index).ok().and_then(|place| scratch.loads.get(place));
        scratch.chosen_load_version = read.map_or(0, |load| load.version);
    }
    Ok(())
}

/// Fills `decision.candidates` with what every worker of the space holds of the prompt, eligible or not, in
/// table order and without a cost.
///
/// # Errors
/// As [`decide`].
pub fn overlaps(
    view: &View<'_>,
    request: &RouteRequest<'_>,
    scratch: &mut Scratch,
    decision: &mut Decision,
) -> Result<()> {
    let space = view.fleet.space(request.space).ok_or_else(|| unknown_space(request))?;
    check(request)?;
    reset(decision, view);
    decision.eligible = 0;
    decision.ties = 0;
    decision.candidates.extend(view.fleet.workers_of(space.id).map(candidate));
    look_up(view, request, space.scheme.get(), scratch, decision)
}

/// What a decision's choice adds to the chosen worker's load.
#[must_use]
pub fn demand(request: &RouteRequest<'_>, chosen: &Scored) -> Demand {
    let prompt_tokens = request.prompt.token_count() as u64;
    Demand {
        prefill_tokens: prompt_tokens - prompt_tokens.min(chosen.terms.cached_tokens as u64),
        decode_blocks: chosen.terms.additional_decode_blocks as u64,
    }
}

fn unknown_space(request: &RouteRequest<'_>) -> Error {
    Error::new(
        Kind::UnknownSpace,
        format!("there is no space {}", request.space),
        "use a space_id of the hello reply of this instance",
    )
}

fn check(request: &RouteRequest<'_>) -> Result<()> {
    if request.prompt.token_count() > PROMPT_TOKENS_MAX {
        return Err(Error::new(
            Kind::Oversized,
            format!("the prompt has {} tokens, more than {PROMPT_TOKENS_MAX}", request.prompt.token_count()),
            "route it without its tail",
        ));
    }
    Ok(())
}

fn reset(decision: &mut Decision, view: &View<'_>) {
    decision.candidates.clear();
    decision.removed.clear();
    decision.matched = MatchStatus::Matched;
    decision.notes = ReplyNotes::default();
    decision.request_blocks = 0;
    decision.policy_version = view.policy.version;
    decision.fleet_version = view.fleet.version;
    decision.index_epoch = 0;
    decision.booking = None;
}

/// Lists the eligible workers with their trust and load, and the others with the rule that removed them.
/// Trust is read here, before the index: what the index then says is at least as new.
fn admit(view: &View<'_>, request: &RouteRequest<'_>, space: &Space, scratch: &mut Scratch, decision: &mut Decision) {
    scratch.allowed.clear();
    scratch.allowed.extend_from_slice(request.allow.unwrap_or_default());
    scratch.allowed.sort_unstable();
    let allowed = request.allow.is_some();
    list(view, space, scratch, decision, |record, allow| removed_by(record, allowed.then_some(allow)));
    if decision.candidates.is_empty() && decision.removed.iter().any(|(rule, _)| *rule == Rule::Down) {
        // A publisher that is gone need not mean an engine that is: better a doubtful worker than none.
        decision.notes.insert(ReplyNotes::ALL_DOWN);
        list(view, space, scratch, decision, |record, allow| {
            removed_by(record, allowed.then_some(allow)).filter(|rule| *rule != Rule::Down)
        });
    }
}

/// Lists every worker of the space as a candidate or under the rule that removed it.
fn list(
    view: &View<'_>,
    space: &Space,
    scratch: &mut Scratch,
    decision: &mut Decision,
    removed_by: impl Fn(&WorkerRecord, &[Worker]) -> Option<Rule>,
) {
    scratch.loads.clear();
    scratch.admitted.clear();
    decision.candidates.clear();
    decision.removed.clear();
    for record in view.fleet.workers_of(space.id) {
        if let Some(rule) = removed_by(record, &scratch.allowed) {
            decision.removed.push((rule, record.worker));
            continue;
        }
        scratch.loads.push(view.loads.read(record.index));
        scratch.admitted.push(record.index);
        decision.candidates.push(candidate(record));
    }
}

/// A candidate before anything is known of the prompt on it.
fn candidate(record: &WorkerRecord) -> Scored {
    Scored {
        index: record.index,
        worker: record.worker,
        overlap: TierBlocks::default(),
        trust: record.trust.load(),
        state: record.state,
        terms: super::CostTerms::default(),
    }
}

/// The first rule that takes a worker out of the running. `allowed` is sorted.
fn removed_by(record: &WorkerRecord, allowed: Option<&[Worker]>) -> Option<Rule> {
    let every_rank = Worker { rank: DpRank(u32::MAX), ..record.worker };
    let named = |allowed: &[Worker]| {
        allowed.binary_search(&record.worker).is_ok() || allowed.binary_search(&every_rank).is_ok()
    };
    if allowed.is_some_and(|allowed| !named(allowed)) {
        return Some(Rule::NotAllowed);
    }
    match record.state {
        WorkerState::Joining | WorkerState::Ready => None,
        WorkerState::Draining => Some(Rule::Draining),
        WorkerState::Down => Some(Rule::Down),
    }
}

/// The prompt's local hashes under the space's scheme.
fn block_hashes(request: &RouteRequest<'_>, scheme: Scheme, locals: &mut Vec<LocalHash>) -> Result<()> {
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
            hash::local_hashes(scheme, seed, tokens, request.media, locals);
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
            locals.clear();
            let whole = hashes.chunks_exact(8).filter_map(|bytes| bytes.try_into().ok());
            locals.extend(whole.map(|bytes| LocalHash(u64::from_le_bytes(bytes))));
        }
    }
    Ok(())
}

/// Hashes the prompt and gives every candidate its overlap, or says that none can be known.
fn look_up(
    view: &View<'_>,
    request: &RouteRequest<'_>,
    scheme: Option<Scheme>,
    scratch: &mut Scratch,
    decision: &mut Decision,
) -> Result<()> {
    let Some(scheme) = scheme else {
        decision.matched = MatchStatus::Unmatchable;
        decision.notes.insert(ReplyNotes::SCHEME_UNKNOWN);
        return Ok(());
    };
    block_hashes(request, scheme, &mut scratch.locals)?;
    overlap(view, request, scratch, decision);
    if let Some(Some(predictions)) = view.predictions.get(request.space.0 as usize) {
        predict(view, predictions, scratch, decision);
    }
    Ok(())
}

/// Reads the predictions once and gives the candidates that publish no events their overlap.
fn predict(view: &View<'_>, predictions: &PredictionReader, scratch: &mut Scratch, decision: &mut Decision) {
    let predicted = predictions.look_up(&scratch.locals, &mut scratch.predicted);
    if predicted.is_contended() {
        decision.notes.insert(ReplyNotes::READ_CONTENDED);
    }
    for scored in &mut decision.candidates {
        let silent = view.fleet.worker(scored.index).is_some_and(|record| record.events.is_none());
        let Some(device) = predicted.blocks(scored.index, scored.worker).filter(|_| silent) else { continue };
        scored.trust.level = TrustLevel::Predicted;
        scored.trust.reasons.remove(TrustReason::NoEvents);
        scored.trust.reasons.insert(TrustReason::OwnDecisions);
        scored.overlap = TierBlocks { device, ..TierBlocks::default() };
        if predicted.is_contended() {
            scored.trust.reasons.insert(TrustReason::ReadContended);
        }
    }
}

/// Reads the index once and gives every candidate its overlap.
fn overlap(view: &View<'_>, request: &RouteRequest<'_>, scratch: &mut Scratch, decision: &mut Decision) {
    decision.request_blocks = scratch.locals.len() as u32;
    let Some(index) = view.indexes.get(request.space.0 as usize) else { return };
    let lookup = index.lookup(&scratch.locals, &mut scratch.depths);
    decision.index_epoch = lookup.epoch;
    if lookup.contended {
        decision.notes.insert(ReplyNotes::READ_CONTENDED);
    }
    for scored in &mut decision.candidates {
        if let Some(record) = view.fleet.worker(scored.index) {
            scored.overlap = scratch.depths.of(record.shard, record.slot);
            // The worker may have been emptied since its trust was read, in time for this look-up.
            let met = scored.trust.meet(record.trust.load());
            if met.reasons.contains(TrustReason::ReadContended) {
                decision.notes.insert(ReplyNotes::READ_CONTENDED);
            }
            scored.trust = met;
        }
        if lookup.contended {
            scored.trust.reasons.insert(TrustReason::ReadContended);
            scored.trust.level = scored.trust.level.min(TrustLevel::Unproven);
        }
    }
}
