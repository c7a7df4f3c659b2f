//! The fleet as a daemon tells of it, now and whenever it changes.

use super::{Client, unexpected};
use crate::client::pages::FleetPages;
use crate::error::Result;
use crate::ids::{CorrelationId, SpaceId};
use crate::limits::WORKERS_PAGE_MAX;
use crate::wire::{Reply, WatchReply};

/// A connection that is told of the fleet. It gives out the fleet as it is, waits, and gives it out again after a change;
/// changes that follow each other closely come as one. It ends after the first error: connect again and watch anew.
#[derive(Debug)]
pub struct Watch {
    client: Client,
    id: CorrelationId,
    /// Came with the call that began it.
    first: Option<WatchReply>,
    pages: FleetPages,
    fleet_version: u64,
    is_over: bool,
}

impl Client {
    /// Watches a space, or the whole fleet. The connection is the watch's from now on; its timeout holds for the first
    /// answer alone, because a fleet may stay as it is for ever.
    ///
    /// # Errors
    /// The daemon's, or the connection's. [`Kind::Unsupported`](crate::error::Kind::Unsupported) from a daemon without
    /// [`features::WATCH`](crate::wire::features::WATCH).
    pub fn watch(mut self, space: Option<SpaceId>) -> Result<Watch> {
        let id = self.take_id();
        self.encoder.watch(id, space, (0, WORKERS_PAGE_MAX as u32), &mut self.unsent);
        let mut pages = FleetPages::default();
        let first = loop {
            match self.reply_to(id)? {
                Reply::Watch(page) => {
                    if let Some(first) = pages.take(page) {
                        break first;
                    }
                }
                other => return Err(unexpected("watch", &other)),
            }
        };
        self.link.wait_for_ever();
        let fleet_version = first.fleet_version;
        Ok(Watch { client: self, id, first: Some(first), pages, fleet_version, is_over: false })
    }
}

impl Watch {
    fn changed(&mut self) -> Result<WatchReply> {
        loop {
            match self.client.link.recv()? {
                // One that was overtaken by a newer one tells nothing.
                (id, Reply::Watch(reply)) if id == self.id && reply.fleet_version <= self.fleet_version => {}
                (id, Reply::Watch(page)) if id == self.id => {
                    if let Some(fleet) = self.pages.take(page) {
                        return Ok(fleet);
                    }
                }
                (id, other) if id == self.id => return Err(unexpected("watch", &other)),
                // To what was asked before the watch began.
                _ => {}
            }
        }
    }
}

impl Iterator for Watch {
    type Item = Result<WatchReply>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Some(first) = self.first.take() {
            return Some(Ok(first));
        }
        if self.is_over {
            return None;
        }
        let changed = self.changed();
        match &changed {
            Ok(reply) => self.fleet_version = reply.fleet_version,
            Err(_) => self.is_over = true,
        }
        Some(changed)
    }
}
