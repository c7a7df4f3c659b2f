"""An engine's own publisher and event types of any version, under a prefix cache of ours.

The caches of older versions have other interfaces than those driven in vllm_engine.py and sglang_engine.py.
What a version puts on the wire is told by its event types; those, the encoding, the sequences and the replay
socket are the version's own. What is stored and evicted is decided here: least recently used, ends first.
"""

import hashlib
import importlib
import inspect
import os
import struct
from collections import OrderedDict
from dataclasses import dataclass

import loader
from workload import Prompt

MODULES = {"vllm": "vllm.distributed.kv_events", "sglang": "sglang.srt.disaggregation.kv_events"}
REAL = {
    "vllm": {MODULES["vllm"], "vllm.envs", "vllm.logger", "vllm.logging_utils"},
    "sglang": {MODULES["sglang"], "sglang.srt.utils.network"},
}


def numbers(version):
    return tuple(int(part) for part in version.split(".")[:3])


class Cache:
    """Blocks by their chained digests, those used least recently first."""

    def __init__(self, capacity):
        self.capacity, self.blocks = capacity, OrderedDict()

    def held(self, chain):
        count = 0
        while count < len(chain) and chain[count] in self.blocks:
            count += 1
        return count

    def compute(self, chain):
        """Returns how many leading blocks were there already, and what had to go."""
        held, evicted, kept = self.held(chain), [], set(chain)
        while len(self.blocks) + len(chain) - held > self.capacity:
            oldest = next(digest for digest in self.blocks if digest not in kept)
            del self.blocks[oldest]
            evicted.append(oldest)
        for digest in reversed(chain):  # a chain's end is always older than its beginning
            self.blocks[digest] = None
            self.blocks.move_to_end(digest)
        return held, evicted


@dataclass
class Step:
    """What one batch tells of: everything cleared, or blocks evicted and the blocks first.. of a prompt stored."""

    is_clear: bool
    prompt: Prompt = None
    chain: list = ()
    first: int = 0
    evicted: list = ()


def chain_of(prompt, size):
    """The digests of a prompt's whole blocks."""
    chain, digest = [], repr((prompt.salt, prompt.lora)).encode()
    for begin in range(0, len(prompt.tokens) - size + 1, size):
        digest = hashlib.sha256(digest + struct.pack(f"<{size}I", *prompt.tokens[begin:begin + size])).digest()
        chain.append(digest)
    return chain


class Model:
    """The requests and the cache. It publishes nothing, so that the same can be computed elsewhere."""

    def __init__(self, options, workload):
        self.options, self.workload = options, workload
        self.cache, self.asked = Cache(options.capacity), []

    def steps(self):
        """Runs requests for ever; yields each step that changed the cache."""
        requests, size = 0, self.options.block_size
        if self.options.engine == "sglang":
            yield Step(is_clear=True)  # its cache is reset when it is made
        while True:
            prompt, decode_blocks = self.workload.next()
            requests += 1
            yield from self._compute(prompt)
            for _ in range(decode_blocks):
                answer = self.workload.tokens(size - len(prompt.tokens) % size)
                prompt = Prompt(prompt.tokens + answer, prompt.salt, prompt.lora)
                yield from self._compute(prompt)
            self.asked.append(prompt)
            if self.options.clear_every and requests % self.options.clear_every == 0:
                self.cache.blocks.clear()
                yield Step(is_clear=True)

    def _compute(self, prompt):
        chain = chain_of(prompt, self.options.block_size)
        first, evicted = self.cache.compute(chain)
        if evicted or first < len(chain):
            yield Step(False, prompt, chain, first, evicted)


