//! The peer's side of a case: its hashes, its bookings, and its reference policy.

use std::collections::{HashMap, HashSet};
use std::sync::OnceLock;
use std::time::Duration;

use dynamo_kv_router::indexer::TieredMatchDetails;
use dynamo_kv_router::protocols::{
    BlockHashOptions, LocalBlockHash, PrefillLoadHint, RoutingConstraints, SharedCacheHits, StorageTier,
    WorkerConfigLike, WorkerId, WorkerWithDpRank, compute_block_hash_for_seq, compute_seq_hash_for_block,
};
use dynamo_kv_router::scheduling::{
    KvSchedulerError, OverlapAnalysis, ScheduleMode, SchedulingRequest, effective_prefill_tokens,
};
use dynamo_kv_router::{
    ActiveSequencesMultiWorker, DefaultWorkerSelector, KvRouterConfig, NoopSequencePublisher, RouterConfigOverride,
    SequenceRequest, WorkerSelectionInput, WorkerSelector,
};
use tokio::time::Instant;

use super::answer::{Answer, Refusal};
use super::case::{Ask, Case, Rank, Step, Text};
use super::logged::{Log, Logged};
use crate::failure::Failure;
use crate::mix::mix;

/// Seeds of the peer's generator that are kept with what they draw first.
const SEEDS: u64 = 1 << 16;
/// At such a temperature every cost is as good as any other.
const ALL_EQUAL: f64 = 1e12;

/// An engine as the peer is told of it.
struct Config {
    ranks: u32,
    taints: HashSet<String>,
}

impl WorkerConfigLike for Config {
    fn data_parallel_start_rank(&self) -> u32 {
        0
    }

    fn data_parallel_size(&self) -> u32 {
        self.ranks
    }

    fn max_num_batched_tokens(&self) -> Option<u64> {
        None
    }

    fn total_kv_blocks(&self) -> Option<u64> {
        None
    }

    fn taints(&self) -> &HashSet<String> {
        &self.taints
    }
}

/// A case as the peer sees it when the question comes.
pub(crate) struct Peer<'a> {
    case: &'a Case,
    config: KvRouterConfig,
    workers: HashMap<WorkerId, Config>,
    slots: ActiveSequencesMultiWorker<NoopSequencePublisher>,
    began: Instant,
    log: Log,
    /// The question, once it was answered.
    asked: Option<(SchedulingRequest, HashSet<WorkerId>)>,
    /// Who may be chosen, ascending.
    eligible: Vec<Rank>,
}

impl<'a> Peer<'a> {
    /// Plays what happened before. `log` must be the thread's subscriber.
    ///
    /// # Errors
    /// Something was refused that never should be.
    pub(crate) fn new(case: &'a Case, log: Log) -> Result<Self, Failure> {
        let config_of = |engine: &super::case::Engine| Config {
            ranks: engine.ranks,
            taints: engine.taints.iter().map(|taint| (*taint).to_owned()).collect(),
        };
        let ranks = case.engines.iter().map(|engine| (engine.id, (0, engine.ranks))).collect();
        let mut peer = Self {
            case,
            config: config(case),
            workers: case.engines.iter().map(|engine| (engine.id, config_of(engine))).collect(),
            slots: ActiveSequencesMultiWorker::new_without_expiry(
                NoopSequencePublisher,
                case.block_size as usize,
                ranks,
                false,
                0,
                label(case),
            ),
            began: Instant::now(),
            log,
            asked: None,
            eligible: Vec::new(),
        };
        peer.play()?;
        Ok(peer)
    }

    fn at(&self, now_ns: u64) -> Instant {
        self.began + Duration::from_nanos(now_ns)
    }

    fn play(&mut self) -> Result<(), Failure> {
        let mut made = 0_usize;
        for (now_ns, step) in &self.case.steps {
            let now = self.at(*now_ns);
            let name = |number: usize| format!("r{number}");
            match step {
                Step::Booked(ask) => {
                    self.book(ask, name(made), *now_ns)?;
                    made += 1;
                }
                Step::Prefilled(number) => {
                    self.slots.mark_prefill_completed(&name(*number), now).map_err(failed)?;
                }
                Step::Freed(number) => {
                    self.slots.free(&name(*number), now).map_err(failed)?;
                }
            }
        }
        Ok(())
    }

