"""What a client remembers and decides, whichever way it waits: no sockets, no clock of its own."""

from __future__ import annotations

import random
import secrets
from collections import deque
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

#: Reports that wait for the daemon's return; beyond it the oldest are forgotten, and its bookings end by age.
OWED_MAX = 65_536
#: Of them, so many are said at once: the next when those are answered.
SAYING_MAX = 1_024
#: Of a call's time, how much the request may wait for a worker.
QUEUE_SHARE = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How a client behaves. The defaults suit a gateway on the daemon's host."""

    #: What the client calls itself in the daemon's logs.
    name: str = "python"
    #: Shared by the connections of one gateway, and with it their bookings; None = one is drawn.
    session: Session | None = None
    #: How long a call may take, connecting included.
    timeout_s: float = 1.0
    #: Send 8 bytes a block instead of 4 a token, where the space's scheme is known. Needs `xxhash`.
    hash_locally: bool = False
    #: Where no daemon answers, decide by rendezvous over the workers that it last called healthy.
    fallback: bool = True
    #: By how many tokens of a prompt's beginning that is done, where the request names no session; 0 = all of it. More
    #: than what every prompt begins with, else that sends them all to one worker; the same in every client.
    fallback_prefix_tokens: int = 4096
    #: How long to leave a daemon alone that did not answer: at first, and at most. Doubles each time.
    backoff_s: tuple[float, float] = (0.05, 2.0)
    #: How old what is remembered of the workers may become while requests are made.
    fleet_refresh_s: float = 5.0


@dataclass(slots=True)
class _Backoff:
    first_s: float
    most_s: float
    failures: int = 0
    until: float = 0.0

    def failed(self, now: float) -> None:
        if now < self.until:
            # One silence, however many requests it met.
            return
        wait = min(self.first_s * 2**min(self.failures, 30), self.most_s)
        self.failures += 1
        # Gateways that lost the daemon together do not come back together.
        self.until = now + wait * random.uniform(0.75, 1.25)

    def succeeded(self) -> None:
        self.failures, self.until = 0, 0.0


class OtherRun(Exception):
    """A booking is of a run of the daemon that has ended."""


def _name(space: Space) -> tuple[int, str, str, PoolRole]:
    """What tells spaces apart; how one hashes may be learnt later."""
    return space.space_id, space.model, space.namespace, space.role


