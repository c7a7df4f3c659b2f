//! The queue against an unsorted list.

use proptest::prelude::*;

use super::*;
use crate::ids::WorkerIndex;

const LIMITS: QueueLimits = QueueLimits { requests_max: 12, bytes_max: 60, sets_max: 5, user_sets_max: 3 };
const WORKERS: u32 = 5;

#[derive(Clone, Debug)]
enum Step {
    Push { claim: Claim, workers: Vec<u32> },
    NextFor { worker: u32 },
    NextWhere { busy: u8 },
    TakeBack { nth: usize },
    Finish { nth: usize },
    PutBack { nth: usize, workers: Vec<u32> },
    Cancel { nth: usize },
    Expire,
    Drain,
}

fn claims() -> impl Strategy<Value = Claim> {
    let deadlines = prop_oneof![2 => Just(None), 1 => (0..60_u64).prop_map(Some)];
    let discipline = prop::sample::select(Discipline::ALL.to_vec());
    (discipline, -1..2_i32, 0..3_u32, deadlines, 1..80_u64, 0..3_u64, (0..12_usize, 0..3_u32)).prop_map(
        |(discipline, priority, jump, deadline_ns, ends_ns, prefill_tokens, (bytes, user))| Claim {
            discipline,
            priority,
            jump: f64::from(jump),
            deadline_ns,
            ends_ns: deadline_ns.map_or(ends_ns, |deadline| deadline.min(ends_ns)),
            prefill_tokens,
            bytes,
            user,
        },
    )
}

fn steps() -> impl Strategy<Value = Step> {
    let workers = || prop::collection::vec(0..WORKERS, 1..4);
    prop_oneof![
        8 => (claims(), workers()).prop_map(|(claim, workers)| Step::Push { claim, workers }),
        4 => (0..WORKERS).prop_map(|worker| Step::NextFor { worker }),
        2 => any::<u8>().prop_map(|busy| Step::NextWhere { busy }),
        1 => (0..20_usize).prop_map(|nth| Step::TakeBack { nth }),
        2 => (0..4_usize).prop_map(|nth| Step::Finish { nth }),
        3 => (0..4_usize, workers()).prop_map(|(nth, workers)| Step::PutBack { nth, workers }),
        2 => (0..20_usize).prop_map(|nth| Step::Cancel { nth }),
        2 => Just(Step::Expire),
        1 => Just(Step::Drain),
    ]
}

struct Entry {
    ticket: Ticket,
    rank: Rank,
    claim: Claim,
    since_ns: u64,
    workers: Vec<WorkerIndex>,
}

/// All waiting requests, and all dispatched ones with whether they were cancelled.
#[derive(Default)]
struct Model {
    waiting: Vec<Entry>,
    dispatched: Vec<(Dequeued<u64>, Entry, bool)>,
    given: u64,
    is_closed: bool,
}

fn set(workers: &[u32]) -> Vec<WorkerIndex> {
    let mut set: Vec<_> = workers.iter().map(|worker| WorkerIndex(*worker)).collect();
    set.sort_unstable();
    set.dedup();
    set
}

impl Model {
    fn bytes(&self) -> usize {
        self.waiting.iter().map(|entry| entry.claim.bytes).sum()
    }

    fn full_for(&self, claim: &Claim, workers: &[WorkerIndex]) -> Option<QueueFull> {
        let sets_where = |holds: &dyn Fn(&Entry) -> bool| {
            let mut sets: Vec<_> =
                self.waiting.iter().filter(|entry| holds(entry)).map(|entry| entry.workers.as_slice()).collect();
            sets.sort_unstable();
            sets.dedup();
            sets
        };
        let (sets, of_user) = (sets_where(&|_| true), sets_where(&|entry| entry.claim.user == claim.user));
        match () {
            () if self.is_closed => Some(QueueFull::Closed),
            () if self.waiting.len() >= LIMITS.requests_max => Some(QueueFull::Requests),
            () if self.bytes() + claim.bytes > LIMITS.bytes_max => Some(QueueFull::Bytes),
            () if sets.len() >= LIMITS.sets_max && !sets.contains(&workers) => Some(QueueFull::Sets),
            () if of_user.len() >= LIMITS.user_sets_max && !of_user.contains(&workers) => Some(QueueFull::UserSets),
            () => None,
        }
    }

