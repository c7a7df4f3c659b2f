//! What other routers say of their bookings, on its way into the loads.

use std::sync::Arc;

use super::request_queue::RequestQueue;
use crate::ids::WorkerIndex;
use crate::load::{Gauge, GaugeEffect, Loads, OriginPlace};

/// Applies gauges of other routers to the loads. A request that waits learns of the capacity that they free.
#[derive(Clone, Debug)]
pub struct OthersLoads {
    loads: Arc<Loads>,
    queue: Arc<RequestQueue>,
}

impl OthersLoads {
    /// Of these loads, which the requests of this queue wait for.
    #[must_use]
    pub const fn new(loads: Arc<Loads>, queue: Arc<RequestQueue>) -> Self {
        Self { loads, queue }
    }

    /// Sets what a router's bookings add to a worker, at a time of the bookings' clock. A zero gauge takes it away; a gauge
    /// beyond its limits counts as much as they allow. `false` = the worker has left, or the router has no place.
    pub fn set(&self, origin: OriginPlace, worker: WorkerIndex, gauge: Gauge, now_ns: u64) -> bool {
        let effect = self.loads.set_gauge(origin, worker, gauge, now_ns);
        self.note(effect);
        effect != GaugeEffect::Refused
    }

    /// Takes away all that a router said. When it returns, the place is free for another router, or for what the same one
    /// says anew.
    pub fn drop_all(&self, origin: OriginPlace) {
        self.note(self.loads.drop_gauges(origin));
    }

    fn note(&self, effect: GaugeEffect) {
        if effect == GaugeEffect::MadeRoom {
            self.queue.made_room();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::error::Result;
    use crate::ids::{CorrelationId, SpaceId};
    use crate::load::{LoadsConfig, SessionId};
    use crate::queue::{Claim, Discipline};
    use crate::requests::request_queue::QueuedRequest;
    use crate::requests::{KeptRequest, QueueInbox, QueueMessage};
    use crate::route::RouteRequest;

    const ORIGIN: OriginPlace = OriginPlace(3);
    const W: WorkerIndex = WorkerIndex(0);

    /// A request that nothing decides here.
    #[derive(Debug)]
    struct Undecided;

    impl KeptRequest for Undecided {
        fn bytes(&self) -> usize {
            1
        }

        fn read(&self, _: &mut dyn FnMut(&RouteRequest<'_>)) -> Result<()> {
            Ok(())
        }
    }

    fn queued() -> QueuedRequest {
        QueuedRequest {
            core: 0,
            connection: 1,
            session: SessionId(1),
            id: CorrelationId(1),
            uid: 7,
            reservations: None,
            space: SpaceId(0),
            prompt_tokens: 10,
            traced: None,
            explain: false,
            request: Box::new(Undecided),
        }
    }

    #[test]
    fn a_request_that_waits_learns_of_the_capacity_that_other_routers_free() {
        let loads = Arc::new(Loads::new(1, LoadsConfig::default()));
        let queue = Arc::new(RequestQueue::new(1, (9, 1 << 20), Instant::now()));
        let (inbox, others) = (Arc::<QueueInbox>::default(), OthersLoads::new(Arc::clone(&loads), Arc::clone(&queue)));
        queue.open_core(0, &inbox);
        let dispatches =
            || std::iter::from_fn(|| inbox.pop()).filter(|of| matches!(of, QueueMessage::Dispatch)).count();
        let gauge = |prefill_tokens| Gauge { requests: 2, prefills: 1, prefill_tokens, ..Gauge::default() };
        assert!(others.set(ORIGIN, W, gauge(900), 0) && others.set(ORIGIN, W, gauge(800), 0));
        assert_eq!(dispatches(), 0, "no request waits");
        let claim = Claim {
            discipline: Discipline::Fcfs,
            priority: 0,
            jump: 0.0,
            deadline_ns: None,
            ends_ns: u64::MAX,
            prefill_tokens: 10,
            bytes: 1,
            user: 7,
        };
        queue.enqueue(&claim, &[W], queued()).expect("room");
        assert!(others.set(ORIGIN, W, gauge(900), 0) && others.set(ORIGIN, W, gauge(900), 1));
        assert_eq!(dispatches(), 0, "the load has not fallen");
        assert!(others.set(ORIGIN, W, gauge(899), 2));
        assert_eq!(dispatches(), 1);
        assert!(others.set(ORIGIN, W, Gauge::default(), 3) && others.set(ORIGIN, W, gauge(5), 4));
        assert_eq!(dispatches(), 1, "the worker has nothing of it");
        others.drop_all(OriginPlace(4));
        assert_eq!(dispatches(), 0, "another router, which has said nothing");
        others.drop_all(ORIGIN);
        assert_eq!((dispatches(), loads.read(W).requests), (1, 0));
        assert!(!others.set(ORIGIN, WorkerIndex(1), gauge(1), 5), "there is no such worker");
    }
}
