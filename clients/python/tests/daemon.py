"""A real daemon for the tests: the binary that KVROUTED_BIN names, or this checkout's debug build."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BINARY = Path(os.environ.get("KVROUTED_BIN", ROOT / "target/debug/kvrouted"))
#: Far beyond what anything here takes: reached only by a failure.
PATIENCE_S = 60.0

#: A space of 16 tokens a block with two workers, whose caches are guessed from what was booked on them.
PREDICTED = """
[[space]]
model = "m"
block_size = 16
approximate = true

[[worker]]
id = 1
name = "one"
taints = ["fast"]

[[worker]]
id = 2
"""


def until(what: str, holds: Callable[[], bool]) -> None:
    """Waits until something holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.005)


class Daemon:
    """A process of its own in a folder of its own. Starts again where it was."""

    def __init__(self, tables: str = PREDICTED) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvrouted-"))
        self.socket = str(self.folder / "s")
        (self.folder / "config.toml").write_text(f'[serve]\nsocket = "{self.socket}"\n{tables}')
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "RUST_LOG"}
        with open(self.folder / "log", "ab") as log:
            arguments = [str(BINARY), "serve", "--config", str(self.folder / "config.toml")]
            self.process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        until("the daemon serves", self._serves)

    def _serves(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, "the daemon ended:\n" + (self.folder / "log").read_text()
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(self.socket) == 0

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Stopped, so that nothing is answered; goes on afterwards."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self.process.pid}/task")
        stopped = re.compile(r"\) T ")
        # A thread that runs stops a moment after the signal was sent.
        until("it stops", lambda: all(stopped.search((task / "stat").read_text()) for task in threads.iterdir()))
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def administer(self, *command: str) -> None:
        subprocess.run([str(BINARY), *command, "--socket", self.socket], check=True, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.folder)
