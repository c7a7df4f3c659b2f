//! Services whose answers are fixed.

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use arc_swap::Guard;
use kvrouted::error::{Error, Kind, Result};
use kvrouted::fleet::{Fleet, FleetTable, PoolRole, SchemeCell, Space, WorkerRecord, WorkerState};
use kvrouted::ids::{Scheme, SpaceId, TierBlocks, Window, Worker, WorkerIndex, WorkerSlot};
use kvrouted::limits::WORK_PER_QUANTUM_MAX;
use kvrouted::load::{BookingOutcome, BookingRef, EngineLoad, SessionId, SessionToken};
use kvrouted::requests::{HelloInfo, Routed, Service};
use kvrouted::route::{BookingHandle, CostTerms, Decision, PotentialLoads, RouteRequest, Scored};
use kvrouted::serve::{AdminAnswer, AdminCaller, AdminService};
use kvrouted::trust::Trust;
use kvrouted::wire::{
    AdminReply, AdminRequest, PolicyDone, PolicyOrder, ResetDone, ResetOrder, StatusPage, WorkerStatus,
};

pub(crate) const INSTANCE: u64 = 77;

pub(crate) const WORKERS: u32 = 600;

/// A prompt of this many tokens makes the service panic.
pub(crate) const PANIC_TOKENS: usize = 13;

/// A prompt of this many tokens holds the core up until the gate is open.
pub(crate) const GATE_TOKENS: usize = 17;

/// A prompt of this many tokens is a quarter of the work that a turn may be.
pub(crate) const HEAVY_TOKENS: usize = 19;

/// What a test sees of a service, and holds up.
#[derive(Debug, Default)]
pub(crate) struct Stage {
    /// Tokens of the prompts that were decided, in order.
    pub(crate) decided: Mutex<Vec<usize>>,
    is_open: Mutex<bool>,
    opened: Condvar,
    /// Work that was not reported yet.
    work: AtomicU64,
}

impl Stage {
    /// Lets those go on who are held up.
    pub(crate) fn open(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }
}

pub(crate) fn fleet() -> Arc<Fleet> {
    let record = |n: u32| WorkerRecord {
        space: SpaceId(n % 2),
        name: format!("worker-{n}"),
        batched_tokens_max: 8192,
        taints: vec!["a".into()],
        ..WorkerRecord::new(WorkerIndex(n), Worker::new(u64::from(n), 0), WorkerSlot(n as u16))
    };
    let space = |id: u32, namespace: &str| Space {
        id: SpaceId(id),
        model: "llama".into(),
        namespace: namespace.into(),
        role: PoolRole::Both,
        scheme: Arc::new(SchemeCell::new(Some(Scheme { block_size: 16, window: Window::Plain }))),
    };
    let spaces = vec![space(0, ""), space(1, "other")];
    Arc::new(Fleet::new(FleetTable { version: 0, spaces, workers: (0..WORKERS).map(record).collect() }))
}

/// Answers a route with one worker whose id is the prompt's token count and whose rank is the session.
pub(crate) struct FakeService {
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) admin: PathBuf,
    pub(crate) sessions_open: Arc<AtomicI64>,
    pub(crate) last_session: u32,
    pub(crate) stage: Arc<Stage>,
}

impl Service for FakeService {
    fn hello(&self) -> HelloInfo<'_> {
        HelloInfo { instance_id: INSTANCE, bookings_per_session_max: 5, admin_socket: Some(&self.admin) }
    }

    fn fleet(&self) -> Guard<Arc<FleetTable>> {
        self.fleet.load()
    }

    fn session_opened(&mut self, token: Option<SessionToken>, _peer_uid: u32) -> Result<SessionId> {
        if token == Some(SessionToken { hi: 1, lo: 1 }) {
            return Err(Error::new(Kind::NotPermitted, "another user's session", "draw a token"));
        }
        self.sessions_open.fetch_add(1, Ordering::SeqCst);
        self.last_session += 1;
        Ok(SessionId(self.last_session))
    }

    fn session_closed(&mut self, _session: SessionId) {
        self.sessions_open.fetch_sub(1, Ordering::SeqCst);
    }

    fn route(&mut self, session: SessionId, request: &RouteRequest<'_>, decision: &mut Decision) -> Result<Routed> {
        if request.space.0 > 1 {
            return Err(Error::new(Kind::UnknownSpace, "no such space", "ask hello"));
        }
        let tokens = request.prompt.token_count();
        assert_ne!(tokens, PANIC_TOKENS, "asked to");
        if tokens == GATE_TOKENS {
            drop(self.stage.opened.wait_while(self.stage.is_open.lock().unwrap(), |is_open| !*is_open).unwrap());
        }
        self.stage.decided.lock().unwrap().push(tokens);
        if tokens == HEAVY_TOKENS {
            self.stage.work.fetch_add(WORK_PER_QUANTUM_MAX / 4, Ordering::SeqCst);
        }
        let scored = Scored {
            index: WorkerIndex(7),
            worker: Worker::new(tokens as u64, session.0),
            overlap: TierBlocks { device: 1, ..TierBlocks::default() },
            trust: Trust::default(),
            state: WorkerState::Ready,
            terms: CostTerms { cost: 2.5, ..CostTerms::default() },
        };
        *decision = Decision {
            candidates: vec![scored; request.candidates_max.min(64)],
            eligible: 1,
            ties: 1,
            ..Decision::default()
        };
        decision.booking = request.book.map(|_| BookingHandle { slot: 3, generation: 4 });
        Ok(Routed::Decided)
    }

    fn take_work(&mut self) -> u64 {
        self.stage.work.swap(0, Ordering::SeqCst)
    }

    fn potential_loads(&mut self, _: &RouteRequest<'_>, potential: &mut PotentialLoads) -> Result<()> {
        *potential = PotentialLoads { request_blocks: 1, ..PotentialLoads::default() };
        Ok(())
    }

    fn prefill_complete(&mut self, _: SessionId, booking: &BookingRef<'_>, _: u64) -> Result<BookingOutcome> {
        Ok(outcome(booking))
    }

    fn output_progress(&mut self, _: SessionId, booking: &BookingRef<'_>, tokens: u32) -> Result<BookingOutcome> {
        Ok(if tokens == 0 { BookingOutcome::AlreadyApplied } else { outcome(booking) })
    }

    fn served(&mut self, _: SessionId, booking: &BookingRef<'_>, worker: Worker) -> Result<BookingOutcome> {
        Ok(if worker.id.0 == 0 { BookingOutcome::AlreadyApplied } else { outcome(booking) })
    }

    fn report_load(&mut self, _: SessionId, _: SpaceId, worker: Worker, load: EngineLoad) -> Result<bool> {
        Ok(worker.rank.0 == load.running)
    }

    fn report_failure(&mut self, _: SessionId, _: SpaceId, worker: Worker, reason: &str) -> Result<u32> {
        Ok(worker.rank.0 + reason.len() as u32)
    }

    fn free(&mut self, _: SessionId, booking: &BookingRef<'_>) -> Result<BookingOutcome> {
        Ok(outcome(booking))
    }
}

