//! Giving a connection a lane: the memory and the bell are made, one end is put before the core, the other goes to the
//! gateway with the reply.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustc_hash::FxHashMap;
use tokio::sync::Notify;

use super::terms::Lanes;
use crate::error::{Error, Kind, Result};
use crate::ids::CorrelationId;
use crate::lane::{LANE_LAYOUT, LaneEnd, LaneMemory, LaneSide, LaneSizes, bell_pair};
use crate::metrics::LaneCounter;
use crate::serve::connection::{Carried, Peer};
use crate::serve::responder::RoutingResponder;
use crate::serve::service::Service;
use crate::wire::{LaneAsked, LaneOpened};

/// Descriptors that go with a reply. Dropped, they are closed.
#[derive(Debug)]
pub struct Handed {
    /// The lane's memory.
    pub memory: OwnedFd,
    /// The gateway's end of the bell.
    pub bell: OwnedFd,
}

/// A lane that a core is to begin to serve.
#[derive(Debug)]
pub(super) struct NewLane {
    /// The connection that it belongs to, with its session and user.
    pub(super) owner: Peer,
    pub(super) end: LaneEnd,
    pub(super) bell: UnixStream,
}

/// The lanes of one core.
#[derive(Debug)]
pub(in crate::serve) struct CoreLanes {
    pub(super) terms: Arc<Lanes>,
    /// Opened, and not yet begun.
    pub(super) new: VecDeque<NewLane>,
    /// Rings when there is one.
    pub(super) opened: Arc<Notify>,
    /// By connection: the number of its lane, once that has begun.
    pub(super) by_owner: FxHashMap<u64, Option<u64>>,
    /// Rings for all who wait for a lane to end.
    pub(super) ended: Arc<Notify>,
    /// Whether what has come is still answered when a connection ends.
    pub(in crate::serve) draining: bool,
}

impl CoreLanes {
    pub(in crate::serve) fn new(terms: Arc<Lanes>) -> Self {
        let (opened, ended, by_owner) = (Arc::default(), Arc::default(), FxHashMap::default());
        Self { terms, new: VecDeque::new(), opened, by_owner, ended, draining: false }
    }

    /// Whether there may be any.
    pub(in crate::serve) fn are_on(&self) -> bool {
        self.terms.are_on()
    }

    fn make(&self, peer: &Peer, asked: LaneAsked) -> Result<(NewLane, Handed), (LaneCounter, Error)> {
        if peer.carried == Carried::Lane || self.by_owner.contains_key(&peer.connection) {
            let what = "the connection has a lane";
            let error = Error::new(Kind::InvalidArgument, what, "use it, or open another connection");
            return Err((LaneCounter::RefusedSecond, error));
        }
        if !self.terms.are_on() {
            let error =
                Error::new(Kind::Unsupported, "this daemon has no lanes", "raise serve.lanes_max, or go without");
            return Err((LaneCounter::RefusedOff, error));
        }
        let (request_bytes, reply_bytes) = (asked.request_ring_bytes, asked.reply_ring_bytes);
        let sizes = LaneSizes::asked(request_bytes, reply_bytes, self.terms.ring_bytes_max())
            .map_err(|error| (LaneCounter::RefusedSizes, error))?;
        let place = self.terms.take(peer.uid)?;
        let reclaimer = Arc::clone(self.terms.reclaimer());
        let made = move || {
            let mut memory = LaneMemory::make(sizes)?;
            memory.reclaimed_by(&reclaimer, place);
            let (bell, theirs) = bell_pair()?;
            let handed = Handed { memory: memory.share()?, bell: theirs.into() };
            Ok((LaneEnd::new(memory, LaneSide::Daemon), bell, handed))
        };
        let (end, bell, handed) = made().map_err(|error| (LaneCounter::RefusedSystem, error))?;
        let owner = Peer { handed: None, ..*peer };
        Ok((NewLane { owner, end, bell }, handed))
    }
}

impl<S: Service> RoutingResponder<S> {
    /// Opens a lane for a connection. The reply must be the last before the descriptors that `peer` then has are handed
    /// over.
    pub(in crate::serve) fn open_lane(
        &mut self,
        peer: &mut Peer,
        id: CorrelationId,
        asked: LaneAsked,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        let (lane, handed) = match self.lanes.make(peer, asked) {
            Ok(made) => made,
            Err((counter, error)) => {
                self.lanes.terms.counters().bump(counter);
                return Err(error);
            }
        };
        let sizes = lane.end.sizes();
        let opened = LaneOpened {
            layout: LANE_LAYOUT,
            request_ring_bytes: sizes.request_bytes(),
            reply_ring_bytes: sizes.reply_bytes(),
        };
        self.encoder.lane_opened(id, opened, out);
        peer.handed = Some(handed);
        self.lanes.terms.counters().bump(LaneCounter::Opened);
        self.lanes.by_owner.insert(peer.connection, None);
        self.lanes.new.push_back(lane);
        self.lanes.opened.notify_one();
        Ok(())
    }
}
