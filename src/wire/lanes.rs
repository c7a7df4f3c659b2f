//! Asking for a lane, both directions.

use super::encode_reply::ReplyEncoder;
use super::encode_request::RequestEncoder;
use super::header::FrameKind;
use super::request::{Request, understood};
use crate::error::Result;
use crate::ids::CorrelationId;
use crate::schema_generated::routing as fb;

/// What a lane is to be like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneAsked {
    /// Bytes of the ring by which requests go; 0 = as is usual.
    pub request_ring_bytes: u32,
    /// Bytes of the ring by which replies come; 0 = as is usual.
    pub reply_ring_bytes: u32,
}

/// What a lane is like that was opened. With it come, as descriptors: its memory, and the gateway's end of its bell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneOpened {
    /// How the memory is laid out.
    pub layout: u16,
    /// Bytes of the ring by which requests go.
    pub request_ring_bytes: u32,
    /// Bytes of the ring by which replies come.
    pub reply_ring_bytes: u32,
}

pub(super) fn open_lane<'a>(table: &fb::OpenLane<'_>) -> Result<Request<'a>> {
    understood(table.must_understand())?;
    let (request_ring_bytes, reply_ring_bytes) = (table.request_ring_bytes(), table.reply_ring_bytes());
    Ok(Request::OpenLane(LaneAsked { request_ring_bytes, reply_ring_bytes }))
}

pub(super) fn lane_opened(table: fb::OpenLaneReply<'_>) -> LaneOpened {
    LaneOpened {
        layout: table.layout(),
        request_ring_bytes: table.request_ring_bytes(),
        reply_ring_bytes: table.reply_ring_bytes(),
    }
}

impl RequestEncoder {
    /// Appends a request for a lane. Its reply comes with descriptors.
    pub fn open_lane(&mut self, id: CorrelationId, asked: LaneAsked, out: &mut Vec<u8>) {
        let LaneAsked { request_ring_bytes, reply_ring_bytes } = asked;
        let args = fb::OpenLaneArgs { request_ring_bytes, reply_ring_bytes, ..fb::OpenLaneArgs::default() };
        let root = fb::OpenLane::create(&mut self.builder, &args);
        self.finish(FrameKind::OpenLane, id, root, out);
    }
}

impl ReplyEncoder {
    /// Answers a request for a lane.
    pub fn lane_opened(&mut self, id: CorrelationId, opened: LaneOpened, out: &mut Vec<u8>) {
        let LaneOpened { layout, request_ring_bytes, reply_ring_bytes } = opened;
        let args = fb::OpenLaneReplyArgs { layout, request_ring_bytes, reply_ring_bytes };
        let root = fb::OpenLaneReply::create(&mut self.builder, &args);
        self.finish(FrameKind::OpenLaneReply, id, root, out);
    }
}