    /// Books as `scheduling/queue.rs` does after a selection.
    fn book(&self, ask: &Ask, request_id: String, now_ns: u64) -> Result<(), Failure> {
        let mut request = self.request(ask, now_ns);
        let selected = self.select(&request, None, 0).map_err(failed)?;
        let uncached = effective_prefill_tokens(request.isl_tokens, selected.cached_tokens);
        let cached = request.isl_tokens - uncached;
        let prefill_load_hint = (request.track_prefill_tokens && uncached > 0).then(|| PrefillLoadHint {
            initial_effective_prefill_tokens: uncached,
            expected_prefill_duration: self.case.knobs.prefill_ns.map(|[base, token, cached_token]| {
                Duration::from_nanos(base + token * uncached as u64 + cached_token * cached as u64)
            }),
        });
        let booking = SequenceRequest {
            request_id,
            token_sequence: request.token_seq.take(),
            track_prefill_tokens: request.track_prefill_tokens,
            expected_output_tokens: None,
            prefill_load_hint,
            worker: selected.worker,
            lora_name: request.lora_name.take(),
        };
        self.slots.add_request(booking, self.at(now_ns)).map_err(failed)
    }

    /// The request as its host hands it to the selector.
    fn request(&self, ask: &Ask, now_ns: u64) -> SchedulingRequest {
        let set = &ask.overrides;
        let (knobs, locals) = (&self.case.knobs, locals(self.case, &ask.text));
        let reuse = set.assume_kv_reuse.unwrap_or(knobs.assume_kv_reuse);
        let token_seq = knobs.track_active_blocks.then(|| match reuse {
            true => compute_seq_hash_for_block(&locals),
            // Names that nobody else has, as `compute_sequence_hashes_for_tracking` draws them.
            false => (0..locals.len() as u64).map(|block| mix(mix(now_ns, self.case.seed), block)).collect(),
        });
        let mut request = SchedulingRequest {
            mode: ScheduleMode::QueryOnly { request_id: None },
            token_seq,
            isl_tokens: ask.text.tokens.len(),
            lora_name: ask.text.lora.map(str::to_owned),
            expected_output_tokens: None,
            affinity_target: None,
            pinned_worker: ask.pin.map(named),
            allowed_worker_ids: self.allowed(ask),
            routing_constraints: RoutingConstraints {
                required_taints: ask.required.iter().map(|taint| (*taint).to_owned()).collect(),
                preferred_taints: ask.preferred.iter().map(|(taint, weight)| ((*taint).to_owned(), *weight)).collect(),
            },
            router_config_override: Some(RouterConfigOverride {
                overlap_score_credit: set.device_credit,
                prefill_load_scale: set.prefill_load_scale,
                router_temperature: set.temperature,
                assume_kv_reuse: set.assume_kv_reuse,
                track_prefill_tokens: set.track_prefill_tokens,
                shared_cache_multiplier: set.shared_multiplier,
            }),
            track_prefill_tokens: set.track_prefill_tokens.unwrap_or(knobs.track_prefill_tokens),
            priority_jump: 0.0,
            strict_priority: 0,
            policy_class: None,
            session_context: None,
            overlap: OverlapAnalysis::new(&self.config, self.case.block_size, &self.matched(&locals)).signals(),
            kv_transfer_candidates: None,
            retain_kv_transfer_chain: false,
            shared_cache_hits: (!ask.shared.is_empty())
                .then(|| SharedCacheHits::from_ranges(ask.shared.iter().map(|(start, end)| *start..*end).collect())),
            worker_loads: Default::default(),
            resp_tx: None,
        };
        request.worker_loads = self.slots.project_worker_loads(request.token_seq.as_deref(), self.at(now_ns));
        request
    }

    /// The engines that the request may go to. Its `scheduling/lora_filter.rs` cannot be called from outside; this is
    /// what it says.
    fn allowed(&self, ask: &Ask) -> Option<HashSet<WorkerId>> {
        let allowed: Option<HashSet<WorkerId>> = ask.allow.as_ref().map(|ids| ids.iter().copied().collect());
        let Some(lora) = ask.text.lora else { return allowed };
        let base = |id: &WorkerId| allowed.as_ref().is_none_or(|allowed| allowed.contains(id));
        let engines = self.case.engines.iter().filter(|engine| base(&engine.id));
        let mut narrowed: HashSet<WorkerId> =
            engines.clone().filter(|engine| engine.adapters.contains(&lora)).map(|engine| engine.id).collect();
        if let Some(pin) = ask.pin.filter(|pin| engines.clone().any(|engine| engine.id == pin.engine)) {
            narrowed.insert(pin.engine);
        }
        if narrowed.is_empty() { allowed } else { Some(narrowed) }
    }

