"""Requests and replies, as plain values.

Overlaps are in blocks, lengths in tokens, everything else in what the field's name says. A value that this
version does not know is read as the most cautious one that it does know.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NamedTuple

from .errors import InvalidRequest
from .schema_generated.records import CostTerms as CostTerms

#: Every data-parallel rank of a worker.
EVERY_RANK = 2**32 - 1
#: The most workers that a client remembers: far more than a daemon has. More pages than that count as endless.
WORKERS_MAX = 2**16
#: No event batch has been applied yet.
NO_SEQUENCE = 2**64 - 1

# Names of bits, in the order of schemas/README.md.
TRUST_REASONS = (
    "joining", "joined_late", "gap", "disconnected", "undecodable", "scheme_mismatch", "hash_conflict",
    "ambiguous_store", "unknown_root", "capacity_bound", "hybrid", "unknown_medium", "rank_conflict", "silent",
    "no_events", "read_contended", "recovering", "isolation_unknown", "unknown_events", "lookahead_hash",
    "misframed", "memory_bound", "own_decisions", "unchained_hashes",
    "unknown_reason", "clear_awaited", "full_reports",
    "offload_unbound", "lower_tiers_unknown", "ingest_failed", "last_copy_removals", "memory_short",
)  # fmt: skip
FEATURES = (
    "routing", "bookings", "local_hash_prompts", "media_hashes", "explain", "overlap_query", "workers_query",
    "overrides", "constraints", "shared_hits", "progress", "reports", "queue", "affinity", "pairs",
    "potential_loads", "watch",
)  # fmt: skip
REPLY_NOTES = ("scheme_unknown", "read_contended", "all_down", "affinity_off", "prefill_local", "prefill_nobody")

#: Tokens: integers of 32 bits, or their little-endian bytes.
Tokens = Sequence[int] | bytes | bytearray | memoryview


def named_bits(bits: int, names: Sequence[str]) -> frozenset[str]:
    """The names of the set bits; bit_N for a bit that this version does not know."""
    set_bits = (at for at in range(bits.bit_length()) if bits >> at & 1)
    return frozenset(names[at] if at < len(names) else f"bit_{at}" for at in set_bits)


class Window(IntEnum):
    """The tokens that a block's hash covers: its own, or also the one after them."""

    PLAIN = 0
    BIGRAM = 1


class PoolRole(IntEnum):
    """The role of a space's workers."""

    BOTH = 0
    PREFILL = 1
    DECODE = 2


class WorkerState(IntEnum):
    """The state of a worker."""

    JOINING = 0
    READY = 1
    DRAINING = 2
    DOWN = 3

    @classmethod
    def _missing_(cls, value: object) -> WorkerState:
        return cls.DOWN


class DeviceClass(IntEnum):
    """The class of a worker's device."""

    GPU = 0
    CPU = 1

    @classmethod
    def _missing_(cls, value: object) -> DeviceClass:
        return cls.CPU


class TrustLevel(IntEnum):
    """How far an overlap may be believed, lowest first."""

    NONE = 0
    PREDICTED = 1
    UNPROVEN = 2
    LOWER_BOUND = 3
    EXACT = 4

    @classmethod
    def _missing_(cls, value: object) -> TrustLevel:
        return cls.NONE


class MatchStatus(IntEnum):
    """Whether a prompt could be looked up."""

    MATCHED = 0
    UNMATCHABLE = 1

    @classmethod
    def _missing_(cls, value: object) -> MatchStatus:
        return cls.UNMATCHABLE


class BookingOutcome(IntEnum):
    """The outcome of a report about a booking."""

    APPLIED = 0
    ALREADY_APPLIED = 1
    UNKNOWN = 2
    SUPERSEDED = 3

    @classmethod
    def _missing_(cls, value: object) -> BookingOutcome:
        return cls.UNKNOWN


class Mode(IntEnum):
    """The mode of a space's policy."""

    DEFAULT = 0
    KV = 1
    LOAD_AWARE = 2
    APPROXIMATE = 3
    LEAST_LOADED = 4
    POWER_OF_TWO = 5
    ROUND_ROBIN = 6
    RANDOM = 7
    DIRECT = 8
    DEVICE_AWARE_WEIGHTED = 9
    LMETRIC = 10

    @classmethod
    def _missing_(cls, value: object) -> Mode:
        return cls.DEFAULT


class DecidedBy(Enum):
    """The side that decided."""

    DAEMON = "daemon"
    #: The client, without the daemon: nothing is booked, and caches did not count.
    FALLBACK = "fallback"


class Worker(NamedTuple):
    """One data-parallel rank of an engine."""

    worker_id: int
    dp_rank: int = 0


class Session(NamedTuple):
    """128 bits that name a gateway. Connections with the same session share their bookings."""

    hi: int
    lo: int


