//! Busy-polling: a serving thread checks for work in a loop instead of going to sleep.
//!
//! A thread that sleeps takes tens of microseconds to wake, as long as many requests take. A thread that polls sees a
//! request at once, and costs its processor meanwhile. So a core polls for at most `spin_us_max`, and only while
//! requests arrive that close together ([`SpinController`]). Off, which is the default, it costs nothing.
//!
//! # Rounds
//!
//! In every round the runtime asks the kernel about every socket and the clock about every timer. A poll of one lane is
//! a load from memory, and a poll of one socket is a try to read from it: both cost less than a round. Only polls
//! discover data in a lane, so the polled lanes share a number of polls between two rounds. A connection that had all
//! of the last few requests is polled for longer before the others have their round. Only such a connection's socket is
//! polled by itself: where several sockets are busy, the kernel reports at once which are.
//!
//! A connection is polled only for a while after its last request. The task that polls it calls [`BusyPoll::on_work`]
//! when it finds something; otherwise it yields and polls again while [`BusyPoll::is_polling`], or waits to be woken.

use std::cell::Cell;
use std::hint;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::Notify;

use super::io_backend::Stream;
use crate::limits::{POLLS_ALONE_AFTER, POLLS_PER_ROUND, POLLS_PER_ROUND_ALONE, SPIN_PROBE_EVERY};
use crate::metrics::{CoreCounter, CounterSet};

/// The state of a core between two pieces of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SpinState {
    /// Work has come since the core was last idle.
    Busy,
    /// The core polls, and has found nothing in `rounds` rounds.
    Polling { since_ns: u64, rounds: u64 },
    /// The core sleeps until something wakes it.
    Asleep { since_ns: u64 },
}

/// The next step of an idle core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IdleStep {
    Poll,
    Sleep {
        /// The core has polled for as long as it may, and found nothing.
        in_vain: bool,
    },
}

/// Decides whether an idle core polls or sleeps. Pure: its times are nanoseconds of any clock.
#[derive(Clone, Copy, Debug)]
struct SpinController {
    max_ns: u64,
    state: SpinState,
    /// Moving average of the time between two pieces of work.
    gap_ns: u64,
    /// Idle times since the core last polled regardless of the average.
    since_probe: u32,
}

impl SpinController {
    /// A controller that polls for up to `max_ns`. The core begins asleep.
    const fn new(max_ns: u64) -> Self {
        Self { max_ns, state: SpinState::Asleep { since_ns: 0 }, gap_ns: Self::longest_gap(max_ns), since_probe: 0 }
    }

    /// The longest gap that enters the average. One silence between two bursts, however long, so does not keep the core
    /// from polling in the second burst.
    const fn longest_gap(max_ns: u64) -> u64 {
        max_ns.saturating_mul(2)
    }

    /// Notes that work has come. `true` = polling found it where the core would have slept.
    fn on_work(&mut self, now_ns: u64) -> bool {
        let found = match self.state {
            SpinState::Busy => false,
            SpinState::Polling { since_ns, rounds } => {
                let gap_ns = now_ns.saturating_sub(since_ns);
                if self.gap_ns > self.max_ns {
                    // This was a probe. Gaps measured asleep include the time to wake.
                    self.gap_ns = gap_ns;
                } else {
                    self.learn(gap_ns);
                }
                rounds > 0
            }
            SpinState::Asleep { since_ns } => {
                self.learn(now_ns.saturating_sub(since_ns));
                false
            }
        };
        self.state = SpinState::Busy;
        found
    }

    fn learn(&mut self, gap_ns: u64) {
        let gap_ns = gap_ns.min(Self::longest_gap(self.max_ns));
        self.gap_ns = self.gap_ns - self.gap_ns / 4 + gap_ns / 4;
    }

    /// Whether the core polls, or will when it is idle.
    const fn will_poll(&self) -> bool {
        match self.state {
            SpinState::Busy => self.gap_ns <= self.max_ns || self.is_probe_due(),
            SpinState::Polling { .. } => true,
            SpinState::Asleep { .. } => false,
        }
    }

    /// Whether the core polls next time regardless of the average.
    const fn is_probe_due(&self) -> bool {
        self.since_probe + 1 >= SPIN_PROBE_EVERY
    }

