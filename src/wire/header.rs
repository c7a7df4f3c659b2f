//! The frame header: the only bytes whose meaning never depends on a version.

use std::fmt;

use bytes::{Buf, BufMut};

use crate::ids::CorrelationId;
use crate::limits::{FRAME_ALIGN_BYTES, FRAME_BODY_BYTES_CEILING, FRAME_HEADER_BYTES};
use crate::schema_generated::routing as fb;

/// The protocol version this crate speaks.
pub const PROTOCOL_VERSION: u16 = 1;
/// The flatbuffer file identifier of every body.
pub const FRAME_IDENTIFIER: &str = "KVRT";

/// Lists the kinds once: purpose, variant of the schema, and name.
macro_rules! frame_kinds {
    ($($(#[doc = $purpose:literal])* $variant:ident = $name:literal;)*) => {
        /// The kind of a frame, which names the table of its body. Requests are odd; the reply to a request is the next even
        /// number.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum FrameKind { $($(#[doc = $purpose])* $variant = fb::Kind::$variant.0,)* }

        impl FrameKind {
            /// Every kind.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name used in messages and logs.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Its purpose, as documented above: a row of the table in `schemas/README.md`.
            #[must_use]
            pub const fn purpose(self) -> &'static str {
                match self { $(Self::$variant => concat!($($purpose),*),)* }
            }

            /// The kind with this number, if this version knows it.
            #[must_use]
            pub const fn from_u8(value: u8) -> Option<Self> {
                match fb::Kind(value) { $(fb::Kind::$variant => Some(Self::$variant),)* _ => None }
            }
        }
    };
}

frame_kinds! {
    /// The first frame of a connection: versions, session.
    Hello = "hello";
    /// Answers `Hello`.
    HelloReply = "hello_reply";
    /// Which worker should run this prompt, with or without booking it.
    Route = "route";
    /// Answers `Route`.
    RouteReply = "route_reply";
    /// A booked prompt has been computed.
    PrefillComplete = "prefill_complete";
    /// Answers `PrefillComplete`.
    PrefillCompleteReply = "prefill_complete_reply";
    /// A booked request has ended.
    Free = "free";
    /// Answers `Free`.
    FreeReply = "free_reply";
    /// Tokens a booked request has produced.
    OutputProgress = "output_progress";
    /// Answers `OutputProgress`.
    OutputProgressReply = "output_progress_reply";
    /// Another candidate than the first ran it: moves the booking.
    Served = "served";
    /// Answers `Served`.
    ServedReply = "served_reply";
    /// A worker failed the gateway.
    ReportFailure = "report_failure";
    /// Answers `ReportFailure`; a back-off of 0 = the report had no effect, because this user's reports already exclude
    /// its share of the workers.
    ReportFailureReply = "report_failure_reply";
    /// A worker's load as the gateway sees it.
    ReportLoad = "report_load";
    /// Answers `ReportLoad`; not accepted = the worker has been removed, or this user's reports already apply to its
    /// share of the workers.
    ReportLoadReply = "report_load_reply";
    /// The load of each worker if it took this prompt.
    PotentialLoads = "potential_loads";
    /// Answers `PotentialLoads`.
    PotentialLoadsReply = "potential_loads_reply";
    /// Blocks of a prompt each worker holds; no decision.
    Overlap = "overlap";
    /// Answers `Overlap`.
    OverlapReply = "overlap_reply";
    /// The fleet, a page at a time.
    Workers = "workers";
    /// Answers `Workers`.
    WorkersReply = "workers_reply";
    /// The fleet, and again after each change, all replies on one correlation id.
    Watch = "watch";
    /// Answers `Watch`.
    WatchReply = "watch_reply";
    /// The daemon and its workers; admin socket only.
    Status = "status";
    /// Answers `Status`.
    StatusReply = "status_reply";
    /// Adds, removes or changes a worker; admin socket only.
    ChangeWorker = "change_worker";
    /// Answers `ChangeWorker`.
    ChangeWorkerReply = "change_worker_reply";
    /// Empties workers, or what their devices held (`engine_cleared`), and removes their snapshots; admin socket only.
    Reset = "reset";
    /// Answers `Reset`.
    ResetReply = "reset_reply";
    /// Sets, promotes or ends a shadow policy; admin socket only.
    SetPolicy = "set_policy";
    /// Answers `SetPolicy`.
    SetPolicyReply = "set_policy_reply";
    /// Opens shared memory for this connection; see lanes.
    OpenLane = "open_lane";
    /// Answers `OpenLane`; two descriptors come with it.
    OpenLaneReply = "open_lane_reply";
    /// The configuration that the daemon runs with; admin socket only.
    RunningConfig = "running_config";
    /// Answers `RunningConfig`.
    RunningConfigReply = "running_config_reply";
    /// The reply to any request that failed, on its correlation id.
    Error = "error";
}

/// The 16 bytes before every body, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// Bytes of the body that follows, padding included; a multiple of 8.
    pub body_bytes: u32,
    /// The number of a [`FrameKind`]. It is a number, so that a newer peer's kind can be refused by it.
    pub kind: u8,
    /// No flag is defined; all zero.
    pub flags: u8,
    /// Protocol version of the body.
    pub version: u16,
    /// The id that the reply repeats.
    pub correlation_id: CorrelationId,
}

/// Why a header is invalid. The start of the next frame is then unknown, so the connection must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderFault {
    /// The kind is 0, which no frame has.
    KindZero,
    /// Flag bits that no version defines.
    UnknownFlags(u8),
    /// A body length that is not a multiple of 8.
    Unaligned(u32),
    /// A body length over the ceiling.
    TooLarge(u32),
}

