//! Decodes requests: verifies their bodies, checks them against the limits, and makes the values that the rest of the daemon
//! works with. Prompts and names stay in the body. Lanes are here in both directions.
//!
//! A field or bit that this version does not serve is refused by name, never ignored: a gateway that pins a request must not
//! be answered as if it had not.

use super::admin::AdminRequest;
use super::encode_reply::ReplyEncoder;
use super::encode_request::RequestEncoder;
use super::header::{FrameKind, PROTOCOL_VERSION};
use super::route_request_codec::ConstraintScratch;
use super::table::HotTable;
use super::{features, read_only_requests, report_codec, route_request_codec, table};
use crate::error::{Error, Kind, Result};
use crate::ids::{CorrelationId, SpaceId, Worker};
use crate::limits::{NAME_BYTES_MAX, REQUEST_TABLES_MAX};
use crate::protocol::{BookingRef, EngineLoad, RouteRequest, SessionToken};
use crate::schema_generated::routing as fb;

/// "Every space" on the wire.
pub(super) const EVERY_SPACE: u32 = u32::MAX;

/// Buffers for the lists of a request, reused by the next one.
#[derive(Debug, Default)]
pub struct RequestScratch {
    pub(super) media: Vec<(u32, u64)>,
    pub(super) allow: Vec<Worker>,
    fields: Vec<(String, String)>,
    pub(super) constraints: ConstraintScratch,
}

/// The first frame of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello<'a> {
    /// Oldest protocol version the gateway speaks.
    pub version_min: u16,
    /// Newest protocol version the gateway speaks.
    pub version_max: u16,
    /// The gateway's name in the daemon's logs.
    pub client_name: &'a str,
    /// The session that its connections share; `None` = a session of its own.
    pub session: Option<SessionToken>,
}

impl Hello<'_> {
    /// The protocol version of this connection.
    ///
    /// # Errors
    /// [`Kind::UnsupportedVersion`] if the gateway's range lacks this daemon's version.
    pub fn negotiate(&self) -> Result<u16> {
        if (self.version_min..=self.version_max).contains(&PROTOCOL_VERSION) {
            return Ok(PROTOCOL_VERSION);
        }
        let (min, max) = (self.version_min, self.version_max);
        Err(unsupported_version(&format!("the gateway speaks protocol versions {min} to {max}")))
    }
}

