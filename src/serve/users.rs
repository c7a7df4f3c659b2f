//! What the processes of each user have of what there is for all gateways, so that none can take everything.

use std::sync::Arc;

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use crate::shares::{Scarce, share};

/// How many sorts there are of what is scarce.
const SORTS: usize = Scarce::ALL.len();

/// What every user has, and how much that may be. Locked only where a connection, a lane or a wait begins or ends.
#[derive(Debug)]
pub struct Users {
    share_percent: u8,
    /// By user; only of those who have something.
    held: Mutex<FxHashMap<u32, [usize; SORTS]>>,
}

impl Default for Users {
    /// Any user may have all.
    fn default() -> Self {
        Self::new(100)
    }
}

impl Users {
    /// Users of whom each may have so much of all there is, percent.
    #[must_use]
    pub fn new(share_percent: u8) -> Self {
        Self { share_percent, held: Mutex::default() }
    }

    /// How much of `all` one user may have; at least one.
    pub(super) const fn share_of(&self, all: usize) -> usize {
        share(self.share_percent, all)
    }

    /// Takes so much for a user of something of which there is `all`; `None` = the user would have more than may be.
    pub(super) fn take(self: &Arc<Self>, uid: u32, what: Scarce, amount: usize, all: usize) -> Option<UserPlace> {
        let mut held = self.held.lock();
        let of_user = held.get(&uid).map_or(0, |held| held[what as usize]);
        let wanted = of_user.checked_add(amount).filter(|wanted| *wanted <= self.share_of(all))?;
        held.entry(uid).or_default()[what as usize] = wanted;
        Some(UserPlace { users: Arc::clone(self), uid, what, amount })
    }
}

/// What a user has taken, given back when it is dropped.
#[derive(Debug)]
pub(super) struct UserPlace {
    users: Arc<Users>,
    uid: u32,
    what: Scarce,
    amount: usize,
}

impl Drop for UserPlace {
    fn drop(&mut self) {
        let mut held = self.users.held.lock();
        if let Some(of_user) = held.get_mut(&self.uid) {
            of_user[self.what as usize] = of_user[self.what as usize].saturating_sub(self.amount);
            if *of_user == [0; SORTS] {
                held.remove(&self.uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_has_its_share_of_each_thing_and_no_more_and_gives_it_back() {
        let users = Arc::new(Users::new(75));
        let take = |uid, what, amount| users.take(uid, what, amount, 8);
        let first = take(7, Scarce::Connections, 4).expect("room");
        let second = take(7, Scarce::Connections, 2).expect("6 of 8 are 75 %");
        assert!(take(7, Scarce::Connections, 1).is_none());
        let other = [take(8, Scarce::Connections, 6), take(7, Scarce::Lanes, 6)];
        assert!(other.iter().all(Option::is_some), "other users, and other things");
        drop(first);
        assert!(take(7, Scarce::Connections, 5).is_none() && take(7, Scarce::Connections, 4).is_some());
        drop((second, other));
        assert!(users.held.lock().is_empty(), "nothing is remembered of those who have nothing");
        assert!(take(7, Scarce::WaitingBytes, usize::MAX).is_none());
    }

    #[test]
    fn a_share_is_rounded_up_so_that_nobody_is_left_without() {
        assert_eq!([1, 2, 3, 4, 100].map(|all| Users::new(75).share_of(all)), [1, 2, 3, 3, 75]);
        assert_eq!((Users::new(1).share_of(1), Users::default().share_of(usize::MAX)), (1, usize::MAX));
    }
}
