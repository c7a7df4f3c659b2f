"""The blocking client, for one thread."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from os import PathLike, fspath
from types import TracebackType
from typing import TypeVar

from . import frames
from .core import Core, Options, OtherRun
from .errors import ConnectionLost, DeadlineExceeded, ProtocolError, RemoteError, Unreachable
from .messages import (
    WORKERS_MAX,
    Booking,
    BookingOutcome,
    BookingReport,
    EngineLoad,
    FailureReport,
    FleetView,
    Hello,
    LoadReport,
    OverlapReply,
    PoolRole,
    PotentialLoads,
    Prompt,
    RouteReply,
    RouteRequest,
    Session,
    Worker,
    WorkerInfo,
    WorkersPage,
)

AnyReply = TypeVar("AnyReply")

_READ_BYTES = 1 << 18


class Client:
    """A connection to a daemon. It is made on first use, and again after it broke.

    Not to be used by two threads at once: give each a client of its own, and all the same `session` in their
    options, so that a booking made by one can be freed by another.
    """

    def __init__(self, path: str | PathLike[str], options: Options | None = None) -> None:
        self.path = fspath(path)
        self.options = options or Options()
        self._core = Core(self.options)
        self._socket: socket.socket | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def session(self) -> Session:
        """The session of this client, for the options of another that shares its bookings."""
        return self._core.session

    def close(self) -> None:
        """Closes the connection. The daemon keeps the bookings for its grace period."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self._core.closed()

    def connect(self, *, timeout_s: float | None = None) -> Hello:
        """Connects and learns the workers, so that the first decision can already be made without the daemon."""
        deadline = self._deadline(timeout_s)
        hello = self._connected(deadline)
        self._learn(None, deadline)
        return hello

    def hello(self, *, timeout_s: float | None = None) -> Hello:
        """The daemon's reply to hello."""
        return self._connected(self._deadline(timeout_s))

    def route(self, request: RouteRequest, *, timeout_s: float | None = None) -> RouteReply:
        """Asks which worker should run a prompt, and books it if the request says so.

        `decided_by` says who decided: if no daemon answers in time, the client decides alone, if its options allow it.
        Raises RemoteError for the daemon's refusals, Unreachable if neither the daemon nor the client could decide.
        """
        deadline = self._deadline(timeout_s)
        try:
            reply = self._ask(partial(self._route, request, deadline), RouteReply, deadline, hashed=request)
        except Unreachable as why:
            return self._core.decide_alone(request, why)
        except RemoteError as why:
            if why.kind != "draining":
                raise
            return self._core.decide_alone(request, why)
        return reply

    def overlap(self, prompt: Prompt, *, timeout_s: float | None = None) -> OverlapReply:
        """Asks how much of a prompt each worker holds."""
        deadline = self._deadline(timeout_s)
        return self._ask(lambda at: self._core.overlap(at, prompt), OverlapReply, deadline, hashed=prompt)

    def potential_loads(self, prompt: Prompt, *, timeout_s: float | None = None) -> PotentialLoads:
        """Asks for the work of every worker if it took a prompt, for a gateway that chooses by itself."""
        deadline = self._deadline(timeout_s)
        return self._ask(lambda at: self._core.potential_loads(at, prompt), PotentialLoads, deadline, hashed=prompt)

    def watch(self, *, space_id: int | None = None) -> Iterator[FleetView]:
        """The workers of a space, or of all, at once and after each change. Changes that follow closely are one.

        Over a connection of its own, which is closed with the iterator. Raises Unreachable when that ends: watch again.
        """
        watching = Client(self.path, self.options)
        try:
            deadline = self._deadline(None)
            watching._connected(deadline)
            correlation_id = watching._core.take_id()
            watching._send(frames.encode_watch(correlation_id, space_id, 0), deadline)
            while True:
                reply = watching._recv(correlation_id, deadline)
                if isinstance(reply, RemoteError):
                    raise reply
                if not isinstance(reply, FleetView):
                    raise ProtocolError(f"the daemon answered with a {type(reply).__name__}")
                yield reply
                # A fleet may never change.
                deadline = float("inf")
        finally:
            watching.close()

    def workers(self, *, space_id: int | None = None, timeout_s: float | None = None) -> tuple[WorkerInfo, ...]:
        """The workers of a space, or of all."""
        deadline = self._deadline(timeout_s)
        self._connected(deadline)
        return self._learn(space_id, deadline)

    def prefill_complete(
        self, booking: Booking | None, prefill_us: int = 0, *, timeout_s: float | None = None
    ) -> BookingOutcome | None:
        """Reports that the prefill of a booked request is complete, and its microseconds (0 = not known).

        None: nothing was booked, or the report is sent when the daemon can be reached again.
        """
        if booking is None:
            return None
        told = booking
        return self._report(told, lambda at: frames.encode_prefill_complete(at, told, prefill_us), timeout_s)

    def output_progress(
        self, booking: Booking | None, output_tokens: int, *, timeout_s: float | None = None
    ) -> BookingOutcome | None:
        """Reports how many tokens a booked request has generated since its start.

        None: nothing was booked, or the daemon cannot be reached. This count is not sent later: the next one replaces
        it.
        """
        if booking is None:
            return None
        told = booking
        say = partial(frames.encode_output_progress, booking=told, output_tokens=output_tokens)
        return self._report(told, say, timeout_s, is_interim=True)

    def served(
        self, booking: Booking | None, worker: Worker, *, timeout_s: float | None = None
    ) -> BookingOutcome | None:
        """Reports that another worker runs a booked request than the booked one. None: as for `prefill_complete`."""
        if booking is None:
            return None
        told = booking
        return self._report(told, lambda at: frames.encode_served(at, told, worker), timeout_s)

    def free(self, booking: Booking | None, *, timeout_s: float | None = None) -> BookingOutcome | None:
        """Frees a booking: its request has ended, however it ended. None: as for `prefill_complete`."""
        if booking is None:
            return None
        told = booking
        return self._report(told, lambda at: frames.encode_free(at, told), timeout_s)

    def report_failure(
        self,
        model: str,
        worker: Worker,
        reason: str = "",
        *,
        namespace: str | None = None,
        role: PoolRole | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Reports that a worker failed a request (EVERY_RANK: every rank of it). How long requests avoid it, milliseconds.

        0 if reports of this user keep requests away from as many workers as the daemon's user_share_percent allows."""

        def say(correlation_id: int) -> bytes:
            space = self._core.space(model, namespace, role)
            return frames.encode_report_failure(correlation_id, space.space_id, worker, reason)

        return self._ask(say, FailureReport, self._deadline(timeout_s)).back_off_ms

    def report_load(
        self,
        model: str,
        worker: Worker,
        load: EngineLoad,
        *,
        namespace: str | None = None,
        role: PoolRole | None = None,
        timeout_s: float | None = None,
    ) -> bool:
        """Passes on an engine's own report of its load. Whether the daemon accepted it.

        Not where the worker has just left, or where reports of this user are in force for as many workers as the daemon's
        user_share_percent allows."""

        def say(correlation_id: int) -> bytes:
            space = self._core.space(model, namespace, role)
            return frames.encode_report_load(correlation_id, space.space_id, worker, load)

        return self._ask(say, LoadReport, self._deadline(timeout_s)).accepted

    # ---- internals ---------------------------------------------------------------------------------

    def _route(self, request: RouteRequest, deadline: float, correlation_id: int) -> bytes:
        return self._core.route(correlation_id, request, deadline - time.monotonic())

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self.options.timeout_s if timeout_s is None else timeout_s)

    def _report(
        self, booking: Booking, say: Callable[[int], bytes], timeout_s: float | None, *, is_interim: bool = False
    ) -> BookingOutcome | None:
        build = partial(self._core.report, booking, say)
        try:
            return self._ask(build, BookingReport, self._deadline(timeout_s)).outcome
        except OtherRun:
            return BookingOutcome.UNKNOWN
        except Unreachable:
            # A report that arrives twice changes nothing. The next count replaces this one.
            if not is_interim:
                self._core.owe(booking, say)
            return None

    def _learn(self, space_id: int | None, deadline: float) -> tuple[WorkerInfo, ...]:
        found: list[WorkerInfo] = []
        cursor = 0
        while True:
            page = self._ask(partial(frames.encode_workers, space_id=space_id, cursor=cursor), WorkersPage, deadline)
            found.extend(page.workers)
            if space_id is None:
                self._core.fleet.take_page(page, cursor)
            if page.next_cursor <= cursor:
                return tuple(found)
            if len(found) > WORKERS_MAX:
                raise ProtocolError("the daemon's pages do not end")
            cursor = page.next_cursor

    def _ask(
        self, build: Callable[[int], bytes], kind: type[AnyReply], deadline: float, *, hashed: Prompt | None = None
    ) -> AnyReply:
        """Asks. It retries once on another connection if this one breaks, and with tokens if hashes are refused."""
        broke = False
        while True:
            self._connected(deadline)
            # A silent daemon gets a back-off, like one that is gone.
            self._core.check_backoff(time.monotonic())
            correlation_id = self._core.take_id()
            frame = build(correlation_id)
            try:
                self._send(self._core.ahead(time.monotonic()) + frame, deadline)
                reply = self._recv(correlation_id, deadline)
            except ConnectionLost:
                if broke:
                    raise
                broke = True
                continue
            if isinstance(reply, kind):
                return reply
            if not isinstance(reply, RemoteError):
                raise ProtocolError(f"the daemon answered with a {type(reply).__name__}")
            if hashed is None or not self._core.hashes_refused(hashed, reply):
                raise reply

    def _connected(self, deadline: float) -> Hello:
        if self._socket is not None and self._core.hello is not None:
            return self._core.hello
        self._core.check_backoff(time.monotonic())
        try:
            self._socket = self._open(deadline)
            correlation_id, frame = self._core.opening()
            self._send(frame, deadline)
            self._core.opened(self._recv(correlation_id, deadline))
        except BaseException:
            self._core.failed(time.monotonic())
            self.close()
            raise
        assert self._core.hello is not None
        return self._core.hello

    def _open(self, deadline: float) -> socket.socket:
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            opened.settimeout(max(deadline - time.monotonic(), 1e-3))
            opened.connect(self.path)
        except OSError as error:
            opened.close()
            raise Unreachable(f"cannot connect to {self.path}: {error}") from error
        return opened

    def _send(self, data: bytes, deadline: float) -> None:
        assert self._socket is not None
        try:
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            self._socket.sendall(data)
        except TimeoutError as error:
            # A part of a frame may be sent: the connection cannot be used any more.
            self._core.failed(time.monotonic())
            self.close()
            raise DeadlineExceeded("the daemon takes no more requests") from error
        except OSError as error:
            self.close()
            raise ConnectionLost(f"the connection to the daemon broke: {error}") from error

    def _recv(self, wanted: int, deadline: float) -> frames.Reply:
        """Waits for the reply with this id. The daemon's errors are replies."""
        while True:
            try:
                found = self._core.next_reply(deadline)
            except ProtocolError:
                self.close()
                raise
            if found is None:
                self._read(deadline)
                continue
            correlation_id, reply = found
            # An error about the whole connection has no request's id.
            refused = correlation_id == 0 and isinstance(reply, RemoteError)
            if correlation_id != wanted and not refused:
                follow_up = self._core.stray(correlation_id, reply)
                if follow_up:
                    self._send(follow_up, deadline)
                # The daemon may send replies to no request without end.
                self._check(deadline)
                continue
            self._core.claimed(wanted, reply)
            if isinstance(reply, ProtocolError):
                raise reply
            return reply

    def _late(self) -> DeadlineExceeded:
        self._core.failed(time.monotonic())
        return DeadlineExceeded("the daemon did not answer in time")

    def _check(self, deadline: float) -> float:
        """The rest of the call's time. Raises DeadlineExceeded if there is none."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise self._late()
        return left

    def _read(self, deadline: float) -> None:
        assert self._socket is not None
        # A reply may arrive byte by byte.
        left = self._check(deadline)
        try:
            self._socket.settimeout(None if left == float("inf") else left)
            data = self._socket.recv(_READ_BYTES)
        except TimeoutError as error:
            raise self._late() from error
        except OSError as error:
            self.close()
            raise ConnectionLost(f"the connection to the daemon broke: {error}") from error
        if not data:
            self.close()
            raise ConnectionLost("the daemon has closed the connection")
        self._core.feed(data)
