"""The state and the decisions that both clients share: no sockets, no clock of its own."""

from __future__ import annotations

import random
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from . import fallback, frames
from .errors import InvalidRequest, ProtocolError, RemoteError, UnknownSpace, Unreachable
from .hashing import local_hashes, token_bytes
from .messages import (
    Booking,
    Hello,
    PoolRole,
    Prompt,
    RouteReply,
    RouteRequest,
    Session,
    Space,
    WorkersPage,
)

AnyPrompt = TypeVar("AnyPrompt", bound=Prompt)

#: The most reports that wait for the daemon's return. Beyond it the oldest are dropped, and their bookings end by age.
STORED_MAX = 65_536
#: The most of them in flight at once.
IN_FLIGHT_MAX = 1_024
#: The share of a call's time that a request may wait for a worker.
QUEUE_SHARE = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options of a client. The defaults suit a gateway on the daemon's host."""

    #: The client's name in the daemon's logs.
    name: str = "python"
    #: Connections of a gateway that share it share their bookings; None = a random one.
    session: Session | None = None
    #: The timeout of a call, connecting included.
    timeout_s: float = 1.0
    #: Send 8 bytes a block instead of 4 a token, if the space's scheme is known. Needs `xxhash`.
    hash_locally: bool = False
    #: Decide without the daemon while it does not answer: by rendezvous over the workers that it last reported as healthy.
    fallback: bool = True
    #: How many tokens of a prompt's beginning such a decision hashes if the request names no session; 0 = all. It must
    #: exceed the beginning that all prompts share, or one worker gets all of them. Every client needs the same value.
    fallback_prefix_tokens: int = 4096
    #: The first and the longest pause after a daemon did not answer. The pause doubles each time.
    backoff_s: tuple[float, float] = (0.05, 2.0)
    #: The greatest age of the known workers while requests are made.
    fleet_refresh_s: float = 5.0


@dataclass(slots=True)
class _Backoff:
    first_s: float
    most_s: float
    failures: int = 0
    until: float = 0.0

    def failed(self, now: float) -> None:
        if now < self.until:
            # Requests that fail during a pause count as one failure.
            return
        wait = min(self.first_s * 2**min(self.failures, 30), self.most_s)
        self.failures += 1
        # Chance keeps gateways that lost the daemon together from coming back together.
        self.until = now + wait * random.uniform(0.75, 1.25)

    def succeeded(self) -> None:
        self.failures, self.until = 0, 0.0


class OtherRun(Exception):
    """The booking belongs to a daemon run that has ended."""


@dataclass(frozen=True, slots=True)
class _FreeByName:
    """A report that frees what a route may have booked."""

    request_id: str
    attempt: int

    def __call__(self, correlation_id: int) -> bytes:
        return frames.encode_free_request(correlation_id, self.request_id, self.attempt)


def _name(space: Space) -> tuple[int, str, str, PoolRole]:
    """The names of a space. Its scheme is not among them: a daemon may learn it later."""
    return space.space_id, space.model, space.namespace, space.role


