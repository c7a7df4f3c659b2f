//! The peer's decision, as its selection service makes it: `select_and_reserve`, and later `free_reservation`; in
//! process, on one thread, without its HTTP server.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use dynamo_kv_router::identity::RoutingPartitionId;
use dynamo_kv_router::protocols::RoutingConstraints;
use dynamo_kv_router::services::indexer::backend::Indexer;
use dynamo_kv_router::services::indexer::registry::WorkerRegistry;
use dynamo_kv_router::services::selection::{
    KvEventIngress, KvIndexSource, PromptRequest, RouterPluginRegistry, SelectAndReserveRequest, SelectionService,
    SelectionServiceBuilder, WorkerRequest,
};
use dynamo_kv_router::{KvRouterConfig, WorkerSelectionPolicy, WorkerType};
use tokio::runtime::Runtime;

use super::prompts::{Prompt, Prompts};
use super::{Decider, Given, Timed, since};
use crate::args::TapeArgs;
use crate::failure::Failure;
use crate::peer::{PeerEvent, events};
use crate::tape::Tape;

const NAME: &str = "default";
/// Its own default.
const INDEX_THREADS: usize = 4;
/// Batches whose events are made at once.
const BATCHES: usize = 4096;

/// Nobody publishes events: the index is filled by hand.
struct ByHand;

impl KvEventIngress for ByHand {
    fn open(&self, registry: &WorkerRegistry, key: &RoutingPartitionId, block_size: u32) -> Indexer {
        registry.get_or_create_indexer(key.clone(), block_size)
    }
}

/// A service with a filled index.
pub(crate) struct Peer {
    runtime: Runtime,
    service: SelectionService,
    asked: u64,
}

impl Peer {
    /// Holds what the tape says.
    ///
    /// # Errors
    /// The service refuses something.
    pub(crate) fn new(tape: &Tape, args: &TapeArgs) -> Result<Self, Failure> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(Failure::system("start a runtime for the peer"))?;
        let service = runtime.block_on(async {
            let builder = SelectionServiceBuilder::new(
                KvRouterConfig::default(),
                WorkerType::Aggregated,
                RouterPluginRegistry::default(),
            );
            let reference = |config: &KvRouterConfig, role: WorkerType| {
                WorkerSelectionPolicy::reference(config.clone(), role.default_selector_label())
            };
            let service = builder
                .worker_selection_policy_factory(Arc::new(move |config, role, _| reference(config, role)))
                .kv_index(KvIndexSource::Owned(Arc::new(ByHand)))
                .indexer_threads(INDEX_THREADS)
                .build()
                .await
                .map_err(failed)?;
            for worker in 0..args.workers {
                let request = WorkerRequest {
                    worker_id: u64::from(worker),
                    endpoint: Some(format!("http://worker-{worker}:8000")),
                    block_size: Some(args.block_size),
                    max_num_batched_tokens: Some(8192),
                    ..WorkerRequest::default()
                };
                service.upsert_worker(request).await.map_err(failed)?;
            }
            fill(&service, tape).await?;
            Ok::<_, Failure>(service)
        })?;
        Ok(Self { runtime, service, asked: 0 })
    }
}

async fn fill(service: &SelectionService, tape: &Tape) -> Result<(), Failure> {
    let partition = service.core().partition(&RoutingPartitionId::new(NAME, NAME));
    let indexer = partition.ok_or_else(|| failed("it has no partition"))?.indexer().clone();
    let mut from = 0;
    while from < tape.script.batches() {
        let to = (from + BATCHES).min(tape.script.batches());
        for event in events(&tape.nodes, &tape.script, from..to) {
            let (PeerEvent::Device(event) | PeerEvent::Host(event)) = event;
            indexer.apply_event_routed(event).await.map_err(failed)?;
        }
        from = to;
    }
    match &indexer {
        Indexer::Concurrent { primary, .. } => {
            primary.flush().await;
            Ok(())
        }
        _ => Err(failed("it has another index than its default")),
    }
}

impl Decider for Peer {
    fn run(&mut self, prompts: &Prompts, given: Given, in_flight: usize, timed: &mut Timed) -> Result<(), Failure> {
        let (runtime, service, asked) = (&self.runtime, &self.service, &mut self.asked);
        // One runtime for the whole pass: entering it is in no time.
        runtime.block_on(async {
            let mut running: VecDeque<String> = VecDeque::with_capacity(in_flight + 1);
            for prompt in prompts.iter() {
                *asked += 1;
                let request_id = format!("request-{asked}");
                let request = request(prompt, given, request_id.clone());
                let start = Instant::now();
                let selected = service.select_and_reserve(request).await;
                let decide_ns = since(start);
                selected.map_err(failed)?;
                running.push_back(request_id);
                if running.len() > in_flight
                    && let Some(oldest) = running.pop_front()
                {
                    let start = Instant::now();
                    let freed = service.free_reservation(&oldest).await;
                    timed.take(decide_ns, since(start));
                    freed.map_err(failed)?;
                }
            }
            for request_id in &running {
                service.free_reservation(request_id).await.map_err(failed)?;
            }
            Ok(())
        })
    }
}

fn request(prompt: &Prompt, given: Given, selection_id: String) -> SelectAndReserveRequest {
    let prompt = match given {
        Given::Tokens => PromptRequest { token_ids: Some(prompt.tokens.clone()), ..PromptRequest::default() },
        Given::Hashes => PromptRequest {
            block_hashes: Some(prompt.peer_hashes.clone()),
            sequence_hashes: Some(prompt.peer_sequence.clone()),
            isl_tokens: Some(prompt.tokens.len()),
            ..PromptRequest::default()
        },
    };
    SelectAndReserveRequest {
        model_name: NAME.to_owned(),
        routing_group: NAME.to_owned(),
        selection_id: Some(selection_id),
        prompt,
        router_config_override: None,
        expected_output_tokens: None,
        priority_jump: None,
        strict_priority: None,
        session_id: None,
        session_context: None,
        affinity_target: None,
        pinned_worker: None,
        allowed_worker_ids: None,
        routing_constraints: RoutingConstraints::default(),
    }
}

fn failed(error: impl std::fmt::Display) -> Failure {
    Failure::Peer(error.to_string())
}
