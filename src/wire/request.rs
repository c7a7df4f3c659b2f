//! What a gateway asks: bodies verified, checked against the limits, and turned into the values the
//! rest of the daemon works with. Prompts and names stay where they lie in the body.
//!
//! A field or bit that this version does not serve is refused by name, never passed over: a gateway that
//! pins a request must not be answered as if it had not.

use super::bookings;
use super::constraints::ConstraintScratch;
use super::convert::{op_from_wire, worker_from_wire};
use super::features;
use super::header::{FrameKind, PROTOCOL_VERSION};
use super::lanes::{self, LaneAsked};
use super::message::{ResetOrder, WorkerChange};
use super::policy::{self, PolicyOrder};
use super::questions;
use super::reports;
use super::route;
use super::table::HotTable;
use super::verify;
use crate::error::{Error, Kind, Result};
use crate::ids::{SpaceId, Worker};
use crate::limits::{NAME_BYTES_MAX, REQUEST_TABLES_MAX, WORKER_FIELDS_MAX};
use crate::protocol::{BookingRef, EngineLoad, RouteRequest, SessionToken};
use crate::schema_generated::routing as fb;

/// "Every space" on the wire.
pub(super) const EVERY_SPACE: u32 = u32::MAX;

/// Where the lists of a request are put, reused from one request to the next.
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
    /// What the gateway calls itself in logs.
    pub client_name: &'a str,
    /// The session its connections share; `None` = one of this connection's own.
    pub session: Option<SessionToken>,
}

