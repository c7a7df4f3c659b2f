"""Bytes and messages: the frame header, requests into frames, bodies into replies. No sockets; a body is read by a deadline."""

from __future__ import annotations

import dataclasses
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import flatbuffers

from .errors import InvalidRequest, ProtocolError, RemoteError, ReplyTooLate, error_name
from .hashing import token_bytes
from .messages import (
    FEATURES,
    REPLY_NOTES,
    TRUST_REASONS,
    Booking,
    BookingOutcome,
    BookingReport,
    Candidate,
    CostTerms,
    DeviceClass,
    EngineLoad,
    FailureReport,
    FleetView,
    Hello,
    Limits,
    LoadReport,
    MatchStatus,
    Mode,
    OverlapEntry,
    OverlapReply,
    OtherLoad,
    Overrides,
    PoolRole,
    PotentialLoad,
    PotentialLoads,
    Prompt,
    Removal,
    RouteReply,
    RouteRequest,
    Scheme,
    Session,
    Space,
    TierBlocks,
    Trust,
    TrustLevel,
    Window,
    Worker,
    WorkerInfo,
    WorkersPage,
    WorkerState,
    named_bits,
)
from .schema_generated import routing_generated as fb

PROTOCOL_VERSION = 1
IDENTIFIER = b"KVRT"
HEADER_BYTES = 16
EVERY_SPACE = 2**32 - 1
#: No body is this large; a header that says so is not one.
BODY_BYTES_CEILING = 64 << 20
#: What the lists of one reply may cost together: three lists of 4096 workers with 64 labels each. A row that is a table costs
#: as much as 65 numbers or texts.
TABLE_ROW_COST = 65
REPLY_COST_MAX = 3 * 4096 * TABLE_ROW_COST
#: Bytes of the texts of one reply that are read whatever its length.
REPLY_TEXT_BYTES_MIN = 1 << 20
#: Rows between two readings of the clock.
ROWS_PER_CLOCK = 64
_ALIGN_BYTES = 8
_HEADER = struct.Struct("<IBBHQ")
_SIDES = ("gateway", "worker", "kernel", "config", "daemon")

Reply = (
    Hello
    | RouteReply
    | BookingReport
    | FailureReport
    | LoadReport
    | OverlapReply
    | PotentialLoads
    | WorkersPage
    | FleetView
    | RemoteError
)


class Header(NamedTuple):
    """The 16 bytes before every body."""

    body_bytes: int
    kind: int
    correlation_id: int


def parse_header(data: bytes | bytearray | memoryview) -> Header:
    """Reads a header of this version; raises ProtocolError for one that cannot be trusted."""
    body_bytes, kind, flags, version, correlation_id = _HEADER.unpack_from(data)
    if kind == 0 or flags != 0 or body_bytes % _ALIGN_BYTES or body_bytes > BODY_BYTES_CEILING:
        raise ProtocolError(f"the daemon sent no frame header: kind {kind}, flags {flags}, {body_bytes} bytes")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(f"the daemon sent a frame of protocol version {version}")
    return Header(body_bytes, kind, correlation_id)


# ---- requests ---------------------------------------------------------------------------------------


