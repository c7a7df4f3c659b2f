//! The amounts of shared resources that each user holds, so that the processes of one user do not take everything.

use std::sync::Arc;

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use super::{SharedResource, share};

const RESOURCES: usize = SharedResource::ALL.len();

/// The amount of each shared resource that every user holds, and its limit. Locked only when a connection, a lane or a
/// queued request begins or ends.
#[derive(Debug)]
pub struct UserQuotas {
    share_percent: u8,
    /// By user; only users that hold something.
    held: Mutex<FxHashMap<u32, [usize; RESOURCES]>>,
}

impl Default for UserQuotas {
    /// Every user may have all.
    fn default() -> Self {
        Self::new(100)
    }
}

impl UserQuotas {
    /// Quotas of `share_percent` of each resource for every user.
    #[must_use]
    pub fn new(share_percent: u8) -> Self {
        Self { share_percent, held: Mutex::default() }
    }

    /// One user's share of `all`; at least one.
    pub(crate) const fn share_of(&self, all: usize) -> usize {
        share(self.share_percent, all)
    }

    /// Reserves `amount` of a resource of which there is `all`; `None` = this exceeds the user's share.
    pub(crate) fn reserve(
        self: &Arc<Self>,
        uid: u32,
        what: SharedResource,
        amount: usize,
        all: usize,
    ) -> Option<UserReservation> {
        let mut held = self.held.lock();
        let of_user = held.get(&uid).map_or(0, |held| held[what as usize]);
        let wanted = of_user.checked_add(amount).filter(|wanted| *wanted <= self.share_of(all))?;
        held.entry(uid).or_default()[what as usize] = wanted;
        Some(UserReservation { users: Arc::clone(self), uid, what, amount })
    }
}

/// A user's reservation, given back on drop.
#[derive(Debug)]
pub(crate) struct UserReservation {
    users: Arc<UserQuotas>,
    uid: u32,
    what: SharedResource,
    amount: usize,
}

impl Drop for UserReservation {
    fn drop(&mut self) {
        let mut held = self.users.held.lock();
        if let Some(of_user) = held.get_mut(&self.uid) {
            of_user[self.what as usize] = of_user[self.what as usize].saturating_sub(self.amount);
            if *of_user == [0; RESOURCES] {
                held.remove(&self.uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_reserves_up_to_its_share_of_each_resource_and_gives_it_back() {
        let users = Arc::new(UserQuotas::new(75));
        let reserve = |uid, what, amount| users.reserve(uid, what, amount, 8);
        let first = reserve(7, SharedResource::Connections, 4).expect("room");
        let second = reserve(7, SharedResource::Connections, 2).expect("6 of 8 are 75 %");
        assert!(reserve(7, SharedResource::Connections, 1).is_none());
        let other = [reserve(8, SharedResource::Connections, 6), reserve(7, SharedResource::Lanes, 6)];
        assert!(other.iter().all(Option::is_some), "other users, and other resources");
        drop(first);
        assert!(
            reserve(7, SharedResource::Connections, 5).is_none()
                && reserve(7, SharedResource::Connections, 4).is_some()
        );
        drop((second, other));
        assert!(users.held.lock().is_empty(), "users that hold nothing leave no entry");
        assert!(reserve(7, SharedResource::WaitingBytes, usize::MAX).is_none());
    }

    #[test]
    fn a_share_is_rounded_up_to_at_least_one() {
        assert_eq!([1, 2, 3, 4, 100].map(|all| UserQuotas::new(75).share_of(all)), [1, 2, 3, 3, 75]);
        assert_eq!((UserQuotas::new(1).share_of(1), UserQuotas::default().share_of(usize::MAX)), (1, usize::MAX));
    }
}