impl Hello<'_> {
    /// The version both sides will speak.
    ///
    /// # Errors
    /// [`Kind::UnsupportedVersion`] when the gateway's range leaves this daemon's version out.
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
    /// Which worker should run this prompt?
    Route(RouteRequest<'a>),
    /// A booked request's prefill is done.
    PrefillComplete {
        /// The booking.
        booking: BookingRef<'a>,
        /// How long the prefill took, microseconds; 0 = not said.
        prefill_us: u64,
    },
    /// A booked request has put out so many tokens.
    OutputProgress {
        /// The booking.
        booking: BookingRef<'a>,
        /// All of them so far.
        output_tokens: u32,
    },
    /// A booked request runs on another worker than the one it was booked on.
    Served {
        /// The booking.
        booking: BookingRef<'a>,
        /// Where it runs.
        worker: Worker,
    },
    /// A worker's own word on its load.
    ReportLoad {
        /// Of this space.
        space: SpaceId,
        /// Which one.
        worker: Worker,
        /// What it says.
        load: EngineLoad,
    },
    /// A worker failed a request.
    ReportFailure {
        /// Of this space.
        space: SpaceId,
        /// Which one; rank 2³² - 1 = every rank.
        worker: Worker,
        /// How, for the log.
        reason: &'a str,
    },
    /// A booked request is done.
    Free(BookingRef<'a>),
    /// Who holds how much of a prompt? A route that books nothing and lists everybody.
    Overlap(RouteRequest<'a>),
    /// What would every worker have to do if it took a prompt? As an overlap.
    PotentialLoads(RouteRequest<'a>),
    /// Who is there?
    Workers {
        /// Of this space; `None` = of every space.
        space: Option<SpaceId>,
        /// Where the page starts; 0 = at the beginning.
        cursor: u32,
        /// Workers in the page at most; 0 = as many as the daemon gives.
        limit: u32,
    },
    /// Who is there, now and whenever that changes?
    Watch {
        /// Of this space; `None` = of every space.
        space: Option<SpaceId>,
        /// The fleet's version that the gateway has of this daemon's instance; 0 = none.
        fleet_version_seen: u64,
        /// Workers of one reply at most; 0 = all in one.
        page_limit: u32,
    },
    /// How is everybody? Admin socket only.
    Status {
        /// Where the page starts; 0 = at the beginning.
        cursor: u32,
        /// Workers in the page at most; 0 = as many as the daemon gives.
        limit: u32,
    },
    /// Add, remove or change a worker. Admin socket only.
    ChangeWorker(WorkerChange<'a>),
    /// Forget the blocks of a worker; `None` = of every worker. Admin socket only.
    Reset(ResetOrder),
    /// Set, promote or end a shadow policy. Admin socket only.
    SetPolicy(PolicyOrder<'a>),
    /// Share memory with this connection.
    OpenLane(LaneAsked),
}

/// The request in a body, given the kind in its header.
///
/// # Errors
/// [`Kind::Malformed`] if the body does not verify; [`Kind::Unsupported`] naming the kind, field or bit
/// that is not served; [`Kind::InvalidArgument`] naming the field whose value means nothing.
pub fn decode_request<'a>(kind: u8, body: &'a [u8], scratch: &'a mut RequestScratch) -> Result<Request<'a>> {
    let Some(known) = FrameKind::from_u8(kind) else {
        return Err(unsupported(format!("request kind {kind}")));
    };
    Ok(match known {
        FrameKind::Hello => Request::Hello(hello(root::<fb::Hello<'a>>(body)?)?),
        FrameKind::Route => route::decode(&hot(body)?, scratch)?,
        FrameKind::PrefillComplete => bookings::prefill_complete(&hot(body)?)?,
        FrameKind::Free => bookings::free(&hot(body)?)?,
        FrameKind::OutputProgress => bookings::output_progress(&hot(body)?)?,
        FrameKind::Served => bookings::served(&hot(body)?)?,
        FrameKind::ReportLoad => reports::report_load(&root::<fb::ReportLoad<'a>>(body)?)?,
        FrameKind::ReportFailure => reports::report_failure(root::<fb::ReportFailure<'a>>(body)?)?,
        FrameKind::Overlap => Request::Overlap(questions::overlap(&hot(body)?, scratch)?),
        FrameKind::PotentialLoads => Request::PotentialLoads(questions::potential_loads(&hot(body)?, scratch)?),
        FrameKind::Workers => {
            let table = root::<fb::Workers<'a>>(body)?;
            understood(table.must_understand())?;
            let space = (table.space_id() != EVERY_SPACE).then(|| SpaceId(table.space_id()));
            Request::Workers { space, cursor: table.cursor(), limit: table.limit() }
        }
        FrameKind::Watch => questions::watch(&root::<fb::Watch<'a>>(body)?)?,
        FrameKind::Status => {
            let table = root::<fb::Status<'a>>(body)?;
            understood(table.must_understand())?;
            Request::Status { cursor: table.cursor(), limit: table.limit() }
        }
        FrameKind::ChangeWorker => Request::ChangeWorker(change_worker(root::<fb::ChangeWorker<'a>>(body)?, scratch)?),
        FrameKind::Reset => {
            let table = root::<fb::Reset<'a>>(body)?;
            understood(table.must_understand())?;
            Request::Reset(ResetOrder {
                worker: table.worker().map(worker_from_wire),
                engine_cleared: table.engine_cleared(),
            })
        }
        FrameKind::SetPolicy => {
            let table = root::<fb::SetPolicy<'a>>(body)?;
            understood(table.must_understand())?;
            Request::SetPolicy(policy::decode(&table, &mut scratch.fields)?)
        }
        FrameKind::OpenLane => lanes::open_lane(&root::<fb::OpenLane<'a>>(body)?)?,
        other => return Err(unsupported(format!("request kind {kind} ({})", other.name()))),
    })
}

/// The error for a version that is not spoken here.
pub(crate) fn unsupported_version(what: &str) -> Error {
    Error::new(
        Kind::UnsupportedVersion,
        format!("{what}, this daemon speaks {PROTOCOL_VERSION}"),
        format!("use a client that speaks protocol version {PROTOCOL_VERSION}"),
    )
}

fn root<'a, T>(body: &'a [u8]) -> Result<T::Inner>
where
    T: flatbuffers::Follow<'a> + flatbuffers::Verifiable + 'a,
{
    verify::root::<T>(body, REQUEST_TABLES_MAX)
}

fn hot<'a, T: HotTable<'a>>(body: &'a [u8]) -> Result<T> {
    T::of_body(body, REQUEST_TABLES_MAX)
}

fn unsupported(what: impl std::fmt::Display) -> Error {
    Error::new(
        Kind::Unsupported,
        format!("{what} is not served by this version"),
        "leave it out, or see the feature bits of the hello reply",
    )
}

pub(super) fn invalid(message: impl Into<String>, remedy: impl Into<String>) -> Error {
    Error::new(Kind::InvalidArgument, message, remedy)
}

/// A string field within its bound; `None` and empty are the same.
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

fn change_worker<'a>(table: fb::ChangeWorker<'_>, scratch: &'a mut RequestScratch) -> Result<WorkerChange<'a>> {
    understood(table.must_understand())?;
    let op = op_from_wire(table.op()).ok_or_else(|| unsupported(format!("change_worker.op {}", table.op().0)))?;
    scratch.fields.clear();
    if let Some(fields) = table.fields() {
        bounded("fields", fields.len(), WORKER_FIELDS_MAX)?;
        scratch.fields.extend(fields.iter().map(|field| (field.name().to_owned(), field.value().to_owned())));
    }
    Ok(WorkerChange { op, worker: table.worker().map(worker_from_wire), fields: &scratch.fields })
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
