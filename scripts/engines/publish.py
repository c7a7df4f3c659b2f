#!/usr/bin/env python3
"""Publishes KV-cache events with an engine's own code, without a GPU.

From the engine's package: the prefix cache that decides which blocks are stored and evicted, the block hashes,
the event types, and the ZeroMQ publisher with its sequence numbers and replay socket. From this script: the
requests, and a loop that drives the cache as the scheduler does.

For versions whose cache this script cannot drive, or with --cache ours, the cache is simulated too; the stages
show it ("cache": "ours"). --drop, --restart, --dup-ratio and others cause faults.

It waits for subscribers, publishes --batches batches, writes what the engine's own cache then holds, and
keeps serving. On each SIGUSR1 it publishes --phase2 more batches and writes again.
One JSON line on stdout for each stage: {"stage": "listening" | "published", "last_seq", "cached_blocks", ...}.

  --truth FILE    {"last_seq", "queries": [{"tokens", "salt", "lora", "device_blocks", "host_blocks"}]}: for sampled
                  prompts, the number of leading blocks in the engine's own cache, and of those that follow in its
                  host memory. Earlier samples keep their places.
  --prompts FILE  the same prompts, one JSON object a line, as `kvrouted query --batch` reads them

Run it with the environment that scripts/engines/fetch makes: .../venv/bin/python scripts/engines/publish.py.
Exit: 0 done or told to stop, 64 wrong usage, 69 fetch has not been run or a part is missing.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import faults  # noqa: E402

VERSIONS = {"vllm": "0.33.0", "sglang": "0.5.23"}
# Versions whose own cache the modules here drive.
CACHES_DRIVEN = {"vllm": ("0.20.0", "0.22.0", "0.24.0", "0.28.0", "0.33.0"), "sglang": ("0.5.23",)}
WINDOWS_DRIVEN = ("0.22.0", "0.24.0", "0.28.0", "0.33.0")
OFFLOADING_DRIVEN = ("0.33.0",)
BIND_PATIENCE_S = 10
SAMPLES = 48
ASKED_KEPT = 4096


class Usage(argparse.ArgumentParser):
    def error(self, message):
        self.print_usage(sys.stderr)
        self.exit(64, f"publish.py: {message}\n")


def arguments():
    parser = Usage(prog="publish.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--engine", choices=sorted(VERSIONS), required=True)
    add("--version", help="version of the engine (default: vllm 0.33.0, sglang 0.5.23)")
    add("--endpoint", default="tcp://*:5557", help="where to publish (default %(default)s). In both engines a * binds, any other address connects; dp-rank is added to the port")
    add("--replay-endpoint", default="tcp://*:5657", help="where to answer replay requests; '' for no replay socket (default %(default)s)")
    add("--load-endpoint", default="", help="SGLang: where to report the load (default: no reports)")
    add("--topic", default="", help="topic frame of every batch (default none)")
    add("--dp-rank", type=int, default=0, help="data-parallel rank (default %(default)s)")
    add("--buffer-steps", type=int, default=10_000, help="batches kept for replay (default %(default)s)")
    add("--batches", type=int, default=300, help="batches to publish (default %(default)s)")
    add("--phase2", type=int, default=300, metavar="N", help="batches published on each SIGUSR1 (default %(default)s)")
    add("--rate", type=float, default=300, help="batches in a second; 0 for as fast as possible (default %(default)s)")
    add("--capacity", type=int, default=256, help="capacity of the cache in blocks (default %(default)s)")
    add("--block-size", type=int, default=16, help="tokens per block (default %(default)s)")
    add("--seed", default="1", help="equal seeds give equal requests (default %(default)s)")
    add("--salt-ratio", type=float, default=0, help="share of requests with a cache salt (default %(default)s)")
    add("--lora-ratio", type=float, default=0, help="share of requests with a LoRA adapter (default %(default)s)")
    add("--dup-ratio", type=float, default=0, help="share of requests that repeat one and end on a block (default %(default)s)")
    add("--anew-ratio", type=float, default=0, help="share of requests that do not read the cache, as with prompt_logprobs (vLLM; default %(default)s)")
    add("--clear-every", type=int, default=0, help="clear the cache after this many requests; 0 for never (default %(default)s)")
    add("--cache", choices=("engine", "ours"), help="the prefix cache: the engine's own, or a simulated one (default: the engine's, if this script can drive it)")
    add("--window", type=int, default=0, metavar="TOKENS", help="a model with sliding windows of TOKENS tokens beside full attention (vLLM; default: full attention only)")
    add("--chunk", type=int, default=1 << 20, metavar="TOKENS", help="with --window: compute at most TOKENS tokens of a prompt in a step (default: all)")
    add("--offload", type=int, default=0, metavar="N", help="vLLM's offloading connector, with room for N blocks in host memory; each third --clear-every clears them too (default: none)")
    add("--offload-chunk", type=int, default=1, metavar="N", help="with --offload: blocks that are offloaded as one (default %(default)s)")
    add("--offload-hashes-only", action="store_true", help="with --offload: without self_describing_kv_events")
    add("--bytes-hashes", action="store_true", help="whole digests as block hashes instead of 64 bits (vLLM)")
    add("--drop", type=int, default=0, metavar="N", help="lose N batches on the way, but keep them in the replay buffer (default %(default)s)")
    add("--drop-run", type=int, default=1, metavar="R", help="lose R batches in a row (default %(default)s)")
    add("--restart", type=int, default=0, metavar="B", help="restart after B batches: empty cache, sequence number 0, no announcement (default never)")
    add("--restart-lossy", action="store_true", help="with --restart: do not wait for subscribers, so that batches get lost")
    add("--wait-conns", type=int, default=0, help="subscriptions to wait for before the first batch (default %(default)s)")
    add("--wait-timeout", type=float, default=60, metavar="S", help="give up waiting after S seconds (default %(default)s)")
    add("--truth", metavar="FILE", help="see above")
    add("--prompts", metavar="FILE", help="see above")
    add("--linger", type=float, default=-1, metavar="S", help="stop after serving for S seconds; -1 for never (default)")
    options = parser.parse_args()
    options.version = options.version or VERSIONS[options.engine]
    is_driven = options.version in CACHES_DRIVEN[options.engine]
    options.cache = options.cache or ("engine" if is_driven else "ours")
    if options.cache == "engine" and not is_driven:
        parser.error(f"the cache of {options.engine} {options.version} is not driven here: --cache ours")
    if options.bytes_hashes and options.engine != "vllm":
        parser.error("--bytes-hashes: SGLang has none")
    if options.window and (options.engine != "vllm" or options.cache != "engine" or options.version not in WINDOWS_DRIVEN):
        parser.error(f"--window: only with vLLM's own cache, of {' or '.join(WINDOWS_DRIVEN)}")
    if options.offload and (options.engine != "vllm" or options.cache != "engine" or options.version not in OFFLOADING_DRIVEN):
        parser.error(f"--offload: only with vLLM's own cache, of {' or '.join(OFFLOADING_DRIVEN)}")
    if options.offload and options.window:
        parser.error("--offload is not driven with --window")
    if options.anew_ratio and (options.engine != "vllm" or options.cache != "engine"):
        parser.error("--anew-ratio: only with vLLM's own cache")
    if options.load_endpoint and (options.engine != "sglang" or options.cache != "engine" or options.restart):
        parser.error("--load-endpoint: only with SGLang's own cache, and without --restart")
    if options.restart and not options.restart < options.batches:
        parser.error("--restart must be below --batches")
    if options.capacity < 64 or options.block_size < 1 or options.batches < 1:
        parser.error("--capacity must be at least 64, --block-size and --batches at least 1")
    return options


def see_subscriptions():
    """Makes the publisher's socket an XPUB: to subscribers the same, but subscriptions can be read here."""
    import zmq
    plain = zmq.Context.socket

    def socket(context, kind, *args, **kwargs):
        return plain(context, zmq.XPUB if kind == zmq.PUB else kind, *args, **kwargs)

    zmq.Context.socket = socket