fn outcome(booking: &BookingRef<'_>) -> BookingOutcome {
    match booking {
        BookingRef::Handle(BookingHandle { slot: 3, generation: 4 }) => BookingOutcome::Applied,
        BookingRef::Request { attempt: 0, .. } => BookingOutcome::Superseded,
        _ => BookingOutcome::Unknown,
    }
}

pub(crate) struct FakeAdmin {
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) admin: PathBuf,
}

impl AdminService for FakeAdmin {
    fn hello(&self) -> HelloInfo<'_> {
        HelloInfo { instance_id: INSTANCE, bookings_per_session_max: 5, admin_socket: Some(&self.admin) }
    }

    fn fleet(&self) -> Guard<Arc<FleetTable>> {
        self.fleet.load()
    }

    fn answer(self: Rc<Self>, _: AdminCaller, request: &AdminRequest<'_>) -> Result<AdminAnswer> {
        let reply = match request {
            AdminRequest::Status { cursor, limit } => AdminReply::Status(self.status_page(*cursor, *limit as usize)),
            AdminRequest::Reset(order) => AdminReply::Reset(self.reset(*order)),
            AdminRequest::SetPolicy(order) => AdminReply::SetPolicy(set_policy(order)?),
            other => return Err(Error::new(Kind::Unsupported, other.kind().name(), "no test asks for it")),
        };
        // As the daemon: a status comes later.
        Ok(match request {
            AdminRequest::Status { .. } => AdminAnswer::Later(Box::pin(async {
                tokio::task::yield_now().await;
                Ok(reply)
            })),
            _ => AdminAnswer::Now(reply),
        })
    }
}

impl FakeAdmin {
    fn status_page(&self, cursor: u32, limit: usize) -> StatusPage {
        let table = self.fleet.load();
        let rest = table.workers.get(cursor as usize..).unwrap_or_default();
        let workers = rest.iter().take(limit).map(|record| WorkerStatus {
            worker: record.worker,
            space: record.space,
            model: "llama".into(),
            name: record.name.clone(),
            state: record.state,
            trust: record.trust.load(),
            blocks_held: 1,
            blocks_by_tier: [1, 0, 0, 0],
            counters: vec![("gaps".into(), u64::from(record.index.0)), ("batches".into(), 1)],
            remedy: None,
            source: "config".into(),
        });
        let workers: Vec<_> = workers.collect();
        let next_cursor = (rest.len() > workers.len()).then(|| cursor + workers.len() as u32);
        StatusPage { workers, next_cursor, instance_id: INSTANCE, ..StatusPage::default() }
    }

    fn reset(&self, order: ResetOrder) -> ResetDone {
        let worker = order.worker;
        let workers =
            self.fleet.load().workers.iter().filter(|record| worker.is_none_or(|of| of == record.worker)).count();
        ResetDone { workers: workers as u32, snapshots: 1 }
    }
}

fn set_policy(order: &PolicyOrder<'_>) -> Result<PolicyDone> {
    match order {
        PolicyOrder::Shadow { share, .. } => Ok(PolicyDone { policy_version: 1, shadow_share: *share }),
        PolicyOrder::Promote => Ok(PolicyDone { policy_version: 2, shadow_share: 0.0 }),
        PolicyOrder::EndShadow => Err(Error::new(Kind::InvalidArgument, "no shadow", "none")),
    }
}