@dataclass(slots=True)
class Core:
    """One connection's state, and what outlives the connection."""

    options: Options
    session: Session = field(init=False)
    hello: Hello | None = None
    fleet: fallback.Fleet = field(default_factory=fallback.Fleet)
    _spaces: tuple[Space, ...] = ()
    _backoff: _Backoff = field(init=False)
    #: Whether the connection is ready: until then what comes may be a refusal of it, which is no answer.
    _is_greeted: bool = False
    _next_id: int = 1
    _received: bytearray = field(default_factory=bytearray)
    #: Routes that book and whose reply nobody has taken yet.
    _booking: dict[int, RouteRequest] = field(default_factory=dict)
    #: To be said when the daemon is back.
    _owed: deque[Callable[[int], bytes]] = field(default_factory=lambda: deque(maxlen=OWED_MAX))
    #: Said of bookings, and not yet answered: said again if the connection ends first.
    _saying: dict[int, Callable[[int], bytes]] = field(default_factory=dict)
    #: The page of workers that was asked for: correlation id and cursor.
    _page: tuple[int, int] | None = None
    _refreshed_at: float | None = None
    _fleet_version_seen: int = 0
    #: Spaces that refused hashes of the scheme that their hello named.
    _other_scheme: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        drawn = Session(secrets.randbits(64) | 1, secrets.randbits(64))
        self.session = self.options.session or drawn
        self._backoff = _Backoff(*self.options.backoff_s)

    # ---- the connection's life ---------------------------------------------------------------------

    def check_backoff(self, now: float) -> None:
        """Raises Unreachable while the daemon is to be left alone."""
        if now < self._backoff.until:
            raise Unreachable(f"the daemon did not answer; the next try is in {self._backoff.until - now:.3f} s")

    def failed(self, now: float) -> None:
        """The daemon could not be reached, or was silent."""
        self._backoff.failed(now)

    def opening(self) -> tuple[int, bytes]:
        """The first frame of a connection and its id."""
        correlation_id = self.take_id()
        return correlation_id, frames.encode_hello(correlation_id, self.options.name, self.session)

    def opened(self, reply: frames.Reply) -> None:
        """Takes the answer to the first frame. Raises what it says if that is a refusal."""
        if isinstance(reply, RemoteError):
            if reply.retryable:
                raise Unreachable(f"the daemon takes no connections: {reply}") from reply
            raise reply
        if not isinstance(reply, Hello) or reply.version != frames.PROTOCOL_VERSION:
            raise ProtocolError("the daemon's first reply is no hello of this protocol version")
        if self.hello is not None and self.hello.instance_id != reply.instance_id:
            # Another daemon: it knows nothing of what the last one held.
            self._owed.clear()
            self._saying.clear()
        if [_name(space) for space in self._spaces] != [_name(space) for space in reply.spaces]:
            # The workers that are remembered are of spaces of other numbers.
            self.fleet = fallback.Fleet()
        self._backoff.succeeded()
        self._is_greeted = True
        self.hello, self._spaces = reply, reply.spaces
        self._other_scheme.clear()

    def closed(self) -> None:
        """The connection has ended. Whatever was being booked is freed by name when there is another."""
        self._is_greeted = False
        self._received.clear()
        self._page, self._refreshed_at = None, None
        # Beyond the room that there is the oldest are forgotten.
        owed, self._owed = self._owed, deque(self._saying.values(), OWED_MAX)
        self._owed.extend(owed)
        self._saying.clear()
        for request in self._booking.values():
            self._owe_free_of(request)
        self._booking.clear()

    def _owe_free_of(self, request: RouteRequest) -> None:
        say = partial(frames.encode_free_request, request_id=request.book or "", attempt=request.attempt)
        self._owed.append(say)

    def report(self, booking: Booking, say: Callable[[int], bytes], correlation_id: int) -> bytes:
        """The frame of a report. Raises OtherRun for a booking of another run of the daemon: it means nothing here."""
        if self.hello is not None and self.hello.instance_id != booking.instance_id:
            raise OtherRun
        return say(correlation_id)

    def owe(self, booking: Booking, say: Callable[[int], bytes]) -> None:
        """Something to be said of a booking when its daemon can be reached again."""
        if self.hello is None or self.hello.instance_id == booking.instance_id:
            self._owed.append(say)

    # ---- bytes in, bytes out -----------------------------------------------------------------------

    def take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def feed(self, data: bytes) -> None:
        """Bytes that came."""
        self._received += data

    def next_reply(self, deadline: float = float("inf")) -> tuple[int, frames.Reply | ProtocolError] | None:
        """The next whole reply, read by the deadline. Raises ProtocolError if the connection cannot go on."""
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
        """The caller that waits for this reply has got it."""
        request = self._booking.pop(correlation_id, None)
        if request is not None and isinstance(reply, ProtocolError):
            # What was booked cannot be read.
            self._owe_free_of(request)

    def stray(self, correlation_id: int, reply: frames.Reply | ProtocolError) -> bytes:
        """A reply that no caller waits for; answers with what is to be sent because of it."""
        self._booking.pop(correlation_id, None)
        if self._saying.pop(correlation_id, None) is not None:
            return self._owed_frames()
        if isinstance(reply, RouteReply):
            # Whoever asked has given up: nobody else would ever free it.
            left = [booking for booking in (reply.booking, reply.prefill_booking) if booking is not None]
            self._owed.extend(partial(frames.encode_free, booking=booking) for booking in left)
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
        self._saying[correlation_id] = say
        return say(correlation_id)

    def _owed_frames(self) -> bytes:
        """What is owed, as much of it as may be unanswered at once."""
        said = []
        while self._owed and len(self._saying) < SAYING_MAX:
            said.append(self._say(self._owed.popleft()))
        return b"".join(said)

    def _ask_page(self, cursor: int) -> bytes:
        if cursor == 0:
            return b""
        self._page = (self.take_id(), cursor)
        return frames.encode_workers(self._page[0], None, cursor)

    def ahead(self, now: float) -> bytes:
        """What is to be sent before the next request: what is owed, and the question who there is."""
        owed = self._owed_frames()
        moved = self._fleet_version_seen not in (0, self.fleet.version)
        age = now - self._refreshed_at if self._refreshed_at is not None else None
        if self._page is not None or not self.options.fallback:
            return owed
        # A fleet that changes all the time is not asked for all the time.
        if age is not None and age < self.options.fleet_refresh_s and not (moved and age >= 0.1):
            return owed
        self._refreshed_at = now
        self._page = (self.take_id(), 0)
        return owed + frames.encode_workers(self._page[0], None, 0)

    # ---- requests ----------------------------------------------------------------------------------

    def space(self, model: str, namespace: str | None, role: PoolRole | None) -> Space:
        """A space, by the last hello."""
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
        """The frame of a route for which its caller has so much time left."""
        space = self._space_of(request)
        if request.book == "":
            raise InvalidRequest("a booking needs a name")
        hashed = self._hashed(space, request)
        if request.book is not None and request.deadline_us == 0 and self.hello and "queue" in self.hello.features:
            # The daemon is to say that no worker had room, before the caller takes its silence for its end.
            hashed = replace(hashed, deadline_us=max(int(left_s * QUEUE_SHARE * 1e6), 1))
        frame = frames.encode_route(correlation_id, space.space_id, hashed)
        if request.book is not None:
            self._booking[correlation_id] = request
        return frame

    def overlap(self, correlation_id: int, prompt: Prompt) -> bytes:
        """The frame of an overlap."""
        space = self._space_of(prompt)
        return frames.encode_overlap(correlation_id, space.space_id, self._hashed(space, prompt))

    def potential_loads(self, correlation_id: int, prompt: Prompt) -> bytes:
        """The frame of a question for potential loads."""
        space = self._space_of(prompt)
        return frames.encode_potential_loads(correlation_id, space.space_id, self._hashed(space, prompt))

    def _hashed(self, space: Space, prompt: AnyPrompt) -> AnyPrompt:
        """The prompt as local hashes, where that is wanted and the space's scheme is known."""
        known = space.scheme.block_size > 0 and space.space_id not in self._other_scheme
        if not (self.options.hash_locally and known) or prompt.tokens is None:
            return prompt
        packed = token_bytes(prompt.tokens)
        hashes = local_hashes(packed, space.scheme, lora=prompt.lora, salt=prompt.salt, media=prompt.media)
        # What the objects are is in the hashes already.
        return replace(
            prompt, tokens=None, local_hashes=hashes, scheme=space.scheme, token_count=len(packed) // 4, media=()
        )

    def hashes_refused(self, prompt: Prompt, error: RemoteError) -> bool:
        """Whether a request failed because this client hashed it, and goes as tokens from now on."""
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