def wait_for_subscriptions(socket, wanted, timeout_s, stop):
    """Returns how many came. The publisher's thread does not touch its socket before the first batch."""
    seen, deadline = 0, time.monotonic() + timeout_s
    while seen < wanted and time.monotonic() < deadline and not stop.is_set():
        if socket.poll(50) and socket.recv()[:1] == b"\x01":
            seen += 1
    return seen


def sample(engine, workload):
    """Prompts from the first to the last, dense at the end; shared prefixes; other tenants' view of both."""
    from workload import Prompt
    asked = engine.asked
    chosen = asked[-SAMPLES // 2:] + asked[:-SAMPLES // 2:max(1, len(asked) // (SAMPLES // 2))]
    chosen += [Prompt(prefix) for prefix in workload.prefixes]
    chosen += [Prompt(p.tokens, "nobody", p.lora) for p in asked[-4:]]
    chosen += [Prompt(p.tokens, p.salt, None) for p in asked[-SAMPLES // 2:] if p.lora]
    chosen += [Prompt(p.tokens, None, p.lora) for p in asked[-SAMPLES // 2:] if p.salt]
    chosen.append(Prompt([1] * (4 * workload.block_size)))
    return chosen


def write(path, text):
    """Whole or not at all: a reader never sees half a file."""
    with open(path + ".part", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(path + ".part", path)


class Run:
    """One publisher's life: batches so far, prompts sampled so far."""

    def __init__(self, options, make_engine, workload, stop):
        self.options, self.make_engine, self.workload, self.stop = options, make_engine, workload, stop
        self.sampled = []
        self.incarnation = -1
        self.begin()

    def begin(self):
        """An engine that knows nothing, and its publisher."""
        o = self.options
        self.incarnation += 1
        self.engine = self.make_engine()
        self.publisher = self.bind()
        self.subscriptions = self.publisher._pub
        lives = [o.restart, o.batches - o.restart] if o.restart else [o.batches]
        lost = faults.sequences_lost(o.drop, o.drop_run, lives[self.incarnation], f"{o.seed}/{self.incarnation}")
        if lost:
            self.publisher._pub = faults.LossySocket(self.publisher._pub, lost)
        self.steps = self.engine.steps()
        self.batches = 0

    def bind(self):
        """The former publisher's ports may not be free yet."""
        import zmq
        deadline = time.monotonic() + BIND_PATIENCE_S
        while True:
            try:
                return self.engine.publisher()
            except zmq.ZMQError:
                if self.incarnation == 0 or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def wait_for_subscriptions(self):
        o = self.options
        seen = wait_for_subscriptions(self.subscriptions, o.wait_conns, o.wait_timeout, self.stop)
        if seen < o.wait_conns:
            print(f"publish.py: {seen} of {o.wait_conns} subscriptions came in {o.wait_timeout} s", file=sys.stderr)

    def say(self, stage, **more):
        o = self.options
        print(json.dumps({"stage": stage, "engine": o.engine, "version": o.version, "cache": o.cache,
                          "endpoint": self.publisher._endpoint, "replay_endpoint": self.publisher._replay_endpoint,
                          **more}), flush=True)

    def publish_first(self):
        o = self.options
        self.wait_for_subscriptions()
        if o.restart:
            self.publish(o.restart)
            self.sampled += sample(self.engine, self.workload)
            self.publisher.shutdown()
            self.begin()
            if not o.restart_lossy:
                self.wait_for_subscriptions()
        self.publish(o.batches - o.restart)
        self.report()

    def publish_more(self):
        self.publish(self.options.phase2)
        self.report()

    def publish(self, count):
        begin, first = time.monotonic(), self.batches
        while self.batches < first + count and not self.stop.is_set():
            self.publisher.publish(self.engine.batch(time.time(), next(self.steps)))
            self.batches += 1
            self.say_load()
            del self.engine.asked[:-ASKED_KEPT]
            if self.options.rate > 0:
                self.stop.wait(max(0, begin + (self.batches - first) / self.options.rate - time.monotonic()))
        while self.publisher._event_queue.unfinished_tasks and not self.stop.is_set():
            time.sleep(0.01)

    def say_load(self):
        """Each step, and while nothing happens: SGLang's publisher holds back what is not new."""
        if self.options.load_endpoint:
            self.engine.say_load(running=1 + self.batches % 7)

    def report(self):
        self.sampled += sample(self.engine, self.workload)
        self.write_truth()
        self.say("published", batches=self.batches, last_seq=self.batches - 1, incarnation=self.incarnation,
                 lost=getattr(self.publisher._pub, "lost_times", 0), cached_blocks=self.engine.cached_blocks())

    def write_truth(self):
        if self.options.truth:
            host_held = getattr(self.engine, "host_held", lambda _: 0)
            queries = [{"tokens": p.tokens, "salt": p.salt, "lora": p.lora, "device_blocks": self.engine.held(p),
                        "host_blocks": host_held(p)} for p in self.sampled]
            write(self.options.truth, json.dumps({"last_seq": self.batches - 1, "block_size": self.options.block_size,
                                                  "queries": queries}))
        if self.options.prompts:
            lines = (json.dumps({"tokens": p.tokens, "salt": p.salt, "lora": p.lora}) for p in self.sampled)
            write(self.options.prompts, "".join(line + "\n" for line in lines))


def main():
    options = arguments()
    stop, again = threading.Event(), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    signal.signal(signal.SIGUSR1, lambda *_: again.set())
    try:
        import loader
        from workload import Workload
        driven = "vllm_windows" if options.window else "vllm_offload" if options.offload else options.engine
        module = __import__(f"{driven}_engine" if options.cache == "engine" else "model_engine")
        see_subscriptions()
        workload = Workload(options)
        run = Run(options, lambda: module.Engine(options, workload), workload, stop)
    except (ImportError, loader.Unavailable) as problem:
        print(f"publish.py: {problem}; scripts/engines/fetch makes the environment this runs in", file=sys.stderr)
        return 69
    run.say("listening")
    run.publish_first()
    deadline = time.monotonic() + options.linger if options.linger >= 0 else float("inf")
    while not stop.is_set() and time.monotonic() < deadline:
        if again.is_set():
            again.clear()
            run.publish_more()
        run.say_load()
        stop.wait(0.05)
    run.publisher.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
