"""The asyncio client and a real daemon: many requests at once, cancellation, and the daemon's death and return."""

import asyncio
import unittest
from unittest import mock

from kvrouted import (
    AsyncClient,
    BookingOutcome,
    DeadlineExceeded,
    DecidedBy,
    KvroutedError,
    Options,
    Prompt,
    RemoteError,
    Unreachable,
    Worker,
)

from .daemon import PATIENCE_S, Daemon
from .test_client import ask, prompt


async def busy(client: AsyncClient) -> float:
    """Requests that the workers are busy with."""
    reply = await client.route(ask(tokens=prompt(999), explain=True))
    return sum(candidate.terms.active_requests for candidate in reply.candidates)


async def until(holds) -> None:
    async def come() -> None:
        while not await holds():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(come(), PATIENCE_S)


class Asyncio(unittest.IsolatedAsyncioTestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon()
        cls.addClassCleanup(cls.daemon.remove)

    async def client(self, **options) -> AsyncClient:
        client = AsyncClient(self.daemon.socket, Options(**{"timeout_s": PATIENCE_S, **options}))
        self.addAsyncCleanup(client.close)
        return client

    async def test_many_requests_share_a_connection(self):
        client = await self.client(hash_locally=True)
        replies = await asyncio.gather(
            *(client.route(ask(tokens=prompt(at), book=f"many-{at}")) for at in range(100))
        )
        self.assertEqual({reply.decided_by for reply in replies}, {DecidedBy.DAEMON})
        self.assertEqual(len({reply.booking for reply in replies}), 100)
        self.assertEqual(await busy(client), 100)
        done = await asyncio.gather(*(client.prefill_complete(reply.booking, 10) for reply in replies))
        freed = await asyncio.gather(*(client.free(reply.booking) for reply in replies))
        self.assertEqual({*done, *freed}, {BookingOutcome.APPLIED})
        self.assertEqual(await busy(client), 0)

    async def test_questions_and_refusals_are_as_the_blocking_clients(self):
        client = await self.client()
        self.assertEqual([info.worker for info in await client.workers()], [Worker(1), Worker(2)])
        overlap = await client.overlap(Prompt(model="m", tokens=prompt(12345)))
        self.assertEqual([entry.overlap.device for entry in overlap.workers], [0, 0])
        await client.route(ask(tokens=prompt(1), book="twice"))
        with self.assertRaises(RemoteError) as refused:
            await client.route(ask(tokens=prompt(1), book="twice"))
        self.assertEqual(refused.exception.kind, "booking_exists")
        again = await client.route(ask(tokens=prompt(1), book="twice", attempt=1))
        await client.free(again.booking)

    async def test_a_watch_ends_with_an_error_when_another_takes_its_place(self):
        client = await self.client()
        first, second = client.watch(), client.watch()
        self.assertEqual(len((await anext(first)).workers), 2)
        self.assertEqual(len((await anext(second)).workers), 2)
        with self.assertRaisesRegex(KvroutedError, "another watch"):
            await asyncio.wait_for(anext(first), PATIENCE_S)
        coming = asyncio.ensure_future(anext(second))
        await asyncio.to_thread(self.daemon.administer, "worker", "set", "2", "weight=4")
        self.assertEqual((await asyncio.wait_for(coming, PATIENCE_S)).workers[1].weight, 4.0)
        await asyncio.to_thread(self.daemon.administer, "worker", "set", "2", "weight=8")

    async def test_the_fleet_and_potential_loads_arrive_beside_requests(self):
        client = await self.client()
        views = client.watch()
        first = await anext(views)
        self.assertEqual([info.worker for info in first.workers], [Worker(1), Worker(2)])
        loads = await client.potential_loads(Prompt(model="m", tokens=prompt(77)))
        self.assertEqual([load.worker for load in loads.loads], [Worker(1), Worker(2)])
        coming = asyncio.ensure_future(anext(views))
        await client.route(ask(tokens=prompt(1)))
        self.assertFalse(coming.done())
        await asyncio.to_thread(self.daemon.administer, "worker", "set", "2", "weight=2")
        changed = await asyncio.wait_for(coming, PATIENCE_S)
        self.assertEqual((first.workers[1].weight, changed.workers[1].weight), (8.0, 2.0))
        self.daemon.kill()
        with self.assertRaises(Unreachable):
            await asyncio.wait_for(anext(views), PATIENCE_S)
        self.daemon.start()

    async def test_a_booking_that_nobody_waits_for_any_more_is_freed(self):
        client, watcher = await self.client(backoff_s=(0.001, 0.001)), await self.client()
        await client.connect()
        await watcher.connect()
        with self.daemon.silent():
            cancelled = asyncio.create_task(client.route(ask(tokens=prompt(1), book="cancelled")))
            await asyncio.sleep(0.05)
            cancelled.cancel()
            late = await client.route(ask(tokens=prompt(1), book="late"), timeout_s=0.05)
            self.assertIs(late.decided_by, DecidedBy.FALLBACK)

        async def nothing_is_booked() -> bool:
            # Both replies have come: the client has read on past them.
            decided = await client.route(ask(tokens=prompt(2)))
            return decided.decided_by is DecidedBy.DAEMON and await busy(watcher) == 0

        await until(nothing_is_booked)

    async def test_tasks_decide_alone_while_the_daemon_is_gone_and_find_it_again(self):
        client = await self.client(backoff_s=(0.01, 0.05))
        first = (await client.connect()).instance_id
        held = (await client.route(ask(tokens=prompt(1), book="held"))).booking
        self.daemon.kill()
        alone = await asyncio.gather(*(client.route(ask(tokens=prompt(at), book=f"a-{at}")) for at in range(40)))
        self.assertEqual({reply.decided_by for reply in alone}, {DecidedBy.FALLBACK})
        self.assertEqual({reply.best.worker for reply in alone}, {Worker(1), Worker(2)})
        self.assertIsNone(await client.free(held))
        strict = await self.client(fallback=False)
        with self.assertRaises(Unreachable):
            await strict.route(ask(tokens=prompt(1)))
        self.daemon.start()

        async def decided_by_the_daemon() -> bool:
            return (await client.route(ask(tokens=prompt(1)))).decided_by is DecidedBy.DAEMON

        await until(decided_by_the_daemon)
        self.assertNotEqual((await client.hello()).instance_id, first)
        self.assertEqual(await busy(client), 0)

    async def test_a_deadline_holds_while_another_task_connects(self):
        client = await self.client(fallback=False)
        with self.daemon.silent():
            patient = asyncio.create_task(client.connect())
            await asyncio.sleep(0)
            with self.assertRaises(DeadlineExceeded):
                await client.route(ask(tokens=prompt(1)), timeout_s=0.05)
        await patient
        self.assertIsNotNone((await client.route(ask(tokens=prompt(1)))).best)

    async def test_many_routes_whose_connection_breaks_are_booked_once(self):
        # Of fewer than these routes, so that some are tried again while what they may have booked is still to be freed.
        few = mock.patch("kvrouted.core.IN_FLIGHT_MAX", 1)
        few.start()
        self.addCleanup(few.stop)
        client = await self.client()
        await client.connect()
        with self.daemon.silent():
            routes = [ask(tokens=[at], book=f"broken-{at}") for at in range(300)]
            tried = [asyncio.ensure_future(client.route(route)) for route in routes]
            while len(client._waiting) < len(routes):
                await asyncio.sleep(0.005)
            client._writer.transport.abort()
        replies = await asyncio.gather(*tried)
        self.assertEqual({reply.decided_by for reply in replies}, {DecidedBy.DAEMON})
        self.assertEqual(await busy(client), len(routes))
        freed = await asyncio.gather(*(client.free(reply.booking) for reply in replies))
        self.assertEqual(set(freed), {BookingOutcome.APPLIED})
        self.assertEqual(await busy(client), 0)

    async def test_nothing_piles_up_for_a_daemon_that_hangs(self):
        client = await self.client(backoff_s=(0.0, 0.0))
        await client.connect()
        held = (await client.route(ask(tokens=prompt(1), book="piled"))).booking
        with self.daemon.silent():
            large = prompt(2, 60_000)
            for _ in range(40):
                reply = await client.route(ask(tokens=large), timeout_s=0.02)
                self.assertIs(reply.decided_by, DecidedBy.FALLBACK)
            # What was written when there was room for it, and no more.
            self.assertLess(client._writer.transport.get_write_buffer_size(), 3 * 4 * len(large))
            self.assertIsNone(await client.output_progress(held, 5, timeout_s=0.02))
            self.assertEqual(len(client._core._stored), 0)
            self.assertIsNone(await client.free(held, timeout_s=0.02))
            self.assertEqual(len(client._core._stored), 1)

        async def nothing_is_booked() -> bool:
            decided = await client.route(ask(tokens=prompt(3)))
            return decided.decided_by is DecidedBy.DAEMON and await busy(client) == 0

        await until(nothing_is_booked)
        self.assertEqual((await client.route(ask(tokens=large))).decided_by, DecidedBy.DAEMON)

    async def test_a_deadline_is_the_callers(self):
        client = await self.client(fallback=False, backoff_s=(0.001, 0.001))
        await client.connect()
        with self.daemon.silent():
            with self.assertRaises(DeadlineExceeded):
                await client.route(ask(tokens=prompt(1)), timeout_s=0.05)

        async def answers() -> bool:
            try:
                return (await client.route(ask(tokens=prompt(1)))).best is not None
            except Unreachable:
                return False

        await until(answers)


class Queued(unittest.IsolatedAsyncioTestCase):
    async def test_a_booking_that_waits_for_a_worker_holds_up_nobody_else(self):
        daemon = Daemon(
            "[[space]]\nmodel = 'm'\nblock_size = 16\n[policy]\nqueue_threshold = 1.0\n"
            "[[worker]]\nid = 1\nbatched_tokens_max = 64\n"
        )
        self.addCleanup(daemon.remove)
        async with AsyncClient(daemon.socket, Options(timeout_s=PATIENCE_S)) as client:
            first = await client.route(ask(tokens=prompt(1, 640), book="first"))
            with self.assertRaises(RemoteError) as refused:
                await client.route(ask(tokens=prompt(2), book="hasty", deadline_us=20_000))
            self.assertEqual((refused.exception.kind, refused.exception.retryable), ("deadline_passed", True))
            waiting = asyncio.create_task(client.route(ask(tokens=prompt(3), book="waits")))
            # Asked later, answered earlier.
            await client.route(ask(tokens=prompt(4)))
            self.assertFalse(waiting.done())
            await client.prefill_complete(first.booking)
            second = await waiting
            self.assertEqual((second.decided_by, second.best.worker), (DecidedBy.DAEMON, Worker(1)))
            freed = [await client.free(reply.booking) for reply in (first, second)]
            self.assertEqual(freed, [BookingOutcome.APPLIED] * 2)