class Wire:
    """Block hashes and events as one version sends them."""

    def __init__(self, events, options):
        self.events, self.options, self.version = events, options, numbers(options.version)
        self.fields = set(events.BlockStored.__struct_fields__)
        self.is_chained = options.engine != "sglang" or self.version >= (0, 5, 6)
        # SGLang stores page by page until it joins them.
        self.is_joined = options.engine != "sglang" or self.version >= (0, 5, 18)

    def hash(self, digest, tokens):
        if not self.is_chained:
            return hash(tuple(tokens))
        if self.options.engine == "sglang":
            return int.from_bytes(digest[:8], "big", signed=True)
        if self.options.bytes_hashes:
            return digest
        return int.from_bytes(digest[-8:], "big", signed=self.version < (0, 10, 2))

    def stored(self, prompt, chain, first, last):
        """The store events of blocks first..last of `prompt`."""
        size = self.options.block_size
        step = last - first if self.is_joined else 1
        for begin in range(first, last, step):
            block = lambda at: prompt.tokens[at * size:(at + 1) * size]
            hashes = [self.hash(chain[at], block(at)) for at in range(begin, begin + step)]
            # What hashes pages alone begins a new chain with every node of its tree.
            above = begin if self.is_chained or begin > first else 0
            parent = self.hash(chain[above - 1], block(above - 1)) if above else None
            yield self._store(prompt, hashes, parent, begin, prompt.tokens[begin * size:(begin + step) * size])

    def _store(self, prompt, hashes, parent, begin, tokens):
        known = {"medium": "GPU", "lora_name": prompt.lora, "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
        if prompt.salt and begin == 0 and "extra_keys" in self.fields:
            known["extra_keys"] = [(prompt.salt,)] + [None] * (len(hashes) - 1)
        known["cache_salt"] = prompt.salt
        more = {name: value for name, value in known.items() if name in self.fields}
        kind = self.events.BlockStored
        if prompt.salt and hasattr(self.events, "BlockStoredWithMetadata"):
            kind = self.events.BlockStoredWithMetadata
            more["metadata"] = self.events.BlockStoredMetadata(cache_salt=prompt.salt)
        return kind(block_hashes=hashes, parent_block_hash=parent, token_ids=tokens, block_size=self.options.block_size,
                    lora_id=None, **more)

    def removed(self, hashes):
        more = {"medium": "GPU", "group_idx": 0}
        fields = self.events.BlockRemoved.__struct_fields__
        return self.events.BlockRemoved(block_hashes=hashes, **{k: v for k, v in more.items() if k in fields})


class Engine:
    """The interface of the other engines."""

    def __init__(self, options, workload):
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        loader.install(options.engine, options.version, REAL[options.engine])
        self.module = importlib.import_module(MODULES[options.engine])
        self.options, self.wire = options, Wire(self.module, options)
        self.model = Model(options, workload)
        self.asked = self.model.asked
        self.names = {}  # of the blocks held, by digest

    def publisher(self):
        o, kind = self.options, self.module.ZmqEventPublisher
        takes = inspect.signature(kind).parameters
        rank = {name: o.dp_rank for name in ("data_parallel_rank", "attn_dp_rank") if name in takes}
        return kind(endpoint=o.endpoint, replay_endpoint=o.replay_endpoint or None, buffer_steps=o.buffer_steps,
                    topic=o.topic, **rank)

    def batch(self, time_s, events):
        return self.module.KVEventBatch(ts=time_s, events=events)

    def steps(self):
        """The events of each step."""
        return map(self.events, self.model.steps())

    def held(self, prompt):
        """Leading whole blocks of `prompt` in the cache."""
        return self.model.cache.held(chain_of(prompt, self.options.block_size))

    def cached_blocks(self):
        return len(self.model.cache.blocks)

    def events(self, step):
        if step.is_clear:
            self.names.clear()
            return [self.module.AllBlocksCleared()]
        size, events = self.options.block_size, []
        if step.evicted:
            events.append(self.wire.removed([self.names.pop(digest) for digest in step.evicted]))
        for at in range(step.first, len(step.chain)):
            self.names[step.chain[at]] = self.wire.hash(step.chain[at], step.prompt.tokens[at * size:(at + 1) * size])
        if step.first < len(step.chain):
            events += self.wire.stored(step.prompt, step.chain, step.first, len(step.chain))
        return events
