"""Deciding without the daemon: by rendezvous over the workers that it last called healthy.

Every client that remembers the same workers gives a key to the same one, and one that goes moves only its own
keys. What workers hold in their caches and how busy they are is not known here.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from hashlib import blake2b

from .errors import InvalidRequest
from .hashing import token_bytes
from .messages import (
    EVERY_RANK,
    Candidate,
    DecidedBy,
    MatchStatus,
    RouteReply,
    RouteRequest,
    TierBlocks,
    Trust,
    Worker,
    WorkerInfo,
    WorkersPage,
    WorkerState,
)


class Fleet:
    """The workers that a daemon last named, all spaces together."""

    def __init__(self) -> None:
        self.workers: tuple[WorkerInfo, ...] = ()
        #: Of the fleet that `workers` is; None = never learnt.
        self.version: int | None = None
        self._pages: list[WorkerInfo] = []
        self._pages_version: int | None = None

    def take_page(self, page: WorkersPage, cursor: int) -> int:
        """Takes the page that was asked for from `cursor` on; answers with the next cursor, 0 = there is none."""
        if cursor == 0:
            self._pages, self._pages_version = [], page.fleet_version
        self._pages.extend(page.workers)
        if page.fleet_version != self._pages_version or 0 < page.next_cursor <= cursor:
            # It changed between two pages: what was remembered stays until it can be read in one go.
            return 0
        if page.next_cursor == 0:
            self.workers, self.version = tuple(self._pages), page.fleet_version
        return page.next_cursor


def decide(fleet: Fleet, space_id: int, request: RouteRequest, reason: str) -> RouteReply | None:
    """A decision without the daemon; None if nobody is known who may run the prompt."""
    of_space = [info for info in fleet.workers if info.space_id == space_id and _is_wanted(info, request)]
    running = [info for info in of_space if info.state in (WorkerState.JOINING, WorkerState.READY)]
    notes: frozenset[str] = frozenset()
    if not running:
        # As the daemon does: that they are down is a doubt, which is set aside where nobody else is left.
        running = [info for info in of_space if info.state is WorkerState.DOWN]
        notes = frozenset({"all_down"})
    if not running:
        return None
    key = _key(request)
    ranked = sorted(running, key=lambda info: _cost(key, info))
    return RouteReply(
        candidates=tuple(_candidate(info, _cost(key, info)) for info in ranked[: max(request.candidates_max, 1)]),
        eligible=len(ranked),
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


def _key(request: RouteRequest) -> bytes:
    """What is the same for requests that should go to the same worker.

    The whole prompt, unless the request says otherwise: by a prefix, everybody's long system prompt would send
    everybody to one worker.
    """
    digest = blake2b(digest_size=16)
    if request.fallback_key is not None:
        digest.update(request.fallback_key.encode())
        return digest.digest()
    if request.tokens is not None:
        digest.update(token_bytes(request.tokens))
    else:
        try:
            digest.update(struct.pack(f"<{len(request.local_hashes or ())}Q", *(request.local_hashes or ())))
        except struct.error as error:
            raise InvalidRequest(f"local hashes are integers of 0 to 2^64-1: {error}") from error
    # Apart from each other and from the tokens.
    for name in (request.lora, request.salt):
        digest.update(b"\xff" + blake2b((name or "").encode(), digest_size=16).digest())
    return digest.digest()


def _cost(key: bytes, info: WorkerInfo) -> float:
    """Weighted rendezvous: the worker with the lowest cost is chosen, each in proportion to its weight."""
    name = struct.pack("<QI", info.worker.worker_id, info.worker.dp_rank)
    drawn = int.from_bytes(blake2b(key + name, digest_size=8).digest(), "little")
    # In (0, 1), never at its ends.
    unit = ((drawn >> 11) + 0.5) / 2**53
    return -math.log(unit) / (info.weight if info.weight > 0 else 1.0)


def _candidate(info: WorkerInfo, cost: float) -> Candidate:
    return Candidate(info.worker, info.name, TierBlocks(), Trust(), cost, info.state)