class _Builder(flatbuffers.Builder):  # type: ignore[misc]
    """The package's builder, with what it lacks: optional strings and vectors of packed elements."""

    def text(self, value: str | None) -> int:
        return int(self.CreateString(value)) if value else 0

    def packed(self, element_bytes: int, align_bytes: int, elements: bytes) -> int:
        self.StartVector(element_bytes, len(elements) // element_bytes, align_bytes)
        # One copy instead of a call for each element.
        self.head -= len(elements)
        self.Bytes[self.head : self.head + len(elements)] = elements
        return int(self.EndVector())

    def offsets(self, values: Sequence[int]) -> int:
        return self.packed_offsets(values) if values else 0

    def packed_offsets(self, values: Sequence[int]) -> int:
        self.StartVector(4, len(values), 4)
        for value in reversed(values):
            self.PrependUOffsetTRelative(value)
        return int(self.EndVector())

    def frame(self, kind: int, correlation_id: int, root: int) -> bytes:
        self.Finish(root, file_identifier=IDENTIFIER)
        body = self.Output()
        padding = -len(body) % _ALIGN_BYTES
        header = _HEADER.pack(len(body) + padding, kind, 0, PROTOCOL_VERSION, correlation_id)
        return b"".join((header, body, bytes(padding)))


def _pack(layout: str, rows: Sequence[tuple[int, ...]]) -> bytes:
    try:
        return b"".join(struct.pack(layout, *row) for row in rows)
    except struct.error as error:
        raise InvalidRequest(f"a number is out of its range: {error}") from error


def encode_hello(correlation_id: int, client_name: str, session: Session) -> bytes:
    builder = _Builder(256)
    name = builder.text(client_name)
    fb.HelloStart(builder)
    fb.HelloAddVersionMin(builder, PROTOCOL_VERSION)
    fb.HelloAddVersionMax(builder, PROTOCOL_VERSION)
    if name:
        fb.HelloAddClientName(builder, name)
    fb.HelloAddSession(builder, fb.CreateSessionToken(builder, session.hi, session.lo))
    return builder.frame(fb.Kind.Hello, correlation_id, fb.HelloEnd(builder))


def _question(builder: _Builder, prompt: Prompt) -> list[tuple[str, int]]:
    """What says which prompt it is, the same in every request that has one: field name and encoded value."""
    fields = []
    if prompt.tokens is not None:
        fields.append(("Tokens", builder.packed(4, 4, token_bytes(prompt.tokens))))
    else:
        hashes = [(hash_of,) for hash_of in prompt.local_hashes or ()]
        fields.append(("LocalHashes", builder.packed(8, 8, _pack("<Q", hashes))))
        fields.append(("Scheme", _scheme(builder, prompt.scheme or Scheme(0))))
        fields.append(("TokenCount", prompt.token_count or 0))
    if prompt.lora:
        fields.append(("Lora", builder.text(prompt.lora)))
    if prompt.salt:
        fields.append(("Salt", builder.text(prompt.salt)))
    if prompt.media:
        fields.append(("Media", builder.packed(16, 8, _pack("<I4xQ", list(prompt.media)))))
    return fields


def _scheme(builder: _Builder, scheme: Scheme) -> int:
    fb.SchemeStart(builder)
    fb.SchemeAddBlockSize(builder, scheme.block_size)
    fb.SchemeAddWindow(builder, scheme.window)
    return int(fb.SchemeEnd(builder))


def _overrides(builder: _Builder, overrides: Overrides) -> int:
    fb.OverridesStart(builder)
    fb.OverridesAddMode(builder, overrides.mode)
    optional: list[tuple[Callable[..., None], object]] = [
        (fb.OverridesAddDeviceCredit, overrides.device_credit),
        (fb.OverridesAddPrefillLoadScale, overrides.prefill_load_scale),
        (fb.OverridesAddTemperature, overrides.temperature),
        (fb.OverridesAddSharedMultiplier, overrides.shared_multiplier),
        (fb.OverridesAddAssumeKvReuse, overrides.assume_kv_reuse),
        (fb.OverridesAddTrackPrefillTokens, overrides.track_prefill_tokens),
    ]
    for add, value in optional:
        if value is not None:
            add(builder, value)
    return int(fb.OverridesEnd(builder))


def _taint(builder: _Builder, key: str, weight: float) -> int:
    name = builder.CreateString(key)
    fb.TaintStart(builder)
    fb.TaintAddKey(builder, name)
    fb.TaintAddWeight(builder, weight)
    return int(fb.TaintEnd(builder))


def _wire_name(field: str) -> str:
    """The schema compiler's name of a field: `priority_jump` becomes `PriorityJump`."""
    return "".join(map(str.capitalize, field.split("_")))


#: The fields of a route that are numbers or flags, and their names on the wire.
_ROUTE_NUMBERS = {
    field.name: _wire_name(field.name)
    for field in dataclasses.fields(RouteRequest)
    if field.type in ("bool", "float", "int")
}


def encode_route(correlation_id: int, space_id: int, request: RouteRequest) -> bytes:
    """A route. Raises InvalidRequest for numbers that no frame can hold."""
    builder = _Builder(1024)
    fields = _question(builder, request)
    vectors = [
        ("RequestId", builder.text(request.book)),
        ("RequiredTaints", builder.offsets([builder.CreateString(taint) for taint in request.required_taints])),
        ("PreferredTaints", builder.offsets([_taint(builder, *taint) for taint in request.preferred_taints.items()])),
        ("Overrides", _overrides(builder, request.overrides) if request.overrides else 0),
        ("AffinitySession", builder.text(request.affinity_session)),
    ]
    if request.allow is not None:
        vectors.append(("Allow", builder.packed(16, 8, _pack("<QI4x", [tuple(worker) for worker in request.allow]))))
    if request.shared_hits:
        vectors.append(("SharedHits", builder.packed(8, 4, _pack("<II", list(request.shared_hits)))))
    fields += [(name, offset) for name, offset in vectors if offset]
    numbers: list[tuple[str, float]] = [("SpaceId", space_id), ("Book", request.book is not None)]
    numbers += [(name, getattr(request, field)) for field, name in _ROUTE_NUMBERS.items()]
    fb.RouteStart(builder)
    _add(builder, "Route", [*fields, *numbers])
    if request.pin is not None:
        fb.RouteAddPin(builder, fb.CreateWorkerRef(builder, *request.pin))
    if request.trace is not None:
        trace_id, span_id, flags = request.trace
        try:
            trace = fb.CreateTraceContext(builder, trace_id >> 64, trace_id & (1 << 64) - 1, span_id, flags)
        except (TypeError, struct.error) as error:
            raise InvalidRequest(f"trace cannot be {request.trace!r}: {error}") from error
        fb.RouteAddTrace(builder, trace)
    return builder.frame(fb.Kind.Route, correlation_id, fb.RouteEnd(builder))


def encode_overlap(correlation_id: int, space_id: int, prompt: Prompt) -> bytes:
    builder = _Builder(1024)
    fields = _question(builder, prompt)
    fb.OverlapStart(builder)
    _add(builder, "Overlap", [*fields, ("SpaceId", space_id)])
    return builder.frame(fb.Kind.Overlap, correlation_id, fb.OverlapEnd(builder))


def encode_potential_loads(correlation_id: int, space_id: int, prompt: Prompt) -> bytes:
    builder = _Builder(1024)
    fields = _question(builder, prompt)
    fb.PotentialLoadsStart(builder)
    _add(builder, "PotentialLoads", [*fields, ("SpaceId", space_id)])
    return builder.frame(fb.Kind.PotentialLoads, correlation_id, fb.PotentialLoadsEnd(builder))


def _add(builder: _Builder, table: str, fields: Sequence[tuple[str, Any]]) -> None:
    for name, value in fields:
        try:
            getattr(fb, f"{table}Add{name}")(builder, value)
        except (TypeError, struct.error) as error:
            raise InvalidRequest(f"{name} cannot be {value!r}: {error}") from error


def encode_prefill_complete(correlation_id: int, booking: Booking, prefill_us: int) -> bytes:
    builder = _Builder(128)
    fb.PrefillCompleteStart(builder)
    fb.PrefillCompleteAddBooking(builder, fb.CreateBookingHandle(builder, booking.slot, booking.generation))
    fb.PrefillCompleteAddPrefillUs(builder, prefill_us)
    return builder.frame(fb.Kind.PrefillComplete, correlation_id, fb.PrefillCompleteEnd(builder))


def encode_free(correlation_id: int, booking: Booking) -> bytes:
    builder = _Builder(128)
    fb.FreeStart(builder)
    fb.FreeAddBooking(builder, fb.CreateBookingHandle(builder, booking.slot, booking.generation))
    return builder.frame(fb.Kind.Free, correlation_id, fb.FreeEnd(builder))


def encode_free_request(correlation_id: int, request_id: str, attempt: int) -> bytes:
    """A free of whatever is booked under this name."""
    builder = _Builder(128)
    name = builder.text(request_id)
    fb.FreeStart(builder)
    fb.FreeAddRequestId(builder, name)
    fb.FreeAddAttempt(builder, attempt)
    return builder.frame(fb.Kind.Free, correlation_id, fb.FreeEnd(builder))


def encode_output_progress(correlation_id: int, booking: Booking, output_tokens: int) -> bytes:
    builder = _Builder(128)
    fb.OutputProgressStart(builder)
    fb.OutputProgressAddBooking(builder, fb.CreateBookingHandle(builder, booking.slot, booking.generation))
    fb.OutputProgressAddOutputTokens(builder, output_tokens)
    return builder.frame(fb.Kind.OutputProgress, correlation_id, fb.OutputProgressEnd(builder))


def encode_served(correlation_id: int, booking: Booking, worker: Worker) -> bytes:
    builder = _Builder(128)
    fb.ServedStart(builder)
    fb.ServedAddBooking(builder, fb.CreateBookingHandle(builder, booking.slot, booking.generation))
    fb.ServedAddWorker(builder, fb.CreateWorkerRef(builder, *worker))
    return builder.frame(fb.Kind.Served, correlation_id, fb.ServedEnd(builder))


def encode_report_failure(correlation_id: int, space_id: int, worker: Worker, reason: str) -> bytes:
    builder = _Builder(256)
    said = builder.text(reason)
    fb.ReportFailureStart(builder)
    fb.ReportFailureAddSpaceId(builder, space_id)
    if said:
        fb.ReportFailureAddReason(builder, said)
    fb.ReportFailureAddWorker(builder, fb.CreateWorkerRef(builder, *worker))
    return builder.frame(fb.Kind.ReportFailure, correlation_id, fb.ReportFailureEnd(builder))


def encode_report_load(correlation_id: int, space_id: int, worker: Worker, load: EngineLoad) -> bytes:
    builder = _Builder(256)
    fb.ReportLoadStart(builder)
    numbers = [
        ("SpaceId", space_id),
        ("ActivePrefillTokens", load.active_prefill_tokens),
        ("ActiveDecodeBlocks", load.active_decode_blocks),
        ("RunningRequests", load.running_requests),
        ("WaitingRequests", load.waiting_requests),
        ("KvUsage", load.kv_usage),
    ]
    _add(builder, "ReportLoad", numbers)
    fb.ReportLoadAddWorker(builder, fb.CreateWorkerRef(builder, *worker))
    return builder.frame(fb.Kind.ReportLoad, correlation_id, fb.ReportLoadEnd(builder))


def encode_workers(correlation_id: int, space_id: int | None, cursor: int) -> bytes:
    builder = _Builder(128)
    fb.WorkersStart(builder)
    fb.WorkersAddSpaceId(builder, EVERY_SPACE if space_id is None else space_id)
    fb.WorkersAddCursor(builder, cursor)
    return builder.frame(fb.Kind.Workers, correlation_id, fb.WorkersEnd(builder))


def encode_watch(correlation_id: int, space_id: int | None, fleet_version_seen: int) -> bytes:
    builder = _Builder(128)
    fb.WatchStart(builder)
    fb.WatchAddSpaceId(builder, EVERY_SPACE if space_id is None else space_id)
    fb.WatchAddFleetVersionSeen(builder, fleet_version_seen)
    return builder.frame(fb.Kind.Watch, correlation_id, fb.WatchEnd(builder))


# ---- replies ----------------------------------------------------------------------------------------


def decode_reply(kind: int, body: bytes, instance_id: int, deadline: float = float("inf")) -> Reply:
    """A reply in its body. `instance_id` is that of the daemon on this connection.

    Raises ProtocolError for a body that is not what its header says, or that lists or names more than any daemon does, and
    ReplyTooLate for one that is not read by the deadline (of `time.monotonic`).
    """
    decode = _DECODERS.get(kind)
    if decode is None:
        raise ProtocolError(f"the daemon sent a frame of kind {kind}, which is no reply that this client knows")
    if body[4:8] != IDENTIFIER:
        raise ProtocolError("a body does not carry the identifier KVRT")
    try:
        reply: Reply = decode(_Reading(body, instance_id, deadline))
    except (struct.error, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"a reply of kind {kind} cannot be read: {error!r}") from error
    return reply


class _Reading:
    """A body that is being read, and what may still be read of it.

    A list may name one row over and over, and rows one text: what a body costs to read is not bounded by its bytes.
    """

    def __init__(self, body: bytes, instance_id: int, deadline: float) -> None:
        self.body, self.instance_id, self.deadline = body, instance_id, deadline
        self.cost_left = REPLY_COST_MAX
        self.text_bytes_left = max(REPLY_TEXT_BYTES_MIN, 4 * len(body))

    def tables(self, length: int, at: Callable[[int], Any], convert: Callable[[Any], Any]) -> tuple[Any, ...]:
        """The rows of a list of tables."""
        return self.listed(length, at, convert, TABLE_ROW_COST)

    def listed(
        self, length: int, at: Callable[[int], Any], convert: Callable[[Any], Any], row_cost: int = 1
    ) -> tuple[Any, ...]:
        """The rows of a list of structs or texts."""
        self.cost_left -= length * row_cost
        if self.cost_left < 0:
            raise ValueError("it lists more than a daemon does")
        return tuple(self._row(at(index), index, convert) for index in range(length))

    def _row(self, row: Any, index: int, convert: Callable[[Any], Any]) -> Any:
        if index % ROWS_PER_CLOCK == 0 and time.monotonic() > self.deadline:
            raise ReplyTooLate("reading the daemon's reply takes longer than its request had left")
        return convert(row)

    def text(self, value: bytes | None) -> str:
        """A text, empty where there is none."""
        if not value:
            return ""
        self.text_bytes_left -= len(value)
        if self.text_bytes_left < 0:
            raise ValueError("its texts are longer than its bytes allow")
        return value.decode()


def _worker(table: Any) -> Worker:
    return Worker(table.WorkerId(), table.DpRank())


def _tiers(struct_: Any) -> TierBlocks:
    if struct_ is None:
        return TierBlocks()
    return TierBlocks(struct_.Device(), struct_.Host(), struct_.Disk(), struct_.External())


def _trust(struct_: Any) -> Trust:
    if struct_ is None:
        return Trust()
    reasons = named_bits(struct_.Reasons(), TRUST_REASONS)
    level, since, seq = struct_.Level(), struct_.SinceUnixMs(), struct_.AsOfSeq()
    return Trust(TrustLevel(level), reasons, since, seq, struct_.AsOfUnixMs())


def _decode_scheme(table: Any) -> Scheme:
    known = table is not None and table.Window() in (Window.PLAIN, Window.BIGRAM) and table.SeedRule() == 0
    # A way of hashing that is not known here is as good as none: tokens are sent then.
    return Scheme(table.BlockSize(), Window(table.Window())) if known else Scheme(0)


def _space(reading: _Reading, table: Any) -> Space:
    role = PoolRole(table.Role())
    model, namespace = reading.text(table.Model()), reading.text(table.Namespace())
    return Space(table.SpaceId(), model, namespace, role, _decode_scheme(table.Scheme()))


def _hello(reading: _Reading) -> Hello:
    table = fb.HelloReply.GetRootAs(reading.body)
    limits = table.Limits()
    return Hello(
        version=table.Version(),
        instance_id=table.InstanceId(),
        limits=Limits(
            frame_body_bytes_max=limits.FrameBodyBytesMax(),
            prompt_tokens_max=limits.PromptTokensMax(),
            candidates_max=limits.CandidatesMax(),
            workers_page_max=limits.WorkersPageMax(),
            bookings_per_session_max=limits.BookingsPerSessionMax(),
        ),
        features=named_bits(table.Features(), FEATURES),
        spaces=reading.tables(table.SpacesLength(), table.Spaces, partial(_space, reading)),
        admin_socket=reading.text(table.AdminSocket()) or None,
    )


_TERMS = tuple(CostTerms.__dataclass_fields__)


def _terms(table: Any) -> CostTerms | None:
    if table is None:
        return None
    return CostTerms(*(getattr(table, _wire_name(name))() for name in _TERMS))


def _candidate(reading: _Reading, table: Any) -> Candidate:
    return Candidate(
        worker=_worker(table),
        name=reading.text(table.Name()),
        overlap=_tiers(table.Overlap()),
        trust=_trust(table.Trust()),
        cost=table.Cost(),
        state=WorkerState(table.State()),
        terms=_terms(table.Terms()),
    )


def _removal(reading: _Reading, table: Any) -> Removal:
    return Removal(reading.text(table.Rule()), reading.listed(table.WorkersLength(), table.Workers, _worker))


def _other(load: Any) -> OtherLoad:
    return OtherLoad(
        worker=_worker(load),
        origin=load.Origin(),
        age_ms=load.AgeMs(),
        requests=load.Requests(),
        prefill_tokens=load.PrefillTokens(),
        decode_blocks=load.DecodeBlocks(),
    )


def _booking(handle: Any, instance_id: int) -> Booking | None:
    if handle is None or (handle.Slot(), handle.Generation()) == (0, 0):
        return None
    return Booking(handle.Slot(), handle.Generation(), instance_id)


def _route(reading: _Reading) -> RouteReply:
    table = fb.RouteReply.GetRootAs(reading.body)
    return RouteReply(
        candidates=reading.tables(table.CandidatesLength(), table.Candidates, partial(_candidate, reading)),
        eligible=table.Eligible(),
        match=MatchStatus(table.Match()),
        notes=named_bits(table.Notes(), REPLY_NOTES),
        request_blocks=table.RequestBlocks(),
        policy_version=table.PolicyVersion(),
        fleet_version=table.FleetVersion(),
        index_epoch=table.IndexEpoch(),
        booking=_booking(table.Booking(), reading.instance_id),
        removed=reading.tables(table.RemovedLength(), table.Removed, partial(_removal, reading)),
        ties=table.Ties(),
        nobody=error_name(table.Nobody()) if table.Nobody() else None,
        retry_after_us=table.RetryAfterUs(),
        mode=Mode(table.Mode()),
        prefill=reading.tables(table.PrefillLength(), table.Prefill, partial(_candidate, reading)),
        prefill_booking=_booking(table.PrefillBooking(), reading.instance_id),
        others=reading.listed(table.OthersLength(), table.Others, _other),
    )


def _report(reply: Any) -> Callable[[_Reading], BookingReport]:
    def decode(reading: _Reading) -> BookingReport:
        table = reply.GetRootAs(reading.body)
        return BookingReport(BookingOutcome(table.Outcome()), table.InstanceId())

    return decode


def _failure(reading: _Reading) -> FailureReport:
    return FailureReport(fb.ReportFailureReply.GetRootAs(reading.body).BackOffMs())


def _load(reading: _Reading) -> LoadReport:
    return LoadReport(bool(fb.ReportLoadReply.GetRootAs(reading.body).Accepted()))


def _overlap(reading: _Reading) -> OverlapReply:
    table = fb.OverlapReply.GetRootAs(reading.body)

    def entry(row: Any) -> OverlapEntry:
        return OverlapEntry(_worker(row), _tiers(row.Overlap()), _trust(row.Trust()))

    return OverlapReply(
        workers=reading.tables(table.WorkersLength(), table.Workers, entry),
        match=MatchStatus(table.Match()),
        request_blocks=table.RequestBlocks(),
        notes=named_bits(table.Notes(), REPLY_NOTES),
    )


def _potential_loads(reading: _Reading) -> PotentialLoads:
    table = fb.PotentialLoadsReply.GetRootAs(reading.body)

    def load(row: Any) -> PotentialLoad:
        return PotentialLoad(_worker(row), row.ActiveRequests(), row.PrefillTokens(), row.DecodeBlocks())

    return PotentialLoads(
        loads=reading.tables(table.LoadsLength(), table.Loads, load),
        match=MatchStatus(table.Match()),
        request_blocks=table.RequestBlocks(),
        notes=named_bits(table.Notes(), REPLY_NOTES),
    )


def _worker_info(reading: _Reading, table: Any) -> WorkerInfo:
    return WorkerInfo(
        worker=_worker(table),
        space_id=table.SpaceId(),
        name=reading.text(table.Name()),
        state=WorkerState(table.State()),
        device_class=DeviceClass(table.DeviceClass()),
        weight=table.Weight(),
        capacity_blocks=table.CapacityBlocks(),
        batched_tokens_max=table.BatchedTokensMax(),
        taints=reading.listed(table.TaintsLength(), table.Taints, reading.text),
        trust=_trust(table.Trust()),
    )


def _workers(reading: _Reading) -> WorkersPage:
    table = fb.WorkersReply.GetRootAs(reading.body)
    workers = reading.tables(table.WorkersLength(), table.Workers, partial(_worker_info, reading))
    return WorkersPage(workers, table.NextCursor(), table.FleetVersion())


def _watch(reading: _Reading) -> FleetView:
    table = fb.WatchReply.GetRootAs(reading.body)
    workers = reading.tables(table.WorkersLength(), table.Workers, partial(_worker_info, reading))
    return FleetView(workers, table.FleetVersion())


def _error(reading: _Reading) -> RemoteError:
    table = fb.Error.GetRootAs(reading.body)
    # An unknown side counts as the daemon's.
    side = _SIDES[min(table.Side(), len(_SIDES) - 1)]
    code, retryable, after_us = table.Code(), table.Retryable(), table.RetryAfterUs()
    return RemoteError(code, side, retryable, after_us, reading.text(table.Message()), reading.text(table.Remedy()))


_DECODERS: dict[int, Callable[[_Reading], Any]] = {
    fb.Kind.HelloReply: _hello,
    fb.Kind.RouteReply: _route,
    fb.Kind.PrefillCompleteReply: _report(fb.PrefillCompleteReply),
    fb.Kind.FreeReply: _report(fb.FreeReply),
    fb.Kind.OutputProgressReply: _report(fb.OutputProgressReply),
    fb.Kind.ServedReply: _report(fb.ServedReply),
    fb.Kind.ReportFailureReply: _failure,
    fb.Kind.ReportLoadReply: _load,
    fb.Kind.OverlapReply: _overlap,
    fb.Kind.PotentialLoadsReply: _potential_loads,
    fb.Kind.WorkersReply: _workers,
    fb.Kind.WatchReply: _watch,
    fb.Kind.Error: _error,
}
