//! Which daemon decides, while one takes over from another.
//!
//! | turn | who decides | the next turn |
//! |---|---|---|
//! | [`Turn::Theirs`] | the daemon before this one | `Paused`: it has handed over, or it has died; `Over`: this one ends |
//! | [`Turn::Ours`] | this daemon | `Paused`: another daemon takes over |
//! | [`Turn::Paused`] | neither | `Ours`: the other daemon gave up, died or was informed; `Over`: it has everything |
//! | [`Turn::Over`] | the daemon after this one | none |
//!
//! A thread that decides, or accepts connections, is a [`Member`]. In a pause each member stands still, between two
//! rounds of its event loop, so nothing is decided or booked. A member that learns that the turn is over ends at once,
//! and leaves what it has received to the other daemon.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tokio::sync::watch;

/// Who decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// The daemon that this one takes over from.
    Theirs,
    /// This daemon.
    Ours,
    /// Neither: what is booked is on its way to another daemon.
    Paused,
    /// The daemon that has taken over from this one.
    Over,
}

/// The turn of a process, shared by its threads.
#[derive(Clone, Debug)]
pub struct Turns(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// A member stands, or the turn has changed.
    changed: Condvar,
    /// The same turn, for those that wait without blocking.
    seen: watch::Sender<Turn>,
}

#[derive(Debug)]
struct State {
    turn: Turn,
    members: usize,
    standing: usize,
}

impl Default for Turns {
    /// This process decides.
    fn default() -> Self {
        Self::of(Turn::Ours)
    }
}

impl Turns {
    /// The turns of a daemon that takes over from another one.
    #[must_use]
    pub fn theirs() -> Self {
        Self::of(Turn::Theirs)
    }

    fn of(turn: Turn) -> Self {
        let state = Mutex::new(State { turn, members: 0, standing: 0 });
        Self(Arc::new(Shared { state, changed: Condvar::new(), seen: watch::Sender::new(turn) }))
    }

    /// Who decides now.
    #[must_use]
    pub fn turn(&self) -> Turn {
        self.0.state.lock().turn
    }

    /// Whether this daemon decides.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        self.turn() == Turn::Ours
    }

    /// Waits until this daemon decides.
    pub async fn opened(&self) {
        self.wait_for(|turn| turn == Turn::Ours).await;
    }

    async fn wait_for(&self, is_meant: impl Fn(Turn) -> bool) {
        // An error means that the sender is gone, and `self` has it.
        drop(self.0.seen.subscribe().wait_for(|turn| is_meant(*turn)).await);
    }

    /// Makes the calling thread one that stands still in pauses.
    #[must_use]
    pub fn join(&self) -> Member {
        self.0.state.lock().members += 1;
        Member(self.clone())
    }

    /// Has all members stand still. `false` = one of them did not do so in time, or it is not this daemon's turn; the
    /// daemon then goes on as before.
    #[must_use]
    pub fn pause(&self, within: Duration) -> bool {
        let deadline = Instant::now() + within;
        let mut state = self.0.state.lock();
        if state.turn != Turn::Ours {
            return false;
        }
        self.change(&mut state, Turn::Paused);
        while state.standing < state.members {
            if self.0.changed.wait_until(&mut state, deadline).timed_out() && state.standing < state.members {
                self.change(&mut state, Turn::Ours);
                return false;
            }
        }
        true
    }

    /// Ends the turn of the daemon before this one: neither decides until that one has been informed. `false` = this daemon ends.
    #[must_use]
    pub fn claim(&self) -> bool {
        self.pass(Turn::Theirs, Turn::Paused)
    }

    /// Leaves the turn to the daemon before this one, if it still has it. A pause ends first, either way.
    pub fn withdraw(&self) {
        let mut state = self.0.state.lock();
        while state.turn == Turn::Paused {
            self.0.changed.wait(&mut state);
        }
        if state.turn == Turn::Theirs {
            self.change(&mut state, Turn::Over);
        }
    }

    /// Decides after a pause.
    pub fn resume(&self) {
        let _ = self.pass(Turn::Paused, Turn::Ours);
    }

    /// Ends this daemon's turn after a pause, for good.
    pub fn end(&self) {
        let _ = self.pass(Turn::Paused, Turn::Over);
    }

    fn pass(&self, from: Turn, to: Turn) -> bool {
        let mut state = self.0.state.lock();
        let passes = state.turn == from;
        if passes {
            self.change(&mut state, to);
        }
        passes
    }

    fn change(&self, state: &mut State, turn: Turn) {
        state.turn = turn;
        self.0.changed.notify_all();
        self.0.seen.send_replace(turn);
    }
}