    /// The first request in order for which `holds` is true.
    fn first(&self, holds: impl Fn(&Entry) -> bool) -> Option<usize> {
        let found = self.waiting.iter().enumerate().filter(|(_, entry)| holds(entry));
        found.min_by_key(|(_, entry)| entry.rank).map(|(at, _)| at)
    }

    fn takes(&mut self, at: Option<usize>, taken: Option<Dequeued<u64>>) {
        assert_eq!(taken.as_ref().map(|taken| taken.ticket), at.map(|at| self.waiting[at].ticket));
        if let (Some(at), Some(taken)) = (at, taken) {
            let entry = self.waiting.swap_remove(at);
            assert_eq!((taken.since_ns, taken.what), (entry.since_ns, entry.ticket.0));
            self.dispatched.push((taken, entry, false));
        }
    }
}

fn push(queue: &mut Queue<u64>, model: &mut Model, now_ns: u64, claim: &Claim, workers: &[u32]) {
    let workers_set = set(workers);
    let unsorted: Vec<_> = workers.iter().rev().map(|worker| WorkerIndex(*worker)).collect();
    let pushed = queue.push(now_ns, claim, &unsorted, model.given);
    match model.full_for(claim, &workers_set) {
        Some(full) => assert_eq!(pushed, Err((full, model.given))),
        None => {
            let ticket = Ticket(model.given);
            assert_eq!(pushed, Ok(ticket));
            let rank = Rank::new(claim, now_ns, model.given);
            model.waiting.push(Entry { ticket, rank, claim: *claim, since_ns: now_ns, workers: workers_set });
            model.given += 1;
        }
    }
}

fn put_back(queue: &mut Queue<u64>, model: &mut Model, nth: usize, workers: &[u32]) {
    if nth >= model.dispatched.len() {
        return;
    }
    let (taken, entry, is_cancelled) = model.dispatched.swap_remove(nth);
    let what = taken.what;
    let became = queue.put_back(taken, &set(workers));
    match (is_cancelled, model.is_closed) {
        (true, _) => assert_eq!(became, Requeued::Cancelled(what)),
        (false, true) => assert_eq!(became, Requeued::Closed(what)),
        (false, false) => {
            assert_eq!(became, Requeued::Waits);
            model.waiting.push(Entry { workers: set(workers), ..entry });
        }
    }
}

fn cancel(queue: &mut Queue<u64>, model: &mut Model, nth: usize) {
    let ticket = Ticket(nth as u64);
    let waits = model.waiting.iter().position(|entry| entry.ticket == ticket);
    assert_eq!(queue.cancel(ticket), waits.map(|_| ticket.0));
    waits.map(|at| model.waiting.swap_remove(at));
    for (taken, _, is_cancelled) in &mut model.dispatched {
        *is_cancelled |= taken.ticket == ticket;
    }
}

fn expire(queue: &mut Queue<u64>, model: &mut Model, now_ns: u64) {
    let due = model.waiting.iter().filter(|entry| entry.claim.ends_ns <= now_ns);
    let mut due: Vec<_> = due.map(|entry| (entry.claim.ends_ns, entry.ticket)).collect();
    due.sort_unstable();
    let expired: Vec<_> = std::iter::from_fn(|| queue.next_expired(now_ns)).collect();
    assert_eq!(expired.iter().map(|taken| (taken.ends_ns, taken.ticket)).collect::<Vec<_>>(), due);
    model.waiting.retain(|entry| entry.claim.ends_ns > now_ns);
}

fn take(queue: &mut Queue<u64>, model: &mut Model, step: &Step) {
    match step {
        Step::NextFor { worker } => {
            let worker = WorkerIndex(*worker);
            let first = model.first(|entry| entry.workers.contains(&worker));
            model.takes(first, queue.next_for(worker));
        }
        Step::NextWhere { busy } => {
            let has_room = |worker: WorkerIndex| busy >> worker.0 & 1 == 0;
            let first = model.first(|entry| entry.workers.iter().any(|worker| has_room(*worker)));
            model.takes(first, queue.next_where(has_room));
        }
        Step::TakeBack { nth } => {
            let first = model.first(|entry| entry.ticket.0 == *nth as u64);
            model.takes(first, queue.take_back(Ticket(*nth as u64)));
        }
        _ => {}
    }
}

