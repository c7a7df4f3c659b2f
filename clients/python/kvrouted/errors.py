"""The errors, each with the side that has to act and a remedy."""

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
    """The name of an error code; code_N if this version does not know it."""
    return ERROR_NAMES.get(code, f"code_{code}")


class KvroutedError(Exception):
    """The base of every error of this package."""


class Unreachable(KvroutedError):
    """No daemon answers, and the client could not, or must not, decide without it."""


class ConnectionLost(Unreachable):
    """The connection ended while a call waited for its reply."""


class DeadlineExceeded(Unreachable):
    """The daemon did not answer in time."""


class ProtocolError(KvroutedError):
    """The daemon sent something unreadable: use a daemon and a client of the same release."""


class ReplyTooLate(ProtocolError, DeadlineExceeded):
    """A reply came in time, and reading it took longer than the call had left."""


class UnknownSpace(KvroutedError):
    """The daemon has no such model, or it has it in several spaces and none was named."""


class InvalidRequest(KvroutedError, ValueError):
    """The request is invalid; it was not sent."""


class RemoteError(KvroutedError):
    """The daemon refused the request."""

    def __init__(
        self, code: int, side: str, retryable: bool, retry_after_us: int, message: str, remedy: str
    ) -> None:
        super().__init__(f"{message} ({remedy})" if remedy else message)
        self.code = code
        #: The code's name in schemas/README.md.
        self.kind = error_name(code)
        #: The side that has to act: gateway, worker, kernel, config or daemon.
        self.side = side
        #: Whether the same request may succeed later, unchanged.
        self.retryable = retryable
        #: The pause before a retry, microseconds; 0 = not stated.
        self.retry_after_us = retry_after_us
        self.message = message
        self.remedy = remedy
