//! When a core looks for work instead of going to sleep.
//!
//! A thread that sleeps takes tens of microseconds to wake, as long as many requests take; one that looks again and
//! again sees a request at once, and costs its processor meanwhile. So a core looks only as long as `spin_us_max` says,
//! and only where requests have lately come that soon after the last. Off, which is the default, it costs nothing.
//!
//! Sockets are looked at by the runtime, once in every turn. Whatever else is looked at takes its turn the same way (see
//! `looks`): a task that calls [`Spin::worked`] when it found something, and otherwise yields and looks again while
//! [`Spin::is_looking`], or goes to wait for its bell.

use std::cell::Cell;
use std::hint;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::Notify;

use super::io_backend::Stream;
use crate::limits::{LOOKS_ALONE_AFTER, LOOKS_PER_TURN, LOOKS_PER_TURN_ALONE, SPIN_PROBE_EVERY};
use crate::metrics::{CoreCounter, CounterSet};

/// What a core does between two pieces of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rest {
    /// It does not rest: something has come since it last had nothing to do.
    Busy,
    /// It looks, and has found nothing in `looks` turns.
    Looking { since_ns: u64, looks: u64 },
    /// It sleeps, until something wakes it.
    Asleep { since_ns: u64 },
}

/// What a core is to do that has nothing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Look,
    Sleep {
        /// It has looked for as long as it may, and nothing came.
        in_vain: bool,
    },
}

/// Decides whether to look. Its times are nanoseconds of any clock.
#[derive(Clone, Copy, Debug)]
struct Habit {
    max_ns: u64,
    rest: Rest,
    /// How long nothing came between two pieces of work, lately: a moving average.
    gap_ns: u64,
    /// Rests since it last looked whatever the average.
    unprobed: u32,
}

impl Habit {
    /// One that looks for up to `max_ns`; it begins by sleeping.
    const fn new(max_ns: u64) -> Self {
        Self { max_ns, rest: Rest::Asleep { since_ns: 0 }, gap_ns: Self::longest(max_ns), unprobed: 0 }
    }

    /// Longer gaps count as this: one silence between two bursts, however long, does not keep a core from looking in the
    /// next.
    const fn longest(max_ns: u64) -> u64 {
        max_ns.saturating_mul(2)
    }

    /// Something has come. Whether it was found by looking, where sleep would have been.
    fn work(&mut self, now_ns: u64) -> bool {
        let found = match self.rest {
            Rest::Busy => false,
            Rest::Looking { since_ns, looks } => {
                let gap_ns = now_ns.saturating_sub(since_ns);
                if self.gap_ns > self.max_ns {
                    // It looked to find out: what was seen while asleep had the time to wake in it.
                    self.gap_ns = gap_ns;
                } else {
                    self.learn(gap_ns);
                }
                looks > 0
            }
            Rest::Asleep { since_ns } => {
                self.learn(now_ns.saturating_sub(since_ns));
                false
            }
        };
        self.rest = Rest::Busy;
        found
    }

    fn learn(&mut self, gap_ns: u64) {
        let gap_ns = gap_ns.min(Self::longest(self.max_ns));
        self.gap_ns = self.gap_ns - self.gap_ns / 4 + gap_ns / 4;
    }

    /// Whether it looks, or will when it has nothing to do.
    const fn is_to_look(&self) -> bool {
        match self.rest {
            Rest::Busy => self.gap_ns <= self.max_ns || self.is_to_probe(),
            Rest::Looking { .. } => true,
            Rest::Asleep { .. } => false,
        }
    }

    /// Whether it looks next time whatever the average.
    const fn is_to_probe(&self) -> bool {
        self.unprobed + 1 >= SPIN_PROBE_EVERY
    }

    /// Nothing is there to do.
    fn idle(&mut self, now_ns: u64) -> Next {
        match self.rest {
            Rest::Busy => {
                if self.is_to_look() {
                    self.unprobed = 0;
                    self.rest = Rest::Looking { since_ns: now_ns, looks: 0 };
                    return Next::Look;
                }
                self.unprobed += 1;
                self.rest = Rest::Asleep { since_ns: now_ns };
                Next::Sleep { in_vain: false }
            }
            Rest::Looking { since_ns, looks } if now_ns.saturating_sub(since_ns) < self.max_ns => {
                self.rest = Rest::Looking { since_ns, looks: looks + 1 };
                Next::Look
            }
            Rest::Looking { since_ns, .. } => {
                self.rest = Rest::Asleep { since_ns };
                Next::Sleep { in_vain: true }
            }
            Rest::Asleep { .. } => Next::Sleep { in_vain: false },
        }
    }
}

