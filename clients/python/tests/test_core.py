"""What a client remembers, without any socket: bytes of a daemon's replies in, bytes of requests out."""

import unittest
from dataclasses import replace
from functools import partial

import flatbuffers

from kvrouted import (
    Booking,
    DeadlineExceeded,
    Hello,
    Limits,
    Options,
    PoolRole,
    ProtocolError,
    RouteRequest,
    Scheme,
    Space,
    TraceContext,
    Unreachable,
    frames,
)
from kvrouted.core import STORED_MAX, IN_FLIGHT_MAX, Core, OtherRun
from kvrouted.schema_generated import routing_generated as fb

from .hostile import candidates


def hello(instance_id: int) -> Hello:
    return Hello(1, instance_id, Limits(1, 1, 1, 1, 1), frozenset(), (Space(0, "m", "", PoolRole.BOTH, Scheme(16)),), None)


def connected(instance_id: int = 1) -> Core:
    core = Core(Options(fallback=False))
    core.opened(hello(instance_id))
    return core


def frame(correlation_id: int, kind: int, builder: flatbuffers.Builder, root: int) -> bytes:
    builder.Finish(root, file_identifier=b"KVRT")
    body = bytes(builder.Output())
    body += bytes(-len(body) % 8)
    return frames._HEADER.pack(len(body), kind, 0, 1, correlation_id) + body


def route_reply(correlation_id: int, slot: int, prefill_slot: int | None = None) -> bytes:
    builder = flatbuffers.Builder(64)
    fb.RouteReplyStartCandidatesVector(builder, 0)
    candidates = builder.EndVector()
    fb.RouteReplyStart(builder)
    fb.RouteReplyAddCandidates(builder, candidates)
    fb.RouteReplyAddBooking(builder, fb.CreateBookingHandle(builder, slot, 1))
    if prefill_slot is not None:
        fb.RouteReplyAddPrefillBooking(builder, fb.CreateBookingHandle(builder, prefill_slot, 1))
    return frame(correlation_id, fb.Kind.RouteReply, builder, fb.RouteReplyEnd(builder))


def free_reply(correlation_id: int) -> bytes:
    builder = flatbuffers.Builder(64)
    fb.FreeReplyStart(builder)
    return frame(correlation_id, fb.Kind.FreeReply, builder, fb.FreeReplyEnd(builder))


def freed(data: bytes) -> list[tuple[int, object]]:
    """Id and booking, by slot or name, of each free in what is to be sent."""
    found = []
    while data:
        header = frames.parse_header(data)
        table = fb.Free.GetRootAs(data[16 : 16 + header.body_bytes])
        assert header.kind == fb.Kind.Free, header
        name = table.RequestId().decode() if table.Booking() is None else table.Booking().Slot()
        found.append((header.correlation_id, name))
        data = data[16 + header.body_bytes :]
    return found


