//! How a core looks at one connection, where it looks at all.
//!
//! A look at a lane is a load from memory, and one at a socket is a try to read from it: both cost less than a turn of the
//! runtime, which asks the kernel about every socket and the clock about every timer. Lanes can be seen by looks only, so
//! those that are looked at share some between two turns. Whoever had the last few pieces of work, so that nobody else
//! seems to have any, is looked at longer before the others have their turn, and only then a socket is looked at by itself:
//! where several are busy the kernel tells at once which.
//!
//! A connection is looked at only for a while after its last request.

use std::cell::Cell;
use std::hint;
use std::io;
use std::rc::Rc;

use super::engine::Stream;
use super::spin::Spin;
use crate::limits::{LOOKS_ALONE_AFTER, LOOKS_PER_TURN, LOOKS_PER_TURN_ALONE};

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