/// A request that this version serves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Request<'a> {
    /// First frame of a connection.
    Hello(Hello<'a>),
    /// Asks which worker should run a prompt.
    Route(RouteRequest<'a>),
    /// Reports that the prefill of a booked request is complete.
    PrefillComplete {
        /// The booking.
        booking: BookingRef<'a>,
        /// The time of the prefill, microseconds; 0 = not known.
        prefill_us: u64,
    },
    /// Reports the tokens that a booked request has generated.
    OutputProgress {
        /// The booking.
        booking: BookingRef<'a>,
        /// Their number since the start of the request.
        output_tokens: u32,
    },
    /// Reports that another worker runs a booked request than the booked one.
    Served {
        /// The booking.
        booking: BookingRef<'a>,
        /// The worker that runs it.
        worker: Worker,
    },
    /// Reports an engine's load.
    ReportLoad {
        /// The worker's space.
        space: SpaceId,
        /// The worker.
        worker: Worker,
        /// The load.
        load: EngineLoad,
    },
    /// Reports that a worker failed a request.
    ReportFailure {
        /// The worker's space.
        space: SpaceId,
        /// The worker; rank 2³² - 1 = every rank.
        worker: Worker,
        /// The reason, for the log.
        reason: &'a str,
    },
    /// Frees a booking.
    Free(BookingRef<'a>),
    /// Asks how much of a prompt each worker holds: a route that books nothing and lists all workers.
    Overlap(RouteRequest<'a>),
    /// Asks for the work of every worker if it took a prompt. The fields are those of an overlap.
    PotentialLoads(RouteRequest<'a>),
    /// Asks for the workers.
    Workers {
        /// The space; `None` = every space.
        space: Option<SpaceId>,
        /// The cursor of the page; 0 = the first page.
        cursor: u32,
        /// The most workers of the page; 0 = the daemon's limit.
        limit: u32,
    },
    /// Watches the workers.
    Watch {
        /// The space; `None` = every space.
        space: Option<SpaceId>,
        /// The fleet version that the gateway has from this daemon run; 0 = none.
        fleet_version_seen: u64,
        /// The most workers of one reply; 0 = all in one.
        page_limit: u32,
    },
    /// A request of administration. Admin socket only.
    Admin(AdminRequest<'a>),
    /// Opens a shm lane for this connection.
    OpenLane(LaneRequest),
}

/// The request in a body, given the kind in its header.
///
/// # Errors
/// [`Kind::Malformed`] if the body does not verify; [`Kind::Unsupported`] with the kind, field or bit that is not served;
/// [`Kind::InvalidArgument`] with the field whose value is invalid.
pub fn decode_request<'a>(kind: u8, body: &'a [u8], scratch: &'a mut RequestScratch) -> Result<Request<'a>> {
    let Some(known) = FrameKind::from_u8(kind) else {
        return Err(unsupported(format!("request kind {kind}")));
    };
    // Each arm returns the decoder's own result: a request is large, and `?` inside of `Ok` would move it twice.
    match known {
        FrameKind::Hello => hello(root::<fb::Hello<'a>>(body)?).map(Request::Hello),
        FrameKind::Route => route_request_codec::decode(&hot(body)?, scratch),
        FrameKind::PrefillComplete => report_codec::prefill_complete(&hot(body)?),
        FrameKind::Free => report_codec::free(&hot(body)?),
        FrameKind::OutputProgress => report_codec::output_progress(&hot(body)?),
        FrameKind::Served => report_codec::served(&hot(body)?),
        FrameKind::ReportLoad => report_codec::report_load(&root::<fb::ReportLoad<'a>>(body)?),
        FrameKind::ReportFailure => report_codec::report_failure(root::<fb::ReportFailure<'a>>(body)?),
        FrameKind::Overlap => read_only_requests::overlap(&hot(body)?, scratch).map(Request::Overlap),
        FrameKind::PotentialLoads => {
            read_only_requests::potential_loads(&hot(body)?, scratch).map(Request::PotentialLoads)
        }
        FrameKind::Workers => {
            let table = root::<fb::Workers<'a>>(body)?;
            understood(table.must_understand())?;
            let space = (table.space_id() != EVERY_SPACE).then(|| SpaceId(table.space_id()));
            Ok(Request::Workers { space, cursor: table.cursor(), limit: table.limit() })
        }
        FrameKind::Watch => read_only_requests::watch(&root::<fb::Watch<'a>>(body)?),
        FrameKind::OpenLane => open_lane(&root::<fb::OpenLane<'a>>(body)?),
        other => match AdminRequest::decode(other, body, &mut scratch.fields)? {
            Some(request) => Ok(Request::Admin(request)),
            None => Err(unsupported(format!("request kind {kind} ({})", other.name()))),
        },
    }
}

/// The error for a protocol version that this daemon does not speak.
pub(crate) fn unsupported_version(what: &str) -> Error {
    Error::new(
        Kind::UnsupportedVersion,
        format!("{what}, this daemon speaks {PROTOCOL_VERSION}"),
        format!("use a client that speaks protocol version {PROTOCOL_VERSION}"),
    )
}

pub(super) fn root<'a, T>(body: &'a [u8]) -> Result<T::Inner>
where
    T: flatbuffers::Follow<'a> + flatbuffers::Verifiable + 'a,
{
    table::root::<T>(body, REQUEST_TABLES_MAX)
}

fn hot<'a, T: HotTable<'a>>(body: &'a [u8]) -> Result<T> {
    T::of_body(body, REQUEST_TABLES_MAX)
}

pub(super) fn unsupported(what: impl std::fmt::Display) -> Error {
    Error::new(
        Kind::Unsupported,
        format!("{what} is not served by this version"),
        "leave it out, or see the feature bits of the hello reply",
    )
}

pub(super) fn invalid(message: impl Into<String>, remedy: impl Into<String>) -> Error {
    Error::new(Kind::InvalidArgument, message, remedy)
}

/// A string field within its length limit; `None` and empty are the same.
pub(super) fn name<'a>(field: &str, value: Option<&'a str>) -> Result<Option<&'a str>> {
    match value {
        Some(text) if text.len() > NAME_BYTES_MAX => {
            Err(invalid(format!("{field} has {} bytes", text.len()), format!("keep it within {NAME_BYTES_MAX} bytes")))
        }
        Some("") | None => Ok(None),
        Some(text) => Ok(Some(text)),
    }
}

fn hello(table: fb::Hello<'_>) -> Result<Hello<'_>> {
    let session = table.session().map(|token| SessionToken { hi: token.hi(), lo: token.lo() });
    if session == (Some(SessionToken { hi: 0, lo: 0 })) {
        return Err(invalid("the session token is all zero", "draw 128 random bits, or leave it out"));
    }
    Ok(Hello {
        version_min: table.version_min(),
        version_max: table.version_max(),
        client_name: name("client_name", table.client_name())?.unwrap_or_default(),
        session,
    })
}

/// Refuses a request that depends on a feature that is not served.
pub(super) fn understood(must_understand: u64) -> Result<()> {
    match must_understand & !features::SERVED {
        0 => Ok(()),
        unknown => Err(unsupported(format!("must_understand bit {}", unknown.trailing_zeros()))),
    }
}

pub(super) fn bounded(field: &str, len: usize, max: usize) -> Result<()> {
    if len <= max {
        return Ok(());
    }
    Err(invalid(format!("{field} is {len}, beyond {max}"), format!("keep {field} within {max}")))
}

/// The sizes that a gateway requests for a lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneRequest {
    /// Bytes of the request ring; 0 = the default.
    pub request_ring_bytes: u32,
    /// Bytes of the reply ring; 0 = the default.
    pub reply_ring_bytes: u32,
}

/// An opened lane. Two descriptors come with it: its memory, and the gateway's end of its bell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneOpened {
    /// The version of the memory's layout.
    pub layout: u16,
    /// Bytes of the request ring.
    pub request_ring_bytes: u32,
    /// Bytes of the reply ring.
    pub reply_ring_bytes: u32,
}

pub(super) fn open_lane<'a>(table: &fb::OpenLane<'_>) -> Result<Request<'a>> {
    understood(table.must_understand())?;
    let (request_ring_bytes, reply_ring_bytes) = (table.request_ring_bytes(), table.reply_ring_bytes());
    Ok(Request::OpenLane(LaneRequest { request_ring_bytes, reply_ring_bytes }))
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
    pub fn open_lane(&mut self, id: CorrelationId, asked: LaneRequest, out: &mut Vec<u8>) {
        let LaneRequest { request_ring_bytes, reply_ring_bytes } = asked;
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