    /// The core has nothing to do.
    fn on_idle(&mut self, now_ns: u64) -> IdleStep {
        match self.state {
            SpinState::Busy => {
                if self.will_poll() {
                    self.since_probe = 0;
                    self.state = SpinState::Polling { since_ns: now_ns, rounds: 0 };
                    return IdleStep::Poll;
                }
                self.since_probe += 1;
                self.state = SpinState::Asleep { since_ns: now_ns };
                IdleStep::Sleep { in_vain: false }
            }
            SpinState::Polling { since_ns, rounds } if now_ns.saturating_sub(since_ns) < self.max_ns => {
                self.state = SpinState::Polling { since_ns, rounds: rounds + 1 };
                IdleStep::Poll
            }
            SpinState::Polling { since_ns, .. } => {
                self.state = SpinState::Asleep { since_ns };
                IdleStep::Sleep { in_vain: true }
            }
            SpinState::Asleep { .. } => IdleStep::Sleep { in_vain: false },
        }
    }
}

/// A core's spin controller, and the task that keeps the core awake.
#[derive(Debug)]
pub(super) struct BusyPoll {
    /// `None` = the core never polls.
    controller: Option<Cell<SpinController>>,
    started: Instant,
    /// The time of the last round in which the core was awake: the clock is read once a round.
    clock_ns: Cell<u64>,
    /// Wakes the task when work has come.
    busy: Notify,
    counters: Arc<CounterSet<CoreCounter>>,
}

impl BusyPoll {
    /// Busy-polling for up to `max_us` microseconds; 0 = never.
    pub(super) fn new(max_us: u32, counters: Arc<CounterSet<CoreCounter>>) -> Self {
        let controller = (max_us > 0).then(|| Cell::new(SpinController::new(u64::from(max_us) * 1000)));
        Self { controller, started: Instant::now(), clock_ns: Cell::new(0), busy: Notify::new(), counters }
    }

    fn read_clock(&self) -> u64 {
        self.clock_ns.set(self.started.elapsed().as_nanos() as u64);
        self.clock_ns.get()
    }

    /// The time, as of the current round. Valid only while the core is awake.
    const fn clock_ns(&self) -> u64 {
        self.clock_ns.get()
    }

    /// Notes that the caller has found work.
    pub(super) fn on_work(&self) {
        let Some(cell) = &self.controller else { return };
        let mut controller = cell.get();
        let was_asleep = matches!(controller.state, SpinState::Asleep { .. });
        if controller.on_work(if was_asleep { self.read_clock() } else { self.clock_ns() }) {
            self.counters.bump(CoreCounter::SpinsPaid);
        }
        cell.set(controller);
        if was_asleep {
            self.busy.notify_one();
        }
    }

    /// Whether the core polls, or will when it is idle. A task that can poll yields and polls again while this holds.
    /// Otherwise it waits to be woken.
    fn is_polling(&self) -> bool {
        self.controller.as_ref().is_some_and(|controller| controller.get().will_poll())
    }

    /// Keeps the core awake while it polls, for ever. Each yield lets the runtime check its sockets without waiting.
    pub(super) async fn run(&self) {
        let Some(cell) = &self.controller else { return };
        loop {
            self.busy.notified().await;
            loop {
                let mut controller = cell.get();
                let step = controller.on_idle(self.read_clock());
                cell.set(controller);
                if let IdleStep::Sleep { in_vain } = step {
                    if in_vain {
                        self.counters.bump(CoreCounter::SpinsInVain);
                    }
                    break;
                }
                tokio::task::yield_now().await;
            }
        }
    }
}

/// The polls of a core, which its connections share.
#[derive(Debug)]
pub(super) struct PollShares {
    busy_poll: Rc<BusyPoll>,
    /// The longest time that one connection is polled, nanoseconds.
    ns_max: u64,
    /// Connections that are being polled.
    polling: Cell<u32>,
    /// The connection that had the last piece of work, and how many in a row.
    streak: Cell<(u64, u32)>,
    /// Polls that a connection with all of the last work still has until the next round, over all its reads.
    left: Cell<u32>,
    /// The time of the round for which `left` was set.
    round_ns: Cell<u64>,
}

impl PollShares {
    /// Shares of a core that polls one connection for up to `us_max` microseconds.
    pub(super) fn new(busy_poll: &Rc<BusyPoll>, us_max: u32) -> Rc<Self> {
        let ns_max = u64::from(us_max) * 1000;
        let (busy_poll, left) = (Rc::clone(busy_poll), Cell::new(POLLS_PER_ROUND_ALONE));
        let (polling, streak, round_ns) = (Cell::new(0), Cell::default(), Cell::new(0));
        Rc::new(Self { busy_poll, ns_max, polling, streak, left, round_ns })
    }

