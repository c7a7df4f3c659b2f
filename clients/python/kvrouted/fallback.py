"""Decisions without the daemon: by rendezvous over the workers that it last reported as healthy.

Every client that remembers the same workers, in whatever language, gives a key to the same one, and one that goes
moves only its own keys. `tests/fixtures/fallback_vectors.json` holds them all to the same bits. What workers hold in
their caches and how busy they are is not known here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from heapq import nsmallest
from zlib import crc32

from .errors import InvalidRequest
from .hashing import token_bytes
from .messages import (
    EVERY_RANK,
    WORKERS_MAX,
    Candidate,
    DecidedBy,
    MatchStatus,
    RouteReply,
    RouteRequest,
    TierBlocks,
    Tokens,
    Trust,
    Worker,
    WorkerInfo,
    WorkersPage,
    WorkerState,
)

_U64 = 2**64 - 1


class Fleet:
    """The workers of all spaces, as a daemon last reported them."""

    def __init__(self) -> None:
        self.workers: tuple[WorkerInfo, ...] = ()
        #: The version of the fleet in `workers`; None = not known yet.
        self.version: int | None = None
        self._pages: list[WorkerInfo] = []
        self._pages_version: int | None = None

    def take_page(self, page: WorkersPage, cursor: int) -> int:
        """Takes the page requested from `cursor` on. Answers with the next cursor; 0 = none."""
        if cursor == 0:
            self._pages, self._pages_version = [], page.fleet_version
        self._pages.extend(page.workers)
        if page.fleet_version != self._pages_version or 0 < page.next_cursor <= cursor:
            # The fleet changed between two pages: the known workers stay until one version can be read as a whole.
            return 0
        if len(self._pages) > WORKERS_MAX:
            self._pages = []
            return 0
        if page.next_cursor == 0:
            self.workers, self.version = tuple(self._pages), page.fleet_version
        return page.next_cursor


def decide(
    fleet: Fleet, space_id: int, request: RouteRequest, reason: str, prefix_tokens: int = 4096
) -> RouteReply | None:
    """A decision without the daemon; None if no known worker may run the prompt."""
    of_space = [info for info in fleet.workers if info.space_id == space_id and _is_wanted(info, request)]
    running = [info for info in of_space if info.state in (WorkerState.JOINING, WorkerState.READY)]
    notes: frozenset[str] = frozenset()
    if not running:
        # As the daemon does: a worker that is down is used only if no other worker is left.
        running = [info for info in of_space if info.state is WorkerState.DOWN]
        notes = frozenset({"all_down"})
    if not running:
        return None
    ranked = rank(key(request, prefix_tokens), running, max(request.candidates_max, 1))
    return RouteReply(
        candidates=tuple(_candidate(info, cost) for cost, info in ranked),
        eligible=len(running),
        match=MatchStatus.UNMATCHABLE,
        notes=notes,
        request_blocks=0,
        policy_version=0,
        fleet_version=fleet.version or 0,
        index_epoch=0,
        booking=None,
        removed=(),
        ties=1,
        decided_by=DecidedBy.FALLBACK,
        fallback_reason=reason,
    )


def _is_wanted(info: WorkerInfo, request: RouteRequest) -> bool:
    if info.state is WorkerState.DRAINING:
        return False
    if request.allow is not None and not _names(request.allow, info.worker):
        return False
    if request.pin is not None and not _names([request.pin], info.worker):
        return False
    return set(request.required_taints) <= set(info.taints)


def _names(listed: Sequence[Worker], worker: Worker) -> bool:
    return any(ref[0] == worker.worker_id and ref[1] in (worker.dp_rank, EVERY_RANK) for ref in listed)


def key(request: RouteRequest, prefix_tokens: int) -> int:
    """A number that is equal for requests that should go to the same worker: made of `fallback_key` or the session, or else
    of the first `prefix_tokens` of the prompt; 0 = all of it.
    """
    name = request.fallback_key or request.affinity_session
    if name:
        return crc32(name.encode())
    if request.tokens is not None:
        crc = crc32(_beginning(request.tokens, prefix_tokens))
    else:
        hashes = request.local_hashes or ()
        if prefix_tokens and request.scheme is not None:
            hashes = hashes[: max(prefix_tokens // max(request.scheme.block_size, 1), 1)]
        try:
            crc = crc32(struct.pack(f"<{len(hashes)}Q", *hashes))
        except struct.error as error:
            raise InvalidRequest(f"local hashes are integers of 0 to 2^64-1: {error}") from error
    for name in (request.lora, request.salt):
        # UTF-8 has no such byte, so it separates the two names.
        crc = crc32(b"\xff" + (name or "").encode(), crc)
    return crc


def _beginning(tokens: Tokens, most: int) -> bytes:
    """The first tokens as bytes; 0 = all of them."""
    if isinstance(tokens, (bytes, bytearray, memoryview)):
        # Packed first, because the elements of a view need not be bytes.
        return token_bytes(tokens)[: 4 * most or None]
    return token_bytes(tokens[: most or None])


def _next(state: int) -> int:
    """The output of SplitMix64 for a state."""
    state = state + 0x9E3779B97F4A7C15 & _U64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _U64
    state = (state ^ state >> 27) * 0x94D049BB133111EB & _U64
    return state ^ state >> 31


def draw(key: int, worker: Worker) -> int:
    """The number that a worker draws for a key."""
    return _next(_next(_next(key) ^ worker.worker_id) ^ worker.dp_rank)


def surprise(drawn: int) -> int:
    """-log2((drawn | 1) / 2^64) in units of 2^-32, in whole numbers: the same bits everywhere. Never rises."""
    drawn |= 1
    whole = drawn.bit_length() - 1
    mantissa = drawn << (63 - whole) >> 32
    fraction = 0
    for _ in range(32):
        mantissa = mantissa * mantissa >> 31
        fraction <<= 1
        if mantissa >= 1 << 32:
            mantissa >>= 1
            fraction |= 1
    return (64 - whole << 32) - fraction


def _cost(drawn: int, weight: float) -> float:
    return surprise(drawn) / (weight if 0 < weight < float("inf") else 1.0)


def rank(key: int, workers: Sequence[WorkerInfo], most: int) -> list[tuple[float, WorkerInfo]]:
    """Weighted rendezvous: the workers of the lowest costs, each with its cost; each has the lowest in proportion to its
    weight. Equal costs are ordered by the higher draw, then by name.
    """
    drawn = [(draw(key, info.worker), info) for info in workers]
    if len({info.weight for info in workers}) == 1:
        # The cost never rises with the draw, so it need not be computed for all.
        first = nsmallest(most, drawn, key=lambda pair: (-pair[0], pair[1].worker))
        return [(_cost(number, info.weight), info) for number, info in first]
    costs = [(_cost(number, info.weight), -number, info.worker, info) for number, info in drawn]
    return [(cost, info) for cost, _, _, info in nsmallest(most, costs, key=lambda row: row[:3])]


def _candidate(info: WorkerInfo, cost: float) -> Candidate:
    return Candidate(info.worker, info.name, TierBlocks(), Trust(), cost, info.state)
