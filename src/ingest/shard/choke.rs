//! Back-pressure: while what the index gave up cannot be freed, because something reads on and on, no events are
//! taken that would make it give up more.

use super::Shard;
use crate::metrics::WorkerCounter;

impl Shard {
    /// Asks every index whether it takes events, handing on what it has given up where it does not.
    pub(super) fn see_choked(&mut self) {
        for (number, home) in self.homes.iter_mut().enumerate() {
            if home.writer.is_choked() {
                home.writer.reclaim();
            }
            let choked = home.writer.is_choked();
            if std::mem::replace(&mut home.choked, choked) == choked {
                continue;
            }
            if choked {
                tracing::warn!(
                    shard = %self.id, space = %home.space,
                    "the index cannot free what it gave up; events wait until it can: look for a query that does not end"
                );
            } else {
                tracing::info!(shard = %self.id, space = %home.space, "the index takes events again");
            }
            for member in self.members.iter().filter(|member| member.home == number) {
                member.stream.view.gauges.set_choked(choked);
                if choked {
                    member.stream.count(WorkerCounter::Chokes, 1);
                }
            }
        }
    }
}