    /// Polls that are left in this round to a connection with all of the last work.
    fn left(&self) -> u32 {
        if self.round_ns.replace(self.busy_poll.clock_ns()) != self.busy_poll.clock_ns() {
            self.left.set(POLLS_PER_ROUND_ALONE);
        }
        self.left.get()
    }
}

/// Polls one connection.
#[derive(Debug)]
pub(super) struct Poller {
    shares: Rc<PollShares>,
    connection: u64,
}

impl Poller {
    /// A poller of the connection with this number on its core.
    pub(super) fn new(shares: &Rc<PollShares>, connection: u64) -> Self {
        Self { shares: Rc::clone(shares), connection }
    }

    /// Notes that work has come by this connection.
    pub(super) fn on_work(&self) {
        let streak = match self.shares.streak.get() {
            (last, pieces) if last == self.connection => pieces.saturating_add(1),
            _ => 1,
        };
        self.shares.streak.set((self.connection, streak));
        self.shares.busy_poll.on_work();
    }

    /// Whether this connection had all of the last work.
    fn is_alone(&self) -> bool {
        let (last, pieces) = self.shares.streak.get();
        last == self.connection && pieces >= POLLS_ALONE_AFTER
    }

    /// Reads from the connection's stream: polls it for a while if this core polls, then sleeps until data comes.
    pub(super) async fn read<S: Stream>(&self, stream: &S, mut buffer: Vec<u8>) -> (io::Result<usize>, Vec<u8>) {
        let polling = self.begin(stream.poll_cost());
        while polling.continues() {
            if let Some(read) = polling.round(|| stream.try_read(&mut buffer)) {
                return (read, buffer);
            }
            stream.prepare_write();
            tokio::task::yield_now().await;
        }
        drop(polling);
        stream.read(buffer).await
    }

    /// Begins to poll. One poll has this cost.
    pub(super) fn begin(&self, cost: PollCost) -> Polling<'_> {
        self.shares.polling.set(self.shares.polling.get() + 1);
        let until_ns = self.shares.busy_poll.clock_ns() + self.shares.ns_max;
        Polling { poller: self, cost, until_ns }
    }
}

/// The cost of one poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PollCost {
    /// The stream cannot be polled.
    Impossible,
    /// A load from memory.
    Load,
    /// A system call, which costs as much as this number of loads.
    SystemCall(u32),
}

/// A connection while it is being polled.
pub(super) struct Polling<'a> {
    poller: &'a Poller,
    cost: PollCost,
    until_ns: u64,
}

impl Polling<'_> {
    /// Whether to poll for one more round.
    pub(super) fn continues(&self) -> bool {
        let busy_poll = &self.poller.shares.busy_poll;
        self.is_worth_it() && busy_poll.is_polling() && busy_poll.clock_ns() < self.until_ns
    }

    fn is_worth_it(&self) -> bool {
        match self.cost {
            PollCost::Impossible => false,
            PollCost::Load => true,
            PollCost::SystemCall(_) => self.poller.is_alone(),
        }
    }

    fn polls_in_round(&self) -> u32 {
        let shares = &self.poller.shares;
        match (self.cost, self.poller.is_alone()) {
            (PollCost::Impossible, _) | (PollCost::SystemCall(_), false) => 0,
            (PollCost::SystemCall(loads), true) => shares.left() / loads,
            (PollCost::Load, true) => shares.left(),
            (PollCost::Load, false) => (POLLS_PER_ROUND / shares.polling.get().max(1)).max(1),
        }
    }

    /// Polls as often as this round allows, until `poll` finds something.
    pub(super) fn round<C>(&self, mut poll: impl FnMut() -> Option<C>) -> Option<C> {
        let polls = self.polls_in_round();
        for done in 1..=polls {
            if let Some(found) = poll() {
                self.spend(done);
                return Some(found);
            }
            hint::spin_loop();
        }
        self.spend(polls);
        None
    }

    fn spend(&self, polls: u32) {
        let loads = match self.cost {
            PollCost::SystemCall(loads) => polls * loads,
            PollCost::Load | PollCost::Impossible => polls,
        };
        let left = &self.poller.shares.left;
        left.set(left.get().saturating_sub(loads));
    }
}

