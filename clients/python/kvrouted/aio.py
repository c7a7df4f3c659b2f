"""The asyncio client: any number of requests in flight on one connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from os import PathLike, fspath
from types import TracebackType
from typing import TypeVar

from . import frames
from .core import Core, Options, OtherRun
from .errors import ConnectionLost, DeadlineExceeded, KvroutedError, ProtocolError, RemoteError, Unreachable
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
_Answer = frames.Reply | ProtocolError

_READ_BYTES = 1 << 18


class AsyncClient:
    """A connection to a daemon. It is made on first use, and again after it broke.

    For the tasks of one event loop. A task that is cancelled while it waits for a booking leaves none behind:
    the client frees what comes too late.
    """

    def __init__(self, path: str | PathLike[str], options: Options | None = None) -> None:
        self.path = fspath(path)
        self.options = options or Options()
        self._core = Core(self.options)
        self._writer: asyncio.StreamWriter | None = None
        #: The hello of the connection; None = no connection is ready.
        self._greeted: Hello | None = None
        self._reading: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()
        #: Held by the task that waits for room to write; other tasks wait for it.
        self._making_room = asyncio.Lock()
        self._waiting: dict[int, asyncio.Future[_Answer]] = {}
        self._watching: dict[int, asyncio.Queue[_Answer | BaseException]] = {}

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def session(self) -> Session:
        """The session of this client, for the options of another that shares its bookings."""
        return self._core.session

    async def close(self) -> None:
        """Closes the connection. The daemon keeps the bookings for its grace period."""
        reading, self._reading = self._reading, None
        self._lose(ConnectionLost("the client was closed"))
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def connect(self, *, timeout_s: float | None = None) -> Hello:
        """Connects and learns the workers, so that the first decision can already be made without the daemon."""
        deadline = self._deadline(timeout_s)
        hello = await self._connected(deadline)
        await self._learn(None, deadline)
        return hello

    async def hello(self, *, timeout_s: float | None = None) -> Hello:
        """The daemon's reply to hello."""
        return await self._connected(self._deadline(timeout_s))

    async def route(self, request: RouteRequest, *, timeout_s: float | None = None) -> RouteReply:
        """As `Client.route`."""
        deadline = self._deadline(timeout_s)
        try:
            return await self._ask(partial(self._route, request, deadline), RouteReply, deadline, hashed=request)
        except Unreachable as why:
            return self._core.decide_alone(request, why)
        except RemoteError as why:
            if why.kind != "draining":
                raise
            return self._core.decide_alone(request, why)

    async def overlap(self, prompt: Prompt, *, timeout_s: float | None = None) -> OverlapReply:
        """Asks how much of a prompt each worker holds."""
        deadline = self._deadline(timeout_s)
        return await self._ask(lambda at: self._core.overlap(at, prompt), OverlapReply, deadline, hashed=prompt)

    async def potential_loads(self, prompt: Prompt, *, timeout_s: float | None = None) -> PotentialLoads:
        """As `Client.potential_loads`."""
        deadline = self._deadline(timeout_s)
        build = partial(self._core.potential_loads, prompt=prompt)
        return await self._ask(build, PotentialLoads, deadline, hashed=prompt)

    async def watch(self, *, space_id: int | None = None) -> AsyncIterator[FleetView]:
        """The workers of a space, or of all, at once and after each change. Changes that follow closely are one.

        On this client's connection. Raises Unreachable when that ends: watch again. A client has one watch: another one
        takes its place, and the former ends with an error.
        """
        deadline = self._deadline(None)
        await self._connected(deadline)
        correlation_id = self._core.take_id()
        told: asyncio.Queue[_Answer | BaseException] = asyncio.Queue()
        self._watching[correlation_id] = told
        try:
            self._write(frames.encode_watch(correlation_id, space_id, 0))
            # A fleet may never change, so only the first reply has a deadline.
            reply = await asyncio.wait_for(told.get(), max(deadline - time.monotonic(), 0))
            if isinstance(reply, FleetView):
                for former in self._watching.values():
                    if former is not told:
                        former.put_nowait(KvroutedError("another watch of this client has taken the place of this one"))
            while isinstance(reply, FleetView):
                yield reply
                reply = await told.get()
        except asyncio.TimeoutError as error:
            self._core.failed(time.monotonic())
            raise DeadlineExceeded("the daemon did not answer in time") from error
        finally:
            self._watching.pop(correlation_id, None)
        if isinstance(reply, BaseException):
            raise reply
        raise ProtocolError(f"the daemon answered with a {type(reply).__name__}")

    async def workers(
        self, *, space_id: int | None = None, timeout_s: float | None = None
    ) -> tuple[WorkerInfo, ...]:
        """The workers of a space, or of all."""
        return await self._learn(space_id, self._deadline(timeout_s))

    async def prefill_complete(
        self, booking: Booking | None, prefill_us: int = 0, *, timeout_s: float | None = None
    ) -> BookingOutcome | None:
        """As `Client.prefill_complete`."""
        if booking is None:
            return None
        told = booking
        return await self._report(told, lambda at: frames.encode_prefill_complete(at, told, prefill_us), timeout_s)

    async def output_progress(
        self, booking: Booking | None, output_tokens: int, *, timeout_s: float | None = None
    ) -> BookingOutcome | None:
        """As `Client.output_progress`."""
        if booking is None:
            return None
        told = booking
        say = partial(frames.encode_output_progress, booking=told, output_tokens=output_tokens)
        return await self._report(told, say, timeout_s, is_interim=True)

    async def served(
        self, booking: Booking | None, worker: Worker, *, timeout_s: float | None = None
    ) -> BookingOutcome | None:
        """As `Client.served`."""
        if booking is None:
            return None
        told = booking
        return await self._report(told, lambda at: frames.encode_served(at, told, worker), timeout_s)

    async def free(self, booking: Booking | None, *, timeout_s: float | None = None) -> BookingOutcome | None:
        """As `Client.free`."""
        if booking is None:
            return None
        told = booking
        return await self._report(told, lambda at: frames.encode_free(at, told), timeout_s)

    async def report_failure(
        self,
        model: str,
        worker: Worker,
        reason: str = "",
        *,
        namespace: str | None = None,
        role: PoolRole | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """As `Client.report_failure`."""

        def say(correlation_id: int) -> bytes:
            space = self._core.space(model, namespace, role)
            return frames.encode_report_failure(correlation_id, space.space_id, worker, reason)

        return (await self._ask(say, FailureReport, self._deadline(timeout_s))).back_off_ms

    async def report_load(
        self,
        model: str,
        worker: Worker,
        load: EngineLoad,
        *,
        namespace: str | None = None,
        role: PoolRole | None = None,
        timeout_s: float | None = None,
    ) -> bool:
        """As `Client.report_load`."""

        def say(correlation_id: int) -> bytes:
            space = self._core.space(model, namespace, role)
            return frames.encode_report_load(correlation_id, space.space_id, worker, load)

        return (await self._ask(say, LoadReport, self._deadline(timeout_s))).accepted

    # ---- internals ---------------------------------------------------------------------------------

    def _route(self, request: RouteRequest, deadline: float, correlation_id: int) -> bytes:
        return self._core.route(correlation_id, request, deadline - time.monotonic())

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self.options.timeout_s if timeout_s is None else timeout_s)

    async def _report(
        self, booking: Booking, say: Callable[[int], bytes], timeout_s: float | None, *, is_interim: bool = False
    ) -> BookingOutcome | None:
        build = partial(self._core.report, booking, say)
        try:
            return (await self._ask(build, BookingReport, self._deadline(timeout_s))).outcome
        except OtherRun:
            return BookingOutcome.UNKNOWN
        except Unreachable:
            # A report that arrives twice changes nothing. The next count replaces this one.
            if not is_interim:
                self._core.owe(booking, say)
            return None

    async def _learn(self, space_id: int | None, deadline: float) -> tuple[WorkerInfo, ...]:
        found: list[WorkerInfo] = []
        cursor = 0
        while True:
            page = await self._ask(partial(frames.encode_workers, space_id=space_id, cursor=cursor), WorkersPage, deadline)
            found.extend(page.workers)
            if space_id is None:
                self._core.fleet.take_page(page, cursor)
            if page.next_cursor <= cursor:
                return tuple(found)
            if len(found) > WORKERS_MAX:
                raise ProtocolError("the daemon's pages do not end")
            cursor = page.next_cursor

    async def _ask(
        self, build: Callable[[int], bytes], kind: type[AnyReply], deadline: float, *, hashed: Prompt | None = None
    ) -> AnyReply:
        """Asks. It retries once on another connection if this one breaks, and with tokens if hashes are refused."""
        broke = False
        while True:
            await self._connected(deadline)
            # A silent daemon gets a back-off, like one that is gone.
            self._core.check_backoff(time.monotonic())
            try:
                await self._room(deadline)
            except ConnectionLost:
                if broke:
                    raise
                broke = True
                continue
            correlation_id = self._core.take_id()
            frame = build(correlation_id)
            try:
                reply = await self._exchange(self._core.ahead(time.monotonic()) + frame, correlation_id, deadline)
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

    async def _room(self, deadline: float) -> None:
        """Waits until the daemon has read most of what was written, so that nothing piles up for a daemon that hangs."""
        writer = self._writer
        if writer is None or not self._is_full(writer):
            return
        try:
            await asyncio.wait_for(self._drain(writer), max(deadline - time.monotonic(), 0))
        except asyncio.TimeoutError as error:
            self._core.failed(time.monotonic())
            raise DeadlineExceeded("the daemon takes no more requests") from error
        except OSError as error:
            raise ConnectionLost(f"the connection to the daemon broke: {error}") from error
        if self._writer is not writer:
            raise ConnectionLost("the connection to the daemon broke")
        # Another task may have found the daemon silent meanwhile.
        self._core.check_backoff(time.monotonic())

    async def _drain(self, writer: asyncio.StreamWriter) -> None:
        async with self._making_room:
            while self._is_full(writer):
                await writer.drain()

    @staticmethod
    def _is_full(writer: asyncio.StreamWriter) -> bool:
        if writer.is_closing():
            return False
        return writer.transport.get_write_buffer_size() > writer.transport.get_write_buffer_limits()[1]

    def _write(self, data: bytes) -> None:
        if self._writer is None or self._writer.is_closing():
            raise ConnectionLost("the connection to the daemon broke")
        self._writer.write(data)

    async def _exchange(self, data: bytes, correlation_id: int, deadline: float) -> frames.Reply:
        coming: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._write(data)
        self._waiting[correlation_id] = coming
        try:
            reply = await asyncio.wait_for(coming, max(deadline - time.monotonic(), 0))
        except (asyncio.TimeoutError, asyncio.CancelledError) as error:
            # From here on no caller waits for its reply, even if the reply has just arrived.
            self._waiting.pop(correlation_id, None)
            if coming.done() and not coming.cancelled() and coming.exception() is None:
                self._nobody_waits(correlation_id, coming.result())
            if isinstance(error, asyncio.CancelledError):
                raise
            self._core.failed(time.monotonic())
            raise DeadlineExceeded("the daemon did not answer in time") from error
        if isinstance(reply, ProtocolError):
            raise reply
        return reply

    async def _connected(self, deadline: float) -> Hello:
        if self._writer is not None and self._writer.is_closing():
            # A send failed; the end of the stream is still to be read.
            self._lose(ConnectionLost("the connection to the daemon broke"))
        if self._greeted is not None:
            return self._greeted
        try:
            await asyncio.wait_for(self._connecting.acquire(), max(deadline - time.monotonic(), 0))
        except asyncio.TimeoutError as error:
            raise DeadlineExceeded("another task is still connecting") from error
        try:
            return self._greeted or await self._connect(deadline)
        finally:
            self._connecting.release()

    async def _connect(self, deadline: float) -> Hello:
        self._core.check_backoff(time.monotonic())
        try:
            await self._open(deadline)
            correlation_id, frame = self._core.opening()
            self._core.opened(await self._exchange(frame, correlation_id, deadline))
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):
                self._core.failed(time.monotonic())
            self._lose(error if isinstance(error, ConnectionLost) else ConnectionLost("no hello came"))
            raise
        if self._core.hello is None or self._writer is None:
            raise ConnectionLost("the daemon has closed the connection")
        self._greeted = self._core.hello
        return self._greeted

    async def _open(self, deadline: float) -> None:
        opening = asyncio.open_unix_connection(self.path)
        try:
            reader, writer = await asyncio.wait_for(opening, max(deadline - time.monotonic(), 0))
        except (OSError, asyncio.TimeoutError) as error:
            raise Unreachable(f"cannot connect to {self.path}: {error}") from error
        self._writer = writer
        self._reading = asyncio.get_running_loop().create_task(self._read(reader, writer))

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Delivers replies to the callers that wait for them, until the connection ends."""
        why: ConnectionLost | None = None
        try:
            while data := await reader.read(_READ_BYTES):
                self._core.feed(data)
                while (found := self._core.next_reply(time.monotonic() + self.options.timeout_s)) is not None:
                    self._hand_out(*found)
        except OSError as error:
            why = ConnectionLost(f"the connection to the daemon broke: {error}")
        except ProtocolError as error:
            why = ConnectionLost(str(error))
        if self._writer is writer:
            self._lose(why or ConnectionLost("the daemon has closed the connection"))

    def _hand_out(self, correlation_id: int, reply: _Answer) -> None:
        if correlation_id == 0 and isinstance(reply, RemoteError) and self._waiting:
            # An error about the whole connection has no request's id: it answers the hello.
            correlation_id = min(self._waiting)
        if correlation_id in self._watching:
            told = self._watching[correlation_id]
            # A newer fleet replaces one that the caller has not read yet.
            if not told.empty():
                told.get_nowait()
            told.put_nowait(reply)
            return
        coming = self._waiting.pop(correlation_id, None)
        if coming is not None and not coming.done():
            self._core.claimed(correlation_id, reply)
            coming.set_result(reply)
            return
        self._nobody_waits(correlation_id, reply)

    def _nobody_waits(self, correlation_id: int, reply: _Answer) -> None:
        follow_up = self._core.stray(correlation_id, reply)
        if follow_up and self._writer is not None and not self._writer.is_closing():
            self._writer.write(follow_up)

    def _lose(self, why: BaseException) -> None:
        writer, self._writer, self._greeted = self._writer, None, None
        if writer is None:
            return
        writer.close()
        self._core.closed()
        for told in self._watching.values():
            told.put_nowait(why)
        waiting, self._waiting = self._waiting, {}
        for coming in waiting.values():
            if not coming.done():
                coming.set_exception(why)