class Replies(unittest.TestCase):
    def test_both_halves_of_a_pair_that_nobody_waits_for_are_freed(self):
        core = connected()
        core.feed(route_reply(9, 5, 6))
        self.assertEqual([name for _, name in freed(core.stray(*core.next_reply()))], [5, 6])

    def test_the_booking_of_an_unreadable_reply_is_freed_by_name(self):
        core = connected()
        core.route(50, RouteRequest(model="m", tokens=[1], book="one"), 1.0)
        core.feed(frames._HEADER.pack(8, fb.Kind.RouteReply, 0, 1, 50) + bytes(8))
        at, reply = core.next_reply()
        self.assertIsInstance(reply, ProtocolError)
        core.claimed(at, reply)
        self.assertEqual([name for _, name in freed(core.ahead(0.0))], ["one"])

    def test_the_booking_of_an_unreadable_reply_that_nobody_waits_for_is_freed_by_name(self):
        core = connected()
        core.route(50, RouteRequest(model="m", tokens=[1], book="one"), 1.0)
        core.feed(frames._HEADER.pack(8, fb.Kind.RouteReply, 0, 1, 50) + bytes(8))
        self.assertEqual([name for _, name in freed(core.stray(*core.next_reply()))], ["one"])

    def test_a_reply_that_is_read_too_late_counts_as_late_and_its_booking_is_freed_by_name(self):
        core = connected()
        core.route(50, RouteRequest(model="m", tokens=[1], book="one"), 1.0)
        core.feed(candidates(50, 1))
        at, reply = core.next_reply(deadline=0.0)
        # So a client decides without the daemon.
        self.assertIsInstance(reply, DeadlineExceeded)
        core.claimed(at, reply)
        self.assertEqual([name for _, name in freed(core.ahead(0.0))], ["one"])

    def test_a_booking_is_reported_to_the_run_that_holds_it(self):
        core = connected(instance_id=1)
        self.assertEqual(core.report(Booking(1, 2, 1), lambda at: b"said", 3), b"said")
        with self.assertRaises(OtherRun):
            core.report(Booking(1, 2, 7), lambda at: b"said", 3)

    def test_replies_are_found_however_their_bytes_come(self):
        core = connected()
        stream = route_reply(5, 1) + free_reply(6) + route_reply(7, 2)
        found = []
        for at in range(len(stream)):
            core.feed(stream[at : at + 1])
            while (reply := core.next_reply()) is not None:
                found.append(reply[0])
        self.assertEqual(found, [5, 6, 7])

    def test_a_broken_body_is_its_own_requests_failure_or_some_other_value(self):
        whole = route_reply(5, 1)
        for at in range(16, len(whole)):
            for wrong in (0x00, 0x01, 0x7F, 0x80, 0xFF):
                core = connected()
                core.feed(whole[:at] + bytes([wrong]) + whole[at + 1 :] + free_reply(6))
                self.assertEqual(core.next_reply()[0], 5)
                self.assertEqual(core.next_reply()[0], 6)


class Bookings(unittest.TestCase):
    def test_a_booking_that_nobody_waits_for_is_freed_until_that_is_answered(self):
        core = connected()
        core.feed(route_reply(5, 77))
        [(asked, slot)] = freed(core.stray(*core.next_reply()))
        self.assertEqual(slot, 77)
        # The connection ends before the answer, twice.
        for _ in range(2):
            core.closed()
            core.opened(hello(1))
            [(asked, slot)] = freed(core.ahead(0.0))
            self.assertEqual(slot, 77)
        core.feed(free_reply(asked))
        self.assertEqual(core.stray(*core.next_reply()), b"")
        core.closed()
        core.opened(hello(1))
        self.assertEqual(core.ahead(0.0), b"")

    def test_a_booking_in_flight_when_the_connection_ends_is_freed_by_name(self):
        core = connected()
        for at, name in enumerate(("one", "two", None)):
            core.route(at + 50, RouteRequest(model="m", tokens=[1], book=name), 1.0)
        core.feed(free_reply(50))
        core.claimed(*core.next_reply())
        core.closed()
        core.opened(hello(1))
        self.assertEqual([name for _, name in freed(core.ahead(0.0))], ["two"])

    def test_another_daemon_run_gets_no_reports_of_the_last_ones_bookings(self):
        core = connected()
        booking = Booking(1, 1, instance_id=1)
        core.owe(booking, lambda at: frames.encode_free(at, booking))
        core.closed()
        core.opened(hello(2))
        self.assertEqual(core.ahead(0.0), b"")
        core.owe(booking, lambda at: frames.encode_free(at, booking))
        self.assertEqual(core.ahead(0.0), b"")


    def test_stored_reports_are_sent_in_portions_and_stay_within_their_limit(self):
        core = connected()
        for slot in range(STORED_MAX + 10):
            booking = Booking(slot, 1, instance_id=1)
            core.owe(booking, partial(frames.encode_free, booking=booking))
        said = freed(core.ahead(0.0))
        self.assertEqual([slot for _, slot in said], list(range(10, 10 + IN_FLIGHT_MAX)))
        # A daemon that hangs is told no more.
        self.assertEqual(core.ahead(0.0), b"")
        core.feed(free_reply(said[0][0]))
        self.assertEqual([slot for _, slot in freed(core.stray(*core.next_reply()))], [10 + IN_FLIGHT_MAX])
        booking = Booking(7, 2, instance_id=1)
        for _ in range(2 * IN_FLIGHT_MAX):
            core.owe(booking, partial(frames.encode_free, booking=booking))
        core.closed()
        core.opened(hello(1))
        # The oldest are forgotten, said or not.
        self.assertEqual(freed(core.ahead(0.0))[0][1], 10 + 2 * IN_FLIGHT_MAX)


    def test_what_a_lost_route_booked_is_freed_before_the_route_is_tried_again(self):
        core = connected()
        core.take_id()
        routes = [RouteRequest(model="m", tokens=[1], book=f"r{at}") for at in range(IN_FLIGHT_MAX + 2)]
        for request in routes:
            core.route(core.take_id(), request, 1.0)
        for _ in range(2):
            core.closed()
            core.opened(hello(1))
            last = core.route(core.take_id(), routes[-1], 1.0)
            ahead = freed(core.ahead(0.0))
            header = frames.parse_header(last)
            self.assertEqual(freed(last[: 16 + header.body_bytes])[0][1], routes[-1].book)
            self.assertNotIn(routes[-1].book, [name for _, name in ahead])
            later = core.feed(free_reply(ahead[0][0])) or freed(core.stray(*core.next_reply()))
            self.assertNotIn(routes[-1].book, [name for _, name in later])