/// A core's habit, and the task that looks.
#[derive(Debug)]
pub(super) struct Spin {
    /// `None` = it never looks.
    habit: Option<Cell<Habit>>,
    started: Instant,
    /// The time in the last turn in which it did not sleep: the clock is read once in a turn.
    seen_ns: Cell<u64>,
    /// Rings when something has been done.
    busy: Notify,
    counters: Arc<CounterSet<CoreCounter>>,
}

impl Spin {
    /// Of a core that looks for up to `max_us` microseconds; 0 = never.
    pub(super) fn new(max_us: u32, counters: Arc<CounterSet<CoreCounter>>) -> Self {
        let habit = (max_us > 0).then(|| Cell::new(Habit::new(u64::from(max_us) * 1000)));
        Self { habit, started: Instant::now(), seen_ns: Cell::new(0), busy: Notify::new(), counters }
    }

    /// Looks what time it is.
    pub(super) fn see(&self) -> u64 {
        self.seen_ns.set(self.started.elapsed().as_nanos() as u64);
        self.seen_ns.get()
    }

    /// What time it is, to a turn. Only while it does not sleep.
    pub(super) const fn seen_ns(&self) -> u64 {
        self.seen_ns.get()
    }

    /// Something was found to do: told by whoever found it.
    pub(super) fn worked(&self) {
        let Some(cell) = &self.habit else { return };
        let mut habit = cell.get();
        let was_asleep = matches!(habit.rest, Rest::Asleep { .. });
        if habit.work(if was_asleep { self.see() } else { self.seen_ns() }) {
            self.counters.bump(CoreCounter::SpinsPaid);
        }
        cell.set(habit);
        if was_asleep {
            self.busy.notify_one();
        }
    }

    /// Whether the core looks for work, or will when it has none: who can be looked at yields and looks again. Else they
    /// wait to be woken.
    pub(super) fn is_looking(&self) -> bool {
        self.habit.as_ref().is_some_and(|habit| habit.get().is_to_look())
    }