@dataclass(frozen=True, slots=True)
class Scheme:
    """The scheme of block hashes. A block size of 0 is not known yet."""

    block_size: int
    window: Window = Window.PLAIN


@dataclass(frozen=True, slots=True)
class Space:
    """A model in a namespace, served by workers of one role."""

    space_id: int
    model: str
    namespace: str
    role: PoolRole
    scheme: Scheme


@dataclass(frozen=True, slots=True)
class Limits:
    """The daemon's limits."""

    frame_body_bytes_max: int
    prompt_tokens_max: int
    candidates_max: int
    workers_page_max: int
    bookings_per_session_max: int


@dataclass(frozen=True, slots=True)
class Hello:
    """The daemon's reply to hello."""

    version: int
    #: Drawn when the daemon starts.
    instance_id: int
    limits: Limits
    features: frozenset[str]
    spaces: tuple[Space, ...]
    admin_socket: str | None


@dataclass(frozen=True, slots=True)
class Overrides:
    """What a request changes of its space's policy; None changes nothing."""

    mode: Mode = Mode.DEFAULT
    device_credit: float | None = None
    prefill_load_scale: float | None = None
    temperature: float | None = None
    shared_multiplier: float | None = None
    assume_kv_reuse: bool | None = None
    track_prefill_tokens: bool | None = None


