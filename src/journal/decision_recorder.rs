//! The recorder of a serving thread's decisions: which decisions are sampled, and the queue to the thread that writes
//! them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::Thread;

use super::decision_record::DecisionRecord;
use super::identity::{IdentityHasher, fold, identities};
use crate::ids::{LocalHash, SpaceId};
use crate::limits::{
    JOURNAL_BUFFER_WORKERS_KEPT, JOURNAL_IDENTITIES_PER_WORKER, JOURNAL_WAITING_WORKERS_MAX, JOURNAL_WORKER_BYTES,
};
use crate::recycling_queue::{QueueBounds, Recycle, RecyclingQueue, Wake};
use crate::route::{Decision, Observation, Policy, RouteRequest};

/// A share of the requests, as the highest key in it; 0 = no request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Share(u64);

impl Share {
    /// Keys are spread evenly over all numbers of 64 bits.
    fn of(share: f64) -> Self {
        // The cast saturates: a share of 1 is every key.
        Self((share.clamp(0.0, 1.0) * u64::MAX as f64) as u64)
    }

    const fn has(self, key: u64) -> bool {
        self.0 != 0 && key <= self.0
    }
}

/// The shares of decisions that are sampled for the journal and for the shadow policy. Every serving thread reads them
/// for each decision.
///
/// Relaxed everywhere: a thread may see a new share some decisions late, and nothing else depends on it.
#[derive(Debug, Default)]
pub struct SampleShares {
    journal: AtomicU64,
    shadow: AtomicU64,
}

impl SampleShares {
    /// Sets the share of requests that are written, 0 to 1.
    pub fn set_journal(&self, share: f64) {
        self.journal.store(Share::of(share).0, Ordering::Relaxed);
    }

    /// Sets the share of decisions that a shadow policy judges, 0 to 1.
    pub fn set_shadow(&self, share: f64) {
        self.shadow.store(Share::of(share).0, Ordering::Relaxed);
    }

    /// The share of decisions that a shadow policy judges, 0 to 1.
    #[must_use]
    pub fn shadow(&self) -> f64 {
        self.shadow.load(Ordering::Relaxed) as f64 / u64::MAX as f64
    }

    /// Whether no decision is sampled.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.journal.load(Ordering::Relaxed) == 0 && self.shadow.load(Ordering::Relaxed) == 0
    }

    fn journal_has(&self, key: u64) -> bool {
        Share(self.journal.load(Ordering::Relaxed)).has(key)
    }

    fn shadow_has(&self, seed: u64) -> bool {
        Share(self.shadow.load(Ordering::Relaxed)).has(seed)
    }
}

/// By what the journal samples a request. Requests with equal keys are recorded together or not at all: those of one
/// session, or the attempts of one request without a session. So a sample is a thinner load, with all turns of its
/// conversations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestSample {
    /// `None` = neither session nor booking: each decision is drawn by its seed.
    key: Option<u64>,
    session: Option<u64>,
    /// Whether the journal records what becomes of the booking, if the request makes one.
    pub is_recorded: bool,
}

/// What a recorder notes of a request beside its decision.
#[derive(Clone, Copy, Debug, Default)]
pub struct NotedRequest<'a> {
    /// As [`DecisionRecorder::sample`] said before the decision.
    pub sample: RequestSample,
    /// How long it waited in the daemon's queue, nanoseconds.
    pub waited_ns: u64,
    /// Output tokens that its gateway expects; 0 = unknown.
    pub expected_output_tokens: u32,
    /// The hashes of its prompt's blocks; `None` = they are unknown.
    pub locals: Option<&'a [LocalHash]>,
}

/// A sampled decision on its way to the writer.
#[derive(Debug, Default)]
pub(super) struct QueuedDecision {
    pub(super) record: DecisionRecord,
    /// Sampled decisions of the same thread that were lost just before this one.
    pub(super) lost_before: u64,
    /// Whether the journal samples it.
    pub(super) is_written: bool,
    /// Whether the shadow policy judges it.
    pub(super) is_judged: bool,
}

/// A queued decision weighs as much as the workers that it was made from, and the identities of its prompt.
impl Recycle for Box<QueuedDecision> {
    fn weight(&self) -> usize {
        weight(self.record.observation.workers.len(), self.record.identity.prefix.len())
    }

    fn clear(&mut self) {
        let workers = &mut self.record.observation.workers;
        workers.clear();
        workers.shrink_to(JOURNAL_BUFFER_WORKERS_KEPT);
        self.record.identity.prefix.clear();
    }
}

const fn weight(workers: usize, identities: usize) -> usize {
    workers + identities / JOURNAL_IDENTITIES_PER_WORKER
}

/// The decisions of one serving thread that wait for the writer.
#[derive(Debug)]
pub struct DecisionQueue(RecyclingQueue<Box<QueuedDecision>>);

