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

macro_rules! frame_kinds {
    ($($(#[$doc:meta])* $variant:ident = $name:literal;)*) => {
        /// The kind of a frame, which names the table of its body. Requests are odd; the reply to a request is the next even
        /// number.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum FrameKind { $($(#[$doc])* $variant = fb::Kind::$variant.0,)* }

        impl FrameKind {
            /// Every kind.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name used in messages and logs.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
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
    /// First frame of a connection.
    Hello = "hello";
    /// The reply to hello.
    HelloReply = "hello_reply";
    /// Asks which worker should run a prompt.
    Route = "route";
    /// The decision.
    RouteReply = "route_reply";
    /// Reports that the prefill of a booked request is complete.
    PrefillComplete = "prefill_complete";
    /// The outcome of the report.
    PrefillCompleteReply = "prefill_complete_reply";
    /// Frees a booking.
    Free = "free";
    /// The outcome of the report.
    FreeReply = "free_reply";
    /// Reports the tokens that a booked request has generated.
    OutputProgress = "output_progress";
    /// The outcome of the report.
    OutputProgressReply = "output_progress_reply";
    /// Reports that another worker runs a booked request.
    Served = "served";
    /// The outcome of the report.
    ServedReply = "served_reply";
    /// Reports that a worker failed a request.
    ReportFailure = "report_failure";
    /// How long requests avoid the worker.
    ReportFailureReply = "report_failure_reply";
    /// Reports an engine's load.
    ReportLoad = "report_load";
    /// Whether the report was accepted.
    ReportLoadReply = "report_load_reply";
    /// Asks for the work of every worker if it took a prompt.
    PotentialLoads = "potential_loads";
    /// The potential loads.
    PotentialLoadsReply = "potential_loads_reply";
    /// Asks how much of a prompt each worker holds.
    Overlap = "overlap";
    /// The overlaps.
    OverlapReply = "overlap_reply";
    /// Asks for the workers.
    Workers = "workers";
    /// A page of workers.
    WorkersReply = "workers_reply";
    /// Watches the fleet.
    Watch = "watch";
    /// The fleet, at once and after each change.
    WatchReply = "watch_reply";
    /// Asks for the status. Admin socket only.
    Status = "status";
    /// A page of status.
    StatusReply = "status_reply";
    /// Adds, removes or changes workers. Admin socket only.
    ChangeWorker = "change_worker";
    /// The number of workers that change.
    ChangeWorkerReply = "change_worker_reply";
    /// Makes the daemon forget blocks. Admin socket only.
    Reset = "reset";
    /// The result of the reset.
    ResetReply = "reset_reply";
    /// Sets, promotes or ends a shadow policy. Admin socket only.
    SetPolicy = "set_policy";
    /// The resulting policy.
    SetPolicyReply = "set_policy_reply";
    /// Opens a shm lane.
    OpenLane = "open_lane";
    /// The opened lane.
    OpenLaneReply = "open_lane_reply";
    /// The error of a request or of a connection.
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
