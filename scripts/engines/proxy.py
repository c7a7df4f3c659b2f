"""A relay between an engine's sockets and the daemon that loses, repeats and holds back whole messages.

It knows as much of ZMTP (https://rfc.zeromq.org/spec/23) as tells where a message ends: a greeting of 64
bytes, then frames of flags, length and body. Commands pass. What the daemon sends passes as it is.
"""

import asyncio
import random
import threading
from dataclasses import dataclass

GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4


@dataclass
class Weather:
    """Shares of the messages that are lost or repeated, and how long each is held back at most."""

    lost: float = 0
    repeated: float = 0
    delay_s_max: float = 0
    is_closed: bool = False


async def message(reader):
    """One whole message, or a command, as its bytes, and whether it is a command."""
    parts = []
    while True:
        flags = (await reader.readexactly(1))[0]
        length = await reader.readexactly(8 if flags & LONG else 1)
        parts += [bytes([flags]), length, await reader.readexactly(int.from_bytes(length, "big"))]
        if not flags & MORE:
            return b"".join(parts), bool(flags & COMMAND)


class Proxy:
    """One port in front of another. All of them run in one thread, started by `run_all`."""

    def __init__(self, port, upstream, seed):
        self.port, self.upstream, self.draws = port, upstream, random.Random(seed)
        self.weather, self.open = Weather(), set()
        self.lost = self.repeated = self.cuts = 0
        self.loop = None

    async def serve(self):
        await asyncio.start_server(self.join, "127.0.0.1", self.port)

    async def join(self, reader, writer):
        try:
            if self.weather.is_closed:
                raise ConnectionError
            above, below = await asyncio.open_connection("127.0.0.1", self.upstream)
        except OSError:
            writer.transport.abort()
            return
        ends = (writer, below)
        self.open.add(ends)
        pumps = [asyncio.ensure_future(pump) for pump in (self.up(reader, below), self.down(above, writer))]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for one in pumps:
            one.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for one in ends:
            one.transport.abort()
        self.open.discard(ends)

    async def up(self, reader, writer):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()

    async def down(self, reader, writer):
        greeting = GREETING_BYTES
        while greeting:  # each side waits for the beginning of the other's before it says the rest
            data = await reader.read(greeting)
            if not data:
                return
            greeting -= len(data)
            writer.write(data)
        while True:
            data, is_command = await message(reader)
            times = 1 if is_command else self.fate()
            if not is_command and self.weather.delay_s_max:
                await asyncio.sleep(self.draws.uniform(0, self.weather.delay_s_max))
            writer.write(data * times)
            await writer.drain()

    def fate(self):
        """How often the next message is passed on."""
        drawn = self.draws.random()
        if drawn < self.weather.lost:
            self.lost += 1
            return 0
        if drawn < self.weather.lost + self.weather.repeated:
            self.repeated += 1
            return 2
        return 1

    def cut(self):
        """Breaks every connection, in the middle of a message or not."""
        self.loop.call_soon_threadsafe(self._cut)

    def _cut(self):
        for ends in self.open:
            self.cuts += 1
            for one in ends:
                one.transport.abort()


def run_all(proxies):
    """Starts them in a thread of their own and returns when every port listens."""
    ready = threading.Event()

    async def serve():
        for one in proxies:
            one.loop = asyncio.get_running_loop()
            await one.serve()
        ready.set()
        await asyncio.Event().wait()

    threading.Thread(target=asyncio.run, args=(serve(),), daemon=True).start()
    if not ready.wait(10):
        raise OSError("the proxies' ports are taken")
