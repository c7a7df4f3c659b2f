"""The blocking client and a real daemon: every request, and the daemon's death, silence and return."""

import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path

from kvrouted import (
    BookingOutcome,
    Client,
    DeadlineExceeded,
    DecidedBy,
    EngineLoad,
    InvalidRequest,
    MatchStatus,
    Options,
    Overrides,
    PoolRole,
    Prompt,
    ProtocolError,
    RemoteError,
    RouteRequest,
    Scheme,
    Session,
    TraceContext,
    TrustLevel,
    UnknownSpace,
    Unreachable,
    Worker,
    WorkerState,
)
from kvrouted.hashing import local_hashes

from .daemon import PATIENCE_S, PREDICTED, ROOT, Daemon, until

PATIENT = Options(name="test", timeout_s=PATIENCE_S)


def ask(**fields) -> RouteRequest:
    return RouteRequest(model="m", **fields)


def prompt(seed: int, tokens: int = 64) -> list[int]:
    return [seed * 7919 + at * 31 for at in range(tokens)]


def busy(client: Client) -> list[float]:
    """Requests that each worker is busy with."""
    reply = client.route(ask(tokens=prompt(999), explain=True))
    return [c.terms.active_requests for c in sorted(reply.candidates, key=lambda c: c.worker)]