class Queues(unittest.TestCase):
    def deadline_us(self, features: set[str], **fields) -> int:
        core = Core(Options())
        core.opened(replace(hello(1), features=frozenset(features)))
        data = core.route(5, RouteRequest(model="m", tokens=[1], **fields), 2.0)
        return fb.Route.GetRootAs(data[16:]).DeadlineUs()

    def test_a_booking_waits_for_a_worker_within_its_callers_time_where_it_may_wait(self):
        self.assertEqual(self.deadline_us({"queue"}, book="r"), 1_600_000)
        self.assertEqual(self.deadline_us({"queue"}, book="r", deadline_us=7), 7)
        self.assertEqual(self.deadline_us({"queue"}), 0)
        self.assertEqual(self.deadline_us(set(), book="r"), 0)


class Backoff(unittest.TestCase):
    def test_waits_double_up_to_the_longest_and_end_with_an_answer(self):
        core = Core(Options(backoff_s=(1.0, 8.0)))
        now = 100.0
        for wait in (1.0, 2.0, 4.0, 8.0, 8.0):
            # Many requests meet the same silence.
            for _ in range(3):
                core.failed(now)
            with self.assertRaises(Unreachable):
                core.check_backoff(now + wait * 0.7)
            now += wait * 1.3
            core.check_backoff(now)
        # A daemon that takes no connections has not answered.
        core.failed(now)
        core.feed(free_reply(1))
        core.next_reply()
        with self.assertRaises(Unreachable):
            core.check_backoff(now)
        core.opened(hello(1))
        core.check_backoff(now)
        core.failed(now)
        core.feed(free_reply(1))
        core.next_reply()
        core.check_backoff(now)


class TraceContexts(unittest.TestCase):
    def test_a_traceparent_is_read_and_one_that_is_not_valid_is_none(self):
        good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
        expected = TraceContext(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, 1)
        self.assertEqual(TraceContext.parse(good), expected)
        self.assertEqual(TraceContext.parse("cc" + good[2:] + "-more"), expected)
        no_trace, no_span = good.replace(good[3:35], "0" * 32), good.replace(good[36:52], "0" * 16)
        for wrong in ("", "00", good.upper(), good + "-", good[:-1], "ff" + good[2:], no_trace, no_span, good + "\n"):
            self.assertIsNone(TraceContext.parse(wrong), wrong)
