"""An engine for scripts/chaos: a real publisher over the cache of model_engine.py, told what to do on stdin.

It publishes at its rate from the start. A line `quiet N` makes it publish N batches more and stop; the
answer is {"last_seq", "blocks", "digest"}, a line on stdout. It ends with its stdin.
"""

import hashlib
import json
import os
import sys
import threading
import time

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import model_engine  # noqa: E402
from workload import Workload  # noqa: E402

BLOCK_SIZE = 16
VERSIONS = {"vllm": "0.33.0", "sglang": "0.5.23"}
BIND_PATIENCE_S = 10


class Settings:
    """What model_engine.py and workload.py read; the same for the engine and for who computes its truth."""

    block_size, capacity, topic, bytes_hashes, dp_rank = BLOCK_SIZE, 256, "", False, 0
    salt_ratio, lora_ratio, dup_ratio, clear_every = 0.2, 0.2, 0.1, 300

    def __init__(self, engine, seed, worker, life, buffer_steps=0, ports=(0, 0)):
        self.engine, self.version, self.seed = engine, VERSIONS[engine], seed
        self.life, self.buffer_steps = f"{worker}/{life}", buffer_steps
        self.endpoint = f"tcp://*:{ports[0]}"
        self.replay_endpoint = f"tcp://*:{ports[1]}" if ports[1] else ""

    def workload(self):
        return Workload(self, self.life)


def digest(blocks):
    """Equal for equal contents."""
    return hashlib.sha256(b"".join(sorted(blocks))).hexdigest()


def bind(engine):
    import zmq
    deadline = time.monotonic() + BIND_PATIENCE_S
    while True:
        try:
            return engine.publisher()
        except zmq.ZMQError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def main():
    told = json.loads(sys.argv[1])
    rate = told.pop("rate")
    settings = Settings(**told)
    engine = model_engine.Engine(settings, settings.workload())
    publisher, steps, commands = bind(engine), engine.steps(), []

    def listen():
        for line in sys.stdin:
            commands.append(int(line.split()[1]))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    published = 0

    def publish():
        publisher.publish(engine.batch(time.time(), next(steps)))
        del engine.asked[:-64]

    while True:
        if not commands:
            publish()
            published += 1
            time.sleep(1 / rate)
        elif (more := commands.pop()) >= 0:
            for _ in range(more):
                publish()
            published += more
            while publisher._event_queue.unfinished_tasks:
                time.sleep(0.01)
            cache = engine.model.cache
            print(json.dumps({"last_seq": published - 1, "blocks": len(cache.blocks), "digest": digest(cache.blocks)}), flush=True)
            threading.Event().wait()


if __name__ == "__main__":
    main()
