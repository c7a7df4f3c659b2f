//! What a daemon sends, frame by frame, for tests of conversations.

use flatbuffers::{FlatBufferBuilder, WIPOffset};

use crate::error::Kind;
use crate::ids::CorrelationId;
use crate::limits::{FRAME_ALIGN_BYTES, FRAME_HEADER_BYTES};
use crate::schema_generated::routing as fb;
use crate::wire::{FRAME_IDENTIFIER, FrameHeader, FrameKind, Request, RequestScratch, decode_request};

type Builder = FlatBufferBuilder<'static>;

fn frame<T>(kind: FrameKind, id: CorrelationId, build: impl FnOnce(&mut Builder) -> WIPOffset<T>) -> Vec<u8> {
    let mut builder = Builder::new();
    let root = build(&mut builder);
    builder.finish(root, Some(FRAME_IDENTIFIER));
    let mut body = builder.finished_data().to_vec();
    body.resize(body.len().next_multiple_of(FRAME_ALIGN_BYTES), 0);
    [&FrameHeader::new(kind, body.len() as u32, id).encode(), body.as_slice()].concat()
}

pub(super) fn hello(version: u16, instance_id: u64, features: u64) -> Vec<u8> {
    frame(FrameKind::HelloReply, CorrelationId(1), |builder| {
        let limits = fb::Limits::create(builder, &fb::LimitsArgs::default());
        let spaces = builder.create_vector::<WIPOffset<fb::Space<'_>>>(&[]);
        let (limits, spaces) = (Some(limits), Some(spaces));
        let args = fb::HelloReplyArgs { version, instance_id, limits, features, spaces, admin_socket: None };
        fb::HelloReply::create(builder, &args)
    })
}

pub(super) fn error(id: CorrelationId, kind: Kind) -> Vec<u8> {
    frame(FrameKind::Error, id, |builder| {
        let (message, remedy) = (Some(builder.create_string("no")), Some(builder.create_string("ask")));
        let retryable = kind.is_retryable();
        fb::Error::create(
            builder,
            &fb::ErrorArgs { code: kind as u16, retryable, message, remedy, ..Default::default() },
        )
    })
}

pub(super) fn free_reply(id: CorrelationId) -> Vec<u8> {
    frame(FrameKind::FreeReply, id, |builder| fb::FreeReply::create(builder, &fb::FreeReplyArgs::default()))
}

/// A decision that booked a pair of workers.
pub(super) fn booked(id: CorrelationId, slot: u64, prefill_slot: u64) -> Vec<u8> {
    frame(FrameKind::RouteReply, id, |builder| {
        let candidates = Some(builder.create_vector::<WIPOffset<fb::Candidate<'_>>>(&[]));
        let (booking, prefill) = (fb::BookingHandle::new(slot, 1), fb::BookingHandle::new(prefill_slot, 1));
        let (booking, prefill_booking) = (Some(&booking), Some(&prefill));
        fb::RouteReply::create(
            builder,
            &fb::RouteReplyArgs { candidates, booking, prefill_booking, ..Default::default() },
        )
    })
}

pub(super) fn lane_opened(id: CorrelationId) -> Vec<u8> {
    let args = fb::OpenLaneReplyArgs { layout: 1, request_ring_bytes: 8, reply_ring_bytes: 8 };
    frame(FrameKind::OpenLaneReply, id, |builder| fb::OpenLaneReply::create(builder, &args))
}

/// A page of a watched fleet, without workers; cursor 0 = the last page.
pub(super) fn fleet_page(id: CorrelationId, fleet_version: u64, next_cursor: u32) -> Vec<u8> {
    frame(FrameKind::WatchReply, id, |builder| {
        let workers = Some(builder.create_vector::<WIPOffset<fb::WorkerInfo<'_>>>(&[]));
        fb::WatchReply::create(builder, &fb::WatchReplyArgs { workers, fleet_version, next_cursor })
    })
}

/// A frame with a header that can be read and an unknown kind.
pub(super) fn unknown_kind(id: CorrelationId) -> Vec<u8> {
    FrameHeader { kind: 0xEE, ..FrameHeader::new(FrameKind::FreeReply, 0, id) }.encode().to_vec()
}

/// The encoded requests with their ids, in words. They are removed.
pub(super) fn said(unsent: &mut Vec<u8>) -> Vec<(CorrelationId, String)> {
    let (mut said, mut rest) = (Vec::new(), unsent.as_slice());
    while let Some(header) = rest.first_chunk::<FRAME_HEADER_BYTES>() {
        let header = FrameHeader::parse(header).expect("a header");
        let end = FRAME_HEADER_BYTES + header.body_bytes as usize;
        let mut scratch = RequestScratch::default();
        let request = decode_request(header.kind, &rest[FRAME_HEADER_BYTES..end], &mut scratch).expect("a request");
        let words = match request {
            Request::Hello(_) => "hello".to_owned(),
            Request::OpenLane(_) => "open_lane".to_owned(),
            Request::Watch { .. } => "watch".to_owned(),
            Request::Free(booking) => format!("free {booking:?}"),
            Request::Served { worker, .. } => format!("served {worker}"),
            Request::Workers { .. } => "question".to_owned(),
            other => format!("{other:?}"),
        };
        said.push((header.correlation_id, words));
        rest = &rest[end..];
    }
    unsent.clear();
    said
}
