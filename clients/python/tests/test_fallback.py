"""Decisions without the daemon: who gets which prompt, and who moves when a worker goes."""

import json
import unittest
from array import array

from kvrouted import DecidedBy, DeviceClass, RouteRequest, Scheme, Trust, Worker, WorkerInfo, WorkerState, fallback
from kvrouted.fallback import Fleet, decide, key, surprise
from kvrouted.messages import EVERY_RANK, WorkersPage

from .daemon import ROOT


def worker(at: int, *, weight: float = 1.0, state: WorkerState = WorkerState.READY, rank: int = 0, taints=()):
    return WorkerInfo(Worker(at, rank), 0, f"w{at}", state, DeviceClass.GPU, weight, 0, 0, taints, Trust())


def fleet(*workers: WorkerInfo) -> Fleet:
    known = Fleet()
    known.take_page(WorkersPage(workers, 0, 7), 0)
    return known


def chosen(known: Fleet, at: int, **fields) -> Worker:
    decided = decide(known, 0, RouteRequest(model="m", tokens=[at, at + 1], **fields), "gone")
    return decided.best.worker


class Rendezvous(unittest.TestCase):
    def test_a_worker_that_goes_moves_only_its_own_prompts(self):
        workers = [worker(at) for at in range(8)]
        before = {at: chosen(fleet(*workers), at) for at in range(2000)}
        after = {at: chosen(fleet(*workers[:5], *workers[6:]), at) for at in before}
        moved = {before[at] for at in before if before[at] != after[at]}
        self.assertEqual(moved, {Worker(5)})
        shares = [sum(1 for at in before.values() if at.worker_id == which) for which in range(8)]
        self.assertTrue(all(180 < share < 320 for share in shares), shares)

    def test_workers_are_chosen_in_proportion_to_their_weight(self):
        known = fleet(worker(1), worker(2, weight=3.0))
        heavy = sum(1 for at in range(2000) if chosen(known, at).worker_id == 2)
        self.assertTrue(1400 < heavy < 1600, heavy)

    def test_requests_of_one_key_go_to_one_worker(self):
        known = fleet(*(worker(at) for at in range(8)))
        self.assertEqual(len({chosen(known, at, fallback_key="talk-1") for at in range(50)}), 1)
        self.assertGreater(len({chosen(known, 1, fallback_key=f"talk-{at}") for at in range(50)}), 1)

    def test_salt_and_adapter_differ(self):
        known = fleet(*(worker(at) for at in range(32)))
        self.assertNotEqual(
            [chosen(known, at, salt="x") for at in range(20)], [chosen(known, at, lora="x") for at in range(20)]
        )

    def test_only_healthy_workers_that_the_request_may_have_are_chosen(self):
        known = fleet(
            worker(1, state=WorkerState.DRAINING),
            worker(2, state=WorkerState.DOWN),
            worker(3, taints=("fast",)),
            worker(3, rank=1),
            worker(4, state=WorkerState.JOINING),
        )
        self.assertEqual({chosen(known, at).worker_id for at in range(200)}, {3, 4})
        for fields, expected in [
            ({"allow": [Worker(3, 1), Worker(1, 0)]}, Worker(3, 1)),
            ({"pin": Worker(4)}, Worker(4)),
            ({"required_taints": ["fast"]}, Worker(3)),
        ]:
            self.assertEqual({chosen(known, at, **fields) for at in range(20)}, {expected})
        ranks = {chosen(known, at, allow=[Worker(3, EVERY_RANK)]) for at in range(50)}
        self.assertEqual(ranks, {Worker(3, 0), Worker(3, 1)})

    def test_workers_that_are_down_are_chosen_where_nobody_else_is_left(self):
        request = RouteRequest(model="m", tokens=[1])
        decided = decide(fleet(worker(2, state=WorkerState.DOWN)), 0, request, "gone")
        self.assertEqual((decided.best.worker, decided.notes), (Worker(2), {"all_down"}))
        self.assertEqual((decided.decided_by, decided.fallback_reason), (DecidedBy.FALLBACK, "gone"))
        self.assertIsNone(decide(fleet(worker(2, state=WorkerState.DRAINING)), 0, request, "gone"))
        self.assertIsNone(decide(fleet(worker(2)), 1, request, "gone"))


class Vectors(unittest.TestCase):
    """What clients in other languages are held to as well."""

    vectors = json.loads((ROOT / "tests/fixtures/fallback_vectors.json").read_text())

    def test_draws_cost_their_negative_logarithm(self):
        for vector in self.vectors["costs"]:
            self.assertEqual(surprise(int(vector["draw"])), vector["units"], vector)

    def test_every_client_chooses_alike(self):
        for vector in self.vectors["choices"]:
            names = {"lora": "lora", "salt": "salt", "session": "affinity_session"}
            fields = {field: vector.get(name) for name, field in names.items()}
            if "local_hashes" in vector:
                hashes, scheme = [int(text) for text in vector["local_hashes"]], Scheme(vector["block_size"])
                fields |= {"local_hashes": hashes, "scheme": scheme, "token_count": len(hashes) * scheme.block_size}
            else:
                fields["tokens"] = vector["tokens"]
            request = RouteRequest(model="m", **fields)
            self.assertEqual(key(request, vector["prefix_tokens"]), vector["key"], vector)
            rows = [(*row["worker"], row["weight"]) for row in vector["workers"]]
            workers = [worker(at, rank=rank, weight=weight) for at, rank, weight in rows]
            ranked = [list(info.worker) for _, info in fallback.rank(vector["key"], workers, 99)]
            self.assertEqual(ranked, vector["ranked"], vector)

    def test_tokens_are_one_prompt_in_whatever_form(self):
        for prefix in (0, 2, 99):
            packed = RouteRequest(model="m", tokens=b"\1\0\0\0\2\0\0\0\3\0\0\0")
            self.assertEqual(key(packed, prefix), key(RouteRequest(model="m", tokens=[1, 2, 3]), prefix))
        known = fleet(*(worker(at) for at in range(8)))
        packed = array("I", range(100, 200))
        forms = [list(packed), packed, packed.tobytes(), bytearray(packed.tobytes()), memoryview(packed)]
        forms += [memoryview(packed).cast("B"), memoryview(array("I", [at // 2 for at in range(200, 400)]))[::2]]
        for prefix in (0, 1, 7, 99, 4096):
            choices = [decide(known, 0, RouteRequest(model="m", tokens=form), "gone", prefix) for form in forms]
            self.assertEqual(len({choice.best.worker for choice in choices}), 1)
            self.assertEqual(len({key(RouteRequest(model="m", tokens=form), prefix) for form in forms}), 1)
        named = RouteRequest(model="m", tokens=[1], affinity_session="a", fallback_key="b")
        self.assertEqual(key(named, 9), key(RouteRequest(model="m", tokens=[2], affinity_session="b"), 9))


class Pages(unittest.TestCase):
    def test_a_fleet_is_remembered_once_it_was_read_in_one_go(self):
        known = Fleet()
        self.assertEqual(known.take_page(WorkersPage((worker(1),), 1, 7), 0), 1)
        self.assertEqual(known.workers, ())
        self.assertEqual(known.take_page(WorkersPage((worker(2),), 0, 7), 1), 0)
        self.assertEqual([info.worker.worker_id for info in known.workers], [1, 2])
        # It moves on between the pages of the next reading.
        known.take_page(WorkersPage((worker(1),), 1, 8), 0)
        self.assertEqual(known.take_page(WorkersPage((worker(3),), 0, 9), 1), 0)
        self.assertEqual((len(known.workers), known.version), (2, 7))