impl Drop for Polling<'_> {
    fn drop(&mut self) {
        let polling = &self.poller.shares.polling;
        polling.set(polling.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::SOCKET_POLL_COST;

    const MAX_NS: u64 = 50_000;
    /// The time of a round that finds nothing.
    const ROUND_NS: u64 = 500;
    /// The time that a core takes to wake.
    const WAKE_NS: u64 = 60_000;

    /// A simulated core and its clock.
    struct Run {
        controller: SpinController,
        now_ns: u64,
        polled_ns: u64,
        found: u64,
        in_vain: u64,
    }

    impl Run {
        fn new(max_ns: u64) -> Self {
            Self { controller: SpinController::new(max_ns), now_ns: 0, polled_ns: 0, found: 0, in_vain: 0 }
        }

        /// Runs `count` pieces of work, each `gap_ns` after the end of the last. `true` = polling found the last one.
        fn work(&mut self, count: usize, gap_ns: u64) -> bool {
            let mut found = false;
            for _ in 0..count {
                let comes_ns = self.now_ns + gap_ns;
                found = loop {
                    match self.controller.on_idle(self.now_ns) {
                        IdleStep::Poll if self.now_ns + ROUND_NS < comes_ns => {
                            self.now_ns += ROUND_NS;
                            self.polled_ns += ROUND_NS;
                        }
                        IdleStep::Poll => {
                            self.now_ns = self.now_ns.max(comes_ns);
                            break self.controller.on_work(self.now_ns);
                        }
                        IdleStep::Sleep { in_vain } => {
                            self.in_vain += u64::from(in_vain);
                            self.now_ns = self.now_ns.max(comes_ns) + WAKE_NS;
                            break self.controller.on_work(self.now_ns);
                        }
                    }
                };
                self.found += u64::from(found);
            }
            found
        }
    }

    #[test]
    fn a_core_polls_while_work_comes_soon_and_sleeps_otherwise() {
        let mut run = Run::new(MAX_NS);
        assert!(!run.work(1, 10_000), "it begins asleep");
        run.work(SPIN_PROBE_EVERY as usize, 10_000);
        assert!(run.work(100, 10_000), "though the time to wake made every gap look too long to poll");
        let found = run.found;
        assert!(run.work(1000, MAX_NS * 8 / 10) && run.found == found + 1000);
        assert!(!run.work(10, 1_000_000));
        assert!(!run.work(1000, MAX_NS * 2), "just beyond");
        run.work(SPIN_PROBE_EVERY as usize, 20_000);
        assert!(run.work(1, 20_000), "soon after a probe");
    }

    #[test]
    fn polling_in_vain_is_a_bounded_share() {
        let mut run = Run::new(MAX_NS);
        let idle_times = 64 * 1000;
        run.work(idle_times, 1_000_000);
        assert_eq!(run.found, 0);
        assert!(run.in_vain <= idle_times as u64 / u64::from(SPIN_PROBE_EVERY) + 1, "{}", run.in_vain);
        assert!(run.polled_ns <= run.in_vain * (MAX_NS + ROUND_NS));
    }

    #[test]
    fn a_core_polls_through_bursts_and_sleeps_through_the_silence_between() {
        let mut run = Run::new(MAX_NS);
        run.work(200, 5_000);
        let (found, polled_ns, began_ns) = (run.found, run.polled_ns, run.now_ns);
        for _ in 0..100 {
            run.work(20, 5_000);
            run.work(1, 10_000_000);
        }
        assert!(run.found - found >= 100 * 15, "{}", run.found - found);
        assert!((run.polled_ns - polled_ns) * 50 < run.now_ns - began_ns, "{}", run.polled_ns);
    }

    #[test]
    fn a_core_without_busy_polling_never_polls() {
        let busy_poll = BusyPoll::new(0, Arc::default());
        busy_poll.on_work();
        assert!(!busy_poll.is_polling());
        let busy_poll = BusyPoll::new(60_000_000, Arc::default());
        assert!(!busy_poll.is_polling());
        busy_poll.on_work();
        assert!(!busy_poll.is_polling(), "one piece of work says nothing about the next");
    }

    #[test]
    fn will_poll_predicts_the_next_idle_step() {
        let mut controller = SpinController::new(MAX_NS);
        let (mut now_ns, mut seen) = (0, [0, 0]);
        for work in 0..1000_u64 {
            now_ns += if work / 200 % 2 == 0 { MAX_NS / 10 } else { MAX_NS * 10 };
            controller.on_work(now_ns);
            let predicted = controller.will_poll();
            let polls = controller.on_idle(now_ns) == IdleStep::Poll;
            assert_eq!(predicted, polls);
            assert_eq!(controller.will_poll(), polls);
            seen[usize::from(polls)] += 1;
        }
        assert!(seen.iter().all(|count| *count > 100), "{seen:?}");
    }

    #[test]
    fn work_within_the_first_round_is_not_counted_as_found_by_polling() {
        let mut controller = SpinController::new(MAX_NS);
        controller.gap_ns = 0;
        controller.on_work(0);
        assert_eq!(controller.on_idle(10), IdleStep::Poll);
        assert!(!controller.on_work(20), "it was there before the round ended");
        assert_eq!(controller.on_idle(30), IdleStep::Poll);
        assert_eq!(controller.on_idle(600), IdleStep::Poll);
        assert!(controller.on_work(700));
        assert!(!controller.on_work(701), "busy");
        assert_eq!(controller.on_idle(1000), IdleStep::Poll);
        assert_eq!(controller.on_idle(1000 + MAX_NS), IdleStep::Sleep { in_vain: true });
        assert_eq!(controller.on_idle(2000 + MAX_NS), IdleStep::Sleep { in_vain: false }, "reported once");
    }

    fn polls_in_round(poller: &Poller, cost: PollCost) -> u32 {
        poller.begin(cost).polls_in_round()
    }

    #[test]
    fn a_connection_with_all_of_the_last_work_is_polled_longer_and_a_socket_only_then() {
        let shares = PollShares::new(&Rc::new(BusyPoll::new(1000, Arc::default())), 1000);
        let (lane, socket) = (Poller::new(&shares, 1), Poller::new(&shares, 2));
        let (load, call) = (PollCost::Load, PollCost::SystemCall(SOCKET_POLL_COST));
        for _ in 0..POLLS_ALONE_AFTER * 2 {
            lane.on_work();
            socket.on_work();
            assert_eq!((polls_in_round(&lane, load), polls_in_round(&socket, call)), (POLLS_PER_ROUND, 0));
        }
        (0..POLLS_ALONE_AFTER).for_each(|_| socket.on_work());
        assert_eq!(polls_in_round(&socket, call), POLLS_PER_ROUND_ALONE / SOCKET_POLL_COST);
        assert_eq!(polls_in_round(&socket, PollCost::Impossible), 0);
        lane.on_work();
        assert_eq!(polls_in_round(&socket, call), 0, "another connection has work");
        (0..POLLS_ALONE_AFTER).for_each(|_| lane.on_work());
        assert_eq!(polls_in_round(&lane, load), POLLS_PER_ROUND_ALONE);
        socket.on_work();
        let _other = lane.begin(load);
        assert_eq!(polls_in_round(&lane, load), POLLS_PER_ROUND / 2, "the polled connections share");
    }

    #[test]
    fn a_round_ends_when_a_poll_finds_something() {
        let shares = PollShares::new(&Rc::new(BusyPoll::new(1000, Arc::default())), 1000);
        let lane = Poller::new(&shares, 1);
        let (polling, mut left) = (lane.begin(PollCost::Load), 3);
        let found = polling.round(|| {
            left -= 1;
            (left == 0).then_some("found")
        });
        assert_eq!(found, Some("found"));
        assert_eq!(polling.round(|| None::<()>), None);
        drop(polling);
        assert_eq!(shares.polling.get(), 0);
    }

    #[test]
    fn all_reads_of_a_connection_share_its_polls_of_a_round() {
        let busy_poll = Rc::new(BusyPoll::new(1000, Arc::default()));
        let shares = PollShares::new(&busy_poll, 1000);
        let socket = Poller::new(&shares, 1);
        let (call, tries) = (PollCost::SystemCall(SOCKET_POLL_COST), POLLS_PER_ROUND_ALONE / SOCKET_POLL_COST);
        (0..POLLS_ALONE_AFTER).for_each(|_| socket.on_work());
        for left in (0..tries).rev() {
            assert_eq!(socket.begin(call).round(|| Some(())), Some(()));
            assert_eq!(polls_in_round(&socket, call), left);
        }
        assert_eq!(socket.begin(call).round(|| Some(())), None, "others have their round first");
        busy_poll.read_clock();
        assert_eq!(polls_in_round(&socket, call), tries);
    }
}