fn apply(queue: &mut Queue<u64>, model: &mut Model, now_ns: u64, step: &Step) {
    match step {
        Step::Push { claim, workers } => push(queue, model, now_ns, claim, workers),
        Step::NextFor { .. } | Step::NextWhere { .. } | Step::TakeBack { .. } => take(queue, model, step),
        Step::Finish { nth } if *nth < model.dispatched.len() => {
            let (taken, _, is_cancelled) = model.dispatched.swap_remove(*nth);
            assert_eq!(queue.finish(taken.ticket, now_ns), is_cancelled);
        }
        Step::Finish { .. } => {}
        Step::PutBack { nth, workers } => put_back(queue, model, *nth, workers),
        Step::Cancel { nth } => cancel(queue, model, *nth),
        Step::Expire => expire(queue, model, now_ns),
        Step::Drain => {
            let mut drained: Vec<_> = queue.drain().into_iter().map(|(_, what)| what).collect();
            drained.sort_unstable();
            let mut waited: Vec<_> = model.waiting.drain(..).map(|entry| entry.ticket.0).collect();
            waited.sort_unstable();
            assert_eq!(drained, waited);
            model.is_closed = true;
        }
    }
}

proptest! {
    #[test]
    fn the_queue_equals_an_unsorted_list(steps in prop::collection::vec(steps(), 1..200)) {
        let (mut queue, mut model) = (Queue::new(LIMITS), Model::default());
        for (now_ns, step) in steps.iter().enumerate() {
            apply(&mut queue, &mut model, now_ns as u64 / 2, step);
            prop_assert_eq!((queue.len(), queue.bytes()), (model.waiting.len(), model.bytes()));
            prop_assert_eq!(queue.next_end_ns(), model.waiting.iter().map(|entry| entry.claim.ends_ns).min());
            let mut order: Vec<_> = model.waiting.iter().map(|entry| (entry.rank, entry.ticket)).collect();
            order.sort_unstable();
            prop_assert_eq!(queue.tickets(), order.into_iter().map(|(_, ticket)| ticket).collect::<Vec<_>>());
            prop_assert_eq!(queue.is_empty(), model.waiting.is_empty());
        }
    }
}

const CLAIM: Claim = Claim {
    discipline: Discipline::Fcfs,
    priority: 0,
    jump: 0.0,
    deadline_ns: None,
    ends_ns: u64::MAX,
    prefill_tokens: 1,
    bytes: 1,
    user: 0,
};

#[test]
fn a_blocked_request_does_not_block_others() {
    let mut queue = Queue::new(LIMITS);
    queue.push(0, &Claim { priority: 9, ..CLAIM }, &[WorkerIndex(1)], "first, and stuck").unwrap();
    queue.push(1, &CLAIM, &[WorkerIndex(1), WorkerIndex(2)], "either").unwrap();
    queue.push(2, &CLAIM, &[WorkerIndex(3)], "another").unwrap();
    let mut next = |worker| queue.next_for(WorkerIndex(worker)).map(|taken| taken.what);
    assert_eq!([next(3), next(2), next(2)], [Some("another"), Some("either"), None]);
    assert_eq!([next(1), next(1)], [Some("first, and stuck"), None]);
}

#[test]
fn a_request_that_is_put_back_keeps_its_rank() {
    let mut queue = Queue::new(LIMITS);
    let set = [WorkerIndex(1)];
    let first = queue.push(0, &CLAIM, &set, "first").unwrap();
    queue.push(1, &CLAIM, &set, "second").unwrap();
    let taken = queue.next_for(set[0]).unwrap();
    assert_eq!((taken.ticket, queue.len()), (first, 1));
    assert_eq!(queue.put_back(taken, &[WorkerIndex(2), WorkerIndex(1)]), Requeued::Waits);
    assert_eq!(queue.next_for(set[0]).map(|taken| taken.what), Some("first"));
}

#[test]
fn retry_after_is_about_the_time_to_serve_one_request() {
    let mut queue = Queue::new(LIMITS);
    assert_eq!(queue.retry_after_ns(), crate::limits::QUEUE_RETRY_NS_MIN);
    for at in 0..100 {
        let ticket = queue.push(0, &CLAIM, &[WorkerIndex(1)], at).unwrap();
        queue.next_for(WorkerIndex(1)).unwrap();
        assert!(!queue.finish(ticket, at * 20_000_000));
    }
    assert!((15_000_000..=20_000_000).contains(&queue.retry_after_ns()), "{}", queue.retry_after_ns());
}