    /// Keeps the core awake as long as it is to look, for ever. Each yield lets the runtime look at its sockets without
    /// waiting.
    pub(super) async fn run(&self) {
        let Some(cell) = &self.habit else { return };
        loop {
            self.busy.notified().await;
            loop {
                let mut habit = cell.get();
                let next = habit.idle(self.see());
                cell.set(habit);
                if let Next::Sleep { in_vain } = next {
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

// How a core looks at one connection, where it looks at all.
//
// A look at a lane is a load from memory, and one at a socket is a try to read from it: both cost less than a turn of the
// runtime, which asks the kernel about every socket and the clock about every timer. Lanes can be seen by looks only, so
// those that are looked at share some between two turns. Whoever had the last few pieces of work, so that nobody else
// seems to have any, is looked at longer before the others have their turn, and only then a socket is looked at by itself:
// where several are busy the kernel tells at once which.
//
// A connection is looked at only for a while after its last request.

/// What the connections of a core share.
#[derive(Debug)]
pub(super) struct Looks {
    spin: Rc<Spin>,
    /// How long one connection is looked at, nanoseconds.
    ns_max: u64,
    /// Connections that are being looked at.
    looking: Cell<u32>,
    /// Who had the last piece of work, and how many in a row.
    streak: Cell<(u64, u32)>,
    /// What is left to whoever is alone, over all its reads, until the next turn.
    left: Cell<u32>,
    /// The turn for which that was given, by its time.
    turn_ns: Cell<u64>,
}

impl Looks {
    pub(super) fn new(spin: &Rc<Spin>, us_max: u32) -> Rc<Self> {
        let ns_max = u64::from(us_max) * 1000;
        let (spin, left) = (Rc::clone(spin), Cell::new(LOOKS_PER_TURN_ALONE));
        let (looking, streak, turn_ns) = (Cell::new(0), Cell::default(), Cell::new(0));
        Rc::new(Self { spin, ns_max, looking, streak, left, turn_ns })
    }

    /// What is left to whoever is alone.
    fn left(&self) -> u32 {
        if self.turn_ns.replace(self.spin.seen_ns()) != self.spin.seen_ns() {
            self.left.set(LOOKS_PER_TURN_ALONE);
        }
        self.left.get()
    }
}

/// One connection that can be looked at.
#[derive(Debug)]
pub(super) struct Looker {
    looks: Rc<Looks>,
    connection: u64,
}

impl Looker {
    /// Of a connection by its number on its core.
    pub(super) fn new(looks: &Rc<Looks>, connection: u64) -> Self {
        Self { looks: Rc::clone(looks), connection }
    }

    /// Something came by it.
    pub(super) fn worked(&self) {
        let streak = match self.looks.streak.get() {
            (last, pieces) if last == self.connection => pieces.saturating_add(1),
            _ => 1,
        };
        self.looks.streak.set((self.connection, streak));
        self.looks.spin.worked();
    }

    fn is_alone(&self) -> bool {
        let (last, pieces) = self.looks.streak.get();
        last == self.connection && pieces >= LOOKS_ALONE_AFTER
    }

    /// Reads from its stream: looks at it for a while if this core does, then waits until the engine says that something
    /// has come.
    pub(super) async fn read<S: Stream>(&self, stream: &S, mut buffer: Vec<u8>) -> (io::Result<usize>, Vec<u8>) {
        let looking = self.begin(stream.look_cost());
        while looking.goes_on() {
            if let Some(read) = looking.turn(|| stream.try_read(&mut buffer)) {
                return (read, buffer);
            }
            tokio::task::yield_now().await;
        }
        drop(looking);
        stream.read(buffer).await
    }

    /// Begins to look at it; one look costs as much as so many at a lane.
    pub(super) fn begin(&self, cost: LookCost) -> Looking<'_> {
        self.looks.looking.set(self.looks.looking.get() + 1);
        let until_ns = self.looks.spin.seen_ns() + self.looks.ns_max;
        Looking { looker: self, cost, until_ns }
    }
}

/// What a look costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LookCost {
    /// It cannot be looked at.
    Impossible,
    /// A load from memory.
    Load,
    /// A system call, which costs as much as so many loads.
    SystemCall(u32),
}

/// A connection that is being looked at.
pub(super) struct Looking<'a> {
    looker: &'a Looker,
    cost: LookCost,
    until_ns: u64,
}

impl Looking<'_> {
    /// Whether to look once more, for a turn.
    pub(super) fn goes_on(&self) -> bool {
        let spin = &self.looker.looks.spin;
        self.is_looked_at() && spin.is_looking() && spin.seen_ns() < self.until_ns
    }

    fn is_looked_at(&self) -> bool {
        match self.cost {
            LookCost::Impossible => false,
            LookCost::Load => true,
            LookCost::SystemCall(_) => self.looker.is_alone(),
        }
    }

    fn looks_in_turn(&self) -> u32 {
        let looks = &self.looker.looks;
        match (self.cost, self.looker.is_alone()) {
            (LookCost::Impossible, _) | (LookCost::SystemCall(_), false) => 0,
            (LookCost::SystemCall(loads), true) => looks.left() / loads,
            (LookCost::Load, true) => looks.left(),
            (LookCost::Load, false) => (LOOKS_PER_TURN / looks.looking.get().max(1)).max(1),
        }
    }

    /// The looks of one turn, until `come` gives something.
    pub(super) fn turn<C>(&self, mut come: impl FnMut() -> Option<C>) -> Option<C> {
        let looks = self.looks_in_turn();
        for look in 1..=looks {
            if let Some(come) = come() {
                self.spend(look);
                return Some(come);
            }
            hint::spin_loop();
        }
        self.spend(looks);
        None
    }

    fn spend(&self, looks: u32) {
        let loads = match self.cost {
            LookCost::SystemCall(loads) => looks * loads,
            LookCost::Load | LookCost::Impossible => looks,
        };
        let left = &self.looker.looks.left;
        left.set(left.get().saturating_sub(loads));
    }
}

impl Drop for Looking<'_> {
    fn drop(&mut self) {
        let looking = &self.looker.looks.looking;
        looking.set(looking.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::limits::SOCKET_LOOK_COST;

    const MAX_NS: u64 = 50_000;
    /// What a core takes for a turn that finds nothing.
    const TURN_NS: u64 = 500;
    /// What it takes to wake.
    const WAKE_NS: u64 = 60_000;

    /// A core and its clock.
    struct Run {
        habit: Habit,
        now_ns: u64,
        looked_ns: u64,
        found: u64,
        in_vain: u64,
    }

    impl Run {
        fn new(max_ns: u64) -> Self {
            Self { habit: Habit::new(max_ns), now_ns: 0, looked_ns: 0, found: 0, in_vain: 0 }
        }

        /// So many pieces of work, each `gap_ns` after the last was done; whether the last was found by looking.
        fn work(&mut self, count: usize, gap_ns: u64) -> bool {
            let mut found = false;
            for _ in 0..count {
                let comes_ns = self.now_ns + gap_ns;
                found = loop {
                    match self.habit.idle(self.now_ns) {
                        Next::Look if self.now_ns + TURN_NS < comes_ns => {
                            self.now_ns += TURN_NS;
                            self.looked_ns += TURN_NS;
                        }
                        Next::Look => {
                            self.now_ns = self.now_ns.max(comes_ns);
                            break self.habit.work(self.now_ns);
                        }
                        Next::Sleep { in_vain } => {
                            self.in_vain += u64::from(in_vain);
                            self.now_ns = self.now_ns.max(comes_ns) + WAKE_NS;
                            break self.habit.work(self.now_ns);
                        }
                    }
                };
                self.found += u64::from(found);
            }
            found
        }
    }

    #[test]
    fn it_looks_where_work_comes_soon_and_sleeps_where_it_does_not() {
        let mut run = Run::new(MAX_NS);
        assert!(!run.work(1, 10_000), "it begins asleep");
        run.work(SPIN_PROBE_EVERY as usize, 10_000);
        assert!(run.work(100, 10_000), "though waking made every gap look longer than it looks");
        let found = run.found;
        assert!(run.work(1000, MAX_NS * 8 / 10) && run.found == found + 1000);
        assert!(!run.work(10, 1_000_000));
        assert!(!run.work(1000, MAX_NS * 2), "just beyond");
        run.work(SPIN_PROBE_EVERY as usize, 20_000);
        assert!(run.work(1, 20_000), "soon after a probe");
    }

    #[test]
    fn what_it_looks_in_vain_is_a_bounded_share() {
        let mut run = Run::new(MAX_NS);
        let rests = 64 * 1000;
        run.work(rests, 1_000_000);
        assert_eq!(run.found, 0);
        assert!(run.in_vain <= rests as u64 / u64::from(SPIN_PROBE_EVERY) + 1, "{}", run.in_vain);
        assert!(run.looked_ns <= run.in_vain * (MAX_NS + TURN_NS));
    }

    #[test]
    fn bursts_are_looked_through_and_the_silence_between_is_slept_through() {
        let mut run = Run::new(MAX_NS);
        run.work(200, 5_000);
        let (found, looked_ns, began_ns) = (run.found, run.looked_ns, run.now_ns);
        for _ in 0..100 {
            run.work(20, 5_000);
            run.work(1, 10_000_000);
        }
        assert!(run.found - found >= 100 * 15, "{}", run.found - found);
        assert!((run.looked_ns - looked_ns) * 50 < run.now_ns - began_ns, "{}", run.looked_ns);
    }

    #[test]
    fn a_core_that_may_not_look_never_does() {
        let spin = Spin::new(0, Arc::default());
        spin.worked();
        assert!(!spin.is_looking());
        let spin = Spin::new(60_000_000, Arc::default());
        assert!(!spin.is_looking());
        spin.worked();
        assert!(!spin.is_looking(), "one piece of work is no habit");
    }

    #[test]
    fn it_says_beforehand_whether_it_will_look() {
        let mut habit = Habit::new(MAX_NS);
        let (mut now_ns, mut seen) = (0, [0, 0]);
        for work in 0..1000_u64 {
            now_ns += if work / 200 % 2 == 0 { MAX_NS / 10 } else { MAX_NS * 10 };
            habit.work(now_ns);
            let said = habit.is_to_look();
            let looks = habit.idle(now_ns) == Next::Look;
            assert_eq!(said, looks);
            assert_eq!(habit.is_to_look(), looks);
            seen[usize::from(looks)] += 1;
        }
        assert!(seen.iter().all(|count| *count > 100), "{seen:?}");
    }

    #[test]
    fn work_that_follows_at_once_was_not_waited_for() {
        let mut habit = Habit::new(MAX_NS);
        habit.gap_ns = 0;
        habit.work(0);
        assert_eq!(habit.idle(10), Next::Look);
        assert!(!habit.work(20), "it was there before a turn was over");
        assert_eq!(habit.idle(30), Next::Look);
        assert_eq!(habit.idle(600), Next::Look);
        assert!(habit.work(700));
        assert!(!habit.work(701), "busy");
        assert_eq!(habit.idle(1000), Next::Look);
        assert_eq!(habit.idle(1000 + MAX_NS), Next::Sleep { in_vain: true });
        assert_eq!(habit.idle(2000 + MAX_NS), Next::Sleep { in_vain: false }, "told once");
    }

    fn looks_in_turn(looker: &Looker, cost: LookCost) -> u32 {
        looker.begin(cost).looks_in_turn()
    }

    #[test]
    fn who_is_alone_is_looked_at_longer_and_a_socket_only_then() {
        let looks = Looks::new(&Rc::new(Spin::new(1000, Arc::default())), 1000);
        let (lane, socket) = (Looker::new(&looks, 1), Looker::new(&looks, 2));
        let (load, call) = (LookCost::Load, LookCost::SystemCall(SOCKET_LOOK_COST));
        for _ in 0..LOOKS_ALONE_AFTER * 2 {
            lane.worked();
            socket.worked();
            assert_eq!((looks_in_turn(&lane, load), looks_in_turn(&socket, call)), (LOOKS_PER_TURN, 0));
        }
        (0..LOOKS_ALONE_AFTER).for_each(|_| socket.worked());
        assert_eq!(looks_in_turn(&socket, call), LOOKS_PER_TURN_ALONE / SOCKET_LOOK_COST);
        assert_eq!(looks_in_turn(&socket, LookCost::Impossible), 0);
        lane.worked();
        assert_eq!(looks_in_turn(&socket, call), 0, "somebody else has work");
        (0..LOOKS_ALONE_AFTER).for_each(|_| lane.worked());
        assert_eq!(looks_in_turn(&lane, load), LOOKS_PER_TURN_ALONE);
        socket.worked();
        let _other = lane.begin(load);
        assert_eq!(looks_in_turn(&lane, load), LOOKS_PER_TURN / 2, "those that are looked at share");
    }

    #[test]
    fn a_turn_ends_when_something_has_come() {
        let looks = Looks::new(&Rc::new(Spin::new(1000, Arc::default())), 1000);
        let lane = Looker::new(&looks, 1);
        let (looking, mut left) = (lane.begin(LookCost::Load), 3);
        let come = looking.turn(|| {
            left -= 1;
            (left == 0).then_some("come")
        });
        assert_eq!(come, Some("come"));
        assert_eq!(looking.turn(|| None::<()>), None);
        drop(looking);
        assert_eq!(looks.looking.get(), 0);
    }

    #[test]
    fn what_whoever_is_alone_has_of_a_turn_is_shared_by_all_its_reads() {
        let spin = Rc::new(Spin::new(1000, Arc::default()));
        let looks = Looks::new(&spin, 1000);
        let socket = Looker::new(&looks, 1);
        let (call, tries) = (LookCost::SystemCall(SOCKET_LOOK_COST), LOOKS_PER_TURN_ALONE / SOCKET_LOOK_COST);
        (0..LOOKS_ALONE_AFTER).for_each(|_| socket.worked());
        for left in (0..tries).rev() {
            assert_eq!(socket.begin(call).turn(|| Some(())), Some(()));
            assert_eq!(looks_in_turn(&socket, call), left);
        }
        assert_eq!(socket.begin(call).turn(|| Some(())), None, "others have their turn first");
        spin.see();
        assert_eq!(looks_in_turn(&socket, call), tries);
    }
}