    /// What an index without mistakes says of a prompt: tier by tier the run behind the tier above.
    fn matched(&self, locals: &[LocalBlockHash]) -> TieredMatchDetails {
        let mut matched = TieredMatchDetails::default();
        for (rank, _) in self.case.ranks() {
            let mut tiers_of = vec![[false; 4]; locals.len()];
            for held in self.case.held.iter().filter(|held| held.rank == rank) {
                let theirs = self::locals(self.case, &held.text);
                let common = theirs.iter().zip(locals).take_while(|(held, asked)| held == asked).count();
                let mut from = 0;
                for (tier, blocks) in held.tiers.into_iter().enumerate() {
                    let to = from + blocks;
                    tiers_of[from.min(common)..to.min(common)].iter_mut().for_each(|tiers| tiers[tier] = true);
                    from = to;
                }
            }
            let mut from = 0;
            let lower = [StorageTier::HostPinned, StorageTier::Disk, StorageTier::External];
            for (tier, name) in [None].into_iter().chain(lower.map(Some)).enumerate() {
                let run = tiers_of[from..].iter().take_while(|tiers| tiers[tier]).count();
                from += run;
                match name {
                    _ if run == 0 => {}
                    None => {
                        matched.device.overlap_scores.scores.insert(named(rank), run as u32);
                    }
                    Some(name) => {
                        matched.lower_tier.entry(name).or_default().hits.insert(named(rank), run);
                    }
                }
            }
        }
        matched
    }

    fn select(
        &self,
        request: &SchedulingRequest,
        busy: Option<&HashSet<WorkerId>>,
        seed: u64,
    ) -> Result<dynamo_kv_router::protocols::WorkerSelectionResult, KvSchedulerError> {
        let selector = DefaultWorkerSelector::new_seeded(Some(self.config.clone()), label(self.case), seed);
        let eligibility = request.eligibility_with_overloaded(busy);
        selector.select_worker(WorkerSelectionInput::configured(
            &self.workers,
            request,
            eligibility,
            self.case.block_size,
        ))
    }

    /// The answer to the question.
    ///
    /// # Errors
    /// The peer logs no cost.
    pub(crate) fn answer(&mut self) -> Result<Answer, Failure> {
        let request = self.request(&self.case.ask, self.case.now_ns);
        let busy = self.busy(&request);
        let mut eligible = Vec::new();
        let eligibility = request.eligibility_with_overloaded(Some(&busy));
        eligibility.for_each_eligible_worker_rank(&self.workers, |worker, _| {
            eligible.push(Rank { engine: worker.worker_id, rank: worker.dp_rank });
        });
        eligible.sort_unstable();
        self.eligible = eligible;
        let locals = locals(self.case, &self.case.ask.text).iter().map(|local| local.0).collect();
        let mut answer = Answer { locals, ..Answer::default() };
        let (mut request, busy) = (request, busy);
        answer.refusal = self.select(&request, Some(&busy), 0).err().map(|error| match error {
            KvSchedulerError::PinnedWorkerNotAllowed { .. } => Refusal::PinNotAllowed,
            KvSchedulerError::PinnedWorkerOverloaded { .. } => Refusal::PinBusy,
            KvSchedulerError::AllEligibleWorkersOverloaded => Refusal::Busy,
            _ => Refusal::Nobody,
        });
        if answer.refusal.is_none() {
            self.probe(&mut request, &busy, &mut answer)?;
        }
        self.asked = Some((request, busy));
        Ok(answer)
    }

    /// Has everybody chosen once, so that their costs are logged: at a temperature at which all are equal, by seeds
    /// that draw one after the other.
    fn probe(
        &self,
        request: &mut SchedulingRequest,
        busy: &HashSet<WorkerId>,
        answer: &mut Answer,
    ) -> Result<(), Failure> {
        let temperature = |request: &mut SchedulingRequest, value| {
            request.router_config_override.as_mut().map(|set| std::mem::replace(&mut set.router_temperature, value))
        };
        let before = temperature(request, Some(ALL_EQUAL)).flatten();
        for (place, rank) in self.eligible.iter().enumerate() {
            let middle = (place as f64 + 0.5) / self.eligible.len() as f64;
            let selected = self.select(request, Some(busy), nearest(middle).0).map_err(failed)?;
            let chosen = Rank { engine: selected.worker.worker_id, rank: selected.worker.dp_rank };
            if chosen != *rank {
                return Err(Failure::Peer(format!("{chosen:?} was chosen in place of {rank:?}")));
            }
            let logged = self.log.take().ok_or_else(|| Failure::Peer("it logs no cost".to_owned()))?;
            let (cost, is_rounded) = match logged {
                Logged::Whole(cost) => (cost, false),
                Logged::Rounded(cost) => (cost, true),
            };
            answer.is_rounded |= is_rounded;
            answer.costs.push((*rank, cost));
        }
        temperature(request, before);
        Ok(())
    }

