"""The engines, proxies and the daemon of scripts/chaos, and what can be done to them."""

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass

import daemon as daemons
import proxy
from chaos_engine import BLOCK_SIZE
from loader import cache
from history import History
from ports import free_ports

HERE = os.path.dirname(os.path.abspath(__file__))
RATE = 40
SAYS_S_MAX = 60


@dataclass
class Kind:
    """An engine of the fleet: whose publisher, and how many batches it can replay; 0 = none."""

    engine: str
    buffer_steps: int


KINDS = [Kind("vllm", 100_000), Kind("sglang", 100_000), Kind("vllm", 100_000), Kind("sglang", 60), Kind("vllm", 0)]


class Engine:
    """One engine, in its present life, behind its two proxies."""

    def __init__(self, worker, kind, seed, folder, ports):
        self.worker, self.kind, self.seed = worker, kind, seed
        self.ports, self.log = ports[:2], os.path.join(folder, f"engine-{worker}.log")
        has_replay = kind.buffer_steps > 0
        self.proxies = [proxy.Proxy(ports[2], ports[0], f"{seed}/{worker}/events")]
        if has_replay:
            self.proxies.append(proxy.Proxy(ports[3], ports[1], f"{seed}/{worker}/replay"))
        replay = f",replay=tcp://127.0.0.1:{ports[3]}" if has_replay else ""
        self.record = f"id={worker},endpoint=tcp://127.0.0.1:{ports[2]}{replay}"
        self.histories, self.process, self.born = [], None, 0.0
        self.seqs_max = []  # of the lives that have ended

    def start(self):
        """A life of its own: an empty cache, and sequence 0."""
        life = len(self.histories)
        ports = self.ports if self.kind.buffer_steps else (self.ports[0], 0)
        told = {"engine": self.kind.engine, "seed": self.seed, "worker": self.worker, "life": life,
                "buffer_steps": self.kind.buffer_steps or 1, "ports": ports, "rate": RATE}
        command = [os.path.join(cache(), "venv/bin/python"), os.path.join(HERE, "chaos_engine.py"), json.dumps(told)]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        self.histories.append(History(self.kind.engine, self.seed, self.worker, life))
        self.born = time.monotonic()

    def is_up(self):
        return self.process is not None

    def kill(self):
        if self.process is not None:
            self.seqs_max.append(self.seq_max())
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()
            self.process.stdout.close()
            self.process = None

    def seq_max(self):
        """No batch of the present life has a higher sequence yet."""
        return int((time.monotonic() - self.born) * RATE) + RATE

    def lives(self):
        """Every life, with a sequence that none of its batches exceeds."""
        present = [self.seq_max()] if self.is_up() else []
        return zip(self.histories, self.seqs_max + present)

    def pause(self):
        self.process.send_signal(signal.SIGSTOP)

    def resume(self):
        self.process.send_signal(signal.SIGCONT)

    def ask_quiet(self, batches):
        """Publishes so many more and then nothing."""
        self.process.stdin.write(f"quiet {batches}\n")
        self.process.stdin.flush()

    def state(self):
        """What it holds now that it is quiet."""
        line = self.process.stdout.readline()
        if not line:
            with open(self.log, encoding="utf-8", errors="replace") as file:
                raise daemons.Unusable(f"engine {self.worker} has ended:\n{file.read()[-2000:]}")
        return json.loads(line)


class Fleet:
    """Everything that runs."""

    def __init__(self, folder, seed, snapshot_every_s):
        self.folder = folder
        ports = free_ports(4 * len(KINDS))
        self.engines = [Engine(at + 1, kind, seed, folder, ports[4 * at:4 * at + 4]) for at, kind in enumerate(KINDS)]
        self.proxies = [one for engine in self.engines for one in engine.proxies]
        records = [engine.record for engine in self.engines]
        self.daemon = daemons.Daemon(folder, records, BLOCK_SIZE, snapshot_every_s=snapshot_every_s)

    def start(self):
        proxy.run_all(self.proxies)
        for engine in self.engines:
            engine.start()
        self.daemon.start()

    def stop(self):
        for engine in self.engines:
            if engine.is_up():
                engine.resume()
            engine.kill()
        self.daemon.stop(signal.SIGKILL)

    def calm(self):
        """Ends every trouble: all run, and every message arrives."""
        for one in self.proxies:
            one.weather = proxy.Weather()
        for engine in self.engines:
            if engine.is_up():
                engine.resume()
            else:
                engine.start()
        if not self.daemon.listens():
            self.daemon.stop(signal.SIGKILL)
            self.daemon.start()