class TraceContext(NamedTuple):
    """A W3C trace context, as the header `traceparent` carries it. One with an id of 0 counts as none."""

    trace_id: int
    #: The caller's span.
    span_id: int
    #: Bit 0 = the caller records the trace.
    flags: int

    @classmethod
    def parse(cls, traceparent: str) -> TraceContext | None:
        """Reads a `traceparent`. None = it is invalid."""
        match = re.fullmatch(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", traceparent, re.ASCII)
        if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
            return None
        context = cls(int(match[2], 16), int(match[3], 16), int(match[4], 16))
        return context if context.trace_id and context.span_id else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt of a model: its tokens, or the local hashes of its whole blocks with scheme and token count."""

    model: str
    #: Needed if the model is in several.
    namespace: str | None = None
    role: PoolRole | None = None
    tokens: Tokens | None = None
    local_hashes: Sequence[int] | None = None
    scheme: Scheme | None = None
    token_count: int | None = None
    lora: str | None = None
    #: The cache salt. Prompts with different salts share no blocks.
    salt: str | None = None
    #: Multimodal objects: (index of a block that it touches, hash).
    media: Sequence[tuple[int, int]] = ()

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.local_hashes is None):
            raise InvalidRequest("give tokens or local_hashes, one of them")
        if self.local_hashes is not None and (self.scheme is None or self.token_count is None):
            raise InvalidRequest("local_hashes need the scheme they were made with and the prompt's token_count")


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteRequest(Prompt):
    """Asks which worker should run a prompt.

    Fields that the daemon's version does not serve are refused by name (`RemoteError`, kind `unsupported`).
    """

    #: Book the chosen worker under this name, unique within the session while the booking lives.
    book: str | None = None
    #: The attempt of the request. A later attempt takes over the booking.
    attempt: int = 0
    explain: bool = False
    candidates_max: int = 8
    #: None = every worker.
    allow: Sequence[Worker] | None = None
    pin: Worker | None = None
    required_taints: Sequence[str] = ()
    preferred_taints: Mapping[str, float] = field(default_factory=dict)
    expected_output_tokens: int = 0
    overrides: Overrides | None = None
    #: Blocks [start, end) in a cache that all workers share.
    shared_hits: Sequence[tuple[int, int]] = ()
    #: A conversation whose requests should go to one worker, also without the daemon.
    affinity_session: str | None = None
    #: The caller's trace, for the spans that the daemon exports.
    trace: TraceContext | None = None
    #: Choose a worker of the model's prefill pool too; name the decode pool in `role`.
    disaggregate: bool = False
    priority: int = 0
    priority_jump: float = 0.0
    #: The longest wait for a worker, microseconds; 0 = most of the call's own time.
    deadline_us: int = 0
    #: Bits of `features`: a daemon without them must refuse this request.
    must_understand: int = 0
    #: What the client hashes if it decides without the daemon, in place of `affinity_session` and of how the prompt
    #: begins: requests of one key then go to one worker. Never sent.
    fallback_key: str | None = None


@dataclass(frozen=True, slots=True)
class TierBlocks:
    """Blocks held, by tier. Each tier counts only what extends the tier before."""

    device: int = 0
    host: int = 0
    disk: int = 0
    external: int = 0


@dataclass(frozen=True, slots=True)
class Trust:
    """How far an overlap may be believed, and why not further."""

    level: TrustLevel = TrustLevel.NONE
    reasons: frozenset[str] = frozenset()
    since_unix_ms: int = 0
    #: The last event batch applied, or NO_SEQUENCE.
    as_of_seq: int = NO_SEQUENCE
    as_of_unix_ms: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that may run the prompt."""

    worker: Worker
    name: str
    overlap: TierBlocks
    trust: Trust
    cost: float
    state: WorkerState
    #: Set if the request asked to explain.
    terms: CostTerms | None = None


@dataclass(frozen=True, slots=True)
class Removal:
    """A rule and the workers that it excluded."""

    rule: str
    workers: tuple[Worker, ...]


@dataclass(frozen=True, slots=True)
class Booking:
    """A booking of a worker. Report its prefill, and free it however the request ends."""

    slot: int
    generation: int
    #: The daemon run that holds it. Another run does not know it.
    instance_id: int


@dataclass(frozen=True, slots=True)
class OtherLoad:
    """What the bookings of one other router add to the load of a worker."""

    worker: Worker
    #: The number of the router.
    origin: int
    #: How long ago it said so, milliseconds.
    age_ms: int
    #: Its requests in flight.
    requests: int
    #: Tokens of its prefills in progress, as booked.
    prefill_tokens: int
    #: Its decode blocks, rounded.
    decode_blocks: int


@dataclass(frozen=True, slots=True)
class RouteReply:
    """A decision."""

    #: The chosen worker first, then by ascending cost; empty = no worker was eligible.
    candidates: tuple[Candidate, ...]
    #: The number of eligible workers, however many are listed.
    eligible: int
    match: MatchStatus
    notes: frozenset[str]
    #: Whole blocks of the prompt that were looked up.
    request_blocks: int
    policy_version: int
    fleet_version: int
    index_epoch: int
    booking: Booking | None
    removed: tuple[Removal, ...]
    #: The number of workers with the lowest cost.
    ties: int
    #: The name of the error code that says why no worker was eligible; None = some were.
    nobody: str | None = None
    #: The pause before a retry if no worker was eligible and time may change that, microseconds.
    retry_after_us: int = 0
    #: The mode that chose; it defines what a cost means.
    mode: Mode = Mode.DEFAULT
    #: The workers to prefill, the chosen one first; empty = the worker chosen above does both.
    prefill: tuple[Candidate, ...] = ()
    #: The booking of the worker that prefills.
    prefill_booking: Booking | None = None
    #: What the bookings of other routers add to the candidates, if the request asked to explain.
    others: tuple[OtherLoad, ...] = ()
    decided_by: DecidedBy = DecidedBy.DAEMON
    #: Why the daemon did not decide.
    fallback_reason: str | None = None

    @property
    def best(self) -> Candidate | None:
        """The chosen worker."""
        return self.candidates[0] if self.candidates else None


@dataclass(frozen=True, slots=True)
class OverlapEntry:
    """How much of a prompt a worker holds."""

    worker: Worker
    overlap: TierBlocks
    trust: Trust


@dataclass(frozen=True, slots=True)
class OverlapReply:
    """How much of a prompt each worker holds."""

    workers: tuple[OverlapEntry, ...]
    match: MatchStatus
    request_blocks: int
    notes: frozenset[str]


@dataclass(frozen=True, slots=True)
class PotentialLoad:
    """The work of a worker if it took a prompt."""

    worker: Worker
    #: Now.
    active_requests: int
    #: Tokens to prefill, with this prompt's.
    prefill_tokens: int
    #: Blocks to decode on, with this prompt's.
    decode_blocks: int


@dataclass(frozen=True, slots=True)
class PotentialLoads:
    """The work of every worker of a space, eligible or not, if it took a prompt."""

    loads: tuple[PotentialLoad, ...]
    match: MatchStatus
    request_blocks: int
    notes: frozenset[str]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker, as the fleet knows it."""

    worker: Worker
    space_id: int
    name: str
    state: WorkerState
    device_class: DeviceClass
    weight: float
    #: 0 = not known.
    capacity_blocks: int
    batched_tokens_max: int
    taints: tuple[str, ...]
    trust: Trust


@dataclass(frozen=True, slots=True)
class WorkersPage:
    """A part of the fleet."""

    workers: tuple[WorkerInfo, ...]
    #: The cursor of the next page; 0 = this is the last.
    next_cursor: int
    fleet_version: int


@dataclass(frozen=True, slots=True)
class FleetView:
    """The workers, as a watch sends them."""

    workers: tuple[WorkerInfo, ...]
    fleet_version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """An engine's own report of its load."""

    active_prefill_tokens: int = 0
    active_decode_blocks: int = 0
    running_requests: int = 0
    waiting_requests: int = 0
    #: Share of its KV blocks in use, 0 to 1.
    kv_usage: float = 0.0


@dataclass(frozen=True, slots=True)
class FailureReport:
    """The reply to a reported failure."""

    #: How long requests avoid the worker while others can run them.
    back_off_ms: int


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The reply to a reported load."""

    accepted: bool


@dataclass(frozen=True, slots=True)
class BookingReport:
    """The reply to a report about a booking."""

    outcome: BookingOutcome
    instance_id: int
