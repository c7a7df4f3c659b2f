#!/usr/bin/env python3
"""The client in a gateway: an HTTP proxy for completions whose prompts are token ids. For traffic: kvrouted-gateway.

    python examples/gateway.py /tmp/kvrouted.sock MODEL 127.0.0.1:8080 1=10.0.0.8:8000 2=10.0.0.9:8000
    curl -N -d '{"model": "MODEL", "prompt": [1, 2, 3], "stream": true}' http://127.0.0.1:8080/v1/completions
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from contextlib import suppress

from kvrouted import AsyncClient, KvroutedError, Options, RouteReply, RouteRequest

BODY_BYTES_MAX = 16 << 20
LINE_BYTES_MAX = 1 << 20


class Gateway:
    def __init__(self, client: AsyncClient, model: str, engines: dict[int, str]) -> None:
        self.client = client
        self.model = model
        #: Addresses of the engines, by the ids of their workers.
        self.engines = engines

    async def serve(self, caller: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        try:
            body, tokens = await read_request(caller)
            # While the daemon does not answer, the client chooses among the workers that it knows.
            request = RouteRequest(model=self.model, tokens=tokens, book=uuid.uuid4().hex)
            reply = await self.client.route(request)
            running = asyncio.create_task(self.run(reply, body, to))
            hung_up = asyncio.create_task(caller.read())
            try:
                await asyncio.wait((running, hung_up), return_when=asyncio.FIRST_COMPLETED)
            finally:
                # Closes the connection to the engine, which cancels the request there.
                running.cancel()
                hung_up.cancel()
                ended, _ = await asyncio.gather(running, hung_up, return_exceptions=True)
                # However the request ended. The client repeats a report that the daemon did not get.
                await self.client.free(reply.booking)
            if isinstance(ended, Exception):
                raise ended
        except (ValueError, LookupError, TypeError) as error:
            refuse(to, "400 Bad Request", str(error))
        except KvroutedError as error:
            refuse(to, "503 Service Unavailable", str(error))
        except (OSError, EOFError):
            pass  # the caller has left, or the engine broke off: the reply ends here
        finally:
            to.close()

    async def run(self, reply: RouteReply, body: bytes, to: asyncio.StreamWriter) -> None:
        """Runs a prompt on the first candidate that begins to answer."""
        for worker in (candidate.worker for candidate in reply.candidates):
            started, events = time.monotonic(), 0
            try:
                line, engine, to_engine = await ask(self.engines[worker.worker_id], body)
            except (OSError, EOFError) as error:
                # The daemon avoids this worker for a while, for all its gateways.
                with suppress(KvroutedError):
                    await self.client.report_failure(self.model, worker, str(error))
                continue
            print(f"worker {worker.worker_id}, chosen by the {reply.decided_by.value}", flush=True)
            try:
                if reply.best and worker != reply.best.worker:
                    # Another worker than the first one: the load is its.
                    await self.client.served(reply.booking, worker)
                while line:
                    to.write(line)
                    await to.drain()
                    # A streaming engine sends an event for each token, more or less.
                    events += (is_event := line.startswith(b"data: "))
                    if is_event and events == 1:
                        await self.client.prefill_complete(reply.booking, int((time.monotonic() - started) * 1e6))
                    elif is_event and events % 64 == 0:
                        await self.client.output_progress(reply.booking, events)
                    line = await engine.readline()
                return
            finally:
                to_engine.close()
        refuse(to, "503 Service Unavailable", reply.nobody or "no engine answers")


async def read_request(caller: asyncio.StreamReader) -> tuple[bytes, list[int]]:
    head = (await caller.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    lengths = [line.split(":")[1] for line in head.split("\r\n") if line.startswith("content-length:")]
    body = await caller.readexactly(min(int(lengths[0]), BODY_BYTES_MAX))
    return body, [int(token) for token in json.loads(body)["prompt"]]


async def ask(address: str, body: bytes) -> tuple[bytes, asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a body to an engine and waits for the first line of the reply."""
    host, port = address.rsplit(":", 1)
    engine, to_engine = await asyncio.open_connection(host, int(port), limit=LINE_BYTES_MAX)
    head = "POST /v1/completions HTTP/1.1\r\nconnection: close\r\ncontent-type: application/json\r\n"
    to_engine.write(f"{head}host: {address}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    if line := await engine.readline():
        return line, engine, to_engine
    to_engine.close()
    raise EOFError("the engine closed the connection")


def refuse(to: asyncio.StreamWriter, status: str, message: str) -> None:
    to.write(f"HTTP/1.1 {status}\r\n\r\n{json.dumps({'error': {'message': message}})}".encode())


async def main(socket: str, model: str, listen: str, *engines: str) -> None:
    named = {int(worker_id): address for worker_id, address in (engine.split("=", 1) for engine in engines)}
    host, port = listen.rsplit(":", 1)
    async with AsyncClient(socket, Options(name="example")) as client:
        await client.connect()  # learns the workers
        server = await asyncio.start_server(Gateway(client, model, named).serve, host, int(port))
        print("listening on {}:{}".format(*server.sockets[0].getsockname()[:2]), flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(f"usage: {sys.argv[0]} SOCKET MODEL HOST:PORT ID=HOST:PORT ...")
    asyncio.run(main(*sys.argv[1:]))
