"""What can go wrong, by whose fault it is and what helps."""

from __future__ import annotations

# Error codes of schemas/README.md, by code.
ERROR_NAMES: dict[int, str] = {
    1: "malformed",
    2: "oversized",
    3: "unsupported_version",
    4: "unsupported",
    5: "hello_required",
    6: "invalid_argument",
    7: "unknown_space",
    8: "scheme_mismatch",
    9: "admin_only",
    10: "too_many_bookings",
    11: "booking_exists",
    12: "draining",
    13: "overloaded",
    14: "not_permitted",
    15: "config",
    16: "system",
    17: "undecodable",
    18: "connection",
    19: "internal",
    20: "pinned_not_allowed",
    21: "pinned_busy",
    22: "all_busy",
    23: "all_filtered",
    24: "nobody_available",
    25: "queue_full",
    26: "deadline_passed",
}


def error_name(code: int) -> str:
    """The name of an error code; one that has none here is called code_N."""
    return ERROR_NAMES.get(code, f"code_{code}")


class KvroutedError(Exception):
    """Anything that this package raises on purpose."""


class Unreachable(KvroutedError):
    """No daemon answers, and it was not possible, or not wanted, to decide without one."""


class ConnectionLost(Unreachable):
    """The connection ended while a reply was awaited."""


class DeadlineExceeded(Unreachable):
    """The daemon did not answer in time."""


class ProtocolError(KvroutedError):
    """The daemon sent what cannot be read: use a daemon and a client of one release."""


class UnknownSpace(KvroutedError):
    """The daemon has no such model, or it has it in several spaces and none was named."""


class InvalidRequest(KvroutedError, ValueError):
    """The request means nothing; it was not sent."""


class RemoteError(KvroutedError):
    """The daemon's own word on why a request failed."""

    def __init__(
        self, code: int, side: str, retryable: bool, retry_after_us: int, message: str, remedy: str
    ) -> None:
        super().__init__(f"{message} ({remedy})" if remedy else message)
        self.code = code
        #: The code's name in schemas/README.md.
        self.kind = error_name(code)
        #: Who has to act: gateway, worker, kernel, config or daemon.
        self.side = side
        #: Whether the same request may succeed later, unchanged.
        self.retryable = retryable
        #: When to try again, microseconds; 0 = not said.
        self.retry_after_us = retry_after_us
        self.message = message
        self.remedy = remedy