impl DecisionQueue {
    /// A queue with room for `records_max` decisions, and for `workers_max` workers in all of them.
    #[must_use]
    pub fn new(records_max: usize, workers_max: usize) -> Self {
        let weight_max = workers_max.min(JOURNAL_WAITING_WORKERS_MAX);
        let bounds = QueueBounds { items_max: records_max, weight_max };
        Self(RecyclingQueue::new(bounds, Wake::HalfFull))
    }

    /// Memory of the decisions that wait, bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.weight() as u64 * JOURNAL_WORKER_BYTES
    }

    /// Sets the writer's thread, which is woken whenever the queue gets half full.
    pub(super) fn set_consumer(&self, writer: Thread) {
        self.0.set_consumer(writer);
    }

    /// The decision that has waited longest. Pass it to [`recycle`](Self::recycle) afterwards.
    pub(super) fn pop(&self) -> Option<Box<QueuedDecision>> {
        self.0.pop()
    }

    /// Takes a popped decision back, so that its buffers are used again.
    pub(super) fn recycle(&self, queued: Box<QueuedDecision>) {
        self.0.recycle(queued);
    }
}

/// What [`DecisionRecorder::note`] did with a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Noted {
    /// The decision is in neither sample.
    NotSampled,
    /// It is on its way to the writer.
    Queued,
    /// The queue is full. The decision is lost; the next one that is queued says so.
    Lost,
}

/// One serving thread's end of its queue.
#[derive(Debug)]
pub struct DecisionRecorder {
    queue: Arc<DecisionQueue>,
    shares: Arc<SampleShares>,
    hasher: IdentityHasher,
    /// Sampled decisions lost since the last one that was queued.
    lost: u64,
}

impl DecisionRecorder {
    /// Queues into `queue` the decisions that `shares` sample, with identities by `hasher`.
    #[must_use]
    pub const fn new(queue: Arc<DecisionQueue>, shares: Arc<SampleShares>, hasher: IdentityHasher) -> Self {
        Self { queue, shares, hasher, lost: 0 }
    }