class WithDaemon(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon()
        cls.addClassCleanup(cls.daemon.remove)

    def client(self, options: Options = PATIENT) -> Client:
        client = Client(self.daemon.socket, options)
        self.addCleanup(client.close)
        return client


class Example(WithDaemon):
    def test_the_request_of_the_readme_books_and_frees(self):
        command = [sys.executable, "-B", str(ROOT / "clients/python/examples/route.py"), self.daemon.socket, "m", "1,2,3"]
        environment = {"PYTHONPATH": str(ROOT / "clients/python")}
        for _ in range(2):
            # The same booking again: the first has been freed.
            ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
            self.assertEqual((ran.returncode, ran.stderr), (0, ""))
            self.assertRegex(ran.stdout, r"^send the prompt to worker Worker\(worker_id=[12], dp_rank=0\)\n$")


class Requests(WithDaemon):
    def test_hello_describes_the_daemon(self):
        hello = self.client().hello()
        self.assertEqual([(s.model, s.role, s.scheme) for s in hello.spaces], [("m", PoolRole.BOTH, Scheme(16))])
        self.assertLessEqual({"routing", "bookings", "local_hash_prompts"}, hello.features)
        self.assertGreater(hello.limits.prompt_tokens_max, 1000)
        self.assertTrue(hello.admin_socket)

    def test_workers_are_listed_with_their_records(self):
        client = self.client()
        workers = client.workers()
        self.assertEqual([info.worker for info in workers], [Worker(1), Worker(2)])
        self.assertEqual((workers[0].name, workers[0].taints), ("one", ("fast",)))
        self.assertEqual(client.workers(space_id=workers[0].space_id), workers)

    def test_a_booking_lives_from_its_route_to_its_free(self):
        client = self.client()
        before = busy(client)
        reply = client.route(ask(tokens=prompt(1), book="life"))
        self.assertIs(reply.decided_by, DecidedBy.DAEMON)
        self.assertEqual((reply.request_blocks, reply.match), (4, MatchStatus.MATCHED))
        self.assertEqual(sum(busy(client)), sum(before) + 1)
        self.assertIs(client.prefill_complete(reply.booking, 1500), BookingOutcome.APPLIED)
        self.assertIs(client.prefill_complete(reply.booking), BookingOutcome.ALREADY_APPLIED)
        self.assertIs(client.free(reply.booking), BookingOutcome.APPLIED)
        self.assertIs(client.free(reply.booking), BookingOutcome.ALREADY_APPLIED)
        self.assertEqual(busy(client), before)
        self.assertIsNone(client.free(None))

    def test_a_later_attempt_takes_the_booking_over_and_an_equal_one_is_refused(self):
        client = self.client()
        first = client.route(ask(tokens=prompt(2), book="tries"))
        with self.assertRaises(RemoteError) as refused:
            client.route(ask(tokens=prompt(2), book="tries"))
        self.assertEqual((refused.exception.kind, refused.exception.side), ("booking_exists", "gateway"))
        self.assertTrue(refused.exception.remedy)
        second = client.route(ask(tokens=prompt(2), book="tries", attempt=1))
        self.assertIsNot(client.free(first.booking), BookingOutcome.APPLIED)
        self.assertIs(client.free(second.booking), BookingOutcome.APPLIED)

    def test_connections_of_one_session_share_their_bookings_and_others_do_not(self):
        session = Session(7, 11)
        one, two = (self.client(Options(session=session, timeout_s=PATIENCE_S)) for _ in range(2))
        booking = one.route(ask(tokens=prompt(3), book="shared")).booking
        self.assertIs(self.client().free(booking), BookingOutcome.UNKNOWN)
        self.assertIs(two.free(booking), BookingOutcome.APPLIED)

    def test_tokens_and_locally_made_hashes_are_the_same_prompt(self):
        tokens, hashing = self.client(), self.client(Options(hash_locally=True, timeout_s=PATIENCE_S))
        variants = [{}, {"lora": "my-lora"}, {"salt": "tenant-a"}, {"media": [(1, 0xDEADBEEF), (1, 7)]}]
        for at, variant in enumerate(variants):
            booked = hashing.route(ask(tokens=prompt(40), book=f"hashed-{at}", **variant))
            hashing.free(booked.booking)

            def predicted(client, variant=variant, best=booked.best):
                reply = client.overlap(Prompt(model="m", tokens=prompt(40), **variant))
                return [entry.overlap.device for entry in reply.workers if entry.worker == best.worker] == [4]

            until("the booking is predicted", lambda: predicted(tokens))
            self.assertTrue(predicted(hashing))
            overlaps = tokens.overlap(Prompt(model="m", tokens=prompt(41), **variant))
            self.assertEqual({entry.overlap.device for entry in overlaps.workers}, {0})
            self.assertEqual({entry.trust.level for entry in overlaps.workers}, {TrustLevel.PREDICTED})
            self.assertEqual({entry.trust.reasons for entry in overlaps.workers}, {frozenset({"own_decisions"})})

    def test_hashes_given_by_the_caller_are_checked_against_the_spaces_scheme(self):
        client = self.client()
        hashes = local_hashes(prompt(5), Scheme(16))
        reply = client.route(ask(local_hashes=hashes, scheme=Scheme(16), token_count=70))
        self.assertEqual(reply.request_blocks, 4)
        with self.assertRaises(RemoteError) as refused:
            client.route(ask(local_hashes=hashes[:2], scheme=Scheme(32), token_count=64))
        self.assertEqual(refused.exception.kind, "scheme_mismatch")

    def test_only_allowed_workers_are_candidates_and_the_removed_are_named(self):
        client = self.client()
        reply = client.route(ask(tokens=prompt(6), allow=[Worker(2)], explain=True))
        self.assertEqual([candidate.worker for candidate in reply.candidates], [Worker(2)])
        self.assertEqual({removal.rule: removal.workers for removal in reply.removed}, {"not_allowed": (Worker(1),)})
        terms = reply.candidates[0].terms
        self.assertEqual((terms.request_blocks, terms.cost), (4.0, reply.candidates[0].cost))
        self.assertIs(reply.candidates[0].state, WorkerState.READY)

    def test_progress_and_another_worker_are_reported_of_a_booking(self):
        client = self.client()
        reply = client.route(ask(tokens=prompt(8), book="moved"))
        other = Worker(3 - reply.best.worker.worker_id)
        before = busy(client)
        self.assertIs(client.served(reply.booking, other), BookingOutcome.APPLIED)
        self.assertEqual(busy(client), before[::-1])
        self.assertIs(client.output_progress(reply.booking, 100), BookingOutcome.APPLIED)
        with self.assertRaises(RemoteError):
            client.served(reply.booking, Worker(99))
        self.assertIs(client.free(reply.booking), BookingOutcome.APPLIED)

    def test_potential_loads_cover_every_worker(self):
        client = self.client()
        before = client.potential_loads(Prompt(model="m", tokens=prompt(70)))
        self.assertEqual([load.worker for load in before.loads], [Worker(1), Worker(2)])
        booked = client.route(ask(tokens=prompt(71), book="potential"))
        after = client.potential_loads(Prompt(model="m", tokens=prompt(70)))
        at = booked.best.worker.worker_id - 1
        more = after.loads[at].prefill_tokens - before.loads[at].prefill_tokens
        self.assertEqual((more, after.loads[at].active_requests - before.loads[at].active_requests), (64, 1))
        self.assertEqual(after.loads[1 - at], before.loads[1 - at])
        client.free(booked.booking)

    def test_failures_and_loads_of_a_worker_are_reported(self):
        client = self.client()
        taken = client.report_load("m", Worker(1), EngineLoad(running_requests=1, kv_usage=0.25))
        self.assertIsInstance(taken, bool)
        with self.assertRaises(RemoteError) as refused:
            client.report_load("m", Worker(1), EngineLoad(kv_usage=2.0))
        self.assertEqual(refused.exception.kind, "invalid_argument")
        with self.assertRaises(UnknownSpace):
            client.report_failure("other", Worker(1))

    def test_a_reply_without_an_eligible_worker_has_its_reason(self):
        reply = self.client().route(ask(tokens=prompt(8), allow=[Worker(99)], book="nobody"))
        self.assertEqual((reply.candidates, reply.best, reply.booking), ((), None, None))
        self.assertEqual(reply.nobody, "all_filtered")

    def test_a_field_is_served_or_refused_by_name(self):
        client = self.client()
        fields = [
            {"pin": Worker(1)},
            {"required_taints": ["fast"]},
            {"preferred_taints": {"fast": 0.5}},
            {"shared_hits": [(0, 2)]},
            {"affinity_session": "talk"},
            {"priority": 1},
            {"trace": TraceContext(1 << 127, 2, 1)},
            {"overrides": Overrides(temperature=0.0, assume_kv_reuse=False)},
        ]
        for field in fields:
            name = next(iter(field))
            try:
                reply = client.route(ask(tokens=prompt(7), **field))
            except RemoteError as error:
                self.assertEqual(error.kind, "unsupported", error)
                self.assertIn(f"route.{name}", error.message)
            else:
                self.assertIsNotNone(reply.best, name)

    def test_an_invalid_request_is_refused_before_it_is_sent(self):
        client = self.client()
        for wrong in (
            lambda: Prompt(model="m"),
            lambda: Prompt(model="m", tokens=[1], local_hashes=[1]),
            lambda: Prompt(model="m", local_hashes=[1]),
            lambda: client.route(ask(tokens=[-1])),
            lambda: client.route(ask(tokens=[1], book="")),
            lambda: client.route(ask(tokens=[1], allow=[Worker(-1)])),
            lambda: client.route(ask(tokens=[1], attempt=-1)),
        ):
            with self.assertRaises(InvalidRequest):
                wrong()
        with self.assertRaisesRegex(UnknownSpace, "it has 'm'"):
            client.route(RouteRequest(model="other", tokens=[1]))
        self.assertIsNotNone(client.route(ask(tokens=[1])).best)


class Sessions(unittest.TestCase):
    """A space that keeps sessions with their workers."""

    def test_requests_of_a_session_come_to_one_worker(self):
        daemon = Daemon(f'[policy]\nmode = "round-robin"\naffinity = "hard"\n{PREDICTED}')
        self.addCleanup(daemon.remove)
        with Client(daemon.socket, PATIENT) as client:

            def worker(at: int, session: str | None) -> Worker:
                reply = client.route(ask(tokens=prompt(at), book=f"talk-{at}", affinity_session=session))
                client.free(reply.booking)
                return reply.best.worker

            self.assertEqual(len({worker(at, "talk") for at in range(6)}), 1)
            self.assertEqual(len({worker(at, None) for at in range(6, 12)}), 2)
            explained = client.route(ask(tokens=prompt(1), affinity_session="talk", explain=True))
            self.assertEqual({candidate.terms.affinity_factor for candidate in explained.candidates}, {1.0})


class Pairs(unittest.TestCase):
    """A model of two pools."""

    def test_one_reply_names_a_worker_to_prefill_and_one_to_decode(self):
        roles = ("prefill", "decode")
        spaces = "".join(f'[[space]]\nmodel = "m"\nblock_size = 16\nrole = "{role}"\n' for role in roles)
        workers = "".join(
            f'[[worker]]\nid = {at}\nrole = "{role}"\n' for at, role in ((1, "prefill"), (2, "decode"))
        )
        daemon = Daemon(spaces + workers)
        self.addCleanup(daemon.remove)
        with Client(daemon.socket, PATIENT) as client:
            pair = {"role": PoolRole.DECODE, "disaggregate": True, "tokens": prompt(1)}
            reply = client.route(ask(book="pair", **pair))
            self.assertEqual((reply.prefill[0].worker, reply.best.worker), (Worker(1), Worker(2)))
            self.assertIs(client.prefill_complete(reply.prefill_booking), BookingOutcome.APPLIED)
            self.assertIs(client.free(reply.prefill_booking), BookingOutcome.APPLIED)
            self.assertIs(client.free(reply.booking), BookingOutcome.APPLIED)
            client.report_failure("m", Worker(1), "gone", role=PoolRole.PREFILL)
            self.assertEqual(client.route(ask(**pair)).prefill[0].worker, Worker(1), "there is nobody else")


class Watching(unittest.TestCase):
    def test_the_fleet_arrives_at_once_and_after_each_change(self):
        daemon = Daemon()
        self.addCleanup(daemon.remove)
        with Client(daemon.socket, PATIENT) as client:
            views = client.watch()
            first = next(views)
            self.assertEqual([info.worker for info in first.workers], [Worker(1), Worker(2)])
            daemon.administer("worker", "set", "2", "draining=true")
            seen = next(view for view in views if view.workers[1].state is WorkerState.DRAINING)
            self.assertGreater(seen.fleet_version, first.fleet_version)
            daemon.kill()
            with self.assertRaises(Unreachable):
                list(views)
            self.assertRaises(StopIteration, next, views)


class Troubles(WithDaemon):
    def setUp(self):
        self.daemon.kill()
        self.daemon.start()

    def test_a_worker_that_failed_is_left_alone(self):
        client = self.client()
        self.assertGreater(client.report_failure("m", Worker(1), "connection refused"), 0)
        self.assertEqual(client.route(ask(tokens=prompt(1))).best.worker, Worker(2))

    def test_a_client_decides_alone_while_the_daemon_is_gone_and_finds_it_again(self):
        client = self.client(Options(timeout_s=PATIENCE_S, backoff_s=(0.01, 0.05)))
        first = client.connect().instance_id
        booking = client.route(ask(tokens=prompt(1), book="old")).booking
        self.daemon.kill()
        alone = [client.route(ask(tokens=prompt(at), book=f"alone-{at}")) for at in range(40)]
        self.assertEqual({reply.decided_by for reply in alone}, {DecidedBy.FALLBACK})
        self.assertEqual({reply.best.worker for reply in alone}, {Worker(1), Worker(2)})
        self.assertEqual({reply.booking for reply in alone}, {None})
        self.assertTrue(alone[0].fallback_reason)
        again = client.route(ask(tokens=prompt(7)))
        self.assertEqual(again.best, alone[7].best)
        self.daemon.start()
        until("the daemon decides again", lambda: self.decided_by(client) is DecidedBy.DAEMON)
        self.assertNotEqual(client.hello().instance_id, first)
        # The other run counts its bookings from the same beginning.
        other = client.route(ask(tokens=prompt(2), book="new")).booking
        self.assertEqual(other.generation, booking.generation)
        self.assertIs(client.free(booking), BookingOutcome.UNKNOWN)
        self.assertIs(client.free(other), BookingOutcome.APPLIED)

    def decided_by(self, client: Client) -> DecidedBy:
        return client.route(ask(tokens=prompt(1))).decided_by

    def test_a_client_without_fallback_says_that_nobody_answers(self):
        client = self.client(Options(timeout_s=PATIENCE_S, fallback=False, backoff_s=(0.01, 0.05)))
        client.connect()
        self.daemon.kill()
        with self.assertRaises(Unreachable):
            client.route(ask(tokens=prompt(1)))
        # One that never knew any workers cannot decide either.
        with self.assertRaisesRegex(Unreachable, "cannot connect"):
            self.client(Options(timeout_s=PATIENCE_S)).route(ask(tokens=prompt(1)))

    def test_a_daemon_that_does_not_answer_is_left_alone_for_a_while(self):
        client = self.client(Options(timeout_s=PATIENCE_S, backoff_s=(30.0, 30.0)))
        client.connect()
        self.daemon.kill()
        self.assertIs(self.decided_by(client), DecidedBy.FALLBACK)
        self.daemon.start()
        reply = client.route(ask(tokens=prompt(1)))
        self.assertIs(reply.decided_by, DecidedBy.FALLBACK)
        self.assertIn("the next try is in", reply.fallback_reason)

    def test_a_booking_that_comes_too_late_is_freed(self):
        watcher = self.client()
        self.assertEqual(busy(watcher), [0.0, 0.0])
        client = self.client(Options(timeout_s=PATIENCE_S, backoff_s=(0.001, 0.001)))
        client.connect()
        with self.daemon.silent():
            reply = client.route(ask(tokens=prompt(1), book="late"), timeout_s=0.1)
            self.assertIs(reply.decided_by, DecidedBy.FALLBACK)
            self.assertIn("in time", reply.fallback_reason)
            with self.assertRaises(DeadlineExceeded):
                time.sleep(0.002)
                client.overlap(Prompt(model="m", tokens=prompt(1)), timeout_s=0.1)
        until("the daemon decides again", lambda: self.decided_by(client) is DecidedBy.DAEMON)
        until("nothing is booked", lambda: busy(watcher) == [0.0, 0.0])

    def test_a_report_that_could_not_be_sent_is_sent_when_the_daemon_is_back(self):
        watcher = self.client()
        client = self.client(Options(timeout_s=PATIENCE_S, backoff_s=(0.001, 0.001)))
        booking = client.route(ask(tokens=prompt(1), book="held")).booking
        self.assertEqual(sum(busy(watcher)), 1.0)
        with self.daemon.silent():
            self.assertIsNone(client.free(booking, timeout_s=0.05))
        until("the daemon decides again", lambda: self.decided_by(client) is DecidedBy.DAEMON)
        until("nothing is booked", lambda: busy(watcher) == [0.0, 0.0])


class Strangers(unittest.TestCase):
    """Sockets that are not kvrouted's."""

    def answer(self, reply: bytes) -> str:
        """The path of a socket on which whoever connects gets this reply."""
        folder = tempfile.TemporaryDirectory(prefix="kvrouted-")
        self.addCleanup(folder.cleanup)
        path = str(Path(folder.name) / "s")
        listener = socket.socket(socket.AF_UNIX)
        self.addCleanup(listener.close)
        listener.bind(path)
        listener.listen()

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(1 << 16)
                peer.sendall(reply)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        self.addCleanup(thread.join)
        return path

    def test_bytes_that_are_not_a_frame_are_refused(self):
        for reply in (b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(16), b"\x08\0\0\0\x02\0\x01\0\x01" + bytes(15)):
            with self.assertRaises(ProtocolError):
                Client(self.answer(reply), PATIENT).hello()

    def test_a_socket_that_closes_is_an_unreachable_daemon(self):
        with self.assertRaises(Unreachable):
            Client(self.answer(b""), PATIENT).hello()