/// A thread that stands still in pauses.
#[derive(Debug)]
pub struct Member(Turns);

impl Member {
    /// Blocks the calling thread during each pause. Returns once the turn is over. Its event loop polls it beside its
    /// work.
    pub async fn stand_by(&self) {
        loop {
            self.0.wait_for(|turn| matches!(turn, Turn::Paused | Turn::Over)).await;
            if self.stand() == Turn::Over {
                return;
            }
        }
    }

    /// Stands still while there is a pause. Answers with the turn after it.
    fn stand(&self) -> Turn {
        let Shared { state, changed, .. } = &*self.0.0;
        let mut state = state.lock();
        state.standing += 1;
        changed.notify_all();
        while state.turn == Turn::Paused {
            changed.wait(&mut state);
        }
        state.standing -= 1;
        state.turn
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.0.0.state.lock().members -= 1;
        self.0.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::thread;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    /// A thread that counts rounds as a member, until the turn is over.
    fn counting(turns: &Turns, rounds: &Arc<AtomicU64>) -> thread::JoinHandle<()> {
        let (member, rounds) = (turns.join(), Arc::clone(rounds));
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(async {
                let count = async {
                    loop {
                        rounds.fetch_add(1, Ordering::Relaxed);
                        tokio::task::yield_now().await;
                    }
                };
                tokio::select! { () = count => {}, () = member.stand_by() => {} }
            });
        })
    }

    #[test]
    fn nothing_moves_in_a_pause_and_all_goes_on_after_it() {
        let (turns, rounds) = (Turns::default(), Arc::default());
        let threads = [counting(&turns, &rounds), counting(&turns, &rounds)];
        for _ in 0..50 {
            assert!(turns.pause(LONG));
            let before = rounds.load(Ordering::Relaxed);
            thread::yield_now();
            assert_eq!((rounds.load(Ordering::Relaxed), turns.turn()), (before, Turn::Paused));
            assert!(!turns.pause(LONG), "it is paused already");
            turns.resume();
            while rounds.load(Ordering::Relaxed) == before {
                thread::yield_now();
            }
        }
        assert!(turns.pause(LONG));
        let before = rounds.load(Ordering::Relaxed);
        turns.end();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(rounds.load(Ordering::Relaxed) <= before + 2, "at most the round in which each noticed it");
        turns.resume();
        turns.withdraw();
        assert!(!turns.claim());
        assert_eq!(turns.turn(), Turn::Over, "for good");
    }

    #[test]
    fn a_member_that_does_not_stand_ends_the_pause() {
        let turns = Turns::default();
        let member = turns.join();
        assert!(!turns.pause(Duration::from_millis(1)));
        assert!(turns.is_ours());
        drop(member);
        assert!(turns.pause(LONG), "who has left need not stand");
    }

    #[test]
    fn a_turn_that_was_left_to_the_other_daemon_never_begins() {
        let turns = Turns::theirs();
        turns.withdraw();
        assert!(!turns.claim());
        assert_eq!(turns.turn(), Turn::Over);
    }

    #[test]
    fn a_turn_begins_once() {
        let turns = Turns::theirs();
        assert!(!turns.pause(LONG) && !turns.is_ours());
        turns.resume();
        turns.end();
        assert_eq!(turns.turn(), Turn::Theirs);
        assert!(turns.claim() && !turns.claim());
        assert!(!turns.is_ours(), "the other daemon hears of it first");
        turns.resume();
        turns.withdraw();
        assert!(turns.is_ours(), "it is too late to withdraw");
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(turns.opened());
    }
}
