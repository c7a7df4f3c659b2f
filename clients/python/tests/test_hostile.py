"""Both clients against a daemon that means harm: each call ends by its deadline, and nothing grows without bound."""

import asyncio
import time
import unittest
from collections.abc import Callable

from kvrouted import AsyncClient, Client, DeadlineExceeded, Options, ProtocolError, RouteRequest
from kvrouted.core import IN_FLIGHT_MAX
from kvrouted.fallback import Fleet
from kvrouted.messages import WORKERS_MAX, WorkersPage

from .daemon import PATIENCE_S
from .hostile import Behave, Hostile, floods, lists_without_end, trickles, turns_pages
from .test_core import connected, route_reply

HURRIED = Options(timeout_s=0.3, fallback=False)
PATIENT = Options(timeout_s=PATIENCE_S, fallback=False)
#: Seconds that no call may take. Without a bound each of these takes several times that, or does not end.
CALL_S_MAX = 5.0
REQUEST = RouteRequest(model="m", tokens=[1])
CASES: list[tuple[str, Behave]] = [
    ("route", floods),
    ("workers", floods),
    ("route", trickles),
    ("workers", turns_pages),
]


class Timed(unittest.TestCase):
    def setUp(self) -> None:
        self.began = time.monotonic()

    def assert_in_time(self) -> None:
        self.assertLess(time.monotonic() - self.began, CALL_S_MAX)


class Blocking(Timed):
    def ask(self, client: Client, call: str) -> object:
        calls: dict[str, Callable[[], object]] = {
            "route": lambda: client.route(REQUEST),
            "workers": client.workers,
            "watch": lambda: next(client.watch()),
        }
        self.began = time.monotonic()
        return calls[call]()

    def test_a_call_ends_by_its_deadline_whatever_comes(self):
        for call, behave in [*CASES, ("watch", floods)]:
            with self.subTest(call=call, behave=behave.__name__), Hostile(behave) as daemon:
                with Client(daemon.socket, HURRIED) as client:
                    with self.assertRaises(DeadlineExceeded):
                        self.ask(client, call)
                    self.assert_in_time()

    def test_a_reply_that_lists_without_end_is_refused_and_not_read(self):
        for call in ("route", "workers"):
            with self.subTest(call=call), Hostile(lists_without_end) as daemon, Client(daemon.socket, PATIENT) as client:
                with self.assertRaises(ProtocolError):
                    self.ask(client, call)
                self.assert_in_time()


class Asyncio(Timed, unittest.IsolatedAsyncioTestCase):
    async def ask(self, client: AsyncClient, call: str) -> object:
        self.began = time.monotonic()
        return await (client.route(REQUEST) if call == "route" else client.workers())

    async def test_a_call_ends_by_its_deadline_whatever_comes(self):
        for call, behave in CASES:
            with self.subTest(call=call, behave=behave.__name__), Hostile(behave) as daemon:
                async with AsyncClient(daemon.socket, HURRIED) as client:
                    with self.assertRaises(DeadlineExceeded):
                        await self.ask(client, call)
                    self.assert_in_time()

    async def test_a_reply_that_lists_without_end_is_refused_and_not_read(self):
        for call in ("route", "workers"):
            with self.subTest(call=call), Hostile(lists_without_end) as daemon:
                async with AsyncClient(daemon.socket, PATIENT) as client:
                    with self.assertRaises(ProtocolError):
                        await self.ask(client, call)
                    self.assert_in_time()


class Bounds(unittest.TestCase):
    def test_bookings_that_nobody_asked_for_are_freed_a_bounded_number_at_once(self):
        core = connected()
        sent = b""
        for at in range(2 * IN_FLIGHT_MAX):
            core.feed(route_reply(1000 + at, at + 1))
            sent += core.stray(*core.next_reply())
        one = len(connected().stray(1, connected_reply()))
        self.assertEqual(len(sent), IN_FLIGHT_MAX * one)

    def test_pages_that_do_not_end_are_forgotten(self):
        fleet = Fleet()
        page = WorkersPage((None,) * 4096, 1, 1)  # type: ignore[arg-type]
        cursor = 0
        for at in range(WORKERS_MAX // 4096 + 1):
            self.assertEqual(cursor, at)
            cursor = fleet.take_page(WorkersPage(page.workers, at + 1, 1), cursor)
        self.assertEqual((cursor, fleet.workers), (0, ()))


def connected_reply():
    """A reply to a route that booked."""
    core = connected()
    core.feed(route_reply(1, 1))
    return core.next_reply()[1]


if __name__ == "__main__":
    unittest.main()
