"""The example gateway as a process, between callers over HTTP, a daemon, and engines that answer as vLLM streams."""

import http.client
import json
import subprocess
import sys
import threading
import unittest
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kvrouted import Client, Options, RouteRequest

from .daemon import PATIENCE_S, PREDICTED, ROOT, Daemon, until

CLIENT = ROOT / "clients/python"
EVENTS = [b'data: {"choices": [{"text": "%d"}]}\n\n' % at for at in range(4)] + [b"data: [DONE]\n\n"]


class Engine(ThreadingHTTPServer):
    """Sends EVENTS, and the last one only once it is allowed to."""

    def __init__(self, worker_id: int) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.worker_id = worker_id
        self.may_end = threading.Event()
        self.may_end.set()
        self.bodies: list[bytes] = []
        self.broken_off = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def end(self) -> None:
        self.shutdown()
        self.server_close()


class Answer(BaseHTTPRequestHandler):
    server: Engine

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("x-engine", str(self.server.worker_id))
        self.end_headers()
        for event in EVENTS[:-1]:
            self.wfile.write(event)
        if not self.server.may_end.is_set():
            self.connection.settimeout(PATIENCE_S)
            if not self.connection.recv(1):  # the gateway closes it when its caller hangs up
                self.server.broken_off += 1
                return
        self.wfile.write(EVENTS[-1])

    def log_message(self, *_: object) -> None:
        pass


def prompt(seed: int) -> list[int]:
    return [seed * 1000 + at for at in range(320)]


class Gateway(unittest.TestCase):
    def setUp(self):
        self.daemon = Daemon(PREDICTED)
        self.addCleanup(self.daemon.remove)
        self.engines = {at: Engine(at) for at in (1, 2)}
        for engine in self.engines.values():
            self.addCleanup(engine.end)
        named = [f"{at}=127.0.0.1:{engine.server_address[1]}" for at, engine in self.engines.items()]
        command = [sys.executable, "-B", str(CLIENT / "examples/gateway.py"), self.daemon.socket, "m", "127.0.0.1:0"]
        self.gateway = subprocess.Popen(
            [*command, *named], stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(CLIENT)}
        )
        self.addCleanup(self.gateway.stdout.close)
        self.addCleanup(self.gateway.wait)
        self.addCleanup(self.gateway.kill)
        self.address = self.gateway.stdout.readline().split()[-1]

    def post(self, body: object) -> tuple[int, int, bytes]:
        """Status, engine and body of the answer."""
        connection = http.client.HTTPConnection(self.address, timeout=PATIENCE_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body))
            response = connection.getresponse()
            return response.status, int(response.headers.get("x-engine", 0)), response.read()
        finally:
            connection.close()

    def complete(self, seed: int) -> tuple[int, str]:
        """The engine, and who chose it. One at a time, because the gateway's output has no names."""
        status, engine, body = self.post({"model": "m", "prompt": prompt(seed), "stream": True})
        self.assertEqual((status, body), (200, b"".join(EVENTS)))
        return engine, self.gateway.stdout.readline().split()[-1]

    def booked(self) -> float:
        with Client(self.daemon.socket, Options(timeout_s=PATIENCE_S)) as client:
            reply = client.route(RouteRequest(model="m", tokens=[1], explain=True))
            return sum(candidate.terms.active_requests for candidate in reply.candidates)

    def test_it_routes_books_and_frees_and_goes_on_without_the_daemon_or_an_engine(self):
        # By the daemon: the worker that computed a prompt gets it again, and the body is the caller's.
        firsts = [self.complete(seed) for seed in range(4)]
        self.assertEqual({decided_by for _, decided_by in firsts}, {"daemon"})
        until("every booking is freed", lambda: self.booked() == 0)
        self.assertEqual([self.complete(seed) for seed in range(4)], firsts)
        sent = {json.dumps({"model": "m", "prompt": prompt(seed), "stream": True}).encode() for seed in range(4)}
        self.assertEqual({body for engine in self.engines.values() for body in engine.bodies}, sent)
        # Many at a time.
        with ThreadPoolExecutor(8) as callers:
            bodies = [{"prompt": prompt(seed)} for seed in range(8)]
            self.assertEqual({status for status, _, _ in callers.map(self.post, bodies)}, {200})
        for _ in bodies:
            self.gateway.stdout.readline()
        until("every booking is freed", lambda: self.booked() == 0)
        # A caller that hangs up leaves no booking behind, and ends the request at the engine.
        for engine in self.engines.values():
            engine.may_end.clear()
        connection = http.client.HTTPConnection(self.address, timeout=PATIENCE_S)
        connection.request("POST", "/v1/completions", json.dumps({"prompt": prompt(9)}))
        response = connection.getresponse()
        response.read(1)
        self.assertEqual(self.booked(), 1)
        self.gateway.stdout.readline()
        response.close()
        connection.close()
        until("its booking is freed", lambda: self.booked() == 0)
        until("the engine's connection is closed", lambda: sum(at.broken_off for at in self.engines.values()) == 1)
        for engine in self.engines.values():
            engine.may_end.set()
        # Bad input.
        for body in ({}, [], 7, {"prompt": [-1]}, {"prompt": 7}, {"prompt": "text"}):
            self.assertEqual(self.post(body)[0], 400, body)
        # Without the engine that has it, another one runs it.
        lost, left = firsts[0][0], 3 - firsts[0][0]
        self.engines[lost].end()
        self.assertEqual({self.complete(0)[0] for _ in range(3)}, {left})
        until("every booking is freed", lambda: self.booked() == 0)
        # Without the daemon, the client decides.
        self.daemon.kill()
        self.assertEqual({self.complete(seed) for seed in range(4)}, {(left, "fallback")})