@dataclass(slots=True)
class Core:
    """The state of a connection, and the state that outlives it."""

    options: Options
    session: Session = field(init=False)
    hello: Hello | None = None
    fleet: fallback.Fleet = field(default_factory=fallback.Fleet)
    _spaces: tuple[Space, ...] = ()
    _backoff: _Backoff = field(init=False)
    #: Whether the connection is ready. Before that, a received error may be a refusal of the connection.
    _is_greeted: bool = False
    _next_id: int = 1
    _received: bytearray = field(default_factory=bytearray)
    #: Routes that book, and whose reply no caller has taken yet.
    _booking: dict[int, RouteRequest] = field(default_factory=dict)
    #: Reports to send when the daemon is back.
    _stored: deque[Callable[[int], bytes]] = field(default_factory=lambda: deque(maxlen=STORED_MAX))
    #: What to free by name. It goes before those reports, and before a route of the same name: after it, it would free
    #: what that route books.
    _frees_by_name: OrderedDict[_FreeByName, None] = field(default_factory=OrderedDict)
    #: Reports in flight. They are sent again if the connection ends first.
    _in_flight: dict[int, Callable[[int], bytes]] = field(default_factory=dict)
    #: The requested page of workers: correlation id and cursor.
    _page: tuple[int, int] | None = None
    _refreshed_at: float | None = None
    _fleet_version_seen: int = 0
    #: Spaces that refused hashes by the scheme of their hello.
    _other_scheme: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        drawn = Session(secrets.randbits(64) | 1, secrets.randbits(64))
        self.session = self.options.session or drawn
        self._backoff = _Backoff(*self.options.backoff_s)

    # ---- making and ending a connection ---------------------------------------------------------------------

    def check_backoff(self, now: float) -> None:
        """Raises Unreachable during a back-off."""
        if now < self._backoff.until:
            raise Unreachable(f"the daemon did not answer; the next try is in {self._backoff.until - now:.3f} s")

    def failed(self, now: float) -> None:
        """Notes that the daemon could not be reached, or was silent."""
        self._backoff.failed(now)

    def opening(self) -> tuple[int, bytes]:
        """The first frame of a connection and its id."""
        correlation_id = self.take_id()
        return correlation_id, frames.encode_hello(correlation_id, self.options.name, self.session)

    def opened(self, reply: frames.Reply) -> None:
        """Takes the reply to the first frame. Raises its error if it is a refusal."""
        if isinstance(reply, RemoteError):
            if reply.retryable:
                raise Unreachable(f"the daemon takes no connections: {reply}") from reply
            raise reply
        if not isinstance(reply, Hello) or reply.version != frames.PROTOCOL_VERSION:
            raise ProtocolError("the daemon's first reply is no hello of this protocol version")
        if self.hello is not None and self.hello.instance_id != reply.instance_id:
            # Another daemon run has no bookings of the last one.
            self._stored.clear()
            self._frees_by_name.clear()
            self._in_flight.clear()
        if [_name(space) for space in self._spaces] != [_name(space) for space in reply.spaces]:
            # The known workers belong to spaces with other numbers.
            self.fleet = fallback.Fleet()
        self._backoff.succeeded()
        self._is_greeted = True
        self.hello, self._spaces = reply, reply.spaces
        self._other_scheme.clear()

    def closed(self) -> None:
        """Notes that the connection has ended. Bookings in flight are freed by name on the next one."""
        self._is_greeted = False
        self._received.clear()
        self._page, self._refreshed_at = None, None
        # Beyond the limit the oldest are dropped.
        owed, self._stored = self._stored, deque(maxlen=STORED_MAX)
        for say in (*self._in_flight.values(), *owed):
            self._store(say)
        self._in_flight.clear()
        for request in self._booking.values():
            self._owe_free_of(request)
        self._booking.clear()

    def _owe_free_of(self, request: RouteRequest) -> None:
        self._store(_FreeByName(request.book or "", request.attempt))

    def _store(self, say: Callable[[int], bytes]) -> None:
        if not isinstance(say, _FreeByName):
            self._stored.append(say)
            return
        self._frees_by_name[say] = None
        if len(self._frees_by_name) > STORED_MAX:
            self._frees_by_name.popitem(last=False)

    def report(self, booking: Booking, say: Callable[[int], bytes], correlation_id: int) -> bytes:
        """The frame of a report. Raises OtherRun for a booking of another daemon run, which this one does not know."""
        if self.hello is not None and self.hello.instance_id != booking.instance_id:
            raise OtherRun
        return say(correlation_id)

    def owe(self, booking: Booking, say: Callable[[int], bytes]) -> None:
        """Stores a report about a booking until its daemon can be reached again."""
        if self.hello is None or self.hello.instance_id == booking.instance_id:
            self._stored.append(say)

    # ---- bytes in, bytes out -----------------------------------------------------------------------

    def take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def feed(self, data: bytes) -> None:
        """Takes received bytes."""
        self._received += data

    def next_reply(self, deadline: float = float("inf")) -> tuple[int, frames.Reply | ProtocolError] | None:
        """The next whole reply, decoded by the deadline. Raises ProtocolError if the connection cannot continue."""
        if len(self._received) < frames.HEADER_BYTES:
            return None
        header = frames.parse_header(self._received)
        end = frames.HEADER_BYTES + header.body_bytes
        if len(self._received) < end:
            return None
        body = bytes(memoryview(self._received)[frames.HEADER_BYTES : end])
        del self._received[:end]
        if self._is_greeted:
            self._backoff.succeeded()
        try:
            instance = self.hello.instance_id if self.hello else 0
            reply = frames.decode_reply(header.kind, body, instance, deadline)
        except ProtocolError as error:
            return header.correlation_id, error
        if isinstance(reply, RouteReply):
            self._fleet_version_seen = reply.fleet_version
        return header.correlation_id, reply

    def claimed(self, correlation_id: int, reply: frames.Reply | ProtocolError) -> None:
        """Notes that a caller has taken this reply."""
        request = self._booking.pop(correlation_id, None)
        if request is not None and isinstance(reply, ProtocolError):
            # The reply cannot be read, so the booking is freed by its name.
            self._owe_free_of(request)

    def stray(self, correlation_id: int, reply: frames.Reply | ProtocolError) -> bytes:
        """Handles a reply that no caller waits for. Answers with the frames to send because of it."""
        is_unread_booking = correlation_id in self._booking and isinstance(reply, ProtocolError)
        self.claimed(correlation_id, reply)
        if is_unread_booking or self._in_flight.pop(correlation_id, None) is not None:
            return self._owed_frames()
        if isinstance(reply, RouteReply):
            # The caller has given up, so nothing else would free the booking.
            left = [booking for booking in (reply.booking, reply.prefill_booking) if booking is not None]
            self._stored.extend(partial(frames.encode_free, booking=booking) for booking in left)
            return self._owed_frames()
        if self._page is None or self._page[0] != correlation_id:
            return b""
        cursor = self._page[1]
        self._page = None
        if isinstance(reply, WorkersPage):
            return self._ask_page(self.fleet.take_page(reply, cursor))
        return b""

    def _say(self, say: Callable[[int], bytes]) -> bytes:
        correlation_id = self.take_id()
        self._in_flight[correlation_id] = say
        return say(correlation_id)

    def _owed_frames(self) -> bytes:
        """The frames of stored reports, as many as may be in flight at once."""
        said = []
        while (self._frees_by_name or self._stored) and len(self._in_flight) < IN_FLIGHT_MAX:
            by_name = self._frees_by_name
            said.append(self._say(by_name.popitem(last=False)[0] if by_name else self._stored.popleft()))
        return b"".join(said)

    def _ask_page(self, cursor: int) -> bytes:
        if cursor == 0:
            return b""
        self._page = (self.take_id(), cursor)
        return frames.encode_workers(self._page[0], None, cursor)

    def ahead(self, now: float) -> bytes:
        """The frames to send before the next request: stored reports, and the request for the workers."""
        owed = self._owed_frames()
        moved = self._fleet_version_seen not in (0, self.fleet.version)
        age = now - self._refreshed_at if self._refreshed_at is not None else None
        if self._page is not None or not self.options.fallback:
            return owed
        # A fleet that changes all the time must not be requested all the time.
        if age is not None and age < self.options.fleet_refresh_s and not (moved and age >= 0.1):
            return owed
        self._refreshed_at = now
        self._page = (self.take_id(), 0)
        return owed + frames.encode_workers(self._page[0], None, 0)

    # ---- requests ----------------------------------------------------------------------------------

    def space(self, model: str, namespace: str | None, role: PoolRole | None) -> Space:
        """A space, by the latest hello."""
        fits = [
            space
            for space in self._spaces
            if space.model == model and namespace in (None, space.namespace) and role in (None, space.role)
        ]
        if len(fits) == 1:
            return fits[0]
        if fits:
            names = ", ".join(f"{space.namespace!r} ({space.role.name.lower()})" for space in fits)
            raise UnknownSpace(f"{model!r} is served in several spaces: name namespace or role of {names}")
        models = ", ".join(sorted({repr(space.model) for space in self._spaces})) or "none"
        raise UnknownSpace(f"the daemon has no model {model!r} as asked for; it has {models}")

    def _space_of(self, prompt: Prompt) -> Space:
        return self.space(prompt.model, prompt.namespace, prompt.role)

    def route(self, correlation_id: int, request: RouteRequest, left_s: float) -> bytes:
        """The frame of a route whose caller has this much time left."""
        space = self._space_of(request)
        if request.book == "":
            raise InvalidRequest("a booking needs a name")
        hashed = self._hashed(space, request)
        if request.book is not None and request.deadline_us == 0 and self.hello and "queue" in self.hello.features:
            # The share leaves time for the daemon to answer that no worker had room, before it counts as silent.
            hashed = replace(hashed, deadline_us=max(int(left_s * QUEUE_SHARE * 1e6), 1))
        frame = frames.encode_route(correlation_id, space.space_id, hashed)
        if request.book is None:
            return frame
        self._booking[correlation_id] = request
        free = _FreeByName(request.book, request.attempt)
        if free in self._frees_by_name:
            del self._frees_by_name[free]
            return self._say(free) + frame
        return frame

    def overlap(self, correlation_id: int, prompt: Prompt) -> bytes:
        """The frame of an overlap."""
        space = self._space_of(prompt)
        return frames.encode_overlap(correlation_id, space.space_id, self._hashed(space, prompt))

    def potential_loads(self, correlation_id: int, prompt: Prompt) -> bytes:
        """The frame of a request for potential loads."""
        space = self._space_of(prompt)
        return frames.encode_potential_loads(correlation_id, space.space_id, self._hashed(space, prompt))

    def _hashed(self, space: Space, prompt: AnyPrompt) -> AnyPrompt:
        """The prompt as local hashes, if the options say so and the space's scheme is known."""
        known = space.scheme.block_size > 0 and space.space_id not in self._other_scheme
        if not (self.options.hash_locally and known) or prompt.tokens is None:
            return prompt
        packed = token_bytes(prompt.tokens)
        hashes = local_hashes(packed, space.scheme, lora=prompt.lora, salt=prompt.salt, media=prompt.media)
        # The hashes cover the objects already.
        return replace(
            prompt, tokens=None, local_hashes=hashes, scheme=space.scheme, token_count=len(packed) // 4, media=()
        )

    def hashes_refused(self, prompt: Prompt, error: RemoteError) -> bool:
        """Whether a request failed because this client hashed it. From now on the client sends tokens."""
        space = self._space_of(prompt)
        if error.kind != "scheme_mismatch" or prompt.tokens is None or space.space_id in self._other_scheme:
            return False
        self._other_scheme.add(space.space_id)
        return True

    def decide_alone(self, request: RouteRequest, why: Exception) -> RouteReply:
        """A decision without the daemon. Raises `why` if none can be made."""
        if not self.options.fallback or not self._spaces:
            raise why
        space_id = self._space_of(request).space_id
        decided = fallback.decide(self.fleet, space_id, request, str(why), self.options.fallback_prefix_tokens)
        if decided is None:
            raise why
        return decided
