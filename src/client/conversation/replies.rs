//! Replies out of received bytes: frames, and the pages of a fleet.

use rustc_hash::FxHashSet;

use crate::error::{Error, Kind, Result};
use crate::ids::CorrelationId;
use crate::limits::{CLIENT_FLEET_BYTES_MAX, FRAME_HEADER_BYTES};
use crate::wire::{FrameHeader, PROTOCOL_VERSION, Reply, WatchReply, decode_reply};

/// A whole frame.
pub(super) struct ReplyFrame {
    /// The id of its request.
    pub(super) id: CorrelationId,
    /// The reply, if it can be read.
    pub(super) reply: Result<Reply>,
    /// Its bytes.
    pub(super) bytes: usize,
}

/// The received bytes of one channel, and the frames in them.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    received: Vec<u8>,
    /// Bytes of `received` that are decoded already.
    consumed: usize,
}

impl Inbox {
    /// The buffer to append received bytes to. Decoded bytes are dropped from it.
    pub(super) fn room(&mut self) -> &mut Vec<u8> {
        self.received.drain(..self.consumed);
        self.consumed = 0;
        &mut self.received
    }

    /// The next frame; `None` = it is not whole yet.
    ///
    /// # Errors
    /// [`Kind::Malformed`] for an invalid header: the beginning of the next frame is then unknown.
    pub(super) fn next_frame(&mut self) -> Result<Option<ReplyFrame>> {
        let rest = self.received.get(self.consumed..).unwrap_or_default();
        let Some(header) = rest.first_chunk::<FRAME_HEADER_BYTES>() else { return Ok(None) };
        let header = FrameHeader::parse(header).map_err(|fault| untrusted(&format!("a frame header with {fault}")))?;
        if header.version != PROTOCOL_VERSION {
            return Err(untrusted(&format!("a frame of protocol version {}", header.version)));
        }
        let bytes = FRAME_HEADER_BYTES + header.body_bytes as usize;
        let Some(body) = rest.get(FRAME_HEADER_BYTES..bytes) else { return Ok(None) };
        self.consumed += bytes;
        Ok(Some(ReplyFrame { id: header.correlation_id, reply: decode_reply(header.kind, body), bytes }))
    }
}

pub(super) fn untrusted(what: &str) -> Error {
    Error::new(
        Kind::Malformed,
        format!("the daemon sent {what}"),
        "check that the socket is kvrouted's, of the same release",
    )
}

/// Puts the pages of a fleet together.
#[derive(Debug, Default)]
pub(super) struct FleetPages {
    begun: WatchReply,
    /// Bytes of its pages.
    bytes: usize,
}

impl FleetPages {
    /// Takes the next page, of this many bytes; the last page completes the fleet. A page of another fleet version begins
    /// anew. A worker that left and came back between two pages may be in both; the later page counts.
    ///
    /// # Errors
    /// [`Kind::Malformed`] for pages that do not end.
    pub(super) fn take(&mut self, page: WatchReply, bytes: usize) -> Result<Option<WatchReply>> {
        if page.fleet_version != self.begun.fleet_version {
            self.begun = WatchReply { fleet_version: page.fleet_version, ..WatchReply::default() };
            self.bytes = 0;
        }
        self.bytes += bytes;
        if self.bytes > CLIENT_FLEET_BYTES_MAX {
            return Err(untrusted("the pages of a fleet without end"));
        }
        self.begun.workers.extend(page.workers);
        if page.next_cursor != 0 {
            return Ok(None);
        }
        let mut fleet = std::mem::take(self).begun;
        let mut named = FxHashSet::default();
        fleet.workers.reverse();
        fleet.workers.retain(|info| named.insert((info.space, info.worker)));
        fleet.workers.reverse();
        Ok(Some(fleet))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{SpaceId, Worker};
    use crate::protocol::{DeviceClass, WorkerState};
    use crate::trust::Trust;
    use crate::wire::WorkerInfo;

    fn page(fleet_version: u64, next_cursor: u32, ids: &[u64]) -> WatchReply {
        let info = |id: &u64| WorkerInfo {
            worker: Worker::new(*id, 0),
            space: SpaceId(0),
            name: String::new(),
            state: WorkerState::Ready,
            device_class: DeviceClass::Gpu,
            weight: 1.0,
            capacity_blocks: 0,
            batched_tokens_max: 0,
            taints: Vec::new(),
            trust: Trust::default(),
        };
        WatchReply { workers: ids.iter().map(info).collect(), fleet_version, next_cursor }
    }

    fn take(pages: &mut FleetPages, page: WatchReply) -> Option<WatchReply> {
        pages.take(page, 100).expect("a fleet of few bytes")
    }

    #[test]
    fn pages_without_end_are_no_fleet() {
        let (mut pages, half) = (FleetPages::default(), CLIENT_FLEET_BYTES_MAX / 2);
        // Each fleet may have as many.
        for version in 1..4 {
            assert_eq!(pages.take(page(version, 1, &[1]), half).expect("few bytes"), None);
        }
        assert_eq!(pages.take(page(3, 0, &[2]), half).expect("not too many"), Some(page(3, 0, &[1, 2])));
        for _ in 0..2 {
            assert_eq!(pages.take(page(3, 1, &[1]), half).expect("few bytes"), None);
        }
        assert_eq!(pages.take(page(3, 1, &[1]), 1).unwrap_err().kind(), Kind::Malformed);
    }

    #[test]
    fn pages_become_a_fleet_and_a_newer_version_drops_the_older_pages() {
        let mut pages = FleetPages::default();
        assert_eq!(take(&mut pages, page(1, 0, &[1])), Some(page(1, 0, &[1])));
        assert_eq!(take(&mut pages, page(2, 2, &[1, 2])), None);
        assert_eq!(take(&mut pages, page(2, 0, &[3])), Some(page(2, 0, &[1, 2, 3])));
        assert_eq!(take(&mut pages, page(3, 1, &[1])), None);
        assert_eq!(take(&mut pages, page(4, 1, &[7])), None);
        assert_eq!(take(&mut pages, page(4, 0, &[8])), Some(page(4, 0, &[7, 8])));
        assert_eq!(take(&mut pages, page(4, 0, &[9])), Some(page(4, 0, &[9])), "the same version again");
    }

    #[test]
    fn the_later_page_counts_for_a_worker_in_two_pages() {
        let mut pages = FleetPages::default();
        assert_eq!(take(&mut pages, page(1, 2, &[1, 2])), None);
        let mut last = page(1, 0, &[3, 1]);
        last.workers[1].state = WorkerState::Draining;
        let fleet = take(&mut pages, last).unwrap();
        let states: Vec<_> = fleet.workers.iter().map(|info| (info.worker.id.0, info.state)).collect();
        assert_eq!(states, [(2, WorkerState::Ready), (3, WorkerState::Ready), (1, WorkerState::Draining)]);
    }
}