    /// Whether no decision is sampled.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.shares.is_off()
    }

    /// By what the journal samples a request. Ask before the request is booked.
    #[must_use]
    pub fn sample(&self, request: &RouteRequest<'_>) -> RequestSample {
        if self.is_off() {
            return RequestSample::default();
        }
        let named = request.affinity_session.filter(|name| !name.is_empty());
        let session = named.map(|name| self.hasher.session(name));
        let key = session.or_else(|| request.book.map(|book| self.hasher.request(book.request_id)));
        RequestSample { key, session, is_recorded: key.is_some_and(|key| self.shares.journal_has(key)) }
    }

    /// Whether [`note`](Self::note) would take this decision.
    #[must_use]
    pub fn takes(&self, decision: &Decision, sample: RequestSample) -> bool {
        self.is_written(decision, sample) || self.shares.shadow_has(decision.seed)
    }

    fn is_written(&self, decision: &Decision, sample: RequestSample) -> bool {
        self.shares.journal_has(sample.key.unwrap_or(decision.seed))
    }

    /// Queues a decision, if it is sampled, with the observation that it was made from. `at_ns` is its time,
    /// nanoseconds since the daemon started. It allocates nothing once enough buffers circulate and each has room for
    /// the workers of a space and for the longest prompt's identities: see `RecyclingQueue`.
    pub fn note(
        &mut self,
        (at_ns, space): (u64, SpaceId),
        policy: &Policy,
        observation: &Observation,
        (decision, request): (&Decision, &NotedRequest<'_>),
    ) -> Noted {
        let (is_written, is_judged) =
            (self.is_written(decision, request.sample), self.shares.shadow_has(decision.seed));
        if !is_written && !is_judged {
            return Noted::NotSampled;
        }
        let lost_before = self.lost;
        let block_size = observation.request.block_size;
        let blocks_each = self.hasher.blocks_each(block_size).filter(|_| is_written);
        let prefix = blocks_each.zip(request.locals);
        let fill = |queued: &mut Box<QueuedDecision>| {
            queued.record.copy_from((at_ns, space), policy, observation, decision);
            (queued.lost_before, queued.is_written, queued.is_judged) = (lost_before, is_written, is_judged);
            let identity = &mut queued.record.identity;
            identity.booking = decision.booking.map(|handle| handle.generation);
            (identity.session, identity.waited_ns) = (request.sample.session, request.waited_ns);
            identity.expected_output_tokens = request.expected_output_tokens;
            identity.prefix_tokens = prefix.map_or(0, |(blocks_each, _)| blocks_each as u32 * block_size);
            match prefix {
                Some((blocks_each, locals)) => fold(locals, blocks_each, &mut identity.prefix),
                None => identity.prefix.clear(),
            }
        };
        let identities = prefix.map_or(0, |(blocks_each, locals)| identities(locals.len(), blocks_each));
        if self.queue.0.push(weight(observation.workers.len(), identities), fill) {
            self.lost = 0;
            Noted::Queued
        } else {
            self.lost += 1;
            Noted::Lost
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::route::{BookingRequest, Prompt};

    fn noted(recorder: &mut DecisionRecorder, seed: u64) -> Noted {
        noted_of(recorder, seed, RequestSample::default())
    }

    fn noted_of(recorder: &mut DecisionRecorder, seed: u64, sample: RequestSample) -> Noted {
        let decision = Decision { seed, ..Decision::default() };
        let noted = NotedRequest { sample, ..NotedRequest::default() };
        recorder.note((seed, SpaceId(0)), &Policy::default(), &Observation::default(), (&decision, &noted))
    }

    fn recorder(records_max: usize) -> (Arc<DecisionQueue>, Arc<SampleShares>, DecisionRecorder) {
        let (queue, shares) =
            (Arc::new(DecisionQueue::new(records_max, usize::MAX)), Arc::new(SampleShares::default()));
        let recorder = DecisionRecorder::new(Arc::clone(&queue), Arc::clone(&shares), IdentityHasher::new(64));
        (queue, shares, recorder)
    }

    #[test]
    fn a_full_queue_loses_decisions_and_the_next_one_says_how_many() {
        let (queue, shares, mut recorder) = recorder(2);
        assert_eq!(noted(&mut recorder, 1), Noted::NotSampled);
        shares.set_journal(1.0);
        let noted: Vec<_> = (0..5).map(|seed| noted(&mut recorder, seed)).collect();
        assert_eq!(noted, [Noted::Queued, Noted::Queued, Noted::Lost, Noted::Lost, Noted::Lost]);
        let first = queue.pop().expect("the first");
        assert_eq!((first.record.at_ns, first.lost_before, first.is_written, first.is_judged), (0, 0, true, false));
        queue.recycle(first);
        assert_eq!(self::noted(&mut recorder, 9), Noted::Queued);
        let queued: Vec<_> = std::iter::from_fn(|| queue.pop()).map(|of| (of.record.at_ns, of.lost_before)).collect();
        assert_eq!(queued, [(1, 0), (9, 3)]);
    }

    #[test]
    fn a_share_selects_by_the_seed_and_a_share_of_zero_selects_nothing() {
        assert!(Share::of(1.0).has(u64::MAX) && Share::of(1.0).has(0) && Share::of(2.0).has(u64::MAX));
        assert!(!Share::of(0.0).has(0) && !Share::of(f64::NAN).has(0) && !Share::of(-1.0).has(0));
        assert!(Share::of(0.5).has(u64::MAX / 2 - 1024) && !Share::of(0.5).has(u64::MAX / 2 + 2048));
    }

    /// A request of a session and with a booking, if they have names.
    fn request<'a>(session: Option<&'a str>, request_id: Option<&'a str>) -> RouteRequest<'a> {
        let book = request_id.map(|request_id| BookingRequest { request_id, attempt: 0 });
        RouteRequest { affinity_session: session, book, ..RouteRequest::new(SpaceId(0), Prompt::of_tokens(&[])) }
    }

    #[test]
    fn a_session_is_sampled_as_a_whole_and_so_are_the_attempts_of_a_request() {
        let (queue, shares, mut recorder) = recorder(1 << 12);
        assert_eq!(recorder.sample(&request(Some("s"), Some("r"))), RequestSample::default(), "nothing is recorded");
        shares.set_journal(0.3);
        let mut sessions = 0;
        for number in 0..200 {
            let (session, name) = (format!("s{number}"), format!("r{number}"));
            let is_recorded = recorder.sample(&request(Some(&session), Some("a"))).is_recorded;
            sessions += u32::from(is_recorded);
            for turn in ["b", "c"] {
                assert_eq!(recorder.sample(&request(Some(&session), Some(turn))).is_recorded, is_recorded);
            }
            let attempts = [0, 1].map(|_| recorder.sample(&request(None, Some(&name))));
            assert_eq!(attempts[0], attempts[1]);
            for (seed, attempt) in attempts.into_iter().enumerate() {
                let queued = noted_of(&mut recorder, u64::MAX - seed as u64, attempt) == Noted::Queued;
                assert_eq!(queued, attempt.is_recorded, "whatever the seed");
            }
        }
        assert!((30..90).contains(&sessions), "{sessions} of 200");
        assert_eq!(recorder.sample(&request(Some(""), None)), RequestSample::default(), "it is drawn by its seed");
        assert!(
            std::iter::from_fn(|| queue.pop())
                .all(|queued| queued.is_written && queued.record.identity.session.is_none())
        );
    }

    #[test]
    fn the_journal_and_the_shadow_policy_sample_by_their_own_shares() {
        let (queue, shares, mut recorder) = recorder(8);
        shares.set_journal(0.25);
        shares.set_shadow(0.75);
        for quarter in [0, 1, 3] {
            noted(&mut recorder, u64::MAX / 4 * quarter + 1_000_000);
        }
        let queued: Vec<_> = std::iter::from_fn(|| queue.pop()).map(|of| (of.is_written, of.is_judged)).collect();
        assert_eq!(queued, [(true, true), (false, true)]);
        shares.set_shadow(0.0);
        assert!(!shares.is_off());
        shares.set_journal(0.0);
        assert!(shares.is_off());
    }
}
