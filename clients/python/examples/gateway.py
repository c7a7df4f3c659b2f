#!/usr/bin/env python3
"""A gateway for streamed completions in front of kvrouted's simulated engines.

    python examples/gateway.py --socket /tmp/kvrouted.sock --model demo --engine 1=/tmp/engine-1.sock --engine 2=...
    curl -N -d '{"prompt": [1, 2, 3], "max_tokens": 64}' http://127.0.0.1:8080/v1/completions

What a gateway does about kvrouted is in `complete`: route and book, send the prompt, say when its first token came,
free however it ends. `Engine` stands in for an inference server's streaming API: a simulated engine takes the tokens
that it is to generate along with the prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import struct
import sys
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from kvrouted import AsyncClient, KvroutedError, Options, RemoteError, RouteReply, RouteRequest, Unreachable, Worker

HEAD_BYTES_MAX = 16 << 10
BODY_BYTES_MAX = 16 << 20
#: What one connection may take to say what it wants.
REQUEST_TIMEOUT_S = 30.0


class EngineGone(Exception):
    """The engine cannot be reached."""


class Prefilled(NamedTuple):
    """The prompt is computed: the first token is there."""

    cached_blocks: int


class Done(NamedTuple):
    """The output is complete."""


class Engine:
    """A simulated engine: requests go out, and what becomes of each comes back, over one Unix socket."""

    def __init__(self, worker_id: int, path: str) -> None:
        self.worker_id = worker_id
        self.path = path
        self._ids = itertools.count()
        self._running: dict[int, asyncio.Queue[Prefilled | Done | EngineGone]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()

    async def connect(self) -> None:
        try:
            reader, self._writer = await asyncio.open_unix_connection(self.path)
        except OSError as error:
            raise OSError(f"no engine at {self.path}: {error}") from error
        self._reading = asyncio.create_task(self._read(reader))
        await self._ready.wait()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                body_bytes, kind = struct.unpack("<IB", await reader.readexactly(5))
                body = await reader.readexactly(body_bytes)
                if kind == 129:
                    self._ready.set()
                elif kind == 130:
                    request, cached_blocks = struct.unpack("<II", body)
                    self._running[request].put_nowait(Prefilled(cached_blocks))
                elif kind == 131:
                    # Also for a request whose caller has left: the engine cannot cancel it.
                    self._running.pop(struct.unpack("<I", body)[0]).put_nowait(Done())
        except (OSError, asyncio.IncompleteReadError):
            self._writer = None
            for events in self._running.values():
                events.put_nowait(EngineGone(self.path))
            self._running.clear()

    async def run(self, prompt: list[int], output: list[int]) -> AsyncIterator[Prefilled | Done]:
        """Sends a prompt; raises EngineGone at once or later."""
        if self._writer is None:
            raise EngineGone(self.path)
        request = next(self._ids)
        events = self._running[request] = asyncio.Queue()
        tokens = struct.pack(f"<II{len(prompt) + len(output)}I", request, len(prompt), *prompt, *output)
        self._writer.write(struct.pack("<IB", len(tokens), 1) + tokens)
        while True:
            event = await events.get()
            if isinstance(event, EngineGone):
                raise event
            yield event
            if isinstance(event, Done):
                return


class Gateway:
    def __init__(self, client: AsyncClient, model: str, engines: dict[int, Engine]) -> None:
        self.client = client
        self.model = model
        self.engines = engines

    async def complete(self, prompt: list[int], output: list[int]) -> AsyncIterator[dict[str, Any]]:
        """Runs a prompt where kvrouted says and yields what is to be streamed."""
        # A conversation's prompts grow: the worker that has the beginning gets the next one, also without the daemon.
        key = str(prompt[:64])
        request = RouteRequest(
            model=self.model,
            tokens=prompt,
            book=str(uuid.uuid4()),
            expected_output_tokens=len(output),
            fallback_key=key,
        )
        reply = await self.client.route(request)
        try:
            async for chunk in self._run(reply, prompt, output):
                yield chunk
        finally:
            # Also when the caller has hung up, and this task is cancelled for it.
            await asyncio.shield(self.client.free(reply.booking))

    async def _run(self, reply: RouteReply, prompt: list[int], output: list[int]) -> AsyncIterator[dict[str, Any]]:
        for candidate in reply.candidates:
            engine = self.engines.get(candidate.worker.worker_id)
            began, first_token = time.monotonic(), False
            if engine is None:
                continue
            try:
                async for event in engine.run(prompt, output):
                    if isinstance(event, Prefilled):
                        first_token = True
                        prefill_us = int((time.monotonic() - began) * 1e6)
                        await self._prefilled(reply, candidate.worker, prefill_us)
                        yield {
                            "worker": candidate.worker.worker_id,
                            "decided_by": reply.decided_by.value,
                            "cached_blocks": event.cached_blocks,
                            "tokens": output[:1],
                        }
                    else:
                        yield {"tokens": output[1:], "finish_reason": "length"}
                return
            except EngineGone as gone:
                await self._failed(candidate.worker, gone)
                if first_token:
                    # Half an answer cannot be taken back.
                    yield {"error": f"worker {candidate.worker.worker_id} was lost"}
                    return
        yield {"error": f"no worker can run it ({reply.nobody or 'none of them answers'})"}

    async def _failed(self, worker: Worker, why: EngineGone) -> None:
        try:
            await self.client.report_failure(self.model, worker, f"cannot be reached: {why}")
        except KvroutedError:
            pass  # without the daemon no other gateway can be warned

    async def _prefilled(self, reply: RouteReply, worker: Worker, prefill_us: int) -> None:
        if reply.best is not None and worker != reply.best.worker:
            # The first could not be reached: the load is this one's.
            await self.client.served(reply.booking, worker)
        await self.client.prefill_complete(reply.booking, prefill_us)

    # ---- as much HTTP as an example needs -----------------------------------------------------------

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked = await asyncio.wait_for(read_request(reader), REQUEST_TIMEOUT_S)
            await self._answer(asked, writer)
        except (ValueError, KeyError, TypeError, KvroutedError) as error:
            await respond(writer, "400 Bad Request", {"error": str(error)})
        except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError, asyncio.LimitOverrunError):
            pass  # the caller has hung up, or sent no whole request
        finally:
            writer.close()

    async def _answer(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        prompt = asked["prompt"]
        tokens = list(prompt.encode()) if isinstance(prompt, str) else [int(token) for token in prompt]
        output = [index % 50_000 for index in range(max(1, int(asked.get("max_tokens", 16))))]
        chunks = self.complete(tokens, output)
        try:
            first = await anext(chunks)
        except Unreachable as error:
            return await respond(writer, "503 Service Unavailable", {"error": str(error)})
        except RemoteError as error:
            status = "503 Service Unavailable" if error.retryable else "400 Bad Request"
            return await respond(writer, status, {"error": str(error), "kind": error.kind})
        if "error" in first:
            await chunks.aclose()
            return await respond(writer, "503 Service Unavailable", first)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        try:
            writer.write(b"data: " + json.dumps(first).encode() + b"\n\n")
            async for chunk in chunks:
                await writer.drain()
                writer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            writer.write(b"data: [DONE]\n\n")
            await writer.drain()
        finally:
            # Frees the booking now, not when the generator is collected.
            await chunks.aclose()


async def read_request(reader: asyncio.StreamReader) -> dict[str, Any]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
    if not head[0].startswith("POST /v1/completions "):
        raise ValueError("POST /v1/completions is all there is")
    body_bytes = int(headers.get("content-length", 0))
    if body_bytes > BODY_BYTES_MAX:
        raise ValueError("the body is too large")
    asked = json.loads(await reader.readexactly(body_bytes))
    if not isinstance(asked, dict):
        raise ValueError("the body is no JSON object")
    return asked


async def respond(writer: asyncio.StreamWriter, status: str, body: dict[str, Any]) -> None:
    text = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\nconnection: close"
    writer.write(head.encode() + b"\r\n\r\n" + text)
    await writer.drain()


async def main() -> None:
    parser = argparse.ArgumentParser(description="A gateway in front of kvrouted's simulated engines.")
    parser.add_argument("--socket", required=True, help="the daemon's")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--engine", action="append", required=True, metavar="ID=PATH", help="of a demo-engine's --link")
    parser.add_argument("--listen", default="127.0.0.1:8080", metavar="HOST:PORT")
    arguments = parser.parse_args()
    engines = {}
    for named in arguments.engine:
        worker_id, path = named.split("=", 1)
        engines[int(worker_id)] = Engine(int(worker_id), path)
    await asyncio.gather(*(engine.connect() for engine in engines.values()))
    host, port = arguments.listen.rsplit(":", 1)
    async with AsyncClient(arguments.socket, Options(name="example-gateway", timeout_s=1.0)) as client:
        # Learns the workers too, so that the gateway can go on without the daemon from the first request on.
        await client.connect()
        gateway = Gateway(client, arguments.model, engines)
        server = await asyncio.start_server(gateway.serve, host, int(port), limit=HEAD_BYTES_MAX)
        print("listening on {}:{}".format(*server.sockets[0].getsockname()[:2]), flush=True)
        async with server:
            await server.serve_forever()


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        pass
    except (OSError, KvroutedError) as error:
        sys.exit(f"gateway: {error}")
