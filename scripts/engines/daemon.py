"""A kvrouted daemon in a process of its own, asked through its command line."""

import json
import os
import signal
import socket
import subprocess
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PATIENCE_S = 60


class Unusable(Exception):
    """There is no binary, or it does not do what it is asked; the text says why."""


def binary():
    """KVROUTED_BIN, else what cargo built last for release, else for development."""
    named = os.environ.get("KVROUTED_BIN")
    built = [os.path.join(ROOT, "target", profile, "kvrouted") for profile in ("release", "debug")]
    for path in [named] if named else built:
        if os.access(path, os.X_OK):
            return path
    raise Unusable(f"{named or built[0]} is not there: cargo build --release, or set KVROUTED_BIN")


class Daemon:
    """`workers`: one --worker value each. `snapshot_every_s`: None = it keeps no snapshots."""

    def __init__(self, folder, workers, block_size, salts="possible", snapshot_every_s=None, full_reports="possible"):
        self.path, self.folder = binary(), folder
        self.socket = os.path.join(folder, "kvrouted.sock")
        self.command = [self.path, "serve", "--socket", self.socket, "--model", "m", "--block-size", str(block_size),
                        "--salts", salts, "--full-reports", full_reports, "--log-level", "warn"]
        for worker in workers:
            self.command += ["--worker", worker]
        if snapshot_every_s is not None:
            self.command = [self.path, "serve", "--config", self.configure(workers, block_size, salts, snapshot_every_s)]
        self.process = None

    def configure(self, workers, block_size, salts, snapshot_every_s):
        """The same as a file, and what only a file can say."""
        lines = ["[serve]", f'socket = "{self.socket}"', "[log]", 'level = "warn"', "[snapshot]",
                 f'dir = "{self.folder}/snapshots"', f"every_s = {snapshot_every_s}",
                 "[[space]]", 'model = "m"', f"block_size = {block_size}", f'salts = "{salts}"']
        for worker in workers:
            fields = dict(field.split("=", 1) for field in worker.split(","))
            lines.append("[[worker]]")
            lines += [f"{name} = {value}" if value.isdigit() else f'{name} = "{value}"' for name, value in fields.items()]
        path = os.path.join(self.folder, "kvrouted.toml")
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
        return path

    def start(self):
        with open(os.path.join(self.folder, "kvrouted.log"), "ab") as log:
            self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + PATIENCE_S
        while not self.listens():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise Unusable(f"kvrouted serve does not listen (exit {self.process.poll()}):\n{self.log()}")
            time.sleep(0.02)

    def listens(self):
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(self.socket) == 0

    def stop(self, number=signal.SIGTERM):
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(PATIENCE_S)

    def log(self):
        with open(os.path.join(self.folder, "kvrouted.log"), encoding="utf-8", errors="replace") as file:
            return "".join(file.readlines()[-20:])

    def ask(self, *command):
        """What a command prints, a value a line."""
        done = subprocess.run([self.path, *command, "--socket", self.socket, "--json"], stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=PATIENCE_S)
        if done.returncode != 0:
            raise Unusable(f"kvrouted {command[0]} ended with {done.returncode}: {done.stderr}{self.log()}")
        return [json.loads(line) for line in done.stdout.splitlines()]

    def status(self):
        """The status of each worker, by id and rank."""
        return {(one["worker_id"], one["dp_rank"]): one for one in self.ask("status")[0]["workers"]}

    def query(self, prompts):
        """For each prompt of a file, the candidates by worker id and rank."""
        answers = self.ask("query", "--model", "m", "--batch", prompts)
        return [{(one["worker_id"], one["dp_rank"]): one for one in answer["candidates"]} for answer in answers]
