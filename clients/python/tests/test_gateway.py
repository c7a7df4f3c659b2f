"""The example gateway as a process, between callers over HTTP, a daemon, and simulated engines that publish events."""

import http.client
import json
import subprocess
import sys
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvrouted import Client, Options, Prompt, RouteRequest

from .daemon import BINARY, PATIENCE_S, ROOT, Daemon, until

CLIENT = ROOT / "clients/python"


def worker(at: int, endpoint: str) -> str:
    return f'[[worker]]\nid = {at}\nendpoint = "{endpoint}"\n'


def prompt(seed: int) -> list[int]:
    return [seed * 1000 + at for at in range(320)]


class Gateway(unittest.TestCase):
    def setUp(self):
        self.daemon = Daemon('[[space]]\nmodel = "demo"\nblock_size = 16\n')
        self.addCleanup(self.daemon.remove)
        self.daemon.kill()
        links = {at: self.daemon.folder / f"engine-{at}" for at in (1, 2)}
        self.engines = {at: self.start_engine(link) for at, link in links.items()}
        endpoints = {at: engine.stdout.readline().strip() for at, engine in self.engines.items()}
        with open(self.daemon.folder / "config.toml", "a") as config:
            config.writelines(worker(at, endpoint) for at, endpoint in endpoints.items())
        self.daemon.start()
        named = [part for at, link in links.items() for part in ("--engine", f"{at}={link}")]
        gateway = [CLIENT / "examples/gateway.py", "--socket", self.daemon.socket, "--listen", "127.0.0.1:0", *named]
        self.gateway = self.start([sys.executable, "-B", *map(str, gateway)], env={"PYTHONPATH": str(CLIENT)})
        self.address = self.gateway.stdout.readline().split()[-1]

    def start(self, command: list[str], **more) -> subprocess.Popen:
        started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **more)
        self.addCleanup(started.stdout.close)
        self.addCleanup(started.stdin.close)
        self.addCleanup(started.wait)
        self.addCleanup(started.kill)
        return started

    def start_engine(self, link: Path) -> subprocess.Popen:
        log = link.with_suffix(".log")
        arguments = ["--link", str(link), "--log", str(log), "--capacity-blocks", "4096"]
        return self.start([str(BINARY), "demo-engine", *arguments])

    def post(self, body: object, path: str = "/v1/completions") -> tuple[int, list]:
        connection = http.client.HTTPConnection(self.address, timeout=PATIENCE_S)
        try:
            connection.request("POST", path, json.dumps(body))
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        if response.status != 200:
            return response.status, [json.loads(text)]
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        self.assertEqual(lines[-1], "[DONE]")
        return 200, [json.loads(line) for line in lines[:-1]]

    def complete(self, seed: int) -> tuple[int, str, int]:
        """The worker, who chose it, and the blocks of the prompt that it had."""
        status, chunks = self.post({"prompt": prompt(seed), "max_tokens": 40})
        self.assertEqual((status, len(chunks)), (200, 2), chunks)
        first, last = chunks
        self.assertEqual(len(first["tokens"] + last["tokens"]), 40)
        return first["worker"], first["decided_by"], first["cached_blocks"]

    def held(self, seed: int, at: int) -> int:
        """Blocks of a prompt that the daemon knows a worker to have."""
        with Client(self.daemon.socket, Options(timeout_s=PATIENCE_S)) as client:
            reply = client.overlap(Prompt(model="demo", tokens=prompt(seed)))
            return sum(entry.overlap.device for entry in reply.workers if entry.worker.worker_id == at)

    def booked(self) -> float:
        with Client(self.daemon.socket, Options(timeout_s=PATIENCE_S)) as client:
            reply = client.route(RouteRequest(model="demo", tokens=[1], explain=True))
            return sum(candidate.terms.active_requests for candidate in reply.candidates)

    def test_it_routes_books_and_frees_and_goes_on_without_the_daemon_or_an_engine(self):
        # Through the daemon: whoever computed a prompt gets it again.
        with ThreadPoolExecutor(8) as callers:
            firsts = list(callers.map(self.complete, range(8)))
            self.assertEqual({decided for _, decided, _ in firsts}, {"daemon"})
        self.assertLessEqual({at for at, _, _ in firsts}, {1, 2})
        for seed, (at, _, _) in enumerate(firsts):
            until("its blocks are known", lambda seed=seed, at=at: self.held(seed, at) == 20)
            until("every booking is freed", lambda: self.booked() == 0)
            self.assertEqual(self.complete(seed), (at, "daemon", 20))
        until("every booking is freed", lambda: self.booked() == 0)
        # A caller that hangs up leaves no booking behind.
        connection = http.client.HTTPConnection(self.address, timeout=PATIENCE_S)
        connection.request("POST", "/v1/completions", json.dumps({"prompt": [1] * 64, "max_tokens": 4000}))
        connection.getresponse().read(1)
        connection.close()
        until("its booking is freed", lambda: self.booked() == 0)
        # What means nothing.
        for body, path in (({}, "/v1/completions"), ([], "/v1/completions"), ({"prompt": [-1]}, "/v1/completions")):
            self.assertEqual(self.post(body, path)[0], 400)
        self.assertEqual(self.post({}, "/other")[0], 400)
        # Without the engine that has it, another one runs it.
        lost, left = firsts[0][0], 3 - firsts[0][0]
        self.engines[lost].kill()
        self.engines[lost].wait()
        until("the other one takes over", lambda: self.complete(0)[0] == left)
        until("every booking is freed", lambda: self.booked() == 0)
        # Without the daemon, the gateway decides alone.
        self.daemon.kill()
        self.assertEqual({self.complete(seed)[:2] for seed in range(8)}, {(left, "fallback")})