impl fmt::Display for HeaderFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::KindZero => f.write_str("kind 0"),
            Self::UnknownFlags(flags) => write!(f, "unknown flags {flags:#04x}"),
            Self::Unaligned(bytes) => write!(f, "body of {bytes} bytes, not a multiple of {FRAME_ALIGN_BYTES}"),
            Self::TooLarge(bytes) => write!(f, "body of {bytes} bytes, beyond {FRAME_BODY_BYTES_CEILING}"),
        }
    }
}

impl FrameHeader {
    /// A header of this version.
    #[must_use]
    pub const fn new(kind: FrameKind, body_bytes: u32, correlation_id: CorrelationId) -> Self {
        Self { body_bytes, kind: kind as u8, flags: 0, version: PROTOCOL_VERSION, correlation_id }
    }

    /// Reads a header.
    ///
    /// # Errors
    /// The first [`HeaderFault`]. An unknown version or kind is not a fault: the frame can be skipped.
    pub fn parse(bytes: &[u8; FRAME_HEADER_BYTES]) -> Result<Self, HeaderFault> {
        let mut rest = bytes.as_slice();
        let body_bytes = rest.get_u32_le();
        let kind = rest.get_u8();
        let flags = rest.get_u8();
        let version = rest.get_u16_le();
        let correlation_id = CorrelationId(rest.get_u64_le());
        if kind == 0 {
            return Err(HeaderFault::KindZero);
        }
        if flags != 0 {
            return Err(HeaderFault::UnknownFlags(flags));
        }
        if body_bytes > FRAME_BODY_BYTES_CEILING {
            return Err(HeaderFault::TooLarge(body_bytes));
        }
        if !body_bytes.is_multiple_of(FRAME_ALIGN_BYTES as u32) {
            return Err(HeaderFault::Unaligned(body_bytes));
        }
        Ok(Self { body_bytes, kind, flags, version, correlation_id })
    }

    /// Writes the header.
    #[must_use]
    pub fn encode(&self) -> [u8; FRAME_HEADER_BYTES] {
        let mut bytes = [0; FRAME_HEADER_BYTES];
        let mut rest = bytes.as_mut_slice();
        rest.put_u32_le(self.body_bytes);
        rest.put_u8(self.kind);
        rest.put_u8(self.flags);
        rest.put_u16_le(self.version);
        rest.put_u64_le(self.correlation_id.0);
        bytes
    }
}

/// Appends a frame: the header, then `body`, padded.
pub(super) fn append_frame(out: &mut Vec<u8>, kind: FrameKind, correlation_id: CorrelationId, body: &[u8]) {
    let padded = body.len().next_multiple_of(FRAME_ALIGN_BYTES);
    out.reserve(FRAME_HEADER_BYTES + padded);
    // The limits of its contents keep a body far below 4 GiB.
    out.extend_from_slice(&FrameHeader::new(kind, padded as u32, correlation_id).encode());
    out.extend_from_slice(body);
    out.resize(out.len() + padded - body.len(), 0);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn kinds_are_the_schemas_and_replies_follow_their_requests() {
        for kind in FrameKind::ALL {
            assert_eq!(FrameKind::from_u8(*kind as u8), Some(*kind));
            assert_eq!(fb::Kind(*kind as u8).variant_name().map(str::to_lowercase), Some(kind.name().replace('_', "")));
            if *kind as u8 % 2 == 1 {
                let reply = FrameKind::from_u8(*kind as u8 + 1).map(FrameKind::name);
                assert_eq!(reply, Some(format!("{}_reply", kind.name()).as_str()));
            }
        }
        assert_eq!(FrameKind::ALL.len() + 1, fb::Kind::ENUM_VALUES.len(), "all but None");
        assert_eq!(FrameKind::from_u8(0), None);
    }

    #[test]
    fn each_fault_has_its_own_error() {
        let good = FrameHeader::new(FrameKind::Route, 64, CorrelationId(7));
        let parse = |header: FrameHeader| FrameHeader::parse(&header.encode());
        assert_eq!(parse(good), Ok(good));
        assert_eq!(parse(FrameHeader { kind: 0, ..good }), Err(HeaderFault::KindZero));
        assert_eq!(parse(FrameHeader { flags: 0x80, ..good }), Err(HeaderFault::UnknownFlags(0x80)));
        assert_eq!(parse(FrameHeader { body_bytes: 65, ..good }), Err(HeaderFault::Unaligned(65)));
        let beyond = FRAME_BODY_BYTES_CEILING + 8;
        assert_eq!(parse(FrameHeader { body_bytes: beyond, ..good }), Err(HeaderFault::TooLarge(beyond)));
        let odd = FrameHeader { kind: 200, version: 9, ..good };
        assert_eq!(parse(odd), Ok(odd), "an unknown kind or version can be skipped");
    }

    #[test]
    fn frames_are_padded() {
        let mut out = Vec::new();
        append_frame(&mut out, FrameKind::Error, CorrelationId(1), &[1, 2, 3, 4]);
        assert_eq!((out.len(), &out[16..]), (24, &[1, 2, 3, 4, 0, 0, 0, 0][..]));
    }

    proptest! {
        #[test]
        fn any_header_parses_or_faults_and_round_trips(bytes in any::<[u8; FRAME_HEADER_BYTES]>()) {
            if let Ok(header) = FrameHeader::parse(&bytes) {
                prop_assert_eq!(header.encode(), bytes);
            }
        }
    }
}