    /// Engines all of whose ranks are beyond the threshold. The peer has that from its host.
    fn busy(&self, request: &SchedulingRequest) -> HashSet<WorkerId> {
        let Some(most) = self.case.knobs.busy_prefill_tokens else { return HashSet::new() };
        let is_busy = |engine: u64, rank| {
            let load = request.worker_load_for(WorkerWithDpRank::new(engine, rank));
            load.active_prefill_tokens as u64 > most
        };
        let all = |engine: &&super::case::Engine| (0..engine.ranks).all(|rank| is_busy(engine.id, rank));
        self.case.engines.iter().filter(all).map(|engine| engine.id).collect()
    }

    /// Who is chosen where the peer draws just below and just above `drawn`, of 0 to 1; after [`Peer::answer`].
    ///
    /// # Errors
    /// Nobody is.
    pub(crate) fn picks_around(&self, drawn: f64) -> Result<[Rank; 2], Failure> {
        let (request, busy) = self.asked.as_ref().ok_or_else(|| Failure::Peer("it was not asked".to_owned()))?;
        let seeds = around(drawn);
        let mut picks = [Rank { engine: 0, rank: 0 }; 2];
        for (pick, seed) in picks.iter_mut().zip(seeds) {
            let worker = self.select(request, Some(busy), seed).map_err(failed)?.worker;
            *pick = Rank { engine: worker.worker_id, rank: worker.dp_rank };
        }
        let _ = self.log.take();
        Ok(picks)
    }

    /// The question's temperature.
    #[must_use]
    pub(crate) fn temperature(&self) -> f64 {
        self.case.ask.overrides.temperature.unwrap_or(self.case.knobs.temperature)
    }
}

/// What each seed draws first, ascending.
fn draws() -> &'static [(u64, f64)] {
    static DRAWS: OnceLock<Vec<(u64, f64)>> = OnceLock::new();
    DRAWS.get_or_init(|| {
        let mut draws: Vec<(u64, f64)> = (0..SEEDS).map(|seed| (seed, fastrand::Rng::with_seed(seed).f64())).collect();
        draws.sort_by(|a, b| a.1.total_cmp(&b.1));
        draws
    })
}

fn nearest(to: f64) -> (u64, f64) {
    let draws = draws();
    let above = draws.partition_point(|(_, drawn)| *drawn < to).min(draws.len() - 1);
    draws[above]
}

/// The seeds whose draws are next to a number, below and above.
fn around(drawn: f64) -> [u64; 2] {
    let draws = draws();
    let above = draws.partition_point(|(_, of)| *of < drawn).clamp(1, draws.len() - 1);
    [draws[above - 1].0, draws[above].0]
}

fn locals(case: &Case, text: &Text) -> Vec<LocalBlockHash> {
    let options = BlockHashOptions {
        block_mm_infos: None,
        lora_name: text.lora,
        cache_namespace: text.salt,
        is_eagle: Some(case.bigram),
    };
    compute_block_hash_for_seq(&text.tokens, case.block_size, options)
}

fn config(case: &Case) -> KvRouterConfig {
    let knobs = &case.knobs;
    KvRouterConfig {
        overlap_score_credit: knobs.device_credit,
        overlap_score_credit_decay: knobs.credit_decay,
        prefill_load_scale: knobs.prefill_load_scale,
        decode_active_request_weight: knobs.active_request_weight,
        host_cache_hit_weight: knobs.host_hit_weight,
        disk_cache_hit_weight: knobs.disk_hit_weight,
        shared_cache_multiplier: Some(knobs.shared_multiplier),
        router_temperature: knobs.temperature,
        router_track_prefill_tokens: knobs.track_prefill_tokens,
        router_track_active_blocks: knobs.track_active_blocks,
        router_assume_kv_reuse: knobs.assume_kv_reuse,
        ..KvRouterConfig::default()
    }
}

const fn label(case: &Case) -> &'static str {
    if case.is_decode_pool { "decode" } else { "prefill" }
}

const fn named(rank: Rank) -> WorkerWithDpRank {
    WorkerWithDpRank { worker_id: rank.engine, dp_rank: rank.rank }
}

fn failed(error: impl std::fmt::Display) -> Failure {
    Failure::Peer(error.to_string())
}
