#!/usr/bin/env python3
"""Asks a daemon for a worker, books it, and ends the request: what a gateway does for each request.

    python examples/route.py SOCKET MODEL 1,2,3
"""

import asyncio
import sys

from kvrouted import AsyncClient, Options, RouteRequest


async def main(socket: str, model: str, prompt: str) -> None:
    tokens = [int(token) for token in prompt.split(",")]
    async with AsyncClient(socket, Options(name="my-gateway")) as client:
        reply = await client.route(RouteRequest(model=model, tokens=tokens, book="request-1"))
        try:
            print("send the prompt to worker", reply.best.worker if reply.best else "none")
            await client.prefill_complete(reply.booking)  # when the first token has come
        finally:
            await client.free(reply.booking)  # when the request has ended


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(f"usage: {sys.argv[0]} SOCKET MODEL 1,2,3")
    asyncio.run(main(*sys.argv[1:]))
