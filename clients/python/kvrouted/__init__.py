"""Client of kvrouted, the daemon that says which worker should run a prompt.

    from kvrouted import Client, Options, RouteRequest

    with Client("/run/kvrouted/kvrouted.sock", Options(name="my-gateway")) as client:
        reply = client.route(RouteRequest(model="my-model", tokens=[1, 2, 3], book="request-1"))
        if reply.best is not None:
            ...                                     # send the prompt to reply.best.worker
            client.prefill_complete(reply.booking)  # when its first token comes
        client.free(reply.booking)                  # when it has ended, however it ended

`AsyncClient` is the same for asyncio, with any number of requests in flight.
"""

from .aio import AsyncClient
from .client import Client
from .core import Options
from .errors import (
    ConnectionLost,
    DeadlineExceeded,
    InvalidRequest,
    KvroutedError,
    ProtocolError,
    RemoteError,
    UnknownSpace,
    Unreachable,
)
from .messages import (
    EVERY_RANK,
    Booking,
    BookingOutcome,
    Candidate,
    CostTerms,
    DecidedBy,
    DeviceClass,
    EngineLoad,
    FleetView,
    Hello,
    Limits,
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
    TraceContext,
    Trust,
    TrustLevel,
    Window,
    Worker,
    WorkerInfo,
    WorkerState,
)

__all__ = [
    "EVERY_RANK",
    "AsyncClient",
    "Booking",
    "BookingOutcome",
    "Candidate",
    "Client",
    "ConnectionLost",
    "CostTerms",
    "DeadlineExceeded",
    "DecidedBy",
    "DeviceClass",
    "EngineLoad",
    "FleetView",
    "Hello",
    "InvalidRequest",
    "KvroutedError",
    "Limits",
    "MatchStatus",
    "Mode",
    "Options",
    "OverlapEntry",
    "OverlapReply",
    "OtherLoad",
    "Overrides",
    "PoolRole",
    "PotentialLoad",
    "PotentialLoads",
    "Prompt",
    "ProtocolError",
    "RemoteError",
    "Removal",
    "RouteReply",
    "RouteRequest",
    "Scheme",
    "Session",
    "Space",
    "TierBlocks",
    "TraceContext",
    "Trust",
    "TrustLevel",
    "UnknownSpace",
    "Unreachable",
    "Window",
    "Worker",
    "WorkerInfo",
    "WorkerState",
]
