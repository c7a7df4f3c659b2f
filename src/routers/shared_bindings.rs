//! The bindings of affinity sessions as routers share them. All routers of a fleet hash names with a secret that follows
//! from theirs, so one name has one hash.
//!
//! The table of bindings does not tell what changed in it. So it is read through once a second, in slices, for what was
//! bound here since the reading before. Bindings that another router told are not told again.

use std::fmt;
use std::sync::Arc;

use arc_swap::ArcSwap;

use super::values::{Binding, SessionName};
use crate::limits::{BINDINGS_TOLD_EVERY_MS, LOAD_SNAPSHOT_BINDINGS_MAX, SHARED_BUCKETS_AT_ONCE};
use crate::route::{AffinityTable, HEARD_USER, KeptBinding, PolicyTable};

const SECOND_NS: u64 = 1_000_000_000;

/// The table, and how far it was read.
pub(super) struct SharedBindings {
    affinities: Arc<AffinityTable>,
    policies: Arc<ArcSwap<PolicyTable>>,
    /// Where the reading continues; `None` = it is over.
    from: Option<usize>,
    /// When the reading under way began, and the one before it, seconds of the clock of bookings.
    began_s: u32,
    before_s: u32,
    next_ms: u64,
    /// Reused memory.
    kept: Vec<KeptBinding>,
}

impl fmt::Debug for SharedBindings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedBindings").field("from", &self.from).finish_non_exhaustive()
    }
}

const fn seconds(now_ns: u64) -> u32 {
    (now_ns / SECOND_NS) as u32
}

fn told(kept: &KeptBinding) -> Binding {
    Binding {
        session: SessionName(u128::from(kept.key[1]) << 64 | u128::from(kept.key[0])),
        worker: kept.worker,
        unused_ms: u64::from(kept.age_s) * 1000,
        ended: false,
    }
}

impl SharedBindings {
    pub(super) fn new(affinities: &Arc<AffinityTable>, policies: &Arc<ArcSwap<PolicyTable>>, now_ns: u64) -> Self {
        let (affinities, policies) = (Arc::clone(affinities), Arc::clone(policies));
        let (began_s, next_ms) = (seconds(now_ns), now_ns / 1_000_000);
        Self { affinities, policies, from: None, began_s, before_s: began_s, next_ms, kept: Vec::new() }
    }

    /// Reads a slice of the table, if one is due, and names what was bound here since the reading before.
    pub(super) fn changed(&mut self, now_ns: u64, mut note: impl FnMut(Binding)) {
        let now_ms = now_ns / 1_000_000;
        if self.from.is_none() && now_ms >= self.next_ms {
            (self.before_s, self.began_s) = (self.began_s, seconds(now_ns));
            (self.from, self.next_ms) = (Some(0), now_ms + BINDINGS_TOLD_EVERY_MS);
        }
        let Some(from) = self.from else { return };
        let now_s = seconds(now_ns);
        // In the second in which the reading before began, more may have been bound after it.
        let since_s = now_s.saturating_sub(self.before_s);
        self.kept.clear();
        self.from = self.affinities.keep((from, SHARED_BUCKETS_AT_ONCE), (now_s, since_s), &mut self.kept);
        self.kept.iter().filter(|kept| kept.user != HEARD_USER).for_each(|kept| note(told(kept)));
    }

    /// Takes over what another router told.
    pub(super) fn hear(&self, heard: &Binding, now_ns: u64) {
        let session = heard.session.0;
        let binding = KeptBinding {
            key: [session as u64, (session >> 64) as u64],
            worker: heard.worker,
            user: HEARD_USER,
            age_s: u32::try_from(heard.unused_ms / 1000).unwrap_or(u32::MAX),
        };
        let ttl_s = self.policies.load().affinity_ttl_s_max();
        self.affinities.hear(&binding, (seconds(now_ns), ttl_s));
    }

    /// All bindings that hold, the latest used first, up to a bound.
    pub(super) fn all(&self, now_ns: u64) -> Vec<Binding> {
        let (mut kept, mut from) = (Vec::new(), Some(0));
        let times = (seconds(now_ns), self.policies.load().affinity_ttl_s_max());
        while let Some(at) = from {
            from = self.affinities.keep((at, SHARED_BUCKETS_AT_ONCE), times, &mut kept);
        }
        kept.sort_unstable_by_key(|kept| kept.age_s);
        kept.iter().take(LOAD_SNAPSHOT_BINDINGS_MAX).map(told).collect()
    }
}
